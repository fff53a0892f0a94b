# SPDX-License-Identifier: Apache-2.0
"""What the tests of the drafter's products share."""

from __future__ import annotations

import torch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Relative to the largest magnitude of a result: a result is rounded once.
ALLOWED = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-18}


def whole_numbers(
    *shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, most: int = 2
) -> torch.Tensor:
    """Numbers from -most to most: sums of few products of them are exact, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def normal_numbers(
    *shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0
) -> torch.Tensor:
    """Normally distributed numbers."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


def padded(tensor: torch.Tensor, by: int = 16) -> torch.Tensor:
    """The same numbers with wider rows, whose rest holds NaN."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + by), torch.nan, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def assert_close(got: torch.Tensor, exact: torch.Tensor) -> None:
    """`got` is `exact`, rounded to its dtype, but for the order of float32 sums."""
    scale = float(exact.abs().max())
    error = float((got.double() - exact).abs().max())
    assert error <= ALLOWED[got.dtype] * scale, (error, scale)
