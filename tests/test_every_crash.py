"""A worker crashes after an event of the virtual clock: a part of all of them, of every method.

All of them, of many schedules, and pairs: `python benchmarks/losses.py --exhaustive`.
"""

from __future__ import annotations

from random import Random

import pytest
from crashes import Schedule, names

from offbeat.errors import DeadlockError, WorkerLostError
from offbeat.rounds.members import Members

WORKERS = 3
APART = 20
"""Events from one crash to the next."""
APART_ATTACHING = 70


@pytest.mark.parametrize("name", names(WORKERS))
def test_whoever_crashes_after_whatever_event_the_others_train_on(name: str) -> None:
    schedule, draws = Schedule(name), Random(name)
    events = schedule.events()
    crashed = 0
    for number, event in enumerate(events[draws.randrange(APART) :: APART]):
        first, second, _ = draws.sample(range(WORKERS), WORKERS)
        crashes = [(event, first)]
        if number % 2:  # another one, while the others regroup
            crashes.append((event + draws.randrange(40), second))
        crashed += schedule.lived_through(*crashes)
    assert crashed > 0


def test_after_every_event_of_a_lockstep_either_of_two_may_crash() -> None:
    schedule = Schedule("sync", steps=(1, 1), speed=(1.0, 0.6))
    events = schedule.events()
    crashed = [schedule.lived_through((event, rank)) for event in events for rank in (0, 1)]
    assert crashed[:20] == [1] * 20


@pytest.mark.parametrize("name", names(WORKERS))
def test_whoever_crashes_while_all_attach_the_others_attach_without_it(name: str) -> None:
    """Or, if it is the one whose model they wait for, and nobody has it, they all say so."""
    schedule, draws = Schedule(name), Random(f"{name} attaches")
    events = schedule.events_before()
    for number, event in enumerate(events[draws.randrange(APART_ATTACHING) :: APART_ATTACHING]):
        first, second, _ = draws.sample(range(WORKERS), WORKERS)
        crashes = [(event, first)]
        if number % 2:  # another one, while the others do it again
            crashes.append((event + draws.randrange(40), second))
        _lived_or_had_no_model(schedule, crashes)


def _lived_or_had_no_model(schedule: Schedule, crashes: list[tuple[int, int]]) -> None:
    """Have the others live through it; or all raise, since nobody has the model of worker 0 yet."""
    try:
        assert schedule.lived_through(*crashes) > 0
    except WorkerLostError as error:
        words = str(error)
    else:
        return
    assert "before anybody else had its model" in words
    assert 0 in [rank for _, rank in crashes]


def test_a_crash_that_is_not_survived_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks can fail: here the others go on waiting for who is lost."""
    monkeypatch.setattr(Members, "_without_lost", lambda self, members: None)
    schedule = Schedule("eager-all")
    with pytest.raises(DeadlockError):
        schedule.lived_through((schedule.events()[5], 1))
