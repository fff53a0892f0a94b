# SPDX-License-Identifier: Apache-2.0
"""What MLA decode attention computes, in plain torch: judge of the kernel's tests and benchmarks.

One request at a time, every step written out, in float64 unless asked otherwise. It takes the
kernel's arguments and rounds nothing: a kernel is as good as its distance from this.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mla_decode_reference(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    query_len: int,
    kv_lora_rank: int = 512,
    kv_scale: Tensor | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention of `query_len` tokens per request over a paged cache of latents.

    Sizes: `B` requests, `T` query tokens each, `N` heads, `R` latent rank, `P` rope channels.

    Args:
        q: `[B * T, N, R + P]`; rows `b * T` to `b * T + T - 1` are request b's.
        kv_cache: `[blocks, page, R + P]`. The first R channels are both the values and part of the
            keys, shared by all heads; the last P are the keys' rope channels.
        block_table: `[B, pages]`: block `block_table[b, i]` holds request b's tokens `i * page` to
            `i * page + page - 1`. Entries beyond the request's length may be anything.
        seq_lens: `[B]`, tokens in the cache, the T of the queries included. Lengths below T are
            allowed; 0 is a padding row.
        scale: factor of the scores before the softmax.
        query_len: T.
        kv_lora_rank: R.
        kv_scale: one element; the cache holds values divided by it. None: 1.
        causal: query t sees the first `seq_len - T + t + 1` tokens. Otherwise all `seq_len`.
        dtype: of the computation and of the results.

    Returns:
        `[B * T, N, R]`, and the natural logarithm of the sum of the scores' exponentials,
        `[B * T, N]`. A query that sees no token gets 0 and -inf.
    """
    rows, heads, _ = q.shape
    page = kv_cache.shape[1]
    out = torch.zeros(rows, heads, kv_lora_rank, dtype=dtype, device=q.device)
    lse = torch.full((rows, heads), -torch.inf, dtype=dtype, device=q.device)
    factor = 1.0 if kv_scale is None else kv_scale.to(dtype)
    for request, length in enumerate(seq_lens.tolist()):
        blocks = block_table[request, : -(-length // page)].long()
        tokens = kv_cache[blocks].flatten(0, 1)[:length].to(dtype) * factor  # [length, R + P]
        for t in range(query_len):
            seen = length - query_len + t + 1 if causal else length
            if seen <= 0:
                continue
            row = request * query_len + t
            scores = q[row].to(dtype) @ tokens[:seen].T * scale  # [N, seen]
            lse[row] = scores.logsumexp(-1)
            out[row] = scores.softmax(-1) @ tokens[:seen, :kv_lora_rank]
    return out, lse
