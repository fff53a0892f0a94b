# SPDX-License-Identifier: Apache-2.0
"""Which attention back-end vLLM chooses for target and drafter, and what the choice means.

``attention.json`` has what decides, taken from each release's own functions by
``tools/attention.py``; this module asks as vLLM's selector does (``platforms/cuda.py``,
``AttentionBackend.validate_configuration``). Memory limits and compiled kernels are named where
the number stands. TRITON_MLA may be the plugin's own (``plugin_attention.py``).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from packaging.version import Version

from vllm_kimi_eagle3.checkpoint.errors import quoted
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity
from vllm_kimi_eagle3.limits import drafter_backend, is_mla

from .facts import Facts
from .kv_cache import BLOCK_SIZE, MLA_SWITCH, mla_disabled, of_drafter, of_target
from .plugin_attention import BACKEND, PATCH, WhyStock, why_not_offered, why_stock
from .run import (
    asks_for_eagle3,
    drafter_attention,
    forced_backend,
    graph_mode,
    limits_run,
    num_speculative_tokens,
)
from .subject import Subject
from .weights import Parallel

# Kimi's MLA layers: kv_lora_rank + qk_rope_head_dim.
MLA_HEAD_SIZE = 576
_LLAMA_HEAD_SIZE = 128

# Shared memory that a block may use with compute capability 8.6, 8.9 and 12.x (CUDA C programming
# guide, technical specifications per compute capability).
_SMALL_SHARED_MEMORY = 101_376
_SMALL = ((8, 6), (8, 9), (12, 0), (12, 1))
# Of `_fwd_grouped_kernel_stage1` with an fp8 KV cache, as compiled by Triton 3.6 for sm_89, sm_120
# and sm_121 from each release's own source: 87,040 bytes in 0.18.1 and 0.19.1.
_FP8_KERNEL_SHARED_MEMORY = 102_400
_FP8_KERNEL_TOO_LARGE = ("0.20", "0.34")
# Triton has the fp8e4nv of the cache from this capability on.
_FP8_SINCE = (8, 9)
# TritonMLAImpl says so itself from the one release on, and takes no fp8 cache before the other.
_FP8_CAPABILITY_CHECKED, _TRITON_MLA_FP8 = "0.26", "0.18"
# What the plugin's class takes before.
_PLUGIN_FP8 = ("fp8", "fp8_e4m3")
# "DCP not support fp8 kvcache now." in MLAAttention.forward_impl.
_FP8_WITH_DCP = "0.25"
# --block-size takes part in the selection; before, the platform makes the size fit the choice.
_PAGE_SIZE_COUNTS = "0.18"
# validate_configuration knows of DCP; before, check_attention_cp_compatibility finds out.
_DCP_COUNTS = "0.30"

_NO_SUCH_BACKEND = "vLLM has none of that name"
# Before, the drafter has the server's back-end; from the other on all back-ends are asked
# (``Platform._preferred_block_size_for_backends``).
_DRAFT_BACKEND, _ONE_BLOCK_SIZE_FOR_ALL = "0.21", "0.31"

_SUPPORT = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")


@dataclass(frozen=True)
class Backend:
    """An attention back-end of a release, on GPUs of one capability.

    Attributes:
        name: as ``--attention-backend`` takes it.
        mla: for MLA layers; for other layers if not.
        runs: its kernels are for this GPU.
        dtypes: of the activations.
        kv_cache_dtypes: as ``--kv-cache-dtype`` takes them.
        head_sizes: of those that were asked for.
        page_sizes: of the KV cache, of those that were asked for.
        combination: why it does not run here although the rest fits.
        graphs: of what batches vLLM may capture a full CUDA graph with it: a name of vLLM's
            ``AttentionCGSupport``.
        queries: how many tokens of a request its decode path takes: a name of vLLM's
            ``QueryLenSupport``; None for other layers than MLA.
        dcp: it returns what context parallelism merges (the softmax's log-sum-exp).
        dcp_queries: its decode path takes several tokens of a request with DCP as well.
        dcp_interleaved: speculation may share the KV cache out over the ranks in larger pieces.
        plugin: the plugin's kernel serves its decode path.
    """

    name: str
    mla: bool
    runs: bool
    dtypes: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...]
    head_sizes: tuple[int, ...]
    page_sizes: tuple[int, ...]
    combination: str | None
    graphs: str
    queries: str | None
    dcp: bool
    dcp_queries: bool
    dcp_interleaved: bool
    plugin: bool = False


@dataclass(frozen=True)
class Layers:
    """The attention layers that a back-end is asked for.

    Attributes:
        who: whose they are, in words.
        mla: they are MLA layers.
        head_size: as vLLM counts it.
        dtype: of the activations.
        kv_cache_dtype: of their KV cache.
        page_size: what the user wants; None if vLLM may choose.
        forced: the back-end that is forced on them; None if vLLM may choose.
        by: what forces it, in the user's spelling.
    """

    who: str
    mla: bool
    head_size: int
    dtype: str
    kv_cache_dtype: str
    page_size: int | None = None
    forced: str | None = None
    by: str = ""


@dataclass(frozen=True)
class Choice:
    """What the selector answers for some layers.

    Attributes:
        layers: for which.
        backend: None if there is none.
        rejected: those that were tried before, and why each was not taken.
    """

    layers: Layers
    backend: Backend | None
    rejected: tuple[tuple[str, tuple[str, ...]], ...]


@cache
def _table() -> Mapping[str, Any]:
    text = resources.files(__package__).joinpath("attention.json").read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


def known_capability(capability: tuple[int, int]) -> str | None:
    """The capability in the table that stands for a GPU's: its own, or one of its family."""
    known = [tuple(int(part) for part in text.split(".")) for text in _table()["capabilities"]]
    family = [c for c in known if c[0] == capability[0] and c <= capability]
    return ".".join(map(str, max(family))) if family else None


def _at(by_release: Mapping[str, Any], facts: Facts) -> Any:
    """The value that holds for a release: that of the newest one that is not newer."""
    value = None
    for release, entry in by_release.items():
        if value is not None and facts.before(release):
            break
        value = entry
    return value


def _on(value: Any, capability: str) -> Any:
    return value["on"][capability] if isinstance(value, dict) else value


def backend_named(name: str, facts: Facts, capability: str) -> Backend | None:
    """A back-end by name; None where the table has none of it."""
    entry = _at(_table()["backends"].get(name.upper(), {}), facts)
    return None if entry is None else _backend(name.upper(), entry, capability)


def _backend(name: str, entry: Mapping[str, Any], capability: str) -> Backend:
    values = {key: _on(value, capability) for key, value in entry.items()}
    lists = {key: tuple(v) for key, v in values.items() if isinstance(v, list)}
    return Backend(name=name, **{**values, **lists})


def why_not(backend: Backend, layers: Layers, facts: Facts, dcp: bool) -> tuple[str, ...]:
    """The reasons for which ``validate_configuration`` refuses, in vLLM's own words."""
    # What the releases were not asked for is not judged.
    asked = _table()
    page = layers.page_size if not facts.before(_PAGE_SIZE_COUNTS) else None
    reasons = {
        "head_size not supported": layers.head_size in asked["head_sizes"]
        and layers.head_size not in backend.head_sizes,
        "dtype not supported": layers.dtype not in backend.dtypes,
        "kv_cache_dtype not supported": layers.kv_cache_dtype in asked["kv_cache_dtypes"]
        and layers.kv_cache_dtype not in backend.kv_cache_dtypes,
        "block_size not supported": page in asked["page_sizes"] and page not in backend.page_sizes,
        "MLA not supported": layers.mla and not backend.mla,
        "non-MLA not supported": backend.mla and not layers.mla,
        "compute capability not supported": not backend.runs,
        "DCP not supported": dcp and not backend.dcp and not facts.before(_DCP_COUNTS),
        (backend.combination or "").rstrip("."): bool(backend.combination),
    }
    return tuple(reason for reason, holds in reasons.items() if holds)


def _with_plugin(backend: Backend, layers: Layers, dcp: bool, subject: Subject | None) -> Backend:
    """TRITON_MLA as the plugin has it (``attention/backend.py``), where it is the plugin's."""
    if subject is None or subject.facts is None or not (layers.mla and backend.name == BACKEND):
        return backend
    if why_not_offered(subject) is not None:
        return backend
    if subject.facts.before(_TRITON_MLA_FP8):
        dtypes = (*backend.kv_cache_dtypes, *_PLUGIN_FP8)
        backend = replace(backend, kv_cache_dtypes=dtypes)
    if _why_stock(layers, subject) is not None:
        return backend
    return replace(
        backend,
        graphs="UNIFORM_SINGLE_TOKEN_DECODE" if dcp else "UNIFORM_BATCH",
        queries="VARLEN",
        dcp_queries=False,
        plugin=True,
    )


def _why_stock(layers: Layers, subject: Subject) -> WhyStock | None:
    return why_stock(subject, layers.kv_cache_dtype, layers.page_size)


def choose(
    layers: Layers,
    facts: Facts,
    capability: str,
    dcp: bool = False,
    subject: Subject | None = None,
) -> Choice:
    """The back-end that a release takes for ``layers`` on a GPU, and why not the others.

    Args:
        layers: for which.
        facts: the release.
        capability: that stands for the GPU's.
        dcp: decode context parallelism is on.
        subject: whose TRITON_MLA may be the plugin's; None for vLLM's own.
    """
    if layers.forced is not None:
        forced = backend_named(layers.forced, facts, capability)
        if forced is None:
            known = facts.attention_backends
            name = layers.forced.upper()
            if known and name not in known:
                return Choice(layers, None, ((name, (_NO_SUCH_BACKEND,)),))
            if layers.mla and "SPARSE" in name:
                return Choice(layers, None, ((name, ("non-sparse not supported",)),))
            return Choice(layers, None, ())
        forced = _with_plugin(forced, layers, dcp, subject)
        # Where the package that it needs is installed cannot be told from here.
        reasons = why_not(replace(forced, combination=None), layers, facts, dcp)
        if reasons:
            return Choice(layers, None, ((forced.name, reasons),))
        return Choice(layers, forced, ())
    kinds = _table()["order"]["mla" if layers.mla else "other"]
    order = _at(kinds["fp8" if layers.kv_cache_dtype.startswith("fp8") else "auto"], facts)
    rejected: list[tuple[str, tuple[str, ...]]] = []
    for name in _on(order, capability):
        backend = backend_named(name, facts, capability)
        assert backend is not None, f"{name} is in the order of {facts.release}, and undescribed"
        backend = _with_plugin(backend, layers, dcp, subject)
        reasons = why_not(backend, layers, facts, dcp)
        if not reasons:
            return Choice(layers, backend, tuple(rejected))
        rejected.append((name, reasons))
    return Choice(layers, None, tuple(rejected))


# ---------------------------------------------------------------------------------- this command


@dataclass(frozen=True)
class Choices:
    """The back-ends of a command.

    Attributes:
        capability: that stands for the GPUs'.
        target: for the target's layers.
        drafter: for the drafter's; None if its family is not known.
    """

    capability: str
    target: Choice
    drafter: Choice | None

    @property
    def both(self) -> tuple[Choice, ...]:
        return (self.target,) if self.drafter is None else (self.target, self.drafter)


def choices(subject: Subject, cache: str | None = None) -> Choices | None:
    """The back-ends that vLLM takes; None without GPUs, or of a kind that the table has none of.

    Args:
        cache: in place of ``--kv-cache-dtype``; None for what the command says.
    """
    facts = subject.facts
    if facts is None or subject.gpus is None:
        return None
    capability = known_capability(subject.gpus.capability)
    if capability is None:
        return None
    command, attention = subject.command, drafter_attention(subject)
    dcp = Parallel.of(command, facts).decode_context > 1
    page = command.integer("block-size")
    run = limits_run(subject, facts, attention or "mla")
    dtype = _DTYPES.get(command.text("dtype") or "auto", "bfloat16")
    asked, by = forced_backend(subject)
    if asked is None:
        by = "vLLM itself"
    target = Layers(
        "Kimi's MLA layers", True, MLA_HEAD_SIZE, dtype, of_target(subject, cache), page,
        run.attention_backend, by,
    )  # fmt: skip
    if attention is None:
        return Choices(capability, choose(target, facts, capability, dcp, subject), None)
    forced, its_own = drafter_backend(run)
    drafter = Layers(
        "the drafter's MLA layer" if attention == "mla" else "the Llama drafter's layer",
        attention == "mla",
        MLA_HEAD_SIZE if attention == "mla" else _llama_head_size(subject),
        dtype,
        of_drafter(subject, cache),
        page,
        forced,
        '"attention_backend" in --speculative-config' if its_own else by,
    )
    return Choices(
        capability,
        choose(target, facts, capability, dcp, subject),
        choose(drafter, facts, capability, dcp, subject),
    )


_DTYPES = {"half": "float16", "float16": "float16", "float": "float32", "float32": "float32"}


def _llama_head_size(subject: Subject) -> int:
    pair = subject.pair
    return _LLAMA_HEAD_SIZE if pair is None else pair.expected.head_dim


def cache_runs(subject: Subject, cache: str) -> bool:
    """True if a KV cache of that dtype is known to run, in place of the command's."""
    facts, found = subject.facts, choices(subject, cache)
    if facts is None or found is None or any(choice.backend is None for choice in found.both):
        return False
    met = [*_fp8(found, subject, facts), *_context_parallel(found, subject, facts)]
    return not {finding.id for finding in met} & _CACHE_STOPS


_CACHE_STOPS = {"run-no-backend", "run-fp8-capability", "run-fp8-shared-memory", "run-dcp-fp8"}


def closed_by_the_plugin(subject: Subject) -> tuple[Severity, str] | None:
    """How bad a command is without the plugin's back-end, and what it then meets, in words.

    None where that would not serve it. It is compared with vLLM's own back-end, whether the patch
    is in effect or not.
    """
    if mla_disabled(subject.environ) or not asks_for_eagle3(subject):
        return None
    with_it = replace(subject, patches={**subject.patches, PATCH: True})
    found = choices(with_it)
    if found is None or not any(c.backend is not None and c.backend.plugin for c in found.both):
        return None
    met = _of_the_choice(replace(subject, patches={**subject.patches, PATCH: False}))
    still = {finding.id for finding in _of_the_choice(with_it)}
    closed = [finding for finding in met if finding.id not in still]
    fails = any(finding.severity is Severity.FAILS for finding in closed)
    named = list(dict.fromkeys(finding.id for finding in closed))
    words = f"the command meets {' and '.join(named)}" if named else ""
    return (Severity.FAILS if fails else Severity.SLOW), words


def _of_the_choice(subject: Subject) -> list[Finding]:
    """What follows from the back-ends that are chosen."""
    facts, found = subject.facts, choices(subject)
    if facts is None or found is None:
        return []
    return [
        *(
            finding
            for choice in found.both
            for finding in _no_backend(choice, found, subject, facts)
        ),
        *_fp8(found, subject, facts),
        *_graphs(found, subject, facts),
        *_verify(found, subject, facts),
    ]


def _to_the_plugin(choice: Choice, subject: Subject) -> str:
    """What makes the plugin's kernel serve where vLLM's TRITON_MLA does; "" if nothing would."""
    if choice.backend is None or choice.backend.name != BACKEND or choice.backend.plugin:
        return ""
    why = _why_stock(choice.layers, subject)
    return "" if why is None else why.fix


def decode_queries(choice: Choice, subject: Subject, facts: Facts) -> bool:
    """True if the decode path of an MLA layer takes a verify step's tokens."""
    backend = choice.backend
    if backend is None or backend.queries == "SINGLE_ONLY":
        return False
    if Parallel.of(subject.command, facts).decode_context < 2:
        return True
    # MLACommonMetadataBuilder: supports_dcp_with_varlen, for FLASH_ATTN_MLA if not interleaved.
    return backend.dcp_queries and (
        backend.dcp_interleaved or backend.name != "FLASH_ATTN_MLA" or interleave(subject) == 1
    )


def interleave(subject: Subject) -> int:
    """How many tokens a rank of a DCP group takes in a row."""
    names = ("dcp-kv-cache-interleave-size", "cp-kv-cache-interleave-size")
    given = [subject.command.integer(name) or 1 for name in names]
    return max(given)


def findings(subject: Subject) -> Iterator[Finding]:
    """What there is to say of attention back-ends."""
    facts = subject.facts
    if facts is None or not asks_for_eagle3(subject):
        return
    if variable := subject.environ.get("VLLM_ATTENTION_BACKEND"):
        yield Finding(
            "run-attention-variable",
            f"VLLM_ATTENTION_BACKEND={quoted(variable)} has no effect: no vLLM from 0.15 on reads "
            "it",
            f"unset it, and use --attention-backend {_plain(variable)}",
            Evidence(key="VLLM_ATTENTION_BACKEND", value=quoted(variable), release=facts.release),
        )
    if mla_disabled(subject.environ) and not facts.cpu_build:
        yield Finding(
            "run-mla-disabled",
            f"{MLA_SWITCH}={quoted(subject.environ[MLA_SWITCH])} makes vLLM run Kimi's layers as "
            "multi-head attention, with a KV cache of keys and values for every head",
            f"unset {MLA_SWITCH}",
            Evidence(key=MLA_SWITCH, value=subject.environ[MLA_SWITCH], release=facts.release),
        )
        return
    if subject.gpus is None:
        if not facts.cpu_build:
            yield Finding(
                "run-no-gpu",
                "there is no GPU here and none was named, so nothing that depends on it could be "
                "told: attention back-ends, an fp8 KV cache, full CUDA graphs",
                "name those that will serve: --gpu sm_120,96GiB,8",
            )
        return
    found = choices(subject)
    if found is None:
        yield Finding(
            "run-unknown-gpu",
            f"which attention back-end vLLM {facts.release} chooses with compute capability "
            f"{subject.gpus.capability[0]}.{subject.gpus.capability[1]} is not known here",
            "",
            Evidence(key=subject.gpus.name, release=facts.release),
        )
        return
    cache = found.target.layers.kv_cache_dtype
    if cache not in _table()["kv_cache_dtypes"]:
        yield Finding(
            "run-kv-cache-unknown",
            f"which attention back-end takes {_cache_in_words(found.target.layers, subject)} for "
            "Kimi's MLA layers is not known here",
            "",
            Evidence(key="KV-cache dtype", value=cache, release=facts.release),
        )
        return
    for choice in found.both:
        yield from _no_backend(choice, found, subject, facts)
    yield from _chosen(found, subject)
    yield from _block_size(found, subject, facts)
    yield from _fp8(found, subject, facts)
    yield from _context_parallel(found, subject, facts)
    yield from _graphs(found, subject, facts)
    yield from _verify(found, subject, facts)


def _chosen(found: Choices, subject: Subject) -> Iterator[Finding]:
    """Which back-ends serve, and why those did not that vLLM would rather have."""
    target, drafter = found.target, found.drafter
    if any(choice.backend is None for choice in found.both):
        return
    assert target.backend is not None
    by = [choice.layers.by if choice.layers.forced is not None else "" for choice in found.both]
    says = [f", as {each} says" if each else "" for each in by]
    said = f"{target.layers.who} run on {target.backend.name}"
    if drafter is not None and drafter.backend is not None:
        # Once for both, if the same forces both.
        said += ("" if by[0] == by[1] else f"{says[0]}," if says[0] else "") + " and "
        said += f"{drafter.layers.who} on {drafter.backend.name}"
    said += says[-1]
    why = [f"{name}: {', '.join(reasons)}" for name, reasons in target.rejected]
    if why:
        said += f"; vLLM tried before it, for the target, {'; '.join(why)}"
    said += _kernel_in_words(found, subject)
    yield Finding("run-attention", said, "", _evidence(target, subject))


def _kernel_in_words(found: Choices, subject: Subject) -> str:
    """Whose kernel serves TRITON_MLA."""
    for choice in found.both:
        if choice.backend is not None and choice.backend.name == BACKEND and choice.layers.mla:
            why = _why_stock(choice.layers, subject)
            if why is None:
                return f"; the plugin's kernel serves {BACKEND}"
            return f"; vLLM's own kernel serves {BACKEND}, since {why.reason}"
    return ""


def _block_size(found: Choices, subject: Subject, facts: Facts) -> Iterator[Finding]:
    """Whether the drafter's back-end can have the block size that the target's one prefers."""
    target, drafter = found.target, found.drafter
    if drafter is None or target.backend is None or drafter.backend is None:
        return
    if facts.before(_DRAFT_BACKEND) or not facts.before(_ONE_BLOCK_SIZE_FOR_ALL):
        return
    if target.layers.page_size is not None:
        return  # Both were chosen for it.
    sizes, other = target.backend.page_sizes, drafter.backend
    size = BLOCK_SIZE if BLOCK_SIZE in sizes else min(s for s in sizes if s >= BLOCK_SIZE)
    if size in other.page_sizes:
        return
    both = sorted(set(sizes) & set(other.page_sizes))
    fix = f"add {subject.command.flag('block-size')} {both[0]}, which both have" if both else ""
    if target.layers.forced is not None:
        same = f'add "attention_backend": "{target.backend.name}" to --speculative-config'
        if target.layers.mla == drafter.layers.mla and drafter.layers.forced is None:
            fix = f"{fix}, or {same}" if fix else same
    yield Finding(
        "run-block-size",
        f"{drafter.layers.who} runs on {other.name}, which has no KV-cache blocks of {size} "
        f"tokens, and vLLM {facts.release} takes the block size from the target's "
        f"{target.backend.name} alone",
        fix or "let vLLM choose both back-ends",
        Evidence(
            key=f"block sizes of {other.name}",
            value=", ".join(map(str, other.page_sizes)),
            release=facts.release,
        ),
    )


def _plain(name: str) -> str:
    return name.upper() if name.isidentifier() else "<name>"


def _evidence(choice: Choice, subject: Subject) -> Evidence:
    assert subject.facts is not None
    return Evidence(
        key=f"attention back-end on {_gpu(subject)}",
        value="none" if choice.backend is None else choice.backend.name,
        release=subject.facts.release,
    )


def _no_backend(
    choice: Choice, found: Choices, subject: Subject, facts: Facts
) -> Iterator[Finding]:
    layers = choice.layers
    if choice.backend is not None or not choice.rejected:
        return
    if choice is not found.target:
        wrong_kind = layers.forced is not None and is_mla(layers.forced) is not layers.mla
        target = found.target.layers
        same = replace(layers, who=target.who, by=target.by) == target
        if wrong_kind or same:
            return  # limits.py says that; and the target has said this.
    each = ", ".join(f"{name} ({', '.join(reasons)})" for name, reasons in choice.rejected)
    asked = f" with {_asked(layers, subject)}" if _asked(layers, subject) else ""
    if layers.forced is not None:
        fact = f"{layers.by} {layers.forced} cannot be had for {layers.who} on {_gpu(subject)}"
        fact += f"{asked}: {', '.join(choice.rejected[0][1])}"
    else:
        fact = f"no attention back-end of vLLM {facts.release} takes {layers.who} on "
        fact += f"{_gpu(subject)}{asked}: {each}"
    ways = [_way_out(choice, subject, facts, found.capability)]
    why = why_not_offered(subject)
    if why is not None and why.fix and _only_the_plugins_takes(choice, subject, facts):
        ways.insert(0, f"{why.fix}, and the plugin's {BACKEND} takes it")
    yield Finding("run-no-backend", fact, ", or ".join(ways), _evidence(choice, subject))


def _only_the_plugins_takes(choice: Choice, subject: Subject, facts: Facts) -> bool:
    """True if the KV cache is all that vLLM's TRITON_MLA minds, and the plugin's takes it."""
    assert subject.gpus is not None
    return (
        facts.before(_TRITON_MLA_FP8)
        and choice.layers.kv_cache_dtype in _PLUGIN_FP8
        and subject.gpus.capability >= _FP8_SINCE
        and dict(choice.rejected).get(BACKEND) == ("kv_cache_dtype not supported",)
    )


def _asked(layers: Layers, subject: Subject) -> str:
    flag = subject.command.flag
    parts = []
    if layers.kv_cache_dtype != "auto":
        parts.append(_cache_in_words(layers, subject))
    if layers.dtype != "bfloat16":
        parts.append(f"{flag('dtype')} {layers.dtype}")
    if layers.page_size is not None:
        parts.append(f"{flag('block-size')} {layers.page_size}")
    return ", ".join(parts)


def _cache_in_words(layers: Layers, subject: Subject) -> str:
    command, name = subject.command, layers.kv_cache_dtype
    if (command.speculative or {}).get("kv_cache_dtype") == name and name != command.text(
        "kv-cache-dtype"
    ):
        return f'"kv_cache_dtype": "{name}" in --speculative-config'
    if command.text("kv-cache-dtype") == name:
        return f"{command.flag('kv-cache-dtype')} {name}"
    return f"the {name} KV cache that the target's checkpoint brings"


def _way_out(choice: Choice, subject: Subject, facts: Facts, capability: str) -> str:
    """The smallest change after which there is a back-end."""
    flag, layers = subject.command.flag, choice.layers
    dcp = Parallel.of(subject.command, facts).decode_context > 1
    free = replace(layers, forced=None)
    changes = [
        (f"use {flag('kv-cache-dtype')} fp8",
         replace(layers, kv_cache_dtype="fp8") if layers.forced else layers),
        (f"leave out {layers.by}", free),
        (f"leave out {flag('block-size')}", replace(layers, page_size=None)),
        (f"use {flag('kv-cache-dtype')} bfloat16", replace(layers, kv_cache_dtype="bfloat16")),
        (f"use {flag('dtype')} bfloat16", replace(layers, dtype="bfloat16")),
        (f"leave out {layers.by} and use {flag('kv-cache-dtype')} bfloat16",
         replace(free, kv_cache_dtype="bfloat16")),
    ]  # fmt: skip
    if layers.forced and choice.rejected[0][1] == (_NO_SUCH_BACKEND,):
        close = difflib.get_close_matches(layers.forced.upper(), facts.attention_backends, n=2)
        changes[1] = (f"write {' or '.join(close)}, or {changes[1][0]}" if close else
                      changes[1][0], free)  # fmt: skip
    for words, changed in changes:
        if changed != layers:
            other = choose(changed, facts, capability, dcp, subject).backend
            if other is not None:
                return f"{words}, and vLLM takes {other.name}"
    return "use other GPUs, or another vLLM"


def _fp8(found: Choices, subject: Subject, facts: Facts) -> Iterator[Finding]:
    """An fp8 KV cache and TRITON_MLA's kernel."""
    assert subject.gpus is not None
    capability, flag = subject.gpus.capability, subject.command.flag("kv-cache-dtype")
    concerned = [
        choice
        for choice in found.both
        if choice.backend is not None
        and choice.backend.name == BACKEND
        and not choice.backend.plugin
        and choice.layers.kv_cache_dtype.startswith("fp8")
    ]
    if not concerned:
        return
    choice = concerned[0]
    evidence, cache = _evidence(choice, subject), _cache_in_words(choice.layers, subject)
    since, before = _FP8_KERNEL_TOO_LARGE
    fix, own = f"use {flag} bfloat16", _to_the_plugin(choice, subject)
    if facts.before(_TRITON_MLA_FP8) and capability >= _FP8_SINCE:
        # The plugin's class, which the selector takes, without its kernel.
        why = _why_stock(choice.layers, subject)
        assert why is not None
        yield Finding(
            "run-no-backend",
            f"the TRITON_MLA of vLLM {facts.release} refuses {cache}, and the plugin's kernel, "
            f"which takes it, does not serve, since {why.reason}",
            f"{own}, or {fix}" if own else fix,
            evidence,
        )
    elif capability < _FP8_SINCE:
        then = (
            "Triton stops with 'type fp8e4nv not supported in this architecture' when it compiles "
            "the kernel"
        )
        if facts.before(_TRITON_MLA_FP8) or not facts.before(_FP8_CAPABILITY_CHECKED):
            then = "TritonMLAImpl refuses it"
        yield Finding(
            "run-fp8-capability",
            f"TRITON_MLA cannot read {cache} on {_gpu(subject)}: {then}",
            fix,
            evidence,
        )
    elif capability in _SMALL and not facts.before(since) and facts.before(before):
        yield Finding(
            "run-fp8-shared-memory",
            f"TRITON_MLA's decode kernel needs {_FP8_KERNEL_SHARED_MEMORY:,} bytes of shared "
            f"memory with {cache} on vLLM {facts.release}, and a block on {_gpu(subject)} may have "
            f"{_SMALL_SHARED_MEMORY:,}: 'out of resource: shared memory'",
            f"{own}, and the plugin's kernel fits, or {fix}"
            if own
            else f"{fix}, or vLLM 0.18 or 0.19, whose kernel needs 87,040 bytes",
            evidence,
        )


def _context_parallel(found: Choices, subject: Subject, facts: Facts) -> Iterator[Finding]:
    parallel = Parallel.of(subject.command, facts)
    if parallel.decode_context < 2:
        return
    flag = subject.command.flag("decode-context-parallel-size")
    asked = f"{flag} {parallel.decode_context}"
    for choice in found.both:
        backend, layers = choice.backend, choice.layers
        if backend is None or not layers.mla:
            continue
        evidence = _evidence(choice, subject)
        if layers.kv_cache_dtype.startswith("fp8") and facts.before(_FP8_WITH_DCP):
            yield Finding(
                "run-dcp-fp8",
                f"an fp8 KV cache and {asked} do not go together on vLLM {facts.release}: 'DCP not "
                "support fp8 kvcache now.' at the first decode",
                f"use {subject.command.flag('kv-cache-dtype')} bfloat16, or vLLM {_FP8_WITH_DCP} "
                "or later",
                evidence,
            )
        if not backend.dcp and facts.before(_DCP_COUNTS):
            yield Finding(
                "run-dcp-backend",
                f"{backend.name}, which vLLM {facts.release} takes for {layers.who} on "
                f"{_gpu(subject)}, returns no log-sum-exp for {asked} to merge the ranks' results "
                "by",
                f"use {flag} 1, or vLLM {_with_dcp(backend, facts, found.capability)} or later",
                evidence,
            )
        if interleave(subject) > 1 and not backend.dcp_interleaved:
            size = interleave(subject)
            name = "dcp-kv-cache-interleave-size"
            if name not in subject.command.options:
                name = "cp-kv-cache-interleave-size"
            yield Finding(
                "run-dcp-interleave",
                f"{subject.command.flag(name)} {size} does not go with speculation: {backend.name} "
                "takes a verify step only where the ranks share single tokens out",
                f"leave out {subject.command.flag(name)}",
                evidence,
            )
        break  # The drafter's MLA layer has the same back-end; once is enough.


def _gpu(subject: Subject) -> str:
    assert subject.gpus is not None
    return subject.gpus.name


def _graphs(found: Choices, subject: Subject, facts: Facts) -> Iterator[Finding]:
    """What becomes of full CUDA graphs: ``CompilationConfig.resolve_cudagraph_mode_and_sizes``."""
    mode = graph_mode(subject)
    with_backend = [(c, c.backend) for c in found.both if c.backend is not None]
    if mode not in _FULL_MODES or len(with_backend) < len(found.both):
        return
    weakest, backend = min(with_backend, key=lambda pair: _SUPPORT.index(pair[1].graphs))
    evidence = _evidence(weakest, subject)
    flag = subject.command.flag("compilation-config")
    if mode == "FULL" and backend.graphs == "NEVER":
        yield Finding(
            "run-graphs-refused",
            f'"cudagraph_mode": "FULL" is refused: {backend.name}, which takes '
            f"{weakest.layers.who} on {_gpu(subject)}, is not captured in a full graph by vLLM "
            f"{facts.release}",
            f'leave out "cudagraph_mode" in {flag}',
            evidence,
        )
        return
    if _SUPPORT.index(backend.graphs) < _SUPPORT.index("UNIFORM_BATCH"):
        yield Finding(
            "run-graphs-piecewise",
            f"vLLM {facts.release} captures no full CUDA graph of a verify step with "
            f"{backend.name}, which takes {weakest.layers.who} on {_gpu(subject)}: attention is "
            "launched kernel by kernel between pieces of graphs, in target and drafter",
            _more_graphs(weakest, subject, facts, found.capability),
            evidence,
        )
        return
    for choice, backend in with_backend:
        if choice.layers.mla and not decode_queries(choice, subject, facts):
            k = num_speculative_tokens(subject) or 1
            dcp = backend.queries != "SINGLE_ONLY"
            why = "with decode context parallelism " if dcp else ""
            own = _to_the_plugin(choice, subject)
            yield Finding(
                "run-graphs-capture",
                f"vLLM {facts.release} captures a full CUDA graph of verify steps of {k + 1} "
                f"tokens with {backend.name}, whose decode path takes one token {why}on this "
                "release: the start ends in an AssertionError ('decode only')",
                (f"{own}, or " if own else "")
                + f'add {flag} \'{{"cudagraph_mode": "PIECEWISE"}}\''
                + ("" if dcp or own else ", or use vLLM 0.26 or later"),
                evidence,
            )
            return


_FULL_MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def _more_graphs(choice: Choice, subject: Subject, facts: Facts, capability: str) -> str:
    """What gives this back-end full graphs of verify steps."""
    backend, own = choice.backend, _to_the_plugin(choice, subject)
    assert backend is not None
    if choice.layers.mla and Parallel.of(subject.command, facts).decode_context > 1:
        one = f"{subject.command.flag('decode-context-parallel-size')} 1"
        if backend.plugin:
            return f"use {one}"
        return f"{own} and use {one}" if own else ""
    if own:
        return own
    since = _later_release(
        backend,
        facts,
        capability,
        lambda b: _SUPPORT.index(b.graphs) >= 2 and b.queries != "SINGLE_ONLY",
    )
    return f"use vLLM {since} or later" if since else ""


def _with_dcp(backend: Backend, facts: Facts, capability: str) -> str:
    """The release from which this back-end returns the log-sum-exp, or vLLM takes one that does."""
    since = _later_release(backend, facts, capability, lambda b: b.dcp)
    return min(since or _DCP_COUNTS, _DCP_COUNTS, key=Version)


def _later_release(
    backend: Backend, facts: Facts, capability: str, can: Callable[[Backend], bool]
) -> str:
    """The first release after this one in which a back-end can do something; "" for none."""
    releases: Mapping[str, Any] = _table()["backends"][backend.name]
    for release in releases:
        newer = _named_in(backend.name, release, capability)
        later = facts.version is not None and Version(release) > facts.version
        if later and newer is not None and can(newer):
            return release.rsplit(".", 1)[0]
    return ""


def _named_in(name: str, release: str, capability: str) -> Backend | None:
    entry = _table()["backends"][name][release]
    return None if entry is None else _backend(name, entry, capability)


def _verify(found: Choices, subject: Subject, facts: Facts) -> Iterator[Finding]:
    """How the verify step of k + 1 tokens reads the target's KV cache."""
    choice, k = found.target, num_speculative_tokens(subject) or 1
    backend = choice.backend
    if backend is None:
        return
    evidence = _evidence(choice, subject)
    if not decode_queries(choice, subject, facts):
        flag, size = subject.command.flag("decode-context-parallel-size"), 1
        if backend.queries != "SINGLE_ONLY":
            size = Parallel.of(subject.command, facts).decode_context
        yield Finding(
            "run-verify-prefill",
            (f"with {flag} {size} " if size > 1 else "")
            + f"the decode path of {backend.name}, which takes {choice.layers.who} on "
            f"{_gpu(subject)}, has one token a request on vLLM {facts.release}, so a verify step "
            f"of {k + 1} tokens runs as a prefill: it gathers and projects the whole context anew "
            "in every layer",
            f"use {flag} 1"
            if size > 1
            else _other_verify(choice, subject, facts, found.capability),
            evidence,
        )
    elif backend.name == BACKEND and not backend.plugin:
        yield Finding(
            "run-verify-rows",
            f"TRITON_MLA, which takes {choice.layers.who} on {_gpu(subject)}, treats the {k + 1} "
            f"tokens of a verify step as {k + 1} requests on vLLM {facts.release}, so it reads the "
            f"KV cache {k + 1} times",
            _to_the_plugin(choice, subject),
            evidence,
        )


def _other_verify(choice: Choice, subject: Subject, facts: Facts, capability: str) -> str:
    if choice.layers.forced is not None:
        other = choose(replace(choice.layers, forced=None), facts, capability)
        if other.backend is not None and other.backend.queries != "SINGLE_ONLY":
            return f"leave out {choice.layers.by}, and vLLM takes {other.backend.name}"
    one = ""
    if Parallel.of(subject.command, facts).decode_context > 1:
        one = f", with {subject.command.flag('decode-context-parallel-size')} 1"
    if own := _to_the_plugin(choice, subject):
        return f"{own}, and the plugin's kernel keeps it in the decode path{one}"
    newest = {
        release: entry
        for release, entry in _table()["backends"]["TRITON_MLA"].items()
        if entry is not None and entry["queries"] != "SINGLE_ONLY"
    }
    assert choice.backend is not None
    if choice.backend.name == "TRITON_MLA" and newest:
        first = next(iter(newest)).rsplit(".", 1)[0]
        return f"use vLLM {first} or later, whose TRITON_MLA keeps it in the decode path{one}"
    return ""
