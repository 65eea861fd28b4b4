"""LB-BSP: everybody waits for everybody, but the slow have less to do.

Chen, Weng, Wang, Li, Li: "Semi-Dynamic Load Balancing: Efficient Distributed Learning in
Non-Dedicated Environments", arXiv 1806.02508.

    in every round worker n computes b_n micro-batches of B = `micro_batches` times workers
        b_n ~ B * v_n / sum of v             v_n: its measured speed, smoothed
        w   <- optimizer(w, sum of gradients / sum of samples)

Differs from the paper: a share is a number of micro-batches, not a size of one, since the loop is
the user's. Whole micro-batches seldom fit the speeds: B may be up to a quarter smaller or larger,
where that makes more of them a second. At speeds 2:2:1:1 and 2 each, 8 in all would be 3:3:1:1 or
2:2:2:2, and somebody waits; 6 are 2:2:1:1, and nobody does. Also, speeds are an exponential
average, where the paper trains a predictor.

Do not use when speeds change from round to round: shares that were measured yesterday do not help,
and one micro-batch that takes long holds up everybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules


@dataclass(frozen=True)
class LBBSP(Algorithm):
    """Synchronous SGD with shares by measured speed."""

    micro_batches: int = 8
    """Micro-batches of a round, per worker on average, and nearly so."""
    memory: float = 0.8
    """How much of the old speed stays in the average, each round."""

    def __post_init__(self) -> None:
        self.check_counts("micro_batches")
        if not (isinstance(self.memory, int | float) and 0 <= self.memory < 1):
            raise ValueError(f"memory must be at least 0 and below 1, got {self.memory!r}")

    def start(self, replica: Replica) -> None:
        replica.open(Rules("all", lockstep=True, uneven=True), notes=1)
        replica.memory["share"] = self.micro_batches
        replica.memory["seconds"] = [0.0] * replica.world.size

    def step(self, replica: Replica) -> Iterator[Round]:
        comes = replica.piled + 1 >= replica.memory["share"]
        replica.contribute(arrive=comes, notes=(replica.seconds,))
        yield from self.rounds(replica, replica.results())

    def rounds(self, replica: Replica, rounds: Iterator[Round]) -> Iterator[Round]:
        for each in rounds:
            known: list[float] = replica.memory["seconds"]
            for rank in each.ranks:
                (seconds,) = each.notes_by_rank[rank]
                new = self.memory * known[rank] + (1 - self.memory) * seconds
                known[rank] = new if known[rank] and seconds else seconds or known[rank]
            everyone = each.ranks
            if replica.world.rank in everyone and all(known[rank] for rank in everyone):
                speeds = [1 / known[rank] for rank in everyone]
                parts = shares(self.micro_batches * len(everyone), speeds)
                replica.memory["share"] = parts[everyone.index(replica.world.rank)]
            yield each


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
