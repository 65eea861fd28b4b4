"""The part of an attachment that joins, and has others join: see rounds/joining.py and donation.py.

A worker that was started to join attaches alone first. Everything is set up as ever, with nobody
else there. Then it becomes a member, and takes over another one's state.
"""

from __future__ import annotations

from abc import ABC
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from offbeat.algorithm import Algorithm
from offbeat.apply import Applier
from offbeat.codecs import Codec
from offbeat.donation import Parts, given, refused, take, version
from offbeat.replica import Replica
from offbeat.worlds import World
from offbeat.worlds.entrance import REFUSES


class Joinable(ABC):
    """What can be joined, if its method can."""

    algorithm: Algorithm
    codec: Codec | None
    _world: World
    _model: nn.Module
    _optimizer: Optimizer
    _replica: Replica
    _apply: Applier
    _closed: bool
    _in_step: bool
    _comparisons: int

    def _let_others_join(self, told: dict[str, Any]) -> None:
        """Join, if this worker was started to do that; then others may, if this can be joined."""
        world, engine = self._world, self._replica.engine
        why = refused(self.algorithm, self.codec, len(world.open))
        told = {**told, **version(), "place": self._replica.name, REFUSES: why}
        engine.give_now = self._give_state
        if not world.joins:
            world.let_in(told)
            return
        if not world.survives:
            raise ValueError(
                f"worker {world.rank} cannot join: a job can be joined if all of its workers "
                "attach with survive=True"
            )
        if why:
            raise ValueError(f"worker {world.rank} cannot join: a joiner is not taken in {why} yet")
        engine.begin_to_join()
        world.join(told)
        engine.tell_step()
        self._comparisons = take(self._parts, engine.await_state())
        self._catch_up()
        engine.joined()
        world.say_joined()

    def _give_state(self) -> None:
        self._replica.engine.give_state(partial(given, self._parts, self._comparisons))

    @property
    def _parts(self) -> Parts:
        return Parts(self._model, self._optimizer, self._replica, self._apply)

    def _catch_up(self) -> None:
        """Apply the rounds that were made while this worker computed, or was away."""
        if self._closed:
            return
        parameters = self._replica.parameters
        gradients = [parameter.grad for parameter in parameters]
        self._in_step = True
        try:
            for parameter in parameters:  # a backward's that no step has taken, or the user's
                parameter.grad = None
            self._apply.apply(self.algorithm.rounds(self._replica, self._replica.newest()))
        finally:
            self._in_step = False
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
