# SPDX-License-Identifier: Apache-2.0
"""The stated model: what it must do whatever its constants, and what docs/check-cost.md says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.check import cost
from vllm_kimi_eagle3.check.attention import choices
from vllm_kimi_eagle3.check.cost import (
    Machine,
    Verify,
    Work,
    break_even,
    draft_seconds,
    findings,
    machine,
    speed_up,
    target_seconds,
    work_of,
)
from vllm_kimi_eagle3.check.memory import drafter_bytes
from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.host import SUPPORTED

from .subjects import B200, H200, KIMI, SM120, ids, only, read, subject

PAGE = Path(__file__).parents[3] / "docs" / "check-cost.md"
ROWS = PAGE.parents[1] / "benchmarks" / "results" / "mla_decode.jsonl"
EIGHT = ("--tensor-parallel-size", "8")


def reckoned(*args: Any, **kwargs: Any) -> tuple[Work, Machine]:
    one = subject(*args, **kwargs)
    gpu, found = machine(one), choices(one)
    assert gpu is not None
    assert found is not None
    work = work_of(one, found, gpu)
    assert work is not None
    return work, gpu


@pytest.fixture(scope="module")
def rtx() -> tuple[Work, Machine]:
    """The machine of the published table: a verify step in the decode path, fp8 KV cache."""
    return reckoned("0.33.0", *EIGHT, "--kv-cache-dtype", "fp8")


def test_kimis_sizes(rtx: tuple[Work, Machine]) -> None:
    """Of one of eight ranks: 61 layers, 384 experts of 4.5 bits, an MLA cache of 576 elements."""
    work, _ = rtx
    assert work.layers == 61
    assert work.expert_bytes * 8 == pytest.approx(571e9, rel=0.01)
    assert work.kv_bytes == 61 * 576
    # 32 billion active parameters, two operations each; some weights are on every rank.
    assert 2 * 32e9 / 8 < work.flops < 1.25 * 2 * 32e9 / 8
    assert work.verify == "rows"


QUANTISED: list[dict[str, Any] | None] = [
    None,
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "compressed-tensors", "config_groups": {
        "a": {"weights": {"num_bits": 4, "group_size": 32, "type": "int"}}}},
]  # fmt: skip


def test_a_weight_is_two_operations_whatever_its_bits() -> None:
    works = []
    for stated in QUANTISED:
        text = {k: v for k, v in read(KIMI)["text_config"].items() if k != "quantization_config"}
        edit = {"text_config": text, "quantization_config": stated}
        works.append(reckoned("0.33.0", *EIGHT, target=edit)[0])
    assert len({work.flops for work in works}) == 1
    assert len({work.other_bytes for work in works}) > 2


def test_what_a_draft_reads(rtx: tuple[Work, Machine]) -> None:
    """fc lies whole on each rank and is read once a step; so does what memory counts there."""
    work, gpu = rtx
    assert work.joining_bytes == 2 * 7168 * 3 * 7168
    one = subject("0.33.0", *EIGHT, "--kv-cache-dtype", "fp8")
    embedding = 2 * 163840 * 7168 / 8
    assert work.drafter_bytes + work.joining_bytes == pytest.approx(
        drafter_bytes(one)[0] - embedding, abs=2
    )
    slow = replace(gpu, bandwidth=1e9)
    one_more = draft_seconds(work, slow, 1, 0, 2) - draft_seconds(work, slow, 1, 0, 1)
    assert one_more == pytest.approx(work.drafter_bytes / 0.7e9)


@pytest.mark.parametrize("verify", ["once", "rows", "prefill"])
@given(
    batch=st.integers(1, 500),
    context=st.integers(0, 200_000),
    drafts=st.integers(1, 16),
)
def test_more_work_takes_longer(
    rtx: tuple[Work, Machine], verify: Verify, batch: int, context: int, drafts: int
) -> None:
    work, gpu = replace(rtx[0], verify=verify), rtx[1]
    plain = target_seconds(work, gpu, batch, context)
    step = target_seconds(work, gpu, batch, context, drafts + 1)
    assert 0 < plain < step
    assert plain < target_seconds(work, gpu, batch + 1, context)
    assert plain < target_seconds(work, gpu, batch, context + 1000)
    assert draft_seconds(work, gpu, batch, context, drafts) < draft_seconds(
        work, gpu, batch, context, drafts + 1
    )
    faster = replace(gpu, bandwidth=2 * gpu.bandwidth, compute=2 * gpu.compute)
    assert target_seconds(work, faster, batch, context) < plain
    assert speed_up(work, gpu, batch, context, drafts) < drafts + 1
    assert speed_up(work, gpu, batch, context, drafts, acceptance=0.0) < 1


def test_break_even_is_where_it_says(rtx: tuple[Work, Machine]) -> None:
    work, gpu = rtx
    batch = break_even(work, gpu, 32_000, 3)
    assert batch is not None
    assert speed_up(work, gpu, batch, 32_000, 3) < 1 <= speed_up(work, gpu, batch - 1, 32_000, 3)
    assert break_even(work, gpu, 32_000, 3, acceptance=0.01) == 1
    assert break_even(replace(work, verify="once"), gpu, 1_000, 1, acceptance=1.0) is None


def test_longer_contexts_break_even_earlier(rtx: tuple[Work, Machine]) -> None:
    work, gpu = rtx
    at = [break_even(work, gpu, length, 3) or 10**6 for length in (200, 16_000, 64_000, 128_000)]
    assert at == sorted(at, reverse=True)
    assert at[0] > 4 * at[2]


# Context in thousands: tokens a second at batch 1, 2, 4, ... without drafts and with three.
PUBLISHED = {
    0: ([91.5, 151.3, 242.6, 350.0, 492.7, 858.8, 1398.0, 2164.7],
        [112.5, 176.0, 261.4, 454.5, 729.7, 1104.0, 1602.2, 2044.3]),
    16: ([84.6, 141.3, 218.7, 318.2, 429.1, 700.0, 1018.1, 1397.9],
         [99.4, 163.9, 227.4, 384.3, 542.3, 730.9, 905.9, 1143.2]),
    32: ([79.6, 133.3, 198.9, 286.1, 381.5, 573.1, 763.9, 1016.2],
         [102.5, 146.1, 194.8, 309.2, 419.3, 512.2, 603.2, 810.8]),
    64: ([70.5, 119.2, 171.1, 246.6, 318.2, 445.2, 509.0, 635.1],
         [99.5, 127.3, 162.1, 231.7, 288.2, 364.6, 454.0, 409.1]),
    128: ([56.7, 99.3, 135.1, 191.0, 238.3, 286.5, 318.2, 381.3],
          [73.6, 109.3, 117.3, 159.0, 191.3, 301.1, 215.2, 395.5]),
}  # fmt: skip


@pytest.mark.parametrize("thousands", PUBLISHED)
def test_the_page_says_how_far_off_the_model_is(thousands: int, rtx: tuple[Work, Machine]) -> None:
    """docs/check-cost.md: a row for each context, of the model's numbers and the published ones."""
    work, gpu = rtx
    context = max(200, thousands * 1024)
    plain, drafted = PUBLISHED[thousands]
    batches = [2**i for i in range(8)]
    rates = [
        b / target_seconds(work, gpu, b, context) / p for b, p in zip(batches, plain, strict=True)
    ]
    gains = [speed_up(work, gpu, b, context, 3) / (d / p)
             for b, p, d in zip(batches, plain, drafted, strict=True)]  # fmt: skip
    row = next(
        line for line in PAGE.read_text().splitlines() if re.match(rf"\| {thousands}k? \|", line)
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2] == str(break_even(work, gpu, context, 3))
    assert cells[3] == f"{min(rates):.2f} to {max(rates):.2f}"
    assert cells[4] == f"{min(gains):.2f} to {max(gains):.2f}"


def test_the_other_numbers_on_the_page(rtx: tuple[Work, Machine]) -> None:
    text = " ".join(PAGE.read_text().split())

    def rates(work: Work, gpu: Machine, acceptance: float) -> str:
        length = sum(acceptance**i for i in range(4))
        at = [
            length / (target_seconds(work, gpu, 1, c, 4) + draft_seconds(work, gpu, 1, c, 3))
            for c in (2 * 1024, 10 * 1024, 30 * 1024)
        ]
        return f"the model says {at[0]:.0f}, {at[1]:.0f} and {at[2]:.0f}"

    old = reckoned("0.26.0", *EIGHT, "--kv-cache-dtype", "fp8")
    assert f"{rates(*old, 0.75)} for 0.26" in text
    assert rates(*rtx, 0.62) in text
    each = [break_even(*rtx, max(200, n * 1024), 3, acceptance=0.62) for n in PUBLISHED]
    assert f"the model says {', '.join(map(str, each[:-1]))} and {each[-1]}." in text
    language = {k: v for k, v in read(KIMI)["text_config"].items() if k != "quantization_config"}
    stated = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["self_attn"]}
    edit = {"text_config": language, "quantization_config": stated}
    four = ("--tensor-parallel-size", "4")
    work, gpu = reckoned("0.33.0", *four, gpu="sm_100,192GB,4", target=edit)
    plain, gain = 16 / target_seconds(work, gpu, 16, 1000), speed_up(work, gpu, 16, 1000, 3)
    assert f"the model says {plain:,.0f} and {gain:.2f}." in text


def test_the_constants_are_on_the_page() -> None:
    text = PAGE.read_text()
    for constant in ("0.75", "0.70", "0.08", "0.40", "125", "45", "0.90"):
        assert constant in text
    for table in cost._PLUGIN_READS.values():
        for plain, verify in table.values():
            assert f"{plain / 1e9:.1f}, {verify / 1e9:.1f}" in text


def test_the_plugins_constants_are_those_of_the_rows() -> None:
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    for table, name in (("99 KB", "sm_120"), ("more", "sm_90")):
        for (size, kv), (step, query_len) in product(((2, "bf16"), (1, "fp8")), ((0, 1), (1, 4))):
            row = next(
                row
                for row in rows
                if (row["kv"], row["heads"], row["batch"]) == (kv, 8, 16)
                and (row["ctx"], row["query_len"], row["page"]) == (30000, query_len, 64)
            )
            read = 16 * 30000 * 576 * size / (row[name]["us"]["median"] * 1e-6) / 132
            assert cost._PLUGIN_READS[table][size][step] == pytest.approx(read, rel=0.02)


PLUGIN = {"mla-attention": True}
FP8 = ("--kv-cache-dtype", "fp8")


@pytest.mark.parametrize("release", SUPPORTED)
def test_the_plugins_kernel_reads_the_cache_once(release: str) -> None:
    for words, shares in (((), (0.9, 0.9)), (FP8, (0.9, pytest.approx(0.8, abs=0.01)))):
        work, _ = reckoned(release, *EIGHT, *words, patches=PLUGIN)
        assert work.verify == "once"
        assert (work.cache_share, work.verify_cache_share) == shares
        assert work.verify_layer_seconds == work.layer_seconds
    # With context parallelism a verify step is vLLM's own prefill.
    work, _ = reckoned(release, *EIGHT, "-dcp", "8", patches=PLUGIN)
    assert work.verify == "prefill"
    assert (work.cache_share, work.verify_cache_share) == (0.9, 0.4)
    assert work.verify_layer_seconds > work.layer_seconds
    stock, _ = reckoned(release, *EIGHT)
    assert stock.verify == ("rows" if release in ("0.31.0", "0.32.0", "0.33.0") else "prefill")
    assert (stock.cache_share, stock.verify_cache_share) == (0.4, 0.4)


def test_a_verify_step_takes_the_share_of_verify_steps(rtx: tuple[Work, Machine]) -> None:
    gpu = rtx[1]
    work = replace(rtx[0], verify="once", cache_share=1.0, verify_cache_share=0.5)
    longer = [
        target_seconds(work, gpu, 1, 10_000, q) - target_seconds(work, gpu, 1, 0, q) for q in (1, 4)
    ]
    assert longer[1] == pytest.approx(2 * longer[0])


# ------------------------------------------------------------------------------------ the finding


@pytest.mark.parametrize("release", SUPPORTED)
@pytest.mark.parametrize("gpu", [SM120, H200, B200])
def test_there_is_one_answer(release: str, gpu: str) -> None:
    finding = only(findings(subject(release, *EIGHT, gpu=gpu)), "run-break-even")
    assert "reckoned, not measured" in finding.fact
    loses = "it loses at every batch" in finding.fact
    assert finding.severity is (Severity.SLOW if loses else Severity.NOTE)


def test_a_verify_step_as_a_prefill_loses_at_long_contexts() -> None:
    fact = only(findings(subject("0.26.0", *EIGHT)), "run-break-even").fact
    assert "with 32,000 tokens at every batch" in fact
    fact = only(findings(subject("0.26.0", *EIGHT, gpu=H200)), "run-break-even").fact
    assert "with 32,000 tokens at every batch" not in fact


def test_where_drafting_is_slower_than_not_drafting() -> None:
    words = (*EIGHT, "-dcp", "8", "--kv-cache-dtype", "fp8")
    finding = only(findings(subject("0.26.0", *words, gpu=H200)), "run-break-even")
    assert finding.severity is Severity.SLOW
    assert finding.fix == "do what run-verify-prefill says, or leave out --speculative-config"


def test_more_drafts_than_pay() -> None:
    assert "run-many-drafts" in ids(findings(subject("0.33.0", *EIGHT, k=12)))
    finding = only(findings(subject("0.33.0", *EIGHT, k=12)), "run-many-drafts")
    match = re.fullmatch(r'use "num_speculative_tokens": (\d)', finding.fix)
    assert match is not None
    # One more than is best costs less than the model can tell.
    for k in range(1, int(match[1]) + 2):
        assert "run-many-drafts" not in ids(findings(subject("0.33.0", *EIGHT, k=k)))


def test_nothing_is_reckoned_where_something_is_not_known() -> None:
    assert ids(findings(subject("0.33.0", gpu=None))) == []
    assert ids(findings(subject("0.33.0", gpu="sm_75"))) == []
    assert ids(findings(subject("0.33.0", drafter=None))) == []
    assert ids(findings(subject("0.33.0", target={"text_config": {}}))) == []
    assert ids(findings(subject("0.33.0", "--attention-backend", "FLASHMLA"))) == []
