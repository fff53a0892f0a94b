# SPDX-License-Identifier: Apache-2.0
"""Places of vLLM at which several patches act: each is wrapped once, whichever patches are in.

- *The pair is known*: ``VllmConfig.__post_init__``, once per server, in the process that reads the
  command line and before anything is loaded. Configs are pickled to the other processes, so what
  is decided here holds on every rank.
- *A model class is resolved*: ``_ModelRegistry.resolve_model_cls``, for the target and the drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vllm_kimi_eagle3.contract import Symbol

from .base import Undo, wrap_method, wrapped_by

PAIR_SYMBOL = Symbol("vllm.config.vllm:VllmConfig.__post_init__")
RESOLVE_SYMBOL = Symbol("vllm.model_executor.models.registry:_ModelRegistry.resolve_model_cls")

PairStep = Callable[[Any, Any], None]
"""Called with the ``VllmConfig`` and the :class:`~vllm_kimi_eagle3.pair.Pair`."""
ResolveStep = Callable[[type, str, Any], type]
"""Called with the class that was resolved, its architecture and the ``ModelConfig``; returns the
class to use."""

_Step = TypeVar("_Step")
_pair_steps: dict[str, PairStep] = {}
_ready_steps: dict[str, PairStep] = {}
_resolve_steps: dict[str, ResolveStep] = {}
_installed: dict[str, Undo] = {}
_late: dict[str, Callable[[], Undo]] = {}
_late_undo: dict[str, Undo] = {}
_late_failed: set[str] = set()

_PAIR, _RESOLVE = "pair", "resolve"
_COMPILE_KEY = "kimi_eagle3_drafter"


def on_pair(patch_id: str, step: PairStep) -> Undo:
    """Call ``step`` when a Kimi target and its EAGLE-3 drafter are known.

    Steps run in the order of :data:`~vllm_kimi_eagle3.patches.PATCHES`. One that raises ValueError
    refuses the pair, in the user's words.
    """
    return _add(_pair_steps, patch_id, step, _PAIR, _wrap_post_init)


def on_pair_ready(patch_id: str, step: PairStep) -> Undo:
    """Like :func:`on_pair`, once vLLM has completed its config: which runner serves, for one."""
    return _add(_ready_steps, patch_id, step, _PAIR, _wrap_post_init)


def on_resolve(patch_id: str, step: ResolveStep) -> Undo:
    """Call ``step`` when the class of a model is resolved."""
    from vllm.model_executor.models.registry import _ModelRegistry

    def install() -> Undo:
        stock = vars(_ModelRegistry)["resolve_model_cls"]

        def resolve_model_cls(self: Any, architectures: Any, model_config: Any) -> tuple[type, str]:
            cls, architecture = stock(self, architectures, model_config)
            for step in tuple(_resolve_steps.values()):
                cls = step(cls, architecture, model_config)
            return cls, architecture

        return wrap_method(_ModelRegistry, "resolve_model_cls", resolve_model_cls, _RESOLVE)

    return _add(_resolve_steps, patch_id, step, _RESOLVE, install)


def when_met(patch_id: str, install: Callable[[], Undo]) -> Undo:
    """Do ``install`` in the processes that run a Kimi pair, once that is known there.

    For what imports the scheduler or the runners, which not every process of every server does.
    """
    from vllm_kimi_eagle3 import pair

    _late[patch_id] = install
    pair.when_met(_install_late)

    def undo() -> None:
        _late.pop(patch_id, None)
        _late_failed.discard(patch_id)
        if patch_id in _late_undo:
            _late_undo.pop(patch_id)()

    return undo


def _install_late() -> None:
    for patch_id, install in tuple(_late.items()):
        if patch_id in _late_undo or patch_id in _late_failed:
            continue
        try:
            _late_undo[patch_id] = install()
        except Exception:
            from vllm_kimi_eagle3.log import get_logger

            _late_failed.add(patch_id)
            get_logger(__name__).exception("vllm-kimi-eagle3: %s could not be applied", patch_id)


def late_in_place(patch_id: str, check: Callable[[], bool]) -> bool:
    """True if the patch waits for a Kimi pair, or is in and ``check`` reads it back."""
    if patch_id in _late_failed or patch_id not in _late:
        return False
    return patch_id not in _late_undo or check()


def pair_step_in_place(patch_id: str) -> bool:
    """True if vLLM will run the step of this patch."""
    from vllm.config.vllm import VllmConfig

    known = patch_id in _pair_steps or patch_id in _ready_steps
    return known and wrapped_by(_PAIR, VllmConfig.__post_init__)


def resolve_step_in_place(patch_id: str) -> bool:
    """True if vLLM will run the step of this patch."""
    from vllm.model_executor.models.registry import ModelRegistry

    wrapper = type(ModelRegistry).resolve_model_cls
    return patch_id in _resolve_steps and wrapped_by(_RESOLVE, wrapper)


def _add(
    steps: dict[str, _Step], patch_id: str, step: _Step, place: str, install: Callable[[], Undo]
) -> Undo:
    if place not in _installed:
        _installed[place] = install()
    steps[patch_id] = step

    def undo() -> None:
        if steps.get(patch_id) is step:
            del steps[patch_id]
        unused = not _resolve_steps if place == _RESOLVE else not (_pair_steps or _ready_steps)
        if unused and place in _installed:
            _installed.pop(place)()

    return undo


def _wrap_post_init() -> Undo:
    from vllm.config.vllm import VllmConfig

    stock = vars(VllmConfig)["__post_init__"]

    def post_init(self: Any) -> None:
        pair = _guarded(_meet, self)
        stock(self)
        if pair is not None:
            _guarded(_finish, self, pair)

    return wrap_method(VllmConfig, "__post_init__", post_init, _PAIR)


def _meet(vllm_config: Any) -> Any:
    from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
    from vllm_kimi_eagle3.pair import met, of_drafter, pair_of

    pair = pair_of(vllm_config)
    if pair is None:
        return None
    before = dict(vars(pair.draft_config))
    try:
        for step in tuple(_pair_steps.values()):
            step(vllm_config, pair)
    except CheckpointError as error:
        raise ValueError(of_drafter(pair.model, error)) from None
    except ValueError:
        raise
    except Exception:
        # As vLLM had it, and not looked at again.
        vars(pair.draft_config).clear()
        vars(pair.draft_config).update(before)
        pair.decisions.clear()
        pair.keep()
        raise
    pair.keep()
    _add_to_compile_key(vllm_config, pair)
    met()
    return pair


def _add_to_compile_key(vllm_config: Any, pair: Any) -> None:
    """Make the compile-cache key differ between drafters: up to 0.25 it has nothing of them, though
    switches such as norm_output are constants in the compiled decoder."""
    additional = vllm_config.additional_config
    if additional is None or isinstance(additional, dict):
        vllm_config.additional_config = {**(additional or {}), _COMPILE_KEY: str(pair.drafter)}


def _finish(vllm_config: Any, pair: Any) -> None:
    from vllm_kimi_eagle3.log import get_logger

    for step in tuple(_ready_steps.values()):
        step(vllm_config, pair)
    get_logger(__name__).info("%s", pair)


def _guarded(act: Callable[..., Any], *args: Any) -> Any:
    """``act(*args)``; a refusal is passed on, a fault of ours is logged and stops no server."""
    from vllm_kimi_eagle3.log import get_logger
    from vllm_kimi_eagle3.settings import Settings

    try:
        return act(*args)
    except ValueError:
        raise
    except Exception:
        if Settings.from_environment().strict:
            raise
        get_logger(__name__).exception(
            "vllm-kimi-eagle3 could not look at this drafter; it runs as vLLM has it, unchecked"
        )
        return None
