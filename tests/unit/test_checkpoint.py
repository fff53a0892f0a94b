# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.checkpoint.errors import CheckpointError, plain, quoted
from vllm_kimi_eagle3.checkpoint.folder import (
    cache_folder,
    drafter_problem,
    local_folder,
    read_json,
)
from vllm_kimi_eagle3.checkpoint.target import (
    ConfigFile,
    image_token_id,
    is_kimi_target,
    is_text_only_kimi,
)
from vllm_kimi_eagle3.findings import Severity


def config(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**values)


def text_config(model_type: str, **values: Any) -> SimpleNamespace:
    return config(model_type=model_type, architectures=["DeepseekV3ForCausalLM"], **values)


KIMI = [
    config(model_type="kimi_k25", text_config=text_config("deepseek_v3")),
    config(model_type="kimi_k25", text_config=text_config("kimi_k2")),
    text_config("kimi_k2"),
    text_config("deepseek_v3", vocab_size=163840, n_routed_experts=384),
]
OTHERS = [
    config(),
    None,
    config(model_type="mistral", architectures=["MistralForCausalLM"]),
    config(model_type="kimi_k25"),
    config(model_type="kimi_k25", text_config=config(model_type="llama")),
    config(model_type="kimi_vl", text_config=text_config("deepseek_v3")),
    config(model_type="kimi_linear", architectures=["KimiLinearForCausalLM"]),
    text_config("deepseek_v3", vocab_size=129280, n_routed_experts=256),  # DeepSeek-V3
    text_config("deepseek_v3", vocab_size=163840, n_routed_experts=64),  # Moonlight
    text_config("deepseek_v32", vocab_size=163840, n_routed_experts=384),
    config(model_type="kimi_k2", architectures=7),
    # An MLA drafter has a Kimi's model type, and is no target.
    config(model_type="kimi_k2", architectures=["Eagle3DeepseekV2ForCausalLM"]),
]


@pytest.mark.parametrize("target", KIMI)
def test_a_kimi_is_recognised(target: Any) -> None:
    assert is_kimi_target(target)


@pytest.mark.parametrize("target", OTHERS)
def test_anything_else_is_not(target: Any) -> None:
    assert not is_kimi_target(target)


def test_the_language_model_alone_is_not_the_multimodal_one() -> None:
    assert [is_text_only_kimi(target) for target in KIMI] == [False, False, True, True]


@pytest.mark.parametrize(
    ("keys", "token"),
    [
        ({"media_placeholder_token_id": 7, "image_token_id": 8, "image_token_index": 9}, 7),
        ({"image_token_id": 8, "image_token_index": 9}, 8),
        ({"image_token_index": 9}, 9),
        ({"media_placeholder_token_id": None, "image_token_id": 0}, 0),
        ({"media_placeholder_token_id": "7"}, None),
        ({}, None),
    ],
)
def test_the_image_token(keys: dict[str, Any], token: int | None) -> None:
    assert image_token_id(config(**keys)) == token


NO_FOLDERS = [
    "lightseekorg/kimi-k2.5-eagle3",
    "my-drafter",
    "s3://bucket/models/drafter",
    "owner/repo/file.gguf",
]


def write_config(folder: Path, content: Any) -> str:
    folder.mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    "content",
    [
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2"},
        {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000},
        {"architectures": ["LlamaForCausalLM"], "eagle_config": {}},
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"},
        # vLLM names these drafters itself; what might be one is not refused.
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
        {"architectures": ["PEagleDraftModel"]},
        {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2},
        {},
    ],
)
def test_an_eagle3_drafter_has_no_problem(tmp_path: Path, content: Any) -> None:
    assert drafter_problem(write_config(tmp_path / "drafter", content)) is None


@pytest.mark.parametrize("model", NO_FOLDERS)
def test_what_is_no_folder_is_not_judged(model: str) -> None:
    assert drafter_problem(model) is None


@pytest.mark.parametrize("model", ["/models/no such folder", "./drafter", "../x", "~/d", "a/b/c"])
def test_a_missing_folder_is_named(model: str) -> None:
    problem = drafter_problem(model)
    assert problem is not None
    assert f"{model!r} does not exist" in str(problem)
    assert problem.finding.id == "files-no-folder"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}, "32 decoder layers"),
        ({"text_config": {"num_hidden_layers": 61}}, "61 decoder layers"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "not the config of an EAGLE-3 drafter"),
        ({"architectures": ["MedusaModel"]}, "its architecture is 'MedusaModel'"),
        ({"architectures": ["DeepSeekMTPModel"]}, "its architecture is 'DeepSeekMTPModel'"),
        ([], "holds JSON that is no object"),
        ("{", "holds no valid JSON"),
        ("[" * 100_000, "nested too deep"),
    ],
)
def test_something_else_is_named(tmp_path: Path, content: Any, says: str) -> None:
    folder = write_config(tmp_path / "drafter", content)
    problem = drafter_problem(folder)
    assert problem is not None
    assert says in str(problem)
    assert folder in str(problem)
    assert problem.finding.id in ("files-not-a-drafter", "files-not-json")


def test_an_empty_folder_and_a_file(tmp_path: Path) -> None:
    assert "holds no config.json" in str(drafter_problem(str(tmp_path)))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert "is a file" in str(drafter_problem(str(file)))


@given(st.binary(max_size=200))
def test_any_bytes_are_one_line(tmp_path_factory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("drafter")
    (folder / "config.json").write_bytes(content)
    assert "\n" not in str(drafter_problem(str(folder)))


@given(st.text() | st.text(min_size=5000, max_size=5000))
def test_any_name_is_answered(name: str) -> None:
    assert "\n" not in str(drafter_problem("/" + name))


def test_a_config_file_is_taken_as_a_config() -> None:
    assert is_kimi_target(ConfigFile({"model_type": "kimi_k25", "text_config": {}}))
    assert is_kimi_target(
        ConfigFile({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]})
    )
    other = {"model_type": "kimi_k25", "text_config": {"model_type": "llama"}}
    assert not is_kimi_target(ConfigFile(other))
    assert not is_kimi_target(ConfigFile({"model_type": "kimi_k25", "text_config": [1]}))
    assert image_token_id(ConfigFile({"image_token_id": 8})) == 8


# ---------------------------------------------------------------------------------- the cache


def make_snapshot(cache: Path, model: str, commit: str, ref: str | None, files: list[str]) -> None:
    repository = cache / f"models--{model.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    for name in files:
        (snapshot / name).write_text("{}")
    if ref is not None:
        (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / ref).write_text(commit)


COMMITS = ["c1", "c2"]
REVISIONS = [None, "main", "v1", "refs/pr/1", "c1", "c2", "c3", "..", "", "snapshots/c1"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(COMMITS),
            st.sampled_from(["main", "v1", "refs/pr/1", None]),
            st.sampled_from([[], ["config.json"], ["model.safetensors"]]),
        ),
        max_size=3,
    ),
    st.sampled_from(REVISIONS),
    st.sampled_from(["owner/name", "name", "other/name"]),
)
@settings(max_examples=150)
def test_a_snapshot_is_found_as_the_library_finds_it(
    tmp_path_factory: pytest.TempPathFactory,
    snapshots: list[tuple[str, str | None, list[str]]],
    revision: str | None,
    model: str,
) -> None:
    cache = tmp_path_factory.mktemp("hub")
    for commit, ref, files in snapshots:
        make_snapshot(cache, "owner/name", commit, ref, files)
        make_snapshot(cache, "name", commit, ref, files)
    hub = pytest.importorskip("huggingface_hub")
    file = hub.try_to_load_from_cache(
        model, "config.json", cache_dir=cache, revision=revision or None
    )
    expected = Path(file).parent if isinstance(file, str) else None
    assert local_folder(model, revision, {"HF_HUB_CACHE": str(cache)}) == expected


def test_the_cache_is_where_the_library_has_it() -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    assert str(cache_folder()) == constants.HF_HUB_CACHE


@pytest.mark.parametrize("model", ["/no/folder", "a/b/c", "s3://bucket/x", "a b", "é/x", "../x"])
def test_what_is_no_repository_is_not_in_the_cache(tmp_path: Path, model: str) -> None:
    assert local_folder(model, None, {"HF_HUB_CACHE": str(tmp_path)}) is None


def test_a_cache_that_cannot_be_read_has_nothing(tmp_path: Path) -> None:
    (tmp_path / "models--a--b").write_text("")
    assert local_folder("a/b", None, {"HF_HUB_CACHE": str(tmp_path)}) is None
    make_snapshot(tmp_path, "a/c", "c1", "main", ["config.json"])
    (tmp_path / "models--a--c" / "refs" / "main").write_bytes(b"\xff\0" * 200)
    assert local_folder("a/c", None, {"HF_HUB_CACHE": str(tmp_path)}) is None


# ----------------------------------------------------------------------------------- its errors


def test_an_error_has_a_finding() -> None:
    error = CheckpointError(
        "files-broken-header",
        "it is broken",
        "mend it",
        file="a\x1bb",
        key="k" * 5000,
        value="\ud800",
    )
    assert str(error) == "it is broken; mend it"
    assert error.finding.severity is Severity.FAILS
    assert error.finding.text == "it is broken; mend it [files-broken-header]"
    assert error.finding.evidence.file == "a\\x1bb"
    assert error.finding.evidence.value == "'\\ud800'"
    assert len(error.finding.evidence.key or "") < 1100
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.finding) == (str(error), error.finding)
    assert str(CheckpointError("files-unreadable", "it is broken")) == "it is broken"


@given(st.text(alphabet=st.characters()) | st.text(alphabet="\ud800\x1b\n", min_size=1500))
def test_what_is_plain_can_be_printed(text: str) -> None:
    shown = plain(text)
    assert shown.isprintable()
    shown.encode()
    assert len(shown) < 12_000
    assert quoted(text).isprintable()


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError) as error:
        read_json(tmp_path / "config.json")
    assert error.value.finding.id == "files-too-large"
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")
