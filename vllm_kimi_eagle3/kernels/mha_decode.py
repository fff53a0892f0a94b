# SPDX-License-Identifier: Apache-2.0
"""Decode attention of an MHA drafter: 1 to 9 query tokens a request over a paged cache, one kernel.

The query heads of a key head and the query tokens of a request are one block of rows, so a tile
of the cache is read once for all of them. As in ``mla_decode`` all tiles of all requests form one
list and every program takes an equal part of it: the grid depends on shapes alone. A draft step
is short, and a second kernel to put parts together would be a fifth of it: here the program that
is last to write a part of a request adds them up, in the order of the tokens whoever it is, hence
with the same bits every time.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from .arch import Arch, DecodeConfig, arch_of, mha_decode_config
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

__all__ = ["MAX_QUERY_LEN", "make_workspace", "mha_decode", "unsupported", "workspace_numel"]

# Parts that one program adds up: more of them, and they are added in groups and then the groups.
_GROUP = 16
# Of the workspace, where programs count the parts that are done. Partial results take more than
# 64 times as much for any shape, and a place that depends on the workspace alone lets calls of all
# shapes share it.
_COUNTED = 64

_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_Q_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    query_len: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
) -> str | None:
    """Why :func:`mha_decode` cannot take this, in words, or None if it can.

    Args:
        heads: query heads on this rank.
        kv_heads: key heads on this rank.
        head_dim: width of a head.
        query_len: query tokens per request.
        q_dtype: dtype of the queries.
        kv_dtype: dtype of the cache.
        page_size: tokens per page of the cache.
    """
    if not 1 <= query_len <= MAX_QUERY_LEN:
        return f"query_len is {query_len}; it takes 1 to {MAX_QUERY_LEN}"
    if kv_heads < 1 or heads % kv_heads or not 1 <= heads // kv_heads <= 128:
        return f"{heads} heads over {kv_heads} key heads; it takes 1 to 128 for each key head"
    if head_dim < 16 or head_dim > 128 or head_dim & (head_dim - 1):
        return f"head_dim is {head_dim}; it takes a power of two from 16 to 128"
    if q_dtype not in _Q_DTYPES:
        return f"queries are {q_dtype}; it takes {', '.join(map(str, _Q_DTYPES))}"
    if kv_dtype not in (q_dtype, torch.float8_e4m3fn):
        return f"the cache is {kv_dtype}; it takes {q_dtype}, as the queries, and float8_e4m3fn"
    if kv_dtype == torch.float8_e4m3fn and head_dim < 64:
        return f"the cache is {kv_dtype} and head_dim {head_dim}; it takes 64 or more"
    if page_size < 16 or page_size % 16:
        return f"the page size is {page_size}; it takes multiples of 16"
    return None


def mha_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    query_len: int,
    workspace: torch.Tensor,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    max_batch: int | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Causal attention of a uniform block of query tokens over each request's paged cache.

    Query token t of request b sees the first ``seq_lens[b] - query_len + t + 1`` tokens of the
    request's cache; head h takes key head ``h // (heads // kv_heads)``.

    Args:
        q: [batch * query_len, heads, head_dim], bfloat16, float16 or float32, last stride 1. The
            tokens of a request follow each other. With an fp8 cache products are of float16, and
            a query beyond 65504 counts as that.
        k_cache: [blocks, page, kv_heads, head_dim] of the queries' dtype or float8_e4m3fn, last
            stride 1, the others any: a view serves pages of tokens and pages of heads alike.
        v_cache: as ``k_cache``, of the same shape and dtype.
        block_table: [batch, pages] int32, last stride 1; entries past a request's length are
            not read.
        seq_lens: [batch] int32, tokens in the cache with this block's included. 0 is a padding
            row: ``out`` is 0 there. So is a query that sees nothing.
        scale: what scores are multiplied with before the softmax.
        query_len: query tokens per request, 1 to 9.
        workspace: float32, contiguous, at least :func:`workspace_numel` elements, zero when it
            is first used: see :func:`make_workspace`. Calls that run one after another share it.
        out: [batch * query_len, heads, head_dim] in the dtype of ``q``, last stride 1; made if
            None.
        k_scale: one float32 on the device; a key of an fp8 cache is ``fp8 * k_scale``.
        v_scale: likewise for values.
        max_batch: the largest batch to come. With it, all batches share two compiled kernels per
            query length (up to 16 requests, and more), so that none is compiled while serving.
        config: launch configuration; None takes the table's for this GPU.

    Returns:
        ``out``. Nothing is allocated if it was given, and nothing waits for the GPU.

    Raises:
        ValueError: a shape, dtype or stride that it cannot take; says which.
    """
    tokens, heads, head_dim = q.shape
    batch = seq_lens.shape[0]
    _check(q, k_cache, v_cache, block_table, seq_lens, query_len, k_scale, v_scale)
    if out is None:
        out = q.new_empty(tokens, heads, head_dim)
    check("out", out, (tokens, heads, head_dim), q.dtype)
    if batch == 0:
        return out

    arch = arch_of(q.device)
    kv_heads = k_cache.shape[2]
    rows = heads // kv_heads * query_len
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    if config is None:
        config = mha_decode_config(arch, rows=rows, itemsize=k_cache.dtype.itemsize)
    page = k_cache.shape[1]
    if fp8:
        k_cache, v_cache = k_cache.view(torch.int32), v_cache.view(torch.int32)
    blocks, programs, partials, counters = _sizes(
        arch, config, batch=batch, rows=rows, kv_heads=kv_heads, head_dim=head_dim
    )
    counted = _counted(workspace.numel())
    check_workspace(
        workspace,
        _total(partials, counters),
        enough=counters <= counted and partials <= workspace.numel() - counted,
    )
    _attend_and_add[(blocks, programs)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        out,
        workspace,
        k_scale if fp8 else None,
        v_scale if fp8 else None,
        scale * LOG2_E,
        batch,
        programs,
        counted,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        GROUP_HEADS=heads // kv_heads,
        QUERY_LEN=query_len,
        DIM=head_dim,
        PAGE=page,
        FP8=fp8,
        INTERPRETED=_INTERPRETED,
        BATCH_BLOCK=batch_block(batch, max_batch),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        MIN_TILES=config.min_tiles,
        PARTS=_GROUP,
        GROUPS=max(2, triton.next_power_of_2(triton.cdiv(programs, _GROUP))),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out


def workspace_numel(
    *, max_batch: int, query_len: int, heads: int, kv_heads: int, head_dim: int, arch: Arch
) -> int:
    """How many float32 elements ``mha_decode`` needs at most.

    For any batch up to ``max_batch``, any query length up to ``query_len``, any lengths and any
    kind of cache.
    """
    most = 0
    for tokens in range(1, query_len + 1):
        rows = heads // kv_heads * tokens
        for itemsize in (1, 2, 4):
            try:
                config = mha_decode_config(arch, rows=rows, itemsize=itemsize)
            except ValueError:
                continue  # An fp8 cache where there are no fp8 instructions.
            _, _, partials, counters = _sizes(
                arch, config, batch=max_batch, rows=rows, kv_heads=kv_heads, head_dim=head_dim
            )
            most = max(most, _total(partials, counters))
    return most


def make_workspace(
    *,
    max_batch: int,
    query_len: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
) -> torch.Tensor:
    """A workspace of :func:`workspace_numel` elements, zero, as the first call needs it."""
    numel = workspace_numel(
        max_batch=max_batch,
        query_len=query_len,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        arch=arch_of(device),
    )
    return torch.zeros(numel, dtype=torch.float32, device=device)


def _sizes(
    arch: Arch, config: DecodeConfig, *, batch: int, rows: int, kv_heads: int, head_dim: int
) -> tuple[int, int, int, int]:
    """Both sizes of the grid, and elements of partial results and of counters.

    A program's part may begin in one request and end in another, so there are as many partial
    results as programs and requests together; then come those of groups of parts.
    """
    blocks = kv_heads * triton.cdiv(rows, config.block_m)
    programs = max(1, arch.sm_count * config.programs_per_sm // blocks)
    slots = programs + batch
    groups = slots // _GROUP + batch + 1
    partials = blocks * (slots + groups) * config.block_m * (head_dim + 1)
    return blocks, programs, partials, blocks * (groups + batch)


def _counted(numel: int) -> int:
    """Elements of a workspace that are counters: 64 bytes or more, so that the rest is aligned."""
    return numel // _COUNTED // 16 * 16


def _total(partials: int, counters: int) -> int:
    """Elements of a workspace that holds both, one of ``_COUNTED`` of it being for counters."""
    for_counters = triton.cdiv(counters, 16) * 16 * _COUNTED
    return int(max(for_counters, triton.cdiv(partials * _COUNTED, _COUNTED - 1)))


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_len: int,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    tokens, heads, head_dim = q.shape
    if k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"k_cache is {tuple(k_cache.shape)} of {k_cache.dtype} and v_cache "
            f"{tuple(v_cache.shape)} of {v_cache.dtype}; they must be alike"
        )
    why = unsupported(
        heads=heads,
        kv_heads=k_cache.shape[2],
        head_dim=head_dim,
        query_len=query_len,
        q_dtype=q.dtype,
        kv_dtype=k_cache.dtype,
        page_size=k_cache.shape[1],
    )
    if why is not None:
        raise ValueError(why)
    if k_cache.shape[3] != head_dim:
        raise ValueError(f"a head of q is {head_dim} wide and one of the caches {k_cache.shape[3]}")
    check_requests(
        tokens, query_len, block_table, seq_lens,
        ("q", q), ("k_cache", k_cache), ("v_cache", v_cache),
    )  # fmt: skip
    if k_cache.dtype == torch.float8_e4m3fn:
        check_fp8("k_cache", k_cache, "k_scale", k_scale)
        check_fp8("v_cache", v_cache, "v_scale", v_scale)


@triton.jit
def _side_by_side(x0, x1, x2, x3, ROWS: tl.constexpr, DIM: tl.constexpr):
    """One tile of four, of which tile j has every fourth column from j on."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [ROWS, DIM])


@triton.jit
def _add_up(
    partial_out,
    partial_lse,
    first,
    count,
    rows,
    row_mask,
    BLOCK_M: tl.constexpr,
    DIM: tl.constexpr,
    MOST: tl.constexpr,
):
    """The weighted sum of ``count`` partial results from slot ``first`` on, and its log-sum-exp.

    Other programs wrote them, so they are read from L2.
    """
    cols = tl.arange(0, DIM)
    every = tl.arange(0, MOST)
    lses = tl.load(
        partial_lse + ((first + every) * BLOCK_M)[:, None] + rows[None, :],
        mask=(every < count)[:, None] & row_mask[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    peak = tl.max(lses, 0)
    origin = tl.where(peak == float("-inf"), 0.0, peak)
    norm = tl.sum(tl.exp2(lses - origin[None, :]), 0)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    # As many at a time as registers hold beside the sum.
    AT_ONCE: tl.constexpr = 4 if BLOCK_M * DIM <= 2048 else 1
    for some in range(0, count, AT_ONCE):
        for one in tl.static_range(AT_ONCE):
            part = some + one
            slot = (first + part).to(tl.int64) * BLOCK_M
            mask = row_mask & (part < count)
            lse = tl.load(
                partial_lse + slot + rows, mask=mask, other=float("-inf"), cache_modifier=".cg"
            )
            values = tl.load(
                partial_out + (slot + rows)[:, None] * DIM + cols[None, :],
                mask=mask[:, None],
                other=0.0,
                cache_modifier=".cg",
            )
            acc += values * tl.exp2(lse - origin)[:, None]
    acc = acc / tl.where(norm == 0.0, 1.0, norm)[:, None]
    return acc, tl.where(norm == 0.0, float("-inf"), origin + tl.log2(norm))


# Values that change while serving must not be compiled in: a new batch size would compile again.
@triton.jit(do_not_specialize=["batch", "programs", "stride_block_table"])
def _attend_and_add(
    Q,
    K,
    V,
    block_table,
    seq_lens,
    out,
    workspace,
    k_scale,
    v_scale,
    scale_log2,
    batch,
    programs,
    counted,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_token,
    stride_k_head,
    stride_v_page,
    stride_v_token,
    stride_v_head,
    stride_block_table,
    stride_out_token,
    stride_out_head,
    GROUP_HEADS: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (key head and row block, part): its part of the tiles, and sums that it completes.

    The workspace: one of 64 elements is a counter, a block's groups of parts and then its
    requests; behind them the partial results of parts, those of groups, and the log-sum-exps of
    both. Counters are 0 before and after.
    """
    ROWS: tl.constexpr = GROUP_HEADS * QUERY_LEN
    ROW_BLOCKS: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
    QUARTER: tl.constexpr = DIM // 4
    block = tl.program_id(0)
    part = tl.program_id(1)
    kv_head = block // ROW_BLOCKS
    _requests, ends, total, share = schedule(
        seq_lens, batch, programs, BATCH_BLOCK, BLOCK_N, MIN_TILES
    )
    tile = part * share
    last = tl.minimum(tile + share, total)
    before = ends <= tile
    request = tl.sum(before.to(tl.int32), 0)
    start = tl.max(tl.where(before, ends, 0), 0)

    slots = programs + batch
    groups = slots // PARTS + batch + 1
    counters = workspace.to(tl.pointer_type(tl.int32)) + block * (groups + batch)
    blocks = tl.num_programs(0)
    part_out = workspace + counted
    part_lse = part_out + (blocks * (slots + groups)).to(tl.int64) * (BLOCK_M * DIM)
    part_out += (block * (slots + groups)).to(tl.int64) * (BLOCK_M * DIM)
    part_lse += block * (slots + groups) * BLOCK_M
    group_out = part_out + slots.to(tl.int64) * (BLOCK_M * DIM)
    group_lse = part_lse + slots * BLOCK_M

    rows = tl.arange(0, BLOCK_M)
    row = block % ROW_BLOCKS * BLOCK_M + rows
    row_mask = row < ROWS
    query = row // GROUP_HEADS
    head = kv_head * GROUP_HEADS + row % GROUP_HEADS
    cols = tl.arange(0, DIM)
    words = tl.arange(0, QUARTER)
    tokens = tl.arange(0, BLOCK_N)
    k_head = K + kv_head.to(tl.int64) * stride_k_head
    v_head = V + kv_head.to(tl.int64) * stride_v_head
    if FP8:
        scale_log2 = scale_log2 * tl.load(k_scale)

    while tile < last:
        seq_len = tl.load(seq_lens + request)
        while seq_len == 0:
            request += 1
            seq_len = tl.load(seq_lens + request)
        tiles = (seq_len + BLOCK_N - 1) // BLOCK_N
        stop = tl.minimum(last, start + tiles)
        first_token = (tile - start) * BLOCK_N
        end_token = tl.minimum((stop - start) * BLOCK_N, seq_len)
        extent = (seq_len - QUERY_LEN + query + 1)[:, None]
        q_rows = Q + request.to(tl.int64) * QUERY_LEN * stride_q_token
        q_rows += query * stride_q_token + head * stride_q_head
        pages = block_table + request.to(tl.int64) * stride_block_table
        # The page of a tile is looked up while the tile before it is worked on.
        page = pages_of(pages, first_token, seq_len, tokens, PAGE, BLOCK_N)
        norm = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if FP8:
            q0, q1, q2, q3 = queries_in_fours(q_rows, row_mask, BLOCK_M, QUARTER)
            at = rows_in_page(first_token, seq_len, tokens, PAGE, BLOCK_N)
            k_rows = k_head + (page.to(tl.int64) * stride_k_page + at * stride_k_token)
            v_rows = v_head + (page.to(tl.int64) * stride_v_page + at * stride_v_token)
            k_words = tl.load(k_rows[:, None] + words[None, :])
            v_words = tl.load(v_rows[:, None] + words[None, :])
            page = pages_of(pages, first_token + BLOCK_N, seq_len, tokens, PAGE, BLOCK_N)
            acc0 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            acc1 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            acc2 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            acc3 = tl.zeros([BLOCK_M, QUARTER], tl.float32)
            for n in tl.range(first_token, end_token, BLOCK_N, num_stages=1):
                k0, k1, k2, k3 = unpack(k_words, INTERPRETED)
                v0, v1, v2, v3 = unpack(v_words, INTERPRETED)
                after = n + BLOCK_N
                at = rows_in_page(after, seq_len, tokens, PAGE, BLOCK_N)
                k_rows = k_head + (page.to(tl.int64) * stride_k_page + at * stride_k_token)
                v_rows = v_head + (page.to(tl.int64) * stride_v_page + at * stride_v_token)
                page = pages_of(pages, after + BLOCK_N, seq_len, tokens, PAGE, BLOCK_N)
                k_words = tl.load(k_rows[:, None] + words[None, :])
                v_words = tl.load(v_rows[:, None] + words[None, :])
                scores = tl.dot(q0, tl.trans(k0))
                scores = tl.dot(q1, tl.trans(k1), scores)
                scores = tl.dot(q2, tl.trans(k2), scores)
                scores = tl.dot(q3, tl.trans(k3), scores)
                seen = (n + tokens)[None, :] < extent
                weights, shrink, peak, norm = softmax_step(scores * scale_log2, seen, peak, norm)
                weights = weights.to(tl.float16)
                acc0 = tl.dot(weights, v0, acc0 * shrink)
                acc1 = tl.dot(weights, v1, acc1 * shrink)
                acc2 = tl.dot(weights, v2, acc2 * shrink)
                acc3 = tl.dot(weights, v3, acc3 * shrink)
            acc = _side_by_side(acc0, acc1, acc2, acc3, BLOCK_M, DIM) * tl.load(v_scale)
        else:
            q = queries(q_rows, cols, row_mask, K, INTERPRETED)
            acc = tl.zeros([BLOCK_M, DIM], tl.float32)
            for n in tl.range(first_token, end_token, BLOCK_N, num_stages=STAGES):
                at = rows_in_page(n, seq_len, tokens, PAGE, BLOCK_N)
                k_rows = k_head + (page.to(tl.int64) * stride_k_page + at * stride_k_token)
                v_rows = v_head + (page.to(tl.int64) * stride_v_page + at * stride_v_token)
                page = pages_of(pages, n + BLOCK_N, seq_len, tokens, PAGE, BLOCK_N)
                k = product_type(tl.load(k_rows[:, None] + cols[None, :]), INTERPRETED)
                v = product_type(tl.load(v_rows[:, None] + cols[None, :]), INTERPRETED)
                scores = tl.dot(q, tl.trans(k), input_precision="ieee")
                seen = (n + tokens)[None, :] < extent
                weights, shrink, peak, norm = softmax_step(scores * scale_log2, seen, peak, norm)
                acc = tl.dot(weights.to(v.dtype), v, acc * shrink, input_precision="ieee")
        acc = acc * (1.0 / tl.where(norm == 0.0, 1.0, norm))[:, None]

        # Which parts of the list this request's tiles are in; a part may end in another request.
        first_part = start // share
        parts = (start + tiles - 1) // share - first_part + 1
        done = parts == 1
        if parts > 1:
            # Part + request grows with every (part, request) in use, so no two share a slot.
            slot = (part + request).to(tl.int64) * BLOCK_M
            lse = tl.where(norm == 0.0, float("-inf"), peak + tl.log2(norm))
            tl.store(part_lse + slot + rows, lse, mask=row_mask)
            to = part_out + (slot + rows)[:, None] * DIM + cols[None, :]
            tl.store(to, acc, mask=row_mask[:, None])
            group = (part - first_part) // PARTS
            request_groups = (parts + PARTS - 1) // PARTS
            members = tl.minimum(parts - group * PARTS, PARTS)
            first = first_part + request + group * PARTS
            # Likewise for groups.
            group_slot = first // PARTS + request
            # All threads have written before one of them counts.
            tl.debug_barrier()
            if tl.atomic_add(counters + group_slot, 1, sem="acq_rel") == members - 1:
                tl.debug_barrier()
                tl.store(counters + group_slot, 0)
                acc, lse = _add_up(
                    part_out, part_lse, first, members, rows, row_mask, BLOCK_M, DIM, PARTS
                )
                done = request_groups == 1
                if request_groups > 1:
                    slot = group_slot.to(tl.int64) * BLOCK_M
                    tl.store(group_lse + slot + rows, lse, mask=row_mask)
                    to = group_out + (slot + rows)[:, None] * DIM + cols[None, :]
                    tl.store(to, acc, mask=row_mask[:, None])
                    tl.debug_barrier()
                    count = tl.atomic_add(counters + groups + request, 1, sem="acq_rel")
                    done = count == request_groups - 1
                    if done:
                        tl.debug_barrier()
                        tl.store(counters + groups + request, 0)
                        first = (first_part + request) // PARTS + request
                        acc, lse = _add_up(
                            group_out,
                            group_lse,
                            first,
                            request_groups,
                            rows,
                            row_mask,
                            BLOCK_M,
                            DIM,
                            GROUPS,
                        )
        if done:
            token = request.to(tl.int64) * QUERY_LEN + query
            to = out + token * stride_out_token + head * stride_out_head
            tl.store(
                to[:, None] + cols[None, :], acc.to(out.dtype.element_ty), mask=row_mask[:, None]
            )
        start += tiles
        tile = stop
        request += 1

    # Padding rows are in no part of the list.
    for padding in range(part, batch, programs):
        if tl.load(seq_lens + padding) == 0:
            token = (padding * QUERY_LEN + query).to(tl.int64)
            to = out + token * stride_out_token + head * stride_out_head
            nothing = tl.zeros([BLOCK_M, DIM], out.dtype.element_ty)
            tl.store(to[:, None] + cols[None, :], nothing, mask=row_mask[:, None])
