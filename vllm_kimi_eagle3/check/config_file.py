# SPDX-License-Identifier: Apache-2.0
"""A ``--config`` file, as the words that vLLM makes of it (``load_config_file``)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.checkpoint.errors import quoted

from .facts import Facts

LONGEST = 1024 * 1024  # Characters; no set of flags comes near.


class ConfigFileError(Exception):
    """The file cannot be read.

    Attributes:
        fact: why.
        fix: what to do.
        undecided: vLLM may be able to read it all the same.
    """

    def __init__(self, fact: str, fix: str, *, undecided: bool = False) -> None:
        super().__init__(fact)
        self.fact = fact
        self.fix = fix
        self.undecided = undecided


@dataclass(frozen=True)
class Option:
    """One entry.

    Attributes:
        key: as written.
        words: what vLLM's parser gets of it.
        dropped: it says ``false``, and vLLM passes nothing on.
    """

    key: str
    words: tuple[str, ...]
    dropped: bool = False


def read_options(name: str, facts: Facts | None, serve: bool) -> list[Option]:
    """The entries of a config file, in order.

    Args:
        name: the file, as given.
        facts: the vLLM that reads it; None for the newest.
        serve: ``vllm serve`` reads it, and not the old server module.

    Raises:
        ConfigFileError: it cannot be read.
    """
    return [_option(str(key), value, facts, serve) for key, value in _content(name).items()]


def _option(key: str, value: Any, facts: Facts | None, serve: bool) -> Option:
    flag = f"--{key}"
    if isinstance(value, bool):
        if value:
            return Option(key, (flag,))
        # load_config_file looks for --no-x in the parser that it is called on, which for `vllm
        # serve` is the one of all subcommands and has none.
        negates = not serve and (facts is None or facts.yaml_negates)
        known = facts is None or key in facts.flags
        return Option(key, (f"--no-{key}",) if negates and known else (), dropped=not negates)
    if isinstance(value, list):
        return Option(key, (flag, *map(str, value)) if value else ())
    if isinstance(value, dict) and (facts is None or facts.yaml_objects):
        return Option(key, (flag, json.dumps(value, default=str)))
    return Option(key, (flag, str(value)))


def _content(name: str) -> Mapping[Any, Any]:
    if name.rpartition(".")[2] not in ("yaml", "yml"):
        raise ConfigFileError(
            f"--config wants a file that ends in .yaml or .yml, not {quoted(name)}", "rename it"
        )
    named = f"the config file {quoted(name)}"
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigFileError(
            f"{named} was not read, since PyYAML is not installed here",
            "run check where vLLM is installed, or give the flags on the command line",
            undecided=True,
        ) from None
    try:
        text = _text(name)
        why = ""
        if len(text) > LONGEST:
            why = f"it is longer than {LONGEST:,} characters"
        elif re.search(r"[&*]\w", text) and _has_alias(yaml, text):
            # A few lines of them can stand for billions of values, and no flag needs one.
            why = "it has a YAML alias, which check does not follow"
        if why:
            raise ConfigFileError(
                f"{named} was not read: {why}", "write its flags out", undecided=True
            )
        content = yaml.safe_load(text)
    except RecursionError:
        raise ConfigFileError(f"{named} nests too deep to be read", "write it flat") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise ConfigFileError(f"{named} cannot be read: {quoted(why)}", "correct it") from None
    if not isinstance(content, dict):
        raise ConfigFileError(
            f"{named} holds no flags but {quoted(content)}",
            "write one flag a line: tensor-parallel-size: 8",
        )
    return content


def _text(name: str) -> str:
    """The beginning of a file, as long as any config file."""
    path = Path(name)
    if not path.is_file():
        raise OSError("there is no such file")
    with path.open(encoding="utf-8") as file:
        return file.read(LONGEST + 1)


def _has_alias(yaml: Any, text: str) -> bool:
    return any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
