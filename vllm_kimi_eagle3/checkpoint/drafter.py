# SPDX-License-Identifier: Apache-2.0
"""Can what the user named as the drafter be an EAGLE-3 drafter at all?

Only the obvious is answered here, from the folder's ``config.json``: a folder that is missing or
empty, or a config of something else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# More than any real config.json; a larger file is a mistake and is not read.
_MAX_CONFIG_BYTES = 16 * 1024 * 1024


def drafter_problem(model: str) -> str | None:
    """What is wrong with ``model`` as an EAGLE-3 drafter, in one sentence with the fix, or None.

    ``model`` is what the user gave as ``"model"`` in ``--speculative-config``. Only a folder is
    judged: of a Hugging Face id or an object store's URL nothing is said (None).
    """
    path = Path(model)
    if not path.is_dir():
        if not _meant_as_path(model):
            return None
        if path.exists():
            return f"{model!r} is a file; give the folder that holds the drafter's config.json"
        hint = " ('~' is not expanded here)" if model.startswith("~") else ""
        return f"the folder {model!r} does not exist{hint}"
    file = path / "config.json"
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            return f"{str(file)!r} is larger than any config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"the folder {model!r} holds no config.json"
    except (OSError, ValueError, RecursionError) as error:
        return f"{str(file)!r} cannot be read as JSON: {_one_line(error)}"
    if not isinstance(config, dict):
        return f"{str(file)!r} holds no JSON object"
    if not _is_eagle3(config):
        return (
            f"{str(file)!r} is not the config of an EAGLE-3 drafter: architectures "
            f"{config.get('architectures')!r}, and neither 'eagle_config' nor 'draft_vocab_size'; "
            "give an EAGLE-3 drafter, or the 'method' that this one was trained for"
        )
    return None


def _meant_as_path(model: str) -> bool:
    """A Hugging Face id is ``name`` or ``owner/name``, an object store's a URL; what else has a
    separator is a path."""
    if "://" in model:
        return False
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1


def _is_eagle3(config: dict[str, Any]) -> bool:
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if any("eagle3" in str(name).lower() for name in names):
        return True
    if str(config.get("speculators_model_type", "")).lower() == "eagle3":
        return True
    # Early trainers call a Llama-shaped EAGLE-3 drafter LlamaForCausalLM; vLLM renames it. What
    # tells it from a plain Llama are keys that only EAGLE-3 trainers write.
    return "eagle_config" in config or "draft_vocab_size" in config


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
