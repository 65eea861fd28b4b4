"""What a worker has computed and not yet given to a round: its pile.

Sums of gradient times samples, and what must travel with them: how many samples, which parameters
have a gradient, how old the oldest one is, whether one was not finite.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

from offbeat.rounds.layout import Flats, Layout


class Pile:
    """A gradient-sized buffer that grows by micro-batches, until a round takes it."""

    def __init__(self, layout: Layout, margin: int = 0) -> None:
        self.layout = layout
        self.flats = Flats(layout, margin)
        self.blank = True
        """Whether the buffer holds zeros, as long as nothing is piled up."""
        self.clear()

    def zero(self) -> None:
        """Have zeros in the buffer: a round takes this pile, and nothing is on it."""
        if not self.blank:
            for tensor in self.flats.tensors:
                tensor.zero_()
            self.blank = True

    def exchange(self, other: Pile) -> None:
        """Exchange the buffers of two piles."""
        self.flats, other.flats = other.flats, self.flats
        self.blank, other.blank = other.blank, self.blank

    def clear(self) -> None:
        """Forget what was piled up; the next micro-batch overwrites the buffer."""
        self.samples = 0.0
        self.micro_batches = 0
        self.used = [False] * len(self.layout.slots)
        self.oldest_round: int | None = None
        """The round after which the oldest gradient's parameters stood."""
        self.known_samples = 0.0
        """The sum of samples times the rounds that their gradient knew of."""
        self.bad_parameter: int | None = None
        """The first one whose gradient was NaN or infinite, of those that were looked at."""
        self.unseen = False
        """Whether gradients were piled up that nobody has looked at."""
        self.written = False
        """Whether the buffer has been written, where that is left to the last moment."""
        self.unit = 1.0
        """The samples that count as weight 1. A worker alone takes its first micro-batch's, so
        that weighing and dividing change no bit of a lone gradient."""

    def look_for_bad(self, numbers: Iterable[int] | None = None) -> None:
        """See whether the sums of these parameters, or of all, are finite: whole buckets."""
        self.unseen = False
        if self.bad_parameter is not None:
            return
        numbers = range(len(self.layout.slots)) if numbers is None else tuple(numbers)
        buckets = self.layout.buckets_of(numbers)
        if not all(isfinite(self.flats.bodies[bucket].sum().item()) for bucket in buckets):
            bad = (number for number in numbers if not self.flats.views[number].isfinite().all())
            self.bad_parameter = next(bad, None)

    @property
    def bad_slot(self) -> int:
        """What a header says of it: the bad parameter + 1, or 0; `first_bad` reads it."""
        return 0 if self.bad_parameter is None else self.bad_parameter + 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of it."""
        return {
            "samples": self.samples,
            "micro_batches": self.micro_batches,
            "used": list(self.used),
            "oldest_round": self.oldest_round,
            "known_samples": self.known_samples,
            "bad_parameter": self.bad_parameter,
            "unseen": self.unseen,
            "unit": self.unit,
            "flats": [tensor.clone() for tensor in self.flats.tensors] if self.samples else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        for name, value in state.items():
            if name != "flats":
                setattr(self, name, value)
        for tensor, saved in zip(self.flats.tensors, state["flats"], strict=False):
            tensor.copy_(saved)
