# SPDX-License-Identifier: Apache-2.0
"""The interpreter computes with the numbers that the hardware has (see interpreter.py)."""

from __future__ import annotations

import pytest
import torch

from .interpreter import interpreted

with interpreted():  # Triton is there already, from conftest.py; only the decorators are ours.
    import triton
    import triton.language as tl

    @triton.jit
    def _product(a, b, out, TYPE: tl.constexpr):  # noqa: N803
        i = tl.arange(0, 16)
        at = i[:, None] * 16 + i[None, :]
        tl.store(out + at, tl.dot(tl.load(a + at).to(TYPE), tl.load(b + at).to(TYPE)))

    @triton.jit
    def _copy(source, out):
        i = tl.arange(0, 256)
        tl.store(out + i, tl.load(source + i).to(tl.float32).to(out.dtype.element_ty))

    @triton.jit
    def _sum(a, b, out):
        i = tl.arange(0, 16)
        tl.store(out + i, tl.load(a + i) + tl.load(b + i))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float16])
def test_dot(stored: torch.dtype, computed: torch.dtype) -> None:
    a, b = (torch.randn(16, 16).to(stored) for _ in range(2))
    out = torch.full((16, 16), torch.nan)
    _product[(1,)](a, b, out, {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[computed])
    expected = a.to(computed).float() @ b.to(computed).float()
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_conversions_round_to_nearest(stored: torch.dtype, wanted: torch.dtype) -> None:
    source = torch.randn(256).to(stored)
    out = torch.full((256,), torch.nan, dtype=wanted)
    _copy[(1,)](source, out)
    assert torch.equal(out, source.to(wanted))


def test_every_float8() -> None:
    source = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    out = torch.empty(256)
    _copy[(1,)](source, out)
    assert torch.equal(out.nan_to_num(7e7), source.float().nan_to_num(7e7))
    assert out.isnan().sum() == 2


def test_sums_of_bfloat16_are_refused() -> None:
    ones = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="cannot compute in bf16"):
        _sum[(1,)](ones, ones, torch.empty_like(ones))
