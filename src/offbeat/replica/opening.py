"""Setting up a replica: what it consists of, and what its rounds are to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from offbeat.codecs import Codec, Coder
from offbeat.merges import OwnStep, Shift, Step
from offbeat.replica.micro_batch import MicroBatch
from offbeat.replica.momenta import momenta as momenta_of
from offbeat.replica.overlap import Overlap
from offbeat.rounds import (
    Arrival,
    CodedLaunches,
    Engine,
    Layout,
    MakeExchange,
    Means,
    Measured,
    Pile,
    Rules,
    SumOverAll,
)
from offbeat.worlds import Channel, World


class Opening(MicroBatch):
    """One worker's replica, up to its first round."""

    def __init__(
        self,
        world: World,
        name: str,
        optimizer: Optimizer,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        bucket_bytes: int,
        clip_norm: float | None = None,
        scheduled: bool = False,
        buffers: Mapping[str, Tensor] | None = None,
        codec: Codec | None = None,
    ) -> None:
        """`buffers` of the model, which go with its parameters wherever models are averaged."""
        layout = Layout(names, parameters, bucket_bytes)
        super().__init__(world, layout)
        self.round = 0
        """Rounds that this replica knows of: all that came before are in its parameters."""
        self.dropped_samples = 0.0
        self.arrival: Arrival = "on time"
        """What became of the latest micro-batch."""
        self.memory: dict[str, Any] = {}
        """What the algorithm remembers between steps, alike on all workers, so that a worker which
        joins is given it; goes into checkpoints."""
        self.own: dict[str, Any] = {}
        """The same, of what is this worker's alone: one that joins begins it anew."""
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self._everything = range(len(self.parameters))
        self.layout = layout
        self.tensors = layout.parameters
        """What rounds change: the parameters; and the buffers, where models are averaged."""
        self._bucket_bytes = bucket_bytes
        self.buffers = dict(buffers or {})
        self._codec = codec
        self.coder: Coder | None = None
        """What makes bytes of what this worker gives, if there is a codec, and another worker."""
        self.overlap = Overlap(self)
        self._models = world.channel(name)
        self.choose: Callable[[Measured], int] | None = None
        self.optimizer, self.clip_norm = optimizer, clip_norm
        self.step_merge = Step(optimizer, self.parameters, clip_norm, scheduled)
        self.shift: Shift | None = None
        self.means: Means | None = None
        self.engine: Engine
        self.name = name
        self.loads = 0
        """Checkpoints that were loaded."""
        self._own = OwnStep(self.parameters, clip_norm)
        self._own_is_bad = False  # the latest own step was left out
        self._dropped_s = 0.0  # of micro-batches that were dropped since one was not

    def open(
        self,
        rules: Rules,
        *,
        notes: int = 0,
        choose: Callable[[Measured], int] | None = None,
        moves: Callable[[Pile], float] | None = None,
        merge: Callable[[Layout, bool], Shift] = Shift,
        exchange: MakeExchange = SumOverAll,
        momenta: bool = False,
        engine: Callable[..., Engine] = Engine,
        own: OwnStep | None = None,
        early: bool = False,
    ) -> None:
        """Have rounds start by these rules, from now on.

        `notes` says how many numbers every worker tells the others in every round. With `moves`,
        rounds carry moves, weighed by what it says of a pile, and `own_step` comes before each;
        `merge` says what a worker does with their mean, `own` what an own step is. `exchange` says
        what travels to whom, `engine` who waits for whom.
        With `momenta`, the optimizer's momentum goes with the models.
        With `early`, in lockstep, buckets may be reduced during backward: see `reduces_next`.
        """
        sums = exchange is SumOverAll and engine is Engine
        if self._codec is not None:
            if not sums:
                raise ValueError(
                    f"codec={self._codec!r} goes with methods whose rounds sum over all workers, "
                    "such as SyncSGD, EagerSGD or DiLoCo; this one's do not: leave codec out"
                )
            early &= not self._codec.feeds_back  # what was launched might have to go again
            exchange = self._coded(self._codec)
        self.choose = choose
        self.gradients.weighs = rules.divisor == "samples"
        rates = 0 if moves else len(self.step_merge.rates)
        layout = self.layout if moves is None else self._with_buffers(momenta)
        self.names, self.tensors = layout.names, layout.parameters
        if moves is not None:
            self.shift = merge(layout, self.world.size == 1)
            self.shift.statistics = len(self.buffers)
            self._own = own or self._own
        self.engine = engine(
            self.world,
            self.name,
            layout if self.shift is None else self.shift.travels,
            rules,
            notes=notes,
            rates=rates,
            choose=choose,
            exchange=exchange,
            begin=False,
        )
        if self.world.survives and not self.engine.repeats:
            raise ValueError(
                "survive=True: what this method's rounds exchange cannot be exchanged again yet "
                "when a worker is lost; attach with survive=False, or take another method"
            )
        self.overlap.on &= early
        self.engine.early = self.overlap if self.overlap.on else None
        self.engine.merge = self.shift or self.step_merge
        # Elsewhere, and where results are handed on, buffers are written past torch: see shared.py.
        self.gradients.puts = self.engine.spares = sums and not (moves or self.world.survives)
        if self.shift is not None and moves is not None:
            self.engine.write, self.engine.weight = self.shift.give, moves
            self.engine.land = self.shift.land
            self.engine.piles.written_late = True
            if not self.shift.common:
                self.means = Means(self.world, self.name, layout, self.shift.read)
                self.shift.guard = self.means.guard

    def _coded(self, codec: Codec) -> MakeExchange:
        """The sum over all, as bytes; as it is, if there is nobody to send any to."""
        if self.world.size == 1:
            return SumOverAll
        coder = self.coder = codec.coder(self.world.size, self.world.rank)
        return partial(SumOverAll, launches=partial(CodedLaunches, coder))

    @property
    def can_be_joined(self) -> bool:
        """Whether a worker can join: what rounds do, and what is done with them, allow for it."""
        return self.engine.joins and (self.shift is None or self.shift.joins)

    def models_in(self, epoch: int) -> Channel:
        """The program's own channel, between rounds, to all members of this epoch."""
        if self._models.epoch != epoch:
            self._models = self.world.channel(self.name, epoch=epoch)
        return self._models

    @contextmanager
    def models_of(self, ranks: tuple[int, ...], epoch: int) -> Iterator[Channel]:
        """The same to these members: all others have left."""
        channel = every = self.models_in(epoch)
        if ranks != every.members:
            channel = self.world.channel(f"{self.name}/paused", ranks, epoch)
        yield channel
        if channel is not every:
            channel.close()

    @property
    def drifts(self) -> bool:
        """Whether this worker makes own steps between rounds."""
        return self.shift is not None and self.engine.drifts

    def _with_buffers(self, momenta: bool) -> Layout:
        """Parameters and buffers, of which an own step moves both; and the momentum, perhaps."""
        more: dict[str, Tensor] = {}
        if momenta:
            more |= momenta_of(self.optimizer, self.names, self.parameters)
        more |= self.buffers
        names, tensors = [*self.names, *more], [*self.parameters, *more.values()]
        return Layout(names, tensors, self._bucket_bytes)

    def begin(self) -> None:
        """The others' rounds may come from here on."""
        self.engine.begin()
        if self.means is not None:
            self.means.begin()

    def compute_until(self, ends_s: float) -> bool:
        """Let the device compute until then; say whether it was stopped before its end."""
        return self.engine.compute_until(self.compute_began, ends_s)

    def changing(self) -> None:
        """A round is about to be applied."""
        if self.means is not None:
            self.means.changing()

    def changed(self) -> None:
        """It has been."""
        if self.means is not None:
            self.means.changed()
