"""A database that takes long to commit: writes wait for it, and nothing else does."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
from support.clients import ISSUER, Browser, Signed, Start, root_device
from support.collections import MINE, NOTES, collection

from pysync.sqlite import database_file

FILES = collection("files", allowedMimeTypes=["*/*"])
LOG = collection("log", appendOnly={"requireAuthorSignature": False})


async def test_reads_go_on_while_writes_wait_for_the_database(
    start: Start, session: aiohttp.ClientSession, folder: Path, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(database_file, "BUSY_TIMEOUT_MS", 600_000)
    with closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # the commits of all others wait now
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
    assert [written.status for written in await asyncio.gather(*waiting)] == [200] * 4
    assert (await anyone.pull("notes/b")).json["data"] == {"n": 2}
