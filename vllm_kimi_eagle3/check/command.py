# SPDX-License-Identifier: Apache-2.0
"""The command that ``vllm serve`` gets, read as the vLLM that is to run it would read it.

vLLM's parser (``utils/argparse_utils.py``) is argparse with a layer on top. :mod:`.command_words`
follows the layer, and this module argparse, but neither stops at the first error: what cannot be
read is a finding, and the rest is read.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_kimi_eagle3.checkpoint.errors import plain, quoted
from vllm_kimi_eagle3.findings import Finding, Severity
from vllm_kimi_eagle3.host import SUPPORTED

from . import command_flags, shell
from .command_flags import Flags, Match, listed
from .command_words import SERVER_MODULE, Problems, Word, Words
from .facts import Facts, Flag, SpeculativeField, facts_for, flag_releases
from .json_text import Broken, as_argument, read_json, repaired
from .speculative_keys import ALIASES, converted, plain_name

SPECULATIVE = "speculative-config"
# The flags that set one key of --speculative-config each, and the key; from 0.22.1 on.
SPECULATIVE_FLAGS = {
    "spec-method": "method",
    "spec-model": "model",
    "spec-tokens": "num_speculative_tokens",
}
EXAMPLE = {"method": "eagle3", "model": "DRAFTER", "num_speculative_tokens": 3}

_OPTIMIZATION_LEVELS = ("0", "1", "2", "3")  # OptimizationLevel, on every release.
# No release runs on fewer ranks than one; 0.23 was the first whose config says so.
_ALWAYS: Mapping[str, dict[str, float]] = {
    "tensor-parallel-size": {"ge": 1},
    "pipeline-parallel-size": {"ge": 1},
}


def _graphs(value: Any) -> dict[str, Any]:
    return {"cudagraph_mode": "FULL" if value is True else "PIECEWISE"}


# Keys of older releases than the supported ones, and how their values are written since.
_KEYS_THAT_WENT: Mapping[str, Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "compilation-config": {
        "full_cuda_graph": _graphs,
        "use_cudagraph": lambda value: {} if value else {"cudagraph_mode": "NONE"},
        "level": lambda value: {"mode": value},
        "use_inductor": lambda value: {} if value else {"backend": "eager"},
    }
}

# How many words flags take, where that is not one.
_MOST_TYPED = 120  # Characters of an option that a message shows.
_MOST_WORDS = {"switch": 0, "set": 0, "list": shell.MOST_WORDS, "integers": shell.MOST_WORDS}


@dataclass(frozen=True)
class Command:
    """What ``vllm serve`` gets.

    Attributes:
        words: its arguments, without what stands in front of them.
        model: the target, as the user named it; None if the command names none.
        options: by canonical name (``tensor-parallel-size``): a text, a number, True or False for
            a switch, a mapping for JSON and for options with dots, a list of texts where a flag
            takes several. What could not be read is not there.
        spelled: how the user wrote each option: ``-tp``; of those that could not be read too.
        environ: the assignments in front of the command.
        problems: what is wrong with it.
        file_unread: it names a config file whose flags are not known.
        speculative_keys: what the keys of ``--speculative-config`` take, where that is known.
        keys_take_dashes: dashes in the keys of ``--speculative-config`` stand for underscores.
    """

    words: tuple[str, ...] = ()
    model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Finding, ...] = ()
    file_unread: bool = False
    speculative_keys: Mapping[str, SpeculativeField] = field(default_factory=dict)
    keys_take_dashes: bool = False

    def text(self, name: str) -> str | None:
        """The value of an option as text; None if it is not given or no single value."""
        value = self.options.get(name)
        if value is None or isinstance(value, (bool, Mapping, list)):
            return None
        return str(value)

    def integer(self, name: str) -> int | None:
        """The value of an option as a whole number; None if it is not given or is none."""
        text = self.text(name)
        return None if text is None else command_flags.integer(text)

    def number(self, name: str) -> float | None:
        """The value of an option as a number; None if it is not given or is none."""
        text = self.text(name)
        return None if text is None else command_flags.number(text)

    def switch(self, name: str) -> bool | None:
        """What a switch is set to; None if it is not given."""
        value = self.options.get(name)
        return value if isinstance(value, bool) else None

    def object(self, name: str) -> Mapping[str, Any] | None:
        """The value of an option that takes JSON; None if it is not given or no object."""
        value = self.options.get(name)
        return value if isinstance(value, Mapping) else None

    def flag(self, name: str) -> str:
        """An option as the user wrote it, or its long name: for messages."""
        return self.spelled.get(name, f"--{name}")

    @property
    def unreadable(self) -> frozenset[str]:
        """The options that are given a value that vLLM does not take, by canonical name."""
        return frozenset(self.spelled.keys() - self.options.keys())

    @property
    def speculative(self) -> Mapping[str, Any] | None:
        """The keys of ``--speculative-config``, with what ``--spec-method`` and its like add;
        None if there is no speculation, or its JSON cannot be read.

        Values are as pydantic converts them: ``"3"`` is 3."""
        given = self.object(SPECULATIVE)
        if given is None and SPECULATIVE in self.spelled:
            return None
        added = {
            key: self.options[name]
            for name, key in SPECULATIVE_FLAGS.items()
            if self.options.get(name) is not None
        }
        if given is None and not added:
            return None
        merged = {**(given or {}), **added}
        if self.keys_take_dashes:
            merged = {key.replace("-", "_"): value for key, value in merged.items()}
        keys = self.speculative_keys
        return {k: converted(v, keys[k]) if k in keys else v for k, v in merged.items()}


def parse(command: str | Sequence[str], facts: Facts | None = None) -> Command:
    """Read a command. Never raises: what is wrong with it is in ``problems``.

    Args:
        command: one text, as pasted, or words, as a shell passes them on; ``vllm serve`` in front
            may be missing.
        facts: the vLLM that is to run it; None if that is not known: then flags are read as the
            newest supported release reads them, and those that it lacks are not judged.
    """
    return _Reader(command, facts).read()


class _Reader:
    """Reads the flags of a command, as argparse does, past the first error."""

    def __init__(self, command: str | Sequence[str], facts: Facts | None) -> None:
        self._facts = facts
        self._known = facts is not None and bool(facts.flags)
        self._flags = Flags(facts if facts and facts.flags else facts_for(SUPPORTED[-1]))
        self._problems = Problems(facts)
        self._given = Words(command, facts, self._flags, self._problems)
        self._options: dict[str, Any] = {}
        self._spelled: dict[str, str] = {}
        self._typed: dict[str, str] = {}  # An option's words, for a message.
        self._origin: dict[str, str | None] = {}  # The config file that an option is from.
        self._positionals: list[Word] = []

    def read(self) -> Command:
        if self._given.words:
            self._parse(self._given.words)
            self._judge_words()
            self._judge_speculative_flags()
            self._judge_json_keys()
        return Command(
            words=self._given.arguments,
            model=self._model(),
            options=self._options,
            spelled=self._spelled,
            environ=self._given.environ,
            problems=tuple(self._problems.found),
            file_unread=self._given.file_unread,
            speculative_keys={} if self._facts is None else self._facts.speculative_keys,
            keys_take_dashes=self._facts is not None and self._facts.dashes_in_keys,
        )

    def _model(self) -> str | None:
        if self._positionals and self._given.serve:
            return self._positionals[0].text
        model = self._options.get("model")
        return model if isinstance(model, str) else None

    def _parse(self, words: list[Word]) -> None:
        """As argparse: a flag takes the words behind it that are none."""
        at, flags_over = 0, False
        while at < len(words):
            word = words[at]
            at += 1
            if word.given is None and (flags_over or not self._flags.is_flag(word.text)):
                self._positionals.append(word)
                continue
            if word.text == "--":
                flags_over = True
                continue
            name, equals, value = word.text.partition("=")
            match = self._match(word, name)
            if match is not None and match.glued is None and name not in self._flags.spellings:
                name = f"{name} ({match.spelling})"
            behind = at
            while behind < len(words) and self._is_value(words[behind]):
                behind += 1
            if match is None:
                if self._positionals and not equals:
                    at = behind  # What was meant as its value.
            elif word.given is not None:
                self._take_keys(match, name, word)
            elif equals or match.glued is not None:
                given = replace(word, text=value if equals else match.glued or "")
                self._take(match, name if match.glued is None else name[:2], [given], word, True)
            else:
                most = _MOST_WORDS.get(match.flag.value, 1)
                taken = words[at : min(behind, at + most)]
                at += len(taken)
                following = words[at:behind] if self._positionals else []
                if self._take(match, name, taken, word, False, following):
                    at += len(following)

    def _is_value(self, word: Word) -> bool:
        return word.given is None and not self._flags.is_flag(word.text)

    def _match(self, word: Word, name: str) -> Match | None:
        found = self._flags.find(name)
        if len(found) == 1:
            return found[0]
        if found:
            names = sorted({match.spelling for match in found})
            self._problems.add(
                "command-ambiguous-flag",
                f"{quoted(name)} is short for {len(names)} flags of {self._problems.vllm}: "
                + listed(names, 6),
                "write out the one that is meant",
                key=name,
                file=word.file,
            )
        elif self._known and not self._problems.enough:
            fact, fix = self._unknown(name)
            self._problems.add("command-unknown-flag", fact, fix, key=name, file=word.file)
        return None

    def _unknown(self, name: str) -> tuple[str, str]:
        assert self._facts is not None
        fact = f"{self._problems.vllm} has no flag {quoted(name)}"
        plain = name.lstrip("-")
        bare = plain.removeprefix("no-")
        flag = self._flags.by_name.get(bare)
        if flag is not None and flag.name != plain:
            return f"{fact}, since --{bare} is no switch that has an opposite", "leave it out"
        releases = flag_releases(plain) or flag_releases(bare)
        fix = ""
        if releases and self._facts.before(releases[0]):
            fact += f", which came with {releases[0]}"
            fix = f"leave it out, or use vLLM {releases[0]} or newer"
        elif releases:
            fact += f", which vLLM had up to {releases[-1]}"
        key = plain_name(plain)
        if key not in self._facts.speculative_keys and key.startswith(("spec", "draft")):
            key = ALIASES.get(key, key)
        if key in self._facts.speculative_fields:
            return fact, f'put it into --{SPECULATIVE}, as "{key}"'
        meant = self._meant(plain)
        return fact, fix or (f"write {meant} if that is meant" if meant else "leave it out")

    def _meant(self, plain: str) -> str:
        """The flag that was probably meant; "" if none comes to mind."""
        spellings = self._flags.spellings
        stem = re.sub(r"^(?:no-)?(?:enable-|disable-|use-)?", "", plain)
        near = [f"-{plain}"]
        if plain.startswith(("no-", "disable-")):
            near += [f"--no-{stem}", f"--no-enable-{stem}", f"--disable-{stem}"]
        else:
            near += [f"--{stem}", f"--enable-{stem}"]
        for spelling in near:
            if spelling in spellings:
                return spelling
        for spelling in spellings:  # -tp8
            if len(spelling) > 2 and f"-{plain}".startswith(spelling):
                return f"{spelling} {plain[len(spelling) - 1 :]}"
        close = difflib.get_close_matches(plain[:80], self._flags.by_name, n=2, cutoff=0.8)
        return " or ".join(f"--{name}" for name in close)

    def _take(
        self,
        match: Match,
        name: str,
        words: list[Word],
        at: Word,
        explicit: bool,
        following: Sequence[Word] = (),
    ) -> bool:
        """Give a flag its value.

        Args:
            match: the flag.
            name: as the user wrote it, and in full where that is short for it.
            words: its value.
            at: the word that names it.
            explicit: the value stands in the same word.
            following: words that may belong to the value, and to nothing else.

        Returns:
            True if the value cannot be read.
        """
        flag = match.flag
        if flag.value in ("switch", "set"):
            if explicit:
                off = f", or --no-{flag.name}" if flag.value == "switch" else ""
                self._problems.add(
                    "command-value",
                    f"{name} is a switch and takes no value, here {quoted(words[0].text)}",
                    f"write --{flag.name} alone{off}",
                    key=name,
                    value=words[0].text,
                    file=at.file,
                )
            else:
                self._set(flag, name, not match.off, at)
            return False
        if not words and flag.value != "optional":
            self._problems.add(
                "command-value", f"no value follows {name}", "give it", key=name, file=at.file
            )
            return False
        if flag.value == "list":
            self._set(flag, name, [word.text for word in words], at, words)
            return False
        if flag.value == "integers":
            numbers = [self._value(flag, name, word, ()) for word in words]
            if any(isinstance(number, Broken) for number in numbers):
                self._unset(flag, name)
            else:
                self._set(flag, name, numbers, at, words)
            return False
        value = self._value(flag, name, words[0], following) if words else True
        if isinstance(value, Broken):
            self._unset(flag, name)
            return True
        self._set(flag, name, value, at, words[:1])
        return False

    def _unset(self, flag: Flag, name: str) -> None:
        """An option whose value cannot be read."""
        self._spelled[flag.name] = name.partition(" ")[0]
        self._options.pop(flag.name, None)

    def _take_keys(self, match: Match, name: str, word: Word) -> None:
        if match.flag.value in ("json", "json or text"):
            self._set(match.flag, name, word.given, word)
            return
        self._problems.add(
            "command-value",
            f"{name} takes no keys, and has {listed(map(quoted, word.given or ()), 8)}",
            f"write {name} VALUE",
            key=name,
        )

    def _set(self, flag: Flag, name: str, value: Any, at: Word, words: Sequence[Word] = ()) -> None:
        spelled = name.partition(" ")[0]
        typed = plain(" ".join([spelled, *(word.text for word in words)])[:_MOST_TYPED])
        before = self._options.get(flag.name)
        if flag.value == "append":
            value = [*(before or ()), value]
        elif isinstance(before, Mapping) and isinstance(value, Mapping):
            self._replaced(flag, before, value, at)
        elif (
            flag.name in self._options
            and before != value
            and self._origin.get(flag.name) == at.file  # The command line may override a file.
        ):
            self._problems.add(
                "command-repeated",
                f"{name} is given more than once, and vLLM takes the last: `{typed}`, not "
                f"`{self._typed[flag.name]}`",
                "leave one of them out",
                key=name,
                value=typed.partition(" ")[2] or str(value),
                file=at.file,
            )
        self._options[flag.name] = value
        self._typed[flag.name] = typed
        self._spelled[flag.name] = spelled
        self._origin[flag.name] = at.file

    def _replaced(
        self, flag: Flag, before: Mapping[str, Any], after: Mapping[str, Any], at: Word
    ) -> None:
        lost = [key for key in before if key not in after]
        if not lost:
            return
        if at.given is not None:
            how = f"--{flag.name} is given as JSON and with dots"
        elif self._origin.get(flag.name) != at.file:
            how = f"--{flag.name} is given in the config file and on the command line"
        else:
            how = f"--{flag.name} is given more than once"
        whole = as_argument(f"--{flag.name}", {**before, **after})
        needed = {"model", "num_speculative_tokens"} & set(lost)
        fails = flag.name == SPECULATIVE and needed
        self._problems.add(
            "command-json-replaced",
            f"{how}; vLLM takes the last alone and does not merge them, so that "
            f"{listed(map(quoted, lost), 8)} {'is' if len(lost) == 1 else 'are'} lost",
            f"write one: {whole}" if whole else "write one",
            key=f"--{flag.name}",
            rated=Severity.FAILS if fails else None,
        )

    def _value(self, flag: Flag, name: str, word: Word, following: Sequence[Word]) -> Any:
        """What a text means to a flag; :class:`Broken`, and a problem, if it means nothing."""
        text = word.text
        if flag.nullable and text in ("", "None"):
            return None
        if flag.value in ("json", "json or text"):
            return self._json(flag, name, word, following)
        if word.expands:
            return text if flag.value == "text" else Broken(text, "")
        value: Any = text.lower().replace("-", "_") if flag.loose else text
        wanted = ""
        if flag.value in ("integer", "integers"):
            value, wanted = command_flags.integer(text), "a whole number"
        elif flag.value == "number":
            value, wanted = command_flags.number(text), "a number"
        elif flag.value == "count":
            value, wanted = command_flags.count(text), "a whole number such as 8192, 8k or 8K"
        elif flag.value == "length":
            value, wanted = command_flags.length(text), "a whole number, such as 256K, or auto"
        if value is None:
            fact = f"{name} takes {wanted}, not {quoted(text)}"
            fix = f"write {name} NUMBER"
            if flag.value in ("count", "length") and command_flags.count(text.lower()) is not None:
                fix = f"write {text.lower()}: vLLM takes decimals with a small suffix alone"
            self._problems.add("command-value", fact, fix, key=name, value=text, file=word.file)
            return Broken(fact, fix)
        bounds = self._bounds(flag) if isinstance(value, (int, float)) else {}
        if limits := _outside(value, bounds):
            fact = f"{name} is {quoted(text)}, and {self._problems.vllm} wants {limits}"
            fix = f"write {name} NUMBER"
            if flag.name == "gpu-memory-utilization" and 1 < value <= 100:
                fix = f"write {name} {value / 100 if value > 2 else 0.95:g}: it is a share of 1"
            elif flag.name.endswith("-parallel-size"):
                fix = f"write {name} with the number of GPUs, or leave it out"
            self._problems.add("command-value", fact, fix, key=name, value=text, file=word.file)
            return Broken(fact, fix)
        if flag.name == "optimization-level" and text not in _OPTIMIZATION_LEVELS:
            fact = f"{name} is {quoted(text)}, and {self._problems.vllm} has levels 0 to 3"
            fix = "write -O3"
            self._problems.add("command-value", fact, fix, key=name, value=text, file=word.file)
            return Broken(fact, fix)
        if self._known and flag.choices is not None and str(value) not in flag.choices:
            close = difflib.get_close_matches(str(value)[:80], flag.choices, n=1)
            self._problems.add(
                "command-value",
                f"{self._problems.vllm} does not take {name} {quoted(text)}",
                (f"write {close[0]} if that is meant; " if close else "")
                + f"it takes {listed(flag.choices, 30)}",
                key=name,
                value=text,
                file=word.file,
            )
        return value

    def _bounds(self, flag: Flag) -> dict[str, float]:
        """The bounds of a number: the release's own, and those that hold on every release."""
        if flag.name in SPECULATIVE_FLAGS:  # Judged as keys of --speculative-config.
            return {}
        return {**_ALWAYS.get(flag.name, {}), **(dict(flag.bounds) if self._known else {})}

    def _json(self, flag: Flag, name: str, word: Word, following: Sequence[Word]) -> Any:
        text = word.text
        if flag.value == "json or text" and not re.fullmatch(r"\s*{.*}\s*", text, re.DOTALL):
            return text
        # --speculative-config goes through json.loads alone, on every release.
        human = flag.name != SPECULATIVE and (self._facts is None or self._facts.human_numbers)
        value = read_json(text, human_numbers=human)
        wants_object = flag.name == SPECULATIVE or flag.name in _KEYS_THAT_WENT
        if wants_object and not isinstance(value, (dict, Broken)) and value is not None:
            fix = "write " + as_argument(name, EXAMPLE)
            if flag.name != SPECULATIVE:
                level = {"mode": value if value in (0, 1, 2, 3) else 3}
                fix = "write " + as_argument(name, level)
            value = Broken(f"it is {quoted(value)} and no object", fix)
        if isinstance(value, Broken):
            fix = value.fix
            if following:  # The shell has split JSON without quotes at its blanks or its commas.
                texts = [word.text, *(w.text for w in following)]
                fix = repaired(" ".join(texts)) or repaired(",".join(texts)) or fix
            if word.file is not None:
                fix = f"in a config file, write {flag.name}: and the JSON in single quotes"
            self._problems.add(
                "command-json",
                f"{name} cannot be read as JSON: {value.what}",
                fix,
                key=name,
                value=text,
                file=word.file,
            )
        return value

    def _judge_json_keys(self) -> None:
        """Keys of options with JSON whose class takes no others."""
        for name, keys in ({} if self._facts is None else self._facts.json_keys).items():
            given = self._options.get(name)
            for key, value in given.items() if isinstance(given, Mapping) else ():
                if key not in keys:
                    self._json_key(name, key, value, keys)

    def _json_key(self, name: str, key: str, value: Any, keys: Sequence[str]) -> None:
        flag = self._spelled[name]
        fact = f"{self._problems.vllm} does not take the key {quoted(key)} in {flag}"
        went = _KEYS_THAT_WENT.get(name, {}).get(key)
        new = went(value) if went is not None else None
        if new is not None and new.keys() <= set(keys):
            written = ", ".join(f'"{k}": {json.dumps(v)}' for k, v in new.items())
            fix = f"write {written} in its place" if new else "leave it out"
        else:
            close = difflib.get_close_matches(plain_name(key)[:80], keys, n=1, cutoff=0.75)
            fix = f'write "{close[0]}" if that is meant' if close else "leave it out"
            if plain_name(key) in self._flags.by_name or key in self._flags.by_name:
                fix = f"leave it out, and give --{key}"
        self._problems.add(
            "command-json-key", fact, fix, key=f"{flag}.{key}", value=str(value), file=None
        )

    # What can be said once all words are read.

    def _judge_words(self) -> None:
        extra = self._positionals[1:]
        if extra:
            words = " ".join(word.text for word in extra[:8])
            model = self._positionals[0].text
            self._problems.add(
                "command-extra-words",
                f"{quoted(words)} belongs to no flag, and the model is {quoted(model)} already",
                "quote what belongs together, and leave out the rest",
                value=words,
            )
        if self._positionals and not self._given.serve:
            model = self._positionals[0].text
            self._problems.add(
                "command-model-place",
                f"{SERVER_MODULE} ignores the model {quoted(model)}, which only vllm serve "
                "takes without --model",
                f"write --model {model}",
                value=model,
                rated=Severity.WRONG,
            )
        elif self._model() is None:
            if not self._given.file_unread:
                self._no_model()
        elif self._given.names_first:
            self._problems.add(
                "command-model-place",
                "the command has --served-model-name and does not begin with the model, which "
                f"{self._problems.vllm} refuses",
                f"put the model first: vllm serve {self._model()} ...",
                key="--served-model-name",
            )

    def _no_model(self) -> None:
        default = None if self._facts is None else self._facts.defaults.get("model")
        fact = f"the command names no model, and vLLM then serves {default or 'its default'}"
        fix = "name the target: vllm serve MODEL ..."
        for name, value in self._options.items():
            several = value if isinstance(value, list) else []
            optional = self._flags.by_name[name].value == "optional" and isinstance(value, str)
            if (len(several) > 1 or optional) and self._origin.get(name) is None:
                taken = several[-1] if several else value
                flag = self._spelled[name]
                fact = f"{flag} takes {quoted(taken)} too, so that no model is left"
                rest = " ".join([flag, *several[:-1]])
                fix = f"put the model first: vllm serve {taken} {rest} ..."
        rated = Severity.FAILS if self._given.names_first else None
        self._problems.add("command-no-model", fact, fix, key="MODEL", rated=rated)

    def _judge_speculative_flags(self) -> None:
        given = self._options.get(SPECULATIVE)
        for name, key in SPECULATIVE_FLAGS.items():
            if name in self._options and isinstance(given, Mapping) and key in given:
                self._problems.add(
                    "command-spec-flag",
                    f'--{name} and "{key}" in {self._spelled[SPECULATIVE]} are both given, which '
                    f"{self._problems.vllm} refuses",
                    f"leave out --{name}",
                    key=f"--{name}",
                    value=str(self._options[name]),
                )


def _outside(value: float, bounds: Mapping[str, float]) -> str:
    """What a number must be, in words, if it is not; "" if it is."""
    held = {
        "gt": lambda bound: value > bound,
        "ge": lambda bound: value >= bound,
        "lt": lambda bound: value < bound,
        "le": lambda bound: value <= bound,
    }
    if all(held[name](bound) for name, bound in bounds.items()):
        return ""
    words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
    return " and ".join(f"{words[name]} {bound:g}" for name, bound in bounds.items())
