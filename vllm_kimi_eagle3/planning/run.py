# SPDX-License-Identifier: Apache-2.0
"""The command ``plan``: which number of drafts pays, at which load, and how to say so to vLLM."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from vllm_kimi_eagle3 import __version__
from vllm_kimi_eagle3.acceptance.given import Given, given
from vllm_kimi_eagle3.acceptance.model import Counts, extended, total
from vllm_kimi_eagle3.acceptance.published import KINDS, find
from vllm_kimi_eagle3.diagnose.metrics import read_page
from vllm_kimi_eagle3.diagnose.report import EXIT_FINE, EXIT_UNTOLD, sort, stopped
from vllm_kimi_eagle3.diagnose.run import OptionError, speculates
from vllm_kimi_eagle3.diagnose.server import MAX_TIMEOUT, Server, ServerError
from vllm_kimi_eagle3.findings import Evidence, Finding
from vllm_kimi_eagle3.findings.lines import field_lines, finding_lines, findings_as_json
from vllm_kimi_eagle3.host import find_host, parse_version

from . import rows as row_files
from . import schedule
from .model import MAX_BATCH, MAX_K, Model, Step, fit, held_out
from .schedule import Range, Release
from .sweep import sweep

JSON_SCHEMA_VERSION = 1

USAGE = """\
usage: vllm-kimi-eagle3 plan --url URL [--without URL] [options]
       vllm-kimi-eagle3 plan --rows FILE --acceptance WHAT [options]

How many drafts pay, by batch and context, where speculation breaks even, and the flags that say so
to this vLLM. From a short sweep of a server that runs, or from steps that were measured before.

what was measured:
  --url URL            a server with speculation; sends it some requests at each batch and context
  --without URL        the same model served without speculation, which makes the plan much surer
  --rows FILE          measured steps: rows of benchmarks/step_time.py, or CSV with the columns
                       k, batch, context and step_ms or tokens_per_second; more than once if wanted
  --where NAME=VALUE   of the rows, those of one configuration; more than once if wanted
  --acceptance WHAT    accepted by position (76,56,43), a length with its drafts (2.8@3), or a
                       report of `diagnose --json`; without it what the sweep accepted counts, and
                       it repeats one text
  --model NAME         which model, if the server has several

what is planned:
  --batch N,N,...      requests at once (1,4,16,64; of the sweep 1,4,16)
  --context N,N,...    tokens of a request (those that were measured; of the sweep 1000,8000)
  --for-context N      the context that a schedule is made for (the middle one)
  --max-batch N        most requests at once, `--max-num-seqs` (256)
  --most N             most drafts a step that may be advised (as many as acceptance is known for)
  --vllm RELEASE       the release that will serve, if the server or this machine does not say
  --runner V1|V2       its model runner, if it is not the usual one
  --data-parallel N    its data-parallel ranks
  --drafter NAME       as it is to stand in the flags
  --timeout SECONDS    for an answer (600)
  --json               the plan as JSON

exit code: 0 there is a plan, 2 there is none or it is unsure, 64 these options are wrong
"""

_SWEEP_BATCHES, _SWEEP_CONTEXTS = (1, 4, 16), (1000, 8000)
_BATCHES = (1, 4, 16, 64)
# Of the interval of a gain: its ends this far apart, and the plan is called unsure.
_UNSURE = 1.6
_OFF = 1 / 6
# Break-even batches this many times apart are worth a word.
_APART = 2.0

Progress = Callable[[str], None]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


@dataclass(frozen=True)
class Options:
    """What the command line says; the attributes are named as its flags."""

    url: str | None = None
    without: str | None = None
    rows: tuple[Path, ...] = ()
    where: tuple[tuple[str, str], ...] = ()
    acceptance: Given | None = None
    model: str | None = None
    batch: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    for_context: int | None = None
    max_batch: int = 256
    most: int | None = None
    vllm: str = ""
    runner: str = ""
    data_parallel: int = 1
    drafter: str = ""
    timeout: float = 600.0
    json: bool = False
    help: bool = False


def options_of(words: Sequence[str]) -> Options:
    """Reads the command line.

    Raises:
        OptionError: it is wrong.
    """
    parser = _Parser(prog="vllm-kimi-eagle3 plan", add_help=False, allow_abbrev=False)
    for name in ("--url", "--without", "--acceptance", "--model", "--batch", "--context"):
        parser.add_argument(name)
    for name in ("--vllm", "--drafter"):
        parser.add_argument(name, default="")
    parser.add_argument("--runner", default="", choices=["", "V1", "V2"])
    parser.add_argument("--rows", type=Path, action="append", default=[])
    parser.add_argument("--where", action="append", default=[])
    for name in ("--for-context", "--most"):
        parser.add_argument(name, type=int)
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--data-parallel", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    found = vars(parser.parse_args(list(words)))
    if found["help"]:
        return Options(help=True)
    if not found["url"] and not found["rows"]:
        raise OptionError("nothing to plan from: give --url, or --rows with --acceptance")
    if found["url"] and found["rows"]:
        raise OptionError("--url and --rows are two machines' steps: leave one out")
    if found["where"] and not found["rows"]:
        raise OptionError("--where chooses among --rows, and there are none")
    if found["without"] and not found["url"]:
        raise OptionError("--without is the second server beside --url")
    if not 1 <= found["max_batch"] <= MAX_BATCH:
        raise OptionError(f"--max-batch takes 1 to {MAX_BATCH}")
    if found["most"] is not None and not 0 <= found["most"] <= MAX_K:
        raise OptionError(f"--most takes 0 to {MAX_K}")
    if found["data_parallel"] < 1:
        raise OptionError("--data-parallel takes 1 or more ranks")
    if found["for_context"] is not None and found["for_context"] < 0:
        raise OptionError("--for-context takes a number of tokens")
    if not 0 < found["timeout"] <= MAX_TIMEOUT:
        raise OptionError(f"--timeout takes up to {MAX_TIMEOUT:.0f} seconds")
    if found["vllm"] and parse_version(found["vllm"]) is None:
        raise OptionError(f"--vllm {found['vllm']}: it takes a release, such as 0.26.0")
    try:
        for name in ("url", "without"):
            if found[name]:
                Server(found[name])
        if found["acceptance"] is not None:
            found["acceptance"] = given(found["acceptance"], "--acceptance")
            if not found["acceptance"].rates and not found["acceptance"].k:
                raise ValueError(
                    "--acceptance: a length says nothing without the drafts that it is of, as in "
                    "2.8@3"
                )
            found["acceptance"].for_positions(1)
    except ValueError as error:
        raise OptionError(str(error)) from None
    for name, least in (("batch", 1), ("context", 0)):
        found[name] = _numbers(found[name], f"--{name}", least)
    if found["url"] and found["batch"] and found["batch"][-1] > MAX_BATCH:
        raise OptionError(f"--batch: a sweep sends up to {MAX_BATCH} requests at once")
    found["where"] = tuple(_pair(text) for text in found["where"])
    # The same file under two names would count twice.
    by_file: dict[str, Path] = {}
    for path in found["rows"]:
        by_file.setdefault(os.path.realpath(path), path)
    found["rows"] = tuple(by_file.values())
    return Options(**found)


def _numbers(text: str | None, flag: str, least: int) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        raise OptionError(f"{flag} takes numbers with commas between them, as in 1,4,16") from None
    if min(numbers) < least or max(numbers) > 10_000_000:
        raise OptionError(f"{flag} takes numbers from {least} on")
    return tuple(sorted(set(numbers)))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise OptionError(f"--where {text}: it takes NAME=VALUE, as in --where vllm=0.26.0")
    return name, value


# ----------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """What was reckoned.

    Attributes:
        source: of the measured steps, in words.
        model: None if there is none.
        rates: accepted by position.
        acceptance: where these are from, in words.
        batches, contexts: that the table has.
        static: the one number of drafts that is best on the whole.
        ranges: the best number by batch, at ``for_context``.
        for_context: tokens.
        release: that it is for.
        drafter: for the flags.
        off: by how much the model missed rows that it was not fitted to: median and most.
        findings: the worst first.
        skipped: cells that could not be measured.
    """

    source: str = ""
    model: Model | None = None
    rates: tuple[float, ...] = ()
    acceptance: str = ""
    batches: tuple[int, ...] = ()
    contexts: tuple[float, ...] = ()
    static: int = 0
    ranges: tuple[Range, ...] = ()
    for_context: float = 0.0
    release: Release = field(default_factory=lambda: Release(None, "V1"))
    drafter: str = ""
    off: tuple[float, float] | None = None
    findings: tuple[Finding, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 there is a plan, 2 there is none or it is unsure."""
        unsure = self.model is None or any(f.undecided for f in self.findings)
        return EXIT_UNTOLD if unsure else EXIT_FINE

    @property
    def flags(self) -> tuple[str, str]:
        """The flag for one number of drafts and the one with a schedule; "" where there is none."""
        scheduled = ""
        if self.release.takes_schedule and len(self.ranges) > 1:
            scheduled = schedule.schedule_flag(self.ranges, self.drafter)
        return schedule.static_flag(self.static, self.drafter), scheduled

    def break_even(self, context: float) -> int | None:
        """The batch from which on the advised number of drafts loses."""
        assert self.model is not None
        k = self.static or 1
        return self.model.break_even(k, context, self.rates)

    def as_json(self) -> dict[str, Any]:
        """The plan as plain data, for ``--json``."""
        static, scheduled = self.flags
        model = self.model
        return {
            "schema_version": JSON_SCHEMA_VERSION,
            "plugin": __version__,
            "source": self.source,
            "rates": list(self.rates),
            "acceptance": self.acceptance,
            "model": None if model is None else {**model.named, "noise": model.noise},
            "off": None if self.off is None else {"median": self.off[0], "most": self.off[1]},
            "gains": [] if model is None else [
                {
                    "context": context, "batch": batch, "k": k,
                    "gain": gain.value, "low": gain.low, "high": gain.high,
                    "measured": k <= len(self.rates),
                }
                for context in self.contexts
                for batch in self.batches
                for k in range(MAX_K + 1)
                for gain in (model.speed_up(k, batch, context, self.rates),)
            ],
            "break_even": {} if model is None else {
                f"{context:g}": self.break_even(context) for context in self.contexts
            },
            "num_speculative_tokens": self.static,
            "schedule": [[one.first, one.last, one.k] for one in self.ranges],
            "for_context": self.for_context,
            "vllm": str(self.release.version or ""),
            "runner": self.release.runner,
            "flags": {"static": static, "schedule": scheduled},
            "skipped": list(self.skipped),
            "exit_code": self.exit_code,
            "findings": findings_as_json(self.findings),
        }  # fmt: skip

    def as_text(self, *, colour: bool = False, width: int | None = None) -> str:
        """The plan for a person."""
        lines = [f"vllm-kimi-eagle3 {__version__} plan"]
        version = self.release.version
        host = f"{version}, {self.release.runner} runner" if version else (
            "not known; `--vllm RELEASE` names it, and 0.24 and later get a schedule, too"
        )  # fmt: skip
        rates = ", ".join(f"{rate:.0%}" for rate in self.rates)
        accepted = f"{rates} by position ({self.acceptance})" if self.rates else ""
        off = ""
        if self.off is not None:
            off = (
                f"steps that it was not fitted to are {self.off[0]:.0%} off in the median, "
                f"{self.off[1]:.0%} at most"
            )
        for name, value in (
            ("steps", self.source),
            ("drafts", accepted),
            ("vLLM", host),
            ("model", off),
            *(("skipped", said) for said in self.skipped),
        ):
            if value:
                lines += field_lines(name, value, width)
        lines += self._tables()
        for finding in self.findings:
            lines += ["", *finding_lines(finding, colour, width)]
        return "\n".join([*lines, *self._advice()])

    def _tables(self) -> list[str]:
        model = self.model
        if model is None:
            return []
        lines = []
        for context in self.contexts:
            lines += ["", f"  times the tokens a second without drafts, {context:,.0f} tokens each"]
            heads = "".join(
                f"{f'k={k}' + ('?' if k > len(self.rates) else ''):>7}" for k in range(1, MAX_K + 1)
            )
            lines.append(f"  {'batch':>6}{heads}   of k={self.static or 1}")
            for batch in self.batches:
                gains = [model.speed_up(k, batch, context, self.rates) for k in range(1, MAX_K + 1)]
                shown = "".join(f"{gain.value:7.2f}" for gain in gains)
                own = gains[(self.static or 1) - 1]
                lines.append(f"  {batch:>6}{shown}   {own.low:.2f} to {own.high:.2f}")
            even = self.break_even(context)
            said = f"from batch {even} on" if even else f"at no batch up to {MAX_BATCH:,}"
            said = "at every batch" if even == 1 else said
            lines.append(f"  {_drafts(self.static or 1)} {said}")
        if len(self.rates) < MAX_K:
            lines += ["", "  ?: acceptance was not measured so far; the most to hope for"]
        return lines

    def _advice(self) -> list[str]:
        if self.model is None:
            return ["", "There is no plan."]
        static, scheduled = self.flags
        if not static and not scheduled:
            return ["", "Serve without speculation: leave out --speculative-config."]
        lines = ["", f"For all loads, num_speculative_tokens = {self.static}:" if static else (
            "For all loads, no drafts: leave out --speculative-config."
        )]  # fmt: skip
        if static:
            lines += [f"  {static}"]
        if scheduled:
            lines += [
                f"By batch, for requests of {self.for_context:,.0f} tokens:",
                f"  {scheduled}",
            ]
        return lines


def _drafts(k: int) -> str:
    return "one draft loses" if k == 1 else f"{k} drafts lose"


def plan(options: Options, progress: Progress | None = None) -> Plan:
    """Measures and reckons; whatever a server or a file holds, it is a plan, perhaps an empty one.

    Raises:
        OptionError: the rows and the options do not go together.
    """
    work = _Work(options, progress or (lambda text: None))
    try:
        work.run()
    except OptionError:
        raise
    except Exception as error:
        work.found.append(stopped("plan-stopped", error))
    return replace(work.so_far, findings=tuple(sort(work.found)))


@dataclass
class _Work:
    """One run, as far as it got."""

    options: Options
    progress: Progress
    found: list[Finding] = field(default_factory=list)
    so_far: Plan = field(default_factory=Plan)

    def run(self) -> None:
        options, progress = self.options, self.progress
        release = options.vllm
        steps: list[Step] = []
        counts: list[Counts] = []
        skipped: list[str] = []
        source = []
        try:
            if options.url:
                server = Server(options.url, options.timeout)
                release = release or server.release()
                steps, counts, skipped = _sweep(options, server, progress)
                source.append(f"a sweep of {server.url}")
                # Without a step of the server itself, those of the other are no plan for it.
                if options.without and steps:
                    other = Server(options.without, options.timeout)
                    more, _, missed = _sweep(options, other, progress, without=True)
                    steps += more
                    skipped += missed
                    source.append(f"and of {other.url} without speculation")
        except ServerError as error:
            self.found.append(Finding("diagnose-no-answer", error.fact, error.fix))
        rates, whence = _rates(options, counts)
        if options.rows:
            steps += _of_rows(options, rates)
            source.append("rows of " + ", ".join(str(path) for path in options.rows))
        if not release and (host := find_host()) is not None:
            release = str(host.version or "")
        target = Release.of(release, options.runner, options.data_parallel)
        self.so_far = Plan(
            " ".join(source), rates=rates, acceptance=whence, release=target,
            drafter=options.drafter, skipped=tuple(skipped),
        )  # fmt: skip
        if steps and rates:
            self.so_far = _reckon(options, steps, self.so_far, self.found)
            return
        lacking = "no step was measured" if not steps else "how many drafts are accepted is unknown"
        fix = "give --acceptance, as in 76,56,43, or a report of `diagnose --json`"
        if not steps:
            fix = "give --rows, or a server that answers"
            fix += "; `skipped` above says why none could be taken" if skipped else ""
        self.found.append(Finding("plan-no-input", lacking, fix))


def _sweep(
    options: Options, server: Server, progress: Progress, *, without: bool = False
) -> tuple[list[Step], list[Counts], list[str]]:
    """Sweeps a server.

    Args:
        without: it is the second server, which does not speculate and may have another name for
            the model.
    """
    page = read_page(server.metrics())
    if not page.is_vllm:
        raise ServerError(
            f"{server.url}/metrics has no metrics of vLLM, which time the steps",
            "give the address of the vLLM server itself, started without --disable-log-stats",
        )
    if without and speculates(page):
        raise ServerError(
            f"{server.url} speculates, too: it has counters of drafts",
            "give `--without` a server that was started without --speculative-config",
        )
    served = server.models()
    if not served:
        raise ServerError(f"{server.url} serves no model", "give the address of a vLLM server")
    names = [m.name for m in served]
    if options.model is not None and options.model not in names and not without:
        raise ServerError(
            f"{server.url} has no model {options.model!r}; it has {', '.join(names)}",
            "name one of these with --model",
        )
    model = next((m for m in served if m.name == options.model), served[0])
    counters = [name for name in page.models if name]
    if model.name not in counters and len(counters) > 1:
        raise ServerError(
            f"the metrics of {server.url} are of {len(counters)} models: {', '.join(counters)}",
            "name one of them with --model",
        )
    counted_as = model.name if model.name in page.models else None
    measured = sweep(
        server,
        model.name,
        options.batch or _SWEEP_BATCHES,
        options.context or _SWEEP_CONTEXTS,
        max_model_len=model.max_model_len,
        counted_as=counted_as,
        progress=progress,
    )
    return list(measured.steps), list(measured.counts), list(measured.skipped)


def _rates(options: Options, counts: Sequence[Counts]) -> tuple[tuple[float, ...], str]:
    """Accepted by position, and where that is from."""
    if options.acceptance is not None:
        return options.acceptance.for_positions(1), options.acceptance.source
    swept = total(counts)
    if swept.drafts:
        return swept.rates, f"of the sweep, {swept.drafts:,} steps, which repeat one text"
    known = find(options.drafter) if options.drafter else None
    rates = None if known is None else known.rates(3, KINDS)
    if rates is not None and known is not None:
        return rates, f"published for {known.name}"
    return (), ""


def _of_rows(options: Options, rates: Sequence[float]) -> list[Step]:
    try:
        read = [row for path in options.rows for row in row_files.read_rows(path)]
        chosen = row_files.choose(read, dict(options.where))
    except ValueError as error:
        raise OptionError(str(error)) from None
    if any(row.rate and row.k for row in chosen) and not rates:
        raise OptionError(
            "the rows have tokens a second, and what that says of a step depends on acceptance: "
            "give --acceptance"
        )
    lengths = {row.k: 1 + sum(extended(rates, row.k)) for row in chosen}
    return row_files.steps(chosen, lengths)


def _reckon(options: Options, steps: Sequence[Step], known: Plan, found: list[Finding]) -> Plan:
    """The plan, with what is known already; what there is to say of it is added to the findings."""
    rates = known.rates
    model = fit(steps)
    missed = sorted(abs(said / row.seconds - 1) for row, said in held_out(steps))
    misfit = median(model.misfit)
    off = (median(missed), missed[-1]) if missed else None
    measured = sorted({step.context for step in steps})
    contexts = tuple(float(c) for c in options.context) or tuple(measured)
    batches = options.batch or _BATCHES
    for_context = float(
        options.for_context if options.for_context is not None else contexts[len(contexts) // 2]
    )
    most = options.most if options.most is not None else min(MAX_K, len(rates))
    best = schedule.static_k(model, rates, contexts, batches, most)
    ranges = schedule.ranges(model, rates, for_context, most, options.max_batch)
    result = replace(
        known, model=model, batches=batches, contexts=contexts, static=best, ranges=tuple(ranges),
        for_context=for_context, off=off,
    )  # fmt: skip
    if misfit > _OFF:
        found.append(
            Finding(
                "plan-model-off",
                f"the measured steps contradict each other: the model that comes closest is "
                f"{misfit:.0%} off in the median",
                "measure again on a server at rest, or plan from rows of one configuration",
            )
        )
    found += _notes(result, steps, most)
    found += schedule.notes(known.release, ranges)
    return result


def _notes(result: Plan, steps: Sequence[Step], most: int) -> list[Finding]:
    model = result.model
    assert model is not None
    found = []
    cells = [(b, c) for b in result.batches for c in result.contexts]
    if (
        most
        and result.static == 0
        and all(model.gain(k, b, c, result.rates) < 1 for b, c in cells for k in range(1, most + 1))
    ):
        top = max(model.gain(k, b, c, result.rates) for b, c in cells for k in range(1, most + 1))
        found.append(
            Finding(
                "plan-never-pays",
                f"no number of drafts up to {most} pays at any batch and context of the plan; the "
                f"best is {top:.2f} times",
                "serve without speculation; `vllm-kimi-eagle3 diagnose` says whether acceptance is "
                "to blame, `vllm-kimi-eagle3 check` whether the verify step is",
                Evidence(key="acceptance", value=", ".join(f"{r:.0%}" for r in result.rates)),
            )
        )
    if most > len(result.rates):
        found.append(
            Finding(
                "plan-acceptance-assumed",
                f"acceptance is known for {len(result.rates)} positions, and up to {most} drafts "
                "may be advised",
                f"measure with a server that drafts {most}, or leave out --most",
            )
        )
    even = {c: result.break_even(c) or MAX_BATCH for c in result.contexts}
    if len(even) > 1 and max(even.values()) >= _APART * min(even.values()):
        said = ", ".join(f"{c:,.0f} tokens: batch {b}" for c, b in even.items())
        found.append(
            Finding(
                "plan-depends-on-context",
                f"the batch from which on k = {result.static or 1} loses depends on the context "
                f"({said}), and vLLM can choose by the batch alone",
                "choose with --for-context the length that most of your requests have",
            )
        )
    if result.off is not None and result.off[0] > _OFF >= median(model.misfit):
        found.append(
            Finding(
                "plan-model-off",
                f"steps that were measured and held out are {result.off[0]:.0%} off in the median",
                "measure again on a server at rest, or plan from rows of one configuration",
                Evidence(key="held-out steps", value=f"{result.off[1]:.0%} at most"),
            )
        )
    spans = [model.speed_up(result.static or 1, b, c, result.rates) for b, c in cells]
    crossing = [gain for gain in spans if gain.low < 1 < gain.high]
    widest = max(crossing, key=lambda gain: gain.high / gain.low, default=None)
    if widest is not None and widest.high / widest.low > _UNSURE:
        kinds = "with drafts" if all(s.k for s in steps) else "without drafts"
        both = "" if len({bool(s.k) for s in steps}) == 2 else f", all of them {kinds}"
        found.append(
            Finding(
                "plan-few-rows",
                f"{len(steps)} measured steps{both} leave a gain of {widest.low:.2f} to "
                f"{widest.high:.2f} open",
                "measure more: with and without drafts (--without URL), at more batches and "
                "contexts",
                Evidence(key="measured steps", value=str(len(steps))),
            )
        )
    return found
