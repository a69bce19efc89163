"""Streams across kills and cuts: every write is told once."""

import asyncio
import random
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import Browser
from support.s3_fault_proxy import FaultProxy
from support.server_process import serving
from support.sse_client import EventStream, listen

pytestmark = pytest.mark.process

GONE = (ConnectionError, EOFError, asyncio.IncompleteReadError)


async def received(base: str, chances: random.Random) -> AsyncGenerator[Any, None]:
    """The events of a client that comes back wherever its stream ends, and hangs up itself now and then."""
    cursor = ""
    async with aiohttp.ClientSession() as session:
        while True:
            stream: EventStream | None = None
            try:
                stream = await listen(
                    Browser(base, session),
                    headers={"Last-Event-ID": cursor} if cursor else {},
                    collections="notes",
                )
                for _ in range(chances.randrange(1, 40)):
                    block = await stream.block()
                    if block.data is not None:
                        yield block
            except GONE:
                await asyncio.sleep(0)
            finally:
                if stream is not None:
                    cursor = stream.last_id or cursor
                    stream.writer.transport.abort()
                    await stream.close()


async def write(base: str, names: list[str], written: asyncio.Queue[str]) -> None:
    """Create these documents, one after the other, each until it is there."""
    async with aiohttp.ClientSession() as session:
        browser = Browser(base, session)
        for name in names:
            while True:
                try:
                    status = (await browser.push(f"notes/{name}", {"name": name})).status
                except aiohttp.ClientError:
                    await asyncio.sleep(0)
                    continue
                if status in (200, 409):  # 409: by an attempt whose answer was lost
                    break
            written.put_nowait(name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [1, 2])
async def test_every_write_is_delivered_once_across_kills_and_aborts(
    tmp_path: Path, unused_tcp_port: int, workers: int
) -> None:
    chances = random.Random(workers)
    base = f"http://127.0.0.1:{unused_tcp_port}"
    groups = [[f"{group}-{number}" for number in range(60)] for group in range(4)]
    names = {name for group in groups for name in group}
    written: asyncio.Queue[str] = asyncio.Queue()
    begun: set[object] = set()

    async def follow() -> list[str]:
        found: list[str] = []
        async with aclosing(received(base, chances)) as blocks:
            async for block in blocks:
                assert block.event == "", "nothing was forgotten"
                found.append(block.data["params"]["id"])
                begun.add(asyncio.current_task())
                if names <= set(found):
                    return found
        raise AssertionError("a stream has no end")

    members = {"server": {"workers": workers}}
    followers: list[asyncio.Task[list[str]]] = []
    writers: list[asyncio.Task[None]] = []
    try:
        for _ in range(3):
            async with serving(tmp_path, unused_tcp_port, **members) as process:
                if not followers:
                    followers = [asyncio.create_task(follow()) for _ in range(3)]
                    async with aiohttp.ClientSession() as session:
                        while len(begun) < len(followers):
                            await Browser(base, session).push(f"notes/{random.getrandbits(40)}", {})
                    writers = [asyncio.create_task(write(base, group, written)) for group in groups]
                for _ in range(70):
                    await written.get()
                process.signal(signal.SIGKILL)
                await process.ended()
        async with serving(tmp_path, unused_tcp_port, **members):
            await asyncio.gather(*writers)
            for found in await asyncio.gather(*followers):
                mine = [name for name in found if name in names]
                assert sorted(mine) == sorted(names)
                for group in groups:
                    assert [name for name in mine if name in set(group)] == group
    finally:
        for task in (*followers, *writers):
            task.cancel()
        await asyncio.gather(*followers, *writers, return_exceptions=True)


async def test_stream_passes_a_proxy_and_resumes_at_its_cursor(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as process,
        FaultProxy(process.base) as proxy,
        aiohttp.ClientSession() as session,
    ):
        browser = Browser(process.base, session)
        stream = await listen(Browser(proxy.url, session))
        await browser.push("notes/a", {})
        assert (await stream.event()).data["params"] == {"id": "a"}
        await stream.close()
