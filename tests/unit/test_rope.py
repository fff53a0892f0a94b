# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.layers import rotary_from_config
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.checkpoint.rope import Reach, Rope, read_rope

YARN = {
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# One rope, as Transformers 4 and 5 write it.
PLAIN = [
    {"rope_theta": 1e6},
    {"rope_theta": 1e6, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_parameters": {"rope_theta": 1e6}},
    {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}},
]
KIMI = [
    {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN}},
    {"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", **YARN}},
    {"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **YARN}},
    {"rope_scaling": {"type": "yarn", "rope_theta": 5e4, **YARN}, "rope_theta": 5e4},
]


@pytest.mark.parametrize("config", PLAIN, ids=repr)
def test_plain_rope_in_every_layout(config: dict[str, Any]) -> None:
    rope = read_rope(config)
    assert rope == Rope(1e6)
    assert (rope.factor, rope.magnitude, rope.yarn) == (1.0, 1.0, False)
    assert str(rope) == "theta 1e+06, no scaling"
    assert rope.position_limit(2048) is None
    assert rope.stock_magnitude == 1.0
    assert rope.reach(2048, 4096, 2048) == Reach(True, None, None)
    reach = rope.reach(None, 2048, 9000)
    assert (reach.formula, reach.limit) == (True, None)
    assert reach.finding is not None
    assert "no max_position_embeddings, which stands for 2048" in reach.finding.fact
    assert rope.reach(None, 2048, 2048) == Reach(True, None, None)
    reach = rope.reach(2048, 4096, 9000)
    assert (reach.formula, reach.limit) == (True, None)
    assert reach.finding is not None
    assert reach.finding.kind.id == "drafter-length"
    assert "9000" in reach.finding.fact
    assert "2048" in reach.finding.fact


@pytest.mark.parametrize("config", KIMI, ids=repr)
def test_yarn_in_every_layout(config: dict[str, Any]) -> None:
    rope = read_rope(config)
    assert rope == Rope(5e4, "yarn", YARN)
    assert (rope.factor, rope.magnitude) == (64.0, 1.0)
    assert str(rope) == "theta 50000, YaRN x64"
    assert rope.position_limit(2048) == 262144
    assert rope.stock_magnitude == pytest.approx(1.4158883)
    assert rope.reach(262144, 4096, 262144) == Reach(False, None, None)
    reach = rope.reach(262144, 4096, 262145)
    assert (reach.formula, reach.limit) == (False, 262144)
    assert reach.finding is not None
    assert reach.finding.kind.id == "drafter-rope-ends"
    assert "--max-model-len 262144" in reach.finding.fix


# Inverse frequencies of channels 0, n/4, n/2, 3n/4 and n-1 of n, from the formulas of DeepSeek's
# modelling code, in float64, without the reference: the ropes of published Kimi drafters.
GOLDEN = [
    (PLAIN[0], 128, [1.0, 3.16227766e-02, 1.0e-03, 3.16227766e-05, 1.24093776e-06]),
    (KIMI[0], 128, [1.0, 6.68740305e-02, 1.47059584e-03, 4.67296494e-06, 3.70059389e-07]),
    (
        {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN, "beta_fast": 1.0}},
        64,
        [1.0, 6.68740305e-02, 4.47213595e-03, 4.67296494e-06, 4.38220646e-07],
    ),
]


@pytest.mark.parametrize(("config", "channels", "expected"), GOLDEN)
def test_golden_frequencies(config: dict[str, Any], channels: int, expected: list[float]) -> None:
    frequencies = rotary_from_config({"model_type": "llama", **config}, channels)
    n = channels // 2
    got = frequencies.inverse_frequencies[[0, n // 4, n // 2, 3 * n // 4, n - 1]]
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("configs", [PLAIN, KIMI], ids=["plain", "yarn"])
def test_every_layout_gives_the_reference_the_same_frequencies(
    configs: list[dict[str, Any]],
) -> None:
    first, *rest = (rotary_from_config({"model_type": "llama", **c}, 128) for c in configs)
    for other in rest:
        torch.testing.assert_close(
            other.inverse_frequencies, first.inverse_frequencies, rtol=0, atol=0
        )
        assert other.magnitude == first.magnitude


@pytest.mark.parametrize(
    ("mscale", "expected"), [((1.0, 1.0), 1.0), ((1.0, 0.0), 1.4158883), ((0.707, 1.0), 0.9139)]
)
def test_the_magnitude_is_the_references(mscale: tuple[float, float], expected: float) -> None:
    scaling = {"type": "yarn", **YARN, "mscale": mscale[0], "mscale_all_dim": mscale[1]}
    config = {"model_type": "llama", "rope_theta": 5e4, "rope_scaling": scaling}
    magnitude = read_rope(config).magnitude
    assert magnitude == pytest.approx(rotary_from_config(config, 128).magnitude, abs=1e-12)
    assert magnitude == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": True}, "rope_theta is true"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_theta": 1 << 5000}, "rope_theta is"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is null"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear"}}, "both 'linear' and 'yarn'"),
        ({"rope_scaling": {"factor": 4}}, "no rope_type"),
        (
            {"rope_scaling": {"type": "a rope\nof mine"}},
            r"rope_type 'a rope\\nof mine', which no vLLM",
        ),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
            "contradicts itself",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}},
            "full_attention",
        ),
    ],
)
def test_what_is_no_rope_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        read_rope(config)
    finding = refusal.value.finding
    assert finding.kind.id == "drafter-rope"
    assert finding.fix
    assert finding.evidence.file == "config.json"


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
blocks = values | st.dictionaries(
    st.sampled_from(["rope_type", "type", "rope_theta", *YARN]),
    values | st.sampled_from(["yarn", "default", "linear", "llama3", 64.0, 4096]),
)


@given(values, blocks, blocks, st.integers(1, 1 << 40))
def test_anything_is_a_rope_or_refused(theta: Any, old: Any, new: Any, longest: int) -> None:
    try:
        rope = read_rope({"rope_theta": theta, "rope_scaling": old, "rope_parameters": new})
        limit = rope.position_limit(longest)
    except CheckpointError as error:
        rope, refusal = None, str(error)
    else:
        refusal = ""
    assert "\n" not in refusal
    if rope is not None:
        assert rope.theta > 0
        assert rope.magnitude == rope.magnitude
        assert limit is None or isinstance(limit, int)
        assert "theta" in str(rope)
