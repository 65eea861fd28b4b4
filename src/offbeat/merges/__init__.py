"""What a worker does with a round: nothing else changes parameters."""

from offbeat.merges.public import Offered, Public
from offbeat.merges.shift import Shift
from offbeat.merges.step import OwnStep, Step

__all__ = ["Offered", "OwnStep", "Public", "Shift", "Step"]
