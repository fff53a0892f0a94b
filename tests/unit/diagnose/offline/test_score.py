# SPDX-License-Identifier: Apache-2.0
"""The counts of the scorer are those of the reference's draft-verify loop, draft by draft."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.assets import variants
from tests.reference.layers import yarn_inverse_frequencies
from vllm_kimi_eagle3.acceptance.model import Counts, predicted, total
from vllm_kimi_eagle3.checkpoint.rope import Rope
from vllm_kimi_eagle3.diagnose.offline.hypotheses import Reading
from vllm_kimi_eagle3.diagnose.offline.score import (
    WINDOW,
    Drafter,
    Score,
    Text,
    causal_attention,
    inverse_frequencies,
    walk,
)
from vllm_kimi_eagle3.diagnose.offline.subject import Subject, read_subject

Texts = Callable[[int], list[Text]]
SubjectOf = Callable[[str], Subject]


def drafter_of(subject: Subject) -> Drafter:
    return Drafter(subject.expected, subject.tensors, subject.target_tensors, eps=subject.eps)


def counted(score: Score) -> list[int]:
    counts = total(score.texts)
    return [counts.drafts, *counts.accepted]


def of_row(row: dict[str, Any]) -> list[int]:
    return [row["num_drafts"], *row["num_accepted_tokens_per_pos"]]


@pytest.mark.parametrize("name", sorted(variants.VARIANTS))
def test_every_variant_has_the_references_counts(
    name: str, subject_of: SubjectOf, texts: Texts
) -> None:
    subject = subject_of(name)
    assert not subject.refused
    score = drafter_of(subject).score(subject.now, texts(3), 3)
    assert counted(score) == of_row(variants.expected_variant(name))


WRONG = [
    (name, way)
    for name in (
        *("llama-eagle31", "mla-eagle31", "llama-norm-before-fc", "mla-norm-before-residual"),
        *("llama-theta", "llama-yarn", "mla-plain-rope", "mla-aux-edges", "mla-no-aux"),
        *("mla-four-aux-top", "mla-reduced-vocab", "llama-own-embed", "mla-own-head"),
    )
    for way in variants.VARIANTS[name].wrong
]


@pytest.mark.parametrize(("name", "way"), WRONG, ids=lambda value: value.replace(" ", "-"))
def test_wrong_readings_have_the_references_counts(
    name: str, way: str, tmp_path: Path, texts: Texts
) -> None:
    """What a drafter would draft if it were read so, which is what a hypothesis is."""
    wrong = variants.VARIANTS[name].wrong[way]
    right = variants.write_variant(name, tmp_path / "right")
    folder = variants.edit_drafter(
        right, tmp_path / "wrong", wrong.config, wrong.remove, wrong.tensors
    )
    subject = read_subject(str(variants.KIMI_K25_TARGET), str(folder))
    reading = subject.now
    if wrong.aux_layer_ids is not None:
        reading = replace(reading, aux=wrong.aux_layer_ids)
    score = drafter_of(subject).score(reading, texts(3), 3)
    assert counted(score) == of_row(variants.wrong_variant(name)[way])


@pytest.mark.parametrize("folder", [variants.LLAMA_DRAFTER, variants.MLA_DRAFTER])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_any_number_of_drafts(folder: Path, k: int, subject_of: SubjectOf, texts: Texts) -> None:
    subject = subject_of(folder.name)
    score = drafter_of(subject).score(subject.now, texts(k), k)
    assert counted(score) == of_row(variants.expected_run(folder.name, k))


def test_a_text_says_where_steps_begin() -> None:
    text = Text((1,) * 10, 4, Path("nowhere"))
    # The answer has 6 tokens: a step begins with 3 drafts left behind its own token.
    assert text.places(3) == range(3, 6)
    assert len(text.places(6)) == 0


def test_drafts_of_a_text_too_short_are_none(subject_of: SubjectOf, texts: Texts) -> None:
    subject = subject_of(variants.LLAMA_DRAFTER.name)
    text = replace(texts(3)[0], token_ids=texts(3)[0].token_ids[:66])
    score = drafter_of(subject).score(subject.now, [text], 3)
    assert counted(score) == [0, 0, 0, 0]
    assert score.length == 1.0


@pytest.mark.parametrize(
    ("accepted", "places", "per_position"),
    [
        ([], [], (0, 0)),
        ([0, 0, 0], [0, 1, 2], (0, 0)),
        ([2, 9, 9, 1, 9, 0], [0, 3, 5], (2, 1)),
        ([1, 0, 2], [0, 2], (2, 1)),
    ],
)
def test_the_walk(
    accepted: Sequence[int], places: list[int], per_position: tuple[int, ...]
) -> None:
    counts, at = walk(accepted, 2)
    assert at == places
    assert counts == Counts(len(places), per_position)


def test_steps_are_counted_by_window(subject_of: SubjectOf, texts: Texts) -> None:
    subject = subject_of(variants.LLAMA_DRAFTER.name)
    score = drafter_of(subject).score(subject.now, texts(3), 3)
    assert sum(score.steps) == total(score.texts).drafts
    assert len(score.steps) == sum(-(-len(text.places(3)) // WINDOW) for text in texts(3))


def test_what_is_predicted_holds_on_other_text(subject_of: SubjectOf, texts: Texts) -> None:
    """From one half of the texts, within the interval on the other half, for both families."""
    for folder in (variants.LLAMA_DRAFTER, variants.MLA_DRAFTER):
        subject = subject_of(folder.name)
        score = drafter_of(subject).score(subject.now, texts(3), 3)
        known, held_out = score.texts[::2], total(score.texts[1::2])
        for estimate, rate in zip(predicted(known, held_out.drafts), held_out.rates, strict=True):
            assert estimate.low <= rate <= estimate.high


# ------------------------------------------------------------------------------------------- rope


def test_yarns_frequencies_are_the_references() -> None:
    for beta_fast in (1.0, 32.0):
        scaling = {
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": beta_fast,
            "beta_slow": 1.0,
        }
        ours = inverse_frequencies(Rope(50_000.0, "yarn", scaling), 64)
        assert torch.allclose(ours, yarn_inverse_frequencies(64, 50_000.0, scaling), rtol=1e-6)


def test_linear_and_llama3_frequencies() -> None:
    plain = inverse_frequencies(Rope(10_000.0), 128)
    linear = inverse_frequencies(Rope(10_000.0, "linear", {"factor": 4.0}), 128)
    assert torch.allclose(linear, plain / 4)
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    llama3 = inverse_frequencies(Rope(10_000.0, "llama3", scaling), 128)
    assert torch.allclose(llama3[:10], plain[:10])
    assert torch.allclose(llama3[-10:], plain[-10:] / 8)
    assert bool((llama3.diff() < 0).all())


def test_another_rope_is_not_computed() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        inverse_frequencies(Rope(10_000.0, "dynamic", {"factor": 2.0}), 64)


# ------------------------------------------------------------------------------- a map that is lost


def test_a_map_that_is_not_in_the_checkpoint(subject_of: SubjectOf, texts: Texts) -> None:
    """Learned from half of the answers, it is a lower bound of what the right one gives."""
    subject = subject_of(variants.LLAMA_DRAFTER.name)
    drafter = drafter_of(subject)
    right = drafter.score(subject.now, texts(3), 3)
    none = drafter.score(replace(subject.now, rows="none"), texts(3), 3)
    learned = drafter.score(replace(subject.now, rows="unknown"), texts(3), 3)
    assert none.length < 1.05 < learned.length < right.length


def test_readings_differ_by_what_is_computed() -> None:
    plain = Reading(aux=(2, 4, 5), rope=Rope(50_000.0))
    assert plain.key == replace(plain, rope=Rope(50_000.0, scaling={})).key
    yarn = {"factor": 16.0, "original_max_position_embeddings": 128}
    said = {**yarn, "beta_fast": 32, "mscale": 1, "mscale_all_dim": 0}
    first, second = (replace(plain, rope=Rope(5e4, "yarn", s)) for s in (yarn, said))
    assert first.key == second.key
    assert plain.changed(first) == ("rope",)


@pytest.mark.parametrize("widths", [(6, 6), (6, 4), (4, 6)])
def test_attention_of_every_width(widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 7, 3, widths[0]).unbind()
    value = torch.randn(7, 3, widths[1])
    scores = torch.einsum("qnd,knd->nqk", query, key) * 0.3
    scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    expected = torch.einsum("nqk,knd->qnd", scores.softmax(-1), value)
    assert torch.allclose(causal_attention(query, key, value, 0.3), expected, atol=1e-5)


def test_attention_of_a_long_text_takes_no_matrix_of_all_pairs() -> None:
    """MLA's keys are wider than its values. Sixteen heads of 4,000 tokens have 1 GiB of pairs."""
    code = """
import resource, torch
from vllm_kimi_eagle3.diagnose.offline.score import causal_attention
query, key, value = torch.randn(4000, 16, 48), torch.randn(4000, 16, 48), torch.randn(4000, 16, 32)
causal_attention(query[:64], key[:64], value[:64], 1.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
causal_attention(query, key, value, 1.0)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 256 * 1024  # KiB
