# SPDX-License-Identifier: Apache-2.0
"""The greedy draft-verify loop, with vLLM's counters.

What is matched, step for step (vLLM's `v1/core/sched/scheduler.py`, `v1/spec_decode`):

- The prefill yields the first output token; nothing was drafted for it, so it counts no draft.
- After every target pass the drafter reads the aux hidden states of the tokens that were kept, each
  with the token after it, then runs `k - 1` steps of its own. Its KV cache keeps the
  target-conditioned entries; its own steps' entries are overwritten by the next round.
- A verify step checks `k` drafts in one target pass and emits the accepted ones plus one token.
- `max_tokens` or a stop token cuts the emitted tokens *after* the counters saw the step, so drafts
  that were accepted beyond the end are counted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tests.reference.drafter import Drafter
from tests.reference.layers import KvCache, causal_visibility
from tests.reference.target import Target, TargetOutput


class TargetSession(Protocol):
    """One request's state in a target."""

    def extend(self, token_ids: Sequence[int]) -> TargetOutput:
        """Runs the tokens after those known so far; outputs have T = len(token_ids)."""
        ...

    def truncate(self, num_tokens: int) -> None:
        """Forgets all but the first `num_tokens` tokens."""
        ...


class DraftSession(Protocol):
    """One request's state in a drafter."""

    def propose(
        self, next_token_ids: Sequence[int], aux_hidden_states: Tensor, num_speculative_tokens: int
    ) -> list[int]:
        """Drafts what follows the last of `next_token_ids`.

        Args:
            next_token_ids: for each new position, the token after it.
            aux_hidden_states: `[len(next_token_ids), number of aux layers * H]` of the positions.
            num_speculative_tokens: how many tokens to draft.
        """
        ...


@dataclass
class SpeculationCounts:
    """vLLM's `vllm:spec_decode_*` counters."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    @classmethod
    def zero(cls, num_speculative_tokens: int) -> SpeculationCounts:
        return cls(num_accepted_tokens_per_pos=[0] * num_speculative_tokens)

    def observe(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Counts one verify step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            self.num_accepted_tokens_per_pos[position] += 1

    def add(self, other: SpeculationCounts) -> None:
        """Adds another request's counts."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_accepted_tokens_per_pos = [
            mine + theirs
            for mine, theirs in zip(
                self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos, strict=True
            )
        ]

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step, the bonus token included."""
        return 1 + self.num_accepted_tokens / self.num_drafts


@dataclass(frozen=True)
class Speculation:
    """One request's outcome."""

    output_token_ids: list[int]
    counts: SpeculationCounts


def speculate(
    target: TargetSession,
    drafter: DraftSession,
    prompt_token_ids: Sequence[int],
    num_speculative_tokens: int,
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> Speculation:
    """Greedy decoding of one request with speculation."""
    counts = SpeculationCounts.zero(num_speculative_tokens)
    known = list(prompt_token_ids)  # tokens that the target has in its cache
    step = target.extend(known)
    emitted = [int(step.logits[-1].argmax())]
    kept, next_token_ids = step.aux_hidden_states, known[1:] + emitted
    output: list[int] = []
    while not _append(output, emitted, max_tokens, stop_token_ids):
        drafts = drafter.propose(next_token_ids, kept, num_speculative_tokens)
        step = target.extend([emitted[-1], *drafts])
        choices = step.logits.argmax(dim=-1).tolist()
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == choices[num_accepted]:
            num_accepted += 1
        counts.observe(len(drafts), num_accepted)

        known += [emitted[-1], *drafts[:num_accepted]]
        target.truncate(len(known))
        emitted = choices[: num_accepted + 1]
        kept, next_token_ids = step.aux_hidden_states[: num_accepted + 1], emitted
    return Speculation(output, counts)


def _append(
    output: list[int], emitted: Sequence[int], max_tokens: int, stop_token_ids: Collection[int]
) -> bool:
    """Appends up to the end of the request; returns whether it ended."""
    for token_id in emitted:
        output.append(token_id)
        if len(output) == max_tokens or token_id in stop_token_ids:
            return True
    return False


def generate(
    target: TargetSession,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
) -> list[int]:
    """Greedy decoding without speculation."""
    output: list[int] = []
    token_ids = list(prompt_token_ids)
    ended = False
    while not ended:
        token_ids = [int(target.extend(token_ids).logits[-1].argmax())]
        ended = _append(output, token_ids, max_tokens, stop_token_ids)
    return output


class ReferenceTarget:
    """A `TargetSession` of the reference target; for `aux_layer_ids` see `Target.forward`."""

    def __init__(self, model: Target, aux_layer_ids: Sequence[int] | None = ()) -> None:
        self._model = model
        self._aux_layer_ids = None if aux_layer_ids is None else tuple(aux_layer_ids)
        self._caches = model.new_caches()

    @torch.no_grad()
    def extend(self, token_ids: Sequence[int]) -> TargetOutput:
        return self._model(torch.tensor(token_ids), self._caches, self._aux_layer_ids)

    def truncate(self, num_tokens: int) -> None:
        for cache in self._caches:
            cache.truncate(num_tokens)


class ReferenceDrafter:
    """A `DraftSession` of a reference drafter.

    Attributes:
        min_margin: smallest gap so far between the two highest logits of a draft step. Where it is
            small, another machine's rounding may change a draft, and so the counts.
    """

    def __init__(self, model: Drafter) -> None:
        self._model = model
        self._cache = KvCache()
        self._num_conditioned = 0
        self.min_margin = float("inf")

    @torch.no_grad()
    def propose(
        self, next_token_ids: Sequence[int], aux_hidden_states: Tensor, num_speculative_tokens: int
    ) -> list[int]:
        self._cache.truncate(self._num_conditioned)
        token_ids = torch.tensor(next_token_ids)
        hidden_states = self._model.combine(aux_hidden_states)
        self._num_conditioned += len(next_token_ids)
        drafts: list[int] = []
        while True:
            num_cached, num_new = len(self._cache), len(token_ids)
            logits, hidden_states = self._model(
                token_ids,
                hidden_states,
                torch.arange(num_cached, num_cached + num_new),
                self._cache,
                causal_visibility(num_new, num_cached),
            )
            best, second = logits[-1].topk(2).values.tolist()
            self.min_margin = min(self.min_margin, best - second)
            drafts.append(int(self._model.draft_to_target[logits[-1].argmax()]))
            if len(drafts) == num_speculative_tokens:
                return drafts
            token_ids, hidden_states = torch.tensor(drafts[-1:]), hidden_states[-1:]
