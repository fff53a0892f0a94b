# SPDX-License-Identifier: Apache-2.0
"""The drafter's greedy token without its logits: head product and argmax in one kernel.

Stock writes the draft logits, gathers them over the ranks, scatters them into the target's
vocabulary and looks for the largest. Here a program keeps the best of its columns per row, as one
int64 key whose order is that of the logits with ties to the smaller target id. The largest key
decides, whatever the order in which keys meet: over programs by an atomic maximum, over ranks by a
gather of one key a row.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from .arch import arch_of
from .skinny_gemm import (
    BEST_KEYS,
    COUNTERS,
    DTYPES,
    LAST_COUNTERS,
    ProductConfig,
    check_product,
    parts_at,
    product_plan,
    product_tile,
    sum_of_parts,
    tile_k,
    workspace_parts,
)

__all__ = ["head_keys", "ids_of", "top_ids", "unsupported"]

LOWEST = -(2**63)
"""Below every key."""

_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def unsupported(*, size_k: int, dtype: torch.dtype) -> str | None:
    """Why :func:`head_keys` cannot take this, in words, or None if it can.

    Args:
        size_k: hidden size.
        dtype: of the hidden states and of the weight.
    """
    if size_k < 1:
        return "the hidden size is 0"
    if dtype not in DTYPES:
        return f"the hidden states are {dtype}; it takes {', '.join(map(str, DTYPES))}"
    return None


def head_keys(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    rows: int,
    first: int = 0,
    d2t: torch.Tensor | None = None,
    keys_out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    config: ProductConfig | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """The key of the best column of ``hidden @ weight[:rows].T`` for each row of ``hidden``.

    Logits are summed in float32 and rounded to the dtype of ``hidden``, as stock's are. A key is
    the rounded logit in an order-preserving code of 32 bits, above 0x7fffffff less the target id:
    so equal logits go to the smallest target id, and NaN is the largest, as in ``torch.argmax``.
    The target id of column c is ``first + c``, plus ``d2t[first + c]`` if that is given.

    Args:
        hidden: [T, H], bfloat16, float16 or float32, last stride 1; any number of rows.
        weight: [at least ``rows``, H] of the same dtype, last stride 1; this rank's columns.
        rows: how many of the weight's rows are columns of the vocabulary, not padding.
        first: what the first of them is in the draft vocabulary.
        d2t: [draft vocabulary] int64 or int32, target id less draft id, contiguous.
        keys_out: [T] int64, contiguous.
        workspace: of ``skinny_gemm.workspace_for``. With it the hidden size is cut over programs
            where the columns do not fill the GPU, and there is no launch to reset the keys.
        config: launch configuration; None takes the table's for this GPU.
        splits: parts that the hidden size is cut in; None takes the rule's.

    Returns:
        ``keys_out``.

    Raises:
        ValueError: a shape, dtype, stride or workspace that it cannot take; says which.
    """
    tokens, size_k = hidden.shape
    check_product(hidden, weight)
    why = unsupported(size_k=size_k, dtype=hidden.dtype)
    if why is not None:
        raise ValueError(why)
    if not 1 <= rows <= weight.shape[0]:
        raise ValueError(f"rows is {rows}; weight has {weight.shape[0]}")
    if keys_out.dtype != torch.int64 or tuple(keys_out.shape) != (tokens,):
        raise ValueError(
            f"keys_out is {tuple(keys_out.shape)} of {keys_out.dtype}; it must be {(tokens,)} of "
            "torch.int64"
        )
    if not keys_out.is_contiguous():
        raise ValueError("keys_out must be contiguous")
    if d2t is not None and (d2t.numel() < first + rows or not d2t.is_contiguous()):
        raise ValueError(
            f"d2t has {d2t.numel()} entries, strides {tuple(d2t.stride())}; columns go up to "
            f"{first + rows}, and it must be contiguous"
        )
    if tokens == 0:
        return keys_out
    arch = arch_of(hidden.device)
    wanted = config
    config, _, _ = product_plan(
        arch, rows=tokens, columns=rows, size_k=size_k, split=False,
        element_size=hidden.element_size(), config=wanted,
    )  # fmt: skip
    row_blocks = triton.cdiv(tokens, config.block_t)
    if tokens > BEST_KEYS or row_blocks > LAST_COUNTERS:
        workspace = None
    config, splits, span = product_plan(
        arch, rows=tokens, columns=rows, size_k=size_k,
        split=workspace is not None and row_blocks == 1,
        element_size=hidden.element_size(), config=wanted, splits=splits,
    )  # fmt: skip
    row_blocks = triton.cdiv(tokens, config.block_t)
    blocks = triton.cdiv(rows, config.block_n)
    assert splits == 1 or blocks <= COUNTERS
    counters, last_counters, best, partial = workspace_parts(
        workspace, hidden, blocks * splits * tokens * config.block_n if splits > 1 else 0
    )
    if workspace is None:
        keys_out.fill_(LOWEST)
    block_k = tile_k(config, hidden.element_size())
    _head_keys[(row_blocks, splits, blocks)](
        hidden,
        weight,
        d2t,
        keys_out,
        counters,
        last_counters,
        best,
        partial,
        tokens,
        rows,
        first,
        size_k,
        splits,
        span,
        hidden.stride(0),
        weight.stride(0),
        SPLIT=splits > 1,
        COLLECT=workspace is not None,
        HAS_D2T=d2t is not None,
        EVEN_K=size_k % block_k == 0,
        INTERPRETED=_INTERPRETED,
        BLOCK_T=config.block_t,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return keys_out


def ids_of(keys: torch.Tensor) -> torch.Tensor:
    """The target ids of keys, int64."""
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF)


def top_ids(keys_by_rank: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """The target id of the largest key over the ranks, for each row.

    Args:
        keys_by_rank: [ranks, T] int64, last stride 1.
        out: [T] int64 or int32, contiguous.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype or stride that it cannot take.
    """
    ranks, tokens = keys_by_rank.shape
    if keys_by_rank.dtype != torch.int64 or keys_by_rank.stride(-1) != 1:
        raise ValueError(
            f"keys are {keys_by_rank.dtype} with last stride {keys_by_rank.stride(-1)}; they must "
            "be torch.int64 with last stride 1"
        )
    if tuple(out.shape) != (tokens,) or not out.is_contiguous():
        raise ValueError(f"out is {tuple(out.shape)}; it must be {(tokens,)}, contiguous")
    if tokens:
        block = 128
        _top_ids[(triton.cdiv(tokens, block),)](
            keys_by_rank, out, ranks, tokens, keys_by_rank.stride(0), BLOCK=block, num_warps=4
        )
    return out


@triton.jit
def _best_keys(acc, X, D2T, column, columns, first, HAS_D2T: tl.constexpr):
    """int64 [BLOCK_T]: the largest key of each row of logits."""
    # Unsigned order would put NaN with a sign below; comparing floats would lose it.
    logit = acc.to(X.dtype.element_ty).to(tl.float32)
    bits = logit.to(tl.int32, bitcast=True)
    code = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    code = tl.where(logit == 0.0, 0, code)  # Minus zero is equal to zero.
    code = tl.where(logit != logit, 0x7FFFFFFF, code)
    there = column < columns
    target = first + column
    if HAS_D2T:
        target += tl.load(D2T + target, mask=there, other=0).to(tl.int32)
    key = (code.to(tl.int64) << 32) | (0x7FFFFFFF - target).to(tl.int64)[None, :]
    key = tl.where(there[None, :], key, -0x7FFFFFFFFFFFFFFF - 1)
    return tl.max(key, 1)


@triton.jit
def _meet(
    key,
    KEYS,
    LAST_COUNTERS,
    BEST,
    row,
    row_mask,
    COLLECT: tl.constexpr,
):
    """Let the keys of one block of columns meet those of the others.

    With COLLECT they meet in BEST, which is zero between launches: with the sign bit turned, keys
    are unsigned and zero is below all of them. The last block takes them out and leaves zeros.
    """
    if COLLECT:
        turned = (key ^ (-0x7FFFFFFFFFFFFFFF - 1)).to(tl.uint64, bitcast=True)
        best = (BEST + row).to(tl.pointer_type(tl.uint64), bitcast=True)
        tl.atomic_max(best, turned, mask=row_mask, sem="relaxed")
        tl.debug_barrier()  # All threads' keys are there before one of them counts.
        arrived = tl.atomic_add(LAST_COUNTERS + tl.program_id(0), 1, sem="acq_rel")
        if arrived == tl.num_programs(2) - 1:
            # From L2: other multiprocessors wrote them.
            key = tl.load(BEST + row, mask=row_mask, other=0, cache_modifier=".cg")
            tl.store(KEYS + row, key ^ (-0x7FFFFFFFFFFFFFFF - 1), mask=row_mask)
            tl.debug_barrier()  # A key is in several threads: each reads it before one clears it.
            tl.store(BEST + row, tl.zeros_like(key), mask=row_mask)
            tl.store(LAST_COUNTERS + tl.program_id(0), 0)
    else:
        tl.atomic_max(KEYS + row, key, mask=row_mask, sem="relaxed")


# Values that change with the batch must not be compiled in.
@triton.jit(do_not_specialize=["rows", "columns", "first", "splits", "span"])
def _head_keys(
    X,
    W,
    D2T,
    KEYS,
    COUNTERS,
    LAST_COUNTERS,
    BEST,
    PARTIAL,
    rows,
    columns,
    first,
    size_k,
    splits,
    span,
    stride_x,
    stride_w,
    SPLIT: tl.constexpr,
    COLLECT: tl.constexpr,
    HAS_D2T: tl.constexpr,
    EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (block of rows, part, block of columns). Blocks of rows are neighbours: the weight's
    second reading is from L2."""
    split = tl.program_id(1)
    block = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    row_mask = row < rows
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    first_tile = split * span
    end_tile = tl.minimum(first_tile + span, tl.cdiv(size_k, BLOCK_K))
    acc = product_tile(
        X, W, row, row_mask, tl.minimum(column, columns - 1), first_tile, end_tile, size_k,
        stride_x, stride_w, EVEN_K, INTERPRETED, BLOCK_T, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    if SPLIT:
        at = parts_at(PARTIAL, block, splits, rows, row, BLOCK_N)
        tl.store(at + split * rows * BLOCK_N, acc, mask=row_mask[:, None])
        tl.debug_barrier()  # All threads' parts are stored before one of them counts.
        arrived = tl.atomic_add(COUNTERS + block, 1, sem="acq_rel")
        if arrived == splits - 1:
            acc = sum_of_parts(at, splits, rows, row_mask, BLOCK_T, BLOCK_N)
            key = _best_keys(acc, X, D2T, column, columns, first, HAS_D2T)
            _meet(key, KEYS, LAST_COUNTERS, BEST, row, row_mask, COLLECT)
            tl.store(COUNTERS + block, 0)
    else:
        key = _best_keys(acc, X, D2T, column, columns, first, HAS_D2T)
        _meet(key, KEYS, LAST_COUNTERS, BEST, row, row_mask, COLLECT)


@triton.jit(do_not_specialize=["ranks", "tokens", "stride_rank"])
def _top_ids(KEYS, OUT, ranks, tokens, stride_rank, BLOCK: tl.constexpr):
    """Program (block of rows)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < tokens
    best = tl.load(KEYS + row, mask=there, other=0)
    for rank in range(1, ranks):
        best = tl.maximum(best, tl.load(KEYS + rank * stride_rank + row, mask=there, other=0))
    tl.store(OUT + row, (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(OUT.dtype.element_ty), mask=there)
