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
round late. `trigger="timer"` is Anytime Minibatch with Delayed Gradients (arXiv 2012.08616). With
`delay=0` a worker waits for its own round, and the batch is still adaptive.

Beyond the paper: bounds on the global batch; a cap on how long a dead-slow worker holds up the
others; `warm_up_rounds="noise"` starts without delay, and overlaps once the measured gradient noise
makes the delay cheap; `apply_on_arrival` applies a round in the middle of a batch, as soon as it is
there, so that most gradients are not stale at all; with `local_steps` a worker applies its own
gradients at once, and rounds carry how far its steps have moved it: local SGD that never waits. Its
relatives, with fixed numbers of steps, are CoCoD-SGD (arXiv 1906.12043) and DaSGD (2006.00441).

Do not use while curvature limits the learning rate: the delay halves the largest stable one. With
a cheap network and little noise, synchronous shares (LBBSP) or DropCompute are better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Literal, cast

from offbeat.algorithm import Algorithm
from offbeat.replica import Replica
from offbeat.rounds import Measured, Round, Rules

Trigger = Literal["ready", "back_to_back", "slowest_batch", "timer"]


@dataclass(frozen=True)
class ABSSGD(Algorithm):
    """Delayed synchronous SGD with adaptive batches."""

    trigger: Trigger = "ready"
    """When a worker is ready for the next round: after `min_micro_batches`; at once, but for the
    first; after `batch` samples of its own; or `period_s` after the last round."""
    min_micro_batches: int = 1
    max_micro_batches: int | None = None
    """A worker that has so many waits for the round: the one exception from "nobody waits"."""
    batch: float | None = None
    period_s: float | None = None
    min_batch: float = 0.0
    """A round does not start with fewer samples, of all workers together."""
    max_batch: float = inf
    """With so many samples a round starts, though somebody may not be ready."""
    max_wait_s: float | None = None
    """The others go on without a worker that has given nothing for so long."""
    delay: Literal[0, 1] = 1
    warm_up_rounds: int | Literal["noise"] = 0
    """Rounds without delay at first: a number, or until the noise scale exceeds the batch."""
    apply_on_arrival: bool = False
    local_steps: bool = False
    """One's own gradients at once, the mean of all one round later: an update per micro-batch.
    Between rounds replicas differ by their own steps; `dp.agreed()` shows what they agree on."""
    rate: Literal["constant", "linear", "sqrt"] = "constant"
    """The learning rate by the global batch B: as it is, times B / reference_batch, or its root."""
    reference_batch: float | None = None
    """If set, the scheduler is stepped once per so many samples, not once per round."""

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        for trigger, needed in {"slowest_batch": "batch", "timer": "period_s"}.items():
            value = getattr(self, needed)
            _check(self.trigger != trigger or value, f"{trigger!r} needs {needed}=")
            _check(self.trigger == trigger or value is None, f"{needed}= needs trigger={trigger!r}")
        _check(self.rate == "constant" or self.reference_batch, "rate= needs reference_batch=")
        self.check_counts("min_micro_batches")
        self.check_switches("apply_on_arrival", "local_steps")
        if self.max_micro_batches is not None:
            self.check_counts("max_micro_batches")
        for name in _ABOVE_0:
            value = getattr(self, name)
            _check(value is None or value > 0, f"{name} must be above 0, got {value}")
        _check(
            self.max_micro_batches is None or self.max_micro_batches >= self.min_micro_batches,
            f"no worker has at least min_micro_batches={self.min_micro_batches} and at most "
            f"max_micro_batches={self.max_micro_batches}",
        )
        _check(
            0 <= self.min_batch <= self.max_batch and self.min_batch < inf,
            f"no batch is at least min_batch={self.min_batch:g} and at most "
            f"max_batch={self.max_batch:g} samples",
        )
        for name, only in _WITH_LOCAL_STEPS.items() if self.local_steps else ():
            value = getattr(self, name)
            _check(value == only, f"local_steps needs {name}={only!r}, got {value!r}")
        warm_up = self.warm_up_rounds
        _check(
            warm_up == "noise" or (isinstance(warm_up, int) and warm_up >= 0),
            f'warm_up_rounds must be 0 or more, or "noise", got {warm_up!r}',
        )
        _check(not self.local_steps or warm_up != "noise", "local_steps shows no gradient noise")

    def start(self, replica: Replica) -> None:
        rules = Rules(
            "all",
            hold=True,
            overdue_s=self.max_wait_s,
            least_samples=self.min_batch,
            most_samples=self.max_batch,
        )
        phase = Phase(replica.world.size) if self.warm_up_rounds == "noise" else None
        replica.open_partial(rules, choose=phase)
        if self.local_steps:
            replica.go_ahead()

    def step(self, replica: Replica) -> Iterator[Round]:
        if self.local_steps:
            yield replica.own_step(ends_round=False)
        given = replica.gave_rounds
        replica.contribute(arrive=self._is_ready(replica), delay=self._delay_of(given, replica))
        if replica.piled == self.max_micro_batches:
            replica.await_call()
        if replica.called:
            if self.local_steps:  # first the round before, so that only one move is under way
                yield from self.rounds(replica, replica.results(delay=0))
            replica.hand_over()
        delay = self._delay_of(given, replica)
        if self.trigger == "back_to_back" and replica.gave_rounds > given:
            replica.arrive()
        if self.apply_on_arrival and delay:
            yield from self.rounds(replica, replica.results(wait=False))
        else:
            yield from self.rounds(replica, replica.results(delay=delay))

    def leave(self, replica: Replica) -> Iterator[Round]:
        yield from self.rounds(replica, replica.serve())

    def rounds(self, replica: Replica, records: Iterator[Round]) -> Iterator[Round]:
        for record in records:
            if self.reference_batch is None or record.bad is not None:  # skipped: not trained on
                yield record
                continue
            before = replica.memory.get("samples", 0.0)
            replica.memory["samples"] = after = before + record.samples
            steps = int(after // self.reference_batch) - int(before // self.reference_batch)
            ratio = min(max(record.samples / self.reference_batch, 0.5), 2.0)
            power = {"constant": 0.0, "linear": 1.0, "sqrt": 0.5}[self.rate]
            yield replace(record, rate=ratio**power, schedule_steps=steps)

    def _is_ready(self, replica: Replica) -> bool:
        """Say whether this worker is ready for the next round, with the micro-batch at hand."""
        if self.trigger == "slowest_batch":
            return replica.piled_samples + replica.samples >= (self.batch or 0.0)
        if self.trigger == "timer":
            return replica.world.now() - replica.gave_s >= (self.period_s or 0.0)
        return self.trigger == "back_to_back" or replica.piled + 1 >= self.min_micro_batches

    def _delay_of(self, round: int, replica: Replica) -> int:
        """The delay of a round; the same on every worker once the round has been called."""
        if self.warm_up_rounds == "noise":
            return self.delay if round >= cast(Phase, replica.choose).noisy_from else 0
        return self.delay if round >= self.warm_up_rounds else 0


class Phase:
    """Whether noise has taken over from curvature: when its scale exceeds the global batch.

    Worker n brings the mean g_n of b_n samples. With the gradient's square s and one sample's noise
    t, |g_n|^2 is s + t/b_n and the square of the mean over all B samples s + t/B, in expectation.
    Two equations; the noise scale is t/s.
    """

    def __init__(self, size: int, memory: float = 0.9) -> None:
        self.noisy_from = inf
        """The first round after the one that has shown it."""
        self._size = size
        self._memory = memory
        self._signal = self._noise = 0.0

    def __call__(self, measured: Measured) -> int:
        batch = sum(measured.samples)
        inverse = sum(1 / samples for samples in measured.samples) / len(measured.samples)
        if inverse > 1 / batch:
            square = sum(measured.squares) / len(measured.squares)
            noise = (square - measured.mean_square) / (inverse - 1 / batch)
            signal = measured.mean_square - noise / batch
            if not isfinite(noise + signal):  # a round that is skipped shows nothing
                return self._size
            self._noise = self._memory * self._noise + (1 - self._memory) * noise
            self._signal = self._memory * self._signal + (1 - self._memory) * signal
            # With little signal left the estimate may be negative: that is noise, too.
            if measured.round >= 1 / (1 - self._memory) and self._noise > batch * self._signal:
                self.noisy_from = min(self.noisy_from, measured.round + 1)
        return self._size


def _check(holds: object, message: str) -> None:
    if not holds:
        raise ValueError(message)


_ABOVE_0 = ("batch", "max_batch", "period_s", "max_wait_s", "reference_batch")
_WITH_LOCAL_STEPS = {"rate": "constant", "max_wait_s": None}
_KNOWN = {
    "trigger": ("ready", "back_to_back", "slowest_batch", "timer"),
    "delay": (0, 1),
    "rate": ("constant", "linear", "sqrt"),
}
