# SPDX-License-Identifier: Apache-2.0
"""What fits into the GPUs' memory."""

from __future__ import annotations

from .kinds import Kind, Severity

_RESERVE = """\
What activations, CUDA graphs, NCCL and the CUDA context take is reckoned, not measured: 3 GiB \
(2 GiB with `--enforce-eager`) and, for each token of `--max-num-batched-tokens`, 0.23 MiB for a \
Kimi of eight experts per token, 1.9 GiB for the 8,192 tokens that a server has by default on \
large GPUs. TRITON_MLA's workspace comes on top: vLLM's own reserves, from 0.25 on, 2,052 bytes \
for each of `--max-num-seqs` requests, head and 512 tokens of `--max-model-len`, from 0.31 on for \
each token of a verify step, which is gigabytes; the plugin's takes less than 0.1 GiB with eight \
heads a rank and three drafts. vLLM measures all that when it starts."""

KINDS: tuple[Kind, ...] = (
    Kind(
        id="memory-weights-do-not-fit",
        severity=Severity.FAILS,
        title="The weights do not fit into the GPUs",
        explanation="""\
vLLM may use `--gpu-memory-utilization` of each GPU's memory: 0.9 by default up to 0.19, 0.92 from \
0.20 on. The weights of target and drafter alone are more than that on each rank, and loading ends \
with an out-of-memory error after minutes, or with "No available memory for the cache blocks".

Routed experts are split over all tensor- and data-parallel ranks, attention heads, dense layers, \
shared experts, embedding and LM head over the tensor-parallel ranks of a replica. The first \
projections of MLA, the router, norms and the projector of images lie on every rank; the vision \
tower with `--mm-encoder-tp-mode data` as well. Of the drafter, `fc` lies on every rank. Sizes are \
those of the safetensors headers; where the files are not here they follow from config.json, which \
is exact to about 3 % and marked "about".

Take more GPUs, or an export of the target with fewer bits.""",
    ),
    Kind(
        id="memory-context-does-not-fit",
        severity=Severity.FAILS,
        title="One request of the greatest length does not fit into the KV cache",
        explanation=f"""\
vLLM refuses to start when what is left for the KV cache does not hold one request of \
`--max-model-len`, which without the flag is the model's own 262,144: "To serve at least one \
request with the model's max seq len ...". It finds that out after the load.

MLA keeps 576 numbers per token and layer on every tensor-parallel rank: more tensor-parallel \
ranks leave more room, and do not make a token smaller. `--decode-context-parallel-size` does, for \
an MLA drafter. A drafter with multi-head attention keeps keys and values of its heads on each \
rank beside that. Target and drafter are in one group of the cache in every release from 0.15 to \
0.33, and a token takes the sum.

Give the length that fits, halve the cache with `--kv-cache-dtype fp8` where the attention \
back-end takes it, or have vLLM find the length: `--max-model-len auto` (-1 in older releases). \
This finding is only given where not even weights and cache together fit.

{_RESERVE}""",
    ),
    Kind(
        id="memory-context-is-tight",
        severity=Severity.NOTE,
        title="Whether one request of the greatest length fits is not certain",
        explanation=f"""\
Weights and the KV cache of one request of `--max-model-len` fit, but not with what is reckoned \
for everything else. vLLM may refuse to start, after the load.

{_RESERVE}

Give the length that fits with certainty, or make room by one of the other ways that are named.""",
        undecided=True,
    ),
    Kind(
        id="memory-replicated-drafter",
        severity=Severity.NOTE,
        title="The drafter is whole on each rank",
        explanation="""\
With `"draft_tensor_parallel_size": 1` in `--speculative-config` the plugin has the drafter whole \
on each tensor-parallel rank, so that a draft step has no collective. For that each rank holds all \
of the drafter's weights and reads them in each draft step, has whole copies of an embedding or LM \
head that the drafter has of the target, and keeps the keys and values of all of the drafter's KV \
heads. An MLA drafter's cache is as large either way.

It is for GPUs without NVLink, where a collective takes longer than reading the weights; \
docs/drafting.md says when that is. Leave the key out, and the drafter is spread over the ranks.""",
    ),
    Kind(
        id="memory-summary",
        severity=Severity.NOTE,
        title="What target, drafter and KV cache take on each rank",
        explanation=f"""\
The bytes of weights on each rank, the bytes that a token takes in the KV cache, and the number of \
tokens that fit, over all requests together. A drafter without an embedding or LM head of its own, \
or with the target's over again, uses the target's; whether they are the same is told from samples \
of the files.

{_RESERVE}

Where the target's files are not on this machine, the size of its weights follows from config.json \
and is marked "about". Without a GPU, or one named by `--gpu sm_120,96GiB,8`, nothing is said of \
what fits.""",
    ),
)
