"""A disk that takes long to flush: writes wait for it, and nothing else does."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from support.clients import ISSUER, Browser, Signed, Start, root_device
from support.collections import MINE, NOTES, collection

from pysync.sqlite.connection import GroupCommit

FILES = collection("files", allowedMimeTypes=["*/*"])
LOG = collection("log", appendOnly={"requireAuthorSignature": False})


@pytest.fixture
def flush(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While it is not set, commits wait for the disk."""
    flush = threading.Event()
    flush.set()
    commit = GroupCommit._commit

    def commit_slowly(writer: GroupCommit, *args: object) -> object:
        flush.wait()
        return commit(writer, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(GroupCommit, "_commit", commit_slowly)
    yield flush
    flush.set()


async def test_reads_go_on_while_writes_wait_for_the_disk(
    start: Start, session: aiohttp.ClientSession, folder: Path, flush: threading.Event
) -> None:
    base = await start({"store": f"file:{folder}", "collections": [NOTES, MINE, FILES, LOG]})
    anyone = Browser(base, session)
    owner = Signed(base, session, ISSUER, root_device(ISSUER, collections=("mine",)))
    own = f"u/{ISSUER.user_id}/a"
    text = {"Content-Type": "text/plain"}
    for written in (
        await anyone.push("notes/a", {"n": 1}),
        await anyone.request("POST", "/push/files/a", b"x", text),
        await anyone.request("POST", "/push/log/a", {"data": {"n": 1}}),
        await owner.push(own, {"n": 1}),
    ):
        assert written.status == 200
    flush.clear()
    waiting = [
        asyncio.ensure_future(write)
        for write in (
            anyone.push("notes/b", {"n": 2}),
            anyone.request("POST", "/push/files/b", b"x", text),
            anyone.request("POST", "/push/log/a", {"data": {"n": 2}}),
            owner.push(f"u/{ISSUER.user_id}/b", {"n": 2}),
        )
    ]
    for _ in range(3):
        for read in (
            await anyone.pull("notes/a"),
            await anyone.pull("files/a"),
            await anyone.pull("log/a?last=1"),
            await owner.pull(own),
            await anyone.request("GET", "/health"),
        ):
            assert read.status == 200
    assert (await anyone.pull("notes/b")).json["data"] == {}, "it is not acknowledged yet"
    assert not any(write.done() for write in waiting)
    flush.set()
    assert [written.status for written in await asyncio.gather(*waiting)] == [200] * 4
    assert (await anyone.pull("notes/b")).json["data"] == {"n": 2}
