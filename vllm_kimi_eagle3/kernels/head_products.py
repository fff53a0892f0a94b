# SPDX-License-Identifier: Apache-2.0
"""A small product for each head: the up-projections that an MLA decode absorbs.

For few tokens ``torch.bmm`` wants the tokens moved behind the heads and back; here every head reads
its rows of ``x`` and writes its rows of the result where they lie. The weight is taken with the
strides that the release's views of ``kv_b_proj`` have, so it is not copied.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from .arch import Arch, arch_of
from .skinny_gemm import DTYPES

__all__ = ["head_products"]

_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# Bytes of an inner step of the weight's tile, which with 16 rows of x is 12 to 24 KiB of shared
# memory in each of the 2 tiles in flight: every GPU has that.
BLOCK_K = 128
NUM_WARPS = 4
NUM_STAGES = 3


def head_products(
    x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``out[t, h] = x[t, h] @ weight[h]`` with float32 accumulation, rounded once.

    Args:
        x: [T, heads, K], bfloat16, float16 or float32, last stride 1.
        weight: [heads, K, N] of the same dtype, any strides.
        out: [T, heads, N] of that dtype, last stride 1; made if None.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype or stride that it cannot take; says which.
    """
    if x.dim() != 3 or weight.dim() != 3 or tuple(x.shape[1:]) != tuple(weight.shape[:2]):
        raise ValueError(f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}")
    if x.dtype != weight.dtype or x.dtype not in DTYPES:
        raise ValueError(
            f"x is {x.dtype} and weight {weight.dtype}; they must agree, and it takes "
            f"{', '.join(map(str, DTYPES))}"
        )
    if x.stride(-1) != 1:
        raise ValueError(f"x has last stride {x.stride(-1)}; it must be 1")
    tokens, heads, size_k = x.shape
    columns = weight.shape[2]
    if out is None:
        out = torch.empty(tokens, heads, columns, dtype=x.dtype, device=x.device)
    elif tuple(out.shape) != (tokens, heads, columns) or out.dtype != x.dtype:
        raise ValueError(
            f"out is {tuple(out.shape)} of {out.dtype}; it must be {(tokens, heads, columns)} of "
            f"{x.dtype}"
        )
    if out.stride(-1) != 1:
        raise ValueError(f"out has last stride {out.stride(-1)}; it must be 1")
    if tokens == 0:
        return out
    block_t = 16 if tokens <= 16 else 32
    block_n = head_block_n(arch_of(x.device), heads=heads, columns=columns)
    block_k = max(16, min(BLOCK_K * 2 // x.element_size(), triton.next_power_of_2(size_k)))
    _head_products[(triton.cdiv(tokens, block_t), triton.cdiv(columns, block_n), heads)](
        x,
        weight,
        out,
        tokens,
        columns,
        size_k,
        x.stride(0),
        x.stride(1),
        weight.stride(0),
        weight.stride(1),
        weight.stride(2),
        out.stride(0),
        out.stride(1),
        EVEN=size_k % block_k == 0 and columns % block_n == 0,
        INTERPRETED=_INTERPRETED,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out


def head_block_n(arch: Arch, *, heads: int, columns: int) -> int:
    """Columns of a program: the most of 64, 32 and 16 that give each multiprocessor a program."""
    return next((n for n in (64, 32) if heads * -(-columns // n) >= arch.sm_count), 16)


# Values that change with the batch must not be compiled in.
@triton.jit(do_not_specialize=["tokens", "columns"])
def _head_products(
    X,
    W,
    OUT,
    tokens,
    columns,
    size_k,
    stride_x_token,
    stride_x_head,
    stride_w_head,
    stride_w_k,
    stride_w_column,
    stride_out_token,
    stride_out_head,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (block of tokens, block of columns, head)."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    token_mask = (token < tokens)[:, None]
    inner = tl.arange(0, BLOCK_K)
    x_at = X + head * stride_x_head + token.to(tl.int64)[:, None] * stride_x_token + inner[None, :]
    w_at = W + head * stride_w_head
    w_at += inner[:, None] * stride_w_k + column[None, :] * stride_w_column
    acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for k in tl.range(0, size_k, BLOCK_K):
        if EVEN:
            x = tl.load(x_at + k, mask=token_mask, other=0.0)
            w = tl.load(w_at + k * stride_w_k)
        else:
            there = inner + k < size_k
            x = tl.load(x_at + k, mask=token_mask & there[None, :], other=0.0)
            w_mask = there[:, None] & (column < columns)[None, :]
            w = tl.load(w_at + k * stride_w_k, mask=w_mask, other=0.0)
        if INTERPRETED:  # It takes the bits of bfloat16 for integers.
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    out_at = OUT + token.to(tl.int64)[:, None] * stride_out_token + head * stride_out_head
    tl.store(
        out_at + column[None, :],
        acc.to(OUT.dtype.element_ty),
        mask=token_mask & (column < columns)[None, :],
    )
