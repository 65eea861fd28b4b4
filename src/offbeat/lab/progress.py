"""What a person sees while a race is on: a line per algorithm, or plain lines into a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from offbeat.records import Line

_REFRESH_S = 0.2
_PLAIN_EVERY_S = 15.0
_LABEL_COLUMNS = 40
"""Of a terminal; longer labels are broken."""


class Progress:
    """Hears how a race goes on; this one shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def tune(self, label: str, tried: str) -> None:
        """A run begins that only tries settings."""

    def tuned(self, label: str, settings: str, edge: str) -> None:
        """A contestant has its settings; `edge` says what was not tried beside them, if so."""

    def begin(self, label: str, seed: int) -> None:
        """A run begins."""

    def tell(self, line: Line) -> None:
        """A worker says how far it has come."""

    def end(self, label: str, figures: dict[str, Any]) -> None:
        """A run has ended."""

    def done(self, tuned: int, ended: int) -> None:
        """So much was there before."""


class _Contestant:
    """What is known of one algorithm while it races."""

    def __init__(self) -> None:
        self.reached: list[str] = []
        self.rate = ""
        self.state = "waiting"
        self.by_rank: dict[int, Line] = {}
        self._began: tuple[float, float] | None = None

    def begin(self, state: str = "running") -> None:
        self.state, self.by_rank, self._began = state, {}, None

    def tell(self, line: Line) -> None:
        self.by_rank[line["rank"]] = line
        if self._began is None:  # not with the run: to start processes takes a while
            self._began = time.monotonic(), line["share"]

    def words(self, unit: str) -> str:
        """How far its run has come; nothing before worker 0 has told something."""
        leader = self.by_rank.get(0)
        if leader is None:
            return ""
        loss = "" if leader["loss"] is None else f"loss {leader['loss']:.3f}, "
        accuracy = "" if leader["accuracy"] is None else f"accuracy {leader['accuracy']:.1%}, "
        return (
            f"{loss}{accuracy}utilisation {self.utilization:.0%}, {leader['rounds']} rounds, "
            f"at {leader['seconds']:.1f} {unit}"
        )

    @property
    def utilization(self) -> float:
        compute_s = sum(line["compute_s"] for line in self.by_rank.values())
        spent_s = compute_s + sum(line["wait_s"] for line in self.by_rank.values())
        return compute_s / spent_s if spent_s else 1.0

    def left(self) -> str:
        """How long this run may still take, on the wall."""
        assert self._began is not None, "somebody has told something"
        began, first_share = self._began
        share = max(line["share"] for line in self.by_rank.values())
        if share <= first_share:
            return "running"
        rate = (time.monotonic() - began) / (share - first_share)
        return f"at most {max(0.0, rate * (1.0 - share)):.0f} s left"


class Pace:
    """How long a race will still take, on the wall, judged by what it has done so far."""

    def __init__(self, contestants: int, seeds: int, trials: int) -> None:
        """To tune a contestant counts as so many runs as it may try settings."""
        self._all = contestants * (seeds + trials)
        self._trials = trials
        self._done = 0
        self._began = time.monotonic()

    def tuned(self) -> None:
        self._done += self._trials

    def ended(self) -> None:
        self._done += 1

    def skip(self, tuned: int, ended: int) -> None:
        """So much need not be done."""
        self._all -= tuned * self._trials + ended

    def left(self) -> str:
        """In words; nothing where it is over, or has only begun."""
        if not 0 < self._done < self._all:
            return ""
        spent_s = time.monotonic() - self._began
        return f"about {spent_s * (self._all / self._done - 1):.0f} s left"


class Lines(Progress):
    """A line when a run has ended, and now and then one in between."""

    def __init__(
        self, console: Console, labels: Sequence[str], seeds: int, unit: str, trials: int = 0
    ) -> None:
        self._console = console
        self._unit = unit
        self._seeds = seeds
        self._runs = len(labels) * seeds
        self._done = 0
        self._pace = Pace(len(labels), seeds, trials)
        self._running = _Contestant()
        self._label = ""
        self._said = 0.0

    def done(self, tuned: int, ended: int) -> None:
        self._done += ended
        self._pace.skip(tuned, ended)

    def tune(self, label: str, tried: str) -> None:
        self._begin(f"tuning {label}, {tried}")

    def tuned(self, label: str, settings: str, edge: str) -> None:
        self._pace.tuned()
        beyond = f"; at the edge, not tried: {edge}" if edge else ""
        self._print(f"tuned {label}: {settings}{beyond}")

    def begin(self, label: str, seed: int) -> None:
        self._begin(f"{label}, seed {seed}")

    def _begin(self, label: str) -> None:
        self._label, self._running = label, _Contestant()
        self._running.begin()
        self._said = time.monotonic()

    def tell(self, line: Line) -> None:
        self._running.tell(line)
        if time.monotonic() - self._said > _PLAIN_EVERY_S and 0 in self._running.by_rank:
            self._said = time.monotonic()
            self._say(f"{self._running.words(self._unit)}, {self._running.left()}")

    def end(self, label: str, figures: dict[str, Any]) -> None:
        self._done += 1
        self._pace.ended()
        done, left = f"{self._done}/{self._runs}", self._pace.left()
        words = f"{done} {label}, seed {figures['seed']}: {outcome(figures, self._unit)}"
        self._print(f"{words}{left and f'; {left}'}")

    def _say(self, words: str) -> None:
        done = "" if self._label.startswith("tun") else f"{self._done}/{self._runs} "
        self._print(f"{done}{self._label}: {words}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Display(Progress):
    """One line per algorithm, which changes in place."""

    def __init__(
        self, console: Console, labels: Sequence[str], seeds: int, unit: str, trials: int = 0
    ) -> None:
        self._unit = unit
        self._seeds = seeds
        self._trials = trials
        self._pace = Pace(len(labels), seeds, trials)
        self._all = {label: _Contestant() for label in labels}
        self._running = next(iter(self._all.values()))
        self._shown = 0.0
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._table)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def done(self, tuned: int, ended: int) -> None:
        self._pace.skip(tuned, ended)

    def tune(self, label: str, tried: str) -> None:
        self._running = self._all[label]
        self._running.begin(f"tuning, {tried}" if tried else "tuning")
        self._live.refresh()

    def tuned(self, label: str, settings: str, edge: str) -> None:
        runner = self._all[label]
        runner.begin("waiting")
        runner.rate = settings.removeprefix("lr ")
        self._pace.tuned()
        self._live.refresh()  # with several jobs nothing else happens for a while

    def begin(self, label: str, seed: int) -> None:
        self._running = self._all[label]
        self._running.begin()
        self._live.refresh()

    def tell(self, line: Line) -> None:
        self._running.tell(line)
        if time.monotonic() - self._shown > _REFRESH_S:
            self._live.refresh()
            self._shown = time.monotonic()

    def end(self, label: str, figures: dict[str, Any]) -> None:
        runner = self._all[label]
        runner.reached.append(_reached(figures))
        self._pace.ended()
        at = "target at " if figures.get("target") else ""
        runner.begin(f"{at}{', '.join(runner.reached)}")
        self._live.refresh()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), caption=self._pace.left())
        table.caption_justify = "left"
        longest = max(len(label) for label in ("algorithm", *self._all))
        width = min(longest, _LABEL_COLUMNS)
        table.add_column("algorithm", style="bold", overflow="fold", width=width)
        tunes = self._trials or any(runner.rate for runner in self._all.values())
        for name in ("lr", "seed") if tunes else ("seed",):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("")
        for label, runner in self._all.items():
            rate = (runner.rate,) if tunes else ()
            # It gives way where the terminal is narrow, and stays one line.
            state = Text(self._state(runner), no_wrap=True, overflow="ellipsis")
            table.add_row(label, *rate, f"{len(runner.reached)}/{self._seeds}", state)
        return table

    def _state(self, runner: _Contestant) -> str:
        words = runner.words(self._unit)
        state = runner.left() if words and runner.state == "running" else runner.state
        return f"{state}: {words}" if words else state


def _reached(figures: dict[str, Any]) -> str:
    """What a run came to, in a word."""
    if figures["error"] is not None:
        return "failed"
    if (word := figures.get("word")) is not None:
        return str(word)
    if figures["diverged"]:
        return "diverged"
    at_s = figures["seconds_to_target"]
    return f"{at_s:.1f}" if at_s is not None else "never" if figures["target"] else "done"


def outcome(figures: dict[str, Any], unit: str) -> str:
    """Say in a few words what a run came to; its own words, if it brings some."""
    if figures["error"] is not None:
        return "failed"
    if (words := figures.get("words")) is not None:
        return str(words)
    if figures["diverged"]:
        return "diverged"
    if figures["target"] is None:
        return f"{figures['rounds']} rounds in {figures['seconds']:.1f} {unit}"
    if figures["seconds_to_target"] is None:
        return f"did not reach {figures['target']} in {figures['seconds']:.1f} {unit}"
    return f"{figures['target']} after {figures['seconds_to_target']:.1f} {unit}"


def watching(labels: Sequence[str], seeds: int, unit: str, trials: int = 0) -> Progress:
    """Return what suits standard error: a display in a terminal, else lines."""
    console = Console(stderr=True, highlight=False)
    return (Display if console.is_terminal else Lines)(console, labels, seeds, unit, trials)
