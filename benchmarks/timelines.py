"""The pictures of the algorithms' pages: four workers over a few rounds, from a virtual run each.

    python benchmarks/timelines.py          write docs/timelines/*.svg

Worker 2 takes a third longer than 0 and 1, worker 3 twice as long, and worker 1 stalls once; an
exchange of the whole model takes a quarter of a step. An SVG follows the reader's light or dark
setting by itself. Virtual time: the same pictures on every machine, which tests/test_timelines.py
compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import torch
from torch import nn

import offbeat
from offbeat.clusters import Cluster
from offbeat.records import Line
from offbeat.report.lines import Begin, checked
from offbeat.report.runs import Run
from offbeat.report.spans import STATES, Span, spans

FOLDER = Path(__file__).parents[1] / "docs" / "timelines"

CLUSTER = Cluster.parse(
    """
    workers = 4
    speed = [1.0, 1.0, 0.75, 0.5]
    [compute]
    step_s = 1.0
    [network]
    latency_s = 0.02
    bandwidth_bytes_per_s = 4000
    [[event]]
    kind = "slow"
    workers = [1]
    factor = 2.5
    from_s = 3.5
    to_s = 5.0
    """
)
SHOWN_S = 12.0

ALGORITHMS: dict[str, offbeat.Algorithm] = {
    "sync": offbeat.SyncSGD(),
    "eager": offbeat.EagerSGD(),
    "msync": offbeat.MSyncSGD(3),
    "abs": offbeat.ABSSGD(),
    "dropcompute": offbeat.DropCompute(3, threshold_s=2.5),
    "nonblocking": offbeat.NonblockingSGD(2),
    "waitfree": offbeat.WaitFreeLocalSGD(),
    "wagma": offbeat.WAGMASGD(),
    "dasgd": offbeat.DaSGD(2),
    "diloco": offbeat.DiLoCo(2),
    "lbbsp": offbeat.LBBSP(2),
    "local": offbeat.LocalSGD(2),
    "dpsgd": offbeat.DPSGD("ring"),
    "dmsgd": offbeat.DmSGD("ring"),
    "decentlam": offbeat.DecentLaM("ring"),
    "edm": offbeat.EDM("lazy-ring"),
    "tracking": offbeat.MomentumTracking("ring"),
    "asgd": offbeat.ASGD(),
    "ringmaster": offbeat.RingmasterASGD(3),
    "rennala": offbeat.RennalaSGD(4),
    "ringleader": offbeat.RingleaderASGD(),
    "rescaled": offbeat.RescaledASGD(),
}

CLAIM = {
    "sync": "SyncSGD, as DistributedDataParallel: everybody waits for the slowest",
    "eager": "EagerSGD: a round starts when half of the workers are there",
    "waitfree": "WaitFreeLocalSGD: nobody waits",
}

# The report's colours (report/page/style.css).
STYLE = """
text { font: 13px ui-sans-serif, -apple-system, Roboto, Arial, sans-serif; fill: #5b6470 }
.heading { font-weight: 600; fill: #1d2229 }
.computing { fill: #2f9b82 } .late { fill: #e5a320 } .dropped { fill: #d2485a }
.abandoned { fill: #8f5a63 } .waiting { fill: #dcdfe4 } .synchronising { fill: #8287d6 }
.round { fill: none; stroke: #1d2229; stroke-width: 1.5 } .dot { fill: #1d2229 }
.axis { stroke: #d4d2cc }
@media (prefers-color-scheme: dark) {
text { fill: #9aa3af } .heading { fill: #e7e9ec }
.computing { fill: #3fae93 } .late { fill: #eab045 } .dropped { fill: #e2667a }
.abandoned { fill: #8a5a64 } .waiting { fill: #363d47 } .synchronising { fill: #8d93e6 }
.round { stroke: #e7e9ec } .dot { fill: #e7e9ec } .axis { stroke: #3a414b }
}
"""
LEFT, LANE, BAR, SCALE = 76, 32, 22, 52
HEADING, AXIS, LEGEND = 24, 30, 28
WIDTH = LEFT + round(SHOWN_S * SCALE) + 16

Panel = tuple[str, list[Line]]
"""A heading, which may be empty, and the records of a run."""


def recorded(algorithm: offbeat.Algorithm) -> list[Line]:
    """Train four workers for a while, and return what happened."""
    lines: list[Line] = []

    def train() -> None:
        model = nn.Linear(10, 1)
        momentum = 0.9 if isinstance(algorithm, offbeat.DmSGD) else 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
        with offbeat.attach(model, optimizer, algorithm) as dp:
            for _ in dp.until(seconds=SHOWN_S + 4):
                optimizer.zero_grad()
                model(torch.randn(4, 10)).square().mean().backward()
                optimizer.step()

    offbeat.run(train, CLUSTER, records=lines.append)
    return lines


def drawn(title: str, panels: Sequence[Panel]) -> str:
    """Return the picture: for every run a lane for each worker, and a line through each round."""
    parts: list[str] = []
    states: set[int] = set()
    top = 2
    for heading, lines in panels:
        lines = _from_the_first_step(lines)
        found = [span for span in _spans(lines) if span.from_s < SHOWN_S]
        states.update(span.state for span in found)
        if heading:
            top += HEADING
            parts.append(f'<text class="heading" x="{LEFT}" y="{top - 8}">{escape(heading)}</text>')
        parts += [*_lanes(top), *(_bar(top, span) for span in found), *_rounds(top, lines)]
        top += 4 * LANE
    parts += [*_axis(top), *_legend(top + AXIS, [STATES[state] for state in sorted(states)])]
    size = f"{WIDTH} {top + AXIS + LEGEND}"
    width, height = size.split()
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{width}" '
            f'height="{height}" role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            *parts,
            "</svg>\n",
        ]
    )


def _spans(lines: list[Line]) -> list[Span]:
    run = Run(Begin(kind="run", label="a virtual run"))
    for number, line in enumerate(lines, start=1):
        if (known := checked(line, Path("a virtual run"), number)) is not None:
            run.add(known)
    return spans(run)


def _from_the_first_step(lines: list[Line]) -> list[Line]:
    began_s = min(line["from_s"] for line in lines if line["kind"] == "compute")
    moments = ("from_s", "to_s", "at_s")
    return [
        {key: value - began_s if key in moments else value for key, value in line.items()}
        for line in lines
    ]


def _x(seconds: float) -> float:
    return round(LEFT + min(seconds, SHOWN_S) * SCALE, 1)


def _bar(top: int, span: Span) -> str:
    left, right = _x(span.from_s), _x(span.to_s)
    width = max(round(right - left - 1, 1), 0.5)  # a gap shows where one step ends
    return (
        f'<rect class="{STATES[span.state]}" x="{left}" y="{top + span.rank * LANE}" '
        f'width="{width}" height="{BAR}" rx="2"/>'
    )


def _rounds(top: int, lines: list[Line]) -> Iterator[str]:
    """Where each worker has the result of a round; a line joins those of the same one."""
    ends: dict[tuple[int, tuple[int, ...]], dict[int, float]] = {}
    for line in lines:
        if line["kind"] == "round":
            key = line["round"], tuple(line.get("group") or ())
            ends.setdefault(key, {})[line["rank"]] = line["at_s"]
    for _, by_rank in sorted(ends.items()):
        if max(by_rank.values()) >= SHOWN_S:
            continue
        points = [
            (_x(at_s), top + rank * LANE + BAR // 2) for rank, at_s in sorted(by_rank.items())
        ]
        yield f'<polyline class="round" points="{" ".join(f"{x},{y}" for x, y in points)}"/>'
        yield from (f'<circle class="dot" cx="{x}" cy="{y}" r="2.5"/>' for x, y in points)


def _lanes(top: int) -> Iterator[str]:
    for rank in range(4):
        yield f'<text x="0" y="{top + rank * LANE + 16}">worker {rank}</text>'


def _axis(top: int) -> Iterator[str]:
    yield f'<line class="axis" x1="{LEFT}" x2="{_x(SHOWN_S)}" y1="{top}" y2="{top}"/>'
    for second in range(0, round(SHOWN_S) + 1, 2):
        unit = " s" if second == round(SHOWN_S) else ""
        yield f'<text x="{_x(second)}" y="{top + 17}" text-anchor="middle">{second}{unit}</text>'


def _legend(top: int, states: list[str]) -> Iterator[str]:
    x, y = LEFT, top + 16
    for state in states:
        yield f'<rect class="{state}" x="{x}" y="{y - 10}" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 17}" y="{y}">{state}</text>'
        x += 30 + round(6.5 * len(state))
    yield f'<polyline class="round" points="{x + 4},{y - 11} {x + 4},{y + 3}"/>'
    yield f'<circle class="dot" cx="{x + 4}" cy="{y - 4}" r="2.5"/>'
    yield f'<text x="{x + 12}" y="{y}">a round is applied</text>'


def pictures() -> Iterator[tuple[str, str]]:
    """Draw them, each with the name of its file: one for every algorithm, then the README's."""
    runs = {name: recorded(algorithm) for name, algorithm in ALGORITHMS.items()}
    where = f"four workers over {SHOWN_S:g} virtual seconds"
    for name, algorithm in ALGORITHMS.items():
        yield f"{name}.svg", drawn(f"{type(algorithm).__name__}: {where}", [("", runs[name])])
    panels = [(heading, runs[name]) for name, heading in CLAIM.items()]
    yield "claim.svg", drawn(f"Synchronous SGD and two others: {where}", panels)


def main() -> None:
    """Write them all."""
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures():
        (FOLDER / name).write_text(picture, encoding="utf-8")
        print(f"drawn: {name}")


if __name__ == "__main__":
    main()
