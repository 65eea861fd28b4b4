"""Namespaces as hosts: a script trains across two of them, and one asks a bad name server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launched

pytestmark = pytest.mark.real

TRAIN = """
import json, torch, offbeat

torch.manual_seed(offbeat.rank())
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with offbeat.attach(model, optimizer) as dp:
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    assert dp.replicas_identical()
print(json.dumps([offbeat.rank(), offbeat.world_size(), model.weight.tolist()]))
"""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them: 10.67.0.1 and 10.67.0.2."""
    names = f"offbeat-{os.getpid()}-0", f"offbeat-{os.getpid()}-1"
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip(
            "-n",
            names[0],
            "link",
            "add",
            "cable",
            "type",
            "veth",
            "peer",
            "cable",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            _ip("-n", name, "address", "add", f"10.67.0.{number}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(names)
        why = getattr(error, "stderr", None) or str(error).encode()
        pytest.skip(f"no network namespaces can be made here: {why.decode().strip()}")
    yield names
    _remove(names)


def _remove(names: tuple[str, str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_a_script_trains_across_two_hosts(hosts: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    launched = [
        Launched(
            tmp_path,
            *("--nproc-per-node", 1, "--nnodes", 2, "--node-rank", node),
            *("--master-addr", "10.67.0.1", file),
            name=f"host{node}",
            namespace=host,
        )
        for node, host in enumerate(hosts)
    ]
    assert [one.wait() for one in launched] == [0, 0], [one.err for one in launched]
    (first,), (second,) = (one.lines() for one in launched)
    assert [first[:2], second[:2]] == [[0, 2], [1, 2]]
    assert first[2] == second[2]


# --- a name server of which an answer is lost -----------------------------------------------

FORGETFUL = """
import socket, subprocess, sys, threading

subprocess.run(["mount", "--bind", "resolv.conf", "/etc/resolv.conf"], check=True)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))


def answer():  # whoever asks for the second time, and then that there is no such name
    seen = set()
    while True:
        question, address = server.recvfrom(512)
        if (question, address) in seen:
            server.sendto(question[:2] + bytes([0x81, 0x83]) + question[4:], address)
        seen.add((question, address))


threading.Thread(target=answer, daemon=True).start()
from offbeat.cli import app

# By a name, so that the store hears IPv6, too: else it knows 127.0.0.1 from the hosts file.
app(["launch", "--nproc-per-node", "1", "--master-addr", "localhost", "asks.py"])
"""
ASKS = """
import json, os, threading, time

given = os.environ.get("RES_OPTIONS")
os.putenv("RES_OPTIONS", "timeout:1")  # for the answers that this process waits for itself
from torch.distributed import TCPStore

address = "127.0.0.1", int(os.environ["MASTER_PORT"])
client, longest = TCPStore(*address, is_master=False), 0.0
other = threading.Thread(target=TCPStore, args=address, kwargs={"is_master": False})
other.start()
while other.is_alive():
    began = time.monotonic()
    client.check(["offbeat"])
    longest = max(longest, time.monotonic() - began)
    time.sleep(0.01)
print(json.dumps([given, longest]))
"""


@pytest.mark.timeout(180)
def test_the_store_does_not_fall_silent_for_a_lost_answer_of_a_name_server(tmp_path: Path) -> None:
    """Not for `OFFBEAT_LOST_S`, after which it would be lost; and workers ask as they did."""
    apart = "unshare", "--map-root-user", "--mount", "--net"
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here")
    resolves = "nameserver 127.0.0.1\n"
    files = {"forgetful.py": FORGETFUL, "asks.py": ASKS, "resolv.conf": resolves}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ended = subprocess.run(
        [*apart, sys.executable, "forgetful.py"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "RES_OPTIONS"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    given, longest = json.loads(ended.stdout)
    assert given is None
    assert 0.9 < longest < 3.0, ended.stderr  # it has asked, and has not waited for long
