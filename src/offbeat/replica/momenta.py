"""An optimizer's momentum, where it is averaged together with the models.

torch.optim.SGD makes its momentum buffers in its first step. They must be there before, to have a
place in the rounds, and must stay the same tensors when a checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

_KEY = "momentum_buffer"


def momenta(
    optimizer: Optimizer, names: Sequence[str], parameters: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The momentum of every parameter, by a name for it: zeros, before the first step."""
    groups = optimizer.param_groups
    if not isinstance(optimizer, SGD) or not all(group["momentum"] for group in groups):
        raise ValueError(
            'momentum="averaged" needs torch.optim.SGD with a momentum, got '
            f'{type(optimizer).__name__}: use momentum="local"'
        )
    buffers = []
    for each in parameters:
        buffer = optimizer.state[each].get(_KEY)
        if buffer is None:
            buffer = optimizer.state[each][_KEY] = torch.zeros_like(each)
        buffers.append(buffer)

    def loaded(optimizer: Optimizer, *_: Any) -> None:
        for each, mine in zip(parameters, buffers, strict=True):
            its = optimizer.state[each].get(_KEY)
            mine.copy_(torch.zeros_like(mine) if its is None else its)
            optimizer.state[each][_KEY] = mine

    optimizer.register_load_state_dict_post_hook(loaded)
    return {f"momentum of {name}": it for name, it in zip(names, buffers, strict=True)}
