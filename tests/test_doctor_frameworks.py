"""`offbeat doctor` on small scripts: each collective that a framework hides, by file and line."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.doctor.known import KNOWN
from offbeat.doctor.script import examine

pytestmark = [pytest.mark.real, pytest.mark.frameworks]
Run = Callable[..., list[Any]]

LIGHTNING = """
import sys, time
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        time.sleep(0.02 * self.global_rank)
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=sys.argv[1] == "sync_dist")
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1,
                     enable_model_summary=False, **quiet)
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(48, 2)), batch_size=2))
"""

TRAINER = """
import sys, tempfile, time
from transformers import Trainer, TrainingArguments
from transformers_runs import Texts, gpt

class Slow(Trainer):
    def training_step(self, *given, **settings):
        time.sleep(0.02 * self.args.process_index)
        return super().training_step(*given, **settings)

args = TrainingArguments(
    output_dir=tempfile.gettempdir(), num_train_epochs=1, per_device_train_batch_size=2,
    average_tokens_across_devices=sys.argv[1] == "tokens",
    logging_steps=1 if sys.argv[1] == "logging" else 1000,
    save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
)
Slow(gpt(), args, train_dataset=Texts()).train()
"""


def _doctor(script: str, argument: str) -> str:
    import transformers_runs

    transformers_runs._anew()
    os.environ.update(TORCHELASTIC_RUN_ID="test", GROUP_RANK="0")  # as torchrun does
    return str(examine(Path(script), [argument]))


@pytest.mark.parametrize(
    ("text", "argument", "function", "calls", "not_found"),
    [
        (LIGHTNING, "alone", "_broadcast_sigterm_tensor", "broadcast(", "update"),
        (LIGHTNING, "sync_dist", "update", ".sync(", "_maybe_log_save_evaluate"),
        (TRAINER, "tokens", "_get_num_items_in_batch", "gather(", "update"),
        (TRAINER, "logging", "_maybe_log_save_evaluate", "gather(", "_get_num_items_in_batch"),
    ],
    ids=["Lightning's SIGTERM flag", "sync_dist=True", "tokens", "logging_steps=1"],
)
def test_the_doctor_names_file_and_line_of_a_hidden_collective(
    text: str,
    argument: str,
    function: str,
    calls: str,
    not_found: str,
    tmp_path: Path,
    framework_workers: Run,
) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(text)
    zero, one = framework_workers(_doctor, str(tmp_path / "train.py"), argument)
    assert one == "None"
    (what,) = (each for each in KNOWN if each.function == function)
    found = re.findall(
        rf"^\d+\. {re.escape(what.what)}: worker \d waited (\S+) s there, (\d+) times in (\d+) "
        rf"steps, at (\S+):(\d+) in {function} \(dist\.\w+\), from \S+train\.py:\d+\. Instead: ",
        zero,
        re.MULTILINE,
    )
    assert found, zero
    for _, times, steps, file, line in found:
        assert int(times) >= int(steps) - 2 > 0  # hidden in every step
        assert _is_in(Path(file), int(line), function)
    assert any(calls in Path(each[3]).read_text().splitlines()[int(each[4]) - 1] for each in found)
    assert f" in {not_found} (dist." not in zero


def _is_in(file: Path, line: int, function: str) -> bool:
    """Whether a line of a file belongs to a function of that name."""
    return any(
        isinstance(each, ast.FunctionDef)
        and each.name == function
        and each.lineno <= line <= (each.end_lineno or 0)
        for each in ast.walk(ast.parse(file.read_text()))
    )
