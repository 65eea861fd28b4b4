"""Random numbers as a pure function of what they are for, so that no order of calls matters.

A *key* stands for one stream, such as (seed, rank, which noise); an *index*, here the step, picks a
number of that stream. This is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) read at any position:
its state is a counter, so its n-th output costs the same as its first.
"""

from functools import lru_cache
from statistics import NormalDist

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_standard_normal_quantile = NormalDist().inv_cdf


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def key(*parts: int) -> int:
    """Name a stream by whole numbers; negative ones count as well."""
    state = 0
    for part in parts:
        state = _mix((state ^ (part & _MASK)) + _GAMMA & _MASK)
    return state


def bits(key: int, index: int) -> int:
    """Draw 64 random bits: output number `index` of SplitMix64 seeded with `key`."""
    return _mix((key + (index + 1) * _GAMMA) & _MASK)


def uniform(key: int, index: int) -> float:
    """Draw from the open interval (0, 1), so that no inverse CDF ever sees 0 or 1."""
    # 52 bits and a half: with 53 the largest one would round to 1.
    return ((bits(key, index) >> 12) + 0.5) * 2.0**-52


def normal(key: int, index: int) -> float:
    """Draw from the standard normal distribution."""
    return _standard_normal_quantile(uniform(key, index))


def below(limit: int, key: int, index: int) -> int:
    """Draw one of 0 .. limit-1."""
    return (bits(key, index) * limit) >> 64


@lru_cache(maxsize=64)  # every rank asks for the same step at about the same time
def subset(k: int, limit: int, key: int, index: int) -> frozenset[int]:
    """Draw k distinct numbers of 0 .. limit-1, every such set equally likely (Floyd's method)."""
    inner = bits(key, index)
    chosen: set[int] = set()
    for last in range(limit - k, limit):
        candidate = below(last + 1, inner, last)
        chosen.add(last if candidate in chosen else candidate)
    return frozenset(chosen)
