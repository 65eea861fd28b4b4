"""Shares of a round by measured speed: so that all workers come to it together.

Whole micro-batches seldom fit the speeds, so a round may hold up to a quarter more or fewer of them
than asked for, where that makes more of them a second. At speeds 2:2:1:1 and 2 each, 8 in all would
be 3:3:1:1 or 2:2:2:2, and somebody waits; 6 are 2:2:1:1, and nobody does.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from offbeat.replica import Replica
from offbeat.rounds import Round


def begin(replica: Replica, share: int) -> None:
    """Nothing is known of the speeds: everybody has the same share."""
    replica.own["share"], replica.memory["seconds"] = share, [0.0] * replica.world.size


def follow(replica: Replica, round: Round, share: int, keeps: float) -> None:
    """Draw this worker's next share from a round whose only note is what a micro-batch has taken.

    `share` is what a worker has on average; `keeps`, how much of the old speed stays.
    """
    known: list[float] = replica.memory["seconds"]
    for each in round.ranks:
        (seconds,) = round.notes_by_rank[each]
        new = keeps * known[each] + (1 - keeps) * seconds
        known[each] = new if known[each] and seconds else seconds or known[each]
    everyone, rank, own = round.ranks, replica.world.rank, replica.own
    if rank in everyone and all(known[each] for each in everyone):
        parts = shares(share * len(everyone), [1 / known[each] for each in everyone])
        own["share"] = parts[everyone.index(rank)]
        own["brings"] = sum(parts) / own["share"]  # of all, for each own


def shares(target: int, speeds: Sequence[float], slack: float = 0.25) -> list[int]:
    """Whole numbers, at least 1 each, about `target` in all, of the most micro-batches a second.

    A total further from the target, but within the slack, must be 1 % better than a nearer one.

    >>> shares(12, [2.0, 2.0, 1.0, 1.0])
    [4, 4, 2, 2]
    >>> shares(8, [2.0, 2.0, 1.0, 1.0])
    [2, 2, 1, 1]
    >>> shares(8, [1.0, 1.0, 1.0, 100.0], slack=0)
    [1, 1, 1, 5]
    """
    parts = [1] * len(speeds)
    round_s = max(1 / speed for speed in speeds)
    ends = [(2 / speed, n) for n, speed in enumerate(speeds)]  # of one more, for each
    heapify(ends)
    ways = {len(parts): (len(parts) / round_s, list(parts))}  # by total: a second, and who how many
    for total in range(len(parts) + 1, int(target * (1 + slack)) + 1):
        end_s, n = ends[0]
        parts[n] += 1
        heapreplace(ends, ((parts[n] + 1) / speeds[n], n))
        round_s = max(round_s, end_s)
        if total >= target * (1 - slack):
            ways[total] = (total / round_s, list(parts))
    allowed = [total for total in ways if total >= target * (1 - slack)] or list(ways)
    best = min(allowed, key=lambda total: abs(total - target))
    for total in sorted(allowed, key=lambda total: (abs(total - target), total)):
        if ways[total][0] > 1.01 * ways[best][0]:
            best = total
    return ways[best][1]
