"""Who mixes with whom, and by how much: graphs with weights; pure, and checked before the start.

A graph is a mixing matrix W: worker i makes sum_j W[i, j] y_j of what its neighbours send. Rows and
columns sum to 1, so that mixing leaves the mean of all workers as it is. One that changes in time
is a list of matrices, which are taken in turn.

    ring                    two neighbours, 1/3 each
    mesh                    a grid, as square as can be; a line, for a prime number of workers
    hypercube               i and i xor 2^p; for a power of two
    symmetric-exponential   i and i +- 4^p
    exponential             i hears i + 2^p: directed
    one-peer                i hears i + 2^p, for one p after the other, 1/2
    star, complete          through worker 0; everybody
    lazy-...                half as much of it: (I + W) / 2

Whether workers come to agree depends on the method, too. Without gradients every method here is a
linear recursion, whose matrix is A0 + lambda A1 for an eigenvalue lambda of W: see `Recursion`. The
mean apart, all of its roots must lie inside the unit circle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

Matrix = tuple[tuple[float, ...], ...]
Spec = str | tuple[Matrix, ...]
"""A graph as a setting: a name, or matrices that are taken in turn."""

_LAZY = "lazy-"
_CLOSE = 1e-6  # matrices may have been made in float32


@dataclass(frozen=True)
class Recursion:
    """What a method does without gradients to a disagreement between workers.

    The state (x, and what the method remembers) of the next round is A0 + lambda A1 times the
    present one, for an eigenvalue lambda of the mixing matrix.
    """

    fixed: Matrix
    mixed: Matrix

    def of(self, eigenvalue: complex) -> Tensor:
        """The small matrix of one eigenvalue."""
        fixed, mixed = (torch.tensor(each, dtype=torch.complex128) for each in vars(self).values())
        return fixed + eigenvalue * mixed

    def over(self, matrix: Tensor) -> Tensor:
        """The large matrix of all workers together, the mean apart."""
        size = len(matrix)
        apart = torch.eye(size, dtype=torch.float64) - 1 / size
        fixed, mixed = (torch.tensor(each, dtype=torch.float64) for each in vars(self).values())
        return torch.kron(fixed, apart) + torch.kron(mixed, matrix @ apart)


class Graph:
    """Mixing matrices, taken in turn."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.matrices = tuple(matrices)
        self.size = len(matrices[0])

    def received(self, rank: int, round: int) -> dict[int, float]:
        """Whom a worker hears in a round, itself included, and the weight of each; by rank."""
        return self._received[round % len(self.matrices)][rank]

    def sent(self, rank: int, round: int) -> tuple[int, ...]:
        """Which other workers hear it."""
        return self._sent[round % len(self.matrices)][rank]

    @cached_property
    def _received(self) -> list[list[dict[int, float]]]:
        return [
            [{j: w for j, w in enumerate(row) if w or j == i} for i, row in enumerate(rows)]
            for rows in (matrix.tolist() for matrix in self.matrices)
        ]

    @cached_property
    def _sent(self) -> list[list[tuple[int, ...]]]:
        ranks = range(self.size)
        return [
            [tuple(i for i in ranks if i != j and j in heard[i]) for j in ranks]
            for heard in self._received
        ]

    def heard_by(self, rank: int) -> float:
        """Of how many workers one hears in a round, itself included; the mean over the period."""
        counts = [len(heard[rank]) for heard in self._received]
        return sum(counts) / len(counts)

    @cached_property
    def flood_rounds(self) -> int:
        """After how many rounds all know what one has said in the first of them, at the latest."""
        return max(self._flood(first) for first in range(len(self.matrices)))

    def _flood(self, first: int) -> int:
        links = [(matrix != 0) | torch.eye(self.size, dtype=torch.bool) for matrix in self.matrices]
        known, rounds = torch.eye(self.size, dtype=torch.float64), 0
        while rounds < 1 or not known.all():
            step = links[(first + rounds) % len(links)].double()
            known, rounds = (step @ known > 0).double(), rounds + 1
        return rounds

    def radius(self, recursion: Recursion) -> tuple[float, complex | None]:
        """By what a disagreement grows in a round, at worst; and by which eigenvalue.

        There is no eigenvalue to name if the graph changes in time.
        """
        if self.size == 1:
            return 0.0, None
        if len(self.matrices) > 1:
            product = torch.eye(self.size * len(recursion.fixed), dtype=torch.float64)
            for matrix in self.matrices:
                product = recursion.over(matrix) @ product
            return _largest(product) ** (1 / len(self.matrices)), None
        apart = self.matrices[0] - 1 / self.size
        eigenvalues = torch.linalg.eigvals(apart).tolist()
        # The mean has become another 0 among them, which no method makes larger.
        return max(((_largest(recursion.of(each)), each) for each in eigenvalues), key=_first)


def _first(pair: tuple[float, complex]) -> float:
    return pair[0]


def _largest(matrix: Tensor) -> float:
    return float(torch.linalg.eigvals(matrix).abs().max())


# --- from what a user writes ---------------------------------------------------------------------


def spec_of(graph: Any) -> Spec:
    """What a user has handed in, as a setting: checked as far as it can be without the workers."""
    if isinstance(graph, str):
        if graph.removeprefix(_LAZY) not in _NAMED:
            names = ", ".join(map(repr, _NAMED))
            raise ValueError(
                f"graph must be one of {names}, one of these with {_LAZY!r} before it, a mixing "
                f"matrix, a list of them, or the neighbours by rank; got {graph!r}"
            )
        return graph
    if isinstance(graph, Mapping):
        return (_rows(_metropolis(_links(graph))),)
    try:
        parts = [torch.as_tensor(each, dtype=torch.float64) for each in graph]
        table = torch.stack(parts)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"graph must be a name, a square mixing matrix, a list of them, or the neighbours by "
            f"rank, as {{rank: neighbours}}; got {graph!r}"
        ) from error
    matrices = table[None] if table.dim() == 2 else table
    if matrices.dim() != 3 or matrices.shape[1] != matrices.shape[2] or not matrices.numel():
        shape = f"got the shape {tuple(table.shape)}; neighbours go as {{rank: neighbours}}"
        raise ValueError(f"a mixing matrix must be square, {shape}")
    return tuple(map(_rows, matrices))


@lru_cache(maxsize=16)
def graph_of(spec: Spec, size: int) -> Graph:
    """The graph of so many workers, checked: doubly stochastic, and connected."""
    if isinstance(spec, str):
        matrices = _NAMED[spec.removeprefix(_LAZY)](size)
        if spec.startswith(_LAZY):
            matrices = [(torch.eye(size, dtype=torch.float64) + each) / 2 for each in matrices]
        return Graph(matrices)
    matrices = [torch.tensor(each, dtype=torch.float64) for each in spec]
    if len(matrices[0]) != size:
        raise ValueError(
            f"the graph is one of {len(matrices[0])} workers, but the cluster has {size}"
        )
    for number, matrix in enumerate(matrices):
        which = f"mixing matrix {number}" if len(matrices) > 1 else "the mixing matrix"
        _check_doubly_stochastic(which, matrix)
    check_connected(matrices, range(size))
    return Graph(matrices)


def _check_doubly_stochastic(which: str, matrix: Tensor) -> None:
    if not matrix.isfinite().all() or matrix.min() < 0:
        i, j = divmod(int(matrix.nan_to_num(-math.inf, -math.inf).argmin()), len(matrix))
        raise ValueError(
            f"{which} has the weight {matrix[i, j]:g} in row {i}, column {j}: weights are 0 or more"
        )
    for what, sums in (("row", matrix.sum(1)), ("column", matrix.sum(0))):
        worst = int((sums - 1).abs().argmax())
        if abs(sums[worst] - 1) > _CLOSE:
            raise ValueError(
                f"{which} is not doubly stochastic: its {what} {worst} sums to {sums[worst]:g}, "
                "and not to 1, so the mean of all models would drift; {rank: neighbours} as a "
                "graph gives the weights of Metropolis, which are"
            )


def check_connected(matrices: Sequence[Tensor], ranks: Sequence[int]) -> None:
    """Raise ValueError unless these workers all hear of each other, if only through others."""
    size = len(ranks)
    links = sum(matrix + matrix.T for matrix in matrices) + torch.eye(size, dtype=torch.float64)
    reached = torch.eye(size, dtype=torch.float64)[0]
    for _ in range(size):
        reached = (links @ reached > 0).double()
    if not reached.all():
        apart = [rank for rank, there in zip(ranks, reached, strict=True) if not there]
        raise ValueError(
            f"the graph is not connected: workers {apart} never hear of worker {ranks[0]}, neither "
            "directly nor through others; add links between them"
        )


def check_stable(graph: Graph, recursion: Recursion, method: str, instead: str) -> None:
    """Raise ValueError if workers would not come to agree, with what to take instead."""
    radius, eigenvalue = graph.radius(recursion)
    if radius < 1 - 1e-9:
        return
    cause = "over one period of the graph"
    if eigenvalue is not None:
        number = f"{eigenvalue.real:.4g}"
        if abs(eigenvalue.imag) > 1e-9:
            number += f"{eigenvalue.imag:+.4g}i"
        cause = f"by the eigenvalue {number} of the mixing matrix"
    grows = "does not shrink" if radius < 1 + 1e-9 else f"grows by a factor of {radius:.4f} a round"
    raise ValueError(
        f"{method} is not stable on this graph of {graph.size} workers: what they disagree on "
        f"{grows}, {cause}; {instead}"
    )


# --- the graphs that have a name -----------------------------------------------------------------


def _empty(size: int) -> Tensor:
    return torch.zeros(size, size, dtype=torch.float64)


def _rows(matrix: Tensor) -> Matrix:
    return tuple(map(tuple, matrix.tolist()))


def _circulant(size: int, offsets: Iterable[int], weight: float | None = None) -> Tensor:
    """Worker i hears i + offset, for each one, all with the same weight; the rest is its own."""
    offsets = sorted({offset % size for offset in offsets} - {0})
    weight = 1 / (1 + len(offsets)) if weight is None else weight
    matrix = torch.eye(size, dtype=torch.float64) * (1 - weight * len(offsets))
    for offset in offsets:
        for rank in range(size):
            matrix[rank, (rank + offset) % size] = weight
    return matrix


def _ring(size: int) -> list[Tensor]:
    return [_circulant(size, (1, -1))]


def _powers(base: int, size: int) -> list[int]:
    return [base**p for p in range(size.bit_length()) if base**p < size]


def _exponential(size: int) -> list[Tensor]:
    return [_circulant(size, _powers(2, size))]


def _symmetric_exponential(size: int) -> list[Tensor]:
    near = [offset for offset in _powers(4, size) if offset <= size // 2]
    return [_circulant(size, [*near, *(-offset for offset in near)])]


def _one_peer(size: int) -> list[Tensor]:
    return [_circulant(size, [offset], 0.5) for offset in _powers(2, size)] or [_empty(1) + 1]


def _complete(size: int) -> list[Tensor]:
    return [_empty(size) + 1 / size]


def _star(size: int) -> list[Tensor]:
    matrix = torch.eye(size, dtype=torch.float64) * (1 - 1 / size)
    matrix[0, :] = matrix[:, 0] = 1 / size
    return [matrix]


def _hypercube(size: int) -> list[Tensor]:
    if size & (size - 1):
        raise ValueError(
            f"a hypercube has a power of two as its number of workers, got {size}: "
            "take 'symmetric-exponential'"
        )
    matrix = torch.eye(size, dtype=torch.float64)
    for rank in range(size):
        for offset in _powers(2, size):
            matrix[rank, rank ^ offset] = 1.0
    return [matrix / matrix.sum(1)]


def _mesh(size: int) -> list[Tensor]:
    rows = next(each for each in range(math.isqrt(size), 0, -1) if size % each == 0)
    columns, links = size // rows, torch.eye(size, dtype=torch.bool)
    for rank in range(size):
        if (rank + 1) % columns:
            links[rank, rank + 1] = links[rank + 1, rank] = True
        if rank + columns < size:
            links[rank, rank + columns] = links[rank + columns, rank] = True
    return [_metropolis(links)]


def _metropolis(links: Tensor) -> Tensor:
    """The weights of Metropolis: symmetric, whatever the degrees."""
    degrees = links.sum(1).double()
    matrix = links / torch.maximum(degrees[:, None], degrees[None, :])
    matrix.fill_diagonal_(0.0)
    return matrix + torch.diag(1 - matrix.sum(1))


def _links(neighbours: Mapping[Any, Iterable[Any]]) -> Tensor:
    size = len(neighbours)
    links = torch.eye(size, dtype=torch.bool)
    if set(neighbours) != set(range(size)):
        raise ValueError(
            f"neighbours must be given for each of the ranks 0..{size - 1}, "
            f"got {sorted(neighbours, key=str)}"
        )
    for rank, others in neighbours.items():
        for other in others:
            if other not in neighbours:
                raise ValueError(
                    f"worker {rank} has the neighbour {other!r}, but the graph has the "
                    f"{size} workers 0..{size - 1}"
                )
            links[rank, other] = links[other, rank] = True
    return links


_NAMED: dict[str, Callable[[int], list[Tensor]]] = {
    "ring": _ring,
    "mesh": _mesh,
    "hypercube": _hypercube,
    "symmetric-exponential": _symmetric_exponential,
    "exponential": _exponential,
    "one-peer": _one_peer,
    "star": _star,
    "complete": _complete,
}
