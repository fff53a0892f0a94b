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

from vllm_kimi_eagle3.findings import Evidence, Finding

from .errors import CheckpointError, quoted

# As vLLM's RotaryEmbedding and Transformers have it where a config states none.
DEFAULT_THETA = 10_000.0

# More than any theta, factor or length.
_LARGEST = 1e12

ROPE = "drafter-rope"
"""The id of what is wrong with a drafter's rope, whatever its attention."""

YARN_KINDS = frozenset({"yarn", "deepseek_yarn"})
# Kinds whose frequencies do not depend on the longest position: any position can be computed.
_FORMULA_KINDS = frozenset({"default", "linear", "llama3"})
# Those of get_rope, in any release from 0.15 to 0.33 (layers/rotary_embedding/__init__.py), and the
# two older names that vLLM renames (transformers_utils/config.py).
_KINDS = (
    YARN_KINDS
    | _FORMULA_KINDS
    | {"dynamic", "ntk", "longrope", "su", "mrope", "mllama4", "xdrope", "proportional"}
    | {"deepseek_llama_scaling", "openpangu", "telechat3-yarn", "bailing_mrope"}
)
_NEEDS_FACTOR = YARN_KINDS | {"linear", "llama3", "dynamic"}


@dataclass(frozen=True)
class Reach:
    """How far a drafter drafts.

    Attributes:
        formula: any position can be computed, so the table of cos and sin may be as long as wanted.
        limit: after how many tokens a request stops drafting; None where none does.
        finding: what is to be said of it; None where it reaches the longest request as trained.
    """

    formula: bool
    limit: int | None
    finding: Finding | None


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

    @property
    def stock_magnitude(self) -> float:
        """The factor on cos and sin with which vLLM up to 0.29 computes a Llama drafter's YaRN: the
        correction for ``factor`` alone."""
        return yarn_mscale(self.factor, 1.0) if self.kind == "yarn" else self.magnitude

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

    def reach(self, stated: int | None, default: int, longest: int) -> Reach:
        """How far a drafter with this rope drafts.

        Args:
            stated: its max_position_embeddings; None if its config.json has none.
            default: what the config's class has in that case.
            longest: how many tokens a request of the server may have.
        """
        limit = self.position_limit(stated or default)
        evidence = Evidence(
            file="config.json",
            key="max_position_embeddings",
            value=None if stated is None else str(stated),
        )
        if limit is not None and limit < longest:
            finding = Finding(
                "drafter-rope-ends",
                f"a request stops drafting, alone, at {limit} tokens, where the drafter's rope "
                f"ends, and requests may have up to {longest}",
                f"--max-model-len {limit} keeps requests within it",
                evidence,
            )
            return Reach(False, limit, finding)
        if (stated or default) < longest:
            own, then = f"max_position_embeddings is {stated}", "expect less acceptance beyond"
            if stated is None:
                own = f"config.json has no max_position_embeddings, which stands for {default}"
                then += " if it was trained on no more"
            finding = Finding(
                "drafter-length",
                f"the drafter drafts up to the {longest} tokens of the target, and its {own}: "
                f"{then}",
                evidence=evidence,
            )
            return Reach(limit is None, None, finding)
        return Reach(limit is None, None, None)

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
            raise _no_rope(f"{key} is {quoted(value)}, and must be an object or null", key, value)
    block = new or old or {}
    key = "rope_parameters" if new else "rope_scaling"
    if any(isinstance(value, Mapping) for value in block.values()):
        kinds = quoted(", ".join(map(str, block)))
        raise _no_rope(
            f"{key} has a rope per kind of layer ({kinds}), where an EAGLE-3 drafter has one layer "
            "and its rope stands in the block itself",
            key,
        )
    kind = _kind(block, key)
    theta = _theta(config, block, key)
    scaling = {
        k: v
        for k, v in block.items()
        if k not in ("rope_type", "type", "rope_theta") and v is not None
    }
    if kind != "default" and kind in _NEEDS_FACTOR:
        _positive(scaling.get("factor"), f"{key}.factor")
    if kind in YARN_KINDS or kind == "llama3":
        _positive(
            scaling.get("original_max_position_embeddings"),
            f"{key}.original_max_position_embeddings",
        )
    for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow", "attention_factor"):
        if name in scaling and not _is_number(scaling[name]):
            raise _no_rope(
                f"{key}.{name} is {quoted(scaling[name])}, not a number",
                f"{key}.{name}",
                scaling[name],
            )
    return Rope(theta, kind, scaling if kind != "default" else {})


def _kind(block: Mapping[str, Any], key: str) -> str:
    kinds = {str(block[k]) for k in ("rope_type", "type") if block.get(k) is not None}
    if len(kinds) > 1:
        both = " and ".join(quoted(kind) for kind in sorted(kinds))
        raise _no_rope(f"{key} says both {both}, as rope_type and as type", key)
    kind = kinds.pop() if kinds else "default"
    if kind not in _KINDS:
        raise _no_rope(
            f"{key} has rope_type {quoted(kind)}, which no vLLM has", f"{key}.rope_type", kind
        )
    if kind == "default" and block.get("factor") not in (None, 1, 1.0):
        raise CheckpointError(
            ROPE,
            f"the drafter's config.json, {key} has factor {quoted(block['factor'])} but no "
            "rope_type for it",
            'say there which scaling it is, such as "rope_type": "yarn"',
            file="config.json",
            key=f"{key}.factor",
            value=block["factor"],
        )
    return kind


def _theta(config: Mapping[str, Any], block: Mapping[str, Any], key: str) -> float:
    inside, outside = block.get("rope_theta"), config.get("rope_theta")
    for where, value in ((f"{key}.rope_theta", inside), ("rope_theta", outside)):
        if value is not None:
            _positive(value, where)
    if inside is not None and outside is not None and float(inside) != float(outside):
        raise CheckpointError(
            ROPE,
            f"the drafter's config.json contradicts itself: rope_theta is {outside}, "
            f"{key}.rope_theta is {inside}",
            "keep the one that the drafter was trained with",
            file="config.json",
            key=f"{key}.rope_theta",
            value=inside,
        )
    theta = inside if inside is not None else outside
    return DEFAULT_THETA if theta is None else float(theta)


def _positive(value: Any, where: str) -> None:
    if not _is_number(value) or not 0 < value < _LARGEST:
        raise _no_rope(f"{where} is {quoted(value)}, and must be a positive number", where, value)


def _no_rope(fact: str, key: str, value: Any = None) -> CheckpointError:
    return CheckpointError(
        ROPE,
        f"the drafter's config.json, {fact}",
        f"correct {key} in the drafter's config.json",
        file="config.json",
        key=key,
        value=value,
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # An integer that no float can hold.
        return False
