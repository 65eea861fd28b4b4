"""What a codec is: settings; and, of one worker, whatever makes bytes of numbers and adds them up.

A codec belongs to the exchange. A method that sums over all workers needs no line for it.

The sum of a tensor is a generator of works: each is under way when it is yielded, and has ended
when the generator goes on. So the sums of several tensors go side by side, stage by stage: while
one is on the wire, the next one is made into bytes. All workers begin the stages in one order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from offbeat.worlds.base import Channel, Work

Sum = Iterator[Work]
"""A tensor on its way to the sum over the channel's members, in place, the same bits on each."""


OWN = ("left_out", "owned")
"""What of a coder's state is its worker's alone: residuals of error feedback."""


class Codec(ABC):
    """Settings of one codec; frozen, and equal on all workers."""

    feeds_back = False
    """Whether what rounding has left out of a round goes into the next one."""

    def check(self, size: int) -> None:  # noqa: B027 - most fit any number of workers
        """Raise ValueError if the settings do not fit `size` workers."""

    @abstractmethod
    def coder(self, size: int, rank: int) -> Coder:
        """One worker's part: what it needs from one round to the next."""


class Coder(ABC):
    """One worker's end of a codec."""

    free = False
    """Whether the next round's numbers travel as they are."""

    def __init__(self, size: int, rank: int) -> None:
        self.size = size
        self.rank = rank
        self.rounds = 0
        """Rounds that have ended; those before a checkpoint included."""

    @abstractmethod
    def sums(
        self, channel: Channel, tensor: Tensor, place: int, brings: bool, not_before: float | None
    ) -> list[Sum]:
        """The parts of a flat tensor, each to be summed; nothing is under way yet.

        `place` names the tensor: it is the same in every round. `brings` says whether this worker
        gives anything but zeros. A sum has the same stages on all workers.
        """

    def ended(self, channel: Channel, exchange_s: float) -> None:
        """A round's sums are there; coding and waiting have taken this worker so long."""
        self.keep()

    def keep(self) -> None:
        """What this worker gave to the latest round is in it: no round is made again for it."""
        self.rounds += 1

    def regroup(self, size: int) -> None:
        """Go on among so many workers; what was under way is none of theirs."""
        self.size = size

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        self.rounds = state["rounds"]

    @staticmethod
    def of_all(state: dict[str, Any]) -> dict[str, Any]:
        """The part of a state that is the same on all workers: another one can go on with it."""
        return {
            name: Coder.of_all(value) if name == "coder" else value
            for name, value in state.items()
            if name not in OWN
        }
