# SPDX-License-Identifier: Apache-2.0
"""``auto`` is resolved as ``get_kv_cache_quant_algo_string`` does it, on each release."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.check.attention import choices
from vllm_kimi_eagle3.check.facts import facts_for
from vllm_kimi_eagle3.check.kv_cache import (
    element_bytes,
    of_drafter,
    of_target,
    resolve,
    stored_as,
)
from vllm_kimi_eagle3.check.memory import kv_cache

from .subjects import H200, subject

STATIC_FP8 = {"num_bits": 8, "type": "float", "dynamic": False}
SCHEMES: list[tuple[Any, str, str]] = [
    # What is stated, and what it is up to 0.19 and from 0.20 on.
    ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3", "fp8_e4m3"),
    ({"kv_cache_quant_algo": "NVFP4"}, "auto", "nvfp4"),
    ({"kv_cache_quant_algo": "INT8"}, "auto", "auto"),
    ({"kv_cache_quant_algo": None}, "auto", "auto"),
    ({"kv_cache_scheme": STATIC_FP8}, "fp8_e4m3", "fp8_e4m3"),
    ({"kv_cache_scheme": {**STATIC_FP8, "dynamic": True}}, "auto", "auto"),
    ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "auto", "auto"),
    ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "auto", "nvfp4"),
    ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "dynamic": False}}, "auto", "auto"),
    # The scheme comes first.
    ({"kv_cache_scheme": STATIC_FP8, "kv_cache_quant_algo": "NVFP4"}, "fp8_e4m3", "fp8_e4m3"),
    ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3", "fp8_e4m3"),
    ({"quantization": {"kv_cache_quant_algo": "FP8"}, "kv_cache_scheme": "nvfp4"},
     "auto", "nvfp4"),
]  # fmt: skip


@pytest.mark.parametrize(("stated", "old", "new"), SCHEMES)
def test_what_modelopts_checkpoints_bring(stated: Any, old: str, new: str) -> None:
    for method in ("modelopt", "modelopt_fp4"):
        block = {"quant_method": method, **stated}
        assert resolve(None, block, facts_for("0.19.1")) == old
        for release in ("0.20.2", "0.33.0"):
            assert resolve("auto", block, facts_for(release)) == new
        assert resolve("bfloat16", block, facts_for("0.33.0")) == "bfloat16"
    other = {"quant_method": "compressed-tensors", **stated}
    assert resolve(None, other, facts_for("0.33.0")) == "auto"


@given(
    st.dictionaries(
        st.sampled_from(["quantization", "kv_cache_scheme", "kv_cache_quant_algo"]),
        st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
        | st.dictionaries(st.sampled_from(["num_bits", "type", "dynamic"]), st.integers()),
    )
)  # fmt: skip
def test_whatever_a_file_says(block: dict[str, Any]) -> None:
    assert resolve(None, {"quant_method": "modelopt", **block}, None) in (
        "auto",
        "fp8_e4m3",
        "nvfp4",
    )
    assert resolve(None, {"quant_method": [], **block}, None) == "auto"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("half", 2), ("fp8", 1), ("fp8_e4m3", 1), ("int8", 1),
     ("nvfp4", 0.5625), ("int4_per_token_head", 0.5625)],
)  # fmt: skip
def test_bytes_of_an_element(dtype: str, size: float) -> None:
    assert element_bytes(dtype) == size


@pytest.mark.parametrize(("stated", "old", "new"), SCHEMES)
def test_attention_and_memory_have_the_same(stated: Any, old: str, new: str) -> None:
    edit = {"quantization_config": {"quant_method": "modelopt", **stated}}
    for release, name in (("0.19.1", old), ("0.26.0", new)):
        one = subject(release, gpu=H200, target=edit)
        found, cache = choices(one), kv_cache(one)
        assert found is not None
        assert cache is not None
        assert found.target.layers.kv_cache_dtype == of_target(one) == name
        assert cache.dtype == stored_as(name, one) == ("bfloat16" if name == "auto" else name)
        assert cache.target == 61 * 576 * element_bytes(cache.dtype)


def test_a_drafter_may_have_its_own_from_026_on() -> None:
    own = {"kv_cache_dtype": "fp8"}
    for release, size in (("0.25.1", 2), ("0.26.0", 1)):
        one = subject(release, gpu=H200, speculative=own)
        cache = kv_cache(one)
        assert cache is not None
        assert (cache.target, cache.drafter) == (61 * 576 * 2, 576 * size)
    asked = subject("0.26.0", "--kv-cache-dtype", "fp8", speculative={"kv_cache_dtype": "auto"})
    assert (of_target(asked), of_drafter(asked)) == ("fp8", "auto")
