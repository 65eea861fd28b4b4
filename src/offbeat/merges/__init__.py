"""What a worker does with a round: nothing else changes parameters."""

from offbeat.merges.mix import Corrected, HalfStep, HeavyBall, Mix, Tracking
from offbeat.merges.shift import Shift
from offbeat.merges.step import OwnStep, Step

__all__ = [
    "Corrected",
    "HalfStep",
    "HeavyBall",
    "Mix",
    "OwnStep",
    "Shift",
    "Step",
    "Tracking",
]
