"""Records in; tables, pages and traces out. Nothing here runs anything.

    runs = report.load(["race.jsonl"])      files, or folders that real workers wrote into
    report.table(runs)                      a table for the terminal
    report.edges(runs)                      who may have better settings than those tried
    report.failures(runs)                   who failed, and why
    report.rows(runs)                       the same as numbers
    report.html.write(runs, "report.html")
    report.trace.write(runs, "trace.json")
    report.scalars.write(runs, "folder")
    runs                                    as the last line of a notebook's cell: the page, inline

What cannot be read or written is a ReportError.
"""

from offbeat.report import html, scalars, trace
from offbeat.report.runs import Run, Runs, edges, load, measured
from offbeat.report.summary import Row, failures, rows, table

__all__ = [
    "Row",
    "Run",
    "Runs",
    "edges",
    "failures",
    "html",
    "load",
    "measured",
    "rows",
    "scalars",
    "table",
    "trace",
]
