# SPDX-License-Identifier: Apache-2.0
"""The time of a decode step, and what drafts bring: a model with ten numbers, fitted to steps.

A step of ``B`` requests with ``L`` tokens of context and ``q = k + 1`` tokens each takes

    F (1 + E (1 - exp(-Bq / tau)) + P Bq + L (c1 + c2 B (1 + rho (q - 1))) + [k > 0] (D0 + D1 k))

F: launches, all-reduces and the weights that every step reads. E and tau: the routed experts, of
which ``Bq`` tokens choose some and soon all. P: arithmetic. c1 and c2: reading the KV cache, a part
that a small batch cannot fill a GPU with and a part that grows with it; rho: how much of it is read
again for each further token of a request. D0, D1: drafting.

What the measured steps leave open is filled by what is usual (:data:`USUAL`), so that two rows
already give an answer, with an interval as wide as it has to be. docs/plan.md has the errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_kimi_eagle3.acceptance.model import Estimate, length_for

MAX_K = 8
MAX_BATCH = 1024

# Centre and spread (of the logarithm) of each number before anything is measured. The first is set
# from the rows, since how fast a GPU is they say themselves. docs/plan.md: where each is from.
USUAL: dict[str, tuple[float, float]] = {
    "F": (math.nan, 1.5),
    "E": (3.0, 0.7),
    "tau": (16.0, 0.7),
    "P": (0.03, 0.5),
    "c1": (3e-6, 1.0),
    "c2": (3e-6, 1.0),
    "rho": (0.5, 0.8),
    "D0": (0.16, 0.6),
    "D1": (0.08, 0.6),
}
_NAMES = (*USUAL, "length")
_LENGTH = len(_NAMES) - 1
# Of a measured step, by which it differs from the next one of its kind.
NOISE = 0.04
# Rows from which on the noise is taken from them, and not as above.
_ENOUGH = 20
_Z = 1.96


@dataclass(frozen=True)
class Step:
    """What was measured of steps of one kind.

    Attributes:
        k: drafts a step; 0 without speculation.
        batch: requests at once.
        context: tokens in the KV cache, of one request.
        seconds: of a step.
        length: the acceptance length that the seconds were reckoned with, if what was measured is
            tokens a second; 0 if the step itself was timed.
    """

    k: int
    batch: int
    context: float
    seconds: float
    length: float = 0.0

    @classmethod
    def of_rate(
        cls, k: int, batch: int, context: float, tokens_per_second: float, length: float
    ) -> Step:
        """From the tokens a second of all requests together."""
        length = length if k else 1.0
        seconds = length * batch / tokens_per_second
        return cls(k, batch, context, seconds, length if k else 0.0)


@dataclass(frozen=True)
class Model:
    """A fitted model.

    Attributes:
        numbers: logarithms, in the order of ``USUAL``, then that of the factor by which acceptance
            lengths were off.
        covariance: of these.
        noise: by how much rows differ from the model, relatively.
        rows: to which it was fitted.
    """

    numbers: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    noise: float
    rows: tuple[Step, ...]

    @cached_property
    def misfit(self) -> list[float]:
        """By how much it is off for the rows that it was fitted to, relatively."""
        return [abs(math.expm1(_off(self.numbers, row))) for row in self.rows]

    @cached_property
    def named(self) -> dict[str, float]:
        """The numbers by name: F in seconds, tau in tokens, c1 and c2 per token of context."""
        return {n: math.exp(v) for n, v in zip(_NAMES, self.numbers, strict=True)}

    def seconds(self, k: int, batch: float, context: float) -> float:
        """Seconds of a step."""
        return _seconds([math.exp(v) for v in self.numbers], k, batch, context)

    def speed_up(self, k: int, batch: float, context: float, rates: Sequence[float]) -> Estimate:
        """Tokens a second with ``k`` drafts, over those without.

        Args:
            rates: accepted by position, as measured; see :func:`extended`.
        """
        if k == 0:
            return Estimate(1.0, 1.0, 1.0)
        length = length_for(rates, k)

        def logarithm(numbers: Sequence[float]) -> float:
            p = [math.exp(v) for v in numbers]
            most = min(k + 1.0, length * p[_LENGTH])
            gain = most * _seconds(p, 0, batch, context) / _seconds(p, k, batch, context)
            return math.log(gain)

        value = logarithm(self.numbers)
        gradient = _gradient(lambda n: [logarithm(n)], list(self.numbers))
        slope = [row[0] for row in gradient]
        n = range(len(slope))
        variance = sum(slope[i] * self.covariance[i][j] * slope[j] for i in n for j in n)
        half = _Z * math.sqrt(max(0.0, variance))
        return Estimate(math.exp(value), math.exp(value - half), math.exp(value + half))

    def break_even(
        self, k: int, context: float, rates: Sequence[float], most: int = MAX_BATCH
    ) -> int | None:
        """The smallest batch from which on ``k`` drafts lose, up to ``most``; None if they win
        there."""
        loses = None
        for batch in range(most, 0, -1):
            if self.gain(k, batch, context, rates) >= 1:
                break
            loses = batch
        return loses

    def gain(self, k: int, batch: float, context: float, rates: Sequence[float]) -> float:
        """As :meth:`speed_up`, without the interval."""
        if k == 0:
            return 1.0
        p = [math.exp(v) for v in self.numbers]
        length = min(k + 1.0, length_for(rates, k) * p[_LENGTH])
        return length * _seconds(p, 0, batch, context) / _seconds(p, k, batch, context)


def fit(
    rows: Iterable[Step],
    *,
    length_spread: float = 0.05,
    usual: dict[str, tuple[float, float]] = USUAL,
) -> Model:
    """Fits the model to measured steps, with what is usual as a prior (Levenberg-Marquardt).

    Args:
        rows: any number of them, and of any kinds.
        length_spread: by how much the acceptance lengths of ``Step.length`` may be off,
            relatively; it matters where tokens a second were measured instead of steps.

    Raises:
        ValueError: there is no row, or one has a size or time that cannot be.
    """
    measured = tuple(rows)
    if not measured:
        raise ValueError("there is no measured step")
    for row in measured:
        sizes = row.batch >= 1 and row.context >= 0 and 0 <= row.k <= 64
        if not (sizes and 1e-9 < row.seconds < 1e9):
            raise ValueError(f"a step of {row} cannot be")
    centres = [math.log(centre) for centre, _ in usual.values()] + [0.0]
    centres[0] = math.log(min(row.seconds for row in measured) * 0.8)
    spreads = [spread for _, spread in usual.values()] + [length_spread]
    noise = NOISE
    numbers = list(centres)
    for _ in range(3):
        numbers = _minimum(measured, numbers, centres, spreads, noise)
        off = [_off(numbers, row) for row in measured]
        if len(off) < _ENOUGH:
            break
        found = max(NOISE, math.sqrt(sum(o * o for o in off) / (len(off) - len(numbers))))
        if abs(found - noise) < 0.05 * noise:
            break
        noise = found
    residuals = _residuals(measured, centres, spreads, noise)
    jacobian = _gradient(residuals, numbers)
    n = len(numbers)
    hessian = [
        [sum(a * b for a, b in zip(jacobian[i], jacobian[j], strict=True)) for j in range(n)]
        for i in range(n)
    ]
    columns = [_solve(hessian, [1.0 if i == j else 0.0 for i in range(n)]) for j in range(n)]
    return Model(tuple(numbers), tuple(map(tuple, columns)), noise, measured)


def held_out(
    rows: Sequence[Step], folds: int = 8, length_spread: float = 0.05
) -> list[tuple[Step, float]]:
    """For each row, the seconds that a model says that was fitted to rows without it.

    Rows of one cell (batch and context) are held out together.
    """
    cells = sorted({(row.batch, row.context) for row in rows})
    folds = min(folds, len(cells))
    found = []
    for fold in range(folds):
        out = set(cells[fold::folds])
        rest = [row for row in rows if (row.batch, row.context) not in out]
        if not rest:
            continue
        model = fit(rest, length_spread=length_spread)
        for row in rows:
            if (row.batch, row.context) in out:
                said = model.seconds(row.k, row.batch, row.context)
                if row.length:
                    said /= model.named["length"]
                found.append((row, said))
    return found


# ------------------------------------------------------------------------------------- the fitting


def _seconds(p: Sequence[float], k: int, batch: float, context: float) -> float:
    fixed, experts, tau, compute, alone, together, again, drafting, each, _ = p
    tokens = batch * (k + 1)
    cache = context * (alone + together * batch * (1 + again * k))
    step = 1 + experts * -math.expm1(-tokens / tau) + compute * tokens + cache
    return fixed * (step + (drafting + each * k if k else 0.0))


def _off(numbers: Sequence[float], row: Step) -> float:
    """By how much the model is off for a row: the logarithm of said over measured."""
    p = [math.exp(v) for v in numbers]
    said = _seconds(p, row.k, row.batch, row.context)
    if row.length:
        said /= p[_LENGTH]
    return math.log(said / row.seconds)


_Residuals = Callable[[Sequence[float]], list[float]]


def _residuals(
    rows: Sequence[Step], centres: Sequence[float], spreads: Sequence[float], noise: float
) -> _Residuals:
    def residuals(numbers: Sequence[float]) -> list[float]:
        usual = [(v - c) / s for v, c, s in zip(numbers, centres, spreads, strict=True)]
        return [_off(numbers, row) / noise for row in rows] + usual

    return residuals


def _gradient(function: _Residuals, numbers: Sequence[float]) -> list[list[float]]:
    """By each number, the change of each result."""
    step = 1e-5
    here = function(numbers)
    rows = []
    for j in range(len(numbers)):
        moved = [*numbers]
        moved[j] += step
        rows.append([(b - a) / step for a, b in zip(here, function(moved), strict=True)])
    return rows


def _minimum(
    rows: Sequence[Step],
    start: Sequence[float],
    centres: Sequence[float],
    spreads: Sequence[float],
    noise: float,
) -> list[float]:
    residuals = _residuals(rows, centres, spreads, noise)
    numbers = list(start)
    here = residuals(numbers)
    cost = sum(r * r for r in here)
    damping, n = 1.0, len(numbers)
    for _ in range(100):
        jacobian = _gradient(residuals, numbers)
        hessian = [
            [sum(a * b for a, b in zip(jacobian[i], jacobian[j], strict=True)) for j in range(n)]
            for i in range(n)
        ]
        downhill = [-sum(a * b for a, b in zip(jacobian[i], here, strict=True)) for i in range(n)]
        for _ in range(12):
            damped = [
                [h + (damping * (hessian[i][i] + 1e-9) if i == j else 0.0) for j, h in enumerate(r)]
                for i, r in enumerate(hessian)
            ]
            # Never by more than a factor of e at once.
            moved = [
                v + max(-1.0, min(1.0, d))
                for v, d in zip(numbers, _solve(damped, downhill), strict=True)
            ]
            there = residuals(moved)
            new = sum(r * r for r in there)
            if new < cost:
                break
            damping *= 4
        else:
            break
        gained = cost - new
        numbers, here, cost = moved, there, new
        damping = max(damping / 4, 1e-7)
        if gained < 1e-7 * cost:
            break
    return numbers


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Gauss with pivots."""
    n = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, n):
            factor = rows[r][i] / rows[i][i]
            for c in range(i, n + 1):
                rows[r][c] -= factor * rows[i][c]
    solved = [0.0] * n
    for i in reversed(range(n)):
        known = sum(rows[i][c] * solved[c] for c in range(i + 1, n))
        solved[i] = (rows[i][n] - known) / rows[i][i]
    return solved
