# SPDX-License-Identifier: Apache-2.0
"""The target: is it a Kimi, and does it say what its drafter needs."""

from __future__ import annotations

from .kinds import Kind, Severity

_PULLS = "https://github.com/vllm-project/vllm/pull/"

KINDS: tuple[Kind, ...] = (
    Kind(
        id="target-not-here",
        severity=Severity.NOTE,
        title="The target is not on this machine",
        explanation="""\
`check` reads folders and the Hugging Face cache (`HF_HUB_CACHE`, `HF_HOME`, `--revision`) and \
downloads nothing. Without the target's config.json nothing can be told of it, nor whether the \
drafter belongs to it: the drafter is then held against the sizes that every published Kimi has.

config.json and the index have 25 MB together and are enough for all but the size of the weights, \
which is then reckoned: `hf download OWNER/NAME config.json model.safetensors.index.json`. With \
`HF_HUB_OFFLINE=1` vLLM does not find the model either, and stops.

Models from an object store (`s3://`, `gs://`, from 0.18 `az://`: vLLM fetches the config from \
there), GGUF files and what ModelScope keeps (`VLLM_USE_MODELSCOPE=True`) are not looked at.""",
        undecided=True,
    ),
    Kind(
        id="target-not-kimi",
        severity=Severity.NOTE,
        title="The target is no Kimi",
        explanation="""\
The plugin is for Kimi K2, K2.5, K2.6 and K2.7: `model_type` kimi_k25 with a DeepSeek-V3 text \
tower, kimi_k2, or a DeepSeek-V3 with Kimi's vocabulary of 163,840 tokens and 384 experts. For \
every other model it changes nothing, and this check says nothing of how it goes with its drafter.

Where this is a Kimi, its config.json was changed: take that of the model's page.""",
        undecided=True,
    ),
    Kind(
        id="target-size",
        severity=Severity.FAILS,
        title="The target's config does not say how large it is",
        explanation="""\
`num_hidden_layers`, `hidden_size` and `vocab_size` of the text tower decide which hidden states \
the drafter reads and how wide they are. Where one is missing, Transformers takes DeepSeek-V3's \
(61 layers, 7,168 wide, a vocabulary of 129,280 tokens, which is not Kimi's), and loading the \
weights ends with shapes that do not fit.

Take config.json from the model's page again.""",
    ),
    Kind(
        id="target-image-token",
        severity=Severity.FAILS,
        title="The target's config names no image token that this vLLM reads",
        explanation="""\
vLLM's V1 proposer asks a multimodal target's config for the token that stands for an image, with \
text-only use as well, once the whole target is loaded; without it: AttributeError. Up to 0.17 it \
reads `image_token_index`, which no Kimi has. From 0.18 it reads `media_placeholder_token_id`, for \
which vLLM's own config class has a default. From 0.32 Transformers' class is used: it has \
`image_token_id` in its place, and a config that was saved again with it has lost the other key. \
The V2 runner does not ask.

The plugin answers in both cases (patches image-token and image-token-saved-again). Without it add \
the key that is named: every published Kimi has 163605.""",
        upstream=(f"{_PULLS}35966", f"{_PULLS}36361"),
    ),
    Kind(
        id="target-no-head",
        severity=Severity.WRONG,
        title="The target's files hold no LM head",
        explanation="""\
A checkpoint that was saved with tied embeddings has one tensor for embedding and LM head. \
`DeepseekV2ForCausalLM`, which is the text tower of every Kimi in vLLM 0.15 to 0.33, does not look \
at `tie_word_embeddings`: it builds a head of its own and waits for `lm_head.weight`. A target \
without quantisation is refused once it is loaded, because weights were not initialised; for a \
quantised one this is not looked at, and it answers with whatever was in the memory. A drafter \
without a head of its own shares it.

Save the target untied, with its `lm_head.weight`.""",
    ),
    Kind(
        id="target-tied",
        severity=Severity.NOTE,
        title="The target counts as tied, by its config or by a missing key",
        explanation="""\
From 0.29 vLLM takes `tie_word_embeddings: true` for a claim: if the files have an `lm_head`, it \
is loaded, compared with the embedding on the CPU by every rank, and used, with a warning that \
they differ. Kimi's are never the same. From 0.32 a Kimi-K2.5 is read with Transformers' own \
config class, which has true where the key is missing at the top of config.json (in `text_config` \
it does not count). Up to 0.28 nothing that a Kimi runs through looks at the key.

Nothing goes wrong; it costs some seconds at the start and a misleading line in the log.""",
    ),
    Kind(
        id="target-vision",
        severity=Severity.NOTE,
        title="Images are allowed, and the drafter does not see them",
        explanation="""\
The EAGLE-3 drafters of Kimi were trained on text, and their classes in vLLM ignore the embeddings \
of images: where the target has an image, the drafter has the placeholder's embedding. The \
target's hidden states, which it also reads, know of the image, so acceptance after an image falls \
but does not go to nothing; 2.3 to 2.8 tokens per step were published for MMStar. What comes out \
is the target's in any case.

For text alone, `--language-model-only` (from 0.17) or `--limit-mm-per-prompt '{"vision_chunk": \
0}'` leaves the vision tower out from 0.16 on, which frees 0.9 GB, and its profiling run. Kimi has \
no modalities `image` and `video`: a limit on these is not looked at.""",
    ),
    Kind(
        id="target-remote-code",
        severity=Severity.FAILS,
        title="The tokenizer is remote code, and that is not allowed",
        explanation="""\
Kimi's config is known to vLLM and needs no code from the repository in any release from 0.15 on \
(a text-only K2 from 0.18; the plugin brings it to the older ones). Its tokenizer does: it is a \
class of the repository (`auto_map` in tokenizer_config.json). Without `--trust-remote-code` vLLM \
up to 0.31 stops at the tokenizer. From 0.32 Transformers has a config class for Kimi and goes on \
without asking: it makes a tokenizer of tiktoken.model by a general rule, whose pattern is not \
Kimi's, so that text, Chinese above all, becomes other tokens than the model was trained on.

Images also need the repository's processor, up to 0.25 always and from 0.26 where numba is not \
installed.""",
    ),
    Kind(
        id="target-quantization",
        severity=Severity.FAILS,
        title="This vLLM does not know the target's quantisation method",
        explanation="""\
`quant_method` in the config's `quantization_config` (or `compression_config`) is none of the \
methods of this release: "Unknown quantization method". Kimi's own exports are compressed-tensors, \
those of NVIDIA modelopt, those of AMD quark; all three are in every release from 0.15 to 0.33. A \
method that an extension registers in vLLM is not known here.

Use a release that has it, or another export.""",
    ),
    Kind(
        id="target-quantization-flag",
        severity=Severity.FAILS,
        title="--quantization names another method than the target's config",
        explanation="""\
The published Kimis are quantised, and their configs say how: compressed-tensors, or fp8 for the \
first K2. `--quantization` (`-q`) does not convert: another method ends the start with \
"Quantization method specified in the model config (compressed-tensors) does not match the \
quantization method specified in the `quantization` argument". The check says nothing where a \
method of the release answers for any config, as `humming` does from 0.20.

Leave the flag out.""",
    ),
    Kind(
        id="target-load-format",
        severity=Severity.FAILS,
        title="This vLLM does not know the load format",
        explanation="""\
`--load-format` takes any word, and only when the weights are to be loaded is it looked up: "Load \
format ... is not supported". `gguf` went in 0.24 and `bitsandbytes` in 0.28; `instanttensor` came \
in 0.18, `modelexpress` in 0.22, `ipc_cache` in 0.30. A loader that an extension registers in vLLM \
is not known here.

Leave the flag out, unless you need another loader.""",
    ),
    Kind(
        id="target-rope",
        severity=Severity.FAILS,
        title="The target's rope has a number that is none",
        explanation="""\
JSON as Python reads it knows Infinity and NaN, and 1e999 is infinite too. In `rope_scaling` \
(`rope_parameters` in Transformers 5) such a factor stops vLLM when it works out the longest \
request or the table of cos and sin. An infinite `rope_theta` or `mscale` is computed with, and \
the text is nonsense.

Take config.json from the model's page again.""",
    ),
)
