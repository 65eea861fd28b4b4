"""What an algorithm is: settings, and what a worker does when a micro-batch is done.

`step` and `leave` are generators. `yield round` means *apply this round now*: when the generator
goes on, the parameters have been updated. A step that yields nothing leaves them as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import ClassVar, Literal, Self, TypeGuard, get_args, get_origin, get_type_hints

from torch.optim import Optimizer

from offbeat.replica import Replica
from offbeat.rounds import Round


def check_choice(name: str, value: object, known: Sequence[object]) -> None:
    """Raise ValueError unless a setting has one of the values that are known."""
    if value not in known or (isinstance(value, bool) and not isinstance(known[0], bool)):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether this is a whole number, and at least so much; True and False are no numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is a number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@cache
def _choices(settings: type) -> Mapping[str, tuple[object, ...]]:
    """The settings of a class that are declared as a Literal, and the values that each may have."""
    kinds = get_type_hints(settings)
    return {name: get_args(kind) for name, kind in kinds.items() if get_origin(kind) is Literal}


def check_grace(grace_s: float, quorum: str | int | float) -> None:
    """Raise ValueError unless a grace is a time, and there is somebody to be waited for."""
    if not 0 <= grace_s < float("inf"):
        raise ValueError(f"grace_s must be 0 or more seconds, got {grace_s}")
    if grace_s and quorum == "all":
        raise ValueError(f'grace_s is for a quorum below "all", got {grace_s}')


class Algorithm(ABC):
    """Settings of one method; frozen, and equal on all workers."""

    removed: ClassVar[Mapping[str, str]] = {}
    """Settings that there were once, `name` or `name=value`, and what to do without each."""
    identical: ClassVar[bool] = True
    """Whether replicas are the same to the bit at the end of the block."""

    def __new__(cls, *_: object, **settings: object) -> Self:
        for name, value in settings.items():
            cls.check_removed(name, value)
        return super().__new__(cls)

    @classmethod
    def check_removed(cls, name: str, value: object = None) -> None:
        """Raise TypeError if there is no such setting, or value of it, any more."""
        for setting in (name, f"{name}={value}"):
            if setting in cls.removed:
                raise TypeError(f"{cls.__name__} has no {setting} any more: {cls.removed[setting]}")

    def check(self, size: int) -> None:  # noqa: B027 - most settings fit any cluster
        """Raise ValueError if the settings do not fit a cluster of `size` workers."""

    def check_optimizer(self, optimizer: Optimizer) -> None:  # noqa: B027 - most take any
        """Raise ValueError if the method does not go with the optimizer's settings."""

    @property
    def survives(self) -> bool:
        """Whether the others can go on when a worker is lost: rounds can be made again."""
        return True

    @property
    def round_steps(self) -> int:
        """Steps of each worker in a round of this method's synchronous form."""
        return int(getattr(self, "micro_batches", 1))

    @abstractmethod
    def start(self, replica: Replica) -> None:
        """The worker has been attached: say when rounds start, and what they carry."""

    def reduces_next(self, replica: Replica) -> bool:
        """Say whether the backward pass at hand completes this worker's part of the round.

        If so, its buckets may be reduced while it runs.
        """
        return False

    def rounds(self, replica: Replica, rounds: Iterator[Round]) -> Iterator[Round]:
        """Pass on the rounds that this worker comes to know of, in order, adjusted if need be.

        Every round goes through here once, on every worker: those of a step, of leaving, and of
        the pause for a checkpoint.
        """
        return rounds

    def check_choices(self) -> None:
        """Raise ValueError if a setting that is declared as a Literal has another value."""
        for name, known in _choices(type(self)).items():
            check_choice(name, getattr(self, name), known)

    def check_counts(self, *names: str) -> None:
        """Raise ValueError if one of these settings is no whole number above 0."""
        for name in names:
            value = getattr(self, name)
            if not is_count(value):
                raise ValueError(f"{name} must be a whole number above 0, got {value!r}")

    def check_switches(self, *names: str) -> None:
        """Raise ValueError if one of these settings is neither True nor False."""
        for name in names:
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")

    @abstractmethod
    def step(self, replica: Replica) -> Iterator[Round]:
        """One micro-batch is done; its gradients are in `.grad`."""

    def leave(self, replica: Replica) -> Iterator[Round]:
        """This worker has left its loop: serve the others until all have left theirs."""
        yield from self.rounds(replica, replica.serve())
