"""Who takes part in a race: algorithms by name, with settings, from the command line.

    sync    eager:quorum=majority,late=drop    msync:m=0.75    ddp

A name is that of the algorithm's file in `offbeat.algorithms`, its settings are the fields of its
dataclass. `ddp` is torch's DistributedDataParallel on real processes; in virtual time, where that
cannot run, it is its equal `SyncSGD`.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import offbeat.algorithms
from offbeat.algorithm import Algorithm
from offbeat.algorithms import SyncSGD

DDP = "ddp"
_SIZES = {"msync": {"m": 0.75}}
"""Where an algorithm has no size of its own, and a search for one has to begin."""
DEFAULT = (
    "sync",
    "eager",
    "eager:quorum=solo",
    "eager:quorum=majority",
    "msync:m=0.75",
    "abs:trigger=back_to_back",
    "waitfree",
    "nonblocking:micro_batches=2",
    "dropcompute:micro_batches=2,window_rounds=10",
)


@dataclass(frozen=True)
class Contestant:
    """An algorithm, and what the command line calls it."""

    label: str
    algorithm: Algorithm
    settings: dict[str, Any] = field(default_factory=dict)
    """What was given; the rest is as the algorithm has it."""
    rate: float = 1.0
    """The factor of the task's own learning rate that it races with."""
    tuned: dict[str, Any] = field(default_factory=dict)
    """Its size, if that was not given: see sizes.py."""
    edge: str = ""
    """What was not tried beside these two, if the best is at the edge of what was."""

    @property
    def name(self) -> str:
        """Of the algorithm, without settings."""
        return self.label.partition(":")[0]

    @property
    def is_ddp(self) -> bool:
        """Whether real processes run DistributedDataParallel itself."""
        return self.label == DDP


def told(contestant: Contestant) -> str:
    """What it races with, in words: `lr ×2, steps=8`."""
    sizes = [f"{name}={shown(value)}" for name, value in contestant.tuned.items()]
    return ", ".join([f"lr ×{contestant.rate:.3g}", *sizes])


def shown(value: Any) -> str:
    """A setting's value as it is written on the command line."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def algorithms() -> dict[str, type[Algorithm]]:
    """Return every algorithm by the name of its file."""
    public = [getattr(offbeat.algorithms, name) for name in offbeat.algorithms.__all__]
    return {
        each.__module__.rpartition(".")[2]: each
        for each in public
        if isinstance(each, type) and issubclass(each, Algorithm)
    }


def default(world: Literal["virtual", "real"]) -> list[Contestant]:
    """Return those that race where nobody is named."""
    return [parse(spec) for spec in ([DDP, *DEFAULT] if world == "real" else DEFAULT)]


def parse(spec: str) -> Contestant:
    """Read a name with settings; ValueError with the nearest match for what does not exist."""
    name, _, rest = spec.partition(":")
    if name == DDP:
        if rest:
            raise ValueError(f"{spec}: {DDP} has no settings")
        return Contestant(DDP, SyncSGD())
    known = algorithms()
    if name not in known:
        raise ValueError(
            f"no algorithm is called {name!r}{_nearest(name, [*known, DDP])}\n"
            f"There are {', '.join([*known, DDP])}"
        )
    settings = _settings(spec, known[name], rest)
    begun = {key: value for key, value in _SIZES.get(name, {}).items() if key not in settings}
    try:
        return Contestant(spec, known[name](**settings, **begun), settings, tuned=begun)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{spec}: {error}") from None


def check(contestants: Sequence[Contestant], workers: int) -> None:
    """Raise ValueError where settings do not fit the cluster, or somebody races twice."""
    for number, contestant in enumerate(contestants):
        try:
            contestant.algorithm.check(workers)
        except ValueError as error:
            raise ValueError(f"{contestant.label}: {error}") from None
        if contestant.label in [other.label for other in contestants[:number]]:
            raise ValueError(f"{contestant.label} is named twice")


def _settings(spec: str, algorithm: type[Algorithm], text: str) -> dict[str, Any]:
    fields = {each.name: each for each in dataclasses.fields(algorithm) if each.init}  # type: ignore[arg-type]
    hints = get_type_hints(algorithm)
    settings: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise ValueError(f"{spec}: settings look like name=value, got {part!r}")
        try:
            algorithm.check_removed(key, value)
        except TypeError as error:
            raise ValueError(f"{spec}: {error}") from None
        if key not in fields:
            has = f"It has {', '.join(fields)}" if fields else "It has none"
            name = spec.partition(":")[0]
            raise ValueError(f"{name} has no setting {key!r}{_nearest(key, [*fields])}\n{has}")
        if key in settings:
            raise ValueError(f"{spec}: {key} is given twice")
        settings[key] = _value(spec, key, value, hints[key])
    for name, each in fields.items():
        bare = each.default is each.default_factory is dataclasses.MISSING
        if bare and name not in settings and name not in _SIZES.get(spec.partition(":")[0], {}):
            raise ValueError(
                f"{spec} needs a value for {name}: {spec}{',' if text else ':'}{name}=..."
            )
    return settings


def _value(spec: str, key: str, text: str, kind: Any) -> Any:
    """Read a value as the strictest of the types that the setting may have."""
    for read in _readers(kind):
        try:
            return read(text)
        except (KeyError, ValueError):
            continue
    raise ValueError(f"{spec}: {key} must be {_described(kind)}, got {text!r}")


def _readers(kind: Any) -> list[Callable[[str], Any]]:
    choices = _choices(kind)
    literals = {str(value): value for each in choices for value in get_args(each)}
    readers: list[Callable[[str], Any]] = [literals.__getitem__]
    if type(None) in choices:
        readers.append({"none": None}.__getitem__)
    if bool in choices:
        readers.append({"true": True, "false": False}.__getitem__)
    return [*readers, *(plain for plain in (int, float, str) if plain in choices)]


def _choices(kind: Any) -> list[Any]:
    return list(get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else [kind]


def _described(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
    parts: list[str] = []
    for each in _choices(kind):
        literals = [str(value) for value in get_args(each)]
        parts += literals or [words.get(each, "text")]
    return " or ".join(parts)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]!r}?" if near else ""
