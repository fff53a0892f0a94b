# SPDX-License-Identifier: Apache-2.0
"""What the tests of the offline mode share: hidden states of the tiny target, written once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.assets import variants
from tests.reference.target import Target, load_target
from vllm_kimi_eagle3.diagnose.offline.score import Text
from vllm_kimi_eagle3.diagnose.offline.subject import Subject, read_subject

from .captured import write_captured


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from a second one, and lose much beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target() -> Target:
    return load_target(variants.KIMI_K25_TARGET)


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    """A folder as `--keep` leaves it, of the prompts and answers of `expected.json`."""
    return write_captured(tmp_path_factory.mktemp("captured"), k=5, target=target)


@pytest.fixture(scope="session")
def texts(captured: Path) -> Callable[[int], list[Text]]:
    """The texts for so many drafts a step, cut so that steps begin where the reference's do."""
    found = json.loads((captured / "captured.json").read_text())["texts"]

    def of(k: int) -> list[Text]:
        return [
            Text(
                tuple(text["token_ids"][: len(text["token_ids"]) - (5 - k)]),
                text["prompt_tokens"],
                captured / text["file"],
                text["kind"],
            )
            for text in found
        ]

    return of


@pytest.fixture(scope="session")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
    """A committed drafter or a variant by its name, read."""
    folder = tmp_path_factory.mktemp("variants")

    def read(name: str) -> Subject:
        path = variants.ASSETS / name
        if name in variants.VARIANTS:
            path = variants.write_variant(name, folder / name)
        return read_subject(str(variants.KIMI_K25_TARGET), str(path))

    return read
