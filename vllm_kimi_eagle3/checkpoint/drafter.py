# SPDX-License-Identifier: Apache-2.0
"""What an EAGLE-3 drafter is, read from its folder: everything that decides what it must be fed.

Trainers write the same facts in different places: at the top of config.json, inside
``eagle_config``, or in the format of the ``speculators`` library. A fact that stands in two places
must be the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vllm_kimi_eagle3.findings import Finding

from .aux_layers import FILE, NESTED, AuxLayers, resolve_aux_layers
from .drafter_tensors import Expected, TensorLike, compare
from .errors import CheckpointError, quoted
from .rope import ROPE, Rope, read_rope

Attention = Literal["llama", "mla"]

# A drafter may state the target's vocabulary without its padding rows, of which there are fewer.
_PADDING = 1024

# More than any drafter has, and few enough to name their tensors.
_MOST_LAYERS = 32


@dataclass(frozen=True)
class TargetShape:
    """What of a target its drafter depends on.

    Attributes:
        num_layers: its decoder layers.
        hidden_size: the width of its hidden states.
        vocab_size: its vocabulary, with padding rows.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class Drafter:
    """A drafter's facts.

    Attributes:
        attention: ``llama`` (multi-head or grouped attention) or ``mla``.
        aux: the target's hidden states that it reads; None if it reads the final one instead
            (``use_aux_hidden_state: false``).
        fc_norm: each hidden state is normed on its own before ``fc`` (EAGLE-3.1).
        norm_output: a draft step hands on the hidden state after the final norm (EAGLE-3.1).
        norm_before_fc: the joined hidden states are normed together before ``fc``.
        norm_before_residual: the residual is taken after the norm.
        rope: its rotary embedding.
        max_position_embeddings: as config.json says; None if it does not.
        quantization: the quantisation method of its own weights, or None.
        expected: what its class has to hold.
    """

    attention: Attention
    aux: AuxLayers | None
    fc_norm: bool
    norm_output: bool
    norm_before_fc: bool
    norm_before_residual: bool
    rope: Rope
    max_position_embeddings: int | None
    quantization: str | None
    expected: Expected

    def __str__(self) -> str:
        parts = ["MLA" if self.attention == "mla" else "Llama attention"]
        parts.append(
            f"aux layers: {self.aux}"
            if self.aux
            else "no aux layers: it reads the target's final hidden state"
        )
        switches = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
        on = [name for name in switches if getattr(self, name)]
        parts.append(f"{', '.join(on)} on" if on else "plain EAGLE-3")
        parts.append(f"rope {self.rope}")
        parts.append(f"draft vocabulary {self.expected.draft_vocab_size}")
        if self.quantization:
            parts.append(f"quantised ({self.quantization})")
        return "; ".join(parts)


def attention_of(config: Mapping[str, Any]) -> Attention | None:
    """The family of a drafter's class, from its architecture; None for one that is not Kimi's."""
    architectures = config.get("architectures")
    names = [str(n).lower() for n in architectures] if isinstance(architectures, list) else []
    if any("deepseek" in name for name in names):
        return "mla"
    if any("llama" in name for name in names):
        return "llama"
    if config.get("speculators_model_type") == "eagle3":
        layer = config.get("transformer_layer_config")
        model_type = layer.get("model_type", "llama") if isinstance(layer, Mapping) else None
        return "llama" if model_type == "llama" else None
    return None


def read_drafter(
    config: Mapping[str, Any],
    target: TargetShape,
    tensors: Mapping[str, TensorLike] | None = None,
    chosen_aux_layers: Sequence[int] | None = None,
    *,
    parallel_drafting: bool = False,
) -> Drafter | None:
    """A drafter's facts.

    Args:
        config: its config.json.
        target: its target.
        tensors: the tensors of its folder, for the number of aux layers; None if they are not on
            this machine.
        chosen_aux_layers: the user's own choice of aux layers.
        parallel_drafting: it drafts all tokens in one pass.

    Returns:
        The facts; None if the architecture is none of those that Kimi drafters have.

    Raises:
        CheckpointError: it cannot work, or would draft badly without a word.
    """
    attention = attention_of(config)
    if attention is None:
        return None
    if parallel_drafting and attention == "mla":
        raise CheckpointError(
            "drafter-parallel",
            '"parallel_drafting" in --speculative-config needs a tensor mask_hidden, which vLLM\'s '
            "class for MLA drafters does not have",
            'leave "parallel_drafting" out of --speculative-config',
            key='"parallel_drafting" in --speculative-config',
            value=True,
        )
    config = _flat(config)
    uses_aux = _flag(config, "use_aux_hidden_state", "use_aux", absent=True)
    hidden_size = _size(config, "hidden_size")
    target_hidden_size = _size(config, "target_hidden_size", hidden_size)
    if target_hidden_size != target.hidden_size:
        key = "target_hidden_size" if "target_hidden_size" in config else "hidden_size"
        raise _other_target(
            key,
            target_hidden_size,
            f"this target's hidden states are {target.hidden_size} wide",
        )
    vocab_size = _size(config, "vocab_size")
    if not 0 <= target.vocab_size - vocab_size <= _PADDING:
        raise _other_target("vocab_size", vocab_size, f"this target has {target.vocab_size} tokens")
    fc_count = _fc_count(tensors, target_hidden_size) if uses_aux else None
    aux = (
        resolve_aux_layers(config, target.num_layers, fc_count=fc_count, chosen=chosen_aux_layers)
        if uses_aux
        else None
    )
    if aux is None and chosen_aux_layers is not None:
        raise CheckpointError(
            "drafter-aux-layers",
            "aux layers were chosen, but the drafter's config.json says use_aux_hidden_state: "
            "false: it reads the target's final hidden state alone",
            'leave "aux_hidden_state_layers" out of --additional-config',
            file=FILE,
            key="use_aux_hidden_state",
            value=False,
        )
    rope = read_rope(config)
    if attention == "mla" and not (rope.yarn or rope.kind == "default"):
        raise CheckpointError(
            ROPE,
            f"config.json has {rope.kind} rope scaling, and vLLM's MLA classes compute every "
            "scaling as YaRN, so this drafter would be fed other positions than it was trained on",
            "give a drafter with YaRN or plain rope",
            file=FILE,
            key="rope_scaling",
            value=rope.kind,
        )
    quantization = _quantization(config)
    draft_vocab_size = _size(config, "draft_vocab_size", vocab_size)
    expected = Expected(
        attention=attention,
        hidden_size=hidden_size,
        target_hidden_size=target_hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_heads=_size(config, "num_attention_heads"),
        num_kv_heads=_size(config, "num_key_value_heads", _size(config, "num_attention_heads")),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_count=0 if aux is None else len(aux.captured),
        fc_norm=_flag(config, "fc_norm"),
        norm_before_fc=_flag(config, "norm_before_fc"),
        attention_bias=_flag(config, "attention_bias"),
        mlp_bias=_flag(config, "mlp_bias"),
        num_layers=_layers(config),
        quantized=quantization is not None,
        parallel_drafting=parallel_drafting,
        **_attention_sizes(config, attention, hidden_size),
    )
    return Drafter(
        attention=attention,
        aux=aux,
        fc_norm=expected.fc_norm,
        norm_output=_flag(config, "norm_output"),
        norm_before_fc=expected.norm_before_fc,
        norm_before_residual=_flag(config, "norm_before_residual"),
        rope=rope,
        max_position_embeddings=(
            None
            if config.get("max_position_embeddings") is None
            else _size(config, "max_position_embeddings")
        ),
        quantization=quantization,
        expected=expected,
    )


def check_tensors(expected: Expected, tensors: Mapping[str, TensorLike]) -> dict[str, str]:
    """Hold a checkpoint's tensors against what the drafter's class has to be given.

    Returns:
        The tensors that are left out on purpose, each with the reason.

    Raises:
        TensorsError: a tensor is missing, has another shape, or has no place in the drafter.
    """
    problems, unused = compare(tensors, expected)
    if problems:
        raise TensorsError([problem.finding for problem in problems])
    return unused


def check_head(tensors: Mapping[str, TensorLike], takes_quantized: bool) -> None:
    """Hold the LM head against what the drafter's class can load.

    Raises:
        CheckpointError: it is quantised, and the class takes plain weights only.
    """
    scales = sorted(n for n in tensors if n.startswith("lm_head.") and n != "lm_head.weight")
    if scales and not takes_quantized:
        raise CheckpointError(
            "drafter-quantized-head",
            f"the drafter's LM head is quantised ({quoted(scales[0])}), which this vLLM's class "
            "cannot load",
            'quantise it again with lm_head in the "ignore" list',
            key=scales[0],
        )


NO_FIT = "the drafter's checkpoint does not fit its config.json: "


class TensorsError(CheckpointError):
    """A checkpoint's tensors do not fit its config, in one way or in several.

    Attributes:
        findings: one per cause, the most telling first; ``finding`` is the first.
    """

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__(findings[0].id, findings[0].fact, findings[0].fix)
        self.args = (findings,)
        self.finding, self.findings = findings[0], tuple(findings)

    def __str__(self) -> str:
        return NO_FIT + "; ".join(f"{finding.fact}; {finding.fix}" for finding in self.findings)


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the parts of the speculators format side by side, as vLLM reads them."""
    layer = config.get("transformer_layer_config")
    if config.get("speculators_model_type") is None and layer is None:
        return config
    if not isinstance(layer, Mapping):
        raise _value(
            "transformer_layer_config",
            layer,
            "and is the config of its decoder layer in a drafter in speculators format",
        )
    # The default of vllm.transformers_utils.configs.speculators.algos.update_eagle3.
    stated = {k: v for k, v in config.items() if v is not None}
    return {"norm_before_residual": True, **layer, **stated}


def _flag(config: Mapping[str, Any], *names: str, absent: bool = False) -> bool:
    """A switch, under any of its names, at the top or inside eagle_config."""
    nested = config.get(NESTED)
    blocks = (("", config), (f"{NESTED}.", nested if isinstance(nested, Mapping) else {}))
    values = [
        (f"{where}{name}", _bool(block[name], f"{where}{name}"))
        for where, block in blocks
        for name in names
        if block.get(name) is not None
    ]
    return _agreed(values, absent)


def _agreed(values: list[tuple[str, bool]], absent: bool) -> bool:
    if len({value for _, value in values}) > 1:
        said = " and ".join(f"{where} is {str(value).lower()}" for where, value in values)
        raise CheckpointError(
            "drafter-config-contradiction",
            f"the drafter's config.json contradicts itself: {said}",
            "keep the one that the drafter was trained with",
            file=FILE,
            key=values[0][0],
            value=values[0][1],
        )
    return values[0][1] if values else absent


def _bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _value(where, value, "and must be true or false")
    return value


def _size(config: Mapping[str, Any], key: str, absent: int | None = None) -> int:
    value = config.get(key)
    if value is None and absent is not None:
        return absent
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise _value(key, value, "and must be a positive integer")
    return value


def _layers(config: Mapping[str, Any]) -> int:
    layers = _size(config, "num_hidden_layers", 1)
    if layers > _MOST_LAYERS:
        raise _value("num_hidden_layers", layers, "and a drafter has one to three")
    return layers


def _value(key: str, value: Any, what: str) -> CheckpointError:
    said = "is missing" if value is None else f"is {quoted(value)}"
    return CheckpointError(
        "drafter-config-value",
        f"the drafter's config.json, {key} {said}, {what}",
        f"correct {key} in the drafter's config.json",
        file=FILE,
        key=key,
        value=value,
    )


def _other_target(key: str, value: int, but: str) -> CheckpointError:
    return CheckpointError(
        "drafter-other-target",
        f"the drafter's config.json, {key} is {value}, but {but}: the drafter belongs to another "
        "target",
        "give the drafter that was trained for this target",
        file=FILE,
        key=key,
        value=value,
    )


def _attention_sizes(
    config: Mapping[str, Any], attention: Attention, hidden_size: int
) -> dict[str, Any]:
    if attention == "mla":
        rank = config.get("q_lora_rank")
        return {
            "q_lora_rank": None if rank is None else _size(config, "q_lora_rank"),
            "kv_lora_rank": _size(config, "kv_lora_rank"),
            "qk_nope_head_dim": _size(config, "qk_nope_head_dim"),
            "qk_rope_head_dim": _size(config, "qk_rope_head_dim"),
            "v_head_dim": _size(config, "v_head_dim"),
        }
    heads = _size(config, "num_attention_heads")
    return {"head_dim": _size(config, "head_dim", max(hidden_size // heads, 1))}


def _quantization(config: Mapping[str, Any]) -> str | None:
    """The method of the drafter's own quantisation. The target's is never looked at."""
    block = config.get("quantization_config")
    if block is None:
        return None
    if not isinstance(block, Mapping):
        raise _value("quantization_config", block, "and must be an object")
    method = block.get("quant_method")
    return method if isinstance(method, str) and method.isprintable() else "unnamed method"


def _fc_count(tensors: Mapping[str, TensorLike] | None, target_hidden_size: int) -> int | None:
    fc = None if tensors is None else tensors.get("fc.weight")
    if fc is None or len(fc.shape) != 2 or not fc.dtype.startswith(("BF16", "F16", "F32", "F8_")):
        return None  # Packed, by a quantisation: the width is not that of the hidden states.
    count, rest = divmod(fc.shape[1], target_hidden_size)
    if rest or not count:
        raise CheckpointError(
            "drafter-fc-width",
            f"fc.weight is {list(fc.shape)}: its width is no multiple of the target's hidden size "
            f"{target_hidden_size}, so the drafter belongs to another target",
            "give the drafter that was trained for this target",
            key="fc.weight",
            value=list(fc.shape),
        )
    return count
