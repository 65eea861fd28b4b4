"""Options of this test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedule-seed",
        type=int,
        default=None,
        help="replay one schedule of tests/test_schedules.py, and no other",
    )
