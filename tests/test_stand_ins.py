"""`torch.distributed` of a simulated script: each collective gives what torch's would, in time."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from offbeat.clusters import Cluster
from offbeat.lab.simulate import simulate

HEAD = """
import torch
import torch.distributed as dist
from offbeat.worlds import enter_world

world = enter_world()
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

def one(value):
    return torch.tensor([float(value)])

def empty(count=4):
    return [torch.empty(1) for _ in range(count)]

def values(tensors):
    return [tensor.item() for tensor in tensors]
"""

WIRED = Cluster.uniform(4, latency_s=1.0)


def simulated(folder: Path, text: str, cluster: Cluster = WIRED) -> None:
    path = folder / "train.py"
    path.write_text(HEAD + dedent(text))
    if (error := simulate(path, cluster).error) is not None:
        raise error


COLLECTIVES = {
    "barrier": """
        world.sleep_until(float(rank))
        dist.barrier()
        assert world.now() == 3.0 + 2.0
        """,
    "monitored_barrier": """
        world.sleep_until(float(rank))
        dist.monitored_barrier(timeout=None)
        assert world.now() == 3.0 + 2.0
        """,
    "all_reduce": """
        dist.all_reduce(total := one(rank))
        dist.all_reduce(least := one(rank), dist.ReduceOp.MIN)
        assert values([total, least]) == [6.0, 0.0]
        """,
    "all_reduce of a parameter": """
        weight = torch.nn.Parameter(one(rank))
        dist.all_reduce(weight, op=dist.ReduceOp.AVG)
        assert weight.item() == 1.5 and weight.requires_grad
        """,
    "reduce": """
        dist.reduce(total := one(rank), dst=2)
        dist.reduce(mean := one(rank), dst=1, op=dist.ReduceOp.AVG)
        assert total.item() == (6.0 if rank == 2 else rank)
        assert mean.item() == (1.5 if rank == 1 else rank)
        """,
    "broadcast": """
        dist.broadcast(value := one(rank), src=3)
        dist.broadcast(other := one(rank), group_src=1)
        assert values([value, other]) == [3.0, 1.0]
        """,
    "all_gather": """
        dist.all_gather(rows := empty(), one(rank))
        assert values(rows) == [0.0, 1.0, 2.0, 3.0]
        assert world.now() == 3.0
        """,
    "all_gather_into_tensor": """
        dist.all_gather_into_tensor(rows := torch.empty(8), torch.full((2,), float(rank)))
        assert rows.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        """,
    "gather": """
        rows = empty() if rank == 1 else None
        dist.gather(one(rank), rows, dst=1)
        if rank == 1:
            assert values(rows) == [0.0, 1.0, 2.0, 3.0]
        assert world.now() == 1.0
        """,
    "scatter": """
        rows = [one(10 * each) for each in range(4)] if rank == 3 else None
        dist.scatter(mine := torch.empty(1), rows, src=3)
        assert mine.item() == 10 * rank
        assert world.now() == 1.0
        """,
    "reduce_scatter": """
        rows = [one(10 * rank + each) for each in range(4)]
        dist.reduce_scatter(mine := torch.empty(1), rows)
        dist.reduce_scatter(mean := torch.empty(1), rows, op=dist.ReduceOp.AVG)
        assert values([mine, mean]) == [60 + 4 * rank, 15 + rank]
        """,
    "reduce_scatter_tensor": """
        rows = torch.arange(8.0) + 10 * rank
        dist.reduce_scatter_tensor(mine := torch.empty(2), rows, dist.ReduceOp.MAX)
        assert mine.tolist() == [30 + 2 * rank, 31 + 2 * rank]
        """,
    "all_to_all": """
        rows = [torch.full((rank + each,), float(rank)) for each in range(4)]
        dist.all_to_all(got := [torch.empty(rank + each) for each in range(4)], rows)
        assert [each.tolist() for each in got] == [[each] * (rank + each) for each in range(4)]
        """,
    "all_to_all_single": """
        dist.all_to_all_single(got := torch.empty(4), 10 * rank + torch.arange(4.0))
        assert got.tolist() == [rank, 10 + rank, 20 + rank, 30 + rank]
        """,
    "all_to_all_single of given sizes": """
        sizes = [1, 2, 1, 0]  # by the receiver
        got = torch.empty(4 * sizes[rank])
        dist.all_to_all_single(got, torch.full((4,), float(rank)), [sizes[rank]] * 4, sizes)
        assert got.tolist() == [each for each in range(4) for _ in range(sizes[rank])]
        """,
    "objects": """
        dist.all_gather_object(everyones := [None] * 4, {"rank": rank, "pad": "x" * rank})
        assert everyones[2] == {"rank": 2, "pad": "xx"}
        dist.gather_object(rank, found := [None] * 4 if rank == 1 else None, dst=1)
        assert found == ([0, 1, 2, 3] if rank == 1 else None)
        dist.broadcast_object_list(settings := ["a", rank] if rank == 2 else [None] * 2, src=2)
        assert settings == ["a", 2]
        dist.scatter_object_list(mine := [None], list("abcd") if rank == 0 else None, src=0)
        assert mine == ["abcd"[rank]]
        """,
    "send and recv": """
        if rank == 0:
            dist.send(one(5), dst=1)
            dist.send(one(6), 1)
        elif rank == 1:
            assert dist.recv(got := torch.empty(1), src=0) == 0
            dist.recv(next := torch.empty(1), 0)
            assert values([got, next]) == [5.0, 6.0] and world.now() == 1.0
        """,
    "isend and irecv": """
        got = torch.empty(1)
        works = [dist.isend(one(rank), (rank + 1) % 4), dist.irecv(got, (rank - 1) % 4)]
        assert world.now() == 0.0
        assert all(work.wait() for work in works)
        assert got.item() == (rank - 1) % 4 and world.now() == 1.0
        """,
    "async_op": """
        work = dist.all_reduce(total := one(rank), op=dist.ReduceOp.AVG, async_op=True)
        assert (world.now(), total.item()) == (0.0, rank)
        world.sleep_until(1.5)
        assert work.wait() and work.wait() and work.is_completed()
        assert (world.now(), total.item()) == (2.0, 1.5)
        work = dist.all_gather(rows := empty(), one(rank), async_op=True)
        assert work.is_completed() and values(rows) == [0.0, 1.0, 2.0, 3.0]
        """,
    "new_group": """
        low, odd = dist.new_group([1, 0]), dist.new_group([1, 3])
        everyone = dist.new_group()
        assert dist.get_world_size(everyone) == 4
        if rank < 2:
            assert (dist.get_rank(low), dist.get_world_size(low)) == (rank, 2)
            dist.all_reduce(total := one(rank), group=low)
            assert total.item() == 1.0 and world.now() == 1.0
        else:
            assert low == dist.GroupMember.NON_GROUP_MEMBER
            assert (dist.get_rank(low), dist.get_world_size(low)) == (-1, -1)
            assert dist.all_reduce(one(rank), group=low) is None
        if rank in (1, 3):
            assert dist.get_process_group_ranks(odd) == [1, 3]
            assert dist.get_group_rank(odd, 3) == 1 and dist.get_global_rank(odd, 1) == 3
            dist.broadcast(value := one(rank), src=3, group=odd)
            dist.all_gather_object(found := [None] * 2, rank, group=odd)
            dist.gather(one(rank), rows := empty(2) if rank == 1 else None, group=odd, group_dst=0)
            assert value.item() == 3.0 and found == [1, 3]
            assert rank == 3 or values(rows) == [1.0, 3.0]
            dist.destroy_process_group(odd)
        dist.barrier(everyone)
        dist.barrier(group=dist.group.WORLD)
        """,
}


@pytest.mark.parametrize("text", COLLECTIVES.values(), ids=COLLECTIVES)
def test_a_script_may_call(text: str, tmp_path: Path) -> None:
    simulated(tmp_path, text)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("dist.batch_isend_irecv([])", "batch_isend_irecv is not simulated: there are"),
        (
            "dist.all_reduce(one(1), dist.ReduceOp.PRODUCT)",
            "all_reduce by PRODUCT is not simulated",
        ),
        ("dist.recv(one(1))", "recv from any worker is not simulated: name the source"),
        ("dist.send(one(1), 0, tag=3)", "send with tag 3 is not simulated"),
    ],
)
def test_the_rest_is_refused(call: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=words):
        simulated(tmp_path, call)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            "dist.broadcast(one(1), src=9)",
            r"worker 9 is not in the group of workers \[0, 1, 2, 3\]",
        ),
        ("dist.gather(one(1), empty(3) if rank == 0 else None)", "3 tensors for a group of 4"),
        ("dist.scatter(one(1))", "no list for a group of 4 workers: give one for each"),
    ],
)
def test_wrong_arguments_are_said(call: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        simulated(tmp_path, call)


def test_whoever_blocks_is_elsewhere_and_says_where(tmp_path: Path) -> None:
    """Each stay once, even of a collective in several steps; with `async_op` in `wait`."""
    text = """
    from contextlib import contextmanager

    class Attached:
        def close(self): ...
        @contextmanager
        def away(self, where):
            stays.append((where, world.now()))
            yield
            stays.append(("back", world.now()))

    stays, attached = [], Attached()
    world.open.append(attached)
    here = Attached.away.__wrapped__.__code__.co_firstlineno
    work = dist.all_reduce(one(1), async_op=True)
    assert stays == []
    work.wait()
    dist.all_gather_object([None] * 4, rank)
    line = here + 9
    assert stays == [
        (f"train.py:{line} (all_reduce)", 0.0), ("back", 2.0),
        (f"train.py:{line + 3} (all_gather_object)", 2.0), ("back", 8.0),
    ], (stays, line)
    """
    simulated(tmp_path, text)
