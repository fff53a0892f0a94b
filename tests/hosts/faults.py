# SPDX-License-Identifier: Apache-2.0
"""What vLLM without the patches makes of each variant of the tiny drafters, by release.

Read from the sources; `test_drafters.py` shows it on the hosts, and `check` is held against it.
"""

from __future__ import annotations

from packaging.version import Version

# From the first release and before the second, stock builds another drafter than was trained, or
# none.
Range = tuple[str, str]
ALL = ("0.15", "1")
FAULTS: dict[str, list[Range]] = {
    # EAGLE-3.1. Nested flags are read by no release.
    "llama-fc-norm": [("0.15", "0.22")],
    "mla-fc-norm": [("0.15", "0.23")],
    "llama-norm-output": [("0.15", "0.22")],
    "mla-norm-output": [("0.15", "0.22")],
    "llama-eagle31": [("0.15", "0.22")],
    "mla-eagle31": [("0.15", "0.23")],
    "llama-eagle31-nested": [ALL],
    "mla-eagle31-nested": [ALL],
    "speculators-eagle31": [("0.15", "0.25")],
    # Other options of EAGLE-3.
    "llama-norm-before-fc": [("0.15", "0.18")],
    "llama-norm-before-fc-nested": [("0.15", "0.22")],
    "mla-norm-before-fc": [ALL],
    "mla-norm-before-fc-nested": [ALL],
    "mla-no-aux": [("0.18", "1")],
    "llama-four-aux-nested": [("0.15", "0.22")],
    "mla-four-aux-nested": [("0.15", "0.22")],
    "llama-four-aux-top": [ALL],
    "mla-four-aux-top": [ALL],
    # Rope.
    "mla-plain-rope": [("0.18", "0.28")],
    "llama-yarn": [("0.15", "0.30")],
    "llama-yarn-5x": [("0.15", "0.30")],
    # Vocabulary.
    "llama-identity-d2t": [("0.30", "1")],
    "mla-identity-d2t": [("0.30", "1")],
}
# Written by Transformers 5 and read with Transformers 4, theta is lost, whatever the release.
NEWER_LAYOUT: dict[str, list[Range]] = {
    "llama-theta-5x": [],
    "mla-yarn-5x": [],
    "mla-plain-rope-5x": FAULTS["mla-plain-rope"],
}

# What a runner captures, where that is not what the drafter was trained on: for V1 and V2 alike a
# list that counts outputs at the top level; nested, V1 takes it as it stands from 0.22 on, and
# where nested lists are not read, a list that is not the default is lost.
CAPTURE_FAULTS: dict[str, dict[str, list[Range]]] = {
    "llama-aux-output-top": {"V1": [ALL], "V2": [ALL]},
    "mla-aux-output-top": {"V1": [ALL], "V2": [ALL]},
    "llama-aux-output-nested": {"V1": [("0.22", "1")]},
    "mla-aux-output-nested": {"V1": [("0.22", "1")]},
    "llama-aux-edges": {"V1": [("0.15", "0.22")], "V2": [ALL]},
    "mla-aux-edges": {"V1": [("0.15", "0.22")], "V2": [ALL]},
}


def hits(ranges: list[Range], host: str) -> bool:
    return any(Version(since) <= Version(host) < Version(before) for since, before in ranges)
