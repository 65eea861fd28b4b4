"""What a worker has computed and not yet given to a round: its pile.

Sums of gradient times samples, and what must travel with them: how many samples, which parameters
have a gradient, how old the oldest one is, whether one was not finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from torch import Tensor

from offbeat.rounds.layout import Flats, Layout

_SMALL = 2**16  # numbers that are zeroed in no time


class Pile:
    """A gradient-sized buffer that grows by micro-batches, until a round takes it."""

    def __init__(self, layout: Layout, margin: int = 0) -> None:
        self.layout = layout
        self.flats = Flats(layout, margin)
        self.blank = True
        """Whether the buffer holds zeros, as long as nothing is piled up."""
        self.buckets: tuple[int, ...] | None = None
        """Which of its buckets have been written, and later those that the round carries; None:
        all of them. See fragments.py."""
        self.before: Pile | None = None
        """What was there before the micro-batch that is being launched: see overlap.py."""
        self.clear()

    def zero(self) -> None:
        """Have zeros in the buffer: a round takes this pile, and nothing is on it."""
        if not self.blank:
            for body in self.flats.bodies:  # the margin is written anew for every round
                body.zero_()
            self.blank = True

    def carry(self, buckets: tuple[int, ...] | None) -> None:
        """Have a round carry these buckets, or all: zeros, where nothing was written."""
        if self.written and self.buckets is not None and buckets is None:
            for number, body in enumerate(self.flats.bodies):
                if number not in self.buckets:
                    body.zero_()
        self.buckets = buckets

    @property
    def order(self) -> Sequence[int]:
        """The buckets that the round carries, in the order in which they go."""
        return range(len(self.layout.buckets)) if self.buckets is None else self.buckets

    @property
    def tensors(self) -> list[Tensor]:
        """What goes, in that order; the margin is in the last one, or is the last one."""
        tensors = self.flats.tensors
        if self.buckets is None:
            return tensors
        last = len(tensors) - 1
        going = [tensors[number] for number in self.buckets]
        if self.buckets[-1] != last:
            going.append(tensors[last][self.layout.buckets[last].numel :])
        return going

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
        """Whether gradients were piled up that nobody has looked at: the round's exchange does."""
        self.written = False
        """Whether the buffer has been written, where that is left to the last moment."""
        self.buckets = None
        self.group: tuple[int, ...] = ()
        """Of a result: the workers whose sum it is, if not that of all; see groups.py."""
        self.part = -1
        """And which group they are, or are left of: its least rank; -1 for all."""
        self.made = self.after = 0
        """Of a pile that was given: this worker's steps that it tells the others of, and all that
        it had made by then."""
        self.unit = 1.0
        """The samples that count as weight 1. A worker alone takes its first micro-batch's, so
        that weighing and dividing change no bit of a lone gradient."""

    def look_for_bad(self, numbers: Iterable[int] | None = None) -> None:
        """See whether the sums of these parameters, or of all, are finite: whole buckets."""
        numbers = range(len(self.layout.slots)) if numbers is None else tuple(numbers)
        buckets = self.layout.buckets_of(numbers)
        if not all(isfinite(self.flats.bodies[bucket].sum().item()) for bucket in buckets):
            known = len(self.layout.slots) if self.bad_parameter is None else self.bad_parameter
            bad = [n for n in numbers if n < known and not self.flats.views[n].isfinite().all()]
            self.bad_parameter = min(bad, default=self.bad_parameter)

    @property
    def batch_per_step(self) -> float:
        """What moves weigh, for every sample to count the same: a move grows with its steps."""
        return self.samples / self.micro_batches

    @property
    def bad_slot(self) -> int:
        """What a header says of it: the bad parameter + 1, or 0."""
        return 0 if self.bad_parameter is None else self.bad_parameter + 1

    @property
    def square(self) -> float:
        """The squared norm of what is in the buffer."""
        return sum(float(view.double().square().sum()) for view in self.flats.views)

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
        if state["flats"]:
            self.blank = False
        for tensor, saved in zip(self.flats.tensors, state["flats"], strict=False):
            tensor.copy_(saved)


class Piles:
    """One worker's piles: the one that grows, and those whose buffers wait to be used again.

    A buffer goes round: it grows, a round reduces it and lends it to the program as the result,
    and it comes back. More than a few are in use only while results wait to be taken.
    """

    def __init__(self, layout: Layout, margin: int, spares: int = 2) -> None:
        self._layout = layout
        self._margin = margin
        self._most = spares
        self._spare: list[Pile] = []
        self._growing: Pile | None = None
        self._kept: Pile | None = None
        self._kept_is_back = False
        self.written_late = False
        """Whether a pile is written when a round takes it: until then it needs no buffer."""
        self._small = sum(bucket.numel for bucket in layout.buckets) <= _SMALL

    @property
    def growing(self) -> Pile:
        """The pile that the next micro-batch goes onto; made when it is first asked for."""
        growing = self._growing
        if growing is None:
            reused = self._spare and not self.written_late
            growing = self._spare.pop() if reused else Pile(self._layout, self._margin)
            growing.clear()
            self._growing = growing
        return growing

    @property
    def micro_batches(self) -> int:
        """How many are on it."""
        return 0 if self._growing is None else self._growing.micro_batches

    @property
    def samples(self) -> float:
        """Their samples."""
        return 0.0 if self._growing is None else self._growing.samples

    def apart(self) -> Pile:
        """Keep what has grown as it is, and go on with a copy, to launch buckets of."""
        before = self.growing
        if before.micro_batches and before.before is None:
            self._growing = None
            pile = self.growing
            pile.samples, pile.micro_batches = before.samples, before.micro_batches
            pile.used, pile.oldest_round = list(before.used), before.oldest_round
            pile.known_samples, pile.unit = before.known_samples, before.unit
            pile.bad_parameter, pile.unseen = before.bad_parameter, before.unseen
            pile.before = before
        return self.growing

    def take(self) -> Pile:
        """Hand out what has grown; an empty one follows."""
        pile, self._growing = self.growing, None
        self.furnish(pile)
        return pile

    def nothing(self) -> Pile:
        """Hand out an empty one; what has grown stays."""
        grown, self._growing = self._growing, None
        pile = self.take()
        self._growing = grown
        return pile

    def pass_by(self) -> None:
        """A round has changed nothing: what has grown is no staler by it."""
        if self._growing is not None and self._growing.oldest_round is not None:
            self._growing.oldest_round += 1
            self._growing.known_samples += self._growing.samples

    def furnish(self, pile: Pile) -> None:
        """Give a pile a buffer that was used before, if it has none yet."""
        if self.written_late and not pile.written and self._spare:
            spare = self._spare.pop()
            pile.flats, pile.blank = spare.flats, spare.blank

    def give_back(self, pile: Pile) -> None:
        """A result has been read: its buffer may be used again."""
        if pile.before is not None:
            self.give_back(pile.before)
            pile.before = None
        if pile is self._kept:
            self._kept_is_back = True
        elif len(self._spare) < (1 if self.written_late else self._most):
            self._spare.append(pile)

    def keep(self, pile: Pile) -> None:
        """Leave the latest result as it is until the next one is there: see members.py."""
        (before, is_back), self._kept = (self._kept, self._kept_is_back), pile
        self._kept_is_back = False
        if before is not None and is_back:
            self.give_back(before)

    def prepare(self) -> None:
        """Zero a small empty pile ahead of the round that may find it empty."""
        if self._small and not self.micro_batches and not self.written_late:
            self.growing.zero()
