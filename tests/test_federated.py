"""Federated learning: partitions, scores, quotas and losses by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat import federated as fed
from offbeat.federated import gram, masked_svd, sampling


def draw_of(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LABELS = torch.randint(5, (400,), generator=draw_of())


# --- partitions and streams ------------------------------------------------------------------


@pytest.mark.parametrize(
    "split",
    [
        lambda seed: fed.dirichlet(LABELS, 4, 0.3, seed=seed),
        lambda seed: fed.dirichlet(LABELS, 4, 0.3, seed=seed, capped=True),
        lambda seed: fed.per_class(LABELS, 4, 2, seed=seed),
    ],
)
def test_every_sample_has_one_client_and_the_seed_says_which(
    split: Callable[[int], list[Tensor]],
) -> None:
    parts = split(7)
    assert torch.cat(parts).sort().values.tolist() == list(range(400))
    assert all(torch.equal(a, b) for a, b in zip(parts, split(7), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(parts, split(8), strict=True))


def test_a_cap_is_the_even_share_and_classes_per_client_are_exact() -> None:
    uneven = fed.dirichlet(LABELS, 4, 0.1, seed=1)
    assert max(len(each) for each in uneven) > 100
    capped = fed.dirichlet(LABELS, 4, 0.1, seed=1, capped=True)
    assert [len(each) for each in capped] == [100] * 4
    by_class = fed.per_class(LABELS, 4, 2)
    assert [len(set(LABELS[each].tolist())) for each in by_class] == [2] * 4


def test_small_betas_make_clients_unlike() -> None:
    def skew(beta: float) -> float:
        parts = fed.dirichlet(LABELS, 4, beta, at_least=0)
        return max(float((LABELS[each] == 0).sum()) for each in parts) / int((LABELS == 0).sum())

    assert skew(0.01) > 0.9
    assert skew(1000.0) < 0.3


def test_ten_classes_in_three_tasks_are_three_three_and_four() -> None:
    ten = torch.arange(10)
    assert fed.class_groups(ten, 3) == ((0, 1, 2), (3, 4, 5), (6, 7, 8, 9))
    shuffled = fed.class_groups(ten, 5, seed=2023)
    assert sorted(kind for group in shuffled for kind in group) == list(range(10))
    assert shuffled == fed.class_groups(ten, 5, seed=2023) != fed.class_groups(ten, 5, seed=1)


def test_a_task_has_its_classes_and_nothing_else() -> None:
    stream = fed.Stream.of(torch.arange(400), LABELS, tasks=2, clients=4, seed=3)
    for task, classes in enumerate(stream.classes):
        mine = torch.cat([stream.share(task, client)[0] for client in range(4)])
        assert len(mine) == len(set(mine.tolist()))
        assert set(LABELS[mine].tolist()) == set(classes)
    assert set(stream.seen(1)) == set(range(5))


# --- scores ----------------------------------------------------------------------------------


def _pooled(rows: Tensor, rank: int) -> Tensor:
    u, _, _ = torch.linalg.svd(rows, full_matrices=False)
    return u[:, :rank].square().sum(1)


def parts_of(dims: int = 16) -> list[Tensor]:
    draw = draw_of(5)
    return [torch.randn(n, dims, generator=draw).double() for n in (40, 7, 25)]


@pytest.mark.parametrize("rank", [3, 16])
def test_gram_and_unmasked_svd_give_the_leverage_of_the_pooled_features(rank: int) -> None:
    parts = parts_of()
    pooled = _pooled(torch.cat(parts), rank)
    whitening = gram.whitening(torch.stack([gram.gram(each) for each in parts]).sum(0), rank)
    by_gram = torch.cat([gram.leverage(each, whitening) for each in parts])
    masks = [masked_svd.orthogonal(len(each), draw_of(k)) for k, each in enumerate(parts)]
    shared = masked_svd.orthogonal(16, draw_of(99))
    uploads = [mask @ each @ shared for mask, each in zip(masks, parts, strict=True)]
    rows = masked_svd.rows(uploads, rank)
    by_svd = torch.cat([masked_svd.scores(u, p) for u, p in zip(rows, masks, strict=True)])
    torch.testing.assert_close(by_gram, pooled, rtol=0, atol=1e-10)
    torch.testing.assert_close(by_svd, pooled, rtol=0, atol=1e-10)
    assert float(by_gram.sum()) == pytest.approx(rank, abs=1e-10)
    masked = torch.cat(
        [masked_svd.scores(u, p, unmask=False) for u, p in zip(rows, masks, strict=True)]
    )
    assert float((masked - pooled).abs().max()) > 0.05  # the authors' code
    assert not any(torch.allclose(a, b) for a, b in zip(uploads, parts, strict=True))


def test_features_of_lower_rank_count_their_directions_only() -> None:
    parts = [each[:, :4] @ torch.randn(4, 16, generator=draw_of(1)).double() for each in parts_of()]
    whitening = gram.whitening(torch.stack([gram.gram(each) for each in parts]).sum(0), 16)
    total = sum(float(gram.leverage(each, whitening).sum()) for each in parts)
    assert total == pytest.approx(4, abs=1e-8)
    assert masked_svd.rows(parts, 16)[0].shape[1] == 4


def test_classes_of_one_direction_each_have_a_leverage_of_one_whatever_their_size() -> None:
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([400, 100, 30, 10]))
    rows = torch.eye(8).double()[labels] * (1 + torch.rand(540, 1, generator=draw_of()).double())
    scores = gram.leverage(rows, gram.whitening(gram.gram(rows), 4))
    sums = [float(scores[labels == kind].sum()) for kind in range(4)]
    assert sums == pytest.approx([1, 1, 1, 1], abs=1e-10)


# --- quotas and the draw ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "supply", "kept"),
    [
        (10, [7, 2, 9], [4, 2, 4]),
        (10, [50, 50, 50], [4, 3, 3]),
        (100, [1, 2, 3], [1, 2, 3]),
        (9, [100, 0, 2], [7, 0, 2]),
    ],
)
def test_quotas_are_exact_and_unmet_ones_go_on(
    budget: int, supply: list[int], kept: list[int]
) -> None:
    assert fed.quotas(budget, supply) == kept


def test_a_draw_over_clients_keeps_exactly_the_quotas() -> None:
    scores = torch.rand(60, generator=draw_of()).double()
    scores[:5] = 0.0  # they come last
    labels = torch.arange(60) % 3
    parts = [torch.arange(0, 50), torch.arange(50, 60), torch.zeros(0, dtype=torch.int64)]
    mine = [sampling.keys(scores[part], draw_of(k), k, 3) for k, part in enumerate(parts)]
    quotas = [7, 0, 20]
    by_client = [
        [key[labels[part] == c] for c in range(3)] for key, part in zip(mine, parts, strict=True)
    ]
    pooled = [torch.cat(each) for each in zip(*by_client, strict=True)]
    last = sampling.thresholds(pooled, quotas, lambda counts: counts)
    for keys, limit, quota in zip(pooled, last.tolist(), quotas, strict=True):
        assert int((keys <= limit).sum()) == quota
        assert quota == 0 or limit == keys.sort().values[quota - 1]


def test_high_scores_are_drawn_in_proportion() -> None:
    """The first of a draw is a sample with the probability of its score."""
    scores, firsts = torch.tensor([1.0, 2.0, 5.0]), [0, 0, 0]
    draw = draw_of(3)
    for _ in range(2000):
        firsts[int(sampling.keys(scores, draw, 0, 1).argmin())] += 1
    assert [each / 2000 for each in firsts] == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.04)


# --- losses ----------------------------------------------------------------------------------

ONES: dict[str, Any] = {"old": 1.0, "new": 1.0, "weight_old": 1.0, "weight_new": 1.0}


@pytest.mark.parametrize("form", ["paper", "code"])
def test_temperatures_and_weights_of_one_are_cross_entropy(form: Any) -> None:
    logits, labels = torch.randn(8, 6, generator=draw_of()), torch.tensor([0, 1, 2, 3, 3, 4, 5, 2])
    plain = nn.functional.cross_entropy(logits, labels)
    ones = fed.Temperatures(**ONES, form=form)
    assert ones.loss(logits, labels, 3).item() == pytest.approx(plain.item(), rel=1e-6)
    assert fed.Temperatures(form=form).loss(logits, labels, 0).item() == plain.item()


def test_temperatures_by_hand() -> None:
    """One old sample, one new; logits 1 and 2."""
    logits, labels = torch.tensor([[1.0, 2.0], [1.0, 2.0]]).double(), torch.tensor([0, 1])
    t = fed.Temperatures(old=0.5, new=2.0, weight_old=3.0, weight_new=1.0)
    z_old, z_new = 1 / 0.5, 2 / 2.0
    both = torch.tensor([z_old, z_new]).double().logsumexp(0)
    assert t.loss(logits, labels, 1).item() == pytest.approx(
        float(3 * (both - z_old) + (both - z_new)) / 2
    )
    code = fed.Temperatures(old=0.5, new=2.0, weight_old=3.0, weight_new=1.0, form="code")
    of_old = torch.tensor([z_old / 0.5, z_new / 0.5]).double()
    of_new = torch.tensor([z_old / 2, z_new / 2]).double()
    by_hand = 3 * (of_old.logsumexp(0) - of_old[0]) + (of_new.logsumexp(0) - of_new[1])
    assert code.loss(logits, labels, 1).item() == pytest.approx(float(by_hand) / 2)


def test_a_batch_of_new_samples_alone_has_one_mean() -> None:
    logits, labels = torch.randn(4, 6, generator=draw_of()), torch.tensor([3, 4, 5, 3])
    plain = nn.functional.cross_entropy(logits, labels)
    assert fed.Temperatures(**ONES).loss(logits, labels, 3).item() == pytest.approx(plain.item())


def test_logit_adjustment_with_equal_shares_is_cross_entropy() -> None:
    logits, labels = torch.randn(5, 3, generator=draw_of()), torch.tensor([0, 1, 2, 1, 0])
    plain = nn.functional.cross_entropy(logits, labels)
    even = fed.adjusted(logits, labels, torch.tensor([4, 4, 4]))
    assert even.item() == pytest.approx(plain.item(), rel=1e-6)
    rare = fed.adjusted(logits, torch.zeros(5).long(), torch.tensor([1, 50, 50]))
    assert rare > nn.functional.cross_entropy(logits, torch.zeros(5).long())
