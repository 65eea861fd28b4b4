"""`offbeat race`: equal conditions, honest figures, and no mess when things go wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from click.testing import Result as CliResult
from rich.console import Console
from typer.testing import CliRunner

import offbeat
from offbeat import leaving
from offbeat.cli import app
from offbeat.lab import contestants
from offbeat.lab.goals import Target, Until
from offbeat.lab.progress import Lines
from offbeat.lab.race import Race
from offbeat.lab.results import Result, Standings
from offbeat.records import Line, read
from offbeat.report import measured, rows

pytestmark = pytest.mark.slow

SRC = Path(offbeat.__file__).parents[1]
CLUSTER = "two-slow-of-eight"


def raced(*algorithms: str, **settings: Any) -> tuple[list[Result], list[Line]]:
    lines: list[Line] = []
    settings = {"cluster": CLUSTER, "task": "quadratic", "seeds": 1, "rates": "1", **settings}
    standings = Race.of(algorithms, **settings).run(sink=lines.append)
    return standings.results, lines


def command(*arguments: str | Path) -> CliResult:
    words = ["race", "--task", "quadratic", "--seeds", "1", "--rates", "1", "--jobs", "1"]
    return CliRunner().invoke(app, [*words, *map(str, arguments)])


# ---------------------------------------------------------------- who races


def test_every_algorithm_races_under_the_name_of_its_file() -> None:
    known = contestants.algorithms()
    assert known["sync"] is offbeat.SyncSGD
    assert known["eager"] is offbeat.EagerSGD
    assert {each.__name__ for each in known.values()} <= set(offbeat.algorithms.__all__)


def test_settings_get_the_types_of_their_fields() -> None:
    made = {
        spec: contestants.parse(spec).algorithm
        for spec in (
            "eager:quorum=majority,late=drop,max_staleness_rounds=none",
            "eager:quorum=3",
            "eager:quorum=0.5,max_staleness_rounds=4",
            "eager:quorum=first:2",
            "sync:micro_batches=2,overlap=false",
            "msync:m=auto",
        )
    }
    assert list(made.values()) == [
        offbeat.EagerSGD("majority", late="drop", max_staleness_rounds=None),
        offbeat.EagerSGD(3),
        offbeat.EagerSGD(0.5, max_staleness_rounds=4),
        offbeat.EagerSGD("first:2"),
        offbeat.SyncSGD(micro_batches=2, overlap=False),
        offbeat.MSyncSGD("auto"),
    ]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("eagr", "no algorithm is called 'eagr': did you mean 'eager'"),
        ("eager:quorom=solo", "eager has no setting 'quorom': did you mean 'quorum'"),
        ("eager:late=maybe", "late must be accumulate or drop, got 'maybe'"),
        ("sync:micro_batches=two", "micro_batches must be a whole number, got 'two'"),
        ("sync:micro_batches=0", "micro_batches must be a whole number above 0, got 0"),
        ("sync:overlap", "settings look like name=value, got 'overlap'"),
        ("sync:overlap=true,overlap=false", "overlap is given twice"),
        ("ddp:m=1", "ddp has no settings"),
    ],
)
def test_what_is_wrong_with_a_contestant_is_said(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        contestants.parse(spec)


def test_settings_must_fit_the_cluster() -> None:
    with pytest.raises(ValueError, match=r"eager:quorum=9: .*between 1 and the 8 workers, got 9"):
        Race.of(["eager:quorum=9"], cluster=CLUSTER)
    with pytest.raises(ValueError, match="sync is named twice"):
        Race.of(["sync", "sync"], cluster=CLUSTER)


def test_the_default_contestants_are_those_that_are_there() -> None:
    labels = [each.label for each in contestants.default("virtual")]
    assert labels[:3] == ["sync", "eager", "eager:quorum=solo"]
    assert {label.partition(":")[0] for label in labels} <= set(contestants.algorithms())
    assert contestants.default("real")[0].label == "ddp"


# ---------------------------------------------------------------- goals


def test_targets_and_ends_are_read_from_words() -> None:
    assert Target.parse("accuracy=0.9").reached(9.9, 0.9)
    assert Target.parse("loss=0.5").reached(0.5, None)
    assert not Target.parse("accuracy=0.9").reached(0.0, None)
    assert Until.parse("1.5s") == Until("seconds", 1.5)
    assert Until.parse("300rounds").share(0.0, 150, 0.0) == 0.5
    assert Until.parse("20000samples").share(0.0, 0, 20000.0) == 1.0


@pytest.mark.parametrize("text", ["", "60", "0s", "-1s", "60 minutes", "nans", "1e999s", "..s"])
def test_an_end_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="until must be target, or such as 60s"):
        Until.parse(text)


@pytest.mark.parametrize("text", ["accuracy", "accuracy=2", "speed=1", "loss=nan", "loss="])
def test_a_target_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="accuracy"):
        Target.parse(text)


# ---------------------------------------------------------------- timing alone


def timed(*algorithms: str, until: str = "20rounds") -> tuple[list[Result], list[Line]]:
    return raced(*algorithms, task="timing", until=until)


def test_every_algorithm_can_be_timed() -> None:
    labels = [each.label for each in contestants.default("virtual")]
    results, _ = timed(*labels, "lbbsp", "local", until="4s")
    for result in results:
        assert result.error is None, result.error
        assert result.steps
        assert result.rounds
        assert result.samples == 32 * result.steps
        assert result.replicas_identical
        assert result.target is result.final_loss is result.final_accuracy is None


@pytest.mark.parametrize("algorithm", ["sync", "eager:quorum=solo", "abs", "waitfree"])
def test_a_race_comes_to_what_its_records_say_and_to_the_same_without_them(algorithm: str) -> None:
    (result,), lines = raced(algorithm, task="timing", until="2000samples")
    (silent,) = (
        Race.of([algorithm], cluster=CLUSTER, task="timing", seeds=1, until="2000samples")
        .run()
        .results
    )
    assert silent == result
    rounds = [line for line in lines if line["kind"] == "round" and line["rank"] == 0]
    samples = sum(line["samples"] for line in rounds)
    stale = sum(line["samples"] * line["mean_staleness_rounds"] for line in rounds)
    assert samples >= 2000
    assert result.mean_staleness_rounds == stale / samples
    assert result.max_staleness_rounds == max(line["staleness_rounds"] for line in rounds)


@pytest.mark.parametrize("algorithm", ["sync", "eager", "eager:quorum=solo", "abs", "waitfree"])
def test_without_tensors_everything_happens_when_it_does_with_them(algorithm: str) -> None:
    def happened(task: str) -> tuple[list[Any], list[float]]:
        _, lines = raced(algorithm, task=task, until="12rounds", cluster="half-speed-4")
        kept = [line for line in lines if line["kind"] in ("compute", "round")]
        kept.sort(key=lambda line: (line["rank"], line["kind"], line["from_s"]))
        names = ("rank", "kind", "arrival", "round", "staleness_rounds")
        facts = [[line.get(name) for name in names] for line in kept]
        return facts, [line[name] for line in kept for name in ("from_s", "to_s")]

    (facts, moments), (same_facts, same_moments) = map(happened, ("timing", "quadratic"))
    assert facts == same_facts
    assert moments == pytest.approx(same_moments, abs=1e-2)  # messages are smaller


def test_a_race_by_timing_says_who_is_fastest_and_not_whom_to_use() -> None:
    result = command("sync", "eager:quorum=solo", "--task", "timing")
    assert result.exit_code == 0, result.stderr
    assert "samples/s" in result.stdout
    assert "final" not in result.stdout
    assert "The most samples a second has eager:quorum=solo" in result.stdout
    assert "rounds in" in result.stderr


def test_the_speed_up_of_a_race_by_timing_is_that_of_samples_a_second() -> None:
    standings = Race.of(["sync", "eager"], cluster=CLUSTER, task="timing", seeds=1).run()
    sync, eager = (row for row in rows(measured(standings.lines)))
    assert sync.samples_per_s
    assert eager.samples_per_s
    assert eager.speed_up == pytest.approx(eager.samples_per_s / sync.samples_per_s)
    assert sync.steps_per_s == pytest.approx(sync.samples_per_s / 32)


# ---------------------------------------------------------------- several at a time


def test_several_jobs_come_to_the_same_as_one() -> None:
    def raced_by(jobs: int) -> tuple[Standings, list[Line]]:
        lines: list[Line] = []
        settings = {"cluster": "half-speed-4", "task": "quadratic", "rates": "1,2", "trials": 3}
        race = Race.of(["sync", "eager"], seeds=2, **settings)  # type: ignore[arg-type]
        return race.run(sink=lines.append, jobs=jobs), lines

    (alone, told), (together, also) = raced_by(1), raced_by(2)
    assert together.results == alone.results
    assert together.lines == alone.lines
    assert also == told


def test_a_process_that_is_killed_ends_the_race_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os, signal\n"
        "from offbeat.lab import tasks\n"
        "from multiprocessing import parent_process\n"
        "def task():\n"
        "    if parent_process() is not None:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return tasks.find('quadratic')\n"
    )
    process = _started("sync", "--task", "deadly:task", "--jobs", "2", folder=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "was ended from outside: perhaps the memory did not suffice" in errors
    assert "Traceback" not in errors


# ---------------------------------------------------------------- equal conditions


def test_a_race_is_deterministic() -> None:
    assert raced("eager:quorum=solo", until="30rounds") == raced(
        "eager:quorum=solo", until="30rounds"
    )


def test_all_contestants_meet_the_same_noise_and_the_same_data() -> None:
    _, lines = raced("sync", "eager:quorum=solo", "msync:m=0.75", until="20rounds")
    steps: list[dict[int, list[float]]] = []
    for line in lines:
        if line["kind"] == "run":
            steps.append({})
        elif line["kind"] == "compute":
            steps[-1].setdefault(line["rank"], []).append(line["to_s"] - line["from_s"])
    sync, *others = steps
    for other in others:
        for rank in range(8):
            both = list(zip(sync[rank], other[rank], strict=False))
            assert len(both) >= 8
            assert all(a == pytest.approx(b, rel=1e-9) for a, b in both)


def test_to_stop_at_the_target_does_not_change_what_came_before() -> None:
    stopped, lines = raced("eager:quorum=majority")
    went_on, longer = raced("eager:quorum=majority", until="60s")
    spans = [
        [line for line in each if line["kind"] in ("compute", "round") and line["rank"] == 0]
        for each in (lines, longer)
    ]
    reached = stopped[0].seconds_to_target
    assert reached is not None
    before = [line for line in spans[0] if line["to_s"] < reached]
    assert len(before) > 50
    assert spans[1][: len(before)] == before
    assert went_on[0].seconds is not None
    assert went_on[0].seconds >= 60 > reached


@pytest.mark.parametrize("algorithm", ["sync", "eager:quorum=solo"])
def test_runs_end_where_they_were_told_to(algorithm: str) -> None:
    (by_rounds,), _ = raced(algorithm, until="25rounds")
    (by_samples,), _ = raced(algorithm, until="100samples")
    (by_seconds,), _ = raced(algorithm, until="3s")
    assert by_rounds.rounds is not None
    assert 25 <= by_rounds.rounds <= 28  # those who were late still bring theirs
    assert by_samples.samples is not None
    assert 100 <= by_samples.samples <= 100 + 16
    assert by_seconds.seconds is not None
    assert 3.0 <= by_seconds.seconds <= 3.6


def test_a_race_says_nothing_of_waits_at_the_end_which_no_script_could_avoid(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said, note = [], leaving.note_join

    def noted(*told: Any) -> str:
        said.append(note(*told))
        return said[-1]

    monkeypatch.setattr(leaving, "note_join", noted)
    raced("asgd", cluster="mixed-4", until="6rounds", seeds=2)
    assert any("at the end for worker 2" in words for words in said)  # a script would be told
    assert not caplog.records


def test_ddp_in_virtual_time_is_synchronous_sgd_and_says_so() -> None:
    (sync, ddp), _ = raced("sync", "ddp", until="20rounds")
    assert replace(ddp, label=sync.label, algorithm=sync.algorithm) == sync
    assert "SyncSGD" in Race.of(["ddp"], cluster=CLUSTER).notes()[0]


def test_records_tell_each_run_from_its_begin_to_its_result() -> None:
    (result, _), lines = raced("sync", "eager:quorum=solo", until="5rounds")
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "run"
    assert kinds[-1] == "result"
    assert kinds.count("run") == kinds.count("result") == 2
    about = lines[0]
    assert about["cluster_file"].startswith("description =")
    assert (about["label"], about["workers"], about["target"]) == ("sync", 8, "loss=0.01")
    first = lines[: kinds.index("result") + 1]
    assert {"compute", "wait", "round", "evaluation", "end"} <= {line["kind"] for line in first}
    assert first[-1]["rounds"] == result.rounds
    waited = sum(line["to_s"] - line["from_s"] for line in first if line["kind"] == "wait")
    assert waited == pytest.approx(result.waited_s)


# ---------------------------------------------------------------- the command


def test_the_command_writes_figures_and_records(tmp_path: Path) -> None:
    figures, records = tmp_path / "race.json", tmp_path / "race.jsonl"
    result = command("sync", "eager:quorum=solo", "--json", figures, "--records", records)
    assert result.exit_code == 0, result.output
    written = json.loads(figures.read_text())
    wanted = "algorithm settings world cluster seed seconds_to_target final_accuracy final_loss "
    wanted += "samples rounds utilization waited_s dropped_samples mean_staleness_rounds "
    wanted += "max_staleness_rounds replicas_identical"
    for run in written["runs"]:
        assert set(wanted.split()) <= set(run)
        assert run["replicas_identical"]
    assert written["runs"][1]["settings"] == {"quorum": "solo"}
    assert written["verdict"] in result.stdout.replace("\n", " ").replace("  ", " ")
    *_, last = read(records)
    assert last == {"kind": "verdict", "text": written["verdict"]}
    assert sorted(tmp_path.iterdir()) == [figures, records]  # and nothing beside them
    assert "virtual s" in result.stdout
    assert "2/2 eager:quorum=solo, seed 0: loss=0.01 after" in result.stderr


def test_a_target_that_nobody_reaches_has_an_exit_status() -> None:
    result = command("sync", "--target", "loss=1e-9")
    assert result.exit_code == 3
    assert "not reached" in result.stdout
    assert "Nobody reached loss=1e-09" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("snyc",), "did you mean 'sync'"),
        (("--task", "digit"), "did you mean 'digits'"),
        (("--cluster", "two-slow-of-eigth"), "two-slow-of-eight"),
        (("--until", "soon"), "until must be target"),
        (("--target", "speed=1"), "target must be such as"),
        (("--target", "accuracy=0.9"), "has no accuracy, so nobody can reach accuracy=0.9"),
        (("--workers", "1"), "needs at least 2"),
        (("--task", "timing", "--target", "loss=1"), "leave out --target loss=1"),
        (("--task", "timing", "--until", "target"), "leave out --until target"),
        (("--task", "timing", "--world", "real"), "leave out --world real"),
        (("--json", "/nowhere/race.json"), "/nowhere/race.json: cannot be written: there is no"),
        (("--records", "/"), "cannot be written: it is a folder"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(
    arguments: tuple[str, ...], words: str
) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "seed 0" not in result.stderr
    assert "Traceback" not in result.output


def test_a_malformed_cluster_file_is_told_its_key(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("workers = 2\n[compute]\nstep_ss = 1\n")
    result = command("--cluster", tmp_path / "bad.toml")
    assert result.exit_code == 2
    assert "step_ss" in result.stderr


def test_a_worker_that_fails_is_named_and_the_others_race_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    figures = tmp_path / "race.json"
    arguments = ("--task", "failing:task", "--until", "20rounds", "--json", figures)
    result = command("sync", "eager:quorum=solo", *arguments)
    assert result.exit_code == 1
    assert "RuntimeError: a bad sample" in result.stderr
    assert "in worker 7 at virtual time 0." in result.stderr
    errors = [run["error"] for run in json.loads(figures.read_text())["runs"]]
    assert len(errors) == 2
    assert all("a bad sample" in error for error in errors)


def test_a_failed_run_is_shown_as_failed_in_the_table_and_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    page, records = tmp_path / "report.html", tmp_path / "race.jsonl"
    outputs = ("--report", page, "--records", records)
    result = command("sync", "--task", "failing:task", "--until", "20rounds", *outputs)
    assert re.search(r"^sync +×1 +failed", result.stdout, re.MULTILINE)
    shown = CliRunner().invoke(app, ["report", str(records), "--no-html"]).stdout
    words = "sync, seed 0, failed: RuntimeError: a bad sample in worker 7 at virtual time 0."
    assert words in " ".join(shown.split())
    assert "<b>sync, seed 0 failed</b> RuntimeError: a bad sample in worker 7" in page.read_text()


def _failing_task(folder: Path) -> None:
    (folder / "failing.py").write_text(
        dedent(
            """
            from dataclasses import replace
            from offbeat.lab import tasks

            def task():
                good = tasks.find("quadratic")

                def batches(rank, world_size, seed):
                    for number, batch in enumerate(good.batches(rank, world_size, seed)):
                        if rank == world_size - 1 and number == 4:
                            raise RuntimeError("a bad sample")
                        yield batch

                return replace(good, batches=batches)
            """
        )
    )


_begun: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    """A test that fails must not leave its race running."""
    yield
    while _begun:
        process = _begun.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _started(
    *arguments: str | Path,
    before: Callable[[], None] = lambda: None,
    folder: Path | None = None,
) -> subprocess.Popen[str]:
    """The command as a process of its own, in a group of its own, as in a shell."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the tests may run where it is ignored
        before()

    code = "from offbeat.cli import app; app()"
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "race", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
        preexec_fn=prepare,
    )
    _begun.append(process)
    return process


@pytest.mark.parametrize(("jobs", "file"), [("1", "race"), ("2", "[01]-[01]")])
def test_a_full_disk_leaves_no_half_written_file(tmp_path: Path, jobs: str, file: str) -> None:
    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    arguments = ("sync", "--task", "quadratic", "--rates", "1", "--seeds", "2", "--jobs", jobs)
    arguments += ("--records", tmp_path / "race.jsonl")
    process = _started(*arguments, before=little_room)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.search(rf"{file}\.jsonl: cannot be written: File too large", errors)
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def _interrupted(process: subprocess.Popen[str], real: int) -> tuple[float, str]:
    """Press Ctrl-C in the second run; return how long its real workers lived on, and its words."""
    assert process.stderr is not None
    said = process.stderr.readline()
    while not said.startswith("1/"):
        said = process.stderr.readline()
        assert said, "it ended too early"
    time.sleep(0.5)
    workers = _children(process.pid)
    assert len(workers) == real
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # a terminal tells the whole group
    while any(_runs(worker) for worker in workers):
        time.sleep(0.01)
    took = time.monotonic() - began
    _, errors = process.communicate(timeout=180)
    return took, errors


def _children(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    words = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in listed.split()}
    return [child for child, command in words.items() if b"spawn_main" in command]


def _runs(process: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_writes_what_was_measured(tmp_path: Path, jobs: int) -> None:
    figures, records = tmp_path / "race.json", tmp_path / "race.jsonl"
    outputs = ("--json", figures, "--records", records)
    arguments = ("--task", "quadratic", "--until", "100s", "--seeds", "100", "--rates", "1")
    process = _started("sync", "eager", *arguments, *outputs, "--jobs", str(jobs))
    _, errors = _interrupted(process, real=0 if jobs == 1 else jobs)
    assert process.returncode == 130
    assert "Traceback" not in errors
    written = json.loads(figures.read_text())
    assert written["interrupted"]
    assert written["runs"]
    *_, last = read(records)
    assert last["kind"] == "verdict"


# ---------------------------------------------------------------- real processes


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A cluster whose steps are short enough to be waited for."""
    path = tmp_path / "pair.toml"
    path.write_text("workers = 2\nspeed = [1, 0.5]\n[compute]\nstep_s = 0.01\n")
    return path


@pytest.mark.real
def test_the_same_race_runs_on_real_processes(pair: Path, tmp_path: Path) -> None:
    figures, records = tmp_path / "race.json", tmp_path / "race.jsonl"
    outputs = ("--json", figures, "--records", records, "--cluster", pair)
    result = command(
        "ddp", "sync", "eager:quorum=solo", "--world", "real", "--until", "40rounds", *outputs
    )
    assert result.exit_code == 0, result.output
    ddp, sync, eager = json.loads(figures.read_text())["runs"]
    for run in (ddp, sync, eager):
        assert run["error"] is None
        assert run["replicas_identical"]
        assert run["rounds"] >= 40
        assert 0.0 < run["utilization"] <= 1.0
    assert max(ddp["final_loss"], sync["final_loss"]) < 0.1
    assert sync["rounds"] == 40
    assert ddp["rounds"] in (40, 41)
    begun = [line for line in read(records) if line["kind"] == "run"]
    assert begun[0]["algorithm"] == "DistributedDataParallel"
    kinds = {line["kind"] for line in read(records)}
    assert {"compute", "wait", "round", "evaluation", "end", "result", "verdict"} <= kinds
    assert "virtual" not in result.stdout


@pytest.mark.real
@pytest.mark.parametrize("algorithm", ["dpsgd", "wagma", "local:steps=2"])
def test_real_models_are_evaluated_as_their_mean_when_the_run_is_over(
    algorithm: str, pair: Path, tmp_path: Path
) -> None:
    records = tmp_path / "race.jsonl"
    arguments = ("--world", "real", "--until", "60rounds", "--every", "4", "--cluster", pair)
    result = command(algorithm, *arguments, "--records", records)
    assert result.exit_code == 0, result.output
    *looked, last = (line for line in read(records) if line["kind"] == "evaluation")
    assert len(looked) > 10
    assert [line["samples"] for line in looked] == sorted({line["samples"] for line in looked})
    assert last["loss"] < 0.5 * looked[0]["loss"]
    assert looked[-1]["loss"] == pytest.approx(last["loss"], rel=0.5)


@pytest.mark.real
def test_a_real_worker_that_fails_is_named(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing_task(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ("--task", "failing:task", "--cluster", pair, "--until", "20rounds")
    result = command("sync", "--world", "real", *arguments)
    assert result.exit_code == 1
    assert "RuntimeError: a bad sample" in result.stderr
    assert "in worker 1, " in result.stderr


@pytest.mark.real
def test_ctrl_c_ends_real_workers_soon(pair: Path, tmp_path: Path) -> None:
    figures = tmp_path / "race.json"
    arguments = ("--cluster", pair, "--world", "real", "--json", figures, "--seeds", "100")
    arguments += ("--task", "quadratic", "--until", "2s", "--rates", "1", "--jobs", "1")
    process = _started("sync", "eager", *arguments)
    took, errors = _interrupted(process, real=2)
    assert process.returncode == 130
    assert took < 5.0  # 0.01 s on a quiet machine
    assert "Traceback" not in errors
    assert json.loads(figures.read_text())["runs"]
    deadline = time.monotonic() + 5.0
    with pytest.raises(ProcessLookupError):  # soon nobody of its group is left
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.05)


def test_lines_say_now_and_then_how_a_long_run_goes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(Console(stderr=True), ["sync"], 1, "virtual s")
    lines.begin("sync", 0)
    lines._said = -1e9
    progress = {"rank": 0, "seconds": 3.0, "rounds": 7, "share": 0.5, "compute_s": 1.0}
    lines.tell({**progress, "wait_s": 1.0, "loss": 0.25, "accuracy": None})
    said = capsys.readouterr().err
    assert "sync, seed 0: loss 0.250, utilisation 50%, 7 rounds, at 3.0 virtual s" in said
