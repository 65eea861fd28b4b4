"""How soon is a gradient-noise scale of 1000 found, on quadratics where it is known?

Asynchronous SGD on |w|^2 / 2 with normal noise in so many equally strong directions. As many
workers as a block has gradients, all equally fast: every gradient is (workers - 1) updates old.
Two ways see the same gradients: windows, whose gradients are multiplied with each other alone, as a
round's are; and the stream, which also multiplies them with the mean of those before.

    still       nothing moves: a scale of 1000
    descending  steps of 1e-4, from a scale of 1000: it doubles within 4,000 gradients
    hovering    steps of 2e-3: noise keeps the gradient at a scale of 1000
    nothing     no signal at all: the scale is infinite

    python benchmarks/noise_scale.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator
from math import inf
from typing import Any

import common
import torch
from torch import Tensor

from offbeat.noise_scale import Noise, NoiseScale
from offbeat.noise_stream import NoiseStream

NOISE = 1000.0
CASES = {  # step, |w|^2 at the start
    "still": (0.0, 1.0),
    "descending": (1e-4, 1.0),
    "hovering": (2e-3, 1.0),
    "nothing": (0.0, 0.0),
}
MOMENTS = (320, 1024, 4096)


class Windows:
    """The latest gradients, a block at a time, multiplied with each other alone."""

    def __init__(self, block: int) -> None:
        self.scale = NoiseScale()
        self._block: list[Tensor] = []
        self._size = block

    def add(self, gradient: Tensor) -> None:
        self._block.append(gradient)
        if len(self._block) == self._size:
            block = torch.stack(self._block)
            squares = block.square().sum(1).tolist()
            self.scale.add([1.0] * self._size, squares, float(block.mean(0).square().sum()))
            self._block.clear()

    @property
    def measured(self) -> Noise | None:
        return self.scale.measured


def gradients(case: str, size: int, delay: int, seed: int) -> Iterator[tuple[Tensor, float]]:
    """Each gradient, and the true scale where it was computed."""
    draw = torch.Generator().manual_seed(seed)
    step, signal = CASES[case]
    point = torch.zeros(size)
    point[0] = signal**0.5
    points = deque([point] * (delay + 1), maxlen=delay + 1)
    while True:
        point = points[0]
        gradient = point + torch.randn(size, generator=draw) * (NOISE / size) ** 0.5
        yield gradient, NOISE / float(point.square().sum()) if signal else inf
        if step:
            points.append(points[-1] - step * gradient)


def compare(case: str, size: int, workers: int, seed: int) -> dict[str, Any]:
    """What both ways find of a true scale: at some moments, and since when within a quarter."""
    ways = {"windows": Windows(workers), "stream": NoiseStream(block=workers)}
    found: dict[str, Any] = {name: {"since": 0, "signal_over_true": []} for name in ways}
    source = gradients(case, size, workers - 1, seed)
    for number in range(1, MOMENTS[-1] + 1):
        gradient, true = next(source)
        for name, way in ways.items():
            way.add(gradient)
            if number % 32:
                continue
            noise = way.measured
            right = noise is not None and abs(noise.scale / true - 1) <= 0.25
            found[name]["since"] = found[name]["since"] if right else number + 32
            if number in MOMENTS and noise is not None:
                # Of the scale's inverse: it has a mean, also where noise hides the signal.
                of_what = NOISE / true if true < inf else 1.0
                found[name]["signal_over_true"].append(noise.signal / of_what)
            elif number in MOMENTS:
                found[name]["signal_over_true"].append(None)
    return found


def main() -> None:
    torch.set_num_threads(1)
    arguments = common.options(__doc__.splitlines()[0]).parse_args()
    seeds = range(2 if arguments.quick else 5)
    rows = []
    for case in CASES:
        for size in (2000, 100):
            for workers in (8,) if arguments.quick else (2, 8, 32):
                runs = [compare(case, size, workers, seed) for seed in seeds]
                for name in runs[0]:
                    row: dict[str, Any] = {"case": case, "directions": size, "workers": workers}
                    row |= {"way": name, "since": [run[name]["since"] for run in runs]}
                    for place, moment in enumerate(MOMENTS):
                        values = [run[name]["signal_over_true"][place] for run in runs]
                        row[f"signal_over_true_{moment}"] = values
                    rows.append(row)
                    print(_line(row), flush=True)
    common.write(arguments.json, {"moments": MOMENTS, "seeds": len(seeds), "rows": rows})


def _line(row: dict[str, Any]) -> str:
    text = f"{row['case']:11}{row['directions']:5}{row['workers']:4} {row['way']:8}"
    for moment in MOMENTS:
        values = [value for value in row[f"signal_over_true_{moment}"] if value is not None]
        if len(values) > 1:
            text += f" {statistics.mean(values):7.2f} +- {statistics.stdev(values):5.2f}"
        else:
            text += " " * 17
    since = [number if number <= MOMENTS[-1] else "-" for number in row["since"]]
    return f"{text}  within 25 % since {since}"


if __name__ == "__main__":
    main()
