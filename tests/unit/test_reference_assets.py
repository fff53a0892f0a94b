# SPDX-License-Identifier: Apache-2.0
"""The committed checkpoints and the folders that tests derive from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.assets import variants
from tests.assets.variants import VARIANTS
from tests.reference.checkpoint import read_config, read_tensors
from tests.reference.drafter import (
    aux_layer_ids,
    captured_layer_ids,
    plain_config,
    read_option,
)
from tests.reference.layers import read_rope

CONFIGS = Path(__file__).resolve().parent.parent / "data" / "configs"
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


def test_edit_drafter_edits_both(tmp_path: Path) -> None:
    edited = variants.edit_drafter(
        variants.MLA_DRAFTER,
        tmp_path / "edited",
        config=lambda config: {**config, "hidden_size": 1},
        remove=["rope_scaling"],
        tensors=lambda tensors: {"fc.weight": tensors["fc.weight"] * 2},
        shards=1,
    )
    config, original = read_config(edited), read_config(variants.MLA_DRAFTER)
    assert config == {
        **{k: v for k, v in original.items() if k != "rope_scaling"},
        "hidden_size": 1,
    }
    tensors = read_tensors(edited)
    assert list(tensors) == ["fc.weight"]
    assert torch.equal(tensors["fc.weight"], read_tensors(variants.MLA_DRAFTER)["fc.weight"] * 2)
    assert (edited / "tokenizer.json").is_file()


# ------------------------------------------------------------------------------------- the variants


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_what_was_counted(name: str, tmp_path: Path) -> None:
    """Otherwise: `python tests/assets/build.py --from variants`."""
    folder = variants.write_variant(name, tmp_path / name)
    assert variants.folder_digest(folder) == variants.load_expected()["variants"][name]["sha256"]
    wanted = captured_layer_ids(plain_config(read_config(folder)), num_layers=8)
    assert VARIANTS[name].aux_layer_ids == (wanted or ())


def counts(row: dict[str, Any]) -> list[int]:
    return [row["num_drafts"], *row["num_accepted_tokens_per_pos"]]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_wrong_way_shows_in_the_counts(name: str) -> None:
    right, wrong = variants.expected_variant(name), variants.wrong_variant(name)
    assert set(wrong) == set(VARIANTS[name].wrong)
    for way, row in wrong.items():
        assert abs(row["num_drafts"] - right["num_drafts"]) > 0.05 * right["num_drafts"], way


def test_variants_with_the_same_counts() -> None:
    for name, variant in VARIANTS.items():
        if (other := variant.same_counts_as) is not None:
            wanted = variants.expected_run(other, aux_layer_ids=variant.aux_layer_ids)
            assert counts(variants.expected_variant(name)) == counts(wanted), name


def test_recorded_rows_are_those_of_the_table() -> None:
    expected = variants.load_expected()
    committed = {variants.LLAMA_DRAFTER.name, variants.MLA_DRAFTER.name}
    assert set(expected["variants"]) == set(VARIANTS)
    assert set(expected["runs"]) == set(VARIANTS) | committed


def test_sharded_variant_has_an_index(tmp_path: Path) -> None:
    folder = variants.write_variant("mla-sharded", tmp_path / "sharded")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert not (folder / "model.safetensors").exists()
    assert len(set(index["weight_map"].values())) == 3
    tensors = read_tensors(folder)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_edge_layers_have_the_committed_counts() -> None:
    for family, folder in (("llama", variants.LLAMA_DRAFTER), ("mla", variants.MLA_DRAFTER)):
        row = variants.expected_run(folder.name, aux_layer_ids=(0, 4, 8))
        assert variants.expected_variant(f"{family}-aux-edges") == row


# ------------------------------------------------------------------------- the published configs

PUBLISHED = json.loads((CONFIGS / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_means_what_is_recorded(name: str) -> None:
    config, wanted = read_config(CONFIGS / name), PUBLISHED[name]
    theta, scaling = read_rope(config)
    scaling = scaling or {}
    flags = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
    assert wanted == {
        "captured_layer_ids": list(captured_layer_ids(config, num_layers=61) or ()),
        **{flag: read_option(config, flag, False) for flag in flags},
        "rope_theta": theta,
        "rope_kind": "yarn" if scaling else "default",
        "rope_factor": scaling.get("factor"),
        "rope_beta_fast": scaling.get("beta_fast"),
        "rope_original_max_position_embeddings": scaling.get("original_max_position_embeddings"),
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "max_position_embeddings": config.get("max_position_embeddings"),
    }


def test_published_headers_add_up_to_the_stated_sizes() -> None:
    """Billions of parameters that the model cards give."""
    stated = {
        "lightseekorg__kimi-k2.5-eagle3-mla": 3.02,
        "nvidia__Kimi-K2.6-Eagle3": 1.84,
    }
    for name, billions in stated.items():
        header = json.loads((CONFIGS / name / "tensors.json").read_text(encoding="utf-8"))
        total = sum(math.prod(shape) for _, shape in header.values())
        assert round(total / 1e9, 2) == billions


def test_published_headers_fit_their_configs() -> None:
    for file in CONFIGS.glob("*/tensors.json"):
        config = read_config(file.parent)
        header = json.loads(file.read_text(encoding="utf-8"))
        hidden_size = config["hidden_size"]
        draft_vocab_size = config.get("draft_vocab_size") or config["vocab_size"]
        assert header["fc.weight"][1] == [hidden_size, 3 * hidden_size]
        assert header["lm_head.weight"][1] == [draft_vocab_size, hidden_size]
        assert ("d2t" in header) == (draft_vocab_size != config["vocab_size"])
        assert ("fc_norm.0.weight" in header) == config.get("fc_norm", False)


def test_llama_pair_is_a_plain_llama_and_follows_from_its_seed(tmp_path: Path) -> None:
    target, drafter = variants.write_llama_pair(tmp_path / "one")
    assert read_config(target)["architectures"] == ["LlamaForCausalLM"]
    assert read_config(drafter)["architectures"] == ["LlamaForCausalLMEagle3"]
    again, _ = variants.write_llama_pair(tmp_path / "two")
    other, _ = variants.write_llama_pair(tmp_path / "three", seed=1)
    name = "model.embed_tokens.weight"
    assert torch.equal(read_tensors(target)[name], read_tensors(again)[name])
    assert not torch.equal(read_tensors(target)[name], read_tensors(other)[name])
