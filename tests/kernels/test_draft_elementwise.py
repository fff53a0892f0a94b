# SPDX-License-Identifier: Apache-2.0
"""The drafter's row kernels in Triton's interpreter, against float64 and against stock's roundings.

Every buffer that a kernel writes, and every gap between rows, holds NaN before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_kimi_eagle3.kernels.add_rms_norm import add_rms_norm
from vllm_kimi_eagle3.kernels.draft_inputs import draft_inputs
from vllm_kimi_eagle3.kernels.draft_reference import (
    add_rms_norm_reference,
    draft_inputs_reference,
    fc_norm_reference,
    silu_mul_reference,
)
from vllm_kimi_eagle3.kernels.fc_norm import fc_norm
from vllm_kimi_eagle3.kernels.rows import row_warps
from vllm_kimi_eagle3.kernels.silu_mul import silu_mul

from .operations import Operations

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-5
# Relative: two roundings, of the norm or the gate and of the product, and float32 in between.
ROUNDINGS = {BF16: 2 * 2.0**-8, FP16: 2 * 2.0**-11, FP32: 2e-6}
# The smallest numbers that are exact to the last bit.
SMALLEST = {BF16: 1e-37, FP16: 2.0**-24, FP32: 1e-37}

ANY = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
DTYPES = st.sampled_from([BF16, FP16, FP32])
WIDTHS = st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 200, 1024, 1025, 1536]))
TOKENS = st.integers(0, 5)
SEEDS = st.integers(0, 1000).map(lambda seed: torch.Generator().manual_seed(seed))
# Of what is normed: zeros, numbers whose squares float16 does not hold, and small ones.
SPREADS = st.sampled_from([1.0, 0.0, 1e-4, 300.0])


def numbers(
    generator: torch.Generator,
    *shape: int,
    dtype: torch.dtype,
    spread: float = 1.0,
    gap: int = 0,
    start: int = 0,
) -> Tensor:
    """Random numbers; rows are `gap` elements apart, which are NaN, as are `start` before them."""
    *outer, width = shape
    held = torch.full((*outer, start + width + gap), torch.nan, dtype=dtype)
    held[..., start : start + width] = torch.randn(shape, generator=generator).mul(spread)
    return held[..., start : start + width]


def poisoned(*shape: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    """A buffer of NaN."""
    *outer, width = shape
    return torch.full((*outer, width + gap), torch.nan, dtype=dtype)[..., :width]


def close(ours: Tensor, exact: Tensor, factor: float = 1.0) -> None:
    """Equal but for the dtype's roundings."""
    torch.testing.assert_close(
        ours.double(), exact, rtol=factor * ROUNDINGS[ours.dtype], atol=SMALLEST[ours.dtype]
    )


def stock_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As vLLM's `RMSNorm.forward_native` has it: rounded before the weight and after it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def nearly_same_bits(ours: Tensor, stocks: Tensor) -> None:
    """Equal, but for rare elements whose float32 sum ended on the other side of a rounding."""
    assert (ours != stocks).float().mean() < 0.02
    close(ours, stocks.double(), 2.0)


@ANY
@given(SEEDS, TOKENS, WIDTHS, DTYPES, SPREADS, st.integers(0, 3), st.booleans())
def test_draft_inputs_of_embeds(
    generator: torch.Generator,
    tokens: int,
    width: int,
    dtype: torch.dtype,
    spread: float,
    gap: int,
    wide_weight: bool,
) -> None:
    hidden = numbers(generator, tokens, width, dtype=dtype, spread=spread, gap=gap)
    embeds = numbers(generator, tokens, width, dtype=dtype, start=gap)
    weights = numbers(generator, 2, width, dtype=FP32 if wide_weight else dtype)
    keywords = {"input_norm": weights[0], "hidden_norm": weights[1], "eps": EPS}
    out = poisoned(tokens, 2 * width, dtype=dtype, gap=gap)
    assert draft_inputs(hidden, embeds=embeds, out=out, **keywords) is out
    close(out, draft_inputs_reference(hidden, embeds=embeds, **keywords))
    made = draft_inputs(hidden, embeds=embeds, **keywords)
    assert torch.equal(made, out)


@ANY
@given(
    SEEDS,
    st.lists(st.one_of(st.integers(0, 6), st.sampled_from([-1, 7, 2**31 - 1, -(2**31)]))),
    WIDTHS,
    DTYPES,
    st.sampled_from([torch.int32, torch.int64]),
)
def test_draft_inputs_of_ids(
    generator: torch.Generator,
    ids: list[int],
    width: int,
    dtype: torch.dtype,
    id_type: torch.dtype,
) -> None:
    """Ids outside the table of 7 rows give zeros and read nothing."""
    hidden = numbers(generator, len(ids), width, dtype=dtype)
    table = numbers(generator, 7, width, dtype=dtype, gap=3)
    keywords = {
        "input_norm": numbers(generator, width, dtype=dtype),
        "hidden_norm": numbers(generator, width, dtype=dtype),
        "token_ids": torch.tensor(ids, dtype=id_type),
        "embed_table": table,
        "eps": EPS,
    }
    out = draft_inputs(hidden, out=poisoned(len(ids), 2 * width, dtype=dtype), **keywords)
    close(out, draft_inputs_reference(hidden, **keywords))
    for row, token in zip(out, ids, strict=True):
        assert 0 <= token < 7 or not row[:width].any()


def test_an_id_outside_gives_zeros_whatever_the_norm_is() -> None:
    """An eps of 0 and an infinite weight: nothing times them is no number."""
    weight = torch.full((16,), torch.inf)
    out = draft_inputs(
        torch.ones(2, 16), input_norm=weight, hidden_norm=torch.ones(16), eps=0.0,
        token_ids=torch.tensor([-1, 5]), embed_table=torch.ones(5, 16),
    )  # fmt: skip
    assert not out[:, :16].any()
    assert torch.equal(out[:, 16:], torch.ones(2, 16))


@ANY
@given(SEEDS, TOKENS, st.integers(1, 4), WIDTHS, DTYPES, SPREADS, st.integers(0, 3), st.booleans())
def test_fc_norm(
    generator: torch.Generator,
    tokens: int,
    chunks: int,
    width: int,
    dtype: torch.dtype,
    spread: float,
    gap: int,
    in_place: bool,
) -> None:
    hidden = numbers(generator, tokens, chunks * width, dtype=dtype, spread=spread, gap=gap)
    weights = numbers(generator, chunks, width, dtype=dtype, gap=gap)
    exact = fc_norm_reference(hidden, weights, EPS)
    out = hidden if in_place else poisoned(tokens, chunks * width, dtype=dtype)
    assert fc_norm(hidden, weights, EPS, out=out) is out
    close(out, exact)


@ANY
@given(SEEDS, TOKENS, WIDTHS, DTYPES, SPREADS, st.integers(0, 3), st.booleans())
def test_add_rms_norm(
    generator: torch.Generator,
    tokens: int,
    width: int,
    dtype: torch.dtype,
    spread: float,
    gap: int,
    in_place: bool,
) -> None:
    x = numbers(generator, tokens, width, dtype=dtype, spread=spread)
    # As the right half of the drafter's input is.
    residual = numbers(generator, tokens, width, dtype=dtype, start=width, gap=gap)
    weight = numbers(generator, width, dtype=dtype)
    exact, total = add_rms_norm_reference(x, residual, weight, EPS)
    given_out = x if in_place else poisoned(tokens, width, dtype=dtype, gap=gap)
    given_sum = residual if in_place else poisoned(tokens, width, dtype=dtype)
    out, sum_out = add_rms_norm(x, residual, weight, EPS, out=given_out, sum_out=given_sum)
    assert out is given_out
    assert sum_out is given_sum
    assert torch.equal(sum_out, total.to(dtype))
    close(out, exact)


@ANY
@given(
    SEEDS,
    TOKENS,
    st.one_of(st.integers(1, 70), st.sampled_from([1023, 1024, 1025, 2304])),
    DTYPES,
    st.sampled_from([1.0, 20.0, 200.0]),
    st.integers(0, 3),
)
def test_silu_mul(
    generator: torch.Generator,
    tokens: int,
    width: int,
    dtype: torch.dtype,
    spread: float,
    gap: int,
) -> None:
    gate_up = numbers(generator, tokens, 2 * width, dtype=dtype, spread=spread, gap=gap)
    out = silu_mul(gate_up, out=poisoned(tokens, width, dtype=dtype, gap=gap))
    exact = silu_mul_reference(gate_up)
    # silu of a large negative number ends as a multiple of float16's smallest, or as 0 where the
    # exponential is beyond float32; either is off by up to this, times `up`.
    least = max(SMALLEST[dtype], 1e-36) * 6 * spread
    torch.testing.assert_close(
        out.double(), exact.to(dtype).double(), rtol=2 * ROUNDINGS[dtype], atol=least
    )


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_roundings_are_those_of_stock(dtype: torch.dtype) -> None:
    """The drafter's real width."""
    generator = torch.Generator().manual_seed(2)
    width, wide = 7168, 2304
    x, residual, weight = (numbers(generator, n, width, dtype=dtype) for n in (3, 3, 1))
    weight = weight[0]
    out, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    nearly_same_bits(out, stock_rms_norm(total, weight, EPS))
    both = draft_inputs(x, input_norm=weight, hidden_norm=weight, eps=EPS, embeds=residual)
    nearly_same_bits(both[:, :width], stock_rms_norm(residual, weight, EPS))
    nearly_same_bits(both[:, width:], stock_rms_norm(x, weight, EPS))
    chunks = fc_norm(both, torch.stack([weight, weight]), EPS)
    nearly_same_bits(chunks[:, :width], stock_rms_norm(both[:, :width], weight, EPS))
    gate, up = (numbers(generator, 3, wide, dtype=dtype, spread=3.0) for _half in range(2))
    stocks = torch.nn.functional.silu(gate) * up
    nearly_same_bits(silu_mul(torch.cat([gate, up], -1)), stocks)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("value", "eps"), [(0.0, EPS), (0.0, 1e-12), (torch.inf, EPS), (torch.nan, EPS), (6e4, EPS)]
)
def test_edges_of_the_norm(dtype: torch.dtype, value: float, eps: float) -> None:
    """Rows of zeros, of infinities, of NaN, and of numbers whose squares float16 does not hold."""
    x = torch.ones(2, 50, dtype=dtype)
    x[0] = value
    weight = torch.linspace(-2, 2, 50).to(dtype)
    out = fc_norm(x, weight[None], eps)
    torch.testing.assert_close(
        out.float(), stock_rms_norm(x, weight, eps).float(), equal_nan=True, rtol=1e-2, atol=1e-6
    )
    zeros = torch.zeros_like(x)
    summed, total = add_rms_norm(x, zeros, weight, eps)
    torch.testing.assert_close(summed, out, equal_nan=True)
    torch.testing.assert_close(total, x, equal_nan=True)
    inputs = draft_inputs(x, input_norm=weight, hidden_norm=weight, eps=eps, embeds=zeros)
    torch.testing.assert_close(inputs[:, 50:], out, equal_nan=True)
    assert not inputs[:, :50].any()


def test_edges_of_the_gate() -> None:
    gate = torch.tensor([[0.0, -0.0, 100.0, -100.0, 1e30, -1e30, torch.inf, torch.nan]])
    out = silu_mul(torch.cat([gate, torch.full_like(gate, 2.0)], -1))
    torch.testing.assert_close(out, 2 * torch.nn.functional.silu(gate), equal_nan=True)


def test_a_row_has_8_or_16_elements_a_thread() -> None:
    for width in (1024, 1536, 2048, 4096, 7168, 8192, 21504):
        block = 1 << (width - 1).bit_length()
        assert 8 <= block / (32 * row_warps(width)) <= 32


X, WEIGHT, WIDE = torch.ones(3, 8), torch.ones(8), torch.ones(3, 16)
IDS, TABLE = torch.tensor([0, 1, 2]), torch.ones(4, 8)
NORMS = {"input_norm": WEIGHT, "hidden_norm": WEIGHT, "eps": EPS}


def test_allocates_nothing_and_reads_nothing_back(launches: list[Any]) -> None:
    """With the buffers given; so a CUDA graph can hold it."""
    with Operations() as operations:
        draft_inputs(X, embeds=X, out=WIDE, **NORMS)
        draft_inputs(X, token_ids=IDS, embed_table=TABLE, out=WIDE, **NORMS)
        fc_norm(X, WEIGHT[None], EPS, out=X)
        add_rms_norm(X, X, WEIGHT, EPS, out=X, sum_out=X)
        silu_mul(WIDE, out=X)
    assert len(launches) == 5
    assert set(operations.seen) <= {"view", "unsqueeze", "slice", "select"}


def test_no_tokens_no_launch(launches: list[Any]) -> None:
    none = X[:0]
    assert draft_inputs(none, embeds=none, **NORMS).shape == (0, 16)
    assert fc_norm(none, WEIGHT[None], EPS).shape == (0, 8)
    assert [part.shape for part in add_rms_norm(none, none, WEIGHT, EPS)] == [(0, 8), (0, 8)]
    assert silu_mul(WIDE[:0]).shape == (0, 8)
    assert not launches


STRIDED = torch.stack([X, X], -1)[..., 0]
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no embedding": (lambda: draft_inputs(X, **NORMS), "neither embeds were given"),
    "ids alone": (lambda: draft_inputs(X, token_ids=IDS, **NORMS), "neither embeds were given"),
    "two embeddings": (
        lambda: draft_inputs(X, embeds=X, token_ids=IDS, embed_table=TABLE, **NORMS),
        "embeds were given, and token_ids",
    ),
    "ids in float": (
        lambda: draft_inputs(X, token_ids=IDS.float(), embed_table=TABLE, **NORMS),
        "token_ids is .* of torch.float32",
    ),
    "embeds of other type": (
        lambda: draft_inputs(X, embeds=X.half(), **NORMS), "embeds is .* of torch.float16",
    ),
    "strided hidden": (lambda: draft_inputs(STRIDED, embeds=X, **NORMS), "hidden .* stride 2"),
    "narrow out": (lambda: draft_inputs(X, embeds=X, out=X, **NORMS), r"out is \(3, 8\)"),
    "double": (lambda: fc_norm(X.double(), WEIGHT[None], EPS), "hidden is .* torch.float64"),
    "other chunks": (lambda: fc_norm(X, TABLE, EPS), r"hidden is \(3, 8\) .* \(3, 32\)"),
    "short weight": (lambda: add_rms_norm(X, X, WEIGHT[:4], EPS), r"weight is \(4,\)"),
    "residual of other type": (
        lambda: add_rms_norm(X, X.half(), WEIGHT, EPS), "residual is .* torch.float16",
    ),
    "sum of other size": (
        lambda: add_rms_norm(X, X, WEIGHT, EPS, sum_out=WIDE), r"sum_out is \(3, 16\)",
    ),
    "odd gate": (lambda: silu_mul(torch.ones(3, 7)), "gate_up is 7 wide"),
    "strided gate": (lambda: silu_mul(STRIDED), "gate_up .* stride 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str, launches: list[Any]) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
    assert not launches
