# SPDX-License-Identifier: Apache-2.0
"""The drafter's rotary kernels in Triton's interpreter, against float64.

Caches are views into larger buffers, in each layout that the attention back-ends have. All of a
buffer but the slots that are to be written has to have the same bits after as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_kimi_eagle3.kernels import rows
from vllm_kimi_eagle3.kernels.arch import arch
from vllm_kimi_eagle3.kernels.draft_reference import (
    mla_latents_reference,
    mla_rope_q_reference,
    rope_kv_write_reference,
)
from vllm_kimi_eagle3.kernels.mla_rope_kv_write import mla_latents, mla_rope_q
from vllm_kimi_eagle3.kernels.rope_kv_write import rope_kv_write

from .operations import Operations

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
EPS = 1e-5
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2e-6}
# What float32 loses where the two products of a rotation cancel each other.
CANCELLED = 2e-6
ANY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
DTYPES = st.sampled_from([BF16, FP16, FP32])
SEEDS = st.integers(0, 1000).map(lambda seed: torch.Generator().manual_seed(seed))
LAYOUTS = ["NHD", "HND", "k and v by block", "HND, k and v by block"]
BLOCKS = 4


def numbers(generator: torch.Generator, *shape: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    """Random numbers; rows are `gap` elements apart, which are NaN."""
    held = torch.full((*shape[:-1], shape[-1] + gap), torch.nan, dtype=dtype)
    held[..., : shape[-1]] = torch.randn(shape, generator=generator)
    return held[..., : shape[-1]]


def table(generator: torch.Generator, rows: int, rot: int, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of random angles."""
    angles = torch.randn(rows, rot // 2, generator=generator) * 3
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


def caches(layout: str, page: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Buffer, key cache and value cache [blocks, page, heads, dim] of a layout, all a pattern."""
    by_block = "by block" in layout
    inner = (heads, page) if "HND" in layout else (page, heads)
    outer = (BLOCKS, 2) if by_block else (2, BLOCKS)
    buffer = torch.arange(BLOCKS * 2 * page * heads * dim, dtype=torch.int32).remainder(100)
    buffer = buffer.to(FP32).to(dtype).view(*outer, *inner, dim)
    k, v = buffer.unbind(1 if by_block else 0)
    if "HND" in layout:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return [buffer, k, v]


def bits(tensor: Tensor) -> Tensor:
    """A copy of a tensor's bytes."""
    return tensor.contiguous().view(torch.uint8).clone()


@dataclass
class Tokens:
    """Positions and slots of some tokens, padding among them."""

    positions: Tensor
    slots: Tensor
    rows: int
    limit: int | None
    page: int


@st.composite
def some_tokens(draw: st.DrawFn) -> Tokens:
    count = draw(st.integers(0, 5))
    page = draw(st.sampled_from([1, 3, 16]))
    rows = draw(st.integers(1, 12))
    positions = draw(
        st.lists(
            st.one_of(st.integers(0, rows - 1), st.sampled_from([rows, 2**40, -1])),
            min_size=count, max_size=count,
        )
    )  # fmt: skip
    places = st.permutations(range(BLOCKS * page)).map(lambda all_of_them: all_of_them[:count])
    slots = draw(places)
    slots = [-1 if draw(st.integers(0, 3)) == 0 else slot for slot in slots]
    # Fewer places than tokens: the others are padding.
    slots = slots + [-1] * (count - len(slots))
    kind = draw(st.sampled_from([torch.int64, torch.int64, torch.int32]))
    return Tokens(
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(slots, dtype=kind),
        rows,
        draw(st.sampled_from([None, 1, rows, rows + 5])),
        page,
    )


def held_values(cache: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """The cache holds `exact`, but for the roundings of the model's dtype and of fp8."""
    rtol, atol = 2 * ROUNDING[dtype], CANCELLED
    if cache.dtype == FP8:
        rtol, atol = rtol + 2.0**-4, 4 * CANCELLED + 2.0**-10
    torch.testing.assert_close(cache.double(), exact, rtol=rtol, atol=atol)


def assert_only(buffer: Tensor, before: Tensor, written: list[tuple[Tensor, Tensor]]) -> None:
    """Nothing of a buffer has changed but the slots of these caches."""
    restored = buffer.clone()
    offset = buffer.storage_offset()
    for cache, slots in written:
        old = before.view(buffer.dtype).view(buffer.shape)
        place = cache.storage_offset() - offset
        shape = (cache.shape, cache.stride(), place)
        ours, olds = torch.as_strided(restored, *shape), torch.as_strided(old, *shape)
        page = cache.shape[1]
        for slot in slots[slots >= 0].tolist():
            ours[slot // page, slot % page] = olds[slot // page, slot % page]
    assert torch.equal(bits(restored), before)


@ANY
@given(
    SEEDS,
    some_tokens(),
    st.sampled_from([(1, 1), (2, 1), (5, 1), (8, 2), (9, 3), (12, 12)]),
    st.sampled_from([(2, 2), (8, 8), (8, 4), (12, 12), (12, 6), (16, 16), (40, 16)]),
    st.booleans(),
    DTYPES,
    st.booleans(),
    st.booleans(),
    st.sampled_from(LAYOUTS),
    st.sampled_from([None, 0.25, 3.0]),
    st.integers(0, 3),
)
def test_rope_kv_write(
    generator: torch.Generator,
    tokens: Tokens,
    heads: tuple[int, int],
    dims: tuple[int, int],
    neox: bool,
    dtype: torch.dtype,
    wide_table: bool,
    fp8: bool,
    layout: str,
    scale: float | None,
    gap: int,
) -> None:
    q_heads, kv_heads = heads
    dim, rot = dims
    count, width = len(tokens.positions), (q_heads + 2 * kv_heads) * dim
    qkv = numbers(generator, count, width, dtype=dtype, gap=gap)
    cos_sin = table(generator, tokens.rows, rot, FP32 if wide_table else dtype)
    buffer, k_cache, v_cache = caches(layout, tokens.page, kv_heads, dim, FP8 if fp8 else dtype)
    scales = {
        "k_scale": None if scale is None else torch.tensor(scale),
        "v_scale": None if scale is None else torch.tensor(scale * 2),
    }
    keywords: dict[str, Any] = {
        "heads": q_heads, "kv_heads": kv_heads, "head_dim": dim, "neox": neox,
        "position_limit": tokens.limit, **scales,
    }  # fmt: skip
    inputs = (tokens.positions, cos_sin, tokens.slots, k_cache, v_cache)
    exact_q, exact_k, exact_k_cache, exact_v_cache = rope_kv_write_reference(
        qkv, *inputs, **keywords
    )
    values, before = qkv[:, (q_heads + kv_heads) * dim :].clone(), bits(buffer)
    q = rope_kv_write(qkv, *inputs, page_size=tokens.page, **keywords)
    assert q.shape == (count, q_heads, dim)
    assert q.data_ptr() == qkv.data_ptr()
    close = {"rtol": ROUNDING[dtype], "atol": CANCELLED}
    torch.testing.assert_close(q.double(), exact_q, **close)
    k = qkv[:, q_heads * dim : (q_heads + kv_heads) * dim].unflatten(1, (kv_heads, dim))
    torch.testing.assert_close(k.double(), exact_k, **close)
    assert torch.equal(qkv[:, (q_heads + kv_heads) * dim :], values)
    held_values(k_cache, exact_k_cache, dtype)
    held_values(v_cache, exact_v_cache, dtype)
    assert_only(buffer, before, [(k_cache, tokens.slots), (v_cache, tokens.slots)])
    if not fp8:  # What stock's later kernels would read from qkv and what ours read are the same.
        for token, slot in enumerate(tokens.slots.tolist()):
            if slot >= 0:
                place = slot // tokens.page, slot % tokens.page
                assert torch.equal(k_cache[place], k[token])
                assert torch.equal(v_cache[place].flatten(), values[token])


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_rope_at_the_real_sizes(neox: bool, kv_dtype: torch.dtype) -> None:
    """64 query and 8 key heads of 128, as the Llama drafter has them on one GPU."""
    generator = torch.Generator().manual_seed(1)
    qkv = numbers(generator, 3, 80 * 128, dtype=BF16)
    cos_sin = table(generator, 40, 128, BF16)
    buffer, k_cache, v_cache = caches("HND", 16, 8, 128, kv_dtype)
    keywords = {"heads": 64, "kv_heads": 8, "head_dim": 128, "neox": neox}
    slots = torch.tensor([17, -1, 63])
    inputs = (torch.tensor([3, 39, 40]), cos_sin, slots, k_cache, v_cache)
    exact = rope_kv_write_reference(qkv, *inputs, **keywords)
    before = bits(buffer)
    q = rope_kv_write(qkv, *inputs, page_size=16, **keywords)
    torch.testing.assert_close(q.double(), exact[0], rtol=2.0**-8, atol=1e-6)
    held_values(k_cache, exact[2], BF16)
    held_values(v_cache, exact[3], BF16)
    assert_only(buffer, before, [(k_cache, slots), (v_cache, slots)])


def test_rotates_only_without_caches() -> None:
    generator = torch.Generator().manual_seed(1)
    qkv = numbers(generator, 3, 6 * 8, dtype=BF16)
    keywords = {"heads": 4, "kv_heads": 1, "head_dim": 8}
    inputs = torch.tensor([0, 5, 2]), table(generator, 6, 8, FP32)
    _buffer, k_cache, v_cache = caches("NHD", 16, 1, 8, BF16)
    other = qkv.clone()
    rope_kv_write(qkv, *inputs, torch.tensor([1, 2, 3]), k_cache, v_cache, page_size=16, **keywords)
    rope_kv_write(other, *inputs, None, None, None, **keywords)
    assert torch.equal(qkv, other)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_fp8_is_cut_off_at_its_largest(dtype: torch.dtype) -> None:
    """As stock's conversion does; no number stays none."""
    qkv = torch.tensor([[0.0, 0.0, 1e4, 460.0, -1e4, torch.nan]], dtype=dtype)
    cos_sin = torch.tensor([[1.0, 0.0]])
    _buffer, k_cache, v_cache = caches("NHD", 1, 1, 2, FP8)
    none = torch.zeros(1, dtype=torch.int64)
    rope_kv_write(
        qkv, none, cos_sin, none, k_cache, v_cache, heads=1, kv_heads=1, head_dim=2, page_size=1,
        k_scale=torch.tensor(1.0), v_scale=torch.tensor(2.0),
    )  # fmt: skip
    assert k_cache[0, 0, 0].float().tolist() == [448.0, 448.0]
    assert v_cache[0, 0, 0, 0].item() == -448.0
    assert v_cache[0, 0, 0, 1].float().isnan()


@ANY
@given(
    SEEDS,
    some_tokens(),
    st.sampled_from([(24, 16, 8), (7, 5, 2), (64, 32, 12), (1536, 512, 64)]),
    st.booleans(),
    DTYPES,
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.25, 3.0]),
    st.integers(0, 3),
    st.booleans(),
)
def test_mla_latents(
    generator: torch.Generator,
    tokens: Tokens,
    ranks: tuple[int, int, int],
    neox: bool,
    dtype: torch.dtype,
    wide_table: bool,
    fp8: bool,
    scale: float | None,
    gap: int,
    in_place: bool,
) -> None:
    q_rank, rank, rope = ranks
    count = len(tokens.positions)
    qkv_a = numbers(generator, count, sum(ranks), dtype=dtype, gap=gap)
    cos_sin = table(generator, tokens.rows, rope, FP32 if wide_table else dtype)
    buffer = torch.arange(BLOCKS * tokens.page * (rank + rope + 4)).remainder(100)
    buffer = buffer.to(FP32).to(FP8 if fp8 else dtype).view(BLOCKS, tokens.page, rank + rope + 4)
    cache = buffer[..., : rank + rope]
    keywords: dict[str, Any] = {
        "q_lora_rank": q_rank, "kv_lora_rank": rank, "rope_dim": rope,
        "q_norm": numbers(generator, q_rank, dtype=dtype),
        "kv_norm": numbers(generator, rank, dtype=dtype), "eps": EPS,
        "position_limit": tokens.limit, "neox": neox,
        "kv_scale": None if scale is None else torch.tensor(scale),
    }  # fmt: skip
    inputs = (tokens.positions, cos_sin, tokens.slots, cache)
    exact_q, exact_rows, exact_cache = mla_latents_reference(qkv_a, *inputs, **keywords)
    untouched, before = qkv_a[:, :q_rank].clone(), bits(buffer)
    out = qkv_a[:, :q_rank] if in_place else None
    q = mla_latents(qkv_a, *inputs, page_size=tokens.page, out=out, **keywords)
    close = {"rtol": 2 * ROUNDING[dtype], "atol": CANCELLED}
    torch.testing.assert_close(q.double(), exact_q, **close)
    torch.testing.assert_close(qkv_a[:, q_rank:].double(), exact_rows, **close)
    assert q is out if in_place else torch.equal(qkv_a[:, :q_rank], untouched)
    held_values(cache, exact_cache, dtype)
    assert_only(buffer, before, [(cache, tokens.slots)])


def test_mla_latents_without_a_cache() -> None:
    generator = torch.Generator().manual_seed(1)
    qkv_a = numbers(generator, 3, 48, dtype=BF16)
    inputs = torch.tensor([0, 5, 2]), table(generator, 6, 8, FP32)
    keywords = {
        "q_lora_rank": 24, "kv_lora_rank": 16, "rope_dim": 8, "eps": EPS,
        "q_norm": numbers(generator, 24, dtype=BF16), "kv_norm": numbers(generator, 16, dtype=BF16),
    }  # fmt: skip
    cache = torch.zeros(2, 16, 24, dtype=BF16)
    other = qkv_a.clone()
    slots = torch.tensor([1, 20, 3])
    q = mla_latents(qkv_a, *inputs, slots, cache, page_size=16, **keywords)
    assert torch.equal(q, mla_latents(other, *inputs, None, None, **keywords))
    assert torch.equal(qkv_a, other)
    assert torch.equal(cache.flatten(0, 1)[slots], qkv_a[:, 24:])


@ANY
@given(
    SEEDS,
    some_tokens(),
    st.sampled_from([1, 2, 5, 8, 9, 64]),
    st.sampled_from([(16, 8), (5, 2), (0, 4), (128, 64)]),
    st.booleans(),
    DTYPES,
    st.booleans(),
)
def test_mla_rope_q(
    generator: torch.Generator,
    tokens: Tokens,
    heads: int,
    dims: tuple[int, int],
    neox: bool,
    dtype: torch.dtype,
    heads_first: bool,
) -> None:
    nope, rope = dims
    count = len(tokens.positions)
    q = numbers(generator, count, heads, nope + rope, dtype=dtype)
    if heads_first:
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
    cos_sin = table(generator, tokens.rows, rope, dtype)
    keywords = {
        "nope_dim": nope, "rope_dim": rope, "position_limit": tokens.limit, "neox": neox,
    }  # fmt: skip
    exact = mla_rope_q_reference(q, tokens.positions, cos_sin, **keywords)
    parts = mla_rope_q(q, tokens.positions, cos_sin, **keywords)
    assert torch.equal(parts[0].double(), exact[0])
    torch.testing.assert_close(parts[1].double(), exact[1], rtol=ROUNDING[dtype], atol=CANCELLED)
    assert torch.equal(torch.cat(parts, -1), q)


TABLE, POSITIONS = torch.ones(6, 8), torch.zeros(3, dtype=torch.int64)
GOOD: dict[str, Any] = {
    "qkv": torch.ones(3, 12 * 8), "positions": POSITIONS, "cos_sin": TABLE, "slots": POSITIONS,
    "k_cache": torch.ones(2, 16, 2, 8), "v_cache": torch.ones(2, 16, 2, 8), "heads": 8,
    "kv_heads": 2, "head_dim": 8, "page_size": 16,
}  # fmt: skip
GOOD_MLA: dict[str, Any] = {
    "qkv_a": torch.ones(3, 48), "positions": POSITIONS, "cos_sin": TABLE, "slots": POSITIONS,
    "kv_cache": torch.ones(2, 16, 24), "q_lora_rank": 24, "kv_lora_rank": 16, "rope_dim": 8,
    "q_norm": torch.ones(24), "kv_norm": torch.ones(16), "eps": EPS, "page_size": 16,
}  # fmt: skip
GOOD_Q: dict[str, Any] = {
    "q": torch.ones(3, 9, 24), "positions": POSITIONS, "cos_sin": TABLE, "nope_dim": 16,
    "rope_dim": 8,
}  # fmt: skip


def test_allocates_nothing_and_reads_nothing_back(launches: list[Any]) -> None:
    """With the buffers given; so a CUDA graph can hold it."""
    with Operations() as operations:
        rope_kv_write(**GOOD)
        mla_latents(**GOOD_MLA, out=torch.ones(3, 24))
        mla_rope_q(**GOOD_Q)
    # Groups of 8 query heads, and of 2 key heads; two parts of a latent; groups of 8 heads.
    assert [launch[:2] for launch in launches] == [
        ("_rope_kv_write", (3, 2)), ("_mla_latents", (3, 2)), ("_mla_rope_q", (3, 2)),
    ]  # fmt: skip
    assert set(operations.seen) <= {"view", "slice", "ones"}


def test_no_tokens_no_launch(launches: list[Any]) -> None:
    none = POSITIONS[:0]
    few = {"positions": none, "slots": none}
    assert rope_kv_write(**{**GOOD, **few, "qkv": GOOD["qkv"][:0]}).shape == (0, 8, 8)
    assert mla_latents(**{**GOOD_MLA, **few, "qkv_a": GOOD_MLA["qkv_a"][:0]}).shape == (0, 24)
    parts = mla_rope_q(**{**GOOD_Q, "positions": none, "q": GOOD_Q["q"][:0]})
    assert [part.shape for part in parts] == [(0, 9, 16), (0, 9, 8)]
    assert not launches


BAD: dict[str, tuple[Callable[..., object], dict[str, Any], dict[str, Any], str]] = {
    "other heads": (rope_kv_write, GOOD, {"heads": 9}, r"qkv is \(3, 96\) .* \(3, 104\)"),
    "positions in float": (
        rope_kv_write, GOOD, {"positions": POSITIONS.float()}, "positions is .* torch.float32",
    ),
    "too wide a table": (
        rope_kv_write, GOOD, {"cos_sin": torch.ones(6, 10)}, "cos_sin is 6 x 10; a head of 8",
    ),
    "an odd table": (rope_kv_write, GOOD, {"cos_sin": torch.ones(6, 7)}, "cos_sin is 6 x 7"),
    "an empty table": (rope_kv_write, GOOD, {"cos_sin": TABLE[:0]}, "cos_sin is 0 x 8"),
    "no positions": (rope_kv_write, GOOD, {"position_limit": 0}, "position_limit is 0"),
    "other page": (
        rope_kv_write, GOOD, {"page_size": 32}, r"k_cache is \(2, 16, 2, 8\) .* \(2, 32, 2, 8\)",
    ),
    "cache in half": (
        rope_kv_write, GOOD, {"v_cache": GOOD["v_cache"].half()},
        "v_cache is .* torch.float16 .* torch.float32 or torch.float8_e4m3fn",
    ),
    "one cache": (rope_kv_write, GOOD, {"v_cache": None}, "some are None"),
    "scale in half": (
        rope_kv_write, GOOD, {"k_scale": torch.ones(()).half()}, "scale of k_cache .* one float32",
    ),
    "scales by head": (
        rope_kv_write, GOOD, {"v_scale": torch.ones(2)}, "scale of v_cache .* one float32",
    ),
    "other latents": (mla_latents, GOOD_MLA, {"q_lora_rank": 23}, "qkv_a is"),
    "mla slots alone": (mla_latents, GOOD_MLA, {"kv_cache": None}, "one is None"),
    "mla table": (mla_latents, GOOD_MLA, {"cos_sin": torch.ones(6, 6)}, r"cos_sin is \(6, 6\)"),
    "mla cache": (
        mla_latents, GOOD_MLA, {"kv_cache": torch.ones(2, 16, 25)}, r"kv_cache is \(2, 16, 25\)",
    ),
    "other q": (mla_rope_q, GOOD_Q, {"nope_dim": 17}, "q is"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str, launches: list[Any]) -> None:
    kernel, good, change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        kernel(**{**good, **change})
    assert not launches


def test_no_fp8_cache_where_there_are_no_instructions(
    launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "arch_of", lambda device: arch((8, 6)))
    fp8 = {name: GOOD[name].to(FP8) for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match="sm_86 has no fp8 instructions"):
        rope_kv_write(**{**GOOD, **fp8})
    assert not launches
