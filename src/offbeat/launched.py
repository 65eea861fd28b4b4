"""What the launcher and a worker tell each other: environment variables, and keys of the store.

`offbeat launch` tells every worker

    OFFBEAT_SURVIVE=1    when this worker is lost, the others are left alive: to go on makes sense.
                         0 if the launcher itself was started with that
    OFFBEAT_WORKER=5     its id, which nobody else in this job has or had; at the start its rank
    OFFBEAT_JOIN=1       only to a worker that was started again: the job runs, join it

A worker that was started again has the rank, the local rank (and so the device) and the
TORCHELASTIC_RESTART_COUNT of the one that it stands in for, but an id of its own.

A worker tells the launcher, and who joins later, by keys of the job's store without any prefix,

    offbeat/survive      from now on the others go on when one is lost. Without this key the first
                         failure ends all. Better left there at the end of the training: who has
                         ended it must not be ended because another one dies in its last lines
    offbeat/world        how often those who survive have attached by now
    offbeat/joined/5     worker 5, which was started again, is a member now. Who has not said so is
                         ended when nobody is left whom it could join.
"""

from __future__ import annotations

import os
from typing import Any

SURVIVE = "OFFBEAT_SURVIVE"
WORKER = "OFFBEAT_WORKER"
JOIN = "OFFBEAT_JOIN"
SURVIVE_KEY = "offbeat/survive"
_WORLD_KEY = "offbeat/world"


def joined_key(worker: int) -> str:
    """The key by which a worker that was started again says that it is a member."""
    return f"offbeat/joined/{worker}"


def keeps_survivors() -> bool:
    """Say whether this worker's launcher leaves the others alive when one is lost."""
    return os.environ.get(SURVIVE) == "1"


def joins() -> bool:
    """Say whether this worker was started again, to join a job that runs."""
    return os.environ.get(JOIN) == "1"


def worker_id() -> int:
    """This worker's id: its rank, unless it was started again."""
    return int(os.environ.get(WORKER) or os.environ.get("RANK", "0"))


def say_survives(store: Any, world: int = 1) -> None:
    """Tell the launcher that the others go on when a worker is lost; in the so manieth world."""
    _root(store).set(_WORLD_KEY, str(world))
    _root(store).set(SURVIVE_KEY, b"1")


def world_number(store: Any) -> int:
    """How often those who survive have attached by now; waits until they have."""
    return int(bytes(_root(store).get(_WORLD_KEY)))


def say_joined(store: Any) -> None:
    """Tell the launcher that this worker, which was started again, is a member now."""
    _root(store).set(joined_key(worker_id()), b"1")


def _root(store: Any) -> Any:
    """The job's store without any prefix, where the launcher looks for keys."""
    return getattr(store, "_underlying_non_prefix_store", store)
