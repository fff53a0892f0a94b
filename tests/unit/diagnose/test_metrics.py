# SPDX-License-Identifier: Apache-2.0
"""vLLM's counters in a Prometheus text, well-formed and hostile."""

from __future__ import annotations

import re
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.acceptance.model import Counts
from vllm_kimi_eagle3.diagnose.metrics import Key, Page, difference, parse, read_page

from .fake import Counters, exposition

KEY = Key("kimi", "0")


def page(drafts: int = 0, accepted: tuple[int, ...] = (0, 0, 0), steps: int = 0) -> str:
    """A page of one engine."""
    counters = Counters(drafts, drafts * len(accepted), list(accepted), steps=steps)
    return exposition({("kimi", "0"): counters})


def between(before: str, after: str, model: str | None = None) -> object:
    return difference(read_page(before), read_page(after), model)


# -------------------------------------------------------------------------------------- the text


def test_a_page_of_vllm() -> None:
    found = read_page(page(100, (76, 56, 43), 120))
    assert found.is_vllm
    assert found.models == ["kimi"]
    assert (found.bad_lines, found.impossible, found.foreign) == (0, [], [])
    assert found.engines[KEY].values["spec_decode_num_drafts"] == 100
    assert found.engines[KEY].positions == {0: 76, 1: 56, 2: 43}


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        ('a{b="c"} 1', {"b": "c"}, 1),
        ('a{b="c",} 1', {"b": "c"}, 1),
        ('a { b = "c" , d="e" } 1.5e3 1700000000000', {"b": "c", "d": "e"}, 1500),
        (r'a{b="q\"}\\\n{"} 0', {"b": 'q"}\\\n{'}, 0),
        ("a 2", {}, 2),
        ("a{} 2", {}, 2),
        ('a{b="c"} 1 # {trace_id="x"} 0.5', {"b": "c"}, 1),
    ],
)
def test_lines(line: str, labels: dict[str, str], value: float) -> None:
    samples, bad = parse(line)
    assert not bad
    assert [(dict(s.labels), s.value) for s in samples] == [(labels, value)]


@pytest.mark.parametrize(
    "line",
    ["a", "a{", 'a{b="c"', 'a{b="c} 1', "a{b=c} 1", 'a{="c"} 1', "a x", "a 1 2 3", "1a 1", "a 1_0",
     '{b="c"} 1', "<html>", 'a{b="c" d="e"} 1'],
)  # fmt: skip
def test_lines_that_are_none(line: str) -> None:
    samples, bad = parse(f"ok 1\n{line}\nok 2\n")
    assert len(samples) == 2
    assert bad == 1


@given(st.text(max_size=300))
def test_any_text_is_read(text: str) -> None:
    samples, bad = parse(text)
    assert len(samples) + bad <= text.count("\n") + 1
    read_page(text)


@pytest.mark.parametrize("position", ["1" * 5000, "9999", "\u0663", "1.0", " 1"])
def test_positions_that_are_none(position: str) -> None:
    page = read_page(
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} 1'
    )
    assert "has the position" in page.impossible[0]
    assert not next(iter(page.engines.values())).positions


def test_a_page_without_end_is_read_within_bounds() -> None:
    """Names, numbers and labels without number: what is kept of them is not."""
    names = "".join(f"vllm:spec_decode_x{i}_total 1\n" for i in range(20_000))
    labels = "vllm:x{" + 'a="1",' * 200_000 + "} 1\n"
    numbers = "".join(f'vllm:spec_decode_num_drafts_total{{engine="{i}"}} -1\n' for i in range(99))
    started = time.monotonic()
    page = read_page(names + labels + numbers)
    assert time.monotonic() - started < 20
    assert len(page.foreign) <= 20
    assert len(page.impossible) <= 20
    assert page.bad_lines == 1


# Lines that are nearly vLLM's.
_NAMES = st.sampled_from(
    [
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_drafts_created",
        "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:spec_decode_new_counter_total",
        "vllm_spec_decode_num_drafts_total",
        "vllm:inter_token_latency_seconds_count",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:request_success_total",
        "process_cpu_seconds_total",
    ]
)
_LABELS = st.dictionaries(
    st.sampled_from(["engine", "model_name", "position", "finished_reason"]),
    st.sampled_from(["0", "1", "2", "-1", "99", "10**9", "", "x", 'a"b', "é", "\\"]),
    max_size=4,
)
_VALUES = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(repr),
    st.sampled_from(["NaN", "+Inf", "-Inf", "1e400", "0x10", "", "1,5"]),
)


@st.composite
def hostile(draw: st.DrawFn) -> str:
    lines = []
    for _ in range(draw(st.integers(0, 12))):
        labels = draw(_LABELS)
        escaped = {k: v.replace("\\", r"\\").replace('"', r"\"") for k, v in labels.items()}
        text = ",".join(f'{k}="{v}"' for k, v in escaped.items())
        lines.append(f"{draw(_NAMES)}{{{text}}} {draw(_VALUES)}")
    return "\n".join(lines)


@settings(max_examples=200)
@given(hostile(), hostile())
def test_any_counters_are_read(before: str, after: str) -> None:
    """Whatever two pages hold, what is counted between them is possible."""
    found = difference(read_page(before), read_page(after))
    for delta in (*found.engines.values(), found.total):
        share = delta.drafted_share
        assert share is None or 0 <= share <= 1
        if delta.counts is not None:
            assert list(delta.counts.rates) == sorted(delta.counts.rates, reverse=True)
            assert 1 <= delta.counts.length <= 1 + delta.counts.positions
    assert all(re.search(r"\S", said) for said in found.impossible)


@given(st.text(alphabet=string.printable, max_size=30))
def test_any_label_comes_back(value: str) -> None:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    if any(c in value for c in "\r\x0b\x0c"):
        return  # Lines end at these for some.
    samples, bad = parse(f'a{{b="{escaped}"}} 1')
    assert not bad
    assert samples[0].labels == {"b": value}


# ------------------------------------------------------------------------------ between two pages


def test_what_was_counted_between_two_pages() -> None:
    found = between(page(50, (40, 30, 20), 60), page(150, (116, 86, 63), 165))
    assert found.total.counts == Counts(100, (76, 56, 43))
    assert found.total.steps == 105
    assert found.total.drafted_share == pytest.approx(100 / 105)
    assert (found.resets, found.impossible, found.missing) == ([], [], [])


def test_data_parallel_ranks_are_counted_apart_and_added_up() -> None:
    one, two = Counters(100, 300, [76, 56, 43]), Counters(200, 600, [20, 4, 0])
    after = exposition({("kimi", "0"): one, ("kimi", "1"): two})
    empty = exposition({("kimi", "0"): Counters(), ("kimi", "1"): Counters()})
    found = between(empty, after)
    assert found.engines[Key("kimi", "1")].counts == Counts(200, (20, 4, 0))
    assert found.total.counts == Counts(300, (96, 60, 43))


def test_two_models_are_told_apart() -> None:
    one, two = Counters(100, 300, [76, 56, 43]), Counters(200, 600, [20, 4, 0])
    after = exposition({("kimi", "0"): one, ("other", "0"): two})
    assert read_page(after).models == ["kimi", "other"]
    assert between("", after, "other").total.counts == Counts(200, (20, 4, 0))


def test_without_a_colon_and_without_total() -> None:
    text = page(10, (7, 5, 4)).replace("vllm:", "vllm_").replace("_total{", "{")
    assert between("", text).total.counts == Counts(10, (7, 5, 4))


def test_a_server_that_was_started_anew() -> None:
    found = between(page(500, (400, 300, 200)), page(100, (76, 56, 43)))
    assert found.resets == [KEY]
    assert found.total.counts == Counts(100, (76, 56, 43)), "what it counted since"


def test_a_server_that_was_started_anew_and_overtook() -> None:
    before = exposition({("kimi", "0"): Counters(10, 30, [5, 4, 3])}, created=1.0)
    after = exposition({("kimi", "0"): Counters(100, 300, [76, 56, 43])}, created=2.0)
    found = between(before, after)
    assert found.resets == [KEY]
    assert found.total.counts == Counts(100, (76, 56, 43))


def test_an_engine_that_comes_or_goes() -> None:
    one = {("kimi", "0"): Counters(10, 30, [7, 5, 4])}
    two = {**one, ("kimi", "1"): Counters(20, 60, [2, 1, 0])}
    assert between(exposition(one), exposition(two)).resets == [Key("kimi", "1")]
    assert between(exposition(two), exposition(one)).resets == [Key("kimi", "1")]
    assert not between("", exposition(two)).resets, "the first page was no vLLM's"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('position="0"} 76.0', 'position="0"} 176.0', "175 accepted drafts, and 275 by their"),
        ('position="1"} 56.0', 'position="1"} NaN', "is nan"),
        ('position="1"} 56.0', 'position="1"} -1', "is -1"),
        ('position="1"} 56.0', 'position="1"} 1e300', "is 1e+300"),
        ('position="1"} 56.0', 'position="1"} 5.5', "is 5.5"),
        ('position="2"', 'position="x"', "has the position 'x'"),
        ('position="2"', 'position="700"', "has the position '700'"),
        ('position="0"', 'position="9"', "at position 9 and none at 0"),
        ("accepted_tokens_total", "accepted_tokens_total", ""),
    ],
)
def test_numbers_that_cannot_be(old: str, new: str, said: str) -> None:
    text = page(100, (76, 56, 43))
    assert old in text
    broken = read_page(text.replace(old, new))
    found = difference(Page(), broken)
    impossible = [*broken.impossible, *found.impossible]
    assert any(said in one for one in impossible) if said else not impossible


def test_a_page_that_was_read_while_it_changed() -> None:
    """Several processes of a server count on their own: a few steps of difference are none."""
    text = page(1000, (760, 560, 430)).replace("num_drafts_total", "NUM")
    torn = text.replace(
        'NUM{engine="0",model_name="kimi"} 1000.0', 'NUM{engine="0",model_name="kimi"} 755.0'
    ).replace("NUM", "num_drafts_total")
    found = between("", torn)
    assert not found.impossible
    assert found.total.counts is not None
    assert found.total.counts.accepted == (755, 560, 430)


@pytest.mark.parametrize(("counted", "said"), [(27, 29), (30, 30), (12, None)])
def test_a_page_that_was_read_between_drafts_and_what_was_accepted(
    counted: int, said: int | None
) -> None:
    """Of ten steps with three drafts each; 29 were accepted."""
    counters = Counters(10, counted, [10, 10, 9])
    found = between("", exposition({("kimi", "0"): counters}))
    if said is None:
        assert found.total.counts is None
        assert "29 accepted drafts of only 12" in found.impossible[0]
    else:
        assert found.total.counts == Counts(10, (10, 10, 9), said)
        assert not found.impossible


def test_counters_that_are_missing() -> None:
    without = "\n".join(
        line for line in page(100, (76, 56, 43)).split("\n") if "per_pos" not in line
    )
    found = between("", without)
    assert found.missing == ["spec_decode_num_accepted_tokens_per_pos"]
    assert found.total.counts is None
    assert found.total.length == pytest.approx(1 + 175 / 100)
    renamed = page(100).replace("spec_decode_num_drafts", "spec_decode_num_proposals")
    broken = read_page(renamed)
    assert broken.foreign == ["spec_decode_num_proposals"]
    assert difference(Page(), broken).missing == ["spec_decode_num_drafts"]


def test_another_program() -> None:
    found = read_page("go_goroutines 12\nhttp_requests_total 5\n")
    assert not found.is_vllm
    assert found.lines == 2
    assert not read_page("<html><body>404</body></html>").lines
