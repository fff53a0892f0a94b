# SPDX-License-Identifier: Apache-2.0
"""vLLM cannot read a config whose model type is ``kimi_k2`` without remote code."""

from __future__ import annotations

import ast

from vllm_kimi_eagle3.contract import Sources, Symbol

from .base import Patch, Undo

_TARGET = "vllm.transformers_utils.config:_CONFIG_REGISTRY"
_MODEL_TYPE = "kimi_k2"
_CONFIG_CLASS = "DeepseekV3Config"


def _open_in(sources: Sources) -> bool:
    node = sources.node(_TARGET)
    value = getattr(node, "value", None)
    return isinstance(value, ast.Call) and all(k.arg != _MODEL_TYPE for k in value.keywords)


def _install() -> Undo:
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    # By name, as the other entries, so that the class is imported when it is first asked for.
    _CONFIG_REGISTRY[_MODEL_TYPE] = _CONFIG_CLASS

    def undo() -> None:
        _CONFIG_REGISTRY.pop(_MODEL_TYPE, None)

    return undo


def _verify() -> bool:
    from transformers import DeepseekV3Config
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    return _MODEL_TYPE in _CONFIG_REGISTRY and _CONFIG_REGISTRY[_MODEL_TYPE] is DeepseekV3Config


PATCH = Patch(
    id="kimi-k2-config",
    gap="an MLA drafter's config.json says model_type kimi_k2, which neither vLLM nor Transformers "
    "knows: 'does not recognize this architecture'.",
    target=_TARGET,
    since="0.15.1",
    before="0.18",
    does="reads kimi_k2 with Transformers' DeepseekV3Config, as vLLM does from 0.18 on.",
    upstream=("https://github.com/vllm-project/vllm/pull/36361",),
    goes="with support for vLLM 0.17",
    symbols=(
        Symbol(_TARGET, "present"),
        Symbol("vllm.transformers_utils.config:LazyConfigDict.__getitem__", "body"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
