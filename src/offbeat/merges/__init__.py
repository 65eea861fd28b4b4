"""What a worker does with a round: nothing else changes parameters."""

from offbeat.merges.mix import Corrected, HalfStep, HeavyBall, Mix, Tracking
from offbeat.merges.outer import Outer
from offbeat.merges.public import Offered, Public
from offbeat.merges.pull import Pull
from offbeat.merges.shift import Shift
from offbeat.merges.step import OwnStep, Step

__all__ = [
    "Corrected",
    "HalfStep",
    "HeavyBall",
    "Mix",
    "Offered",
    "Outer",
    "OwnStep",
    "Public",
    "Pull",
    "Shift",
    "Step",
    "Tracking",
]
