# SPDX-License-Identifier: Apache-2.0
"""Each rank decides on its own, by comparing gigabytes, whose embedding and head a drafter uses."""

from __future__ import annotations

from typing import Any

from vllm_kimi_eagle3.contract import Sources, Symbol

from . import hooks
from .base import Patch, Undo, all_of, wrap_method, wrapped_by

_ID = "head-sharing"
_SHARE = ("_maybe_share_embeddings", "_maybe_share_lm_head")
_FLAGS = {
    "_maybe_share_embeddings": "has_own_embed_tokens",
    "_maybe_share_lm_head": "has_own_lm_head",
}
_PARTS = {"has_own_embed_tokens": "embedding", "has_own_lm_head": "head"}
# The proposer's base class, which moved in 0.20.
_V1_HOMES = ("vllm.v1.spec_decode.llm_base_proposer", "vllm.v1.spec_decode.eagle")
_V1_CLASS = "SpecDecodeBaseProposer"
_V2 = "vllm.v1.worker.gpu.spec_decode.eagle.utils"
_V2_TARGET = f"{_V2}:_should_share"


def _open_in(sources: Sources) -> bool:
    return any(sources.node(f"{home}:{_V1_CLASS}.{_SHARE[0]}") is not None for home in _V1_HOMES)


def _decide(vllm_config: Any, pair: Any) -> None:
    """Whose embedding and head, once for all ranks: the target's where the checkpoint has none of
    its own or has the target's over again, byte for byte."""
    if pair.tensors is None:
        return
    from vllm_kimi_eagle3.checkpoint.sharing import owners

    pair.decisions.update(owners(pair.tensors, pair.target_folder))
    said = {"own": "its own", "target": "the target's"}
    pair.notes.append(
        f"embedding {said[pair.decisions['embedding']]}, head {said[pair.decisions['head']]}"
    )


def _decision(model: Any, flag: str) -> str | None:
    """``own`` or ``target`` for a Kimi drafter, and None for any other model."""
    from vllm_kimi_eagle3.pair import decisions_of

    decisions = decisions_of(getattr(model, "config", None))
    if decisions is None:
        return None
    decided = decisions.get(_PARTS[flag])
    if decided is None:  # The weights were not here: what was loaded is the drafter's own.
        decided = "own" if getattr(model, flag, False) else "target"
    return str(decided)


class _NothingToShare:
    """A target's language model whose embedding and head have no tensor to compare with; whatever
    else the proposer asks of it is the language model's."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        if name in ("lm_head", "embed_tokens"):
            return _NoTensor
        value = getattr(self._original, name)
        return _NothingToShare(value) if name == "model" else value


class _NoTensor:
    weight = None


def _install_v1(cls: type, name: str) -> Undo:
    stock, flag = vars(cls)[name], _FLAGS[name]

    def share(self: Any, target_language_model: Any) -> None:
        decided = _decision(self.model, flag) if hasattr(self.model, flag) else None
        if decided == "own":
            target_language_model = _NothingToShare(target_language_model)
        elif decided == "target":
            setattr(self.model, flag, False)
        stock(self, target_language_model)

    return wrap_method(cls, name, share, _ID)


def _install_v2() -> Undo:
    from vllm.v1.worker.gpu.spec_decode.eagle import utils

    stock = utils._should_share

    def should_share(eagle: Any, flag: str, *args: Any, **kwargs: Any) -> bool:
        decided = _decision(eagle, flag) if flag in _PARTS else None
        return bool(stock(eagle, flag, *args, **kwargs)) if decided is None else decided == "target"

    return wrap_method(utils, "_should_share", should_share, _ID)


def _v1_class() -> Any:
    from vllm.v1.spec_decode import eagle

    return next(c for c in eagle.EagleProposer.__mro__ if c.__name__ == _V1_CLASS)


def _has_v2() -> bool:
    try:
        from vllm.v1.worker.gpu.spec_decode.eagle import utils
    except ImportError:
        return False
    return hasattr(utils, "_should_share")


def _install_both() -> Undo:
    undo = [_install_v1(_v1_class(), name) for name in _SHARE]
    if _has_v2():
        undo.append(_install_v2())
    return all_of(undo)


def _install() -> Undo:
    return all_of([hooks.on_pair(_ID, _decide), hooks.when_met(_ID, _install_both)])


def _both_in_place() -> bool:
    in_place = [wrapped_by(_ID, getattr(_v1_class(), name)) for name in _SHARE]
    if _has_v2():
        from vllm.v1.worker.gpu.spec_decode.eagle import utils

        in_place.append(wrapped_by(_ID, utils._should_share))
    return all(in_place)


def _verify() -> bool:
    return hooks.pair_step_in_place(_ID) and hooks.late_in_place(_ID, _both_in_place)


PATCH = Patch(
    id=_ID,
    gap="each rank compares its own shard of the drafter's embedding and head with the target's, "
    "2.35 GB copied to the CPU on V1, and may decide otherwise than the next rank.",
    target=f"{_V1_HOMES[0]}:{_V1_CLASS}.{_SHARE[1]}",
    since="0.16.0",
    before=None,
    does="decides once, from the checkpoints, before the load: the target's where the drafter has "
    "none or the same bytes, else its own; every rank follows.",
    upstream=(
        "https://github.com/vllm-project/vllm/issues/50158",
        "https://github.com/vllm-project/vllm/issues/50159",
        "https://github.com/vllm-project/vllm/pull/50280",
        "https://github.com/vllm-project/vllm/pull/28549",
    ),
    goes="when vLLM decides it once for all ranks",
    symbols=(
        hooks.PAIR_SYMBOL,
        *(Symbol(f"{_V1_HOMES[0]}:{_V1_CLASS}.{name}", since="0.20") for name in _SHARE),
        *(Symbol(f"{_V1_HOMES[1]}:{_V1_CLASS}.{name}", before="0.20") for name in _SHARE),
        Symbol(_V2_TARGET, since="0.22"),
        Symbol("vllm.model_executor.models.utils:process_eagle_weight", "body"),
    ),
    open_in=_open_in,
    install=_install,
    verify=_verify,
)
