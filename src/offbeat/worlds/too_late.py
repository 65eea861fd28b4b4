"""A worker that comes too late ends with a sentence: nobody has made a mistake, in no script.

What it raises, `NobodyToJoinError`, may be caught like any other. If nobody does, Python would show
where in offbeat it was raised, and the launcher would take it for a failure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from offbeat import launched
from offbeat.errors import NobodyToJoinError

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_before: Hook | None = None


def end_in_a_sentence() -> None:
    """Have an uncaught `NobodyToJoinError` end this process in that way from now on.

    Once: a hook that somebody has set since may call this one.
    """
    global _before
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _say


def _say(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not isinstance(error, NobodyToJoinError):
        assert _before is not None
        _before(kind, error, traceback)
        return
    print(f"offbeat: {error}", file=sys.stderr)
    # This is how such a hook chooses the exit code. The launcher knows who was started to join.
    raise SystemExit(launched.TOO_LATE if launched.joins() else 1)
