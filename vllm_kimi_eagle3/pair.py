# SPDX-License-Identifier: Apache-2.0
"""The Kimi target and the EAGLE-3 drafter that a server was asked to run, resolved once.

Made in the process that reads the command line, from the drafter's folder and vLLM's config. What
the patches decide from it travels to the workers on the drafter's Transformers config, under
:data:`KEY`, because that is what vLLM pickles anyway.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint.drafter import NO_FIT, Drafter, TargetShape, TensorsError, read_drafter
from .checkpoint.errors import CheckpointError, quoted
from .checkpoint.folder import local_folder, read_config
from .checkpoint.target import is_kimi_target
from .checkpoint.tensors import TensorInfo, is_complete, read_tensors
from .findings import Finding

KEY = "kimi_eagle3"
"""The attribute of the drafter's config that holds the decisions, and the key of the user's own
settings in ``--additional-config``."""

# The load formats that read the folder's safetensors files as they are.
_FROM_THE_FOLDER = frozenset({"auto", "hf", "safetensors", "fastsafetensors"})

AUX_LAYERS_SETTING = "aux_hidden_state_layers"
ATTENTION_SETTING = "attention"
"""False: TRITON_MLA is vLLM's own."""
DRAFTING_SETTING = "drafting"
"""False: vLLM's own drafting loop and drafter serve; true: the plugin's wherever they can; absent:
decided at the start, from what is faster here."""
# Each setting, and what stands for its value in a message: nothing that, copied, would change what
# a server does.
_SETTINGS = {
    AUX_LAYERS_SETTING: "[...]",
    ATTENTION_SETTING: "true",
    DRAFTING_SETTING: "true or false",
}
_SWITCHES = (ATTENTION_SETTING, DRAFTING_SETTING)
_LEAVE_OUT = (
    f'leave it out: the settings are "{AUX_LAYERS_SETTING}", a list of layers, and '
    f'"{ATTENTION_SETTING}" and "{DRAFTING_SETTING}", true or false'
)


@dataclass
class Pair:
    """A target and its drafter.

    Attributes:
        drafter: the drafter's facts.
        target: the target's shape.
        model: the drafter as the user named it.
        draft_config: the drafter's Transformers config, which vLLM's classes read.
        target_folder: where the target's checkpoint is; None if not on this machine.
        tensors: the drafter's tensors; None if not on this machine.
        decisions: what the workers have to know; plain values only.
        notes: what was decided beside the drafter's facts, and what there is to say, for the log
            line.
    """

    drafter: Drafter
    target: TargetShape
    model: str
    draft_config: Any
    target_folder: Path | None
    tensors: Mapping[str, TensorInfo] | None
    decisions: dict[str, Any] = field(default_factory=dict)
    notes: list[str | Finding] = field(default_factory=list)

    def keep(self) -> None:
        """Put the decisions where the workers find them; after this the pair is not made again."""
        setattr(self.draft_config, KEY, Decisions(self.decisions))

    def __str__(self) -> str:
        notes = [f"note: {n.text}" if isinstance(n, Finding) else n for n in self.notes]
        return "; ".join([f"EAGLE-3 drafter {self.model}: {self.drafter}", *notes])


class Decisions(dict[str, Any]):
    """What was decided, as plain values. A process that unpickles them runs a Kimi pair."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (dict(self),)


def _arrived(values: dict[str, Any]) -> Decisions:
    met()
    return Decisions(values)


_met = False
_when_met: list[Callable[[], None]] = []


def when_met(act: Callable[[], None]) -> None:
    """Call ``act`` once a Kimi pair is known to run in this process; at once if it is."""
    if act not in _when_met:
        _when_met.append(act)
    if _met:
        act()


def met() -> None:
    """A Kimi pair runs in this process."""
    global _met
    _met = True
    for act in _when_met:
        act()


def decisions_of(hf_config: Any) -> Mapping[str, Any] | None:
    """What was decided for a drafter, from its Transformers config; None for any other model."""
    decisions = getattr(hf_config, KEY, None)
    return decisions if isinstance(decisions, Mapping) else None


def pair_of(vllm_config: Any) -> Pair | None:
    """The pair of a server, or None if it is not a Kimi target with an EAGLE-3 drafter, if the
    drafter is of another family, or if the pair was made before.

    Args:
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        ValueError: the pair cannot work; the message is for the user.
    """
    speculative = getattr(vllm_config, "speculative_config", None)
    if getattr(speculative, "method", None) != "eagle3":
        return None
    model_config = getattr(speculative, "target_model_config", None) or vllm_config.model_config
    draft_model_config = getattr(speculative, "draft_model_config", None)
    draft_config = getattr(draft_model_config, "hf_config", None)
    if (
        draft_model_config is None
        or draft_config is None
        or not is_kimi_target(getattr(model_config, "hf_config", None))
    ):
        return None
    if decisions_of(draft_config) is not None:
        return None
    model = draft_model_config.model
    settings = settings_or_refuse(getattr(vllm_config, "additional_config", None))
    folder = local_folder(model, draft_model_config.revision)
    target = _shape(model_config)
    try:
        config = draft_config.to_dict() if folder is None else read_config(folder)
        tensors = tensors_of(folder, model, _load_format(vllm_config.load_config))
        drafter = read_drafter(
            {**config, "quantization_config": _quantization(config, draft_model_config)},
            target,
            tensors,
            settings.get(AUX_LAYERS_SETTING),
            parallel_drafting=bool(getattr(speculative, "parallel_drafting", False)),
        )
    except CheckpointError as error:
        raise ValueError(of_drafter(model, error)) from None
    if drafter is None:
        return None
    return Pair(
        drafter=drafter,
        target=target,
        model=model,
        draft_config=draft_config,
        target_folder=local_folder(model_config.model, model_config.revision),
        tensors=tensors,
    )


def tensors_of(
    folder: Path | None, model: str, load_format: str = "auto"
) -> dict[str, TensorInfo] | None:
    """The drafter's tensors; None where vLLM takes them from elsewhere, or gets the rest first.

    Args:
        folder: where the checkpoint is on this machine; None if it is not.
        model: as the user named it.
        load_format: ``--load-format``.

    Raises:
        CheckpointError: a file is broken or missing.
    """
    if folder is None or load_format not in _FROM_THE_FOLDER:
        return None
    # What the user put into a folder has to be whole; a snapshot in the cache is completed.
    own = Path(model) == folder and any(folder.glob("*.safetensors"))
    return read_tensors(folder) if own or is_complete(folder) else None


def _load_format(load_config: Any) -> str:
    load_format = getattr(load_config, "load_format", "auto")
    return str(getattr(load_format, "value", load_format))


def _quantization(config: Mapping[str, Any], draft_model_config: Any) -> Any:
    """What is said of the drafter's own quantisation, in config.json, in a file beside it that
    vLLM reads into its config, or by the user; None if nothing is."""
    hf_config = draft_model_config.hf_config
    for key in ("quantization_config", "compression_config"):
        if found := config.get(key) or getattr(hf_config, key, None):
            return found
    method = getattr(draft_model_config, "quantization", None)
    return None if method is None else {"quant_method": str(method)}


def of_drafter(model: str, error: CheckpointError) -> str:
    """What is wrong with a drafter, in the user's spelling of where it was named."""
    return f'--speculative-config, "model": {model!r}: {in_a_log(error)}'


def in_a_log(error: CheckpointError) -> str:
    """What is wrong with a drafter, in one line with the ids that ``check --explain`` takes."""
    if isinstance(error, TensorsError):
        return NO_FIT + "; ".join(finding.text for finding in error.findings)
    return error.finding.text


def settings_of(additional_config: Any) -> Mapping[str, Any]:
    """The user's own settings, from ``--additional-config``.

    Raises:
        CheckpointError: they are no object, or hold a setting that there is not.
    """
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        fix = _write({AUX_LAYERS_SETTING: given}) if _is_layers(given) else _LEAVE_OUT
        raise _no_setting(f"is {quoted(given)}, and must be an object", KEY, given, fix)
    for name, value in given.items():
        if name not in _SETTINGS:
            near = difflib.get_close_matches(str(name).lower()[:80], _SETTINGS, n=1)
            fix = _write({near[0]: value, **given}) if near else _LEAVE_OUT
            raise _no_setting(f"has no setting {quoted(name)}", f"{KEY}.{name}", value, fix)
    for name in _SWITCHES:
        if name in given and not isinstance(value := given[name], bool):
            raise _no_setting(
                f"has {name} {quoted(value)}, and must have true or false",
                f"{KEY}.{name}",
                value,
                # Whether a drafting that is neither was to be on or off, nobody can tell.
                _write({**given, name: False} if name == ATTENTION_SETTING else given),
            )
    return given


def settings_or_refuse(additional_config: Any) -> Mapping[str, Any]:
    """:func:`settings_of`, for a server.

    Raises:
        ValueError: the settings are wrong; the message is for the user.
    """
    try:
        return settings_of(additional_config)
    except CheckpointError as error:
        raise ValueError(error.finding.text) from None


def _is_layers(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) < 9 and {type(i) for i in value} == {int}


def _write(right: Mapping[str, Any]) -> str:
    """The fix that writes the settings of ``right``, and of their values those that can be."""

    def text(name: str, value: Any) -> str:
        fits = _is_layers(value) if name == AUX_LAYERS_SETTING else isinstance(value, bool)
        return json.dumps(value) if fits else _SETTINGS[name]

    written = ", ".join(
        f'"{name}": {text(name, right[name])}' for name in _SETTINGS if name in right
    )
    return f'write "{KEY}": {{{written}}} there, or leave it out'


def _no_setting(fact: str, key: str, value: Any, fix: str) -> CheckpointError:
    return CheckpointError(
        "drafter-setting",
        f'--additional-config, "{KEY}" {fact}',
        fix,
        key=f"{key} in --additional-config",
        value=value,
    )


def _shape(model_config: Any) -> TargetShape:
    text = model_config.hf_text_config
    return TargetShape(
        num_layers=int(text.num_hidden_layers),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
    )
