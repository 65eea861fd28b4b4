"""Collectives that frameworks issue unasked, and what to write instead.

Each is known by a function of the framework that is on the stack when it waits. The versions are
those in which a test has seen it (tests/test_doctor.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """A collective of a framework's own."""

    what: str
    file: str
    """How the path of its file ends."""
    function: str
    seen: str
    """In which version."""
    advice: str


KNOWN = (
    Known(
        "Lightning broadcasts a SIGTERM flag for every batch",
        "pytorch/loops/training_epoch_loop.py",
        "_broadcast_sigterm_tensor",
        "lightning 2.6.6",
        "Trainer(strategy=offbeat.integrations.lightning.OffbeatStrategy(...)), which sends it "
        "with the rounds",
    ),
    Known(
        "Lightning reduces a value that is logged at every step with sync_dist=True",
        "logger_connector/result.py",
        "update",
        "lightning 2.6.6",
        "self.log(..., on_step=False, on_epoch=True, sync_dist=True), or OffbeatStrategy, which "
        "reduces at the end of the epoch alone",
    ),
    Known(
        "the Trainer gathers the number of tokens for every step (average_tokens_across_devices)",
        "transformers/trainer.py",
        "_get_num_items_in_batch",
        "transformers 5.23.0",
        "offbeat.integrations.transformers.OffbeatTrainer, which weighs by dp.samples(tokens)",
    ),
    Known(
        "the Trainer gathers the number of input tokens (include_num_input_tokens_seen)",
        "transformers/trainer.py",
        "_track_num_input_tokens",
        "",
        "TrainingArguments(include_num_input_tokens_seen='no')",
    ),
    Known(
        "the Trainer evaluates on all workers",
        "transformers/trainer.py",
        "_evaluate",
        "",
        "evaluate less often (eval_steps)",
    ),
    Known(
        "the Trainer gathers the loss whenever it logs (logging_steps)",
        "transformers/trainer.py",
        "_maybe_log_save_evaluate",
        "transformers 5.23.0",
        "OffbeatTrainer, which logs this worker's own; or log less often",
    ),
    Known(
        "Accelerate has worker 0 hand out every batch (dispatch_batches)",
        "accelerate/data_loader.py",
        "_fetch_batches",
        "",
        "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))",
    ),
    Known(
        "Accelerate gathers what you measure",
        "accelerate/accelerator.py",
        "gather_for_metrics",
        "",
        "gather where you log, not at every step",
    ),
)


def known(file: str, function: str) -> Known | None:
    """Return what is known of a function in a file."""
    for each in KNOWN:
        if each.function == function and file.replace("\\", "/").endswith(each.file):
            return each
    return None
