# SPDX-License-Identifier: Apache-2.0
"""The MHA drafter's attention in Triton's interpreter against the float64 reference.

Every buffer that the kernel writes, and every cache slot, page and gap that it must not read, holds
NaN. The interpreter runs programs one after another: that the last to come adds up, and not which,
is what it shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_kimi_eagle3.kernels import arch
from vllm_kimi_eagle3.kernels.mha_decode import (
    _counted,
    make_workspace,
    mha_decode,
    unsupported,
    workspace_numel,
)
from vllm_kimi_eagle3.kernels.mha_reference import mha_decode_reference

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
ALLOWED = {BF16: 2e-2, FP16: 4e-3, FP32: 1e-5}
# With an fp8 cache queries and weights are rounded to float16, whatever the queries' dtype: with
# scores as large as `cases` makes them, 5.4e-3 was seen.
ALLOWED_FP8 = 1e-2
PAGES = [16, 32, 48, 64]
GPU = arch.arch_of(torch.device("cpu"))
CONFIGS = sorted(
    {c for capability in arch.CAPABILITIES for c in arch.mha_decode_configs(capability)}, key=str
)
# Many programs with a tile each, so that parts are added in groups, and those of several requests.
MANY_PARTS = arch.DecodeConfig(16, 16, 4, 1, 20, 1)


@dataclasses.dataclass
class Case:
    """Arguments of `mha_decode` and of its reference: q, both caches, block_table, seq_lens."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    keywords: dict[str, Any]


def make_case(
    seed: int,
    lengths: Sequence[int],
    *,
    heads: int = 8,
    kv_heads: int = 1,
    head_dim: int = 64,
    query_len: int = 1,
    page: int = 16,
    q_dtype: torch.dtype = BF16,
    fp8: bool = False,
    layout: str = "NHD",
    spread: float = 1.0,
) -> Case:
    """Requests of the given lengths, with NaN in all that is not theirs.

    Layouts: "NHD" pages of tokens of heads, "HND" pages of heads of tokens, each with keys and
    values side by side per page, "apart" two caches.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_dtype = FP8 if fp8 else q_dtype
    counts = [-(-length // page) for length in lengths]
    used = max(1, sum(counts))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def poison(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan)

    rows = len(lengths) * query_len
    q = poison(rows, heads + 2, head_dim + 16).to(q_dtype)[:, :heads, :head_dim]
    q.copy_(normal(rows, heads, head_dim) * spread)

    if layout == "apart":
        pair = poison(2, 2 * used, page, kv_heads, head_dim).to(kv_dtype)
        caches = [pair[0], pair[1]]
    elif layout == "NHD":
        pair = poison(2 * used, 2, page, kv_heads, head_dim).to(kv_dtype)
        caches = [pair[:, 0], pair[:, 1]]
    else:
        pair = poison(2 * used, 2, kv_heads, page, head_dim).to(kv_dtype)
        caches = [pair[:, 0].transpose(1, 2), pair[:, 1].transpose(1, 2)]
    order = torch.randperm(2 * used, generator=generator)
    good, bad = order[:used], order[used:]
    width = max(counts) + 2
    table = torch.zeros(len(lengths), width + 3, dtype=torch.int32)[:, :width]
    table.copy_(bad[torch.randint(used, table.shape, generator=generator)])
    first = 0
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = good[first : first + count]
        first += count
        table[request, :count] = mine
        for cache in caches:
            bits = cache.view(torch.uint8) if fp8 else cache  # For index_put_.
            tokens = poison(count * page, kv_heads, head_dim)
            tokens[:length] = normal(length, kv_heads, head_dim)
            whole = tokens.to(kv_dtype).view(count, page, kv_heads, head_dim)
            bits[mine] = whole.view(torch.uint8) if fp8 else whole
    keywords: dict[str, Any] = {"scale": head_dim**-0.5, "query_len": query_len}
    if fp8:
        keywords |= {"k_scale": torch.tensor(0.75), "v_scale": torch.tensor([1.5])}
    seq_lens = torch.tensor(list(lengths), dtype=torch.int32)
    return Case((q, caches[0], caches[1], table, seq_lens), keywords)


def space_for(case: Case, factor: int = 1) -> Tensor:
    """A workspace as `make_workspace` has it, with NaN where it need not be zero."""
    q, k_cache, _, _, seq_lens = case.tensors
    numel = workspace_numel(
        max_batch=len(seq_lens),
        query_len=case.keywords["query_len"],
        heads=q.shape[1],
        kv_heads=k_cache.shape[2],
        head_dim=q.shape[2],
        arch=GPU,
    )
    space = torch.zeros(numel * factor)
    space[_counted(len(space)) :] = torch.nan
    return space


def run(case: Case, config: arch.DecodeConfig | None = None, space: Tensor | None = None) -> Tensor:
    """The kernel's result over poisoned buffers; the counters are zero again."""
    q = case.tensors[0]
    if space is None:  # A config that is not in the table may start more programs.
        space = space_for(case, 1 if config is None else 30)
    out = torch.full_like(q, torch.nan)
    got = mha_decode(*case.tensors, **case.keywords, workspace=space, out=out, config=config)
    assert got is out
    assert not space[: _counted(len(space))].any()
    return out


def assert_right(case: Case, config: arch.DecodeConfig | None = None) -> None:
    out = run(case, config)
    exact = mha_decode_reference(*case.tensors, **case.keywords)
    assert (out.double() - exact).abs().max() <= ALLOWED[out.dtype]


LENGTHS = st.one_of(
    st.integers(0, 12),
    st.integers(0, 250),
    # The ends of pages and of tiles.
    st.builds(lambda pages, off: max(0, 16 * pages + off), st.integers(1, 12), st.integers(-1, 1)),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any shape that the kernel takes, small enough for the interpreter."""
    fp8 = draw(st.booleans())
    heads, kv_heads = draw(st.sampled_from([(8, 1), (4, 4), (12, 2), (64, 8), (5, 1), (2, 1)]))
    return make_case(
        draw(st.integers(0, 1000)),
        draw(st.lists(LENGTHS, min_size=1, max_size=4 if kv_heads < 8 else 1)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128] if fp8 else [16, 32, 64, 128])),
        query_len=draw(st.integers(1, 9)),
        page=draw(st.sampled_from(PAGES)),
        q_dtype=draw(st.sampled_from([BF16, FP16, FP32])),
        fp8=fp8,
        layout=draw(st.sampled_from(["NHD", "HND", "apart"])),
        spread=draw(st.sampled_from([1.0, 6.0])),
    )


ANY = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@ANY
@given(cases(), st.sampled_from([None, MANY_PARTS, *CONFIGS]))
def test_any_shape(case: Case, config: arch.DecodeConfig | None) -> None:
    if config is not None and case.tensors[0].dtype == FP32 and config is not MANY_PARTS:
        config = None
    exact = mha_decode_reference(*case.tensors, **case.keywords)
    out = run(case, config)
    allowed = ALLOWED[out.dtype]
    if case.tensors[1].dtype == FP8:
        allowed = max(allowed, ALLOWED_FP8)
    assert (out.double() - exact).abs().max() <= allowed * max(1.0, float(exact.abs().max()) / 4)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_every_config(config: arch.DecodeConfig, fp8: bool) -> None:
    assert_right(make_case(5, [0, 200, 0, 65, 3], query_len=4, fp8=fp8, head_dim=128), config)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_lengths_around_pages(page: int, fp8: bool) -> None:
    for lengths in ([0, 1, 2, 3, 4], [page - 1, page, page + 1, 2 * page, 0]):
        assert_right(make_case(page, lengths, query_len=4, page=page, fp8=fp8))


@pytest.mark.parametrize("heads", [(8, 1), (64, 8)], ids=["tp8", "whole"])
@pytest.mark.parametrize("query_len", [1, 4, 9])
@pytest.mark.parametrize("layout", ["NHD", "HND", "apart"])
def test_kimi_drafters_shapes(heads: tuple[int, int], query_len: int, layout: str) -> None:
    assert_right(
        make_case(
            7, [70, 20], heads=heads[0], kv_heads=heads[1], head_dim=128, query_len=query_len,
            layout=layout,
        )
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [[600], [0, 700, 3, 400], [250, 260]])
@pytest.mark.parametrize("query_len", [1, 3])
def test_parts_added_in_groups(lengths: list[int], query_len: int) -> None:
    """37 parts are three groups of 16, 16 and 5; a part that ends in the next request is shared."""
    case = make_case(3, lengths, query_len=query_len, head_dim=32)
    assert_right(case, MANY_PARTS)
    assert_right(case, dataclasses.replace(MANY_PARTS, min_tiles=2))
    assert_right(case, dataclasses.replace(MANY_PARTS, programs_per_sm=5))


def test_only_padding() -> None:
    case = make_case(0, [0, 0, 0], query_len=2)
    assert not run(case).any()


def test_more_padding_than_programs() -> None:
    out = run(make_case(0, [0] * 70 + [20], head_dim=16))
    assert not out[:70].any()
    assert out[70].any()


def test_calls_of_all_shapes_share_a_workspace() -> None:
    """Counters stay where they are, whatever the batch, query length and cache."""
    largest = make_case(0, [90, 0, 33, 200], query_len=4)
    space = make_workspace(
        max_batch=4, query_len=4, heads=8, kv_heads=1, head_dim=64, device=torch.device("cpu")
    )
    for lengths, query_len, fp8 in (([90, 0, 33, 200], 4, False), ([300], 1, True)) * 2:
        case = make_case(1, lengths, query_len=query_len, fp8=fp8)
        exact = mha_decode_reference(*case.tensors, **case.keywords)
        assert (run(case, space=space).double() - exact).abs().max() <= ALLOWED[BF16]
    assert len(space_for(largest)) == len(space)


def test_same_bits_twice_and_whatever_the_padding() -> None:
    case = make_case(3, [300, 5, 64], query_len=4)
    assert torch.equal(run(case), run(case))


def test_allocates_out_if_not_given() -> None:
    case = make_case(3, [30], query_len=2)
    out = mha_decode(*case.tensors, **case.keywords, workspace=space_for(case))
    assert torch.equal(out, run(case))


def test_a_launch_does_not_depend_on_the_lengths(launches: list[Any]) -> None:
    """So a CUDA graph that was captured with some lengths is right with any others."""
    case = make_case(0, [1, 300], query_len=4)
    given_out, space = torch.empty_like(case.tensors[0]), space_for(case)
    recorded = []
    for lengths in ([1, 300], [0, 0], [300, 17]):
        case.tensors[4].copy_(torch.tensor(lengths))
        mha_decode(*case.tensors, **case.keywords, workspace=space, out=given_out)
        recorded.append(list(launches))
        launches.clear()
    assert len(recorded[0]) == 1
    assert recorded[0] == recorded[1] == recorded[2]


def strided_last(tensor: Tensor) -> Tensor:
    """The same values with last stride 2."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


NAMES = ("q", "k_cache", "v_cache", "block_table", "seq_lens")
# What is changed in a good call, and what the message has to name.
BAD = {
    "queries in float64": ({"q": lambda q: q.double()}, "queries are torch.float64"),
    "one cache in float16": ({"k_cache": lambda cache: cache.half()}, "must be alike"),
    "both caches in float16": (
        {"k_cache": lambda cache: cache.half(), "v_cache": lambda cache: cache.half()},
        "the cache is torch.float16",
    ),
    "strided queries": ({"q": strided_last}, "q has last stride 2"),
    "strided cache": ({"k_cache": strided_last}, "k_cache has last stride 2"),
    "strided table": ({"block_table": strided_last}, "block_table has last stride 2"),
    "long table": ({"block_table": lambda table: table.long()}, "block_table is torch.int64"),
    "long lengths": ({"seq_lens": lambda lens: lens.long()}, "seq_lens is torch.int64"),
    "short table": ({"block_table": lambda table: table[:1]}, "block_table has 1 rows for 2"),
    "other width": ({"q": lambda q: q[..., :32]}, "q is 32 wide and one of the caches 64"),
    "strided out": ({"out": strided_last}, "out is .* with last stride 2"),
    "out in float32": ({"out": lambda out: out.float()}, "out is .* of torch.float32"),
    "other token count": ({"q": lambda q: q[:-1]}, "q has 7 tokens; .* 2 requests of 4"),
    "page of 8": (
        {"k_cache": lambda cache: cache[:, :8], "v_cache": lambda cache: cache[:, :8]},
        "page size is 8; .* multiples of 16",
    ),
    "ten queries": ({"query_len": 10}, "query_len is 10; it takes 1 to 9"),
    "small workspace": (
        {"workspace": lambda space: space[:100]}, "workspace has 100 elements .* needs [0-9]+",
    ),
    "workspace in half": ({"workspace": lambda space: space.half()}, "workspace .* torch.float16"),
    "strided workspace": ({"workspace": lambda space: space[::2]}, "workspace .* contiguous"),
    "no scale": (
        {"k_cache": lambda cache: cache.to(FP8), "v_cache": lambda cache: cache.to(FP8)},
        "fp8 cache needs k_scale, a float32 tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str, launches: list[Any]) -> None:
    case = make_case(0, [20, 70], query_len=4)
    changes, message = BAD[name]
    arguments = {
        **dict(zip(NAMES, case.tensors, strict=True)),
        **case.keywords,
        "workspace": space_for(case),
        "out": torch.empty_like(case.tensors[0]),
    }
    for argument, change in changes.items():
        arguments[argument] = change(arguments[argument]) if callable(change) else change
    with pytest.raises(ValueError, match=message):
        mha_decode(**arguments)
    assert not launches


def test_no_fp8_without_its_instructions() -> None:
    ampere = arch.arch((8, 0))
    with pytest.raises(ValueError, match="sm_80 has no fp8 instructions"):
        arch.mha_decode_config(ampere, rows=8, itemsize=1)
    shape = {"max_batch": 4, "query_len": 4, "heads": 8, "kv_heads": 1, "head_dim": 128}
    assert workspace_numel(**shape, arch=ampere) > 0


GOOD: dict[str, Any] = {
    "heads": 64, "kv_heads": 8, "head_dim": 128, "query_len": 4, "q_dtype": BF16,
    "kv_dtype": BF16, "page_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"heads": 60}, "60 heads over 8"),
        ({"query_len": 10}, "query_len is 10"),
        ({"head_dim": 96}, "head_dim is 96"),
        ({"head_dim": 32, "kv_dtype": FP8}, "head_dim 32"),
        ({"q_dtype": torch.float64}, "float64"),
        ({"kv_dtype": torch.float8_e5m2}, "float8_e5m2"),
        ({"page_size": 24}, "page size is 24"),
    ],
)
def test_says_why_something_is_unsupported(change: dict[str, Any], word: str) -> None:
    assert unsupported(**GOOD) is None
    why = unsupported(**{**GOOD, **change})
    assert why is not None
    assert word in why
