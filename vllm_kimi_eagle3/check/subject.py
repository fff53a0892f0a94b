# SPDX-License-Identifier: Apache-2.0
"""What is checked: a command, the vLLM and the GPUs for it, and the two checkpoints it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vllm_kimi_eagle3.checkpoint.drafter import Drafter, TargetShape
from vllm_kimi_eagle3.checkpoint.tensors import TensorInfo
from vllm_kimi_eagle3.findings import Finding

from .command import Command
from .facts import Facts

GIB = 1024**3


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one machine, all alike.

    Attributes:
        name: as the driver has it, or ``sm_120``.
        capability: compute capability, ``(12, 0)``.
        memory: bytes of each.
        count: how many may be used; 0 if not known.
    """

    name: str
    capability: tuple[int, int]
    memory: int
    count: int


@dataclass(frozen=True)
class Weights:
    """A target's weights.

    Attributes:
        per_rank: bytes on each tensor-parallel rank.
        total: bytes over all ranks' shards, each counted once.
        estimated: they follow from config.json and not from the files.
    """

    per_rank: int
    total: int
    estimated: bool


@dataclass
class Checkpoint:
    """A checkpoint as far as it is on this machine.

    Attributes:
        model: as the user named it.
        folder: where it is; None if not on this machine.
        config: its config.json; None if there is none that can be read.
    """

    model: str
    folder: Path | None = None
    config: Mapping[str, Any] | None = None


@dataclass
class Subject:
    """Everything that a check may look at. Later checks see what earlier ones found out.

    Attributes:
        command: what ``vllm serve`` gets.
        facts: the vLLM that is to run it; None if there is none and none was named.
        environ: the server's environment.
        gpus: None if there are none here and none were named.
        patches: for each patch id whether it is in effect on this vLLM: True also where upstream
            has closed the gap.
        patches_off: for each patch id that is not in effect, why, in words.
        target: the target's checkpoint; None if the command names none.
        drafter: the drafter's; None if the command names none.
        shape: the target's shape, once its config is known to be a Kimi's.
        pair: the drafter's facts, once they could be read.
        tensors: the drafter's tensors; None if they are not here, or could not be read.
        weights: the target's weights; None if nothing is known of them.
    """

    command: Command
    facts: Facts | None
    environ: Mapping[str, str]
    gpus: Gpus | None = None
    patches: Mapping[str, bool] = field(default_factory=dict)
    patches_off: Mapping[str, str] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda _: None
    target: Checkpoint | None = None
    drafter: Checkpoint | None = None
    shape: TargetShape | None = None
    pair: Drafter | None = None
    tensors: Mapping[str, TensorInfo] | None = None
    weights: Weights | None = None

    @property
    def target_text(self) -> Mapping[str, Any]:
        """The config of the target's language model; empty if it is not known."""
        config = None if self.target is None else self.target.config
        text = None if config is None else config.get("text_config", config)
        return text if isinstance(text, Mapping) else {}


class Check(Protocol):
    """One file's ``findings``."""

    def __call__(self, subject: Subject) -> Iterator[Finding]: ...
