"""Threads that are still in a call of torch's when the interpreter ends: let them be.

A call that cannot be interrupted is made in a thread of its own, which is left behind when a worker
or the store is lost (waiters.py, pool.py, gloo.py). It may return at any time, also while Python
ends:

    program          leaves its block ── Python ends ──────────────────────── exit code 0
    left behind      in TCPStore ────────────────── returns, wants the GIL ─✗ SIGABRT

Up to 3.13, Python ends such a thread by `pthread_exit`, which unwinds its stack; that comes to
pybind11's frames, which may not be unwound, and C++ calls `std::terminate`: the whole process is
aborted, though its work is done. From 3.14 on, Python has the thread sleep for ever. So it does
here: at the very end, and only if such a thread is there, `pause` is what C++ calls. What else
would abort the process so late sleeps as well.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
from contextlib import suppress

_SET_TERMINATE = "_ZSt13set_terminatePFvvE"


@atexit.register
def _let_be() -> None:
    named = any(thread.name.startswith("offbeat") for thread in threading.enumerate())
    if not named or sys.platform != "linux" or sys.version_info >= (3, 14):
        return
    with suppress(OSError, AttributeError):  # a C++ library that is not GNU's
        set_terminate = getattr(ctypes.CDLL("libstdc++.so.6"), _SET_TERMINATE)
        set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
