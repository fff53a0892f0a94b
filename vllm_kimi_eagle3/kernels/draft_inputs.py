# SPDX-License-Identifier: Apache-2.0
"""The input of an EAGLE-3 drafter's layer: embedding and hidden state, normed, side by side.

Stock does a gather, two norms and a concatenation, four kernels of a row each. Here a token has
two programs, one for each half of its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import FLOATS, check, rms_normed, row_warps

__all__ = ["draft_inputs"]


def draft_inputs(
    hidden: torch.Tensor,
    *,
    input_norm: torch.Tensor,
    hidden_norm: torch.Tensor,
    eps: float,
    embeds: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    embed_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[rms_norm(embedding) * input_norm, rms_norm(hidden) * hidden_norm]`` of every token.

    Args:
        hidden: [T, H], bfloat16, float16 or float32, last stride 1 as for all rows here.
        input_norm: [H], the weight of the embedding's norm.
        hidden_norm: [H], the weight of the hidden state's norm.
        eps: of both norms.
        embeds: [T, H] in the dtype of ``hidden``; or None, and then
        token_ids: [T] int32 or int64, and
        embed_table: [V, H] in the dtype of ``hidden``. An id outside the table counts as an
            embedding of zeros, and so is its half of the row.
        out: [T, 2H] in the dtype of ``hidden``; made if None.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype or stride that it cannot take, or not one embedding of the two.
    """
    tokens, width = hidden.shape
    check("hidden", hidden, (tokens, width), FLOATS)
    check("input_norm", input_norm, (width,), FLOATS)
    check("hidden_norm", hidden_norm, (width,), FLOATS)
    if embeds is not None:
        if token_ids is not None or embed_table is not None:
            raise ValueError("embeds were given, and token_ids or embed_table too")
        check("embeds", embeds, (tokens, width), hidden.dtype)
        source, rows = embeds, tokens
    else:
        if token_ids is None or embed_table is None:
            raise ValueError("neither embeds were given, nor token_ids and embed_table")
        check("token_ids", token_ids, (tokens,), (torch.int32, torch.int64))
        check("embed_table", embed_table, (embed_table.shape[0], width), hidden.dtype)
        source, rows = embed_table, embed_table.shape[0]
    if out is None:
        out = hidden.new_empty(tokens, 2 * width)
    check("out", out, (tokens, 2 * width), hidden.dtype)
    if tokens == 0:
        return out
    _draft_inputs[(tokens, 2)](
        source,
        token_ids,
        hidden,
        input_norm,
        hidden_norm,
        out,
        eps,
        rows,
        source.stride(0),
        hidden.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=row_warps(width),
    )
    return out


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["token_ids"])
def _draft_inputs(
    source,
    token_ids,
    hidden,
    input_norm,
    hidden_norm,
    out,
    eps,
    rows,
    stride_source,
    stride_hidden,
    stride_out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (token, half): one half of the token's row."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < WIDTH
    to = out + token * stride_out
    if tl.program_id(1) == 0:
        input_weight = tl.load(input_norm + cols, mask=mask, other=0.0)
        if token_ids is None:
            row = token
        else:
            row = tl.load(token_ids + token).to(tl.int64)
        # A bound and no scalar in the mask, which Triton 3.9's interpreter does not take there.
        there = (row >= 0) & (row < rows)
        bound = tl.where(there, WIDTH, 0)
        x = tl.load(source + row * stride_source + cols, mask=cols < bound, other=0.0)
        y = tl.where(there, rms_normed(x, input_weight, eps, WIDTH), 0.0)
        tl.store(to + cols, y.to(out.dtype.element_ty), mask=mask)
    else:
        hidden_weight = tl.load(hidden_norm + cols, mask=mask, other=0.0)
        x = tl.load(hidden + token * stride_hidden + cols, mask=mask, other=0.0)
        y = rms_normed(x, hidden_weight, eps, WIDTH)
        tl.store(to + WIDTH + cols, y.to(out.dtype.element_ty), mask=mask)
