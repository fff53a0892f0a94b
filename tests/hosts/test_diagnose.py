# SPDX-License-Identifier: Apache-2.0
"""`diagnose --url` against a real `vllm serve`: healthy pairs, and each way to break one.

A server takes a minute to start, so each host has a few of the cases; together they have all. What
acceptance should be is a report of a good day, as a user would have kept it: the reference's counts
of the pair that is right. A drafter that is wrong by a layer accepts more here than any published
one, so without such a report nobody could tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.assets import variants
from vllm_kimi_eagle3 import cli
from vllm_kimi_eagle3.diagnose import drive

from . import harness
from .harness import LLAMA_DRAFTER, MLA_DRAFTER
from .matrix import scenario
from .serving import Server, command_line

pytestmark = scenario("diagnose")

REACH, SHORT, LONG, ANSWER = 100, 20, 124, 40


def layers(*ids: int) -> dict[str, Any]:
    """The plugin's setting: other aux layers than the drafter was trained with."""
    return {"additional_config": {"kimi_eagle3": {"aux_hidden_state_layers": list(ids)}}}


def variant(name: str, way: str | None = None) -> Callable[[Path], Path]:
    """Writes a variant, or one that is read wrongly in one way."""

    def write(folder: Path) -> Path:
        right = variants.write_variant(name, folder / "right")
        if way is None:
            return right
        wrong = variants.VARIANTS[name].wrong[way]
        return variants.edit_drafter(
            right, folder / "wrong", wrong.config, wrong.remove, wrong.tensors
        )

    return write


def without_d2t(folder: Path) -> Path:
    """The Llama drafter, whose map of the draft vocabulary got lost."""

    def drop(tensors: variants.Tensors) -> variants.Tensors:
        return {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}

    return variants.edit_drafter(LLAMA_DRAFTER, folder / "wrong", tensors=drop)


@dataclass(frozen=True)
class Case:
    """A server and what is to be said of it.

    Attributes:
        hosts: that have it.
        right: the row of `expected.json` that a good day would have had.
        found: the findings; none for a healthy pair.
        drafter: writes it.
        engine: further arguments of the engine.
        speculative: further keys of the speculative config.
        disabled: patches that would refuse it.
        mla: leave MLA on.
        lengths: with short and long prompts.
    """

    hosts: tuple[str, ...]
    right: str = LLAMA_DRAFTER.name
    found: frozenset[str] = frozenset()
    drafter: Callable[[Path], Path] = lambda folder: LLAMA_DRAFTER
    engine: Mapping[str, Any] = field(default_factory=dict)
    speculative: Mapping[str, Any] = field(default_factory=dict)
    disabled: str = ""
    mla: bool = False
    lengths: bool = False


FEATURES = frozenset({"diagnose-features"})
CASES = {
    "healthy": Case(("0.17.1", "0.26.0", "0.32.0")),
    "aux layers + 1": Case(("0.17.1",), found=FEATURES, engine=layers(3, 5, 6)),
    "aux layers - 1": Case(("0.26.0",), found=FEATURES, engine=layers(1, 3, 4)),
    "norm_output ignored": Case(
        ("0.17.1", "0.26.0"),
        right="llama-norm-output",
        found=frozenset({"diagnose-recurrence"}),
        drafter=variant("llama-norm-output", "norm_output ignored"),
    ),
    "rope theta": Case(
        ("0.32.0",),
        right="mla-yarn-5x",
        found=FEATURES,
        drafter=variant("mla-yarn-5x", "theta 10000"),
        mla=True,
    ),
    "another head": Case(
        ("0.32.0",),
        right="llama-own-head",
        found=FEATURES,
        drafter=variant("llama-own-head", "the target's head"),
    ),
    "no d2t": Case(
        ("0.26.0",),
        found=frozenset({"diagnose-nothing-accepted"}),
        drafter=without_d2t,
        disabled="draft-vocabulary,drafter-tensors",
    ),
    "length gate": Case(
        ("0.17.1",),
        found=frozenset({"diagnose-drafting-stops"}),
        speculative={"max_model_len": REACH},
        lengths=True,
    ),
    "healthy MLA": Case(
        ("0.32.0",), right=MLA_DRAFTER.name, drafter=lambda folder: MLA_DRAFTER, mla=True
    ),
}


def test_every_case_has_a_host() -> None:
    assert {host for case in CASES.values() for host in case.hosts} == {
        "0.17.1", "0.26.0", "0.32.0"
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_named(
    name: str,
    host: str,
    tmp_path: Path,
    cache: Path,
    prompts: list[list[int]],
    expected: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = CASES[name]
    if host not in case.hosts:
        pytest.skip(f"{name}: on {', '.join(case.hosts)}")
    drafter = case.drafter(tmp_path)
    arguments = harness.engine_arguments(drafter=drafter, **case.engine)
    arguments["speculative_config"].update(case.speculative)
    env = harness.environment(cache, mla=case.mla)
    if case.disabled:
        env["VLLM_KIMI_EAGLE3_DISABLE"] = case.disabled
    asked = _prompts(tmp_path, prompts, expected, case.lengths)
    tokens = ANSWER if case.lengths else expected["max_tokens"]
    words = ["--prompts", str(asked), "--tokens", str(tokens)]
    if not case.lengths:  # Other prompts than those of a good day.
        words += ["--expect", str(_good_day(tmp_path, case.right, asked, tokens))]
    log = tmp_path / "log.txt"
    with Server([*command_line(arguments), "--served-model-name", "tiny"], env, log) as server:
        code = cli.main(["diagnose", "--url", server.url, *words, "--json"])
        counted = server.spec_decode()
    report = json.loads(capsys.readouterr().out)
    found = {finding["id"]: finding for finding in report["findings"]}
    assert set(found) == case.found, json.dumps(report, indent=1)
    assert code == report["exit_code"] == (1 if case.found else 0)
    # What was counted is what the server counts, by the reference where that has the row.
    assert report["drafts"] == counted["num_drafts"]
    assert report["accepted"] == counted["num_accepted_tokens_per_pos"]
    assert report["vllm"].startswith(host)
    if not case.found:
        row = variants.expected_run(case.right)
        assert report["drafts"] == row["num_drafts"]
        assert report["accepted"] == row["num_accepted_tokens_per_pos"]
        assert report["drafted_share"] == 1.0
        assert report["tokens_per_second"] > 0
    for finding in found.values():
        assert finding["fix"]
        assert finding["evidence"]["value"]


def _prompts(
    folder: Path, prompts: list[list[int]], expected: dict[str, Any], lengths: bool
) -> Path:
    """The prompts as token ids; for a limit of length short ones, and ones beyond it."""
    ids = prompts
    if lengths:
        whole = [
            prompt + output
            for prompt, output in zip(prompts, expected["output_token_ids"], strict=True)
        ]
        ids = [tokens[:length] for tokens in whole for length in (SHORT, LONG)]
        assert SHORT + ANSWER + 3 < REACH < LONG
    file = folder / "prompts.json"
    file.write_text(json.dumps([{"token_ids": tokens, "ignore_eos": True} for tokens in ids]))
    return file


def _good_day(folder: Path, right: str, asked: Path, tokens: int) -> Path:
    """A report as `diagnose --json` would have written it of the pair that is right."""
    row = variants.expected_run(right)
    values = [count / row["num_drafts"] for count in row["num_accepted_tokens_per_pos"]]
    file = folder / "good.json"
    report = {
        "prompts": drive.digest(drive.read_prompts(asked), tokens),
        "positions": [{"value": value} for value in values],
    }
    file.write_text(json.dumps(report))
    return file
