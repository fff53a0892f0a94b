# SPDX-License-Identifier: Apache-2.0
"""Loggers whose lines reach vLLM's output.

vLLM gives a handler to the logger ``vllm`` alone and stops propagation there, so a logger called
``vllm_kimi_eagle3`` would be silent below WARNING. Ours are children of ``vllm``.
"""

from __future__ import annotations

import logging

ROOT = "vllm.kimi_eagle3"


def get_logger(name: str) -> logging.Logger:
    """The logger for the module ``name`` (pass ``__name__``), a child of vLLM's own logger."""
    suffix = name.partition(".")[2]
    return logging.getLogger(f"{ROOT}.{suffix}" if suffix else ROOT)
