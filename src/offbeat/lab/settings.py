"""Settings on the command line: the fields of a dataclass, as `name=value,name=value`."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, Union, get_args, get_origin, get_type_hints


def parsed(
    spec: str,
    kind: type,
    text: str,
    begun: Collection[str] = (),
    check: Callable[[str, str], None] = lambda key, value: None,
) -> dict[str, Any]:
    """Read the settings of `kind` that stand in `text`, which is the end of `spec`.

    ValueError, with the nearest match, for what does not exist. `begun` are those that need not be
    given though they have no default; `check` raises TypeError for those that there are no more.
    """
    fields, hints = _fields(kind), get_type_hints(kind)
    settings: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise ValueError(f"{spec}: settings look like name=value, got {part!r}")
        try:
            check(key, value)
        except TypeError as error:
            raise ValueError(f"{spec}: {error}") from None
        if key not in fields:
            has = f"It has {', '.join(fields)}" if fields else "It has none"
            name = spec.partition(":")[0]
            raise ValueError(f"{name} has no setting {key!r}{nearest(key, [*fields])}\n{has}")
        if key in settings:
            raise ValueError(f"{spec}: {key} is given twice")
        settings[key] = _value(spec, key, value, hints[key])
    for name, each in fields.items():
        bare = each.default is each.default_factory is dataclasses.MISSING
        if bare and name not in settings and name not in begun:
            raise ValueError(
                f"{spec} needs a value for {name}: {spec}{',' if text else ':'}{name}=..."
            )
    return settings


def nearest(name: str, known: Sequence[str]) -> str:
    """Ask for what was meant, if something is called nearly so."""
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """Those that can be written as text, by name."""
    if not dataclasses.is_dataclass(kind):
        return {}
    hints = get_type_hints(kind)
    return {
        each.name: each
        for each in dataclasses.fields(kind)
        if each.init and not any(map(dataclasses.is_dataclass, _choices(hints[each.name])))
    }


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
