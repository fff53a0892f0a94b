# SPDX-License-Identifier: Apache-2.0
"""`skinny_gemm` in Triton's interpreter against the float64 reference.

What the kernel writes, and what it must not read, holds NaN. That the programs of a block arrive in
any order is left to tests/gpu: the interpreter runs them one after another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_kimi_eagle3.kernels import arch as architectures
from vllm_kimi_eagle3.kernels import skinny_gemm as kernels
from vllm_kimi_eagle3.kernels.product_reference import skinny_gemm_reference

from .products import DTYPES, assert_close, normal_numbers, padded, whole_numbers

GPU = architectures.arch_of(torch.device("cpu"))
MARK = 1e30
CONFIGS = sorted(
    {c for capability in architectures.CAPABILITIES for c in kernels.product_configs(capability)},
    key=str,
)
BF16 = torch.bfloat16


def offline_launches(arch: architectures.Arch) -> Iterator[tuple[str, Callable[[], object]]]:
    """What to compile for a GPU: every configuration, whole and cut, tiles that are even or not."""
    for config in kernels.product_configs(arch.capability):
        for dtype in (BF16, torch.float16):
            for size_k, splits in ((7168, 1), (7168, 4), (7200, 4)):
                if dtype is torch.float16 and splits == 1:
                    continue

                def launch(config=config, dtype=dtype, size_k=size_k, splits=splits) -> object:
                    before, kernels.arch_of = kernels.arch_of, lambda device: arch
                    try:
                        return kernels.skinny_gemm(
                            torch.empty(config.block_t, size_k, dtype=dtype),
                            torch.empty(4096, size_k, dtype=dtype),
                            workspace=torch.empty(
                                kernels.HEADER + 4096 * splits * config.block_t
                            ),
                            config=config,
                            splits=splits,
                        )  # fmt: skip
                    finally:
                        kernels.arch_of = before

                yield f"skinny_gemm {dtype} {config} K {size_k} in {splits}", launch


def marked_workspace(rows: int = 64) -> torch.Tensor:
    """A workspace whose parts hold NaN, with a mark behind it."""
    whole = torch.full((kernels.workspace_numel(GPU, rows=rows) + 64,), torch.nan)
    whole[-64:] = MARK
    whole[: kernels.HEADER] = 0
    return whole[:-64]


def check_workspace(workspace: torch.Tensor) -> None:
    """Its counters are zero again, and nothing behind it was written."""
    assert not workspace[: kernels.HEADER].view(torch.int32).any()
    behind = torch.as_strided(workspace, (64,), (1,), workspace.numel())
    assert (behind == MARK).all()


def run(x: torch.Tensor, weight: torch.Tensor, **more: object) -> torch.Tensor:
    """The result, over a poisoned output."""
    out = torch.full((x.shape[0], weight.shape[0] + 8), torch.nan, dtype=x.dtype)
    view = out[:, : weight.shape[0]]
    assert kernels.skinny_gemm(x, weight, out=view, **more) is view
    assert out[:, weight.shape[0] :].isnan().all(), "wrote past its columns"
    return view


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.integers(1, 64),
    columns=st.integers(1, 200),
    size_k=st.one_of(st.integers(1, 700), st.sampled_from([128, 256, 512, 1024])),
    dtype=st.sampled_from(DTYPES),
    split=st.booleans(),
    strided=st.booleans(),
)
def test_any_shape(
    rows: int, columns: int, size_k: int, dtype: torch.dtype, split: bool, strided: bool
) -> None:
    x, weight = (normal_numbers(n, size_k, seed=n, dtype=dtype) for n in (rows, columns))
    if strided:
        x, weight = padded(x), padded(weight, 3)
    workspace = marked_workspace() if split else None
    assert_close(run(x, weight, workspace=workspace), skinny_gemm_reference(x, weight))
    if workspace is not None:
        check_workspace(workspace)


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_config(config: object, splits: int) -> None:
    rows = config.block_t - 1  # type: ignore[attr-defined]
    x, weight = normal_numbers(rows, 1056, seed=1), normal_numbers(70, 1056, seed=2)
    workspace = torch.cat([torch.zeros(kernels.HEADER), torch.full((2_000_000,), torch.nan)])
    out = run(x, weight, workspace=workspace, config=config, splits=splits)
    assert_close(out, skinny_gemm_reference(x, weight))
    assert not workspace[: kernels.HEADER].view(torch.int32).any()


def test_one_workspace_serves_products_one_after_another() -> None:
    workspace = marked_workspace()
    for columns, size_k in ((20, 1024), (300, 512), (20, 2048), (20, 1024)):
        x, weight = normal_numbers(3, size_k, seed=1), normal_numbers(columns, size_k, seed=2)
        assert_close(run(x, weight, workspace=workspace), skinny_gemm_reference(x, weight))
        check_workspace(workspace)


def test_whole_numbers_are_exact_however_it_is_cut() -> None:
    x, weight = whole_numbers(5, 1024, seed=1), whole_numbers(40, 1024, seed=2)
    exact = skinny_gemm_reference(x, weight).to(BF16)
    for splits in (1, 2, 5, 8):
        out = run(x, weight, workspace=marked_workspace(), splits=splits)
        assert torch.equal(out, exact)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, weight = normal_numbers(4, 512, seed=1), normal_numbers(32, 512, seed=2)
    x[2, 7] = torch.nan
    out = run(x, weight, workspace=marked_workspace())
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


def test_a_plan_covers_every_tile() -> None:
    """For the drafter's real products, on every GPU: all tiles once, and parts that fit."""
    products = [
        (1280, 14336), (7168, 1024), (4608, 7168), (7168, 2304), (4000, 7168), (20480, 7168),
        (10240, 14336), (7168, 8192), (36864, 7168), (7168, 18432), (32000, 7168),
        (163840, 7168), (2112, 14336), (1536, 1536), (1, 16),
    ]  # fmt: skip
    for capability in architectures.CAPABILITIES:
        gpu = architectures.arch(capability)
        for rows in (1, 16, 17, 32, 33, 64):
            space = kernels.workspace_numel(gpu, rows=rows) - kernels.HEADER
            for columns, size_k in products:
                config, splits, span = kernels.product_plan(
                    gpu, rows=rows, columns=columns, size_k=size_k, split=True
                )
                tiles = -(-size_k // config.block_k)
                assert rows <= config.block_t
                assert (splits - 1) * span < tiles <= splits * span
                blocks = -(-columns // config.block_n)
                if splits > 1:
                    assert blocks * splits * rows * config.block_n <= space
                    assert blocks <= kernels.COUNTERS


def test_allocates_nothing_with_out_and_workspace() -> None:
    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            assert not str(func).startswith(("aten.empty", "aten.zeros", "aten.new")), func
            return func(*args, **(kwargs or {}))

    x, weight = normal_numbers(2, 512, seed=1), normal_numbers(32, 512, seed=2)
    out, workspace = torch.empty(2, 32, dtype=BF16), marked_workspace()
    # The interpreter itself copies tensors, so its launch is left out.
    launched, kernel = [], kernels._skinny_gemm

    class Launch:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **kwargs: launched.append(grid)

    kernels._skinny_gemm = Launch()
    try:
        with Allocations():
            kernels.skinny_gemm(x, weight, out=out, workspace=workspace)
    finally:
        kernels._skinny_gemm = kernel
    assert launched


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(65, 32, dtype=BF16)}, "65 rows"),
        ({"x": torch.zeros(2, 16, dtype=BF16)}, r"x is \(2, 16\)"),
        ({"x": torch.zeros(2, 32)}, "must agree"),
        ({"weight": torch.zeros(32, 8, dtype=BF16).T}, "last stride 8"),
        ({"out": torch.zeros(2, 9, dtype=BF16)}, r"out is \(2, 9\)"),
        ({"out": torch.zeros(2, 8)}, "out is .* of torch.float32"),
        ({"workspace": torch.zeros(8)}, "workspace has 8 elements"),
    ],
)
def test_says_what_it_cannot_take(change: dict[str, torch.Tensor], words: str) -> None:
    given_: dict[str, torch.Tensor] = {
        "x": torch.zeros(2, 32, dtype=BF16), "weight": torch.zeros(8, 32, dtype=BF16), **change
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        kernels.skinny_gemm(given_.pop("x"), given_.pop("weight"), **given_)


def test_configurations_are_sorted_widest_first() -> None:
    for table in kernels._TABLE.values():
        for block_t, configs in table.items():
            widths = [config.block_n for config in configs]
            assert widths == sorted(widths, reverse=True)
            assert all(config.block_t == block_t for config in configs)
            assert dataclasses.astuple(configs[0])
