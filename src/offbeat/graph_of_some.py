"""A graph without some of its workers: who is lost is bridged, and the weights stay balanced.

Without worker k, what i heard of j through k it hears directly:

    W'[i, j] = W[i, j] + W[i, k] W[k, j] / (1 - W[k, k])

That is the stochastic complement (Meyer, SIAM Review 31, 1989): the walk on the graph, watched only
where somebody is left. Rows and columns still sum to 1, so mixing leaves the mean of those who are
left as it is; a connected graph stays connected; and the eigenvalues of a symmetric one stay
between the least of before and 1. Where matrices are taken in turn, each is bridged by itself: a
worker that was heard in one of them and hears in another is not, and the graph may fall apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.graphs import Graph, check_connected


class GraphOfSome(Graph):
    """Mixing matrices of some of the workers, who are known by their ranks."""

    def __init__(self, matrices: Sequence[Tensor], ranks: Sequence[int]) -> None:
        super().__init__(matrices)
        self._ranks = tuple(ranks)
        self._at = {rank: at for at, rank in enumerate(ranks)}

    def received(self, rank: int, round: int) -> dict[int, float]:
        heard = super().received(self._at[rank], round)
        return {self._ranks[at]: weight for at, weight in heard.items()}

    def sent(self, rank: int, round: int) -> tuple[int, ...]:
        return tuple(self._ranks[at] for at in super().sent(self._at[rank], round))

    def heard_by(self, rank: int) -> float:
        return super().heard_by(self._at[rank])


def among(graph: Graph, ranks: Sequence[int]) -> Graph:
    """The graph of those who are left; ValueError if it falls apart."""
    lost = [rank for rank in range(graph.size) if rank not in ranks]
    if not lost:
        return graph
    matrices = list(graph.matrices)
    for rank in reversed(lost):
        matrices = [_without(matrix, rank) for matrix in matrices]
    check_connected(matrices, ranks)
    return GraphOfSome(matrices, ranks)


def _without(matrix: Tensor, at: int) -> Tensor:
    """The stochastic complement, without one worker.

    >>> third = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    >>> _without(third, 0).round(decimals=9).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    others = [each for each in range(len(matrix)) if each != at]
    rest = matrix[others][:, others]
    stays = float(matrix[at, at])
    if stays < 1:
        rest = rest + torch.outer(matrix[others, at], matrix[at, others]) / (1 - stays)
    return rest
