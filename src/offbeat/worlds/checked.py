"""What a world is asked for, checked before anything is done; and what it says when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from offbeat.errors import StillAttachedError, TooFewWorkersError, WorkerLostError, WorldError
from offbeat.worlds.base import everyone

_HOW_TO_SURVIVE = "To go on without a lost worker, attach(..., survive=True): see docs/survival.md"


def checked_members(
    name: str, members: tuple[int, ...] | None, rank: int, all_members: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the members of a worker's new channel, in order, or say what is wrong with them."""
    if members is None:
        return all_members
    chosen = tuple(sorted(set(members)))
    if len(chosen) != len(members):
        raise ValueError(f"channel {name!r} names a worker twice: {members}")
    if strangers := [member for member in chosen if member not in all_members]:
        raise ValueError(
            f"channel {name!r} names workers {strangers}, "
            f"but the cluster has the {len(all_members)} workers {_ranges(all_members)}"
        )
    if rank not in chosen:
        raise ValueError(f"worker {rank} opens channel {name!r} of {chosen}, without itself")
    return chosen


def first_difference(
    theirs: Mapping[str, Any], mine: Mapping[str, Any]
) -> tuple[str, object, object] | None:
    """What differs first, there and here; of lists their lengths, or the first item that does."""
    for what, value in theirs.items():
        other = mine.get(what)
        if value == other:
            continue
        if isinstance(value, list) and isinstance(other, list):
            if len(value) != len(other):
                return what, f"{len(value)} {what}", f"{len(other)} {what}"
            value, other = next((a, b) for a, b in zip(value, other, strict=True) if a != b)
        return what, value, other
    return None


def is_of_script(error: BaseException) -> bool:
    """Whether a script has made a mistake, and not the world around it."""
    return not isinstance(error, WorldError) or isinstance(error, StillAttachedError)


def fatal(words: str, rank: int, raised: bool) -> WorkerLostError:
    """What ends the run of all others, where losses are not survived; it says what to do.

    Not to survive it, if the worker's own script has raised: it would again, on any worker.
    """
    mend = f"Worker {rank}'s script has raised that, and its traceback says where: mend it there"
    return WorkerLostError(f"{words}. {mend if raised else _HOW_TO_SURVIVE}", rank, raised)


def no_store(rank: int, error: RuntimeError) -> WorkerLostError:
    """What a worker raises that attaches when the job's store is dead."""
    return WorkerLostError(
        f"worker {rank} cannot attach: the job's store, in worker 0 or in the launcher, does not "
        f"answer ({str(error).splitlines()[0]}): start the job again"
    )


def too_few(loss: WorkerLostError, members: tuple[int, ...], least: int) -> TooFewWorkersError:
    """What ends the run of those who are left."""
    return TooFewWorkersError(
        f"{loss}; {len(members)} of the workers are left, and min_workers is {least}: the run "
        "ends. Inside the attached block a checkpoint can still be saved: see docs/survival.md",
        rank=loss.rank,
    )


def _ranges(ranks: tuple[int, ...]) -> str:
    run = ranks == everyone(len(ranks))
    return f"0..{len(ranks) - 1}" if run else ", ".join(map(str, ranks))


def checked_rows(verb: str, members: Sequence[int], row: Sequence[int], table: Tensor) -> None:
    """Say what is wrong with a tensor that must have one row for each member."""
    if tuple(table.shape) != (len(members), *row) or not table.is_contiguous():
        raise ValueError(
            f"{verb} among {len(members)} members needs a contiguous tensor of shape "
            f"{(len(members), *row)}, got {tuple(table.shape)} with strides {table.stride()}"
        )


def checked_peers(rank: int, members: Sequence[int], *mappings: Mapping[int, Tensor]) -> None:
    """Say which of the ranks to exchange with cannot be meant."""
    for peer in {peer for mapping in mappings for peer in mapping}:
        if peer == rank or peer not in members:
            raise ValueError(
                f"worker {rank} cannot exchange with worker {peer}: "
                f"it must be another one of the channel's members {tuple(members)}"
            )
