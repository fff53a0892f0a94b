# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.checkpoint.drafter_tensors import (
    Expected,
    Problem,
    TensorLike,
    canonical,
    compare,
    expected_tensors,
)
from vllm_kimi_eagle3.checkpoint.tensors import TensorInfo, read_tensors

ASSETS = Path(__file__).resolve().parent.parent / "assets"

LLAMA = Expected(
    attention="llama",
    hidden_size=7168,
    intermediate_size=18432,
    num_heads=64,
    num_kv_heads=64,
    head_dim=128,
    vocab_size=163840,
    draft_vocab_size=32000,
    target_hidden_size=7168,
    aux_count=3,
)
LLAMA_FULL = replace(LLAMA, intermediate_size=12288, draft_vocab_size=163840)
MLA = Expected(
    attention="mla",
    hidden_size=7168,
    intermediate_size=18432,
    num_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    vocab_size=163840,
    draft_vocab_size=163840,
    target_hidden_size=7168,
    aux_count=3,
)
MLA_31 = replace(MLA, fc_norm=True)

Shapes = dict[str, tuple[int, ...]]


def llama_shapes(intermediate: int, prefix: str = "midlayer") -> Shapes:
    """The layer of a published Llama drafter, and what surrounds it in every one."""
    return {
        "fc.weight": (7168, 21504),
        f"{prefix}.hidden_norm.weight": (7168,),
        f"{prefix}.input_layernorm.weight": (7168,),
        f"{prefix}.post_attention_layernorm.weight": (7168,),
        f"{prefix}.self_attn.q_proj.weight": (8192, 14336),
        f"{prefix}.self_attn.k_proj.weight": (8192, 14336),
        f"{prefix}.self_attn.v_proj.weight": (8192, 14336),
        f"{prefix}.self_attn.o_proj.weight": (7168, 8192),
        f"{prefix}.mlp.gate_proj.weight": (intermediate, 7168),
        f"{prefix}.mlp.up_proj.weight": (intermediate, 7168),
        f"{prefix}.mlp.down_proj.weight": (7168, intermediate),
        "norm.weight": (7168,),
    }


EMBEDDING: Shapes = {"embed_tokens.weight": (163840, 7168)}
FULL_HEAD: Shapes = {"lm_head.weight": (163840, 7168)}
LLAMA_REDUCED_SHAPES: Shapes = {
    **llama_shapes(18432),
    "lm_head.weight": (32000, 7168),
    "d2t": (32000,),
    "t2d": (163840,),
}
MLA_BARE_SHAPES: Shapes = {
    "fc.weight": (7168, 21504),
    "layers.0.input_layernorm.weight": (7168,),
    "layers.0.hidden_norm.weight": (7168,),
    "layers.0.post_attention_layernorm.weight": (7168,),
    "layers.0.self_attn.q_a_proj.weight": (1536, 14336),
    "layers.0.self_attn.q_a_layernorm.weight": (1536,),
    "layers.0.self_attn.q_b_proj.weight": (12288, 1536),
    "layers.0.self_attn.kv_a_proj_with_mqa.weight": (576, 14336),
    "layers.0.self_attn.kv_a_layernorm.weight": (512,),
    "layers.0.self_attn.kv_b_proj.weight": (16384, 512),
    "layers.0.self_attn.o_proj.weight": (7168, 8192),
    "layers.0.mlp.gate_proj.weight": (18432, 7168),
    "layers.0.mlp.up_proj.weight": (18432, 7168),
    "layers.0.mlp.down_proj.weight": (7168, 18432),
    "norm.weight": (7168,),
    **FULL_HEAD,
}
MLA_SHAPES: Shapes = {**MLA_BARE_SHAPES, **EMBEDDING}
FC_NORM: Shapes = {f"fc_norm.{index}.weight": (7168,) for index in range(3)}


def tensors(shapes: Shapes, **dtypes: str) -> dict[str, TensorLike]:
    """Headers of these shapes: BF16, or what ``dtypes`` says for a name."""
    usual = {"d2t": "I64", "t2d": "BOOL"} | dtypes
    return {name: TensorInfo(usual.get(name, "BF16"), shape) for name, shape in shapes.items()}


def made_for(expected: Expected) -> dict[str, TensorLike]:
    return tensors({name: want.shape for name, want in expected_tensors(expected).items()})


def without(found: Mapping[str, TensorLike], *parts: str) -> dict[str, TensorLike]:
    return {name: t for name, t in found.items() if not any(part in name for part in parts)}


def only_problem(found: Mapping[str, TensorLike], expected: Expected) -> Problem:
    problems, _ = compare(found, expected)
    assert len(problems) == 1, [problem.text for problem in problems]
    assert "\n" not in problems[0].text
    finding = problems[0].finding
    assert finding.kind.id == f"drafter-tensor-{problems[0].kind}"
    assert finding.fact
    assert finding.fix
    assert finding.evidence.key
    return problems[0]


# -------------------------------------------------------------------------------------- clean ones


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (LLAMA_REDUCED_SHAPES, LLAMA),
        ({**llama_shapes(12288), **EMBEDDING, **FULL_HEAD}, LLAMA_FULL),
        ({**llama_shapes(12288, "layers.0")}, LLAMA_FULL),
        (MLA_SHAPES, MLA),
        (MLA_BARE_SHAPES, MLA),
        ({**MLA_SHAPES, **FC_NORM}, MLA_31),
    ],
    ids=["llama", "llama full", "llama shared", "mla", "mla shared", "mla 3.1"],
)
def test_published_drafters_fit(shapes: Shapes, expected: Expected) -> None:
    assert compare(tensors(shapes), expected)[0] == []


@pytest.mark.parametrize("folder", ["eagle3-llama-tiny", "eagle3-mla-tiny"])
def test_the_committed_drafters_fit(folder: str) -> None:
    config: dict[str, Any] = json.loads((ASSETS / folder / "config.json").read_text())
    sizes = ("head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    expected = Expected(
        attention="mla" if "kv_lora_rank" in config else "llama",
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        target_hidden_size=config["hidden_size"],
        aux_count=3,
        **{key: config[key] for key in (*sizes, "v_head_dim") if key in config},
    )
    read = read_tensors(ASSETS / folder)
    assert read is not None
    problems, unused = compare(read, expected)
    assert problems == []
    assert set(unused) == read.keys() & {"t2d"}


VARIANTS = st.builds(
    replace,
    st.sampled_from([LLAMA, LLAMA_FULL, MLA, MLA_31, replace(MLA, q_lora_rank=None)]),
    num_layers=st.integers(1, 3),
    aux_count=st.integers(0, 4),
    draft_vocab_size=st.sampled_from([1000, 163840]),
    target_hidden_size=st.sampled_from([7168, 4096]),
    fc_norm=st.booleans(),
    norm_before_fc=st.booleans(),
    attention_bias=st.booleans(),
    mlp_bias=st.booleans(),
    parallel_drafting=st.booleans(),
)


@given(VARIANTS, st.booleans())
def test_what_a_config_asks_for_fits_it(expected: Expected, midlayer: bool) -> None:
    found = made_for(expected)
    if midlayer:
        found = {name.replace("layers.0.", "midlayer."): t for name, t in found.items()}
    assert compare(found, expected) == ([], {})
    needed = {name for name, want in expected_tensors(expected).items() if want.required}
    found = {name: tensor for name, tensor in found.items() if canonical(name) in needed}
    assert compare(found, expected) == ([], {})


@given(VARIANTS, VARIANTS, st.data())
@settings(max_examples=300)
def test_nothing_is_lost(made: Expected, expected: Expected, data: st.DataObject) -> None:
    """Every tensor is used, in a problem or named as unused, and so is every one that is needed."""
    found = made_for(made)
    for name in data.draw(st.lists(st.sampled_from(sorted(found)), max_size=3)):
        found.pop(name, None)
    names = st.sampled_from(["x", "model.norm.weight", "t2d", "layers.0.mlp.up_proj.qweight"])
    for name in data.draw(st.lists(names, max_size=2)):
        found[name] = TensorInfo("I32", (3,))
    problems, unused = compare(found, expected)
    told = {name for problem in problems for name in problem.tensors} | set(unused)
    wants = expected_tensors(expected)
    for name, tensor in found.items():
        want = wants.get(canonical(name))
        used = want is not None and want.shape == tensor.shape
        quantised = name.replace(".weight", ".qweight") in found
        assert used or name in told or quantised
    families = any('"architectures"' in problem.text for problem in problems)
    for name, want in wants.items():
        if want.required and name not in found and name not in told:
            stands_in = f"model.{name}" in found or "mlp.up_proj" in name
            steps = ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")
            explained = any(f"self_attn.{step}" in name for step in steps) or families
            assert stands_in or (explained and "self_attn" in name)
    assert all("\n" not in problem.text and len(problem.text) < 900 for problem in problems)


@given(
    st.dictionaries(
        st.text(max_size=10)
        | st.sampled_from(
            [
                f"{layer}.self_attn.qkv_proj.weight"
                for layer in ("layers.0", "midlayer", "layers.99999999999999999999", "layers.5")
            ]
            + [
                "d2t",
                "model.d2t",
                "model.",
                "fc_norm.x",
                "fc.weight",
                "lm_head.weight",
                "mask_hidden",
            ]
        ),
        st.builds(
            TensorInfo,
            st.sampled_from(["BF16", "F8_E4M3", "I64", "U8"]),
            st.lists(st.integers(0, 3)).map(tuple),
        ),
        max_size=5,
    ),
    VARIANTS,
)
def test_any_names_and_shapes_are_compared(
    found: dict[str, TensorLike], expected: Expected
) -> None:
    problems, unused = compare(found, expected)
    told = {name for problem in problems for name in problem.tensors} | set(unused)
    fitting = expected_tensors(expected)
    for name, tensor in found.items():
        fits = name in fitting and fitting[name].shape == tensor.shape
        assert name in told or fits


# ------------------------------------------------------------------------------ names and families


def test_canonical_names() -> None:
    assert canonical("midlayer.mlp.up_proj.weight") == "layers.0.mlp.up_proj.weight"
    assert canonical("model.norm.weight") == "model.norm.weight"


def test_a_prefix_is_one_problem_whatever_it_stands_before() -> None:
    prefixed = {f"model.{name}": tensor for name, tensor in tensors(MLA_SHAPES).items()}
    problem = only_problem(prefixed, MLA)
    assert problem.kind == "unexpected"
    assert set(problem.tensors) == set(prefixed)
    assert "rename them without the prefix" in problem.text
    prefixed["model.fc.weight"] = TensorInfo("BF16", (7168, 28672))
    assert [problem.kind for problem in compare(prefixed, MLA)[0]] == ["unexpected", "shape"]


def test_two_spellings_of_one_tensor() -> None:
    found = made_for(LLAMA)
    found["midlayer.mlp.up_proj.weight"] = found["layers.0.mlp.up_proj.weight"]
    problem = only_problem(found, LLAMA)
    assert problem.kind == "duplicate"
    assert len(problem.tensors) == 2


def test_the_other_family() -> None:
    problem = only_problem(tensors({**llama_shapes(18432), **FULL_HEAD}), MLA)
    assert problem.kind == "unexpected"
    assert "the checkpoint has Llama's attention, the config asks for MLA" in problem.text
    assert '"LlamaForCausalLMEagle3"' in problem.text
    assert "midlayer.self_attn.q_proj.weight" in problem.tensors
    problem = only_problem(tensors(MLA_SHAPES), replace(LLAMA, draft_vocab_size=163840))
    assert "the checkpoint has MLA, the config asks for Llama's attention" in problem.text
    assert '"Eagle3DeepseekV2ForCausalLM"' in problem.text


def test_the_query_of_mla_in_one_step_or_two() -> None:
    direct = replace(MLA, q_lora_rank=None)
    problem = only_problem(made_for(MLA), direct)
    assert "has no q_lora_rank; set q_lora_rank to 1536" in problem.text
    problem = only_problem(made_for(direct), MLA)
    assert "has q_lora_rank 1536; set q_lora_rank to null" in problem.text


def test_more_layers_or_fewer() -> None:
    two = replace(LLAMA, num_layers=2)
    problem = only_problem(made_for(two), LLAMA)
    assert problem.kind == "unexpected"
    assert '"num_hidden_layers": 2' in problem.text
    assert all(name.startswith("layers.1.") for name in problem.tensors)
    problem = only_problem(made_for(LLAMA), two)
    assert problem.kind == "missing"
    assert "nothing of layer 1" in problem.text
    shifted = {name.replace("layers.0", "layers.61"): t for name, t in made_for(LLAMA).items()}
    texts = [problem.text for problem in compare(shifted, LLAMA)[0]]
    assert any("number its layers from 0" in text for text in texts)


def test_fused_linear_layers_are_read_as_vllm_reads_them() -> None:
    fused = without(tensors(LLAMA_REDUCED_SHAPES), "q_proj", "k_proj", "v_proj", "gate", "up_proj")
    fused["midlayer.self_attn.qkv_proj.weight"] = TensorInfo("BF16", (3 * 8192, 14336))
    fused["midlayer.mlp.gate_up_proj.weight"] = TensorInfo("BF16", (2 * 18432, 7168))
    assert compare(fused, LLAMA)[0] == []
    fused["midlayer.mlp.gate_up_proj.weight"] = TensorInfo("BF16", (2 * 12288, 7168))
    assert only_problem(fused, LLAMA).kind == "shape"


# ----------------------------------------------------------------------------- norms and the input


def test_norms_that_the_config_does_not_mention() -> None:
    problem = only_problem(tensors({**MLA_SHAPES, **FC_NORM}), MLA)
    assert problem.kind == "unexpected"
    assert problem.tensors == tuple(FC_NORM)
    assert 'set "fc_norm": true at the top level' in problem.text
    problem = only_problem(tensors({**MLA_SHAPES, "input_norm.weight": (21504,)}), MLA)
    assert 'set "norm_before_fc": true' in problem.text


def test_norms_that_the_checkpoint_does_not_hold() -> None:
    problem = only_problem(tensors(MLA_SHAPES), MLA_31)
    assert problem.kind == "missing"
    assert problem.tensors == tuple(FC_NORM)
    assert "take fc_norm out of the config" in problem.text
    problem = only_problem(tensors(MLA_SHAPES), replace(MLA, norm_before_fc=True))
    assert problem.tensors == ("input_norm.weight",)


def test_another_number_of_aux_hidden_states() -> None:
    found = tensors({**MLA_SHAPES, "fc.weight": (7168, 28672)})
    problem = only_problem(found, MLA)
    assert problem.kind == "shape"
    assert "it joins 4 aux hidden states, and the config 3; name 4 layers" in problem.text
    problem = only_problem(tensors({**MLA_SHAPES, "fc.weight": (7168, 12288)}), MLA)
    assert "no whole number of aux hidden states of width 7168" in problem.text
    found = tensors({**MLA_SHAPES, **FC_NORM, "fc_norm.3.weight": (7168,)})
    assert "not for those" in only_problem(found, MLA_31).text


def test_aux_hidden_states_that_are_switched_off() -> None:
    problem = only_problem(tensors(MLA_SHAPES), replace(MLA, aux_count=0))
    assert problem.tensors == ("fc.weight",)
    assert "use_aux_hidden_state false" in problem.text
    problem = only_problem(without(tensors(MLA_SHAPES), "fc."), MLA)
    assert problem.kind == "missing"
    assert "set use_aux_hidden_state to false" in problem.text


def test_biases() -> None:
    biased = replace(LLAMA, attention_bias=True)
    problem = only_problem(made_for(biased), LLAMA)
    assert 'set "attention_bias": true' in problem.text
    assert "vLLM would drop the bias without a word" in problem.text
    assert len(problem.tensors) == 4
    problem = only_problem(made_for(LLAMA), biased)
    assert problem.kind == "missing"
    problem = only_problem(tensors({**MLA_SHAPES, "fc.bias": (7168,)}), MLA)
    assert "has no such bias" in problem.text


def test_a_layer_that_reads_the_hidden_state_only() -> None:
    shapes = {
        name: (8192, 7168) if "self_attn.o_" not in name and "self_attn" in name else shape
        for name, shape in LLAMA_REDUCED_SHAPES.items()
    }
    problem = only_problem(tensors(shapes), LLAMA)
    assert problem.kind == "shape"
    assert "as an EAGLE-1 drafter" in problem.text
    assert len(problem.tensors) == 3


def test_sizes_that_differ_are_named_with_their_config_keys() -> None:
    problem = only_problem(made_for(LLAMA), replace(LLAMA, num_kv_heads=8))
    assert len(problem.tensors) == 2
    assert "num_key_value_heads x head_dim" in problem.text
    assert "[8192, 14336]" in problem.text
    assert "[1024, 14336]" in problem.text


# -------------------------------------------------------------------------------------- vocabulary


def test_a_head_is_needed_where_the_targets_does_not_fit() -> None:
    problem = only_problem(without(tensors(LLAMA_REDUCED_SHAPES), "lm_head"), LLAMA)
    assert problem.kind == "missing"
    assert "the target's cannot stand in" in problem.text
    assert "163840 rows" in problem.text
    assert compare(without(tensors(MLA_SHAPES), "lm_head", "embed_tokens"), MLA)[0] == []
    narrow = replace(MLA, target_hidden_size=4096)
    found = without(made_for(narrow), "lm_head", "embed_tokens")
    problems, _ = compare(found, narrow)
    assert {problem.tensors for problem in problems} == {
        ("lm_head.weight",),
        ("embed_tokens.weight",),
    }


def test_a_head_of_another_vocabulary() -> None:
    found = tensors({**LLAMA_REDUCED_SHAPES, **FULL_HEAD})
    problem = only_problem(found, LLAMA)
    assert "remove draft_vocab_size" in problem.text
    found = without(tensors(LLAMA_REDUCED_SHAPES), "d2t")
    problem = only_problem(found, replace(LLAMA, draft_vocab_size=163840))
    assert '"draft_vocab_size": 32000' in problem.text


def test_a_reduced_vocabulary_needs_its_map() -> None:
    problem = only_problem(without(tensors(LLAMA_REDUCED_SHAPES), "d2t"), LLAMA)
    assert problem.tensors == ("d2t",)
    assert "the target's first 32000 tokens" in problem.text


def test_what_is_left_out_on_purpose_is_named_with_the_reason() -> None:
    shapes = {
        **llama_shapes(12288),
        "d2t": (163840,),
        "t2d": (163840,),
        "midlayer.self_attn.rotary_emb.inv_freq": (64,),
        "mask_hidden": (1, 21504),
    }
    problems, unused = compare(tensors(shapes), LLAMA_FULL)
    assert problems == []
    assert set(unused) == set(shapes) - set(llama_shapes(12288))
    assert all(unused.values())


def test_mask_hidden_is_needed_for_parallel_drafting_in_any_shape() -> None:
    parallel = replace(LLAMA, parallel_drafting=True)
    problem = only_problem(tensors(LLAMA_REDUCED_SHAPES), parallel)
    assert problem.tensors == ("mask_hidden",)
    for shape in ((21504,), (1, 1, 21504)):
        found = tensors({**LLAMA_REDUCED_SHAPES, "mask_hidden": shape})
        assert compare(found, parallel)[0] == []
    found = tensors({**MLA_SHAPES, "mask_hidden": (21504,)})
    assert "MLA drafter does not do" in only_problem(found, MLA).text


# ------------------------------------------------------------------------- dtypes and quantisation


def test_dtypes() -> None:
    for name, dtype in (("d2t", "F32"), ("norm.weight", "I64"), ("d2t", "U8")):
        problem = only_problem(tensors(LLAMA_REDUCED_SHAPES, **{name: dtype}), LLAMA)
        assert problem.kind == "dtype"
        assert problem.tensors == (name,)
        assert dtype in problem.text
    # vLLM never reads t2d.
    fine = {"d2t": "I32", "t2d": "F32", "norm.weight": "F32", "fc.weight": "F16"}
    assert compare(tensors(LLAMA_REDUCED_SHAPES, **fine), LLAMA)[0] == []


def packed(shapes: Shapes, *modules: str) -> dict[str, TensorLike]:
    """These linear layers as compressed-tensors packs them."""
    found = tensors(shapes)
    for module in modules:
        rows, columns = found.pop(f"{module}.weight").shape
        found[f"{module}.weight_packed"] = TensorInfo("I32", (rows, columns // 8))
        found[f"{module}.weight_scale"] = TensorInfo("BF16", (rows, columns // 32))
        found[f"{module}.weight_shape"] = TensorInfo("I64", (2,))
    return found


def test_quantised_linear_layers_are_left_to_the_method() -> None:
    modules = ("fc", "layers.0.mlp.up_proj", "layers.0.self_attn.q_b_proj")
    found = packed(MLA_SHAPES, *modules)
    found["layers.0.mlp.down_proj.weight"] = TensorInfo("F8_E4M3", (7168, 18432))
    found["layers.0.mlp.down_proj.weight_scale_inv"] = TensorInfo("F32", (56, 144))
    found["layers.0.self_attn.attn.k_scale"] = TensorInfo("F32", ())
    quantized = replace(MLA, quantized=True)
    assert compare(found, quantized) == ([], {})
    found["norm.weight"] = TensorInfo("BF16", (96,))
    assert only_problem(found, quantized).kind == "shape"


def test_quantised_tensors_without_a_quantization_config() -> None:
    problem = only_problem(packed(MLA_SHAPES, "fc", "layers.0.mlp.up_proj"), MLA)
    assert problem.kind == "unexpected"
    assert "restore 'quantization_config'" in problem.text
    assert len(problem.tensors) == 6
    found = tensors(MLA_SHAPES, **{"fc.weight": "F8_E4M3"})
    problem = only_problem(found, MLA)
    assert problem.kind == "dtype"
    assert "'quantization_config'" in problem.text
    found = tensors(MLA_SHAPES) | {"layers.0.self_attn.k_scale": TensorInfo("F32", ())}
    assert "fp8 KV cache" in only_problem(found, MLA).text


def test_scales_without_their_weights_and_weights_without_their_scales() -> None:
    quantized = replace(MLA, quantized=True)
    found = without(packed(MLA_SHAPES, "fc"), "weight_packed")
    problems, _ = compare(found, quantized)
    assert [problem.tensors for problem in problems] == [("fc.weight",)]
    found = tensors(MLA_SHAPES, **{"fc.weight": "F8_E4M3"})
    assert "without the scales" in only_problem(found, quantized).text


def test_tensors_that_nothing_is_known_of() -> None:
    found = tensors({**MLA_SHAPES, "layers.0.mlp.gate.weight": (384, 7168), "ema": (1,)})
    problem = only_problem(found, MLA)
    assert problem.kind == "unexpected"
    assert problem.tensors == ("layers.0.mlp.gate.weight", "ema")
    problem = only_problem(without(tensors(MLA_SHAPES), "layernorm"), MLA)
    assert problem.kind == "missing"
    assert "and 0 more" not in problem.text
    assert len(problem.tensors) == 4
