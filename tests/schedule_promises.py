"""What must hold of every schedule, whoever is slow, away, paused or gone."""

from __future__ import annotations

from collections import defaultdict

import pytest
import schedule_moments
import schedule_neighbours
import schedule_queue
from schedule_log import Log, Outcome
from schedule_play import LR, MOMENTUM, play
from schedules import SILENT, Plan, Schedule, drawn

from offbeat.rounds.log import MOST, MOST_TAKEN_FROM

Inside = list[dict[int, list[int]]]  # by rank and round: the steps whose gradients are in it
BUFFERS = {"plain": 9, "step": 9, "shift": 13, "outer": 14, "public": 6, "mix": 13}
"""Gradient-sized ones that an engine may keep alive, by merge."""


def keeps_every_promise(seed: int) -> None:
    """Play a schedule, and hold what has happened against every promise."""
    schedule = drawn(seed)
    try:
        for plan, outcome in zip(schedule.plans, play(schedule), strict=True):
            check(schedule, plan, outcome)
    except Exception as error:
        error.add_note(
            f"{schedule}\nreplay it alone: pytest tests/test_schedules.py --schedule-seed {seed}"
        )
        raise


def check(schedule: Schedule, plan: Plan, outcome: Outcome, virtual: bool = True) -> None:
    """Hold what has happened with one engine against every promise.

    Moments are compared in virtual time only: real workers have a clock each.
    """
    logs = outcome.logs
    if plan.graph:
        schedule_neighbours.check(plan, logs)
        _all_have_ended(logs)
        _all_pause_alike(logs)
        _few_buffers(schedule, plan, logs)
        return
    _every_worker_takes_every_round_once_in_order_and_alike(plan, logs)
    if plan.judge:
        _all_have_ended(logs)
        _all_pause_alike(logs)
        _rates_are_agreed(plan, logs)
        _few_buffers(schedule, plan, logs)
        schedule_queue.check(plan, logs)
        if not schedule_queue.averages(plan):
            inside = _every_gradient_is_applied_once_or_dropped(plan, logs)
            _staleness_is_true_and_bounded(plan, logs, inside)
        if virtual and schedule.calm and schedule.free:
            schedule_queue.check_moments(schedule, logs)
        return
    if plan.fragments > 1:
        _every_move_is_in_one_round_of_each_fragment(plan, logs)
        _the_base_has_moved_by_what_rounds_brought(plan, logs)
        _all_have_ended(logs)
        _all_pause_alike(logs)
        _workers_agree_on_what_starts_a_round(plan, outcome)
        _few_rounds_are_empty(schedule, plan, logs)
        return
    if plan.merge == "public":
        _no_round_changes_the_mean_of_all_models(plan, logs)
        inside = _every_sample_is_counted_once(plan, logs)
    else:
        inside = _every_gradient_is_applied_once_or_dropped(plan, logs)
    if plan.merge in ("shift", "outer"):
        _the_base_has_moved_by_what_rounds_brought(plan, logs)
    _all_have_ended(logs)
    _all_pause_alike(logs)
    _rates_are_agreed(plan, logs)
    _staleness_is_true_and_bounded(plan, logs, inside)
    _what_is_dropped_was_late_or_too_stale(plan, logs)
    if not plan.rules.lockstep:
        _workers_agree_on_what_starts_a_round(plan, outcome)
        _every_round_has_its_quorum(schedule, plan, outcome, inside)
    _few_rounds_are_empty(schedule, plan, logs)
    _few_buffers(schedule, plan, logs)
    if virtual and schedule.calm:
        schedule_moments.check(schedule, plan, outcome, inside)


def _few_buffers(schedule: Schedule, plan: Plan, logs: list[Log]) -> None:
    for rank, log in enumerate(logs):
        most = BUFFERS[plan.merge] + (MOST_TAKEN_FROM - MOST) * schedule.followed
        if plan.start == "queue" and schedule.followed:  # one of each other, before its own
            most += schedule.workers - 1
        assert log.most_buffers <= most or schedule.apply_s[rank], (
            f"worker {rank} kept {log.most_buffers} gradient-sized buffers alive"
        )


def _every_worker_takes_every_round_once_in_order_and_alike(plan: Plan, logs: list[Log]) -> None:
    for rank, log in enumerate(logs):
        assert [taken.round for taken in log.rounds] == list(range(len(logs[0].rounds))), (
            f"rounds that worker {rank} has taken"
        )
        for mine, first in zip(log.rounds, logs[0].rounds, strict=True):
            assert mine == first, (
                f"round {first.round} is not the same, or not applied alike, on worker {rank} "
                f"and on worker 0: {mine}, {first}"
            )
        if log.rounds and plan.merge != "public":
            assert log.parameters == log.rounds[-1].replica, (
                f"worker {rank} ends elsewhere than its last round: {log.parameters}"
            )


def _every_gradient_is_applied_once_or_dropped(plan: Plan, logs: list[Log]) -> Inside:
    inside: Inside = [defaultdict(list) for _ in logs]
    for rank, place in enumerate(plan.places):
        samples, found = plan.samples[rank], []
        for taken in logs[0].rounds:
            brought = taken.samples_by_rank[rank]
            steps = [step for step, index in enumerate(place) if taken.sum[index] > 0.5]
            for step in steps:
                weight = brought if plan.moves else samples[step]
                if plan.rules.at_arrival:
                    weight = 1
                assert taken.sum[place[step]] == pytest.approx(weight, abs=1e-9), (
                    f"the gradient of worker {rank}, step {step} in round {taken.round}"
                )
            assert brought == sum(samples[step] for step in steps), (
                f"worker {rank} has {brought} samples in round {taken.round}, with steps {steps}"
            )
            inside[rank][taken.round] = steps
            found += steps
        kept = [
            step
            for step, gradient in enumerate(logs[rank].gradients)
            if gradient.arrival not in ("dropped", None) and samples[step]
        ]
        assert found == kept, (
            f"steps of worker {rank} that were applied, in order, and those that were not dropped"
        )
    for taken in logs[0].rounds:
        total = sum(taken.samples_by_rank)
        if plan.rules.at_arrival:  # who is late counts, too
            gave = sum(map(bool, taken.samples_by_rank))
            assert taken.divisor in range(gave, len(logs) + 1)
        else:
            assert taken.divisor == (len(logs) if plan.rules.divisor == "workers" else total)
    return inside


def _every_move_is_in_one_round_of_each_fragment(plan: Plan, logs: list[Log]) -> None:
    for rank, place in enumerate(plan.places):
        made = [
            index
            for index, samples, gradient in zip(
                place, plan.samples[rank], logs[rank].gradients, strict=True
            )
            if samples > 0 and gradient.arrival is not None
        ]
        for fragment in range(plan.fragments):
            first = fragment * plan.numel
            found = [
                index
                for taken in logs[0].rounds
                for index in place
                if taken.sum[first + index] > 0.5
            ]
            assert found == made, f"moves of worker {rank} in rounds of fragment {fragment}"
            for taken in logs[0].rounds:
                brought = [taken.sum[first + index] for index in place]
                assert brought == pytest.approx([round(each) for each in brought], abs=1e-9)


def _the_base_has_moved_by_what_rounds_brought(plan: Plan, logs: list[Log]) -> None:
    """And by nothing else, exactly: at once, or through the outer optimizer."""
    rounds = logs[0].rounds
    base, momentum = ([0.0] * (plan.numel * plan.fragments) for _ in range(2))
    for taken in rounds:
        if sum(taken.samples_by_rank):
            move = [each / taken.divisor for each in taken.sum]
            if plan.merge == "outer":
                momentum = [MOMENTUM * b + m for b, m in zip(momentum, move, strict=True)]
                move = [LR * (m + MOMENTUM * b) for b, m in zip(momentum, move, strict=True)]
            base = [each + by for each, by in zip(base, move, strict=True)]
        assert taken.replica == pytest.approx(base, abs=1e-9), f"the base after round {taken.round}"


def _no_round_changes_the_mean_of_all_models(plan: Plan, logs: list[Log]) -> None:
    """At every pause, and at the end, when all have the same model."""
    for pause in range(len(logs[0].publics)):
        steps = [log.steps_at[pause] for log in logs]
        total = [sum(each) for each in zip(*(log.publics[pause] for log in logs), strict=True)]
        assert total == pytest.approx(_moved(plan, logs, steps), abs=1e-9)
    everything = [len(log.gradients) for log in logs]
    mean = [moved / len(logs) for moved in _moved(plan, logs, everything)]
    for rank, log in enumerate(logs):
        assert log.parameters == logs[0].parameters, f"worker {rank} ends elsewhere than worker 0"
        assert log.parameters == pytest.approx(mean, abs=1e-9)


def _moved(plan: Plan, logs: list[Log], steps: list[int]) -> list[float]:
    """By place, what all workers together have moved in so many of their steps."""
    moved = [0.0] * plan.numel
    for rank, place in enumerate(plan.places):
        for step in range(steps[rank]):
            moved[place[step]] += plan.samples[rank][step] > 0
    return moved


def _every_sample_is_counted_once(plan: Plan, logs: list[Log]) -> Inside:
    """Rounds hold a worker's steps in their order; which, their samples tell."""
    inside: Inside = [defaultdict(list) for _ in logs]
    for rank, own in enumerate(plan.samples):
        left = [step for step in range(len(own)) if own[step] > 0]
        for taken in logs[0].rounds:
            steps = inside[rank][taken.round]
            while sum(own[step] for step in steps) < taken.samples_by_rank[rank]:
                steps.append(left.pop(0))
            assert sum(own[step] for step in steps) == taken.samples_by_rank[rank]
            assert taken.divisor in (plan.group, len(logs))
        assert not left, f"steps {left} of worker {rank} are in no round"
    return inside


def _all_have_ended(logs: list[Log]) -> None:
    for rank, log in enumerate(logs):
        assert log.ended, f"worker {rank} has left before all had"
        assert log.pending_samples == 0, f"worker {rank} ends with {log.pending_samples} pending"


def _all_pause_alike(logs: list[Log]) -> None:
    paused = [log.paused_at for log in logs]
    assert paused == paused[:1] * len(logs), f"rounds known after each common pause: {paused}"


def _rates_are_agreed(plan: Plan, logs: list[Log]) -> None:
    for taken in logs[0].rounds:
        if plan.moves or not sum(taken.samples_by_rank):
            continue
        assert taken.rates[1:] == (0.9, 0.0, 0.0)
        assert taken.rates[0] == 0.1 if plan.rates_alike else 0 < taken.rates[0] <= 0.1


def _staleness_is_true_and_bounded(plan: Plan, logs: list[Log], inside: Inside) -> None:
    bound = plan.rules.max_staleness_rounds
    for taken in logs[0].rounds:
        ages = [
            (taken.round - log.gradients[step].version, plan.samples[rank][step])
            for rank, log in enumerate(logs)
            for step in inside[rank][taken.round]
        ]
        assert all(age >= 0 for age, _ in ages), f"round {taken.round}, before its parameters"
        oldest = max((age for age, _ in ages), default=0)
        if plan.some_without_samples:  # one without samples is not seen in the sum
            assert taken.staleness_rounds >= oldest
        else:
            assert taken.staleness_rounds == oldest, f"staleness of round {taken.round}"
        assert bound is None or taken.staleness_rounds <= bound, (
            f"round {taken.round} holds a gradient {taken.staleness_rounds} rounds late"
        )
        if samples := sum(weight for _, weight in ages):
            assert taken.mean_staleness_rounds * samples == pytest.approx(
                sum(age * weight for age, weight in ages), rel=1e-5
            )


def _what_is_dropped_was_late_or_too_stale(plan: Plan, logs: list[Log]) -> None:
    bound = plan.rules.max_staleness_rounds
    for rank, log in enumerate(logs):
        for step, gradient in enumerate(log.gradients):
            if gradient.arrival == "late":
                assert not plan.drop_late, f"worker {rank}, step {step} was not dropped"
            if gradient.arrival != "dropped" or plan.drop_late:
                continue
            assert bound is not None, f"worker {rank}, step {step} was dropped against the policy"
            assert gradient.started - gradient.version > bound
            assert any(stay.kind == "away" and stay.at_s <= gradient.at_s for stay in log.stays), (
                f"worker {rank}, step {step} became too stale, but was never away"
            )


def _workers_agree_on_what_starts_a_round(plan: Plan, outcome: Outcome) -> None:
    """And it is what the settings say, among those who have not left."""
    logs, rounds = outcome.logs, len(outcome.logs[0].rounds)
    assert len(outcome.starts) - rounds in (0, 1)  # the one after the last, if it was empty
    assert sorted(outcome.starts) == list(range(len(outcome.starts)))
    for round, seen in outcome.starts.items():
        active, start = seen[0]
        assert seen == [seen[0]] * len(logs), f"workers disagree about the start of round {round}"
        assert start.round >= round  # some have had no number
        assert start.candidates | start.due <= set(active)
        periodic = plan.rules.periodic(round)
        quorum = plan.rules.period_quorum if periodic else plan.rules.quorum
        expected = _candidates_and_needed(quorum, len(logs), len(active))
        assert (len(start.candidates), start.needed) == expected
        assert not start.due or plan.rules.max_staleness_rounds is not None
        for rank in set(range(len(logs))) - set(active):
            stay = logs[rank].stay_in(round - 1, ("paused", "left"))
            assert stay is not None, f"worker {rank} does not count in round {round}"


def _candidates_and_needed(quorum: str | int | float, workers: int, active: int) -> tuple[int, int]:
    match str(quorum).split(":"):
        case ["solo"]:
            return active, 1
        case ["majority"]:
            return 1, 1
        case ["all"]:
            return active, active
        case ["first", k]:
            return min(int(k), active), 1
        case ["last", k]:
            return min(int(k), active), min(int(k), active)
    if isinstance(quorum, float):
        quorum = next(m for m in range(1, workers + 1) if m / workers == quorum)
    return active, min(int(quorum), active)


def _every_round_has_its_quorum(
    schedule: Schedule, plan: Plan, outcome: Outcome, inside: Inside
) -> None:
    """A round has enough candidates on time, or all others are not here."""
    rules = plan.rules
    if rules.overdue_s is not None or rules.bounded or plan.at_once or plan.some_without_samples:
        return  # others are counted, too
    logs = outcome.logs
    for taken in logs[0].rounds:
        start = outcome.starts[taken.round][0][1]
        there = {
            rank
            for rank in start.candidates
            if _is_there(plan, logs[rank], taken.round, inside[rank][taken.round])
        }
        missing = start.candidates - there
        assert len(there) >= start.needed or all(
            logs[rank].stay_in(taken.round) is not None for rank in missing
        ), f"round {taken.round} has {sorted(there)} on time and not {sorted(missing)}: {start}"
        for rank in start.due:
            gave = inside[rank][taken.round]
            assert gave or logs[rank].stay_in(taken.round) is not None, (
                f"worker {rank} was due in round {taken.round}, and gave nothing"
            )


def _is_there(plan: Plan, log: Log, round: int, steps: list[int]) -> bool:
    """Whether it brings a gradient on time; or it has waited for the round with a full pile.

    Or any gradient, where who is late counts, too.
    """
    full = plan.full is not None and len(steps) >= plan.full
    if plan.rules.periodic(round) and steps:
        return True
    return full or any(log.gradients[step].arrival == "on time" for step in steps)


def _few_rounds_are_empty(schedule: Schedule, plan: Plan, logs: list[Log]) -> None:
    """Those without anything are no more than there are reasons for one."""
    reasons = 2 + 3 * sum(len(log.stays) for log in logs)
    reasons += sum(
        gradient.arrival in ("dropped", None) or plan.samples[rank][step] in (0, SILENT)
        for rank, log in enumerate(logs)
        for step, gradient in enumerate(log.gradients)
    )
    if plan.at_once:
        reasons += sum(len(log.gradients) for log in logs)
    if plan.rules.overdue_s is not None:
        reasons += int(max(log.left_at_s for log in logs) / plan.rules.overdue_s)
    empty = sum(not sum(taken.samples_by_rank) for taken in logs[0].rounds)
    assert empty <= reasons, f"{empty} rounds of {len(logs[0].rounds)} are empty"
