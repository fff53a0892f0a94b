# SPDX-License-Identifier: Apache-2.0
"""How many bytes of a Kimi's weights each rank holds, from the files' headers or from config.json.

Which tensors are split over the ranks follows from the layers that ``deepseek_v2.py``,
``kimi_k25.py`` and ``kimi_k25_vit.py`` build, 0.15 to 0.33.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

from vllm_kimi_eagle3.checkpoint.tensors import TensorInfo

from .command import Command
from .facts import Facts

# ``_mark_tower_model`` leaves the vision tower out where no images may come, from this release.
_TOWER_LEFT_OUT = "0.16"
MODALITY = "vision_chunk"  # What Kimi calls an image or a part of a video.

# Back-ends with which the MoE layers run on a part of the tokens each, the shared experts whole
# (``ParallelConfig.use_sequence_parallel_moe``).
_SEQUENCE_PARALLEL = ("deepep_", "mori", "nixl_ep", "allgather_reducescatter", "naive")


class Split(Enum):
    """How a tensor is spread over the ranks."""

    EXPERTS = "over all tensor- and data-parallel ranks"
    SHARED_EXPERTS = "over the tensor-parallel ranks, but with sequence-parallel MoE on each"
    RANKS = "over the tensor-parallel ranks"
    EACH = "on each rank"
    VISION = "over the tensor-parallel ranks, but with --mm-encoder-tp-mode data on each"
    VISION_EACH = "on each rank, where images are allowed"
    UNUSED = "not loaded"


# ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding and ParallelLMHead are split.
# fused_qkv_a_proj has disable_tp, the router's gate and the projector are ReplicatedLinear.
_SPLIT_IN_A_LAYER = re.compile(
    r"self_attn\.(q_b_proj|q_proj|kv_b_proj|o_proj)\.|mlp\.(gate_proj|up_proj|down_proj)\."
)
_VISION_SPLIT = re.compile(r"vision_tower\..*\.(wqkv|wo|fc0|fc1)\.")
_LAYER = re.compile(r"(?:language_model\.)?model\.layers\.(\d{1,6})\.")
_TOP = re.compile(r"(?:language_model\.)?(?:lm_head|model\.embed_tokens)\.")

# Linear layers of a drafter that are split over the ranks; fc, fused_qkv_a_proj and norms are not.
_SPLIT_IN_A_DRAFTER = re.compile(
    r"(^|\.)(embed_tokens|lm_head|[qkvo]_proj|qkv_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|"
    r"gate_up_proj|down_proj)\."
)

_BF16_BITS = 16.0
# Of a group of weights one scale: bits per weight, for groups as each format has them.
_MXFP4_BITS = 4 + 8 / 32
_NVFP4_BITS = 4 + 8 / 16


@dataclass(frozen=True)
class Parallel:
    """Over how many ranks what is spread, from the command.

    Attributes:
        tensor: tensor-parallel ranks of one replica.
        pipeline: pipeline stages.
        experts: the ranks that the routed experts are spread over.
        decode_context: ranks that each hold a part of a request's KV cache.
        whole_experts: each rank holds whole experts (``--enable-expert-parallel``).
        redundant_experts: copies of experts that the load balancer adds.
        shared_experts_on_each: as the name says.
        vision_on_each: ``--mm-encoder-tp-mode data``.
        vision: the vision tower is loaded.
    """

    tensor: int = 1
    pipeline: int = 1
    experts: int = 1
    decode_context: int = 1
    whole_experts: bool = False
    redundant_experts: int = 0
    shared_experts_on_each: bool = False
    vision_on_each: bool = False
    vision: bool = True

    @classmethod
    def of(cls, command: Command, facts: Facts | None) -> Parallel:
        """The layout that a command asks for. Values that vLLM refuses count as 1."""

        def ranks(name: str) -> int:
            value = command.integer(name)
            return value if value is not None and 0 < value <= 2**20 else 1

        tensor, data = ranks("tensor-parallel-size"), ranks("data-parallel-size")
        whole = command.switch("enable-expert-parallel") is True
        backend = command.text("all2all-backend")
        extra = (command.object("eplb-config") or {}).get("num_redundant_experts")
        if command.integer("num-redundant-experts") is not None:
            extra = command.integer("num-redundant-experts")
        return cls(
            tensor=tensor,
            pipeline=ranks("pipeline-parallel-size"),
            experts=tensor * data * ranks("prefill-context-parallel-size"),
            decode_context=ranks("decode-context-parallel-size"),
            whole_experts=whole,
            redundant_experts=extra if isinstance(extra, int) and 0 < extra <= 2**20 else 0,
            shared_experts_on_each=whole
            and tensor > 1
            and data > 1
            and (backend is None or backend.startswith(_SEQUENCE_PARALLEL)),
            vision_on_each=command.text("mm-encoder-tp-mode") == "data",
            vision=takes_images(command) or facts is None or facts.before(_TOWER_LEFT_OUT),
        )


def takes_images(command: Command) -> bool:
    """False if the command turns images off for a multimodal Kimi."""
    if command.switch("language-model-only"):
        return False
    limit = (command.object("limit-mm-per-prompt") or {}).get(MODALITY)
    if isinstance(limit, Mapping):
        limit = limit.get("count")
    return isinstance(limit, bool) or limit != 0


@dataclass
class Tally:
    """Bytes of weights by how they are spread.

    Attributes:
        bytes: for each way of spreading.
        num_experts: routed experts in a layer.
        latent_copies: bytes of 16-bit copies of quantised kv_b_proj weights, which MLA makes after
            loading (``process_weights_after_loading``; 16-bit weights are viewed and not copied).
        estimated: they follow from the config.
        head: there is an ``lm_head``.
    """

    bytes: dict[Split, int] = field(default_factory=lambda: dict.fromkeys(Split, 0))
    num_experts: int = 1
    latent_copies: int = 0
    estimated: bool = False
    head: bool = False

    @property
    def total(self) -> int:
        return sum(self.bytes.values()) - self.bytes[Split.UNUSED]

    def add(self, name: str, info: TensorInfo, num_layers: int) -> None:
        """Count a tensor of the checkpoint."""
        self.bytes[split_of(name, num_layers)] += info.nbytes
        if "lm_head." in name:
            self.head = True
        elif ".kv_b_proj.weight" in name and len(info.shape) == 2 and info.dtype[:2] in _QUANTISED:
            rows, columns = info.shape
            self.latent_copies += rows * columns * _PACKED.get(info.dtype, 1) * 2

    def per_rank(self, parallel: Parallel) -> int:
        """Bytes on each rank; with a pipeline those of an even share of the layers."""
        b = self.bytes
        routed = self.num_experts + parallel.redundant_experts
        experts = b[Split.EXPERTS] * routed / self.num_experts / parallel.experts
        if parallel.whole_experts:
            share = math.ceil(routed / parallel.experts)
            experts = b[Split.EXPERTS] * share / self.num_experts
        split, each = b[Split.RANKS] + self.latent_copies, b[Split.EACH]
        if parallel.shared_experts_on_each:
            each += b[Split.SHARED_EXPERTS]
        else:
            split += b[Split.SHARED_EXPERTS]
        if parallel.vision:
            each += b[Split.VISION_EACH]
            if parallel.vision_on_each:
                each += b[Split.VISION]
            else:
                split += b[Split.VISION]
        return math.ceil((experts + split / parallel.tensor + each) / parallel.pipeline)


_QUANTISED = ("F8", "I3", "U8", "I8", "F4")
_PACKED = {"I32": 8, "U8": 2}  # 4-bit weights in one element.


def split_of(name: str, num_layers: int) -> Split:
    """How vLLM spreads the tensor of that name in a target's checkpoint."""
    layer, expert, _ = name.partition(".mlp.experts.")
    if expert:
        within = _expert_layer_within if len(layer) < _LONG else _within
        return Split.EXPERTS if within(f"{layer}.", num_layers) else Split.UNUSED
    if name.startswith(("vision_tower.", "mm_projector.", "multi_modal_projector.")):
        return Split.VISION if _VISION_SPLIT.match(name) else Split.VISION_EACH
    if _TOP.match(name):
        return Split.RANKS
    if "rotary_emb.inv_freq" in name or not _within(name, num_layers):
        return Split.UNUSED
    if ".mlp.shared_experts." in name:
        return Split.SHARED_EXPERTS
    return Split.RANKS if _SPLIT_IN_A_LAYER.search(name) else Split.EACH


def drafter_ranks(name: str, parallel: Parallel) -> int:
    """Over how many ranks vLLM spreads the tensor of that name in a drafter's checkpoint."""
    return parallel.tensor if _SPLIT_IN_A_DRAFTER.search(name) else 1


def _within(name: str, num_layers: int) -> bool:
    """False for layers after the last, which hold an MTP head and are not loaded for a target."""
    match = _LAYER.match(name)
    return match is None or int(match[1]) < num_layers


# A layer has hundreds of experts, and a name out of a file is not kept if it is long.
_expert_layer_within = lru_cache(maxsize=256)(_within)
_LONG = 100


# ------------------------------------------------------------------------------- from config.json


def estimate(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> Tally | None:
    """The weights that a config describes; None where it does not say enough.

    Args:
        config: the target's config.json.
        quantization: what is said of its quantisation, or None.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        return None
    s = {key: _size(text, key, default) for key, default in _SIZES.items()}
    if any(value is None for value in s.values()):
        return None
    n = {key: value or 0 for key, value in s.items()}
    bits = _Bits.of(quantization)
    if bits is None:
        return None
    hidden, heads, latent = n["hidden_size"], n["num_attention_heads"], n["kv_lora_rank"]
    layers, dense = n["num_hidden_layers"], min(n["first_k_dense_replace"], n["num_hidden_layers"])
    rope, query = n["qk_rope_head_dim"], n["q_lora_rank"]
    moe = layers - dense
    b = {
        Split.EXPERTS: bits.experts
        * moe * n["n_routed_experts"] * 3 * hidden * n["moe_intermediate_size"],
        Split.SHARED_EXPERTS: bits.shared_experts
        * moe * n["n_shared_experts"] * 3 * hidden * n["moe_intermediate_size"],
        Split.RANKS: bits.attention * layers * (
            (query or hidden) * heads * (n["qk_nope_head_dim"] + rope)
            + latent * heads * (n["qk_nope_head_dim"] + n["v_head_dim"])
            + heads * n["v_head_dim"] * hidden
        )
        + bits.dense * dense * 3 * hidden * n["intermediate_size"]
        + _BF16_BITS * 2 * n["vocab_size"] * hidden,
        Split.EACH: bits.attention * layers * hidden * (query + latent + rope)
        + _BF16_BITS * (layers * (2 * hidden + query + latent) + hidden)
        + _BF16_BITS * moe * n["n_routed_experts"] * (hidden + 2),
    }  # fmt: skip
    tally = Tally(num_experts=max(n["n_routed_experts"], 1), estimated=True, head=True)
    tally.bytes.update({split: int(value / 8) for split, value in b.items()})
    if bits.attention < _BF16_BITS:
        values = latent * heads * (n["qk_nope_head_dim"] + n["v_head_dim"])
        tally.latent_copies = 2 * layers * values
    vision = config.get("vision_config")
    if isinstance(vision, Mapping):
        for split, parameters in _vision(vision, hidden):
            tally.bytes[split] += 2 * parameters
    return tally


def _vision(vision: Mapping[str, Any], text_hidden: int) -> Iterator[tuple[Split, int]]:
    """Parameters of MoonViT and the projector (``kimi_k25_vit.py``), sizes as Kimi-K2.5's."""

    def size(default: int, *names: str) -> int:
        return next((v for name in names if (v := _size(vision, name, None)) is not None), default)

    width = size(1152, "vt_hidden_size", "hidden_size")
    inner = size(4304, "vt_intermediate_size", "intermediate_size")
    layers = size(27, "vt_num_hidden_layers", "num_hidden_layers")
    merged = 4 * width
    yield Split.VISION, layers * (4 * width * width + 2 * width * inner + 5 * width + inner)
    grid = size(64, "init_pos_emb_height", "pos_emb_height")
    yield (
        Split.VISION_EACH,
        (
            width * (3 * size(14, "patch_size") ** 2 + grid * grid)
            + (merged + 1) * (merged + text_hidden)
            + (4 * layers + 5) * width
        ),
    )


# Keys of the text tower that the weights' size depends on, and what stands in for a missing one
# (None: nothing does).
_SIZES: Mapping[str, int | None] = {
    "num_hidden_layers": None,
    "hidden_size": None,
    "vocab_size": None,
    "intermediate_size": None,
    "moe_intermediate_size": None,
    "num_attention_heads": None,
    "n_routed_experts": None,
    "kv_lora_rank": None,
    "qk_nope_head_dim": None,
    "qk_rope_head_dim": None,
    "v_head_dim": None,
    "q_lora_rank": 0,
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
}


def _size(config: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = config.get(key)
    if value is None:
        return default
    return value if type(value) is int and 0 <= value < 2**31 else None


@dataclass(frozen=True)
class _Bits:
    """Bits per weight, scales included, by part of the model."""

    experts: float = _BF16_BITS
    shared_experts: float = _BF16_BITS
    attention: float = _BF16_BITS
    dense: float = _BF16_BITS

    @classmethod
    def of(cls, quantization: Mapping[str, Any] | None) -> _Bits | None:
        """None where the method is not one whose size is known here."""
        if quantization is None:
            return cls()
        bits = _bits(quantization)
        if bits is None:
            return None
        # Patterns out of a file are not run as regular expressions: one can take forever.
        lists = (
            quantization.get(key)
            for key in ("ignore", "exclude_modules", "exclude", "modules_to_not_convert")
        )
        left = " ".join(str(e)[:200] for entries in lists if isinstance(entries, list)
                        for e in entries[:10_000])  # fmt: skip
        return cls(
            experts=bits,
            shared_experts=_BF16_BITS if "shared_experts" in left else bits,
            attention=_BF16_BITS if "self_attn" in left else bits,
            dense=_BF16_BITS if _DENSE_LEFT_OUT.search(left) else bits,
        )


_DENSE_LEFT_OUT = re.compile(r"mlp\\?\.\(?(gate|up|down)|layers\.0\.mlp")


def _bits(quantization: Mapping[str, Any]) -> float | None:
    method = str(quantization.get("quant_method", quantization.get("quant_algo", ""))).lower()
    algo = str(quantization.get("quant_algo", "")).lower()
    if method.startswith("modelopt") or algo:
        return _NVFP4_BITS if "fp4" in method + algo else 8.0 if "fp8" in algo else None
    if method == "fp8":
        block = quantization.get("weight_block_size")
        sizes = list(block) if isinstance(block, list) and len(block) == 2 else [2**15, 2**15]
        if not all(type(size) is int and 0 < size < 2**31 for size in sizes):
            return None
        return 8 + 32 / (sizes[0] * sizes[1])
    if method == "mxfp4":
        return _MXFP4_BITS
    if method == "quark":
        return _MXFP4_BITS if "fp4" in str(quantization.get("global_quant_config"))[:10_000] else 8
    groups = quantization.get("config_groups")
    if method == "compressed-tensors" and isinstance(groups, Mapping) and groups:
        group = next(iter(groups.values()))
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            bits, size = weights.get("num_bits"), weights.get("group_size")
            if type(bits) is int and 0 < bits <= 16:
                scale = 8 if weights.get("type") == "float" and bits == 4 else 16
                return bits + (scale / size if type(size) is int and 0 < size < 2**31 else 0.0)
    return None
