# SPDX-License-Identifier: Apache-2.0
"""Which readings are tried, and which hidden states they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.assets import variants
from vllm_kimi_eagle3.checkpoint.rope import Rope
from vllm_kimi_eagle3.diagnose.offline.hypotheses import (
    Choices,
    Reading,
    aux_choices,
    described,
    layers_needed,
    one_change,
    rope_choices,
)
from vllm_kimi_eagle3.diagnose.offline.subject import Subject

YARN = {
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
TARGET_ROPE = Rope(50_000.0, "yarn", {**YARN, "beta_fast": 32.0})
KIMI = Choices(61, 3, ((2, 30, 58), (1, 29, 57)), TARGET_ROPE, ("norm_output",), ("none",), ())
NOW = Reading(aux=(2, 30, 58), rope=Rope(50_000.0, "yarn", YARN), rows="none")


def test_the_aux_layers_of_a_kimi() -> None:
    tried = list(aux_choices(NOW.aux, KIMI))
    for ids in (
        *((2, 30, 58), (3, 31, 59), (1, 29, 57), (0, 28, 56)),
        *((2, 30, 61), (0, 30, 61)),
    ):
        assert ids in tried
    assert len(tried) == len(set(tried))
    layers, final = layers_needed(NOW, KIMI)
    # Few enough to be written down, of 62, and none that is the norm's output.
    assert layers == (0, 1, 2, 3, 28, 29, 30, 31, 56, 57, 58, 59, 61)
    assert not final


def test_ids_stay_within_the_target() -> None:
    tiny = replace(KIMI, num_layers=8, stated=((0, 4, 8),))
    for ids in aux_choices((0, 4, 8), tiny):
        assert ids is not None
        assert 0 <= ids[0] < ids[1] < ids[2] <= 8
    four = replace(tiny, count=4, stated=())
    tried = list(aux_choices((2, 3, 4, 5), four))
    assert tried == [(2, 3, 4, 5), (3, 4, 5, 6), (1, 2, 3, 4)]


def test_a_drafter_without_aux_layers() -> None:
    without = replace(KIMI, count=0, stated=())
    assert list(aux_choices(None, without)) == [None, (61,), (60,)]
    assert layers_needed(replace(NOW, aux=None), without) == ((60, 61), True)


def test_ropes_that_are_tried() -> None:
    tried = list(rope_choices(NOW.rope, KIMI))
    assert Rope(10_000.0) in tried
    assert Rope(1_000_000.0) in tried
    assert Rope(50_000.0, "yarn", YARN) in tried
    assert TARGET_ROPE in tried
    # Stock vLLM's magnitude up to 0.29.
    assert any(abs(rope.magnitude - 1.4159) < 1e-3 for rope in tried)
    assert all(rope.kind in ("default", "yarn") for rope in tried)


def test_every_reading_is_one_change_apart_and_tried_once() -> None:
    near = one_change(NOW, KIMI)
    assert {len(NOW.changed(reading)) for reading in near} == {1}
    assert len({reading.key for reading in near}) == len(near)
    assert NOW.key not in {reading.key for reading in near}
    names = {NOW.changed(reading)[0] for reading in near}
    assert names == {"aux", "norm_output", "rope"}


def test_how_a_reading_is_described() -> None:
    assert described(NOW, NOW) == "as it is now"
    shifted = replace(NOW, aux=(3, 31, 59), norm_output=True)
    assert described(shifted, NOW) == "aux layers [3, 31, 59] (one higher), norm_output on"
    assert described(replace(NOW, head="target"), NOW) == "the target's head"
    assert described(replace(NOW, aux=None), NOW) == "the final hidden state"


# ---------------------------------------------------------------- what a checkpoint leaves open


def test_the_committed_drafters(subject_of: Callable[[str], Subject]) -> None:
    llama = subject_of(variants.LLAMA_DRAFTER.name)
    assert llama.now == Reading(
        aux=(2, 4, 5), rope=Rope(50_000.0), embedding="target", head="own", rows="d2t"
    )
    # Its map holds, so that t2d says the same; it has no norms before fc.
    assert llama.choices.rows == ("d2t", "ids", "none")
    assert llama.choices.switches == ("norm_output", "norm_before_residual")
    assert llama.choices.own == ("head",)
    mla = subject_of(variants.MLA_DRAFTER.name)
    assert mla.now.rope.yarn
    assert mla.now.rows == "none"
    assert mla.choices.rows == ("none",)


def test_norms_are_open_where_their_tensors_are(subject_of: Callable[[str], Subject]) -> None:
    assert "fc_norm" in subject_of("mla-eagle31").choices.switches
    assert "norm_before_fc" in subject_of("llama-norm-before-fc").choices.switches
    assert "fc_norm" not in subject_of("llama-norm-before-fc").choices.switches
