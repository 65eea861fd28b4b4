"""What the methods that mix models among neighbours have in common: a graph, and a step.

    yield from replica.newest()     what was mixed while this worker was away
    yield replica.own_step()        x after a step on its own gradient
    replica.contribute()            it goes to the neighbours
    yield from replica.results()    what came of it and theirs

They differ in their merge: see merges/mix.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch.optim import Optimizer

from offbeat.algorithm import Algorithm, is_number
from offbeat.graphs import Graph, check_stable, graph_of, spec_of
from offbeat.merges import HalfStep, Mix
from offbeat.replica import Replica
from offbeat.rounds import Gossip, Neighbours, Round, Rules


@dataclass(frozen=True)
class Decentralised(Algorithm):
    """Own steps, each followed by mixing among neighbours."""

    mix: ClassVar[type[Mix]] = Mix
    instead: ClassVar[str] = "give each worker a weight of its own, such as 'lazy-ring' does"
    """What to do where it is not stable."""

    graph: Any = "ring"
    """Who mixes with whom: a name, a matrix, a list of them, or {rank: neighbours}; graphs.py."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph", spec_of(self.graph))
        beta = getattr(self, "beta", 0.0)
        if not (is_number(beta) and 0 <= beta < 1):
            raise ValueError(f"beta must be 0 or more and below 1, got {beta!r}")

    @property
    def _beta(self) -> float:
        return float(getattr(self, "beta", 0.0))

    def check(self, size: int) -> None:
        """Raise unless workers of this number come to agree."""
        self._check_graph(self._graph(size))

    def _check_graph(self, graph: Graph) -> None:
        settings = f"(beta={self._beta:g})" if self.mix.momentum else ""
        check_stable(
            graph,
            self.mix.recursion(self._beta),
            f"{type(self).__name__}{settings}",
            self.instead,
        )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise if the optimizer has a momentum beside the method's."""
        if not self.mix.momentum:
            return
        for group in optimizer.param_groups:
            name, momentum = type(self).__name__, group.get("momentum", 0.0)
            if momentum not in (0.0, self._beta):
                instead = f"write {name}(beta={momentum:g}), or give the optimizer none"
                if "max_momentum" in group:  # OneCycleLR and CyclicLR set it, and go on to do so
                    instead = "a scheduler cycles it: give that cycle_momentum=False"
                raise ValueError(
                    f"the optimizer's momentum is {momentum:g}, and {name}'s is {self._beta:g}, "
                    f"which takes its place: {instead}"
                )
            for setting in ("nesterov", "dampening"):
                if momentum and group.get(setting):
                    raise ValueError(
                        f"the optimizer has {setting}={group[setting]!r}, but the momentum is "
                        f"{name}'s, which knows of none: leave it out"
                    )

    def start(self, replica: Replica) -> None:
        mix, alone, optimizer = self.mix, replica.world.size == 1, replica.optimizer
        if alone and any(_momentum(group) for group in optimizer.param_groups):
            mix = Mix  # nobody to mix with: the optimizer's own momentum is the method
        half_step = HalfStep(replica.parameters, replica.clip_norm, optimizer)
        replica.open(
            Rules("all", lockstep=True),
            notes=1,
            moves=lambda _: 1.0,
            merge=partial(mix, optimizer=optimizer, beta=self._beta),
            exchange=partial(Neighbours, self._graph(replica.world.size), self._check_graph),
            engine=Gossip,
            own=half_step if mix.momentum else None,
        )

    def step(self, replica: Replica) -> Iterator[Round]:
        yield from self.rounds(replica, replica.newest())
        yield replica.own_step()
        replica.contribute()
        yield from self.rounds(replica, replica.results())

    def _graph(self, size: int) -> Graph:
        return graph_of(self.graph, size)


def _momentum(group: Mapping[str, Any]) -> float:
    return float(group.get("momentum", 0.0))
