"""Finding out, before anyone waits, that workers were set up differently."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from offbeat.errors import DisagreementError, EpochOver
from offbeat.worlds.base import World
from offbeat.worlds.checked import first_difference

_latest: WeakKeyDictionary[World, str] = WeakKeyDictionary()
"""On the first worker: where each world has agreed last."""


def agree(world: World, name: str, mine: Mapping[str, Any]) -> int:
    """Raise `DisagreementError` on every worker if one describes itself differently from the first.

    Each compares itself with the first of the members, which gathers the verdicts and publishes
    the first difference: three messages a worker, and the same error everywhere. Returns who was
    the first, which is the same everywhere, too.
    """
    first, verdict = world.together(
        f"agree/{name}", lambda epoch: _compared(world, name, mine, epoch)
    )
    if verdict:
        raise DisagreementError(verdict)
    return first


def _compared(world: World, name: str, mine: Mapping[str, Any], epoch: int) -> tuple[int, str]:
    """With whom all have compared themselves, and what was found."""
    control, key = world.control_in_epoch(), f"agree/{name}"
    first, *others = members = world.members
    if world.epoch != epoch:
        raise EpochOver(world.loss)
    key = f"{key}/{epoch}" if epoch else key
    if world.rank == first:
        control.set(f"{key}/{first}", _told(mine))
        verdicts = [control.get(f"{key}/{rank}").decode() for rank in others]
        control.set(f"{key}/verdict", next(filter(None, verdicts), "").encode())
        if before := _latest.get(world):  # all have passed that, to come here
            for part in (*members, "verdict"):
                control.delete(f"{before}/{part}")
        _latest[world] = key
    else:
        theirs, ours = control.get(f"{key}/{first}"), _told(mine)
        two = first, world.rank
        difference = ""
        if theirs != ours:
            difference = _difference(json.loads(theirs), json.loads(ours), *two)
        control.set(f"{key}/{world.rank}", difference.encode())
    return first, control.get(f"{key}/verdict").decode()


def _told(mine: Mapping[str, Any]) -> bytes:
    return json.dumps(mine).encode()


def _difference(theirs: Mapping[str, Any], mine: Mapping[str, Any], first: int, rank: int) -> str:
    if (found := first_difference(theirs, mine)) is None:
        return ""
    what, value, other = found
    return (
        f"workers disagree about {what}: worker {first} has {value}, worker {rank} has {other}. "
        "Every worker must attach the same model, optimizer, algorithm and settings"
    )
