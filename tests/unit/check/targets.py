# SPDX-License-Identifier: Apache-2.0
"""Targets in folders, and subjects that name them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.assets.synthetic import kimi_config, light_tensors, write_header
from vllm_kimi_eagle3.check.command import parse
from vllm_kimi_eagle3.check.facts import facts_for
from vllm_kimi_eagle3.check.gpus import parse_gpus
from vllm_kimi_eagle3.check.subject import Subject
from vllm_kimi_eagle3.findings import Finding
from vllm_kimi_eagle3.patches import PATCHES

SPECULATIVE = '{"method": "eagle3", "model": "drafter", "num_speculative_tokens": 3}'


def make_subject(
    target: str | Path,
    *flags: str,
    release: str | None = "0.26.0",
    gpu: str | None = None,
    environ: Mapping[str, str] | None = None,
    plugin: bool = True,
) -> Subject:
    """What ``vllm serve TARGET FLAGS`` with an EAGLE-3 drafter is on a release.

    Args:
        plugin: every patch is in effect; none if False.
    """
    facts = None if release is None else facts_for(release)
    words = [str(target), "--speculative-config", SPECULATIVE, *flags]
    return Subject(
        command=parse(words, facts),
        facts=facts,
        environ={"HF_HUB_CACHE": "/nonexistent", **(environ or {})},
        gpus=None if gpu is None else parse_gpus(gpu),
        patches=dict.fromkeys((patch.id for patch in PATCHES), plugin),
    )


def make_target(
    folder: Path,
    edit: Mapping[str, Any] | None = None,
    *,
    text: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    tensors: bool = True,
    without: Iterable[str] = (),
) -> Path:
    """A Kimi-K2.5 with all of its bytes in a few tensors.

    Args:
        edit: keys at the top of config.json; None takes one out.
        text: likewise in text_config.
        config: another config.json.
        without: tensors to leave out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = dict(kimi_config() if config is None else config)
    for block, changes in ((made, edit), (made.get("text_config"), text)):
        for key, value in (changes or {}).items():
            block[key] = value
            if value is None:
                del block[key]
    (folder / "config.json").write_text(json.dumps(made))
    if tensors:
        held = light_tensors(kimi_config())
        left = [(name, *held[name]) for name in held if name not in set(without)]
        write_header(folder / "model.safetensors", left)
    return folder


def ids(findings: Iterable[Finding]) -> list[str]:
    return [finding.id for finding in findings]


def only(findings: Iterable[Finding], id: str) -> Finding:
    """The one finding of that kind."""
    found = [finding for finding in findings if finding.id == id]
    assert len(found) == 1, found
    return found[0]
