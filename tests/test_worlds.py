"""Every world passes the public conformance checks."""

from __future__ import annotations

import sys
import threading

import pytest

import offbeat
from offbeat import testing
from offbeat.clusters import Cluster

NETWORKED = Cluster.uniform(4, latency_s=0.001, bandwidth_bytes_per_s=1e9)


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_virtual_world_conforms(check: testing.Check, workers: int) -> None:
    offbeat.run(testing.on_this_world(check), NETWORKED, workers=workers)


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_the_world_of_one_conforms(check: testing.Check) -> None:
    before = sys.getswitchinterval()
    testing.on_this_world(check)()
    assert threading.active_count() == 1
    assert sys.getswitchinterval() == before


@pytest.mark.real
@pytest.mark.parametrize("workers", [2, 4])
def test_the_real_world_conforms(workers: int) -> None:
    testing.processes(testing.on_this_world(*testing.CHECKS), workers)
