# SPDX-License-Identifier: Apache-2.0
"""A request longer than a drafter's rope reaches stops drafting, alone.

Where the limit is known (``drafter-positions`` decides it), the scheduler schedules no drafts for a
request that has come to it, and the drafter is given no position beyond it: what it computes there
is never used, but an index outside its table of cos and sin would end the server.
"""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol
from vllm_kimi_eagle3.pair import decisions_of

from . import hooks
from .base import Patch, Undo, all_of, wrap_method, wrapped_by

_ID = "drafter-length"
_LIMIT = "position_limit"
_SCHEDULER = "vllm.v1.core.sched.scheduler"
_TARGET = f"{_SCHEDULER}:Scheduler.schedule"
_REQUEST = "vllm.v1.request:Request"
_MODELS = "vllm.model_executor.models"


def position_limit(hf_config: Any) -> int | None:
    """The first position that a drafter cannot compute; None for any other model."""
    limit = (decisions_of(hf_config) or {}).get(_LIMIT)
    return limit if isinstance(limit, int) and limit > 0 else None


def stop_drafts(scheduler: Any) -> None:
    """Take from each running request its drafts if the drafter may not have had room for them.

    To be called before ``Scheduler.schedule``, which verifies what stands in ``spec_token_ids``:
    the drafts themselves, or with async scheduling a placeholder for each. There the tokens in
    flight count as accepted, so such a request may stop up to one step early.
    """
    config = getattr(scheduler, "vllm_config", None)
    speculative = getattr(config, "speculative_config", None)
    draft_model_config = getattr(speculative, "draft_model_config", None)
    limit = position_limit(getattr(draft_model_config, "hf_config", None))
    if limit is None:
        return
    longest = limit - scheduler.num_spec_tokens
    for request in scheduler.running:
        if (
            request.spec_token_ids
            and request.num_tokens + request.num_output_placeholders > longest
        ):
            # A new list: async scheduling shares one between requests.
            request.spec_token_ids = []


def _resolve(cls: type, architecture: str, model_config: Any) -> type:
    limit = position_limit(getattr(model_config, "hf_config", None))
    if limit is None:
        return cls
    from vllm_kimi_eagle3.models.short_drafter import clamped

    return clamped(cls, limit)


def _open_in(sources: Sources) -> bool:
    module = sources.module(_SCHEDULER)
    return module is not None and "spec_token_ids" in module[0]


def _install_late() -> Undo:
    from vllm.v1.core.sched.scheduler import Scheduler

    stock = vars(Scheduler)["schedule"]

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        stop_drafts(self)
        return stock(self, *args, **kwargs)

    return wrap_method(Scheduler, "schedule", schedule, _ID)


def _in_place() -> bool:
    from vllm.v1.core.sched.scheduler import Scheduler

    return wrapped_by(_ID, Scheduler.schedule)


def _install() -> Undo:
    return all_of([hooks.on_resolve(_ID, _resolve), hooks.when_met(_ID, _install_late)])


def _verify() -> bool:
    return hooks.resolve_step_in_place(_ID) and hooks.late_in_place(_ID, _in_place)


PATCH = Patch(
    id=_ID,
    gap="vLLM drafts for a request of any length up to the draft model's max_model_len; where the "
    "drafter's table of cos and sin ends before, its positions beyond are a device assert.",
    target=_TARGET,
    since="0.15.1",
    before=None,
    does="at that position a request stops drafting, alone: its drafts are not scheduled, and the "
    "drafter is given no position beyond.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/58080",
        "https://github.com/vllm-project/vllm/issues/48894",
    ),
    goes="when vLLM decides per request whether to draft",
    symbols=(
        hooks.RESOLVE_SYMBOL,
        Symbol(_TARGET),
        # What `schedule` takes for a request's length and drafts, at its start.
        Symbol(f"{_REQUEST}.num_tokens", "body"),
        Symbol(f"{_REQUEST}.num_tokens_with_spec", "body"),
        Symbol("vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule"),
        Symbol(f"{_MODELS}.llama_eagle3:Eagle3LlamaForCausalLM.forward"),
        Symbol(
            f"{_MODELS}.deepseek_eagle3:Eagle3DeepseekV2ForCausalLM.forward",
            since="0.18",
        ),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
