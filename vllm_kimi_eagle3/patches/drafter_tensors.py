# SPDX-License-Identifier: Apache-2.0
"""Tensors of a drafter's checkpoint are dropped without a word, or missing without a word."""

from __future__ import annotations

import ast
from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo

_ID = "drafter-tensors"
_LLAMA = "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM.__init__"
_MLA = "vllm.model_executor.models.deepseek_eagle3:Eagle3DeepseekV2ForCausalLM.__init__"


def _open_in(sources: Sources) -> bool:
    return sources.node(_LLAMA) is not None


def _decide(vllm_config: Any, pair: Any) -> None:
    pair.decisions["tensors_checked"] = pair.tensors is not None
    if pair.tensors is None:
        pair.notes.append("its tensors are checked when they are loaded")
        return
    from vllm_kimi_eagle3.checkpoint.drafter import check_head, check_tensors

    unused = check_tensors(pair.drafter.expected, pair.tensors)
    if unused:
        left_out = ", ".join(f"{name} ({why})" for name, why in sorted(unused.items()))
        pair.notes.append(f"left out: {left_out}")
    check_head(pair.tensors, head_takes_quantization(pair.drafter.attention))


def head_takes_quantization(attention: str) -> bool:
    """True if this vLLM's class for a ``llama`` or ``mla`` drafter gives its LM head the drafter's
    quantisation, by its source."""
    from vllm_kimi_eagle3.host import find_host

    host = find_host()
    node = None if host is None else Sources(host.root).node(_MLA if attention == "mla" else _LLAMA)
    return node is not None and any(
        isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "ParallelLMHead"
        and any(keyword.arg == "quant_config" for keyword in call.keywords)
        for call in ast.walk(node)
    )


def _install() -> Undo:
    return hooks.on_pair(_ID, _decide)


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="an MLA drafter's unknown tensors are skipped up to 0.24, a Llama drafter's are a bare "
    "KeyError there; a tensor that is missing leaves a parameter as it was allocated, in every "
    "release.",
    target=_MLA,
    since="0.15.1",
    before=None,
    does="holds the checkpoint's tensors, names and shapes, against what the drafter must hold, "
    "before anything is loaded (while loading where the weights are not here yet), and refuses "
    "with the names and the likely cause; tensors that are left out on purpose are named.",
    upstream=(
        "https://github.com/vllm-project/vllm/pull/42764",
        "https://github.com/vllm-project/vllm/issues/54526",
        "https://github.com/vllm-project/vllm/pull/37280",
    ),
    goes="when vLLM checks a drafter's tensors both ways",
    symbols=(
        hooks.PAIR_SYMBOL,
        Symbol(_LLAMA),
        Symbol(_MLA, since="0.18"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
