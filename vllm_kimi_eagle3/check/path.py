# SPDX-License-Identifier: Apache-2.0
"""By whose code this pair runs here: which of stock's gaps it meets, and what closes each.

A patch is needed where stock would do something else with this pair than what the plugin decides.
That is told from the configs and the release, by what is known of its source
(``gpu_model_runner.py``, ``eagle3_utils.py``, ``llama_eagle3.py``, ``deepseek_eagle3.py``, 0.15 to
0.33). A patch that only refuses what does not fit is not needed by a pair that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import Any, Literal

from vllm_kimi_eagle3.checkpoint.aux_layers import (
    COUNT_KEY,
    DEFAULT_COUNT,
    KEY,
    NESTED,
    default_layers,
)
from vllm_kimi_eagle3.checkpoint.drafter import Attention, Drafter, TargetShape
from vllm_kimi_eagle3.checkpoint.drafter_class import drafter_class
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError, quoted
from vllm_kimi_eagle3.checkpoint.rope import DEFAULT_THETA
from vllm_kimi_eagle3.checkpoint.sharing import TENSORS
from vllm_kimi_eagle3.checkpoint.target import IMAGE_TOKEN_KEYS, MULTIMODAL_MODEL_TYPE
from vllm_kimi_eagle3.checkpoint.vocabulary import read_vocabulary
from vllm_kimi_eagle3.findings import Finding, Severity
from vllm_kimi_eagle3.patches import PATCHES, not_in_place

from .attention import closed_by_the_plugin
from .drafter import DEFAULT_LENGTH, KIMI, drops_tensors
from .facts import Facts
from .host import fix_of
from .length import derived_length, longest_request
from .runner import runner_of
from .spelling import is_eagle3
from .subject import Subject

Verdict = Literal["upstream", "plugin", "not at all"]


@dataclass(frozen=True)
class Need:
    """A patch that a pair needs.

    Attributes:
        patch: its id.
        severity: how bad it is where the patch is not in effect.
        without: what stock does with this pair then, where that can be told; "" otherwise.
    """

    patch: str
    severity: Severity
    without: str = ""


@dataclass(frozen=True)
class Capability:
    """Something that a pair needs of a vLLM.

    Attributes:
        name: what, in words.
        by: ``upstream``, ``plugin``, or ``nobody`` where a patch for it is not in effect.
    """

    name: str
    by: str


@dataclass(frozen=True)
class Path:
    """By whose code a pair runs.

    Attributes:
        verdict: ``upstream`` where stock is right with it, ``plugin`` where that takes patches,
            ``not at all`` where something fails that no patch in effect closes.
        needed: the patches that it needs, in the order of their application.
        open: those of them that are not in effect.
        capabilities: the same by what they are for; empty where the drafter could not be read.
        refused: the ids of what fails of its two checkpoints, whatever patches are in effect.
    """

    verdict: Verdict
    needed: tuple[Need, ...]
    open: tuple[Need, ...]
    capabilities: tuple[Capability, ...]
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line; the findings say more of what it names."""
        off = ""
        if self.open:
            count = len(self.open)
            off = f"{self.open[0].patch} is" if count == 1 else f"{count} patches that it needs are"
            off += " not in effect"
        if self.verdict == "not at all":
            more = f" and {len(self.refused) - 1} more" if len(self.refused) > 1 else ""
            return f"not at all: {self.refused[0]}{more}" if self.refused else f"not at all: {off}"
        closed = [need for need in self.needed if need not in self.open]
        gaps = ", ".join(need.patch for need in closed if need.severity is not Severity.SLOW)
        faster = ", ".join(need.patch for need in closed if need.severity is Severity.SLOW)
        said = "upstream's own code" if self.verdict == "upstream" else f"the plugin: {gaps}"
        parts = (said, faster and f"made faster by {faster}", off)
        return "; ".join(part for part in parts if part)


# What each patch is for, in the order in which a server comes to it.
_CAPABILITIES = {
    "EAGLE-3 is accepted for the target": ("whitelist",),
    "the configs can be read": ("kimi-k2-config",),
    "the drafter's class": ("mla-drafter",),
    "the image token": ("image-token", "image-token-saved-again"),
    "hidden states of inner layers": ("target-interface", "bare-language-model", "aux-edges"),
    "the right aux layers": ("aux-layers", "v2-without-aux"),
    "norms and joining": ("eagle31-drafter",),
    "rope": ("drafter-rope", "mla-rope", "yarn-magnitude"),
    "the draft vocabulary": ("draft-vocabulary",),
    "embedding and LM head": ("head-sharing",),
    "long requests": ("drafter-length", "drafter-positions"),
    "attention of decode and verify steps": ("mla-attention",),
}


def path(subject: Subject, found: Iterable[Finding] = ()) -> Path | None:
    """By whose code the pair runs; None where the vLLM or the pair is not known.

    Args:
        subject: after the checks of target and drafter.
        found: what every check found.
    """
    refused = [f.id for f in found if f.severity is _FAILS and f.kind.area in _OF_THE_PAIR]
    way = _path(subject, tuple(dict.fromkeys(refused)))
    known = subject.pair is not None or (way is not None and way.verdict == "not at all")
    return way if known else None


# The areas of findings that are of the two checkpoints and not of the command or the machine.
_OF_THE_PAIR = frozenset({"target", "drafter", "files"})


def _path(subject: Subject, refused: tuple[str, ...] = ()) -> Path | None:
    """The same; of a drafter that could not be read, what follows from the target alone."""
    situation = _situation(subject)
    if situation is None:
        return None
    needed = tuple(_needs(situation))
    still = tuple(need for need in needed if subject.patches.get(need.patch) is False)
    closed = {need.severity for need in needed if need not in still}
    verdict: Verdict = "plugin" if closed & {_FAILS, _WRONG} else "upstream"
    if refused or any(need.severity is _FAILS for need in still):
        verdict = "not at all"
    capabilities = () if subject.pair is None else tuple(_capabilities(needed, still))
    return Path(verdict, needed, still, capabilities, refused)


def _capabilities(needed: tuple[Need, ...], still: tuple[Need, ...]) -> Iterator[Capability]:
    names, off = {need.patch for need in needed}, {need.patch for need in still}
    for name, patches in _CAPABILITIES.items():
        by = "plugin" if names & set(patches) else "upstream"
        yield Capability(name, "nobody" if off & set(patches) else by)


def findings(subject: Subject) -> Iterator[Finding]:
    """Each patch that this pair needs and that is not in effect."""
    found = _path(subject)
    if found is None or subject.facts is None:
        return
    patches = {patch.id: patch for patch in PATCHES}
    for need in found.open:
        if need.patch in _SAID_OF_THE_TARGET:
            continue
        yield not_in_place(
            patches[need.patch],
            subject.patches_off.get(need.patch) or "for no known reason",
            here=need.without,
            fix=fix_of(need.patch, subject.environ, subject.patches_off),
            release=subject.facts.release,
            rated=need.severity,
        )


# By target-image-token, with the key that would do as well.
_SAID_OF_THE_TARGET = frozenset({"image-token", "image-token-saved-again"})


# ---------------------------------------------------------------------------------- the situation


@dataclass(frozen=True)
class _Situation:
    """What the needs follow from."""

    facts: Facts
    runner: str
    multimodal: bool
    target: Mapping[str, Any] | None
    shape: TargetShape
    trusted: bool
    config: Mapping[str, Any]
    pair: Drafter | None
    subject: Subject

    @cached_property
    def stock(self) -> Mapping[str, Any]:
        """The drafter's config as stock's classes see it."""
        return _as_stock_reads(self.config, self.facts)

    @cached_property
    def transformers(self) -> int | None:
        """Which Transformers this vLLM runs with, 4 or 5; None where it may be either.

        From the wheels' requirements: ``<5`` up to 0.18, either up to 0.23, ``>=5`` from 0.24.
        """
        if self.facts.before("0.19"):
            return 4
        if not self.facts.before("0.24"):
            return 5
        if self.facts.root is None:
            return None
        try:
            return int(metadata.version("transformers").partition(".")[0])
        except (metadata.PackageNotFoundError, ValueError):
            return None

    @cached_property
    def joins_any(self) -> bool:
        """The drafter's class can join any number of hidden states."""
        if self.pair is None or self.facts.version is None:
            return True
        return drafter_class(self.pair.attention, self.facts.version).any_count

    @cached_property
    def identity_d2t(self) -> str:
        """What a ``d2t`` that maps every token to itself holds, ``offsets`` or ``ids``, or ""."""
        tensors = self.subject.tensors
        if self.pair is None or tensors is None or "d2t" not in tensors:
            return ""
        expected = self.pair.expected
        if expected.draft_vocab_size != expected.vocab_size:
            return ""
        try:
            vocabulary = read_vocabulary(expected, tensors)
        except CheckpointError:
            return ""
        return ("ids" if vocabulary.ids else "offsets") if vocabulary.drop_d2t else ""


def _situation(subject: Subject) -> _Situation | None:
    facts, target = subject.facts, subject.target
    if facts is None or target is None or not is_eagle3(subject.command.speculative):
        return None
    if subject.shape is None and target.config is not None:
        return None  # No Kimi.
    config = target.config
    return _Situation(
        facts=facts,
        runner=runner_of(subject.command, facts, subject.environ),
        # Of a target that is not here, as all but the first Kimi-K2 are.
        multimodal=config is None or config.get("model_type") == MULTIMODAL_MODEL_TYPE,
        target=config,
        shape=subject.shape or KIMI,
        trusted=subject.command.switch("trust-remote-code") is True,
        config=(subject.drafter.config if subject.drafter is not None else None) or {},
        pair=subject.pair,
        subject=subject,
    )


def _as_stock_reads(config: Mapping[str, Any], facts: Facts) -> Mapping[str, Any]:
    """A config in the speculators format as vLLM translates it, field by field
    (``update_eagle3`` in speculators/algos.py); any other as it is."""
    layer = config.get("transformer_layer_config")
    if config.get("speculators_model_type") is None or not isinstance(layer, Mapping):
        return config
    taken = ["draft_vocab_size", "target_hidden_size", "norm_before_residual", KEY]
    taken += [] if facts.before("0.19") else ["norm_before_fc"]
    taken += [] if facts.before("0.25") else ["fc_norm", "norm_output"]
    stated = {key: config[key] for key in taken if config.get(key) is not None}
    return {"norm_before_residual": True, **layer, **stated}


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    block = config.get(NESTED)
    return block if isinstance(block, Mapping) else {}


# -------------------------------------------------------------------------------- what stock does


def stock_aux_layers(
    config: Mapping[str, Any], facts: Facts, runner: str, num_layers: int
) -> tuple[int, ...]:
    """The hidden states that stock vLLM captures for a drafter.

    V1 reads the top level, from 0.22 on ``eagle_config`` as well
    (``_get_eagle3_aux_layers_from_config`` of gpu_model_runner.py); V2 reads the top level, from
    0.27 on ``eagle_config["layer_ids"]`` (eagle3_utils.py). Neither tells the conventions apart.

    Args:
        config: the drafter's, as stock's classes see it.
        facts: the vLLM.
        runner: ``V1`` or ``V2``.
        num_layers: the target's decoder layers.
    """
    ids = config.get(KEY)
    if not ids and runner == "V1" and not facts.before("0.22"):
        ids = _nested(config).get(KEY)
    if not ids and runner == "V2" and not facts.before("0.27"):
        ids = _nested(config).get("layer_ids")
    return tuple(ids) if ids and isinstance(ids, (list, tuple)) else default_layers(num_layers)


def stock_count(config: Mapping[str, Any], facts: Facts, attention: Attention) -> int:
    """How many hidden states the drafter's class builds ``fc`` for, without a patch."""
    if not facts.before("0.22"):
        count, ids = config.get(COUNT_KEY), _nested(config).get(KEY)
        if isinstance(count, int):
            return count
        return len(ids) if ids and isinstance(ids, (list, tuple)) else DEFAULT_COUNT
    if attention == "mla" and facts.before("0.18"):  # The plugin's own class.
        count = config.get(COUNT_KEY)
        return count if isinstance(count, int) else DEFAULT_COUNT
    return DEFAULT_COUNT


# --------------------------------------------------------------------------------- what is needed


_Gap = tuple[Severity, str] | None
"""How bad it is without a patch, and what stock does then; None where it is not needed."""


def _needs(situation: _Situation) -> Iterator[Need]:
    facts = situation.facts
    for patch in PATCHES:
        met = _GAPS.get(patch.id)
        if met is None:
            continue
        if facts.supported and facts.version is not None and not patch.covers(facts.version):
            continue
        gap = met(situation)
        if gap is not None:
            yield Need(patch.id, *gap)


_FAILS, _WRONG, _SLOW = Severity.FAILS, Severity.WRONG, Severity.SLOW


def _if(condition: bool, severity: Severity = _FAILS, without: str = "") -> _Gap:
    return (severity, without) if condition else None


def _backport(s: _Situation) -> _Gap:
    return _if(s.facts.before("0.18"))


def _image_token(s: _Situation) -> _Gap:
    stated = None if s.target is None else s.target.get(IMAGE_TOKEN_KEYS[2])
    return _if(s.facts.before("0.18") and s.multimodal and not isinstance(stated, int))


def _image_token_saved_again(s: _Situation) -> _Gap:
    lost = s.target is not None and IMAGE_TOKEN_KEYS[0] not in s.target
    later = not s.facts.before("0.32")
    return _if(s.multimodal and s.runner == "V1" and later and lost)


def _kimi_k2_config(s: _Situation) -> _Gap:
    def unknown(config: Mapping[str, Any] | None) -> bool:
        if config is None or config.get("model_type") != "kimi_k2":
            return False
        return not (s.trusted and config.get("auto_map"))

    return _if(s.facts.before("0.18") and (unknown(s.config) or unknown(s.target)))


def _mla_drafter(s: _Situation) -> _Gap:
    return _if(s.facts.before("0.18") and s.pair is not None and s.pair.attention == "mla")


def _aux_layers(s: _Situation) -> _Gap:
    if s.pair is None:
        return None
    aux = s.pair.aux
    if aux is None:
        # Both runners and both classes look into eagle_config alone.
        feeds = _nested(s.stock).get("use_aux_hidden_state", True) is not False
        return _if(feeds, _FAILS, "stock feeds aux hidden states to a drafter without any")
    stock = stock_aux_layers(s.stock, s.facts, s.runner, s.shape.num_layers)
    joined, count = stock_count(s.stock, s.facts, s.pair.attention), len(aux.captured)
    # Where the class can join only three, eagle31-drafter is what it takes.
    if joined != count and s.joins_any:
        return _FAILS, f"stock builds fc for {joined} hidden states, and the drafter joins {count}"
    without = f"stock captures {quoted(list(stock))} in place of {list(aux.captured)}"
    return _if(stock != aux.captured, _FAILS if len(set(stock)) != count else _WRONG, without)


def _aux_edges(s: _Situation) -> _Gap:
    captured = s.pair.aux.captured if s.pair is not None and s.pair.aux is not None else ()
    if s.facts.before("0.18"):
        return None
    if 0 in captured:
        return _FAILS, "stock stops at the embedding, which this drafter reads"
    last = s.shape.num_layers in captured and s.facts.before("0.25")
    return _if(last, _FAILS, "stock never captures the last layer's output")


def _v2_without_aux(s: _Situation) -> _Gap:
    without = s.pair is not None and s.pair.aux is None
    return _if(s.runner == "V2" and without and s.facts.before("0.33"))


def _eagle31_drafter(s: _Situation) -> _Gap:
    """The norms and the joining: what stock's class cannot do, or is not told where it looks."""
    pair, facts = s.pair, s.facts
    if pair is None or facts.version is None:
        return None
    does = drafter_class(pair.attention, facts.version)
    reads = dict(s.stock)
    if pair.attention == "llama" and not facts.before("0.22"):
        reads["norm_before_fc"] = _nested(s.stock).get(
            "norm_before_fc", s.stock.get("norm_before_fc")
        )
    lacking = does.lacks(pair.expected, pair.norm_output, s.identity_d2t)
    switches = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    lacking += [n for n in switches if getattr(pair, n) and not reads.get(n) and n not in lacking]
    if not lacking:
        return None
    fails = pair.aux is None and not does.without_aux
    fails |= pair.expected.aux_count not in (0, DEFAULT_COUNT) and not does.any_count
    fails |= bool(s.identity_d2t) and not does.takes_full_d2t
    if not drops_tensors(pair.attention, facts):
        # A tensor without a parameter ends the load, but for one that is skipped by its name
        # where the class knows the option and it is off.
        skipped = pair.attention == "llama" and does.norm_before_fc
        fails |= "fc_norm" in lacking or ("norm_before_fc" in lacking and not skipped)
    without = f"this release's class does not do, or is not told of: {', '.join(lacking)}"
    return _FAILS if fails else _WRONG, without


def _drafter_rope(s: _Situation) -> _Gap:
    block = s.stock.get("rope_parameters")
    if s.pair is None or s.transformers == 5 or not (isinstance(block, Mapping) and block):
        return None
    theta = s.pair.rope.theta
    lost = s.stock.get("rope_theta") is None and theta != DEFAULT_THETA
    return _if(lost, _WRONG, f"{_with_4(s)}theta is {DEFAULT_THETA:g} in place of {theta:g}")


def _mla_rope(s: _Situation) -> _Gap:
    """The class takes ``rope_scaling`` for everything, theta included."""
    if s.pair is None or s.pair.attention != "mla":
        return None
    if s.facts.before("0.18") or not s.facts.before("0.28"):
        return None
    rope, new_layout = s.pair.rope, bool(s.stock.get("rope_parameters"))
    plain = f"{_with_4(s)}its rope is plain, with theta {DEFAULT_THETA:g}"
    if rope.yarn:
        # With Transformers 5 the two are one and the same.
        return _if(s.transformers != 5 and new_layout, _WRONG, plain)
    if s.transformers == 4:
        return _if(rope.theta != DEFAULT_THETA, _WRONG, plain)
    return _FAILS, "stock stops at KeyError 'factor'"


def _with_4(s: _Situation) -> str:
    return "" if s.transformers == 4 else "under Transformers 4 "


def _yarn_magnitude(s: _Situation) -> _Gap:
    if s.pair is None or s.pair.attention != "llama" or not s.facts.before("0.30"):
        return None
    rope = s.pair.rope
    without = f"cos and sin are multiplied by {rope.stock_magnitude:.3f}, not {rope.magnitude:.3f}"
    return _if(rope.magnitude != rope.stock_magnitude, _WRONG, without)


def _draft_vocabulary(s: _Situation) -> _Gap:
    if s.identity_d2t and not s.facts.before("0.30"):
        return _FAILS, "the d2t of its full vocabulary has no parameter"
    return _if(s.identity_d2t == "ids", _WRONG, "the ids in its d2t are added to the ids")


def _head_sharing(s: _Situation) -> _Gap:
    tensors = s.subject.tensors or {}
    own = any(name in tensors for name in TENSORS.values())
    return _if(own and not s.facts.before("0.16"), _SLOW)


def _drafter_positions(s: _Situation) -> _Gap:
    """V1 compares a request's length with the draft model's; V2 does not, and its positions go on
    beyond the table of cos and sin."""
    longest = longest_request(s.subject)
    if s.pair is None or longest is None:
        return None
    if (s.subject.command.speculative or {}).get("max_model_len") is not None:
        return None
    rope = s.pair.rope
    stated = s.pair.max_position_embeddings or DEFAULT_LENGTH[s.pair.attention]
    table = rope.position_limit(stated)
    if table is None:
        table = int(stated * rope.factor) if rope.kind == "linear" else stated
    if s.runner == "V2":
        without = f"positions beyond {table} are read beyond the drafter's table of cos and sin"
        return _if(table < longest, _FAILS, without)
    length = derived_length({"max_position_embeddings": stated, **s.stock}, s.facts) or table
    without = f"drafting stops for the whole batch while one request is longer than {length} tokens"
    return _if(length < longest, _SLOW, without)


def _drafter_length(s: _Situation) -> _Gap:
    longest = longest_request(s.subject)
    if s.pair is None or longest is None:
        return None
    stated = s.pair.max_position_embeddings or DEFAULT_LENGTH[s.pair.attention]
    limit = s.pair.rope.position_limit(stated)
    return None if limit is None or limit >= longest else _drafter_positions(s)


_GAPS: Mapping[str, Callable[[_Situation], _Gap]] = {
    "image-token": _image_token,
    "target-interface": _backport,
    "bare-language-model": lambda s: _if(s.facts.before("0.16") and s.multimodal),
    "kimi-k2-config": _kimi_k2_config,
    "mla-drafter": _mla_drafter,
    "whitelist": _backport,
    "aux-layers": _aux_layers,
    "drafter-rope": _drafter_rope,
    "mla-rope": _mla_rope,
    "yarn-magnitude": _yarn_magnitude,
    "draft-vocabulary": _draft_vocabulary,
    "head-sharing": _head_sharing,
    "eagle31-drafter": _eagle31_drafter,
    "aux-edges": _aux_edges,
    "drafter-length": _drafter_length,
    "drafter-positions": _drafter_positions,
    "v2-without-aux": _v2_without_aux,
    "image-token-saved-again": _image_token_saved_again,
    "mla-attention": lambda s: closed_by_the_plugin(s.subject),
}
"""When a pair meets the gap of a patch. Not here: what refuses or explains (drafter-folder,
drafter-tensors, cannot-work), and what is for something else (extract-text-config, tool-parser)."""
