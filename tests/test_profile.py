"""`offbeat profile`: what it measures is what is there, and what it writes can be loaded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import mean
from textwrap import dedent
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import offbeat
from offbeat.cli import app
from offbeat.clusters import Cluster, named
from offbeat.clusters.write import to_toml
from offbeat.lab.codec_speed import codec_bytes_per_s
from offbeat.lab.fit import fit_compute, fit_network
from offbeat.worlds import enter_world

# ---------------------------------------------------------------- writing

numbers = st.floats(1e-6, 1e6)
shares = st.floats(0.01, 5.0)


def kinds(workers: int, in_group: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Noise of any kind, on some of the workers, some of the time."""
    window = {"from_s": st.floats(0, 10), "to_s": st.floats(11, 100)}
    ranks = st.lists(st.integers(0, workers - 1), min_size=1, max_size=workers, unique=True)
    optional: dict[str, Any] = window if in_group else window | {"workers": ranks}

    def kind(name: str, **keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({"kind": st.just(name), **keys}, optional=optional)

    row = st.lists(numbers, min_size=2, max_size=2)
    return st.one_of(
        kind("none"),
        kind("lognormal", sigma=shares, mean_one=st.booleans()),
        kind("exponential", scale=shares),
        kind("pareto", shape=shares.map(lambda x: 0.1 + x), scale=shares),
        kind("uniform", low=st.floats(0.1, 0.9), high=st.floats(1, 2)),
        kind("dropcompute"),
        kind("rotating", low_s=st.floats(0, 1), high_s=st.floats(1, 2)),
        kind("random_delay", k=st.just(1), delay_s=st.floats(0, 1)),
        kind("trace", unit=st.just("factor"), rows=st.lists(row, min_size=1, max_size=3)),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    workers = draw(st.integers(2, 6))
    noises = st.lists(kinds(workers, in_group=False), max_size=3)
    data: dict[str, Any] = {
        "name": draw(st.text()),
        "description": draw(st.text()),
        "workers": workers,
        "compute": {"step_s": draw(numbers), "sample_s": draw(st.floats(0, 1))},
        "noise": draw(noises),
        "network": {
            "latency_s": draw(st.floats(0, 1)),
            "all_reduce": draw(st.sampled_from(["ring", "recursive_doubling", "auto"])),
        },
    }
    if draw(st.booleans()):
        data["compute"]["length"] = draw(
            st.one_of(
                st.fixed_dictionaries(
                    {
                        "kind": st.just("listed"),
                        "values": st.lists(numbers, min_size=1, max_size=4),
                        "per_unit_s": numbers,
                    }
                ),
                st.just({"kind": "lognormal", "mean": 187.0, "sd": 97.0, "per_unit_s": 0.1}),
            )
        )
    if draw(st.booleans()):
        noise = st.lists(kinds(1, in_group=True), max_size=2)
        first = {"workers": 1, "speed": draw(shares), "noise": draw(noise)}
        data["group"] = [first, {"workers": workers - 1}]
    elif draw(st.booleans()):
        data["speed"] = draw(st.lists(shares, min_size=workers, max_size=workers))
    if draw(st.booleans()):
        data["network"]["control_latency_s"] = draw(st.floats(0, 1))
        data["network"]["zone"] = [{"workers": [0, 1], "bandwidth_bytes_per_s": draw(numbers)}]
        data["network"]["link"] = [{"between": [0, workers - 1], "latency_s": draw(numbers)}]
    if draw(st.booleans()):
        data["event"] = [
            {"kind": "slow", "workers": [1], "factor": draw(st.floats(1, 5)), "to_s": 7.0},
            {"kind": "crash", "worker": 1, "at_s": draw(numbers)},
        ]
    return Cluster.model_validate(data)


@settings(max_examples=150, deadline=None)
@given(cluster=clusters(), comments=st.lists(st.text("ab #[]=\"'", max_size=10), max_size=3))
def test_a_cluster_that_is_written_loads_back_equal(cluster: Cluster, comments: list[str]) -> None:
    assert Cluster.parse(to_toml(cluster, comments)) == cluster


@pytest.mark.parametrize("name", named())
def test_the_text_of_a_shipped_cluster_needs_no_other_file(name: str, tmp_path: Path) -> None:
    cluster = Cluster.load(name)
    (tmp_path / "copy.toml").write_text(to_toml(cluster), encoding="utf-8")
    copy = Cluster.load(tmp_path / "copy.toml")
    for rank in range(cluster.workers):
        ours, theirs = copy.device(rank, seed=1), cluster.device(rank, seed=1)
        for step in (0, 1, 100):
            assert ours.seconds(step, 3, 70.0) == theirs.seconds(step, 3, 70.0)
    assert copy.network == cluster.network
    assert copy.events == cluster.events


# ---------------------------------------------------------------- fitting

SPEEDS = [1.0, 0.9, 0.5, 0.25]
NOISES = {
    "none": "",
    "lognormal": "sigma = 0.1",
    "exponential": "scale = 0.3",
    "pareto": "shape = 2.0\nscale = 0.2",
    "uniform": "low = 0.8\nhigh = 1.2",
    "dropcompute": "",
}


def noisy(kind: str, keys: str) -> Cluster:
    return Cluster.parse(
        f"workers = 4\nspeed = {SPEEDS}\n[compute]\nstep_s = 0.1\n"
        f'[[noise]]\nkind = "{kind}"\n{keys}\n'
    )


def times(cluster: Cluster, count: int, samples: float = 1.0, seed: int = 0) -> list[list[float]]:
    devices = [cluster.device(rank, seed) for rank in range(cluster.workers)]
    return [[device.seconds(step, samples, 0.0) for step in range(count)] for device in devices]


def rebuilt(measured: list[list[float]]) -> Cluster:
    fitted = fit_compute(measured, [[1.0] * len(worker) for worker in measured])
    return Cluster.model_validate(
        {
            "workers": len(measured),
            "speed": fitted.speeds,
            "compute": {"step_s": fitted.step_s},
            "noise": fitted.tables(),
        }
    )


@pytest.mark.parametrize(("kind", "keys"), NOISES.items())
def test_speeds_and_the_kind_of_noise_are_recovered(kind: str, keys: str) -> None:
    known = noisy(kind, keys)
    found = rebuilt(times(known, count=1000))
    assert [noise.kind for noise in found.noise] == ([] if kind == "none" else [kind])
    assert found.speeds == pytest.approx(SPEEDS, rel=0.05)
    assert found.compute.step_s == pytest.approx(0.1, rel=0.05)
    assert found.noise == () or found.noise[0].workers is None  # one for all
    for name, value in tomllib.loads(keys).items():
        assert getattr(found.noise[0], name) == pytest.approx(value, rel=0.2)


def test_hiccups_of_the_machine_do_not_change_the_speeds() -> None:
    measured = times(noisy("lognormal", "sigma = 0.05"), count=200)
    for worker in measured:
        worker[::20] = [9 * time for time in worker[::20]]
    assert rebuilt(measured).speeds == pytest.approx(SPEEDS, rel=0.05)


def test_workers_whose_noise_differs_get_their_own() -> None:
    calm = times(noisy("none", ""), count=200)
    wild = times(noisy("exponential", "scale = 0.5"), count=200)
    found = rebuilt([*calm[:3], wild[3]])
    assert [(noise.kind, noise.workers) for noise in found.noise] == [("exponential", (3,))]


def test_noise_of_no_known_kind_becomes_a_trace_of_what_was_measured() -> None:
    measured = times(noisy("random_delay", "k = 1\ndelay_s = 0.3"), count=60)
    found = rebuilt(measured)
    assert [noise.kind for noise in found.noise] == ["trace"]
    for worker, replayed in zip(measured, times(found, count=60), strict=True):
        assert replayed == pytest.approx(worker, rel=0.001)


def test_a_cost_by_sample_is_told_from_a_cost_by_micro_batch() -> None:
    known = Cluster.parse(
        "workers = 3\nspeed = [1, 0.8, 0.4]\n[compute]\nstep_s = 0.01\nsample_s = 0.001\n"
        '[[noise]]\nkind = "lognormal"\nsigma = 0.1\n'
    )
    sizes = [[float(8 + 7 * step * (rank + 2) % 25) for step in range(300)] for rank in range(3)]
    measured = [
        [known.device(rank, seed=0).seconds(step, sizes[rank][step], 0.0) for step in range(300)]
        for rank in range(3)
    ]
    fitted = fit_compute(measured, sizes)
    assert fitted.step_s == pytest.approx(0.01, rel=0.1)
    assert fitted.sample_s == pytest.approx(0.001, rel=0.05)
    assert fitted.speeds == pytest.approx([1, 0.8, 0.4], rel=0.05)


def test_sizes_that_do_not_matter_are_left_out() -> None:
    measured = times(noisy("lognormal", "sigma = 0.1"), count=200)
    sizes = [[float(1 + step % 7) for step in range(200)] for _ in measured]
    assert fit_compute(measured, sizes).sample_s < 0.001


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_the_network_s_fit_gives_back_the_all_reduces_it_was_made_from(workers: int) -> None:
    network = Cluster.parse(
        f"workers = {workers}\n[compute]\nstep_s = 1\n[network]\nlatency_s = 50e-6\n"
        'bandwidth_bytes_per_s = 1.25e9\nall_reduce = "ring"\n'
    ).network
    sizes = (8, 65_536, 8_388_608)
    found = fit_network(workers, {n: network.all_reduce_s(range(workers), n) for n in sizes})
    assert found["latency_s"] == pytest.approx(50e-6)
    assert found["bandwidth_bytes_per_s"] == pytest.approx(1.25e9)


def test_a_network_without_a_slope_is_infinitely_fast() -> None:
    found = fit_network(2, {8: 0.002, 1000: 0.001})
    assert found["bandwidth_bytes_per_s"] == float("inf")


def test_a_codec_takes_no_time_where_time_is_virtual() -> None:
    """So that nothing but the cluster file charges it; however long its messages take."""
    slow = Cluster.parse(
        "workers = 3\n[compute]\nstep_s = 1\n[network]\nbandwidth_bytes_per_s = 1e6\n"
    )
    run = offbeat.run(lambda: codec_bytes_per_s(enter_world()), slow)
    assert run.results == [float("inf")] * 3
    assert run.seconds > 1.0


# ---------------------------------------------------------------- one worker, in this process

ATTACHED = """
import sys, torch, offbeat
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dp = offbeat.attach(model, optimizer)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(dedent(text))
    return path


def profiled(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OFFBEAT_PACE", "OFFBEAT_RECORDS"):
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_one_worker_is_measured_and_the_command_is_shown(tmp_path: Path) -> None:
    result = profiled("-o", tmp_path / "mine.toml", "--steps", "60")
    assert result.exit_code == 0, result.output
    assert "torchrun --nproc-per-node 4 -m offbeat" in result.stderr
    cluster = Cluster.load(tmp_path / "mine.toml")
    assert (cluster.name, cluster.workers) == ("mine", 1)
    assert 1e-5 < cluster.compute.step_s < 1
    text = (tmp_path / "mine.toml").read_text()
    assert text.startswith("# Measured by offbeat ")
    assert "58 of each worker of a small stand-in model" in text


def test_a_script_is_measured_with_its_arguments_and_closed_if_it_does_not_close(
    tmp_path: Path,
) -> None:
    script = written(tmp_path, ATTACHED)
    result = profiled(script, "-o", tmp_path / "mine.toml", "--", "40")
    assert result.exit_code == 0, result.output
    assert f"38 of each worker of {script}" in (tmp_path / "mine.toml").read_text()
    assert "OFFBEAT_RECORDS" not in os.environ


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no-such-folder/mine.toml", "cannot be written: there is no folder"),
        ("", "it is a folder; name a file in it"),
    ],
)
def test_a_target_that_cannot_be_written_is_refused_before_anything_is_run(
    tmp_path: Path, target: str, words: str
) -> None:
    script = written(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    result = profiled(script, "-o", tmp_path / target)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not (tmp_path / "ran").exists()


BAD_SCRIPTS = {
    "print('hello')": "attached nothing: the micro-batches inside offbeat.attach() are measured",
    ATTACHED: "worker 0 computed 8 micro-batches after the first 2: at least 20 are needed",
}


@pytest.mark.parametrize(("text", "words"), BAD_SCRIPTS.items())
def test_a_script_that_says_too_little_is_refused_and_nothing_is_written(
    tmp_path: Path, text: str, words: str
) -> None:
    result = profiled(written(tmp_path, text), "-o", tmp_path / "mine.toml", "--", "10")
    assert result.exit_code == 2
    assert words in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_missing_script_is_refused(tmp_path: Path) -> None:
    result = profiled(tmp_path / "none.py", "-o", tmp_path / "mine.toml")
    assert result.exit_code == 2
    assert "there is no such script" in result.stderr


def test_a_script_s_own_error_is_raised_as_it_is(tmp_path: Path) -> None:
    result = profiled(written(tmp_path, "1 / 0"), "-o", tmp_path / "mine.toml")
    assert isinstance(result.exception, ZeroDivisionError)
    assert not (tmp_path / "mine.toml").exists()


def test_a_pace_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_PACE", "half-speed-4")
    result = profiled("-o", tmp_path / "mine.toml")
    assert result.exit_code == 2
    assert "has 4 workers, this run has 1" in result.stderr


# ---------------------------------------------------------------- real processes

KNOWN = """
workers = 3
speed = [1.0, 0.8, 0.5]
[compute]
step_s = {step_s}
sample_s = {sample_s}
[[noise]]
kind = "lognormal"
sigma = 0.1
"""
SCRIPT = """
import argparse
import torch
import torch.distributed as dist
import offbeat

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with offbeat.attach(model, optimizer) as dp:
        for step in range(steps):
            n = 4 + 7 * step * (dp.rank + 1) % 13
            optimizer.zero_grad()
            dp.samples(n)
            model(torch.ones(n, 4)).sum().backward()
            optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def torchrun(known: Path, *arguments: str | Path) -> str:
    """Profile three processes, paced by a known cluster; all end within 100 s."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"),
            *("--master-port", port, "-m", "offbeat", "profile", *map(str, arguments)),
        ],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OFFBEAT_PACE": str(known), "OMP_NUM_THREADS": "1"},
    )
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, err
    return out


def expected_s(cluster: Cluster, samples: float) -> list[float]:
    return [mean(worker) for worker in times(cluster, count=2000, samples=samples, seed=5)]


def is_about(found: list[float], known: list[float]) -> bool:
    """A busy machine adds to what is measured; benchmarks/profile_round_trip.py says how much."""
    return all(0.9 * b < a < 1.5 * b for a, b in zip(found, known, strict=True))


@pytest.mark.real
def test_profiling_paced_workers_gives_back_the_cluster_they_are_paced_by(tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    known.write_text(KNOWN.format(step_s=0.03, sample_s=0))
    printed = torchrun(known, "-o", tmp_path / "found.toml", "--steps", "150")
    assert "network: latency " in printed
    found = Cluster.load(tmp_path / "found.toml")
    assert found.speeds == pytest.approx((1.0, 0.8, 0.5), rel=0.2)
    assert is_about(expected_s(found, 1), expected_s(Cluster.load(known), 1))
    assert 0 < found.network.latency_s < 0.1
    assert 1e6 < found.network.bandwidth_bytes_per_s < 1e12
    assert 0 < found.network.control_latency_s < 0.1
    assert 1e6 < found.network.codec_bytes_per_s < 1e12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.toml", "known.toml"]


@pytest.mark.real
def test_profiling_a_paced_script_gives_back_speeds_and_the_cost_of_a_sample(
    tmp_path: Path,
) -> None:
    known = tmp_path / "known.toml"
    known.write_text(KNOWN.format(step_s=0.01, sample_s=0.002))
    script = written(tmp_path, SCRIPT)
    torchrun(known, script, "-o", tmp_path / "found.toml", "--", "--steps", "150")
    found = Cluster.load(tmp_path / "found.toml")
    assert found.speeds == pytest.approx((1.0, 0.8, 0.5), rel=0.2)
    assert is_about([found.compute.sample_s], [0.002])
    for n in (4, 10, 16):
        assert is_about(expected_s(found, n), expected_s(Cluster.load(known), n))
