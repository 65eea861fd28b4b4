"""What an algorithm is: settings, and what a worker does when a micro-batch is done.

`step` and `leave` are generators. `yield record` means *apply this round now*: when the generator
goes on, the parameters have been updated. A step that yields nothing leaves them as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from offbeat.replica import Replica
from offbeat.rounds import Round


class Algorithm(ABC):
    """Settings of one method; frozen, and equal on all workers."""

    def check(self, size: int) -> None:  # noqa: B027 - most settings fit any cluster
        """Raise ValueError if the settings do not fit a cluster of `size` workers."""

    def start(self, replica: Replica) -> None:  # noqa: B027 - most need nothing
        """The worker has been attached: open what the rounds need."""

    def reduces_next(self, replica: Replica) -> bool:
        """Say whether the backward pass at hand completes this worker's part of the round.

        If so, its buckets may be reduced while it runs.
        """
        return False

    def rounds(self, replica: Replica, records: Iterator[Round]) -> Iterator[Round]:
        """Pass on the rounds that this worker comes to know of, in order, adjusted if need be.

        Every round goes through here once, on every worker: those of a step, of leaving, and of
        the pause for a checkpoint.
        """
        return records

    def check_counts(self, *names: str) -> None:
        """Raise ValueError if one of these settings is no whole number above 0."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number above 0, got {value!r}")

    def check_switches(self, *names: str) -> None:
        """Raise ValueError if one of these settings is neither True nor False."""
        for name in names:
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")

    @abstractmethod
    def step(self, replica: Replica) -> Iterator[Round]:
        """One micro-batch is done; its gradients are in `.grad`."""

    @abstractmethod
    def leave(self, replica: Replica) -> Iterator[Round]:
        """This worker has left its loop: serve the others until all have left theirs."""
