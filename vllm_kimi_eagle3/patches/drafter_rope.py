# SPDX-License-Identifier: Apache-2.0
"""A drafter's rope is read from the layout of one Transformers version; from another it is lost."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo

_ID = "drafter-rope"
_TARGET = "vllm.transformers_utils.config:patch_rope_parameters"


def _open_in(sources: Sources) -> bool:
    return sources.node(_TARGET) is not None


def _decide(vllm_config: Any, pair: Any) -> None:
    rope, config = pair.drafter.rope, pair.draft_config
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.scaling}
    partial = getattr(config, "partial_rotary_factor", None)
    if isinstance(partial, float):
        parameters.setdefault("partial_rotary_factor", partial)
    config.rope_theta = rope.theta
    config.rope_parameters = parameters


def _install() -> Undo:
    return hooks.on_pair(_ID, _decide)


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="a config.json in Transformers 5's layout (rope_parameters) that is read under "
    "Transformers 4 gets the config class's own theta, 10000, in the place of the drafter's.",
    target=_TARGET,
    since="0.15.1",
    before=None,
    does="reads theta and scaling from config.json in either layout and gives them to the drafter.",
    upstream=(
        "https://github.com/vllm-project/vllm-ascend/issues/6612",
        "https://github.com/wejoncy/sfllm/pull/32",
    ),
    goes="with support for the last vLLM that runs with Transformers 4",
    symbols=(hooks.PAIR_SYMBOL, Symbol(_TARGET)),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
