# SPDX-License-Identifier: Apache-2.0
"""The command, from the hidden states on: each mistake gets its name and its setting, and the
setting gives the healthy counts back. (The target's part is in tests/hosts.)"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.assets import variants
from tests.assets.variants import edit_drafter
from vllm_kimi_eagle3 import cli
from vllm_kimi_eagle3.acceptance.given import given
from vllm_kimi_eagle3.check.facts import facts_for
from vllm_kimi_eagle3.diagnose.offline import run
from vllm_kimi_eagle3.diagnose.offline.refit import Refit
from vllm_kimi_eagle3.diagnose.run import OptionError
from vllm_kimi_eagle3.findings.catalogue import KINDS

LLAMA, MLA = variants.LLAMA_DRAFTER, variants.MLA_DRAFTER
TARGET = variants.KIMI_K25_TARGET


@pytest.fixture
def command(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the command on a drafter; returns its exit code and its JSON."""

    def call(drafter: Path, *more: str, k: int = 3) -> tuple[int, dict[str, Any]]:
        given = ["--captured", str(captured), "--max-model-len", "512", "--json"]
        code = cli.main(["diagnose", "--offline", str(TARGET), *words(drafter, k), *given, *more])
        return code, json.loads(capsys.readouterr().out)

    return call


Command = Callable[..., tuple[int, dict[str, Any]]]
_healthy: dict[str, dict[str, Any]] = {}


def healthy(name: str, command: Command, folder: Path) -> dict[str, Any]:
    """The report of a drafter that is as it should be, made once."""
    if name not in _healthy:
        drafter = variants.ASSETS / name
        if name in variants.VARIANTS:
            drafter = variants.write_variant(name, folder / name)
        code, _healthy[name] = command(drafter)
        assert code == 0
    return _healthy[name]


def words(drafter: Path, k: int = 3) -> list[str]:
    value = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": k}
    return ["--speculative-config", json.dumps(value)]


def ids(report: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in report["findings"]]


def reading(report: dict[str, Any], which: str) -> dict[str, Any]:
    (found,) = [row for row in report["readings"] if row[which]]
    one: dict[str, Any] = found
    return one


@pytest.mark.parametrize("folder", [LLAMA, MLA])
def test_a_healthy_pair_is_healthy(folder: Path, command: Command, tmp_path: Path) -> None:
    code, report = command(folder)
    assert code == 0
    assert ids(report) == []
    assert reading(report, "best") == reading(report, "now")
    assert report["verdict"].startswith("The server reads this drafter as it was trained")
    # The captured answers go on for 5 drafts, so two more steps begin than the reference's.
    row = variants.expected_run(folder.name)
    assert 0 <= report["drafts"] - row["num_drafts"] <= 8
    lengths = [row["length"]["value"] for row in report["readings"]]
    assert lengths == sorted(lengths, reverse=True)
    # `diagnose --url ... --expect` takes it.
    (tmp_path / "report.json").write_text(json.dumps(report))
    expected = given(str(tmp_path / "report.json"), "--expect")
    assert expected.measured
    assert len(expected.rates) == 3


def changed(**keys: Any) -> Callable[[Path], Path]:
    return lambda folder: edit_drafter(LLAMA, folder, keys)


def as_eagle31(folder: Path) -> Path:
    """Both norms of EAGLE-3.1 are in the weights, and neither is in the config."""
    both = variants._pipe(variants._fc_norm, variants._norm_output)
    return edit_drafter(LLAMA, folder, tensors=both)


AUX_UP = {"eagle_config": {**variants.EAGLE_CONFIG, variants.IDS: [3, 5, 6]}}
BROKEN: dict[str, tuple[Callable[[Path], Path], list[str], set[str]]] = {
    "one layer higher": (changed(**AUX_UP), [], {"diagnose-offline-aux-layers"}),
    "one layer lower": (
        lambda folder: LLAMA,
        ["--additional-config", '{"kimi_eagle3": {"aux_hidden_state_layers": [1, 3, 4]}}'],
        {"diagnose-offline-aux-layers"},
    ),
    "norm_output is not in the config": (
        lambda folder: edit_drafter(LLAMA, folder, tensors=variants._norm_output),
        [],
        {"diagnose-offline-norms"},
    ),
    "two norms": (as_eagle31, [], {"diagnose-offline-norms", "drafter-tensor-unexpected"}),
    "theta": (changed(rope_theta=10_000.0), [], {"diagnose-offline-rope"}),
    "theta and layers": (
        changed(rope_theta=10_000.0, **AUX_UP),
        [],
        {"diagnose-offline-rope", "diagnose-offline-aux-layers"},
    ),
    "no d2t": (
        lambda folder: edit_drafter(LLAMA, folder, tensors=variants._drop("d2t")),
        [],
        {"diagnose-offline-d2t", "drafter-tensor-missing"},
    ),
}
HEALTHY = {"norm_output is not in the config": "llama-norm-output", "two norms": "llama-eagle31"}


@pytest.mark.parametrize("name", BROKEN)
def test_each_mistake_has_its_name_and_its_setting(
    name: str, command: Command, tmp_path: Path
) -> None:
    make, more, expected = BROKEN[name]
    drafter = make(tmp_path / "broken")
    code, report = command(drafter, *more, "--write", str(tmp_path / "copy"))
    assert code == 1
    # A list of layers that fits neither convention is pointed out by the resolver as well.
    assert set(ids(report)) - {"drafter-aux-unsure"} == expected
    for finding in report["findings"]:
        assert finding["fix"], finding
    best, now = reading(report, "best"), reading(report, "now")
    assert best["length"]["value"] > now["length"]["value"]
    # With the setting and the copy, a server reads it so and drafts as well as one ever did.
    flag = shlex.split(report["additional_config"])
    code, repaired = command(tmp_path / "copy", *flag)
    assert code == 0, repaired["findings"]
    right = healthy(HEALTHY.get(name, LLAMA.name), command, tmp_path)
    for key in ("drafts", "accepted"):
        assert repaired[key] == right[key] == best[key]


def test_a_map_that_is_lost(command: Command, tmp_path: Path) -> None:
    """With neither d2t nor t2d it can only be said, and what it would give at least."""
    drafter = edit_drafter(LLAMA, tmp_path / "lost", tensors=variants._drop("d2t", "t2d"))
    code, report = command(drafter)
    assert code == 1
    assert report["refused"]
    assert ids(report) == ["drafter-tensor-missing", "diagnose-offline-d2t"]
    assert "add the d2t that the drafter was trained with" in report["findings"][1]["fix"]
    assert reading(report, "now")["length"]["value"] < 1.05
    assert reading(report, "best")["length"]["value"] > 2


def test_the_head_of_another_drafter(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts here are too few to see it in the weights (tests/hosts has enough), so what the
    fit finds is given."""
    head = load_file(MLA / "model.safetensors")["lm_head.weight"]

    def with_other(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**variants._full_vocabulary(tensors), "lm_head.weight": head.clone()}

    full = {"draft_vocab_size": variants.VOCAB_SIZE}
    drafter = edit_drafter(LLAMA, tmp_path / "other", full, tensors=with_other)
    code, report = command(drafter)
    assert code == 0
    assert report["head"].startswith("not looked at")
    for fitted, expected in (((24,) * 90, 1), ((20, 21, 19) * 30, 0)):
        found = Refit(90 * 32, (20,) * 90, fitted)
        monkeypatch.setattr(
            "vllm_kimi_eagle3.diagnose.offline.refit.refit", lambda *args, found=found: found
        )
        code, report = command(drafter)
        assert code == expected
        assert ids(report) == ["diagnose-offline-own-part"] * expected


def test_no_reading_fits(command: Command, tmp_path: Path) -> None:
    """Weights that are not those of a drafter of this target."""

    def turned(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["fc.weight"] = tensors["fc.weight"].flip(0).contiguous()
        return tensors

    code, report = command(edit_drafter(LLAMA, tmp_path / "turned", tensors=turned))
    assert code == 1
    assert "diagnose-offline-none-fits" in ids(report)


def test_what_was_published_is_compared_with(command: Command, tmp_path: Path) -> None:
    """A drafter that has been named as a known one and drafts much less well."""
    folder = edit_drafter(
        LLAMA, tmp_path / "AQ-MedAI" / "Kimi-K25-eagle3", {"norm_before_residual": False}
    )
    code, report = command(folder)
    assert code == 0
    assert report["published"]["source"] == "AQ-MedAI/Kimi-K25-eagle3"
    weak = edit_drafter(
        variants.write_variant("llama-no-aux", tmp_path / "no-aux"),
        tmp_path / "weak" / "AQ-MedAI" / "Kimi-K25-eagle3",
    )
    code, report = command(weak)
    assert ids(report) in (["diagnose-offline-weak"], ["diagnose-offline-none-fits"], [])


def test_a_length_that_was_set(captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"method": "eagle3", "model": str(LLAMA), "num_speculative_tokens": 3}
    spec = json.dumps({**value, "max_model_len": 64})
    words = ["--offline", str(TARGET), "--speculative-config", spec, "--max-model-len", "512"]
    code = cli.main(["diagnose", *words, "--captured", str(captured)])
    page = capsys.readouterr().out
    assert code == 1
    assert "diagnose-offline-length" in page
    assert 'take "max_model_len" out of --speculative-config' in page


def test_a_drafter_that_is_short(command: Command, tmp_path: Path) -> None:
    code, report = command(variants.write_variant("llama-short", tmp_path / "short"))
    assert code == 0
    assert ids(report) == ["drafter-length"]


def test_too_few_answers(
    command: Command, captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = json.loads((captured / "captured.json").read_text())
    few["texts"] = few["texts"][:1]
    for text in few["texts"]:
        (tmp_path / text["file"]).symlink_to(captured / text["file"])
    (tmp_path / "captured.json").write_text(json.dumps(few))
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(LLAMA), "--captured",
                     str(tmp_path)])  # fmt: skip
    assert code == 2
    assert "diagnose-too-few-drafts" in capsys.readouterr().out


def test_answers_that_repeat_themselves(
    captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loops = json.loads((captured / "captured.json").read_text())
    for text in loops["texts"]:
        text["answer"] = "and so on, " * 200
        (tmp_path / text["file"]).symlink_to(captured / text["file"])
    (tmp_path / "captured.json").write_text(json.dumps(loops))
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(LLAMA), "--captured",
                     str(tmp_path)])  # fmt: skip
    assert code == 2
    assert "diagnose-repeats" in capsys.readouterr().out


def test_hidden_states_that_were_not_kept_are_not_asked_for(
    command: Command, captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kept for another drafter: what can be scored is."""
    for file in captured.glob("*.pt"):
        states = torch.load(file, weights_only=True)
        torch.save({key: states[key] for key in (2, 3, 4, 5, 6)}, tmp_path / file.name)
    (tmp_path / "captured.json").write_text((captured / "captured.json").read_text())
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(LLAMA), "--captured",
                     str(tmp_path), "--json"])  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    layers = [row["aux_hidden_state_layers"] for row in report["readings"]]
    assert [3, 5, 6] in layers
    assert [1, 3, 4] not in layers


def test_what_the_server_uses_was_not_kept(
    captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in captured.glob("*.pt"):
        states = torch.load(file, weights_only=True)
        torch.save({key: states[key] for key in (2, 3, 4)}, tmp_path / file.name)
    (tmp_path / "captured.json").write_text((captured / "captured.json").read_text())
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(LLAMA), "--captured",
                     str(tmp_path)])  # fmt: skip
    assert code == 2
    assert "diagnose-offline-no-score" in capsys.readouterr().out


def test_the_text_report(captured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(LLAMA), "--captured",
                     str(captured)])  # fmt: skip
    page = capsys.readouterr().out
    assert code == 0
    lines = page.splitlines()
    assert lines[0].endswith("diagnose --offline")
    assert any(line.startswith("  > 3.") and line.endswith("as it is now") for line in lines)
    assert any("rope theta 10000" in line for line in lines)
    assert lines[-1].startswith("The server reads this drafter as it was trained")


def few(captured: Path, folder: Path, texts: int, tokens: int) -> Path:
    """The first answers, and of each so many tokens."""
    found = json.loads((captured / "captured.json").read_text())
    found["texts"] = found["texts"][:texts]
    for text in found["texts"]:
        text["token_ids"] = text["token_ids"][: text["prompt_tokens"] + tokens]
        (folder / text["file"]).symlink_to(captured / text["file"])
    (folder / "captured.json").write_text(json.dumps(found))
    return folder


def test_few_answers_call_no_broken_pair_healthy(
    command: Command, captured: Path, tmp_path: Path
) -> None:
    """A layer that is one off shows, and not significantly: that is no clean bill of health."""
    drafter = edit_drafter(LLAMA, tmp_path / "broken", AUX_UP)
    (tmp_path / "few").mkdir()
    folder = few(captured, tmp_path / "few", 8, 30)
    code, report = command(drafter, "--captured", str(folder))
    assert code == 2
    assert "diagnose-too-few-drafts" in ids(report)
    assert report["next_best"]["steps"] > 0.02
    assert report["next_best"]["low"] <= 0
    assert "as it was trained" not in report["verdict"]


def test_readings_that_are_not_told_apart_are_marked(
    command: Command, tmp_path: Path, captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Short texts hardly tell one rope from another."""
    _, report = command(LLAMA)
    apart = {row["reading"]: row["told_apart"] for row in report["readings"]}
    assert apart["aux layers [3, 5, 6] (one higher)"]
    alike = [reading for reading, told in apart.items() if not told]
    assert "as it is now" in alike
    drafter = edit_drafter(LLAMA, tmp_path / "broken", AUX_UP)
    (tmp_path / "few").mkdir()
    folder = few(captured, tmp_path / "few", 8, 30)
    cli.main(["diagnose", "--offline", str(TARGET), *words(drafter), "--captured", str(folder)])
    page = capsys.readouterr().out
    assert "  ~ not told apart from the best one" in page
    assert any(line.startswith("  ~ ") and "one lower" in line for line in page.splitlines())


@pytest.mark.parametrize("least", [0.1, 0.9])
def test_where_nothing_fits_a_little_better_is_no_cause(
    least: float, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On text that it was not trained on a right drafter may be a little better read wrongly, and
    significantly so: of sixteen such answers the tiny one took 3.5 % fewer steps with YaRN."""
    drafter = edit_drafter(LLAMA, tmp_path / "broken", AUX_UP)
    monkeypatch.setattr(run, "_COLLAPSED", 1.01)
    monkeypatch.setattr(run, "_LEAST_WHERE_NONE_FITS", least)
    code, report = command(drafter)
    named = {"diagnose-offline-aux-layers"} if least == 0.1 else set()
    assert code == 1
    assert set(ids(report)) - {"drafter-aux-unsure"} == named | {"diagnose-offline-none-fits"}
    assert (reading(report, "best") != reading(report, "now")) is bool(named)
    assert bool(report["additional_config"]) is bool(named)


def test_the_layers_of_a_drafter_that_contradicts_itself_can_be_copied(
    command: Command, tmp_path: Path
) -> None:
    drafter = edit_drafter(LLAMA, tmp_path / "drafter", {variants.IDS: [3, 5, 6]})
    given = {"note": "it's mine", "kimi_eagle3": {"attention": False}}
    _, report = command(drafter, "--additional-config", json.dumps(given))
    flag = shlex.split(report["additional_config"])
    assert json.loads(flag[1]) == {
        "note": "it's mine",
        "kimi_eagle3": {"attention": False, "aux_hidden_state_layers": [2, 4, 5]},
    }
    assert report["additional_config"] in report["findings"][1]["fix"]
    code, repaired = command(drafter, *flag)
    assert code == 0, repaired["findings"]
    assert repaired["accepted"] == healthy(LLAMA.name, command, tmp_path)["accepted"]


def test_a_copy_that_cannot_be_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "write_copy", full)
    code, report = command(LLAMA, "--write", str(tmp_path / "copy"))
    assert code == 2
    assert ids(report) == ["diagnose-offline-copy"]
    assert report["written"] == ""
    assert report["readings"]


# ------------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    "written",
    ["{", "[]", "{}", '{"texts": [3], "tokens": 1}', '{"texts": [], "tokens": "x"}',
     '{"tokens": 4, "texts": [{"token_ids": [1, 99999], "prompt_tokens": 1, "file": "f", '
     '"kind": "", "answer": ""}]}'],
)  # fmt: skip
def test_what_keep_has_not_written(written: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / "captured.json").write_text(written)
    code, report = command(LLAMA, "--captured", str(tmp_path))
    assert code == 2
    assert ids(report) == ["diagnose-offline-no-score"]
    assert "captured.json" in report["findings"][0]["fact"]


@pytest.mark.parametrize("how", ["short", "gone", "other"])
def test_hidden_states_that_cannot_be_read(
    how: str, command: Command, captured: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    shutil.copytree(captured, folder)
    file = folder / "text-0000.pt"
    if how == "short":
        file.write_bytes(file.read_bytes()[:1000])
    elif how == "gone":
        file.unlink()
    else:
        torch.save({2: torch.zeros(3, 96)}, file)
    code, report = command(LLAMA, "--captured", str(folder))
    assert code == 2
    assert ids(report) == ["diagnose-offline-no-score"]
    assert "text-0000.pt" in report["findings"][0]["fact"]


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_target_whose_config_does_not_say_how_large_it_is(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((TARGET / "config.json").read_text())
    config["text_config"][key] = "large"
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = cli.main(["diagnose", "--offline", str(tmp_path), *words(LLAMA)])
    page = capsys.readouterr().out
    in_text(code, page, "target-size")
    assert f"text_config.{key}" in page


def in_text(code: int, page: str, finding: str) -> None:
    assert finding in KINDS
    assert finding in page, page
    assert code == (2 if KINDS[finding].undecided else 1)


def test_a_drafter_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(Path("owner/drafter"))])
    in_text(code, capsys.readouterr().out, "diagnose-offline-no-score")


def test_a_target_that_is_no_kimi(
    captured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama, drafter = variants.write_llama_pair(tmp_path)
    code = cli.main(["diagnose", "--offline", str(llama), *words(drafter)])
    in_text(code, capsys.readouterr().out, "diagnose-offline-no-score")


@pytest.mark.parametrize(
    ("config", "finding"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "diagnose-offline-no-score"),
        ({"partial_rotary_factor": 0.5}, "diagnose-offline-no-score"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "diagnose-offline-no-score",
        ),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 64},
            "diagnose-offline-no-score",
        ),
        ({"hidden_size": 128}, "drafter-other-target"),
        ({"norm_output": "yes"}, "drafter-config-value"),
    ],
)
def test_a_drafter_that_cannot_be_scored(
    config: dict[str, Any], finding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = edit_drafter(LLAMA, tmp_path / "drafter", config)
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(drafter)])
    in_text(code, capsys.readouterr().out, finding)


def test_a_drafter_that_drafts_in_parallel(
    captured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no second step to be scored."""
    value = {"method": "eagle3", "model": str(LLAMA), "num_speculative_tokens": 3}
    spec = json.dumps({**value, "parallel_drafting": True})
    code = cli.main(["diagnose", "--offline", str(TARGET), "--speculative-config", spec,
                     "--captured", str(captured)])  # fmt: skip
    page = capsys.readouterr().out
    in_text(code, page, "diagnose-offline-no-score")
    assert '"parallel_drafting"' in page


def test_weights_that_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = edit_drafter(
        LLAMA, tmp_path / "drafter", tensors=variants._drop("midlayer.mlp.up_proj")
    )
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(drafter)])
    in_text(code, capsys.readouterr().out, "drafter-tensor-missing")


def test_aux_layers_that_contradict_each_other(command: Command, tmp_path: Path) -> None:
    """The plugin refuses the pair; what it should be can be told all the same."""
    drafter = edit_drafter(LLAMA, tmp_path / "drafter", {variants.IDS: [3, 5, 6]})
    code, report = command(drafter)
    assert code == 1
    assert report["refused"]
    assert ids(report) == ["drafter-aux-contradiction", "diagnose-offline-aux-layers"]
    assert reading(report, "best")["aux_hidden_state_layers"] == [2, 4, 5]


def test_without_a_vllm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(LLAMA), "--keep",
                     str(tmp_path / "kept")])  # fmt: skip
    said = capfd.readouterr()
    in_text(code, said.out, "diagnose-offline-engine")
    assert "no vLLM is installed" in said.out
    assert "Traceback" not in said.err
    assert not (tmp_path / "kept").exists()


@pytest.fixture
def fails_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any] | None, int], None]:
    """The target's process ends with a code, and leaves what went wrong."""

    def fails(error: dict[str, Any] | None, code: int = 1) -> None:
        def capture(job: str, environ: dict[str, str]) -> int:
            if error is not None:
                (Path(job).parent / "error.json").write_text(json.dumps(error))
            return code

        monkeypatch.setattr(run, "run_capture", capture)
        monkeypatch.setattr(run, "find_host", lambda: "a host")
        monkeypatch.setattr(run, "facts_of", lambda host: facts_for("0.32.0"))

    return fails


PYDANTIC = """1 validation error for ModelConfig
  Value error, The repository /models/kimi contains custom code [type=value_error, input_value=1]
    For further information visit https://errors.pydantic.dev"""
OF_A_FIELD = """1 validation error for CacheConfig
block_size
  Input should be 16 [type=literal_error, input_value=3, input_type=int]"""


@pytest.mark.parametrize(
    ("error", "code", "fact", "fix"),
    [
        ({"type": "RuntimeError", "message": "Engine core failed\nsee above"}, 1,
         "RuntimeError: Engine core failed", "see its log above"),
        ({"type": "ValidationError", "message": PYDANTIC}, 1,
         "Value error, The repository /models/kimi contains custom code", "see its log"),
        ({"type": "ValidationError", "message": OF_A_FIELD}, 1,
         "ValidationError: block_size: Input should be 16", "see its log"),
        ({"type": "ValueError", "message": "set trust_remote_code=True"}, 1,
         "set trust_remote_code", "add --trust-remote-code"),
        ({"type": "CaptureError", "message": "none of 3 prompts fits", "fix": "give shorter"}, 1,
         "none of 3 prompts fits", "give shorter"),
        (None, 1, "ended with code 1", "see its log"),
        (None, -9, "signal 9, which the system sends when memory runs out", "see its log"),
    ],
)  # fmt: skip
def test_a_target_that_does_not_run(
    error: dict[str, Any] | None,
    code: int,
    fact: str,
    fix: str,
    fails_with: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fails_with(error, code)
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(LLAMA), "--json"])
    said = capsys.readouterr()
    (finding,) = json.loads(said.out)["findings"]
    assert code == 2
    assert finding["id"] == "diagnose-offline-engine"
    assert fact in finding["fact"]
    assert fix in finding["fix"]
    # What it would take was said before.
    assert "hidden states x 16,384 tokens x 96 x 2 bytes" in said.err


@pytest.mark.parametrize(
    ("more", "option"),
    [(["--max-model-len", "130"], "--max-model-len"),
     (["--tokens", "300", "--budget", "256"], "--budget")],
)  # fmt: skip
def test_no_answer_can_fit(
    more: list[str],
    option: str,
    fails_with: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That is said before a load of half an hour, not after it."""
    fails_with(None)
    monkeypatch.setattr(run, "run_capture", lambda *args: pytest.fail("it was loaded"))
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(LLAMA), *more])
    page = capsys.readouterr().out
    in_text(code, page, "diagnose-too-few-drafts")
    assert f"raise {option}" in page


def test_no_key_of_the_user_stays_in_a_file(
    fails_with: Callable[..., None], tmp_path: Path
) -> None:
    fails_with(None)
    cli.main(["diagnose", "--offline", str(TARGET), *words(LLAMA), "--hf-token", "hf_secret",
              "--keep", str(tmp_path / "kept")])  # fmt: skip
    assert not [f for f in (tmp_path / "kept").iterdir() if "hf_secret" in f.read_text()]


def test_whose_hidden_states_were_kept(command: Command, captured: Path, tmp_path: Path) -> None:
    """A sister target's have the same shape."""
    found = json.loads((captured / "captured.json").read_text())
    (tmp_path / "captured.json").write_text(json.dumps({**found, "target": "moonshotai/K"}))
    for text in found["texts"]:
        (tmp_path / text["file"]).symlink_to(captured / text["file"])
    _, report = command(LLAMA, "--captured", str(tmp_path))
    assert report["how"].endswith("kept of moonshotai/K")


def test_variables_in_front_of_the_command(
    fails_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is pasted as it stands in a script."""
    fails_with(None)
    given: dict[str, str] = {}

    def capture(job: str, environ: dict[str, str]) -> int:
        given.update(environ)
        return 1

    monkeypatch.setattr(run, "run_capture", capture)
    cli.main(["diagnose", "--offline", "VLLM_MLA_DISABLE=1", "vllm", "serve", str(TARGET),
              *words(LLAMA)])  # fmt: skip
    assert given == {"VLLM_MLA_DISABLE": "1"}


# -------------------------------------------------------------------------------------- options


def test_options_and_the_rest_is_vllms() -> None:
    options = run.options_of(
        ["MODEL", "--tokens", "64", "-tp", "8", "--json", "--keep=/x", "--budget", "4096"]
    )
    assert options.words == ("MODEL", "-tp", "8")
    assert (options.tokens, options.budget, options.json) == (64, 4096, True)
    assert options.keep == Path("/x")


@pytest.mark.parametrize(
    ("given_words", "said"),
    [
        (["M", "--tokens"], "--tokens needs a value"),
        (["M", "--tokens", "many"], "whole number"),
        (["M", "--budget", "1"], "256 to"),
        (["M", "--captured", "/nowhere"], "captured.json"),
        (["M", "--prompts", "/nowhere"], "/nowhere"),
        (["M", "--url", "http://localhost:8000"], "--url is for a server that runs"),
        (["M", "--drafter=D"], "the drafter of --speculative-config"),
        (["M", "--device", "gpu"], "neither cpu nor a GPU"),
        (["M", "--device", "meta"], "neither cpu nor a GPU"),
        (["M", "--device", "cuda:99"], "leave it out"),
        (["M", "--write", __file__], "it is a file"),
        (["M", "--keep", __file__ + "/below"], "is a file"),
        (["M", "--write", str(Path(__file__).parent)], "it is not empty"),
    ],
)
def test_wrong_options(given_words: list[str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        run.options_of(given_words)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([], "name the target"),
        (["M"], "--speculative-config"),
        (["M", "--speculative-config", '{"method": "ngram"}'], "no EAGLE-3 drafter"),
        (["M", "--speculative-config", "{"], "JSON"),
        (
            ["M", "--speculative-config",
             '{"method": "eagle3", "model": "D", "num_speculative_tokens": 0}'],
            "num_speculative_tokens",
        ),
        (
            ["M", "--speculative-config",
             '{"method": "eagle3", "model": "D", "num_speculative_tokens": true}'],
            "num_speculative_tokens",
        ),
    ],
)  # fmt: skip
def test_wrong_commands(line: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["diagnose", "--offline", "--json", *line])
    assert code == cli.EXIT_USAGE
    assert said in capsys.readouterr().err


def test_prompts_of_a_pipe_are_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("a prompt\n"))
    writer.start()
    options = run.options_of(["M", "--prompts", str(pipe)])
    writer.join()
    assert [prompt.text for prompt in options.own_prompts] == ["a prompt"]


@pytest.mark.parametrize("given_length", ["-1", "auto"])
def test_a_length_that_is_left_to_vllm(
    given_length: str, fails_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_with(None)
    jobs: list[dict[str, Any]] = []

    def capture(job: str, environ: dict[str, str]) -> int:
        jobs.append(json.loads(Path(job).read_text()))
        return 1

    monkeypatch.setattr(run, "run_capture", capture)
    cli.main(["diagnose", "--offline", str(TARGET), *words(LLAMA), "--max-model-len",
              given_length])  # fmt: skip
    assert jobs[0]["max_model_len"] > 0


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", "--offline", "--help"]) == 0
    assert "--captured FOLDER" in capsys.readouterr().out
    assert cli.main(["diagnose", "--offline"]) == cli.EXIT_USAGE
