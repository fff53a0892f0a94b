# SPDX-License-Identifier: Apache-2.0
"""Random inputs of MLA decode attention, with NaN wherever the kernel has no business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

R, P = 512, 64  # Latent rank and rope channels of Kimi and DeepSeek-V3.
SCALE = (128 + 64) ** -0.5  # Their softmax scale, without YaRN's factor.


@dataclass
class Case:
    """Arguments of `mla_decode` and of its reference.

    Attributes:
        tensors: q, kv_cache, block_table, seq_lens.
        keywords: scale, query_len, causal, and for float8 kv_scale.
    """

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    keywords: dict[str, Any]


def make_case(
    generator: torch.Generator,
    lengths: Sequence[int],
    *,
    heads: int,
    query_len: int,
    page: int = 64,
    q_dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    table_width: int | None = None,
    causal: bool = True,
    strided: bool = False,
    shared_prefix: bool = False,
    spread: float = 1.0,
) -> Case:
    """Requests of the given lengths.

    The pages lie in random order in a pool with as many pages again that hold NaN; so do the slots
    behind a request's end, and its row of the block table goes on with NaN pages.

    Args:
        generator: of the device on which the tensors shall be.
        lengths: tokens in the cache per request.
        table_width: columns of the block table; what the longest request needs, and two more, if
            not given.
        strided: q, the cache and the block table are views of larger tensors that hold NaN.
        shared_prefix: the first pages of all requests are those of the first.
        spread: standard deviation of the queries; a large one makes the softmax pick few tokens.
    """
    device = generator.device
    kv_dtype = kv_dtype or q_dtype
    pages = [-(-length // page) for length in lengths]
    width = table_width or max(pages) + 2
    used = max(1, sum(pages))
    margin = int(strided)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def poison(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, device=device)

    rows = len(lengths) * query_len
    q = poison(rows + margin, heads + 3 * margin, R + P + 16 * margin).to(q_dtype)
    q = q[:rows, :heads, : R + P]
    q.copy_(normal(rows, heads, R + P) * spread)

    cache = poison(2 * used, page + margin, R + P + 64 * margin).to(kv_dtype)
    cache = cache[:, :page, : R + P]
    bits = cache.view(torch.uint8) if kv_dtype.itemsize == 1 else cache  # For index_put_.
    order = torch.randperm(2 * used, generator=generator, device=device)
    good, bad = order[:used], order[used:]

    table = torch.zeros(len(lengths), width + 5 * margin, dtype=torch.int32, device=device)
    table = table[:, :width]
    table.copy_(bad[torch.randint(used, table.shape, generator=generator, device=device)])
    first = 0
    for request, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        mine = good[first : first + count]
        first += count
        tokens = poison(count * page, R + P)
        tokens[:length] = normal(length, R + P)
        bits[mine] = tokens.to(kv_dtype).view(count, page, R + P).view(bits.dtype)
        if shared_prefix and request:
            common = min(length, lengths[0]) // page
            mine = torch.cat([table[0, :common], mine[common:]])
        table[request, :count] = mine

    keywords: dict[str, Any] = {"scale": SCALE, "query_len": query_len, "causal": causal}
    if kv_dtype == torch.float8_e4m3fn:
        keywords["kv_scale"] = torch.tensor([0.75], device=device)
    seq_lens = torch.tensor(list(lengths), dtype=torch.int32, device=device)
    return Case((q, cache, table, seq_lens), keywords)
