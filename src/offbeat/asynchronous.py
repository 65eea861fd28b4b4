"""What the asynchronous methods have in common: a judge, and a step.

    replica.contribute()            the gradient takes a ticket, and travels to all
    yield from replica.results()    what it and the others' have changed

They differ in their judge, which says what becomes of each gradient: see rounds/judge.py.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from offbeat.algorithm import Algorithm
from offbeat.noise_choice import UsefulGradients
from offbeat.noise_stream import NoiseStream
from offbeat.replica import Replica
from offbeat.rounds import GivesUp, Judge, Queue, Round, Rules, Watches

logger = logging.getLogger("offbeat")


@dataclass(frozen=True)
class Asynchronous(Algorithm):
    """Every gradient comes by itself, and a judge says what becomes of it."""

    micro_batches: int = field(default=1, kw_only=True)
    """Of a gradient: it travels when so many steps have been made at the same parameters."""

    def __post_init__(self) -> None:
        self.check_counts("micro_batches")

    @abstractmethod
    def judge(self, size: int) -> Judge:
        """What becomes of each gradient, with so many workers."""

    @property
    def gives_up(self) -> GivesUp:
        """Whether a worker leaves a gradient that would come too late."""
        return at_once

    def watches(self, size: int) -> Watches | None:
        """What measures gradients for the judge to learn from, if anything is to be chosen."""
        return None

    def delay(self, size: int) -> int:
        """Updates that a gradient misses as a rule, with so many workers equally fast."""
        return size - 1

    def start(self, replica: Replica) -> None:
        size = replica.world.size
        start(replica, self.judge(size), self.gives_up, self.watches(size))
        if replica.world.rank == 0:
            warn_of_momentum(replica.optimizer, type(self).__name__, self.delay(size))

    def step(self, replica: Replica) -> Iterator[Round]:
        yield from self.rounds(replica, step(replica, self.micro_batches))


def start(
    replica: Replica, judge: Judge, gives_up: GivesUp, watches: Watches | None = None
) -> None:
    """Have every gradient come by itself, from now on."""
    replica.open(Rules("solo"), engine=partial(Queue, judge, gives_up))
    queue = cast(Queue, replica.engine)
    queue.judged, queue.watches = replica.judged, watches


def step(replica: Replica, micro_batches: int = 1) -> Iterator[Round]:
    """A micro-batch is done, or was stopped."""
    if replica.stopped:
        replica.abandon()
        yield from replica.newest()
        return
    whole = replica.piled + 1 >= micro_batches
    replica.contribute(arrive=whole)
    if whole:
        yield from replica.results()


class Useful:
    """How many gradients are worth being averaged, by the noise that they show."""

    def __init__(self, size: int, most: int) -> None:
        self._stream = NoiseStream(block=max(size, 2))
        self._choice = UsefulGradients(most=most, first=size)

    def see(self, gradient: Sequence[Tensor], samples: float) -> float:
        """Take one; what is of use by now."""
        self._stream.add(gradient, samples)
        return float(self._choice(self._stream.measured, samples))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return deepcopy({"stream": self._stream.state, "choice": vars(self._choice)})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        state = deepcopy(state)
        self._stream.state.update(state["stream"])
        vars(self._choice).update(state["choice"])


# --- who leaves a gradient before its end ------------------------------------------------------

_STALLED = 2.0  # times what is usual


def at_once(elapsed_s: float, rest_s: float | None, usual_s: float) -> bool:
    """Whoever is told to stop does."""
    return True


def if_longer(elapsed_s: float, rest_s: float | None, usual_s: float) -> bool:
    """Who would need longer for the rest than for a new one; not known, if it has stalled.

    >>> if_longer(1.0, 3.0, 2.0), if_longer(1.0, 1.0, 2.0), if_longer(5.0, None, 2.0)
    (True, False, True)
    """
    return elapsed_s > _STALLED * usual_s if rest_s is None else rest_s > usual_s


# --- momentum ----------------------------------------------------------------------------------


def stable_step(momentum: float, delay: int) -> float:
    """The largest learning rate times curvature at which a late heavy ball does not diverge.

    Of a quadratic, x_{k+1} = x_k - lr L x_{k-delay} + momentum (x_k - x_{k-1}): the roots of
    z^(d+1) - (1 + m) z^d + m z^(d-1) + lr L leave the unit circle there.

    >>> [round(stable_step(0.0, delay), 4) for delay in (0, 1, 7)]
    [2.0, 1.0, 0.2091]
    >>> [round(stable_step(0.9, delay), 4) for delay in (0, 1, 7)]
    [3.8, 0.1, 0.0158]
    """
    low, high = 0.0, math.pi  # the angle at which they do
    for _ in range(60):
        angle = (low + high) / 2
        turned = (delay - 0.5) * angle + math.atan2(math.sin(angle), math.cos(angle) - momentum)
        low, high = (angle, high) if turned < math.pi / 2 else (low, angle)
    return abs(complex(math.cos(low) - 1, math.sin(low))) * abs(
        complex(math.cos(low) - momentum, math.sin(low))
    )


def warn_of_momentum(optimizer: Optimizer, method: str, delay: int) -> None:
    """Say so if the momentum is what makes late gradients unstable."""
    for group in optimizer.param_groups:
        momentum = float(group.get("momentum") or 0.0)
        if not 0 < momentum < 1 or delay < 1:
            continue
        given = 1 - float(group.get("dampening") or 0.0)
        stable = stable_step(momentum, delay) / given if given > 0 else math.inf
        plain = stable_step(0.0, delay)
        if stable < plain / 2:
            logger.warning(
                "%s: gradients come %s late, where a momentum of %g is stable up to "
                "a learning rate of %.3g / curvature; without momentum up to %.3g, and without "
                "delay up to %.3g: lower the momentum, or the learning rate",
                *(method, "one update" if delay == 1 else f"some {delay} updates", momentum),
                *(stable, plain, stable_step(momentum, 0)),
            )
            return
