# SPDX-License-Identifier: Apache-2.0
"""The gate of the drafter's MLP: ``silu(gate) * up``.

Stock has one block per token, which at a draft step's few tokens leaves the GPU empty; here the
columns of a row are spread over programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import FLOATS, check

__all__ = ["silu_mul"]

_COLUMNS = 1024
_WARPS = 4  # 8 columns a thread: 16 bytes of each half.


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up``, with ``silu(gate)`` rounded to the dtype before the product.

    Args:
        gate_up: [T, 2 * I], the gate's columns first; bfloat16, float16 or float32, last stride 1.
        out: [T, I] in the dtype of ``gate_up``, last stride 1; made if None.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype or stride that it cannot take.
    """
    tokens, both = gate_up.shape
    if both % 2:
        raise ValueError(f"gate_up is {both} wide; it must be two halves of one width")
    width = both // 2
    check("gate_up", gate_up, (tokens, both), FLOATS)
    if out is None:
        out = gate_up.new_empty(tokens, width)
    check("out", out, (tokens, width), gate_up.dtype)
    if tokens == 0:
        return out
    _silu_mul[(tokens, triton.cdiv(width, _COLUMNS))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=_COLUMNS,
        num_warps=_WARPS,
    )
    return out


@triton.jit
def _silu_mul(
    gate_up,
    out,
    stride_gate_up,
    stride_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (token, columns): some columns of the token's row."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < WIDTH
    row = gate_up + token * stride_gate_up + cols
    gate = tl.load(row, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + WIDTH, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + token * stride_out + cols, (gate * up).to(dtype), mask=mask)
