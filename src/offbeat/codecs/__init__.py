"""Codecs: fewer bytes for the sums of a round; a part of the exchange, written above the verbs."""

from typing import Any

from offbeat.codecs.auto import Auto
from offbeat.codecs.base import Codec, Coder
from offbeat.codecs.global_qsgd import GlobalQSGD
from offbeat.codecs.half import Half
from offbeat.codecs.integers import Int4, Int8

__all__ = ["Auto", "Codec", "Coder", "GlobalQSGD", "Half", "Int4", "Int8", "chosen"]


def chosen(codec: Any) -> Codec | None:
    """What a user hands to attach(): a codec, "auto", or None."""
    if codec is None or isinstance(codec, Codec):
        return codec
    if codec == "auto":
        return Auto()
    raise TypeError(f"codec must be a codec such as offbeat.Int8(), 'auto' or None, got {codec!r}")
