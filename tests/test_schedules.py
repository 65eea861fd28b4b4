"""The engine under thousands of random schedules: its promises, proved by simulation.

The protocol is the one that runs on a cluster; only the world below it is virtual. Every gradient
is a vector with a single number in a place of its own, so that each round tells exactly which
gradients are in it. schedules.py draws the schedules, schedule_promises.py has the promises.

    pytest tests/test_schedules.py --schedule-seed 1234     replays one schedule, with its log
    python benchmarks/schedules.py --count 1000000          a campaign
"""

from __future__ import annotations

from collections import Counter

from schedule_promises import keeps_every_promise
from schedules import STARTS, drawn

FAST = 300
FULL = 10_000
CHUNK = 500


def test_every_schedule_keeps_every_promise(seeds: range) -> None:
    for seed in seeds:
        keeps_every_promise(seed)


def test_schedules_have_all_that_the_engine_knows() -> None:
    schedules = [drawn(seed) for seed in range(FAST)]
    plans = [plan for schedule in schedules for plan in schedule.plans]
    starts = Counter(plan.start for plan in plans)
    assert {f"_{start}" for start in starts} == {start.__name__ for start in STARTS}
    assert {(plan.start, plan.merge) for plan in plans} >= {
        ("quorum", "step"),
        ("boundary", "step"),
        ("lockstep", "step"),
        ("lockstep", "shift"),
        ("moves", "shift"),
        ("groups", "public"),
        ("arrival", "shift"),
        ("arrival", "outer"),
    }
    assert {event for schedule in schedules for event in schedule.events} == {"metric", "pause"}
    assert sum(len(schedule.plans) == 2 for schedule in schedules) > 30
    assert sum(any(schedule.stays) for schedule in schedules) > 50
    assert sum(schedule.calm for schedule in schedules) > 50
    for feature in ("any_silent", "some_without_samples", "drop_late", "at_once"):
        assert sum(getattr(plan, feature) for plan in plans) > 10, feature
    for rule in ("overdue_s", "max_staleness_rounds"):
        assert sum(getattr(plan.rules, rule) is not None for plan in plans) > 10, rule
    for differs in ({"lateness": "step"}, {"divisor": "workers"}, {"divisor": "moves"}):
        [(name, value)] = differs.items()
        assert sum(getattr(plan.rules, name) == value for plan in plans) > 10, name
    assert sum(plan.rules.bounded for plan in plans) > 10
    assert sum(plan.fragments > 1 for plan in plans) > 10
    assert sum(plan.rules.grace_s > 0 for plan in plans) > 5
