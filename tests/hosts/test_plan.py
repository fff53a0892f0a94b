# SPDX-License-Identifier: Apache-2.0
"""`plan --url --without` against two real servers: the tiny pair, and its target alone.

What a step takes on a CPU is noise, so no gain is asked for: only that every cell was measured,
that acceptance is what the server counted, and that a plan for this release came of it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from vllm_kimi_eagle3 import cli

from . import harness
from .harness import LLAMA_DRAFTER
from .matrix import scenario
from .serving import Server, command_line

BATCHES, CONTEXTS = (1, 4), (60, 250)
K = 3


@scenario("plan")
def test_from_a_sweep_of_two_servers(
    host: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = harness.environment(cache)

    def server(name: str, drafter: Path | None) -> Server:
        words = command_line(harness.engine_arguments(drafter=drafter))
        return Server([*words, "--served-model-name", "tiny"], env, tmp_path / f"{name}.txt")

    with server("with", LLAMA_DRAFTER) as drafting, server("without", None) as plain:
        before = drafting.spec_decode()
        words = ["--url", drafting.url, "--without", plain.url, "--json"]
        words += ["--batch", ",".join(map(str, BATCHES))]
        words += ["--context", ",".join(map(str, CONTEXTS))]
        code = cli.main(["plan", *words])
        counted = drafting.spec_decode()
        assert not plain.spec_decode().get("num_drafts")
    assert not before.get("num_drafts")
    report = json.loads(capsys.readouterr().out)
    said = json.dumps(report, indent=1)
    assert code == report["exit_code"], said
    assert code in (0, 2), said  # Unsure, where the times were.
    assert report["skipped"] == [], said
    assert report["vllm"].startswith(host)
    assert report["model"] is not None, said
    # As the server counted it; the answers of one token that fill its cache verify no drafts.
    assert report["rates"] == pytest.approx(
        [count / counted["num_drafts"] for count in counted["num_accepted_tokens_per_pos"]]
    )
    gains = {(one["batch"], one["context"], one["k"]): one for one in report["gains"]}
    assert {(batch, context) for batch, context, _ in gains} == {
        (batch, context) for batch in BATCHES for context in {one[1] for one in gains}
    }
    for (_, _, k), gain in gains.items():
        assert 0 < gain["low"] <= gain["gain"] <= gain["high"]
        assert math.isfinite(gain["high"])
        assert gain["measured"] == (k <= K)
        assert k or gain["gain"] == 1
    assert 0 <= report["num_speculative_tokens"] <= K
    if report["num_speculative_tokens"]:
        given = json.loads(report["flags"]["static"].partition("'")[2].rstrip("'"))
        assert given["num_speculative_tokens"] == report["num_speculative_tokens"]
