# SPDX-License-Identifier: Apache-2.0
"""What the user can switch from the environment: strictness and patches to leave out.

Environment variables and not vLLM flags, because ``register()`` runs before any flag is parsed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

STRICT = "VLLM_KIMI_EAGLE3_STRICT"
DISABLE = "VLLM_KIMI_EAGLE3_DISABLE"
ENVIRONMENT_VARIABLES = (STRICT, DISABLE)

_ON = frozenset({"1", "true", "yes", "on", "all"})
_OFF = frozenset({"", "0", "false", "no", "off", "none"})


@dataclass(frozen=True)
class Settings:
    """The plugin's settings in this process.

    Attributes:
        strict: raise where the plugin would otherwise log and stand down.
        disable_all: the plugin does nothing.
        disabled: patch ids to leave out; empty with ``disable_all``.
    """

    strict: bool = False
    disable_all: bool = False
    disabled: frozenset[str] = frozenset()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the two switches from ``environ`` (default: ``os.environ``). Never raises.

        ``VLLM_KIMI_EAGLE3_DISABLE`` is a switch (``1``) or a comma-separated list of patch ids.
        """
        environ = os.environ if environ is None else environ
        disable = environ.get(DISABLE, "").strip()
        names: frozenset[str] = frozenset()
        if disable.lower() not in _OFF | _ON:
            names = frozenset(part.strip() for part in disable.split(",") if part.strip())
        return cls(
            strict=environ.get(STRICT, "").strip().lower() not in _OFF,
            disable_all=disable.lower() in _ON,
            disabled=names,
        )
