# SPDX-License-Identifier: Apache-2.0
"""``draft_tensor_parallel_size: 1`` is accepted with EAGLE-3 and has no effect."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo, all_of, wrap_method, wrapped_by

_ID = "replicated-drafter"
DECISION = "replicated"
"""In the decisions: the drafter is whole on each rank."""
_COMPILE_KEY = "kimi_eagle3_replicated"
_QUANTIZED_HEAD = (
    '--speculative-config: "draft_lm_head_quantization" makes a quantised copy of the rank\'s part '
    'of the target\'s head, and "draft_tensor_parallel_size": 1 wants the head whole; leave one of '
    "them out [run-draft-tensor-parallel]"
)
_SPECULATIVE = "vllm.config.speculative:SpeculativeConfig"
_STATE = "vllm.distributed.parallel_state"
_LAYERS = "vllm.model_executor.layers"
# The proposer's base class, which moved in 0.20.
_V1_HOMES = ("vllm.v1.spec_decode.llm_base_proposer", "vllm.v1.spec_decode.eagle")
_V1_CLASS = "SpecDecodeBaseProposer"
# The V2 runner of earlier releases feeds EAGLE-3 no aux hidden states.
_V2 = "vllm.v1.worker.gpu.spec_decode.eagle"
_V2_SINCE = "0.17"


def _open_in(sources: Sources) -> bool:
    # No release up to 0.33 reads draft_parallel_config for method eagle3.
    return sources.node(f"{_SPECULATIVE}.create_draft_parallel_config") is not None


def _decide(vllm_config: Any, pair: Any) -> None:
    from vllm_kimi_eagle3.drafting.replicated import is_for

    if not is_for(vllm_config):
        return  # Where it was asked for and cannot be, limits.py says so.
    if getattr(vllm_config.speculative_config, "draft_lm_head_quantization", None) is not None:
        raise ValueError(_QUANTIZED_HEAD)
    pair.decisions[DECISION] = True
    pair.notes.append("whole on each rank")
    # Up to 0.25 the compile-cache key has nothing of the drafter, and all of it takes the server's.
    additional = vllm_config.additional_config
    if additional is None or isinstance(additional, dict):
        vllm_config.additional_config = {**(additional or {}), _COMPILE_KEY: True}


def _route(stock: type, architecture: str, model_config: Any) -> type:
    from vllm_kimi_eagle3.pair import decisions_of

    decisions = decisions_of(getattr(model_config, "hf_config", None))
    if decisions is None or not decisions.get(DECISION):
        return stock
    from vllm_kimi_eagle3.drafting.replicated import replicated

    made: type = replicated(stock)
    return made


def _complete(model: Any, vllm_config: Any) -> None:
    """Once a drafter is loaded and shares what it shares."""
    from vllm_kimi_eagle3.drafting.replicated import is_replicated, make_whole

    if not is_replicated(model):
        return
    from vllm.distributed.parallel_state import get_tp_group

    from vllm_kimi_eagle3.log import get_logger

    cost = make_whole(model, vllm_config)
    if get_tp_group().is_first_rank:
        get_logger(__name__).info("vllm-kimi-eagle3: replicated drafter: %s", cost)


def _install_v1() -> Undo:
    cls = _v1_class()
    stock = vars(cls)["load_model"]

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        _complete(self.model, self.vllm_config)
        return result

    return wrap_method(cls, "load_model", load_model, _ID)


def _install_v2(speculator: Any) -> Undo:
    stock = speculator.load_eagle_model

    def load_eagle_model(target_model: Any, vllm_config: Any) -> Any:
        model = stock(target_model, vllm_config)
        _complete(model, vllm_config)
        return model

    return wrap_method(speculator, "load_eagle_model", load_eagle_model, _ID)


def _v1_class() -> Any:
    from vllm.v1.spec_decode import eagle

    return next(c for c in eagle.EagleProposer.__mro__ if c.__name__ == _V1_CLASS)


def _v2_module() -> Any:
    """The module that calls ``load_eagle_model``; None where there is none."""
    try:
        from vllm.v1.worker.gpu.spec_decode.eagle import speculator
    except ImportError:
        return None
    return speculator if hasattr(speculator, "load_eagle_model") else None


def _install_late() -> Undo:
    undo = [_install_v1()]
    if (speculator := _v2_module()) is not None:
        undo.append(_install_v2(speculator))
    return all_of(undo)


def _install() -> Undo:
    return all_of(
        [
            hooks.on_pair(_ID, _decide),
            hooks.on_resolve(_ID, _route),
            hooks.when_met(_ID, _install_late),
        ]
    )


def _late_in_place() -> bool:
    speculator = _v2_module()
    return wrapped_by(_ID, _v1_class().load_model) and (
        speculator is None or wrapped_by(_ID, speculator.load_eagle_model)
    )


def _verify() -> bool:
    return (
        hooks.pair_step_in_place(_ID)
        and hooks.resolve_step_in_place(_ID)
        and hooks.late_in_place(_ID, _late_in_place)
    )


PATCH = Patch(
    id=_ID,
    gap="draft_tensor_parallel_size 1 in --speculative-config is accepted and has no effect: an "
    "EAGLE-3 drafter is split over the target's ranks, and each draft step has two all-reduces, "
    "one for its embedding and a gather of its logits.",
    target=f"{_STATE}:get_tp_group",
    since="0.15.1",
    before=None,
    does="where the key is 1 and there are more ranks, builds, loads and runs the drafter in a "
    "tensor-parallel group of each rank alone, with whole copies of what it shares with the "
    "target, and says what that takes; without the key, and with context parallelism, nothing.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/17499",
        "https://github.com/vllm-project/vllm/pull/31705",
    ),
    goes="when vLLM builds an EAGLE-3 drafter over draft_tensor_parallel_size ranks",
    symbols=(
        hooks.PAIR_SYMBOL,
        hooks.RESOLVE_SYMBOL,
        Symbol(f"{_SPECULATIVE}.create_draft_parallel_config"),
        Symbol(f"{_SPECULATIVE}._verify_and_get_draft_tp", "body"),
        Symbol(f"{_STATE}:get_tp_group", "body"),
        Symbol(f"{_STATE}:get_tensor_model_parallel_world_size", "body"),
        Symbol(f"{_STATE}:get_tensor_model_parallel_rank", "body"),
        Symbol(f"{_STATE}:GroupCoordinator.all_reduce", "body"),
        Symbol(f"{_STATE}:GroupCoordinator.all_gather", "body"),
        Symbol(f"{_STATE}:GroupCoordinator.gather", "body"),
        Symbol(f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding.__init__"),
        Symbol(f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead.__init__"),
        Symbol("vllm.v1.worker.utils:AttentionGroup.create_metadata_builders", "body"),
        Symbol("vllm.config.vllm:set_current_vllm_config"),
        Symbol(f"{_V1_HOMES[0]}:{_V1_CLASS}.load_model", since="0.20"),
        Symbol(f"{_V1_HOMES[1]}:{_V1_CLASS}.load_model", before="0.20"),
        Symbol(f"{_V2}.utils:load_eagle_model", since=_V2_SINCE),
        Symbol(f"{_V2}.speculator:EagleSpeculator", "present", since=_V2_SINCE),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    convenience=True,
)
