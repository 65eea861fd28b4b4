"""One worker's replica: its gradients on their way from backward() into a round.

This is what an algorithm sees of a worker. A micro-batch that was computed goes onto the *pile*;
a round takes the pile and gives back a record, which the algorithm yields to have it applied.

    accumulate, all_reduce            rounds that wait for everyone (SyncSGD)
    contribute, results, serve        rounds that start with a quorum (EagerSGD and relatives)
    called, hand_over, arrive_at      rounds that take a pile between two micro-batches (ABSSGD)
    own_step, average_models          rounds that average models (LocalSGD)
    go_ahead, own_step                rounds of moves: own steps at once, the others' later (ABSSGD)
    share                             a few numbers of every worker, for all of them
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from struct import pack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.ahead import Ahead
from offbeat.drift import Drift
from offbeat.errors import GradientError
from offbeat.overlap import Overlap
from offbeat.rounds import (
    Arrival,
    Contribution,
    FullAllReduce,
    Layout,
    Measured,
    PartialAllReduce,
    Pile,
    Round,
    Rules,
)
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
        self.round_began = world.now()
        """When this worker applied its latest round."""
        self._name = name
        self.models = self.full.channel  # the program's own, between rounds
        self._optimizer = optimizer
        self._partial: PartialAllReduce | None = None
        self._weighs = True
        self.choose: Callable[[Measured], int] | None = None
        self._abandons = False
        self._brings = True  # the micro-batch at hand has gradients
        self._declared_samples = 0.0
        self._charged_samples = 0.0
        self._computed_s: list[float] = []  # of each micro-batch since the last round
        self._drift = Drift(world, self.models, self.parameters)
        self._own_is_bad = False  # the latest own step was left out
        self.ahead: Ahead | None = None

    # --- what an algorithm calls: rounds of everyone ---------------------------------------

    @property
    def samples(self) -> float:
        """The weight of the micro-batch at hand: what the user declared, or 1; 0 without any."""
        return (self._declared_samples or 1.0) if self._brings else 0.0

    def accumulate(self) -> None:
        """Put the gradients of the micro-batch that was just computed onto the pile."""
        if not self.overlap.launched:
            self.gather(range(len(self.parameters)))
        self._count(self.pile)

    def all_reduce(self, leaving: bool = False) -> Round | None:
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
        rules: Rules,
        *,
        choose: Callable[[Measured], int] | None = None,
        abandon: bool = False,
    ) -> None:
        """Have rounds start by these rules, from now on.

        With `abandon`, a round that starts without the gradient that is being computed ends that
        computation at once, where time is modelled.
        """
        self.choose = choose
        self._weighs = rules.divisor == "samples"
        self._abandons = abandon
        self._partial = PartialAllReduce(self.world, self._name, self.layout, rules, choose)

    def go_ahead(self) -> None:
        """Have rounds carry moves, not gradients, from now on: `own_step` comes before each."""
        self.ahead = Ahead(self.layout, alone=self.world.size == 1)
        self._rounds.write = self.ahead.give

    def agreed(self) -> AbstractContextManager[None]:
        """Have in the parameters what all rounds have made of them, and nothing of one's own."""
        return nullcontext() if self.ahead is None else self.ahead.agreed()

    def contribute(
        self, *, arrive: bool = True, delay: int = 0, drop_late: bool = False
    ) -> Arrival:
        """Put the gradients of the micro-batch onto the pile and arrive, or not; does not wait."""
        self.arrival = self._rounds.contribute(
            self._pile_up if self.ahead is None else self._pile_up_moves,
            arrive=arrive,
            delay=delay,
            learning_rates=self.learning_rates(),
            seconds=sum(self._computed_s) / len(self._computed_s) if self._computed_s else 0.0,
            drop_late=drop_late,
        )
        if self.arrival == "dropped":
            self.drop()
        return self.arrival

    @property
    def piled(self) -> int:
        """Micro-batches that no round has taken yet."""
        return self._rounds.piled

    @property
    def piled_samples(self) -> float:
        """Their samples."""
        return self._rounds.piled_samples

    @property
    def gave_rounds(self) -> int:
        """Rounds that have taken this worker's pile."""
        return self._rounds.gave_rounds

    @property
    def gave_s(self) -> float:
        """When the latest of them did."""
        return self._rounds.gave_s

    @property
    def called(self) -> bool:
        """Whether a round has started and waits for this worker's pile."""
        return self._rounds.called

    def await_call(self) -> None:
        """Arrive, and wait for such a round: this worker has enough."""
        self._rounds.await_call()

    def hand_over(self) -> None:
        """Give the pile to the round that waits for it, and go on."""
        self._rounds.hand_over()
        self._computed_s.clear()

    def arrive(self) -> None:
        """Count as there for the next round, whatever will be on the pile."""
        self._rounds.arrive()

    def arrive_at(self, moment: float) -> None:
        """Arrive at that moment, unless a round has taken the pile before."""
        self._rounds.arrive_at(moment)

    def drop(self) -> None:
        """Count the micro-batch at hand as dropped."""
        self.arrival = "dropped"
        self.dropped_samples += self.samples

    def results(self, *, delay: int | None = None, wait: bool = True) -> Iterator[Round]:
        """Wait, if this worker was on time; then every round that it does not know of, in order.

        With a `delay`, all but the latest so many that it has given to. Without `wait`, those that
        are there.
        """
        return self._known(self._rounds.results(delay=delay, wait=wait))

    def serve(self) -> Iterator[Round]:
        """Leave: every round of the others, until all have left."""
        if self.ahead is not None:
            self.ahead.check()
        yield from self._known(self._rounds.leave())
        if self.ahead is not None:
            self.ahead.end()

    def settle(self) -> Iterator[Round]:
        """Pause with everyone, between steps: the rounds until all have paused."""
        if self.ahead is not None:
            self.ahead.check()
        return iter(()) if self._partial is None else self._known(self._partial.settle())

    def resume(self) -> None:
        """Go on after `settle`."""
        if self._partial is not None:
            self._partial.resume()
            self.compute_began = self.round_began = self.world.now()

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
            "choose": None if self.choose is None else deepcopy(vars(self.choose)),
            "drift": self._drift.state_dict(),
            "ahead": None if self.ahead is None else self.ahead.state_dict(),
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
        if self.choose is not None:
            vars(self.choose).update(deepcopy(state["choose"]))
        self._drift.load_state_dict(state["drift"])
        if self.ahead is not None:
            self.ahead.load_state_dict(state["ahead"])
        self.overlap.on = state["overlap"]

    def newest(self, records: Iterator[Round]) -> Iterator[Round]:
        """Only the last of the rounds at hand: those before it are passed over, as in the paper."""
        rounds, samples = 1, 0.0
        for record in records:
            if not record.samples:
                continue
            if self._rounds.more:
                rounds += 1
                samples += record.samples_by_rank[self.world.rank]
                continue
            yield replace(record, schedule_steps=rounds, samples_passed_over=samples)
            rounds, samples = 1, 0.0

    def copy_from_worker_0(self) -> None:
        """Take over worker 0's parameters and optimizer state; everyone calls this."""
        state = (value for each in self._optimizer.state.values() for value in each.values())
        tensors = [*self.parameters, *(value for value in state if isinstance(value, Tensor))]
        broadcast(self.models, tensors)

    # --- what an algorithm calls: models and numbers ---------------------------------------

    def own_step(self, ends_round: bool) -> Round:
        """This worker's own gradient, as if it were a round: models drift until averaged."""
        self.arrival = "on time"
        bad = self._bad_gradient()
        self._own_is_bad = bad is not None
        used = tuple(parameter.grad is not None for parameter in self.parameters)
        if self.ahead is not None:
            self.ahead.check()
        elif bad is None:
            self._drift.step(self.samples, used)
        mine = [0.0] * self.world.size
        mine[self.world.rank] = self.samples
        return Round(
            round=self.round,
            sum=self.pile.flats,  # not looked at: the gradient is where a step wants it
            samples_by_rank=tuple(mine),
            divisor=1.0,
            used=used,
            micro_batches=1,
            bad=None if bad is None else (self.world.rank, bad),
            schedule_steps=int(ends_round),
            ends_round=ends_round,
            own=True,
        )

    def average_models(self, leaving: bool = False) -> int | None:
        """Make everyone's parameters their mean, weighed by the samples since the last time.

        Parameters that nobody has stepped since stay as they are, to the bit. Returns how many
        workers go on; None if nobody does, and nobody has made a step since.
        """
        going_on = self._drift.average(self.round, self.learning_rates(), leaving, self.pile.flats)
        if going_on is not None:
            self.round += 1
        return going_on

    def share(self, numbers: Sequence[float]) -> list[list[float]]:
        """Tell everyone as many numbers, and return all workers', by rank; everyone calls this."""
        table = torch.zeros(self.world.size, len(numbers), dtype=torch.float64)
        table[self.world.rank] = torch.tensor(numbers, dtype=torch.float64)
        self.models.all_reduce(table).wait()
        everyone: list[list[float]] = table.tolist()
        return everyone

    @property
    def _rounds(self) -> PartialAllReduce:
        assert self._partial is not None, "open_partial() comes first"
        return self._partial

    def _known(self, records: Iterator[Round]) -> Iterator[Round]:
        for record in records:
            self.round += 1
            self._computed_s.clear()
            if self.ahead is not None:
                self.ahead.take(record)
            yield record if self.ahead is None else replace(record, moved=True)

    def _pile_up(self, pile: Pile) -> None:
        self.pile = pile
        self.gather(range(len(self.parameters)), look=False)
        self._count(pile)

    def _pile_up_moves(self, pile: Pile) -> None:
        """Count them only: the round that takes them has them written."""
        self._count(pile)
        if self._own_is_bad:  # it has moved nothing, and weighs nothing
            pile.samples -= self.samples
        pile.used = [True] * len(pile.used)

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
        ends = self.compute_began + self.compute_s()
        if self._abandons and self._partial is not None:
            self._partial.wait_until(ends)
        else:
            self.world.sleep_until(ends)
        self.step += 1
        self._charged_samples = self._declared_samples
        self._brings = any(parameter.grad is not None for parameter in self.parameters)
        now = self.world.now()
        computed_s, self.compute_began = now - self.compute_began, now
        self._computed_s.append(computed_s)
        return computed_s

    def stepped(self) -> None:
        """The step is over: what follows is the next micro-batch."""
        self._declared_samples = self._charged_samples = 0.0
        self._brings = True
        self.overlap.reset()
        self.compute_began = self.world.now()
        if not self.step:
            self.round_began = self.compute_began

    def install(self, record: Round) -> None:
        """Write a record's mean into `.grad`; None where nobody had one.

        Into the gradients that are there: they neither alias the buckets, nor cost new memory.
        """
        if record.own:
            return
        sums, grads = [], []
        for parameter, view, used in zip(
            self.parameters, record.sum.views, record.used, strict=True
        ):
            if not used:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            sums.append(view)
            grads.append(parameter.grad)
        if record.divisor == 1.0:  # one micro-batch alone: to copy is quicker than to divide
            torch._foreach_copy_(grads, sums)
            return
        for view, grad in zip(sums, grads, strict=True):
            torch.div(view, record.divisor, out=grad)

    def applied(self) -> None:
        """A round has been applied, or passed by."""
        self.round_began = self.world.now()
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

    def gather(self, numbers: Sequence[int], nothing: bool = False, look: bool = True) -> None:
        """Add `.grad` of these parameters, all of one or more buckets, to the pile.

        Times samples: the pile is a sum. Without `look`, whoever takes the pile sees whether its
        numbers are finite.
        """
        pile = self.pile
        if not pile.micro_batches and self.world.size == 1 and self._weighs and self.samples:
            pile.unit = self.samples
        weight = self.samples / pile.unit if self._weighs else 1.0
        into, grads, without = [], [], []
        for number in numbers:
            view = pile.flats.views[number]
            grad = None if nothing else self.parameters[number].grad
            if grad is None:
                without.append(view)
                continue
            self._check_dense(number, grad)
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
            if without:
                torch._foreach_zero_(without)
            if weight != 1.0:
                for bucket in self.layout.buckets_of(numbers):
                    pile.flats.bodies[bucket].mul_(weight)
        if not look:
            pile.unseen = True
        elif not nothing:  # now, while the numbers are still in the cache, and this worker's own
            pile.look_for_bad(numbers)

    def _bad_gradient(self) -> int | None:
        """The first parameter whose `.grad` is NaN or infinite, if any."""
        grads = {
            number: parameter.grad
            for number, parameter in enumerate(self.parameters)
            if parameter.grad is not None
        }
        for number, grad in grads.items():
            self._check_dense(number, grad)
        sums = [grad.sum(dtype=torch.float32) for grad in grads.values()]
        if not sums or torch.stack([each.to(sums[0].device) for each in sums]).sum().isfinite():
            return None
        return next((number for number, grad in grads.items() if not grad.isfinite().all()), None)

    def _check_dense(self, number: int, grad: Tensor) -> None:
        if grad.layout != torch.strided:
            raise GradientError(
                f"the gradient of {self.names[number]!r} is sparse: use sparse=False in the "
                "embedding, or leave its parameters out of the optimizer"
            )

    def compute_s(self) -> float:
        """Seconds that the modelled device needs for the micro-batch at hand."""
        samples = self._declared_samples - self._charged_samples
        return self.world.compute_s(self.step, samples or 1.0, self.compute_began)


def broadcast(channel: Channel, tensors: Sequence[Tensor]) -> None:
    """Take over worker 0's values, whatever their type."""
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        if tensor.numel():
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            channel.broadcast(flat, source=0).wait()
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
