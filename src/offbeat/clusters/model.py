"""Cluster: a cluster file as a whole."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Annotated

from pydantic import Discriminator, Field, Tag, model_validator

from offbeat.clusters import draws
from offbeat.clusters.device import Compute, Device
from offbeat.clusters.events import Crash, Event, Freeze, Join, Leave, Slow, check_presence
from offbeat.clusters.network import Network
from offbeat.clusters.noise import REPLACES, AnyNoise, Effect, Place, RandomDelay, Spells
from offbeat.clusters.overhead import Overhead
from offbeat.clusters.resize import resized
from offbeat.clusters.tables import (
    Count,
    Positive,
    Table,
    Text,
    parse_toml,
    read_text,
    validated,
)
from offbeat.errors import ClusterError

_NAMED = Path(__file__).parent / "named"
_LENGTH_STREAM = -1
_SHARED_BY_ALL = -1


def named() -> list[str]:
    """List the clusters that ship with offbeat."""
    return sorted(path.stem for path in _NAMED.glob("*.toml"))


class Group(Table):
    """Workers of one speed, and noise of their own."""

    workers: Count
    speed: Positive = 1.0
    noise: tuple[AnyNoise, ...] = ()

    @model_validator(mode="after")
    def _noise_covers_the_group(self) -> "Group":
        for number, noise in enumerate(self.noise):
            if noise.workers is not None:
                raise ValueError(
                    f"noise[{number}].workers must be left out: "
                    "the noise of a group covers the workers of that group"
                )
        return self


@dataclass(frozen=True, slots=True)
class _Covered:
    """An effect, where the file gives it, and whom it covers (rank: position among them)."""

    where: str
    effect: Effect
    positions: Mapping[int, int]
    stream: tuple[int, int]


def _is_list(value: object) -> str:
    return "list" if isinstance(value, list | tuple) else "number"


class Cluster(Table):
    """A cluster: its workers' speeds and noise, its network, and what happens to it.

    Build one with `Cluster.load`, `Cluster.parse` or `Cluster.uniform`; they raise ClusterError.
    """

    name: Text = "unnamed"
    description: Text = ""
    workers: Count
    speed: (
        Annotated[
            Annotated[Positive, Tag("number")] | Annotated[tuple[Positive, ...], Tag("list")],
            Discriminator(_is_list),
        ]
        | None
    ) = None
    compute: Compute = Compute()
    groups: tuple[Group, ...] = Field(default=(), alias="group")
    noise: tuple[AnyNoise, ...] = ()
    network: Network = Network()
    overhead: Overhead = Overhead()
    events: tuple[Event, ...] = Field(default=(), alias="event")

    @classmethod
    def load(cls, name_or_path: str | Path) -> "Cluster":
        """Load a cluster that ships with offbeat by its name, or any other by its path."""
        if str(name_or_path) in named():
            path = _NAMED / f"{name_or_path}.toml"
        else:
            path = Path(name_or_path)
            if not path.exists():
                raise ClusterError(_not_found(str(name_or_path)))
        data = {"name": path.stem, **parse_toml(read_text(path), str(path))}
        return validated(cls, data, str(path), path.parent)

    @classmethod
    def parse(cls, text: str, source: str = "<string>", folder: Path | None = None) -> "Cluster":
        """Parse TOML text; `folder` is where relative paths start (default: the current one)."""
        return validated(cls, parse_toml(text, source), source, folder or Path())

    @classmethod
    def uniform(
        cls,
        workers: int,
        step_s: float = 0.1,
        latency_s: float = 0.0,
        bandwidth_bytes_per_s: float = inf,
    ) -> "Cluster":
        """Make a cluster of equal workers without noise."""
        network = {"latency_s": latency_s, "bandwidth_bytes_per_s": bandwidth_bytes_per_s}
        data = {
            "name": f"uniform-{workers}",
            "workers": workers,
            "compute": {"step_s": step_s},
            "network": network,
        }
        return validated(cls, data, "Cluster.uniform")

    def resized(self, workers: int) -> "Cluster":
        """Make the same kind of cluster with another number of workers.

        Speeds and groups keep their proportions (a group keeps at least one worker), and so does
        the k of random_delay and spells; whatever names workers by number stays as it is.
        """
        if workers == self.workers:
            return self
        source = f"{self.name} resized to {workers} workers"
        return validated(Cluster, resized(self.model_dump(by_alias=True), workers, source), source)

    def device(self, rank: int, seed: int) -> Device:
        """Make the compute of one worker; the seed is the run's, the same for every worker."""
        if not 0 <= rank < self.workers:
            raise ClusterError(f"rank must be between 0 and {self.workers - 1}, got {rank}")
        effects = [
            (
                covered.effect,
                Place(
                    position=covered.positions[rank],
                    count=len(covered.positions),
                    key=draws.key(seed, rank, *covered.stream),
                    shared_key=draws.key(seed, _SHARED_BY_ALL, *covered.stream),
                ),
            )
            for covered in self._covered
            if rank in covered.positions
        ]
        return Device(
            rank=rank,
            speed=self.speeds[rank],
            compute=self.compute,
            length_key=draws.key(seed, rank, _LENGTH_STREAM),
            effects=tuple(sorted(effects, key=lambda pair: pair[0].order)),
        )

    def crash_at(self, rank: int) -> float | None:
        """Say when a worker crashes, if it does."""
        return self._moments.get((Crash, rank))

    def leave_at(self, rank: int) -> float | None:
        """Say when a worker leaves, if it does."""
        return self._moments.get((Leave, rank))

    def join_at(self, rank: int) -> float | None:
        """Say when a worker joins, if it is not there from the start."""
        return self._moments.get((Join, rank))

    def freezes(self, rank: int) -> list[tuple[float, float]]:
        """Say when a worker freezes, and for how many seconds."""
        its = (event for event in self.events if isinstance(event, Freeze) and event.worker == rank)
        return sorted((event.at_s, event.for_s) for event in its)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """The speed of every worker."""
        if self.groups:
            return tuple(group.speed for group in self.groups for _ in range(group.workers))
        if isinstance(self.speed, tuple):
            return self.speed
        return (1.0 if self.speed is None else self.speed,) * self.workers

    def describe(self) -> str:
        """Describe the cluster in a few lines for a terminal."""
        runs = [(speed, len(list(run))) for speed, run in groupby(self.speeds)]
        shown = ", ".join(f"{speed:g} (x{count})" for speed, count in runs[:8])
        lines = [
            f"{self.name}: {self.workers} worker{'s' if self.workers > 1 else ''}",
            f"  {self.description}",
            f"  compute  {self.compute}",
            f"  speed    {shown}{', ...' if len(runs) > 8 else ''}",
            *(f"  noise    {noise}" for noise in self.noise),
            *(
                f"  noise    {noise} (group[{number}])"
                for number, group in enumerate(self.groups)
                for noise in group.noise
            ),
            f"  network  {self.network}",
            *([f"  overhead {self.overhead}"] if self.overhead != Overhead() else []),
            *(f"  event    {event}" for event in self.events),
        ]
        return "\n".join(line for line in lines if line.strip())

    @cached_property
    def _moments(self) -> dict[tuple[type, int], float]:
        return {
            (type(event), event.worker): event.at_s
            for event in self.events
            if isinstance(event, Crash | Leave | Join)
        }

    @cached_property
    def _covered(self) -> tuple[_Covered, ...]:
        return tuple(self._find_covered())

    def _find_covered(self) -> Iterator[_Covered]:
        everyone = {rank: rank for rank in range(self.workers)}
        for number, noise in enumerate(self.noise):
            listed = everyone if noise.workers is None else _positions(noise.workers)
            yield _Covered(f"noise[{number}]", noise, listed, (0, number))
        first = 0
        for place, group in enumerate(self.groups):
            inside = _positions(range(first, first + group.workers))
            first += group.workers
            for number, noise in enumerate(group.noise):
                where = f"group[{place}].noise[{number}]"
                yield _Covered(where, noise, inside, (place + 1, number))
        for number, event in enumerate(self.events):
            if isinstance(event, Slow):
                # a script draws nothing, so its stream does not matter
                yield _Covered(f"event[{number}]", event, _positions(event.workers), (0, 0))

    @model_validator(mode="after")
    def _is_consistent(self) -> "Cluster":
        if self.groups and self.speed is not None:
            raise ValueError("speed and group exclude each other: give the groups a speed")
        if isinstance(self.speed, tuple) and len(self.speed) != self.workers:
            raise ValueError(
                "speed must have one value per worker: "
                f"{self.workers} workers, got {len(self.speed)} values"
            )
        if self.groups and (total := sum(group.workers for group in self.groups)) != self.workers:
            raise ValueError(
                f"group: the workers of the groups must add up to workers = {self.workers}, "
                f"got {total}"
            )
        for where, worker in self._named_workers():
            if worker >= self.workers:
                raise ValueError(
                    f"{where} names worker {worker}, but the workers are 0 to {self.workers - 1}"
                )
        self._check_noise()
        check_presence(self.events, self.workers)
        return self

    def _named_workers(self) -> Iterator[tuple[str, int]]:
        """List every place where the file names a worker."""
        for number, noise in enumerate(self.noise):
            yield from ((f"noise[{number}].workers", worker) for worker in noise.workers or ())
        for number, link in enumerate(self.network.links):
            yield from ((f"network.link[{number}].between", worker) for worker in link.between)
        for number, zone in enumerate(self.network.zones):
            yield from ((f"network.zone[{number}].workers", worker) for worker in zone.workers)
        for number, event in enumerate(self.events):
            if isinstance(event, Slow):
                yield from ((f"event[{number}].workers", worker) for worker in event.workers)
            else:
                yield f"event[{number}].worker", event.worker

    def _check_noise(self) -> None:
        replacing: list[_Covered] = []
        for covered in self._covered:
            effect = covered.effect
            if isinstance(effect, RandomDelay | Spells) and effect.k > len(covered.positions):
                raise ValueError(
                    f"{covered.where}.k must be between 1 and the {len(covered.positions)} "
                    f"workers it covers, got {effect.k}"
                )
            if effect.order != REPLACES:
                continue
            for other in replacing:
                shared = covered.positions.keys() & other.positions.keys()
                starts = max(effect.from_s, other.effect.from_s)
                if shared and starts < min(effect.to_s, other.effect.to_s):
                    raise ValueError(
                        f"{covered.where} and {other.where} both replace the compute time of "
                        f"worker {min(shared)} at {starts:g} s: give each its own workers or window"
                    )
            replacing.append(covered)
        replaced = set[int]().union(
            *(
                covered.positions
                for covered in replacing
                if covered.effect.from_s == 0 and covered.effect.to_s == inf
            )
        )
        if self.compute.is_free and len(replaced) < self.workers:
            raise ValueError("compute costs nothing: give compute.step_s, sample_s or length")


def _not_found(wanted: str) -> str:
    close = difflib.get_close_matches(wanted, named(), n=3)
    guess = f"; did you mean {' or '.join(close)}?" if close else ""
    return (
        f"{wanted}: neither a file nor a cluster that ships with offbeat{guess} "
        f"(known: {', '.join(named())})"
    )


def _positions(ranks: range | tuple[int, ...]) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(ranks)}
