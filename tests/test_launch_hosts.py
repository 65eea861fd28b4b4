"""Two network namespaces as two hosts: an ordinary script trains across them."""

from __future__ import annotations

import os
import subprocess
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
