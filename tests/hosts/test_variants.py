# SPDX-License-Identifier: Apache-2.0
"""Drafter variants in real engines: the tokens and the counters are the reference's.

`test_drafters.py` shows for every variant what is built; here the runner around it captures the
hidden states, shares embedding and head, and feeds back what a draft step hands on. Where stock
runs at all, its engine is shown to count otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.assets import variants
from vllm_kimi_eagle3.check import check
from vllm_kimi_eagle3.findings import Finding, Severity

from . import harness
from .conftest import RunJobs
from .harness import Run
from .matrix import BACKPORT, NO_MLA, scenario
from .serving import command_line

# One per thing that the runner has a part in.
KINDS = (
    "aux-output-nested",
    "aux-edges",
    "four-aux-top",
    "eagle31-nested",
    "norm-before-fc",
    "norm-before-residual",
    "no-aux",
    "identity-d2t",
    "own-embed",
    "no-head",
    "short",
)
LLAMA = [f"llama-{kind}" for kind in KINDS] + ["llama-yarn", "speculators-eagle31"]
# Where an engine takes most of a minute.
FEWER = ("aux-output-nested", "aux-edges", "four-aux-top", "eagle31-nested", "no-aux", "no-head")
MLA = [f"mla-{kind}" for kind in FEWER] + ["mla-own-embed", "mla-reduced-vocab"]
V2 = [f"llama-{kind}" for kind in FEWER] + ["llama-identity-d2t"]

# Nothing compiled and, where a release's CPU build can, the engine in the process that asks for
# it: a few seconds each.
QUICK = {"TORCH_COMPILE_DISABLE": "1"}
if not harness.at_least(0, 27):
    QUICK["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

# Without the plugin: one that counts otherwise, and one that does not start. Each alone in its
# process, which an engine that does not start may take with it.
STOCK = ("llama-aux-output-top", "llama-eagle31-nested")


@pytest.fixture(scope="session")
def variant_folders(session_folder: Path) -> Path:
    """Every variant's folder, by its name."""
    folder = session_folder / "variants"
    for name in {*LLAMA, *MLA, *V2, *STOCK, "mla-plain-rope"}:
        if not (folder / name / "config.json").exists():
            variants.write_variant(name, folder / name)
    return folder


def jobs(
    names: list[str] | tuple[str, ...],
    folder: Path,
    prompts: list[list[int]],
    expected: dict[str, Any],
    **arguments: Any,
) -> list[dict[str, Any]]:
    return [
        {
            "engine": harness.engine_arguments(
                drafter=folder / name,
                # The vision tower is profiled for most of a minute otherwise.
                skip_mm_profiling=True,
                distributed_executor_backend="uni",
                **arguments,
            ),
            "prompts": prompts,
            "max_tokens": expected["max_tokens"],
        }
        for name in names
    ]


def assert_reference(run: Run, names: list[str], name: str, expected: dict[str, Any]) -> None:
    """A job's tokens and counters are the reference's for that variant."""
    assert len(run.results) > names.index(name), run.tail()
    result = run.results[names.index(name)]
    assert "tokens" in result, result
    assert result["tokens"] == expected["output_token_ids"]
    row = variants.expected_variant(name)
    counts = {counter: result["spec_decode"].get(counter) for counter in harness.COUNTERS}
    assert counts == {counter: row[counter] for counter in harness.COUNTERS}


@pytest.fixture(scope="session")
def llama_runs(
    run_jobs: RunJobs, variant_folders: Path, prompts: list[list[int]], expected: dict[str, Any]
) -> Run:
    return run_jobs("llama variants", jobs(LLAMA, variant_folders, prompts, expected), env=QUICK)


@pytest.fixture(scope="session")
def mla_runs(
    run_jobs: RunJobs, variant_folders: Path, prompts: list[list[int]], expected: dict[str, Any]
) -> Run:
    asked = jobs(MLA, variant_folders, prompts, expected)
    return run_jobs("mla variants", asked, mla=True, env=QUICK)


@pytest.fixture(scope="session")
def v2_runs(
    run_jobs: RunJobs, variant_folders: Path, prompts: list[list[int]], expected: dict[str, Any]
) -> Run:
    asked = jobs(V2, variant_folders, prompts, expected)
    return run_jobs("llama variants, V2", asked, env=harness.V2_RUNNER)


@scenario("variants")
@pytest.mark.parametrize("name", LLAMA)
def test_llama(name: str, llama_runs: Run, expected: dict[str, Any]) -> None:
    assert_reference(llama_runs, LLAMA, name, expected)


@scenario("variants: MLA")
@pytest.mark.parametrize("name", MLA)
def test_mla(name: str, mla_runs: Run, expected: dict[str, Any]) -> None:
    assert_reference(mla_runs, MLA, name, expected)


@scenario("variants: MLA")
def test_mla_without_yarn(
    run_jobs: RunJobs, variant_folders: Path, prompts: list[list[int]], expected: dict[str, Any]
) -> None:
    """Eager CPU builds rotate an MLA layer's heads wrongly with plain rope, by their own kernel."""
    names = ["mla-plain-rope"]
    custom_ops = {"custom_ops": ["all", "-rotary_embedding"]}
    asked = jobs(names, variant_folders, prompts, expected, compilation_config=custom_ops)
    run = run_jobs("mla plain rope", asked, mla=True, env=QUICK)
    assert_reference(run, names, "mla-plain-rope", expected)


@scenario("variants: V2 runner")
@pytest.mark.parametrize("name", V2)
def test_v2(name: str, v2_runs: Run, expected: dict[str, Any]) -> None:
    assert_reference(v2_runs, V2, name, expected)


@scenario("variants")
@pytest.mark.parametrize("name", STOCK)
def test_stock_counts_otherwise(
    name: str,
    host: str,
    run_jobs: RunJobs,
    variant_folders: Path,
    prompts: list[list[int]],
    expected: dict[str, Any],
) -> None:
    """The test of the tests above: these drafters, without the plugin."""
    if host in BACKPORT:
        pytest.skip("stock has no EAGLE-3 for Kimi here; test_drafters.py shows what is missing")
    run = run_jobs(
        f"stock {name}",
        jobs([name], variant_folders, prompts, expected),
        env={**QUICK, "VLLM_PLUGINS": harness.SHIM_PLUGINS},
    )
    result = run.results[0] if run.results else {}
    if "tokens" in result:
        assert result["tokens"] == expected["output_token_ids"]
    with pytest.raises(AssertionError):
        assert_reference(run, [name], name, expected)


@scenario("variants")
def test_the_log_says_what_was_decided(llama_runs: Run, host: str) -> None:
    assert llama_runs.results
    lines = [line for line in llama_runs.log.splitlines() if "EAGLE-3 drafter" in line]
    (first,) = (line for line in lines if "llama-aux-output-nested:" in line)
    for part in (
        "eagle_config.eagle_aux_hidden_state_layer_ids, says [1, 3, 4], captured [2, 4, 5]",
        "outputs of layers",
        "plain EAGLE-3",
        "rope theta 50000, no scaling",
        "draft vocabulary 320",
        # On 0.15 the proposer decides that in the middle of its load_model.
        *(["embedding the target's, head its own"] if host != "0.15.1" else []),
    ):
        assert part in first
    (norms,) = (line for line in lines if "llama-eagle31-nested:" in line)
    assert "fc_norm, norm_output on" in norms


def against(drafter: Path, cache: Path, **env: str) -> list[Finding]:
    """What `check` finds to be failing or wrong with a drafter, on this host."""
    line = ["vllm", "serve", *command_line(harness.engine_arguments(drafter=drafter))]
    report = check(line, environ=harness.environment(cache, **env))
    return [f for f in report.findings if f.severity in (Severity.FAILS, Severity.WRONG)]


@scenario("variants: check")
def test_check_has_nothing_against_what_starts(
    host: str, variant_folders: Path, cache: Path
) -> None:
    """The drafters of the tests above, which start on this host and are right."""
    started = {*LLAMA} if host != "0.32.0" else {*V2}
    if host not in NO_MLA:
        started |= {*MLA, "mla-plain-rope"}
    found = {name: against(variant_folders / name, cache) for name in sorted(started)}
    assert not {name: findings for name, findings in found.items() if findings}


@scenario("variants: check")
@pytest.mark.parametrize("name", STOCK)
def test_check_knows_what_stock_does(name: str, variant_folders: Path, cache: Path) -> None:
    """Without the plugin these count otherwise or do not start (above)."""
    found = against(variant_folders / name, cache, VLLM_PLUGINS=harness.SHIM_PLUGINS)
    assert "host-patch-not-in-place" in {finding.id for finding in found}
