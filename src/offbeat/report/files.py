"""Files that are there in full or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from offbeat.errors import ReportError


@contextmanager
def whole_file(path: str | Path) -> Iterator[TextIO]:
    """Open a file that takes its name when the block ends; if that fails, nothing is left of it.

    What had that name before stays until then.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        if path.is_dir():
            raise ReportError(f"{path}: cannot be written: it is a folder; name a file in it")
        try:
            with part.open("w", encoding="utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())  # a full disk may show only now
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"{path}: cannot be written: {error.strerror}") from None
