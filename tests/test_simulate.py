"""`offbeat simulate` and `offbeat clusters`: what they promise to the user of a script."""

import logging
import os
import re
import signal
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch.distributed as dist
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

import offbeat
from offbeat import records
from offbeat.cli import app
from offbeat.clusters import Cluster, named
from offbeat.lab.simulate import Simulation, simulate

TRAIN = """
import sys
import torch
import offbeat

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with offbeat.attach(model, optimizer) as dp:
    for step in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
"""


def written(folder: Path, text: str) -> Path:
    """A script of the user."""
    path = folder / "train.py"
    path.write_text(dedent(text))
    return path


def offbeat_command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def simulated(script: Path, *arguments: str | Path) -> Result:
    return offbeat_command("simulate", script, "--cluster", "uniform-8", *arguments)


# ---------------------------------------------------------------- the script


def test_dealt_data_come_once_an_epoch(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import sys
        import torch
        import offbeat
        from torch.utils.data import DataLoader, TensorDataset

        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dataset = TensorDataset(torch.arange(60), torch.ones(60, 2))
        deal = offbeat.Deal(dataset, batch_size=2)
        loader = DataLoader(dataset, batch_sampler=deal)
        got = []
        with offbeat.attach(model, optimizer, offbeat.ABSSGD()) as dp:
            for epoch in range(2):
                deal.set_epoch(epoch)
                for index, x in loader:
                    got += index.tolist()
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    optimizer.step()
        print("got", *got)
        """,
    )
    result = simulated(script, "--workers", "3", "--verbose")
    assert result.exit_code == 0, result.output
    got = [line.split()[2:] for line in result.stdout.splitlines() if "] got" in line]
    assert len(got) == 3
    assert sorted(int(i) for each in got for i in each) == sorted([*range(60)] * 2)


def test_every_worker_runs_the_script_and_worker_0_is_heard(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import offbeat
        assert __name__ == "__main__"
        print(f"{offbeat.rank()} of {offbeat.world_size()}")
        """,
    )
    result = simulated(script)
    assert result.exit_code == 0, result.output
    assert "0 of 8\n" in result.stdout
    assert "1 of 8" not in result.stdout


def test_verbose_shows_whole_lines_behind_their_ranks(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        TRAIN + 'print("one", end=" "); print("line"); sys.stderr.write("no end")',
    )
    result = simulated(script, "--workers", "3", "--verbose")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("[0] one line\n[1] one line\n[2] one line\n")
    assert result.stderr == "[0] no end\n[1] no end\n[2] no end\n"


def test_a_script_finds_its_arguments_its_file_and_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "a_neighbour_of_train.py").write_text("word = 'hello'")
    script = written(
        tmp_path,
        "import sys, a_neighbour_of_train; print(a_neighbour_of_train.word, *sys.argv, __file__)",
    )
    result = simulated(script, "--workers", "2", "--", "--epochs", "3")
    assert f"hello {script} --epochs 3 {script}\n" in result.stdout


def test_workers_do_not_share_the_script_s_globals(tmp_path: Path) -> None:
    script = written(
        tmp_path, "import offbeat\nmine = offbeat.rank()" + TRAIN + "assert mine == offbeat.rank()"
    )
    assert simulate(script, Cluster.uniform(4)).error is None


def test_classes_of_the_script_can_be_pickled_on_every_worker(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import pickle
        class Settings:
            pass
        """
        + TRAIN.replace("\n", "\n        ")
        + """
        assert type(pickle.loads(pickle.dumps(Settings()))) is Settings
        """,
    )
    assert simulate(script, Cluster.uniform(3)).error is None


def test_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    before = sys.argv, sys.path, sys.stdout, sys.stderr, sys.modules["__main__"]
    assert simulate(written(tmp_path, TRAIN), Cluster.uniform(2)).error is None
    assert simulate(written(tmp_path, "1 / 0"), Cluster.uniform(2)).error is not None
    after = sys.argv, sys.path, sys.stdout, sys.stderr, sys.modules["__main__"]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_what_is_not_closed_is_closed_at_the_end_of_the_script(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import offbeat, torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dp = offbeat.attach(model, optimizer)
        for step in range(offbeat.rank()):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
        """,
    )
    simulation = simulate(script, Cluster.uniform(3, step_s=1.0))
    assert simulation.error is None
    assert simulation.virtual_s == 2.0
    assert simulation.shares == {0: 0.0, 1: 0.5, 2: 1.0}


# ---------------------------------------------------------------- what it would find elsewhere


def test_attaching_makes_a_process_group_as_on_real_processes(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import torch.distributed as dist
        assert not dist.is_initialized()
        """
        + TRAIN.replace("\n", "\n        ")
        + """
        dist.all_reduce(total := torch.ones(1))
        assert total.item() == dist.get_world_size() == 3
        """,
    )
    assert simulate(script, Cluster.uniform(3)).error is None


def test_a_script_finds_the_environment_that_torchrun_makes(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import os, offbeat\nmine = int(os.environ['RANK'])"
        + TRAIN
        + dedent("""
        assert mine == int(os.getenv("RANK")) == offbeat.rank()
        assert int(os.environ["LOCAL_RANK"]) == int(os.environ["ROLE_RANK"]) == mine
        assert [os.environ[n] for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["3", "3"]
        assert [os.environ[n] for n in ("GROUP_RANK", "GROUP_WORLD_SIZE")] == ["0", "1"]
        assert dict(os.environ) == os.environ.copy() and "PATH" in os.environ
        os.environ["SET_BY_A_SCRIPT"] = "1"
        """),
    )
    before = os.environ
    assert simulate(script, Cluster.uniform(3)).error is None
    assert os.environ is before
    assert "RANK" not in os.environ
    assert os.environ.pop("SET_BY_A_SCRIPT") == "1"


def test_a_worker_changes_names_of_its_own_environment_alone(tmp_path: Path) -> None:
    """As Lightning does, which deletes WORLD_SIZE when it ends."""
    path = written(
        tmp_path,
        """
        import os
        import offbeat
        from offbeat.worlds import enter_world
        world = enter_world()
        if offbeat.rank() == 0:
            del os.environ["WORLD_SIZE"]
            os.environ["LOCAL_RANK"] = "7"
            assert "WORLD_SIZE" not in os.environ and "WORLD_SIZE" not in dict(os.environ)
            assert os.environ.pop("WORLD_SIZE", None) is None
            assert os.environ["LOCAL_RANK"] == "7"
            os.environ["WORLD_SIZE"] = "5"
            assert os.environ["WORLD_SIZE"] == "5" and os.environ["RANK"] == "0"
        world.sleep_until(1.0)
        if offbeat.rank() == 1:
            assert os.environ["WORLD_SIZE"] == "2" and os.environ["LOCAL_RANK"] == "1"
        """,
    )
    assert simulate(path, Cluster.uniform(2)).error is None
    assert "LOCAL_RANK" not in os.environ
    assert "WORLD_SIZE" not in os.environ


def test_a_process_group_of_the_script_is_simulated(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import torch, torch.distributed as dist, offbeat
        from torch.utils.data import DistributedSampler
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        assert dist.is_initialized()
        assert (dist.get_rank(), dist.get_world_size()) == (offbeat.rank(), 4)
        sampler = DistributedSampler(range(8), shuffle=False)
        assert list(sampler) == [dist.get_rank(), dist.get_rank() + 4]
        values = [torch.tensor([float(dist.get_rank())]) for _ in range(4)]
        dist.all_reduce(values[0])
        dist.all_reduce(values[1], op=dist.ReduceOp.MAX)
        dist.all_reduce(values[2], op=dist.ReduceOp.AVG)
        dist.broadcast(values[3], src=2)
        assert [value.item() for value in values] == [6, 3, 1.5, 2]
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
        """,
    )
    simulation = simulate(script, Cluster.uniform(4, latency_s=1.0))
    assert simulation.error is None, simulation.traceback()
    assert simulation.virtual_s == 5 * 2.0  # two phases each
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("dist.get_rank()", "ValueError: the default process group has not been initialized"),
        ("dist.split_group()", "torch.distributed.split_group is not simulated"),
    ],
)
def test_what_a_simulation_has_not_is_said(tmp_path: Path, call: str, words: str) -> None:
    result = simulated(written(tmp_path, f"import torch.distributed as dist\n{call}"))
    assert result.exit_code == 1
    assert words in result.stderr


def test_each_worker_has_its_own_log_handlers(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import logging, sys, offbeat
        log = logging.getLogger("train")
        log.setLevel(logging.INFO)
        log.propagate = False
        shown = logging.StreamHandler(sys.stdout)
        shown.setFormatter(logging.Formatter(f"worker {offbeat.rank()}: %(message)s"))
        log.addHandler(shown)
        """
        + TRAIN.replace("\n", "\n        ")
        + """
        log.info("done")
        """,
    )
    result = simulated(script, "--workers", "3")
    assert result.stdout.count("done") == 1
    assert "worker 0: done\n" in result.stdout
    result = simulated(script, "--workers", "3", "--verbose")
    assert "[1] worker 1: done\n" in result.stdout
    assert result.stdout.count("done") == 3
    assert logging.getLogger("train").handlers == []


def test_of_several_writes_to_one_path_a_whole_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save = 'torch.save(model.state_dict(), "last.pt")'
    script = written(
        tmp_path,
        TRAIN.replace("optimizer.step()", f"optimizer.step(); {save}")
        + f"{save}; assert torch.load('last.pt')['weight'].equal(model.weight)",
    )
    assert simulate(script, Cluster.load("noisy-neighbours-16")).error is None
    assert (tmp_path / "last.pt").is_file()


@pytest.mark.real
def test_a_loader_with_processes_of_its_own_gives_the_same_batches(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        if __name__ == "__main__":
            data = TensorDataset(torch.arange(6.0))
            loader = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="fork")
            print([batch.tolist() for batch, in loader])
        """,
    )
    result = simulated(script, "--workers", "2")
    assert "[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]\n" in result.stdout, result.output


# ---------------------------------------------------------------- its records


def test_records_begin_with_what_was_run_and_hold_every_worker(tmp_path: Path) -> None:
    script, path = written(tmp_path, TRAIN), tmp_path / "new" / "run.jsonl"
    result = simulated(script, "--workers", "3", "--seed", "7", "--records", path)
    assert result.exit_code == 0, result.output
    first, *lines = records.read(path)
    file = Cluster.parse(first.pop("cluster_file"))
    assert file == Cluster.load("uniform-8").resized(3)
    assert first.pop("command").split()[0] == "offbeat"
    assert first == {
        "kind": "run",
        "label": "SyncSGD",
        "algorithm": "SyncSGD",
        "settings": {"micro_batches": 1, "overlap": True},
        "world": "virtual",
        "cluster": "uniform-8@3",
        "workers": 3,
        "task": "train.py",
        "seed": 7,
        "offbeat": offbeat.__version__,
    }
    computed = [line["rank"] for line in lines if line["kind"] == "compute"]
    assert sorted(computed) == [0] * 4 + [1] * 4 + [2] * 4


def test_records_of_a_script_that_attaches_nothing_say_what_was_run(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    simulated(written(tmp_path, "1 / 0"), "--records", path)
    (line,) = records.read(path)
    assert (line["kind"], line["algorithm"]) == ("run", None)


def test_records_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    result = simulated(written(tmp_path, TRAIN), "--records", tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path} cannot be written" in result.stderr


# ---------------------------------------------------------------- its end


def test_the_summary_says_who_waited(tmp_path: Path) -> None:
    cluster = tmp_path / "mine.toml"
    cluster.write_text("workers = 3\nspeed = [1, 1, 0.5]\n[compute]\nstep_s = 1\n")
    result = offbeat_command("simulate", written(tmp_path, TRAIN), "--cluster", cluster)
    assert result.exit_code == 0, result.output
    assert "3 (mine)" in result.stdout
    assert "8.000 virtual seconds" in result.stdout
    assert " events" in result.stdout
    assert " 50 % of the time: workers 0 to 1\n" in result.stdout
    assert "100 % of the time: worker 2" in result.stdout


def test_the_summary_of_many_unlike_workers_names_the_extremes() -> None:
    shares = {rank: (rank * 37 % 100) / 100 for rank in range(100)}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(Simulation(Path("train.py"), "mine", 100, shares=shares).summary())
    lines = [line.strip() for line in captured.get().splitlines()[3:]]
    assert len(lines) == 3
    assert lines[0].endswith("0 % of the time: worker 0")
    assert lines[2].endswith("99 % of the time: worker 27")


def test_a_script_that_attaches_nothing_is_told_why_no_time_has_passed(tmp_path: Path) -> None:
    result = simulated(written(tmp_path, "print('hello')"))
    assert result.exit_code == 0
    assert "virtual time passes only inside offbeat.attach()" in result.stdout


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    script = written(tmp_path, TRAIN + "print(model.weight.tolist())")
    cluster = Cluster.load("noisy-neighbours-16")

    def figures(seed: int) -> tuple[float, int, dict[int, float]]:
        simulation = simulate(script, cluster, seed=seed)
        assert simulation.error is None
        return simulation.virtual_s, simulation.events, simulation.shares

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


@pytest.mark.parametrize("leave", ["sys.exit()", "sys.exit(0)", "raise SystemExit"])
def test_exit_without_a_status_ends_its_worker_quietly(tmp_path: Path, leave: str) -> None:
    script = written(tmp_path, TRAIN + f"if dp.rank == 1: {leave}\nprint('the end')")
    result = simulated(script, "--workers", "3", "--verbose")
    assert result.exit_code == 0
    assert result.stdout.startswith("[0] the end\n[2] the end\n")
    assert result.stderr == ""


@pytest.mark.parametrize(("status", "shown"), [("3", "3"), ("'no data'", "no data")])
def test_exit_with_a_status_is_an_error(tmp_path: Path, status: str, shown: str) -> None:
    result = simulated(written(tmp_path, TRAIN + f"if dp.rank == 1: sys.exit({status})"))
    assert result.exit_code == 1
    assert f"SystemExit: {shown}\nin worker 1 at virtual time " in result.stderr


def test_wrong_arguments_are_explained_by_the_script_without_a_traceback(tmp_path: Path) -> None:
    script = written(tmp_path, "import argparse; argparse.ArgumentParser().parse_args()")
    result = simulated(script, "--", "--epochs")
    assert result.exit_code == 1
    assert result.stderr.count("train.py: error: unrecognized arguments: --epochs") == 1
    assert "Traceback" not in result.stderr


def test_an_interrupt_says_where_the_run_was(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        "import signal"
        + TRAIN
        + "        if (step, dp.rank) == (2, 1): signal.raise_signal(signal.SIGINT)\n",
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
    result = simulated(script, "--workers", "2")
    signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert re.fullmatch(r"interrupted in worker 1 at virtual time 0\.3\S* s\n", result.stderr)


def test_an_error_shows_the_user_s_frames_the_rank_and_the_virtual_time(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        TRAIN.replace("torch.ones(3, 2)", "torch.ones(3, 5 if (step, dp.rank) == (2, 1) else 2)"),
    )
    cluster = tmp_path / "mine.toml"
    cluster.write_text("workers = 2\n[compute]\nstep_s = 1\n")
    result = offbeat_command("simulate", script, "--cluster", cluster)
    assert result.exit_code == 1
    head, frame, *_ = result.stderr.splitlines()
    assert head == "Traceback (most recent call last):"
    assert frame == f'  File "{script}", line 11, in <module>'
    assert result.stderr.count("File ") == 1
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in result.stderr
    assert result.stderr.endswith("in worker 1 at virtual time 2 s\n")

    result = offbeat_command("simulate", script, "--cluster", cluster, "--verbose")
    assert result.stderr.count("File ") > 3


def test_the_causes_of_an_error_are_shown_without_foreign_frames(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        import json
        try:
            json.loads("{")
        except ValueError as error:
            raise RuntimeError("no settings") from error
        """,
    )
    result = simulated(script)
    assert result.exit_code == 1
    assert "JSONDecodeError" in result.stderr
    assert "RuntimeError: no settings" in result.stderr
    assert result.stderr.count("File ") == result.stderr.count(f'File "{script}"') == 2


def test_a_script_that_is_not_python_is_shown_where(tmp_path: Path) -> None:
    result = simulated(written(tmp_path, "def train(:"))
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    assert "line 1\n    def train(:\n" in result.stderr
    assert "SyntaxError" in result.stderr


# ---------------------------------------------------------------- the command line


def test_an_unknown_cluster_is_refused_with_a_guess(tmp_path: Path) -> None:
    result = offbeat_command("simulate", written(tmp_path, TRAIN), "--cluster", "unifrom-8")
    assert result.exit_code == 2
    assert result.stderr.startswith("unifrom-8: neither a file nor a cluster that ships with")
    assert "did you mean uniform-8?" in result.stderr
    assert "Traceback" not in result.output


def test_who_names_no_cluster_is_told_where_they_are_listed(tmp_path: Path) -> None:
    result = offbeat_command("simulate", written(tmp_path, TRAIN))
    assert result.exit_code == 2
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("offbeat simulate needs --cluster: one of those that")
    assert "`offbeat clusters` lists" in sentence
    assert "two-slow-of-eight" in named()  # which it names


def test_a_cluster_that_cannot_be_resized_is_refused(tmp_path: Path) -> None:
    script = written(tmp_path, TRAIN)
    result = offbeat_command("simulate", script, "--cluster", "two-slow-of-eight", "--workers", "1")
    assert result.exit_code == 2
    assert result.stderr == "two-slow-of-eight resized to 1 workers: needs at least 2\n"


def test_a_missing_script_is_refused(tmp_path: Path) -> None:
    result = simulated(tmp_path / "none.py")
    assert result.exit_code == 2
    assert result.stderr == (
        f"{tmp_path / 'none.py'}: there is no such script; give the path of a Python file\n"
    )


def test_clusters_lists_what_ships_with_offbeat() -> None:
    result = offbeat_command("clusters")
    assert result.exit_code == 0
    for name in named():
        assert f"\n{name} " in result.stdout


def test_clusters_describes_one() -> None:
    result = offbeat_command("clusters", "two-slow-of-eight")
    assert result.stdout == Cluster.load("two-slow-of-eight").describe() + "\n"
    assert offbeat_command("clusters", "no-such-cluster").exit_code == 2


def test_the_version_is_the_package_s() -> None:
    assert offbeat_command("--version").stdout == f"offbeat {offbeat.__version__}\n"
