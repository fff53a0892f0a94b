# SPDX-License-Identifier: Apache-2.0
"""A Kimi and a drafter's folder, as far as the checks before those of the drafter have come."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_eagle3.check import drafter as drafter_check
from vllm_kimi_eagle3.check.command import parse
from vllm_kimi_eagle3.check.facts import facts_for
from vllm_kimi_eagle3.check.host import patches_on
from vllm_kimi_eagle3.check.subject import Checkpoint, Subject
from vllm_kimi_eagle3.checkpoint.drafter import TargetShape
from vllm_kimi_eagle3.findings import Finding

from .corpus import ASSETS, CONFIGS, build_folder

# The tiny pairs of tests/assets; `variants` there makes them, with torch.
TINY = TargetShape(8, 96, 512)
TINY_CONFIG = json.loads((ASSETS / "kimi-k2.5-tiny" / "config.json").read_text())
VARIANTS = sorted(json.loads((ASSETS / "expected.json").read_text())["variants"])

KIMI = TargetShape(61, 7168, 163840)
KIMI_CONFIG = json.loads((CONFIGS / "moonshotai__Kimi-K2.5" / "config.json").read_text())
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def made(folder: Path, config: str, **recipe: Any) -> Path:
    """A drafter's folder by a recipe of the corpus, complete unless that says otherwise."""
    build_folder(folder, {"config": config, "tensors": "expected", **recipe}, KIMI)
    return folder


def made_variant(name: str, folder: Path) -> tuple[int, ...]:
    """Writes a variant of the tiny drafters and returns the layers that it reads. Skips the test
    where there is no torch."""
    variants = pytest.importorskip(
        "tests.assets.variants", reason="torch makes the tiny drafters", exc_type=ImportError
    )
    variants.write_variant(name, folder)
    layers: tuple[int, ...] = variants.VARIANTS[name].aux_layer_ids
    return layers


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys at the top of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def new_subject(
    drafter: Path | str,
    /,
    release: str | None,
    environ: Mapping[str, str] = V1,
    *words: str,
    shape: TargetShape | None = KIMI,
    target: Mapping[str, Any] | None = KIMI_CONFIG,
    **speculative: Any,
) -> Subject:
    """Before the drafter is looked at."""
    text = json.dumps({"method": "eagle3", "model": str(drafter), **speculative})
    facts = None if release is None else facts_for(release)
    command = parse(["target", "--speculative-config", text, *words], facts)
    subject = Subject(command, facts, environ)
    if facts is not None:
        off = patches_on(facts, None, environ)
        subject.patches = {name: not why for name, why in off.items()}
        subject.patches_off = {name: why for name, why in off.items() if why}
    subject.target = Checkpoint("target", None, target)
    subject.shape = shape
    return subject


def subject_of(*args: Any, **options: Any) -> Subject:
    """After it; arguments of :func:`new_subject`."""
    subject = new_subject(*args, **options)
    list(drafter_check.findings(subject))
    return subject


def found(*args: Any, **options: Any) -> dict[str, Finding]:
    """What is found of the drafter, by id; arguments of :func:`new_subject`."""
    findings = list(drafter_check.findings(new_subject(*args, **options)))
    by_id = {finding.id: finding for finding in findings}
    assert len(by_id) == len(findings), findings
    return by_id
