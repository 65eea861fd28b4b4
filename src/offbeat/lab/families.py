"""Families of methods: who waits for whom, in a word. Names are those of contestants."""

from __future__ import annotations

FAMILIES: dict[str, tuple[str, ...]] = {
    "gradient-synchronous": ("sync", "ddp", "lbbsp", "dropcompute"),
    "quorum": ("eager", "msync"),
    "adaptive": ("abs", "nonblocking"),
    "asynchronous": ("asgd", "ringmaster", "rennala", "ringleader", "rescaled"),
    "local and overlapped": ("local", "waitfree", "dasgd", "diloco"),
    "decentralised": ("wagma", "dpsgd", "dmsgd", "decentlam", "edm", "tracking"),
}
OTHER = "other"
"""Of what nobody has put into a family."""


def family(name: str) -> str:
    """Of a contestant, by its name without settings."""
    return next((key for key, members in FAMILIES.items() if name in members), OTHER)
