# SPDX-License-Identifier: Apache-2.0
"""GPU time of one draft step, the plugin's and vLLM's own, in one engine and in turns.

    python benchmarks/draft_step.py [--width shard full] [--draft-vocab 32000 163840]
        [--drafter llama mla] [--batch 1 8 32] [--ctx 512] [--tp 2 [--no-p2p] [--replicated]]
        [--together 4] [--out ROWS]

A draft step is one token a request: position, slot and length of the token, the drafter's layer
over the paged KV cache, the head, the draft id. A real engine (V1 runner) holds a drafter with
random weights and a small target, and its worker runs both sides from the same inputs: stock's as
`propose` runs it (its update of slots and lengths, the compiled model, `compute_logits` with its
scatter, argmax), ours as the drafting loop does (`DraftForward` with `PagedAttend`, `next_step`).

How it is timed: `--steps` draft steps of a side in ONE CUDA graph, each from the last one's
results, the graphs of the sides replayed in turns, CUDA events around each. Stock's server launches
a step piece by piece; in one graph nothing of that time counts, nor the kernels of its metadata
builder, so what is compared is the work of the GPU alone. `--profile` adds a row with the kernels
of a step as stock's server launches it.

Checked before it is timed: from the same inputs both draft the same ids, except where stock's two
best logits are nearer than bf16 can tell, and the hidden states agree. What is not right has no
row, and the exit code is 1.

`--width shard` is a rank of TP=8 without its collectives: 8 heads, an eighth of the MLP and of the
head's rows. A drafter of 32,000 ids scatters its logits into all 163,840 columns, as each rank does
once it has gathered them. One of 163,840 has an eighth of the columns: stock's argmax over all of
them, which a rank does, is left out, to stock's favour.

With `--tp 2` a drafter of two such shares, or a full one, is spread over two GPUs, with the
collectives of both sides in their graphs; `--replicated` has it whole on each
("draft_tensor_parallel_size": 1), again for both sides. The ranks begin each graph together, have
to draft the same, and the times are the first one's.

`floor_us`: the bytes of the weights and the KV cache that a step reads, over the copy bandwidth of
the same run. `--together`, `--turn`: as in step_time.py. `--dry-run`: tiny, on a vLLM for the CPU,
checked and not timed; the tests' vLLM for the CPU has what it needs.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import itertools
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import rows  # noqa: E402
from benchmarks.step_time import (  # noqa: E402
    LOG,
    MARK,
    add_ranks,
    rank_arguments,
    rank_environment,
    ranks_of,
    stream,
)

VOCABULARY = 163840
TARGET_LAYERS = 5
AUX_LAYERS = [2, 3, 4]
# Share of the best logit: what is nearer to it may be drafted in its place. Bfloat16 keeps 8 bits,
# and a hidden state is the sum of thousands of such products.
TIE = 0.03
HIDDEN_ERROR = 0.03
CHECKED = 96  # Drafts a cell, at least.
ROUNDS = 40
BLOCK = 64
WIDTHS: dict[str, dict[str, Any]] = {
    "shard": {"heads": 8, "intermediate": 2304, "ranks": 8, "hidden": 7168, "target_mlp": 2304},
    "full": {"heads": 64, "intermediate": 18432, "ranks": 1, "hidden": 7168, "target_mlp": 2304},
    # For --dry-run.
    "tiny": {
        "heads": 2, "intermediate": 96, "ranks": 8, "hidden": 128, "target_mlp": 64,
        "vocabulary": 2048,
    },
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--width", nargs="+", default=["shard", "full"], choices=list(WIDTHS))
    parser.add_argument("--draft-vocab", type=int, nargs="+", default=[32000, VOCABULARY])
    parser.add_argument("--drafter", nargs="+", default=["llama"], choices=["llama", "mla"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ctx", type=int, nargs="+", default=[512])
    parser.add_argument("--kv", default="auto", help="kv_cache_dtype")
    parser.add_argument("--backend", default="FLASH_ATTN_MLA", help="of the target, an MLA drafter")
    parser.add_argument(
        "--local-argmax", action="store_true", help="stock with use_local_argmax_reduction (mla)"
    )
    add_ranks(parser)
    parser.add_argument("--replicated", action="store_true", help="the drafter whole on each rank")
    parser.add_argument("--steps", type=int, default=4, help="draft steps of a graph")
    parser.add_argument("--profile", action="store_true", help="a row of kernels a cell")
    parser.add_argument("--together", type=int, default=1, help="engines that start at once")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no engine after these")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds that one engine gets")
    parser.add_argument("--turn", type=Path, help="a lock file, for several runs at a time")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # The process of one engine.
    options = parser.parse_args()
    if options.engine is not None:
        serve(json.loads(options.engine))
        return 0
    if options.dry_run:
        options.width, options.draft_vocab = ["tiny"], [512, 2048]
        options.batch, options.ctx = [1, 3], [70]
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Every engine; 1 if one did not start, or a cell failed or was wrong."""
    started = time.monotonic()
    bad: list[str] = []
    saying = threading.Lock()
    with tempfile.TemporaryDirectory() as scratch:
        ones = []
        for width, drafter, vocabulary in itertools.product(
            options.width, options.drafter, options.draft_vocab
        ):
            folder = Path(scratch) / f"{width}-{drafter}-{vocabulary}"
            make_pair(folder, sizes(width, options.tp), drafter, vocabulary)
            ones.append(
                {
                    "width": width, "drafter": drafter, "draft_vocab": vocabulary,
                    "kv": options.kv, "backend": options.backend, "steps": options.steps,
                    "local_argmax": options.local_argmax, "tp": options.tp,
                    "p2p": not options.no_p2p, "replicated": options.replicated,
                    "cells": list(itertools.product(options.ctx, options.batch)),
                    "profile": options.profile, "dry_run": options.dry_run,
                    "folder": str(folder), "root": str(ROOT),
                    "turn": str(options.turn or Path(scratch) / "turn"),
                }
            )  # fmt: skip
        print(f"{len(ones)} models made in {time.monotonic() - started:.0f} s", flush=True)

        def measured(one: dict[str, Any]) -> None:
            names = ("width", "drafter", "draft_vocab", "kv", "backend", "local_argmax")
            about = {name: one[name] for name in names} | ranks_of(one)
            if one["tp"] > 1:
                about["replicated"] = one["replicated"]
            lines: list[str] = []
            cells = 0

            def each(line: str) -> None:
                nonlocal cells
                if not line.startswith(MARK):
                    lines.append(line)
                    return
                cells += 1
                row = {**about, **json.loads(line.removeprefix(MARK))}
                with saying:
                    print(describe(row), flush=True)
                    if "failed" in row or "wrong" in row:
                        bad.append(describe(row))
                    elif options.out is not None:
                        logged = dict.fromkeys(
                            text.strip()[-400:] for text in lines if LOG.search(text)
                        )
                        rows.append(options.out, {**row, "log": list(logged)[:12]})

            if time.monotonic() - started > options.seconds:
                bad.append(f"{about}: no time left for it")
                return
            command = [sys.executable, __file__, "--engine", json.dumps(one)]
            stream(command, environment(one), each, options.limit)
            if cells < len(one["cells"]):
                with saying:
                    bad.append(f"{about}: {cells} of {len(one['cells'])} cells")
                    print(f"{about}: {cells} cells; {''.join(lines)[-6000:]}", flush=True)

        with ThreadPoolExecutor(options.together) as pool:
            list(pool.map(measured, ones))
    print(f"{time.monotonic() - started:.0f} s; {len(bad)} failed or wrong", *bad, sep="\n  ")
    return int(bool(bad))


def describe(row: dict[str, Any]) -> str:
    """A line for the screen."""
    words = f"{row['width']} {row['drafter']} {row['draft_vocab']} b{row.get('batch')} "
    if "tp" in row:
        words += f"tp {row['tp']}{' replicated' * row['replicated']}{' no p2p' * (not row['p2p'])} "
    words += f"ctx {row.get('ctx')}: "
    if "failed" in row:
        return words + row["failed"]
    words += f"same {row['same']}/{row['compared']} (near ties {row['tied']}), "
    words += f"hidden error {row['hidden_error']:.1e}"
    if "wrong" in row:
        return words + f" WRONG: {row['wrong']}"
    if "ours" in row:
        ours, stock = row["ours"]["us"]["median"], row["stock"]["us"]["median"]
        words += f"; ours {ours:.1f} us, stock {stock:.1f} us, {row['stock_over_ours']:.2f}x, "
        words += f"floor {row['floor_us']:.1f} us ({row['ours']['share']:.0%} of ours)"
    if "kernels" in row:
        words += "".join(f"\n    {n:5} {us:8.1f} us  {name}" for name, n, us in row["kernels"])
    return words


# The models.


def sizes(width: str, tp: int) -> dict[str, Any]:
    """Of a drafter on `tp` ranks: a share of `--width shard` for each of them."""
    size = WIDTHS[width]
    shares = 1 if size["ranks"] == 1 else tp
    return {
        "vocabulary": VOCABULARY,
        **size,
        **{name: size[name] * shares for name in ("heads", "intermediate", "target_mlp")},
        "ranks": size["ranks"] // shares,
    }


def make_pair(folder: Path, size: dict[str, Any], drafter: str, draft_vocab: int) -> None:
    """The config of a target with dense layers, and a drafter with random weights.

    `size` is as :func:`sizes` has it. The head's rows differ in length, so that few of the largest
    logits are near ties.
    """
    import torch
    from safetensors.torch import save_file

    from benchmarks.check_against_vllm import LLAMA_DRAFTER, MLA_DRAFTER, TARGET
    from vllm_kimi_eagle3.checkpoint.drafter import TargetShape, read_drafter
    from vllm_kimi_eagle3.checkpoint.drafter_tensors import expected_tensors

    every = size["vocabulary"]
    columns = draft_vocab // size["ranks"]
    vocabulary = columns if draft_vocab == every else every
    common = {
        "hidden_size": size["hidden"], "vocab_size": vocabulary,
        "num_attention_heads": size["heads"], "num_key_value_heads": size["heads"],
    }  # fmt: skip
    target = {
        **TARGET, **common, "num_hidden_layers": TARGET_LAYERS,
        "first_k_dense_replace": TARGET_LAYERS,  # No experts: nothing here is measured of it.
        "intermediate_size": size["target_mlp"],
    }  # fmt: skip
    config = {
        **(LLAMA_DRAFTER if drafter == "llama" else MLA_DRAFTER), **common,
        "intermediate_size": size["intermediate"], "draft_vocab_size": columns,
        "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
    }  # fmt: skip
    for name, text in (("target", target), ("drafter", config)):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(text))
    read = read_drafter(config, TargetShape(TARGET_LAYERS, size["hidden"], vocabulary))
    assert read is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(1)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    tensors = {}
    for name, want in expected_tensors(read.expected).items():
        shape = want.shape
        if name == "embed_tokens.weight":
            continue  # The target's serves.
        if name == "d2t":
            ids = torch.randperm(vocabulary, generator=generator, device=device)[:columns]
            tensors[name] = (ids.sort().values - torch.arange(columns, device=device)).cpu()
            continue
        values = normal(*shape)
        if len(shape) == 1:
            values = 1 + 0.2 * values
        else:
            values *= shape[-1] ** -0.5
        if name == "lm_head.weight":
            values *= (0.5 * normal(shape[0], 1)).exp()
        tensors[name] = values.bfloat16().cpu()
    save_file(tensors, folder / "drafter" / "model.safetensors")
    if device == "cuda":
        torch.cuda.empty_cache()


# The process of an engine.


def environment(one: dict[str, Any]) -> dict[str, str]:
    """Of an engine's process."""
    found = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # For collective_rpc with a function.
        **rank_environment(one),
    }
    if one["dry_run"]:
        found |= {
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "",
            # The tests' own attention, over a cache that the kernels can read.
            "CPU_PAGED_ATTENTION": "1",
        }  # fmt: skip
        paths = [str(ROOT), str(ROOT / "tests" / "hosts" / "shim"), found.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if one["drafter"] == "llama":
            # A Llama drafter beside an MLA target finds no common block size on the CPU.
            found["VLLM_MLA_DISABLE"] = "1"
    return found


def serve(one: dict[str, Any]) -> None:
    """Starts the engine, and measures in its worker when it is its turn."""
    batches = sorted({batch for _, batch in one["cells"]})
    longest = max(ctx for ctx, _ in one["cells"])
    folder = Path(one["folder"])
    with open(one["turn"], "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_SH)  # With the others that start, and none that is measured.
        from vllm import LLM
        from vllm.config.load import LoadConfig

        speculative: dict[str, Any] = {
            "method": "eagle3",
            "model": str(folder / "drafter"),
            "num_speculative_tokens": 3,
            # With dummy weights a drafter would share the target's head.
            "draft_load_config": LoadConfig(load_format="safetensors"),
        }
        if one["local_argmax"]:
            speculative["use_local_argmax_reduction"] = True
        if one["replicated"]:
            speculative["draft_tensor_parallel_size"] = 1
        arguments: dict[str, Any] = {
            "model": str(folder / "target"),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": longest + 1024,
            "max_num_seqs": batches[-1],
            "max_num_batched_tokens": 2048,
            "kv_cache_dtype": one["kv"],
            "speculative_config": speculative,
            # Both sides are run by this file, and stock's is vLLM's own, its attention too.
            "additional_config": {"kimi_eagle3": {"drafting": False, "attention": False}},
            **rank_arguments(one),
        }
        if one["dry_run"]:
            arguments |= {"dtype": "float32", "enforce_eager": True}
        else:
            tokens = max(batch * (ctx + 4 * BLOCK) for ctx, batch in one["cells"]) + 2048
            heads = sizes(one["width"], one["tp"])["heads"]
            heads //= 1 if one["replicated"] else one["tp"]
            per_token = 2 * 576 * TARGET_LAYERS
            per_token += 2 * 576 if one["drafter"] == "mla" else 2 * 2 * heads * 128
            speculative["attention_backend"] = (
                "FLASH_ATTN" if one["drafter"] == "llama" else one["backend"]
            )
            arguments |= {
                "block_size": BLOCK,
                "attention_backend": one["backend"],
                "gpu_memory_utilization": 0.05,
                "kv_cache_memory_bytes": int(tokens * per_token * 1.1),
                "compilation_config": {"cudagraph_capture_sizes": batches},
            }
        begun = time.monotonic()
        llm = LLM(**arguments)
        start_s = round(time.monotonic() - begun, 1)
        fcntl.flock(turn, fcntl.LOCK_UN)
        fcntl.flock(turn, fcntl.LOCK_EX)  # Alone, until measuring is over.

        measure(llm, one, start_s)
        del llm  # Its end is not beside another's measurement.
        gc.collect()


def measure(llm: Any, one: dict[str, Any], start_s: float) -> None:
    """Prints a marked line a cell, and then one per profile."""

    def say(call: Callable[..., str], ctx: int, batch: int) -> None:
        try:
            answers = llm.collective_rpc(call, args=(one, ctx, batch), timeout=300)
            row = of_ranks([json.loads(answer) for answer in answers])
        except Exception as error:  # The other cells may be well.
            row = {"failed": f"{type(error).__name__}: {error}"[-2000:]}
        row = {"ctx": ctx, "batch": batch, "start_s": start_s, **row}
        print(MARK + json.dumps(row), flush=True)

    for ctx, batch in one["cells"]:
        say(cell_in_worker, ctx, batch)
    if one["profile"]:  # At the end, since what was profiled once launches slowly afterwards.
        for ctx, batch in one["cells"]:
            say(profile_in_worker, ctx, batch)


def of_ranks(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The first rank's row, or that of one that failed or was wrong."""
    drafted = [row.pop("drafted", None) for row in found]
    for row in found:
        if "failed" in row or "wrong" in row:
            return row
    if any(one != drafted[0] for one in drafted):
        return {**found[0], "wrong": "the ranks' drafts are not the same"}
    return found[0]


# What follows runs in the worker, which gets these two by value.


def cell_in_worker(worker: Any, one: dict[str, Any], ctx: int, batch: int) -> str:
    """A row as JSON."""
    import sys

    sys.path.insert(0, one["root"])
    from benchmarks.draft_step import in_worker

    return in_worker(worker, one, ctx, batch)


def profile_in_worker(worker: Any, one: dict[str, Any], ctx: int, batch: int) -> str:
    """A row of kernels as JSON."""
    import sys

    sys.path.insert(0, one["root"])
    from benchmarks.draft_step import in_worker

    return in_worker(worker, one, ctx, batch, profiled=True)


def in_worker(
    worker: Any, one: dict[str, Any], ctx: int, batch: int, *, profiled: bool = False
) -> str:
    """A cell's row as JSON, or what made it fail."""
    import torch

    try:
        with torch.inference_mode():
            bench = getattr(worker, "_draft_step", None)
            if bench is None:
                bench = worker._draft_step = Bench(worker, one)
            cell = Cell(bench, ctx, batch)
            return json.dumps(cell.profile() if profiled else cell.row())
    except Exception:
        return json.dumps({"failed": traceback.format_exc()[-3000:]})


class Bench:
    """What the cells of an engine share."""

    def __init__(self, worker: Any, one: dict[str, Any]) -> None:
        import torch

        from vllm_kimi_eagle3.drafting.attend import paged_caches
        from vllm_kimi_eagle3.drafting.forward import DraftForward, Unsupported

        self.one = one
        self.drafter = drafter = worker.model_runner.drafter
        self.device = drafter.device
        self.cuda = self.device.type == "cuda"
        self.vllm_config = drafter.vllm_config
        model = drafter.model
        self.model = model.unwrap() if hasattr(model, "unwrap") else model
        self.forward = DraftForward.of(self.model)
        facts = self.forward.attention
        self.page = drafter.block_size
        self.generator = torch.Generator(self.device).manual_seed(3)
        cache = facts.layer.kv_cache
        for part in [cache] if isinstance(cache, torch.Tensor) else cache:
            if part.dtype.itemsize > 1:
                part.normal_(generator=self.generator)
            else:  # fp8, perhaps as bytes: numbers of moderate size.
                part.view(torch.uint8).random_(0x28, 0x40, generator=self.generator)
        try:
            self.caches: Any = paged_caches(facts.layer)
        except Unsupported:
            if self.cuda:
                raise
            self.caches = None  # The CPU's own layout: attention is stock's there.
        if self.caches is not None:
            self.page = self.caches.page_size
        self.pages = getattr(self.caches, "k", None)
        self.pages = self.pages.shape[0] if self.pages is not None else cache_blocks(drafter)
        batches = sorted({batch for _, batch in one["cells"]})
        self.tuned = self.forward.tune(batches)
        self.facts: dict[str, Any] = {}
        self.bandwidth = 0.0
        if self.cuda:
            from benchmarks.gpu import copy_bandwidth, gpu_facts

            self.bandwidth = copy_bandwidth()
            self.facts = gpu_facts()  # Now, with the clocks up.

    def weight_bytes(self) -> int:
        """Of what a draft step reads: the layer and the head, not fc, and not the embedding."""
        left_out = ("embed_tokens", "fc.", "fc_norm", "input_norm", "draft_id_to_target_id")
        return sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in self.model.named_parameters()
            if not any(part in name for part in left_out)
        )

    def kv_bytes(self, tokens: int) -> int:
        """Of so many tokens of the drafter's cache."""
        if self.caches is None:
            return 0
        parts = [part for part in (self.caches.k, self.caches.v) if part is not None]
        return sum(tokens * part[0, 0].numel() * part.element_size() for part in parts)


def cache_blocks(drafter: Any) -> int:
    """How many blocks the drafter's cache has, where its layout is not read."""
    return int(drafter.vllm_config.cache_config.num_gpu_blocks)


class Cell:
    """A batch at a context: the inputs, and both sides' steps over them."""

    def __init__(self, bench: Bench, ctx: int, batch: int) -> None:
        import torch

        from vllm_kimi_eagle3.drafting.attend import PagedAttend, StockAttend

        self.bench, self.ctx, self.batch = bench, ctx, batch
        self.steps = bench.one["steps"]
        device, generator, forward = bench.device, bench.generator, bench.forward
        each = -(-(ctx + self.steps + 1) // bench.page)
        if each * batch > bench.pages - 1:
            raise ValueError(f"{each * batch} blocks wanted, and the cache has {bench.pages}")
        order = torch.randperm(bench.pages - 1, generator=generator, device=device) + 1
        self.table = torch.zeros(
            batch, -(-bench.drafter.max_model_len // bench.page), dtype=torch.int32, device=device
        )
        self.table[:, :each] = order[: batch * each].view(batch, each).int()
        self.hidden = torch.empty(batch, forward.hidden_size, dtype=forward.dtype, device=device)
        self.ids = torch.empty(batch, dtype=torch.int32, device=device)
        self.new_inputs()
        # Ours.
        self.token_ids = torch.zeros(batch, dtype=torch.int32, device=device)
        self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
        self.slots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.drafts = torch.zeros(batch, self.steps, dtype=torch.int64, device=device)
        if bench.caches is None:
            self.attend: Any = StockAttend(forward.attention)
        else:
            numel = PagedAttend.workspace_numel(
                forward.attention, max_batch=batch, query_len=1, device=device
            )
            self.attend = PagedAttend(
                forward.attention, bench.caches, block_table=self.table, seq_lens=self.seq_lens,
                slots=self.slots, query_len=1, max_batch=batch,
                workspace=torch.empty(numel, dtype=torch.float32, device=device),
            )  # fmt: skip
        # Stock's.
        self.stock_ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self.stock_lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self.stock_drafts = torch.zeros(batch, self.steps, dtype=torch.int64, device=device)
        # What the builder plans with lengths is to do for the longest of a graph's steps.
        self.stock_lens.fill_(ctx + self.steps)
        self.metadata = self.build()
        self.reset()

    def new_inputs(self) -> None:
        """Other tokens and hidden states."""
        from_one = self.bench.forward.vocab_size
        self.ids.random_(0, from_one, generator=self.bench.generator)
        self.hidden.normal_(generator=self.bench.generator)

    def reset(self) -> None:
        """Both sides to the start: the token at `ctx` - 1 is the next that is drafted from."""
        self.seq_lens.fill_(self.ctx)
        self.positions.fill_(self.ctx - 1)
        column = (self.ctx - 1) // self.bench.page
        within = (self.ctx - 1) % self.bench.page
        self.slots.copy_(self.table[:, column]).mul_(self.bench.page).add_(within)
        self.token_ids.copy_(self.ids)
        # Stock's step begins with the update.
        self.bench.drafter.positions[: self.batch].fill_(self.ctx - 2)
        self.stock_lens.fill_(self.ctx - 1)
        self.stock_ids.copy_(self.ids)

    def build(self) -> Any:
        """Stock's attention metadata, by its own builder."""
        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        drafter, batch = self.bench.drafter, self.batch
        most = self.ctx + self.steps
        lens = torch.full((batch,), most, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=drafter.arange[: batch + 1],
            query_start_loc_cpu=torch.arange(batch + 1, dtype=torch.int32),
            seq_lens=self.stock_lens,
            num_reqs=batch,
            num_actual_tokens=batch,
            max_query_len=1,
            max_seq_len=most,
            block_table_tensor=self.table,
            slot_mapping=drafter._slot_mapping_buffer[:batch],
            causal=True,
            seq_lens_cpu_upper_bound=lens,
        )
        _, by_layer = drafter.build_per_group_and_layer_attn_metadata(common, draft_index=1)
        return by_layer

    def context(self, tokens: int, mode: Any = None) -> Any:
        """vLLM's forward context of a step; without piecewise graphs if `mode` is None."""
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import set_forward_context

        return set_forward_context(
            self.metadata,
            self.bench.vllm_config,
            num_tokens=tokens,
            cudagraph_runtime_mode=CUDAGraphMode.NONE if mode is None else mode,
            slot_mapping=self.bench.drafter._get_slot_mapping(tokens),
        )

    def stock_step(self, hidden: Any, step: int = 0, *, launched: bool = False) -> tuple[Any, Any]:
        """As an iteration of `propose`: what the head took, and what the next step takes.

        Args:
            hidden: `[batch, hidden_size]`.
            step: the column of `stock_drafts` that is written.
            launched: with its piecewise graphs, and its metadata built again, as served.
        """
        from vllm.v1.spec_decode import llm_base_proposer

        drafter, batch = self.bench.drafter, self.batch
        positions = drafter.positions[:batch]
        tokens, mode = batch, None
        if launched:
            mode, tokens, _ = drafter._determine_batch_execution_and_padding(batch)
        llm_base_proposer.eagle_step_update_slot_mapping_and_metadata(
            positions_1d=positions,
            block_table_tensor=self.table,
            seq_lens=self.stock_lens,
            block_size=self.bench.page,
            max_model_len=drafter.max_model_len,
            out_clamped_positions=positions,
            out_slot_mapping=drafter._slot_mapping_buffer[:tokens],
            input_batch_size=tokens,
        )
        if launched or not self.bench.cuda:
            self.metadata = self.build()
        drafter.input_ids[:batch] = self.stock_ids.int()
        drafter.hidden_states[:batch] = hidden
        with self.context(tokens, mode):
            result = drafter.model(
                input_ids=drafter.input_ids[:tokens],
                positions=drafter.positions[:tokens],
                inputs_embeds=None,
                hidden_states=drafter.hidden_states[:tokens],
            )
        for_head, for_next = result if drafter.model_returns_tuple() else (result, result)
        chosen = drafter._greedy_sample(for_head[:batch])
        self.stock_ids.copy_(chosen)
        self.stock_drafts[:, step].copy_(chosen)
        return for_head[:batch], for_next[:batch]

    def our_step(self, hidden: Any, step: int = 0) -> tuple[Any, Any]:
        """As a step of the drafting loop; results as of :meth:`stock_step`."""
        from vllm_kimi_eagle3.kernels.draft_state import next_step

        forward = self.bench.forward
        for_head, for_next = forward.run(
            self.positions, hidden, self.attend, token_ids=self.token_ids
        )
        next_step(
            forward.keys(for_head), self.positions, self.seq_lens, self.table, self.slots,
            self.token_ids, self.drafts, step, page_size=self.bench.page,
            max_model_len=self.bench.drafter.max_model_len,
        )  # fmt: skip
        return for_head, for_next

    def check(self) -> dict[str, Any]:
        """Both sides' drafts and hidden states from the same inputs, step by step."""
        import torch

        judged, error, drafted = Judged(), 0.0, []
        for _ in range(-(-CHECKED // self.batch) if self.bench.cuda else 4):
            self.new_inputs()
            self.reset()
            head, stock_next = self.stock_step(self.hidden)
            logits = self.bench.drafter.model.compute_logits(head)
            stock_next = stock_next.clone()
            if self.bench.caches is None:
                with self.context(self.batch):
                    _, our_next = self.our_step(self.hidden)
            else:
                _, our_next = self.our_step(self.hidden)
            judged.add(self.drafts[:, 0], logits)
            drafted += self.drafts[:, 0].tolist()
            apart = (our_next.float() - stock_next.float()).norm()
            error = max(error, float(apart / stock_next.float().norm()))
            wanted = torch.full_like(self.seq_lens, self.ctx + 1)
            if not torch.equal(self.seq_lens, wanted):
                return {**judged.row(), "hidden_error": error, "wrong": "lengths"}
        found = {**judged.row(), "hidden_error": float(f"{error:.2e}"), "drafted": drafted}
        if judged.wrong:
            found["wrong"] = f"{judged.wrong} drafts are not stock's, and no near ties"
        elif not error <= HIDDEN_ERROR:
            found["wrong"] = "hidden states"
        return found

    def row(self) -> dict[str, Any]:
        """The check, and if it is passed the times."""
        bench = self.bench
        found = {**bench.facts, **self.check(), "steps_per_graph": self.steps, "tuned": bench.tuned}
        if "wrong" in found or not bench.cuda:
            return found
        graphs = {"ours": self.capture(self.our_step), "stock": self.capture(self.stock_step)}
        found |= self.check_graphs(graphs)
        if "wrong" in found:
            return found
        times = self.measure(graphs)
        read = bench.weight_bytes() + bench.kv_bytes(self.batch * self.ctx)
        floor = read / bench.bandwidth * 1e6
        for name, us in times.items():
            median = rows.spread(us)["median"]
            found[name] = {"us": rows.spread(us), "share": round(floor / median, 3)}
        ratio = found["stock"]["us"]["median"] / found["ours"]["us"]["median"]
        return {
            **found,
            "stock_over_ours": round(ratio, 3),
            "bytes_read": read,
            "floor_us": round(floor, 2),
            "copy_tb_s": round(bench.bandwidth / 1e12, 3),
        }

    def capture(self, step: Callable[..., tuple[Any, Any]]) -> Any:
        """A graph of `steps` draft steps, each from the last one's results."""
        import torch
        from vllm.distributed.parallel_state import graph_capture

        def chain() -> None:
            hidden = self.hidden
            for number in range(self.steps):
                _, hidden = step(hidden, number)

        self.reset()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.reset()
                chain()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.reset()
        graph = torch.cuda.CUDAGraph()
        # Of all ranks together: vLLM's all-reduce exchanges the graph's buffers at its end.
        with (
            graph_capture(device=self.bench.device) as captured,
            torch.cuda.graph(graph, stream=captured.stream),
        ):
            chain()
        return graph

    def check_graphs(self, graphs: dict[str, Any]) -> dict[str, Any]:
        """That a graph drafts, with other inputs, what its steps do one by one."""
        import torch

        judged = {name: Judged() for name in graphs}
        for _ in range(3):
            self.new_inputs()
            self.reset()
            head, _ = self.stock_step(self.hidden)
            logits = self.bench.drafter.model.compute_logits(head)
            for name, drafts in (("ours", self.drafts), ("stock", self.stock_drafts)):
                drafts.zero_()
                self.reset()
                graphs[name].replay()
                torch.cuda.synchronize()
                judged[name].add(drafts[:, 0], logits)
        wrong = {name: one.wrong for name, one in judged.items() if one.wrong}
        chains = float((self.drafts == self.stock_drafts).float().mean())
        found: dict[str, Any] = {"same_in_chains": round(chains, 3)}
        return {**found, "wrong": f"in the graphs: {wrong}"} if wrong else found

    def measure(self, graphs: dict[str, Any]) -> dict[str, list[float]]:
        """Microseconds a step, per side, in turns."""
        import torch
        from vllm.distributed.parallel_state import get_tp_group

        ready = torch.ones(1, device=self.bench.device)

        def once(graph: Any) -> tuple[Any, Any]:
            self.reset()  # Not timed.
            get_tp_group().all_reduce(ready)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            return start, end

        for graph in graphs.values():
            once(graph)
        events = [(name, once(graph)) for _ in range(ROUNDS) for name, graph in graphs.items()]
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for name, (start, end) in events[len(graphs) * 3 :]:
            times[name].append(start.elapsed_time(end) * 1e3 / self.steps)
        return times

    def profile(self) -> dict[str, Any]:
        """The kernels of a step, stock's as its server launches it and ours from the graph."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        found: dict[str, Any] = self.check()
        graph = self.capture(self.our_step)
        kernels: list[list[Any]] = []
        count = 8

        def stock() -> None:
            hidden = self.hidden
            for number in range(self.steps):
                _, hidden = self.stock_step(hidden, number, launched=True)

        for name, run in (("ours", graph.replay), ("stock", stock)):
            self.reset()
            run()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as taken:
                for _ in range(count):
                    self.reset()
                    run()
                torch.cuda.synchronize()
            events = [e for e in taken.key_averages() if e.self_device_time_total > 0]
            per = count * self.steps
            total = sum(event.self_device_time_total for event in events) / per
            found[f"{name}_kernels_us"] = round(total, 2)
            found[f"{name}_kernels"] = round(sum(event.count for event in events) / per, 1)
            kernels += [
                [f"{name}: {event.key[:70]}", round(event.count / per, 2), round(us / per, 2)]
                for us, event in sorted(
                    ((event.self_device_time_total, event) for event in events),
                    key=lambda pair: -pair[0],
                )[:16]
            ]
        return {**self.bench.facts, **found, "kernels": kernels}


class Judged:
    """Counts of drafts that are stock's, that are a near tie, and that are neither."""

    def __init__(self) -> None:
        self.compared = self.same = self.tied = self.wrong = self.clear = 0

    def add(self, drafts: Any, logits: Any) -> None:
        """Drafts `[batch]` beside stock's logits `[batch, vocabulary]`."""
        logits = logits.float()
        best = logits.topk(2, dim=-1).values
        mine = logits.gather(1, drafts.long()[:, None])[:, 0]
        same = drafts == logits.argmax(dim=-1)
        allowed = TIE * best[:, 0].abs()
        near = (best[:, 0] - mine <= allowed) & ~same
        self.compared += len(drafts)
        self.same += int(same.sum())
        self.tied += int(near.sum())
        self.wrong += int((~same & ~near).sum())
        self.clear += int((best[:, 0] - best[:, 1] > allowed).sum())

    def row(self) -> dict[str, int]:
        """For the row; `clear`: drafts of which no other is a near tie."""
        return {n: getattr(self, n) for n in ("compared", "same", "tied", "clear")}


if __name__ == "__main__":
    sys.exit(main())
