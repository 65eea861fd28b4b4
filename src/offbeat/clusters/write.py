"""A cluster as TOML text, for people to read and for `Cluster.load` to read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from offbeat.clusters.model import Cluster

_DATA_OF_FILES = ("rows", "values")  # what a `path` in the file stood for


def to_toml(cluster: Cluster, comments: Sequence[str] = ()) -> str:
    """Write a cluster as text that stands alone and reads back as an equal cluster.

    What the cluster took from CSV files is written out, in place of their paths. `comments` are
    lines for people, put on top.
    """
    data = cluster.model_dump(by_alias=True, exclude_defaults=True, exclude_none=True)
    lines = [f"# {comment}".rstrip() for comment in comments]
    lines += ([""] if lines else []) + list(_table("", data))
    return "\n".join(lines) + "\n"


def _table(path: str, data: dict[str, Any]) -> Iterator[str]:
    """List the lines of a table: its own keys, then the tables in it."""
    if "path" in data and any(key in data for key in _DATA_OF_FILES):
        data = {key: value for key, value in data.items() if key not in ("path", "column")}
    inside = {key: value for key, value in data.items() if _holds_tables(value)}
    for key, value in data.items():
        if key not in inside:
            yield f"{key} = {_value(value)}"
    for key, value in inside.items():
        name = f"{path}.{key}" if path else key
        for table in [value] if isinstance(value, dict) else value:
            yield ""
            yield f"[{name}]" if isinstance(value, dict) else f"[[{name}]]"
            yield from _table(name, table)


def _holds_tables(value: Any) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)
    )


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # JSON's escapes are TOML's, except that TOML wants this one written as well.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case [[*_], *_]:
            return "[\n" + "".join(f"  {_value(row)},\n" for row in value) + "]"
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            raise TypeError(f"{type(value).__name__} has no place in a cluster file")
