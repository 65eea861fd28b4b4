"""LB-BSP: everybody waits for everybody, but the slow have less to do.

Chen, Weng, Wang, Li, Li: "Semi-Dynamic Load Balancing: Efficient Distributed Learning in
Non-Dedicated Environments", arXiv 1806.02508.

    in every round worker n computes b_n micro-batches of B = `micro_batches` times workers
        b_n = B * v_n / sum of v             v_n: its measured speed, smoothed
        w   <- optimizer(w, sum of gradients / sum of samples)

Differs from the paper: a share is a number of micro-batches, not a size of one, since the loop is
the user's; and speeds are an exponential average, where the paper trains a predictor.

Do not use when speeds change from round to round: shares that were measured yesterday do not help,
and one micro-batch that takes long holds up everybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules


@dataclass(frozen=True)
class LBBSP(Algorithm):
    """Synchronous SGD with shares by measured speed."""

    micro_batches: int = 8
    """Micro-batches of a round, per worker on average."""
    memory: float = 0.8
    """How much of the old speed stays in the average, each round."""

    def __post_init__(self) -> None:
        self.check_counts("micro_batches")
        if not (isinstance(self.memory, int | float) and 0 <= self.memory < 1):
            raise ValueError(f"memory must be at least 0 and below 1, got {self.memory!r}")

    def start(self, replica: Replica) -> None:
        replica.open_partial(Rules("all"))
        replica.memory["share"] = self.micro_batches
        replica.memory["seconds"] = [0.0] * replica.world.size

    def step(self, replica: Replica) -> Iterator[Round]:
        replica.contribute(arrive=replica.piled + 1 >= replica.memory["share"])
        yield from self.rounds(replica, replica.results())

    def leave(self, replica: Replica) -> Iterator[Round]:
        yield from self.rounds(replica, replica.serve())

    def rounds(self, replica: Replica, records: Iterator[Round]) -> Iterator[Round]:
        for record in records:
            known: list[float] = replica.memory["seconds"]
            for rank, seconds in enumerate(record.seconds_by_rank):
                new = self.memory * known[rank] + (1 - self.memory) * seconds
                known[rank] = new if known[rank] and seconds else seconds or known[rank]
            everyone = record.ranks
            if replica.world.rank in everyone and all(known[rank] for rank in everyone):
                speeds = [1 / known[rank] for rank in everyone]
                parts = shares(self.micro_batches * len(everyone), speeds)
                replica.memory["share"] = parts[everyone.index(replica.world.rank)]
            yield record


def shares(total: int, speeds: Sequence[float]) -> list[int]:
    """Split `total` by speed into whole numbers, at least 1 each; what is left to the neediest.

    >>> shares(12, [2.0, 2.0, 1.0, 1.0])
    [4, 4, 2, 2]
    >>> shares(8, [1.0, 1.0, 1.0, 100.0])
    [1, 1, 1, 5]
    """
    exact = [total * speed / sum(speeds) for speed in speeds]
    parts = [max(int(share), 1) for share in exact]
    while sum(parts) < total:
        neediest = max(range(len(parts)), key=lambda n: exact[n] - parts[n])
        parts[neediest] += 1
    while sum(parts) > total and max(parts) > 1:
        richest = max(
            (n for n in range(len(parts)) if parts[n] > 1), key=lambda n: parts[n] - exact[n]
        )
        parts[richest] -= 1
    return parts
