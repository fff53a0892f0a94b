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
from typing import Any, NamedTuple

from vllm_kimi_eagle3.findings import Evidence, Finding

from .errors import CheckpointError, quoted

KEY = "eagle_aux_hidden_state_layer_ids"
COUNT_KEY = "num_aux_hidden_states"
NESTED = "eagle_config"
FILE = "config.json"
_OWN_FILE = f"the drafter's {FILE}"
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
        file: the file that they were written in; None on the command line.
        key: the key that they were written under.
        rule: how ``captured`` follows from ``stated``, in words.
        certain: False where the ids fit neither convention and were taken as they are.
    """

    captured: tuple[int, ...]
    stated: tuple[int, ...] | None
    source: str
    file: str | None
    key: str
    rule: str
    certain: bool = True

    @property
    def unsure(self) -> Finding | None:
        """What to try where the convention could not be told."""
        if self.certain:
            return None
        higher = OPTION.replace("[...]", str([i + 1 for i in self.captured]))
        return Finding(
            "drafter-aux-unsure",
            f"the aux layers fit neither convention: {self.source} says {list(self.stated or ())}, "
            f"and they are captured as they stand, as inputs of layers",
            f"if acceptance is low, try each one higher with {higher}",
            Evidence(file=self.file, key=self.key, value=str(list(self.stated or ()))),
        )

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
        place = _Place(OPTION.replace("[...]", quoted(chosen)), None, "--additional-config")
        ids = _checked(chosen, place, num_layers)
        return _counted(AuxLayers(ids, ids, *place, "as you chose: inputs of layers"), count)
    stated = [(place, _checked(value, place, num_layers)) for place, value in _named(config)]
    resolved = [_resolve(place, ids, num_layers) for place, ids in stated]
    if any(r.captured != resolved[0].captured for r in resolved):
        both = " and ".join(f"`{place.key}` says {list(ids)}" for place, ids in stated)
        raise CheckpointError(
            "drafter-aux-contradiction",
            f"{_OWN_FILE} contradicts itself: {both}, which are not the same layers",
            f"correct it, or choose with {OPTION}",
            file=FILE,
            key=" and ".join(place.key for place, _ in stated),
            value=[list(ids) for _, ids in stated],
        )
    if resolved:
        return _counted(resolved[0], count)
    layers = default_layers(num_layers)
    if len(set(layers)) != len(layers) or min(layers) < 0:
        raise CheckpointError(
            "drafter-aux-layers",
            f"{_OWN_FILE} names no aux layers ({KEY}), and vLLM's default for a "
            f"target of {num_layers} layers, {layers}, names one twice or none that there is",
            f"choose with {OPTION}",
            file=FILE,
            key=KEY,
        )
    default = AuxLayers(layers, None, _OWN_FILE, FILE, KEY, "vLLM's default (2, n // 2, n - 3)")
    return _counted(default, count)


def _resolve(place: _Place, ids: tuple[int, ...], num_layers: int) -> AuxLayers:
    captured, certain = ids, True
    if ids[0] == 1 and ids[-1] < num_layers:
        captured = tuple(i + 1 for i in ids)
        rule = "outputs of layers, so the next layer's input"
    elif ids[0] == 2:
        rule = "inputs of layers, as vLLM counts"
    elif ids[-1] == num_layers:
        # The output of a layer that the target does not have: these can only be inputs.
        rule = "inputs of layers: the last id is no layer's output"
    else:
        rule, certain = "kept: fits neither convention, taken as inputs of layers", False
    return AuxLayers(captured, ids, *place, rule, certain)


class _Place(NamedTuple):
    """Where layers are named: in words, and as evidence."""

    words: str
    file: str | None
    key: str


def _named(config: Mapping[str, Any]) -> list[tuple[_Place, Any]]:
    """Every place of the config that names layers, with what it says."""
    found = []
    if config.get(KEY) is not None:
        found.append((_Place(f"{_OWN_FILE}, {KEY},", FILE, KEY), config[KEY]))
    nested = config.get(NESTED)
    if isinstance(nested, Mapping):
        for name in _NESTED_KEYS:
            if nested.get(name) is not None:
                key = f"{NESTED}.{name}"
                found.append((_Place(f"{_OWN_FILE}, {key},", FILE, key), nested[name]))
    return found


def _count(config: Mapping[str, Any], fc_count: int | None) -> tuple[int, str] | None:
    """How many hidden states the drafter joins and what says so; None if nothing does."""
    said = config.get(COUNT_KEY)
    if said is not None and (not _is_int(said) or not 0 < said < 1000):
        raise CheckpointError(
            "drafter-config-value",
            f"{_OWN_FILE}, {COUNT_KEY} is {quoted(said)}, and is the number of aux layers",
            f"correct {COUNT_KEY} in the drafter's config.json",
            file=FILE,
            key=COUNT_KEY,
            value=said,
        )
    if fc_count is not None:
        if said is not None and said != fc_count:
            raise CheckpointError(
                "drafter-aux-count",
                f"{_OWN_FILE}, {COUNT_KEY} is {said}, but fc.weight is as wide as {fc_count} "
                "hidden states of the target",
                "give the config that belongs to the checkpoint",
                file=FILE,
                key=COUNT_KEY,
                value=said,
            )
        return fc_count, "fc.weight"
    return None if said is None else (said, f"{_OWN_FILE}, {COUNT_KEY},")


def _counted(layers: AuxLayers, count: tuple[int, str] | None) -> AuxLayers:
    if count is None or len(layers.captured) == count[0]:
        return layers
    named = (
        f"{_OWN_FILE} names no aux layers, and the default has {len(layers.captured)}"
        if layers.stated is None
        else f"{layers.source} names {len(layers.captured)}: {list(layers.stated)}"
    )
    raise CheckpointError(
        "drafter-aux-count",
        f"the drafter joins {count[0]} hidden states of the target ({count[1]}), but {named}",
        f"choose {count[0]} with {OPTION}"
        if layers.file is None
        else f"write the layers that it was trained on into {layers.key}, or choose with {OPTION}",
        file=layers.file,
        key=layers.key,
        value=None if layers.stated is None else list(layers.stated),
    )


def _checked(ids: Any, place: _Place, num_layers: int) -> tuple[int, ...]:
    def no_layers(fact: str, fix: str) -> CheckpointError:
        return CheckpointError(
            "drafter-aux-layers", fact, fix, file=place.file, key=place.key, value=ids
        )

    where = place.words
    if not _is_list(ids) or not ids or not all(_is_int(i) for i in ids):
        raise no_layers(
            f"{where} must be a list of layer numbers, and is {quoted(ids)}",
            "write the layers that the drafter was trained on there",
        )
    if any(not 0 <= i <= num_layers for i in ids):
        raise no_layers(
            f"{where} says {quoted(list(ids))}, but the target has {num_layers} layers: ids go "
            f"from 0 (the embedding) to {num_layers} (the last layer's output)",
            f"give the drafter of this target, or choose with {OPTION}",
        )
    if any(a >= b for a, b in itertools.pairwise(ids)):
        raise no_layers(
            f"{where} says {quoted(list(ids))}, which does not increase: vLLM joins hidden states "
            "in the order of the layers, so the drafter would get them in another order than it "
            "was trained on",
            "export it with its layers in order",
        )
    return tuple(ids)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
