# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint is on this machine, and whether a drafter's folder can be one at all.

Only what is certain is refused: a folder that is missing or empty, or a config that is plainly that
of something else. Nothing is downloaded, and the Hugging Face cache is read by its layout: the
library need not be there, and takes longer to import than the whole check.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError, quoted
from .json_reader import JsonObject, TooLargeError, parsed
from .tensors import opened, reading, unreadable

# More than any real config.json, with a pattern for each of Kimi's modules in it; a larger file is
# a mistake and is not read.
_MAX_CONFIG_BYTES = 8 * 1024 * 1024

# ``validate_repo_id`` of huggingface_hub 0.36 to 2.4, without its rules on double signs.
_REPOSITORY = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)

# A repository's page on Hugging Face, with what may stand behind its name.
_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]{1,96}/[\w.-]{1,96})(?:[/?#].*)?",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
_MAX_SNAPSHOTS = 100

# A commit's hash in a file of the cache has 40 characters.
_MAX_REF_BYTES = 256

# Other speculative methods, by their architectures' names in lower case.
_OTHER_METHODS = ("medusa", "mlpspeculator", "mtp", "dflash", "eaglellama", "eagledeepseek")

# Published EAGLE-3 drafters have one decoder layer, a few have two or three; a model that was
# named by mistake has dozens.
_MAX_DRAFTER_LAYERS = 8


def drafter_problem(model: str) -> CheckpointError | None:
    """What is wrong with ``model`` as an EAGLE-3 drafter, or None.

    ``model`` is what the user gave as ``"model"`` in ``--speculative-config``. Only a folder is
    judged, and the address of a page: of a Hugging Face id, a GGUF file or an object store's URL
    nothing is said (None).
    Never raises.
    """
    if model.endswith(".gguf"):
        return None
    path = Path(model)
    try:
        if (problem := folder_problem(model)) is not None or not path.is_dir():
            return problem
        config = read_config(path)
    except FileNotFoundError:
        return no_config(path, "drafter")
    except CheckpointError as error:
        return error
    except OSError as error:
        return unreadable(path, error)
    if (other := _something_else(config)) is not None:
        return CheckpointError(
            "files-not-a-drafter",
            f"{str(path / 'config.json')!r} is not the config of an EAGLE-3 drafter: {other}",
            "give an EAGLE-3 drafter, or the 'method' that this one was trained for",
            file=path / "config.json",
            key="architectures",
            value=config.get("architectures"),
        )
    return None


def folder_problem(model: str) -> CheckpointError | None:
    """Why what was meant as a folder is none; None where it is one, or was not meant as one."""
    if os.path.isdir(model):
        return None
    if (page := _PAGE.fullmatch(model)) is not None:
        return CheckpointError(
            "files-no-folder",
            f"{quoted(model)} is the address of a page, and vLLM takes a folder or the name of a "
            "repository",
            f"give {page[1]}",
            file=model,
        )
    if "://" in model or not _meant_as_path(model):
        return None
    if os.path.exists(model):
        return CheckpointError(
            "files-no-folder",
            f"{model!r} is a file",
            "give the folder that holds its config.json",
            file=model,
        )
    hint = " ('~' is not expanded here)" if model.startswith("~") else ""
    return CheckpointError(
        "files-no-folder",
        f"the folder {model!r} does not exist{hint}",
        "give the path that it has in the environment that vLLM starts in",
        file=model,
    )


def no_config(folder: Path, whose: str) -> CheckpointError:
    """The error for a folder without a config.json.

    Args:
        whose: ``target`` or ``drafter``.
    """
    fact = f"the folder {str(folder)!r} holds no config.json"
    fix = f"give the folder that holds the {whose}'s config.json"
    name = folder.name.removeprefix("models--").replace("--", "/")
    if folder.name.startswith("models--") and (inside := _snapshot_in(folder)) is not None:
        fact += ": it is a model's place in a Hugging Face cache, whose files are in snapshots"
        fix = f"give {str(inside)!r}"
        fix += f", or {name}" if _REPOSITORY.fullmatch(name) else ""
    return CheckpointError("files-no-config", fact, fix, file=folder / "config.json")


def read_config(folder: Path) -> JsonObject:
    """The config.json of a checkpoint folder.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it cannot be read, or is no JSON object.
    """
    return read_json(folder / "config.json")


def read_json(file: Path) -> JsonObject:
    """The object in a small JSON file.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it cannot be read, is no JSON object, or is larger than any config.
    """
    if not os.path.lexists(file):
        raise FileNotFoundError(file)
    with opened(file) as opened_file, reading(file):
        size = os.fstat(opened_file.fileno()).st_size
        if size > _MAX_CONFIG_BYTES:
            raise TooLargeError(f"has {size} bytes")
        return parsed(opened_file.read(size))


def local_folder(
    model: str, revision: str | None = None, environ: Mapping[str, str] = os.environ
) -> Path | None:
    """The folder of a checkpoint on this machine: its own, or its snapshot in the Hugging Face
    cache. None where it is not here (or not by these ways, such as an object store). No download.
    """
    try:
        if (path := Path(model)).is_dir():
            return path
        if _meant_as_path(model) or not _REPOSITORY.fullmatch(model):
            return None
        folder = snapshot(cache_folder(environ), model, revision)
    except (OSError, ValueError):  # A cache that cannot be read, or a null byte in a name.
        return None
    return folder if folder is not None and (folder / "config.json").is_file() else None


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where Hugging Face keeps what was downloaded, as ``huggingface_hub.constants`` finds it."""
    caches = environ.get("XDG_CACHE_HOME", os.path.join("~", ".cache"))
    home = environ.get("HF_HOME", os.path.join(caches, "huggingface"))
    hub = environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    hub = environ.get("HF_HUB_CACHE", hub)
    return Path(os.path.expandvars(os.path.expanduser(hub)))


def snapshot(cache: Path, model: str, revision: str | None = None) -> Path | None:
    """The folder of a model's revision in a Hugging Face cache, as ``try_to_load_from_cache`` of
    huggingface_hub 0.36 to 2.4 finds it; None if it is not there.

    Raises:
        OSError: the cache cannot be read.
    """
    return _revision_in(cache / f"models--{model.replace('/', '--')}", revision or "main")


def _revision_in(repository: Path, revision: str) -> Path | None:
    ref = repository / "refs" / revision
    if ref.is_file():
        with open(ref, "rb") as file:
            revision = file.read(_MAX_REF_BYTES).decode("utf-8", "replace")
    if not revision or "/" in revision or revision in (".", ".."):
        return None
    folder = repository / "snapshots" / revision
    return folder if folder.is_dir() else None


def _snapshot_in(repository: Path) -> Path | None:
    """The snapshot of a model's place in a Hugging Face cache: that of main, or the first one."""
    try:
        if (main := _revision_in(repository, "main")) is not None:
            return main
        with os.scandir(repository / "snapshots") as entries:
            found = sorted(
                entry.path for entry, _ in zip(entries, range(_MAX_SNAPSHOTS), strict=False)
            )
    except (OSError, ValueError):
        return None
    return next((path for name in found if (path := Path(name)).is_dir()), None)


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
            return f"its architecture is {quoted(name)}"
    text = config.get("text_config")
    layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    if isinstance(layers, int) and layers >= _MAX_DRAFTER_LAYERS:
        return f"it has {layers} decoder layers (architectures {quoted(names)}), a model of its own"
    return None
