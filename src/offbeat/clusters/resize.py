"""The tables of the same kind of cluster with another number of workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offbeat.errors import ClusterError


def resized(data: dict[str, Any], workers: int, source: str) -> dict[str, Any]:
    """Change the tables of a cluster; `source` is what to call it in messages."""
    before, groups = data["workers"], data["group"]
    if workers < max(1, len(groups)):
        raise ClusterError(f"{source}: needs at least {max(1, len(groups))}")
    if isinstance(speeds := data["speed"], tuple | list):
        old = len(speeds)
        middles = ((2 * rank + 1) * old // (2 * workers) for rank in range(workers))
        data["speed"] = [speeds[middle] for middle in middles]
    counts = _shares([group["workers"] for group in groups], workers)
    for group, count in zip(groups, counts, strict=True):
        _scale_k(group["noise"], group["workers"], count)
        group["workers"] = count
    _scale_k(data["noise"], before, workers)
    return {**data, "name": f"{data['name'].split('@')[0]}@{workers}", "workers": workers}


def _shares(counts: list[int], total: int) -> list[int]:
    """Share out a total in proportion, at least one each, the largest remainders rounded up."""
    if not counts:
        return []
    exact = [count * total / sum(counts) for count in counts]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) != total:
        step = 1 if sum(shares) < total else -1
        open_to_it = [i for i in range(len(shares)) if step > 0 or shares[i] > 1]
        best = max(open_to_it, key=lambda i: step * (exact[i] - shares[i]))
        shares[best] += step
    return shares


def _scale_k(noises: Iterable[dict[str, Any]], old: int, new: int) -> None:
    """Keep the share of the workers that such noise hits, where it covers all of them."""
    for noise in noises:
        if noise["kind"] in ("random_delay", "spells") and noise["workers"] is None:
            noise["k"] = max(1, (2 * noise["k"] * new + old) // (2 * old))
