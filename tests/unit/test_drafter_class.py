# SPDX-License-Identifier: Apache-2.0
"""What the releases' classes can do; tests/hosts/test_drafters.py reads it from the classes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from packaging.version import Version

from vllm_kimi_eagle3.checkpoint.drafter_class import DrafterClass, drafter_class
from vllm_kimi_eagle3.checkpoint.drafter_tensors import Expected
from vllm_kimi_eagle3.host import SUPPORTED

EVERYTHING = DrafterClass(True, True, True, True, True, True, True)
LLAMA = Expected(
    attention="llama",
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    vocab_size=256,
    draft_vocab_size=64,
    target_hidden_size=64,
    aux_count=3,
)
MLA = replace(LLAMA, attention="mla", draft_vocab_size=256)
MLA_31 = replace(MLA, fc_norm=True)

# From which release on, up to 0.33.
SINCE = {
    "llama": {
        "fc_norm": "0.22.1",
        "norm_output": "0.22.1",
        "norm_before_fc": "0.18.1",
        "without_aux": "0.15.1",
        "any_count": "0.22.1",
        "quantized_head": "0.19.1",
    },
    "mla": {"fc_norm": "0.23.0", "norm_output": "0.22.1"},
}


@pytest.mark.parametrize("attention", ["llama", "mla"])
def test_by_release(attention: str) -> None:
    for release in SUPPORTED:
        version = Version(release)
        does = drafter_class(attention, version)  # type: ignore[arg-type]
        for name, since in SINCE[attention].items():
            assert getattr(does, name) == (version >= Version(since)), (release, name)
        assert does.takes_full_d2t == (version < Version("0.30"))
        if attention == "mla":
            # Up to 0.17 it is the plugin's own, which can do with any number of aux layers.
            own = version < Version("0.18")
            assert does.without_aux == own
            assert does.any_count == (own or version >= Version("0.22"))
            assert not does.norm_before_fc
            assert not does.quantized_head
    assert drafter_class("mla", Version("0.22.0.dev3+cu129")) == drafter_class(
        "mla", Version("0.22.1")
    )


def test_what_a_drafter_needs_of_it() -> None:
    nothing = DrafterClass(*(False for _ in fields(DrafterClass)))
    assert EVERYTHING.lacks(replace(MLA_31, aux_count=4), True, "offsets") == []
    assert nothing.lacks(LLAMA, False) == []
    assert nothing.lacks(MLA_31, True) == ["fc_norm", "norm_output"]
    assert nothing.lacks(replace(LLAMA, norm_before_fc=True), False) == ["norm_before_fc"]
    assert nothing.lacks(replace(MLA, aux_count=0), False) == ["use_aux_hidden_state: false"]
    assert nothing.lacks(replace(MLA, aux_count=4), False) == ["4 aux layers"]
    (named,) = nothing.lacks(MLA, False, "offsets")
    assert named == "a d2t that maps every token to itself"
    # Token ids are wrong wherever they are added.
    assert EVERYTHING.lacks(MLA, False, "ids") == [named]
