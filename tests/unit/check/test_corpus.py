# SPDX-License-Identifier: Apache-2.0
"""Every kind of finding: a pair that has it, a near miss that has it not, and the whole report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.findings.catalogue import KINDS

from .corpus import CORPUS, Case, cases, run

# A defect of the check itself: no pair has it (test_check.py provokes it). What `diagnose` and
# `plan` find is of a server that runs: tests/unit/diagnose and tests/unit/planning have its cases.
NO_PAIR = {"host-check-stopped"} | {
    kind.id for kind in KINDS.values() if kind.area in ("diagnose", "plan")
}


def test_every_kind_has_a_pair_and_a_near_miss() -> None:
    found = {str(case) for case in cases()}
    missing = [
        f"{kind}/{stem}" for kind in KINDS.keys() - NO_PAIR for stem in ("has", "not")
        if f"{kind}/{stem}" not in found
    ]  # fmt: skip
    assert not sorted(missing)
    unknown = {case.kind for case in cases()} - KINDS.keys()
    assert not unknown, "a folder of a kind that is gone"


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_report_is_as_written(case: Case, tmp_path: Path) -> None:
    report, page = run(case.read(), tmp_path)
    ids = {finding.id for finding in report.findings}
    assert (case.kind in ids) == (case.file.stem == "has"), page
    assert "host-check-stopped" not in ids, page
    assert page == case.report_file.read_text(encoding="utf-8")
    assert json.loads(json.dumps(report.as_json()))["exit_code"] == report.exit_code
    for finding in report.findings:
        assert "\n" not in finding.text
        assert not finding.fact.endswith("."), "a fact is a sentence without its full stop"
        # What fails or is wrong always says from what it is known, and what to do.
        if finding.severity in (Severity.FAILS, Severity.WRONG):
            assert finding.fix, finding
            assert str(finding.evidence), finding


def test_a_near_miss_is_near() -> None:
    """It differs from the pair that has the finding in a few values only."""
    for case in cases():
        if case.file.stem == "not":
            other = Case(case.file.with_name("has.json"))
            has, near = flat(other.read()), flat(case.read())
            differing = {
                key for key in has.keys() | near.keys() if has.get(key) != near.get(key)
            } - {"about"}
            assert 0 < len(differing) <= 3, (str(case), differing)


def flat(value: object, at: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {at: value}
    parts = [flat(inner, f"{at}.{key}" if at else key) for key, inner in value.items()]
    return {key: inner for part in parts for key, inner in part.items()}


def test_every_key_of_a_case_is_described() -> None:
    """A key that the README does not know is one that the builder does not read either."""
    text = (CORPUS / "README.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\|(.*?)\|", text, re.MULTILINE))))
    for case in cases():
        read = case.read()
        folders = [read[name] for name in ("target", "drafter") if name in read]
        used = {key for part in (read, *folders) for key in part}
        assert used <= known, (str(case), used - known)
