# SPDX-License-Identifier: Apache-2.0
"""The MLA decode kernel against vLLM 0.33.0's own op, on the GPU that is there.

    python benchmarks/mla_decode.py --stock FILE [--cells goals] [--seconds 300] [--out ROWS]

FILE is `vllm/v1/attention/ops/triton_decode_attention.py` of vLLM 0.33.0; without it only ours is
timed. One layer, pages of 64 (or `--page`) in random order. A cell is a KV dtype, heads per rank,
batch, context and query tokens per request; those that the project's goals name come first.

Each cell is checked before it is timed: the results of both, over poisoned outputs, against the
float64 reference for the first and the last request. A wrong one is not timed, and the exit code
is 1. Then CUDA graphs of both are replayed in turns. A graph holds as many launches, each with
pages of its own, as make the KV that it reads several times the L2 cache, so that the KV comes from
memory as it does between the layers of a model. A row has medians with the 20th and 80th
percentiles, the copy bandwidth of the same run, and the share of it that reading the KV once takes.

The block table has columns for the longest context of the grid in every cell, and ours is told
no lengths on the host: that is how it runs inside a captured graph. Stock's number of KV splits is
that of its own rule for the very length.

    --cells kv=bf16 heads=8,64 query_len=4    a part of the grid; `goals`, or `all`
    --arch sm_120 --arch sm_90                the launch table of another architecture, in turns
    --config block_n=32,num_warps=8           the table's configuration changed too; repeatable
    --dry-run                                 on a CPU, in Triton's interpreter: small cells that
                                              are checked and not timed
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import rows  # noqa: E402
from benchmarks.gpu import capture, copy_bandwidth, gpu_facts, measure  # noqa: E402
from benchmarks.stock_mla import StockMla, load_stock  # noqa: E402
from tests.kernels.interpreter import exact_numbers, patch_once  # noqa: E402
from vllm_kimi_eagle3.kernels import arch as architectures  # noqa: E402
from vllm_kimi_eagle3.kernels.mla_decode import mla_decode  # noqa: E402
from vllm_kimi_eagle3.kernels.reference import mla_decode_reference  # noqa: E402

R, P, PAGE = 512, 64, 64
SCALE = (128 + 64) ** -0.5
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
STOCK = "stock"
# A graph's launches read so many times as much KV as the L2 cache holds ...
L2_CACHES = 3
# ... if as many suffice; at the smallest cell they read 300 MB.
MOST_LAUNCHES = 1024
MEASURED_MS = 15.0  # Per cell and side.
ROUNDS = (5, 25)
ALLOWED_ERROR = 2e-2
# Sequences of the server: more than 16 share a kernel that is compiled for so many.
MAX_BATCH = 256
CAPABILITIES = {architectures.arch(c).name: c for c in architectures.CAPABILITIES}


@dataclass(frozen=True)
class Cell:
    """One point of the grid."""

    kv: str
    heads: int
    batch: int
    ctx: int
    query_len: int
    page: int = PAGE

    @property
    def kv_bytes(self) -> int:
        """Of the KV cache that one launch attends to."""
        return self.batch * self.ctx * (R + P) * KV_DTYPES[self.kv].itemsize

    @property
    def pages(self) -> int:
        """Of one launch."""
        return self.batch * -(-self.ctx // self.page)

    def launches(self, l2_bytes: int) -> int:
        """In a graph, on a GPU with such a cache; 1 without."""
        return max(1, min(MOST_LAUNCHES, math.ceil(L2_CACHES * l2_bytes / self.kv_bytes)))

    def __str__(self) -> str:
        page = "" if self.page == PAGE else f" page {self.page}"
        return f"{self.kv} h{self.heads} b{self.batch} ctx {self.ctx} q{self.query_len}{page}"


GRID = {
    "kv": ("bf16", "fp8"),
    "query_len": (4, 1, 2, 6),
    "heads": (8, 64, 16),
    "ctx": (30000, 2048, 8192, 512, 131072),
    "batch": (16, 1, 4, 64),
}
SMALL_GRID = {
    "kv": ("bf16", "fp8"), "query_len": (4, 1), "heads": (8, 16), "ctx": (70, 300), "batch": (2,),
}  # fmt: skip
GOALS = [
    Cell("bf16", 8, 16, 30000, 4),
    Cell("bf16", 8, 4, 30000, 4),
    Cell("bf16", 8, 1, 2048, 4),
    Cell("bf16", 64, 16, 30000, 4),
    Cell("fp8", 8, 16, 30000, 4),
    Cell("fp8", 8, 4, 30000, 4),
    Cell("fp8", 8, 1, 2048, 4),
    Cell("fp8", 64, 16, 30000, 4),
    Cell("bf16", 8, 16, 30000, 1),
    Cell("fp8", 8, 16, 30000, 1),
]


@dataclass(frozen=True)
class Side:
    """What is timed: stock (no architecture), or ours with an architecture's table."""

    name: str
    arch: str | None = None
    changes: tuple[tuple[str, Any], ...] = ()

    def config(self, cell: Cell) -> architectures.DecodeConfig:
        """Ours: the launch configuration."""
        table = architectures.arch(CAPABILITIES[self.arch or ""])
        rows_ = cell.heads * cell.query_len
        config = architectures.mla_decode_config(table, rows=rows_, fp8=cell.kv == "fp8")
        return dataclasses.replace(config, **dict(self.changes))


class Pool:
    """Everything that the cells share, allocated once: the caches, the queries, the workspaces."""

    def __init__(
        self, cells: Sequence[Cell], table_width: int, device: str, sms: int, l2_bytes: int
    ) -> None:
        self.device, self.table_width, self.sms = device, table_width, sms
        # The launches of a graph have pages of their own.
        self.pages = max(cell.pages * cell.launches(l2_bytes) for cell in cells)
        self.caches: dict[str, Tensor] = {}
        generator = torch.Generator(device).manual_seed(0)
        for kv in sorted({cell.kv for cell in cells}):
            dtype = KV_DTYPES[kv]
            cache = torch.empty(self.pages, cells[0].page, R + P, dtype=dtype, device=device)
            for part in cache.split(4096):
                part.copy_(torch.randn(part.shape, generator=generator, device=device))
            self.caches[kv] = cache
        self.order = torch.randperm(self.pages, generator=generator, device=device).int()
        most_rows = max(cell.batch * cell.query_len * cell.heads for cell in cells)
        self.q = torch.randn(most_rows, R + P, generator=generator, device=device).bfloat16()
        self.kv_scale = torch.full((1,), 0.75, device=device)

    def arguments(self, cell: Cell, launch: int) -> tuple[list[Tensor], dict[str, Any]]:
        """q, kv_cache, block_table, seq_lens of a cell's n-th launch, and the keywords."""
        rows_ = cell.batch * cell.query_len
        q = self.q[: rows_ * cell.heads].view(rows_, cell.heads, R + P)
        each = cell.pages // cell.batch
        table = torch.zeros(cell.batch, self.table_width, dtype=torch.int32, device=self.device)
        at = torch.arange(cell.pages, device=self.device) + launch * cell.pages
        table[:, :each] = self.order[at % self.pages].view(cell.batch, each)
        lens = torch.full((cell.batch,), cell.ctx, dtype=torch.int32, device=self.device)
        keywords: dict[str, Any] = {"scale": SCALE, "query_len": cell.query_len}
        if cell.kv == "fp8":
            keywords["kv_scale"] = self.kv_scale
        return [q, self.caches[cell.kv], table, lens], keywords


def table_width(cells: Sequence[Cell]) -> int:
    """Columns of every block table: those of the longest context, in whole cache lines."""
    longest = max(-(-cell.ctx // cell.page) for cell in cells)
    return -(-longest // 16) * 16


Call = Callable[[], tuple[Tensor, Tensor]]


def make_calls(
    side: Side, cell: Cell, pool: Pool, stock: Any, workspace: Tensor, launches: int
) -> list[Call]:
    """A graph's launches, each with a block table and outputs of its own."""
    calls: list[Call] = []
    for launch in range(launches):
        tensors, keywords = pool.arguments(cell, launch)
        if side.arch is None:
            calls.append(
                StockMla(
                    stock, *tensors, **keywords, longest=cell.ctx, workspace=workspace, sms=pool.sms
                )
            )
            continue
        q = tensors[0]
        out = torch.empty(*q.shape[:2], R, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], device=q.device)
        more = {
            "workspace": workspace, "out": out, "lse": lse, "config": side.config(cell),
            "max_batch": MAX_BATCH,
        }  # fmt: skip
        calls.append(lambda tensors=tensors, kw={**keywords, **more}: mla_decode(*tensors, **kw))
    return calls


def workspace_elements(side: Side, cell: Cell, sms: int) -> int:
    """float32 elements that a side needs for a cell."""
    if side.arch is None:
        return StockMla.workspace_numel(cell.batch * cell.query_len, cell.heads, cell.ctx, sms)
    # Of the configuration given, which need not be in the table of the GPU that is here.
    programs = sms * side.config(cell).programs_per_sm
    return (programs + cell.batch) * cell.query_len * cell.heads * (R + 1)


def check(call: Call, cell: Cell, pool: Pool, workspace: Tensor) -> tuple[float, float]:
    """The largest errors of the output and of the log-sum-exp, over poisoned buffers; infinite if
    they are not finite."""
    (q, cache, table, lens), keywords = pool.arguments(cell, 0)
    for result in call():  # The first one compiles.
        result.fill_(torch.nan)
    workspace.fill_(torch.nan)
    out, lse = call()
    worst = [0.0, 0.0]
    for request in {0, cell.batch - 1}:
        mine = slice(request * cell.query_len, (request + 1) * cell.query_len)
        one = slice(request, request + 1)
        exact = mla_decode_reference(q[mine], cache, table[one], lens[one], **keywords)
        for index, (ours, wanted) in enumerate(zip((out, lse), exact, strict=True)):
            error = float((ours[mine].double() - wanted).abs().max())
            worst[index] = max(worst[index], error if math.isfinite(error) else math.inf)
    return worst[0], worst[1]


def run_all(calls: Sequence[Call]) -> None:
    """Run them launch by launch, where there shall be no graph."""
    for call in calls:
        call()


class Bench:
    """One run over some cells."""

    def __init__(self, options: argparse.Namespace, sides: Sequence[Side], cells: Sequence[Cell]):
        self.options, self.sides, self.cells = options, sides, cells
        self.stock = load_stock(options.stock) if options.stock else None
        self.device = "cpu" if options.dry_run else "cuda"
        self.sms = architectures.arch_of(torch.device("cpu")).sm_count
        self.l2_bytes = 0
        self.bandwidth: float | None = None
        self.facts: dict[str, Any] = {}
        if self.device == "cuda":
            properties = torch.cuda.get_device_properties(0)
            self.sms, self.l2_bytes = properties.multi_processor_count, properties.L2_cache_size
            self.bandwidth = copy_bandwidth()
            self.facts = gpu_facts()  # Now, with the clocks up.
            print(f"{self.facts}, copy {self.bandwidth / 1e12:.2f} TB/s", flush=True)
        self.pool = Pool(cells, table_width(cells), self.device, self.sms, self.l2_bytes)
        sizes = [workspace_elements(s, cell, self.sms) for s in sides for cell in cells]
        self.workspace = torch.empty(max(sizes), device=self.device)

    def cell(self, cell: Cell) -> dict[str, Any]:
        """Check and time one cell; the row."""
        launches = cell.launches(self.l2_bytes)
        row: dict[str, Any] = {
            **self.facts, **dataclasses.asdict(cell), "graph": self.options.graph,
            "launches_per_graph": launches, "l2_mb": round(self.l2_bytes / 1e6),
            "copy_tb_s": round((self.bandwidth or 0) / 1e12, 3),
        }  # fmt: skip
        runs: dict[str, Callable[[], object]] = {}
        keep = []
        errors: dict[str, float] = {}
        for side in self.sides:
            about: dict[str, Any] = {}
            row[side.name] = about
            try:
                workspace = self.workspace[: workspace_elements(side, cell, self.sms)]
                calls = make_calls(side, cell, self.pool, self.stock, workspace, launches)
                if side.arch is not None:
                    about["config"] = str(side.config(cell))
                errors[side.name], about["lse_error"] = check(calls[0], cell, self.pool, workspace)
                about["error"] = errors[side.name]
                if not self.right(side, errors):
                    about["wrong"] = True
                    continue
                if not self.options.dry_run:
                    runs[side.name] = (
                        capture(calls) if self.options.graph else partial(run_all, calls)
                    )
                    keep.append(calls)
            except Exception as error:  # One launch configuration too large must not end the run.
                about["failed"] = f"{type(error).__name__}: {error}"[:300]
        if runs:
            times = measure(runs, launches, ms=MEASURED_MS, rounds=ROUNDS)
            for name, us in times.items():
                row[name]["us"] = rows.spread(us)
                if self.bandwidth is not None:
                    floor = cell.kv_bytes / self.bandwidth * 1e6
                    row[name]["share"] = round(floor / row[name]["us"]["median"], 3)
                if STOCK in times and name != STOCK:
                    ratio = row[STOCK]["us"]["median"] / row[name]["us"]["median"]
                    row[name]["stock_over_ours"] = round(ratio, 2)
        return row

    @staticmethod
    def right(side: Side, errors: dict[str, float]) -> bool:
        """Within the allowed error and, where stock is there too, twice stock's own."""
        if side.arch is None:
            return True
        return errors[side.name] <= min(ALLOWED_ERROR, 2 * errors.get(STOCK, math.inf))

    def run(self) -> int:
        """All cells within the seconds given; 1 if any was wrong."""
        started, bad, done = time.monotonic(), 0, 0
        for cell in self.cells:
            if time.monotonic() - started > self.options.seconds:
                break
            row = self.cell(cell)
            done += 1
            bad += any({"wrong", "failed"} & row[side.name].keys() for side in self.sides)
            print(describe(cell, row, self.sides), flush=True)
            if self.options.out is not None:
                rows.append(self.options.out, row)
        seconds = time.monotonic() - started
        print(f"{done} of {len(self.cells)} cells in {seconds:.0f} s; {bad} wrong or failed")
        return int(bad > 0)


def describe(cell: Cell, row: dict[str, Any], sides: Sequence[Side]) -> str:
    """A line for the screen."""
    parts = [f"{cell!s:32}"]
    for side in sides:
        about = row[side.name]
        if "us" in about:
            words = f"{about['us']['median']:8.1f} us {about.get('share', 0):4.0%}"
            if "stock_over_ours" in about:
                words += f" {about['stock_over_ours']:5.2f}x"
            words += f" err {about['error']:.1e}"
        elif "failed" in about:
            words = about["failed"][:120]
        else:
            words = f"{'WRONG ' if about.get('wrong') else ''}err {about['error']:.1e}"
        parts.append(f"{side.name}: {words}")
    return " | ".join(parts)


def own_architecture() -> str:
    """The GPU's, asked by another process: one that has touched the GPU cannot be forked."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        major, minor = pool.apply(torch.cuda.get_device_capability)
    return f"sm_{major}{minor}"


def compile_all(sides: Sequence[Side], cells: Sequence[Cell], stock: Path | None) -> None:
    """Fill Triton's cache on the disk from several processes, before this one touches the GPU.

    Each runs the launches that are its own, over requests without tokens.
    """
    workers = min(14, os.cpu_count() or 1)
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=compile_share, args=(sides, cells, stock, i, workers))
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def compile_share(
    sides: Sequence[Side], cells: Sequence[Cell], file: Path | None, share: int, shares: int
) -> None:
    """The launches of one of `shares` processes. What fails here fails again where it is timed."""
    stock = load_stock(file) if file else None
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    wanted: dict[str, tuple[Side, Cell]] = {}
    for side, cell in itertools.product(sides, cells):
        ours = (cell.query_len, cell.batch, side.arch and side.config(cell))
        about = cell.ctx if side.arch is None else ours
        wanted.setdefault(str((side.arch is None, cell.kv, cell.heads, about)), (side, cell))
    for side, cell in list(wanted.values())[share::shares]:
        small = dataclasses.replace(
            cell, ctx=cell.page, batch=1 if side.arch is None else cell.batch
        )
        pool = Pool([small], table_width(cells), "cuda", sms, l2_bytes=0)
        tensors, keywords = pool.arguments(small, 0)
        tensors[3].zero_()
        workspace = torch.empty(
            workspace_elements(side, dataclasses.replace(cell, batch=small.batch), sms),
            device="cuda",
        )
        try:
            if side.arch is None:
                StockMla(
                    stock, *tensors, **keywords, longest=cell.ctx, workspace=workspace, sms=sms
                )()
            else:
                config = side.config(cell)
                mla_decode(
                    *tensors, **keywords, workspace=workspace, config=config, max_batch=MAX_BATCH
                )
            torch.cuda.synchronize()
        except Exception as error:
            print(f"not compiled: {side.name}, {cell}: {error}"[:300], flush=True)


def choose_cells(words: Sequence[str], small: bool) -> list[Cell]:
    """The cells that `--cells` names, the goals' first."""
    grid: dict[str, tuple[Any, ...]] = dict(SMALL_GRID if small else GRID)
    if list(words) == ["goals"]:
        return list(GOALS)
    for word in words:
        if word == "all":
            continue
        name, _, values = word.partition("=")
        if name not in grid or not values:
            sys.exit(
                f"--cells {word}: want goals, all, or NAME=VALUE,... with a name of {list(grid)}"
            )
        grid[name] = tuple(v if name == "kv" else int(v) for v in values.split(","))
    cells = [
        Cell(**dict(zip(grid, point, strict=True))) for point in itertools.product(*grid.values())
    ]
    return [c for c in GOALS if c in cells] + [c for c in cells if c not in GOALS]


def parse_changes(text: str) -> tuple[tuple[str, Any], ...]:
    """`block_n=32,num_warps=8` as pairs; values are JSON."""
    pairs = [word.partition("=") for word in text.split(",")]
    return tuple((name, json.loads(value)) for name, _, value in pairs)


def choose_sides(options: argparse.Namespace) -> list[Side]:
    """Stock first, since ours is judged by its error too."""
    sides = [Side(STOCK)] if options.stock else []
    for name in options.arch:
        sides.append(Side(name, name))
        sides += [Side(f"{name} {text}", name, parse_changes(text)) for text in options.config]
    return sides


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--stock", type=Path, help="0.33.0's triton_decode_attention.py")
    parser.add_argument("--cells", nargs="+", default=["all"])
    parser.add_argument("--arch", action="append", help="default: the GPU's own")
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=300.0, help="start no cell after these")
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--page", type=int, default=PAGE, help="tokens per page of the cache")
    options = parser.parse_args()
    cells = [
        dataclasses.replace(cell, page=options.page)
        for cell in choose_cells(options.cells, options.dry_run)
    ]
    if options.arch is None:
        options.arch = ["sm_120"] if options.dry_run else [own_architecture()]
    sides = choose_sides(options)
    if options.dry_run:
        exact_numbers()
        patch_once()
    else:
        started = time.monotonic()
        compile_all(sides, cells, options.stock)
        print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    return Bench(options, sides, cells).run()


if __name__ == "__main__":
    sys.exit(main())
