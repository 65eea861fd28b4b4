"""What the integrations have in common: which versions fit, and what to refuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.algorithm import Algorithm
from offbeat.algorithms import SyncSGD
from offbeat.attach import Attachment
from offbeat.data import Deal

TRIED = {"lightning": "2.6", "accelerate": "1.15", "transformers": "5.23"}
"""The versions that the tests have run with."""


def check_version(package: str, needs: Iterable[tuple[object, str]]) -> None:
    """Raise ImportError unless this package has what the integration builds on.

    Another major version is refused as such, and so is one that lacks a method which is
    overridden here: it would go on without us, and wait for the slowest worker again.
    """
    tried, found = TRIED[package], metadata.version(package)
    major = int(tried.split(".")[0])
    lacks = [name for owner, name in needs if not hasattr(owner, name)]
    if int(found.split(".")[0]) != major or lacks:
        why = f", which has no {', '.join(lacks)}" if lacks else ""
        raise ImportError(
            f"offbeat.integrations.{package} was made for {package} {tried}, and this is "
            f"{found}{why}: pip install '{package}=={tried}.*'"
        )


def chosen(algorithm: object) -> Algorithm:
    """An algorithm that a user has named, or the one that equals DDP."""
    if algorithm is None:
        return SyncSGD()
    if not isinstance(algorithm, Algorithm):
        raise TypeError(
            f"algorithm must be an offbeat algorithm such as offbeat.SyncSGD(), got {algorithm!r}"
        )
    return algorithm


def plain(optimizer: Any) -> Optimizer:
    """The optimizer that a framework's wrapper holds."""
    for name in ("_optimizer", "optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer):
            return plain(inner)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    return optimizer


def check_holds(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError if the optimizer steps parameters that the model no longer has."""
    mine = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = sum(id(parameter) not in mine for parameter in held)
    if strange:
        raise ValueError(
            f"{strange} of the optimizer's {len(held)} parameters are not the model's: it was made "
            "before the model was moved, converted or replaced; make the optimizer of "
            "model.parameters() after that"
        )


def check_plugin(plugin: object) -> None:
    """Raise ValueError for a plugin of Lightning's that belongs to a strategy which shards."""
    kind = type(plugin).__name__
    if kind.startswith(("FSDP", "DeepSpeed")):
        raise ValueError(
            f"{kind} belongs to a strategy that shards the model, and offbeat averages whole ones: "
            "leave out that plugin, and say Trainer(precision=...)"
        )


def leave(dp: Attachment | None, error: BaseException | None = None) -> None:
    """End an attachment, and let its optimizer be an ordinary one."""
    if dp is None or dp.closed:
        return
    if error is None:
        dp.close()
    else:
        dp.abandon(error)
    dp.detach()


class Dealt:
    """A loader of dealt data, without a length."""

    def __init__(self, loader: Any, deal: Deal) -> None:
        self.loader, self.sampler = loader, deal
        self.dataset = loader.dataset

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def copied(value: Any) -> Any:
    """A copy of what may change."""
    return value.clone() if isinstance(value, Tensor) else value
