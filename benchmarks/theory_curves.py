"""The picture of docs/theory.md: how long methods take, by theory, on four kinds of clusters.

Nothing is measured here: offbeat.theory is asked. Worker i takes 1, sqrt(i), i or i^2 seconds for a
gradient, S is 100, and the number of workers grows. Also the clusters that ship with offbeat whose
workers have unlike speeds: what each method takes over the optimum.

The charts are those of the HTML report, drawn as SVG by headless Chromium (theory_curves.js), once
for light pages and once for dark ones: needs Debian's packages chromium and chromium-driver.

    python benchmarks/theory_curves.py [--quick] [--json FILE] [--into FOLDER]

--quick draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import drawing

from offbeat import Cluster, theory
from offbeat.clusters import named

NOISE = 100.0
MOST = 1000
NOISES = (1.0, 10.0, 100.0, 1000.0)
PROFILES: dict[str, Callable[[int], float]] = {
    "1": lambda i: 1.0,
    "√i": lambda i: math.sqrt(i),
    "i": lambda i: float(i),
    "i²": lambda i: float(i * i),
}
METHODS: dict[str, Callable[[list[float], float], float]] = {
    "synchronous": theory.sync_time,
    "plain asynchronous": theory.async_time,
    "m-synchronous, best m": theory.m_sync_time,
    "optimal": lambda seconds, noise: theory.optimal_time(seconds, noise).time_s,
}


def curves(tau: Callable[[int], float]) -> dict[str, Any]:
    """What every method takes, by the number of workers; and the m at which two of them stay."""
    everyone = _workers(tau, MOST)
    best, m = theory.optimal_time(everyone, NOISE), theory.best_m(everyone, NOISE)
    steps = {round(10 ** (step / 24)) for step in range(3 * 24 + 1)}
    n = sorted({*steps, best.m, m})
    return {
        "n": n,
        "m": {"m-synchronous, best m": m, "optimal": best.m},
        "time_s": {
            name: [_short(time(_workers(tau, each), NOISE)) for each in n]
            for name, time in METHODS.items()
        },
    }


def _workers(tau: Callable[[int], float], n: int) -> list[float]:
    return [tau(i) for i in range(1, n + 1)]


def on_clusters() -> dict[str, Any]:
    """What every method takes over the optimum, on clusters that ship with offbeat."""
    clusters = [Cluster.load(name) for name in named()]
    return {
        cluster.name: {
            f"{noise:g}": _over_the_optimum([1 / speed for speed in cluster.speeds], noise)
            for noise in NOISES
        }
        for cluster in clusters
        if len(set(cluster.speeds)) > 1
    }


def _over_the_optimum(seconds: list[float], noise: float) -> dict[str, float]:
    best = theory.optimal_time(seconds, noise)
    ratios = {name: _short(time(seconds, noise) / best.time_s) for name, time in METHODS.items()}
    return {**ratios, "best m": theory.best_m(seconds, noise), "optimal m": best.m}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


# --- the picture ---------------------------------------------------------------------------

SIZE = (960, 748)
SUBTEXTS = (
    "equal workers: one line for all four",
    "the hundredth worker takes 10 times as long",
    "the hundredth worker takes 100 times as long",
    "the hundredth worker takes 10,000 times as long",
)


def draw(found: dict[str, Any], folder: Path) -> None:
    """Write theory.svg for light pages, and theory-dark.svg."""
    groups = [
        {
            "name": name,
            "synchronous": name == "synchronous",
            "curves": {
                f"{at}-n": [profile["n"], profile["time_s"][name]]
                for at, profile in enumerate(found.values())
            },
        }
        for name in METHODS
    ]
    drawing.draw(
        Path(__file__).with_suffix(".js"),
        folder / "theory",
        SIZE,
        data={"groups": groups, "target": {}},
        figures=found,
        SUBTEXTS=SUBTEXTS,
    )


def main() -> None:
    parser = common.options(__doc__.splitlines()[0])
    docs = Path(__file__).parents[1] / "docs"
    parser.add_argument("--into", type=Path, default=docs, help="draw the pictures there")
    arguments = parser.parse_args()
    found = {name: curves(tau) for name, tau in PROFILES.items()}
    clusters = on_clusters()
    for name, profile in found.items():
        ends = ", ".join(f"{method} {times[-1]:g}" for method, times in profile["time_s"].items())
        print(f"tau = {name}, {MOST} workers: {ends}")
    for name, by_noise in clusters.items():
        for noise, ratios in by_noise.items():
            shown = ", ".join(f"{method} {ratio:.3g}" for method, ratio in ratios.items())
            print(f"{name}, S = {noise}, over the optimum: {shown}")
    if not arguments.quick:
        draw(found, arguments.into)
    figures = {"noise": NOISE, "profiles": found, "over_the_optimum": clusters}
    common.write(arguments.json, figures)


if __name__ == "__main__":
    main()
