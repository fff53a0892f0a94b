# SPDX-License-Identifier: Apache-2.0
"""A server that runs: what its acceptance looks like, and what that comes from."""

from __future__ import annotations

from .kinds import Kind, Severity

_ISSUES = "https://github.com/vllm-project/vllm/issues/"
_PULLS = "https://github.com/vllm-project/vllm/pull/"

_OFFLINE = """\
`vllm-kimi-eagle3 diagnose --offline MODEL --speculative-config '{...}'` loads the target once, \
scores the drafter on each hypothesis and prints the setting that is right."""

KINDS: tuple[Kind, ...] = (
    Kind(
        "diagnose-nothing-accepted",
        Severity.WRONG,
        "No draft is accepted",
        f"""\
Next to none of the first drafts is accepted, fewer than four in a thousand. A drafter that is \
fed wrongly still guesses some tokens right; one that proposes other tokens than it meant guesses \
none. That is how a reduced draft vocabulary looks whose `d2t` is missing or wrong, a head or an \
embedding that was never loaded, and the token 0, which the V1 runner verifies in place of drafts \
when requests are longer than the drafter's `max_model_len`.

`vllm-kimi-eagle3 check` with the server's command reads the headers of the checkpoint and names \
what is missing. {_OFFLINE}""",
        upstream=(f"{_ISSUES}50158",),
    ),
    Kind(
        "diagnose-features",
        Severity.WRONG,
        "The drafter is fed the wrong thing",
        f"""\
The first draft is accepted much too seldom, and the later ones with it: the hidden states, \
norms, rope, embedding or head are not those that the drafter was trained with. In published \
reports the first position fell to 1 and to 10 %; here everything below 35 % counts, or below 0.6 \
of what is expected of the drafter. Against an earlier measurement of the same prompts (`--expect \
FILE`) a twentieth is enough: one layer off costs a good drafter 8 to 30 points of the first \
position.

Counters cannot say which of these it is. {_OFFLINE} docs/right-tensors.md has the usual causes.""",
        upstream=(f"{_PULLS}50170", f"{_PULLS}43671"),
    ),
    Kind(
        "diagnose-recurrence",
        Severity.WRONG,
        "The second draft falls off",
        f"""\
The first draft is accepted as often as it should be, so what the drafter is fed is right. The \
second one is accepted much less often of the times that it is tried: what the drafter hands on \
to itself is wrong. Mostly that is `norm_output` (EAGLE-3.1 hands on the normed hidden state, \
EAGLE-3 the one before the norm), and rarely positions or the drafter's KV cache.

A healthy drafter's drafts are accepted about equally often wherever they are tried. {_OFFLINE}""",
        upstream=("https://github.com/sgl-project/SpecForge/pull/568", f"{_PULLS}46488"),
    ),
    Kind(
        "diagnose-trained-depth",
        Severity.SLOW,
        "More drafts than the drafter was trained for",
        """\
Drafts are accepted about equally often up to some position, and seldom after it. Drafters are \
trained by unrolling some steps, mostly three or more; beyond them they meet inputs that they \
never saw. That is no fault, but every draft costs time to draft and to verify.

Set "num_speculative_tokens" to the last good position; `vllm-kimi-eagle3 plan` says what pays.""",
    ),
    Kind(
        "diagnose-below-expected",
        Severity.NOTE,
        "Acceptance is lower than expected, and counters cannot say why",
        f"""\
The shape is that of a healthy drafter and all of it is lower: by more than other prompts \
explain, and not so low that something must be wrong. A layer that is one off looks like that (it \
costs 8 to 30 points), so does a drafter that was trained for another target of the family \
(K2.5's on K2.6 accepts 32 to 54 % of its drafts), a drafter that is weak, and text that it was \
not trained on. No counter tells these apart.

{_OFFLINE} If no hypothesis is better than the one that is served, the drafter is fed right and \
is as good as that.""",
        undecided=True,
    ),
    Kind(
        "diagnose-no-drafts",
        Severity.WRONG,
        "The server speculates and never drafts",
        """\
Tokens were generated and no step verified drafts, although the server has the counters that only \
one with `--speculative-config` has. On the V1 runner a batch with one request that is longer \
than the drafter's `max_model_len` is not drafted for at all; a schedule of drafts by batch size \
may say 0; and structured output may refuse every draft.""",
        upstream=(f"{_ISSUES}58080", f"{_ISSUES}21986"),
    ),
    Kind(
        "diagnose-drafting-stops",
        Severity.WRONG,
        "Drafting stops at a length",
        """\
Short requests are drafted for and long ones are not: the drafter's length ends before the \
target's. With the plugin such a request stops alone, at the end of the drafter's rope. Without \
it the V1 runner stops drafting for the whole batch while one of its requests is too long.

Where the drafter's rope is a formula of the position (plain, linear, llama3), a larger \
`max_position_embeddings` in its config.json is all it needs; docs/right-tensors.md says when.""",
        upstream=(f"{_ISSUES}58080", f"{_ISSUES}48894"),
    ),
    Kind(
        "diagnose-placeholders",
        Severity.WRONG,
        "Beyond a length the token 0 is verified instead of drafts",
        """\
Beyond some length drafts are counted and not a single one is accepted. With asynchronous \
scheduling the V1 runner has to verify something where it could not draft, and verifies the token \
0, for every request of the batch: the price of speculation without its gain. It does so while \
one request of the batch is longer than the drafter's `max_model_len`.""",
        upstream=(f"{_ISSUES}58080",),
    ),
    Kind(
        "diagnose-dead-beyond-length",
        Severity.WRONG,
        "Acceptance falls beyond a length",
        """\
Drafts are accepted up to some length, and much less often beyond it. Either the drafter was \
trained no further (4,096 tokens stand on one card), or its rope is not the one that it was \
trained with: a rope scaling that is dropped does no harm to short requests.

Long requests that draw on many documents are also harder to draft. The prompts here repeat one \
text, which makes them easier.""",
        upstream=("https://github.com/noonghunna/club-3090/issues/1052",),
    ),
    Kind(
        "diagnose-steps-without-drafts",
        Severity.SLOW,
        "Some steps have no drafts",
        """\
Part of the decoding steps verified no drafts, and no length was found from which on that is so. \
It may be requests that are longer than the drafter reaches, among shorter ones; structured \
output, which drops drafts that the grammar forbids; or a schedule of drafts by batch size, which \
is meant to do that.""",
    ),
    Kind(
        "diagnose-ranks-differ",
        Severity.WRONG,
        "Data-parallel ranks accept differently",
        """\
Each data-parallel rank has counters of its own, and on one the first draft is accepted much less \
often than on another. The ranks run the same model, so one of them has loaded or decided \
something else: whether a drafter shares the target's embedding and head was decided by each rank \
on its own in releases without the plugin.""",
        upstream=(f"{_ISSUES}50158", f"{_ISSUES}50159"),
    ),
    Kind(
        "diagnose-slower",
        Severity.SLOW,
        "It is slower with speculation than without",
        """\
The same prompts, one request at a time, gave fewer tokens a second on the server with \
speculation than on the one without. If acceptance is as it should be, the steps are too dear: a \
verify step that leaves the decode path of its attention back-end, or a drafting loop that costs \
more than it brings.

`vllm-kimi-eagle3 check` with the server's command says what a verify step costs on this GPU, and \
`vllm-kimi-eagle3 plan` which number of drafts pays, if any.""",
    ),
    Kind(
        "diagnose-not-compared",
        Severity.NOTE,
        "The speeds could not be compared",
        """\
`--without` was given, and the speed on one of the two servers is not known, or is not that of the \
same model. Speed is tokens a second by the server's own latencies, while it serves nothing but \
the prompts of this command. What is said of acceptance holds all the same.""",
        undecided=True,
    ),
    Kind(
        "diagnose-none-published",
        Severity.NOTE,
        "Nothing to compare with",
        """\
No acceptance was published for this drafter, or it was not said which one the server runs, so it \
is compared with a healthy drafter of another target: 76, 56 and 43 % by position. That tells a \
collapse, and not a loss of some points.

Name the drafter with `--drafter`, or give your own measurement with `--expect`: an acceptance \
length (2.8), rates by position (76,56,43), or a report of `diagnose --json` from a day when all \
was well.""",
    ),
    Kind(
        "diagnose-expectation",
        Severity.NOTE,
        "What is expected cannot be",
        """\
A step with k drafts yields at least one token and at most k + 1, and the acceptance length that \
`--expect` gave lies beyond that for the number of drafts of this server. It was measured with \
more of them: say with how many, as in `--expect 3.4@5`.""",
        undecided=True,
    ),
    Kind(
        "diagnose-too-few-drafts",
        Severity.NOTE,
        "Too few drafts were counted",
        """\
A rate that is measured on a few drafts is known to within ten points or more, which is what the \
errors cost that this command looks for.""",
        undecided=True,
    ),
    Kind(
        "diagnose-mixed-traffic",
        Severity.NOTE,
        "Not all of it is known to be greedy",
        """\
The counters do not say how a request was sampled. Sampling lowers acceptance, by how much \
depends on the temperature and the text, and the published figures are greedy. So acceptance that \
is lower than expected cannot be judged while others use the server, or while it is only watched. \
(A collapse can: no sampling brings the first position of a healthy drafter below a third.)""",
        undecided=True,
    ),
    Kind(
        "diagnose-repeats",
        Severity.NOTE,
        "The answers repeat themselves",
        """\
A model that was asked something without sense, random tokens above all, falls into a loop, and \
loops are easy to draft: acceptance and speed are then those of no real request. Part of the \
answers here are loops.""",
        upstream=("https://github.com/lightseekorg/tokenspeed/issues/1305",),
        undecided=True,
    ),
    Kind(
        "diagnose-no-answer",
        Severity.NOTE,
        "The server does not answer",
        """\
Nothing could be read from the address that was given, or it answers as something else than vLLM. \
`--url` takes the address of the vLLM server itself, since a router in front of it mostly passes \
neither `/metrics` nor `/version` on. A server with `--api-key` wants the key in the variable \
`VLLM_API_KEY`.""",
        undecided=True,
    ),
    Kind(
        "diagnose-no-metrics",
        Severity.NOTE,
        "There are no metrics of vLLM",
        """\
`/metrics` answers with something that is no Prometheus text, or without a single metric of vLLM. \
`--disable-log-stats` switches vLLM's metrics off; another program may listen there.""",
        undecided=True,
    ),
    Kind(
        "diagnose-no-speculation",
        Severity.NOTE,
        "The server does not speculate",
        """\
vLLM has counters of drafts only where it was started with `--speculative-config`, and this one \
has none: it runs without speculation, or the flag did not reach it (a YAML file, a start script \
or an operator may drop it).""",
        undecided=True,
    ),
    Kind(
        "diagnose-counters-missing",
        Severity.NOTE,
        "Counters of drafts are missing",
        """\
Some of the counters of speculation are there and others are not, or have names that no supported \
release gives them. Without accepted drafts by position the mean acceptance length is all that \
can be said, and no shape.""",
        undecided=True,
    ),
    Kind(
        "diagnose-counters-impossible",
        Severity.NOTE,
        "Counters that cannot be",
        """\
Numbers that are negative, infinite or no numbers, or that contradict each other: more drafts \
accepted than verified, a later position more often than one before it. They were left out. A \
proxy that adds several servers up can make such pages, and so can a page that is read while a \
server is being replaced behind one address.""",
        undecided=True,
    ),
    Kind(
        "diagnose-counters-reset",
        Severity.NOTE,
        "The counters began anew meanwhile",
        """\
A counter fell, or an engine appeared or went away between two readings: the server was started \
anew, or another one answers at the same address. What was counted since is taken, and may be of \
another configuration than what was counted before.""",
        undecided=True,
    ),
    Kind(
        "diagnose-several-models",
        Severity.NOTE,
        "Several models have counters",
        """\
The metrics have counters of more than one model, as those of a proxy that joins servers, and \
their drafts must not be added up.""",
        undecided=True,
    ),
    Kind(
        "diagnose-stopped",
        Severity.NOTE,
        "A defect of this command",
        """\
Something in `diagnose` itself went wrong, and the rest of the report is what it had found \
before. Please report it with the text of the finding.""",
        undecided=True,
    ),
)
