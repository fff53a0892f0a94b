# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders that tests derive from the committed ones.

Standard library, torch and safetensors only: test hosts come with whatever vLLM pins.

`VARIANTS` names drafters of other forms and formats, each made of a committed drafter by edits of
its config and its tensors. Tensors are only scaled, moved and cut, element by element, so that the
files are the same bytes on every machine; `expected.json` has their counts, and those of the ways
to get them wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
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


def expected_variant(name: str) -> dict[str, Any]:
    """The row of `expected.json` for a variant: k = 3, its own aux layers, everything right."""
    return expected_run(name, aux_layer_ids=VARIANTS[name].aux_layer_ids)


def wrong_variant(name: str) -> dict[str, dict[str, Any]]:
    """For each way to get a variant wrong, the row that this would give."""
    return load_expected()["variants"][name]["wrong"]


def write_kimi_k2_target(destination: Path, source: Path = KIMI_K25_TARGET) -> Path:
    """Writes the text-only Kimi-K2 form of a Kimi-K2.5 folder; returns `destination`.

    Same weights: `DeepseekV3ForCausalLM`, model_type `kimi_k2`, no `language_model.` prefix, no
    vision tower. Tokens and counts are those of the source.
    """
    destination.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _write_json(destination / "config.json", {**config["text_config"], "model_type": "kimi_k2"})
    prefix = "language_model."
    tensors = _read_tensors(source)
    tensors = {
        name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)
    }
    _save(tensors, destination)
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        shutil.copy(source / name, destination)
    return destination


Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
ConfigEdit = Mapping[str, Any] | Callable[[Config], Config]
TensorEdit = Callable[[Tensors], Tensors]


def edit_drafter(
    source: Path,
    destination: Path,
    config: ConfigEdit | None = None,
    remove: Collection[str] = (),
    tensors: TensorEdit | None = None,
    shards: int = 1,
) -> Path:
    """Writes an edited copy of a drafter folder; returns `destination`.

    Args:
        config: top-level keys to set (nested dicts are replaced whole), or a function from the
            config to the new one.
        remove: top-level keys to leave out of the config.
        tensors: from all tensors of the folder to those to write; it may change the dict.
        shards: into how many files, more than one with `model.safetensors.index.json`.
    """
    destination.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors.index.json") and (
            file.suffix != ".safetensors"
        ):
            shutil.copy(file, destination)
    values = json.loads((source / "config.json").read_text(encoding="utf-8"))
    values = {key: value for key, value in values.items() if key not in remove}
    values = config(values) if callable(config) else {**values, **(config or {})}
    _write_json(destination / "config.json", values)
    loaded = _read_tensors(source)
    if loaded:
        _save(tensors(loaded) if tensors else loaded, destination, shards)
    return destination


def write_quantised_target(destination: Path, *, spelled_out: bool = False) -> Path:
    """Writes the Kimi-K2.5 target with int8 weights (compressed-tensors, a scale for each row, int8
    activations with a scale for each token) in its output projections and dense and shared MLPs.

    Args:
        spelled_out: with what these weights stand for instead, for the reference.
    """

    def quantised(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            if _QUANTISED.search(name) is None:
                found[name] = tensor
                continue
            scale = tensor.float().abs().amax(dim=-1, keepdim=True) / 127
            whole = (tensor.float() / scale).round()
            if spelled_out:
                found[name] = (whole * scale).float()
            else:
                found[name] = whole.to(torch.int8)
                found[name.replace(".weight", ".weight_scale")] = scale.float()
        return found

    def config(values: dict[str, Any]) -> dict[str, Any]:
        scheme = {"num_bits": 8, "type": "int", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**scheme, "strategy": "channel", "dynamic": False},
            "input_activations": {**scheme, "strategy": "token", "dynamic": True},
        }
        stated = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": [
                "re:.*lm_head",
                r"re:.*self_attn\.(?!o_proj).*",
                r"re:.*mlp\.gate$",
                r"re:.*mlp\.experts.*",
                "re:.*vision_tower.*",
                "re:.*mm_projector.*",
            ],
        }
        text = {**values["text_config"], "quantization_config": stated}
        return values if spelled_out else {**values, "text_config": text}

    return edit_drafter(KIMI_K25_TARGET, destination, config, tensors=quantised)


_QUANTISED = re.compile(
    r"language_model\..*(o_proj|mlp\.(gate|up|down)_proj|shared_experts\.\w+_proj)\.weight$"
)


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
    return edit_drafter(source, destination, overrides, remove)


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


# ----------------------------------------------------------------------------------- the variants

EAGLE_CONFIG = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
YARN: Config = {  # of the target and the MLA drafter
    "type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA_YARN: Config = {**YARN, "original_max_position_embeddings": 1024}
HIDDEN_SIZE, VOCAB_SIZE = 96, 512

# Each drafter drafts nearly as well without this channel of its hidden state, so variants may fill
# it with what must not be read.
SPARE_CHANNEL = 12
# Root mean square of what enters the target's layers 2, 4 and 5, over the text of the prompts.
AUX_MAGNITUDES = (5.75, 8.75, 10.0)


@dataclass(frozen=True)
class WrongWay:
    """A wrong reading of a variant, as one that is right of other contents or other aux layers.

    Attributes:
        config, remove, tensors: the edit of the variant's folder, as for `edit_drafter`.
        aux_layer_ids: what is captured, if not the variant's.
    """

    config: ConfigEdit | None = None
    remove: tuple[str, ...] = ()
    tensors: TensorEdit | None = None
    aux_layer_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Variant:
    """A drafter that `write_variant` writes.

    Attributes:
        about: what is special about it.
        source: the committed drafter that it is made of.
        config, remove, tensors, shards: the edit, as for `edit_drafter`.
        aux_layer_ids: which layers' inputs it reads; none where it reads the final hidden state.
        same_counts_as: a committed drafter or a variant of which it has the counts.
        wrong: ways to get it wrong. Where there are none, the wrong way does not start.
    """

    about: str
    source: Path
    config: ConfigEdit | None = None
    remove: tuple[str, ...] = ()
    tensors: TensorEdit | None = None
    shards: int = 1
    aux_layer_ids: tuple[int, ...] = (2, 4, 5)
    same_counts_as: str | None = None
    wrong: Mapping[str, WrongWay] = field(default_factory=dict)


def write_variant(name: str, destination: Path, source: Path | None = None) -> Path:
    """Writes the drafter folder of that name in `VARIANTS`; returns `destination`.

    Args:
        source: another copy of the committed drafter to make it of.
    """
    variant = VARIANTS[name]
    return edit_drafter(
        source or variant.source,
        destination,
        variant.config,
        variant.remove,
        variant.tensors,
        variant.shards,
    )


def folder_digest(folder: Path) -> str:
    """SHA-256 of a drafter folder's config and tensors: of what `expected.json` has the counts."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name, tensor in sorted(_read_tensors(folder).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --------------------------------------------------------------------------- edits of the tensors


def _scaled(tensor: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    return (tensor.float() * factor).to(tensor.dtype)


def _zigzag(size: int, powers: int) -> torch.Tensor:
    """Factors per channel, powers of two from `2**-powers` to `2**powers` (exact in bfloat16)."""
    return 2.0 ** ((7 * torch.arange(size)) % (2 * powers + 1) - powers).float()


def _layer(tensors: Tensors) -> str:
    """The prefix of the decoder layer's tensors."""
    return "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."


def _pipe(*edits: TensorEdit) -> TensorEdit:
    def edit(tensors: Tensors) -> Tensors:
        for one in edits:
            tensors = one(tensors)
        return tensors

    return edit


def _drop(*names: str) -> TensorEdit:
    """Leaves out the tensors whose name begins so."""
    return lambda tensors: {
        name: tensor for name, tensor in tensors.items() if not name.startswith(names)
    }


def _rename(old: str, new: str) -> TensorEdit:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def _with_zeros(name: str) -> TensorEdit:
    """A tensor `[vocabulary, hidden size]` that was never loaded."""
    zeros = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.bfloat16)
    return lambda tensors: {**tensors, name: zeros}


def _fc_norm(tensors: Tensors) -> Tensors:
    """Norms on each aux hidden state, whose uneven weights `fc` takes back."""
    uneven = _zigzag(HIDDEN_SIZE, powers=2)
    for index, magnitude in enumerate(AUX_MAGNITUDES):
        tensors[f"fc_norm.{index}.weight"] = (magnitude * uneven).bfloat16()
    tensors["fc.weight"] = _scaled(tensors["fc.weight"], 1 / uneven.repeat(3))
    return tensors


def _norm_before_fc(tensors: Tensors) -> Tensors:
    """One norm on all aux hidden states, whose uneven weight `fc` takes back."""
    uneven = _zigzag(3 * HIDDEN_SIZE, powers=2)
    tensors["input_norm.weight"] = (8.5 * uneven).bfloat16()
    tensors["fc.weight"] = _scaled(tensors["fc.weight"], 1 / uneven)
    return tensors


def _trap_in_spare_channel(tensors: Tensors) -> Tensors:
    """Makes the layer's MLP go astray if the spare channel of its residual is not zero."""
    layer = _layer(tensors)
    tensors[f"{layer}self_attn.o_proj.weight"][SPARE_CHANNEL] = 0
    tensors[f"{layer}post_attention_layernorm.weight"][SPARE_CHANNEL] *= 64
    return tensors


def _norm_output(tensors: Tensors) -> Tensors:
    """A final norm that puts out the magnitude of its input, without the spare channel.

    With `norm_output` the next step reads what the norm puts out, so that the spare channel stays
    zero; otherwise the second step meets the trap.
    """
    tensors = _trap_in_spare_channel(tensors)
    tensors["fc.weight"][SPARE_CHANNEL] = 0
    tensors["norm.weight"] = _scaled(tensors["norm.weight"], 8)
    tensors["norm.weight"][SPARE_CHANNEL] = 0
    tensors["lm_head.weight"] = _scaled(tensors["lm_head.weight"], 1 / 8)
    return tensors


def _norm_before_residual(tensors: Tensors) -> Tensors:
    """A `hidden_norm` that puts out the magnitude of its input, without the spare channel.

    With `norm_before_residual` that is the residual; otherwise the first step meets the trap.
    """
    tensors = _trap_in_spare_channel(tensors)
    layer = _layer(tensors)
    norm = f"{layer}hidden_norm.weight"
    tensors[norm] = _scaled(tensors[norm], 16)
    tensors[norm][SPARE_CHANNEL] = 0
    tensors["norm.weight"][SPARE_CHANNEL] = 0
    for name in tensors:
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "_a_proj.weight")) or (
            "kv_a_proj_with_mqa" in name
        ):
            tensors[name][:, HIDDEN_SIZE:] = _scaled(tensors[name][:, HIDDEN_SIZE:], 1 / 16)
    return tensors


def _no_aux(tensors: Tensors) -> Tensors:
    """Without `fc`, and with a layer that adds less: the final hidden state is small.

    Neither drafter was trained on that hidden state, and acceptance is low.
    """
    del tensors["fc.weight"]
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        name = _layer(tensors) + name
        tensors[name] = _scaled(tensors[name], 1 / 4)
    return tensors


def _four_aux(tensors: Tensors) -> Tensors:
    """Half of what `fc` reads of layer 4's input it reads of layer 3's instead."""
    two, four, five = tensors["fc.weight"].split(HIDDEN_SIZE, dim=1)
    half = _scaled(four, 0.5)
    tensors["fc.weight"] = torch.cat((two, half, half, five), dim=1)
    return tensors


def _target_tensor(name: str) -> torch.Tensor:
    return _read_tensors(KIMI_K25_TARGET)[f"language_model.{name}"]


def _target_embedding(tensors: Tensors) -> Tensors:
    tensors["embed_tokens.weight"] = _target_tensor("model.embed_tokens.weight")
    return tensors


def _own_embed(tensors: Tensors) -> Tensors:
    """Uneven embeddings, which the norm behind them takes back."""
    if "embed_tokens.weight" not in tensors:
        tensors = _target_embedding(tensors)
    uneven = _zigzag(HIDDEN_SIZE, powers=1)
    tensors["embed_tokens.weight"] = _scaled(tensors["embed_tokens.weight"], uneven)
    norm = f"{_layer(tensors)}input_layernorm.weight"
    tensors[norm] = _scaled(tensors[norm], 1.328125 / uneven)  # 1.32 is the factors' magnitude
    return tensors


def _own_head(tensors: Tensors) -> Tensors:
    """An uneven final norm, which the head takes back."""
    uneven = _zigzag(HIDDEN_SIZE, powers=2)
    tensors["norm.weight"] = _scaled(tensors["norm.weight"], uneven)
    tensors["lm_head.weight"] = _scaled(tensors["lm_head.weight"], 1 / uneven)
    return tensors


def _full_vocabulary(tensors: Tensors) -> Tensors:
    """The Llama drafter's rows, and the target's for the tokens that it lacks."""
    rows = tensors.pop("lm_head.weight")
    draft_to_target = torch.arange(len(rows)) + tensors.pop("d2t")
    del tensors["t2d"]
    tensors["lm_head.weight"] = _target_tensor("lm_head.weight").clone()
    tensors["lm_head.weight"][draft_to_target] = rows
    return tensors


def _reduced_vocabulary(tensors: Tensors) -> Tensors:
    """Only the rows of the tokens that the Llama drafter knows."""
    known = load_file(LLAMA_DRAFTER / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][known["t2d"]].contiguous()
    return {**tensors, "d2t": known["d2t"], "t2d": known["t2d"]}


def _identity_d2t(tensors: Tensors) -> Tensors:
    tensors["d2t"] = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    return tensors


def _offsets_as_ids(tensors: Tensors) -> Tensors:
    """What `d2t` would say if its entries were token ids."""
    tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
    return tensors


def _softmax_scale_of_yarn(tensors: Tensors) -> Tensors:
    """Puts the square of YaRN's magnitude, by which it multiplies the scores, into the queries."""
    name = f"{_layer(tensors)}self_attn.q_b_proj.weight"
    tensors[name] = _scaled(tensors[name], (0.1 * math.log(16) + 1) ** 2)
    return tensors


# ----------------------------------------------------------------------------- edits of the config


def _nested(**options: Any) -> Config:
    """`eagle_config` with more or other options."""
    return {"eagle_config": {**EAGLE_CONFIG, **options}}


ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


def _rope(**rope: Any) -> ConfigEdit:
    """Other rope keys and no more than these."""
    return lambda config: {
        **{key: value for key, value in config.items() if key not in ROPE_KEYS},
        **rope,
    }


def _speculators(**options: Any) -> Callable[[Config], Config]:
    """The config as the speculators library writes it."""

    def edit(config: Config) -> Config:
        outside = ("architectures", "draft_vocab_size", "eagle_config", "dtype")
        layer = {key: value for key, value in config.items() if key not in outside}
        proposal = {
            "accept_tolerance": 0.0,
            "proposal_type": "greedy",
            "speculative_tokens": 3,
            "verifier_accept_k": 1,
        }
        return {
            "architectures": ["Eagle3DraftModel"],
            "draft_vocab_size": config["draft_vocab_size"],
            "dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "embed_requires_grad": False,
            **options,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {
                    "architectures": ["KimiK25ForConditionalGeneration"],
                    "name_or_path": KIMI_K25_TARGET.name,
                },
            },
            "speculators_model_type": "eagle3",
            "target_hidden_size": None,
            "tie_word_embeddings": False,
            "transformer_layer_config": layer,
        }

    return edit


def _ignoring(*flags: str) -> WrongWay:
    """Flags not seen, at top level or inside `eagle_config`, nor their tensors."""

    def unset(config: Config) -> Config:
        config = {key: value for key, value in config.items() if key not in flags}
        nested = config.get("eagle_config") or {}
        nested = {key: value for key, value in nested.items() if key not in flags}
        return {**config, "eagle_config": nested} if nested else config

    prefixes = {"fc_norm": "fc_norm.", "norm_before_fc": "input_norm."}
    dropped = [prefixes[flag] for flag in flags if flag in prefixes]
    return WrongWay(unset, tensors=_drop(*dropped) if dropped else None)


# --------------------------------------------------------------------------------------- the table

IDS = "eagle_aux_hidden_state_layer_ids"
NO_FC_NORM = {"fc_norm ignored": _ignoring("fc_norm")}
NO_NORM_OUTPUT = {"norm_output ignored": _ignoring("norm_output")}
NO_EAGLE31 = {
    **NO_FC_NORM,
    **NO_NORM_OUTPUT,
    "both ignored": _ignoring("fc_norm", "norm_output"),
}
NO_NORM_BEFORE_FC = {"norm_before_fc ignored": _ignoring("norm_before_fc")}
NO_NORM_BEFORE_RESIDUAL = {
    "norm_before_residual ignored": WrongWay({"norm_before_residual": False})
}
IDS_AS_WRITTEN = {"ids as written": WrongWay(aux_layer_ids=(1, 3, 4))}
IDS_SHIFTED = {"ids shifted by one": WrongWay(aux_layer_ids=(3, 5, 6))}
FOUR_SHIFTED = {
    "ids shifted up": WrongWay(aux_layer_ids=(3, 4, 5, 6)),
    "ids shifted down": WrongWay(aux_layer_ids=(1, 2, 3, 4)),
}
NO_EMBED = {"embedding left at zero": WrongWay(tensors=_with_zeros("embed_tokens.weight"))}
NO_HEAD = {"head left at zero": WrongWay(tensors=_with_zeros("lm_head.weight"))}
SHARED_EMBED = {"the target's embedding": WrongWay(tensors=_drop("embed_tokens."))}
SHARED_HEAD = {"the target's head": WrongWay(tensors=_drop("lm_head."))}
D2T_AS_IDS = {"d2t taken as token ids": WrongWay(tensors=_offsets_as_ids)}
D2T_IGNORED = {"d2t ignored": WrongWay(tensors=_drop("d2t", "t2d"))}


def _of_both_families(family: str, source: Path) -> dict[str, Variant]:
    """The variants that both committed drafters come in."""
    base = source.name
    reduced = source == LLAMA_DRAFTER
    whole = _full_vocabulary if reduced else _pipe()
    full = {"draft_vocab_size": VOCAB_SIZE}
    eagle31 = _pipe(_fc_norm, _norm_output)
    make = partial(Variant, source=source)
    table = {
        "fc-norm": make("fc_norm", config={"fc_norm": True}, tensors=_fc_norm, wrong=NO_FC_NORM),
        "norm-output": make(
            "norm_output",
            config={"norm_output": True},
            tensors=_norm_output,
            wrong=NO_NORM_OUTPUT,
        ),
        "eagle31": make(
            "EAGLE-3.1 as published: fc_norm and norm_output",
            config={"fc_norm": True, "norm_output": True},
            tensors=eagle31,
            wrong=NO_EAGLE31,
        ),
        "eagle31-nested": make(
            "EAGLE-3.1 with its flags in eagle_config only",
            config=_nested(fc_norm=True, norm_output=True),
            tensors=eagle31,
            same_counts_as=f"{family}-eagle31",
            wrong=NO_EAGLE31,
        ),
        "norm-before-fc": make(
            "norm_before_fc",
            config={"norm_before_fc": True},
            tensors=_norm_before_fc,
            wrong=NO_NORM_BEFORE_FC,
        ),
        "norm-before-fc-nested": make(
            "norm_before_fc in eagle_config only",
            config=_nested(norm_before_fc=True),
            tensors=_norm_before_fc,
            same_counts_as=f"{family}-norm-before-fc",
            wrong=NO_NORM_BEFORE_FC,
        ),
        "norm-before-residual": make(
            "norm_before_residual",
            config={"norm_before_residual": True},
            tensors=_norm_before_residual,
            wrong=NO_NORM_BEFORE_RESIDUAL,
        ),
        "no-aux": make(
            "no aux hidden states and no fc: reads the target's final hidden state",
            config={"eagle_config": {"use_aux_hidden_state": False}},
            tensors=_no_aux,
            aux_layer_ids=(),
            wrong={"before the final norm": WrongWay(aux_layer_ids=(8,))},
        ),
        "aux-output-nested": make(
            "ids of layer outputs, in eagle_config",
            config=_nested(**{IDS: [1, 3, 4]}),
            same_counts_as=base,
            wrong=IDS_AS_WRITTEN,
        ),
        "aux-output-top": make(
            "ids of layer outputs, at top level",
            config={IDS: [1, 3, 4]},
            remove=("eagle_config",),
            same_counts_as=base,
            wrong=IDS_AS_WRITTEN,
        ),
        "aux-input-top": make(
            "ids of layer inputs, at top level",
            config={IDS: [2, 4, 5]},
            remove=("eagle_config",),
            same_counts_as=base,
            wrong=IDS_SHIFTED,
        ),
        "aux-absent": make(
            "no ids anywhere", remove=("eagle_config",), same_counts_as=base, wrong=IDS_SHIFTED
        ),
        "four-aux-nested": make(
            "four aux layers, in eagle_config",
            config=_nested(**{IDS: [2, 3, 4, 5]}),
            tensors=_four_aux,
            aux_layer_ids=(2, 3, 4, 5),
            wrong=FOUR_SHIFTED,
        ),
        "four-aux-top": make(
            "four aux layers, at top level",
            config={IDS: [2, 3, 4, 5]},
            remove=("eagle_config",),
            tensors=_four_aux,
            aux_layer_ids=(2, 3, 4, 5),
            same_counts_as=f"{family}-four-aux-nested",
            wrong=FOUR_SHIFTED,
        ),
        "aux-edges": make(
            "the embedding and the last layer's output among the aux layers",
            config=_nested(**{IDS: [0, 4, 8]}),
            aux_layer_ids=(0, 4, 8),
            wrong={
                "default layers": WrongWay(aux_layer_ids=(2, 4, 5)),
                "neither edge": WrongWay(aux_layer_ids=(1, 4, 7)),
            },
        ),
        "identity-d2t": make(
            "full vocabulary, and a d2t of zeros",
            config=full,
            tensors=_pipe(whole, _identity_d2t),
            same_counts_as=f"{family}-full-vocab" if reduced else base,
            wrong=D2T_AS_IDS,
        ),
        "no-head": make(
            "neither embedding nor head: the target's, full vocabulary",
            remove=("draft_vocab_size",),
            tensors=_drop("embed_tokens.", "lm_head.", "d2t", "t2d"),
            wrong={**NO_EMBED, **NO_HEAD},
        ),
        "own-embed": make(
            "an embedding other than the target's", tensors=_own_embed, wrong=SHARED_EMBED
        ),
        "own-head": make(
            "a head other than the target's, full vocabulary",
            config=full,
            tensors=_pipe(whole, _own_head),
            same_counts_as=f"{family}-full-vocab" if reduced else base,
            wrong=SHARED_HEAD,
        ),
        "sharded": make("three files and an index", shards=3, same_counts_as=base),
        "short": make(
            "max_position_embeddings below the length of prompt and output",
            config={"max_position_embeddings": 64},
            same_counts_as=base,
        ),
    }
    return {f"{family}-{name}": variant for name, variant in table.items()}


THETA_10000 = {"theta 10000": WrongWay(_rope(rope_theta=10000.0))}
NO_YARN = {"no YaRN": WrongWay(_rope(rope_theta=50000.0))}


def _yarn_5x(yarn: Config) -> ConfigEdit:
    """YaRN with theta 50000 as Transformers 5 writes it."""
    rope = {key: value for key, value in yarn.items() if key != "type"}
    return _rope(rope_parameters={**rope, "rope_type": "yarn", "rope_theta": 50000.0})


def _llama_only() -> dict[str, Variant]:
    make = partial(Variant, source=LLAMA_DRAFTER)
    yarn_wrong = {
        **NO_YARN,
        "mscale and mscale_all_dim ignored": WrongWay(
            _rope(
                rope_theta=50000.0,
                rope_scaling={k: v for k, v in LLAMA_YARN.items() if k[:6] != "mscale"},
            )
        ),
    }
    as_library = _pipe(_rename("midlayer.", "layers.0."), _target_embedding)
    return {
        "llama-full-vocab": make(
            "full vocabulary, no d2t",
            config={"draft_vocab_size": VOCAB_SIZE},
            tensors=_full_vocabulary,
            wrong=SHARED_HEAD,
        ),
        "llama-layers0-names": make(
            "the layer named layers.0.",
            tensors=_rename("midlayer.", "layers.0."),
            same_counts_as=LLAMA_DRAFTER.name,
        ),
        "llama-yarn": make(
            "YaRN as TorchSpec writes it",
            config=_rope(rope_theta=50000.0, rope_scaling=LLAMA_YARN),
            wrong=yarn_wrong,
        ),
        "llama-yarn-5x": make(
            "YaRN in Transformers 5's layout",
            config=_yarn_5x(LLAMA_YARN),
            same_counts_as="llama-yarn",
            wrong=yarn_wrong,
        ),
        "llama-theta": make(
            "plain rope with theta 1e6",
            config=_rope(rope_theta=1e6, rope_scaling=None),
            wrong=THETA_10000,
        ),
        "llama-theta-5x": make(
            "plain rope with theta 1e6 in Transformers 5's layout",
            config=_rope(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
            same_counts_as="llama-theta",
            wrong=THETA_10000,
        ),
        "speculators": make(
            "the speculators library's layout",
            config=_speculators(norm_before_residual=False),
            tensors=as_library,
            same_counts_as=LLAMA_DRAFTER.name,
            wrong={
                **IDS_SHIFTED,
                "norm_before_residual taken as true": WrongWay({"norm_before_residual": True}),
            },
        ),
        "speculators-eagle31": make(
            "the speculators library's layout, with fc_norm and norm_output",
            config=_speculators(fc_norm=True, norm_output=True, norm_before_residual=False),
            tensors=_pipe(as_library, _fc_norm, _norm_output),
            same_counts_as="llama-eagle31",
            wrong=NO_EAGLE31,
        ),
        "speculators-norm-before-fc": make(
            "the speculators library's layout, with norm_before_fc",
            config=_speculators(norm_before_fc=True, norm_before_residual=False),
            tensors=_pipe(as_library, _norm_before_fc),
            same_counts_as="llama-norm-before-fc",
            wrong=NO_NORM_BEFORE_FC,
        ),
        "speculators-norm-before-residual": make(
            "the speculators library's layout, with norm_before_residual",
            config=_speculators(norm_before_residual=True),
            tensors=_pipe(as_library, _norm_before_residual),
            same_counts_as="llama-norm-before-residual",
            wrong=NO_NORM_BEFORE_RESIDUAL,
        ),
    }


def _mla_only() -> dict[str, Variant]:
    make = partial(Variant, source=MLA_DRAFTER)
    plain_wrong = {
        **THETA_10000,
        "the target's YaRN": WrongWay(_rope(rope_theta=1e6, rope_scaling=YARN)),
    }
    return {
        "mla-reduced-vocab": make(
            "320 tokens, d2t and t2d",
            config={"draft_vocab_size": 320},
            tensors=_reduced_vocabulary,
            wrong=D2T_IGNORED,
        ),
        "mla-midlayer-names": make(
            "the layer named midlayer.",
            tensors=_rename("layers.0.", "midlayer."),
            same_counts_as=MLA_DRAFTER.name,
        ),
        "mla-plain-rope": make(
            "plain rope with theta 1e6: rope_theta and no rope_scaling",
            config=_rope(rope_theta=1e6),
            tensors=_softmax_scale_of_yarn,
            wrong=plain_wrong,
        ),
        "mla-plain-rope-5x": make(
            "plain rope with theta 1e6 in Transformers 5's layout",
            config=_rope(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
            tensors=_softmax_scale_of_yarn,
            same_counts_as="mla-plain-rope",
            wrong=plain_wrong,
        ),
        "mla-yarn-5x": make(
            "YaRN in Transformers 5's layout",
            config=_yarn_5x(YARN),
            same_counts_as=MLA_DRAFTER.name,
            wrong={
                **NO_YARN,
                "theta 10000": WrongWay(_rope(rope_theta=10000.0, rope_scaling=YARN)),
            },
        ),
    }


VARIANTS: dict[str, Variant] = {
    **_of_both_families("llama", LLAMA_DRAFTER),
    **_of_both_families("mla", MLA_DRAFTER),
    **_llama_only(),
    **_mla_only(),
}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _read_tensors(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def _save(tensors: Tensors, folder: Path, shards: int = 1) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        names = sorted(tensors)[number::shards]
        save_file({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    total_size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
