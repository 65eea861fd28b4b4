"""One weighted draw over all clients' samples, of which nobody sees another's scores.

Every sample gets the key E / score, with E from the exponential distribution. The b smallest keys
are a draw of b samples without replacement by their scores (Efraimidis, Spirakis 2006), whoever
has them. So all that clients must find together is the key of the b-th, class by class: digit by
digit, from the sums over clients of how many keys lie below.

    threshold <- 0
    for every digit, from the highest:
        n_j <- sum over clients of their keys at most (threshold followed by j)      15 counts
        threshold <- threshold followed by the first j with n_j >= b
    keep the samples with keys up to the threshold: exactly b, over all clients

What travels are sums of counts: no scores, no shares of one client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_DIGITS, _BITS = 15, 4
_LEVELS = 1 << (_DIGITS * _BITS)
_LOW, _SPAN = -300.0, 1100.0  # of the logarithm of a key: no double has one outside
Sum = Callable[[Tensor], Tensor]


def keys(scores: Tensor, draw: torch.Generator, place: int, clients: int) -> Tensor:
    """Return a whole number for each sample, another one for each in all clients."""
    drawn = torch.empty(len(scores), dtype=torch.float64).exponential_(generator=draw)
    logs = (drawn / scores.double()).log().clamp(_LOW, _LOW + _SPAN).nan_to_num(_LOW + _SPAN)
    levels = min(1 << 52, _LEVELS // clients) - len(scores)
    raw = ((logs - _LOW) / _SPAN * levels).long()
    order = raw.argsort(stable=True)
    steps = torch.arange(len(raw))
    distinct = torch.empty_like(raw)
    distinct[order] = (raw[order] - steps).cummax(0).values + steps if len(raw) else raw
    return distinct * clients + place


def thresholds(mine: Sequence[Tensor], quotas: Sequence[int], add: Sum) -> Tensor:
    """Return the key of the last sample to keep, class by class; -1 where none is kept."""
    ordered = [each.sort().values for each in mine]
    return search(quotas, lambda ends: add(below(ordered, ends)))


def below(ordered: Sequence[Tensor], ends: Tensor) -> Tensor:
    """How many of a client's keys, class by class and in order, are at most each of these."""
    pairs = zip(ordered, ends, strict=True)
    return torch.stack([torch.searchsorted(its, each, right=True) for its, each in pairs])


def search(quotas: Sequence[int], count: Sum) -> Tensor:
    """Find the keys, digit by digit; `count` says how many keys of all are at most so large."""
    wanted = torch.tensor(quotas)
    found = torch.zeros(len(wanted), dtype=torch.int64)
    digits = torch.arange(1, 1 << _BITS)
    for level in reversed(range(_DIGITS)):
        counts = count(found[:, None] + (digits << (level * _BITS)) - 1)
        found += (counts < wanted[:, None]).sum(dim=1) << (level * _BITS)
    return torch.where(wanted > 0, found, -1)


def draw(
    scores: Tensor,
    labels: Tensor,
    classes: Sequence[int],
    quotas: Sequence[int],
    add: Sum,
    *,
    generator: torch.Generator,
    place: int,
    clients: int,
) -> Tensor:
    """Return which of this client's samples are kept; over all clients, exactly the quotas."""
    mine = keys(scores, generator, place, clients)
    of = [labels == kind for kind in classes]
    last = thresholds([mine[each] for each in of], quotas, add)
    kept = torch.zeros(len(labels), dtype=torch.bool)
    for its, limit in zip(of, last.tolist(), strict=True):
        kept |= its & (mine <= limit)
    return kept.nonzero().flatten()
