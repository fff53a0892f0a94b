# SPDX-License-Identifier: Apache-2.0
"""The reference against torch's own attention over one contiguous, unpaged request."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from vllm_kimi_eagle3.kernels.reference import mla_decode_reference

from .cases import R, make_case


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [4, 5, 48, 100])
def test_against_torch(length: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    case = make_case(generator, [17, length], heads=3, query_len=4, page=16, causal=causal)
    q, cache, table, _ = case.tensors
    out, lse = mla_decode_reference(*case.tensors, **case.keywords)

    tokens = torch.cat([cache[block] for block in table[1, : -(-length // 16)]])[:length].double()
    keys = tokens.expand(3, -1, -1)
    visible = torch.ones(4, length, dtype=torch.bool).tril(length - 4 if causal else length)
    scale = case.keywords["scale"]
    mine = q[4:].double().transpose(0, 1)
    expected = functional.scaled_dot_product_attention(
        mine, keys, keys[..., :R], attn_mask=visible, scale=scale
    )
    scores = (mine @ keys.transpose(1, 2) * scale).masked_fill(~visible, -torch.inf)
    torch.testing.assert_close(out[4:].transpose(0, 1), expected)
    torch.testing.assert_close(lse[4:].T, scores.exp().sum(-1).log())


def test_nothing_to_see() -> None:
    """A padding row, and queries before the request's first token."""
    case = make_case(torch.Generator().manual_seed(0), [0, 2], heads=2, query_len=4)
    out, lse = mla_decode_reference(*case.tensors, **case.keywords)
    assert lse.isneginf().all(1).tolist() == [True] * 6 + [False] * 2
    assert not out[:6].any()
    # One token: its own latent, whatever the query.
    _, cache, table, _ = case.tensors
    torch.testing.assert_close(out[6], cache[table[1, 0], 0, :R].double().expand(2, -1))


def test_scale_of_the_cache() -> None:
    generator = torch.Generator().manual_seed(0)
    case = make_case(generator, [40], heads=2, query_len=1, kv_dtype=torch.float8_e4m3fn)
    q, cache, table, lens = case.tensors
    scaled = cache.float() * case.keywords.pop("kv_scale")
    expected = mla_decode_reference(q, scaled, table, lens, **case.keywords)
    case.keywords["kv_scale"] = torch.tensor([0.75])
    for ours, wanted in zip(
        mla_decode_reference(*case.tensors, **case.keywords), expected, strict=True
    ):
        torch.testing.assert_close(ours, wanted)
