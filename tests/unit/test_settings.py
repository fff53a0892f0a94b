# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.settings import DISABLE, STRICT, Settings


def test_nothing_set_is_the_default() -> None:
    assert Settings.from_environment({}) == Settings()


@pytest.mark.parametrize("value", ["1", "true", "ALL", " yes "])
def test_disable_as_a_switch(value: str) -> None:
    settings = Settings.from_environment({DISABLE: value})
    assert settings.disable_all
    assert settings.disabled == frozenset()


@pytest.mark.parametrize("value", ["", "0", "False", "off"])
def test_switched_off(value: str) -> None:
    assert Settings.from_environment({DISABLE: value, STRICT: value}) == Settings()


def test_disable_as_a_list_of_patches() -> None:
    settings = Settings.from_environment({DISABLE: " whitelist, image-token,"})
    assert settings.disabled == {"whitelist", "image-token"}
    assert not settings.disable_all


def test_strict() -> None:
    assert Settings.from_environment({STRICT: "1"}).strict


@given(st.text(), st.text())
def test_any_text_is_read(disable: str, strict: str) -> None:
    settings = Settings.from_environment({DISABLE: disable, STRICT: strict})
    assert not (settings.disable_all and settings.disabled)
