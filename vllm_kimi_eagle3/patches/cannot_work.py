# SPDX-License-Identifier: Apache-2.0
"""What cannot work with EAGLE-3 is found out after the load, at the first request, or never."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol
from vllm_kimi_eagle3.findings import Severity

from . import hooks
from .base import Patch, Undo

_ID = "cannot-work"
_SPECULATIVE = "vllm.config.speculative:SpeculativeConfig"


def _open_in(sources: Sources) -> bool:
    return sources.node(_SPECULATIVE) is not None


def _decide(vllm_config: Any, pair: Any) -> None:
    from vllm_kimi_eagle3.limits import limits, run_of

    aux = pair.drafter.aux
    met = limits(
        run_of(
            vllm_config,
            aux_layers=None if aux is None else aux.captured,
            replicated=bool(pair.decisions.get("replicated")),
        )
    )
    refused = [finding.text for finding in met if finding.severity is Severity.FAILS]
    if refused:
        raise ValueError("; ".join(refused))
    pair.notes.extend(f"note: {finding.text}" for finding in met)


def _install() -> Undo:
    return hooks.on_pair_ready(_ID, _decide)


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="pipeline parallelism without a way for aux hidden states between its ranks, context "
    "parallelism with an MHA drafter, an MLA back-end forced on an MHA drafter: a long load, and "
    "then a traceback or a drafter that is fed less than it was trained on; "
    "draft_tensor_parallel_size is accepted and has no effect.",
    target=hooks.PAIR_SYMBOL.target,
    since="0.15.1",
    before=None,
    does="refuses, before the load and in one line, what the source of this release shows cannot "
    "work (limits.py), and says what has no effect.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/17499",
        "https://github.com/vllm-project/vllm/issues/40791",
        "https://github.com/vllm-project/vllm/pull/50514",
        "https://github.com/vllm-project/vllm/pull/54826",
    ),
    goes="when vLLM refuses these itself",
    symbols=(
        hooks.PAIR_SYMBOL,
        Symbol(f"{_SPECULATIVE}.create_draft_parallel_config"),
        Symbol("vllm.model_executor.models.deepseek_v2:DeepseekV2Model.forward", "body"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
