"""How far own steps are ahead of the rounds that a worker knows of, in steps of all workers.

    after the latest round      own steps that no round has told of, which are sure,
                                and as many of each other worker as it makes for one of ours

How many that is the latest round to which this worker has brought something has shown, unless the
algorithm knows: where all make as many, what comes of it is exact. A round takes what a worker has
made up to a moment, and the worker may hear of it some steps later: those count, too.
"""

from __future__ import annotations

from offbeat.rounds import Round


class Ahead:
    """One worker's steps since the rounds that it knows of."""

    def __init__(self, brings: float) -> None:
        """`brings`: the steps of all workers for one of this worker's, until a round shows it."""
        self._brings = brings
        self._most = 0  # own steps in a round, at most
        self.begin()

    def begin(self) -> None:
        """This worker has made none yet."""
        self._told = 0  # own steps that are in rounds
        self._after = 0  # own steps when the latest round took what there was

    def round(self, each: Round) -> None:
        """A round is known."""
        self._told += each.mine
        self._after = max(self._after, each.after)
        self._most = max(self._most, each.mine)
        if each.mine:
            self._brings = each.made / each.mine

    def steps(self, made: int, brings: float | None = None) -> float:
        """Say how many steps all workers have made that no known round tells of, most likely.

        This worker has `made` so many in all.
        """
        brings = self._brings if brings is None else brings
        since = made - self._after
        if self._most:  # one round under way, and one to come: beyond that, they may have left
            since = min(since, 2 * self._most)
        return made - self._told + (brings - 1) * since + 1e-6
