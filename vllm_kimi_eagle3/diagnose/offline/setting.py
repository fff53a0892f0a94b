# SPDX-License-Identifier: Apache-2.0
"""What to change so that the server reads the drafter in the best way: flag, key or tensor.

Aux layers have a setting of the plugin. What else a drafter is run by stands in its config.json,
and where the weights themselves are the mistake, in its tensors. A change is written out where the
user's own config has the key, and ``--write`` makes a copy of the folder that has it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from vllm_kimi_eagle3.checkpoint.aux_layers import NESTED
from vllm_kimi_eagle3.checkpoint.rope import Rope
from vllm_kimi_eagle3.findings import Evidence, Finding
from vllm_kimi_eagle3.pair import AUX_LAYERS_SETTING, KEY

from .hypotheses import ROWS, SWITCHES, Reading, described, rope_words
from .subject import Subject

_LAYER = "transformer_layer_config"
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")

_KINDS = {
    "aux": "diagnose-offline-aux-layers",
    **dict.fromkeys(SWITCHES, "diagnose-offline-norms"),
    "rope": "diagnose-offline-rope",
    "rows": "diagnose-offline-d2t",
    "embedding": "diagnose-offline-own-part",
    "head": "diagnose-offline-own-part",
}


def additional_config(subject: Subject, best: Reading) -> dict[str, Any] | None:
    """The value of ``--additional-config`` that a server needs for ``best``; None if the aux layers
    stay as they are."""
    if best.aux is None or (best.aux == subject.now.aux and not aux_refused(subject)):
        return None
    given = dict(subject.additional_config)
    own = given.get(KEY)
    given[KEY] = {
        **(own if isinstance(own, Mapping) else {}),
        AUX_LAYERS_SETTING: list(best.aux),
    }
    return given


def aux_refused(subject: Subject) -> bool:
    """The plugin does not serve with the aux layers that it is given now."""
    return any(finding.id.startswith("drafter-aux-") for finding in subject.refused)


def flag(subject: Subject, best: Reading) -> str:
    """:func:`additional_config` as it is typed; "" if it is not needed."""
    value = additional_config(subject, best)
    return "" if value is None else f"--additional-config {shlex.quote(json.dumps(value))}"


def changed_config(subject: Subject, best: Reading) -> dict[str, Any]:
    """The drafter's config.json with which the plugin reads it as ``best``; the aux layers are left
    to ``--additional-config``."""
    config, now = deepcopy(dict(subject.config)), subject.now
    changed = now.changed(best)
    for name in SWITCHES:
        if name in changed or getattr(best, name) != _stated(config, name):
            _set_switch(config, name, getattr(best, name))
    if "rope" in changed:
        _set_rope(config, best.rope)
    if "head" in changed and best.head == "target":
        _holder(config, "draft_vocab_size")["draft_vocab_size"] = subject.shape.vocab_size
    return config


def _stated(config: Mapping[str, Any], name: str) -> bool:
    """What a switch is now, as the resolver reads it."""
    nested = config.get(NESTED)
    for block in (nested if isinstance(nested, Mapping) else {}, config):
        if isinstance(block.get(name), bool):
            return bool(block[name])
    # The default of the speculators format (checkpoint/drafter.py).
    return name == "norm_before_residual" and _LAYER in config


def _set_switch(config: dict[str, Any], name: str, value: bool) -> None:
    """Sets a switch wherever it stands, else at the top."""
    nested = config.get(NESTED)
    inside = isinstance(nested, dict) and nested.get(name) is not None
    if isinstance(nested, dict) and inside:
        nested[name] = value
    if not inside or config.get(name) is not None:
        config[name] = value


def _holder(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The block of a config that has one of these keys: the top, or the speculators format's."""
    layer = config.get(_LAYER)
    if isinstance(layer, dict) and not any(config.get(key) is not None for key in keys):
        return layer
    return config


def _set_rope(config: dict[str, Any], rope: Rope) -> None:
    """Writes a rope in the layout that the config has."""
    block = _holder(config, *_ROPE_KEYS)
    old = block.get("rope_parameters") or block.get("rope_scaling") or {}
    kind = "type" if "type" in old and "rope_type" not in old else "rope_type"
    newer = bool(block.get("rope_parameters"))
    for key in _ROPE_KEYS:
        block.pop(key, None)
    if newer:
        block["rope_parameters"] = {kind: rope.kind, "rope_theta": rope.theta, **rope.scaling}
        return
    block["rope_theta"] = rope.theta
    block["rope_scaling"] = None if rope.kind == "default" else {kind: rope.kind, **rope.scaling}


# ------------------------------------------------------------------------------------ in words


def findings(subject: Subject, best: Reading, gain: str, evidence: str) -> list[Finding]:
    """What is wrong now and the exact change, one finding for each thing that changes.

    Args:
        best: the reading to use.
        gain: what all of it brings, in words.
        evidence: what that rests on.
    """
    found = []
    for name in subject.now.changed(best):
        now, then = (_value(name, reading) for reading in (subject.now, best))
        found.append(
            Finding(
                _KINDS[name],
                f"the server uses {now}, and the drafter drafts better with {then}: {gain}",
                _fix(subject, best, name),
                Evidence(key=described(best, subject.now), value=evidence),
            )
        )
    return found


def chosen_layers(subject: Subject, best: Reading) -> Finding:
    """The layers to choose where those that are given are refused, and vLLM's default is best."""
    return Finding(
        _KINDS["aux"],
        f"the aux layers that are given are refused, and the drafter drafts best with "
        f"{_value('aux', best)}",
        _fix(subject, best, "aux"),
        Evidence(key="aux layers", value=str(list(best.aux or ()))),
    )


def _value(name: str, reading: Reading) -> str:
    if name in SWITCHES:
        return f"{name} {'on' if getattr(reading, name) else 'off'}"
    if name == "aux":
        aux = reading.aux
        return "the final hidden state" if aux is None else f"aux layers {list(aux)}"
    if name == "rope":
        return f"rope {rope_words(reading.rope)}"
    if name == "rows":
        return ROWS[reading.rows]
    whose = "the target's" if getattr(reading, name) == "target" else "the checkpoint's own"
    return f"{whose} {name}"


def _fix(subject: Subject, best: Reading, name: str) -> str:
    file = subject.folder / "config.json"
    if name == "aux":
        return (
            f"start the server with {flag(subject, best)}"
            if best.aux is not None
            else (f'write "use_aux_hidden_state": false into {file}')
        )
    if name in SWITCHES or name == "rope":
        return f"write {_difference(subject, best, name)} into {file}{_with_tensors(best, name)}"
    copy = "; --write FOLDER makes a copy of the drafter with it"
    if name == "rows":
        if best.rows == "t2d":
            return f"add the d2t that follows from its t2d{copy}"
        if best.rows == "ids":
            return f"export it with d2t[i] = (token id of row i) - i{copy}"
        if best.rows == "unknown":
            return "add the d2t that the drafter was trained with"
        if best.rows == "none":
            if subject.whole_head:
                return f"take the d2t out of the checkpoint{copy}"
            return "export it with the d2t of its lm_head"
        return "export it with the d2t of its lm_head"
    tensor = {"embedding": "embed_tokens.weight", "head": "lm_head.weight"}[name]
    if getattr(best, name) == "target":
        return (
            f"get the {tensor} that the drafter was trained with; or take it out of the "
            f"checkpoint, and the target's is used{copy}"
        )
    return f"keep {tensor} in the checkpoint"


def _difference(subject: Subject, best: Reading, name: str) -> str:
    """The keys of config.json that one change takes, as they are to stand there."""
    one = deepcopy(dict(subject.config))
    if name == "rope":
        _set_rope(one, best.rope)
        block = _holder(one, *_ROPE_KEYS)
        keys = {key: block[key] for key in _ROPE_KEYS if key in block}
        where = f' inside "{_LAYER}"' if block is not one else ""
        return " and ".join(f'"{k}": {json.dumps(v)}' for k, v in keys.items()) + where
    nested = one.get(NESTED)
    written = f'"{name}": {json.dumps(getattr(best, name))}'
    inside = isinstance(nested, Mapping) and nested.get(name) is not None
    return f'{written} inside "{NESTED}"' if inside else written


def _with_tensors(best: Reading, name: str) -> str:
    tensors = {"fc_norm": "the fc_norm tensors", "norm_before_fc": "input_norm.weight"}
    if name in tensors and not getattr(best, name):
        return f", and take {tensors[name]} out; --write FOLDER makes a copy of the drafter so"
    return ""
