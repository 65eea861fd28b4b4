"""What all workers do at the same round: compare their replicas, or save.

At the same place in their loops they do not know of the same rounds: one that ran out of data first
has not applied the last ones. So all pause: they serve and apply the rounds that are left, until
each has the same, and go on from there together.

    worker 0   step 9 ──┐ pauses: applies 10 ──┐ compares ── goes on
    worker 1   step 9 ─── step 10 ──┐ pauses ──┐ compares ── goes on

Who has left the block serves on, and is not asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from offbeat import checkpoint
from offbeat.alike import alike
from offbeat.donation import Comparing
from offbeat.leaving import Leaving
from offbeat.worlds import Channel


class Pausing(Leaving):
    """The part of an attachment that pauses with all others."""

    _shown: ExitStack | None = None
    """Within `agreed`: puts one's own parameters back at its end."""

    def replicas_identical(self) -> bool:
        """Say whether all workers hold the same bits; every worker must call this.

        At the same place in the loop, between a step and the next backward: all first come to the
        same round. Where workers make steps of their own between rounds, their models differ there;
        what all agree on is compared inside `agreed`, whose model is of that round from then on.
        """
        # All are after the same round in a follower, and at the end.
        if self._closed or self._in_step or self._followers.calling:
            return self._compare_all("at once")
        self._check_between("replicas_identical")
        self._check_launched("replicas_identical")
        return self._compare_all("paused" if self._shown is None else "agreed")

    def _compare_all(self, how: Comparing) -> bool:
        number, replica = self._so_far.comparisons, self._replica
        while self._so_far.comparisons == number:  # else the others have compared theirs meanwhile
            self._or_rejoin(lambda: self._compare_once(how), None)
        if self._replica is not replica:
            self._show()
        return self._so_far.alike

    def _compare_once(self, how: Comparing) -> None:
        """Have all workers compare their replicas once more."""
        before = self._so_far.comparing
        self._so_far = self._so_far._replace(comparing=how)
        try:
            found = self._alike_now() if how == "at once" else self._alike_at_same_round(how)
            number = self._so_far.comparisons + 1
            self._so_far = self._so_far._replace(comparisons=number, alike=found)
        finally:
            self._so_far = self._so_far._replace(comparing=before)

    def _alike_now(self) -> bool:
        """Compare the models as they are."""
        name = f"alike-{self._so_far.comparisons}"
        with self._world.elsewhere("dp.replicas_identical()"):
            return self._together(name, lambda each: alike(each, self._model), lets_in=True)

    def _alike_at_same_round(self, how: Comparing) -> bool:
        """Come to the same round as all others, and compare the models there."""
        found: list[bool] = []

        def look(channel: Channel) -> None:
            if self._replica.means is not None:  # all are at that round, if one asks for the mean
                channel.all_reduce(torch.zeros(1)).wait()
            self._show()
            found.append(alike(channel, self._model))

        # Who has joined those who are within `agreed` is not.
        shows = self._showing() if how == "agreed" else nullcontext()
        with self._others_away(), self._replica.engine.back(), shows:
            if self._shown is not None:
                self._shown.close()
            with self._keeping_gradients():
                where = "dp.replicas_identical()"
                checkpoint.settle(self.algorithm, self._replica, self._apply, where)
            self._replica.resume(look)
        return found[-1]

    @contextmanager
    def _showing(self) -> Iterator[None]:
        """Have one's own parameters again at the end of this block, if `_show` puts them by."""
        if self._shown is not None:
            yield
            return
        with ExitStack() as self._shown:
            try:
                yield
            finally:
                self._shown = None

    def _show(self) -> None:
        """Within `agreed`: have in the parameters what all agree on by now."""
        if self._shown is not None:
            self._shown.close()
            self._shown.enter_context(self._replica.agreed())

    def state_dict(self) -> dict[str, Any]:
        """Return what, with the model's and the optimizer's own, resumes this worker bit by bit.

        Each worker saves its own, at the same place in the loop, between a step and the next
        backward: all first come to the same round, and what they missed while they were away is
        applied. So call it before the model's and the optimizer's `state_dict`. Where losses are
        survived, and this worker was silent for so long that the others have saved without it, it
        returns no state but a note of that: see docs/survival.md.
        """
        self._check_launched("state_dict")
        if self._away_by:
            raise RuntimeError(
                f"state_dict() inside dp.{self._away_by}(): move it out, all workers wait in it"
            )
        number = self._so_far.checkpoints
        while (state := self._or_rejoin(self._saved, None)) is None:
            if self._so_far.checkpoints > number:  # the others have made theirs meanwhile
                return checkpoint.missed(self._replica)
        return state

    def _saved(self) -> dict[str, Any] | None:
        """Come to the same round as all others, and return this worker's state there."""
        with self._others_away():
            state = checkpoint.saved(self.algorithm, self._replica, self._apply, self.codec)
        self._so_far = self._so_far._replace(checkpoints=self._so_far.checkpoints + 1)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()` of the worker with this rank; before the first step."""
        checkpoint.load(state, self.algorithm, self._replica, self._apply, self.codec)

    def _check_launched(self, verb: str) -> None:
        if self._replica.overlap.launched:
            raise RuntimeError(
                f"{verb}() between backward and step, while gradients are being reduced: "
                "call it after optimizer.step()"
            )
