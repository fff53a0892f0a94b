# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is not on this machine, target or drafter: what is said of it, and what gets
it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from vllm_kimi_eagle3.checkpoint.errors import plain, quoted
from vllm_kimi_eagle3.checkpoint.folder import cache_folder
from vllm_kimi_eagle3.findings import Evidence, Finding, Severity

from .facts import Facts

# As huggingface_hub's constants.py takes a variable for true.
_TRUE = ("1", "ON", "YES", "TRUE")

# ``SUPPORTED_SCHEMES`` of vllm/transformers_utils/runai_utils.py.
_OBJECT_STORES, _AZURE_SINCE = ("s3://", "gs://", "az://"), "0.18"
_MODELSCOPE = "VLLM_USE_MODELSCOPE"
# Before, vllm/envs.py takes "true" alone.
_MODELSCOPE_BY_ONE = "0.28"


def from_modelscope(environ: Mapping[str, str], facts: Facts | None) -> bool:
    """True if vLLM gets from ModelScope what is no folder on this machine."""
    value = environ.get(_MODELSCOPE, "").lower()
    if facts is not None and facts.before(_MODELSCOPE_BY_ONE):
        return value == "true"
    return value.strip() in ("1", "true")


def readable(model: str) -> bool:
    """True if a name can be that of a folder or of a repository on Hugging Face."""
    return "://" not in model and not model.endswith(".gguf")


def checkpoint_not_here(
    part: Literal["target", "drafter"],
    model: str,
    revision: str | None,
    environ: Mapping[str, str],
    fix: str = "",
    *,
    modelscope: bool = False,
) -> Finding:
    """The finding on a checkpoint of which no config.json lies here.

    Args:
        part: which of the two.
        model: as the user named it.
        revision: likewise; None if not given.
        environ: the server's environment.
        fix: what to do about it; "" to download it.
        modelscope: vLLM gets it from ModelScope.
    """
    id = "target-not-here" if part == "target" else "drafter-not-here"
    evidence = Evidence(key="model", value=quoted(model))
    if (store := model.lower()).startswith(_OBJECT_STORES):
        since = f" (from {_AZURE_SINCE} on)" if store.startswith("az:") else ""
        return Finding(
            id,
            f"the {part} {quoted(model)} is in an object store: vLLM fetches it itself{since}, and "
            "this check fetches nothing, so nothing of it was looked at",
            "for this check copy its config.json to a folder, and name that",
            evidence,
        )
    if modelscope and readable(model):
        return Finding(
            id,
            f"the {part} {quoted(model)} comes from ModelScope ({_MODELSCOPE} is set), whose cache "
            "this check does not read, so nothing of it was looked at",
            f"`modelscope download --model {shlex.quote(model)}` says which folder it is in; name "
            "that as the model",
            evidence,
        )
    if not readable(model):
        return Finding(
            id,
            f"the {part} {quoted(model)} is nothing that this check can read, so nothing of it was "
            "looked at",
            "name a folder, or a repository on Hugging Face",
            evidence,
        )
    cache = cache_folder(environ)
    here = _revisions_here(cache, model)
    what = f"revision {quoted(revision or 'main')} of the" if revision or here else "the"
    offline = environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE
    return Finding(
        id,
        f"{what} {part} {quoted(model)} is not in the Hugging Face cache {str(cache)!r}"
        + (f", which has {here}" if here else "")
        + ", so nothing of it was looked at"
        + (", and with HF_HUB_OFFLINE vLLM does not download it either" if offline else ""),
        fix or download(model, revision),
        evidence,
        rated=Severity.FAILS if offline else None,
    )


def download(model: str, revision: str | None, *files: str) -> str:
    """The command that gets a checkpoint, or some files of it, into the cache."""
    at = f" --revision {shlex.quote(revision)}" if revision else ""
    return " ".join([f"hf download {shlex.quote(model)}{at}", *files])


def _revisions_here(cache: Path, model: str) -> str:
    """The revisions of a model that a cache has, in words; "" if there are none."""
    try:
        with os.scandir(cache / f"models--{model.replace('/', '--')}" / "snapshots") as entries:
            names = sorted(entry.name for entry, _ in zip(entries, range(100), strict=False))
    except (OSError, ValueError):
        return ""
    return ", ".join(plain(name)[:40] for name in names[:3])
