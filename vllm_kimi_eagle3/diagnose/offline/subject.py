# SPDX-License-Identifier: Apache-2.0
"""What is to be scored: the pair, what the resolver makes of it, and what its checkpoint leaves
open.

The resolver is the plugin's own (``checkpoint/``, as ``pair.py`` uses it at a start). What it
refuses can still be scored, as far as there are weights for it: a drafter without its ``d2t`` is
refused, and the question is then what it should have been.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.check.drafter import DEFAULT_LENGTH
from vllm_kimi_eagle3.check.target import shape_of
from vllm_kimi_eagle3.checkpoint.aux_layers import default_layers, resolve_aux_layers
from vllm_kimi_eagle3.checkpoint.drafter import (
    Drafter,
    TargetShape,
    TensorsError,
    read_drafter,
)
from vllm_kimi_eagle3.checkpoint.drafter_tensors import Expected, canonical, compare
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.checkpoint.folder import (
    drafter_problem,
    folder_problem,
    local_folder,
    no_config,
    read_config,
)
from vllm_kimi_eagle3.checkpoint.rope import Rope, read_rope
from vllm_kimi_eagle3.checkpoint.sharing import Owner, owners, seems_same
from vllm_kimi_eagle3.checkpoint.target import ConfigFile, is_kimi_target
from vllm_kimi_eagle3.checkpoint.tensors import (
    TensorInfo,
    find_tensors,
    read_integers,
    read_tensors,
)
from vllm_kimi_eagle3.checkpoint.vocabulary import check_vocabulary
from vllm_kimi_eagle3.findings import Evidence, Finding
from vllm_kimi_eagle3.pair import AUX_LAYERS_SETTING, settings_of

from .hypotheses import SCORED_ROPES, SWITCHES, Choices, Reading, Rows

_WRAPPED = "language_model."
_TARGET_TENSORS = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "lm_head.weight": "lm_head.weight",
}
_FLOATS = ("BF16", "F16", "F32")
# What the config classes of Transformers have where a config.json names no epsilon.
_DEFAULT_EPS = 1e-6
# What decides which tensors a drafter has to have.
_TENSOR_OF = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}


@dataclass(frozen=True)
class Subject:
    """A pair, read.

    Attributes:
        target, drafter: as the user named them.
        target_folder, folder: where they are.
        text: the config of the target's language model.
        config: the drafter's.
        tensors: the drafter's.
        target_tensors: the target's embedding and head, by the drafter's names of them; those that
            are there and not quantised.
        shape: the target's.
        expected: the sizes of the drafter that is scored.
        eps: of its norms.
        now: as the server runs it; where it is refused, as vLLM without the plugin would.
        choices: what else it may be.
        refused: why the plugin refuses it.
        notes: what else the resolver has to say of it.
        longest: how many tokens a request may have; None if not known.
        additional_config: the user's.
    """

    target: str
    drafter: str
    target_folder: Path
    folder: Path
    text: Mapping[str, Any]
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    target_tensors: Mapping[str, TensorInfo]
    shape: TargetShape
    expected: Expected
    eps: float
    now: Reading
    choices: Choices
    refused: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    longest: int | None
    additional_config: Mapping[str, Any]

    @property
    def whole_head(self) -> bool:
        """The head has a row for each of the target's tokens, and needs no map."""
        return self.expected.draft_vocab_size == self.expected.vocab_size

    @property
    def largest_head(self) -> TensorInfo | None:
        """Of the heads that are tried, the one with most bytes."""
        heads = [t.get("lm_head.weight") for t in (self.tensors, self.target_tensors)]
        return max((h for h in heads if h is not None), key=lambda h: h.nbytes, default=None)


def read_subject(
    target: str,
    drafter: str,
    *,
    additional_config: Mapping[str, Any] | None = None,
    revisions: tuple[str | None, str | None] = (None, None),
    longest: Callable[[Mapping[str, Any]], int | None] = lambda text: None,
    draft_max_model_len: int | None = None,
) -> Subject:
    """Reads both checkpoints.

    Args:
        target, drafter: as the user names them.
        additional_config: ``--additional-config``.
        revisions: of the target and the drafter, on Hugging Face.
        longest: from the config of the target's language model, how many tokens a request may
            have; None if that is not known.
        draft_max_model_len: ``"max_model_len"`` in ``--speculative-config``.

    Raises:
        CheckpointError: a checkpoint is not here, is broken, or is none that can be scored; a
            :class:`TensorsError` where weights are missing.
    """
    target_folder = _folder(target, revisions[0], "target")
    folder = _folder(drafter, revisions[1], "drafter")
    if (problem := drafter_problem(str(folder))) is not None:
        raise problem
    target_config, config = read_config(target_folder), read_config(folder)
    if not is_kimi_target(ConfigFile(target_config)):
        raise CheckpointError(
            "diagnose-offline-no-score",
            f"{target} is no Kimi-K2, K2.5, K2.6 or K2.7",
            "name the target that the drafter was trained for",
            file=target_folder / "config.json",
            key="architectures",
            value=target_config.get("architectures"),
        )
    text = target_config.get("text_config", target_config)
    shape, wrong = shape_of(target_config, target_folder)
    if shape is None:
        raise TensorsError(wrong)
    tensors = read_tensors(folder)
    if tensors is None:
        raise CheckpointError(
            "diagnose-offline-no-score",
            f"{drafter} has no safetensors files on this machine",
            "download it, or export it as safetensors",
            file=folder,
        )
    refused: list[Finding] = []
    chosen = settings_of(additional_config).get(AUX_LAYERS_SETTING)
    resolved = _resolved(config, shape, tensors, chosen, refused)
    expected = _with_what_there_is(resolved, tensors, refused)
    target_tensors = _target_tensors(target_folder)
    _check_scorable(resolved, config, expected, tensors, target_tensors)
    owned = owners(tensors, target_folder, seems_same)
    rows, others = _rows(expected, tensors, refused)
    target_rope = _target_rope(text)
    now = Reading(
        aux=None if resolved.aux is None else resolved.aux.captured,
        rope=resolved.rope,
        fc_norm=expected.fc_norm and resolved.fc_norm,
        norm_before_fc=expected.norm_before_fc and resolved.norm_before_fc,
        norm_output=resolved.norm_output,
        norm_before_residual=resolved.norm_before_residual,
        rows=rows,
        embedding=owned["embedding"],
        head=owned["head"],
    )
    names = {canonical(name) for name in tensors}
    most = longest(text)
    choices = Choices(
        num_layers=shape.num_layers,
        count=expected.aux_count,
        stated=_stated(config, shape),
        target_rope=target_rope,
        switches=tuple(s for s in SWITCHES if s not in _TENSOR_OF or _TENSOR_OF[s] in names),
        rows=others,
        own=_own_parts(tensors, target_tensors, expected, owned),
    )
    return Subject(
        target=target,
        drafter=drafter,
        target_folder=target_folder,
        folder=folder,
        text=text,
        config=config,
        tensors=tensors,
        target_tensors=target_tensors,
        shape=shape,
        expected=expected,
        eps=_eps(config),
        now=now,
        choices=choices,
        refused=tuple(refused),
        notes=tuple(_notes(resolved, most, draft_max_model_len)),
        longest=most,
        additional_config=additional_config or {},
    )


def _folder(model: str, revision: str | None, whose: str) -> Path:
    if (problem := folder_problem(model)) is not None:
        raise problem
    folder = local_folder(model, revision)
    if folder is None:
        raise CheckpointError(
            "diagnose-offline-no-score",
            f"the {whose} {model} is not on this machine",
            f"download it first, as with `hf download {model}`",
            key=whose,
            value=model,
        )
    if not (folder / "config.json").is_file():
        raise no_config(folder, whose)
    return folder


def _resolved(
    config: Mapping[str, Any],
    shape: TargetShape,
    tensors: Mapping[str, TensorInfo],
    chosen: Any,
    refused: list[Finding],
) -> Drafter:
    """The resolver's answer. Aux layers that it refuses are the default ones instead."""
    try:
        drafter = read_drafter(config, shape, tensors, chosen)
    except CheckpointError as error:
        if not error.finding.id.startswith("drafter-aux-"):
            raise
        refused.append(error.finding)
        drafter = read_drafter(config, shape, tensors, default_layers(shape.num_layers))
    if drafter is None:
        raise CheckpointError(
            "diagnose-offline-no-score",
            "the drafter is of neither of the families that serve Kimi (Llama and MLA)",
            file="config.json",
            key="architectures",
            value=config.get("architectures"),
        )
    return drafter


def _stated(config: Mapping[str, Any], shape: TargetShape) -> tuple[tuple[int, ...], ...]:
    """The aux layers that config.json names: as resolved without the user's choice, as written."""
    try:
        aux = resolve_aux_layers(flat(config), shape.num_layers)
    except CheckpointError:
        return ()
    return tuple(dict.fromkeys(ids for ids in (aux.captured, aux.stated) if ids is not None))


def _with_what_there_is(
    drafter: Drafter, tensors: Mapping[str, TensorInfo], refused: list[Finding]
) -> Expected:
    """The sizes to score with: norms count as there if their weights are there.

    Raises:
        TensorsError: other weights are missing or do not fit.
    """
    problems, _ = compare(tensors, drafter.expected)
    refused += [problem.finding for problem in problems]
    names = {canonical(name) for name in tensors}
    expected = replace(
        drafter.expected,
        fc_norm=_TENSOR_OF["fc_norm"] in names,
        norm_before_fc=_TENSOR_OF["norm_before_fc"] in names,
    )
    remaining, _ = compare(tensors, expected)
    # A map is not needed to score: its absence is one of the hypotheses.
    if serious := [p for p in remaining if p.tensors != ("d2t",)]:
        raise TensorsError([problem.finding for problem in serious])
    return expected


def _check_scorable(
    drafter: Drafter,
    config: Mapping[str, Any],
    expected: Expected,
    tensors: Mapping[str, TensorInfo],
    target_tensors: Mapping[str, TensorInfo],
) -> None:
    """Raises CheckpointError where scoring would compute something else than a server."""
    partial = flat(config).get("partial_rotary_factor")
    why = ""
    if drafter.quantization is not None:
        why = f"the drafter is quantised ({drafter.quantization})"
    elif drafter.rope.kind not in SCORED_ROPES:
        why = f"the drafter has {drafter.rope.kind} rope scaling"
    elif _slides(config):
        why = "the drafter's attention sees a window of the text (layer_types)"
    elif partial not in (None, 1, 1.0):
        why = f"the drafter rotates a part of its channels (partial_rotary_factor {partial})"
    else:
        for name in _TARGET_TENSORS:
            if name not in tensors and name not in target_tensors:
                why = f"{name} is the target's, and is quantised or not on this machine"
    if why:
        raise CheckpointError(
            "diagnose-offline-no-score",
            f"{why}, which is not computed here",
            "give the drafter as it was before, or measure the server with `diagnose --url`",
            file="config.json",
        )


def _slides(config: Mapping[str, Any]) -> bool:
    kinds = flat(config).get("layer_types")
    return isinstance(kinds, list) and "sliding_attention" in kinds


def _target_tensors(folder: Path) -> dict[str, TensorInfo]:
    names = [prefix + name for name in _TARGET_TENSORS.values() for prefix in ("", _WRAPPED)]
    try:
        found = find_tensors(folder, *names)
    except CheckpointError:
        return {}
    plain = {name.removeprefix(_WRAPPED): info for name, info in found.items()}
    return {
        own: plain[theirs]
        for own, theirs in _TARGET_TENSORS.items()
        if theirs in plain and plain[theirs].dtype in _FLOATS
    }


def _own_parts(
    tensors: Mapping[str, TensorInfo],
    target_tensors: Mapping[str, TensorInfo],
    expected: Expected,
    owned: Mapping[str, Owner],
) -> tuple[str, ...]:
    """The parts that may be the drafter's or the target's, and differ."""
    parts = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}
    return tuple(
        part
        for part, name in parts.items()
        if name in tensors
        and owned[part] == "own"
        and name in target_tensors
        and target_tensors[name].shape[-1] == expected.hidden_size
    )


def _rows(
    expected: Expected, tensors: Mapping[str, TensorInfo], refused: list[Finding]
) -> tuple[Rows, tuple[Rows, ...]]:
    """The map that a server uses, and the others that there are."""
    rows, vocabulary = expected.draft_vocab_size, expected.vocab_size
    d2t, t2d = (_integers(tensors.get(name)) for name in ("d2t", "t2d"))
    try:
        known = check_vocabulary(vocabulary, rows, d2t, t2d)
    except CheckpointError as error:
        known = None
        if "d2t" not in {finding.evidence.key for finding in refused}:
            refused.append(error.finding)
    others: list[Rows] = []
    if d2t is not None and len(d2t) == rows:
        if all(0 <= i + offset < vocabulary for i, offset in enumerate(d2t)):
            others.append("d2t")
        if all(0 <= token < vocabulary for token in d2t) and any(d2t):
            others.append("ids")
    if rows < vocabulary:
        marked = [token for token, mark in enumerate(t2d or ()) if mark]
        if len(marked) == rows and (known is None or d2t is None):
            others.append("t2d")
        if known is None:
            others.append("unknown")
    others.append("none")
    if known is not None and known.drop_d2t:
        return "none", ("none",)
    return ("d2t" if "d2t" in others else "none"), tuple(others)


def _integers(info: TensorInfo | None) -> list[int] | None:
    if info is None:
        return None
    try:
        return read_integers(info)
    except CheckpointError:
        return None


def _target_rope(text: Mapping[str, Any]) -> Rope | None:
    try:
        return read_rope(text)
    except CheckpointError:
        return None


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's config with what the speculators library writes into a block of its own."""
    layer = config.get("transformer_layer_config")
    stated = {key: value for key, value in config.items() if value is not None}
    return {**(layer if isinstance(layer, Mapping) else {}), **stated}


def _eps(config: Mapping[str, Any]) -> float:
    value = flat(config).get("rms_norm_eps")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    return _DEFAULT_EPS


def _notes(drafter: Drafter, longest: int | None, draft_max_model_len: int | None) -> list[Finding]:
    """What the weights do not show: how long a request may be."""
    notes = []
    if longest is not None and draft_max_model_len is not None and draft_max_model_len < longest:
        notes.append(
            Finding(
                "diagnose-offline-length",
                f"a request stops drafting at {draft_max_model_len} tokens, as "
                f'--speculative-config says ("max_model_len"), and requests may have up to '
                f"{longest}",
                'take "max_model_len" out of --speculative-config',
                Evidence(key='"max_model_len"', value=str(draft_max_model_len)),
            )
        )
    if longest is not None:
        default = DEFAULT_LENGTH[drafter.attention]
        reach = drafter.rope.reach(drafter.max_position_embeddings, default, longest)
        if reach.finding is not None:
            notes.append(reach.finding)
    return notes
