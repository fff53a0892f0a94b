# SPDX-License-Identifier: Apache-2.0
"""Every published drafter, on the releases that differ: nothing is against any, with the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_kimi_eagle3.findings import Severity

from .published import DRAFTERS, FOLDER, page

BAD = (Severity.FAILS, Severity.WRONG)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_what_is_said_of_a_published_drafter(drafter: str, tmp_path: Path) -> None:
    text, found = page(drafter, tmp_path)
    assert text == (FOLDER / f"{drafter}.txt").read_text(encoding="utf-8")
    assert not [finding for finding in found if finding.severity in BAD]


def test_no_page_is_left_over() -> None:
    assert sorted(file.stem for file in FOLDER.iterdir()) == DRAFTERS
