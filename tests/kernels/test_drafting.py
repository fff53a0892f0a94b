# SPDX-License-Identifier: Apache-2.0
"""What drafting makes of the kernels, without vLLM: attention in several calls, and what ranks
agree on. Other ranks, the clock and the server's start are stand-ins."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kimi_eagle3.drafting import forward, loop, weights
from vllm_kimi_eagle3.drafting.attend import PagedAttend, PagedCaches, cache_address
from vllm_kimi_eagle3.drafting.forward import DraftForward
from vllm_kimi_eagle3.drafting.weights import AttentionFacts, Product, Unsupported
from vllm_kimi_eagle3.kernels import skinny_gemm

F32 = torch.float32
CPU = torch.device("cpu")
PAGE, DIM, PAGES = 16, 64, 40


def facts(*, heads: int, kv_heads: int, head_dim: int, latent: Any = None) -> AttentionFacts:
    angles = torch.rand(64, 16)
    return AttentionFacts(
        kind="llama" if latent is None else "mla",
        layer=None,
        layer_name="",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=DIM,
        scale=0.1,
        rotary=None,
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1)[:, :32].contiguous(),
        neox=True,
        position_limit=None,
        sliding_window=None,
        dtype=F32,
        latent=latent,
    )


def llama() -> tuple[AttentionFacts, PagedCaches, int]:
    """An attention, its caches, and the width of what it takes."""
    cache = torch.rand(2, PAGES, PAGE, 1, DIM)
    of = facts(heads=2, kv_heads=1, head_dim=DIM)
    return of, PagedCaches(PAGE, cache[0], cache[1], None, None), 4 * DIM


def mla() -> tuple[AttentionFacts, PagedCaches, int]:
    heads, rope, rank, lora = 2, 32, 64, 24
    made = torch.rand(heads * (DIM + rope), lora)
    absorbed = torch.rand(heads, DIM, rank), torch.rand(heads, rank, DIM)
    latent = SimpleNamespace(
        q_lora_rank=lora,
        kv_lora_rank=rank,
        nope_dim=DIM,
        value_dim=DIM,
        heads=heads,
        q_norm=torch.rand(lora),
        kv_norm=torch.rand(rank),
        eps=1e-5,
        q_b=lambda q: q @ made.T,
        absorbed=lambda: absorbed,
    )
    of = facts(heads=heads, kv_heads=1, head_dim=rank + rope, latent=latent)
    cache = torch.rand(PAGES, PAGE, rank + rope)
    return of, PagedCaches(PAGE, cache, None, None, None), lora + rank + rope


@pytest.mark.parametrize("kind", [llama, mla])
def test_more_requests_than_the_workspace_serves_are_computed_in_turn(kind: Any) -> None:
    torch.manual_seed(0)
    of, caches, width = kind()
    batch, query_len = 5, 2
    lengths = torch.tensor([20, 3, 0, 40, 17], dtype=torch.int32)
    positions = torch.arange(batch * query_len)
    projected = torch.rand(batch * query_len, width)

    def attend(most: int) -> torch.Tensor:
        numel = PagedAttend.workspace_numel(of, max_batch=most, query_len=query_len, device=CPU)
        attend = PagedAttend(
            of,
            caches,
            block_table=torch.arange(batch * 3, dtype=torch.int32).view(batch, 3),
            seq_lens=lengths,
            slots=torch.full((batch * query_len,), -1),
            query_len=query_len,
            workspace=torch.zeros(numel),
            max_batch=most,
        )
        return attend(positions, projected.clone())

    torch.testing.assert_close(attend(2), attend(batch))


def test_the_largest_batch_of_whole_heads_has_a_workspace() -> None:
    """What `loop.py` asks the kernels for with all heads on a rank and eight drafts."""
    of = facts(heads=64, kv_heads=8, head_dim=128)
    batch, numel = loop._scratch(of, 256, 9, CPU)
    assert batch < 256
    assert batch % 16 == 0  # A call that begins there is aligned as the first.
    needed = PagedAttend.workspace_numel(of, max_batch=batch, query_len=9, device=CPU)
    assert needed <= numel <= loop._SCRATCH // 4


def test_logprobs_of_a_prompt_leave_a_proposal_to_stock() -> None:
    """The target's hidden states are read once more, after the drafts."""
    made = object.__new__(loop.DraftLoop)
    layer = SimpleNamespace(kv_cache=torch.zeros(1))
    vars(made).update(
        proposer=SimpleNamespace(),
        drafts=3,
        buckets=(4,),
        runner=SimpleNamespace(num_prompt_logprobs={}),
        forward=SimpleNamespace(attention=SimpleNamespace(layer=layer), aux_width=8),
        _cache_address=cache_address(layer),
        _query_len=4,
        _can_tail=True,
    )
    call = loop.Call(
        drafts=3,
        target_token_ids=torch.zeros(8, dtype=torch.int32),
        target_positions=torch.zeros(8, dtype=torch.int64),
        target_hidden_states=torch.zeros(8, 8),
        next_token_ids=torch.zeros(2, dtype=torch.int32),
        sample_indices=None,
        common=SimpleNamespace(batch_size=lambda: 2, max_query_len=4),
        sampling=SimpleNamespace(all_greedy=True),
        has_mm_embeds=False,
        num_rejected=None,
    )
    assert made.act_for(call) == (loop.WHOLE, "")
    made.runner.num_prompt_logprobs["a request"] = 2
    assert made.act_for(call) == (loop.STOCK, "logprobs of a prompt are asked for")


# -------------------------------------------------------------------------------------- the ranks


class Clock:
    """Every kernel is ahead."""

    def __init__(self, device: Any) -> None:
        self.times = 0

    def seconds(self, act: Any) -> float:
        self.times += 1
        return float(self.times)


def drafter() -> DraftForward:
    layer = torch.nn.Linear(8, 4, bias=False)
    layer.quant_method = type("UnquantizedLinearMethod", (), {})()
    head = SimpleNamespace(
        weight=layer.weight,
        rows=4,
        ranks=1,
        vocab_size=4,
        draft_vocab_size=4,
    )
    return DraftForward(
        SimpleNamespace(  # type: ignore[arg-type]
            products=(Product("a", layer, F32), Product("b", layer, F32)),
            head=head,
            attention=SimpleNamespace(kind="llama"),
            device=SimpleNamespace(type="cuda"),
            hidden_size=8,
            aux_width=8,
            dtype=F32,
            norm_output=False,
        )
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> DraftForward:
    monkeypatch.setattr(forward, "_Clock", Clock)
    monkeypatch.setattr(DraftForward, "_example", lambda self, rows, width: None)
    monkeypatch.setattr(skinny_gemm, "workspace_for", lambda device: torch.zeros(1))
    return drafter()


def test_a_kernel_is_chosen_where_it_is_ahead_on_every_rank(
    measured: DraftForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sum rounds otherwise: ranks with a whole drafter each would draft other tokens."""
    # Of the other rank: no fault, product a, product b, the head, each for 1, 2 and 4 rows.
    other = [True, True, False, True, False, False, False, False, True, True]

    def agree(flags: Sequence[bool]) -> list[bool]:
        assert list(flags) == [True] * 10
        return other

    monkeypatch.setattr(forward, "set_on_every_rank", agree)
    said = measured.tune([4, 2, 1, 2])
    assert [sorted(p.skinny) for p in measured.weights.products] == [[1, 4], []]
    assert measured._by_library == {1}
    assert said == "skinny products by kernels, by rows: a 1 4, head 2-4"


def test_a_rank_that_cannot_measure_says_so_to_the_others(
    measured: DraftForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[list[bool]] = []

    def agree(flags: Sequence[bool]) -> list[bool]:
        said.append(list(flags))
        return [False] * len(flags)

    monkeypatch.setattr(forward, "set_on_every_rank", agree)
    with pytest.raises(Unsupported, match="another rank"):
        measured.tune([1, 2])

    def fails(self: Any, rows: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(DraftForward, "_measured", fails)
    with pytest.raises(torch.OutOfMemoryError):
        measured.tune([1, 2])
    assert said == [[True] * 7, [False] * 7]
    assert not any(product.skinny for product in measured.weights.products)


def test_nothing_is_captured_where_another_rank_has_no_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture runs the drafter's collectives, in which a rank alone would wait for ever."""
    captured: list[Any] = []
    monkeypatch.setattr(
        loop, "plan_or_stock", lambda config: SimpleNamespace(loop=True, graphs=True)
    )
    monkeypatch.setattr(loop.DraftLoop, "of", lambda proposer: object())
    monkeypatch.setattr(loop, "_captured", lambda *args: captured.append(args))
    monkeypatch.setattr(loop, "on_every_rank", lambda done: False)
    monkeypatch.setattr(loop, "first_rank", lambda: True)
    for name in ("empty_cache", "synchronize", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    proposer = SimpleNamespace()
    runner = SimpleNamespace(drafter=proposer, vllm_config=None, device=CPU)
    assert loop.capture(runner) == 0
    assert captured == []
    assert vars(proposer) == {loop._STATE: None}


# ---------------------------------------------------------------------------------- the embedding


def test_the_embedding_of_one_rank_asks_no_other() -> None:
    """The module's own forward pass reduces over whatever ranks the server has."""

    class Layer(torch.nn.Module):
        tp_size = 1
        quant_method = SimpleNamespace(embedding=lambda layer, ids: ids.double().unsqueeze(1))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            raise AssertionError("reduces")

    embedding = weights._embedding(Layer(), F32)
    assert embedding.table is None
    assert embedding.layer(torch.tensor([3, 4], dtype=torch.int32)).tolist() == [[3.0], [4.0]]
