"""What one slow rank costs the fast one inside Lightning and the Trainer of transformers.

Two real ranks over Gloo; the second sleeps 50 ms longer in every step. A step is a real forward and
backward pass of a small model and a sleep that stands for an accelerator: 10 ms in all. "own step"
is the framework's loop on one device, in two processes at the same time that know nothing of each
other. Lightning logs a value with sync_dist=True at every step, the Trainer logs at every step and
weighs by tokens: as many scripts do.

    ddp              the framework as it is
    sync             SyncSGD
    solo             EagerSGD("solo")
    solo, delay      EagerSGD("solo", delay=1)
    wait-free        WaitFreeLocalSGD()

    python benchmarks/frameworks.py [--only lightning|transformers] [--quick] [--json FILE]
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import offbeat

COMPUTE_S = 0.010
SLOWED_BY_S = 0.050
WARM_UP_STEPS = 10
BATCH = 4
OWN = "own step"
ALGORITHMS: dict[str, offbeat.Algorithm] = {
    "sync": offbeat.SyncSGD(),
    "solo": offbeat.EagerSGD("solo"),
    "solo, delay": offbeat.EagerSGD("solo", delay=1),
    "wait-free": offbeat.WaitFreeLocalSGD(),
}
FRAMEWORKS = ("lightning", "transformers")
STARTS: list[float] = []


def compute(run: Any) -> Any:
    """One step's forward pass, which takes as long as this rank's device does."""
    began = time.monotonic()
    STARTS.append(began)
    found = run()
    slowed = os.environ.get("RANK") == "1"
    rest_s = COMPUTE_S + SLOWED_BY_S * slowed - (time.monotonic() - began)
    time.sleep(max(0.0, rest_s))
    return found


def lightning(name: str, steps: int) -> None:
    import lightning.pytorch as pl

    from offbeat.integrations.lightning import OffbeatStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

        def training_step(self, batch: Any, index: int) -> Tensor:
            (x,) = batch
            loss: Tensor = compute(lambda: nn.functional.mse_loss(self.body(x), x))
            self.log("loss", loss, on_step=True, sync_dist=name != OWN)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    ranks = 1 if name == OWN else 2
    strategy: Any = {OWN: "auto", "ddp": "ddp"}.get(name) or OffbeatStrategy(ALGORITHMS[name])
    data = TensorDataset(torch.randn(steps * BATCH * ranks, 64))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(data, batch_size=BATCH))


class Texts(Dataset[dict[str, Tensor]]):
    """Texts of one length."""

    def __init__(self, texts: int) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return self.texts

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = torch.arange(index, index + 16) % 32
        return {"input_ids": text, "labels": text}


def transformers(name: str, steps: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from offbeat.integrations.transformers import OffbeatTrainer

    class Timed:
        def compute_loss(self, *given: Any, **settings: Any) -> Any:
            return compute(lambda: super(Timed, self).compute_loss(*given, **settings))  # type: ignore[misc]

    ours = {} if name in (OWN, "ddp") else {"algorithm": ALGORITHMS[name]}
    kind: Any = OffbeatTrainer if ours else Trainer
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, loss_type="ForCausalLMLoss"
    )
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        optim="sgd",
    )
    ranks = 1 if name == OWN else 2
    trainer = type("Trainer", (Timed, kind), {})(
        GPT2LMHeadModel(config), arguments, train_dataset=Texts(steps * BATCH * ranks), **ours
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def measure(framework: str, names: list[str], steps: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds a step of this rank, for each contestant and repeat, in turns."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    took: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            STARTS.clear()
            {"lightning": lightning, "transformers": transformers}[framework](name, steps)
            times = STARTS[WARM_UP_STEPS:]
            gaps = [after - before for before, after in itertools.pairwise(times)]
            took[name].append(1e3 * statistics.fmean(gaps))
    return took


def alone(framework: str, steps: int, repeats: int) -> list[float]:
    """The framework's own loop, in two processes that know nothing of each other."""
    command = [sys.executable, __file__, "--worker", framework, "--names", OWN]
    command += ["--steps", str(steps), "--repeats", str(repeats)]
    folder = Path(tempfile.mkdtemp())
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    running = [
        subprocess.Popen([*command, "--to", str(folder / f"{each}")], env=environment)
        for each in range(2)
    ]
    for each in running:
        assert each.wait() == 0
    found: list[float] = json.loads((folder / "0").read_text())[OWN]
    return found


def together(framework: str, steps: int, repeats: int) -> dict[str, list[float]]:
    """DDP and ours, on two ranks; what the fast one took."""
    path = Path(tempfile.mkdtemp()) / "took"
    names = ",".join(["ddp", *ALGORITHMS])
    common.torchrun(
        *(__file__, 2, "--worker", framework, "--names", names),
        *("--steps", str(steps), "--repeats", str(repeats), "--to", str(path)),
    )
    found: dict[str, list[float]] = json.loads(path.read_text())
    return found


def main() -> None:
    parser = common.options(__doc__ or "")
    parser.add_argument("--only", choices=FRAMEWORKS)
    parser.add_argument("--worker", choices=FRAMEWORKS)
    for name in ("--names", "--to"):
        parser.add_argument(name, default="")
    for name in ("--steps", "--repeats"):
        parser.add_argument(name, type=int, default=0)
    given = parser.parse_args()
    if given.worker:
        # apart by ", " belongs to a name
        names = given.names.replace(", ", ";").split(",")
        names = [each.replace(";", ", ") for each in names]
        took = measure(given.worker, names, given.steps, given.repeats)
        if os.environ.get("RANK", "0") == "0":
            Path(given.to).write_text(json.dumps(took))
        return
    steps, repeats = (50, 1) if given.quick else (60, 3)
    rows = []
    for framework in [given.only] if given.only else FRAMEWORKS:
        took = {OWN: alone(framework, steps, repeats), **together(framework, steps, repeats)}
        own_ms = statistics.median(took[OWN])
        for name, values in took.items():
            times = statistics.median(values) / own_ms
            rows.append({"framework": framework, "name": name, "ms": values, "over_own": times})
            print(f"{framework:13} {name:12} {common.spread(values):32} ms, {times:.2f} of its own")
    common.write(given.json, {"steps": steps, "rows": rows})


if __name__ == "__main__":
    main()
