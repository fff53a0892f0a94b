# SPDX-License-Identifier: Apache-2.0
"""The V1 runner launches each draft step from the host, piece by piece.

The loop itself is `drafting/loop.py`; here it takes the place of the proposer's ``propose``, and
its graphs are captured when the server's are.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo, all_of, set_attribute, wrap_method, wrapped_by

_ID = "draft-loop"
_EAGLE = "vllm.v1.spec_decode.eagle"
_BASE = "vllm.v1.spec_decode.llm_base_proposer"
_UTILS = "vllm.v1.spec_decode.utils"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_TARGET = f"{_EAGLE}:EagleProposer"
_PARALLEL = "vllm.distributed.parallel_state"


def _open_in(sources: Sources) -> bool:
    module = sources.module(_EAGLE)
    return module is not None and "class EagleProposer" in module[0]


def _install_late() -> Undo:
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_kimi_eagle3.drafting.loop import Signature, capture
    from vllm_kimi_eagle3.drafting.loop import propose as by_loop

    stock = EagleProposer.propose
    signature = Signature(stock)

    @functools.wraps(stock)
    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        return by_loop(self, stock, signature, args, kwargs)

    propose.__vllm_kimi_eagle3__ = _ID  # type: ignore[attr-defined]
    stock_capture = vars(GPUModelRunner)["capture_model"]

    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken = stock_capture(self, *args, **kwargs)
        ours = capture(self)
        return taken + ours if isinstance(taken, int) else taken

    return all_of(
        [
            # On the class itself: a proposer of another method inherits the same `propose`.
            set_attribute(EagleProposer, "propose", propose),
            wrap_method(GPUModelRunner, "capture_model", capture_model, _ID),
        ]
    )


def _in_place() -> bool:
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return wrapped_by(_ID, EagleProposer.propose) and wrapped_by(_ID, GPUModelRunner.capture_model)


def _install() -> Undo:
    return hooks.when_met(_ID, _install_late)


def _verify() -> bool:
    return hooks.late_in_place(_ID, _in_place)


def _of_proposer(name: str) -> tuple[Symbol, ...]:
    """A method of the proposers' base class, which has a module of its own from 0.20 on."""
    return (
        Symbol(f"{_EAGLE}:SpecDecodeBaseProposer.{name}", "body", before="0.20"),
        Symbol(f"{_BASE}:SpecDecodeBaseProposer.{name}", "body", since="0.20"),
    )


PATCH = Patch(
    id=_ID,
    gap="the V1 runner launches each draft step from the host in pieces and builds attention "
    "metadata for it again: a draft step takes several times what the GPU works for it.",
    target=_TARGET,
    since="0.15.1",
    before=None,
    does="runs a proposal, or its draft steps 2 to k after a first pass with a prompt in it, as "
    "one CUDA graph on the plugin's kernels, where nothing speaks against it; "
    '--additional-config \'{"kimi_eagle3": {"drafting": false}}\' leaves vLLM\'s own.',
    upstream=("https://github.com/vllm-project/vllm/issues/40610",),
    goes="with the V1 runner",
    symbols=(
        Symbol(_TARGET, "present"),
        # What the loop does in their place.
        *_of_proposer("propose"),
        *_of_proposer("set_inputs_first_pass"),
        Symbol(f"{_BASE}:SpecDecodeBaseProposer._greedy_sample", "body", since="0.20"),
        Symbol(f"{_BASE}:SpecDecodeBaseProposer._sample_draft_tokens", "body", since="0.22"),
        Symbol(
            f"{_BASE}:SpecDecodeBaseProposer._update_positions_dependent_metadata",
            "body",
            since="0.21",
        ),
        Symbol(f"{_UTILS}:eagle_step_slot_mapping_metadata_kernel", "body", since="0.18"),
        Symbol(f"{_RUNNER}.capture_model"),
        Symbol(f"{_RUNNER}.propose_draft_token_ids"),
        Symbol("vllm.v1.attention.backend:CommonAttentionMetadata", "present"),
        Symbol("vllm.v1.attention.backend:CommonAttentionMetadata.batch_size", "body"),
        Symbol(f"{_PARALLEL}:graph_capture"),
        Symbol(f"{_PARALLEL}:get_tp_group"),
        Symbol("vllm.platforms.interface:Platform.get_global_graph_pool"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    convenience=True,
)
