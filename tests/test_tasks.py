"""What a race trains: every task learns, and files of others are read with care."""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from itertools import islice
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from test_docs import FENCE
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.lab import tasks
from offbeat.lab.tasks import Task, cifar10, fashion

FOLDERS = ("cifar10", "fashion", "fashion-skewed")
ON_BOARD = [name for name in tasks.TASKS if name not in (*FOLDERS, "timing")]
every_task = pytest.mark.parametrize("name", ON_BOARD)


def trained(task: Task, steps: int) -> tuple[float, float]:
    """The loss before and after some steps of plain SGD."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    before = task.evaluate(model)[0]
    for batch in islice(task.batches(0, 1, 0), steps):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    return before, task.evaluate(model)[0]


@every_task
def test_a_task_learns(name: str) -> None:
    before, after = trained(tasks.find(name), 90)
    assert after < 0.9 * before


@every_task
def test_the_target_is_not_reached_before_training(name: str) -> None:
    task = tasks.find(name)
    assert task.target is not None
    assert not task.target.reached(*task.evaluate(task.model()))


@every_task
def test_workers_draw_the_same_data_every_time_and_not_each_others(name: str) -> None:
    task = tasks.find(name)

    def first(rank: int, seed: int) -> torch.Tensor:
        batch = next(task.batches(rank, 8, seed))
        return batch if isinstance(batch, torch.Tensor) else batch[0]

    assert torch.equal(first(0, 0), first(0, 0))
    for rank, seed in ((1, 0), (0, 1)):
        other = first(rank, seed)
        assert other.shape != first(0, 0).shape or not torch.equal(first(0, 0), other)


def test_a_micro_batch_of_text_weighs_its_characters() -> None:
    task = tasks.find("text")
    batches = list(islice(task.batches(0, 8, 0), 50))
    lengths = [task.samples(batch) for batch in batches]
    assert lengths == [len(batch[1]) for batch in batches]
    assert max(lengths) > 4 * min(lengths)


# ---------------------------------------------------------------- names


def test_an_unknown_task_is_told_its_nearest() -> None:
    with pytest.raises(ValueError, match="no task is called 'digit': did you mean 'digits'"):
        tasks.find("digit")


def test_a_users_own_function_makes_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_task.py").write_text(
        dedent(
            """
            from dataclasses import replace
            from offbeat.lab import tasks

            def mine():
                return replace(tasks.find("quadratic"), name="mine")

            def wrong():
                return 3
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    assert tasks.find("my_own_task:mine").name == "mine"
    with pytest.raises(ValueError, match=r"must return an offbeat.lab.tasks.Task, got int: see"):
        tasks.find("my_own_task:wrong")
    with pytest.raises(ValueError, match="no function 'mines': did you mean 'mine'"):
        tasks.find("my_own_task:mines")
    with pytest.raises(ValueError, match="No module named 'nowhere'"):
        tasks.find("nowhere:mine")


def task_of_the_page(folder: Path) -> str:
    """What docs/races.md shows, as a file."""
    page = (Path(__file__).parents[1] / "docs" / "races.md").read_text()
    (code,) = (match[2] for match in FENCE.finditer(page) if match[1] == "python")
    (folder / "my_task.py").write_text(code)
    return code


def test_the_task_that_the_page_shows_can_be_raced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task_of_the_page(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    words = ["race", "sync", "eager", "--task", "my_task:line", "--seeds", "1", "--rates", "1"]
    result = CliRunner().invoke(app, [*words, "--jobs", "1"])
    assert result.exit_code == 0, result.output
    assert "not reached" not in result.stdout
    assert "eager" in result.stdout


@pytest.mark.parametrize(
    ("there", "instead", "words"),
    [
        ("def line():", "def line(size):", "my_task:line is called without arguments"),
        ("lambda: nn.Linear(8, 1)", "nn.Linear(8, 1)", "model must be a function that can be"),
        (
            "lambda: nn.Linear(8, 1)",
            "lambda: 3",
            "model() must return a torch.nn.Module, got int",
        ),
        ("batches=batches", "batches=[]", "as batches(rank, workers, seed), got list"),
        ("(rank, workers, seed)", "(rank)", "called as batches(rank, workers, seed)"),
        ("batches=batches", "batches=lambda *_: [(x, y)]", "an iterator without end, got list"),
        ("model(inputs), targets)", "model(inputs), targets, reduction='none')", "of one number"),
        (".item(), None", ".item()", "the loss and the accuracy, two numbers, or None"),
        ('Target("loss", 0.02)', '"loss=0.02"', "target must be such as Target('loss', 0.1)"),
        ("budget_steps=400", "budget_steps=0.5", "budget_steps must be a whole number"),
        ("return Task(", "return dict(", "must return an offbeat.lab.tasks.Task, got dict"),
    ],
)
def test_what_is_wrong_with_a_users_own_task_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, instead: str, words: str
) -> None:
    code = task_of_the_page(tmp_path)
    assert there in code
    (tmp_path / "my_task.py").write_text(code.replace(there, instead))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    result = CliRunner().invoke(app, ["race", "sync", "--task", "my_task:line"])
    assert result.exit_code == 2, result.output
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("my_task:line")
    assert words in sentence


# ---------------------------------------------------------------- CIFAR-10


def _of_python_2(pixels: bytes, labels: bytes) -> bytes:
    """A batch as the data set's authors have pickled it: protocol 2, byte strings."""
    count = len(pixels) // 3072
    shape = b"K" + bytes([count]) + b"M\x00\x0c\x86"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN" + b"J\xff\xff\xff\xff" * 2
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + (
        shape + kind + b"K\x00tb\x89T" + len(pixels).to_bytes(4, "little") + pixels + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


def _folder_of_pickles(folder: Path, batch: bytes) -> Path:
    for number in range(1, 6):
        (folder / f"data_batch_{number}").write_bytes(batch)
    (folder / "test_batch").write_bytes(batch)
    return folder


def test_cifar10_reads_the_data_sets_own_files(tmp_path: Path) -> None:
    pixels = bytes(number % 251 for number in range(2 * 3072))
    folder = _folder_of_pickles(tmp_path, _of_python_2(pixels, bytes([3, 7])))
    train_x, train_y, test_x, _ = cifar10._loaded(folder)
    assert train_y.tolist() == [3, 7] * 5
    assert test_x.shape == (2, 3, 32, 32)
    back = ((train_x[1] * 0.251 + 0.473) * 255).round().flatten()[:3]
    assert back.tolist() == [3072 % 251, 3073 % 251, 3074 % 251]
    task = tasks.find(f"cifar10:{folder}")
    assert task.loss(task.model(), next(task.batches(0, 1, 0))).isfinite()


def test_cifar10_reads_what_todays_python_has_pickled(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    data = {b"data": numpy.full((1, 3072), 7, numpy.uint8), b"labels": [4]}
    folder = _folder_of_pickles(tmp_path, pickle.dumps(data, protocol=2))
    assert cifar10._loaded(folder)[1].tolist() == [4] * 5


def test_cifar10_runs_nothing_that_a_pickle_asks_for(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    hostile = b"cos\nsystem\n(S'touch " + str(proof).encode() + b"'\ntR."
    folder = _folder_of_pickles(tmp_path, hostile)
    with pytest.raises(ValueError, match=r"data_batch_1: .*asks for os.system"):
        tasks.find(f"cifar10:{folder}")
    assert not proof.exists()
    pickle.loads(hostile)  # the fault is real: a plain unpickler obeys
    assert proof.exists()


def test_cifar10_reads_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = bytes(number % 256 for number in range(2 * 3072))
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"):
        image.frombytes("RGB", (1024, 2), pixels).save(tmp_path / f"{name}.png")
    image.frombytes("RGB", (1024, 2), pixels).save(tmp_path / "test_batch.png")
    (tmp_path / "train_lables.json").write_text(json.dumps([1, 2] * 5))
    (tmp_path / "test_lables.json").write_text(json.dumps([1, 2]))
    train_x, train_y, _, test_y = cifar10._loaded(tmp_path)
    assert (train_x.shape, test_y.tolist()) == ((10, 3, 32, 32), [1, 2])
    assert train_y.tolist() == [1, 2] * 5
    reds = ((train_x[0, 0, 0, :3] * 0.251 + 0.473) * 255).round()
    assert reds.tolist() == [0, 3, 6]


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"no pickle", "data_batch_1: not a file of CIFAR-10"), (None, "no CIFAR-10 in this folder")],
)
def test_cifar10_says_what_is_wrong_with_a_folder(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    if content is not None:
        _folder_of_pickles(tmp_path, content)
    with pytest.raises(ValueError, match=words):
        tasks.find(f"cifar10:{tmp_path}")


def test_cifar10_without_a_folder_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFBEAT_CIFAR10", raising=False)
    with pytest.raises(ValueError, match="cifar10:FOLDER"):
        tasks.find("cifar10")


# ---------------------------------------------------------------- Fashion-MNIST


def _folder_of_idx(folder: Path, count: int = 40) -> Path:
    """Files as the data set has them: images of one brightness for each class."""
    for part in ("train", "t10k"):
        labels = bytes(number % 10 for number in range(count))
        pixels = b"".join(bytes([25 * label]) * 784 for label in labels)
        for name, header, content in (("images-idx3", 16, pixels), ("labels-idx1", 8, labels)):
            path = folder / f"{part}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(bytes(header) + content))
    return folder


def test_fashion_reads_the_data_sets_own_files(tmp_path: Path) -> None:
    task = tasks.find(f"fashion:{_folder_of_idx(tmp_path)}")
    x, y = next(task.batches(0, 4, 0))
    assert x.shape == (32, 784)
    assert torch.equal(((x[:, 0] * 0.353 + 0.286) * 255 / 25).round().long(), y)
    before, after = trained(task, 40)
    assert after < 0.9 * before


def test_unlike_data_are_split_among_all_workers_and_nobody_is_without(tmp_path: Path) -> None:
    task = tasks.find(f"fashion-skewed:{_folder_of_idx(tmp_path, 400)}")
    labels = torch.arange(4000) % 10
    mine = fashion.shards(labels, 8, seed=3)
    assert torch.equal(torch.cat(mine).sort().values, torch.arange(4000))
    assert all(map(torch.equal, mine, fashion.shards(labels, 8, seed=3)))
    assert not all(map(torch.equal, mine, fashion.shards(labels, 8, seed=4)))
    biggest = max(mine, key=len)
    assert labels[biggest].bincount(minlength=10).max() > 0.25 * len(biggest)  # 0.1 if alike
    assert all(len(each) for each in fashion.shards(labels[:20], 64, seed=0))
    assert len(next(task.batches(7, 8, 0))[1]) == 32


def test_what_is_wrong_with_fashion_files_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Debian's package dataset-fashion-mnist"):
        tasks.find(f"fashion:{tmp_path}")
    folder = _folder_of_idx(tmp_path)
    path = folder / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for content, words in (
        (b"nothing", "cannot be read: Not a gzipped file"),
        (whole[:-20], "not a whole file"),
        (gzip.compress(bytes(16 + 784)), "784 bytes of train images do not go with 40 labels"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            tasks.find(f"fashion:{folder}")


def test_a_schedule_is_stepped_by_synchronous_rounds_worth_of_steps() -> None:
    task = tasks.find("text-adamw")
    assert task.schedule is not None
    optimizer = task.optimizer(task.model())
    scheduler, rates = task.schedule(optimizer), []
    for _ in range(700):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert max(rates) == rates[29] == pytest.approx(4e-3)
    assert rates[0] == pytest.approx(4e-3 / 30)
    assert rates[600:] == [pytest.approx(4e-4)] * 100
