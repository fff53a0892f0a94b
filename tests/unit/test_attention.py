# SPDX-License-Identifier: Apache-2.0
"""Whom the attention back-end is for, without a vLLM."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_kimi_eagle3.attention import triton_mla
from vllm_kimi_eagle3.attention.plan import Plan, is_for, max_batch


def model(
    model_type: str = "kimi_k25",
    text_type: str = "deepseek_v3",
    rank: int = 512,
    rope: int = 64,
    architecture: str = "",
) -> SimpleNamespace:
    text = SimpleNamespace(model_type=text_type, kv_lora_rank=rank, qk_rope_head_dim=rope)
    return SimpleNamespace(
        hf_config=SimpleNamespace(model_type=model_type, text_config=text),
        hf_text_config=text,
        architecture=architecture,
    )


KIMI = "KimiK25ForConditionalGeneration"


def config(target: Any, additional: Any = None, **speculative: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=target,
        speculative_config=SimpleNamespace(**speculative) if speculative else None,
        additional_config=additional,
    )


@pytest.mark.parametrize(
    ("vllm_config", "expected"),
    [
        (config(model()), True),
        (config(model(text_type="kimi_k2"), {}), True),
        (config(model("llama")), False),
        (config(model("deepseek_v3")), False),
        # Within its model, a K2.5's config is the text tower's.
        (config(model("deepseek_v3", architecture=KIMI)), True),
        (config(model("deepseek_v3", architecture=KIMI, rank=256)), False),
        (config(model("deepseek_v3", architecture="DeepseekV3ForCausalLM")), False),
        (config(model("llama", "llama", architecture=KIMI)), False),
        (config(model(rank=256)), False),
        (config(model(rope=32)), False),
        (config(None), False),
        (None, False),
        (config(model(), {"kimi_eagle3": {"attention": True}}), True),
        (config(model(), {"kimi_eagle3": {"attention": False}}), False),
        # While a drafter is built: it is the target that counts.
        (config(model("llama"), target_model_config=model()), True),
        (config(model(), target_model_config=model("llama")), False),
    ],
)
def test_whom_it_is_for(vllm_config: Any, expected: bool) -> None:
    assert is_for(vllm_config) is expected


def test_a_wrong_setting_is_refused_in_the_users_words() -> None:
    with pytest.raises(ValueError, match="drafter-setting") as refusal:
        is_for(config(model(), {"kimi_eagle3": {"attention": "no"}}))
    assert "has attention 'no', and must have true or false" in str(refusal.value)
    assert '"kimi_eagle3": {"attention": false}' in str(refusal.value)
    # Another model's is not looked at.
    assert not is_for(config(model("llama"), {"kimi_eagle3": {"attention": "no"}}))


@pytest.mark.parametrize(("query_len", "verify_len", "verifies"), [(4, 4, True), (1, 4, False)])
def test_a_plan_verifies(query_len: int, verify_len: int, verifies: bool) -> None:
    assert Plan("", query_len, verify_len, heads=8, max_batch=4).verifies is verifies


@pytest.mark.parametrize(
    ("query_len", "verify_len", "expected"),
    [(4, 4, (1, 4)), (1, 1, (1,)), (1, 4, (1,)), (7, 4, (1, 4, 7))],
)
def test_the_query_lengths_of_a_plan(
    query_len: int, verify_len: int, expected: tuple[int, ...]
) -> None:
    assert Plan("", query_len, verify_len, heads=8, max_batch=16).query_lens == expected


@pytest.mark.parametrize(
    ("seqs", "tokens", "heads", "query_len", "expected"),
    [
        (256, 8192, 8, 4, 256),
        (100, 8192, 8, 4, 112),
        # What a step can hold, and what 256 MiB can.
        (1024, 2048, 8, 4, 512),
        (4, 1, 8, 4, 16),
        (1024, 8192, 64, 4, 496),
        (1024, 8192, 64, 8, 240),
        (1024, 8192, 128, 9, 112),
    ],
)
def test_the_requests_of_a_call(
    seqs: int, tokens: int, heads: int, query_len: int, expected: int
) -> None:
    assert max_batch(seqs, tokens, heads=heads, query_len=query_len) == expected


def test_vllm_finds_one_name_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        triton_mla.other  # noqa: B018


OUR_MODULE = "vllm_kimi_eagle3.attention.backend"


def vllm_with(monkeypatch: pytest.MonkeyPatch, current: Any) -> None:
    """A vLLM of which there is what says the current configuration; None: not that, either."""
    made = {name: ModuleType(name) for name in ("vllm", "vllm.config", "vllm.config.vllm")}
    if current is not None:
        vars(made["vllm.config.vllm"])["get_current_vllm_config_or_none"] = lambda: current
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)


class Broken(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"no {name}")


def breaks(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Something that is no wrong setting fails on the way to the back-end."""
    kimi = config(model())
    if where == "vLLM's function":
        kimi = None
    elif where == "the model's config":
        del kimi.model_config.hf_text_config
    else:
        monkeypatch.setitem(sys.modules, OUR_MODULE, Broken(OUR_MODULE))
    vllm_with(monkeypatch, kimi)


WHERE = ["vLLM's function", "the model's config", "the back-end"]


@pytest.mark.parametrize("where", WHERE)
def test_what_cannot_be_loaded_leaves_vllms_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    monkeypatch.delenv("VLLM_KIMI_EAGLE3_STRICT", raising=False)
    breaks(monkeypatch, where)
    with caplog.at_level(logging.ERROR):
        assert triton_mla._ours() is None
    assert "vLLM's own TRITON_MLA serves" in caplog.text


@pytest.mark.parametrize("where", WHERE)
def test_strictly_it_is_an_error(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setenv("VLLM_KIMI_EAGLE3_STRICT", "1")
    breaks(monkeypatch, where)
    with pytest.raises((ImportError, AttributeError, ValueError)):
        triton_mla._ours()


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_wrong_setting_is_refused_either_way(
    monkeypatch: pytest.MonkeyPatch, strict: str
) -> None:
    monkeypatch.setenv("VLLM_KIMI_EAGLE3_STRICT", strict)
    vllm_with(monkeypatch, config(model(), {"kimi_eagle3": {"attention": "no"}}))
    with pytest.raises(ValueError, match="drafter-setting"):
        triton_mla._ours()


def test_the_path_imports_nothing_until_it_is_resolved() -> None:
    code = (
        "import sys, vllm_kimi_eagle3.attention.triton_mla\n"
        "print([m for m in sys.modules if m in ('torch', 'triton', 'vllm')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
