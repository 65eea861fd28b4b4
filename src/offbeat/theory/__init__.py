"""What theory says of workers of unlike speeds: how long methods take, and how to set them.

    tau_i      `seconds` that worker i takes for a gradient, tau_1 <= ... <= tau_n
    S          `noise`: sigma^2 / epsilon, noise over signal, the useful number of gradients
    L          `smoothness`: how fast the gradient may change
    Delta      how far the loss is from its least
    epsilon    the target: the mean square of the gradient is to be at most that
    R          `limit`: a gradient of staleness R or more is not applied
    h_n        1 + 1/2 + ... + 1/n

Where a method sets no more than S and the workers' speeds, its time is in units of
L Delta / epsilon, which are the same for all methods: their ratios say which one to take. What has
a step size or a number of updates takes `smoothness`, or `difficulty`, which is L Delta / epsilon;
both are 1 if left out. Noise, signal and gradients are of one micro-batch of one worker.

    fixed.py       workers of fixed speeds: times to a target, at most or at least
    steps.py       limits, step sizes, numbers of updates
    universal.py   workers whose speeds change as they like

docs/theory.md says what it means for a cluster. Nothing here knows of tensors or of rounds.
"""

from offbeat.theory.fixed import (
    Best,
    async_time,
    best_m,
    exponential_round_time,
    harmonic_mean,
    harmonic_number,
    heterogeneous_time,
    m_sync_time,
    optimal_time,
    rounds_cost,
    sync_time,
    updates_time,
)
from offbeat.theory.steps import (
    Analysis,
    delay_adaptive_scale,
    m_sync_rounds,
    m_sync_step_size,
    ringleader_step_size,
    ringmaster_step_size,
    ringmaster_time,
    ringmaster_updates,
    staleness_limit,
    staleness_limit_by_speed,
)
from offbeat.theory.universal import Power, universal_m_sync_times, universal_times

__all__ = [
    "Analysis",
    "Best",
    "Power",
    "async_time",
    "best_m",
    "delay_adaptive_scale",
    "exponential_round_time",
    "harmonic_mean",
    "harmonic_number",
    "heterogeneous_time",
    "m_sync_rounds",
    "m_sync_step_size",
    "m_sync_time",
    "optimal_time",
    "ringleader_step_size",
    "ringmaster_step_size",
    "ringmaster_time",
    "ringmaster_updates",
    "rounds_cost",
    "staleness_limit",
    "staleness_limit_by_speed",
    "sync_time",
    "universal_m_sync_times",
    "universal_times",
    "updates_time",
]
