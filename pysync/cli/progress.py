"""How far a long command is, for a person at a terminal."""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Final, Self

REFRESH_S: Final = 0.5
_ERASE: Final = "\r\x1b[K"


class Progress:
    """A line on standard error that changes until the command ends; nothing unless that is a terminal. `done`
    returns the number of objects up to now, and of bytes. `whole` is about the number of all objects, 0 if it
    is unknown. An async context manager."""

    def __init__(self, done: Callable[[], tuple[int, int]], whole: int = 0) -> None:
        self.whole = whole
        self._done = done
        self._is_terminal = sys.stderr.isatty()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._is_terminal:
            self._task = asyncio.create_task(self._refresh())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.clear()

    def clear(self) -> None:
        """Erase the line, before something else is printed."""
        if self._is_terminal:
            print(_ERASE, end="", file=sys.stderr, flush=True)

    async def _refresh(self) -> None:
        begun_s = time.monotonic()
        while True:
            text = describe_progress(*self._done(), time.monotonic() - begun_s, self.whole)
            print(f"{_ERASE}{text}", end="", file=sys.stderr, flush=True)
            await asyncio.sleep(REFRESH_S)


def describe_progress(objects: int, size: int, elapsed_s: float, whole: int = 0) -> str:
    """Return what was done in `elapsed_s`, at which rate, and the time left while it is less than `whole`."""
    text = f"{objects:,} objects" if objects >= whole else f"{objects:,} of {whole:,} objects"
    text += f", {size / 1e6:,.1f} MB"
    if objects and elapsed_s >= 1:
        text += f" ({objects / elapsed_s:,.0f} objects/s, {size / 1e6 / elapsed_s:,.1f} MB/s)"
        if objects < whole:
            minutes, seconds = divmod(round(elapsed_s * (whole - objects) / objects), 60)
            text += f", {minutes} min {seconds} s left"
    return text
