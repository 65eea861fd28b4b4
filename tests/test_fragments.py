"""Which buckets a round carries, and who gives what to it."""

from __future__ import annotations

import torch

from offbeat.rounds import Layout
from offbeat.rounds.fragments import Carried, Fragments

NOBODY: frozenset[int] = frozenset()


def four_fragments(drawn: bool = False) -> Fragments:
    tensors = [torch.zeros(3) for _ in range(4)]
    return Fragments(Layout([str(n) for n in range(4)], tensors, bucket_bytes=1), 4, drawn)


def test_a_worker_of_half_the_speed_brings_every_fragment() -> None:
    """With a quorum the order of fragments is drawn anew in every turn."""
    drawn, in_turn = (four_fragments(drawn) for drawn in (True, False))
    assert {drawn.of(number) for number in range(0, 60, 2)} == {(0,), (1,), (2,), (3,)}
    assert {in_turn.of(number) for number in range(0, 60, 2)} == {(0,), (2,)}
    for turn in range(10):
        numbers = range(4 * turn, 4 * turn + 4)
        assert sorted(drawn.of(number) for number in numbers) == [(0,), (1,), (2,), (3,)]


def test_without_fragments_every_round_carries_everything() -> None:
    carried = Carried(None)
    assert not carried.in_fragments
    assert carried.flushes
    assert [carried.next(number) for number in range(3)] == [None] * 3
    assert carried.given(5, left=True) == (5, None)
    assert carried.ended(frozenset({1})) == ()
    assert carried.next(6) is None


def test_the_round_after_a_worker_has_left_is_whole_and_the_next_one_is_not() -> None:
    carried = Carried(four_fragments())
    assert carried.next(5) == (1,)
    assert carried.ended(NOBODY) == ()
    assert carried.ended(frozenset({2, 0})) == (0, 2)
    assert carried.next(6) is None
    assert carried.ended(frozenset({2, 0})) == ()
    assert carried.next(7) == (3,)
    assert carried.ended(frozenset({0, 1, 2})) == (1,)


def test_who_leaves_gives_all_to_the_round_after_the_one_that_says_so() -> None:
    carried = Carried(four_fragments())
    assert carried.given(4, left=False) == (4, (0,))
    assert carried.given(4, left=True) == (5, None)
    carried.tell(left=False)
    assert not carried.flushes
    carried.tell(left=True)
    assert carried.flushes
    assert carried.given(5, left=True) == (5, None)
