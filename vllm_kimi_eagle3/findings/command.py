# SPDX-License-Identifier: Apache-2.0
"""The command line: flags and keys of --speculative-config as this release spells them."""

from __future__ import annotations

from .kinds import Kind, Severity

KINDS: tuple[Kind, ...] = (
    Kind(
        "command-unreadable",
        Severity.FAILS,
        "The command cannot be read",
        """\
The text that was given is no command that a shell would run: a quote is opened and never \
closed, or it is longer than any command. A quote that is never closed mostly comes from an \
apostrophe inside a JSON text in single quotes, or from a paste that lost its end.

Nothing else was checked. Close the quote, and run check again.""",
    ),
    Kind(
        "command-not-serve",
        Severity.NOTE,
        "The command starts no server",
        """\
check reads the command line of a server: `vllm serve MODEL ...`, `python -m \
vllm.entrypoints.openai.api_server --model MODEL ...`, `docker run ... vllm/vllm-openai ...`, or \
what follows any of them. Other subcommands of vLLM (`bench`, `chat`, `run-batch`) have other \
flags, and were not checked.""",
        undecided=True,
    ),
    Kind(
        "command-shell-variable",
        Severity.NOTE,
        "The shell fills something in",
        """\
A command that is pasted as one text is taken apart as a shell would, but nothing in it is \
expanded or run: `$MODEL`, `${MODEL}` and `$(...)` stay as they are, and what they stand for was \
not checked.

Give the command without quotes around the whole, `vllm-kimi-eagle3 check vllm serve $MODEL \
...`: then the shell fills it in before check sees it.""",
        undecided=True,
    ),
    Kind(
        "command-lookalike",
        Severity.FAILS,
        "A character that only looks right",
        """\
Chats, web pages and word processors put other characters in place of those that were typed: a \
no-break space (U+00A0) for a blank, one long dash for two hyphens, curly quotes for straight \
ones, or a zero-width space where nothing is seen. To the shell they are letters: a flag with a \
long dash is a word like any other, and two words with a no-break space between them are one.

The command fails as it stands, mostly with "unrecognized arguments" or with JSON that cannot be \
read. The rest of the report reads it as it was meant. Type the character at the place that the \
finding names, or copy the command from its plain text.""",
    ),
    Kind(
        "command-no-model",
        Severity.WRONG,
        "The command names no model",
        """\
`vllm serve` without a model starts all the same, with vLLM's default, a small Qwen (on every \
release from 0.15 to 0.33). With `--served-model-name` and no model in front, releases from 0.17 \
on stop.

Often the model is there and a flag has taken it: `--served-model-name kimi MODEL` and \
`--api-key KEY MODEL` take all words that follow, and `--hf-token MODEL` takes one. Put the \
model first.""",
    ),
    Kind(
        "command-model-place",
        Severity.FAILS,
        "The model is not where vLLM takes it",
        """\
`vllm serve` wants the model as its first argument in two cases: with `--config FILE`, unless \
the file names the model, and from 0.17 on with `--served-model-name`. Elsewhere it may stand \
anywhere.

`python -m vllm.entrypoints.openai.api_server` takes the model with `--model` alone. It accepts \
a model without the flag too, and ignores it: vLLM's default is served.""",
    ),
    Kind(
        "command-extra-words",
        Severity.FAILS,
        "Words that belong to nothing",
        """\
vLLM stops at a word that belongs to no flag once it has a model ("unrecognized arguments"). \
They come from a value with blanks that is not in quotes, from a flag that takes one word and is \
given two, or from a model that is named twice.""",
    ),
    Kind(
        "command-unknown-flag",
        Severity.FAILS,
        "A flag that this release does not have",
        """\
vLLM stops at a flag that it does not know ("unrecognized arguments"), before anything is \
loaded. Flags come and go between releases; the finding says with which one this flag came or up \
to which it was there, as far as the supported releases show, and which flag is near.

A flag may be shortened as long as only one begins so; underscores and dashes are the same. What \
the plugin knows of flags is read from the release's own parser.""",
    ),
    Kind(
        "command-ambiguous-flag",
        Severity.FAILS,
        "A short form that stands for several flags",
        """\
vLLM's parser takes the beginning of a flag for the flag, as long as only one begins so; \
otherwise it stops ("ambiguous option"). A release with more flags can make a short form \
ambiguous that was not. Write the flag out.""",
    ),
    Kind(
        "command-value",
        Severity.FAILS,
        "A value that the flag does not take",
        """\
vLLM stops at a value that it cannot read ("invalid int value", "invalid choice", "expected one \
argument"). Numbers of tokens may be written as `32k` (32,000) or `32K` (32,768) for \
`--max-model-len`, which takes `auto` too, and for a few other flags; other numbers may not. A \
switch takes no value: `--enable-prefix-caching` or `--no-enable-prefix-caching`.""",
    ),
    Kind(
        "command-repeated",
        Severity.NOTE,
        "A flag that is given twice",
        """\
Of a flag that is given more than once vLLM takes the last, and logs "Found duplicate keys". \
That is how a flag on the command line overrides one in a `--config` file; within the command it \
is mostly an oversight.""",
    ),
    Kind(
        "command-json",
        Severity.FAILS,
        "JSON that cannot be read",
        """\
`--speculative-config` and its like take a JSON object: double quotes inside, `true`, `false` \
and `null`, no comma behind the last entry. On the command line it has to stand in single \
quotes, `--speculative-config '{"method": "eagle3", ...}'`; otherwise the shell takes the double \
quotes away and splits it at blanks and commas before vLLM sees it.

The same can be written without JSON, one key at a time: `--speculative-config.method eagle3 \
--speculative-config.model DRAFTER --speculative-config.num_speculative_tokens 3`. In a \
`--config` file, an object can be nested from 0.16 on; 0.15 wants JSON in quotes there too.""",
    ),
    Kind(
        "command-json-key",
        Severity.FAILS,
        "A key of an option that this release does not take",
        """\
vLLM stops at a key that the class of an option does not have ("Unexpected keyword argument"): \
in `--compilation-config` on every release from 0.15 to 0.33, in `--attention-config` and \
`--kv-transfer-config` from 0.16 on; 0.15 drops it there without a word.

Old recipes have keys of `--compilation-config` that are gone: `"full_cuda_graph": true` is \
`"cudagraph_mode": "FULL"`, `"use_cudagraph": false` is `"cudagraph_mode": "NONE"`, and `level` \
is `mode` (0.15 to 0.17 take both). The finding is held against the release's own class.""",
    ),
    Kind(
        "command-json-replaced",
        Severity.WRONG,
        "JSON that a later option replaces",
        """\
vLLM puts options with dots (`--speculative-config.model DRAFTER`) together into one object, and \
reads that after everything else. It does not merge it with `--speculative-config '{...}'`: the \
object takes the JSON's place as a whole, and the keys that only the JSON has are lost. So does \
the later of two JSON objects, the one on the command line against the one in a `--config` file, \
and `--speculative-config.x` against `-sc.x`.""",
    ),
    Kind(
        "command-spec-flag",
        Severity.FAILS,
        "A flag and a key that say the same",
        """\
From 0.22 on `--spec-method`, `--spec-model` and `--spec-tokens` set a key of \
`--speculative-config` each. vLLM stops if the key is there too ("mutually exclusive"), also if \
both have the same value.""",
    ),
    Kind(
        "command-config-file",
        Severity.FAILS,
        "The config file cannot be read",
        """\
`--config FILE` reads flags from a YAML file: one a line, without the dashes in front, and the \
file must end in `.yaml` or `.yml`. It is given once, as two words: `--config=FILE` is taken by \
the parser and never read, on every release, so that all flags in the file are missing without a \
word.""",
    ),
    Kind(
        "command-config-unread",
        Severity.NOTE,
        "The config file was not read",
        """\
The `--config` file is YAML, and there is no YAML reader in this Python environment, or the file \
uses aliases (`&name`, `*name`) or is longer than any set of flags, which check does not follow. \
vLLM reads all that, and what the file says was not checked. Where vLLM is installed there is a \
YAML reader.""",
        undecided=True,
    ),
    Kind(
        "command-config-false",
        Severity.WRONG,
        "A false in a config file that does nothing",
        """\
In a `--config` file `enable-prefix-caching: true` stands for `--enable-prefix-caching`, but \
`enable-prefix-caching: false` stands for nothing: vLLM ignores it, and a switch that is on \
without being asked stays on. From 0.28 on it means to put `--no-enable-prefix-caching` in its \
place, but looks for that flag in the parser of all subcommands, which has none, so that it \
still does nothing for `vllm serve`.

Write `no-enable-prefix-caching: true`.""",
    ),
    Kind(
        "command-no-speculation",
        Severity.NOTE,
        "The command has no speculation",
        """\
Without `--speculative-config` (or `-sc`, from 0.19 on) the target runs alone, and nothing of \
this plugin is used.""",
    ),
    Kind(
        "command-method",
        Severity.FAILS,
        "The method is not the drafter's",
        """\
Without "method" in `--speculative-config` vLLM goes by the name or path of the drafter, in \
lower case: one with `eagle-` in it is EAGLE-1, so a folder called `eagle-3` is too; one with \
`eagle3` in it is EAGLE-3. For any other name releases up to 0.16 stop ("Unsupported speculative \
method"), and later ones take the drafter for a language model of its own ("draft_model"), which \
an EAGLE-3 head is not.

With the method `eagle`, an EAGLE-3 head that loads at all is given the target's last hidden \
state in place of three layers of it: hardly a draft is accepted, and nothing says why. Name the \
method: `"method": "eagle3"`.""",
    ),
    Kind(
        "command-other-method",
        Severity.NOTE,
        "The method is not EAGLE-3",
        """\
The plugin, and check, are about EAGLE-3. vLLM has other methods of speculation (n-grams, the \
target's own MTP layer, a small model of the same family); what they need of target and drafter \
was not checked.""",
        undecided=True,
    ),
    Kind(
        "command-no-drafter",
        Severity.FAILS,
        "No drafter is named",
        """\
EAGLE-3 needs a drafter: "model" in `--speculative-config` is its folder, or its name on Hugging \
Face. Without it vLLM stops ("num_speculative_tokens was provided but without speculative \
model").""",
    ),
    Kind(
        "command-speculative-missing",
        Severity.FAILS,
        "The number of tokens to draft is missing",
        """\
"num_speculative_tokens" says how many tokens the drafter drafts in each step. vLLM has no \
default for EAGLE-3: it stops, on some releases at a range(None) that says nothing of it. 3 is \
what the published drafters for Kimi were measured with.""",
    ),
    Kind(
        "command-speculative-key",
        Severity.FAILS,
        "A key that this release does not take",
        """\
From 0.16 on vLLM stops at a key of `--speculative-config` that it does not know ("Unexpected \
keyword argument"); 0.15 drops it without a word. Copied recipes have keys of patched images \
(`draft_attention_backend`, `draft_kv_cache_dtype`), of other engines (`speculative_num_steps`, \
`speculative_eagle_topk`), or of another release.

Keys that came: `use_local_argmax_reduction` 0.17, `rejection_sample_method` 0.18, \
`attention_backend` and `draft_sample_method` 0.21, `num_speculative_tokens_per_batch_size` \
0.24, `kv_cache_dtype` 0.26, `draft_lm_head_quantization` 0.33. Keys that went: \
`disable_by_batch_size` after 0.16, `speculative_token_tree` after 0.20. Dashes for underscores \
in keys are taken from 0.26 on. The finding is held against the release's own list of keys, and \
its fix has the whole option as that release takes it.""",
    ),
    Kind(
        "command-speculative-value",
        Severity.FAILS,
        "A value that this release does not take",
        """\
vLLM stops at a value of the wrong type, out of range, or not among those that the key takes. \
Which those are changes: sampled drafts are `"rejection_sample_method": "probabilistic"` from \
0.18 to 0.20 (on the V2 runner alone), `"draft_sample_method": "gumbel"` on 0.21, and \
`"draft_sample_method": "probabilistic"` from 0.22 on; "block" came with 0.25 and "fly" with \
0.33.

Numbers in quotes, such as "3", are taken for numbers. "draft_tensor_parallel_size" can only be \
1 or the target's, and does nothing for EAGLE-3 either way: leave it out.""",
    ),
    Kind(
        "command-speculative-ignored",
        Severity.NOTE,
        "A key that nothing reads",
        """\
This release takes the key, and no code that runs Kimi there reads it: the key belongs to the \
other model runner, or to an engine that is gone. The V1 runner serves Kimi up to 0.28 and the \
V2 runner from 0.29 on, unless `VLLM_USE_V2_MODEL_RUNNER` says otherwise.""",
    ),
    Kind(
        "command-synthetic",
        Severity.WRONG,
        "Drafts are accepted at random",
        """\
`"rejection_sample_method": "synthetic"` (from 0.19 on, and on the V1 runner from 0.20 on) \
accepts drafts at a given rate without looking at them. It is for measuring what a better \
drafter would bring: the text that comes out is made of drafts that the target never agreed to.""",
    ),
)
