# SPDX-License-Identifier: Apache-2.0
"""The published figures, and acceptance as a person gives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given as property_of
from hypothesis import strategies as st

from vllm_kimi_eagle3.acceptance.given import given
from vllm_kimi_eagle3.acceptance.published import (
    HEALTHY,
    KINDS,
    LOWEST_LENGTH,
    drafters,
    find,
)


def test_every_figure_says_where_it_is_from() -> None:
    assert any(not drafter.figures for drafter in drafters()), "none published is an answer"
    for drafter in drafters():
        assert drafter.targets
        for figure in drafter.figures:
            assert figure.source.startswith("https://"), figure
            assert figure.engine
            assert figure.text
            assert 1 <= figure.length <= figure.k + 1
    lowest = min(f.length for d in drafters() for f in d.figures if f.k == 3)
    assert lowest == pytest.approx(LOWEST_LENGTH, abs=0.01)


def test_a_rate_of_drafts_is_a_length() -> None:
    drafter = find("AQ-MedAI/Kimi-K25-eagle3")
    assert drafter is not None
    figure = drafter.figures[0]
    assert (figure.k, figure.as_published) == (4, "51.78% of drafts")
    assert figure.length == pytest.approx(1 + 4 * 0.5178)
    assert sum(figure.rates(4)) == pytest.approx(4 * 0.5178)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("lightseekorg/kimi-k2.5-eagle3-mla", "lightseekorg/kimi-k2.5-eagle3-mla"),
        ("LightSeekOrg/Kimi-K2.5-Eagle3-MLA", "lightseekorg/kimi-k2.5-eagle3-mla"),
        ("/models/kimi-k2.5-eagle3-mla/", "lightseekorg/kimi-k2.5-eagle3-mla"),
        ("/hub/models--nvidia--Kimi-K2.6-Eagle3/snapshots/0a", "nvidia/Kimi-K2.6-Eagle3"),
        ("k-l-lambda/Kimi-K2.5-Eagle3", "k-l-lambda/Kimi-K2.5-Eagle3"),
        ("nvidia/kimi-k2.5-eagle3", None),
        ("somebody/drafter", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_drafter_by_its_name_or_folder(name: str, found: str | None) -> None:
    drafter = find(name)
    assert (drafter and drafter.name) == found


def test_rates_are_of_the_kinds_of_text_that_were_sent() -> None:
    drafter = find("lightseekorg/kimi-k2.5-eagle3")
    assert drafter is not None
    chinese, every = drafter.rates(3, ["chinese"]), drafter.rates(3, KINDS)
    assert chinese is not None
    assert every is not None
    assert 1 + sum(chinese) == pytest.approx(2.295)
    assert chinese < every
    silent = find("nvidia/Kimi-K2.5-Thinking-Eagle3")
    assert silent is not None
    assert silent.rates(3) is None


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("76,56,43", HEALTHY),
        ("76%, 56%, 43%", HEALTHY),
        ("0.76,0.56,0.43", HEALTHY),
        ("100,0", (1.0, 0.0)),
        ("50%", (0.5,)),
    ],
)
def test_rates_as_a_person_writes_them(text: str, rates: tuple[float, ...]) -> None:
    found = given(text, "--expect")
    assert found.rates == pytest.approx(rates)
    assert found.for_positions(5) == found.rates


def test_a_length_as_a_person_writes_it() -> None:
    assert sum(given("2.75", "--expect").for_positions(3)) == pytest.approx(1.75)
    assert sum(given("2.75@5", "--expect").for_positions(3)) == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.7", "an acceptance length is 1 to 65"),
        ("76", "an acceptance length is 1 to 65"),
        ("2.8@0", "1 to 64 drafts a step"),
        ("2.8@" + "9" * 5000, "1 to 64 drafts a step"),
        ("5@3", "3 drafts a step give 1 to 4"),
        ("56,76", "later positions cannot be higher"),
        ("120,50", "a rate of 1.2 cannot be"),
        ("1,,2", "one takes rates by position"),
        ("nowhere.json", "cannot be read: No such file"),
    ],
)
def test_what_is_no_acceptance(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        given(text, "--expect")


def test_an_earlier_report(tmp_path: Path) -> None:
    file = tmp_path / "good day.json"
    file.write_text(json.dumps({"positions": [{"value": 0.8}, {"value": 0.6}]}))
    found = given(str(file), "--expect")
    assert found.rates == (0.8, 0.6)
    assert found.measured
    for text in ("[]", "{", '{"positions": [{"value": "x"}]}', '{"positions": [{}]}', "[" * 10**5):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"--expect .*good day\.json"):
            given(str(file), "--expect")


@property_of(st.text(max_size=40))
def test_any_text_is_acceptance_or_an_error(text: str) -> None:
    said = ""
    try:
        assert given(text.replace("/", ""), "--expect").source
    except ValueError as error:
        said = str(error)
    assert not said or "--expect" in said or "null byte" in said
