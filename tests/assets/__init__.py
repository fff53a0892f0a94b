# SPDX-License-Identifier: Apache-2.0
"""Committed tiny checkpoints, prompts and expected results, and the scripts around them.

- `kimi-k2.5-tiny/`: target; `eagle3-llama-tiny/`, `eagle3-mla-tiny/`: drafters trained for it.
- `prompts.json`, `expected.json`: inputs, and what `tests/reference` makes of them.
- `build.py`: trains and writes all of these. `variants.py`: folders derived from them in tests.
"""
