# SPDX-License-Identifier: Apache-2.0
"""Which reading of a drafter's checkpoint is the one that it was trained with, from one load of the
target (``diagnose --offline``).

The target answers some prompts and reads its answers once more, in a process of its own that writes
its hidden states down (``capture.py``, the only file that runs in vLLM). Then the drafter is run on
them in plain torch (``score.py``), read in one way after another (``hypotheses.py``), and the
counts are those that a server would have. ``subject.py`` has what both checkpoints and the resolver
say, ``memory.py`` what it takes, ``setting.py`` what to change, ``write.py`` a copy that has it,
``report.py`` the answer and ``run.py`` the command.
"""
