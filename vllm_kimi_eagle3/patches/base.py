# SPDX-License-Identifier: Apache-2.0
"""A patch as data, and the decision whether this host gets it.

A patch closes one gap of upstream. Its record says where, on which releases, why, and when it can
go; importing it changes nothing. Whether it is applied is decided by :func:`decide`: the version
is a hint, the upstream source is what counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from packaging.version import Version

from vllm_kimi_eagle3.contract import Sources, Symbol, known_shapes
from vllm_kimi_eagle3.host import SUPPORTED, Host

Undo = Callable[[], None]


class NotNeededError(Exception):
    """Raised by a patch's ``install`` or ``verify`` where something else has taken the place that
    the patch would change, by the user's wish; the message is the reason in ``status``."""


# 0.15.0 is the same series as the first supported release; nothing older is tried.
OLDEST = Version(".".join(SUPPORTED[0].split(".")[:2]))


@dataclass(frozen=True)
class Patch:
    """One gap of upstream and what closes it.

    Attributes:
        id: the name in logs, ``status`` and ``VLLM_KIMI_EAGLE3_DISABLE``.
        gap: what stock vLLM does wrong, in one sentence.
        target: where it is changed, ``"module:Qualified.name"``.
        since: first supported release with the gap.
        before: first supported release without it; None while upstream has not closed it.
        does: what the patch does about it, in one sentence.
        upstream: links to the reports and to the fix.
        goes: when the patch can be removed.
        symbols: what it relies on upstream, ``target`` included.
        open_in: whether a source tree has the gap.
        install: makes the change and returns what takes it back; may raise
            :class:`NotNeededError`.
        verify: True if the change is in place, read back from vLLM; may raise
            :class:`NotNeededError`.
        needs: ids of patches without which this one would only move the failure to later.
        convenience: True if Kimi with EAGLE-3 runs as well without it; standing down is then
            not worth a warning.
    """

    id: str
    gap: str
    target: str
    since: str
    before: str | None
    does: str
    upstream: tuple[str, ...]
    goes: str
    symbols: tuple[Symbol, ...]
    open_in: Callable[[Sources], bool]
    install: Callable[[], Undo]
    verify: Callable[[], bool]
    needs: tuple[str, ...] = ()
    convenience: bool = False

    @property
    def releases(self) -> tuple[str, ...]:
        """The supported releases that the patch is for."""
        return tuple(r for r in SUPPORTED if self.covers(Version(r)))

    def covers(self, version: Version) -> bool:
        """True if ``version`` is in the patch's range of releases."""
        base = Version(version.base_version)
        return Version(self.since) <= base and (self.before is None or base < Version(self.before))


class Action(str, Enum):
    """What :func:`decide` says of a patch on a host."""

    APPLY = "apply"
    NOT_NEEDED = "not needed"
    STAND_DOWN = "stand down"


@dataclass(frozen=True)
class Decision:
    """What to do with a patch here, and why in one sentence."""

    action: Action
    reason: str


def decide(patch: Patch, host: Host, sources: Sources) -> Decision:
    """Whether ``host`` gets ``patch``. Never raises, reads no more source than it needs.

    A supported release outside the patch's range is answered by its number alone, so that nothing
    is read where upstream has closed the gap. Anything else is answered by the source: if the gap
    is there and every symbol is as one of the patch's releases has it, apply.
    """
    if host.supported:
        assert host.version is not None
        if not patch.covers(host.version):
            return Decision(Action.NOT_NEEDED, f"vLLM {host.version.public} does not have the gap")
    elif host.is_release and host.version is not None and host.version < OLDEST:
        return Decision(
            Action.STAND_DOWN,
            f"vLLM {host.version_text} is older than {SUPPORTED[0]}, the first supported release",
        )
    if not patch.open_in(sources):
        return Decision(Action.NOT_NEEDED, f"the source of {host.label} does not have the gap")
    for symbol in patch.symbols:
        if (problem := _mismatch(symbol, patch, host, sources)) is not None:
            return Decision(Action.STAND_DOWN, f"{problem} in {host.label}")
    if host.supported:
        return Decision(Action.APPLY, f"vLLM {host.version_text} has the gap")
    return Decision(
        Action.APPLY,
        f"untested release: {host.label} has the gap, and its source is as in vLLM "
        f"{' or '.join(patch.releases)} where it matters",
    )


def set_attribute(owner: Any, name: str, value: object) -> Undo:
    """Set ``owner.name`` and return what puts the owner's own attribute (or its absence) back.

    An attribute that somebody else has replaced since is left as it is.
    """
    missing = object()
    original = vars(owner).get(name, missing)
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner).get(name, missing) is not value:
            return
        if original is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return undo


def all_of(undo: Iterable[Undo]) -> Undo:
    """One that takes all of them back, the last first."""
    steps = tuple(undo)

    def every() -> None:
        for one in reversed(steps):
            one()

    return every


def wrap_method(owner: Any, name: str, wrapper: Any, patch_id: str) -> Undo:
    """Put ``wrapper`` in the place of the method ``owner.name``, so that :func:`wrapped_by` knows.

    ``wrapper`` takes the method's name and documentation. Returns what puts the method back.
    """
    functools.update_wrapper(wrapper, vars(owner)[name])
    wrapper.__vllm_kimi_eagle3__ = patch_id
    return set_attribute(owner, name, wrapper)


def wrapped_by(patch_id: str, method: Any) -> bool:
    """True if ``method`` is the wrapper that the patch put there."""
    return getattr(method, "__vllm_kimi_eagle3__", None) == patch_id


def _mismatch(symbol: Symbol, patch: Patch, host: Host, sources: Sources) -> str | None:
    shape = sources.shape(symbol.target)
    if shape is None and not symbol.expected_in(host.version):
        return None
    if shape is None:
        return f"{symbol.target} does not exist"
    known = (known_shapes()[release].get(symbol.target) for release in patch.releases)
    if any(k is not None and k.agrees(shape, symbol.match) for k in known):
        return None
    return f"{symbol.target} has another {symbol.match} than in vLLM {', '.join(patch.releases)}"
