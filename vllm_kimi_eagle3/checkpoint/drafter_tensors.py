# SPDX-License-Identifier: Apache-2.0
"""Will every tensor of a drafter's checkpoint find its place, and every place its tensor?

vLLM's drafter classes do not ask. Depending on the release and the class, a tensor that they have
no parameter for is skipped in silence or ends the load with a ``KeyError``, and a parameter that no
tensor was read for keeps whatever was in memory. Here the names, shapes and dtypes of a checkpoint
are compared with what ``llama_eagle3.py`` and ``deepseek_eagle3.py`` (0.15 to 0.33) build from the
config, and what does not fit is said with its likely cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

from vllm_kimi_eagle3.checkpoint.errors import plain, quoted
from vllm_kimi_eagle3.findings import Evidence, Finding

# What quantised linear layers have in place of ``weight`` or beside it: compressed-tensors, FP8,
# ModelOpt, Quark, GPTQ and AWQ, from vLLM's ``layers/quantization``.
_QUANTISED_WEIGHTS = ("weight_packed", "qweight")
QUANTISED_LEAVES = frozenset(
    (
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_scale_2",
        "input_zero_point",
        "input_global_scale",
        "output_scale",
        "output_zero_point",
        "activation_scale",
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
    )
)

# Scales of an fp8 KV cache, as ``maybe_remap_kv_scale_name`` (``weight_utils.py``) knows them.
_KV_SCALE = re.compile(
    r"self_attn\.(attn\.|k_proj\.|v_proj\.|qkv_proj\.|qkqkv_proj\.|mla_attn\.)?"
    r"([qkv]|kv|prob)_(scale|zero_point)"
    r"|self_attn\.(k|v)_proj\.output_scale|self_attn\.q\.scale|self_attn\.[kv]_cache\.scale"
)

# ``AutoWeightsLoader`` drops these; they follow from the config.
_ROTARY = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)

_FLOATS = ("BF16", "F16", "F32")
_D2T_DTYPES = ("I64", "I32")

_LAYER = re.compile(r"layers\.([0-9]{1,9})\.(.+)")

# Attention tensors that tell the families apart: the other family has none of that name.
_LLAMA_ATTENTION: tuple[str, ...] = ("k_proj", "v_proj", "qkv_proj")
_MLA_ATTENTION: tuple[str, ...] = (
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "fused_qkv_a_proj",
)
_LLAMA_ARCHITECTURE = "LlamaForCausalLMEagle3"
_MLA_ARCHITECTURE = "Eagle3DeepseekV2ForCausalLM"


Kind = Literal["missing", "unexpected", "shape", "dtype", "duplicate"]


_IDS: dict[Kind, str] = {
    "missing": "drafter-tensor-missing",
    "unexpected": "drafter-tensor-unexpected",
    "shape": "drafter-tensor-shape",
    "dtype": "drafter-tensor-dtype",
    "duplicate": "drafter-tensor-duplicate",
}


class TensorLike(Protocol):
    """What :func:`compare` reads of a tensor; a ``TensorInfo`` is one."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the drafter's class builds from its config.

    Attributes:
        num_heads: ``num_attention_heads``.
        num_kv_heads: Llama only, as is ``head_dim``.
        q_lora_rank: MLA only, as are the next four; None for a query without a low-rank step.
        target_hidden_size: the width of one aux hidden state.
        aux_count: how many of them ``fc`` joins; 0 with ``use_aux_hidden_state`` false (no ``fc``).
        fc_norm: EAGLE-3.1's norm of each aux hidden state.
        norm_before_fc: one norm of all of them together.
        attention_bias: Llama only; vLLM's MLA has no biases.
        quantized: the config has a ``quantization_config``.
        parallel_drafting: Llama only; needs the tensor ``mask_hidden``.
    """

    attention: Literal["llama", "mla"]
    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_count: int
    num_kv_heads: int = 0
    head_dim: int = 0
    q_lora_rank: int | None = None
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    fc_norm: bool = False
    norm_before_fc: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    num_layers: int = 1
    quantized: bool = False
    parallel_drafting: bool = False


@dataclass(frozen=True)
class Want:
    """A tensor that the class reads.

    Attributes:
        shape: in the checkpoint, before vLLM fuses or splits it over ranks.
        required: without it the drafter works with what was in memory. Otherwise the tensor may be
            left out, because the target's is used or because nothing reads it.
        keys: the config keys that the shape comes from, for messages.
    """

    shape: tuple[int, ...]
    required: bool
    keys: str


@dataclass(frozen=True)
class Problem:
    """Something that does not fit.

    Attributes:
        kind: what happened to the tensors.
        tensors: their names as the checkpoint spells them, or for missing ones as
            :func:`expected_tensors` does.
        fact: one sentence with the fact and the likely cause.
        fix: what to do about it.
    """

    kind: Kind
    tensors: tuple[str, ...]
    fact: str
    fix: str

    @property
    def finding(self) -> Finding:
        """The problem as a finding."""
        shown = ", ".join(plain(name) for name in self.tensors[:3])
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        return Finding(_IDS[self.kind], self.fact, self.fix, Evidence(key=f"{shown}{more}"))

    @property
    def text(self) -> str:
        """Fact and fix in one line."""
        return f"{self.fact}; {self.fix}"


def canonical(name: str) -> str:
    """A tensor's name as vLLM renames it: ``midlayer.`` is ``layers.0.``.

    A leading ``model.`` stays, since vLLM puts its own in front of every name but those of
    ``lm_head`` and ``d2t``, and then finds no ``model.model.``; :func:`compare` reports it.
    """
    return name.replace("midlayer.", "layers.0.")


def expected_tensors(e: Expected) -> dict[str, Want]:
    """Every tensor that the drafter's class reads, by canonical name, unfused."""
    hidden, target = e.hidden_size, e.target_hidden_size
    reduced, same_width = e.draft_vocab_size < e.vocab_size, hidden == target
    wants = {
        "embed_tokens.weight": Want(
            (e.vocab_size, hidden), not same_width, "vocab_size, hidden_size"
        ),
        "norm.weight": Want((hidden,), True, "hidden_size"),
        "lm_head.weight": Want(
            (e.draft_vocab_size, hidden),
            reduced or not same_width,
            "draft_vocab_size, hidden_size",
        ),
    }
    if reduced:
        wants["d2t"] = Want((e.draft_vocab_size,), True, "draft_vocab_size")
    if e.aux_count > 0:
        joined, width = e.aux_count * target, "number of aux layers x target_hidden_size"
        wants["fc.weight"] = Want((hidden, joined), True, f"hidden_size, {width}")
        if e.fc_norm:
            for index in range(e.aux_count):
                wants[f"fc_norm.{index}.weight"] = Want((target,), True, "target_hidden_size")
        if e.norm_before_fc:
            wants["input_norm.weight"] = Want((joined,), True, width)
        if e.parallel_drafting and e.attention == "llama":
            wants["mask_hidden"] = Want((1, joined), True, width)
    for index in range(e.num_layers):
        for name, want in _layer(e, index).items():
            wants[f"layers.{index}.{name}"] = want
    return wants


def _layer(e: Expected, index: int) -> dict[str, Want]:
    hidden, inner = e.hidden_size, e.intermediate_size
    norm = Want((hidden,), True, "hidden_size")
    # Only the first layer reads the embedding beside the hidden state, and applies hidden_norm.
    reads, reads_keys = (2 * hidden, "2 x hidden_size") if index == 0 else (hidden, "hidden_size")
    wants = {
        "input_layernorm.weight": norm,
        "hidden_norm.weight": Want((hidden,), index == 0, "hidden_size"),
        "post_attention_layernorm.weight": norm,
    }

    def linear(name: str, rows: int, row_keys: str, columns: int, column_keys: str) -> None:
        wants[f"{name}.weight"] = Want((rows, columns), True, f"{row_keys}, {column_keys}")

    def bias(name: str) -> None:
        rows = wants[f"{name}.weight"].shape[0]
        wants[f"{name}.bias"] = Want((rows,), True, "rows of the weight beside it")

    attention = "self_attn"
    if e.attention == "llama":
        heads, kv_heads = "num_attention_heads x head_dim", "num_key_value_heads x head_dim"
        rows, kv_rows = e.num_heads * e.head_dim, e.num_kv_heads * e.head_dim
        linear(f"{attention}.q_proj", rows, heads, reads, reads_keys)
        linear(f"{attention}.k_proj", kv_rows, kv_heads, reads, reads_keys)
        linear(f"{attention}.v_proj", kv_rows, kv_heads, reads, reads_keys)
        linear(f"{attention}.o_proj", hidden, "hidden_size", rows, heads)
        if e.attention_bias:
            for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
                bias(f"{attention}.{part}")
    else:
        query = e.num_heads * (e.qk_nope_head_dim + e.qk_rope_head_dim)
        query_keys = "num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)"
        if e.q_lora_rank is None:
            linear(f"{attention}.q_proj", query, query_keys, reads, reads_keys)
        else:
            rank = e.q_lora_rank
            linear(f"{attention}.q_a_proj", rank, "q_lora_rank", reads, reads_keys)
            wants[f"{attention}.q_a_layernorm.weight"] = Want((rank,), True, "q_lora_rank")
            linear(f"{attention}.q_b_proj", query, query_keys, rank, "q_lora_rank")
        latent = e.kv_lora_rank
        linear(
            f"{attention}.kv_a_proj_with_mqa",
            latent + e.qk_rope_head_dim,
            "kv_lora_rank + qk_rope_head_dim",
            reads,
            reads_keys,
        )
        wants[f"{attention}.kv_a_layernorm.weight"] = Want((latent,), True, "kv_lora_rank")
        linear(
            f"{attention}.kv_b_proj",
            e.num_heads * (e.qk_nope_head_dim + e.v_head_dim),
            "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
            latent,
            "kv_lora_rank",
        )
        values = e.num_heads * e.v_head_dim
        linear(
            f"{attention}.o_proj", hidden, "hidden_size", values, "num_attention_heads x v_head_dim"
        )
    linear("mlp.gate_proj", inner, "intermediate_size", hidden, "hidden_size")
    linear("mlp.up_proj", inner, "intermediate_size", hidden, "hidden_size")
    linear("mlp.down_proj", hidden, "hidden_size", inner, "intermediate_size")
    if e.mlp_bias:
        for part in ("gate_proj", "up_proj", "down_proj"):
            bias(f"mlp.{part}")
    return wants


# Linear layers that vLLM fuses, and that a checkpoint may hold fused as well.
_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.fused_qkv_a_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def compare(
    tensors: Mapping[str, TensorLike], expected: Expected
) -> tuple[list[Problem], dict[str, str]]:
    """What of a checkpoint does not fit its config.

    Args:
        tensors: by name, as ``read_tensors`` returns them.
        expected: what the drafter's config asks for.

    Returns:
        The problems, most telling first, and the tensors that are not read on purpose, by name with
        the reason. Every tensor of the checkpoint is used, in a problem, or among the latter.
    """
    return _Comparison(tensors, expected).run()


class _Comparison:
    """One run of :func:`compare`.

    Each step takes what it can explain out of ``extra`` and ``lacking``, from the specific to the
    general; what is left is reported without a cause.
    """

    def __init__(self, tensors: Mapping[str, TensorLike], expected: Expected) -> None:
        self.tensors = tensors
        self.expected = expected
        self.wants = expected_tensors(expected)
        self.problems: list[Problem] = []
        self.unused: dict[str, str] = {}
        self.raw: dict[str, str] = {}  # canonical name -> the checkpoint's own
        self.extra: dict[str, TensorLike] = {}  # canonical name -> tensor without a place so far
        self.lacking: dict[str, Want] = {}
        self.layers: set[int] = set()  # indices of decoder layers that the checkpoint has
        # For _flush: kind, cause and fix, and what is wrong with which tensor.
        self.wrong: dict[tuple[Kind, str, str], list[tuple[str, str]]] = {}

    def run(self) -> tuple[list[Problem], dict[str, str]]:
        self._take_unused()
        self._take_names()
        self._take_fused()
        self.layers = {_layer_index(name) for name in self.extra} - {-1}
        self.lacking = {name: want for name, want in self.wants.items() if name not in self.extra}
        placed = {name: self.extra.pop(name) for name in self.wants if name in self.extra}
        quantised = self._take_quantised()
        self._explain_attention()
        self._explain_layers()
        self._explain_norms()
        self._explain_vocabulary()
        self._explain_rest()
        for name, tensor in placed.items():
            if name.rpartition(".")[0] not in quantised:
                self._check(name, tensor)
        self._flush()
        order = ("duplicate", "unexpected", "missing", "shape", "dtype")
        self.problems.sort(key=lambda problem: order.index(problem.kind))
        return self.problems, self.unused

    # ------------------------------------------------------------------------------------- names

    def _take_unused(self) -> None:
        """Sorts out what vLLM skips by name wherever it stands."""
        e = self.expected
        rest: dict[str, TensorLike] = {}
        for name, tensor in self.tensors.items():
            if "t2d" in name:
                self.unused[name] = "a mask that only training reads"
            elif any(part in name for part in _ROTARY):
                self.unused[name] = "follows from the config's rope settings"
            elif "mask_hidden" in name and e.attention == "llama" and not e.parallel_drafting:
                self.unused[name] = "for parallel drafting, which is not on"
            elif name.removeprefix("model.") == "d2t" and e.draft_vocab_size >= e.vocab_size:
                self.unused[name] = "the drafter scores the target's whole vocabulary"
                self._check_dtype(name, tensor, _D2T_DTYPES)
            else:
                rest[name] = tensor
        self.extra = rest

    def _take_names(self) -> None:
        """Renames to canonical names, and reports what two names or a prefix make of it."""
        prefixed = [name for name in self.extra if name.startswith("model.")]
        if prefixed:
            self._add(
                "unexpected",
                prefixed,
                f"{_named(prefixed)}: vLLM puts 'model.' before a drafter's names itself and finds "
                "no place for 'model.model.'",
                "rename them without the prefix",
            )
        groups: dict[str, list[str]] = {}
        for name in self.extra:
            groups.setdefault(canonical(name.removeprefix("model.")), []).append(name)
        tensors, self.extra = self.extra, {}
        for name, names in groups.items():
            self.raw[name], self.extra[name] = names[0], tensors[names[0]]
        repeated = {name: names for name, names in groups.items() if len(names) > 1}
        if repeated:
            every = [name for names in repeated.values() for name in names]
            first = next(iter(repeated.values()))
            self._add(
                "duplicate",
                every,
                f"{_named(first[:2])} are the same tensor to vLLM, which keeps whichever "
                f"it reads last{f' ({len(repeated)} such)' if len(repeated) > 1 else ''}",
                "keep one spelling",
            )

    def _take_fused(self) -> None:
        """Takes a fused linear layer as its parts, where the parts are not there themselves."""
        for name in list(self.extra):
            match = _LAYER.fullmatch(name)
            module, _, leaf = match[2].rpartition(".") if match else ("", "", "")
            if match is None or module not in _FUSED:
                continue
            parts = [f"layers.{match[1]}.{part}.{leaf}" for part in _FUSED[module]]
            wants = [self.wants.get(part) for part in parts]
            if any(part in self.extra for part in parts):
                continue
            known = [want for want in wants if want is not None]
            if len(known) < len(wants):
                continue
            rows = sum(want.shape[0] for want in known)
            for part in parts:
                del self.wants[part]
            keys = " + ".join(dict.fromkeys(want.keys.split(", ")[0] for want in known))
            keys = ", ".join([keys, *known[0].keys.split(", ")[1:]])
            self.wants[name] = Want((rows, *known[0].shape[1:]), True, keys)

    # ------------------------------------------------------------------------------ quantisation

    def _take_quantised(self) -> set[str]:
        """The linear layers that come quantised; their shapes depend on the method."""
        modules = {
            name.removesuffix(".weight")
            for name, want in self.wants.items()
            if name.endswith(".weight") and len(want.shape) == 2
        }
        modules.discard("embed_tokens")
        fused = {
            f"layers.{index}.{module}": [f"layers.{index}.{part}" for part in parts]
            for index in range(self.expected.num_layers)
            for module, parts in _FUSED.items()
        }
        marks: dict[str, list[str]] = {}
        for name in self.extra:
            module, _, leaf = name.rpartition(".")
            if leaf in QUANTISED_LEAVES and (
                module in modules or all(part in modules for part in fused.get(module, [""]))
            ):
                marks.setdefault(module, []).append(name)
        for module, marked in marks.items():
            if any(name.endswith(_QUANTISED_WEIGHTS) for name in marked):
                for part in (module, *fused.get(module, ())):
                    self.lacking.pop(f"{part}.weight", None)
        names = [name for group in marks.values() for name in group]
        scales = [name for name in self.extra.keys() - set(names) if _is_kv_scale(name)]
        if names and not self.expected.quantized:
            self._report(
                "unexpected",
                names,
                f"{self._raw_named(names)}: the weights are quantised and the config says nothing "
                "of it",
                "restore 'quantization_config' in the drafter's config.json",
            )
        if scales and not self.expected.quantized:
            scales.sort()
            self._report(
                "unexpected",
                scales,
                f"{self._raw_named(scales)}: scales of an fp8 KV cache, which vLLM reads only "
                "where the drafter's config.json has a 'quantization_config'",
                "restore it, or export the drafter without them",
            )
        self._forget(names + scales)
        return set(marks)

    # ------------------------------------------------------------------------------------ causes

    def _explain_attention(self) -> None:
        e = self.expected
        mla = e.attention == "mla"
        own, other = _LLAMA_ATTENTION, _MLA_ATTENTION
        if mla:
            own, other = other, own
        foreign = self._attention(self.extra, other)
        lacking = self._attention(self.lacking, own)
        if foreign and lacking:
            # q_proj is either family's.
            foreign += self._attention(self.extra, ("q_proj",))
            lacking += self._attention(self.lacking, ("q_proj",))
            has, says, needed = "MLA", "Llama's attention", _MLA_ARCHITECTURE
            if mla:
                has, says, needed = "Llama's attention", "MLA", _LLAMA_ARCHITECTURE
            self._report(
                "unexpected",
                foreign,
                f"{self._raw_named(foreign)}: the checkpoint has {has}, the config asks for {says}",
                f'set "architectures": ["{needed}"] and that family\'s sizes in the drafter\'s '
                "config.json",
            )
            self._forget(lacking)
            return
        if not mla:
            return
        if e.q_lora_rank is None:
            names = self._attention(self.extra, ("q_a_proj", "q_a_layernorm", "q_b_proj"))
            lost = self._attention(self.lacking, ("q_proj",))
            what = "in two low-rank steps, and the config has no q_lora_rank"
            shapes = [self.extra[n].shape[:1] for n in names if n.endswith("q_a_proj.weight")]
            rows = str(shapes[0][0]) if shapes and shapes[0] else "the rows of q_a_proj"
            fix = f"set q_lora_rank to {rows} in the drafter's config.json"
        else:
            names = self._attention(self.extra, ("q_proj",))
            lost = self._attention(self.lacking, ("q_a_proj", "q_a_layernorm", "q_b_proj"))
            what = f"in one step, and the config has q_lora_rank {e.q_lora_rank}"
            fix = "set q_lora_rank to null in the drafter's config.json"
        if names and lost:
            self._report(
                "unexpected",
                names,
                f"{self._raw_named(names)}: the query is made {what}",
                fix,
            )
            self._forget(lost)

    def _explain_layers(self) -> None:
        e = self.expected
        beyond = [name for name in self.extra if _layer_index(name) >= e.num_layers]
        if beyond:
            first = min(_layer_index(name) for name in beyond)
            cause = "number its layers from 0"
            if len(self.layers) == max(self.layers) + 1:
                cause = f'set "num_hidden_layers": {len(self.layers)}'
            self._report(
                "unexpected",
                beyond,
                f"{self._raw_named(beyond)}: layers from {first} on, where the config has "
                f"num_hidden_layers {e.num_layers}",
                f"{cause}, or get the checkpoint that belongs to the config",
            )
        empty = [index for index in range(1, e.num_layers) if index not in self.layers]
        if empty:
            names = [name for name in self.lacking if _layer_index(name) in empty]
            self._report(
                "missing",
                names,
                f"the config has num_hidden_layers {e.num_layers}, and the checkpoint holds "
                f"nothing of layer {', '.join(map(str, empty))}",
                "correct num_hidden_layers, or get the missing files",
            )

    def _explain_norms(self) -> None:
        """fc, and the norms before it, against the config keys that call for them."""
        e = self.expected
        no_aux = "the config has use_aux_hidden_state false"
        if e.aux_count == 0 and "fc.weight" in self.extra:
            names = [name for name in self.extra if name.startswith(("fc.", "fc_norm."))]
            names += [name for name in self.extra if name.startswith("input_norm.")]
            self._report(
                "unexpected",
                names,
                f"{self._raw_named(names)}: {no_aux}, and the checkpoint was trained with aux "
                "hidden states",
                'set "use_aux_hidden_state": true in eagle_config',
            )
        if e.aux_count > 0 and "fc.weight" in self.lacking:
            self._report(
                "missing",
                ["fc.weight"],
                f"'fc.weight' is not in the checkpoint, and the config joins {e.aux_count} aux "
                "hidden states with it",
                "set use_aux_hidden_state to false in eagle_config if the drafter reads the "
                "target's final hidden state only, or get the missing file",
            )
        key = 'set "fc_norm": true at the top level of the drafter\'s config.json'
        self._explain_norm("fc_norm.", "fc_norm", e.fc_norm, key)
        key = 'set "norm_before_fc": true in the drafter\'s config.json'
        self._explain_norm("input_norm.", "norm_before_fc", e.norm_before_fc, key)
        biases: dict[tuple[str, str], list[str]] = {}
        for name in self.extra:
            if name.endswith(".bias") and f"{name[: -len('.bias')]}.weight" in self.wants:
                cause = "vLLM's drafter class has no such bias", "export the drafter without it"
                for part, key in (("self_attn", "attention_bias"), ("mlp", "mlp_bias")):
                    if e.attention == "llama" and f".{part}." in name:
                        cause = f"the config does not say {key}", f'set "{key}": true'
                biases.setdefault(cause, []).append(name)
        for (why, fix), names in biases.items():
            fact = f"{self._raw_named(names)}: vLLM would drop the bias without a word: {why}"
            self._report("unexpected", names, fact, fix)
        if lost := [name for name in self.lacking if name.endswith(".bias")]:
            self._report(
                "missing",
                lost,
                f"{_named(lost)}: the config asks for biases and the checkpoint has none there",
                'set "attention_bias" and "mlp_bias" to false if it was trained without',
            )

    def _explain_norm(self, prefix: str, key: str, wanted: bool, fix: str) -> None:
        extra = [name for name in self.extra if name.startswith(prefix)]
        lacking = [name for name in self.lacking if name.startswith(prefix)]
        if extra and not wanted:
            self._report(
                "unexpected",
                extra,
                f"{self._raw_named(extra)}: the checkpoint was trained with {key}, and the config "
                "does not say so",
                fix,
            )
        elif extra:
            self._report(
                "unexpected",
                extra,
                f"{self._raw_named(extra)}: the config joins {self.expected.aux_count} aux hidden "
                "states, and these norms are not for those",
                "correct the list of aux layers",
            )
        if lacking:
            self._report(
                "missing",
                lacking,
                f"{_named(lacking)}: the config says {key}, and the checkpoint does not hold "
                f"{'it' if len(lacking) == 1 else 'them'}",
                f"take {key} out of the config if the drafter was trained without, or get the "
                "missing file",
            )

    def _explain_vocabulary(self) -> None:
        e = self.expected
        reduced = e.draft_vocab_size < e.vocab_size
        if "lm_head.weight" in self.lacking and self.lacking["lm_head.weight"].required:
            why = (
                f"draft_vocab_size is {e.draft_vocab_size} and the target's head has "
                f"{e.vocab_size} rows"
                if reduced
                else f"hidden_size is {e.hidden_size} and the target's head is made for "
                f"{e.target_hidden_size}"
            )
            self._report(
                "missing",
                ["lm_head.weight"],
                f"'lm_head.weight' is not in the checkpoint, and the target's cannot stand in: "
                f"{why}",
                "get the missing file, or export the drafter with its head",
            )
        if "embed_tokens.weight" in self.lacking and self.lacking["embed_tokens.weight"].required:
            self._report(
                "missing",
                ["embed_tokens.weight"],
                f"'embed_tokens.weight' is not in the checkpoint, and the target's cannot stand "
                f"in: hidden_size is {e.hidden_size}, the target's {e.target_hidden_size}",
                "get the missing file, or export the drafter with its embedding",
            )
        if "d2t" in self.lacking:
            self._report(
                "missing",
                ["d2t"],
                f"'d2t' is not in the checkpoint, and draft_vocab_size {e.draft_vocab_size} is "
                f"less than vocab_size {e.vocab_size}: vLLM would take the rows of lm_head for "
                f"the target's first {e.draft_vocab_size} tokens",
                "add the d2t that the drafter was trained with",
            )
        if "mask_hidden" in self.lacking:
            self._report(
                "missing",
                ["mask_hidden"],
                "'mask_hidden' is not in the checkpoint, and parallel drafting needs it",
                'turn "parallel_drafting" off, or give a drafter that was trained for it',
            )

    def _explain_rest(self) -> None:
        e = self.expected
        if "mask_hidden" in self.extra:
            why, fix = "needs aux hidden states", "set use_aux_hidden_state to true"
            if e.attention == "mla":
                why, fix = "vLLM's MLA drafter does not do", "give another drafter"
            self._report(
                "unexpected",
                ["mask_hidden"],
                f"{self._raw_named(['mask_hidden'])} is for parallel drafting, which {why}",
                fix,
            )
        lacking = [name for name, want in self.lacking.items() if want.required]
        if lacking:
            self._report(
                "missing",
                lacking,
                f"{_named(lacking)} {'is' if len(lacking) == 1 else 'are'} not in the checkpoint, "
                "and vLLM would use what is in memory there",
                "get the missing files, or the config that belongs to the checkpoint",
            )
        if self.extra:
            names = list(self.extra)
            self._report(
                "unexpected",
                names,
                f"{self._raw_named(names)}: the drafter's class has no place for "
                f"{'it' if len(names) == 1 else 'them'}, and an older vLLM drops and a newer one "
                "refuses what it cannot place",
                "get the config that belongs to the checkpoint, or export it without",
            )

    # ---------------------------------------------------------------------------- shapes, dtypes

    def _check(self, name: str, tensor: TensorLike) -> None:
        want, raw, shape = self.wants[name], self.raw[name], tuple(tensor.shape)
        self._check_dtype(raw, tensor, _D2T_DTYPES if name == "d2t" else _FLOATS)
        if name == "mask_hidden" and prod(shape) == prod(want.shape):
            return  # vLLM reads it as one row, whatever its shape.
        if shape != want.shape:
            found = (
                f"{quoted(raw)} is {list(shape)} and the config makes it {list(want.shape)} "
                f"({want.keys})"
            )
            self.wrong.setdefault(("shape", *self._shape_cause(name, shape, want)), []).append(
                (raw, found)
            )

    def _shape_cause(self, name: str, shape: tuple[int, ...], want: Want) -> tuple[str, str]:
        """Why a shape is likely to be another one, which may be "", and what to do."""
        e = self.expected
        if len(shape) != len(want.shape):
            return "it has another number of dimensions", "export it again"
        if name == "fc.weight" and shape[0] == e.hidden_size and e.target_hidden_size > 0:
            count, rest = divmod(shape[1], e.target_hidden_size)
            if rest == 0 and count > 0:
                return (
                    f"it joins {count} aux hidden states, and the config {e.aux_count}",
                    f"name {count} layers in eagle_aux_hidden_state_layer_ids",
                )
            return (
                f"that is no whole number of aux hidden states of width {e.target_hidden_size}",
                "give the drafter that was trained for this target",
            )
        if name == "lm_head.weight" and shape[1] == e.hidden_size:
            if shape[0] == e.vocab_size:
                return (
                    "it scores the whole vocabulary",
                    "remove draft_vocab_size, or get the head that belongs to it",
                )
            if shape[0] < e.vocab_size:
                return "", f'set "draft_vocab_size": {shape[0]}, or get the head that belongs to it'
        first = re.fullmatch(r"layers\.0\.self_attn\.(q|k|v|qkv|.*_a)_proj(_with_mqa)?\..*", name)
        if first and shape[0] == want.shape[0] and 2 * shape[1] == want.shape[1]:
            return (
                "an EAGLE-3 drafter's first layer reads the embedding and the hidden state side "
                "by side, and this one reads one of them, as an EAGLE-1 drafter or a plain model",
                "give an EAGLE-3 drafter",
            )
        return (
            "",
            "correct these keys in the drafter's config.json, or get the config that belongs to it",
        )

    def _check_dtype(self, raw: str, tensor: TensorLike, allowed: tuple[str, ...]) -> None:
        if tensor.dtype in allowed:
            return
        why, fix = "", "export it again"
        if allowed is _FLOATS and tensor.dtype not in ("F64", "C64"):
            fix = "if it is quantised, restore 'quantization_config' in the drafter's config.json"
            if self.expected.quantized:
                why = "quantised weights without the scales that belong to them"
                fix = "get the missing files"
        found = f"{quoted(raw)} is {tensor.dtype} where {' or '.join(allowed)} is expected"
        self.wrong.setdefault(("dtype", why, fix), []).append((raw, found))

    def _flush(self) -> None:
        """Reports shapes and dtypes, one problem per cause."""
        for (kind, cause, fix), cases in self.wrong.items():
            told = ", ".join(found for _, found in cases[:3])
            more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
            why = f": {cause}" if cause else ""
            self._add(kind, [raw for raw, _ in cases], f"{told}{more}{why}", fix)

    # ----------------------------------------------------------------------------------- helpers

    def _add(self, kind: Kind, raw_names: Iterable[str], fact: str, fix: str) -> None:
        self.problems.append(Problem(kind, tuple(raw_names), fact, fix))

    def _report(self, kind: Kind, names: Iterable[str], fact: str, fix: str) -> None:
        """Adds a problem about canonical names, and takes these as explained."""
        names = list(names)
        self._add(kind, [self.raw.get(name, name) for name in names], fact, fix)
        self._forget(names)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.extra.pop(name, None)
            self.lacking.pop(name, None)

    def _raw_named(self, names: Iterable[str]) -> str:
        return _named([self.raw[name] for name in names])

    @staticmethod
    def _attention(names: Iterable[str], modules: tuple[str, ...]) -> list[str]:
        """The names that are those of one of these attention modules."""
        starts = tuple(f"self_attn.{module}." for module in modules)
        return [
            name
            for name in names
            if (match := _LAYER.fullmatch(name)) and match[2].startswith(starts)
        ]


def _layer_index(name: str) -> int:
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else -1


def _is_kv_scale(name: str) -> bool:
    match = _LAYER.fullmatch(canonical(name))
    return match is not None and _KV_SCALE.fullmatch(match[2]) is not None


def _named(names: list[str], most: int = 4) -> str:
    text = ", ".join(quoted(name) for name in names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"
