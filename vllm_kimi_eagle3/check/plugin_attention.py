# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin's kernel serves a command's TRITON_MLA, and if not, why.

It is what ``attention/plan.py`` decides from vLLM's configuration when a server starts, told from
the command and the checkpoints before.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_kimi_eagle3.attention.plan import KV_LORA_RANK, MAX_QUERY_LEN, ROPE_DIM
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.pair import ATTENTION_SETTING, KEY, settings_of

from .host import fix_of
from .run import NUM_SPECULATIVE_TOKENS, num_speculative_tokens
from .subject import Subject
from .weights import Parallel

PATCH = "mla-attention"
BACKEND = "TRITON_MLA"

# The kernel's own limits (``unsupported`` of kernels/mla_decode.py, and the launch tables, which
# have none for fp8 before this capability).
_MAX_HEADS, _PAGE = 128, 16
_CACHES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
_FP8_SINCE = (8, 9)
_BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


@dataclass(frozen=True)
class WhyStock:
    """Why vLLM's own kernel serves TRITON_MLA.

    Attributes:
        reason: in words.
        fix: after which the plugin's serves; "" if there is no such thing.
    """

    reason: str
    fix: str = ""


def why_not_offered(subject: Subject) -> WhyStock | None:
    """Why TRITON_MLA is vLLM's own class; None where it is the plugin's, whatever kernel serves."""
    if subject.patches.get(PATCH) is not True:
        why = subject.patches_off.get(PATCH) or "for no known reason"
        fix = fix_of(PATCH, subject.environ, subject.patches_off)
        return WhyStock(f"the patch {PATCH} is not in effect ({why})", fix)
    text = subject.target_text
    if text and (text.get("kv_lora_rank"), text.get("qk_rope_head_dim")) != (
        KV_LORA_RANK,
        ROPE_DIM,
    ):
        return WhyStock(f"the target's cache is not {KV_LORA_RANK} + {ROPE_DIM} wide")
    try:
        settings = settings_of(subject.command.object("additional-config"))
    except CheckpointError:
        settings = {}  # The server is refused: drafter-setting.
    if settings.get(ATTENTION_SETTING, True) is False:
        place = f'"{KEY}" in --additional-config'
        return WhyStock(
            f'"{ATTENTION_SETTING}": false of {place} says so',
            f'leave "{ATTENTION_SETTING}" out of {place}',
        )
    return None


def why_stock(subject: Subject, cache: str, page_size: int | None) -> WhyStock | None:
    """Why vLLM's own kernel serves TRITON_MLA; None where the plugin's does.

    Args:
        subject: after the checks of target and drafter.
        cache: the dtype of the layers' KV cache, as ``--kv-cache-dtype`` takes it.
        page_size: ``--block-size``; None if not given.
    """
    if (offered := why_not_offered(subject)) is not None:
        return offered
    if subject.environ.get(_BATCH_INVARIANT, "0").strip() not in ("", "0"):
        return WhyStock(f"{_BATCH_INVARIANT} is set", f"unset {_BATCH_INVARIANT}")
    if (microbatches := _microbatches(subject)) is not None:
        return WhyStock("microbatches run at the same time", f"leave out {microbatches}")
    if cache not in _CACHES:
        return WhyStock(f"the kernel does not read a KV cache of {cache}")
    if query_len(subject) > MAX_QUERY_LEN:
        return WhyStock(
            f"its kernel takes {MAX_QUERY_LEN} tokens of a request at most",
            f"use {MAX_QUERY_LEN - 1} for {NUM_SPECULATIVE_TOKENS}, or fewer",
        )
    if page_size is not None and (page_size < _PAGE or page_size % _PAGE):
        flag = subject.command.flag("block-size")
        return WhyStock(f"its kernel wants blocks of {_PAGE} tokens", f"leave out {flag}")
    if heads(subject) > _MAX_HEADS:
        return WhyStock(f"its kernel takes {_MAX_HEADS} heads on a rank at most")
    if cache.startswith("fp8") and subject.gpus and subject.gpus.capability < _FP8_SINCE:
        flag = subject.command.flag("kv-cache-dtype")
        return WhyStock("the GPU has no fp8 instructions", f"use {flag} bfloat16")
    return _why_not_drafter(subject)


def _microbatches(subject: Subject) -> str | None:
    """The flag that asks for them."""
    command = subject.command
    if command.switch("enable-dbo"):
        return command.flag("enable-dbo")
    if (command.integer("ubatch-size") or 0) > 1:
        return command.flag("ubatch-size")
    return None


def _why_not_drafter(subject: Subject) -> WhyStock | None:
    pair, text = subject.pair, subject.target_text
    if pair is None or pair.attention != "mla":
        return None
    own, target = pair.expected, text.get("num_attention_heads")
    if target is not None and own.num_heads != target:
        return WhyStock(f"the MLA drafter has {own.num_heads} heads and the target {target}")
    if (own.kv_lora_rank, own.qk_rope_head_dim) != (KV_LORA_RANK, ROPE_DIM):
        return WhyStock("the MLA drafter has other dimensions than the target")
    return None


def query_len(subject: Subject) -> int:
    """The most tokens with which a request counts as a decode, where the plugin's kernel serves."""
    if Parallel.of(subject.command, subject.facts).decode_context > 1:
        return 1
    drafts = num_speculative_tokens(subject) or 1
    if (subject.command.speculative or {}).get("parallel_drafting") is True:
        return max(1 + drafts, min(1 + 2 * drafts, MAX_QUERY_LEN))
    return 1 + drafts


def heads(subject: Subject) -> int:
    """Query heads that a rank's decode has, those gathered for context parallelism included; 0 if
    not known."""
    parallel = Parallel.of(subject.command, subject.facts)
    total = subject.target_text.get("num_attention_heads")
    if type(total) is not int or not 0 < total < 2**31:
        return 0
    return total // parallel.tensor * parallel.decode_context
