"""A worker's checkpoint: what, with the model's and the optimizer's own, resumes it bit by bit."""

from __future__ import annotations

from typing import Any

from offbeat.algorithm import Algorithm
from offbeat.alike import generators, set_generators
from offbeat.apply import Applier
from offbeat.codecs import Codec
from offbeat.errors import DisagreementError
from offbeat.replica import Replica
from offbeat.worlds import World


def saved(
    algorithm: Algorithm, replica: Replica, applier: Applier, codec: Codec | None
) -> dict[str, Any]:
    """Come to the same round as all others, and return this worker's state there."""
    applier.apply(algorithm.rounds(replica, replica.settle()))
    state = {
        "algorithm": repr(algorithm),
        "codec": repr(codec),
        "world_size": replica.world.size,
        "rank": replica.world.rank,
        "replica": replica.state_dict(),
        "applied": applier.state_dict(),
        "generators": generators(),
    }
    replica.resume()
    return state


def load(
    state: dict[str, Any],
    algorithm: Algorithm,
    replica: Replica,
    applier: Applier,
    codec: Codec | None,
) -> None:
    """Go on from there."""
    world = replica.world
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
    set_generators(state["generators"])


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
