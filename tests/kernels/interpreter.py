# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter as these tests need it: numbers as the hardware has them.

Triton 3.6 to 3.9 interpret a kernel with NumPy, which has neither bfloat16 nor float8. They keep
such numbers as bit patterns, and then `tl.dot` multiplies the patterns as integers, a conversion to
bfloat16 cuts bits off where the hardware rounds to nearest even, and float8_e4m3's NaN becomes 480.
`exact_numbers` puts these three right by torch's conversions. What stays different: products of
bfloat16 and float16 are summed in float32 by NumPy, in another order than a GPU's; arithmetic on
bfloat16 other than `tl.dot` is still on bit patterns, so a kernel must convert to float32 first
(`exact_numbers` makes it an error); programs run one after another, so no race shows; nothing is
said about registers, shared memory or speed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Kernels and Triton's own functions that are imported in here are interpreted ones.

    Triton decides it as a function is decorated, so the variable need not stay, and other tests'
    processes do not inherit it.
    """
    triton = sys.modules.get("triton")
    if triton is not None and not hasattr(triton.language.sum, "rewrite"):
        raise pytest.UsageError(
            "Triton was imported before tests/kernels, compiled and not interpreted: "
            "run these tests in a pytest of their own (nox -s kernels)"
        )
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def exact_numbers() -> None:
    """Put the interpreter's bfloat16 and float8 right, for the rest of the process."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    convert, dot, arithmetic = (
        interpreter._convert_float,
        builder.create_dot,
        builder.binary_op,
    )
    types = {
        tl.float32: (torch.float32, np.float32),
        tl.float16: (torch.float16, np.float16),
        tl.bfloat16: (torch.bfloat16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    }

    def convert_float(data: Any, source: Any, wanted: Any, rounding: Any) -> Any:
        nearest = rounding in (None, interpreter._ir.ROUNDING_MODE.RTNE)
        if source not in types or wanted not in types or not nearest:
            return convert(data, source, wanted, rounding)
        array = np.ascontiguousarray(data)
        numbers = torch.from_numpy(array.view(np.uint8).reshape(-1)).view(types[source][0])
        bits = numbers.to(types[wanted][0]).view(torch.uint8).numpy()
        return bits.view(f"u{wanted.primitive_bitwidth // 8}").reshape(array.shape)

    def widened(handle: Any) -> Any:
        """bfloat16 and float8 as float32, which holds each of them exactly."""
        if handle.dtype.scalar not in (tl.bfloat16, tl.float8e4nv):
            return handle
        numbers = convert_float(handle.data, handle.dtype.scalar, tl.float32, None)
        return interpreter.TensorHandle(numbers.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar in (tl.bfloat16, tl.float8e4nv):
            raise NotImplementedError(f"the interpreter cannot compute in {lhs.dtype.scalar}")
        return arithmetic(self, lhs, rhs, op)

    interpreter._convert_float = convert_float
    builder.create_dot = create_dot
    builder.binary_op = binary_op


def patch_once() -> None:
    """Let the interpreter put its functions into `triton.language` once, and leave them there.

    It does so again for every call of one kernel function by another, which is most of its time.
    """
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()

    def patch_lang(fn: Any) -> Any:
        if fn not in done:
            done.add(fn)
            patch(fn)
        return interpreter._LangPatchScope()  # One with nothing to take back.

    interpreter._patch_lang = patch_lang
