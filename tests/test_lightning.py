"""Lightning over offbeat, on two real processes: what DDP does, and what DDP cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning_runs as runs

import offbeat
from offbeat.integrations import common
from offbeat.integrations.lightning import OffbeatStrategy

pytestmark = [pytest.mark.real, pytest.mark.frameworks]


Run = Callable[..., list[Any]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.3, "accumulate_grad_batches": 4},
        {"precision": "bf16-mixed"},
    ],
    ids=["clipped and accumulated", "bf16"],
)
def test_sync_sgd_is_ddp_to_the_bit(
    settings: dict[str, Any], tmp_path: Path, framework_workers: Run
) -> None:
    zero, one = framework_workers(runs.equals_ddp, str(tmp_path), settings)
    for ddp, ours in (zero, one):
        assert same(ddp.pop("parameters"), ours.pop("parameters"))
        assert ddp == ours
        assert ours["losses"][-1] < ours["losses"][0]
    assert zero[1]["rate"] < 0.1


@pytest.mark.parametrize("algorithm", [offbeat.SyncSGD(), offbeat.ABSSGD()])
def test_a_checkpoint_resumes_to_the_bit(
    algorithm: offbeat.Algorithm, tmp_path: Path, framework_workers: Run
) -> None:
    ended = framework_workers(runs.resumed, str(tmp_path), algorithm)
    assert same(ended[0]["rest"], ended[1]["rest"])
    assert "offbeat" in ended[0]["keys"]
    if algorithm == offbeat.SyncSGD():  # of the other, rounds are a matter of timing
        assert same(ended[0]["whole"], ended[0]["rest"])


def test_models_that_are_averaged_resume_from_what_all_agree_on(
    tmp_path: Path, framework_workers: Run
) -> None:
    local = offbeat.WaitFreeLocalSGD()
    ended = framework_workers(runs.resumed, str(tmp_path), local)
    assert "offbeat" not in ended[0]["keys"]
    assert same(ended[0]["rest"], ended[1]["rest"])


def test_dealt_data_go_to_the_fast_worker_and_epochs_end_for_all(
    tmp_path: Path, framework_workers: Run
) -> None:
    zero, one = framework_workers(runs.dealt, str(tmp_path))
    assert zero["steps"] > one["steps"]
    assert zero["epochs"] == one["epochs"] == 2  # stopped early, on both
    assert zero["steps"] + one["steps"] == zero["epochs"] * runs.SAMPLES // 2
    assert same(zero["parameters"], one["parameters"])


def test_a_signal_to_one_worker_ends_all_with_the_same_round(
    tmp_path: Path, framework_workers: Run
) -> None:
    zero, one = framework_workers(runs.terminated, str(tmp_path))
    assert zero["ended"] == one["ended"] == "SIGTERMException"
    assert zero["steps"] == one["steps"] < 12
    assert same(zero["parameters"], one["parameters"])
    assert zero["handler"]


def test_settings_that_do_not_fit_are_refused_with_what_to_change() -> None:
    with pytest.raises(TypeError, match="has no find_unused_parameters: DistributedDataParallel"):
        OffbeatStrategy(find_unused_parameters=True)
    with pytest.raises(TypeError, match="clip_norm is Lightning's to say"):
        OffbeatStrategy(clip_norm=1.0)
    with pytest.raises(TypeError, match="survive is not for Lightning"):
        OffbeatStrategy(survive=True)
    with pytest.raises(TypeError, match="algorithm must be an offbeat algorithm"):
        OffbeatStrategy("eager")  # type: ignore[arg-type]


def test_runs_that_do_not_fit_are_refused_with_what_to_change(
    tmp_path: Path, framework_workers: Run
) -> None:
    for told in framework_workers(runs.refusals, str(tmp_path)):
        assert "clipped by norm only: leave out gradient_clip_algorithm" in told["value"]
        assert "sync_batchnorm has all workers wait" in told["batchnorm"]
        assert "FSDPPrecision belongs to a strategy that shards the model" in told["plugin"]
        assert "has returned 2: join them into one" in told["two"]
        assert "2 of the optimizer's 2 parameters are not the model's" in told["strange"]
        assert "ModelCheckpoint(every_n_train_steps=...) has all of them meet" in told["saves"]
        assert "val_check_interval has all of them meet at one" in told["validates"]


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.metadata, "version", lambda name: "3.0.1")
    with pytest.raises(ImportError, match=r"made for lightning 2.6, and this is 3.0.1: pip inst"):
        common.check_version("lightning", [])
    monkeypatch.setattr(common.metadata, "version", lambda name: "2.1.0")
    with pytest.raises(ImportError, match=r"and this is 2.1.0, which has no what: pip install"):
        common.check_version("lightning", [(common, "what")])
