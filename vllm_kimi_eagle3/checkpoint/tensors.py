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
import errno
import math
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from .errors import CheckpointError, quoted
from .json_reader import JsonObject, JsonReader, NotAnObjectError, NotJsonError, TooLargeError

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

# MAX_HEADER_SIZE of the safetensors library.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8

# What is kept of a checkpoint before it is given up on, in bytes as Python objects. Kimi-K2.5 has
# 209,000 tensors (three for each of three projections of 384 experts in 60 layers) in 64 files: 33
# MB for its index, and less than 2 MB for each header. The second bound is for the tensors of a
# whole drafter, which has some twenty, and for what files hold besides the tensors of an index.
_MAX_KEPT = 48 * 1024 * 1024
_MAX_KEPT_BESIDES = 16 * 1024 * 1024
_TENSOR_BYTES, _NAME_BYTES = 400, 40
_MAX_FILES = 10_000
# What is read of a folder's headers, whatever is kept of them: Kimi's, in 64 to 200 files, have
# less than 40 MB together. A file counts for so much at least, since to open it takes time as well.
_MAX_HEADERS_BYTES = 128 * 1024 * 1024
_LEAST_HEADER_BYTES = 64 * 1024
_MAX_SEARCHED = 64 * 1024 * 1024
_MAX_SHAPE = 64

_MAX_USIZE = 2**64 - 1

# A vocabulary mapping; Kimi's vocabulary has 163,840 tokens.
_MAX_INTEGERS = 1024 * 1024

_CHUNK_BYTES = 1024 * 1024

_METADATA = "__metadata__"
# A name in an index, and the file's behind it.
_PLACE = rb'"%s"[ \t\r\n]*:[ \t\r\n]*"([^"\\]{1,255})"'
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True)
class WeightFiles:
    """The safetensors files of a folder that vLLM's default loader takes.

    Attributes:
        folder: where they are.
        files: those that are there, in the loader's order.
        index: for each tensor the name of the file that the index says holds it; empty where there
            is no index.
        index_file: the index; None where there is none.
        missing: names of files that the index gives and the folder does not have.
    """

    folder: Path
    files: tuple[Path, ...]
    index: Mapping[str, str] = field(default_factory=dict)
    index_file: Path | None = None
    missing: tuple[str, ...] = ()


def read_header(path: str | Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file by name, in the order in which the file has their data.

    Raises:
        CheckpointError: the file cannot be read or is no valid safetensors file.
    """
    return _Headers(Path(path).parent).read(Path(path))


def read_tensors(folder: str | Path) -> dict[str, TensorInfo] | None:
    """The tensors of a drafter's folder by name, or None where it has no safetensors files.

    None stands for a folder of PyTorch ``.bin`` files as well as for one that was not downloaded
    yet: nothing can be said of either. Of several files those count that vLLM's default loader
    would take (:func:`weight_files`).

    Raises:
        CheckpointError: the folder cannot be read, a file in it is broken, the index names files
            or tensors that are not there, two files hold a tensor of the same name, or there are
            tens of thousands of tensors.
    """
    weights = weight_files(folder)
    if not weights.files and not weights.missing:
        return None
    tensors: dict[str, TensorInfo] = {}
    kept = _Kept(weights.folder, _MAX_KEPT_BESIDES)
    for _, header in headers(weights):
        for name, info in header.items():
            kept.add(name, _TENSOR_BYTES)
            tensors[name] = info
    return tensors


def headers(weights: WeightFiles) -> Iterator[tuple[Path, dict[str, TensorInfo]]]:
    """Each file of a folder with its tensors, one after the other: none of it is kept.

    Raises:
        CheckpointError: as :func:`read_tensors`; what can be told without the files at once, that
            a tensor of the index is in none of them at the end.
    """
    if weights.missing:
        raise missing_shard(weights)
    # What the index says of a tensor, and once it was met the file that holds it.
    place: dict[str, str | Path] = dict(weights.index)
    kept = _Kept(weights.folder, None if weights.index_file is None else _MAX_KEPT_BESIDES)
    reader = _Headers(weights.folder)
    for file in weights.files:
        header = reader.read(file)
        for name in header:
            other = place.get(name)
            if other is None:
                kept.add(name)
            elif isinstance(other, Path):
                raise CheckpointError(
                    "files-duplicate-tensor",
                    f"{str(weights.folder)!r}: {quoted(name)} is in both {other.name!r} and "
                    f"{file.name!r}, and vLLM keeps whichever it reads last",
                    "leave one of the files",
                    file=file,
                    key=name,
                )
            place[name] = file
        yield file, header
    for name, held in place.items():
        if isinstance(held, str):
            raise CheckpointError(
                "files-missing-tensor",
                f"{str(weights.folder)!r}: the index says that {quoted(name)} is in {held!r}, and "
                "no file that it names holds it",
                "get the checkpoint's files again",
                file=weights.index_file,
                key=name,
                value=held,
            )


def find_tensors(folder: str | Path, *names: str) -> dict[str, TensorInfo]:
    """Those of the named tensors that a checkpoint folder has. Only the files are opened that an
    index gives for them, where there is one.

    Raises:
        CheckpointError: the folder, its index or one of these files cannot be read.
    """
    folder = Path(folder)
    present, index_file = _present(folder)
    files = sorted(present) if index_file is None else _files_of(index_file, names)
    found: dict[str, TensorInfo] = {}
    reader = _Headers(folder)
    for file in files:
        if file in present:
            header = reader.read(folder / file)
            held = {name: header[name] for name in names if name in header}
            twice = not found.keys().isdisjoint(held)
            found.update(held)
            if twice:  # Which of them counts is open: :func:`headers` refuses such a folder.
                break
    return found


def weight_files(folder: str | Path) -> WeightFiles:
    """The safetensors files that vLLM's default loader takes from a folder, in its order.

    With ``--load-format auto``: ``consolidated*.safetensors`` where there are any, otherwise
    ``*.safetensors``; with an index only the files that it names (``default_loader.py`` and
    ``filter_duplicate_safetensors_files`` in ``weight_utils.py``, 0.15 to 0.33).

    Raises:
        CheckpointError: the folder or its index cannot be read.
    """
    folder = Path(folder)
    names, index_file = _present(folder)
    if index_file is None:
        return WeightFiles(folder, tuple(folder / n for n in sorted(names, key=_natural_order)))
    index, present = _weight_map(index_file), set(names)
    used = sorted(set(index.values()), key=_natural_order)
    return WeightFiles(
        folder,
        tuple(folder / name for name in used if name in present),
        index,
        index_file,
        tuple(name for name in used if name not in present),
    )


def missing_shard(weights: WeightFiles) -> CheckpointError:
    """The error for files that the index names and the folder has not."""
    first = weights.missing[0]
    name = next(name for name, file in weights.index.items() if file == first)
    others = len(weights.missing) - 1
    return CheckpointError(
        "files-missing-shard",
        f"{str(weights.index_file)!r} says that {quoted(name)} is in {quoted(first)}, and the "
        f"folder has no such file{f', nor {others} others that it names' if others else ''}",
        "download what is missing, or remove the index if it belongs to other files",
        file=weights.index_file,
        key=name,
        value=first,
    )


def is_complete(folder: str | Path) -> bool:
    """True if every safetensors file of a checkpoint seems to be in its folder.

    A snapshot in the Hugging Face cache may hold what was downloaded so far: an index without its
    files, or the first of several. Whether the files are whole is not looked at.
    """
    try:
        return seems_complete(weight_files(folder))
    except CheckpointError:
        return False


def seems_complete(weights: WeightFiles) -> bool:
    """The same, of files that were looked for already."""
    names = [file.name for file in weights.files]
    parts = [match for name in names if (match := _ONE_OF_SEVERAL.search(name))]
    whole = weights.index_file is not None or all(len(parts) == int(match[1]) for match in parts)
    return bool(names) and not weights.missing and whole


def read_integers(info: TensorInfo) -> list[int]:
    """The values of a small integer or boolean tensor, such as ``d2t`` and ``t2d``, flattened.

    Booleans come as 0 and 1.

    Raises:
        CheckpointError: it holds no integers, has more than a million, or cannot be read.
    """
    code = _INTEGERS.get(info.dtype)
    if code is None:
        raise CheckpointError(
            "files-not-integers",
            f"{_where(info)}: {info.dtype} values where integers are needed",
            "export the checkpoint again",
            file=info.file,
            value=info.dtype,
        )
    if math.prod(info.shape) > _MAX_INTEGERS:
        raise CheckpointError(
            "files-too-large",
            f"{_where(info)}: {math.prod(info.shape)} integers, more than any vocabulary mapping",
            "export the checkpoint again",
            file=info.file,
        )
    with opened(_file(info)) as file:
        values = array.array(code)
        with reading(_file(info)):
            file.seek(info.begin)
            values.frombytes(_read(file, info.nbytes))
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
    with opened(_file(a)) as left, opened(_file(b)) as right:
        for begin in range(0, a.nbytes, _CHUNK_BYTES):
            count = min(a.nbytes - begin, _CHUNK_BYTES)
            for file, info, buffer in zip((left, right), (a, b), buffers, strict=True):
                del buffer[count:]
                with reading(_file(info)):
                    file.seek(info.begin + begin)
                    _fill(file, buffer)
            if buffers[0] != buffers[1]:
                return False
    return True


class _Kept:
    """What is kept of a file or a folder so far."""

    def __init__(self, path: Path, at_most: int | None = None) -> None:
        self._path, self._count = path, 0
        self._left = _MAX_KEPT if at_most is None else at_most

    def add(self, name: str, more: int = 0) -> None:
        """Raises CheckpointError where ``name``, with ``more`` bytes, is too much."""
        self._left -= sys.getsizeof(name) + _NAME_BYTES + more
        if self._left < 0:
            raise _too_large(self._path, f"holds more than {self._count} names")
        self._count += 1


class _Headers:
    """Reads the headers of a folder's files, up to a bound on all of them together."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._left = folder, _MAX_HEADERS_BYTES
        self._count = self._bytes = 0

    def read(self, path: Path) -> dict[str, TensorInfo]:
        """As :func:`read_header`. Raises CheckpointError where it has become too much."""
        with opened(path) as file, reading(path):
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file, size)
            self._left -= max(length, _LEAST_HEADER_BYTES)
            if self._left < 0:
                what = f"holds more than {self._count} files, with {self._bytes} bytes of headers"
                raise _too_large(self._folder, what)
            self._count += 1
            self._bytes += length
            return _tensors(path, JsonReader(file, length), _LENGTH_BYTES + length, size)


# ------------------------------------------------------------------------------------- the folder


def _names(folder: Path) -> tuple[list[str], bool]:
    """The names of a folder's safetensors files, and whether it holds PyTorch's."""
    names: list[str] = []
    others = False
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                others = others or entry.name.endswith((".bin", ".pt"))
                if entry.name.endswith(".safetensors"):
                    names.append(entry.name)
                    if len(names) > _MAX_FILES:
                        raise _too_large(folder, f"holds more than {_MAX_FILES} files")
    except (OSError, ValueError) as error:
        raise error if isinstance(error, CheckpointError) else unreadable(folder, error) from None
    return names, others


def _present(folder: Path) -> tuple[list[str], Path | None]:
    """The names of the files that the loader chooses from, and the index that it goes by."""
    names, others = _names(folder)
    index_file = folder / INDEX_FILE
    if consolidated := [name for name in names if name.startswith("consolidated")]:
        names, index_file = consolidated, folder / "consolidated.safetensors.index.json"
    # Without any safetensors file the loader turns to PyTorch's, and looks at no index.
    by_index = os.path.isfile(index_file) and (names or not others)
    return names, index_file if by_index else None


def _files_of(index_file: Path, names: tuple[str, ...]) -> list[str]:
    """The files that an index gives for some tensors. Its text is searched and not parsed, which
    takes a thirtieth of the time; whoever asks finds in the file whether the tensor is there."""
    with opened(index_file) as file, reading(index_file):
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_SEARCHED:
            raise TooLargeError(f"has {size} bytes")
        text = _read(file, size)
    places = (re.search(_PLACE % re.escape(name).encode(), text) for name in names)
    return sorted({place[1].decode("utf-8", "replace") for place in places if place is not None})


def _weight_map(path: Path) -> dict[str, str]:
    with opened(path) as file, reading(path):
        reader = JsonReader(file, os.fstat(file.fileno()).st_size)
        found: dict[str, str] | None = None
        for name in reader.members():
            if name != "weight_map":
                reader.value()
            elif found is not None:
                _bad_index(path, "names 'weight_map' twice")
            else:
                found = _file_of_each(path, reader)
        reader.end()
    if found is None:
        _bad_index(path, "has no object 'weight_map'")
    return found


def _file_of_each(path: Path, reader: JsonReader) -> dict[str, str]:
    index: dict[str, str] = {}
    files: dict[str, str] = {}
    kept = _Kept(path)
    try:
        for name, file in reader.items():
            if not isinstance(file, str):
                _bad_index(path, f"'weight_map': {quoted(name)} is given no file name", name, file)
            if name in index:
                _bad_index(path, f"'weight_map': {quoted(name)} is named twice", name)
            kept.add(name)
            if file not in files:
                kept.add(file)
            index[name] = files.setdefault(file, file)
    except NotAnObjectError:
        _bad_index(path, "has no object 'weight_map'")
    return index


def _natural_order(name: str) -> list[str | int]:
    """Sorts shard 2 before shard 10, as ``_natural_sort_key`` of vLLM's ``weight_utils.py``; of
    numbers that no shard has 18 digits at a time, which ``int`` takes."""
    parts = enumerate(re.split(r"([0-9]{1,18})", name))
    return [int(part) if position % 2 else part for position, part in parts]


# -------------------------------------------------------------------------------------- one header


def _header_length(path: Path, file: FileIO, size: int) -> int:
    """How long the header is. The file stands at its begin afterwards."""
    if size < _LENGTH_BYTES:
        what = "is empty" if size == 0 else f"has {size} bytes"
        raise CheckpointError(
            "files-truncated", f"{str(path)!r} {what}, no safetensors file", _AGAIN, file=path
        )
    start = _read(file, min(size, len(_LFS_POINTER)))
    if start == _LFS_POINTER:
        raise CheckpointError(
            "files-lfs-pointer",
            f"{str(path)!r} is a Git LFS pointer, not the weights",
            "run `git lfs pull` in the folder, or download it with `hf download`",
            file=path,
        )
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if length > _MAX_HEADER_BYTES:
        _broken(path, f"gives its header {length} bytes, more than any safetensors file")
    if length > size - _LENGTH_BYTES:
        raise CheckpointError(
            "files-truncated",
            f"{str(path)!r} ends inside its header: {length} bytes of it in a file of {size}",
            _AGAIN,
            file=path,
        )
    file.seek(_LENGTH_BYTES)
    return length


def _tensors(path: Path, reader: JsonReader, data: int, size: int) -> dict[str, TensorInfo]:
    """Checks a header's entries; the rules are ``Metadata::validate`` of the safetensors library.

    Args:
        data: where the tensors' bytes begin in the file.
        size: the file's length in bytes.
    """
    tensors: dict[str, TensorInfo] = {}
    kept = _Kept(path)
    metadata = False
    for name, value in reader.items():
        if name in tensors or (metadata and name == _METADATA):
            _broken(path, f"names {quoted(name)} twice", name)
        if name == _METADATA:
            metadata = True
            if value is not None and not _is_metadata(value):
                _broken(path, f"has a {_METADATA!r} that is no object of strings", name)
            continue
        kept.add(name, _TENSOR_BYTES)
        tensors[name] = _entry(path, name, value, data)
    reader.end()
    ordered = sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))
    expected = data
    for name, info in ordered:
        if info.begin != expected:
            how = "overlap those of another" if info.begin < expected else "leave a gap before them"
            at = f"{info.begin - data} to {info.end - data}"
            _broken(path, f"says of {quoted(name)}: its bytes {at} {how}", name)
        if info.end > size:
            raise CheckpointError(
                "files-truncated",
                f"{str(path)!r} is cut off: {quoted(name)} ends at byte {info.end}, the file at "
                f"{size}",
                "download it again",
                file=path,
                key=name,
            )
        expected = info.end
    if expected != size:
        _broken(path, f"has {size - expected} bytes after its last tensor")
    return dict(ordered)


def _is_metadata(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _entry(path: Path, name: str, value: Any, data: int) -> TensorInfo:
    """A header's entry, checked for itself."""
    if not name.isascii():
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            _broken(path, f"names a tensor {quoted(name)}, which is no text", name)
    if not isinstance(value, JsonObject):
        _broken(path, f"says of {quoted(name)}: its entry is no object", name)
    if value.repeated is not None:
        _broken(path, f"says of {quoted(name)}: {quoted(value.repeated)} is given twice", name)
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        _broken(
            path,
            f"says of {quoted(name)}: dtype {quoted(dtype)} is none that safetensors has",
            name,
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        _broken(
            path, f"says of {quoted(name)}: data_offsets {quoted(offsets)} are no two offsets", name
        )
    if not isinstance(shape, list):
        _broken(path, f"says of {quoted(name)}: shape {quoted(shape)} is no list of sizes", name)
    if len(shape) > _MAX_SHAPE:
        raise _too_large(path, f"gives {quoted(name)} {len(shape)} dimensions")
    count = 1
    for length in shape:
        if not _is_size(length):
            _broken(
                path, f"says of {quoted(name)}: shape {quoted(shape)} is no list of sizes", name
            )
        count *= length
        if count > _MAX_USIZE:
            _broken(path, f"says of {quoted(name)}: shape {quoted(shape)} overflows", name)
    begin, end = offsets
    if (end - begin) * 8 != (bits := count * _BITS[dtype]):
        _broken(
            path,
            f"says of {quoted(name)}: {end - begin} bytes, where {dtype} {quoted(shape)} takes "
            f"{-(-bits // 8)}",
            name,
        )
    return TensorInfo(sys.intern(dtype), tuple(shape), path, data + begin, data + end)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_USIZE


# -------------------------------------------------------------------------------- files, messages


def opened(path: Path) -> FileIO:
    """Opens a regular file; what else bears the name (a pipe, a folder) could block or fail."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
        file = open(path, "rb", buffering=0) if regular else None  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if file is None:
        raise CheckpointError(
            "files-unreadable",
            f"{str(path)!r} is no file",
            "put the checkpoint's own file there",
            file=path,
        )
    return file


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong while a file is read, as an error that names the file."""
    try:
        yield
    except NotJsonError as error:
        raise CheckpointError(
            "files-not-json", f"{str(path)!r} {error}", "repair it, or get it again", file=path
        ) from None
    except TooLargeError as error:
        raise _too_large(path, str(error)) from None
    except EOFError:
        raise CheckpointError(
            "files-unreadable",
            f"{str(path)!r} became shorter while it was read",
            "try again",
            file=path,
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None


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
        raise CheckpointError(
            "files-unreadable", f"a tensor {info.dtype} {list(info.shape)} that is in no file"
        )
    return info.file


def _where(info: TensorInfo) -> str:
    return f"{str(info.file)!r}, bytes {info.begin} to {info.end}"


_AGAIN = "download or export it again"


def _broken(path: Path, what: str, key: str | None = None) -> NoReturn:
    raise CheckpointError(
        "files-broken-header", f"{str(path)!r} {what}", _AGAIN, file=path, key=key
    )


def _bad_index(path: Path, what: str, key: str | None = None, value: Any = None) -> NoReturn:
    raise CheckpointError(
        "files-broken-index",
        f"{str(path)!r} {what}",
        "get the file again",
        file=path,
        key=key,
        value=value,
    )


def _too_large(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        "files-too-large",
        f"{str(path)!r} {what}, more than any checkpoint that is known, and was not read",
        "look whether it is the file that you mean",
        file=path,
    )


def unreadable(path: Path, error: BaseException) -> CheckpointError:
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    number = getattr(error, "errno", None)
    fix = "look at the disk, the mount and the path"
    if number == errno.ELOOP:
        cause, fix = "the link leads back to itself", "put the file in its place"
    elif number == errno.ENOENT and os.path.islink(path):
        cause = "it is a link that leads nowhere"
        fix = "copy the folder with its links followed (`cp -rL`), or download it again"
    elif number in (errno.EACCES, errno.EPERM):
        fix = "let the user that vLLM runs as read it"
    elif number == errno.ENOENT:
        fix = "download it, or give the right path"
    return CheckpointError(
        "files-unreadable",
        f"{str(path)!r} cannot be read: {' '.join(cause.split())}",
        fix,
        file=path,
    )
