"""Pictures for the docs: the report's charts, drawn in a browser, for light pages and for dark."""

from __future__ import annotations

import json
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from report_open import browser

# The page's own has names in quotes, which would end an attribute of the SVG.
FONTS = "body { font-family: ui-sans-serif, -apple-system, Roboto, Arial, sans-serif }"


def draw(script: Path, stem: Path, size: tuple[int, int], **given: Any) -> None:
    """Write stem.svg and stem-dark.svg by `drawn(size)` of a script, which finds what is given."""
    with tempfile.TemporaryDirectory() as name:
        page = Path(name) / "page.html"
        page.write_text(_page(script, given), encoding="utf-8")
        with browser(Path(name) / "profile") as started:
            started.get(page.as_uri())
            for theme, ending in (("light", ".svg"), ("dark", "-dark.svg")):
                begin = f"document.documentElement.dataset.theme = '{theme}';"
                text = started.execute_script(f"{begin} return drawn(arguments[0])", size)
                file = stem.with_name(stem.name + ending)
                file.write_text(text + "\n", encoding="utf-8")
                print(f"drawn: {file}")


def _page(script: Path, given: dict[str, Any]) -> str:
    part = {
        name: (files("offbeat.report") / name).read_text(encoding="utf-8")
        for name in ("page/style.css", "page/look.js", "page/charts.js", "vendor/echarts.min.js")
    }
    constants = "".join(f"const {name} = {json.dumps(value)};" for name, value in given.items())
    drawing = script.read_text(encoding="utf-8")
    charts = (part["page/look.js"], part["page/charts.js"])
    scripts = (part["vendor/echarts.min.js"], constants, *charts, drawing)
    style = part["page/style.css"] + FONTS
    return f"<!doctype html><meta charset='utf-8'><style>{style}</style><body>" + "".join(
        f"<script>{each}</script>" for each in scripts
    )
