"""A comparison's runs, one after the other or several at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

from offbeat.lab.federation.results import Result
from offbeat.lab.progress import Progress
from offbeat.lab.results_file import ResultsFile
from offbeat.lab.runners import Real, Virtual
from offbeat.lab.running import Crew
from offbeat.records import Line

if TYPE_CHECKING:
    from offbeat.lab.federation.comparison import Comparison, Place


def run(
    comparison: Comparison,
    show: Progress,
    file: ResultsFile | None,
    jobs: int,
    done: dict[Place, list[Line]],
) -> None:
    """Make what is not done; KeyboardInterrupt and errors leave a file to go on with."""
    show.done(0, len(done))
    missing = [place for place in comparison.places if place not in done]

    def ended(place: Place, result: Result, lines: list[Line]) -> None:
        done[place] = lines
        if file is not None:
            file.append(*lines)
        show.end(result.label, result.figures)

    if comparison.world == "virtual" and jobs > 1 and len(missing) > 1:
        with Crew(min(jobs, len(missing))) as crew:
            _at_a_time(comparison, missing, ended, crew, show)
    elif missing:
        with Virtual() if comparison.world == "virtual" else Real(comparison.clients) as runner:
            for place in missing:
                ended(place, *comparison.one(runner, place, show))


def _at_a_time(
    comparison: Comparison,
    missing: list[Place],
    ended: Callable[[Place, Result, list[Line]], None],
    crew: Crew,
    show: Progress,
) -> None:
    queue, calls = list(missing), dict[Future[Any], "Place"]()
    while queue or calls:
        while queue and len(calls) < crew.room:
            place = queue.pop(0)
            calls[crew.submit(_make, comparison, place)] = place
            show.begin(*place)
        for future in wait(calls, return_when=FIRST_COMPLETED).done:
            ended(calls.pop(future), *future.result())


def _make(comparison: Comparison, place: Place) -> tuple[Result, list[Line]]:
    """Make one run, in a process of the crew."""
    with Virtual() as runner:
        return comparison.one(runner, place, Progress())
