# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding as a config states it, in one shape whatever wrote it.

Transformers 4 writes ``rope_theta`` beside ``rope_scaling``, Transformers 5 both into
``rope_parameters``; the kind is ``rope_type``, or ``type`` in older files. Read from the wrong
place theta becomes 10000, and a drafter drafts on, badly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import CheckpointError, quoted

# As vLLM's RotaryEmbedding and Transformers have it where a config states none.
DEFAULT_THETA = 10_000.0

# More than any theta, factor or length.
_LARGEST = 1e12

YARN_KINDS = frozenset({"yarn", "deepseek_yarn"})
# Kinds whose frequencies do not depend on the longest position: any position can be computed.
_FORMULA_KINDS = frozenset({"default", "linear", "llama3"})
_NEEDS_FACTOR = YARN_KINDS | {"linear", "llama3", "dynamic"}


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding.

    Attributes:
        theta: the base of the frequencies.
        kind: ``default`` (plain), ``yarn``, ``linear``, ``llama3``, ...
        scaling: the scaling's own parameters, without kind and theta.
    """

    theta: float
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        """By how much positions are stretched; 1.0 for plain rope."""
        return float(self.scaling.get("factor", 1.0))

    @property
    def yarn(self) -> bool:
        """True for YaRN, under either of its names."""
        return self.kind in YARN_KINDS

    @property
    def magnitude(self) -> float:
        """The factor on cos and sin: YaRN's mscale ratio, 1.0 for everything else.

        As DeepSeek's modelling code and the trainers' Llama drafters have it: the ratio of the two
        corrections ``0.1 * m * ln(factor) + 1`` (arXiv:2309.00071, eq. 22) with m = ``mscale`` and
        m = ``mscale_all_dim``, absent ones being 1 and 0.
        """
        if not self.yarn:
            return 1.0
        if self.scaling.get("attention_factor") is not None:
            return float(self.scaling["attention_factor"])  # As Transformers has it: as stated.
        return yarn_mscale(self.factor, self._number("mscale", 1.0)) / yarn_mscale(
            self.factor, self._number("mscale_all_dim", 0.0)
        )

    def position_limit(self, max_position_embeddings: int) -> int | None:
        """The first position that vLLM's table of cos and sin cannot be made to hold; None if any
        position can be computed.

        Args:
            max_position_embeddings: the config's.
        """
        if self.kind in _FORMULA_KINDS:
            return None
        if self.yarn:
            original = self.scaling["original_max_position_embeddings"]
            return int(original * self.factor)
        return max_position_embeddings

    def __str__(self) -> str:
        theta = f"theta {self.theta:g}"
        if self.kind == "default":
            return f"{theta}, no scaling"
        name = "YaRN" if self.yarn else self.kind
        return f"{theta}, {name} x{self.factor:g}"

    def _number(self, key: str, absent: float) -> float:
        value = self.scaling.get(key)
        return absent if value is None else float(value)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's magnitude correction; 1.0 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(config: Mapping[str, Any]) -> Rope:
    """The rope of a config.json (or, for a speculators checkpoint, of its transformer layer).

    Raises:
        CheckpointError: the parts contradict each other, or are no rope that can be computed.
    """
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(
                f"config.json, {key} is {quoted(value)}; it must be an object or null"
            )
    block = new or old or {}
    key = "rope_parameters" if new else "rope_scaling"
    if any(isinstance(value, Mapping) for value in block.values()):
        raise CheckpointError(
            f"config.json, {key} has a rope per kind of layer ({', '.join(map(str, block))}); an "
            "EAGLE-3 drafter has one layer, and its rope stands in the block itself"
        )
    kind = _kind(block, key)
    theta = _theta(config, block, key)
    scaling = {
        k: v
        for k, v in block.items()
        if k not in ("rope_type", "type", "rope_theta") and v is not None
    }
    if kind != "default" and kind in _NEEDS_FACTOR:
        _positive(scaling.get("factor"), f"config.json, {key}.factor")
    if kind in YARN_KINDS or kind == "llama3":
        _positive(
            scaling.get("original_max_position_embeddings"),
            f"config.json, {key}.original_max_position_embeddings",
        )
    for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow", "attention_factor"):
        if name in scaling and not _is_number(scaling[name]):
            raise CheckpointError(
                f"config.json, {key}.{name} is {quoted(scaling[name])}, not a number"
            )
    return Rope(theta, kind, scaling if kind != "default" else {})


def _kind(block: Mapping[str, Any], key: str) -> str:
    kinds = {str(block[k]) for k in ("rope_type", "type") if block.get(k) is not None}
    if len(kinds) > 1:
        raise CheckpointError(
            f"config.json, {key} says both {' and '.join(sorted(kinds))} as rope_type and type"
        )
    kind = kinds.pop() if kinds else "default"
    if kind == "default" and block.get("factor") not in (None, 1, 1.0):
        raise CheckpointError(
            f"config.json, {key} has factor {quoted(block['factor'])} but no rope_type for it: "
            'say which scaling it is, such as "yarn"'
        )
    return kind


def _theta(config: Mapping[str, Any], block: Mapping[str, Any], key: str) -> float:
    inside, outside = block.get("rope_theta"), config.get("rope_theta")
    for where, value in ((f"{key}.rope_theta", inside), ("rope_theta", outside)):
        if value is not None:
            _positive(value, f"config.json, {where}")
    if inside is not None and outside is not None and float(inside) != float(outside):
        raise CheckpointError(
            f"config.json contradicts itself: rope_theta is {outside}, {key}.rope_theta is {inside}"
        )
    theta = inside if inside is not None else outside
    return DEFAULT_THETA if theta is None else float(theta)


def _positive(value: Any, where: str) -> None:
    if not _is_number(value) or not 0 < value < _LARGEST:
        raise CheckpointError(f"{where} is {quoted(value)}; it must be a positive number")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # An integer that no float can hold.
        return False
