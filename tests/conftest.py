"""Options of this test suite."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

from offbeat.testing.running import PRELOADED
from offbeat.worlds import current

# The store of torch.distributed looks up the name of whoever connects. Where the name server now
# and then says nothing, that is a wait of 5 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Tests and their workers share the cores. Were each to take all of them for one small operation,
# its threads would wait for each other: a batch norm of microseconds takes a quarter of a second.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedule-seed",
        type=int,
        default=None,
        help="replay one schedule of test_schedules.py, and no other",
    )
    parser.addoption(
        "--few",
        type=int,
        default=None,
        metavar="N",
        help="run N cases of every test, and none of those in tests/long.txt: make test-fast",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    few = config.getoption("--few")
    if few is None:
        return None
    left = f"but none of the {len(_long())} tests in long.txt"
    return f"few: up to {few} cases of every test, {left}; make test runs all"


@pytest.hookimpl(trylast=True)  # after marks have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most cases of a test that has many, and what takes long."""
    if (few := config.getoption("--few")) is None:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0].split("/")[-1], []).append(item)
    for name in _long():
        cases.pop(name, None)
    chosen = {id(item) for several in cases.values() for item in _spread(several, few)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


def _long() -> list[str]:
    """Tests that take long, as file::function."""
    lines = Path(__file__).with_name("long.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _spread(cases: list[pytest.Item], few: int) -> list[pytest.Item]:
    """So many of them: the first, and at equal distances from there."""
    if len(cases) <= few:
        return cases
    return [cases[number * len(cases) // few] for number in range(few)]


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


@pytest.fixture(autouse=True)
def _no_world_is_left_open() -> Iterator[None]:
    """A world that a test leaves open would be the next one's, with all its settings."""
    yield
    assert current._process_world is None, "this test has left its world open"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Debian's Chromium without a screen; it ends with the tests, whatever happens in them."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
        *("disable-background-networking", "disable-component-update", "disable-sync"),
        *("disable-dev-shm-usage", "window-size=1280,1000"),
        f"user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        started.set_page_load_timeout(60)
        started.set_script_timeout(60)
        yield started
    finally:
        started.quit()


@pytest.fixture(scope="session")
def framework_workers() -> Iterator[Callable[..., list[Any]]]:
    """Run a function on two workers that have imported the frameworks, and return its results.

    Importing them takes longer than most of their tests, so the workers serve all of these.
    """
    PRELOADED.extend(["lightning.pytorch", "transformers.trainer"])
    with Pool(2) as pool:

        def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
            ended = pool.run(function, *arguments, limit_s=60.0, after_error_s=5.0)
            for one in ended:
                assert not one.error, one.words
            for one in ended:
                assert not one.hung, one.stacks
            return [one.result for one in ended]

        yield run
