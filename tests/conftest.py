"""Options of this test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedule-seed",
        type=int,
        default=None,
        help="replay one schedule of test_schedules.py or test_hold_schedules.py, and no other",
    )
