# SPDX-License-Identifier: Apache-2.0
"""What counters look like, and what that comes from.

Every error of a drafter leaves a shape. What is fed wrongly (layers, norms, rope, embedding) spoils
the first draft and with it all others; what is handed on wrongly from draft to draft (norm_output,
positions, the drafter's KV cache) leaves the first draft right; a limit of length shows only beyond
it. Counters show the shape and not the cause: `--offline` does.

The thresholds are choices, and docs/diagnose.md says where they come from. What lies between a
shape and its near miss is said to be undecided.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from vllm_kimi_eagle3.acceptance.model import (
    Acceptance,
    Counts,
    Estimate,
    acceptance,
    extended,
    geometric,
    total,
)
from vllm_kimi_eagle3.acceptance.published import HEALTHY
from vllm_kimi_eagle3.findings import Evidence, Finding

from .metrics import DRAFTS, PER_POSITION, Delta, Key

# Fewer drafts than these say little: the first rate is then known to a sixth at best.
MIN_DRAFTS = 100
# Nothing is accepted: the first rate. Wrong layers left 1 to 10 %, which is still a few.
NOTHING = 0.004
# The first rate's upper bound: the two reports of wrong layers had 1 and 10 %, the lowest card of a
# Kimi drafter (2.05 tokens a step) is 55 %.
COLLAPSED = 0.35
# Between that and this nothing that was published of a Kimi drafter lies, either.
LOW = 0.5
# Of an expected rate, below which no other text explains it.
FAR_BELOW = 0.6
# By how much a rate may be below what was published with other prompts, and below one that was
# measured with the same.
OTHER_TEXT, SAME_TEXT = 0.15, 0.05
# A draft after an accepted one is accepted as often as that one in a healthy drafter (0.97 to 1.04
# times in what is published by position); 0.2 times where norm_output is wrong.
FALLS = 0.6
# Steps that verify no drafts: the first of each request after a prefill may be one.
DRAFTED, STOPPED = 0.9, 0.5
# In a bin of lengths: steps that are needed to say anything.
MIN_STEPS = 40
# Bytes of a text over those it is compressed to: prose and code 2 to 3, a loop more than 8.
LOOPS, LOOPING_TEXTS, MIN_BYTES = 7.0, 0.25, 400

_ISSUE = "https://github.com/vllm-project/vllm/issues/"
OFFLINE = "vllm-kimi-eagle3 diagnose --offline MODEL --speculative-config '{...}'"


@dataclass(frozen=True)
class Expected:
    """What acceptance should be.

    Attributes:
        rates: by position.
        source: where that is from, in words.
        same_text: it was measured with the same prompts on the same target.
    """

    rates: tuple[float, ...]
    source: str
    same_text: bool = False

    def for_positions(self, k: int) -> Expected:
        """For ``k`` positions."""
        return replace(self, rates=extended(self.rates, k))

    @classmethod
    def of_length(cls, length: float, k: int, source: str) -> Expected:
        """From an acceptance length with ``k`` drafts a step.

        Raises:
            ValueError: no ``k`` drafts give that length.
        """
        return cls(geometric(length, k), source)


@dataclass(frozen=True)
class Part:
    """What was counted of one request, or of one slice of time.

    Attributes:
        delta: the counters.
        kind: of its text: chat, code, math, chinese, long; "" where it is not known.
        prompt_tokens: of its prompt; None where it is not known.
        text: what was generated.
        wall: seconds that the answer took.
        answered: tokens that the answer says it has.
    """

    delta: Delta
    kind: str = ""
    prompt_tokens: int | None = None
    text: str = ""
    wall: float = 0.0
    answered: int = 0

    @property
    def end(self) -> int | None:
        """Tokens of the prompt and the answer together."""
        return None if self.prompt_tokens is None else self.prompt_tokens + self.answered


@dataclass(frozen=True)
class Observed:
    """All that was counted.

    Attributes:
        parts: by request, or by slice of time.
        engines: by engine.
        driven: this program sent the requests, greedily.
        foreign_requests: of others that ended meanwhile.
        temperature: of the traffic that was watched; None if nobody said it.
        missing: counters that the server does not have.
    """

    parts: Sequence[Part]
    engines: Mapping[Key, Delta] = field(default_factory=dict)
    driven: bool = True
    foreign_requests: int = 0
    temperature: float | None = 0.0
    missing: Sequence[str] = ()

    @property
    def greedy(self) -> bool:
        """All that was counted is known to have been sampled greedily."""
        return self.temperature == 0.0 and not (self.driven and self.foreign_requests)


@dataclass(frozen=True)
class LengthBin:
    """Requests that ended at about the same length.

    Attributes:
        shortest, longest: tokens of prompt and answer.
        counts: of their drafts.
        steps: of them; None where it is not known.
    """

    shortest: int
    longest: int
    counts: Counts
    steps: int | None

    @property
    def drafted(self) -> float | None:
        """The part of the steps that verified drafts."""
        return None if not self.steps else min(1.0, self.counts.drafts / self.steps)


def groups_of(parts: Iterable[Part]) -> list[Counts]:
    """The counts of each part that has any."""
    return [part.delta.counts for part in parts if part.delta.counts is not None]


def length_bins(parts: Iterable[Part]) -> list[LengthBin]:
    """Requests by length, each bin up to twice as long as the one before; those that have too few
    steps go with the next longer."""
    bins: dict[int, list[Part]] = {}
    for part in parts:
        if part.end is not None and part.delta.counts is not None:
            bins.setdefault(part.end.bit_length(), []).append(part)
    merged: list[list[Part]] = []
    for _, members in sorted(bins.items()):
        if merged and _steps(merged[-1]) < MIN_STEPS:
            merged[-1] += members
        else:
            merged.append(list(members))
    if len(merged) > 1 and _steps(merged[-1]) < MIN_STEPS:
        merged[-2:] = [merged[-2] + merged[-1]]
    return [
        LengthBin(
            min(part.end or 0 for part in members),
            max(part.end or 0 for part in members),
            total(groups_of(members)),
            _known_steps(members),
        )
        for members in merged
    ]


def _known_steps(parts: Sequence[Part]) -> int | None:
    if any(part.delta.steps is None for part in parts):
        return None
    return sum(part.delta.steps or 0 for part in parts)


def _steps(parts: Sequence[Part]) -> int:
    return sum(max(part.delta.steps or 0, part.delta.drafts or 0) for part in parts)


# ----------------------------------------------------------------------------------- the verdict


def findings(observed: Observed, expected: Expected | None) -> Iterator[Finding]:
    """What is to be said of counters."""
    groups = groups_of(observed.parts)
    counts = total(groups)
    steps = _known_steps(observed.parts)
    if counts.drafts == 0:
        yield from _without_counts(observed, steps)
        return
    yield from _looping(observed.parts)
    limits = list(_limits_of_length(observed.parts))
    yield from (finding for finding, _ in limits)
    yield from _ranks(observed.engines)
    # What a limit of length does is not to be taken for something else.
    within = min((longest for _, longest in limits), default=None)
    parts = [p for p in observed.parts if within is None or (p.end or 0) <= within]
    if within is None and steps and counts.drafts < DRAFTED * steps:
        yield _some_steps(counts, steps)
    own = groups_of(parts)
    if total(own).drafts < MIN_DRAFTS:
        yield Finding(
            "diagnose-too-few-drafts",
            f"{total(own).drafts:,} steps verified drafts"
            + (f" in requests of up to {within:,} tokens" if within is not None else "")
            + f", and fewer than {MIN_DRAFTS} say nothing of acceptance",
            "let it generate more: more prompts, `--tokens 512`, or a longer `--watch`",
            Evidence("/metrics", f"vllm:{DRAFTS}_total", f"{total(own).drafts:,}"),
        )
        return
    yield from _shape(acceptance(own), expected, observed)


def _without_counts(observed: Observed, steps: int | None) -> Iterator[Finding]:
    delta_drafts = [part.delta.drafts for part in observed.parts if part.delta.drafts is not None]
    generated = sum(part.delta.generated for part in observed.parts)
    if observed.missing or not delta_drafts or sum(delta_drafts):
        return  # What the counters lack was said where they were read.
    if max(steps or 0, generated) < MIN_STEPS:
        yield Finding(
            "diagnose-too-few-drafts",
            f"{generated:,} tokens were generated, and no step verified drafts; so few say nothing",
            "send it requests, or leave out `--watch` and let this program send some",
            Evidence("/metrics", f"vllm:{DRAFTS}_total", "0"),
        )
        return
    yield Finding(
        "diagnose-no-drafts",
        f"{generated:,} tokens were generated and not one step verified drafts, although the "
        "server counts speculation",
        'look for "max_model_len" in --speculative-config and "max_position_embeddings" in the '
        "drafter's config.json, which may end before the prompts do, and for a 0 in "
        '"num_speculative_tokens_per_batch_size"',
        Evidence("/metrics", f"vllm:{DRAFTS}_total", "0"),
    )


def _looping(parts: Sequence[Part]) -> Iterator[Finding]:
    texts = [p.text.encode("utf-8", "replace") for p in parts]
    long = [text for text in texts if len(text) >= MIN_BYTES]
    loops = [text for text in long if len(text) / len(zlib.compress(text, 9)) > LOOPS]
    if long and len(loops) > LOOPING_TEXTS * len(long):
        yield Finding(
            "diagnose-repeats",
            f"{len(loops)} of {len(long)} answers repeat themselves, and a loop is easy to draft: "
            "acceptance is flattered",
            "measure with prompts that the model answers (`--prompts FILE`), never with random "
            "tokens",
            Evidence(key="one of them", value=_start(loops[0])),
        )


def _start(text: bytes) -> str:
    words = " ".join(text.decode("utf-8", "replace").split())
    return words[:60] + ("..." if len(words) > 60 else "")


def _limits_of_length(parts: Sequence[Part]) -> Iterator[tuple[Finding, int]]:
    """Each limit, and the longest request that is not touched by it."""
    bins = length_bins(parts)
    for short, long in pairwise(bins):
        below = total(b.counts for b in bins if b.longest <= short.longest)
        beyond = [b for b in bins if b.shortest >= long.shortest]
        where = f"between {short.longest:,} and {long.shortest:,} tokens"
        if (
            all(b.drafted is not None and b.drafted < STOPPED for b in beyond)
            and (short.drafted or 0) > DRAFTED
        ):
            share = min(b.drafted or 0.0 for b in beyond)
            yield (
                Finding(
                    "diagnose-drafting-stops",
                    f"requests longer than some length {where} are drafted for in {share:.0%} of "
                    f"their steps, shorter ones in {short.drafted:.0%}",
                    'raise "max_model_len" in --speculative-config if it is set there, and '
                    '"max_position_embeddings" in the drafter\'s config.json if its rope goes on '
                    "(docs/right-tensors.md, Long requests)",
                    Evidence("/metrics", "steps with drafts", _bins_in_words(bins, drafted=True)),
                ),
                short.longest,
            )
            return
        far = total(b.counts for b in beyond)
        if far.drafts < MIN_STEPS or below.drafts < MIN_STEPS:
            continue
        first, there = acceptance([below]).rates[0], acceptance([far]).rates[0]
        own = acceptance([long.counts]).rates[0] if long.counts.drafts else there
        if first.below(NOTHING) or not there.below(FALLS * first.low):
            continue
        if own.value >= FALLS * first.value:
            continue  # It is fine still, and those after it are not.
        evidence = Evidence("/metrics", "first draft accepted", _bins_in_words(bins))
        if far.accepted[0] == 0:
            yield (
                Finding(
                    "diagnose-placeholders",
                    f"beyond a length {where} none of {far.drafts:,} verified drafts was accepted, "
                    f"and {first.value:.0%} before it: these are no drafts but the token 0, which "
                    "vLLM verifies where a request of the batch is too long for the drafter",
                    "install the plugin on the server, which stops drafting for that request alone "
                    "or lets the drafter go on; or raise the drafter's limit "
                    '("max_model_len" in --speculative-config)',
                    evidence,
                    links=(f"{_ISSUE}58080",),
                ),
                short.longest,
            )
        else:
            yield (
                Finding(
                    "diagnose-dead-beyond-length",
                    f"beyond a length {where} the first draft is accepted in {there.value:.0%} of "
                    f"steps, and in {first.value:.0%} before it",
                    "compare rope_scaling and max_position_embeddings in the drafter's config.json "
                    "with what it was trained for; if it was trained no further, limit it with "
                    f'"max_model_len": {long.shortest} in --speculative-config',
                    evidence,
                ),
                short.longest,
            )
        return


def _bins_in_words(bins: Sequence[LengthBin], drafted: bool = False) -> str:
    def share(one: LengthBin) -> float:
        return (one.drafted or 0.0) if drafted else (one.counts.rates or (0.0,))[0]

    return "; ".join(f"up to {one.longest:,} tokens {share(one):.0%}" for one in bins)


def _some_steps(counts: Counts, steps: int) -> Finding:
    return Finding(
        "diagnose-steps-without-drafts",
        f"{counts.drafts:,} of {steps:,} steps verified drafts, {counts.drafts / steps:.0%}",
        "look for requests that are longer than the drafter reaches (`diagnose` without --watch "
        "tries lengths), for structured output, and for a schedule of drafts by batch size",
        Evidence("/metrics", "steps with drafts", f"{counts.drafts / steps:.0%}"),
    )


def _ranks(engines: Mapping[Key, Delta]) -> Iterator[Finding]:
    counted = {
        key: acceptance([delta.counts])
        for key, delta in engines.items()
        if delta.counts is not None and delta.counts.drafts >= MIN_DRAFTS and delta.counts.accepted
    }
    if len(counted) < 2:
        return
    best = max(counted.values(), key=lambda one: one.rates[0].value).rates[0]
    worse = {k: a for k, a in counted.items() if a.rates[0].below(FALLS * best.low)}
    if worse:
        said = ", ".join(f"{k} {a.rates[0].value:.0%}" for k, a in counted.items())
        yield Finding(
            "diagnose-ranks-differ",
            f"the first draft is accepted in {best.value:.0%} of steps on the best of "
            f"{len(counted)} data-parallel ranks and in "
            f"{min(a.rates[0].value for a in worse.values()):.0%} on the worst",
            "compare what the log of each rank says it loaded (the line `EAGLE-3 drafter ...`); if "
            "the files are the same everywhere, start the server anew",
            Evidence("/metrics", "first draft accepted", said),
        )


def _shape(
    measured: Acceptance, expected: Expected | None, observed: Observed
) -> Iterator[Finding]:
    k = measured.counts.positions
    first = measured.rates[0]
    expected = None if expected is None else expected.for_positions(k)
    evidence = Evidence("/metrics", f"vllm:{PER_POSITION}_total", in_words(measured))
    if first.value < NOTHING:
        yield Finding(
            "diagnose-nothing-accepted",
            f"of {measured.counts.drafts:,} first drafts {measured.counts.accepted[0]:,} were "
            "accepted: what is proposed has nothing to do with what the drafter meant",
            f"check that the checkpoint has d2t and its own lm_head: `vllm-kimi-eagle3 check` with "
            f"the server's command, then `{OFFLINE}`",
            evidence,
        )
        return
    against = _against(expected)
    if _is_collapsed(first, expected):
        yield Finding(
            "diagnose-features",
            f"the first draft is accepted in {_range(first)} of steps, {against}: the drafter is "
            "fed something else than it was trained on (aux layers, a norm, rope, embedding or "
            "head)",
            f"`{OFFLINE}` names which; docs/right-tensors.md has the usual ones",
            evidence,
        )
        return
    later = _falls(measured, expected)
    if later is not None:
        yield _recurrence(measured, later, evidence)
        return
    low = (
        first.below(LOW) if expected is None else first.below(expected.rates[0] * (1 - OTHER_TEXT))
    )
    if not low and expected is not None:
        low = measured.length.below(1 + sum(expected.rates) * (1 - OTHER_TEXT))
    if not low:
        return
    if not observed.greedy:
        yield _mixed(observed, measured, against)
        return
    yield Finding(
        "diagnose-below-expected",
        f"{measured.length.value:.2f} tokens a step, and the first draft is accepted in "
        f"{_range(first)} of steps, {against}: a layer that is one off, a drafter for another "
        "target of the same family, a weak drafter or other text look like that, and counters "
        "cannot tell them apart",
        f"`{OFFLINE}` tells a setting that is wrong from a drafter that is weak",
        evidence,
    )


def _mixed(observed: Observed, measured: Acceptance, against: str) -> Finding:
    if observed.driven:
        why = f"{observed.foreign_requests:,} requests of others ran meanwhile"
        fix = "run it while nobody else uses the server"
    elif observed.temperature is None:
        why = "how the traffic is sampled is not known, and sampling lowers acceptance"
        fix = "say `--temperature 0` if it is greedy, or leave out --watch on a server at rest"
    else:
        why = f"the traffic is sampled at temperature {observed.temperature:g}, which lowers it"
        fix = "leave out --watch on a server at rest: the prompts of this program are greedy"
    return Finding(
        "diagnose-mixed-traffic",
        f"{measured.length.value:.2f} tokens a step, and the first draft is accepted in "
        f"{_range(measured.rates[0])} of steps, {against}; whether that is too low cannot be told: "
        f"{why}",
        fix,
        Evidence("/metrics", f"vllm:{PER_POSITION}_total", in_words(measured)),
    )


def _is_collapsed(first: Estimate, expected: Expected | None) -> bool:
    if expected is None:
        return first.below(COLLAPSED)
    should_be = expected.rates[0]
    if expected.same_text:
        return first.below(should_be * (1 - SAME_TEXT))
    # Of a drafter that is known to be weak, what is expected is no collapse.
    return first.below(min(max(COLLAPSED, FAR_BELOW * should_be), should_be * (1 - OTHER_TEXT)))


def _falls(measured: Acceptance, expected: Expected | None) -> int | None:
    """The first position after which drafts are accepted much less often than before it."""
    before = measured.conditional[0]
    should = None
    if expected is not None and expected.same_text:
        rates = (1.0, *expected.rates)
        should = [b / a if a else 0.0 for a, b in pairwise(rates)]
    for position, tried in enumerate(measured.conditional[1:], 1):
        if measured.counts.accepted[position - 1] < MIN_STEPS:
            return None
        if should is not None:
            if tried.below(should[position] * (1 - SAME_TEXT)):
                return position
        elif tried.below(FALLS * before.low):
            return position
        before = tried
    return None


def _recurrence(measured: Acceptance, position: int, evidence: Evidence) -> Finding:
    before, tried = measured.conditional[position - 1], measured.conditional[position]
    said = (
        f"draft {position} is accepted in {before.value:.0%} of the cases where it is tried, and "
        f"draft {position + 1} in {tried.value:.0%}"
    )
    if position == 1:
        return Finding(
            "diagnose-recurrence",
            f"{said}: the first is right, so what the drafter is fed is, too, and what it hands "
            "on to the next draft is not (norm_output, positions, its KV cache)",
            f"compare norm_output in the drafter's config.json with how it was trained; "
            f"`{OFFLINE}` tries both",
            evidence,
        )
    return Finding(
        "diagnose-trained-depth",
        f"{said}: a drafter falls so after the positions that it was trained for",
        f'use "num_speculative_tokens": {position}',
        evidence,
    )


def in_words(measured: Acceptance) -> str:
    """Acceptance by position in a line."""
    rates = ", ".join(f"{rate.value:.1%}" for rate in measured.rates)
    return f"{rates} of {measured.counts.drafts:,} steps"


def _range(rate: Estimate) -> str:
    return f"{rate.value:.0%} ({rate.low:.0%} to {rate.high:.0%})"


def _against(expected: Expected | None) -> str:
    if expected is None:
        return f"where {HEALTHY[0]:.0%} is usual"
    return f"where {expected.rates[0]:.0%} is expected ({expected.source})"
