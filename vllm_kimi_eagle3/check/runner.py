# SPDX-License-Identifier: Apache-2.0
"""Which model runner serves a command: V2 where the release has it for Kimi and it has all that is
asked for, else V1."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_kimi_eagle3.host import asked_for_v2
from vllm_kimi_eagle3.limits import Runner

from .command import Command
from .facts import Facts

# What the V2 runner does not take: VllmConfig._get_v2_model_runner_unsupported_features (before
# 0.22.1 a part of _validate_v2_model_runner), in the first and before the second release.
_NOT_ON_V2: Mapping[str, tuple[str, str | None]] = {
    "enable-dbo": ("0.20", None),
    "logits-processors": ("0.20", "0.31"),
    "kv-sharing-fast-prefill": ("0.20", "0.30"),
    "enable-return-routed-experts": ("0.20", "0.28"),
    "enable-prompt-embeds": ("0.22", "0.29"),
    "enable-elastic-ep": ("0.24", "0.32"),
}
_PARALLEL_DRAFTING_NOT_ON_V2 = "0.22"


def runner_of(command: Command, facts: Facts, environ: Mapping[str, str]) -> Runner:
    """The model runner that serves."""
    chosen = facts.runner(environ)
    if chosen == "V2" and asked_for_v2(environ) is None and lacking_on_v2(command, facts):
        return "V1"
    return "V2" if chosen == "V2" else "V1"


def lacking_on_v2(command: Command, facts: Facts) -> list[str]:
    """What the command asks for and the V2 runner of this release does not have."""
    lacking = []
    for name, (since, before) in _NOT_ON_V2.items():
        if facts.before(since) or (before is not None and not facts.before(before)):
            continue
        if command.switch(name) or (name == "logits-processors" and name in command.options):
            lacking.append(command.flag(name))
    parallel = (command.speculative or {}).get("parallel_drafting") is True
    if parallel and not facts.before(_PARALLEL_DRAFTING_NOT_ON_V2):
        lacking.append('"parallel_drafting" in --speculative-config')
    return lacking
