"""Transfers under way at once in the virtual world, where links are shared (`sharing = "fair"`).

A transfer keeps its ports busy until it has sent all, and arrives one latency after that. Whenever
one begins or has sent all, the others' speeds follow (clusters/sharing.py), and with them the
moments at which they will be through:

    n bytes    ━━━━━━━━━━━━┐ full speed, then half of it: another one has begun
    n bytes          ──────━━━━━━━━━━━━┐ half of it, then full speed

One that never meets another takes exactly what it takes without sharing.
"""

from __future__ import annotations

from collections.abc import Callable

from offbeat.clusters.sharing import Load, fair_shares
from offbeat.worlds.clock import Clock


class Traffic:
    """What is being sent now, and how fast."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way: list[_Transfer] = []

    def begin(
        self, load: Load, arrived: Callable[[], None], sent: Callable[[], None] | None = None
    ) -> None:
        """Begin a transfer now; have `sent` called when its ports are free, `arrived` later."""
        clock = self._clock
        if load.sending_s <= 0.0:
            if sent is not None:
                sent()
            clock.at(clock.now + load.seconds, arrived)
            return
        transfer = _Transfer(load, clock.now, arrived, sent)
        self._under_way.append(transfer)
        self._schedule(transfer, clock.now + load.sending_s)
        if self._meets_another(transfer):
            self._share()

    def _meets_another(self, transfer: _Transfer) -> bool:
        mine = set(transfer.load.ports)
        return any(
            not mine.isdisjoint(other.load.ports)
            for other in self._under_way
            if other is not transfer
        )

    def _share(self) -> None:
        """Have everybody's speed follow from who is under way; who keeps his keeps his moment."""
        now = self._clock.now
        shares = fair_shares([transfer.load for transfer in self._under_way])
        for transfer, speed in zip(self._under_way, shares, strict=True):
            if speed != transfer.speed:
                transfer.go_at(speed, now)
                self._schedule(transfer, now + transfer.left_s / speed)

    def _schedule(self, transfer: _Transfer, moment: float) -> None:
        transfer.plan += 1
        plan = transfer.plan
        self._clock.at(moment, lambda: self._sent(transfer, plan))

    def _sent(self, transfer: _Transfer, plan: int) -> None:
        if plan != transfer.plan:  # its speed has changed since that was planned
            return
        clock, load = self._clock, transfer.load
        met = self._meets_another(transfer)
        self._under_way.remove(transfer)
        alone = transfer.began_s + load.seconds
        clock.at(clock.now + load.latency_s if transfer.slowed else alone, transfer.arrived)
        if met:
            self._share()
        if transfer.sent is not None:
            transfer.sent()


class _Transfer:
    """One message or collective that is being sent."""

    __slots__ = (
        *("_since_s", "arrived", "began_s", "left_s", "load", "plan", "sent", "slowed", "speed"),
    )

    def __init__(
        self, load: Load, now: float, arrived: Callable[[], None], sent: Callable[[], None] | None
    ) -> None:
        self.load = load
        self.arrived = arrived
        self.sent = sent
        self.began_s = self._since_s = now
        self.left_s = load.sending_s
        """What it would still take alone, at `_since_s`."""
        self.speed = 1.0
        self.slowed = False
        self.plan = 0

    def go_at(self, speed: float, now: float) -> None:
        """Change its speed, from now on."""
        self.left_s = max(0.0, self.left_s - (now - self._since_s) * self.speed)
        self._since_s, self.speed, self.slowed = now, speed, True
