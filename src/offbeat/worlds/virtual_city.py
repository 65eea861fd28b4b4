"""What the workers of one virtual run share: who is a member, who is lost, frozen or joins.

A worker that is frozen does nothing until it thaws: whatever wakes it, does so then. With
`freeze_s` the others go on without it after so long. When it thaws, it hears that before anything
else: its activities end, and what its program waits for raises `ExpelledError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from offbeat.clusters import Cluster, draws
from offbeat.errors import ExpelledError, NobodyToJoinError, WorkerLostError
from offbeat.worlds.clock import Clock
from offbeat.worlds.virtual_channels import Places
from offbeat.worlds.virtual_store import Store

if TYPE_CHECKING:
    from offbeat.worlds.virtual import VirtualWorld

_SEED = 7162843
Hear = Callable[["VirtualWorld", WorkerLostError], None]


@dataclass
class City:
    """A virtual run."""

    clock: Clock
    cluster: Cluster
    places: Places
    store: Store
    worlds: list[VirtualWorld] = field(default_factory=list)
    """By rank: the newest of each worker."""
    members: tuple[int, ...] = ()
    """Of the newest epoch: who has not been lost. Workers hear of it one after another."""
    epoch: int = 0

    # --- losses ----------------------------------------------------------------------------

    def crash(self, rank: int) -> None:
        """End a worker where it stands."""
        world = self.worlds[rank]
        if not world.worker.tasks[0].done:
            self.clock.kill(world.worker)
            self.lose(world, "")

    def lose(self, world: VirtualWorld, why: str, raised: bool = False) -> None:
        """Have every other worker learn, one control latency later, that this one is gone.

        Those who survive hear of it one after another, within another latency: so some know of a
        loss while the others still make a round with what the lost one gave.
        """
        words = f"worker {world.rank} was lost at virtual time {self.clock.now:g} s{why}"
        if world.rank not in self.members:
            return
        self.members = tuple(rank for rank in self.members if rank != world.rank)
        self.epoch += 1
        error = WorkerLostError(words, rank=world.rank, raised=raised)
        self.tell(world, error, lambda to, why: to.lost(why))
        self.look_again()

    # --- freezing --------------------------------------------------------------------------

    def freeze(self, rank: int, for_s: float) -> None:
        """Have a worker do nothing for so long."""
        world, now = self.worlds[rank], self.clock.now
        if world.worker.alive and not world.worker.tasks[0].done:
            self.clock.freeze(world.worker, now + for_s, partial(self._thaw, world))
            others = (self.worlds[other] for other in self.members if other != rank)
            limits_s = [other.freeze_s for other in others if other.freeze_s is not None]
            if limits_s and limits_s[0] < for_s:
                self.clock.at(now + limits_s[0], partial(self._expel, world, limits_s[0]))

    def _expel(self, world: VirtualWorld, limit_s: float) -> None:
        """A worker was silent for so long: go on without it, if somebody is awake who can."""
        others = (self.worlds[other].worker for other in self.members if other != world.rank)
        awake = any(other.thaws_s <= self.clock.now for other in others)
        if awake and world.worker.alive and world.rank in self.members:
            world.worker.expelled = True
            self.lose(world, f" (silent for {limit_s:g} s, which is freeze_s)")

    def _thaw(self, world: VirtualWorld) -> None:
        worker = world.worker
        if not worker.expelled or not worker.alive:
            return
        for task in worker.tasks[1:]:
            self.clock.end(task)
        words = f"worker {world.rank} was silent, and the others went on without it"
        self.clock.interrupt(worker, ExpelledError(words, rank=world.rank))

    # --- joining ---------------------------------------------------------------------------

    def check_open(self, world: VirtualWorld) -> None:
        """Raise if a worker comes to join, and others have ended."""
        if not self.members or not all(self.worlds[rank].open for rank in self.members):
            raise NobodyToJoinError(f"worker {world.rank} comes too late: the others have ended")

    def join(self, world: VirtualWorld) -> None:
        """Have a worker among the members, if they are all there to hear of it."""
        self.check_open(world)
        self.members = tuple(sorted({*self.members, world.rank}))
        words = f"worker {world.rank} has joined"
        self.epoch += 1
        error = WorkerLostError(words, rank=world.rank)
        self.tell(world, error, lambda to, why: to.hear_of_join(why))
        world.enter(words)
        self.look_again()

    def look_again(self) -> None:
        """Have those who are about to join see who the members are, and whether they are there."""
        for world in self.worlds:
            if world.joins and world.worker.alive:
                world.break_off()

    # --- telling the others ----------------------------------------------------------------

    def tell(self, world: VirtualWorld, why: WorkerLostError, hear: Hear) -> None:
        """The members are others: have the others hear why."""
        moment, latency_s = self.clock.now, self.cluster.network.control_latency_s

        def told(others: list[VirtualWorld]) -> None:
            for other in others:
                worker = other.worker
                if other is world or other.joins or not worker.alive or worker.expelled:
                    continue
                if worker.thaws_s > self.clock.now:
                    self.clock.at(worker.thaws_s, partial(told, [other]))
                elif self.worlds[other.rank] is other:
                    hear(other, why)

        if not world.survives:
            self.clock.at(moment + latency_s, lambda: told(list(self.worlds)))
            return
        for other in self.worlds:
            later = draws.uniform(draws.key(_SEED, other.rank), self.epoch)
            self.clock.at(moment + latency_s * (1 + later), partial(told, [other]))
