"""A turn: one worker's iteration over a deal, in the world that it is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from offbeat.data import runs
from offbeat.data.again import Again, Share, again_here
from offbeat.data.loaders import Loading
from offbeat.data.orders import Batches
from offbeat.data.settling import Held
from offbeat.data.tickets import Tickets
from offbeat.errors import ExpelledError
from offbeat.worlds import World, enter_world, leave_world, world_size
from offbeat.worlds.current import come_back, present_world


class Turn:
    """Begins when it is asked for the first time: a DataLoader may ask for an iterator in vain.

    When the next turn of the same deal begins, this one is over. To be asked again is an error
    then, since two loops over one deal would each see a part of it.
    """

    def __init__(self, loading: Loading, begin: Callable[[Turn], None]) -> None:
        self.over = False
        """Whether all was dealt, and this worker has drawn its part."""
        self.before: list[Any] | None = None
        """What the seat remembers of the turn before."""
        self._loading = loading
        self._begin: Callable[[Turn], None] | None = begin
        self._visit: _Visit | None = None
        self._superseded = False
        self._again: Again | None = None

    def begin(
        self,
        epoch: int,
        batches: Callable[[int], Batches],
        extras: list[list[int]],
        tickets: Callable[[World | None], Tickets],
        position: Mapping[str, Any] | None,
    ) -> None:
        """Deal the batches of this epoch, from where a turn was saved; a world is there now."""
        self._epoch = epoch
        self._batches_of = batches
        self._batches = {epoch: batches(epoch)}
        self._extras = extras
        self._done = [] if position is None else runs.unpacked(position["done"])
        self._gone = [] if position is None else position.get("gone", [])
        self._drawn: list[range] = []
        self._share: Share | None = None
        self._make_tickets = tickets
        self._drawn_before = 0  # in a world that this worker was expelled from
        self._tickets = tickets(present_world())
        if position is not None:
            self._tickets.hand.extend(runs.unpacked(position["hand"]))
            self._tickets.mine, self._tickets.dealt = position["mine"], position["dealt"]

    def survive(self, deal: str, turn: int, rest: list[range]) -> None:
        """Have what is dealt here dealt again if a worker is lost, where losses are survived."""
        self._again = again = again_here()
        if again is None:
            return
        count, hand = len(self._batches[self._epoch]), [*self._tickets.hand]
        done = [*runs.packed(self._done), *self._gone]
        held = Held(0, deal, turn, self._epoch, count, done, runs.packed(hand), self._extras)
        before, drawn = self._drawn_before, self._drawn

        def given() -> int:
            """How many batches the program has been given, of those drawn for it since `before`."""
            in_all = self._drawn_before + runs.length(self._drawn)
            return min(max(self._loading.given_so_far(in_all) - before, 0), runs.length(drawn))

        self._share = self._tickets.share = again.begin(held, rest, given)
        again.tell_begun(self._share)

    def _go_on_elsewhere(self) -> None:
        """This worker was expelled, and has joined again: what it had in hand others have."""
        assert self._share is not None
        held, again = self._share.held, again_here()
        known = again is not None and again.knows(held.deal, held.turn)
        rest = self._share.rest if known else []  # the others have long been through with it
        self._drawn_before += runs.length(self._drawn)
        self._done, self._gone, self._drawn, self._extras = [], [], [], held.extras
        self._tickets = self._make_tickets(present_world())
        self.survive(held.deal, held.turn, rest)

    def _batch(self, number: int) -> list[Any]:
        """A batch of this turn, or of an earlier one that a lost worker has left."""
        own = self._batches[self._epoch]
        if number < len(own):
            return own[number]
        epoch, number = self.extras[number - len(own)]
        if epoch not in self._batches:
            self._batches[epoch] = self._batches_of(epoch)
        return self._batches[epoch][number]

    @property
    def extras(self) -> list[list[int]]:
        """Batches of earlier turns that come in this one: epoch and number."""
        return self._extras if self._share is None else self._share.extras

    @property
    def gone(self) -> list[list[int]]:
        """What workers have computed of it that were lost."""
        return [*self._gone, *([] if self._share is None else self._share.gone)]

    def next(self) -> list[Any]:
        """The next batch of this worker."""
        if self.over:
            raise StopIteration
        if self._superseded:
            raise RuntimeError(
                "two loops over one Deal: since this one began, another one has. Make a Deal for "
                "each loader that is in use at the same time"
            )
        try:
            return self._next()
        except StopIteration:
            raise
        except ExpelledError as error:
            come_back(error)
            return self.next()
        except BaseException as error:
            self.part(error)
            raise

    def _next(self) -> list[Any]:
        if self._begin is not None:
            if present_world() is None and world_size() > 1:
                self._visit = _Visit(enter_world())
            self._begin(self)
            self._begin = None
        if self._share is not None and self._again is not again_here():
            self._go_on_elsewhere()
        ahead = self._loading.ahead()
        if self._tickets.can_wait(ahead):
            raise StopIteration  # not the end: the loader asks again when it has given one
        number = self._tickets.take(ahead)
        if number is None:
            self.over = True
            self.part()
            raise StopIteration
        runs.add(self._drawn, number)
        if self._share is not None and (again := again_here()) is not None:
            again.drawn(self._share)
        return self._batch(number)

    def end(self) -> None:
        """The next turn begins."""
        self._superseded = True
        if not self.over and self._begin is None:
            self._tickets.end()
        self.part()

    # --- the position ----------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the program has been given all of this worker's part."""
        drawn = self._drawn_before + runs.length(self._drawn)
        return self.over and self._loading.given(drawn) == drawn

    def position(self) -> dict[str, Any]:
        """What the program has been given of this turn, and what this worker has in hand."""
        self._tickets.settle()
        drawn, before = runs.length(self._drawn), self._drawn_before
        given = max(self._loading.given(before + drawn) - before, 0)
        return {
            "epoch": self._epoch,
            "done": runs.packed([*self._done, *runs.part(self._drawn, 0, given)]),
            "hand": runs.packed([*runs.part(self._drawn, given, drawn), *self._tickets.hand]),
            "mine": self._tickets.mine,
            "dealt": self._tickets.dealt,
            "gone": self.gone,
            "extras": self.extras,
        }

    def dealt(self) -> tuple[bool, list[list[int]]]:
        """Whether all of this turn was dealt, and what was dealt to this worker, and is gone."""
        if self.over or self._tickets.exhausted:
            return True, []
        mine = runs.packed([*self._done, *self._drawn, *self._tickets.hand])
        return False, [*mine, *self.gone]

    # --- the world -------------------------------------------------------------------------

    def part(self, error: BaseException | None = None) -> None:
        """Leave the world, if it was entered for this turn alone.

        Outside of an attached block a `break` must let go of the others, who wait at the end.
        """
        visit, self._visit = self._visit, None
        if visit is not None:
            visit.leave(error)


class Draws(Iterator[list[Any]]):
    """What a loop holds of its turn: when it lets go of this, it has ended, or was left."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def __next__(self) -> list[Any]:
        return self._turn.next()

    def __del__(self) -> None:
        with suppress(Exception):  # a world that has failed tells the program at its next verb
            self._turn.part()


class _Visit:
    """A world that was entered for one turn, outside of any attached block."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._left = False
        world.open.append(self)

    def leave(self, error: BaseException | None = None) -> None:
        if not self._left:
            self._left = True
            self._world.open.remove(self)
            leave_world(self._world, error)

    def close(self) -> None:
        """The program ends, or the block that it is in."""
        self.leave()

    def abandon(self, error: BaseException) -> None:
        """The program fails."""
        self.leave(error)

    def away(self, where: str) -> AbstractContextManager[None]:
        """Nobody waits for who draws."""
        return nullcontext()
