"""Collectives, written once above the world's verbs."""

from offbeat.collectives.agreement import agree
from offbeat.collectives.full import Contribution, FullAllReduce
from offbeat.collectives.layout import Flats, Layout
from offbeat.collectives.record import Record

__all__ = ["Contribution", "Flats", "FullAllReduce", "Layout", "Record", "agree"]
