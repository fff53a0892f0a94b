# SPDX-License-Identifier: Apache-2.0
"""Plain-torch float32 reference of Kimi-K2.5 with EAGLE-3.

The specification that the plugin's tests compare against: the target's text tower (`target.py`),
the two drafter families (`drafter.py`) and the draft-verify loop with vLLM's counters
(`speculate.py`). Nothing here imports vLLM or the plugin, nothing is fast on purpose, and every
size comes from the checkpoint folder's `config.json`. `tests/assets/build.py` trains the committed
tiny checkpoints with these same modules.
"""
