"""One worker's replica, as an algorithm sees it."""

from offbeat.replica.replica import Replica
from offbeat.replica.stats import RoundStats, Stats
from offbeat.replica.stoppable import Stoppable

__all__ = ["Replica", "RoundStats", "Stats", "Stoppable"]
