"""Which client has which samples: the usual ways to make clients unlike, exact and seeded.

Every sample goes to one client. The same labels and seed give the same partition, on every client,
so that nobody has to tell the others.

    dirichlet    every class is split by shares drawn from Dirichlet(beta): small betas, unlike
                 clients; capped, nobody gets more than its part of all, as in FedCBDR's code
    per_class    every client has samples of so many classes only, in equal parts
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

_TRIES = 1000


def dirichlet(
    labels: Tensor,
    clients: int,
    beta: float,
    *,
    seed: int = 0,
    capped: bool = False,
    at_least: int = 1,
) -> list[Tensor]:
    """Split every class over clients by Dirichlet(beta); return the samples of each, in order.

    It is drawn again until every client has `at_least` so many. With `capped`, what a client would
    have above ceil(n / clients) samples goes to those that have room.
    """
    _check(labels, clients)
    if not (beta > 0 and math.isfinite(beta)):
        raise ValueError(f"beta of a Dirichlet split must be a number above 0, got {beta}")
    if at_least * clients > len(labels):
        raise ValueError(
            f"{len(labels)} samples cannot give {at_least} to each of {clients} clients: "
            "take fewer clients, or at_least=0"
        )
    draw = torch.Generator().manual_seed(seed)
    for _ in range(_TRIES):
        parts = _drawn(labels, clients, beta, draw)
        parts = _capped(parts, math.ceil(len(labels) / clients)) if capped else parts
        if min(len(each) for each in parts) >= at_least:
            return [each.sort().values for each in parts]
    raise ValueError(
        f"{_TRIES} draws of Dirichlet({beta}) left one of {clients} clients with fewer than "
        f"{at_least} samples: take a larger beta, or at_least=0"
    )


def per_class(
    labels: Tensor, clients: int, classes_per_client: int, *, seed: int = 0
) -> list[Tensor]:
    """Give every client samples of so many classes; a class is split evenly among its clients.

    Classes go round in a drawn order, so that each has as many clients as any other, or one more.
    """
    _check(labels, clients)
    kinds = kinds_of(labels)
    if not 1 <= classes_per_client <= len(kinds):
        raise ValueError(
            f"classes_per_client must be between 1 and the {len(kinds)} classes, "
            f"got {classes_per_client}"
        )
    if clients * classes_per_client < len(kinds):
        raise ValueError(
            f"{clients} clients of {classes_per_client} classes leave some of the {len(kinds)} "
            "classes to nobody: take more classes_per_client"
        )
    draw = torch.Generator().manual_seed(seed)
    order = [kinds[place] for place in torch.randperm(len(kinds), generator=draw).tolist()]
    owners: dict[int, list[int]] = {kind: [] for kind in kinds}
    for place in range(clients * classes_per_client):
        owners[order[place % len(order)]].append(place // classes_per_client)
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for kind in kinds:
        pieces = _shuffled(labels, kind, draw).tensor_split(len(owners[kind]))
        for client, piece in zip(owners[kind], pieces, strict=True):
            parts[client].append(piece)
    return [torch.cat(each).sort().values for each in parts]


def kinds_of(labels: Tensor) -> list[int]:
    """The classes that there are, in order."""
    return sorted(set(labels.tolist()))


def _drawn(labels: Tensor, clients: int, beta: float, draw: torch.Generator) -> list[Tensor]:
    parts: list[list[Tensor]] = [[] for _ in range(clients)]
    for kind in kinds_of(labels):
        its = _shuffled(labels, kind, draw)
        gammas = torch._standard_gamma(torch.full((clients,), beta).double(), draw)
        shares = gammas / gammas.sum() if gammas.sum() > 0 else torch.full_like(gammas, 1 / clients)
        ends = (shares.cumsum(0) * len(its)).long().tolist()
        for client, (begin, end) in enumerate(pairwise([0, *ends[:-1], len(its)])):
            parts[client].append(its[begin:end])
    return [torch.cat(each) for each in parts]


def _capped(parts: list[Tensor], most: int) -> list[Tensor]:
    """Move what is above `most` to those that have the fewest."""
    left = torch.cat([each[most:] for each in parts])
    parts = [each[:most] for each in parts]
    for client in sorted(range(len(parts)), key=lambda client: len(parts[client])):
        room = most - len(parts[client])
        parts[client], left = torch.cat([parts[client], left[:room]]), left[room:]
    return parts


def _shuffled(labels: Tensor, kind: int, draw: torch.Generator) -> Tensor:
    its = (labels == kind).nonzero().flatten()
    return its[torch.randperm(len(its), generator=draw)]


def _check(labels: Tensor, clients: int) -> None:
    if labels.ndim != 1 or labels.is_floating_point() or not len(labels):
        raise ValueError(
            "labels must be a vector of whole numbers, one for each sample, "
            f"got shape {tuple(labels.shape)} of {labels.dtype}"
        )
    if clients < 1:
        raise ValueError(f"there must be 1 client or more, got {clients}")
