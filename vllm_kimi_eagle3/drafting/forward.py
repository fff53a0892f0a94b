# SPDX-License-Identifier: Apache-2.0
"""One pass of a drafter on the plugin's kernels: a dozen launches, and none waits for the host.

What it computes is what the release's module computes, with the same roundings, around whichever
attention it is given (`attend.py`). The greedy token is found without writing the logits. Every
call can be captured in a CUDA graph; the collectives are those of the release's own pass, and one
small gather where the head is split over ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .ranks import set_on_every_rank
from .weights import AttentionFacts, Head, Product, Unsupported, Weights, read_weights

__all__ = ["Attend", "DraftForward", "Unsupported"]

Attend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``attend(positions, projected) -> [T, heads * value_dim]``: StockAttend or PagedAttend."""

# A kernel must be ahead of the library by this much to be chosen: a measurement is off by about
# as much, and the library needs no workspace.
_AHEAD = 0.98
# From as many rows on, once the library is so far ahead, it is not tried with more.
_NO_MORE, _FAR = 8, 1.1
# Weights of other layers are read between two uses of one, so a measurement may not find it in L2.
_FLUSH_BYTES = 256 * 1024**2
_REPEATS, _REPLAYS = 4, 5


class DraftForward:
    """A pass of one drafter.

    Attributes:
        weights: what was read from the module.
        kind: ``"llama"`` or ``"mla"``.
        hidden_size: H.
        aux_width: n*W, the width of what :meth:`combine` takes; H without aux hidden states.
        dtype: of the hidden states.
        device: of the weights.
        tp: ranks over which the drafter's head is split; 1 if each has the whole of it.
        vocab_size: tokens of the target.
        draft_vocab_size: tokens of the drafter, on all ranks.
        norm_output: both results of :meth:`run` are the same tensor.
        attention: what attention needs to know.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.attention: AttentionFacts = weights.attention
        self.kind: str = weights.attention.kind
        self.hidden_size: int = weights.hidden_size
        self.aux_width: int = weights.aux_width
        self.dtype: torch.dtype = weights.dtype
        self.device: torch.device = weights.device
        self.tp: int = weights.head.ranks
        self.vocab_size: int = weights.head.vocab_size
        self.draft_vocab_size: int = weights.head.draft_vocab_size
        self.norm_output: bool = weights.norm_output
        self._workspace: torch.Tensor | None = None
        self._by_library: frozenset[int] = frozenset()
        """The batches whose logits the library computes."""

    @classmethod
    def of(cls, model: Any) -> DraftForward:
        """The forward pass of a loaded drafter.

        Args:
            model: a release's class, the plugin's, ``completed`` or ``clamped``; its embedding and
                head are in place, shared with the target or not.

        Raises:
            Unsupported: with the reason.
        """
        return cls(read_weights(model))

    def combine(self, aux: torch.Tensor) -> torch.Tensor:
        """Join the target's hidden states: ``[T, n*W]`` to ``[T, H]``; as is without aux."""
        weights = self.weights
        if weights.fc is None:
            return aux
        from vllm_kimi_eagle3.kernels.fc_norm import fc_norm

        if weights.whole_norm is not None:
            norm = weights.whole_norm
            aux = fc_norm(aux, norm.weight.unsqueeze(0), norm.eps)
        if weights.chunk_norms is not None:
            aux = fc_norm(aux, weights.chunk_norms.weight, weights.chunk_norms.eps)
        return weights.fc(aux)

    def run(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        attend: Attend,
        *,
        token_ids: torch.Tensor | None = None,
        embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass.

        Args:
            positions: int64 ``[T]``.
            hidden: ``[T, H]``, what :meth:`combine` gave or the pass before; not written to.
            attend: attention.
            token_ids: int32 or int64 ``[T]``; or
            embeds: ``[T, H]``, embeddings instead.

        Returns:
            The hidden states for the head and those for the next pass, each ``[T, H]``.
        """
        from vllm_kimi_eagle3.kernels.add_rms_norm import add_rms_norm
        from vllm_kimi_eagle3.kernels.draft_inputs import draft_inputs
        from vllm_kimi_eagle3.kernels.silu_mul import silu_mul

        weights = self.weights
        table = None
        if embeds is not None:
            token_ids = None
        elif weights.embedding.table is not None:
            table = weights.embedding.table
        else:
            embeds, token_ids = weights.embedding.layer(token_ids), None
        both = draft_inputs(
            hidden,
            input_norm=weights.input_norm.weight,
            hidden_norm=weights.hidden_norm.weight,
            eps=weights.input_norm.eps,
            embeds=embeds,
            token_ids=token_ids,
            embed_table=table,
        )
        residual = both[:, self.hidden_size :] if weights.norm_before_residual else hidden
        attended = attend(positions, weights.projection(both))
        normed, residual = add_rms_norm(
            weights.o(attended), residual, weights.post_norm.weight, weights.post_norm.eps
        )
        mlp = weights.down(silu_mul(weights.gate_up(normed)))
        for_head, summed = add_rms_norm(mlp, residual, weights.norm.weight, weights.norm.eps)
        return for_head, for_head if self.norm_output else summed

    def keys(self, for_head: torch.Tensor) -> torch.Tensor:
        """The best draft token of each row, on every rank that has a part of the head.

        Args:
            for_head: ``[B, H]``.

        Returns:
            int64 ``[ranks, B]``, whose largest decides; see kernels/head_argmax.py. Gathered over
            the ranks, so all of them must call it.
        """
        keys = self._local_keys(for_head).unsqueeze(0)
        if self.tp == 1:
            return keys
        from vllm.distributed import tensor_model_parallel_all_gather

        # The CPU's gather moves no integers: the same bits under another name.
        moved = keys.view(torch.float32) if keys.device.type == "cpu" else keys
        gathered: torch.Tensor = tensor_model_parallel_all_gather(moved, dim=0)
        return gathered.view(torch.int64)

    def top_tokens(self, for_head: torch.Tensor) -> torch.Tensor:
        """The target's ids of the best draft tokens, int64 ``[B]``; the same on every rank."""
        from vllm_kimi_eagle3.kernels.head_argmax import top_ids

        keys = self.keys(for_head)
        ids = torch.empty(keys.shape[1], dtype=torch.int64, device=keys.device)
        return top_ids(keys, out=ids)

    def tune(self, rows: Sequence[int]) -> str:
        """Choose, by product and number of rows, what computes it: the library or a kernel.

        Measures on the device, for a second or two; to be called before a graph is captured, and
        on every rank: what is not ahead on all of them is the library's. Ranks that each have the
        whole drafter must round alike, or they would draft other tokens.

        Args:
            rows: the numbers of rows that will be used: of a pass, and of the head.

        Returns:
            A line for the log.

        Raises:
            Unsupported: another rank could not measure.
        """
        rows = sorted({n for n in rows if n > 0})
        if self.device.type != "cuda" or not rows:
            return "products by the library"
        products = self.weights.products
        chosen: list[frozenset[int]] = [frozenset()] * (len(products) + 1)
        fault: Exception | None = None
        try:
            chosen = self._measured(rows)
        except Exception as error:  # The other ranks wait for an answer.
            fault = error
        flags = set_on_every_rank([fault is None, *(n in own for own in chosen for n in rows)])
        if fault is not None:
            raise fault
        if not flags[0]:
            raise Unsupported("another rank could not measure its products")
        kernels = []
        for index, name in enumerate([*(product.name for product in products), "head"]):
            some = flags[1 + index * len(rows) :][: len(rows)]
            own = frozenset(n for n, on_all in zip(rows, some, strict=True) if on_all)
            if index < len(products):
                products[index].skinny = own
            else:
                self._by_library = frozenset(rows) - own
            if own:
                kernels.append(f"{name} {_spans(rows, own)}")
        if not kernels:
            return "products by the library"
        return "skinny products by kernels, by rows: " + ", ".join(kernels)

    def _measured(self, rows: Sequence[int]) -> list[frozenset[int]]:
        """For each product, and then the head, the numbers of rows for which a kernel is ahead."""
        from vllm_kimi_eagle3.kernels.skinny_gemm import workspace_for

        if self._workspace is None:
            self._workspace = workspace_for(self.device)
        clock = _Clock(self.device)
        self._by_library = frozenset()
        chosen = []
        with torch.inference_mode():
            for product in self.weights.products:
                product.workspace = self._workspace
                chosen.append(self._best_by_skinny(product, rows, clock))
            head = self.weights.head
            if head.weight is None:
                chosen.append(frozenset())
            elif head.rows == 0:  # No product at all: for the others to say.
                chosen.append(frozenset(rows))
            else:
                chosen.append(frozenset(n for n in rows if not self._library_is_ahead(n, clock)))
        return chosen

    def _local_keys(self, for_head: torch.Tensor) -> torch.Tensor:
        head, batch = self.weights.head, for_head.shape[0]
        if head.rows == 0:  # All that this rank has is padding.
            return torch.full((batch,), -(2**63), dtype=torch.int64, device=for_head.device)
        if head.weight is None or batch in self._by_library:
            return keys_of_logits(head.logits(for_head), head)
        from vllm_kimi_eagle3.kernels.head_argmax import head_keys

        return head_keys(
            for_head,
            head.weight,
            rows=head.rows,
            first=head.first,
            d2t=head.d2t,
            keys_out=torch.empty(batch, dtype=torch.int64, device=for_head.device),
            workspace=self._workspace,
        )

    def _example(self, rows: int, width: int) -> torch.Tensor:
        # Without the device's random numbers, whose state is the server's.
        values = torch.linspace(-1, 1, rows * width, device=self.device)
        return values.view(rows, width).to(self.dtype)

    def _best_by_skinny(
        self, product: Product, rows: Sequence[int], clock: _Clock
    ) -> frozenset[int]:
        chosen = set()
        for n in rows:
            if product.weight is None or not product.takes_skinny(n):
                break
            x = self._example(n, product.weight.shape[1])
            ours = clock.seconds(partial(product.by_skinny, x))
            theirs = clock.seconds(partial(product.by_library, x))
            if ours < _AHEAD * theirs:
                chosen.add(n)
            elif n >= _NO_MORE and ours > _FAR * theirs:
                break
        return frozenset(chosen)

    def _library_is_ahead(self, rows: int, clock: _Clock) -> bool:
        head = self.weights.head
        x = self._example(rows, self.hidden_size)
        ours = clock.seconds(lambda: self._local_keys(x))
        theirs = clock.seconds(lambda: keys_of_logits(head.logits(x), head))
        return theirs < _AHEAD * ours


def keys_of_logits(logits: torch.Tensor, head: Head) -> torch.Tensor:
    """The keys of ``head_argmax.head_keys`` from logits that were written.

    Args:
        logits: ``[B, at least head.rows]``.
        head: the head that they are of.

    Returns:
        int64 ``[B]``.
    """
    logits = logits[:, : head.rows]
    if head.ascending:
        # The first of equal ones, by its documentation.
        column = logits.argmax(dim=1, keepdim=True)
        target = column.squeeze(1) + head.first
        if head.d2t is not None:
            target = target + head.d2t[target]
        best = logits.gather(1, column).squeeze(1)
        return (_codes(best).long() << 32) | (0x7FFFFFFF - target)
    codes = _codes(logits)
    most = codes.amax(dim=1, keepdim=True)
    target = torch.arange(head.first, head.first + head.rows, device=logits.device)
    if head.d2t is not None:
        target = target + head.d2t[head.first : head.first + head.rows]
    first = torch.where(codes == most, target, 0x7FFFFFFF).amin(dim=1)
    return (most.squeeze(1).long() << 32) | (0x7FFFFFFF - first)


def _codes(logits: torch.Tensor) -> torch.Tensor:
    """int32 of the order of the logits: -0 equals 0, and NaN is the largest."""
    logits = logits.float()
    bits = logits.view(torch.int32)
    codes = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    codes = torch.where(logits == 0, 0, codes)
    return torch.where(logits.isnan(), 0x7FFFFFFF, codes)


class _Clock:
    """Times on the device, each in a CUDA graph that begins with another's weights in L2."""

    def __init__(self, device: torch.device) -> None:
        size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._flush = torch.empty(2 * size or _FLUSH_BYTES, dtype=torch.int8, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        # A pool goes with the last graph that uses it: one is kept as long as the clock.
        self._kept: torch.cuda.CUDAGraph | None = None
        # Nothing can be captured in the default stream.
        current = torch.cuda.current_stream(device)
        default = current == torch.cuda.default_stream(device)
        self._stream = torch.cuda.Stream(device) if default else current

    def seconds(self, act: Callable[[], Any]) -> float:
        """The median of some runs."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            act()
            self._stream.synchronize()
            # Not torch.cuda.graph, which collects garbage each time.
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool)
            try:
                for _ in range(_REPEATS):
                    self._flush.zero_()
                    act()
            finally:
                graph.capture_end()
            self._kept = self._kept or graph
            graph.replay()
            times = []
            for _ in range(_REPLAYS):
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
        torch.cuda.current_stream().wait_stream(self._stream)
        return float(statistics.median(times)) / _REPEATS / 1000


def _spans(rows: Sequence[int], chosen: frozenset[int]) -> str:
    """Some of ``rows``, ascending, as ``1-16`` for neighbours among them."""
    spans: list[list[int]] = []
    before = None
    for index, n in enumerate(rows):
        if n not in chosen:
            continue
        if before == index - 1 and spans:
            spans[-1][1] = n
        else:
            spans.append([n, n])
        before = index
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
