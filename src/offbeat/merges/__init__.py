"""What a worker does with a round: nothing else changes parameters."""

from offbeat.merges.shift import Shift
from offbeat.merges.step import OwnStep, Step

__all__ = ["OwnStep", "Shift", "Step"]
