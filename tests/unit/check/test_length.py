# SPDX-License-Identifier: Apache-2.0
"""The longest request is what ``_get_and_verify_max_len`` derives, on each release."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.check import memory
from vllm_kimi_eagle3.check.facts import facts_for
from vllm_kimi_eagle3.check.length import derived_length, longest_request, refused_length

from .subjects import KIMI, read, subject

YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("text", "old", "new"),
    [
        ({}, None, None),
        ({"max_position_embeddings": 1000}, 1000, 1000),
        ({"max_position_embeddings": 1000, "max_sequence_length": 500}, 500, 500),
        ({"max_position_embeddings": 1000, "model_max_length": 3000}, 3000, 3000),
        ({"max_position_embeddings": 1000, "rope_scaling": YARN}, 262144, 1000),
        ({"max_position_embeddings": 1000, "rope_parameters": {**YARN, "rope_type": "yarn"}},
         262144, 1000),
        ({"max_position_embeddings": 1000, "rope_scaling": {**YARN, "type": "deepseek_yarn"}},
         64000, 1000),
        ({"max_position_embeddings": 1000, "rope_scaling": {"rope_type": "linear", "factor": 2}},
         2000, 2000),
        ({"max_position_embeddings": 1000, "rope_scaling": {"type": "llama3", "factor": 8}},
         1000, 1000),
        ({"max_position_embeddings": 1000, "rope_scaling": {"rope_type": "default"}}, 1000, 1000),
    ],
)  # fmt: skip
def test_what_a_config_allows(text: dict[str, Any], old: int | None, new: int | None) -> None:
    assert derived_length(text, facts_for("0.15.1")) == old
    assert derived_length(text, facts_for("0.29.0")) == old
    assert derived_length(text, facts_for("0.30.0")) == new
    assert derived_length(text, None) == new


def test_every_check_has_the_same() -> None:
    for release in ("0.26.0", "0.33.0"):
        one = subject(release)
        assert longest_request(one) == 262144
        assert longest_request(subject(release, "--max-model-len", "auto")) == 262144
    asked = subject("0.33.0", "--max-model-len", "262145")
    assert longest_request(asked) == 262145
    assert refused_length(asked) == 262144
    # A longer position table than the scaled length: YaRN decides up to 0.29.
    text = {**read(KIMI)["text_config"], "max_position_embeddings": 131072}
    for release, longest in (("0.26.0", 262144), ("0.33.0", 131072)):
        one = subject(release, "--max-model-len", "200k", target={"text_config": text})
        assert refused_length(one) == (None if longest > 200_000 else longest)
        one = subject(release, target={"text_config": text})
        assert longest_request(one) == longest
        assert not hasattr(memory, "_max_model_len")


VALUES = (
    st.none() | st.integers() | st.floats() | st.text(max_size=5)
    | st.dictionaries(
        st.sampled_from(["type", "factor", "original_max_position_embeddings"]),
        st.integers() | st.floats() | st.sampled_from(["yarn", "linear"]),
    )
)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["max_position_embeddings", "model_max_length", "rope_scaling"]), VALUES
    )
)
def test_whatever_a_config_says(text: dict[str, Any]) -> None:
    for release in ("0.26.0", "0.33.0"):
        length = derived_length(text, facts_for(release))
        assert length is None or 0 <= length <= 2**48
