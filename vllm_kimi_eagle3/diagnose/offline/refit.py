# SPDX-License-Identifier: Apache-2.0
"""Whether a drafter's head is the one that it was trained with.

Nothing in a checkpoint says so, and the target's head is no better where the drafter had a good one
of its own. But a head that belongs reads all there is to read: a linear correction of what it is
given, fitted to some of the answers, brings nothing on the others. If it brings something, head and
layer were not trained together.

The correction is ``x + B x`` with a prior on B that expects a change of a fifth of x. B is fitted
by cross-entropy on one half of the answers and judged on the other, and the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
from torch import Tensor
from torch.nn import functional

from vllm_kimi_eagle3.acceptance.model import student

from .hypotheses import Reading
from .score import WINDOW, Drafter, Text, best_rows

# Of what the head is given, the part that the prior expects to be corrected.
_EXPECTED = 0.22
# Rows of the head besides the right ones that the fit sees at each place.
_RIVALS = 4
_STEPS, _HISTORY = 60, 4
_HEAD_ROWS = 16_384
# Places of which there are logits at a time.
_PLACES = 256

# Of the interval that must not reach down to nothing.
_LEVEL = 0.999
# The share of the drafts that counts: a healthy drafter on text that it was not trained on gains up
# to 0.01, and up to 0.022 where hardly a draft is right (docs/diagnose.md).
_LEAST_GAIN, _LEAST_GAIN_WHERE_FEW = 0.02, 0.04
_FEW = 0.35

MIN_PLACES = 1500
"""With fewer places a fit shows nothing."""


@dataclass(frozen=True)
class Refit:
    """First drafts that are right, with the head as it is and with what it is given corrected.

    Attributes:
        places: how many first drafts.
        as_is, fitted: for each window of the answers, how many of them are right.
    """

    places: int
    as_is: tuple[int, ...]
    fitted: tuple[int, ...]

    @property
    def rates(self) -> tuple[float, float]:
        """Both as shares."""
        return sum(self.as_is) / self.places, sum(self.fitted) / self.places

    @property
    def significant(self) -> bool:
        """The correction certainly brings something, and more than another kind of text does."""
        gains = [after - before for before, after in zip(self.as_is, self.fitted, strict=True)]
        least = _LEAST_GAIN_WHERE_FEW if self.rates[0] < _FEW else _LEAST_GAIN
        if len(gains) < 2 or sum(gains) < least * self.places:
            return False
        error = stdev(gains) / math.sqrt(len(gains))
        return fmean(gains) > student(len(gains) - 1, _LEVEL) * error


def refit(drafter: Drafter, reading: Reading, texts: Sequence[Text], k: int) -> Refit | None:
    """Fits and judges; None where the answers are too few for it.

    Raises:
        CheckpointError: a file cannot be read.
    """
    if sum(len(text.places(k)) for text in texts) < MIN_PLACES:
        return None
    head, tokens = drafter.head(reading.head), drafter.targets(reading).to("cpu")
    rows = {int(token): row for row, token in enumerate(tokens)}
    given = [drafter.for_head(reading, text, k) for text in texts]
    as_is: dict[int, list[int]] = {}
    fitted: dict[int, list[int]] = {}
    for half in (0, 1):
        others = [pair for index, pair in enumerate(given) if index % 2 != half]
        correction = _fitted(head, others, rows)
        for index in range(half, len(given), 2):
            normed, wanted = given[index]
            for found, read in ((as_is, normed), (fitted, normed + normed @ correction)):
                right = tokens[best_rows(head, read).cpu()] == wanted.cpu()
                found[index] = [int(part.sum()) for part in right.split(WINDOW)]
    order = range(len(given))
    return Refit(
        sum(len(wanted) for _, wanted in given),
        tuple(n for index in order for n in as_is[index]),
        tuple(n for index in order for n in fitted[index]),
    )


def _nearest(head: Tensor, inputs: Tensor) -> Tensor:
    """The rows of the head with the highest scores at each place, ``[places, _RIVALS]``."""
    return torch.cat([_nearest_of(head, part) for part in inputs.split(_PLACES)])


def _nearest_of(head: Tensor, inputs: Tensor) -> Tensor:
    parts = []
    for begin in range(0, len(head), _HEAD_ROWS):
        scores = inputs @ head[begin : begin + _HEAD_ROWS].float().t()
        parts.append(scores.topk(min(_RIVALS, scores.shape[-1]), dim=-1))
    values = torch.cat([part.values for part in parts], dim=-1)
    rows = [part.indices + index * _HEAD_ROWS for index, part in enumerate(parts)]
    best = values.topk(min(_RIVALS, values.shape[-1]), dim=-1).indices
    return torch.cat(rows, dim=-1).gather(-1, best)


def _fitted(head: Tensor, given: Sequence[tuple[Tensor, Tensor]], rows: dict[int, int]) -> Tensor:
    """B, ``[H, H]``, for rows of inputs on its left."""
    inputs = torch.cat([normed for normed, _ in given])
    right = torch.cat([wanted for _, wanted in given]).tolist()
    known = [place for place, token in enumerate(right) if token in rows]
    inputs = inputs[known]
    wanted = torch.tensor([rows[right[place]] for place in known], device=inputs.device)
    # Not the whole head: the right rows and those that come near them.
    used = torch.unique(torch.cat([wanted, _nearest(head, inputs).flatten()]))
    labels = torch.searchsorted(used, wanted)
    size = inputs.square().mean().sqrt()
    inputs, weights = inputs.div_(size), head[used].float().mul_(size)
    count, width = inputs.shape
    penalty = width / (2 * count * _EXPECTED**2)
    correction = torch.zeros(width, width, device=inputs.device, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [correction], max_iter=_STEPS, history_size=_HISTORY, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        whole = penalty * correction.square().sum()
        whole.backward()
        # In parts, since the logits are wide.
        for read, right in zip(inputs.split(_PLACES), labels.split(_PLACES), strict=True):
            logits = (read + read @ correction) @ weights.t()
            value = functional.cross_entropy(logits, right, reduction="sum") / count
            value.backward()
            whole = whole + value.detach()
        return whole.detach()

    with torch.enable_grad():
        optimizer.step(loss)
    return correction.detach()
