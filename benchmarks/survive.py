"""What a loss costs the others: real processes, of which some are killed at random moments.

Four workers train a model of 10 MB. A victim is killed (SIGKILL), by itself, at a random moment.
The *stall* of a trial is the longest step of any survivor after that, less its median step: the
time that a loss has cost it. A trial is survived if all others end well, with the same bits, and
with everything that they have computed applied or dropped on purpose.

    kill                    one of the workers 1 to 3
    kill rank 0             worker 0, which hosts nothing here: whoever starts the job has the store
    kill two                two of them, at the same moment
    kill while closing      one whose loop has ended, while the others still train or close, too
    kill beside a loader    one that has a DataLoader with two processes, which live on for a while
    kill while saving       one that makes a checkpoint, as all do after every step
    kill while attaching    one of the workers 1 to 3, from the moment at which it calls the others;
                            the stall is how long attach() took the slowest of the others

A row's `quiet_s` is the same without a loss, in the median of the trials: the difference in the
steps before it, but for the first three, since at the end of a round who moves models has a longer
step anyway; for attaching and closing, what they take in a trial of its own, in which nobody is
killed. `beyond_quiet_s` is what a trial's stall has above that: what the loss alone has cost.

There are also those of survive_joins.py, after which a worker is started again, and joins, and of
survive_freezes.py, after which one joins again by itself.

    python benchmarks/survive.py --json survive.json [--trials 20]
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from random import Random
from typing import Any

import survive_freezes
import survive_joins
import torch
from common import options, write
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.testing import Ended, processes
from offbeat.worlds import mesh

WORKERS = 4
SECONDS = 2.0
WIDTH = 1600  # 10 MB
METHODS: dict[str, offbeat.Algorithm] = {
    "SyncSGD()": offbeat.SyncSGD(),
    'EagerSGD("solo")': offbeat.EagerSGD("solo"),
    'EagerSGD("majority")': offbeat.EagerSGD("majority"),
    "ABSSGD()": offbeat.ABSSGD(),
    "LocalSGD(4)": offbeat.LocalSGD(4),
    "WaitFreeLocalSGD()": offbeat.WaitFreeLocalSGD(),
    "DaSGD()": offbeat.DaSGD(),
    "DiLoCo(8)": offbeat.DiLoCo(8),
}
FAULTS = ("kill", "kill rank 0", "kill two", "kill while closing", "kill beside a loader")
FAULTS += (
    "kill while saving",
    "kill while attaching",
    *survive_joins.FAULTS,
    *survive_freezes.FAULTS,
)
ENDS = ("kill while closing", "kill while attaching")
"""Of these the stall is no step's, but the whole of what is interrupted."""
ATTACHING_S = 0.15
SAVING_S = 0.02


def _dies_while_attaching(seconds: float) -> None:
    connected = mesh.connected

    def connect_and_die(*arguments: Any) -> Any:
        survive_joins.die_in(seconds)
        return connected(*arguments)

    mesh.connected = connect_and_die


def _dies_while_saving(dp: offbeat.Attachment, moment_s: float) -> None:
    """From that moment on, at a random moment of the next checkpoint."""
    save, begun_s = dp.state_dict, time.monotonic()

    def save_and_die() -> dict[str, Any]:
        if time.monotonic() - begun_s >= moment_s:
            survive_joins.die_in(Random(moment_s).uniform(0.0, SAVING_S))
        return save()

    dp.state_dict = save_and_die  # type: ignore[method-assign]


def train(name: str, fault: str, victims: tuple[int, ...], moment_s: float) -> dict[str, Any]:
    """One worker of one trial."""
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    steps: list[tuple[float, float]] = []
    loader_workers = 2 if "loader" in fault else 0
    loader = DataLoader(
        TensorDataset(torch.randn(32, WIDTH)),
        batch_size=8,
        num_workers=loader_workers,
        persistent_workers=loader_workers > 0,
    )
    attaches = fault == "kill while attaching"
    if attaches and int(os.environ["RANK"]) in victims:
        _dies_while_attaching(Random(moment_s).uniform(0.0, ATTACHING_S))
    attaching_s = time.monotonic()
    with offbeat.attach(model, optimizer, METHODS[name], survive=True) as dp:
        attached_s = time.monotonic() - attaching_s
        batches = iter(loader)
        (batch,) = next(batches)
        dies, began = dp.rank in victims, time.monotonic()
        closes, saves = fault == "kill while closing", fault == "kill while saving"
        if dies and saves:
            _dies_while_saving(dp, moment_s)
        elif dies and not closes and not attaches:
            survive_joins.die_in(moment_s)
        for _ in dp.until(seconds=moment_s if closes else SECONDS):
            from_s = time.monotonic()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if saves:
                dp.state_dict()
            steps.append((from_s - began, time.monotonic() - from_s))
        if dies and closes:
            survive_joins.die_in(Random(moment_s).uniform(0.0, 0.05))
        closing_s = time.monotonic()
    closed_s = time.monotonic() - closing_s
    stats = dp.stats()
    after = [took_s for from_s, took_s in steps if from_s + took_s >= moment_s] or [0.0]
    before = [took_s for from_s, took_s in steps[3:] if from_s + took_s < moment_s] or [0.0]
    usual = statistics.median([took_s for _, took_s in steps])
    lost = stats.computed_samples - stats.applied_samples - stats.dropped_samples
    return {
        "stall_s": closed_s if closes else attached_s if attaches else max(0.0, max(after) - usual),
        "quiet_s": max(0.0, max(before) - usual),
        "step_s": usual,
        "identical": bool(stats.replicas_identical),
        "kept": abs(lost) < 1e-3,
        "lost_samples": stats.lost_samples,
    }


def trial(name: str, fault: str, random: Random) -> dict[str, Any]:
    """Start workers, lose some, and see how the others end."""
    if fault in survive_joins.FAULTS:
        return survive_joins.trial(METHODS[name], fault, random)
    if fault in survive_freezes.FAULTS:
        return survive_freezes.trial(METHODS[name], fault, random)
    victims = {
        "kill rank 0": (0,),
        "kill two": tuple(random.sample(range(WORKERS), 2)),
    }.get(fault, (random.randrange(1, WORKERS),))
    moment_s = random.uniform(0.3, SECONDS - 0.5)
    quiet = started(name, fault, (), moment_s) if fault in ENDS else []
    ended = started(name, fault, victims, moment_s)
    fired = all(ended[rank].exit_code == -signal.SIGKILL for rank in victims)
    others = [each for each in ended if each.rank not in victims]
    told = [each.result for each in others if each.result is not None]
    for each in others:
        if each.error is not None:
            print(f"    worker {each.rank}: {each.error!r}", flush=True)
    whole = len(told) == len(others) and all(each["kept"] for each in told)
    usual = [each.result["stall_s"] for each in quiet if each.result is not None]
    return {
        "fired": fired,
        "survived": whole,
        "identical": whole and all(each["identical"] for each in told),
        "stall_s": max((each["stall_s"] for each in told), default=None),
        "quiet_s": max(usual or [each["quiet_s"] for each in told], default=None),
        "step_s": statistics.median([each["step_s"] for each in told]) if told else None,
        "lost_samples": told[0]["lost_samples"] if told else None,
    }


def started(name: str, fault: str, victims: tuple[int, ...], moment_s: float) -> list[Ended]:
    return processes(train, WORKERS, name, fault, victims, moment_s, check=False, time_out_s=40)


def row(name: str, fault: str, trials: int) -> dict[str, Any]:
    random = Random(f"{name} {fault}")
    all_of = [trial(name, fault, random) for _ in range(trials)]
    fired = [each for each in all_of if each["fired"]]
    told = [each for each in fired if each["stall_s"] is not None]
    stalls = [each["stall_s"] for each in told]
    beyond = [max(0.0, each["stall_s"] - (each.get("quiet_s") or 0.0)) for each in told]
    again = survive_freezes.again(fired) if fault in survive_freezes.FAULTS else {}
    return {
        "fault": fault,
        "algorithm": name,
        "trials": len(fired),
        "not_fired": trials - len(fired),
        "survived": sum(each["survived"] for each in fired),
        "replicas_identical": sum(each["identical"] for each in fired),
        "stall_s": {
            "median": statistics.median(stalls) if stalls else None,
            "max": max(stalls, default=None),
        },
        "beyond_quiet_s": {
            "median": statistics.median(beyond) if beyond else None,
            "max": max(beyond, default=None),
        },
        "quiet_s": statistics.median([each.get("quiet_s") or 0.0 for each in fired] or [0.0]),
        "step_s": statistics.median([each["step_s"] for each in fired if each["step_s"]] or [0.0]),
        "lost_samples": [each.get("lost_samples") for each in fired],
        **again,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--trials", type=int, default=20, help="of each row")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    arguments = parser.parse_args()
    trials = 2 if arguments.quick else arguments.trials
    wanted = [("kill", name) for name in arguments.methods if "kill" in arguments.faults]
    wanted += [(fault, arguments.methods[0]) for fault in arguments.faults if fault != "kill"]
    rows = []
    for fault, name in wanted:
        rows.append(told := row(name, fault, trials))
        stall = told["stall_s"]
        if stall["median"] is not None:
            print(
                f"{fault:22} {name:24} survived {told['survived']} of {told['trials']}, stall "
                f"median {stall['median']:.3f} s, most {stall['max']:.3f} s; beyond a quiet time "
                f"{told['beyond_quiet_s']['median']:.3f} s",
                flush=True,
            )
        write(arguments.json, {"workers": WORKERS, "rows": rows})


if __name__ == "__main__":
    main()
