# SPDX-License-Identifier: Apache-2.0
"""One load of the target: which reading of the drafter's checkpoint is the right one."""

from __future__ import annotations

from .kinds import Kind, Severity

_ISSUES = "https://github.com/vllm-project/vllm/issues/"
_PULLS = "https://github.com/vllm-project/vllm/pull/"

_SHOWN = """\
That is shown on the target's own answers: the drafter is run on its hidden states in each way, \
and what a server would accept is counted. The gain is significant with all the readings taken \
into account that were tried."""

KINDS: tuple[Kind, ...] = (
    Kind(
        "diagnose-offline-aux-layers",
        Severity.WRONG,
        "Other aux layers are better",
        f"""\
The drafter drafts significantly better on the hidden states of other layers than those that the \
server feeds it. Trainers count a layer's output and vLLM its input, so a list that is one off is \
the usual cause; others name the last layer's output or the embedding.

{_SHOWN} The setting that is printed wins over the drafter's config.json, and the plugin honours \
it on every release.""",
        upstream=("https://github.com/sgl-project/sglang/pull/25454", f"{_PULLS}50170"),
    ),
    Kind(
        "diagnose-offline-norms",
        Severity.WRONG,
        "A norm is read the other way",
        f"""\
`fc_norm` and `norm_before_fc` say which norms stand before `fc`, `norm_output` what a draft step \
hands on to the next one, and `norm_before_residual` what the layer adds to. The drafter drafts \
significantly better with one of them the other way: a trainer had a switch that did not reach \
config.json, or wrote one that it did not train with.

{_SHOWN}""",
        upstream=(
            "https://github.com/sgl-project/SpecForge/pull/568",
            f"{_PULLS}42764",
            f"{_PULLS}46488",
        ),
    ),
    Kind(
        "diagnose-offline-rope",
        Severity.WRONG,
        "Another rope is better",
        f"""\
The drafter drafts significantly better with another base (`rope_theta`), with or without YaRN, or \
with YaRN's parameters of another trainer. A base of 10000 is what Transformers takes where a \
config names none, or in a layout that it does not read.

{_SHOWN} Short requests tell bases apart, and hardly a scaling that only matters at length.""",
        upstream=("https://github.com/vllm-project/vllm-ascend/issues/6612", f"{_PULLS}51092"),
    ),
    Kind(
        "diagnose-offline-d2t",
        Severity.WRONG,
        "The rows of its head stand for other tokens",
        f"""\
With a reduced draft vocabulary `d2t` says which token of the target each row of the head is. The \
drafts are significantly better with another map: the one that follows from `t2d`, the numbers in \
`d2t` taken as token ids, or one that is not in the checkpoint at all. That last one is learned \
from one half of the answers and counted on the other, so it is a lower bound of what the right \
`d2t` gives.

{_SHOWN}""",
        upstream=(f"{_ISSUES}50158", f"{_PULLS}43671"),
    ),
    Kind(
        "diagnose-offline-own-part",
        Severity.WRONG,
        "Its embedding or head is not the one it was trained with",
        f"""\
The drafter drafts significantly better with the target's embedding, or the target's head, than \
with the one in its checkpoint. It was trained with the target's and exported with another one, or \
its own belongs to another drafter; then the target's is better and not as good as the right one.

Or the head fits its layer badly: a linear correction of what the head reads, fitted to one half \
of the answers, makes significantly more drafts right on the other half. A head that was trained \
with its layer leaves nothing to correct, whatever else is wrong. It takes 1,500 drafts or more to \
see that, and the more of them the wider the drafter is. Text of a kind that the drafter never \
saw leaves a little to correct as well, so less than 2 points do not count, and less than 4 where \
hardly a draft is right.

{_SHOWN}""",
        upstream=(f"{_PULLS}28549",),
    ),
    Kind(
        "diagnose-offline-none-fits",
        Severity.WRONG,
        "No reading of the drafter drafts well",
        """\
Whichever way its checkpoint is read, less than a third of the first drafts is right. So it is not \
a matter of settings: the weights are not whole, a part of them belongs to another drafter (a \
head with other rows looks like that), it was trained for another model altogether, or the prompts \
are of a kind that it never saw: a language, or no text at all.""",
    ),
    Kind(
        "diagnose-offline-weak",
        Severity.NOTE,
        "The best reading is below what was published",
        """\
No other reading is better than the best one of the table, and that is well below what was \
published of the drafter. A drafter of a sibling target (K2.5's on K2.6) looks like that, so does \
text that it was not trained on, and a head that belongs to another drafter. Weights cannot tell \
which of these it is: try `--prompts` with requests of your own, and compare the checkpoint with \
its publisher's.""",
        undecided=True,
    ),
    Kind(
        "diagnose-offline-length",
        Severity.WRONG,
        "Drafting stops at a length that was set",
        """\
`"max_model_len"` in `--speculative-config` is a limit of your own, and requests may be longer. A \
request stops drafting there, alone; without the plugin the V1 runner stops for the whole batch.""",
        upstream=(f"{_ISSUES}58080",),
    ),
    Kind(
        "diagnose-offline-no-score",
        Severity.NOTE,
        "The drafter cannot be scored",
        """\
Scoring computes the drafter in plain torch, and this one has something that it does not compute: \
quantised weights, all drafts in one pass, a window of attention, a rope that no Kimi drafter has, \
weights that are missing or not on this machine, or another target than Kimi.""",
        undecided=True,
    ),
    Kind(
        "diagnose-offline-engine",
        Severity.NOTE,
        "The target could not be run",
        """\
vLLM did not load the target, or ended before all hidden states were written; its own log says \
why. The target is loaded without speculation, eagerly, and with the flags of the command that \
matter to it.""",
        undecided=True,
    ),
    Kind(
        "diagnose-offline-memory",
        Severity.NOTE,
        "There is not the room for the hidden states",
        """\
The hidden states of all texts are written to files, of which the largest size is known before \
anything is loaded: layers times tokens times the hidden size times two bytes. `--budget` makes it \
less, `--keep FOLDER` puts it elsewhere.""",
        undecided=True,
    ),
    Kind(
        "diagnose-offline-copy",
        Severity.NOTE,
        "The copy of the drafter was not written",
        """\
`--write FOLDER` makes a copy of the drafter that the server reads in the best way. The folder has \
to be new or empty, and where tensors change there has to be room for the weights once more.""",
        undecided=True,
    ),
)
