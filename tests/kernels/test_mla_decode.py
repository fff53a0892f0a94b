# SPDX-License-Identifier: Apache-2.0
"""The kernel in Triton's interpreter against the float64 reference.

Every buffer that the kernel writes, and every cache slot, page and gap that it must not read, holds
NaN. What the interpreter cannot show is in interpreter.py; tests/gpu has the rest.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_kimi_eagle3.kernels import arch
from vllm_kimi_eagle3.kernels.mla_decode import mla_decode, unsupported, workspace_numel
from vllm_kimi_eagle3.kernels.reference import mla_decode_reference

from .cases import Case, R, make_case
from .operations import Operations

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# Absolute, of the output. The issue's bound for bfloat16; float16 rounds eight times finer, but the
# probabilities' rounding adds up alike.
ALLOWED = {BF16: 2e-2, FP16: 4e-3}
PAGES = [16, 32, 48, 64, 128]
MARK = 1e30
GPU = arch.arch_of(torch.device("cpu"))  # A small one that stands for the interpreter.
CONFIGS = sorted(
    {c for capability in arch.CAPABILITIES for c in arch.mla_decode_configs(capability)}, key=str
)


def buffers(case: Case, config: arch.DecodeConfig | None = None) -> dict[str, Tensor]:
    """Poisoned out, lse and workspace for a case; behind the workspace lies a mark."""
    q = case.tensors[0]
    rows, heads, _ = q.shape
    numel = workspace_numel(
        max_batch=len(case.tensors[3]),
        query_len=case.keywords["query_len"],
        heads=heads,
        kv_lora_rank=R,
        arch=GPU,
    )
    if config is not None:  # One that is not in the table of GPU may start more programs.
        numel = numel * config.programs_per_sm
    workspace = torch.full((numel + 64,), torch.nan)
    workspace[numel:] = MARK
    return {
        "out": torch.full((rows, heads, R), torch.nan, dtype=q.dtype),
        "lse": torch.full((rows, heads), torch.nan),
        "workspace": workspace[:numel],
    }


def run(case: Case, config: arch.DecodeConfig | None = None) -> tuple[Tensor, Tensor]:
    """The kernel's results over poisoned buffers."""
    given_buffers = buffers(case, config)
    out, lse = mla_decode(*case.tensors, **case.keywords, **given_buffers, config=config)
    assert out is given_buffers["out"]
    assert lse is given_buffers["lse"]
    behind = given_buffers["workspace"]
    behind = torch.as_strided(behind, (64,), (1,), behind.storage_offset() + behind.numel())
    assert (behind == MARK).all(), "wrote behind its workspace"
    return out, lse


def assert_right(case: Case, config: arch.DecodeConfig | None = None) -> None:
    """The kernel's results are the reference's."""
    out, lse = run(case, config)
    exact, exact_lse = mla_decode_reference(*case.tensors, **case.keywords)
    assert (out.double() - exact).abs().max() <= ALLOWED[out.dtype]
    nothing = exact_lse.isneginf()
    assert torch.equal(lse.isneginf(), nothing)
    assert not out[nothing].any()
    if not nothing.all():
        assert (lse.double() - exact_lse)[~nothing].abs().max() <= 1e-3


LENGTHS = st.one_of(
    st.integers(0, 12),
    st.integers(0, 300),
    # The ends of pages and of tiles.
    st.builds(lambda pages, off: max(0, 16 * pages + off), st.integers(1, 16), st.integers(-1, 1)),
)


@st.composite
def cases(draw: st.DrawFn, fp8: bool) -> Case:
    """Any shape that the kernel takes, small enough for the interpreter."""
    query_len = draw(st.integers(1, 9))
    heads = draw(st.sampled_from([4, 8, 5, 16, 12, 20, 32, 64, 128]))
    # The interpreter takes milliseconds for each row of a result.
    most = max(1, min(5, 150 // (heads * query_len)))
    q_dtype = draw(st.sampled_from([BF16, FP16]))
    return make_case(
        torch.Generator().manual_seed(draw(st.integers(0, 1000))),
        draw(st.lists(LENGTHS, min_size=1, max_size=most)),
        heads=heads,
        query_len=query_len,
        page=draw(st.sampled_from(PAGES)),
        q_dtype=q_dtype,
        kv_dtype=FP8 if fp8 else q_dtype,
        table_width=draw(st.sampled_from([None, 40])),
        causal=draw(st.booleans()),
        strided=draw(st.booleans()),
        shared_prefix=draw(st.booleans()),
        spread=draw(st.sampled_from([1.0, 6.0])),
    )


ANY = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@ANY
@given(cases(fp8=False), st.sampled_from([None, *CONFIGS]))
def test_any_shape(case: Case, config: arch.DecodeConfig | None) -> None:
    assert_right(case, config)


@ANY
@given(cases(fp8=True), st.sampled_from([None, *CONFIGS]))
def test_any_shape_in_fp8(case: Case, config: arch.DecodeConfig | None) -> None:
    assert_right(case, config)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_every_config(config: arch.DecodeConfig, kv_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = [0, 200, 0, 65, 3]
    assert_right(make_case(generator, lengths, heads=8, query_len=4, kv_dtype=kv_dtype), config)


# Named edges, so that they are run every time.
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_lengths_around_pages(page: int, kv_dtype: torch.dtype) -> None:
    for lengths in ([0, 1, 2, 3, 4], [page - 1, page, page + 1, 2 * page, 0]):
        generator = torch.Generator().manual_seed(page)
        assert_right(
            make_case(generator, lengths, heads=8, query_len=4, page=page, kv_dtype=kv_dtype)
        )


@pytest.mark.parametrize(
    ("heads", "query_len"),
    [(4, 1), (4, 9), (8, 1), (8, 4), (16, 1), (16, 9), (32, 2), (64, 1), (128, 1), (128, 4)],
)
def test_heads_and_query_lengths(heads: int, query_len: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    assert_right(make_case(generator, [70], heads=heads, query_len=query_len))


def test_queries_beyond_float16() -> None:
    """With an fp8 cache products are of float16: what it does not hold counts as its largest."""
    generator = torch.Generator().manual_seed(7)
    case = make_case(generator, [70, 20], heads=8, query_len=2, kv_dtype=FP8, spread=3e4)
    q, *others = case.tensors
    held = q.float().clamp(-65504, 65504)
    assert (held != q).any()
    out, lse = run(case)
    exact, exact_lse = mla_decode_reference(held, *others, **case.keywords)
    assert (out.double() - exact).abs().max() <= ALLOWED[out.dtype]
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=0)


@pytest.mark.parametrize("query_len", [1, 4])
def test_float32_where_triton_interprets(query_len: int) -> None:
    """For tests of a drafter in float32 on the CPU: products are of float32 too."""
    generator = torch.Generator().manual_seed(9)
    lengths = [70, 0, 20]
    case = make_case(
        generator, lengths, heads=8, query_len=query_len, q_dtype=torch.float32, page=16
    )
    out, lse = run(case)
    exact, exact_lse = mla_decode_reference(*case.tensors, **case.keywords)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-5)


def test_only_padding() -> None:
    assert_right(make_case(torch.Generator().manual_seed(0), [0, 0], heads=8, query_len=2))


def test_same_bits_twice() -> None:
    case = make_case(torch.Generator().manual_seed(3), [300, 5, 64], heads=8, query_len=4)
    first, second = run(case), run(case)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_allocates_out_and_lse_if_not_given() -> None:
    case = make_case(torch.Generator().manual_seed(3), [30], heads=8, query_len=2)
    given_buffers = run(case)
    workspace = buffers(case)["workspace"]
    allocated = mla_decode(*case.tensors, **case.keywords, workspace=workspace)
    for ours, wanted in zip(allocated, given_buffers, strict=True):
        assert ours.dtype == wanted.dtype
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_queries_in_two_parts(kv_dtype: torch.dtype) -> None:
    """As vLLM's layer has them: the latent part a transposed product, the rotary one a view."""
    generator = torch.Generator().manual_seed(5)
    case = make_case(generator, [90, 0, 3], heads=8, query_len=4, kv_dtype=kv_dtype)
    whole = run(case)
    q, *rest = case.tensors
    latent = q[..., :R].transpose(0, 1).contiguous().transpose(0, 1)
    assert latent.stride() != q[..., :R].contiguous().stride()
    parts = mla_decode((latent, q[..., R:]), *rest, **case.keywords, **buffers(case))
    assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))


def test_a_launch_does_not_depend_on_the_lengths(launches: list[Any]) -> None:
    """So a CUDA graph that was captured with some lengths is right with any others."""
    case = make_case(torch.Generator().manual_seed(0), [1, 300], heads=8, query_len=4)
    given_buffers = buffers(case)
    recorded = []
    for lengths in ([1, 300], [0, 0], [300, 17]):
        case.tensors[3].copy_(torch.tensor(lengths))
        mla_decode(*case.tensors, **case.keywords, **given_buffers)
        recorded.append(list(launches))
        launches.clear()
    assert recorded[0]
    assert recorded[0] == recorded[1] == recorded[2]


def test_allocates_nothing_and_reads_nothing_back(launches: list[Any]) -> None:
    """With out, lse and workspace given. Launches are left out: the interpreter's copy tensors."""
    case = make_case(torch.Generator().manual_seed(0), [1, 300], heads=8, query_len=4)
    given_buffers = buffers(case)
    with Operations() as operations:
        mla_decode(*case.tensors, **case.keywords, **given_buffers)
    assert launches
    views = {
        "view",
        "slice",
        "as_strided",
        "select",
        "unsqueeze",
        "expand",
        "detach",
        "_unsafe_view",
    }
    assert set(operations.seen) <= views


def strided_last(tensor: Tensor) -> Tensor:
    """The same values with last stride 2."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


# What is changed in a good call, and what the message has to name.
BAD = {
    "queries in float32": ({"q": lambda q: q.float()}, "queries are torch.float32"),
    "cache in float32": ({"kv_cache": lambda cache: cache.float()}, "the cache is torch.float32"),
    "strided queries": ({"q": strided_last}, "q has last stride 2"),
    "strided cache": ({"kv_cache": strided_last}, "kv_cache has last stride 2"),
    "strided table": ({"block_table": strided_last}, "block_table has last stride 2"),
    "long table": ({"block_table": lambda table: table.long()}, "block_table is torch.int64"),
    "long lengths": ({"seq_lens": lambda lens: lens.long()}, "seq_lens is torch.int64"),
    "short table": ({"block_table": lambda table: table[:1]}, "block_table has 1 rows for 2"),
    "other width": ({"kv_cache": lambda cache: cache[..., :512]}, "q is 576 wide .* is 512"),
    "parts of other types": (
        {"q": lambda q: (q[..., :R], q[..., R:].half())}, "parts of q .* torch.bfloat16 .*float16",
    ),
    "strided part": ({"q": lambda q: (q[..., :R], strided_last(q[..., R:]))}, "q has last stride"),
    "strided out": ({"out": strided_last}, "out is .* with last stride 2"),
    "out of other size": ({"out": lambda out: out[:-1]}, r"out is \(7, 8, 512\) .* \(8, 8, 512\)"),
    "out in float32": ({"out": lambda out: out.float()}, "out is .* of torch.float32"),
    "lse in bfloat16": ({"lse": lambda lse: lse.bfloat16()}, "lse is .* of torch.bfloat16"),
    "strided workspace": ({"workspace": lambda space: space[::2]}, "workspace .* contiguous"),
    "other token count": ({"q": lambda q: q[:-1]}, "q has 7 tokens; .* 2 requests of 4"),
    "page of 8": ({"kv_cache": lambda cache: cache[:, :8]}, "page size is 8; .* multiples of 16"),
    "no query": ({"query_len": 0}, "query_len is 0; it takes 1 to 9"),
    "ten queries": ({"query_len": 10}, "query_len is 10; it takes 1 to 9"),
    "small workspace": (
        {"workspace": lambda space: space[:100]}, "workspace has 100 elements .* needs [0-9]+",
    ),
    "workspace in half": ({"workspace": lambda space: space.half()}, "workspace .* torch.float16"),
    "no scale": (
        {"kv_cache": lambda cache: cache.to(FP8)}, "fp8 cache needs kv_scale, a float32 tensor",
    ),
    "scale in bfloat16": (
        {"kv_cache": lambda cache: cache.to(FP8), "kv_scale": torch.ones(1, dtype=BF16)},
        "fp8 cache needs kv_scale, a float32 tensor",
    ),
    "odd strides": (
        {
            "kv_cache": lambda cache: cache.new_empty(*cache.shape[:2], 578).to(FP8)[..., :576],
            "kv_scale": torch.ones(1),
        },
        "fp8 kv_cache has strides .* multiples of 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str, launches: list[Any]) -> None:
    case = make_case(torch.Generator().manual_seed(0), [20, 70], heads=8, query_len=4)
    changes, message = BAD[name]
    names = ("q", "kv_cache", "block_table", "seq_lens")
    arguments = {
        **dict(zip(names, case.tensors, strict=True)), **case.keywords, **buffers(case),
    }  # fmt: skip
    for argument, change in changes.items():
        arguments[argument] = change(arguments[argument]) if callable(change) else change
    with pytest.raises(ValueError, match=message):
        mla_decode(**arguments)
    assert not launches


GOOD: dict[str, Any] = {
    "heads": 8, "query_len": 4, "kv_lora_rank": 512, "rope_dim": 64, "q_dtype": BF16,
    "kv_dtype": BF16, "page_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"heads": 129}, "129 heads"),
        ({"query_len": 10}, "query_len is 10"),
        ({"kv_lora_rank": 384}, "kv_lora_rank is 384"),
        ({"rope_dim": 48}, "48 wide"),
        ({"q_dtype": torch.float32}, "float32"),
        ({"kv_dtype": torch.float8_e5m2}, "float8_e5m2"),
        ({"page_size": 24}, "page size is 24"),
    ],
)
def test_says_why_something_is_unsupported(change: dict[str, Any], word: str) -> None:
    assert unsupported(**GOOD) is None
    why = unsupported(**{**GOOD, **change})
    assert why is not None
    assert word in why
