"""The report as one HTML file that needs nothing else: no network, no server, no other file.

The page's own parts are in page/, the library that draws its charts is in vendor/. Data goes in as
JSON; the many numbers of the timelines as deflated columns, unpacked when a run is looked at.
"""

from __future__ import annotations

import html
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offbeat.report.columns import packed
from offbeat.report.curves import curve
from offbeat.report.files import WholeFile
from offbeat.report.pieces import breakable, filled, whole
from offbeat.report.runs import Run, Runs, edges
from offbeat.report.spans import STATES, seconds_by_state, spans
from offbeat.report.summary import all_plain, cells, headings, rows, seconds_of

CHARTS = ("look.js", "shared.js", "timeline.js", "charts.js", "runs.js")
"""Scripts of page/ that draw what `data` gives, on any page that has places for it."""

_NOTE = (
    "A target is reached where the learning curve, smoothed over a fixed number of samples, "
    "comes to it and is confirmed by the window after it. Times are medians over the seeds; a "
    "seed that never got there counts as infinitely long. Speed-up is over the synchronous "
    "algorithm on the same cluster, seed by seed: the samples a second times the samples "
    "needed, each as so many times the better, and a median of its own. In brackets: bootstrap "
    "intervals of 95 %; with fewer than 5 seeds, hardly more than the seeds themselves. Waited is "
    "the sum over all workers. The final accuracy or loss is that of one evaluation, where a run "
    "ended, which may be soon after the target; the mean over the seeds. lr is the factor of the "
    "task's learning rate, and what follows the algorithm's name its size, that suited it best of "
    "those that were tried."
)
_PLAIN_NOTE = (
    "Utilisation is the share of their time in which workers compute. Waited is the sum over all "
    "of them. Staleness is in rounds. To compare methods, let them race: offbeat race."
)


def write(runs: Runs, path: str | Path) -> None:
    """Write the page; raises ReportError if that cannot be done, and then leaves no file."""
    text = page(runs)
    with WholeFile(path) as file:
        file.write(text)


def page(runs: Runs) -> str:
    """Return the whole page."""
    return whole(
        "page.html",
        title=_title(runs),
        facts=_facts(runs),
        verdicts=runs.verdicts,
        source="its records",
        styles=(),
        scripts=(*CHARTS, "page.js"),
        data=data(runs),
        comparison="In short" if (plain := all_plain(rows(runs))) else "Comparison",
        table=_table(runs),
        note=" ".join([_PLAIN_NOTE if plain else _NOTE, *map(html.escape, edges(runs))]),
        failures=failures(runs),
        timeline=timeline(runs),
        details=details(runs),
    )


def framed(runs: Runs) -> str:
    """Return the page in a frame of its own, to be shown inside another page or a notebook."""
    style = "width: 100%; height: 900px; border: 0"
    return f'<iframe style="{style}" srcdoc="{html.escape(page(runs))}"></iframe>'


# --- text ----------------------------------------------------------------------------------------


def _title(runs: Runs) -> str:
    tasks = _each(run.about.task for run in runs)
    clusters = _each(run.about.cluster for run in runs)
    if not clusters:
        return ", ".join(_each(run.about.label for run in runs))
    return f"{', '.join(tasks) or 'training'} on {', '.join(clusters)}"


def _facts(runs: Runs) -> list[str]:
    algorithms = len(_each(run.about.algorithm for run in runs))
    workers = " or ".join(_each(str(run.workers) for run in runs))
    return [
        *([_count(algorithms, "algorithm")] if algorithms else []),
        f"{workers} worker{'' if workers == '1' else 's'}",
        *([_count(len(seeds), "seed")] if (seeds := _seeds(runs)) else []),
        *(f"{world} time" for world in _each(run.about.world for run in runs)),
        *(f"target {target}" for target in _each(run.about.target or "" for run in runs)),
    ]


def _table(runs: Runs) -> str:
    compared = rows(runs)
    known = [row.seconds_to_target for row in compared if row.seconds_to_target is not None]
    texts = (html.escape(text).replace("virtual s", "virtual&nbsp;s") for text in headings(runs))
    head = "".join(f'<th scope="col">{text}</th>' for text in texts)
    body = ""
    for number, row in enumerate(compared):
        name, *values = (html.escape(text) for text in cells(row, all_plain(compared)))
        best = ' class="best"' if len(known) > 1 and row.seconds_to_target == min(known) else ""
        swatch = f'<i class="swatch" data-group="{number}"></i>'
        body += f'<tr{best}><th scope="row">{swatch}{breakable(name)}</th>'
        body += "".join(f"<td>{value}</td>" for value in values) + "</tr>"
    return f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"


def timeline(runs: Runs) -> str:
    """The timeline of a run, and the runs that it can be of."""
    names = (html.escape(run.name) for run in runs)
    options = (f'<option value="{number}">{name}</option>' for number, name in enumerate(names))
    return filled("page/timeline.html", options="".join(options))


def failures(runs: Runs) -> str:
    """The runs that failed, and why."""
    return "".join(
        f"<details><summary><b>{html.escape(run.name)} failed</b> {html.escape(run.failure)}"
        f"</summary><pre>{html.escape(run.error)}</pre></details>"
        for run in runs
        if run.error is not None
    )


def details(runs: Runs) -> str:
    """How to run it again."""
    seeds = _seeds(runs)
    written = _each(run.about.offbeat for run in runs)
    parts = [
        (
            "Command",
            [
                f"<pre>{html.escape(text)}</pre>"
                for text in _each(run.about.command for run in runs)
            ],
        ),
        ("Seeds", [html.escape(", ".join(seeds))] if seeds else []),
        (
            "Algorithms",
            [
                f"<p><b>{html.escape(name)}</b><br><code>{html.escape(algorithm)}</code></p>"
                for name, group in runs.groups().items()
                if (algorithm := group[0].about.algorithm)
            ],
        ),
        (
            "Cluster file",
            [
                f"<p><b>{html.escape(name)}</b></p><pre>{html.escape(text)}</pre>"
                for name, text in {
                    run.about.cluster: run.about.cluster_file for run in runs
                }.items()
                if text
            ],
        ),
        ("Recorded by", [html.escape(f"offbeat {', '.join(written)}")] if written else []),
    ]
    shown = "".join(f"<dt>{name}</dt><dd>{''.join(texts)}</dd>" for name, texts in parts if texts)
    return shown or "<dt>Recorded by</dt><dd>workers that did not say what they ran</dd>"


def _seeds(runs: Runs) -> list[str]:
    return _each("" if run.about.seed is None else str(run.about.seed) for run in runs)


def _each(texts: Iterable[str]) -> list[str]:
    """Every text once, in order, without those that say nothing."""
    return [text for text in dict.fromkeys(texts) if text]


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


# --- data ----------------------------------------------------------------------------------------


def data(runs: Runs) -> dict[str, Any]:
    """What the charts are drawn from."""
    found = {id(run): spans(run) for run in runs}
    return {
        "seconds": seconds_of(runs),
        "states": STATES,
        "target": _target(runs),
        "groups": [
            {
                "name": name,
                "synchronous": group[0].synchronous,
                "curves": {
                    f"{value}-{against}": [list(map(_short, column)) for column in drawn]
                    for value in ("accuracy", "loss")
                    for against in ("at_s", "samples")
                    if (drawn := curve(group, value, against)).x
                },
                "shares": _shares([seconds_by_state(found[id(run)]) for run in group]),
                "staleness": _staleness(group),
            }
            for name, group in runs.groups().items()
        ],
        "runs": [
            {
                "name": run.name,
                "workers": run.workers,
                "seconds": run.seconds,
                "utilization": {
                    rank: _short(totals.utilization) for rank, totals in run.totals.items()
                },
                "losses": [
                    {"at_s": _short(each.at_s), "words": each.sentence} for each in run.losses
                ],
                **packed(run, found[id(run)]),
            }
            for run in runs
        ],
    }


def _target(runs: Runs) -> dict[str, float]:
    """The targets that can be drawn as a line, by what they are of."""
    texts = _each(run.about.target or "" for run in runs)
    matches = (re.fullmatch(r"(accuracy|loss)=([\d.]+)", text) for text in texts)
    return {match[1]: float(match[2]) for match in matches if match}


def _shares(by_run: list[list[float]]) -> list[float]:
    """The share of the workers' time in every state, over all seeds."""
    sums = [sum(column) for column in zip(*by_run, strict=True)]
    return [_short(each / total) for each in sums] if (total := sum(sums)) else sums


def _staleness(group: list[Run]) -> dict[int, float]:
    """The share of the rounds, by staleness; the mean over the seeds."""
    counts = [Counter(line.staleness_rounds for line in run.distinct_rounds) for run in group]
    counts = [count for count in counts if count]
    return {
        rounds: _short(statistics.fmean(count[rounds] / count.total() for count in counts))
        for rounds in sorted(set().union(*counts))
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")
