# SPDX-License-Identifier: Apache-2.0
"""What to tell which vLLM: one number of drafts, or one for each size of the batch.

From 0.24 on vLLM takes a schedule, ``num_speculative_tokens_per_batch_size``: ranges of the number
of requests in a step, both ends included, with the drafts of each. vLLM checks it only in the
engine, after the models are loaded: the first range has to begin at 1, none may overlap, and beyond
the last one its number goes on. "num_speculative_tokens" is the most that any range can have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.version import Version

from vllm_kimi_eagle3.findings import Evidence, Finding
from vllm_kimi_eagle3.host import V2_RUNNER_SINCE, parse_version

from .model import Model

SCHEDULE_SINCE = Version("0.24.0")
# From here on vLLM itself drops a schedule under data parallelism.
_DATA_PARALLEL_SAFE = Version("0.26.0")
KEY = "num_speculative_tokens_per_batch_size"

# A change of the number of drafts is worth it from here on.
_WORTH = 0.02
_DRAFTER = "<drafter>"


@dataclass(frozen=True)
class Range:
    """Batches from ``first`` to ``last``, and their number of drafts."""

    first: int
    last: int
    k: int


def ranges(
    model: Model, rates: Sequence[float], context: float, most_k: int, most_batch: int
) -> list[Range]:
    """The best number of drafts of each batch, in as few ranges as lose no more than 2 %."""
    found: list[Range] = []
    for batch in range(1, most_batch + 1):
        gains = [model.gain(k, batch, context, rates) for k in range(most_k + 1)]
        top = max(gains)
        if found and gains[found[-1].k] >= top * (1 - _WORTH):
            found[-1] = Range(found[-1].first, batch, found[-1].k)
        else:
            # Fewer drafts where they are as good.
            k = next(k for k, gain in enumerate(gains) if gain >= top * (1 - _WORTH / 2))
            found.append(Range(batch, batch, k))
    return found


def static_k(
    model: Model,
    rates: Sequence[float],
    contexts: Sequence[float],
    batches: Sequence[int],
    most_k: int,
) -> int:
    """The one number of drafts that is best on the whole: by the product of its gains."""

    def product(k: int) -> float:
        result = 1.0
        for batch in batches:
            for context in contexts:
                result *= model.gain(k, batch, context, rates)
        return result

    products = [product(k) for k in range(most_k + 1)]
    root = 1 / (len(batches) * len(contexts))
    top = max(products) ** root
    return next(k for k, p in enumerate(products) if p**root >= top * (1 - _WORTH / 2))


def static_flag(k: int, drafter: str = "") -> str:
    """The flag for one number of drafts; "" for none."""
    if k == 0:
        return ""
    config = {"method": "eagle3", "model": drafter or _DRAFTER, "num_speculative_tokens": k}
    return f"--speculative-config '{_json(config)}'"


def schedule_flag(schedule: Sequence[Range], drafter: str = "") -> str:
    """The flag for a schedule, as vLLM takes it from 0.24 on; "" for one without drafts."""
    most = max(one.k for one in schedule)
    if most == 0:
        return ""
    config = {
        "method": "eagle3",
        "model": drafter or _DRAFTER,
        "num_speculative_tokens": most,
        KEY: [[one.first, one.last, one.k] for one in schedule],
    }
    return f"--speculative-config '{_json(config)}'"


def _json(config: object) -> str:
    # A quote in a path would end the shell's.
    return json.dumps(config).replace("'", "'\\''")


@dataclass(frozen=True)
class Release:
    """What matters here of a vLLM.

    Attributes:
        version: None if it is not known.
        runner: ``V1`` or ``V2``.
        data_parallel: ranks.
    """

    version: Version | None
    runner: str
    data_parallel: int = 1

    @classmethod
    def of(cls, release: str, runner: str = "", data_parallel: int = 1) -> Release:
        """From a version's text, which may be empty or that of a development build."""
        version = parse_version(release)
        base = None if version is None else Version(version.base_version)
        if not runner:
            runner = "V2" if base is not None and base >= V2_RUNNER_SINCE else "V1"
        return cls(base, runner, data_parallel)

    @property
    def takes_schedule(self) -> bool:
        """It takes one and keeps it."""
        known = self.version is not None and self.version >= SCHEDULE_SINCE
        return known and self.data_parallel == 1


def notes(release: Release, schedule: Sequence[Range]) -> Iterator[Finding]:
    """What is to be said of a schedule on a release."""
    if len(schedule) < 2 or max(one.k for one in schedule) == 0:
        return
    version = release.version
    said = "" if version is None else str(version)
    evidence = Evidence(key=KEY, release=said or None)
    if version is None:
        return
    if version < SCHEDULE_SINCE:
        yield Finding(
            "plan-no-schedule",
            f"the best number of drafts changes with the batch ({_in_words(schedule)}), and vLLM "
            f"{version} has one for all",
            'use the "num_speculative_tokens" above; `num_speculative_tokens_per_batch_size` came '
            "with 0.24",
            evidence,
        )
        return
    if release.data_parallel > 1:
        hangs = version < _DATA_PARALLEL_SAFE
        yield Finding(
            "plan-schedule-data-parallel",
            f"with {release.data_parallel} data-parallel ranks vLLM {version} "
            + ("takes a schedule and hangs" if hangs else "drops a schedule with one warning"),
            'use the "num_speculative_tokens" above and no schedule',
            evidence,
        )
        return
    if release.runner == "V1":
        yield Finding(
            "plan-schedule-piecewise",
            f"on the V1 runner of vLLM {version} a schedule makes the CUDA graphs piecewise, some "
            "50 us a layer and step more, which the plan does not count",
            "measure with the schedule and with the single number before you keep either"
            + (
                "; VLLM_USE_V2_MODEL_RUNNER=1 keeps the full graphs"
                if version >= _DATA_PARALLEL_SAFE
                else ""
            ),
            evidence,
        )


def _in_words(schedule: Sequence[Range]) -> str:
    return ", ".join(f"{one.k} up to {one.last}" for one in schedule)
