"""Random schedules for the engine: every start with every merge, drawn from one table.

A schedule says who computes how long, how fast the network is, who stops when, who is away when,
which global events (a metric's all-reduce, a checkpoint) come between which steps, and by which
rules rounds start. One number, the seed, gives all of it.

    schedules.py            the table, and how a schedule is drawn
    schedule_play.py        a worker's program under a schedule
    schedule_log.py         what it has done and seen
    schedule_neighbours.py  the same, and what must hold, of rounds among neighbours
    schedule_queue.py       likewise, where every gradient comes by itself
    schedule_promises.py    what must hold of every schedule
    schedule_moments.py     when rounds must start, of the calm ones
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from offbeat.rounds import Rules

Times = tuple[tuple[float, ...], ...]
MergeKind = Literal["plain", "step", "shift", "outer", "public", "mix"]
SILENT = -1
"""Instead of samples: the program says nothing after that step, as after a GradScaler's skip."""


@dataclass(frozen=True)
class Plan:
    """One engine: when its rounds start, what its program does, and what becomes of a round."""

    start: str
    rules: Rules
    merge: MergeKind = "plain"
    delay: int = 0
    drop_late: bool = False
    ready: int = 1
    """Micro-batches that make a worker ready."""
    full: int | None = None
    """At a boundary: with so many a worker waits until a round takes them."""
    waits: bool = True
    """Wait for the round that a gradient was ready for; else for the one `delay` before."""
    at_once: bool = False
    """Be ready for the next round as soon as the pile is handed over."""
    patience_s: tuple[float, ...] = ()
    """Step by step, in turn: how long to wait for the round to come, or for the one under way."""
    after: int = 0
    """At arrival: own steps between giving a pile and waiting for the round that has it."""
    group: int = 1
    """With public models: how many workers average theirs in a round."""
    samples: tuple[tuple[int, ...], ...] = ()
    """By rank and step; or SILENT."""
    hasty: tuple[bool, ...] = ()
    """By rank: whether it leaves without waiting for the round of its last gradient."""
    rates_alike: bool = True
    graph: str = ""
    """Among neighbours: which."""
    judge: str = ""
    """Where every gradient comes by itself: who says what becomes of it; schedule_queue.py."""

    @property
    def moves(self) -> bool:
        """Whether rounds carry moves, or models."""
        return self.merge in ("shift", "outer", "public")

    @property
    def held(self) -> bool:
        """Whether a round at a boundary takes a pile only when the program gives it, or waits."""
        return self.rules.at_boundary and self.rules.overdue_s is None

    @property
    def some_without_samples(self) -> bool:
        return any(0 in samples for samples in self.samples)

    @property
    def any_silent(self) -> bool:
        return any(SILENT in samples for samples in self.samples)

    @property
    def places(self) -> list[range]:
        """By rank: where in the vector its gradients have their numbers."""
        ends = [sum(map(len, self.samples[: rank + 1])) for rank in range(len(self.samples))]
        return [range(end - len(own), end) for end, own in zip(ends, self.samples, strict=True)]

    @property
    def fragments(self) -> int:
        """Copies of the vector, of which a round carries one."""
        return self.rules.fragments

    @property
    def numel(self) -> int:
        return max(1, sum(map(len, self.samples)))


@dataclass(frozen=True)
class Schedule:
    """All that a run depends on."""

    seed: int
    workers: int
    latency_s: float
    bandwidth_bytes_per_s: float
    compute_s: Times
    """By rank and step; a worker leaves after its last step."""
    apply_s: tuple[float, ...]
    """By rank: what applying a round takes."""
    events: tuple[Literal["metric", "pause"], ...]
    """What all workers do together, in this order."""
    positions: tuple[tuple[int, ...], ...]
    """By rank: before which of its steps each event comes; ever later ones."""
    stays: tuple[tuple[tuple[int, float], ...], ...]
    """By rank: before which step it is away on its own, and for how long."""
    plans: tuple[Plan, ...]
    looks: tuple[tuple[int, ...], ...]
    """By rank: before which steps it comes to the newest round, without waiting for any."""
    followed: bool
    """Whether rounds are followed: the program wants to hear of each in its own time."""

    @property
    def calm(self) -> bool:
        """Whether nobody is ever away, and rounds are taken where a step takes them."""
        alone = len(self.plans) == 1 and "metric" not in self.events and not any(self.stays)
        return alone and not any(self.looks) and not self.followed

    @property
    def free(self) -> bool:
        """Whether messages take no time."""
        return self.latency_s == 0.0 and self.bandwidth_bytes_per_s == math.inf


# --- the table: which starts there are, and what goes with each --------------------------------


def _quorum(draw: Random, workers: int) -> Plan:
    some = draw.randint(1, workers)
    quorums: list[str | int | float] = ["solo", "majority", "all", some, some / workers]
    bound = draw.choice([None, None, 0, 1, 2, 3, 4])
    rules = Rules(
        draw.choice([*quorums, f"first:{some}", f"last:{some}"]),
        max_staleness_rounds=bound,
        lateness="step" if draw.random() < 0.2 else "version",
        divisor=draw.choice(["samples", "samples", "workers"]),
    )
    delay = int(draw.random() < 0.25 and bound != 0)
    return Plan("quorum", rules, delay=delay, drop_late=draw.random() < 0.3)


def _bank(draw: Random, workers: int) -> Plan:
    return Plan("bank", Rules("solo", max_staleness_rounds=1), ready=draw.choice([1, 2, 3]))


def _patient(draw: Random, workers: int) -> Plan:
    """Nobody need wait for a round of all; who does, does not do so for long."""
    choices = [0.0, 0.0, 0.3, 1.0, 5.0]
    least = draw.choice([0.0, 0.0, 2.0, 12.0])
    rules = Rules("all", least_samples=least, overdue_s=draw.choice([None, None, None, 1.0, 6.0]))
    patience_s = tuple(draw.choice(choices + [math.inf] * (not least)) for _ in range(5))
    full = draw.choice([1, 2, 3]) if draw.random() < 0.3 else None
    return Plan("patient", rules, delay=1, patience_s=patience_s, full=full, waits=False)


def _lockstep(draw: Random, workers: int) -> Plan:
    merge = _one_of(draw, plain=2, step=1, shift=2, outer=1)
    divisor: Literal["samples", "moves"] = "moves" if merge in ("shift", "outer") else "samples"
    rules = Rules("all", lockstep=True, divisor=divisor)
    return Plan("lockstep", rules, merge=merge, ready=draw.choice([1, 1, 2, 3]))


def _boundary(draw: Random, workers: int) -> Plan:
    quorum = draw.choice(["all", "all", "all", "all", "solo", draw.randint(1, workers)])
    ready, waits = draw.choice([1, 1, 1, 2, 3]), draw.random() < 0.2
    return Plan(
        "boundary",
        Rules(quorum, at_boundary=True),
        delay=0 if waits else draw.choice([0, 1, 1]),
        ready=ready,
        full=ready + draw.choice([0, 0, 1, 2]) if draw.random() < 0.3 else None,
        waits=waits,
        at_once=draw.random() < 0.25,
    )


def _samples(draw: Random, workers: int) -> Plan:
    plan = _boundary(draw, workers)
    least = draw.choice([0.0, 1.0, 2.5, 5.0, 12.0, 1000.0])
    most = least + draw.choice([0, 1, 4, 10]) or 1 if not least or draw.random() < 0.4 else math.inf
    rules = replace(plan.rules, least_samples=least, most_samples=most)
    return replace(plan, start="samples", rules=rules)


def _overdue(draw: Random, workers: int) -> Plan:
    plan = draw.choice([_boundary, _samples])(draw, workers)
    rules = replace(plan.rules, overdue_s=draw.choice([0.5, 1.0, 2.5, 6.0]))
    return replace(plan, start="overdue", rules=rules)


def _moves(draw: Random, workers: int) -> Plan:
    rules = Rules(
        "all",
        at_boundary=True,
        least_samples=draw.choice([0.0, 0.0, 2.0, 12.0]),
        divisor="moves",
    )
    full = draw.choice([1, 2, 3]) if draw.random() < 0.3 else None
    return Plan("moves", rules, merge="shift", delay=1, full=full, waits=False)


def _arrival(draw: Random, workers: int) -> Plan:
    some = draw.randint(1, workers)
    quorum = draw.choice(["all", "all", "solo", "majority", some, f"last:{some}"])
    grace_s = draw.choice([0.0, 0.0, 0.3, 2.0]) if quorum != "all" else 0.0
    fragments = draw.choice([1, 1, 1, 2, 3])
    rules = Rules(quorum, at_arrival=True, fragments=fragments, grace_s=grace_s, divisor="moves")
    merge: MergeKind = draw.choice(["shift", "shift", "outer"]) if fragments == 1 else "shift"
    ready = draw.choice([1, 1, 2, 3])
    return Plan("arrival", rules, merge=merge, ready=ready, after=draw.randint(0, ready))


def _groups(draw: Random, workers: int) -> Plan:
    some = draw.randint(1, workers)
    rules = Rules(
        draw.choice(["solo", "solo", "majority", "all", some]),
        period=draw.choice([1, 2, 3, 5, 1000]),
        period_quorum=draw.choice(["all", "all", "solo", some]),
        lateness=draw.choice(["step", "version"]),
    )
    group = draw.choice([each for each in range(1, workers + 1) if workers % each == 0])
    return Plan("groups", rules, merge="public", delay=int(draw.random() < 0.3), group=group)


def _neighbours(draw: Random, workers: int) -> Plan:
    """Weights that are powers of two: every sum is exact."""
    graphs = ["one-peer", "lazy-one-peer", "halves", "pairs"]
    rules = Rules("all", lockstep=True)
    return Plan("neighbours", rules, merge="mix", graph=draw.choice(graphs))


def _queue(draw: Random, workers: int) -> Plan:
    judges = ["all", "all", "late", "late stops", "late longer", "some", "some unstopped", "topped"]
    judge = draw.choice([*judges, "in turn"])
    number = draw.choice([1, 1, 2, 3, workers, 2 * workers])
    merge = _one_of(draw, plain=3, step=1, shift=0, outer=0)
    ready = draw.choice([1, 1, 1, 2, 3])
    return Plan("queue", Rules("solo"), merge=merge, ready=ready, judge=f"{judge}: {number}")


STARTS: dict[Callable[[Random, int], Plan], int] = {
    _quorum: 9,
    _bank: 1,
    _patient: 3,
    _lockstep: 4,
    _boundary: 3,
    _samples: 2,
    _overdue: 2,
    _moves: 3,
    _arrival: 4,
    _groups: 3,
    _neighbours: 4,
    _queue: 6,
}
"""Every start, and how often it is drawn."""


# --- how long workers compute ------------------------------------------------------------------


def _each(draw: Random, counts: list[int], choices: list[float]) -> Times:
    return tuple(tuple(draw.choice(choices) for _ in range(count)) for count in counts)


def _one_slow(draw: Random, counts: list[int]) -> Times:
    slow = draw.randrange(len(counts))
    return tuple((20.0 if rank == slow else 1.0,) * count for rank, count in enumerate(counts))


_DELAYS: dict[str, Callable[[Random, list[int]], Times]] = {
    "all equal": lambda draw, counts: _each(draw, counts, [1.0]),
    "no time at all": lambda draw, counts: _each(draw, counts, [0.0]),
    "ties": lambda draw, counts: _each(draw, counts, [0.0, 1.0, 2.0]),
    "around the grace": lambda draw, counts: _each(draw, counts, [0.0, 0.001, 0.002, 0.003]),
    "bursts": lambda draw, counts: _each(draw, counts, [1.0] * 7 + [15.0]),
    "one slow": _one_slow,
    "a staircase": lambda _, counts: tuple(
        (1.0 + rank,) * count for rank, count in enumerate(counts)
    ),
    "speeds": lambda draw, counts: tuple((draw.uniform(0.5, 9.0),) * count for count in counts),
    "anything": lambda draw, counts: tuple(
        tuple(draw.expovariate(0.5) for _ in range(count)) for count in counts
    ),
}


# --- drawing -----------------------------------------------------------------------------------


def drawn(seed: int) -> Schedule:
    """The schedule of this number."""
    draw = Random(f"schedule {seed}")
    workers = draw.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 7])
    steps = draw.choice([1, 3, 5, 5, 8, 12])
    counts = [draw.choice([steps] * 4 + [0, draw.randint(0, steps)]) for _ in range(workers)]
    events = _events(draw)
    stays = draw.random() < 0.3
    schedule = Schedule(
        seed=seed,
        workers=workers,
        latency_s=draw.choice([0.0, 0.0, 0.5, 1.0, 0.01, 0.002, 4.0]),
        bandwidth_bytes_per_s=draw.choice([math.inf, math.inf, math.inf, 400.0, 5000.0]),
        compute_s=_DELAYS[draw.choice(sorted(_DELAYS))](draw, counts),
        apply_s=tuple(draw.choice([0.0, 0.0, 0.0, 0.5, 3.0]) for _ in counts)
        if draw.random() < 0.2
        else (0.0,) * workers,
        events=events,
        positions=tuple(_positions(draw, len(events), count) for count in counts),
        stays=tuple(_stays(draw, count) if stays else () for count in counts),
        plans=tuple(
            _plan(draw, counts) for _ in range(2 if workers > 1 and draw.random() < 0.2 else 1)
        ),
        looks=((),) * workers,
        followed=draw.random() < 0.2,
    )
    if draw.random() < 0.2:
        looks = tuple(tuple(n for n in range(count) if draw.random() < 0.3) for count in counts)
        schedule = replace(schedule, looks=looks)
    return schedule


def _events(draw: Random) -> tuple[Literal["metric", "pause"], ...]:
    kind = draw.random()
    if kind < 0.4:
        return ()
    if kind < 0.5:
        return ("pause",)
    return tuple(draw.choice(["metric"] * 5 + ["pause"]) for _ in range(draw.randint(1, 4)))


def _positions(draw: Random, events: int, count: int) -> tuple[int, ...]:
    """Epochs of equal length, or anything."""
    if draw.random() < 0.5:
        return tuple(count * (event + 1) // events for event in range(events))
    return tuple(sorted(draw.randint(0, count) for _ in range(events)))


def _stays(draw: Random, count: int) -> tuple[tuple[int, float], ...]:
    lengths = [0.0, 0.001, 0.002, 0.5, 3.0, 30.0]
    return tuple((step, draw.choice(lengths)) for step in range(count + 1) if draw.random() < 0.15)


def _plan(draw: Random, counts: list[int]) -> Plan:
    start = draw.choices(list(STARTS), weights=list(STARTS.values()))[0]
    plan = start(draw, len(counts))
    if plan.merge == "plain" and draw.random() < 0.15:
        plan = replace(plan, merge="step")
    kinds = [1, 2, 3]
    if draw.random() < 0.2:
        kinds += [0, 0]
    if draw.random() < 0.2:
        kinds += [SILENT]
    return replace(
        plan,
        samples=tuple(tuple(draw.choice(kinds) for _ in range(count)) for count in counts),
        hasty=tuple(draw.random() < 0.1 for _ in counts),
        rates_alike=draw.random() < 0.7,
    )


def _one_of(draw: Random, **weights: int) -> MergeKind:
    kinds: list[MergeKind] = ["plain", "step", "shift", "outer"]
    return draw.choices(kinds, weights=[weights[kind] for kind in kinds])[0]
