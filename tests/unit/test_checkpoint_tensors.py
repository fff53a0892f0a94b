# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_kimi_eagle3.checkpoint import tensors as module
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.checkpoint.tensors import (
    INDEX_FILE,
    TensorInfo,
    find_tensors,
    headers,
    is_complete,
    read_header,
    read_integers,
    read_tensors,
    same_bytes,
    weight_files,
)

ASSETS = Path(__file__).resolve().parent.parent / "assets"

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def entry(dtype: str, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def encoded(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


TWO = {"a": entry("F32", [2], 0, 8), "b": entry("I64", [1, 2], 8, 24)}
VALID = encoded({"__metadata__": {"format": "pt"}, **TWO}, bytes(range(24)))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def refused(path: Path) -> str:
    """The message with which a file is refused: one line that names the file."""
    with pytest.raises(CheckpointError) as error:
        read_header(path)
    message = str(error.value)
    assert path.name in message
    assert "\n" not in message
    assert len(message) < 700
    message.encode()
    return message


def library_opens(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except Exception:
        return False
    return True


# ------------------------------------------------------------------------------------- valid files


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(
            st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5), max_size=4).map(tuple)
        ),
        max_size=6,
    ),
    st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2),
)
@settings(max_examples=200)
def test_what_the_library_writes_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    described: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: dict[str, str] | None,
) -> None:
    path = tmp_path_factory.mktemp("valid") / "model.safetensors"
    written = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in described.items()}
    # Of no tensors and empty metadata the library 0.8 makes a file that it cannot open itself.
    save_file(written, path, metadata=metadata or None)
    read = read_header(path)
    assert {name: (info.dtype, info.shape, info.nbytes) for name, info in read.items()} == {
        name: (DTYPES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for name, tensor in written.items()
    }
    assert all(info.file == path and info.end <= path.stat().st_size for info in read.values())


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.lists(st.booleans(), max_size=9))
@settings(max_examples=50)
def test_integers_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], mask: list[bool]
) -> None:
    path = tmp_path_factory.mktemp("integers") / "model.safetensors"
    d2t = torch.tensor(ids, dtype=torch.int64)
    save_file({"x": torch.ones(3), "d2t": d2t, "t2d": torch.tensor(mask, dtype=torch.bool)}, path)
    read = read_header(path)
    assert read_integers(read["d2t"]) == ids
    assert read_integers(read["t2d"]) == [int(value) for value in mask]


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
)
def test_every_integer_dtype_is_read(tmp_path: Path, dtype: str) -> None:
    values = [0, 1] if dtype == "bool" else [0, 1, 100]
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.tensor(values, dtype=getattr(torch, dtype))}, path)
    assert read_integers(read_header(path)["x"]) == values


def test_the_committed_drafters_are_read_as_the_library_reads_them() -> None:
    for folder in ASSETS.glob("eagle3-*"):
        read = read_tensors(folder)
        assert read is not None
        with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
            assert {name: (info.dtype, list(info.shape)) for name, info in read.items()} == {
                name: (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape())
                for name in file.keys()  # noqa: SIM118
            }
            for name in read.keys() & {"d2t", "t2d"}:
                assert read_integers(read[name]) == file.get_tensor(name).to(torch.int64).tolist()


def test_a_file_without_tensors_padding_and_odd_orders_are_valid(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content in (
        encoded(b"{}"),
        encoded(b'{"__metadata__":null}'),
        encoded(b"{}" + 10 * b" "),
        encoded({"b": entry("U8", [1], 1, 2), "a": entry("U8", [1], 0, 1)}, b"xy"),
        encoded({"a": entry("U8", [0], 0, 0), "b": entry("U8", [], 0, 1)}, b"x"),
        encoded({"a": {**entry("U8", [1], 0, 1), "later": [{}]}}, b"x"),
        encoded({"a": entry("F4", [2, 2], 0, 2), "b": entry("F6_E2M3", [4], 2, 5)}, bytes(5)),
    ):
        assert library_opens(content)
        read_header(write(path, content))


# ------------------------------------------------------------------------------------ broken files

HUGE = 2**70
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "shorter than a length": (b"\x05\x00", "2 bytes"),
    "a length and nothing more": (struct.pack("<Q", 2), "ends inside its header"),
    "a length beyond the file": (struct.pack("<Q", 5000) + b"{}", "ends inside its header"),
    "a length beyond the limit": (struct.pack("<Q", 2**63) + b"{}", "more than any"),
    "no header": (encoded(b""), "no valid JSON"),
    "text": (encoded(b"hello"), "no valid JSON"),
    "not UTF-8": (encoded(b'{"\xff": 1}'), "no valid JSON"),
    "a byte order mark": (encoded(b"\xef\xbb\xbf{}"), "no valid JSON"),
    "NaN": (encoded(b'{"__metadata__": NaN}'), "no valid JSON"),
    "a number of 5000 digits": (encoded(b'{"a": ' + b"9" * 5000 + b"}"), ""),
    "nested too deep": (encoded(b'{"a":' + b"[" * 200_000), "nested too deep"),
    "an object nested too deep": (encoded(b'{"a":' * 200_000), "nested too deep"),
    "a list": (encoded(b"[]"), "no object"),
    "a name given twice": (
        encoded(b'{"a": %s, "a": %s}' % ((json.dumps(entry("U8", [1], 0, 1)).encode(),) * 2), b"x"),
        "'a' twice",
    ),
    "a key given twice": (
        encoded(
            b'{"a": {"dtype": "U8", "dtype": "U8", "shape": [], "data_offsets": [0, 1]}}', b"x"
        ),
        "'dtype' is given twice",
    ),
    "half a surrogate": (encoded(b'{"\\ud800": 1}'), "no text"),
    "metadata that is no object": (encoded({"__metadata__": []}), "__metadata__"),
    "metadata of numbers": (encoded({"__metadata__": {"a": 1}}), "__metadata__"),
    "an entry that is no object": (encoded({"a": 3}), "no object"),
    "an entry without keys": (encoded({"a": {}}), "dtype"),
    "an unknown dtype": (encoded({"a": entry("F31", [1], 0, 4)}, bytes(4)), "'F31'"),
    "a dtype that is a list": (encoded({"a": entry([], [1], 0, 4)}, bytes(4)), "dtype"),  # type: ignore[arg-type]
    "a shape that is no list": (encoded({"a": entry("U8", 1, 0, 1)}, b"x"), "shape"),
    "a shape of lists": (encoded({"a": entry("U8", [[1]], 0, 1)}, b"x"), "shape"),
    "a negative size": (encoded({"a": entry("U8", [-1], 0, 1)}, b"x"), "shape"),
    "a size of true": (encoded({"a": entry("U8", [True], 0, 1)}, b"x"), "shape"),
    "a size of 1.0": (encoded({"a": entry("U8", [1.0], 0, 1)}, b"x"), "shape"),
    "a huge size": (encoded({"a": entry("U8", [HUGE], 0, 1)}, b"x"), "shape"),
    "sizes that overflow": (encoded({"a": entry("U8", [2**40, 2**40, 0], 0, 0)}), "overflows"),
    "one offset": (
        encoded({"a": {**entry("U8", [1], 0, 1), "data_offsets": [0]}}, b"x"),
        "offsets",
    ),
    "a negative offset": (encoded({"a": entry("U8", [1], -1, 0)}, b"x"), "offsets"),
    "an offset of false": (encoded({"a": entry("U8", [1], False, 1)}, b"x"), "offsets"),
    "a huge offset": (encoded({"a": entry("U8", [1], 0, HUGE)}, b"x"), "offsets"),
    "an end before its begin": (encoded({"a": entry("U8", [1], 1, 0)}, b"x"), "takes 1"),
    "too few bytes": (encoded({"a": entry("F32", [2], 0, 7)}, bytes(7)), "takes 8"),
    "half a byte": (encoded({"a": entry("F4", [3], 0, 2)}, bytes(2)), "2 bytes"),
    "overlapping tensors": (
        encoded({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, bytes(3)),
        "overlap",
    ),
    "a gap": (
        encoded({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, bytes(3)),
        "gap",
    ),
    "a gap at the start": (encoded({"a": entry("U8", [1], 1, 2)}, bytes(2)), "gap"),
    "bytes at the end": (encoded(TWO, bytes(25)), "after its last tensor"),
    "a file cut off": (VALID[:-1], "is cut off"),
    "a Git LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "git lfs pull",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_cause(tmp_path: Path, name: str) -> None:
    content, cause = BROKEN[name]
    message = refused(write(tmp_path / "model.safetensors", content))
    assert cause in message
    assert not library_opens(content) or "given twice" in cause or "twice" in cause


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "absent.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    assert "no file" in refused(tmp_path / "folder.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "no file" in refused(tmp_path / "pipe.safetensors")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    assert "leads back to itself" in refused(tmp_path / "loop.safetensors")
    (tmp_path / "dangling.safetensors").symlink_to("../blobs/0123")
    assert "`cp -rL`" in refused(tmp_path / "dangling.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header("a\0b.safetensors")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", VALID)
    path.chmod(0)
    assert "Permission denied" in refused(path)


def read_or_refused(path: Path) -> bool:
    """True if the file or folder is read; nothing but a CheckpointError comes out otherwise."""
    refusal = ""
    try:
        read_tensors(path) if path.is_dir() else read_header(path)
    except CheckpointError as error:
        refusal = str(error)
    assert "\n" not in refusal
    return not refusal


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_arbitrary_bytes_are_read_as_the_library_reads_them(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = write(tmp_path_factory.mktemp("bytes") / "x.safetensors", content)
    assert read_or_refused(path) == library_opens(content)


@given(
    st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(VALID)) | st.none(),
    st.binary(max_size=3),
)
@settings(max_examples=600)
def test_a_valid_file_with_bytes_changed_or_cut_off(
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[int, int]],
    cut: int | None,
    added: bytes,
) -> None:
    content = bytearray(VALID)
    for position, value in changes:
        content[position] = value
    changed = bytes(content[:cut]) + added
    path = write(tmp_path_factory.mktemp("changed") / "x.safetensors", changed)
    if library_opens(changed):
        # A change can make two names equal, which the library lets pass.
        assert read_or_refused(path) or "twice" in refused(path)
    else:
        read_or_refused(path)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 9)
    | st.floats()
    | st.sampled_from(["F32", "U8", "BOOL", "F4"])
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "a"]), inner
        )
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        JSON_VALUES
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["U8", "F32", "F4"]) | JSON_VALUES,
                "shape": st.lists(st.integers(-1, 3), max_size=2) | JSON_VALUES,
                "data_offsets": st.tuples(st.integers(-1, 9), st.integers(-1, 9)) | JSON_VALUES,
            }
        ),
    ),
    st.binary(max_size=12),
)
@settings(max_examples=600)
def test_any_json_is_accepted_if_and_only_if_the_library_accepts_it(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], data: bytes
) -> None:
    content = encoded(header, data)
    path = write(tmp_path_factory.mktemp("json") / "x.safetensors", content)
    assert read_or_refused(path) == library_opens(content)


# ------------------------------------------------------------------------------------- the folder


def save(folder: Path, file: str, *names: str) -> None:
    save_file({name: torch.zeros(2) for name in names}, folder / file)


def index(folder: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def folder_refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_tensors(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_shards_with_an_index(tmp_path: Path) -> None:
    save(tmp_path, "model-00001-of-00002.safetensors", "a")
    save(tmp_path, "model-00002-of-00002.safetensors", "b", "not in the index")
    save(tmp_path, "another.safetensors", "a")
    index(
        tmp_path,
        {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    )
    assert set(read_tensors(tmp_path) or {}) == {"a", "b", "not in the index"}


def test_every_file_without_an_index_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    save(tmp_path, "x-10.safetensors", "a")
    save(tmp_path, "x-9.safetensors", "b")
    save(tmp_path, "x-\N{SUPERSCRIPT TWO}.safetensors", "c")
    save(tmp_path, ".hidden.safetensors", "a")
    (tmp_path / "sub").mkdir()
    save(tmp_path, "sub/y.safetensors", "a")
    assert [file.name for file in weight_files(tmp_path).files][:2] == [
        "x-9.safetensors",
        "x-10.safetensors",
    ]
    assert set(read_tensors(tmp_path) or {}) == {"a", "b", "c"}


def test_consolidated_files_come_first_with_their_own_index(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", "a")
    save(tmp_path, "consolidated.00.safetensors", "b")
    save(tmp_path, "consolidated.01.safetensors", "b")
    index(tmp_path, {"a": "model.safetensors"})
    index(tmp_path, {"b": "consolidated.01.safetensors"}, "consolidated.safetensors.index.json")
    assert [file.name for file in weight_files(tmp_path).files] == ["consolidated.01.safetensors"]


def test_a_folder_without_safetensors_says_nothing(tmp_path: Path) -> None:
    assert read_tensors(tmp_path) is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    index(tmp_path, {"a": "model-1.safetensors"})
    assert read_tensors(tmp_path) is None
    assert weight_files(tmp_path).files == ()


def test_an_index_alone_means_missing_shards(tmp_path: Path) -> None:
    index(tmp_path, {"a": "model-00001-of-00002.safetensors"})
    assert "no such file" in folder_refused(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", "a", "b")
    save(tmp_path, "old.safetensors", "b")
    message = folder_refused(tmp_path)
    assert "'model.safetensors'" in message
    assert "'old.safetensors'" in message


@pytest.mark.parametrize(
    "elsewhere",
    [
        "model-2.safetensors",
        "../model.safetensors",
        "/etc/passwd",
        "./model.safetensors",
        "a\0",
        "",
    ],
)
def test_an_index_may_name_files_of_its_folder_only(tmp_path: Path, elsewhere: str) -> None:
    (tmp_path / "drafter").mkdir()
    save(tmp_path, "model.safetensors", "b")
    save(tmp_path / "drafter", "model.safetensors", "a")
    index(tmp_path / "drafter", {"a": "model.safetensors", "b": elsewhere})
    message = folder_refused(tmp_path / "drafter")
    assert "'b'" in message
    assert "no such file" in message


def test_an_index_that_names_a_tensor_that_no_file_holds(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", "a")
    index(tmp_path, {"a": "model.safetensors", "b": "model.safetensors"})
    assert "no file that it names holds it" in folder_refused(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 3}}',
        b'{"weight_map": {"a": null}}',
        b'{"weight_map": {}, "weight_map": {}}',
        b"[" * 100_000,
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, content: bytes) -> None:
    save(tmp_path, "model.safetensors", "a")
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    assert "model.safetensors.index.json" in folder_refused(tmp_path)


@given(st.binary(max_size=60) | JSON_VALUES.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=200)
def test_any_index_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("index")
    write(folder / "model.safetensors", VALID)
    write(folder / "model.safetensors.index.json", content.replace(b'"a"', b'"weight_map"'))
    read_or_refused(folder)


def test_files_one_after_the_other(tmp_path: Path) -> None:
    save(tmp_path, "model-00001-of-00002.safetensors", "a", "more")
    save(tmp_path, "model-00002-of-00002.safetensors", "b")
    index(
        tmp_path,
        {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    )
    weights = weight_files(tmp_path)
    assert weights.missing == ()
    read = [(file.name, sorted(held)) for file, held in headers(weights)]
    assert read == [
        ("model-00001-of-00002.safetensors", ["a", "more"]),
        ("model-00002-of-00002.safetensors", ["b"]),
    ]
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert weight_files(tmp_path).missing == ("model-00001-of-00002.safetensors",)
    with pytest.raises(CheckpointError, match="no such file"):
        next(headers(weight_files(tmp_path)))


def test_named_tensors_are_found_in_the_files_that_the_index_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "one.safetensors", "a.weight", "b")
    save(tmp_path, "two.safetensors", "c")
    write(tmp_path / "three.safetensors", b"broken")
    where = {"a.weight": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    index(
        tmp_path,
        {**where, "d": "three.safetensors", "e": "gone.safetensors", "f": "two.safetensors"},
    )
    found = find_tensors(tmp_path, "a.weight", "c", "aXweight", "weight_map", "e", "f")
    assert {name: info.file for name, info in found.items()} == {
        "a.weight": tmp_path / "one.safetensors",
        "c": tmp_path / "two.safetensors",
    }
    with pytest.raises(CheckpointError):
        find_tensors(tmp_path, "d")
    (tmp_path / INDEX_FILE).unlink()
    (tmp_path / "three.safetensors").unlink()
    assert set(find_tensors(tmp_path, "b", "c", "x")) == {"b", "c"}
    monkeypatch.setattr(module, "_MAX_SEARCHED", 3)
    index(tmp_path, where)
    with pytest.raises(CheckpointError, match="more than any"):
        find_tensors(tmp_path, "b")


def test_a_name_in_two_files_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    one = module._tensors
    monkeypatch.setattr(module, "_tensors", lambda path, *a: (read.append(path), one(path, *a))[1])
    for name in "123456":
        save(tmp_path, f"{name}.safetensors", "a")
    assert set(find_tensors(tmp_path, "a", "b")) == {"a"}
    assert len(read) == 2
    # What is not there is looked for up to the bound.
    monkeypatch.setattr(module, "_MAX_HEADERS_BYTES", 4 * module._LEAST_HEADER_BYTES)
    read.clear()
    with pytest.raises(CheckpointError, match="holds more than 4 files"):
        find_tensors(tmp_path, "b")
    assert len(read) == 4


@pytest.mark.parametrize(
    ("bound", "files"),
    [
        ("_MAX_KEPT", {"model.safetensors": ["a", "b", "c"]}),
        (
            "_MAX_KEPT_BESIDES",
            {"1.safetensors": ["a"], "2.safetensors": ["b"], "3.safetensors": ["c"]},
        ),
        ("_MAX_FILES", {"1.safetensors": ["a"], "2.safetensors": ["b"], "3.safetensors": ["c"]}),
    ],
)
def test_what_is_more_than_any_checkpoint_is_given_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, files: dict[str, list[str]]
) -> None:
    for name, tensors in files.items():
        save(tmp_path, name, *tensors)
    assert set(read_tensors(tmp_path) or {}) == {"a", "b", "c"}
    monkeypatch.setattr(module, bound, 2 if bound == "_MAX_FILES" else 1200)
    with pytest.raises(CheckpointError) as error:
        read_tensors(tmp_path)
    assert error.value.finding.id == "files-too-large"
    assert error.value.finding.kind.undecided


def test_no_folder_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in folder_refused(tmp_path / "absent")
    assert "cannot be read" in folder_refused(write(tmp_path / "file", VALID))
    with pytest.raises(CheckpointError):
        read_tensors("a\0b")


# ---------------------------------------------------------------------------------------- contents


def test_only_small_integer_tensors_are_read(tmp_path: Path) -> None:
    read = read_header(write(tmp_path / "x.safetensors", VALID))
    assert read_integers(read["b"]) == list(struct.unpack("<2q", bytes(range(8, 24))))
    with pytest.raises(CheckpointError, match="F32 values where integers"):
        read_integers(read["a"])
    size = 2**20 + 1
    for dtype, width in (("I64", 8), ("BOOL", 1)):
        with pytest.raises(CheckpointError, match="more than any vocabulary"):
            read_integers(TensorInfo(dtype, (size,), tmp_path / "x.safetensors", 0, size * width))
    with pytest.raises(CheckpointError, match="in no file"):
        read_integers(TensorInfo("I64", (1,), None, 0, 8))


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    read = read_header(write(tmp_path / "x.safetensors", VALID))
    other = read_header(write(tmp_path / "y.safetensors", VALID))
    write(tmp_path / "x.safetensors", VALID[:-1])
    with pytest.raises(CheckpointError, match="became shorter"):
        read_integers(read["b"])
    with pytest.raises(CheckpointError, match="became shorter"):
        same_bytes(other["b"], read["b"])
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        same_bytes(other["b"], read["b"])


def test_the_same_bytes_in_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 64)
    values = torch.arange(100, dtype=torch.float32)
    for position in (None, 0, 15, 16, 99):
        changed = values.clone()
        if position is not None:
            changed[position] = -1
        save_file({"a": values}, tmp_path / "one.safetensors")
        save_file({"pad": torch.zeros(3), "b": changed}, tmp_path / "two.safetensors")
        a = read_header(tmp_path / "one.safetensors")["a"]
        b = read_header(tmp_path / "two.safetensors")["b"]
        assert same_bytes(a, b) is (position is None)
        assert same_bytes(a, a)


def test_another_shape_or_dtype_is_not_the_same(tmp_path: Path) -> None:
    zeros = torch.zeros(4)
    save_file(
        {"a": zeros, "b": zeros.reshape(2, 2).clone(), "c": zeros.to(torch.int32)},
        tmp_path / "x.safetensors",
    )
    read = read_header(tmp_path / "x.safetensors")
    assert not same_bytes(read["a"], read["b"])
    assert not same_bytes(read["a"], read["c"])


@pytest.mark.parametrize(
    ("files", "index", "complete"),
    [
        (["model.safetensors"], None, True),
        ([], None, False),
        ([], ["a.safetensors"], False),
        (["a.safetensors"], ["a.safetensors", "b.safetensors"], False),
        (["a.safetensors", "b.safetensors"], ["a.safetensors", "b.safetensors"], True),
        (["model-00001-of-00002.safetensors"], None, False),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], None, True),
    ],
)
def test_what_a_download_has_brought_so_far(
    tmp_path: Path, files: list[str], index: list[str] | None, complete: bool
) -> None:
    for name in files:
        (tmp_path / name).touch()
    if index is not None:
        weight_map = {f"tensor {i}": name for i, name in enumerate(index)}
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert is_complete(tmp_path) is complete


def test_a_broken_index_is_no_complete_download(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").touch()
    (tmp_path / INDEX_FILE).write_text("{")
    assert not is_complete(tmp_path)
    assert not is_complete(tmp_path / "nowhere")
