"""Workers with unlike data and unlike speeds: who reaches the optimum of the whole? Virtual time.

100 workers and a server. Worker i has 32 images of handwritten digits of its own, of classes that
are drawn from a Dirichlet(0.1): mostly one or two. A gradient is that of all its images, without
noise, and takes it 1 + i/5 virtual seconds, times 0.5 to 1.5, drawn for every job; who is fast is
independent of the data. The model is logistic regression with weight decay 0.05, so there is one
optimum: that of the mean loss over all images, found by L-BFGS. Everybody starts from 0.

Shown is the distance to the optimum over that at the start. "frequency" is where asynchronous SGD
must end up if its steps are small: at the optimum of the loss in which each worker counts as often
as it comes.

Terms: each method has the best of the same learning rates, that with the least distance at the end;
different rates run side by side on one course of events. Two splits.

    python benchmarks/unlike_data.py [--quick] [--json FILE] [--into FOLDER]

--into draws the first split by the charts of the HTML report (unlike_data.js), for light and for
dark pages: needs Debian's packages chromium and chromium-driver.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import drawing
import torch
from torch import Tensor
from torch.optim import LBFGS, SGD

from offbeat.algorithms import ASGD, RescaledASGD, RingleaderASGD, RingmasterASGD
from offbeat.asynchronous import Asynchronous
from offbeat.lab import crowd, digits
from offbeat.rounds import Enough, Judge

WORKERS = 100
IMAGES = 32  # of each worker
ALPHA = 0.1
DECAY = 0.05
UNTIL_S = 1000.0
POINTS = 100
RATES = (0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 2.0)
SPLITS = (0, 1)
SECONDS = torch.tensor([1 + i / 5 for i in range(WORKERS)])

METHODS: dict[str, Callable[[], Asynchronous | Judge]] = {
    "ASGD": ASGD,
    "Ringmaster ASGD, R = 100": lambda: RingmasterASGD(100),
    "Rescaled ASGD": RescaledASGD,
    "Ringleader ASGD": RingleaderASGD,
    "synchronous SGD": lambda: Enough(WORKERS, gradients=WORKERS, workers=WORKERS, once=True),
}


def shards(split: int) -> tuple[Tensor, Tensor]:
    """Images with a constant, and classes one-hot, by worker."""
    images, labels = digits.load()
    images = torch.cat([images - images.mean(0), torch.ones(len(images), 1)], 1).double()
    torch.manual_seed(split)
    mixes = torch.distributions.Dirichlet(torch.full((10,), ALPHA)).sample((WORKERS,))
    weights = mixes[:, labels] / labels.bincount().double()[labels]
    drawn = torch.multinomial(weights + 1e-12, IMAGES, replacement=True)
    return images[drawn], torch.nn.functional.one_hot(labels[drawn], 10).double()


def gradients_of(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Of the mean loss over the images, at several weights at once."""
    wrong = (x @ weights).softmax(-1).sub_(y)
    return (x.mT @ wrong).div_(x.shape[-2]).add_(weights, alpha=DECAY)


def optimum(x: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Of the mean over workers, each of which counts so much."""
    weights = torch.zeros(x.shape[-1], 10, dtype=x.dtype, requires_grad=True)
    shares = counts.to(x.dtype) / counts.sum()
    optimizer = LBFGS([weights], max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-16,
                      line_search_fn="strong_wolfe")  # fmt: skip

    def loss() -> Tensor:
        optimizer.zero_grad()
        losses = -(y * (x @ weights).log_softmax(-1)).sum(-1).mean(-1)
        total = (shares * losses).sum() + DECAY / 2 * weights.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[arg-type]
    return weights.detach()


def run(method: Asynchronous | Judge, split: int, until_s: float) -> dict[str, Any]:
    """All learning rates side by side; the distances of the best."""
    x, y = shards(split)
    best = optimum(x, y, torch.ones(WORKERS)).float()
    x, y = x.float(), y.float()
    rates = torch.tensor(RATES, dtype=x.dtype).view(-1, 1, 1)
    draw = torch.Generator().manual_seed(split)

    def gradient(point: Tensor, worker: int, job: int) -> Tensor:
        return gradients_of(point, x[worker], y[worker]).mul_(rates)

    def seconds(workers: Tensor, jobs: Tensor) -> Tensor:
        return SECONDS[workers] * (0.5 + torch.rand(len(workers), generator=draw))

    def distances(point: Tensor) -> list[float]:
        apart = (point - best).flatten(1).norm(dim=1) / best.norm()
        return torch.nan_to_num(apart, nan=1e9).tolist()

    found = crowd.run(
        method,
        torch.zeros(len(RATES), *best.shape, dtype=x.dtype),
        gradient,
        lambda x: SGD(x, lr=1.0),
        workers=WORKERS,
        seconds=seconds,
        until_s=until_s,
        at_s=[until_s * each / POINTS for each in range(POINTS + 1)],
        value=distances,
    )
    ends = found.curve[-1].value
    chosen = ends.index(min(ends))
    return {
        "lr": RATES[chosen],
        "at_the_edge": chosen in (0, len(RATES) - 1),
        "updates": found.updates,
        "distance": ends[chosen],
        "curve": [(seen.seconds, seen.value[chosen]) for seen in found.curve],
    }


# --- the picture ---------------------------------------------------------------------------

SIZE = (960, 440)


def draw(rows: list[dict[str, Any]], frequency: float, folder: Path) -> None:
    """Write unlike-data.svg for light pages, and unlike-data-dark.svg."""
    curves = {row["method"]: list(zip(*row["runs"][0]["curve"], strict=True)) for row in rows}
    groups = [
        {"name": name, "synchronous": name == "synchronous SGD", "curves": {"distance-at_s": curve}}
        for name, curve in curves.items()
    ]
    lowest = min(min(distances) for _, distances in curves.values())
    figures = {"frequency": frequency, "least": 10.0 ** math.floor(math.log10(lowest))}
    data = {"groups": groups, "target": {}, "seconds": "virtual seconds"}
    script = Path(__file__).with_suffix(".js")
    drawing.draw(script, folder / "unlike-data", SIZE, data=data, figures=figures)


def main() -> None:
    parser = common.options(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--into", type=Path, help="draw the pictures there")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    until_s, splits = (150.0, SPLITS[:1]) if asked.quick else (UNTIL_S, SPLITS)
    biases = []
    for split in splits:
        x, y = shards(split)
        whole, frequent = (optimum(x, y, each) for each in (torch.ones(WORKERS), 1 / SECONDS))
        biases.append(((frequent - whole).norm() / whole.norm()).item())
    print(f"frequency: {common.spread(biases)}")
    rows = []
    for name, make in METHODS.items():
        runs = [run(make(), split, until_s) for split in splits]
        ends = [each["distance"] for each in runs]
        rows.append({"method": name, "distance": statistics.median(ends), "runs": runs})
        print(
            f"{name:26s} distance {common.spread(ends)}  lr {[each['lr'] for each in runs]}  "
            f"{runs[0]['updates']} updates",
            flush=True,
        )
        common.write(asked.json, {"until_s": until_s, "frequency": biases, "rows": rows})
    if asked.into is not None:
        draw(rows, biases[0], asked.into)


if __name__ == "__main__":
    main()
