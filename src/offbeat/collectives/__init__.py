"""Collectives, written once above the world's verbs."""

from offbeat.collectives.agreement import agree, different_rates
from offbeat.collectives.full import Contribution, FullAllReduce
from offbeat.collectives.layout import Flats, Layout
from offbeat.collectives.partial import Arrival, PartialAllReduce
from offbeat.collectives.pile import Pile
from offbeat.collectives.quorum import Quorum
from offbeat.collectives.record import Record
from offbeat.collectives.rules import Measured, Rules
from offbeat.collectives.standalone import Partial, partial_all_reduce

__all__ = [
    "Arrival",
    "Contribution",
    "Flats",
    "FullAllReduce",
    "Layout",
    "Measured",
    "Partial",
    "PartialAllReduce",
    "Pile",
    "Quorum",
    "Record",
    "Rules",
    "agree",
    "different_rates",
    "partial_all_reduce",
]
