# SPDX-License-Identifier: Apache-2.0
"""The residual's sum and the RMSNorm of it, in one pass over the row.

Unlike stock's ``fused_add_rms_norm`` it may write to other places than its inputs, and the residual
may be half of a wider row, as the drafter's normed hidden state is: neither is copied before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import FLOATS, check, rms_normed, row_warps

__all__ = ["add_rms_norm"]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    sum_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``s = x + residual`` and ``rms_norm(s) * weight``.

    The sum is rounded to the dtype of ``x``, and the norm is of the rounded sum.

    Args:
        x: [T, H], bfloat16, float16 or float32, last stride 1 as for all rows here.
        residual: [T, H] in the dtype of ``x``.
        weight: [H].
        eps: of the norm.
        out: [T, H] in the dtype of ``x``; made if None. It may be ``x``.
        sum_out: [T, H] in the dtype of ``x``; made if None. It may be ``residual``.

    Returns:
        ``out``, the normed sum, and ``sum_out``, the sum.

    Raises:
        ValueError: a shape, dtype or stride that it cannot take.
    """
    tokens, width = x.shape
    check("x", x, (tokens, width), FLOATS)
    check("residual", residual, (tokens, width), x.dtype)
    check("weight", weight, (width,), FLOATS)
    if out is None:
        out = x.new_empty(tokens, width)
    if sum_out is None:
        sum_out = x.new_empty(tokens, width)
    check("out", out, (tokens, width), x.dtype)
    check("sum_out", sum_out, (tokens, width), x.dtype)
    if tokens == 0:
        return out, sum_out
    _add_rms_norm[(tokens,)](
        x,
        residual,
        weight,
        out,
        sum_out,
        eps,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        sum_out.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=row_warps(width),
    )
    return out, sum_out


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    sum_out,
    eps,
    stride_x,
    stride_residual,
    stride_out,
    stride_sum,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (token): its row, which is read before it is written."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    added = tl.load(x + token * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(residual + token * stride_residual + cols, mask=mask, other=0.0)
    scale = tl.load(weight + cols, mask=mask, other=0.0)
    total = (added + before.to(tl.float32)).to(sum_out.dtype.element_ty)
    y = rms_normed(total, scale, eps, WIDTH)
    tl.store(sum_out + token * stride_sum + cols, total, mask=mask)
    tl.store(out + token * stride_out + cols, y.to(out.dtype.element_ty), mask=mask)
