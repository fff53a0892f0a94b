# SPDX-License-Identifier: Apache-2.0
"""What is said of a drafter; each finding's pair and near miss are in tests/data/check."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.check import drafter as drafter_check
from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.findings.catalogue import KINDS
from vllm_kimi_eagle3.pair import tensors_of

from .corpus import build_folder, write_tensors
from .pairs import (
    KIMI_CONFIG,
    TINY,
    TINY_CONFIG,
    V1,
    VARIANTS,
    edit_config,
    found,
    made,
    made_variant,
    new_subject,
)

MLA = "lightseekorg__kimi-k2.5-eagle3-mla"
PLAIN = "AQ-MedAI__Kimi-K25-eagle3"
YARN = "lightseekorg__kimi-k2.5-eagle3"
FAILS, WRONG = Severity.FAILS, Severity.WRONG
# What is always said of a drafter that is here and complete.
USUAL = {"drafter-aux-captured", "drafter-heads", "drafter-files"}
OFF = {"VLLM_KIMI_EAGLE3_DISABLE": "1"}


# ------------------------------------------------------------------------------------- where it is


def test_what_is_no_eagle3_is_not_looked_at() -> None:
    for speculative in ({"method": "ngram"}, {"method": "eagle"}, {"model": ""}, {"model": 7}):
        subject = new_subject("/nowhere", "0.26.0", **speculative)
        assert list(drafter_check.findings(subject)) == []
        assert subject.drafter is None
    # What vLLM takes for EAGLE-1 by its name.
    subject = new_subject("org/eagle-kimi-eagle3", "0.26.0", method=None)
    assert list(drafter_check.findings(subject)) == []


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert set(found(tmp_path / "nothing", "0.26.0")) == {"files-no-folder"}
    (tmp_path / "empty").mkdir()
    assert set(found(tmp_path / "empty", "0.26.0")) == {"files-no-config"}
    other = made(tmp_path / "other", PLAIN, set={"architectures": ["EagleLlamaForCausalLM"]})
    assert set(found(other, "0.26.0")) == {"files-not-a-drafter"}


def test_what_is_not_on_this_machine(tmp_path: Path) -> None:
    cache = {"HF_HOME": str(tmp_path)}
    (finding,) = found("owner/name; rm -rf", "0.26.0", cache, revision="a b").values()
    assert finding.id == "drafter-not-here"
    assert finding.kind.undecided
    assert finding.fix == "hf download 'owner/name; rm -rf' --revision 'a b'"
    assert "revision 'a b'" in finding.fact
    (finding,) = found("owner/name", "0.26.0", {**cache, "HF_HUB_OFFLINE": "1"}).values()
    assert finding.severity is FAILS
    for model, why in (
        ("s3://bucket/drafter", "is in an object store"),
        ("drafter.gguf", "nothing that this check can read"),
    ):
        (finding,) = found(model, "0.26.0", cache).values()
        assert why in finding.fact


def test_pages_and_modelscope(tmp_path: Path) -> None:
    page = found("https://huggingface.co/owner/name/tree/main", "0.26.0")
    assert page["files-no-folder"].fix == "give owner/name"
    folder, environ = cached(tmp_path, "c" * 40)
    environ["VLLM_USE_MODELSCOPE"] = "True"
    (finding,) = found("owner/name", "0.26.0", environ).values()
    assert finding.id == "drafter-not-here"
    assert "modelscope download" in finding.fix
    assert set(found(folder, "0.26.0", environ)) >= USUAL
    place = folder.parent.parent
    assert found(place, "0.26.0")["files-no-config"].fix == f"give {str(folder)!r}, or owner/name"


def test_a_broken_file_of_modelopt(tmp_path: Path) -> None:
    folder = made(tmp_path, MLA, files={"hf_quant_config.json": "{"})
    assert "files-not-json" in found(folder, "0.26.0")


def cached(tmp_path: Path, commit: str, **recipe: Any) -> tuple[Path, dict[str, str]]:
    """A repository in a Hugging Face cache."""
    repository = tmp_path / "hub" / "models--owner--name"
    folder = made(repository / "snapshots" / commit, MLA, **recipe)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return folder, {"HF_HOME": str(tmp_path), **V1}


def test_a_download_that_is_not_complete(tmp_path: Path) -> None:
    folder, environ = cached(tmp_path, "c" * 40, tensors=None)
    findings = found("owner/name", "0.26.0", environ)
    assert findings["drafter-weights-not-here"].fix == "hf download owner/name"
    assert "drafter-heads" not in findings
    index = {"weight_map": {"norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "drafter-weights-not-here" in found("owner/name", "0.26.0", environ)
    # The same in a folder of the user's is a fault.
    own = tmp_path / "own"
    folder.rename(own)
    write_tensors(own, {"fc.weight": ("BF16", (1,))}, {})
    assert "files-missing-shard" in found(own, "0.26.0", environ)


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("pytorch_model.bin", [], ".bin"),
        ("notes.txt", [], "holds no safetensors files"),
        ("model.safetensors", ["--load-format", "dummy"], "--load-format 'dummy'"),
    ],
)
def test_weights_that_are_not_to_be_seen(
    name: str, words: list[str], said: str, tmp_path: Path
) -> None:
    folder = made(tmp_path / "d", MLA, tensors=None, files={name: ""})
    findings = found(folder, "0.26.0", V1, *words)
    assert said in findings["drafter-weights-not-here"].fact
    assert findings["drafter-weights-not-here"].fix


# --------------------------------------------------------------------------- what fits, what not


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_is_against_the_tiny_drafters(name: str, tmp_path: Path) -> None:
    """All of them are right with the plugin, on every release."""
    layers = made_variant(name, folder := tmp_path / "drafter")
    for release in ("0.15.1", "0.22.1", "0.33.0"):
        findings = found(folder, release, shape=TINY, target=TINY_CONFIG)
        bad = [f for f in findings.values() if f.severity in (FAILS, WRONG)]
        assert not bad, bad
        assert (findings.keys() >= USUAL) == bool(layers)


def test_what_is_fine_is_passed_over_in_silence(tmp_path: Path) -> None:
    folder = made(tmp_path / "d", "k-l-lambda__Kimi-K2.5-Eagle3")
    assert found(folder, "0.26.0").keys() == USUAL


@pytest.mark.parametrize(
    ("recipe", "kind", "release", "stock"),
    [
        ({"set_tensors": {"a.b": ["BF16", [3]]}}, "drafter-tensor-unexpected", "0.24.0", WRONG),
        ({"set_tensors": {"a.b": ["BF16", [3]]}}, "drafter-tensor-unexpected", "0.25.1", FAILS),
        ({"unset_tensors": ["norm.weight"]}, "drafter-tensor-missing", "0.33.0", WRONG),
        ({"set_tensors": {"norm.weight": ["BF16", [3]]}}, "drafter-tensor-shape", "0.24.0", FAILS),
        ({"set_tensors": {"norm.weight": ["U8", [7168]]}}, "drafter-tensor-dtype", "0.24.0", WRONG),
        (
            {"set_tensors": {"midlayer.mlp.up_proj.weight": ["BF16", [18432, 7168]]}},
            "drafter-tensor-duplicate",
            "0.24.0",
            WRONG,
        ),
    ],
)  # fmt: skip
def test_as_bad_as_it_is_without_the_patch(
    recipe: dict[str, Any], kind: str, release: str, stock: Severity, tmp_path: Path
) -> None:
    folder = made(tmp_path / "d", MLA, **recipe)
    finding = found(folder, release)[kind]
    assert finding.severity is FAILS
    assert finding.evidence.file == str(folder)
    assert finding.evidence.key
    assert found(folder, release, OFF)[kind].severity is stock


def test_a_tensor_of_a_llama_drafter_ends_the_load_of_stock(tmp_path: Path) -> None:
    folder = made(tmp_path / "d", PLAIN, set_tensors={"a.b": ["BF16", [3]]})
    assert found(folder, "0.22.1", OFF)["drafter-tensor-unexpected"].severity is FAILS


def test_a_map_that_is_wrong_is_only_wrong_in_stock(tmp_path: Path) -> None:
    folder = made(tmp_path / "d", PLAIN, values={"d2t": {"start": 10**6, "step": 0}})
    assert found(folder, "0.26.0")["drafter-d2t"].severity is FAILS
    assert found(folder, "0.26.0", OFF)["drafter-d2t"].severity is WRONG


def test_a_missing_map_is_said_once(tmp_path: Path) -> None:
    findings = found(made(tmp_path / "d", PLAIN, unset_tensors=["d2t"]), "0.26.0")
    assert "drafter-tensor-missing" in findings
    assert "drafter-d2t" not in findings


def test_two_lists_of_layers(tmp_path: Path) -> None:
    folder = made(tmp_path / "d", MLA)
    edit_config(folder, eagle_aux_hidden_state_layer_ids=[2, 9, 58])
    finding = found(folder, "0.26.0")["drafter-aux-contradiction"]
    assert finding.severity is FAILS
    assert finding.evidence.file == str(folder / "config.json")
    assert found(folder, "0.26.0", OFF)["drafter-aux-contradiction"].severity is WRONG
    chosen = '{"kimi_eagle3": {"aux_hidden_state_layers": [2, 9, 58]}}'
    findings = found(folder, "0.26.0", V1, "--additional-config", chosen)
    assert "hidden states at [2, 9, 58]" in findings["drafter-aux-captured"].fact
    assert findings["drafter-aux-captured"].evidence.key == "--additional-config"
    findings = found(folder, "0.26.0", V1, "--additional-config", '{"kimi_eagle3": {"x": 1}}')
    assert "'x'" in findings["drafter-setting"].fact


def test_a_target_that_is_not_here_is_taken_for_a_published_one(tmp_path: Path) -> None:
    folder = made(tmp_path / "d", MLA)
    findings = found(folder, "0.26.0", shape=None, target=None)
    assert "since the target is not here" in findings["drafter-aux-captured"].fact
    # One that is no Kimi is not: nothing is known of its drafters.
    subject = new_subject(folder, "0.26.0", shape=None, target={"model_type": "llama"})
    assert list(drafter_check.findings(subject)) == []
    assert subject.pair is None


@pytest.mark.parametrize(
    ("architectures", "release", "kind", "fix"),
    [
        (["Eagle3Qwen3ForCausalLM"], "0.21.0", "drafter-architecture", "vLLM 0.24.0 or later"),
        (["Eagle3Qwen3ForCausalLM"], "0.26.0", "drafter-other-family", "model card"),
        (["Eagle3NobodysForCausalLM"], "0.26.0", "drafter-architecture", "give a drafter"),
        (["MLPForCausalLM"], "0.26.0", "drafter-architecture", "give a drafter"),
        ([], "0.26.0", "drafter-architecture", '"architectures"'),
        ("Llama", "0.26.0", "drafter-architecture", '"architectures"'),
        (["Eagle3Qwen3ForCausalLM"], None, "drafter-other-family", "model card"),
        (["Eagle3DeepseekV2ForCausalLM"], "0.15.1", None, ""),
        (["LlamaForCausalLM"], "0.33.0", None, ""),
    ],
)
def test_classes(
    architectures: Any, release: str | None, kind: str | None, fix: str, tmp_path: Path
) -> None:
    config = MLA if "Deepseek" in str(architectures) else PLAIN
    folder = made(tmp_path / "d", config)
    edit_config(folder, architectures=architectures)
    findings = found(folder, release)
    said = findings.keys() & {"drafter-architecture", "drafter-other-family"}
    assert said == ({kind} if kind else set())
    if kind is not None:
        assert fix in findings[kind].fix


def test_the_speculators_format_names_its_class_itself(tmp_path: Path) -> None:
    made_variant("speculators", folder := tmp_path / "d")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DraftModel"]
    assert "drafter-architecture" not in found(folder, "0.15.1", shape=TINY)
    config["transformer_layer_config"]["model_type"] = "qwen3"
    (folder / "config.json").write_text(json.dumps(config))
    for release, name in (("0.23.0", "Llama"), ("0.26.0", "Qwen3")):
        fact = found(folder, release, shape=TINY)["drafter-other-family"].fact
        assert f"Eagle3{name}ForCausalLM" in fact


@pytest.mark.parametrize(
    ("config", "release", "severity"),
    [(MLA, "0.24.0", WRONG), (MLA, "0.25.1", FAILS), (PLAIN, "0.22.1", FAILS), (MLA, None, WRONG)],
)
def test_a_quantised_config_over_plain_weights(
    config: str, release: str | None, severity: Severity, tmp_path: Path
) -> None:
    block = {"quant_method": "compressed-tensors"}
    folder = made(tmp_path / "d", config, set={"quantization_config": block})
    assert found(folder, release)["drafter-quantization"].severity is severity
    # ModelOpt has it in a file of its own.
    text = json.dumps({"quantization": {"quant_algo": "NVFP4"}})
    beside = made(tmp_path / "e", config, files={"hf_quant_config.json": text})
    assert "modelopt" in found(beside, release)["drafter-quantization"].fact
    # One that is quantised is something else, and so is quantisation online, by the user's wish.
    scales = {"layers.0.mlp.up_proj.weight_scale": ["F32", [1]]}
    quantised = made(tmp_path / "g", config, set={"quantization_config": block}, set_tensors=scales)
    if config == MLA:
        assert "drafter-quantization" not in found(quantised, release)
    online = found(made(tmp_path / "f", config), release, quantization="fp8")
    assert "drafter-quantization" not in online


@pytest.mark.parametrize(
    ("config", "release", "refused"),
    [(PLAIN, "0.18.1", True), (PLAIN, "0.19.1", False), (MLA, "0.33.0", True), (MLA, None, False)],
)
def test_a_quantised_head(config: str, release: str | None, refused: bool, tmp_path: Path) -> None:
    folder = made(
        tmp_path / "d",
        config,
        set={"quantization_config": {"quant_method": "fp8"}},
        set_tensors={"lm_head.weight_scale": ["F32", [1]]},
    )
    assert ("drafter-quantized-head" in found(folder, release)) == refused


# ------------------------------------------------------------------------------------ what is noted


def test_whose_embedding_and_head(tmp_path: Path) -> None:
    head = {"lm_head.weight": ("BF16", (512, 256))}
    target, mine = tmp_path / "target", made(tmp_path / "mine", PLAIN, tensors=None)
    target.mkdir()
    write_tensors(target, {f"language_model.{name}": t for name, t in head.items()}, {})
    write_tensors(mine, head, {})

    def said() -> str:
        own = new_subject(mine, "0.26.0")
        assert own.target is not None
        own.target.folder = target
        (finding,) = (f for f in drafter_check.findings(own) if f.id == "drafter-heads")
        return finding.fact

    assert said().endswith(
        "embedding is the target's, its LM head the target's, of which it has a copy"
    )
    with open(mine / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    assert said().endswith("embedding is the target's, its LM head its own (0.26 MB)")


def test_the_rope_is_compared_part_by_part(tmp_path: Path) -> None:
    assert "drafter-rope-of-target" not in found(made(tmp_path / "a", YARN), "0.26.0")
    fact = found(made(tmp_path / "b", MLA), "0.26.0")["drafter-rope-of-target"].fact
    assert fact.endswith("beta_fast 1 against 32")
    fact = found(made(tmp_path / "c", PLAIN), "0.26.0")["drafter-rope-of-target"].fact
    assert fact.endswith("theta 1e+06 against 50000, no scaling against YaRN x64")
    broken = {**KIMI_CONFIG, "text_config": {"rope_theta": "much"}}
    assert "drafter-rope-of-target" not in found(tmp_path / "c", "0.26.0", target=broken)


def test_how_far_it_drafts(tmp_path: Path) -> None:
    short = made(tmp_path / "a", PLAIN, set={"max_position_embeddings": 4096})
    finding = found(short, "0.26.0")["drafter-length"]
    assert "262144 tokens" in finding.fact
    assert "drafter-length" not in found(short, "0.26.0", V1, "--max-model-len", "4096")
    assert "drafter-length" not in found(short, "0.26.0", max_model_len=2048)
    # What stock does is said with the patch.
    assert "drafter-length" not in found(short, "0.26.0", OFF)
    ends = made(tmp_path / "b", YARN, set={"rope_scaling.factor": 2.0})
    finding = found(ends, "0.26.0")["drafter-rope-ends"]
    assert finding.severity is Severity.SLOW
    assert finding.fix == "--max-model-len 8192 keeps requests within it"
    # One that states no length has that of Transformers' class.
    finding = found(made(tmp_path / "c", MLA), "0.26.0")["drafter-length"]
    assert "stands for 4096" in finding.fact
    assert finding.severity is Severity.NOTE


def test_several_layers(tmp_path: Path) -> None:
    folder = made(tmp_path / "d", MLA, set={"num_hidden_layers": 2})
    assert found(folder, "0.18.1")["drafter-layers"].severity is Severity.NOTE
    assert found(folder, "0.17.1")["drafter-layers"].severity is FAILS
    llama = made(tmp_path / "e", PLAIN, set={"num_hidden_layers": 2})
    assert found(llama, "0.15.1")["drafter-layers"].severity is Severity.NOTE


def test_the_dtype_it_runs_in(tmp_path: Path) -> None:
    folder = made(tmp_path / "d", PLAIN)
    assert "drafter-dtype" not in found(folder, "0.26.0")
    assert "drafter-dtype" not in found(folder, "0.26.0", V1, "--dtype", "auto")
    finding = found(folder, "0.26.0", V1, "--dtype", "half")["drafter-dtype"]
    assert "stored in bfloat16 and runs in float16" in finding.fact
    assert finding.evidence.key in tensors_of(folder, str(folder))
    assert "drafter-dtype" not in found(folder, "0.26.0", target={"model_type": "kimi_k25"})


def test_which_files_these_are(tmp_path: Path) -> None:
    commit, digest = "c0ffee" + "0" * 34, "d" * 64
    folder, environ = cached(tmp_path, commit)
    blobs = folder.parents[1] / "blobs"
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / digest)
    (folder / "model.safetensors").symlink_to(f"../../blobs/{digest}")
    finding = found("owner/name", "0.26.0", environ)["drafter-files"]
    assert "sha256 dddddddddddd, commit c0ffee000000" in finding.fact
    assert finding.evidence.value == commit

    own = made(tmp_path / "own", PLAIN)
    assert found(own, "0.26.0")["drafter-files"].fact.endswith("of an unknown commit")
    kept = own / ".cache" / "huggingface" / "download"
    kept.mkdir(parents=True)
    metadata = kept / "model.safetensors.metadata"
    metadata.write_text(f"{commit}\n{digest}\n1700000000.0\n")
    assert "commit c0ffee000000" in found(own, "0.26.0")["drafter-files"].fact
    for text in ("", "\n", "x\ny\n", "\xff" * 9000, "../../etc\n$(id)\n"):
        metadata.write_text(text)
        fact = found(own, "0.26.0")["drafter-files"].fact
        assert fact.endswith("bytes, of an unknown commit")
    assert (
        "2 files of"
        in found(made(tmp_path / "two", PLAIN, shards=2), "0.26.0")["drafter-files"].fact
    )


# ------------------------------------------------------------------------------ whatever it holds

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([[1, 29, 57], "yarn", "eagle3", 2**31, {"quant_method": "fp8"}]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = [
    "architectures", "hidden_size", "vocab_size", "draft_vocab_size", "num_hidden_layers",
    "eagle_config", "eagle_aux_hidden_state_layer_ids", "rope_scaling", "rope_parameters",
    "rope_theta", "max_position_embeddings", "quantization_config", "compression_config",
    "speculators_model_type", "transformer_layer_config", "torch_dtype", "fc_norm", "model_type",
    "num_attention_heads", "use_aux_hidden_state",
]  # fmt: skip
TENSORS = ["d2t", "t2d", "fc.weight", "lm_head.weight", "lm_head.scales", "norm.weight"]
SPECULATIVE = ["quantization", "parallel_drafting", "revision", "max_model_len"]
tensor_infos = st.tuples(
    st.sampled_from(["BF16", "F16", "I64", "I32", "BOOL", "F8_E4M3"]),
    st.lists(st.integers(0, 5), max_size=3),
)


@given(
    st.sampled_from([MLA, PLAIN]),
    st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3),
    st.dictionaries(st.sampled_from(TENSORS) | st.text(max_size=8), tensor_infos, max_size=3),
    st.dictionaries(st.sampled_from(SPECULATIVE), json_values),
    st.sampled_from(["0.15.1", "0.21.0", "0.33.0", None]),
    st.dictionaries(st.sampled_from(["text_config", "torch_dtype"]), json_values),
)
@settings(max_examples=150)
def test_anything_is_a_finding_and_no_traceback(
    tmp_path_factory: pytest.TempPathFactory,
    base: str,
    changes: dict[str, Any],
    tensors: dict[str, Any],
    speculative: dict[str, Any],
    release: str | None,
    target: dict[str, Any],
) -> None:
    folder = tmp_path_factory.mktemp("d")
    build_folder(folder, {"config": base, "tensors": None}, None)
    edit_config(folder, **changes)
    write_tensors(folder, tensors, {})
    subject = new_subject(folder, release, target=target, **speculative)
    for finding in drafter_check.findings(subject):
        assert finding.id in KINDS
        assert "\n" not in finding.text
        assert len(finding.text) < 3000
