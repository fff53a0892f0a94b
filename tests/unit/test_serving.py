# SPDX-License-Identifier: Apache-2.0
"""The port of the end-to-end tests' servers, and of the demo's: tests/hosts/serving.py."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.hosts import serving


def test_a_port_is_not_one_that_the_system_may_give_away() -> None:
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not ports.exists():
        pytest.skip("this system does not say which ports are its own")
    first, last = map(int, ports.read_text().split())
    if first <= 11_000:
        pytest.skip("this system's own ports leave no room for others")
    for _ in range(20):
        assert not first <= serving.free_port() <= last


@pytest.mark.parametrize(
    ("said", "first"), [("32768\t60999\n", 32768), ("1024\t65535\n", 49152), (None, 49152)]
)
def test_where_the_systems_ports_begin(
    said: str | None, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are the test's own."""
    ports = tmp_path / "ip_local_port_range"
    if said is not None:
        ports.write_text(said)
    monkeypatch.setattr(serving, "EPHEMERAL_PORTS", ports)
    assert serving.first_ephemeral_port() == first


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    free = serving.free_port()
    with socket.socket() as taken:
        taken.bind((serving.HOST, serving.free_port()))
        both = [taken.getsockname()[1], free]
        monkeypatch.setattr(serving.random.SystemRandom, "sample", lambda *_: both)
        assert serving.free_port() == free
        both.pop()
        with pytest.raises(serving.ServerError, match="no free port between 10000 and"):
            serving.free_port()
