# SPDX-License-Identifier: Apache-2.0
"""Whether the V2 runner's drafter takes the kernels: the ranks decide it together. Without a vLLM,
of which only names are stood in for; tests/hosts has the class in an engine."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_kimi_eagle3 import log
from vllm_kimi_eagle3.drafting import plan, ranks
from vllm_kimi_eagle3.drafting.weights import Unsupported
from vllm_kimi_eagle3.patches import draft_forward

NAME = "vllm_kimi_eagle3.models.fused_drafter"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with a KV cache and a pass that can serve."""
    for name, members in {
        "vllm": {},
        "vllm.config": {},
        "vllm.config.compilation": {"CUDAGraphMode": SimpleNamespace(PIECEWISE=1)},
        "vllm.forward_context": {
            "get_forward_context": None,
            "is_forward_context_available": None,
        },
    }.items():
        stand_in = ModuleType(name)
        vars(stand_in).update(members)
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    module = importlib.import_module(NAME)
    monkeypatch.delitem(sys.modules, NAME)
    monkeypatch.setattr(module, "has_cache", lambda layer: True)
    monkeypatch.setattr(module, "StockAttend", lambda attention: "attend")
    monkeypatch.setattr(module, "first_rank", lambda: True)
    monkeypatch.setattr(module, "on_every_rank", lambda done: done)
    monkeypatch.setattr(module.DraftForward, "of", lambda model: Forward())
    return module


class Forward:
    attention = None

    def tune(self, rows: Any) -> str:
        return "products by the library"


def drafter(module: Any) -> Any:
    made = object.__new__(module._Fused)
    vars(made).update(_fused_state={}, _fused_rows=[1], _fused_most=4)
    return made


def test_it_serves_where_every_rank_can(module: Any) -> None:
    made = drafter(module)
    assert made._made()
    assert isinstance(made._fused_state["forward"], Forward)


def test_it_is_stocks_where_another_rank_cannot(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token of one rank is gathered from keys, and the other's from logits."""
    asked: list[bool] = []
    monkeypatch.setattr(module, "on_every_rank", lambda done: bool(asked.append(done)))
    made = drafter(module)
    assert made._made()
    assert made._fused_state == {"forward": None}
    assert asked == [True]


@pytest.mark.parametrize("error", [Unsupported("it has 2 layers"), RuntimeError("a fault")])
def test_a_rank_that_cannot_says_so_to_the_others(
    module: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def of(model: Any) -> Any:
        raise error

    asked: list[bool] = []
    monkeypatch.setattr(module.DraftForward, "of", of)
    monkeypatch.setattr(module, "on_every_rank", lambda done: bool(asked.append(done)))
    made = drafter(module)
    assert made._made()
    assert made._fused_state == {"forward": None}
    assert asked == [False]


def test_a_measurement_that_fails_leaves_it_to_stock(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(self: Any, rows: Any) -> str:
        raise Unsupported("another rank could not measure its products")

    monkeypatch.setattr(Forward, "tune", tune)
    made = drafter(module)
    assert made._made()
    assert made._fused_state == {"forward": None}


@pytest.mark.parametrize(("v2", "lines"), [(True, 1), (False, 0)])
def test_the_log_says_once_that_it_is_stocks(
    monkeypatch: pytest.MonkeyPatch, v2: bool, lines: int
) -> None:
    """On V1 the loop says so itself."""
    config = ModuleType("vllm.config")
    config.get_current_vllm_config_or_none = lambda: object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setattr(plan, "is_for", lambda config: True)
    monkeypatch.setattr(plan, "is_v2", lambda config: v2)
    stock = plan.DraftPlan(loop=False, forward=False, stock="it is switched off")
    monkeypatch.setattr(plan, "plan_or_stock", lambda config: stock)
    monkeypatch.setattr(ranks, "first_rank", lambda: True)
    said: list[Any] = []
    monkeypatch.setattr(
        log, "get_logger", lambda name: SimpleNamespace(info=lambda *a: said.append(a))
    )
    draft_forward._say.cache_clear()
    own = type("Drafter", (), {"__module__": "vllm.model_executor.models.llama_eagle3"})
    model_config = SimpleNamespace(hf_config=SimpleNamespace(kimi_eagle3={}))
    for _ in range(2):
        assert draft_forward._route(own, "", model_config) is own
    assert [line[1] for line in said] == ["it is switched off"] * lines
