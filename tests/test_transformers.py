"""Accelerate, and the Trainer of transformers, over offbeat, on two real processes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers_runs as runs

import offbeat
from offbeat.integrations import common
from offbeat.integrations.accelerate import check

pytestmark = [pytest.mark.real, pytest.mark.frameworks]
Run = Callable[..., list[Any]]


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_with_sync_sgd_is_ddp_to_the_bit(precision: str, framework_workers: Run) -> None:
    """Accumulated over four batches, and the mean clipped."""
    for ddp, ours in framework_workers(runs.accelerated, precision):
        assert apart(ddp, ours) == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 4, "max_grad_norm": 0.3},
        {"average_tokens_across_devices": False},
    ],
    ids=["accumulated, clipped, by tokens", "every step the same"],
)
def test_the_trainer_with_sync_sgd_is_ddp(
    settings: dict[str, Any], tmp_path: Path, framework_workers: Run
) -> None:
    for ddp, ours in framework_workers(runs.trained, str(tmp_path), settings):
        assert (ddp["type"], ours["type"]) == ("DistributedDataParallel", "GPT2LMHeadModel")
        assert apart(ddp["parameters"], ours["parameters"]) < 1e-6
        assert ours["rates"] == pytest.approx(ddp["rates"])
        assert ours["eval"] == pytest.approx(ddp["eval"], abs=1e-5)
        assert ours["steps"] == ddp["steps"]


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 4, "max_grad_norm": 0.3}, {}])
def test_with_adamw_only_what_has_no_gradient_is_apart_from_ddp(
    settings: dict[str, Any], tmp_path: Path, framework_workers: Run
) -> None:
    """A bias of the keys changes no attention: its gradient is zero, up to rounding.

    The Trainer divides by the tokens of all workers before it adds, we do after: the last bit of a
    gradient is another. Adam divides by the gradient's own size, and where that is rounding alone
    it makes steps of it: up to the learning rate, to no effect.
    """
    settings = {"optim": "adamw_torch", "learning_rate": 1e-3, **settings}
    for ddp, ours in framework_workers(runs.trained, str(tmp_path), settings):
        keys = ddp["names"].index("transformer.h.0.attn.c_attn.bias")
        for end in (ddp, ours):
            end["parameters"][keys].chunk(3)[1].zero_()
        assert apart(ddp["parameters"], ours["parameters"]) < 1e-6
        assert ours["eval"] == pytest.approx(ddp["eval"], abs=1e-6)


def test_the_trainer_resumes_to_the_bit(tmp_path: Path, framework_workers: Run) -> None:
    for ended in framework_workers(runs.resumed, str(tmp_path), offbeat.SyncSGD()):
        assert apart(ended["whole"]["parameters"], ended["rest"]["parameters"]) == 0.0
    assert {"offbeat_0.pt", "offbeat_1.pt"} <= {
        path.name for path in (tmp_path / "checkpoint-8").iterdir()
    }


def test_the_trainer_issues_no_collective_in_a_step(tmp_path: Path, framework_workers: Run) -> None:
    zero, one = framework_workers(runs.does_not_wait, str(tmp_path))
    assert apart(zero["parameters"], one["parameters"]) == 0.0
    assert zero["steps"] == one["steps"] == 8
    assert zero["warned"] == []


def test_set_ups_that_do_not_fit_are_refused_with_what_to_change(
    tmp_path: Path, framework_workers: Run
) -> None:
    for told in framework_workers(runs.refusals, str(tmp_path)):
        assert "accelerate launch has --use_fsdp, or Accelerator a fsdp_plugin" in told["launched"]
        assert "or Accelerator a fsdp_plugin, and offbeat averages whole models" in told["plugin"]
        assert "leave it out, or run `accelerate config` anew without it" in told["fsdp"]
        assert "accelerate launch has --use_parallelism_config, or" in told["parallel"]
        assert "accelerate launch has --use_deepspeed, or" in told["deepspeed"]
        assert "DistributedDataParallelKwargs, and DDP is not used" in told["kwargs"]
        assert "dispatch_batches has worker 0 hand out every batch" in told["dispatch"]
        assert "4 of the optimizer's 4 parameters are not the model's" in told["strange"]
        assert "is wrapped in DistributedDataParallel" in told["wrapped"]
        assert "ddp_find_unused_parameters and ddp_bucket_cap_mb" in told["unused"]
        assert "algorithm must be an offbeat algorithm" in told["algorithm"]
        assert "clip_norm is the Trainer's to say" in told["clip"]


@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers"])
def test_an_integration_refuses_a_version_that_it_was_not_made_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    module = f"offbeat.integrations.{name}"
    monkeypatch.setattr(common.metadata, "version", lambda package: "99.0.1")
    monkeypatch.delitem(sys.modules, module, raising=False)
    wanted = common.TRIED[name]
    words = rf"{module} was made for {name} {wanted}, and this is 99.0.1: pip install '{name}=="
    with pytest.raises(ImportError, match=words):
        importlib.import_module(module)


@pytest.mark.parametrize("flag", ["--use_fsdp", "--use_megatron_lm"])
def test_a_flag_of_accelerate_launch_that_does_not_fit_is_named(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the environment that `accelerate launch` itself makes for its workers."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    accelerator = runs.accelerator_alone()
    given = launch_command_parser().parse_args([flag, "--num_processes", "2", "train.py"])
    given.mixed_precision, given.dynamo_backend = "no", "no"  # as `launch` sets what is missing
    given.num_machines = 1
    launched = prepare_multi_gpu_env(given)
    for name, value in launched.items():
        if name.startswith("ACCELERATE_"):
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"accelerate launch has {flag}, or Accelerator a "):
        check(accelerator)
