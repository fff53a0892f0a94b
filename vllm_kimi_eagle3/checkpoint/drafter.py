# SPDX-License-Identifier: Apache-2.0
"""What a drafter's folder says of itself: can it be one at all, and which layers does it read?

Only what is certain is refused: a folder that is missing or empty, or a config that is plainly that
of something else. A config that might be a drafter's is left to vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"

# More than any real config.json; a larger file is a mistake and is not read.
_MAX_CONFIG_BYTES = 16 * 1024 * 1024

# Other speculative methods, by their architectures' names in lower case.
_OTHER_METHODS = ("medusa", "mlpspeculator", "mtp", "dflash", "eaglellama", "eagledeepseek")

# Published EAGLE-3 drafters have one decoder layer, a few have two or three; a model that was
# named by mistake has dozens.
_MAX_DRAFTER_LAYERS = 8


def drafter_problem(model: str) -> str | None:
    """What is wrong with ``model`` as an EAGLE-3 drafter, in one sentence with the fix, or None.

    ``model`` is what the user gave as ``"model"`` in ``--speculative-config``. Only a folder is
    judged: of a Hugging Face id, a GGUF file or an object store's URL nothing is said (None).
    Never raises.
    """
    if "://" in model or model.endswith(".gguf"):
        return None
    path = Path(model)
    file = path / "config.json"
    try:
        if not path.is_dir():
            if not _meant_as_path(model):
                return None
            if path.exists():
                return f"{model!r} is a file; give the folder that holds the drafter's config.json"
            hint = " ('~' is not expanded here)" if model.startswith("~") else ""
            return f"the folder {model!r} does not exist{hint}"
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            return f"{str(file)!r} is larger than any config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"the folder {model!r} holds no config.json"
    except (OSError, ValueError, RecursionError) as error:
        return f"{str(file)!r} cannot be read as JSON: {_one_line(error)}"
    if not isinstance(config, dict):
        return f"{str(file)!r} holds no JSON object"
    if (other := _something_else(config)) is not None:
        return (
            f"{str(file)!r} is not the config of an EAGLE-3 drafter: {other}; give an EAGLE-3 "
            "drafter, or the 'method' that this one was trained for"
        )
    return None


def nested_aux_layers(config: Any, target_layers: int) -> tuple[int, ...] | None:
    """The layers that ``eagle_config`` inside a drafter's config names, as ids of layer inputs.

    Trainers write two conventions: the output of layer i, and the input of layer i, which is what
    vLLM captures. A list that begins with 1 is of the first kind and is shifted by one, one that
    begins with 2 of the second (https://github.com/sgl-project/sglang/pull/25454); any other list
    is taken as it is.

    Args:
        config: the drafter's Transformers config.
        target_layers: the number of the target's decoder layers.

    Returns:
        The ids, or None where there is no such list of integers.
    """
    nested = getattr(config, "eagle_config", None)
    ids = nested.get(AUX_LAYERS_KEY) if isinstance(nested, Mapping) else None
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        return None
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        return None
    shift = 1 if ids[0] == 1 and max(ids) < target_layers else 0
    return tuple(i + shift for i in ids)


def _meant_as_path(model: str) -> bool:
    """A Hugging Face id is ``name`` or ``owner/name``; what else has a separator is a path."""
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1


def _something_else(config: dict[str, Any]) -> str | None:
    """What the config plainly is instead of an EAGLE-3 drafter's, or None."""
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if any("eagle3" in name.lower() for name in names):
        return None
    for name in names:
        if name.lower().startswith(_OTHER_METHODS) or "mtp" in name.lower():
            return f"its architecture is {name}"
    text = config.get("text_config")
    layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    if isinstance(layers, int) and layers >= _MAX_DRAFTER_LAYERS:
        return f"it has {layers} decoder layers (architectures {names}), a model of its own"
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
