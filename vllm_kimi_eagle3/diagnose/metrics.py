# SPDX-License-Identifier: Apache-2.0
"""vLLM's counters in a Prometheus text, whatever the text holds.

A page of metrics is another program's output, and may be that of another program: lines that are
none are counted and skipped, and a number that cannot be is left out and said. A server has one set
of counters for each model and engine (a data-parallel rank is an engine); they only rise, until it
is started again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from vllm_kimi_eagle3.acceptance.model import Counts, total

PREFIXES = ("vllm:", "vllm_")  # Gateways that re-export metrics allow no colon.
DRAFTS = "spec_decode_num_drafts"
DRAFT_TOKENS = "spec_decode_num_draft_tokens"
ACCEPTED = "spec_decode_num_accepted_tokens"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
GENERATED = "generation_tokens"
REQUESTS = "request_success"
STEPS = "inter_token_latency_seconds_count"
STEP_SECONDS = "inter_token_latency_seconds_sum"
RUNNING = "num_requests_running"
WAITING = "num_requests_waiting"

MAX_POSITIONS = 64
"""More drafts a step than any release takes."""
# A counter beyond 2**53 is not exact in the text, and no server counted so far.
_MOST = 2.0**53
# A line of vLLM's has some hundred characters; of what cannot be, so much is kept to be said.
_LONGEST_LINE, MOST_SAID = 1 << 16, 20

_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*)"\s*(,|\Z)')
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True)
class Sample:
    """One line: a series and its value."""

    name: str
    labels: Mapping[str, str]
    value: float


def parse(text: str) -> tuple[list[Sample], int]:
    """The samples of a Prometheus text.

    Returns:
        The samples, and how many lines were neither a sample, nor a comment, nor blank.
    """
    samples, bad = [], 0
    for line in text.split("\n"):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        sample = _sample(line) if len(line) <= _LONGEST_LINE else None
        if sample is None:
            bad += 1
        else:
            samples.append(sample)
    return samples, bad


def _sample(line: str) -> Sample | None:
    name = _NAME.match(line)
    if name is None:
        return None
    rest = line[name.end() :].lstrip()
    labels: dict[str, str] = {}
    if rest.startswith("{"):
        end = _end_of_labels(rest)
        if end is None or (found := _labels(rest[1:end])) is None:
            return None
        labels, rest = found, rest[end + 1 :]
    words = rest.split("#", 1)[0].split()  # An exemplar may follow.
    if not 1 <= len(words) <= 2:
        return None
    try:
        return Sample(name[0], labels, float(words[0].replace("_", "?")))
    except ValueError:
        return None


def _end_of_labels(text: str) -> int | None:
    quoted = False
    at = 1
    while at < len(text):
        character = text[at]
        if character == "\\" and quoted:
            at += 1
        elif character == '"':
            quoted = not quoted
        elif character == "}" and not quoted:
            return at
        at += 1
    return None


def _labels(text: str) -> dict[str, str] | None:
    labels: dict[str, str] = {}
    text, at = text.rstrip(), 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            return None
        labels[match[1]] = re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), match[2])
        at = match.end()
    return labels


# ------------------------------------------------------------------------- what of it is vLLM's


@dataclass(frozen=True)
class Key:
    """Whose counters they are."""

    model: str
    engine: str

    def __str__(self) -> str:
        return f"engine {self.engine} of {self.model}" if self.model else f"engine {self.engine}"


@dataclass
class Engine:
    """The counters of one engine, as far as the page has them.

    Attributes:
        values: by name, without prefix and ``_total``.
        positions: accepted drafts by position.
        created: when a counter began to count, where the page says so.
    """

    values: dict[str, float] = field(default_factory=dict)
    positions: dict[int, float] = field(default_factory=dict)
    created: dict[str, float] = field(default_factory=dict)


@dataclass
class Page:
    """What a page of metrics says of vLLM.

    Attributes:
        engines: the counters by model and engine.
        impossible: sentences about numbers that cannot be, which were left out.
        foreign: names of speculation counters that this program does not know.
        is_vllm: there was a metric of vLLM on it.
        bad_lines: lines that are no metric.
        lines: samples that were read.
    """

    engines: dict[Key, Engine] = field(default_factory=dict)
    impossible: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    is_vllm: bool = False
    bad_lines: int = 0
    lines: int = 0

    @property
    def models(self) -> list[str]:
        """The models that have counters, as they are served."""
        return list(dict.fromkeys(key.model for key in self.engines))

    def of_model(self, model: str | None) -> dict[Key, Engine]:
        """The engines of a model, of all for None."""
        if model is None:
            return self.engines
        return {key: engine for key, engine in self.engines.items() if key.model == model}


_SUMMED = {DRAFTS, DRAFT_TOKENS, ACCEPTED, GENERATED, REQUESTS, STEPS, STEP_SECONDS}
_GAUGES = {RUNNING, WAITING}


def read_page(text: str) -> Page:
    """Reads a page; it is read whatever it holds."""
    samples, bad = parse(text)
    page = Page(bad_lines=bad, lines=len(samples))
    for sample in samples:
        prefix = next((p for p in PREFIXES if sample.name.startswith(p)), None)
        if prefix is None:
            continue
        page.is_vllm = True
        _take(page, sample, sample.name[len(prefix) :])
    return page


def _take(page: Page, sample: Sample, full: str) -> None:
    name = full.removesuffix("_total")
    created = full.removesuffix("_created") if full.endswith("_created") else None
    known = name in _SUMMED or name in _GAUGES or name == PER_POSITION
    if created is None and not known:
        if "spec_decode" in name and len(page.foreign) < MOST_SAID and name not in page.foreign:
            page.foreign.append(name)
        return
    if created is not None and created not in (*_SUMMED, PER_POSITION):
        return
    key = Key(sample.labels.get("model_name", ""), sample.labels.get("engine", "0"))
    engine = page.engines.setdefault(key, Engine())
    value = sample.value
    whole = name != STEP_SECONDS and created is None
    if not math.isfinite(value) or value < 0 or value > _MOST or (whole and value % 1):
        _say(page, f"{sample.name} of {key} is {value:g}")
        return
    if created is not None:
        engine.created[created] = max(value, engine.created.get(created, 0.0))
    elif name == PER_POSITION:
        position = sample.labels.get("position", "")
        number = int(position) if re.fullmatch("[0-9]{1,4}", position) else MAX_POSITIONS
        if number >= MAX_POSITIONS:
            _say(page, f"{sample.name} of {key} has the position {position[:20]!r}")
            return
        engine.positions[number] = engine.positions.get(number, 0.0) + value
    else:
        # Of requests there is one series for each reason of their end.
        engine.values[name] = engine.values.get(name, 0.0) + value


def _say(page: Page, sentence: str) -> None:
    if len(page.impossible) < MOST_SAID:
        page.impossible.append(sentence)


# ------------------------------------------------------------------------------- between two pages


@dataclass(frozen=True)
class Delta:
    """What one engine, or some together, counted between two pages.

    Attributes:
        counts: of drafts by position; None where they are not counted so, or cannot be.
        drafts, accepted: steps that verified drafts, and drafts that were accepted, where they are
            not counted by position.
        generated: tokens.
        requests: that ended.
        steps: of all requests, after the first token of each: tokens' latencies that were observed.
            None where the page does not have them.
        seconds: the sum of those latencies.
    """

    counts: Counts | None = None
    drafts: int | None = None
    accepted: int | None = None
    generated: int = 0
    requests: int = 0
    steps: int | None = None
    seconds: float = 0.0

    @property
    def length(self) -> float | None:
        """Mean acceptance length; None where it is not known."""
        if self.counts is not None:
            return self.counts.length if self.counts.drafts else None
        if self.drafts and self.accepted is not None:
            return 1 + self.accepted / self.drafts
        return None

    @property
    def drafted_share(self) -> float | None:
        """The part of the steps that verified drafts; None where it is not known."""
        if not self.steps or self.drafts is None:
            return None
        return min(1.0, self.drafts / self.steps)


@dataclass
class Difference:
    """What was counted between two pages.

    Attributes:
        engines: by engine, those that both pages have.
        resets: engines that counted from zero anew, or were not there before.
        impossible: sentences about counters that contradict each other.
        missing: names of counters that speculation should have and these do not.
    """

    engines: dict[Key, Delta] = field(default_factory=dict)
    resets: list[Key] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def total(self) -> Delta:
        """All engines together."""
        return add(self.engines.values())


def difference(before: Page, after: Page, model: str | None = None) -> Difference:
    """What the engines of a model, or of all, counted between two pages.

    An engine that was started again counts from zero: what it counted since is taken.
    """
    result = Difference()
    old, new = before.of_model(model), after.of_model(model)
    speculation = any(DRAFTS in engine.values for engine in (*old.values(), *new.values()))
    for key, engine in new.items():
        base = old.get(key)
        if base is None or _restarted(base, engine):
            if old:
                result.resets.append(key)
            base = Engine()
        delta = _delta(key, base, engine, result, speculation)
        if delta is not None:
            result.engines[key] = delta
    result.resets += [key for key in old if key not in new]
    result.missing = sorted(set(result.missing))
    return result


def add(deltas: Iterable[Delta]) -> Delta:
    """Several as one; what one of them does not know the sum does not, either."""
    every = list(deltas)
    counts = [delta.counts for delta in every if delta.counts is not None]
    return Delta(
        total(counts) if counts and len(counts) == len(every) else None,
        _sum(delta.drafts for delta in every),
        _sum(delta.accepted for delta in every),
        sum(delta.generated for delta in every),
        sum(delta.requests for delta in every),
        _sum(delta.steps for delta in every),
        sum(delta.seconds for delta in every),
    )


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = list(numbers)
    return None if not known or None in known else sum(n for n in known if n is not None)


def _restarted(base: Engine, engine: Engine) -> bool:
    falls = any(
        engine.values.get(name, v) < v for name, v in base.values.items() if name in _SUMMED
    )
    falls = falls or any(engine.positions.get(p, v) < v for p, v in base.positions.items())
    later = any(engine.created.get(name, v) > v for name, v in base.created.items())
    return falls or later


def _delta(
    key: Key, base: Engine, engine: Engine, result: Difference, speculation: bool
) -> Delta | None:
    """What an engine counted; ``speculation`` says that drafts are counted elsewhere or were."""

    def risen(name: str) -> int | None:
        if name not in engine.values:
            return None
        return int(engine.values[name] - base.values.get(name, 0.0))

    drafts, draft_tokens, accepted = risen(DRAFTS), risen(DRAFT_TOKENS), risen(ACCEPTED)
    positions = {p: int(v - base.positions.get(p, 0.0)) for p, v in engine.positions.items()}
    counts = None
    counted = draft_tokens is not None or accepted is not None or positions
    if drafts is None and (counted or speculation):
        result.missing.append(DRAFTS)
    if drafts is not None:
        if not positions:
            result.missing.append(PER_POSITION)
        if accepted is None:
            result.missing.append(ACCEPTED)
        try:
            counts = _counts(drafts, draft_tokens, accepted, positions)
        except ValueError as error:
            result.impossible.append(f"{key} counts {error}")
            drafts = accepted = None
    return Delta(
        counts,
        drafts,
        accepted,
        generated=risen(GENERATED) or 0,
        requests=risen(REQUESTS) or 0,
        steps=risen(STEPS),
        seconds=engine.values.get(STEP_SECONDS, 0.0) - base.values.get(STEP_SECONDS, 0.0),
    )


# Several processes of a server count on their own, and a page may be read between two of them.
_TORN, _TORN_SHARE = 16, 0.01


def _counts(
    drafts: int, draft_tokens: int | None, accepted: int | None, positions: Mapping[int, int]
) -> Counts | None:
    """The counts of an engine; None without positions.

    Raises:
        ValueError: they contradict each other by more than a page that was read in between.
    """
    slack = _TORN + _TORN_SHARE * drafts
    if not positions:
        if accepted is not None and draft_tokens is not None and accepted > draft_tokens + slack:
            raise ValueError(f"{accepted:,} accepted drafts of {draft_tokens:,}")
        return None
    every = _in_order(positions)
    if accepted is not None and abs(accepted - sum(every)) > slack * len(every):
        raise ValueError(f"{accepted:,} accepted drafts, and {sum(every):,} by their positions")
    before, settled = drafts, []
    for count in every:
        settled.append(min(count, before) if 0 < count - before <= slack else count)
        before = settled[-1]
    if draft_tokens is not None and 0 < sum(settled) - draft_tokens <= slack:
        draft_tokens = sum(settled)
    return Counts(drafts, tuple(settled), -1 if draft_tokens is None else draft_tokens)


def _in_order(positions: Mapping[int, int]) -> tuple[int, ...]:
    highest = max(positions)
    missing = [p for p in range(highest + 1) if p not in positions]
    if missing:
        raise ValueError(f"accepted drafts at position {highest} and none at {missing[0]}")
    return tuple(positions[p] for p in range(highest + 1))
