# SPDX-License-Identifier: Apache-2.0
"""The report as a whole, the command line of the program, and what it may cost."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3 import check as package
from vllm_kimi_eagle3 import cli
from vllm_kimi_eagle3.check import Gpus, check
from vllm_kimi_eagle3.check.gpus import find_gpus, parse_gpus
from vllm_kimi_eagle3.check.report import explain
from vllm_kimi_eagle3.check.subject import GIB
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity
from vllm_kimi_eagle3.findings.catalogue import KINDS
from vllm_kimi_eagle3.findings.lines import printable
from vllm_kimi_eagle3.host import Host

from .corpus import run

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


# ------------------------------------------------------------------------------------ findings


def test_kinds_are_well_formed() -> None:
    for name, kind in KINDS.items():
        assert name == kind.id
        assert kind.area in {
            "host", "command", "files", "target", "drafter", "run", "memory", "diagnose", "plan"
        }  # fmt: skip
        assert kind.title
        assert not kind.title.endswith(".")
        assert len(kind.explanation) > 100, name
        assert "  " not in kind.explanation, f"{name}: a line that was continued badly"
        assert all(link.startswith("https://") for link in kind.upstream)
        if kind.undecided:
            assert kind.severity is Severity.NOTE, f"{name}: what could not be told is no fault"


def test_every_kind_that_the_code_names_is_there() -> None:
    """And none is there that nothing names: ids are written once in words, and looked up."""
    root = Path(package.__file__).parents[1]
    named = set()
    for file in root.rglob("*.py"):
        if file.parent.name != "findings":
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    named.add(node.value)
    assert not KINDS.keys() - named


def test_a_line_for_a_log_ends_with_the_id() -> None:
    finding = Finding("host-two-vllms", "two are here", "uninstall both")
    assert finding.text == "two are here; uninstall both [host-two-vllms]"
    assert Finding("host-two-vllms", "two are here").text == "two are here [host-two-vllms]"


def test_evidence_in_words() -> None:
    assert str(Evidence("config.json", "a.b", "3", "0.26.0")) == "config.json, vLLM 0.26.0: a.b = 3"
    assert str(Evidence(key="--x")) == "--x"
    assert str(Evidence()) == ""


# ---------------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("sm_120,96GiB,8", Gpus("sm_120", (12, 0), 96 * GIB, 8)),
        ("sm_90, 141 GB, 2", Gpus("sm_90", (9, 0), 141 * 10**9, 2)),
        ("12.1,128GiB", Gpus("sm_121", (12, 1), 128 * GIB, 0)),
        ("sm_100a", Gpus("sm_100", (10, 0), 0, 0)),
        ("89,24576MiB,4", Gpus("sm_89", (8, 9), 24 * GIB, 4)),
    ],
)
def test_gpus_as_the_user_writes_them(text: str, gpus: Gpus) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize("text", ["", "h100", "sm_120,96", "sm_120,96GiB,0", "sm_90,1GiB,1,1"])
def test_what_is_no_gpu(text: str) -> None:
    with pytest.raises(ValueError, match="--gpu"):
        parse_gpus(text)


@given(st.text(max_size=40))
def test_any_text_is_gpus_or_an_error(text: str) -> None:
    said = ""
    try:
        assert parse_gpus(text).count >= 0
    except ValueError as error:
        said = str(error)
    assert not said or "--gpu" in said


def driver(folder: Path, script: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def test_gpus_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock of the driver's program: there is no such card where this runs."""
    card = "NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887, 12.0"
    environ = driver(tmp_path, f"echo '{card}'; echo '{card}'; echo '{card}'")
    monkeypatch.setenv("PATH", environ["PATH"])
    name = card.split(",")[0]
    assert find_gpus({}) == Gpus(name, (12, 0), 97887 * 1024**2, 3)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}) == Gpus(name, (12, 0), 97887 * 1024**2, 2)
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) is None


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", "echo 'a, b, c'", ""])
def test_a_driver_that_does_not_answer(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", driver(tmp_path, script)["PATH"])
    assert find_gpus({}) is None


# -------------------------------------------------------------------------------------- report


def test_exit_codes_and_order(tmp_path: Path) -> None:
    report, _ = run({"about": "", "vllm": "0.26.0"}, tmp_path)
    bad = Finding("host-two-vllms", "x")
    untold = Finding("host-no-vllm", "x")
    empty = report.including(())
    fine = [f for f in empty.findings if f.severity is Severity.NOTE and not f.kind.undecided]
    clean = type(report)(**{**vars(report), "findings": tuple(fine)})
    assert clean.exit_code == 0
    assert clean.including([untold]).exit_code == 2
    offline = Finding("host-no-vllm", "x", rated=Severity.FAILS)
    assert clean.including([offline]).exit_code == 1, "what is rated worse is no longer untold"
    assert "will fail" in clean.including([offline]).verdict
    both = clean.including([untold, bad])
    assert both.exit_code == 1
    assert both.findings[0] == bad, "the worst first"
    assert both.including([bad]) == both, "said once"


def test_what_a_terminal_would_act_on_is_escaped(tmp_path: Path) -> None:
    assert printable("a\x1b[31m\n\udc80é") == "a\\x1b[31m\\n\\udc80é"
    command = ["serve", "no\x1b[2Jthing\n", "--speculative-config", '{"method":"eagle3\x07"}']
    text = check(command, vllm="0.26.0", environ=NO_GPU).as_text()
    assert all(line.isprintable() for line in text.split("\n"))


def test_a_defect_in_one_check_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Any:
        yield Finding("host-two-vllms", "before the defect")
        raise RuntimeError("a defect\nof ours")

    broken.__module__ = "vllm_kimi_eagle3.check.broken"
    monkeypatch.setattr(package, "CHECKS", (broken, *package.CHECKS))
    report = check("m", vllm="0.26.0", environ=NO_GPU)
    ids = [finding.id for finding in report.findings]
    assert {"host-check-stopped", "host-two-vllms", "command-no-speculation"} <= set(ids)
    (stopped,) = (f for f in report.findings if f.id == "host-check-stopped")
    assert "the check of broken stopped" in stopped.fact
    assert "\n" not in stopped.fact


def test_json_is_the_report(tmp_path: Path) -> None:
    report, _ = run({"about": "", "vllm": "0.17.1", "gpu": "sm_120,96GiB,8"}, tmp_path)
    data = json.loads(json.dumps(report.as_json()))
    assert data["schema_version"] == 1
    assert data["vllm"] == {"name": "vLLM 0.17.1", "release": "0.17.1", "runner": "V1"}
    assert data["exit_code"] == report.exit_code
    assert [f["id"] for f in data["findings"]] == [f.id for f in report.findings]
    for finding in data["findings"]:
        assert set(finding) == {
            "id", "severity", "undecided", "fact", "fix", "evidence", "upstream"
        }  # fmt: skip
        assert set(finding["evidence"]) == {"file", "key", "value", "release"}


def test_explanations_can_be_read() -> None:
    for kind in KINDS.values():
        text = explain(kind)
        assert text.startswith(kind.id)
        assert all(len(line) <= 100 for line in text.splitlines()[1:] if "http" not in line)


# ------------------------------------------------------------------------------- the program


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("m --json", {"json": True, "words": ["m"]}),
        ("--vllm 0.26.0 --gpu=sm_90 vllm serve m", {"vllm": "0.26.0", "gpu": "sm_90"}),
        ("vllm serve m --host 0.0.0.0 --port 80", {"host": False}),
        ("vllm serve m --host --json", {"host": True, "json": True}),
        ("--host vllm serve m", {"host": True, "words": ["vllm", "serve", "m"]}),
        ("--host org/model", {"host": True, "words": ["org/model"]}),
        ("vllm serve m --host=::", {"host": False, "words": ["vllm", "serve", "m", "--host=::"]}),
        ("m --gpu", {"problem": "--gpu needs a value"}),
        ("m --gpu-memory-utilization 0.9", {"gpu": None}),
    ],
)
def test_our_options_among_those_of_vllm(words: str, ours: dict[str, Any]) -> None:
    options = cli.split_options(words.split())
    assert {name: getattr(options, name) for name in ours} == ours


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["m", "--vllm", "9.9"], "9.9"),
        (["m", "--gpu", "h100"], "sm_120"),
        (["--explain", "host-two-vlms"], "host-two-vllms"),
        (["m", "--host", "--vllm", "0.26.0"], "--host"),
        (["--json"], "command"),
    ],
)
def test_a_wrong_use_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *words]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err


def test_help_and_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--help"]) == 0
    assert "exit code" in capsys.readouterr().out
    assert cli.main(["check", "--explain", "run-fp8-shared-memory"]) == 0
    assert "101,376" in capsys.readouterr().out


def test_the_program_prints_what_the_library_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = f'vllm serve {tmp_path} --speculative-config \'{{"method": "eagle3"}}\''
    report = check(line, vllm="0.26.0")
    assert cli.main(["check", "--vllm", "0.26.0", line]) == report.exit_code
    assert capsys.readouterr().out == report.as_text() + "\n"
    assert cli.main(["check", "--json", "--vllm", "0.26.0", line]) == report.exit_code
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report.as_json()))


def test_nothing_heavy_is_imported() -> None:
    """Neither vLLM nor torch: the answer has to be there in seconds."""
    code = (
        "import sys\n"
        "from vllm_kimi_eagle3.check import check\n"
        "check('m --speculative-config {}', vllm='0.26.0')\n"
        "print([m for m in ('vllm', 'torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.stdout.strip() == "[]", answer.stderr


@given(st.text(max_size=200))
def test_any_line_gives_a_report(line: str) -> None:
    report = check(line, vllm="0.26.0", environ=NO_GPU)
    assert "host-check-stopped" not in {finding.id for finding in report.findings}, report.as_text()


FLAG_WORDS = st.sampled_from(
    ["vllm", "serve", "m", "--speculative-config", "{}", '{"method":"eagle3"}', "--model", "-tp",
     "8", "--tensor-parallel-size", "--kv-cache-dtype", "fp8", "--max-model-len", "-1", "1e9",
     "--speculative-config.model", "/", "--config", "--enforce-eager", "--no-async-scheduling",
     "--gpu-memory-utilization", "nan", "--compilation-config", "[]", "-O3", "\x00", "--=", "="]
)  # fmt: skip


@given(st.lists(FLAG_WORDS, max_size=12), st.sampled_from(["0.15.1", "0.22.1", "0.33.0"]))
def test_any_words_give_a_report(words: list[str], release: str) -> None:
    gpus = Gpus("sm_120", (12, 0), 96 * GIB, 8)
    report = check(words, vllm=release, environ=NO_GPU, gpus=gpus)
    assert "host-check-stopped" not in {finding.id for finding in report.findings}, report.as_text()


@pytest.mark.parametrize("part", ["parse", "facts_of", "find_gpus"])
def test_a_defect_before_the_checks_is_a_finding_too(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stock = getattr(package, part)

    def broken(*arguments: Any) -> Any:
        if part == "parse" and not arguments[0]:
            return stock(*arguments)
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr(package, part, broken)
    monkeypatch.setattr(package, "find_host", lambda: Host(tmp_path, (("vllm", "0.26.0"),), ""))
    report = check("m --speculative-config '{}'", environ={})
    assert "host-check-stopped" in {finding.id for finding in report.findings}


@pytest.mark.parametrize("value", ["²", "1" * 5000, "yes", "-1", "\uff11"])
def test_odd_values_of_the_runner_switch(value: str) -> None:
    """`²` is a digit to str.isdigit and none to int."""
    environ = {**NO_GPU, "VLLM_USE_V2_MODEL_RUNNER": value, "VLLM_PP_LAYER_PARTITION": value}
    line = 'm --pipeline-parallel-size 2 --speculative-config \'{"method":"eagle3"}\''
    report = check(line, vllm="0.30.0", environ=environ)
    assert "host-check-stopped" not in {finding.id for finding in report.findings}


def program(*words: str, **how: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "vllm_kimi_eagle3.cli", "check", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, cwd=ROOT, **how)


ROOT = Path(package.__file__).parents[2]
SPECULATIVE = '{"method": "eagle3", "model": "/ünï 漢/d", "num_speculative_tokens": 3}'
NOT_HERE = ("--vllm", "0.26.0", "m", "--speculative-config", SPECULATIVE)


def test_output_that_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    answer = program(*NOT_HERE, stdout=writer)
    os.close(writer)
    assert (answer.returncode, answer.stderr) == (1, b"")


def test_output_that_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full:
        answer = program(*NOT_HERE, stdout=full)
    assert answer.returncode == 74
    assert answer.stderr.count(b"\n") == 1


def test_no_output_at_all() -> None:
    answer = program(*NOT_HERE, preexec_fn=lambda: os.close(1))
    assert (answer.returncode, answer.stderr) == (1, b"")


def test_output_in_ascii() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    answer = program(*NOT_HERE, stdout=subprocess.PIPE, env=env)
    assert (answer.returncode, answer.stderr) == (1, b"")
    assert b"/\\xfcn\\xef \\u6f22/d" in answer.stdout


@pytest.mark.parametrize(
    ("release", "said"),
    [("v0.26.0", ""), ("0.26", ""), ("0.22.0", "0.22.1"), ("0.14.0", "0.15.1"), ("x\n", "0.15.1")],
)
def test_releases_as_the_user_writes_them(
    release: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli.main(["check", "m", "--vllm", release])
    err = capsys.readouterr().err
    assert (code == 64) == bool(said)
    assert said in err
    assert err.count("\n") == bool(said)
