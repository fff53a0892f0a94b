# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_eagle3.checkpoint.errors import CheckpointError
from vllm_kimi_eagle3.checkpoint.vocabulary import Vocabulary, check_vocabulary


def offsets(targets: Sequence[int]) -> list[int]:
    return [target - index for index, target in enumerate(targets)]


def mask(vocab_size: int, targets: Sequence[int]) -> list[int]:
    return [int(index in targets) for index in range(vocab_size)]


def refused(*arguments: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        check_vocabulary(*arguments)
    assert "\n" not in str(error.value)
    assert error.value.finding.kind.id in ("drafter-vocabulary", "drafter-d2t")
    assert error.value.finding.fix
    return str(error.value)


TARGETS = [1, 2, 5, 9]
D2T, T2D = offsets(TARGETS), mask(12, TARGETS)


@given(st.integers(2, 60).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_a_selection_of_tokens_in_order_is_accepted(drawn: tuple[int, set[int]]) -> None:
    vocab_size, selected = drawn
    targets = sorted(selected)
    if not targets or len(targets) == vocab_size:
        return
    plain = Vocabulary(len(targets), reduced=True, drop_d2t=False)
    d2t, t2d = offsets(targets), mask(vocab_size, targets)
    assert check_vocabulary(vocab_size, len(targets), d2t, t2d) == plain
    if any(d2t):
        assert check_vocabulary(vocab_size, len(targets), d2t, None) == plain


@given(
    st.integers(-2, 12),
    st.integers(-2, 12),
    st.none() | st.lists(st.integers(-3, 12), max_size=12),
    st.none() | st.lists(st.integers(-1, 2), max_size=12),
)
def test_what_is_accepted_maps_to_distinct_tokens(
    vocab_size: int, draft_vocab_size: int, d2t: list[int] | None, t2d: list[int] | None
) -> None:
    try:
        result = check_vocabulary(vocab_size, draft_vocab_size, d2t, t2d)
    except CheckpointError:
        return
    assert result.draft_vocab_size == draft_vocab_size
    assert result.reduced == (draft_vocab_size < vocab_size)
    if result.reduced:
        assert d2t is not None
        targets = [index + offset for index, offset in enumerate(d2t)]
        assert len(set(targets)) == draft_vocab_size
        assert set(targets) <= set(range(vocab_size))


@given(st.permutations(TARGETS))
def test_another_order_needs_a_mask_that_confirms_it(targets: list[int]) -> None:
    assert check_vocabulary(12, 4, offsets(targets), T2D).reduced
    if targets != TARGETS:
        assert "rising order" in refused(12, 4, offsets(targets), None)


def test_a_full_vocabulary() -> None:
    assert check_vocabulary(4, 4, None, None) == Vocabulary(4, reduced=False, drop_d2t=False)
    assert check_vocabulary(4, 4, None, [1] * 4).notes == ()
    for identity in ([0] * 4, [0, 1, 2, 3]):
        result = check_vocabulary(4, 4, identity, None)
        assert (result.reduced, result.drop_d2t) == (False, True)
        assert result.ids == any(identity)
        (note,) = result.notes
        assert note.kind.id == "drafter-d2t-unneeded"
        assert "not needed" in note.fact
    assert "reorders a full vocabulary" in refused(4, 4, [1, -1, 0, 0], None)
    assert "4 entries" in refused(5, 5, [0] * 4, None)


def test_a_reduced_vocabulary_without_a_map() -> None:
    assert "the target's first 4 tokens" in refused(12, 4, None, T2D)


def test_a_map_of_zeros_is_one_that_was_not_filled_in_unless_the_mask_says_so() -> None:
    assert "all zero" in refused(12, 4, [0] * 4, None)
    assert check_vocabulary(12, 4, [0] * 4, mask(12, range(4))).reduced
    assert "t2d does not mark" in refused(12, 4, [0] * 4, mask(12, [0, 1, 2, 4]))


def test_sizes_that_contradict_each_other() -> None:
    assert "d2t has 3 entries, draft_vocab_size is 4" in refused(12, 4, D2T[:3], None)
    (note,) = check_vocabulary(12, 4, D2T, T2D[:11]).notes
    assert note.kind.id == "drafter-t2d"
    assert "t2d has 11 entries" in note.fact
    assert "t2d marks 5 tokens" in refused(12, 4, D2T, mask(12, [1, 2, 5, 9, 10]))
    assert "larger than the target's" in refused(4, 12, None, None)
    for sizes in ((4, 0), (4, -1), (0, 0), (-1, -1)):
        assert "at least 1" in refused(*sizes, None, None)


def test_tokens_that_the_target_does_not_have() -> None:
    assert "d2t[3] is 9" in refused(12, 4, [1, 1, 3, 9], None)
    assert "target token -1" in refused(12, 4, [0, -2, 3, 6], None)


def test_two_rows_for_one_token() -> None:
    assert "rows 1 and 2 both stand for target token 2" in refused(12, 4, [0, 1, 0, 6], T2D)


def test_token_ids_in_place_of_offsets() -> None:
    said = "holds token ids, where vLLM adds offsets"
    assert said in refused(12, 4, [1, 2, 5, 9], None)  # out of range as offsets
    assert said in refused(40, 4, [1, 2, 5, 9], mask(40, [1, 2, 5, 9]))  # in range as offsets
    assert said not in refused(12, 4, [3, 2, 1, 9], None)


def test_a_mask_of_another_selection() -> None:
    message = refused(12, 4, D2T, mask(12, [1, 2, 5, 8]))
    assert "row 3 stands for target token 9, which t2d does not mark" in message


def test_a_mask_that_is_none_is_not_held_against_the_map() -> None:
    (note,) = check_vocabulary(12, 4, D2T, [7] * 5).notes
    assert "not used" in note.fact
    assert "all zero" in refused(12, 4, [0] * 4, [7] * 5)


def test_an_entry_that_is_wrong_is_named() -> None:
    with pytest.raises(CheckpointError) as refusal:
        check_vocabulary(12, 4, [1, 1, 3, 9], None)
    evidence = refusal.value.finding.evidence
    assert (evidence.key, evidence.value) == ("d2t[3]", "9")
