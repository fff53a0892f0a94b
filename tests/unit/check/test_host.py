# SPDX-License-Identifier: Apache-2.0
"""What is said of the vLLM that is here, from files that lie on disk; nothing is stood in for."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path

import pytest

from vllm_kimi_eagle3.check import Report, check, check_host
from vllm_kimi_eagle3.findings import Severity
from vllm_kimi_eagle3.host import SUPPORTED
from vllm_kimi_eagle3.patches import PATCHES, unknown_patches
from vllm_kimi_eagle3.settings import DISABLE, Settings

from .pairs import made

UNTESTED = "0.17.2"
# The list of model types without Kimi's, in a method that no tested release has like this.
SPECULATIVE = """\
class SpeculativeConfig:
    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None

    def _verify_args(self, strict):
        supported = ["llama", "qwen", "minicpm", "gpt_oss"]
        if strict and self.method not in supported:
            raise ValueError(f"EAGLE-3 is for {supported}")
        return self
"""
ARG_UTILS = """\
class EngineArgs:
    def add_cli_args(parser):
        parser.add_argument("--model", type=str)
        parser.add_argument("--speculative-config", "-sc", type=json.loads, default=None)
        return parser
"""
MLA = "lightseekorg__kimi-k2.5-eagle3-mla"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages with the source tree of an untested vLLM, installed."""
    site = tmp_path / "site-packages"
    files = {
        "vllm/__init__.py": "",
        "vllm/config/__init__.py": "",
        "vllm/config/speculative.py": SPECULATIVE,
        "vllm/engine/arg_utils.py": ARG_UTILS,
        "vllm/_version.py": f'__version__ = version = "{UNTESTED}"\n',
        f"vllm-{UNTESTED}.dist-info/METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {UNTESTED}\n"
        ),
        f"vllm-{UNTESTED}.dist-info/RECORD": "vllm/__init__.py,,\nvllm/_version.py,,\n",
        f"vllm-{UNTESTED}.dist-info/top_level.txt": "vllm\n",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return site


def checked(drafter: Path) -> Report:
    keys = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 3}
    environ = {"HOME": str(drafter.parent), "CUDA_VISIBLE_DEVICES": ""}
    return check(f"vllm serve m --speculative-config {shlex.quote(json.dumps(keys))}",
                 environ=environ)  # fmt: skip


def test_a_patch_that_stands_down_on_an_untested_release(site: Path, tmp_path: Path) -> None:
    assert UNTESTED not in SUPPORTED
    report = checked(made(tmp_path / "d", MLA))
    assert report.release == UNTESTED
    by_id = {finding.id: finding for finding in report.findings}
    assert by_id["host-untested-release"].evidence.file == str(site / "vllm")
    (finding,) = [f for f in report.findings if f.evidence.key == "whitelist"]
    assert finding.id == "host-patch-not-in-place"
    assert finding.severity is Severity.FAILS
    assert "SpeculativeConfig._verify_args has another " in finding.fact
    assert finding.fix == (
        "use vLLM 0.18 or later, or see what `vllm-kimi-eagle3 status` says of it"
    )
    assert report.path is not None
    assert "whitelist" in {need.patch for need in report.path.open}
    assert str(report.path).startswith("not at all: ")


def test_a_patch_is_in_effect_where_the_source_has_no_gap(site: Path, tmp_path: Path) -> None:
    file = site / "vllm" / "config" / "speculative.py"
    file.write_text(SPECULATIVE.replace('"gpt_oss"', '"gpt_oss", "deepseek_v3", "kimi_k2"'))
    report = checked(made(tmp_path / "d", MLA))
    assert "host-untested-release" in {finding.id for finding in report.findings}
    assert not [f for f in report.findings if f.evidence.key == "whitelist"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("KimiK25ForConditionalGeneration", True),
        ("Eagle3LlamaForCausalLM", True),
        ("Eagle3DeepseekV2ForCausalLM", True),
        ("Eagle3Qwen3vlForCausalLM", False),
        ("EagleDeepseekV2ForCausalLM", False),
        ("MyEagle3Thing", False),
    ],
)
def test_the_cache_is_searched_for_the_pairs_classes(site: Path, name: str, said: bool) -> None:
    models = site / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (models / "stock.py").write_text("# stock\n")
    digest = hashlib.md5((models / "stock.py").read_bytes(), usedforsecurity=False).hexdigest()
    cache = site.parent / "cache" / "modelinfos"
    cache.mkdir(parents=True)
    (cache / f"mine-stock-{name}.json").write_text(json.dumps({"hash": digest}))
    report = check_host(environ={"VLLM_CACHE_ROOT": str(cache.parent)})
    assert ("host-stale-model-info" in {f.id for f in report.findings}) is said


def test_a_misspelt_patch() -> None:
    report = check_host(vllm="0.22.1", environ={DISABLE: "whitelst,aux-layers"})
    (finding,) = [f for f in report.findings if f.id == "host-unknown-patch"]
    assert "'whitelst'" in finding.fact
    assert finding.fix == "write whitelist there"
    for value in ("whitelist", "1", "", ",".join(patch.id for patch in PATCHES)):
        assert not list(unknown_patches(Settings.from_environment({DISABLE: value})))
    (finding,) = unknown_patches(Settings.from_environment({DISABLE: "\x1b[31m"}))
    assert "\x1b" not in finding.text
    assert PATCHES[0].id in finding.fix
