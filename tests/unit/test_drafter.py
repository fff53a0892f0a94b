# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.assets import variants
from vllm_kimi_eagle3.checkpoint.drafter import (
    Drafter,
    TargetShape,
    TensorsError,
    attention_of,
    check_head,
    check_tensors,
    read_drafter,
)
from vllm_kimi_eagle3.checkpoint.drafter_tensors import Expected, expected_tensors
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.checkpoint.folder import read_config
from vllm_kimi_eagle3.checkpoint.tensors import TensorInfo, read_tensors
from vllm_kimi_eagle3.findings.catalogue import KINDS

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
PUBLISHED = json.loads((CONFIGS / "expected.json").read_text())
KIMI = TargetShape(num_layers=61, hidden_size=7168, vocab_size=163840)
TINY = TargetShape(num_layers=8, hidden_size=96, vocab_size=512)


def header(folder: Path) -> dict[str, TensorInfo] | None:
    """The tensors of a published drafter, as its safetensors header says them; None if unknown."""
    if not (folder / "tensors.json").exists():
        return None
    stated = json.loads((folder / "tensors.json").read_text())
    return {name: TensorInfo(dtype, tuple(shape)) for name, (dtype, shape) in stated.items()}


def read(config: dict[str, Any], target: TargetShape = TINY, **options: Any) -> Drafter:
    drafter = read_drafter(config, target, **options)
    assert drafter is not None
    return drafter


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_drafters_are_what_they_say(name: str) -> None:
    folder, says = CONFIGS / name, PUBLISHED[name]
    tensors = header(folder)
    drafter = read(read_config(folder), KIMI, tensors=tensors)
    assert drafter.aux is not None
    assert list(drafter.aux.captured) == says["captured_layer_ids"]
    for switch in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"):
        assert getattr(drafter, switch) == says[switch], switch
    assert drafter.rope.theta == says["rope_theta"]
    assert drafter.rope.kind == says["rope_kind"]
    assert drafter.rope.scaling.get("factor") == says["rope_factor"]
    assert drafter.rope.scaling.get("beta_fast") == says["rope_beta_fast"]
    assert drafter.rope.magnitude == 1.0
    assert drafter.expected.draft_vocab_size == says["draft_vocab_size"]
    assert drafter.max_position_embeddings == says["max_position_embeddings"]
    assert drafter.quantization is None
    if tensors is not None:
        check_tensors(drafter.expected, tensors)
    assert "\n" not in str(drafter)


@pytest.mark.parametrize("name", sorted(variants.VARIANTS))
def test_every_tiny_variant_is_read(name: str, tmp_path: Path) -> None:
    folder = variants.write_variant(name, tmp_path / "drafter")
    tensors = read_tensors(folder)
    assert tensors is not None
    drafter = read(read_config(folder), tensors=tensors)
    captured = () if drafter.aux is None else drafter.aux.captured
    assert captured == variants.VARIANTS[name].aux_layer_ids
    check_tensors(drafter.expected, tensors)
    # What travels to the workers is enough to make it again.
    assert Expected(**json.loads(json.dumps(asdict(drafter.expected)))) == drafter.expected


LLAMA = json.loads((variants.LLAMA_DRAFTER / "config.json").read_text())
MLA = json.loads((variants.MLA_DRAFTER / "config.json").read_text())


def edited(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(config), **changes}


@pytest.mark.parametrize("base", [LLAMA, MLA], ids=["llama", "mla"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 97}, "hidden_size is 97.*hidden states are 96 wide.*another target"),
        ({"target_hidden_size": 7}, "target_hidden_size is 7"),
        ({"vocab_size": 600}, "vocab_size is 600.*another target"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"intermediate_size": "256"}, "intermediate_size is '256'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers is 1073741824, and a drafter has one to"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"fc_norm": "yes"}, "fc_norm is 'yes', and must be true or false"),
        (
            {"fc_norm": True, "eagle_config": {"fc_norm": False}},
            "contradicts itself: fc_norm is tr",
        ),
        ({"eagle_config": {"use_aux_hidden_state": 1}}, "eagle_config.use_aux_hidden_state is 1"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8'"),
        ({"transformer_layer_config": []}, "transformer_layer_config is ..,"),
    ],
    ids=repr,
)
def test_what_cannot_be_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        read(edited(base, **changes))
    finding = refusal.value.finding
    assert finding.id in KINDS
    assert finding.fix
    assert finding.evidence.file == "config.json"
    assert finding.evidence.key is not None
    assert finding.evidence.key.rpartition(".")[2] in str(changes)


def test_an_mla_drafter_with_a_scaling_that_vllm_takes_for_yarn() -> None:
    config = edited(MLA, rope_scaling={"type": "linear", "factor": 4.0})
    with pytest.raises(CheckpointError, match="linear rope scaling"):
        read(config)
    assert read(edited(LLAMA, rope_scaling={"type": "linear", "factor": 4.0})).rope.factor == 4.0


def test_aux_layers_cannot_be_chosen_for_a_drafter_without() -> None:
    config = edited(LLAMA, eagle_config={"use_aux_hidden_state": False})
    assert read(config).aux is None
    with pytest.raises(CheckpointError, match="aux layers were chosen"):
        read(config, chosen_aux_layers=[2, 4, 5])


def test_an_mla_drafter_does_not_draft_in_parallel() -> None:
    assert read(LLAMA, parallel_drafting=True).expected.parallel_drafting
    with pytest.raises(CheckpointError, match='leave "parallel_drafting" out') as refusal:
        read(MLA, parallel_drafting=True)
    assert refusal.value.finding.id == "drafter-parallel"


def test_everything_that_does_not_fit_is_said_at_once() -> None:
    expected = read(MLA).expected
    tensors = {
        name: TensorInfo("BF16", want.shape) for name, want in expected_tensors(expected).items()
    }
    tensors["fc.weight"] = TensorInfo("BF16", (1, 2, 3))
    del tensors["norm.weight"]
    with pytest.raises(TensorsError) as refusal:
        check_tensors(expected, tensors)
    error = pickle.loads(pickle.dumps(refusal.value))
    assert [f.id for f in error.findings] == ["drafter-tensor-missing", "drafter-tensor-shape"]
    assert error.finding == error.findings[0]
    for finding in error.findings:
        assert finding.fix
        assert f"{finding.fact}; {finding.fix}" in str(error)
        assert finding.evidence.key in ("norm.weight", "fc.weight")


def test_a_quantised_head() -> None:
    tensors = {"lm_head.weight": TensorInfo("F8_E4M3", (8, 4)), "lm_head.weight_scale": F32}
    check_head(tensors, True)
    check_head({"lm_head.weight": TensorInfo("BF16", (8, 4))}, False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight_scale") as refusal:
        check_head(tensors, False)
    assert refusal.value.finding.id == "drafter-quantized-head"


F32 = TensorInfo("F32", (1,))


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "llama"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "llama"),
        ({"architectures": ["LlamaForCausalLM"]}, "llama"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "mla"),
        ({"architectures": ["Eagle3DeepseekV3ForCausalLM"]}, "mla"),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, None),
        ({"architectures": "Llama"}, None),
        ({}, None),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": {}}, "llama"),
        (
            {
                "speculators_model_type": "eagle3",
                "transformer_layer_config": {"model_type": "qwen3"},
            },
            None,
        ),
    ],
    ids=repr,
)
def test_the_family_of_a_class(config: dict[str, Any], family: str | None) -> None:
    assert attention_of(config) == family


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([2**31, 10**400, "LlamaForCausalLMEagle3", "yarn", [1, 3, 4]]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.sampled_from(sorted({*LLAMA, *MLA})), inner)
    ),
    max_leaves=6,
)


@given(
    st.sampled_from([LLAMA, MLA]),
    st.dictionaries(
        st.sampled_from(
            sorted(
                {*LLAMA, *MLA, "fc_norm", "norm_output", "rope_parameters", "use_aux_hidden_state"}
            )
        ),
        values,
        max_size=3,
    ),
    st.dictionaries(st.sampled_from(["fc_norm", "layer_ids", "use_aux_hidden_state"]), values),
    st.none() | st.lists(st.integers(), max_size=4),
)
def test_any_config_is_read_or_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], nested: dict[str, Any], chosen: Any
) -> None:
    config = edited(base, **{**changes, **({"eagle_config": nested} if nested else {})})
    try:
        drafter = read_drafter(config, TINY, chosen_aux_layers=chosen)
    except CheckpointError as error:
        drafter, refusal, finding = None, str(error), error.finding
    else:
        refusal, finding = "", None
    assert finding is None or (finding.id in KINDS and finding.fix)
    assert "\n" not in refusal
    assert drafter is None or "\n" not in str(drafter)
