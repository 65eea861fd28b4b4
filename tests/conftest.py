"""Options of this test suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedule-seed",
        type=int,
        default=None,
        help="replay one schedule of test_schedules.py or test_hold_schedules.py, and no other",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Random schedules by ranges of seeds: FAST of a module at once, the rest to FULL slow."""
    if "seeds" in metafunc.fixturenames:
        only = metafunc.config.getoption("--schedule-seed")
        module = metafunc.module
        metafunc.parametrize("seeds", list(_seeds(only, module.FAST, module.FULL, module.CHUNK)))


def _seeds(only: int | None, fast: int, full: int, chunk: int) -> Iterator[object]:
    if only is not None:
        yield pytest.param(range(only, only + 1), id=f"{only}")
        return
    yield pytest.param(range(fast), id=f"0-{fast - 1}")
    for first in range(fast, full, chunk):
        seeds = range(first, min(first + chunk, full))
        yield pytest.param(seeds, id=f"{seeds[0]}-{seeds[-1]}", marks=pytest.mark.slow)
