"""What the commands have in common that go on until they are interrupted."""

import asyncio
import select
import sys
from collections.abc import Coroutine
from typing import Final

READER_CHECKED_S: Final = 2.0


async def while_read(work: Coroutine[None, None, None]) -> None:
    """Do `work`, and raise BrokenPipeError when nobody reads our output any more: nothing may come for hours
    before the next line would tell."""
    working, unread = asyncio.ensure_future(work), asyncio.ensure_future(_unread())
    try:
        await asyncio.wait((working, unread), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise BrokenPipeError
    finally:
        working.cancel()
        unread.cancel()
        await asyncio.gather(working, unread, return_exceptions=True)


def tell_lost(error: Exception) -> None:
    print(f"pysync: {error}; trying again", file=sys.stderr)


async def _unread() -> None:
    """Return when the other end of our output is closed."""
    while True:
        await asyncio.sleep(READER_CHECKED_S)
        reader = select.poll()
        reader.register(sys.stdout, 0)  # asks for nothing but errors, among them that one
        if reader.poll(0):
            return
