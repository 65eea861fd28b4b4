"""When rounds start, of schedules in which nobody is away: as soon as they can, nobody idles."""

from __future__ import annotations

import itertools
import math

from schedule_log import Log, Outcome
from schedules import Plan, Schedule

Inside = list[dict[int, list[int]]]


def check(schedule: Schedule, plan: Plan, outcome: Outcome, inside: Inside) -> None:
    """Hold the moments of a calm schedule against what was promised."""
    rules, logs = plan.rules, outcome.logs
    if plan.held:
        _a_round_holds_no_gradient_but_of_its_own_parameters(plan, logs, inside)
    if rules.at_boundary:
        _no_round_has_too_few_samples(plan, logs, inside)
        if plan.delay == 1 and plan.full is None and not plan.moves:
            for rank, log in enumerate(logs):
                assert log.waited_s < 1e-9, f"worker {rank} has waited {log.waited_s} s"
        if schedule.free and "pause" not in schedule.events:
            # Who applies more slowly than rounds come has eight of them wait, then the others.
            quick = max(schedule.apply_s) <= (rules.overdue_s or 0.0)
            if rules.overdue_s is not None and quick and not rules.least_samples:
                _nobody_holds_up_the_others(rules.overdue_s, logs)
            plain = not (plan.any_silent or plan.some_without_samples)
            prompt = not plan.moves or not any(schedule.apply_s)  # applies, then gives
            if plan.held and rules.quorum == "all" and plain and prompt:
                _rounds_start_as_soon_as_they_can(plan, logs, inside)
    elif plan.start == "patient":
        _no_round_has_too_few_samples(plan, logs, inside)
        if schedule.free and plan.full is None:
            for log in logs:
                steps = range(len(log.gradients))
                limit_s = sum(plan.patience_s[step % len(plan.patience_s)] for step in steps)
                assert log.waited_s <= limit_s + 1e-9, f"waited {log.waited_s} of {limit_s} s"
    elif rules.at_arrival and rules.quorum == "solo" and not rules.grace_s:
        if schedule.free and not any(schedule.apply_s) and "pause" not in schedule.events:
            for rank, log in enumerate(logs):
                assert log.waited_s < 1e-9, f"worker {rank} has waited {log.waited_s} s"
    elif plan.start == "quorum" and schedule.free and not any(schedule.apply_s):
        usual = rules.lateness == "version" and not plan.delay
        if usual and not (plan.any_silent or plan.some_without_samples):
            _rounds_start_at_once(outcome, inside)


def _a_round_holds_no_gradient_but_of_its_own_parameters(
    plan: Plan, logs: list[Log], inside: Inside
) -> None:
    resumed = [0, *logs[0].paused_at]  # a pause lets everyone take every round
    for rank, log in enumerate(logs):
        for round, steps in inside[rank].items():
            oldest = max(round - plan.delay, *(known for known in resumed if known <= round), 0)
            for step in steps:
                gradient = log.gradients[step]
                fresh = plan.moves and oldest <= gradient.version <= round
                assert gradient.version == oldest or fresh, (
                    f"worker {rank}, step {step}: of the parameters after round "
                    f"{gradient.version}, in round {round}"
                )
                assert gradient.arrival == "on time"


def _no_round_has_too_few_samples(plan: Plan, logs: list[Log], inside: Inside) -> None:
    if plan.waits:
        return  # who waits adds nothing
    for taken in logs[0].rounds:
        if any(log.stay_in(taken.round) is not None for log in logs):
            continue
        if plan.full is not None and (
            plan.some_without_samples
            or all(len(steps[taken.round]) >= plan.full for steps in inside)
        ):
            continue
        assert sum(taken.samples_by_rank) >= plan.rules.least_samples, (
            f"round {taken.round} has {taken.samples_by_rank} samples, and everybody is here"
        )


def _nobody_holds_up_the_others(overdue_s: float, logs: list[Log]) -> None:
    ended = [0.0, *(min(times) for times in zip(*(log.ended_s for log in logs), strict=True))]
    for round, (before, after) in enumerate(itertools.pairwise(ended)):
        assert after - before <= overdue_s + 1e-9, (
            f"round {round} ended {after - before} s after the one before"
        )


def _rounds_start_as_soon_as_they_can(plan: Plan, logs: list[Log], inside: Inside) -> None:
    """Where messages take no time, a round ends when each has noticed that it can start."""
    ended_s = 0.0
    for taken in logs[0].rounds:
        mine = [
            [(log.gradients[step].at_s, plan.samples[rank][step]) for step in steps[taken.round]]
            for rank, (log, steps) in enumerate(zip(logs, inside, strict=True))
        ]
        stays = [log.stay_in(taken.round) for log in logs]
        away = [stay.at_s for stay in stays if stay is not None]
        ready = [each[plan.ready - 1][0] for each in mine if len(each) >= plan.ready]
        everyone_s = max([*ready, *away]) if len(ready) + len(away) >= len(logs) else math.inf
        least_s = min([_reached(mine, plan.rules.least_samples), *away])
        most_s = _reached(mine, plan.rules.most_samples)
        call_s = max(ended_s, min(max(everyone_s, least_s), most_s))
        notices = [
            next((g.at_s for g in log.gradients if g.at_s > call_s), log.left_at_s) for log in logs
        ]
        ended_s = min(log.ended_s[taken.round] for log in logs)
        assert ended_s <= max(call_s, *notices) + 1e-9, (
            f"round {taken.round} could start at {call_s}, and ended at {ended_s}"
        )


def _reached(mine: list[list[tuple[float, int]]], samples: float) -> float:
    """The moment at which all together had so many samples."""
    total = 0
    for at_s, each in sorted(pair for pairs in mine for pair in pairs):
        total += each
        if total >= samples:
            return at_s
    return math.inf if samples > total else 0.0


def _rounds_start_at_once(outcome: Outcome, inside: Inside) -> None:
    """Where messages take no time, a round ends with the arrival that completes what it needs."""
    logs, ended_s = outcome.logs, 0.0
    for round in range(len(logs[0].rounds)):
        start = outcome.starts[round][0][1]
        came: list[float] = []  # candidates on time
        gone: list[float] = []  # candidates that have left, or paused
        due: list[float] = []
        for rank, log in enumerate(logs):
            mine = [log.gradients[step] for step in inside[rank][round]]
            stay = log.stay_in(round)
            if rank in start.candidates:
                on_time = [g.at_s for g in mine if g.arrival == "on time"]
                came += on_time
                gone += [] if on_time or stay is None else [stay.at_s]
            if rank in start.due:
                due.append(min([g.at_s for g in mine] or [stay.at_s if stay else 0.0]))
        quorum_s = math.inf if len(came) < start.needed else sorted(came)[start.needed - 1]
        everyone = len(came) + len(gone) == len(start.candidates)
        starts_s = max(ended_s, min(quorum_s, max(came + gone) if everyone else math.inf), *due)
        ended_s = min(log.at_s[round] for log in logs)
        assert ended_s == starts_s, f"round {round} ended at {ended_s}, could have at {starts_s}"
