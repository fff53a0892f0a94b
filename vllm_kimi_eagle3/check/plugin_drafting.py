# SPDX-License-Identifier: Apache-2.0
"""Whether the plugin's loop and forward can serve a command's drafting, and if not, why.

It is what ``drafting/plan.py`` decides from vLLM's configuration when a server starts, told from
the command before. What only the loaded drafter, a measurement at the start or a batch can say is
not told here.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.findings import Evidence, Finding
from vllm_kimi_eagle3.pair import DRAFTING_SETTING, KEY, settings_of
from vllm_kimi_eagle3.plugin import why_not_loaded
from vllm_kimi_eagle3.settings import Settings

from .host import fix_of
from .plugin_attention import WhyStock
from .run import asks_for_eagle3, graph_mode
from .runner import runner_of
from .spelling import is_true
from .subject import Subject

LOOP, FORWARD = "draft-loop", "draft-forward"
"""The patches: the loop of the V1 runner, and the forward inside the V2 runner's own."""
_BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
_MIN_CAPABILITY = (8, 0)


def findings(subject: Subject) -> Iterator[Finding]:
    """That vLLM's own drafting serves, and why, where that is the command's doing."""
    facts = subject.facts
    if facts is None or not asks_for_eagle3(subject):
        return
    runner = runner_of(subject.command, facts, subject.environ)
    patch = LOOP if runner == "V1" else FORWARD
    if patch not in subject.patches or _without_plugin(subject, patch):
        return  # The host's check says so, and what comes of it.
    why = why_stock(subject, patch)
    if why is None:
        return
    what = "loop" if runner == "V1" else "forward pass of the drafter"
    yield Finding(
        "run-drafting",
        f"vLLM's own {what} drafts, and not the plugin's: {why.reason}",
        f"{why.fix}, and the plugin's serves where it is faster" if why.fix else "",
        Evidence(key="model runner", value=runner, release=facts.release or None),
    )


def why_stock(subject: Subject, patch: str) -> WhyStock | None:
    """Why vLLM's own drafting serves; None where the plugin's does if it is faster.

    Args:
        subject: after the checks of target and drafter.
        patch: the one of the runner that serves.
    """
    if subject.patches.get(patch) is not True:
        why = subject.patches_off.get(patch) or "for no known reason"
        fix = fix_of(patch, subject.environ, subject.patches_off)
        return WhyStock(f"the patch {patch} is not in effect ({why})", fix)
    place = f'"{KEY}" in --additional-config'
    try:
        setting = settings_of(subject.command.object("additional-config")).get(DRAFTING_SETTING)
    except CheckpointError:
        setting = None  # The server is refused: drafter-setting.
    if setting is False:
        return WhyStock(
            f'"{DRAFTING_SETTING}": false of {place} says so',
            f'leave "{DRAFTING_SETTING}" out of {place}',
        )
    return (
        _speculation(subject)
        or _ranks(subject)
        or _server(subject)
        or (None if setting is True else _no_graphs(subject))
    )


def _without_plugin(subject: Subject, patch: str) -> bool:
    """True if no patch is in effect, and not this one alone."""
    off = subject.patches_off.get(patch)
    return off is not None and (
        Settings.from_environment(subject.environ).disable_all
        or off == why_not_loaded(subject.environ)[0]
    )


def _speculation(subject: Subject) -> WhyStock | None:
    keys = subject.command.speculative or {}
    for key, why in (
        ("parallel_drafting", "has no draft steps after the first"),
        ("disable_padded_drafter_batch", "waits for the sampled tokens on the host"),
        ("use_heterogeneous_vocab", "maps the drafts to another vocabulary"),
    ):
        if is_true(keys.get(key)):
            return WhyStock(f'"{key}" in --speculative-config {why}', f'leave "{key}" out')
    return None


def _ranks(subject: Subject) -> WhyStock | None:
    command = subject.command
    for name, why in (
        ("data-parallel-size", "the ranks' batches differ"),
        ("decode-context-parallel-size", "a rank holds a part of the drafter's KV cache"),
        ("prefill-context-parallel-size", "a rank holds a part of the drafter's KV cache"),
        ("pipeline-parallel-size", "the last rank alone drafts"),
    ):
        size = command.integer(name)
        if size is not None and size > 1:
            return WhyStock(f"with {command.flag(name)} {size} {why}")
    if command.switch("enable-dbo"):
        return WhyStock(
            "microbatches run at the same time", f"leave out {command.flag('enable-dbo')}"
        )
    if (command.integer("ubatch-size") or 0) > 1:
        return WhyStock(
            "microbatches run at the same time", f"leave out {command.flag('ubatch-size')}"
        )
    if command.switch("enable-eplb"):
        return WhyStock(f"{command.flag('enable-eplb')} prepares each pass of the drafter")
    return None


def _server(subject: Subject) -> WhyStock | None:
    command = subject.command
    if subject.environ.get(_BATCH_INVARIANT, "0").strip() not in ("", "0"):
        return WhyStock(f"{_BATCH_INVARIANT} is set", f"unset {_BATCH_INVARIANT}")
    if command.switch("enable-lora"):
        return WhyStock(f"{command.flag('enable-lora')} replaces layers that it shares")
    if "kv-transfer-config" in command.options:
        return WhyStock(
            f"{command.flag('kv-transfer-config')} moves the KV cache layer by layer, from within "
            "vLLM's own"
        )
    if subject.gpus is not None and subject.gpus.capability < _MIN_CAPABILITY:
        return WhyStock("the GPU's compute capability is below 8.0")
    return None


def _no_graphs(subject: Subject) -> WhyStock | None:
    if graph_mode(subject) == "NONE":
        return WhyStock("there are no CUDA graphs, without which the plugin's is not ahead")
    if is_true((subject.command.speculative or {}).get("enforce_eager")):
        return WhyStock(
            '"enforce_eager" in --speculative-config: there are no CUDA graphs, without which the '
            "plugin's is not ahead",
            'leave "enforce_eager" out of --speculative-config',
        )
    return None
