# SPDX-License-Identifier: Apache-2.0
"""What this vLLM's own parser makes of command lines, and which flags it has.

    python command_probe.py JOBS.json RESULTS.json

`commands` are lists of words: `serve ...`, or for the old server module what follows it. A result
is the options that are not at their default, or `error`: how the parser refused. `speculative` are
keys of --speculative-config, which are given to the class that vLLM makes of them, with a method
that needs no model; a result is None, or how it refused.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

sys.argv = ["vllm", "serve", *sys.argv[1:]]  # vLLM looks there to see whether help is wanted.


def parsers() -> tuple[Any, Any, Any]:
    """The parser of `vllm`, of `vllm serve` in it, and of the old server module."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    except ImportError:
        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser
        except ImportError:
            from vllm.entrypoints.common.cli_args import make_arg_parser
    program = FlexibleArgumentParser(prog="vllm")
    serve = program.add_subparsers(dest="subparser").add_parser("serve")
    module = FlexibleArgumentParser(prog="api_server")
    return program, make_arg_parser(serve), make_arg_parser(module)


def flags_of(parser: Any) -> list[dict[str, Any]]:
    """Every flag: spellings, class of its action, number of values, choices, default, type."""
    spellings: dict[int, list[str]] = {}
    for spelling, action in parser._option_string_actions.items():
        spellings.setdefault(id(action), []).append(spelling)
    return [
        {
            "spellings": spellings[id(action)],
            "action": type(action).__name__,
            "nargs": action.nargs,
            "choices": None if action.choices is None else [str(c) for c in action.choices],
            "default": plain(action.default),
            "type": getattr(action.type, "__qualname__", str(action.type)),
            "dest": action.dest,
        }
        for action in parser._actions
        if action.option_strings
    ]


def plain(value: Any) -> Any:
    """A value as JSON has it; a config object as the name of its class."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"object": type(value).__name__}


def attempt(program: Any, serve: Any, module: Any, words: list[str]) -> dict[str, Any]:
    parser = program if words[:1] == ["serve"] else module
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            given = vars(parser.parse_args(words))
    except SystemExit:
        return {"error": said.getvalue().strip().splitlines()[-1]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    defaults = {a.dest: a.default for a in (serve if parser is program else module)._actions}
    return {
        name: plain(value)
        for name, value in given.items()
        if name != "subparser" and name in defaults and value != defaults[name]
    }


def refusal(keys: dict[str, Any]) -> str | None:
    """Why SpeculativeConfig refuses keys; None if it takes them."""
    from vllm.config import SpeculativeConfig

    try:
        SpeculativeConfig(**keys)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    jobs, results = (Path(argument) for argument in sys.argv[2:4])
    given = json.loads(jobs.read_text())
    program, serve, module = parsers()
    assert isinstance(program, argparse.ArgumentParser)
    outcome = {
        "flags": flags_of(serve),
        "commands": [attempt(program, serve, module, words) for words in given["commands"]],
        "speculative": [refusal(keys) for keys in given["speculative"]],
    }
    results.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
