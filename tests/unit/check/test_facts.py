# SPDX-License-Identifier: Apache-2.0
"""The snapshot holds together, and what is read from a source tree is what stands there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from vllm_kimi_eagle3.check.facts import Facts, facts_for, facts_of, flag_releases, key_releases
from vllm_kimi_eagle3.host import SUPPORTED, Host

RELEASES = pytest.mark.parametrize("facts", [facts_for(r) for r in SUPPORTED], ids=SUPPORTED)
VALUES = {
    "switch", "set", "text", "integer", "count", "length", "number", "json", "json or text",
    "list", "integers", "optional", "append",
}  # fmt: skip


@RELEASES
def test_a_release_is_whole(facts: Facts) -> None:
    assert facts.supported
    assert facts.version == Version(facts.release)
    assert facts.root is None
    assert facts.sources() is None
    assert len(facts.flags) > 200
    assert {flag.value for flag in facts.flags.values()} <= VALUES
    assert all(name == flag.name for name, flag in facts.flags.items())
    assert set(facts.defaults) <= set(facts.flags)
    assert {"KimiK25ForConditionalGeneration", "DeepseekV3ForCausalLM"} <= facts.architectures
    assert facts.drafter_architectures < facts.architectures
    assert {"auto", "bfloat16", "fp8"} <= set(facts.kv_cache_dtypes)
    assert {"TRITON_MLA", "FLASHMLA"} <= set(facts.attention_backends)
    assert facts.defaults["model"] == "Qwen/Qwen3-0.6B"
    assert facts.defaults["tensor-parallel-size"] == 1


@RELEASES
def test_no_two_flags_have_a_spelling_in_common(facts: Facts) -> None:
    spellings = [
        spelling for flag in facts.flags.values() for spelling in (f"--{flag.name}", *flag.aliases)
    ]
    assert len(spellings) == len(set(spellings))


@RELEASES
def test_what_a_kimi_command_needs_is_there(facts: Facts) -> None:
    kinds = {
        "speculative-config": "json", "tensor-parallel-size": "integer", "max-model-len": "length",
        "gpu-memory-utilization": "number", "enforce-eager": "switch", "headless": "set",
        "served-model-name": "list", "additional-config": "json or text", "seed": "integer",
        "hf-overrides": "json or text", "max-num-batched-tokens": "count",
        "kv-cache-dtype": "text", "middleware": "append",
    }  # fmt: skip
    assert {name: facts.flags[name].value for name in kinds} == kinds
    assert facts.flags["tensor-parallel-size"].aliases == ("-tp",)
    assert "eagle3" in (facts.speculative_fields["method"] or ())
    assert facts.speculative_fields["model"] is None
    assert facts.speculative_keys["num_speculative_tokens"].least == 1
    assert "target_model_config" not in facts.speculative_fields
    assert facts.speculative_keys["target_model_config"].own


@pytest.mark.parametrize(
    ("key", "first", "last"),
    [
        ("disable_by_batch_size", "0.15.1", "0.16.0"),
        ("parallel_drafting", "0.16.0", "0.33.0"),
        ("use_local_argmax_reduction", "0.17.1", "0.33.0"),
        ("rejection_sample_method", "0.18.1", "0.33.0"),
        ("synthetic_acceptance_rate", "0.19.1", "0.19.1"),
        ("synthetic_acceptance_rates", "0.20.2", "0.33.0"),
        ("speculative_token_tree", "0.15.1", "0.20.2"),
        ("attention_backend", "0.21.0", "0.33.0"),
        ("draft_sample_method", "0.21.0", "0.33.0"),
        ("num_speculative_tokens_per_batch_size", "0.24.0", "0.33.0"),
        ("kv_cache_dtype", "0.26.0", "0.33.0"),
        ("draft_lm_head_quantization", "0.33.0", "0.33.0"),
    ],
)
def test_when_keys_came_and_went(key: str, first: str, last: str) -> None:
    releases = key_releases(key)
    assert (releases[0], releases[-1]) == (first, last)
    assert releases == SUPPORTED[SUPPORTED.index(first) : SUPPORTED.index(last) + 1]


@pytest.mark.parametrize(
    ("release", "rejection", "draft"),
    [
        ("0.18.1", ("strict", "probabilistic"), None),
        ("0.20.2", ("strict", "probabilistic", "synthetic"), None),
        ("0.21.0", ("standard", "synthetic"), ("greedy", "gumbel")),
        ("0.22.1", ("standard", "synthetic"), ("greedy", "probabilistic")),
        ("0.25.1", ("standard", "synthetic", "block"), ("greedy", "probabilistic")),
        ("0.33.0", ("standard", "synthetic", "block", "fly"), ("greedy", "probabilistic")),
    ],
)
def test_how_drafts_are_sampled(release: str, rejection: Any, draft: Any) -> None:
    fields = facts_for(release).speculative_fields
    assert fields["rejection_sample_method"] == rejection
    assert fields.get("draft_sample_method") == draft


def test_habits_change_once() -> None:
    first = {
        "refuses_unknown_keys": "0.16.0",
        "yaml_objects": "0.16.0",
        "human_numbers": "0.20.2",
        "dashes_in_keys": "0.26.0",
        "yaml_negates": "0.28.0",
        "pairs_enable_with_disable": "0.33.0",
    }
    for habit, release in first.items():
        has = [getattr(facts_for(r), habit) for r in SUPPORTED]
        assert next(r for r, h in zip(SUPPORTED, has, strict=True) if h) == release
        assert sum(a != b for a, b in itertools.pairwise(has)) == 1


def test_releases_of_a_flag() -> None:
    assert flag_releases("spec-method")[0] == "0.22.1"
    assert flag_releases("no-such-flag") == ()


def test_names_of_releases() -> None:
    assert facts_for("0.26").release == "0.26.0"
    with pytest.raises(ValueError, match=r"'0\.14\.0'.*0\.15\.1"):
        facts_for("0.14.0")


def test_order_and_runner() -> None:
    old, new = facts_for("0.28.0"), facts_for("0.29.0")
    assert old.before("0.28.1")
    assert not old.before("0.28.0")
    assert (old.runner({}), new.runner({})) == ("V1", "V2")
    assert new.runner({"VLLM_USE_V2_MODEL_RUNNER": "0"}) == "V1"


ARG_UTILS = """
import argparse
from vllm.config import CacheConfig, ModelConfig
from vllm.config.extra import *

def _compute_kwargs(cls):
    human = {"max_model_len", "budget"}

class EngineArgs:
    def add_cli_args(parser):
        model_kwargs = get_kwargs(ModelConfig)
        group = parser.add_argument_group()
        if True:
            group.add_argument("--model", **model_kwargs["model"])
        group.add_argument("--max-model-len", **model_kwargs["max_model_len"])
        group.add_argument("--budget", "-b", **{**model_kwargs["budget"], "default": None})
        group.add_argument("--eager", **model_kwargs["eager"])
        group.add_argument("--names", **model_kwargs["names"])
        group.add_argument("--sizes", **model_kwargs["sizes"])
        model_kwargs["speculative"]["type"] = optional_type(json.loads)
        group.add_argument("--speculative", **model_kwargs["speculative"])
        group.add_argument("--cache", **model_kwargs["cache"])
        mode = get_kwargs(CacheConfig)["mode"]
        mode["choices"].remove("slow")
        group.add_argument("--mode", **mode)
        group.add_argument("--kind", **get_kwargs(CacheConfig)["kind"])
        group.add_argument("--level", type=int, choices=[1, 2])
        group.add_argument("--backend", type=lambda s: s.lower().replace("-", "_"), choices=["a"])
        group.add_argument("--stats", action="store_true", help="x")
        group.add_argument("--strange", **model_kwargs["strange"])
        return parser
"""
TREE = {
    "engine/arg_utils.py": ARG_UTILS,
    "config/__init__.py": "from .cache import CacheConfig\nfrom .model import ModelConfig\n",
    "config/extra.py": "",
    "config/cache.py": '''
from typing import Literal
from .types import *
from vllm.config.utils import config
CacheDType = Literal["auto", "fp8"]
@config
class CacheConfig:
    mode: Mode = "fast"
    kind: CacheDType | None = None
''',
    "config/types.py": "from typing import Literal\nMode = Literal['fast', 'slow']\n",
    "config/utils.py": "def config(cls):\n    return dataclass(cls, config={'extra': 'forbid'})\n",
    "config/model.py": '''
from typing import Annotated, Any
from .cache import CacheConfig
SIZE = 4 * 1024
@config
class ModelConfig:
    LIMIT: ClassVar[int] = 3
    model: str = "Qwen/Qwen3-0.6B"
    max_model_len: int | None = Field(default=None, ge=-1)
    budget: int = SIZE
    eager: bool = False
    names: str | list[str] | None = None
    sizes: list[int] = field(default_factory=list)
    speculative: dict[str, Any] | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    strange: Annotated[SomethingElse, 1] = LIMIT
''',
    "config/speculative.py": '''
from pydantic import SkipValidation
@config
class SpeculativeConfig:
    tokens: int = Field(default=None, gt=0)
    target: SkipValidation[ModelConfig] = None
    def method(self):
        pass
''',
    "model_executor/models/registry.py": '''
_SPECULATIVE_DECODING_MODELS = {"Drafter": ("a", "B")}
_TEXT = {"Text": ("a", "B"), **more()}
_VLLM_MODELS = {**_TEXT, **_SPECULATIVE_DECODING_MODELS}
''',
}  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Facts:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return facts_of(Host(tmp_path, (("vllm", "0.99.0"),), "0.99.0+local"))


def test_a_tree_is_read(tree: Facts) -> None:
    assert (tree.release, tree.supported, tree.label) == ("0.99.0", False, "vllm 0.99.0+local")
    assert {name: flag.value for name, flag in tree.flags.items()} == {
        "help": "set", "model": "text", "max-model-len": "length", "budget": "count",
        "eager": "switch", "names": "list", "sizes": "integers", "speculative": "json",
        "cache": "json", "mode": "text", "kind": "text", "level": "integer", "backend": "text",
        "stats": "set", "strange": "text",
    }  # fmt: skip
    assert tree.flags["budget"].aliases == ("-b",)
    assert tree.flags["mode"].choices is None  # Changed in a way that is not followed.
    assert tree.flags["kind"].choices == ("auto", "fp8")
    assert tree.flags["kind"].nullable
    assert tree.flags["speculative"].nullable
    assert tree.flags["level"].choices == ("1", "2")
    assert tree.flags["backend"].loose
    assert {k: v for k, v in tree.defaults.items() if v is not None} == {
        "model": "Qwen/Qwen3-0.6B", "eager": False, "mode": "fast", "stats": False, "strange": 3,
    }  # fmt: skip
    assert "sizes" not in tree.defaults  # Computed.
    assert tree.architectures == {"Text", "Drafter"}
    assert tree.drafter_architectures == {"Drafter"}
    assert tree.kv_cache_dtypes == ("auto", "fp8")
    assert tree.refuses_unknown_keys
    assert not tree.dashes_in_keys
    assert tree.speculative_fields == {"tokens": None}
    assert tree.speculative_keys["tokens"].least == 1
    assert tree.sources() is not None


def test_a_tree_that_is_none_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text("def broken(:")
    facts = facts_of(Host(tmp_path, (), ""))
    assert facts.release == ""
    assert set(facts.flags) == {"help"}
    assert not facts.speculative_keys
    assert not facts.before("0.15")


def test_aliases_that_lead_to_themselves_end(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "cache.py").write_text("CacheDType = Other\nOther = CacheDType\n")
    assert facts_of(Host(tmp_path, (), "")).kv_cache_dtypes == ()
