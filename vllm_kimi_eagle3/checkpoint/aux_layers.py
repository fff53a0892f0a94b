# SPDX-License-Identifier: Apache-2.0
"""Which of the target's hidden states a drafter reads: the one place where that is decided.

An EAGLE-3 drafter is trained on the hidden states at a few layers of its target, and names them in
its config. Two conventions are in use and no key says which one was meant:

- the *output* of layer i, as trainers count (SpecForge, ModelOpt, TorchSpec): 1, 29, 57 of 61;
- the *input* of layer i, as vLLM and SGLang capture: 2, 30, 58 of 61, the same three tensors.

Fed one layer off, nothing crashes and acceptance falls. The rule for telling them apart is
SGLang's (https://github.com/sgl-project/sglang/pull/25454): a list that begins with 1 is of
outputs, one that begins with 2 of inputs. A list of inputs is never shifted, so it is idempotent.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError, quoted

KEY = "eagle_aux_hidden_state_layer_ids"
COUNT_KEY = "num_aux_hidden_states"
NESTED = "eagle_config"
# The spelling that vLLM's V2 runner looks for inside eagle_config from 0.27 on.
_NESTED_KEYS = (KEY, "layer_ids")

# As many as EAGLE-3 has where nothing says otherwise (arXiv:2503.01840: low, middle, high).
DEFAULT_COUNT = 3

OPTION = '--additional-config \'{"kimi_eagle3": {"aux_hidden_state_layers": [...]}}\''


@dataclass(frozen=True)
class AuxLayers:
    """The hidden states that a drafter reads.

    Attributes:
        captured: ids as vLLM captures them, increasing: id i is the input of decoder layer i, so 0
            is the embedding and the number of layers the last layer's output before the final norm.
        stated: the ids as they were written, or None where nothing names any.
        source: where they were written, in words.
        rule: how ``captured`` follows from ``stated``, in words.
        certain: False where the ids fit neither convention and were taken as they are.
    """

    captured: tuple[int, ...]
    stated: tuple[int, ...] | None
    source: str
    rule: str
    certain: bool = True

    def __str__(self) -> str:
        stated = "none" if self.stated is None else str(list(self.stated))
        return f"{self.source} says {stated}, captured {list(self.captured)} ({self.rule})"


def default_layers(num_layers: int) -> tuple[int, ...]:
    """vLLM's own default for a target of ``num_layers`` decoder layers: (2, 30, 58) of 61."""
    return 2, num_layers // 2, num_layers - 3


def resolve_aux_layers(
    config: Mapping[str, Any],
    num_layers: int,
    *,
    fc_count: int | None = None,
    chosen: Sequence[int] | None = None,
) -> AuxLayers:
    """Decide which hidden states to capture.

    Args:
        config: the drafter's config.json as a dict, that of a speculators checkpoint included.
        num_layers: the target's number of decoder layers.
        fc_count: how many hidden states ``fc.weight`` joins, from its shape; None if unknown.
        chosen: the user's own choice, as vLLM captures; wins over the config.

    Raises:
        CheckpointError: the ids cannot be those of this target, contradict each other, or are not
            as many as ``fc.weight`` takes.
    """
    count = _count(config, fc_count)
    if chosen is not None:
        where = OPTION.replace("[...]", quoted(chosen))
        ids = _checked(chosen, where, num_layers, num_layers)
        return _counted(AuxLayers(ids, ids, where, "as you chose: inputs of layers"), count)
    stated = [
        (where, _checked(value, where, num_layers, num_layers)) for where, value in _named(config)
    ]
    resolved = [_resolve(where, ids, num_layers) for where, ids in stated]
    if any(r.captured != resolved[0].captured for r in resolved):
        both = " and ".join(f"{where} says {list(ids)}" for where, ids in stated)
        raise CheckpointError(
            f"the drafter's config.json contradicts itself: {both}, which are not the same layers; "
            f"correct it, or choose with {OPTION}"
        )
    if resolved:
        return _counted(resolved[0], count)
    layers = default_layers(num_layers)
    if len(set(layers)) != len(layers) or min(layers) < 0:
        raise CheckpointError(
            f"the drafter's config.json names no aux layers ({KEY}), and vLLM's default for a "
            f"target of {num_layers} layers, {layers}, names one twice; choose with {OPTION}"
        )
    default = AuxLayers(layers, None, "config.json", "vLLM's default (2, n // 2, n - 3)")
    return _counted(default, count)


def _resolve(where: str, ids: tuple[int, ...], num_layers: int) -> AuxLayers:
    if ids[0] == 1 and ids[-1] < num_layers:
        shifted = tuple(i + 1 for i in ids)
        return AuxLayers(shifted, ids, where, "outputs of layers, so the next layer's input")
    if ids[0] == 2:
        return AuxLayers(ids, ids, where, "inputs of layers, as vLLM counts")
    if ids[-1] == num_layers:
        # The output of a layer that the target does not have: these can only be inputs.
        return AuxLayers(ids, ids, where, "inputs of layers: the last id is no layer's output")
    return AuxLayers(
        ids, ids, where, "kept: fits neither convention, taken as inputs of layers", certain=False
    )


def _named(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every place of the config that names layers, with what it says."""
    found = []
    if config.get(KEY) is not None:
        found.append((f"config.json, {KEY},", config[KEY]))
    nested = config.get(NESTED)
    if isinstance(nested, Mapping):
        for key in _NESTED_KEYS:
            if nested.get(key) is not None:
                found.append((f"config.json, {NESTED}.{key},", nested[key]))
    return found


def _count(config: Mapping[str, Any], fc_count: int | None) -> tuple[int, str] | None:
    """How many hidden states the drafter joins and what says so; None if nothing does."""
    said = config.get(COUNT_KEY)
    if said is not None and (not _is_int(said) or not 0 < said < 1000):
        raise CheckpointError(
            f"config.json, {COUNT_KEY} is {quoted(said)}; it is the number of aux layers"
        )
    if fc_count is not None:
        if said is not None and said != fc_count:
            raise CheckpointError(
                f"config.json, {COUNT_KEY} is {said}, but fc.weight is as wide as {fc_count} "
                "hidden states of the target; the config belongs to another checkpoint"
            )
        return fc_count, "fc.weight"
    return None if said is None else (said, f"config.json, {COUNT_KEY},")


def _counted(layers: AuxLayers, count: tuple[int, str] | None) -> AuxLayers:
    if count is None or len(layers.captured) == count[0]:
        return layers
    named = (
        f"config.json names no aux layers, and the default has {len(layers.captured)}"
        if layers.stated is None
        else f"{layers.source} names {len(layers.captured)}: {list(layers.stated)}"
    )
    raise CheckpointError(
        f"the drafter joins {count[0]} hidden states of the target ({count[1]}), but {named}; "
        f"write the layers that it was trained on into {KEY}, or choose with {OPTION}"
    )


def _checked(ids: Any, where: str, num_layers: int, last: int) -> tuple[int, ...]:
    if not _is_list(ids) or not ids or not all(_is_int(i) for i in ids):
        raise CheckpointError(f"{where} must be a list of layer numbers, and is {quoted(ids)}")
    if any(not 0 <= i <= last for i in ids):
        raise CheckpointError(
            f"{where} says {quoted(list(ids))}, but the target has {num_layers} layers: ids go "
            f"from 0 (the embedding) to {last} (the last layer's output)"
        )
    if any(a >= b for a, b in itertools.pairwise(ids)):
        raise CheckpointError(
            f"{where} says {quoted(list(ids))}, which does not increase; vLLM joins hidden states "
            "in the order of the layers, so the drafter would get them in another order than it "
            "was trained on"
        )
    return tuple(ids)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
