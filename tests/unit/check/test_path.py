# SPDX-License-Identifier: Apache-2.0
"""Which patches a pair needs, against what was seen of stock on real releases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.hosts.faults import CAPTURE_FAULTS, FAULTS, NEWER_LAYOUT, hits
from vllm_kimi_eagle3.check import drafter as drafter_check
from vllm_kimi_eagle3.check import path as path_check
from vllm_kimi_eagle3.check.command import parse
from vllm_kimi_eagle3.check.facts import facts_for
from vllm_kimi_eagle3.check.gpus import parse_gpus
from vllm_kimi_eagle3.check.path import stock_aux_layers
from vllm_kimi_eagle3.check.subject import Subject
from vllm_kimi_eagle3.findings import Finding, Severity
from vllm_kimi_eagle3.host import SUPPORTED
from vllm_kimi_eagle3.patches import PATCHES

from .pairs import (
    KIMI_CONFIG,
    TINY,
    TINY_CONFIG,
    V1,
    V2,
    VARIANTS,
    made,
    made_variant,
    new_subject,
    subject_of,
)

BACKPORT = {
    "image-token", "target-interface", "bare-language-model", "kimi-k2-config", "mla-drafter",
    "whitelist",
}  # fmt: skip

MLA = "lightseekorg__kimi-k2.5-eagle3-mla"
MLA_31 = "lightseekorg__kimi-k2.6-eagle3.1-mla"
YARN = "lightseekorg__kimi-k2.5-eagle3"
PLAIN = "AQ-MedAI__Kimi-K25-eagle3"
SHORT = "AQ-MedAI__Kimi-K2-Instruct-eagle3"
KEY = "eagle_aux_hidden_state_layer_ids"


def before(release: str, other: str) -> bool:
    return Version(release) < Version(other)


def needs(subject: Subject) -> dict[str, Severity]:
    found = path_check.path(subject)
    assert found is not None
    return {need.patch: need.severity for need in found.needed}


# Read in the sources as well, and not run: V2 captures three layers for a list of four in
# eagle_config, as V1 does before it reads them there; speculators' norm_before_fc is translated
# from 0.19 on.
MORE_CAPTURED = {
    name: {"V1": [("0.15", "0.22")], "V2": [("0.15", "1")]}
    for name in ("llama-four-aux-nested", "mla-four-aux-nested")
}
MORE_FAULTS = {"speculators-norm-before-fc": [("0.15", "0.19")]}
LENGTH = {"drafter-length", "drafter-positions"}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("runner", "environ"), [("V1", V1), ("V2", V2)], ids=["V1", "V2"])
def test_needed_is_what_was_seen_to_be_wrong(
    name: str, runner: str, environ: dict[str, str], tmp_path: Path
) -> None:
    """tests/hosts/test_drafters.py runs every variant with and without the patches."""
    layers = made_variant(name, folder := tmp_path / "drafter")
    captures = (CAPTURE_FAULTS | MORE_CAPTURED).get(name, {}).get(runner, [])
    faults = (FAULTS | MORE_FAULTS).get(name, [])
    for release in SUPPORTED:
        found = needs(subject_of(folder, release, environ, shape=TINY, target=TINY_CONFIG))
        others = BACKPORT | LENGTH | {"aux-edges", "v2-without-aux", "head-sharing"}
        captured, built = hits(captures, release), hits(faults, release)
        if name in NEWER_LAYOUT:  # With 0.19 to 0.23 either Transformers runs.
            built = hits(NEWER_LAYOUT[name], release) or before(release, "0.24")
        assert bool(found.keys() - others) == (captured or built), (release, found)
        assert ("aux-layers" in found) >= captured
        assert ("aux-edges" in found) == (0 in layers and not before(release, "0.18"))
        fed = not layers and runner == "V2" and not before(release, "0.17")
        assert ("v2-without-aux" in found) == (fed and before(release, "0.33"))
        # The scaling of mla-short reaches farther than it states; from 0.30 on V1 goes by the
        # latter (_get_and_verify_max_len).
        short = name == "mla-short" and runner == "V1" and not before(release, "0.30")
        assert bool(found.keys() & LENGTH) == (name == "llama-short" or short)


@pytest.mark.parametrize(
    ("release", "runner", "config", "captured"),
    [
        ("0.20.2", "V1", {"eagle_config": {KEY: [1, 29, 57]}}, (2, 30, 58)),  # By luck.
        ("0.22.1", "V1", {"eagle_config": {KEY: [1, 29, 57]}}, (1, 29, 57)),
        ("0.28.0", "V1", {"eagle_config": {KEY: [1, 29, 57]}}, (1, 29, 57)),
        ("0.33.0", "V1", {"eagle_config": {KEY: [1, 29, 57]}}, (1, 29, 57)),
        ("0.33.0", "V2", {"eagle_config": {KEY: [1, 29, 57]}}, (2, 30, 58)),
        ("0.26.0", "V2", {"eagle_config": {"layer_ids": [2, 20, 58]}}, (2, 30, 58)),
        ("0.27.1", "V2", {"eagle_config": {"layer_ids": [2, 20, 58]}}, (2, 20, 58)),
        ("0.27.1", "V1", {"eagle_config": {"layer_ids": [2, 20, 58]}}, (2, 30, 58)),
        ("0.15.1", "V1", {KEY: [1, 29, 57]}, (1, 29, 57)),
        ("0.33.0", "V2", {KEY: [1, 29, 57]}, (1, 29, 57)),
        ("0.33.0", "V1", {KEY: [2, 9, 58], "eagle_config": {KEY: [1, 29, 57]}}, (2, 9, 58)),
        ("0.33.0", "V1", {KEY: [], "eagle_config": None}, (2, 30, 58)),
    ],
)
def test_what_stock_captures(
    release: str, runner: str, config: dict[str, Any], captured: tuple[int, ...]
) -> None:
    assert stock_aux_layers(config, facts_for(release), runner, 61) == captured


FAILS, WRONG, SLOW = Severity.FAILS, Severity.WRONG, Severity.SLOW


@pytest.mark.parametrize(
    ("config", "release", "expected"),
    [
        (PLAIN, "0.15.1", dict.fromkeys(BACKPORT - {"kimi-k2-config", "mla-drafter"}, FAILS)),
        (MLA, "0.15.1", dict.fromkeys(BACKPORT, FAILS)),
        (PLAIN, "0.18.1", {"head-sharing": SLOW}),
        (YARN, "0.29.0", {"head-sharing": SLOW, "yarn-magnitude": WRONG}),
        (YARN, "0.30.0", {"head-sharing": SLOW}),
        (MLA, "0.21.0", {"head-sharing": SLOW}),
        (MLA, "0.22.1", {"head-sharing": SLOW, "aux-layers": WRONG}),
        (MLA_31, "0.21.0", {"head-sharing": SLOW, "eagle31-drafter": WRONG}),
        (MLA_31, "0.23.0", {"head-sharing": SLOW, "aux-layers": WRONG}),
        (SHORT, "0.28.0", {"head-sharing": SLOW, "drafter-positions": SLOW}),
    ],
)
def test_published_pairs(
    config: str, release: str, expected: dict[str, Severity], tmp_path: Path
) -> None:
    assert needs(subject_of(made(tmp_path / "d", config), release)) == expected


@pytest.mark.parametrize(
    ("config", "recipe", "release", "environ", "patch", "severity"),
    [
        # What a Llama drafter's class has no parameter for ends the load; MLA's drops it.
        (PLAIN, {"set": {"fc_norm": True}}, "0.21.0", V1, "eagle31-drafter", FAILS),
        (PLAIN, {"set": {"fc_norm": True}}, "0.22.1", V1, "eagle31-drafter", None),
        (MLA, {"set": {"fc_norm": True}}, "0.22.1", V1, "eagle31-drafter", WRONG),
        (MLA, {"set": {"fc_norm": True}}, "0.17.1", V1, "eagle31-drafter", FAILS),
        (MLA, {"set": {"norm_before_fc": True}}, "0.24.0", V1, "eagle31-drafter", WRONG),
        (MLA, {"set": {"norm_before_fc": True}}, "0.25.1", V1, "eagle31-drafter", FAILS),
        (PLAIN, {"set": {"norm_before_fc": True}}, "0.17.1", V1, "eagle31-drafter", FAILS),
        (
            PLAIN,
            {"set": {"eagle_config.norm_before_fc": True}},
            "0.21.0",
            V1,
            "eagle31-drafter",
            WRONG,
        ),
        (
            PLAIN,
            {"set": {"eagle_config.norm_before_residual": True}},
            "0.33.0",
            V1,
            "eagle31-drafter",
            WRONG,
        ),
        (PLAIN, {"set": {"norm_before_residual": True}}, "0.33.0", V1, "eagle31-drafter", None),
        # Without aux layers, where only one place says so.
        (
            PLAIN,
            {"set": {"use_aux_hidden_state": False}, "unset": ["eagle_config"]},
            "0.33.0",
            V1,
            "aux-layers",
            FAILS,
        ),
        (
            PLAIN,
            {"set": {"eagle_config.use_aux_hidden_state": False}},
            "0.33.0",
            V1,
            "aux-layers",
            None,
        ),
        # Another number of layers than stock builds fc for.
        (PLAIN, {"set": {KEY: [2, 9, 30, 58]}, "unset": ["eagle_config"]}, "0.26.0", V1,
         "aux-layers", FAILS),
        # The ends of the target.
        (MLA, {"set": {f"eagle_config.{KEY}": [2, 30, 61]}}, "0.24.0", V1, "aux-edges", FAILS),
        (MLA, {"set": {f"eagle_config.{KEY}": [2, 30, 61]}}, "0.25.1", V1, "aux-edges", None),
        # The rope.
        (MLA, {"set": {"rope_scaling": None}}, "0.18.1", V1, "mla-rope", WRONG),
        (MLA, {"set": {"rope_scaling": None}}, "0.27.1", V1, "mla-rope", FAILS),
        (MLA, {"set": {"rope_scaling": None}}, "0.28.0", V1, "mla-rope", None),
        # Length: V2 does not compare it.
        (SHORT, {}, "0.33.0", V2, "drafter-positions", FAILS),
        (SHORT, {}, "0.33.0", V1, "drafter-positions", SLOW),
        (YARN, {"set": {"rope_scaling.factor": 2.0}}, "0.33.0", V2, "drafter-length", FAILS),
        (YARN, {}, "0.33.0", V2, "drafter-length", None),
    ],
)  # fmt: skip
def test_what_comes_of_it_without(
    config: str,
    recipe: dict[str, Any],
    release: str,
    environ: dict[str, str],
    patch: str,
    severity: Severity | None,
    tmp_path: Path,
) -> None:
    subject = subject_of(made(tmp_path / "d", config, **recipe), release, environ)
    assert subject.pair is not None
    assert needs(subject).get(patch) == severity


@pytest.mark.parametrize(
    ("gpu", "words", "release", "severity"),
    [
        ("sm_120", (), "0.20.2", SLOW),
        ("sm_120", (), "0.24.0", FAILS),  # While graphs are captured.
        ("sm_120", ("--enforce-eager",), "0.24.0", SLOW),
        ("sm_120", (), "0.33.0", SLOW),
        ("sm_120", ("--kv-cache-dtype", "fp8"), "0.17.1", FAILS),  # No back-end.
        ("sm_120", ("--kv-cache-dtype", "fp8"), "0.19.1", SLOW),
        ("sm_120", ("--kv-cache-dtype", "fp8"), "0.33.0", FAILS),  # Too much shared memory.
        ("sm_80", ("--kv-cache-dtype", "fp8"), "0.33.0", None),  # No kernel of either.
        ("sm_90", (), "0.24.0", None),
        ("sm_90", ("--attention-backend", "TRITON_MLA"), "0.24.0", FAILS),
        (None, (), "0.24.0", None),
    ],
)
def test_the_attention_of_verify_steps(
    gpu: str | None, words: tuple[str, ...], release: str, severity: Severity | None, tmp_path: Path
) -> None:
    folder = made(tmp_path / "d", PLAIN)
    for environ in (V1, V1 | {"VLLM_KIMI_EAGLE3_DISABLE": "mla-attention"}):
        subject = subject_of(folder, release, environ, *words)
        subject.gpus = None if gpu is None else parse_gpus(gpu)
        found = path_check.path(subject)
        assert found is not None
        assert needs(subject).get("mla-attention") == severity
        is_open = "mla-attention" in {need.patch for need in found.open}
        assert is_open == (severity is not None and "VLLM_KIMI_EAGLE3_DISABLE" in environ)
        assert (found.verdict == "not at all") == (is_open and severity is FAILS)
        by = {c.name: c.by for c in found.capabilities}["attention of decode and verify steps"]
        assert by == ("nobody" if is_open else "plugin" if severity else "upstream")


def test_a_limit_of_the_users_is_no_gap(tmp_path: Path) -> None:
    folder = made(tmp_path / "d", SHORT)
    assert "drafter-positions" in needs(subject_of(folder, "0.33.0"))
    assert "drafter-positions" not in needs(subject_of(folder, "0.33.0", max_model_len=4096))


@pytest.mark.parametrize(
    ("release", "environ", "edit", "patch", "needed"),
    [
        ("0.33.0", V1, {"media_placeholder_token_id": None}, "image-token-saved-again", True),
        ("0.33.0", V2, {"media_placeholder_token_id": None}, "image-token-saved-again", False),
        ("0.31.0", V1, {"media_placeholder_token_id": None}, "image-token-saved-again", False),
        ("0.33.0", V1, {}, "image-token-saved-again", False),
        ("0.17.1", V1, {}, "image-token", True),
        ("0.17.1", V1, {"image_token_index": 163605}, "image-token", False),
        ("0.15.1", V1, {"model_type": "deepseek_v3"}, "image-token", False),
        ("0.15.1", V1, {"model_type": "deepseek_v3"}, "bare-language-model", False),
        ("0.15.1", V1, {"model_type": "kimi_k2"}, "kimi-k2-config", True),
    ],
)
def test_what_follows_from_the_target(
    release: str,
    environ: dict[str, str],
    edit: dict[str, Any],
    patch: str,
    needed: bool,
    tmp_path: Path,
) -> None:
    merged = {key: value for key, value in {**KIMI_CONFIG, **edit}.items() if value is not None}
    subject = subject_of(made(tmp_path / "d", PLAIN), release, environ, target=merged)
    assert (patch in needs(subject)) == needed


def test_the_verdict_and_its_findings(tmp_path: Path) -> None:
    folder = made(tmp_path / "d", MLA)
    right = path_check.path(subject_of(folder, "0.21.0"))
    assert right is not None
    assert right.verdict == "upstream"
    assert str(right) == "upstream's own code; made faster by head-sharing"
    assert {c.by for c in right.capabilities if c.name != "embedding and LM head"} == {"upstream"}

    patched = path_check.path(subject_of(folder, "0.26.0"))
    assert patched is not None
    assert patched.verdict == "plugin"
    assert str(patched) == "the plugin: aux-layers; made faster by head-sharing"

    off = subject_of(folder, "0.26.0", {"VLLM_KIMI_EAGLE3_DISABLE": "aux-layers"})
    wrong = path_check.path(off)
    assert wrong is not None
    assert wrong.verdict == "upstream"
    assert str(wrong).endswith("; made faster by head-sharing; aux-layers is not in effect")
    (finding,) = path_check.findings(off)
    assert finding.kind.id == "host-patch-not-in-place"
    assert finding.severity is Severity.WRONG
    assert "stock captures [1, 29, 57] in place of [2, 30, 58]" in finding.fact
    assert finding.fix == "take aux-layers out of VLLM_KIMI_EAGLE3_DISABLE"
    assert finding.evidence.release == "0.26.0"

    refused = subject_of(folder, "0.17.1", {"VLLM_KIMI_EAGLE3_DISABLE": "1"})
    nothing = path_check.path(refused)
    assert nothing is not None
    assert nothing.verdict == "not at all"
    assert (
        str(nothing) == f"not at all: {len(nothing.open)} patches that it needs are not in effect"
    )
    found = list(path_check.findings(refused))
    # The image token is said of the target, with the key that would do as well.
    assert [f.evidence.key for f in found] == [
        patch.id for patch in PATCHES
        if patch.id in (BACKPORT | {"head-sharing"}) - {"image-token", "bare-language-model"}
    ]  # fmt: skip
    assert {f.fix for f in found} == {"unset VLLM_KIMI_EAGLE3_DISABLE"}
    for finding in found:
        assert "\n" not in finding.text
        assert not finding.fact.endswith(".")


def test_a_plugin_that_is_filtered_out(tmp_path: Path) -> None:
    subject = subject_of(made(tmp_path / "d", MLA), "0.26.0", {"VLLM_PLUGINS": "lora_resolver"})
    found = list(path_check.findings(subject))
    assert found
    assert all("set it to 'lora_resolver,kimi_eagle3'" in finding.fix for finding in found)


def test_a_drafter_that_no_class_serves(tmp_path: Path) -> None:
    folder = made(tmp_path / "d", PLAIN, set={"architectures": ["Eagle3MistralForCausalLM"]},
                  tensors=None)  # fmt: skip
    subject = new_subject(folder, "0.26.0")
    found = path_check.path(subject, list(drafter_check.findings(subject)))
    assert found is not None
    assert found.verdict == "not at all"
    assert str(found) == "not at all: drafter-architecture"


def test_a_way_is_not_promised_where_something_of_the_pair_fails(tmp_path: Path) -> None:
    folder = made(tmp_path / "d", MLA, set={"num_hidden_layers": 2})
    subject = new_subject(folder, "0.17.1")
    said = list(drafter_check.findings(subject))
    assert subject.pair is not None
    found = path_check.path(subject, said)
    assert found is not None
    assert (found.verdict, str(found)) == ("not at all", "not at all: drafter-layers")
    # What is only worth knowing, or is of the command, takes nothing away.
    others = [replace(finding, rated=Severity.WRONG) for finding in said]
    others.append(Finding("command-value", "no such value"))
    assert others[-1].severity is Severity.FAILS
    found = path_check.path(subject, others)
    assert found is not None
    assert found.verdict == "plugin"


def test_the_way_of_a_patch_whose_need_is_switched_off(tmp_path: Path) -> None:
    needing = next(patch for patch in PATCHES if patch.needs and patch.id == "whitelist")
    environ = {"VLLM_KIMI_EAGLE3_DISABLE": needing.needs[0]}
    subject = subject_of(made(tmp_path / "d", MLA), needing.since, environ)
    fixes = {f.evidence.key: f.fix for f in path_check.findings(subject)}
    assert fixes["whitelist"] == f"take {needing.needs[0]} out of VLLM_KIMI_EAGLE3_DISABLE"


def test_a_drafter_that_cannot_be_read_still_tells_of_the_target(tmp_path: Path) -> None:
    subject = subject_of(tmp_path / "missing", "0.17.1", {"VLLM_KIMI_EAGLE3_DISABLE": "1"})
    assert subject.pair is None
    assert needs(subject) == dict.fromkeys(
        ("image-token", "target-interface", "whitelist"), Severity.FAILS
    )
    assert len(list(path_check.findings(subject))) == 2
    # Where nothing speaks against it, nothing is claimed either.
    assert path_check.path(subject_of(tmp_path / "missing", "0.17.1")) is None


@pytest.mark.parametrize("release", SUPPORTED)
def test_every_need_is_for_a_gap_of_the_release(release: str, tmp_path: Path) -> None:
    """A pair that meets as much as it can needs no patch that does not cover the release."""
    folder = made(
        tmp_path / "d",
        MLA,
        set={
            "eagle_config": {KEY: [0, 30, 61], "fc_norm": True, "norm_output": True},
            "rope_scaling": None,
            "max_position_embeddings": 2048,
        },
    )
    patches = {patch.id: patch for patch in PATCHES}
    for environ in (V1, V2):
        for name in needs(subject_of(folder, release, environ)):
            assert release in patches[name].releases


def test_nothing_is_said_of_what_is_no_pair(tmp_path: Path) -> None:
    subject = subject_of(made(tmp_path / "d", MLA), "0.26.0")
    for change in ({"facts": None}, {"target": None}, {"shape": None}):
        for name, value in change.items():
            was = getattr(subject, name)
            setattr(subject, name, value)
            assert path_check.path(subject) is None
            assert list(path_check.findings(subject)) == []
            setattr(subject, name, was)
    subject.command = parse(["target"])
    assert path_check.path(subject) is None
