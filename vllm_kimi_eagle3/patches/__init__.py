# SPDX-License-Identifier: Apache-2.0
"""The catalogue of patches, as data, and what applies them and says how each stands.

One file per gap upstream. Importing this package changes nothing; :func:`apply` does.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import Enum

from vllm_kimi_eagle3.checkpoint.errors import quoted
from vllm_kimi_eagle3.contract import Sources
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity
from vllm_kimi_eagle3.host import Host
from vllm_kimi_eagle3.settings import DISABLE, Settings

from . import (
    aux_edges,
    aux_layers,
    bare_language_model,
    cannot_work,
    draft_forward,
    draft_loop,
    draft_vocabulary,
    drafter_folder,
    drafter_length,
    drafter_positions,
    drafter_rope,
    drafter_tensors,
    eagle31_drafter,
    extract_text_config,
    head_sharing,
    image_token,
    image_token_saved_again,
    kimi_k2_config,
    mla_attention,
    mla_drafter,
    mla_rope,
    replicated_drafter,
    target_interface,
    tool_parser,
    v2_without_aux,
    whitelist,
    yarn_magnitude,
)
from .base import Action, NotNeededError, Patch, Undo, decide

PATCHES: tuple[Patch, ...] = (
    image_token.PATCH,
    target_interface.PATCH,
    bare_language_model.PATCH,
    kimi_k2_config.PATCH,
    mla_drafter.PATCH,
    drafter_folder.PATCH,
    extract_text_config.PATCH,
    whitelist.PATCH,
    aux_layers.PATCH,
    drafter_rope.PATCH,
    mla_rope.PATCH,
    yarn_magnitude.PATCH,
    drafter_tensors.PATCH,
    draft_vocabulary.PATCH,
    head_sharing.PATCH,
    eagle31_drafter.PATCH,
    replicated_drafter.PATCH,
    aux_edges.PATCH,
    drafter_length.PATCH,
    drafter_positions.PATCH,
    v2_without_aux.PATCH,
    image_token_saved_again.PATCH,
    cannot_work.PATCH,
    mla_attention.PATCH,
    draft_loop.PATCH,
    draft_forward.PATCH,
    tool_parser.PATCH,
)
"""Every patch, in the order of application: a patch comes after those it needs."""


class State(str, Enum):
    """How a patch stands in this process."""

    APPLIED = "applied"
    NOT_NEEDED = "not needed"
    STOOD_DOWN = "stood down"
    DISABLED = "disabled"
    FAILED = "failed"
    NOT_LOADED = "not loaded"


@dataclass(frozen=True)
class Status:
    """A patch's state, and why, in one sentence.

    Attributes:
        patch: the patch.
        state: how it stands.
        reason: why.
        verified: whether the change was read back from vLLM; None where there is none to read.
    """

    patch: Patch
    state: State
    reason: str
    verified: bool | None = None

    @property
    def satisfied(self) -> bool:
        """True if what the patch is for holds here, by the patch or by upstream."""
        return self.state is State.NOT_NEEDED or (
            self.state is State.APPLIED and self.verified is True
        )


def not_in_place(
    patch: Patch,
    why: str,
    *,
    here: str = "",
    fix: str = "",
    release: str | None = None,
    rated: Severity | None = None,
) -> Finding:
    """That a patch is not in effect, and what stock does wrong without it.

    Args:
        patch: the patch.
        why: why it is not, in words.
        here: what comes of it for the pair at hand, if that is known.
        fix: what to do about it; "" where the reason is this vLLM's source.
        release: of the vLLM.
        rated: how bad it is here, if that is known.
    """
    other = "" if patch.before is None else f"use vLLM {patch.before} or later, or "
    return Finding(
        "host-patch-not-in-place",
        f"the patch {patch.id} is not in effect ({why}){f', so {here}' if here else ''}: "
        f"{patch.gap.rstrip('.')}",
        fix or f"{other}see what `vllm-kimi-eagle3 status` says of it",
        Evidence(key=patch.id, value=why, release=release),
        rated=rated,
        links=patch.upstream,
    )


def unknown_patches(settings: Settings) -> Iterator[Finding]:
    """What ``VLLM_KIMI_EAGLE3_DISABLE`` names that is no patch."""
    known = [patch.id for patch in PATCHES]
    for name in sorted(settings.disabled.difference(known))[:_MOST_UNKNOWN]:
        close = difflib.get_close_matches(name.lower()[:80], known)
        yield Finding(
            "host-unknown-patch",
            f"{DISABLE} names {quoted(name)}, which is no patch, so it switches nothing off",
            f"write {' or '.join(close)} there" if close else f"the patches: {', '.join(known)}",
            Evidence(key=DISABLE, value=quoted(name)),
        )


_MOST_UNKNOWN = 5

_undo: dict[str, Undo] = {}


def apply(
    host: Host,
    settings: Settings | None = None,
    patches: Collection[Patch] = PATCHES,
    *,
    sources: Sources | None = None,
) -> tuple[Status, ...]:
    """Apply to the vLLM in this process what ``host`` needs; idempotent.

    Args:
        host: the vLLM that is installed here.
        settings: the user's switches.
        patches: the patches to consider, in order.
        sources: the host's source tree, if it was read before.

    Returns:
        One status per patch, in order. A patch that cannot be applied is a status, not an
        exception.
    """
    settings = settings or Settings()
    sources = sources or Sources(host.root)
    statuses: dict[str, Status] = {}
    for patch in patches:
        status = _apply_one(patch, host, settings, sources, statuses)
        if status.state is not State.APPLIED:
            revert((patch,))
        statuses[patch.id] = status
    return tuple(statuses.values())


def _apply_one(
    patch: Patch,
    host: Host,
    settings: Settings,
    sources: Sources,
    earlier: dict[str, Status],
) -> Status:
    decision = decide(patch, host, sources)
    if decision.action is Action.NOT_NEEDED:
        return Status(patch, State.NOT_NEEDED, decision.reason)
    if settings.disable_all or patch.id in settings.disabled:
        return Status(patch, State.DISABLED, "switched off by VLLM_KIMI_EAGLE3_DISABLE")
    if decision.action is Action.STAND_DOWN:
        return Status(patch, State.STOOD_DOWN, decision.reason)
    for needed in patch.needs:
        if needed in earlier and not earlier[needed].satisfied:
            # What follows from the user's own switch is no problem of this vLLM.
            state = earlier[needed].state
            consequence = State.DISABLED if state is State.DISABLED else State.STOOD_DOWN
            return Status(patch, consequence, f"needs {needed}, which is {state.value}")
    try:
        if patch.id not in _undo:
            _undo[patch.id] = patch.install()
        verified = patch.verify()
    except NotNeededError as error:
        return Status(patch, State.NOT_NEEDED, str(error))
    except Exception as error:  # Whatever upstream raises here must not stop a server.
        return Status(patch, State.FAILED, f"{type(error).__name__}: {error}")
    if not verified:
        return Status(
            patch, State.FAILED, "the change was made but is not what vLLM uses", verified=False
        )
    return Status(patch, State.APPLIED, decision.reason, verified=True)


def revert(patches: Collection[Patch] = PATCHES) -> None:
    """Take back what :func:`apply` changed, the last first."""
    for patch in reversed(tuple(patches)):
        undo = _undo.pop(patch.id, None)
        if undo is not None:
            undo()
