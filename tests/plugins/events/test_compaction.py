"""Files of events become larger ones: every row once, in its order; who follows the ids misses none."""

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from components import S3Server
from contracts.files import chunks_of, read_file
from support import duckdb_connection as duck
from support.bit_rot import rot
from support.cli_runner import Shell
from support.clients import Browser, Start
from support.event_batches import EVENTS, SECTION, listed, pushed
from support.faulty_store import FaultyStore
from support.s3_stores import new_prefix, opened
from support.webhook_receiver import app_of

from pysync import _core
from pysync.config import parse
from pysync.config.collection import wire_name
from pysync.errors import StoreUnavailable
from pysync.parquet import EVENT_COLUMNS, event_merger
from pysync.plugins.events.compaction import Compaction, CompactionResult, compact_periodically, current_keys
from pysync.protocol import PARQUET_TYPE
from pysync.store import DamagedFile, Store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

TEMPLATE = "events/{app}/{batchId}"
FIRST_MS = 1_700_000_000_000


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(FIRST_MS + 3_600_000)


@pytest.fixture(params=["memory", "file"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    store: Store = (
        MemoryStore() if request.param == "memory" else await LocalStore.open_folder(tmp_path / "data")
    )
    yield store
    await store.close()


def batch_id(at: int) -> str:
    return f"{FIRST_MS + at:013d}-{0:06d}-{at + 0xABC000000000:012x}"


def batch(at: int, events: int = 3, padding: int = 0) -> bytes:
    reports = [
        {"event": "seen", "message_id": f"{at}.{n}", "properties": os.urandom(padding).hex()}
        for n in range(events)
    ]
    return _core.encode_events(json.dumps({"events": reports}).encode(), "2026-01-02T03:04:05.678Z")


async def push(store: Store, at: int, app: str = "web", body: bytes | None = None) -> str:
    key = f"events/{app}/{batch_id(at)}.parquet"
    await store.write(key, chunks_of(body or batch(at)), PARQUET_TYPE)
    return key


async def rows_of(store: Store, key: str) -> list[str]:
    _, body = await read_file(store, key)
    return [str(row) for row in pq.read_table(pa.BufferReader(body)).column("message_id").to_pylist()]


async def all_rows(store: Store, app: str = "web") -> list[str]:
    rows: list[str] = []
    for name in await store.list(f"events/{app}", None, 1000):
        rows += await rows_of(store, f"events/{app}/{name}")
    return rows


def wanted(*at: int) -> list[str]:
    return [f"{one}.{n}" for one in at for n in range(3)]


async def compact(
    store: Store, clock: FakeClock, *, older_than_ms: int = 0, to_bytes: int = 10_000_000
) -> list[CompactionResult]:
    compaction = Compaction(store, TEMPLATE, older_than_ms, to_bytes, clock)
    return [done async for done in compaction.run()]


async def test_many_files_become_one_with_all_rows_in_the_order_of_the_ids(
    store: Store, clock: FakeClock
) -> None:
    for at in range(40, -1, -1):
        await push(store, at)
    await push(store, 7, app="ios")
    await store.write("events/web/notes.txt", chunks_of(b"not a batch"), "text/plain")
    await store.write("events/web/deeper/1700000000000-000000-abcabcabcabc.parquet", chunks_of(b"no"), "x/y")
    await store.delete("events/web/deeper/1700000000000-000000-abcabcabcabc.parquet")
    assert await compact(store, clock) == [
        CompactionResult("events/ios", before=1, after=1),
        CompactionResult("events/web", before=41, after=1, rows=123),
    ]
    [name, _] = await store.list("events/web", None, 100)
    assert await rows_of(store, f"events/web/{name}") == wanted(*range(41))
    file, body = await read_file(store, f"events/web/{name}")
    table = pq.read_table(pa.BufferReader(body))
    assert table.schema.names == list(EVENT_COLUMNS)
    assert set(table.column("received_at").to_pylist()) == {"2026-01-02T03:04:05.678Z"}
    assert file.content_type == PARQUET_TYPE
    assert await store.list("events/ios", None, 10) == [f"{batch_id(7)}.parquet"]


async def test_files_of_earlier_versions_are_merged_with_those_of_this_one(
    store: Store, clock: FakeClock
) -> None:
    """Earlier versions wrote them with pyarrow."""
    now = pq.read_table(pa.BufferReader(batch(1)))
    earlier = pa.BufferOutputStream()
    with pq.ParquetWriter(
        earlier, now.schema, compression="snappy", use_dictionary=False, write_statistics=False,
        store_schema=False,
    ) as writer:  # fmt: skip
        writer.write_table(now)
        writer.add_key_value_metadata({"pysync.repeatable_until_ms": f"{clock.now_ms + 1}"})
    await push(store, 0)
    await push(store, 1, body=bytes(earlier.getvalue()))
    await push(store, 2)
    [done] = await compact(store, clock)
    assert (done.before, done.after, done.left) == (3, 1, {})
    assert await all_rows(store) == wanted(0, 1, 2)


async def test_reader_past_its_last_id_misses_nothing(store: Store, clock: FakeClock) -> None:
    for at in range(10):
        await push(store, at)
    await compact(store, clock)
    for last in range(10):
        newer = await store.list("events/web", f"{batch_id(last)}.parquet", 100)
        rows = [row for name in newer for row in await rows_of(store, f"events/web/{name}")]
        assert set(wanted(*range(last + 1, 10))) <= set(rows)
        assert bool(newer) == (last < 9), "the last one has everything already"
    await push(store, 10)
    newest = await store.list("events/web", f"{batch_id(9)}.parquet", 100)
    assert newest == [f"{batch_id(10)}.parquet"]


@pytest.mark.slow
async def test_poller_during_pushes_and_compactions_misses_nothing(tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    other = await LocalStore.open_folder(tmp_path / "data")
    clock = FakeClock(FIRST_MS + 3_600_000)
    pushed = asyncio.Event()
    seen: set[str] = set()

    async def push_all() -> None:
        for at in range(120):
            await push(store, at)
        pushed.set()

    async def poll() -> None:
        last = None
        while True:
            is_last = pushed.is_set()
            names = await other.list("events/web", last, 7)
            if not names and is_last:
                return
            for name in names:
                file = await other.open(f"events/web/{name}")
                if file is None:
                    break  # it was merged: list again after the last one that was read
                body = b"".join([chunk async for chunk in file.chunks])
                seen.update(map(str, pq.read_table(pa.BufferReader(body)).column("message_id").to_pylist()))
                last = name
            await asyncio.sleep(0)

    async def compact_on() -> None:
        while not pushed.is_set():
            await compact(store, clock)
            await asyncio.sleep(0)

    await asyncio.gather(push_all(), poll(), compact_on())
    assert seen == set(wanted(*range(120)))
    await compact(store, clock)
    assert Counter(await all_rows(store)) == Counter(wanted(*range(120)))
    await other.close()
    await store.close()


async def test_the_young_are_left(store: Store, clock: FakeClock) -> None:
    for at in range(0, 100_000, 10_000):
        await push(store, at)
    [done] = await compact(store, clock, older_than_ms=3_600_000 - 50_000)
    assert (done.before, done.after, done.young, done.left) == (10, 5, 4, {})
    clock.now_ms += 1_000_000
    [done] = await compact(store, clock)
    assert (done.before, done.after, done.young) == (5, 1, 0)
    assert Counter(await all_rows(store)) == Counter(wanted(*range(0, 100_000, 10_000)))


async def test_expired_batches_are_not_brought_back(clock: FakeClock) -> None:
    store = MemoryStore(clock)
    for at in range(2):
        await push(store, at)
    clock.now_ms += 60_001
    young = [await push(store, at) for at in range(2, 4)]
    [done] = [each async for each in Compaction(store, TEMPLATE, 0, 1_000_000, clock, 60_000).run()]
    assert (done.before, done.after, done.rows) == (4, 3, 6)
    names = await store.list("events/web", None, 10)
    assert names[:2] == [f"{batch_id(at)}.parquet" for at in range(2)]
    assert await rows_of(store, f"events/web/{names[2]}") == [f"{at}.{n}" for at in (2, 3) for n in range(3)]
    assert not {key.rpartition("/")[2] for key in young} & {*names}


async def test_a_lost_file_is_left_and_keeps_no_other_from_being_merged(
    tmp_path: Path, clock: FakeClock
) -> None:
    store = await LocalStore.open_folder(tmp_path)
    for app in ("bad", "good"):
        keys = [await push(store, at, app) for at in range(3)]
        if app == "bad":
            lost = keys[1]
            (tmp_path / "files" / lost).unlink()
    bad, good = await compact(store, clock)
    assert [*bad.left] == [lost.rpartition("/")[2]]
    assert "the file is lost" in bad.left[lost.rpartition("/")[2]]
    assert (bad.before, bad.after, good.left) == (3, 2, {})
    assert [len(await store.list(f"events/{app}", None, 9)) for app in ("bad", "good")] == [2, 1]
    await store.close()


async def test_a_large_batch_with_a_flipped_bit_is_not_merged(tmp_path: Path, clock: FakeClock) -> None:
    store = await LocalStore.open_folder(tmp_path)
    keys = [await push(store, at, body=batch(at, padding=600_000)) for at in range(3)]
    rotten = tmp_path / "files" / keys[1]
    assert rotten.stat().st_size > 1_048_576, "no read checks it"
    rot(rotten, 700_000)
    (done,) = await compact(store, clock, to_bytes=100_000_000)
    assert "its sha256 is" in done.left[rotten.name]
    assert (done.before, done.after) == (3, 2)
    with pytest.raises(DamagedFile):
        await store.open(keys[1])
    await store.close()


async def test_a_batch_whose_id_has_none_below_it_is_counted_and_left(store: Store, clock: FakeClock) -> None:
    keys = [f"events/web/{FIRST_MS:013d}-{at:06d}-{0:012x}.parquet" for at in range(2)]
    for at, key in enumerate(keys):
        await store.write(key, chunks_of(batch(at)), PARQUET_TYPE)
    [done] = [each async for each in Compaction(store, TEMPLATE, 0, 1_000_000, clock).run()]
    assert (done.before, done.after, done.left) == (2, 2, {})
    assert await current_keys(store, TEMPLATE) == keys


async def test_unmergeable_files_are_left_and_reported(store: Store, clock: FakeClock) -> None:
    other = pa.BufferOutputStream()
    pq.write_table(pa.table({"event": ["of an earlier time"]}), other)
    for at in range(8):
        await push(store, at)
    broken = await push(store, 2, body=batch(2)[:-100])
    text = await push(store, 4, body=b"no Parquet at all")
    earlier = await push(store, 6, body=other.getvalue().to_pybytes())
    bodies = [(await read_file(store, key))[1] for key in (broken, text, earlier)]
    for _ in range(2):
        [done] = await compact(store, clock)
        assert {f"events/web/{name}" for name in done.left} == {broken, text, earlier}
        assert done.left[f"{batch_id(6)}.parquet"] == "it has other columns"
        assert "cannot be read" in done.left[f"{batch_id(4)}.parquet"]
        assert done.after == 4
        assert [(await read_file(store, key))[1] for key in (broken, text, earlier)] == bodies


@pytest.mark.slow
async def test_merging_again_writes_a_row_only_where_files_double(store: Store, clock: FakeClock) -> None:
    written = 0
    for at in range(64):
        await push(store, at, body=batch(at, padding=3_000))
        for done in await compact(store, clock):
            written += done.rows
    assert Counter(await all_rows(store)) == Counter(wanted(*range(64)))
    assert len(await store.list("events/web", None, 100)) <= 16
    assert written <= 64 * 3 * 6
    assert [done.rows for done in await compact(store, clock)] == [0], "nothing is left to do"


async def test_files_grow_up_to_their_size_and_keep_the_order(store: Store, clock: FakeClock) -> None:
    size = len(batch(0))
    for at in range(30):
        await push(store, at)
    await push(store, 13, body=batch(13, events=5_000))
    await compact(store, clock, to_bytes=size * 8)
    names = await store.list("events/web", None, 100)
    assert 4 <= len(names) <= 8
    assert f"{batch_id(13)}.parquet" in names, "it is large enough"
    rows = await all_rows(store)
    assert [row for row in rows if not row.startswith("13.")] == wanted(*(n for n in range(30) if n != 13))
    assert len(rows) == 29 * 3 + 5_000


async def test_large_files_are_read_and_written_by_row_groups(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_merger, "ROW_GROUP_ROWS", 10)
    store = MemoryStore()
    for at in range(20):
        await push(store, at)
    await compact(store, clock)
    for at in range(20, 40):
        await push(store, at)
    await compact(store, clock)
    [name] = await store.list("events/web", None, 100)
    body = (await read_file(store, f"events/web/{name}"))[1]
    assert pq.ParquetFile(pa.BufferReader(body)).metadata.num_row_groups >= 9
    assert await rows_of(store, f"events/web/{name}") == wanted(*range(40))


async def test_a_group_whose_files_change_meanwhile_is_given_up(clock: FakeClock) -> None:
    inner = MemoryStore()
    for at in range(5):
        await push(inner, at)
    store = FaultyStore(inner)
    release = asyncio.Event()
    arrived = store.delay("merge", release)
    compacting = asyncio.ensure_future(compact(store, clock))
    await arrived.wait()
    await push(inner, 3, body=batch(33))
    release.set()
    [done] = await compacting
    assert done.left == {
        f"{batch_id(0)}.parquet to {batch_id(4)}.parquet": "a file of theirs was written or removed meanwhile"
    }
    assert Counter(await all_rows(inner)) == Counter(wanted(0, 1, 2, 33, 4))


async def test_the_background_compacts_with_the_leader_lease_and_survives_failures(clock: FakeClock) -> None:
    inner = MemoryStore()
    for at in range(5):
        await push(inner, at)
    store = FaultyStore(inner)
    store.fail("walk")
    lease = iter([False, True, True, True])
    waits: list[float] = []
    ended = asyncio.Event()

    async def is_leader() -> bool:
        return next(lease)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 4:
            ended.set()
            await asyncio.Event().wait()

    compaction = Compaction(store, TEMPLATE, 0, 10**7, clock)
    task = asyncio.create_task(compact_periodically(lambda: compaction, 5_000, is_leader, sleep))
    await ended.wait()
    task.cancel()
    await asyncio.wait({task})
    assert waits == [5.0] * 4
    assert len(await inner.list("events/web", None, 100)) == 1


async def test_a_service_merges_its_files_when_it_is_configured_to(
    start: Start, session: aiohttp.ClientSession
) -> None:
    section = {**SECTION, "compactEveryMs": 10, "compactOlderThanMs": 0}
    browser = Browser(await start({"collections": [EVENTS], "events": [section]}), session)
    for n in range(2):
        await pushed(browser, {"event": f"e{n}"})
    async with asyncio.timeout(30):
        while len(await listed(browser)) > 1:
            pass


async def test_files_that_a_reload_lets_expire_are_not_merged(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    section = {**SECTION, "compactEveryMs": 10, "compactOlderThanMs": 3_600_000}
    service = {"collections": [EVENTS], "events": [section]}
    browser = Browser(await start(service, now_ms=clock), session)
    app = app_of(start)
    (expiring,) = parse({**service, "collections": [{**EVENTS, "ttlMs": 5_400_000}]}).collections
    await app.apply(app.prepare(replace(app.current.config, collections=(expiring,))))
    for _ in range(2):
        for n in range(2):
            await pushed(browser, {"event": f"e{n}"})
        clock.now_ms += 1_800_000
    clock.now_ms += 2_400_000  # the first two have expired, and the others are old enough for a merge
    async with asyncio.timeout(30):
        while len(names := await app.store.list("lake/web", None, 100)) == 4:
            await asyncio.sleep(0)
    assert len(names) == 3


async def test_batches_in_a_bucket_are_counted_once_during_a_merge(clock: FakeClock) -> None:
    for after in range(1, 6):
        inner = MemoryStore(clock)
        for at in range(3):
            await push(inner, at)
        crashed = FaultyStore(inner, clock)
        crashed.crash(after, done=False)
        with pytest.raises(StoreUnavailable):
            await compact(crashed, clock)
        store = FaultyStore(inner, clock)
        rows = [row for key in await current_keys(store, TEMPLATE) for row in await rows_of(store, key)]
        assert Counter(rows) == Counter(wanted(*range(3)))


# --- the commands ----------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> str:
    said: dict[str, Any] = {
        "version": 1,
        "store": f"file:{tmp_path}/data",
        "collections": [
            {
                "name": "events",
                "storagePath": TEMPLATE,
                "requireAuth": False,
                "allowedMimeTypes": ["application/json"],
            }
        ],
        "events": [{"collection": "events", "storagePath": TEMPLATE}],
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    return str(tmp_path / "config.json")


async def fill(url: str | Path, count: int) -> None:
    store = await LocalStore.open_folder(url)
    for at in range(count):
        await push(store, at)
    await store.close()


def test_the_command_compacts_and_duckdb_counts_the_same(tmp_path: Path, config: str, shell: Shell) -> None:
    asyncio.run(fill(tmp_path / "data", 30))
    count = "SELECT count(*) AS rows, count(DISTINCT message_id) AS events, min(event) AS event FROM events"
    before = shell.json("events", "sql", "--config", config, count)
    assert before == {"rows": 90, "events": 90, "event": "seen"}
    assert shell.json("events", "compact", "--config", config) == {
        "folder": "events/web",
        "before": 30,
        "after": 1,
        "rows": 90,
        "young": 0,
        "left": {},
    }
    assert shell.json("events", "sql", "--config", config, stdin=count) == before
    globbed = f"SELECT count(*) FROM '{tmp_path}/data/files/**/*.parquet'"
    assert duckdb.connect().execute(globbed).fetchall() == [(90,)]
    assert shell.run("events", "compact", "--config", config)[0] == 0


def test_the_command_fails_where_something_is_left(tmp_path: Path, config: str, shell: Shell) -> None:
    asyncio.run(fill(tmp_path / "data", 3))

    async def damage() -> None:
        store = await LocalStore.open_folder(tmp_path / "data")
        await push(store, 1, body=b"damaged")
        await store.close()

    asyncio.run(damage())
    status, output, _ = shell.run("events", "compact", "--config", config)
    assert status == 1
    assert json.loads(output)["after"] == 2
    status, _, errors = shell.run("events", "sql", "--config", config, "SELECT * FROM events")
    assert (status, "DuckDB cannot read the files" in errors) == (1, True)


def test_damaged_files_are_not_queried(tmp_path: Path, config: str, shell: Shell) -> None:
    asyncio.run(fill(tmp_path / "data", 3))
    path = tmp_path / f"data/files/events/web/{batch_id(1)}.parquet"
    rot(path, 100)
    status, output, errors = shell.run("events", "sql", "--config", config, "SELECT event FROM events")
    assert (status, output) == (1, "")
    assert f"events/web/{path.name} is damaged: its sha256 is" in errors


def test_the_queries_of_the_documentation_take_whatever_was_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/store-events.md").read_text()
    (program,) = re.findall('```python title="query.py"\n(.*?)```', page, re.DOTALL)
    properties: list[Any] = [{"plan": "b"}, None, "no JSON", "", [1]]
    events = json.dumps({"events": [{"properties": each} for each in properties]}).encode()
    folder = tmp_path / "data/files/events/shop"
    folder.mkdir(parents=True)
    (folder / "1.parquet").write_bytes(_core.encode_events(events, datetime.now(UTC).isoformat()))
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert capsys.readouterr().out.splitlines() == ["[('', 5)]", "[('b', 1), (None, 4)]"]


def test_unanswerable_queries_are_reported(tmp_path: Path, config: str, shell: Shell) -> None:
    assert shell.run("events", "sql", "--config", config, "SELECT 1")[0] == 1, "there is no store"
    asyncio.run(fill(tmp_path / "data", 0))
    assert shell.json("events", "sql", "--config", config, "SELECT count(*) AS n FROM events") == {"n": 0}
    status, _, errors = shell.run("events", "sql", "--config", config, "SELECT nothing")
    assert (status, "nothing" in errors) == (1, True)
    status, _, errors = shell.run("events", "compact", "--config", config, "--collection", "other")
    assert (status, errors) == (1, "pysync: other stores no events; these collections do: events\n")
    without = tmp_path / "without.json"
    without.write_text("{}")
    status, _, errors = shell.run("events", "sql", "--config", str(without), "SELECT 1")
    assert (status, "no `events` section" in errors) == (1, True)


async def test_events_in_a_bucket_are_merged_and_queried(
    moto: S3Server, tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = new_prefix()
    said = moto.store(prefix)
    clock = FakeClock(FIRST_MS + 3_600_000)
    async with opened(moto, prefix) as store:
        for at in range(12):
            await push(store, at)
        assert [(done.before, done.after, done.rows) for done in await compact(store, clock)] == [(12, 1, 36)]
        await push(store, 12)
        assert await all_rows(store) == wanted(*range(13))
    with duck.connected(tmp_path / ".duckdb/extensions"):
        pass
    monkeypatch.setenv("HOME", str(tmp_path))
    config = {
        "version": 1,
        "store": {wire_name(name): value for name, value in asdict(said).items() if value is not None},
        "collections": [
            {
                "name": "events",
                "storagePath": TEMPLATE,
                "requireAuth": False,
                "allowedMimeTypes": ["application/json"],
            }
        ],
        "events": [{"collection": "events", "storagePath": TEMPLATE}],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    query = "SELECT count(DISTINCT message_id) AS n FROM events"
    answer = await asyncio.to_thread(
        shell.json, "events", "sql", "--config", str(tmp_path / "config.json"), query
    )
    assert answer == {"n": 39}
