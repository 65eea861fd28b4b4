"""One worker's replica: its gradients on their way from backward() into a round.

This is what an algorithm sees of a worker. A micro-batch that was computed goes onto the *pile*;
a round takes the pile and gives back a record, which the algorithm yields to have it applied.

    accumulate, all_reduce            rounds that wait for everyone (SyncSGD)
    contribute, results, serve        rounds that start with a quorum (EagerSGD and relatives)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from struct import pack
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.collectives import (
    Arrival,
    Contribution,
    FullAllReduce,
    Layout,
    Measured,
    PartialAllReduce,
    Pile,
    Record,
)
from offbeat.errors import GradientError
from offbeat.overlap import Overlap
from offbeat.worlds import Channel, World


class Replica:
    """A worker's gradients, as an algorithm sees them."""

    def __init__(
        self,
        world: World,
        name: str,
        optimizer: Optimizer,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        bucket_bytes: int,
    ) -> None:
        self.world = world
        self.round = 0
        """Rounds that this replica knows of: all that came before are in its parameters."""
        self.step = 0
        self.dropped_samples = 0.0
        self.arrival: Arrival = "on time"
        """What became of the latest micro-batch."""
        self.memory: dict[str, Any] = {}
        """What the algorithm remembers between steps; goes into checkpoints."""
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.layout = Layout(names, parameters, bucket_bytes)
        self.pile = Pile(self.layout)
        self.full = FullAllReduce(world, name)
        self.overlap = Overlap(self)
        self.compute_began = world.now()
        self._name = name
        self.models = self.full.channel  # the program's own, between rounds
        self._optimizer = optimizer
        self._partial: PartialAllReduce | None = None
        self._weighs = True
        self._declared_samples = 0.0
        self._charged_samples = 0.0
        self._computed_s = 0.0

    # --- what an algorithm calls: rounds of everyone ---------------------------------------

    @property
    def samples(self) -> float:
        """The weight of the micro-batch at hand: what the user declared, or 1."""
        return self._declared_samples or 1.0

    def accumulate(self) -> None:
        """Put the gradients of the micro-batch that was just computed onto the pile."""
        if not self.overlap.launched:
            self.gather(range(len(self.parameters)))
        self._count(self.pile)

    def all_reduce(self, leaving: bool = False) -> Record | None:
        """Make a round of everyone's pile; None if all are leaving and nobody has one."""
        if self.overlap.launched:
            self.gather(self.overlap.not_launched())
        elif not self.pile.micro_batches:
            self.gather(range(len(self.parameters)), nothing=True)
        mine = Contribution(self.learning_rates(), self.overlap.changed(), leaving)
        record = self.full.finish(self.round, self.pile, mine, self.overlap.refill)
        self.overlap.finished()
        if record is not None:
            self.round += 1
        return record

    # --- what an algorithm calls: rounds of a quorum ---------------------------------------

    def open_partial(
        self,
        quorum: str | int | float,
        *,
        average: Literal["samples", "workers"] = "samples",
        max_staleness_rounds: int | None = None,
        full_every: int | None = None,
        choose: Callable[[Measured], int] | None = None,
    ) -> None:
        """Have rounds start with a quorum, from now on."""
        self._weighs = average == "samples"
        self._partial = PartialAllReduce(
            self.world,
            self._name,
            self.layout,
            quorum,
            max_staleness_rounds=max_staleness_rounds,
            divisor=average,
            full_every=full_every,
            choose=choose,
        )

    def contribute(self, *, drop_late: bool = False) -> Arrival:
        """Put the gradients of the micro-batch onto the pile and arrive; does not wait."""
        self.arrival = self._rounds.contribute(
            self._pile_up,
            learning_rates=self.learning_rates(),
            seconds=self._computed_s,
            drop_late=drop_late,
        )
        if self.arrival == "dropped":
            self.drop()
        return self.arrival

    def drop(self) -> None:
        """Count the micro-batch at hand as dropped."""
        self.arrival = "dropped"
        self.dropped_samples += self.samples

    def results(self) -> Iterator[Record]:
        """Wait, if this worker was on time; then every round that it does not know of, in order."""
        return self._known(self._rounds.results())

    def serve(self) -> Iterator[Record]:
        """Leave: every round of the others, until all have left."""
        return self._known(self._rounds.leave())

    def settle(self) -> Iterator[Record]:
        """Pause with everyone, between steps: the rounds until all have paused."""
        return iter(()) if self._partial is None else self._known(self._partial.settle())

    def resume(self) -> None:
        """Go on after `settle`."""
        if self._partial is not None:
            self._partial.resume()
            self.compute_began = self.world.now()

    def stop(self) -> None:
        """End the rounds together with everyone, and apply none of them."""
        if self._partial is not None:
            self._partial.stop()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold of rounds, pending gradients and the algorithm."""
        return {
            "round": self.round,
            "step": self.step,
            "pile": self.pile.state_dict() if self._partial is None else None,
            "partial": None if self._partial is None else self._partial.state_dict(),
            "memory": deepcopy(self.memory),
            "overlap": self.overlap.on,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        self.round, self.step = state["round"], state["step"]
        if self._partial is None:
            self.pile.load_state_dict(state["pile"])
        else:
            self._partial.load_state_dict(state["partial"])
        self.memory = deepcopy(state["memory"])
        self.overlap.on = state["overlap"]

    def newest(self, records: Iterator[Record]) -> Iterator[Record]:
        """Only the last of the rounds at hand: those before it are passed over, as in the paper."""
        passed_over, samples = 0, 0.0
        for record in records:
            if self._rounds.more:
                passed_over += 1
                samples += record.samples_by_rank[self.world.rank]
                continue
            yield replace(record, passed_over=passed_over, samples_passed_over=samples)
            passed_over, samples = 0, 0.0

    def copy_from_worker_0(self) -> None:
        """Take over worker 0's parameters and optimizer state; everyone calls this."""
        state = (value for each in self._optimizer.state.values() for value in each.values())
        tensors = [*self.parameters, *(value for value in state if isinstance(value, Tensor))]
        broadcast(self.models, tensors)

    @property
    def _rounds(self) -> PartialAllReduce:
        assert self._partial is not None, "open_partial() comes first"
        return self._partial

    def _known(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            self.round += 1
            if record.samples:
                yield record

    def _pile_up(self, pile: Pile) -> None:
        self.pile = pile
        self.gather(range(len(self.parameters)))
        self._count(pile)

    def _count(self, pile: Pile) -> None:
        self.arrival = "on time"
        pile.samples += self.samples
        pile.micro_batches += 1

    # --- what attach calls -----------------------------------------------------------------

    def declare_samples(self, samples: float) -> None:
        if all(parameter.grad is None for parameter in self.parameters):
            # Nothing to add to: what was declared went with gradients that no step has taken.
            self._declared_samples = self._charged_samples = 0.0
        self._declared_samples += samples

    def computed(self) -> float:
        """Let the modelled device's time for the micro-batch pass; return the seconds it took."""
        self.world.sleep_until(self.compute_began + self.compute_s())
        self.step += 1
        self._charged_samples = self._declared_samples
        now = self.world.now()
        self._computed_s, self.compute_began = now - self.compute_began, now
        return self._computed_s

    def stepped(self) -> None:
        """The step is over: what follows is the next micro-batch."""
        self._declared_samples = self._charged_samples = 0.0
        self.overlap.reset()
        self.compute_began = self.world.now()

    def install(self, record: Record) -> None:
        """Write a record's mean into `.grad`; None where nobody had one.

        Into the gradients that are there: they neither alias the buckets, nor cost new memory.
        """
        for parameter, view, used in zip(
            self.parameters, record.sum.views, record.used, strict=True
        ):
            if not used:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            torch.div(view, record.divisor, out=parameter.grad)

    def applied(self) -> None:
        """The round that took this worker's pile is done with."""
        if self._partial is None:
            self.pile.clear()

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def learning_rates(self) -> float:
        """A fingerprint of the optimizer's learning rates; never 0."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group]
        return float(zlib.crc32(pack(f"{len(rates)}d", *rates)) % 0xFFFFFF + 1)  # 24 bits: float32

    # --- gradients onto the pile -----------------------------------------------------------

    def gather(self, numbers: Sequence[int], nothing: bool = False) -> None:
        """Add `.grad` of these parameters, times samples, to the pile."""
        pile = self.pile
        if not pile.micro_batches and self.world.size == 1 and self._weighs:
            pile.unit = self.samples
        weight = self.samples / pile.unit if self._weighs else 1.0
        into, grads, without = [], [], []
        for number in numbers:
            view = pile.flats.views[number]
            grad = None if nothing else self.parameters[number].grad
            if grad is None:
                without.append(view)
                continue
            if grad.layout != torch.strided:
                raise GradientError(
                    f"the gradient of {self.names[number]!r} is sparse: use sparse=False in the "
                    "embedding, or leave its parameters out of the optimizer"
                )
            pile.used[number] = True
            into.append(view)
            grads.append(grad)
        if pile.micro_batches:
            if into:
                wide = [grad.to(view.dtype) for grad, view in zip(grads, into, strict=True)]
                torch._foreach_add_(into, wide, alpha=weight)
        else:
            if into:
                torch._foreach_copy_(into, grads)
                if weight != 1.0:
                    torch._foreach_mul_(into, weight)
            if without:
                torch._foreach_zero_(without)
        if pile.bad_parameter is None and not nothing:
            # Now, while the numbers are still in the cache, and each worker knows its own.
            pile.bad_parameter = self._bad_parameter(numbers)

    def compute_s(self) -> float:
        """Seconds that the modelled device needs for the micro-batch at hand."""
        samples = self._declared_samples - self._charged_samples
        return self.world.compute_s(self.step, samples or 1.0, self.compute_began)

    def _bad_parameter(self, numbers: Sequence[int]) -> int | None:
        """The first of these whose sum on the pile is NaN or infinite."""
        flats, slots = self.pile.flats, self.layout.slots
        buckets = {slots[number].bucket for number in numbers}
        if all(flats.tensors[bucket].sum().isfinite() for bucket in buckets):
            return None
        return next((n for n in numbers if not flats.views[n].isfinite().all()), None)


def broadcast(channel: Channel, tensors: Sequence[Tensor]) -> None:
    """Take over worker 0's values, whatever their type."""
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if tensor.numel():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            channel.broadcast(flat, source=0).wait()
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
