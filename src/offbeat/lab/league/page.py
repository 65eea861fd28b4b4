"""The league as one HTML file that needs nothing else, with the parts of the report's page.

Tables are there without any script; filters, sorting and charts come with it.
"""

from __future__ import annotations

import html
import math
from pathlib import Path
from typing import Any

from offbeat.lab.families import FAMILIES, OTHER
from offbeat.lab.league.figures import NEAR, Entry, Figures, Overall
from offbeat.lab.league.load import Cell, League
from offbeat.lab.league.words import bytes_of, facts, sentences, span
from offbeat.report.files import WholeFile
from offbeat.report.pieces import breakable, whole
from offbeat.report.spread import Interval

_RACE_COLUMNS = (
    *("rank", "algorithm", "virtual s", "speed-up", "samples a second"),
    *("samples needed", "sent a step", "stale", "waited", "dropped", "reached"),
)
_OVERALL_COLUMNS = ("algorithm", "family", "races", "first", "near", "never", "behind", "worst")
_PROFILE_TO = 8.0
_PROFILE_STEPS = 121


def write(league: League, found: Figures, path: str | Path) -> None:
    """Write the page; raises ReportError if that cannot be done, and then leaves no file."""
    with WholeFile(path) as file:
        file.write(page(league, found))


def page(league: League, found: Figures) -> str:
    """Return the whole page."""
    rankings, over_all = found.rankings, found.overall
    return whole(
        "league.html",
        title="League",
        facts=facts(league),
        verdicts=sentences(league, over_all),
        source="the results of campaigns",
        styles=("league.css",),
        scripts=("look.js", "shared.js", "league.js"),
        data=_data(league, rankings, over_all),
        families=_families(over_all),
        tasks=_options("task", [cell.task for cell in league.cells]),
        clusters=_options("cluster", [cell.cluster for cell in league.cells]),
        overall=_overall(over_all),
        side_by_side=_side_by_side(league, rankings),
        races="".join(map(_race, league.cells, rankings)),
        waiting=_waiting(league),
    )


# --- what can be chosen ----------------------------------------------------------------------


def _present(over_all: list[Overall]) -> list[str]:
    there = {each.family for each in over_all}
    return [name for name in [*FAMILIES, OTHER] if name in there]


def _families(over_all: list[Overall]) -> str:
    return "".join(
        f'<li><button type="button" aria-pressed="true" data-family="{html.escape(name)}">'
        f'<i class="swatch" data-colour="{html.escape(name)}"></i>{html.escape(name)}</button></li>'
        for name in _present(over_all)
    )


def _options(name: str, values: list[str]) -> str:
    shown = "".join(f"<option>{html.escape(each)}</option>" for each in dict.fromkeys(values))
    return f'<option value="">every {name}</option>{shown}'


# --- tables ----------------------------------------------------------------------------------


def _head(columns: tuple[str, ...], about: dict[str, str]) -> str:
    cells = "".join(
        f'<th scope="col" aria-sort="none" title="{html.escape(about.get(name, ""))}">'
        f'<button type="button" class="sort">{html.escape(name)}</button></th>'
        for name in columns
    )
    return f"<thead><tr>{cells}</tr></thead>"


def _name(label: str, family: str) -> str:
    swatch = f'<i class="swatch" data-colour="{html.escape(family)}"></i>'
    return f"{swatch}{breakable(html.escape(label))}"


def _cell(text: str, value: float, kind: str = "") -> str:
    """A cell that is sorted by a number, whatever it says."""
    order = "" if math.isinf(value) or math.isnan(value) else f"{value:.6g}"
    return f'<td data-value="{order}"{f" class={kind}" if kind else ""}>{text}</td>'


def _overall(over_all: list[Overall]) -> str:
    body = ""
    for each in over_all:
        family, worst = html.escape(each.family), max(each.behind)
        body += f'<tr data-family="{family}"><th scope="row">{_name(each.label, each.family)}</th>'
        body += f'<td class="word">{family}</td>' + _cell(str(each.races), each.races)
        body += _cell(str(each.first), each.first) + _cell(str(each.near), each.near)
        body += _cell(str(each.never), each.never)
        body += _cell(_times(each.median_behind), each.median_behind)
        body += _cell(_times(worst), worst) + "</tr>"
    about = {
        "first": "races in which it is the fastest, or as fast within the spread",
        "near": f"races in which it needs at most {NEAR:g} times the seconds of the best",
        "never": "races in which most of its seeds do not come to the target",
        "behind": "its seconds over those of the best, in the median over its races",
        "worst": "the same in its worst race",
    }
    return f"{_head(_OVERALL_COLUMNS, about)}<tbody>{body}</tbody>"


def _side_by_side(league: League, rankings: list[list[Entry]]) -> str:
    """Rows are races, columns families; in each, the speed-up of the family's best."""
    there = {entry.family for ranking in rankings for entry in ranking}
    families = [name for name in [*FAMILIES, OTHER] if name in there]
    body = ""
    for cell, ranking in zip(league.cells, rankings, strict=True):
        body += f'<tr {_where(cell)}><th scope="row">{html.escape(cell.name)}</th>'
        for name in families:
            own = [entry for entry in ranking if entry.family == name and entry.speed_up]
            best = max(own, key=lambda entry: _middle(entry.speed_up), default=None)
            body += _heat(best)
        body += "</tr>"
    return f"{_head(('race', *families), {})}<tbody>{body}</tbody>"


def _heat(best: Entry | None) -> str:
    if best is None:
        return '<td data-value="" class="none">–</td>'
    middle = _middle(best.speed_up)
    share = max(-1.0, min(1.0, math.log2(middle) / 2)) if middle > 0 else -1.0
    text = f"<b>{span(best.speed_up)}</b><small>{html.escape(best.label)}</small>"
    side = "more" if share >= 0 else "less"
    return f'<td data-value="{middle:.6g}" class="{side}" style="--by:{abs(share):.2f}">{text}</td>'


def _middle(found: Interval | None) -> float:
    return 0.0 if found is None else found.median


def _race(cell: Cell, ranking: list[Entry]) -> str:
    body = "".join(map(_row, ranking))
    short = cell.planned - cell.runs
    words = f"{short} of {cell.planned} runs are missing: it does not count above"
    missing = f' <span class="short">{words}</span>'
    about = f"target {html.escape(cell.target)}, {cell.workers} workers{missing if short else ''}"
    return (
        f'<section class="race" {_where(cell)}><div class="head"><h2>{html.escape(cell.name)}</h2>'
        f'<p class="facts">{about}</p></div>'
        f'<div class="scroll"><table>{_head(_RACE_COLUMNS, _ABOUT)}<tbody>{body}</tbody></table>'
        f"</div><details><summary>cluster file</summary><pre>{html.escape(cell.cluster_file)}</pre>"
        "</details></section>"
    )


_ABOUT = {
    "rank": "from how many are surely faster, to how many surely slower",
    "virtual s": "to the target: median over seeds, and its bootstrap interval of 95 %",
    "speed-up": "over synchronous SGD, seed by seed",
    "samples a second": "over those of synchronous SGD",
    "samples needed": "how many times fewer than synchronous SGD",
    "sent a step": "bytes that a worker sends for each of its steps",
    "stale": "rounds, in the mean over gradients",
    "waited": "share of the workers' time",
    "dropped": "share of the samples",
    "reached": "seeds that came to the target",
}


def _row(each: Entry) -> str:
    low, high = each.rank
    rank = f"{low}" if low == high else f"{low}–{high}"
    tuned = html.escape(each.settings) + (f" ({html.escape(each.edge)}?)" if each.edge else "")
    first = ' class="best"' if low == 1 and each.reached else ""
    stale, waited = each.staleness_rounds, each.waited
    return (
        f'<tr data-family="{html.escape(each.family)}"{first}>{_cell(rank, low + high / 1000)}'
        f'<th scope="row">{_name(each.label, each.family)}<small>{tuned}</small></th>'
        + _cell(_seconds(each.seconds), each.seconds.median)
        + _ratio(each.speed_up)
        + _ratio(each.throughput)
        + _ratio(each.efficiency)
        + _cell(bytes_of(each.sent_bytes), each.sent_bytes or 0.0)
        + _cell("–" if stale is None else f"{stale:.1f}", stale or 0.0)
        + _cell("–" if waited is None else f"{waited:.0%}", waited or 0.0)
        + _cell(f"{each.dropped:.0%}", each.dropped)
        + _cell(f"{each.reached}/{each.seeds}", each.reached)
        + "</tr>"
    )


def _seconds(found: Interval) -> str:
    if math.isinf(found.median):
        return "never"
    high = "never" if math.isinf(found.high) else f"{found.high:.1f}"
    return f"{found.median:.1f} <small>{found.low:.1f} to {high}</small>"


def _ratio(found: Interval | None) -> str:
    if found is None:
        return _cell("–", math.inf)
    if found.median == 0:
        return _cell("never", -1.0)
    return _cell(f"{found.median:.2f} <small>{span(found, False)}</small>", found.median)


def _times(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.2f} ×"


def _where(cell: Cell) -> str:
    return f'data-task="{html.escape(cell.task)}" data-cluster="{html.escape(cell.cluster)}"'


def _waiting(league: League) -> str:
    if not league.waiting:
        return ""
    items = "".join(f"<li>{html.escape(name)}</li>" for name in league.waiting)
    return (
        "<section><h2>Not run yet</h2><p class='note'>The campaign asks for these races as well; "
        f"there is no result of them.</p><ul class='waiting'>{items}</ul></section>"
    )


# --- data of the charts ----------------------------------------------------------------------


def _data(league: League, rankings: list[list[Entry]], over_all: list[Overall]) -> dict[str, Any]:
    return {
        "families": _present(over_all),
        "profileTo": _PROFILE_TO,
        "labels": [{"name": each.label, "family": each.family} for each in over_all],
        "races": [
            {
                "task": cell.task,
                "cluster": cell.cluster,
                "whole": cell.whole,
                "entries": [_point(entry) for entry in ranking],
            }
            for cell, ranking in zip(league.cells, rankings, strict=True)
        ],
    }


def _point(entry: Entry) -> dict[str, Any]:
    return {
        "label": entry.label,
        "family": entry.family,
        "behind": None if math.isinf(entry.behind) else round(entry.behind, 5),
        "throughput": _known(entry.throughput),
        "efficiency": _known(entry.efficiency),
    }


def _known(found: Interval | None) -> float | None:
    if found is None or not 0 < found.median < math.inf:
        return None
    return round(found.median, 5)
