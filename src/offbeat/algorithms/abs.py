"""ABS-SGD: a round starts when everyone has something, and nobody idles until then.

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

So the batch adapts to each worker's speed. That is `in_flight="finish", patience=0`.

Differs from the paper, by default, since the delay halves the largest stable learning rate:

- A sync takes what is finished when it starts; it does not wait for the micro-batches that the fast
  are in the middle of. These ride in the next one: only they are late (`in_flight="bank"`).
- Who has finished a micro-batch waits for a sync that should end soon, and goes on from its result;
  the gradient is not late then. "Soon" is `patience`: within so many of its own micro-batches. If
  it does not end by then, or should not, the worker computes on. So an exchange that takes long
  is hidden, as in the paper, and one that takes no time makes nobody late.

Beyond the paper: a least global batch; a cap on how long a dead-slow worker holds up the others.

Do not use where many are equally fast and one is slow now and then: a round has all of them, so
EagerSGD makes more rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, isnan
from typing import ClassVar, Literal

from offbeat.algorithm import Algorithm
from offbeat.asynchronous import warn_of_momentum
from offbeat.replica import Replica
from offbeat.rounds import Round, Rules

_ROUNDS = 20
"""After so many, whoever is late in most of them is told what that asks of momentum."""
_NOISE = "it made a delay of one bearable, which the default has not: leave it out (docs/log.md)"


@dataclass(frozen=True)
class ABSSGD(Algorithm):
    """Synchronous SGD with adaptive batches."""

    in_flight: Literal["bank", "finish"] = "bank"
    """What becomes of a micro-batch that a worker is in the middle of when a round starts: it rides
    in the next round; or the round waits for it."""
    patience: float = 0.5
    """A worker waits for a round that should end within so many of its micro-batches, and for no
    longer than that. 0: for none, so all is one round late; inf: for each, as one worker alone does
    with any other patience, too."""
    min_batch: float = 0.0
    """A round does not start with fewer samples, of all workers together."""
    max_micro_batches: int | None = None
    """A worker that has so many waits until a round takes them."""
    max_wait_s: float | None = None
    """The others go on without a worker that has given nothing for so long."""
    removed: ClassVar[Mapping[str, str]] = {
        "delay": 'for 1 say in_flight="finish", patience=0; for 0 in_flight="finish", patience=inf',
        "warm_up_rounds": _NOISE,
        "trigger": "by default a round waits for nobody's second micro-batch (docs/log.md)",
        "batch": "it brought nothing; min_batch makes rounds larger",
        "period_s": "it was slower (docs/log.md); min_batch makes rounds larger",
        "min_micro_batches": "it was slower (docs/log.md); min_batch makes rounds larger",
        "max_batch": "the default is faster (docs/log.md)",
        "apply_on_arrival": "it brought nothing (docs/log.md)",
        "rate": "it was slower than a constant one (docs/log.md)",
        "local_steps": "it is a method of its own: WaitFreeLocalSGD()",
        "reference_batch": "it went with rate, which was slower (docs/log.md)",
    }

    def __post_init__(self) -> None:
        self.check_choices()
        if self.max_micro_batches is not None:
            self.check_counts("max_micro_batches")
        if self.max_wait_s is not None and not self.max_wait_s > 0:
            raise ValueError(f"max_wait_s must be above 0, got {self.max_wait_s}")
        if not 0 <= self.min_batch < inf:
            raise ValueError(f"min_batch must be 0 or more samples, got {self.min_batch:g}")
        if self.patience < 0 or isnan(self.patience):
            raise ValueError(f"patience must be 0 or more micro-batches, got {self.patience:g}")
        if self.in_flight == "bank" and self.patience == inf and self.min_batch:
            raise ValueError(
                'with in_flight="bank" and patience=inf a worker waits after each micro-batch, so '
                f"rounds cannot come to min_batch={self.min_batch:g}: choose a patience below inf"
            )

    def start(self, replica: Replica) -> None:
        finish = self.in_flight == "finish"
        replica.open(
            Rules(
                "all",
                at_boundary=finish,
                overdue_s=self.max_wait_s,
                least_samples=self.min_batch,
            )
        )

    def step(self, replica: Replica) -> Iterator[Round]:
        wait_s = self._wait_s(replica)
        # Whoever is behind waits for the round that has started, not for the next one.
        replica.contribute(delay=0 if wait_s and not replica.behind else 1)
        if replica.piled == self.max_micro_batches:
            replica.await_call()
        if replica.called:
            replica.hand_over()
        finish = self.in_flight == "finish"
        for each in replica.results(delay=int(not wait_s) if finish else None, at_most_s=wait_s):
            _tell_if_late(replica, each)
            yield each

    def _wait_s(self, replica: Replica) -> float:
        """How long to wait for a round: not at all, unless it should end soon."""
        if not self.patience:
            return 0.0
        due_s, limit_s = replica.next_round_s, self.patience * replica.seconds
        alone = len(replica.world.members) == 1
        if self.patience == inf or ((due_s is None or alone) and not self.min_batch):
            return inf
        return 0.0 if due_s is None or due_s > limit_s else limit_s


def _tell_if_late(replica: Replica, each: Round) -> None:
    """Once, after some rounds: if most of their samples were late, what that asks of momentum."""
    late = replica.memory.get("late", 0) + (each.mean_staleness_rounds > 0.5)
    replica.memory["late"] = late
    if each.round == _ROUNDS and late > _ROUNDS / 2 and replica.world.rank == 0:
        warn_of_momentum(replica.optimizer, "ABSSGD", 1)
