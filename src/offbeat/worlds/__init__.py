"""The verbs that protocols are written in, and three worlds behind them."""

from offbeat.worlds.alone import AloneWorld
from offbeat.worlds.base import Activity, Channel, Condition, Control, Work, World
from offbeat.worlds.current import enter_world, has_process_group, leave_world, rank, world_size
from offbeat.worlds.real import RealWorld
from offbeat.worlds.virtual import Run, VirtualWorld, run

__all__ = [
    "Activity",
    "AloneWorld",
    "Channel",
    "Condition",
    "Control",
    "RealWorld",
    "Run",
    "VirtualWorld",
    "Work",
    "World",
    "enter_world",
    "has_process_group",
    "leave_world",
    "rank",
    "run",
    "world_size",
]
