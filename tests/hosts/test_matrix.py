# SPDX-License-Identifier: Apache-2.0
"""The table in `matrix.py` is whole: this host is in it, and every row has a test."""

from __future__ import annotations

import pytest

from . import harness, matrix


def test_host_is_known() -> None:
    assert harness.host_release() in matrix.HOSTS


def test_every_scenario_has_a_test(request: pytest.FixtureRequest) -> None:
    if len({item.path for item in request.session.items}) < 2:
        pytest.skip("only this file was collected")
    tested = {m.args[0] for item in request.session.items for m in item.iter_markers("scenario")}
    assert set(matrix.SCENARIOS) - tested == set()
