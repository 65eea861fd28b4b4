"""What the launcher and a worker tell each other: environment variables, and keys of the store.

`offbeat launch` tells every worker

    OFFBEAT_SURVIVE=1    when this worker is lost, the others are left alive: to go on makes sense.
                         0 if the launcher itself was started with that
    OFFBEAT_WORKER=5     its id, which nobody else in this job has or had; at the start its rank
    OFFBEAT_JOIN=1       only to a worker that was started again: the job runs, join it
    OFFBEAT_STANDBY=10.0.0.2:4711   on several nodes: where the standby of the job's store is

A worker that was started again has the rank, the local rank (and so the device) and the
TORCHELASTIC_RESTART_COUNT of the one that it stands in for, but an id of its own.

A worker tells the launcher, and who joins later, by keys of the job's store without any prefix,

    offbeat/survive      from now on the others go on when one is lost. Without this key the first
                         failure ends all. Better left there at the end of the training: who has
                         ended it must not be ended because another one dies in its last lines
                         It is told to the standby first: a launcher may lose the store before it
                         has looked for this key there
    offbeat/moved        only in the standby: the workers have gone on with it
    offbeat/world        how often those who survive have attached by now
    offbeat/joined/5     worker 5, which was started again, is a member now. Who has not said so is
                         ended when nobody is left whom it could join.

and by an exit code: one that was started again, and came when the others had ended, ends with
TOO_LATE, which is no failure.
"""

from __future__ import annotations

import os
from typing import Any

SURVIVE = "OFFBEAT_SURVIVE"
WORKER = "OFFBEAT_WORKER"
JOIN = "OFFBEAT_JOIN"
STANDBY = "OFFBEAT_STANDBY"
TOO_LATE = 79  # the first that sysexits.h leaves free
SURVIVE_KEY = "offbeat/survive"
MOVED_KEY = "offbeat/moved"
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


def attempt() -> int:
    """How often this worker had been started before this process was."""
    return worker_id() // int(os.environ.get("WORLD_SIZE") or 1) if joins() else 0


def standby() -> tuple[str, int] | None:
    """Host and port of the standby of the job's store, if there is one."""
    host, _, port = os.environ.get(STANDBY, "").rpartition(":")
    return (host, int(port)) if host else None


def say_survives(store: Any, world: int = 1) -> None:
    """Tell the launcher that the others go on when a worker is lost; in the so manieth world."""
    _say(store, _WORLD_KEY, str(world))
    _say(store, SURVIVE_KEY)


def say_moved(store: Any) -> None:
    """Tell the launchers that the workers have gone on with this store, the standby."""
    _say(store, MOVED_KEY)


def world_number(store: Any) -> int:
    """How often those who survive have attached by now; waits until they have."""
    return int(bytes(_root(store).get(_WORLD_KEY)))


def say_joined(store: Any) -> None:
    """Tell the launcher that this worker, which was started again, is a member now."""
    _say(store, joined_key(worker_id()))


def _say(store: Any, key: str, value: str = "1") -> None:
    """Returns when it stands there. A `set` returns before, and who then looks may not see it."""
    root = _root(store)
    root.set(key, value)
    root.check([key])  # answered over the same connection, so after it


def _root(store: Any) -> Any:
    """The job's store without any prefix, where the launcher looks for keys."""
    return getattr(store, "_underlying_non_prefix_store", store)
