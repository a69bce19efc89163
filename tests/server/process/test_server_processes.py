"""Real server processes: sharing one folder, being killed, being stopped."""

import asyncio
import json
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import SUBJECT, Browser, Signed, root_device
from support.server_process import serving

from pysync import _core
from pysync.changelog import split_id
from pysync.engine.changes import parse_change
from pysync.store import StoredObject
from pysync.store.local.store import LocalStore

pytestmark = pytest.mark.process


async def increment(browser: Browser, key: str) -> int:
    """Add one to the counter at `key` until it is done; how often somebody else was faster."""
    lost = 0
    while True:
        now = (await browser.pull(key)).json
        count = now["data"].get("n", 0)
        answer = await browser.push(key, {"n": count + 1}, now["hash"])
        if answer.status == 200:
            return lost
        assert answer.status == 409, answer.body
        lost += 1


async def test_two_processes_on_one_folder_lose_no_update(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with serving(tmp_path) as one, serving(tmp_path) as other:
        browsers = [Browser(one.base, session), Browser(other.base, session)] * 4
        pushed = 0

        async def worker(browser: Browser) -> None:
            nonlocal pushed
            for _ in range(25):
                await increment(browser, "notes/counter")
                pushed += 1

        await asyncio.gather(*map(worker, browsers))
        for browser in browsers[:2]:
            assert (await browser.pull("notes/counter")).json["data"] == {"n": pushed}
        assert pushed == 200


async def test_a_replay_is_rejected_by_the_other_process_and_after_a_restart(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    key = f"u/{SUBJECT.user_id}/a"
    host: dict[str, Any] = {"server": {"publicHosts": ["sync.example"]}}
    async with serving(tmp_path, **host) as one, serving(tmp_path, **host) as other:
        signer = Signed("http://sync.example", session, SUBJECT, root_device(SUBJECT))
        headers = {**signer.headers("GET", f"/pull/{key}", b""), "Host": "sync.example"}
        assert (await Browser(one.base, session).pull(key, headers)).status == 200
        assert (await Browser(other.base, session).pull(key, headers)).status == 401
        one.signal(signal.SIGKILL)
        await one.ended()
    async with serving(tmp_path, **host) as again:
        assert (await Browser(again.base, session).pull(key, headers)).status == 401


async def test_every_acknowledged_write_survives_kill_9(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    acknowledged: dict[str, str] = {}
    enough = asyncio.Event()

    async def writer(browser: Browser, number: int) -> None:
        for count in range(10_000):
            key = f"notes/{number}-{count}"
            try:
                answer = await browser.push(key, {"n": count, "pad": "x" * 500})
            except aiohttp.ClientError:
                return
            assert answer.status == 200
            acknowledged[key] = answer.json["hash"]
            if len(acknowledged) >= 400:
                enough.set()

    async with serving(tmp_path) as process:
        browser = Browser(process.base, session)
        writers = [asyncio.create_task(writer(browser, number)) for number in range(16)]
        await enough.wait()
        process.signal(signal.SIGKILL)
        await asyncio.gather(*writers)
        await process.ended()
    async with serving(tmp_path) as process:
        browser = Browser(process.base, session)
        for key, hash_ in acknowledged.items():
            assert (await browser.pull(key)).json["hash"] == hash_
    with closing(sqlite3.connect(tmp_path / "data" / "pysync.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_writes_and_their_changes_agree_after_kill_9(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    """Counters are incremented through two processes, which are killed one after the other."""
    acknowledged: dict[str, int] = {}
    enough = [asyncio.Event(), asyncio.Event()]

    async def writer(browser: Browser, number: int) -> None:
        key = f"notes/{number % 6}"
        with suppress(aiohttp.ClientError):
            while True:
                now = (await browser.pull(key)).json
                count = now["data"].get("n", 0) + 1
                if (await browser.push(key, {"n": count}, now["hash"])).status == 200:
                    acknowledged[key] = max(count, acknowledged.get(key, 0))
                    total = sum(acknowledged.values())
                    for event, least in zip(enough, (150, 400), strict=True):
                        if total >= least:
                            event.set()

    async with serving(tmp_path) as one, serving(tmp_path) as other:
        writers = [
            asyncio.create_task(writer(Browser(process.base, session), number))
            for number in range(8)
            for process in (one, other)
        ]
        for process, event in zip((one, other), enough, strict=True):
            await event.wait()
            process.signal(signal.SIGKILL)
        await asyncio.gather(*writers)
    store = await LocalStore.open_folder(tmp_path / "data")
    found = await store.change_log.read("", 100_000)
    assert found is not None
    ids = [split_id(id_)[0] for id_, _ in found]
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    announced: dict[str, list[str]] = {}
    for _, change in found:
        ref, hash_, *_ = parse_change(change)
        announced.setdefault(f"notes/{ref.params['id']}", []).append(hash_)
    assert announced.keys() == acknowledged.keys()
    for key, hashes in announced.items():
        stored = await store.get(key)
        assert isinstance(stored, StoredObject)
        count = json.loads(stored.body)["data"]["n"]
        assert hashes == [_core.content_hash(b'{"n":%d}' % n) for n in range(1, count + 1)]
        assert acknowledged[key] <= count
    await store.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_in_good_order(tmp_path: Path, number: int) -> None:
    async with serving(tmp_path) as process:
        process.signal(number)
        assert await process.ended() == 0


async def test_a_hangup_ends_nothing(tmp_path: Path) -> None:
    """As a terminal sends it that is closed."""
    async with serving(tmp_path) as process, aiohttp.ClientSession() as session:
        process.signal(signal.SIGHUP)
        browser = Browser(process.base, session)
        while "reloaded the configuration" not in process.log.read_text():
            assert (await browser.push("notes/a", {})).status in (200, 409)
        assert (await browser.pull("notes/a")).status == 200
        process.signal(signal.SIGTERM)
        assert await process.ended() == 0


async def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, server={"drainTimeoutMs": 3_600_000}) as process:
        host, _, port = process.base.removeprefix("http://").partition(":")
        _, unfinished = await asyncio.open_connection(host, int(port))
        unfinished.write(
            b"POST /push/notes/a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n"
        )
        await unfinished.drain()
        process.signal(signal.SIGTERM)
        while await _accepts(host, int(port)):
            await asyncio.sleep(0)
        process.signal(signal.SIGTERM)
        assert await process.ended() == 1
        unfinished.close()


async def _accepts(host: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True


async def test_a_process_that_is_stopped_holds_up_no_other_and_goes_on_with_what_they_wrote(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with serving(tmp_path) as stopped, serving(tmp_path) as other:
        key, certificate = f"u/{SUBJECT.user_id}/a", root_device(SUBJECT, collections=("mine",))
        await Browser(stopped.base, session).push("notes/a", {"n": 1})
        stopped.signal(signal.SIGSTOP)
        anyone = Browser(other.base, session)
        pulled = await anyone.pull("notes/a")
        assert (await anyone.push("notes/a", {"n": 2}, pulled.json["hash"])).status == 200
        assert (await Signed(other.base, session, SUBJECT, certificate).push(key, {"n": 1})).status == 200
        late = asyncio.ensure_future(Browser(stopped.base, session).pull("notes/a"))
        stopped.signal(signal.SIGCONT)
        assert (await late).json["data"] == {"n": 2}
        owner = Signed(stopped.base, session, SUBJECT, certificate)
        assert (await owner.pull(key)).json["data"] == {"n": 1}
        assert (await Browser(stopped.base, session).push("notes/b", {"n": 3})).status == 200
