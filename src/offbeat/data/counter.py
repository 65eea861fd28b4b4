"""The counter that all share in one turn: what lies below its new value belongs to who added.

Nobody meets anybody: whoever comes first says what is dealt here, and who comes later compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from offbeat.errors import DealError
from offbeat.worlds import Control

_ENDED = 1 << 40  # the field above the counter: workers that ask for no more
_ADVICE = {
    "what the data set holds": ". Where data are made or split at random, seed that alike on every"
    " worker, as by torch.manual_seed(0) before",
}


class Counter:
    """One worker's hold of the counter."""

    def __init__(self, key: str, rank: int, size: int, alike: Mapping[str, Any]) -> None:
        self._key = key
        self._rank = rank
        self._size = size
        self._alike = alike
        self._compared = False
        self._version = 0

    def at(self, version: int, size: int) -> Counter:
        """The counter of this turn since the members have changed: so many; it begins anew."""
        if version == self._version:
            return self
        key = self._key.removesuffix(f"/again/{self._version}")
        anew = Counter(f"{key}/again/{version}", self._rank, size, self._alike)
        anew._compared, anew._version = True, version
        return anew

    def add(self, control: Control, wanted: int) -> int:
        """Return the new value. The first time, raise if others deal something else."""
        total = control.add(self._key, wanted) % _ENDED
        if not self._compared:
            self._compare(control, first=total == wanted)
            self._compared = True
        return total

    def end(self, control: Control) -> None:
        """This worker asks for no more; the last one to say so forgets the turn."""
        if control.add(self._key, _ENDED) // _ENDED == self._size:
            control.delete(self._key)
            control.delete(f"{self._key}/first")

    def _compare(self, control: Control, first: bool) -> None:
        mine = {**self._alike, "worker": self._rank}
        if first:
            control.set(f"{self._key}/first", json.dumps(mine).encode())
            return
        theirs = json.loads(control.get(f"{self._key}/first"))
        for what, value in self._alike.items():
            if theirs.get(what) != value:
                raise DealError(
                    f"workers disagree about {what}: worker {theirs['worker']} has "
                    f"{theirs.get(what)}, worker {self._rank} has {value}. Every worker must deal "
                    "the same data, with the same settings, and iterate over them as often"
                    f"{_ADVICE.get(what, '')}"
                )
