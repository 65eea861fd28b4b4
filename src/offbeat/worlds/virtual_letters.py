"""Letters of the virtual world: tensors between two workers.

A letter needs nobody at the other end: it is copied on the way out, and lies in a box until it is
asked for. Letters of one pair on one channel come in the order in which they were sent. What one
worker sends at once leaves one after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from offbeat.clusters.network import Network
from offbeat.worlds import base
from offbeat.worlds.clock import Clock
from offbeat.worlds.tasks import Parked, Worker
from offbeat.worlds.virtual_traffic import Traffic


class Letters:
    """The letters of one channel, by sender and receiver."""

    __slots__ = ("_boxes",)

    def __init__(self) -> None:
        self._boxes: defaultdict[tuple[int, int], _Box] = defaultdict(_Box)

    def post(
        self, clock: Clock, network: Network, host_s: float, rank: int, out: Mapping[int, Tensor]
    ) -> base.Work:
        """Send, each for itself; the work ends when the last one has arrived.

        `host_s` is what each costs beyond the network.
        """
        now = clock.now
        arrive_s = network.messages_s(rank, {target: each.nbytes for target, each in out.items()})
        for target, tensor in out.items():
            box = self._boxes[rank, target]
            box.last = max(box.last, now + arrive_s[target] + host_s)  # in order per pair
            box.put(clock, box.stamp(), tensor.detach().clone(), box.last)
        return Sent(clock, now + max(arrive_s.values()) + host_s if out else now)

    def post_shared(
        self,
        clock: Clock,
        network: Network,
        traffic: Traffic,
        host_s: float,
        rank: int,
        out: Mapping[int, Tensor],
    ) -> base.Work:
        """The same, over links that others use, too."""
        sending = _Sending(clock, len(out))
        letters = [
            (target, self._boxes[rank, target].stamp(), tensor.detach().clone())
            for target, tensor in out.items()
        ]
        rest = iter(letters)

        def send_next() -> None:
            if (letter := next(rest, None)) is None:
                return
            target, number, tensor = letter

            def arrived() -> None:
                self._boxes[rank, target].land(clock, number, tensor)
                sending.one_arrived()

            load = network.message_load(rank, target, tensor.nbytes)
            traffic.begin(load, lambda: clock.at(clock.now + host_s, arrived), sent=send_next)

        send_next()
        return sending

    def receive(
        self, clock: Clock, source: int, worker: Worker, tensor: Tensor, channel: str, epoch: int
    ) -> base.Work:
        """Ask for the next letter, of an epoch."""
        box = self._boxes[source, worker.rank]
        return _Received(clock, box, worker, epoch, tensor, f"{source} on channel {channel!r}")


class _Box:
    """Letters from one worker to another. Whoever asks first gets the first, waiting or not."""

    __slots__ = ("_landed", "_next", "asked", "last", "letters", "sent", "waiting")

    def __init__(self) -> None:
        self.letters: dict[int, tuple[Tensor, float]] = {}  # by number; with its arrival
        self.sent = 0
        self.asked = 0
        self.last = 0.0
        self.waiting: list[Parked] = []
        self._landed: dict[int, Tensor] = {}  # those before it have not come yet
        self._next = 0

    def stamp(self) -> int:
        """Number one more letter."""
        self.sent += 1
        return self.sent - 1

    def put(self, clock: Clock, number: int, letter: Tensor, arrives: float) -> None:
        """There is a letter, to be had from then on."""
        self.letters[number] = letter, arrives
        clock.wake_all(self.waiting)
        self.waiting.clear()

    def land(self, clock: Clock, number: int, letter: Tensor) -> None:
        """A letter arrives now; it is to be had after those before it."""
        self._landed[number] = letter
        while self._next in self._landed:
            self.put(clock, self._next, self._landed.pop(self._next), clock.now)
            self._next += 1


class _Received:
    breaks = True  # with its epoch

    def __init__(
        self, clock: Clock, box: _Box, worker: Worker, epoch: int, tensor: Tensor, source: str
    ) -> None:
        self._clock = clock
        self._box = box
        self._worker = worker
        self._epoch = epoch
        self._number = box.asked
        box.asked += 1
        self._tensor: Tensor | None = tensor
        self._source = source

    def wait(self) -> None:
        if self._tensor is None:
            return
        while self._number not in self._box.letters:
            if self._worker.epoch != self._epoch:
                raise self._worker.over()
            parked = self._clock.park(self)
            self._box.waiting.append(parked)
            self._clock.blocked(parked)
        letter, arrives = self._box.letters.pop(self._number)
        into, self._tensor = self._tensor, None
        self._clock.sleep_until(arrives)
        into.copy_(letter)

    def __str__(self) -> str:
        return f"a tensor from worker {self._source}"


class Sent:
    """What was copied on the way out; `until` is when the caller may go on."""

    def __init__(self, clock: Clock, until: float) -> None:
        self._clock = clock
        self._until = until

    def wait(self) -> None:
        self._clock.sleep_until(self._until)


class _Sending:
    """Letters on their way, of which nobody knows yet how long it will take them."""

    breaks = True  # with its epoch

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self._left = count
        self._waiting: list[Parked] = []

    def one_arrived(self) -> None:
        self._left -= 1
        if not self._left:
            self._clock.wake_all(self._waiting)
            self._waiting.clear()

    def wait(self) -> None:
        while self._left:
            parked = self._clock.park(self)
            self._waiting.append(parked)
            self._clock.blocked(parked)

    def __str__(self) -> str:
        return "the arrival of what it has sent"


class All:
    """Several works as one."""

    def __init__(self, works: list[base.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
