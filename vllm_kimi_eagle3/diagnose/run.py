# SPDX-License-Identifier: Apache-2.0
"""The command ``diagnose --url``: ask, drive or watch, judge, report."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import NoReturn

from vllm_kimi_eagle3.acceptance.given import Given, given
from vllm_kimi_eagle3.acceptance.model import Acceptance, acceptance
from vllm_kimi_eagle3.acceptance.published import HEALTHY, HEALTHY_SOURCE, KINDS, Drafter, find
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity

from . import drive, signature
from .metrics import ACCEPTED, DRAFT_TOKENS, DRAFTS, Page, read_page
from .report import EXIT_FINE, Report, measured_of, sort, stopped
from .server import MAX_TIMEOUT, Model, Server, ServerError
from .signature import Expected, Observed, Part

USAGE = """\
usage: vllm-kimi-eagle3 diagnose --url URL [options]
       vllm-kimi-eagle3 diagnose --offline MODEL --speculative-config JSON [options]

Why the acceptance of a running vLLM is what it is. Sends it a fixed set of ordinary prompts, one at
a time, reads its counters (/metrics), and compares acceptance by position with what it should be.
The server is not restarted and need not have the plugin.

options:
  --url URL            the server, such as http://localhost:8000 (a key in VLLM_API_KEY)
  --watch SECONDS      send nothing, and watch the traffic that is there
  --without URL        the same model served without speculation: how much faster it is with
  --drafter NAME       which drafter it runs, for the figures that were published of it
  --expect WHAT        what acceptance should be: a length (2.8, or 2.8@3 for three drafts), rates
                       by position (76,56,43), or a report of `diagnose --json` from a good day
  --model NAME         which model, if the server has several
  --prompts FILE       your own prompts: a line each, or JSON; see docs/diagnose.md
  --tokens N           most tokens of an answer (256)
  --context N          the longest prompt that is tried, in tokens (4096); 0 for no long ones
  --temperature T      how the traffic that is watched is sampled, if you know it; 0 is greedy
  --timeout SECONDS    for an answer (600)
  --json               the report as JSON
  --plot FILE          acceptance by position and the speed-up to expect, as a picture (PNG, SVG,
                       PDF); needs matplotlib, which pip install 'vllm-kimi-eagle3[plot]' brings
  --offline MODEL ...  load the target once and find which setting the drafter was trained with;
                       `diagnose --offline --help` has its options

exit code: 0 acceptance is as it should be, 1 something is wrong, 2 that could not be told, 64 these
options are wrong
"""

# As in `plan`: the text of a longer prompt takes the memory of this machine.
_MOST_CONTEXT = 10_000_000

Progress = Callable[[str], None]


class OptionError(ValueError):
    """The options are wrong; the message says which."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(message)


@dataclass(frozen=True)
class Options:
    """What the command line says; the attributes are named as its flags.

    Attributes:
        own_prompts: those of the file ``prompts``.
    """

    url: str = ""
    watch: float | None = None
    without: str | None = None
    drafter: str | None = None
    expect: Given | None = None
    model: str | None = None
    prompts: Path | None = None
    own_prompts: tuple[drive.Prompt, ...] = ()
    tokens: int = 256
    context: int = 4096
    temperature: float | None = None
    timeout: float = 600.0
    json: bool = False
    plot: Path | None = None
    help: bool = False


def options_of(words: Sequence[str]) -> Options:
    """Reads the command line.

    Raises:
        OptionError: it is wrong.
    """
    parser = _Parser(prog="vllm-kimi-eagle3 diagnose", add_help=False, allow_abbrev=False)
    for name in ("--url", "--without", "--drafter", "--expect", "--model"):
        parser.add_argument(name)
    for name in ("--prompts", "--plot"):
        parser.add_argument(name, type=Path)
    for name in ("--watch", "--temperature"):
        parser.add_argument(name, type=float)
    for name in ("--tokens", "--context"):
        parser.add_argument(name, type=int)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    found = parser.parse_args(list(words))
    if found.help:
        return Options(help=True)
    if not found.url:
        raise OptionError("--url is missing: the address of the server (or --offline MODEL)")
    if found.watch is not None and not 1 <= found.watch <= 86_400:
        raise OptionError("--watch takes 1 to 86400 seconds")
    if found.watch is not None and found.prompts is not None:
        raise OptionError("--watch sends nothing, and --prompts is what to send: leave one out")
    if found.watch is not None and found.without is not None:
        raise OptionError("--without compares the same prompts on two servers: leave out --watch")
    if found.without is not None and not found.without.strip():
        raise OptionError("--without is empty: it takes the address of a server")
    for name in ("tokens", "context"):
        if getattr(found, name) is None:
            setattr(found, name, getattr(Options, name))
        elif found.watch is not None:
            raise OptionError(f"--{name} is of what is sent, and --watch sends nothing")
    if found.watch is None and found.temperature is not None:
        raise OptionError("--temperature says how watched traffic is sampled: it needs --watch")
    if not 8 <= found.tokens <= 100_000:
        raise OptionError("--tokens takes 8 to 100000")
    if not 0 <= found.context <= _MOST_CONTEXT:
        raise OptionError(f"--context takes up to {_MOST_CONTEXT:,} tokens, 0 for no long prompts")
    if found.temperature is not None and not 0 <= found.temperature <= 100:
        raise OptionError("--temperature takes a number from 0 on; 0 is greedy")
    if not 0 < found.timeout <= MAX_TIMEOUT:
        raise OptionError(f"--timeout takes up to {MAX_TIMEOUT:.0f} seconds")
    try:
        expect = None if found.expect is None else given(found.expect, "--expect")
        Server(found.url)
        if found.without:
            Server(found.without)
        # Once: it may be a pipe.
        own = () if found.prompts is None else tuple(drive.read_prompts(found.prompts))
    except ValueError as error:
        raise OptionError(str(error)) from None
    return Options(**{**vars(found), "expect": expect, "own_prompts": own})


def diagnose(options: Options, progress: Progress | None = None) -> Report:
    """Measures and judges; whatever the server answers, it is a report and not an exception."""
    work = _Work(options, progress or (lambda text: None))
    try:
        work.run()
    except ServerError as error:
        work.found.append(_no_answer(error, options.url))
    except Exception as error:
        work.found.append(stopped("diagnose-stopped", error))
    return work.report()


@dataclass
class _Work:
    """One run, as far as it got."""

    options: Options
    progress: Progress
    found: list[Finding] = field(default_factory=list)
    so_far: Report = field(default_factory=lambda: Report(""))

    def report(self) -> Report:
        """What is known so far."""
        found = sort(self.found)
        if any(finding.severity is Severity.WRONG for finding in found):
            # What is wrong is so without anything to compare it with.
            found = [finding for finding in found if finding.id != "diagnose-none-published"]
        return replace(self.so_far, findings=tuple(found))

    def run(self) -> None:
        options = self.options
        server = Server(options.url, options.timeout)
        self.so_far = replace(self.so_far, url=server.url)
        self.progress(f"asking {server.url}")
        page = read_page(server.metrics())
        model = self._model(server, page)
        if model is None:
            return
        release = server.release()
        drafter = options.drafter or str(server.speculative_config().get("model") or "")
        known = find(drafter) if drafter else None
        self.so_far = replace(
            self.so_far,
            release=release,
            model=model.name,
            drafter=drafter,
            published=_in_words(known, drafter),
        )
        counted_as = model.name if model.name in page.models else None
        if not self._speculates(page, counted_as):
            return
        record, how = self._measure(server, model, counted_as)
        self._readings(record)
        observed = Observed(
            record.parts,
            record.engines,
            driven=options.watch is None,
            foreign_requests=record.foreign_requests,
            temperature=options.temperature if options.watch is not None else 0.0,
            missing=record.missing,
        )
        self._fill(record, how, known)
        self.found += signature.findings(observed, self._to_judge(known))
        if record.stopped is not None:
            self.found.append(_no_answer(record.stopped, options.url))
        if self.so_far.measured is None and self.report().exit_code == EXIT_FINE:
            self.found.append(_lacks([DRAFTS]))
        if options.without and record.parts and record.stopped is None:
            try:
                self._compare(model, record)
            except ServerError as error:
                self.found.append(_no_answer(error, options.without))

    # ------------------------------------------------------------------------------- the steps

    def _model(self, server: Server, page: Page) -> Model | None:
        """The model to ask and judge; None, with a finding, if that cannot be told."""
        if not page.is_vllm:
            what = f"{page.lines:,} metrics, none of them vLLM's" if page.lines else "no metrics"
            self.found.append(
                Finding(
                    "diagnose-no-metrics",
                    f"{server.url}/metrics has {what}",
                    "give `--url` the vLLM server itself, and start it without --disable-log-stats",
                    Evidence("/metrics", "lines", f"{page.lines + page.bad_lines:,}"),
                )
            )
            return None
        served = server.models()
        wanted = self.options.model
        names = [name for name in page.models if name]
        if wanted is not None and wanted not in [m.name for m in served] and wanted not in names:
            self.found.append(
                Finding(
                    "diagnose-no-answer",
                    f"the server has no model {wanted!r}; it has "
                    + (", ".join(m.name for m in served) or "none"),
                    "name one of these with --model",
                    Evidence("/v1/models"),
                )
            )
            return None
        # Without counters of its own, the model's may be among those of any of several.
        if wanted not in names and len(names) > 1:
            self.found.append(
                Finding(
                    "diagnose-several-models",
                    f"the metrics are of {len(names)} models: {', '.join(names)}",
                    f"name one of them, as with `--model {names[0]}`",
                    Evidence("/metrics", "model_name", ", ".join(names)),
                )
            )
            return None
        name = wanted or (names[0] if names else (served[0].name if served else ""))
        return next((m for m in served if m.name == name), Model(name, "", 0))

    def _speculates(self, page: Page, counted_as: str | None) -> bool:
        """Whether there are counters of drafts; with a finding if not."""
        if speculates(page, counted_as):
            return True
        if page.foreign:
            self.found.append(
                Finding(
                    "diagnose-counters-missing",
                    f"the server has no vllm:{DRAFTS}, and has others that no supported release "
                    f"has: {', '.join(page.foreign[:4])}",
                    "update the plugin if this is a newer vLLM, or report it",
                    Evidence("/metrics", f"vllm:{DRAFTS}_total", "absent"),
                )
            )
            return False
        self.found += _impossible(page.impossible)
        whose = f"the model {counted_as}" if len(page.models) > 1 else "the server"
        self.found.append(
            Finding(
                "diagnose-no-speculation",
                f"{whose} has no counters of drafts: it was started without "
                "--speculative-config, or the flag did not reach it",
                "look for `speculative_config=` in the first lines of the server's log",
                Evidence("/metrics", f"vllm:{DRAFTS}_total", "absent"),
            )
        )
        return False

    def _measure(
        self, server: Server, model: Model, counted_as: str | None
    ) -> tuple[drive.Record, str]:
        options = self.options
        if options.watch is not None:
            how = f"watched for {options.watch:.0f} s"
            record = drive.watch(
                server, options.watch, counted_as=counted_as, progress=self.progress
            )
            if record.stopped:
                how += f", of which it answered {sum(part.wall for part in record.parts):.0f} s"
            return record, how
        prompts, tokens = self._prompts(server, model)
        self.so_far = replace(self.so_far, prompts=drive.digest(prompts, tokens))
        record = drive.drive(
            server,
            model.name,
            prompts,
            tokens=tokens,
            counted_as=counted_as,
            progress=self.progress,
        )
        some = f"{len(record.parts)}"
        if record.stopped:
            some += f" of {len(prompts)}"
            # It is no measurement of all of them.
            self.so_far = replace(self.so_far, prompts="")
        sent = f"{some} prompts of " + (str(options.prompts) if options.prompts else "this program")
        how = f"{sent}, one at a time, greedy, answers of up to {tokens:,} tokens"
        if record.refused:
            how += f"; it refused {len(record.refused)} more ({record.refused[0].fact})"
        return record, how

    def _prompts(self, server: Server, model: Model) -> tuple[list[drive.Prompt], int]:
        options = self.options
        tokens = options.tokens
        if model.max_model_len:
            tokens = min(tokens, max(8, model.max_model_len // 2))
        if options.prompts is not None:
            return [*options.own_prompts], tokens
        prompts = drive.shipped_prompts()
        if options.context:
            density = drive.tokens_per_character(server, model.name)
            prompts += [
                drive.long_prompt(length, density)
                for length in drive.lengths(options.context, model.max_model_len, tokens)
            ]
        return prompts, tokens

    def _readings(self, record: drive.Record) -> None:
        """Findings on the counters themselves."""
        self.found += _impossible(record.impossible)
        if record.resets:
            said = ", ".join(str(key) for key in record.resets[:4])
            self.found.append(
                Finding(
                    "diagnose-counters-reset",
                    f"the counters of {said} began anew, or came or went, while they were read",
                    "run it again while the server stays up",
                    Evidence("/metrics", "readings", str(record.pages)),
                )
            )
        if record.missing:
            self.found.append(_lacks(record.missing))

    def _fill(self, record: drive.Record, how: str, known: Drafter | None) -> None:
        """The figures of the report."""
        parts = [part for part in record.parts if part.delta.counts is not None]
        measured = measured_of(parts) if parts else None
        whole = record.total
        engines: dict[str, Acceptance] = {}
        if len(record.engines) > 1:
            engines = {
                str(key): acceptance([delta.counts])
                for key, delta in sorted(record.engines.items(), key=lambda one: str(one[0]))
                if delta.counts is not None and delta.counts.drafts
            }
        self.so_far = replace(
            self.so_far,
            how=how,
            measured=measured if measured is not None and measured.counts.drafts else None,
            length=whole.length,
            expected=self._expected(known, measured.counts.positions if measured else 0),
            drafted_share=whole.drafted_share,
            kinds={kind: measured_of(some) for kind, some in drive.by_kind(parts).items()},
            bins=signature.length_bins(parts),
            engines=engines,
            context=_context(record.parts),
            # The latencies are those of everybody.
            speed=None if record.foreign_requests else drive.speed(record.parts),
        )

    def _expected(self, known: Drafter | None, k: int) -> Expected | None:
        """What acceptance should be, from the best source that there is; None, with a finding, if
        what was given cannot be.

        Args:
            k: drafts a step; 0 if none was counted.
        """
        wanted = self.options.expect
        if wanted is not None:
            # What was watched was other text each time, and is no more than a figure.
            same = (
                wanted.measured and wanted.prompts != "" and wanted.prompts == self.so_far.prompts
            )
            try:
                rates = wanted.for_positions(k or len(HEALTHY))
            except ValueError:
                if k:
                    self._cannot_be_expected(wanted, k)
                return None
            return Expected(rates, wanted.source, same_text=same)
        published = None if known is None else known.rates(k or len(HEALTHY), KINDS)
        if published is not None and known is not None:
            return Expected(published, f"published for {known.name}")
        return Expected(HEALTHY, HEALTHY_SOURCE)

    def _cannot_be_expected(self, wanted: Given, k: int) -> None:
        self.found.append(
            Finding(
                "diagnose-expectation",
                f"{wanted.source}: the server drafts {k} a step, and with as many an acceptance "
                f"length is 1 to {k + 1}",
                f"say of how many drafts it is, as in `--expect {wanted.length:g}@"
                f"{math.ceil(wanted.length) - 1}`, or give rates by position",
                Evidence("/metrics", "drafts a step", str(k)),
            )
        )

    def _to_judge(self, known: Drafter | None) -> Expected | None:
        """What to hold acceptance against; None, with a finding, where there is no more than a
        healthy drafter of another target."""
        has_figures = known is not None and bool(known.figures)
        if self.options.expect is not None or has_figures:
            return self.so_far.expected
        drafter = self.so_far.drafter
        said = (
            f"no acceptance was published for {drafter}"
            if drafter
            else ("which drafter the server runs was not said")
        )
        self.found.append(
            Finding(
                "diagnose-none-published",
                f"{said}: acceptance is compared with that of a healthy drafter of another target",
                "name it with --drafter, or give your own measurement with --expect",
            )
        )
        return None

    def _compare(self, model: Model, record: drive.Record) -> None:
        """The same prompts without speculation."""
        options = self.options
        other = Server(options.without or "", options.timeout, "--without")
        served = other.models()
        page = read_page(other.metrics())
        # By its name, or else by what it was loaded from.
        name = next((m.name for m in served if m.name == model.name), "") or next(
            (m.name for m in served if model.root and m.root == model.root), ""
        )
        if not name:
            names = ", ".join(m.name for m in served) or "none"
            self._not_compared(
                f"{other.url} has no model {model.name!r}; it has {names}",
                "give `--without` a server of the same model, under the same name "
                f"(`--served-model-name {model.name}`)",
            )
            return
        if not page.is_vllm:
            self._not_compared(
                f"{other.url} has no metrics of vLLM, which time the steps",
                "give `--without` a vLLM server, and start it without --disable-log-stats",
            )
            return
        counted_as = name if name in page.models else None
        if speculates(page, counted_as):
            raise ServerError(
                f"{other.url} speculates, too: it has counters of drafts",
                "give `--without` a server that was started without --speculative-config",
            )
        prompts, tokens = self._prompts(Server(options.url, options.timeout), model)
        without = drive.drive(
            other,
            name,
            prompts,
            tokens=tokens,
            counted_as=counted_as,
            progress=self.progress,
        )
        if not without.foreign_requests and not without.stopped:
            self.so_far = replace(self.so_far, speed_without=drive.speed(without.parts))
        fast, slow = self.so_far.speed, self.so_far.speed_without
        for url, one, speed in (
            (self.so_far.url, record, fast),
            (other.url, without, slow),
        ):
            if one.stopped:
                self.found.append(_no_answer(one.stopped, url))
            elif one.foreign_requests:
                self._not_compared(
                    f"requests of others ran on {url} meanwhile, and the latencies are those of "
                    "everybody",
                    "run it while nobody else uses either server",
                )
            elif speed is None:
                self._not_compared(
                    f"{url} does not time its tokens, or in a way that cannot be",
                    "give the two vLLM servers themselves: some gateways drop metrics",
                )
        if fast and slow and fast < slow:
            self.found.append(
                Finding(
                    "diagnose-slower",
                    f"{fast:.1f} tokens a second with speculation and {slow:.1f} without: "
                    f"{fast / slow:.2f} times",
                    f"vllm-kimi-eagle3 plan --url {options.url} --without {options.without}",
                    Evidence("/metrics", "tokens a second of one request", f"{fast:.1f}"),
                )
            )

    def _not_compared(self, fact: str, fix: str) -> None:
        self.found.append(
            Finding(
                "diagnose-not-compared", fact, fix, Evidence("/metrics", "tokens a second", "none")
            )
        )


def speculates(page: Page, model: str | None = None) -> bool:
    """Whether there are counters of drafts of a model, of any for None."""
    names = {DRAFTS, DRAFT_TOKENS, ACCEPTED}
    return any(e.positions or names & e.values.keys() for e in page.of_model(model).values())


def _context(parts: Sequence[Part]) -> float | None:
    known = [p.prompt_tokens + p.answered / 2 for p in parts if p.prompt_tokens is not None]
    return fmean(known) if known else None


def _no_answer(error: ServerError, url: str) -> Finding:
    return Finding("diagnose-no-answer", error.fact, error.fix, Evidence(key=url))


def _lacks(missing: Sequence[str]) -> Finding:
    return Finding(
        "diagnose-counters-missing",
        "the server speculates and lacks " + ", ".join(f"vllm:{name}" for name in missing),
        "give `--url` the vLLM server itself: some gateways drop metrics",
        Evidence("/metrics", f"vllm:{missing[0]}_total", "absent"),
    )


def _impossible(said: Sequence[str]) -> list[Finding]:
    if not said:
        return []
    more = f", and {len(said) - 3} more" if len(said) > 3 else ""
    return [
        Finding(
            "diagnose-counters-impossible",
            f"numbers that cannot be were left out: {'; '.join(said[:3])}{more}",
            "give `--url` one vLLM server, and not a proxy that adds servers up",
            Evidence("/metrics", "left out", str(len(said))),
        )
    ]


def _in_words(known: Drafter | None, drafter: str) -> str:
    """What was published of a drafter, in a line."""
    if not drafter:
        return ""
    if known is None or not known.figures:
        note = f"; {known.note}" if known is not None and known.note else ""
        return f"none published{note}"
    shown = ", ".join(f"{f.text} {f.length:.2f}" for f in known.figures[:5])
    more = f" and {len(known.figures) - 5} more" if len(known.figures) > 5 else ""
    first = known.figures[0]
    note = f"; {known.note}" if known.note else ""
    return f"{shown}{more} tokens a step ({first.engine}, k = {first.k}, {first.source}){note}"
