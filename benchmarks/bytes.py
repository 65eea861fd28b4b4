"""Step time of every codec over DistributedDataParallel's, on a link that is really slow.

Four ranks, two in each of two network namespaces, joined by one virtual cable whose rate `tbf`
limits in both directions (cable.py; it takes root): the all-reduce of a model of 10 million
parameters has to pass it. Ranks of one namespace talk without a limit.

Beside offbeat's codecs, under `SyncSGD`: DDP as it is, with its `fp16_compress_hook`, and with its
PowerSGD hook (rank 2). Each lives with plain DDP in the same four processes, and they take turns:
in a lap each makes one step, in an order that changes from lap to lap. A step is forward, backward
and update of 8 samples; it lasts until the last rank has ended it. What counts is DDP's step time
over the contestant's of the same lap: the median over laps, with quartiles. Each warms up before
the link is limited.

Only one thing is attached at a time: whatever else is attached is away while one steps, and says
so to all workers, which takes the processor's time from whoever is measured. For the same reason
ranks meet before a step by a collective that offbeat does not see.

"auto" makes steps by itself until it has decided, on the first link and again on each further one,
which is in the figures; so its laps are those of what it has chosen.

PowerSGD has all gradients in one bucket here. With several, each issues its second and third
all-reduce when its first has ended, so in an order that differs between ranks; Gloo pairs them by
their order, and ends with an error ("op.preamble.length <= op.nbytes").

`tbf` lets 512 kB pass at once, so a step of the smallest model hardly meets the limit.

Where a codec begins to pay is found by smaller models too: the bandwidth at which a step with it
lasts as long as one without, between two links of which one is faster with and one without it; step
times are taken to be linear in seconds a byte there.

    python benchmarks/bytes.py [--quick] [--json FILE] [--links unlimited,1gbit] [--links 100mbit]
                               [--parameters 10000000] [--only NAME,...]

A file of figures is added to: whoever is measured again, on a link and with a model, is replaced.

Settings, fixed before the first results: LAPS, WARM_UP, TIMES.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cable
import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import offbeat

RANKS = 4
SAMPLES = 8
WARM_UP = 3
"""Steps of each contestant; PowerSGD begins with the third."""
MBITS = {"100mbit": 100.0, "1gbit": 1000.0, "unlimited": math.inf}
LAPS = {"100mbit": 3, "1gbit": 8, "unlimited": 120}
TIMES = {10_000_000: 1, 1_000_000: 1, 100_000: 2}
"""So many times as many laps, by the model's number of parameters."""
SETTLES = 60
"""Steps within which "auto" decides; else the run fails."""
WIDTHS = {10_000_000: 1536, 1_000_000: 440, 100_000: 106}
"""Of the model, by its number of parameters."""
CODECS: dict[str, Any] = {
    "none": None,
    "bfloat16": offbeat.Half(),
    "float16": offbeat.Half("float16"),
    "int8": offbeat.Int8(),
    "int4": offbeat.Int4(),
    "global_qsgd_standard": offbeat.GlobalQSGD(),
    "global_qsgd_foretold": offbeat.GlobalQSGD(margin=1.5),
    "global_qsgd_exponential": offbeat.GlobalQSGD("exponential"),
    "auto": "auto",
}
CONTESTANTS = ["ddp_fp16", "ddp_powersgd", *CODECS]


# --- one rank ----------------------------------------------------------------------------------


def net(parameters: int) -> nn.Module:
    torch.manual_seed(0)
    width = WIDTHS[parameters]
    layers: list[nn.Module] = [nn.Linear(512, width), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    last = width * 11 // 12
    return nn.Sequential(*layers, nn.Linear(width, last), nn.Linear(last, 10))


class Contestant:
    """A model, its optimizer and what synchronises it."""

    def __init__(self, name: str, parameters: int) -> None:
        self.name = name
        model = net(parameters)
        torch.manual_seed(dist.get_rank())
        self._x, self._y = torch.randn(SAMPLES, 512), torch.randint(0, 10, (SAMPLES,))
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self._dp: offbeat.Attachment | None = None
        if name.startswith("ddp"):
            self._model: nn.Module = _ddp(name, model)
        else:
            self._model = model
            self._dp = offbeat.attach(model, self._optimizer, codec=CODECS[name])

    def step(self) -> None:
        self._optimizer.zero_grad()
        nn.functional.cross_entropy(self._model(self._x), self._y).backward()
        self._optimizer.step()

    @property
    def codes(self) -> bool | None:
        """Whether an "auto" has decided to; None while it tries."""
        assert self._dp is not None
        return self._dp._replica.coder.pays  # type: ignore[union-attr, no-any-return]

    def close(self) -> None:
        if self._dp is not None:
            self._dp.close()


def _ddp(name: str, model: nn.Module) -> nn.Module:
    if name == "ddp_powersgd":
        ddp = DistributedDataParallel(model, bucket_cap_mb=1000)
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2)
        state.start_powerSGD_iter = 2
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return ddp
    ddp = DistributedDataParallel(model)
    if name == "ddp_fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


def timed(step: Callable[[], None]) -> float:
    """Begin when all are here; as offbeat knows nothing of it, it is not away meanwhile."""
    dist.barrier(async_op=True).get_future().wait()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def laps(contestants: Sequence[Contestant], count: int) -> list[list[float]]:
    """One step of each a lap; each lasts until the last rank has ended it."""
    seconds: list[list[float]] = [[] for _ in contestants]
    for lap in range(count):
        for number in random.Random(lap).sample(range(len(contestants)), len(contestants)):
            seconds[number].append(timed(contestants[number].step))
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    found: list[list[float]] = longest.tolist()
    return found


def settled(auto: Contestant, again: bool) -> tuple[int, float]:
    """Have "auto" decide, again if it has before: after how many steps and seconds it has."""
    began, tried = time.perf_counter(), not again
    for step in range(1, SETTLES + 1):
        auto.step()
        tried = tried or auto.codes is None
        if tried and auto.codes is not None:
            return step, time.perf_counter() - began
    return SETTLES, time.perf_counter() - began  # the link it had before is like this one


def worker(job: dict[str, Any], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp = Contestant("ddp", job["parameters"])
    warm_up(ddp)
    for name in job["names"]:
        contestant = Contestant(name, job["parameters"])
        if name != "auto":
            warm_up(contestant)
        for number, link in enumerate(job["links"]):
            cable.limit_to(link, folder)
            row: dict[str, Any] = {"link": link, "name": name}
            if name == "auto":
                steps, settled_s = settled(contestant, again=number > 0)
                codes = contestant.codes
                row |= {"auto_codes": codes, "auto_steps": steps, "auto_settled_s": settled_s}
            ddp_s, step_s = laps((ddp, contestant), job["laps"][link])
            if dist.get_rank() == 0:
                cable.tell(row | {"ddp_s": ddp_s, "step_s": step_s}, folder)
        cable.limit_to("unlimited", folder)
        contestant.close()
    dist.barrier()
    dist.destroy_process_group()


def warm_up(contestant: Contestant) -> None:
    for _ in range(WARM_UP):
        contestant.step()


# --- the figures -------------------------------------------------------------------------------


def over(base: Sequence[float], other: Sequence[float]) -> list[float]:
    """Lap by lap: the median ratio, and its quartiles."""
    ratios = [one / two for one, two in zip(base, other, strict=False)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [round(each, 3) for each in (middle, low, high)]


def figures(known: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The row of a link and a model, with what one more contestant came to."""
    name = row["name"]
    times = {each: [round(taken, 5) for taken in row[each]] for each in ("ddp_s", "step_s")}
    found = {**known, **{key: value for key, value in row.items() if key.startswith("auto")}}
    speed = over(row["ddp_s"], row["step_s"])
    found["speed_over_ddp"] = {**known.get("speed_over_ddp", {}), name: speed}
    found["laps"] = {**known.get("laps", {}), name: times}
    every = [each for laps in found["laps"].values() for each in laps["ddp_s"]]
    found["ddp_s"] = round(statistics.median(every), 5)
    return found


def _key(row: dict[str, Any]) -> tuple[str, int]:
    return row["link"], row["parameters"]


def break_even(rows: Sequence[dict[str, Any]]) -> dict[str, float | str]:
    """By codec, of one model: the Mbit/s at which it takes as long as none."""
    found: dict[str, float | str] = {}
    inverse = sorted((1 / MBITS[row["link"]], row["ddp_s"], row["speed_over_ddp"]) for row in rows)
    for name in CODECS:
        gains = [
            (each, ddp_s / speed["none"][0] - ddp_s / speed[name][0])
            for each, ddp_s, speed in inverse
            if name in speed and "none" in speed and name not in ("none", "auto")
        ]
        if len(gains) < 2:
            continue
        found[name] = "none of these" if gains[-1][1] <= 0 else "all of these"
        for (fast, loss), (slow, gain) in itertools.pairwise(gains):
            if loss <= 0 < gain:
                found[name] = round(1 / (fast + (slow - fast) * -loss / (gain - loss)))
    return found


def _ended(*_: object) -> None:
    """Go, and remove the namespaces: a second signal must not interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit("ended from outside")


def main() -> None:
    parser = common.options("Step time of codecs over DDP's, on a slow link.")
    parser.add_argument("--links", default="unlimited,1gbit,100mbit")
    parser.add_argument("--parameters", type=int, choices=WIDTHS, default=10_000_000)
    parser.add_argument("--only", default="")
    parser.add_argument("--worker", nargs=2)
    options = parser.parse_args()
    if options.worker:
        worker(json.loads(options.worker[0]), Path(options.worker[1]))
        return
    signal.signal(signal.SIGTERM, _ended)
    links = options.links.split(",")
    names = options.only.split(",") if options.only else CONTESTANTS
    part = 2 if options.quick else 1
    times = TIMES[options.parameters]
    job = {
        "links": links,
        "parameters": options.parameters,
        "names": names,
        "laps": {link: max(2, times * count // part) for link, count in LAPS.items()},
    }
    rows = {_key(each): each for each in common.held(options.json)}
    command = (sys.executable, __file__, "--worker", json.dumps(job))
    for row in cable.run_ranks(RANKS, *command):
        new = {"link": row["link"], "parameters": options.parameters}
        rows[_key(new)] = found = figures(rows.get(_key(new), new), row)
        speed = found["speed_over_ddp"][row["name"]]
        print(row["link"], row["name"], speed, {k: row[k] for k in row if "auto" in k}, flush=True)
        pays = {
            size: break_even([row for key, row in rows.items() if key[1] == size])
            for size in sorted({key[1] for key in rows})
        }
        common.write(options.json, {"pays_below_mbit": pays, "rows": list(rows.values())})
    if options.json is not None:
        print("a codec pays below, Mbit/s:", json.dumps(pays))


if __name__ == "__main__":
    main()
