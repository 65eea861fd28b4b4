"""Porting help: lines of a DDP script that mean something else are named, once, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from nets import loss, net, sgd
from torch import nn
from torch.distributed import TCPStore
from torch.nn.utils import clip_grad
from torch.nn.utils import clip_grad_norm_ as by_name
from torch.optim import lr_scheduler

import offbeat
from offbeat.clusters import Cluster
from offbeat.errors import PortingWarning, StillAttachedError
from offbeat.lab.simulate import simulate
from offbeat.testing import job_variables, processes

Clip = Callable[[nn.Module], object]
Heard = list[tuple[str, int, str]]
UNEVEN: dict[str, Callable[[], offbeat.Algorithm]] = {
    "eager": lambda: offbeat.EagerSGD("solo"),
    "msync": lambda: offbeat.MSyncSGD(1),
    "abs": offbeat.ABSSGD,
    "nonblocking": lambda: offbeat.NonblockingSGD(2),
    "dropcompute": lambda: offbeat.DropCompute(2),
    "lbbsp": lambda: offbeat.LBBSP(2),
    "waitfree": offbeat.WaitFreeLocalSGD,
    "wagma": offbeat.WAGMASGD,
}
EVEN: dict[str, Callable[[], offbeat.Algorithm]] = {
    "sync": offbeat.SyncSGD,
    "sync-accumulate": lambda: offbeat.SyncSGD(micro_batches=2),
    "local": lambda: offbeat.LocalSGD(2),
}
METHODS = {**EVEN, **UNEVEN}


def line_of(marker: str) -> int:
    """The line of this file that ends so."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"  # {marker}"))
    return number


@contextmanager
def heard() -> Iterator[Heard]:
    """The porting warnings of this block, every time that they are said: file, line and words."""
    found: Heard = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found += [
        (each.filename, each.lineno, str(each.message))
        for each in seen
        if each.category is PortingWarning
    ]


def steps(
    algorithm: offbeat.Algorithm,
    clip: Clip = lambda model: None,
    before: Callable[[torch.optim.Optimizer, int, offbeat.Attachment], object] | None = None,
    made: Callable[[torch.optim.Optimizer], object] = lambda optimizer: None,
    **settings: Any,
) -> None:
    """A worker that takes six steps; `before` is called ahead of each."""
    model = net()
    optimizer = sgd(model)
    _kept = made(optimizer)
    with offbeat.attach(model, optimizer, algorithm, **settings) as dp:
        for step in range(6):
            optimizer.zero_grad()
            loss(model, offbeat.rank(), step).backward()
            clip(model)
            if before is not None:
                before(optimizer, step, dp)
            optimizer.step()  # steps


def run(*arguments: Any, workers: int = 4, **settings: Any) -> Heard:
    with heard() as found:
        offbeat.run(lambda: steps(*arguments, **settings), "uniform-8", workers=workers)
    return found


# --- clipping ------------------------------------------------------------------------------


def norm_by_module(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # norm_by_module


def norm_by_name(model: nn.Module) -> None:
    by_name(list(model.parameters()), max_norm=0.5, foreach=False)  # norm_by_name


def norm_of_one(model: nn.Module) -> None:
    clip_grad.clip_grad_norm_(next(model.parameters()), 0.5)  # norm_of_one


def norm_in_two_steps(model: nn.Module) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    total = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)  # norm_in_two_steps


def value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.5)  # value


CLIPS = (norm_by_module, norm_by_name, norm_of_one, norm_in_two_steps, value)


@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_by_hand_is_named_once_however_it_is_called(clip: Clip) -> None:
    ((file, line, words),) = run(offbeat.EagerSGD(), clip)
    assert (file, line) == (__file__, line_of(clip.__name__))
    assert f"offbeat.attach(..., clip_norm={'1.0' if clip is value else '0.5'})" in words
    assert ("by value" in words) == (clip is value)


@pytest.mark.parametrize("name", METHODS)
def test_clipping_is_named_where_rounds_carry_gradients_and_no_clip_elsewhere(name: str) -> None:
    found = run(METHODS[name](), norm_by_module)
    assert len(found) == (name not in ("local", "waitfree", "wagma"))


def test_a_closure_that_clips_is_named() -> None:
    def train() -> None:
        model = net()
        optimizer = sgd(model)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            (value := loss(model, offbeat.rank(), 0)).backward()
            norm_by_module(model)
            return value

        with offbeat.attach(model, optimizer):
            optimizer.step(closure)

    with heard() as found:
        offbeat.run(train, "uniform-8", workers=2)
    assert [line for _, line, _ in found] == [line_of("norm_by_module")]


def test_every_run_and_not_every_attachment_says_it_again() -> None:
    def train() -> None:
        for _ in range(3):
            steps(offbeat.SyncSGD(), norm_by_module)

    for _ in range(2):
        with heard() as found:
            offbeat.run(train, "uniform-8", workers=3)
        assert len(found) == 1


def only_the_norm(model: nn.Module) -> None:
    nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])


def of_another_model(model: nn.Module) -> None:
    other = net()
    loss(other, 0, 0).backward()
    norm_by_module(other)
    value(other)


@pytest.mark.parametrize("clip", [only_the_norm, of_another_model])
def test_what_does_not_clip_what_is_attached_is_not_named(clip: Clip) -> None:
    assert run(offbeat.SyncSGD(), clip) == []


@pytest.mark.parametrize("name", METHODS)
def test_offbeat_s_own_clipping_is_not_named(name: str) -> None:
    assert run(METHODS[name](), clip_norm=0.01) == []


@pytest.mark.parametrize("workers", [1, None])
def test_one_worker_alone_hears_nothing(workers: int | None) -> None:
    arguments = offbeat.EagerSGD(), norm_by_module, by_hand
    if workers is not None:
        assert run(*arguments, workers=workers) == []
        return
    with heard() as found:
        steps(*arguments)
    assert found == []


def test_a_worker_that_unscales_and_clips_is_named_and_trains_on() -> None:
    def train() -> torch.Tensor:
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = sgd(model)
        with offbeat.attach(model, optimizer):
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(loss(model, 0, step)).backward()
                scaler.unscale_(optimizer)
                norm_by_module(model)
                scaler.step(optimizer)
                scaler.update()
        return model[0].weight.detach()

    with heard() as found:
        results = offbeat.run(train, "uniform-8", workers=2).results
    assert len(found) == 1
    plain = net()
    optimizer = sgd(plain)
    for step in range(3):
        optimizer.zero_grad()
        loss(plain, 0, step).backward()
        norm_by_module(plain)
        optimizer.step()
    assert all(torch.allclose(result, plain[0].weight) for result in results)


def _looked_up() -> object:
    return vars(clip_grad)["_group_tensors_by_device_and_dtype"]


def test_torch_is_as_before_when_it_was_said_when_the_block_ends_and_when_it_fails() -> None:
    before, inside = _looked_up(), []

    def train(fails: bool) -> None:
        model = net()
        optimizer = sgd(model)
        with offbeat.attach(model, optimizer):
            loss(model, 0, 0).backward()
            inside.append(_looked_up() is before)
            if fails:
                raise KeyError("a bad batch")

    offbeat.run(lambda: train(False), "uniform-8", workers=2)
    assert inside == [False, False]
    assert _looked_up() is before
    with pytest.raises(KeyError):
        offbeat.run(lambda: train(True), "uniform-8", workers=2)
    assert _looked_up() is before
    run(offbeat.SyncSGD(), norm_by_module)
    assert _looked_up() is before


def test_threads_that_clip_models_of_their_own_meanwhile_are_not_disturbed() -> None:
    ended, failures = threading.Event(), []

    def clip(mine: nn.Module) -> None:
        try:
            while not ended.is_set():
                loss(mine, 0, 0).backward()
                norm_by_module(mine)
                value(mine)
        except Exception as error:
            failures.append(error)

    # Made here: seeding from two threads at once can deadlock within torch.
    others = [threading.Thread(target=clip, args=[net()]) for _ in range(3)]
    for other in others:
        other.start()
    found = [run(offbeat.SyncSGD(), norm_by_module) for _ in range(10)]
    ended.set()
    for other in others:
        other.join()
    assert failures == []
    assert [len(each) for each in found] == [1] * 10


# --- learning rates ------------------------------------------------------------------------


def by_hand(optimizer: torch.optim.Optimizer, step: int, dp: offbeat.Attachment) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * 0.9**step


@pytest.mark.parametrize("name", UNEVEN)
def test_a_rate_set_by_hand_is_named_once_where_workers_step_unevenly(name: str) -> None:
    ((file, line, words),) = run(UNEVEN[name](), before=by_hand)
    assert (file, line) == (__file__, line_of("steps"))
    assert "dp.ticks" in words
    assert ("each steps with its own" in words) == (name in ("waitfree", "wagma"))


@pytest.mark.parametrize("name", EVEN)
def test_a_rate_set_by_hand_means_what_it_does_with_ddp_where_all_step_alike(name: str) -> None:
    assert run(EVEN[name](), before=by_hand) == []


def test_a_rate_that_is_a_tensor_is_noticed_too() -> None:
    def made(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)

    def before(optimizer: torch.optim.Optimizer, step: int, dp: object) -> None:
        optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + step))

    assert len(run(offbeat.EagerSGD(), made=made, before=before)) == 1


def _plateau(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer)


def _once(optimizer: torch.optim.Optimizer, step: int, dp: object) -> None:
    if step == 3:
        optimizer.param_groups[0]["lr"] = 0.01


@pytest.mark.parametrize(
    "made", [lambda opt: lr_scheduler.StepLR(opt, 100), _plateau], ids=["step", "plateau"]
)
def test_where_there_is_a_scheduler_that_goes_by_epochs_nothing_is_said(
    made: Callable[..., Any],
) -> None:
    assert run(offbeat.EagerSGD(), before=_once, made=made) == []


def _with_scheduler(algorithm: offbeat.Algorithm, every: int) -> Heard:
    def train() -> None:
        model = net()
        optimizer = sgd(model)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        with offbeat.attach(model, optimizer, algorithm):
            for step in range(9):
                optimizer.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                optimizer.step()  # scheduled
                if (step + 1) % every == 0:
                    scheduler.step()

    with heard() as found:
        offbeat.run(train, "uniform-8", workers=4)
    return found


@pytest.mark.parametrize("name", UNEVEN)
def test_a_scheduler_stepped_in_the_loop_is_named_once_where_workers_step_unevenly(
    name: str,
) -> None:
    ((file, line, words),) = _with_scheduler(UNEVEN[name](), every=1)
    assert (file, line) == (__file__, line_of("scheduled"))
    assert "offbeat.attach(..., scheduler=scheduler)" in words


@pytest.mark.parametrize("name", EVEN)
def test_a_scheduler_stepped_in_the_loop_is_right_where_all_step_alike(name: str) -> None:
    assert _with_scheduler(EVEN[name](), every=1) == []


@pytest.mark.parametrize("every", [1, 3])
def test_where_data_are_dealt_a_scheduler_stepped_in_the_loop_is_named_with_every_method(
    every: int,
) -> None:
    """Though all wait for all, one has a batch more, and perhaps a scheduler that has ended."""

    def train() -> None:
        model = net()
        optimizer = sgd(model)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        with offbeat.attach(model, optimizer, offbeat.SyncSGD()):
            for step, _ in enumerate(offbeat.Deal(range(32), 1)):
                optimizer.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                optimizer.step()  # dealt
                if (step + 1) % every == 0:
                    scheduler.step()

    with heard() as found:
        offbeat.run(train, "uniform-8", workers=3)
    assert [line for _, line, _ in found] == [line_of("dealt")] * (every == 1)
    assert all("as by offbeat.Deal" in words for _, _, words in found)


def test_a_scheduler_stepped_by_epochs_is_right_with_every_method() -> None:
    assert _with_scheduler(offbeat.EagerSGD(), every=3) == []


def test_a_scheduler_that_offbeat_steps_is_not_named() -> None:
    def train() -> None:
        model = net()
        optimizer = sgd(model)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        with offbeat.attach(model, optimizer, offbeat.EagerSGD(), scheduler=scheduler):
            for step in range(4):
                optimizer.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                optimizer.step()

    with heard() as found:
        offbeat.run(train, "two-slow-of-eight")
    assert found == []


def from_the_round(optimizer: torch.optim.Optimizer, step: int, dp: offbeat.Attachment) -> None:
    by_hand(optimizer, dp.round, dp)


def always_the_same(optimizer: torch.optim.Optimizer, step: int, dp: object) -> None:
    optimizer.param_groups[0]["lr"] = 0.1


def loaded(optimizer: torch.optim.Optimizer, step: int, dp: object) -> None:
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] *= 0.5
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("before", [from_the_round, always_the_same, loaded])
def test_what_all_workers_count_alike_or_is_not_edited_is_not_named(
    before: Callable[..., object],
) -> None:
    assert run(offbeat.EagerSGD(), before=before) == []


# --- real processes ------------------------------------------------------------------------


def _really(algorithm: str, clips: bool, sets: bool) -> Heard:
    with heard() as found:
        for _ in range(2):  # a world of its own each
            steps(
                METHODS[algorithm](),
                norm_by_module if clips else lambda model: None,
                by_hand if sets else None,
                clip_norm=1.0,
            )
    return found


@pytest.mark.real
@pytest.mark.parametrize("name", ["eager", "sync", "waitfree"])
def test_worker_0_of_a_real_job_says_each_once(name: str) -> None:
    first, second = (ended.result for ended in processes(_really, 2, name, True, True))
    lines = {line for _, line, _ in first}
    assert second == []
    assert len(first) == len(lines)
    expected = {line_of("norm_by_module")} if name != "waitfree" else set()
    assert lines == expected | ({line_of("steps")} if name in UNEVEN else set())
    assert {file for file, _, _ in first} == {__file__}


@pytest.mark.real
def test_a_real_job_without_such_lines_hears_nothing() -> None:
    assert [ended.result for ended in processes(_really, 2, "eager", False, False)] == [[], []]


# --- the end of the process group ----------------------------------------------------------

EARLY = """
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group
import offbeat

init_process_group("gloo")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dp = offbeat.attach(model, optimizer, offbeat.{algorithm})
for step in range(3 + 2 * dist.get_rank()):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
{end}
"""
ALGORITHMS = (
    *("SyncSGD()", "EagerSGD('solo')", "MSyncSGD(1)", "ABSSGD()", "NonblockingSGD(2)"),
    *("DropCompute(2)", "LBBSP(2)", "LocalSGD(2)", "WaitFreeLocalSGD()"),
    "WAGMASGD()",
)
TWO = Cluster.uniform(2)
RIGHT = "dp.close(); destroy_process_group(); assert not dist.is_initialized()"


def job(folder: Path, text: str, workers: int = 2) -> list[tuple[int, str]]:
    """Exit status and standard error of every process of a job; who hangs is killed: -9."""
    script = folder / "train.py"
    script.write_text(text)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begun = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **job_variables(rank, workers, store.port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]
    ended = []
    for process in begun:
        try:
            _, words = process.communicate(timeout=180.0)
        except subprocess.TimeoutExpired:
            process.kill()
            _, words = process.communicate()
        ended.append((process.returncode, words))
    return ended


@pytest.mark.real
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ending_the_process_group_too_early_is_an_error_on_every_rank(
    tmp_path: Path, algorithm: str
) -> None:
    ended = job(tmp_path, EARLY.format(algorithm=algorithm, end="destroy_process_group()"))
    assert [code for code, _ in ended] == [1, 1], ended
    said = "StillAttachedError: train.py:15: destroy_process_group() while worker"
    assert any(said in words for _, words in ended), ended
    for _, words in ended:
        assert "dp.close() first" in words, words  # of its own, or of the one that was lost


@pytest.mark.real
def test_after_the_block_the_process_group_ends_as_ever(tmp_path: Path) -> None:
    ended = job(tmp_path, EARLY.format(algorithm="EagerSGD()", end=RIGHT))
    assert [code for code, _ in ended] == [0, 0], ended


@pytest.mark.real
def test_a_program_that_fails_and_ends_its_process_group_tells_its_own_error(
    tmp_path: Path,
) -> None:
    end = dedent("""
    try:
        if dist.get_rank() == 1:
            raise KeyError("a bad batch")
        dp.close()
    finally:
        destroy_process_group()
    """)
    ended = job(tmp_path, EARLY.format(algorithm="EagerSGD()", end=end))
    assert [code for code, _ in ended] == [1, 1], ended
    assert "worker 1 was lost (KeyError: 'a bad batch')" in ended[0][1]
    for _, words in ended:
        assert "StillAttachedError" not in words
        assert "EpochOver" not in words


@pytest.mark.real
def test_a_group_of_one_s_own_may_end_inside_the_block(tmp_path: Path) -> None:
    end = "group = dist.new_group([0, 1]); dist.destroy_process_group(group)\n" + RIGHT
    ended = job(tmp_path, EARLY.format(algorithm="SyncSGD()", end=end))
    assert [code for code, _ in ended] == [0, 0], ended


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_simulated_process_group_that_ends_too_early_is_the_same_error(
    tmp_path: Path, algorithm: str
) -> None:
    for end, early in (
        ("destroy_process_group()", True),
        ("dist.destroy_process_group(None)", True),
        (RIGHT, False),
    ):
        script = tmp_path / "train.py"
        script.write_text(EARLY.format(algorithm=algorithm, end=end))
        error = simulate(script, TWO).error
        if early:
            with pytest.raises(StillAttachedError, match=r"^train\.py:15: .* dp\.close\(\) first"):
                raise error or AssertionError("no error")
            assert isinstance(error, RuntimeError)
        else:
            assert error is None


def test_a_simulated_program_that_fails_tells_its_own_error(tmp_path: Path) -> None:
    end = "try:\n    raise KeyError(3)\nfinally:\n    destroy_process_group()"
    script = tmp_path / "train.py"
    script.write_text(EARLY.format(algorithm="SyncSGD()", end=end))
    assert isinstance(simulate(script, TWO).error, KeyError)


# --- what a process does once --------------------------------------------------------------


def simulated(folder: Path, text: str, *arguments: str, workers: int = 3) -> Any:
    script = folder / "train.py"
    script.write_text(dedent(text))
    return simulate(script, Cluster.uniform(workers), arguments=arguments)


def test_only_local_rank_0_saves_in_a_simulation(tmp_path: Path) -> None:
    done = simulated(
        tmp_path,
        """
        import os
        if int(os.environ["LOCAL_RANK"]) == 0:
            with open(os.path.join(os.path.dirname(__file__), "saved"), "a") as file:
                file.write("once")
        """,
    )
    assert done.error is None
    assert (tmp_path / "saved").read_text() == "once"


def test_a_process_group_is_initialized_once(tmp_path: Path) -> None:
    begin = 'import torch.distributed as dist\ndist.init_process_group("gloo")\n'
    assert simulated(tmp_path, begin).error is None
    error = simulated(tmp_path, begin * 2).error
    assert isinstance(error, ValueError)
    assert "init_process_group() was called before" in str(error)


SINGLETON = """
import torch, offbeat

if not hasattr(torch, "_a_library_of_the_user"):
    torch._a_library_of_the_user = set()

def begin():
    if "begun" in torch._a_library_of_the_user:
        raise RuntimeError("the library is already initialized")
    torch._a_library_of_the_user.add("begun")

if {guard}:
    begin()
"""


def test_what_a_process_does_only_once_is_explained(tmp_path: Path) -> None:
    try:
        failed = simulated(tmp_path, SINGLETON.format(guard="True"))
        assert "simulated workers share one process" in failed.traceback()
        assert "offbeat.rank() == 0" in failed.traceback()
        assert "in worker 1" in failed.traceback()
        vars(torch)["_a_library_of_the_user"].clear()
        assert simulated(tmp_path, SINGLETON.format(guard="offbeat.rank() == 0")).error is None
    finally:
        vars(torch).pop("_a_library_of_the_user", None)


def test_another_error_is_not_explained(tmp_path: Path) -> None:
    failed = simulated(tmp_path, "import offbeat\nassert offbeat.rank() == 0, 'bad'")
    assert "share one process" not in failed.traceback()


SPAWNS = """
import os, torch.distributed as dist
from torch.multiprocessing import spawn

def main(rank, world_size):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 3)
    assert rank == int(os.environ["RANK"])
    with open(os.path.join(os.path.dirname(__file__), "ran"), "a") as file:
        file.write(f"{rank}")
    dist.destroy_process_group()

if __name__ == "__main__":
    spawn(main, args=(3,), nprocs=NPROCS, join=True)
"""


def test_a_script_that_spawns_its_workers_is_simulated(tmp_path: Path) -> None:
    before = torch.multiprocessing.spawn
    done = simulated(tmp_path, SPAWNS.replace("NPROCS", "3"))
    assert done.error is None, done.traceback()
    assert (tmp_path / "ran").read_text() == "012"
    assert torch.multiprocessing.spawn is before


def test_a_script_that_spawns_another_number_of_workers_is_told(tmp_path: Path) -> None:
    failed = simulated(tmp_path, SPAWNS.replace("NPROCS", "2"))
    assert "or simulate --workers 2" in failed.traceback()


def test_workers_that_go_to_different_folders_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    go = "import os\nos.makedirs('{0}', exist_ok=True)\nos.chdir('{0}')"
    assert simulated(tmp_path, go.format(tmp_path / "one")).error is None
    monkeypatch.chdir(tmp_path)
    assert simulated(tmp_path, go.format("and-back") + "\nos.chdir('..')").error is None
    failed = simulated(tmp_path, go.format("relative"))
    assert "simulated workers share one" in failed.traceback()
    assert "full paths" in failed.traceback()


HYDRA = """
import logging
import hydra, torch, offbeat
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base=None, config_path=".", config_name="settings")
def main(settings):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    with offbeat.attach(model, optimizer, offbeat.EagerSGD("solo")):
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            assert HydraConfig.get().job.name == "train"
    logging.getLogger("ours").info(f"worker {offbeat.rank()} with {settings.lr}")
    assert settings.lr == 0.5, "the argument"

main()
"""


def test_a_script_with_hydra_runs_on_every_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hydra")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.yaml").write_text("lr: 0.1\n")
    folder = f"hydra.run.dir={tmp_path / 'out'}"
    for _ in range(2):
        done = simulated(tmp_path, HYDRA, "lr=0.5", folder)
        assert done.error is None, done.traceback()
        assert done.virtual_s > 0
    log = (tmp_path / "out" / "train.log").read_text()
    assert all(f"worker {rank} with 0.5" in log for rank in range(3))
    failed = simulated(tmp_path, HYDRA, "lr=0.7", folder)
    assert isinstance(failed.error, AssertionError)  # not hydra's own exit
    moves = simulated(tmp_path, HYDRA, "lr=0.5", "hydra.job.chdir=True")
    assert "hydra.job.chdir=False" in moves.traceback()


@pytest.mark.parametrize(
    ("algorithm", "betas", "told"),
    [
        (offbeat.EDM("lazy-ring"), (0.9, 0.999), 1),
        (offbeat.EDM("lazy-ring"), (0.0, 0.999), 0),
        (offbeat.DmSGD("ring"), (0.9, 0.999), 0),
    ],
)
def test_adam_beneath_a_methods_own_momentum_is_told_once(
    algorithm: offbeat.Algorithm, betas: tuple[float, float], told: int
) -> None:
    def worker() -> None:
        model = net()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=betas)
        with offbeat.attach(model, opt, algorithm):
            for step in range(2):
                opt.zero_grad()
                loss(model, offbeat.rank(), step).backward()
                opt.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        offbeat.run(worker, Cluster.parse("workers = 4\n[compute]\nstep_s = 1.0"))
    said = [str(each.message) for each in caught if each.category is PortingWarning]
    assert len(said) == told
    assert all(words.startswith("AdamW has a momentum, betas[0]") for words in said)
