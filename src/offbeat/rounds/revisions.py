"""What a gradient's turn has changed before it travelled, to be undone if it did not arrive.

Its verdict is given, and its worker's mean has it, before it travels. If a worker is lost
meanwhile, and nobody has the gradient, its turn has not been: whoever has computed it, if it lives,
says so once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offbeat.rounds.judge import Judge
from offbeat.rounds.pile import Pile
from offbeat.rounds.sums import Mean


class Before:
    """How it was before one turn."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge.state_dict()
        self._mine: tuple[Mean, dict[str, Any], Pile, list[Tensor], float] | None = None

    def keep(self, mean: Mean, pile: Pile) -> None:
        """A worker is about to put its own gradient into its mean."""
        bodies = [body.clone() for body in pile.flats.bodies]
        self._mine = mean, mean.state_dict(), pile, bodies, pile.unit

    def restore(self, judge: Judge) -> None:
        """Have everything as it was."""
        judge.load_state_dict(self._judge)
        if self._mine is not None:
            mean, state, pile, bodies, unit = self._mine
            pile.unit = unit
            mean.load_state_dict(state)
            torch._foreach_copy_(list(pile.flats.bodies), bodies)
