"""`offbeat launch`: torchrun's manners, no worker left behind, and survivors that go on."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import Launched, alive, answers, until
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.launch.job import slots, survival_variables
from offbeat.launch.logs import Choice

real = pytest.mark.real

Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(text: str) -> Path:
        file = tmp_path / "train.py"
        file.write_text(
            "import json, os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + text
        )
        return file

    return write


# --- as torchrun does it -------------------------------------------------------------------

SHOW = """
print(json.dumps({**os.environ, "argv": sys.argv[1:]}))
"""


@real
def test_workers_find_every_variable_that_torchrun_sets(script: Script, tmp_path: Path) -> None:
    file = script(SHOW)
    found = {}
    for launcher in ("torchrun", "offbeat"):
        launched = Launched(
            tmp_path, "--nproc_per_node=2", file, "--tee", "3", launcher=launcher, name=launcher
        )
        assert launched.wait() == 0, launched.err
        found[launcher] = sorted(launched.lines(), key=lambda line: line["RANK"])
    for theirs, ours in zip(found["torchrun"], found["offbeat"], strict=True):
        own = {"OFFBEAT_SURVIVE", "OFFBEAT_WORKER"}
        assert ours.keys() - theirs.keys() == own
        assert theirs.keys() - ours.keys() <= {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
        differ = {name for name in ours.keys() - own if ours[name] != theirs.get(name)}
        addresses = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        assert differ <= addresses
        assert ours["argv"] == ["--tee", "3"]
        assert ours["OFFBEAT_WORKER"] == ours["RANK"]


LINES = """
for number in range(200):
    sys.stdout.write(f"{rank} " + "a" * 50)
    sys.stdout.flush()
    sys.stdout.write("b" * 5000 + f" {number}\\n")
    sys.stdout.flush()
sys.stdout.write(f"{rank} without an end")
"""


@real
def test_lines_of_workers_stay_whole_and_in_order(script: Script, tmp_path: Path) -> None:
    launched = Launched(tmp_path, "--nproc-per-node", 4, script(LINES))
    assert launched.wait() == 0
    for rank in range(4):
        whole = re.findall(f"{rank} a{{50}}b{{5000}} ([0-9]+)\n", launched.out)
        assert list(map(int, whole)) == list(range(200))
    assert launched.out.count("without an end") == 4


@real
def test_output_goes_where_torchrun_puts_it(script: Script, tmp_path: Path) -> None:
    file = script("print('out', rank); print('err', rank, file=sys.stderr)")
    logs = tmp_path / "logs"
    flags = ["--log-dir", logs, "--redirects", "0:3", "--tee", "1:1"]
    launched = Launched(tmp_path, "--nproc-per-node", 3, *flags, "--rdzv-id", "run", file)
    assert launched.wait() == 0
    assert sorted(launched.out.splitlines()) == ["[default1]:out 1", "out 2"]
    assert sorted(launched.err.splitlines()) == ["err 1", "err 2"]
    (run,) = logs.iterdir()
    assert run.name.startswith("run_")
    written = {path.relative_to(run).as_posix(): path.read_text() for path in run.rglob("*.log")}
    assert written == {
        "attempt_0/0/stdout.log": "out 0\n",
        "attempt_0/0/stderr.log": "err 0\n",
        "attempt_0/1/stdout.log": "out 1\n",
    }


@real
def test_a_worker_has_a_terminal_where_the_launcher_has_one(script: Script, tmp_path: Path) -> None:
    file = script("print(sys.stdout.isatty(), os.get_terminal_size(1).columns)")
    ours, theirs = os.openpty()
    subprocess.run(["stty", "cols", "91"], stdin=theirs, check=True)
    launched = Launched(tmp_path, file, terminal=os.ttyname(theirs))
    shown = os.read(ours, 1000)
    assert launched.wait() == 0
    os.close(ours)
    os.close(theirs)
    assert shown.split() == [b"True", b"91"]


@real
def test_modules_and_programs_run_too(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "job.py").write_text("import sys; print('job', sys.argv[1:])")
    launched = Launched(tmp_path, "-m", "package.job", "-m", "x", PET_NPROC_PER_NODE="2")
    assert launched.wait() == 0
    assert launched.out == "job ['-m', 'x']\n" * 2
    launched = Launched(tmp_path, "--no-python", "--nproc-per-node", 1, "echo", "--one", "two")
    assert launched.wait() == 0
    assert launched.out == "--one two\n"


# --- losses --------------------------------------------------------------------------------

IGNORES = """
if rank == 1:
    while not os.path.exists("ready"):
        time.sleep(0.01)
    print("something is wrong", file=sys.stderr)
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
open("ready", "w").close()
while True:
    time.sleep(0.1)
"""


@real
def test_the_first_failure_ends_the_others_also_those_that_ignore_sigterm(
    script: Script, tmp_path: Path
) -> None:
    launched = Launched(tmp_path, "--nproc-per-node", 2, "--shutdown-timeout", 1, script(IGNORES))
    assert launched.wait() == 1
    assert launched.out == "no\n"
    assert "rank 1 (pid " in launched.err
    assert "it ended with exit code 3, " in launched.err
    assert "; it last said: something is wrong\n" in launched.err
    assert "ending the 1 worker left on this node: the job has not said that it survives" in (
        launched.err
    )


RECORDS = """
said = {"message": {"message": "ValueError: a bad batch", "extraInfo": {"timestamp": "0"}}}
open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps(said))
sys.exit("something else")
"""


@real
def test_an_error_that_torch_has_recorded_is_told(script: Script, tmp_path: Path) -> None:
    """In the format of `torch.distributed.elastic.multiprocessing.errors.record`."""
    launched = Launched(tmp_path, script(RECORDS))
    assert launched.wait() == 1
    assert "; it last said: ValueError: a bad batch\n" in launched.err


SURVIVE = """
def survive():
    import torch.distributed as dist
    from offbeat import launched
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launched.say_survives(dist.TCPStore(*address, is_master=False))

def wait_for(file):
    while not os.path.exists(file):
        time.sleep(0.02)
"""

DIES_AGAIN = """
if rank == 0:
    survive()
    open("begin", "w").close()
    wait_for("end")
    sys.exit()
wait_for("begin")
if "OFFBEAT_JOIN" in os.environ:
    print(json.dumps({name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "OFFBEAT_WORKER")}))
if os.environ["OFFBEAT_WORKER"] != "7":
    os.kill(os.getpid(), signal.SIGKILL)
open("end", "w").close()
"""


@real
def test_survivors_go_on_and_the_lost_worker_is_started_again(
    script: Script, tmp_path: Path
) -> None:
    """Rank 1 is killed three times: workers 1, 3 and 5. Worker 7 ends well."""
    launched = Launched(
        tmp_path, "--nproc-per-node", 2, "--max_restarts=3", script(SURVIVE + DIES_AGAIN)
    )
    assert launched.wait() == 0, launched.err
    assert launched.lines() == [
        {"RANK": "1", "LOCAL_RANK": "1", "OFFBEAT_WORKER": str(worker)} for worker in (3, 5, 7)
    ]
    lost = [line for line in launched.err.splitlines() if "offbeat launch: lost rank 1" in line]
    assert len(lost) == 3
    for number, line in enumerate(lost, 1):
        assert "it was killed by SIGKILL (signal 9)" in line
        assert "; 1 of 2 workers here go on, and it is started again (pid" in line
        assert f"time {number} of 3" in line
    assert "2 of 2 workers here ended well; rank 1 was killed by SIGKILL (signal 9)" in launched.err


LONELY = """
if rank == 0 and "OFFBEAT_JOIN" not in os.environ:
    survive()
    sys.exit("a bad batch")
if rank == 1:
    wait_for("again")
    sys.exit()
open("again", "w").close()
while True:
    time.sleep(1)
"""


@real
def test_a_worker_that_has_nobody_left_to_join_is_ended(script: Script, tmp_path: Path) -> None:
    """The exit code is that of the survivor."""
    flags = ["--nproc-per-node", 2, "--restart", 1, "--shutdown-timeout", 0.5]
    launched = Launched(tmp_path, *flags, script(SURVIVE + LONELY))
    assert launched.wait() == 0, launched.err
    assert "it last said: a bad batch" in launched.err
    assert "rank 0, which was started again, has nobody left to join, and is ended" in launched.err


LATE = """
import atexit
if "OFFBEAT_JOIN" in os.environ:
    wait_for("trained")
    atexit.register(lambda: open("gone", "w").close())
import torch, offbeat
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with offbeat.attach(model, optimizer) as dp:
    for step in range(9):
        if rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 3)).mean().backward()
        optimizer.step()
open("trained", "w").close()
wait_for("gone")
print("saved")
"""


@real
def test_a_worker_that_comes_too_late_ends_with_a_sentence_and_is_no_failure(
    script: Script, tmp_path: Path
) -> None:
    """It is not started again, though it may be, and others still run."""
    flags = ["--nproc-per-node", 2, "--restart", 3]
    launched = Launched(tmp_path, *flags, script(SURVIVE + LATE))
    assert launched.wait() == 0, launched.err
    assert launched.out == "saved\n"
    assert "Traceback" not in launched.err
    (its_own,) = re.findall("^offbeat: (.*)$", launched.err, re.MULTILINE)
    assert its_own.startswith("worker 1 was to join the others, but they have ended")
    told = re.findall("^offbeat launch: (.*)$", launched.err, re.MULTILINE)
    assert told[0].startswith("lost rank 1 (pid")
    assert told[1:] == [
        "rank 1, which was started again, came when the others had ended their training, and has "
        "ended, too",
        "1 of 2 workers here ended well; rank 1 was killed by SIGKILL (signal 9)",
    ]


# --- nobody is left behind -----------------------------------------------------------------

FAMILY = """
import subprocess
if len(sys.argv) > 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open(f"pid.{rank}", "w").write(f"{os.getpid()} {child.pid}")
try:
    time.sleep(1000)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(1)
"""


def _family(folder: Path, workers: int) -> list[int]:
    """The pids of the workers and their children, once all are there."""

    def written() -> list[int]:
        found = [int(pid) for file in folder.glob("pid.*") for pid in file.read_text().split()]
        return found if len(found) == 2 * workers else []

    found: list[int] = until(written, "the start of all workers")
    assert all(map(alive, found))
    return found


@real
@pytest.mark.parametrize(
    ("number", "deaf"),
    [
        (signal.SIGINT, False),
        (signal.SIGINT, True),
        (signal.SIGTERM, False),
        (signal.SIGTERM, True),
        (signal.SIGHUP, False),
        (signal.SIGQUIT, False),
    ],
)
def test_a_signal_to_the_launcher_ends_everybody(
    script: Script, tmp_path: Path, number: int, deaf: bool
) -> None:
    flags = ["--shutdown-timeout", 1] if deaf and number != signal.SIGINT else []
    arguments = ["deaf"] if deaf else []
    launched = Launched(tmp_path, "--nproc-per-node", 2, *flags, script(FAMILY), *arguments)
    family = _family(tmp_path, 2)
    launched.send(number)
    assert launched.wait() == 128 + number
    assert not any(map(alive, family))
    assert launched.out == "interrupted\n" * (2 if number == signal.SIGINT and not deaf else 0)


@real
def test_a_second_signal_does_not_wait_for_the_grace(script: Script, tmp_path: Path) -> None:
    launched = Launched(
        tmp_path, "--nproc-per-node", 2, "--shutdown-timeout", 1000, script(FAMILY), "deaf"
    )
    family = _family(tmp_path, 2)
    launched.send(signal.SIGTERM)
    time.sleep(0.2)
    assert all(map(alive, family[::2]))
    launched.send(signal.SIGTERM)
    assert launched.wait() == 128 + signal.SIGTERM
    assert not any(map(alive, family))


@real
def test_a_launcher_that_is_killed_takes_everybody_with_it(script: Script, tmp_path: Path) -> None:
    launched = Launched(tmp_path, "--nproc-per-node", 2, script(FAMILY), "deaf")
    family = _family(tmp_path, 2)
    launched.send(signal.SIGKILL)
    until(lambda: not any(map(alive, family)), "the end of all workers")


@real
def test_the_children_of_a_worker_that_is_killed_end_with_it(
    script: Script, tmp_path: Path
) -> None:
    launched = Launched(tmp_path, "--nproc-per-node", 2, script(FAMILY))
    family = _family(tmp_path, 2)
    os.kill(family[0], signal.SIGKILL)
    assert launched.wait() == 1
    assert not any(map(alive, family))
    assert "it was killed by SIGKILL (signal 9)" in launched.err


# --- several nodes -------------------------------------------------------------------------


IPV6 = pytest.param(
    "::1", marks=pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
)


def _port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _nodes(folder: Path, file: Path, *flags: object, workers: tuple[int, ...]) -> list[Launched]:
    port = _port()
    return [
        Launched(
            folder,
            *("--nproc-per-node", count, "--nnodes", len(workers), "--node-rank", node),
            *("--master-port", port, *flags, file),
            name=f"node{node}",
        )
        for node, count in enumerate(workers)
    ]


@real
@pytest.mark.parametrize("address", ["127.0.0.1", IPV6])
def test_nodes_share_out_ranks_whatever_each_one_brings(
    script: Script, tmp_path: Path, address: str
) -> None:
    launched = _nodes(tmp_path, script(SHOW), "--master-addr", address, workers=(1, 3))
    assert [one.wait() for one in launched] == [0, 0], [one.err for one in launched]
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    found = [[line[name] for name in names] for one in launched for line in one.lines()]
    assert sorted(found) == [
        ["0", "0", "0", "1", "4"],
        ["1", "0", "1", "3", "4"],
        ["2", "1", "1", "3", "4"],
        ["3", "2", "1", "3", "4"],
    ]


FAILS_THERE = """
if rank == 1:
    sys.exit("a bad batch")
time.sleep(1000)
"""


@real
def test_a_failure_on_one_node_ends_the_others(script: Script, tmp_path: Path) -> None:
    here, there = _nodes(tmp_path, script(FAILS_THERE), workers=(1, 1))
    assert (here.wait(), there.wait()) == (1, 1)
    assert "it last said: a bad batch" in there.err
    assert "ending the 1 worker left on this node: rank 1 ended with exit code 1 on node 1" in (
        here.err
    )


@real
def test_the_end_of_node_0_ends_the_others(script: Script, tmp_path: Path) -> None:
    here, there = _nodes(tmp_path, script(FAMILY), workers=(1, 1))
    family = _family(tmp_path, 2)
    here.send(signal.SIGKILL)
    assert there.wait() == 1
    assert "the store of node 0 is gone" in there.err
    until(lambda: not any(map(alive, family)), "the end of all workers")


@real
def test_nodes_that_do_not_fit_are_told(script: Script, tmp_path: Path) -> None:
    file, port = script("time.sleep(1000)"), _port()
    flags = ["--master-port", port, "--join-timeout", 20]
    first = Launched(tmp_path, "--nnodes", 2, *flags, file, name="first")
    until(lambda: answers(port), "the store")
    again = Launched(tmp_path, "--nnodes", 2, *flags, file, name="again")
    assert again.wait() == 2
    assert f"port {port} of this host is taken: choose another one with --master-port" in again.err
    other = Launched(tmp_path, "--nnodes", 3, "--node-rank", 1, *flags, file, name="other")
    assert (first.wait(), other.wait()) == (2, 2)
    assert "node 0 was started with --nnodes 2, this one with 3" in other.err
    assert "node 1 was started with --nnodes 3, this one with 2" in first.err


@real
def test_ctrl_c_ends_a_launcher_that_waits_for_others(script: Script, tmp_path: Path) -> None:
    port = _port()
    launched = Launched(tmp_path, "--nnodes", 2, "--master-port", port, script("print('never')"))
    until(lambda: answers(port), "the store")
    launched.send(signal.SIGINT)
    assert launched.wait() == 130
    assert "SIGINT came before all nodes were there; no worker was started" in launched.err


# --- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], "nowhere.py: there is no such script; give the path of a Python file"),
        (["-m", "nowhere.job"], "-m nowhere.job: there is no module 'nowhere' here"),
        (["--no-python", "nowhere"], "nowhere: there is no such program"),
        (["-m", "--no-python", "x"], "-m and --no-python exclude each other"),
        (["--nproc-per-node", "0"], "must be a number from 1, or auto, cpu, gpu or xpu; got '0'"),
        (
            ["--nproc_per_node=many"],
            "must be a number from 1, or auto, cpu, gpu or xpu; got 'many'",
        ),
        (["--nproc-per-node", "xpu"], "--nproc-per-node xpu: this host has none"),
        (["--nnodes", "0"], "--nnodes must be at least 1, got 0"),
        (["--nnodes", "1:4"], "--nnodes 1:4: a range of nodes is not there"),
        (["--nnodes", "x"], "--nnodes must be a number from 1, got 'x'"),
        (["--nnodes", "2", "--node-rank", "2"], "--node-rank must be between 0 and 1"),
        (["--nnodes", "2", "--standalone"], "--standalone means one node, but --nnodes is 2"),
        (["--nnodes", "2", "--master-port", "0"], "several nodes need one port that all know"),
        (["--master-port", "70000"], "--master-port must be between 0 and 65535, got 70000"),
        (["--restart", "-1"], "--restart must be 0 or more, got -1"),
        (["--tee", "4"], "--tee must be 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both)"),
        (["--local-ranks-filter", "a"], "--local-ranks-filter must be numbers"),
        (["--rdzv-endpoint", "a:b"], "--rdzv-endpoint must be ADDRESS:PORT, got 'a:b'"),
        (["--log-dir", __file__], "cannot be used: File exists"),
    ],
)
def test_bad_input_is_a_sentence(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["launch", *arguments, __file__])
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output


def test_no_script_is_told() -> None:
    result = CliRunner().invoke(app, ["launch", "--nproc-per-node", "2"])
    assert result.exit_code == 2
    assert "Missing argument 'SCRIPT'" in result.output


def test_a_master_that_is_not_there_is_a_sentence() -> None:
    flags = ["--nnodes", "2", "--node-rank", "1", "--join-timeout", "0.3"]
    port = _port()
    result = CliRunner().invoke(app, ["launch", *flags, "--master-port", str(port), __file__])
    assert result.exit_code == 2
    assert f"no launcher of node 0 was reached at 127.0.0.1:{port} within 0.3 s" in result.output
    flags += ["--master-addr", "no.such.host.invalid"]
    result = CliRunner().invoke(app, ["launch", *flags, __file__])
    assert result.exit_code == 2
    assert "--master-addr no.such.host.invalid: " in result.output


def test_who_asks_for_no_survival_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = slots([2, 1], 0)[0], slots([2, 1], 1)[0]
    assert survival_variables(first, 0) == {"OFFBEAT_SURVIVE": "1", "OFFBEAT_WORKER": "0"}
    monkeypatch.setenv("OFFBEAT_SURVIVE", "0")
    again = {"OFFBEAT_SURVIVE": "0", "OFFBEAT_WORKER": "8", "OFFBEAT_JOIN": "1"}
    assert survival_variables(last, 2) == again


def test_choices_of_streams_are_read_as_torchrun_does() -> None:
    assert Choice.parse("--tee", "3") == Choice(3)
    some = Choice.parse("--tee", "0:1,12:2")
    assert [some.has(rank, 1) for rank in (0, 1, 12)] == [True, False, False]
    assert [some.has(rank, 2) for rank in (0, 1, 12)] == [False, False, True]


# --- torch.distributed ---------------------------------------------------------------------

REDUCES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(json.dumps(total.item()), flush=True)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
try:
    while True:
        dist.all_reduce(total)
except RuntimeError:
    time.sleep(1000)
"""


@real
def test_a_plain_script_across_two_nodes_ends_when_a_worker_is_killed(
    script: Script, tmp_path: Path
) -> None:
    here, there = _nodes(tmp_path, script(REDUCES), workers=(1, 1))
    assert (here.wait(), there.wait()) == (1, 1)
    assert here.lines() == there.lines() == [2.0]
    assert "rank 1 (pid " in there.err
    assert "it was killed by SIGKILL (signal 9)" in there.err
    assert "rank 1 was killed by SIGKILL (signal 9) on node 1" in here.err
