"""Files on their way to a server: whole in memory, in a file, or as they are made."""

import asyncio
import os
import stat
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path
from typing import Final

Source = bytes | Path | AsyncIterable[bytes]
"""The bytes of a file, where they lie, or chunks that can be had once."""

CHUNK_BYTES: Final = 1 << 18


class Upload:
    """One attempt to send a `source`. It may take any time, but not wait longer than `idle_s` for the server
    to take a chunk: `limit` is then over."""

    def __init__(self, source: Source, idle_s: float | None) -> None:
        """Raises OSError where a file is not there, and ValueError for a pipe, or a device: nobody knows how
        much comes of it, nor whether it comes again. Of a file that grows, what there is now is sent."""
        size: int | None
        chunks: AsyncIterable[bytes]
        if isinstance(source, Path):
            begun = source.stat()
            if not stat.S_ISREG(begun.st_mode):
                raise ValueError(f"{source} is no regular file: pass its chunks")
            size, chunks = begun.st_size, _read(source, begun)
        elif isinstance(source, bytes):
            size, chunks = len(source), _slices(source)
        else:
            size, chunks = None, source
        self.size = size
        """How many bytes it is; None where that is known only at its end."""
        self._chunks = chunks
        self._idle_s = idle_s
        self.limit = asyncio.timeout(None)
        """To send it within."""
        self.failure: Exception | None = None
        """What the source itself raised."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks:
                if self._idle_s is not None:
                    self.limit.reschedule(asyncio.get_running_loop().time() + self._idle_s)
                yield chunk
                self.limit.reschedule(None)
        except Exception as error:
            self.failure = error
            raise


async def _read(path: Path, begun: os.stat_result) -> AsyncIterator[bytes]:
    """The file as it was when it `begun` to be sent. Raises ValueError, before the last chunk, where it is
    another by then."""
    left = begun.st_size
    with await asyncio.to_thread(path.open, "rb") as file:
        while left:
            chunk = await asyncio.to_thread(file.read, min(left, CHUNK_BYTES))
            left -= len(chunk)
            if not chunk or (not left and _is_other(begun, os.fstat(file.fileno()))):
                raise ValueError(f"{path} changed while it was sent")
            yield chunk


def _is_other(begun: os.stat_result, now: os.stat_result) -> bool:
    """Whether anything but what may have been added at its end is other than it was."""
    if (begun.st_dev, begun.st_ino) != (now.st_dev, now.st_ino) or now.st_size < begun.st_size:
        return True
    return now.st_size == begun.st_size and now.st_mtime_ns != begun.st_mtime_ns


async def _slices(source: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(source), CHUNK_BYTES):
        yield source[start : start + CHUNK_BYTES]
