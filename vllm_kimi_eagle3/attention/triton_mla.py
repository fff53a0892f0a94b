# SPDX-License-Identifier: Apache-2.0
"""What stands in vLLM's registry for TRITON_MLA: our back-end for a Kimi, vLLM's own for the rest.

The registry holds a path, and a process may serve any model, so the class is chosen when vLLM
resolves the path, which it does while it builds a layer and its configuration is the current one.
Nothing of vLLM is imported before.
"""

from __future__ import annotations

from typing import Any

STOCK = "vllm.v1.attention.backends.mla.triton_mla.TritonMLABackend"
CLASS = STOCK.rpartition(".")[2]


def __getattr__(name: str) -> Any:
    if name != CLASS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return _ours() or resolve_obj_by_qualname(STOCK)


def _ours() -> type | None:
    """Our back-end, or None if the model that is being built is not for it.

    Raises:
        ValueError: the plugin's settings in ``--additional-config`` are wrong.
    """
    from vllm_kimi_eagle3.log import get_logger
    from vllm_kimi_eagle3.settings import Settings

    try:
        from vllm.config.vllm import get_current_vllm_config_or_none

        from .plan import is_for

        vllm_config = get_current_vllm_config_or_none()
        try:
            wanted = is_for(vllm_config)
        except ValueError as error:
            # For the user, so it must get past the handler below; no other ValueError may.
            refused = error
        else:
            if not wanted:
                return None
            from .backend import MlaDecodeBackend

            return MlaDecodeBackend
    except Exception:
        # An error here would read as "TRITON_MLA cannot be used on this machine".
        if Settings.from_environment().strict:
            raise
        get_logger(__name__).exception(
            "vllm-kimi-eagle3: its attention back-end could not be loaded; vLLM's own TRITON_MLA "
            "serves"
        )
        return None
    raise refused
