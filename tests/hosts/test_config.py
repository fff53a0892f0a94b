# SPDX-License-Identifier: Apache-2.0
"""Which targets and drafters the engine's configuration accepts, with the plugin and without.

No engine is started: refusing belongs before the load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.assets.variants import copy_drafter, write_kimi_k2_target

from . import harness
from .matrix import BACKPORT, scenario

PROBE = Path(__file__).with_name("config_probe.py")
TIMEOUT = 900.0  # A dozen configurations, each with a model class to be inspected.
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}


def target_folder(folder: Path, **config: Any) -> str:
    """A folder with a config.json and nothing else; that is all that is read here."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SMALL, **config}))
    return str(folder)


def kimi_folder(folder: Path, **changes: Any) -> str:
    """The tiny Kimi-K2.5's configuration, changed; `remove` names a key to leave out."""
    folder.mkdir()
    for source in harness.TARGET.iterdir():
        if not source.name.endswith(".safetensors"):
            (folder / source.name).write_bytes(source.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["model_type"] = changes.pop("text_model_type", "deepseek_v3")
    config.pop(changes.pop("remove", ""), None)
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The attempts, by name."""
    folder = tmp_path_factory.mktemp("targets")
    eagle3 = {"method": "eagle3", "model": str(harness.LLAMA_DRAFTER), "num_speculative_tokens": 3}
    kimi = str(harness.TARGET)
    empty = folder / "empty"
    empty.mkdir()

    def job(target: str, **speculative: Any) -> dict[str, Any]:
        return {"target": target, "speculative": {**eagle3, **speculative}}

    deepseek = {"architectures": ["DeepseekV3ForCausalLM"], **LATENT}
    jobs = {
        "kimi": job(kimi),
        "kimi, questions": {
            **job(kimi),
            "ask": ["compile_keys", "layer_choices"] if harness.host_release() in BACKPORT else [],
        },
        "kimi, text tower kimi_k2": job(kimi_folder(folder / "k2", text_model_type="kimi_k2")),
        "kimi, image_token_id only": {
            **job(kimi_folder(folder / "id", remove="media_placeholder_token_id")),
            "ask": ["image_placeholder"] if harness.host_release() in BACKPORT else [],
        },
        "kimi, placeholder null": job(
            kimi_folder(folder / "null", media_placeholder_token_id=None, image_token_id=77)
        ),
        "text-only kimi": job(str(write_kimi_k2_target(folder / "text"))),
        "mistral": job(
            target_folder(
                folder / "mistral", architectures=["MistralForCausalLM"], model_type="mistral"
            )
        ),
        "deepseek": job(target_folder(folder / "deepseek", model_type="deepseek_v3", **deepseek)),
        "llama": job(
            target_folder(folder / "llama", architectures=["LlamaForCausalLM"], model_type="llama")
        ),
        "mla drafter": job(kimi, model=str(harness.MLA_DRAFTER)),
        # With a model type that Transformers knows, so that the class is what is missing.
        "mla drafter, readable": {
            **job(
                kimi,
                model=str(
                    copy_drafter(harness.MLA_DRAFTER, folder / "mla", {"model_type": "deepseek_v2"})
                ),
            ),
            "only_stock": True,
        },
        "missing folder": job(kimi, model="/models/no-such-drafter"),
        "empty folder": job(kimi, model=str(empty)),
        "no drafter": job(kimi, model=kimi),
        "missing folder, another target": job(
            target_folder(folder / "other", architectures=["LlamaForCausalLM"], model_type="llama"),
            model="/models/no-such-drafter",
        ),
    }
    if harness.host_release() == "0.17.1":
        extract = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}},
        }
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "states")},
        }
        jobs["extract"] = {
            "target": kimi,
            "speculative": extract,
            "extra": {"kv_transfer_config": transfer},
        }
        # A DeepSeek-V3 is not on the list either, and its config can be read without the plugin.
        jobs["extract, nested config out of the way"] = {
            **jobs["extract"],
            "target": jobs["deepseek"]["target"],
        }
    if harness.host_release() not in BACKPORT:
        del jobs["mla drafter, readable"]
    jobs["registered again"] = {**job(kimi), "first": "register"}
    jobs["reverted"] = {**job(kimi), "first": "revert"}
    return jobs


Outcome = dict[str, Any]


def run_config_probe(
    jobs: dict[str, dict[str, Any]], folder: Path, cache: Path, **env: str
) -> Outcome:
    """How each attempt ended, by name."""
    outcome: Outcome = harness.run_probe(PROBE, list(jobs.values()), folder, cache, TIMEOUT, **env)
    outcome["results"] = dict(zip(jobs, outcome["results"], strict=True))
    return outcome


@pytest.fixture(scope="module")
def plugin(jobs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Outcome:
    """The attempts with the plugin."""
    env = {"VLLM_PLUGINS": harness.PLUGIN, "VLLM_KIMI_EAGLE3_STRICT": "1"}
    with_plugin = {name: job for name, job in jobs.items() if "only_stock" not in job}
    return run_config_probe(with_plugin, tmp_path_factory.mktemp("plugin"), cache, **env)


@pytest.fixture(scope="module")
def stock(jobs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Outcome:
    """The attempts without it."""
    without = {name: job for name, job in jobs.items() if "first" not in job}
    return run_config_probe(without, tmp_path_factory.mktemp("stock"), cache, VLLM_PLUGINS="none")


KIMI_JOBS = ["kimi", "kimi, text tower kimi_k2", "text-only kimi"]


@scenario("configuration")
@pytest.mark.parametrize("name", KIMI_JOBS)
def test_a_kimi_target_is_accepted(host: str, plugin: Outcome, stock: Outcome, name: str) -> None:
    assert plugin["results"][name]["method"] == "eagle3"
    if host in BACKPORT:
        # A kimi_k2 config is not even read there: a published one brings remote code for it.
        refusal = "does not recognize" if name == "text-only kimi" else "is only supported for"
        assert refusal in stock["results"][name]["message"]
        assert plugin["results"][name]["target_class"].startswith("vllm_kimi_eagle3.models.")
    else:
        assert plugin["results"][name] == stock["results"][name]


@scenario("configuration")
@pytest.mark.parametrize("name", ["mistral", "deepseek", "llama"])
def test_any_other_target_is_answered_as_without_the_plugin(
    plugin: Outcome, stock: Outcome, name: str
) -> None:
    assert plugin["results"][name] == stock["results"][name]


@scenario("configuration: the backport")
def test_what_stock_refuses_it_still_refuses(plugin: Outcome) -> None:
    for name in ("mistral", "deepseek"):
        assert "is only supported for ['llama', 'qwen'" in plugin["results"][name]["message"]


@scenario("configuration: the backport")
def test_the_image_token(plugin: Outcome) -> None:
    config = json.loads((harness.TARGET / "config.json").read_text())
    kimi = plugin["results"]["kimi"]
    assert kimi["image_token_index"] == config["media_placeholder_token_id"]
    assert not kimi["own_image_token_index"]
    # Where the key is missing, the config class puts a default, which the target then uses too.
    missing = plugin["results"]["kimi, image_token_id only"]
    assert missing["image_token_index"] == missing["image_placeholder"]
    assert plugin["results"]["kimi, placeholder null"]["image_token_index"] == 77


@scenario("configuration: the backport")
def test_another_choice_of_aux_layers_is_another_compile_cache_key(plugin: Outcome) -> None:
    plain, *keys = plugin["results"]["kimi, questions"]["compile_keys"]
    for first, other, again in (keys[:3], keys[3:]):
        assert first == again
        assert len({plain, first, other}) == 3


@scenario("configuration: the backport")
def test_which_layers_can_be_chosen(plugin: Outcome) -> None:
    said = plugin["results"]["kimi, questions"]["layer_choices"]
    assert said["(0, 4, 8) on 1"] == [0, 4, 8]
    for layers, wrong in (("(2, 9)", "9"), ("(-1,)", "-1"), ("('2',)", "'2'")):
        assert f"at layer {wrong} " in said[f"{layers} on 1"]
        assert "has 8 layers, so ids go from 0 (the embedding) to 8" in said[f"{layers} on 1"]
    assert "use --pipeline-parallel-size 1" in said["(2,) on 2"]
    # By the old and by the new name of the method.
    assert said["default"] == [[2, 4, 5], [2, 4, 5]]


@scenario("configuration: the backport")
def test_an_mla_drafter_is_read_and_has_a_class(plugin: Outcome, stock: Outcome) -> None:
    # Two refusals in a row: the config's model type, then the class.
    unread = stock["results"]["mla drafter"]["message"]
    assert "model type `kimi_k2` but Transformers does not recognize" in unread
    assert "are not supported" in stock["results"]["mla drafter, readable"]["message"]
    assert plugin["results"]["mla drafter"]["method"] == "eagle3"


@scenario("configuration: extract_hidden_states")
def test_training_data_can_be_taken(plugin: Outcome, stock: Outcome) -> None:
    # Two refusals in a row: the nested config, then the list.
    assert "does not have `num_attention_heads`" in stock["results"]["extract"]["message"]
    text_only = stock["results"]["extract, nested config out of the way"]["message"]
    assert "extract_hidden_states is only supported for ['llama', 'qwen'" in text_only
    assert plugin["results"]["extract"]["method"] == "extract_hidden_states"
    # What is no Kimi is refused as before.
    name = "extract, nested config out of the way"
    assert plugin["results"][name] == stock["results"][name]


@scenario("configuration: the backport")
def test_registering_again_changes_nothing_and_reverting_restores_stock(
    plugin: Outcome, stock: Outcome
) -> None:
    assert plugin["results"]["registered again"] == plugin["results"]["kimi"]
    assert plugin["results"]["reverted"] == stock["results"]["kimi"]


@scenario("configuration")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing folder", "the folder '/models/no-such-drafter' does not exist"),
        ("empty folder", "holds no config.json"),
        ("no drafter", "is not the config of an EAGLE-3 drafter"),
    ],
)
def test_what_is_no_drafter_is_named_in_one_line(plugin: Outcome, name: str, says: str) -> None:
    message = plugin["results"][name]["message"]
    assert '--speculative-config, "model": ' in message
    assert says in message


@scenario("configuration")
def test_another_targets_drafter_is_not_judged(plugin: Outcome, stock: Outcome) -> None:
    name = "missing folder, another target"
    assert plugin["results"][name] == stock["results"][name]


@scenario("configuration")
def test_nothing_touches_cuda(plugin: Outcome) -> None:
    assert plugin["cuda_initialised"] == []


@scenario("configuration: upstream")
def test_no_model_class_of_ours_is_imported(plugin: Outcome) -> None:
    assert plugin["models_imported"] == []
