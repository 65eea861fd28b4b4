"""Workers that crash after a given event of the virtual clock, and what must hold then.

Nothing happens between two events, so a crash after each of them is a crash at every moment there
is, as far as the worker itself is concerned. The others hear of it one latency later, each at its
own time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from test_contract import ALGORITHMS

import offbeat
from offbeat.clusters import Cluster
from offbeat.clusters.events import Crash
from offbeat.worlds import clock, virtual

STEPS = (5, 4, 3, 4)
"""Of each of four workers, if nothing else is said."""
STEP_S = 0.1


class Fate(NamedTuple):
    """What a survivor has seen."""

    identical: bool | None
    computed: float
    applied: float
    dropped: float
    by_rank: tuple[float, ...]
    """Samples of every worker, in the rounds that it has applied."""
    lost: float
    """Samples that lost workers had computed and not given."""


def samples_of(rank: int, step: int) -> int:
    return 1 + (rank + step) % 3


class Lives:
    """A run in which workers may be lost: each worker's program, and what it has computed."""

    def __init__(
        self, algorithm: offbeat.Algorithm, steps: Sequence[int] = STEPS, **settings: Any
    ) -> None:
        self.algorithm = algorithm
        self.steps = steps
        self.settings = {"survive": True, **settings}
        self.computed = [0.0] * len(steps)
        self.attached_s = 0.0

    def __call__(self) -> Fate:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=self._momentum)
        rank, seen = offbeat.rank(), [0.0] * len(self.steps)

        def follow(_: torch.nn.Module, each: Any) -> None:
            for worker, samples in enumerate(each.samples_by_rank):
                seen[worker] += samples

        with offbeat.attach(
            model, optimizer, self.algorithm, bucket_bytes=8, **self.settings
        ) as dp:
            dp.on_round(follow)
            self.attached_s = max(self.attached_s, dp.seconds)
            for step in range(self.steps[rank]):
                dp.samples(samples_of(rank, step))
                optimizer.zero_grad()
                model(torch.full((1, 3), 0.1 * rank + step)).square().mean().backward()
                optimizer.step()
                stats = dp.stats()
                self.computed[rank] = stats.computed_samples - stats.dropped_samples
        stats = dp.stats()
        return Fate(
            stats.replicas_identical,
            stats.computed_samples,
            stats.applied_samples,
            stats.dropped_samples,
            tuple(seen),
            stats.lost_samples,
        )

    @property
    def _momentum(self) -> float:
        return float(getattr(self.algorithm, "beta", 0.9))

    def check(self, fates: Sequence[Fate | None], all_told: bool = False) -> int:
        """Raise unless what must hold does; return how many were lost.

        With `all_told`, what lost workers had computed is all in rounds or known to be lost. A
        worker that is lost when others have ended may not be counted any more.
        """
        lost = [rank for rank, fate in enumerate(fates) if fate is None]
        survivors = {rank: fate for rank, fate in enumerate(fates) if fate is not None}
        for rank, fate in survivors.items():
            if self.algorithm.identical:
                assert fate.identical, (rank, fate)
            assert fate.computed == pytest.approx(fate.applied + fate.dropped), (rank, fate)
            assert fate.computed == sum(samples_of(rank, n) for n in range(self.steps[rank]))
            if getattr(self.algorithm, "fragments", 1) == 1:  # else each fragment tells of it
                assert fate.by_rank[rank] == pytest.approx(fate.applied), (rank, fate)
            # What they gave is in rounds, once, or is lost. Each may have been within a step.
            computed = sum(self.computed[other] for other in lost)
            kept = sum(fate.by_rank[other] for other in lost)
            if getattr(self.algorithm, "graph", None):  # of each, at most what it was about to give
                assert fate.lost <= 3 * len(lost), (rank, fate)
                continue
            assert kept + fate.lost <= computed + 3 * len(lost), (rank, fate)
            # Too late for the others, and it was lost before it heard that: its last gradient.
            unheard = 6 * len(lost) if getattr(self.algorithm, "max_delay", None) else 1e-6
            assert not all_told or kept + fate.lost >= computed - unheard, (rank, fate)
        if not getattr(self.algorithm, "graph", None):  # else a worker hears of its neighbours'
            assert len({fate.by_rank for fate in survivors.values()}) <= 1, survivors
        return len(lost)


@dataclass(frozen=True)
class Schedule:
    """A small run: a method, what each worker has to do, how fast it is, and messages are."""

    name: str
    steps: tuple[int, ...] = (2, 1, 2)
    speed: tuple[float, ...] = (1.0, 0.7, 0.45)
    latency_s: float = 0.01

    @classmethod
    def drawn(cls, seed: int) -> Schedule:
        """One of the methods that survive, with all else at random."""
        draws = Random(f"schedule {seed}")
        workers = draws.choice((2, 3, 3, 4))
        return cls(
            draws.choice(names(workers)),
            tuple(draws.choice((0, 1, 2, 2, 3)) for _ in range(workers)),
            tuple(draws.choice((1.0, 0.8, 0.5, 0.3)) for _ in range(workers)),
            draws.choice((1e-5, 1e-3, 0.03, 0.2)),
        )

    @property
    def least_s(self) -> float:
        """What the steps take whoever has most of them to do, if nobody waits for anybody."""
        return max(
            steps * STEP_S / speed for steps, speed in zip(self.steps, self.speed, strict=True)
        )

    @property
    def attached_s(self) -> float:
        """When all are attached: nothing of that depends on their steps."""
        return _attached_s(self.name, len(self.steps), self.latency_s)

    @property
    def cluster(self) -> Cluster:
        return Cluster.parse(
            f"workers = {len(self.steps)}\nspeed = {list(self.speed)}\n"
            f"[compute]\nstep_s = {STEP_S}\n[network]\nlatency_s = {self.latency_s!r}\n"
        )

    def lives(self) -> Lives:
        return Lives(ALGORITHMS[self.name].make(len(self.steps)), self.steps)

    def events(self) -> range:
        """Those of a run without losses, from the moment at which all are attached."""
        first, last = self._events()
        return range(first, last)

    def events_before(self) -> range:
        """Those while they attach."""
        return range(self._events()[0])

    def _events(self) -> tuple[int, int]:
        lives, injected = self.lives(), Injected(())
        with injected.into_the_clock():
            fates = offbeat.run(lives, self.cluster).results
        assert lives.check(fates) == 0
        first = next(n for n, moment in enumerate(injected.moments) if moment > lives.attached_s)
        return first, len(injected.moments)

    def lived_through(self, *crashes: tuple[int, int]) -> int:
        """Run with workers that crash after events, as (event, rank); return how many have.

        Whoever crashes is lost; who had ended before, is not, and does not count.
        """
        lives, injected = self.lives(), Injected(crashes)
        with injected.into_the_clock():
            fates = offbeat.run(lives, self.cluster).results
        assert {rank for rank, fate in enumerate(fates) if fate is None} == injected.crashed
        return lives.check(fates)

    def lived_with(self, *crashes: tuple[int, float]) -> int:
        """The same with workers that crash at moments, as (rank, seconds)."""
        events = tuple(Crash(kind="crash", worker=rank, at_s=at_s) for rank, at_s in crashes)
        lives = self.lives()
        fates = offbeat.run(lives, self.cluster.model_copy(update={"events": events})).results
        lost = {rank for rank, fate in enumerate(fates) if fate is None}
        assert lost <= {rank for rank, _ in crashes}
        return lives.check(fates)


@cache
def _attached_s(name: str, workers: int, latency_s: float) -> float:
    nothing = Schedule(name, (0,) * workers, (1.0,) * workers, latency_s)
    lives = nothing.lives()
    offbeat.run(lives, nothing.cluster)
    return lives.attached_s


@cache
def names(workers: int) -> list[str]:
    """The methods that survive."""
    return [name for name, each in ALGORITHMS.items() if each.make(workers).survives]


class Injected:
    """Crashes of one run."""

    def __init__(self, crashes: Sequence[tuple[int, int]]) -> None:
        self._due = sorted(crashes)
        self.moments: list[float] = []
        """Of the events so far."""
        self.crashed: set[int] = set()
        """Who was there to crash."""

    @contextmanager
    def into_the_clock(self) -> Iterator[None]:
        pop = clock.heappop

        def noted(heap: Any) -> Any:
            due = pop(heap)
            if not isinstance(due[2], clock._ByLoop):
                self.moments.append(due[0])
                number = len(self.moments) - 1
                while self._due and self._due[0][0] <= number:
                    self._crash_next(heap, due[0], self._due.pop(0)[1])
            return due

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock, "heappop", noted)
            yield

    def _crash_next(self, heap: Any, now: float, rank: int) -> None:
        """Have it happen before anything else does."""

        def crash() -> None:
            city = virtual._CITIES[-1]
            world = city.worlds[rank]
            if not world.worker.tasks[0].done:
                self.crashed.add(rank)
            city.crash(world.rank)

        clock.heappush(heap, (now, -1 - len(self._due), clock._ByLoop(crash)))
