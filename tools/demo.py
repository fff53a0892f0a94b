# SPDX-License-Identifier: Apache-2.0
"""Kimi-K2.5 with EAGLE-3 on this machine's CPU: `make demo`.

Serves the tiny pair of `tests/assets` with a real `vllm serve`, with speculation and then without,
asks both the same over HTTP, and shows the text, how many drafted tokens were accepted, and what
the plugin did. Exit code 0 if the two texts are equal and drafts were accepted, else 1.

Run with the interpreter of an environment that has vLLM's CPU build, the plugin, and the test-only
shim that old CPU builds need (`nox -s demo` makes one).
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.assets import variants  # noqa: E402
from tests.hosts import harness  # noqa: E402
from tests.hosts.serving import Server, ServerError, command_line  # noqa: E402

K = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=0, help="which of tests/assets/prompts.json")
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    prompt = variants.load_prompts()[arguments.prompt]
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="kimi-eagle3-demo-") as folder:
            equal = compare(prompt, arguments.max_tokens, Path(folder))
    except ServerError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the server was stopped.", file=sys.stderr)
        return 130
    print(f"\n{time.monotonic() - started:.0f} s in all.")
    return 0 if equal else 1


def compare(prompt: dict[str, Any], max_tokens: int, folder: Path) -> bool:
    """Both servers, one after the other; True if speculation left the text as it is and helped."""
    say(f"vLLM {harness.host_release()} on the CPU; a tiny Kimi-K2.5 and an EAGLE-3 drafter for it")
    if not harness.at_least(0, 22):
        print("   Its CPU build cannot speculate; a test-only shim lets it (tests/hosts/shim).")
    arguments = harness.engine_arguments(drafter=harness.LLAMA_DRAFTER, k=K)
    show("status", folder=folder)
    show("check", "vllm", "serve", *command_line(arguments), folder=folder)

    say("1. With speculation")
    with start(arguments, folder / "with.log", folder) as server:
        drafted, seconds = ask(server, prompt, max_tokens)
        counters = server.spec_decode()
        show_plugin_lines(server.log())
    print(f"   asked:    ...{prompt['text'][-70:]!r}")
    print(f"   answered: {drafted!r}  ({seconds:.1f} s)")
    show_acceptance(counters)

    say("2. The same without speculation")
    with start(harness.engine_arguments(), folder / "without.log", folder) as server:
        plain, seconds = ask(server, prompt, max_tokens)
    print(f"   answered: {plain!r}  ({seconds:.1f} s)")

    equal, helped = drafted == plain, bool(counters.get("num_accepted_tokens"))
    print("\nThe texts are equal." if equal else "\nTHE TEXTS DIFFER.")
    if not helped:
        print("NO DRAFTED TOKEN WAS ACCEPTED.")
    return equal and helped


def start(arguments: dict[str, Any], log: Path, folder: Path) -> Server:
    """A server of the tiny target, not yet entered; shows its command and how long it takes."""
    line = command_line(arguments)
    print(f"   $ vllm serve {shlex.join(str(a).replace(str(ROOT) + '/', '') for a in line)}")
    return Server(line, harness.environment(folder / "cache"), log, on_wait=progress)


def progress(seconds: float) -> None:
    """One line that counts up while a server starts."""
    if sys.stdout.isatty():
        print(f"\r   starting, {seconds:.0f} s ", end="", flush=True)
    elif int(seconds) % 15 == 0:
        print(f"   starting, {seconds:.0f} s", flush=True)


def ask(server: Server, prompt: dict[str, Any], max_tokens: int) -> tuple[str, float]:
    """The server's greedy continuation of a prompt, over HTTP, and the seconds it took."""
    print(f"{chr(13) if sys.stdout.isatty() else ''}   ready after {server.seconds_to_ready:.0f} s")
    body = {
        "prompt": prompt["token_ids"],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    before = time.monotonic()
    answer = server.post("/v1/completions", body)
    return str(answer["choices"][0]["text"]), time.monotonic() - before


def show_plugin_lines(log: str) -> None:
    """The plugin's line in the server's log, once for each process that prints it."""
    for line in log.splitlines():
        if "vllm-kimi-eagle3 " in line:
            process = re.search(r"\((\w+) pid=", line)
            what = line[line.index("vllm-kimi-eagle3 ") :]
            print(f"   log of {process[1] if process else 'the server'}: {what}")


def show_acceptance(counters: dict[str, Any]) -> None:
    """What /metrics says of the drafts."""
    drafts = counters["num_drafts"]
    accepted = counters["num_accepted_tokens_per_pos"]
    print(f"   {drafts} verify steps of {K} drafted tokens each; from /metrics:")
    for position, count in enumerate(accepted):
        rate = count / drafts
        print(
            f"     position {position}: {count:3d} accepted  {rate:4.0%}  {'#' * round(30 * rate)}"
        )
    print(
        f"   acceptance length {1 + sum(accepted) / drafts:.2f} tokens per step (1 without drafts)"
    )


def show(*words: str, folder: Path) -> None:
    """A command of the plugin's own program, as a user runs it."""
    print(f"   $ vllm-kimi-eagle3 {shlex.join(words).replace(str(ROOT) + '/', '')}")
    program = Path(sys.executable).with_name("vllm-kimi-eagle3")
    answer = subprocess.run(
        [str(program), *words],
        cwd=folder,
        env=harness.environment(folder / "cache"),
        capture_output=True,
        text=True,
        check=False,
    )
    for line in (answer.stdout or answer.stderr).splitlines():
        print(f"   {line.replace(str(ROOT) + '/', '')}")


def say(title: str) -> None:
    print(f"\n{title}\n{'-' * len(title)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
