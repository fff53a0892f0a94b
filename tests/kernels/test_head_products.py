# SPDX-License-Identifier: Apache-2.0
"""`head_products` in Triton's interpreter against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.kernels import arch as architectures
from vllm_kimi_eagle3.kernels import head_products as kernels
from vllm_kimi_eagle3.kernels.product_reference import head_products_reference

from .products import DTYPES, assert_close, normal_numbers, padded

BF16 = torch.bfloat16


def up_projections(
    heads: int, *, nope: int, rank: int, value: int, dtype: torch.dtype = BF16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """W_UK [heads, nope, rank] and W_UV [heads, rank, value] as views of one `kv_b_proj`.

    As vLLM's `process_weights_after_loading` makes them: the inner size of W_UV has stride 1.
    """
    whole = normal_numbers(heads * (nope + value), rank, seed=seed, dtype=dtype)
    by_head = whole.view(heads, nope + value, rank)
    return by_head[:, :nope], by_head[:, nope:].transpose(1, 2)


def offline_launches(arch: architectures.Arch) -> Iterator[tuple[str, Callable[[], object]]]:
    """What to compile for a GPU: both up-projections, a shard's and whole, few rows and more."""
    for heads in (8, 64):
        for tokens in (1, 17):
            for name in ("W_UK", "W_UV"):

                def launch(heads=heads, tokens=tokens, name=name) -> object:
                    before, kernels.arch_of = kernels.arch_of, lambda device: arch
                    by_head = torch.empty(heads, 256, 512, dtype=BF16)
                    uk, uv = by_head[:, :128], by_head[:, 128:].transpose(1, 2)
                    weight = uk if name == "W_UK" else uv
                    try:
                        return kernels.head_products(
                            torch.empty(tokens, heads, weight.shape[1], dtype=BF16), weight
                        )
                    finally:
                        kernels.arch_of = before

                yield f"head_products {name}, {heads} heads, {tokens} tokens", launch


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 3),
    size_k=st.sampled_from([1, 16, 100, 128, 256, 300]),
    columns=st.sampled_from([1, 16, 48, 64, 130]),
    dtype=st.sampled_from(DTYPES),
    transposed=st.booleans(),
    strided=st.booleans(),
)
def test_any_shape(
    tokens: int,
    heads: int,
    size_k: int,
    columns: int,
    dtype: torch.dtype,
    transposed: bool,
    strided: bool,
) -> None:
    x = normal_numbers(tokens, heads, size_k, seed=1, dtype=dtype)
    if strided:
        x = padded(x)
    weight = normal_numbers(heads, size_k, columns, seed=2, dtype=dtype)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full((tokens, heads, columns + 8), torch.nan, dtype=dtype)
    view = out[..., :columns]
    assert kernels.head_products(x, weight, out=view) is view
    assert out[..., columns:].isnan().all()
    assert_close(view, head_products_reference(x, weight))


def test_the_views_of_a_release() -> None:
    uk, uv = up_projections(4, nope=32, rank=128, value=32)
    q = normal_numbers(5, 4, 48, seed=3)[..., :32]  # q_nope is a view of q.
    latent = kernels.head_products(q, uk)
    assert_close(latent, head_products_reference(q, uk))
    assert_close(kernels.head_products(latent, uv), head_products_reference(latent, uv))


def test_no_tokens() -> None:
    assert kernels.head_products(torch.zeros(0, 2, 16), torch.zeros(2, 16, 8)).shape == (0, 2, 8)


@pytest.mark.parametrize(
    ("x", "weight", "out", "words"),
    [
        (torch.zeros(1, 2, 16), torch.zeros(3, 16, 8), None, r"x is \(1, 2, 16\)"),
        (torch.zeros(1, 2, 16), torch.zeros(2, 16, 8, dtype=BF16), None, "must agree"),
        (torch.zeros(1, 16, 2).mT, torch.zeros(2, 16, 8), None, "last stride 2"),
        (torch.zeros(1, 2, 16), torch.zeros(2, 16, 8), torch.zeros(1, 2, 9), "out is"),
    ],
)
def test_says_what_it_cannot_take(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        kernels.head_products(x, weight, out=out)
