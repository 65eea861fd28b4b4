"""A turn: one worker's iteration over a deal, in the world that it is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offbeat.data.orders import Batches
from offbeat.data.tickets import Tickets
from offbeat.worlds import World, enter_world, leave_world, world_size
from offbeat.worlds.current import present_world


class Turn(Iterator[list[Any]]):
    """Begins when it is asked for the first time: a DataLoader may ask for an iterator in vain.

    When the next turn of the same deal begins, this one is over: to be asked again is an error,
    since two loops over one deal would each see a part of it.
    """

    def __init__(self, begin: Callable[[Turn], None]) -> None:
        self._begin: Callable[[Turn], None] | None = begin
        self._batches: Batches | None = None
        self._tickets: Tickets | None = None
        self._left: World | None = None  # a world that was entered for this turn
        self._superseded = False
        self._over = False

    def begin(self, seat: object, key: str, batches: Batches, alike: Mapping[str, Any]) -> None:
        """Deal these."""
        world = present_world()
        if world is None and world_size() > 1:
            world = self._left = enter_world()
        self._batches = batches
        self._tickets = Tickets(world, key, len(batches), alike)

    def __next__(self) -> list[Any]:
        if self._superseded and not self._over:
            raise RuntimeError(
                "two loops over one Deal: this one was begun, then another one. Make a Deal for "
                "each loader that is in use at the same time"
            )
        if self._over:
            raise StopIteration
        if self._begin is not None:
            self._begin(self)
            self._begin = None
        assert self._tickets is not None
        assert self._batches is not None
        try:
            number = self._tickets.take()
        except BaseException as error:
            self._leave(error)
            raise
        if number is None:
            self._over = True
            self._leave()
            raise StopIteration
        return self._batches[number]

    def end(self) -> None:
        """The next turn begins."""
        self._superseded = True
        if not self._over and self._tickets is not None:
            self._tickets.end()
        self._leave()

    def _leave(self, error: BaseException | None = None) -> None:
        world, self._left = self._left, None
        if world is not None:
            leave_world(world, error)
