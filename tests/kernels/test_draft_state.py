# SPDX-License-Identifier: Apache-2.0
"""The state of a proposal in Triton's interpreter, against stock's proposer written out in torch.

Buffers hold a mark before a call, so that what is not written shows, and what must not be read is
a number that would show in the result.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_kimi_eagle3.kernels.draft_state import (
    DraftBuffers,
    next_step,
    stage_inputs,
    stage_tail,
    take_rows,
)
from vllm_kimi_eagle3.kernels.mha_reference import ids_of_keys, next_step_reference

PAGE, LIMIT, STEPS = 16, 200, 3
MARK = 7777
ANY = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
CPU = torch.device("cpu")


def marked_buffers(max_batch: int, query_len: int, pages: int, width: int | None) -> DraftBuffers:
    """Buffers in which everything is the mark."""
    buffers = DraftBuffers.of(
        max_batch=max_batch,
        query_len=query_len,
        steps=STEPS,
        pages=pages,
        device=CPU,
        width=width,
        hidden_size=width,
    )
    for field in dataclasses.fields(buffers):
        value = getattr(buffers, field.name)
        if isinstance(value, Tensor):
            value.fill_(MARK)
    return buffers


def numbers(seed: int, most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Step:
    """What the scheduler gives for B requests of Q tokens."""

    token_ids: Tensor
    positions: Tensor
    next_ids: Tensor
    seq_lens: Tensor
    slots: Tensor
    table: Tensor
    rejected: Tensor
    samples: Tensor
    hidden: Tensor


def make_step(
    seed: int, requests: int, query_len: int, *, id_dtype: torch.dtype, width: int = 24
) -> Step:
    tokens = requests * query_len
    seq_lens = numbers(seed, LIMIT - query_len, requests) + query_len
    positions = (seq_lens - query_len)[:, None] + torch.arange(query_len)
    pages = LIMIT // PAGE + 2
    table = (numbers(seed + 1, 900, requests, pages + 3) + 1).int()[:, :pages]
    blocks = table.long().gather(1, positions // PAGE)
    rejected = numbers(seed + 2, query_len, requests)
    samples = torch.arange(requests) * query_len + query_len - 1 - rejected
    return Step(
        token_ids=numbers(seed + 3, 1000, tokens).to(id_dtype),
        positions=positions.reshape(-1),
        next_ids=(numbers(seed + 4, 1000, requests) + 1000).to(id_dtype),
        seq_lens=seq_lens.int(),
        slots=torch.cat([(blocks * PAGE + positions % PAGE).reshape(-1), torch.tensor([MARK])]),
        table=table,
        rejected=rejected.int(),
        samples=samples.to(id_dtype),
        hidden=torch.randn(tokens, width + 8, generator=torch.Generator().manual_seed(seed)).to(
            torch.bfloat16
        )[:, :width],
    )


@ANY
@given(
    st.integers(0, 1000),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([1, 2, 4, 9]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_stage_inputs(
    seed: int,
    requests: int,
    spare: int,
    query_len: int,
    rejects: bool,
    with_hidden: bool,
    id_dtype: torch.dtype,
) -> None:
    step = make_step(seed, requests, query_len, id_dtype=id_dtype)
    batch = requests + spare
    buffers = marked_buffers(batch + 1, query_len, step.table.shape[1], 24)
    stage_inputs(
        buffers,
        batch,
        target_token_ids=step.token_ids,
        target_positions=step.positions,
        next_token_ids=step.next_ids,
        seq_lens=step.seq_lens,
        slot_mapping=step.slots,
        block_table=step.table,
        token_indices_to_sample=step.samples if rejects else None,
        num_rejected=step.rejected if rejects else None,
        hidden=step.hidden if with_hidden else None,
        page_size=PAGE,
    )
    real, rows = requests * query_len, batch * query_len
    samples = torch.arange(1, requests + 1) * query_len - 1
    lengths = step.seq_lens
    if rejects:
        samples, lengths = step.samples.long(), lengths - step.rejected
    # Stock: the ids of the batch shifted by one, then the next tokens at the places to sample.
    ids = torch.cat([step.token_ids[1:], step.token_ids.new_zeros(1)]).int()
    ids[samples] = step.next_ids.int()

    def padded(values: Tensor, rows: int, filling: int) -> Tensor:
        return torch.cat([values, values.new_full((rows - len(values),), filling)])

    assert torch.equal(buffers.token_ids[:rows], padded(ids, rows, 0))
    assert torch.equal(buffers.positions[:rows], padded(step.positions, rows, 0))
    assert torch.equal(buffers.slots[:rows], padded(step.slots[:real], rows, -1))
    assert torch.equal(buffers.seq_lens[:batch], padded(step.seq_lens, batch, 0))
    assert torch.equal(buffers.sample_indices[:requests], samples)
    # A padding row samples one of its own rows.
    assert torch.equal(buffers.sample_indices[:batch] // query_len, torch.arange(batch))
    at_sample = step.positions[samples]
    assert torch.equal(buffers.step_positions[:batch], padded(at_sample, batch, 0))
    assert torch.equal(buffers.step_seq_lens[:batch], padded(lengths, batch, 0))
    for request, length in enumerate(step.seq_lens.tolist()):
        needed = min(-(-(length + STEPS) // PAGE), step.table.shape[1])
        got = buffers.block_table[request]
        assert torch.equal(got[:needed], step.table[request, :needed])
        assert (got[needed:] == MARK).all()
    hidden = buffers.hidden
    assert hidden is not None
    assert torch.equal(hidden[:real], step.hidden if with_hidden else hidden[-1:].expand(real, -1))
    for name in ("token_ids", "positions", "slots", "seq_lens", "sample_indices", "step_positions"):
        values = getattr(buffers, name)
        rows_written = rows if len(values) > batch + 1 else batch
        assert (values[rows_written:] == MARK).all() or query_len == 1
    for name in ("step_token_ids", "step_slots", "drafts", "step_hidden"):
        values = getattr(buffers, name)
        assert torch.equal(values, torch.full_like(values, MARK)), name


@ANY
@given(
    st.integers(0, 1000),
    st.integers(1, 5),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_stage_tail(
    seed: int, requests: int, spare: int, rejects: bool, by_token: bool, id_dtype: torch.dtype
) -> None:
    query_len = 4
    step = make_step(seed, requests, query_len, id_dtype=id_dtype)
    batch = requests + spare
    buffers = marked_buffers(batch + 1, query_len, step.table.shape[1], 24)
    samples = step.samples.long()
    stage_tail(
        buffers,
        batch,
        draft_token_ids=step.next_ids,
        positions=step.positions if by_token else step.positions[samples],
        seq_lens=step.seq_lens,
        block_table=step.table,
        token_indices_to_sample=step.samples if by_token else None,
        num_rejected=step.rejected if rejects else None,
        hidden=step.hidden if by_token else step.hidden[samples],
        page_size=PAGE,
        max_model_len=LIMIT,
    )
    positions, slots, lengths = next_step_reference(
        step.positions[samples],
        step.seq_lens - step.rejected if rejects else step.seq_lens,
        step.table,
        torch.zeros(requests, dtype=torch.bool),
        page_size=PAGE,
        max_model_len=LIMIT,
    )
    assert torch.equal(buffers.step_positions[:requests], positions)
    assert torch.equal(buffers.step_slots[:requests], slots)
    assert torch.equal(buffers.step_seq_lens[:requests], lengths)
    assert torch.equal(buffers.step_token_ids[:requests], step.next_ids.int())
    assert torch.equal(buffers.drafts[:requests, 0], step.next_ids.long())
    assert (buffers.drafts[:, 1:] == MARK).all()
    assert buffers.step_hidden is not None
    assert torch.equal(buffers.step_hidden[:requests], step.hidden[samples])
    assert not buffers.step_positions[requests:batch].any()
    assert not buffers.step_seq_lens[requests:batch].any()
    assert (buffers.step_slots[requests:batch] == -1).all()
    assert (buffers.step_positions[batch:] == MARK).all()


@ANY
@given(
    st.lists(st.sampled_from([0, 1, 15, 16, 40, 196, 197, 198, 199]), min_size=1, max_size=40),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_draft_steps(lengths: list[int], ranks: int | None, id_dtype: torch.dtype) -> None:
    """Several steps in place, up to and past the length limit and with padding rows."""
    batch = len(lengths)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    positions = (seq_lens.long() - 1).clamp(min=0)
    table = (numbers(batch, 900, batch, LIMIT // PAGE + 5) + 1).int()[:, : LIMIT // PAGE + 1]
    slots = torch.full((batch,), -1)  # As after earlier proposals: not looked at before step 1.
    token_ids = torch.zeros(batch, dtype=id_dtype)
    drafts = torch.full((batch, STEPS + 1), MARK)
    past = torch.zeros(batch, dtype=torch.bool)
    expected = (positions, slots, seq_lens)
    for step in range(STEPS + 1):
        last = step == STEPS
        ids = numbers(step, 5000, batch)
        chosen = ids
        if ranks is not None:
            every = numbers(step + 50, 5000, ranks, batch)
            logits = numbers(step + 90, 3, ranks, batch) - 1
            chosen = (logits << 32) | (0x7FFFFFFF - every)
            ids = ids_of_keys(chosen)
            for request in range(batch):
                best = logits[:, request].max()
                assert ids[request] == every[logits[:, request] == best, request].min()
        past = past | ((expected[0] + 1 >= LIMIT) & (expected[2] > 0))
        if not last:
            expected = next_step_reference(
                expected[0], expected[2], table, past, page_size=PAGE, max_model_len=LIMIT
            )
            expected = (expected[0], expected[1], expected[2])
        held = token_ids.clone()
        next_step(
            chosen, positions, seq_lens, table, slots, token_ids, drafts, step,
            page_size=PAGE, max_model_len=LIMIT, advance=not last,
        )  # fmt: skip
        assert torch.equal(drafts[:, step], ids)
        assert (drafts[:, step + 1 :] == MARK).all()
        assert torch.equal(token_ids.long(), held.long() if last else ids)
        assert torch.equal(positions, expected[0])
        assert torch.equal(slots, expected[1])
        assert torch.equal(seq_lens, expected[2])
        padding = torch.tensor(lengths) == 0
        assert not seq_lens[padding].any()
        assert (slots[padding] == -1).all()


def test_past_the_limit_nothing_is_written() -> None:
    """A request at the limit never gets a slot again; one step before it gets its last one."""
    positions, seq_lens = torch.tensor([LIMIT - 1, LIMIT - 2]), torch.tensor([LIMIT, LIMIT - 1])
    seq_lens = seq_lens.int()
    slots, table = torch.tensor([5, 5]), torch.arange(1, 41, dtype=torch.int32).view(2, 20)
    ids, drafts = torch.zeros(2, dtype=torch.int32), torch.zeros(2, STEPS, dtype=torch.int64)
    seen = []
    for step in range(STEPS):
        next_step(
            torch.zeros(2, dtype=torch.int32), positions, seq_lens, table, slots, ids, drafts,
            step, page_size=PAGE, max_model_len=LIMIT,
        )  # fmt: skip
        seen.append((slots.tolist(), positions.tolist(), seq_lens.tolist()))
    at_end = int(table[1, (LIMIT - 1) // PAGE]) * PAGE + (LIMIT - 1) % PAGE
    assert seen == [
        ([-1, at_end], [0, LIMIT - 1], [1, LIMIT]),
        ([-1, -1], [0, 0], [1, 1]),
        ([-1, -1], [0, 0], [1, 1]),
    ]


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_take_rows(two: bool, dtype: torch.dtype) -> None:
    sources = tuple(torch.randn(9, 2100).to(dtype)[:, :2060] for _ in range(1 + two))
    outs = tuple(torch.full((4, 2060), torch.nan, dtype=dtype) for _ in range(1 + two))
    indices = torch.tensor([8, 0, 3, 3])
    take_rows(sources, indices, outs)
    for source, out in zip(sources, outs, strict=True):
        assert torch.equal(out, source[indices])


def test_buffers_begin_as_padding() -> None:
    buffers = DraftBuffers.of(max_batch=3, query_len=4, steps=3, pages=5, device=CPU)
    assert (buffers.slots == -1).all()
    assert (buffers.step_slots == -1).all()
    assert not buffers.seq_lens.any()
    assert buffers.sample_indices.tolist() == [3, 7, 11]
    assert buffers.hidden is None
    assert buffers.step_hidden is None


def test_bad_input_is_named() -> None:
    step = make_step(0, 2, 4, id_dtype=torch.int32)
    buffers = marked_buffers(2, 4, step.table.shape[1], None)
    good = {
        "target_token_ids": step.token_ids,
        "target_positions": step.positions,
        "next_token_ids": step.next_ids,
        "seq_lens": step.seq_lens,
        "slot_mapping": step.slots,
        "block_table": step.table,
    }
    bad = {
        "requests for a graph of 1": (1, {}),
        "in buffers of 2": (3, {}),
        "next_token_ids has 1 rows": (2, {"next_token_ids": step.next_ids[:1]}),
        "target_token_ids has 7 rows": (2, {"target_token_ids": step.token_ids[:7]}),
        "block_table has last stride 2": (2, {"block_table": step.table[:, ::2]}),
        "buffers.hidden has none": (2, {"hidden": step.hidden}),
    }
    for message, (batch, changes) in bad.items():
        with pytest.raises(ValueError, match=message):
            stage_inputs(buffers, batch, **{**good, **changes}, page_size=PAGE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step is 3"):
        next_step(
            step.next_ids, step.positions[:2], step.seq_lens, step.table, step.slots[:2],
            step.next_ids, buffers.drafts, 3, page_size=PAGE, max_model_len=LIMIT,
        )  # fmt: skip
