# SPDX-License-Identifier: Apache-2.0
"""`head_keys` and `top_ids` in Triton's interpreter, against torch.argmax and the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_kimi_eagle3.kernels import arch as architectures
from vllm_kimi_eagle3.kernels import head_argmax as kernels
from vllm_kimi_eagle3.kernels import skinny_gemm as products
from vllm_kimi_eagle3.kernels.product_reference import head_keys_reference, head_logits_reference

from .products import DTYPES, normal_numbers, padded, whole_numbers
from .test_skinny_gemm import check_workspace, marked_workspace

BF16 = torch.bfloat16


def offline_launches(arch: architectures.Arch) -> Iterator[tuple[str, Callable[[], object]]]:
    """What to compile for a GPU: every configuration, with and without a workspace, cut or not."""
    for config in products.product_configs(arch.capability):
        for splits, workspace, d2t in ((1, False, True), (1, True, False), (4, True, True)):

            def launch(config=config, splits=splits, workspace=workspace, d2t=d2t) -> object:
                before, kernels.arch_of = kernels.arch_of, lambda device: arch
                space = torch.empty(products.HEADER + 4096 * splits * config.block_t)
                try:
                    return kernels.head_keys(
                        torch.empty(config.block_t, 7168, dtype=BF16),
                        torch.empty(4096, 7168, dtype=BF16),
                        rows=4000,
                        d2t=torch.zeros(4096, dtype=torch.int64) if d2t else None,
                        keys_out=torch.empty(config.block_t, dtype=torch.int64),
                        workspace=space if workspace else None,
                        config=config,
                        splits=splits,
                    )
                finally:
                    kernels.arch_of = before

            about = "with a workspace" if workspace else "without"
            yield f"head_keys {config} in {splits} {about}", launch

    def top() -> object:
        return kernels.top_ids(
            torch.zeros(8, 32, dtype=torch.int64), out=torch.zeros(32, dtype=torch.int64)
        )

    yield "top_ids", top


def run(hidden: torch.Tensor, weight: torch.Tensor, **more: object) -> torch.Tensor:
    """The keys, over a poisoned output."""
    keys = torch.full((hidden.shape[0],), 2**62, dtype=torch.int64)
    assert kernels.head_keys(hidden, weight, keys_out=keys, **more) is keys
    if isinstance(workspace := more.get("workspace"), torch.Tensor):
        check_workspace(workspace)
    return keys


def draft_to_target(columns: int, target: int, seed: int, ordered: bool = True) -> torch.Tensor:
    """Target id less draft id, for a draft vocabulary out of a target's."""
    chosen = torch.randperm(target, generator=torch.Generator().manual_seed(seed))[:columns]
    if ordered:
        chosen = chosen.sort().values
    return chosen - torch.arange(columns)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tokens=st.integers(1, 70),
    columns=st.integers(1, 200),
    padding=st.integers(0, 9),
    size_k=st.sampled_from([1, 16, 100, 256, 640]),
    dtype=st.sampled_from(DTYPES),
    first=st.sampled_from([0, 3, 128]),
    d2t=st.sampled_from([None, True, False]),
    split=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_shape(
    tokens: int,
    columns: int,
    padding: int,
    size_k: int,
    dtype: torch.dtype,
    first: int,
    d2t: bool | None,
    split: bool,
    seed: int,
) -> None:
    """Whole numbers: sums are exact, and most rows have ties."""
    hidden = padded(whole_numbers(tokens, size_k, seed=seed, dtype=dtype, most=1))
    weight = whole_numbers(columns + padding, size_k, seed=seed + 1, dtype=dtype, most=1)
    weight[columns:] = 100.0  # Rows that pad the vocabulary never win.
    table = None if d2t is None else draft_to_target(first + columns + 5, 600, seed, ordered=d2t)
    keys = run(
        hidden, weight, rows=columns, first=first, d2t=table,
        workspace=marked_workspace() if split else None,
    )  # fmt: skip
    logits = head_logits_reference(hidden, weight, rows=columns)
    assert torch.equal(keys, head_keys_reference(logits, dtype=dtype, first=first, d2t=table))


@pytest.mark.parametrize("workspace", [False, True])
def test_ties_go_to_the_smallest_target_id_as_stock_resolves_them(workspace: bool) -> None:
    """Stock scatters the draft logits into the target's columns and takes torch.argmax."""
    hidden = whole_numbers(9, 64, seed=1, most=1)
    weight = whole_numbers(300, 64, seed=2, most=1).repeat(2, 1)  # Each column is there twice.
    table = draft_to_target(600, 1000, seed=3, ordered=False)
    keys = run(
        hidden, weight, rows=600, d2t=table, workspace=marked_workspace() if workspace else None
    )
    logits = torch.full((9, 1000), -torch.inf, dtype=BF16)
    logits[:, torch.arange(600) + table] = (hidden.float() @ weight.float().T).to(BF16)
    assert torch.equal(kernels.ids_of(keys), logits.argmax(-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workspace", [False, True])
def test_what_is_no_number_or_infinite(workspace: bool, dtype: torch.dtype) -> None:
    """One hidden value of 1, so that the weight's columns are the logits."""
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([
        [1.0, inf, nan, 2.0, nan],
        [1.0, inf, inf, -inf, 2.0],
        [-inf, -inf, -inf, -inf, -inf],
        [-1.0, -0.0, 0.0, -0.0, -2.0],
        [-3.0, -1.5, -1.0, -1.0, -inf],
    ])  # fmt: skip
    for logits in rows:
        weight = torch.zeros(5, 16, dtype=dtype)
        weight[:, 0] = logits
        hidden = torch.zeros(1, 16, dtype=dtype)
        hidden[0, 0] = 1.0
        keys = run(hidden, weight, rows=5, workspace=marked_workspace() if workspace else None)
        assert int(kernels.ids_of(keys)) == int(logits.argmax())


def test_logits_are_rounded_before_they_are_compared() -> None:
    """256 + 0.5 is 256 in bfloat16, so it ties with 256, and the first wins."""
    hidden = torch.ones(1, 16, dtype=BF16)
    weight = torch.zeros(2, 16, dtype=BF16)
    weight[:, 0] = 256
    weight[1, 1] = 0.5
    assert int(kernels.ids_of(run(hidden, weight, rows=2))) == 0
    assert int(kernels.ids_of(run(hidden.float(), weight.float(), rows=2))) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_are_ordered_as_logits(dtype: torch.dtype) -> None:
    values = normal_numbers(200, seed=4, dtype=dtype, spread=3.0).sort().values
    hidden = torch.zeros(200, 16, dtype=dtype)
    hidden[:, 0] = values
    weight = torch.zeros(1, 16, dtype=dtype)
    weight[0, 0] = 1.0
    keys = run(hidden, weight, rows=1)
    assert torch.equal(keys[1:] > keys[:-1], values[1:] > values[:-1])


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("out_dtype", [torch.int64, torch.int32])
def test_ranks_agree_with_one(ranks: int, out_dtype: torch.dtype) -> None:
    hidden, weight = whole_numbers(7, 64, seed=5, most=1), whole_numbers(320, 64, seed=6, most=1)
    table = draft_to_target(320, 999, seed=7)
    whole = run(hidden, weight, rows=320, d2t=table)
    each = 320 // ranks
    by_rank = torch.stack([
        run(
            hidden, weight[rank * each : (rank + 1) * each], rows=each, first=rank * each, d2t=table
        )
        for rank in range(ranks)
    ])  # fmt: skip
    out = torch.full((7,), -1, dtype=out_dtype)
    assert kernels.top_ids(by_rank, out=out) is out
    assert torch.equal(by_rank.amax(0), whole)
    assert torch.equal(out.long(), kernels.ids_of(whole))


def test_negative_keys_among_ranks() -> None:
    """All logits negative, so all keys are: nothing may win over them."""
    hidden, weight = torch.ones(3, 16, dtype=BF16), -torch.ones(40, 16, dtype=BF16)
    for workspace in (None, marked_workspace()):
        keys = run(hidden, weight, rows=40, workspace=workspace)
        assert (keys < 0).all()
        out = torch.empty(3, dtype=torch.int64)
        assert not kernels.top_ids(torch.stack([keys, keys]), out=out).any()


def test_no_rows() -> None:
    keys = torch.empty(0, dtype=torch.int64)
    weight = torch.zeros(4, 16, dtype=BF16)
    kernels.head_keys(torch.zeros(0, 16, dtype=BF16), weight, rows=4, keys_out=keys)
    kernels.top_ids(torch.empty(2, 0, dtype=torch.int64), out=keys)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": 9}, "rows is 9; weight has 8"),
        ({"keys_out": torch.zeros(2, dtype=torch.int32)}, "keys_out is"),
        ({"keys_out": torch.zeros(3, dtype=torch.int64)}, "keys_out is"),
        ({"d2t": torch.zeros(7, dtype=torch.int64)}, "d2t has 7 entries"),
        ({"hidden": torch.zeros(2, 32)}, "must agree"),
        ({"workspace": torch.zeros(8)}, "workspace has 8 elements"),
    ],
)
def test_says_what_it_cannot_take(change: dict[str, object], words: str) -> None:
    arguments: dict[str, object] = {
        "hidden": torch.zeros(2, 32, dtype=BF16), "weight": torch.zeros(8, 32, dtype=BF16),
        "rows": 8, "keys_out": torch.zeros(2, dtype=torch.int64), **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        kernels.head_keys(arguments.pop("hidden"), arguments.pop("weight"), **arguments)
