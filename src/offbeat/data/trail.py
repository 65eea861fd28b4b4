"""What a worker has been dealt, where the others can read it when it is lost.

Entries in the store, one after the other, some in one value. An entry that is counted is there, so
what a worker has not yet seen counted, it does not use.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from offbeat.worlds import Control

Entry = list[Any]
"""[serial of the turn, facts of a turn that begins] or [serial, runs dealt, batches given]."""
_IN_ONE = 32


class Trail:
    """One worker's entries since the members have changed."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._count = 0
        self._block: list[Entry] = []
        self._blocks: deque[tuple[int, int]] = deque()  # number of a value, its latest serial

    def tell(self, control: Control, entry: Entry) -> None:
        """Have one more entry there, when this returns."""
        number, at = divmod(self._count, _IN_ONE)
        if at == 0:
            self._block = []
            self._blocks.append((number, 0))
        self._block.append(entry)
        self._blocks[-1] = number, entry[0]
        text = json.dumps([self._blocks[0][0], self._block])
        control.set(f"{self._place}/{number}", text.encode())
        self._count += 1
        control.add(self._place, 1)

    def forget(self, control: Control, before: int) -> None:
        """Nobody will ask for turns before this one."""
        while len(self._blocks) > 1 and self._blocks[0][1] < before:
            control.delete(f"{self._place}/{self._blocks.popleft()[0]}")


def read(control: Control, place: str) -> list[Entry]:
    """What another worker has told."""
    count = control.add(place, 0)
    if not count:
        return []
    last = (count - 1) // _IN_ONE
    first, entries = json.loads(control.get(f"{place}/{last}"))
    entries = entries[: count - last * _IN_ONE]
    for number in range(last - 1, first - 1, -1):
        entries = [*json.loads(control.get(f"{place}/{number}"))[1], *entries]
    return list(entries)
