# SPDX-License-Identifier: Apache-2.0
"""From 0.32 a Kimi-K2.5 config that was saved again has lost ``media_placeholder_token_id``."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.checkpoint.target import (
    DEFAULT_IMAGE_TOKEN,
    IMAGE_TOKEN_KEYS,
    MULTIMODAL_MODEL_TYPE,
    image_token_id,
)
from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo

_ID = "image-token-saved-again"
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
_TARGET = f"{_PROPOSER}:SpecDecodeBaseProposer.load_model"
_OWN_CONFIG = "vllm.transformers_utils.configs.kimi_k25"
_KEY = IMAGE_TOKEN_KEYS[0]


def _open_in(sources: Sources) -> bool:
    # vLLM's own config class sets the key itself; without it, Transformers' class is used.
    module, registry = sources.module(_PROPOSER), sources.node(_REGISTRY)
    if module is None or _KEY not in module[0] or registry is None:
        return False
    text = sources.module(_REGISTRY.partition(":")[0])
    return text is not None and 'kimi_k25="KimiK25Config"' not in text[0]


_REGISTRY = "vllm.transformers_utils.config:_CONFIG_REGISTRY"


def _decide(vllm_config: Any, pair: Any) -> None:
    config = vllm_config.model_config.hf_config
    if config.model_type != MULTIMODAL_MODEL_TYPE or _KEY in vars(config):
        return
    token = image_token_id(config)
    setattr(config, _KEY, DEFAULT_IMAGE_TOKEN if token is None else token)


def _install() -> Undo:
    return hooks.on_pair(_ID, _decide)


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="the V1 proposer reads media_placeholder_token_id, which Transformers' Kimi_K25Config does "
    "not declare and does not write: a target that was saved again with it stops with an "
    "AttributeError after the load.",
    target=_TARGET,
    since="0.32.0",
    before=None,
    does="gives the target's config that attribute: image_token_id, else image_token_index, else "
    "163605, the token of every published Kimi.",
    upstream=("https://github.com/vllm-project/vllm/pull/36361",),
    goes="when the proposer reads image_token_id for Kimi",
    symbols=(hooks.PAIR_SYMBOL, Symbol(_TARGET), Symbol(_REGISTRY, "present")),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
