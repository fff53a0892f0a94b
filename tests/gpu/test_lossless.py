# SPDX-License-Identifier: Apache-2.0
"""Speculation changes no token, with the plugin's attention back-end and drafting, and vLLM's own.

    python -m pytest tests/gpu/test_lossless.py [-k "fp8 and on"]     # vLLM 0.18 to 0.33 on CUDA
    TOGETHER=12 python -m pytest tests/gpu/test_lossless.py           # engines that start at once
    LOSSLESS=rows.jsonl ...                                           # a row per run

Not part of CI, which has no GPU. The trained tiny pair with the real Kimi's head sizes
(tests/assets/widen.py, wide_llama.py) runs on TRITON_MLA: bf16 and fp8 KV, compiled, with CUDA
graphs, prefix caching and chunked prefill, and one request, four, and 48 of very different lengths
of which 32 run at a time, so that requests join and leave between steps.

In bfloat16 an argmax can tip over where two logits are close, and does so as the sizes of batches
differ, so texts of two runs part, whoever serves. What is compared is therefore every single token:
that which the float32 reference gives for the very same prefix, and by how many logits the token
taken is below it. vLLM without drafts and without the plugin's back-end is the measure of how often
and how far rounding alone goes; no other run may go further.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import rows
from benchmarks.gpu import gpu_facts
from tests.assets.variants import load_prompts
from tests.assets.widen import write_wide_pair
from tests.gpu.wide_llama import widen_llama
from tests.hosts.harness import LLAMA_DRAFTER, at_least
from tests.reference.target import load_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROOT = Path(__file__).parents[2]
K = 3
PATCH = "mla-attention"
# Of tokens that are not the reference's, and of the logits that they are below it: how many times
# as much as stock's without drafts, whose own figures move with the sizes of its batches.
MOST_OTHERS, FURTHEST = 1.5, 1.5
# Of accepted drafts a step, against stock's.
FEWEST_ACCEPTED = 0.85
# The same by the plugin's drafting, against vLLM's own with the same attention.
FEWEST_BY_DRAFTING = 0.95
RUNNING = 32
# What the back-end's line in the log says, and those of the drafting, on the V1 and the V2 runner.
SERVES = "serves TRITON_MLA: decode steps"
REPLICATED = "vllm-kimi-eagle3: replicated drafter: "
DRAFTS = ("drafting: the plugin's loop serves", "drafting: the drafter's passes of up to")


def waves() -> list[list[dict[str, Any]]]:
    """Requests cut from the prompts: from 3 tokens to 480, with common beginnings among them."""
    texts = [prompt["token_ids"] for prompt in load_prompts()]
    end_to_end = [token for text in texts for token in text]
    many = []
    for number in range(48):
        text = texts[number % 8]
        length = (3, 17, 33, 64, 130, 250, 480, 40)[(number // 8 + number) % 8]
        tokens = (text + end_to_end)[:length]
        many.append({"tokens": tokens, "max_tokens": 5 + (number * 37) % 91})
    four = [{"tokens": texts[n], "max_tokens": 96 - 20 * n} for n in range(4)]
    return [[{"tokens": texts[5], "max_tokens": 96}], four, many]


@dataclass(frozen=True)
class Run:
    """An engine.

    Attributes:
        kv: the cache's dtype.
        ours: on or off: the plugin's attention.
        drafter: none, llama or mla.
        drafting: on or off: the plugin's drafting.
        ranks: of tensor parallelism, each with a GPU.
        replicated: the drafter is whole on each rank.
    """

    kv: str = "auto"
    ours: str = "on"
    drafter: str = "none"
    drafting: str = "off"
    ranks: int = 1
    replicated: bool = False

    def __str__(self) -> str:
        words = [self.kv, self.ours, self.drafter, self.drafting]
        words += [f"{self.ranks}-ranks"] * (self.ranks > 1) + ["replicated"] * self.replicated
        return "-".join(words)


class Engines:
    """The runs of this session, each made once; those `wanted` TOGETHER=12 at a time."""

    def __init__(self, folder: Path, wanted: Iterable[Run] = ()) -> None:
        self.folder = folder
        self.target, self.mla_drafter = write_wide_pair(folder / "pair")
        self.llama_drafter = widen_llama(LLAMA_DRAFTER, folder / "pair" / LLAMA_DRAFTER.name)
        together = int(os.environ.get("TOGETHER", "1"))
        self.pool = ThreadPoolExecutor(together)
        self.runs: dict[Run, Future[dict[str, Any]]] = {}
        if together > 1:
            for run in wanted:
                self.begin(run)

    def begin(self, run: Run) -> Future[dict[str, Any]]:
        """A run that may have to wait for its turn."""
        if run not in self.runs:
            self.runs[run] = self.pool.submit(self.start, run)
        return self.runs[run]

    def run(self, run: Run) -> dict[str, Any]:
        """What `lossless_probe.py` saw."""
        return self.begin(run).result()

    def start(self, run: Run) -> dict[str, Any]:
        engine: dict[str, Any] = {
            "model": str(self.target),
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "max_num_seqs": RUNNING,
            # Longer prompts are prefilled in chunks, beside others' decodes.
            "max_num_batched_tokens": 192,
            "block_size": 64,
            "enable_prefix_caching": True,
            "trust_remote_code": True,
            "disable_log_stats": False,
            "seed": 0,
            # Not what is left of the memory, which engines beside this one change while it looks.
            "gpu_memory_utilization": 0.02,
            "kv_cache_memory_bytes": 512 << 20,
            "kv_cache_dtype": run.kv,
            "attention_backend": "TRITON_MLA",
            "additional_config": {"kimi_eagle3": {"drafting": run.drafting == "on"}},
            "tensor_parallel_size": run.ranks,
        }
        if run.drafter != "none":
            folder = self.mla_drafter if run.drafter == "mla" else self.llama_drafter
            speculative: dict[str, Any] = {
                "method": "eagle3", "model": str(folder), "num_speculative_tokens": K,
            }  # fmt: skip
            if at_least(0, 21):  # Before, the target's is the drafter's.
                speculative["attention_backend"] = (
                    "TRITON_MLA" if run.drafter == "mla" else "FLASH_ATTN"
                )
            if run.replicated:
                speculative["draft_tensor_parallel_size"] = 1
            engine["speculative_config"] = speculative
        folder = self.folder / str(run)
        folder.mkdir()
        environment = {
            **os.environ,
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        }
        if run.ours == "off":
            environment["VLLM_KIMI_EAGLE3_DISABLE"] = PATCH
        job, out = folder / "job.json", folder / "out.json"
        job.write_text(json.dumps({"engine": engine, "waves": waves(), "recorded": 1}))
        command = [sys.executable, "-m", "tests.gpu.lossless_probe", str(job), str(out)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, text=True, check=False, timeout=400,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        (folder / "log.txt").write_text(done.stdout)
        assert out.exists(), done.stdout[-6000:]
        assert (SERVES in done.stdout) == (run.ours == "on"), done.stdout[-6000:]
        drafts = any(line in done.stdout for line in DRAFTS)
        assert drafts == (run.drafting == "on"), done.stdout[-6000:]
        assert (REPLICATED in done.stdout) == run.replicated, done.stdout[-6000:]
        result: dict[str, Any] = json.loads(out.read_text())
        print(run, result["spec_decode"], end=" ")
        print("graphs a forward:", result["graphs"], "a proposal:", result["drafting_graphs"])
        return result


def runs_of(item: Any) -> Iterator[Run]:
    """What a test needs."""
    one = Run(**{"drafter": "mla", **item.callspec.params})
    yield Run(one.kv, "off")
    yield Run(one.kv, one.ours)
    if one.drafter != "llama" or at_least(0, 21):
        yield one
        if "accepted" in item.name:
            yield Run(one.kv, "off", one.drafter)
            yield Run(one.kv, "on", one.drafter)


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    mine = [item for item in request.session.items if item.path == Path(__file__)]
    wanted = [run for item in mine for run in runs_of(item)]
    return Engines(tmp_path_factory.mktemp("lossless"), wanted)


def judged(engines: Engines, one: Run) -> dict[str, Any]:
    """Tokens of a run, how many of them are not the reference's for their prefix, and how many
    logits the furthest of those is below it."""
    run = engines.run(one)
    if "judged" not in run:
        reference = load_target(engines.target)
        gaps = []
        for wave, outputs in zip(waves(), run["waves"], strict=True):
            for request, output in zip(wave, outputs, strict=True):
                assert len(output) == request["max_tokens"]
                tokens = torch.tensor(request["tokens"] + output)
                with torch.no_grad():
                    logits = reference(tokens[:-1]).logits[len(request["tokens"]) - 1 :]
                taken = logits.gather(1, tokens[len(request["tokens"]) :, None])[:, 0]
                gaps.append(logits.max(1).values - taken)
        gap = torch.cat(gaps)
        plain = engines.run(Run(one.kv, one.ours, ranks=one.ranks))
        run["judged"] = {
            "tokens": len(gap),
            "others": int((gap > 0).sum()),
            "furthest": round(float(gap.max()), 3),
            "same_texts_as_without_drafts": sum(
                text == other
                for pair in zip(run["waves"], plain["waves"], strict=True)
                for text, other in zip(*pair, strict=True)
            ),
            "texts": len(gaps),
        }
        print(one, run["judged"])
        if "LOSSLESS" in os.environ:
            about = {**asdict(one), "k": K, "running": RUNNING}
            names = ("judged", "spec_decode", "graphs", "drafting_graphs")
            about |= {name: run[name] for name in names}
            rows.append(Path(os.environ["LOSSLESS"]), {**gpu_facts(), **about})
    found: dict[str, Any] = run["judged"]
    return found


def assert_lossless(engines: Engines, one: Run, measure: Run) -> None:
    """A run's tokens are as much the reference's as those of the run that is the measure."""
    wanted = judged(engines, measure)
    assert wanted["others"] < 0.025 * wanted["tokens"], wanted
    found = judged(engines, one)
    assert found["others"] <= MOST_OTHERS * wanted["others"], (found, wanted)
    assert found["furthest"] <= FURTHEST * wanted["furthest"], (found, wanted)


def accepted(engines: Engines, run: Run) -> float:
    """Drafts a step."""
    counts = engines.run(run)["spec_decode"]
    return float(counts["num_accepted_tokens"] / counts["num_drafts"])


KV = pytest.mark.parametrize("kv", ["auto", "fp8"])
DRAFTING = pytest.mark.parametrize("drafting", ["on", "off"])


@KV
@pytest.mark.parametrize(
    ("ours", "drafter", "drafting"),
    [
        *(("on", drafter, drafting) for drafter in ("llama", "mla") for drafting in ("on", "off")),
        *(("off", drafter, "off") for drafter in ("llama", "mla")),
        ("on", "none", "off"),
        ("off", "none", "off"),
    ],
)
def test_tokens_are_the_references(
    engines: Engines, kv: str, ours: str, drafter: str, drafting: str
) -> None:
    if drafter == "llama" and not at_least(0, 21):
        pytest.skip("before 0.21 TRITON_MLA is applied to a Llama drafter too, which refuses")
    one, measure = Run(kv, ours, drafter, drafting), Run(kv, "off")
    if ours == "off" and drafter != "none":
        # An H200, 0.26.0: five times as many others as without drafts, up to 8 logits below.
        found, wanted = (judged(engines, run) for run in (one, measure))
        pytest.xfail(f"stock's verify steps are not this project's: {found}, without: {wanted}")
    assert_lossless(engines, one, measure)


@KV
@DRAFTING
@pytest.mark.parametrize("drafter", ["llama", "mla"])
def test_as_many_drafts_are_accepted(
    engines: Engines, kv: str, drafter: str, drafting: str
) -> None:
    if drafter == "llama" and not at_least(0, 21):
        pytest.skip("before 0.21 TRITON_MLA is applied to a Llama drafter too, which refuses")
    stock = accepted(engines, Run(kv, "off", drafter))
    assert stock > 0.5
    found = accepted(engines, Run(kv, "on", drafter, drafting))
    assert found > FEWEST_ACCEPTED * stock, (found, stock)
    if drafting == "on":
        without = accepted(engines, Run(kv, "on", drafter))
        assert found > FEWEST_BY_DRAFTING * without, (found, without)


@KV
@DRAFTING
def test_verify_steps_are_whole_graphs(engines: Engines, kv: str, drafting: str) -> None:
    """Of a wave of four, all forwards without a prefill replay one graph, as many as have one; and
    with the plugin's loop all proposals after such a forward do."""
    # Upstream's own loop is there from 0.29 on.
    by_loop = drafting == "on" and not at_least(0, 29)
    assert_whole_graphs(engines.run(Run(kv, "on", "mla", drafting)), by_loop=by_loop)


def assert_whole_graphs(run: dict[str, Any], *, by_loop: bool) -> None:
    """Of the recorded wave's forwards without a prefill, and of the proposals after them."""
    prefills = -(-sum(len(request["tokens"]) for request in waves()[1]) // 192) + 1
    for name in ("graphs", *(["drafting_graphs"] if by_loop else [])):
        graphs = dict(run[name])
        assert sum(count for replays, count in graphs.items() if replays != 1) <= prefills, graphs
        assert graphs.get(1, 0) > 2 * prefills, graphs
