"""Graphs: their matrices, what is refused, and on which of them a method is stable."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat
from offbeat.graphs import Graph, Recursion, graph_of, spec_of
from offbeat.merges import Corrected, HeavyBall, Mix, Tracking
from offbeat.rounds.roll import Roll

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]
NAMES = [
    *("ring", "mesh", "symmetric-exponential", "exponential", "one-peer", "star", "complete"),
    *("lazy-ring", "lazy-one-peer", "hypercube"),
]
DPSGD = Mix.recursion(0.0)


def _rho(name: str, size: int) -> float:
    return graph_of(name, size).radius(DPSGD)[0]


# --- matrices ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_every_named_graph_keeps_the_mean_and_brings_workers_together(name: str, size: int) -> None:
    if name == "hypercube" and size & (size - 1):
        with pytest.raises(ValueError, match=f"a power of two .* got {size}"):
            graph_of(name, size)
        return
    graph = graph_of(name, size)
    for matrix in graph.matrices:
        assert matrix.shape == (size, size)
        assert matrix.min() >= 0
        for sums in (matrix.sum(0), matrix.sum(1)):
            assert (sums - 1).abs().max() < 1e-12
    assert _rho(name, size) < 1 - 1e-3 or (name, size) == ("one-peer", 1)


def test_the_matrices_of_a_few_graphs_by_hand() -> None:
    third = 1 / 3
    [ring] = graph_of("ring", 4).matrices
    assert ring.tolist() == [
        pytest.approx(row)
        for row in (
            [third, third, 0, third],
            [third, third, third, 0],
            [0, third, third, third],
            [third, 0, third, third],
        )
    ]
    assert graph_of("ring", 2).matrices[0].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    first, second = graph_of("one-peer", 4).matrices
    assert first.tolist() == [
        [0.5, 0.5, 0, 0],
        [0, 0.5, 0.5, 0],
        [0, 0, 0.5, 0.5],
        [0.5, 0, 0, 0.5],
    ]
    assert second.tolist() == [
        [0.5, 0, 0.5, 0],
        [0, 0.5, 0, 0.5],
        [0.5, 0, 0.5, 0],
        [0, 0.5, 0, 0.5],
    ]
    [mesh] = graph_of("mesh", 6).matrices  # 2 rows of 3: corners have degree 3, the middle 4
    assert mesh[0].tolist() == pytest.approx([5 / 12, 1 / 4, 0, third, 0, 0])
    assert torch.equal(mesh, mesh.T)
    [star] = graph_of("star", 4).matrices
    assert star.tolist() == [
        [0.25, 0.25, 0.25, 0.25],
        [0.25, 0.75, 0, 0],
        [0.25, 0, 0.75, 0],
        [0.25, 0, 0, 0.75],
    ]
    [near] = graph_of("symmetric-exponential", 8).matrices  # 1 and 4 apart
    assert near[0].tolist() == [0.25, 0.25, 0, 0, 0.25, 0, 0, 0.25]


@pytest.mark.parametrize("size", [4, 8, 16, 32, 64])
def test_how_fast_workers_agree_is_what_the_formulas_say(size: int) -> None:
    assert _rho("exponential", size) == pytest.approx(1 - 2 / (1 + math.ceil(math.log2(size))))
    assert _rho("ring", size) == pytest.approx((1 + 2 * math.cos(2 * math.pi / size)) / 3)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_the_one_peer_graphs_of_one_period_are_the_exact_mean(size: int) -> None:
    product = torch.eye(size, dtype=torch.float64)
    for matrix in graph_of("one-peer", size).matrices:
        product = matrix @ product
    assert (product - 1 / size).abs().max() < 1e-15


def test_whom_a_worker_hears_and_who_hears_it() -> None:
    graph = graph_of("one-peer", 8)
    assert graph.received(6, round=1) == {0: 0.5, 6: 0.5}
    assert graph.sent(0, round=1) == (6,)
    assert graph.received(6, round=4) == graph.received(6, round=1)
    assert graph_of("ring", 8).received(0, 5) == pytest.approx({0: 1 / 3, 1: 1 / 3, 7: 1 / 3})


@pytest.mark.parametrize(
    ("name", "size", "rounds"),
    [("ring", 8, 4), ("ring", 7, 3), ("complete", 5, 1), ("star", 9, 2), ("one-peer", 8, 3)],
)
def test_after_how_many_rounds_all_know(name: str, size: int, rounds: int) -> None:
    assert graph_of(name, size).flood_rounds == rounds


def test_neighbours_by_rank_get_the_weights_of_metropolis() -> None:
    [matrix] = graph_of(spec_of({0: [1], 1: [2], 2: []}), 3).matrices
    assert torch.equal(matrix, matrix.T)
    assert matrix.tolist()[1] == pytest.approx([1 / 3, 1 / 3, 1 / 3])


# --- bad input --------------------------------------------------------------------------------

_PAIRS = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]


@pytest.mark.parametrize(
    ("graph", "size", "words"),
    [
        ("rign", 4, r"graph must be one of 'ring', .* got 'rign'"),
        ([[0.5, 0.5]], 2, r"must be square, got the shape \(1, 2\)"),
        (3, 2, "graph must be a name, .* got 3"),
        ([[0.5, 0.6], [0.5, 0.4]], 2, "not doubly stochastic: its row 0 sums to 1.1,"),
        ([[0.9, 0.1], [0.4, 0.6]], 2, "its column [01] sums to (1.3|0.7), and not to 1"),
        ([[1.5, -0.5], [-0.5, 1.5]], 2, "the weight -0.5 in row 0, column 1: weights are 0 or"),
        ([[math.inf, 0], [0, 1]], 2, "the weight inf in row 0, column 0"),
        ([[math.nan, 1], [1, 0]], 2, "the weight nan in row 0, column 0"),
        ([[0.5, 0.5], [0.5, 0.5]], 3, "one of 2 workers, but the cluster has 3"),
        (_PAIRS, 4, r"not connected: workers \[2, 3\] never hear of worker 0"),
        ({0: [1], 1: [0], 2: [3], 3: []}, 4, r"not connected: workers \[2, 3\]"),
        ({0: [1], 1: [9]}, 2, "worker 1 has the neighbour 9, but the graph has the 2 workers 0..1"),
        ({0: [1], 2: [0]}, 2, r"for each of the ranks 0..1, got \[0, 2\]"),
        ([[0.0, 1.0], [1.0, 0.0]], 2, "does not shrink, by the eigenvalue -1 of"),
        ("hypercube", 6, "a power of two as its number of workers, got 6"),
    ],
)
def test_a_graph_that_cannot_be_is_refused_with_its_values(
    graph: Any, size: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        offbeat.DPSGD(graph).check(size)


def test_nobody_waits_before_a_graph_is_refused() -> None:
    def worker() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if offbeat.rank() == 0:  # the others never come
            offbeat.attach(model, optimizer, offbeat.DPSGD(_PAIRS))

    with pytest.raises(ValueError, match="not connected"):
        offbeat.run(worker, "uniform-8", workers=4)


def test_a_matrix_may_be_a_tensor_and_is_part_of_what_workers_compare() -> None:
    matrix = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    asked = offbeat.DPSGD(matrix)
    assert asked == offbeat.DPSGD(matrix.tolist()) == offbeat.DPSGD([matrix])
    assert repr(asked) == "DPSGD(graph=(((0.75, 0.25), (0.25, 0.75)),))"
    asked.check(2)


@pytest.mark.parametrize("beta", [-0.1, 1.0, 2, math.nan, "large", True])
def test_a_momentum_that_cannot_be_is_refused(beta: Any) -> None:
    with pytest.raises(ValueError, match=f"beta must be 0 or more and below 1, got {beta!r}"):
        offbeat.DecentLaM(beta=beta)


# --- which methods are stable on which graphs -------------------------------------------------


@pytest.mark.parametrize(
    ("size", "radius"), [(4, 1.156), (8, 1.238), (16, 1.252), (32, 1.243), (64, 1.231)]
)
def test_decentlam_diverges_on_directed_graphs(size: int, radius: float) -> None:
    found, eigenvalue = graph_of("exponential", size).radius(HeavyBall.recursion(0.9))
    assert found == pytest.approx(radius, abs=1e-3)
    assert eigenvalue is not None
    assert abs(eigenvalue.imag) > 0.1
    with pytest.raises(ValueError, match=r"DecentLaM\(beta=0.9\) is not stable .* take a symm"):
        offbeat.DecentLaM("exponential").check(size)


@pytest.mark.parametrize("name", ["ring", "mesh", "symmetric-exponential", "hypercube", "complete"])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_decentlam_is_stable_on_symmetric_graphs(name: str, size: int) -> None:
    offbeat.DecentLaM(name).check(size)
    radius, _ = graph_of(name, size).radius(HeavyBall.recursion(0.9))
    assert radius <= math.sqrt(0.9) + 1e-6


def _matchings(size: int) -> list[Tensor]:
    """Everybody with i xor 1, then with i xor 2, ..."""
    found = []
    for bit in range(size.bit_length() - 1):
        matrix = torch.eye(size, dtype=torch.float64) / 2
        for rank in range(size):
            matrix[rank, rank ^ (1 << bit)] = 0.5
        found.append(matrix)
    return found


@pytest.mark.parametrize("size", [4, 8, 16])
def test_decentlam_diverges_on_graphs_that_change_in_time(size: int) -> None:
    with pytest.raises(ValueError, match=r"a factor of .* over one period"):
        offbeat.DecentLaM("one-peer").check(size)
    pairs = offbeat.DecentLaM(_matchings(size))
    if size == 4:
        pairs.check(size)
    else:
        with pytest.raises(ValueError, match="over one period"):
            pairs.check(size)


@pytest.mark.parametrize(
    ("name", "size", "stable"),
    [
        ("lazy-ring", 8, True),
        ("ring", 8, False),  # its smallest eigenvalue is -1/3
        ("ring", 7, True),
        ("exponential", 8, False),
        ("one-peer", 8, False),
        ("lazy-one-peer", 8, True),
        ("lazy-one-peer", 16, True),
        ("lazy-one-peer", 32, False),
        ("lazy-mesh", 12, True),
    ],
)
def test_edm_needs_eigenvalues_above_a_negative_third(name: str, size: int, stable: bool) -> None:
    if stable:
        offbeat.EDM(name).check(size)
    else:
        with pytest.raises(ValueError, match=r"EDM\(beta=0.9\) .* take a lazy symmetric graph"):
            offbeat.EDM(name).check(size)


def test_the_bound_of_edm_is_where_the_roots_leave_the_circle() -> None:
    for eigenvalue, stable in ((-1 / 3 + 1e-6, True), (-1 / 3 - 1e-6, False), (0.999, True)):
        largest = torch.linalg.eigvals(Corrected.recursion(0.0).of(eigenvalue)).abs().max()
        assert bool(largest < 1) == stable


@pytest.mark.parametrize("method", [offbeat.DPSGD, offbeat.DmSGD, offbeat.MomentumTracking])
@pytest.mark.parametrize("name", NAMES)
def test_the_others_are_stable_on_every_named_graph(method: Any, name: str) -> None:
    method(name).check(8)


@pytest.mark.parametrize("merge", [Mix, HeavyBall, Corrected, Tracking])
def test_one_matrix_twice_is_as_stable_as_once(merge: type[Mix]) -> None:
    """The test for graphs that change in time agrees with the one for those that do not."""
    [matrix] = graph_of("mesh", 6).matrices
    recursion: Recursion = merge.recursion(0.9)
    once, _ = Graph([matrix]).radius(recursion)
    twice, _ = Graph([matrix, matrix]).radius(recursion)
    assert twice == pytest.approx(once, abs=1e-5)


# --- who is absent ----------------------------------------------------------------------------


def test_all_draw_the_same_from_the_bells() -> None:
    roll = Roll(3)
    roll.hear("away", 4, 2)
    assert roll.absent == {2: "away"}
    assert roll.rounds == 0
    roll.hear("wanted", 6, 0)
    roll.hear("back", 6, 2)
    assert (roll.absent, roll.rounds) == ({}, 6)
    for rank, rounds in ((0, 7), (1, 9), (2, 8)):
        assert roll.pauses == 0
        roll.hear("paused", rounds, rank)
    assert (roll.pauses, roll.paused, roll.rounds, roll.absent) == (1, (0, 1, 2), 9, {})
    roll.hear("left", 9, 1)
    roll.hear("paused", 9, 0)
    roll.hear("paused", 10, 2)
    assert (roll.pauses, roll.paused, roll.absent) == (2, (0, 2), {1: "left"})
    roll.hear("left", 12, 0)
    assert not roll.over
    roll.hear("left", 11, 2)
    assert (roll.over, roll.rounds) == (True, 12)


def test_lists_of_neighbours_are_told_to_be_handed_in_by_rank() -> None:
    for lists in ([[1], [2], [3], [0]], [[1, 2], [0], [3], [0]]):
        with pytest.raises(ValueError, match=r"\{rank: neighbours\}"):
            spec_of(lists)


def test_a_neighbour_of_one_side_is_one_of_both() -> None:
    assert spec_of({0: [1, 2], 1: [], 2: []}) == spec_of({0: [1, 2], 1: [0], 2: [0]})
