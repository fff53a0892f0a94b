# SPDX-License-Identifier: Apache-2.0
"""What fits: weights of target and drafter on each rank, their KV cache, and the context.

vLLM takes ``--gpu-memory-utilization`` of a GPU's memory, loads the weights, runs once with the
largest batch, captures the CUDA graphs, and gives what is left to the KV cache
(``determine_available_memory`` in ``gpu_worker.py``). All layers of a Kimi and its drafter are in
one group of the cache, of whichever attention they are: an MLA drafter has the target's spec, and
an MHA drafter's is uniform with it (``UniformTypeKVCacheSpecs``), so a token takes the sum of what
each layer takes, in every release from 0.15 to 0.33.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_kimi_eagle3.attention.plan import max_batch
from vllm_kimi_eagle3.checkpoint.drafter_tensors import expected_tensors
from vllm_kimi_eagle3.checkpoint.errors import plain
from vllm_kimi_eagle3.checkpoint.sharing import TENSORS, owners, seems_same
from vllm_kimi_eagle3.findings import Evidence, Finding
from vllm_kimi_eagle3.kernels.arch import CAPABILITIES, arch, workspace_numel

from .attention import cache_runs, choices
from .kv_cache import BLOCK_SIZE, element_bytes, mla_disabled, of_drafter, of_target, stored_as
from .length import longest_request
from .plugin_attention import BACKEND, heads, query_len
from .run import (
    REPLICATED,
    SMALL_BATCH,
    batch_limits,
    drafter_parallel,
    is_replicated,
    sizes_that_divide,
)
from .subject import GIB, Subject
from .weights import Parallel, drafter_ranks

# What is not weights and not KV cache: the CUDA context and NCCL's buffers (1.5 GiB), the sampler
# and the logits of the largest batch (0.5 GiB), and the CUDA graphs (1 GiB); activations come on
# top. For 8,192 tokens in a batch that is 5 GiB, as much as is missing in the KV pool that users
# report of Kimi-K2.6 on eight GPUs of 96 GB: 344,000 tokens of fp8 at 0.94, beside 5.5 GB of their
# own buffers (https://github.com/voipmonitor/rtx6kpro, models/kimi-k26.md).
_RESERVE = 2 * GIB
_GRAPHS = GIB
# What TRITON_MLA keeps partial results in: vLLM's own from the one release on for one token a
# request, from the other for all of a verify step, (kv_lora_rank + 1) float32 for each head, token
# and split of the context (``_reserve_attn_logits_workspace`` and ``_compute_num_kv_splits``).
_STOCK_RESERVES, _STOCK_RESERVES_FOR_DRAFTS, _TOKENS_A_SPLIT = "0.25", "0.31", 512
_FEW_REQUESTS = 32
# ``CacheConfig`` up to 0.19, for where the facts have no default; 0.92 from 0.20 on.
_UTILIZATION = 0.9
# Such a part of a number that follows from config.json and not from the files may be off.
_TOLERANCE = 0.03

_HIGHEST_UTILIZATION = 0.95
_LONGEST = 2**48


@dataclass(frozen=True)
class Cache:
    """The KV cache that a token takes on one rank, in bytes.

    Attributes:
        target: over all of the target's layers.
        drafter: over all of the drafter's.
        ranks: that hold a token's cache between them (decode context parallelism); other ranks
            hold the same again.
        dtype: as vLLM names it.
    """

    target: float
    drafter: float
    ranks: int
    dtype: str

    @property
    def token(self) -> float:
        return self.target + self.drafter


@dataclass(frozen=True)
class Plan:
    """How one rank's memory is spent; sizes in bytes.

    Attributes:
        target: the target's weights.
        margin: by how much they may be less.
        drafter: the drafter's weights.
        shared: what the drafter takes of the target, in words; "" for nothing.
        cache: the KV cache of a token.
        memory: of the GPU; 0 if none is known.
        utilization: the part of it that vLLM may use.
        fixed: ``--kv-cache-memory-bytes``, with which vLLM uses what it needs; None if not given.
        reserve: what is reckoned for activations, CUDA graphs and libraries.
        workspace: what TRITON_MLA takes for partial results.
        block_size: tokens in a block of the KV cache.
        blocks: ``--num-gpu-blocks-override``; None if not given.
        length: the longest request; None if not known.
    """

    target: int
    margin: float
    drafter: int
    shared: str
    cache: Cache
    memory: int
    utilization: float
    fixed: int | None
    reserve: int
    workspace: int
    block_size: int
    blocks: int | None
    length: int | None

    @property
    def weights(self) -> int:
        return self.target + self.drafter

    @property
    def room(self) -> float:
        """What vLLM may use."""
        return self.memory * (1.0 if self.fixed else self.utilization)

    @property
    def left(self) -> float:
        """What is reckoned to be left for the KV cache."""
        return self.fixed or self.room - self.weights - self.reserve - self.workspace

    @property
    def most(self) -> float:
        """What is left for it at the very most: nothing but weights beside it."""
        return self.fixed or self.room - self.weights + self.margin

    def tokens(self, size: float) -> int:
        """How many tokens fit into so many bytes on each rank."""
        blocks = self.blocks or int(size // (self.cache.token * self.block_size))
        # One block is kept back, which holds nothing (``null_block``).
        return max(blocks - 1, 0) * self.block_size * self.cache.ranks

    def fits(self, length: int) -> bool:
        """True if one request of that length is reckoned to fit."""
        return length <= self.tokens(self.left)


def findings(subject: Subject) -> Iterator[Finding]:
    """What there is to say of memory."""
    if "tensor-parallel-size" in subject.command.unreadable:
        return
    if mla_disabled(subject.environ):
        return  # What a token's cache takes is another thing then; attention.py says so.
    p = plan(subject)
    if p is None:
        return
    if p.memory and p.weights - p.margin > p.room:
        yield _no_room(subject, p)
        return
    if p.memory and p.length is not None and not _is_auto(subject):
        if p.length > p.tokens(p.most):
            yield _too_long(subject, p, p.length)
        elif not p.fits(p.length):
            yield _tight(subject, p, p.length)
    if is_replicated(subject) and p.drafter:
        yield _replicated(subject, p)
    yield Finding("memory-summary", _summary(subject, p), evidence=_evidence(subject, p))


def plan(subject: Subject) -> Plan | None:
    """How a rank's memory is spent; None where too little is known of the target."""
    cache, weights, command = kv_cache(subject), subject.weights, subject.command
    if cache is None or weights is None:
        return None
    drafter, shared = drafter_bytes(subject)
    offload = command.number("cpu-offload-gb") or 0.0
    offload = min(offload, 2.0**20) if offload > 0 else 0.0
    target = weights.per_rank - int(offload * GIB)
    return Plan(
        target=max(target, 0),
        margin=weights.per_rank * _TOLERANCE if weights.estimated else 0.0,
        drafter=drafter,
        shared=shared,
        cache=cache,
        memory=0 if subject.gpus is None else subject.gpus.memory,
        utilization=_utilization(subject),
        fixed=_given(subject, "kv-cache-memory-bytes"),
        reserve=_reserve(subject),
        workspace=attention_workspace(subject),
        block_size=_given(subject, "block-size") or BLOCK_SIZE,
        blocks=_given(subject, "num-gpu-blocks-override"),
        length=longest_request(subject),
    )


def drafter_bytes(subject: Subject) -> tuple[int, str]:
    """The bytes of the drafter's weights on each rank, and in words what it takes of the target.

    0 and "" without a drafter that could be read.
    """
    if subject.pair is None:
        return 0, ""
    shared: list[str] = []
    if subject.tensors is not None:
        sizes = {name: info.nbytes for name, info in subject.tensors.items()}
        folder = None if subject.target is None else subject.target.folder
        decided = owners(subject.tensors, folder, seems_same)
        shared = [part for part, owner in decided.items() if owner == "target"]
    else:
        wants = expected_tensors(subject.pair.expected)
        sizes = {name: 2 * math.prod(want.shape) for name, want in wants.items()}
    taken = {TENSORS[part] for part in shared} | {"d2t", "t2d"}
    parallel = drafter_parallel(subject)
    total = sum(
        size / drafter_ranks(name, parallel)
        for name, size in sizes.items()
        if name.removeprefix("model.") not in taken
    )
    if is_replicated(subject):
        # Whole copies of what the target has in parts.
        expected = subject.pair.expected
        total += 2 * expected.vocab_size * expected.hidden_size * len(shared)
    return math.ceil(total), " and ".join(shared)


def kv_cache(subject: Subject) -> Cache | None:
    """What a token takes of the KV cache; None where the target does not say."""
    text, shape, pair = subject.target_text, subject.shape, subject.pair
    latent, rope = _positive(text, "kv_lora_rank"), _positive(text, "qk_rope_head_dim")
    if shape is None or latent is None or rope is None:
        return None
    parallel, drafts = Parallel.of(subject.command, subject.facts), drafter_parallel(subject)
    dtype = stored_as(of_target(subject), subject)
    size = element_bytes(dtype)
    drafter = 0.0
    if pair is not None:
        draft_size = element_bytes(stored_as(of_drafter(subject), subject))
        e = pair.expected
        if pair.attention == "mla":
            width = e.kv_lora_rank + e.qk_rope_head_dim
        else:
            width = 2 * max(1, math.ceil(e.num_kv_heads / drafts.tensor)) * e.head_dim
        drafter = e.num_layers * width * draft_size
    # Every tensor-parallel rank holds the latent of all heads, and each stage that of its layers.
    target = shape.num_layers * (latent + rope) * size / parallel.pipeline
    return Cache(target, drafter, parallel.decode_context, dtype)


def _positive(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and 0 < value < 2**31 else None


def _given(subject: Subject, name: str) -> int | None:
    """The value of a flag that takes a positive number; None if it is not given."""
    value = subject.command.integer(name)
    return min(value, _LONGEST) if value is not None and value > 0 else None


def _is_auto(subject: Subject) -> bool:
    return subject.command.options.get("max-model-len") in (-1, "auto")


def _utilization(subject: Subject) -> float:
    given = subject.command.number("gpu-memory-utilization")
    if given is None and subject.facts is not None:
        default = subject.facts.defaults.get("gpu-memory-utilization")
        given = float(default) if isinstance(default, (int, float)) else None
    return given if given is not None and 0 < given <= 1 else _UTILIZATION


def _reserve(subject: Subject, batched_tokens: int | None = None) -> int:
    """Bytes on each rank for what is neither weights nor KV cache: an estimate, and said so."""
    graphs = 0 if subject.command.switch("enforce-eager") else _GRAPHS
    text = subject.target_text
    ranks = Parallel.of(subject.command, subject.facts).experts
    hidden = _positive(text, "hidden_size") or 0
    chosen = _positive(text, "num_experts_per_tok") or 0
    inner = _positive(text, "moe_intermediate_size") or 0
    # In the largest batch: each token once for each of its experts, in and out of them, and some
    # eight times beside the experts, in 16 bits.
    per_token = 2 * (chosen * (hidden + 3 * inner / ranks) + 8 * hidden)
    tokens = batched_tokens or batch_limits(subject, subject.facts)[0]
    return int(_RESERVE + graphs + per_token * min(tokens, 2**31))


def attention_workspace(subject: Subject, requests: int | None = None) -> int:
    """Bytes on each rank in which TRITON_MLA keeps partial results while vLLM runs; 0 with other
    back-ends, and where it is not known.

    Args:
        subject: after the checks of target and drafter.
        requests: in place of ``--max-num-seqs``.
    """
    facts, found, rows = subject.facts, choices(subject), heads(subject)
    latent = _positive(subject.target_text, "kv_lora_rank")
    if facts is None or found is None or subject.gpus is None or latent is None or not rows:
        return 0
    serving = [c.backend for c in found.both if c.backend is not None and c.layers.mla]
    triton = [backend for backend in serving if backend.name == BACKEND]
    if not triton or subject.gpus.capability < CAPABILITIES[0]:
        return 0
    gpu = arch(subject.gpus.capability)
    batched_tokens, most = batch_limits(subject, facts)
    requests = min(requests or most, 2**20)
    if all(backend.plugin for backend in triton):
        block = query_len(subject)
        if is_replicated(subject) and subject.pair is not None and subject.pair.attention == "mla":
            rows = max(rows, subject.pair.expected.num_heads)  # They share the scratch.
        return 4 * workspace_numel(
            max_batch=max_batch(requests, batched_tokens, heads=rows, query_len=block),
            query_len=block,
            heads=rows,
            kv_lora_rank=latent,
            arch=gpu,
        )
    if facts.before(_STOCK_RESERVES):
        return 0
    if not facts.before(_STOCK_RESERVES_FOR_DRAFTS):
        rows *= query_len(subject)
    parts = max(1, (longest_request(subject) or 0) // _TOKENS_A_SPLIT)
    splits = min(1 << (parts - 1).bit_length(), 2 * gpu.sm_count)
    return 4 * (latent + 1) * requests * rows * splits


# ------------------------------------------------------------------------------------ in words


def _evidence(subject: Subject, p: Plan) -> Evidence:
    gpus, facts = subject.gpus, subject.facts
    said = "not known"
    if gpus is not None and p.memory:
        said = f"{gpus.count} of {_gib(p.memory)}" if gpus.count else _gib(p.memory)
    name = "GPUs" if gpus is None else gpus.name
    return Evidence(key=name, value=said, release=None if facts is None else facts.release or None)


def _summary(subject: Subject, p: Plan) -> str:
    weights = subject.weights
    about = "about " if weights is not None and weights.estimated else ""
    of = f" of the target's {_gib(weights.total)}" if weights is not None else ""
    held = [f"{about}{_gib(p.target)}{of}"]
    token = f"{_kib(p.cache.target)} ({plain(p.cache.dtype)})"
    if subject.pair is not None:
        own = f" (with the target's {p.shared})" if p.shared else ""
        held.append(f"{_gib(p.drafter)} of drafter{own}")
        token += f" and {_kib(p.cache.drafter)} for the drafter"
    if p.cache.ranks > 1:
        token += f", each on one of {p.cache.ranks} ranks"
    if not p.memory:
        return f"on each rank {_listed(held)}; a token of KV cache takes {token}"
    if p.fixed:
        room = f"{_gib(p.fixed)} of KV cache as asked for hold"
    else:
        held.append(f"{_gib(p.reserve)} reckoned for activations, graphs and NCCL")
        if p.workspace >= _WORTH_A_WORD:
            held.append(f"{_gib(p.workspace)} for {BACKEND}'s workspace")
        room = (
            f"of {_gib(p.room)} ({p.utilization:g} of {_gib(p.memory)}) {_gib(max(p.left, 0))} are "
            "left for the KV cache,"
        )
    fits = p.tokens(p.left)
    requests = ""
    if p.length is not None and 0 < p.length <= fits:
        requests = f", or {fits / p.length:.1f} requests of {p.length:,}"
    return f"on each rank {_listed(held)}; {room} {fits:,} tokens at {token}{requests}"


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if parts[1:] else parts[0]


def _no_room(subject: Subject, p: Plan) -> Finding:
    about = "about " if p.margin else ""
    ranks = Parallel.of(subject.command, subject.facts).tensor
    flag = subject.command.flag
    ways = []
    times = min(max(p.weights / max(p.room, 1.0), 1.01), 2.0**20)
    needed = next((size for size in sizes_that_divide(subject) if size >= ranks * times), None)
    if needed is not None:
        way = f"spread them over more GPUs ({flag('tensor-parallel-size')} {needed}"
        has = 0 if subject.gpus is None else subject.gpus.count
        ways.append(f"{way}, and there are {has})" if 0 < has < needed else f"{way})")
    share = math.ceil((p.weights + p.reserve + p.workspace) / p.memory * 100) / 100
    if p.fixed is None and p.utilization < share <= _HIGHEST_UTILIZATION:
        ways.append(f"{flag('gpu-memory-utilization')} {share:g}")
    ways.append("take a smaller export of the target")
    return Finding(
        "memory-weights-do-not-fit",
        f"the weights take {about}{_gib(p.weights)} on each rank, and vLLM may use "
        f"{_gib(p.room)} of a GPU's {_gib(p.memory)}",
        ", or ".join(ways),
        _evidence(subject, p),
    )


def _too_long(subject: Subject, p: Plan, length: int) -> Finding:
    need = length / p.cache.ranks * p.cache.token
    return Finding(
        "memory-context-does-not-fit",
        f"one request of {length:,} tokens needs {_gib(need)} of KV cache on each rank, and about "
        f"{_gib(max(p.left, 0))} are left: vLLM refuses to start",
        _shorter(subject, p, length),
        _evidence(subject, p),
    )


def _tight(subject: Subject, p: Plan, length: int) -> Finding:
    need = length / p.cache.ranks * p.cache.token
    return Finding(
        "memory-context-is-tight",
        f"one request of {length:,} tokens needs {_gib(need)} of KV cache on each rank, of "
        f"{_gib(p.most)} that are left for it, activations, graphs and NCCL together; reckoning "
        f"{_gib(p.reserve)} for these{_and_workspace(p)}, {p.tokens(p.left):,} tokens fit",
        _shorter(subject, p, length),
        _evidence(subject, p),
    )


def _replicated(subject: Subject, p: Plan) -> Finding:
    key = "draft_tensor_parallel_size"
    split = replace(subject, patches={**subject.patches, REPLICATED: False})
    weights, cache = drafter_bytes(split)[0], kv_cache(split)
    assert cache is not None  # There is one for the command as it stands.
    ranks = Parallel.of(subject.command, subject.facts).tensor
    token = f"{_kib(p.cache.drafter)} of KV cache a token"
    if cache.drafter != p.cache.drafter:
        token += f" in place of {_kib(cache.drafter)}"
    copies = f", copies of the target's {p.shared} among them," if p.shared else ""
    return Finding(
        "memory-replicated-drafter",
        f'"{key}": 1 has the drafter whole on each of {ranks} ranks: {_gib(p.drafter)} a rank'
        f"{copies} in place of {_gib(weights)}, and {token}",
        evidence=Evidence(key=f'"{key}" in --speculative-config', value="1"),
    )


# Less is within what the reserve may be off by.
_WORTH_A_WORD = GIB / 10


def _and_workspace(p: Plan) -> str:
    large = p.workspace >= _WORTH_A_WORD
    return f" and {_gib(p.workspace)} for {BACKEND}'s workspace" if large else ""


def _shorter(subject: Subject, p: Plan, length: int) -> str:
    """The length that fits, and what each alone makes a request of that length fit."""
    flag, fits = subject.command.flag, p.tokens(p.left)
    ways = []
    if fits > 0:
        ways.append(f"{flag('max-model-len')} {fits // 1024 * 1024 if fits > 4096 else fits}")
    half = replace(p.cache, target=p.cache.target / 2, drafter=p.cache.drafter / 2)
    sixteen_bits = element_bytes(p.cache.dtype) == 2
    less = _reserve(subject, SMALL_BATCH[0])
    few = attention_workspace(subject, _FEW_REQUESTS)
    others = (
        (
            sixteen_bits and cache_runs(subject, "fp8"),
            replace(p, cache=half),
            f"{flag('kv-cache-dtype')} fp8, which halves the cache",
        ),
        (
            p.utilization < _HIGHEST_UTILIZATION,
            replace(p, utilization=_HIGHEST_UTILIZATION),
            f"{flag('gpu-memory-utilization')} {_HIGHEST_UTILIZATION:g}",
        ),
        (
            less < p.reserve,
            replace(p, reserve=less),
            f"{flag('max-num-batched-tokens')} {SMALL_BATCH[0]}",
        ),
        (
            p.workspace - few >= _WORTH_A_WORD,
            replace(p, workspace=few),
            f"{flag('max-num-seqs')} {_FEW_REQUESTS}, which makes {BACKEND}'s workspace smaller",
        ),
    )
    ways += [words for possible, then, words in others if possible and then.fits(length)]
    return ", or ".join(ways) or "take more or larger GPUs, or a smaller export of the target"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _kib(size: float) -> str:
    return f"{size / 1024:.1f} KiB"
