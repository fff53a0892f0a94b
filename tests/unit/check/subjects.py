# SPDX-License-Identifier: Apache-2.0
"""Subjects for the checks that look at a command, a release and GPUs, without folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_kimi_eagle3.check.command import parse
from vllm_kimi_eagle3.check.facts import facts_for
from vllm_kimi_eagle3.check.gpus import parse_gpus
from vllm_kimi_eagle3.check.subject import Checkpoint, Subject
from vllm_kimi_eagle3.checkpoint.drafter import TargetShape, read_drafter
from vllm_kimi_eagle3.findings import Finding
from vllm_kimi_eagle3.host import SUPPORTED

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
KIMI = "moonshotai__Kimi-K2.5"
DRAFTERS = {"mla": "lightseekorg__kimi-k2.5-eagle3-mla", "llama": "AQ-MedAI__Kimi-K25-eagle3"}
SM120, H200, B200, A100 = "sm_120,96GiB,8", "sm_90,141GB,8", "sm_100,180GB,8", "sm_80,80GB,8"


def read(name: str) -> dict[str, Any]:
    config = json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config


def subject(
    release: str = "0.33.0",
    *words: str,
    gpu: str | None = SM120,
    drafter: str | None = "mla",
    k: int = 3,
    speculative: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    patches: dict[str, bool] | None = None,
    target: dict[str, Any] | None = None,
) -> Subject:
    """A subject of Kimi-K2.5 with a published drafter.

    Args:
        release: the vLLM.
        words: of the command, behind the model.
        gpu: as ``--gpu`` takes it.
        drafter: ``mla``, ``llama``, or None for one that is not on this machine.
        k: the number of drafts.
        speculative: more keys of ``--speculative-config``.
        environ: the server's environment.
        patches: as the host's check leaves them.
        target: edits of the target's config.
    """
    asked = {"method": "eagle3", "model": "d", "num_speculative_tokens": k, **(speculative or {})}
    facts = facts_for(release)
    command = parse(["t", "--speculative-config", json.dumps(asked), *words], facts)
    config = {**read(KIMI), **(target or {})}
    shape = TargetShape(61, 7168, 163840)
    draft = None if drafter is None else read(DRAFTERS[drafter])
    return Subject(
        command=command,
        facts=facts,
        environ=environ or {},
        gpus=None if gpu is None else parse_gpus(gpu),
        patches=patches or {},
        target=Checkpoint("t", None, config),
        drafter=Checkpoint("d", None, draft),
        shape=shape,
        pair=None if draft is None else read_drafter(draft, shape),
    )


def ids(found: Any) -> list[str]:
    return [finding.id for finding in found]


def only(found: Any, id: str) -> Finding:
    """The one finding of that id."""
    (finding,) = (f for f in found if f.id == id)
    return finding


def releases(first: str, last: str) -> list[str]:
    return list(SUPPORTED[SUPPORTED.index(first) : SUPPORTED.index(last) + 1])
