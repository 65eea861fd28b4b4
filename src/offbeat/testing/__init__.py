"""Checks that every world must pass, and a way to run a function on real processes.

For those who write a world, an algorithm or a protocol of their own:

    from offbeat import run, testing
    for check in testing.CHECKS:
        run(testing.on_this_world(check), "uniform-8", workers=4)            # virtual
        testing.processes(testing.on_this_world(check), workers=4)           # real
"""

from offbeat.testing.checks import CHECKS, Check, on_this_world
from offbeat.testing.running import Ended, job_variables, processes

__all__ = ["CHECKS", "Check", "Ended", "job_variables", "on_this_world", "processes"]
