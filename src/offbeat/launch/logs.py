"""Where workers' output goes: torchrun's --log-dir, --redirects, --tee and --local-ranks-filter."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from string import Template

from offbeat.launch.job import LaunchError, Slot
from offbeat.launch.streams import ERR, OUT, Console, Stream, Streams

_OUT, _ERR = 1, 2
_MAP = re.compile(r"\d+:[0-3](,\d+:[0-3])*")
_TEMPLATE = "[${role_name}${local_rank}]:"


@dataclass(frozen=True)
class Choice:
    """Which streams of which local rank are meant."""

    of_all: int = 0
    by_rank: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, flag: str, words: str) -> Choice:
        """Read `3` or `0:3,1:2`; 1 is stdout, 2 is stderr, 3 both."""
        if re.fullmatch("[0-3]", words):
            return cls(int(words))
        if not _MAP.fullmatch(words):
            raise LaunchError(
                f"{flag} must be 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or such a number "
                f"for some local ranks as in 0:3,1:2; got {words!r}"
            )
        pairs = (pair.split(":") for pair in words.split(","))
        return cls(0, tuple((int(rank), int(which)) for rank, which in pairs))

    def has(self, local_rank: int, which: int) -> bool:
        """Say whether this stream of this worker is meant."""
        return bool(dict(self.by_rank).get(local_rank, self.of_all) & which)


@dataclass(frozen=True)
class LogChoices:
    """What the flags say about output."""

    folder: Path | None = None
    redirects: Choice = Choice()
    tee: Choice = Choice()
    shown: frozenset[int] | None = None
    """Local ranks whose output comes to the console; all if None."""


class Logs:
    """The files of one run: `<log-dir>/<run>_<random>/attempt_<n>/<local rank>/stdout.log`."""

    def __init__(self, choices: LogChoices, run_id: str, role: str) -> None:
        self._choices = choices
        self._role = role
        self._given = choices.folder is not None
        try:
            if choices.folder is not None:
                choices.folder.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=choices.folder))
        except OSError as error:
            raise LaunchError(
                f"--log-dir {choices.folder} cannot be used: {error.strerror}"
            ) from None

    def streams(self, slot: Slot, attempt: int) -> Streams:
        """Open the streams of a worker."""
        own = self._own(slot, attempt)
        own.mkdir(parents=True, exist_ok=True)
        return Streams(
            self._stream(slot, _OUT, OUT, own / "stdout.log"),
            self._stream(slot, _ERR, ERR, own / "stderr.log"),
        )

    def error_file(self, slot: Slot, attempt: int) -> Path:
        """Where a main function under torch's @record writes its error."""
        return self._own(slot, attempt) / "error.json"

    def recorded_error(self, slot: Slot, attempt: int) -> str:
        """What it has written there, in a line; nothing if it has not."""
        try:
            found = json.loads(self.error_file(slot, attempt).read_text())["message"]
            return str(found["message"] if isinstance(found, dict) else found)
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def close(self) -> None:
        """Remove the folder, unless somebody wanted it or it holds something."""
        if not self._given and not any(self.folder.rglob("*.log")):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _own(self, slot: Slot, attempt: int) -> Path:
        return self.folder / f"attempt_{attempt}" / str(slot.local_rank)

    def _stream(self, slot: Slot, which: int, console: Console, file: Path) -> Stream:
        teed = self._choices.tee.has(slot.local_rank, which)
        redirected = self._choices.redirects.has(slot.local_rank, which)
        shown = self._choices.shown is None or slot.local_rank in self._choices.shown
        return Stream(
            console if shown and (teed or not redirected) else None,
            file if teed or redirected else None,
            self._prefix(slot) if teed else "",
        )

    def _prefix(self, slot: Slot) -> str:
        template = os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", _TEMPLATE)
        return Template(template).safe_substitute(
            role_name=self._role, rank=slot.rank, local_rank=slot.local_rank
        )
