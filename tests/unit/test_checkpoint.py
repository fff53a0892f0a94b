# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.checkpoint.folder import drafter_problem
from vllm_kimi_eagle3.checkpoint.target import image_token_id, is_kimi_target, is_text_only_kimi


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
    assert f"{model!r} does not exist" in problem


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}, "32 decoder layers"),
        ({"text_config": {"num_hidden_layers": 61}}, "61 decoder layers"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "not the config of an EAGLE-3 drafter"),
        ({"architectures": ["MedusaModel"]}, "its architecture is MedusaModel"),
        ({"architectures": ["DeepSeekMTPModel"]}, "its architecture is DeepSeekMTPModel"),
        ([], "holds no JSON object"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
def test_something_else_is_named(tmp_path: Path, content: Any, says: str) -> None:
    folder = write_config(tmp_path / "drafter", content)
    problem = drafter_problem(folder)
    assert problem is not None
    assert says in problem
    assert folder in problem


def test_an_empty_folder_and_a_file(tmp_path: Path) -> None:
    assert "holds no config.json" in str(drafter_problem(str(tmp_path)))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert "is a file" in str(drafter_problem(str(file)))


@given(st.binary(max_size=200))
def test_any_bytes_are_one_line(tmp_path_factory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("drafter")
    (folder / "config.json").write_bytes(content)
    assert "\n" not in (drafter_problem(str(folder)) or "")


@given(st.text() | st.text(min_size=5000, max_size=5000))
def test_any_name_is_answered(name: str) -> None:
    assert "\n" not in (drafter_problem("/" + name) or "")
