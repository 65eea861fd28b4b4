"""What a worker has done and waited for: the answer to "who is slow?"."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from offbeat.rounds import Round


class RoundStats(NamedTuple):
    """One applied round, as this worker saw it."""

    round: int
    ended_s: float
    samples: float
    ranks: tuple[int, ...]
    waited_s: float
    staleness_rounds: int


@dataclass
class Stats:
    """Totals of one worker since it was attached, and its latest rounds.

    What was computed and is neither applied nor dropped is pending: no gradient gets lost. But if
    the others have gone on without this worker, and it has joined them again: `expelled_samples`.
    """

    rank: int
    steps: int = 0
    rounds: int = 0
    skipped_rounds: int = 0
    """Rounds that were not applied, because a gradient in them was not finite."""
    compute_s: float = 0.0
    wait_s: float = 0.0
    """Seconds inside `optimizer.step()` and the join that were neither compute nor update."""
    computed_samples: float = 0.0
    applied_samples: float = 0.0
    dropped_samples: float = 0.0
    abandoned_samples: float = 0.0
    """Of the dropped ones, those whose gradient was left before its end; and the seconds."""
    abandoned_s: float = 0.0
    lost_samples: float = 0.0
    """What workers that have been lost had computed, and no round holds; the same on all others."""
    expelled_samples: float = 0.0
    """What this worker had computed and seen in no round when the others went on without it: they
    know what rounds hold of it, and have counted the rest as lost."""
    inherited_samples: float = field(default=0.0, repr=False)
    """Of a worker that has joined: what rounds to come hold of who was lost in its place, perhaps
    of itself. It is not this one's to count: that one had computed it."""
    dropped_share: float = 0.0
    """DropCompute: the mean share of a round's planned micro-batches that were not begun."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many rounds had which staleness."""
    stale_samples: float = 0.0
    """Samples of all workers in the applied rounds, times the rounds that they were late."""
    join_wait_s: float = 0.0
    """Seconds of `wait_s` at the end, for workers that still had data."""
    waited_for: int | None = None
    """The last of them; None before the end, or if it was this one."""
    replicas_identical: bool | None = None
    """Whether all workers held the same bits at the end; None before the end."""
    history: deque[RoundStats] = field(default_factory=lambda: deque(maxlen=4096), repr=False)

    @property
    def utilization(self) -> float:
        """The share of its time that this worker has computed."""
        return self.compute_s / total if (total := self.compute_s + self.wait_s) else 1.0

    @property
    def pending_samples(self) -> float:
        """What this worker has computed that no applied round holds yet."""
        known = self.applied_samples + self.dropped_samples + self.expelled_samples
        return self.computed_samples - known

    def copy(self, dropped_samples: float, dropped_share: float, lost_samples: float) -> Stats:
        """Return these totals as they are now."""
        return replace(
            self,
            dropped_samples=dropped_samples,
            lost_samples=lost_samples,
            dropped_share=dropped_share,
            staleness=Counter(self.staleness),
            history=self.history.copy(),
        )

    def note(self, applied: Round, ended_s: float) -> None:
        """Count a round that was applied, or a step of this worker's own."""
        merge = applied.merge
        assert merge is not None
        if merge.counts:
            mine = applied.samples_by_rank[self.rank]
            before = min(mine, self.inherited_samples)
            self.inherited_samples -= before
            self.applied_samples += mine - before
        if merge.own:
            return
        self.rounds += 1
        self.staleness[applied.staleness_rounds] += 1
        self.stale_samples += applied.samples * applied.mean_staleness_rounds
        self.history.append(
            RoundStats(
                applied.round,
                ended_s,
                applied.samples,
                applied.ranks,
                applied.waited_s,
                applied.staleness_rounds,
            )
        )
