"""What Python, the store and the operating system cost beyond device and network."""

from offbeat.clusters.tables import NotNegative, Table


class Overhead(Table):
    """Seconds of the host, charged in virtual time; real processes pay them as they come."""

    step_s: NotNegative = 0.0
    """Of every micro-batch, on the worker itself: hooks, the optimizer, a late wake-up."""
    exchange_s: NotNegative = 0.0
    """Of every collective or message, beyond what the network takes."""
    wake_s: NotNegative = 0.0
    """From when another activity of a worker lets one go on, until that does."""

    def __str__(self) -> str:
        return (
            f"{1e6 * self.step_s:.0f} µs per micro-batch, {1e6 * self.exchange_s:.0f} per "
            f"exchange, {1e6 * self.wake_s:.0f} to wake up"
        )
