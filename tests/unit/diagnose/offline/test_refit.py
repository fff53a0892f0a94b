# SPDX-License-Identifier: Apache-2.0
"""A head that belongs leaves nothing to correct; another one does. On made-up hidden states: the
tiny drafters' are in tests/hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_kimi_eagle3.checkpoint.rope import Rope
from vllm_kimi_eagle3.diagnose.offline.hypotheses import Reading
from vllm_kimi_eagle3.diagnose.offline.refit import MIN_PLACES, Refit, refit
from vllm_kimi_eagle3.diagnose.offline.score import Text

WIDTH, ROWS, K = 24, 60, 3
READING = Reading(aux=(2, 4, 5), rope=Rope(50_000.0))


class Made:
    """A drafter whose head knows the right token where the noise lets it."""

    def __init__(self, turned: float, noise: float) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self._right = normal(ROWS, WIDTH)
        self._head = self._right @ (torch.eye(WIDTH) + turned * normal(WIDTH, WIDTH))
        self._noise, self._normal = noise, normal

    def head(self, owner: str) -> Tensor:
        return self._head

    def targets(self, reading: Reading) -> Tensor:
        return torch.arange(ROWS) * 2  # Rows stand for other tokens.

    def for_head(self, reading: Reading, text: Text, k: int) -> tuple[Tensor, Tensor]:
        count = len(text.places(k))
        given = self._normal(count, WIDTH)
        scores = given @ self._right.t() + self._noise * self._normal(count, ROWS)
        return given, 2 * scores.argmax(dim=-1)


def texts(places: int) -> list[Text]:
    return [Text((0,) * (100 + 8 + K), 8, Path("nowhere"))] * (places // 100)


@pytest.mark.parametrize("noise", [0.5, 4.0])
def test_a_head_that_belongs(noise: float) -> None:
    made: Any = Made(turned=0.0, noise=noise)
    found = refit(made, READING, texts(3000), K)
    assert found is not None
    assert found.places == 3000
    assert not found.significant


@pytest.mark.parametrize("noise", [0.5, 4.0])
def test_a_head_of_another_drafter(noise: float) -> None:
    made: Any = Made(turned=0.1, noise=noise)
    found = refit(made, READING, texts(3000), K)
    assert found is not None
    before, after = found.rates
    assert after > before
    assert found.significant


def test_too_few_drafts_show_nothing() -> None:
    made: Any = Made(turned=0.1, noise=0.5)
    assert refit(made, READING, texts(MIN_PLACES - 100), K) is None


@pytest.mark.parametrize(
    ("right", "corrected", "significant"),
    [(16, 17, True), (16, 16, False), (5, 6, False), (5, 7, True)],
)
def test_what_another_kind_of_text_gains_does_not_count(
    right: int, corrected: int, significant: bool
) -> None:
    """One of 32 where half of the drafts are right, and two where few are."""
    windows = 100
    noise = [(-1) ** index for index in range(windows)]
    fitted = tuple(corrected + change for change in noise)
    found = Refit(32 * windows, (right,) * windows, fitted)
    assert found.significant == significant
