"""The partial all-reduce: a round starts when its quorum is there, and everyone takes part.

Every worker has a background activity that serves round after round. When a round starts, it takes
what the worker's pile holds at that moment, be it fresh, late or nothing, and joins an ordinary
all-reduce of it. The worker's own program only adds to the pile and reads results.

    worker 0   compute ──┐ on time: arrives, starts round 7 ────┐ applies 7
    worker 1   compute ──────┐ on time: waits ──────────────────┐ applies 7
    worker 2   compute ──────────────────────────────────────────────┐ late: adds to its pile,
               background takes part in round 7 with what was there    applies 7, goes on

Results form a *replicated log*: every worker takes every round's record, once and in order. So
replicas that apply them stay bit-identical, however late some are.

The protocol. All that workers must agree on for round r they know from the header of round r-1:
who is still active, who is a candidate (see quorum.py), and who is *due*. A worker is due if its
gradient would become too stale by missing this round. Round r starts when enough candidates are
on time (their gradient is of the parameters after round r-1, and they wait for round r) and all
due workers have added something to their pile. Each arrival is counted once, in one counter of the
control plane that has a field for each kind. The arrival that completes what is needed sets the
key that every background activity waits for. Where one candidate suffices and nobody is due, the
arrival sets the key itself: no counting, one message.

A worker that has left is counted too, until a header has told everyone: a round also starts when
all candidates are there or have left. The round in which all are leaving is the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from struct import pack, unpack
from typing import Any, Literal

import torch

from offbeat.collectives.agreement import agree, different_rates
from offbeat.collectives.layout import Layout
from offbeat.collectives.pile import Pile
from offbeat.collectives.quorum import Quorum
from offbeat.collectives.record import Record, first_bad
from offbeat.errors import ClosedError, DisagreementError
from offbeat.worlds.base import World

# The fields of the counter of arrivals: candidates on time, candidates that left, due workers.
_ON_TIME, _LEFT, _DUE = 1, 1 << 20, 1 << 40
_HERE, _LEFT_FOR_GOOD, _PAUSED = range(3)  # what a worker is, in the header
_SLOTS = 10  # numbers that each rank has in the header; float32 must hold them exactly

Arrival = Literal["on time", "late", "dropped"]


@dataclass(frozen=True)
class _Start:
    """What must be there for a round to start; the same on every worker."""

    round: int
    candidates: frozenset[int]
    needed: int
    due: frozenset[int]

    def met(self, arrived: int) -> bool:
        on_time, left, due = arrived % _LEFT, arrived % _DUE // _LEFT, arrived // _DUE
        return due == len(self.due) and (
            on_time >= self.needed or on_time + left == len(self.candidates)
        )


@dataclass(frozen=True)
class Measured:
    """What a round has shown of the workers and their gradients; the same on every worker."""

    round: int
    seconds: tuple[float, ...]
    """By rank: how long its latest gradient took, 0 if it has not said so yet."""
    squares: tuple[float, ...]
    """Of those that contributed: the squared norm of what each brought."""
    mean_square: float
    """The squared norm of their mean."""


class PartialAllReduce:
    """A partial all-reduce over one layout, from its first round to its last.

    `choose`, if given, sets after every round how many must be on time for the next one, from what
    was measured; it must be the same pure function on every worker.
    """

    def __init__(
        self,
        world: World,
        name: str,
        layout: Layout,
        quorum: str | int | float,
        *,
        max_staleness_rounds: int | None = None,
        divisor: Literal["samples", "workers"] = "samples",
        full_every: int | None = None,
        choose: Callable[[Measured], int] | None = None,
    ) -> None:
        if max_staleness_rounds is not None and max_staleness_rounds < 0:
            raise ValueError(
                f"max_staleness_rounds must be 0 or more, or None, got {max_staleness_rounds}"
            )
        if full_every is not None and full_every < 1:
            raise ValueError(f"full_every must be at least 1, or None, got {full_every}")
        self._quorum = Quorum.of(quorum, world.size)
        self._full_every = full_every
        self._choose = choose
        self._place = f"partial/{name}/{next(world.numbers)}"  # a name may be used again
        agree(
            world,
            self._place,
            {
                "the quorum": str(quorum),
                "max_staleness_rounds": max_staleness_rounds,
                "the divisor": divisor,
                "full_every": full_every,
                "tensors": [
                    f"{name} of shape {tuple(tensor.shape)} and {tensor.dtype}"
                    for name, tensor in zip(layout.names, layout.parameters, strict=True)
                ],
            },
        )
        self._world = world
        self._name = name
        self._layout = layout
        self._max_staleness = max_staleness_rounds
        self._divisor = divisor
        self._channel = world.channel(self._place)
        for bucket in layout.buckets:  # make the groups now, not in the first round
            self._channel.all_reduce(torch.zeros(1, device=bucket.device)).wait()
        self._state = world.condition(f"a round of {name!r}")
        # All below is shared by the program and the background activity, under _state.
        self.pile = self._new_pile()
        self._spare: list[Pile] = []
        self._log: deque[tuple[Record, Pile]] = deque()
        self._disagreement: DisagreementError | None = None
        self._stopped = False
        self._taken = 0  # rounds that the program has taken from the log
        self._started = 0  # rounds that have taken this worker's pile
        self._completed = 0
        self._resumes_after = 0  # rounds that the program's next gradient will know of, at least
        self._on_time_for = -1
        self._learning_rates = 0.0
        self._seconds = 0.0
        self._away = _HERE
        self._settled = False  # all are paused, or have left
        self._paused = 0
        self._ended = False  # all have left
        self._offset = 0  # rounds before this collective began: those of a checkpoint
        self._start = self._first_start()
        self._announced = 0  # what this worker has added to the current round's counter
        self._activity = world.spawn(f"rounds of {name}", self._serve)

    # --- what the worker's program calls ---------------------------------------------------

    def contribute(
        self,
        add: Callable[[Pile], None],
        *,
        learning_rates: float = 0.0,
        seconds: float = 0.0,
        drop_late: bool = False,
    ) -> Arrival:
        """Have `add` put a gradient of the newest taken parameters on the pile, and arrive.

        Does not wait. With `drop_late` a gradient that missed its own round is not added.
        """
        with self._state:
            if self._away:
                raise ClosedError(f"a contribution to {self._name!r} after leaving it")
            late = self._started > self._taken
            if not (late and drop_late):
                add(self.pile)
                if self.pile.oldest_round is None:
                    self.pile.oldest_round = self._taken
            self._learning_rates, self._seconds = learning_rates, seconds
            # On time: wait for the round that will take this. Late: only for one under way.
            self._resumes_after = self._started if late else self._started + 1
            self._on_time_for = -1 if late else self._started
            start, arrival = self._arrival()
        self._announce(start, arrival)
        return "on time" if not late else "dropped" if drop_late else "late"

    def results(self) -> Iterator[Record]:
        """Wait for what `contribute` said to wait for; yield every record not taken, in order.

        A record's buffers are lent until the next one is asked for.
        """
        began = self._world.now()
        with self._state:
            self._state.wait_for(lambda: self._completed >= self._resumes_after or self._ended)
        yield from self._take(waited_s=self._world.now() - began)

    def leave(self) -> Iterator[Record]:
        """Contribute nothing more; yield the records of the others' rounds until all have left."""
        yield from self._served(_LEFT_FOR_GOOD)
        self._activity.join()

    def stop(self) -> None:
        """Leave without looking at the records: everyone raises the same error, and does so."""
        with self._state:
            self._stopped = True
        for _ in self.leave():
            pass

    def _served(self, away: int) -> Iterator[Record]:
        with self._state:
            self._away = away
            start, arrival = self._arrival()
        self._announce(start, arrival)
        done = False
        while not done:
            with self._state:
                self._state.wait_for(lambda: bool(self._log) or self._is_over(away))
                done = self._is_over(away)
            yield from self._take(waited_s=0.0)

    def _is_over(self, away: int) -> bool:
        """Whoever has left for good serves on when the others pause."""
        return self._ended or (self._settled and away == _PAUSED)

    def settle(self) -> Iterator[Record]:
        """Pause together with everyone; yield the records of the rounds until all have paused.

        Then every worker knows of the same rounds, and what is pending is on the piles. `resume`
        follows, on every worker.
        """
        yield from self._served(_PAUSED)

    def resume(self) -> None:
        """Go on after `settle`, once everyone has seen what it wanted to see."""
        key = self._key("resume", self._completed)
        if self._world.control.add(key, 1) == self._paused:
            self._world.control.set(f"{key}/all", b"1")
        self._world.control.wait(f"{key}/all")
        with self._state:
            self._away = _HERE
            self._settled = False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; after `settle`."""
        pile = self.pile.state_dict()
        if pile["oldest_round"] is not None:
            pile["oldest_round"] -= self._taken
        return {"round": self._offset + self._taken, "pile": pile}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the rounds of a checkpoint; before the first contribution."""
        with self._state:
            if self._started or self.pile.micro_batches:
                raise ClosedError(f"{self._name!r} has begun: load its state before the first step")
            self._offset = state["round"]
            self._start = self._first_start()
            self.pile.load_state_dict(state["pile"])

    @property
    def more(self) -> bool:
        """Whether the log holds rounds that the program has not taken."""
        return bool(self._log)

    def _take(self, waited_s: float) -> Iterator[Record]:
        while True:
            with self._state:
                if not self._log:
                    if self._disagreement is not None and not self._stopped:
                        raise self._disagreement
                    return
                record, pile = self._log.popleft()
                self._taken += 1
            yield replace(record, waited_s=waited_s)
            waited_s = 0.0
            with self._state:
                self._spare.append(pile)

    # --- arrivals --------------------------------------------------------------------------

    def _arrival(self) -> tuple[_Start, int]:
        """What this worker has to add to the counter of the next round, if anything; under lock."""
        start, rank = self._start, self._world.rank
        if self._started > self._completed or self._ended or self._settled:
            return start, 0  # who must be there for the next round is not known yet
        arrived = 0
        if rank in start.candidates and not self._announced % _DUE:
            if self._away:
                arrived += _LEFT
            elif self._on_time_for == start.round:
                arrived += _ON_TIME
        given = self.pile.micro_batches > 0 or self._away
        if given and rank in start.due and not self._announced // _DUE:
            arrived += _DUE
        self._announced += arrived
        return start, arrived

    def _announce(self, start: _Start, arrived: int) -> None:
        if not arrived:
            return
        if start.needed > 1 or start.due or arrived != _ON_TIME:
            total = self._world.control.add(self._key("arrived", start.round), arrived)
            if not start.met(total) or start.met(total - arrived):
                return
        self._world.control.set(self._key("go", start.round), b"1")

    def _first_start(self) -> _Start:
        everyone = self._world.members
        due = frozenset(everyone if self._max_staleness == 0 else ())
        return self._start_of(0, everyone, due)

    def _start_of(self, round: int, active: tuple[int, ...], due: frozenset[int]) -> _Start:
        number = self._offset + round
        if self._full_every is not None and (number + 1) % self._full_every == 0:
            return _Start(round, frozenset(active), len(active), due)
        return _Start(round, *self._quorum.for_round(number, active), due)

    def _key(self, what: str, round: int) -> str:
        return f"{self._place}/{what}/{round}"

    # --- the background activity -----------------------------------------------------------

    def _serve(self) -> None:
        while not self._ended:
            number = self._started
            self._world.control.wait(self._key("go", number))
            with self._state:
                pile = self.pile
                self.pile = self._spare.pop() if self._spare else self._new_pile()
                self.pile.clear()
                self._started += 1
                mine = self._of_this_worker(pile, number)
            began_s = self._world.now()
            self._reduce(pile, mine)
            sum_square = _square(pile) if self._choose else 0.0
            header = pile.flats.margin.tolist()
            with self._state:
                self._log_round(number, pile, header, sum_square, began_s)
                self._announced = 0
                start, arrival = self._arrival()
                self._state.notify_all()
            self._announce(start, arrival)
            if self._world.rank == number % self._world.size and number > 0:
                # Everyone has passed the round before: its keys are of no more use.
                self._world.control.delete(self._key("go", number - 1))
                self._world.control.delete(self._key("arrived", number - 1))

    def _new_pile(self) -> Pile:
        """A pile whose buffer has room for the header, so that a round is one message less."""
        return Pile(self._layout, _SLOTS * self._world.size + len(self._layout.slots))

    def _of_this_worker(self, pile: Pile, round: int) -> list[float]:
        """This worker's slots of the header: samples (in three parts), learning rates, away, age,
        staleness + 1, bad + 1, seconds; and, later, square.

        The age is how many rounds the gradient that it computes now does not know of.
        """
        rates = self._learning_rates if self._on_time_for == round else 0.0
        age = 0 if self._away else round + 1 - max(self._taken, self._resumes_after)
        stale = 0 if pile.oldest_round is None else round - pile.oldest_round + 1
        bad = 0 if pile.bad_parameter is None else pile.bad_parameter + 1
        return [*_parts(pile.samples), rates, self._away, age, stale, bad, self._seconds]

    def _reduce(self, pile: Pile, mine: list[float]) -> None:
        """All-reduce a pile, with the header in its margin: slots by rank, then used parameters.

        Few torch calls, here and below: each gives up the interpreter, and where the program
        computes in pure Python, getting it back takes a switch interval.
        """
        flats, size = pile.flats, self._world.size
        if not pile.micro_batches:
            for tensor in flats.tensors:
                tensor.zero_()
        square = _square(pile) / pile.samples**2 if self._choose and pile.samples else 0.0
        header = [0.0] * (_SLOTS * size)
        header[self._world.rank :: size] = [*mine, square]
        flats.margin.copy_(torch.tensor([*header, *map(float, pile.used)]))
        for work in [self._channel.all_reduce(tensor) for tensor in flats.tensors]:
            work.wait()

    def _log_round(
        self, round: int, pile: Pile, header: list[float], sum_square: float, began_s: float
    ) -> None:
        """Append the record, and draw from the header what the next round needs; under lock."""
        size = self._world.size
        slots = [header[slot * size : (slot + 1) * size] for slot in range(_SLOTS)]
        samples = [sum(parts) for parts in zip(*slots[:3], strict=True)]
        rates, away, age, stale, bad, seconds, squares = slots[3:]
        # Those on time know the same rounds. The program raises it, after the rounds before.
        number = self._offset + round
        self._disagreement = self._disagreement or different_rates(number, rates)
        record = Record(
            round=number,
            sum=pile.flats,
            samples_by_rank=tuple(samples),
            divisor=float(size) if self._divisor == "workers" else sum(samples) / pile.unit,
            used=tuple(count > 0 for count in header[_SLOTS * size :]),
            staleness_rounds=int(max(stale)) - 1 if any(stale) else 0,
            began_s=began_s,
            ended_s=self._world.now(),
            bad=first_bad(bad),
        )
        if self._disagreement is None:
            self._log.append((record, pile))
        if self._choose is not None and record.ranks:
            brought = tuple(squares[rank] for rank in record.ranks)
            mean_square = sum_square / record.samples**2
            measured = Measured(round, tuple(seconds), brought, mean_square)
            self._quorum = Quorum.of(self._choose(measured), size)
        self._completed += 1
        active = tuple(rank for rank in range(size) if away[rank] == _HERE)
        if not active:  # those who have paused, if any, will all be back before the next round
            active = tuple(rank for rank in range(size) if away[rank] == _PAUSED)
            self._paused = len(active)
            self._settled, self._ended = bool(active), not active
        if active:
            limit = self._max_staleness
            due = frozenset(rank for rank in active if limit is not None and age[rank] >= limit)
            self._start = self._start_of(round + 1, active, due)


def _parts(number: float) -> list[float]:
    """Split a number into three that float32 holds, and whose sum is exactly it."""
    high = _float32(number)
    middle = _float32(number - high)
    return [high, middle, number - high - middle]


def _float32(number: float) -> float:
    rounded: float = unpack("f", pack("f", number))[0]
    return rounded


def _square(pile: Pile) -> float:
    return sum(float(view.double().square().sum()) for view in pile.flats.views)
