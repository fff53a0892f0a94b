# SPDX-License-Identifier: Apache-2.0
"""How many drafts pay, at which load."""

from __future__ import annotations

from .kinds import Kind, Severity

_PULLS = "https://github.com/vllm-project/vllm/pull/"

KINDS: tuple[Kind, ...] = (
    Kind(
        "plan-never-pays",
        Severity.SLOW,
        "No number of drafts pays",
        """\
For every load that was looked at, a step without drafts yields more tokens a second than one \
with any number of them. Either acceptance is low (`vllm-kimi-eagle3 diagnose`), or a verify step \
costs too much (`vllm-kimi-eagle3 check` says why on this GPU).""",
    ),
    Kind(
        "plan-depends-on-context",
        Severity.NOTE,
        "It depends on the context, and no flag does",
        """\
Up to which batch speculation pays depends on how long the requests are: reading the KV cache and \
verifying several tokens against it cost more, the longer they are. vLLM can choose the number of \
drafts by the batch and not by the length, so a schedule fits one length; it is the one of \
`--for-context`.""",
    ),
    Kind(
        "plan-schedule-piecewise",
        Severity.NOTE,
        "A schedule costs the full CUDA graphs on this runner",
        """\
With `num_speculative_tokens_per_batch_size` the V1 runner captures its CUDA graphs piecewise \
("for reliability"), so every step pays for launching the attention of each layer, some 50 us a \
layer. The V2 runner keeps its full graphs. Measure both before you keep the schedule.""",
        upstream=(f"{_PULLS}42885",),
    ),
    Kind(
        "plan-schedule-data-parallel",
        Severity.NOTE,
        "A schedule and data parallelism do not go together",
        """\
Data-parallel ranks have batches of different size and would choose different numbers of drafts, \
while they have to run in step. From 0.26 on vLLM drops the schedule with one warning and uses \
"num_speculative_tokens"; 0.24 and 0.25 do not, and hang.""",
    ),
    Kind(
        "plan-no-schedule",
        Severity.NOTE,
        "This release has one number of drafts for all loads",
        """\
`num_speculative_tokens_per_batch_size` came with 0.24. Before it, "num_speculative_tokens" holds \
for every batch (`disable_by_batch_size`, which 0.15 and 0.16 take, is read by nothing). Two \
servers behind a router, or the number that is best for the usual load, are what is left.""",
    ),
    Kind(
        "plan-few-rows",
        Severity.NOTE,
        "Too little was measured",
        """\
The model has more unknowns than the measured steps can fix, and what they leave open is filled \
by what is usual for Kimi: how much of a step is weights, how fast experts are used up, what \
drafting costs. The intervals say how far that carries. A few more measurements narrow them: with \
and without drafts, at a small and at a large batch, at a short and at a long context.""",
        undecided=True,
    ),
    Kind(
        "plan-model-off",
        Severity.NOTE,
        "The model does not fit what was measured",
        """\
Measured steps differ from the model's by more than a sixth, each predicted from the others. The \
rows may be of different servers, or taken while others used it; or the server does something \
that the model does not know, such as another attention back-end from some length on.""",
        undecided=True,
    ),
    Kind(
        "plan-acceptance-assumed",
        Severity.NOTE,
        "Acceptance beyond what was measured",
        """\
Acceptance was measured for some positions, and more drafts than that are planned with the last \
position's rate. Drafters fall off after the positions that they were trained for, so the gain \
from more drafts than were measured is the most that can be hoped for.""",
    ),
    Kind(
        "plan-no-input",
        Severity.NOTE,
        "Nothing to plan from",
        """\
`plan` needs what steps take, from a server that runs or from rows of a benchmark, and how many \
drafts are accepted. One of them could not be had.""",
        undecided=True,
    ),
    Kind(
        "plan-stopped",
        Severity.NOTE,
        "A defect of this command",
        """\
Something in `plan` itself went wrong, and the rest of the report is what it had found before. \
Please report it with the text of the finding.""",
        undecided=True,
    ),
)
