"""One thread for heavy work, and what becomes of the memory that it used.

Decoding a large body takes a core for tens of milliseconds. In the default thread pool, several such bodies
would take most of the core from the event loop; here they are decoded one after another, and the loop goes
first.
"""

import asyncio
import ctypes
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NICENESS: Final = 5
"""Niceness of the thread, added to that of the process."""
MAX_ARENAS: Final = 1
"""Number of heaps of glibc. By default each thread has its own, up to eight per core, and each keeps the
memory that was freed. A buffer that one thread allocates and another frees is then reused as well."""
_M_ARENA_MAX: Final = -8


def _lower_priority() -> None:
    if sys.platform == "linux":
        os.nice(NICENESS)  # of this thread alone, there


_thread: Final = ThreadPoolExecutor(1, "heavy-work", _lower_priority)


async def run_heavy(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return the result of `work`, which runs after the heavy work that was begun before."""
    return await asyncio.get_running_loop().run_in_executor(_thread, partial(work, *args, **options))


def limit_arenas() -> None:
    """Let the process keep less of the memory that it frees. Called before other threads start. Has no effect
    with a C library other than glibc."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, MAX_ARENAS)


_libc: Final = ctypes.CDLL(None)
