# SPDX-License-Identifier: Apache-2.0
"""What a step takes on a server that runs: a few batches and contexts, one after another.

The server itself times its steps: between two tokens of a request lies one step, and vLLM adds
these latencies up (``inter_token_latency_seconds``). So a step's time is their mean, whatever was
accepted in it. Each cell is sent twice: first for one token, which leaves the prompts in the prefix
cache, then for the steps that are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread

from vllm_kimi_eagle3.acceptance.model import Counts
from vllm_kimi_eagle3.diagnose.drive import (
    bar,
    has_stray_tokens,
    long_prompt,
    settled,
    tokens_per_character,
)
from vllm_kimi_eagle3.diagnose.metrics import Delta, Difference, difference, read_page
from vllm_kimi_eagle3.diagnose.server import Server, ServerError

from .model import Step

TOKENS = 96
"""Of an answer: thirty steps at three tokens a step."""
_SPARE = 64


@dataclass(frozen=True)
class Sweep:
    """What was measured.

    Attributes:
        steps: one for each cell.
        counts: of the drafts of each cell; empty without speculation.
        skipped: cells that do not fit into the server's context, that it refused, or whose counters
            do not say what a step of how many drafts took, in words.
    """

    steps: tuple[Step, ...]
    counts: tuple[Counts, ...]
    skipped: tuple[str, ...]


def sweep(
    server: Server,
    model: str,
    batches: Sequence[int],
    contexts: Sequence[int],
    *,
    max_model_len: int = 0,
    counted_as: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Sweep:
    """Times the steps of each cell.

    Args:
        batches: requests at once.
        contexts: tokens of each prompt.
        max_model_len: of the server; 0 if it is not known.
        counted_as: the model's name in the metrics; None for all that is there.
        progress: called with a line of text before each cell.

    Raises:
        ServerError: the server does not answer any more.
    """
    density = tokens_per_character(server, model)
    steps: list[Step] = []
    counts: list[Counts] = []
    skipped: list[str] = []
    cells = [(batch, context) for context in contexts for batch in batches]
    for number, (batch, context) in enumerate(cells, 1):
        name = f"{batch} requests of {context:,} tokens"
        if max_model_len and context + TOKENS + _SPARE > max_model_len:
            skipped.append(f"{name}: the server takes {max_model_len:,} with the answer")
            continue
        if progress is not None:
            progress(f"{bar(number - 1, len(cells))} cell {number} of {len(cells)}: {name}")
        texts = [f"Request {i}.\n" + long_prompt(context, density).text for i in range(batch)]
        try:
            start = read_page(server.metrics())
            _send(server, model, texts, 1)
            before = settled(server, start, counted_as, batch)
            _send(server, model, texts, TOKENS)
            after = settled(server, before, counted_as, batch)
        except ServerError as error:
            if error.status is None or error.status in (401, 403, 404):
                raise
            skipped.append(f"{name}: {error.fact}")
            continue
        warming = difference(start, before, counted_as)
        timed = difference(before, after, counted_as)
        if why := _unusable(warming, timed, (*before.impossible, *after.impossible), batch):
            skipped.append(f"{name}: {why}")
            continue
        found = timed.total
        step = _step(found, batch, context)
        if step is None:
            skipped.append(f"{name}: the server does not time its steps")
            continue
        steps.append(step)
        if found.counts is not None and found.counts.drafts:
            counts.append(found.counts)
    return Sweep(tuple(steps), tuple(counts), tuple(skipped))


def _send(server: Server, model: str, texts: Sequence[str], tokens: int) -> None:
    options = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    failed: list[Exception] = []

    def ask(text: str) -> None:
        try:
            server.complete(model, text, **options)
        except Exception as error:
            failed.append(error)

    # Daemons: whoever interrupts this does not wait for the answers.
    threads = [Thread(target=ask, args=(text,), daemon=True) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _unusable(warming: Difference, timed: Difference, impossible: Sequence[str], batch: int) -> str:
    """Why the counters of a cell say nothing of its steps; "" if they do."""
    if warming.resets or timed.resets:
        return "the server was started again meanwhile"
    if impossible := (*impossible, *timed.impossible):
        return impossible[0]
    total = timed.total
    if total.requests > batch or has_stray_tokens(total, batch * TOKENS):
        return "others used the server meanwhile"
    counts = total.counts
    if counts is None:
        drafting = any(delta.drafts is not None for delta in timed.engines.values())
        return "the server lacks counters of drafts" if drafting or timed.missing else ""
    if (k := _drafts(total)) > counts.positions:
        return f"{k} drafts a step of {counts.positions} positions cannot be"
    return ""


def _drafts(found: Delta) -> int:
    if found.counts is None or not found.counts.drafts:
        return 0
    return round(found.counts.draft_tokens / found.counts.drafts)


def _step(found: Delta, batch: int, context: int) -> Step | None:
    # Shorter or longer ones are none of a server, whatever it counts.
    if not found.steps or not 1e-6 <= found.seconds / found.steps <= 1e4:
        return None
    return Step(_drafts(found), batch, context + TOKENS / 2, found.seconds / found.steps)
