# SPDX-License-Identifier: Apache-2.0
"""What the decode kernels of a paged cache share: ``mla_decode`` and ``mha_decode``.

Both cut the list of all tiles of all requests into equal parts, look up the page of a tile, and
take it into a softmax; their limits and what they check of a call are the same where the layout of
the cache does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_QUERY_LEN = 9
"""The most query tokens of one request in a call: eight drafts and the token before them."""

LOG2_E = 1.4426950408889634
_FEW_REQUESTS = 16


def batch_block(batch: int, max_batch: int | None) -> int:
    """How many requests a kernel is compiled for.

    Two numbers for all batches up to ``max_batch``, so that none is compiled while serving: one up
    to 16 requests, and one for more.
    """
    if batch <= _FEW_REQUESTS:
        return _FEW_REQUESTS
    return int(triton.next_power_of_2(max(batch, max_batch or 0)))


def check_requests(
    tokens: int,
    query_len: int,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *others: tuple[str, torch.Tensor],
) -> None:
    """Raise ValueError unless a call's tensors agree about its requests.

    Args:
        tokens: rows of the queries.
        query_len: query tokens per request.
        block_table: of the call.
        seq_lens: of the call.
        others: by name, what also has to have last stride 1.
    """
    batch = seq_lens.shape[0]
    if tokens != batch * query_len:
        raise ValueError(
            f"q has {tokens} tokens; seq_lens has {batch} requests of {query_len} tokens each"
        )
    if block_table.shape[0] < batch:
        raise ValueError(f"block_table has {block_table.shape[0]} rows for {batch} requests")
    for name, tensor in (*others, ("block_table", block_table)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} has last stride {tensor.stride(-1)}; it must be 1")
    for name, tensor in (("block_table", block_table), ("seq_lens", seq_lens)):
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} is {tensor.dtype}; it must be torch.int32")


def check_fp8(name: str, cache: torch.Tensor, scale_name: str, scale: torch.Tensor | None) -> None:
    """Raise ValueError unless an fp8 cache can be read in words and has its scale."""
    if scale is None or scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(f"an fp8 cache needs {scale_name}, a float32 tensor of one element")
    if any(stride % 4 for stride in cache.stride()[:-1]):
        raise ValueError(
            f"an fp8 {name} has strides {tuple(cache.stride())}; it is read in words of 4 "
            "bytes, so all but the last must be multiples of 4"
        )


def check_workspace(workspace: torch.Tensor, needed: int, *, enough: bool) -> None:
    """Raise ValueError, with the elements ``needed``, unless they are enough, and float32."""
    if not enough or workspace.dtype != torch.float32 or not workspace.is_contiguous():
        raise ValueError(
            f"workspace has {workspace.numel()} elements of {workspace.dtype}, strides "
            f"{tuple(workspace.stride())}; this call needs {needed} of torch.float32, contiguous "
            "(see workspace_numel)"
        )


@triton.jit
def schedule(
    seq_lens,
    batch,
    programs,
    BATCH_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr,
):
    """Where every request ends in the list of all tiles, and how many tiles a program takes."""
    requests = tl.arange(0, BATCH_BLOCK)
    lens = tl.load(seq_lens + requests, mask=requests < batch, other=0)
    ends = tl.cumsum((lens + BLOCK_N - 1) // BLOCK_N, 0)
    total = tl.max(ends, 0)
    share = tl.maximum((total + programs - 1) // programs, MIN_TILES)
    return requests, ends, total, share


@triton.jit
def product_type(x, INTERPRETED: tl.constexpr):
    """``x`` as products take it; the interpreter takes the bits of bfloat16 for integers."""
    if INTERPRETED:
        x = x.to(tl.float32)
    return x


@triton.jit
def unpack(words, INTERPRETED: tl.constexpr):
    """Words of four fp8 values as four tiles of float16, which has all values of float8_e4m3.

    Tile j has byte j of every word, that is every fourth column from j on. Impure assembly, since
    Triton moves a pure conversion behind shared memory: then it is done twice, for scores and for
    values, and the second time on a layout that must be gathered byte by byte.
    """
    if INTERPRETED:
        b0 = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        b1 = (words >> 8 & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        b2 = (words >> 16 & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        b3 = (words >> 24 & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes01, bytes23;
            .reg .b16 low, high;
            prmt.b32 bytes01, $4, $5, 0x5140;
            prmt.b32 bytes23, $4, $5, 0x7362;
            mov.b32 {low, high}, bytes01;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            mov.b32 {low, high}, bytes23;
            cvt.rn.f16x2.e4m3x2 $2, low;
            cvt.rn.f16x2.e4m3x2 $3, high;
            }""",
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=False,
            pack=2,
        )
    return b0, b1, b2, b3


@triton.jit
def queries(rows, cols, row_mask, KV, INTERPRETED: tl.constexpr):
    """A tile of queries in the type of the products."""
    x = tl.load(rows[:, None] + cols[None, :], mask=row_mask[:, None], other=0.0)
    return product_type(x.to(KV.dtype.element_ty), INTERPRETED)


@triton.jit
def queries_in_fours(rows, row_mask, BLOCK_M: tl.constexpr, QUARTER: tl.constexpr):
    """Four tiles of queries as float16: tile j has every fourth column from j on, as `unpack`.

    Loaded side by side and then split: a thread that loads every fourth column alone takes as
    many transactions as there are elements. What float16 does not hold is cut off: an infinity
    less an infinity is no number.
    """
    cols = tl.arange(0, 4 * QUARTER)
    x = tl.load(rows[:, None] + cols[None, :], mask=row_mask[:, None], other=0.0).to(tl.float32)
    x = tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)
    even, odd = tl.split(tl.reshape(x, [BLOCK_M, QUARTER, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def pages_of(pages, n, seq_len, tokens, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of the tile from token ``n`` on, or of each of its tokens; never past the end."""
    n = tl.minimum(n, seq_len - 1)
    if PAGE % BLOCK_N == 0:
        page = tl.load(pages + n // PAGE)
    else:
        page = tl.load(pages + tl.minimum(n + tokens, seq_len - 1) // PAGE)
    return page


@triton.jit
def rows_in_page(n, seq_len, tokens, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows, in their pages, of the tile from token ``n`` on.

    Past the end the last row is taken again: what lies there may be no number at all, and no
    number times a weight of 0 is not 0.
    """
    n = tl.minimum(n, seq_len - 1)
    token = tl.minimum(n + tokens, seq_len - 1)
    if PAGE % BLOCK_N == 0:
        row = token - n // PAGE * PAGE
    else:
        row = token % PAGE
    return row


@triton.jit
def softmax_step(scores, seen, peak, norm):
    """One tile of the softmax, in base 2: its weights, the factor for what was, peak and norm."""
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet: minus infinity less itself is no number.
    origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink = tl.exp2(peak - origin)
    weights = tl.exp2(scores - origin[:, None])
    norm = norm * shrink + tl.sum(weights, 1)
    return weights, shrink[:, None], new_peak, norm
