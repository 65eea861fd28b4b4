"""Files that are whole or not there: written beside their place, then renamed into it.

A place that cannot be written is found out before anything is run.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from offbeat.records import Line


class Output:
    """A file to be: `temporary` while it is written, at `path` once it is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.is_dir():
                raise IsADirectoryError(0, "it is a folder")
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        except OSError as error:
            raise cannot_write(path, error) from None
        os.close(handle)
        self.temporary = Path(name)

    def keep(self) -> None:
        """Put the file into its place."""
        try:
            self.temporary.chmod(0o666 & ~_umask())
            self.temporary.replace(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def discard(self) -> None:
        """Leave nothing behind, if it was not kept."""
        self.temporary.unlink(missing_ok=True)


class Records(Output):
    """A sink of records whose lines go to the disk as they come."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = self.temporary.open("w", encoding="utf-8")

    def __call__(self, line: Line) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def flush(self) -> None:
        """Have all lines in the file, for whoever reads it."""
        try:
            self._file.flush()
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def keep(self) -> None:
        self.flush()
        super().keep()

    def discard(self) -> None:
        with suppress(OSError):  # what does not fit on the disk is not wanted any more
            self._file.close()
        super().discard()


class Json(Output):
    """A file of one JSON object."""

    def write(self, content: dict[str, Any]) -> None:
        """Write it, and keep it."""
        try:
            self.temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise cannot_write(self.path, error) from None
        self.keep()


class OutputError(Exception):
    """A file that cannot be written; the message says which and why."""


def cannot_write(path: Path, error: OSError) -> OutputError:
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        reason = f"there is no folder {path.parent}"
    return OutputError(f"{path}: cannot be written: {reason}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
