# SPDX-License-Identifier: Apache-2.0
"""Launches of the drafter's elementwise kernels, for offline.py to compile.

Shapes are those of Kimi-K2.5's drafters: hidden 7168, 64 query and 8 key heads of 128 (or one
eighth of them on each of 8 GPUs), an MLA drafter's 1536 + 512 + 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from vllm_kimi_eagle3.kernels.add_rms_norm import add_rms_norm
from vllm_kimi_eagle3.kernels.draft_inputs import draft_inputs
from vllm_kimi_eagle3.kernels.fc_norm import fc_norm
from vllm_kimi_eagle3.kernels.mla_rope_kv_write import mla_latents, mla_rope_q
from vllm_kimi_eagle3.kernels.rope_kv_write import rope_kv_write
from vllm_kimi_eagle3.kernels.silu_mul import silu_mul

H, EPS, PAGE, TOKENS = 7168, 1e-5, 64, 4


def offline_launches(
    capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, Callable[[], object]]]:
    """What to compile for a GPU: a name, and a call that launches one kernel over CPU tensors.

    The calls are for `offline.compiling_for`. Caches in fp8 are left out below 8.9.
    """
    hidden, weight = torch.empty(TOKENS, H, dtype=dtype), torch.empty(H, dtype=dtype)
    wide = torch.empty(TOKENS, 2 * H, dtype=dtype)
    positions = torch.zeros(TOKENS, dtype=torch.int64)
    norms = {"input_norm": weight, "hidden_norm": weight, "eps": EPS}
    ids = {"token_ids": positions.int(), "embed_table": torch.empty(8, H, dtype=dtype)}
    yield "draft_inputs, embeds", lambda: draft_inputs(hidden, embeds=hidden, **norms)
    yield "draft_inputs, ids", lambda: draft_inputs(hidden, **ids, **norms)
    for chunks in (1, 3):
        aux = torch.empty(TOKENS, 3 * H, dtype=dtype)
        weights = torch.empty(chunks, 3 * H // chunks, dtype=dtype)
        yield f"fc_norm, {chunks} chunks", lambda a=aux, w=weights: fc_norm(a, w, EPS)
    yield "add_rms_norm", lambda: add_rms_norm(hidden, hidden, weight, EPS)
    yield "add_rms_norm, wide", lambda: add_rms_norm(hidden, wide[:, H:], weight, EPS)
    for width in (18432, 2304):
        gate_up = torch.empty(TOKENS, 2 * width, dtype=dtype)
        yield f"silu_mul, {width}", lambda g=gate_up: silu_mul(g)

    caches = [dtype] + [torch.float8_e4m3fn] * (capability >= (8, 9))
    scale = torch.ones(())
    for heads, kv_heads in ((64, 8), (8, 1)):
        qkv = torch.empty(TOKENS, (heads + 2 * kv_heads) * 128, dtype=dtype)
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 128, "page_size": PAGE}
        table = torch.empty(32, 128, dtype=dtype)
        yield (
            f"rope_kv_write, {heads} heads, no cache",
            lambda q=qkv, t=table, s=sizes: rope_kv_write(q, positions, t, None, None, None, **s),
        )
        for held in caches:
            cache = torch.empty(2, 2, PAGE, kv_heads, 128, dtype=held)
            scales = {"k_scale": scale, "v_scale": scale} if held != dtype else {}
            yield (
                f"rope_kv_write, {heads} heads, {held}",
                lambda q=qkv, t=table, c=cache, s=sizes, f=scales: rope_kv_write(
                    q, positions, t, positions, c[0], c[1], **s, **f
                ),
            )
    ranks = {"q_lora_rank": 1536, "kv_lora_rank": 512, "rope_dim": 64}
    latents = torch.empty(TOKENS, sum(ranks.values()), dtype=dtype)
    table = torch.empty(32, 64)  # As stock has it where the rope is scaled: float32.
    weights = {"q_norm": weight[:1536], "kv_norm": weight[:512], "eps": EPS}
    for held in caches:
        cache = torch.empty(2, PAGE, 576, dtype=held)
        scales = {"kv_scale": scale} if held != dtype else {}
        yield (
            f"mla_latents, {held}",
            lambda c=cache, f=scales: mla_latents(
                latents, positions, table, positions, c, page_size=PAGE, **ranks, **weights, **f
            ),
        )
    for heads in (64, 8):
        q = torch.empty(TOKENS, heads, 192, dtype=dtype)
        yield (
            f"mla_rope_q, {heads} heads",
            lambda q=q: mla_rope_q(q, positions, table, nope_dim=128, rope_dim=64),
        )
