"""The noise scale where gradients come one by one, each at another point: asynchronous SGD.

Two gradients g_i, g_j of a sample each have the signal s in common and no noise: E g_i g_j = s. The
noise t, in d equally strong directions, gives each product the variance t^2 / d, independently of
all other products. So what counts is their number. N gradients, each times the H before it:

    relative variance of s  ~  scale^2 / (d N H)  +  4 scale / (d N)

The second part is the signal's own products with the noise: nobody gets below that. The first is
why windows of a handful show nothing (a scale of 1000, d = 2000, windows of 8: 2,300 gradients for
a standard error of a quarter), and why all earlier gradients are better: 150 are enough.
So a block of gradients is multiplied with the mean of those before it, not only in itself.

How far back? The point moves. With H = scale / 2 the first part is half of the second, and more
would gain little. A mean that forgets slowly, standing for scale / 4 gradients, has the noise of so
many. With the steps of the theory, at most 1 / (4 L scale), the gradient changes by a sixteenth
meanwhile. Until the scale is known, the mean is over all gradients.

One thing is not small. A step moves against the noise of its own gradient, so gradients that are
computed later meet that noise again: E g_i g_j = s - step tr(Hessian x covariance). With the steps
of the theory that is below a quarter of the squared gradient that they aim at. With larger ones, at
the point that they hover about, it is 2 s: products say -s, and the scale seems infinite. Gradients
that were under way together do not know each other. Hence the block: its own products have no such
bias, if it is no larger than the number of workers. Where they contradict the others beyond doubt,
they are believed (NoiseScale).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from offbeat.noise_scale import Noise, NoiseScale

_CHUNK = 2**20  # numbers that float32 sums up exactly enough
_SHORTEST = 8  # blocks that the mean of earlier gradients is made of, at least
_LONGEST = 4096  # gradients


class NoiseStream:
    """Measures the noise scale from the gradients that are applied, in their order.

    It keeps two gradient-sized buffers, and goes over a gradient twice, and over the buffers once
    a block. Whoever adds the same gradients has the same numbers, to the bit. They are in `state`,
    which holds plain numbers, lists and tensors, and goes into checkpoints.

    >>> stream, draw = NoiseStream(), torch.Generator().manual_seed(0)
    >>> for _ in range(400):  # signal 1, noise 100 a sample
    ...     stream.add(torch.randn(1000, generator=draw) * 0.1**0.5 + 0.001**0.5)
    >>> 75 < stream.measured.scale < 125
    True
    """

    def __init__(self, state: dict[str, Any] | None = None, block: int = 8) -> None:
        if block < 2:
            raise ValueError(f"block must be 2 or more gradients, got {block}")
        self.state = state if state is not None else {}
        for name, first in _FIRST.items():
            self.state.setdefault(name, first())
        self._block = block

    def add(self, gradient: Tensor | Sequence[Tensor], samples: float = 1.0) -> None:
        """Take a gradient, the mean over so many samples: a vector, or tensors of any shape.

        One that is not finite counts for nothing.
        """
        given = [gradient] if isinstance(gradient, Tensor) else gradient
        flat = [tensor.detach().reshape(-1) for tensor in given]
        square = _dot(flat, flat)
        if samples <= 0 or not isfinite(square):
            return
        if not self.state["sum"]:
            for name in ("sum", "mean"):
                self.state[name] = [torch.zeros_like(each, dtype=_wide(each)) for each in flat]
        elif self.state["sum"][0].device != flat[0].device:  # loaded, or given by another worker
            for name in ("sum", "mean"):
                pairs = zip(self.state[name], flat, strict=True)
                self.state[name] = [held.to(each.device) for held, each in pairs]
        for total, each in zip(self.state["sum"], flat, strict=True):
            total.add_(each, alpha=samples)
        self.state["samples"].append(float(samples))
        self.state["squares"].append(square)
        if len(self.state["samples"]) >= self._block:
            self._close()

    @property
    def measured(self) -> Noise | None:
        """What the gradients have shown; None if there were fewer than 10 blocks."""
        return NoiseScale(self.state["sums"]).measured

    def _close(self) -> None:
        """End a block: measure it, and take it into the mean of earlier ones."""
        state, total, mean = self.state, self.state["sum"], self.state["mean"]
        batch = sum(state["samples"])
        scale = NoiseScale(state["sums"])
        product = _dot(total, mean) / batch if state["blocks"] >= _SHORTEST else None
        scale.add(state["samples"], state["squares"], _dot(total, total) / batch**2, product)
        state["held"] = min(state["held"] + batch, self._reach(batch, scale.measured))
        state["blocks"] += 1
        share = batch / state["held"]
        for each, its_mean in zip(total, mean, strict=True):
            its_mean.mul_(1 - share).add_(each, alpha=share / batch)
            each.zero_()
        state["samples"].clear()
        state["squares"].clear()

    def _reach(self, batch: float, noise: Noise | None) -> float:
        """How many samples back the mean should reach."""
        longest = _LONGEST * batch / self._block
        if noise is None:
            return longest
        return min(max(noise.scale / 4, _SHORTEST * batch), longest)


_FIRST: dict[str, Any] = {
    "sums": dict,  # of NoiseScale
    "samples": list,  # of each gradient of the block
    "squares": list,
    "sum": list,  # the block's gradients, each times its samples
    "mean": list,  # of the gradients before the block
    "held": float,  # samples that this mean stands for
    "blocks": int,
}


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The product of two lists of vectors, in float64 but for pieces that float32 can sum up."""
    total = 0.0
    for one, other in zip(left, right, strict=True):
        pairs = zip(torch.split(one, _CHUNK), torch.split(other, _CHUNK), strict=True)
        wide = _wide(one)
        total += float(sum(torch.dot(a.to(wide), b.to(wide)).double() for a, b in pairs))
    return total


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
