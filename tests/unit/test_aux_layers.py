# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.checkpoint.aux_layers import (
    COUNT_KEY,
    KEY,
    AuxLayers,
    default_layers,
    resolve_aux_layers,
)
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError

LAYERS = 61

TOP = {"where": "top", "make": lambda ids: {KEY: ids}}
NESTED = {"where": "nested", "make": lambda ids: {"eagle_config": {KEY: ids}}}
NESTED_SHORT = {"where": "nested, short", "make": lambda ids: {"eagle_config": {"layer_ids": ids}}}
PLACES = [TOP, NESTED, NESTED_SHORT]


def resolve(config: dict[str, Any], **options: Any) -> AuxLayers:
    return resolve_aux_layers(config, LAYERS, **options)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place["where"])
@pytest.mark.parametrize(
    ("ids", "captured", "certain"),
    [
        (
            [1, 29, 57],
            (2, 30, 58),
            True,
        ),  # Outputs of these layers (SpecForge, ModelOpt, TorchSpec)
        ([2, 30, 58], (2, 30, 58), True),  # Inputs of these layers (vLLM, SGLang)
        ([2, 20, 58], (2, 20, 58), True),
        ([2, 15, 30, 58], (2, 15, 30, 58), True),
        ([0, 30, 61], (0, 30, 61), True),  # 61 is no layer's output, so these are inputs.
        ([1, 30, 61], (1, 30, 61), True),
        ([3, 31, 59], (3, 31, 59), False),
        ([0, 30, 58], (0, 30, 58), False),
        ([10], (10,), False),
    ],
)
def test_every_place_and_both_conventions(
    place: dict[str, Any], ids: list[int], captured: tuple[int, ...], certain: bool
) -> None:
    layers = resolve(place["make"](ids))
    assert layers.captured == captured
    assert layers.stated == tuple(ids)
    assert layers.certain is certain
    assert (layers.unsure is None) is certain
    if layers.unsure is not None:
        assert layers.unsure.kind.id == "drafter-aux-unsure"
        assert str([i + 1 for i in captured]) in layers.unsure.fix
    assert str(ids) in str(layers)
    assert str(list(captured)) in str(layers)


@pytest.mark.parametrize("config", [{}, {KEY: None}, {"eagle_config": None}, {"eagle_config": {}}])
def test_nothing_named_is_the_default(config: dict[str, Any]) -> None:
    layers = resolve(config)
    assert layers.captured == default_layers(LAYERS) == (2, 30, 58)
    assert layers.stated is None
    assert "default" in str(layers)


def test_two_exports_of_one_drafter_in_one_config() -> None:
    """TorchSpec's export for vLLM adds 1 at the top and leaves the nested list."""
    both = {KEY: [2, 30, 58], "eagle_config": {KEY: [1, 29, 57]}}
    assert resolve(both).captured == (2, 30, 58)


def test_a_config_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"contradicts itself.*\[2, 30, 58\].*\[2, 20, 58\]"):
        resolve({KEY: [2, 30, 58], "eagle_config": {KEY: [2, 20, 58]}})


@pytest.mark.parametrize(
    ("config", "chosen", "file", "key"),
    [
        ({KEY: [2, 30, 58]}, None, "config.json", KEY),
        ({"eagle_config": {KEY: [2, 30, 58]}}, None, "config.json", f"eagle_config.{KEY}"),
        ({"eagle_config": {"layer_ids": [2, 30, 58]}}, None, "config.json",
         "eagle_config.layer_ids"),
        ({}, None, "config.json", KEY),
        ({KEY: [2, 9, 30, 58]}, [2, 30, 58], None, "--additional-config"),
    ],
)  # fmt: skip
def test_too_few_are_said_of_where_they_stand(
    config: dict[str, Any], chosen: list[int] | None, file: str | None, key: str
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        resolve(config, fc_count=4, chosen=chosen)
    evidence = refusal.value.finding.evidence
    assert (evidence.file, evidence.key) == (file, key)


def test_the_users_choice_wins() -> None:
    layers = resolve({KEY: [1, 29, 57]}, chosen=[1, 29, 57])
    assert layers.captured == (1, 29, 57)
    assert layers.certain
    assert "--additional-config" in str(layers)


@pytest.mark.parametrize(
    ("config", "fc_count", "message"),
    [
        ({KEY: [2, 30, 58]}, 4, r"joins 4 hidden states .*fc.weight.* names 3: \[2, 30, 58\]"),
        ({KEY: [2, 15, 30, 58]}, 3, r"joins 3 hidden states .*names 4"),
        ({}, 4, r"joins 4 .*config.json names no aux layers, and the default has 3"),
        ({COUNT_KEY: 4}, 3, r"num_aux_hidden_states is 4, but fc.weight is as wide as 3"),
        ({COUNT_KEY: 4, KEY: [2, 30, 58]}, None, r"joins 4 .*num_aux_hidden_states.* names 3"),
        ({COUNT_KEY: "3"}, None, "num_aux_hidden_states is '3'"),
    ],
)
def test_their_number_is_that_of_fc(
    config: dict[str, Any], fc_count: int | None, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as refusal:
        resolve(config, fc_count=fc_count)
    assert refusal.value.finding.kind.id in ("drafter-aux-count", "drafter-config-value")


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place["where"])
@pytest.mark.parametrize(
    "ids",
    ["123", 7, [], [True, 2], [1.0, 2], [2, "30"], [-1, 30], [2, 30, 62], [30, 2], [2, 2, 30], {}],
    ids=repr,
)
def test_what_cannot_be_layers_is_refused_by_name(place: dict[str, Any], ids: Any) -> None:
    with pytest.raises(CheckpointError) as refusal:
        resolve(place["make"](ids))
    assert "layer" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    finding = refusal.value.finding
    assert finding.kind.id == "drafter-aux-layers"
    assert finding.fix
    assert finding.evidence.file == "config.json"
    assert finding.evidence.key in place["make"](0) or finding.evidence.key == (
        f"eagle_config.{next(iter(place['make'](0)['eagle_config']))}"
    )


def test_a_default_that_names_a_layer_twice_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"default for a target of 4 layers, \(2, 2, 1\)"):
        resolve_aux_layers({}, 4)


increasing = st.lists(st.integers(0, LAYERS), min_size=1, max_size=6, unique=True).map(sorted)


@given(increasing)
def test_it_is_idempotent(ids: list[int]) -> None:
    """What was resolved and written back resolves to itself, but for a list that starts at 1."""
    captured = resolve({KEY: ids}).captured
    assert len(captured) == len(ids)
    assert all(a < b for a, b in itertools.pairwise(captured))
    if captured[0] != 1 or captured[-1] == LAYERS:
        assert resolve({KEY: list(captured)}).captured == captured


@given(increasing, st.integers(1, 6))
def test_the_users_choice_is_never_shifted(ids: list[int], count: int) -> None:
    if len(ids) == count:
        assert resolve({}, chosen=ids, fc_count=count).captured == tuple(ids)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([[1, 29, 57], [2, 30, 58]]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(json_values, json_values, json_values, st.integers(-3, 100), st.none() | st.integers(0, 9))
def test_anything_else_is_refused_by_name(
    top: Any, nested: Any, count: Any, layers: int, fc_count: int | None
) -> None:
    config = {KEY: top, COUNT_KEY: count, "eagle_config": {KEY: nested}}
    try:
        resolved = resolve_aux_layers(config, layers, fc_count=fc_count)
    except CheckpointError as error:
        resolved, refusal = None, str(error)
    else:
        refusal = ""
    assert "\n" not in refusal
    if resolved is not None:
        assert resolved.captured
        assert all(0 <= layer <= layers for layer in resolved.captured)
        assert fc_count in (None, len(resolved.captured))
