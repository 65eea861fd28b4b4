"""Arithmetic on buffers as large as the model, of all buckets of a layout or of some."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.rounds import Flats

Buckets = tuple[int, ...] | None
"""Some of a layout's, or all: see rounds/fragments.py."""


def has(buckets: Buckets, bucket: int) -> bool:
    """Whether this bucket is one of these."""
    return buckets is None or bucket in buckets


def of(flats: Flats, buckets: Buckets) -> Sequence[Tensor]:
    """The bodies of these buckets."""
    return flats.bodies if buckets is None else [flats.bodies[number] for number in buckets]


@torch.no_grad()
def copy(values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Have these values in other tensors."""
    torch._foreach_copy_(list(into), list(values))


def add(to: Sequence[Tensor], values: Sequence[Tensor], scale: float) -> None:
    """Add these values, times a number."""
    torch._foreach_add_(list(to), list(values), alpha=scale)
