# SPDX-License-Identifier: Apache-2.0
"""How many tokens a request may have, by vLLM's rule (``_get_and_verify_max_len``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .facts import Facts
from .subject import Subject

# ``derive_max_model_len_and_key``: the smallest of these counts, but where there is a
# model_max_length, that one.
_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_MODEL_MAX_LENGTH = "model_max_length"
# Before, YaRN's length is the original one times the factor, and that of the other kinds of YaRN
# max_position_embeddings times the factor; from here on neither is scaled again.
_YARN_IS_SCALED = "0.30"
_NEVER_SCALED = ("su", "longrope", "llama3")
_YARN = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
_LONGEST = 2**48


def longest_request(subject: Subject) -> int | None:
    """``--max-model-len``, else what follows from the target's config; None if not known."""
    asked = subject.command.integer("max-model-len")
    if asked is not None and asked > 0:
        return min(asked, _LONGEST)
    return derived_length(subject.target_text, subject.facts)


def derived_length(text: Mapping[str, Any], facts: Facts | None) -> int | None:
    """The length that a config allows; None if it states none.

    Args:
        text: the config of a language model.
        facts: the release; None counts as the newest.
    """
    stated = [length for key in _KEYS if (length := _length(text, key)) is not None]
    if not stated:
        return None
    length = _length(text, _MODEL_MAX_LENGTH) or min(stated)
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return length
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor", 1)
    scaled = facts is not None and facts.before(_YARN_IS_SCALED)
    if kind in _NEVER_SCALED or (kind in _YARN and not scaled):
        return length
    if kind == "yarn":
        length = _length(rope, "original_max_position_embeddings") or length
    if type(factor) not in (int, float) or not 0 < factor < _LONGEST / length:
        return length
    return int(length * factor)


def refused_length(subject: Subject) -> int | None:
    """The length that vLLM allows, if ``--max-model-len`` asks for more; None otherwise."""
    asked = subject.command.integer("max-model-len")
    derived = derived_length(subject.target_text, subject.facts)
    if asked is None or derived is None:
        return None
    allowed = max(derived, _length(subject.target_text, _MODEL_MAX_LENGTH) or 0)
    return allowed if asked > allowed else None


def _length(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and 0 < value < 2**31 else None
