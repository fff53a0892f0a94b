# SPDX-License-Identifier: Apache-2.0
"""What the target's process would have written, from the reference target: no vLLM is needed.

The prompts and the answers are those of `expected.json`, so its counts are what is to be scored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.assets import variants
from tests.reference.target import Target, load_target

LAYERS = 8


def write_captured(
    folder: Path,
    *,
    k: int = 3,
    target: Target | None = None,
    layers: Sequence[int] = range(LAYERS + 1),
    texts: int | None = None,
) -> Path:
    """Writes a folder as `--keep` leaves it; returns it.

    Args:
        k: drafts a step; the answers go on so far that those of the last step can be judged.
        layers: ids of the hidden states to keep; the final one is kept as well.
        texts: how many of the prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = target or load_target(variants.KIMI_K25_TARGET)
    expected = variants.load_expected()
    found: list[dict[str, Any]] = []
    prompts = variants.load_prompts()[:texts]
    for number, prompt in enumerate(prompts):
        whole = [*prompt["token_ids"], *expected["output_token_ids"][number]]
        for _ in range(k - 1):
            whole.append(int(logits(target, whole)[-1].argmax()))
        with torch.no_grad():
            every = target(torch.tensor(whole), None, tuple(range(LAYERS + 1)))
            final = target(torch.tensor(whole), None, None).aux_hidden_states
        streams = every.aux_hidden_states.chunk(LAYERS + 1, dim=-1)
        states: dict[int | str, torch.Tensor] = {i: streams[i].clone() for i in layers}
        torch.save({**states, "final": final}, folder / f"text-{number:04}.pt")
        found.append(
            {
                "file": f"text-{number:04}.pt",
                "kind": "chat",
                "prompt_tokens": len(prompt["token_ids"]),
                "token_ids": whole,
                "answer": expected["output_texts"][number],
            }
        )
    captured = {"vllm": "0.0.0", "texts": found, "left_out": 0, "tokens": sum(
        len(text["token_ids"]) for text in found
    )}  # fmt: skip
    (folder / "captured.json").write_text(json.dumps(captured))
    return folder


def logits(target: Target, token_ids: Sequence[int]) -> torch.Tensor:
    """The target's logits `[T, vocabulary]`."""
    with torch.no_grad():
        found: torch.Tensor = target(torch.tensor(token_ids)).logits
    return found
