"""What a race says in the end: the sentence that a user needs.

It claims what the seeds support, and no more. Contestants are compared seed by seed; one is faster
than another if the whole bootstrap interval of the median speed-up says so. A run that never came
to the target is infinitely long, not left out. The gain is split in two:

    speed-up = samples a second, over the other's  ×  the other's samples to the target, over ours
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from offbeat.lab.goals import Target
from offbeat.lab.race import Race
from offbeat.lab.results import Result
from offbeat.report import spread
from offbeat.report.spread import ENOUGH_SEEDS, Interval

_BASELINES = ("sync", "ddp")
_ALIKE = 0.05
"""With few seeds there is no interval: differences up to this share are taken for none."""


@dataclass(frozen=True)
class Standing:
    """One contestant over all its seeds."""

    label: str
    runs: list[Result]

    @property
    def times(self) -> dict[int, float]:
        """Seconds to the target by seed; infinitely many where it was not reached."""
        return {
            run.seed: math.inf if run.seconds_to_target is None else run.seconds_to_target
            for run in self.runs
        }

    @property
    def median_s(self) -> float:
        return median(self.times.values())

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the seeds that have it."""
        values = [value for run in self.runs if (value := getattr(run, name)) is not None]
        return fmean(values) if values else None

    @property
    def dropped(self) -> float:
        """The share of the computed samples that was dropped."""
        computed = sum(run.samples or 0.0 for run in self.runs)
        return sum(run.dropped_samples or 0.0 for run in self.runs) / computed if computed else 0.0

    @property
    def rounds_per_s(self) -> float:
        seconds = sum(run.seconds or 0.0 for run in self.runs)
        return sum(run.rounds or 0 for run in self.runs) / seconds if seconds else 0.0

    @property
    def samples_per_s(self) -> float:
        """Of those that were not dropped."""
        seconds = sum(run.seconds or 0.0 for run in self.runs)
        computed = sum(run.samples or 0.0 for run in self.runs)
        return computed * (1 - self.dropped) / seconds if seconds else 0.0

    @property
    def most_stale(self) -> int:
        return max((run.max_staleness_rounds or 0 for run in self.runs), default=0)

    def speed_up(self, over: Standing) -> Interval:
        """How many times as fast as another one, seed by seed."""
        return self._compared(over, lambda run: _or_never(run.seconds_to_target))

    def throughput(self, over: Standing) -> Interval:
        """How many times the samples a second, on the way to the target."""
        return self._compared(over, _seconds_a_sample)

    def efficiency(self, over: Standing) -> Interval:
        """How many times fewer samples to the target."""
        return self._compared(over, lambda run: _or_never(run.samples_to_target))

    def _compared(self, over: Standing, cost: Callable[[Result], float]) -> Interval:
        theirs = {run.seed: cost(run) for run in over.runs}
        pairs = [(cost(run), theirs[run.seed]) for run in self.runs if run.seed in theirs]
        found = spread.interval(spread.speed_ups([a for a, _ in pairs], [b for _, b in pairs]))
        return found or Interval(1.0, 0.0, math.inf, 0)


def _or_never(value: float | None) -> float:
    return math.inf if value is None else value


def _seconds_a_sample(run: Result) -> float:
    if not run.samples_to_target or run.seconds_to_target is None:
        return math.inf
    return run.seconds_to_target / run.samples_to_target


def standings(results: Sequence[Result]) -> list[Standing]:
    """Gather the runs of each contestant, in the order of their first runs."""
    labels = list(dict.fromkeys(result.label for result in results))
    return [Standing(name, [run for run in results if run.label == name]) for name in labels]


def sentence(race: Race, results: Sequence[Result]) -> str:
    """Say which algorithm to use here, and why."""
    found = standings(results)
    there = [each for each in found if math.isfinite(each.median_s)]
    target, unit = race.plan.target, race.unit
    if not found:
        return "Nothing was measured."
    if target is None:
        return _fastest(found)
    if not there:
        return _nobody(race, target, found)
    base = baseline(found)
    best = min(there, key=lambda each: each.median_s)
    when = f"it reaches {target} in {spread.seconds(best.median_s)} {unit} ({_seeds(best)})"
    ties = [each.label for each in there if each is not best and not is_faster(best, each)]
    if base is None:
        also = f"; as fast, within the spread: {', '.join(ties)}" if ties else ""
        return f"{_use(best)} here: {when}{also}. Add sync, to know what waiting costs."
    if best is base or base.label in ties:
        return _stay(race, base, best, [label for label in ties if label != base.label])
    parts = [f"{_use(best)} here: {when}, {_times(best, base)}, {_why(race, best, base)}."]
    if price := _price(best, base, race.plan.stops):
        parts.append(f"The price: {price}.")
    if ties:
        parts.append(f"As fast, within the spread: {', '.join(ties)}.")
    if edge := base.runs[0].edge:
        parts.append(
            f"That may be too much: {base.label} was best at the edge of what was tried (not "
            f"tried: {edge}); more --trials."
        )
    if len(best.runs) < ENOUGH_SEEDS:
        parts.append(_too_few(best))
    return " ".join(parts)


def _use(best: Standing) -> str:
    return f"Use {best.label}" if len(best.runs) >= ENOUGH_SEEDS else f"Probably {best.label}"


def _seeds(standing: Standing) -> str:
    count, missed = len(standing.runs), sum(map(math.isinf, standing.times.values()))
    if count == 1:
        return "one seed"
    return f"median of {count} seeds{f', {missed} of them never' if missed else ''}"


def _too_few(standing: Standing) -> str:
    count = len(standing.runs)
    seeds = "One seed is" if count == 1 else f"{count} seeds are"
    return f"{seeds} too few for an interval: --seeds {ENOUGH_SEEDS} gives one."


def _fastest(found: list[Standing]) -> str:
    """Of a race by timing alone: it does not say which to use."""
    ran = [each for each in found if each.samples_per_s]
    if not ran:
        return "Nothing was measured: no run came to its end."
    best, base = max(ran, key=lambda each: each.samples_per_s), baseline(ran)
    text = f"The most samples a second has {best.label}: {best.samples_per_s:,.0f}"
    if base is not None and best is not base:
        times = best.samples_per_s / base.samples_per_s
        text += f", {times:.2f} times those of synchronous SGD"
        text += f", with {price}" if (price := _price(best, base)) else ""
    return (
        f"{text}. Nothing was learnt: how much staler gradients or larger rounds cost, "
        "a race with another --task shows."
    )


def _nobody(race: Race, target: Target, found: list[Standing]) -> str:
    limit = race.plan.until
    within = f"{limit.amount:.0f} {race.unit}" if limit.kind == "target" else str(limit)
    text = f"Nobody reached {target} within {within}"
    metric = "final_accuracy" if target.metric == "accuracy" else "final_loss"
    scores = {each.label: score for each in found if (score := each.mean(metric)) is not None}
    if not scores:
        return f"{text}: no run came to its end."
    choose = max if metric == "final_accuracy" else min
    near = choose(scores, key=lambda label: scores[label])
    shown = f"{scores[near]:.1%}" if metric == "final_accuracy" else f"{scores[near]:.4g}"
    return (
        f"{text}. The nearest was {near}, with {shown}. "
        "Give more time by --until, or another --target."
    )


def _stay(race: Race, base: Standing, best: Standing, ties: list[str]) -> str:
    text = f"Use {base.label} here: "
    if best is base:
        text += "nothing was faster"
    else:
        text += (
            f"{best.label} reaches {race.plan.target} {_times(best, base)}: "
            "as fast, within the spread"
        )
    others = [label for label in ties if label != best.label]
    if others:
        text += f"; so {'is' if len(others) == 1 else 'are'} {' and '.join(others)}"
    text = (
        f"{text}. Synchronous workers computed {base.mean('utilization') or 0.0:.0%} of their "
        "time here, and no gradient is stale or dropped."
    )
    return text if len(base.runs) >= ENOUGH_SEEDS else f"{text} {_too_few(base)}"


def _times(best: Standing, base: Standing) -> str:
    found = best.speed_up(base)
    if math.isinf(found.median):
        return "which synchronous SGD does not"
    text = f"{found.median:.2f} times as fast as synchronous SGD"
    if found.seeds == 1:
        return text
    ends = f"{found.low:.2f} to {found.high:.2f}"
    return f"{text} ({'95 % interval' if found.seeds >= ENOUGH_SEEDS else 'seeds'} {ends})"


def _why(race: Race, best: Standing, base: Standing) -> str:
    """Split the gain, and say where the throughput comes from."""
    second = "virtual second" if race.world == "virtual" else "second"
    more, fewer = best.throughput(base).median, best.efficiency(base).median
    split = ""
    if 0 < more < math.inf and 0 < fewer < math.inf:
        # Each is a median of its own, so their product is near the speed-up, and seldom equal.
        is_all = math.isclose(more * fewer, best.speed_up(base).median, rel_tol=0.005)
        split = (
            f"which is {'' if is_all else 'about '}{more:.2f} in samples a {second} times "
            f"{fewer:.2f} in samples needed"
        )
    mine, theirs = best.mean("utilization") or 0.0, base.mean("utilization") or 0.0
    if mine > theirs:
        busy = f"its workers compute {mine:.0%} of their time instead of {theirs:.0%}"
        split = f"{split}: {busy}" if split else f"because {busy}"
    return split or "for fewer samples"


def _price(best: Standing, base: Standing, stops: bool = False) -> str:
    """What the gain costs; where runs stop at the target, a score in the end is no price."""
    parts = []
    if best.dropped:
        parts.append(f"{best.dropped:.0%} of the samples dropped")
    stale = best.mean("mean_staleness_rounds") or 0.0
    if most := best.most_stale:
        average = f"{stale:.1f} rounds stale on average, " if stale else ""
        parts.append(f"gradients {average}at most {most} round{'' if most == 1 else 's'} stale")
    if stops:
        return ", ".join(parts)
    mine, theirs = best.mean("final_accuracy"), base.mean("final_accuracy")
    if mine is not None and theirs is not None:
        parts.append(f"final accuracy {mine:.1%} against {theirs:.1%}")
    else:
        mine, theirs = best.mean("final_loss"), base.mean("final_loss")
        if mine is not None and theirs is not None:
            parts.append(f"final loss {mine:.3g} against {theirs:.3g}")
    return ", ".join(parts)


def is_faster(one: Standing, other: Standing) -> bool:
    """Whether the seeds support that; with few of them, whether they all say so, and clearly."""
    found = one.speed_up(other)
    if found.seeds >= ENOUGH_SEEDS:
        return found.above_1
    return found.low > 1 + _ALIKE


def baseline(found: Sequence[Standing]) -> Standing | None:
    """The synchronous one, that others are measured by."""
    by_label = {each.label: each for each in found}
    return next((by_label[label] for label in _BASELINES if label in by_label), None)
