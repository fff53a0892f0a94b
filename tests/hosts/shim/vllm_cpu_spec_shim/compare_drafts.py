# SPDX-License-Identifier: Apache-2.0
"""TEST ONLY: every proposal of the plugin's loop beside stock's, for the same inputs.

With `COMPARE_DRAFTS=1` in the environment a proposal is drafted by stock's loop once more, over the
same KV cache, whose entries it writes again, and a line says whether the drafts are the same. Two
engines cannot be compared so: which requests are in a step together depends on when they arrive.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


def register() -> None:
    """Wrap the loop's `propose`."""
    from vllm_kimi_eagle3.drafting.loop import DraftLoop

    ours = DraftLoop.propose

    def propose(self: Any, stock: Any, signature: Any, named: dict[str, Any]) -> torch.Tensor:
        common = named["common_attn_metadata"]
        before = copy_of(common)
        drafts = ours(self, stock, signature, named)
        untouched = torch.equal(before.seq_lens, common.seq_lens)
        expected = stock(self.proposer, **{**named, "common_attn_metadata": before})
        same = untouched and drafts.dtype == expected.dtype and torch.equal(drafts, expected)
        text = "as stock's" if same else f"OTHERS: {drafts.tolist()}, stock's {expected.tolist()}"
        print(f"drafts of {len(drafts)} requests: {text}", flush=True)
        return drafts

    DraftLoop.propose = propose


def copy_of(common: Any) -> Any:
    """Metadata with tensors of their own: stock changes them in place, and on the CPU the host's
    lengths are the device's, so that it would count twice."""
    tensors = {
        field.name: getattr(common, field.name).clone()
        for field in dataclasses.fields(common)
        if field.init and isinstance(getattr(common, field.name), torch.Tensor)
    }
    return dataclasses.replace(common, **tensors)
