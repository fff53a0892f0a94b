# SPDX-License-Identifier: Apache-2.0
"""Files that nobody vouches for: a finding each, no traceback, and a bound on time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.assets.synthetic import kimi_config, write_kimi
from vllm_kimi_eagle3.check import Report, check
from vllm_kimi_eagle3.checkpoint import tensors

from .targets import make_target

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
DRAFTER = CONFIGS / "lightseekorg__kimi-k2.5-eagle3-mla" / "config.json"
ENTRY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
INDEX = "model.safetensors.index.json"
MIB = 1024 * 1024
# Of a 64-bit Linux: the whole check may take 200 MB, the interpreter included.
MOST_BYTES, MOST_SECONDS = 200_000_000, 20


def header(text: bytes, claims: int | None = None, data: int = 0) -> bytes:
    return (len(text) if claims is None else claims).to_bytes(8, "little") + text + bytes(data)


def put(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def weights(content: bytes) -> Callable[[Path], None]:
    return put("model.safetensors", content)


def config(content: bytes) -> Callable[[Path], None]:
    return put("config.json", content)


def link(name: str, to: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return make


def instead(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return replace


def many(text: bytes, count: int, name: str = "model.safetensors") -> Callable[[Path], None]:
    """A file of ``count`` times ``text``, written without holding it; ``%d`` in it counts."""

    def write(folder: Path) -> None:
        with open(folder / name, "wb") as file:
            file.write(bytes(8) if name == "model.safetensors" else b"")
            file.write(b'{"weight_map":{' if name == INDEX else b"{")
            for start in range(0, count, 50_000):
                part = range(start, min(start + 50_000, count))
                file.write(b"".join(text % ((i,) * text.count(b"%d")) for i in part))
            file.write(b'"":{}}' if name != INDEX else b'"":""}}')
            length = file.tell() - 8
            if name == "model.safetensors":
                file.seek(0)
                file.write(length.to_bytes(8, "little"))

    return write


def large(name: str, size: int, begin: bytes = b"") -> Callable[[Path], None]:
    """A file of any size that takes no space."""

    def write(folder: Path) -> None:
        with open(folder / name, "wb") as file:
            file.write(begin)
            file.truncate(size)

    return write


def shards(folder: Path, count: int = 4) -> None:
    small = kimi_config()
    small["text_config"]["n_routed_experts"] = 2
    config = (folder / "config.json").read_bytes()
    write_kimi(folder, small, count)
    (folder / "config.json").write_bytes(config)


def shards_with(change: Callable[[Path], None]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "model.safetensors").unlink(missing_ok=True)
        shards(folder)
        change(folder)

    return make


SMALL: dict[str, tuple[Callable[[Path], None], str]] = {
    "an empty config": (config(b""), "files-not-json"),
    "a config that is a list": (config(b"[]"), "files-not-json"),
    "a config cut off": (config(b'{"a": '), "files-not-json"),
    "a config with a byte order mark": (config(b"\xef\xbb\xbf{}"), "files-not-json"),
    "a config in UTF-16": (config("{}".encode("utf-16")), "files-not-json"),
    "a config nested too deep": (config(b'{"a":' * 30_000), "files-not-json"),
    "a list nested too deep": (config(b"[" * 100_000), "files-not-json"),
    "a number of 100,000 digits": (config(b'{"a": ' + b"9" * 100_000 + b"}"), "files-not-json"),
    "a config that is a page": (config(b"<!DOCTYPE html>"), "files-not-json"),
    "no config": (lambda f: (f / "config.json").unlink(), "files-no-config"),
    "a config that is a folder": (instead("config.json", Path.mkdir), "files-unreadable"),
    "a config that is a pipe": (instead("config.json", os.mkfifo), "files-unreadable"),
    "a config that links to itself": (link("config.json", "config.json"), "files-unreadable"),
    "a config that links to nowhere": (link("config.json", "gone"), "files-unreadable"),
    "a config that is a device": (link("config.json", "/dev/zero"), "files-unreadable"),
    "a config from /proc": (link("config.json", "/proc/self/maps"), "files-not-json"),
    "weights that are no JSON": (weights(header(b"hello")), "files-not-json"),
    "a header nested too deep": (weights(header(b'{"a":' + b"[" * 100_000)), "files-not-json"),
    "a header that claims 2^63 bytes": (weights(header(b"{}", 2**63)), "files-broken-header"),
    "a header that claims 2^64 bytes": (weights(header(b"{}", 2**64 - 1)), "files-broken-header"),
    "a header longer than the file": (weights(header(b"{}", 99_000_000)), "files-truncated"),
    "empty weights": (weights(b""), "files-truncated"),
    "a shape that overflows": (
        weights(header(b'{"a":{"dtype":"U8","shape":[%d,%d],"data_offsets":[0,0]}}'
                       % (2**63, 2**63))), "files-broken-header"),
    "a negative size": (
        weights(header(b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,0]}}')),
        "files-broken-header"),
    "NaN for a size": (
        weights(header(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}')),
        "files-not-json"),
    "a name twice": (weights(header(b'{"a":%s,"a":%s}' % (ENTRY, ENTRY))), "files-broken-header"),
    "a name of half a surrogate": (weights(header(b'{"\\ud800":%s}' % ENTRY)),
                                   "files-broken-header"),
    "weights that are a folder": (instead("model.safetensors", Path.mkdir), "files-unreadable"),
    "weights that are a pipe": (instead("model.safetensors", os.mkfifo), "files-unreadable"),
    "weights that link to themselves": (link("model.safetensors", "model.safetensors"),
                                        "files-unreadable"),
    "weights that are a device": (link("model.safetensors", "/dev/zero"), "files-unreadable"),
    "a Git LFS pointer": (weights(b"version https://git-lfs.github.com/spec/v1\n"),
                          "files-lfs-pointer"),
    "an index that is no JSON": (shards_with(put(INDEX, b"{")), "files-not-json"),
    "an index without a map": (shards_with(put(INDEX, b"{}")), "files-broken-index"),
    "an index of numbers": (shards_with(put(INDEX, b'{"weight_map": {"a": 1}}')),
                            "files-broken-index"),
    "an index out of its folder": (
        shards_with(put(INDEX, b'{"weight_map": {"a": "../../etc/passwd"}}')),
        "files-missing-shard"),
    "an index with control characters": (
        shards_with(put(INDEX, b'{"weight_map": {"\\u001b[31m": "\\n\\u0000\\ud800.x"}}')),
        "files-missing-shard"),
    "a shard that links to itself": (
        shards_with(link("model-00002-of-000004.safetensors", "model-00002-of-000004.safetensors")),
        "files-unreadable"),
}  # fmt: skip

LARGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a config of 4 TB": (large("config.json", 2**42, b"{"), "files-too-large"),
    "a config of 8 MiB of lists": (
        config(b'{"a":[' + b"[]," * (8 * MIB // 3 - 9) + b"[]]}"), "files-too-large"),
    "a config of 8 MiB of objects": (
        config(b'{"a":[' + b'{"a":1},' * (MIB - 9) + b"{}]}"), "files-too-large"),
    "a config of 8 MiB of text": (
        config(b'{"a":"' + "\N{GRINNING FACE}".encode() * (2 * MIB - 9) + b'"}'), ""),
    "a header of 95 MB of lists": (
        weights(header(b'{"a":[' + b"[]," * 31_000_000 + b"[]]}")), "files-too-large"),
    "a header of 95 MB in one name": (
        weights(header(b'{"' + b"a" * 95_000_000 + b'":{}}')), "files-too-large"),
    "a header of 95 MB of spaces": (
        weights(header(b"{" + b" " * 95_000_000 + b"}")), ""),
    "a header of 95 MB of opening braces": (
        weights(header(b'{"a":' + b"{" * 95_000_000)), "files-not-json"),
    "a header of 1.5 million tensors": (
        many(b'"%d":' + ENTRY + b",", 1_500_000), "files-too-large"),
    "a header of long names": (
        many(b'"%d' + b"x" * 500_000 + b'":' + ENTRY + b",", 180), "files-too-large"),
    "a header of long shapes": (
        weights(header(b'{"a":{"dtype":"U8","shape":[' + b"0," * 400_000
                       + b'0],"data_offsets":[0,0]}}')), "files-too-large"),
    "a shard of 8 TB": (large("model.safetensors", 2**43, header(b"{}")), "files-broken-header"),
    "an index of 4 TB": (
        shards_with(large(INDEX, 2**42, b'{"weight_map": {')), "files-not-json"),
    "an index of 3 million tensors": (
        shards_with(many(b'"%d":"a",', 3_000_000, INDEX)), "files-too-large"),
    "an index of long file names": (
        shards_with(many(b'"%d":"%d' + b"x" * 500_000 + b'",', 200, INDEX)), "files-too-large"),
}  # fmt: skip


def command(target: Path, drafter: Path) -> list[str]:
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    return [str(target), "--speculative-config", json.dumps(speculative), "-tp", "8"]


def folders(root: Path) -> tuple[Path, Path]:
    target, drafter = root / "target", root / "drafter"
    make_target(target)
    drafter.mkdir()
    (drafter / "config.json").write_bytes(DRAFTER.read_bytes())
    return target, drafter


def checked(target: Path, drafter: Path) -> Report:
    report = check(command(target, drafter), vllm="0.26.0", environ={})
    held_to(report.as_json())
    report.as_text()
    return report


def held_to(report: Any) -> None:
    """No check has stopped, and every text is one line that can be printed."""
    assert "host-check-stopped" not in {finding["id"] for finding in report["findings"]}, report
    for text in texts(report):
        assert len(text) < 3000
        assert "\x1b" not in text
        text.encode()


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in texts(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in texts(inner)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize("name", SMALL)
def test_a_finding_and_no_traceback(tmp_path: Path, name: str, side: str) -> None:
    make, expected = SMALL[name]
    target, drafter = folders(tmp_path)
    make(target if side == "target" else drafter)
    assert expected in {finding.id for finding in checked(target, drafter).findings}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of a Linux process")
@pytest.mark.parametrize("side", ["target", "drafter"])
@pytest.mark.parametrize("name", LARGE)
def test_memory_and_time_have_bounds(tmp_path: Path, name: str, side: str) -> None:
    make, expected = LARGE[name]
    target, drafter = folders(tmp_path)
    make(target if side == "target" else drafter)
    report, peak = in_a_process(target, drafter)
    assert peak < MOST_BYTES
    if expected:
        assert expected in {finding["id"] for finding in report["findings"]}


@pytest.mark.parametrize("side", ["target", "drafter"])
def test_the_work_on_a_folder_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    target, drafter = folders(tmp_path)
    folder = target if side == "target" else drafter
    read: list[Path] = []
    one = tensors._tensors
    monkeypatch.setattr(tensors, "_tensors", lambda path, *a: (read.append(path), one(path, *a))[1])
    # Thousands of names for one file: the second says it all, to whoever looks.
    (folder / "model.safetensors").write_bytes(header(b'{"lm_head.weight":%s}' % ENTRY))
    for number in range(3000):
        (folder / f"x{number}.safetensors").symlink_to("model.safetensors")
    found = {finding.id for finding in checked(target, drafter).findings}
    assert "files-duplicate-tensor" in found
    assert len(read) < 20
    # Thousands of files with nothing in common.
    read.clear()
    for number in range(3000):
        (folder / f"x{number}.safetensors").unlink()
        (folder / f"x{number}.safetensors").write_bytes(header(b'{"%d":%s}' % (number, ENTRY)))
    found = {finding.id for finding in checked(target, drafter).findings}
    assert "files-too-large" in found
    assert len(read) < 5000


def test_a_whole_kimi_is_within_them(tmp_path: Path) -> None:
    target, drafter = folders(tmp_path)
    (target / "model.safetensors").unlink()
    write_kimi(target)
    report, peak = in_a_process(target, drafter)
    assert peak < MOST_BYTES / 2
    assert not [f for f in report["findings"] if f["evidence"]["file"] == str(target)]


PROGRAM = """\
import json, resource, sys
from vllm_kimi_eagle3.check import check
report = check(sys.argv[1:], vllm="0.26.0", environ={}).as_json()
# The peak of this process alone: ru_maxrss begins with that of the parent it was forked from.
peak = next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM"))
print(json.dumps([report, int(peak) * 1024]))
"""


def in_a_process(target: Path, drafter: Path) -> tuple[Any, int]:
    """The report as JSON, and the peak of the process's memory in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command(target, drafter)],
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report, peak = json.loads(done.stdout)
    held_to(report)
    return report, peak


NAMES = st.text(min_size=1, max_size=20).filter(lambda n: "\0" not in n and "/" not in n)


@given(NAMES.filter(lambda n: n not in (".", "..")), st.binary(max_size=30))
@settings(max_examples=40)
def test_any_names_in_a_folder(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    target, drafter = folders(tmp_path_factory.mktemp("names"))
    for folder in (target, drafter):
        (folder / os.fsencode(name).decode("utf-8", "surrogateescape")).write_bytes(content)
        (folder / f"{name}.safetensors").write_bytes(content)
    checked(target, drafter)


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    target, drafter = folders(tmp_path)
    name = os.fsdecode(b"\xff\xfe\x1b[31m.safetensors")
    (target / name).write_bytes(b"x")
    (drafter / name).write_bytes(b"x")
    assert "files-truncated" in {finding.id for finding in checked(target, drafter).findings}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    | st.integers(2**62, 2**70) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)  # fmt: skip
DRAFTER_CONFIG = json.loads(DRAFTER.read_text())


@given(
    st.dictionaries(st.sampled_from([*kimi_config(), "hidden_size"]), JSON, max_size=3),
    st.dictionaries(st.sampled_from([*kimi_config()["text_config"]]), JSON, max_size=3),
    st.dictionaries(st.sampled_from([*DRAFTER_CONFIG]), JSON, max_size=3),
)
@settings(max_examples=150)
def test_any_values_in_the_configs(
    tmp_path_factory: pytest.TempPathFactory,
    top: dict[str, Any],
    text: dict[str, Any],
    drafters: dict[str, Any],
) -> None:
    root = tmp_path_factory.mktemp("values")
    target, drafter = root / "target", root / "drafter"
    changed = kimi_config()
    changed["text_config"].update(text)
    make_target(target, config=changed | top, tensors=False)
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(DRAFTER_CONFIG | drafters))
    checked(target, drafter)
