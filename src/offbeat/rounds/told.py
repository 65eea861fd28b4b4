"""What follows from a round's header alone, so that it is the same on every worker.

The workers of a virtual run share a process: what is the same for all of them is made once.
"""

from __future__ import annotations

from functools import lru_cache

from offbeat.rounds.header import LEFT, Header, Shares
from offbeat.rounds.layout import Flats, Layout
from offbeat.rounds.pile import Pile
from offbeat.rounds.quorum import Quorum
from offbeat.rounds.round import Round
from offbeat.rounds.start import Measured, Start

_NOTHING = Flats(Layout((), ()))

header = lru_cache(maxsize=8)(Header)
quorum_of = lru_cache(maxsize=64, typed=True)(Quorum.of)


@lru_cache(maxsize=8)
def start(
    round: int,
    quorum: Quorum,
    number: int,
    active: tuple[int, ...],
    due: frozenset[int],
    least_samples: float,
) -> Start:
    """What must be there for a round of that number."""
    return Start(round, *quorum.for_round(number, active), due, least_samples)


@lru_cache(maxsize=8)
def round_of(shares: Shares, number: int, divisor: float) -> Round:
    """What a round says to everyone alike."""
    samples = shares.total_samples
    return Round(
        round=number,
        sum=_NOTHING,
        samples_by_rank=shares.samples,
        divisor=divisor,
        used=shares.used,
        rates=shares.rates,
        staleness_rounds=max(shares.stale - 1, 0),
        mean_staleness_rounds=shares.stale_samples / samples if samples else 0.0,
        micro_batches=shares.micro_batches,
        notes_by_rank=shares.notes,
        here=shares.members - shares.presence.count(LEFT),
        bad=shares.bad,
        made=shares.made,
        ends=shares.ends,
    )


def measured(completed: Round, pile: Pile) -> Measured:
    """What a round shows of those who took part; their last three notes."""
    last = [notes[-3:] for notes in completed.notes_by_rank]
    exchanges = [exchange_s for _, _, exchange_s in last if exchange_s]
    return Measured(
        round=completed.round,
        seconds=tuple(seconds for seconds, _, _ in last),
        samples=tuple(completed.samples_by_rank[rank] for rank in completed.ranks),
        squares=tuple(last[rank][1] for rank in completed.ranks),
        mean_square=pile.square / completed.samples**2,
        exchange_s=min(exchanges, default=0.0),
    )
