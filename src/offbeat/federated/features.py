"""What a model sees of a sample: the input of its last linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK = 1000


def head(model: nn.Module) -> nn.Linear:
    """Return the layer that makes the logits: the last linear one."""
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear: features are the input of the last one"
        )
    return layers[-1]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients, and with the layers in their mode for inference."""
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was)


def features(model: nn.Module, x: Tensor, client: int = 0) -> Tensor:
    """Return a row for each sample; raise ValueError, for this client, if one is no number."""
    seen: list[Tensor] = []

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(inputs[0].detach().flatten(1))

    last = head(model)
    hook = last.register_forward_pre_hook(note)
    try:
        with evaluating(model):
            for some in torch.split(x, _CHUNK):
                model(some)
    finally:
        hook.remove()
    rows = torch.cat(seen) if seen else torch.zeros(0, last.in_features)
    bad = int((~rows.isfinite()).any(dim=1).sum())
    if bad:
        raise ValueError(
            f"the features of {bad} of {len(rows)} samples of client {client} are not finite: "
            "the model has diverged, or the samples hold NaN; lower the learning rate, or "
            "look at the data"
        )
    return rows
