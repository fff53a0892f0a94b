# SPDX-License-Identifier: Apache-2.0
"""The norms before an EAGLE-3.1 drafter's ``fc``: every chunk of a row its own RMSNorm.

``fc_norm`` has one norm for each aux hidden state of the target, ``norm_before_fc`` one for all of
them together, which is one chunk here. Stock takes the row apart, norms the parts and puts them
together again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import FLOATS, check, rms_normed, row_warps

__all__ = ["fc_norm"]


def fc_norm(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm of each of the n chunks of every row, with a weight of its own.

    Args:
        hidden: [T, n * W], bfloat16, float16 or float32, last stride 1.
        weights: [n, W], last stride 1.
        eps: of all norms.
        out: [T, n * W] in the dtype of ``hidden``, last stride 1; made if None. It may be
            ``hidden``.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype or stride that it cannot take.
    """
    tokens = hidden.shape[0]
    chunks, width = weights.shape
    check("weights", weights, (chunks, width), FLOATS)
    check("hidden", hidden, (tokens, chunks * width), FLOATS)
    if out is None:
        out = hidden.new_empty(tokens, chunks * width)
    check("out", out, (tokens, chunks * width), hidden.dtype)
    if tokens == 0:
        return out
    _fc_norm[(tokens, chunks)](
        hidden,
        weights,
        out,
        eps,
        hidden.stride(0),
        weights.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=row_warps(width),
    )
    return out


@triton.jit
def _fc_norm(
    hidden,
    weights,
    out,
    eps,
    stride_hidden,
    stride_weights,
    stride_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (token, chunk): one chunk, which is read before it is written."""
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    start = chunk * WIDTH
    x = tl.load(hidden + token * stride_hidden + start + cols, mask=mask, other=0.0)
    weight = tl.load(weights + chunk * stride_weights + cols, mask=mask, other=0.0)
    y = rms_normed(x, weight, eps, WIDTH)
    tl.store(out + token * stride_out + start + cols, y.to(out.dtype.element_ty), mask=mask)
