# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint is on this machine, and whether a drafter's folder can be one at all.

Only what is certain is refused: a folder that is missing or empty, or a config that is plainly that
of something else. Nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import CheckpointError

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
        config = read_config(path)
    except FileNotFoundError:
        return f"the folder {model!r} holds no config.json"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{str(file)!r} cannot be read: {_one_line(error)}"
    if (other := _something_else(config)) is not None:
        return (
            f"{str(file)!r} is not the config of an EAGLE-3 drafter: {other}; give an EAGLE-3 "
            "drafter, or the 'method' that this one was trained for"
        )
    return None


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint folder.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it cannot be read, or is no JSON object.
    """
    file = folder / "config.json"
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise CheckpointError(f"{str(file)!r} is larger than any config.json")
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(file)!r} cannot be read as JSON: {_one_line(error)}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{str(file)!r} holds no JSON object")
    return config


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """The folder of a checkpoint on this machine: its own, or its snapshot in the Hugging Face
    cache. None where it is not here (or not by these ways, such as an object store). No download.
    """
    path = Path(model)
    try:
        if path.is_dir():
            return path
        if "://" in model or _meant_as_path(model):
            return None
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model, "config.json", revision=revision)
    except Exception:  # An id that the library does not take, or a cache that cannot be read.
        return None
    return Path(file).parent if isinstance(file, str) else None


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
