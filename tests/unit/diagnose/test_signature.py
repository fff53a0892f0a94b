# SPDX-License-Identifier: Apache-2.0
"""Every shape that counters can have, and what just misses it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.assets import variants
from vllm_kimi_eagle3.acceptance.model import Counts
from vllm_kimi_eagle3.diagnose.metrics import Delta, Key
from vllm_kimi_eagle3.diagnose.signature import Expected, Observed, Part, findings, length_bins

from .fake import text_of

HEALTHY = (0.76, 0.56, 0.43)
PUBLISHED = Expected(HEALTHY, "published for a drafter")


def delta(
    rates: Sequence[float], drafts: int, plain: int = 0, seconds: float = 1.0, requests: int = 1
) -> Delta:
    counts = Counts(drafts, tuple(round(drafts * rate) for rate in rates))
    return Delta(
        counts, drafts, sum(counts.accepted), drafts + sum(counts.accepted) + plain, requests,
        drafts + plain, seconds,
    )  # fmt: skip


def parts(
    rates: Sequence[float], drafts: int = 80, number: int = 12, prompt: int = 60, plain: int = 0
) -> list[Part]:
    """Equal requests."""
    one = delta(rates, drafts, plain)
    return [Part(one, "chat", prompt, text_of(i), 1.0, 200) for i in range(number)]


def ids(observed: Observed | Sequence[Part], expected: Expected | None = None) -> list[str]:
    if not isinstance(observed, Observed):
        observed = Observed(observed)
    return [finding.id for finding in findings(observed, expected)]


# -------------------------------------------------------------- the shape of acceptance by position


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        # Healthy, as published; and the lowest card of a Kimi drafter (2.05 tokens a step).
        ((0.78, 0.56, 0.40), []),
        (HEALTHY, []),
        ((0.55, 0.31, 0.17), []),
        ((0.95, 0.90, 0.86), []),
        # The two reports of wrong layers, and their near miss.
        ((0.10, 0.02, 0.00), ["diagnose-features"]),
        ((0.012, 0.0, 0.0), ["diagnose-features"]),
        ((0.30, 0.09, 0.03), ["diagnose-features"]),
        ((0.38, 0.20, 0.11), ["diagnose-below-expected"]),
        ((0.45, 0.25, 0.13), ["diagnose-below-expected"]),
        # Nothing.
        ((0.0, 0.0, 0.0), ["diagnose-nothing-accepted"]),
        ((0.05, 0.02, 0.0), ["diagnose-features"]),
        # The second draft, and its near miss.
        ((0.72, 0.15, 0.03), ["diagnose-recurrence"]),
        ((0.72, 0.26, 0.10), ["diagnose-recurrence"]),
        ((0.72, 0.40, 0.22), []),
        # Beyond the positions that it was trained for.
        ((0.78, 0.60, 0.47, 0.16, 0.04), ["diagnose-trained-depth"]),
        ((0.78, 0.60, 0.47, 0.31, 0.22), []),
        # One draft a step has one position.
        ((0.80,), []),
        ((0.10,), ["diagnose-features"]),
    ],
)
def test_shapes(rates: tuple[float, ...], found: list[str]) -> None:
    assert ids(parts(rates)) == found


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        (HEALTHY, []),
        ((0.90, 0.80, 0.70), []),
        # A tenth below is other text; a fifth may be a layer, another target, a weak drafter.
        ((0.70, 0.50, 0.37), []),
        ((0.60, 0.38, 0.25), ["diagnose-below-expected"]),
        # Half is more than text explains.
        ((0.40, 0.20, 0.10), ["diagnose-features"]),
        # The first as it should be, the later ones a little lower each: in sum too low.
        ((0.74, 0.38, 0.20), ["diagnose-below-expected"]),
        ((0.72, 0.15, 0.03), ["diagnose-recurrence"]),
    ],
)
def test_shapes_against_what_was_published(rates: tuple[float, ...], found: list[str]) -> None:
    assert ids(parts(rates), PUBLISHED) == found


def test_more_or_fewer_drafts_than_were_published() -> None:
    assert ids(parts((0.76, 0.56, 0.43, 0.33, 0.25)), PUBLISHED) == []
    assert ids(parts((0.40,)), PUBLISHED) == ["diagnose-features"]


# Of the tiny pair, by the reference: k = 3, the prompts of the tests.
def row(drafter: str, aux: Sequence[int] = (2, 4, 5)) -> Counts:
    found = variants.expected_run(drafter, aux_layer_ids=aux)
    return Counts(found["num_drafts"], tuple(found["num_accepted_tokens_per_pos"]))


def wrong(variant: str, way: str) -> Counts:
    found = variants.wrong_variant(variant)[way]
    return Counts(found["num_drafts"], tuple(found["num_accepted_tokens_per_pos"]))


def good(variant: str) -> Counts:
    found = variants.expected_variant(variant)
    return Counts(found["num_drafts"], tuple(found["num_accepted_tokens_per_pos"]))


_NAMES = ("eagle3-llama-tiny", "eagle3-mla-tiny")


@pytest.mark.parametrize(
    ("healthy", "broken", "classes"),
    [
        *((row(n), row(n, aux), {"features"}) for n in _NAMES for aux in ((3, 5, 6), (1, 3, 4))),
        *(
            (good(f"{f}-{v}"), wrong(f"{f}-{v}", w), {c})
            for f in ("llama", "mla")
            for v, w, c in (
                ("norm-output", "norm_output ignored", "recurrence"),
                ("fc-norm", "fc_norm ignored", "features"),
                ("eagle31", "fc_norm ignored", "features"),
                ("eagle31", "norm_output ignored", "recurrence"),
                ("norm-before-fc", "norm_before_fc ignored", "features"),
                ("norm-before-residual", "norm_before_residual ignored", "features"),
                ("own-head", "the target's head", "features"),
                ("own-embed", "the target's embedding", "features"),
                ("no-head", "head left at zero", "nothing-accepted"),
                ("no-head", "embedding left at zero", "features"),
                ("identity-d2t", "d2t taken as token ids", "nothing-accepted"),
            )
        ),
        (good("mla-reduced-vocab"), wrong("mla-reduced-vocab", "d2t ignored"),
         {"nothing-accepted"}),
        (good("mla-yarn-5x"), wrong("mla-yarn-5x", "theta 10000"), {"features"}),
        (good("mla-yarn-5x"), wrong("mla-yarn-5x", "no YaRN"), {"features"}),
        (good("llama-theta"), wrong("llama-theta", "theta 10000"), {"features"}),
    ],
)  # fmt: skip
def test_what_the_reference_counts_of_a_broken_pair(
    healthy: Counts, broken: Counts, classes: set[str]
) -> None:
    """Against a measurement of a good day, with the same prompts and eight times as many steps."""

    def prompts(counts: Counts) -> list[Part]:
        share = Counts(counts.drafts, counts.accepted)
        one = Delta(share, share.drafts, sum(share.accepted), 0, 1, share.drafts, 1.0)
        return [Part(one, "", 60, "", 1.0, 96)] * 8

    expected = Expected(healthy.rates, "measured before", same_text=True)
    assert ids(prompts(healthy), expected) == []
    found = {name.removeprefix("diagnose-") for name in ids(prompts(broken), expected)}
    assert found == classes


def test_one_layer_off_in_a_drafter_that_nobody_measured_cannot_be_seen() -> None:
    """The tiny pair with shifted layers accepts more than any published head: only a figure of
    its own can tell."""
    shifted = row("eagle3-llama-tiny", (3, 5, 6))
    assert shifted.length > 2.75
    assert ids([Part(Delta(shifted, shifted.drafts))] * 4) == []


# ------------------------------------------------------------------------------------------ lengths


def test_drafting_that_stops_at_a_length() -> None:
    short = parts(HEALTHY, prompt=60)
    long = parts(HEALTHY, drafts=4, number=3, prompt=3000, plain=196)
    assert ids([*short, *long]) == ["diagnose-drafting-stops"]
    near = parts(HEALTHY, drafts=70, number=3, prompt=3000, plain=30)
    assert "diagnose-drafting-stops" not in ids([*short, *near])


def test_placeholders_beyond_a_length() -> None:
    short = parts(HEALTHY, prompt=60)
    assert ids([*short, *parts((0, 0, 0), 120, 3, 3000)]) == ["diagnose-placeholders"]
    # One that is accepted is no placeholder.
    near = parts((0.02, 0, 0), 120, 3, 3000)
    assert ids([*short, *near]) == ["diagnose-dead-beyond-length"]


def test_the_length_is_the_one_where_it_falls() -> None:
    fine = [part for prompt in (60, 400, 900) for part in parts(HEALTHY, 80, 4, prompt)]
    dead = [part for prompt in (2000, 5000) for part in parts((0.1, 0.01, 0), 120, 4, prompt)]
    found = list(findings(Observed([*fine, *dead]), None))
    assert [f.id for f in found] == ["diagnose-dead-beyond-length"]
    assert "between 1,100 and 2,200 tokens" in found[0].fact
    assert '"max_model_len": 2200' in found[0].fix
    less = [part for prompt in (2000, 5000) for part in parts((0.6, 0.4, 0.25), 120, 4, prompt)]
    assert ids([*fine, *less]) == [], "long text is harder"


def test_a_drafter_that_is_broken_everywhere_has_no_limit_of_length() -> None:
    both = [*parts((0.1, 0.02, 0)), *parts((0.1, 0.02, 0), prompt=3000)]
    assert ids(both) == ["diagnose-features"]


def test_a_drafter_that_is_broken_below_its_limit() -> None:
    both = [*parts((0.3, 0.09, 0)), *parts((0, 0, 0), 120, 3, 3000)]
    assert ids(both) == ["diagnose-placeholders", "diagnose-features"]


def test_bins_of_length_have_enough_steps() -> None:
    some = [p for prompt in (60, 100, 500, 2000) for p in parts(HEALTHY, 10, 1, prompt)]
    assert len(length_bins(some)) == 1
    assert length_bins([]) == []
    assert [b.longest for b in length_bins(parts(HEALTHY) + parts(HEALTHY, prompt=900))] == [
        260,
        1100,
    ]


# -------------------------------------------------------------------------------------------- steps


def test_steps_without_drafts() -> None:
    assert ids(parts(HEALTHY, plain=40)) == ["diagnose-steps-without-drafts"]
    assert ids(parts(HEALTHY, plain=4)) == []


def test_no_drafts_at_all() -> None:
    none = Delta(Counts.none(3), 0, 0, 100, 1, 99, 1.0)
    assert ids([Part(none, "", 60)] * 3) == ["diagnose-no-drafts"]
    idle = Delta(Counts.none(3), 0, 0, 0, 0, 0, 0.0)
    assert ids([Part(idle)] * 3) == ["diagnose-too-few-drafts"]


def test_too_few_drafts() -> None:
    assert ids(parts(HEALTHY, 9, 11)) == ["diagnose-too-few-drafts"]
    assert ids(parts(HEALTHY, 10, 11)) == []


def test_few_drafts_of_few_texts_are_not_judged_by_their_value() -> None:
    """0.3 of 120 steps in two texts may be 0.4 of others."""
    assert ids(parts((0.33, 0.1, 0.03), 60, 2)) != ["diagnose-features"]


# ------------------------------------------------------------------------------------------ traffic


LOW = (0.42, 0.20, 0.10)


def test_sampled_traffic_is_not_judged() -> None:
    watched = {"parts": parts(LOW), "driven": False}
    assert ids(Observed(**watched, temperature=None)) == ["diagnose-mixed-traffic"]
    assert ids(Observed(**watched, temperature=0.7)) == ["diagnose-mixed-traffic"]
    assert ids(Observed(**watched, temperature=0.0)) == ["diagnose-below-expected"]
    assert ids(Observed(parts(HEALTHY), driven=False, temperature=None)) == []
    assert ids(Observed(parts((0.1, 0, 0)), driven=False, temperature=None)) == [
        "diagnose-features"
    ]


def test_requests_of_others_are_not_judged() -> None:
    assert ids(Observed(parts(LOW), foreign_requests=3)) == ["diagnose-mixed-traffic"]
    assert ids(Observed(parts(HEALTHY), foreign_requests=3)) == []


def test_answers_that_repeat_themselves() -> None:
    loop = [Part(p.delta, p.kind, p.prompt_tokens, "one two three. " * 60, 1.0, 200)
            for p in parts(HEALTHY)]  # fmt: skip
    assert ids(loop) == ["diagnose-repeats"]
    assert ids([*loop[:2], *parts(HEALTHY)]) == [], "a few may"
    short = [Part(p.delta, p.kind, p.prompt_tokens, "ok", 1.0, 200) for p in parts(HEALTHY)]
    assert ids(short) == []


def test_data_parallel_ranks() -> None:
    one, bad, near = delta(HEALTHY, 400), delta((0.3, 0.1, 0), 400), delta((0.62, 0.4, 0.3), 400)
    engines = {Key("kimi", "0"): one, Key("kimi", "1"): bad}
    found = list(findings(Observed(parts(HEALTHY), engines), None))
    assert [f.id for f in found] == ["diagnose-ranks-differ"]
    assert "engine 1 of kimi 30%" in str(found[0].evidence)
    engines[Key("kimi", "1")] = near
    assert ids(Observed(parts(HEALTHY), engines)) == []


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3000),
            st.lists(st.floats(0, 1), min_size=3, max_size=3),
            st.integers(0, 300),
            st.one_of(st.none(), st.integers(1, 100_000)),
        ),
        max_size=12,
    ),
    st.one_of(st.none(), st.just(PUBLISHED), st.just(Expected(HEALTHY, "before", True))),
    st.booleans(),
)
def test_any_counts_have_a_verdict(
    requests: list[tuple[int, list[float], int, int | None]],
    expected: Expected | None,
    driven: bool,
) -> None:
    made = [
        Part(delta(sorted(rates, reverse=True), drafts, plain), "", prompt, "", 1.0, 20)
        for drafts, rates, plain, prompt in requests
    ]
    for finding in findings(Observed(made, driven=driven), expected):
        assert finding.fact
        assert not finding.fact.endswith(".")
        assert "\n" not in finding.text
        assert finding.kind.undecided or finding.fix
