# SPDX-License-Identifier: Apache-2.0
"""The setting that is printed, and the copy that is written, are read as the best reading."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.assets import variants
from vllm_kimi_eagle3.checkpoint.rope import Rope
from vllm_kimi_eagle3.diagnose.offline import setting
from vllm_kimi_eagle3.diagnose.offline.hypotheses import Reading
from vllm_kimi_eagle3.diagnose.offline.subject import Subject, read_subject
from vllm_kimi_eagle3.diagnose.offline.write import write_copy
from vllm_kimi_eagle3.findings.catalogue import KINDS

SubjectOf = Callable[[str], Subject]
TARGET = str(variants.KIMI_K25_TARGET)


def read(folder: Path, **options: Any) -> Subject:
    return read_subject(TARGET, str(folder), **options)


def test_aux_layers_are_a_flag_that_the_resolver_honours(subject_of: SubjectOf) -> None:
    subject = subject_of(variants.LLAMA_DRAFTER.name)
    best = replace(subject.now, aux=(1, 3, 4))
    flag = setting.flag(subject, best)
    assert flag == (
        """--additional-config '{"kimi_eagle3": {"aux_hidden_state_layers": [1, 3, 4]}}'"""
    )
    given = json.loads(flag.split(" ", 1)[1].strip("'"))
    assert read(subject.folder, additional_config=given).now == best
    assert setting.flag(subject, subject.now) == ""


def test_the_users_own_settings_stay(subject_of: SubjectOf) -> None:
    own = {"other": 1, "kimi_eagle3": {"attention": False, "aux_hidden_state_layers": [3, 5, 6]}}
    subject = read(variants.LLAMA_DRAFTER, additional_config=own)
    assert subject.now.aux == (3, 5, 6)
    assert subject.choices.stated == ((2, 4, 5),)
    assert setting.additional_config(subject, replace(subject.now, aux=(2, 4, 5))) == {
        "other": 1,
        "kimi_eagle3": {"attention": False, "aux_hidden_state_layers": [2, 4, 5]},
    }


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("eagle3-llama-tiny", {"norm_output": True}),
    ("eagle3-llama-tiny", {"norm_before_residual": True}),
    ("eagle3-llama-tiny", {"rope": Rope(1e6)}),
    ("eagle3-mla-tiny", {"rope": Rope(1e4)}),
    ("llama-yarn-5x", {"rope": Rope(5e4)}),
    ("llama-yarn-5x", {"rope": Rope(5e4, "yarn", {**variants.YARN, "beta_fast": 1.0})}),
    ("llama-eagle31-nested", {"norm_output": False}),
    ("mla-eagle31", {"norm_output": False, "rope": Rope(1e6)}),
    ("speculators-norm-before-residual", {"norm_before_residual": False}),
    ("speculators", {"norm_before_residual": True, "rope": Rope(1e4)}),
    ("mla-norm-before-fc-nested", {"norm_before_fc": False}),
    ("llama-eagle31", {"fc_norm": False}),
    ("llama-own-embed", {"embedding": "target"}),
    ("llama-own-head", {"head": "target"}),
    ("eagle3-llama-tiny", {"head": "target"}),
]


def without_type(rope: Rope) -> Rope:
    return replace(rope, scaling={k: v for k, v in rope.scaling.items() if k != "type"})


@pytest.mark.parametrize(("name", "changes"), CHANGES)
def test_a_copy_is_read_as_the_best_reading(
    name: str, changes: dict[str, Any], subject_of: SubjectOf, tmp_path: Path
) -> None:
    if "rope" in changes:
        changes = {**changes, "rope": without_type(changes["rope"])}
    subject = subject_of(name)
    best = replace(subject.now, **changes)
    assert best.key != subject.now.key
    said = write_copy(subject, best, tmp_path / "copy")
    again = read(tmp_path / "copy")
    assert not again.refused
    if "head" in changes:
        best = replace(best, rows="none")  # The target's head has a row for each token.
    assert again.now.key == best.key
    assert said.startswith("config.json changed")
    # What is said to be changed is what a person has to write.
    for finding in setting.findings(subject, best, "gain", "evidence"):
        assert finding.fix
        assert finding.id in KINDS


def test_files_that_stay_are_links(subject_of: SubjectOf, tmp_path: Path) -> None:
    subject = subject_of(variants.LLAMA_DRAFTER.name)
    said = write_copy(subject, replace(subject.now, norm_output=True), tmp_path / "copy")
    assert said.endswith("the weights as they are")
    names = {file.name for file in (tmp_path / "copy").iterdir()}
    assert names == {file.name for file in subject.folder.iterdir()}
    same = load_file(tmp_path / "copy" / "model.safetensors")
    for name, tensor in load_file(subject.folder / "model.safetensors").items():
        assert torch.equal(same[name], tensor)


def test_a_sharded_drafter_becomes_one_file(tmp_path: Path) -> None:
    folder = variants.edit_drafter(variants.MLA_DRAFTER, tmp_path / "sharded", shards=3)
    subject = read(folder)
    assert "embedding" not in subject.choices.own or subject.now.embedding == "own"
    best = replace(subject.now, head="target")
    write_copy(subject, best, tmp_path / "copy")
    files = sorted(file.name for file in (tmp_path / "copy").glob("*.safetensors*"))
    assert files == ["model.safetensors"]
    left = load_file(tmp_path / "copy" / "model.safetensors")
    assert "lm_head.weight" not in left
    assert set(left) == set(subject.tensors) - {"lm_head.weight"}


def test_a_map_from_the_mask(tmp_path: Path) -> None:
    edit = variants.edit_drafter(
        variants.LLAMA_DRAFTER, tmp_path / "no-d2t", tensors=variants._drop("d2t")
    )
    subject = read(edit)
    assert subject.now.rows == "none"
    assert {finding.id for finding in subject.refused} == {"drafter-tensor-missing"}
    assert subject.choices.rows == ("t2d", "unknown", "none")
    said = write_copy(subject, replace(subject.now, rows="t2d"), tmp_path / "copy")
    assert said.endswith("with a d2t")
    right = load_file(variants.LLAMA_DRAFTER / "model.safetensors")
    written = load_file(tmp_path / "copy" / "model.safetensors")
    assert set(written) == set(right)
    assert all(torch.equal(written[name], right[name]) for name in right)
    assert not read(tmp_path / "copy").refused


def test_token_ids_become_offsets(tmp_path: Path) -> None:
    def as_ids(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        del tensors["t2d"]
        return tensors

    folder = variants.edit_drafter(variants.LLAMA_DRAFTER, tmp_path / "ids", tensors=as_ids)
    subject = read(folder)
    assert subject.refused
    assert "ids" in subject.choices.rows
    best = replace(subject.now, rows="ids")
    write_copy(subject, best, tmp_path / "copy")
    right = load_file(variants.LLAMA_DRAFTER / "model.safetensors")["d2t"]
    assert torch.equal(load_file(tmp_path / "copy" / "model.safetensors")["d2t"], right)


def test_what_is_there_is_not_written_over(subject_of: SubjectOf, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    subject = subject_of(variants.LLAMA_DRAFTER.name)
    with pytest.raises(FileExistsError):
        write_copy(subject, subject.now, tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "fix"),
    [
        ("eagle3-llama-tiny", {"norm_output": True}, 'write "norm_output": true into '),
        (
            "llama-eagle31-nested",
            {"norm_output": False},
            'write "norm_output": false inside "eagle_config" into ',
        ),
        (
            "eagle3-llama-tiny",
            {"rope": Rope(10_000.0)},
            'write "rope_theta": 10000.0 and "rope_scaling": null into ',
        ),
        (
            "llama-theta-5x",
            {"rope": Rope(50_000.0)},
            'write "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0} into ',
        ),
        ("llama-eagle31", {"fc_norm": False}, ", and take the fc_norm tensors out; "),
        ("llama-own-head", {"head": "target"}, "get the lm_head.weight that the drafter was "),
    ],
)
def test_the_fix_in_words(
    name: str, changes: dict[str, Any], fix: str, subject_of: SubjectOf
) -> None:
    subject = subject_of(name)
    (finding,) = setting.findings(subject, replace(subject.now, **changes), "gain", "why")
    assert fix in finding.fix
    assert finding.fact.endswith(": gain")


def test_a_finding_for_each_change(subject_of: SubjectOf) -> None:
    subject = subject_of("llama-eagle31")
    best: Reading = replace(subject.now, aux=(3, 5, 6), norm_output=False, rope=Rope(1e4))
    found = setting.findings(subject, best, "gain", "why")
    assert [finding.id for finding in found] == [
        "diagnose-offline-aux-layers",
        "diagnose-offline-rope",
        "diagnose-offline-norms",
    ]
