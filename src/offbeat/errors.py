"""Every exception that offbeat raises at run time, and every warning of its own.

    OffbeatError
    ├── ClusterError (ValueError)         a cluster file that cannot be meant
    ├── DisagreementError                 workers that were set up differently
    │   └── DealError                     workers that deal different data
    ├── DetachedError                     an optimizer used after its block, or attached twice
    ├── GradientError                     a gradient that cannot be reduced
    │   └── NonFiniteGradientError        NaN or infinity; names rank, round and parameter
    ├── ReplicasDifferError               replicas that differ at the end of the block
    ├── ReportError                       records that cannot be read, a report not written
    ├── ScheduleError                     a scheduler that ends before training does
    ├── WorldError                        the world below an algorithm
    │   ├── WorkerLostError               a worker is gone; names its rank
    │   │   ├── TooFewWorkersError        and so many that the run ends: see min_workers
    │   │   ├── EpochOver                 the same, where the others go on without it
    │   │   ├── ExpelledError             they go on without this one, which was silent for long
    │   │   └── NobodyToJoinError         all have ended whom a worker was to join
    │   ├── ClosedError                   a verb after the world, or its process group, was closed
    │   ├── StillAttachedError (RuntimeError)  destroy_process_group() before close()
    │   └── DeadlockError                 virtual time: nothing is left to wake
    └── WorkerLeft                        not a fault: a scripted worker leaves; ends its block

    UserWarning
    ├── StuckWarning                      a collective of the program's own that some never call
    ├── PortingWarning                    a line that means something else than with DDP
    └── HiddenWaitWarning                 what has workers wait though their method does not

A wrong argument is a plain ValueError or TypeError, raised before anything is stored.
"""

from __future__ import annotations


class OffbeatError(Exception):
    """The root of all that offbeat raises at run time."""

    everywhere = False
    """Whether every worker raises it at the same point, so that all can end in an orderly way."""


class ClusterError(OffbeatError, ValueError):
    """A cluster file that is malformed or describes an impossible cluster."""


class DisagreementError(OffbeatError):
    """Workers that must be set up alike are not: algorithm, settings, shapes, dtypes."""

    everywhere = True


class DealError(DisagreementError):
    """Workers that deal data among them have different data, or settings.

    The one that notices raises it. The others may be in the middle of a round, and learn of it by
    that worker's end: `WorkerLostError` has these words, too.
    """

    everywhere = False


class DetachedError(OffbeatError):
    """An optimizer stepped after its block had ended, or attached while still attached."""


class GradientError(OffbeatError):
    """A gradient that cannot be reduced."""


class NonFiniteGradientError(GradientError):
    """A gradient held NaN or infinity."""

    everywhere = True

    def __init__(
        self, message: str, rank: int | None = None, round: int = -1, parameter: str = ""
    ) -> None:
        super().__init__(message, rank, round, parameter)  # all of them, so that it can be pickled
        self.rank = rank
        self.round = round
        self.parameter = parameter

    def __str__(self) -> str:
        return str(self.args[0])


class ReplicasDifferError(OffbeatError):
    """Replicas differ at the end of the block; raised when all have left it."""

    everywhere = True


class ScheduleError(OffbeatError):
    """A scheduler that was handed to attach() has come to its end, and training goes on."""

    everywhere = True


class ReportError(OffbeatError):
    """Records that cannot be read, or a report that cannot be written."""


class WorldError(OffbeatError):
    """Something happened to the world that an algorithm runs in."""


class WorkerLostError(WorldError):
    """A worker is gone: its process ended, or its code raised.

    `raised` says that its own script is known to have raised something; the message says what.
    """

    def __init__(self, message: str, rank: int | None = None, raised: bool = False) -> None:
        super().__init__(message, rank, raised)
        self.rank = rank
        self.raised = raised

    def __str__(self) -> str:
        return str(self.args[0])


class TooFewWorkersError(WorkerLostError):
    """Fewer workers are left than `min_workers`; raised by all of them, between two steps."""

    everywhere = True


class EpochOver(WorkerLostError):  # noqa: N818 - an event, not an error
    """The members have changed, and what was opened among the former ones is of no more use.

    What lives through a loss catches it, and begins anew among those who are left: members.py.
    """


class ExpelledError(WorkerLostError):
    """The others have gone on without this worker, which was silent: it can join them again.

    What is attached does so by itself, if its method can be joined; else it raises this. If they
    have ended meanwhile, that is a `NobodyToJoinError`.
    """


class NobodyToJoinError(WorkerLostError):
    """A worker is to join others, again or for the first time, and they have ended.

    A process that does not catch it ends with its sentence, and without a traceback.
    """


class ClosedError(WorldError):
    """A verb was used after the world, or the process group under it, had been closed."""


class StillAttachedError(WorldError, RuntimeError):
    """The program ends its process group, but has not left its block: nothing was destroyed."""


class DeadlockError(WorldError):
    """In virtual time every worker is blocked and nothing is left that could wake one."""


class WorkerLeft(OffbeatError):  # noqa: N818 - an event, not an error
    """The cluster file makes this worker leave now; the block that was attached ends quietly."""


class StuckWarning(UserWarning):
    """A worker has waited long in a collective of the program's own; says where everybody is."""


class PortingWarning(UserWarning):
    """A line of the program means something else here than with DistributedDataParallel."""


class HiddenWaitWarning(UserWarning):
    """Something has workers wait though their method does not: said by `attach(..., warn=True)`."""
