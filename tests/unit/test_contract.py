# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.contract import Shape, Sources

SOURCE = '''
"""A module."""
import os

LIMIT: int = 3
TABLE = dict(
    a="A",
)

try:
    import torch
except ImportError:
    def fallback(x): return x

class Base(object): pass

class Model(Base, metaclass=type):
    size = 4

    @property
    def method(self, first, second=1, /, *rest, key, other=None, **more):
        """Says something."""
        # A comment.
        return f"{first!r} {second}"
'''


def shape(tmp_path: Path, source: str, target: str) -> Shape | None:
    (tmp_path / "m.py").write_text(source)
    return Sources(tmp_path).shape(f"vllm.m:{target}")


def test_signatures(tmp_path: Path) -> None:
    signatures = {
        name: getattr(shape(tmp_path, SOURCE, name), "signature", None)
        for name in ("Model.method", "Model", "Model.size", "TABLE", "LIMIT", "fallback", "absent")
    }
    assert signatures == {
        "Model.method": "(self, first, second=, /, *rest, key, other=, **more)",
        "Model": "Base",
        "Model.size": "",
        "TABLE": "",
        "LIMIT": "",
        "fallback": "(x)",
        "absent": None,
    }


def test_layout_and_comments_do_not_count(tmp_path: Path) -> None:
    other = SOURCE.replace("# A comment.", "\n        # Another.\n").replace(
        'a="A",', 'a="A",  # why'
    )
    for target in ("Model.method", "TABLE", "Model"):
        assert shape(tmp_path, SOURCE, target) == shape(tmp_path, other, target)


@pytest.mark.parametrize(
    ("before", "after"), [("{first!r}", "{first}"), ("second=1", "second=2"), ("return", "yield")]
)
def test_code_counts(tmp_path: Path, before: str, after: str) -> None:
    one = shape(tmp_path, SOURCE, "Model.method")
    other = shape(tmp_path, SOURCE.replace(before, after), "Model.method")
    assert one is not None
    assert other is not None
    assert not one.agrees(other, "body")
    assert one.agrees(other, "present")


def test_a_module_that_is_not_python(tmp_path: Path) -> None:
    assert shape(tmp_path, "def (", "x") is None
    (tmp_path / "m.py").write_bytes(b"\xff\x00")
    assert Sources(tmp_path).shape("vllm.m:x") is None
    assert Sources(tmp_path).shape("vllm.not_there:x") is None


def test_a_package_is_read_from_its_init(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("x = 1\n")
    assert Sources(tmp_path).shape("vllm.p:x") is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("if x:\n        a()\n        b()", "if x:\n        a()\n    b()"),
        ("return not a", "return nota"),
        ('return " y"', 'return "y "'),
        ("x = a\n    (b)", "x = a(b)"),
        ('return f"{x} {y}"', 'return f"{x}{y}"'),
    ],
)
def test_blocks_and_spaces_that_mean_something_count(tmp_path: Path, one: str, other: str) -> None:
    shapes = [shape(tmp_path, f"def f():\n    {body}\n", "f") for body in (one, other)]
    assert shapes[0] is not None
    assert shapes[1] is not None
    assert shapes[0].digest != shapes[1].digest


def test_the_width_of_the_layout_does_not_count(tmp_path: Path) -> None:
    one = shape(tmp_path, "def f(a):\n    return g(a,\n b)\n", "f")
    other = shape(tmp_path, "def f( a ):\n  return g(a, b)\n", "f")
    assert one == other


@given(st.text(), st.text(min_size=1))
def test_any_text_and_any_name_is_answered(tmp_path_factory, text: str, name: str) -> None:
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "m.py").write_text(text, encoding="utf-8", errors="replace")
    found = Sources(folder).shape(f"vllm.m:{name}")
    assert found is None or name.split(".")[0] in text
