"""Uploads written by hand."""

import asyncio


async def upload(writer: asyncio.StreamWriter, size: int) -> int:
    """How many of `size` bytes could be sent before the other side closed."""
    piece = b"x" * 65536
    for sent in range(0, size, len(piece)):
        try:
            writer.write(piece)
            await writer.drain()
        except ConnectionError:
            return sent
    return size
