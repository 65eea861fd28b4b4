"""From measured times to what a cluster file can express: cost, speeds, noise, network.

All of it is by quantiles, medians above all: on a real machine some micro-batches take several
times as long for reasons that no model of ours knows.

A worker's times are c x F, where F is one of the noise kinds of clusters/noise.py and c what a
micro-batch costs without it. Times are divided by their median, so c follows from the median of
F. The kind that comes closest, by the largest distance between the two distribution functions
(Kolmogorov-Smirnov), is taken. Where none comes close, or where the slowest micro-batches take
more time than it knows of, or much less, the factors themselves are, as a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import erf, exp, expm1, inf, log, log1p, log2, sqrt
from statistics import NormalDist, mean, median
from typing import Any

from offbeat.clusters.noise import DropCompute

_normal_quantile = NormalDist().inv_cdf
_CALM = 0.01
"""A spread (10 % to 90 %) of less than this share of the median is no noise worth modelling."""
_TOO_FAR = 1.63
"""Times 1/sqrt(n): farther apart than this, times and model differ at the 1 % level."""
_CLOSE = 0.05
"""A model this near is near enough, however many times were measured."""
_TAIL = 0.1
"""Times may take longer than the model, on average, by this share of it."""
_GUESSED = 1.25
"""The model may take longer than the times, on average, by this factor: beyond, its tail is a guess
that nobody has seen, and in the end all of a race's time."""
_ONE_MORE = 1.25
"""A kind with one setting more must be nearer by this factor."""
_HEAVY = 10.0
"""A Pareto of a larger shape than this is as good as exponential."""
_MOST_ROWS = 1000
"""A longer trace is cut: files are for people, too."""
_WORTH_IT = 0.98
"""A cost by sample must bring the errors below this share of those without it."""


@dataclass(frozen=True)
class Factor:
    """A noise kind with its settings: F, as a distribution."""

    kind: str
    settings: dict[str, float]
    median: float
    mean: float
    below: Callable[[float], float] = field(repr=False, compare=False)
    """The share of F below a value."""

    def distance(self, times: Sequence[float]) -> float:
        """Say how far times (in units of their median) are from this: 0 the same, 1 apart."""
        ordered, count = sorted(times), len(times)
        gap = 0.0
        for place, time in enumerate(ordered):
            share = self.below(time * self.median)
            gap = max(gap, share - place / count, (place + 1) / count - share)
        return gap

    def table(self) -> dict[str, Any]:
        """Return it as a table of a cluster file."""
        return {"kind": self.kind} | {k: float(f"{v:.4g}") for k, v in self.settings.items()}

    def __str__(self) -> str:
        settings = (f"{name} {value:.3g}" for name, value in self.settings.items())
        return " ".join([self.kind, *settings])


@dataclass(frozen=True)
class Fitted:
    """What the measured times of all workers say."""

    step_s: float
    sample_s: float
    speeds: list[float]
    """By worker; the fastest has 1."""
    seconds: list[float]
    """What a micro-batch of the usual size costs, by worker, without noise."""
    noise: list[Factor | None]
    """By worker; None where it is a trace."""
    factors: list[list[float]]
    """By worker: each measured time over what it costs without noise."""

    def tables(self) -> list[dict[str, Any]]:
        """Return the noise as tables of a cluster file, as few as say it."""
        workers = range(len(self.noise))
        found: list[dict[str, Any]] = []
        for factor in dict.fromkeys(repr(noise) for noise in self.noise if noise is not None):
            alike = [worker for worker in workers if repr(self.noise[worker]) == factor]
            noise = self.noise[alike[0]]
            assert noise is not None
            if noise.kind != "none":
                found.append(noise.table() | self._listed(alike))
        if traced := [worker for worker in workers if self.noise[worker] is None]:
            columns = [self.factors[worker] for worker in traced]
            length = min(_MOST_ROWS, *map(len, columns))
            rows = [[round(column[step], 4) for column in columns] for step in range(length)]
            found.append({"kind": "trace", "unit": "factor", "rows": rows} | self._listed(traced))
        return found

    def _listed(self, workers: list[int]) -> dict[str, Any]:
        return {} if len(workers) == len(self.noise) else {"workers": workers}


def fit_compute(times: Sequence[Sequence[float]], samples: Sequence[Sequence[float]]) -> Fitted:
    """Fit cost, speeds and noise to the seconds and samples of every worker's micro-batches."""
    per_sample = _cost_per_sample(times, samples)
    works = [[1.0 + per_sample * n for n in counts] for counts in samples]
    rates = [
        [time / work for time, work in zip(*pair, strict=True)]
        for pair in zip(times, works, strict=True)
    ]
    medians = [median(rate) for rate in rates]
    scaled = [[r / middle for r in rate] for rate, middle in zip(rates, medians, strict=True)]
    noise = _noise(scaled)
    bases = [
        middle / (1.0 if factor is None else factor.median)
        for middle, factor in zip(medians, noise, strict=True)
    ]
    usual = 1.0 + per_sample * median(n for counts in samples for n in counts)
    return Fitted(
        step_s=min(bases),
        sample_s=min(bases) * per_sample,
        speeds=[min(bases) / base for base in bases],
        seconds=[base * usual for base in bases],
        noise=noise,
        factors=[[r / base for r in rate] for rate, base in zip(rates, bases, strict=True)],
    )


# --- what a sample costs -------------------------------------------------------------------


def _cost_per_sample(times: Sequence[Sequence[float]], samples: Sequence[Sequence[float]]) -> float:
    """Find r so that micro-batches cost in proportion to 1 + r x samples; 0 if it does not help."""
    counts = sorted({n for worker in samples for n in worker})
    if len(counts) < 2:
        return 0.0

    def errors(r: float) -> float:
        total = 0.0
        for worker, sizes in zip(times, samples, strict=True):
            logs = [log(t) - log1p(r * n) for t, n in zip(worker, sizes, strict=True)]
            middle = median(logs)
            total += sum(abs(value - middle) for value in logs)
        return total

    # From a hundredth of a usual micro-batch's cost to all but a hundredth of it; then finer.
    middle = log2(1.0 / median(counts))
    grid = [2.0 ** (middle + step / 4) for step in range(-28, 29)]
    for finer in (16, 64, 256):
        best = min(grid, key=errors)
        grid = [best * 2.0 ** (step / finer) for step in range(-6, 7)]
    best = min(grid, key=errors)
    return best if errors(best) < _WORTH_IT * errors(0.0) else 0.0


# --- noise ---------------------------------------------------------------------------------


def _noise(scaled: Sequence[Sequence[float]]) -> list[Factor | None]:
    """Find one noise for all workers if it fits each of them, otherwise each worker's own."""
    together = _best([value for worker in scaled for value in worker])
    if together is not None and all(_near(together, worker) for worker in scaled):
        return [together] * len(scaled)
    return [_best(worker) for worker in scaled]


def _best(scaled: Sequence[float]) -> Factor | None:
    """Find the noise kind nearest to times in units of their median; None if none is near."""
    ordered = sorted(scaled)
    if _quantile(ordered, 0.9) - _quantile(ordered, 0.1) < _CALM:
        calm = Factor("none", {}, 1.0, 1.0, lambda x: float(x >= 1.0))
        return calm if _near(calm, ordered) else None
    nearest = min(
        _candidates(ordered),
        key=lambda factor: (
            factor.distance(ordered) * (_ONE_MORE if factor.kind == "pareto" else 1.0)
        ),
    )
    return nearest if _near(nearest, ordered) else None


def _near(factor: Factor, scaled: Sequence[float]) -> bool:
    measured, expected = mean(scaled), factor.mean / factor.median
    if not measured / (1 + _TAIL) <= expected <= measured * _GUESSED:
        return False
    limit = max(_CLOSE, _TOO_FAR / sqrt(len(scaled)))
    return factor.kind == "none" or factor.distance(scaled) < limit


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    lower = int(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (place - lower) * (ordered[upper] - ordered[lower])


def _candidates(ordered: Sequence[float]) -> Iterator[Factor]:
    """Fit each kind by quantiles."""
    low, middle, high = (_quantile(ordered, share) for share in (0.1, 0.5, 0.9))
    yield _lognormal((log(high) - log(low)) / (2 * _normal_quantile(0.9)))
    width = (high - low) / 0.8
    if width < 2:
        yield _uniform(1 - width / 2, 1 + width / 2)
    part = (high - low) / log(9)  # of c x scale
    if part * log(2) < 1:
        yield _exponential(part / (1 - part * log(2)))
    yield _dropcompute()
    if high - middle > _pareto_skew(_HEAVY) * (middle - low):
        yield from _pareto(low, middle, high)


def _lognormal(sigma: float) -> Factor:
    centre = -sigma * sigma / 2

    def below(x: float) -> float:
        return (1 + erf((log(x) - centre) / (sigma * sqrt(2)))) / 2

    return Factor("lognormal", {"sigma": sigma}, exp(centre), 1.0, below)


def _uniform(low: float, high: float) -> Factor:
    return Factor(
        "uniform",
        {"low": low, "high": high},
        (low + high) / 2,
        (low + high) / 2,
        lambda x: min(max((x - low) / (high - low), 0.0), 1.0),
    )


def _exponential(scale: float) -> Factor:
    return Factor(
        "exponential",
        {"scale": scale},
        1 + scale * log(2),
        1 + scale,
        lambda x: -expm1(-max(x - 1, 0.0) / scale),
    )


def _dropcompute() -> Factor:
    def below(x: float) -> float:
        z = (x - 1) * DropCompute.ALPHA
        if z <= 0 or x >= 1 + DropCompute.BETA:
            return float(z > 0)
        return (1 + erf((log(z) - 4) / sqrt(2))) / 2

    return Factor("dropcompute", {}, 1 + exp(4) / DropCompute.ALPHA, 1.5, below)


def _pareto(low: float, middle: float, high: float) -> Iterator[Factor]:
    """The heavier the tail, the larger (90 % - 50 %) over (50 % - 10 %): find the shape by that."""
    least, most = 0.2, _HEAVY
    for _ in range(60):
        shape = sqrt(least * most)
        if _pareto_skew(shape) * (middle - low) > high - middle:
            least = shape
        else:
            most = shape
    part = (high - low) / (_lomax(0.9, shape) - _lomax(0.1, shape))  # c x scale
    base = 1 - part * _lomax(0.5, shape)
    if base > 0:
        scale = part / base
        yield Factor(
            "pareto",
            {"shape": shape, "scale": scale},
            1 + scale * _lomax(0.5, shape),
            1 + scale / (shape - 1) if shape > 1 else inf,
            lambda x: 1 - (1 + max(x - 1, 0.0) / scale) ** -shape,
        )


def _lomax(share: float, shape: float) -> float:
    return expm1(-log1p(-share) / shape)


def _pareto_skew(shape: float) -> float:
    middle = _lomax(0.5, shape)
    return (_lomax(0.9, shape) - middle) / (middle - _lomax(0.1, shape))


# --- network -------------------------------------------------------------------------------


def fit_network(workers: int, seconds_by_bytes: dict[int, float]) -> dict[str, Any]:
    """Fit latency and bandwidth of a ring to what all-reduces of several sizes have taken.

    A ring takes 2(P-1) (latency + bytes / (P bandwidth)): a line over the bytes. Each size counts
    by its relative error, so that the small ones are not lost beside the large.
    """
    points = sorted(seconds_by_bytes.items())
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points, strict=True))
        / spread
    )
    slope = max(slope, 0.0)
    start = max(mean_t - slope * mean_n, 0.0)
    phases = 2 * (workers - 1)
    return {
        "latency_s": start / phases,
        "bandwidth_bytes_per_s": phases / (workers * slope) if slope else inf,
        "all_reduce": "ring",
    }
