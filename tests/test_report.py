"""Reports: records of real virtual runs in; tables, pages, traces and scalars out."""

from __future__ import annotations

import html
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import colours, hover, opened
from rich.console import Console
from test_survival import Lives
from test_survival import cluster as crashing
from torch import nn
from typer.testing import CliRunner, Result

import offbeat
from offbeat import report, testing
from offbeat.cli import app
from offbeat.errors import ReportError
from offbeat.lab import digits
from offbeat.records import Line, RecordsFile, worker_file
from offbeat.report.columns import tick
from offbeat.report.curves import curve
from offbeat.report.lines import Begin, Compute, Round, Wait
from offbeat.report.pieces import as_script
from offbeat.report.spans import STATES, seconds_by_state, spans

CLUSTER = "two-slow-of-eight"
CLUSTER_FILE = (files("offbeat.clusters") / "named" / f"{CLUSTER}.toml").read_text()
ALGORITHMS = {
    "sync": offbeat.SyncSGD(),
    "eager:quorum=solo": offbeat.EagerSGD(quorum="solo"),
    "msync:m=6": offbeat.MSyncSGD(6),
}
SEEDS = (0, 1)
NASTY = "</script><script>window.broken = true</script><!-- <script>"


def train(algorithm: offbeat.Algorithm, seed: int, steps: int, tell: Callable[[Line], None]) -> Any:
    """Learn digits for a few steps; worker 0 says how well after every second round."""
    rank, size = offbeat.rank(), offbeat.world_size()
    torch.manual_seed(seed)
    train_x, train_y, test_x, test_y = digits.split()
    drawn = torch.Generator().manual_seed(1000 * seed + rank)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    told = 0
    with offbeat.attach(model, optimizer, algorithm) as dp:
        for _ in range(steps):
            batch = torch.randint(len(train_x[rank::size]), (8,), generator=drawn)
            optimizer.zero_grad()
            dp.samples(8)
            loss = nn.functional.cross_entropy(
                model(train_x[rank::size][batch]), train_y[rank::size][batch]
            )
            loss.backward()
            optimizer.step()
            if rank == 0 and dp.round >= told + 2:
                told = dp.round
                outputs = model(test_x)
                tell(
                    {
                        "kind": "evaluation",
                        "at_s": dp.seconds,
                        "round": dp.round,
                        "samples": sum(each.samples for each in dp.stats().history),
                        "loss": nn.functional.cross_entropy(outputs, test_y).item(),
                        "accuracy": (outputs.argmax(1) == test_y).float().mean().item(),
                    }
                )
    return dp.stats()


def recorded(label: str, seed: int, steps: int = 12) -> list[Line]:
    """The lines that a race would write of one run."""
    algorithm, lines = ALGORITHMS[label], []
    offbeat.run(
        lambda: train(algorithm, seed, steps, lines.append),
        CLUSTER,
        seed=seed,
        records=lines.append,
    )
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    reached = [line["at_s"] for line in evaluations if line["accuracy"] >= 0.3]
    about = {"algorithm": repr(algorithm), "settings": asdict(algorithm), "seed": seed}
    about |= {"world": "virtual", "cluster": CLUSTER}
    begin = {
        **{"kind": "run", "label": label, "cluster_file": CLUSTER_FILE, "workers": 8},
        **{"task": "digits", "command": f"offbeat race --cluster {CLUSTER}", "offbeat": "0.1.0"},
        **{"target": "accuracy=0.3"},
    }
    result = {
        "kind": "result",
        "seconds_to_target": reached[0] if reached else None,
        "final_accuracy": evaluations[-1]["accuracy"],
    }
    return [begin | about, *lines, result | about]


def written(path: Path, lines: list[Line]) -> Path:
    file = RecordsFile(path)
    for line in lines:
        file(line)
    file.close()
    return path


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are tiny: a second thread would only get in the way of other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    found = [line for label in ALGORITHMS for seed in SEEDS for line in recorded(label, seed)]
    return [*found, {"kind": "verdict", "text": f"Take m-synchronous SGD. {NASTY}"}]


@pytest.fixture(scope="module")
def race(lines: list[Line], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("records") / "race.jsonl", lines)


@pytest.fixture(scope="module")
def runs(race: Path) -> report.Runs:
    return report.load([race])


def offbeat_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# --- loading -------------------------------------------------------------------------------------


def test_every_line_of_a_file_comes_back(lines: list[Line], runs: report.Runs) -> None:
    assert [(run.about.label, run.about.seed) for run in runs] == [
        (label, seed) for label in ALGORITHMS for seed in SEEDS
    ]
    for kind, attribute in (
        ("compute", "computes"),
        ("wait", "waits"),
        ("round", "rounds"),
        ("evaluation", "evaluations"),
        ("end", "ends"),
    ):
        expected = sum(line["kind"] == kind for line in lines)
        assert expected
        assert sum(len(getattr(run, attribute)) for run in runs) == expected
    assert runs.verdicts == [lines[-1]["text"]]


def test_a_folder_of_workers_files_is_one_run_named_after_it(tmp_path: Path) -> None:
    lines = [line for line in recorded("sync", 0) if line["kind"] not in ("run", "result")]
    for rank in range(8):
        mine = [line for line in lines if line.get("rank", 0) == rank]
        written(worker_file(tmp_path / "tuesday", rank), mine)
    (run,) = report.load([tmp_path / "tuesday"])
    assert (run.name, run.workers, len(run.ends)) == ("tuesday", 8, 8)
    assert run.about.world == "real"


def test_of_an_ordinary_script_nothing_is_said_of_targets_and_tries(tmp_path: Path) -> None:
    left_out = ("run", "result", "evaluation")
    lines = [line for line in recorded("sync", 0) if line["kind"] not in left_out]
    for rank in range(8):
        mine = [line for line in lines if line.get("rank", 0) == rank]
        written(worker_file(tmp_path / "tuesday", rank), mine)
    done = offbeat_command("report", tmp_path / "tuesday", "-o", tmp_path / "r.html")
    table = done.output.splitlines()[:3]
    assert table[0].split() == ["run", "utilisation", "waited", "dropped", "staleness"]
    assert "–" not in table[1]
    assert table[2].startswith("times in s; waited: all workers together; staleness: mean, most")
    page = (tmp_path / "r.html").read_text()
    assert "<h2>In short</h2>" in page
    assert "A target is reached" not in page
    assert "time to target" not in page


def test_a_killed_worker_is_counted_by_its_spans(tmp_path: Path) -> None:
    lines = [line for line in recorded("sync", 0) if line.get("rank") in (0, 1)]
    (whole,) = report.load([written(tmp_path / "whole.jsonl", lines)])
    killed = written(tmp_path / "killed.jsonl", [line for line in lines if line["kind"] != "end"])
    killed.write_text(killed.read_text() + '{"kind": "compute", "rank": 1, "from')  # cut off
    (cut,) = report.load([killed])
    assert not cut.ends
    assert whole.ends
    for rank in (0, 1):
        assert cut.totals[rank].compute_s == pytest.approx(whole.totals[rank].compute_s)
        assert cut.totals[rank].wait_s == pytest.approx(whole.totals[rank].wait_s, rel=0.05)
        assert cut.totals[rank].samples == whole.totals[rank].samples


def test_a_worker_that_attached_twice_is_counted_in_full(tmp_path: Path) -> None:
    lines = [line for line in recorded("sync", 0) if line.get("rank") == 0]
    (once,) = report.load([written(tmp_path / "once.jsonl", lines)])
    (twice,) = report.load([written(tmp_path / "twice.jsonl", lines + lines)])
    assert twice.totals[0].samples == 2 * once.totals[0].samples
    assert twice.totals[0].utilization == once.totals[0].utilization


def test_counts_beyond_32_bits_do_not_break_the_page(tmp_path: Path) -> None:
    lines = [
        {**line, "samples": 1e12} if "samples" in line else line for line in recorded("sync", 0)
    ]
    assert "<html" in report.html.page(report.load([written(tmp_path / "tokens.jsonl", lines)]))


def test_a_loss_is_on_the_page_in_the_trace_and_in_the_scalars(tmp_path: Path) -> None:
    told: list[Line] = []
    offbeat.run(Lives(offbeat.EagerSGD()), crashing((1, 0.3)), records=told.append)
    runs = report.load([written(tmp_path / "lost.jsonl", told)])
    (run,) = runs
    (loss,) = run.losses
    assert loss.workers == 3
    assert (
        loss.lost_samples == next(line for line in told if line["kind"] == "lost")["lost_samples"]
    )
    assert "worker 1 was lost at virtual time 0.3 s; 3 workers went on" in loss.sentence
    assert loss.sentence in report.html.page(runs)
    assert [e["name"] for e in report.trace.events(runs) if e["ph"] == "i"] == [loss.sentence]
    assert ("members/workers", 3.0, loss.round, loss.at_s) in report.scalars.scalars(run)


@pytest.mark.real
def test_what_real_processes_record_can_be_reported(tmp_path: Path) -> None:
    testing.processes(
        train_and_be_silent, 2, environment={"OFFBEAT_RECORDS": str(tmp_path / "real")}
    )
    (run,) = report.load([tmp_path / "real"])
    assert run.workers == 2
    assert len(run.ends) == 2
    assert len(run.distinct_rounds) == 4
    assert 0 < report.rows(report.load([tmp_path / "real"]))[0].utilization <= 1
    assert offbeat_command("trace", tmp_path / "real", "-o", tmp_path / "t.json").exit_code == 0
    assert offbeat_command("report", tmp_path / "real", "-o", tmp_path / "r.html").exit_code == 0


@pytest.mark.real
def test_who_attaches_again_writes_on_in_the_same_file(tmp_path: Path) -> None:
    folder = tmp_path / "twice"
    testing.processes(train_twice, 2, environment={"OFFBEAT_RECORDS": str(folder)})
    (run,) = report.load([folder])
    assert len(run.ends) == 4
    assert [line.round for line in run.distinct_rounds] == list(range(8))
    for rank in range(2):
        mine = [line for line in (*run.computes, *run.waits) if line.rank == rank]
        mine.sort(key=lambda line: line.from_s)
        assert len(mine) >= 16
        assert all(a.to_s <= b.from_s + 1e-9 for a, b in pairwise(mine))
        first, second = (end.at_s for end in run.ends if end.rank == rank)
        assert sum(first <= line.from_s for line in mine if isinstance(line, Compute)) == 4
        assert second > first


def train_twice() -> None:
    train_and_be_silent()
    train_and_be_silent()


def train_and_be_silent() -> None:
    train(offbeat.SyncSGD(), 0, 4, lambda line: None)


# --- figures -------------------------------------------------------------------------------------


def test_waiting_becomes_synchronising_when_the_last_worker_has_joined() -> None:
    run = report.Run(Begin(kind="run", label="by hand"))
    run.computes = [
        Compute(kind="compute", rank=0, from_s=0.0, to_s=1.0, samples=4.0, arrival="on time"),
        Compute(kind="compute", rank=1, from_s=0.0, to_s=3.0, samples=4.0, arrival="late"),
    ]
    run.waits = [
        Wait(kind="wait", rank=0, from_s=1.0, to_s=3.5, round=0),
        Wait(kind="wait", rank=1, from_s=3.0, to_s=3.5, round=0),
        Wait(kind="wait", rank=1, from_s=3.5, to_s=4.0, round=None),
    ]
    facts: dict[str, Any] = {"at_s": 3.5, "samples": 8.0, "workers": 2, "staleness_rounds": 0}
    run.rounds = [
        Round(kind="round", rank=0, round=0, from_s=1.0, to_s=3.5, **facts),
        Round(kind="round", rank=1, round=0, from_s=3.0, to_s=3.5, **facts),
    ]
    assert [(s.rank, s.from_s, s.to_s, STATES[s.state]) for s in spans(run)] == [
        (0, 0.0, 1.0, "computing"),
        (0, 1.0, 3.0, "waiting"),
        (0, 3.0, 3.5, "synchronising"),
        (1, 0.0, 3.0, "late"),
        (1, 3.0, 3.5, "synchronising"),
        (1, 3.5, 4.0, "waiting"),
    ]
    assert seconds_by_state(spans(run)) == [1.0, 3.0, 0.0, 0.0, 2.5, 1.0]


def test_the_table_compares_with_the_synchronous_one(runs: report.Runs) -> None:
    rows = {row.name: row for row in report.rows(runs)}
    assert list(rows) == list(ALGORITHMS)
    sync, msync = rows["sync"], rows["msync:m=6"]
    assert sync.speed_up == 1.0
    assert sync.seconds_to_target is not None
    assert msync.seconds_to_target is not None
    times = {
        (run.about.label, run.about.seed): run.result.seconds_to_target
        for run in runs
        if run.result is not None
    }
    assert msync.speed_up == statistics.median(
        times["sync", seed] / times["msync:m=6", seed] for seed in SEEDS
    )
    assert msync.speed_up > 1
    assert sync.dropped == 0.0
    assert msync.dropped is not None
    assert msync.dropped > 0.05
    assert rows["eager:quorum=solo"].max_staleness_rounds > 0
    for row in rows.values():
        assert row.utilization is not None
        assert 0.4 < row.utilization < 1.0
        assert len(row.accuracies) == len(SEEDS)


def test_a_seed_that_missed_the_target_counts_as_infinitely_long(
    lines: list[Line], tmp_path: Path
) -> None:
    def times(*values: float | None) -> report.Row:
        about = {"kind": "run", "label": "sync", "algorithm": "SyncSGD()"}
        results = [
            line
            for value in values
            for line in (about, {"kind": "result", "seconds_to_target": value})
        ]
        return report.rows(report.load([written(tmp_path / "times.jsonl", results)]))[0]

    assert times(3.0, 1.0, 2.0).seconds_to_target == 2.0
    assert times(1.0, None, 2.0).seconds_to_target == 2.0
    assert times(1.0, None, None).seconds_to_target is None
    assert times(1.0, None).seconds_to_target is None
    assert times(1.0, None, None).times == (1.0,)


def test_settings_at_the_edge_of_what_was_tried_are_named_beside_every_table(
    lines: list[Line], tmp_path: Path
) -> None:
    edged = [
        line | {"edge": "higher lr <&>"}
        if line["kind"] == "run" and line["label"] == "sync"
        else line
        for line in lines
    ]
    path = written(tmp_path / "edged.jsonl", edged)
    words = "Not tried, though the best was next to it (sync: higher lr <&>): more --trials."
    assert report.edges(report.load([path])) == [words]
    done = offbeat_command("report", path, "-o", tmp_path / "out.html")
    assert words in done.stdout.replace("\n", " ")
    assert html.escape(words, quote=False) in (tmp_path / "out.html").read_text()


def test_runs_on_two_clusters_are_not_mixed(lines: list[Line], tmp_path: Path) -> None:
    other = [{**line, "cluster": "uniform-8"} for line in lines if line["kind"] != "verdict"]
    both = report.load([written(tmp_path / "a.jsonl", lines), written(tmp_path / "b.jsonl", other)])
    names = [row.name for row in report.rows(both)]
    assert len(names) == len(set(names)) == 2 * len(ALGORITHMS)
    assert f"sync, {CLUSTER}" in names
    assert "sync, uniform-8" in names


def test_the_table_fits_into_80_columns_and_loses_no_column(runs: report.Runs) -> None:
    console = Console(width=80, file=None, record=True, highlight=False)
    with console.capture() as captured:
        console.print(report.table(runs))
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "accuracy" in text
    assert "virtual s" in text
    for row in report.rows(runs):
        assert f"{sum(row.accuracies) / len(row.accuracies):.1%}" in text


def test_a_curve_is_the_mean_over_seeds_within_its_band(runs: report.Runs) -> None:
    for group in runs.groups().values():
        x, mean, low, high = curve(group, "accuracy", "at_s")
        assert x == sorted(x)
        assert len(x) > 50
        assert all(a <= b <= c for a, b, c in zip(low, mean, high, strict=True))
        first = max(run.evaluations[0].at_s for run in group)
        assert x[0] == first
    one = curve(group[:1], "loss", "samples")
    assert one.mean == [line.loss for line in group[0].evaluations]


def test_a_tick_is_fine_enough_and_fits_into_32_bits() -> None:
    for seconds in (0.0, 1e-6, 0.3, 1.0, 12.8, 86_400.0, 1e9):
        assert seconds / tick(seconds) < 2**31
        assert tick(seconds) <= max(1e-9, seconds / 1e8)


# --- traces --------------------------------------------------------------------------------------


def test_a_trace_is_nested_and_in_order_and_adds_up(race: Path, tmp_path: Path) -> None:
    done = offbeat_command("trace", race, "-o", tmp_path / "trace.json")
    assert done.exit_code == 0, done.output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    loaded = report.load([race])
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == [run.name for run in loaded]
    for process, run in enumerate(loaded, start=1):
        mine = [e for e in events if e["pid"] == process and e["ph"] != "M"]
        assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)
        for rank, totals in run.totals.items():
            bars = [e for e in mine if e["ph"] == "X" and e["tid"] == rank + 1]
            computed = sum(e["dur"] for e in bars if e["name"] in ("computing", "late", "dropped"))
            waited = sum(e["dur"] for e in bars if e["name"] == "waiting")
            assert computed == pytest.approx(1e6 * totals.compute_s)
            assert waited == pytest.approx(1e6 * totals.wait_s)
            assert_nested(bars)
        assert {e["name"] for e in mine if e["ph"] == "C"} == {"loss", "accuracy"}
        rounds = [(e["ph"], e["id2"]["local"]) for e in mine if e["ph"] in "be"]
        assert len(rounds) == 2 * len(run.distinct_rounds) == 2 * len(set(rounds)) / 2


def assert_nested(bars: list[dict[str, Any]]) -> None:
    """Within one thread an event lies inside another one, or outside of it."""
    open_until: list[float] = []
    for bar in bars:
        end = round(bar["ts"] + bar["dur"], 3)
        while open_until and bar["ts"] >= open_until[-1] - 1e-3:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-3
        open_until.append(end)


# --- scalars -------------------------------------------------------------------------------------


def test_scalars_can_be_read_by_tensorboard(race: Path, tmp_path: Path) -> None:
    done = offbeat_command("report", race, "--no-html", "--tensorboard", tmp_path / "tb")
    assert done.exit_code == 0, done.output
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (tmp_path / "tb").glob("sync*seed_0")
    events = EventAccumulator(str(folder)).Reload()
    run = next(iter(report.load([race])))
    assert [e.value for e in events.Scalars("evaluation/accuracy")] == pytest.approx(
        [line.accuracy for line in run.evaluations]
    )
    assert [e.step for e in events.Scalars("worker/utilization")] == list(range(8))
    assert [e.value for e in events.Scalars("round/samples")] == [64.0] * len(run.distinct_rounds)


def test_without_tensorboard_the_error_says_what_to_install(
    race: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.split(".")[0] == "tensorboard" or name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # what a missing package looks like
    done = offbeat_command("report", race, "--no-html", "--tensorboard", tmp_path / "tb")
    assert done.exit_code == 2
    assert "pip install 'offbeat[tensorboard]'" in done.stderr


# --- the command ---------------------------------------------------------------------------------


def test_report_draws_again_and_says_where(race: Path, tmp_path: Path) -> None:
    done = offbeat_command("report", race, "-o", tmp_path / "out.html")
    assert done.exit_code == 0, done.output
    assert "msync:m=6" in done.stdout
    assert f"report: {tmp_path / 'out.html'}" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_without_html_there_is_a_table_only(
    race: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = offbeat_command("report", race, "--no-html")
    assert done.exit_code == 0
    assert "msync:m=6" in done.stdout
    assert not list(tmp_path.iterdir())


GOOD = '{"kind": "wait", "rank": 0, "from_s": 1.0, "to_s": 2.0, "round": null}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "{broken\n", "line 2: not JSON"),
        (GOOD + "[]\n", "line 2: not a record"),
        (GOOD + '{"rank": 0}\n', "line 2: not a record"),
        (GOOD + '{"kind": "compute", "rank": 0}\n', 'line 2, kind "compute", key "from_s"'),
        (GOOD.replace("null", '"x"'), 'line 1, kind "wait", key "round"'),
        (GOOD.replace("2.0", "0.5"), "to_s, 0.5, is before from_s, 1.0"),
        (GOOD.replace("2.0", "NaN"), 'line 1, kind "wait", key "to_s"'),
        (GOOD.replace('"rank": 0', '"rank": -1'), 'line 1, kind "wait", key "rank"'),
        ("", "there is no run in it"),
        ('{"kind": "verdict", "text": "nothing ran"}\n', "there is no run in it"),
        ('{"kind": "of a later version"}\n', "there is no run in it"),
    ],
)
def test_malformed_records_are_refused_in_one_sentence(
    text: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    for command, target in (("report", "out.html"), ("trace", "out.json")):
        done = offbeat_command(command, tmp_path / "bad.jsonl", "-o", tmp_path / target)
        assert done.exit_code == 2
        assert said in done.stderr
        assert "bad.jsonl" in done.stderr
        assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(GOOD.encode() + b"\xff\xfe{}\n")
    with pytest.raises(ReportError, match="line 2: not JSON"):
        report.load([tmp_path / "bad.jsonl"])


def test_records_that_are_not_there_are_refused(tmp_path: Path) -> None:
    done = offbeat_command("report", tmp_path / "nowhere.jsonl")
    assert done.exit_code == 2
    assert "nowhere.jsonl: there is no such file" in done.stderr
    done = offbeat_command("report", tmp_path)
    assert done.exit_code == 2
    assert "no records (*.jsonl) in this folder" in done.stderr


@pytest.mark.parametrize("target", ["/proc/report.html", "{race}/report.html", "{folder}"])
@pytest.mark.parametrize("command", ["report", "trace"])
def test_an_unwritable_target_is_refused(
    command: str, target: str, race: Path, tmp_path: Path
) -> None:
    done = offbeat_command(command, race, "-o", target.format(race=race, folder=tmp_path))
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_no_room_on_disk_leaves_the_old_report_as_it_was(race: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("the old one")
    script = "import sys; from offbeat.cli import app; sys.argv[0] = 'offbeat'; app()"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
    done = subprocess.run(
        [sys.executable, "-c", limit + script, "report", race, "-o", target],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"{target}: cannot be written: File too large\n"
    assert target.read_text() == "the old one"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


# --- the page ------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_nothing_in_it_can_break(runs: report.Runs) -> None:
    page = report.html.page(runs)
    assert len(re.findall(r"<script\b", page)) == len(re.findall(r"</script>", page)) == 3
    assert "default-src 'none'" in page  # the browser keeps it from loading anything
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page.split("<script")[0])
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert [run["name"] for run in data["runs"]] == [run.name for run in runs]


def test_a_script_inside_the_library_could_not_end_the_page() -> None:
    assert as_script('a = "</script>", b = "</SCRIPT >"') == (
        'a = "<\\/script>", b = "<\\/SCRIPT >"'
    )


NAMES = "|".join(sorted(ALGORITHMS, key=len, reverse=True))
CHARTS = (
    *("timeline", "accuracy-at_s", "accuracy-samples"),
    *("loss-at_s", "loss-samples", "shares", "staleness"),
)


@pytest.fixture
def page(browser: Any, runs: report.Runs, tmp_path: Path) -> Any:
    report.html.write(runs, tmp_path / "report.html")
    yield opened(browser, tmp_path / "report.html")
    assert browser.get_log("browser") == []


def zoomed(browser: Any) -> tuple[float, float]:
    """The visible part of the timeline, in per cent."""
    start, end = browser.execute_script(
        "const {start, end} = echarts.getInstanceByDom(document.getElementById('timeline'))"
        ".getOption().dataZoom[0]; return [start, end]"
    )
    return start, end


@pytest.mark.slow
def test_every_chart_is_drawn(page: Any) -> None:
    for chart in CHARTS:
        assert colours(page, chart) > 5, chart
        drawn = page.execute_script(
            "return echarts.getInstanceByDom(document.getElementById(arguments[0]))"
            ".getOption().series.map((series) => series.data.length)",
            chart,
        )
        assert sum(drawn) > 0, chart


@pytest.mark.slow
def test_what_the_records_say_is_shown_as_text_and_not_run(page: Any) -> None:
    shown = page.find_element("tag name", "body").text
    assert f"Take m-synchronous SGD. {NASTY}" in shown
    assert f"offbeat race --cluster {CLUSTER}" in shown
    assert 'kind = "lognormal"' in shown
    assert page.execute_script("return window.broken") is None


@pytest.mark.slow
def test_hovering_shows_the_very_span_that_was_recorded(page: Any, runs: report.Runs) -> None:
    run = next(iter(runs))
    for down in (0.1, 0.45, 0.75):
        text = hover(page, "timeline", 0.4, down)
        rank = int(re.search(r"worker (\d+)", text)[1])
        state = re.search(r"(computing|waiting|synchronising)", text)[1]
        begin, end = re.search(r"([\d.]+) to ([\d.]+)", text).groups()
        assert (begin, end, state) in {
            (f"{span.from_s:.4f}", f"{span.to_s:.4f}", STATES[span.state])
            for span in spans(run)
            if span.rank == rank
        }


@pytest.mark.slow
@pytest.mark.parametrize("chart", ["accuracy-at_s", "shares", "staleness"])
def test_hovering_over_the_other_charts_names_algorithms(page: Any, chart: str) -> None:
    text = hover(page, chart, 0.5, 0.4)
    assert "sync" in text if chart == "shares" else set(ALGORITHMS) <= set(re.findall(NAMES, text))


@pytest.mark.slow
def test_zooming_changes_the_visible_part_and_comes_back(page: Any) -> None:
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    assert zoomed(page) == (0, 100)
    page.find_element("css selector", "[data-zoom='0.5']").click()
    assert zoomed(page) == (25, 75)
    origin = ScrollOrigin.from_element(page.find_element("id", "timeline"))
    wheel = ActionChains(page).key_down(Keys.CONTROL).scroll_from_origin(origin, 0, -200)
    wheel.key_up(Keys.CONTROL).perform()
    start, end = zoomed(page)
    assert 25 < start < end < 75
    page.find_element("css selector", "[data-zoom='all']").click()
    assert zoomed(page) == (0, 100)


@pytest.mark.slow
def test_the_selector_switches_runs(page: Any, runs: report.Runs) -> None:
    from selenium.webdriver.support.ui import Select, WebDriverWait

    name = "msync:m=6, seed 1"
    Select(page.find_element("id", "run")).select_by_visible_text(name)
    chart = "echarts.getInstanceByDom(document.getElementById('timeline'))"
    WebDriverWait(page, 10).until(
        lambda _: page.execute_script(f"return {chart}.offbeatRun.name") == name
    )
    end = page.execute_script(f"return {chart}.getOption().xAxis[0].max")
    chosen = next(run for run in runs if run.name == name)
    assert end == pytest.approx(chosen.seconds)
    assert colours(page, "timeline") > 5


@pytest.mark.slow
def test_more_algorithms_than_colours_have_looks_of_their_own(
    browser: Any, lines: list[Line], tmp_path: Path
) -> None:
    one = lines[: next(at for at, line in enumerate(lines) if line["kind"] == "result") + 1]
    many = [
        line | {"label": f"eager:quorum={count}", "algorithm": f"EagerSGD({count})"}
        if line["kind"] in ("run", "result")
        else line
        for count in range(1, 13)
        for line in one
    ]
    runs = report.load([written(tmp_path / "many.jsonl", many)])
    report.html.write(runs, tmp_path / "many.html")
    page = opened(browser, tmp_path / "many.html")
    swatches = "[...document.querySelectorAll('#algorithms .swatch')]"
    looks = page.execute_script(f"return {swatches}.map((each) => each.style.background)")
    assert len(looks) == len(set(looks)) == 12


@pytest.mark.slow
def test_an_algorithm_can_be_switched_off(page: Any) -> None:
    count = (
        "return echarts.getInstanceByDom(document.getElementById('loss-samples'))"
        ".getOption().series.filter((series) => series.type === 'line').length"
    )
    assert page.execute_script(count) == 3
    page.find_element("css selector", "#algorithms button").click()
    assert page.execute_script(count) == 2


@pytest.mark.slow
def test_the_theme_follows_the_system_until_it_is_chosen(page: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    def becomes(background: str) -> None:
        now = "return getComputedStyle(document.body).backgroundColor"
        WebDriverWait(page, 5).until(lambda _: page.execute_script(now) == background)

    def system(theme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": theme}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    light, dark = "rgb(251, 250, 248)", "rgb(20, 23, 27)"
    system("dark")
    becomes(dark)
    system("light")
    becomes(light)
    page.find_element("id", "theme").click()
    becomes(dark)
    system("dark")
    system("light")
    becomes(dark)  # the system no longer matters
    assert colours(page, "timeline") > 5


@pytest.mark.slow
def test_a_telephone_shows_everything_without_scrolling_sideways(page: Any) -> None:
    metrics = {"width": 375, "height": 812, "deviceScaleFactor": 2, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.refresh()
        opened(page, Path(page.current_url.removeprefix("file://")))
        assert page.execute_script("return document.documentElement.scrollWidth") == 375
        for chart in CHARTS:
            assert colours(page, chart) > 5, chart
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_a_folder_of_workers_files_has_a_page_too(browser: Any, tmp_path: Path) -> None:
    lines = [line for line in recorded("sync", 0) if line["kind"] in ("compute", "wait", "end")]
    for rank in range(8):
        mine = [line for line in lines if line["rank"] == rank]
        written(worker_file(tmp_path / "tuesday", rank), mine)
    report.html.write(report.load([tmp_path / "tuesday"]), tmp_path / "report.html")
    opened(browser, tmp_path / "report.html")
    assert not browser.find_element("id", "learning").is_displayed()  # nobody has evaluated
    assert "not in these records" in browser.find_element("id", "staleness").text
    assert colours(browser, "timeline") > 5
    assert colours(browser, "shares") > 5
    assert browser.get_log("browser") == []


@pytest.mark.slow
def test_a_thousand_workers_open_and_draw(browser: Any, tmp_path: Path) -> None:
    workers, rounds = 1000, 100
    run = report.Run(Begin(kind="run", label="many", workers=workers, world="virtual"))
    for number, rank in ((n, r) for n in range(rounds) for r in range(workers)):
        begin, end = float(number), number + 0.4 + 0.5 * rank / workers
        times: dict[str, Any] = {"rank": rank, "from_s": end, "to_s": number + 1.0}
        run.computes.append(
            Compute(
                **{"kind": "compute", "rank": rank, "from_s": begin, "to_s": end},
                **{"samples": 1.0, "arrival": "on time"},
            )
        )
        run.waits.append(Wait(kind="wait", round=number, **times))
    report.html.write(report.Runs([run], []), tmp_path / "many.html")
    opened(browser, tmp_path / "many.html")
    assert colours(browser, "timeline") > 5
    assert re.search(
        r"workers \d+ to \d+.*\d+ (computing|waiting)", hover(browser, "timeline", 0.3, 0.5), re.S
    )
    browser.execute_script(
        """const chart = echarts.getInstanceByDom(document.getElementById("timeline"));
        chart.dispatchAction({type: "dataZoom", dataZoomIndex: 0, start: 50, end: 53});
        chart.dispatchAction({type: "dataZoom", dataZoomIndex: 2, start: 50, end: 51})"""
    )
    text = hover(browser, "timeline", 0.5, 0.5)
    rank = int(re.search(r"worker (\d+)", text)[1])
    assert 500 <= rank < 510
    moments = [float(each) for each in re.search(r"([\d.]+) to ([\d.]+)", text).groups()]
    assert f"{0.4 + 0.5 * rank / workers:.4f}" in [f"{each % 1:.4f}" for each in moments]
    assert browser.get_log("browser") == []


def test_without_a_target_nothing_is_said_of_reaching_it(tmp_path: Path) -> None:
    def words(target: str | None) -> str:
        about = {"kind": "run", "label": "LocalSGD", "algorithm": "LocalSGD", "target": target}
        end = {"kind": "end", "rank": 0, "at_s": 1.0, "steps": 1, "compute_s": 1.0, "wait_s": 0.0}
        path = tmp_path / f"{target}.jsonl"
        path.write_text(
            "".join(
                json.dumps(line) + "\n"
                for line in (about, {**end, "samples": 1.0, "dropped_samples": 0.0})
            )
        )
        return CliRunner().invoke(app, ["report", str(path)]).output

    assert "not reached" not in words(None)
    assert "not reached" in " ".join(words("accuracy=0.3").split())
