# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders that tests derive from the committed ones.

Standard library, torch and safetensors only: test hosts come with whatever vLLM pins.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ASSETS = Path(__file__).resolve().parent
KIMI_K25_TARGET = ASSETS / "kimi-k2.5-tiny"
LLAMA_DRAFTER = ASSETS / "eagle3-llama-tiny"
MLA_DRAFTER = ASSETS / "eagle3-mla-tiny"

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def load_prompts() -> list[dict[str, Any]]:
    """`prompts.json`: per prompt its `token_ids` and its `text`."""
    return json.loads((ASSETS / "prompts.json").read_text(encoding="utf-8"))


def load_expected() -> dict[str, Any]:
    """`expected.json`: the target's greedy `output_token_ids`, and `runs` per drafter folder."""
    return json.loads((ASSETS / "expected.json").read_text(encoding="utf-8"))


def expected_run(
    drafter: str, num_speculative_tokens: int = 3, aux_layer_ids: Collection[int] = (2, 4, 5)
) -> dict[str, Any]:
    """The row of `expected.json` for a drafter folder name and a setting.

    Raises:
        KeyError: that setting was not recorded.
    """
    wanted = num_speculative_tokens, list(aux_layer_ids)
    for row in load_expected()["runs"][drafter]:
        if (row["num_speculative_tokens"], row["aux_layer_ids"]) == wanted:
            return row
    raise KeyError(f"{drafter}, k={num_speculative_tokens}, aux layers {list(aux_layer_ids)}")


def write_kimi_k2_target(destination: Path, source: Path = KIMI_K25_TARGET) -> Path:
    """Writes the text-only Kimi-K2 form of a Kimi-K2.5 folder; returns `destination`.

    Same weights: `DeepseekV3ForCausalLM`, model_type `kimi_k2`, no `language_model.` prefix, no
    vision tower. Tokens and counts are those of the source.
    """
    destination.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _write_json(destination / "config.json", {**config["text_config"], "model_type": "kimi_k2"})
    prefix = "language_model."
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            if name.startswith(prefix):
                tensors[name[len(prefix) :]] = tensor
    _save(tensors, destination)
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        shutil.copy(source / name, destination)
    return destination


def copy_drafter(
    source: Path,
    destination: Path,
    overrides: Mapping[str, Any] | None = None,
    remove: Collection[str] = (),
) -> Path:
    """Copies a drafter folder and edits its config; returns `destination`.

    Args:
        overrides: top-level keys to set, such as
            `{"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}`; nested dicts are replaced whole.
        remove: top-level keys to leave out, such as `["eagle_config"]`.
    """
    shutil.copytree(source, destination, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key not in remove}
    _write_json(destination / "config.json", {**config, **(overrides or {})})
    return destination


def write_llama_pair(destination: Path, seed: int = 0) -> tuple[Path, Path]:
    """Writes a tiny plain Llama target and an EAGLE-3 drafter for it, with random weights.

    For tests that another model is left alone: any vLLM in range runs this pair without the plugin.
    Acceptance is low, which does not matter there.

    Returns:
        The folders `destination/target` and `destination/drafter`.
    """
    vocab_size, hidden_size, width, heads, kv_heads, head_dim = 512, 64, 128, 4, 2, 32
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
        return values.bfloat16()

    def layer(prefix: str, attention_input_size: int) -> dict[str, torch.Tensor]:
        ones = torch.ones(hidden_size, dtype=torch.bfloat16)
        return {
            f"{prefix}.input_layernorm.weight": ones,
            f"{prefix}.post_attention_layernorm.weight": ones.clone(),
            f"{prefix}.self_attn.q_proj.weight": weight(heads * head_dim, attention_input_size),
            f"{prefix}.self_attn.k_proj.weight": weight(kv_heads * head_dim, attention_input_size),
            f"{prefix}.self_attn.v_proj.weight": weight(kv_heads * head_dim, attention_input_size),
            f"{prefix}.self_attn.o_proj.weight": weight(hidden_size, heads * head_dim),
            f"{prefix}.mlp.gate_proj.weight": weight(width, hidden_size),
            f"{prefix}.mlp.up_proj.weight": weight(width, hidden_size),
            f"{prefix}.mlp.down_proj.weight": weight(hidden_size, width),
        }

    target_tensors = {
        "model.embed_tokens.weight": weight(vocab_size, hidden_size),
        "model.norm.weight": torch.ones(hidden_size, dtype=torch.bfloat16),
        "lm_head.weight": weight(vocab_size, hidden_size),
    }
    num_layers = 8
    for index in range(num_layers):
        target_tensors.update(layer(f"model.layers.{index}", hidden_size))
    drafter_tensors = {
        "fc.weight": weight(hidden_size, 3 * hidden_size),
        "norm.weight": torch.ones(hidden_size, dtype=torch.bfloat16),
        "lm_head.weight": weight(vocab_size, hidden_size),
        "midlayer.hidden_norm.weight": torch.ones(hidden_size, dtype=torch.bfloat16),
        **layer("midlayer", 2 * hidden_size),
    }

    target_config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    drafter_config = {
        **target_config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": vocab_size,
    }
    folders = destination / "target", destination / "drafter"
    contents = (target_config, target_tensors), (drafter_config, drafter_tensors)
    for folder, (config, tensors) in zip(folders, contents, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "config.json", config)
        _save(tensors, folder)
        for name in TOKENIZER_FILES:
            shutil.copy(KIMI_K25_TARGET / name, folder)
    return folders


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
