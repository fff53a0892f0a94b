# SPDX-License-Identifier: Apache-2.0
"""What would load for half an hour and then fail, or draft badly without a word, is refused.

By the engine's configuration, before anything is loaded, in one line that names the flag. The same
folders without the plugin: stock takes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.assets import variants
from vllm_kimi_eagle3.check import check
from vllm_kimi_eagle3.findings import Severity

from . import harness
from .harness import LLAMA_DRAFTER, MLA_DRAFTER
from .matrix import BACKPORT, scenario
from .serving import command_line
from .test_config import Outcome, kimi_folder, run_config_probe

pytestmark = scenario("refused")
Tensors = dict[str, torch.Tensor]


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.ones(*shape, dtype=torch.bfloat16)}


def out_of_range(tensors: Tensors) -> Tensors:
    return {**without("t2d")(tensors), "d2t": tensors["d2t"] + 400}


# Name: the drafter, the edits of its config and tensors, and what the line must say.
Case = tuple[Path, dict[str, Any], Callable[[Tensors], Tensors] | None, tuple[str, ...]]
KEY = "eagle_aux_hidden_state_layer_ids"
CASES: dict[str, Case] = {
    "norms that the config does not name": (
        MLA_DRAFTER,
        {},
        with_("fc_norm.0.weight", 96),
        ("fc_norm.0.weight", "fc_norm"),
    ),
    "norms that are not there": (LLAMA_DRAFTER, {"fc_norm": True}, None, ("fc_norm.0.weight",)),
    "an unknown tensor": (MLA_DRAFTER, {}, with_("mystery.weight", 3), ("mystery.weight",)),
    "a missing tensor": (LLAMA_DRAFTER, {}, without("norm.weight"), ("norm.weight",)),
    "no map of a reduced vocabulary": (LLAMA_DRAFTER, {}, without("d2t"), ("d2t",)),
    "a map out of range": (LLAMA_DRAFTER, {}, out_of_range, ("d2t",)),
    "another target's": (LLAMA_DRAFTER, {"vocab_size": 600}, None, ("vocab_size", "512")),
    "four layers for three": (
        LLAMA_DRAFTER,
        {KEY: [2, 3, 4, 5], "eagle_config": None},
        None,
        ("joins 3", "[2, 3, 4, 5]"),
    ),
    "a layer that is not there": (
        LLAMA_DRAFTER,
        {KEY: [2, 4, 9], "eagle_config": None},
        None,
        ("[2, 4, 9]", "has 8 layers"),
    ),
    "layers twice": (LLAMA_DRAFTER, {KEY: [3, 5, 6]}, None, ("contradicts itself", "[3, 5, 6]")),
    "a flag that is none": (MLA_DRAFTER, {"norm_output": "on"}, None, ("norm_output", "'on'")),
    "a rope that MLA does not have": (
        MLA_DRAFTER,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        None,
        ("linear",),
    ),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("drafters")

    def job(drafter: Path, **extra: Any) -> dict[str, Any]:
        speculative = {
            "method": "eagle3",
            "model": str(drafter),
            "num_speculative_tokens": 3,
            **extra.pop("speculative", {}),
        }
        return {
            "target": extra.pop("target", str(harness.TARGET)),
            "speculative": speculative,
            "extra": extra,
            "ask": ["drafter_decisions"],
        }

    found = {}
    for name, (source, config, tensors, _) in CASES.items():
        folder = root / name.replace(" ", "-").replace("'", "")
        found[name] = job(variants.edit_drafter(source, folder, config, tensors=tensors))
    torn = variants.copy_drafter(LLAMA_DRAFTER, root / "torn")
    (file,) = torn.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    found["a torn file"] = job(torn)
    sharded = variants.write_variant("llama-sharded", root / "sharded")
    sorted(sharded.glob("*.safetensors"))[1].unlink()
    found["a missing shard"] = job(sharded)

    found["pipeline parallelism"] = job(
        LLAMA_DRAFTER,
        # The multimodal class refuses it itself on some releases.
        target=str(variants.write_kimi_k2_target(root / "text-only")),
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
    )
    found["a setting that is none"] = job(
        LLAMA_DRAFTER, additional_config={"kimi_eagle3": {"aux_layers": [2, 4, 5]}}
    )
    found["chosen layers"] = job(
        LLAMA_DRAFTER,
        additional_config={"kimi_eagle3": {"aux_hidden_state_layers": [1, 3, 4]}},
    )
    found["draft_tensor_parallel_size"] = job(
        LLAMA_DRAFTER,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        speculative={"draft_tensor_parallel_size": 1},
    )
    short = variants.edit_drafter(LLAMA_DRAFTER, root / "short", {"max_position_embeddings": 64})
    found["a short drafter"] = job(short)
    found["a short drafter, kept short"] = job(short, speculative={"max_model_len": 48})
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    ends = {"max_position_embeddings": 64, "rope_scaling": yarn}
    found["a rope that ends"] = job(variants.edit_drafter(LLAMA_DRAFTER, root / "ends", ends))
    again = kimi_folder(
        tmp_path_factory.mktemp("targets") / "again", remove="media_placeholder_token_id"
    )
    for file in harness.TARGET.glob("*.safetensors"):
        (Path(again) / file.name).symlink_to(file)
    found["saved again"] = job(LLAMA_DRAFTER, target=again)
    found["saved again"]["ask"] = ["image_placeholder"]
    return found


@pytest.fixture(scope="module")
def plugin(jobs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Outcome:
    env = {"VLLM_PLUGINS": harness.PLUGIN, "VLLM_KIMI_EAGLE3_STRICT": "1"}
    return run_config_probe(jobs, tmp_path_factory.mktemp("plugin"), cache, **env)


@pytest.fixture(scope="module")
def stock(
    jobs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, cache: Path, host: str
) -> Outcome:
    """The drafters without the plugin; on 0.15 to 0.17 without what refuses them."""
    env = {"VLLM_PLUGINS": "none"}
    if host in BACKPORT:
        refusing = "aux-layers,drafter-rope,yarn-magnitude,drafter-positions,drafter-tensors,"
        refusing += "draft-vocabulary,head-sharing,eagle31-drafter,replicated-drafter,cannot-work"
        env = {"VLLM_PLUGINS": harness.PLUGIN, "VLLM_KIMI_EAGLE3_DISABLE": refusing}
    taken = {name: {**jobs[name], "ask": []} for name in CASES}
    return run_config_probe(taken, tmp_path_factory.mktemp("stock"), cache, **env)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_drafter_that_cannot_be_right_is_refused_in_one_line(name: str, plugin: Outcome) -> None:
    outcome = plugin["results"][name]
    assert "message" in outcome, outcome
    assert '--speculative-config, "model": ' in outcome["message"]
    for part in CASES[name][-1]:
        assert part in outcome["message"]


@pytest.mark.parametrize("name", sorted(CASES))
def test_stock_takes_it(name: str, stock: Outcome) -> None:
    assert stock["results"][name].get("method") == "eagle3", stock["results"][name]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a torn file", ("model.safetensors",)),
        ("a missing shard", ("safetensors",)),
        # Stock itself refuses it on some releases, since the drafter's class has none.
        ("pipeline parallelism", ("ipeline",)),
        ("a setting that is none", ("aux_layers", "aux_hidden_state_layers")),
    ],
)
def test_so_is_what_else_cannot_work(name: str, parts: tuple[str, ...], plugin: Outcome) -> None:
    outcome = plugin["results"][name]
    assert "message" in outcome, outcome
    for part in parts:
        assert part in outcome["message"]


def test_the_users_choice_of_layers_wins(plugin: Outcome) -> None:
    asked = plugin["results"]["chosen layers"]["drafter_decisions"]
    assert asked["aux_layers"] == [1, 3, 4]


def test_a_drafter_on_one_rank_is_decided_before_the_workers_start(plugin: Outcome) -> None:
    found = plugin["results"]["draft_tensor_parallel_size"]
    assert found["method"] == "eagle3"
    assert found["drafter_decisions"]["decisions"]["replicated"] is True


def test_how_far_a_drafter_drafts(plugin: Outcome) -> None:
    """The target's context is 128 here."""
    short = plugin["results"]["a short drafter"]["drafter_decisions"]
    assert short["max_model_len"] == 128
    assert "position_limit" not in short["decisions"]
    kept = plugin["results"]["a short drafter, kept short"]["drafter_decisions"]
    assert kept["max_model_len"] == 48
    ends = plugin["results"]["a rope that ends"]["drafter_decisions"]
    assert ends["max_model_len"] == 128
    assert ends["decisions"]["position_limit"] == 64


def test_decisions_travel_as_plain_values(plugin: Outcome, host: str) -> None:
    asked = plugin["results"]["chosen layers"]["drafter_decisions"]
    assert json.loads(json.dumps(asked["decisions"])) == asked["decisions"]
    if host == "0.15.1":
        return  # The proposer decides that in the middle of its load_model there.
    assert asked["decisions"]["head"] == "own"
    assert asked["decisions"]["embedding"] == "target"


def test_a_target_that_was_saved_again_has_an_image_token(plugin: Outcome) -> None:
    outcome = plugin["results"]["saved again"]
    assert "message" not in outcome, outcome
    config = json.loads((harness.TARGET / "config.json").read_text())
    assert outcome["image_placeholder"] in (config["image_token_id"], 163605)


OTHERS = (
    "a torn file",
    "a missing shard",
    "pipeline parallelism",
    "a setting that is none",
    "chosen layers",
    "draft_tensor_parallel_size",
    "a short drafter",
    "a short drafter, kept short",
    "a rope that ends",
    "saved again",
)


@pytest.mark.parametrize("name", sorted((*CASES, *OTHERS)))
def test_check_says_the_same_before(
    name: str, jobs: dict[str, dict[str, Any]], plugin: Outcome, cache: Path
) -> None:
    """What is refused here `check` calls failing or wrong, in the same words; and nothing else."""
    job, outcome = jobs[name], plugin["results"][name]
    arguments = {
        "model": job["target"],
        "trust_remote_code": True,
        "max_model_len": 128,
        "speculative_config": job["speculative"],
        **job["extra"],
    }
    report = check(["vllm", "serve", *command_line(arguments)], environ=environment(cache))
    against = [f for f in report.findings if f.severity in (Severity.FAILS, Severity.WRONG)]
    if "message" not in outcome:
        assert not against, report.as_text()
        return
    assert report.exit_code == 1, report.as_text()
    if name != "pipeline parallelism":  # Some releases refuse that first, in their own words.
        said = [f for f in against if f.text in outcome["message"]]
        assert said, (outcome["message"], report.as_text())


def environment(cache: Path) -> dict[str, str]:
    return harness.environment(cache, VLLM_PLUGINS=harness.PLUGIN)
