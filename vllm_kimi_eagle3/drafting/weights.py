# SPDX-License-Identifier: Apache-2.0
"""What a loaded drafter is: its products, norms, head and attention, read from the modules.

Releases and the plugin have several drafter classes, which name the same parts in the same way;
what differs is told apart here, so that the forward pass sees one shape. The modules stay the
owners: a weight is referred to, not copied, so what is shared with the target stays shared. A
module that computes something else than the kernels do is refused, not approximated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

_FROM = ("vllm.", "vllm_kimi_eagle3.", "torch.", "builtins", "abc", "typing")
_LLAMA = "vllm.model_executor.models.llama_eagle3"
_MLA = (
    "vllm.model_executor.models.deepseek_eagle3",
    "vllm_kimi_eagle3.models.kimi_mla_drafter",
)
# Those whose table of cos and sin is all that they do.
_ROPES = frozenset(
    {
        "RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "NTKScalingRotaryEmbedding",
        "DynamicNTKScalingRotaryEmbedding",
        "DynamicNTKAlphaRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
        "DeepseekScalingRotaryEmbedding",
    }
)
# Modules whose classes only decide who joins the target's hidden states, or in which group.
_AROUND = (".fused_drafter", ".replicated")
_PLAIN = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
SKINNY_ROWS = 64
"""The most rows that ``skinny_gemm`` takes; tests/unit holds it to the kernel's own."""


class Unsupported(Exception):  # noqa: N818
    """The kernels cannot serve this drafter; the message is the reason, as the log gives it."""


@dataclass(frozen=True)
class Norm:
    """An RMSNorm: ``weight`` ``[width]`` and ``eps``."""

    weight: torch.Tensor
    eps: float


class Product:
    """``x @ weight.T`` of one linear layer, this rank's shard, and the all-reduce after it.

    Attributes:
        name: the layer's, for the log.
        weight: ``[N, K]``; None where the layer has no plain one, and its own method multiplies.
        bias: ``[N]`` or None.
        reduces: the ranks' results are summed.
        skinny: the numbers of rows that ``skinny_gemm`` computes.
        workspace: of ``skinny_gemm``, or None.
    """

    def __init__(self, name: str, layer: Any, dtype: torch.dtype) -> None:
        _refuse_lora(name, layer)
        if getattr(layer, "skip_bias_add", False) and getattr(layer, "bias", None) is not None:
            raise Unsupported(f"{name} leaves its bias to others")
        row_parallel = hasattr(layer, "input_is_parallel")
        split = getattr(layer, "tp_size", 1) > 1
        self.bias: torch.Tensor | None = getattr(layer, "bias", None)
        self.reduces = row_parallel and split
        if self.reduces and not (layer.input_is_parallel and layer.reduce_results):
            raise Unsupported(f"{name} is not summed over the ranks where it is computed")
        if self.reduces and self.bias is not None:
            raise Unsupported(f"{name} has a bias")
        if split and getattr(layer, "gather_output", False):
            raise Unsupported(f"{name} gathers its output")
        self.name, self._layer = name, layer
        self.weight = plain_weight(layer, dtype)
        self.skinny: frozenset[int] = frozenset()
        self.workspace: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, K]`` to ``[T, N]``."""
        y = self.local(x)
        if self.reduces:
            from vllm.distributed import tensor_model_parallel_all_reduce

            summed: torch.Tensor = tensor_model_parallel_all_reduce(y)
            return summed
        return y

    def local(self, x: torch.Tensor) -> torch.Tensor:
        """The product alone, of this rank."""
        if x.shape[0] in self.skinny:
            return self.by_skinny(x)
        return self.by_library(x)

    def by_library(self, x: torch.Tensor) -> torch.Tensor:
        """By cuBLAS or, for a weight that is not plain, by the layer's own method."""
        if self.weight is None:
            y: torch.Tensor = self._layer.quant_method.apply(self._layer, x, self.bias)
            return y
        return functional.linear(x, self.weight, self.bias)

    def by_skinny(self, x: torch.Tensor) -> torch.Tensor:
        """By the kernel for few rows."""
        from vllm_kimi_eagle3.kernels.skinny_gemm import skinny_gemm

        y: torch.Tensor = skinny_gemm(x, self.weight, workspace=self.workspace)
        return y

    def takes_skinny(self, rows: int) -> bool:
        """True if :meth:`by_skinny` could compute as many rows."""
        return self.weight is not None and self.bias is None and 1 <= rows <= SKINNY_ROWS


@dataclass(frozen=True)
class Embedding:
    """The embedding, this rank's part.

    Attributes:
        layer: embeds ids ``[T]`` to ``[T, H]``, over all ranks that have a part of it.
        table: ``[rows, H]`` where this rank has the whole of it in the model's dtype, else None.
    """

    layer: Any
    table: torch.Tensor | None


@dataclass(frozen=True)
class Head:
    """The LM head, this rank's part.

    Attributes:
        weight: ``[at least rows, H]``; None where ``logits`` must be used.
        logits: ``[B, H]`` to ``[B, at least rows]``, by the layer's own method.
        rows: draft tokens of this rank, without padding.
        first: the draft id of the first of them.
        d2t: target id minus draft id, int64 ``[draft_vocab_size]``; None where all are zero.
        ascending: a larger draft id is a larger target id.
        ranks: over which the head is split.
        draft_vocab_size: draft tokens of all ranks.
        vocab_size: tokens of the target.
    """

    weight: torch.Tensor | None
    logits: Callable[[torch.Tensor], torch.Tensor]
    rows: int
    first: int
    d2t: torch.Tensor | None
    ascending: bool
    ranks: int
    draft_vocab_size: int
    vocab_size: int


@dataclass(frozen=True)
class AttentionFacts:
    """What attention of a drafter needs to know (this rank's shard).

    Attributes:
        kind: ``"llama"`` or ``"mla"``.
        layer: the release's layer that owns the KV cache (``Attention`` or ``MLAAttention``).
        layer_name: its name in the forward context and in attention metadata.
        heads: query heads of this rank.
        kv_heads: of this rank; MLA has one.
        head_dim: channels of a cached key: MLA ``kv_lora_rank + rope_dim``.
        value_dim: channels of a head's result.
        scale: of the scores.
        rotary: the release's rope module.
        cos_sin: ``[P, rope_dim]``, first half cos.
        neox: halves are rotated, not neighbours.
        position_limit: positions from here on are computed as the one before; None: no limit.
        sliding_window: tokens that a query sees, or None.
        dtype: of queries, keys and values before they are cached.
        latent: what only MLA has.
    """

    kind: str
    layer: Any
    layer_name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    rotary: Any
    cos_sin: torch.Tensor
    neox: bool
    position_limit: int | None
    sliding_window: int | None
    dtype: torch.dtype
    latent: Latent | None

    @property
    def rope_dim(self) -> int:
        """Channels that are rotated."""
        return int(self.cos_sin.shape[-1])


class Latent:
    """MLA's own parts.

    Attributes:
        q_lora_rank, kv_lora_rank, nope_dim: widths.
        q_norm, kv_norm: ``[q_lora_rank]`` and ``[kv_lora_rank]``.
        eps: of both.
        q_b: the product from the query's latent to ``[T, heads * (nope_dim + rope_dim)]``.
    """

    def __init__(self, name: str, attention: Any, dtype: torch.dtype) -> None:
        wrapper = attention.mla_attn
        if getattr(wrapper, "indexer", None) is not None or getattr(wrapper, "g_proj", None):
            raise Unsupported("its MLA is not DeepSeek-V3's")
        if attention.q_lora_rank is None:
            raise Unsupported("its MLA has no latent for the query")
        if getattr(attention.q_b_proj, "qrep_active", False):
            raise Unsupported("its query is replicated for decode context parallelism")
        self.q_lora_rank: int = attention.q_lora_rank
        self.kv_lora_rank: int = attention.kv_lora_rank
        self.nope_dim: int = attention.qk_nope_head_dim
        self.value_dim: int = attention.v_head_dim
        self.heads: int = attention.num_local_heads
        q_norm = norm_of("q_a_layernorm", attention.q_a_layernorm)
        kv_norm = norm_of("kv_a_layernorm", attention.kv_a_layernorm)
        if q_norm.eps != kv_norm.eps:
            raise Unsupported("its two latents' norms have another eps each")
        self.q_norm, self.kv_norm, self.eps = q_norm.weight, kv_norm.weight, q_norm.eps
        self.q_b = Product(f"{name}.q_b_proj", attention.q_b_proj, dtype)
        self._layer = wrapper.mla_attn
        self._kv_b, self._dtype = attention.kv_b_proj, dtype
        self._absorbed: tuple[torch.Tensor, torch.Tensor] | None = None

    def absorbed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two halves of ``kv_b_proj`` by head, as the release's own decode has them.

        Returns:
            W_UK ``[heads, nope_dim, kv_lora_rank]`` and W_UV ``[heads, kv_lora_rank, value_dim]``,
            of any strides.

        Raises:
            Unsupported: there are no plain tensors of them.
        """
        if self._absorbed is None:
            self._absorbed = self._made() or self._split()
        return self._absorbed

    def _made(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        for owner in (self._layer, getattr(self._layer, "impl", None)):
            w_uk = getattr(owner, "W_UK_T", None)
            w_uv = getattr(owner, "W_UV", None)
            if (
                isinstance(w_uk, torch.Tensor)
                and isinstance(w_uv, torch.Tensor)
                and w_uk.dtype == w_uv.dtype == self._dtype
                and w_uk.shape == (self.heads, self.nope_dim, self.kv_lora_rank)
                and w_uv.shape == (self.heads, self.kv_lora_rank, self.value_dim)
            ):
                return w_uk.detach(), w_uv.detach()
        return None

    def _split(self) -> tuple[torch.Tensor, torch.Tensor]:
        weight = plain_weight(self._kv_b, self._dtype)
        if weight is None:
            raise Unsupported("kv_b_proj has no plain weight to absorb")
        by_head = weight.view(self.heads, self.nope_dim + self.value_dim, self.kv_lora_rank)
        w_uk, w_uv = by_head.split([self.nope_dim, self.value_dim], dim=1)
        return w_uk, w_uv.transpose(1, 2)


@dataclass(frozen=True)
class Weights:
    """A drafter of one layer.

    Attributes:
        hidden_size: H.
        dtype: of the hidden states.
        device: of the weights.
        chunk_norms: ``[n, W]`` and eps of ``fc_norm``, or None.
        whole_norm: ``norm_before_fc``, or None.
        fc: the product that joins aux hidden states, or None without them.
        aux_width: n * W; H without aux hidden states.
        embedding: the embedding.
        input_norm: of the embedding.
        hidden_norm: of the hidden state.
        norm_before_residual: the residual is the normed hidden state.
        projection: to query, key and value, or to MLA's latents.
        attention: what attention needs.
        o: the product after attention.
        post_norm: before the MLP.
        gate_up: the MLP's first product.
        down: its second.
        norm: the final one.
        norm_output: the next draft step reads what the head reads.
        head: the LM head.
    """

    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    chunk_norms: Norm | None
    whole_norm: Norm | None
    fc: Product | None
    aux_width: int
    embedding: Embedding
    input_norm: Norm
    hidden_norm: Norm
    norm_before_residual: bool
    projection: Product
    attention: AttentionFacts
    o: Product
    post_norm: Norm
    gate_up: Product
    down: Product
    norm: Norm
    norm_output: bool
    head: Head

    @property
    def products(self) -> tuple[Product, ...]:
        """All that may be computed by one kernel or another."""
        latent = self.attention.latent
        found = (
            self.fc,
            self.projection,
            None if latent is None else latent.q_b,
            self.o,
            self.gate_up,
            self.down,
        )
        return tuple(product for product in found if product is not None)


def read_weights(model: Any) -> Weights:
    """The parts of a loaded drafter.

    Args:
        model: of a release's class, the plugin's, ``completed`` or ``clamped``; the target's
            embedding and head are in place where it has none of its own.

    Raises:
        Unsupported: with the reason.
    """
    model = _unwrapped(model)
    kind = _kind(model)
    if getattr(model, "use_parallel_drafting", False):
        raise Unsupported("it drafts in parallel")
    inner = model.model
    if len(inner.layers) != 1:
        raise Unsupported(f"it has {len(inner.layers)} layers")
    layer = inner.layers[0]
    input_norm = norm_of("input_layernorm", layer.input_layernorm)
    dtype, device = input_norm.weight.dtype, input_norm.weight.device
    hidden_size = int(input_norm.weight.shape[0])
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise Unsupported(f"its norms are {dtype}")
    chunk_norms, whole_norm, fc, aux_width = _combination(model, inner, hidden_size, dtype)
    attention, projection, o = _attention(kind, model, layer.self_attn, dtype)
    mlp = layer.mlp
    act = type(getattr(mlp, "act_fn", None)).__name__
    if act != "SiluAndMul" or not hasattr(mlp, "gate_up_proj"):
        raise Unsupported("its MLP is not one of SiLU and a gate")
    return Weights(
        hidden_size=hidden_size,
        dtype=dtype,
        device=device,
        chunk_norms=chunk_norms,
        whole_norm=whole_norm,
        fc=fc,
        aux_width=aux_width,
        embedding=_embedding(inner.embed_tokens, dtype),
        input_norm=input_norm,
        hidden_norm=norm_of("hidden_norm", layer.hidden_norm, eps=input_norm.eps),
        norm_before_residual=_norm_before_residual(layer),
        projection=projection,
        attention=attention,
        o=o,
        post_norm=norm_of("post_attention_layernorm", layer.post_attention_layernorm),
        gate_up=Product("gate_up_proj", mlp.gate_up_proj, dtype),
        down=Product("down_proj", mlp.down_proj, dtype),
        norm=norm_of("norm", inner.norm),
        norm_output=bool(
            getattr(inner, "norm_output", False) or getattr(model, "_norm_output", False)
        ),
        head=_head(model, dtype),
    )


def plain_weight(layer: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """A layer's weight ``[N, K]`` in ``dtype`` as it was loaded; None if it is something else."""
    weight = getattr(layer, "weight", None)
    method = getattr(layer, "quant_method", None)
    # A CPU build may have packed it, in the same shape.
    if hasattr(layer, "cpu_linear") or (method and type(method).__name__ not in _PLAIN):
        return None
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.dtype != dtype:
        return None
    return weight.detach() if weight.stride(1) == 1 else None


def norm_of(name: str, module: Any, *, eps: float | None = None) -> Norm:
    """An RMSNorm of a release.

    Raises:
        Unsupported: it is another, or its eps is not ``eps``.
    """
    if (
        type(module).__name__ != "RMSNorm"
        or not getattr(module, "has_weight", True)
        or getattr(module, "variance_size_override", None) is not None
    ):
        raise Unsupported(f"{name} is no RMSNorm of its whole width")
    own = float(module.variance_epsilon)
    if eps is not None and own != eps:
        raise Unsupported(f"{name} has another eps than input_layernorm")
    return Norm(module.weight.detach(), own)


def _unwrapped(model: Any) -> Any:
    # vLLM's wrappers for CUDA graphs and microbatches.
    while not isinstance(model, torch.nn.Module) and callable(getattr(model, "unwrap", None)):
        model = model.unwrap()
    return model


def _kind(model: Any) -> str:
    modules = [base.__module__ for base in type(model).__mro__]
    if foreign := [m for m in modules if not f"{m}.".startswith(_FROM)]:
        raise Unsupported(f"its class is from {foreign[0]}")
    for module in modules:
        if module in _MLA:
            return "mla"
        if module == _LLAMA:
            return "llama"
    raise Unsupported(f"{type(model).__name__} is no EAGLE-3 drafter that is known")


def _refuse_lora(name: str, layer: Any) -> None:
    if hasattr(layer, "base_layer"):
        raise Unsupported(f"{name} has LoRA")


def _norm_before_residual(layer: Any) -> bool:
    own = getattr(layer, "norm_before_residual", None)
    if own is not None:
        return bool(own)
    method = getattr(layer._residual_norm, "__name__", "")
    if method not in ("_norm_before_residual", "_norm_after_residual"):
        raise Unsupported("its layer handles the residual in a way that is not known")
    return bool(method == "_norm_before_residual")


def _combination(
    model: Any, inner: Any, hidden_size: int, dtype: torch.dtype
) -> tuple[Norm | None, Norm | None, Product | None, int]:
    expected = getattr(model, "_expected", None)  # `completed` goes by it.
    if expected is not None:
        uses_aux, count = bool(expected.aux_count), int(expected.aux_count)
        before, chunks = bool(expected.norm_before_fc), bool(expected.fc_norm)
    else:
        # Some releases build norms that their class does not apply.
        applied = _applied(model)
        uses_aux = bool(getattr(inner, "use_aux_hidden_state", True))
        count = int(getattr(inner, "num_aux_hidden_states", None) or 3)
        before = "input_norm" in applied and bool(getattr(inner, "norm_before_fc", False))
        chunks = "fc_norm" in applied and getattr(inner, "fc_norm", None) is not None
    if not uses_aux:
        return None, None, None, hidden_size
    fc = Product("fc", inner.fc, dtype)
    chunk_norms = None
    if chunks:
        norms = [norm_of("fc_norm", n) for n in inner.fc_norm]
        if len(norms) != count or len({n.eps for n in norms}) != 1:
            raise Unsupported("the norms of its aux hidden states are not alike")
        chunk_norms = Norm(torch.stack([n.weight for n in norms]), norms[0].eps)
    whole_norm = norm_of("input_norm", inner.input_norm) if before else None
    return chunk_norms, whole_norm, fc, int(inner.fc.input_size)


def _applied(model: Any) -> frozenset[str]:
    """The names that the class's own combination of aux hidden states reads."""
    for base in type(model).__mro__:
        own = vars(base).get("combine_hidden_states")
        if own is not None and not base.__module__.endswith(_AROUND):
            return frozenset(getattr(own, "__code__", None).co_names)  # type: ignore[union-attr]
    return frozenset()


def _embedding(layer: Any, dtype: torch.dtype) -> Embedding:
    _refuse_lora("embed_tokens", layer)
    if getattr(layer, "tp_size", 1) > 1:
        return Embedding(layer, None)

    # Not the module's forward pass, which reduces over the target's ranks: of a replicated
    # drafter each of them has the whole of it.
    def embed(token_ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer.quant_method.embedding(layer, token_ids.long())
        return result

    return Embedding(embed, plain_weight(layer, dtype))


def _head(model: Any, dtype: torch.dtype) -> Head:
    layer, processor = model.lm_head, model.logits_processor
    _refuse_lora("lm_head", layer)
    if processor.scale != 1.0:
        raise Unsupported(f"its logits are scaled by {processor.scale}")
    if processor.soft_cap is not None:
        raise Unsupported("its logits are capped")
    if getattr(processor, "head_dtype", None) not in (None, dtype):
        raise Unsupported(f"its head computes in {processor.head_dtype}")
    part = layer.shard_indices
    if part.num_added_elements:
        raise Unsupported("its head has added tokens")
    size = int(processor.org_vocab_size)
    first = int(part.org_vocab_start_index)
    rows = max(min(int(part.org_vocab_end_index), size) - first, 0)
    d2t = getattr(model, "draft_id_to_target_id", None)
    if d2t is not None:
        d2t = d2t.detach() if bool(d2t.any()) else None
    ascending = d2t is None or bool((d2t.diff() >= 0).all())

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer.quant_method.apply(layer, hidden, bias=None)
        return result

    return Head(
        weight=plain_weight(layer, dtype),
        logits=logits,
        rows=rows,
        first=first,
        d2t=d2t,
        ascending=ascending,
        ranks=int(getattr(layer, "tp_size", 1)),
        draft_vocab_size=size,
        vocab_size=int(model.config.vocab_size),
    )


def _attention(
    kind: str, model: Any, attention: Any, dtype: torch.dtype
) -> tuple[AttentionFacts, Product, Product]:
    rotary = attention.rotary_emb
    if type(rotary).__name__ not in _ROPES:
        raise Unsupported(f"its rope is a {type(rotary).__name__}")
    cos_sin = rotary.cos_sin_cache.to(attention_device(attention))
    if type(rotary).__name__ != "DeepseekScalingRotaryEmbedding" and cos_sin.dtype != dtype:
        cos_sin = cos_sin.to(dtype)  # As these do before they rotate.
    limit = getattr(model, "_limit", None)
    common: dict[str, Any] = {
        "kind": kind,
        "scale": float(attention.scaling),
        "rotary": rotary,
        "cos_sin": cos_sin,
        "neox": bool(rotary.is_neox_style),
        "position_limit": None if limit is None else int(limit),
        "dtype": dtype,
    }
    o = Product("o_proj", attention.o_proj, dtype)
    if kind == "mla":
        latent = Latent("self_attn", attention, dtype)
        layer = attention.mla_attn.mla_attn
        facts = AttentionFacts(
            layer=layer,
            layer_name=getattr(layer, "layer_name", ""),
            heads=latent.heads,
            kv_heads=1,
            head_dim=latent.kv_lora_rank + attention.qk_rope_head_dim,
            value_dim=latent.value_dim,
            sliding_window=None,
            latent=latent,
            **common,
        )
        return facts, Product("fused_qkv_a_proj", attention.fused_qkv_a_proj, dtype), o
    if hasattr(attention, "q_norm") or hasattr(attention, "k_norm"):
        raise Unsupported("its attention norms queries and keys")
    layer = attention.attn
    facts = AttentionFacts(
        layer=layer,
        layer_name=getattr(layer, "layer_name", ""),
        heads=int(attention.num_heads),
        kv_heads=int(attention.num_kv_heads),
        head_dim=int(attention.head_dim),
        value_dim=int(attention.head_dim),
        sliding_window=getattr(layer, "sliding_window", None),
        latent=None,
        **common,
    )
    return facts, Product("qkv_proj", attention.qkv_proj, dtype), o


def attention_device(attention: Any) -> torch.device:
    """Where an attention module's weights are."""
    device: torch.device = next(attention.parameters()).device
    return device
