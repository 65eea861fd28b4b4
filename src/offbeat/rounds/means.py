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

If a worker is lost meanwhile, there is no such mean; who has asked does so again, of those who are
left.

A program must not be changing its model while it is read: `changing` and `changed` enclose that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offbeat.errors import EpochOver
from offbeat.rounds.layout import Flats, Layout
from offbeat.worlds.base import Activity, Channel, Control, World


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
        self.joins = False
        """Whether this worker has no model yet: then it gives none."""
        self._control, self._channel = self._open()
        self._state = world.condition(f"a mean of {place!r}")
        self._activity: Activity | None = None
        # All below under _state.
        self._begun = self._completed = 0
        self._ends = False
        self._changing = self._reading = False
        self._asks = False
        self._mean: Flats | None = None

    def begin(self) -> None:
        """Give this worker's model to whoever asks, from here on."""
        self._activity = self._world.spawn(f"means at {self._place}", self._serve)

    def ask(self) -> Flats:
        """Block until there is a mean of models that were read after this call."""
        mean = None
        while mean is None:
            with self._state:
                number, epoch, self._asks = self._begun, self._channel.epoch, True
                key = self._key(number)
            self._world.control.set(key, b"mean")
            with self._state:
                self._state.wait_for(
                    lambda: self._completed > number or self._channel.epoch != epoch  # noqa: B023
                )
                mean, self._mean, self._asks = self._mean, None, False
        return mean

    def end(self) -> None:
        """Nobody will ask any more; every worker calls this, after the others' last question."""
        with self._state:
            self._ends, key = True, self._key(self._begun)
        self._world.control.set(key, b"end")
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

    def _open(self) -> tuple[Control, Channel]:
        """Of one epoch, both of them; nobody need meet before somebody asks."""
        while True:
            channel = self._world.channel(self._place)
            control = self._world.control_in_epoch()
            if self._world.epoch == channel.epoch:
                return control, channel

    def _serve(self) -> None:
        while True:
            try:
                self._serve_epoch()
                return
            except EpochOver:
                opened = self._open()
            with self._state:
                self._control, self._channel = opened
                self._begun = self._completed = 0
                self._reading = False
                self._state.notify_all()
                if self._ends:
                    return

    def _serve_epoch(self) -> None:
        control, channel = self._control, self._channel
        while control.get(self._key(self._begun)) != b"end":
            with self._state:
                self._state.wait_for(lambda: not self._changing)
                self._begun, self._reading = self._begun + 1, True
            model = Flats(self._layout, margin=1)
            if not self.joins:
                self._read(model)
                model.tensors[-1][-1] = 1.0
            with self._state:
                self._reading = False
                self._state.notify_all()
            for tensor in model.tensors:
                channel.all_reduce(tensor).wait()
            torch._foreach_div_(model.bodies, float(model.tensors[-1][-1]))
            if self._world.rank == channel.members[0] and self._begun > 1:
                control.delete(self._key(self._begun - 2))  # all have passed that, to come here
            with self._state:
                self._completed = self._begun
                self._mean = model if self._asks else None
                self._state.notify_all()

    def _key(self, number: int) -> str:
        return f"{self._place}/{self._channel.epoch}/{number}"
