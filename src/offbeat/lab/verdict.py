"""What a race says in the end: the sentence that a user needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from offbeat.lab.goals import Target
from offbeat.lab.race import Race, Result

_BASELINES = ("sync", "ddp")
_ALIKE = 0.05
"""With one seed there is no spread: differences up to this share are taken for none."""


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

    def speed_ups(self, over: Standing) -> list[float]:
        """How many times as fast as another one, by seed."""
        return [
            over.times[seed] / time_s
            for seed, time_s in self.times.items()
            if math.isfinite(over.times.get(seed, math.inf)) and math.isfinite(time_s) and time_s
        ]


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
    base = _baseline(found)
    best = min(there, key=lambda each: each.median_s)
    seeds = f"median of {len(best.runs)} seeds" if len(best.runs) > 1 else "one seed"
    when = f"it reaches {target} in {best.median_s:.1f} {unit} ({seeds})"
    ties = [each.label for each in there if each is not best and _alike(best, each)]
    if base is None:
        also = f"; as fast, within the spread: {', '.join(ties)}" if ties else ""
        return f"Use {best.label} here: {when}{also}. Add sync, to know what waiting costs."
    if best is base or base.label in ties:
        return _stay(race, base, best, [label for label in ties if label != base.label])
    parts = [f"Use {best.label} here: {when}, {_times(best, base)}, {_why(race, best, base)}."]
    parts.append(f"The price: {_price(best, base)}.")
    if ties:
        parts.append(f"As fast, within the spread: {', '.join(ties)}.")
    if len(best.runs) == 1:
        parts.append("One seed says little: --seeds 3 shows the spread.")
    return " ".join(parts)


def _fastest(found: list[Standing]) -> str:
    """Of a race by timing alone: it does not say which to use."""
    ran = [each for each in found if each.samples_per_s]
    if not ran:
        return "Nothing was measured: no run came to its end."
    best, base = max(ran, key=lambda each: each.samples_per_s), _baseline(ran)
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
            f"{best.label} reaches {race.plan.target} {_times(best, base)}, "
            "which is within the spread: it does not matter"
        )
    others = [label for label in ties if label != best.label]
    if others:
        text += f"; nor does {' or '.join(others)}"
    return (
        f"{text}. Synchronous workers computed {base.mean('utilization') or 0.0:.0%} of their "
        "time here, and no gradient is stale or dropped."
    )


def _times(best: Standing, base: Standing) -> str:
    ratios = sorted(best.speed_ups(base))
    if not ratios:
        return "which synchronous SGD does not"
    text = f"{median(ratios):.2f} times as fast as synchronous SGD"
    return f"{text} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if len(ratios) > 1 else text


def _why(race: Race, best: Standing, base: Standing) -> str:
    second = "virtual second" if race.world == "virtual" else "second"
    reasons = []
    if best.rounds_per_s > base.rounds_per_s:
        reasons.append(
            f"it makes {best.rounds_per_s:.1f} rounds a {second} instead of {base.rounds_per_s:.1f}"
        )
    mine, theirs = best.mean("utilization") or 0.0, base.mean("utilization") or 0.0
    if mine > theirs:
        reasons.append(f"its workers compute {mine:.0%} of their time instead of {theirs:.0%}")
    return f"because {' and '.join(reasons)}" if reasons else "for fewer samples"


def _price(best: Standing, base: Standing) -> str:
    parts = []
    if best.dropped:
        parts.append(f"{best.dropped:.0%} of the samples dropped")
    stale = best.mean("mean_staleness_rounds") or 0.0
    if best.most_stale:
        average = f"{stale:.1f} rounds stale on average, " if stale else ""
        parts.append(f"gradients {average}at most {best.most_stale} rounds stale")
    mine, theirs = best.mean("final_accuracy"), base.mean("final_accuracy")
    if mine is not None and theirs is not None:
        parts.append(f"final accuracy {mine:.1%} against {theirs:.1%}")
    else:
        mine, theirs = best.mean("final_loss"), base.mean("final_loss")
        if mine is not None and theirs is not None:
            parts.append(f"final loss {mine:.3g} against {theirs:.3g}")
    return ", ".join(parts)


def _alike(one: Standing, other: Standing) -> bool:
    """Whether the difference is within the spread over seeds."""
    ratios = one.speed_ups(other)
    if len(ratios) < 2:
        return bool(ratios) and abs(ratios[0] - 1) <= _ALIKE
    return min(ratios) <= 1.0 <= max(ratios)


def _baseline(found: list[Standing]) -> Standing | None:
    by_label = {each.label: each for each in found}
    return next((by_label[label] for label in _BASELINES if label in by_label), None)
