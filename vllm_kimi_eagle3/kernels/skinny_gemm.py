# SPDX-License-Identifier: Apache-2.0
"""``x @ weight.T`` for a few rows, at the speed at which the weight can be read.

A draft step multiplies one row a request with every weight of the drafter, so the bytes of the
weights are its cost. Each program streams a tile of weight rows through shared memory once, with
several tiles in flight, and multiplies it with all rows of ``x`` on the tensor cores. Where there
are too few columns to fill the GPU, the inner size is cut over programs too: each writes its part
to a workspace, and the last to arrive adds the parts in their order. So the bits are the same
every time, and a captured CUDA graph holds one kernel.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .arch import Arch, arch_of

__all__ = [
    "MAX_ROWS",
    "ProductConfig",
    "product_configs",
    "product_plan",
    "skinny_gemm",
    "unsupported",
    "workspace_for",
    "workspace_numel",
]

MAX_ROWS = 64
"""The most rows of ``x``; beyond, a product is no longer bound by reading its weight."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# A workspace begins with int32 counters, one a block of columns, and the counters and best keys
# of `head_keys`; all of them are zero between launches.
COUNTERS = 2048
LAST_COUNTERS = 64
BEST_KEYS = 1024
HEADER = COUNTERS + LAST_COUNTERS + 2 * BEST_KEYS

MAX_SPLITS = 8  # More parts, and adding them takes longer than it wins.
MIN_TILES = 2  # The fewest tiles of a part.

_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclass(frozen=True)
class ProductConfig:
    """How a product is launched.

    Attributes:
        block_t: rows of ``x`` in a program, padded to that; what tensor cores take.
        block_n: weight rows (columns of the result) in a tile.
        block_k: inner size of a tile, for two-byte weights; half as many for float32.
        num_warps: warps of a program.
        num_stages: Triton's pipeline depth; ``num_stages - 1`` tiles are in flight.
        programs_per_sm: programs that a multiprocessor holds at once.
    """

    block_t: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


# By rows, the widest tiles first: every program reads all of its share of x from L2, so wide tiles
# halve that. Narrower ones are for weights with too few rows to give each multiprocessor one.
# Shared memory is (block_n + block_t) x block_k x 2 bytes a stage but the first.
_SMALL = {  # 99 KiB.
    # 40, 24 and 32 KiB, twice or three times.
    16: (
        ProductConfig(16, 64, 128, 4, 3, 2),
        ProductConfig(16, 32, 128, 4, 3, 3),
        ProductConfig(16, 16, 256, 4, 3, 3),
    ),
    # 48 and 32 KiB.
    32: (ProductConfig(32, 64, 128, 4, 3, 2), ProductConfig(32, 32, 128, 4, 3, 2)),
    # 48 and 32 KiB.
    64: (ProductConfig(64, 128, 64, 8, 3, 2), ProductConfig(64, 64, 64, 4, 3, 2)),
}
_A100 = {  # 163 KiB.
    # 72, 60, 48 and 48 KiB.
    16: (
        ProductConfig(16, 128, 128, 4, 3, 2),
        ProductConfig(16, 64, 128, 4, 4, 2),
        ProductConfig(16, 32, 128, 4, 5, 3),
        ProductConfig(16, 16, 256, 4, 4, 3),
    ),
    # 80 and 72 KiB.
    32: (ProductConfig(32, 128, 128, 4, 3, 2), ProductConfig(32, 64, 128, 4, 4, 2)),
    # 72 and 64 KiB.
    64: (ProductConfig(64, 128, 64, 8, 4, 2), ProductConfig(64, 64, 128, 4, 3, 2)),
}
_LARGE = {  # 227 KiB.
    # 108, 60, 48 and 48 KiB.
    16: (
        ProductConfig(16, 128, 128, 4, 4, 2),
        ProductConfig(16, 64, 128, 4, 4, 3),
        ProductConfig(16, 32, 128, 4, 5, 4),
        ProductConfig(16, 16, 256, 4, 4, 4),
    ),
    # 80 and 72 KiB.
    32: (ProductConfig(32, 128, 128, 4, 3, 2), ProductConfig(32, 64, 128, 4, 4, 3)),
    # wgmma and tcgen05 hold one tile more: 96 and 96 KiB.
    64: (ProductConfig(64, 128, 64, 4, 4, 2), ProductConfig(64, 64, 128, 4, 3, 2)),
}
_TABLE: dict[tuple[int, int], dict[int, tuple[ProductConfig, ...]]] = {
    (8, 0): _A100,
    (8, 6): _SMALL,
    (8, 9): _SMALL,
    (9, 0): _LARGE,
    (10, 0): _LARGE,
    (12, 0): _SMALL,
    (12, 1): _SMALL,
}


def product_configs(capability: tuple[int, int]) -> tuple[ProductConfig, ...]:
    """Every configuration that the table has for a capability."""
    table = _TABLE[max(c for c in _TABLE if c <= capability)]
    return tuple(config for configs in table.values() for config in configs)


def product_plan(
    arch: Arch,
    *,
    rows: int,
    columns: int,
    size_k: int,
    split: bool,
    element_size: int = 2,
    config: ProductConfig | None = None,
    splits: int | None = None,
) -> tuple[ProductConfig, int, int]:
    """The configuration of a product, in how many parts its inner size is cut, and tiles of a part.

    Args:
        arch: of the GPU.
        rows: of ``x``; beyond 64 they are taken 64 at a time.
        columns: weight rows.
        size_k: inner size.
        split: whether there is a workspace to cut the inner size with.
        element_size: bytes of a weight's element.
        config: instead of the table's.
        splits: parts instead of the rule's; made fewer where a part would be empty.
    """
    table = _TABLE[max(c for c in _TABLE if c <= arch.capability)]
    options = table[next((t for t in table if t >= rows), max(table))]

    def tiles_of(option: ProductConfig) -> int:
        return -(-size_k // tile_k(option, element_size))

    def most_splits(option: ProductConfig) -> int:
        return max(1, min(MAX_SPLITS, tiles_of(option) // MIN_TILES)) if split else 1

    if config is None:
        # Halves of the widest tile are as good as whole ones of the next, and cost no adding.
        config = next(
            (c for c in options if -(-columns // c.block_n) * most_splits(c) >= arch.sm_count),
            options[-1],
        )
    blocks, tiles = -(-columns // config.block_n), tiles_of(config)
    if splits is None:
        splits = min(most_splits(config), arch.sm_count * config.programs_per_sm // blocks)
    splits = max(1, min(splits, tiles)) if split and blocks <= COUNTERS else 1
    span = -(-tiles // splits)
    return config, -(-tiles // span), span


def tile_k(config: ProductConfig, element_size: int) -> int:
    """Inner size of a tile: as many bytes for every dtype."""
    return max(16, config.block_k * 2 // element_size)


def workspace_numel(arch: Arch, *, rows: int = MAX_ROWS) -> int:
    """float32 elements of a workspace for any product of up to ``rows`` rows on this GPU."""
    sizes = [
        min(rows, c.block_t) * c.block_n * arch.sm_count * c.programs_per_sm
        for c in product_configs(arch.capability)
    ]
    return HEADER + max(sizes)


def workspace_for(device: torch.device, *, rows: int = MAX_ROWS) -> torch.Tensor:
    """A workspace for ``skinny_gemm`` and ``head_keys``: float32, zero, for up to ``rows`` rows.

    It must be zero before the first launch; every launch leaves its counters zero again. One
    serves any products that run after each other, so one a stream, and nothing else may write to
    it.
    """
    return torch.zeros(
        workspace_numel(arch_of(device), rows=rows), dtype=torch.float32, device=device
    )


def unsupported(*, rows: int, size_k: int, dtype: torch.dtype) -> str | None:
    """Why :func:`skinny_gemm` cannot take this, in words, or None if it can.

    Args:
        rows: of ``x``.
        size_k: inner size.
        dtype: of ``x`` and of the weight.
    """
    if not 1 <= rows <= MAX_ROWS:
        return f"{rows} rows; it takes 1 to {MAX_ROWS}"
    if size_k < 1:
        return "the inner size is 0"
    if dtype not in DTYPES:
        return f"x is {dtype}; it takes {', '.join(map(str, DTYPES))}"
    return None


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    config: ProductConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """``x @ weight.T`` with float32 accumulation, rounded once.

    Args:
        x: [T, K] with 1 to 64 rows, bfloat16, float16 or float32, last stride 1.
        weight: [N, K] of the same dtype, last stride 1.
        out: [T, N] of that dtype, last stride 1; made if None.
        workspace: of :func:`workspace_for`; with it the inner size is cut over programs where the
            columns alone do not fill the GPU.
        config: launch configuration; None takes the table's for this GPU.
        splits: parts that the inner size is cut in; None takes the rule's.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype, stride or workspace that it cannot take; says which.
    """
    rows, size_k = x.shape
    columns = weight.shape[0]
    check_product(x, weight)
    why = unsupported(rows=rows, size_k=size_k, dtype=x.dtype)
    if why is not None:
        raise ValueError(why)
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    elif tuple(out.shape) != (rows, columns) or out.dtype != x.dtype or out.stride(-1) != 1:
        raise ValueError(
            f"out is {tuple(out.shape)} of {out.dtype} with last stride {out.stride(-1)}; it must "
            f"be {(rows, columns)} of {x.dtype} with last stride 1"
        )
    config, splits, span = product_plan(
        arch_of(x.device), rows=rows, columns=columns, size_k=size_k, split=workspace is not None,
        element_size=x.element_size(), config=config, splits=splits,
    )  # fmt: skip
    if rows > config.block_t:
        raise ValueError(f"{rows} rows; this configuration takes {config.block_t}")
    blocks = triton.cdiv(columns, config.block_n)
    counters, _, _, partial = workspace_parts(
        workspace, x, blocks * splits * rows * config.block_n if splits > 1 else 0
    )
    block_k = tile_k(config, x.element_size())
    _skinny_gemm[(splits, blocks)](
        x,
        weight,
        out,
        counters,
        partial,
        rows,
        columns,
        size_k,
        splits,
        span,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        SPLIT=splits > 1,
        EVEN_K=size_k % block_k == 0,
        INTERPRETED=_INTERPRETED,
        BLOCK_T=config.block_t,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def check_product(x: torch.Tensor, weight: torch.Tensor) -> None:
    """That ``x`` [T, K] and ``weight`` [N, K] can be multiplied here; raises ValueError if not."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}")
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}; they must agree")
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has last stride {tensor.stride(-1)}; it must be 1")


def workspace_parts(
    workspace: torch.Tensor | None, x: torch.Tensor, needed: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Counters of blocks, counters of whole products, best keys, and the space for parts.

    Raises:
        ValueError: not float32, not contiguous, or fewer than ``needed`` elements for parts.
    """
    if workspace is None:
        return None, None, None, None
    if (
        workspace.dtype != torch.float32
        or not workspace.is_contiguous()
        or workspace.numel() < HEADER + needed
    ):
        raise ValueError(
            f"workspace has {workspace.numel()} elements of {workspace.dtype}, strides "
            f"{tuple(workspace.stride())}; this call needs {HEADER + needed} of torch.float32, "
            "contiguous (see workspace_for)"
        )
    counters, last, best = workspace[:HEADER].split([COUNTERS, LAST_COUNTERS, 2 * BEST_KEYS])
    return (
        counters.view(torch.int32),
        last.view(torch.int32),
        best.view(torch.int64),
        workspace[HEADER:],
    )


@triton.jit
def product_tile(
    X,
    W,
    row,
    row_mask,
    column,
    first_tile,
    end_tile,
    size_k,
    stride_x,
    stride_w,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """float32 [BLOCK_T, BLOCK_N]: rows of X times rows of W, over some tiles of the inner size."""
    inner = tl.arange(0, BLOCK_K)
    x_at = X + row.to(tl.int64)[:, None] * stride_x + inner[None, :]
    w_at = W + column.to(tl.int64)[:, None] * stride_w + inner[None, :]
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        k = tile * BLOCK_K  # Of which the compiler sees that it is aligned.
        if EVEN_K:
            w = tl.load(w_at + k, eviction_policy="evict_first")
            x = tl.load(x_at + k, mask=row_mask[:, None], other=0.0)
        else:
            there = (inner + k < size_k)[None, :]
            w = tl.load(w_at + k, mask=there, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at + k, mask=row_mask[:, None] & there, other=0.0)
        if INTERPRETED:  # It takes the bits of bfloat16 for integers.
            w = w.to(tl.float32)
            x = x.to(tl.float32)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit
def parts_at(
    PARTIAL, block, splits, rows, row, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Where the first part of a block of columns lies; the next is ``rows * BLOCK_N`` further."""
    columns = tl.arange(0, BLOCK_N)
    first = block.to(tl.int64) * splits * rows * BLOCK_N
    return PARTIAL + first + row[:, None] * BLOCK_N + columns[None, :]


@triton.jit
def sum_of_parts(
    at, splits, rows, row_mask, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The parts added in their order. From L2: other multiprocessors wrote them."""
    # Read together; large tiles would need more registers than there are.
    TOGETHER: tl.constexpr = 4 if BLOCK_T * BLOCK_N <= 4096 else 2
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for split in tl.range(0, splits, TOGETHER, num_stages=1):
        for offset in tl.static_range(TOGETHER):
            part = split + offset
            acc += tl.load(
                at + part * rows * BLOCK_N,
                mask=row_mask[:, None] & (part < splits),
                other=0.0,
                cache_modifier=".cg",
            )
    return acc


# Values that change with the batch must not be compiled in.
@triton.jit(do_not_specialize=["rows", "columns", "splits", "span"])
def _skinny_gemm(
    X,
    W,
    OUT,
    COUNTERS,
    PARTIAL,
    rows,
    columns,
    size_k,
    splits,
    span,
    stride_x,
    stride_w,
    stride_out,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (part, block of columns). Columns past the end read the last one again."""
    split = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.arange(0, BLOCK_T)
    row_mask = row < rows
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    first_tile = split * span
    end_tile = tl.minimum(first_tile + span, tl.cdiv(size_k, BLOCK_K))
    acc = product_tile(
        X, W, row, row_mask, tl.minimum(column, columns - 1), first_tile, end_tile, size_k,
        stride_x, stride_w, EVEN_K, INTERPRETED, BLOCK_T, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    out_at = OUT + row.to(tl.int64)[:, None] * stride_out + column[None, :]
    out_mask = row_mask[:, None] & (column < columns)[None, :]
    if SPLIT:
        at = parts_at(PARTIAL, block, splits, rows, row, BLOCK_N)
        tl.store(at + split * rows * BLOCK_N, acc, mask=row_mask[:, None])
        tl.debug_barrier()  # All threads' parts are stored before one of them counts.
        arrived = tl.atomic_add(COUNTERS + block, 1, sem="acq_rel")
        if arrived == splits - 1:
            acc = sum_of_parts(at, splits, rows, row_mask, BLOCK_T, BLOCK_N)
            tl.store(out_at, acc.to(OUT.dtype.element_ty), mask=out_mask)
            tl.store(COUNTERS + block, 0)
    else:
        tl.store(out_at, acc.to(OUT.dtype.element_ty), mask=out_mask)
