# SPDX-License-Identifier: Apache-2.0
"""A drafter class that is given no position beyond those its rope can compute.

An index outside a table of cos and sin is a device assert, which ends the server. What is drafted
with another position than its own is of no use: the scheduler does not schedule it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def clamped(stock: type, limit: int) -> type:
    """``stock`` with positions below ``limit`` only, under its own name: vLLM branches on it.

    Args:
        stock: a drafter class of vLLM.
        limit: the first position that it cannot compute.
    """
    return type(stock.__name__, (_Clamped, stock), {"__module__": __name__, "_limit": limit})


class _Clamped:
    """Mixed in before a drafter class; outside its compiled decoder, so that stays as it is."""

    _limit: int
    _positions: torch.Tensor

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        scheduler = vllm_config.scheduler_config
        # One place for all steps: CUDA graphs replay the addresses they were captured with.
        self._positions = torch.zeros(
            scheduler.max_num_batched_tokens + scheduler.max_num_seqs, dtype=torch.int64
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        """The class's own forward pass.

        ``positions``, ``[num_tokens]``, are not clamped in place: the caller's KV-cache slots
        follow from them.
        """
        kept = self._positions
        if kept.device != positions.device:  # Some loaders construct on the meta device.
            kept = self._positions = torch.zeros_like(kept, device=positions.device)
        if positions.dtype == kept.dtype and positions.dim() == 1 and len(positions) <= len(kept):
            below = kept[: len(positions)]
        else:
            below = torch.empty_like(positions)
        torch.clamp(positions, max=self._limit - 1, out=below)
        return super().forward(  # type: ignore[misc]
            input_ids, below, hidden_states, inputs_embeds
        )
