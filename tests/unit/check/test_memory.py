# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.assets.synthetic import kimi_config, kimi_tensors, light_tensors
from vllm_kimi_eagle3.check import memory as module
from vllm_kimi_eagle3.check import target
from vllm_kimi_eagle3.check.command import parse
from vllm_kimi_eagle3.check.facts import facts_for
from vllm_kimi_eagle3.check.subject import GIB, Subject
from vllm_kimi_eagle3.check.weights import Parallel, Split, Tally, estimate, split_of
from vllm_kimi_eagle3.checkpoint.drafter import read_drafter
from vllm_kimi_eagle3.checkpoint.drafter_tensors import expected_tensors
from vllm_kimi_eagle3.checkpoint.tensors import TensorInfo, read_tensors
from vllm_kimi_eagle3.findings import Finding, Severity

from .targets import ids, make_subject, make_target, only

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
BYTES = {"BF16": 2, "F32": 4, "I32": 4}


def info(dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(dtype, shape, None, 0, math.prod(shape) * BYTES[dtype])


def tallied(config: dict[str, Any]) -> Tally:
    text = config["text_config"]
    tally = Tally(num_experts=text["n_routed_experts"])
    for name, (dtype, shape) in light_tensors(config).items():
        tally.add(name, info(dtype, shape), text["num_hidden_layers"])
    return tally


# ------------------------------------------------------------------------- the target's weights


def test_the_whole_is_what_was_published() -> None:
    assert tallied(kimi_config()).total / GIB == pytest.approx(554.3, abs=0.1)


def test_a_few_large_tensors_count_as_the_many_small_ones() -> None:
    many = Tally(num_experts=384)
    for name, dtype, shape in kimi_tensors(kimi_config()):
        many.add(name, info(dtype, shape), 61)
    light = tallied(kimi_config())
    for split in Split:
        assert many.bytes[split] == pytest.approx(light.bytes[split], rel=1e-5)


@given(
    st.fixed_dictionaries(
        {
            "num_hidden_layers": st.integers(1, 4),
            "hidden_size": st.integers(1, 8).map(lambda n: n * 256),
            "vocab_size": st.integers(10, 5000),
            "intermediate_size": st.integers(1, 9).map(lambda n: n * 32),
            "moe_intermediate_size": st.integers(1, 9).map(lambda n: n * 32),
            "n_routed_experts": st.integers(1, 9),
            "n_shared_experts": st.integers(0, 2),
            "first_k_dense_replace": st.integers(0, 2),
            "num_attention_heads": st.integers(1, 9),
            "q_lora_rank": st.integers(1, 99),
            "kv_lora_rank": st.integers(1, 99),
        }
    )
)
def test_what_a_config_describes_is_what_its_files_hold(text: dict[str, Any]) -> None:
    config = kimi_config()
    config["text_config"].update(text)
    quantization = config["text_config"]["quantization_config"]
    estimated = estimate(config, quantization)
    assert estimated is not None
    counted = tallied(config)
    for split in Split:
        # The files also hold the shape of each packed weight.
        assert estimated.bytes[split] == pytest.approx(counted.bytes[split], rel=1e-6, abs=1000)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (None, 16),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.002),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, 4.25),
        ({"quant_method": "compressed-tensors", "config_groups": {
            "a": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}}}, 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": {
            "a": {"weights": {"num_bits": 8, "group_size": None}}}}, 8),
        ({"quant_method": "gptq"}, None),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, None),
        ({"quant_method": "fp8", "weight_block_size": [0, 0]}, None),
    ],
)  # fmt: skip
def test_bits_of_a_quantisation(quantization: dict[str, Any] | None, bits: float | None) -> None:
    found = estimate(kimi_config(), quantization)
    if bits is None:
        assert found is None
        return
    assert found is not None
    assert found.bytes[Split.EXPERTS] * 8 / (60 * 384 * 3 * 7168 * 2048) == pytest.approx(
        bits, rel=1e-3
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from([*kimi_config()["text_config"], "rope_parameters"]), VALUES),
    st.dictionaries(
        st.sampled_from(
            ["quant_method", "quant_algo", "config_groups", "ignore", "weight_block_size"]
        ),
        VALUES,
    ),
)
def test_any_config_is_weighed_or_not(text: dict[str, Any], quantization: dict[str, Any]) -> None:
    config = kimi_config()
    config["text_config"].update(text)
    found = estimate(config, quantization)
    assert found is None or found.per_rank(Parallel()) >= 0


def test_each_tensor_is_spread_as_vllm_spreads_it() -> None:
    prefix = "language_model.model.layers.3."
    assert split_of(f"{prefix}mlp.experts.0.up_proj.weight_packed", 61) is Split.EXPERTS
    assert split_of(f"{prefix}mlp.shared_experts.up_proj.weight", 61) is Split.SHARED_EXPERTS
    for name in ("q_b_proj", "kv_b_proj", "o_proj", "q_proj"):
        assert split_of(f"{prefix}self_attn.{name}.weight", 61) is Split.RANKS
    for name in ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "mlp.gate"):
        assert split_of(f"{prefix}{name}.weight", 61) is Split.EACH
    assert split_of("model.layers.0.mlp.down_proj.weight_scale", 61) is Split.RANKS
    assert split_of("lm_head.weight", 61) is Split.RANKS
    assert split_of("model.layers.61.mlp.experts.0.up_proj.weight", 61) is Split.UNUSED
    assert split_of("model.layers.61.eh_proj.weight", 61) is Split.UNUSED
    assert split_of("vision_tower.encoder.blocks.0.wqkv.weight", 61) is Split.VISION
    assert split_of("mm_projector.proj.0.weight", 61) is Split.VISION_EACH


def per_rank(*flags: str, release: str = "0.26.0") -> float:
    facts = facts_for(release)
    parallel = Parallel.of(parse(["kimi", *flags], facts), facts)
    return tallied(kimi_config()).per_rank(parallel) / GIB


def test_what_each_rank_holds() -> None:
    whole = per_rank()
    eight = per_rank("-tp", "8")
    assert eight == pytest.approx(whole / 8 + 1.9, abs=0.1)  # What lies on each rank.
    # Experts over all data-parallel ranks, the rest on each of them.
    assert per_rank("-dp", "8") == pytest.approx(531.6 / 8 + (whole - 531.6), abs=0.1)
    # Whole experts: the same where they divide evenly, and more where they do not.
    assert per_rank("-tp", "8", "--enable-expert-parallel") == pytest.approx(eight)
    assert per_rank("-tp", "5", "--enable-expert-parallel") > per_rank("-tp", "5")
    # With both, the shared experts lie on each rank.
    both = per_rank("-tp", "4", "-dp", "2", "--enable-expert-parallel")
    assert both == pytest.approx(per_rank("-tp", "4", "-dp", "2") + 4.92 * 3 / 4, abs=0.05)
    extra = per_rank(
        "-tp", "8", "--enable-expert-parallel", "--eplb-config", '{"num_redundant_experts": 32}'
    )
    assert extra == pytest.approx(eight + 531.6 / 384 * 4, abs=0.1)


def test_the_vision_tower() -> None:
    plain, on_each = per_rank("-tp", "8"), per_rank("-tp", "8", "--mm-encoder-tp-mode", "data")
    assert on_each - plain == pytest.approx(0.77 * 7 / 8, abs=0.01)
    text = per_rank("-tp", "8", "--language-model-only")
    assert plain - text == pytest.approx(0.77 / 8 + 0.11, abs=0.01)
    limit = ("--limit-mm-per-prompt", '{"vision_chunk": 0}')
    assert per_rank(*limit, release="0.16.0") < per_rank(release="0.16.0")
    assert per_rank(*limit, release="0.15.1") == per_rank(release="0.15.1")


def test_a_quantised_kv_b_proj_is_copied() -> None:
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    for dtype, copies in (("BF16", 0), ("F8_E4M3", 2 * 16384 * 512)):
        tally = Tally()
        size = 16384 * 512 * (2 if dtype == "BF16" else 1)
        tally.add(name, TensorInfo(dtype, (16384, 512), None, 0, size), 61)
        assert tally.per_rank(Parallel()) == size + copies


# ------------------------------------------------------------------------------------- what fits


def looked_at(
    folder: Path,
    *flags: str,
    drafter: str | None = None,
    tensors: Mapping[str, TensorInfo] | None = None,
    **how: Any,
) -> Subject:
    """A subject as the earlier checks leave it."""
    subject = make_subject(folder, *flags, **how)
    list(target.findings(subject))
    if drafter is not None:
        assert subject.shape is not None
        config = json.loads((CONFIGS / drafter / "config.json").read_text())
        subject.pair = read_drafter(config, subject.shape)
        subject.tensors = tensors
    return subject


MLA, LLAMA = "lightseekorg__kimi-k2.5-eagle3-mla", "AQ-MedAI__Kimi-K25-eagle3"
EIGHT = ("-tp", "8")


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("kimi"))


def found(subject: Subject) -> list[Finding]:
    return list(module.findings(subject))


def test_the_cache_of_a_token(kimi: Path) -> None:
    def of(*flags: str, drafter: str = MLA) -> tuple[float, float, int]:
        cache = module.kv_cache(looked_at(kimi, *flags, drafter=drafter))
        assert cache is not None
        return cache.target, cache.drafter, cache.ranks

    assert of(*EIGHT) == (61 * 576 * 2, 576 * 2, 1)
    assert of(*EIGHT, "--kv-cache-dtype", "fp8") == (61 * 576, 576, 1)
    assert of(*EIGHT, "-dcp", "8")[2] == 8
    # A Llama drafter's heads are spread, and do not become fewer than one.
    assert of(*EIGHT, drafter=LLAMA)[1] == 2 * 8 * 128 * 2
    assert of("-tp", "128", drafter=LLAMA)[1] == 2 * 1 * 128 * 2
    assert of(drafter=LLAMA)[1] == 2 * 64 * 128 * 2


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ({}, "bfloat16"),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}},
         "fp8_e4m3"),
        ({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {}}},
         "bfloat16"),
    ],
)  # fmt: skip
def test_auto_is_what_the_checkpoint_says(tmp_path: Path, text: Any, dtype: str) -> None:
    cache = module.kv_cache(looked_at(make_target(tmp_path, text=text, tensors=False)))
    assert cache is not None
    assert cache.dtype == dtype


def test_a_drafters_weights(kimi: Path) -> None:
    subject = looked_at(kimi, *EIGHT, drafter=MLA)
    assert subject.pair is not None
    wants = expected_tensors(subject.pair.expected)
    assert sum(2 * math.prod(w.shape) for w in wants.values()) / 1e9 == pytest.approx(6.03, abs=0.1)
    on_eight, _ = module.drafter_bytes(subject)
    fc = 2 * 7168 * 3 * 7168
    assert fc + (6.03e9 - fc) / 8 < on_eight < fc + (6.03e9 - fc) / 8 + 0.1e9
    # Without its own embedding and head it takes the target's.
    subject.tensors = {
        name: TensorInfo("BF16", want.shape, None, 0, 2 * math.prod(want.shape))
        for name, want in wants.items()
        if name not in ("embed_tokens.weight", "lm_head.weight")
    }
    shared, words = module.drafter_bytes(subject)
    assert on_eight - shared == pytest.approx(2 * 2 * 163840 * 7168 / 8, abs=10)
    assert words == "embedding and head"


def test_a_drafter_that_has_the_targets_head_over_again(tmp_path: Path, kimi: Path) -> None:
    subject = looked_at(kimi, drafter=MLA)
    held = read_tensors(kimi)
    assert held is not None
    subject.tensors = {"lm_head.weight": held["language_model.lm_head.weight"]}
    assert module.drafter_bytes(subject) == (0, "embedding and head")


def test_without_a_gpu_there_is_a_summary(kimi: Path) -> None:
    findings = found(looked_at(kimi, *EIGHT, drafter=MLA))
    assert ids(findings) == ["memory-summary"]
    assert findings[0].severity is Severity.NOTE
    assert "71.2 GiB of the target's 554.3 GiB" in findings[0].fact
    assert (
        "a token of KV cache takes 68.6 KiB (bfloat16) and 1.1 KiB for the drafter"
        in findings[0].fact
    )
    assert "left" not in findings[0].fact
    unknown = looked_at(kimi, *EIGHT, gpu="sm_90")  # Its memory is not known.
    assert ids(found(unknown)) == ["memory-summary"]


@pytest.mark.parametrize(
    ("gpu", "flags", "expected"),
    [
        ("sm_90,141GB,8", EIGHT, []),
        ("sm_90,80GB,8", EIGHT, ["memory-weights-do-not-fit"]),
        ("sm_90,80GB,16", ("-tp", "16"), []),
        ("sm_120,96GiB,8", EIGHT, ["memory-context-does-not-fit"]),
        ("sm_90,100GiB,8", EIGHT, ["memory-context-is-tight"]),
        ("sm_120,96GiB,8", (*EIGHT, "--kv-cache-dtype", "fp8"), []),
        ("sm_120,96GiB,8", (*EIGHT, "--max-model-len", "100k"), []),
        ("sm_120,96GiB,8", (*EIGHT, "--max-model-len", "-1"), []),
        ("sm_120,96GiB,8", (*EIGHT, "-dcp", "8"), []),
        ("sm_120,84GiB,8", EIGHT, ["memory-context-does-not-fit"]),
        ("sm_120,84GiB,8", (*EIGHT, "--kv-cache-memory-bytes", "20G"), []),
        ("sm_120,84GiB,8", (*EIGHT, "--kv-cache-memory-bytes", "4G"),
         ["memory-context-does-not-fit"]),
        ("sm_90,80GB,8", (*EIGHT, "--cpu-offload-gb", "30"), []),
    ],
)  # fmt: skip
def test_what_fits(kimi: Path, gpu: str, flags: tuple[str, ...], expected: list[str]) -> None:
    findings = ids(found(looked_at(kimi, *flags, drafter=MLA, gpu=gpu)))
    refused = "memory-weights-do-not-fit" in expected
    assert findings == expected + ([] if refused else ["memory-summary"])


def test_the_fix_of_what_does_not_fit_makes_it_fit(kimi: Path) -> None:
    finding = only(found(looked_at(kimi, *EIGHT, gpu="sm_90,80GB,8")), "memory-weights-do-not-fit")
    assert "(-tp 16, and there are 8)" in finding.fix
    subject = looked_at(kimi, *EIGHT, gpu="sm_120,84GiB,8")
    length = only(found(subject), "memory-context-does-not-fit").fix.split()[1].rstrip(",")
    again = looked_at(kimi, *EIGHT, "--max-model-len", length, gpu="sm_120,84GiB,8")
    assert ids(found(again)) == ["memory-summary"]


def test_only_sizes_that_divide_the_heads_are_advised(tmp_path: Path) -> None:
    def fix(heads: int, *flags: str, gpu: str, drafter: str | None = None) -> str:
        folder = make_target(tmp_path / str(heads), text={"num_attention_heads": heads})
        subject = looked_at(folder, *flags, gpu=gpu, drafter=drafter)
        return only(found(subject), "memory-weights-do-not-fit").fix

    assert "(-tp 12, and there are 8)" in fix(48, *EIGHT, gpu="sm_90,80GB,8")
    assert "(-tp 16)" in fix(64, *EIGHT, gpu="sm_90,80GB,16")
    assert "(-tp 16)" in fix(64, *EIGHT, gpu="sm_90,80GB")  # How many is not known.
    assert "more GPUs" not in fix(8, *EIGHT, gpu="sm_90,80GB,8")
    # The drafter has 64.
    assert "(-tp 16, and" in fix(48, *EIGHT, gpu="sm_90,80GB,8", drafter=MLA)


def test_an_fp8_cache_is_advised_where_it_runs(kimi: Path) -> None:
    def fix(release: str, gpu: str, plugin: bool = True) -> str:
        subject = looked_at(kimi, *EIGHT, drafter=MLA, gpu=gpu, release=release, plugin=plugin)
        return only(found(subject), "memory-context-does-not-fit").fix

    assert "--kv-cache-dtype fp8" in fix("0.19.1", "sm_120,96GiB,8")
    assert "--kv-cache-dtype fp8" in fix("0.26.0", "sm_120,96GiB,8")  # With the plugin's kernel.
    assert "--kv-cache-dtype fp8" not in fix("0.26.0", "sm_120,96GiB,8", plugin=False)
    assert "--kv-cache-dtype fp8" not in fix("0.19.1", "sm_80,90GiB,8")  # No fp8e4nv.


def test_the_workspace_of_triton_mla(kimi: Path) -> None:
    """From 0.31 on vLLM's own reserves gigabytes for splits of verify steps."""

    def said(*flags: str, plugin: bool) -> list[Finding]:
        words = (*EIGHT, "--max-model-len", "100000", *flags)
        return found(
            looked_at(
                kimi, *words, drafter=MLA, gpu="sm_120,96GiB,8", release="0.33.0", plugin=plugin
            )
        )

    assert ids(said(plugin=True)) == ["memory-summary"]
    assert "workspace" not in said(plugin=True)[0].fact
    tight = only(said(plugin=False), "memory-context-is-tight")
    assert "reckoning 4.8 GiB for these and 16.0 GiB for TRITON_MLA's workspace" in tight.fact
    assert "--max-num-seqs 32, which makes TRITON_MLA's workspace smaller" in tight.fix
    few = said("--max-num-seqs", "32", plugin=False)
    assert ids(few) == ["memory-summary"]
    assert "and NCCL and 0.5 GiB for TRITON_MLA's workspace; of" in few[0].fact


def test_the_batch_is_that_of_the_release(kimi: Path) -> None:
    def reserve(release: str, gpu: str, *flags: str) -> int:
        planned = module.plan(looked_at(kimi, *EIGHT, *flags, gpu=gpu, release=release))
        assert planned is not None
        return planned.reserve

    for release, gpu, tokens in (
        ("0.26.0", "sm_100,192GiB,8", 8192),
        ("0.33.0", "sm_100,192GiB,8", 16384),
        ("0.26.0", "sm_80,80GB,8", 2048),
    ):
        asked = ("--max-num-batched-tokens", str(tokens))
        assert reserve(release, gpu) == reserve(release, gpu, *asked)


def test_tokens_fit_in_whole_blocks_but_for_one() -> None:
    cache = module.Cache(1000.0, 24.0, ranks=2, dtype="fp8")
    subject = Subject(parse(["kimi"]), None, {})
    assert module.plan(subject) is None  # Nothing is known of the target.
    plan = module.Plan(0, 0.0, 0, "", cache, 2**30, 0.9, None, 0, 0, 64, None, None)
    size = 10 * 64 * 1024
    assert plan.tokens(size) == plan.tokens(size + 1024) == 9 * 64 * 2
    assert plan.tokens(size - 1) == 8 * 64 * 2
    assert plan.tokens(-5.0) == plan.tokens(1.0) == 0


def test_the_release_says_how_much_of_a_gpu_is_used(kimi: Path) -> None:
    for release, share in (("0.19.1", "0.9"), ("0.20.2", "0.92")):
        findings = found(looked_at(kimi, *EIGHT, gpu="sm_90,141GB,8", release=release))
        assert f"({share} of 131.3 GiB)" in only(findings, "memory-summary").fact


def test_what_is_estimated_is_said_to_be(tmp_path: Path) -> None:
    folder = make_target(tmp_path, tensors=False)
    findings = found(looked_at(folder, *EIGHT, gpu="sm_90,141GB,8"))
    assert "about 71.2 GiB" in only(findings, "memory-summary").fact
    # On the edge an estimate refuses nothing.
    close = (*EIGHT, "--max-model-len", "1000")
    assert ids(found(looked_at(folder, *close, gpu="sm_90,76GiB,8"))) == [
        "memory-context-is-tight",
        "memory-summary",
    ]


def test_the_largest_batch_takes_memory(kimi: Path) -> None:
    def left(*flags: str) -> float:
        planned = module.plan(looked_at(kimi, *EIGHT, *flags, gpu="sm_90,141GB,8"))
        assert planned is not None
        return planned.left / GIB

    assert left() - left("--max-num-batched-tokens", "16384") == pytest.approx(1.85, abs=0.1)
    assert left("--enforce-eager") - left() == pytest.approx(1)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "max-model-len", "gpu-memory-utilization", "block-size", "max-num-batched-tokens",
                "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size",
                "decode-context-parallel-size", "kv-cache-memory-bytes", "num-gpu-blocks-override",
                "cpu-offload-gb", "kv-cache-dtype", "dtype", "limit-mm-per-prompt",
            ]
        ),
        st.integers() | st.floats() | st.text(max_size=5) | st.integers(10**300, 10**310)
        | st.dictionaries(st.text(max_size=5), st.integers()),
    ),
    st.integers(0, 2**50),
)  # fmt: skip
@example({"cpu-offload-gb": float("nan"), "gpu-memory-utilization": float("nan")}, 2**30)
@example({"gpu-memory-utilization": 1e-303}, 1)
@example({"kv-cache-dtype": "nan"}, 2**45)
def test_any_options_are_planned_with(kimi: Path, options: dict[str, Any], memory: int) -> None:
    subject = looked_at(kimi, drafter=MLA, gpu="sm_90,141GB,8")
    command = subject.command
    subject.command = type(command)(command.words, command.model, options)
    assert subject.gpus is not None
    subject.gpus = type(subject.gpus)("any", (9, 0), memory, 8)
    own = f"({options.get('kv-cache-dtype')})"  # Said as the user wrote it.
    for finding in module.findings(subject):
        assert "nan" not in finding.text.replace(own, "")
