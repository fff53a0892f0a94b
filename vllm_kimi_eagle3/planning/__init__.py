# SPDX-License-Identifier: Apache-2.0
"""How many drafts pay, at which load: a model of a step's time, fitted to what was measured.

``model.py`` is the model (docs/plan.md states it), ``rows.py`` and ``sweep.py`` are where its
measurements come from, ``schedule.py`` what to tell which vLLM. Standard library only.
"""
