"""Data that are dealt to whoever is free, instead of divided into fixed shares."""

from offbeat.data.deal import Deal
from offbeat.data.shards import DealShards
from offbeat.data.survivors import Survivors

__all__ = ["Deal", "DealShards", "Survivors"]
