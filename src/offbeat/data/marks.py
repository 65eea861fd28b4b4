"""A number that differs, almost surely, between data sets of equal length that hold other data.

A look at what a data set has in memory, without reading a sample: reading one may open files that
must be opened by the loader's workers, or draw random numbers. So two data sets that read their
samples from files of other contents are not told apart. What is: tensors and arrays, labels, and
the choice of a `Subset`, as of a `random_split` that every worker has drawn anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset

_LOOKED_AT = 512  # values of each
_DEEP = 4


def mark(dataset: object) -> str:
    """Look at some values of everything that the data set holds.

    >>> from torch.utils.data import TensorDataset
    >>> zeros, ones = TensorDataset(torch.zeros(3)), TensorDataset(torch.ones(3))
    >>> mark(zeros) == mark(TensorDataset(torch.zeros(3))), mark(zeros) == mark(ones)
    (True, False)
    """
    seen = blake2b(digest_size=8)
    for part in _parts(dataset, _DEEP):
        seen.update(part)
    return seen.hexdigest()


def _parts(held: object, deep: int) -> Iterator[bytes]:
    if isinstance(held, torch.Tensor):
        yield from _looked_at(held)
    elif type(held).__module__ == "numpy" and hasattr(held, "__array_interface__"):
        try:
            yield from _looked_at(torch.as_tensor(held))
        except TypeError:  # of strings, or objects
            yield str(held.shape).encode()  # type: ignore[attr-defined]
    elif isinstance(held, range):
        yield repr(held).encode()
    elif isinstance(held, list | tuple) and held and deep:
        yield from _listed(held, deep)
    elif isinstance(held, Subset):
        yield from _parts(held.indices, deep)
        yield from _parts(held.dataset, deep - 1)
    elif isinstance(held, ConcatDataset):
        yield from _parts(held.datasets, deep)
    elif deep == _DEEP:
        for name, value in sorted(getattr(held, "__dict__", {}).items()):
            if isinstance(value, torch.Tensor | list | tuple) or hasattr(value, "dtype"):
                yield name.encode()
                yield from _parts(value, deep - 1)


def _listed(held: Sequence[Any], deep: int) -> Iterator[bytes]:
    """Numbers, such as labels, and what has some; names may differ between hosts."""
    yield str(len(held)).encode()
    some = held[:: max(1, len(held) // _LOOKED_AT)]
    if all(isinstance(each, int | float) for each in some):
        yield repr(list(some)).encode()
    else:
        for each in some[:8]:
            yield from _parts(each, deep - 1)


def _looked_at(tensor: torch.Tensor) -> Iterator[bytes]:
    yield f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    if tensor.numel() and tensor.device.type != "meta" and tensor.layout == torch.strided:
        flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1]
        some = flat[:: max(1, len(flat) // _LOOKED_AT)].contiguous().cpu()
        yield bytes(some.reshape(-1).view(torch.uint8).tolist())
