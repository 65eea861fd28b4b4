"""The gradient's noise scale: how many samples a batch can use.

Of k workers, number i brings the mean gradient g_i of b_i samples; g is the mean of all B samples.
The true gradient's square is s (the signal), the variance of one sample's gradient t (the noise):

    E |g_i|^2 = s + t / b_i        E |g|^2 = s + t / B        the scale is t / s, in samples

    t ~ (sum of b_i |g_i|^2 - B |g|^2) / (k - 1)              what workers differ by
    s ~ |g|^2 - t / B

Both are unbiased, and with normal noise none is more exact. Where noise dominates, s of one round
is often negative: that is a measurement like any other. So both are averaged first, as they are,
and divided last. McCandlish et al., arXiv 1812.06162, have the same from two batch sizes.

How exact can it be? With noise in d equally strong directions, n rounds and a scale far above B,
the relative error of s is about (scale / B) sqrt(2 / (d n)): with few samples in a round, a large
scale is seen late. A choice between rounds of up to all workers does not mind. It compares s with
the noise of such a round, and what is lost in that noise does not matter to it.

Who must know a large scale gives the products of one round's mean with those before it, too: they
have s in common and no noise, and there are many more of them. noise_stream.py says how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, inf, isfinite
from typing import NamedTuple

from offbeat.averages import Average

LEAST_ROUNDS = 10
# Products share the noise of the mean that they are made with. Where the rest is small, their error
# is up to twice what differences between one and the next show.
_SHARED, _AGREES = 2.0, 3.5
_VETO = 4.0  # doubts by which products may differ from what rounds show in themselves


class Noise(NamedTuple):
    """What rounds have shown of the gradient."""

    signal: float
    """The square of the true gradient; not above 0 where noise hides it."""
    noise: float
    """The variance of one sample's gradient, over all its numbers."""
    doubt: float
    """The standard error of the signal."""

    @property
    def scale(self) -> float:
        """Noise over signal: the number of samples at which they are equal."""
        if self.noise <= 0:
            return 0.0
        return self.noise / self.signal if self.signal > 0 else inf


class NoiseScale:
    """Measures the noise scale; the same on all workers, since all see the same rounds.

    Its numbers are in `sums`, plain lists that go into checkpoints.
    """

    def __init__(self, sums: dict[str, list[float]] | None = None) -> None:
        sums = sums if sums is not None else {}
        self._signal, self._noise = (
            Average(sums.setdefault(name, [])) for name in ("signal", "noise")
        )
        self._product = Average(sums.setdefault("product", []), agrees=_AGREES)

    def add(
        self,
        samples: Sequence[float],
        squares: Sequence[float],
        mean_square: float,
        product: float | None = None,
    ) -> None:
        """Take a round: of each that contributed, b_i and |g_i|^2; and |g|^2.

        `product` is that of g with a mean of earlier gradients, if there is one. One worker alone
        shows nothing, and neither does a gradient that is not finite.
        """
        batch, workers = sum(samples), len(samples)
        if workers < 2 or min(samples) <= 0:
            return
        apart = sum(b * square for b, square in zip(samples, squares, strict=True))
        noise = (apart - batch * mean_square) / (workers - 1)
        signal = mean_square - noise / batch
        if isfinite(noise) and isfinite(signal):
            self._noise.add(noise)
            self._signal.add(signal)
            if product is not None and isfinite(product):
                self._product.add(product)

    @property
    def measured(self) -> Noise | None:
        """The averages over rounds; None if there were fewer than 10.

        >>> scale = NoiseScale()
        >>> for _ in range(10):  # signal 1, noise 4 a sample
        ...     scale.add([2, 6], [1 + 4 / 2, 1 + 4 / 6], 1 + 4 / 8)
        >>> round(scale.measured.scale, 6)
        4.0
        """
        if self._signal.count < LEAST_ROUNDS:
            return None
        signal, doubt = self._signal.mean, self._signal.doubt
        if self._product.count >= LEAST_ROUNDS:
            product, its_doubt = self._product.mean, _SHARED * self._product.doubt
            contradicts = abs(product - signal) > _VETO * hypot(doubt, its_doubt)
            if its_doubt < doubt and not contradicts:
                signal, doubt = product, its_doubt
        return Noise(signal, self._noise.mean, doubt)
