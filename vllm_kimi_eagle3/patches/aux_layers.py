# SPDX-License-Identifier: Apache-2.0
"""The aux layers that a drafter's config names are read from one of several places, or shifted."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.checkpoint.aux_layers import COUNT_KEY, KEY, NESTED
from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo

_ID = "aux-layers"
_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_eagle3_aux_layers_from_config"
_V2 = "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils:get_eagle3_aux_layers_from_config"


def _open_in(sources: Sources) -> bool:
    # No release reads every place, and none tells the two conventions apart.
    return sources.node(_V1) is not None


def _decide(vllm_config: Any, pair: Any) -> None:
    """Name the layers where both runners of every release look: at the top of the config.

    That they stand there is also what makes them part of the compile-cache key from 0.17 on.
    """
    config, aux = pair.draft_config, pair.drafter.aux
    nested = getattr(config, NESTED, None)
    nested = dict(nested) if isinstance(nested, dict) else {}
    nested["use_aux_hidden_state"] = aux is not None
    if aux is None:
        for name in (KEY, COUNT_KEY):
            if hasattr(config, name):
                delattr(config, name)
        nested.pop(KEY, None)
    else:
        setattr(config, KEY, list(aux.captured))
        setattr(config, COUNT_KEY, len(aux.captured))
        nested[KEY] = list(aux.captured)
    setattr(config, NESTED, nested)
    if aux is not None and aux.unsure is not None:
        pair.notes.append(aux.unsure)


def _install() -> Undo:
    return hooks.on_pair(_ID, _decide)


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="the aux layers in a drafter's config are read from the top level only (V1 to 0.21, V2 in "
    "every release), or taken from eagle_config one layer off (V1 from 0.22: ids that count "
    "outputs are used as inputs); a drafter that names others gets the default without a word.",
    target=_V1,
    since="0.15.1",
    before=None,
    does="resolves the ids once (checkpoint/aux_layers.py), from every place and in both "
    "conventions, checks their number against fc.weight, and gives them to both runners; "
    '--additional-config \'{"kimi_eagle3": {"aux_hidden_state_layers": [...]}}\' overrides.',
    upstream=(
        "https://github.com/sgl-project/sglang/pull/25454",
        "https://github.com/vllm-project/vllm/pull/50170",
        "https://github.com/vllm-project/vllm/pull/54598",
    ),
    goes="when vLLM reads eagle_config on both runners and tells the conventions apart",
    symbols=(
        hooks.PAIR_SYMBOL,
        Symbol(_V1, "body"),
        Symbol(_V2, "body", since="0.17"),
        Symbol("vllm.config.speculative:SpeculativeConfig.compute_hash", "body"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
