# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint that cannot be what they are given as."""

from __future__ import annotations

from .kinds import Kind, Severity

KINDS: tuple[Kind, ...] = (
    Kind(
        id="files-no-folder",
        severity=Severity.FAILS,
        title="What was given as a checkpoint's folder is none",
        explanation="""\
A model that begins with /, ./, ../ or ~, or that has more than one slash, is meant as a folder on \
this machine. vLLM takes what is no folder for the name of a repository on Hugging Face, and stops \
with a message about such names.

Of a page's address on Hugging Face give the OWNER/NAME in it. Give the path as it is where vLLM \
runs: inside a container that is the path of the mount. A shell \
expands ~ only where it is not quoted, and vLLM never does, in the JSON of --speculative-config in \
particular.""",
    ),
    Kind(
        id="files-no-config",
        severity=Severity.FAILS,
        title="The folder holds no config.json",
        explanation="""\
vLLM reads a checkpoint's config.json before anything else. A folder without one is often the \
folder above the right one, a download that was interrupted, or what a trainer wrote before it was \
exported (a folder of an optimizer's states).

In a Hugging Face cache it is below models--OWNER--NAME/snapshots. Give the folder that holds \
config.json, or download the rest: `hf download OWNER/NAME --local-dir \
FOLDER`.""",
    ),
    Kind(
        id="files-not-a-drafter",
        severity=Severity.FAILS,
        title="The drafter's config is that of something else",
        explanation="""\
The config.json that was given as the drafter's names the architecture of another speculative \
method (Medusa, MTP, DFlash, EAGLE-1), or that of a whole model with dozens of layers, often the \
target itself.

Give an EAGLE-3 drafter as "model" in --speculative-config, or the "method" that this one was \
trained for.""",
    ),
    Kind(
        id="files-unreadable",
        severity=Severity.FAILS,
        title="A file or folder cannot be read",
        explanation="""\
It is not there, its owner does not let this user read it, it is a link that leads nowhere or back \
to itself, or its name belongs to something that is no file: a folder, a pipe, a device. In a \
Hugging Face cache the files of a snapshot are links to blobs, and a cache that was copied without \
them has links that lead nowhere.

Copy caches with their links followed (`cp -rL`, `rsync -L`) or whole. Inside a container look at \
the user it runs as and at the mount.""",
    ),
    Kind(
        id="files-not-json",
        severity=Severity.FAILS,
        title="A file that has to be JSON is none",
        explanation="""\
config.json, an index and the header of a safetensors file are JSON objects in UTF-8 without a \
byte order mark. Transformers and the safetensors library refuse anything else. A web page that \
was saved under the file's name (a login, an error) begins with '<'; an editor on Windows may add \
a byte order mark; a hand-edited file misses a comma at the place that the message names.

Download the file again, or repair it there.""",
    ),
    Kind(
        id="files-too-large",
        severity=Severity.NOTE,
        title="A file is larger than any of its kind, and was not looked at",
        explanation="""\
The check reads files that nobody vouches for, in less than 200 MB of memory, and JSON takes up to \
thirty times its size there. So it stops at what no published checkpoint comes near: 8 MiB of \
config.json, 320,000 tensors in an index, 90,000 in one file, 30,000 in a drafter, 128 MiB of \
headers or 2,000 files in a folder. vLLM itself has no such bounds: the file may be right, and \
nothing was found out about it.

Look at the file: most often it is another one than was meant.""",
        undecided=True,
    ),
    Kind(
        id="files-truncated",
        severity=Severity.FAILS,
        title="A safetensors file is cut off",
        explanation="""\
The header of a safetensors file says where each tensor begins and ends, and the file ends before. \
A download or a copy was interrupted, or the disk was full. vLLM finds out when it opens this \
shard, which may be the last of 64.

Download the file again. `hf download` continues where it stopped, and with `hf cache verify` the \
checksums of the whole are looked at.""",
    ),
    Kind(
        id="files-lfs-pointer",
        severity=Severity.FAILS,
        title="A file is a Git LFS pointer and not the weights",
        explanation="""\
A repository was cloned with git on a machine without Git LFS: in the place of each large file \
there are three lines of text that say where it is.

Run `git lfs install` and `git lfs pull` in the folder, or use `hf download`.""",
    ),
    Kind(
        id="files-broken-header",
        severity=Severity.FAILS,
        title="A safetensors header contradicts itself or the file",
        explanation="""\
The header names a tensor with a dtype that safetensors has not, a shape that its bytes do not \
fill, bytes that overlap those of another or leave a gap, a name twice, or a length of its own \
that no header has. The rules are those of the safetensors library 0.8, which refuses the file \
when vLLM opens it.

Such a file was damaged, or written by something else than the library. Download or export it \
again.""",
    ),
    Kind(
        id="files-broken-index",
        severity=Severity.FAILS,
        title="The index of the safetensors files is none",
        explanation="""\
model.safetensors.index.json has an object 'weight_map' with the file's name for each tensor. vLLM \
reads it to know which files to take, and fails with a KeyError or a TypeError where it is \
something else.

Get the file again, or export the checkpoint again. Where all tensors are in one file there need \
not be an index.""",
    ),
    Kind(
        id="files-missing-shard",
        severity=Severity.FAILS,
        title="The index names files that are not there",
        explanation="""\
Every file that model.safetensors.index.json names has to be in the folder. From 0.26 vLLM stops \
with 'Weight files referenced in index but missing'. Up to 0.25 it loads those that are there; for \
a target without quantisation it then stops because weights were not initialised, and for a \
quantised one, as Kimi-K2.5 is, it serves with whatever was in the memory.

Download the rest. If the index is left over from another export, remove it.""",
    ),
    Kind(
        id="files-missing-tensor",
        severity=Severity.FAILS,
        title="The index names a tensor that no file holds",
        explanation="""\
The index and the files are not of the same export: it says that a tensor is in a file which does \
not hold it. What vLLM makes of that depends on the tensor: a parameter that stays as it was \
allocated, or an error after the load.

Get the index and the files again from one place and revision.""",
    ),
    Kind(
        id="files-duplicate-tensor",
        severity=Severity.WRONG,
        title="A tensor is in two files",
        explanation="""\
Two safetensors files of the folder hold a tensor of the same name and both are loaded: whichever \
is read last counts, without a word. It happens where an export was written into the folder of \
another, with other shards (model-00001-of-00002 beside model).

Leave one set of files in the folder, or an index that names it.""",
    ),
    Kind(
        id="files-duplicate-key",
        severity=Severity.WRONG,
        title="A key stands twice in a config",
        explanation="""\
JSON does not forbid it and Python takes the last one, so whoever reads the file from the top sees \
another value than vLLM. It happens where a config was edited by hand.

Keep the one that is meant.""",
    ),
    Kind(
        id="files-not-integers",
        severity=Severity.FAILS,
        title="A tensor that has to hold integers does not",
        explanation="""\
d2t and t2d map between the drafter's and the target's vocabulary. d2t is of integers and t2d of \
booleans; vLLM uses them as indices.

They were most likely converted together with the weights. Export the drafter again and leave them \
as they are.""",
    ),
    Kind(
        id="files-incomplete",
        severity=Severity.NOTE,
        title="Not all of the checkpoint is on this machine yet",
        explanation="""\
The Hugging Face cache holds the config of this model and not, or not all of, its weights. `vllm \
serve` downloads the rest when it starts, which for a Kimi of 554 GiB takes from minutes to hours, \
and with HF_HUB_OFFLINE=1 it stops.

What follows from the weights (whether they are whole, how much memory they take) is reckoned from \
config.json and marked as estimated. Download them before: `hf download OWNER/NAME`.""",
        undecided=True,
    ),
    Kind(
        id="files-no-weights",
        severity=Severity.NOTE,
        title="The folder has no safetensors files",
        explanation="""\
vLLM also loads PyTorch's own files (*.bin, *.pt), GGUF, and weights from elsewhere by \
--load-format. The check reads safetensors only: of other files nothing can be told without \
running what is in them.

With --load-format dummy, or a loader of your own, this is as it should be.""",
        undecided=True,
    ),
)
