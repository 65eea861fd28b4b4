"""The part of an attachment that joins, and has others join: see rounds/joining.py and donation.py.

A worker that was started to join attaches alone first. Everything is set up as ever, with nobody
else there. Then it becomes a member, and takes over another one's state.

A worker that was frozen for so long that the others went on without it does the same again, in a
new world, when its program next has to do with the others: `ExpelledError` is what that raises, and
is caught here. Of what was in its hands nothing goes into a round any more: neither what was on its
pile, nor the gradient of the step in which it hears of that. The others have counted it as lost.
What they had of it before stays in their rounds, also in those to come, where gradients are still
being added up.

What all were doing together meanwhile, comparing replicas or saving, the others may have done
without it: it is told how often they have, and does it with them if they have not.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from offbeat.algorithm import Algorithm
from offbeat.apply import Applier
from offbeat.donation import Comparing, Parts, SoFar, given, refused, striped, take, version
from offbeat.errors import ExpelledError, NobodyToJoinError
from offbeat.replica import Replica, Stats
from offbeat.worlds import World
from offbeat.worlds.current import enter_again
from offbeat.worlds.entrance import REFUSES

T = TypeVar("T")
logger = logging.getLogger("offbeat")


class Joinable(ABC):
    """What can be joined, if its method can."""

    algorithm: Algorithm
    _world: World
    _model: nn.Module
    _optimizer: Optimizer
    _replica: Replica
    _apply: Applier
    _closed: bool
    _in_step: bool
    _so_far: SoFar
    _stats: Stats
    _undo: ExitStack
    """Undoes what was set up outside of this worker's world."""

    @abstractmethod
    def _begin(self, world: World, before: Replica | None) -> None:
        """Set everything up in this world; `before` is what there was in another one."""

    @abstractmethod
    def close(self) -> None:
        """End the block."""

    @abstractmethod
    def _compare_all(self, how: Comparing) -> bool:
        """Say whether all workers hold the same bits; all of them do."""

    @abstractmethod
    def abandon(self, error: BaseException) -> None:
        """End it with an error."""

    @abstractmethod
    def away(self, where: str = "") -> AbstractContextManager[None]:
        """Hold up nobody for the length of a block."""

    @abstractmethod
    def _away(
        self, verb: str, *, elsewhere: bool, goes: bool = True, returns: bool = True
    ) -> AbstractContextManager[None]:
        """The same; if this worker was expelled meanwhile, it joins again at its end, or raises."""

    def _let_others_join(self, told: dict[str, Any]) -> None:
        """Join, if this worker was started to do that; else others may, if this can be joined.

        With several things attached at a time, a worker joins when it has attached them all.
        """
        world = self._world
        why = refused(self.algorithm, self._replica)
        told = {**told, **version(), "place": self._replica.name, REFUSES: why}
        self._replica.engine.give_now = self._give_all
        world.attached = [*(world.attached if world.open else ()), told]
        world.said_attached = False
        alone = len(world.attached) == 1
        for each in [*_joinable(world), self]:  # who joins wants all of them as soon as can be
            each._replica.engine.striped = striped(each._parts) if alone else None
        if not world.joins:
            return
        if not world.survives:
            raise ValueError(
                f"worker {world.rank} cannot join: a job can be joined if all of its workers "
                "attach with survive=True"
            )
        if why:
            raise ValueError(f"worker {world.rank} cannot join: a joiner is not taken in {why} yet")
        if len(world.attached) >= world.others_attached():
            _join(world, [*_joinable(world), self])

    def _say_attached(self) -> None:
        """Let others join from the first step on: by then, all that is to be attached is."""
        world = self._world
        if world.survives and not (world.said_attached or world.joins):
            world.said_attached = True
            world.let_in()
            _judge_silence(world, _joinable(world))

    def _begin_to_join(self) -> None:
        self._replica.engine.begin_to_join()
        if self._replica.means is not None:
            self._replica.means.joins = True

    def _take_state(self) -> None:
        """Be given all that the others have made so far."""
        engine, means = self._replica.engine, self._replica.means
        engine.tell_step()
        self._so_far = take(self._parts, engine.await_state())
        self._stats.inherited_samples = engine.held_samples
        if means is not None:
            means.joins = False

    def _be_here(self) -> None:
        """Have made of it what the others have meanwhile, and take part."""
        self._catch_up()
        self._replica.round_began = self._world.now()
        self._replica.engine.joined()
        self._catch_up()  # among neighbours only now: before, the background made rounds

    def _check_joined(self) -> None:
        """Raise if this worker has attached less than those whom it is to join."""
        if self._world.joins:
            raise RuntimeError(
                f"worker {self._world.rank} was started to join the others, who have attached "
                f"{self._world.others_attached()} things at a time, and makes a step when it has "
                f"attached {len(self._world.attached)}: attach all of them before the first step"
            )

    # --- joining again ---------------------------------------------------------------------

    def _or_rejoin(self, act: Callable[[], T], otherwise: T) -> T:
        """Do something that may wait; this instead, if the others have gone on without this worker.

        Then it has joined them again.
        """
        try:
            return act()
        except ExpelledError as error:
            self.rejoin(error)
            return otherwise

    def rejoin(self, error: ExpelledError) -> None:
        """Join the others who have gone on without this worker; raise if that cannot be."""
        every = _joinable(self._world)
        if why := _stays_out(self._world, every):
            raise _refusal(error, why) from error
        self._begin_again(self._world, error, every)

    def _begin_or_join(self, world: World) -> None:
        """Be attached with the others; if they go on without this worker meanwhile, join them."""
        try:
            self._begin(world, None)
        except ExpelledError as error:
            if why := _strange(world):
                raise _refusal(error, why) from error
            self._begin_again(world, error, _joinable(world))

    def _begin_again(self, world: World, error: ExpelledError, every: list[Joinable]) -> None:
        """Attach all of these in a new world, and this, if it was not attached yet; join there."""
        began_s = world.now()
        places: dict[Joinable, Replica | None] = {each: each._leave_behind() for each in every}
        places.setdefault(self, None)
        while True:
            try:
                world = enter_again(world)
                for each, replica in places.items():
                    each._undo.close()
                    each._begin(world, replica)
                break
            except ExpelledError:  # it was frozen again meanwhile
                continue
            except BaseException as failure:
                found = _too_late(error) if isinstance(failure, NobodyToJoinError) else failure
                for each in every:
                    each._world.open.append(each)
                    each.abandon(found)
                if found is failure:
                    raise
                raise found from None
        logger.warning(
            "%s; it has joined them again, after %.3f s, at round %d",
            *(error, self._world.now() - began_s, self._replica.round),
        )

    def _stays_out(self) -> str:
        """Why this worker cannot join again once the others have gone on without it, if so."""
        if why := refused(self.algorithm, self._replica):
            return why
        return ""

    def _leave_behind(self) -> Replica:
        """Have nothing of what was not seen in a round on this worker's books: the others have."""
        replica, stats = self._replica, self._stats
        replica.engine.tell_outcomes()
        if replica.shift is not None:  # its own steps have counted at once
            stats.applied_samples -= replica.engine.kept_samples
        now = stats.copy(replica.dropped_samples, 0.0, 0.0)
        stats.expelled_samples += now.pending_samples
        self._world.open.remove(self)
        return replica

    def let_in(self, epoch: int) -> None:
        """Give this worker's state to those who join, unless another one does: while all wait.

        Nobody comes to the end of a step meanwhile, and those who join are waited for, too.
        """
        engine = self._replica.engine
        engine.await_regrouping(epoch)
        while engine.is_asked_for_state:
            self._catch_up()
            self._give_state(alone=True)

    def _give_state(self, *, alone: bool = False) -> None:
        describe = partial(given, self._parts, self._so_far)
        self._replica.engine.give_state(describe, alone=alone)

    def _give_all(self) -> None:
        """Give the state of this to those who join, and of all else that is attached.

        The program serves the others here, and comes to nothing else before they are through.
        """
        if self._replica.engine.is_asked_for_state:
            self._give_state(alone=True)
        for each in _joinable(self._world):
            if each is not self:
                each.let_in(self._world.epoch)

    @property
    def _parts(self) -> Parts:
        return Parts(self._model, self._optimizer, self._replica, self._apply)

    def _take_newest(self) -> None:
        """Be as far as all rounds that have come, or where the others are, if it has to rejoin."""
        self._or_rejoin(self._catch_up, None)

    def _catch_up(self) -> None:
        """Apply the rounds that were made while this worker computed, or was away."""
        if self._closed:
            return
        with self._keeping_gradients():
            self._apply.apply(self.algorithm.rounds(self._replica, self._replica.newest()))

    @contextmanager
    def _keeping_gradients(self) -> Iterator[None]:
        """Apply rounds between two steps of the program's."""
        parameters = self._replica.parameters
        gradients = [parameter.grad for parameter in parameters]
        self._in_step = True
        try:
            for parameter in parameters:  # a backward's that no step has taken, or the user's
                parameter.grad = None
            yield
        finally:
            self._in_step = False
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient


def _join(world: World, every: list[Joinable]) -> None:
    """Become a member, and be given the state of everything that is attached.

    The worker is here for none of it before it has all: the others would wait for it in a round
    of one, and do not come to the end of a step of another then.
    """
    for each in every:
        each._begin_to_join()
    world.join()
    world.said_attached = True
    for each in every:
        each._take_state()
    for each in every:
        each._be_here()
    _judge_silence(world, every)
    world.say_joined()
    for each in every:
        if how := each._so_far.comparing:  # all others wait for this worker in that
            each._compare_all(how)


def _too_late(error: ExpelledError) -> NobodyToJoinError:
    return NobodyToJoinError(
        f"{error}; when it was back, they had ended: nobody is left to join. They have the model "
        "that was trained, or were killed. To have them wait longer for a silent worker, "
        "attach(..., freeze_s=...)",
        error.rank,
    )


def _judge_silence(world: World, every: list[Joinable]) -> None:
    """By default, go on without a silent worker if it can come back to all that is attached.

    Not where all wait for all in every round: there one that is slow is waited for, too. Among
    neighbours also: who waits for a slow one is waited for by the next.
    """
    lockstep = any(each._replica.engine.lockstep for each in every)
    world.all_come_back(not lockstep and not _stays_out(world, every))


def _stays_out(world: World, every: list[Joinable]) -> str:
    """Why this worker cannot join again with all of these, if so."""
    if len(every) < len(world.attached):
        return "after one of several that were attached was closed"
    return next(filter(None, (_strange(world), *(each._stays_out() for each in every))), "")


def _strange(world: World) -> str:
    """The same, because of what else is open."""
    strange = [each for each in world.open if not isinstance(each, Joinable)]
    return f"beside a {type(strange[0]).__name__} that is open" if strange else ""


def _refusal(error: ExpelledError, why: str) -> ExpelledError:
    words = f"{error}. It cannot join them again: a joiner is not taken in {why}"
    return ExpelledError(words, error.rank)


def _joinable(world: World) -> list[Joinable]:
    """What is attached, in that order."""
    return [each for each in world.open if isinstance(each, Joinable)]
