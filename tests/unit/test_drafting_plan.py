# SPDX-License-Identifier: Apache-2.0
"""What serves a pair's proposals, from the configuration: without a vLLM, whose platform and config
are stand-ins here."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_kimi_eagle3.drafting.plan import NO_PAIR, DraftPlan, buckets_of, is_for, is_v2, plan_of

GRAPHS = SimpleNamespace(name="FULL_AND_PIECEWISE")
NO_GRAPHS = SimpleNamespace(name="NONE")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The platform: an SM120. A test changes what it needs."""
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        is_cpu=lambda: False,
        get_device_capability=lambda: (12, 0),
    )
    module = ModuleType("vllm.platforms")
    module.current_platform = platform  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", module)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    for name in ("VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    return platform


def config(
    *,
    setting: Any = None,
    speculative: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    mode: Any = GRAPHS,
    **extra: Any,
) -> SimpleNamespace:
    """A pair's config that nothing speaks against, but for what is given."""
    hf_config = SimpleNamespace(kimi_eagle3={})
    return SimpleNamespace(
        model_config=SimpleNamespace(**(model or {})),
        speculative_config=SimpleNamespace(
            **{
                "method": "eagle3",
                "num_speculative_tokens": 3,
                "draft_model_config": SimpleNamespace(hf_config=hf_config, **(draft or {})),
                **(speculative or {}),
            }
        ),
        parallel_config=SimpleNamespace(**(parallel or {})),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
        additional_config=None if setting is None else {"kimi_eagle3": {"drafting": setting}},
        **extra,
    )


def test_the_loop_serves_on_v1_and_the_forward_on_v2() -> None:
    assert plan_of(config()) == DraftPlan(loop=True, forward=False, stock="", graphs=True)
    on_v2 = plan_of(config(use_v2_model_runner=True))
    assert on_v2 == DraftPlan(loop=False, forward=True, stock="", graphs=True)


def test_which_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_v2(config())
    assert not is_v2(config(use_v2_model_runner=False))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert is_v2(config())
    # The property knows what V2 leaves to V1.
    assert not is_v2(config(use_v2_model_runner=False))


@pytest.mark.parametrize(
    "vllm_config",
    [
        None,
        SimpleNamespace(speculative_config=None),
        config(speculative={"method": "mtp"}),
        config(speculative={"draft_model_config": None}),
        config(
            speculative={"draft_model_config": SimpleNamespace(hf_config=SimpleNamespace())},
            setting="not looked at",
        ),
    ],
)
def test_another_model_is_left_alone(vllm_config: Any) -> None:
    assert not is_for(vllm_config)
    assert plan_of(vllm_config) == DraftPlan(loop=False, forward=False, stock=NO_PAIR)


def test_it_is_switched_off_by_the_setting() -> None:
    plan = plan_of(config(setting=False))
    assert not plan.loop
    assert not plan.forward
    assert plan.stock == '"drafting" is false in --additional-config'


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="drafting"):
        plan_of(config(setting="yes"))


CHAIN = "[(0,), (0, 0), (0, 0, 0)]"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"speculative": {"parallel_drafting": True}}, "parallel_drafting"),
        ({"speculative": {"disable_padded_drafter_batch": True}}, "disable_padded_drafter_batch"),
        ({"speculative": {"use_heterogeneous_vocab": True}}, "use_heterogeneous_vocab"),
        ({"speculative": {"num_speculative_tokens": 0}}, "num_speculative_tokens is 0"),
        ({"speculative": {"num_speculative_tokens": None}}, "num_speculative_tokens is 0"),
        ({"speculative": {"speculative_token_tree": "[(0,), (1,), (0, 0)]"}}, "no chain"),
        ({"draft": {"uses_mrope": True}}, "M-RoPE"),
        ({"model": {"uses_mrope": True}}, "M-RoPE"),
        ({"parallel": {"data_parallel_size": 2}}, "--data-parallel-size"),
        ({"parallel": {"decode_context_parallel_size": 8}}, "context parallelism"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "context parallelism"),
        ({"parallel": {"pipeline_parallel_size": 2}}, "--pipeline-parallel-size"),
        ({"parallel": {"use_ubatching": True}}, "microbatches"),
        ({"parallel": {"enable_eplb": True}}, "--enable-eplb"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
    ],
)
@pytest.mark.parametrize("setting", [None, True])
def test_what_it_cannot_serve_is_stocks_wanted_or_not(
    changed: dict[str, Any], why: str, setting: bool | None
) -> None:
    plan = plan_of(config(setting=setting, **changed))
    assert why in plan.stock
    assert (plan.loop, plan.forward, plan.graphs) == (False, False, False)


@pytest.mark.parametrize(
    "changed",
    [
        {"speculative": {"speculative_token_tree": CHAIN}},
        {"parallel": {"tensor_parallel_size": 8}},
        {"lora_config": None, "kv_transfer_config": None},
        {"speculative": {"num_speculative_tokens": 1}},
    ],
)
def test_what_it_serves(changed: dict[str, Any]) -> None:
    assert plan_of(config(**changed)).loop


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"model": {"enforce_eager": True}}, "--enforce-eager"),
        ({"speculative": {"enforce_eager": True}}, "enforce_eager in --speculative-config"),
        ({"mode": NO_GRAPHS}, "cudagraph_mode is NONE"),
    ],
)
def test_without_graphs_only_if_it_is_forced(changed: dict[str, Any], why: str) -> None:
    assert why in plan_of(config(**changed)).stock
    forced = plan_of(config(setting=True, **changed))
    assert forced == DraftPlan(loop=True, forward=False, stock="", graphs=False, forced=True)


def test_the_batch_invariant_mode_is_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert plan_of(config(setting=True)).stock == "VLLM_BATCH_INVARIANT is set"
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert plan_of(config()).loop


def test_a_cpu_only_if_it_is_forced(device: SimpleNamespace) -> None:
    device.is_cuda, device.is_cpu = (lambda: False), (lambda: True)
    assert plan_of(config()).stock == "there is no GPU"
    assert plan_of(config(setting=True)) == DraftPlan(
        loop=True, forward=False, stock="", graphs=False, forced=True
    )


def test_other_devices_are_stocks(device: SimpleNamespace) -> None:
    device.get_device_capability = lambda: (7, 5)
    assert plan_of(config(setting=True)).stock == "the GPU's compute capability is below 8.0"
    device.get_device_capability = lambda: None
    assert plan_of(config()).stock == "the GPU's compute capability is below 8.0"
    device.is_cuda = lambda: False  # ROCm, XPU, TPU
    assert plan_of(config(setting=True)).stock == "the kernels are for NVIDIA GPUs"


def test_without_triton_it_is_stocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "the kernels cannot be imported" in plan_of(config(setting=True)).stock


@pytest.mark.parametrize(
    ("sizes", "seqs", "expected"),
    [
        ((1, 2, 4, 8, 16, 24, 32), 16, (1, 2, 4, 8, 16)),
        # Sizes that were rounded to verify steps, and a last one between two of them.
        ((4, 8, 16, 24, 32), 20, (1, 2, 4, 8, 16, 20)),
        ((), 3, (1, 2, 3)),
        ((), 1, (1,)),
        ((512, 256, 128), 1024, (1, 2, 4, 128, 256)),
    ],
)
def test_the_batches_of_graphs(
    sizes: tuple[int, ...], seqs: int, expected: tuple[int, ...]
) -> None:
    assert buckets_of(sizes, seqs) == expected
