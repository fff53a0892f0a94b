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
from vllm_kimi_eagle3.diagnose.drive import long_prompt, tokens_per_character
from vllm_kimi_eagle3.diagnose.metrics import Delta, difference, read_page
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
        skipped: cells that do not fit into the server's context, or that it refused, in words.
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
            progress(f"cell {number} of {len(cells)}: {name}")
        texts = [f"Request {i}.\n" + long_prompt(context, density).text for i in range(batch)]
        try:
            _send(server, model, texts, 1)
            before = read_page(server.metrics())
            _send(server, model, texts, TOKENS)
            after = read_page(server.metrics())
        except ServerError as error:
            if error.status is None or error.status in (401, 403, 404):
                raise
            skipped.append(f"{name}: {error.fact}")
            continue
        found = difference(before, after, counted_as).total
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


def _step(found: Delta, batch: int, context: int) -> Step | None:
    # Shorter or longer ones are none of a server, whatever it counts.
    if not found.steps or not 1e-6 <= found.seconds / found.steps <= 1e4:
        return None
    k = 0
    if found.counts is not None and found.counts.drafts:
        k = round(found.counts.draft_tokens / found.counts.drafts)
    return Step(k, batch, context + TOKENS / 2, found.seconds / found.steps)
