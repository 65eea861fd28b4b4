"""DropCompute: everybody waits for everybody, but nobody computes past a threshold.

Giladi, Gottlieb, Shkolnik, Karnieli, Banner, Hoffer, Levy, Soudry: "DropCompute: simple and more
robust distributed synchronous training via compute variance reduction", NeurIPS 2023, arXiv
2306.10598.

    in every round, worker n:
        for m = 1 .. M:
            S <- S + gradient sum of micro-batch m at w
            if its clock, since the last update, is past tau: break
        w <- optimizer(w, sum over workers of S / samples)

The check comes after a micro-batch, so each worker completes at least one. Micro-batches that were
not begun stay in the loader: they are shifted to later rounds, not lost. What share of all planned
ones that is, so far, is `dp.stats().dropped_share`.

`threshold_s="auto"` measures for `window_rounds` rounds without dropping, has all workers share
their times, and takes the threshold of the largest effective speed-up: micro-batches computed per
second, over those without a threshold. Later windows do so again. The longest round of a window is
left out: after the start, and after resuming, it is the one with all lazy initialisation.

Differs from the paper: the selector and the check read the same clock (with two, its published run
dropped 12 to 20 % instead of the predicted 7 %), and the model knows that the micro-batch past the
threshold is completed.

`normalise="constant"` is the paper's: divide by what all micro-batches would have had, so a round
that dropped some takes a shorter step. Ours divides by the samples that are there.

Do not use when the same workers are always slow: they drop in every round, and their data is
under-represented. With one micro-batch a round there is nothing to drop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules
from offbeat.thresholds import chosen_threshold


@dataclass(frozen=True)
class DropCompute(Algorithm):
    """Synchronous SGD with a threshold on each worker's compute time per round."""

    micro_batches: int = 8
    """M: micro-batches of each worker in one round, if nothing is dropped."""
    threshold_s: float | Literal["auto"] = "auto"
    """tau: seconds since the last update, after which a worker begins no further micro-batch."""
    normalise: Literal["samples", "constant"] = "samples"
    window_rounds: int = 40
    """How many rounds the automatic threshold is chosen from, and how often."""
    removed: ClassVar[Mapping[str, str]] = {
        "bank": "6 % more samples, and no faster (docs/log.md); NonblockingSGD has it"
    }

    def __post_init__(self) -> None:
        self.check_choices()
        self.check_counts("micro_batches", "window_rounds")
        automatic = self.threshold_s == "auto"
        if not automatic and not isinstance(self.threshold_s, int | float):
            raise ValueError(f'threshold_s must be seconds or "auto", got {self.threshold_s!r}')
        if not isinstance(self.threshold_s, str) and not self.threshold_s > 0:
            raise ValueError(
                f"threshold_s must be above 0, got {self.threshold_s}: every worker completes "
                "at least one micro-batch in any case"
            )

    def start(self, replica: Replica) -> None:
        automatic = self.threshold_s == "auto"
        replica.open(
            Rules("all", lockstep=True, uneven=True), notes=self._width if automatic else 0
        )
        replica.memory.update(threshold_s=inf if automatic else self.threshold_s)
        replica.memory.update(window=[], dropped_share=0.0, counted=0)
        replica.own.update(clock=[], before=())

    def step(self, replica: Replica) -> Iterator[Round]:
        own, clock = replica.own, replica.own["clock"]
        clock.append(replica.world.now() - replica.round_began)
        stops = len(clock) >= self.micro_batches or clock[-1] > replica.memory["threshold_s"]
        replica.contribute(arrive=stops, notes=own["before"])
        yield from self.rounds(replica, self._counted(replica, replica.results()))

    def rounds(self, replica: Replica, rounds: Iterator[Round]) -> Iterator[Round]:
        for each in rounds:
            own, began = replica.own, replica.round_began
            if self.normalise == "constant" and each.micro_batches:
                planned = len(each.ranks) * self.micro_batches
                ratio = max(planned / each.micro_batches, 1.0)
                each = replace(each, divisor=each.divisor * ratio)
            yield each
            # How the round went, everyone tells with the next one.
            own["before"] = (replica.round_began - began, *own["clock"])[: self._width]
            own["clock"].clear()
            if self.threshold_s == "auto":
                self._choose(replica, each)

    def _choose(self, replica: Replica, each: Round) -> None:
        """The best threshold by everyone's times in a window; the same on every worker."""
        memory = replica.memory
        if any(map(any, each.notes_by_rank)):  # not with the first round
            memory["window"].append(each.notes_by_rank)
        if len(memory["window"]) == self.window_rounds:
            memory["threshold_s"] = chosen_threshold(list(zip(*memory["window"], strict=True)))
            memory["window"].clear()
            replica.round_began = replica.world.now()  # choosing is nobody's compute time

    @property
    def _width(self) -> int:
        return self.micro_batches + 1

    def _counted(self, replica: Replica, rounds: Iterator[Round]) -> Iterator[Round]:
        """Count what is left out, of rounds in the loop: a rest at the end of the data is none."""
        memory = replica.memory
        for each in rounds:
            if planned := len(each.ranks) * self.micro_batches:
                dropped = 1 - min(each.micro_batches / planned, 1.0)
                memory["counted"] += 1
                memory["dropped_share"] += (dropped - memory["dropped_share"]) / memory["counted"]
            yield each
