"""The mean of all workers' models, when somebody asks for it.

Where models are averaged within groups or among neighbours, no worker knows what all of them
together are. To evaluate or to save, one asks; then everybody's background gives its model as it is
at that moment, wherever the program is: computing, waiting for a neighbour, or away. So nobody else
need do anything, and nobody is held up but for the bandwidth.

    worker 0   compute ──┐ asks ─────────────────┐ has the mean: evaluates
    worker 1   compute ──────────────────────────────────────┐ step
               background   └ reads, all-reduce ─┘

Those who ask at about the same time share one mean. A worker's own model in it was read after it
asked; another's perhaps a moment before.

A program must not be changing its model while it is read: `changing` and `changed` enclose that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offbeat.rounds.layout import Flats, Layout
from offbeat.worlds.base import Activity, World


class Means:
    """One worker's part in the means of models of one layout."""

    def __init__(
        self, world: World, place: str, layout: Layout, read: Callable[[Flats], None]
    ) -> None:
        """`read` writes this worker's model, in the background, while the program changes none."""
        self._world = world
        self._place = f"{place}/mean"
        self._layout = layout
        self._read = read
        self._channel = world.channel(self._place)
        self._state = world.condition(f"a mean of {place!r}")
        self._activity: Activity | None = None
        # All below under _state.
        self._begun = 0
        self._completed = 0
        self._changing = self._reading = False
        self._asks = False
        self._mean: Flats | None = None

    def begin(self) -> None:
        """Give this worker's model to whoever asks, from here on."""
        self._activity = self._world.spawn(f"means at {self._place}", self._serve)

    def ask(self) -> Flats:
        """Block until there is a mean of models that were read after this call."""
        with self._state:
            number, self._asks = self._begun, True
        self._world.control.set(self._key(number), b"mean")
        with self._state:
            self._state.wait_for(lambda: self._completed > number)
            mean, self._mean, self._asks = self._mean, None, False
        assert mean is not None, "the background keeps it for who asks"
        return mean

    def end(self) -> None:
        """Nobody will ask any more; every worker calls this, after the others' last question."""
        self._world.control.set(self._key(self._begun), b"end")
        if self._activity is not None:
            self._activity.join()

    def changing(self) -> None:
        """The program is about to change its model."""
        with self._state:
            self._state.wait_for(lambda: not self._reading)
            self._changing = True

    def changed(self) -> None:
        """It has done so."""
        with self._state:
            self._changing = False
            self._state.notify_all()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Change the model in this block."""
        self.changing()
        try:
            yield
        finally:
            self.changed()

    def _serve(self) -> None:
        control, rank = self._world.control, self._world.rank
        while control.get(self._key(self._begun)) != b"end":
            with self._state:
                self._state.wait_for(lambda: not self._changing)
                self._begun, self._reading = self._begun + 1, True
            model = Flats(self._layout)
            self._read(model)
            with self._state:
                self._reading = False
                self._state.notify_all()
            for tensor in model.tensors:
                self._channel.all_reduce(tensor).wait()
            torch._foreach_div_(model.tensors, float(self._world.size))
            if rank == 0 and self._begun > 1:  # all have passed that, to come here
                control.delete(self._key(self._begun - 2))
            with self._state:
                self._completed = self._begun
                self._mean = model if self._asks else None
                self._state.notify_all()

    def _key(self, number: int) -> str:
        return f"{self._place}/{number}"
