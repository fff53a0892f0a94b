# SPDX-License-Identifier: Apache-2.0
"""The V2 runner feeds aux hidden states to a drafter that was trained without any."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo, wrap_method, wrapped_by

_ID = "v2-without-aux"
_TARGET = "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__"
_UTILS = "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils"


def _open_in(sources: Sources) -> bool:
    module = sources.module(_UTILS)
    return module is not None and "use_aux_hidden_state" not in module[0]


def _install_late() -> Undo:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    stock = GPUModelRunner.__init__

    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, vllm_config, *args, **kwargs)
        if _reads_final_hidden_state(vllm_config):
            self.use_aux_hidden_state_outputs = False

    return wrap_method(GPUModelRunner, "__init__", init, _ID)


def _reads_final_hidden_state(vllm_config: Any) -> bool:
    from vllm_kimi_eagle3.pair import decisions_of

    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    decisions = decisions_of(getattr(draft, "hf_config", None))
    return decisions is not None and decisions.get("expected", {}).get("aux_count") == 0


def _in_place() -> bool:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return wrapped_by(_ID, GPUModelRunner.__init__)


def _install() -> Undo:
    return hooks.when_met(_ID, _install_late)


def _verify() -> bool:
    return hooks.late_in_place(_ID, _in_place)


PATCH = Patch(
    id=_ID,
    gap="the V2 runner does not read use_aux_hidden_state: false: a drafter that was trained on "
    "the target's final hidden state is fed aux hidden states.",
    target=_TARGET,
    since="0.17.1",
    before="0.33",
    does="hands such a drafter the final hidden state, as the V1 runner does.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/40551",
        "https://github.com/vllm-project/vllm/pull/40656",
    ),
    goes="with support for vLLM 0.32",
    symbols=(
        Symbol(_TARGET),
        Symbol(f"{_UTILS}:set_eagle3_aux_hidden_state_layers"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    needs=("eagle31-drafter",),
)
