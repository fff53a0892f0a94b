# SPDX-License-Identifier: Apache-2.0
"""A drafter that is not there, or not an EAGLE-3 drafter, gives an error that does not say so."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.checkpoint.folder import drafter_problem
from vllm_kimi_eagle3.checkpoint.target import is_kimi_target
from vllm_kimi_eagle3.contract import Sources, Symbol

from .base import Patch, Undo, wrap_method, wrapped_by

_TARGET = "vllm.config.speculative:SpeculativeConfig.__post_init__"


def _open_in(sources: Sources) -> bool:
    return sources.node(_TARGET) is not None


def _check(config: Any) -> None:
    model, method = config.model, config.method
    if not isinstance(model, str) or not (
        method == "eagle3" or (method is None and "eagle3" in model.lower())
    ):
        return
    if not is_kimi_target(getattr(config.target_model_config, "hf_config", None)):
        return
    from vllm_kimi_eagle3.plugin import announce

    announce()
    if (problem := drafter_problem(model)) is not None:
        raise ValueError(f'--speculative-config, "model": {problem.finding.text}')


def _install() -> Undo:
    from vllm.config.speculative import SpeculativeConfig

    stock = SpeculativeConfig.__post_init__

    def checked_post_init(self: Any) -> None:
        _check(self)
        stock(self)

    return wrap_method(SpeculativeConfig, "__post_init__", checked_post_init, "drafter-folder")


def _verify() -> bool:
    from vllm.config.speculative import SpeculativeConfig

    return wrapped_by("drafter-folder", SpeculativeConfig.__post_init__)


PATCH = Patch(
    id="drafter-folder",
    gap="a drafter folder that is missing, is empty or holds something else is reported as an "
    "invalid repository id of nobody in particular, or only when the weights are loaded.",
    target=_TARGET,
    since="0.15.1",
    before=None,
    does="says in one line what is wrong with the folder named in --speculative-config, for a "
    "Kimi target only.",
    upstream=("https://github.com/vllm-project/vllm/issues/31254",),
    goes="when vLLM names the drafter in that error",
    symbols=(Symbol(_TARGET),),
    open_in=_open_in,
    install=_install,
    verify=_verify,
    convenience=True,
)
