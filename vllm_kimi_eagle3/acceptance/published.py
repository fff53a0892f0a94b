# SPDX-License-Identifier: Apache-2.0
"""The acceptance that was published for a drafter, or that nothing was.

The figures are in ``published.json``, each with who published it, on which engine, with how many
drafts and on what text. They were measured with other prompts than anybody's own: a drafter that is
a tenth below them may be right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from statistics import fmean, median
from typing import Any

from .model import geometric


@dataclass(frozen=True)
class Figure:
    """One published number.

    Attributes:
        text: what was generated, such as ``MT-Bench``.
        length: mean acceptance length.
        k: drafts a step.
        engine: and its release, as far as it was said.
        setting: the target, the GPUs, what else was said.
        source: where it was published, an address.
        as_published: the number as it stands there, if it is no acceptance length.
    """

    text: str
    length: float
    k: int
    engine: str
    setting: str
    source: str
    as_published: str = ""

    def rates(self, k: int) -> tuple[float, ...]:
        """For ``k`` positions, the rates that go with it, positions taken as equally hard."""
        return tuple(self.rates_of_own_k[0] ** i for i in range(1, k + 1))

    @property
    def rates_of_own_k(self) -> tuple[float, ...]:
        """The rates of its own positions."""
        return geometric(self.length, self.k)


@dataclass(frozen=True)
class Drafter:
    """A drafter and what was published of it.

    Attributes:
        name: its repository on Hugging Face.
        targets: what it was trained for.
        figures: may be none.
        note: what else to know before a number is compared with these.
    """

    name: str
    targets: tuple[str, ...]
    figures: tuple[Figure, ...]
    note: str = ""

    def rates(self, k: int, kinds: Iterable[str] = ()) -> tuple[float, ...] | None:
        """For ``k`` positions, the published rates; None if nothing was published.

        Args:
            kinds: of text, as :data:`KINDS` has them: the mean over those of which something was
                published, and without such the median of all.
        """
        if not self.figures:
            return None
        groups = [
            [figure for figure in self.figures if figure.text.startswith(KINDS[kind])]
            for kind in kinds
            if kind in KINDS
        ]
        groups = [group for group in groups if group] or [list(self.figures)]
        every = [[figure.rates(k) for figure in group] for group in groups]
        return tuple(fmean(median(rates[i] for rates in one) for one in every) for i in range(k))


KINDS = {
    "chat": ("MT-Bench",),
    "code": ("HumanEval", "LiveCodeBench", "SPEED-Bench coding", "coding"),
    "math": ("GSM8K", "MATH500", "AIME", "SPEED-Bench math"),
    "chinese": ("CEval",),
}
"""Kinds of text, and how the names of the benchmarks begin that have such."""

# A healthy head, as far as anybody published one by position.
HEALTHY = (0.76, 0.56, 0.43)
HEALTHY_SOURCE = "AMD's blog of 2026-07-13, MiniMax-M3 with an EAGLE-3.1 drafter, k = 3"
LOWEST_LENGTH = 2.05
"""The lowest acceptance length at k = 3 on any published card of a Kimi drafter (K2.7 on CEval)."""


@lru_cache(maxsize=1)
def drafters() -> tuple[Drafter, ...]:
    """Every drafter of ``published.json``."""
    text = resources.files(__package__).joinpath("published.json").read_text(encoding="utf-8")
    return tuple(_drafter(entry) for entry in json.loads(text)["drafters"])


def find(name: str) -> Drafter | None:
    """The drafter that a name or a folder means; None if it is not among those that are known.

    A folder is known by its last part: ``/models/kimi-k2.5-eagle3-mla``, or the folder of the
    Hugging Face cache, ``models--lightseekorg--kimi-k2.5-eagle3-mla``.
    """
    words = name.replace("\\", "/").lower().replace("--", "/")
    parts = [part for part in words.split("/") if part]
    for drafter in drafters():
        owner, _, repository = drafter.name.lower().partition("/")
        if repository not in parts:
            continue
        before = parts[parts.index(repository) - 1] if parts.index(repository) else owner
        # An owner of another drafter of that name is another one.
        if before == owner or before not in _owners():
            return drafter
    return None


def _owners() -> frozenset[str]:
    return frozenset(drafter.name.lower().partition("/")[0] for drafter in drafters())


def _drafter(entry: dict[str, Any]) -> Drafter:
    figures = [
        Figure(
            text=figure["text"],
            length=figure.get("length") or 1 + figure["rate"] * figure["k"],
            k=figure["k"],
            engine=figure["engine"],
            setting=figure["setting"],
            source=figure["source"],
            as_published="" if "length" in figure else f"{figure['rate']:.2%} of drafts",
        )
        for figure in _spread(entry.get("figures", []))
    ]
    return Drafter(entry["name"], tuple(entry["targets"]), tuple(figures), entry.get("note", ""))


def _spread(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One figure for each text of a row that has ``lengths``."""
    spread = []
    for row in rows:
        common = {key: value for key, value in row.items() if key not in ("lengths", "rates")}
        spread += [{**common, "text": t, "length": v} for t, v in row.get("lengths", {}).items()]
        spread += [{**common, "text": t, "rate": v} for t, v in row.get("rates", {}).items()]
    return spread
