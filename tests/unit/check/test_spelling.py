# SPDX-License-Identifier: Apache-2.0
"""Keys and values of --speculative-config, held against each release."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.check import run
from vllm_kimi_eagle3.check.command import parse
from vllm_kimi_eagle3.check.facts import facts_for
from vllm_kimi_eagle3.check.speculative_keys import ALIASES, INSTEAD, plain_name
from vllm_kimi_eagle3.check.spelling import effective_method, findings, is_eagle3
from vllm_kimi_eagle3.check.subject import Subject
from vllm_kimi_eagle3.findings import Finding, Severity
from vllm_kimi_eagle3.findings.catalogue import KINDS
from vllm_kimi_eagle3.host import SUPPORTED

BASE = {"method": "eagle3", "model": "D", "num_speculative_tokens": 3}
KEY, VALUE = "command-speculative-key", "command-speculative-value"


def said(
    release: str, keys: Mapping[str, Any], *flags: str, environ: Mapping[str, str] | None = None
) -> list[Finding]:
    facts = facts_for(release)
    command = parse(["M", "--speculative-config", json.dumps(keys), *flags], facts)
    assert not command.problems
    return list(findings(Subject(command, facts, environ or {})))


def corrected(found: list[Finding]) -> dict[str, Any]:
    """The whole option that the last finding with one says to write."""
    for finding in reversed(found):
        _, whole, option = finding.fix.partition("in whole: ")
        if whole:
            flag, text = shlex.split(option)
            assert flag == "--speculative-config"
            keys: dict[str, Any] = json.loads(text)
            return keys
    raise AssertionError("no finding has the whole option")


@pytest.mark.parametrize("release", SUPPORTED)
def test_what_is_right_is_not_spoken_of(release: str) -> None:
    assert said(release, BASE) == []
    more = {"draft_tensor_parallel_size": 8, "revision": "main", "max_model_len": 4096}
    assert said(release, {**BASE, **more, "enforce_eager": True}, "-tp", "8") == []


COMMUNITY = {
    **BASE,
    "draft_attention_backend": "TRITON_ATTN",
    "draft_kv_cache_dtype": "fp8",
    "rejection_sample_method": "probabilistic",
}


@pytest.mark.parametrize(
    ("release", "rest"),
    [
        ("0.15.1", {}),
        ("0.18.1", {}),
        ("0.20.2", {}),
        ("0.21.0", {"attention_backend": "TRITON_ATTN"}),
        ("0.22.1", {"attention_backend": "TRITON_ATTN", "draft_sample_method": "probabilistic"}),
        ("0.25.1", {"attention_backend": "TRITON_ATTN", "draft_sample_method": "probabilistic"}),
        *(
            (release, {"attention_backend": "TRITON_ATTN", "kv_cache_dtype": "fp8",
                       "draft_sample_method": "probabilistic"})
            for release in SUPPORTED[SUPPORTED.index("0.26.0") :]
        ),
    ],
)  # fmt: skip
def test_the_community_recipe(release: str, rest: dict[str, Any]) -> None:
    found = said(release, COMMUNITY)
    assert corrected(found) == {**BASE, **rest}
    assert said(release, corrected(found)) == []
    severity = Severity.WRONG if release == "0.15.1" else Severity.FAILS
    assert {f.severity for f in found if f.id == KEY} == {severity}
    for finding in found:
        assert finding.evidence.release == release
        assert finding.evidence.file == "--speculative-config"
        assert finding.evidence.key in COMMUNITY


@pytest.mark.parametrize(
    ("release", "keys", "rest"),
    [
        ("0.21.0", {"draft_sample_method": "probabilistic"}, {"draft_sample_method": "gumbel"}),
        ("0.20.2", {"draft_sample_method": "gumbel"}, {"rejection_sample_method": "probabilistic"}),
        ("0.22.1", {"draft_sample_method": "gumbel"}, {"draft_sample_method": "probabilistic"}),
        ("0.17.1", {"draft_sample_method": "gumbel"}, {}),
        ("0.20.2", {"draft_sample_method": "greedy"}, {}),
        ("0.26.0", {"rejection_sample_method": "strict"}, {}),
        ("0.20.2", {"rejection_sample_method": "standard"}, {}),
    ],
)
def test_how_drafts_are_sampled(
    release: str, keys: dict[str, Any], rest: dict[str, Any]
) -> None:  # fmt: skip
    v2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    found = said(release, {**BASE, **keys}, environ=v2)
    assert corrected(found) == {**BASE, **rest}
    assert said(release, corrected(found), environ=v2) == []


def test_sglang() -> None:
    keys = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "D",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
    }
    found = said("0.26.0", keys)
    assert [f.id for f in found] == [KEY] * 5
    assert corrected(found) == BASE
    alone = said("0.26.0", {"method": "eagle3", "model": "D", "speculative_num_draft_tokens": 4})
    assert corrected(alone) == BASE


@pytest.mark.parametrize(
    ("keys", "rest"),
    [
        ({"numSpeculativeTokens": 3, "method": "eagle3", "model": "D"}, BASE),
        ({"num_speculative_token": 3, "method": "eagle3", "model": "D"}, BASE),
        ({**BASE, "num_spec_tokens": 5}, BASE),
        ({**BASE, "foo": 1}, BASE),
        ({**BASE, "tensor_parallel_size": 8}, BASE),
        ({**BASE, "method": "EAGLE-3"}, BASE),
        ({**BASE, "method": "eagle3.1"}, BASE),
        ({**BASE, "method": 3}, BASE),
        ({**BASE, "num_speculative_tokens": 0}, BASE),
        ({**BASE, "num_speculative_tokens": "three"}, BASE),
        ({**BASE, "num_speculative_tokens": 2.5}, BASE),
        ({**BASE, "num_speculative_tokens": None}, BASE),
        ({**BASE, "num_speculative_tokens": True}, {**BASE, "num_speculative_tokens": 1}),
        ({**BASE, "kv_cache_dtype": "FP8"}, {**BASE, "kv_cache_dtype": "fp8"}),
        ({**BASE, "kv_cache_dtype": "int3"}, BASE),
        ({**BASE, "attention_backend": "TRITON_MLAA"}, {**BASE, "attention_backend": "TRITON_MLA"}),
        ({**BASE, "attention_backend": 3}, BASE),
        ({**BASE, "max_model_len": 0}, BASE),
        ({**BASE, "enforce_eager": "maybe"}, BASE),
        ({**BASE, "num_speculative_tokens_per_batch_size": 8}, BASE),
        ({**BASE, "use_heterogeneous_vocab": True}, BASE),
        ({**BASE, "synthetic_acceptance_length": 2}, BASE),
        ({**BASE, "model": 3}, {**BASE, "model": "DRAFTER"}),
        ({"method": "eagle3", "num_speculative_tokens": 3}, {**BASE, "model": "DRAFTER"}),
        ({"method": "eagle3", "model": "D"}, BASE),
        ({"model": "D", "num_speculative_tokens": 3}, BASE),
        ({}, {**BASE, "model": "DRAFTER"}),
    ],
)
def test_one_mistake(keys: dict[str, Any], rest: dict[str, Any]) -> None:
    found = said("0.26.0", keys)
    assert found
    assert corrected(found) == rest
    assert said("0.26.0", rest) == []


@pytest.mark.parametrize(
    "keys",
    [
        {"num_speculative_tokens": "3"},
        {"num_speculative_tokens": 3.0},
        {"attention_backend": "triton_mla"},
        {"attention_backend": "auto"},
        {"enforce_eager": "yes"},
        {"draft_tensor_parallel_size": 1},
        {"draft_tensor_parallel_size": None},
        {"use_heterogeneous_vocab": False},
        {"target_model_config": None},
    ],
)
def test_what_vllm_takes_too(keys: dict[str, Any]) -> None:
    assert said("0.26.0", {**BASE, **keys}, "-tp", "8") == []


def test_the_words() -> None:
    (text,) = (f.text for f in said("0.26.0", {**BASE, "draft_kv_cache_dtype": "fp8"}))
    assert text == (
        'vLLM 0.26.0 has no key "draft_kv_cache_dtype" in --speculative-config; write '
        '"kv_cache_dtype": "fp8"; in whole: --speculative-config \'{"method": "eagle3", "model": '
        '"D", "num_speculative_tokens": 3, "kv_cache_dtype": "fp8"}\' [command-speculative-key]'
    )
    (text,) = (f.text for f in said("0.20.2", {**BASE, "draft_kv_cache_dtype": "fp8"}))
    assert (
        'leave out "draft_kv_cache_dtype": "kv_cache_dtype" came with 0.26.0, and the drafter\'s '
        "cache has the target's type there (--kv-cache-dtype)"
    ) in text
    (text,) = (f.text for f in said("0.26.0", {**BASE, "gpu_memory_utilization": 0.9}))
    assert "it belongs on the command line, as --gpu-memory-utilization" in text
    (text,) = (f.text for f in said("0.26.0", {**BASE, "speculative_token_tree": "x"}))
    assert "it went after 0.20.2, and vLLM drafts one chain of tokens" in text


def test_the_flag_as_the_user_wrote_it() -> None:
    facts = facts_for("0.26.0")
    command = parse(["M", "-sc", json.dumps({**BASE, "foo": 1})], facts)
    (finding,) = findings(Subject(command, facts, {}))
    assert "in -sc" in finding.fact
    assert "in whole: -sc '{" in finding.fix
    command = parse(["M", "-sc", '{"foo": 1, "method": "eagle3", "model": "D"}',
                     "--spec-tokens", "3"], facts)  # fmt: skip
    (finding,) = findings(Subject(command, facts, {}))
    assert "in whole" not in finding.fix  # Keys and flags: there is no one option to paste.


@pytest.mark.parametrize(
    ("keys", "method"),
    [
        ({"method": "eagle3", "model": "/eagle-1/x"}, "eagle3"),
        ({"model": "nvidia/Kimi-K2.5-Thinking-Eagle3"}, "eagle3"),
        ({"model": "lightseekorg/kimi-k2.6-eagle3.1-mla"}, "eagle3"),
        ({"model": "/models/eagle-3/kimi"}, "eagle"),
        ({"model": "/models/eagle-3/kimi-eagle3"}, "eagle"),
        ({"model": "/models/drafter"}, None),
        ({"method": "mtp", "model": "x/eagle3"}, "eagle3"),
        ({"method": "ngram", "model": "x/eagle3"}, "ngram"),
        ({"method": "mtp"}, "mtp"),
        ({"method": 3, "model": "x"}, None),
        ({}, None),
    ],
)
def test_the_method_by_the_drafters_name(keys: dict[str, Any], method: str | None) -> None:
    assert effective_method(keys) == method


@pytest.mark.parametrize(
    ("release", "model", "severity", "words"),
    [
        ("0.15.1", "/models/drafter", Severity.FAILS, "of unknown method, and stops"),
        ("0.26.0", "/models/drafter", Severity.FAILS, "draft_model"),
        ("0.26.0", "/models/eagle-3/x", Severity.WRONG, "EAGLE-1, by its name"),
    ],
)
def test_no_method(release: str, model: str, severity: Severity, words: str) -> None:
    (finding,) = said(release, {"model": model, "num_speculative_tokens": 3})
    assert (finding.id, finding.severity) == ("command-method", severity)
    assert words in finding.fact
    assert said(release, {"model": "x/eagle3", "num_speculative_tokens": 3}) == []


def test_other_methods() -> None:
    (finding,) = said("0.26.0", {"method": "ngram", "num_speculative_tokens": 3})
    assert finding.id == "command-other-method"
    assert finding.kind.undecided
    (finding,) = said("0.26.0", {**BASE, "method": "eagle", "model": "x/eagle3-kimi"})
    assert finding.id == "command-method"
    assert corrected([finding])["method"] == "eagle3"
    (finding,) = said("0.26.0", {**BASE, "method": "eagle", "model": "x/kimi"})
    assert finding.id == "command-other-method"


@pytest.mark.parametrize(
    ("release", "keys", "runner"),
    [
        ("0.15.1", {"disable_by_batch_size": 8}, ""),
        ("0.20.2", {"rejection_sample_method": "probabilistic"}, ""),
        ("0.21.0", {"draft_sample_method": "gumbel"}, ""),
        ("0.24.0", {"use_local_argmax_reduction": True}, "1"),
        ("0.33.0", {"disable_padded_drafter_batch": True}, ""),
    ],
)
def test_keys_that_nothing_reads(release: str, keys: dict[str, Any], runner: str) -> None:
    environ = {"VLLM_USE_V2_MODEL_RUNNER": runner} if runner else {}
    (finding,) = said(release, {**BASE, **keys}, environ=environ)
    assert finding.id == "command-speculative-ignored"
    assert corrected([finding]) == BASE
    other = {"VLLM_USE_V2_MODEL_RUNNER": "0" if release == "0.33.0" or runner else "1"}
    if release != "0.15.1":
        assert said(release, {**BASE, **keys}, environ=other) == []


def test_accepted_by_the_dice() -> None:
    keys = {**BASE, "rejection_sample_method": "synthetic"}
    whole = {**keys, "synthetic_acceptance_length": 2.5}
    assert [f.id for f in said("0.26.0", whole)] == ["command-synthetic"]
    assert [f.id for f in said("0.26.0", keys)] == ["command-synthetic", VALUE]
    both = {**whole, "synthetic_acceptance_rates": [1, 0.5, 0]}
    assert [f.id for f in said("0.26.0", both)] == ["command-synthetic", VALUE]


def test_no_speculation() -> None:
    facts = facts_for("0.26.0")
    (finding,) = findings(Subject(parse(["M"], facts), facts, {}))
    assert (finding.id, finding.severity) == ("command-no-speculation", Severity.NOTE)
    assert list(findings(Subject(parse([], facts), facts, {}))) == []
    broken = parse(["M", "-sc", "{"], facts)
    assert list(findings(Subject(broken, facts, {}))) == []  # The command has said so.
    unknown = parse(["M", "-sc", '{"foo": 1}'], None)
    assert list(findings(Subject(unknown, None, {}))) == []


def test_the_tables_name_keys_that_there_are() -> None:
    known = set().union(*(facts_for(r).speculative_keys for r in SUPPORTED))
    assert set(ALIASES.values()) <= known
    assert set(INSTEAD) <= known
    assert not set(ALIASES) & known
    assert all(plain_name(name) == name for name in ALIASES)


KEYS = st.one_of(
    st.text(max_size=12),
    st.sampled_from([*ALIASES, *facts_for("0.33.0").speculative_keys, "topk", "foo"]),
)
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8),
        st.sampled_from(["eagle3", "eagle", "probabilistic", "gumbel", "synthetic", "fly", "fp8"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)  # fmt: skip


@given(st.dictionaries(KEYS, VALUES, max_size=8), st.sampled_from(SUPPORTED))
def test_any_keys(keys: dict[str, Any], release: str) -> None:
    for finding in said(release, keys):
        assert finding.id in KINDS
        assert "\n" not in finding.text
        assert not finding.fact.endswith(".")
        assert finding.fix
        assert str(finding.evidence)
        assert len(finding.fact) < 1000


def test_whether_it_is_eagle3() -> None:
    assert is_eagle3({"model": "x/kimi-EAGLE3"})
    assert is_eagle3({"method": "eagle3", "model": "x/eagle-draft"})
    assert not is_eagle3({"model": "org/eagle-kimi-eagle3"})
    assert not is_eagle3({"model": "x/draft"})
    assert not is_eagle3(None)


@pytest.mark.parametrize("size", [1, 4])
def test_a_draft_tensor_parallel_size_is_said_with_the_run_and_dropped_here(size: int) -> None:
    keys = {**BASE, "draft_tensor_parallel_size": size}
    assert said("0.26.0", keys, "-tp", "8") == []
    (finding,) = said("0.26.0", {**keys, "max_model_len": 0}, "-tp", "8")
    assert "draft_tensor_parallel_size" not in finding.fix
    (finding,) = said("0.26.0", {**keys, "max_model_len": 0}, "-tp", str(size))
    assert f'"draft_tensor_parallel_size": {size}' in finding.fix


@pytest.mark.parametrize(
    ("release", "switch", "ignored"),
    [("0.33.0", "1", True), ("0.32.0", "1", False), ("0.29.0", "1", False), ("0.33.0", "0", False)],
)
def test_unpadded_drafts_are_ignored_only_where_they_keep_async_scheduling(
    release: str, switch: str, ignored: bool
) -> None:
    """Before 0.33 the key turns asynchronous scheduling off on either runner."""
    environ = {"VLLM_USE_V2_MODEL_RUNNER": switch}
    keys = {**BASE, "disable_padded_drafter_batch": True}
    ids = [finding.id for finding in said(release, keys, environ=environ)]
    assert ids == (["command-speculative-ignored"] if ignored else [])
    command = parse(["M", "--speculative-config", json.dumps(keys)])
    found = {f.id for f in run.findings(Subject(command, facts_for(release), environ))}
    assert ("run-async-off" in found) is not ignored
