"""What lives through a change of the members, as a world sees it."""

from __future__ import annotations

from typing import Protocol


class Regrouping(Protocol):
    """Something that lives through a loss."""

    @property
    def makes_rounds(self) -> bool:
        """Whether a round of its is under way, or soon will be."""

    def epoch_over(self) -> None:
        """The members have changed: begin anew, in the background. Must not block."""

    def has_counted(self, epoch: int) -> bool:
        """Whether it has, what was lost when this epoch began."""


class Dealing(Protocol):
    """What deals data among the workers, and does so again with what a lost one had in hand."""

    def epoch_over(self) -> None:
        """As above."""

    def takes_stale(self) -> bool:
        """Whether the program computes a batch that others have been dealt since; ask once each."""

    def mark(self) -> tuple[int, int]:
        """How far this worker's program is: which of its turns it is in, and at which batch."""
