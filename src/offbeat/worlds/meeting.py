"""How members act together though one of them may be lost meanwhile: all of them have, or none.

    worker 0   acts ─── is counted ────────────────────────────────┐ goes on
    worker 1   acts ─────────────── is counted, the last: "all" ───┐ goes on
    worker 2   acts ─── is counted ──✗ lost

Who hears of a loss before it has heard "all" must know what the others do: some may have heard it,
and are gone. So there is one word under one key, for ever: "all", by the last who was counted, or
"again", by the first who has heard of the loss. Whoever comes second finds what stands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from offbeat.errors import EpochOver

if TYPE_CHECKING:
    from offbeat.worlds.base import Channel, Control
    from offbeat.worlds.membership import Among

T = TypeVar("T")
_ALL, _AGAIN = b"all", b"again"


class Meeting(ABC):
    """The part of a world by which its members meet."""

    among: Among
    """The epoch and its members. Any activity may change them, so whoever needs both reads this."""
    control: Control
    survives: bool

    @property
    def epoch(self) -> int:
        """How often the members have changed; below 0 for a worker that has not joined yet."""
        return self.among.epoch

    @property
    def members(self) -> tuple[int, ...]:
        """The workers of this epoch, in the order of their ranks."""
        return self.among.members

    @abstractmethod
    def channel(
        self, name: str, members: tuple[int, ...] | None = None, epoch: int | None = None
    ) -> Channel:
        """Open a communicator among `members` (all, if None); each of them calls this.

        With `epoch`: in this one, and `EpochOver` if it is over. Who must know the epoch says it.
        The n-th channel of a name meets the n-th one of the others, so one that was opened in the
        next epoch by mistake would stand in for the one that the others wait for there.
        """

    @abstractmethod
    def control_in_epoch(self) -> Control:
        """The control plane, of which every verb raises `EpochOver` when this epoch is."""

    def together(self, name: str, act: Callable[[int], T]) -> T:
        """Have all members do something in which they wait for each other.

        If one is lost meanwhile, the others do it again, where that is survived. A name is used
        once. `act` gets the epoch that it is done in, and must wait for nobody in another one.
        """
        return cast(T, self.meet(name, act=act)) if self.survives else act(self.epoch)

    def meet(
        self, name: str, who: tuple[int, ...] | None = None, act: Callable[[int], T] | None = None
    ) -> T | None:
        """Have these members, or all, act together, and wait until all of them have.

        If one is lost meanwhile, the others do it again. See `together`.
        """
        while True:
            among, control = self.among, self.control_in_epoch()
            if self.among is not among:  # of which of both is the control plane?
                continue
            epoch, members = among
            count = len(members if who is None else set(who) & set(members))
            key, result = f"meet/{name}/{epoch}", None
            try:
                result = None if act is None else act(epoch)
                if control.add(key, 1) == count and self._settle(key, _ALL) == _ALL:
                    control.set(f"{key}/all", b"1")
                control.wait(f"{key}/all")
                return result
            except EpochOver:
                if self._settle(key, _AGAIN) == _ALL:
                    return result

    def was_met(self, name: str) -> bool:
        """Whether all have come, in this epoch: for one that was expelled before it heard that."""
        return self.control.stands(f"meet/{name}/{self.epoch}/settled") == _ALL

    def _settle(self, key: str, word: bytes) -> bytes:
        """Say what has become of a meeting, unless somebody has: what stands."""
        return self.control.kept().set_once(f"{key}/settled", word) if self.survives else word

    def forget_meeting(self, name: str, epoch: int) -> None:
        """All have passed it."""
        for part in ("", "/all", "/settled"):
            self.control.kept().delete(f"meet/{name}/{epoch}{part}")
