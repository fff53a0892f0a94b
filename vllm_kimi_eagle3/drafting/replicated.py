# SPDX-License-Identifier: Apache-2.0
"""A drafter whose weights are whole on each tensor-parallel rank.

``"draft_tensor_parallel_size": 1`` is accepted by every release, and its EAGLE-3 drafters are built
over the target's ranks all the same. Here a release's own drafter class is built, loaded and run
in a tensor-parallel group of this rank alone: its layers read the sizes of the group while they are
built, and its head and embedding ask for the group at each call, so no code of the release is
repeated. The ranks then draft the same tokens each, without a word to each other.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_kimi_eagle3.limits import context_parallel_flag

# What vLLM calls of a drafter, from outside it; not every release's classes have all.
_CALLED = (
    "forward",
    "combine_hidden_states",
    "compute_logits",
    "get_top_tokens",
    "get_top_k_tokens",
    "embed_input_ids",
    "get_input_embeddings",
    "load_weights",
)
_GROUP, _SIZES = "kimi_eagle3_group", "kimi_eagle3_sizes"
_SHARED = ("embed_tokens", "lm_head")


def is_for(vllm_config: Any) -> bool:
    """True if the user wants the drafter whole on each of several ranks, and it can be.

    Where nothing was asked for, vLLM has written the target's size there
    (``SpeculativeConfig._verify_and_get_draft_tp``), so that a 1 beside several ranks is the
    user's own.
    """
    asked = getattr(vllm_config.speculative_config, "draft_tensor_parallel_size", None)

    def ranks(kind: str) -> int:
        return int(getattr(vllm_config.parallel_config, f"{kind}_parallel_size", 1) or 1)

    if asked != 1 or ranks("tensor") == 1:
        return False
    return context_parallel_flag(ranks("decode_context"), ranks("prefill_context")) is None


def is_replicated(model: Any) -> bool:
    """True for a drafter that :func:`replicated` built."""
    return getattr(model, _GROUP, None) is not None


def drafter_group(model: Any) -> Any:
    """The tensor-parallel group that a drafter's weights are spread over.

    Args:
        model: a loaded drafter.

    Returns:
        A ``GroupCoordinator``: of this rank alone where the drafter is replicated, else vLLM's.
    """
    from vllm.distributed.parallel_state import get_tp_group

    own = getattr(model, _GROUP, None)
    return get_tp_group() if own is None else own


@contextmanager
def as_tp_group(group: Any) -> Iterator[None]:
    """Within it, ``group`` is the tensor-parallel group of this process.

    vLLM has such a context up to 0.22 (``patch_tensor_parallel_group``), which may not be entered
    twice; this may.
    """
    from vllm.distributed import parallel_state

    before = parallel_state._TP
    parallel_state._TP = group
    try:
        yield
    finally:
        parallel_state._TP = before


def alone(group: Any) -> Any:
    """A tensor-parallel group of this rank alone.

    Made without a word to the other ranks, so a rank can make it that others do not (the last
    pipeline stage has the drafter). ``GroupCoordinator`` returns its input where the group is of
    one, and this one has nothing with which it could do otherwise.

    Args:
        group: the group that vLLM made, for what the rank and its device are.
    """
    own: Any = object.__new__(_alone_class())
    own.__dict__.update(
        {
            name: value
            for name, value in vars(group).items()
            if name not in ("cpu_group", "device_group")
        },
        unique_name="kimi_eagle3_drafter:0",
        ranks=[group.rank],
        world_size=1,
        rank_in_group=0,
        use_device_communicator=False,
        device_communicator=None,
        mq_broadcaster=None,
    )
    return own


@functools.cache
def _alone_class() -> type:
    from vllm.distributed.parallel_state import GroupCoordinator

    return type("_Alone", (GroupCoordinator,), {"__module__": __name__})


# ------------------------------------------------------------------------------------- the class


@functools.cache
def replicated(stock: type) -> type:
    """``stock``, built and run on this rank alone, under its own name: vLLM branches on it.

    Args:
        stock: a release's drafter class, or what the plugin completed it to.
    """
    members: dict[str, Any] = {"__module__": __name__, "__init__": _build_in_own_group(stock)}
    for name in _CALLED:
        if callable(getattr(stock, name, None)):
            members[name] = _call_in_own_group(stock, name)
    return type(stock.__name__, (stock,), members)


def _build_in_own_group(stock: Any) -> Any:
    @functools.wraps(stock.__init__)
    def build(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import get_tp_group

        group = alone(get_tp_group())
        own_config = of_one_rank(vllm_config)
        with as_tp_group(group), set_current_vllm_config(own_config, prefix=prefix):
            stock.__init__(self, vllm_config=own_config, prefix=prefix)
        setattr(self, _GROUP, group)
        # Before they are loaded: on the CPU some are packed then, and no parameters any more.
        setattr(self, _SIZES, _sizes(self, get_tp_group().world_size))
        for layer in attention_layers(self):
            _with_own_builder(layer)

    return build


def _call_in_own_group(stock: Any, name: str) -> Any:
    method = getattr(stock, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with as_tp_group(getattr(self, _GROUP)):
            return method(self, *args, **kwargs)

    return call


def attention_layers(model: Any) -> list[Any]:
    """The layers of a drafter that have a KV cache."""
    return [m for m in model.modules() if callable(getattr(m, "get_attn_backend", None))]


def of_one_rank(vllm_config: Any) -> Any:
    """A ``VllmConfig`` like another, with one tensor-parallel rank; the rest is shared with it."""
    own = copy.copy(vllm_config)
    own.parallel_config = copy.copy(vllm_config.parallel_config)
    own.parallel_config.tensor_parallel_size = 1
    return own


# ------------------------------------------------------------------------ the attention's metadata


def _with_own_builder(layer: Any) -> None:
    """Have the layer's attention metadata built for the heads that it has on this rank.

    Builders of several back-ends and releases take the number of heads from the server's
    configuration, where it is the target's share. Under another name the back-end is also another
    group of layers to the runners, and an MLA drafter's would else be the target's.
    """
    mla = getattr(layer, "kv_lora_rank", None) is not None
    own = _backend_of_drafter(layer.get_attn_backend(), int(layer.num_heads), mla)
    layer.get_attn_backend = lambda: own


@functools.cache
def _backend_of_drafter(stock: Any, heads: int, mla: bool) -> Any:
    def get_builder_cls() -> Any:
        return _builder_of_drafter(stock.get_builder_cls(), heads, mla)

    members = {
        "__module__": __name__,
        "__qualname__": f"Replicated{stock.__qualname__}",
        "get_builder_cls": staticmethod(get_builder_cls),
    }
    return type(f"Replicated{stock.__name__}", (stock,), members)


@functools.cache
def _builder_of_drafter(stock: Any, heads: int, mla: bool) -> Any:
    def build(
        self: Any, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, *args: Any, **kw: Any
    ) -> None:
        config = of_drafter(vllm_config, heads, mla)
        stock.__init__(self, kv_cache_spec, layer_names, config, *args, **kw)

    members: dict[str, Any] = {"__module__": __name__, "__init__": build}
    if hasattr(stock, "get_cudagraph_support"):

        def get_cudagraph_support(cls: Any, vllm_config: Any, *args: Any, **kw: Any) -> Any:
            support = stock.get_cudagraph_support.__func__
            return support(cls, of_drafter(vllm_config, heads, mla), *args, **kw)

        members["get_cudagraph_support"] = classmethod(get_cudagraph_support)
    return type(f"Replicated{stock.__name__}", (stock,), members)


def of_drafter(vllm_config: Any, heads: int, mla: bool) -> Any:
    """The configuration by which a drafter's attention metadata is built.

    Args:
        vllm_config: the server's.
        heads: query heads of the drafter on this rank, which are all.
        mla: its attention is MLA. vLLM knows that of the target's configuration only; an MLA
            drafter's has no dimensions of MLA by its model type.
    """
    own = of_one_rank(vllm_config)
    target, draft = vllm_config.model_config, vllm_config.speculative_config.draft_model_config
    own.model_config = copy.copy(target if mla else draft)
    # A request may be as long as the target takes it; block tables are made for that.
    own.model_config.max_model_len = target.max_model_len
    own.model_config.get_num_attention_heads = lambda *args, **kwargs: heads
    return own


# ------------------------------------------------------------------ what is shared with the target


@dataclass(frozen=True)
class Cost:
    """What a replicated drafter takes on a rank, in bytes.

    Attributes:
        ranks: of the target.
        weights: all of the drafter's.
        split: what they would be if split, an embedding or head of the target's not counted.
        copied: of the weights, whole copies of the target's embedding and head.
        cache: of the KV cache of a token.
        cache_split: the same if split.
    """

    ranks: int
    weights: int
    split: int
    copied: int
    cache: int
    cache_split: int

    def __str__(self) -> str:
        copies = f", {_size(self.copied)} of them copies of the target's" if self.copied else ""
        cache = "as much KV cache a token"
        if self.cache != self.cache_split:
            cache = f"{_size(self.cache)} of KV cache a token in place of {_size(self.cache_split)}"
        return (
            f"the drafter's weights are whole on each of {self.ranks} ranks: "
            f"{_size(self.weights)} a rank{copies}, in place of {_size(self.split)}, and {cache}; "
            "a draft step has no collective"
        )


def make_whole(model: Any, vllm_config: Any) -> Cost:
    """Give a replicated drafter whole copies of what it shares with the target.

    Every rank of the target's group has to call it, once the drafter is loaded and shares what it
    shares: the copies are gathered.

    Args:
        model: a drafter that :func:`replicated` built.
        vllm_config: the server's.

    Raises:
        ValueError: what is shared is quantised; the message is for the user.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    copied = 0
    for owner, name in zip((model.model, model), _SHARED, strict=True):
        layer = getattr(owner, name, None)
        if layer is None or getattr(layer, "tp_size", 1) == 1:
            continue
        whole = _whole(layer, model, group, vllm_config, name)
        delattr(owner, name)
        setattr(owner, name, whole)
        copied += whole.weight.nbytes
    return _cost(model, group.world_size, copied, vllm_config)


def _whole(layer: Any, model: Any, group: Any, vllm_config: Any, name: str) -> Any:
    import torch
    from torch import nn
    from vllm.config import set_current_vllm_config

    parameters = dict(layer.named_parameters())
    weight = parameters.pop("weight", None)
    if weight is None or parameters or weight.dtype.itemsize < 2:
        raise ValueError(
            f'"draft_tensor_parallel_size": 1 in --speculative-config: the drafter has the '
            f"target's {name}, which is quantised, and the plugin makes no whole copy of that; "
            'leave "draft_tensor_parallel_size" out'
        )
    gathered = group.all_gather(weight.data, dim=0)
    own_config = of_one_rank(vllm_config)
    with (
        as_tp_group(drafter_group(model)),
        set_current_vllm_config(own_config),
        torch.device("meta"),
    ):
        whole = type(layer)(
            layer.num_embeddings,
            layer.embedding_dim,
            params_dtype=weight.dtype,
            org_num_embeddings=layer.org_vocab_size,
            padding_size=layer.padding_size,
        )
    assert whole.weight.shape == gathered.shape, (whole.weight.shape, gathered.shape)
    parameter = nn.Parameter(gathered, requires_grad=False)
    parameter.__dict__.update(whole.weight.__dict__)
    whole.weight = parameter
    whole.quant_method.process_weights_after_loading(whole)
    return whole


def _sizes(model: Any, ranks: int) -> tuple[int, int]:
    """The bytes of a drafter's weights, whole and split over ranks, without what it may share."""
    weights = split = 0
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in _SHARED:
            own = sum(p.nbytes for p in module.parameters(recurse=False))
            weights += own
            split += math.ceil(own / ranks) if _is_split(module) else own
    return weights, split


def _cost(model: Any, ranks: int, copied: int, vllm_config: Any) -> Cost:
    weights, split = getattr(model, _SIZES)
    shared = [getattr(model.model, _SHARED[0], None), getattr(model, _SHARED[1], None)]
    whole = sum(layer.weight.nbytes for layer in shared if layer is not None)
    cache = cache_split = 0
    for layer in attention_layers(model):
        spec = layer.get_kv_cache_spec(vllm_config)
        token, heads = spec.page_size_bytes // spec.block_size, spec.num_kv_heads
        cache += token
        cache_split += token * math.ceil(heads / ranks) // heads
    return Cost(
        ranks=ranks,
        weights=weights + whole,
        split=split + math.ceil((whole - copied) / ranks),
        copied=copied,
        cache=cache,
        cache_split=cache_split,
    )


def _is_split(module: Any) -> bool:
    """True for a layer of which a rank of several has a part."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if getattr(module, "disable_tp", False):
        return False
    return isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding))


def _size(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit / 10:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
