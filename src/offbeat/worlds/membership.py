"""The verbs by which a worker becomes a member of a job that runs, for the first time or again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from offbeat.worlds.base import Closeable, World

FREEZE_S = 1.0
THROUGH = ("rounds", "dealing")
"""What must be through with the last change of the members before the next worker can join."""


class Among(NamedTuple):
    """Who the members are, and in which epoch: both at once, since they change together."""

    epoch: int
    members: tuple[int, ...]


class Membership:
    """Without more, a world that nobody joins."""

    open: list[Closeable]
    freeze: float | Literal["auto"] | None = None
    """After how long a silence the others are to go on without a worker, as it was asked for."""
    freeze_s: float | None = None
    """And as it is by now."""

    def expect_answers(self, freeze: float | Literal["auto"] | None) -> None:
        """Go on without a worker after so long a silence; "auto" says nothing yet."""
        self.freeze = freeze
        self.freeze_s = None if freeze == "auto" else freeze

    def all_come_back(self, they_do: bool) -> None:
        """Whether a worker that is left out comes back, and nobody waits for it: so by default."""
        if self.freeze == "auto":
            self.freeze_s = FREEZE_S if they_do else None

    def let_in(self) -> None:
        """Say what this worker has attached: one that has the same may join."""

    def let_in_others(self, epoch: int) -> None:
        """All are about to wait for all, those who join in this epoch among them: let them in."""
        for thing in list(self.open):
            if (let_in := getattr(thing, "let_in", None)) is not None:
                let_in(epoch)

    def others_attached(self) -> int:
        """How much those have attached whom this worker is to join; waits until they have."""
        raise NotImplementedError

    def join(self) -> None:
        """Become a member of the job that runs, if all have attached the same; it `joins`."""
        raise NotImplementedError

    def through(self, what: str, epoch: int) -> None:
        """One of THROUGH is so here: else one could be back before its loss was counted."""

    def again(self) -> World:
        """Let go of this world, which was expelled; another one, alone, to join the others."""
        raise NotImplementedError

    def say_joined(self) -> None:
        """This worker, which has joined, is as far as the others."""
