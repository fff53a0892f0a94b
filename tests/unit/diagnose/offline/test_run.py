# SPDX-License-Identifier: Apache-2.0
"""The command, from the hidden states on: each mistake gets its name and its setting, and the
setting gives the healthy counts back. (The target's part is in tests/hosts.)"""

from __future__ import annotations

import json
import shlex
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
        code = cli.main(["diagnose", "--offline", str(TARGET), *words(drafter, k), *more, *given])
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


# ------------------------------------------------------------------------------- what cannot be


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
    assert ids(report) == ["drafter-aux-contradiction"]
    assert reading(report, "best")["aux_hidden_state_layers"] == [2, 4, 5]


def test_a_target_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Here for want of a vLLM; its own error is in the finding."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]))
    code = cli.main(["diagnose", "--offline", str(TARGET), *words(LLAMA), "--keep",
                     str(tmp_path / "kept")])  # fmt: skip
    said = capfd.readouterr()
    in_text(code, said.out, "diagnose-offline-engine")
    assert "ModuleNotFoundError" in said.out
    # What it would take was said before.
    assert "hidden states x 16,384 tokens x 96 x 2 bytes" in said.err


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
    ],
)  # fmt: skip
def test_wrong_commands(line: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["diagnose", "--offline", "--json", *line])
    assert code == cli.EXIT_USAGE
    assert said in capsys.readouterr().err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", "--offline", "--help"]) == 0
    assert "--captured FOLDER" in capsys.readouterr().out
    assert cli.main(["diagnose", "--offline"]) == cli.EXIT_USAGE
