"""Federated learning: partitions, scores, quotas and losses by hand, and clients in two worlds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from offbeat import federated as fed
from offbeat.clusters import Cluster
from offbeat.clusters.events import Crash
from offbeat.errors import WorkerLostError
from offbeat.federated import gram, masked_svd, sampling
from offbeat.federated.features import features
from offbeat.lab import digits
from offbeat.testing import processes
from offbeat.worlds import enter_world

CLIENTS = 3


def _draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LABELS = torch.randint(5, (400,), generator=_draw())


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


def _parts(dims: int = 16) -> list[Tensor]:
    draw = _draw(5)
    return [torch.randn(n, dims, generator=draw).double() for n in (40, 7, 25)]


@pytest.mark.parametrize("rank", [3, 16])
def test_gram_and_unmasked_svd_give_the_leverage_of_the_pooled_features(rank: int) -> None:
    parts = _parts()
    pooled = _pooled(torch.cat(parts), rank)
    whitening = gram.whitening(torch.stack([gram.gram(each) for each in parts]).sum(0), rank)
    by_gram = torch.cat([gram.leverage(each, whitening) for each in parts])
    masks = [masked_svd.orthogonal(len(each), _draw(k)) for k, each in enumerate(parts)]
    shared = masked_svd.orthogonal(16, _draw(99))
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
    parts = [each[:, :4] @ torch.randn(4, 16, generator=_draw(1)).double() for each in _parts()]
    whitening = gram.whitening(torch.stack([gram.gram(each) for each in parts]).sum(0), 16)
    total = sum(float(gram.leverage(each, whitening).sum()) for each in parts)
    assert total == pytest.approx(4, abs=1e-8)
    assert masked_svd.rows(parts, 16)[0].shape[1] == 4


def test_classes_of_one_direction_each_have_a_leverage_of_one_whatever_their_size() -> None:
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([400, 100, 30, 10]))
    rows = torch.eye(8).double()[labels] * (1 + torch.rand(540, 1, generator=_draw()).double())
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
    scores = torch.rand(60, generator=_draw()).double()
    scores[:5] = 0.0  # they come last
    labels = torch.arange(60) % 3
    parts = [torch.arange(0, 50), torch.arange(50, 60), torch.zeros(0, dtype=torch.int64)]
    mine = [sampling.keys(scores[part], _draw(k), k, 3) for k, part in enumerate(parts)]
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
    draw = _draw(3)
    for _ in range(2000):
        firsts[int(sampling.keys(scores, draw, 0, 1).argmin())] += 1
    assert [each / 2000 for each in firsts] == pytest.approx([1 / 8, 2 / 8, 5 / 8], abs=0.04)


# --- losses ----------------------------------------------------------------------------------

ONES: dict[str, Any] = {"old": 1.0, "new": 1.0, "weight_old": 1.0, "weight_new": 1.0}


@pytest.mark.parametrize("form", ["paper", "code"])
def test_temperatures_and_weights_of_one_are_cross_entropy(form: Any) -> None:
    logits, labels = torch.randn(8, 6, generator=_draw()), torch.tensor([0, 1, 2, 3, 3, 4, 5, 2])
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
    logits, labels = torch.randn(4, 6, generator=_draw()), torch.tensor([3, 4, 5, 3])
    plain = nn.functional.cross_entropy(logits, labels)
    assert fed.Temperatures(**ONES).loss(logits, labels, 3).item() == pytest.approx(plain.item())


def test_logit_adjustment_with_equal_shares_is_cross_entropy() -> None:
    logits, labels = torch.randn(5, 3, generator=_draw()), torch.tensor([0, 1, 2, 1, 0])
    plain = nn.functional.cross_entropy(logits, labels)
    even = fed.adjusted(logits, labels, torch.tensor([4, 4, 4]))
    assert even.item() == pytest.approx(plain.item(), rel=1e-6)
    rare = fed.adjusted(logits, torch.zeros(5).long(), torch.tensor([1, 50, 50]))
    assert rare > nn.functional.cross_entropy(logits, torch.zeros(5).long())


# --- clients ---------------------------------------------------------------------------------


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def _learn(
    method: Callable[[], fed.Method], tasks: int = 2, size: int = 240, **settings: Any
) -> tuple[fed.History, list[Tensor], fed.Method]:
    """Be a client: what came of it, its model and its method."""
    torch.set_num_threads(1)
    train_x, train_y, test_x, test_y = digits.split()
    few = train_y < 4
    train_x, train_y = train_x[few][:size], train_y[few][:size]
    few = test_y < 4
    stream = fed.Stream.of(train_x, train_y, tasks=tasks, clients=CLIENTS, seed=1)
    model, mine = _net(), method()
    chosen = fed.Settings(**{"rounds": 3, "batch": 16, "lr": 0.1, **settings})
    history = fed.learn(model, stream, mine, chosen, (test_x[few], test_y[few]))
    return history, [each.detach() for each in model.parameters()], mine


def _virtual(
    method: Callable[[], fed.Method], cluster: Any = "uniform-8", **more: Any
) -> list[Any]:
    return offbeat.run(lambda: _learn(method, **more), cluster, workers=CLIENTS).results


def _budget_30() -> fed.Method:
    return fed.FedCBDR(budget=30)


METHODS: dict[str, Callable[[], fed.Method]] = {
    "finetune": fed.Method,
    "ewc": fed.EWC,
    "lwf": fed.LwF,
    "importance": lambda: fed.Importance(budget=31),
    "uniform": lambda: fed.Uniform(budget=31),
    "joint": fed.Joint,
    "fedcbdr": lambda: fed.FedCBDR(budget=31),
    "svd": lambda: fed.FedCBDR(budget=31, scores="svd", balance="adjusted"),
}


@pytest.mark.parametrize("name", METHODS)
def test_all_clients_end_with_the_same_model_and_the_buffer_with_its_budget(name: str) -> None:
    results = _virtual(METHODS[name])
    histories = [each[0] for each in results]
    assert all(
        torch.equal(a, b)
        for _, model, _ in results[1:]
        for a, b in zip(results[0][1], model, strict=True)
    )
    assert len(histories[0].seen_accuracy) == 2
    assert histories[1].accuracy == []
    kept = sum(histories[0].histograms[-1])
    assert kept == sum(len(each[2].buffer) for each in results)
    if name in ("uniform", "importance"):  # equal parts: a client with fewer samples keeps fewer
        assert 40 < kept <= 62
    else:
        assert kept == {"finetune": 0, "ewc": 0, "lwf": 0, "joint": 240}.get(name, 62)
    if name in ("fedcbdr", "svd"):
        assert histories[0].histograms[-1] == [16, 15, 16, 15]


def test_gram_and_svd_keep_the_same_samples() -> None:
    """The draws of a client come after those of its mask, so masks are drawn elsewhere here."""
    parts, rank = _parts(), 4

    def client(scores: Any) -> Tensor:
        world = enter_world()
        mine, channel = parts[world.rank], world.channel("scores")
        if scores == "gram":
            total = gram.gram(mine)
            channel.all_reduce(total).wait()
            return gram.leverage(mine, gram.whitening(total, rank))
        return masked_svd.leverage(
            channel, world.rank, mine, rank, private=_draw(world.rank), shared=_draw(9)
        )[0]

    by_gram, by_svd = (
        torch.cat(offbeat.run(lambda which=which: client(which), "uniform-8", workers=3).results)
        for which in ("gram", "svd")
    )
    torch.testing.assert_close(by_gram, by_svd, rtol=0, atol=1e-10)


def test_replay_forgets_less_than_fine_tuning() -> None:
    few, none = (_virtual(METHODS[name], rounds=4)[0][0] for name in ("fedcbdr", "finetune"))
    assert few.seen_accuracy[-1] > none.seen_accuracy[-1] + 0.2
    assert few.forgetting < none.forgetting


def test_one_round_of_averaging_is_the_weighted_mean_by_hand() -> None:
    sizes = (4, 8, 12)

    def client() -> Tensor:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        mine = sizes[offbeat.rank()]
        with offbeat.attach(model, optimizer, fed.FedAvg(steps=mine // 4, weight=mine)) as dp:
            for _ in dp.rounds(1):
                optimizer.zero_grad()
                (model.weight.sum() * (1 + offbeat.rank())).backward()
                optimizer.step()
        return model.weight.detach()

    results = offbeat.run(client, "uniform-8", workers=3).results
    ends = [1 - (1 + rank) * (mine // 4) for rank, mine in enumerate(sizes)]  # 0, -3, -8
    mean = sum(end * mine for end, mine in zip(ends, sizes, strict=True)) / sum(sizes)
    assert [each.item() for each in results] == pytest.approx([mean] * 3)


def test_a_quorum_does_not_wait_for_a_slow_client() -> None:
    waits, quorum = (
        _virtual(_budget_30, "two-slow-of-eight", quorum=each, rounds=6) for each in ("all", 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(quorum[0][1], quorum[2][1], strict=True))
    assert quorum[0][0].seconds[-1] < waits[0][0].seconds[-1]
    assert waits[0][0].histograms == quorum[0][0].histograms == [[15, 15], [15, 15, 15, 15]]


def test_a_fraction_of_the_clients_takes_part() -> None:
    results = _virtual(_budget_30, fraction=0.5)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[2][1], strict=True))
    assert results[0][0].histograms[-1] == [15, 15, 15, 15]


def _really() -> tuple[fed.History, list[Tensor]]:
    return _learn(_budget_30)[:2]


@pytest.mark.real
def test_real_processes_learn_what_virtual_clients_do() -> None:
    real = [each.result for each in processes(_really, CLIENTS)]
    virtual = _virtual(_budget_30)
    for (history, model), (expected, same, _) in zip(real, virtual, strict=True):
        assert history.histograms == expected.histograms
        assert history.seen_accuracy == pytest.approx(expected.seen_accuracy, abs=0.02)
        for mine, other in zip(model, same, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


# --- what goes wrong -------------------------------------------------------------------------


def test_a_client_without_samples_of_a_class_or_of_a_task_takes_part() -> None:
    def client() -> Any:
        x, y = torch.randn(60, 64, generator=_draw()), torch.arange(60) % 4
        first = y < 2
        parts = tuple(
            (here[:20], here[20:], here[:0])
            for here in (first.nonzero().flatten(), (~first).nonzero().flatten())
        )
        stream = fed.Stream(x, y, ((0, 1), (2, 3)), parts)
        model, method = _net(), fed.FedCBDR(budget=6)
        return fed.learn(model, stream, method, fed.Settings(rounds=2), (x, y)).histograms

    for quorum_of_all in offbeat.run(client, "uniform-8", workers=3).results:
        assert quorum_of_all == [[3, 3], [3, 3, 3, 3]]


def test_bad_input_is_named() -> None:
    y = torch.tensor([0, 0, 1, 1])
    with pytest.raises(ValueError, match="beta of a Dirichlet split"):
        fed.dirichlet(y, 2, 0.0)
    with pytest.raises(ValueError, match="cannot give 1 to each of 5 clients"):
        fed.dirichlet(y, 5, 1.0)
    with pytest.raises(ValueError, match="leave some of the 2"):
        fed.per_class(y, 1, 1)
    with pytest.raises(ValueError, match="tasks must be between 1 and the 2 classes"):
        fed.class_groups(y, 3)
    with pytest.raises(ValueError, match="no sample has the label 7"):
        fed.Stream.of(y, y, tasks=2, clients=2, classes=((0, 1), (7,)))
    with pytest.raises(ValueError, match="buffer of 2 samples cannot hold one of each of 3"):
        fed.quotas(2, [5, 5, 5])
    with pytest.raises(ValueError, match='goes with quorum="all"'):
        fed.Settings(fraction=0.5, quorum=2)
    with pytest.raises(ValueError, match="1 of 2 samples of client 4"):
        features(_net(), torch.tensor([[float("nan")] * 64, [0.0] * 64]), client=4)
    with pytest.raises(ValueError, match="there are 2 workers"):
        offbeat.run(lambda: _learn(fed.Method), "uniform-8", workers=2)


def test_a_client_that_is_lost_between_tasks_is_left_out() -> None:
    """It has given its part of the scores, and is gone when samples are chosen."""
    cluster = Cluster.load("uniform-8").resized(CLIENTS)
    asked: list[float] = []

    class Slow(fed.FedCBDR):
        """Notes when scores are summed up."""

        def _leverage(self, *arguments: Any) -> Tensor:
            scores = super()._leverage(*arguments)
            world = self.client.world
            asked.append(world.now())
            world.sleep_until(world.now() + 10.0)  # time for the crash, between score and draw
            return scores

    def method() -> fed.Method:
        return Slow(budget=30)

    def results(*crashes: Crash) -> list[Any]:
        asked.clear()
        where = cluster.model_copy(update={"events": crashes})
        return offbeat.run(lambda: _learn(method, survive=True), where).results

    results()
    moment = min(asked) + 5.0
    survivors = results(Crash(kind="crash", worker=2, at_s=moment))
    assert survivors[2] is None
    assert len(asked) == 3 + 2 + 2  # the first task's were made twice
    for history, _, _ in survivors[:2]:  # of the last class the two have 12 samples in all
        assert history.histograms[-1] == [15, 15, 18, 12]
    with pytest.raises(WorkerLostError):
        lost = Crash(kind="crash", worker=2, at_s=moment)
        where = cluster.model_copy(update={"events": (lost,)})
        offbeat.run(lambda: _learn(method), where)
