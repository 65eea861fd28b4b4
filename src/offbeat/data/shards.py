"""DealShards: an iterable data set whose shards are dealt to whoever is free.

    shards = offbeat.DealShards(sorted(folder.glob("*.txt")), read_lines)    # on every worker
    loader = DataLoader(shards, batch_size=32, num_workers=2)

Whoever has read a shard gets the next one: a worker (reading.py), or each process of its
DataLoader, which has a connection of its own to the job's store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import IterableDataset, get_worker_info

from offbeat.data import orders
from offbeat.data.by_processes import Reader, StoreDeal
from offbeat.data.reading import Reading, ShardDeal
from offbeat.data.seat import next_number
from offbeat.data.started import starting, tell_of_forks
from offbeat.data.turns import Turns
from offbeat.errors import WorldError
from offbeat.worlds import RealWorld, VirtualWorld, World, rank, world_size
from offbeat.worlds.current import present_world
from offbeat.worlds.remote import JobStore

Shard = TypeVar("Shard")


class DealShards(IterableDataset[Any]):
    """An iterable data set: shards go to whoever is free, each to one reader, once an epoch.

    Every worker makes the same one. It works with any `num_workers`, forked or spawned, and with
    `persistent_workers`. In virtual time, where processes have no part, use `num_workers=0`. One
    process alone divides the shards among its DataLoader's processes.

    Make several times as many shards as there are readers, or the last ones are waited for.

    The position within an epoch can be saved, to the sample. With `num_workers=0`, where losses are
    survived, a shard that a lost worker was reading is dealt again, from its beginning. What the
    processes of a lost worker's DataLoader had in hand is lost. Inside the attached block, all
    workers have such processes, or none has.

    Args:
        shards: what to deal, in the same order on all workers: sorted names of files, say.
        read: gives the samples of one shard.
        shuffle: whether shards come in another order in every epoch. Samples within a shard come as
            `read` gives them.
        seed: of that order, the same on all workers.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        read: Callable[[Shard], Iterable[Any]],
        *,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        if not len(shards):
            raise ValueError("there are no shards to deal")
        if not callable(read):
            raise TypeError(f"read must be a function of a shard, got {read!r}")
        if not isinstance(shuffle, bool):
            raise ValueError(f"shuffle must be True or False, got {shuffle!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be a whole number, got {seed!r}")
        self._shards = shards
        self._count = len(shards)
        self._read = read
        self._shuffle = shuffle
        self._seed = seed
        self._deal = ShardDeal(shards, shuffle, seed)
        self._number = next_number(present_world())
        self._own = Turns(self._count)
        self._virtual: WeakKeyDictionary[World, Turns] = WeakKeyDictionary()
        self._store: JobStore | None = None
        self._is_copy = self._was_virtual = False
        tell_of_forks(self)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next. Without it, each iteration is the epoch after the last."""
        self._deal.set_epoch(epoch)
        self._turns().set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration; after `load_state_dict`, the one that was saved.

        On a worker that has joined, the one that the others are in.
        """
        return self._deal.epoch if self._deal.joins else self._turns().epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this worker in the epoch.

        Each worker saves its own, right after `dp.state_dict()`, at the same place in the loop.
        """
        if self._is_copy or get_worker_info() is not None:
            raise RuntimeError(
                "state_dict() of shards is for the worker itself: a process of its DataLoader does "
                "not know how far the loop is"
            )
        turns = self._turns()
        if (loaded := turns.loaded) is not None:
            return dict(loaded)
        state = self._deal.state_dict()
        if turns.begun and not turns.here:
            store = JobStore.here()
            order = self._order(turns.epoch - 1)
            if (position := turns.position(order, store is None or store.size == 1)) is not None:
                return {**state, **position}
            self._deal.come_to(turns.begun, turns.epoch)
            state = {**self._deal.state_dict(), "before": turns.before(turns.begun)}
        seen = turns.reading.read.items() if turns.here else ()
        read = [[shard, samples] for shard, samples in seen if samples]
        return {**state, "before": state["before"] or turns.before(turns.begun - 1), "read": read}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on where a `state_dict()` of the worker of this rank was.

        Every worker loads its own, inside the attached block and before it makes an iterator of the
        DataLoader, and goes on with epoch `self.epoch`: first with the shards that it had in hand,
        each from the sample that its loop had come to. See `Deal.load_state_dict`.
        """
        self._deal.load_state_dict(state)
        if rank() not in state.get("members", [rank()]):
            nothing: dict[str, Any] = {
                "done": [],
                "hand": [],
                "gone": [],
                "read": [],
                "before": None,
            }
            state = {**state, **nothing}
        self._turns().load(state)

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        if process is not None and (self._was_virtual or _in_virtual_time()):
            raise RuntimeError(
                "in virtual time shards are dealt by the virtual workers themselves: "
                "make the DataLoader with num_workers=0"
            )
        if len(self._shards) != self._count:
            raise RuntimeError(
                f"there were {self._count} shards when they were first dealt, and there are "
                f"{len(self._shards)} now: make a new DealShards, on every worker"
            )
        turns, world = self._turns(), present_world()
        # At once, not with the first sample: who is left alone in this turn must not fall behind.
        if process is None and (world is not None or world_size() == 1):
            turn, epoch = turns.begin_here(in_world=True)
            self._deal.come_to(turn, epoch)
            if isinstance(world, RealWorld) and world.size > 1:
                self._compare_readers(turns, turn)
            state = turns.resumed(turn)
            turns.reading = Reading(() if state is None else state["read"])
            drawn = self._deal.drawn_by(turns.reading)
            return turns.reading.samples(drawn, self._shards, self._read)
        if process is None:
            turn, epoch = turns.begin_here(in_world=False)
            reader = Reader(turns.log, turn, 0, 1)
        else:
            try:
                turn, epoch = turns.begin_in_process(1 + process.id)
            except RuntimeError as error:
                return _raising(error)  # with the first sample: now it would end the process
            reader = Reader(turns.log, turn, 1 + process.id, process.num_workers)
        places = self._places(turns, reader, epoch)
        state = turns.resumed(turn)
        return reader.samples(places, self._order(epoch), self._shards, self._read, state)

    def _order(self, epoch: int) -> Sequence[int]:
        order = orders.in_order(self._count, self._shuffle, self._seed, epoch)
        return order.tolist() if isinstance(order, torch.Tensor) else order

    # --- by processes ------------------------------------------------------------------------

    def _places(self, turns: Turns, reader: Reader, epoch: int) -> Iterator[int]:
        """The places of this reader's shards in the order of the epoch, from the job's store."""
        store = self._store if self._is_copy else JobStore.here()
        store = None if store is not None and store.size == 1 else store
        deal = StoreDeal(store, f"shards/{self._number}/{turns.loads}")
        state = turns.resumed()
        return deal.places(reader, self._count, state, self._deal.alike(epoch))

    def _compare_readers(self, turns: Turns, turn: int) -> None:
        """This worker reads itself: then no other worker's processes may."""
        try:
            store = JobStore.here()
        except WorldError:
            return  # one that processes cannot reach
        if store is not None:
            StoreDeal(store, f"shards/{self._number}/{turns.loads}").compare_own(turn)

    # --- this worker, and copies of it -------------------------------------------------------

    def forks(self, iterator: object) -> None:
        """A DataLoader is about to fork a process that may read these shards."""
        if not self._is_copy and not _in_virtual_time():
            certain = getattr(iterator, "_dataset", None) is self
            self._own.starts(iterator, certain)

    def _turns(self) -> Turns:
        """This worker's turns so far; virtual workers may share this very object."""
        world = present_world()
        if not isinstance(world, VirtualWorld):
            return self._own
        if world not in self._virtual:
            self._virtual[world] = Turns(self._count)
        return self._virtual[world]

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is spawned, which knows nothing of the job."""
        virtual = isinstance(present_world(), VirtualWorld)
        if (iterator := starting()) is not None and not virtual and not self._is_copy:
            self._own.starts(iterator, certain=True)
        store = None if virtual else JobStore.here()
        copy = {"_is_copy": True, "_was_virtual": virtual, "_store": store, "_virtual": None}
        return {**vars(self), **copy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._virtual = WeakKeyDictionary()


def _in_virtual_time() -> bool:
    return isinstance(present_world(), VirtualWorld)


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield
