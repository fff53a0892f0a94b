# SPDX-License-Identifier: Apache-2.0
"""Measured steps from files: rows of this project's benchmarks, or a table of one's own.

JSON lines as ``benchmarks/step_time.py`` writes them, or CSV with the columns ``k``, ``batch``,
``context`` and one of ``step_ms`` and ``tokens_per_second`` (of all requests together). Any other
column says of which configuration a row is; a plan is made for one.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model import Step

# Of a row of step_time.py, what tells one configuration from another.
_CONFIGURATION = ("gpu", "vllm", "layers", "ours", "drafter", "backend", "kv", "p2p")
# Whose drafting loop it was: vLLM's in rows that do not say it, nobody's where nothing is drafted.
_LOOP = "plugin_drafting"
# Tensor-parallel ranks; rows that do not say it are of one.
_RANKS = "tp"
_MEASURED = ("k", "batch", "context", "ctx", "step_ms", "tokens_per_second")
_MAX_BYTES = 256 << 20
_MAX_ROWS = 4096
# What a step takes in seconds, and a server generates in tokens a second, lies within these.
_SECONDS, _RATES = (1e-6, 1e4), (1e-4, 1e9)


@dataclass(frozen=True)
class Row:
    """A measured step, before it is known what it was reckoned with.

    Attributes:
        k, batch, context: as of :class:`Step`.
        seconds: of a step; 0 if tokens a second were measured.
        rate: tokens a second of all requests; 0 if a step was.
        of: the configuration, by column.
    """

    k: int
    batch: int
    context: float
    seconds: float
    rate: float
    of: tuple[tuple[str, str], ...]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; lines of something else are skipped.

    Raises:
        ValueError: it cannot be read or has no row; the message says why.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"--rows {path} is larger than {_MAX_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"--rows {path} cannot be read: {error.strerror}") from None
    except UnicodeError:
        raise ValueError(f"--rows {path} is no UTF-8 text") from None
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if lines and lines[0].lstrip().startswith("{"):
        rows = [row for line in lines if (row := _from_json(line)) is not None]
    else:
        rows = _from_csv(lines, path)
    if not rows:
        raise ValueError(
            f"--rows {path} has no measured step: JSON lines of benchmarks/step_time.py, or CSV "
            "with the columns k, batch, context and step_ms or tokens_per_second"
        )
    return rows


def _from_json(line: str) -> Row | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    step = found.get("step")
    milliseconds = step.get("median") if isinstance(step, dict) else found.get("step_ms")
    context = found.get("ctx", found.get("context"))
    numbers = _numbers(found.get("k"), found.get("batch"), context)
    value = _within(milliseconds, _SECONDS, 1e-3)
    rate = _within(found.get("tokens_per_second"), _RATES)
    if numbers is None or not (value or rate):
        return None
    known = [name for name in _CONFIGURATION if name in found] or [
        name for name in found if name not in _MEASURED and isinstance(found[name], (str, int))
    ]
    of = [(name, str(found[name])) for name in known if name not in (_LOOP, _RANKS)]
    if "ours" in found or _RANKS in found:
        of.append((_RANKS, str(found.get(_RANKS, 1))))
    if "ours" in found and numbers[0]:
        of.append((_LOOP, str(found.get(_LOOP, "off"))))
    return Row(*numbers, value, rate, tuple(of))


def _from_csv(lines: Sequence[str], path: Path) -> list[Row]:
    rows = []
    try:
        table = list(csv.DictReader(lines, skipinitialspace=True))
    except csv.Error as error:
        raise ValueError(f"--rows {path} is no CSV: {error}") from None
    for number, entry in enumerate(table, 2):
        numbers = _numbers(
            _number(entry.get("k")),
            _number(entry.get("batch")),
            _number(entry.get("context") or entry.get("ctx")),
        )
        value = _within(_number(entry.get("step_ms")), _SECONDS, 1e-3)
        rate = _within(_number(entry.get("tokens_per_second")), _RATES)
        if numbers is None or not (value or rate):
            raise ValueError(
                f"--rows {path}: row {number} has no k, batch and context with step_ms or "
                "tokens_per_second"
            )
        of = tuple((n, v) for n, v in entry.items() if n not in _MEASURED and isinstance(v, str))
        rows.append(Row(*numbers, value, rate, of))
    return rows


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def _numbers(k: Any, batch: Any, context: Any) -> tuple[int, int, float] | None:
    every = (k, batch, context)
    if any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in every):
        return None
    # Compared first: whole numbers of JSON may be larger than any float.
    if not (0 <= k <= 64 and 1 <= batch <= 1e6 and 0 <= context <= 1e9) or k % 1 or batch % 1:
        return None
    return int(k), int(batch), float(context)


def _within(value: Any, bounds: tuple[float, float], unit: float = 1.0) -> float:
    """A measured number; 0 if it is none, or cannot be."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return 0.0
    low, high = bounds
    return value * unit if low / unit <= value <= high / unit else 0.0


def choose(rows: Sequence[Row], where: Mapping[str, str]) -> list[Row]:
    """The rows of one configuration; a row without a column is of each value of it.

    Args:
        where: columns and the values that they must have.

    Raises:
        ValueError: none is left, or rows of several configurations are; the message lists what
            tells them apart.
    """
    columns = {name for row in rows for name, _ in row.of}
    if unknown := sorted(set(where) - columns):
        said = ", ".join(sorted(columns)) or "none"
        raise ValueError(
            f"--where {unknown[0]}=...: the rows have no such column; they have {said}"
        )
    left = [row for row in rows if all(dict(row.of).get(n, v) == v for n, v in where.items())]
    values: dict[str, dict[str, None]] = {}
    for row in left or rows:
        for name, value in row.of:
            values.setdefault(name, {})[value] = None
    differing = {name: list(found) for name, found in values.items() if len(found) > 1}
    said = "; ".join(f"{name} {', '.join(found)}" for name, found in differing.items())
    if not left:
        raise ValueError(f"no row is left by --where; the rows have {said or 'other values'}")
    if differing:
        name, found = next(iter(differing.items()))
        raise ValueError(
            f"the rows are of several configurations ({said}); choose one, as with "
            f"--where {name}={found[0]}"
        )
    if len(left) > _MAX_ROWS:
        raise ValueError(
            f"{len(left):,} rows are more than the model is fitted to ({_MAX_ROWS:,}): give a row "
            "for each k, batch and context"
        )
    return left


def steps(rows: Sequence[Row], length: Mapping[int, float]) -> list[Step]:
    """Rows as steps.

    Args:
        length: the acceptance length for each ``k``.
    """
    return [
        Step(row.k, row.batch, row.context, row.seconds)
        if row.seconds
        else Step.of_rate(row.k, row.batch, row.context, row.rate, length[row.k])
        for row in rows
    ]
