# SPDX-License-Identifier: Apache-2.0
"""Are the keys and values of ``--speculative-config`` those that this release takes?

vLLM makes a pydantic dataclass of them (``config/speculative.py``). Which keys it has, which texts
they take and what it does with others is held against the release's own source. Every finding
says what to write instead, and the last one has the whole option, corrected.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kimi_eagle3.checkpoint.errors import plain, quoted
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity

from . import command_flags
from .command import EXAMPLE, SPECULATIVE, SPECULATIVE_FLAGS, Command
from .facts import Facts, SpeculativeField, key_releases
from .json_text import as_argument
from .runner import runner_of
from .speculative_keys import (
    ALIASES,
    INSTEAD,
    WITH_THE_TARGETS_TOKEN,
    WITHOUT_COUNTERPART,
    plain_name,
    translated_sampling,
)
from .subject import Subject

METHOD = "eagle3"
_SAMPLING = ("rejection_sample_method", "draft_sample_method")
# pydantic takes these for a bool.
_BOOLS = frozenset(["0", "off", "f", "false", "n", "no", "1", "on", "t", "true", "y", "yes"])


def findings(subject: Subject) -> Iterator[Finding]:
    """What ``--speculative-config`` says wrongly on this release."""
    command, facts = subject.command, subject.facts
    given = command.speculative
    if given is None:
        known = SPECULATIVE not in command.spelled and not command.file_unread
        if command.words and known:
            yield _no_speculation(facts)
        return
    if facts is not None and facts.speculative_keys:
        yield from _Keys(given, command, facts, subject.environ).findings()


def _no_speculation(facts: Facts | None) -> Finding:
    return Finding(
        "command-no-speculation",
        "the command has no --speculative-config, and the target runs without a drafter",
        f"add {as_argument(f'--{SPECULATIVE}', EXAMPLE)}",
        Evidence(release=None if facts is None else facts.release or None),
    )


def effective_method(given: Mapping[str, Any]) -> str | None:
    """The method that vLLM takes, by the name of the drafter where ``method`` does not settle it;
    None where it depends on the drafter's config.

    As ``SpeculativeConfig.__post_init__``, "Automatically detect the method".
    """
    method, model = given.get("method"), given.get("model")
    if method in _METHODS_AS_GIVEN or not isinstance(model, str):
        return method if isinstance(method, str) else None
    name = model.lower()
    # In this order: a folder called eagle-3 is EAGLE-1 to vLLM.
    for part, found in (("eagle-", "eagle"), ("eagle3", METHOD)):
        if part in name:
            return found
    return method if isinstance(method, str) else None


def is_eagle3(given: Mapping[str, Any] | None) -> bool:
    """True if a ``--speculative-config`` asks for EAGLE-3, by name or as vLLM guesses it."""
    return effective_method(given or {}) == METHOD


# Methods that the drafter's name does not override.
_METHODS_AS_GIVEN = (
    "eagle", METHOD, "dflash", "dspark", "ngram", "ngram_gpu", "suffix", "extract_hidden_states",
    "custom_class",
)  # fmt: skip


@dataclass
class _Said:
    """One thing to say of a key.

    Attributes:
        kind: the kind of finding.
        fact: what is wrong.
        key: the key that it is about; None for one that is missing.
        new: what stands in the key's place, corrected; None leaves it as it is.
        fix: what to do, if ``new`` does not say it.
        rated: how bad, where the kind does not say it.
    """

    kind: str
    fact: str
    key: str | None = None
    new: Mapping[str, Any] | None = None
    fix: str = ""
    rated: Severity | None = None


@dataclass
class _Keys:
    given: Mapping[str, Any]
    command: Command
    facts: Facts
    environ: Mapping[str, str]
    said: list[_Said] = field(default_factory=list)
    corrected: dict[str, Any] = field(default_factory=dict)

    def findings(self) -> Iterator[Finding]:
        for key, value in self.given.items():
            said = self._key(key, value)
            if said is not None:
                self.said.append(said)
            elif self._said_with_the_run(key, value):
                continue
            if said is None or said.new is None:
                self.corrected.setdefault(key, value)
            else:
                for name, new in said.new.items():
                    if name not in self.given:
                        self.corrected.setdefault(name, new)
                    elif name == key:
                        self.corrected[name] = new
        if all(problem.id != "command-json-replaced" for problem in self.command.problems):
            self.said += self._method()
            self.said += self._missing()
        self.said += self._together()
        whole = self._whole()
        last = max((i for i, s in enumerate(self.said) if s.new is not None), default=-1)
        for i, said in enumerate(self.said[:_MOST_SAID]):
            fix = said.fix or self._local_fix(said)
            if i == min(last, _MOST_SAID - 1) and whole:
                fix = "; ".join(part for part in (fix, f"in whole: {whole}") if part)
            yield Finding(said.kind, said.fact, fix, self._evidence(said), said.rated)

    @property
    def _vllm(self) -> str:
        return f"vLLM {self.facts.release}" if self.facts.release else "this vLLM"

    @property
    def _flag(self) -> str:
        return self.command.flag(SPECULATIVE)

    def _evidence(self, said: _Said) -> Evidence:
        value = None
        if said.key is not None and said.key in self.given:
            value = quoted(self.given[said.key])
        key = None if said.key is None else plain(said.key[:120])
        return Evidence(self._flag, key, value, self.facts.release or None)

    def _whole(self) -> str:
        if any(name in self.command.options for name in SPECULATIVE_FLAGS):
            return ""  # Keys and flags together: there is no one option to paste.
        return as_argument(self._flag, self.corrected)

    def _local_fix(self, said: _Said) -> str:
        if said.new is None:
            return ""
        if not said.new:
            return f"leave out {_name(said.key or '')}"
        written = ", ".join(f"{_name(k)}: {_json(v)}" for k, v in said.new.items())
        return f"{'add' if said.key is None else 'write'} {written}"

    # One key.

    def _key(self, key: str, value: Any) -> _Said | None:
        known = self.facts.speculative_keys.get(key)
        if key == "tensor_parallel_size" and known is not None and value is not None:
            return _Said(
                "command-speculative-key",
                f'{self._vllm} refuses "tensor_parallel_size" in {self._flag}: the drafter runs '
                "with the target's",
                key,
                {},
            )
        if known is None:
            return self._unknown(key, value)
        if known.own:
            return None  # vLLM sets it over whatever was given.
        return self._value(key, value, known) or self._ignored(key, value)

    def _unknown(self, key: str, value: Any) -> _Said:
        name = plain_name(key)
        new, why = self._meant(name, value)
        fact = f"{self._vllm} has no key {_name(key)} in {self._flag}"
        rated = None
        if not self.facts.refuses_unknown_keys:
            fact += " and drops it without a word"
            rated = Severity.WRONG
        fix = ""
        if why and not new:
            fix = f"leave out {_name(key)}: {why}"
        elif why:
            fact += f"; {why}"
        return _Said("command-speculative-key", fact, key, new, fix, rated)

    def _meant(self, name: str, value: Any) -> tuple[dict[str, Any], str]:
        """The keys that say the same here, and why it is said so; none if nothing does."""
        fields = self.facts.speculative_fields
        meant = ALIASES.get(name, name)
        if name == WITH_THE_TARGETS_TOKEN:
            steps = value - 1 if isinstance(value, int) and value > 1 else value
            why = "it counts the target's own token, and num_speculative_tokens does not"
            return {"num_speculative_tokens": steps}, why
        if name in WITHOUT_COUNTERPART:
            return {}, WITHOUT_COUNTERPART[name]
        if meant in _SAMPLING:
            translated = translated_sampling(
                meant, value, fields.get(_SAMPLING[0]), fields.get(_SAMPLING[1])
            )
            if translated is not None:
                return self._read_here(*translated)
        if meant in fields:
            return {meant: self._taken(meant, value)}, ""
        releases = key_releases(meant)
        if releases:
            what = "it" if meant == name else _name(meant)
            came = self.facts.before(releases[0])
            when = (
                f"{what} came with {releases[0]}" if came else f"{what} went after {releases[-1]}"
            )
            return {}, ", and ".join(part for part in (when, INSTEAD.get(meant, "")) if part)
        flag = meant.replace("_", "-")
        if flag in self.facts.flags:
            return {}, f"it belongs on the command line, as --{flag}"
        close = difflib.get_close_matches(name, fields, n=1, cutoff=0.75)
        return ({close[0]: self._taken(close[0], value)}, "") if close else ({}, "")

    def _taken(self, key: str, value: Any) -> Any:
        """The value that the key takes in place of this one; the same if that is not clear."""
        choices = self.facts.speculative_keys[key].choices
        if choices is None or not isinstance(value, str) or value in choices:
            return value
        if key == "method" and plain_name(value).startswith(("eagle3", "eagle_3")):
            return METHOD
        lower = {choice.lower().replace("-", "_"): choice for choice in choices}
        written = value.lower().replace("-", "_")[:80]
        close = difflib.get_close_matches(written, lower, n=1, cutoff=0.75)
        return lower[close[0]] if close else value

    # One value.

    def _value(self, key: str, value: Any, known: SpeculativeField) -> _Said | None:
        if key == "attention_backend" and value is not None:
            return self._backend(key, value)
        if known.choices is not None and isinstance(value, str):
            if value in known.choices:
                return None
            return self._choice(key, value, known.choices)
        wanted = _wanted(value, known)
        if wanted:
            return _Said(
                "command-speculative-value",
                f"{_name(key)} in {self._flag} is {quoted(value)}, and must be {wanted}",
                key,
                self._default_of(key),
            )
        if key == "num_speculative_tokens" and value is True:
            return _Said(
                "command-speculative-value",
                f"{_name(key)} in {self._flag} is true, which counts as 1",
                key,
                {key: 1},
                rated=Severity.WRONG,
            )
        number = command_flags.number(str(int(value) if isinstance(value, bool) else value))
        if known.least is not None and number is not None and number < known.least:
            return _Said(
                "command-speculative-value",
                f"{_name(key)} in {self._flag} is {quoted(value)}, and must be at least "
                f"{known.least}",
                key,
                self._default_of(key),
            )
        return None

    def _said_with_the_run(self, key: str, value: Any) -> bool:
        """True for what limits.py says of how the pair is run, which is to leave the key out."""
        target = self.command.integer("tensor-parallel-size") or 1
        size = command_flags.integer(str(value)) if key == "draft_tensor_parallel_size" else None
        return size not in (None, target)

    def _default_of(self, key: str) -> dict[str, Any]:
        """What to write where a value is of no use; nothing for the keys that have a default."""
        return {key: EXAMPLE[key]} if key in EXAMPLE else {}

    def _choice(self, key: str, value: str, choices: tuple[str, ...]) -> _Said:
        fields = self.facts.speculative_fields
        new: dict[str, Any] | None = None
        why = ""
        if key in _SAMPLING:
            translated = translated_sampling(key, value, *(fields.get(k) for k in _SAMPLING))
            if translated is not None:
                new, why = self._read_here(*translated)
        fact = f"{self._vllm} does not take {quoted(value)} for {_name(key)} in {self._flag}"
        if new is None:
            taken = self._taken(key, value)
            new = {key: taken} if taken != value else self._default_of(key)
            if not new or len(choices) <= _FEW:
                fact += f", but {command_flags.listed(choices, _MANY)}"
        elif why and key not in new:
            fact += f": {why}"
        return _Said("command-speculative-value", fact, key, new)

    def _read_here(self, new: dict[str, Any], why: str) -> tuple[dict[str, Any], str]:
        """A translation, or none if nothing would read it."""
        if any(self._ignored(key, value) is not None for key, value in new.items()):
            return {}, "the V1 runner has greedy drafts alone there"
        return new, why

    def _backend(self, key: str, value: Any) -> _Said | None:
        names = self.facts.attention_backends
        text = value.upper() if isinstance(value, str) else ""
        if not names or text in (*names, "AUTO"):
            return None
        close = difflib.get_close_matches(text[:80], names, n=1)
        return _Said(
            "command-speculative-value",
            f"{_name(key)} in {self._flag} is {quoted(value)}, and {self._vllm} has no such "
            "attention back-end",
            key,
            {key: close[0]} if close else {},
        )

    def _ignored(self, key: str, value: Any) -> _Said | None:
        """A key that this release takes, and that nothing reads as Kimi is run on it.

        Before 0.33 ``disable_padded_drafter_batch`` turns asynchronous scheduling off on the V2
        runner as well (``VllmConfig.__post_init__``), which run.py says.
        """
        before = self.facts.before
        v1 = runner_of(self.command, self.facts, self.environ) == "V1"
        reader = ""
        if key == "disable_by_batch_size" and value is not None:
            reader = "no code of the V1 engine"
        elif (
            (v1 and key == "rejection_sample_method" and value == "probabilistic")
            or (v1 and key == "rejection_sample_method" and value == "synthetic" and before("0.20"))
            or (v1 and key == "draft_sample_method" and value == "gumbel")
        ):
            reader = "only the V2 runner"
        elif not v1 and is_true(value) and (
            (key == "use_local_argmax_reduction" and before("0.25"))
            or (key == "disable_padded_drafter_batch" and not before("0.33"))
        ):  # fmt: skip
            reader = "only the V1 runner"
        if not reader:
            return None
        return _Said(
            "command-speculative-ignored",
            f"{_name(key)} in {self._flag} does nothing on {self._vllm}: {reader} reads it",
            key,
            {},
        )

    # The keys together.

    def _method(self) -> Iterator[_Said]:
        given = self.corrected
        method, model = given.get("method"), given.get("model")
        effective = effective_method(given)
        if effective == METHOD or (method is None and not isinstance(model, str)):
            return
        if method is None:
            taken = "eagle, which is EAGLE-1, by its name" if effective else self._without_method()
            fact = f'"method" is missing in {self._flag}, and {self._vllm} takes the drafter for '
            given["method"] = METHOD
            rated = Severity.WRONG if effective else None
            yield _Said("command-method", fact + taken, None, {"method": METHOD}, rated=rated)
        elif method == "eagle" and _looks_like_eagle3(model):
            given["method"] = METHOD
            yield _Said(
                "command-method",
                f'"method" in {self._flag} is eagle, which is EAGLE-1, and the drafter '
                f"{quoted(model)} is EAGLE-3 by its name",
                "method",
                {"method": METHOD},
                rated=Severity.WRONG,
            )
        else:
            yield _Said(
                "command-other-method",
                f"the method is {quoted(method)}, and check knows EAGLE-3 alone",
                "method",
                fix=f'for an EAGLE-3 drafter write "method": "{METHOD}"',
            )

    def _without_method(self) -> str:
        # 0.17.1 was the first to fall back on draft_model.
        if self.facts.before("0.17"):
            return "one of unknown method, and stops"
        return "a language model of its own, draft_model"

    def _missing(self) -> Iterator[_Said]:
        given = self.corrected
        if given.setdefault("method", METHOD) not in (METHOD, "eagle"):
            return
        if given.get("model") is None:
            given["model"] = EXAMPLE["model"]
            yield _Said(
                "command-no-drafter",
                f'"model" is missing in {self._flag}: no drafter is named',
                None,
                {"model": EXAMPLE["model"]},
            )
        if "num_speculative_tokens" not in given:
            given["num_speculative_tokens"] = EXAMPLE["num_speculative_tokens"]
            yield _Said(
                "command-speculative-missing",
                f'"num_speculative_tokens" is missing in {self._flag}',
                None,
                {"num_speculative_tokens": EXAMPLE["num_speculative_tokens"]},
            )

    def _for_other_methods(self) -> Iterator[tuple[str, str]]:
        """Keys that SpeculativeConfig refuses with another method, and that method."""
        yield "use_heterogeneous_vocab", "draft_model"
        yield "index_share_for_mtp_iteration", "mtp"
        yield "dspark_draft_topk", "dspark"
        yield "xpress_topc", "XPress"
        if self.facts.before("0.30"):
            yield "enable_adaptive_verification", "dspark"

    def _together(self) -> Iterator[_Said]:
        """Keys that vLLM refuses beside each other, or with this method."""
        given, keys = self.corrected, self.facts.speculative_keys
        value = "command-speculative-value"
        synthetic = given.get("rejection_sample_method") == "synthetic"
        if synthetic:
            yield _Said(
                "command-synthetic",
                '"rejection_sample_method": "synthetic" accepts drafts at random: the text that '
                "is generated is not the target's",
                "rejection_sample_method",
                fix="leave it out, except to measure speed",
            )
        rates = [k for k in _SYNTHETIC if given.get(k) is not None and k in keys]
        if len(_SYNTHETIC & keys.keys()) == 2:  # From 0.20 on.
            names = " and ".join(_name(k) for k in sorted(rates))
            if rates and not synthetic:
                for key in rates:
                    del given[key]
                yield _Said(
                    value,
                    f'{names} {"is" if len(rates) == 1 else "are"} for "rejection_sample_method": '
                    f'"synthetic" alone, and {self._vllm} refuses to start',
                    rates[0],
                    {},
                    f"leave out {names}",
                )
            elif synthetic and len(rates) != 1:
                yield _Said(
                    value,
                    '"rejection_sample_method": "synthetic" wants one of '
                    f"{' and '.join(_name(k) for k in sorted(_SYNTHETIC))}, and has "
                    f"{names or 'neither'}",
                    "rejection_sample_method",
                    fix="give one of them",
                )
        for key, method in self._for_other_methods():
            set_here = key in keys and given.get(key) not in (None, False)
            if set_here and given.get("method") == METHOD:
                del given[key]
                yield _Said(
                    value,
                    f"{_name(key)} in {self._flag} is for the method {method} alone, and "
                    f"{self._vllm} refuses it with {METHOD}",
                    key,
                    {},
                )
        tokens = command_flags.integer(str(given.get("num_speculative_tokens")))
        if given.get("rejection_sample_method") == "fly" and tokens == 1:
            yield _Said(
                value,
                '"rejection_sample_method": "fly" wants at least 2 "num_speculative_tokens"',
                "num_speculative_tokens",
                {"num_speculative_tokens": 2},
            )


_MOST_SAID = 30
# So many choices are listed beside a correction, and so many without one.
_FEW, _MANY = 6, 30
_SYNTHETIC = frozenset({"synthetic_acceptance_rates", "synthetic_acceptance_length"})


def _looks_like_eagle3(name: Any) -> bool:
    text = name.lower() if isinstance(name, str) else ""
    return any(part in text for part in ("eagle3", "eagle-3", "eagle_3"))


def _name(key: str) -> str:
    """A key in a message, as JSON has it."""
    return f'"{plain(key[:120])}"'


def _json(value: Any) -> str:
    return as_argument("", value).strip().strip("'") or "..."


def _wanted(value: Any, known: SpeculativeField) -> str:
    """What pydantic wants in place of ``value``; "" if it takes it.

    As pydantic's default, which takes ``"3"`` and ``3.0`` for 3, and ``"yes"`` for true.
    """
    types = set(known.types)
    if value is None:
        return "" if "None" in types else _IN_WORDS.get(known.types[0], "given")
    taken = {
        "bool": is_true(value) or value in (False, 0) or str(value).lower() in _BOOLS,
        "int": _is_whole(value),
        "float": isinstance(value, bool) or command_flags.number(str(value)) is not None,
        "str": isinstance(value, str),
        "literal": isinstance(value, str),
        "list": isinstance(value, list),
        "dict": isinstance(value, Mapping),
        "dataclass": isinstance(value, Mapping),
        "None": False,
    }
    if any(taken.get(name, True) for name in types):
        return ""
    return _IN_WORDS.get(known.types[0], "something else")


_IN_WORDS = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text",
    "literal": "a text", "list": "a list", "dict": "an object", "dataclass": "an object",
}  # fmt: skip


def is_true(value: Any) -> bool:
    """True for what pydantic takes as true."""
    return value is True or value == 1 or str(value).lower() in ("1", "on", "t", "true", "y", "yes")


def _is_whole(value: Any) -> bool:
    if isinstance(value, str):
        return command_flags.integer(value) is not None
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
