"""The collectives of `torch.distributed` in a simulation, with torch's names and signatures.

Each costs what the verb behind it costs: see docs/clusters.md. A reduce costs what an all-reduce
does, a reduce-scatter what an all-to-all does; gather, scatter and an all-to-all of lists or of
given sizes are exchanges. Objects are pickled, and their sizes travel first.

`group` is this worker's handle by the time that a function here is called; process_groups.py sees
to that, and to `async_op`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor

from offbeat.lab.process_groups import Group, Started
from offbeat.worlds.base import Op

_OPS: dict[str, Op] = {"SUM": "sum", "AVG": "sum", "MAX": "max", "MIN": "min"}
_FOLD: dict[Op, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_SUM: Any = "SUM"  # or torch's own ReduceOp

# --- sums ----------------------------------------------------------------------------------


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Started:
    return all_reduce(torch.zeros(1), group=group)


def monitored_barrier(
    group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
) -> Started:
    return barrier(group)


def all_reduce(
    tensor: Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Started:
    kind, own = _kind("all_reduce", op), tensor.detach()
    work = group.channel.all_reduce(own, _OPS[kind])
    return Started(work, (lambda: own.div_(group.size())) if kind == "AVG" else None)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Started:
    kind, total = _kind("reduce", op), tensor.detach().clone()
    is_target = group.rank_of(dst, group_dst) == group.world.rank

    def then() -> None:
        if is_target:
            tensor.copy_(total / group.size() if kind == "AVG" else total)

    return Started(group.channel.all_reduce(total, _OPS[kind]), then)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
) -> Started:
    kind = _kind("reduce_scatter", op)
    mine = torch.stack([row.detach() for row in input_list])
    theirs = torch.empty_like(mine)

    def then() -> None:
        total = fold(_FOLD[_OPS[kind]], theirs.unbind())
        output.copy_(total / group.size() if kind == "AVG" else total)

    return Started(group.channel.all_to_all(mine, theirs), then)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Started:
    rows = input.detach().reshape(group.size(), *output.shape)
    return reduce_scatter(output, rows.unbind(), op, group)


# --- from one, to one ----------------------------------------------------------------------


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Started:
    return Started(group.channel.broadcast(tensor.detach(), group.rank_of(src, group_src)))


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Started:
    target = group.rank_of(dst, group_dst)
    if target != group.world.rank:
        return Started(group.channel.exchange({target: tensor.detach()}, {}))
    work = group.channel.exchange({}, group.others(gather_list))
    assert gather_list is not None, "others() has seen it"
    gather_list[group.at].detach().copy_(tensor.detach())
    return Started(work)


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Started:
    source = group.rank_of(src, group_src)
    if source != group.world.rank:
        return Started(group.channel.exchange({}, {source: tensor.detach()}))
    work = group.channel.exchange(group.others(scatter_list), {})
    assert scatter_list is not None, "others() has seen it"
    tensor.detach().copy_(scatter_list[group.at].detach())
    return Started(work)


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Started:
    _check_tag("send", tag)
    return Started(group.channel.send(tensor.detach(), group.rank_of(dst, group_dst)))


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Started:
    _check_tag("recv", tag)
    if src is None and group_src is None:
        raise NotImplementedError(
            "torch.distributed.recv from any worker is not simulated: name the source"
        )
    source = group.rank_of(src, group_src)
    return Started(group.channel.recv(tensor.detach(), source), value=source)


# --- from all, to all ----------------------------------------------------------------------


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
) -> Started:
    def then(rows: Tensor) -> None:
        for into, row in zip(tensor_list, rows, strict=True):
            into.copy_(row)

    return _gathered(tensor, group, then)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Started:
    shape = output_tensor.shape
    return _gathered(input_tensor, group, lambda rows: output_tensor.copy_(rows.reshape(shape)))


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
) -> Started:
    outgoing, incoming = group.others(input_tensor_list), group.others(output_tensor_list)
    work = group.channel.exchange(outgoing, incoming)
    output_tensor_list[group.at].detach().copy_(input_tensor_list[group.at].detach())
    return Started(work)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Any = None,
    async_op: bool = False,
) -> Started:
    if output_split_sizes or input_split_sizes:
        outputs, inputs = (
            torch.split(whole.detach(), list(sizes or [len(whole) // group.size()] * group.size()))
            for whole, sizes in ((output, output_split_sizes), (input, input_split_sizes))
        )
        return all_to_all(outputs, inputs, group)
    mine = input.detach().contiguous().view(group.size(), -1)
    theirs = torch.empty_like(mine)
    work = group.channel.all_to_all(mine, theirs)
    return Started(work, lambda: output.copy_(theirs.view(output.shape)))


# --- objects, in steps ---------------------------------------------------------------------


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = _objects(obj, group)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> None:
    found, target = _objects(obj, group), group.rank_of(dst, group_dst)
    if target == group.world.rank and object_gather_list is not None:
        object_gather_list[:] = found


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    object_list[:] = _object(object_list, group.rank_of(src, group_src), group)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> None:
    everyones = _object(scatter_object_input_list, group.rank_of(src, group_src), group)
    scatter_object_output_list[0] = everyones[group.at]


COLLECTIVES: dict[str, Callable[..., Started]] = {
    **{each.__name__: each for each in (barrier, monitored_barrier, all_reduce, reduce)},
    **{each.__name__: each for each in (reduce_scatter, reduce_scatter_tensor, broadcast)},
    **{each.__name__: each for each in (gather, scatter, all_gather, all_gather_into_tensor)},
    **{each.__name__: each for each in (all_to_all, all_to_all_single, send, recv)},
    "isend": send,
    "irecv": recv,
}
IN_STEPS: dict[str, Callable[..., Any]] = {
    **{each.__name__: each for each in (all_gather_object, gather_object)},
    **{each.__name__: each for each in (broadcast_object_list, scatter_object_list)},
}


def _gathered(tensor: Tensor, group: Group, then: Callable[[Tensor], object]) -> Started:
    own = tensor.detach().contiguous()
    rows = own.new_empty((group.size(), *own.shape))
    return Started(group.channel.all_gather(own, rows), lambda: then(rows))


def _objects(obj: Any, group: Group) -> list[Any]:
    """Gather an object of every member."""
    own, sizes = _pickled(obj), torch.empty(group.size(), 1, dtype=torch.int64)
    group.channel.all_gather(torch.tensor([own.numel()]), sizes).wait()
    padded = own.new_zeros(int(sizes.max()))
    padded[: own.numel()] = own
    rows = own.new_empty((group.size(), padded.numel()))
    group.channel.all_gather(padded, rows).wait()
    return [
        _unpickled(row[:size]) for row, size in zip(rows, sizes.flatten().tolist(), strict=True)
    ]


def _object(obj: Any, source: int, group: Group) -> Any:
    """Take over the object of one member."""
    is_mine = source == group.world.rank
    data = _pickled(obj) if is_mine else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([data.numel()])
    group.channel.broadcast(size, source).wait()
    if not is_mine:
        data = torch.empty(int(size), dtype=torch.uint8)
    group.channel.broadcast(data, source).wait()
    return obj if is_mine else _unpickled(data)


def _pickled(obj: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(bytes(data.tolist()))


def _kind(name: str, op: Any) -> str:
    kind = str(getattr(op, "name", op)).rpartition(".")[2]
    if kind not in _OPS:
        raise NotImplementedError(f"{name} by {kind} is not simulated, only {list(_OPS)}")
    return kind


def _check_tag(name: str, tag: int) -> None:
    if tag != 0:
        raise NotImplementedError(
            f"torch.distributed.{name} with tag {tag} is not simulated: leave tags out, "
            "messages between two workers arrive in order"
        )
