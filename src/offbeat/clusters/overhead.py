"""What Python, the store and the operating system cost beyond device and network."""

from math import log1p

from pydantic import model_validator

from offbeat.clusters import draws
from offbeat.clusters.tables import NotNegative, Table


class Overhead(Table):
    """Seconds of the host, charged in virtual time; real processes pay them as they come."""

    step_s: NotNegative = 0.0
    """Of every micro-batch, on the worker itself: hooks, the optimizer, a late wake-up; on
    average."""
    jitter_s: NotNegative = 0.0
    """So much of it is drawn, from an exponential of this mean: who of equals comes last is left to
    chance."""
    exchange_s: NotNegative = 0.0
    """Of every collective or message, beyond what the network takes."""
    wake_s: NotNegative = 0.0
    """From when another activity of a worker lets one go on, until that does."""

    @model_validator(mode="after")
    def _within_the_step(self) -> "Overhead":
        if self.jitter_s > self.step_s:
            raise ValueError(
                f"jitter_s is a part of step_s: at most {self.step_s:g}, got {self.jitter_s:g}"
            )
        return self

    def of_step_s(self, key: int, step: int) -> float:
        """Cost one micro-batch of the worker that draws by this key."""
        if not self.jitter_s:
            return self.step_s
        return self.step_s - self.jitter_s * (1.0 + log1p(-draws.uniform(key, step)))

    def __str__(self) -> str:
        return (
            f"{1e6 * self.step_s:.0f} µs per micro-batch ({1e6 * self.jitter_s:.0f} by chance), "
            f"{1e6 * self.exchange_s:.0f} per exchange, {1e6 * self.wake_s:.0f} to wake up"
        )
