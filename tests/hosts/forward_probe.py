# SPDX-License-Identifier: Apache-2.0
"""Runs drafters by the plugin's forward pass, beside the release's own module, in one process.

    python forward_probe.py JOBS.json OUTPUTS.pt

The drafters are built and loaded as in `drafter_probe.py`, which also says what is replaced:
attention, since CPU builds before 0.28 have none for MLA. The kernels run in Triton's interpreter.
Jobs are as there; an outcome is a dict of the tensors of both, or the error as a string.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import drafter_probe
import torch

PAGE, QUERY_LEN, CALLS = 16, 9, 2


def keep_booleans() -> None:
    """Triton 3.9's interpreter makes an integer of a condition of one value that meets a block's,
    and then refuses it as a mask."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    stock = builder.create_splat

    def create_splat(self: Any, kind: Any, value: Any) -> Any:
        if value.data.dtype == np.bool_:
            return interpreter.TensorHandle(np.full(kind.shape, value.data), tl.int1)
        return stock(self, kind, value)

    builder.create_splat = create_splat


def run(job: dict[str, str]) -> dict[str, Any]:
    """A drafter's tensors by vLLM's module and by ours."""
    from vllm_kimi_eagle3.drafting.attend import StockAttend
    from vllm_kimi_eagle3.drafting.forward import DraftForward

    with torch.inference_mode(), drafter_probe.loaded(job) as (config, model):
        has_head = getattr(model, "has_own_lm_head", False)
        inputs = torch.load(job["inputs"])
        ids, aux = inputs["token_ids"], inputs["hidden_states"]
        positions = torch.arange(len(ids))

        hidden = model.combine_hidden_states(aux)
        stock = model(ids, positions, hidden.clone())
        forward = DraftForward.of(model)
        absorb(forward)
        ours = forward.run(
            positions, forward.combine(aux), StockAttend(forward.attention), token_ids=ids
        )
        embeds = model.embed_input_ids(ids)
        embedded = forward.run(positions, hidden, StockAttend(forward.attention), embeds=embeds)
        said: dict[str, Any] = {
            "kind": forward.kind,
            "facts": [forward.hidden_size, forward.aux_width, forward.tp, forward.norm_output],
            "widths": [aux.shape[1], hidden.shape[1]],
            "stock": {"combined": hidden, "for_head": stock[0], "for_next": stock[1]},
            "ours": {
                "combined": forward.combine(aux),
                "for_head": ours[0],
                "for_next": ours[1],
            },
            "embeds": {"combined": hidden, "for_head": embedded[0], "for_next": embedded[1]},
            "paged": paged(forward, ids, hidden),
            "clamped": clamped(model, ids, hidden, forward),
            "ids": None,
        }
        if has_head:
            logits = model.compute_logits(stock[0])
            said["ids"] = {"stock": logits.argmax(dim=-1), "ours": forward.top_tokens(stock[0])}
        said["fused"] = fused_tensors(model, config, ids, positions, aux, has_head)
    return said


def absorb(forward: Any) -> None:
    """The halves of kv_b_proj, which the stand-in for MLA's layer does not make; a CPU build has
    packed the weight, so it is read off a product with the identity."""
    latent = forward.attention.latent
    if latent is None:
        return
    layer = forward.attention.layer
    columns = layer.kv_b_proj(torch.eye(latent.kv_lora_rank))[0]
    by_head = columns.view(latent.kv_lora_rank, latent.heads, -1)
    w_uk, w_uv = by_head.split([latent.nope_dim, latent.value_dim], dim=-1)
    layer.W_UK_T, layer.W_UV = w_uk.permute(1, 2, 0), w_uv.transpose(0, 1)


def paged(forward: Any, ids: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """The first tokens by the kernels alone, as two requests with pages of their own."""
    from vllm_kimi_eagle3.drafting.attend import PagedAttend, PagedCaches

    facts = forward.attention
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    if facts.latent is not None:
        caches = PagedCaches(PAGE, torch.zeros(4, PAGE, facts.head_dim), None, None, None)
    else:
        # As FLASH_ATTN has them from 0.26 on.
        both = torch.zeros(4, facts.kv_heads, PAGE, 2 * facts.head_dim).transpose(1, 2)
        k, v = both.split(facts.head_dim, dim=-1)
        caches = PagedCaches(PAGE, k, v, None, None)
    why = PagedAttend.unsupported(facts, caches, query_len=QUERY_LEN)
    assert not why, why
    numel = PagedAttend.workspace_numel(
        facts, max_batch=2, query_len=QUERY_LEN, device=torch.device("cpu")
    )
    results = []
    for call in range(CALLS):
        at = torch.arange(call * QUERY_LEN, (call + 1) * QUERY_LEN)
        slots = torch.cat([row.long()[at // PAGE] * PAGE + at % PAGE for row in table])
        attend = PagedAttend(
            facts,
            caches,
            block_table=table,
            seq_lens=torch.full((2,), (call + 1) * QUERY_LEN, dtype=torch.int32),
            slots=slots,
            query_len=QUERY_LEN,
            workspace=torch.empty(numel),
        )
        results.append(
            forward.run(at.repeat(2), hidden[at].repeat(2, 1), attend, token_ids=ids[at].repeat(2))
        )

    def of(request: int, which: int) -> torch.Tensor:
        rows = slice(request * QUERY_LEN, (request + 1) * QUERY_LEN)
        return torch.cat([result[which][rows] for result in results])

    torch.testing.assert_close(of(1, 0), of(0, 0), atol=1e-4, rtol=1e-4)
    return {"for_head": of(0, 0), "for_next": of(0, 1)}


def clamped(model: Any, ids: torch.Tensor, hidden: torch.Tensor, forward: Any) -> bool:
    """True if a position limit is honoured as the clamping class does it."""
    from vllm_kimi_eagle3.drafting.attend import StockAttend
    from vllm_kimi_eagle3.drafting.forward import DraftForward
    from vllm_kimi_eagle3.models import short_drafter

    limit, own = 7, type(model)
    positions = torch.arange(len(ids))
    model.__class__ = short_drafter.clamped(own, limit)
    model._positions = torch.zeros(len(ids), dtype=torch.int64)
    try:
        stock = model(ids, positions, hidden.clone())
        ours = DraftForward.of(model)
        result = ours.run(positions, hidden, StockAttend(ours.attention), token_ids=ids)
    finally:
        model.__class__ = own
    return ours.attention.position_limit == limit and torch.allclose(
        stock[0], result[0], atol=1e-4, rtol=1e-4
    )


def fused_tensors(
    model: Any,
    config: Any,
    ids: torch.Tensor,
    positions: torch.Tensor,
    aux: torch.Tensor,
    has_head: bool,
) -> dict[str, Any]:
    """What the class of the V2 runner makes of the same; its constructor is left out, since the
    drafter is loaded."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.forward_context import set_forward_context

    from vllm_kimi_eagle3.models import fused_drafter

    own = type(model)
    ours = fused_drafter.fused(own)
    assert ours.__name__ == own.__name__
    layer = model.model.layers[0].self_attn
    layer = layer.mla_attn.mla_attn if hasattr(layer, "mla_attn") else layer.attn
    said: dict[str, Any] = {}
    model.__class__ = ours
    model._fused_plan = SimpleNamespace(forward=True)
    model._fused_most, model._fused_rows, model._fused_state = len(ids), [1], {}
    try:
        with set_forward_context(None, config, num_tokens=len(ids)):
            hidden = model.combine_hidden_states(aux)
            model(ids, positions, hidden.clone())
            said["without a cache"] = "forward" in model._fused_state
            layer.kv_cache = torch.zeros(1)
            result = model(ids, positions, hidden)
            said["with one"] = model._fused_state.get("forward") is not None
            said["for_head"], said["for_next"] = result
            said["combined"] = model.combine_hidden_states(aux)
            taken = model._ours(len(ids) + 1)
            said["a large pass"] = taken is not None
        with set_forward_context(
            None, config, num_tokens=len(ids), cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE
        ):
            said["piecewise"] = model._ours(1) is not None
        if has_head:
            said["ids"] = model.get_top_tokens(result[0])
    finally:
        model.__class__ = own
        del layer.kv_cache
    return said


if __name__ == "__main__":
    keep_booleans()
    drafter_probe.run_jobs(run)
