# SPDX-License-Identifier: Apache-2.0
"""One request longer than a drafter's ``max_position_embeddings`` stops drafting for all."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo

_ID = "drafter-positions"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_TARGET = "vllm.config.speculative:SpeculativeConfig._maybe_override_draft_max_model_len"


def _open_in(sources: Sources) -> bool:
    module = sources.module(_RUNNER)
    return module is not None and "effective_drafter_max_model_len" in module[0]


def _decide(vllm_config: Any, pair: Any) -> None:
    drafter, speculative = pair.drafter, vllm_config.speculative_config
    if getattr(speculative, "max_model_len", None) is not None:
        return  # The user's own limit, meant to be kept.
    longest = vllm_config.model_config.max_model_len
    default = pair.draft_config.max_position_embeddings
    stated = drafter.max_position_embeddings
    reach = drafter.rope.reach(stated, default, longest)
    if reach.formula:
        # The table of cos and sin is as long as this says, and the rope a formula of the position.
        pair.draft_config.max_position_embeddings = max(stated or default, longest)
    if reach.limit is not None:
        pair.decisions["position_limit"] = reach.limit
    if reach.finding is not None:
        pair.notes.append(reach.finding)
    speculative.draft_model_config.max_model_len = longest


def _install() -> Undo:
    return hooks.on_pair(_ID, _decide)


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="the V1 runner stops drafting for the whole batch while one request is longer than the "
    "drafter's max_position_embeddings; where the table of cos and sin is as short, positions "
    "beyond it are a device assert.",
    target=_TARGET,
    since="0.15.1",
    before=None,
    does="sizes the drafter for the target's length where its rope is a formula of the position; "
    "where its table ends earlier, drafter-length stops the request that is too long, alone.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/58080",
        "https://github.com/vllm-project/vllm/issues/48894",
    ),
    goes="when vLLM decides per request",
    symbols=(
        hooks.PAIR_SYMBOL,
        Symbol(_TARGET),
        Symbol(f"{_RUNNER}:GPUModelRunner.__init__"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    # Alone it would let positions through that the table does not hold.
    needs=("drafter-length",),
)
