# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.assets.synthetic import kimi_config, write_kimi
from vllm_kimi_eagle3.check import check
from vllm_kimi_eagle3.check import target as module
from vllm_kimi_eagle3.check.subject import GIB
from vllm_kimi_eagle3.checkpoint.drafter import TargetShape
from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.host import SUPPORTED

from .targets import ids, make_subject, make_target, only

TEXT_ONLY = {
    **kimi_config()["text_config"],
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
}


def found(folder: Path, *flags: str, model: str | None = None, **how: Any) -> list[Any]:
    """Args:
    model: what is given for the target, where it is no path.
    """
    return list(module.findings(make_subject(model or folder, *flags, **how)))


@pytest.mark.parametrize("release", SUPPORTED)
def test_of_a_whole_kimi_for_text_there_is_nothing_to_say(tmp_path: Path, release: str) -> None:
    subject = make_subject(
        make_target(tmp_path), "--limit-mm-per-prompt", '{"vision_chunk": 0}', release=release
    )
    assert not list(module.findings(subject))
    assert subject.shape == TargetShape(61, 7168, 163840)
    assert subject.target is not None
    assert subject.target.folder == tmp_path
    assert subject.weights is not None
    assert not subject.weights.estimated
    assert subject.weights.total / GIB == pytest.approx(554.3, abs=0.1)


def test_a_text_only_kimi(tmp_path: Path) -> None:
    subject = make_subject(make_target(tmp_path, config=TEXT_ONLY, tensors=False))
    assert ids(module.findings(subject)) == ["files-no-weights"]
    assert subject.shape == TargetShape(61, 7168, 163840)


def test_without_a_model_there_is_no_target() -> None:
    subject = make_subject("x")
    subject.command = type(subject.command)()
    assert not list(module.findings(subject))
    assert subject.target is None


# ----------------------------------------------------------------------------- where it is


def cache(root: Path, model: str = "moonshotai/Kimi-K2.5", commit: str = "c0ffee") -> Path:
    """A snapshot's folder in a Hugging Face cache that holds nothing yet."""
    repository = root / f"models--{model.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    return snapshot


@pytest.mark.parametrize(
    "environ",
    [
        lambda root: {"HF_HUB_CACHE": str(root / "hub")},
        lambda root: {"HF_HOME": str(root)},
        lambda root: {"XDG_CACHE_HOME": str(root.parent)},
        lambda root: {"HUGGINGFACE_HUB_CACHE": str(root / "hub"), "HF_HOME": "/nowhere"},
    ],
)
def test_a_snapshot_is_found_where_the_library_looks(
    tmp_path: Path, environ: Callable[[Path], dict[str, str]]
) -> None:
    root = tmp_path / "huggingface"
    folder = make_target(cache(root / "hub"))
    subject = make_subject("moonshotai/Kimi-K2.5", release=None)
    subject.environ = environ(root)
    assert ids(module.findings(subject)) == ["target-vision"]
    assert subject.target is not None
    assert subject.target.folder == folder


def test_another_revision_is_not_taken_for_it(tmp_path: Path) -> None:
    make_target(cache(tmp_path))
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    finding = only(found(Path("moonshotai/Kimi-K2.5"), "--revision", "v2", environ=environ),
                   "target-not-here")  # fmt: skip
    assert "c0ffee" in finding.fact
    assert "--revision v2" in finding.fix
    right = make_subject("moonshotai/Kimi-K2.5", "--revision", "c0ffee", environ=environ)
    assert "target-not-here" not in ids(module.findings(right))


def test_what_is_not_here_can_be_got(tmp_path: Path) -> None:
    finding = only(found(Path("moonshotai/Kimi-K2.5")), "target-not-here")
    assert (
        "`hf download moonshotai/Kimi-K2.5 config.json model.safetensors.index.json`" in finding.fix
    )
    assert finding.severity is Severity.NOTE
    offline = found(Path("moonshotai/Kimi-K2.5"), environ={"HF_HUB_OFFLINE": "1"})
    assert only(offline, "target-not-here").severity is Severity.FAILS


@pytest.mark.parametrize("model", ["/no/such folder", "~/kimi", "a/b/c"])
def test_a_folder_that_is_none(model: str) -> None:
    assert ids(module.findings(make_subject(model))) == ["files-no-folder"]


@pytest.mark.parametrize(
    "model", ["s3://bucket/kimi", "kimi.gguf", "a b", "x" * 300, "a\0b", "a//b"]
)
def test_what_cannot_be_looked_at(model: str) -> None:
    assert set(ids(module.findings(make_subject(model)))) <= {"target-not-here", "files-no-folder"}


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "S3", "hf"])
def test_what_is_in_an_object_store_is_not_looked_at(scheme: str) -> None:
    finding = only(found(Path(), model=f"{scheme}://bucket/kimi/k2.5"), "target-not-here")
    assert finding.severity is Severity.NOTE
    assert ("vLLM fetches it itself" in finding.fact) == (scheme != "hf")


@pytest.mark.parametrize("behind", ["", "/", "/tree/main", "?x=1"])
def test_a_page_has_the_name_in_it(behind: str) -> None:
    page = "https://huggingface.co/moonshotai/Kimi-K2.5" + behind
    finding = only(found(Path(), model=page), "files-no-folder")
    assert finding.fix == "give moonshotai/Kimi-K2.5"


def test_a_place_in_a_cache_is_not_its_snapshot(tmp_path: Path) -> None:
    snapshot = make_target(cache(tmp_path))
    place = snapshot.parent.parent
    finding = only(found(place), "files-no-config")
    assert finding.fix == f"give {str(snapshot)!r}, or moonshotai/Kimi-K2.5"
    (place / "refs" / "main").unlink()
    assert str(snapshot) in only(found(place), "files-no-config").fix
    (place / "snapshots").rename(place / "other")
    assert str(snapshot) not in only(found(place), "files-no-config").fix


@pytest.mark.parametrize(
    ("release", "value", "counts"),
    [("0.26.0", "True", True), ("0.26.0", "1", False), ("0.28.0", "1", True), ("0.28.0", "0", 0)],
)
def test_modelscope_is_not_the_hugging_face_cache(
    tmp_path: Path, release: str, value: str, counts: bool
) -> None:
    folder = make_target(cache(tmp_path))
    environ = {"HF_HUB_CACHE": str(tmp_path), "VLLM_USE_MODELSCOPE": value}
    said = found(Path("moonshotai/Kimi-K2.5"), environ=environ, release=release)
    assert ("target-not-here" in ids(said)) == counts
    if counts:
        finding = only(said, "target-not-here")
        assert "ModelScope" in finding.fact
        assert "hf download" not in finding.fix
    assert "target-not-here" not in ids(found(folder, environ=environ, release=release))


# ------------------------------------------------------------------------------------ its flags


def test_a_flag_that_names_another_method(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    for method in ("fp8", "awq", "AWQ_marlin", "moe_wna16", "gptq_marlin", "online"):
        finding = only(found(folder, "-q", method), "target-quantization-flag")
        assert finding.severity is Severity.FAILS
        assert "compressed-tensors" in finding.fact
        assert finding.fix.startswith("leave out -q")
    for release in SUPPORTED:
        said = found(folder, "--quantization", "compressed-tensors", release=release)
        assert "target-quantization-flag" not in ids(said)


@pytest.mark.parametrize(
    ("method", "release", "refused"),
    [
        ("humming", "0.19.1", True),
        ("humming", "0.20.2", False),
        ("gguf", "0.23.0", False),
        ("gguf", "0.24.0", True),
    ],
)
def test_methods_that_answer_for_any_config(
    tmp_path: Path, method: str, release: str, refused: bool
) -> None:
    said = found(make_target(tmp_path), "-q", method, release=release)
    assert ("target-quantization-flag" in ids(said)) == refused


@pytest.mark.parametrize(
    ("name", "release", "fix"),
    [
        ("foo", "0.26.0", "leave out --load-format"),
        ("safetensor", "0.26.0", "use --load-format safetensors, or leave it out"),
        ("SafeTensors", "0.26.0", None),
        ("gguf", "0.23.0", None),
        ("gguf", "0.24.0", "leave out --load-format"),
        ("instanttensor", "0.17.1", "leave out --load-format"),
        ("instanttensor", "0.18.1", None),
    ],
)
def test_load_formats(tmp_path: Path, name: str, release: str, fix: str | None) -> None:
    said = found(make_target(tmp_path), "--load-format", name, release=release)
    assert [f.fix for f in said if f.id == "target-load-format"] == ([] if fix is None else [fix])


@pytest.mark.parametrize(
    ("key", "value", "severity"),
    [
        ("factor", float("inf"), Severity.FAILS),
        ("factor", 0, Severity.FAILS),
        ("factor", "64", Severity.FAILS),
        ("factor", False, Severity.FAILS),
        ("factor", True, None),
        ("original_max_position_embeddings", float("nan"), Severity.FAILS),
        ("beta_fast", -1, Severity.FAILS),
        ("mscale", float("inf"), Severity.WRONG),
        ("mscale", 0, None),
        ("mscale_all_dim", None, None),
        ("factor", 32.0, None),
    ],
)
def test_numbers_of_its_rope(
    tmp_path: Path, key: str, value: Any, severity: Severity | None
) -> None:
    block = {**kimi_config()["text_config"]["rope_scaling"], key: value}
    said = found(make_target(tmp_path, text={"rope_scaling": block}))
    assert [f.severity for f in said if f.id == "target-rope"] == [severity] * bool(severity)


def test_an_infinite_theta(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    file = folder / "config.json"
    text = file.read_text()
    assert '"rope_theta": 50000.0' in text
    file.write_text(text.replace('"rope_theta": 50000.0', '"rope_theta": 1e999'))
    finding = only(found(folder), "target-rope")
    assert finding.severity is Severity.WRONG
    assert finding.evidence.key == "text_config.rope_theta"
    for value in ("NaN", "-1", '"x"'):
        file.write_text(text.replace('"rope_theta": 50000.0', f'"rope_theta": {value}'))
        assert only(found(folder), "target-rope").severity is Severity.FAILS


def test_a_broken_file_of_modelopt(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    file = folder / "hf_quant_config.json"
    file.write_text("{")
    assert only(found(folder), "files-not-json").evidence.file == str(file)
    # With a config that says it at the top nobody reads the file.
    quantization = kimi_config()["text_config"]["quantization_config"]
    make_target(tmp_path, {"quantization_config": quantization})
    assert "files-not-json" not in ids(found(folder))
    make_target(tmp_path)
    file.unlink()
    file.mkdir()
    assert "files-unreadable" not in ids(found(folder))


def test_a_snapshot_with_some_of_its_files(tmp_path: Path) -> None:
    folder = cache(tmp_path)
    write_kimi(folder, small_experts())
    (folder / "model-00007-of-000064.safetensors").unlink()
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    subject = make_subject("moonshotai/Kimi-K2.5", environ=environ)
    finding = only(module.findings(subject), "files-incomplete")
    assert "63 of 64 files" in finding.fact
    assert subject.weights is not None
    assert subject.weights.estimated
    # The same folder, given as the user's own, has to be whole.
    assert "files-missing-shard" in ids(found(folder))


def test_weights_in_a_cache_of_their_own(tmp_path: Path) -> None:
    make_target(cache(tmp_path / "hub"), tensors=False)
    make_target(cache(tmp_path / "weights"))
    environ = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    model = "moonshotai/Kimi-K2.5"
    assert "files-incomplete" in ids(module.findings(make_subject(model, environ=environ)))
    elsewhere = make_subject(model, "--download-dir", str(tmp_path / "other"), environ=environ)
    finding = only(module.findings(elsewhere), "files-incomplete")
    assert f"{str(tmp_path / 'other')!r} holds none" in finding.fact
    subject = make_subject(model, "--download-dir", str(tmp_path / "weights"), environ=environ)
    assert ids(module.findings(subject)) == ["target-vision"]
    assert subject.weights is not None
    assert not subject.weights.estimated


def small_experts() -> dict[str, Any]:
    config = kimi_config()
    config["text_config"]["n_routed_experts"] = 2
    return config


# ------------------------------------------------------------------------------- what it is


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
         "vocab_size": 129280, "n_routed_experts": 256},
        {"model_type": "kimi_k25", "text_config": {"model_type": "llama"}},
        {"model_type": "kimi_k25", "text_config": []},
        {"model_type": ["kimi_k25"]},
        {},
    ],
)  # fmt: skip
def test_another_model_is_named(tmp_path: Path, config: dict[str, Any]) -> None:
    subject = make_subject(make_target(tmp_path, config=config, tensors=False))
    assert ids(module.findings(subject)) == ["target-not-kimi"]
    assert subject.shape is None
    assert subject.weights is None


def test_a_text_config_without_a_type_is_deepseeks(tmp_path: Path) -> None:
    folder = make_target(tmp_path, text={"model_type": None})
    assert "target-not-kimi" not in ids(found(folder))


@pytest.mark.parametrize("value", [None, 0, -1, "61", 1.5, True, 2**40, [], float("nan")])
def test_sizes_that_are_none(tmp_path: Path, value: Any) -> None:
    folder = make_target(tmp_path, tensors=False)
    config = kimi_config()
    config["text_config"]["hidden_size"] = value
    (folder / "config.json").write_text(json.dumps(config))
    subject = make_subject(folder)
    assert only(module.findings(subject), "target-size").evidence.key == "text_config.hidden_size"
    assert subject.shape is None


def test_overrides_count(tmp_path: Path) -> None:
    folder = make_target(tmp_path, text={"hidden_size": None}, tensors=False)
    assert "target-size" in ids(found(folder))
    override = '{"text_config": {"hidden_size": 7168}}'
    subject = make_subject(folder, "--hf-overrides", override)
    assert "target-size" not in ids(module.findings(subject))
    assert subject.shape == TargetShape(61, 7168, 163840)


def test_a_key_that_stands_twice(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text('{"dtype": "float16", ' + text[1:])
    finding = only(found(folder), "files-duplicate-key")
    assert finding.evidence.value == "'bfloat16'"
    inside = text.replace('"text_config": {', '"text_config": {"hidden_size": 1, ')
    (folder / "config.json").write_text(inside)
    finding = only(found(folder), "files-duplicate-key")
    assert finding.evidence.key == "text_config.hidden_size"


# ------------------------------------------------------------------------------ its weights


@pytest.mark.parametrize(
    ("release", "severity"),
    [("0.15.1", Severity.WRONG), ("0.25.1", Severity.WRONG), ("0.26.0", Severity.FAILS)],
)
def test_a_missing_shard(tmp_path: Path, release: str, severity: Severity) -> None:
    write_kimi(tmp_path, small_experts(), shards=3)
    (tmp_path / "model-00002-of-000003.safetensors").unlink()
    finding = only(found(tmp_path, release=release), "files-missing-shard")
    assert finding.severity is severity
    assert "model-00002-of-000003.safetensors" in finding.fact
    config = small_experts()
    del config["text_config"]["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    finding = only(found(tmp_path, release=release), "files-missing-shard")
    assert finding.severity is Severity.FAILS


def test_a_truncated_shard(tmp_path: Path) -> None:
    write_kimi(tmp_path, small_experts(), shards=3)
    file = tmp_path / "model-00002-of-000003.safetensors"
    with file.open("rb+") as stream:
        stream.truncate(file.stat().st_size - 1)
    assert file.name in only(found(tmp_path), "files-truncated").fact


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), ["files-no-weights"]),
        (("--load-format", "dummy"), []),
        (("--load-format", "sharded_state"), []),
    ],
)
def test_a_folder_without_weights(
    tmp_path: Path, flags: tuple[str, ...], expected: list[str]
) -> None:
    folder = make_target(tmp_path, tensors=False)
    subject = make_subject(folder, "--language-model-only", *flags)
    assert ids(module.findings(subject)) == expected
    assert subject.weights is not None
    assert subject.weights.estimated
    assert subject.weights.total / GIB == pytest.approx(554.3, rel=0.001)


def test_progress_is_told_while_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kimi(tmp_path, small_experts(), shards=5)
    said: list[str] = []
    subject = make_subject(tmp_path)
    subject.progress = said.append
    list(module.findings(subject))
    assert not said
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    list(module.findings(subject))
    assert said[0] == "read the headers of 1 of 5 files of the target"
    assert len(said) == 4


def test_a_target_without_a_head(tmp_path: Path) -> None:
    folder = make_target(tmp_path, without=["language_model.lm_head.weight"])
    assert only(found(folder), "target-no-head").severity is Severity.WRONG
    plain = kimi_config()
    del plain["text_config"]["quantization_config"]
    (folder / "config.json").write_text(json.dumps(plain))
    assert only(found(folder), "target-no-head").severity is Severity.FAILS


@pytest.mark.parametrize(
    ("method", "release", "known"),
    [
        ("compressed-tensors", "0.15.1", True),
        ("compressed_tensors", "0.33.0", True),
        ("MODELOPT", "0.33.0", True),
        ("auto-round", "0.20.2", True),
        ("bitsandbytes", "0.27.1", True),
        ("bitsandbytes", "0.28.0", False),
        ("modelopt_mixed", "0.16.0", False),
        ("modelopt_mixed", "0.17.1", True),
        ("zip", "0.26.0", False),
        ({}, "0.26.0", False),
    ],
)
def test_quantisation_methods(tmp_path: Path, method: Any, release: str, known: bool) -> None:
    folder = make_target(tmp_path, text={"quantization_config": {"quant_method": method}})
    findings = ids(found(folder, release=release))
    assert ("target-quantization" in findings) is not known


def test_quantisation_in_modelopts_own_file(tmp_path: Path) -> None:
    folder = make_target(tmp_path, text={"quantization_config": None})
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}})
    )
    stated, where = module.quantization_of(kimi_config() | {"text_config": {}}, folder)
    assert stated == {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert where == "hf_quant_config.json"
    assert "target-quantization" not in ids(found(folder))


# --------------------------------------------------------------------- what runs with it


TOKEN = "media_placeholder_token_id"


@pytest.mark.parametrize(
    ("release", "plugin", "edit", "fails"),
    [
        ("0.17.1", True, {}, False),
        ("0.17.1", False, {}, True),
        ("0.15.1", False, {"image_token_index": 163605}, False),
        ("0.18.1", False, {}, False),
        ("0.26.0", False, {TOKEN: None}, False),
        ("0.33.0", False, {}, False),
        ("0.33.0", False, {TOKEN: None}, True),
        ("0.33.0", True, {TOKEN: None}, False),
        ("0.26.0", True, {TOKEN: "163605"}, True),
        ("0.26.0", True, {TOKEN: [163605]}, True),
    ],
)
def test_the_image_token(
    tmp_path: Path, release: str, plugin: bool, edit: dict[str, Any], fails: bool
) -> None:
    folder = make_target(tmp_path, edit)
    environ = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    findings = found(folder, release=release, plugin=plugin, environ=environ)
    assert ("target-image-token" in ids(findings)) is fails
    if fails:
        assert "163605" in only(findings, "target-image-token").fix


@pytest.mark.parametrize(
    ("environ", "fix"),
    [
        ({"VLLM_KIMI_EAGLE3_DISABLE": "image-token-saved-again"},
         "take image-token-saved-again out of VLLM_KIMI_EAGLE3_DISABLE, or write "),
        ({"VLLM_PLUGINS": "other"},
         "unset VLLM_PLUGINS or set it to 'other,kimi_eagle3', or write "),
    ],
)  # fmt: skip
def test_why_the_plugin_does_not_give_the_image_token(
    tmp_path: Path, environ: dict[str, str], fix: str
) -> None:
    folder = make_target(tmp_path, {TOKEN: None})
    line = ["vllm", "serve", str(folder), "--speculative-config", '{"method": "eagle3"}']
    environ = {"VLLM_USE_V2_MODEL_RUNNER": "0", **environ}
    report = check(line, vllm="0.33.0", environ=environ, gpus=None)
    finding = only(report.findings, "target-image-token")
    assert "the patch image-token-saved-again, which gives it, is not in effect (" in finding.fact
    assert finding.fix.startswith(fix)


def test_the_v2_runner_does_not_ask_for_the_image_token(tmp_path: Path) -> None:
    folder = make_target(tmp_path, {TOKEN: None})
    assert "target-image-token" not in ids(found(folder, release="0.33.0", plugin=False))


@pytest.mark.parametrize(
    ("release", "edit", "said"),
    [
        ("0.28.0", {"tie_word_embeddings": True}, False),
        ("0.29.0", {"tie_word_embeddings": True}, True),
        ("0.31.0", {"tie_word_embeddings": None}, False),
        ("0.32.0", {"tie_word_embeddings": None}, True),
        ("0.33.0", {}, False),
    ],
)
def test_tied_embeddings(tmp_path: Path, release: str, edit: dict[str, Any], said: bool) -> None:
    folder = make_target(tmp_path, edit)
    assert ("target-tied" in ids(found(folder, release=release))) is said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), True),
        (("--language-model-only",), False),
        (("--limit-mm-per-prompt", '{"vision_chunk": 0}'), False),
        (("--limit-mm-per-prompt", '{"vision_chunk": {"count": 0}}'), False),
        (("--limit-mm-per-prompt", '{"vision_chunk": 1}'), True),
        (("--limit-mm-per-prompt", '{"image": 0, "video": 0}'), True),
        (("--limit-mm-per-prompt.vision_chunk", "0"), False),
    ],
)
def test_vision(tmp_path: Path, flags: tuple[str, ...], said: bool) -> None:
    findings = found(make_target(tmp_path), *flags)
    assert ("target-vision" in ids(findings)) is said
    if "image" in "".join(flags):
        assert "'image' and 'video'" in only(findings, "target-vision").fact


def test_a_flag_that_the_release_has_is_named(tmp_path: Path) -> None:
    folder = make_target(tmp_path)
    assert "--limit-mm-per-prompt" in only(found(folder, release="0.16.0"), "target-vision").fix
    assert "--language-model-only" in only(found(folder, release="0.17.1"), "target-vision").fix


@pytest.mark.parametrize(
    ("tokenizer", "flags", "release", "severity"),
    [
        ({"auto_map": {"AutoTokenizer": ["t.T", None]}}, (), "0.15.1", Severity.FAILS),
        ({"auto_map": {"AutoTokenizer": ["t.T", None]}}, (), "0.31.0", Severity.FAILS),
        ({"auto_map": {"AutoTokenizer": ["t.T", None]}}, (), "0.32.0", Severity.WRONG),
        ({"auto_map": ["t.T", None]}, (), "0.26.0", Severity.FAILS),
        ({"auto_map": {"AutoTokenizer": "t.T"}}, ("--trust-remote-code",), "0.26.0", None),
        ({"auto_map": {"AutoTokenizer": "t.T"}}, ("--tokenizer", "/other"), "0.26.0", None),
        ({"auto_map": {"AutoProcessor": "t.T"}}, (), "0.26.0", None),
        ({}, (), "0.26.0", None),
        (None, (), "0.26.0", None),
    ],
)
def test_a_tokenizer_that_is_code(
    tmp_path: Path,
    tokenizer: dict[str, Any] | None,
    flags: tuple[str, ...],
    release: str,
    severity: Severity | None,
) -> None:
    folder = make_target(tmp_path)
    if tokenizer is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    findings = [f for f in found(folder, *flags, release=release) if f.id == "target-remote-code"]
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
