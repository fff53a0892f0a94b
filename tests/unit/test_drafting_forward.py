# SPDX-License-Identifier: Apache-2.0
"""What is read from drafters and caches, on modules made by hand, without vLLM or a kernel."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_kimi_eagle3.drafting import attend, forward, weights
from vllm_kimi_eagle3.drafting.weights import Head, Product, Unsupported

F32 = torch.float32
KERNELS = Path(weights.__file__).parents[1] / "kernels"


class UnquantizedLinearMethod:
    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class Fp8LinearMethod(UnquantizedLinearMethod):
    pass


def linear(rows: int = 6, columns: int = 4, **attributes: Any) -> Any:
    layer = nn.Linear(columns, rows, bias=False)
    layer.quant_method = UnquantizedLinearMethod()
    for name, value in {"tp_size": 1, **attributes}.items():
        setattr(layer, name, value)
    return layer


# ------------------------------------------------------------------------------------- products


def test_a_plain_product() -> None:
    layer = linear()
    product = Product("x", layer, F32)
    x = torch.randn(3, 4)
    assert product.weight is not None
    assert product.weight.data_ptr() == layer.weight.data_ptr()
    torch.testing.assert_close(product(x), layer(x))
    assert product.takes_skinny(1)
    assert not product.takes_skinny(weights.SKINNY_ROWS + 1)


@pytest.mark.parametrize(
    "attributes",
    [{"quant_method": Fp8LinearMethod()}, {"cpu_linear": lambda x, w, b: x}],
    ids=["quantised", "packed on the CPU"],
)
def test_a_weight_that_is_not_plain_is_its_layer_s(attributes: dict[str, Any]) -> None:
    layer = linear(**attributes)
    product = Product("x", layer, F32)
    assert product.weight is None
    assert not product.takes_skinny(1)
    torch.testing.assert_close(product(torch.ones(2, 4)), layer(torch.ones(2, 4)))


def test_a_weight_of_another_dtype_is_not_plain() -> None:
    assert weights.plain_weight(linear(), torch.bfloat16) is None


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"base_layer": 1}, "x has LoRA"),
        ({"gather_output": True, "tp_size": 2}, "x gathers its output"),
        (
            {"input_is_parallel": True, "reduce_results": False, "tp_size": 2},
            "x is not summed over the ranks where it is computed",
        ),
        (
            {
                "input_is_parallel": True,
                "reduce_results": True,
                "tp_size": 2,
                "bias": nn.Parameter(torch.zeros(6)),
            },
            "x has a bias",
        ),
    ],
)
def test_a_product_that_is_refused(attributes: dict[str, Any], why: str) -> None:
    with pytest.raises(Unsupported, match=why):
        Product("x", linear(**attributes), F32)


def test_a_bias_is_added_by_the_library() -> None:
    layer = linear(bias=nn.Parameter(torch.ones(6)))
    product = Product("x", layer, F32)
    assert not product.takes_skinny(1)
    torch.testing.assert_close(product(torch.ones(2, 4)), layer(torch.ones(2, 4)))


def test_the_most_rows_are_the_kernel_s() -> None:
    tree = ast.parse((KERNELS / "skinny_gemm.py").read_text())
    (most,) = (
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "MAX_ROWS"
    )
    assert most == weights.SKINNY_ROWS


# ------------------------------------------------------------------------------------- the head


def head(d2t: torch.Tensor | None, *, rows: int, first: int = 0, ascending: bool = True) -> Head:
    return Head(
        weight=None,
        logits=lambda hidden: hidden,
        rows=rows,
        first=first,
        d2t=d2t,
        ascending=ascending,
        ranks=1,
        draft_vocab_size=rows,
        vocab_size=100,
    )


def id_of(keys: torch.Tensor) -> list[int]:
    return (0x7FFFFFFF - (keys & 0x7FFFFFFF)).tolist()


LOGITS = torch.tensor(
    [
        [0.0, 2.0, 2.0, -1.0],
        [-3.0, -2.0, -2.0, -5.0],
        [-0.0, 0.0, -1.0, -1.0],
        [1.0, float("nan"), float("inf"), 0.0],
        [float("-inf")] * 4,
    ]
)


@pytest.mark.parametrize("ascending", [True, False])
def test_keys_of_logits(ascending: bool) -> None:
    # Padding behind the rows is not looked at.
    padded = torch.cat([LOGITS, torch.full((5, 2), 9.0)], dim=1)
    d2t = torch.tensor([5, 5, 7, 7])
    keys = forward.keys_of_logits(padded, head(d2t, rows=4, ascending=ascending))
    assert id_of(keys) == [6, 6, 5, 6, 5]


def test_equal_logits_go_to_the_smallest_target_id() -> None:
    d2t = torch.tensor([50, 30, 10, 0])  # Ids 50, 31, 12, 3.
    keys = forward.keys_of_logits(LOGITS, head(d2t, rows=4, ascending=False))
    assert id_of(keys) == [12, 12, 31, 31, 3]


def test_the_largest_key_decides_over_the_ranks() -> None:
    whole = forward.keys_of_logits(LOGITS, head(None, rows=4))
    parts = [
        forward.keys_of_logits(LOGITS[:, :2], head(None, rows=2)),
        forward.keys_of_logits(LOGITS[:, 2:], head(None, rows=2, first=2)),
    ]
    assert torch.equal(torch.stack(parts).amax(0), whole)


@pytest.mark.parametrize("ascending", [True, False])
def test_the_order_of_keys_is_that_of_logits(ascending: bool) -> None:
    values = torch.tensor([float("-inf"), -3.0, -1e-30, 0.0, 1e-30, 2.0, float("inf")])
    keys = forward.keys_of_logits(values.unsqueeze(1), head(None, rows=1, ascending=ascending))
    assert torch.equal(keys, keys.sort().values)


# ------------------------------------------------------------------------------------- caches


class Backend:
    def __init__(self, name: str, shape: Any = None) -> None:
        self.name, self.shape = name, shape

    def get_name(self) -> str:
        return self.name

    def get_kv_cache_shape(self, blocks: int, page: int, heads: int, dim: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.shape(blocks, page, heads, dim)
        return shape


def llama_layer(cache: Any, backend: Backend, **attributes: Any) -> Any:
    return SimpleNamespace(
        kv_cache=cache,
        num_kv_heads=2,
        head_size=8,
        kv_cache_dtype="auto",
        get_attn_backend=lambda: backend,
        **attributes,
    )


def apart(blocks: int, page: int, heads: int, dim: int) -> tuple[int, ...]:
    return 2, blocks, page, heads, dim


def by_block(blocks: int, page: int, heads: int, dim: int) -> tuple[int, ...]:
    return blocks, 2, page, heads, dim


@pytest.mark.parametrize(
    ("cache", "backend"),
    [
        (torch.zeros(2, 5, 16, 2, 8), Backend("FLASH_ATTN", apart)),
        (torch.zeros(5, 2, 16, 2, 8), Backend("FLASH_ATTN", by_block)),
        (torch.zeros(2, 2, 16, 2, 8), Backend("FLASH_ATTN", apart)),
        (torch.zeros(2, 2, 16, 2, 8), Backend("TRITON_ATTN", by_block)),
        # HND: heads before tokens in memory.
        (torch.zeros(5, 2, 2, 16, 8).permute(0, 1, 3, 2, 4), Backend("FLASHINFER", by_block)),
        (torch.zeros(5, 2, 16, 16), Backend("FLASH_ATTN")),
        (torch.zeros(5, 16, 2, 16).transpose(1, 2), Backend("TRITON_ATTN")),
    ],
)
def test_keys_and_values_of_each_layout(cache: torch.Tensor, backend: Backend) -> None:
    found = attend.paged_caches(llama_layer([cache], backend))
    assert found.v is not None
    assert found.k.shape == found.v.shape
    assert tuple(found.k.shape[1:]) == (16, 2, 8)
    assert found.page_size == 16
    assert found.k_scale is found.v_scale is None
    found.k.fill_(1)
    assert cache.sum() == cache.numel() / 2
    found.v.fill_(1)
    assert cache.sum() == cache.numel()
    # Which of the two is which.
    found.v.zero_()
    if cache.dim() == 4:
        assert cache[..., :8].all()
    else:
        assert cache.select(0 if backend.shape is apart else 1, 0).all()


def test_an_fp8_cache() -> None:
    scales = {"_k_scale": torch.tensor(2.0), "_v_scale": torch.tensor([3.0])}
    layer = llama_layer(
        torch.zeros(5, 2, 16, 16, dtype=torch.uint8), Backend("FLASHINFER"), **scales
    )
    layer.kv_cache_dtype = "fp8"
    found = attend.paged_caches(layer)
    assert found.k.dtype == torch.float8_e4m3fn
    assert found.k_scale is not None
    assert found.v_scale is not None
    assert (found.k_scale.shape, found.v_scale.item()) == ((), 3.0)
    layer._k_scale = torch.ones(2)
    with pytest.raises(Unsupported, match="more than one scale"):
        attend.paged_caches(layer)


def test_the_cache_of_mla() -> None:
    layer = SimpleNamespace(
        kv_cache=torch.zeros(5, 1, 16, 24),
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        kv_cache_dtype="auto",
    )
    found = attend.paged_caches(layer)
    assert (found.k.shape, found.v, found.page_size) == ((5, 16, 24), None, 16)
    layer.kv_cache = torch.zeros(5, 16, 24)
    assert attend.paged_caches(layer).k.shape == (5, 16, 24)
    layer.kv_cache = torch.zeros(5, 16, 20)
    with pytest.raises(Unsupported, match="MLA cache"):
        attend.paged_caches(layer)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_cache": torch.tensor([])}, "not there yet"),
        ({"kv_cache": []}, "not there yet"),
        ({"kv_sharing_target_layer_name": "x"}, "another layer's"),
        ({"calculate_kv_scales": True}, "calculate-kv-scales"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "is fp8_e5m2"),
        ({"kv_cache_dtype": "bfloat16"}, "is bfloat16"),
        ({"head_size": 4}, "KV cache is"),
        ({"get_attn_backend": lambda: Backend("CPU_ATTN")}, "CPU_ATTN"),
        ({"kv_cache": torch.zeros(3, 16, 32)}, "KV cache is"),
    ],
)
def test_a_cache_that_is_refused(changes: dict[str, Any], why: str) -> None:
    layer = llama_layer(torch.zeros(5, 2, 16, 16), Backend("FLASH_ATTN"))
    for name, value in changes.items():
        setattr(layer, name, value)
    with pytest.raises(Unsupported, match=why):
        attend.paged_caches(layer)


# ------------------------------------------------------------------------------------- drafters


def test_another_s_class_is_refused() -> None:
    with pytest.raises(Unsupported, match="its class is from"):
        weights.read_weights(nn.Module.__new__(type("Own", (nn.Module,), {})))


def test_a_class_of_vllm_that_is_no_drafter_is_refused() -> None:
    other = type("Other", (nn.Module,), {"__module__": "vllm.model_executor.models.llama"})
    with pytest.raises(Unsupported, match="Other is no EAGLE-3 drafter"):
        weights.read_weights(other())


@pytest.mark.parametrize(
    "attributes",
    [{"has_weight": False}, {"variance_size_override": 3}],
)
def test_another_norm_is_refused(attributes: dict[str, Any]) -> None:
    norm = type("RMSNorm", (), {"weight": torch.ones(3), "variance_epsilon": 1e-5})()
    assert weights.norm_of("x", norm).eps == 1e-5
    with pytest.raises(Unsupported, match="another eps"):
        weights.norm_of("x", norm, eps=1e-6)
    for name, value in attributes.items():
        setattr(norm, name, value)
    with pytest.raises(Unsupported, match="no RMSNorm"):
        weights.norm_of("x", norm)


def test_rows_in_a_log_line() -> None:
    assert forward._spans([1, 2, 4, 8, 16], frozenset({1, 2, 8})) == "1-2 8"
    assert forward._spans([1, 2, 4], frozenset({1, 2, 4})) == "1-4"


def test_the_interface() -> None:
    # The loop, the benchmark and the V2 class are written against it.
    assert list(inspect.signature(forward.DraftForward.run).parameters)[1:4] == [
        "positions",
        "hidden",
        "attend",
    ]
