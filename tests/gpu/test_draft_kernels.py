# SPDX-License-Identifier: Apache-2.0
"""The drafter's kernels on a GPU, at the real sizes, against the float64 references.

    python -m pytest tests/gpu/test_draft_kernels.py

Not part of CI, which has no GPU; needs torch and Triton only. The cases are the benchmark's: every
kernel at the shapes of a rank of TP=8 and of the whole drafter, over outputs that hold NaN. Then
what the interpreter cannot show: races, captured graphs, that nothing is allocated and nothing
waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.draft_kernels import (
    BF16,
    SIZES,
    Case,
    Factory,
    HeadKeys,
    SkinnyGemm,
    cases,
    integers,
)
from benchmarks.gpu import capture
from vllm_kimi_eagle3.kernels.arch import arch_of
from vllm_kimi_eagle3.kernels.head_argmax import head_keys, ids_of
from vllm_kimi_eagle3.kernels.product_reference import head_keys_reference, head_logits_reference
from vllm_kimi_eagle3.kernels.skinny_gemm import (
    HEADER,
    product_configs,
    skinny_gemm,
    workspace_for,
    workspace_numel,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CUDA = torch.device("cuda", 0)
TOKENS = {"shard": (1, 5, 16, 17, 33, 64), "full": (1, 8, 32)}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def every_case(widths: tuple[str, ...], tokens: dict[str, tuple[int, ...]]) -> list[object]:
    """Makers of the benchmark's cases, named."""
    kvs = ["bf16"]
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        kvs.append("fp8")
    found = []
    for width in widths:
        for count in tokens[width]:
            for index, (kernel, make) in enumerate(cases(width, count, kvs, CUDA)):
                found.append(pytest.param(make, id=f"{kernel}-{width}-{count}-{index}"))
    return found


def assert_right(case: Case) -> None:
    error = case.check()
    assert error <= case.allowed, (case.kernel, case.shape, error)


@pytest.mark.parametrize("make", every_case(("shard", "full"), TOKENS))
def test_real_sizes(make: Factory) -> None:
    case = make()
    case.reset(1)
    case.ours()
    assert_right(case)


@pytest.mark.parametrize("make", every_case(("shard",), {"shard": (1, 8, 32)}))
def test_a_captured_graph_is_right_with_other_inputs(make: Factory) -> None:
    """As in vLLM: captured once, replayed over inputs that were copied into the same tensors."""
    case = make()
    case.reset(0)
    replay = capture([case.ours])
    for seed in (1, 2, 3):
        case.reset(seed)
        replay()
        assert_right(case)
        first = [result.clone() for result in case.results()]
        case.reset(seed)
        case.ours()
        for result, before in zip(case.results(), first, strict=True):
            assert torch.equal(bits(result), bits(before)), "other bits than the graph's"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What can be compared: NaN is not equal to itself."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("make", every_case(("shard",), {"shard": (2, 32)}))
def test_allocates_nothing_and_does_not_wait(make: Factory) -> None:
    case = make()
    case.reset(0)
    case.ours()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.ours()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("tokens", [1, 7, 16, 32, 64])
@pytest.mark.parametrize("product", list(SIZES["shard"].products))
def test_products_have_the_same_bits_every_time(product: str, tokens: int) -> None:
    """Parts arrive in another order each time, and are added in the same one."""
    case = SkinnyGemm(product, *SIZES["shard"].products[product], tokens, CUDA)
    case.reset(3)
    case.ours()
    first = case.out.clone()
    for _ in range(200):
        case.out.fill_(torch.nan)
        case.ours()
        assert torch.equal(case.out, first)
    assert_right(case)
    assert not case.workspace[:HEADER].view(torch.int32).any()


@pytest.mark.parametrize("tokens", [1, 16, 32, 100])
@pytest.mark.parametrize("vocabulary", SIZES["shard"].vocabularies)
def test_keys_are_the_same_every_time(vocabulary: int, tokens: int) -> None:
    case = HeadKeys(SIZES["shard"], vocabulary, tokens, CUDA)
    case.reset(3)
    case.ours()
    first = case.keys.clone()
    for _ in range(200):
        case.keys.fill_(7777)
        case.ours()
        assert torch.equal(case.keys, first)
    assert_right(case)
    assert not case.workspace[:HEADER].view(torch.int32).any()


@pytest.mark.parametrize("config", product_configs((9, 0)) + product_configs((12, 0)), ids=str)
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_every_configuration(config: object, splits: int) -> None:
    """Hopper's and SM120's; the latter's fit everywhere."""
    shared = torch.cuda.get_device_properties(CUDA).shared_memory_per_block_optin
    if shared < 160 * 1024 and config not in product_configs((12, 0)):
        pytest.skip("made for more shared memory")
    tokens = config.block_t  # type: ignore[attr-defined]
    case = SkinnyGemm("odd", 1000, 7200, tokens, CUDA)
    case.reset(5)
    workspace = torch.zeros(HEADER + 4_000_000, device=CUDA)
    skinny_gemm(
        case.x, case.weight, out=case.out, workspace=workspace, config=config, splits=splits
    )
    assert_right(case)
    assert not workspace[:HEADER].view(torch.int32).any()


@pytest.mark.parametrize("tokens", [1, 9, 16, 40, 130])
@pytest.mark.parametrize("columns", [4000, 20480, 32000])
@pytest.mark.parametrize("with_workspace", [False, True])
def test_ties_are_resolved_as_stock_resolves_them(
    columns: int, tokens: int, with_workspace: bool
) -> None:
    """Whole numbers: logits are exact and most rows have ties. Stock scatters the draft logits into
    the target's columns and takes torch.argmax."""
    hidden = (integers(1, 3, tokens, 7168, device=CUDA) - 1).to(BF16)
    weight = (integers(2, 3, columns // 2, 7168, device=CUDA) - 1).to(BF16).repeat(2, 1)
    chosen = torch.randperm(163840, generator=torch.Generator().manual_seed(3))[:columns]
    d2t = chosen.cuda() - torch.arange(columns, device=CUDA)
    keys = torch.full((tokens,), 7777, dtype=torch.int64, device=CUDA)
    workspace = workspace_for(CUDA) if with_workspace else None
    head_keys(hidden, weight, rows=columns, d2t=d2t, keys_out=keys, workspace=workspace)
    logits = head_logits_reference(hidden, weight, rows=columns)
    assert torch.equal(keys, head_keys_reference(logits, dtype=BF16, d2t=d2t))
    scattered = torch.full((tokens, 163840), -torch.inf, dtype=BF16, device=CUDA)
    scattered[:, chosen.cuda()] = logits.to(BF16)
    assert torch.equal(ids_of(keys), scattered.argmax(-1))


@pytest.mark.parametrize("with_workspace", [False, True])
def test_what_is_no_number_wins(with_workspace: bool) -> None:
    case = HeadKeys(SIZES["shard"], 4000, 3, CUDA)
    case.d2t = None
    case.reset(0)
    case.weight[1234] = torch.nan
    case.weight[77] = torch.inf
    workspace = case.workspace if with_workspace else None
    head_keys(case.x, case.weight, **case.keywords(), workspace=workspace)
    assert torch.equal(ids_of(case.keys), functional_argmax(case))


def functional_argmax(case: HeadKeys) -> torch.Tensor:
    """torch.argmax over cuBLAS's logits."""
    return torch.nn.functional.linear(case.x, case.weight).argmax(-1)


def test_a_workspace_is_large_enough_for_every_product() -> None:
    """And nothing behind it is written."""
    numel = workspace_numel(arch_of(CUDA))
    whole = torch.zeros(numel + 4096, device=CUDA)
    whole[numel:] = 1e30
    for tokens in (1, 16, 32, 64):
        for name, (columns, size_k) in SIZES["shard"].products.items():
            case = SkinnyGemm(name, columns, size_k, tokens, CUDA)
            case.reset(0)
            skinny_gemm(case.x, case.weight, out=case.out, workspace=whole[:numel])
            assert_right(case)
    assert (whole[numel:] == 1e30).all()
    assert not whole[:HEADER].view(torch.int32).any()
