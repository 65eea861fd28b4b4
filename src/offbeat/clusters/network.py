"""What communication costs: latency plus bytes over bandwidth, per phase of the usual algorithms.

The phases of a collective run in lockstep: each takes as long as its slowest pair. Messages do not
compete for a link, except those that one worker sends at once; unless `sharing = "fair"`, where
`Load` says which ports a transfer keeps busy, and sharing.py what each gets of them.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import Annotated, Literal

from pydantic import Field, model_validator

from offbeat.clusters.sharing import Load, Port
from offbeat.clusters.tables import NotNegative, PositiveOrInf, Rank, Table, Workers

Wire = tuple[float, float]  # latency_s, bandwidth_bytes_per_s
Collective = Literal["all_reduce", "broadcast", "all_gather", "all_to_all"]
_CACHED_MEMBERSHIPS = 1024


class Link(Table):
    """The connection of two workers, in both directions."""

    between: Annotated[tuple[Rank, ...], Field(min_length=2, max_length=2)]
    latency_s: NotNegative | None = None
    bandwidth_bytes_per_s: PositiveOrInf | None = None

    @model_validator(mode="after")
    def _two_workers(self) -> "Link":
        if self.between[0] == self.between[1]:
            raise ValueError(f"between must name two workers, got {list(self.between)}")
        return self


class Zone(Table):
    """Workers that are closer to each other than to the rest: a machine or a rack."""

    workers: Workers
    latency_s: NotNegative | None = None
    bandwidth_bytes_per_s: PositiveOrInf | None = None


class Network(Table):
    """The cost model of a cluster's network; infinitely fast unless told otherwise."""

    latency_s: NotNegative = 0.0
    bandwidth_bytes_per_s: PositiveOrInf = inf
    control_latency_s: NotNegative = Field(default_factory=lambda known: known["latency_s"])
    all_reduce: Literal["ring", "recursive_doubling", "auto"] = "auto"
    sharing: Literal["none", "fair"] = "none"
    codec_bytes_per_s: PositiveOrInf = inf  # of numbers that a codec makes into bytes and back
    links: tuple[Link, ...] = Field(default=(), alias="link")
    zones: tuple[Zone, ...] = Field(default=(), alias="zone")

    @model_validator(mode="after")
    def _nothing_twice(self) -> "Network":
        pairs: dict[frozenset[int], int] = {}
        for number, link in enumerate(self.links):
            first = pairs.setdefault(frozenset(link.between), number)
            if first != number:
                raise ValueError(
                    f"link[{number}].between {list(link.between)} repeats link[{first}]"
                )
        zones: dict[int, int] = {}
        for number, zone in enumerate(self.zones):
            for worker in zone.workers:
                first = zones.setdefault(worker, number)
                if first != number:
                    raise ValueError(
                        f"zone[{number}].workers names worker {worker}, "
                        f"which is in zone[{first}] already"
                    )
        return self

    def point_to_point_s(self, source: int, target: int, size_bytes: int) -> float:
        """Cost one message; a message to oneself is free."""
        if source == target:
            return 0.0
        latency_s, bandwidth = self._wire(source, target)
        return latency_s + size_bytes / bandwidth

    def all_reduce_s(self, members: Sequence[int], size_bytes: int) -> float:
        """Cost one all-reduce among the members, in the ring order in which they are given."""
        if len(members) < 2:
            return 0.0
        if self.all_reduce == "ring":
            return self._ring_s(members, size_bytes)
        if self.all_reduce == "recursive_doubling":
            return self._phases_s("doubling", members, size_bytes)
        return min(
            self._ring_s(members, size_bytes), self._phases_s("doubling", members, size_bytes)
        )

    def broadcast_s(self, members: Sequence[int], size_bytes: int) -> float:
        """Cost one broadcast from the first member to the others along a binomial tree."""
        return self._phases_s("tree", members, size_bytes)

    def all_gather_s(self, members: Sequence[int], size_bytes: int) -> float:
        """Cost one all-gather along a ring, of which each member brings size_bytes: P-1 phases."""
        return (len(members) - 1) * self._phases_s("ring", members, size_bytes)

    def all_to_all_s(self, members: Sequence[int], size_bytes: int) -> float:
        """Cost one all-to-all, of which each member brings size_bytes, a P-th for each member.

        P-1 phases: in the k-th one every member sends to the one k places after it.
        """
        return self._phases_s("shifts", members, size_bytes / len(members))

    def collective_s(self, what: Collective, members: Sequence[int], size_bytes: int) -> float:
        """Cost one collective, by its name."""
        match what:
            case "all_reduce":
                return self.all_reduce_s(members, size_bytes)
            case "broadcast":
                return self.broadcast_s(members, size_bytes)
            case "all_gather":
                return self.all_gather_s(members, size_bytes)
        return self.all_to_all_s(members, size_bytes)

    def load(self, what: Collective, members: Sequence[int], size_bytes: int) -> Load:
        """Say what a collective asks of the network: it moves as one, at one share of its speed."""
        if len(members) < 2:
            return Load(0.0, 0.0, inf, ())
        seconds = self.collective_s(what, members, size_bytes)
        if what != "all_reduce":
            pattern = {"broadcast": "tree", "all_gather": "ring"}.get(what, "shifts")
            latency_s = self.collective_s(what, members, 0)
        elif seconds == self._ring_s(members, size_bytes):
            pattern, latency_s = "ring", self._ring_s(members, 0)
        else:
            pattern, latency_s = "doubling", self._phases_s("doubling", members, 0)
        return Load(seconds, latency_s, *self._ports_of(pattern, members))

    def message_load(self, source: int, target: int, size_bytes: int) -> Load:
        """Say what a message asks of the network."""
        if source == target:
            return Load(0.0, 0.0, inf, ())
        latency_s, bandwidth = self._wire(source, target)
        ports = tuple(self._ports(source, target))
        return Load(latency_s + size_bytes / bandwidth, latency_s, bandwidth, ports)

    def messages_s(self, source: int, size_bytes: Mapping[int, int]) -> dict[int, float]:
        """Cost several messages that one worker sends at once, by the rank of the receiver.

        They leave over the sender's own link one after the other, in the order given.
        """
        sent_s, arrive_s = 0.0, {}
        for target, size in size_bytes.items():
            latency_s, bandwidth = (0.0, inf) if target == source else self._wire(source, target)
            sent_s += size / bandwidth
            arrive_s[target] = latency_s + sent_s
        return arrive_s

    def _ring_s(self, members: Sequence[int], size_bytes: int) -> float:
        """Reduce-scatter, then all-gather: 2(P-1) phases, each moving a P-th between neighbours."""
        count = len(members)
        return 2 * (count - 1) * self._phases_s("ring", members, size_bytes / count)

    def _phases_s(self, pattern: str, members: Sequence[int], phase_bytes: float) -> float:
        """Add up the phases of a pattern, of which each moves phase_bytes per pair."""
        if self._is_uniform:
            others = len(members) - 1
            phases = {"ring": 1, "shifts": others}.get(pattern, others.bit_length())
            return phases * (self.latency_s + phase_bytes / self.bandwidth_bytes_per_s)
        return sum(
            max(latency_s + phase_bytes / bandwidth for latency_s, bandwidth in wires)
            for wires in self._wires_by_phase(pattern, members)
        )

    def _wires_by_phase(self, pattern: str, members: Sequence[int]) -> list[set[Wire]]:
        """Find the different wires that each phase uses, once per membership."""
        hashable = members if isinstance(members, range) else tuple(members)
        found = self._phase_cache.get((pattern, hashable))
        if found is None:
            found = [
                {self._wire(members[a], members[b]) for a, b in pairs}
                for pairs in _pairs_by_phase(pattern, len(members))
            ]
            if len(self._phase_cache) >= _CACHED_MEMBERSHIPS:
                self._phase_cache.clear()
            self._phase_cache[pattern, hashable] = found
        return found

    def _wire(self, source: int, target: int) -> Wire:
        """Find what connects two workers: their link, else their common zone, else the network."""
        if self._is_uniform:
            return self.latency_s, self.bandwidth_bytes_per_s
        zone = self._zone_of.get(source)
        in_zone = zone is not None and zone is self._zone_of.get(target)
        latency_s, bandwidth = self.latency_s, self.bandwidth_bytes_per_s
        for special in (zone if in_zone else None, self._link_of.get(frozenset((source, target)))):
            if special is not None and special.latency_s is not None:
                latency_s = special.latency_s
            if special is not None and special.bandwidth_bytes_per_s is not None:
                bandwidth = special.bandwidth_bytes_per_s
        return latency_s, bandwidth

    def _ports_of(self, pattern: str, members: Sequence[int]) -> tuple[float, tuple[Port, ...]]:
        """Find the speed of a pattern's slowest wire, and all ports that it uses."""
        key = pattern, tuple(members)
        found = self._port_cache.get(key)
        if found is None:
            phases = _pairs_by_phase(pattern, len(members))
            pairs = [(members[a], members[b]) for phase in phases for a, b in phase]
            ports = dict.fromkeys(port for pair in pairs for port in self._ports(*pair))
            found = min(self._wire(*pair)[1] for pair in pairs), tuple(ports)
            if len(self._port_cache) >= _CACHED_MEMBERSHIPS:
                self._port_cache.clear()
            self._port_cache[key] = found
        return found

    def _ports(self, source: int, target: int) -> Iterator[Port]:
        """List what a transfer goes through: a link of these two, or both workers' own ports.

        A worker has one port into its zone and one into the rest of the network; each is as fast
        in both directions at once.
        """
        bandwidth = self._wire(source, target)[1]
        link = self._link_of.get(frozenset((source, target)))
        if link is not None and link.bandwidth_bytes_per_s is not None:
            yield Port("link", source, target, bandwidth)
            return
        zone = self._zone_of.get(source)
        inside = zone is not None and zone is self._zone_of.get(target)
        inside = inside and zone is not None and zone.bandwidth_bytes_per_s is not None
        where = "zone" if inside else "network"
        yield Port(where, source, None, bandwidth)
        yield Port(where, None, target, bandwidth)

    @cached_property
    def _is_uniform(self) -> bool:
        return not self.links and not self.zones

    @cached_property
    def _link_of(self) -> dict[frozenset[int], Link]:
        return {frozenset(link.between): link for link in self.links}

    @cached_property
    def _zone_of(self) -> dict[int, Zone]:
        return {worker: zone for zone in self.zones for worker in zone.workers}

    @cached_property
    def _phase_cache(self) -> dict[tuple[str, Hashable], list[set[Wire]]]:
        return {}

    @cached_property
    def _port_cache(self) -> dict[tuple[str, tuple[int, ...]], tuple[float, tuple[Port, ...]]]:
        return {}

    def __str__(self) -> str:
        instant = self.bandwidth_bytes_per_s == inf
        speed = "unlimited bandwidth" if instant else f"{self.bandwidth_bytes_per_s:.4g} bytes/s"
        special = [
            f"{len(found)} {word}{'s' if len(found) > 1 else ''}"
            for word, found in (("link", self.links), ("zone", self.zones))
            if found
        ]
        return ", ".join(
            [f"latency {self.latency_s:g} s", speed, f"all-reduce {self.all_reduce}", *special]
            + (["links shared fairly"] if self.sharing == "fair" else [])
        )


def _pairs_by_phase(pattern: str, count: int) -> Iterator[list[tuple[int, int]]]:
    """List who talks to whom, as positions among the members."""
    if pattern == "ring":
        yield [(a, (a + 1) % count) for a in range(count)]
        return
    if pattern == "shifts":
        for distance in range(1, count):
            yield [(a, (a + distance) % count) for a in range(count)]
        return
    for phase in range((count - 1).bit_length()):
        distance = 1 << phase
        if pattern == "doubling":
            pairs = ((a, a ^ distance) for a in range(count))
        else:  # a tree: all who have it send it on
            pairs = ((a, a + distance) for a in range(distance))
        yield [(a, b) for a, b in pairs if b < count]
