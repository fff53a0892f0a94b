# SPDX-License-Identifier: Apache-2.0
"""Builds the cases of tests/data/check and runs ``check`` on them. The format: README.md there."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from packaging.version import Version

from tests.assets.synthetic import light_tensors
from vllm_kimi_eagle3 import check as check_package
from vllm_kimi_eagle3.check import Report, check
from vllm_kimi_eagle3.check import host as host_check
from vllm_kimi_eagle3.check.facts import Facts, facts_for
from vllm_kimi_eagle3.check.gpus import parse_gpus
from vllm_kimi_eagle3.checkpoint.drafter import TargetShape, read_drafter
from vllm_kimi_eagle3.checkpoint.drafter_tensors import Expected, expected_tensors
from vllm_kimi_eagle3.host import SUPPORTED, Host
from vllm_kimi_eagle3.patches.base import Action, Decision

REPOSITORY = Path(__file__).parents[3]
CORPUS = REPOSITORY / "tests" / "data" / "check"
CONFIGS = REPOSITORY / "tests" / "data" / "configs"
ASSETS = REPOSITORY / "tests" / "assets"

KIMI = {"config": "moonshotai__Kimi-K2.5"}
MLA_DRAFTER = {"config": "lightseekorg__kimi-k2.5-eagle3-mla"}
SPECULATIVE = {"method": "eagle3", "num_speculative_tokens": 3}

_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "BOOL": 1, "U8": 1, "F8_E4M3": 1}
_FILE = "model.safetensors"


@dataclass(frozen=True)
class Case:
    """One case: the folder's name is the finding that it is about, the stem ``has`` or ``not``."""

    file: Path

    @property
    def kind(self) -> str:
        return self.file.parent.name

    @property
    def report_file(self) -> Path:
        return self.file.with_suffix(".txt")

    def read(self) -> dict[str, Any]:
        case = json.loads(self.file.read_text(encoding="utf-8"))
        assert isinstance(case, dict)
        return case

    def __str__(self) -> str:
        return f"{self.kind}/{self.file.stem}"


def cases(kinds: list[str] | None = None) -> list[Case]:
    """Every case of the corpus, or those of some kinds."""
    files = sorted(CORPUS.glob("*/*.json"))
    return [Case(file) for file in files if not kinds or file.parent.name in kinds]


def run(case: Mapping[str, Any], root: Path) -> tuple[Report, str]:
    """Builds a case below ``root`` and checks it.

    Returns:
        The report, and it as a page: the command, the text, the exit code, with the folders'
        names as in the case.
    """
    target_recipe = case.get("target", KIMI)
    drafter_recipe = case.get("drafter", MLA_DRAFTER)
    target = root / target_recipe.get("at", "target")
    drafter = root / drafter_recipe.get("at", "drafter")
    build_folder(target, {"tensors": "kimi", **target_recipe}, None)
    build_folder(drafter, {"tensors": "expected", **drafter_recipe}, _shape(target))
    speculative = {"model": str(drafter), **SPECULATIVE, **case.get("speculative", {})}
    names = {
        "{speculative}": shlex.quote(json.dumps(speculative)),
        "{target}": str(target),
        "{drafter}": str(drafter),
        "{root}": str(root),
    }
    command = case.get("command", "vllm serve {target} --speculative-config {speculative}")
    environ = {"HOME": str(root), "CUDA_VISIBLE_DEVICES": "", **case.get("environ", {})}
    for name, value in names.items():
        command = command.replace(name, value)
        environ = {key: text.replace(name, value) for key, text in environ.items()}
    gpus = parse_gpus(case["gpu"]) if "gpu" in case else None
    with _installed(case.get("installed"), root):
        report = check(command, vllm=case.get("vllm"), gpus=gpus, environ=environ)
    options = "".join(f" --{name} {case[name]}" for name in ("vllm", "gpu") if name in case)
    environment = "".join(f"{key}={value} " for key, value in case.get("environ", {}).items())
    page = (
        f"{case['about']}\n\n$ {environment}vllm-kimi-eagle3 check{options} {command}\n"
        f"{report.as_text()}\n\nexit code {report.exit_code}\n"
    )
    for folder, name in ((target, "{target}"), (drafter, "{drafter}"), (root, "{root}")):
        page = page.replace(str(folder), name)
    return report, page.replace("vllm-kimi-eagle3 " + _version(), "vllm-kimi-eagle3 X")


def _version() -> str:
    return check_package.report.__version__


@contextmanager
def _installed(host: Mapping[str, Any] | None, root: Path) -> Iterator[None]:
    """An installed vLLM, or none. A mock: a release's sources are not in this repository, so its
    facts and the patches' decisions are those of the contract."""
    if host is None:
        with mock.patch.object(check_package, "find_host", return_value=None):
            yield
        return
    folder = root / "site-packages" / "vllm"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in host.get("files", {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    version = host["version"]
    found = Host(folder, tuple((n, v) for n, v in host["distributions"]), version)

    def decide(patch: Any, *_: Any) -> Decision:
        needed = patch.covers(Version(version))
        return Decision(Action.APPLY if needed else Action.NOT_NEEDED, "by the contract")

    with (
        mock.patch.object(check_package, "find_host", return_value=found),
        mock.patch.object(check_package, "facts_of", _facts_of),
        mock.patch.object(host_check, "decide", decide),
    ):
        yield


def _facts_of(host: Host) -> Facts:
    """The facts of a supported release; of another one, those of the nearest."""
    if host.version_text in SUPPORTED:
        return facts_for(host.version_text)
    version = Version(host.version_text)
    nearest = SUPPORTED[0] if version < Version(SUPPORTED[0]) else SUPPORTED[-1]
    return replace(
        facts_for(nearest),
        release=host.version_text,
        version=version,
        label=host.label,
        supported=False,
    )


# ------------------------------------------------------------------------------------- folders


def build_folder(folder: Path, recipe: Mapping[str, Any], target: TargetShape | None) -> None:
    """Writes a checkpoint folder.

    Args:
        folder: where; made anew.
        recipe: see tests/data/check/README.md.
        target: the shape that "expected" tensors are for.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if recipe.get("missing"):
        return
    folder.mkdir(parents=True)
    config = read_recipe_config(recipe)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    values: dict[str, list[int]] = {}
    if recipe.get("tensors") == "expected" and config is not None and target is not None:
        tensors, values = expected(config, target)
    if recipe.get("tensors") == "kimi" and config is not None:
        tensors = kimi(config)
        # Not those of a drafter, whose weights are holes.
        values = {name: [1] for name in tensors if "lm_head" in name or "embed_tokens" in name}
    for name, (dtype, shape) in recipe.get("set_tensors", {}).items():
        tensors[name] = dtype, tuple(shape)
        values.pop(name, None)
    for name in recipe.get("unset_tensors", ()):
        del tensors[name]
    for name, said in recipe.get("values", {}).items():
        count = tensors[name][1][0]
        values[name] = (
            said
            if isinstance(said, list)
            else [said["start"] + i * said["step"] for i in range(count)]
        )
    if tensors:
        write_tensors(folder, tensors, values, recipe.get("shards", 1))
    for name, text in recipe.get("files", {}).items():
        (folder / name).write_text(text)
    for name, text in recipe.get("hex", {}).items():
        (folder / name).write_bytes(bytes.fromhex(text))
    for name, length in recipe.get("truncate", {}).items():
        os.truncate(folder / name, length)
    for name in recipe.get("remove", ()):
        (folder / name).unlink()
    for name, to in recipe.get("links", {}).items():
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)


def read_recipe_config(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config.json of a recipe."""
    name = recipe.get("config")
    if name is None:
        return None
    folder = CONFIGS / name if (CONFIGS / name).is_dir() else ASSETS / name
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for path, value in recipe.get("set", {}).items():
        *parents, key = path.split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = value
    for path in recipe.get("unset", ()):
        *parents, key = path.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        del place[key]
    assert isinstance(config, dict)
    return config


def expected(
    config: Mapping[str, Any], target: TargetShape
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, list[int]]]:
    """The tensors of a complete drafter with this config, in bfloat16, and the values of its maps.

    Of one that has no readable config, those that can be told without.
    """
    drafter = read_drafter(config, target)
    assert drafter is not None
    e: Expected = drafter.expected
    tensors = {name: ("BF16", want.shape) for name, want in expected_tensors(e).items()}
    values = {}
    if "d2t" in tensors:
        step = e.vocab_size // e.draft_vocab_size
        tensors["d2t"] = "I64", (e.draft_vocab_size,)
        tensors["t2d"] = "BOOL", (e.vocab_size,)
        values["d2t"] = [i * (step - 1) for i in range(e.draft_vocab_size)]
        marked = {i * step for i in range(e.draft_vocab_size)}
        values["t2d"] = [int(i in marked) for i in range(e.vocab_size)]
    return tensors, values


def kimi(config: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """A Kimi-K2.5's weights, of the sizes in its config; none where it is another's config."""
    try:
        return light_tensors(config)
    except (KeyError, TypeError):
        return {}


def write_tensors(
    folder: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    values: Mapping[str, list[int]],
    shards: int = 1,
) -> None:
    """Safetensors files whose weights are holes, with an index if there are several."""
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        part = names[shard::shards]
        file = _FILE if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        weight_map |= dict.fromkeys(part, file)
        header, end = {}, 0
        for name in part:
            dtype, shape = tensors[name]
            size = _BYTES[dtype]
            for length in shape:
                size *= length
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            data = stream.tell()
            for name in part:
                if name in values:
                    stream.seek(data + header[name]["data_offsets"][0])
                    width = _BYTES[tensors[name][0]]
                    for value in values[name]:
                        stream.write(value.to_bytes(width, "little", signed=width > 1))
            stream.truncate(data + end)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _shape(target: Path) -> TargetShape:
    """The shape of a target that was built; Kimi-K2.5's where that one says none."""
    try:
        config = json.loads((target / "config.json").read_text())
        text = config.get("text_config", config)
        return TargetShape(
            int(text["num_hidden_layers"]), int(text["hidden_size"]), int(text["vocab_size"])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return TargetShape(61, 7168, 163840)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the reports anew")
    parser.add_argument("kinds", nargs="*")
    arguments = parser.parse_args()
    for case in cases(arguments.kinds):
        with tempfile.TemporaryDirectory() as scratch:
            report, page = run(case.read(), Path(scratch))
        present = case.kind in {finding.id for finding in report.findings}
        right = present == (case.file.stem == "has")
        print(f"{case}: {'as it should be' if right else 'THE FINDING IS WRONGLY THERE OR NOT'}")
        if arguments.write:
            case.report_file.write_text(page, encoding="utf-8")
        else:
            print(page)


if __name__ == "__main__":
    main()
