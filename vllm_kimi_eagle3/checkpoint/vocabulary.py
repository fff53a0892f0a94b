# SPDX-License-Identifier: Apache-2.0
"""Does a drafter's map from its own vocabulary to the target's hold together?

A drafter with a reduced vocabulary scores ``draft_vocab_size`` of the target's tokens. Its ``d2t``
says which: row i of its head stands for target token ``i + d2t[i]``. vLLM adds these numbers up
unchecked; where they are absent or wrong it proposes other tokens than the drafter meant, with no
message and an acceptance near zero. ``t2d``, a mask over the target's vocabulary, is left over from
training. vLLM never reads it; here it is the second witness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_kimi_eagle3.checkpoint.drafter_tensors import Expected
from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.checkpoint.tensors import TensorInfo, read_integers
from vllm_kimi_eagle3.findings import Evidence, Finding


@dataclass(frozen=True)
class Vocabulary:
    """What a drafter scores.

    Attributes:
        draft_vocab_size: how many of the target's tokens.
        reduced: it is fewer than all.
        drop_d2t: the checkpoint has a ``d2t`` that says nothing: the vocabulary is full and it is
            the identity. vLLM from 0.30 has no parameter for it and refuses the checkpoint.
        ids: the ``d2t`` to be dropped holds each token's own id, where vLLM adds offsets.
        notes: what else is worth saying.
    """

    draft_vocab_size: int
    reduced: bool
    drop_d2t: bool
    ids: bool = False
    notes: tuple[Finding, ...] = ()


def read_vocabulary(expected: Expected, tensors: Mapping[str, TensorInfo]) -> Vocabulary:
    """Checks the draft vocabulary of a checkpoint, whose ``d2t`` and ``t2d`` are read whole.

    Raises:
        CheckpointError: as :func:`check_vocabulary`, or ``d2t`` cannot be read.
    """
    d2t = read_integers(tensors["d2t"]) if "d2t" in tensors else None
    try:
        t2d = read_integers(tensors["t2d"]) if "t2d" in tensors else None
    except CheckpointError:
        t2d = None  # vLLM never reads it, so it need not be integers.
    return check_vocabulary(expected.vocab_size, expected.draft_vocab_size, d2t, t2d)


def check_sizes(vocab_size: int, draft_vocab_size: int) -> None:
    """Checks the draft vocabulary's size against the target's.

    Raises:
        CheckpointError: there can be no such draft vocabulary.
    """
    if vocab_size < 1 or draft_vocab_size < 1:
        raise _sizes(
            f"vocab_size {vocab_size} and draft_vocab_size {draft_vocab_size}: both must be at "
            "least 1",
            "correct the drafter's config.json",
            draft_vocab_size,
        )
    if draft_vocab_size > vocab_size:
        raise _sizes(
            f"draft_vocab_size {draft_vocab_size} is larger than the target's vocabulary of "
            f"{vocab_size}",
            "correct the drafter's config.json, or give the target it was trained for",
            draft_vocab_size,
        )


def check_vocabulary(
    vocab_size: int,
    draft_vocab_size: int,
    d2t: Sequence[int] | None,
    t2d: Sequence[int] | None,
) -> Vocabulary:
    """Checks the draft vocabulary against what the checkpoint says of it.

    Args:
        vocab_size: the target's.
        draft_vocab_size: the drafter's; give ``vocab_size`` where its config has none.
        d2t: the values of the tensor ``d2t``, offsets; None if there is none.
        t2d: the values of the tensor ``t2d``, 0 or 1 each; None if there is none.

    Raises:
        CheckpointError: the numbers contradict each other, or a wrong map cannot be ruled out.
    """
    check_sizes(vocab_size, draft_vocab_size)
    notes: list[Finding] = []
    if t2d is not None and not set(t2d) <= {0, 1}:
        notes.append(_unused("t2d is no mask of zeros and ones"))
        t2d = None
    if t2d is not None and len(t2d) != vocab_size:
        notes.append(_unused(f"t2d has {len(t2d)} entries for {vocab_size} tokens"))
        t2d = None
    if t2d is not None:
        _check_mask(draft_vocab_size, t2d)
    if draft_vocab_size == vocab_size:
        return _full(vocab_size, d2t, notes)
    if d2t is None:
        raise _map(
            f"draft_vocab_size {draft_vocab_size} is less than vocab_size {vocab_size}, and the "
            "checkpoint has no d2t: vLLM would take the rows of lm_head for the target's first "
            f"{draft_vocab_size} tokens",
            "add the d2t that the drafter was trained with",
        )
    _check_length(draft_vocab_size, d2t)
    targets = [index + offset for index, offset in enumerate(d2t)]
    _check_targets(vocab_size, targets, d2t)
    if t2d is not None:
        _check_agreement(targets, d2t, t2d)
    elif not any(d2t):
        raise _map(
            f"d2t is all zero while draft_vocab_size {draft_vocab_size} is less than vocab_size "
            f"{vocab_size}: every proposal would be one of the target's first {draft_vocab_size} "
            "tokens, as if d2t had not been filled in",
            _CONFIRM,
        )
    elif (where := _first_descent(targets)) is not None:
        raise _map(
            f"d2t is not in rising order: row {where} stands for target token {targets[where]} and "
            f"row {where + 1} for {targets[where + 1]}, where trainers write the tokens in order",
            _CONFIRM,
        )
    return Vocabulary(draft_vocab_size, reduced=True, drop_d2t=False, notes=tuple(notes))


def _full(vocab_size: int, d2t: Sequence[int] | None, notes: list[Finding]) -> Vocabulary:
    if d2t is None:
        return Vocabulary(vocab_size, reduced=False, drop_d2t=False, notes=tuple(notes))
    _check_length(vocab_size, d2t)
    if not any(d2t):
        what = "d2t is all zero"
    elif all(value == index for index, value in enumerate(d2t)):
        what = "d2t holds each token's own id, not an offset"
    else:
        where = next(index for index, value in enumerate(d2t) if value != 0)
        raise _map(
            f"d2t reorders a full vocabulary (draft_vocab_size is vocab_size, {vocab_size}, and "
            f"d2t[{where}] is {d2t[where]}), which vLLM from 0.30 on does not do",
            "give the draft_vocab_size of lm_head, or export lm_head in the target's order "
            "without a d2t",
        )
    unneeded = Finding(
        "drafter-d2t-unneeded",
        f"{what} with a full vocabulary: it maps every token to itself and is not needed",
        evidence=Evidence(key="d2t"),
    )
    return Vocabulary(
        vocab_size, reduced=False, drop_d2t=True, ids=any(d2t), notes=(unneeded, *notes)
    )


def _check_mask(draft_vocab_size: int, t2d: Sequence[int]) -> None:
    if (marked := sum(t2d)) != draft_vocab_size:
        raise _map(
            f"t2d marks {marked} tokens, draft_vocab_size is {draft_vocab_size}",
            "correct draft_vocab_size in the drafter's config.json, or get the t2d that belongs "
            "to its d2t",
            key="t2d",
        )


def _check_length(draft_vocab_size: int, d2t: Sequence[int]) -> None:
    if len(d2t) != draft_vocab_size:
        raise _map(
            f"d2t has {len(d2t)} entries, draft_vocab_size is {draft_vocab_size}",
            "correct draft_vocab_size in the drafter's config.json, or get the d2t that belongs "
            "to lm_head",
        )


def _check_targets(vocab_size: int, targets: Sequence[int], d2t: Sequence[int]) -> None:
    """Each row must stand for a token of the target, and no two rows for the same."""
    for index, target in enumerate(targets):
        if not 0 <= target < vocab_size:
            ids = d2t[0] >= 0 and d2t[-1] < vocab_size and _first_descent(d2t) is None
            raise _map(
                f"d2t[{index}] is {d2t[index]}, which makes row {index} stand for target token "
                f"{target}, outside the target's vocabulary of {vocab_size}"
                + (f": {_ABSOLUTE}" if ids else ""),
                _OFFSETS if ids else "export it again, or give the target it was trained for",
                key=f"d2t[{index}]",
                value=d2t[index],
            )
    first: dict[int, int] = {}
    for index, target in enumerate(targets):
        if (other := first.setdefault(target, index)) != index:
            raise _map(
                f"d2t makes rows {other} and {index} both stand for target token {target}, and "
                "vLLM would keep the score of one of them",
                "export it again",
            )


def _check_agreement(targets: Sequence[int], d2t: Sequence[int], t2d: Sequence[int]) -> None:
    """As many tokens are marked as there are distinct targets, so all marked means the same set."""
    missed = next((index for index, target in enumerate(targets) if not t2d[target]), None)
    if missed is None:
        return
    if len(set(d2t)) == len(d2t) and all(0 <= value < len(t2d) and t2d[value] for value in d2t):
        raise _map(
            f"d2t and t2d disagree, t2d marks the numbers in d2t: {_ABSOLUTE}",
            _OFFSETS,
        )
    raise _map(
        f"d2t and t2d disagree: row {missed} stands for target token {targets[missed]}, which t2d "
        "does not mark, so the two are from different exports",
        "get the pair that belongs to lm_head",
    )


def _sizes(fact: str, fix: str, value: int) -> CheckpointError:
    return CheckpointError(
        "drafter-vocabulary", fact, fix, file="config.json", key="draft_vocab_size", value=value
    )


def _map(fact: str, fix: str, *, key: str = "d2t", value: int | None = None) -> CheckpointError:
    return CheckpointError("drafter-d2t", fact, fix, key=key, value=value)


def _unused(fact: str) -> Finding:
    return Finding(
        "drafter-t2d", f"{fact}, and was not used to check d2t", evidence=Evidence(key="t2d")
    )


_ABSOLUTE = "it holds token ids, where vLLM adds offsets"
_OFFSETS = "export it with d2t[i] = (token id of row i) - i"
_CONFIRM = "export it again (a t2d that marks just these tokens would confirm it)"


def _first_descent(values: Sequence[int]) -> int | None:
    """The first index whose value is not below the next one."""
    return next((i for i in range(len(values) - 1) if values[i] >= values[i + 1]), None)
