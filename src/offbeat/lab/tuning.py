"""Fair settings: every contestant may try as many, before it races, and races with its best.

Global batches differ: a round of one algorithm holds a micro-batch of each worker, that of another
several, so no learning rate suits them all, and no size of rounds. Tried are factors of the task's
own rate, and values of the one setting that says how large rounds are (sizes.py). Each try is one
run in virtual time on the race's cluster, with a seed that does not race. The best is the first to
reach the target; if none does, the one with the best score in the end. A run is given up when
another has long been faster, and one that diverges has lost.

    first the rates that were asked for, with the algorithm's own size; then, around the best,
        the next rate on either side        the grid grows where the best is at its edge
        the next size on either side
        both at once                        larger rounds bear larger rates, as a rule
        rates half-way between              if there are tries left
    until the best is surrounded by others, or the tries are used up

A best that is not surrounded is said to be at the edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from offbeat.errors import NonFiniteGradientError
from offbeat.lab.goals import Target
from offbeat.lab.reaching import score
from offbeat.lab.train import WorkerFailed
from offbeat.lab.watching import Outcome

SEED = 1_000_000
"""A race has its seeds below."""
TRIALS = 8
_PATIENCE = 1.25
"""A run is given up after so many times the seconds of the best one, its confirmation included."""

_FINE = 0.6
"""Rates are not split further than that, in powers of two."""

Point = tuple[float, int]
"""A factor of the learning rate, and which of the sizes."""
Trial = Callable[[Point, float], list[Outcome]]
"""Runs with these, for at most so many seconds."""


def parse_rates(text: str) -> tuple[float, ...]:
    """Read `0.5,1,2`; ValueError for what is no list of factors."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f"rates must be factors such as 0.5,1,2, got {text!r}")
    if len(set(rates)) < len(rates):
        raise ValueError(f"rates must differ, got {text!r}")
    return rates


def check(rates: Sequence[float], trials: int) -> None:
    """Raise ValueError for a grid that cannot have its best inside."""
    if len(rates) > 1 and trials < max(3, len(rates)):
        raise ValueError(
            f"with {trials} trial{'s' if trials > 1 else ''} and {len(rates)} rates the best is "
            f"always at the edge of what was tried: give at least --trials {max(3, len(rates))}, "
            "or a single rate, to race with it as it is"
        )


@dataclass
class Search:
    """The way to one contestant's best settings."""

    rates: tuple[float, ...]
    target: Target | None
    trials: int
    sizes: int = 1
    """How many there are to choose from."""
    start: int = 0
    """Which of them comes first."""
    found: dict[Point, tuple[float, float]] = field(default_factory=dict)
    """What came of each try: seconds to the target, and the score; lower is better."""
    words: dict[Point, str] = field(default_factory=dict)
    edge: str = ""
    """On which side of the best nothing was tried, in words."""
    _ended_s: float = math.inf  # of the shortest run that reached the target

    def run(self, trial: Trial) -> Point:
        """Return the best point."""
        if len(self.rates) == 1 or self.target is None:
            return self.rates[0], self.start
        for rate in self.rates:
            self._try((rate, self.start), trial)
        while len(self.found) < self.trials:
            untried = next((each for each in self._around() if each not in self.found), None)
            if untried is None:
                break
            self._try(untried, trial)
        self.edge = self._edge()
        return self.best

    @property
    def best(self) -> Point:
        """The first to reach the target; or the nearest to it."""
        return min(self.found, key=self.found.__getitem__)

    def _try(self, point: Point, trial: Trial) -> None:
        assert self.target is not None
        limit_s = _PATIENCE * self._ended_s
        try:
            outcomes = trial(point, limit_s)
        except WorkerFailed as failure:
            self.found[point] = (math.inf, math.inf)
            self.words[point] = "diverged" if has_diverged(failure) else "failed"
            return
        reached_s, worth = judged(outcomes[0], self.target)
        self.found[point] = (reached_s, worth)
        if reached_s < math.inf:
            self._ended_s = min(self._ended_s, max(each.seconds for each in outcomes))
            self.words[point] = f"{reached_s:.1f}"
        else:
            self.words[point] = "slower" if limit_s < math.inf else "not reached"

    # --- around the best -----------------------------------------------------------------------

    def _around(self) -> Iterator[Point]:
        """The best point's neighbours, in the order in which they are tried."""
        rate, size = self.best
        lower, higher = self._beside(rate)
        yield from self._sides()
        for other in self._other_sizes(size):
            yield (higher if other > size else lower), other
        for beside in (lower, higher):
            if abs(math.log2(beside / rate)) > _FINE:
                yield math.sqrt(rate * beside), size

    def _sides(self) -> Iterator[Point]:
        rate, size = self.best
        for other_rate in self._beside(rate):
            yield other_rate, size
        for other in self._other_sizes(size):
            yield rate, other

    def _other_sizes(self, size: int) -> list[int]:
        return [each for each in (size + 1, size - 1) if 0 <= each < self.sizes]

    def _beside(self, rate: float) -> tuple[float, float]:
        """The rates below and above: of the grid, or as far beyond it as its last two are apart."""
        grid = sorted({*self.rates, *(each for each, _ in self.found)})
        place = grid.index(rate)
        low = grid[0] ** 2 / grid[1] if place == 0 else grid[place - 1]
        high = grid[-1] ** 2 / grid[-2] if place == len(grid) - 1 else grid[place + 1]
        return low, high

    def _edge(self) -> str:
        rate, size = self.best
        lower, higher = self._beside(rate)
        missing = []
        if (higher, size) not in self.found and not self._has(lambda each: each > rate):
            missing.append("higher lr")
        if (lower, size) not in self.found and not self._has(lambda each: each < rate):
            missing.append("lower lr")
        for other in self._other_sizes(size):
            if not any(tried == other for _, tried in self.found):
                missing.append("larger size" if other > size else "smaller size")
        return ", ".join(missing)

    def _has(self, wanted: Callable[[float], bool]) -> bool:
        return any(wanted(rate) for rate, size in self.found if size == self.best[1])


def has_diverged(failure: WorkerFailed) -> bool:
    """Whether a run failed because its numbers have left all bounds."""
    name = NonFiniteGradientError.__name__
    return isinstance(failure.__cause__, NonFiniteGradientError) or f"{name}: " in str(failure)


def judged(first: Outcome, target: Target) -> tuple[float, float]:
    """Return when the target was reached, and the score in the end: the lower, the better.

    Either is infinite where there is none.
    """
    last = first.evaluations[-1]
    worth = -score(target, last["loss"], last["accuracy"])
    return first.reached_s, worth if math.isfinite(last["loss"]) else math.inf
