# SPDX-License-Identifier: Apache-2.0
"""A drafter class whose small passes run on the plugin's kernels, for the V2 runner.

That runner captures its loop of draft steps as CUDA graphs of its own, so what is replaced is what
it captures: the forward pass, how the target's hidden states are joined, and the choice of the
greedy token. Everything else is the release's class: its weights, prompts, piecewise graphs, and
every pass before there is a KV cache.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import nn
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

from vllm_kimi_eagle3.drafting.attend import StockAttend, has_cache
from vllm_kimi_eagle3.drafting.forward import DraftForward
from vllm_kimi_eagle3.drafting.plan import DraftPlan, plan_or_stock
from vllm_kimi_eagle3.drafting.ranks import first_rank, on_every_rank
from vllm_kimi_eagle3.drafting.weights import Unsupported
from vllm_kimi_eagle3.log import get_logger

logger = get_logger(__name__)


@cache
def fused(stock: type) -> type:
    """``stock`` with its small passes on the kernels, under its own name: vLLM branches on it."""
    return type(stock.__name__, (_Fused, stock), {"__module__": __name__})


class _Fused:
    """Mixed in before a drafter class."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
        query_len = speculative.num_speculative_tokens + 1
        sizes = getattr(vllm_config.compilation_config, "cudagraph_capture_sizes", None) or ()
        self._fused_plan: DraftPlan = plan_or_stock(vllm_config)
        self._fused_most = scheduler.max_num_seqs * query_len
        self._fused_rows = sorted({n for n in (1, 2, 4, *sizes) if n <= self._fused_most})
        # Not modules' attributes: the weights in it have their owners.
        self._fused_state: dict[str, Any] = {}

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """The release's own forward pass, or the same by the kernels.

        Args:
            input_ids: ``[T]``.
            positions: ``[T]``.
            hidden_states: ``[T, H]``.
            inputs_embeds: ``[T, H]``, instead of ``input_ids``.

        Returns:
            The hidden states for the head and those for the next pass, each ``[T, H]``.
        """
        ours = self._ours(positions.shape[0]) if positions.dim() == 1 else None
        if ours is None:
            return super().forward(  # type: ignore[misc]
                input_ids, positions, hidden_states, inputs_embeds
            )
        return ours.run(
            positions,
            hidden_states,
            self._fused_state["attend"],
            token_ids=None if inputs_embeds is not None else input_ids,
            embeds=inputs_embeds,
        )

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The release's own, or the same by the kernels: ``[T, n * W]`` to ``[T, H]``."""
        ours = self._fused_state.get("forward")
        if ours is None or hidden_states.shape[0] > self._fused_most:
            joined: torch.Tensor = super().combine_hidden_states(  # type: ignore[misc]
                hidden_states
            )
            return joined
        return ours.combine(hidden_states)

    def greedy_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The target's ids of the best draft tokens, without logits.

        Args:
            hidden_states: ``[B, H]``, for the head.

        Returns:
            int64 ``[B]``; None where vLLM has to find them.
        """
        ours = self._fused_state.get("forward")
        return None if ours is None else ours.top_tokens(hidden_states)

    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What vLLM asks for with ``use_local_argmax_reduction``: see :meth:`greedy_tokens`."""
        tokens = self.greedy_tokens(hidden_states)
        if tokens is not None:
            return tokens
        stock = getattr(super(), "get_top_tokens", None)
        if stock is not None:
            return stock(hidden_states)
        return self.compute_logits(hidden_states).argmax(dim=-1)  # type: ignore[attr-defined]

    def _ours(self, tokens: int) -> DraftForward | None:
        """The forward pass by the kernels, where this pass is one for them."""
        if tokens > self._fused_most or not self._fused_plan.forward:
            return None
        if not is_forward_context_available():
            return None
        # Its graphs hold pieces of the compiled module.
        if get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE:
            return None
        if "forward" not in self._fused_state and not self._made():
            return None
        ours: DraftForward | None = self._fused_state["forward"]
        return ours

    def _made(self) -> bool:
        """Make the pass once the KV cache is there, and outside a capture, which it would break.

        Returns:
            True once it is known whether there is one.
        """
        if not has_cache(_attention_layer(self)):
            return False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        state = self._fused_state
        ours: DraftForward | None = None
        try:
            ours = DraftForward.of(self)
        except Unsupported as error:
            self._leave_to_stock(str(error))
        except Exception:
            self._leave_to_stock("a fault", exc_info=True)
        # On all ranks or none: a token that is found without logits has a collective of its own.
        if not on_every_rank(ours is not None):
            if ours is not None:
                self._leave_to_stock("another rank cannot run the plugin's")
            return True
        assert ours is not None
        try:
            with torch.inference_mode():
                tuned = ours.tune(self._fused_rows)
        except Exception as error:  # On every rank: see `tune`.
            fault = not isinstance(error, Unsupported)
            self._leave_to_stock("a fault" if fault else str(error), exc_info=fault)
            return True
        state["attend"] = StockAttend(ours.attention)
        state["forward"] = ours
        if first_rank():
            logger.info(
                "vllm-kimi-eagle3: drafting: the drafter's passes of up to %d tokens run on the "
                "plugin's kernels inside vLLM's graphs; %s",
                self._fused_most,
                tuned,
            )
        return True

    def _leave_to_stock(self, why: str, *, exc_info: bool = False) -> None:
        self._fused_state["forward"] = None
        if exc_info or first_rank():
            logger.log(
                logging.ERROR if exc_info else logging.INFO,
                "vllm-kimi-eagle3: drafting: vLLM's own drafter serves: %s",
                why,
                exc_info=exc_info,
            )


def _attention_layer(model: Any) -> Any:
    """The layer that holds the drafter's KV cache; a module without one if that is not found."""
    layers = getattr(getattr(model, "model", None), "layers", None) or (nn.Module(),)
    attention = getattr(layers[0], "self_attn", None)
    outer = getattr(attention, "attn", None) or getattr(attention, "mla_attn", None)
    return getattr(outer, "mla_attn", outer)
