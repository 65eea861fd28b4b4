"""What goes into a page, whichever it is: its parts, its data, its scripts."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from importlib.resources import files
from string import Template
from typing import Any


def whole(
    main: str,
    *,
    title: str,
    facts: Iterable[str],
    verdicts: Iterable[str],
    source: str,
    styles: Iterable[str],
    scripts: Iterable[str],
    data: dict[str, Any],
    **places: str,
) -> str:
    """A page that needs nothing else: `main`, a file of page/ with its places filled, in the frame.

    `places` are HTML; all other texts are not.
    """
    return filled(
        "page/frame.html",
        main=filled(f"page/{main}", **places),
        title=html.escape(title),
        facts=" · ".join(map(html.escape, facts)),
        verdicts="".join(f"<p>{html.escape(text)}</p>" for text in verdicts),
        source=source,
        style="".join(part(f"page/{name}") for name in ("style.css", *styles)),
        data=as_json(data),
        library=as_script(part("vendor/echarts.min.js")),
        scripts=as_script("\n".join(part(f"page/{name}") for name in scripts)),
    )


def filled(name: str, **places: str) -> str:
    """A file of page/ with its places filled."""
    return Template(part(name)).substitute(places)


def part(name: str) -> str:
    """A file of page/ or vendor/."""
    return (files(__package__) / name).read_text(encoding="utf-8")


def as_json(data: dict[str, Any]) -> str:
    """As JSON in which nothing can end the script that holds it, or begin a comment."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def as_script(source: str) -> str:
    """As a script that nothing in it can end: in strings and patterns, <\\/ is </."""
    return re.sub(r"</(?=script)", r"<\\/", source, flags=re.IGNORECASE)


def breakable(name: str) -> str:
    """A name that may be broken where its parts meet: a telephone is narrow."""
    return re.sub(r"([:=,])", r"\1<wbr>", name)
