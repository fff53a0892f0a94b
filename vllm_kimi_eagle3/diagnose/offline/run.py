# SPDX-License-Identifier: Apache-2.0
"""The command ``diagnose --offline``: read the pair, load the target once, score, say what to set.

The target runs in a process of its own (``capture.py``), so all of its memory is free again when
the drafter is scored, and nothing of vLLM is imported here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.acceptance.published import find
from vllm_kimi_eagle3.check.command import Command, parse
from vllm_kimi_eagle3.check.facts import Facts, facts_of
from vllm_kimi_eagle3.check.length import derived_length
from vllm_kimi_eagle3.check.spelling import is_eagle3
from vllm_kimi_eagle3.checkpoint.drafter import TensorsError
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.diagnose import drive
from vllm_kimi_eagle3.diagnose.report import sort, stopped
from vllm_kimi_eagle3.diagnose.run import OptionError
from vllm_kimi_eagle3.diagnose.signature import LOOPING_TEXTS, LOOPS, MIN_BYTES
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity
from vllm_kimi_eagle3.host import find_host

from . import setting
from .capture import ERROR, RESULT, Job
from .hypotheses import Reading, described, layers_needed, one_change
from .memory import Memory, drafter_memory
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


@dataclass(frozen=True)
class Options:
    """What the command line says; the attributes are named as its flags."""

    words: tuple[str, ...] = ()
    prompts: Path | None = None
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
        elif word != "--offline":
            others.append(word)
    options = Options(**given, words=tuple(others))
    if options.help:
        return options
    if options.captured is not None and options.keep is not None:
        raise OptionError("--captured scores what --keep left: leave one out")
    if options.captured is not None and not (options.captured / RESULT).is_file():
        raise OptionError(f"--captured {options.captured}: it holds no {RESULT} of an earlier run")
    if options.write is not None and options.write.exists() and any(options.write.iterdir()):
        raise OptionError(f"--write {options.write}: it is not empty")
    if options.prompts is not None:
        try:
            drive.read_prompts(options.prompts)
        except ValueError as error:
            raise OptionError(str(error)) from None
    return options


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
    if not isinstance(k, int) or not 1 <= k <= 64:
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
        work.found.append(stopped(error))
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

        def longest(text: Mapping[str, Any]) -> int | None:
            given = command.integer("max-model-len")
            return derived_length(text, asked.facts) if given is None else given

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
        )

    def _job(self, subject: Subject, folder: Path) -> Job:
        options, asked = self.options, self.asked
        layers, final = layers_needed(subject.now, subject.choices)
        prompts = (
            drive.shipped_prompts()
            if options.prompts is None
            else drive.read_prompts(options.prompts)
        )
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
        folder.mkdir(parents=True, exist_ok=True)
        statement = self.memory.statement(folder)
        self.so_far = replace(self.so_far, memory=statement)
        self.progress("")
        print(f"vllm-kimi-eagle3: {statement}", file=sys.stderr, flush=True)
        if (problem := self.memory.too_much(folder, "--budget")) is not None:
            self.found.append(problem)
            return False
        for old in (RESULT, ERROR):
            (folder / old).unlink(missing_ok=True)
        job = self._job(subject, folder)
        file = folder / "job.json"
        job.write(file)
        command = [sys.executable, "-m", "vllm_kimi_eagle3.diagnose.offline.capture", str(file)]
        # The target's own log goes to where ours does: a load of half an hour says how far it is.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
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
        captured = json.loads((folder / RESULT).read_text(encoding="utf-8"))
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
        device = device_for(self.memory.scoring, self.options.device or None)
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
            done = write_copy(subject, self.so_far.best.score.reading, self.options.write)
            self.so_far = replace(self.so_far, written=f"{self.options.write}: {done}")

    def _describe(self, captured: Mapping[str, Any], texts: Sequence[Any], device: str) -> None:
        kinds = Counter(text.kind for text in texts if text.kind)
        said = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        answered = sum(len(text.places(self.asked.k)) for text in texts)
        how = (
            f"{len(texts)} greedy answers of the target{f' ({said})' if said else ''}, "
            f"{captured['tokens']:,} tokens with their prompts, of which drafts begin at "
            f"{answered:,}; scored in float32 on {device}"
        )
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
        rows = sorted(map(Row.of, scores), key=lambda row: -row.accepted.length.value)
        now, best = (
            next(row for row in rows if row.score.reading.key == key)
            for key in (subject.now.key, chosen.reading.key)
        )
        tried = len(rows) - 1
        found = gain(best.score, now.score, tried)
        if not found.significant:
            best, found = now, Gain(0.0, 0.0, 0.0, len(now.score.steps))
        known = find(self.asked.drafter)
        rates = None if known is None else known.rates(self.asked.k, self.so_far.kinds)
        self.so_far = replace(
            self.so_far,
            rows=rows,
            now=now,
            best=best,
            gain=found,
            next_best=_next_best(rows, now, tried) if best is now else None,
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
            self.found += setting.findings(subject, best.score.reading, better, evidence)
        self._judge_level(best)
        self._judge_answers(answers)

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
    have = [
        frozenset(key for key, states in text.load().items() if states.shape[-1] == hidden_size)
        for text in texts
    ]
    return frozenset.intersection(*have) if have else frozenset()


def _next_best(rows: Sequence[Row], now: Row, tried: int) -> Gain | None:
    """What the best of the other readings saves over ``now``."""
    other = next((row for row in rows if row is not now), None)
    return None if other is None else gain(other.score, now.score, tried)


def _element_bytes(command: Command) -> int:
    """Bytes of a number of a hidden state: four where float32 is asked for, else two."""
    asked = command.text("dtype") or "auto"
    return 4 if asked in ("float32", "float") else 2


def _engine_failed(folder: Path, code: int) -> Finding:
    said = f"its process ended with code {code}"
    try:
        error = json.loads((folder / ERROR).read_text(encoding="utf-8"))
        first = str(error["message"]).strip().splitlines() or [""]
        said = f"{error['type']}: {first[0][:300]}"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return Finding(
        "diagnose-offline-engine",
        f"the target could not be run: {said}",
        "see its log above, and give the flags that `vllm serve` needs for it",
        Evidence(key="capture", value=said),
    )


def main(words: Sequence[str]) -> int:
    """The command. Returns the exit code."""
    from vllm_kimi_eagle3 import cli
    from vllm_kimi_eagle3.findings.lines import printable

    try:
        options = options_of(words)
        if options.help or not words:
            print(USAGE.rstrip(), flush=True)
            return 0 if options.help else cli.EXIT_USAGE
        asked = asked_of(options)
    except OptionError as error:
        message = printable(str(error))
        print(f"{cli.PROGRAM} diagnose --offline: {message}", file=sys.stderr)
        return cli.EXIT_USAGE
    progress = cli._Progress()
    report = diagnose(options, asked, progress)
    progress.end()
    if options.json:
        return cli._show(json.dumps(report.as_json(), indent=2), report.exit_code)
    return cli._show(report.as_text(**cli._look()), report.exit_code)
