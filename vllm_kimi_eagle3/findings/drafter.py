# SPDX-License-Identifier: Apache-2.0
"""The drafter: what it is fed, and whether its checkpoint fits."""

from __future__ import annotations

from .kinds import Kind, Severity

_ISSUES = "https://github.com/vllm-project/vllm/issues/"
_PULLS = "https://github.com/vllm-project/vllm/pull/"
_SGLANG = "https://github.com/sgl-project/sglang/pull/25454"

_REFUSED = """\
With the plugin the server refuses such a drafter before anything is loaded, in the words of the \
finding."""
_CONVENTIONS = """\
An EAGLE-3 drafter reads the target's hidden states at a few layers and names them in its config. \
Trainers count the output of a layer, 1, 29, 57 of 61; vLLM captures the input of a layer, and \
calls the same three tensors 2, 30, 58. A list that begins with 1 is taken as outputs, one that \
begins with 2 as inputs, and none is shifted twice. 0 is the embedding, 61 the output of the last \
of 61 layers."""
_OPTION = """\
`--additional-config '{"kimi_eagle3": {"aux_hidden_state_layers": [2, 30, 58]}}'` chooses the \
layers, as vLLM counts, whatever the config says."""


def _tensors(what: str, stock: str) -> str:
    return f"""\
The names, shapes and dtypes in the checkpoint's safetensors headers are held against what the \
drafter's class builds from config.json. {what}

{stock}

{_REFUSED} `VLLM_KIMI_EAGLE3_DISABLE=drafter-tensors` takes that check out."""


KINDS: tuple[Kind, ...] = (
    Kind(
        id="drafter-not-here",
        severity=Severity.NOTE,
        title="The drafter is not on this machine",
        explanation="""\
"model" in `--speculative-config` names a repository of which nothing lies in the Hugging Face \
cache here, or something that this check cannot read, such as a URL. Nothing of the drafter was \
looked at. `check` downloads nothing.

Download it with `hf download`, or run the check where it is. The cache is found as Hugging Face's \
library finds it, by `HF_HOME` and `HF_HUB_CACHE`.""",
        undecided=True,
    ),
    Kind(
        id="drafter-weights-not-here",
        severity=Severity.NOTE,
        title="The drafter's weights could not be looked at",
        explanation="""\
config.json is here, and the safetensors files are not, or not all of them; or the weights are in \
PyTorch's format (`.bin`), or `--load-format` takes them from elsewhere. Whether its tensors fit, \
and whether its `d2t` is right, could not be told.

With the plugin they are checked when the server loads them, after the target.""",
        undecided=True,
    ),
    Kind(
        id="drafter-architecture",
        severity=Severity.FAILS,
        title="This vLLM has no class for the drafter",
        explanation="""\
"architectures" in the drafter's config.json names a class that this release's registry does not \
have. Kimi's drafters are of two kinds: with Llama attention (LlamaForCausalLMEagle3), on every \
release, and with MLA (Eagle3DeepseekV2ForCausalLM), from 0.18 on or with the plugin's patch \
mla-drafter before. vLLM puts `Eagle3` in front of a name that neither begins nor ends with it.

Stock refuses the model: "Model architectures [...] are not supported for now".""",
        upstream=(f"{_PULLS}36361",),
    ),
    Kind(
        id="drafter-other-family",
        severity=Severity.NOTE,
        title="A drafter of another family",
        explanation="""\
vLLM has a class for this architecture, and no published drafter of Kimi is of that class. It runs \
as vLLM has it: neither the check nor the plugin looks at its layers, rope and tensors.""",
        undecided=True,
    ),
    Kind(
        id="drafter-setting",
        severity=Severity.FAILS,
        title="A setting that the plugin does not have",
        explanation="""\
The plugin's own settings are the object "kimi_eagle3" in `--additional-config`. It takes \
"aux_hidden_state_layers", a list of layers as vLLM counts, "attention", false to leave \
TRITON_MLA as vLLM has it, and "drafting", false to leave the drafting loop as vLLM has it and \
true to have the plugin's wherever it can serve (without it, where it is faster), and nothing \
else. A misspelt setting would have no effect, so the server is stopped.""",
    ),
    Kind(
        id="drafter-config-value",
        severity=Severity.FAILS,
        title="A value in the drafter's config.json that cannot be",
        explanation=f"""\
A size that is no positive integer, a switch that is neither true nor false, a block that is no \
object. vLLM stops at some of them in a class's constructor, and takes others for something else: \
the text "false" counts as true.

{_REFUSED}""",
    ),
    Kind(
        id="drafter-config-contradiction",
        severity=Severity.FAILS,
        title="The drafter's config.json contradicts itself",
        explanation=f"""\
A switch may stand at the top of config.json or inside `eagle_config`, and which of the two a \
vLLM reads depends on the release and the class. Where both stand there and say different things, \
nobody can tell what the drafter was trained with.

{_REFUSED}""",
    ),
    Kind(
        id="drafter-other-target",
        severity=Severity.FAILS,
        title="The drafter belongs to another target",
        explanation=f"""\
The width of the hidden states that the drafter reads, or its vocabulary, is not this target's. \
(A vocabulary that is smaller by less than 1024 is taken as the target's without its padding.)

Drafters for K2, K2.5, K2.6 and K2.7 have the same sizes and cannot be told apart by them; see \
drafter-files. {_REFUSED}""",
    ),
    Kind(
        id="drafter-aux-captured",
        severity=Severity.NOTE,
        title="The hidden states that the drafter is fed",
        explanation=f"""\
{_CONVENTIONS}

The finding says which key names them, by which convention they were read, and what is captured. \
Compare it with what the trainer or the model card says. One layer off, nothing crashes and \
acceptance falls: by 0.10 of acceptance length on Kimi-K2.5 in one report, from 45 % to 10 % in \
the first position for another target.

{_OPTION}""",
        upstream=(_SGLANG, f"{_PULLS}50170", f"{_PULLS}43671"),
    ),
    Kind(
        id="drafter-aux-unsure",
        severity=Severity.NOTE,
        title="Aux layers that fit neither convention",
        explanation=f"""\
{_CONVENTIONS}

This list begins with another number, so its convention cannot be told. It is taken as it stands, \
as inputs. If its trainer counts outputs (SpecForge, ModelOpt and TorchSpec do), every id has to \
be one higher.

{_OPTION} Try both and keep the one with the higher acceptance.""",
        upstream=(_SGLANG,),
        undecided=True,
    ),
    Kind(
        id="drafter-aux-layers",
        severity=Severity.FAILS,
        title="Aux layers that this target does not have",
        explanation=f"""\
{_CONVENTIONS}

The list is no list of numbers, goes beyond the target's layers, does not increase (vLLM joins \
hidden states in the order of the layers, whatever the order of the list), or there is none and \
vLLM's default (2, n // 2, n - 3) does not work for so few layers.

{_OPTION} {_REFUSED}""",
        upstream=(f"{_PULLS}46788",),
    ),
    Kind(
        id="drafter-aux-contradiction",
        severity=Severity.FAILS,
        title="Two lists of aux layers that are not the same",
        explanation=f"""\
{_CONVENTIONS}

config.json names aux layers in more than one place (at the top, in `eagle_config`), and they are \
different layers even when each is read by its own convention. Which of the two a vLLM reads \
depends on the release and the runner.

{_OPTION} {_REFUSED}""",
        upstream=(_SGLANG, f"{_PULLS}50170"),
    ),
    Kind(
        id="drafter-aux-count",
        severity=Severity.FAILS,
        title="More or fewer aux layers than the drafter joins",
        explanation=f"""\
`fc.weight` joins a number of hidden states, which follows from its width, and config.json names \
another number of layers. Up to 0.21 vLLM builds the layer for three whatever the config says; \
later it counts `num_aux_hidden_states` or the list in `eagle_config`, and never the list at the \
top. It stops where the weights are loaded, with sizes that do not match.

{_OPTION} {_REFUSED}""",
        upstream=(f"{_PULLS}54598", f"{_ISSUES}54526"),
    ),
    Kind(
        id="drafter-fc-width",
        severity=Severity.FAILS,
        title="fc.weight is not made for this target",
        explanation=f"""\
`fc.weight` maps several hidden states of the target, side by side, to one of the drafter. Its \
width has to be a multiple of the target's hidden size. Otherwise the drafter was trained for \
another target, whatever its config.json says.

{_REFUSED}""",
        upstream=("https://github.com/vllm-project/vllm-ascend/issues/8678",),
    ),
    Kind(
        id="drafter-tensor-missing",
        severity=Severity.FAILS,
        title="A tensor that the drafter needs is not in its checkpoint",
        explanation=_tensors(
            "A parameter has no tensor. (The embedding and the LM head may be left out, where the "
            "target's can stand in.)",
            "Stock loads the drafter without a word, on every release. What was in memory before "
            "is then used as the parameter.",
        ),
        upstream=(f"{_PULLS}42764",),
    ),
    Kind(
        id="drafter-tensor-unexpected",
        severity=Severity.FAILS,
        title="A tensor that the drafter has no place for",
        explanation=_tensors(
            "A tensor has no parameter. Often it belongs to an option that config.json does not "
            "name, such as EAGLE-3.1's `fc_norm`.",
            "Stock drops it without a word for an MLA drafter up to 0.24, and stops at a bare "
            "`KeyError` for a Llama drafter; from 0.25 on it stops and names the tensor.",
        ),
        upstream=(f"{_PULLS}42764",),
    ),
    Kind(
        id="drafter-tensor-shape",
        severity=Severity.FAILS,
        title="A tensor of another shape than config.json makes it",
        explanation=_tensors(
            "A tensor's shape does not follow from the sizes in config.json.",
            "Stock stops while it loads the drafter, after the target, with two sizes that do not "
            "match.",
        ),
        upstream=(f"{_ISSUES}54526",),
    ),
    Kind(
        id="drafter-tensor-dtype",
        severity=Severity.FAILS,
        title="A tensor of a dtype that cannot be loaded as it is meant",
        explanation=_tensors(
            "Weights are not BF16, F16 or F32 and do not come with the scales of a quantisation, "
            "or a `d2t` is no integer.",
            "Stock copies the numbers as they are: 8-bit weights without their scales become "
            "bfloat16 weights that mean nothing.",
        ),
        upstream=(f"{_PULLS}37280",),
    ),
    Kind(
        id="drafter-tensor-duplicate",
        severity=Severity.FAILS,
        title="Two tensors for one place",
        explanation=_tensors(
            "Two names are the same to vLLM, which reads `midlayer.` as `layers.0.`.",
            "Stock keeps whichever it reads last.",
        ),
    ),
    Kind(
        id="drafter-vocabulary",
        severity=Severity.FAILS,
        title="A draft vocabulary of an impossible size",
        explanation=f"""\
`draft_vocab_size` is the number of the target's tokens that the drafter scores. It cannot be \
larger than the target's vocabulary.

{_REFUSED}""",
    ),
    Kind(
        id="drafter-d2t",
        severity=Severity.FAILS,
        title="A map of the draft vocabulary that is wrong",
        explanation=f"""\
A drafter with a reduced vocabulary needs the tensor `d2t`: row i of its head stands for the \
target's token `i + d2t[i]`. vLLM adds these numbers up unchecked, in every release. Where they \
are missing, out of range, or token ids in the place of offsets, it proposes other tokens than the \
drafter meant: nothing is said, and next to nothing is accepted.

The map is read whole and held against the two vocabularies and against `t2d`, a mask over the \
target's vocabulary that training leaves behind and that vLLM never reads. {_REFUSED} \
`VLLM_KIMI_EAGLE3_DISABLE=draft-vocabulary` takes that check out.""",
        upstream=(f"{_ISSUES}50158",),
    ),
    Kind(
        id="drafter-d2t-unneeded",
        severity=Severity.NOTE,
        title="A d2t that maps every token to itself",
        explanation="""\
The drafter scores the target's whole vocabulary and its checkpoint has a `d2t` all the same. \
vLLM from 0.30 on has no parameter for it and refuses the checkpoint; before, offsets of zero are \
loaded and cost a scatter over the vocabulary in every draft step, and token ids are added to the \
ids. The plugin leaves such a tensor out.""",
    ),
    Kind(
        id="drafter-t2d",
        severity=Severity.NOTE,
        title="A t2d that could not be used",
        explanation="""\
`t2d` is a mask over the target's vocabulary that training leaves behind. vLLM never reads it. \
Here it is a second witness for `d2t`, which it could not be this time.""",
    ),
    Kind(
        id="drafter-quantization",
        severity=Severity.WRONG,
        title="A quantised config over plain weights",
        explanation="""\
The drafter's config.json (or hf_quant_config.json) names a quantisation, and no tensor of its \
checkpoint is quantised. Often the block is the target's, copied by an export. vLLM builds \
quantised layers, for which there are no weights: a Llama drafter stops while it is loaded, an MLA \
drafter up to 0.24 is left with what was in memory.

Remove the block. A drafter without one is not quantised: vLLM never applies the target's \
quantisation to it. If its ignore list leaves out every layer, it is harmless.""",
        upstream=(f"{_PULLS}28435", f"{_PULLS}40849"),
    ),
    Kind(
        id="drafter-quantized-head",
        severity=Severity.FAILS,
        title="A quantised LM head that this vLLM cannot load",
        explanation=f"""\
The drafter's `lm_head` is quantised. vLLM's class for a Llama drafter loads such a head from 0.19 \
on, the one for an MLA drafter in no release up to 0.33: neither passes the quantisation to the \
head before.

Quantise the drafter again with `lm_head` in the ignore list. {_REFUSED}""",
        upstream=(f"{_PULLS}37280",),
    ),
    Kind(
        id="drafter-rope",
        severity=Severity.FAILS,
        title="A rope that cannot be computed as it is meant",
        explanation=f"""\
Transformers 4 writes `rope_theta` beside `rope_scaling`, Transformers 5 both into \
`rope_parameters`. The parts contradict each other, are no numbers, or name a scaling that no vLLM \
has. Or the drafter has MLA and a scaling other than YaRN: vLLM's MLA classes compute every \
scaling as YaRN.

A wrong rope crashes nothing; the drafter is fed other positions than it was trained on. \
{_REFUSED}""",
        upstream=(f"{_PULLS}51092",),
    ),
    Kind(
        id="drafter-rope-of-target",
        severity=Severity.NOTE,
        title="The drafter's rope is not the target's",
        explanation="""\
A drafter has a rope of its own, and was trained with it; it need not be the target's. AQ-MedAI's \
drafters have theta 1,000,000 and no scaling where Kimi has 50,000 and YaRN x64, those of \
lightseekorg and nvidia have Kimi's with another beta_fast. vLLM computes each with its own.

Compare it with the training config: a config.json that was written again by another Transformers \
may have lost theta, which is 10,000 then.""",
        upstream=(
            "https://github.com/vllm-project/vllm-ascend/issues/6612",
            "https://github.com/wejoncy/sfllm/pull/32",
        ),
    ),
    Kind(
        id="drafter-rope-ends",
        severity=Severity.SLOW,
        title="The drafter's rope ends before the longest request",
        explanation="""\
vLLM keeps cos and sin in a table. For YaRN it is as long as the factor times the original length, \
and for rarer scalings as `max_position_embeddings`. Requests that are longer than the drafter's \
table go on without drafts, each for itself; the others are not affected.

Without the plugin the V1 runner stops drafting for the whole batch, and the V2 runner reads \
beyond the table.""",
        upstream=(f"{_ISSUES}58080", f"{_ISSUES}48894"),
    ),
    Kind(
        id="drafter-length",
        severity=Severity.NOTE,
        title="The drafter was trained on shorter requests",
        explanation="""\
Its `max_position_embeddings` is less than what a request may have. Its rope is a formula of the \
position, so it drafts on; what it was not trained on it predicts less well.

"max_model_len" in `--speculative-config` keeps it to a length of yours, at a price: on the V1 \
runner drafting then stops for the whole batch while one request is longer.""",
        upstream=(f"{_ISSUES}58080",),
    ),
    Kind(
        id="drafter-heads",
        severity=Severity.NOTE,
        title="Whose embedding and LM head the drafter uses",
        explanation="""\
A drafter that comes without an embedding or LM head uses the target's. One that has its own keeps \
it, and with it the memory: 163,840 rows of 7168 in bfloat16 are 2.35 GB, over all tensor-parallel \
ranks together. One that has the target's over again is given the target's.

`check` compares samples of the tensors; at the start they are compared byte for byte, once, where \
stock compares on every rank, each its own shard (patch head-sharing).""",
        upstream=(f"{_PULLS}28549", f"{_ISSUES}50158"),
    ),
    Kind(
        id="drafter-layers",
        severity=Severity.NOTE,
        title="A drafter with several decoder layers",
        explanation="""\
Published drafters for Kimi have one decoder layer. Each more costs its time in every draft step, \
one after the other, and its own KV cache. The plugin's class for MLA drafters on 0.15 to 0.17 has \
one layer only.""",
    ),
    Kind(
        id="drafter-parallel",
        severity=Severity.FAILS,
        title="Parallel drafting with an MLA drafter",
        explanation=f"""\
"parallel_drafting" drafts all tokens in one pass, with a drafter that was trained for it and has \
the tensor `mask_hidden`. vLLM's class for MLA drafters has no such tensor: the server stops after \
the load with an `AttributeError`.

{_REFUSED}""",
    ),
    Kind(
        id="drafter-dtype",
        severity=Severity.NOTE,
        title="The drafter runs in another dtype than it is stored in",
        explanation="""\
vLLM runs a drafter in the target's dtype and converts its weights when it loads them. Values that \
float16 holds lose three bits of precision in bfloat16, which drafters bear. The other way round, \
what is larger than 65504 becomes infinite.""",
    ),
    Kind(
        id="drafter-files",
        severity=Severity.NOTE,
        title="Which files these are",
        explanation="""\
Drafters for K2.5, K2.6 and K2.7 have the same sizes, and a repository may change under the same \
name. The finding says by what these files can be told from others: the commit and the checksum \
that Hugging Face keeps beside a download, or the size. `"revision"` in `--speculative-config` \
holds a server to one commit.""",
    ),
)
