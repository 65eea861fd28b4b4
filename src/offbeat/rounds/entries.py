"""What workers say to all, where every gradient comes by itself: numbered entries, in one order.

    gradient    one is there: all that must be known of it, but its numbers
    paused      its worker waits for all to pause
    left        there will be no more of its worker
    back        another one has joined in its place: there will be

Entries are short, and go by the control plane. Whoever has heard an entry knows what becomes of the
gradient, without its numbers: only if they count do they travel.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Any

from offbeat.rounds.judge import Ticket

GRADIENT, PAUSED, LEFT, BACK = "gradient", "paused", "left", "back"


@dataclass(frozen=True, slots=True)
class Entry:
    """What one worker says."""

    why: str
    worker: int
    version: int = 0
    """Of the oldest micro-batch in it."""
    samples: float = 0.0
    seconds: float = 0.0
    micro_batches: int = 0
    known: float = 0.0
    """The sum of its samples, each times the version that it was computed from."""
    made: int = 0
    """Steps that it has made since it said so last."""
    ends: bool = False
    """It asks that all end their loops."""
    bad: int | None = None
    """The parameter whose gradient is not finite."""
    useful: float = 0.0
    """How many gradients are worth being averaged, as this worker has measured; 0: not known."""
    mark: tuple[int, int] = (0, 0)
    """Which of its data are in this gradient, or in one before: see data/again.py."""
    rates: tuple[float, ...] = ()
    """What its param groups hold: see rates.py."""
    unused: tuple[int, ...] = ()
    """The parameters without a gradient."""

    @property
    def ticket(self) -> Ticket:
        """What the judge must know."""
        return Ticket(self.worker, self.version, self.samples, self.seconds)

    def written(self) -> str:
        """As text; numbers keep all their bits."""
        return json.dumps(astuple(self))

    @classmethod
    def read(cls, text: str) -> Entry:
        """What was written."""
        facts: list[Any] = json.loads(text)
        facts[-3:] = map(tuple, facts[-3:])
        return cls(*facts)
