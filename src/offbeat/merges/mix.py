"""Mix: a worker's model becomes the weighted mean of its neighbours' models.

Each worker has a model of its own, which all rounds have made so far: the base. A round goes

    y = base, after a step of the optimizer          send(y); an absent worker makes no step
    z = sum over neighbours j of w_ij y_j            what `receive` gets
    base = z

and that is D-PSGD. The methods with a momentum differ in what they send, and in what they make of
z. They take gradients from the step: g = (base - y) / lr, so any optimizer will do, with its weight
decay and clipping. The optimizer's own momentum is theirs: it is put aside for that step.

Learning rate and momentum mean what they mean in `torch.optim.SGD`, m <- beta m + g. Where a paper
has m <- beta m + (1 - beta) g, its learning rate is lr / (1 - beta).

Running statistics are mixed like parameters, and have no momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.graphs import Recursion
from offbeat.merges.shift import Shift
from offbeat.merges.step import OwnStep
from offbeat.rounds import Flats, Layout, Round
from offbeat.worlds import Channel


class Mix(Shift):
    """D-PSGD: mix, and nothing else."""

    common = False
    alike = False
    momentum: ClassVar[bool] = False
    """Whether it has a momentum, which is then not the optimizer's."""
    tracks: ClassVar[bool] = False
    """Whether it sends something else beside the model, as large as the parameters."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """What it remembers of every parameter."""

    def __init__(
        self, layout: Layout, alone: bool, optimizer: Optimizer, beta: float = 0.0
    ) -> None:
        super().__init__(layout, alone)
        self._optimizer = optimizer
        self._beta = beta
        self._trained = sum(len(group["params"]) for group in optimizer.param_groups)
        self._stale = False  # the parameters are older than the base
        self._rates: list[float] = []  # the others', of a worker that joins, until it has its own
        self._own: list[Tensor] = []  # this worker's model, while all take the mean of theirs
        self._kept = {
            name: [torch.zeros_like(base) for base in self._base.views[: self._trained]]
            for name in self.keeps
        }
        if self.tracks:
            names = [f"what is tracked of {name}" for name in layout.names[: self._trained]]
            parameters = self._parameters[: self._trained]
            tensors = [*self._parameters, *parameters]
            self.travels = Layout([*layout.names, *names], tensors, layout.bucket_bytes)

    @staticmethod
    def recursion(beta: float) -> Recursion:
        """What happens without gradients: x <- W x."""
        return Recursion(fixed=((0.0,),), mixed=((1.0,),))

    # --- a round -----------------------------------------------------------------------------

    def moves(self) -> None:
        """An own step is being made."""
        self.check()

    @torch.no_grad()
    def send(self, into: Flats, moved: bool) -> int | None:
        """Write what the neighbours get; say which parameter is not finite, if one is not.

        Such a step is taken back: nobody else gets to see it.
        """
        base, mine = self._base.views, into.views[: len(self._parameters)]
        torch._foreach_copy_(mine, list(self._parameters) if moved else base)
        bad = None
        if moved and not all(isfinite(body.sum().item()) for body in into.bodies):
            bad = next((n for n, y in enumerate(mine) if not y.isfinite().all()), None)
        if bad is not None:
            torch._foreach_copy_(mine, base)
        self._stale |= bad is not None
        self._write(base[: self._trained], mine[: self._trained], into.views[len(mine) :])
        return bad

    @torch.no_grad()
    def receive(self, mixed: Flats) -> None:
        """Make the base of what all neighbours have sent."""
        count, n = len(self._parameters), self._trained
        with self.guard():
            base, z = self._base.views, mixed.views
            if n < count:
                torch._foreach_copy_(base[n:], z[n:count])
            self._merge(base[:n], z[:n], z[count:])
            self._stale = True

    def _write(self, x: list[Tensor], y: list[Tensor], more: list[Tensor]) -> None:
        """Turn y, which is x after a step, into what is sent."""

    def _merge(self, x: list[Tensor], z: list[Tensor], more: list[Tensor]) -> None:
        """Turn x into what z makes of it."""
        torch._foreach_copy_(x, z)

    def regrouped(self, given: Flats | None) -> None:
        """The members have changed, and what balances their memories; begin them anew.

        What it has `given` to a round that is made again is changed as if that had been before.
        """

    # --- a worker joins ------------------------------------------------------------------------

    @torch.no_grad()
    def take_in(self, channel: Channel, new: Sequence[int], mine: bool) -> None:
        """Have those who are new begin with the mean of the others' models: so it stays as it is.

        Bucket by bucket; and with their learning rates, since momenta that track others' balance
        only if these are the same.
        """
        others = float(len(channel.members) - len(new))
        rates = torch.tensor(self._gammas(), dtype=torch.float64)
        for tensor in (rates, *self._base.tensors):
            mean = torch.zeros_like(tensor) if mine else tensor.clone()
            channel.all_reduce(mean).wait()
            if mine:
                tensor.copy_(mean.div_(others))  # nobody reads it yet: see rounds/means.py
        if mine:
            self._rates, self._stale = rates.tolist(), True
            for tensors in self._kept.values():
                torch._foreach_zero_(tensors)

    def for_joiner(self) -> dict[str, Any]:
        """Nothing: it has got a model from all of them."""
        return {}

    def join(self, state: dict[str, Any]) -> None:
        """Go by one's own learning rates from here on, which are the giver's."""
        self._rates = []

    def _gammas(self) -> list[float]:
        """The learning rate, by parameter; 1, in an optimizer that has none."""
        return list(self._rates) or [
            float(group.get("lr", 1.0))
            for group in self._optimizer.param_groups
            for _ in group["params"]
        ]

    # --- what the program has of it ------------------------------------------------------------

    @torch.no_grad()
    def adopt(self) -> None:
        """Have the base in the parameters."""
        if self._stale and not self.shown:
            torch._foreach_copy_(list(self._parameters), self._base.views)
            self._stale = False

    def begin(self, round: Round) -> bool:
        """It is in the parameters already."""
        return False

    def skip(self, round: Round) -> None:
        """This worker's step was taken back before anybody has seen it."""

    def fold(self, round: Round) -> None:
        """It is in the base already."""

    def read(self, into: Flats) -> None:
        """Write this worker's model."""
        torch._foreach_copy_(into.views, self._base.views)

    def show(self, agreed: Sequence[Tensor] | None = None) -> bool:
        """Have the mean of all models in the parameters for a while; one's own is there as is."""
        return agreed is not None and super().show(agreed)

    def settled(self, channel: Channel | None = None) -> None:
        """All have left: have the mean of all models, for good."""
        if channel is not None and not self._alone:
            # If a worker is lost in the middle of this, the others do it again.
            self._own = self._own or [tensor.clone() for tensor in self._base.tensors]
            torch._foreach_copy_(self._base.tensors, self._own)
            for tensor in self._base.tensors:
                channel.all_reduce(tensor).wait()
            torch._foreach_div_(self._base.tensors, float(len(channel.members)))
        self._stale = True
        self.adopt()

    # --- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold; after `settle`, so nothing is under way."""
        kept = {name: [each.clone() for each in tensors] for name, tensors in self._kept.items()}
        return {"base": [each.clone() for each in self._base.views], **kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved, the parameters included."""
        for name, tensors in self._kept.items():
            torch._foreach_copy_(tensors, state[name])
        torch._foreach_copy_(self._base.views, state["base"])
        self._stale = True
        self.adopt()


class HeavyBall(Mix):
    """DecentLaM: momentum on how far the half-step and mixing together would move the model.

    m <- beta m + (x - z) / lr, x <- x - lr m, with p = lr m: so nothing is divided by a learning
    rate that may be 0, and what mixing moves is not multiplied by one that grows.
    """

    momentum = True
    keeps = ("p",)

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._before: list[float] = self._gammas()

    @staticmethod
    def recursion(beta: float) -> Recursion:
        """x' <- W x + beta (x - the x before)."""
        return Recursion(fixed=((beta, -beta), (1.0, 0.0)), mixed=((1.0, 0.0), (0.0, 0.0)))

    def _merge(self, x: list[Tensor], z: list[Tensor], more: list[Tensor]) -> None:
        before, self._before = self._before, self._gammas()
        for number, (now, then) in enumerate(zip(self._before, before, strict=True)):
            p = self._kept["p"][number]
            p.mul_(self._beta * (now / then if then else 1.0)).add_(x[number]).sub_(z[number])
            x[number].sub_(p)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold: the latest learning rates, too."""
        return {**super().state_dict(), "gammas": list(self._before)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved."""
        super().load_state_dict(state)
        self._before = list(state["gammas"])


class Corrected(Mix):
    """EDM: a half-step with momentum, and what mixing has moved in the round before added again.

    m <- beta m + g, psi' = x - lr m, send psi' + x - psi, psi <- psi'.
    """

    momentum = True
    keeps = ("m", "psi")

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        torch._foreach_copy_(self._kept["psi"], self._base.views[: self._trained])

    @staticmethod
    def recursion(beta: float) -> Recursion:
        """x' <- W (2 x - the x before)."""
        return Recursion(fixed=((0.0, 0.0), (1.0, 0.0)), mixed=((2.0, -1.0), (0.0, 0.0)))

    def _write(self, x: list[Tensor], y: list[Tensor], more: list[Tensor]) -> None:
        momenta = zip(self._kept["m"], self._kept["psi"], self._gammas(), strict=True)
        for number, (m, psi, gamma) in enumerate(momenta):
            _add_gradient(m, self._beta, x[number], y[number], gamma)
            after = torch.sub(x[number], m, alpha=gamma)
            torch.add(after, x[number], out=y[number]).sub_(psi)
            psi.copy_(after)

    def regrouped(self, given: Flats | None) -> None:
        """The mean of all psi must be that of all models, or these drift."""
        models = self._base if given is None else given
        torch._foreach_copy_(self._kept["psi"], models.views[: self._trained])


class Tracking(Mix):
    """Momentum tracking: beside the model goes how far this worker's momentum is from the mean.

    u <- beta u + g, x <- W (x - lr (u - c)), c <- W (c - u) + u.
    """

    momentum = True
    tracks = True
    keeps = ("u", "c")

    @staticmethod
    def recursion(beta: float) -> Recursion:
        """x' <- W (x + c), c' <- W c."""
        return Recursion(fixed=((0.0, 0.0), (0.0, 0.0)), mixed=((1.0, 1.0), (0.0, 1.0)))

    def _write(self, x: list[Tensor], y: list[Tensor], more: list[Tensor]) -> None:
        momenta = zip(self._kept["u"], self._kept["c"], self._gammas(), strict=True)
        for number, (u, c, gamma) in enumerate(momenta):
            _add_gradient(u, self._beta, x[number], y[number], gamma)
            torch.sub(c, u, out=more[number])
            torch.add(x[number], more[number], alpha=gamma, out=y[number])

    def _merge(self, x: list[Tensor], z: list[Tensor], more: list[Tensor]) -> None:
        torch._foreach_copy_(x, z)
        torch._foreach_copy_(self._kept["c"], torch._foreach_add(more, self._kept["u"]))

    def regrouped(self, given: Flats | None) -> None:
        """All c must come to nothing, or the models drift."""
        c = self._kept["c"]
        if given is not None:
            y, more = given.views, given.views[len(self._parameters) :]
            for number, gamma in enumerate(self._gammas()):
                y[number].sub_(c[number], alpha=gamma)
                more[number].sub_(c[number])
        torch._foreach_zero_(c)


def _add_gradient(m: Tensor, beta: float, x: Tensor, y: Tensor, gamma: float) -> None:
    """m <- beta m + g, where the step from x to y was of g; y is used up."""
    m.mul_(beta)
    if gamma:
        m.sub_(y.sub_(x), alpha=1 / gamma)


class HalfStep(OwnStep):
    """The optimizer on the worker's own gradient, without the optimizer's own momentum."""

    def __init__(
        self, parameters: Sequence[Tensor], clip_norm: float | None, optimizer: Optimizer
    ) -> None:
        super().__init__(parameters, clip_norm)
        self._optimizer = optimizer
        self._aside: list[float] = []

    def begin(self, round: Round) -> bool:
        """Put it aside."""
        for group in self._optimizer.param_groups:
            if "momentum" in group:
                self._aside.append(group["momentum"])
                group["momentum"] = 0.0
        return super().begin(round)

    def end(self, round: Round) -> None:
        """Have it again: schedulers and checkpoints find what they know."""
        for group in self._optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = self._aside.pop(0)
