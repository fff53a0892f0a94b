# SPDX-License-Identifier: Apache-2.0
"""EAGLE-3.1's norms and their relatives are missing from, or unused by, a drafter class."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vllm_kimi_eagle3.checkpoint.drafter_class import DrafterClass
from vllm_kimi_eagle3.checkpoint.drafter_tensors import Expected
from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo, all_of

_ID = "eagle31-drafter"
_LLAMA = "vllm.model_executor.models.llama_eagle3"
_MLA = "vllm.model_executor.models.deepseek_eagle3"
_FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")


def _open_in(sources: Sources) -> bool:
    return sources.node(f"{_LLAMA}:Eagle3LlamaForCausalLM") is not None


def _decide(vllm_config: Any, pair: Any) -> None:
    """Put the switches where the classes read them, and say what the class must hold."""
    for name in _FLAGS:
        setattr(pair.draft_config, name, getattr(pair.drafter, name))
    nested = getattr(pair.draft_config, "eagle_config", None)
    if isinstance(nested, dict) and "norm_before_fc" in nested:
        nested = {**nested, "norm_before_fc": pair.drafter.norm_before_fc}
        pair.draft_config.eagle_config = nested
    pair.decisions["expected"] = asdict(pair.drafter.expected)
    pair.decisions["norm_output"] = pair.drafter.norm_output
    pair.decisions.setdefault("tensors_checked", True)


def lacking(stock: Any, decisions: Mapping[str, Any]) -> list[str]:
    """What a drafter needs that the release's own class does not do, by the names of its parts.

    Args:
        stock: the class that vLLM resolved.
        decisions: what was decided for the drafter.
    """
    missing = class_of(stock).lacks(
        Expected(**decisions["expected"]),
        decisions["norm_output"],
        decisions.get("identity_d2t", ""),
    )
    if not decisions["tensors_checked"]:
        missing.append("a check of the tensors")
    return missing


def class_of(stock: Any) -> DrafterClass:
    """What a drafter class does, read from it."""
    combine = _names(stock.combine_hidden_states)
    # The decoder's constructor is wrapped by vLLM's compile decorator, so its text is read.
    decoder = inspect.getsource(sys.modules[stock.__module__])
    return DrafterClass(
        fc_norm="fc_norm" in combine,
        norm_output="norm_output" in decoder,
        norm_before_fc="input_norm" in combine,
        without_aux="use_aux_hidden_state" in combine,
        any_count="num_aux_hidden_states" in decoder,
        takes_full_d2t="get_vocab_size" not in _names(stock.__init__),
        quantized_head=False,  # Told before, from the source (drafter_tensors.py).
    )


def _names(function: Any) -> frozenset[str]:
    code = getattr(function, "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()


def _route(stock: type, architecture: str, model_config: Any) -> type:
    from vllm_kimi_eagle3.pair import decisions_of

    decisions = decisions_of(getattr(model_config, "hf_config", None))
    if decisions is None or "expected" not in decisions:
        return stock
    if not stock.__module__.startswith(("vllm.model_executor.models.", "vllm_kimi_eagle3.models.")):
        return stock  # The user's own class, registered under the same name.
    from vllm_kimi_eagle3.log import get_logger

    missing = lacking(stock, decisions)
    if not missing:
        return stock
    from vllm_kimi_eagle3.models.eagle3_drafter import completed

    get_logger(__name__).info(
        "EAGLE-3 drafter: this vLLM's %s does not have %s; the plugin adds it",
        stock.__name__,
        ", ".join(missing),
    )
    return completed(stock)


def _install() -> Undo:
    return all_of([hooks.on_pair(_ID, _decide), hooks.on_resolve(_ID, _route)])


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID) and hooks.resolve_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="fc_norm and norm_output (EAGLE-3.1) do not exist up to 0.21, where an MLA drafter loses "
    "their tensors in silence and a Llama drafter stops at a bare KeyError; 0.22 builds and loads "
    "fc_norm for an MLA drafter and never applies it; norm_before_fc, use_aux_hidden_state: false "
    "and other than three aux layers are read by some classes of some releases only.",
    target=f"{_LLAMA}:Eagle3LlamaForCausalLM.combine_hidden_states",
    since="0.15.1",
    before=None,
    does="completes the release's own drafter class with what this drafter needs and it lacks; a "
    "drafter that lacks nothing is served by the stock class.",
    upstream=(
        "https://github.com/vllm-project/vllm/pull/42764",
        "https://github.com/vllm-project/vllm/pull/43482",
        "https://github.com/vllm-project/vllm/pull/42143",
        "https://github.com/vllm-project/vllm/pull/46488",
    ),
    goes="when vLLM's two drafter classes read all of these from the top level and eagle_config",
    symbols=(
        hooks.PAIR_SYMBOL,
        hooks.RESOLVE_SYMBOL,
        Symbol(f"{_LLAMA}:Eagle3LlamaForCausalLM.__init__"),
        Symbol(f"{_LLAMA}:Eagle3LlamaForCausalLM.forward", "body"),
        Symbol(f"{_LLAMA}:Eagle3LlamaForCausalLM.combine_hidden_states", "body"),
        Symbol(f"{_LLAMA}:Eagle3LlamaForCausalLM.load_weights"),
        Symbol(f"{_LLAMA}:LlamaModel.__init__"),
        Symbol(f"{_LLAMA}:LlamaModel.forward", "body"),
        Symbol(f"{_MLA}:Eagle3DeepseekV2ForCausalLM.__init__", since="0.18"),
        Symbol(f"{_MLA}:Eagle3DeepseekV2ForCausalLM.forward", "body", since="0.18"),
        Symbol(f"{_MLA}:Eagle3DeepseekV2ForCausalLM.combine_hidden_states", "body", since="0.18"),
        Symbol(f"{_MLA}:Eagle3DeepseekV2ForCausalLM.load_weights", since="0.18"),
        Symbol(f"{_MLA}:DeepseekV2Eagle3Model.__init__", since="0.18"),
        Symbol(f"{_MLA}:DeepseekV2Eagle3Model.forward", "body", since="0.18"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
