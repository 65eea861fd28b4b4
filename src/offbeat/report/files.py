"""Files that are there in full or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from offbeat.errors import ReportError


class WholeFile:
    """A file that takes its name when it is kept; what had that name before stays until then.

    It is opened at once: a place that cannot be written is found out before the work is done. As a
    block it is kept at the end, and nothing is left of it after an error.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self._told():
            if self.path.is_dir():
                raise IsADirectoryError(0, "it is a folder; name a file in it")
            self.part = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.part")
            self._file = self.part.open("x", encoding="utf-8")

    def write(self, text: str) -> None:
        with self._told():
            self._file.write(text)

    def flush(self) -> None:
        """Have all that was written in `part`, for whoever reads it."""
        with self._told():
            self._file.flush()

    def keep(self) -> None:
        """Put the file into its place."""
        with self._told():
            self._file.flush()
            os.fsync(self._file.fileno())  # a full disk may show only now
            self._file.close()
            self.part.replace(self.path)

    def discard(self) -> None:
        """Leave nothing behind, if it was not kept."""
        with suppress(OSError):  # what does not fit on the disk is not wanted any more
            self._file.close()
        self.part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.keep()
        finally:
            self.discard()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say which file it is that cannot be written, and why."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            if isinstance(error, FileNotFoundError):
                reason = f"there is no folder {self.path.parent}"
            raise ReportError(f"{self.path}: cannot be written: {reason}") from None
