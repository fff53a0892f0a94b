# SPDX-License-Identifier: Apache-2.0
"""What the drafter's products compute, in plain torch: judge of the kernels' tests and benchmarks.

In float64, and nothing is rounded but the logits of the head, whose rounding decides ties.
"""

from __future__ import annotations

import torch
from torch import Tensor


def skinny_gemm_reference(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`: `[T, K]`, `[N, K]` to `[T, N]`, float64."""
    return x.double() @ weight.double().T


def head_products_reference(x: Tensor, weight: Tensor) -> Tensor:
    """`out[t, h] = x[t, h] @ weight[h]`: `[T, heads, K]`, `[heads, K, N]`, float64."""
    return torch.einsum("thk,hkn->thn", x.double(), weight.double())


def head_logits_reference(hidden: Tensor, weight: Tensor, *, rows: int) -> Tensor:
    """`[T, rows]` float64: the logits of the weight's first `rows` rows, not rounded."""
    return hidden.double() @ weight[:rows].double().T


def head_keys_reference(
    logits: Tensor, *, dtype: torch.dtype, first: int = 0, d2t: Tensor | None = None
) -> Tensor:
    """The keys of the best columns, one row at a time.

    Args:
        logits: `[T, rows]`.
        dtype: that of the model, which logits are rounded to.
        first: draft id of the first column.
        d2t: `[draft vocabulary]`, target id less draft id.

    Returns:
        `[T]` int64: the rounded logit in an order-preserving code of 32 bits, above 0x7fffffff less
        the target id. NaN has the largest code; of equal logits the smallest target id wins.
    """
    rounded = logits.to(dtype).float().cpu()
    draft = first + torch.arange(logits.shape[1])
    target = draft if d2t is None else draft + d2t.cpu().long()[draft]
    keys = []
    for row in rounded:
        best = torch.where(row.isnan(), torch.inf, row).max()
        if row.isnan().any():
            chosen, code = target[row.isnan()].min(), 0x7FFFFFFF
        else:
            chosen = target[row == best].min()
            bits = int((best + 0.0).view(torch.int32))
            code = bits if bits >= 0 else bits ^ 0x7FFFFFFF
        keys.append((code << 32) | (0x7FFFFFFF - int(chosen)))
    return torch.tensor(keys, dtype=torch.int64, device=logits.device)
