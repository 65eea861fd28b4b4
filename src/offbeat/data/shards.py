"""DealShards: an iterable data set whose shards are dealt to whoever is free.

    shards = offbeat.DealShards(sorted(folder.glob("*.txt")), read_lines)    # on every worker
    loader = DataLoader(shards, batch_size=32, num_workers=2)

Whoever has read a shard gets the next one: a worker, or each process of its DataLoader, which has a
connection of its own to the job's store.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import IterableDataset, get_worker_info

from offbeat.data import orders
from offbeat.data.counter import Counter
from offbeat.data.seat import next_number
from offbeat.worlds import Control, VirtualWorld, World
from offbeat.worlds.current import present_world
from offbeat.worlds.remote import JobStore

Shard = TypeVar("Shard")
_MOST_PROCESSES = 1024  # of one DataLoader


class DealShards(IterableDataset[Any]):
    """An iterable data set: shards go to whoever is free, each to one reader, once an epoch.

    Every worker makes the same one. It works with any `num_workers`, forked or spawned, and with
    `persistent_workers`. In virtual time, where processes have no part, use `num_workers=0`. One
    process alone divides the shards among its DataLoader's processes.

    Make several times as many shards as there are readers, or the last ones are waited for. The
    position within an epoch is not saved: save between epochs, and say by `set_epoch` which one
    follows.

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
        self._number = next_number(present_world())
        self._own = _Turns()
        self._virtual: WeakKeyDictionary[World, _Turns] = WeakKeyDictionary()
        self._store: JobStore | None = None
        self._is_copy = self._was_virtual = False

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next. Without it, each iteration is the epoch after the last."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch must be a whole number from 0, got {epoch!r}")
        self._turns().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        if process is not None and (self._was_virtual or _in_virtual_time()):
            raise RuntimeError(
                "in virtual time shards are dealt by the virtual workers themselves: "
                "make the DataLoader with num_workers=0"
            )
        # At once, not with the first sample: who is left alone in this turn must not fall behind.
        turn, epoch = self._turns().begin(0 if process is None else 1 + process.id)
        if len(self._shards) != self._count:
            raise RuntimeError(
                f"there were {self._count} shards when they were first dealt, and there are "
                f"{len(self._shards)} now: make a new DealShards, on every worker"
            )
        return self._samples(turn, epoch)

    def _samples(self, turn: int, epoch: int) -> Iterator[Any]:
        order = orders.in_order(self._count, self._shuffle, self._seed, epoch)
        for number in self._numbers(turn, epoch):
            yield from self._read(self._shards[int(order[number])])

    def _numbers(self, turn: int, epoch: int) -> Iterator[int]:
        """The places of this reader's shards in the order of the epoch."""
        process, world = get_worker_info(), present_world()
        readers = 1 if process is None else process.num_workers
        control: Control
        if isinstance(world, VirtualWorld):
            control, rank, size = world.control, world.rank, world.size
        else:
            store = self._store if self._is_copy else JobStore.here()
            if store is None or store.size == 1:
                yield from range(0 if process is None else process.id, self._count, readers)
                return
            control, rank, size = store.control(), store.rank, store.size
        key = f"shards/{self._number}/{turn}"
        counter = Counter(key, rank, size, self._alike(epoch))
        while (number := counter.add(control, 1) - 1) < self._count:
            yield number
        if control.add(f"{key}/ended/{rank}", 1) == readers:
            control.delete(f"{key}/ended/{rank}")
            counter.end(control)

    def _alike(self, epoch: int) -> dict[str, Any]:
        """What must be the same on all workers."""
        named = all(isinstance(shard, str | int | PurePath) for shard in self._shards)
        names = repr(list(map(str, self._shards))) if named else ""
        return {
            "the number of shards": self._count,
            "the names of the shards, or their order": f"{zlib.crc32(names.encode()):08x}",
            "shuffle": self._shuffle,
            "seed": self._seed,
            "the epoch": epoch,
        }

    def _turns(self) -> _Turns:
        """This worker's turns so far; virtual workers may share this very object."""
        world = present_world()
        if not isinstance(world, VirtualWorld):
            return self._own
        if world not in self._virtual:
            self._virtual[world] = _Turns()
        return self._virtual[world]

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is spawned, which knows nothing of the job."""
        virtual = isinstance(present_world(), VirtualWorld)
        store = None if virtual else JobStore.here()
        copy = {"_is_copy": True, "_was_virtual": virtual, "_store": store, "_virtual": None}
        return {**vars(self), **copy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._virtual = WeakKeyDictionary()


class _Turns:
    """How many turns each reader of one worker has begun, in memory that its processes share.

    A worker does not hear of it when its DataLoader begins an iteration: its processes do. Some
    live for one turn, some for many.
    """

    def __init__(self) -> None:
        self._begun, self._epochs = _shared(_MOST_PROCESSES + 1), _shared(2)

    def set_epoch(self, epoch: int) -> None:
        """The next turn is that epoch, and those after it follow."""
        self._epochs[0], self._epochs[1] = self._begun.max(), epoch

    def begin(self, reader: int) -> tuple[int, int]:
        """Return the number of this reader's turn, and its epoch."""
        turn = int(self._begun[reader])
        self._begun[reader] += 1
        first, epoch = self._epochs.tolist()
        return turn, epoch + turn - first


def _shared(length: int) -> torch.Tensor:
    shared = torch.zeros(length, dtype=torch.int64)
    return shared.share_memory_()  # type: ignore[no-untyped-call,no-any-return]


def _in_virtual_time() -> bool:
    return isinstance(present_world(), VirtualWorld)
