"""Files on their way to a server: whole in memory, in a file, or as they are made."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from pathlib import Path
from typing import Final

Source = bytes | Path | AsyncIterable[bytes]
"""The bytes of a file, where they lie, or chunks that can be had once."""

CHUNK_BYTES: Final = 1 << 18


class Upload:
    """One attempt to send a `source`. It may take any time, but not wait longer than `idle_s` for the server
    to take a chunk: `limit` is then over."""

    def __init__(self, source: Source, idle_s: float | None) -> None:
        """Raises OSError where a file is not there. Of one that grows, what there is now is sent."""
        self._source = source
        self.size = _size(source)
        """How many bytes it is; None where that is known only at its end."""
        self._idle_s = idle_s
        self.limit = asyncio.timeout(None)
        """To send it within."""
        self.failure: Exception | None = None
        """What the source itself raised."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        sent, size = 0, self.size
        try:
            async for chunk in _chunks(self._source):
                sent += len(chunk)
                if self._idle_s is not None:
                    self.limit.reschedule(asyncio.get_running_loop().time() + self._idle_s)
                yield chunk
                self.limit.reschedule(None)
            if size is not None and sent < size:
                raise ValueError("the file became shorter while it was sent")
        except Exception as error:
            self.failure = error
            raise


def _size(source: Source) -> int | None:
    match source:
        case bytes():
            return len(source)
        case Path():
            return source.stat().st_size
    return None


async def _chunks(source: Source) -> AsyncIterator[bytes]:
    match source:
        case bytes():
            for chunk in _slices(source):
                yield chunk
        case Path():
            with await asyncio.to_thread(source.open, "rb") as file:
                while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    yield chunk
        case _:
            async for chunk in source:
                yield chunk


def _slices(source: bytes) -> Iterator[bytes]:
    for start in range(0, len(source), CHUNK_BYTES):
        yield source[start : start + CHUNK_BYTES]
