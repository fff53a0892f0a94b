# SPDX-License-Identifier: Apache-2.0
"""The dtype of the KV cache, as the command and the target's checkpoint have it, and its size."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .facts import Facts
from .subject import Subject
from .target import quantization_of

# CacheConfig's DEFAULT_BLOCK_SIZE, CUDA.
BLOCK_SIZE = 16

# MODELOPT_TO_VLLM_KV_CACHE_DTYPE_MAP of utils/torch_utils.py; NVFP4 from this release on.
_FP8, _NVFP4, _NVFP4_SINCE = "fp8_e4m3", "nvfp4", "0.20"
# "kv_cache_dtype" in --speculative-config.
_DRAFT_KV_CACHE_DTYPE = "0.26"

# Bytes of an element; whatever else --kv-cache-dtype takes has 8 bits.
_ELEMENT_BYTES = {"float32": 4.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0}
_FOUR_BITS = re.compile(r"int4|fp4|4bit")
_FOUR_BIT_BYTES = 0.5 + 1 / 16  # With an 8-bit scale for each 16.


# ModelConfig.use_mla and the selector, in every release.
MLA_SWITCH = "VLLM_MLA_DISABLE"


def mla_disabled(environ: Mapping[str, str]) -> bool:
    """True if the user makes vLLM run MLA layers as multi-head attention."""
    text = environ.get(MLA_SWITCH, "").strip()
    return text.isdecimal() and len(text) < 10 and int(text) > 0


def resolve(asked: str | None, quantization: Mapping[str, Any] | None, facts: Facts | None) -> str:
    """The cache's dtype by vLLM's name, or ``auto`` for that of the activations.

    It is ``resolve_kv_cache_dtype_string``. A ``kv_cache_scheme`` of another method than ModelOpt
    has no effect on MLA layers: the other attention layers alone read it.

    Args:
        asked: ``--kv-cache-dtype``; None if not given.
        quantization: what the target says of its quantisation; None for nothing.
        facts: the release; None counts as the newest.
    """
    if asked is not None and asked != "auto":
        return asked
    if quantization is None or not str(quantization.get("quant_method")).startswith("modelopt"):
        return "auto"
    inner = quantization.get("quantization", quantization)
    blocks = (inner if isinstance(inner, Mapping) else {}, quantization)
    keys = ("kv_cache_scheme", "kv_cache_quant_algo")
    stated = (block.get(key) for key in keys for block in blocks)
    algo: Any = next((value for value in stated if value), None)
    if isinstance(algo, Mapping):
        bits = algo.get("num_bits") if algo.get("type") == "float" else None
        algo = "fp8" if bits == 8 and algo.get("dynamic") is False else "nvfp4" if bits == 4 else ""
    name = algo.lower() if isinstance(algo, str) else ""
    if name == "nvfp4" and (facts is None or not facts.before(_NVFP4_SINCE)):
        return _NVFP4
    return _FP8 if name == "fp8" else "auto"


def of_target(subject: Subject, asked: str | None = None) -> str:
    """The dtype of the target's cache; ``asked`` in place of ``--kv-cache-dtype`` if given."""
    target = subject.target
    stated = quantization_of(target.config, target.folder)[0] if target and target.config else None
    return resolve(asked or subject.command.text("kv-cache-dtype"), stated, subject.facts)


def of_drafter(subject: Subject, asked: str | None = None) -> str:
    """The same of the drafter's, which may have its own. Its ``auto`` is not resolved."""
    facts, own = subject.facts, (subject.command.speculative or {}).get("kv_cache_dtype")
    if isinstance(own, str) and (facts is None or not facts.before(_DRAFT_KV_CACHE_DTYPE)):
        return own
    return of_target(subject, asked)


def stored_as(dtype: str, subject: Subject) -> str:
    """A cache's dtype, with ``auto`` replaced by that of the activations."""
    if dtype != "auto":
        return dtype
    activations = subject.command.text("dtype")
    return activations if activations in _ELEMENT_BYTES else "bfloat16"


def element_bytes(dtype: str) -> float:
    """Bytes of an element of a cache of that dtype, its scales included."""
    return _FOUR_BIT_BYTES if _FOUR_BITS.search(dtype) else _ELEMENT_BYTES.get(dtype, 1.0)
