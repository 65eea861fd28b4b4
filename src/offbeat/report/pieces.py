"""What goes into a page, whichever it is: its parts, its data, its scripts."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any


def part(name: str) -> str:
    """A file of page/ or vendor/."""
    return (files(__package__) / name).read_text(encoding="utf-8")


def as_json(data: dict[str, Any]) -> str:
    """As JSON in which nothing can end the script that holds it, or begin a comment."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def as_script(source: str) -> str:
    """As a script that nothing in it can end: in strings and patterns, <\\/ is </."""
    return re.sub(r"</(?=script)", r"<\\/", source, flags=re.IGNORECASE)


def scripts_of(*names: str) -> str:
    """Scripts of page/, one after the other."""
    return as_script("\n".join(part(f"page/{name}") for name in names))


def breakable(name: str) -> str:
    """A name that may be broken where its parts meet: a telephone is narrow."""
    return re.sub(r"([:=,])", r"\1<wbr>", name)
