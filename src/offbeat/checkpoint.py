"""A worker's checkpoint: what, with the model's and the optimizer's own, resumes it bit by bit."""

from __future__ import annotations

import logging
from typing import Any

from offbeat.algorithm import Algorithm
from offbeat.alike import generators, set_generators
from offbeat.apply import Applier
from offbeat.codecs import Codec, Coder
from offbeat.errors import DisagreementError
from offbeat.replica import Replica
from offbeat.worlds import World

logger = logging.getLogger("offbeat")


def saved(
    algorithm: Algorithm, replica: Replica, applier: Applier, codec: Codec | None
) -> dict[str, Any]:
    """Come to the same round as all others, and return this worker's state there."""
    settle(algorithm, replica, applier, "dp.state_dict()")
    applier.go_on()  # as after loading
    state = {
        "algorithm": repr(algorithm),
        "codec": repr(codec),
        "world_size": replica.world.size,
        "rank": replica.world.rank,
        "replica": replica.state_dict(),
        "applied": applier.state_dict(),
        "generators": generators(),
    }
    state["members"] = list(replica.resume())
    return state


def settle(algorithm: Algorithm, replica: Replica, applier: Applier, where: str) -> None:
    """Come to the same round as all others, who are at `where`, too; `replica.resume` follows."""
    applier.apply(algorithm.rounds(replica, replica.settle(where)))


def missed(replica: Replica) -> dict[str, Any]:
    """What a worker saves that was silent while the others have saved theirs, and is back.

    It is further than they were, and so are its model and its optimizer: nothing to go on from.
    """
    world = replica.world
    logger.warning(
        "worker %d has joined the others again in dp.state_dict(), which they have made without "
        "it: what it saves now is of round %d, and not theirs. To resume from theirs, load the "
        "state of another worker here",
        *(world.rank, replica.round),
    )
    return {"rank": world.rank, "world_size": world.size, "missed": replica.round}


def load(
    state: dict[str, Any],
    algorithm: Algorithm,
    replica: Replica,
    applier: Applier,
    codec: Codec | None,
) -> None:
    """Go on from there; a worker that had been lost then, with the state of another one."""
    world = replica.world
    if "missed" in state:
        raise ValueError(
            f"worker {state['rank']} was silent when the others saved this checkpoint, and joined "
            f"them again at round {state['missed']}, which is not theirs: on worker {world.rank} "
            "load the state of another one, with its model and its optimizer"
        )
    lost = world.rank not in state.get("members", world.members)
    if lost:
        state = _of_lost(state, world.rank)
    for what, mine in (
        ("algorithm", repr(algorithm)),
        ("codec", repr(codec)),
        ("world_size", world.size),
        ("rank", world.rank),
    ):
        if state[what] != mine:
            raise ValueError(
                f"this state was saved with {what} {state[what]}, but here it is {mine}: "
                "resume with the same set-up, each worker from its own state"
            )
    _check_round(world, f"{replica.name}/loaded/{replica.loads}", state["replica"]["round"])
    replica.load_state_dict(state["replica"])
    applier.load_state_dict(state["applied"])
    applier.go_on()
    if not lost:
        set_generators(state["generators"])


def _of_lost(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """What a worker goes on with that was lost when others saved this: nothing of theirs alone."""
    if state["replica"]["shift"] is not None:
        raise ValueError(
            f"worker {rank} was lost when this state was saved, and with {state['algorithm']} each "
            "worker's model is its own: load the model alone, and attach anew on every worker"
        )
    rounds = state["replica"]["rounds"]
    nothing: dict[str, Any] = {"samples": 0.0, "micro_batches": 0, "oldest_round": None}
    nothing |= {"used": [False] * len(rounds["pile"]["used"]), "unit": 1.0, "flats": []}
    nothing |= {"known_samples": 0.0}
    pile = {**rounds["pile"], **nothing, "bad_parameter": None, "unseen": False}
    rounds = {**rounds, "pile": pile, "behind": 0, "made": 0}
    replica = {**state["replica"], "rounds": rounds}
    if replica["codec"] is not None:
        replica["codec"] = Coder.of_all(replica["codec"])
    return {**state, "rank": rank, "replica": replica}


def _check_round(world: World, key: str, round: int) -> None:
    """Raise if the first worker that loads has a state of another round; wait for nobody else."""
    if world.control.add(key, 1) == 1:
        world.control.set(f"{key}/first", f"{world.rank} {round}".encode())
        return
    first, its_round = map(int, world.control.get(f"{key}/first").decode().split())
    if round != its_round:
        raise DisagreementError(
            f"the state of worker {first} is of round {its_round}, that of worker {world.rank} of "
            f"round {round}: resume each worker from its state of one and the same moment"
        )
