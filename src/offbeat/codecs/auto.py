"""A codec only where it pays: tried in the first rounds, and again when the link has changed.

    rounds   plain, int8, plain, int8, ... │ the quicker one ... │ a look ... │ the quicker one ...

What counts is how long a worker codes and waits in an exchange, once all have come: of a round, the
least of all workers, since who comes last waits for nobody. And of several rounds, the least again.
One small all-reduce tells everybody the same numbers, so all decide the same.

A look is such an all-reduce, of what the latest rounds have taken: the last few, so that a quick
one before the link became slow does not hide that. If it is another than when it was decided, by a
third, both are tried again. A link that became quick may hide behind the codec's own seconds: so
both are tried again anyway, as often as costs a hundredth of all waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.base import Codec, Coder, Sum
from offbeat.codecs.integers import Int8
from offbeat.worlds.base import Channel

_TRIED = 8
"""Rounds, half of them plain, until it is decided; and those that a look is at."""
_SKIPPED = 2
"""The first ones, which also make buffers and warm up."""
_LOOK = 32
"""Rounds from one look to the next."""
_CHANGED = 4 / 3
_MOST = 100_000
"""Rounds after which both are tried again, at most."""
_COST = 0.01
"""The share of all waits that tries may cost, as long as nothing changes."""
_WORTH = 0.95
"""A codec must save more than a twentieth of the wait."""


@dataclass(frozen=True)
class Auto(Codec):
    """`codec`, or none, whichever is quicker."""

    codec: Codec = field(default_factory=Int8)

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec) or self.codec.feeds_back:
            raise ValueError(f"codec must be one without error feedback, got {self.codec!r}")

    def check(self, size: int) -> None:
        self.codec.check(size)

    def coder(self, size: int, rank: int) -> Coder:
        return Chooser(size, rank, self.codec.coder(size, rank))


class Chooser(Coder):
    """One worker's measurements, and what all have decided."""

    def __init__(self, size: int, rank: int, coder: Coder) -> None:
        super().__init__(size, rank)
        self._coder = coder
        self.pays: bool | None = None
        """Whether the codec does; None while that is tried."""
        self._begin()

    def _begin(self) -> None:
        """Try both."""
        self.pays = None
        self._count = -_SKIPPED  # rounds since it was decided, or that were tried
        self._expected_s = 0.0  # what a round took when it was decided
        self._again = 0  # in how many rounds both are tried, whatever looks show
        self._took_s = [math.inf, math.inf]  # the least since the latest look: plain, coded

    @property
    def free(self) -> bool:  # type: ignore[override]
        return self._count % 2 == 0 if self.pays is None else not self.pays

    def sums(
        self, channel: Channel, tensor: Tensor, place: int, brings: bool, not_before: float | None
    ) -> list[Sum]:
        return self._coder.sums(channel, tensor, place, brings, not_before)

    def ended(self, channel: Channel, exchange_s: float) -> None:
        super().ended(channel, exchange_s)
        if self._count >= (0 if self.pays is None else _LOOK - _TRIED):
            kind = int(not self.free)
            self._took_s[kind] = min(self._took_s[kind], exchange_s)
        self._count += 1
        if self._count == (_TRIED if self.pays is None else _LOOK):
            self._decide(channel)

    def _decide(self, channel: Channel) -> None:
        """All workers come here after the same round, and go on alike."""
        took = torch.tensor(self._took_s, dtype=torch.float64)
        channel.all_reduce(took, "min").wait()
        plain_s, coded_s = took.tolist()
        if self.pays is None:
            self.pays = coded_s < _WORTH * plain_s
            self._expected_s = min(plain_s, coded_s)
            self._again = _rounds_between_tries(plain_s, coded_s)
        else:
            now_s = coded_s if self.pays else plain_s
            self._again -= _LOOK
            same = self._expected_s / _CHANGED <= now_s <= self._expected_s * _CHANGED
            if not same or self._again <= 0:
                self._begin()
                return
        self._count, self._took_s = 0, [math.inf, math.inf]

    def keep(self) -> None:
        super().keep()
        self._coder.keep()

    def regroup(self, size: int) -> None:
        super().regroup(size)
        self._coder.regroup(size)
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "coder": self._coder.state_dict(),
            "chosen": (self.pays, self._count, self._expected_s, self._again, list(self._took_s)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._coder.load_state_dict(state["coder"])
        self.pays, self._count, self._expected_s, self._again, self._took_s = state["chosen"]


def _rounds_between_tries(plain_s: float, coded_s: float) -> int:
    """So many that those of the slower kind cost the share that they may."""
    best_s = max(min(plain_s, coded_s), 1e-9)
    of_slower = (_SKIPPED + _TRIED) / 2
    return min(math.ceil(of_slower * abs(plain_s - coded_s) / best_s / _COST), _MOST)
