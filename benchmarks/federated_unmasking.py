"""Does FedCBDR find rare samples, and does it without un-masking? What clients keep of one task.

    python benchmarks/federated_unmasking.py --json benchmarks/results/federated_unmasking.json
    python benchmarks/federated_unmasking.py --json ... --into docs       draw it, too

Fashion-MNIST, two classes, of which the second has fewer samples; 5 clients, Dirichlet(0.5), 10
rounds of 2 epochs in virtual time, as in federated.py. Then every way to choose draws 100 samples
by the same model. Shown is the share of the rare class in what is kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import held, options, write
from torch import Tensor, nn

import offbeat
from offbeat import federated as fed
from offbeat.federated.client import Client
from offbeat.lab.federation import tasks

CLIENTS, BUDGET, SEEDS = 5, 100, 5
RARE = (1.0, 0.3, 0.1, 0.03)
"""Of the samples of the second class."""
CHOICES = {
    "leverage": {"by_class": False},
    "leverage by SVD": {"by_class": False, "scores": "svd"},
    "leverage without un-masking": {"by_class": False, "scores": "svd-masked"},
}


class Every(fed.Method):
    """Fine-tuning; in the end every way to choose has its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: dict[str, fed.Method] = {"uniform": fed.Uniform(BUDGET)}
        for name, settings in CHOICES.items():
            self.ways[name] = fed.FedCBDR(BUDGET, **settings)  # type: ignore[arg-type]
        self.kept: dict[str, list[int]] = {}

    def begin(self, client: Client, model: nn.Module, x: Tensor, y: Tensor) -> None:
        for each in (super(), *self.ways.values()):
            each.begin(client, model, x, y)

    def end(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        for name, each in self.ways.items():
            each.end(model, x, y)
            self.kept[name] = self.client.counts(each.buffer.histogram(self.client.new)).tolist()


def measured(task: tasks.Task, rare: float, seed: int) -> dict[str, Any]:
    """One training, and what each way to choose keeps of both classes."""
    x, y, test_x, test_y = task.samples(seed)
    pair = fed.class_groups(torch.arange(tasks.CLASSES), 5, seed=seed)[0]
    often, seldom = ((y == kind).nonzero().flatten() for kind in pair)
    some = torch.cat([often, seldom[: round(rare * len(seldom))]])
    stream = fed.Stream.of(
        x[some], y[some], tasks=1, clients=CLIENTS, seed=seed, classes=(tuple(pair),)
    )

    def client() -> dict[str, list[int]]:
        torch.manual_seed(seed)
        model, method = task.model(), Every()
        fed.learn(model, stream, method, task.settings, (test_x, test_y))
        return method.kept

    kept = offbeat.run(client, "uniform-8", workers=CLIENTS).results[0]
    share = 1 - len(often) / len(some)
    return {"rare": rare, "seed": seed, "share_of_data": share, "kept": kept}


def shares(rows: Sequence[dict[str, Any]], name: str, rare: float) -> list[float]:
    """The share of the rare class in what is kept, seed by seed."""
    its = [row["kept"][name] for row in rows if row["rare"] == rare]
    return [seldom / (often + seldom) for often, seldom in its]


def of_data(rows: Sequence[dict[str, Any]], rare: float) -> float:
    return statistics.fmean(row["share_of_data"] for row in rows if row["rare"] == rare)


def table(rows: Sequence[dict[str, Any]]) -> None:
    for rare in dict.fromkeys(row["rare"] for row in rows):
        print(f"the rare class is {of_data(rows, rare):.1%} of the data, and of what is kept by")
        for name in rows[0]["kept"]:
            found = shares(rows, name, rare)
            least, most = min(found), max(found)
            print(f"    {name:30} {statistics.fmean(found):.1%} ({least:.1%} to {most:.1%})")


# --- the picture -----------------------------------------------------------------------------

LEFT, TOP, WIDTH, HEIGHT, MOST = 70, 60, 420, 280, 0.7
DRAWN = {"leverage": "a4", "leverage without un-masking": "a2", "uniform": "a1"}
STYLE = """
text { font: 13px ui-sans-serif, -apple-system, Roboto, Arial, sans-serif; fill: #5b6470 }
.title { font-size: 16px; font-weight: 650; fill: #1d2229 } .card { fill: #ffffff }
.grid { stroke: #e6e4df } .same { stroke: #5b6470; stroke-dasharray: 4 4 }
.a1 { stroke: #2b6cb8; fill: #2b6cb8 } .a2 { stroke: #cf5f22; fill: #cf5f22 }
.a4 { stroke: #2a8f6d; fill: #2a8f6d } polyline { fill: none !important; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
text { fill: #9aa3af } .title { fill: #e7e9ec } .card { fill: #1b1f25 } .grid { stroke: #2a2f37 }
.same { stroke: #9aa3af } .a1 { stroke: #6aa8ee; fill: #6aa8ee }
.a2 { stroke: #f0935b; fill: #f0935b } .a4 { stroke: #5cc79f; fill: #5cc79f } }
"""


def at(share: float, kept: float) -> tuple[float, float]:
    """Where a point of the picture is."""
    return LEFT + WIDTH * share / MOST, TOP + HEIGHT * (1 - kept / MOST)


def line(way: str, a: tuple[float, float], b: tuple[float, float]) -> str:
    return f'<line class="{way}" x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}"/>'


def text(x: float, y: float, said: str, way: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{way}" text-anchor="{anchor}">{said}</text>'


def curve(rows: Sequence[dict[str, Any]], name: str, way: str, aside: float) -> list[str]:
    """Means over the seeds, with the least and the most; a little aside, so that all are seen."""
    points, parts = [], []
    for rare in RARE:
        found, share = shares(rows, name, rare), of_data(rows, rare) + aside
        points.append(at(share, statistics.fmean(found)))
        parts.append(line(way, at(share, min(found)), at(share, max(found))))
        parts.append(
            f'<circle class="{way}" cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="4"/>'
        )
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [f'<polyline class="{way}" points="{path}"/>', *parts]


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """The share of the rare class in what is kept, over its share of the data."""
    parts = [text(14, 28, "Share of the rare class in what is kept", "title")]
    for percent in range(0, 71, 10):
        low, high = at(0, percent / 100), at(MOST, percent / 100)
        parts += [line("grid", low, high), text(low[0] - 8, low[1] + 4, f"{percent} %", "", "end")]
        below = at(percent / 100, 0)
        parts.append(text(below[0], below[1] + 20, f"{percent} %", "", "middle"))
    parts.append(text(LEFT + WIDTH / 2, TOP + HEIGHT + 44, "its share of the data", "", "middle"))
    parts.append(line("same", at(0, 0), at(MOST, MOST)))
    for number, (name, way) in enumerate(DRAWN.items()):
        parts += curve(rows, name, way, aside=0.006 * (number - 1))
        y = TOP + 30 + 26 * number
        parts += [line(way, (LEFT + WIDTH + 20, y), (LEFT + WIDTH + 44, y))]
        parts.append(text(LEFT + WIDTH + 52, y + 4, name))
    size = f'width="760" height="{TOP + HEIGHT + 60}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n'
        f'<rect class="card" {size}/>\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("--into", type=Path, help="draw unmasking.svg into this folder")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows, task = held(asked.json), tasks.find("fashion")
    done = {(row["rare"], row["seed"]) for row in rows}
    for seed in range(1 if asked.quick else SEEDS):
        for rare in RARE:
            if (rare, seed) not in done:
                rows.append(measured(task, rare, seed))
                write(asked.json, {"rows": rows})
    table(rows)
    if asked.into is not None:
        (asked.into / "unmasking.svg").write_text(picture(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
