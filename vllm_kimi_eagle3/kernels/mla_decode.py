# SPDX-License-Identifier: Apache-2.0
"""MLA decode attention of 1 to 9 query tokens a request over a paged latent cache, in one pass.

A verify step has k + 1 query tokens per request, all with the same context. Here they are one
block of ``query_len * heads`` rows, so that a tile of the cache is read once for all of them; a
kernel that takes every query token as a row of its own reads the cache k + 1 times.

The work is cut by tiles of the cache, not by requests: all tiles of all requests form one list,
in request order, and every program takes an equal part of it. So the grid depends on the GPU and
the block's shape alone, lengths may differ as they like, and a captured CUDA graph stays right
when they change. A request that several programs share is put together by a second kernel, in
the order of its tokens, hence with the same bits every time.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from .arch import Arch, DecodeConfig, arch_of, mla_decode_config, workspace_numel
from .paged import (
    LOG2_E,
    MAX_QUERY_LEN,
    batch_block,
    check_fp8,
    check_requests,
    check_workspace,
    pages_of,
    product_type,
    queries,
    queries_in_fours,
    rows_in_page,
    schedule,
    softmax_step,
    unpack,
)
from .rows import check

__all__ = ["MAX_QUERY_LEN", "combine_shape", "mla_decode", "unsupported", "workspace_numel"]

LN_2 = tl.constexpr(0.6931471805599453)

_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_KV_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def unsupported(
    *,
    heads: int,
    query_len: int,
    kv_lora_rank: int,
    rope_dim: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
) -> str | None:
    """Why :func:`mla_decode` cannot take this, in words, or None if it can.

    Args:
        heads: query heads on this rank.
        query_len: query tokens per request.
        kv_lora_rank: width of the latent part of a cache row, which is also the value.
        rope_dim: width of the rotary part of a cache row.
        q_dtype: dtype of the queries.
        kv_dtype: dtype of the cache.
        page_size: tokens per page of the cache.
    """
    if not 1 <= query_len <= MAX_QUERY_LEN:
        return f"query_len is {query_len}; it takes 1 to {MAX_QUERY_LEN}"
    if not 1 <= heads <= 128:
        return f"{heads} heads; it takes 1 to 128"
    if kv_lora_rank < 64 or kv_lora_rank > 512 or kv_lora_rank & (kv_lora_rank - 1):
        return f"kv_lora_rank is {kv_lora_rank}; it takes a power of two from 64 to 512"
    if rope_dim < 16 or rope_dim > 128 or rope_dim & (rope_dim - 1):
        return f"the rotary part is {rope_dim} wide; it takes a power of two from 16 to 128"
    if _INTERPRETED and q_dtype == kv_dtype == torch.float32:
        pass  # On the CPU, for tests of a drafter or a target in float32.
    elif q_dtype not in (torch.bfloat16, torch.float16):
        return f"queries are {q_dtype}; it takes torch.bfloat16 and torch.float16"
    elif kv_dtype not in _KV_DTYPES:
        return f"the cache is {kv_dtype}; it takes {', '.join(map(str, _KV_DTYPES))}"
    if page_size < 16 or page_size % 16:
        return f"the page size is {page_size}; it takes multiples of 16"
    return None


def mla_decode(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    query_len: int,
    workspace: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
    causal: bool = True,
    max_batch: int | None = None,
    config: DecodeConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a uniform block of query tokens over the paged latent cache of each request.

    With R the latent width (``kv_lora_rank``) and P the rotary width, query token t of request b
    sees the first ``seq_lens[b] - query_len + t + 1`` rows of the request's cache. Scores use all
    R + P columns of a row, the value is its first R.

    Args:
        q: [batch * query_len, heads, R + P], bfloat16 or float16, last stride 1, or the pair of
            its first R and its last P columns. The tokens of a request follow each other. With
            an fp8 cache products are of float16, and a query beyond 65504 counts as that. Where
            Triton interprets, float32 too, with a cache of float32.
        kv_cache: [blocks, page, R + P], bfloat16, float16 or float8_e4m3fn, last stride 1.
        block_table: [batch, pages] int32, last stride 1; entries past a request's length are
            not read.
        seq_lens: [batch] int32, tokens in the cache with this block's included. 0 is a padding
            row: ``out`` is 0 there and ``lse`` minus infinity. So is a query that sees nothing.
        scale: what scores are multiplied with before the softmax.
        query_len: query tokens per request, 1 to 9.
        workspace: float32, contiguous, at least :func:`workspace_numel` elements.
        out: [batch * query_len, heads, R] in the dtype of ``q``, last stride 1; made if None.
        lse: [batch * query_len, heads] float32, last stride 1; natural log-sum-exp of the scaled
            scores; made if None.
        kv_scale: one float32 on the device; a value of an fp8 cache is ``fp8 * kv_scale``.
        causal: False lets every query token see all of ``seq_lens[b]``.
        max_batch: the largest batch to come. With it, all batches share two compiled kernels per
            query length (up to 16 requests, and more), so that none is compiled while serving.
        config: launch configuration; None takes the table's for this GPU.

    Returns:
        ``out`` and ``lse``. Nothing is allocated if both were given, and nothing waits for the
        GPU.

    Raises:
        ValueError: a shape, dtype or stride that it cannot take; says which.
    """
    if isinstance(q, tuple):
        q_latent, q_rope = q
        rank = q_latent.shape[-1]
    else:
        rank = out.shape[-1] if out is not None else _latent_width(q.shape[-1])
        q_latent, q_rope = q[..., :rank], q[..., rank:]
    tokens, heads, _ = q_latent.shape
    batch = seq_lens.shape[0]
    _check(q_latent, q_rope, kv_cache, block_table, seq_lens, query_len, kv_scale)
    if out is None:
        out = q_latent.new_empty(tokens, heads, rank)
    if lse is None:
        lse = q_latent.new_empty(tokens, heads, dtype=torch.float32)
    check("out", out, (tokens, heads, rank), q_latent.dtype)
    check("lse", lse, (tokens, heads), torch.float32)
    if batch == 0:
        return out, lse

    arch = arch_of(q_latent.device)
    rows = heads * query_len
    fp8 = kv_cache.dtype == torch.float8_e4m3fn
    if config is None:
        config = mla_decode_config(arch, rows=rows, fp8=fp8)
    if fp8:
        kv_cache = kv_cache.view(torch.int32)
    row_blocks = triton.cdiv(rows, config.block_m)
    programs = max(1, arch.sm_count * config.programs_per_sm // row_blocks)
    slots = programs + batch
    needed = slots * rows * (rank + 1)
    check_workspace(workspace, needed, enough=workspace.numel() >= needed)
    partial_out = workspace
    partial_lse = workspace[slots * rows * rank :]
    requests = batch_block(batch, max_batch)
    _attend[(row_blocks, programs)](
        q_latent,
        q_rope,
        kv_cache,
        block_table,
        seq_lens,
        partial_out,
        partial_lse,
        kv_scale,
        scale * LOG2_E,
        batch,
        programs,
        q_latent.stride(0),
        q_latent.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        HEADS=heads,
        QUERY_LEN=query_len,
        RANK=rank,
        ROPE=q_rope.shape[-1],
        PAGE=kv_cache.shape[1],
        CAUSAL=causal,
        FP8=fp8,
        INTERPRETED=_INTERPRETED,
        BATCH_BLOCK=requests,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        MIN_TILES=config.min_tiles,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    block_r, block_parts = combine_shape(arch, tokens * heads, rank)
    _combine[(tokens * heads, rank // block_r)](
        partial_out,
        partial_lse,
        seq_lens,
        out,
        lse,
        batch,
        programs,
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        HEADS=heads,
        QUERY_LEN=query_len,
        RANK=rank,
        BATCH_BLOCK=requests,
        BLOCK_N=config.block_n,
        MIN_TILES=config.min_tiles,
        BLOCK_R=block_r,
        BLOCK_PARTS=block_parts,
        MAX_PARTS=triton.next_power_of_2(programs),
        FP8=fp8,
        num_warps=4,
    )
    return out, lse


def combine_shape(arch: Arch, rows: int, rank: int) -> tuple[int, int]:
    """Columns of a program of the second kernel, and parts that it reads at a time.

    Few rows have many parts each: columns are spread over programs and many parts read at once.
    Many rows have few parts each: one program a row.
    """
    if rows <= 8 * arch.sm_count:
        return min(rank, 64), 64
    return rank, 2


def _latent_width(width: int) -> int:
    """R of a row of R + P columns: the largest power of two below it (512 of 576)."""
    return 1 << ((width - 1).bit_length() - 1)


def _check(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_len: int,
    kv_scale: torch.Tensor | None,
) -> None:
    tokens, heads, rank = q_latent.shape
    why = unsupported(
        heads=heads,
        query_len=query_len,
        kv_lora_rank=rank,
        rope_dim=q_rope.shape[-1],
        q_dtype=q_latent.dtype,
        kv_dtype=kv_cache.dtype,
        page_size=kv_cache.shape[1],
    )
    if why is not None:
        raise ValueError(why)
    if q_rope.shape[:2] != q_latent.shape[:2] or q_rope.dtype != q_latent.dtype:
        raise ValueError(
            f"the parts of q are {tuple(q_latent.shape)} of {q_latent.dtype} and "
            f"{tuple(q_rope.shape)} of {q_rope.dtype}; they must agree in all but the last size"
        )
    width = rank + q_rope.shape[-1]
    if kv_cache.shape[-1] != width:
        raise ValueError(f"q is {width} wide and a row of kv_cache is {kv_cache.shape[-1]}")
    check_requests(
        tokens, query_len, block_table, seq_lens,
        ("q", q_latent), ("q", q_rope), ("kv_cache", kv_cache),
    )  # fmt: skip
    if kv_cache.dtype == torch.float8_e4m3fn:
        check_fp8("kv_cache", kv_cache, "kv_scale", kv_scale)


@triton.jit
def _here(x, SPARE: tl.constexpr):
    """``x``; what is computed from it is computed here and not kept from before the loop.

    For launches that would spill registers otherwise, measured by ``tests/kernels/offline.py``.
    """
    if SPARE:
        x = tl.inline_asm_elementwise(
            "mov.u32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )
    return x


@triton.jit
def _row_mask(rows, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, SPARE: tl.constexpr):
    """Which of a block's rows there are; where all blocks are full, known to the compiler."""
    if SPARE and COUNT % BLOCK_M == 0:
        mask = tl.full([BLOCK_M], 1, tl.int1)
    else:
        mask = rows < COUNT
    return mask


# Values that change while serving must not be compiled in: a new batch size would compile again.
@triton.jit(do_not_specialize=["batch", "programs", "stride_block_table"])
def _attend(
    Q,
    Q_ROPE,
    KV,
    block_table,
    seq_lens,
    partial_out,
    partial_lse,
    kv_scale,
    scale_log2,
    batch,
    programs,
    stride_q_token,
    stride_q_head,
    stride_q_rope_token,
    stride_q_rope_head,
    stride_kv_page,
    stride_kv_token,
    stride_block_table,
    HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (row block, part): its part of the tiles, one partial result per request in it.

    The latent columns are taken in four quarters: one tile of all of them needs more registers
    than there are, before the loop and after it. Of a bf16 cache a quarter is 128 columns side by
    side, copied ahead into shared memory. Of an fp8 cache it is every fourth column, unpacked
    from words that were loaded ahead into registers, where the next tile takes few; shared memory
    then holds it once, ready for both products. Partial results keep the order of the quarters.
    """
    SPARE: tl.constexpr = not INTERPRETED and (
        FP8 or (BLOCK_N <= 32 and (HEADS * QUERY_LEN > BLOCK_M or BATCH_BLOCK > 16))
    )
    QUARTER: tl.constexpr = RANK // 4
    ROPE_QUARTER: tl.constexpr = ROPE // 4
    # Programs that read the same part of the cache for other rows are neighbours: L2 serves them.
    block = tl.program_id(0)
    part = tl.program_id(1)
    _requests, ends, total, share = schedule(
        seq_lens, batch, programs, BATCH_BLOCK, BLOCK_N, MIN_TILES
    )
    tile = part * share
    last = tl.minimum(tile + share, total)
    before = ends <= tile
    request = tl.sum(before.to(tl.int32), 0)
    start = tl.max(tl.where(before, ends, 0), 0)

    cols = tl.arange(0, QUARTER)
    rope_cols = tl.arange(0, ROPE)
    rope_words = tl.arange(0, ROPE_QUARTER)
    tokens = tl.arange(0, BLOCK_N)
    if FP8:
        value_scale = tl.load(kv_scale)
        scale_log2 = scale_log2 * value_scale

    while tile < last:
        seq_len = tl.load(seq_lens + request)
        while seq_len == 0:
            request += 1
            seq_len = tl.load(seq_lens + request)
        tiles = (seq_len + BLOCK_N - 1) // BLOCK_N
        stop = tl.minimum(last, start + tiles)
        first_token = (tile - start) * BLOCK_N
        end_token = tl.minimum((stop - start) * BLOCK_N, seq_len)
        rows = _here(block, SPARE) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = _row_mask(rows, HEADS * QUERY_LEN, BLOCK_M, SPARE)
        query = rows // HEADS
        head = rows % HEADS
        if CAUSAL:
            extent = (seq_len - QUERY_LEN + query + 1)[:, None]
        else:
            extent = (seq_len + query * 0)[:, None]
        q_rows = Q + request.to(tl.int64) * QUERY_LEN * stride_q_token
        q_rows += query * stride_q_token + head * stride_q_head
        q_rope_rows = Q_ROPE + request.to(tl.int64) * QUERY_LEN * stride_q_rope_token
        q_rope_rows += query * stride_q_rope_token + head * stride_q_rope_head
        pages = block_table + request.to(tl.int64) * stride_block_table
        # The page of a tile is looked up while the tile before it is worked on.
        page = pages_of(pages, first_token, seq_len, tokens, PAGE, BLOCK_N)

        if FP8:
            q0, q1, q2, q3 = queries_in_fours(q_rows, row_mask, BLOCK_M, QUARTER)
            q_rope0, q_rope1, q_rope2, q_rope3 = queries_in_fours(
                q_rope_rows, row_mask, BLOCK_M, ROPE_QUARTER
            )
            at = rows_in_page(first_token, seq_len, tokens, PAGE, BLOCK_N)
            kv_rows = KV + page.to(tl.int64) * stride_kv_page + at * stride_kv_token
            words = tl.load(kv_rows[:, None] + cols[None, :])
            rope = tl.load(kv_rows[:, None] + QUARTER + rope_words[None, :])
            page = pages_of(pages, first_token + BLOCK_N, seq_len, tokens, PAGE, BLOCK_N)
            acc0 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            acc1 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            acc2 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            acc3 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            norm = tl.zeros([BLOCK_M], tl.float32)
            peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            for n in tl.range(first_token, end_token, BLOCK_N, num_stages=1):
                k0, k1, k2, k3 = unpack(words, INTERPRETED)
                r0, r1, r2, r3 = unpack(rope, INTERPRETED)
                at = rows_in_page(n + BLOCK_N, seq_len, tokens, PAGE, BLOCK_N)
                kv_rows = KV + page.to(tl.int64) * stride_kv_page + at * stride_kv_token
                page = pages_of(pages, n + 2 * BLOCK_N, seq_len, tokens, PAGE, BLOCK_N)
                words = tl.load(kv_rows[:, None] + cols[None, :])
                rope = tl.load(kv_rows[:, None] + QUARTER + rope_words[None, :])
                scores = tl.dot(q0, tl.trans(k0))
                scores = tl.dot(q1, tl.trans(k1), scores)
                scores = tl.dot(q2, tl.trans(k2), scores)
                scores = tl.dot(q3, tl.trans(k3), scores)
                scores = tl.dot(q_rope0, tl.trans(r0), scores)
                scores = tl.dot(q_rope1, tl.trans(r1), scores)
                scores = tl.dot(q_rope2, tl.trans(r2), scores)
                scores = tl.dot(q_rope3, tl.trans(r3), scores)
                seen = (n + tokens)[None, :] < extent
                weights, shrink, peak, norm = softmax_step(scores * scale_log2, seen, peak, norm)
                weights = weights.to(tl.float16)
                acc0 = tl.dot(weights, k0, acc0 * shrink)
                acc1 = tl.dot(weights, k1, acc1 * shrink)
                acc2 = tl.dot(weights, k2, acc2 * shrink)
                acc3 = tl.dot(weights, k3, acc3 * shrink)
        else:
            q0 = queries(q_rows, cols, row_mask, KV, INTERPRETED)
            q1 = queries(q_rows, QUARTER + cols, row_mask, KV, INTERPRETED)
            q2 = queries(q_rows, 2 * QUARTER + cols, row_mask, KV, INTERPRETED)
            q3 = queries(q_rows, 3 * QUARTER + cols, row_mask, KV, INTERPRETED)
            q_rope = queries(q_rope_rows, rope_cols, row_mask, KV, INTERPRETED)
            acc0 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            acc1 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            acc2 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            acc3 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            norm = tl.zeros([BLOCK_M], tl.float32)
            peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            for n in tl.range(first_token, end_token, BLOCK_N, num_stages=STAGES):
                at = rows_in_page(n, seq_len, tokens, PAGE, BLOCK_N)
                kv_rows = KV + page.to(tl.int64) * stride_kv_page + at * stride_kv_token
                page = pages_of(pages, n + BLOCK_N, seq_len, tokens, PAGE, BLOCK_N)
                quarter = kv_rows[:, None] + cols[None, :]
                k0 = product_type(tl.load(quarter), INTERPRETED)
                k1 = product_type(tl.load(quarter + QUARTER), INTERPRETED)
                k2 = product_type(tl.load(quarter + 2 * QUARTER), INTERPRETED)
                k3 = product_type(tl.load(quarter + 3 * QUARTER), INTERPRETED)
                k_rope = product_type(
                    tl.load(kv_rows[:, None] + RANK + rope_cols[None, :]), INTERPRETED
                )
                scores = tl.dot(q0, tl.trans(k0))
                scores = tl.dot(q1, tl.trans(k1), scores)
                scores = tl.dot(q2, tl.trans(k2), scores)
                scores = tl.dot(q3, tl.trans(k3), scores)
                scores = tl.dot(q_rope, tl.trans(k_rope), scores)
                seen = (n + tokens)[None, :] < extent
                weights, shrink, peak, norm = softmax_step(scores * scale_log2, seen, peak, norm)
                weights = weights.to(k0.dtype)
                acc0 = tl.dot(weights, k0, acc0 * shrink)
                acc1 = tl.dot(weights, k1, acc1 * shrink)
                acc2 = tl.dot(weights, k2, acc2 * shrink)
                acc3 = tl.dot(weights, k3, acc3 * shrink)

        lse = tl.where(norm == 0.0, float("-inf"), peak + tl.log2(norm))
        factor = 1.0 / tl.where(norm == 0.0, 1.0, norm)
        if FP8:
            factor = factor * value_scale
        factor = factor[:, None]
        rows = _here(block, SPARE) * BLOCK_M + tl.arange(0, BLOCK_M)
        row_mask = _row_mask(rows, HEADS * QUERY_LEN, BLOCK_M, SPARE)
        # part + request grows with every (part, request) in use, so no two share a slot.
        slot = (part + request).to(tl.int64) * (HEADS * QUERY_LEN)
        tl.store(partial_lse + slot + rows, lse, mask=row_mask)
        to = partial_out + slot * RANK + (rows * RANK)[:, None] + cols[None, :]
        tl.store(to, acc0 * factor, mask=row_mask[:, None])
        tl.store(to + QUARTER, acc1 * factor, mask=row_mask[:, None])
        tl.store(to + 2 * QUARTER, acc2 * factor, mask=row_mask[:, None])
        tl.store(to + 3 * QUARTER, acc3 * factor, mask=row_mask[:, None])
        start += tiles
        tile = stop
        request += 1


@triton.jit(do_not_specialize=["batch", "programs"])
def _combine(
    partial_out,
    partial_lse,
    seq_lens,
    out,
    lse,
    batch,
    programs,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    RANK: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Program (row, columns): the weighted sum of the row's partial results."""
    row = tl.program_id(0)
    places = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    if FP8:  # Partial results, the most to read, have every fourth column side by side.
        cols = places % (RANK // 4) * 4 + places // (RANK // 4)
    else:
        cols = places
    request = row // (HEADS * QUERY_LEN)
    requests, ends, _total, share = schedule(
        seq_lens, batch, programs, BATCH_BLOCK, BLOCK_N, MIN_TILES
    )
    end = tl.max(tl.where(requests <= request, ends, 0), 0)
    start = tl.max(tl.where(requests < request, ends, 0), 0)
    first = start // share
    parts = tl.where(end > start, (end - 1) // share - first + 1, 0)
    # Row of the first part's slot; a part further is HEADS * QUERY_LEN rows further.
    slot_row = (first + request).to(tl.int64) * (HEADS * QUERY_LEN) + row % (HEADS * QUERY_LEN)

    every = tl.arange(0, MAX_PARTS)
    lses = tl.load(
        partial_lse + slot_row + every * (HEADS * QUERY_LEN),
        mask=every < parts,
        other=float("-inf"),
    )
    peak = tl.max(lses, 0)
    origin = tl.where(peak == float("-inf"), 0.0, peak)
    norm = tl.sum(tl.exp2(lses - origin), 0)
    acc = tl.zeros([BLOCK_R], tl.float32)
    for part in range(0, parts, BLOCK_PARTS):
        some = part + tl.arange(0, BLOCK_PARTS)
        slot_rows = slot_row + some * (HEADS * QUERY_LEN)
        weights = tl.exp2(
            tl.load(partial_lse + slot_rows, mask=some < parts, other=float("-inf")) - origin
        )
        values = tl.load(
            partial_out + slot_rows[:, None] * RANK + places[None, :],
            mask=(some < parts)[:, None],
            other=0.0,
        )
        acc += tl.sum(values * weights[:, None], 0)
    acc = acc / tl.where(norm == 0.0, 1.0, norm)
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    tl.store(
        out + token * stride_out_token + head * stride_out_head + cols,
        acc.to(out.dtype.element_ty),
    )
    if tl.program_id(1) == 0:
        total_lse = tl.where(norm == 0.0, float("-inf"), (peak + tl.log2(norm)) * LN_2)
        tl.store(lse + token * stride_lse_token + head, total_lse)
