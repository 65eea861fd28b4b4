"""Drifting apart: everyone steps a model of its own, until all are averaged.

The mean is weighed by the samples of the own steps. After it all models are the same, bit for bit:
what nobody has stepped stays as it was, without rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import or_
from typing import Any

import torch
from torch import Tensor

from offbeat.rounds import Flats, different_rates
from offbeat.worlds import Channel, World


class Drift:
    """What a worker's own steps have done since models were the same."""

    def __init__(self, world: World, channel: Channel, parameters: Sequence[Tensor]) -> None:
        self._world = world
        self._channel = channel
        self._parameters = parameters
        self._begin()

    def _begin(self) -> None:
        self._apart = False  # models may differ
        self._samples = 0.0
        self._used = [False] * len(self._parameters)  # by parameter: whether a step has moved it

    def step(self, samples: float, used: Sequence[bool]) -> None:
        """Note an own step, of so many samples and of the parameters that it used."""
        self._apart = True
        self._samples += samples
        self._used = list(map(or_, self._used, used))

    def average(
        self, round: int, learning_rates: float, leaving: bool, scratch: Flats
    ) -> int | None:
        """Make everyone's parameters their mean; everyone calls this.

        Returns how many workers go on; None if nobody does, and nobody has made a step since the
        last time. Then nothing was done.
        """
        size = self._world.size
        by_rank = [0.0] * (3 * size)
        # A rest at the end steps no scheduler, so the rates of those who leave may differ.
        rates = 0.0 if leaving else learning_rates
        by_rank[self._world.rank :: size] = self._samples, rates, float(leaving)
        header = torch.tensor([*by_rank, *self._used], dtype=torch.float64)
        self._channel.all_reduce(header).wait()
        samples, everyones_rates, leaves = header[: 3 * size].view(3, size).tolist()
        if (disagreement := different_rates(round, everyones_rates)) is not None:
            raise disagreement
        if any(samples):
            self._take_mean(self._samples / sum(samples), header[3 * size :].tolist(), scratch)
        elif all(leaves):
            return None
        self._begin()
        return size - int(sum(leaves))

    @torch.no_grad()
    def _take_mean(self, weight: float, users: Sequence[float], scratch: Flats) -> None:
        torch._foreach_copy_(scratch.views, list(self._parameters))
        for tensor in scratch.tensors:
            self._channel.all_reduce(tensor.mul_(weight)).wait()
        for parameter, mean, moved in zip(self._parameters, scratch.views, users, strict=True):
            if moved:
                parameter.copy_(mean)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold: attach() gives all workers one model, so also one's own."""
        return {
            "samples": self._samples,
            "used": list(self._used),
            "parameters": [each.detach().clone() for each in self._parameters if self._apart],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become what was saved, the parameters included."""
        self._samples, self._used = state["samples"], list(state["used"])
        self._apart = bool(state["parameters"])
        for parameter, saved in zip(self._parameters, state["parameters"], strict=False):
            parameter.copy_(saved)
