# SPDX-License-Identifier: Apache-2.0
"""The committed checkpoints and the folders that tests derive from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.assets import variants
from tests.reference.checkpoint import read_config, read_tensors
from tests.reference.drafter import aux_layer_ids

FOLDERS = [variants.KIMI_K25_TARGET, variants.LLAMA_DRAFTER, variants.MLA_DRAFTER]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_committed_files_are_small(folder: Path) -> None:
    for file in folder.iterdir():
        if file.is_file():
            assert file.stat().st_size < 5_000_000, file.name


def test_target_index_names_every_tensor() -> None:
    index = json.loads((variants.KIMI_K25_TARGET / "model.safetensors.index.json").read_text())
    tensors = read_tensors(variants.KIMI_K25_TARGET)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert len(set(index["weight_map"].values())) == 2


def test_target_config_has_the_published_names() -> None:
    config = read_config(variants.KIMI_K25_TARGET)
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert config["text_config"]["model_type"] == "deepseek_v3"
    assert config["text_config"]["rope_scaling"]["type"] == "yarn"
    assert config["media_placeholder_token_id"] == config["image_token_id"]
    assert "image_token_index" not in config


def test_drafter_configs_nest_the_default_aux_layers() -> None:
    for folder in (variants.LLAMA_DRAFTER, variants.MLA_DRAFTER):
        config = read_config(folder)
        assert "eagle_aux_hidden_state_layer_ids" not in config
        assert aux_layer_ids(config) == [2, 4, 5]
        assert "n_routed_experts" not in config


def test_copy_drafter_edits_the_config_only(tmp_path: Path) -> None:
    copy = variants.copy_drafter(
        variants.LLAMA_DRAFTER,
        tmp_path / "copy",
        overrides={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        remove=["eagle_config"],
    )
    config = read_config(copy)
    assert aux_layer_ids(config) == [1, 3, 4]
    assert "eagle_config" not in config
    original = read_tensors(variants.LLAMA_DRAFTER)
    assert all(torch.equal(original[name], tensor) for name, tensor in read_tensors(copy).items())


def test_llama_pair_is_a_plain_llama_and_follows_from_its_seed(tmp_path: Path) -> None:
    target, drafter = variants.write_llama_pair(tmp_path / "one")
    assert read_config(target)["architectures"] == ["LlamaForCausalLM"]
    assert read_config(drafter)["architectures"] == ["LlamaForCausalLMEagle3"]
    again, _ = variants.write_llama_pair(tmp_path / "two")
    other, _ = variants.write_llama_pair(tmp_path / "three", seed=1)
    name = "model.embed_tokens.weight"
    assert torch.equal(read_tensors(target)[name], read_tensors(again)[name])
    assert not torch.equal(read_tensors(target)[name], read_tensors(other)[name])
