# SPDX-License-Identifier: Apache-2.0
"""The kernel on a GPU, against the float64 reference and against vLLM 0.33.0's own op.

    STOCK_MLA=.../triton_decode_attention.py python -m pytest tests/gpu/test_mla_decode.py

Not part of CI, which has no GPU. The file is `vllm/v1/attention/ops/triton_decode_attention.py` of
the 0.33.0 wheel (see benchmarks/stock_mla.py); without it the comparison is skipped. Everything
that the kernel writes, and every cache slot that it must not read, holds NaN.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.cases import Case, R, make_case
from vllm_kimi_eagle3.kernels.arch import arch_of
from vllm_kimi_eagle3.kernels.mla_decode import mla_decode, workspace_numel
from vllm_kimi_eagle3.kernels.reference import mla_decode_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
ALLOWED = {BF16: 2e-2, FP16: 4e-3}
STOCK = os.environ.get("STOCK_MLA")
LONGEST = 262144


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def buffers(case: Case, max_batch: int | None = None) -> dict[str, Tensor]:
    """Poisoned out, lse and workspace."""
    q = case.tensors[0]
    rows, heads, _ = q.shape
    numel = workspace_numel(
        max_batch=max_batch or len(case.tensors[3]),
        query_len=case.keywords["query_len"],
        heads=heads,
        kv_lora_rank=R,
        arch=arch_of(q.device),
    )
    return {
        "out": torch.full((rows, heads, R), torch.nan, dtype=q.dtype, device=q.device),
        "lse": torch.full((rows, heads), torch.nan, device=q.device),
        "workspace": torch.full((numel,), torch.nan, device=q.device),
    }


def run(case: Case) -> tuple[Tensor, Tensor]:
    """The kernel's results over poisoned buffers of their own."""
    result: tuple[Tensor, Tensor] = mla_decode(*case.tensors, **case.keywords, **buffers(case))
    return result


def assert_close(out: Tensor, lse: Tensor, case: Case) -> float:
    """Within the allowed error of the reference; the largest error of the output."""
    exact, exact_lse = mla_decode_reference(*case.tensors, **case.keywords)
    nothing = exact_lse.isneginf()
    assert torch.equal(lse.isneginf(), nothing)
    assert not out[nothing].any()
    error = float((out.double() - exact).abs().max())
    assert error <= ALLOWED[out.dtype], error
    if not nothing.all():
        assert (lse.double() - exact_lse)[~nothing].abs().max() <= 1e-3
    return error


def random_case(seed: int, longest: int = 3000, **fixed: Any) -> Case:
    """A shape out of everything that the kernel takes."""
    chosen = random.Random(seed)
    q_dtype = chosen.choice([BF16, BF16, FP16])
    shape: dict[str, Any] = {
        "heads": chosen.choice([4, 8, 8, 16, 32, 64, 128, chosen.randint(4, 128)]),
        "query_len": chosen.randint(1, 9),
        "page": chosen.choice([16, 32, 48, 64, 64, 128, 256]),
        "q_dtype": q_dtype,
        "kv_dtype": chosen.choice([q_dtype, FP8]),
        "causal": chosen.random() < 0.8,
        "strided": chosen.random() < 0.5,
        "shared_prefix": chosen.random() < 0.3,
        "spread": chosen.choice([1.0, 6.0]),
        **fixed,
    }
    batch = chosen.choice([1, 2, 3, 5, 8, 17, 33])
    few = [0, 1, shape["query_len"], shape["page"], shape["page"] + 1]
    lengths = [
        chosen.choice([*few, *(chosen.randint(0, longest) for _ in few)]) for _ in range(batch)
    ]
    return make_case(generator(seed), lengths, **shape)


@pytest.mark.parametrize("seed", range(60))
def test_random_shapes(seed: int) -> None:
    case = random_case(seed)
    assert_close(*run(case), case)


@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("heads", "query_len"), [(8, 4), (8, 1), (64, 4), (128, 2)])
def test_ragged_to_the_longest(heads: int, query_len: int, kv_dtype: torch.dtype) -> None:
    lengths = [LONGEST, 0, 1, 30000, 77, 131072, LONGEST - 1]
    case = make_case(
        generator(1), lengths, heads=heads, query_len=query_len, kv_dtype=kv_dtype,
        table_width=LONGEST // 64,
    )  # fmt: skip
    assert_close(*run(case), case)


@pytest.mark.parametrize("seed", range(8))
def test_same_bits_every_time(seed: int) -> None:
    """A race between blocks would move the result from run to run."""
    case = random_case(seed + 100, longest=20000)
    given = buffers(case)
    first = None
    for _ in range(50):
        for poisoned in given.values():
            poisoned.fill_(torch.nan)
        out, lse = mla_decode(*case.tensors, **case.keywords, **given)
        if first is None:
            first = out.clone(), lse.clone()
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])
    assert_close(*first, case)  # type: ignore[misc]


@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("query_len", [1, 4])
def test_a_captured_graph_is_right_with_other_lengths(
    query_len: int, kv_dtype: torch.dtype
) -> None:
    """As in vLLM: captured over padding rows, replayed as requests come, grow and leave."""
    shape: dict[str, Any] = {"heads": 8, "query_len": query_len, "kv_dtype": kv_dtype}
    most = [9000, 5000, 9000, 700]
    case = make_case(generator(0), most, **shape, table_width=512)
    given = buffers(case)
    q, _, _, lens = case.tensors
    lens.zero_()
    mla_decode(*case.tensors, **case.keywords, **given)  # Compiles.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = mla_decode(*case.tensors, **case.keywords, **given)
    for now in (most, [1, 0, 64, 65], [0, 0, 0, 0], [9000, 1, 4097, 0], [8999, 4999, 3, 700]):
        lens.copy_(torch.tensor(now))
        q.copy_(torch.randn(q.shape, device="cuda"))
        for poisoned in given.values():
            poisoned.fill_(torch.nan)
        graph.replay()
        assert_close(out, lse, case)
        eager = run(case)
        assert torch.equal(out, eager[0])
        assert torch.equal(lse, eager[1])


def test_a_workspace_for_more_serves_less() -> None:
    """vLLM reserves for the largest batch and hands that to every batch."""
    case = random_case(7, heads=8)
    out, lse = mla_decode(*case.tensors, **case.keywords, **buffers(case, max_batch=256))
    assert_close(out, lse, case)


def test_allocates_nothing() -> None:
    case = make_case(generator(0), [500, 20], heads=8, query_len=4)
    given = buffers(case)
    mla_decode(*case.tensors, **case.keywords, **given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    mla_decode(*case.tensors, **case.keywords, **given)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_does_not_wait_for_the_device() -> None:
    case = make_case(generator(0), [500, 20], heads=8, query_len=4)
    given = buffers(case)
    mla_decode(*case.tensors, **case.keywords, **given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        mla_decode(*case.tensors, **case.keywords, **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not STOCK, reason="STOCK_MLA names no copy of 0.33.0's own op")
@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("spread", [1.0, 6.0])
@pytest.mark.parametrize(("heads", "query_len"), [(8, 1), (8, 4), (16, 6), (64, 4)])
def test_at_most_twice_the_error_of_stock(
    heads: int, query_len: int, spread: float, kv_dtype: torch.dtype
) -> None:
    """No empty requests here: stock divides by zero there."""
    from benchmarks.stock_mla import StockMla, load_stock

    assert STOCK is not None
    module = load_stock(Path(STOCK))
    for seed, lengths in enumerate(([30000, 5000], [2048] * 8, [64, 65, 9, 513])):
        case = make_case(
            generator(seed), lengths, heads=heads, query_len=query_len, kv_dtype=kv_dtype,
            spread=spread,
        )  # fmt: skip
        keywords = {name: value for name, value in case.keywords.items() if name != "causal"}
        exact, _ = mla_decode_reference(*case.tensors, **case.keywords)
        stock, _ = StockMla(module, *case.tensors, **keywords)()
        stock_error = float((stock.double() - exact).abs().max())
        error = assert_close(*run(case), case)
        print(f"error {error:.2e}, stock's {stock_error:.2e}")
        assert error <= 2 * stock_error
