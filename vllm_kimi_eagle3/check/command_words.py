# SPDX-License-Identifier: Apache-2.0
"""A command before its flags are read: the words of ``vllm serve``, as vLLM's parser gets them.

What ``FlexibleArgumentParser.parse_args`` (``utils/argparse_utils.py``) does before argparse does
the rest: the model first, a config file's flags among the others, dashes for underscores, options
with dots put together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_kimi_eagle3.checkpoint.errors import plain, quoted
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity

from . import command_flags, config_file, lookalikes, shell, yaml_block
from .command_flags import Flags
from .facts import Facts
from .json_text import Broken, read_json

SERVER_MODULE = "vllm.entrypoints.openai.api_server"

# More than any command has; Linux passes 2 MiB to a program, environment included (execve(2)).
_MOST_CHARACTERS = 1024 * 1024
_MOST_PROBLEMS = 50
_DEEPEST_OPTION = 64
_CLI_MODULE = "vllm.entrypoints.cli.main"
_IMAGE = "vllm-openai"
_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_DEEPEST_SHELL = 4
_CONTAINERS = ("docker", "podman", "nerdctl")


@dataclass(frozen=True)
class Word:
    """A word of the command.

    Attributes:
        text: as the program gets it.
        file: the config file that it is from; None for the command line.
        bare: JSON that the shell has taken the quotes from.
        expands: the shell puts something into it that is not known.
        given: it stands for options with dots: their keys.
    """

    text: str
    file: str | None = None
    bare: bool = False
    expands: bool = False
    given: Mapping[str, Any] | None = None


class Problems:
    """What is wrong with a command, as findings.

    Args:
        facts: the vLLM that is to run it; None if that is not known.
    """

    def __init__(self, facts: Facts | None) -> None:
        self._release = "" if facts is None else facts.release
        self.found: list[Finding] = []

    @property
    def vllm(self) -> str:
        """The vLLM, for messages."""
        return f"vLLM {self._release}" if self._release else "this vLLM"

    @property
    def enough(self) -> bool:
        """True if no more are taken."""
        return len(self.found) >= _MOST_PROBLEMS

    def add(
        self,
        kind: str,
        fact: str,
        fix: str = "",
        *,
        key: str | None = None,
        value: str | None = None,
        file: str | None = None,
        rated: Severity | None = None,
    ) -> None:
        """One more; key and file as the user wrote them, value of any length."""
        if self.enough:
            return
        evidence = Evidence(
            None if file is None else plain(file),
            None if key is None else plain(key),
            None if value is None else quoted(value),
            self._release or None,
        )
        self.found.append(Finding(kind, fact, fix, evidence, rated))


class Words:
    """The words of a command.

    Args:
        command: one text, as pasted, or words.
        facts: the vLLM that is to run it; None if that is not known.
        flags: its flags.
        problems: where what is wrong is put.

    Attributes:
        arguments: what stands behind ``vllm serve``, as written.
        words: what argparse gets of it.
        serve: it is ``vllm serve``, and not the old server module.
        environ: the assignments in front of it.
        names_first: this vLLM refuses it unless the model comes first.
        file_unread: it names a config file whose flags are not known.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        facts: Facts | None,
        flags: Flags,
        problems: Problems,
    ) -> None:
        self._facts = facts
        self._flags = flags
        self._problems = problems
        self.serve = True
        self.environ: dict[str, str] = {}
        self.names_first = False
        self.file_unread = False
        words = self._arguments(command)
        self.arguments = tuple(word.text for word in words)
        self.words: list[Word] = []
        if words:
            words = self._config_file(self._model_first(words))
            self.words = self._dotted(self._dashes(words))

    def _arguments(self, command: str | Sequence[str]) -> list[Word]:
        """The words behind ``vllm serve``; notes what stands in front."""
        whole = command if isinstance(command, str) else None
        words = [] if isinstance(command, str) else [str(word) for word in command]
        if len(words) == 1 and re.match(r"\s*vllm\s|.*\s--?[A-Za-z]", words[0]):
            whole = words[0]  # The whole command in quotes.
        if len(whole or "") + sum(map(len, words)) > _MOST_CHARACTERS or (
            len(words) > shell.MOST_WORDS
        ):
            self._problems.add(
                "command-unreadable",
                f"the command is longer than {_MOST_CHARACTERS} characters or "
                f"{shell.MOST_WORDS} words, and was not read",
                "give the command alone",
                key="vllm serve",
            )
            return []
        if whole is None and len(words) == 1 and yaml_block.is_yaml(words[0]):
            whole = words[0]
        if whole is None:
            whole = lookalikes.rejoined(words)
        if whole is not None:
            return self._yaml(whole) if yaml_block.is_yaml(whole) else self._pasted(whole)
        start = 0
        while start < len(words) and (match := shell.assignment(words[start])):
            self.environ[match[1]] = match[2]
            start += 1
        return self._of_words([shell.Word(word) for word in words[start:]])

    def _yaml(self, text: str) -> list[Word]:
        """The command in a piece of a manifest or a compose file."""
        found: list[tuple[dict[str, str], list[shell.Word]]] = []
        for container in yaml_block.containers(text):
            words: list[shell.Word] = []
            for part in container.ordered:
                try:
                    lines = shell.lines_of(part) if isinstance(part, str) else []
                except shell.ShellError:
                    words = []
                    break
                if isinstance(part, str):
                    words += lines[-1].words if lines else ()
                else:
                    words += [shell.Word(w, expands=shell.has_variable(w)) for w in part]
            if words:
                found.append((container.environ, words))
        if not found:
            self._problems.add(
                "command-not-serve",
                "this is YAML, and no command could be read in it",
                "give the command of a server: vllm serve MODEL ...",
            )
            return []
        named = [f for f in found if any(word.text.startswith("--model") for word in f[1])]
        environ, words = next((f for f in found if _starts_server(f[1])), (named or found)[0])
        self.environ.update(environ)
        return self._of_words(words)

    def _of_words(self, words: Sequence[shell.Word], depth: int = 0) -> list[Word]:
        """The words behind ``vllm serve``, of a command or of what a shell in it runs."""
        texts = [word.text for word in words]
        script = _script(texts) if depth < _DEEPEST_SHELL else None
        if script is not None and _serve_at(texts) is None:
            self.environ.update(_passed_on(texts[:script]))
            return self._pasted(texts[script], depth + 1)
        behind = len(self._behind_serve(texts))
        kept = words[len(words) - behind :]
        for word in kept:
            if word.expands:
                self._problems.add(
                    "command-shell-variable",
                    f"the shell puts something into {quoted(word.text)} that is not known here",
                    "let the shell fill it in, and pass the command without quotes around the "
                    "whole: vllm-kimi-eagle3 check vllm serve ...",
                    value=word.text,
                )
        self._lookalikes([odd for word in words for odd in word.lookalikes])
        return [Word(_of_home(w.text) if w.home else w.text, None, w.bare, w.expands) for w in kept]

    def _lookalikes(self, found: Sequence[lookalikes.Lookalike]) -> None:
        if not found:
            return
        first = found[0]
        fact = f"{first.name} stands {first.place} in place of {first.meant}"
        fix = f"write {first.meant} there"
        if first.meant == "nothing":
            fact, fix = f"{first.name} stands {first.place}, where it cannot be seen", "delete it"
        if len(found) > 1:
            others = [f"{odd.name} {odd.place}" for odd in found[1:]]
            fact += f", and also {command_flags.listed(others, 3)}"
            fix = "write plain blanks, hyphens and quotes there"
        self._problems.add(
            "command-lookalike",
            f"{fact}; the rest of this report reads the command as it was meant",
            fix,
            key=first.place.removeprefix("at "),
            value=f"U+{ord(first.character):04X}",
        )

    def _pasted(self, text: str, depth: int = 0) -> list[Word]:
        try:
            lines = shell.lines_of(text)
        except shell.ShellError as error:
            self._problems.add(
                "command-unreadable", str(error), error.fix, value=error.near or text[:40]
            )
            return []
        if not lines:
            return []
        line = next((line for line in lines if _starts_server(line.words)), lines[-1])
        self.environ.update(line.environ)
        return self._of_words(line.words, depth)

    def _behind_serve(self, words: Sequence[str]) -> Sequence[str]:
        start = _serve_at(words)
        if start is not None:
            self.serve = words[start - 1] != SERVER_MODULE
            self.environ.update(_passed_on(words[:start]))
            return words[start:]
        if words and _program(words[0]) == "vllm":
            self._problems.add(
                "command-not-serve",
                f"{quoted(' '.join(words[:2]))} starts no server",
                "give the command of a server: vllm serve MODEL ...",
                value=" ".join(words[:2]),
            )
            return ()
        return words

    def _model_first(self, words: list[Word]) -> list[Word]:
        """``vllm serve --model X`` is ``vllm serve X``."""
        if not self.serve:
            return words
        for i, word in enumerate(words):
            if word.text == "--model" and i + 1 < len(words):
                return [words[i + 1], *words[:i], *words[i + 2 :]]
            if word.text.startswith("--model=") and word.text != "--model=":
                model = Word(word.text.removeprefix("--model="))
                return [model, *words[:i], *words[i + 1 :]]
        # Refused since 0.17, see FlexibleArgumentParser.parse_args.
        self.names_first = (
            words[0].text.startswith("-")
            and any(re.match(r"--served[-_]model[-_]name(=.+|$)", w.text) for w in words)
            and not any(re.match(r"--config(=.+|$)", w.text) for w in words)
            and self._facts is not None
            and not self._facts.before("0.17")
        )
        return words

    def _config_file(self, words: list[Word]) -> list[Word]:
        for word in words:
            if word.text.startswith("--config="):
                name = word.text.removeprefix("--config=")
                self._problems.add(
                    "command-config-file",
                    f"vLLM does not read the config file {quoted(name)}: it looks for --config and "
                    "the name as two words",
                    f"write --config {name}",
                    key="--config",
                    value=word.text,
                    rated=Severity.WRONG,
                )
        places = [i for i, word in enumerate(words) if word.text == "--config"]
        if not places:
            return words
        place = places[0]
        if place + 1 >= len(words) or len(places) > 1:
            self._problems.add(
                "command-config-file",
                "no file follows --config" if len(places) == 1 else "--config is given twice",
                "give one file",
                key="--config",
            )
        front, behind = words[:place], words[place + 2 :]
        read = self._options_of(words[place + 1].text) if place + 1 < len(words) else []
        if self.file_unread:
            return words[:place] + behind
        if not self.serve:
            return [*read, *front, *behind]
        head = 1 if front and not front[0].text.startswith("-") else 0
        if not head and not any(word.text == "--model" for word in read):
            self._problems.add(
                "command-model-place",
                "with --config, vLLM wants the model as the first word or in the file, and it is "
                "in neither place",
                "put the model first: vllm serve MODEL --config FILE ...",
                key="--config",
            )
        return [*front[:head], *read, *front[head:], *behind]

    def _options_of(self, name: str) -> list[Word]:
        try:
            options = config_file.read_options(name, self._facts, self.serve)
        except config_file.ConfigFileError as error:
            kind = "command-config-unread" if error.undecided else "command-config-file"
            self._problems.add(kind, error.fact, error.fix, key="--config", value=name, file=name)
            self.file_unread = True
            return []
        for option in options:
            if option.dropped:
                self._dropped(option.key, name)
        return [Word(text, name) for option in options for text in option.words]

    def _dropped(self, key: str, file: str) -> None:
        """``key: false`` in a config file, which vLLM ignores."""
        name = key.replace("_", "-")
        flag = self._flags.by_name.get(name)
        if flag is None or flag.value != "switch":
            return
        if self._facts is not None and self._facts.defaults.get(name) is False:
            return
        self._problems.add(
            "command-config-false",
            f'"{key}: false" does nothing: {self._problems.vllm} ignores what is false in a '
            "config file",
            f"write no-{name}: true there, or give --no-{name} on the command line",
            key=key,
            value="false",
            file=file,
        )

    def _dashes(self, words: list[Word]) -> list[Word]:
        """Dashes for underscores in names, and ``-O3`` written out."""
        out: list[Word] = []
        for i, word in enumerate(words):
            text = word.text
            if text.startswith("--"):
                name, equals, value = text.partition("=")
                head, dot, keys = name.partition(".")
                text = f"{head.replace('_', '-')}{dot}{keys}{equals}{value}"
                out.append(replace(word, text=text))
            elif text.startswith("-O") and text != "-O":
                level = text[3:] if text[2] == "=" else text[2:]
                out += [Word("--optimization-level", word.file), Word(level, word.file)]
            elif text == "-O" and i + 1 < len(words) and words[i + 1].text in ("0", "1", "2", "3"):
                out.append(Word("--optimization-level", word.file))
            else:
                out.append(word)
        return out

    def _dotted(self, words: list[Word]) -> list[Word]:
        """Options with dots, put together into one JSON object each, behind all others."""
        rest: list[Word] = []
        objects: dict[str, dict[str, Any]] = {}
        remaining = iter(words)
        for word in remaining:
            name, equals, text = word.text.partition("=")
            if not name.startswith("-") or "." not in name:
                rest.append(word)
                continue
            if not equals:
                following = next(remaining, None)
                if following is None:
                    self._problems.add(
                        "command-value", f"no value follows {quoted(name)}", "give it", key=name
                    )
                    break
                text = following.text
            several = name.endswith("+")
            flag, *keys = name.removesuffix("+").split(".")
            if len(keys) > _DEEPEST_OPTION:
                self._problems.add(
                    "command-value", f"{quoted(name)} nests too deep", "leave it out", key=flag
                )
                continue
            value: Any = text.split(",") if several else self._dotted_value(text)
            for key in reversed(keys):
                value = {key: value}
            _update(objects.setdefault(flag, {}), value)
        return [*rest, *(Word(flag, given=given) for flag, given in objects.items())]

    def _dotted_value(self, text: str) -> Any:
        value = read_json(text)
        if not isinstance(value, Broken):
            return value
        human = self._facts is None or self._facts.human_numbers
        number = command_flags.count(text) if human else None
        return text if number is None else number


def _serve_at(words: Sequence[str]) -> int | None:
    """Where the arguments of the server begin; None if nothing says that one is started."""
    in_container, entry = False, ""
    for i, word in enumerate(words[:200]):
        following = list(words[i + 1 : i + 3])
        if (_program(word) == "vllm" and following[:1] == ["serve"]) or (
            word == "-m" and following[:1] == [SERVER_MODULE]
        ):
            return i + 2
        if word == "-m" and following == [_CLI_MODULE, "serve"]:
            return i + 3
        in_container = in_container or _program(word) in _CONTAINERS
        entry = _entrypoint(words, i) if in_container and not entry else entry
        behind_image = i > 0 and not words[i - 1].startswith("-")
        if _program(entry) == "vllm" and word == "serve" and behind_image:
            return i + 1
        if in_container and not entry and _IMAGE in _program(word):
            return i + 1
    return None


def _entrypoint(words: Sequence[str], i: int) -> str:
    """What ``docker run`` is to start in place of the image's own, if word ``i`` says so."""
    if words[i].startswith("--entrypoint="):
        return words[i].removeprefix("--entrypoint=")
    return words[i + 1] if words[i] == "--entrypoint" and i + 1 < len(words) else ""


def _script(words: Sequence[str]) -> int | None:
    """Where the text is that a shell runs (``bash -c TEXT``); None if there is none."""
    shell_entry = False
    for i, word in enumerate(words[:200]):
        shell_entry = shell_entry or _program(_entrypoint(words, i)) in _SHELLS
        if not re.fullmatch(r"-[a-z]*c", word) or i + 1 >= len(words):
            continue
        front = i
        while front and words[front - 1].startswith("-"):
            front -= 1
        if front and (shell_entry or _program(words[front - 1]) in _SHELLS):
            return i + 1
    return None


def _starts_server(words: Sequence[shell.Word]) -> bool:
    texts = [word.text for word in words]
    if _serve_at(texts) is not None:
        return True
    script = _script(texts)
    return script is not None and "vllm" in texts[script]


def _program(word: str) -> str:
    return word.rpartition("/")[2]


def _passed_on(front: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The assignments in front of the server: of ``env``, or of ``docker run -e``."""
    for word in front:
        match = shell.assignment(word.removeprefix("--env="))
        if match and match[1].isupper():
            yield match[1], match[2]


def _update(original: dict[str, Any], update: Mapping[str, Any]) -> None:
    """As vLLM merges options with dots: objects into one, lists behind each other."""
    for key, value in update.items():
        old = original.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            _update(old, value)
        elif isinstance(value, list) and isinstance(old, list):
            original[key] = old + value
        else:
            original[key] = value


def _of_home(text: str) -> str:
    """A word that begins with ``~``, as the shell gives it on."""
    try:
        return os.path.expanduser(text)
    except ValueError:  # A NUL, which no path has and a pasted text may.
        return text
