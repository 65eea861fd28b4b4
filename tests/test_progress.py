"""What a person sees while a race is on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from offbeat.lab.progress import Display

LABELS = ["sync", "dropcompute:window_rounds=10", "waitfree"]


def displayed(width: int = 80) -> tuple[Display, io.StringIO]:
    """A display in a terminal of so many columns, and what is written there."""
    terminal = io.StringIO()
    console = Console(file=terminal, width=width, height=24, force_terminal=True)
    return Display(console, LABELS, 5, "virtual s", 6), terminal


def last_shown(terminal: io.StringIO) -> list[str]:
    """The lines that were drawn last."""
    console = Console(file=io.StringIO())
    drawn = terminal.getvalue().rpartition("algorithm")[2]
    return [console.render_str(line).plain for line in drawn.splitlines()]


@pytest.mark.parametrize("width", [80, 100])
def test_algorithms_keep_their_names_and_a_line_each_in_a_narrow_terminal(width: int) -> None:
    display, terminal = displayed(width)
    with display:
        for label in LABELS:
            display.tune(label, "")
        display.tuned(LABELS[0], "lr ×0.5, micro_batches=8", "")
        display.tuned(LABELS[2], "lr ×0.5, min_batch=0", "")
        for seed, at_s in enumerate((126.4, 129.9, 124.7, 156.0, 115.0)):
            figures = {"error": None, "diverged": False, "target": "accuracy=0.9", "seed": seed}
            display.end(LABELS[0], {**figures, "seconds_to_target": at_s})
        display.begin(LABELS[2], 0)
        line = {"rank": 0, "seconds": 3.0, "rounds": 7, "share": 0.5, "compute_s": 1.0}
        display.tell({**line, "wait_s": 1.0, "loss": 0.25, "accuracy": 0.3})
    shown = last_shown(terminal)
    for label in LABELS:
        assert sum(label in line for line in shown) == 1
    assert any("5/5" in line and "target at 126.4, 129" in line for line in shown)
    assert any("waitfree" in line and "running: loss 0.250" in line for line in shown)
    assert len(shown) <= len(LABELS) + 3


def test_the_time_left_is_shown_as_soon_as_the_first_contestant_is_tuned() -> None:
    display, terminal = displayed()
    with display:
        for label in LABELS:
            display.tune(label, "")
        assert "s left" not in terminal.getvalue()
        display.tuned(LABELS[0], "lr ×0.5", "")  # with several jobs nothing else happens then
        assert "s left" in terminal.getvalue()
