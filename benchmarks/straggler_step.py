"""What one slow rank costs the others: time per step of the fast, samples per second of all.

Real ranks over Gloo, two and four as a rule; the last one sleeps 50 ms longer in every step. A step
is a real forward and backward pass of a small model, and in between a sleep that stands for an
accelerator: 10 ms in all. "own compute" is the same loop without any exchange, on the same
processes, all of them at the same time: so what they pay for too few cores is in it.

    ddp              DistributedDataParallel
    post-local       torch's PostLocalSGDOptimizer, models averaged every 8 steps
    accelerate       Accelerate's LocalSGD, likewise
    torchft          its DistributedDataParallel; every rank is a replica group
    solo, majority   EagerSGD
    solo, delay      EagerSGD("solo", delay=1): nobody waits for its own round either
    abs              ABSSGD
    abs, local       WaitFreeLocalSGD(): one's own gradients at once
    asgd             ASGD(): every gradient by itself, from one to all
    ringmaster       RingmasterASGD(4): those that have missed fewer than 4 updates
    wagma            WAGMASGD(group=2): waits for the exchange of its own round, not for the slow
    wagma, delay     the same with delay=1: only for that of the round before
    wagma of 4       the same with group=4; from 4 ranks on
    pairs            no method, and nothing of ours: after a step, torch's all-reduce of the model
                     with one other rank, waited for a step later. What exchanges of that size cost
                     at least; from 4 ranks on, where it is not the slow rank's other one

A step's CPU time, of all threads of the process, says what the ranks must share: with more of them
than cores, a step takes at least ranks x CPU time / cores.

Accelerate and torchft take part if they are installed; torchft not with --quick. Contestants take
turns in the same processes, except torchft, which has a server and thus processes of its own. Those
that need equal numbers of steps on all ranks get them; the others train for as long.

    python benchmarks/straggler_step.py [--ranks 2,4] [--only NAME ...] [--quick] [--json FILE]
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import offbeat
from offbeat import testing

COMPUTE_S = 0.010
SLOWED_BY_S = 0.050
BATCH = 32
AVERAGE_EVERY = 8
WARM_UP_STEPS = AVERAGE_EVERY
OWN = "own compute"

Step = Callable[[], None]


class Task:
    """A model of a quarter of a million parameters, and one step of it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        self.optimizer = SGD(self.model.parameters(), lr=1e-3)
        self.x, self.y = torch.randn(BATCH, 256), torch.randn(BATCH, 256)
        slowed = dist.get_rank() == dist.get_world_size() - 1
        self.compute_s = COMPUTE_S + (SLOWED_BY_S if slowed else 0.0)

    def backward(self, model: nn.Module, run: Callable[[Tensor], object]) -> None:
        """Forward, the rest of the compute time, backward: where DDP begins to exchange."""
        began = time.monotonic()
        loss = nn.functional.mse_loss(model(self.x), self.y)
        time.sleep(max(0.0, began + self.compute_s - time.monotonic()))
        run(loss)

    def step(self, model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.backward(model, Tensor.backward)
        optimizer.step()


# --- contestants: each makes a step ready, and cleans up -----------------------------------


@contextmanager
def own_compute(task: Task) -> Iterator[Step]:
    yield lambda: task.step(task.model, task.optimizer)


@contextmanager
def ddp(task: Task) -> Iterator[Step]:
    model = DistributedDataParallel(task.model)
    yield lambda: task.step(model, task.optimizer)


@contextmanager
def post_local(task: Task) -> Iterator[Step]:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(task.model)
    state = hook.PostLocalSGDState(None, _alone(), start_localSGD_iter=1)
    model.register_comm_hook(state, hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=AVERAGE_EVERY, warmup_steps=1)
    optimizer = PostLocalSGDOptimizer(task.optimizer, averager)
    yield lambda: task.step(model, optimizer)


def _alone() -> dist.ProcessGroup:
    """This rank's own group: the hook would else reduce among the ranks of a machine."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()]
    assert isinstance(group, dist.ProcessGroup), "a member of its own group"
    return group


@contextmanager
def accelerate(task: Task) -> Iterator[Step]:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(task.model, task.optimizer)
    with LocalSGD(accelerator, model, AVERAGE_EVERY) as local:

        def step() -> None:
            optimizer.zero_grad()
            task.backward(model, accelerator.backward)
            optimizer.step()
            local.step()

        yield step


@contextmanager
def pairs(task: Task) -> Iterator[Step]:
    groups = [dist.new_group([rank, rank + 1]) for rank in range(0, dist.get_world_size(), 2)]
    group, parameters = groups[dist.get_rank() // 2], list(task.model.parameters())
    flat = torch.zeros(sum(each.numel() for each in parameters))
    pieces = flat.split([each.numel() for each in parameters])
    views = [piece.view_as(each) for piece, each in zip(pieces, parameters, strict=True)]
    under_way: list[Any] = []

    def step() -> None:
        task.step(task.model, task.optimizer)
        if under_way:
            under_way.pop().wait()
        with torch.no_grad():
            torch._foreach_copy_(views, parameters)
        under_way.append(dist.all_reduce(flat, group=group, async_op=True))

    yield step
    under_way.pop().wait()


def attached(algorithm: offbeat.Algorithm) -> Callable[[Task], AbstractContextManager[Step]]:
    @contextmanager
    def contestant(task: Task) -> Iterator[Step]:
        with offbeat.attach(task.model, task.optimizer, algorithm):
            yield lambda: task.step(task.model, task.optimizer)

    return contestant


@contextmanager
def torchft(task: Task, lighthouse: str) -> Iterator[Step]:
    import torchft as ft

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(),
        load_state_dict=task.model.load_state_dict,
        state_dict=task.model.state_dict,
        min_replica_size=dist.get_world_size(),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"rank-{dist.get_rank()}",
        hostname="127.0.0.1",
    )
    model = ft.DistributedDataParallel(manager, task.model)
    optimizer = ft.Optimizer(manager, task.optimizer)
    yield lambda: task.step(model, optimizer)
    dist.barrier()
    manager.shutdown(wait=False)


TOGETHER: dict[str, Callable[[Task], AbstractContextManager[Step]]] = {
    OWN: own_compute,
    "ddp": ddp,
    "post-local": post_local,
    **({"accelerate": accelerate} if importlib.util.find_spec("accelerate") else {}),
    "majority": attached(offbeat.EagerSGD("majority")),
    "solo": attached(offbeat.EagerSGD("solo")),
    "solo, delay": attached(offbeat.EagerSGD("solo", delay=1)),
    "abs": attached(offbeat.ABSSGD()),
    "abs, local": attached(offbeat.WaitFreeLocalSGD()),
    "asgd": attached(offbeat.ASGD()),
    "ringmaster": attached(offbeat.RingmasterASGD(4)),
    "wagma": attached(offbeat.WAGMASGD(group=2)),
    "wagma, delay": attached(offbeat.WAGMASGD(group=2, delay=1)),
    "wagma of 4": attached(offbeat.WAGMASGD(group=4)),
    "pairs": pairs,
}
EQUAL_STEPS = ("ddp", "post-local", "accelerate", "pairs")
LEAST_RANKS = {"pairs": 4, "wagma of 4": 4}


# --- measuring -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """What one rank did with one contestant in one turn."""

    step_s: float
    """The median, over steps."""
    mean_step_s: float
    samples_per_s: float
    cpu_step_s: float
    """Of all threads of the process."""


def measured(step: Step, steps: int, equal_steps: bool) -> Block:
    """Step so often as the slow rank can in the time, or for that time."""
    for _ in range(WARM_UP_STEPS):
        step()
    began, took, cpu_began = time.monotonic(), [], time.process_time()
    until = began + steps * (COMPUTE_S + SLOWED_BY_S)
    while len(took) < steps if equal_steps else time.monotonic() < until:
        step_began = time.monotonic()
        step()
        took.append(time.monotonic() - step_began)
    seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu_began
    return Block(
        step_s=statistics.median(took),
        mean_step_s=seconds / len(took),
        samples_per_s=BATCH * len(took) / seconds,
        cpu_step_s=cpu_s / len(took),
    )


def take_turns(turns: int, steps: int, names: list[str]) -> dict[str, list[Block]]:
    """One rank: contestants that need no server, in an order that changes with every turn."""
    dist.init_process_group("gloo")
    blocks: dict[str, list[Block]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with TOGETHER[name](Task()) as step:
                dist.barrier()
                blocks[name].append(measured(step, steps, name in EQUAL_STEPS))
            dist.barrier()
    dist.destroy_process_group()
    return blocks


def with_torchft(lighthouse: str, steps: int) -> dict[str, list[Block]]:
    """One rank: torchft alone."""
    dist.init_process_group("gloo")
    with torchft(Task(), lighthouse) as step:
        dist.barrier()
        block = measured(step, steps, equal_steps=True)
    dist.destroy_process_group()
    return {"torchft": [block]}


def measure(
    ranks: int, turns: int, steps: int, names: list[str], with_servers: bool
) -> list[dict[str, Any]]:
    """These contestants on so many ranks, as rows."""
    one_thread = {"OMP_NUM_THREADS": "1"}
    names = [name for name in names if ranks >= LEAST_RANKS.get(name, 1)]
    ended = testing.processes(
        take_turns, ranks, turns, steps, names, environment=one_thread, time_out_s=600
    )
    found: list[dict[str, list[Block]]] = [one.result for one in ended]
    if with_servers and importlib.util.find_spec("torchft"):
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=ranks, join_timeout_ms=1000)
        ended = testing.processes(
            *(with_torchft, ranks, lighthouse.address(), steps),
            environment=one_thread,
            time_out_s=120,
        )
        lighthouse.shutdown()
        for blocks, one in zip(found, ended, strict=True):
            blocks.update(one.result)
    own_s = statistics.median(block.mean_step_s for block in found[0][OWN])
    rows = []
    for name in found[0]:
        fast_s = [block.mean_step_s for block in found[0][name]]
        groups = zip(*(blocks[name] for blocks in found), strict=True)
        rows.append(
            {
                "ranks": ranks,
                "contestant": name,
                "fast_step_ms": [1e3 * seconds for seconds in fast_s],
                "fast_median_step_ms": [1e3 * block.step_s for block in found[0][name]],
                "over_own_compute": statistics.median(fast_s) / own_s,
                "fast_cpu_ms": [1e3 * block.cpu_step_s for block in found[0][name]],
                "samples_per_s": [sum(block.samples_per_s for block in group) for group in groups],
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print("\none rank slower by 50 ms: the fast rank's mean step, medians over turns")
    heads = (
        f"{'ms a step':>9} {'of own':>7} {'median ms':>9} {'CPU ms':>7} {'samples/s of all':>17}"
    )
    print(f"ranks {'':12} {heads}")
    for row in rows:
        print(
            f"{row['ranks']:5} {row['contestant']:12} "
            f"{statistics.median(row['fast_step_ms']):9.1f} {row['over_own_compute']:6.2f}x "
            f"{statistics.median(row['fast_median_step_ms']):9.1f} "
            f"{statistics.median(row['fast_cpu_ms']):7.1f} "
            f"{statistics.median(row['samples_per_s']):17.0f}"
        )


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4", help="how many, such as 2")
    parser.add_argument("--only", nargs="+", choices=list(TOGETHER), help="and own compute")
    parser.add_argument("--turns", type=int, help="7; 1 with --quick")
    arguments = parser.parse_args()
    turns, steps = (1, 24) if arguments.quick else (7, 64)
    chosen = [name for name in TOGETHER if name == OWN or name in (arguments.only or TOGETHER)]
    with_servers = not (arguments.quick or arguments.only)
    rows = []
    for ranks in map(int, arguments.ranks.split(",")):
        rows += measure(ranks, arguments.turns or turns, steps, chosen, with_servers)
    show(rows)
    common.write(arguments.json, {"rows": rows})


if __name__ == "__main__":
    main()
