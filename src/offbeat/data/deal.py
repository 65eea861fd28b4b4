"""Deal: a batch sampler that hands out the data of an epoch to whoever is free.

A share that is fixed beforehand (`DistributedSampler`) is a wait that is fixed beforehand: the
fastest worker's share ends early, and it waits for the slowest. Dealt data end for all at the same
sample. Each worker takes as many batches as it can compute, and every sample comes once an epoch.

    deal = offbeat.Deal(dataset, batch_size=32, shuffle=True, seed=0)    # the same on every worker
    loader = DataLoader(dataset, batch_sampler=deal, num_workers=2)
    with offbeat.attach(model, optimizer, offbeat.ABSSGD()) as dp:
        for epoch in range(3):
            for x, y in loader:
                ...

If a worker is lost and the others go on, they are dealt what it had in hand: see docs/survival.md.

Not for data that must stay where they are: on a worker's own disk, or with their owner. There,
`DistributedSampler`, or a share of one's own, remains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import IterableDataset, Sampler

from offbeat.data import marks, orders, runs
from offbeat.data.loaders import Loading
from offbeat.data.seat import Seat, members
from offbeat.data.tickets import Tickets
from offbeat.data.turn import Draws, Turn
from offbeat.errors import ExpelledError
from offbeat.worlds import VirtualWorld, rank, world_size
from offbeat.worlds.current import present_world
from offbeat.worlds.tasks import Worker

_SEATS = ("_own", "_virtual")


class Deal(Sampler[list[int]]):
    """A batch sampler whose batches go to whoever is free, each to one worker, once an epoch.

    Every worker makes the same one, and iterates over it inside the block of `offbeat.attach`.
    Outside of it, the workers connect for the iteration, and part at its end: all of them must
    then iterate. One process alone gets every batch.

    A `break` ends the epoch for this worker: what it had been dealt and not computed stays undone,
    the rest goes to the others.

    Args:
        dataset: any with a length. Of one without, deal the files: see `offbeat.DealShards`.
        batch_size: samples in a batch of one worker, as ever.
        shuffle: whether the order is another one in every epoch.
        seed: of that order, the same on all workers. The program's own random generators are
            neither used nor disturbed.
        drop_last: whether to leave out the samples that do not fill a batch: less than one batch
            an epoch, over all workers.
        sampler: whose indices to deal, in batches, instead: `WeightedRandomSampler`, say.
        batch_sampler: whose batches to deal instead: of like lengths, say. A sampler draws the
            same on every worker, from `seed` and the epoch; its own `generator` is seeded for that,
            and its `set_epoch` is called.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int = 1,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[list[int]] | None = None,
    ) -> None:
        _check(dataset, batch_size, shuffle, seed, drop_last, sampler, batch_sampler)
        self._dataset = dataset
        self._samples = len(dataset)
        self._batch_size = batch_size
        self._shuffle = shuffle is not False
        self._seed = seed
        self._drop_last = drop_last
        self._sampler = sampler
        self._batch_sampler = batch_sampler
        self._own = Seat()
        self._virtual: WeakKeyDictionary[Worker, Seat] = WeakKeyDictionary()
        if orders.count(self._source()) is not None:
            self._check_not_empty(self._count())

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next. Without it, each iteration is the epoch after the last."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch must be a whole number from 0, got {epoch!r}")
        if not (seat := self._seat()).counts:
            seat.epoch = epoch

    def __len__(self) -> int:
        """Batches of one worker on average, rounded up: for schedules that count steps."""
        return -(-self._count() // world_size())

    def __iter__(self) -> Iterator[list[int]]:
        return self.drawn_by(Loading.of_caller())

    def drawn_by(self, loading: Loading) -> Iterator[list[int]]:
        """The batches of this worker in one turn, for a loop that knows how far it is."""
        self._seat().note_generator()
        return Draws(Turn(loading, self._begin))

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch of one worker; None where a `batch_sampler` decides it."""
        return None if self._batch_sampler is not None else self._batch_size

    @property
    def drop_last(self) -> bool:
        """Whether samples that do not fill a batch are left out."""
        return self._drop_last

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration; after `load_state_dict`, the one that was saved.

        On a worker that has joined, the one that the others are in.
        """
        seat = self._seat()
        seat.join()
        return seat.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this worker in the epoch.

        Each worker saves its own, right after `dp.state_dict()`, at the same place in the loop.
        """
        world = {"world_size": world_size(), "rank": rank(), "members": members()}
        return {"alike": self._alike(), **world, **self._seat().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on where a `state_dict()` of the worker of this rank was.

        Every worker loads its own, inside the attached block, and goes on with epoch `self.epoch`:
        first with what it had been dealt and not computed, then with the rest. Saying by
        `set_epoch` that another epoch comes next forgets the position. A worker that had been lost
        when this was saved loads the state of any other one.
        """
        if rank() not in state.get("members", [rank()]):
            nothing = {"done": [], "hand": [], "gone": [], "mine": 0, "before": None}
            state = {**state, **nothing, "rank": rank()}
        mine = {**self._alike(), "world_size": world_size(), "rank": rank()}
        for what, value in mine.items():
            saved = {**state["alike"], **state}.get(what)
            if saved != value:
                raise ValueError(
                    f"this state of a Deal was saved with {what} {saved}, but here it is {value}: "
                    "resume with the same set-up, each worker from its own state"
                )
        self._seat().load(state)

    def __getstate__(self) -> dict[str, Any]:
        """What is dealt, without anybody's place in it."""
        return {name: value for name, value in vars(self).items() if name not in _SEATS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._own, self._virtual = Seat(), WeakKeyDictionary()

    # --- one iteration ---------------------------------------------------------------------

    def _begin(self, turn: Turn) -> None:
        """A turn is asked for its first batch, and so begins."""
        seat = self._seat()
        before = seat.turns, seat.epoch
        try:
            self._begin_turn(turn, seat)
        except ExpelledError:  # it begins when this worker has joined again
            seat.turns, seat.epoch = before
            raise

    def _begin_turn(self, turn: Turn, seat: Seat) -> None:
        seat.join()
        epoch = seat.epoch
        batches = self._batches(epoch)
        if seat.turn is not None:
            seat.turn.end()
        position = seat.resumed()
        rest, extras = seat.left(len(batches))
        turn.before = seat.before(position)
        seat.turns += 1
        seat.epoch += 1
        alike = {
            **self._alike(),
            "the epoch": epoch,
            "the number of batches": len(batches),
            "what the data set holds": self._mark,
            "what the sampler draws": batches.mark,
            "what is left of the epoch": runs.length(rest),
        }
        key, total = f"{seat.key}/{seat.turns}", len(batches) + len(extras)
        turn.begin(
            epoch,
            lambda each: batches if each == epoch else self._batches(each),
            extras,
            lambda world: Tickets(world, key, total, alike, rest),
            position,
        )
        turn.survive(seat.key, seat.turns, rest)
        seat.put_generator_back()
        seat.turn = turn
        world = present_world()
        if world is not None and runs.length(rest) == total:  # not resumed, or joined
            world.dealt += total

    def _alike(self) -> dict[str, Any]:
        """What must be the same on all workers."""
        return {
            "the length of the data set": self._samples,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
        }

    @cached_property
    def _mark(self) -> str:
        return marks.mark(self._dataset)

    def _seat(self) -> Seat:
        """What this worker knows of its turns; virtual workers may share this very object."""
        world = present_world()
        if not isinstance(world, VirtualWorld):
            return self._own
        return self._virtual.setdefault(world.worker, Seat())

    # --- what is dealt ---------------------------------------------------------------------

    def _source(self) -> Any:
        """What gives the indices, or the batches."""
        if self._batch_sampler is not None:
            return self._batch_sampler
        return self._dataset if self._sampler is None else self._sampler

    def _count(self) -> int:
        """Batches in an epoch, over all workers."""
        if (length := orders.count(self._source())) is None:
            raise TypeError(f"{type(self._source()).__name__} has no length, so this Deal has none")
        if self._batch_sampler is not None:
            return length
        return orders.batches_of(length, self._batch_size, self._drop_last)

    def _batches(self, epoch: int) -> orders.Batches:
        self._check_length()
        batches: orders.Batches
        if self._batch_sampler is not None:
            drawn = orders.drawn(self._batch_sampler, self._seed, epoch)
            batches = orders.Listed([list(batch) for batch in drawn])
            batches.mark = orders.mark(drawn)
        elif self._sampler is not None:
            drawn = orders.drawn(self._sampler, self._seed, epoch)
            batches = orders.Chopped(drawn, self._batch_size, self._drop_last)
            batches.mark = orders.mark(drawn)
        else:
            indices = orders.in_order(self._samples, self._shuffle, self._seed, epoch)
            batches = orders.Chopped(indices, self._batch_size, self._drop_last)
        self._check_not_empty(len(batches))
        return batches

    def _check_length(self) -> None:
        if (now := len(self._dataset)) != self._samples:
            raise RuntimeError(
                f"the data set had {self._samples} samples when its Deal was made, and has {now} "
                "now: make a new Deal whenever it changes, on every worker"
            )

    def _check_not_empty(self, batches: int) -> None:
        if batches:
            return
        if self._drop_last and (samples := orders.count(self._source())):
            raise ValueError(
                f"with drop_last, {samples} samples make no batch of {self._batch_size}: "
                f"leave out drop_last, or choose a batch_size of at most {samples}"
            )
        raise ValueError(f"there is nothing to deal: {type(self._source()).__name__} is empty")


def _check(
    dataset: object,
    batch_size: object,
    shuffle: bool | None,
    seed: object,
    drop_last: object,
    sampler: object,
    batch_sampler: object,
) -> None:
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise TypeError(
            f"{type(dataset).__name__} has no length to deal from: "
            "deal the files or shards that it reads, with offbeat.DealShards"
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number above 0, got {batch_size!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
        if not isinstance(value, bool | None):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    given = {"batch_size": batch_size != 1, "shuffle": shuffle is not None}
    given |= {"drop_last": drop_last is not False, "sampler": sampler is not None}
    if batch_sampler is not None and (names := [name for name in given if given[name]]):
        raise ValueError(f"batch_sampler makes the batches itself: leave out {', '.join(names)}")
    if sampler is not None and shuffle is not None:
        raise ValueError("sampler decides the order itself: leave out shuffle")
    if len(dataset) == 0:
        raise ValueError("the data set is empty: there is nothing to deal")
