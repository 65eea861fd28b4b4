"""How many gradients are of use together, chosen from the measured noise.

S = sigma^2 / epsilon is the number of gradients whose mean has as much noise as signal at a squared
gradient of epsilon. Ringmaster ASGD's limit R and Rennala SGD's batch B are S (arXiv 2501.16168 and
2305.12387), to reach a target of epsilon. A run has no target, but it has a gradient: at a point x,
sigma^2 / |grad f(x)|^2 is the S of the accuracy that is reached by now. It grows on the way.

What is measured has a doubt. So a choice stays as it is while it is within doubt, and while it is
off by less than a factor; and where noise hides the signal, the signal is taken to be as large as
twice its doubt: then a choice grows while nothing is seen for longer and longer, and does not jump.
"""

from __future__ import annotations

from math import ceil

from offbeat.noise_scale import Noise

_HIDDEN = 2.0  # doubts that the signal is taken for, at least
_FACTOR = 1.3  # by which a choice must be off


def of_gradients(noise: Noise | None, samples: float) -> tuple[float, float]:
    """The signal, and the noise of a gradient of so many samples.

    (0, 1) if neither is known: then as many gradients a second as possible are best.

    >>> of_gradients(Noise(signal=2.0, noise=60.0, doubt=0.1), samples=10)
    (2.0, 6.0)
    """
    if noise is None or (noise.signal <= 0 and noise.noise <= 0):
        return 0.0, 1.0
    return max(noise.signal, 0.0), max(noise.noise, 0.0) / samples


class UsefulGradients:
    """S, from `least` to `most`: a limit R, or a batch B.

    Its numbers are plain, and go into checkpoints.
    """

    def __init__(self, most: int, least: int = 1, first: int | None = None) -> None:
        """`first` is the choice until something is measured; `most`, if it is not given."""
        first = most if first is None else first
        if not 1 <= least <= first <= most:
            raise ValueError(
                "a choice needs 1 <= least <= first <= most, got "
                f"least={least}, first={first}, most={most}"
            )
        self._useful = float(first)  # not rounded, or it would flap between 1 and 2
        self._least = least
        self._most = most

    @property
    def chosen(self) -> int:
        """What is of use, rounded up."""
        return ceil(self._useful)

    def __call__(self, noise: Noise | None, samples: float = 1.0) -> int:
        """Choose anew from what is measured; a gradient is the mean over so many samples.

        >>> choice = UsefulGradients(most=1000, first=8)
        >>> choice(None), choice(Noise(signal=2.0, noise=60.0, doubt=0.1))
        (8, 30)
        """
        if noise is not None and (noise.signal > 0 or noise.noise > 0):
            signal, doubt = noise.signal, noise.doubt
            best, fewest, largest = (
                self._clipped(noise._replace(signal=each).scale / samples)
                for each in (max(signal, _HIDDEN * doubt), signal + doubt, signal - doubt)
            )
            off = max(best / self._useful, self._useful / best)
            if off >= _FACTOR and not fewest <= self._useful <= largest:
                self._useful = best
        return self.chosen

    def _clipped(self, useful: float) -> float:
        return float(min(max(useful, self._least), self._most))
