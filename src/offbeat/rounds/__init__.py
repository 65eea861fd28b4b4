"""Collectives, written once above the world's verbs."""

from offbeat.rounds.agreement import agree, different_rates
from offbeat.rounds.full import Contribution, FullAllReduce
from offbeat.rounds.layout import Flats, Layout
from offbeat.rounds.partial import Arrival, PartialAllReduce
from offbeat.rounds.pile import Pile
from offbeat.rounds.quorum import Quorum
from offbeat.rounds.round import Round
from offbeat.rounds.rules import Measured, Rules
from offbeat.rounds.standalone import Partial, partial_all_reduce

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
    "Round",
    "Rules",
    "agree",
    "different_rates",
    "partial_all_reduce",
]
