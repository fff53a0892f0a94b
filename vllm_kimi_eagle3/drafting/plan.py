# SPDX-License-Identifier: Apache-2.0
"""What serves a pair's proposals of drafts, decided from vLLM's configuration alone.

Ranks have to agree on it, because each way has its own collectives, and it is asked in several
places, so each asks :func:`plan_or_stock`. What only the loaded drafter or the batch at hand can
say (`loop.py`, `forward.py`) comes on top.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_kimi_eagle3.host import asked_for_v2
from vllm_kimi_eagle3.log import get_logger
from vllm_kimi_eagle3.pair import DRAFTING_SETTING, decisions_of, settings_or_refuse

logger = get_logger(__name__)

NO_PAIR = "the model is no Kimi with an EAGLE-3 drafter"
"""Why stock serves any other model."""

MIN_CAPABILITY = (8, 0)

# More requests of a step than this keep a GPU busy without the loop.
_MAX_BUCKET = 256
# Below the smallest size of the server's own, which are tokens of a step and not requests.
_SMALL = (1, 2, 4)


@dataclass(frozen=True)
class DraftPlan:
    """What serves a server's proposals.

    Attributes:
        loop: the plugin's loop, on the V1 runner.
        forward: the plugin's forward pass inside upstream's loop, on the V2 runner.
        stock: why vLLM's own serves; "" if the plugin does.
        graphs: the loop runs as CUDA graphs, captured at the start; without, the same code runs
            step by step.
        forced: the user asked for it, so that it is not left out for being no faster.
    """

    loop: bool
    forward: bool
    stock: str
    graphs: bool = False
    forced: bool = False


def plan_of(vllm_config: Any) -> DraftPlan:
    """The plan for a server.

    Args:
        vllm_config: vLLM's ``VllmConfig``; while a drafter is built, it may be one of its own.

    Raises:
        ValueError: the plugin's settings in ``--additional-config`` are wrong.
    """
    if not is_for(vllm_config):
        return _stock(NO_PAIR)
    setting = settings_or_refuse(vllm_config.additional_config).get(DRAFTING_SETTING)
    if setting is False:
        return _stock(f'"{DRAFTING_SETTING}" is false in --additional-config')
    forced = setting is True
    eager = _why_no_graphs(vllm_config)
    why = _why_stock(vllm_config) or ("" if forced else eager)
    if why:
        return _stock(why)
    v2 = is_v2(vllm_config)
    return DraftPlan(loop=not v2, forward=v2, stock="", graphs=not eager, forced=forced)


def plan_or_stock(vllm_config: Any) -> DraftPlan:
    """As :func:`plan_of`, but stock where the configuration cannot be read."""
    try:
        return plan_of(vllm_config)
    except Exception as error:  # Whatever a release's configuration lacks must not stop a server.
        logger.warning("vllm-kimi-eagle3: drafting: %s: %s", type(error).__name__, error)
        return _stock("the configuration could not be read")


def is_for(vllm_config: Any) -> bool:
    """True if ``vllm_config`` is of a Kimi target with its EAGLE-3 drafter."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if getattr(speculative, "method", None) != "eagle3":
        return False
    draft = getattr(speculative, "draft_model_config", None)
    return decisions_of(getattr(draft, "hf_config", None)) is not None


def is_v2(vllm_config: Any) -> bool:
    """True if the V2 runner serves."""
    # A property from 0.22 on, which also knows what V2 leaves to V1; V2 was on request before.
    decided = getattr(vllm_config, "use_v2_model_runner", None)
    return decided if isinstance(decided, bool) else bool(asked_for_v2(os.environ))


def buckets_of(sizes: Iterable[int], max_num_seqs: int) -> tuple[int, ...]:
    """The batches for which a graph is captured, in ascending order.

    A batch between two is filled up to the larger one; one above the last is stock's.

    Args:
        sizes: the server's capture sizes.
        max_num_seqs: ``--max-num-seqs``.
    """
    largest = max(1, min(max_num_seqs, _MAX_BUCKET))
    return tuple(sorted({size for size in (*_SMALL, *sizes, largest) if 0 < size <= largest}))


def _stock(why: str) -> DraftPlan:
    return DraftPlan(loop=False, forward=False, stock=why)


def _why_stock(vllm_config: Any) -> str:
    """Why the plugin cannot serve, wanted or not."""
    return (
        _why_not_speculation(vllm_config.speculative_config, vllm_config)
        or _why_not_parallel(vllm_config.parallel_config)
        or _why_not_server(vllm_config)
        or _why_not_device()
    )


def _why_not_speculation(speculative: Any, vllm_config: Any) -> str:
    if getattr(speculative, "parallel_drafting", False):
        return "parallel_drafting has no draft steps after the first"
    if getattr(speculative, "disable_padded_drafter_batch", False):
        return "disable_padded_drafter_batch waits for the sampled tokens on the host"
    if getattr(speculative, "use_heterogeneous_vocab", False):
        return "use_heterogeneous_vocab maps the drafts to another vocabulary"
    drafts = getattr(speculative, "num_speculative_tokens", None) or 0
    if drafts < 1:
        return "num_speculative_tokens is 0"
    tree = getattr(speculative, "speculative_token_tree", None)
    if tree is not None and not _is_chain(tree, drafts):
        return "speculative_token_tree is no chain"
    draft = speculative.draft_model_config
    if any(getattr(c, "uses_mrope", False) for c in (draft, vllm_config.model_config)):
        return "M-RoPE has three positions for a token"
    return ""


def _is_chain(tree: Any, drafts: int) -> bool:
    # As vLLM writes it where the user gave none.
    return str(tree).replace(" ", "") == str([(i + 1) * (0,) for i in range(drafts)]).replace(
        " ", ""
    )


def _why_not_parallel(parallel: Any) -> str:
    def ranks(name: str) -> int:
        return int(getattr(parallel, name, 1) or 1)

    if ranks("data_parallel_size") > 1:
        return "with --data-parallel-size > 1 the ranks' batches differ"
    if ranks("decode_context_parallel_size") > 1 or ranks("prefill_context_parallel_size") > 1:
        return "with context parallelism a rank holds a part of the drafter's KV cache"
    if ranks("pipeline_parallel_size") > 1:
        return "with --pipeline-parallel-size > 1 only the last rank drafts"
    if getattr(parallel, "use_ubatching", False):
        return "microbatches (--enable-dbo, --ubatch-size) run at the same time and share scratch"
    if getattr(parallel, "enable_eplb", False):
        return "--enable-eplb prepares each pass of the drafter"
    return ""


def _why_not_server(vllm_config: Any) -> str:
    if os.environ.get("VLLM_BATCH_INVARIANT", "0").strip() not in ("", "0"):
        return "VLLM_BATCH_INVARIANT is set"
    if getattr(vllm_config, "lora_config", None) is not None:
        return "--enable-lora replaces layers that the drafter shares with the target"
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        return "--kv-transfer-config moves the KV cache layer by layer, from within vLLM's own"
    return ""


def _why_not_device() -> str:
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        return "the kernels are for NVIDIA GPUs"
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"the kernels cannot be imported ({error})"
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        if capability is None or tuple(capability) < MIN_CAPABILITY:
            return "the GPU's compute capability is below 8.0"
    return ""


def _why_no_graphs(vllm_config: Any) -> str:
    """Why no CUDA graph can be captured, without which the plugin is not ahead."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "there is no GPU"
    if getattr(vllm_config.model_config, "enforce_eager", False):
        return "--enforce-eager: without CUDA graphs it is not ahead"
    if getattr(vllm_config.speculative_config, "enforce_eager", False):
        return "enforce_eager in --speculative-config: without CUDA graphs it is not ahead"
    mode = getattr(vllm_config.compilation_config, "cudagraph_mode", None)
    if getattr(mode, "name", str(mode)) == "NONE":
        return "cudagraph_mode is NONE: without CUDA graphs it is not ahead"
    return ""
