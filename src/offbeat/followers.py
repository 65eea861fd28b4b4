"""Whoever wants to hear of every round: moving averages of the model, loggers, schedulers.

A follower is called once for each applied round, in order, on every worker, with a model that holds
what all agree on after that round. As a rule that is the program's own model, and the program is in
`optimizer.step()`, `dp.agreed()` or `dp.close()`. Where workers have no common base (WAGMA-SGD,
mixing among neighbours), it is called with this worker's own model, as it is by then.

A program that waits in a collective of its own does not come for its rounds, and they must not pile
up: they are folded (see log.py). Then the follower is called in the background, with a *stand-in*:
a copy of the model whose parameters are what the rounds have been folded into. A program that is
merely slow, or evaluates, may be using what a follower changes. Its rounds wait for it, and once
eight have piled up, so do the other workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy

from torch import Tensor, nn

from offbeat.replica import Replica
from offbeat.rounds import Round

Follower = Callable[[nn.Module, Round], object]


class Followers:
    """One attachment's followers."""

    _replica: Replica

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._called: list[Follower] = []
        self.calling = False
        """Whether one of them is being called: all workers are after the same round there."""
        self._stand_in: tuple[nn.Module, list[Tensor | None]] | None = None

    def follow(self, replica: Replica) -> None:
        """Have those who follow hear of this replica's rounds from now on, not of another one's."""
        self._replica, self._stand_in = replica, None
        replica.engine.followed = bool(self._called)

    def add(self, follower: Follower) -> Callable[[], None]:
        """Have somebody follow; return how to end that."""
        self._called.append(follower)
        self._replica.engine.followed = True

        def remove() -> None:
            if follower in self._called:
                self._called.remove(follower)
            self._replica.engine.followed = bool(self._called)

        return remove

    def applied(self, each: Round) -> None:
        """The program has applied a round."""
        if not self._called:
            return
        self._stand_in = None
        shift = self._replica.shift
        shown = shift is not None and shift.show()
        try:
            self._call(self._model, each)
        finally:
            if shift is not None and shown:
                shift.hide()

    def folded(self, each: Round, parameters: Sequence[Tensor]) -> None:
        """A round has been folded, and these are what all agree on since."""
        if not self._called:
            return
        if self._stand_in is None:
            copies: dict[int, Tensor] = {}
            model = deepcopy(self._model, copies)
            self._stand_in = model, [copies.get(id(it)) for it in self._replica.tensors]
        model, mine = self._stand_in
        for copy, now in zip(mine, parameters, strict=True):
            if copy is not None:  # an optimizer may have parameters that the model has not
                copy.data = now
        self._call(model, each)

    def _call(self, model: nn.Module, each: Round) -> None:
        self.calling = True
        try:
            for follower in list(self._called):
                follower(model, each)
        finally:
            self.calling = False
