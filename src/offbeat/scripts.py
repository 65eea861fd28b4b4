"""Running a user's script inside this process, as `python SCRIPT` would."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_left_behind: list[Any] = []
"""What scripts leave behind lives as long as the process, as it would without us.

To let go of a model in DistributedDataParallel right after its last backward pass may hang: its
reducer, freed under the GIL, joins a thread of Gloo that waits for the GIL (seen with torch 2.13).
"""


def run_script(script: Path, arguments: Sequence[str]) -> None:
    """Run it as `__main__`; what it raises is raised here, except an exit without an error."""
    argv, path = sys.argv, sys.path
    sys.argv = [str(script), *arguments]
    sys.path = [str(script.resolve().parent), *path]
    try:
        _left_behind.append(runpy.run_path(str(script), run_name="__main__"))
    except SystemExit as leaving:
        _left_behind.append(leaving)
        if leaving.code:
            raise
    finally:
        sys.argv, sys.path = argv, path
