# SPDX-License-Identifier: Apache-2.0
"""When a drafter is replicated, and what of it needs no vLLM; tests/hosts has the ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kimi_eagle3.drafting import replicated as module
from vllm_kimi_eagle3.drafting.replicated import (
    Cost,
    is_for,
    is_replicated,
    of_drafter,
    of_one_rank,
)
from vllm_kimi_eagle3.patches import replicated_drafter


def config(asked: int | None = 1, ranks: int = 8, **parallel: Any) -> SimpleNamespace:
    """What a VllmConfig has of what is read; nothing more is in the oldest release's."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            draft_tensor_parallel_size=asked,
            draft_model_config=SimpleNamespace(max_model_len=4096, heads=64),
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, **parallel),
        model_config=SimpleNamespace(max_model_len=65536, heads=96),
        additional_config={},
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (config(), True),
        (config(ranks=2, decode_context_parallel_size=1, prefill_context_parallel_size=1), True),
        # As vLLM writes it where the key was not given.
        (config(asked=8), False),
        (config(asked=1, ranks=1), False),
        (config(asked=None), False),
        (config(decode_context_parallel_size=2), False),
        (config(prefill_context_parallel_size=2), False),
    ],
)
def test_when(given: Any, wanted: bool) -> None:
    assert is_for(given) is wanted
    pair = SimpleNamespace(decisions={}, notes=[])
    replicated_drafter._decide(given, pair)
    assert pair.decisions == ({"replicated": True} if wanted else {})
    # What is compiled differs, and so does the key of its cache.
    assert given.additional_config == ({"kimi_eagle3_replicated": True} if wanted else {})


def test_a_quantised_copy_of_the_targets_head_is_refused() -> None:
    given = config()
    given.speculative_config.draft_lm_head_quantization = "fp8"
    with pytest.raises(ValueError, match="leave one of them out") as refusal:
        replicated_drafter._decide(given, SimpleNamespace(decisions={}, notes=[]))
    assert "\n" not in str(refusal.value)


def test_whose_class() -> None:
    class Stock:
        pass

    def of(decisions: Any) -> Any:
        hf_config = SimpleNamespace(kimi_eagle3=decisions)
        return SimpleNamespace(hf_config=hf_config)

    for decisions in (None, {}, {"replicated": False}):
        assert replicated_drafter._route(Stock, "", of(decisions)) is Stock
    assert replicated_drafter._route(Stock, "", SimpleNamespace()) is Stock
    made = replicated_drafter._route(Stock, "", of({"replicated": True}))
    assert issubclass(made, Stock)
    assert made.__name__ == "Stock"  # vLLM branches on it.
    assert replicated_drafter._route(Stock, "", of({"replicated": True})) is made
    assert not is_replicated(Stock())


def test_a_configuration_of_one_rank() -> None:
    given = config()
    own = of_one_rank(given)
    assert (own.parallel_config.tensor_parallel_size, own.model_config) == (1, given.model_config)
    assert own.speculative_config is given.speculative_config
    assert given.parallel_config.tensor_parallel_size == 8


@pytest.mark.parametrize("mla", [False, True])
def test_the_configuration_for_its_metadata(mla: bool) -> None:
    given = config()
    own = of_drafter(given, 60, mla)
    assert own.parallel_config.tensor_parallel_size == 1
    # Of the target's configuration alone is known that it is MLA, and what its dimensions are.
    assert own.model_config.heads == (96 if mla else 64)
    assert own.model_config.get_num_attention_heads(own.parallel_config) == 60
    assert own.model_config.max_model_len == 65536
    assert given.speculative_config.draft_model_config.max_model_len == 4096
    assert not hasattr(given.model_config, "get_num_attention_heads")


class Builder:
    def __init__(self, spec: Any, names: Any, vllm_config: Any, device: Any, **more: Any) -> None:
        self.heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        self.more = more

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, spec: Any) -> tuple[type, int]:
        return cls, vllm_config.parallel_config.tensor_parallel_size


class Backend:
    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return cls.__module__, cls.__qualname__

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder


def test_a_layers_metadata_is_built_for_its_own_heads() -> None:
    """Stand-ins for a back-end's classes, which differ between releases."""
    layer = SimpleNamespace(get_attn_backend=lambda: Backend, num_heads=64)
    module._with_own_builder(layer)
    backend = layer.get_attn_backend()
    assert issubclass(backend, Backend)
    # By this the runners tell groups of layers apart.
    assert backend.full_cls_name() != Backend.full_cls_name()
    builder = backend.get_builder_cls()
    assert builder is backend.get_builder_cls()
    built = builder(None, [], config(), None, block_table_width=3)
    assert (built.heads, built.more) == (64, {"block_table_width": 3})
    assert builder.get_cudagraph_support(config(), None) == (builder, 1)


def test_the_line_for_the_log() -> None:
    copies = Cost(8, 5 * 2**30, 2**29, 2**31, 32 * 1024, 4096)
    assert str(copies) == (
        "the drafter's weights are whole on each of 8 ranks: 5.0 GiB a rank, 2.0 GiB of them "
        "copies of the target's, in place of 0.5 GiB, and 32.0 KiB of KV cache a token in place "
        "of 4.0 KiB; a draft step has no collective"
    )
    mla = Cost(8, 5 * 2**30, 2**29, 0, 1152, 1152)
    assert "5.0 GiB a rank, in place of 0.5 GiB, and as much KV cache a token;" in str(mla)
