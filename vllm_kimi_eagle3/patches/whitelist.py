# SPDX-License-Identifier: Apache-2.0
"""``SpeculativeConfig`` refuses EAGLE-3 for every model type that is not on a list of strings."""

from __future__ import annotations

import ast
import functools
from types import CodeType, FunctionType
from typing import Any

from vllm_kimi_eagle3.checkpoint.target import TEXT_MODEL_TYPES, is_kimi_target
from vllm_kimi_eagle3.contract import Sources, Symbol

from .base import Patch, Undo

_TARGET = "vllm.config.speculative:SpeculativeConfig._verify_args"

# Entries that every release's list has, and by which it is told from other constants.
_LISTED = frozenset({"llama", "qwen", "minicpm", "gpt_oss"})


def _open_in(sources: Sources) -> bool:
    node = sources.node(_TARGET)
    if node is None:
        return False
    for display in ast.walk(node):
        if isinstance(display, (ast.List, ast.Tuple, ast.Set)):
            words = {e.value for e in display.elts if isinstance(e, ast.Constant)}
            if words >= _LISTED and not words & set(TEXT_MODEL_TYPES):
                return True
    return False


def _validator() -> FunctionType:
    from vllm.config.speculative import SpeculativeConfig

    function = vars(SpeculativeConfig)["_verify_args"]
    assert isinstance(function, FunctionType)
    return function


def _widened(code: CodeType) -> CodeType:
    """``code`` with Kimi's text model types at the end of its list of model types."""
    found = [c for c in code.co_consts if isinstance(c, tuple) and set(c) >= _LISTED]
    if len(found) != 1 or code.co_freevars:
        raise RuntimeError(f"{_TARGET} holds {len(found)} lists of model types; expected one")
    consts = tuple(c + TEXT_MODEL_TYPES if c is found[0] else c for c in code.co_consts)
    return code.replace(co_consts=consts)


def _entry(self):  # type: ignore[no-untyped-def]
    # Runs with the globals of vllm.config.speculative, so it can name nothing of this module.
    from vllm_kimi_eagle3.patches.whitelist import verify_args

    return verify_args(self)


_stock: FunctionType | None = None
_for_kimi: FunctionType | None = None


def verify_args(config: Any) -> Any:
    """Stock's own validator; with a longer list of model types if the target is a Kimi.

    Args:
        config: the ``SpeculativeConfig`` that is being validated.

    Returns:
        ``config``, as a pydantic "after" validator does.

    Raises:
        ValueError: whatever stock raises.
    """
    assert _stock is not None
    assert _for_kimi is not None
    target = getattr(config.target_model_config, "hf_config", None)
    if not is_kimi_target(target):
        return _stock(config)
    from vllm_kimi_eagle3.plugin import announce

    announce()
    return _for_kimi(config)


def _install() -> Undo:
    global _stock, _for_kimi
    function = _validator()
    stock = function.__code__

    def copy(code: CodeType) -> FunctionType:
        twin = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, None
        )
        functools.update_wrapper(twin, function)
        return twin

    _stock, _for_kimi = copy(stock), copy(_widened(stock))
    # In place, because pydantic's schema for this class and for every config that nests it holds
    # the function object itself: a new class attribute would not be seen.
    entry = _entry.__code__.replace(co_name=stock.co_name)
    function.__code__ = entry

    def undo() -> None:
        if function.__code__ is entry:
            function.__code__ = stock

    return undo


def _verify() -> bool:
    from vllm.config.speculative import SpeculativeConfig

    function = _validator()
    decorators: Any = SpeculativeConfig.__pydantic_decorators__
    seen_by_pydantic = decorators.model_validators["_verify_args"].func
    return (
        function.__code__.co_consts == _entry.__code__.co_consts
        and getattr(seen_by_pydantic, "__func__", seen_by_pydantic) is function
        and _for_kimi is not None
        and any(
            isinstance(c, tuple) and set(c) >= _LISTED | set(TEXT_MODEL_TYPES)
            for c in _for_kimi.__code__.co_consts
        )
    )


PATCH = Patch(
    id="whitelist",
    gap="SpeculativeConfig refuses EAGLE-3 (on 0.17 also extract_hidden_states) for a Kimi target: "
    "its text model type, kimi_k2 or deepseek_v3, is not on the list.",
    target=_TARGET,
    since="0.15.1",
    before="0.18",
    does="validates a Kimi target with the same code and a list that has its model type; every "
    "other target meets the stock validator, byte for byte.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/31254",
        "https://github.com/vllm-project/vllm/pull/36361",
    ),
    goes="with support for vLLM 0.17",
    symbols=(Symbol(_TARGET, "body"),),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    # Opening the list without these would only move the failure behind a long load.
    needs=("image-token", "target-interface", "bare-language-model"),
)
