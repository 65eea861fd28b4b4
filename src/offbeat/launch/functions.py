"""A worker that runs a function, in a session of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import parent_process
from typing import Any

import torch.multiprocessing

from offbeat.launch.supervisor import Worker


class Function(Worker):
    """An importable function that is running in a process, made by `spawn` or `forkserver`."""

    def __init__(
        self,
        rank: int,
        method: str,
        function: Callable[..., None],
        *arguments: Any,
        daemon: bool = False,
    ) -> None:
        context: Any = torch.multiprocessing.get_context(method)
        self._process = context.Process(target=_lead, args=(function, arguments), daemon=daemon)
        self._process.start()
        super().__init__(rank, self._process.pid)

    @property
    def sentinel(self) -> int:
        return int(self._process.sentinel)

    def exit_code(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def close(self) -> None:
        self._process.join()

    def send(self, number: int) -> None:
        if self.exit_code() is not None:
            return  # its number may be another's by now
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it leads no group yet
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _lead(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    function(*arguments)


def end_with_parent() -> None:
    """End this process when the one that started it has ended, however that was."""
    parent = parent_process()
    assert parent is not None, "a child process"
    parent.join()
    os._exit(1)
