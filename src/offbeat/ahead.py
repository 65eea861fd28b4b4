"""How far own steps are ahead of the rounds that a worker knows of, in steps of all workers.

    after the latest round      own steps that no round has told of, which are sure,
                                and as many of each other worker as it makes for one of ours

How many that is the rounds have shown to which this worker has brought something, unless the
algorithm knows: where all make as many, what comes of it is exact. A round takes what a worker has
made up to a moment, and the worker may hear of it some steps later: those count, too.

A schedule cannot be stepped back, and who is behind catches up at the next round. So the others'
steps are as few as the latest round says, or all of them together: a single one may hold one step
of ours, and fifty of theirs. And what is not sure goes no further than

    - if all had made as many steps as this worker: with equal shares all will have, in the end;
    - what the data come to that are dealt (offbeat.Deal): there are no more steps to be made.
"""

from __future__ import annotations

from offbeat.rounds import Round


class Ahead:
    """One worker's steps since the rounds that it knows of."""

    def __init__(self, whole: int) -> None:
        """`whole`: the steps of all workers for one of each."""
        self._whole = whole
        self._brings = float(whole)  # for one of this worker's, by the latest round
        self._most = 0  # own steps in a round, at most
        self.begin()

    def begin(self) -> None:
        """This worker has made none yet."""
        self._all = 0  # steps of all workers in rounds
        self._told = 0  # of them, this one's
        self._after = 0  # own steps when the latest round took what there was

    def round(self, each: Round) -> None:
        """A round is known."""
        self._all += each.made
        self._told += each.mine
        self._after = max(self._after, each.after)
        self._most = max(self._most, each.mine)
        if each.mine:
            self._brings = each.made / each.mine

    def steps(self, made: int, brings: float | None, to_come: int | None) -> int:
        """Say how many steps all workers have made that no known round tells of, most likely.

        This worker has `made` so many in all; `to_come` are those that there are data for.
        """
        if brings is None:
            brings = min(self._brings, self._whole)
            if self._told:
                brings = min(brings, self._all / self._told)
        since = made - self._after
        if self._most:  # one round under way, and one to come: beyond that, they may have left
            since = min(since, 2 * self._most)
        sure = made - self._told
        likely = min(int(sure + (brings - 1) * since + 1e-6), made * self._whole - self._all)
        if to_come is not None and to_come >= sure:
            likely = min(likely, to_come)
        return max(sure, likely)
