# SPDX-License-Identifier: Apache-2.0
"""TEST ONLY: notes which modules of the plugin under test each vLLM process imports.

With `IMPORT_LOG=folder` in the environment, every process that loads general plugins writes
`folder/<process name>-<pid>`, one module a line: what was imported already, then what is imported
later, through an audit hook. Changes nothing in the process.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

PACKAGE = "vllm_kimi_eagle3"


def register() -> None:
    """Start the log; nothing without `IMPORT_LOG`."""
    folder = os.environ.get("IMPORT_LOG")
    if not folder:
        return
    path = Path(folder) / f"{multiprocessing.current_process().name}-{os.getpid()}"

    def note(*modules: str) -> None:
        with path.open("a") as log:
            log.writelines(f"{module}\n" for module in modules)

    note(*(module for module in list(sys.modules) if module.split(".")[0] == PACKAGE))

    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        if event == "import" and str(arguments[0]).split(".")[0] == PACKAGE:
            note(str(arguments[0]))

    sys.addaudithook(on_event)
