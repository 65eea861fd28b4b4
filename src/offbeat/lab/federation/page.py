"""A comparison as one HTML file that needs nothing else, with the charts of the report's page.

Table and accuracy matrices are there without any script.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from offbeat import report as reports
from offbeat.lab.federation.results import Result
from offbeat.lab.federation.summary import Row, cells, headings, rows, sentence
from offbeat.records import Line
from offbeat.report.html import CHARTS, data, details, failures, timeline
from offbeat.report.pieces import breakable, whole

if TYPE_CHECKING:
    from offbeat.lab.federation.comparison import Comparison


def page(comparison: Comparison, lines: Sequence[Line]) -> str:
    """Return the whole page, from the lines of all runs."""
    results = [Result.read(line) for line in lines if line["kind"] == "result"]
    runs, compared = reports.measured(lines), rows(results)
    return whole(
        "federated.html",
        title=_title(comparison),
        facts=_facts(comparison),
        verdicts=[sentence(compared, len(comparison.seeds))],
        source="its results",
        styles=("federated.css",),
        scripts=(*CHARTS, "federated.js"),
        data=data(runs) | _own_data(results, compared),
        table=_table(compared, comparison),
        failures=failures(runs),
        matrices="".join(map(_matrix, range(len(compared)), compared)),
        seeds=_seeds(results),
        timeline=timeline(runs),
        details=details(runs),
    )


def _title(comparison: Comparison) -> str:
    return f"Forgetting: {comparison.task.name} in {_count(comparison.tasks, 'task')}"


def _facts(comparison: Comparison) -> list[str]:
    settings = comparison.settings
    return [
        _count(len(comparison.entrants), "method"),
        _count(comparison.clients, "client"),
        f"Dirichlet({comparison.beta:g})",
        f"{_count(settings.rounds, 'round')} of {_count(settings.epochs, 'epoch')} a task",
        f"{_count(comparison.budget, 'sample')} of a task kept",
        _count(len(comparison.seeds), "seed"),
        f"{comparison.world} time",
    ]


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _table(compared: list[Row], comparison: Comparison) -> str:
    names = headings(comparison.tasks, comparison.unit)
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in names)
    body = ""
    for number, row in enumerate(compared):
        name, *values = (html.escape(text) for text in cells(row, comparison.tasks))
        body += f'<tr><th scope="row">{_swatch(number)}{breakable(name)}</th>'
        body += "".join(f"<td>{value}</td>" for value in values) + "</tr>"
    return f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"


def _swatch(number: int) -> str:
    return f'<i class="swatch" data-group="{number}"></i>'


def _matrix(number: int, row: Row) -> str:
    """Rows: after which task. Columns: of which task. Darker is better."""
    caption = f"<figcaption>{_swatch(number)}{html.escape(row.label)}</figcaption>"
    if not row.matrix:
        return f'<figure>{caption}<p class="empty">failed</p></figure>'
    tasks = range(1, len(row.matrix) + 1)
    head = "".join(f'<th scope="col">{task}</th>' for task in tasks)
    body = ""
    for after, values in zip(tasks, row.matrix, strict=True):
        known = "".join(_heat(value) for value in values)
        body += f'<tr><th scope="row">after {after}</th>{known}'
        body += '<td class="none"></td>' * (len(tasks) - len(values)) + "</tr>"
    head = f'<thead><tr><th scope="col"><span class="corner">of task</span></th>{head}</tr></thead>'
    return f'<figure>{caption}<table class="matrix">{head}<tbody>{body}</tbody></table></figure>'


def _heat(value: float) -> str:
    return f'<td style="--by:{value:.2f}">{100 * value:.0f}</td>'


# --- data of the charts --------------------------------------------------------------------------


def _own_data(results: list[Result], compared: list[Row]) -> dict[str, Any]:
    labels = [row.label for row in compared]
    good = [each for each in results if each.error is None]
    return {
        "afterTask": [_curve([each for each in good if each.label == label]) for label in labels],
        "buffers": {
            str(seed): _buffers(list(its), labels)
            for seed, its in groupby(sorted(good, key=_seed), key=_seed)
        },
    }


def _seed(result: Result) -> int:
    return result.seed


def _seeds(results: list[Result]) -> str:
    numbers = sorted({each.seed for each in results if each.error is None})
    return "".join(f'<option value="{each}">seed {each}</option>' for each in numbers)


def _curve(its: list[Result]) -> list[list[float]] | None:
    """Tasks, and the mean, lowest and highest accuracy after each."""
    if not its:
        return None
    after = list(zip(*(each.seen_accuracy for each in its), strict=True))
    tasks = [float(number) for number in range(1, len(after) + 1)]
    means = [round(sum(values) / len(values), 5) for values in after]
    return [tasks, means, [min(values) for values in after], [max(values) for values in after]]


def _buffers(its: list[Result], labels: list[str]) -> dict[str, Any]:
    """What was kept of each class, with one seed; the upper bound keeps all, and is left out."""
    kept = {each.label: each.histogram for each in its if any(each.histogram)}
    groups = its[0].classes
    return {
        "classes": [[task, kind] for task, group in enumerate(groups, 1) for kind in group],
        "kept": [None if label == "joint" else kept.get(label) for label in labels],
    }
