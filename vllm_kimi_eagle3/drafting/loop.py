# SPDX-License-Identifier: Apache-2.0
"""A proposal on the V1 runner: its passes in one CUDA graph, in the place of stock's loop.

Stock launches each draft step from the host, in pieces. Here a *whole* proposal (the first pass
over the k + 1 tokens of each request and the k - 1 draft steps) is one graph where every request of
the step was verified; elsewhere, as with a prompt in the batch, stock's own first pass runs for one
draft and the *tail*, draft steps 2 to k, is one graph. Nothing waits for the GPU.

Without graphs the same code runs launch by launch: on the CPU, and where it is forced.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from vllm_kimi_eagle3.kernels.draft_state import (
    DraftBuffers,
    next_step,
    stage_inputs,
    stage_tail,
    take_rows,
)
from vllm_kimi_eagle3.log import get_logger

from .attend import PagedAttend, PagedCaches, cache_address, paged_caches
from .forward import DraftForward
from .plan import buckets_of, is_for, plan_or_stock
from .ranks import first_rank, on_every_rank
from .weights import AttentionFacts, Unsupported

__all__ = ["Call", "DraftLoop", "Signature", "capture", "propose"]

logger = get_logger(__name__)

WHOLE, TAIL, STOCK = "whole", "tail", "stock"

Stock = Callable[..., torch.Tensor]

# Bytes for partial results of attention; a batch that needs more is several calls, of so many
# requests each.
_SCRATCH = 128 * 1024**2
_BATCH_STEP = 16
_WARM_UPS = 1
_STATE = "kimi_eagle3_loop"


@dataclass(frozen=True)
class Call:
    """The arguments of a release's ``propose`` that the loop reads.

    Attributes:
        drafts: drafts that are asked for.
        target_token_ids: ``[T]``, those of the verify step.
        target_positions: ``[T]`` int64.
        target_hidden_states: ``[T, n*W]``, before ``combine``.
        next_token_ids: ``[B]``.
        sample_indices: ``[B]``, or None for the last token of each request.
        common: vLLM's ``CommonAttentionMetadata`` of the verify step.
        sampling: its ``SamplingMetadata``.
        has_mm_embeds: some token's embedding is not of the table.
        num_rejected: ``[B]`` int32 on the device, or None.
    """

    drafts: int
    target_token_ids: torch.Tensor
    target_positions: torch.Tensor
    target_hidden_states: torch.Tensor
    next_token_ids: torch.Tensor
    sample_indices: torch.Tensor | None
    common: Any
    sampling: Any
    has_mm_embeds: bool
    num_rejected: torch.Tensor | None


class Signature:
    """How a release's ``propose`` names what the loop reads."""

    def __init__(self, stock: Stock) -> None:
        """Args: stock: ``propose``, unbound.

        Raises:
            TypeError: it lacks an argument that the loop reads.
        """
        self._signature = inspect.signature(stock)
        names = self._signature.parameters
        # 0.15 has the older name.
        self._sample = next(
            (n for n in ("token_indices_to_sample", "last_token_indices") if n in names), ""
        )
        self.dynamic = "num_speculative_tokens" in names
        needed = (
            self._sample,
            "target_token_ids",
            "target_positions",
            "target_hidden_states",
            "next_token_ids",
            "common_attn_metadata",
            "sampling_metadata",
            "mm_embed_inputs",
            "num_rejected_tokens_gpu",
        )
        if not all(name in names for name in needed):
            raise TypeError(f"propose{self._signature} has not the arguments {needed}")

    def named(self, proposer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """A call's arguments by name, without ``self``."""
        if not args:
            return kwargs
        bound = dict(self._signature.bind(proposer, *args, **kwargs).arguments)
        bound.pop(next(iter(self._signature.parameters)))
        return bound

    def call(self, proposer: Any, named: Mapping[str, Any]) -> Call:
        """What the loop reads of a call."""
        embeds = named.get("mm_embed_inputs")
        return Call(
            drafts=named["num_speculative_tokens"]
            if self.dynamic
            else proposer.num_speculative_tokens,
            target_token_ids=named["target_token_ids"],
            target_positions=named["target_positions"],
            target_hidden_states=named["target_hidden_states"],
            next_token_ids=named["next_token_ids"],
            sample_indices=named.get(self._sample),
            common=named["common_attn_metadata"],
            sampling=named["sampling_metadata"],
            has_mm_embeds=bool(embeds is not None and embeds[0]),
            num_rejected=named.get("num_rejected_tokens_gpu"),
        )


class DraftLoop:
    """A proposer's loop.

    Attributes:
        drafts: k, drafts of a proposal.
        buckets: batches for which there are graphs, in ascending order.
        graphs: CUDA graphs by act and bucket; none before :meth:`capture`.
        runner: whose graphs have the same memory; set with :attr:`graphs`.
    """

    def __init__(
        self,
        proposer: Any,
        forward: DraftForward,
        caches: PagedCaches,
        *,
        buckets: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        """Args:
            proposer: vLLM's V1 proposer.
            forward: of its drafter.
            caches: of the drafter's attention layer.
            buckets: see :attr:`buckets`.
            max_model_len: positions from here on are drafted for nobody.

        Raises:
            Unsupported: the kernels cannot serve this drafter here.
        """
        self.proposer = proposer
        self.forward = forward
        # Not the proposer's own, which the release may change from step to step.
        self.drafts: int = proposer.speculative_config.num_speculative_tokens
        self.buckets = buckets
        self.graphs: dict[tuple[str, int], Any] = {}
        self.runner: Any = None
        self._caches = caches
        self._max_model_len = max_model_len
        self._query_len = self.drafts + 1
        facts = forward.attention
        for query_len in (self._query_len, 1):
            if why := PagedAttend.unsupported(facts, caches, query_len=query_len):
                raise Unsupported(why)
        self._cache_address = cache_address(facts.layer)
        self._buffers = DraftBuffers.of(
            max_batch=buckets[-1],
            query_len=self._query_len,
            steps=self.drafts,
            pages=-(-max_model_len // caches.page_size),
            device=forward.device,
            dtype=forward.dtype,
            width=forward.aux_width,
            hidden_size=forward.hidden_size,
        )
        self._head_rows = torch.zeros(
            (buckets[-1], forward.hidden_size), dtype=forward.dtype, device=forward.device
        )
        self._scratch_batch, numel = _scratch(facts, buckets[-1], self._query_len, forward.device)
        self._workspace = torch.empty(numel, dtype=torch.float32, device=forward.device)
        self._attends: dict[tuple[int, int], PagedAttend] = {}
        # Another wrapper than a module replays its forward pass without calling hooks.
        self._can_tail = isinstance(proposer.model, torch.nn.Module) and self.drafts > 1
        self._said: set[str] = set()

    @classmethod
    def of(cls, proposer: Any) -> DraftLoop:
        """The loop of a proposer whose drafter is loaded and whose KV cache is bound.

        Raises:
            Unsupported: the kernels cannot serve this drafter here.
        """
        config = proposer.vllm_config
        model = proposer.model
        # Upstream's wrapper of a graph with breaks, from 0.26 on.
        if not isinstance(model, torch.nn.Module) and hasattr(model, "unwrap"):
            model = model.unwrap()
        forward = DraftForward.of(model)
        facts = forward.attention
        if _backend_name(facts.layer) == "TREE_ATTN":
            raise Unsupported("TREE_ATTN drafts a tree")
        sizes = getattr(config.compilation_config, "cudagraph_capture_sizes", None) or ()
        return cls(
            proposer,
            forward,
            paged_caches(facts.layer),
            buckets=buckets_of(sizes, config.scheduler_config.max_num_seqs),
            max_model_len=proposer.max_model_len,
        )

    def capture(self, pool: Any) -> None:
        """Capture all graphs, the largest first, in the current stream, which must not be the
        default one; each is run once before.

        Args:
            pool: the memory pool of the graphs.
        """
        started = time.perf_counter()
        rows = {n for bucket in self.buckets for n in (bucket, bucket * self._query_len)}
        with torch.inference_mode():
            chosen = self.forward.tune(sorted(rows))
        logger.debug(
            "vllm-kimi-eagle3: drafting: %s (%.2f s)", chosen, time.perf_counter() - started
        )
        collecting = gc.isenabled()
        gc.collect()
        # What is freed by a collection during a capture would be part of it.
        gc.disable()
        try:
            with torch.inference_mode():
                self._warm_up_staging()
                for bucket in reversed(self.buckets):
                    for act in self._acts():
                        self._capture_one(act, bucket, pool)
        finally:
            if collecting:
                gc.enable()

    def _warm_up_staging(self) -> None:
        """Compile what copies the inputs, in the forms that a server's steps have: no request."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.forward.device)

        one, tokens = zeros(1), self._query_len
        forward, pages = self.forward, self._buffers.block_table.shape[1]
        for given in (one, None):
            stage_inputs(
                self._buffers,
                1,
                target_token_ids=zeros(tokens),
                target_positions=zeros(tokens, dtype=torch.int64),
                next_token_ids=one,
                seq_lens=one,
                slot_mapping=zeros(tokens, dtype=torch.int64) - 1,
                block_table=zeros(1, pages),
                token_indices_to_sample=given,
                num_rejected=given,
                hidden=zeros(tokens, forward.aux_width, dtype=forward.dtype),
                page_size=self._caches.page_size,
            )
            stage_tail(
                self._buffers,
                1,
                draft_token_ids=zeros(1, dtype=torch.int64),
                positions=zeros(tokens, dtype=torch.int64),
                seq_lens=one,
                block_table=zeros(1, pages),
                token_indices_to_sample=one,
                num_rejected=given,
                hidden=zeros(tokens, forward.hidden_size, dtype=forward.dtype),
                page_size=self._caches.page_size,
                max_model_len=self._max_model_len,
            )

    def _capture_one(self, act: str, bucket: int, pool: Any) -> None:
        run = self._run_whole if act == WHOLE else self._run_tail
        started = time.perf_counter()
        for _ in range(_WARM_UPS):
            run(bucket)
        torch.cuda.synchronize()
        warm = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which collects garbage for each graph.
        graph.capture_begin(pool=pool)
        try:
            run(bucket)
        except BaseException:
            # What it raises now only says that there was an error before.
            with contextlib.suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()
        self.graphs[act, bucket] = graph
        logger.debug(
            "vllm-kimi-eagle3: drafting: %s of %d: warm-up %.3f s, capture %.3f s",
            act,
            bucket,
            warm - started,
            time.perf_counter() - warm,
        )

    def _acts(self) -> tuple[str, ...]:
        return (WHOLE, TAIL) if self._can_tail else (WHOLE,)

    def act_for(self, call: Call) -> tuple[str, str]:
        """What serves a proposal, and for stock the reason; the same on every rank."""
        batch = call.common.batch_size()
        if call.drafts != self.drafts:
            return STOCK, f"{call.drafts} drafts instead of {self.drafts}"
        if batch > self.buckets[-1]:
            return STOCK, f"more than {self.buckets[-1]} requests"
        if not call.sampling.all_greedy and getattr(
            self.proposer, "_enable_probabilistic_draft_probs", False
        ):
            return STOCK, "drafts are sampled"
        # They are computed after the drafts, from hidden states that a graph of the target may have
        # left in the pool which these graphs use too.
        if getattr(self.runner, "num_prompt_logprobs", None):
            return STOCK, "logprobs of a prompt are asked for"
        if cache_address(self.forward.attention.layer) != self._cache_address:
            return STOCK, "the KV cache is another than at the start"
        if batch == 0 or call.next_token_ids.shape[0] != batch or call.target_positions.dim() != 1:
            return STOCK, "a batch of another shape"
        if (
            not call.has_mm_embeds
            and call.common.max_query_len == self._query_len
            and call.target_token_ids.shape[0] == batch * self._query_len
            and call.target_hidden_states.shape[-1] == self.forward.aux_width
        ):
            return WHOLE, ""
        if self._can_tail:
            return TAIL, ""
        return STOCK, "a batch that is no verify step"

    def propose(self, stock: Stock, signature: Signature, named: dict[str, Any]) -> torch.Tensor:
        """The drafts, ``[B, k]`` int64, in a tensor of their own.

        Args:
            stock: the release's ``propose``, unbound.
            signature: its.
            named: the arguments by name.
        """
        started = time.perf_counter()
        call = signature.call(self.proposer, named)
        act, why = self.act_for(call)
        with torch.inference_mode():
            if act == WHOLE:
                drafts = self._whole(call)
            elif act == TAIL:
                drafts = self._tail(call, stock, signature, named)
            else:
                drafts = stock(self.proposer, **named)
        self._say(act, why)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "vllm-kimi-eagle3: drafting: %s of %d requests, %d tokens, %.3f ms on the host%s",
                act,
                call.common.batch_size(),
                call.target_token_ids.shape[0],
                1e3 * (time.perf_counter() - started),
                f" ({why})" if why else "",
            )
        return drafts

    def _say(self, act: str, why: str) -> None:
        key = why if act == STOCK else act
        if key not in self._said and len(self._said) < 16:
            self._said.add(key)
            if act == STOCK:
                logger.info("vllm-kimi-eagle3: drafting: vLLM's own for a proposal: %s", why)

    def _whole(self, call: Call) -> torch.Tensor:
        common = call.common
        batch = common.batch_size()
        bucket = self._bucket(batch)
        # As stock leaves them; the runner asks for the probabilities of sampled drafts.
        self.proposer.num_speculative_tokens = self.drafts
        self.proposer._last_draft_probs = None
        stage_inputs(
            self._buffers,
            bucket,
            target_token_ids=call.target_token_ids,
            target_positions=call.target_positions,
            next_token_ids=call.next_token_ids,
            seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            token_indices_to_sample=call.sample_indices,
            num_rejected=call.num_rejected,
            hidden=call.target_hidden_states,
            page_size=self._caches.page_size,
        )
        return self._go(WHOLE, bucket, batch)

    def _tail(
        self, call: Call, stock: Stock, signature: Signature, named: dict[str, Any]
    ) -> torch.Tensor:
        common = call.common
        batch = common.batch_size()
        with _outputs_of(self.proposer.model) as outputs:
            first = self._first_draft(stock, signature, named)
        if len(outputs) != 1 or not isinstance(outputs[0], tuple) or len(outputs[0]) != 2:
            # What was written to the KV cache is written again.
            self._can_tail = False
            logger.warning(
                "vllm-kimi-eagle3: drafting: the drafter's module did not return two hidden "
                "states once: vLLM's own loop serves batches with a prompt in them"
            )
            return stock(self.proposer, **named)
        indices = call.sample_indices
        if indices is None:
            indices = common.query_start_loc[1:] - 1
        bucket = self._bucket(batch)
        stage_tail(
            self._buffers,
            bucket,
            draft_token_ids=first.view(-1),
            positions=call.target_positions,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            token_indices_to_sample=indices,
            num_rejected=call.num_rejected,
            hidden=outputs[0][1],
            page_size=self._caches.page_size,
            max_model_len=self._max_model_len,
        )
        return self._go(TAIL, bucket, batch)

    def _first_draft(
        self, stock: Stock, signature: Signature, named: dict[str, Any]
    ) -> torch.Tensor:
        """Stock's first pass and its draft: with one draft it leaves the metadata as they are."""
        if signature.dynamic:
            named = {**named, "num_speculative_tokens": 1}
        try:
            self.proposer.num_speculative_tokens = 1
            return stock(self.proposer, **named)
        finally:
            self.proposer.num_speculative_tokens = self.drafts

    def _bucket(self, batch: int) -> int:
        return next(bucket for bucket in self.buckets if bucket >= batch)

    def _go(self, act: str, bucket: int, batch: int) -> torch.Tensor:
        graph = self.graphs.get((act, bucket))
        if graph is not None:
            graph.replay()
        elif act == WHOLE:
            self._run_whole(bucket)
        else:
            self._run_tail(bucket)
        # The runner reads them while the next proposal may already be written.
        return self._buffers.drafts[:batch].clone()

    def _run_whole(self, bucket: int) -> None:
        buffers, forward = self._buffers, self.forward
        assert buffers.hidden is not None
        assert buffers.step_hidden is not None
        rows = bucket * self._query_len
        for_head, for_next = forward.run(
            buffers.positions[:rows],
            forward.combine(buffers.hidden[:rows]),
            self._attend(bucket, self._query_len),
            token_ids=buffers.token_ids[:rows],
        )
        sampled = self._head_rows[:bucket]
        take_rows(
            (for_head, for_next),
            buffers.sample_indices[:bucket],
            (sampled, buffers.step_hidden[:bucket]),
        )
        self._keep(bucket, forward.keys(sampled), 0)
        self._run_tail(bucket)

    def _run_tail(self, bucket: int) -> None:
        buffers, forward = self._buffers, self.forward
        assert buffers.step_hidden is not None
        hidden = buffers.step_hidden[:bucket]
        for step in range(1, self.drafts):
            for_head, hidden = forward.run(
                buffers.step_positions[:bucket],
                hidden,
                self._attend(bucket, 1),
                token_ids=buffers.step_token_ids[:bucket],
            )
            self._keep(bucket, forward.keys(for_head), step)

    def _keep(self, bucket: int, chosen: torch.Tensor, step: int) -> None:
        buffers = self._buffers
        next_step(
            chosen,
            buffers.step_positions[:bucket],
            buffers.step_seq_lens[:bucket],
            buffers.block_table[:bucket],
            buffers.step_slots[:bucket],
            buffers.step_token_ids[:bucket],
            buffers.drafts[:bucket],
            step,
            page_size=self._caches.page_size,
            max_model_len=self._max_model_len,
            advance=step + 1 < self.drafts,
        )

    def _attend(self, bucket: int, query_len: int) -> PagedAttend:
        attend = self._attends.get((bucket, query_len))
        if attend is None:
            buffers = self._buffers
            first = query_len > 1
            attend = self._attends[bucket, query_len] = PagedAttend(
                self.forward.attention,
                self._caches,
                block_table=buffers.block_table[:bucket],
                seq_lens=(buffers.seq_lens if first else buffers.step_seq_lens)[:bucket],
                slots=buffers.slots[: bucket * query_len] if first else buffers.step_slots[:bucket],
                query_len=query_len,
                workspace=self._workspace,
                max_batch=self._scratch_batch,
            )
        return attend


def propose(
    proposer: Any, stock: Stock, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """A proposal, by the loop where there is one.

    Args:
        proposer: vLLM's V1 proposer.
        stock: the release's ``propose``, unbound.
        signature: its.
        args: of the call.
        kwargs: of the call.
    """
    loop = proposer.__dict__.get(_STATE, _UNKNOWN)
    if loop is _UNKNOWN:
        loop = _without_graphs(proposer)
    if loop is None:
        return stock(proposer, *args, **kwargs)
    assert isinstance(loop, DraftLoop)
    return loop.propose(stock, signature, signature.named(proposer, args, kwargs))


def capture(runner: Any) -> int:
    """The loop of a runner's proposer with its graphs; to be called when the server captures its.

    Returns:
        Bytes of GPU memory that it took; 0 where stock serves.
    """
    proposer = getattr(runner, "drafter", None)
    plan = plan_or_stock(runner.vllm_config)
    if proposer is None or not plan.loop or not plan.graphs or _STATE in proposer.__dict__:
        return 0
    started = time.perf_counter()
    # Of this process alone: what the device has free changes with others beside it.
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()

    # Before the first collective, in which ranks that have a loop would wait for one that has none.
    loop = _made(lambda: DraftLoop.of(proposer))
    if loop is not None:
        loop = _made(partial(_captured, loop, runner))
    proposer.__dict__[_STATE] = loop
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = max(0, int(torch.cuda.memory_reserved() - reserved))
    if loop is not None and first_rank():
        logger.info(
            "vllm-kimi-eagle3: drafting: the plugin's loop serves: %d CUDA graphs for up to %d "
            "requests, %.1f s, %d MiB",
            len(loop.graphs),
            loop.buckets[-1],
            time.perf_counter() - started,
            taken >> 20,
        )
    return taken


def _captured(loop: DraftLoop, runner: Any) -> DraftLoop:
    from vllm.distributed.parallel_state import graph_capture
    from vllm.platforms import current_platform

    with graph_capture(device=runner.device):
        loop.capture(current_platform.get_global_graph_pool())
    loop.runner = runner
    return loop


_UNKNOWN = object()


def _without_graphs(proposer: Any) -> DraftLoop | None:
    """The loop at the first proposal, of a server that captures no graphs."""
    plan = plan_or_stock(proposer.vllm_config)
    loop = None
    speaks = is_for(proposer.vllm_config) and first_rank()
    if plan.stock:
        if speaks:
            logger.info("vllm-kimi-eagle3: drafting: vLLM's own loop serves: %s", plan.stock)
    elif plan.loop and plan.forced:
        with torch.inference_mode():
            loop = _made(lambda: DraftLoop.of(proposer))
        if loop is not None and speaks:
            logger.info(
                "vllm-kimi-eagle3: drafting: the plugin's loop serves, without CUDA graphs, up to "
                "%d requests",
                loop.buckets[-1],
            )
    elif plan.loop and speaks:
        logger.info(
            "vllm-kimi-eagle3: drafting: vLLM's own loop serves: it captured no CUDA graphs"
        )
    proposer.__dict__[_STATE] = loop
    return loop


def _made(make: Callable[[], DraftLoop]) -> DraftLoop | None:
    """What ``make`` returns if it does on every rank, else None and one line that says why."""
    loop, why, level = None, "", logging.INFO
    try:
        loop = make()
    except Unsupported as error:
        why = str(error)
    except Exception as error:  # A server that drafts by stock's loop is better than none.
        logger.debug("vllm-kimi-eagle3: drafting", exc_info=True)
        why, level = f"{type(error).__name__}: {error}", logging.WARNING
        _end_of_capture()
    if not on_every_rank(loop is not None):
        if why or first_rank():
            why = why or "another rank cannot run the plugin's"
            logger.log(level, "vllm-kimi-eagle3: drafting: vLLM's own loop serves: %s", why)
        return None
    return loop


def _end_of_capture() -> None:
    # A capture that fails as it begins leaves torch's random numbers in capture, and the next that
    # the server draws would end it. One that succeeds sets them right.
    if not torch.cuda.is_available():
        return
    with contextlib.suppress(Exception), torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            torch.zeros(1, device="cuda")
        finally:
            graph.capture_end()


@contextlib.contextmanager
def _outputs_of(module: torch.nn.Module) -> Iterator[list[Any]]:
    """What a module returns meanwhile."""
    outputs: list[Any] = []
    hook = module.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()


def _scratch(
    facts: AttentionFacts, max_batch: int, query_len: int, device: torch.device
) -> tuple[int, int]:
    """The requests of a call of attention, and the float32 elements that it needs."""

    def numel(batch: int) -> int:
        return max(
            PagedAttend.workspace_numel(facts, max_batch=batch, query_len=n, device=device)
            for n in (query_len, 1)
        )

    batch = max_batch
    while 4 * numel(batch) > _SCRATCH and batch > _BATCH_STEP:
        half = batch // 2
        batch = max(half - half % _BATCH_STEP, _BATCH_STEP)
    return batch, numel(batch)


def _backend_name(layer: Any) -> str:
    backend = getattr(layer, "attn_backend", None)
    return str(backend.get_name()) if backend is not None else ""
