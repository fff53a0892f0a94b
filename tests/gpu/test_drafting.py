# SPDX-License-Identifier: Apache-2.0
"""The drafting loop on a GPU: bfloat16, CUDA graphs, every proposal beside vLLM's own.

    TOGETHER=4 python -m pytest -s tests/gpu/test_drafting.py     # vLLM 0.20 to 0.28 on CUDA
    DRAFTING=rows.jsonl ...                                       # a row per engine

Not part of CI, which has no GPU. The trained tiny pair with the real Kimi's head sizes. Each
proposal of the plugin's is compared, in the running server, with that of stock's loop from the very
same inputs and cache (`drafting_probe.py`): eight requests, four, 48 of which 32 run at a time, so
that prompts, chunks of prompts and verify steps come in one batch and requests join and leave, some
that end at the length limit, and some that are sampled.

In bfloat16 a sum in another order tips an argmax where two logits are close. So a draft may be
another where stock's own logits of the two are that close, and nowhere else; after it the request's
further drafts are not compared, since they follow another token.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import rows
from tests.assets.variants import expected_run, load_expected, load_prompts
from tests.assets.widen import write_wide_pair
from tests.gpu.test_lossless import waves as many_waves
from tests.gpu.wide_llama import widen_llama
from tests.hosts.harness import LLAMA_DRAFTER, at_least

# Llama's drafts beside stock's are compared on a CPU host too, small: `-k "drafts_are_stocks and
# llama"`; see `Engines.start`.
ON_CPU = os.environ.get("DRAFTING_ON_CPU") == "1"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available() and not ON_CPU, reason="needs a GPU")

ROOT = Path(__file__).parents[2]
K = 3
RUNNING = 32
LONGEST = 640
# In logits, whose best are about 10: bfloat16 has steps of 1/16 there.
NEAR_TIE = 0.25
# Of requests in a wave's proposals: the share that may have a draft that is another, for a near
# tie; and how many may in a small wave.
MOST_TIED, FEW = 0.05, 3
# Of the reference's drafts, as in test_backport.py.
TOLERANCE = 0.03
MOST_MIB = 512
MOST_SECONDS = 15.0
SERVES = re.compile(
    r"drafting: the plugin's loop serves: (\d+) CUDA graphs for up to (\d+) requests, "
    r"([\d.]+) s, (\d+) MiB"
)
OWN = "drafting: vLLM's own loop serves"
WAVES = ("expected", "four", "many", "limit", "sampled")


def waves() -> dict[str, list[dict[str, Any]]]:
    """By name, requests as in test_lossless.py."""
    texts = [prompt["token_ids"] for prompt in load_prompts()]
    end_to_end = [token for text in texts for token in text]
    _, four, many = many_waves()
    limit = [
        {"tokens": (text + 2 * end_to_end)[: LONGEST - rest], "max_tokens": rest}
        for text, rest in zip(texts, (1, 2, 3, 4, 5, 9, 17, 40), strict=True)
    ]
    sampled = [
        {**request, "temperature": 0.8 if number % 2 else 0} for number, request in enumerate(many)
    ]
    most = load_expected()["max_tokens"]
    expected = [{"tokens": text, "max_tokens": most} for text in texts]
    return {
        "expected": expected, "four": four, "many": many, "limit": limit, "sampled": sampled[:16],
    }  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """What runs: a drafter, the setting (None leaves it out), keys of speculative_config, ranks."""

    drafter: str
    drafting: bool | None
    speculative: tuple[tuple[str, Any], ...] = ()
    ranks: int = 1

    def __str__(self) -> str:
        words = [self.drafter, {None: "auto", True: "on", False: "off"}[self.drafting]]
        words += [f"{self.ranks}-ranks"] * (self.ranks > 1)
        return "-".join([*words, *(f"{name}-{value}" for name, value in self.speculative)])


LLAMA = Engine("llama", None)
MLA = Engine("mla", True)
PROBABILISTIC = Engine("llama", None, (("draft_sample_method", "probabilistic"),))
OFF = Engine("llama", False)


@dataclass(frozen=True)
class Seen:
    """An engine's log and its waves, as `drafting_probe.py` wrote them, by name."""

    log: str
    waves: dict[str, Any]

    def proposals(self, *names: str) -> list[dict[str, Any]]:
        return [one for name in names or WAVES for one in self.waves[name]["proposals"]]


class Engines:
    """The engines of this session, each run once; TOGETHER=4 at a time, those `wanted` first."""

    def __init__(self, folder: Path, wanted: Iterable[Engine]) -> None:
        self.folder = folder
        self.target, self.mla = write_wide_pair(folder / "pair")
        self.llama = widen_llama(LLAMA_DRAFTER, folder / "pair" / LLAMA_DRAFTER.name)
        together = int(os.environ.get("TOGETHER", "1"))
        self.pool = ThreadPoolExecutor(together)
        self.runs: dict[Engine, Future[Seen]] = {}
        if together > 1:
            for engine in wanted:
                self.begin(engine)

    def begin(self, engine: Engine) -> Future[Seen]:
        if engine not in self.runs:
            self.runs[engine] = self.pool.submit(self.start, engine)
        return self.runs[engine]

    def run(self, engine: Engine) -> Seen:
        return self.begin(engine).result()

    def start(self, engine: Engine) -> Seen:
        given = waves()
        settings = {} if engine.drafting is None else {"drafting": engine.drafting}
        speculative: dict[str, Any] = {
            "method": "eagle3",
            "model": str(self.mla if engine.drafter == "mla" else self.llama),
            "num_speculative_tokens": K,
            **dict(engine.speculative),
        }
        arguments: dict[str, Any] = {
            "model": str(self.target),
            "dtype": "bfloat16",
            "max_model_len": LONGEST,
            "max_num_seqs": RUNNING,
            # Longer prompts are prefilled in chunks, beside others' verify steps.
            "max_num_batched_tokens": 192,
            "block_size": 64,
            "trust_remote_code": True,
            "disable_log_stats": False,
            "seed": 0,
            "gpu_memory_utilization": 0.02,
            "kv_cache_memory_bytes": 512 << 20,
            "additional_config": {"kimi_eagle3": settings} if settings else {},
            "speculative_config": speculative,
            "tensor_parallel_size": engine.ranks,
        }
        environment = {
            **os.environ,
            "VLLM_CACHE_ROOT": str(self.folder / str(engine) / "cache"),
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        }
        if ON_CPU:
            # As the host tests run it: eager, float32, the shim's attention. Forced, since what is
            # automatic needs graphs; few requests.
            arguments |= {
                "dtype": "float32", "enforce_eager": True, "max_num_seqs": 4,
                "additional_config": {"kimi_eagle3": {"drafting": True}},
            }  # fmt: skip
            for name in ("gpu_memory_utilization", "kv_cache_memory_bytes", "block_size"):
                del arguments[name]
            given = {
                name: [{**one, "max_tokens": min(one["max_tokens"], 8)} for one in wave[2:4]]
                for name, wave in given.items()
            }
            shim = str(ROOT / "tests" / "hosts" / "shim")
            environment |= {
                "CPU_PAGED_ATTENTION": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "",
                "VLLM_MLA_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), shim]),
            }  # fmt: skip
        else:
            arguments["attention_backend"] = "TRITON_MLA"
            if at_least(0, 21):
                speculative["attention_backend"] = (
                    "TRITON_MLA" if engine.drafter == "mla" else "FLASH_ATTN"
                )
        folder = self.folder / str(engine)
        folder.mkdir()
        job, out = folder / "job.json", folder / "out.json"
        job.write_text(json.dumps({"engine": arguments, "waves": list(given.values())}))
        command = [sys.executable, "-m", "tests.gpu.drafting_probe", str(job), str(out)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, text=True, check=False,
            timeout=900 if ON_CPU else 300, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        (folder / "log.txt").write_text(done.stdout)
        assert out.exists(), done.stdout[-6000:]
        seen = Seen(done.stdout, dict(zip(given, json.loads(out.read_text()), strict=True)))
        self.tell(engine, seen)
        return seen

    def tell(self, engine: Engine, seen: Seen) -> None:
        """A line, and a row if it is wanted."""
        row: dict[str, Any] = {"engine": str(engine), "k": K, "running": RUNNING}
        for name in WAVES:
            proposals = seen.proposals(name)
            compared = [one for one in proposals if "gaps" in one]
            gaps = [gap for one in compared for gap in one["gaps"]]
            row[name] = {
                "acts": dict(Counter(one["act"] for one in proposals)),
                "compared": sum(one["requests"] for one in compared),
                "same": sum(one["same"] for one in compared),
                "furthest": round(max(gaps, default=0.0), 3),
            }
        if found := SERVES.search(seen.log):
            row |= {"graphs": int(found[1]), "seconds": float(found[3]), "mib": int(found[4])}
        print(json.dumps(row))
        if "DRAFTING" in os.environ:
            from benchmarks.gpu import gpu_facts

            rows.append(Path(os.environ["DRAFTING"]), {**gpu_facts(), **row})


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("drafting"), (LLAMA, MLA, PROBABILISTIC, OFF))


EACH = pytest.mark.parametrize("engine", [LLAMA, MLA], ids=str)


@EACH
def test_the_loop_serves(engines: Engines, engine: Engine) -> None:
    """Without a word from the user (llama) and forced (mla), in little time and memory."""
    seen = engines.run(engine)
    found = SERVES.search(seen.log)
    assert found, [line for line in seen.log.splitlines() if "drafting" in line]
    graphs, requests, seconds, mib = int(found[1]), int(found[2]), float(found[3]), int(found[4])
    assert graphs > 2
    assert requests == RUNNING
    assert seconds < MOST_SECONDS
    assert mib < MOST_MIB
    acts = Counter(one["act"] for one in seen.proposals())
    assert acts["whole"] > 50, acts
    assert acts["tail"] > 5, acts
    assert acts["stock"] == 0, [one for one in seen.proposals() if one["act"] == "stock"]


@EACH
@pytest.mark.parametrize("wave", WAVES)
def test_drafts_are_stocks(engines: Engines, engine: Engine, wave: str) -> None:
    assert_stocks(engines.run(engine).proposals(wave))


def assert_stocks(proposals: list[dict[str, Any]]) -> None:
    """The drafts of some proposals are stock's, near ties apart."""
    # On the CPU the first proposal makes the loop, and is stock's.
    proposals = [one for one in proposals if one["act"]]
    assert proposals
    gaps = [gap for one in proposals for gap in one["gaps"]]
    requests = sum(one["requests"] for one in proposals)
    assert max(gaps, default=0.0) <= NEAR_TIE, sorted(gaps)
    assert len(gaps) <= max(FEW, MOST_TIED * requests), (len(gaps), requests)


@EACH
def test_batches_were_mixed(engines: Engines, engine: Engine) -> None:
    """A prompt beside verify steps, chunks of one, and requests that come and go."""
    proposals = engines.run(engine).proposals("many")
    tails = [one for one in proposals if one["act"] == "tail" and one["requests"] > 1]
    assert any(one["tokens"] > one["requests"] * (K + 1) for one in tails)
    assert len({one["requests"] for one in proposals}) > 8


@EACH
def test_as_many_drafts_as_the_reference(engines: Engines, engine: Engine) -> None:
    assert_counts(engines, engine)


def assert_counts(engines: Engines, engine: Engine) -> None:
    """As many drafts, and as many of them accepted, as the reference counts, which is one rank."""
    counts = engines.run(engine).waves["expected"]["spec_decode"]
    folder = engines.mla if engine.drafter == "mla" else engines.llama
    wanted = expected_run(folder.name, K)
    print(engine, counts, wanted)
    assert abs(counts["num_drafts"] - wanted["num_drafts"]) <= TOLERANCE * wanted["num_drafts"]
    assert abs(counts["num_accepted_tokens"] - wanted["num_accepted_tokens"]) <= (
        TOLERANCE * wanted["num_accepted_tokens"]
    )


@EACH
@pytest.mark.skipif(ON_CPU, reason="fewer requests there")
def test_ends_at_the_length_limit(engines: Engines, engine: Engine) -> None:
    seen = engines.run(engine)
    for request, tokens in zip(waves()["limit"], seen.waves["limit"]["tokens"], strict=True):
        assert len(tokens) == request["max_tokens"]
    # The runner drafts nothing for a batch with a request that may pass the limit with its drafts.
    nearest = LONGEST - max(one["position"] for one in seen.proposals("limit"))
    assert nearest <= 2 * (K + 1)


@EACH
def test_does_not_wait_for_the_gpu(engines: Engines, engine: Engine) -> None:
    whole = [one for one in engines.run(engine).proposals() if one["act"] == "whole"]
    assert not [one["waited"] for one in whole if one["waited"]]
    # The first call of a kind compiles.
    print(engine, "ms on the host", statistics.median(one["host_ms"] for one in whole))
    assert statistics.median(one["host_ms"] for one in whole) < 1.0


def test_sampled_drafts_are_stocks_own(engines: Engines) -> None:
    """`draft_sample_method: probabilistic`: where a request is sampled, the draft's probabilities
    are wanted, and stock serves; where none is, the loop does."""
    if not at_least(0, 22):
        pytest.skip("drafts are not sampled there")
    seen = engines.run(PROBABILISTIC)
    assert SERVES.search(seen.log)
    acts = Counter((one["act"], one["why"]) for one in seen.proposals("sampled"))
    assert acts["stock", "drafts are sampled"] > 5, acts
    greedy = Counter(one["act"] for one in seen.proposals("expected", "four", "many"))
    assert greedy["stock"] == 0, greedy
    assert "vLLM's own for a proposal: drafts are sampled" in seen.log
    for request, tokens in zip(waves()["sampled"], seen.waves["sampled"]["tokens"], strict=True):
        assert len(tokens) == request["max_tokens"]


def test_another_reason_is_said(engines: Engines) -> None:
    """Switched off, stock serves, and the log says why."""
    seen = engines.run(OFF)
    assert OWN in seen.log
    assert not SERVES.search(seen.log)
    assert {one["act"] for one in seen.proposals()} == {""}
