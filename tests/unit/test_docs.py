# SPDX-License-Identifier: Apache-2.0
"""The pages that are written from the code are as the code says, and the prose's links lead on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("**/*.md")]


def test_generated_pages_are_current() -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_a_file(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not link.startswith(("https://", "mailto:")):
            assert (page.parent / link).exists(), link


def test_the_matrixs_end_to_end_hosts_are_those_that_nox_runs() -> None:
    noxfile = (REPOSITORY / "noxfile.py").read_text(encoding="utf-8")
    named = re.search(r"^OVERRIDES = \{(.*?)^\}", noxfile, re.MULTILINE | re.DOTALL)
    assert named is not None
    sys.path.insert(0, str(REPOSITORY / "tools"))
    try:
        import docs
    finally:
        sys.path.pop(0)
    assert tuple(re.findall(r'"([\d.]+)":', named.group(1))) == docs.END_TO_END
