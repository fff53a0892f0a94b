# SPDX-License-Identifier: Apache-2.0
"""Acceptance from counters: rates, intervals, and what other text of the same kind gives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.assets import variants
from tests.reference.drafter import load_drafter
from tests.reference.speculate import ReferenceDrafter, ReferenceTarget, speculate
from tests.reference.target import load_target
from vllm_kimi_eagle3.acceptance.model import (
    ASSUMED_DESIGN_EFFECT,
    Counts,
    acceptance,
    design_effect,
    extended,
    geometric,
    length_for,
    predicted,
    student,
    total,
    wilson,
)


@st.composite
def counts(draw: st.DrawFn, positions: int = 3) -> Counts:
    left = drafts = draw(st.integers(0, 10**6))
    accepted = []
    for _ in range(positions):
        left = draw(st.integers(0, left))
        accepted.append(left)
    return Counts(drafts, tuple(accepted))


def test_rates_of_the_tiny_pair() -> None:
    row = variants.expected_run("eagle3-llama-tiny")
    found = Counts(row["num_drafts"], tuple(row["num_accepted_tokens_per_pos"]))
    assert found.draft_tokens == row["num_draft_tokens"]
    assert found.rates == pytest.approx((197 / 208, 188 / 208, 178 / 208))
    assert found.conditional == pytest.approx((197 / 208, 188 / 197, 178 / 188))
    assert found.length == pytest.approx(1 + 563 / 208)
    assert found.rate == pytest.approx(563 / 624)


@pytest.mark.parametrize(
    ("drafts", "accepted", "tokens", "words"),
    [
        (10, (11,), -1, "11 accepted drafts at position 0, and only 10 drafts"),
        (10, (5, 6), -1, "6 accepted drafts at position 1, and only 5 accepted drafts at pos"),
        (10, (-1,), -1, "negative"),
        (-1, (), -1, "negative"),
        (10, (9, 9), 12, "18 accepted drafts of only 12"),
    ],
)
def test_counts_that_cannot_be(
    drafts: int, accepted: tuple[int, ...], tokens: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Counts(drafts, accepted, tokens)


def test_counts_of_different_numbers_of_drafts_add_up() -> None:
    assert Counts(10, (5, 2)) + Counts(4, (3,)) == Counts(14, (8, 2), 24)
    assert total([]) == Counts.none(0)


def test_wilson_as_published() -> None:
    """R. G. Newcombe, Statistics in Medicine 17, 1998, table I: 81 of 263, 15 of 148, 0 of 20."""
    for hits, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        found = wilson(hits, trials)
        assert (found.low, found.high) == pytest.approx((low, high), abs=6e-5)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_an_interval_is_around_its_value(hits: float, more: float) -> None:
    found = wilson(hits, hits + more)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_students_t() -> None:
    for freedom, value in ((3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042)):
        assert student(freedom) == pytest.approx(value, rel=0.01)
    assert student(0) == pytest.approx(1.96, abs=1e-3)


def test_design_effect() -> None:
    assert design_effect([1, 1], [2, 2]) == ASSUMED_DESIGN_EFFECT, "too few texts to tell"
    assert design_effect([5, 5, 5, 5, 5], [10] * 5) == 1.0, "never less than independent draws"
    assert design_effect([0] * 5, [10] * 5) == 1.0
    # All or nothing: each text of ten steps is one draw.
    assert design_effect([10, 0] * 4, [10] * 8) == pytest.approx(10 * 8 / 7)


@settings(max_examples=50)
@given(st.lists(counts(), max_size=8))
def test_an_estimate_of_any_counts(groups: list[Counts]) -> None:
    found = acceptance(groups)
    assert found.counts == total(g for g in groups if g.drafts)
    for estimate in (*found.rates, *found.conditional):
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert 1 <= found.length.low <= found.length.value <= found.length.high
    assert found.length.high <= 1 + found.counts.positions
    rates = [rate.value for rate in found.rates]
    assert rates == sorted(rates, reverse=True)
    for wide, narrow in zip(predicted(groups, 100), found.rates, strict=True):
        assert wide.low <= narrow.value + 1e-9
        assert wide.high >= narrow.value - 1e-9


def test_all_or_nothing_is_no_certainty() -> None:
    """Nothing scatters, and yet a few steps do not say what the next ones do."""
    every = acceptance([Counts(10, (10, 10, 10))] * 4).length
    assert (every.value, every.high) == (4.0, 4.0)
    assert 2.5 < every.low < 3.9
    none = acceptance([Counts(10, (0, 0, 0))] * 4).length
    assert (none.value, none.low) == (1.0, 1.0)
    assert 1.05 < none.high < 2.5


@settings(max_examples=50)
@given(counts())
def test_more_of_the_same_narrows_the_interval(one: Counts) -> None:
    few, many = acceptance([one] * 4), acceptance([one] * 16)
    for a, b in zip(few.rates, many.rates, strict=True):
        assert b.high - b.low <= a.high - a.low + 1e-9


@settings(max_examples=10)
@given(
    st.integers(0, 2**32),
    st.tuples(st.floats(0.3, 0.95), st.floats(0.3, 0.95), st.floats(0.3, 0.95)),
)
def test_what_a_drafter_accepts_is_estimated(seed: int, tried: tuple[float, ...]) -> None:
    """Drafts of a known drafter, text by text, each text harder or easier than the next: the
    truth is within five standard deviations of the middle, and mostly within the interval."""
    random_ = random.Random(seed)
    groups = []
    for _ in range(24):
        ease = random_.uniform(-0.1, 0.1)
        accepted = [0, 0, 0]
        for _ in range(60):
            for position, rate in enumerate(tried):
                if random_.random() > min(max(rate + ease, 0.0), 1.0):
                    break
                accepted[position] += 1
        groups.append(Counts(60, tuple(accepted)))
    found = acceptance(groups)
    truth = 1.0
    for position, rate in enumerate(tried):
        truth *= rate
        estimate = found.rates[position]
        # The mean over texts of a product is not the product of means: by 0.1**2 / 3 at most each.
        margin = 2.5 * (estimate.high - estimate.low) / 2 + 0.011 * (position + 1)
        assert abs(estimate.value - truth) <= margin


def test_intervals_hold_as_often_as_they_say() -> None:
    random_ = random.Random(7)
    held = tries = 0
    for _ in range(200):
        groups = []
        for _ in range(12):
            rate = min(max(random_.gauss(0.7, 0.1), 0.0), 1.0)
            groups.append(Counts(40, (sum(random_.random() < rate for _ in range(40)),)))
        estimate = acceptance(groups).rates[0]
        held += estimate.low <= 0.7 <= estimate.high
        tries += 1
    assert 0.92 <= held / tries <= 0.98


# --------------------------------------------------------------------- from a length to positions


def test_a_length_as_rates() -> None:
    assert geometric(2.75, 3) == pytest.approx((0.754, 0.568, 0.428), abs=1e-3)
    assert geometric(1.0, 3) == pytest.approx((0, 0, 0), abs=1e-9)
    assert geometric(4.0, 3) == pytest.approx((1, 1, 1))
    for length, k in ((0.9, 3), (4.1, 3), (2.0, 0)):
        with pytest.raises(ValueError, match="acceptance length"):
            geometric(length, k)


@given(st.integers(1, 16), st.floats(0, 1))
def test_rates_of_a_length_have_that_length(k: int, part: float) -> None:
    length = 1 + part * k
    rates = geometric(length, k)
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-6)
    assert list(rates) == sorted(rates, reverse=True)


def test_more_drafts_than_were_measured_go_on_as_the_last() -> None:
    assert extended((0.8, 0.4), 4) == pytest.approx((0.8, 0.4, 0.2, 0.1))
    assert extended((0.8, 0.4), 1) == (0.8,)
    assert extended((0.5,), 3) == pytest.approx((0.5, 0.25, 0.125))
    assert extended((), 2) == (0.0, 0.0)
    assert extended((0.0, 0.0), 3) == (0.0, 0.0, 0.0)
    assert length_for((0.8, 0.4), 3) == pytest.approx(2.4)


# ------------------------------------------------------------------------------------ held-out text


@pytest.fixture(scope="module")
def of_the_reference() -> list[Counts]:
    """Counts of the reference on prompts from four texts, those of its training among them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Matrices so small are slower with more.
    target = load_target(variants.KIMI_K25_TARGET)
    drafter = load_drafter(variants.LLAMA_DRAFTER, target)
    tokenizer = Tokenizer.from_file(str(variants.KIMI_K25_TARGET / "tokenizer.json"))
    licence = Path(__file__).resolve().parents[3] / "LICENSE"
    groups = []
    for text in (*sorted((variants.ASSETS / "corpus").glob("*.txt")), licence):
        ids = tokenizer.encode(text.read_text(encoding="utf-8")).ids
        for start in range(100, len(ids) - 60, (len(ids) - 160) // 4):
            session = ReferenceTarget(target, (2, 4, 5))
            prompt = ids[start : start + 48]
            row = speculate(session, ReferenceDrafter(drafter), prompt, 3, 48).counts
            groups.append(Counts(row.num_drafts, tuple(row.num_accepted_tokens_per_pos)))
    torch.set_num_threads(threads)
    return groups


def test_held_out_text_is_within_the_interval(of_the_reference: list[Counts]) -> None:
    """From half of the prompts, what the other half accepts; and the other way round."""
    assert len(of_the_reference) >= 16
    for half, other in (
        (slice(0, None, 2), slice(1, None, 2)),
        (slice(1, None, 2), slice(0, None, 2)),
    ):
        held_out = total(of_the_reference[other])
        expected = predicted(of_the_reference[half], held_out.drafts)
        for estimate, rate in zip(expected, held_out.rates, strict=True):
            assert estimate.low <= rate <= estimate.high
        # Nor is it so wide that it says nothing.
        assert expected[0].high - expected[0].low < 0.65


def test_texts_scatter_more_than_their_steps(of_the_reference: list[Counts]) -> None:
    """Why the intervals are not those of independent steps."""
    assert max(acceptance(of_the_reference).effects) > 2
