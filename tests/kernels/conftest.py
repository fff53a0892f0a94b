# SPDX-License-Identifier: Apache-2.0
"""Imports the kernels as interpreted ones, before any test module does; records their launches."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from typing import Any

import pytest
import torch

from vllm_kimi_eagle3 import kernels

from .interpreter import exact_numbers, interpreted, patch_once

if importlib.util.find_spec("triton") is None:
    raise pytest.UsageError("tests/kernels needs Triton: use nox -s kernels")
with interpreted():
    # Triton imports this at the first launch, and it too looks at the variable.
    importlib.import_module("triton.experimental.gluon")
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)
exact_numbers()
patch_once()
# One worker a core (pytest-xdist); the matrices are small.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter's own, in every loop, and of branches that `tl.where` then leaves out.
    for warning in (
        "Conversion of an array with ndim > 0:DeprecationWarning",
        "divide by zero encountered:RuntimeWarning",
        "invalid value encountered:RuntimeWarning",
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{warning}")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The launches of kernels, which do not run: name, grid and arguments, tensors by address."""
    from triton.runtime.interpreter import InterpretedFunction

    seen: list[Any] = []

    def record(value: Any) -> Any:
        return ("at", value.data_ptr(), value.dtype) if isinstance(value, torch.Tensor) else value

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(side > 0 for side in grid)
        named = {name: record(value) for name, value in kwargs.items()}
        seen.append((self.fn.__name__, grid, [record(value) for value in args], named))

    monkeypatch.setattr(InterpretedFunction, "run", launch)
    return seen
