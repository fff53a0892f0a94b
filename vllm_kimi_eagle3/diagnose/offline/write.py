# SPDX-License-Identifier: Apache-2.0
"""A copy of a drafter's folder that the plugin reads in the best way (``--write``).

config.json is written anew. Files that stay as they are get linked; where tensors change, one
safetensors file takes the place of those that there are. The format is simple enough to write here
(https://github.com/huggingface/safetensors): a length, a header in JSON, the bytes of the tensors.
"""

from __future__ import annotations

import array
import json
import shutil
import struct
import sys
from pathlib import Path

from vllm_kimi_eagle3.checkpoint.tensors import TensorInfo, opened, read_integers, weight_files

from .hypotheses import Reading
from .setting import changed_config
from .subject import Subject

_VOCABULARY = ("lm_head.weight", "d2t", "t2d")
_ALIGNMENT = 8
_CHUNK_BYTES = 1 << 22


def write_copy(subject: Subject, best: Reading, destination: Path) -> str:
    """Writes the copy, for a server with the ``--additional-config`` of ``setting.flag``.

    Returns:
        What was done, in words.

    Raises:
        OSError: it cannot be written, or the destination is a folder that holds something.
        CheckpointError: the drafter cannot be read any more.
    """
    if destination.exists() and any(destination.iterdir()):
        raise FileExistsError(f"{destination} is not empty")
    destination.mkdir(parents=True, exist_ok=True)
    weights = weight_files(subject.folder)
    names = {file.name for file in weights.files}
    if weights.index_file is not None:
        names.add(weights.index_file.name)
    dropped, d2t = tensor_changes(subject, best)
    rewrite = bool(dropped) or d2t is not None
    for file in subject.folder.iterdir():
        if file.is_file() and file.name != "config.json" and not (rewrite and file.name in names):
            _link(file, destination / file.name)
    config = changed_config(subject, best)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (destination / "config.json").write_text(text, encoding="utf-8")
    if not rewrite:
        missing = best.rows == "unknown" and best.head == "own"
        return "config.json changed, the weights as they are" + (
            ": the d2t is still missing" if missing else ""
        )
    kept = {name: info for name, info in subject.tensors.items() if name not in dropped}
    _save(destination / "model.safetensors", kept, d2t)
    gone = sorted(name for name in dropped if name != "d2t" or d2t is None)
    said = [f"without {', '.join(gone)}"] if gone else []
    said += ["with a d2t"] if d2t is not None else []
    return f"config.json changed, the weights {' and '.join(said)}"


def tensor_changes(subject: Subject, best: Reading) -> tuple[set[str], list[int] | None]:
    """The names of the tensors that go, and the values of a ``d2t`` that comes, or None."""
    changed = subject.now.changed(best)
    dropped: set[str] = set()
    for name, prefix in (("fc_norm", "fc_norm."), ("norm_before_fc", "input_norm.")):
        if not getattr(best, name):
            dropped |= {tensor for tensor in subject.tensors if tensor.startswith(prefix)}
    if "embedding" in changed and best.embedding == "target":
        dropped.add("embed_tokens.weight")
    if "head" in changed and best.head == "target":
        return dropped | {name for name in _VOCABULARY if name in subject.tensors}, None
    if "rows" in changed and best.rows == "none" and subject.whole_head:
        dropped |= {"d2t", "t2d"} & set(subject.tensors)
    if "rows" not in changed or best.rows not in ("t2d", "ids"):
        return dropped, None
    if best.rows == "t2d":
        marks = read_integers(subject.tensors["t2d"])
        tokens = [token for token, mark in enumerate(marks) if mark]
    else:
        tokens = read_integers(subject.tensors["d2t"])
    dropped |= {"d2t"} & set(subject.tensors)
    return dropped, [token - row for row, token in enumerate(tokens)]


def _save(path: Path, kept: dict[str, TensorInfo], d2t: list[int] | None) -> None:
    """Writes tensors, whose bytes are taken from where they are, and a ``d2t``."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, info in kept.items():
        entry = {"dtype": info.dtype, "shape": list(info.shape)}
        header[name] = {**entry, "data_offsets": [at, at + info.nbytes]}
        at += info.nbytes
    values = array.array("q", d2t or ())
    if d2t is not None:
        if sys.byteorder == "big":
            values.byteswap()
        offsets = [at, at + len(values) * values.itemsize]
        header["d2t"] = {"dtype": "I64", "shape": [len(values)], "data_offsets": offsets}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for info in kept.values():
            assert info.file is not None
            with opened(info.file) as source:
                source.seek(info.begin)
                left = info.nbytes
                while left:
                    part = source.read(min(left, _CHUNK_BYTES))
                    if not part:
                        raise OSError(f"{info.file} became shorter while it was read")
                    file.write(part)
                    left -= len(part)
        file.write(values.tobytes())


def _link(source: Path, destination: Path) -> None:
    """A hard link, or a copy where there can be none. A link in the source is followed."""
    source = source.resolve()
    try:
        destination.hardlink_to(source)
    except OSError:
        shutil.copy(source, destination)
