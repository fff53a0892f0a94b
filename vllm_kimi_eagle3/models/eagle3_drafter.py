# SPDX-License-Identifier: Apache-2.0
"""A release's own drafter class, completed with what a drafter needs and the release lacks.

Everything added is outside the drafter's compiled decoder: how the target's hidden states are
joined (``combine_hidden_states``), which hidden state a draft step hands on (``forward``), and
what is loaded. So it is the same over every release, for Llama and for MLA, and changes no
compiled code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.utils import maybe_prefix

from vllm_kimi_eagle3.checkpoint.drafter import check_tensors
from vllm_kimi_eagle3.checkpoint.drafter_tensors import Expected
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.checkpoint.vocabulary import check_vocabulary
from vllm_kimi_eagle3.pair import decisions_of, in_a_log


@cache
def completed(stock: type) -> type:
    """``stock`` with what drafters may need beside it, under its own name: vLLM branches on it."""
    return type(stock.__name__, (_Completed, stock), {"__module__": __name__})


class _Seen(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


# As safetensors spells them.
_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


class _Completed:
    """Mixed in before a release's drafter class."""

    model: nn.Module
    config: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        decisions = decisions_of(self.config)
        assert decisions is not None
        self._expected = expected = Expected(**decisions["expected"])
        self._norm_output = bool(decisions["norm_output"])
        self._check_tensors = not decisions["tensors_checked"]
        model, eps = self.model, self.config.rms_norm_eps
        width, count = expected.target_hidden_size, expected.aux_count
        model.use_aux_hidden_state = count > 0
        model.num_aux_hidden_states = count
        if not count:
            if hasattr(model, "fc"):
                del model.fc
            return
        if model.fc.input_size != width * count:
            model.fc = ReplicatedLinear(
                input_size=width * count,
                output_size=expected.hidden_size,
                bias=False,
                params_dtype=vllm_config.model_config.dtype,
                quant_config=getattr(model, "quant_config", None),
                prefix=maybe_prefix(prefix, "model.fc"),
                return_bias=False,
            )
        if expected.norm_before_fc and getattr(model, "input_norm", None) is None:
            model.input_norm = RMSNorm(width * count, eps=eps)
            model.norm_before_fc = True
        if expected.fc_norm and getattr(model, "fc_norm", None) is None:
            model.fc_norm = nn.ModuleList(RMSNorm(width, eps=eps) for _ in range(count))

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Join the target's hidden states to the one that the drafter starts from.

        Args:
            hidden_states: ``[num_tokens, aux_count * target_hidden_size]``; without aux layers the
                target's final hidden state, ``[num_tokens, hidden_size]``.

        Returns:
            ``[num_tokens, hidden_size]``.
        """
        expected, model = self._expected, self.model
        if not expected.aux_count:
            return hidden_states
        if expected.norm_before_fc:
            hidden_states = model.input_norm(hidden_states)
        if expected.fc_norm:
            chunks = hidden_states.chunk(expected.aux_count, dim=-1)
            # Contiguous, since the norm's kernels of older releases take no strided rows.
            normed = [n(c.contiguous()) for n, c in zip(model.fc_norm, chunks, strict=True)]
            hidden_states = torch.cat(normed, dim=-1)
        joined: torch.Tensor = model.fc(hidden_states)
        return joined

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The release's own forward pass; returns the hidden states for the head and those for the
        next draft step, which are the same with ``norm_output``."""
        for_head, for_next = super().forward(*args, **kwargs)  # type: ignore[misc]
        return for_head, for_head if self._norm_output else for_next

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load tensors by their checkpoint names, and account for every one.

        Raises:
            ValueError: a tensor is missing, has another shape, or has no place here.
        """
        seen: dict[str, _Seen] = {}
        integers: dict[str, list[int]] = {}
        watched = self._watch(weights, seen, integers)
        try:
            loaded = super().load_weights(watched)  # type: ignore[misc]
        except Exception:
            for _ in watched:  # The names that loading did not come to.
                pass
            self._account_for(seen, integers)
            raise
        if self._check_tensors:
            self._account_for(seen, integers)
        return loaded

    def _watch(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        seen: dict[str, _Seen],
        integers: dict[str, list[int]],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        full = self._expected.draft_vocab_size == self._expected.vocab_size
        for name, tensor in weights:
            seen[name] = _Seen(_DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            if name in ("d2t", "t2d"):
                integers[name] = tensor.flatten().tolist()
                if name == "d2t" and full and self._is_identity(integers[name]):
                    continue  # Releases from 0.30 on have no parameter for it.
            yield name, tensor

    @staticmethod
    def _is_identity(d2t: list[int]) -> bool:
        return not any(d2t) or d2t == list(range(len(d2t)))

    def _account_for(self, seen: dict[str, _Seen], integers: dict[str, list[int]]) -> None:
        expected = self._expected
        try:
            check_tensors(expected, seen)
            check_vocabulary(
                expected.vocab_size,
                expected.draft_vocab_size,
                integers.get("d2t"),
                integers.get("t2d"),
            )
        except CheckpointError as error:
            raise ValueError(f"the drafter's checkpoint: {in_a_log(error)}") from None
