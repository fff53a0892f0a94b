# SPDX-License-Identifier: Apache-2.0
"""Trains and writes the tiny checkpoints, the prompts and the expected results.

    python tests/assets/build.py [--out DIR] [--from STAGE] [--scale FACTOR]

Needs torch (CPU), tokenizers and safetensors; one thread, some ten minutes, and as many for the
variants. The procedure is seeded, but another torch or another CPU rounds differently, and a
rebuild then has other weights: commit the folders, `prompts.json` and `expected.json` together.
`--from variants` trains nothing and leaves the committed drafters' rows alone: for a change of
`variants.py`.

Text: the repository's LICENSE and `corpus/` (written for this). The target is trained until it
nearly knows the text by heart, so that greedy continuations of prompts cut from it have clear
margins; the drafters are trained briefly, so that acceptance is high but not total and falls with
the position.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

ASSETS = Path(__file__).resolve().parent
REPOSITORY = ASSETS.parent.parent
sys.path.insert(0, str(REPOSITORY))

from tests.assets import variants  # noqa: E402
from tests.reference.drafter import Drafter, load_drafter  # noqa: E402
from tests.reference.layers import KvCache, causal_visibility  # noqa: E402
from tests.reference.speculate import (  # noqa: E402
    ReferenceDrafter,
    ReferenceTarget,
    SpeculationCounts,
    speculate,
)
from tests.reference.target import Target, TargetOutput, load_target  # noqa: E402

TARGET_FOLDER = "kimi-k2.5-tiny"
STAGES = ("target", "drafters", "expected", "variants")

SPECIAL_TOKENS = [
    "<|pad|>",
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
]
PAD, BOS, EOS = 0, 1, 2
MEDIA_PAD = SPECIAL_TOKENS.index("<|media_pad|>")
VOCAB_SIZE = 512
DRAFT_VOCAB_SIZE = 320

SEQUENCE_LENGTH = 128  # tokens of a training sample
BATCH_SIZE = 4
TARGET_STEPS = 800
DRAFTER_STEPS = 2000
DRAFT_STEPS_TRAINED = 3  # how many draft steps the drafter's loss unrolls

NUM_PROMPTS = 8
PROMPT_LENGTH = 64
MAX_TOKENS = 96
AUX_LAYER_IDS = [2, 4, 5]  # vLLM's default (2, n // 2, n - 3) for n = 8
OTHER_AUX_LAYER_IDS = [[3, 5, 6], [1, 3, 4], [0, 4, 8], [1, 4, 8], [2, 4, 8], [0, 1, 2]]

# ---------------------------------------------------------------------------------------- configs

YARN = {
    "type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

# kv_lora_rank 512 and qk_rope_head_dim 64 are what vLLM's CPU MLA back-end is compiled for. Four
# heads and an expert width of 128 leave two heads and 64 (the CPU expert kernel's tile) per rank of
# two. YaRN stands for the real model's; without it the CPU build's logits differ from plain torch.
TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 192,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "dtype": "bfloat16",
}

VISION_WIDTH, VISION_HEADS, VISION_LAYERS, VISION_MLP_WIDTH = 32, 2, 2, 64
VISION_PATCH, VISION_GRID, VISION_TIME = 14, 8, 4

# The published config has the `vt_` and `init_` names only. Transformers' own class, which vLLM
# uses from 0.32, reads the other spelling, and without it takes the full model's sizes.
VISION_CONFIG: dict[str, Any] = {
    "model_type": "kimi_k25_vision",
    "patch_size": VISION_PATCH,
    "init_pos_emb_height": VISION_GRID,
    "init_pos_emb_width": VISION_GRID,
    "init_pos_emb_time": VISION_TIME,
    "pos_emb_height": VISION_GRID,
    "pos_emb_width": VISION_GRID,
    "pos_emb_time": VISION_TIME,
    "pos_emb_type": "divided_fixed",
    "vt_hidden_size": VISION_WIDTH,
    "vt_num_attention_heads": VISION_HEADS,
    "vt_num_hidden_layers": VISION_LAYERS,
    "vt_intermediate_size": VISION_MLP_WIDTH,
    "hidden_size": VISION_WIDTH,
    "num_attention_heads": VISION_HEADS,
    "num_hidden_layers": VISION_LAYERS,
    "intermediate_size": VISION_MLP_WIDTH,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "video_attn_type": "spatial_temporal",
    "mm_projector_type": "patchmerger",
    "mm_hidden_size": VISION_WIDTH,
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5,
    "text_hidden_size": TEXT_CONFIG["hidden_size"],
}

IMAGE_PROCESSOR_SOURCE = ASSETS / TARGET_FOLDER / "image_processing_tiny.py"
IMAGE_PROCESSOR = "image_processing_tiny.TinyKimiImageProcessor"

# image_token_id is not in the published config: vLLM 0.32 and later read that key, and its default
# there (163605, the full model's token) lies outside this vocabulary.
TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "ignore_index": -100,
    "media_placeholder_token_id": MEDIA_PAD,
    "image_token_id": MEDIA_PAD,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "tie_word_embeddings": False,
    "projection_hidden_size": TEXT_CONFIG["hidden_size"],
    "auto_map": {"AutoImageProcessor": IMAGE_PROCESSOR},
    "text_config": TEXT_CONFIG,
    "vision_config": VISION_CONFIG,
}

PREPROCESSOR_CONFIG: dict[str, Any] = {
    "image_processor_type": "TinyKimiImageProcessor",
    "auto_map": {"AutoImageProcessor": IMAGE_PROCESSOR},
    "media_proc_cfg": {
        "in_patch_limit": 256,
        "patch_size": VISION_PATCH,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 16,
        "in_patch_limit_each_frame": 64,
        "in_patch_limit_video": 1024,
        "temporal_merge_kernel_size": VISION_TIME,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "timestamp_mode": "hh:mm:ss.fff",
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
    },
}

EAGLE_CONFIG = {
    "use_aux_hidden_state": True,
    "eagle_aux_hidden_state_layer_ids": AUX_LAYER_IDS,
}

LLAMA_DRAFTER_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB_SIZE,
    "hidden_size": TEXT_CONFIG["hidden_size"],
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "dtype": "bfloat16",
    "eagle_config": EAGLE_CONFIG,
}

MLA_DRAFTER_CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": VOCAB_SIZE,
    "hidden_size": TEXT_CONFIG["hidden_size"],
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "dtype": "bfloat16",
    "eagle_config": EAGLE_CONFIG,
}

DRAFTERS = {"eagle3-llama-tiny": LLAMA_DRAFTER_CONFIG, "eagle3-mla-tiny": MLA_DRAFTER_CONFIG}

# -------------------------------------------------------------------------------- text, tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|media_begin|>image<|media_content|><|media_pad|><|media_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>{% endif %}"
)


def read_corpus() -> str:
    """The training text: the LICENSE, then `corpus/` by name."""
    files = [REPOSITORY / "LICENSE", *sorted((ASSETS / "corpus").glob("*.txt"))]
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE whose first ids are `SPECIAL_TOKENS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS],
            "eos_token": SPECIAL_TOKENS[EOS],
            "pad_token": SPECIAL_TOKENS[PAD],
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


# --------------------------------------------------------------------------------------- training


def initialize(module: nn.Module, residual_gain: float = 0.5) -> None:
    """Normal weights of variance 1 / fan-in, smaller where a layer adds to the residual stream."""
    for name, parameter in module.named_parameters():
        if parameter.dim() != 2:
            continue  # norms keep their ones
        if "embed_tokens" in name:
            nn.init.normal_(parameter, std=1.0)
        else:
            gain = residual_gain if "o_proj" in name or "down_proj" in name else 1.0
            nn.init.normal_(parameter, std=gain / math.sqrt(parameter.shape[1]))


def minimize(
    label: str,
    parameters: Iterable[nn.Parameter],
    loss_function: Callable[[], Tensor],
    num_steps: int,
    learning_rate: float,
) -> None:
    """AdamW with a short warm-up and a linear decay."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    started, smoothed = time.monotonic(), None
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 30) * (1 - 0.95 * step / num_steps)
        loss = loss_function()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        smoothed = loss.item() if smoothed is None else 0.95 * smoothed + 0.05 * loss.item()
        if (step + 1) % 100 == 0 or step + 1 == num_steps:
            seconds = time.monotonic() - started
            progress = f"step {step + 1}/{num_steps} loss {smoothed:.3f} {seconds:.0f} s"
            print(f"{label}: {progress}", flush=True)


def round_to_bfloat16(module: nn.Module) -> None:
    """Makes the float32 weights equal to what a bfloat16 checkpoint of them holds."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16().float())


def sample_batch(token_ids: Tensor, length: int) -> Tensor:
    """Random stretches of the text, int64 `[BATCH_SIZE, length]`."""
    starts = torch.randint(0, len(token_ids) - length, (BATCH_SIZE,))
    return torch.stack([token_ids[start : start + length] for start in starts.tolist()])


def train_target(token_ids: Tensor, num_steps: int) -> Target:
    torch.manual_seed(0)
    target = Target(TEXT_CONFIG)
    initialize(target)
    for layer in target.model.layers[TEXT_CONFIG["first_k_dense_replace"] :]:
        # large enough that choosing by biased and by plain score differ, as in the real model
        layer.mlp.gate.e_score_correction_bias.normal_(std=0.05)

    def next_token_loss() -> Tensor:
        batch = sample_batch(token_ids, SEQUENCE_LENGTH + 1)
        logits = target(batch[:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    minimize("target", target.parameters(), next_token_loss, num_steps, learning_rate=4e-3)
    round_to_bfloat16(target)
    return target.eval().requires_grad_(False)


def unrolled_loss(drafter: Drafter, batch: Tensor, output: TargetOutput) -> Tensor:
    """EAGLE-3's training-time test: each position drafts several tokens from its own hidden state.

    Draft step `s` of the chain that starts at position `t` reads token `t + 1 + s`, sits at
    position `t + s`, and sees the target-conditioned entries up to `t` and its own chain's steps
    1..s, which is what the drafter's KV cache holds in the draft-verify loop. It learns the
    target's distribution at position `t + 1 + s`, over the draft vocabulary. `batch` is
    `[B, T]`, `output` what the target made of it.
    """
    probabilities = output.logits.softmax(dim=-1)[..., drafter.draft_to_target]
    probabilities = probabilities / (probabilities.sum(dim=-1, keepdim=True) + 1e-9)
    length = batch.shape[1]
    diagonal = torch.eye(length, dtype=torch.bool)
    visibility = causal_visibility(length, 0)
    hidden_states, cache, loss = drafter.combine(output.aux_hidden_states), KvCache(), 0.0
    for step in range(DRAFT_STEPS_TRAINED):
        if step > 0:
            visibility = torch.cat((visibility, diagonal), dim=1)
        logits, hidden_states = drafter(
            batch.roll(-(1 + step), dims=1),
            hidden_states,
            torch.arange(step, length + step),
            cache,
            visibility,
        )
        num_valid = length - 1 - step  # chains whose input token lies inside the sample
        wanted = probabilities.roll(-(1 + step), dims=1)[:, :num_valid]
        log_probabilities = logits[:, :num_valid].log_softmax(dim=-1)
        loss = loss - 0.8**step * (wanted * log_probabilities).sum(dim=-1).mean()
    return loss


def train_drafter(
    config: dict[str, Any], target: Target, token_ids: Tensor, num_steps: int
) -> Drafter:
    """Trains a drafter; one with a reduced vocabulary keeps the text's most frequent tokens.

    It starts as the target's own read-out (final norm, LM head) of the highest aux layer, which
    saves most of the training.
    """
    torch.manual_seed(0)
    drafter = Drafter(config, target.config["hidden_size"])
    initialize(drafter)
    drafter.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
    if config["draft_vocab_size"] < VOCAB_SIZE:
        frequencies = torch.bincount(token_ids, minlength=VOCAB_SIZE)
        most_frequent = frequencies.topk(config["draft_vocab_size"]).indices
        drafter.draft_to_target = most_frequent.sort().values
        drafter.embed_tokens.requires_grad_(False)  # shared with the target
    with torch.no_grad():
        drafter.fc.weight.mul_(0.1)
        drafter.fc.weight[:, -target.config["hidden_size"] :].add_(torch.eye(config["hidden_size"]))
        drafter.norm.weight.copy_(target.model.norm.weight)
        drafter.lm_head.weight.copy_(target.lm_head.weight[drafter.draft_to_target])
    # what the target makes of every sample is computed once
    starts = range(0, len(token_ids) - SEQUENCE_LENGTH, SEQUENCE_LENGTH // 4)
    samples = torch.stack([token_ids[start : start + SEQUENCE_LENGTH] for start in starts])
    with torch.no_grad():
        outputs = [target(chunk, aux_layer_ids=AUX_LAYER_IDS) for chunk in samples.split(16)]
    logits = torch.cat([output.logits for output in outputs])
    aux_hidden_states = torch.cat([output.aux_hidden_states for output in outputs])

    def sampled_loss() -> Tensor:
        chosen = torch.randint(0, len(samples), (BATCH_SIZE,))
        output = TargetOutput(logits[chosen], aux_hidden_states[chosen])
        return unrolled_loss(drafter, samples[chosen], output)

    parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    minimize(config["architectures"][0], parameters, sampled_loss, num_steps, learning_rate=3e-3)
    return drafter


# ---------------------------------------------------------------------------------------- writing


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def vision_tensors() -> dict[str, Tensor]:
    """Random weights for the vision tower and the projector, under the published names."""
    torch.manual_seed(1)
    width, text_width, merged = VISION_WIDTH, TEXT_CONFIG["hidden_size"], 4 * VISION_WIDTH
    tensors: dict[str, Tensor] = {}

    def add_linear(name: str, output_size: int, input_size: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(output_size, input_size) / math.sqrt(input_size)
        tensors[f"{name}.bias"] = torch.zeros(output_size)

    def add_norm(name: str) -> None:
        tensors[f"{name}.weight"] = torch.ones(width)
        tensors[f"{name}.bias"] = torch.zeros(width)

    patch = VISION_PATCH
    tensors["vision_tower.patch_embed.proj.weight"] = torch.randn(width, 3, patch, patch) / patch
    tensors["vision_tower.patch_embed.proj.bias"] = torch.zeros(width)
    tensors["vision_tower.patch_embed.pos_emb.weight"] = torch.randn(
        VISION_GRID, VISION_GRID, width
    )
    for index in range(VISION_LAYERS):
        block = f"vision_tower.encoder.blocks.{index}"
        add_norm(f"{block}.norm0")
        add_norm(f"{block}.norm1")
        add_linear(f"{block}.wqkv", 3 * width, width)
        add_linear(f"{block}.wo", width, width)
        add_linear(f"{block}.mlp.fc0", VISION_MLP_WIDTH, width)
        add_linear(f"{block}.mlp.fc1", width, VISION_MLP_WIDTH)
    add_norm("vision_tower.encoder.final_layernorm")
    add_norm("mm_projector.pre_norm")
    add_linear("mm_projector.proj.0", merged, merged)
    add_linear("mm_projector.proj.2", text_width, merged)
    return tensors


def to_checkpoint_dtype(name: str, tensor: Tensor) -> Tensor:
    """bfloat16, but for integers and the routing bias (float32 in the real checkpoint too)."""
    keep = not tensor.is_floating_point() or name.endswith("e_score_correction_bias")
    return (tensor if keep else tensor.bfloat16()).detach().contiguous()


def write_target(folder: Path, target: Target, tokenizer: Tokenizer) -> None:
    """Writes the Kimi-K2.5 folder, its tensors in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"language_model.{name}": tensor for name, tensor in target.state_dict().items()}
    tensors.update(vision_tensors())
    tensors = {name: to_checkpoint_dtype(name, tensor) for name, tensor in tensors.items()}
    total_size = sum(tensor.nbytes for tensor in tensors.values())
    shards: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    written = 0
    for name, tensor in tensors.items():
        shards[2 * written >= total_size][name] = tensor
        written += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)

    write_json(folder / "config.json", TARGET_CONFIG)
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False}
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "preprocessor_config.json", PREPROCESSOR_CONFIG)
    if folder.resolve() != IMAGE_PROCESSOR_SOURCE.parent:
        shutil.copy(IMAGE_PROCESSOR_SOURCE, folder)
    write_tokenizer(folder, tokenizer)


def write_drafter(folder: Path, drafter: Drafter, tokenizer: Tokenizer) -> None:
    """Writes a drafter folder: MLA as `layers.0.`, Llama as `midlayer.` with d2t and t2d."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = drafter.state_dict()
    if drafter.config["model_type"] == "llama":
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
        del tensors["embed_tokens.weight"]
        draft_to_target = drafter.draft_to_target
        tensors["d2t"] = draft_to_target - torch.arange(len(draft_to_target))
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        tensors["t2d"][draft_to_target] = True
    tensors = {name: to_checkpoint_dtype(name, tensor) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", drafter.config)
    write_tokenizer(folder, tokenizer)


# ---------------------------------------------------------------------------- prompts, expectation


@torch.no_grad()
def greedy_batch(target: Target, prompts: Tensor, max_tokens: int) -> tuple[Tensor, Tensor]:
    """Greedy continuations `[B, max_tokens]` of prompts `[B, T]`, and each step's top-2 margin."""
    caches, token_ids, outputs, margins = target.new_caches(), prompts, [], []
    for _ in range(max_tokens):
        best = target(token_ids, caches).logits[:, -1].topk(2, dim=-1)
        token_ids = best.indices[:, :1]
        outputs.append(token_ids)
        margins.append(best.values[:, :1] - best.values[:, 1:])
    return torch.cat(outputs, dim=1), torch.cat(margins, dim=1)


def run_speculation(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    num_speculative_tokens: int,
    aux_layer_ids: Sequence[int] | None = AUX_LAYER_IDS,
) -> tuple[list[list[int]], dict[str, Any]]:
    """Output tokens of every prompt, and one row of `expected.json`."""
    counts = SpeculationCounts.zero(num_speculative_tokens)
    outputs, min_margin = [], math.inf
    for prompt in prompts:
        session = ReferenceDrafter(drafter)
        result = speculate(
            ReferenceTarget(target, aux_layer_ids),
            session,
            prompt,
            num_speculative_tokens,
            MAX_TOKENS,
        )
        counts.add(result.counts)
        outputs.append(result.output_token_ids)
        min_margin = min(min_margin, session.min_margin)
    row = {
        "num_speculative_tokens": num_speculative_tokens,
        "aux_layer_ids": list(aux_layer_ids or ()),
        "num_drafts": counts.num_drafts,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_accepted_tokens": counts.num_accepted_tokens,
        "num_accepted_tokens_per_pos": counts.num_accepted_tokens_per_pos,
        "min_draft_margin": round(min_margin, 4),
    }
    return outputs, row


def choose_prompts(
    target: Target, drafters: Sequence[Drafter], token_ids: Tensor
) -> list[list[int]]:
    """One prompt from each eighth of the text: the one whose closest decision is clearest.

    Rounding differs between machines and back-ends; where the two highest logits are nearly equal
    it decides the token, or the draft. So of each region's starts the one is taken whose smallest
    margin, over the target's tokens and both drafters' drafts, is largest.
    """
    starts = torch.arange(0, len(token_ids) - PROMPT_LENGTH - MAX_TOKENS, 24)
    prompts = torch.stack([token_ids[start : start + PROMPT_LENGTH] for start in starts.tolist()])
    _, margins = greedy_batch(target, prompts, MAX_TOKENS + 8)  # the last verify step looks past it
    target_margins = margins.min(dim=1).values
    chosen = []
    for region in torch.arange(len(prompts)).chunk(NUM_PROMPTS):
        clearest = region[target_margins[region].argsort(descending=True)[:5]]
        scores = []
        for index in clearest.tolist():
            rows = [
                run_speculation(target, drafter, [prompts[index].tolist()], 3)[1]
                for drafter in drafters
            ]
            draft_margin = min(row["min_draft_margin"] for row in rows)
            scores.append(min(target_margins[index].item(), 2 * draft_margin))
        best = clearest[max(range(len(scores)), key=scores.__getitem__)]
        chosen.append(prompts[best].tolist())
    return chosen


def write_expected(out: Path, tokenizer: Tokenizer, token_ids: Tensor) -> None:
    """Reads the written checkpoints back, chooses prompts and records what the reference does."""
    target = load_target(out / TARGET_FOLDER)
    drafters = {name: load_drafter(out / name, target) for name in DRAFTERS}
    prompts = choose_prompts(target, list(drafters.values()), token_ids)
    write_json(
        out / "prompts.json",
        [{"token_ids": prompt, "text": tokenizer.decode(prompt)} for prompt in prompts],
    )
    greedy, margins = greedy_batch(target, torch.tensor(prompts), MAX_TOKENS)
    expected: dict[str, Any] = {
        "about": "Greedy, end-of-sequence ignored; the output tokens are the same for every run.",
        "max_tokens": MAX_TOKENS,
        "min_target_margin": round(margins.min().item(), 4),
        "output_token_ids": greedy.tolist(),
        "output_texts": [tokenizer.decode(output) for output in greedy.tolist()],
        "runs": {},
    }
    for name, drafter in drafters.items():
        cases = [(3, AUX_LAYER_IDS), (1, AUX_LAYER_IDS), (2, AUX_LAYER_IDS), (5, AUX_LAYER_IDS)]
        cases += [(3, aux_layer_ids) for aux_layer_ids in OTHER_AUX_LAYER_IDS]
        rows = []
        for num_speculative_tokens, aux_layer_ids in cases:
            outputs, row = run_speculation(
                target, drafter, prompts, num_speculative_tokens, aux_layer_ids
            )
            if outputs != greedy.tolist():
                raise RuntimeError(f"{name} {row}: speculation changed the output")
            print(name, row)
            rows.append(row)
        expected["runs"][name] = rows
    write_json(out / "expected.json", expected)


def write_variant_rows(out: Path) -> None:
    """Adds to `expected.json` what the reference does with each drafter of `variants.py`.

    `runs` gets the row of each variant, `variants` the digest of its folder and the rows of the
    ways to get it wrong.
    """
    expected = json.loads((out / "expected.json").read_text(encoding="utf-8"))
    expected["runs"] = {name: expected["runs"][name] for name in DRAFTERS}
    expected["variants"] = {}
    target = load_target(out / TARGET_FOLDER)
    prompts = json.loads((out / "prompts.json").read_text(encoding="utf-8"))
    prompts = [prompt["token_ids"] for prompt in prompts]

    def run(label: str, folder: Path, aux_layer_ids: Sequence[int]) -> dict[str, Any]:
        drafter = load_drafter(folder, target)
        outputs, row = run_speculation(target, drafter, prompts, 3, aux_layer_ids or None)
        if outputs != expected["output_token_ids"]:
            raise RuntimeError(f"{label} {row}: speculation changed the output")
        print(label, row, flush=True)
        return row

    for name, variant in variants.VARIANTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "right"
            variants.write_variant(name, folder, out / variant.source.name)
            expected["runs"][name] = [run(name, folder, variant.aux_layer_ids)]
            wrong = {}
            for way, edit in variant.wrong.items():
                wrong_folder = variants.edit_drafter(
                    folder, Path(scratch) / way, edit.config, edit.remove, edit.tensors
                )
                ids = variant.aux_layer_ids if edit.aux_layer_ids is None else edit.aux_layer_ids
                wrong[way] = run(f"{name}, {way}", wrong_folder, ids)
            expected["variants"][name] = {
                "sha256": variants.folder_digest(folder),
                "wrong": wrong,
            }
    write_json(out / "expected.json", expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ASSETS, help="where to write (default: here)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the training steps")
    parser.add_argument(
        "--from",
        dest="first_stage",
        choices=STAGES,
        default=STAGES[0],
        help="first stage to run; what the stages before it wrote is read back",
    )
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # products this small gain nothing from a second one
    text = read_corpus()
    tokenizer = train_tokenizer(text)
    token_ids = torch.tensor(tokenizer.encode(text).ids)
    print(f"{len(text)} characters, {len(token_ids)} tokens")
    stages = STAGES[STAGES.index(arguments.first_stage) :]
    if "target" in stages:
        target = train_target(token_ids, max(1, round(TARGET_STEPS * arguments.scale)))
        write_target(arguments.out / TARGET_FOLDER, target, tokenizer)
    if "drafters" in stages:
        target = load_target(arguments.out / TARGET_FOLDER)
        for name, config in DRAFTERS.items():
            num_steps = max(1, round(DRAFTER_STEPS * arguments.scale))
            drafter = train_drafter(config, target, token_ids, num_steps)
            write_drafter(arguments.out / name, drafter, tokenizer)
    if "expected" in stages:
        write_expected(arguments.out, tokenizer, token_ids)
    write_variant_rows(arguments.out)


if __name__ == "__main__":
    main()
