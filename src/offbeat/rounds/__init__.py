"""Rounds: when one starts, what travels, and what comes of it; written once above the verbs."""

from offbeat.rounds.agreement import agree
from offbeat.rounds.coded import CodedLaunches
from offbeat.rounds.directions import Directions
from offbeat.rounds.engine import Arrival, Engine
from offbeat.rounds.exchange import Exchange, MakeExchange, SumOverAll
from offbeat.rounds.gossip_lost import Gossip
from offbeat.rounds.groups import Groups, SumInGroups
from offbeat.rounds.header import Header
from offbeat.rounds.judge import DROPPED, Enough, Expiry, Judge, Then, Ticket, Verdict
from offbeat.rounds.layout import Flats, Layout
from offbeat.rounds.means import Means
from offbeat.rounds.neighbours import Neighbours
from offbeat.rounds.pile import Pile
from offbeat.rounds.queue import Queue
from offbeat.rounds.quorum import Quorum
from offbeat.rounds.rates import Rates
from offbeat.rounds.round import Merge, Round
from offbeat.rounds.standalone import Partial, partial_all_reduce
from offbeat.rounds.start import Measured, Rules
from offbeat.rounds.state import Land
from offbeat.rounds.turns import GivesUp, Watches

__all__ = [
    "DROPPED",
    "Arrival",
    "CodedLaunches",
    "Directions",
    "Engine",
    "Enough",
    "Exchange",
    "Expiry",
    "Flats",
    "GivesUp",
    "Gossip",
    "Groups",
    "Header",
    "Judge",
    "Land",
    "Layout",
    "MakeExchange",
    "Means",
    "Measured",
    "Merge",
    "Neighbours",
    "Partial",
    "Pile",
    "Queue",
    "Quorum",
    "Rates",
    "Round",
    "Rules",
    "SumInGroups",
    "SumOverAll",
    "Then",
    "Ticket",
    "Verdict",
    "Watches",
    "agree",
    "partial_all_reduce",
]
