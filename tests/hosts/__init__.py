# SPDX-License-Identifier: Apache-2.0
"""End-to-end tests in a real vLLM CPU build; `matrix.py` has the table of what runs on which host.

Run with a host's interpreter (`nox -s "hosts(0.17.1)"` builds one and does so). Each engine is a
process of its own (`harness.py` starts it, `offline.py` is what it runs, `serving.py` starts
`vllm serve`), and tests that ask about the same engine share one start.
"""
