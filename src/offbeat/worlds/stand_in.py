"""The default process group; that of a worker which joins is a name, and has no connections.

The others have made theirs at the start, with a worker in it that is lost by now, and torch cannot
take another one in. So a joiner has a group of the right size, in which it has its rank, for
scripts that ask for those. Its collectives raise, as the others' do since the loss. What offbeat
sends goes by groups of its own. When it has joined, and the script ends that group and makes
another one, with all who are there by then, that is one like theirs.

Scripts make the default group themselves, or leave it to attach(): both end in one function of
torch's, which is replaced in a process that was started to join.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from offbeat import launched

_NAME = "offbeat_joined"
_has_joined = False
_VERBS = (
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast"),
    *("gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter", "send"),
)
WORDS = (
    "this worker has joined a job that was running, and the program's own collectives of "
    "torch.distributed have had the lost worker among their members since the start: they work on "
    "no worker any more. What offbeat does is not concerned"
)


class _StandIn(dist.ProcessGroup):
    """A group that has a size, and does nothing."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        return _NAME


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(WORDS)


for _verb in _VERBS:
    setattr(_StandIn, _verb, _refuse)


def make_default_group() -> None:
    """Make it, where the script has not; all have it when this returns.

    Gloo raises where it still connects when another worker ends: by a mistake in its settings, say,
    of which all are to hear. Kept until the process exits: a second one on the same store would
    meet the addresses that the first has left there.
    """
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if not launched.joins():
        dist.all_reduce(torch.zeros(1))


def stand_in() -> None:
    """Have torch make such groups from here on, if this worker was started to join."""
    if not launched.joins() or _NAME in dist.Backend.backend_list:
        return
    kind: Any = _StandIn
    make_one = lambda store, rank, size, time_out: kind(rank, size)  # noqa: E731 - as torch has it
    dist.Backend.register_backend(_NAME, make_one, devices=["cpu", "cuda"])
    original, stands = distributed_c10d._new_process_group_helper, True

    def make(size: int, rank: int, ranks: Any, backend: Any, *others: Any, **settings: Any) -> Any:
        nonlocal stands
        if not dist.is_initialized():  # it is to be the default group; else a part of that
            stands = not _has_joined
        if not stands:
            return original(size, rank, ranks, backend, *others, **settings)
        settings["backend_options"] = settings["device_id"] = None
        return original(size, rank, ranks, dist.Backend(_NAME), *others, **settings)

    distributed_c10d._new_process_group_helper = make  # type: ignore[assignment]


def has_joined() -> None:
    """This worker is a member: the next default group is made by all, and it with them."""
    global _has_joined
    _has_joined = True


stand_in()
