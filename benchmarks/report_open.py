"""How long a report of 1,000 workers x 100 rounds takes to open in headless Chromium.

The records are made up: 100,000 spans of compute, 100,000 of waiting and as many parts in rounds.
Measured is the time from asking for the page until its timeline has been on the screen for a frame,
as the page itself notes it. Needs Debian's packages chromium and chromium-driver.

    python benchmarks/report_open.py [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from offbeat import report
from offbeat.records import Line, RecordsFile

WORKERS, ROUNDS = 1000, 100
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
    *("disable-dev-shm-usage", "window-size=1280,1000"),
)


def made_up() -> Iterator[Line]:
    """Yield the lines of a synchronous run."""
    draw = random.Random(0)
    yield {"kind": "run", "label": "sync", "algorithm": "SyncSGD()", "world": "virtual"}
    begin = 0.0
    for number in range(ROUNDS):
        ready = [begin + 0.1 * draw.lognormvariate(0.0, 0.2) for _ in range(WORKERS)]
        end = max(ready) + 0.01
        for rank, at in enumerate(ready):
            computing = {"from_s": begin, "to_s": at, "samples": 8.0, "arrival": "on time"}
            joined = {"rank": rank, "round": number, "from_s": at, "to_s": end}
            facts = {"at_s": end, "samples": 8.0 * WORKERS, "workers": WORKERS}
            yield {"kind": "compute", "rank": rank, **computing}
            yield {"kind": "wait", **joined}
            yield {"kind": "round", "staleness_rounds": 0, **joined, **facts}
        begin = end
        learnt = {"loss": 2 / (number + 1), "accuracy": 1 - 0.9 / (number + 1)}
        samples = 8.0 * WORKERS * (number + 1)
        yield {"kind": "evaluation", "at_s": end, "round": number, "samples": samples, **learnt}


@contextmanager
def browser(folder: Path) -> Iterator[Any]:
    """A fresh browser, which ends with the block."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in (*FLAGS, f"user-data-dir={folder}"):
        options.add_argument(f"--{flag}")
    service = webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver")
    started = webdriver.Chrome(options=options, service=service)
    try:
        yield started
    finally:
        started.quit()


def opened_s(page: Path, folder: Path) -> float:
    """Open the page in a browser of its own; return the seconds that it took."""
    with browser(folder) as started:
        started.get(page.as_uri())
        ready = "return document.documentElement.dataset.ready"
        return float(WebDriverWait(started, 60).until(lambda it: it.execute_script(ready))) / 1e3


def main() -> None:
    arguments = common.options(__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = RecordsFile(folder / "records.jsonl")
        for line in made_up():
            file(line)
        file.close()
        began = time.perf_counter()
        report.html.write(report.load([folder / "records.jsonl"]), folder / "report.html")
        write_s = time.perf_counter() - began
        size = (folder / "report.html").stat().st_size
        times = [
            opened_s(folder / "report.html", folder / f"profile-{turn}")
            for turn in range(3 if arguments.quick else 9)
        ]
    print(f"read and written in {write_s:.1f} s, {size / 1e6:.1f} MB")
    print(f"opened in {common.spread(times)} s")
    common.write(
        arguments.json,
        {
            "workers": WORKERS,
            "rounds": ROUNDS,
            "open_s": statistics.median(times),
            "open_s_each": times,
            "read_and_write_s": write_s,
            "page_bytes": size,
        },
    )


if __name__ == "__main__":
    main()
