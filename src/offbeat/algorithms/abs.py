"""ABS-SGD: nobody idles; while one round is reduced, everybody computes for the next.

Zhou, Chen, Wu: "ABS-SGD: A Delayed Synchronous Stochastic Gradient Descent Algorithm with Adaptive
Batch Size for Heterogeneous GPU Clusters", arXiv 2308.15164. Its abstract was at hand: delayed
gradients, no preset batch size, computing until the next synchronisation starts, a delay of one.
All else is our design.

    on every worker, batch t:
        S, n <- 0
        repeat:
            S, n <- S + gradient sum of a micro-batch at w_t, n + its samples
        until everyone is ready: the sync of t-1 has ended, and each has finished a micro-batch
        start the sync of S and n                   in the background
        w_{t+1} <- optimizer(w_t, G_{t-1})          G_{t-1}: sum of all S / sum of all n of t-1

So the batch adapts to each worker's speed, nobody waits, and a gradient is applied exactly one
round late. With `delay=0` a worker waits for its own round, and the batch is still adaptive.

Beyond the paper: a least global batch; a cap on how long a dead-slow worker holds up the others;
`warm_up_rounds="noise"` starts without delay, and overlaps once the measured gradient noise makes
the delay cheap.

Do not use while curvature limits the learning rate: the delay halves the largest stable one. With
a cheap network and little noise, synchronous shares (LBBSP) or DropCompute are better.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal, cast

from offbeat.algorithm import Algorithm
from offbeat.noise_scale import NoiseScale
from offbeat.replica import Replica
from offbeat.rounds import Measured, Round, Rules


@dataclass(frozen=True)
class ABSSGD(Algorithm):
    """Delayed synchronous SGD with adaptive batches."""

    trigger: Literal["ready", "back_to_back"] = "ready"
    """When a worker is ready for the next round: with its first micro-batch, or at once."""
    min_batch: float = 0.0
    """A round does not start with fewer samples, of all workers together."""
    max_micro_batches: int | None = None
    """A worker that has so many waits for the round: the one exception from "nobody waits"."""
    max_wait_s: float | None = None
    """The others go on without a worker that has given nothing for so long."""
    delay: Literal[0, 1] = 1
    warm_up_rounds: int | Literal["noise"] = 0
    """Rounds without delay at first: a number, or until the noise scale exceeds the batch."""
    removed: ClassVar[Mapping[str, str]] = {
        "trigger=slowest_batch": "it brought nothing; min_batch makes rounds larger",
        "trigger=timer": "it was slower than ready (docs/log.md); min_batch makes rounds larger",
        "batch": "it brought nothing; min_batch makes rounds larger",
        "period_s": "it was slower than ready (docs/log.md); min_batch makes rounds larger",
        "min_micro_batches": "it was slower (docs/log.md); min_batch makes rounds larger",
        "max_batch": 'trigger="back_to_back" is as fast (docs/log.md)',
        "apply_on_arrival": "it brought nothing (docs/log.md)",
        "rate": "it was slower than a constant one (docs/log.md)",
        "local_steps": "it is a method of its own: WaitFreeLocalSGD()",
        "reference_batch": "it went with rate, which was slower (docs/log.md)",
    }

    def __post_init__(self) -> None:
        self.check_choices()
        if self.max_micro_batches is not None:
            self.check_counts("max_micro_batches")
        _check(
            self.max_wait_s is None or self.max_wait_s > 0,
            f"max_wait_s must be above 0, got {self.max_wait_s}",
        )
        _check(
            0 <= self.min_batch < inf,
            f"min_batch must be 0 or more samples, got {self.min_batch:g}",
        )
        warm_up = self.warm_up_rounds
        _check(
            warm_up == "noise" or (isinstance(warm_up, int) and warm_up >= 0),
            f'warm_up_rounds must be 0 or more, or "noise", got {warm_up!r}',
        )

    def start(self, replica: Replica) -> None:
        rules = Rules(
            "all", at_boundary=True, overdue_s=self.max_wait_s, least_samples=self.min_batch
        )
        phase = Phase(replica.world.size) if self.warm_up_rounds == "noise" else None
        replica.open(rules, choose=phase)

    def step(self, replica: Replica) -> Iterator[Round]:
        given = replica.gave_rounds
        replica.contribute(delay=self._delay_of(given, replica))
        if replica.piled == self.max_micro_batches:
            replica.await_call()
        if replica.called:
            replica.hand_over()
        delay = self._delay_of(given, replica)
        if self.trigger == "back_to_back" and replica.gave_rounds > given:
            replica.arrive()
        yield from replica.results(delay=delay)

    def _delay_of(self, round: int, replica: Replica) -> int:
        """The delay of a round; the same on every worker once the round has been called."""
        if self.warm_up_rounds == "noise":
            return self.delay if round >= cast(Phase, replica.choose).noisy_from else 0
        return self.delay if round >= self.warm_up_rounds else 0


class Phase:
    """Whether noise has taken over from curvature: when its scale exceeds the global batch."""

    def __init__(self, size: int) -> None:
        self.noisy_from = inf
        """The first round after the one that has shown it."""
        self._size = size
        self._noise: dict[str, list[float]] = {}

    def __call__(self, measured: Measured) -> int:
        scale = NoiseScale(self._noise)
        scale.add(measured.samples, measured.squares, measured.mean_square)
        noise = scale.measured
        # There is no way back, so it must be sure: the signal may be stronger than it seems.
        if noise is not None and noise.noise > sum(measured.samples) * (
            noise.signal + 2 * noise.doubt
        ):
            self.noisy_from = min(self.noisy_from, measured.round + 1)
        return self._size


def _check(holds: object, message: str) -> None:
    if not holds:
        raise ValueError(message)
