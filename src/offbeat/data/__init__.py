"""Data that are dealt to whoever is free, instead of divided into fixed shares."""

from offbeat.data.deal import Deal

__all__ = ["Deal"]
