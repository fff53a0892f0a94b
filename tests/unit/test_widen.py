# SPDX-License-Identifier: Apache-2.0
"""The pair with the real Kimi's head sizes computes what the tiny pair computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.assets.variants import load_expected, load_prompts
from tests.assets.widen import write_wide_pair
from tests.reference.drafter import load_drafter
from tests.reference.target import load_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_wide_pair(tmp_path_factory.mktemp("wide"))


def test_target_says_the_same(pair: tuple[Path, Path]) -> None:
    target = load_target(pair[0])
    for prompt, expected in zip(load_prompts(), load_expected()["output_token_ids"], strict=True):
        first = len(prompt["token_ids"])
        logits = target(torch.tensor(prompt["token_ids"] + expected)).logits[first - 1 : -1]
        assert logits.argmax(-1).tolist() == expected


def test_drafter_is_wider_and_loads(pair: tuple[Path, Path]) -> None:
    target, drafter = pair
    loaded = load_drafter(drafter, load_target(target))
    shapes = {tuple(p.shape) for name, p in loaded.named_parameters() if "kv_b_proj" in name}
    assert shapes == {(4 * (128 + 128), 512)}
