"""The job's store is lost: all go on with its standby.

The store decides which workers go on when the members change: the first proposal stands. If it is
lost, or does not answer for `OFFBEAT_LOST_S` seconds, whoever notices cuts its own connections to
it, writes into the standby which epoch it is in, and says so to all others, who do the same. When
each of them has come, ended or fallen silent, or the limit has passed once more, one proposes the
next epoch, for all: those who have come, if they are more than half of those who may be alive. Its
number is above that of every epoch which any of them has seen, and it has one key, so that there is
one such epoch. Whoever is not in it has been expelled, and may join again, there (entrance.py).

    worker 0   on the host of the store ──✗
    worker 1   says 2 ──┐ notices ─ says "S" ────────┐ proposes: epoch 3, 1 and 2 ── regroups
    worker 2   ─────────┐ hears "S" ─ says "S" ──────┘──────────────┐ hears of it ── regroups

All that belongs to an epoch is made anew in the next one, as after any loss: counters, groups, what
is waited for. So nothing is copied, except what a worker leaves behind, in case that it is lost;
that is written to both from the start (store.py).

**A split network.** Two parts of it could both go on if each had a store. So a part makes no epoch
unless it has more than half of the workers that may be alive; of two halves that one goes on which
has the store. A worker whose process has ended, as its host says, is not alive; one that does not
answer may be. Every round needs all members of its epoch: who belongs to two parts makes none with
the one that it has left.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from offbeat import launched
from offbeat.errors import WorkerLostError
from offbeat.worlds.entrance import MOVED
from offbeat.worlds.pool import STANDBY, STORE, pool
from offbeat.worlds.store import Clients

if TYPE_CHECKING:
    from offbeat.worlds.real import RealWorld

_ASK_S = 0.5
_LOOKS = 10  # within the limit
_LEAVE_S = 5.0


class Part:
    """The workers that one can reach, of all that may be alive."""

    def __init__(
        self, left: set[int], epochs: Sequence[Collection[int]], ended: Collection[int]
    ) -> None:
        """`epochs` are the members of the newest one, and of those that some may still be in."""
        self.epochs = [set(members) for members in epochs]
        self.left = (left & self.epochs[0]).difference(ended)
        self._alive = [members.difference(ended) for members in self.epochs]
        self.alive = self._alive[0]

    def may_go_on(self, has_store: bool) -> bool:
        """Whether it may make an epoch: then no other part may."""
        return all(
            2 * len(self.left & alive) >= len(alive) + (not has_store) for alive in self._alive
        )


def refusal(why: str, part: Part) -> WorkerLostError:
    """What a worker raises that belongs to a smaller part."""
    return WorkerLostError(
        f"{why}; {len(part.left)} of {len(part.alive)} workers that may be alive can be reached "
        "from here, and these are too few to go on: the others may do so. If none has, start "
        "again from a checkpoint"
    )


class Moving:
    """One worker on its way to the standby; in the thread that listens."""

    def __init__(self, world: RealWorld, clients: Clients, limit_s: float, why: str) -> None:
        self._world = world
        self._clients = clients
        self._why = f"the job's store was lost ({why})"
        self._deadline = time.monotonic() + limit_s

    def come(self, epochs: Sequence[Collection[int]]) -> None:
        """Say which epoch this worker is in; its members, and those of the ones before."""
        mine = {"epoch": self._world.epoch, "epochs": [sorted(each) for each in epochs]}
        self._clients.mine().set(f"moving/{self._world.rank}", json.dumps(mine))
        self._clients.mine().add("moving", 1)  # when this returns, the other is there

    def agreed(
        self, come: set[int], ended: set[int], answers: Callable[[int], bool]
    ) -> dict[str, Any] | None:
        """The epoch that all go on with, who have come; None if some may still come."""
        client = self._clients.mine()
        if not client.check([MOVED]):
            come = {self._world.rank, *come}
            epoch, epochs = self._newest(come)
            part = Part(come, epochs, ended)
            if any(map(answers, part.alive - part.left)) and time.monotonic() < self._deadline:
                return None
            if not part.may_go_on(has_store=False):
                raise refusal(self._why, part)
            client.compare_set(MOVED, "", json.dumps(self._proposal(epoch + 1, part)))
            launched.say_moved(client)
        return dict(json.loads(bytes(client.get(MOVED))))

    def _newest(self, come: Iterable[int]) -> tuple[int, list[list[int]]]:
        """The newest epoch that anybody has seen, and who may be in that, or in one before."""
        client = self._clients.mine()
        all_of = [json.loads(bytes(client.get(f"moving/{rank}"))) for rank in come]
        all_of.sort(key=lambda told: -int(told["epoch"]))
        return all_of[0]["epoch"], [members for told in all_of for members in told["epochs"]]

    def _proposal(self, epoch: int, part: Part) -> dict[str, Any]:
        left, lost = sorted(part.left), sorted(part.epochs[0] - part.left)
        with_it = f", and with it worker{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        words = f"{self._why}{with_it if lost else ''}; its standby is in use"
        return {"epoch": epoch, "members": left, "words": words, "rank": lost[0] if lost else None}


class StoreWatch:
    """Asks the store and its standby, now and then, whether they are there.

    A call of a store whose host is frozen, or cut off, does not come back. So one thread for each
    asks, and another one looks how long that takes: looks are counted, since a process that was
    stopped itself has not looked.
    """

    def __init__(self, limit_s: float, patience_s: float, lost: Callable[[str, str], None]) -> None:
        """After the patience the store is lost even if there is no standby."""
        self._limit_s = limit_s
        self._patience_s = max(limit_s, patience_s)
        self._lost = lost
        self._closed = threading.Event()
        self._asks: dict[str, int] = {}  # by place: the number of the question, if under way
        self._threads: list[threading.Thread] = []
        for place in (STORE, STANDBY) if pool.has_standby else (pool.place,):
            self._start(self._ask, place)
        self._start(self._look)

    def close(self) -> None:
        """Look no more; when this returns, no question is under way, unless it has no answer."""
        self._closed.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_LEAVE_S)

    def _start(self, run: Callable[..., None], *arguments: str) -> None:
        name = f"offbeat-watch-{arguments[0] if arguments else 'stores'}"
        thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _ask(self, place: str) -> None:
        number = 0
        try:
            client = pool.borrow(place)
            while not self._closed.wait(min(_ASK_S, self._limit_s / 4)):
                number += 1
                self._asks[place] = number
                client.check(["offbeat"])
                self._asks.pop(place)
        except RuntimeError as error:
            if not self._closed.is_set():
                self._lost(place, str(error).partition("\n")[0][:200])
        else:
            pool.give_back(place, client)
        finally:
            self._asks.pop(place, None)

    def _look(self) -> None:
        look_s = self._limit_s / _LOOKS
        seen: dict[str, tuple[int, int]] = {}
        while not self._closed.wait(look_s):
            for place, number in list(self._asks.items()):
                before, looks = seen.get(place, (0, 0))
                looks = looks + 1 if before == number else 0
                seen[place] = number, looks
                limit_s = self._limit_s if pool.has_standby else self._patience_s
                if looks * look_s >= limit_s:
                    self._lost(place, f"no answer for {limit_s:g} s")
