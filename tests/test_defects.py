"""What 0.1 got wrong, seen from the outside: one promise each, by public names only.

Each of these failed or hung with 0.1, under some algorithms if not all.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import loss, net, parameters, same, sgd
from pool import Ended, Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import WorkerLostError
from offbeat.testing import processes

LIMIT_S = 30.0
"""Of what takes a second or two on a quiet machine."""

WAIT_FREE = "WaitFreeLocalSGD()"
ALGORITHMS = (
    "SyncSGD()",
    "EagerSGD()",
    "EagerSGD('solo')",
    "EagerSGD('majority')",
    "MSyncSGD(2)",
    "ABSSGD()",
    "DropCompute(4)",
    "NonblockingSGD(4)",
    "LBBSP(4)",
    "LocalSGD(4)",
    WAIT_FREE,
    "WAGMASGD()",
)


def _algorithm(words: str) -> Any:
    return eval(words, vars(offbeat))


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], Pool]]:
    """Processes by their number; only one set of them lives at a time."""
    made: dict[int, Pool] = {}

    def pool(workers: int) -> Pool:
        for number, other in made.items():
            if number != workers:
                other.close()
        if workers not in made:
            made[workers] = Pool(workers)
        return made[workers]

    yield pool
    for one in made.values():
        one.close()


def _results(pool: Pool, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run it on every worker; a hang fails with the stacks."""
    ended: list[Ended] = pool.run(function, *arguments, limit_s=LIMIT_S, after_error_s=10.0)
    for one in ended:
        assert not one.error, one.words or one.error
    for one in ended:
        assert not one.hung, "\n".join(f"worker {each.rank} hung:\n{each.stacks}" for each in ended)
    return [one.result for one in ended]


# --- 1: the program's own collectives ------------------------------------------------------


def _metric_every_epoch(algorithm: str, uneven: bool) -> tuple[list[Tensor], bool | None]:
    rank = dist.get_rank()
    sleep = Random(rank)
    model = net()
    opt = sgd(model)
    with offbeat.attach(model, opt, _algorithm(algorithm)) as dp:
        for epoch in range(3):
            metric = torch.zeros(1)
            for step in range(15 - (3 * rank if uneven else 0)):
                time.sleep(sleep.choice((0.001, 0.02)))
                opt.zero_grad()
                loss(model, rank, 15 * epoch + step).backward()
                opt.step()
                metric += 1
            dist.all_reduce(metric)
            assert metric.item() == (36 if uneven else 45)
            dist.barrier()
    return parameters(model), dp.stats().replicas_identical


@pytest.mark.real
@pytest.mark.parametrize(
    "algorithm",
    ALGORITHMS,
)
def test_a_metric_may_be_reduced_after_every_epoch(
    pools: Callable[[int], Pool], algorithm: str
) -> None:
    results = _results(pools(3), _metric_every_epoch, algorithm, False)
    assert all(identical and same(mine, results[0][0]) for mine, identical in results)


@pytest.mark.real
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_metric_may_be_reduced_after_every_epoch_of_uneven_data(
    pools: Callable[[int], Pool], algorithm: str
) -> None:
    results = _results(pools(3), _metric_every_epoch, algorithm, True)
    assert all(identical and same(mine, results[0][0]) for mine, identical in results)


# --- 2: learning rates ---------------------------------------------------------------------

UNEVEN_SPEEDS = """
workers = 3
speed = [1.0, 0.6, 0.3]
[compute]
step_s = 0.02
[[noise]]
kind = "lognormal"
sigma = 0.5
"""

GRADIENT_AVERAGING = [one for one in ALGORITHMS if "Local" not in one]


@pytest.fixture
def uneven_speeds(tmp_path: Path) -> str:
    file = tmp_path / "cluster.toml"
    file.write_text(UNEVEN_SPEEDS)
    return str(file)


def _with_rates(
    algorithm: str, rates: str, scheduler: str = "StepLR"
) -> tuple[list[Tensor], bool | None]:
    """Train for 40 steps, with learning rates that the loop changes."""
    model = net()
    opt = sgd(model)
    schedules: dict[str, Callable[[], Any]] = {
        "StepLR": lambda: torch.optim.lr_scheduler.StepLR(opt, step_size=7, gamma=0.7),
        "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(opt, 0.2, total_steps=41),
    }
    schedule = schedules[scheduler]() if rates == "scheduler" else None
    with offbeat.attach(model, opt, _algorithm(algorithm)) as dp:
        for step in range(40):
            if rates != "scheduler":
                n = {"step": step, "round": dp.round}[rates]
                for group in opt.param_groups:
                    group["lr"] = 0.1 * 0.95**n
            opt.zero_grad()
            loss(model, offbeat.rank(), step).backward()
            opt.step()
            if schedule is not None:
                schedule.step()
    return parameters(model), dp.stats().replicas_identical


def _replicas_are_identical(run: offbeat.Run) -> None:
    first, _ = run.results[0]
    for mine, identical in run.results:
        assert same(mine, first)
        assert identical


def test_a_scheduler_stepped_in_the_loop_leaves_replicas_identical(uneven_speeds: str) -> None:
    _replicas_are_identical(
        offbeat.run(lambda: _with_rates("EagerSGD('solo')", "scheduler"), uneven_speeds, seed=1)
    )


@pytest.mark.parametrize("algorithm", ["EagerSGD()", "ABSSGD()"])
def test_a_learning_rate_set_from_the_round_leaves_replicas_identical(
    uneven_speeds: str, algorithm: str
) -> None:
    _replicas_are_identical(
        offbeat.run(lambda: _with_rates(algorithm, "round"), uneven_speeds, seed=1)
    )


@pytest.mark.parametrize("rates", ["step", "round", "scheduler"])
@pytest.mark.parametrize(
    "algorithm",
    GRADIENT_AVERAGING,
)
def test_learning_rates_that_the_loop_sets_belong_to_the_round(
    uneven_speeds: str, algorithm: str, rates: str
) -> None:
    for seed in range(3):
        _replicas_are_identical(
            offbeat.run(lambda: _with_rates(algorithm, rates), uneven_speeds, seed=seed)
        )


@pytest.mark.filterwarnings("ignore::offbeat.errors.PortingWarning")
@pytest.mark.parametrize("algorithm", ["EagerSGD('solo')", "ABSSGD()", "NonblockingSGD(4)"])
def test_a_momentum_that_a_scheduler_changes_belongs_to_the_round_too(
    uneven_speeds: str, algorithm: str
) -> None:
    _replicas_are_identical(
        offbeat.run(
            lambda: _with_rates(algorithm, "scheduler", "OneCycleLR"), uneven_speeds, seed=1
        )
    )


def test_a_block_that_ends_with_replicas_that_differ_says_so() -> None:
    """However they came to differ; here by the program's own hand."""

    def worker() -> None:
        model = net()
        opt = sgd(model)
        with offbeat.attach(model, opt):
            loss(model, offbeat.rank(), 0).backward()
            opt.step()
            with torch.no_grad():
                model[0].weight += offbeat.rank()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            offbeat.run(worker, Cluster.uniform(2))
        except Exception as error:
            assert "differ" in str(error) or "identical" in str(error)  # noqa: PT017
            return
    assert any("differ" in str(one.message) or "identical" in str(one.message) for one in said)


# --- 3: step(None), step(closure) ----------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "SGD-foreach": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, foreach=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
}


def _called(how: str, optimizer: str) -> Callable[[], list[Tensor]]:
    def worker() -> list[Tensor]:
        model = net()
        opt: Any = OPTIMIZERS[optimizer](model)
        calls = 0
        with offbeat.attach(model, opt) as dp:
            for step in range(5):

                def closure(step: int = step) -> Tensor:
                    nonlocal calls
                    calls += 1
                    opt.zero_grad()
                    found = loss(model, offbeat.rank(), step)
                    found.backward()
                    return found

                if "closure" in how:
                    expected = loss(model, offbeat.rank(), step).item()
                    found = (
                        opt.step(closure) if how == "step(closure)" else opt.step(closure=closure)
                    )
                    assert found.item() == expected
                else:
                    closure()
                    _ = opt.step(None) if how == "step(None)" else opt.step()
        assert calls == 5
        assert dp.stats().steps == dp.stats().rounds == 5
        return parameters(model)

    return worker


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", ["step(None)", "step(closure)", "step(closure=closure)"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_step_with_a_closure_equals_a_step_without(
    how: str, optimizer: str, workers: int
) -> None:
    cluster = Cluster.uniform(workers)
    expected = offbeat.run(_called("step()", optimizer), cluster).results
    results = offbeat.run(_called(how, optimizer), cluster).results
    assert all(same(mine, other) for mine, other in zip(results, expected, strict=True))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_closure_works_with_every_algorithm(uneven_speeds: str, algorithm: str) -> None:
    def worker() -> tuple[list[Tensor], offbeat.Stats]:
        model = net()
        opt: Any = sgd(model)
        with offbeat.attach(model, opt, _algorithm(algorithm)) as dp:
            for step in range(12):

                def closure(step: int = step) -> Tensor:
                    opt.zero_grad()
                    found = loss(model, offbeat.rank(), step)
                    found.backward()
                    return found

                opt.step(closure)
        return parameters(model), dp.stats()

    results = offbeat.run(worker, uneven_speeds).results
    for mine, stats in results:
        assert same(mine, results[0][0])
        assert stats.steps == 12
        assert stats.pending_samples == 0


def test_an_optimizer_that_calls_its_closure_several_times_is_refused() -> None:
    model = net()
    with pytest.raises(TypeError, match="LBFGS"):
        offbeat.attach(model, torch.optim.LBFGS(model.parameters()))


# --- 4: two attachments --------------------------------------------------------------------


def _gan(algorithm: str, batches: int, breaks: tuple[int, int] | None) -> Any:
    """The loop of the DCGAN example, on small nets; blocks that end one inside the other."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    right = nn.functional.binary_cross_entropy_with_logits
    judge = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1)
    )
    maker = nn.Sequential(
        nn.ConvTranspose2d(6, 4, 4, 1, 0),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 1, 4, 2, 1),
    )
    opt_judge = torch.optim.Adam(judge.parameters(), lr=0.002, betas=(0.5, 0.999))
    opt_maker = torch.optim.Adam(maker.parameters(), lr=0.002, betas=(0.5, 0.999))
    with (
        offbeat.attach(maker, opt_maker, _algorithm(algorithm)) as dp_maker,
        offbeat.attach(judge, opt_judge, _algorithm(algorithm)) as dp_judge,
    ):
        for batch in range(batches):
            if breaks == (rank, batch):
                break
            time.sleep(0.03 if rank == dist.get_world_size() - 1 else 0.002)
            judge.zero_grad()
            right(judge(torch.randn(8, 1, 8, 8)), torch.ones(8, 1)).backward()
            fake = maker(torch.randn(8, 6, 1, 1))
            right(judge(fake.detach()), torch.zeros(8, 1)).backward()
            opt_judge.step()
            maker.zero_grad()
            right(judge(fake), torch.ones(8, 1)).backward()
            opt_maker.step()
    identical = [dp.stats().replicas_identical for dp in (dp_maker, dp_judge)]
    return parameters(maker) + parameters(judge), identical


@pytest.mark.real
@pytest.mark.parametrize(
    "algorithm",
    ALGORITHMS,
)
def test_a_gan_with_even_data_trains_to_its_end(
    pools: Callable[[int], Pool], algorithm: str
) -> None:
    results = _results(pools(4), _gan, algorithm, 12, None)
    for mine, identical in results:
        assert identical == [True, True]
        assert same(mine, results[0][0])


@pytest.mark.real
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_gan_of_which_one_worker_breaks_early_trains_to_its_end(
    pools: Callable[[int], Pool], algorithm: str
) -> None:
    results = _results(pools(2), _gan, algorithm, 12, (1, 5))
    for mine, identical in results:
        assert identical == [True, True]
        assert same(mine, results[0][0])


# --- 5: a worker that is away --------------------------------------------------------------

WIDE = 50_000
AWAY_ROUNDS = 200


def _buffers(numbers: int) -> int:
    """How many stretches of memory of at least so many float32 there are."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at everything touches what is deprecated
        return len(
            {
                one.untyped_storage().data_ptr()
                for one in gc.get_objects()
                if isinstance(one, Tensor) and one.untyped_storage().nbytes() >= 4 * numbers
            }
        )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _evaluates_long(algorithm: str, says_so: bool, folder: str) -> dict[str, Any]:
    """Worker 0 evaluates while the others train on; what it then holds, and after a step more."""
    rank = dist.get_rank()
    model = nn.Linear(WIDE, 1, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    found: dict[str, Any] = {}
    told = Path(folder) / f"{algorithm}-{says_so}"

    def step(n: int) -> None:
        opt.zero_grad()
        model(torch.ones(1, WIDE)).sum().backward()
        opt.step()
        time.sleep(0.001)

    with offbeat.attach(model, opt, _algorithm(algorithm)) as dp:
        for n in range(8):
            step(n)
        if rank == 0:
            found["before"] = _buffers(WIDE), _resident_bytes()
            with dp.away() if says_so and hasattr(dp, "away") else nullcontext():
                patience = time.monotonic() + LIMIT_S / 3
                while not told.exists() and time.monotonic() < patience:
                    time.sleep(0.01)
                found["others trained"] = told.exists()
                found["away"] = _buffers(WIDE), _resident_bytes()
        else:
            round = dp.round
            for n in range(AWAY_ROUNDS):
                time.sleep(0.002)  # a round between two micro-batches must find its time
                step(n)
            found["rounds"] = dp.round - round
            if rank == 1:
                told.touch()
        for n in range(8):
            step(n)
        if rank == 0:
            found["after"] = _buffers(WIDE), _resident_bytes()
    found["identical"] = dp.stats().replicas_identical
    return found


def _holds_little(found: dict[str, Any]) -> None:
    buffers, resident = found["before"]
    for moment in ("away", "after"):
        now, resident_now = found[moment]
        assert now <= buffers + 8, f"{moment}: {buffers} gradient-sized buffers became {now}"
        grown = (resident_now - resident) / (4 * WIDE)
        assert grown < AWAY_ROUNDS / 4, f"{moment}: {grown:.0f} gradients more in memory"


@pytest.mark.real
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_grows_while_a_worker_is_away(
    pools: Callable[[int], Pool], algorithm: str, tmp_path: Path
) -> None:
    results = _results(pools(3), _evaluates_long, algorithm, True, str(tmp_path))
    assert results[0]["others trained"], "they have waited for a worker that was away"
    assert results[1]["rounds"] >= 10, "they have computed, but made no rounds"
    assert all(found["identical"] for found in results)
    _holds_little(results[0])


@pytest.mark.real
@pytest.mark.parametrize("algorithm", ["EagerSGD('solo')", "EagerSGD()", "MSyncSGD(2)"])
def test_nothing_grows_while_a_worker_evaluates_without_a_word(
    pools: Callable[[int], Pool], algorithm: str, tmp_path: Path
) -> None:
    results = _results(pools(3), _evaluates_long, algorithm, False, str(tmp_path))
    assert all(found["identical"] for found in results)
    _holds_little(results[0])


# --- 6: wrapped twice ----------------------------------------------------------------------


def _wrapped(how: str) -> str:
    model = net()
    if how == "fully sharded":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        attached: nn.Module = model
    else:
        wrapped = DistributedDataParallel(model)
        attached = {
            "itself": wrapped,
            "a part of it": nn.Sequential(wrapped, nn.Linear(3, 3)),
            "from within": wrapped.module,
            "a part from within": wrapped.module[0],
            "around its module": nn.Sequential(wrapped.module, nn.Linear(3, 3)),
        }[how]
    opt = sgd(attached)
    try:
        dp = offbeat.attach(attached, opt)
    except (TypeError, ValueError) as error:
        return str(error)
    dp.close()
    return "attached"


@pytest.mark.real
@pytest.mark.parametrize(
    "how",
    [
        "itself",
        "a part of it",
        "from within",
        "a part from within",
        "around its module",
    ],
)
def test_a_model_that_ddp_reduces_is_refused(pools: Callable[[int], Pool], how: str) -> None:
    for said in _results(pools(2), _wrapped, how):
        assert "DistributedDataParallel" in said


@pytest.mark.real
def test_a_model_that_fsdp_shards_is_refused(pools: Callable[[int], Pool]) -> None:
    for said in _results(pools(2), _wrapped, "fully sharded"):
        assert "FSDP" in said or "fully_shard" in said or "FullySharded" in said


# --- 7: wait-free local SGD ----------------------------------------------------------------

TWO_TO_ONE = """
workers = 2
speed = [1.0, 0.5]
[compute]
step_s = 0.1
"""


@pytest.mark.slow
def test_wait_free_local_sgd_settles_where_every_step_weighs_the_same(tmp_path: Path) -> None:
    """Speeds 2:1 and optima at +1 and -1: the mean over steps is (2 - 1) / 3."""
    file = tmp_path / "cluster.toml"
    file.write_text(TWO_TO_ONE)

    def worker() -> float:
        rank = offbeat.rank()
        place = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(place.weight)
        opt = torch.optim.SGD(place.parameters(), lr=0.01)
        seen = []
        with offbeat.attach(place, opt, _algorithm(WAIT_FREE)) as dp:
            for step in range(3000 if rank == 0 else 1500):
                opt.zero_grad()
                (0.5 * (place.weight - (1 if rank == 0 else -1)) ** 2).sum().backward()
                opt.step()
                if step > (1500 if rank == 0 else 750):
                    with dp.agreed():
                        seen.append(place.weight.item())
        return sum(seen) / len(seen)

    for settled in offbeat.run(worker, str(file)).results:
        assert settled == pytest.approx(1 / 3, abs=0.05)


# --- 9: what local SGD agrees on -----------------------------------------------------------


def test_local_sgd_shows_the_model_that_all_agree_on() -> None:
    def worker() -> list[list[Tensor]]:
        model = net()
        opt = sgd(model)
        seen = []
        with offbeat.attach(model, opt, offbeat.LocalSGD(4)) as dp:
            for step in range(10):  # two averages, and two steps of one's own
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()
                if step == 7:
                    seen.append(parameters(model))
            seen.append(parameters(model))
            with dp.agreed():
                seen.append(parameters(model))
            seen.append(parameters(model))
        return seen

    results = offbeat.run(worker, Cluster.uniform(3)).results
    for averaged, drifted, agreed, back in results:
        assert not same(drifted, averaged), "nobody has drifted: this proves nothing"
        assert same(agreed, averaged)
        assert same(agreed, results[0][2])
        assert same(back, drifted)


# --- 13: forked children -------------------------------------------------------------------

CHILD_S = 8.0


def _is_killed_with_a_child() -> float:
    """Worker 1 forks, as a DataLoader does, and is killed; how long until the others know."""
    rank = offbeat.rank()
    model = net()
    opt = sgd(model)
    step, began = 0, time.monotonic()
    try:
        with offbeat.attach(model, opt):
            while True:
                opt.zero_grad()
                loss(model, rank, step).backward()
                began = time.monotonic()
                if rank == 1 and step == 5:
                    if os.fork() == 0:
                        time.sleep(CHILD_S)
                        os._exit(0)
                    os.kill(os.getpid(), signal.SIGKILL)
                opt.step()
                step += 1
    except WorkerLostError:
        pass
    return time.monotonic() - began


@pytest.mark.real
def test_a_killed_worker_is_noticed_at_once_though_its_child_lives() -> None:
    ended = processes(_is_killed_with_a_child, 3, check=False, time_out_s=LIMIT_S)
    assert ended[1].exit_code == -signal.SIGKILL
    for one in (ended[0], ended[2]):
        assert one.error is None
        assert one.result < CHILD_S / 2  # 0.1 s on a quiet machine


# --- 19: a partial all-reduce of its own ---------------------------------------------------


class _Made(TorchDispatchMode):
    """Counts the large tensors that operations of this thread make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.numel() >= WIDE:
            place = made.untyped_storage().data_ptr()
            given = [one for one in args if isinstance(one, Tensor)]
            self.count += place not in [one.untyped_storage().data_ptr() for one in given]
        return made


def _reduces_alone() -> int:
    mine = torch.ones(WIDE)
    with offbeat.partial_all_reduce("many", mine, quorum="solo") as many, _Made() as made:
        for _ in range(50):
            many.reduce(mine)
    return made.count


def test_a_partial_all_reduce_makes_no_buffer_per_call() -> None:
    assert _reduces_alone() <= 8


@pytest.mark.real
def test_a_partial_all_reduce_on_real_processes_makes_no_buffer_per_call(
    pools: Callable[[int], Pool],
) -> None:
    assert all(count <= 8 for count in _results(pools(2), _reduces_alone))
