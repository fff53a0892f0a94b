# SPDX-License-Identifier: Apache-2.0
"""``register()``: what vLLM calls in every process, before it reads its own configuration.

vLLM catches an error while it imports a plugin but not one that the call raises: that would end
``vllm serve`` for every model on the machine. So this module imports the standard library only,
and ``register()`` lets nothing out unless the user asked for it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .patches import Status
    from .settings import Settings

ENTRY_POINT_GROUP = "vllm.general_plugins"
ENTRY_POINT = "kimi_eagle3"

_statuses: tuple[Status, ...] | None = None
_announced = False


def register() -> None:
    """Bring the vLLM in this process to where Kimi with EAGLE-3 starts and is right.

    Idempotent; initialises no CUDA. Logs and returns where something is not as expected.

    Raises:
        RuntimeError: only with ``VLLM_KIMI_EAGLE3_STRICT=1``, if a patch that this vLLM needs
            could not be applied.
    """
    from .log import get_logger
    from .settings import Settings

    logger = get_logger(__name__)
    settings = Settings.from_environment()
    try:
        _register(settings, logger)
    except Exception:
        if settings.strict:
            raise
        logger.exception("vllm-kimi-eagle3 could not be set up; its patches are taken back")
        _take_back(logger)


def _register(settings: Settings, logger: logging.Logger) -> None:
    global _statuses
    from . import patches
    from .host import find_host
    from .settings import STRICT

    _make_environment_known()
    host = find_host()
    if host is None:
        raise RuntimeError("vllm-kimi-eagle3: no vLLM is installed in this environment")
    for unknown in patches.unknown_patches(settings):
        logger.warning("vllm-kimi-eagle3: %s", unknown.text)
    first = _statuses is None
    _statuses = patches.apply(host, settings)
    problems = [
        patches.not_in_place(s.patch, f"{s.state.value}: {s.reason}").fact
        for s in _statuses
        if s.state in (patches.State.FAILED, patches.State.STOOD_DOWN) and not s.patch.convenience
    ]
    if problems and settings.strict:
        raise RuntimeError(
            f"vllm-kimi-eagle3 on {host.label}: {'; '.join(problems)} ({STRICT} is set); {_MORE}"
        )
    if problems and first:
        logger.warning(
            "vllm-kimi-eagle3 on %s: Kimi with EAGLE-3 may not start here, or not be right: %s; %s",
            host.label,
            "; ".join(problems),
            _MORE,
        )


_MORE = "`vllm-kimi-eagle3 status` says more [host-patch-not-in-place]"


def _take_back(logger: logging.Logger) -> None:
    try:
        from . import patches

        patches.revert()
    except Exception:
        logger.exception("vllm-kimi-eagle3: a patch could not be taken back")


def summary() -> str:
    """One line: version, host, and what the plugin did in this process."""
    from . import __version__
    from .host import find_host
    from .patches import State

    host = find_host()
    where = f"{host.label}, {host.runner()} runner" if host is not None else "no vLLM"
    applied = [s.patch.id for s in _statuses or () if s.state is State.APPLIED]
    did = f"applied {', '.join(applied)}" if applied else "nothing to do"
    return f"vllm-kimi-eagle3 {__version__} on {where}: {did}"


def announce() -> None:
    """Log :func:`summary` once per process, the first time a Kimi target is met.

    Not from ``register()``, which also runs in servers of other models: those get a line from this
    plugin only if a patch that this vLLM needs could not be applied.
    """
    global _announced
    if not _announced:
        _announced = True
        from .log import get_logger

        get_logger(__name__).info("%s", summary())


def why_not_loaded(environ: Mapping[str, str]) -> tuple[str, str]:
    """Why vLLM would not load the plugin in this environment, and the fix; both "" if it would."""
    from importlib import metadata

    names = {e.name for e in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if ENTRY_POINT not in names:
        return (
            f"the entry point {ENTRY_POINT!r} is not installed: the package is on the path but "
            "was not installed",
            "run pip install vllm-kimi-eagle3",
        )
    if "VLLM_PLUGINS" in environ:
        value = environ["VLLM_PLUGINS"]
        if ENTRY_POINT not in value.split(","):  # As vLLM does: a space belongs to the name.
            others = [name.strip() for name in value.split(",")]
            every = ",".join([*(n for n in others if n not in ("", ENTRY_POINT)), ENTRY_POINT])
            return (
                f"VLLM_PLUGINS={value!r} filters it out",
                f"unset VLLM_PLUGINS or set it to {every!r}",
            )
    return "", ""


def _make_environment_known() -> None:
    """Tell vLLM of the plugin's variables, those that are set: it warns of (or, with
    ``--fail-on-environ-validation``, refuses) names that it does not know.

    Not of the others, because every name that vLLM knows is part of every model's compile-cache
    key.
    """
    import os

    import vllm.envs

    from .settings import ENVIRONMENT_VARIABLES

    for name in ENVIRONMENT_VARIABLES:
        if name in os.environ:
            vllm.envs.environment_variables.setdefault(name, lambda name=name: os.getenv(name))
