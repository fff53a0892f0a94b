# SPDX-License-Identifier: Apache-2.0
"""Which tensors a checkpoint folder holds, from the headers of its safetensors files.

No weights are read, apart from small integer tensors on request and the comparison of two tensors
byte for byte. Standard library only: the check runs where no torch is, and at vLLM's start before
anything is loaded. The rules of the format are those of the safetensors library 0.8
(https://github.com/huggingface/safetensors, ``safetensors/src/tensor.rs``): what it opens is read
here, and whatever else a file holds comes out as a :class:`CheckpointError`.
"""

from __future__ import annotations

import array
import json
import os
import re
import stat
import sys
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from vllm_kimi_eagle3.checkpoint.errors import CheckpointError, quoted

INDEX_FILE = "model.safetensors.index.json"
_ONE_OF_SEVERAL = re.compile(r"-of-0*(\d+)\.safetensors$")

# Bits per element, from ``Dtype::bitsize`` of the safetensors library.
_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# struct codes of the integer dtypes; the file is little-endian.
_INTEGERS = {
    "BOOL": "B",
    "U8": "B",
    "I8": "b",
    "U16": "H",
    "I16": "h",
    "U32": "I",
    "I32": "i",
    "U64": "Q",
    "I64": "q",
}

# MAX_HEADER_SIZE of the safetensors library. An index is held to it as well: that of a whole
# Kimi-K2.5, with 384 experts in each of 60 layers, has some 20 MB.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_MAX_USIZE = 2**64 - 1

# A d2t of int64 for a vocabulary of 163,840 has 1.3 MB.
_MAX_INTEGER_BYTES = 16 * 1024 * 1024

_CHUNK_BYTES = 1024 * 1024

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in a safetensors header.

    Attributes:
        dtype: as safetensors spells it: ``BF16``, ``F32``, ``I64``, ``BOOL``, ...
        shape: the sizes, outermost first; ``()`` for a scalar.
        file: the file that holds it; None for one that was only described.
        begin: where its first byte is, counted from the start of the file.
        end: one past its last byte.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path | None = None
    begin: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        """How many bytes it takes in the file."""
        return self.end - self.begin


def read_header(path: str | Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file by name, in the order in which the file has their data.

    Raises:
        CheckpointError: the file cannot be read or is no valid safetensors file.
    """
    path = Path(path)
    with _opened(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            header = _header_bytes(path, file, size)
        except OSError as error:
            raise _unreadable(path, error) from None
    return _tensors(path, _parsed(path, header), _LENGTH_BYTES + len(header), size)


def read_tensors(folder: str | Path) -> dict[str, TensorInfo] | None:
    """The tensors of a checkpoint folder by name, or None where it has no safetensors files.

    None stands for a folder of PyTorch ``.bin`` files as well as for one that was not downloaded
    yet: nothing can be said of either. Of several files those count that vLLM's default loader
    would take (:func:`weight_files`).

    Raises:
        CheckpointError: the folder cannot be read, a file in it is broken, the index names files
            or tensors that are not there, or two files hold a tensor of the same name.
    """
    folder = Path(folder)
    files, index = _weight_files(folder)
    if not files:
        return None
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if (other := tensors.get(name)) is not None:
                raise CheckpointError(
                    f"{str(folder)!r}: {quoted(name)} is in both {_file_name(other)!r} and "
                    f"{file.name!r}, and vLLM keeps whichever it reads last; leave one of the files"
                )
            tensors[name] = info
    for name, file_name in index.items():
        if name not in tensors:
            raise CheckpointError(
                f"{str(folder)!r}: the index says that {quoted(name)} is in {file_name!r}, "
                "and no file that it names holds it; get the checkpoint's files again"
            )
    return tensors


def weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files that vLLM's default loader takes from a folder, in its order.

    With ``--load-format auto``: ``consolidated*.safetensors`` where there are any, otherwise
    ``*.safetensors``; with an index only the files that it names (``default_loader.py`` and
    ``filter_duplicate_safetensors_files`` in ``weight_utils.py``, 0.15 to 0.33). An index that
    names a missing file is refused, which older releases let pass in silence.

    Raises:
        CheckpointError: the folder or its index cannot be read, or the index is wrong.
    """
    return _weight_files(Path(folder))[0]


def is_complete(folder: str | Path) -> bool:
    """True if every safetensors file of a checkpoint seems to be in its folder.

    A snapshot in the Hugging Face cache may hold what was downloaded so far: an index without its
    files, or the first of several. Whether the files are whole is not looked at.
    """
    try:
        names = {name for name in os.listdir(folder) if name.endswith(".safetensors")}
    except OSError:
        return False
    if os.path.isfile(Path(folder) / INDEX_FILE):
        try:
            return names >= set(_weight_map(Path(folder) / INDEX_FILE).values())
        except CheckpointError:
            return False
    parts = [match for name in names if (match := _ONE_OF_SEVERAL.search(name))]
    return bool(names) and all(len(parts) == int(match[1]) for match in parts)


def read_integers(info: TensorInfo) -> list[int]:
    """The values of a small integer or boolean tensor, such as ``d2t`` and ``t2d``, flattened.

    Booleans come as 0 and 1.

    Raises:
        CheckpointError: it holds no integers, has more than 16 MiB, or cannot be read.
    """
    code = _INTEGERS.get(info.dtype)
    if code is None:
        raise CheckpointError(f"{_where(info)}: {info.dtype} values where integers are needed")
    if info.nbytes > _MAX_INTEGER_BYTES:
        raise CheckpointError(
            f"{_where(info)}: {info.nbytes} bytes of {info.dtype}, more than any vocabulary mapping"
        )
    with _opened(_file(info)) as file:
        values = array.array(code)
        try:
            file.seek(info.begin)
            values.frombytes(_read(file, info.nbytes))
        except EOFError:
            raise _changed(_file(info)) from None
        except OSError as error:
            raise _unreadable(_file(info), error) from None
    if sys.byteorder == "big":
        values.byteswap()
    if info.dtype == "BOOL":
        return [int(value != 0) for value in values]
    return values.tolist()


def same_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    """True if two tensors have the same dtype, shape and bytes.

    Reads both at most once, 1 MiB at a time, and stops at the first difference. Unlike
    ``torch.equal`` it tells -0.0 from 0.0, and takes a NaN as equal to itself.

    Raises:
        CheckpointError: a file cannot be read, or has become shorter.
    """
    if (a.dtype, a.shape, a.nbytes) != (b.dtype, b.shape, b.nbytes):
        return False
    if (a.file, a.begin) == (b.file, b.begin):
        return True
    buffers = bytearray(_CHUNK_BYTES), bytearray(_CHUNK_BYTES)
    with _opened(_file(a)) as left, _opened(_file(b)) as right:
        for begin in range(0, a.nbytes, _CHUNK_BYTES):
            count = min(a.nbytes - begin, _CHUNK_BYTES)
            for file, info, buffer in zip((left, right), (a, b), buffers, strict=True):
                del buffer[count:]
                try:
                    file.seek(info.begin + begin)
                    _fill(file, buffer)
                except EOFError:
                    raise _changed(_file(info)) from None
                except OSError as error:
                    raise _unreadable(_file(info), error) from None
            if buffers[0] != buffers[1]:
                return False
    return True


# ------------------------------------------------------------------------------------- the folder


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of :func:`weight_files`, and the index's weight map (empty without an index)."""
    try:
        every = [name for name in os.listdir(folder) if not name.startswith(".")]
    except (OSError, ValueError) as error:
        raise _unreadable(folder, error) from None
    names = [name for name in every if name.endswith(".safetensors")]
    index_path = folder / INDEX_FILE
    if consolidated := [name for name in names if name.startswith("consolidated")]:
        names, index_path = consolidated, folder / "consolidated.safetensors.index.json"
    # Without any safetensors file the loader turns to PyTorch's, and looks at no index.
    others = not names and any(name.endswith((".bin", ".pt")) for name in every)
    if others or not os.path.isfile(index_path):
        return [folder / name for name in sorted(names, key=_natural_order)], {}
    index, present = _weight_map(index_path), set(names)
    for name, file_name in index.items():
        if file_name not in present:
            raise CheckpointError(
                f"{str(index_path)!r} says that {quoted(name)} is in {quoted(file_name)}, and "
                "the folder has no such file; download it, or remove the index if it belongs to "
                "other files"
            )
    used = set(index.values())
    return [folder / name for name in sorted(used, key=_natural_order)], index


def _weight_map(path: Path) -> dict[str, str]:
    with _opened(path) as file:
        try:
            text = _read(file, _size_within(path, file, _MAX_HEADER_BYTES))
        except EOFError:
            raise _changed(path) from None
        except OSError as error:
            raise _unreadable(path, error) from None
    weight_map = _parsed(path, text).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{str(path)!r} has no object 'weight_map'; get the file again")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise CheckpointError(
                f"{str(path)!r}, 'weight_map': {quoted(name)} is given no file name; get the file "
                "again"
            )
    return weight_map


def _natural_order(name: str) -> list[str | int]:
    """Sorts shard 2 before shard 10, as ``_natural_sort_key`` of vLLM's ``weight_utils.py``."""
    parts = enumerate(re.split(r"([0-9]+)", name))
    return [int(part) if position % 2 else part for position, part in parts]


# -------------------------------------------------------------------------------------- one header


def _header_bytes(path: Path, file: FileIO, size: int) -> bytearray:
    if size < _LENGTH_BYTES:
        what = "is empty" if size == 0 else f"has {size} bytes"
        _broken(path, f"{what}, no safetensors file")
    try:
        start = _read(file, min(size, len(_LFS_POINTER)))
        if start == _LFS_POINTER:
            raise CheckpointError(
                f"{str(path)!r} is a Git LFS pointer, not the weights; run `git lfs pull` in the "
                "folder, or download it with `hf download`"
            )
        length = int.from_bytes(start[:_LENGTH_BYTES], "little")
        if length > _MAX_HEADER_BYTES:
            _broken(path, f"gives its header {length} bytes, more than any safetensors file")
        if length > size - _LENGTH_BYTES:
            _broken(path, f"ends inside its header: {length} bytes of it in a file of {size}")
        file.seek(_LENGTH_BYTES)
        return _read(file, length)
    except EOFError:
        raise _changed(path) from None


class _Object(dict[str, Any]):
    """A JSON object that knows whether a name was repeated in it."""

    repeated: str | None = None


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                result.repeated = name
                break
            seen.add(name)
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _parsed(path: Path, text: bytearray) -> _Object:
    """The JSON object in ``text``; a repeated name in it is refused, one further inside is not."""
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant
        )
    except RecursionError:
        _broken(path, "holds JSON that is nested too deep")
    except ValueError as error:
        _broken(path, f"holds no valid JSON: {_shortened(' '.join(str(error).split()))}")
    if not isinstance(value, _Object):
        _broken(path, "holds JSON that is no object")
    if value.repeated is not None:
        _broken(path, f"names {quoted(value.repeated)} twice")
    return value


def _tensors(path: Path, header: _Object, data: int, size: int) -> dict[str, TensorInfo]:
    """Checks a header's entries; the rules are ``Metadata::validate`` of the safetensors library.

    Args:
        data: where the tensors' bytes begin in the file.
        size: the file's length in bytes.
    """
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        _broken(path, "has a '__metadata__' that is no object of strings")
    entries = [(*_entry(path, name, value), name) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry[2], entry[3]))
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for dtype, shape, begin, end, name in entries:
        if begin != expected:
            how = "overlap those of another" if begin < expected else "leave a gap before them"
            _broken(path, f"{quoted(name)}: its bytes {begin} to {end} {how}")
        if data + end > size:
            raise CheckpointError(
                f"{str(path)!r} is cut off: {quoted(name)} ends at byte {data + end}, the file at "
                f"{size}; download it again"
            )
        expected = end
        tensors[name] = TensorInfo(dtype, shape, path, data + begin, data + end)
    if data + expected != size:
        _broken(path, f"has {size - data - expected} bytes after its last tensor")
    return tensors


def _entry(path: Path, name: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and data offsets of a header's entry, each checked for itself."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        _broken(path, f"names a tensor {quoted(name)}, which is no text")
    if not isinstance(value, _Object):
        _broken(path, f"{quoted(name)}: its entry is no object")
    if value.repeated is not None:
        _broken(path, f"{quoted(name)}: {quoted(value.repeated)} is given twice")
    dtype, shape, offsets = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        _broken(path, f"{quoted(name)}: dtype {quoted(dtype)} is none that safetensors has")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        _broken(path, f"{quoted(name)}: shape {quoted(shape)} is no list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        _broken(path, f"{quoted(name)}: data_offsets {quoted(offsets)} are no two offsets")
    begin, end = offsets
    count = 1
    for length in shape:
        count *= length
        if count > _MAX_USIZE:
            _broken(path, f"{quoted(name)}: shape {quoted(shape)} overflows")
    if (end - begin) * 8 != (bits := count * _BITS[dtype]):
        _broken(
            path,
            f"{quoted(name)}: {end - begin} bytes, where {dtype} {quoted(shape)} takes "
            f"{-(-bits // 8)}",
        )
    return dtype, tuple(shape), begin, end


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_USIZE


# -------------------------------------------------------------------------------- files, messages


def _opened(path: Path) -> FileIO:
    """Opens a regular file; what else bears the name (a pipe, a folder) could block or fail."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
        file = open(path, "rb", buffering=0) if regular else None  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if file is None:
        raise CheckpointError(f"{str(path)!r} is no file; give the checkpoint's own files there")
    return file


def _size_within(path: Path, file: FileIO, limit: int) -> int:
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        _broken(path, f"has {size} bytes, more than any file of this kind")
    return size


def _read(file: FileIO, count: int) -> bytearray:
    """Exactly ``count`` bytes. Raises EOFError where the file ends before."""
    buffer = bytearray(count)
    _fill(file, buffer)
    return buffer


def _fill(file: FileIO, buffer: bytearray) -> None:
    """Fills ``buffer``. Raises EOFError where the file ends before."""
    done = 0
    with memoryview(buffer) as view:
        while done < len(buffer):
            count = file.readinto(view[done:])
            if not count:
                raise EOFError
            done += count


def _file(info: TensorInfo) -> Path:
    if info.file is None:
        raise CheckpointError(f"a tensor {info.dtype} {list(info.shape)} that is in no file")
    return info.file


def _file_name(info: TensorInfo) -> str:
    return info.file.name if info.file is not None else "?"


def _where(info: TensorInfo) -> str:
    return f"{str(info.file)!r}, bytes {info.begin} to {info.end}"


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


def _broken(path: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{str(path)!r} {what}; download or export it again")


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(f"{str(path)!r} became shorter while it was read; try again")


def _unreadable(path: Path, error: BaseException) -> CheckpointError:
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CheckpointError(f"{str(path)!r} cannot be read: {' '.join(cause.split())}")
