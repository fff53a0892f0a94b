# SPDX-License-Identifier: Apache-2.0
"""The ways in which a drafter's checkpoint can be read, and those that are one change apart.

A checkpoint holds weights, and config.json says how they are run. Each field of :class:`Reading` is
something that a config got wrong in the field, or that a release of vLLM read otherwise. The search
starts from what the server uses now and takes one change after another as long as each is a
significant gain, so that two mistakes at once are found as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal

from vllm_kimi_eagle3.checkpoint.aux_layers import default_layers
from vllm_kimi_eagle3.checkpoint.rope import Rope, yarn_mscale
from vllm_kimi_eagle3.checkpoint.sharing import Owner

Rows = Literal["d2t", "none", "t2d", "ids", "unknown"]
"""Which of the target's tokens the rows of the head stand for: ``d2t`` holds offsets (as vLLM adds
them), there is no map (row i is token i), they are the tokens that ``t2d`` marks, ``d2t`` holds
token ids, or a map that is not in the checkpoint and is taken from the text itself."""

# The bases of the published Kimi drafters and of Transformers where a config names none.
THETAS = (10_000.0, 50_000.0, 1_000_000.0)
# YaRN's beta_fast in the published Kimi drafters: 1 in ModelOpt's and TorchSpec's, 32 in others.
_BETAS_FAST = (1.0, 32.0)

SCORED_ROPES = frozenset({"default", "yarn", "deepseek_yarn", "linear", "llama3"})
"""The kinds of rope that ``score.py`` computes."""


@dataclass(frozen=True)
class Reading:
    """How a drafter is run.

    Attributes:
        aux: ids of the target's hidden states that it is fed, as vLLM counts (id i is the input of
            layer i); None for the final hidden state, after the norm.
        fc_norm, norm_before_fc, norm_output, norm_before_residual: as in config.json.
        rope: its rotary embedding.
        rows: which tokens the rows of its head stand for.
        embedding, head: whose.
    """

    aux: tuple[int, ...] | None
    rope: Rope
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    rows: Rows = "d2t"
    embedding: Owner = "own"
    head: Owner = "own"

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for readings that run alike."""
        return tuple(_plain(getattr(self, f.name)) for f in fields(self))

    def having(self, name: str, value: Any) -> Reading:
        """The same with another value of one field."""
        changes: dict[str, Any] = {name: value}
        return replace(self, **changes)

    def changed(self, other: Reading) -> tuple[str, ...]:
        """The fields in which ``other`` is run otherwise."""
        pairs = zip(fields(self), self.key, other.key, strict=True)
        return tuple(field.name for field, own, its in pairs if own != its)


def _plain(value: Any) -> Any:
    """A field's value with what does not matter left out."""
    if not isinstance(value, Rope):
        return value
    if not value.yarn:
        return (value.theta, value.kind, *sorted((k, repr(v)) for k, v in value.scaling.items()))
    of = value.scaling.get
    return (
        (value.theta, "yarn", value.factor, of("original_max_position_embeddings")),
        (float(of("beta_fast", 32.0)), float(of("beta_slow", 1.0))),
        (value.magnitude, softmax_correction(value)),
    )


def softmax_correction(rope: Rope) -> float:
    """By what MLA multiplies its attention scores under YaRN: the square of the correction for
    ``mscale_all_dim`` (``DeepseekV2MLAAttention.__init__``); 1.0 for every other rope."""
    if not rope.yarn:
        return 1.0
    return yarn_mscale(rope.factor, float(rope.scaling.get("mscale_all_dim", 0.0))) ** 2


SWITCHES = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")


@dataclass(frozen=True)
class Choices:
    """What a checkpoint leaves open.

    Attributes:
        num_layers: the target's decoder layers.
        count: how many hidden states ``fc`` joins; 0 without ``fc``.
        stated: lists of aux ids that config.json has, as they are written and as they are resolved.
        target_rope: the target's.
        switches: those that can be turned either way with the tensors that there are.
        rows: the maps that the checkpoint allows, the best first.
        own: of ``embedding`` and ``head``, those that the checkpoint has and that differ from the
            target's.
    """

    num_layers: int
    count: int
    stated: tuple[tuple[int, ...], ...]
    target_rope: Rope | None
    switches: tuple[str, ...]
    rows: tuple[Rows, ...]
    own: tuple[str, ...]


def aux_choices(now: tuple[int, ...] | None, choices: Choices) -> Iterator[tuple[int, ...] | None]:
    """The aux layers to try beside ``now``: each id one higher and one lower, as config.json has
    them and one higher than that (outputs taken as inputs), and the conventions: vLLM's default,
    the same one off either way, with the last layer's output, with both ends.
    """
    n = choices.num_layers
    if choices.count == 0:
        yield from (None, (n,), (n - 1,))
        return
    tried: list[Sequence[int]] = []
    for ids in (now, *choices.stated):
        if ids is not None:
            tried += [ids, *_shifted(ids)]
    default = default_layers(n)
    if choices.count == len(default):
        low, middle = default[:2]
        tried += [default, *_shifted(default), (low, middle, n), (0, middle, n)]
    for ids in dict.fromkeys(map(tuple, tried)):
        rising = all(a < b for a, b in pairwise(ids))
        if len(ids) == choices.count and rising and ids[0] >= 0 and ids[-1] <= n:
            yield ids


def _shifted(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(i + by for i in ids) for by in (1, -1)]


def rope_choices(now: Rope, choices: Choices) -> Iterator[Rope]:
    """The ropes to try beside ``now``: other bases, the target's, without the scaling, and YaRN as
    others compute it: vLLM's magnitude up to 0.29, another ``beta_fast``."""
    target = choices.target_rope
    thetas = list(dict.fromkeys([*THETAS, now.theta, *([target.theta] if target else [])]))
    for theta in thetas:
        yield replace(now, theta=theta)
    if target is not None and target.kind in SCORED_ROPES:
        yield target
        if target.kind != "default":
            yield replace(target, theta=now.theta)
    if now.kind != "default":
        for theta in thetas:
            yield Rope(theta)
    if now.yarn:
        for beta in _BETAS_FAST:
            yield replace(now, scaling={**now.scaling, "beta_fast": beta})
        if now.kind == "yarn":
            # Without the two, Transformers and vLLM up to 0.29 multiply by the factor's own.
            left = {k: v for k, v in now.scaling.items() if not k.startswith("mscale")}
            yield replace(now, scaling={**left, "mscale": 1.0, "mscale_all_dim": 0.0})


def one_change(now: Reading, choices: Choices) -> list[Reading]:
    """Every reading that differs from ``now`` in one thing, the usual mistakes first; each once."""
    found = [replace(now, aux=aux) for aux in aux_choices(now.aux, choices)]
    found += [now.having(name, not getattr(now, name)) for name in choices.switches]
    found += [replace(now, rope=rope) for rope in rope_choices(now.rope, choices)]
    found += [replace(now, rows=rows) for rows in choices.rows]
    for part in choices.own:
        for owner in ("own", "target"):
            found.append(now.having(part, owner))
    unique = {reading.key: reading for reading in reversed(found)}
    unique.pop(now.key, None)
    # Reversed twice, so that of equal ones the first is kept, in its place.
    return list(reversed(unique.values()))


def layers_needed(now: Reading, choices: Choices) -> tuple[tuple[int, ...], bool]:
    """The hidden states that any hypothesis reads: their ids, and whether the final one is read."""
    every = [now.aux, *aux_choices(now.aux, choices)]
    ids = {i for aux in every if aux is not None for i in aux}
    return tuple(sorted(ids)), any(aux is None for aux in every)


def described(reading: Reading, now: Reading) -> str:
    """How a reading differs from ``now``, in words."""
    return ", ".join(_words(name, reading, now) for name in now.changed(reading)) or "as it is now"


def _words(name: str, reading: Reading, now: Reading) -> str:
    if name in SWITCHES:
        return f"{name} {'on' if getattr(reading, name) else 'off'}"
    if name == "aux":
        if reading.aux is None:
            return "the final hidden state"
        words = f"aux layers {list(reading.aux)}"
        for by, said in ((1, "one higher"), (-1, "one lower")):
            if now.aux is not None and reading.aux == tuple(i + by for i in now.aux):
                words += f" ({said})"
        return words
    if name == "rope":
        return f"rope {rope_words(reading.rope)}"
    if name == "rows":
        return ROWS[reading.rows]
    return f"the {'target' if getattr(reading, name) == 'target' else 'drafter'}'s {name}"


ROWS: Mapping[str, str] = {
    "d2t": "d2t as offsets",
    "none": "no d2t",
    "t2d": "the tokens that t2d marks",
    "ids": "d2t as token ids",
    "unknown": "a map that is not in the checkpoint",
}
"""The values of :attr:`Reading.rows`, in words."""


def rope_words(rope: Rope) -> str:
    """A rope in words, with what of YaRN the short form leaves out."""
    words = str(rope)
    if rope.yarn:
        words += f", beta_fast {float(rope.scaling.get('beta_fast', 32.0)):g}"
        words += f", cos and sin times {rope.magnitude:.4g}"
    return words
