# SPDX-License-Identifier: Apache-2.0
"""`diagnose --offline` with a real target: one load, then every way to break a drafter.

The hidden states that the hooks take are those of the plain-torch reference on every runner, and
what is scored on them is what a server of this host counts. Each mistake is named, and an engine
with the printed setting has the healthy counts again.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.assets import variants
from tests.reference.target import load_target
from vllm_kimi_eagle3 import cli

from . import harness
from .conftest import RunJobs, expected_counts
from .harness import LLAMA_DRAFTER, MLA_DRAFTER, TARGET
from .matrix import scenario

ONE_HIGHER = {"eagle_config": {**variants.EAGLE_CONFIG, variants.IDS: [3, 5, 6]}}
# From each of these tokens of the corpus on a prompt of so many.
STRIDE, PROMPT = 160, 64
# The V2 runner without Triton on the CPU: see offline.py, whose stand-in every process needs here.
STAND_IN = """
import os
if os.environ.get("TRITON_CPU_STAND_IN") == "1":
    import triton.backends
    triton.backends.backends.setdefault("cpu", triton.backends.backends["nvidia"])
"""


def command(drafter: Path, *more: str, k: int = 3, target: Path = TARGET) -> list[str]:
    value = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": k}
    return ["diagnose", "--offline", str(target), "--speculative-config", json.dumps(value),
            "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16",
            "--trust-remote-code", "--seed", "0", "--json", *more]  # fmt: skip


Ask = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from a second one, and lose much beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs the command; returns its exit code and its JSON."""

    def call(*words: str) -> tuple[int, dict[str, Any]]:
        code = cli.main(list(words))
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture(scope="session")
def prompt_file(session_folder: Path, prompts: list[list[int]]) -> Path:
    """The prompts of `expected.json`, and more of the text that the pair was trained on."""
    from tokenizers import Tokenizer

    texts = [harness.ASSETS.parents[1] / "LICENSE", *sorted((harness.ASSETS / "corpus").iterdir())]
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    corpus = "\n".join(text.read_text(encoding="utf-8") for text in texts)
    tokens = tokenizer.encode(corpus, add_special_tokens=False).ids
    starts = range(0, len(tokens) - PROMPT, STRIDE)
    every = [*prompts, *(tokens[start : start + PROMPT] for start in starts)]
    file = session_folder / "prompts.json"
    file.write_text(json.dumps([{"token_ids": ids, "ignore_eos": True} for ids in every]))
    return file


def capture(
    ask: Ask, folder: Path, prompt_file: Path, monkeypatch: pytest.MonkeyPatch, cache: Path,
    *more: str, drafter: Path = LLAMA_DRAFTER, pair_target: Path = TARGET, **env: str,
) -> tuple[int, dict[str, Any]]:  # fmt: skip
    """Runs the whole command, with a target of this host."""
    ranks = 2 if "--tensor-parallel-size" in more else 1
    environment = harness.environment(cache, tensor_parallel_size=ranks, **env)
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        given = ["--prompts", str(prompt_file), "--tokens", "96", "--keep", str(folder)]
        return ask(*command(drafter, *given, *more, target=pair_target))


def kept_by(folder: Path) -> list[dict[str, Any]]:
    texts: list[dict[str, Any]] = json.loads((folder / "captured.json").read_text())["texts"]
    return texts


def assert_the_references_states(folder: Path, expected: dict[str, Any]) -> None:
    """Tokens and hidden states of the first texts are the reference's."""
    target = load_target(TARGET)
    for text, tokens in zip(kept_by(folder), expected["output_token_ids"], strict=False):
        whole = text["token_ids"]
        assert whole[text["prompt_tokens"] :][:96] == tokens
        states = torch.load(folder / text["file"], weights_only=True)
        with torch.no_grad():
            out = target(torch.tensor(whole), None, tuple(range(9))).aux_hidden_states
        for index, stream in enumerate(out.chunk(9, dim=-1)):
            if index in states:
                assert torch.allclose(states[index], stream, atol=1e-3)
        if "final" in states:
            final = target(torch.tensor(whole), None, None).aux_hidden_states
            assert torch.allclose(states["final"], final, atol=1e-3)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test leaves the hidden states."""
    return tmp_path_factory.mktemp("kept")


@scenario("diagnose --offline")
def test_a_healthy_pair(
    ask: Ask,
    kept: Path,
    prompt_file: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
    host: str,
) -> None:
    code, report = capture(ask, kept, prompt_file, monkeypatch, cache)
    assert code == 0, report
    assert report["findings"] == []
    assert report["vllm"].startswith(host)
    assert report["runner"] == "V1"
    assert report["head"].startswith("nothing or little to correct")
    assert_the_references_states(kept, expected)


@pytest.fixture(scope="module")
def first_texts(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of `expected.json` alone."""
    found = json.loads((kept / "captured.json").read_text())
    found["texts"] = found["texts"][: len(variants.load_prompts())]
    folder = tmp_path_factory.mktemp("first")
    for text in found["texts"]:
        (folder / text["file"]).symlink_to(kept / text["file"])
    (folder / "captured.json").write_text(json.dumps(found))
    return folder


@scenario("diagnose --offline")
@pytest.mark.parametrize("drafter", [LLAMA_DRAFTER, MLA_DRAFTER], ids=lambda d: d.name)
def test_it_counts_what_a_server_counts(drafter: Path, ask: Ask, first_texts: Path) -> None:
    """The reference's counts, which are those of this host's engines (test_parity.py)."""
    _, report = ask(*command(drafter, "--captured", str(first_texts)))
    counts = expected_counts(drafter)
    assert report["drafts"] == counts["num_drafts"]
    assert report["accepted"] == counts["num_accepted_tokens_per_pos"]
    shifted = variants.expected_run(drafter.name, aux_layer_ids=(3, 5, 6))
    (row,) = [r for r in report["readings"] if r["aux_hidden_state_layers"] == [3, 5, 6]]
    assert row["drafts"] == shifted["num_drafts"]
    assert row["accepted"] == shifted["num_accepted_tokens_per_pos"]


def another_head(tensors: variants.Tensors) -> variants.Tensors:
    """The MLA drafter's head in the Llama drafter."""
    head = variants._read_tensors(MLA_DRAFTER)["lm_head.weight"]
    return {**variants._full_vocabulary(tensors), "lm_head.weight": head.clone()}


def edited(**edit: Any) -> Callable[[Path], Path]:
    return lambda folder: variants.edit_drafter(LLAMA_DRAFTER, folder, **edit)


def lost_head(folder: Path) -> Path:
    """A drafter with a head of its own, and without it: the target's is used."""
    right = variants.write_variant("llama-own-head", folder.with_name("right"))
    return variants.edit_drafter(right, folder, tensors=variants._drop("lm_head."))


FULL = {"draft_vocab_size": variants.VOCAB_SIZE}
AUX, NORMS, ROPE, D2T, HEAD = (
    f"diagnose-offline-{name}" for name in ("aux-layers", "norms", "rope", "d2t", "own-part")
)
# What is broken, further words of the command, and the findings.
BROKEN: dict[str, tuple[Callable[[Path], Path], list[str], set[str]]] = {
    "aux layers + 1": (edited(config=ONE_HIGHER), [], {AUX}),
    "aux layers - 1": (
        lambda folder: LLAMA_DRAFTER,
        ["--additional-config", '{"kimi_eagle3": {"aux_hidden_state_layers": [1, 3, 4]}}'],
        {AUX},
    ),
    "norm_output": (edited(tensors=variants._norm_output), [], {NORMS}),
    "rope theta": (edited(config={"rope_theta": 10_000.0}), [], {ROPE}),
    "d2t": (edited(tensors=variants._drop("d2t")), [], {D2T, "drafter-tensor-missing"}),
    "head": (edited(config=FULL, tensors=another_head), [], {HEAD}),
    "no head": (lost_head, [], {HEAD, "diagnose-offline-none-fits"}),
}
# What no setting brings back.
LOST = {"head", "no head"}
# The drafter that has the healthy counts, if it is not the committed one.
HEALTHY = {"norm_output": "llama-norm-output"}


@pytest.fixture(scope="module")
def repaired() -> dict[str, tuple[Path, list[str]]]:
    """The copies that the command wrote, and the flag to use with them."""
    return {}


@scenario("diagnose --offline")
@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_is_named(
    name: str,
    ask: Ask,
    kept: Path,
    tmp_path_factory: pytest.TempPathFactory,
    repaired: dict[str, tuple[Path, list[str]]],
) -> None:
    make, more, findings = BROKEN[name]
    folder = tmp_path_factory.mktemp("drafter")
    copy = folder / "copy"
    words = command(make(folder / "broken"), *more, "--captured", str(kept))
    code, report = ask(*words, "--write", str(copy))
    assert code == 1
    found = {finding["id"] for finding in report["findings"]} - {"drafter-aux-unsure"}
    assert found == findings, report["findings"]
    assert all(finding["fix"] for finding in report["findings"])
    if name not in LOST:
        assert report["head"].startswith("nothing or little to correct")
        repaired[name] = copy, shlex.split(report["additional_config"])


@scenario("diagnose --offline")
def test_the_setting_restores_the_counts(
    repaired: dict[str, tuple[Path, list[str]]],
    run_jobs: RunJobs,
    prompts: list[list[int]],
    expected: dict[str, Any],
) -> None:
    """In this host's own engine."""
    assert set(repaired) == BROKEN.keys() - LOST
    quick = {"TORCH_COMPILE_DISABLE": "1"}
    if not harness.at_least(0, 27):
        quick["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    jobs = [
        {
            "engine": harness.engine_arguments(
                drafter=copy,
                skip_mm_profiling=True,
                distributed_executor_backend="uni",
                **({"additional_config": json.loads(flag[1])} if flag else {}),
            ),
            "prompts": prompts,
            "max_tokens": expected["max_tokens"],
        }
        for copy, flag in repaired.values()
    ]
    run = run_jobs("repaired drafters", jobs, env=quick)
    for name, result in zip(repaired, run.results, strict=True):
        assert "tokens" in result, (name, result)
        row = variants.expected_run(HEALTHY.get(name, LLAMA_DRAFTER.name))
        assert {c: result["spec_decode"][c] for c in harness.COUNTERS} == {
            c: row[c] for c in harness.COUNTERS
        }, name


@scenario("diagnose --offline")
def test_a_limit_of_length(ask: Ask, kept: Path) -> None:
    value = {"method": "eagle3", "model": str(LLAMA_DRAFTER), "max_model_len": 100}
    words = command(LLAMA_DRAFTER, "--captured", str(kept))
    words[words.index("--speculative-config") + 1] = json.dumps(value)
    code, report = ask(*words)
    assert code == 1
    (finding,) = report["findings"]
    assert finding["id"] == "diagnose-offline-length"
    assert 'take "max_model_len" out' in finding["fix"]


@scenario("diagnose --offline: quantised target")
def test_a_quantised_target(
    ask: Ask, prompt_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its hidden states are those that its kernels make: near those of the weights that it stands
    for, and far from those of another layer. A mistake is named as on the target itself."""
    pair_target = variants.write_quantised_target(tmp_path / "target")
    kept = tmp_path / "kept"
    code, report = capture(
        ask, kept, prompt_file, monkeypatch, cache, "--budget", "4000", pair_target=pair_target
    )
    assert code == 0, report
    spelled_out = load_target(variants.write_quantised_target(tmp_path / "same", spelled_out=True))
    for text in kept_by(kept)[:4]:
        states = torch.load(kept / text["file"], weights_only=True)
        with torch.no_grad():
            out = spelled_out(torch.tensor(text["token_ids"]), None, tuple(range(9)))
        streams = out.aux_hidden_states.chunk(9, dim=-1)
        for index, state in states.items():
            off = [float((state - s).norm() / s.norm()) for s in streams]
            assert off[index] < 0.1
            assert min(off[:index] + off[index + 1 :]) > 2 * off[index]
    drafter = variants.edit_drafter(LLAMA_DRAFTER, tmp_path / "broken", ONE_HIGHER)
    code, report = ask(*command(drafter, "--captured", str(kept), target=pair_target))
    assert code == 1
    assert AUX in {finding["id"] for finding in report["findings"]}
    assert json.loads(shlex.split(report["additional_config"])[1]) == {
        "kimi_eagle3": {"aux_hidden_state_layers": [2, 4, 5]}
    }


@scenario("diagnose --offline: tensor parallel")
def test_tensor_parallel(
    ask: Ask,
    first_texts: Path,
    prompt_file: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Two ranks: the hidden states are the reference's, and the table is that of one rank."""
    ranks = ["--tensor-parallel-size", "2", "--budget", "1400"]
    code, report = capture(ask, tmp_path / "kept", prompt_file, monkeypatch, cache, *ranks)
    assert code == 0, report
    assert_the_references_states(tmp_path / "kept", expected)
    assert len(kept_by(tmp_path / "kept")) == len(expected["output_token_ids"])
    _, of_one = ask(*command(LLAMA_DRAFTER, "--captured", str(first_texts)))
    assert table(report) == table(of_one)


def table(report: dict[str, Any]) -> list[tuple[str, int, list[int]]]:
    """Every reading with its counts."""
    return [(row["reading"], row["drafts"], row["accepted"]) for row in report["readings"]]


@scenario("diagnose --offline: V2 runner")
def test_the_v2_runner(
    ask: Ask,
    prompt_file: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    expected: dict[str, Any],
    tmp_path: Path,
) -> None:
    """And a drafter that reads the final hidden state."""
    drafter = variants.write_variant("llama-no-aux", tmp_path / "no-aux")
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**harness.V2_RUNNER, "PYTHONPATH": os.pathsep.join(path)}
    budget = ["--budget", "1400"]
    _, report = capture(
        ask, tmp_path / "kept", prompt_file, monkeypatch, cache, *budget, drafter=drafter, **env
    )
    assert report["runner"] == "V2", report
    assert_the_references_states(tmp_path / "kept", expected)
    row = variants.expected_variant("llama-no-aux")
    now = next(r for r in report["readings"] if r["now"])
    assert now["drafts"] == row["num_drafts"]
    assert now["accepted"] == row["num_accepted_tokens_per_pos"]
