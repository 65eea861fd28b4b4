"""How far the DataLoader is that iterates over a deal: it draws batches ahead of the loop.

A loader with processes of its own draws `prefetch_factor` batches for each of them, before the loop
has asked for one. What has been drawn and not been given to the loop is seen on the loader's
iterator, by names that are not public; where they are missing, nothing is known to be ahead.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import ref

from torch.utils.data import BatchSampler, dataloader


class Loading:
    """The iterator of a DataLoader, if it is one that asks for the batches."""

    def __init__(self, caller: object) -> None:
        known = isinstance(caller, dataloader._BaseDataLoaderIter)
        self._iterator = ref(caller) if known else None
        self._given: int | None = None
        self._in_order = True

    @classmethod
    def of_caller(cls) -> Loading:
        """Of the function that has called the one which calls this."""
        caller = sys._getframe(2).f_locals.get("self")
        if type(caller) is BatchSampler:  # frameworks derive from it what only wraps one
            raise TypeError(
                "a Deal deals whole batches, of which this DataLoader would make batches again: "
                "DataLoader(dataset, batch_sampler=deal), without batch_size and sampler"
            )
        return cls(caller)

    def ahead(self) -> int:
        """Batches that wait in the loader, behind the one that it is about to give to the loop."""
        iterator: Any = None if self._iterator is None else self._iterator()
        if not hasattr(iterator, "_rcvd_idx"):  # no processes of its own, or no DataLoader
            return 0
        self._given, self._in_order = iterator._rcvd_idx, getattr(iterator, "_in_order", True)
        return int(iterator._send_idx - iterator._rcvd_idx)

    def given_so_far(self, drawn: int) -> int:
        """How many of the batches drawn so far the loop has been given, whichever these are."""
        self.ahead()
        return drawn if self._given is None else self._given

    def given(self, drawn: int) -> int:
        """The same, if they are the first ones."""
        if not self._in_order:
            raise RuntimeError(
                "a DataLoader with in_order=False does not say which batches the loop has seen: "
                "leave that out to save the position of a Deal"
            )
        return self.given_so_far(drawn)
