# SPDX-License-Identifier: Apache-2.0
"""What the MHA drafter's attention and the state of a proposal are, in plain torch.

One request at a time, every step written out, attention in float64: the judge of ``mha_decode``'s
and ``draft_state``'s tests and benchmarks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mha_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    query_len: int,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Causal attention of `query_len` tokens per request over a paged cache of keys and values.

    Sizes: `B` requests, `T` query tokens each, `N` heads, `G` key heads, `D` width of a head.

    Args:
        q: `[B * T, N, D]`; rows `b * T` to `b * T + T - 1` are request b's.
        k_cache: `[blocks, page, G, D]`; head n takes key head `n // (N / G)`.
        v_cache: `[blocks, page, G, D]`.
        block_table: `[B, pages]`; entries beyond the request's length may be anything.
        seq_lens: `[B]`, tokens in the cache, the T of the queries included. Lengths below T are
            allowed; 0 is a padding row.
        scale: factor of the scores before the softmax.
        query_len: T. Query t sees the first `seq_len - T + t + 1` tokens.
        k_scale: one element; the cache holds keys divided by it. None: 1.
        v_scale: likewise for values.
        dtype: of the computation and of the result.

    Returns:
        `[B * T, N, D]`. A query that sees no token gets 0.
    """
    tokens, heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    k_factor = 1.0 if k_scale is None else k_scale.to(dtype)
    v_factor = 1.0 if v_scale is None else v_scale.to(dtype)
    out = torch.zeros(tokens, heads, head_dim, dtype=dtype, device=q.device)
    for request, length in enumerate(seq_lens.tolist()):
        blocks = block_table[request, : -(-length // page)].long()
        keys = k_cache[blocks].flatten(0, 1)[:length].to(dtype) * k_factor  # [length, G, D]
        values = v_cache[blocks].flatten(0, 1)[:length].to(dtype) * v_factor
        keys = keys.repeat_interleave(heads // kv_heads, dim=1)  # [length, N, D]
        values = values.repeat_interleave(heads // kv_heads, dim=1)
        for t in range(query_len):
            seen = length - query_len + t + 1
            if seen <= 0:
                continue
            row = request * query_len + t
            scores = torch.einsum("nd,lnd->nl", q[row].to(dtype), keys[:seen]) * scale
            out[row] = torch.einsum("nl,lnd->nd", scores.softmax(-1), values[:seen])
    return out


def ids_of_keys(keys_by_rank: Tensor) -> Tensor:
    """Target ids `[B]` of `head_argmax`'s keys `[ranks, B]`: of the largest key of a column."""
    return 0x7FFFFFFF - (keys_by_rank.max(0).values & 0xFFFFFFFF)


def next_step_reference(
    positions: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    was_past: Tensor,
    *,
    page_size: int,
    max_model_len: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, slots and lengths of the draft step after one, as stock's proposer has them.

    Args:
        positions: `[B]`.
        seq_lens: `[B]`; 0 is padding.
        block_table: `[B, pages]`.
        was_past: `[B]` bool: the request was past the length limit before.
        page_size: tokens per page.
        max_model_len: the length limit.
    """
    positions, seq_lens = positions.clone(), seq_lens.clone()
    slots = torch.full_like(positions, -1)
    for request, length in enumerate(seq_lens.tolist()):
        position = int(positions[request]) + 1
        if length <= 0:
            positions[request] = 0
            seq_lens[request] = 0
        elif position >= max_model_len or was_past[request]:
            positions[request] = 0
            seq_lens[request] = 1
        else:
            column = min(position // page_size, block_table.shape[1] - 1)
            slots[request] = block_table[request, column] * page_size + position % page_size
            positions[request] = position
            seq_lens[request] = min(length + 1, max_model_len)
    return positions, slots, seq_lens
