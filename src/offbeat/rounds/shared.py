"""Copies that cost nothing until somebody writes to one of the two: torch's copy-on-write.

Whoever writes through torch, by whatever way, gets memory of its own first, unless the other copy
is gone by then. What is about to be written past torch, by a collective, is made its `own` before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_clone: Callable[[Tensor], Tensor] | None = getattr(torch, "_lazy_clone", None)
_is_shared: Callable[[Tensor], bool] | None = getattr(torch._C, "_is_cow_tensor", None)
POSSIBLE = _clone is not None and _is_shared is not None
"""Whether this torch can do it."""


def fills_storage(tensor: Tensor) -> bool:
    """Whether nothing else lies in its storage: else a write would have to copy that, too."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def shared(tensor: Tensor) -> Tensor:
    """Return a copy that costs nothing yet; or one that does, of memory that is not torch's own.

    That is NumPy's, say, or pinned, or shared with other processes.
    """
    assert _clone is not None, "this torch has no copy-on-write: ask POSSIBLE"
    try:
        return _clone(tensor)
    except RuntimeError:
        return tensor.clone()


def is_unwritten(tensor: Tensor) -> bool:
    """Whether nobody has written to what was a copy of this kind, or what it is a copy of."""
    return _is_shared is not None and _is_shared(tensor)


def own(tensor: Tensor) -> Tensor:
    """Have memory of its own behind it, and return it."""
    if is_unwritten(tensor):
        tensor.view(-1)[:1].mul_(1)  # a write that changes nothing
    return tensor
