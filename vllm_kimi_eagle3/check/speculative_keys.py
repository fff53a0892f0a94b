# SPDX-License-Identifier: Apache-2.0
"""What the keys of ``--speculative-config`` are called elsewhere, and what became of them.

Recipes are copied between releases, patched images and other engines. The tables here say which
key of vLLM is meant; whether a release has it, and which values, is in :mod:`.facts`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from . import command_flags
from .facts import SpeculativeField

# vLLM's key by other names: of patched images (draft_...), of vLLM's own flags before 0.8
# (speculative_model), of SGLang (speculative_num_steps) and of people's memory.
ALIASES: Mapping[str, str] = {
    "algorithm": "method",
    "draft_attention_backend": "attention_backend",
    "draft_kv_cache_dtype": "kv_cache_dtype",
    "draft_max_model_len": "max_model_len",
    "draft_model": "model",
    "draft_model_path": "model",
    "draft_model_revision": "revision",
    "draft_moe_backend": "moe_backend",
    "draft_quantization": "quantization",
    "draft_revision": "revision",
    "draft_tensor_parallel": "draft_tensor_parallel_size",
    "draft_tp": "draft_tensor_parallel_size",
    "draft_tp_size": "draft_tensor_parallel_size",
    "drafter": "model",
    "k": "num_speculative_tokens",
    "model_name": "model",
    "model_path": "model",
    "num_assistant_tokens": "num_speculative_tokens",
    "num_draft_tokens": "num_speculative_tokens",
    "num_spec_tokens": "num_speculative_tokens",
    "num_steps": "num_speculative_tokens",
    "num_tokens": "num_speculative_tokens",
    "spec_decoding_acceptance_method": "rejection_sample_method",
    "spec_method": "method",
    "spec_model": "model",
    "spec_steps": "num_speculative_tokens",
    "spec_tokens": "num_speculative_tokens",
    "speculative_algorithm": "method",
    "speculative_attention_backend": "attention_backend",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_draft_attention_backend": "attention_backend",
    "speculative_draft_model_path": "model",
    "speculative_draft_model_quantization": "quantization",
    "speculative_draft_model_revision": "revision",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_method": "method",
    "speculative_model": "model",
    "speculative_model_quantization": "quantization",
    "speculative_moe_runner_backend": "moe_backend",
    "speculative_num_steps": "num_speculative_tokens",
    "speculative_tokens": "num_speculative_tokens",
}

# Why a key of another engine has no counterpart.
WITHOUT_COUNTERPART: Mapping[str, str] = {
    name: "vLLM drafts one chain of tokens, as with a topk of 1"
    for name in ("topk", "eagle_topk", "speculative_eagle_topk")
}

# SGLang counts the token that the target adds: with a topk of 1 it is the steps and one.
WITH_THE_TARGETS_TOKEN = "speculative_num_draft_tokens"

# What stands in for a key on a release that does not have it.
INSTEAD: Mapping[str, str] = {
    "attention_backend": "the drafter takes the target's back-end there (--attention-backend)",
    "disable_by_batch_size": "vLLM has not read it since the V1 engine; from 0.24 on "
    "num_speculative_tokens_per_batch_size says how many tokens to draft at which batch size",
    "draft_sample_method": "rejection_sample_method is the key for it there",
    "kv_cache_dtype": "the drafter's cache has the target's type there (--kv-cache-dtype)",
    "speculative_token_tree": "vLLM drafts one chain of tokens",
    "synthetic_acceptance_rate": "synthetic_acceptance_length takes the mean number of tokens a "
    "step instead, and synthetic_acceptance_rates a list",
}


def plain_name(key: str) -> str:
    """A key with underscores: ``numSpeculativeTokens`` and ``num-speculative-tokens`` alike."""
    key = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key[:200])
    return re.sub(r"[-\s.]+", "_", key.strip().lstrip("-")).lower()


def converted(value: Any, known: SpeculativeField) -> Any:
    """What pydantic makes of a value: the number that a text or a float stands for."""
    types = set(known.types)
    if known.own or isinstance(value, bool) or "str" in types or "literal" in types:
        return value
    if "int" in types and "float" not in types:
        if isinstance(value, str):
            whole = command_flags.integer(value.strip())
            return value if whole is None else whole
        return int(value) if isinstance(value, float) and value.is_integer() else value
    if "bool" in types and isinstance(value, (str, int)):
        return _BOOLS.get(str(value).lower(), value)
    return value


_BOOLS = {
    **dict.fromkeys(("1", "on", "t", "true", "y", "yes"), True),
    **dict.fromkeys(("0", "off", "f", "false", "n", "no"), False),
}


def translated_sampling(
    key: str, value: Any, rejection: tuple[str, ...] | None, draft: tuple[str, ...] | None
) -> tuple[dict[str, Any], str] | None:
    """How this release says what ``rejection_sample_method`` or ``draft_sample_method`` meant on
    another one.

    Args:
        key: one of the two.
        value: its value.
        rejection: what ``rejection_sample_method`` takes here; None if there is no such key.
        draft: the same of ``draft_sample_method``.

    Returns:
        The keys that say it here, none where it is the default, and why; None if it is taken here
        as it stands, or means nothing on any release.
    """
    taken = rejection if key == "rejection_sample_method" else draft
    if taken is not None and value in taken:
        return None
    if value in ("probabilistic", "gumbel"):
        # Sampled drafts, and their probabilities in the acceptance test: "probabilistic"
        # rejection up to 0.20, "gumbel" drafts on 0.21, "probabilistic" drafts after it.
        for name in ("probabilistic", "gumbel"):
            if draft is not None and name in draft:
                return {
                    "draft_sample_method": name
                }, "draft_sample_method says how drafts are sampled"
        if rejection is not None and "probabilistic" in rejection:
            return {"rejection_sample_method": "probabilistic"}, (
                "rejection_sample_method says so there"
            )
        return {}, "drafts are greedy there"
    if value in ("strict", "standard", "greedy"):
        return {}, "that is what it does without the key"
    return None
