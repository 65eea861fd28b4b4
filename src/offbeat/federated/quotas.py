"""How many samples of each class are kept: equal numbers, exact, and what is unmet goes on.

budget 10 of classes with 7, 2 and 9 samples:  3 each, and the one that remains: 4, 3, 3
                                                the second has 2 only:           4, 2, 4
"""

from __future__ import annotations

from collections.abc import Sequence


def quotas(budget: int, supply: Sequence[int]) -> list[int]:
    """Return how many to keep of each class that has so many samples, in all clients together.

    As equal as they can be; a class with fewer gives all, and the others share the rest. They add
    up to the budget, or to all there is. What does not divide goes to the first classes.
    """
    present = sum(1 for each in supply if each)
    if budget < present:
        raise ValueError(
            f"a buffer of {budget} samples cannot hold one of each of {present} classes: "
            f"set the budget to {present} or more"
        )
    kept, left = [0] * len(supply), min(budget, sum(supply))
    takers = [place for place, each in enumerate(supply) if each]
    while takers:
        share, more = divmod(left, len(takers))
        scarce = [place for place in takers if supply[place] <= share]
        for number, place in enumerate(scarce or takers):
            kept[place] = supply[place] if scarce else share + (number < more)
        if not scarce:
            break
        left -= sum(supply[place] for place in scarce)
        takers = [place for place in takers if place not in scarce]
    return kept
