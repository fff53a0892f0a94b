# SPDX-License-Identifier: Apache-2.0
"""A Kimi-K2.5 of full size without its weights: the names, dtypes, shapes and shards of the
published int4 checkpoint in the headers of sparse files.

    python -m tests.assets.synthetic FOLDER     # 64 shards, 595 GB, of which 60 MB take disk space
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).parents[1] / "data" / "configs" / "moonshotai__Kimi-K2.5" / "config.json"

# Bytes of an element.
_BYTES = {"BF16": 2, "F32": 4, "I32": 4, "U8": 1, "F8_E4M3": 1}

Tensor = tuple[str, str, tuple[int, ...]]


def kimi_config() -> dict[str, Any]:
    """The published config.json."""
    config: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    return config


def kimi_tensors(config: Mapping[str, Any]) -> Iterator[Tensor]:
    """Name, dtype and shape of every tensor, layer by layer, in the published int4 format.

    Args:
        config: Kimi-K2.5's, or the like with other sizes.
    """
    text, vision = config["text_config"], config["vision_config"]
    prefix, hidden, vocab = "language_model.", text["hidden_size"], text["vocab_size"]
    yield f"{prefix}model.embed_tokens.weight", "BF16", (vocab, hidden)
    for index in range(text["num_hidden_layers"]):
        layer = f"{prefix}model.layers.{index}."
        for name, shape in _attention(text).items():
            yield f"{layer}self_attn.{name}.weight", "BF16", shape
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{norm}.weight", "BF16", (hidden,)
        if index < text["first_k_dense_replace"]:
            for name, shape in _mlp(hidden, text["intermediate_size"]):
                yield f"{layer}mlp.{name}.weight", "BF16", shape
            continue
        experts, inner = text["n_routed_experts"], text["moe_intermediate_size"]
        yield f"{layer}mlp.gate.weight", "BF16", (experts, hidden)
        yield f"{layer}mlp.gate.e_score_correction_bias", "F32", (experts,)
        for name, shape in _mlp(hidden, inner * text["n_shared_experts"]):
            yield f"{layer}mlp.shared_experts.{name}.weight", "BF16", shape
        for expert in range(experts):
            for name, (rows, columns) in _mlp(hidden, inner):
                weight = f"{layer}mlp.experts.{expert}.{name}.weight"
                yield f"{weight}_packed", "I32", (rows, columns // 8)
                yield f"{weight}_scale", "BF16", (rows, columns // 32)
                yield f"{weight}_shape", "I32", (2,)
    yield f"{prefix}model.norm.weight", "BF16", (hidden,)
    yield f"{prefix}lm_head.weight", "BF16", (vocab, hidden)
    yield from _vision(vision, hidden)


def light_tensors(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The same bytes in a few tensors: all experts of a layer as one, so that a test is quick."""
    text = config["text_config"]
    count = text["n_routed_experts"]
    one = {**config, "text_config": {**text, "n_routed_experts": 1}}
    light = {}
    for name, dtype, shape in kimi_tensors(one):
        if ".experts." in name or ".mlp.gate." in name:
            shape = (shape[0] * count, *shape[1:])
        light[name] = dtype, shape
    return light


def write_kimi(folder: Path, config: Mapping[str, Any] | None = None, shards: int = 64) -> None:
    """Write config.json, the shards and their index. Weights are holes.

    The layers are spread as published: a shard for each, and those at the end for the rest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = kimi_config() if config is None else config
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    parts: list[list[Tensor]] = [[] for _ in range(shards)]
    for tensor in kimi_tensors(config):
        name = tensor[0]
        layer = name.partition(".layers.")[2].partition(".")[0]
        if layer.isdigit():
            shard = int(layer) % max(shards - 3, 1)
        else:
            shard = shards - (3 if "embed_tokens" in name else 2 if "language" in name else 1)
        parts[shard % shards].append(tensor)
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{shards:06}.safetensors"
        total += write_header(folder / file, part)
        weight_map.update((name, file) for name, _, _ in part)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_header(file: Path, tensors: list[Tensor]) -> int:
    """Write a safetensors file whose weights are holes; returns how many bytes they would have.

    The header is as the library writes it: in the order of the data, no spaces, padded to 8 bytes.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return end


def _attention(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    query, latent = text["q_lora_rank"], text["kv_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    return {
        "q_a_proj": (query, hidden),
        "q_a_layernorm": (query,),
        "q_b_proj": (heads * (nope + rope), query),
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }


def _mlp(hidden: int, inner: int) -> tuple[tuple[str, tuple[int, int]], ...]:
    return (
        ("gate_proj", (inner, hidden)),
        ("up_proj", (inner, hidden)),
        ("down_proj", (hidden, inner)),
    )


def _vision(vision: Mapping[str, Any], text_hidden: int) -> Iterator[Tensor]:
    width, inner = vision["vt_hidden_size"], vision["vt_intermediate_size"]
    patch, merged = vision["patch_size"], 4 * width
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], width)
    tower = "vision_tower."
    yield f"{tower}patch_embed.pos_emb.weight", "BF16", grid
    yield f"{tower}patch_embed.proj.weight", "BF16", (width, 3, patch, patch)
    yield f"{tower}patch_embed.proj.bias", "BF16", (width,)
    for index in range(vision["vt_num_hidden_layers"]):
        block = f"{tower}encoder.blocks.{index}."
        for name, rows, columns in (
            ("wqkv", 3 * width, width),
            ("wo", width, width),
            ("mlp.fc0", inner, width),
            ("mlp.fc1", width, inner),
        ):
            yield f"{block}{name}.weight", "BF16", (rows, columns)
            yield f"{block}{name}.bias", "BF16", (rows,)
        for norm in ("norm0", "norm1"):
            yield f"{block}{norm}.weight", "BF16", (width,)
            yield f"{block}{norm}.bias", "BF16", (width,)
    for kind in ("weight", "bias"):
        yield f"{tower}encoder.final_layernorm.{kind}", "BF16", (width,)
        yield f"mm_projector.pre_norm.{kind}", "BF16", (width,)
    yield "mm_projector.proj.0.weight", "BF16", (merged, merged)
    yield "mm_projector.proj.0.bias", "BF16", (merged,)
    yield "mm_projector.proj.2.weight", "BF16", (text_hidden, merged)
    yield "mm_projector.proj.2.bias", "BF16", (text_hidden,)


if __name__ == "__main__":
    write_kimi(Path(sys.argv[1]))
