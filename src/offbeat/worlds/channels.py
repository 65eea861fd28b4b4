"""The channels of real processes: opened, and closed when all their members have done so."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from offbeat.clusters import Cluster
from offbeat.worlds import base
from offbeat.worlds.checked import checked_members
from offbeat.worlds.gloo import Channel, Groups
from offbeat.worlds.small import Small
from offbeat.worlds.threads import ThreadedWorld

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld


class WithChannels(ThreadedWorld):
    """The part of the real world that opens channels."""

    def __init__(
        self, rank: int, size: int, cluster: Cluster | None, seed: int, time_out_s: float
    ) -> None:
        super().__init__(rank, size, cluster, seed)
        self._time_out = timedelta(seconds=time_out_s)
        self._groups: list[Groups] = []
        self._retired: list[Groups] = []
        self._channels: list[Channel] = []
        self._openings: Counter[str] = Counter()

    def channel(
        self, name: str, members: tuple[int, ...] | None = None, epoch: int | None = None
    ) -> base.Channel:
        self.check()
        world, among = cast("RealWorld", self), self.among  # if they change meanwhile, it is over
        if epoch not in (None, among.epoch):
            raise world.over()
        epoch, members = among.epoch, checked_members(name, members, self.rank, among.members)
        self._sweep()
        where = f"channel/{name}/{'-'.join(map(str, members)) if len(members) < self.size else ''}"
        where = f"{epoch}/{where}" if epoch else where
        self._openings[where] += 1  # a name may be used again once its channel was closed
        where = f"{where}/{self._openings[where]}"
        groups = Groups(world, where, members, self._time_out, epoch)
        self._groups.append(groups)
        self._channels.append(channel := Channel(world, groups, Small(world, groups)))
        return channel

    def retire(self, channel: Channel, groups: Groups) -> None:
        """Close connections when all their members have come here, and not before.

        A connection that one side closes may lose what the other has not read yet. Nobody waits
        for the others, who may close their channels in another order: who was early looks again
        when the next channel is opened or closed.
        """
        self.check()
        if groups.is_over():
            return
        self._channels.remove(channel)
        if not groups.made:
            self._groups.remove(groups)
            return
        self.control.add(f"closed/{groups.where}", 1)
        self._retired.append(groups)
        self._sweep()

    def _sweep(self) -> None:
        for groups in list(self._retired):
            if self.control.add(f"closed/{groups.where}", 0) == len(groups.members):
                with suppress(ValueError):  # another thread of ours has seen it, too
                    self._retired.remove(groups)
                    self._groups.remove(groups)
                    groups.close()
