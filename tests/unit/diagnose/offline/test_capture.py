# SPDX-License-Identifier: Apache-2.0
"""The hooks, on a decoder with the interface of vLLM's; a real one is in tests/hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_kimi_eagle3.diagnose.offline import capture
from vllm_kimi_eagle3.diagnose.offline.capture import (
    ERROR,
    CaptureError,
    Job,
    Recorder,
    decoder_of,
    engine_arguments,
    main,
    prompt_tokens,
    within,
)

HIDDEN, LAYERS = 4, 3


class Layer(nn.Module):
    """Adds one to the residual stream, in vLLM's two parts, and writes into both in place."""

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None, scale: Any = None
    ) -> tuple[Tensor, Tensor]:
        residual = hidden_states.clone() if residual is None else residual.add_(hidden_states)
        return hidden_states.fill_(1.0), residual


class PPMissingLayer(nn.Module):
    """A layer that another stage has; vLLM's name of it."""


class Norm(nn.Module):
    """Named and called as vLLM's custom op."""

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        hidden, residual = args
        return 2 * (hidden + residual), residual


class Decoder(nn.Module):
    def __init__(self, here: range = range(LAYERS)) -> None:
        super().__init__()
        self.here = here
        self.layers = nn.ModuleList(
            Layer() if index in here else PPMissingLayer() for index in range(LAYERS)
        )
        self.norm = Norm() if LAYERS - 1 in here else PPMissingLayer()

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        for index in self.here:
            hidden, residual = self.layers[index](positions, hidden, residual, None)
        if isinstance(self.norm, Norm):
            hidden, _ = self.norm(hidden, residual)
        return hidden


def recorder_on(decoder: Decoder, wanted: set[int], final: bool = False) -> Recorder:
    recorder = Recorder(wanted, final)
    recorder.attach(decoder, LAYERS)
    return recorder


def streams(length: int) -> Tensor:
    return torch.arange(length).float()[:, None].expand(length, HIDDEN).clone()


def test_it_takes_what_enters_each_layer_and_leaves_the_last() -> None:
    decoder = Decoder()
    recorder = recorder_on(decoder, {0, 2, LAYERS}, final=True)
    recorder.begin(5)
    decoder(torch.arange(5), streams(5))
    found = recorder.end()
    assert set(found) == {0, 2, LAYERS, "final"}
    for index in (0, 2, LAYERS):
        assert torch.equal(found[index], streams(5) + index)
    assert torch.equal(found["final"], 2 * (streams(5) + LAYERS))


def test_a_prompt_in_parts_with_padding_behind() -> None:
    """What stands behind the tokens of a pass is left from another one, and may go on rising."""
    decoder = Decoder()
    recorder = recorder_on(decoder, {1})
    recorder.begin(6)
    decoder(torch.tensor([0, 1, 2, 3, 4, 5]), torch.cat((streams(3), 9 * streams(3))))
    decoder(torch.tensor([3, 4, 5, 6, 7]), streams(8)[3:])
    assert torch.equal(recorder.end()[1], streams(6) + 1)


def test_passes_outside_of_a_text_are_left_alone() -> None:
    decoder = Decoder()
    recorder = recorder_on(decoder, {1})
    decoder(torch.arange(4), streams(4))
    recorder.begin(2)
    decoder(torch.arange(2), streams(2))
    assert torch.equal(recorder.end()[1], streams(2) + 1)
    decoder(torch.arange(4), streams(4))


def test_a_token_that_was_not_seen_is_an_error() -> None:
    decoder = Decoder()
    recorder = recorder_on(decoder, {1})
    recorder.begin(6)
    decoder(torch.arange(4), streams(4))
    with pytest.raises(RuntimeError, match="4 of 6 tokens"):
        recorder.end()


def test_tokens_that_are_split_over_ranks_are_an_error() -> None:
    decoder = Decoder()
    recorder = recorder_on(decoder, {1})
    recorder.begin(6)
    with pytest.raises(RuntimeError, match="take expert and data parallelism out"):
        decoder(torch.arange(6), streams(3))


def test_pipeline_stages_have_what_is_theirs() -> None:
    first, last = Decoder(range(2)), Decoder(range(2, LAYERS))
    of_first, of_last = (recorder_on(d, {0, 1, 2, LAYERS}) for d in (first, last))
    for recorder in (of_first, of_last):
        recorder.begin(3)
    first(torch.arange(3), streams(3))
    last(torch.arange(3), torch.ones(3, HIDDEN), streams(3) + 1)
    assert set(of_first.end()) == {0, 1}
    found = of_last.end()
    assert set(found) == {2, LAYERS}
    assert torch.equal(found[2], streams(3) + 2)


def test_the_decoder_is_found_by_its_layers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision = nn.Module()
            self.vision.layers = nn.ModuleList([nn.Identity()])
            self.language_model = nn.Module()
            self.language_model.model = Decoder()

    model = Model()
    assert decoder_of(model, LAYERS) is model.language_model.model
    with pytest.raises(RuntimeError, match="no decoder with 7 layers"):
        decoder_of(model, 7)


# ------------------------------------------------------------------------------------------ the job


def job(**changes: Any) -> Job:
    return Job(
        **{
            "model": "target",
            "folder": ".",
            "num_layers": LAYERS,
            "layers": [1, 2],
            "final": False,
            "tokens": 16,
            "behind": 2,
            "budget": 200,
            **changes,
        }
    )


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    prompts = [{"kind": "chat", "text": "x"}]
    one = job(prompts=prompts, long=[512], options={"tensor-parallel-size": 2})
    one.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == one


def test_what_of_a_command_the_target_gets() -> None:
    known = ["tensor_parallel_size", "dtype", "data_parallel_size", "max_model_len",
             "speculative_config", "skip_mm_profiling", "worker_extension_cls"]  # fmt: skip
    options = {
        "tensor-parallel-size": 8,
        "dtype": "bfloat16",
        "data-parallel-size": 4,
        "max-model-len": 262144,
        "speculative-config": {"method": "eagle3"},
        "worker-extension-cls": "theirs",
        "port": 8000,
    }
    prompts = [{"token_ids": [1] * 40}, {"text": "ten letters"}]
    arguments = engine_arguments(job(options=options, prompts=prompts, budget=2000), known)
    assert arguments == {
        "model": "target",
        "tensor_parallel_size": 8,
        "dtype": "bfloat16",
        # A text's characters and a template's tokens, an answer and what stands behind.
        "max_model_len": 11 + 1024 + 16 + 2 + 2,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "worker_extension_cls": "vllm_kimi_eagle3.diagnose.offline.capture.Worker",
        "skip_mm_profiling": True,
    }
    assert engine_arguments(job(prompts=prompts, max_model_len=64), [])["max_model_len"] == 64
    # A text that is longer than all may be together is left out, and asks for no room.
    assert engine_arguments(job(prompts=prompts), [])["max_model_len"] == 201


def test_the_extension_has_no_name_that_a_worker_may_have() -> None:
    from vllm_kimi_eagle3.diagnose.offline.capture import Worker

    assert all(name.startswith(("__", "kimi_eagle3_")) for name in dir(Worker))


def test_texts_stay_within_the_budget_and_the_longest_request() -> None:
    prompts = [("", [1] * n, False) for n in (30, 300, 50, 40, 0, 20)]
    given = [{"token_ids": tokens} for _, tokens, _ in prompts]
    assert within(job(prompts=given), prompts) == [0, 2, 3]
    assert within(job(prompts=given, budget=1000, max_model_len=64), prompts) == [0, 3, 5]


class Tokenizer:
    chat_template: str | None = "template"

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return f"<{messages[0]['content']}>"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]


def test_prompts_are_chats_where_there_is_a_template() -> None:
    tokenizer = Tokenizer()
    assert prompt_tokens(tokenizer, {"text": "a"}) == [ord("<"), ord("a"), ord(">")]
    tokenizer.chat_template = None
    assert prompt_tokens(tokenizer, {"text": "a"}) == [ord("a")]
    assert prompt_tokens(tokenizer, {"token_ids": [5, 6]}) == [5, 6]


def test_what_went_wrong_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    one = job(folder=str(tmp_path))
    one.write(tmp_path / "job.json")
    assert main(str(tmp_path / "job.json")) == 1
    assert json.loads((tmp_path / ERROR).read_text())["type"] == "ModuleNotFoundError"


@pytest.mark.parametrize(
    ("error", "traced"),
    [
        (ValueError("Unknown quantization method: fp8x"), False),
        (CaptureError("none fits", "give shorter ones"), False),
        (RuntimeError("a defect"), True),
    ],
)
def test_bad_input_is_no_traceback(
    error: Exception,
    traced: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(one: Job) -> None:
        raise error

    monkeypatch.setattr(capture, "run", fails)
    job(folder=str(tmp_path)).write(tmp_path / "job.json")
    assert main(str(tmp_path / "job.json")) == 1
    assert ("Traceback" in capsys.readouterr().err) is traced
    assert json.loads((tmp_path / ERROR).read_text())["message"] == str(error)


def test_workers_import_the_standard_library_only() -> None:
    code = (
        "import sys; import vllm_kimi_eagle3.diagnose.offline.capture; "
        "print([m for m in ('torch', 'vllm', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
