"""What each of several transfers gets of the ports that they share: max-min fair.

All transfers speed up together until a port is full, or one of them is as fast as it would be
alone. Those stay as they are, and the others go on: nobody can get more without taking it from one
who has less. That is what TCP tends to on a link, on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Port(NamedTuple):
    """One end of a worker's wire, in one direction; or a link of two workers."""

    kind: str
    """network, zone or link."""
    source: int | None
    target: int | None
    bandwidth_bytes_per_s: float


class Load(NamedTuple):
    """What one transfer asks of the network: a message, or a whole collective."""

    seconds: float
    """What it takes alone."""
    latency_s: float
    """The part of it in which nothing is sent."""
    bandwidth_bytes_per_s: float
    """How fast it sends through every one of its ports, alone."""
    ports: tuple[Port, ...]

    @property
    def sending_s(self) -> float:
        """How long it keeps its ports busy, alone."""
        return self.seconds - self.latency_s


def fair_shares(loads: Sequence[Load]) -> list[float]:
    """Return how fast each of them goes, over how fast it goes alone."""
    left: dict[Port, float] = {}
    users: dict[Port, set[int]] = {}
    for number, load in enumerate(loads):
        for port in load.ports:
            left[port] = port.bandwidth_bytes_per_s
            users.setdefault(port, set()).add(number)
    rates = [0.0] * len(loads)
    rising = set(range(len(loads)))
    while rising:
        full = {port: left[port] / len(users[port]) for port in users}
        level = min(
            min(full.values(), default=float("inf")),
            min(loads[number].bandwidth_bytes_per_s for number in rising),
        )
        done = {number for number in rising if loads[number].bandwidth_bytes_per_s <= level}
        done.update(number for port, at in full.items() if at <= level for number in users[port])
        for number in done:
            rates[number] = level
            for port in loads[number].ports:
                left[port] = max(left[port] - level, 0.0)
                users[port].discard(number)
                if not users[port]:
                    del users[port]
        rising -= done
    return [
        rate / load.bandwidth_bytes_per_s if load.ports else 1.0
        for rate, load in zip(rates, loads, strict=True)
    ]
