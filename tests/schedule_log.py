"""What a worker has done and seen under a schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.rounds import Arrival
from offbeat.rounds.start import Start

Starts = dict[int, list[tuple[tuple[int, ...], Start]]]


@dataclass(frozen=True)
class Gradient:
    """One that a worker has computed."""

    version: int
    """Rounds in the parameters that it was computed at."""
    arrival: Arrival | None
    """None for a step of which the program says nothing."""
    at_s: float
    started: int
    """Rounds that had taken this worker's pile when it was contributed."""


@dataclass(frozen=True)
class Same:
    """What must be alike, bit for bit, of one round on every worker."""

    round: int
    sum: tuple[float, ...]
    samples_by_rank: tuple[float, ...]
    divisor: float
    staleness_rounds: int
    mean_staleness_rounds: float
    micro_batches: int
    rates: tuple[float, ...]
    replica: tuple[float, ...]
    """What has become of the parameters by it, without moves of one's own."""


@dataclass(frozen=True)
class Stay:
    """A time away, paused, or after leaving: rounds known at its begin, and soon after its end."""

    knowing: int
    until: int | None
    """The first round for which it surely was here again; None: it has left."""
    at_s: float
    kind: str


@dataclass
class Log:
    """What one worker has done and seen with one engine."""

    gradients: list[Gradient] = field(default_factory=list)
    rounds: list[Same] = field(default_factory=list)
    ended_s: list[float] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    folded: list[bool] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    paused_at: list[int] = field(default_factory=list)
    """Rounds known when all had paused."""
    waited_s: float = 0.0
    publics: list[tuple[float, ...]] = field(default_factory=list)
    """Its public model at each of these moments."""
    steps_at: list[int] = field(default_factory=list)
    """And its steps until then."""
    most_buffers: int = 0
    pending_samples: float = 0.0
    ended: bool = False
    parameters: tuple[float, ...] = ()

    @property
    def left_at_s(self) -> float:
        return self.stays[-1].at_s

    def stay_in(
        self, round: int, kinds: tuple[str, ...] = ("away", "paused", "left")
    ) -> Stay | None:
        """The time of which the start of this round may have been a part."""
        for stay in self.stays:
            during = stay.knowing <= round and (stay.until is None or round < stay.until)
            if during and stay.kind in kinds:
                return stay
        return None


@dataclass(frozen=True)
class Outcome:
    """What all workers have seen of one engine."""

    logs: list[Log]
    starts: Starts
    """By round, what each worker holds to be active, and to be needed for the round to start."""
