"""The global random generators of a process, to be swapped at every switch between workers.

    mine = Generators.seeded(0)     what torch, Python and NumPy hold after being seeded with 0
    outside = Generators.now()
    mine.put_back()                 from here on they draw as if nobody else had drawn
    mine.take()                     remember how far they have come

Their public ways of doing this take 1, 14 and 140 microseconds. Python's and NumPy's generators are
both a Mersenne twister of 2,500 bytes at a known address: those bytes are copied as they are. Both
also keep every second normal number for the next call. Python does so in an attribute. NumPy shows
it only in its whole state, which is therefore asked for if its twister has moved, or if there is
such a number.

Where Python's object is not laid out as expected (`_twister` looks, at import), its own `getstate`
and `setstate` are used.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

_TWISTER_BYTES: Final = 625 * 4  # 624 words and a position
_NO_NORMAL: Final = (0, 0.0)

_python: Any = random._inst
_get_torch = torch.default_generator.get_state
_set_torch = torch.default_generator.set_state


class Generators:
    """What the global generators hold for one worker; those in use are another matter."""

    __slots__ = ("next_normal", "numpy", "numpy_next_normal", "python", "torch")

    torch: torch.Tensor
    python: object
    next_normal: float | None
    """Of Python: every second call of `random.gauss` takes it."""
    numpy: bytes | None
    """None if NumPy had not been imported."""
    numpy_next_normal: tuple[int, float]
    """Whether there is one, and the number."""

    @classmethod
    def now(cls) -> Generators:
        """What they hold now."""
        held = cls()
        held.numpy, held.numpy_next_normal = None, _NO_NORMAL
        held.take()
        return held

    @classmethod
    def seeded(cls, seed: int) -> Generators:
        """What they hold after being seeded; those in use are left alone."""
        held, python = cls(), random.Random(seed)
        twister, numpy = _twister(python), _numpy or _find_numpy()
        held.torch = torch.Generator().manual_seed(seed).get_state()
        held.python = python.getstate() if twister is None else bytes(twister)
        held.next_normal = None
        held.numpy = None if numpy is None else numpy.seeded(seed % 2**32)
        held.numpy_next_normal = _NO_NORMAL
        return held

    def take(self) -> None:
        """Remember what they hold now; what was put back last is this."""
        self.torch = _get_torch()
        self.python = _get_python()
        self.next_normal = _python.gauss_next
        if (numpy := _numpy or _find_numpy()) is not None:
            twister = numpy.memory.tobytes()
            if twister != self.numpy or self.numpy_next_normal[0]:
                self.numpy, self.numpy_next_normal = twister, numpy.next_normal()

    def put_back(self, instead_of: Generators | None = None) -> None:
        """Have them hold this; `instead_of` is what they are known to hold."""
        _set_torch(self.torch)
        _set_python(self.python)
        _python.gauss_next = self.next_normal
        if self.numpy is not None and (numpy := _numpy or _find_numpy()) is not None:
            numpy.memory[:] = self.numpy
            known = None if instead_of is None else instead_of.numpy_next_normal
            if known != self.numpy_next_normal:
                numpy.set_next_normal(self.numpy_next_normal)


def _memory(address: int) -> memoryview:
    """The bytes of a Mersenne twister, to be read and written."""
    return memoryview((ctypes.c_char * _TWISTER_BYTES).from_address(address)).cast("B")


def _twister(generator: random.Random) -> memoryview | None:
    """Find the twister in an object of CPython: behind its header, the position comes first."""
    if random.Random.__basicsize__ < object.__basicsize__ + _TWISTER_BYTES:
        return None
    memory = _memory(id(generator) + object.__basicsize__)
    *words, position = generator.getstate()[1]
    return memory if memory.cast("I").tolist() == [position, *words] else None


class _NumPy:
    """`numpy.random`: its generator's public address, and the rest by its whole state."""

    def __init__(self, module: Any) -> None:
        self._random = module
        self._bits = module.mtrand._rand._bit_generator  # kept, so that the address stays valid
        self.memory = _memory(self._bits.ctypes.state_address)

    def next_normal(self) -> tuple[int, float]:
        has_one, number = self._random.get_state(legacy=True)[3:]
        return (has_one, number) if has_one else _NO_NORMAL

    def set_next_normal(self, wanted: tuple[int, float]) -> None:
        self._random.set_state((*self._random.get_state(legacy=True)[:3], *wanted))

    def seeded(self, seed: int) -> bytes:
        bits = self._random.RandomState(seed)._bit_generator
        return bytes(_memory(bits.ctypes.state_address))


_numpy: _NumPy | None = None


def _find_numpy() -> _NumPy | None:
    global _numpy
    module = sys.modules.get("numpy")
    if module is not None:
        _numpy = _NumPy(module.random)
    return _numpy


_get_python: Callable[[], object] = random.getstate
_set_python: Callable[[Any], None] = random.setstate
if (_found := _twister(_python)) is not None:
    _get_python = _found.tobytes
    _set_python = partial(_found.__setitem__, slice(None))
