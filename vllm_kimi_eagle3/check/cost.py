# SPDX-License-Identifier: Apache-2.0
"""What a step costs with drafts and without, by a stated model: a guide to magnitudes, no promise.

A step reads weights (all but the routed experts once, of those what its tokens choose) and the KV
cache, computes, and launches kernels and all-reduces layer by layer. docs/check-cost.md states the
model, where its numbers come from, and how far off it is of what was published.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm_kimi_eagle3.checkpoint.drafter_tensors import expected_tensors
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity
from vllm_kimi_eagle3.kernels.arch import KIB, arch

from .attention import Choice, Choices, choices, decode_queries
from .memory import kv_cache
from .plugin_drafting import LOOP, why_stock
from .run import (
    NUM_SPECULATIVE_TOKENS,
    asks_for_eagle3,
    drafter_parallel,
    graph_mode,
    num_speculative_tokens,
)
from .runner import runner_of
from .subject import GIB, Subject
from .target import quantization_of
from .weights import Parallel, Split, Tally, drafter_ranks, estimate

Verify = Literal["once", "rows", "prefill"]

# Of a draft after an accepted one, accepted: 76, 56 and 43 % of requests accept the first, second
# and third of a healthy head (AMD's blog of 2026-07-13); acceptance lengths on the cards of Kimi
# heads at k = 3 are 2.3 to 3.4.
ACCEPTANCE = 0.75
# Fitted to the decode rates of eight RTX PRO 6000 that docs/check-cost.md has.
_WEIGHTS_SHARE, _COMPUTE_SHARE = 0.7, 0.08
# Share of the bandwidth at which a back-end reads the KV cache: TRITON_MLA 13 to 38 % measured on
# an H200; FlashInfer's MLA kernel 78 % on an RTX 4090 (flashinfer pull 551).
_CACHE_SHARE, _CACHE_SHARE_TRITON = 0.7, 0.4
# Bytes a second that the plugin's kernel reads with one multiprocessor, in a plain step and with
# four tokens a request, of a 16-bit cache and of an 8-bit one: an H200's, by the launch table of
# sm_120 and its like, whose programs have 99 KB of shared memory, and by that of sm_90
# (benchmarks/results/mla_decode.jsonl: 8 heads, 16 requests of 30,000 tokens).
_PLUGIN_READS = {
    "99 KB": {2: (23.5e9, 13.9e9), 1: (11.8e9, 7.6e9)},
    "more": {2: (29.6e9, 25.0e9), 1: (13.3e9, 9.2e9)},
}
# Of the bandwidth, at most: the copy bandwidth, nearly.
_PLUGIN_MOST = 0.9
# Seconds per layer for launches and two all-reduces, over PCIe and over NVLink.
_LAYER_PCIE, _LAYER_NVLINK = 125e-6, 45e-6
# What a layer takes longer: attention outside a graph (10 % of 32 ms in 61 layers: pull 42885), the
# verify step as a prefill, and no graph at all.
_PIECEWISE, _PREFILL, _EAGER = 50e-6, 100e-6, 200e-6
# Seconds a step and a draft step with the V1 runner (an H200, vLLM 0.26), and as reckoned for V2.
_DRAFTING = {"V1": (1.3e-3, 0.65e-3), "V2": (0.5e-3, 0.3e-3)}
# The same with the plugin's loop, beside what it reads: three drafts take 0.7 ms beside 61 layers,
# and a draft step 0.17 ms, of which 0.12 ms are reading (benchmarks/results: step_time.jsonl,
# draft_step.jsonl).
_PLUGIN_LOOP = (0.2e-3, 0.05e-3)

_SHORT, _LONG = 1_000, 32_000
_MOST = 1024


@dataclass(frozen=True)
class Machine:
    """One GPU, and how it is joined to the others.

    Attributes:
        bandwidth: of its memory, bytes a second.
        compute: 16-bit dense matrix operations a second.
        cache: bytes of its L2 cache.
        nvlink: all-reduces go over NVLink.
    """

    bandwidth: float
    compute: float
    cache: float
    nvlink: bool


@dataclass(frozen=True)
class Work:
    """What one rank has to do; sizes in bytes.

    Attributes:
        layers: of the target.
        expert_bytes: of the routed experts.
        expert_share: the part of its layer's experts that a token chooses.
        other_bytes: of what every step reads.
        flops: for a token.
        kv_bytes: of the KV cache for a token, in all layers.
        prefill_flops: for a token of context, to project it anew in all layers.
        joining_bytes: of the drafter's fc, which joins the aux hidden states once a step.
        drafter_bytes: what each draft reads.
        drafter_kv_bytes: of the drafter's KV cache for a token.
        verify: how a verify step reads the KV cache.
        cache_share: of the bandwidth, at which the target's back-end reads it, in a plain step.
        verify_cache_share: the same in a verify step.
        layer_seconds: for launches and all-reduces, in a plain step.
        verify_layer_seconds: the same in a verify step.
        drafting: seconds for a step, and for each draft.
    """

    layers: int
    expert_bytes: float
    expert_share: float
    other_bytes: float
    flops: float
    kv_bytes: float
    prefill_flops: float
    joining_bytes: float
    drafter_bytes: float
    drafter_kv_bytes: float
    verify: Verify
    cache_share: float
    verify_cache_share: float
    layer_seconds: float
    verify_layer_seconds: float
    drafting: tuple[float, float]


def target_seconds(work: Work, gpu: Machine, batch: int, context: int, queries: int = 1) -> float:
    """Seconds of a step of the target: ``queries`` tokens for each of ``batch`` requests."""
    tokens = batch * queries
    chosen = 1 - (1 - work.expert_share) ** tokens
    read = (work.other_bytes + chosen * work.expert_bytes) / (gpu.bandwidth * _WEIGHTS_SHARE)
    compute = tokens * work.flops / (gpu.compute * _COMPUTE_SHARE)
    cache = batch * context * work.kv_bytes
    share = work.cache_share if queries == 1 else work.verify_cache_share
    seconds = cache / (gpu.bandwidth * share)
    layer = work.layer_seconds
    if queries > 1:
        layer = work.verify_layer_seconds
        if work.verify == "rows":
            # What the L2 cache holds of a layer is read from memory once.
            seconds *= 1 + (queries - 1) * min(1.0, cache / work.layers / gpu.cache)
        elif work.verify == "prefill":
            seconds += batch * context * work.prefill_flops / (gpu.compute * _COMPUTE_SHARE)
    return math.hypot(read, compute) + seconds + work.layers * layer


def draft_seconds(work: Work, gpu: Machine, batch: int, context: int, drafts: int) -> float:
    """Seconds of drafting in a step."""
    step, each = work.drafting
    joining = work.joining_bytes / (gpu.bandwidth * _WEIGHTS_SHARE)
    read = work.drafter_bytes / (gpu.bandwidth * _WEIGHTS_SHARE)
    read += batch * context * work.drafter_kv_bytes / (gpu.bandwidth * _CACHE_SHARE)
    return max(step, joining) + drafts * max(each, read)


def speed_up(
    work: Work, gpu: Machine, batch: int, context: int, drafts: int, acceptance: float = ACCEPTANCE
) -> float:
    """Tokens a second with ``drafts`` drafts, over those without."""
    length = sum(acceptance**i for i in range(drafts + 1))
    plain = target_seconds(work, gpu, batch, context)
    step = target_seconds(work, gpu, batch, context, drafts + 1)
    return length * plain / (step + draft_seconds(work, gpu, batch, context, drafts))


def break_even(
    work: Work, gpu: Machine, context: int, drafts: int, acceptance: float = ACCEPTANCE
) -> int | None:
    """The smallest batch at which speculation loses; None if it wins up to 1,024."""
    batches = range(1, _MOST + 1)
    return next(
        (b for b in batches if speed_up(work, gpu, b, context, drafts, acceptance) < 1), None
    )


# ---------------------------------------------------------------------------------- this command

# By capability: bandwidth in TB/s, 16-bit dense TFLOP/s, L2 in MB, NVLink; from NVIDIA's data
# sheets. Of one capability the larger memory tells the faster GPU.
_GPUS: Mapping[tuple[int, int], tuple[float, float, float, bool]] = {
    (8, 0): (2.0, 312, 40, True),
    (8, 6): (0.77, 155, 6, False),
    (8, 9): (0.86, 362, 96, False),
    (9, 0): (3.35, 989, 50, True),
    (10, 0): (8.0, 2250, 126, True),
    (10, 3): (8.0, 2500, 126, True),
    (12, 0): (1.79, 503, 128, False),
    (12, 1): (0.27, 125, 24, False),
}
_H200_MEMORY, _H200_BANDWIDTH = 100 * GIB, 4.8


def machine(subject: Subject) -> Machine | None:
    """The GPU of a subject; None if there is none, or none that is known."""
    gpus = subject.gpus
    if gpus is None or gpus.capability not in _GPUS:
        return None
    bandwidth, compute, cache, nvlink = _GPUS[gpus.capability]
    if gpus.capability == (9, 0) and gpus.memory > _H200_MEMORY:
        bandwidth = _H200_BANDWIDTH
    return Machine(bandwidth * 1e12, compute * 1e12, cache * 1e6, nvlink)


def work_of(subject: Subject, found: Choices, gpu: Machine) -> Work | None:
    """What a rank has to do for a subject; None where its configs do not say."""
    facts, target, pair = subject.facts, subject.target, subject.pair
    cache = kv_cache(subject)
    if facts is None or target is None or target.config is None or pair is None or cache is None:
        return None
    tally = estimate(target.config, quantization_of(target.config, target.folder)[0])
    in_16_bits = estimate(target.config, None)
    text: Any = target.config.get("text_config", target.config)
    backend = found.target.backend
    if tally is None or in_16_bits is None or backend is None or subject.shape is None:
        return None
    parallel, drafts = Parallel.of(subject.command, facts), drafter_parallel(subject)
    chosen, routed = text.get("num_experts_per_tok"), max(tally.num_experts, 1)
    share = min(1.0, chosen / routed) if type(chosen) is int and chosen > 0 else 1.0
    layers, tensor = subject.shape.num_layers, parallel.tensor
    embedding = 2 * subject.shape.vocab_size * subject.shape.hidden_size / tensor

    def on_a_rank(held: Tally) -> tuple[float, float]:
        """Bytes of the routed experts, and of what every step reads."""
        split = held.bytes[Split.RANKS] + held.bytes[Split.SHARED_EXPERTS]
        experts = held.bytes[Split.EXPERTS] / parallel.experts
        return experts, split / tensor + held.bytes[Split.EACH] - embedding

    experts, other = on_a_rank(tally)
    experts_16, other_16 = on_a_rank(in_16_bits)
    draft = {
        name: math.prod(wanted.shape) * 2 / drafter_ranks(name, drafts)
        for name, wanted in expected_tensors(pair.expected).items()
        if "embed_tokens" not in name and name not in ("d2t", "t2d")
    }
    joining = sum(size for name, size in draft.items() if _JOINING.search(name))
    heads = (text.get("num_attention_heads") or 0) / tensor
    per_head = (text.get("qk_nope_head_dim") or 0) + (text.get("v_head_dim") or 0)
    verify: Verify = "once"
    if not decode_queries(found.target, subject, facts):
        verify = "prefill"
    elif backend.name == "TRITON_MLA" and not backend.plugin:
        verify = "rows"
    share_plain, share_verify = _cache_shares(found.target, verify, subject, gpu)
    layer = _LAYER_NVLINK if gpu.nvlink else _LAYER_PCIE
    eager = _EAGER if graph_mode(subject) == "NONE" else 0
    in_pieces = any(c.backend is not None and c.backend.graphs in _PIECES for c in found.both)
    pieces = _PIECEWISE if in_pieces and not eager else 0
    return Work(
        layers=layers,
        expert_bytes=experts,
        expert_share=share,
        other_bytes=other,
        # Two operations for each weight, and two bytes for each in 16 bits.
        flops=experts_16 * share + other_16,
        kv_bytes=cache.target / cache.ranks,
        prefill_flops=2.0 * (text.get("kv_lora_rank") or 0) * heads * per_head * layers,
        joining_bytes=joining,
        drafter_bytes=sum(draft.values()) - joining,
        drafter_kv_bytes=cache.drafter / cache.ranks,
        verify=verify,
        cache_share=share_plain,
        verify_cache_share=share_verify,
        layer_seconds=layer + eager,
        verify_layer_seconds=layer + eager + pieces + (_PREFILL if verify == "prefill" else 0),
        drafting=_drafting(runner_of(subject.command, facts, subject.environ), subject),
    )


def _drafting(runner: str, subject: Subject) -> tuple[float, float]:
    if runner == "V1" and why_stock(subject, LOOP) is None:
        return _PLUGIN_LOOP
    return _DRAFTING[runner]


def _cache_shares(
    choice: Choice, verify: Verify, subject: Subject, gpu: Machine
) -> tuple[float, float]:
    """Of the bandwidth, at which a back-end reads the cache in a plain and in a verify step."""
    backend = choice.backend
    assert backend is not None
    share = _CACHE_SHARE_TRITON if backend.name == "TRITON_MLA" else _CACHE_SHARE
    if not backend.plugin:
        return share, share
    assert subject.gpus is not None  # Without, there is no machine.
    card = arch(subject.gpus.capability)
    table = _PLUGIN_READS["99 KB" if card.shared_per_block <= 99 * KIB else "more"]
    own_plain, own_verify = (
        min(_PLUGIN_MOST, reads * card.sm_count / gpu.bandwidth)
        for reads in table[1 if choice.layers.kv_cache_dtype.startswith("fp8") else 2]
    )
    # A prefill is vLLM's own.
    return own_plain, own_verify if verify == "once" else share


_PIECES = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE")
# ``combine_hidden_states``, with a norm before it in some drafters.
_JOINING = re.compile(r"(^|\.)fc\.")


def findings(subject: Subject) -> Iterator[Finding]:
    """The cost of a step, and from which batch on speculation loses."""
    gpu, found, k = machine(subject), choices(subject), num_speculative_tokens(subject)
    facts = subject.facts
    if facts is None or gpu is None or found is None or k is None or not asks_for_eagle3(subject):
        return
    work = work_of(subject, found, gpu)
    if work is None:
        return
    assert subject.gpus is not None
    assert found.target.backend is not None
    evidence = Evidence(
        file="docs/check-cost.md",
        key=f"attention back-end on {subject.gpus.name}",
        value=found.target.backend.name,
        release=facts.release,
    )
    gain = {batch: speed_up(work, gpu, batch, _SHORT, k) for batch in (1, 32)}
    loses = gain[1] < 1
    yield Finding(
        "run-break-even",
        f"reckoned, not measured: with {_SHORT:,} tokens of context a plain step at batch 1 takes "
        f"{_ms(target_seconds(work, gpu, 1, _SHORT))}, one with {k} drafts "
        f"{_ms(target_seconds(work, gpu, 1, _SHORT, k + 1))} to verify and "
        f"{_ms(draft_seconds(work, gpu, 1, _SHORT, k))} to draft; {_times(gain[1])} the tokens a "
        f"second at batch 1 and {_times(gain[32])} at batch 32; it loses "
        f"{_from(break_even(work, gpu, _SHORT, k))}, and with {_LONG:,} tokens "
        f"{_from(break_even(work, gpu, _LONG, k))}",
        _NO_LOSS[work.verify] if loses else "",
        evidence,
        rated=Severity.SLOW if loses else None,
    )
    best = max(range(1, 17), key=lambda n: speed_up(work, gpu, 1, _SHORT, n))
    most = speed_up(work, gpu, 1, _SHORT, best)
    if k > best and gain[1] < _WORTH * most:
        yield Finding(
            "run-many-drafts",
            f"reckoned, not measured: {k} drafts a step give {_times(gain[1])} the tokens a second "
            f"at batch 1, and {best} give {_times(most)}, since the later ones are seldom accepted "
            "and every one is verified",
            f'use "num_speculative_tokens": {best}',
            Evidence(key=NUM_SPECULATIVE_TOKENS, value=str(k), release=facts.release),
        )


_NO_LOSS: Mapping[Verify, str] = {
    "once": "leave out --speculative-config",
    "rows": "leave out --speculative-config",
    "prefill": "do what run-verify-prefill says, or leave out --speculative-config",
}
# A difference that is within what the model is off by is not worth a word.
_WORTH = 0.9


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _times(factor: float) -> str:
    return f"{factor:.2f} times"


def _from(batch: int | None) -> str:
    if batch is None:
        return f"at no batch up to {_MOST:,}"
    return f"from batch {batch} on" if batch > 1 else "at every batch"
