"""The doctor: names the line that has a fast worker wait, and what to write instead."""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.doctor import Doctor, diagnose
from offbeat.doctor.known import KNOWN, known
from offbeat.doctor.script import examine
from offbeat.errors import HiddenWaitWarning
from offbeat.testing import processes

SCRIPT = """
import time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=2):
    if dist.get_rank() == 1:
        time.sleep(0.1)
    dist.barrier()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def notes(**changed: Any) -> str:
    plain = {"steps": 100, "seconds": 5.0, "threads": 1, "local": 2, "cores": 2}
    return json.dumps({**plain, "wrapped": False, "same_data": "", "waits": [], **changed})


def test_a_worker_that_waits_for_nothing_has_nothing_to_gain() -> None:
    found = diagnose([notes(), notes()])
    assert found.sentences == ()
    assert "hardly waits in the collectives that are counted" in found.gained


def test_it_names_the_line_the_count_the_seconds_and_the_gain() -> None:
    wait = {
        "place": ["lib/trainer.py", 7, "_gather", "dist.all_gather"],
        "program": ["train.py", 3, "main", "dist.all_gather"],
        "known": list(KNOWN[0]),
        "count": 90,
        "seconds": 4.0,
    }
    found = diagnose([notes(), notes(waits=[wait])])
    (sentence,) = found.sentences
    assert sentence.startswith("Lightning broadcasts a SIGTERM flag for every batch: worker 1 ")
    assert "waited 4.00 s there, 90 times in 100 steps, at lib/trainer.py:7 in _gather" in sentence
    assert "(dist.all_gather), from train.py:3. Instead: Trainer(strategy=" in sentence
    assert "takes 50.0 ms a step, and waits 40.0 ms of that" in found.gained
    assert "about 10.0 ms: 5.0 times as fast" in found.gained


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"threads": 4}, "2 processes with 4 threads each share 2 cores.*OMP_NUM_THREADS=1"),
        ({"wrapped": True}, "wrapped in DistributedDataParallel, whose backward waits"),
        ({"same_data": "a mark"}, "goes through the same data set.*offbeat.Deal"),
        ({"method": "LBBSP", "rounds": 50}, "a round of LBBSP holds 2.0 steps.*a quarter"),
    ],
)
def test_it_sees_what_else_is_amiss(changed: dict[str, Any], words: str) -> None:

    (sentence,) = diagnose([notes(**changed), notes(**changed)]).sentences
    assert re.search(words, sentence)


def test_data_that_differ_between_workers_are_a_share_of_each() -> None:
    assert diagnose([notes(same_data="a"), notes(same_data="b")]).sentences == ()


def _script(folder: str) -> str:
    path = Path(folder) / f"train-{offbeat.rank()}.py"
    path.write_text(SCRIPT)
    return str(examine(path, ()))


@pytest.mark.real
def test_a_whole_script_is_examined_and_ends_as_ever(tmp_path: Path) -> None:
    zero, one = (each.result for each in processes(_script, 2, str(tmp_path)))
    assert one == "None"
    line = 1 + SCRIPT.splitlines().index("    dist.barrier()")
    assert "the program issues a collective: worker 0 waited " in zero
    assert f"train-0.py:{line} in <module> (dist.barrier)" in zero
    assert "wrapped in DistributedDataParallel" in zero
    assert "goes through the same data set" in zero
    assert "times as fast" in zero


def _twice(folder: str) -> list[str]:
    """Two scripts, one after the other, with one store; worker 1 is late with the second."""
    first, second = (Path(folder) / f"{name}-{offbeat.rank()}.py" for name in ("first", "second"))
    first.write_text(SCRIPT)
    second.write_text(f"import time; time.sleep({0.5 * offbeat.rank()})")
    return [str(examine(path, ())) for path in (first, second)]


@pytest.mark.real
def test_what_was_seen_in_an_earlier_run_is_not_told_again(tmp_path: Path) -> None:
    (first, second), _ = (each.result for each in processes(_twice, 2, str(tmp_path)))
    assert "wrapped in DistributedDataParallel" in first
    assert "wrapped in DistributedDataParallel" not in second


def _attached(hidden: bool) -> tuple[list[str], bool]:
    before = DataLoader.__iter__, torch._C._distributed_c10d.Work.wait
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(24, 2))
    deal = offbeat.Deal(data, batch_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with offbeat.attach(model, optimizer, offbeat.EagerSGD("solo"), warn=True) as dp:
            for step, (x,) in enumerate(DataLoader(data, batch_sampler=deal)):
                if dp.rank == 1:
                    time.sleep(0.02)
                if hidden and step < 5:
                    dist.barrier()
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
    after = DataLoader.__iter__, torch._C._distributed_c10d.Work.wait
    words = [str(each.message) for each in caught if each.category is HiddenWaitWarning]
    return words, before == after


@pytest.mark.real
def test_attach_warns_of_hidden_waits_and_of_nothing_else() -> None:
    zero, one = (each.result for each in processes(_attached, 2, True))
    assert one == ([], True)
    (words,), restored = zero
    assert restored
    assert "test_doctor.py:" in words
    assert "in _attached (dist.barrier)" in words
    assert [each.result for each in processes(_attached, 2, False)] == [([], True)] * 2


# --- what frameworks hide, in the versions that are installed -----------------------------------

Run = Callable[..., list[Any]]


def _examined(run: Callable[..., Any], *arguments: Any) -> str:
    doctor = Doctor()
    try:
        run(*arguments)
    finally:
        doctor.close()
    return doctor.notes()


def _lightning(folder: str) -> str:
    import lightning_runs as runs

    return _examined(lambda: runs.fit("ddp", folder, {}, slow_s=0.02, sync_dist=True))


def _trainer(folder: str) -> str:
    import transformers_runs as runs

    return _examined(runs.slow_with_ddp, folder)


@pytest.mark.real
@pytest.mark.frameworks
@pytest.mark.parametrize(
    ("framework", "run", "functions"),
    [
        ("lightning", _lightning, ["_broadcast_sigterm_tensor", "update"]),
        ("transformers", _trainer, ["_get_num_items_in_batch", "_maybe_log_save_evaluate"]),
    ],
)
def test_it_finds_what_a_framework_hides(
    framework: str,
    run: Callable[..., Any],
    functions: list[str],
    tmp_path: Path,
    framework_workers: Run,
) -> None:
    pytest.importorskip(framework)
    found = diagnose(framework_workers(run, str(tmp_path)))
    for function in functions:
        (what,) = (each for each in KNOWN if each.function == function)
        sentences = [each for each in found.sentences if each.startswith(what.what)]
        assert sentences, f"{what.what}: not found in\n{found}"
        assert f"{what.file}:" in sentences[0]
        assert f" in {function} (dist." in sentences[0]
    assert any("wrapped in DistributedDataParallel" in each for each in found.sentences)


def test_what_is_known_is_found_by_file_and_function() -> None:
    for each in KNOWN:
        assert known(f"/any/lib/{each.file}", each.function) == each
    assert known("/any/lib/trainer.py", "step") is None
