# SPDX-License-Identifier: Apache-2.0
"""How target and drafter are run: parallelism, back-ends, caches, scheduling."""

from __future__ import annotations

from .kinds import Kind, Severity

_PULLS = "https://github.com/vllm-project/vllm/pull/"
_ISSUES = "https://github.com/vllm-project/vllm/issues/"
_RTX6KPRO = "https://github.com/voipmonitor/rtx6kpro"
_WHERE_STOCK_SERVES = """\
vLLM's own kernel serves where the patch is not in effect, with `"attention": false` in the \
plugin's settings, with `VLLM_BATCH_INVARIANT`, with more than eight drafts, and where an MLA \
drafter has other heads or dimensions than the target; `run-attention` says which of the two \
serves, and why."""

KINDS: tuple[Kind, ...] = (
    Kind(
        id="run-pipeline-parallel",
        severity=Severity.FAILS,
        title="Pipeline parallelism",
        explanation="""\
EAGLE-3 drafts from hidden states of layers in the target's first half, middle and end. Kimi's \
decoder hands none of them on from one pipeline rank to the next, in any release: what vLLM added \
for other models (pull 50514) was not added to DeepSeek's.

Up to 0.29 vLLM refuses, after the configs are read, with "Pipeline parallelism is not supported \
for this model", which means the drafter. From 0.30 on the V1 runner drafts on the last rank with \
what that rank captured, so it works only where all aux layers lie there; the V2 runner stops once \
the target is loaded.

Use `--pipeline-parallel-size 1` and more tensor parallelism, or no speculation.""",
        upstream=(f"{_PULLS}50514", f"{_PULLS}45985"),
    ),
    Kind(
        id="run-too-few-gpus",
        severity=Severity.FAILS,
        title="More ranks than GPUs",
        explanation="""\
Every rank of tensor and pipeline parallelism, and of each data-parallel replica on this machine, \
needs a GPU of its own. vLLM refuses when it has read the configs ("World size (8) is larger than \
the number of available GPUs (4) in this node"); with data parallelism its workers end in an \
assertion ("DP adjusted local rank ... is out of bounds"). `CUDA_VISIBLE_DEVICES` hides GPUs.

Nothing is said where ranks may be on other machines: `--distributed-executor-backend ray`, \
`--nnodes`, `--data-parallel-backend ray`. Of data parallelism those that run here count, \
`--data-parallel-size-local`.

Use sizes whose product is the number of GPUs, or say that the other ranks are elsewhere.""",
    ),
    Kind(
        id="run-heads",
        severity=Severity.FAILS,
        title="Attention heads that cannot be spread evenly",
        explanation="""\
Each tensor-parallel rank has the same number of attention heads. vLLM refuses a \
`--tensor-parallel-size` that does not divide the target's, 64 for a Kimi, when it has read the \
configs ("Total number of attention heads (64) must be divisible by tensor parallel size"). The \
drafter runs over the same ranks, unless `"draft_tensor_parallel_size": 1` has it whole on each: \
its attention heads have to be divisible as well, and a Llama drafter's KV heads have to be \
divisible by the size, or the size by them, since fewer KV heads than ranks are copied. Otherwise \
the drafter's layers end in an assertion, after the target's load.

Use a size that divides all of them: for the published pairs 1, 2, 4, 8, 16, 32 or 64.""",
    ),
    Kind(
        id="run-dcp-size",
        severity=Severity.FAILS,
        title="A decode context parallel size that does not divide the tensor parallel size",
        explanation="""\
Decode context parallelism takes no GPUs of its own: it divides the ranks of tensor parallelism \
into groups that each hold a part of every request's KV cache. So `--tensor-parallel-size` has to \
be a multiple of `--decode-context-parallel-size`. Every release refuses anything else at once.""",
    ),
    Kind(
        id="run-dcp-llama",
        severity=Severity.FAILS,
        title="Decode context parallelism with a Llama drafter",
        explanation="""\
Decode context parallelism shares the KV cache of a request out over ranks that hold the same KV \
heads. An MLA layer has one, so it always may. A Llama drafter with 64 KV heads over eight ranks \
has eight others on each, and vLLM, which checks the target, does not check the drafter: it merges \
the ranks' results as if they were of the same heads. The drafts are wrong, in silence, and from \
0.20 on the first request may fail on a workspace that was locked too early.

Use a drafter with MLA, or `--decode-context-parallel-size 1`.""",
        upstream=(f"{_ISSUES}40791",),
    ),
    Kind(
        id="run-dcp-v2",
        severity=Severity.FAILS,
        title="Decode context parallelism on the V2 runner before 0.29",
        explanation="""\
The V2 runner's drafter passes its MLA layers no lengths for the rank's share of the KV cache \
before 0.29, and their metadata needs them from the second draft on.

Set `VLLM_USE_V2_MODEL_RUNNER=0` (V1 is the default before 0.29), use vLLM 0.29 or later, or no \
context parallelism.""",
        upstream=(f"{_PULLS}54277",),
    ),
    Kind(
        id="run-dcp-later-drafts",
        severity=Severity.SLOW,
        title="Decode context parallelism on the V1 runner",
        explanation="""\
The V1 runner hands the target's lengths of the rank's KV cache on from one draft step to the next \
and does not advance them, so the second and later drafts look at a context that is some tokens \
short. What is verified is right; those drafts are accepted less often.

From 0.29 on the V2 runner, which is the default there, computes them anew.""",
        upstream=(f"{_PULLS}54277",),
    ),
    Kind(
        id="run-dcp-fp8",
        severity=Severity.FAILS,
        title="Decode context parallelism with an fp8 KV cache before 0.25",
        explanation="""\
Up to 0.24 the MLA layer asserts that the KV cache is not fp8 where decode context parallelism is \
on ("DCP not support fp8 kvcache now."). The assertion is met at the first decode, when the model \
is loaded.

Use a 16-bit KV cache, which context parallelism makes room for, or vLLM 0.25 or later.""",
        upstream=(f"{_ISSUES}40608",),
    ),
    Kind(
        id="run-dcp-backend",
        severity=Severity.FAILS,
        title="A back-end without decode context parallelism",
        explanation="""\
With decode context parallelism each rank attends to its share of the KV cache, and the results \
are merged by the log-sum-exp of their softmax. FLASHINFER_MLA, which vLLM takes on data-centre \
Blackwell GPUs, does not return it up to 0.24, nor does TOKENSPEED_MLA up to 0.25. vLLM chooses \
the back-end without regard to that before 0.30, loads the model and ends in an assertion.

Force a back-end that returns it, or use the release that the finding names, from which on this \
one does.""",
    ),
    Kind(
        id="run-dcp-interleave",
        severity=Severity.FAILS,
        title="A coarse share-out of the KV cache with speculation",
        explanation="""\
By default the ranks of a context-parallel group take turns token by token. With an interleave \
size above 1 they take runs of tokens, and a verify step then ends in the middle of one. A \
back-end has to say that it can do that; of those for dense MLA only TOKENSPEED_MLA does, from \
0.32 on. For any other vLLM ends in an assertion ("MTP with cp_kv_cache_interleave_size > 1 is not \
supported") when the model is loaded.

Leave the option out.""",
    ),
    Kind(
        id="run-draft-backend",
        severity=Severity.FAILS,
        title="An attention back-end that the drafter's layers cannot have",
        explanation="""\
Kimi's layers are MLA and need an MLA back-end; a Llama drafter's are not and refuse one. Up to \
0.20 on the V1 runner, and up to 0.29 on the V2 runner, the server's `--attention-backend` is \
forced on the drafter as well, and vLLM stops when it builds the drafter, after the target's load \
("non-MLA not supported"). From 0.21 (V1) and 0.30 (V2) on the drafter has its own, \
`"attention_backend"` in `--speculative-config`; on V2 it still has the server's if that is not \
given.

Up to 0.17 vLLM itself forces FLASHINFER_MLA on the whole server on data-centre Blackwell GPUs \
(compute capability 10.x), so a Llama drafter cannot be served there at all.

Leave the option out, and vLLM chooses one that fits each model; or use a drafter with MLA.""",
        upstream=(f"{_PULLS}39930", f"{_PULLS}54826"),
    ),
    Kind(
        id="run-draft-backend-ignored",
        severity=Severity.NOTE,
        title="The drafter's own attention back-end is not read",
        explanation="""\
`"attention_backend"` in `--speculative-config` exists from 0.21 on, but the V2 runner reads it \
from 0.30 on only. Before, the drafter gets the server's `--attention-backend`, or vLLM's choice \
where none is given.""",
        upstream=(f"{_PULLS}54826",),
    ),
    Kind(
        id="run-draft-tensor-parallel",
        severity=Severity.NOTE,
        title="draft_tensor_parallel_size",
        explanation="""\
vLLM accepts `"draft_tensor_parallel_size"` with EAGLE-3 and does nothing with it, in every \
release: the drafter is built in the target's tensor-parallel group and runs over all of its \
ranks. A value that is neither 1 nor `--tensor-parallel-size` is refused.

The plugin makes 1 true: the drafter is whole on each rank, and a draft step has no collective \
(docs/drafting.md; `memory-replicated-drafter` says what it takes). It cannot beside \
`--decode-context-parallel-size` and `--prefill-context-parallel-size`, whose attention gathers \
query heads over the ranks, and does not where its patch replicated-drafter is not in effect: \
there 1 has no effect.

Leave it out there.""",
        upstream=(f"{_ISSUES}17499", f"{_PULLS}31705"),
    ),
    Kind(
        id="run-drafting",
        severity=Severity.NOTE,
        title="vLLM's own drafting serves",
        explanation="""\
The plugin drafts with fused kernels: on the V1 runner with a loop of its own, one CUDA graph for \
the steps of a proposal, and on the V2 runner, from 0.29 on, with a forward pass inside vLLM's \
graph. vLLM's own serves with `"drafting": false` in the plugin's settings, where the patch is not \
in effect, with data, pipeline or context parallelism, parallel drafting, microbatches, LoRA, a KV \
connector, `VLLM_BATCH_INVARIANT`, without CUDA graphs, and on GPUs below compute capability 8.0. \
Where it can serve, and `"drafting": true` does not force it, a measurement at the start decides, \
and the log says which of the two drafts. docs/drafting.md has the rest.

The tokens are the same either way.""",
    ),
    Kind(
        id="run-no-gpu",
        severity=Severity.NOTE,
        title="No GPU to look at",
        explanation="""\
Which attention back-end vLLM takes, whether an fp8 KV cache runs, whether a verify step gets a \
CUDA graph and how much fits depend on the GPU. There is none where `check` runs, as on a host \
that builds images.

Name those that will serve: `--gpu sm_120,96GiB,8` is architecture, memory of each, and number.""",
        undecided=True,
    ),
    Kind(
        id="run-unknown-gpu",
        severity=Severity.NOTE,
        title="A GPU of another architecture",
        explanation="""\
What `check` knows of attention back-ends was taken from vLLM's own functions for compute \
capability 8.0, 8.6, 8.9, 9.0, 10.0, 10.3, 12.0 and 12.1. For a GPU of another family it says \
nothing of back-ends, an fp8 KV cache or CUDA graphs.""",
        undecided=True,
    ),
    Kind(
        id="run-attention-variable",
        severity=Severity.NOTE,
        title="VLLM_ATTENTION_BACKEND",
        explanation="""\
The variable chose the attention back-end in older vLLMs. None from 0.15 on reads it; from 0.17 on \
it is warned of as unknown, and refused with `--fail-on-environ-validation`.

Use `--attention-backend`, and for the drafter `"attention_backend"` in `--speculative-config`.""",
    ),
    Kind(
        id="run-attention",
        severity=Severity.NOTE,
        title="The attention back-ends that serve",
        explanation="""\
Kimi's layers are MLA, a drafter's are MLA or multi-head attention, and vLLM chooses a back-end \
for each kind: the first of the release's order for this GPU that supports compute capability, \
dtype, KV-cache dtype, head size and block size, or the one that is forced. The finding names \
them, and why those were not taken that come earlier in the order. For TRITON_MLA it says whose \
kernel serves decode and verify steps, vLLM's own or the plugin's (patch `mla-attention`).

Where a back-end needs a package that is not installed, or that a newer driver would bring, vLLM \
takes the next one; its own log line "Using ... backend" has the last word.""",
        upstream=(f"{_ISSUES}40608",),
    ),
    Kind(
        id="run-mla-disabled",
        severity=Severity.SLOW,
        title="Kimi without MLA",
        explanation="""\
`VLLM_MLA_DISABLE=1` makes vLLM run MLA layers as multi-head attention. It is there for platforms \
without MLA kernels. For Kimi the KV cache then holds keys and values of all 64 heads instead of \
one latent of 576 numbers, some forty times as much for each token.

What else `check` says of back-ends, graphs and memory is for MLA and is left out. An MLA drafter \
has no other attention and does not run without.""",
    ),
    Kind(
        id="run-kv-cache-unknown",
        severity=Severity.NOTE,
        title="A KV-cache dtype that is not judged here",
        explanation="""\
The table of attention back-ends that comes with the plugin was taken for 16-bit and fp8 caches. \
For another `--kv-cache-dtype` the start has the last word: vLLM stops with "No valid attention \
backend found" where none takes it.""",
        undecided=True,
    ),
    Kind(
        id="run-no-backend",
        severity=Severity.FAILS,
        title="No attention back-end takes the layers",
        explanation="""\
vLLM tries its attention back-ends in an order that depends on the GPU and takes the first that \
supports compute capability, dtype, KV-cache dtype, head size and block size. One that is forced \
is the only one that is tried. If none is left, vLLM stops when it builds the model, and its \
message gives the same reasons as the finding, which come from the release's own functions.

For dense MLA on compute capability 8.x and 12.x TRITON_MLA is the only one. vLLM's own takes an \
fp8 KV cache from 0.18 on; the plugin's (patch `mla-attention`) also before, from capability 8.9 \
on. The selector takes that one by its class, so where its kernel does not serve, vLLM's own layer \
refuses the cache when it is built.""",
        upstream=(f"{_ISSUES}40608", f"{_PULLS}34597"),
    ),
    Kind(
        id="run-block-size",
        severity=Severity.FAILS,
        title="The back-ends of target and drafter have no common block size",
        explanation="""\
Target and drafter share one pool of KV-cache blocks. Without `--block-size` vLLM 0.21 to 0.30 \
takes the size that the target's attention back-end prefers, 16 where it has that, and looks at no \
other. A drafter whose back-end takes only 64 (FLASHMLA) or 32 and 64 (FLASHINFER_MLA) then stops \
the start, after the load, with "No common block size for 16". That happens where a back-end is \
forced on the target alone: from 0.21 on `--attention-backend` is not the drafter's on the V1 \
runner.

Seen on an H200 with 0.26.0, TRITON_MLA forced on the target and an fp8 KV cache.

Name a block size that both have, or force the same back-end on both.""",
    ),
    Kind(
        id="run-fp8-capability",
        severity=Severity.FAILS,
        title="An fp8 KV cache with TRITON_MLA before compute capability 8.9",
        explanation="""\
TRITON_MLA reads an fp8 KV cache as fp8e4nv, which Triton has from compute capability 8.9 on. The \
selector lets it through on 8.0 and 8.6 (A100, RTX 3090). From 0.26 on the layer refuses it when \
it is built; before, Triton stops when it compiles the decode kernel ("type fp8e4nv not supported \
in this architecture"), after the load. Up to 0.17 vLLM's TRITON_MLA has no fp8 and the selector \
says so, or, where it is the plugin's (patch `mla-attention`), the layer does. Seen by compiling \
each release's kernel for sm_80 and sm_86 with Triton 3.6, without a GPU. The plugin's kernel has \
no fp8 on these GPUs either.

Use a 16-bit KV cache.""",
        upstream=(f"{_PULLS}34597",),
    ),
    Kind(
        id="run-fp8-shared-memory",
        severity=Severity.FAILS,
        title="TRITON_MLA with an fp8 KV cache on small shared memory",
        explanation=f"""\
From 0.20 to 0.33 vLLM's own decode kernel of TRITON_MLA (`_fwd_grouped_kernel_stage1`, two \
stages) needs 102,400 bytes of shared memory with an fp8 KV cache. A block may have 101,376 bytes \
with compute capability 8.9 and 12.x (RTX 4090, L40S, RTX PRO 6000, RTX 5090, GB10), so the first \
decode ends in "out of resource: shared memory, Required: 102400, Hardware limit: 101376". The \
numbers were read from kernels of each release that Triton 3.6 compiled for sm_89, sm_120 and \
sm_121, and they are those of the report. With a 16-bit KV cache the kernel needs 63,488 bytes; \
0.18 and 0.19 need 87,040 with fp8.

vLLM's own guard lowers the stages only for wider heads than Kimi's. A ModelOpt export that brings \
an fp8 KV cache (`kv_cache_quant_algo`, `kv_cache_scheme`), as NVFP4 exports do, has it without \
any flag.

The plugin's kernel (patch `mla-attention`) takes less, so nothing is said where it serves. \
{_WHERE_STOCK_SERVES}

Have it serve, or use `--kv-cache-dtype bfloat16`, or vLLM 0.18 or 0.19.""",
        upstream=(f"{_ISSUES}53748",),
    ),
    Kind(
        id="run-graphs-capture",
        severity=Severity.FAILS,
        title="A full CUDA graph of verify steps that the back-end cannot capture",
        explanation=f"""\
A back-end says of which batches vLLM may capture a full CUDA graph. From 0.22 to 0.25 vLLM's own \
TRITON_MLA says of all that have one length, verify steps included, while its decode path takes a \
single token of a request: at start, when the memory for graphs is measured, the metadata's \
builder ends in an AssertionError (`assert m.max_query_len <= self.reorder_batch_threshold # \
decode only`). The same is met with decode context parallelism by every back-end whose decode path \
then takes one token. Seen on an H200 with vLLM 0.24.0, k = 3: TRITON_MLA alone, and FLASHMLA with \
`--decode-context-parallel-size 2`. Without speculation neither fails.

The plugin's TRITON_MLA (patch `mla-attention`) takes all tokens of a verify step, and with \
context parallelism it claims graphs of single tokens alone (`run-graphs-piecewise`). \
{_WHERE_STOCK_SERVES}

Have it serve, or add `--compilation-config '{{"cudagraph_mode": "PIECEWISE"}}'`, with which the \
same run started and generated, or use vLLM 0.26 or later (for TRITON_MLA without context \
parallelism).""",
        upstream=(f"{_PULLS}44492", f"{_PULLS}42885"),
    ),
    Kind(
        id="run-graphs-refused",
        severity=Severity.FAILS,
        title="Full CUDA graphs with a back-end that has none",
        explanation="""\
`"cudagraph_mode": "FULL"` asks for one CUDA graph of every batch. A back-end that says it can be \
captured in none, as vLLM's own TRITON_MLA does up to 0.21, makes vLLM refuse the mode once the \
model is loaded. The default, FULL_AND_PIECEWISE, is taken back to PIECEWISE with a warning. With \
the plugin's TRITON_MLA (patch `mla-attention`) vLLM makes FULL_AND_PIECEWISE of the mode.

Leave the mode out.""",
        upstream=(f"{_PULLS}42885",),
    ),
    Kind(
        id="run-graphs-piecewise",
        severity=Severity.SLOW,
        title="Verify steps get no full CUDA graph",
        explanation="""\
vLLM captures verify steps in full CUDA graphs only if every attention back-end of target and \
drafter supports graphs of several tokens a request (`UNIFORM_BATCH`). Otherwise the mode becomes \
PIECEWISE for the whole server: the layers' attention is launched kernel by kernel, by the CPU.

vLLM's own TRITON_MLA supports none up to 0.21 and single tokens from 0.26 to 0.30. The plugin's \
(patch `mla-attention`) supports verify steps, and with decode context parallelism single tokens: \
how many tokens of a request a rank holds then depends on the query. With FLASHINFER for a Llama \
drafter, which vLLM takes where the KV cache is fp8 and FlashAttention has no fp8, it is the \
drafter that holds the target back.

What it costs: full graphs for plain TRITON_MLA decode brought 378 to 431 tokens a second for \
Kimi-K2.6 on eight A100 (pull 42885).""",
        upstream=(f"{_PULLS}42885", f"{_PULLS}40750"),
    ),
    Kind(
        id="run-no-graphs",
        severity=Severity.SLOW,
        title="CUDA graphs are turned off",
        explanation="""\
`--enforce-eager`, `-O0` and `"cudagraph_mode": "NONE"` turn CUDA graphs off for target and \
drafter. A decode step of Kimi launches some thousand kernels, a draft step some thirty, each of \
which takes the GPU microseconds: the CPU cannot launch them as fast as they run, and speculation \
adds launches.

They are for debugging.""",
    ),
    Kind(
        id="run-capture-sizes",
        severity=Severity.SLOW,
        title="CUDA graphs are captured for smaller batches than verify steps are",
        explanation="""\
A verify step has k + 1 tokens for each request, and the sizes for which graphs are captured count \
tokens. vLLM's default allows for that (up to 512 tokens in all, 1,024 on Blackwell from 0.28 on); \
sizes that were chosen without speculation do not. Batches above the largest run without a graph. \
If not even one request fits, the V1 runner stops with "No valid cudagraph sizes after rounding".

Multiply them by k + 1, or leave them out.""",
        upstream=(f"{_ISSUES}28207",),
    ),
    Kind(
        id="run-verify-prefill",
        severity=Severity.SLOW,
        title="The verify step runs as a prefill",
        explanation=f"""\
An MLA back-end's decode path reads the compressed KV cache directly. That of vLLM's own \
TRITON_MLA takes a single token of each request up to 0.30, CUTLASS_MLA's does in every release, \
and with decode context parallelism so do most. A verify step of k + 1 tokens then goes the way of \
a chunked prefill: in every layer it gathers the whole context and projects it to full keys and \
values, outside the CUDA graph. TRITON_MLA is the only back-end for dense MLA on compute \
capability 8.x and 12.x.

What it costs: on an H200 with TRITON_MLA, eight layers of one of eight ranks, batch 1, vLLM 0.26, \
a step at 8,192 tokens of context took 2.2 ms without drafts and 18.6 ms with three; with \
FLASH_ATTN_MLA 2.6 and 6.1 ms. On eight RTX PRO 6000 an owner measured 75, 32 and 25 tokens a \
second at 2k, 10k and 30k of context, and 117, 113 and 108 after moving it into the decode path. A \
drafter that is right four times in four cannot win that back.

And tokens change: on an H200 with vLLM 0.26.0 and its own TRITON_MLA, 124 of 2660 greedy tokens \
were not those of a float32 reference with three drafts and 24 without; with the plugin's 21 and \
23 (`benchmarks/results/lossless.jsonl`). With async scheduling the lengths of such a prefill \
count all drafts of the step before as accepted, which would explain it; `--no-async-scheduling` \
is worth a try and was not tried.

The plugin's TRITON_MLA (patch `mla-attention`) keeps verify steps of up to nine tokens in the \
decode path in every release, but for decode context parallelism. {_WHERE_STOCK_SERVES}

Have it serve, or use vLLM 0.31 or later, or leave speculation out.""",
        upstream=(f"{_PULLS}40750", f"{_PULLS}52218", _RTX6KPRO),
    ),
    Kind(
        id="run-verify-rows",
        severity=Severity.SLOW,
        title="The verify step reads the KV cache once for each token",
        explanation=f"""\
From 0.31 on vLLM's own TRITON_MLA keeps verify steps in its decode path by treating the k + 1 \
tokens of a request as k + 1 requests with the same pages. The kernel reads the KV cache for each \
of them.

What it costs: one layer of 0.33's kernel on an H200, eight heads, four tokens against one, took \
1.3 times as long at batch 1 and 30,000 tokens of context, where the L2 cache holds what is read \
again, and 3.1 to 3.4 times at batch 4 and 16. So speculation loses at long contexts from a small \
batch on; `run-break-even` reckons from which.

The plugin's TRITON_MLA (patch `mla-attention`) reads it once for all of them. \
{_WHERE_STOCK_SERVES}""",
        upstream=(f"{_PULLS}52218",),
    ),
    Kind(
        id="run-runner",
        severity=Severity.FAILS,
        title="The model runner does not have what is asked for",
        explanation="""\
Up to 0.28 the V1 runner serves Kimi, from 0.29 on the V2 runner does, and \
`VLLM_USE_V2_MODEL_RUNNER` chooses one. Forced to V2, vLLM refuses what it does not have there \
(from 0.20 on; `--enable-dbo`, `--logits-processors`, from 0.22 `"parallel_drafting"`, and \
others), and forced to V1 what only V2 has. Not forced, it falls back to V1 with one line in the \
log, which is worth knowing because the two runners read different keys of the drafter's config.

The V2 runner of 0.15 and 0.16 hands EAGLE-3 no aux hidden states at all: it drafts from the final \
one, and almost nothing is accepted.""",
        upstream=(f"{_ISSUES}40551",),
    ),
    Kind(
        id="run-async-refused",
        severity=Severity.FAILS,
        title="Asynchronous scheduling is asked for and cannot be had",
        explanation="""\
With `--async-scheduling` vLLM refuses what it does not go with instead of turning it off: \
`"disable_padded_drafter_batch": true` in `--speculative-config` (on the V2 runner up to 0.32 as \
well), and Ray's executor up to 0.32, unless `VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1` chooses the \
newer one (0.20 to 0.32).

Leave one of them out.""",
    ),
    Kind(
        id="run-async-off",
        severity=Severity.SLOW,
        title="Asynchronous scheduling is off",
        explanation="""\
vLLM prepares the next step while the GPU works on this one. That is on by default with EAGLE-3, \
in every release. `--no-async-scheduling` turns it off, and so do, in silence but for a line in \
the log, `"disable_padded_drafter_batch": true` and Ray's first executor.

Turning it off is a way to find out whether it is the cause of wrong output; several reports were \
settled that way. Otherwise leave it on.""",
        upstream=(f"{_ISSUES}52071",),
    ),
    Kind(
        id="run-many-drafts",
        severity=Severity.SLOW,
        title="More drafts than pay",
        explanation="""\
A later draft is accepted only if all before it were. Of a healthy Kimi head about 76 % of first \
drafts are accepted, 56 % of second and 43 % of third ones, and each costs a draft step and a \
token to verify. The finding compares by the model of docs/check-cost.md and speaks up where fewer \
drafts gain more than a tenth at batch 1; at larger batches fewer still are best.

Above 128 the V1 runner's rejection sampler ends in an assertion at the first step.""",
    ),
    Kind(
        id="run-batch",
        severity=Severity.SLOW,
        title="A step's token budget is too small for all verify steps",
        explanation="""\
Each running request has k + 1 tokens in a verify step, and `--max-num-batched-tokens` bounds a \
step's tokens. If `--max-num-seqs` requests do not fit with all their drafts, vLLM cuts drafts off \
and lets requests wait, and a prefill waits with them. A budget below `--max-num-seqs` is refused.

Raise the one or lower the other.""",
    ),
    Kind(
        id="run-max-model-len",
        severity=Severity.FAILS,
        title="A longer context than the target's",
        explanation="""\
vLLM refuses a `--max-model-len` above what it derives from the target's config.json, before it \
loads anything: 262,144 for Kimi-K2.5. `VLLM_ALLOW_LONG_MAX_MODEL_LEN=1` lets it through, and the \
model then computes positions that it was not trained for.

Use the target's own length or less; less context leaves room for more requests.""",
    ),
    Kind(
        id="run-no-tool-parser",
        severity=Severity.FAILS,
        title="Tool choice without a tool parser",
        explanation="""\
`--enable-auto-tool-choice` needs to know how the model writes tool calls: without \
`--tool-call-parser` the server ends with "--enable-auto-tool-choice requires --tool-call-parser". \
Kimi's is `kimi_k2`.""",
    ),
    Kind(
        id="run-unknown-parser",
        severity=Severity.FAILS,
        title="This vLLM has no parser of that name",
        explanation="""\
`--tool-call-parser` (with `--enable-auto-tool-choice`) and `--reasoning-parser` name a parser \
that the release registers; for another name the server ends with a KeyError, "invalid tool call \
parser" or "invalid reasoning parser". For Kimi K2 to K2.7 both are `kimi_k2`, in every release \
from 0.15 on; `kimi_k3` (from 0.27) is for another model.

A parser of your own is registered by `--tool-parser-plugin` or `--reasoning-parser-plugin`; with \
one of these the check takes any name. A parser that an extension registers in vLLM is not known \
here.""",
    ),
    Kind(
        id="run-tool-parser",
        severity=Severity.WRONG,
        title="The Kimi tool parser before 0.20 with speculation",
        explanation="""\
Up to 0.19 the streaming parser `kimi_k2` counts tokens and expects one at a time. With \
speculation several come at once, and it skips states: tool calls arrive without arguments, with \
truncated JSON, or not at all. What is not streamed is right. It was rewritten in 0.20.

The plugin's patch `tool-parser` brings a parser that does not mind. Where it is not in effect, \
use vLLM 0.20 or later.""",
        upstream=(f"{_PULLS}38579", f"{_ISSUES}38274", f"{_ISSUES}54701"),
    ),
    Kind(
        id="run-offload",
        severity=Severity.NOTE,
        title="KV-cache offloading with expert parallelism and EAGLE-3",
        explanation="""\
A segmentation fault is reported for Kimi-K2.5 with KV-cache offloading, expert parallelism and \
EAGLE-3 on vLLM 0.19.1. Its cause is not known, and other releases were not tried in the report.

If the server dies, leave one of the three out.""",
        upstream=(f"{_ISSUES}40259",),
    ),
    Kind(
        id="run-break-even",
        severity=Severity.NOTE,
        title="The batch from which on speculation loses",
        explanation="""\
A verify step computes k + 1 tokens for each request and touches more of Kimi's 384 experts than a \
plain step does; the more requests there are, the less of that is free. The finding reckons the \
time of a plain step, of a verify step and of drafting from the bytes that are read and the \
operations that are done, for this GPU, release, attention back-end and k, and with an acceptance \
of 0.75 for each draft after an accepted one.

It is a stated model and no promise: docs/check-cost.md says what is in it and how far off it is \
of published rates. At long contexts it can be off by a factor of four in the batch. What decides \
is a measurement with your own prompts.""",
        upstream=("https://github.com/NVIDIA/Model-Optimizer/issues/1308", _RTX6KPRO),
    ),
)
