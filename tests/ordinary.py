"""Random ordinary training scripts: what people write around an optimizer, on 3 real processes.

A seed gives a `Script`, which says in a few words what is in it, and `train` runs it on a worker.
Offbeat is used by its public names only. `judged` runs it on all and judges what came of it:

- it ended, without an error, or, where one worker raises, with an error on all of them;
- every replica holds the same bits, and so does every moving average that follows the rounds, if
  workers have a common base; else all have followed as many;
- no sample is lost, and what is dealt comes once an epoch;
- the results of the program's own collectives are right;
- where nothing but the arithmetic of synchronous SGD is left, it equals that by hand.
"""

from __future__ import annotations

import io
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields
from datetime import timedelta
from hashlib import blake2b
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from pool import Ended, Pool
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import offbeat
from offbeat.errors import PortingWarning

WORKERS = 3
LIMIT_S = 60.0
"""Scripts take 1 to 3 seconds; on a busy machine ten times as long."""
AFTER_ERROR_S = 20.0
"""Once one worker has raised, the others must end within this time."""
TOLERANCE = 1e-5
"""Gloo adds three numbers in an order of its own: 1e-7 was the most that this has made."""

ALGORITHMS = {
    "SyncSGD": ("", "", "micro_batches=2", "overlap=False"),
    "EagerSGD": (
        "",
        "'solo'",
        "'majority'",
        "'all'",
        "2",
        "late='drop'",
        "'solo', max_staleness_rounds=2",
        "'solo', delay=1",
    ),
    "MSyncSGD": ("2", "1", "'auto'", "2, top_up=True"),
    "ABSSGD": (
        "",
        "patience=0",
        "max_micro_batches=2",
        "'finish', patience=0",
        "min_batch=16",
        "max_wait_s=0.1",
        "'finish', patience=1",
    ),
    "DropCompute": ("2", "4, threshold_s=0.03", "2, window_rounds=4"),
    "NonblockingSGD": ("2", "4", "2, in_flight='bank'"),
    "LBBSP": ("2", "4"),
    "LocalSGD": ("4", "2", "4, shares='speed'"),
    "DaSGD": ("", "4, delay=2", "2, delay=1, quorum=2", "3, merge='paper'"),
    "DiLoCo": ("4", "4, overlap=2", "2, lr=0.5, momentum=0.5, overlap=1, quorum='solo'"),
    "WaitFreeLocalSGD": ("",),
    "WAGMASGD": (
        "",
        "period=3, period_quorum='all'",
        "period=2, period_quorum='solo'",
        "delay=1",
        "late='paper'",
    ),
    "DPSGD": ("'ring'", "'one-peer'"),
    "DmSGD": ("'ring'", "'one-peer'"),
    "DecentLaM": ("", "'star'"),
    "EDM": ("", "'lazy-star'"),
    "MomentumTracking": ("", "'ring'", "'star'"),
    "ASGD": ("", "delay_adaptive=True", "micro_batches=2"),
    "RingmasterASGD": ("", "2, stop='expired'", "1, stop='never'"),
    "RennalaSGD": ("", "5", "2, stop=False"),
    "RingleaderASGD": ("", "micro_batches=2"),
    "RescaledASGD": ("", "max_delay=3"),
}

# They have one of their own: a scheduler that cycles the optimizer's is refused.
MOMENTA = ("DecentLaM", "EDM", "MomentumTracking")
NO_BASE = ("WAGMASGD", "DPSGD", "DmSGD", *MOMENTA)  # each worker follows its own model there
OWN_STEPS = ("LocalSGD", "WaitFreeLocalSGD", "DaSGD", "DiLoCo", *NO_BASE)

Collective = Callable[[int], None]


# --- what is in a script -------------------------------------------------------------------


@dataclass(frozen=True)
class Script:
    """One script: a seed in words."""

    seed: int
    algorithm: str
    optimizer: str
    model: str
    """ "plain", "dropout" or "batchnorm"."""
    pair: str | None
    """Two attachments at once: "encoder and head", or "gan"."""
    bucket_bytes: int | None
    epochs: int
    batches: tuple[int, ...]
    """Of each worker in an epoch."""
    skew: str
    """ "none", "constant", "random", or "worker 2 slow"."""
    sleep_ms: int
    per_epoch: tuple[str, ...]
    """The program's own collectives after each epoch."""
    per_step: str | None
    """... and one after every few steps; then all workers have equally many."""
    every: int
    scheduler: str | None
    stepped: str | None
    """By hand per "step" or per "epoch", or handed to "attach"."""
    rate_from: str | None
    """The learning rate is written into the param groups, from the "step" or from the "round"."""
    evaluation: str | None
    """On worker 0 after each epoch: "away", "agreed", "plain", or "barrier" if all wait for it."""
    evaluation_s: float
    saves: bool
    samples: bool
    """Batches differ in size, and say so."""
    accumulate: int
    """Backward passes per step, all but the last inside `dp.no_sync()`."""
    clips: bool
    call: str
    """ "step()", "step(None)" or "step(closure)"."""
    leaves: tuple[int, int] | None
    """This worker breaks out of everything after so many batches."""
    raises: tuple[int, int] | None
    """This worker raises an error after so many batches."""
    data: str
    """A "share" for each worker; "dealt" or "dealt by processes"; or what "rounds" take."""
    follows: bool
    """Moving averages of the models follow the rounds."""

    def __str__(self) -> str:
        usual = {"model": "plain", "accumulate": 1, "call": "step()", "data": "share"}
        said = [
            f"{field.name}={value!r}"
            for field in fields(self)
            if (value := getattr(self, field.name)) not in (None, ())
            and value is not False
            and value != usual.get(field.name)
        ]
        return f"Script({', '.join(said)})"

    @property
    def equals_synchronous_sgd(self) -> bool:
        """Whether nothing in it may change the result of synchronous SGD."""
        return (
            self.algorithm in ("SyncSGD()", "SyncSGD(overlap=False)")
            and len(set(self.batches)) == 1
            and self.evaluation not in ("away", "agreed")
            and self.data == "share"
            and self.leaves is None
            and self.raises is None
        )


def draw(seed: int) -> Script:
    """Return the script of this seed."""
    random = Random(seed)
    often = random.random
    name = random.choice(list(ALGORITHMS))
    pair = random.choice(("encoder and head", "gan")) if often() < 0.2 else None
    longest = random.randint(5, 12)
    uneven = often() < 0.4
    batches = tuple(longest - (random.randint(0, 4) if uneven else 0) for _ in range(WORKERS))
    scheduler = random.choice(list(SCHEDULERS)) if often() < 0.45 else None
    if scheduler == "OneCycleLR" and name in MOMENTA:
        scheduler = "CosineAnnealingLR"
    leaves = (random.randrange(WORKERS), random.randint(1, 4)) if often() < 0.12 else None
    per_epoch = tuple(random.sample(list(COLLECTIVES), random.choice((0, 1, 1, 2, 3))))
    per_step = random.choice(list(COLLECTIVES)) if often() < 0.3 else None
    evaluation = random.choice(("away", "plain", "barrier")) if often() < 0.4 else None
    accumulate = random.choice((2, 3)) if often() < 0.15 else 1
    call = random.choice(("step(None)", "step(closure)")) if often() < 0.25 else "step()"
    raises = (random.randrange(WORKERS), random.randint(0, 4)) if often() < 0.06 else None
    if raises is not None:
        raises = raises[0], min(raises[1], batches[raises[0]] - 1)
    if leaves is not None:  # it takes part in no further collective
        per_epoch, per_step = (), None
        evaluation = "plain" if evaluation == "barrier" else evaluation
    if accumulate > 1 or pair is not None:
        call = call if call != "step(closure)" else "step()"
    stepped = random.choice(("step", "step", "epoch", "attach"))
    rate_from = random.choice(("step", "round")) if often() < 0.2 else None
    optimizer = random.choice(list(OPTIMIZERS))
    model = random.choice(("plain", "plain", "dropout", "batchnorm"))
    bucket_bytes = random.choice((None, None, 64))
    epochs = random.randint(1, 3)
    skew = random.choice(("none", "constant", "random", "random", "worker 0 slow", "worker 2 slow"))
    sleep_ms, every = random.choice((5, 15, 30)), random.choice((1, 2, 3, 5))
    evaluation_s, saves = random.choice((0.1, 0.3, 0.5)), often() < 0.3
    samples, clips = often() < 0.4, often() < 0.2
    data = random.choice(("dealt", "dealt", "rounds", "dealt by processes"))
    data = "share" if often() < 0.6 else data
    if evaluation is not None and often() < 0.3:
        evaluation = "agreed"
    even = not uneven and data == "share" and leaves is None
    algorithm = f"{name}({random.choice(ALGORITHMS[name])})"
    in_step = (
        algorithm in ("LocalSGD(4)", "LocalSGD(2)", "DiLoCo(4)")
        and even
        and evaluation not in ("away", "agreed")
    )
    if name in OWN_STEPS and not in_step:  # own steps have own rates: promised for gradients only
        stepped, rate_from = "attach", None
    return Script(
        seed=seed,
        algorithm=algorithm,
        optimizer=optimizer,
        model=model,
        pair=pair,
        bucket_bytes=bucket_bytes,
        epochs=epochs,
        batches=batches,
        skew=skew,
        sleep_ms=sleep_ms,
        per_epoch=per_epoch,
        per_step=None if uneven or data != "share" else per_step,
        every=every,
        scheduler=scheduler,
        stepped=None if scheduler is None else stepped,
        rate_from=None if scheduler else rate_from,
        evaluation=evaluation,
        evaluation_s=evaluation_s,
        saves=saves,
        samples=samples,
        accumulate=accumulate,
        clips=clips,
        call=call,
        leaves=leaves,
        raises=None if leaves else raises,
        data=data,
        follows=often() < 0.25,
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD with momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
}

# By the number of times that a worker steps it.
SCHEDULERS: dict[str, Callable[[Optimizer, int], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda o, steps: lr_scheduler.StepLR(o, step_size=max(1, steps // 3), gamma=0.5),
    "OneCycleLR": lambda o, steps: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=steps + 1),
    "LambdaLR": lambda o, steps: lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / steps)),
    "CosineAnnealingLR": lambda o, steps: lr_scheduler.CosineAnnealingLR(o, T_max=steps + 1),
}


# --- the program's own collectives ---------------------------------------------------------


def _all_reduce(rank: int) -> None:
    dist.all_reduce(total := torch.tensor([1.0 + rank]))
    assert total.item() == 6


def _barrier(rank: int) -> None:
    dist.barrier()


def _all_gather(rank: int) -> None:
    found = [torch.zeros(1) for _ in range(WORKERS)]
    dist.all_gather(found, torch.tensor([1.0 + rank]))
    assert [one.item() for one in found] == [1, 2, 3]


def _broadcast(rank: int) -> None:
    dist.broadcast(value := torch.tensor([1.0 + rank]), src=1)
    assert value.item() == 2


def _gather(rank: int) -> None:
    found = [torch.zeros(1) for _ in range(WORKERS)] if rank == 0 else None
    dist.gather(torch.tensor([1.0 + rank]), found, dst=0)
    assert found is None or [one.item() for one in found] == [1, 2, 3]


def _reduce(rank: int) -> None:
    dist.reduce(total := torch.tensor([1.0 + rank]), dst=2)
    assert rank != 2 or total.item() == 6


def _all_gather_object(rank: int) -> None:
    found: list[Any] = [None] * WORKERS
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


def _broadcast_object_list(rank: int) -> None:
    found = [f"from {rank}"]
    dist.broadcast_object_list(found, src=0)
    assert found == ["from 0"]


def _monitored_barrier(rank: int) -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=LIMIT_S))


def _in_a_new_group(rank: int) -> None:
    group = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(total := torch.tensor([1.0 + rank]), group=group)
        assert total.item() == 4
        dist.destroy_process_group(group)


class _Later:
    """An all-reduce that is waited for a few batches after it was started."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Tensor]] = []

    def start(self, rank: int) -> None:
        work = dist.all_reduce(total := torch.tensor([1.0 + rank]), async_op=True)
        self._waiting.append((work, total))

    def wait(self, left: int = 0) -> None:
        while len(self._waiting) > left:
            work, total = self._waiting.pop(0)
            work.wait()
            assert total.item() == 6


ASYNC = "async all_reduce"
COLLECTIVES: dict[str, Collective | None] = {
    "all_reduce": _all_reduce,
    "barrier": _barrier,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "gather": _gather,
    "reduce": _reduce,
    "all_gather_object": _all_gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "monitored_barrier": _monitored_barrier,
    "all_reduce in a new group": _in_a_new_group,
    ASYNC: None,
}


# --- synchronous SGD by hand ---------------------------------------------------------------


class ByHand:
    """What `SyncSGD` must equal: every gradient averaged over samples before it is applied."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, scheduler: lr_scheduler.LRScheduler | None
    ) -> None:
        self.round = 0
        self._parameters = list(model.parameters())
        self._samples = 0.0
        for value in [*self._parameters, *model.buffers()]:
            dist.broadcast(value.data, src=0)
        optimizer.register_step_pre_hook(self._average)
        optimizer.register_step_post_hook(self._stepped)
        self._scheduler = scheduler

    def __enter__(self) -> ByHand:
        return self

    def __exit__(self, *error: object) -> None: ...

    def samples(self, n: float) -> None:
        self._samples += n

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _average(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        mine = self._samples or 1.0
        dist.all_reduce(total := torch.tensor([mine]))
        for parameter in self._parameters:
            assert parameter.grad is not None, "every parameter is used"
            dist.all_reduce(parameter.grad.mul_(mine))
            parameter.grad.div_(total)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.round += 1
        self._samples = 0.0
        if self._scheduler is not None:
            self._scheduler.step()


# --- a script on one worker ----------------------------------------------------------------


@dataclass
class Part:
    """A model with all that trains it."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: lr_scheduler.LRScheduler | None
    dp: Any = None
    average: nn.Module | None = None


class ABadBatch(Exception):  # noqa: N818 - what a user's code may raise
    """One worker cannot go on."""


def train(script: Script) -> dict[str, Any]:
    """Run the script on this worker; return what there is to check."""
    ours = Run(script)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PortingWarning)  # it is meant so
        ours.train()
    found: dict[str, Any] = {
        "hashes": [_hash(part.model) for part in ours.parts],
        "averages": [_followed(script, part.average) for part in ours.parts if part.average],
        "stats": [part.dp.stats() for part in ours.parts],
        "dealt": ours.dealt,
        "distance": None,
    }
    if script.equals_synchronous_sgd:
        theirs = Run(script, by_hand=True)
        theirs.train()
        found["distance"] = max(
            (mine - other).abs().max().item()
            for part, their in zip(ours.parts, theirs.parts, strict=True)
            for mine, other in zip(part.model.parameters(), their.model.parameters(), strict=True)
        )
    return found


class Run:
    """One worker's script, with offbeat or by hand."""

    def __init__(self, script: Script, by_hand: bool = False) -> None:
        self.script = script
        self.by_hand = by_hand
        self.rank = dist.get_rank()
        self._sleeps = Random(1000 * script.seed + self.rank)
        self._later = _Later()
        self._batch = 0
        self.dealt: list[tuple[int, int]] = []
        numbers = _Numbers(sum(script.batches))
        self._deal = offbeat.Deal(numbers, seed=script.seed)
        processes = 2 if script.data == "dealt by processes" else 0
        self._loader = DataLoader(numbers, batch_sampler=self._deal, num_workers=processes)
        torch.manual_seed(1000 * script.seed + self.rank)  # attach takes over worker 0's models
        self.parts = [self._part(model) for model in _models(script)]

    def train(self) -> None:
        script = self.script
        with ExitStack() as block:
            for part in self.parts:
                part.dp = block.enter_context(self._attach(part))
                if script.follows and not self.by_hand:
                    self._follow(part)
            for epoch in range(script.epochs):
                for n in self._batches(epoch):
                    if script.leaves == (self.rank, self._batch):
                        return
                    if script.raises == (self.rank, self._batch):
                        raise ABadBatch(f"worker {self.rank}, batch {self._batch}")
                    self._one_batch(last=n + 1 == script.batches[self.rank])
                    if script.per_step is not None and (n + 1) % script.every == 0:
                        self._collective(script.per_step)
                    self._later.wait(left=1)
                self._end_of_epoch(epoch)
            self._later.wait()

    # What happens in it, from the outside in.

    def _batches(self, epoch: int) -> Iterator[int]:
        script = self.script
        if script.data == "rounds":
            yield from self.parts[0].dp.rounds((epoch + 1) * max(script.batches))
        elif script.data == "share":
            yield from range(script.batches[self.rank])
        else:
            for count, number in enumerate(self._loader):
                self.dealt.append((epoch, int(number)))
                yield count

    def _follow(self, part: Part) -> None:
        part.average = AveragedModel(part.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        part.dp.on_round(lambda model, each: part.average.update_parameters(model))

    def _attach(self, part: Part) -> AbstractContextManager[Any]:
        handed = part.scheduler if self.script.stepped == "attach" else None
        if self.by_hand:
            return ByHand(part.model, part.optimizer, handed)
        settings = {} if self.script.bucket_bytes is None else {"bucket_bytes": 64}
        algorithm = _algorithm(self.script.algorithm)
        return offbeat.attach(part.model, part.optimizer, algorithm, scheduler=handed, **settings)

    def _one_batch(self, last: bool) -> None:
        script = self.script
        generator = torch.Generator().manual_seed(self._number())
        size = 1 + self._number() % 5 if script.samples else 4
        inputs = torch.randn(size + 1, 6, generator=generator)  # BatchNorm needs two
        targets = torch.randn(size + 1, 3, generator=generator)
        torch.manual_seed(self._number())  # of dropout
        self._sleep()
        if script.samples:
            for part in self.parts:
                part.dp.samples(size + 1)
        self._set_rates()
        self._batch += 1
        if script.pair == "gan":
            self._gan(inputs, targets)
        else:
            self._supervised(
                inputs, targets, accumulates=not last and self._batch % script.accumulate > 0
            )

    def _supervised(self, inputs: Tensor, targets: Tensor, accumulates: bool) -> None:
        def computed() -> Tensor:
            outputs = inputs
            for part in self.parts:
                outputs = part.model(outputs)
            loss = nn.functional.mse_loss(outputs, targets) / self.script.accumulate
            loss.backward()
            return loss

        if accumulates:
            with ExitStack() as blocks:
                for part in self.parts:
                    blocks.enter_context(part.dp.no_sync())
                computed()
            return
        if self.script.call == "step(closure)" and not self.by_hand:
            (part,) = self.parts

            def closure() -> Tensor:
                part.optimizer.zero_grad()
                loss = computed()
                self._clip(part)
                return loss

            assert part.optimizer.step(closure) is not None
            self._step_scheduler(part, "step")
            return
        computed()
        for part in self.parts:
            self._clip(part)
            self._step(part)
            part.optimizer.zero_grad()

    def _gan(self, inputs: Tensor, real: Tensor) -> None:
        """The loop of the DCGAN example: two backward passes, one step, and the other's turn."""
        right = nn.functional.binary_cross_entropy_with_logits
        generator, judge = self.parts
        judge.model.zero_grad()
        right(judge.model(real), torch.ones(len(real), 1)).backward()
        fake = generator.model(inputs)
        right(judge.model(fake.detach()), torch.zeros(len(real), 1)).backward()
        self._clip(judge)
        self._step(judge)
        generator.model.zero_grad()
        right(judge.model(fake), torch.ones(len(real), 1)).backward()
        self._clip(generator)
        self._step(generator)

    def _step(self, part: Part) -> None:
        if self.script.call == "step(None)":
            part.optimizer.step(None)
        else:
            part.optimizer.step()
        self._step_scheduler(part, "step")

    def _clip(self, part: Part) -> None:
        if self.script.clips:
            nn.utils.clip_grad_norm_(part.model.parameters(), 0.5)

    def _end_of_epoch(self, epoch: int) -> None:
        script = self.script
        for part in self.parts:
            self._step_scheduler(part, "epoch")
        for name in script.per_epoch:
            self._collective(name)
        if script.evaluation is not None and self.rank == 0:
            with ExitStack() as blocks:
                if script.evaluation in ("away", "agreed"):
                    for part in self.parts:
                        blocks.enter_context(getattr(part.dp, script.evaluation)())
                self._agreed(blocks)
                self._evaluate()
        if script.evaluation == "barrier":
            dist.barrier()
        if script.saves and self.rank == 0:
            with ExitStack() as blocks:
                self._agreed(blocks)
                self._save()

    def _agreed(self, blocks: ExitStack) -> None:
        if self.script.algorithm.startswith(OWN_STEPS):
            for part in self.parts:
                blocks.enter_context(part.dp.agreed())

    def _evaluate(self) -> None:
        time.sleep(0.0 if self.by_hand else self.script.evaluation_s)
        for part in self.parts:
            part.model.eval()
        with torch.no_grad():
            outputs = torch.ones(4, 6)
            for part in self.parts:
                outputs = part.model(outputs)
            assert torch.isfinite(outputs).all()
        for part in self.parts:
            part.model.train()

    def _save(self) -> None:
        for part, fresh in zip(self.parts, _models(self.script), strict=True):
            state = {"model": part.model.state_dict(), "optimizer": part.optimizer.state_dict()}
            torch.save(state, file := io.BytesIO())
            file.seek(0)
            state = torch.load(file)
            fresh.load_state_dict(state["model"])
            OPTIMIZERS[self.script.optimizer](fresh).load_state_dict(state["optimizer"])
        torch.manual_seed(self._number())

    def _collective(self, name: str) -> None:
        (COLLECTIVES[name] or self._later.start)(self.rank)

    def _sleep(self) -> None:
        script = self.script
        length = {
            "none": 0.0,
            "constant": 1.0,
            "random": self._sleeps.random() * 2,
            f"worker {self.rank} slow": 2.0,
        }.get(script.skew, 0.2)
        time.sleep(0.0 if self.by_hand else min(30.0, length * script.sleep_ms) / 1000)

    def _set_rates(self) -> None:
        for part in self.parts:
            n = {"step": self._batch, "round": part.dp.round, None: None}[self.script.rate_from]
            if n is not None:
                for group in part.optimizer.param_groups:
                    group["lr"] = 0.02 * 0.97**n

    def _step_scheduler(self, part: Part, moment: str) -> None:
        if part.scheduler is not None and self.script.stepped == moment:
            part.scheduler.step()

    def _part(self, model: nn.Module) -> Part:
        script = self.script
        optimizer = OPTIMIZERS[script.optimizer](model)
        if script.scheduler is None:
            return Part(model, optimizer, None)
        most = script.epochs * sum(script.batches) * 2  # one worker may make nearly all
        steps = {
            "step": script.epochs * script.batches[self.rank] if script.data == "share" else most,
            "epoch": script.epochs,
            "attach": most,
        }[script.stepped or ""]
        return Part(model, optimizer, SCHEDULERS[script.scheduler](optimizer, steps))

    def _number(self) -> int:
        return (self.script.seed * WORKERS + self.rank) * 1000 + self._batch


class _Numbers(Dataset[int]):
    """Samples that can be told apart."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def _models(script: Script) -> list[nn.Module]:
    if script.pair is None:
        return [_net(script, 6, 3)]
    if script.pair == "gan":
        return [_net(script, 6, 3), _net(script, 3, 1)]
    return [_net(script, 6, 5), _net(script, 5, 3)]


def _net(script: Script, inputs: int, outputs: int) -> nn.Module:
    # Without a bias before BatchNorm: its gradient is rounding noise, which Adam makes large.
    first = nn.Linear(inputs, 8, bias=script.model != "batchnorm")
    between = {"plain": nn.Identity(), "dropout": nn.Dropout(0.3), "batchnorm": nn.BatchNorm1d(8)}
    return nn.Sequential(first, between[script.model], nn.Tanh(), nn.Linear(8, outputs))


def _algorithm(words: str) -> Any:
    return eval(words, vars(offbeat))


def _followed(script: Script, average: nn.Module) -> str:
    """What is the same of a moving average on all workers: at least how many rounds it has seen."""
    if script.algorithm.startswith(NO_BASE):
        return f"{int(average.n_averaged)} rounds"
    return _hash(average)


def _hash(model: nn.Module) -> str:
    seen = blake2b(digest_size=8)
    for parameter in model.parameters():
        seen.update(parameter.detach().numpy().tobytes())
    return seen.hexdigest()


# --- the verdict ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a script's end: nothing, if `complaints` is empty."""

    script: Script
    kind: str
    """In a word or two, to count by."""
    complaints: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(
            [
                f"seed {self.script.seed}: {self.kind}",
                f"  {self.script}",
                *("  " + line for words in self.complaints for line in words.splitlines()),
                f"  replay: python benchmarks/ordinary_scripts.py --seed {self.script.seed}",
            ]
        )


def judged(pool: Pool, script: Script, limit_s: float = LIMIT_S) -> Verdict:
    """Run a script and say what is wrong."""
    ended = pool.run(train, script, limit_s=limit_s, after_error_s=AFTER_ERROR_S)
    kind, complaints = complaints_of(script, ended)
    if complaints and script.raises:
        kind = f"an error on one worker: {kind}"
    return Verdict(script, kind, tuple(complaints))


def complaints_of(script: Script, ended: list[Ended]) -> tuple[str, list[str]]:
    """What is wrong with how the workers ended, in a word or two and at length."""
    errors = [f"worker {one.rank}: {one.words or one.error}" for one in ended if one.error]
    hung = [
        f"worker {one.rank} hung for {one.seconds:.0f} s:\n{one.stacks}"
        for one in ended
        if one.hung
    ]
    if hung:
        first = next((f", {one.error.split(':')[0]}" for one in ended if one.error), "")
        return f"hang{first}", errors + hung
    if script.raises is not None:
        unhurt = [one.rank for one in ended if not one.error]
        if unhurt:
            return "no error", [f"workers {unhurt} ended without an error", *errors]
        if any("ABadBatch" in one.error for one in ended):
            return "right", []
    if errors:
        causes = [one.error.split(":")[0] for one in ended if one.error]
        others = [cause for cause in causes if cause != "WorkerLostError"]
        return (others or causes)[0], errors
    return _wrong(script, [one.result for one in ended])


def _wrong(script: Script, results: list[dict[str, Any]]) -> tuple[str, list[str]]:
    found: list[str] = []
    kind = "right"
    for n in range(len(results[0]["hashes"])):
        hashes = [result["hashes"][n] for result in results]
        if len(set(hashes)) > 1:
            kind = "replicas differ"
            found.append(f"attachment {n}: hashes of the parameters {hashes}")
    if len({tuple(result["averages"]) for result in results}) > 1:
        kind = "moving averages differ"
        found.append(f"hashes of moving averages {[result['averages'] for result in results]}")
    if script.data.startswith("dealt") and script.leaves is None:
        dealt = sorted(each for result in results for each in result["dealt"])
        expected = [(n, of) for n in range(script.epochs) for of in range(sum(script.batches))]
        if dealt != expected:
            kind = "not dealt once"
            found.append(f"dealt {dealt}")
    for rank, result in enumerate(results):
        for n, stats in enumerate(result["stats"]):
            where = f"worker {rank}, attachment {n}"
            if not stats.replicas_identical:
                kind = "replicas differ"
                found.append(f"{where}: replicas_identical is {stats.replicas_identical}")
            sums = [stats.computed_samples, stats.applied_samples, stats.dropped_samples]
            if abs(sums[0] - sums[1] - sums[2]) > 1e-6 or abs(stats.pending_samples) > 1e-6:
                kind = "samples lost"
                found.append(
                    f"{where}: computed {sums[0]}, applied {sums[1]}, dropped {sums[2]}, "
                    f"pending {stats.pending_samples}"
                )
            if stats.steps and not stats.computed_samples:
                kind = "samples lost"
                found.append(f"{where}: {stats.steps} steps without a sample")
        if result["distance"] is not None and not result["distance"] < TOLERANCE:
            kind = "not synchronous SGD"
            found.append(f"worker {rank}: {result['distance']} from synchronous SGD by hand")
    return kind, found
