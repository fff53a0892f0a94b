# SPDX-License-Identifier: Apache-2.0
"""What a proposal of drafts keeps between its passes, in buffers that never move.

A CUDA graph reads and writes the same addresses each time, so before it is replayed one kernel
copies the scheduler's step into :class:`DraftBuffers`, and inside it one kernel after each draft
turns the state to the next draft step. Rows past the requests that there are, up to the graph's
batch, are padding: length 0, slot -1, position 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

__all__ = ["DraftBuffers", "next_step", "stage_inputs", "stage_tail", "take_rows"]

PADDING_SLOT = tl.constexpr(-1)

_COLUMNS = 2048  # Of hidden states that a program copies: 32 bytes a thread.
_PAGES = 1024  # Entries of a block table that a program copies at a time.
_REQUESTS = 32  # Of a program of `next_step`: one a thread of one warp.


@dataclass(frozen=True)
class DraftBuffers:
    """The static inputs and outputs of the drafting graphs of all batches up to ``max_batch``.

    A graph of a smaller batch uses the first rows: Q * batch of those of the first pass, batch of
    the others. Q is ``query_len``, the tokens of a request in the first pass (drafts + 1).

    Attributes:
        query_len: Q.
        token_ids: first pass, ``[max_batch * Q]`` int32: ids shifted by one, the next token at the
            place to sample.
        positions: first pass, ``[max_batch * Q]`` int64.
        slots: first pass, ``[max_batch * Q]`` int64: where keys and values are written, -1 nowhere.
        seq_lens: first pass, ``[max_batch]`` int32: tokens in the cache, all Q included, those
            that were rejected too.
        sample_indices: ``[max_batch]`` int64: the row of the first pass whose result is sampled.
        step_token_ids: draft step, ``[max_batch]`` int32: the last draft.
        step_positions: draft step, ``[max_batch]`` int64.
        step_slots: draft step, ``[max_batch]`` int64.
        step_seq_lens: draft step, ``[max_batch]`` int32, without rejected tokens.
        block_table: ``[max_batch, pages]`` int32; only entries that a proposal reads are valid.
        drafts: ``[max_batch, steps]`` int64, the result.
        hidden: ``[max_batch * Q, width]`` in the model's dtype: what the first pass starts from
            (auxiliary hidden states before ``combine``, or after it), or None.
        step_hidden: ``[max_batch, H]`` in the model's dtype: what a draft step starts from, or
            None.
    """

    query_len: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    sample_indices: torch.Tensor
    step_token_ids: torch.Tensor
    step_positions: torch.Tensor
    step_slots: torch.Tensor
    step_seq_lens: torch.Tensor
    block_table: torch.Tensor
    drafts: torch.Tensor
    hidden: torch.Tensor | None = None
    step_hidden: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        *,
        max_batch: int,
        query_len: int,
        steps: int,
        pages: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        width: int | None = None,
        hidden_size: int | None = None,
    ) -> DraftBuffers:
        """Buffers full of padding rows.

        Args:
            max_batch: the most requests of a graph.
            query_len: tokens of a request in the first pass.
            steps: drafts of a proposal.
            pages: columns of the block table.
            device: where.
            dtype: of the hidden states.
            width: of ``hidden``; None makes none.
            hidden_size: of ``step_hidden``; None makes none.
        """
        rows = max_batch * query_len

        def filled(shape: tuple[int, ...], value: int, kind: torch.dtype) -> torch.Tensor:
            return torch.full(shape, value, dtype=kind, device=device)

        def states(rows: int, columns: int | None) -> torch.Tensor | None:
            if columns is None:
                return None
            return torch.zeros(rows, columns, dtype=dtype, device=device)

        return cls(
            query_len=query_len,
            token_ids=filled((rows,), 0, torch.int32),
            positions=filled((rows,), 0, torch.int64),
            slots=filled((rows,), -1, torch.int64),
            seq_lens=filled((max_batch,), 0, torch.int32),
            sample_indices=torch.arange(max_batch, device=device) * query_len + query_len - 1,
            step_token_ids=filled((max_batch,), 0, torch.int32),
            step_positions=filled((max_batch,), 0, torch.int64),
            step_slots=filled((max_batch,), -1, torch.int64),
            step_seq_lens=filled((max_batch,), 0, torch.int32),
            block_table=filled((max_batch, pages), 0, torch.int32),
            drafts=filled((max_batch, steps), 0, torch.int64),
            hidden=states(rows, width),
            step_hidden=states(max_batch, hidden_size),
        )


def stage_inputs(
    buffers: DraftBuffers,
    batch: int,
    *,
    target_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    next_token_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    token_indices_to_sample: torch.Tensor | None = None,
    num_rejected: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    page_size: int,
) -> None:
    """Copies a uniform verify step into the buffers of the whole proposal's graph.

    As stock's ``set_inputs_first_pass`` and the lines of ``propose`` after its first pass: ids are
    shifted by one and ``next_token_ids`` put at the places to sample; positions, slots, lengths
    as they are; ``step_positions`` is the position at the place to sample, ``step_seq_lens`` the
    length without ``num_rejected``. Then a graph is: first pass over ``token_ids, positions, slots,
    seq_lens``; rows ``sample_indices`` of its results (:func:`take_rows`); their keys;
    ``next_step(..., step=0)``; a draft step; ``next_step(..., step=1)`` and so on.

    Ids past the place to sample are of rejected tokens: nothing that is kept depends on them.

    Args:
        buffers: what is written: all but ``drafts``, ``step_token_ids``, ``step_slots`` and
            ``step_hidden``, which the graph writes before it reads them.
        batch: rows of the graph that is to be replayed, at least the number of requests B.
        target_token_ids: ``[B * Q]``, int32 or int64, Q tokens a request.
        target_positions: ``[B * Q]`` int64.
        next_token_ids: ``[B]``, int32 or int64.
        seq_lens: ``[B]`` int32, rejected tokens included; not changed.
        slot_mapping: ``[B * Q]`` or longer, int64, of the drafter's cache.
        block_table: ``[B, pages]`` int32 of the drafter's cache, any row stride.
        token_indices_to_sample: ``[B]``, int32 or int64; None is the last of each request.
        num_rejected: ``[B]`` int32; None is 0.
        hidden: ``[B * Q, width]``, last stride 1, copied to ``buffers.hidden``; None leaves it.
        page_size: tokens per page of the drafter's cache.

    Raises:
        ValueError: shapes that do not fit each other or the buffers.
    """
    requests = seq_lens.shape[0]
    query_len = buffers.query_len
    _check_batch(buffers, batch, requests)
    _check_rows(
        requests,
        next_token_ids=next_token_ids,
        block_table=block_table,
        token_indices_to_sample=token_indices_to_sample,
        num_rejected=num_rejected,
    )
    _check_rows(
        requests * query_len,
        target_token_ids=target_token_ids,
        target_positions=target_positions,
        slot_mapping=slot_mapping,
        hidden=hidden,
    )
    hidden_out, width = _hidden_of(hidden, buffers.hidden, "hidden")
    parts = triton.cdiv(width, _COLUMNS) if width else 1
    _stage_inputs[(batch, parts)](
        target_token_ids,
        target_positions,
        next_token_ids,
        seq_lens,
        slot_mapping,
        block_table,
        token_indices_to_sample,
        num_rejected,
        hidden,
        buffers.token_ids,
        buffers.positions,
        buffers.slots,
        buffers.seq_lens,
        buffers.sample_indices,
        buffers.step_positions,
        buffers.step_seq_lens,
        buffers.block_table,
        hidden_out,
        requests,
        min(block_table.shape[1], buffers.block_table.shape[1]),
        block_table.stride(0),
        buffers.block_table.stride(0),
        0 if hidden is None else hidden.stride(0),
        0 if hidden_out is None else hidden_out.stride(0),
        QUERY_LEN=query_len,
        QUERY_BLOCK=triton.next_power_of_2(query_len),
        STEPS=buffers.drafts.shape[1],
        PAGE=page_size,
        WIDTH=width,
        COLUMNS=_COLUMNS,
        PAGES=_PAGES,
        num_warps=4,
    )


def stage_tail(
    buffers: DraftBuffers,
    batch: int,
    *,
    draft_token_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    token_indices_to_sample: torch.Tensor | None = None,
    num_rejected: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    page_size: int,
    max_model_len: int,
) -> None:
    """Copies what stock's own first pass left into the buffers of the graph of steps 2 to k.

    It also does for draft 1 what :func:`next_step` does: ``drafts[:, 0]`` and ``step_token_ids``
    hold it, and ``step_positions``, ``step_slots`` and ``step_seq_lens`` are those of the next
    draft step. So the tail's graph begins with a draft step and then ``next_step(..., step=1)``.

    Args:
        buffers: what is written: ``drafts[:, 0]`` and all that begin with ``step_``, and
            ``block_table``.
        batch: rows of the graph that is to be replayed, at least the number of requests B.
        draft_token_ids: ``[B]``, int32 or int64: the first drafts.
        positions: int64 positions of the first pass's tokens, ``[T]`` or longer.
        seq_lens: ``[B]`` int32 as the first pass had them; not changed. Rejected tokens are taken
            off here, not by the caller.
        block_table: ``[B, pages]`` int32 of the drafter's cache, any row stride.
        token_indices_to_sample: ``[B]``, int32 or int64: the rows of ``positions`` and ``hidden``;
            None where these have a row for each request already.
        num_rejected: ``[B]`` int32; None is 0.
        hidden: ``[T, H]``, last stride 1: what the first pass gives the next one; its sampled rows
            go to ``buffers.step_hidden``. None leaves that.
        page_size: tokens per page of the drafter's cache.
        max_model_len: positions from here on are past the limit.

    Raises:
        ValueError: shapes that do not fit each other or the buffers.
    """
    requests = seq_lens.shape[0]
    _check_batch(buffers, batch, requests)
    _check_rows(
        requests,
        draft_token_ids=draft_token_ids,
        positions=positions,
        block_table=block_table,
        token_indices_to_sample=token_indices_to_sample,
        num_rejected=num_rejected,
        hidden=hidden,
    )
    hidden_out, width = _hidden_of(hidden, buffers.step_hidden, "step_hidden")
    parts = triton.cdiv(width, _COLUMNS) if width else 1
    _stage_tail[(batch, parts)](
        draft_token_ids,
        positions,
        seq_lens,
        block_table,
        token_indices_to_sample,
        num_rejected,
        hidden,
        buffers.step_token_ids,
        buffers.step_positions,
        buffers.step_slots,
        buffers.step_seq_lens,
        buffers.block_table,
        buffers.drafts,
        hidden_out,
        requests,
        min(block_table.shape[1], buffers.block_table.shape[1]),
        max_model_len,
        block_table.stride(0),
        buffers.block_table.stride(0),
        buffers.drafts.stride(0),
        0 if hidden is None else hidden.stride(0),
        0 if hidden_out is None else hidden_out.stride(0),
        STEPS=buffers.drafts.shape[1],
        PAGE=page_size,
        WIDTH=width,
        COLUMNS=_COLUMNS,
        PAGES=_PAGES,
        num_warps=4,
    )


def take_rows(
    sources: tuple[torch.Tensor, ...],
    indices: torch.Tensor,
    outs: tuple[torch.Tensor, ...],
) -> None:
    """Rows of one or two matrices, in one kernel: ``outs[i][b] = sources[i][indices[b]]``.

    For the sampled rows of the first pass: what the head takes and what the next pass takes.

    Args:
        sources: one or two ``[T, H]`` of the same shape and dtype, last stride 1.
        indices: ``[B]``, int32 or int64.
        outs: as many ``[B, H]``, last stride 1.
    """
    if not 1 <= len(sources) == len(outs) <= 2:
        raise ValueError(
            f"{len(sources)} sources and {len(outs)} outs; it takes one or two of each"
        )
    batch, width = outs[0].shape
    _check_rows(batch, indices=indices)
    for source, out in zip(sources, outs, strict=True):
        if out.shape != (batch, width) or source.shape[1] != width or source.dtype != out.dtype:
            raise ValueError(
                f"rows of {tuple(source.shape)} {source.dtype} do not go into {tuple(out.shape)} "
                f"{out.dtype}"
            )
        if source.stride(1) != 1 or out.stride(1) != 1:
            raise ValueError("the last stride of sources and outs must be 1")
    if batch == 0:
        return
    two = len(sources) == 2
    _take_rows[(batch, triton.cdiv(width, _COLUMNS))](
        sources[0],
        sources[-1],
        indices,
        outs[0],
        outs[-1],
        sources[0].stride(0),
        sources[-1].stride(0),
        outs[0].stride(0),
        outs[-1].stride(0),
        WIDTH=width,
        COLUMNS=_COLUMNS,
        TWO=two,
        num_warps=4,
    )


def next_step(
    chosen: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    token_ids: torch.Tensor,
    drafts_out: torch.Tensor,
    step: int,
    *,
    page_size: int,
    max_model_len: int,
    advance: bool = True,
) -> None:
    """Stores a draft of each request and turns the state to the next draft step, in place.

    As stock's ``eagle_step_slot_mapping_metadata_kernel``: the position grows by one, the slot is
    looked up, the length grows by one; past the length limit the position is 0, the slot -1 and
    the length 1. Such a row stays so, as up to 0.17; from 0.18 on stock's goes on from position 0
    and writes there. A row of length 0 is padding and stays so, with position 0 and slot -1.

    Args:
        chosen: int64 ``[ranks, B]`` keys of ``head_argmax`` (the largest of a column decides), or
            int32 or int64 ``[B]`` token ids.
        positions: ``[B]`` int64, changed: of the token that was sampled from.
        seq_lens: ``[B]`` int32, changed.
        block_table: ``[B, pages]`` int32.
        slots: ``[B]`` int64, written.
        token_ids: ``[B]``, int32 or int64, written: the drafts.
        drafts_out: ``[B, steps]`` int64; column ``step`` is written.
        step: which draft of the proposal this is, from 0.
        page_size: tokens per page of the cache.
        max_model_len: positions from here on are past the limit.
        advance: False, for a proposal's last draft, writes ``drafts_out`` alone.
    """
    batch = positions.shape[0]
    keys = chosen.ndim == 2
    if keys and (chosen.dtype != torch.int64 or chosen.shape[1] != batch):
        raise ValueError(
            f"keys are {tuple(chosen.shape)} of {chosen.dtype}; they must be [ranks, {batch}] of "
            "torch.int64"
        )
    if not 0 <= step < drafts_out.shape[1]:
        raise ValueError(f"step is {step}; drafts_out has {drafts_out.shape[1]} columns")
    _check_rows(
        batch,
        seq_lens=seq_lens,
        block_table=block_table,
        slots=slots,
        token_ids=token_ids,
        drafts_out=drafts_out,
        chosen=chosen[0] if keys else chosen,
    )
    if batch == 0:
        return
    _next_step[(triton.cdiv(batch, _REQUESTS),)](
        chosen,
        positions,
        seq_lens,
        block_table,
        slots,
        token_ids,
        drafts_out,
        batch,
        step,
        block_table.shape[1],
        max_model_len,
        chosen.stride(0) if keys else 0,
        chosen.stride(-1),
        block_table.stride(0),
        drafts_out.stride(0),
        drafts_out.stride(1),
        RANKS=chosen.shape[0] if keys else 0,
        FIRST=step == 0,
        ADVANCE=advance,
        PAGE=page_size,
        REQUESTS=_REQUESTS,
        num_warps=1,
    )


def _check_batch(buffers: DraftBuffers, batch: int, requests: int) -> None:
    most = buffers.seq_lens.shape[0]
    if not 1 <= batch <= most or requests > batch:
        raise ValueError(
            f"{requests} requests for a graph of {batch}, in buffers of {most}; each must fit the "
            "next"
        )


def _check_rows(rows: int, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.shape[0] < rows:
            raise ValueError(f"{name} has {tensor.shape[0]} rows; {rows} are read or written")
        if name not in ("drafts_out", "chosen") and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has last stride {tensor.stride(-1)}; it must be 1")


def _hidden_of(
    hidden: torch.Tensor | None, out: torch.Tensor | None, name: str
) -> tuple[torch.Tensor | None, int]:
    """Where the hidden states go, and how many columns; the width 0 copies none."""
    if hidden is None:
        return None, 0
    if out is None or hidden.shape[1] != out.shape[1] or hidden.dtype != out.dtype:
        held = "none" if out is None else f"{out.shape[1]} of {out.dtype}"
        raise ValueError(
            f"hidden has {hidden.shape[1]} columns of {hidden.dtype}; buffers.{name} has {held}"
        )
    return out, hidden.shape[1]


@triton.jit
def _advance(
    position,
    seq_len,
    was_past,
    block_row,
    pages,
    max_model_len,
    PAGE: tl.constexpr,
):
    """Position, slot and length of the next draft step; each argument a number or one a request.

    ``was_past``: the request was past the limit before, hence its position is no longer its own.
    """
    padding = seq_len <= 0
    following = position + 1
    past = (following >= max_model_len) | was_past
    nowhere = past | padding
    following = tl.where(nowhere, 0, following)
    column = tl.minimum(following // PAGE, pages - 1)
    block = tl.load(block_row + column, mask=padding == 0, other=0).to(tl.int64)
    slot = tl.where(nowhere, PADDING_SLOT, block * PAGE + following % PAGE)
    longer = tl.minimum(tl.where(past, 1, seq_len + 1), max_model_len)
    return following, slot, tl.where(padding, 0, longer)


@triton.jit
def _copy_pages(block_row, block_row_out, count, part, parts, PAGES: tl.constexpr):
    entries = tl.arange(0, PAGES)
    for first in range(part * PAGES, count, parts * PAGES):
        mask = first + entries < count
        tl.store(
            block_row_out + first + entries,
            tl.load(block_row + first + entries, mask=mask, other=0),
            mask=mask,
        )


# What changes from step to step must not be compiled in, nor how a slice happens to lie.
@triton.jit(
    do_not_specialize=["requests", "pages", "stride_block_table"],
    do_not_specialize_on_alignment=[
        "target_token_ids",
        "target_positions",
        "next_token_ids",
        "seq_lens",
        "slot_mapping",
        "block_table",
        "sample_indices",
        "num_rejected",
    ],
)
def _stage_inputs(
    target_token_ids,
    target_positions,
    next_token_ids,
    seq_lens,
    slot_mapping,
    block_table,
    sample_indices,
    num_rejected,
    hidden,
    token_ids_out,
    positions_out,
    slots_out,
    seq_lens_out,
    sample_indices_out,
    step_positions_out,
    step_seq_lens_out,
    block_table_out,
    hidden_out,
    requests,
    pages,
    stride_block_table,
    stride_block_table_out,
    stride_hidden,
    stride_hidden_out,
    QUERY_LEN: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Program (request, part): the request's numbers if the first part, and a part of its rows."""
    request = tl.program_id(0)
    part = tl.program_id(1)
    is_real = request < requests
    seq_len = tl.load(seq_lens + request, mask=is_real, other=0)
    if part == 0:
        tokens = tl.arange(0, QUERY_BLOCK)
        rows = request * QUERY_LEN + tokens
        there = tokens < QUERY_LEN
        mask = there & is_real
        sample = request * QUERY_LEN + QUERY_LEN - 1
        if sample_indices is not None:
            sample = tl.load(sample_indices + request, mask=is_real, other=0).to(tl.int32)
            sample = tl.where(is_real, sample, request * QUERY_LEN)
        rejected = 0
        if num_rejected is not None:
            rejected = tl.load(num_rejected + request, mask=is_real, other=0).to(tl.int32)
        next_id = tl.load(next_token_ids + request, mask=is_real, other=0).to(tl.int32)
        ids = tl.load(
            target_token_ids + rows + 1, mask=mask & (rows + 1 < requests * QUERY_LEN), other=0
        ).to(tl.int32)
        ids = tl.where(rows == sample, next_id, ids)
        positions = tl.load(target_positions + rows, mask=mask, other=0)
        slots = tl.load(slot_mapping + rows, mask=mask, other=PADDING_SLOT)
        tl.store(token_ids_out + rows, ids, mask=there)
        tl.store(positions_out + rows, positions, mask=there)
        tl.store(slots_out + rows, slots, mask=there)
        tl.store(seq_lens_out + request, seq_len)
        tl.store(sample_indices_out + request, sample.to(tl.int64))
        sampled = tl.sum(tl.where(rows == sample, positions, 0), 0)
        tl.store(step_positions_out + request, sampled)
        tl.store(step_seq_lens_out + request, seq_len - rejected)
    if is_real:
        _copy_pages(
            block_table + request.to(tl.int64) * stride_block_table,
            block_table_out + request.to(tl.int64) * stride_block_table_out,
            tl.minimum((seq_len + STEPS + PAGE - 1) // PAGE, pages),
            part,
            tl.num_programs(1),
            PAGES,
        )
        if WIDTH > 0:
            columns = part * COLUMNS + tl.arange(0, COLUMNS)
            mask = columns < WIDTH
            for token in tl.static_range(QUERY_LEN):
                row = (request * QUERY_LEN + token).to(tl.int64)
                states = tl.load(hidden + row * stride_hidden + columns, mask=mask)
                tl.store(hidden_out + row * stride_hidden_out + columns, states, mask=mask)


@triton.jit(
    do_not_specialize=["requests", "pages", "max_model_len", "stride_block_table"],
    do_not_specialize_on_alignment=[
        "draft_token_ids",
        "positions",
        "seq_lens",
        "block_table",
        "sample_indices",
        "num_rejected",
    ],
)
def _stage_tail(
    draft_token_ids,
    positions,
    seq_lens,
    block_table,
    sample_indices,
    num_rejected,
    hidden,
    token_ids_out,
    positions_out,
    slots_out,
    seq_lens_out,
    block_table_out,
    drafts_out,
    hidden_out,
    requests,
    pages,
    max_model_len,
    stride_block_table,
    stride_block_table_out,
    stride_drafts,
    stride_hidden,
    stride_hidden_out,
    STEPS: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Program (request, part): the request's numbers if the first part, and a part of its row."""
    request = tl.program_id(0)
    part = tl.program_id(1)
    is_real = request < requests
    seq_len = tl.load(seq_lens + request, mask=is_real, other=0)
    sample = request
    if sample_indices is not None:
        sample = tl.load(sample_indices + request, mask=is_real, other=0).to(tl.int32)
    block_row = block_table + tl.where(is_real, request, 0).to(tl.int64) * stride_block_table
    if part == 0:
        rejected = 0
        if num_rejected is not None:
            rejected = tl.load(num_rejected + request, mask=is_real, other=0).to(tl.int32)
        draft = tl.load(draft_token_ids + request, mask=is_real, other=0)
        position = tl.load(positions + sample, mask=is_real, other=0)
        position, slot, longer = _advance(
            position, seq_len - rejected, position < 0, block_row, pages, max_model_len, PAGE
        )
        tl.store(token_ids_out + request, draft.to(tl.int32))
        tl.store(drafts_out + request.to(tl.int64) * stride_drafts, draft.to(tl.int64))
        tl.store(positions_out + request, position)
        tl.store(slots_out + request, slot)
        tl.store(seq_lens_out + request, longer)
    if is_real:
        _copy_pages(
            block_row,
            block_table_out + request.to(tl.int64) * stride_block_table_out,
            tl.minimum((seq_len + STEPS + PAGE - 1) // PAGE, pages),
            part,
            tl.num_programs(1),
            PAGES,
        )
        if WIDTH > 0:
            columns = part * COLUMNS + tl.arange(0, COLUMNS)
            mask = columns < WIDTH
            states = tl.load(hidden + sample.to(tl.int64) * stride_hidden + columns, mask=mask)
            tl.store(
                hidden_out + request.to(tl.int64) * stride_hidden_out + columns, states, mask=mask
            )


@triton.jit
def _take_rows(
    first,
    second,
    indices,
    first_out,
    second_out,
    stride_first,
    stride_second,
    stride_first_out,
    stride_second_out,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TWO: tl.constexpr,
):
    """Program (row, part of its columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < WIDTH
    index = tl.load(indices + row).to(tl.int64)
    taken = tl.load(first + index * stride_first + columns, mask=mask)
    if TWO:
        other = tl.load(second + index * stride_second + columns, mask=mask)
        tl.store(second_out + row * stride_second_out + columns, other, mask=mask)
    tl.store(first_out + row * stride_first_out + columns, taken, mask=mask)


@triton.jit(do_not_specialize=["batch", "step", "pages", "max_model_len", "stride_chosen_rank"])
def _next_step(
    chosen,
    positions,
    seq_lens,
    block_table,
    slots,
    token_ids,
    drafts_out,
    batch,
    step,
    pages,
    max_model_len,
    stride_chosen_rank,
    stride_chosen,
    stride_block_table,
    stride_drafts,
    stride_drafts_step,
    RANKS: tl.constexpr,
    FIRST: tl.constexpr,
    ADVANCE: tl.constexpr,
    PAGE: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Program: some requests, one a thread."""
    requests = tl.program_id(0) * REQUESTS + tl.arange(0, REQUESTS)
    mask = requests < batch
    best = tl.load(chosen + requests * stride_chosen, mask=mask, other=0).to(tl.int64)
    if RANKS > 0:
        for rank in tl.static_range(1, RANKS):
            there = chosen + rank * stride_chosen_rank + requests * stride_chosen
            best = tl.maximum(best, tl.load(there, mask=mask, other=0))
        best = 0x7FFFFFFF - (best & 0xFFFFFFFF)
    to = drafts_out + requests.to(tl.int64) * stride_drafts + step * stride_drafts_step
    tl.store(to, best, mask=mask)
    if ADVANCE:
        position = tl.load(positions + requests, mask=mask, other=0)
        seq_len = tl.load(seq_lens + requests, mask=mask, other=0)
        was_past = position < 0
        if not FIRST:
            was_past = tl.load(slots + requests, mask=mask, other=0) == PADDING_SLOT
        block_row = block_table + requests.to(tl.int64) * stride_block_table
        position, slot, longer = _advance(
            position, seq_len, was_past, block_row, pages, max_model_len, PAGE
        )
        tl.store(token_ids + requests, best.to(token_ids.dtype.element_ty), mask=mask)
        tl.store(positions + requests, position, mask=mask)
        tl.store(slots + requests, slot, mask=mask)
        tl.store(seq_lens + requests, longer, mask=mask)
