# SPDX-License-Identifier: Apache-2.0
"""The proposer reads ``image_token_index`` from the target's config; Kimi has another key."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.checkpoint.target import IMAGE_TOKEN_KEYS, image_token_id
from vllm_kimi_eagle3.contract import Sources, Symbol

from .base import Patch, Undo, set_attribute

_TARGET = "vllm.transformers_utils.configs.kimi_k25:KimiK25Config"
_READER = "vllm.v1.spec_decode.eagle:SpecDecodeBaseProposer.load_model"
_KEY = "image_token_index"


def _open_in(sources: Sources) -> bool:
    module = sources.module("vllm.v1.spec_decode.eagle")
    return module is not None and _KEY in module[0] and IMAGE_TOKEN_KEYS[0] not in module[0]


class ImageTokenIndex:
    """The attribute ``image_token_index`` of a Kimi-K2.5 config, derived from the keys it has.

    A descriptor on the class and not a value on each instance: configs cross process boundaries
    by pickle and are compared and hashed by their own attributes, and neither may change.
    """

    def __get__(self, config: Any, owner: type | None = None) -> Any:
        if config is None:
            return self
        token = image_token_id(config)
        if token is None:
            raise AttributeError(
                f"the target's config.json names no image token: it has none of "
                f"{', '.join(IMAGE_TOKEN_KEYS)}; add media_placeholder_token_id"
            )
        return token

    def __set__(self, config: Any, value: object) -> None:
        vars(config)[_KEY] = value

    def __delete__(self, config: Any) -> None:
        vars(config).pop(_KEY, None)


def _install() -> Undo:
    from vllm.transformers_utils.configs.kimi_k25 import KimiK25Config

    return set_attribute(KimiK25Config, _KEY, ImageTokenIndex())


def _verify() -> bool:
    from vllm.transformers_utils.configs.kimi_k25 import KimiK25Config

    return isinstance(vars(KimiK25Config).get(_KEY), ImageTokenIndex)


PATCH = Patch(
    id="image-token",
    gap="EagleProposer.load_model reads target.config.image_token_index, which a Kimi-K2.5 config "
    "does not have: AttributeError after the whole target is loaded, with text-only use as well.",
    target=_TARGET,
    since="0.15.1",
    before="0.18",
    does="gives KimiK25Config that attribute: media_placeholder_token_id (which the class sets to "
    "163605 where config.json does not have the key), else image_token_id, else "
    "image_token_index.",
    upstream=(
        "https://github.com/vllm-project/vllm/pull/35966",
        "https://github.com/vllm-project/vllm/pull/36361",
    ),
    goes="with support for vLLM 0.17",
    symbols=(Symbol(_TARGET), Symbol(f"{_TARGET}.__init__"), Symbol(_READER)),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
