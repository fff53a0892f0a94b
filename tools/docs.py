# SPDX-License-Identifier: Apache-2.0
"""Write the pages that follow from the code: docs/patches.md, support-matrix.md and findings.md.

python tools/docs.py          # writes them
python tools/docs.py --check  # exits 1 if a page is not as the code says
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from packaging.version import Version  # noqa: E402

from vllm_kimi_eagle3.findings import Kind  # noqa: E402
from vllm_kimi_eagle3.findings.catalogue import KINDS  # noqa: E402
from vllm_kimi_eagle3.host import SUPPORTED, V2_RUNNER_SINCE  # noqa: E402
from vllm_kimi_eagle3.patches import PATCHES  # noqa: E402
from vllm_kimi_eagle3.patches.base import Patch  # noqa: E402

# The hosts that `nox -s hosts` installs and runs the tiny pair on, end to end.
END_TO_END = ("0.15.1", "0.16.0", "0.17.1", "0.20.2", "0.22.1", "0.26.0", "0.32.0")
# The hosts that tests/gpu ran on; the rows are in benchmarks/results/backport_gpu.jsonl.
ON_GPU = {"0.17.1": "H200"}

GENERATED = "<!-- Written by tools/docs.py from the code. Do not edit. -->\n"


def patches_page() -> str:
    """docs/patches.md: the catalogue."""
    parts = [
        GENERATED,
        "# Patches",
        "One gap of stock vLLM each, with the releases that have it. `vllm-kimi-eagle3 status` "
        "says which are needed and in place on the vLLM that is installed. "
        "`VLLM_KIMI_EAGLE3_DISABLE=<id>,<id>` leaves patches out.",
        *(section(patch) for patch in PATCHES),
    ]
    return "\n\n".join(parts) + "\n"


def section(patch: Patch) -> str:
    """A patch's part of the catalogue."""
    last = "now" if patch.before is None else f"before {patch.before}"
    lines = [
        f"## {patch.id}",
        "",
        f"- vLLM: {patch.since} to {last} ({', '.join(patch.releases)})",
        f"- Stock: {patch.gap}",
        f"- Patch: {patch.does}",
        f"- Changes: `{patch.target}`",
        f"- Upstream: {' '.join(f'<{link}>' for link in patch.upstream)}",
        f"- Goes: {patch.goes}",
    ]
    if patch.needs:
        lines.append(f"- Needs: {', '.join(patch.needs)}")
    lines += [
        "",
        "Relies on, and stands down where it differs:",
        "",
        *(f"- `{symbol.target}` ({symbol.match})" for symbol in patch.symbols),
    ]
    return "\n".join(lines)


def matrix_page() -> str:
    """docs/support-matrix.md: what each release gets."""
    header = ["vLLM", "runner", "EAGLE-3 for Kimi comes from", "patches", "shown"]
    rows = [row(release) for release in SUPPORTED]
    table = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    parts = [
        GENERATED,
        "# Support matrix",
        "What a supported release gets. The contract of every patch is checked against the "
        "sources of each release. *End to end* means that a real CPU wheel of that release serves "
        "the tiny pair in the tests, with the reference's tokens and acceptance counts: with the "
        "Llama drafter everywhere, with the MLA drafter where CPU builds have MLA (0.28 on). "
        "`tests/gpu` runs both drafters in bfloat16, with torch.compile and CUDA graphs, and takes "
        "training data.",
        "\n".join(table),
        "Other releases and development versions are decided by their source: a patch is applied "
        "if the gap is there and every symbol it relies on is as one of the releases above has "
        "it, and it says `untested`. Otherwise it stands down and names the symbol.",
    ]
    return "\n\n".join(parts) + "\n"


def row(release: str) -> list[str]:
    """A release's row of the matrix."""
    applied = [patch.id for patch in PATCHES if release in patch.releases]
    return [
        release,
        "V2" if Version(release) >= V2_RUNNER_SINCE else "V1",
        "this plugin" if "whitelist" in applied else "vLLM",
        ", ".join(applied) or "none",
        ("end to end" if release in END_TO_END else "contract")
        + (f"; tests/gpu on {ON_GPU[release]}" if release in ON_GPU else ""),
    ]


AREAS = {
    "host": "The vLLM that is here",
    "command": "The command line",
    "files": "Files of a checkpoint",
    "target": "The target",
    "drafter": "The drafter",
    "run": "How they are run",
    "memory": "Memory",
    "diagnose": "A server that runs",
    "plan": "How many drafts",
}


def findings_page() -> str:
    """docs/findings.md: every kind of finding, as `check --explain` has it."""
    parts = [
        GENERATED,
        "# Findings",
        "What `vllm-kimi-eagle3 check` can say of a command, `diagnose` of a server that runs and "
        "`plan` of its load, and what the plugin says with the same ids in the server's log. "
        "*fails*: it does not start, or ends at a request. *wrong*: "
        "it runs and is not what it should be, in silence. *slow*: it is right and costs more than "
        "it needs to. *note*: worth knowing. *untold*: something could not be told. The severity "
        "is the usual one; a finding may be rated otherwise where the release or the GPU makes a "
        "difference. `vllm-kimi-eagle3 check --explain ID` prints an entry. A pair that has it and "
        "one that just has it not, each with the whole report, are in `tests/data/check/ID`; "
        "those of `diagnose` and `plan` are in `tests/unit/diagnose` and `tests/unit/planning`.",
    ]
    for area, title in AREAS.items():
        parts.append(f"## {title}")
        parts += [kind_section(kind) for kind in KINDS.values() if kind.area == area]
    return "\n\n".join(parts) + "\n"


def kind_section(kind: Kind) -> str:
    """A kind's part of docs/findings.md."""
    label = "untold" if kind.undecided else kind.severity.value
    parts = [f"### {kind.id}", f"*{label}*. {kind.title}.", kind.explanation]
    if kind.upstream:
        parts.append("Upstream: " + " ".join(f"<{link}>" for link in kind.upstream))
    return "\n\n".join(parts)


PAGES = {
    "patches.md": patches_page,
    "support-matrix.md": matrix_page,
    "findings.md": findings_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        path = REPOSITORY / "docs" / name
        if not path.exists() or path.read_text(encoding="utf-8") != page():
            stale.append(f"docs/{name}")
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(page(), encoding="utf-8")
    if check and stale:
        print(f"{', '.join(stale)}: not as the code says; run python tools/docs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
