# SPDX-License-Identifier: Apache-2.0
"""A reduced draft vocabulary with a missing or wrong map proposes wrong tokens, in silence."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo

_ID = "draft-vocabulary"
_LLAMA = "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM"
_MLA = "vllm.model_executor.models.deepseek_eagle3:Eagle3DeepseekV2ForCausalLM"


def _open_in(sources: Sources) -> bool:
    return sources.node(f"{_LLAMA}.compute_logits") is not None


def _decide(vllm_config: Any, pair: Any) -> None:
    expected, tensors = pair.drafter.expected, pair.tensors
    from vllm_kimi_eagle3.checkpoint.vocabulary import check_sizes, read_vocabulary

    check_sizes(expected.vocab_size, expected.draft_vocab_size)
    pair.draft_config.draft_vocab_size = expected.draft_vocab_size
    if tensors is None:
        return
    vocabulary = read_vocabulary(expected, tensors)
    if vocabulary.drop_d2t:
        # Offsets of zero are what releases before 0.30 load; token ids they would add to.
        pair.decisions["identity_d2t"] = "ids" if vocabulary.ids else "offsets"
    pair.notes.extend(vocabulary.notes)


def _install() -> Undo:
    return hooks.on_pair(_ID, _decide)


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID)


PATCH = Patch(
    id=_ID,
    gap="a drafter with a reduced vocabulary and no d2t, or one that is out of range, proposes the "
    "wrong tokens without a word, in every release; from 0.30 a drafter with the full vocabulary "
    "that ships an all-zero d2t cannot be loaded.",
    target=f"{_LLAMA}.compute_logits",
    since="0.15.1",
    before=None,
    does="checks d2t and t2d against the vocabularies before the load and refuses with the reason; "
    "leaves an all-zero d2t of a full vocabulary out.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/50158",
        "https://github.com/vllm-project/vllm/pull/43671",
    ),
    goes="when vLLM checks d2t when it is loaded",
    symbols=(
        hooks.PAIR_SYMBOL,
        Symbol(f"{_LLAMA}.compute_logits", "body"),
        Symbol(f"{_MLA}.compute_logits", "body", since="0.18"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
