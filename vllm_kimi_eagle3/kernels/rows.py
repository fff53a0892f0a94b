# SPDX-License-Identifier: Apache-2.0
"""What the drafter's elementwise kernels share: RMSNorm of a row, rotary pairs, cache values.

All of these are bound by the latency of a few loads, not by bandwidth, at the 1 to 32 tokens of a
draft step: a program takes a whole row, in loads of 16 bytes, reads it once, and begins all loads
before it waits for a position, a token id or a slot that others depend on. Roundings are
those of vLLM's CUDA operations, so that a drafter's results do not depend on whose kernels serve.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .arch import arch_of

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP8 = torch.float8_e4m3fn
FP8_MAX = tl.constexpr(448.0)
_FP8_CAPABILITY = (8, 9)


def row_warps(columns: int) -> int:
    """Warps of a program that takes a whole row: 8 or 16 elements a thread from 1024 to 8192."""
    if columns <= 1024:
        return 4
    if columns <= 4096:
        return 8
    return 16 if columns <= 8192 else 32


def check(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: torch.dtype | tuple[torch.dtype, ...],
) -> None:
    """Raise ValueError unless the tensor is of the shape and a dtype, with last stride 1."""
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if tensor.shape != shape or tensor.dtype not in allowed or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} of {tensor.dtype} with last stride "
            f"{tensor.stride(-1)}; it must be {tuple(shape)} of "
            f"{' or '.join(map(str, allowed))} with last stride 1"
        )


def check_cache(
    name: str,
    cache: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    scale: torch.Tensor | None,
) -> None:
    """Raise ValueError unless ``cache`` is a paged cache that values of ``dtype`` can go into.

    Args:
        name: what to call it.
        cache: the cache; its first size, the number of blocks, is free.
        shape: its sizes without the first.
        dtype: of the values; the cache has the same, or is float8_e4m3fn.
        scale: of an fp8 cache, one float32, or None.
    """
    check(name, cache, (cache.shape[0], *shape), (dtype, FP8))
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(
            f"the scale of {name} is {tuple(scale.shape)} of {scale.dtype}; it must be one float32"
        )
    if cache.dtype == FP8:
        arch = arch_of(cache.device)
        if arch.capability < _FP8_CAPABILITY:
            raise ValueError(f"{arch.name} has no fp8 instructions; use a bfloat16 KV cache")


def usable_positions(rows: int, position_limit: int | None) -> int:
    """How many positions there are, in the table and below the limit; ValueError if none are."""
    if position_limit is None:
        return rows
    if position_limit < 1:
        raise ValueError(f"position_limit is {position_limit}; it must be at least 1")
    return min(rows, position_limit)


@triton.jit
def rms_normed(x, weight, eps, WIDTH: tl.constexpr):
    """RMSNorm of a row, in float32: ``x * rsqrt(mean(x^2) + eps)``, rounded, times the weight.

    ``x`` is 0 where masked. The rounding is to the weight's dtype, which is the model's, as in
    vLLM's ``rms_norm``.
    """
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    return (x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit
def cos_and_sin(cos_sin, position, limit, stride, pairs, HALF: tl.constexpr):
    """The cosines and sines of a position, which is clamped into the table."""
    row = cos_sin + tl.maximum(tl.minimum(position, limit - 1), 0).to(tl.int64) * stride
    cos = tl.load(row + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
    sin = tl.load(row + HALF + pairs, mask=pairs < HALF, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def pair_columns(pairs, HALF: tl.constexpr, NEOX: tl.constexpr):
    """Columns of a pair's two members: halves of the rotary part, or neighbours."""
    if NEOX:
        first = pairs
        second = pairs + HALF
    else:
        first = 2 * pairs
        second = 2 * pairs + 1
    return first, second


@triton.jit
def rotated(first, second, cos, sin, DTYPE: tl.constexpr):
    """Pairs turned by their angles; in float32, rounded once."""
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    return (a * cos - b * sin).to(DTYPE), (b * cos + a * sin).to(DTYPE)


@triton.jit
def cache_value(x, scale, DTYPE: tl.constexpr):
    """``x`` as a cache of a dtype holds it; fp8 is ``x / scale``, cut off at its largest."""
    if DTYPE.is_fp8():
        x = x.to(tl.float32)
        if scale is not None:
            x = tl.div_rn(x, tl.load(scale))
        x = tl.minimum(x, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, -FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(DTYPE)
