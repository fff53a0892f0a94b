# SPDX-License-Identifier: Apache-2.0
"""How the pair is run: parallelism, the model runner, scheduling, graphs' sizes, tool calls.

What depends on the attention back-end is in ``attention.py``; what limits a pair whatever the
command says is in ``limits.py``, which vLLM's own start asks as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vllm_kimi_eagle3.checkpoint.aux_layers import default_layers
from vllm_kimi_eagle3.checkpoint.drafter import attention_of
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity
from vllm_kimi_eagle3.host import V2_RUNNER_SINCE, V2_RUNNER_SWITCH, asked_for_v2
from vllm_kimi_eagle3.limits import (
    Attention,
    Run,
    context_parallel_flag,
    last_rank_start,
    limits,
)

from . import command_flags
from .facts import Facts
from .length import refused_length
from .parsers import KIMI_PARSER, unknown_parsers
from .runner import lacking_on_v2, runner_of
from .spelling import is_eagle3, is_true
from .subject import GIB, Subject
from .weights import Parallel

REPLICATED = "replicated-drafter"
"""The patch that makes a ``draft_tensor_parallel_size`` of 1 true."""
NUM_SPECULATIVE_TOKENS = '"num_speculative_tokens" in --speculative-config'

# CudaPlatformBase.check_and_update_config: up to 0.17 it writes FLASHINFER_MLA into the whole
# server's attention config on GPUs of this family.
_FORCES_FLASHINFER_MLA_BEFORE, _BLACKWELL = "0.18", 10

# What the V1 runner does not take: _get_v1_model_runner_unsupported_features.
_KEYS_NOT_ON_V1 = {"enable_adaptive_verification": "0.29", "draft_lm_head_quantization": "0.33"}
# The V2 runner of earlier releases hands EAGLE-3 no aux hidden states ("None,  # aux_hidden_states"
# in v1/worker/gpu/model_runner.py).
_V2_HAS_AUX = "0.17"

# Executors that schedule asynchronously: by name up to 0.18, then by supports_async_scheduling().
# Ray's first one never does; its second does, is chosen by the variable, and is alone from 0.33.
_RAY_V2 = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
_RAY_V2_SINCE, _RAY_V2_ALONE = "0.20", "0.33"
# From here on only the V1 runner minds disable_padded_drafter_batch.
_V2_DRAFTS_UNPADDED = "0.33"

# MAX_SPEC_LEN of v1/sample/rejection_sampler.py: an assertion at the first verify step.
_MAX_SPEC_LEN = 128

# EngineArgs.get_batch_defaults for a server: GPUs of 70 GiB and more that are no A100, others.
_LARGE, _LARGE_BATCH, SMALL_BATCH = 70 * GIB, (8192, 1024), (2048, 256)
_LARGEST, _LARGEST_BATCH, _LARGEST_SINCE = 160 * GIB, (16384, 1024), "0.28"
# GB10, a GPU with the memory of a large one, is among the others from this release on.
_GB10, _GB10_IS_SMALL = (12, 1), "0.33"
# A100 by name; of GPUs that were named by architecture those are A100.
_A100 = ("a100", "sm_80")

# A token-count state machine that misses what several tokens at once hold; rewritten in 0.20.
_PARSER_SAFE = "0.20"
_OFFLOAD_CRASH = ("0.19", "0.20")


def findings(subject: Subject) -> Iterator[Finding]:
    """What there is to say of how the pair is run."""
    facts = subject.facts
    if facts is None or not asks_for_eagle3(subject):
        return
    yield from _limits(subject)
    yield from _ranks(subject, facts)
    yield from _heads(subject, facts)
    yield from _runner(subject, facts)
    yield from _async_scheduling(subject, facts)
    yield from _eager(subject, facts)
    yield from _number_of_drafts(subject, facts)
    yield from _batch(subject, facts)
    yield from _capture_sizes(subject, facts)
    yield from _length(subject, facts)
    yield from _tool_calls(subject, facts)
    yield from _offload(subject, facts)


# --------------------------------------------------------------------------- what was asked for


def asks_for_eagle3(subject: Subject) -> bool:
    """True if the command drafts for a Kimi with EAGLE-3, as far as is known of the target."""
    if not is_eagle3(subject.command.speculative):
        return False
    target = subject.target
    return subject.shape is not None or target is None or target.config is None


def num_speculative_tokens(subject: Subject) -> int | None:
    """The drafts of a step; None where the command does not say."""
    value = (subject.command.speculative or {}).get("num_speculative_tokens")
    return value if type(value) is int and 0 < value < 2**20 else None


def drafter_attention(subject: Subject) -> Attention | None:
    """The drafter's family; None where nothing is known of it."""
    if subject.pair is not None:
        return subject.pair.attention
    config = None if subject.drafter is None else subject.drafter.config
    return None if config is None else attention_of(config)


def is_replicated(subject: Subject) -> bool:
    """True if the drafter is whole on each of several ranks (``drafting/replicated.py``)."""
    command, size = subject.command, _draft_tensor_parallel_size(subject)
    parallel = Parallel.of(command, subject.facts)
    prefill = command.integer("prefill-context-parallel-size") or 1
    return (
        size == 1
        and parallel.tensor > 1
        and context_parallel_flag(parallel.decode_context, prefill) is None
        and subject.patches.get(REPLICATED) is True
    )


def drafter_parallel(subject: Subject) -> Parallel:
    """The ranks as far as the drafter is spread over them."""
    parallel = Parallel.of(subject.command, subject.facts)
    return replace(parallel, tensor=1) if is_replicated(subject) else parallel


def _draft_tensor_parallel_size(subject: Subject) -> int | None:
    return _positive((subject.command.speculative or {}).get("draft_tensor_parallel_size"))


def _on_v1(subject: Subject, facts: Facts) -> bool:
    return runner_of(subject.command, facts, subject.environ) == "V1"


def graph_mode(subject: Subject) -> str:
    """The ``cudagraph_mode`` that is asked for, before vLLM fits it to the back-ends."""
    command = subject.command
    if command.switch("enforce-eager"):
        return "NONE"
    compilation = command.object("compilation-config") or {}
    mode = compilation.get("cudagraph_mode")
    if isinstance(mode, str) and mode:
        return mode.upper()
    level = command.integer("optimization-level")
    return {0: "NONE", 1: "PIECEWISE"}.get(2 if level is None else level, "FULL_AND_PIECEWISE")


def batch_limits(subject: Subject, facts: Facts | None) -> tuple[int, int]:
    """``--max-num-batched-tokens`` and ``--max-num-seqs``, with vLLM's defaults for a server.

    Args:
        facts: the release; None counts as the newest.
    """
    gpus = subject.gpus
    tokens, requests = SMALL_BATCH
    if gpus is not None:
        a100 = any(name in gpus.name.lower() for name in _A100)
        gb10 = gpus.capability == _GB10 and not _before(facts, _GB10_IS_SMALL)
        if gpus.memory >= _LARGEST and not _before(facts, _LARGEST_SINCE):
            tokens, requests = _LARGEST_BATCH
        elif gpus.memory >= _LARGE and not a100 and not gb10:
            tokens, requests = _LARGE_BATCH
    command = subject.command
    own = command.integer("max-num-seqs")
    most = command.integer("max-num-batched-tokens")
    requests = own if own is not None and own > 0 else requests
    if most is not None and most > 0:
        # EngineArgs._set_default_max_num_seqs_and_batched_tokens_args.
        return most, requests if own is not None else min(requests, most)
    return tokens, requests


def _before(facts: Facts | None, release: str) -> bool:
    return facts is not None and facts.before(release)


def limits_run(subject: Subject, facts: Facts, attention: Attention) -> Run:
    """The command as ``limits.py`` looks at it."""
    command, speculative = subject.command, subject.command.speculative or {}
    parallel = Parallel.of(command, facts)
    backend, _ = forced_backend(subject)
    by_vllm = (
        backend is None
        and facts.before(_FORCES_FLASHINFER_MLA_BEFORE)
        and subject.gpus is not None
        and subject.gpus.capability[0] == _BLACKWELL
    )
    config = (None if subject.drafter is None else subject.drafter.config) or {}
    layers = None if subject.shape is None else subject.shape.num_layers
    aux = None if subject.pair is None or subject.pair.aux is None else subject.pair.aux.captured
    return Run(
        version=facts.version,
        runner=runner_of(subject.command, facts, subject.environ),
        drafter_attention=attention,
        tensor_parallel_size=parallel.tensor,
        pipeline_parallel_size=parallel.pipeline,
        decode_context_parallel_size=parallel.decode_context,
        attention_backend="FLASHINFER_MLA" if by_vllm else backend,
        draft_attention_backend=_backend_name(speculative.get("attention_backend")),
        prefill_context_parallel_size=command.integer("prefill-context-parallel-size") or 1,
        draft_tensor_parallel_size=_draft_tensor_parallel_size(subject),
        replicated=is_replicated(subject),
        num_speculative_tokens=num_speculative_tokens(subject),
        drafter_kv_heads=_count(config, "num_key_value_heads")
        or _count(config, "num_attention_heads"),
        aux_layers=aux or (None if layers is None else default_layers(layers)),
        last_rank_start=last_rank_start(layers, parallel.pipeline, subject.environ),
    )


def forced_backend(subject: Subject) -> tuple[str | None, str]:
    """The back-end that the user forces on MLA layers, and on what its name stands."""
    command = subject.command
    if (name := _backend_name(command.text("attention-backend"))) is not None:
        return name, command.flag("attention-backend")
    config = command.object("attention-config") or {}
    at, kinds = command.flag("attention-config"), config.get("backend_per_kind")
    if isinstance(kinds, Mapping) and (name := _backend_name(kinds.get("mla_attention"))):
        return name, f'"backend_per_kind" in {at}'
    return _backend_name(config.get("backend")), f'"backend" in {at}'


def _backend_name(value: Any) -> str | None:
    """A back-end's name; None for none, and for ``auto``, which is none from 0.18 on."""
    if not isinstance(value, str) or not value or value.lower() == "auto" or len(value) > 64:
        return None
    return value.upper() if value.isprintable() else None


def _count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and 0 < value < 2**31 else None


def _positive(value: Any) -> int | None:
    """A number as pydantic takes it, as a text as well."""
    number = command_flags.integer(str(value))
    return number if number is not None and number > 0 else None


# ------------------------------------------------------------------------------------- findings


def _limits(subject: Subject) -> Iterator[Finding]:
    assert subject.facts is not None
    attention = drafter_attention(subject)
    if attention is not None:
        yield from limits(limits_run(subject, subject.facts, attention))
        return
    # What holds for either family.
    llama = limits(limits_run(subject, subject.facts, "llama"))
    mla = limits(limits_run(subject, subject.facts, "mla"))
    yield from (finding for finding in llama if finding in mla)


# Executors whose ranks may be on other machines.
_ELSEWHERE = ("ray", "external_launcher")


def _ranks(subject: Subject, facts: Facts) -> Iterator[Finding]:
    """Whether there is a GPU for each rank: ``ParallelConfig.__post_init__`` for those of one
    replica, ``init_device`` of gpu_worker.py for several."""
    command, gpus = subject.command, subject.gpus
    executor = command.text("distributed-executor-backend")
    if gpus is None or gpus.count < 1 or (executor is not None and executor != "mp"):
        return
    if command.text("data-parallel-backend") == "ray" or (command.integer("nnodes") or 1) > 1:
        return
    sizes = {
        name: size
        for name in (
            "tensor-parallel-size",
            "pipeline-parallel-size",
            "prefill-context-parallel-size",
        )
        if (size := command.integer(name)) is not None and size > 1
    }
    local = command.integer("data-parallel-size-local")
    if (
        command.switch("data-parallel-external-lb")
        or command.integer("data-parallel-rank") is not None
    ):
        local = 1
    elif local is None and command.switch("data-parallel-hybrid-lb"):
        return  # vLLM wants it said how many are here.
    replicas = command.integer("data-parallel-size") if local is None else local
    if replicas is not None and replicas != 1:
        # 0 where all are on other machines.
        sizes["data-parallel-size" if local is None else "data-parallel-size-local"] = replicas
    needed = math.prod(sizes.values())
    if needed <= gpus.count:
        return
    said = " and ".join(f"{command.flag(name)} {size}" for name, size in sizes.items())
    fits = [size for size in sizes_that_divide(subject) if size <= gpus.count]
    fix = f"use --distributed-executor-backend {_ELSEWHERE[0]} or --nnodes if others are elsewhere"
    if list(sizes) == ["tensor-parallel-size"] and fits:
        fix = f"use {command.flag('tensor-parallel-size')} {fits[-1]}, or {fix[4:]}"
    yield Finding(
        "run-too-few-gpus",
        f"{said} take{'s' if len(sizes) == 1 else ''} {needed} GPUs, and there "
        f"{'is 1' if gpus.count == 1 else f'are {gpus.count}'}",
        fix,
        Evidence(key=gpus.name, value=str(gpus.count), release=facts.release),
    )


def _heads(subject: Subject, facts: Facts) -> Iterator[Finding]:
    """Whether attention heads can be spread: ``ModelConfig.verify_with_parallel_config`` for the
    target, the drafter's attention layer for its own."""
    size = Parallel.of(subject.command, facts).tensor
    flag = subject.command.flag("tensor-parallel-size")
    for owner, what, heads, replicated in _spread_heads(subject):
        if heads % size == 0 or (replicated and size % heads == 0):
            continue
        fits = [n for n in sizes_that_divide(subject) if n < size]
        yield Finding(
            "run-heads",
            f"{flag} {size} does not divide the {owner}'s {heads} {what}",
            f"use {flag} {fits[-1]}" if fits else "",
            Evidence(file="config.json", key=f"{what} of the {owner}", value=str(heads)),
        )
        return


def _spread_heads(subject: Subject) -> Iterator[tuple[str, str, int, bool]]:
    """What the tensor-parallel ranks share: whose, what, how many, and whether each of them may
    lie on several ranks (KV heads of ``LlamaAttention``)."""
    if (heads := _count(subject.target_text, "num_attention_heads")) is not None:
        yield "target", "attention heads", heads, False
    if subject.pair is None or is_replicated(subject):
        return
    expected = subject.pair.expected
    yield "drafter", "attention heads", expected.num_heads, False
    if subject.pair.attention == "llama":
        yield "drafter", "KV heads", expected.num_kv_heads, True


def sizes_that_divide(subject: Subject) -> list[int]:
    """The tensor-parallel sizes over which all attention heads can be spread, ascending."""
    shared = [(heads, often) for _, _, heads, often in _spread_heads(subject) if heads > 0]
    most = min((heads for heads, often in shared if not often), default=0)
    return [
        size
        for size in range(1, min(most, _MOST_RANKS) + 1)
        if all(heads % size == 0 or (often and size % heads == 0) for heads, often in shared)
    ]


# No machine has more, and a number out of a file may be any.
_MOST_RANKS = 4096


def _runner(subject: Subject, facts: Facts) -> Iterator[Finding]:
    switch, lacking = asked_for_v2(subject.environ), lacking_on_v2(subject.command, facts)
    asked = Evidence(key=V2_RUNNER_SWITCH, release=facts.release)
    if switch:
        asked = Evidence(key=V2_RUNNER_SWITCH, value="1", release=facts.release)
        if facts.before(_V2_HAS_AUX):
            yield Finding(
                "run-runner",
                f"the V2 runner of vLLM {facts.release} hands EAGLE-3 no aux hidden states, so the "
                "drafter drafts from the target's final hidden state, which it was not trained on",
                f"unset {V2_RUNNER_SWITCH}",
                asked,
                rated=Severity.WRONG,
            )
        elif lacking:
            yield Finding(
                "run-runner",
                f"{V2_RUNNER_SWITCH}=1 with {', '.join(lacking)} is refused: the V2 runner of "
                f"vLLM {facts.release} does not have it",
                f"unset {V2_RUNNER_SWITCH}, or leave out {' and '.join(lacking)}",
                asked,
            )
        return
    default_v2 = facts.version is not None and not facts.before(str(V2_RUNNER_SINCE))
    if default_v2 and switch is None and lacking:
        yield Finding(
            "run-runner",
            f"vLLM {facts.release} serves this with the V1 runner, because V2 does not have "
            f"{', '.join(lacking)}",
            "",
            Evidence(key=lacking[0], release=facts.release),
            rated=Severity.NOTE,
        )
    speculative = subject.command.speculative or {}
    for key, since in _KEYS_NOT_ON_V1.items():
        if speculative.get(key) and not facts.before(since) and switch is False:
            yield Finding(
                "run-runner",
                f'"{key}" in --speculative-config with {V2_RUNNER_SWITCH}=0 is refused: only the '
                "V2 runner has it",
                f"unset {V2_RUNNER_SWITCH}",
                Evidence(key=V2_RUNNER_SWITCH, value="0", release=facts.release),
            )


def _async_scheduling(subject: Subject, facts: Facts) -> Iterator[Finding]:
    command, speculative = subject.command, subject.command.speculative or {}
    why, fix, cause = "", "", Evidence(release=facts.release)
    backend = command.text("distributed-executor-backend")
    ray_v2 = not facts.before(_RAY_V2_SINCE) and subject.environ.get(_RAY_V2, "0") not in ("", "0")
    if is_true(speculative.get("disable_padded_drafter_batch")) and (
        facts.before(_V2_DRAFTS_UNPADDED) or _on_v1(subject, facts)
    ):
        key = '"disable_padded_drafter_batch"'
        why = f"{key} in --speculative-config does not go with it"
        fix = f"leave out {key}"
        cause = replace(cause, key=f"{key} in --speculative-config", value="true")
    elif backend == "ray" and not ray_v2 and facts.before(_RAY_V2_ALONE):
        at = command.flag("distributed-executor-backend")
        why = f"{at} ray does not go with it"
        fix = f"leave out {at}"
        cause = replace(cause, key=at, value=backend)
        if not facts.before(_RAY_V2_SINCE):
            fix += f", or set {_RAY_V2}=1"
    asked, flag = command.switch("async-scheduling"), command.flag("async-scheduling")
    evidence = replace(cause, key=flag, value=None)
    if asked and why:
        yield Finding(
            "run-async-refused",
            f"{flag} is refused: {why}",
            fix,
            evidence,
        )
    elif asked is False:
        yield Finding(
            "run-async-off",
            f"{flag} turns off the asynchronous scheduling that EAGLE-3 has by default, so the GPU "
            "waits for the CPU between steps",
            f"leave out {flag}, unless the output is wrong with it",
            evidence,
        )
    elif why:
        yield Finding(
            "run-async-off",
            f"asynchronous scheduling is off, so the GPU waits for the CPU between steps: {why}",
            fix,
            cause,
        )


def _eager(subject: Subject, facts: Facts) -> Iterator[Finding]:
    command = subject.command
    if graph_mode(subject) != "NONE" or facts.cpu_build:
        return
    flag, value = command.flag("compilation-config"), "NONE"
    if command.switch("enforce-eager"):
        flag, value = command.flag("enforce-eager"), "on"
    elif command.integer("optimization-level") == 0:
        flag, value = command.flag("optimization-level"), "0"
    yield Finding(
        "run-no-graphs",
        f"{flag} turns CUDA graphs off for target and drafter, and a step of a few tokens is bound "
        "by the CPU that launches its kernels one by one",
        f"leave out {flag}" if value != "NONE" else f'leave out "cudagraph_mode" in {flag}',
        Evidence(key=flag, value=value, release=facts.release),
    )


def _number_of_drafts(subject: Subject, facts: Facts) -> Iterator[Finding]:
    k = num_speculative_tokens(subject)
    if k is not None and k > _MAX_SPEC_LEN and _on_v1(subject, facts):
        yield Finding(
            "run-many-drafts",
            f"the V1 runner verifies at most {_MAX_SPEC_LEN} drafts a step, and {k} are asked for: "
            "the first step ends the server with an AssertionError",
            'use "num_speculative_tokens": 3',
            Evidence(key=NUM_SPECULATIVE_TOKENS, value=str(k), release=facts.release),
            rated=Severity.FAILS,
        )


def _batch(subject: Subject, facts: Facts) -> Iterator[Finding]:
    command, k = subject.command, num_speculative_tokens(subject)
    own = [n for n in ("max-num-batched-tokens", "max-num-seqs") if command.integer(n) is not None]
    if k is None or (not own and subject.gpus is None):
        return
    tokens, requests = batch_limits(subject, facts)
    most, seqs = (command.flag(n) for n in ("max-num-batched-tokens", "max-num-seqs"))
    if tokens < requests:
        # SchedulerConfig.verify_max_model_len.
        yield Finding(
            "run-batch",
            f"{most} ({tokens}) is refused: it is less than {seqs} ({requests})",
            f"raise {most}, to {requests * (k + 1)} if every step is to verify all drafts",
            Evidence(key=most, value=str(tokens), release=facts.release),
            rated=Severity.FAILS,
        )
    elif own and tokens < requests * (k + 1):
        yield Finding(
            "run-batch",
            f"a step takes at most {tokens} tokens ({most}), and {requests} requests ({seqs}) with "
            f"{k} drafts each have {requests * (k + 1)} to verify, so with more than "
            f"{tokens // (k + 1)} requests at once some wait and some lose their drafts",
            f"raise {most} to {requests * (k + 1)}, or lower {seqs} to {tokens // (k + 1)}",
            Evidence(key=most, value=str(tokens), release=facts.release),
        )


def _capture_sizes(subject: Subject, facts: Facts) -> Iterator[Finding]:
    """What the user says of the sizes of graphs, against the size of a verify step."""
    command, k = subject.command, num_speculative_tokens(subject)
    if k is None or graph_mode(subject) == "NONE":
        return
    compilation = command.object("compilation-config") or {}
    at = command.flag("compilation-config")
    sizes: Any = compilation.get("cudagraph_capture_sizes")
    flag = f'"cudagraph_capture_sizes" in {at}'
    if command.options.get("cudagraph-capture-sizes") is not None:
        sizes, flag = (
            command.options["cudagraph-capture-sizes"],
            command.flag("cudagraph-capture-sizes"),
        )
    if sizes is None:
        sizes, flag = (
            command.integer("max-cudagraph-capture-size"),
            command.flag("max-cudagraph-capture-size"),
        )
    if sizes is None:
        sizes = compilation.get("max_cudagraph_capture_size")
        flag = f'"max_cudagraph_capture_size" in {at}'
    numbers = [n for n in _numbers(sizes) if n > 0]
    if not numbers:
        return
    largest, query = max(numbers), k + 1
    evidence = Evidence(key=flag, value=str(largest), release=facts.release)
    _, requests = batch_limits(subject, facts)
    if largest < query:
        full_v1 = graph_mode(subject) != "PIECEWISE" and _on_v1(subject, facts)
        then = "vLLM finds no size for the verify step and stops" if full_v1 else ""
        yield Finding(
            "run-capture-sizes",
            f"a verify step has {query} tokens a request, and graphs are captured for at most "
            f"{largest} ({flag}): {then or 'every verify step runs without a graph'}",
            f"raise it to {query} times the requests at once, or leave it out",
            evidence,
            # adjust_cudagraph_sizes_for_spec_decode: "No valid cudagraph sizes".
            rated=Severity.FAILS if full_v1 else None,
        )
    elif largest < requests * query and command.integer("max-num-seqs") is not None:
        yield Finding(
            "run-capture-sizes",
            f"graphs are captured for at most {largest} tokens ({flag}), which {largest // query} "
            f"requests of {query} tokens fill; with up to {requests} "
            f"({command.flag('max-num-seqs')}) the larger verify steps run without a graph",
            f"raise it to {requests * query}",
            evidence,
        )


def _numbers(value: Any) -> list[int]:
    found = []
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, str) and item.isdecimal() and len(item) < 10:
            item = int(item)
        if type(item) is int:
            found.append(item)
    return found


def _length(subject: Subject, facts: Facts) -> Iterator[Finding]:
    longest = refused_length(subject)
    allowed = subject.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip()
    if longest is None or allowed not in ("", "0"):
        return
    flag, asked = subject.command.flag("max-model-len"), subject.command.integer("max-model-len")
    yield Finding(
        "run-max-model-len",
        f"{flag} {asked} is refused: by the target's config.json a request has at most {longest} "
        "tokens",
        f"use {flag} {longest}",
        Evidence(key=flag, value=str(asked), release=facts.release),
    )


def _tool_calls(subject: Subject, facts: Facts) -> Iterator[Finding]:
    command = subject.command
    parser, auto = command.text("tool-call-parser"), command.switch("enable-auto-tool-choice")
    if auto and not parser:
        yield Finding(
            "run-no-tool-parser",
            f"{command.flag('enable-auto-tool-choice')} is refused without --tool-call-parser",
            f"add --tool-call-parser {KIMI_PARSER}",
            Evidence(key=command.flag("enable-auto-tool-choice"), release=facts.release),
        )
        return
    yield from unknown_parsers(command, facts)
    if (
        parser != KIMI_PARSER
        or not facts.before(_PARSER_SAFE)
        or subject.patches.get("tool-parser")
    ):
        return
    off = subject.patches_off.get("tool-parser", "")
    patch = f"let the plugin's patch tool-parser be applied ({off}), or " if off else ""
    yield Finding(
        "run-tool-parser",
        f"the {KIMI_PARSER} tool parser of vLLM {facts.release} loses parts of streamed tool calls "
        "when a step brings several tokens, as it does with speculation",
        f"{patch}use vLLM 0.20 or later",
        Evidence(key=command.flag("tool-call-parser"), value=parser, release=facts.release),
    )


def _offload(subject: Subject, facts: Facts) -> Iterator[Finding]:
    since, before = _OFFLOAD_CRASH
    command = subject.command
    names = ("kv-offloading-size", "kv-transfer-config")
    given = [command.flag(name) for name in names if name in command.options]
    if not given or not command.switch("enable-expert-parallel"):
        return
    if not facts.before(since) and facts.before(before):
        yield Finding(
            "run-offload",
            f"{given[0]} with {command.flag('enable-expert-parallel')} and EAGLE-3 is reported to "
            f"end in a segmentation fault on vLLM {facts.release}",
            f"leave out {given[0]} or {command.flag('enable-expert-parallel')}, or try another "
            "release",
            Evidence(key=given[0], release=facts.release),
        )
