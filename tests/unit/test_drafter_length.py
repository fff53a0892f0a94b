# SPDX-License-Identifier: Apache-2.0
"""Which requests stop drafting, and which positions a drafter is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.models.short_drafter import clamped
from vllm_kimi_eagle3.patches import drafter_length

K = 3
PLACEHOLDERS = [-1] * K  # One list for all requests, as asynchronous scheduling has it.


def request(num_tokens: int, in_flight: int = 0, drafts: list[int] | None = None) -> Any:
    return SimpleNamespace(
        num_tokens=num_tokens,
        num_output_placeholders=in_flight,
        spec_token_ids=PLACEHOLDERS if drafts is None else drafts,
    )


def scheduler(*running: Any, decisions: Any) -> Any:
    hf_config = SimpleNamespace() if decisions is None else SimpleNamespace(kimi_eagle3=decisions)
    draft = SimpleNamespace(hf_config=hf_config)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft)),
        running=list(running),
        num_spec_tokens=K,
    )


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 8)), max_size=5), st.integers(1, 99))
def test_a_request_stops_where_its_drafts_may_not_fit(
    lengths: list[tuple[int, int]], limit: int
) -> None:
    requests = [request(*length) for length in lengths]
    drafter_length.stop_drafts(scheduler(*requests, decisions={"position_limit": limit}))
    for (num_tokens, in_flight), one in zip(lengths, requests, strict=True):
        fits = num_tokens + in_flight + K <= limit
        assert one.spec_token_ids == (PLACEHOLDERS if fits else [])
    assert PLACEHOLDERS == [-1] * K


@pytest.mark.parametrize(
    "decisions", [None, {}, {"position_limit": None}, {"position_limit": 0}, "64"], ids=str
)
def test_without_a_limit_nothing_is_done(decisions: Any) -> None:
    one = request(1000)
    drafter_length.stop_drafts(scheduler(one, decisions=decisions))
    assert one.spec_token_ids is PLACEHOLDERS


@pytest.mark.parametrize("speculative", [None, SimpleNamespace(), SimpleNamespace(method="ngram")])
def test_other_servers_are_left_alone(speculative: Any) -> None:
    other = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=speculative))
    drafter_length.stop_drafts(other)  # Has no `running`, which would be read.


class Drafter(torch.nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(
        self, input_ids: Any, positions: Any, hidden_states: Any, inputs_embeds: Any = None
    ) -> Any:
        self.seen.append(positions)
        return input_ids, hidden_states


def make(limit: int) -> Any:
    sizes = SimpleNamespace(max_num_batched_tokens=16, max_num_seqs=4)
    return clamped(Drafter, limit)(vllm_config=SimpleNamespace(scheduler_config=sizes))


@pytest.mark.parametrize("length", [1, 20, 21])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_positions_stay_below_the_limit(length: int, dtype: torch.dtype) -> None:
    model = make(limit=10)
    positions = torch.arange(length, dtype=dtype)
    given_positions = positions.clone()
    model(input_ids=None, positions=positions, hidden_states=None)
    (seen,) = model.seen
    assert torch.equal(seen, positions.clamp(max=9))
    assert torch.equal(positions, given_positions)


def test_positions_are_at_one_place_for_cuda_graphs() -> None:
    model = make(limit=10)
    for length in (20, 3):
        model(input_ids=None, positions=torch.arange(length), hidden_states=None)
    assert len({seen.data_ptr() for seen in model.seen}) == 1


def test_it_is_the_drafters_class_to_vllm() -> None:
    model = make(limit=10)
    assert isinstance(model, Drafter)
    assert type(model).__name__ == "Drafter"
    assert clamped(Drafter, 10) is type(model)
    assert not list(model.state_dict())


@pytest.mark.parametrize("limit", [None, 64])
def test_only_a_limited_drafter_gets_another_class(limit: int | None) -> None:
    hf_config = SimpleNamespace(kimi_eagle3={"position_limit": limit})
    cls = drafter_length._resolve(Drafter, "any", SimpleNamespace(hf_config=hf_config))
    assert (cls is Drafter) == (limit is None)
