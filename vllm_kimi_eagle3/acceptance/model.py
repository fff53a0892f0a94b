# SPDX-License-Identifier: Apache-2.0
"""Accepted drafts per position: rates, intervals, acceptance length.

vLLM counts steps that verified drafts (*drafts*) and, for each position, in how many of them the
draft there was accepted. A draft counts only if all before it were accepted, so these rates fall
from position to position; of the drafts that were *tried* at a position, the conditional rate is
the part that was accepted. The mean acceptance length is 1 + the sum of the rates: the accepted
drafts of a step and the token that the target adds.

Steps of one text resemble each other, so the counts scatter more than independent draws would. The
intervals are Wilson's with the number of steps divided by the design effect, which is estimated
from the texts (W. G. Cochran, Sampling Techniques, 1977, chapter 9: a ratio of cluster totals).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

LEVEL = 0.95
"""Of the intervals, two-sided."""

# With fewer texts than this the scatter between them says little, and this is taken instead: what
# the tiny pair's prompts and the published prompt sets show is 1 to 3.
MIN_GROUPS = 4
ASSUMED_DESIGN_EFFECT = 2.0


@dataclass(frozen=True)
class Counts:
    """What was counted of some steps.

    Attributes:
        drafts: steps that verified drafts.
        accepted: for each position, in how many steps the draft there was accepted.
        draft_tokens: drafts that were verified, all positions together; ``drafts`` times their
            number if every step had as many.

    Raises:
        ValueError: a count is negative, more was accepted than drafted, or a later position was
            accepted more often than one before it.
    """

    drafts: int
    accepted: tuple[int, ...]
    draft_tokens: int = -1

    def __post_init__(self) -> None:
        if self.draft_tokens == -1:
            object.__setattr__(self, "draft_tokens", self.drafts * len(self.accepted))
        if min((self.drafts, self.draft_tokens, *self.accepted)) < 0:
            raise ValueError("a count is negative")
        before = self.drafts
        for position, count in enumerate(self.accepted):
            if count > before:
                what = "drafts" if position == 0 else f"accepted drafts at position {position - 1}"
                raise ValueError(
                    f"{count:,} accepted drafts at position {position}, and only {before:,} {what}"
                )
            before = count
        if sum(self.accepted) > self.draft_tokens:
            raise ValueError(
                f"{sum(self.accepted):,} accepted drafts of only {self.draft_tokens:,}"
            )

    @classmethod
    def none(cls, positions: int) -> Counts:
        """Nothing counted, for so many positions."""
        return cls(0, (0,) * positions)

    @property
    def positions(self) -> int:
        """How many drafts a step can have."""
        return len(self.accepted)

    @property
    def rates(self) -> tuple[float, ...]:
        """For each position, the part of the steps that accepted the draft there."""
        return tuple(count / self.drafts if self.drafts else 0.0 for count in self.accepted)

    @property
    def conditional(self) -> tuple[float, ...]:
        """For each position, the part of the drafts tried there that was accepted; 0 if none was
        tried."""
        tried = (self.drafts, *self.accepted)
        return tuple(a / t if t else 0.0 for a, t in zip(self.accepted, tried, strict=False))

    @property
    def length(self) -> float:
        """Mean acceptance length: tokens that a step with drafts yields."""
        return 1.0 + sum(self.rates)

    @property
    def rate(self) -> float:
        """The part of all drafts that was accepted."""
        return sum(self.accepted) / self.draft_tokens if self.draft_tokens else 0.0

    def __add__(self, other: Counts) -> Counts:
        wide, narrow = (self, other) if self.positions >= other.positions else (other, self)
        padded = narrow.accepted + (0,) * (wide.positions - narrow.positions)
        return Counts(
            self.drafts + other.drafts,
            tuple(a + b for a, b in zip(wide.accepted, padded, strict=True)),
            self.draft_tokens + other.draft_tokens,
        )


def total(groups: Iterable[Counts]) -> Counts:
    """The sum of some counts."""
    counts = Counts.none(0)
    for group in groups:
        counts += group
    return counts


@dataclass(frozen=True)
class Estimate:
    """A number that was measured, and the 95 % interval around it."""

    value: float
    low: float
    high: float

    def below(self, bound: float) -> bool:
        """Certainly below a bound."""
        return self.high < bound

    def above(self, bound: float) -> bool:
        """Certainly above a bound."""
        return self.low > bound


def wilson(successes: float, trials: float, z: float | None = None) -> Estimate:
    """A share and its Wilson interval (E. B. Wilson, JASA 22, 1927).

    Args:
        successes, trials: need not be whole, since trials may be divided by a design effect.
        z: half-width in standard deviations; of :data:`LEVEL` if not given.
    """
    if trials <= 0:
        return Estimate(0.0, 0.0, 1.0)
    z = NormalDist().inv_cdf((1 + LEVEL) / 2) if z is None else z
    share = min(max(successes / trials, 0.0), 1.0)
    spread = z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return Estimate(share, min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half)))


def student(freedom: int, level: float = LEVEL) -> float:
    """Student's t: the two-sided quantile (G. W. Hill's expansion, 1970), within 1 % from 3 on."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    if freedom <= 0:
        return z
    n = float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def design_effect(hits: Sequence[int], trials: Sequence[int]) -> float:
    """By how much more a share scatters between groups than independent draws would, at least 1.

    Args:
        hits, trials: of each group, such as a text.
    """
    groups = [(h, t) for h, t in zip(hits, trials, strict=True) if t > 0]
    n = sum(t for _, t in groups)
    if len(groups) < MIN_GROUPS:
        return ASSUMED_DESIGN_EFFECT
    share = sum(h for h, _ in groups) / n
    if share in (0.0, 1.0):
        return 1.0
    count = len(groups)
    variance = count / (count - 1) * sum((h - share * t) ** 2 for h, t in groups) / n**2
    return max(1.0, variance / (share * (1 - share) / n))


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of some texts.

    Attributes:
        counts: of all of them.
        rates: for each position, the part of the steps that accepted the draft there.
        conditional: for each position, the part of the drafts tried there that was accepted.
        length: mean acceptance length.
        effects: the design effect of each of ``rates``.
        groups: how many texts, or slices of time, the scatter was taken from.
    """

    counts: Counts
    rates: tuple[Estimate, ...]
    conditional: tuple[Estimate, ...]
    length: Estimate
    effects: tuple[float, ...]
    groups: int


def acceptance(groups: Sequence[Counts]) -> Acceptance:
    """Acceptance with intervals, from the counts of each text or slice of time."""
    groups = [group for group in groups if group.drafts > 0]
    counts = total(groups)
    k = counts.positions
    filled = [group + Counts.none(k) for group in groups]
    quantile = student(len(groups) - 1) if len(groups) >= MIN_GROUPS else student(0)
    drafts = [group.drafts for group in filled]
    rates, conditional, effects = [], [], []
    tried_before = drafts
    for position in range(k):
        hits = [group.accepted[position] for group in filled]
        effect = design_effect(hits, drafts)
        effects.append(effect)
        rates.append(wilson(sum(hits) / effect, counts.drafts / effect, quantile))
        own = design_effect(hits, tried_before)
        conditional.append(wilson(sum(hits) / own, sum(tried_before) / own, quantile))
        tried_before = hits
    lengths = [group.drafts + sum(group.accepted) for group in filled]
    half = quantile * _length_error(counts, lengths, drafts)
    value = counts.length
    low, high = max(1.0, value - half), min(k + 1.0, value + half)
    if half == 0:  # All or none were accepted: nothing scatters, and that is no certainty.
        low = 1 + sum(rate.low for rate in rates)
        high = 1 + sum(rate.high for rate in rates)
    length = Estimate(value, min(low, value), max(high, value))
    return Acceptance(counts, tuple(rates), tuple(conditional), length, tuple(effects), len(groups))


def predicted(groups: Sequence[Counts], drafts: int) -> tuple[Estimate, ...]:
    """For each position, the rate to expect of ``drafts`` steps of other texts of the same kind.

    Wider than the interval of the measurement, since what it is compared with scatters, too: the
    variances of both add up.
    """
    measured = acceptance(groups)
    if drafts <= 0 or measured.counts.drafts == 0:
        return tuple(Estimate(rate.value, 0.0, 1.0) for rate in measured.rates)
    quantile = student(measured.groups - 1) if measured.groups >= MIN_GROUPS else student(0)
    both = 1 / (1 / measured.counts.drafts + 1 / drafts)
    return tuple(
        wilson(rate.value * both / effect, both / effect, quantile)
        for rate, effect in zip(measured.rates, measured.effects, strict=True)
    )


def _length_error(counts: Counts, lengths: Sequence[int], drafts: Sequence[int]) -> float:
    """The standard error of the acceptance length."""
    n = counts.drafts
    if n == 0:
        return counts.positions + 1.0
    mean = counts.length
    count = len(drafts)
    # Of independent steps, from how many accepted just so many drafts.
    cumulative = (n, *counts.accepted, 0)
    exact = [a - b for a, b in pairwise(cumulative)]
    independent = sum(e * (1 + j - mean) ** 2 for j, e in enumerate(exact)) / n**2
    if count < MIN_GROUPS:
        return math.sqrt(ASSUMED_DESIGN_EFFECT * independent)
    scatter = sum((length - mean * d) ** 2 for length, d in zip(lengths, drafts, strict=True))
    return math.sqrt(max(independent, count / (count - 1) * scatter / n**2))


# ----------------------------------------------------------------------- from a length to positions


def geometric(length: float, k: int) -> tuple[float, ...]:
    """The rates of ``k`` positions that give an acceptance length, if each draft that is tried is
    accepted as often as any other.

    76, 56 and 43 %, published of a healthy head, are 76, 58 and 45 % by it.

    Raises:
        ValueError: no ``k`` drafts give that length.
    """
    if not (k >= 1 and 1.0 <= length <= k + 1.0):
        raise ValueError(f"{k} drafts a step give an acceptance length of 1 to {k + 1}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if 1 + sum(middle**i for i in range(1, k + 1)) < length:
            low = middle
        else:
            high = middle
    return tuple(high**i for i in range(1, k + 1))


def extended(rates: Sequence[float], k: int) -> tuple[float, ...]:
    """The rates of the first ``k`` positions, from those of some.

    Positions beyond those given are taken to go on as the last one did: of the drafts tried, as
    many are accepted. That is the most that can be hoped for: a drafter that was trained for three
    positions falls steeply after the third.
    """
    known = list(rates[:k])
    if not known:
        return (0.0,) * k
    last = known[-1] / known[-2] if len(known) > 1 and known[-2] else known[-1]
    while len(known) < k:
        known.append(known[-1] * min(1.0, last))
    return tuple(known)


def length_for(rates: Sequence[float], k: int) -> float:
    """The acceptance length with ``k`` drafts a step."""
    return 1.0 + sum(extended(rates, k))
