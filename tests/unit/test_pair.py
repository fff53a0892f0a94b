# SPDX-License-Identifier: Apache-2.0
"""The words of a refusal and of the log line; the hosts' tests make pairs of real configs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.assets import variants
from vllm_kimi_eagle3.checkpoint.drafter import TargetShape, TensorsError, read_drafter
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.checkpoint.folder import read_config
from vllm_kimi_eagle3.findings import Finding
from vllm_kimi_eagle3.pair import KEY, Pair, in_a_log, of_drafter, settings_of, tensors_of
from vllm_kimi_eagle3.patches import PATCHES, not_in_place


def test_a_refusal_ends_each_part_with_its_id() -> None:
    error = CheckpointError("drafter-rope", "a fact", "a fix")
    said = of_drafter("owner/name", error)
    assert said == "--speculative-config, \"model\": 'owner/name': a fact; a fix [drafter-rope]"
    both = TensorsError(
        [
            Finding("drafter-tensor-missing", "one", "do this"),
            Finding("drafter-tensor-shape", "two", "do that"),
        ]
    )
    said = of_drafter("d", both)
    assert said.endswith(
        "one; do this [drafter-tensor-missing]; two; do that [drafter-tensor-shape]"
    )


@pytest.mark.parametrize(
    ("additional", "words"),
    [
        ({"kimi_eagle3": "x"}, "is 'x', and must be an object"),
        ({"kimi_eagle3": {"aux_layers": [1]}}, "has no setting 'aux_layers'"),
        ({"kimi_eagle3": {"a\nb": 1}}, "has no setting 'a\\nb'"),
        ({"kimi_eagle3": {"attention": 0}}, "has attention 0, and must have true or false"),
        ({"kimi_eagle3": {"drafting": 1}}, "has drafting 1, and must have true or false"),
        ({"kimi_eagle3": {"drafting": None}}, "has drafting null, and must have true or false"),
    ],
)
def test_settings_that_there_are_not(additional: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        settings_of(additional)
    finding = refusal.value.finding
    assert finding.kind.id == "drafter-setting"
    assert words in finding.fact
    assert "\n" not in finding.text


def test_settings() -> None:
    for nothing in (None, {}, "text", {"other": 1}, {"kimi_eagle3": None}):
        assert settings_of(nothing) == {}
    layers = {"aux_hidden_state_layers": [2, 4, 5]}
    assert settings_of({"kimi_eagle3": layers, "other": 1}) == layers
    off = {"attention": False}
    assert settings_of({"kimi_eagle3": off}) == off
    for forced in (True, False):
        assert settings_of({"kimi_eagle3": {"drafting": forced}}) == {"drafting": forced}


def test_the_line_for_the_log() -> None:
    drafter = read_drafter(read_config(variants.LLAMA_DRAFTER), TargetShape(8, 96, 512))
    assert drafter is not None
    pair = Pair(drafter, TargetShape(8, 96, 512), "d", SimpleNamespace(), None, None)
    pair.notes.append("a plain fact")
    pair.notes.append(Finding("drafter-length", "less beyond"))
    line = str(pair)
    assert "\n" not in line
    assert line.startswith("EAGLE-3 drafter d: Llama attention; aux layers: ")
    assert line.endswith("; a plain fact; note: less beyond [drafter-length]")


def test_which_tensors_are_the_drafters(tmp_path: Path) -> None:
    folder = variants.LLAMA_DRAFTER
    assert tensors_of(folder, str(folder))
    assert tensors_of(folder, "owner/name")  # A snapshot in the cache that is complete.
    assert tensors_of(folder, str(folder), "dummy") is None
    assert tensors_of(None, "owner/name") is None
    assert tensors_of(tmp_path, str(tmp_path)) is None


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_what_is_said_of_a_patch_that_is_not_in_effect(patch: Any) -> None:
    finding = not_in_place(patch, "stood down: x has another body", here="y", release="0.99")
    assert finding.kind.id == "host-patch-not-in-place"
    start = f"the patch {patch.id} is not in effect (stood down: x has another body), so y: "
    assert finding.fact == start + patch.gap.rstrip(".")
    assert finding.fix
    assert finding.upstream == patch.upstream
    assert (finding.evidence.key, finding.evidence.release) == (patch.id, "0.99")
    assert "\n" not in finding.text
    assert not_in_place(patch, "off", fix="do it").fix == "do it"


def refused(given: Any) -> Finding:
    with pytest.raises(CheckpointError) as refusal:
        settings_of({KEY: given})
    finding = refusal.value.finding
    assert finding.kind.id == "drafter-setting"
    assert str(finding.evidence.key).endswith(" in --additional-config")
    return finding


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"aux_layers": [1, 2, 3]}, '{"aux_hidden_state_layers": [1, 2, 3]}'),
        ([1, 2, 3], '{"aux_hidden_state_layers": [1, 2, 3]}'),
        ({"Attention": False}, '{"attention": false}'),
        ({"atention": False}, '{"attention": false}'),
        ({"ATTENTION": True}, '{"attention": true}'),
        # A value that cannot be the setting's is not written on.
        ({"atention": 0}, '{"attention": true}'),
        ({"atention": [1, 2, 3]}, '{"attention": true}'),
        ({"aux_hidden_state_layer": "2"}, '{"aux_hidden_state_layers": [...]}'),
        ({"aux_hidden_state_layer": []}, '{"aux_hidden_state_layers": [...]}'),
        ({"draft": True}, '{"drafting": true}'),
        ({"Drafting": False}, '{"drafting": false}'),
        # Neither of the two is what a server does without it.
        ({"draftng": 1}, '{"drafting": true or false}'),
        ({"drafting": "true"}, '{"drafting": true or false}'),
        (
            {"attention": False, "drafting": "auto", "aux_hidden_state_layers": [1, 2, 3]},
            '{"aux_hidden_state_layers": [1, 2, 3], "attention": false, "drafting": true or false}',
        ),
        ({"aux_hidden_state_layer": [True, 2]}, '{"aux_hidden_state_layers": [...]}'),
        ({"aux_hidden_state_layer": [[1]] * 99}, '{"aux_hidden_state_layers": [...]}'),
        # What is right beside it stays.
        (
            {"atention": False, "aux_hidden_state_layers": [1, 2, 3]},
            '{"aux_hidden_state_layers": [1, 2, 3], "attention": false}',
        ),
        ({"Attention": True, "attention": False}, '{"attention": false}'),
        (
            {"attention": 0, "aux_hidden_state_layers": [1, 2, 3]},
            '{"aux_hidden_state_layers": [1, 2, 3], "attention": false}',
        ),
    ],
)
def test_the_whole_right_setting(given: Any, right: str) -> None:
    assert refused(given).fix == f'write "kimi_eagle3": {right} there, or leave it out'


@pytest.mark.parametrize(
    "given",
    [False, True, 0, "x", [], ["attention"], {"x": "y"}, {"x": [1, 2, 3]}, {"x" * 9999: 1}, {7: 1}],
    ids=lambda given: str(given)[:20],
)
def test_where_no_setting_is_near_none_is_written(given: Any) -> None:
    assert refused(given).fix == (
        'leave it out: the settings are "aux_hidden_state_layers", a list of layers, and '
        '"attention" and "drafting", true or false'
    )


def test_tensors_that_do_not_fit_are_said_to_be_the_checkpoints() -> None:
    error = TensorsError([Finding("drafter-tensor-missing", "x is missing", "get it")])
    start = "the drafter's checkpoint does not fit its config.json: x is missing; get it"
    assert str(error) == start
    assert in_a_log(error) == f"{start} [drafter-tensor-missing]"
