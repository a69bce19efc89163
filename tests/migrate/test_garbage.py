"""`pysync gc`: what nothing leads to is deleted, and nothing else, whatever is written meanwhile."""

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from components import S3Server
from contracts.files import chunks_of, read_file
from support import reference_append_log as twin
from support.append_log_nodes import Node, keys_below, log_of, numbered, parsed, store_values
from support.bit_rot import damages
from support.cli_runner import Shell
from support.depth import depth
from support.faulty_store import FaultyStore
from support.s3_stores import another_program, new_prefix, opened
from support.store_samples import FILES, contents, document, fill, flipped

from pysync._core import LogHead
from pysync.clock import wall_clock_ms
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import AppendLogs, LogRange, LogSettings, log_prefix
from pysync.errors import PysyncError, StoreUnavailable
from pysync.migrate.garbage import DEFAULT_GRACE_MS, GarbageCollector, GarbageReport
from pysync.protocol import JSON_TYPE
from pysync.store import ANY, NotModified, Precondition, Store, StoredObject
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

LOG_SETTINGS = LogSettings()
SHORT = LogSettings(keep_elements=20)
LOGS = log_prefix("").rstrip("/")
COUNTS = ("segments", "chunks", "versions", "files", "temporaryFiles", "uploads", "merges", "bytes")


def later() -> int:
    """A clock for which everything is old."""
    return wall_clock_ms() + 2 * DEFAULT_GRACE_MS


async def collect(
    store: Store, now_ms: Callable[[], int], *, dry_run: bool = False
) -> tuple[GarbageReport, set[str]]:
    found: set[str] = set()
    collector = GarbageCollector(store, now_ms, lambda kind, key: found.add(key), dry_run=dry_run)
    await collector.run()
    return collector.report, found


async def reachable(store: Store, *keys: str) -> set[str]:
    """The keys of the objects that the heads at `keys` lead to."""
    found = set()
    for key in keys:
        head_object = await store.get(key)
        if not isinstance(head_object, StoredObject):
            continue
        head = LogHead.read(head_object.body, "items")
        waiting = head.nodes()
        while waiting:
            node = waiting.pop()
            at = f"{log_prefix(head.id)}/{node.name}"
            found.add(at)
            if node.level:
                block = await store.get(at)
                assert isinstance(block, StoredObject)
                waiting += head.expand(block.body, node)
    return found


async def test_nothing_that_is_reachable_is_deleted(store: Store, clock: FakeClock) -> None:
    await fill(store)
    node = Node(store, MemoryCoordinator(clock), clock)
    await node.append(*numbered(1_000), key="logs/b", rules=SHORT)
    await node.logs.close()
    await store.put("_pysync/projections/p", b'{"after":"1"}')
    before = await contents(store)
    clock.now_ms += 10 * DEFAULT_GRACE_MS
    report, found = await collect(store, clock)
    assert (report, found) == (GarbageReport(), set())
    assert await contents(store) == before


async def test_segments_that_no_log_leads_to_are_deleted_once_they_are_old(
    store: Store, clock: FakeClock
) -> None:
    node = Node(store, MemoryCoordinator(clock), clock)
    await node.append(*numbered(400), key="logs/a")
    await node.append(*numbered(400), key="logs/b")
    orphans = await reachable(store, "logs/a")
    await store.delete("logs/a")
    head = await store.get("logs/b")
    assert isinstance(head, StoredObject)
    stray = f"{log_prefix(LogHead.read(head.body, 'items').id)}/9000-9010"
    await store.put(stray, b"stored before a crash")
    before = await keys_below(store, LOGS)
    assert (await collect(store, clock))[1] == set(), "all is younger than an hour"
    clock.now_ms += DEFAULT_GRACE_MS + 1
    report, found = await collect(store, clock, dry_run=True)
    assert found == orphans | {stray}
    assert await keys_below(store, LOGS) == before
    assert await collect(store, clock) == (report, found)
    assert report.segments == len(found)
    assert report.bytes > 1000
    assert set(await keys_below(store, LOGS)) == await reachable(store, "logs/b")
    assert (await collect(store, clock))[1] == set()
    assert await node.datas(key="logs/b") == numbered(400)


@pytest.mark.parametrize("damaged", ["head", "head without its start", "document"])
async def test_damage_keeps_what_it_may_lead_to(store: Store, clock: FakeClock, damaged: str) -> None:
    node = Node(store, MemoryCoordinator(clock), clock)
    await node.append(*numbered(400), key="logs/a")
    head = await store.get("logs/a")
    assert isinstance(head, StoredObject)
    before = await keys_below(store, LOGS)
    await store.put("logs/a", {
        "head": flipped(head.body), "head without its start": b"x" + head.body[1:], "document": b'{"data":',
    }[damaged])  # fmt: skip
    clock.now_ms += DEFAULT_GRACE_MS + 1
    report, found = await collect(store, clock)
    assert (report.unclear, found) == ({"logs/a"}, set())
    assert await keys_below(store, LOGS) == before
    await store.put("logs/a", head.body)
    clock.now_ms += DEFAULT_GRACE_MS + 1
    assert (await collect(store, clock))[0] == GarbageReport()


async def test_an_earlier_log_is_left_to_the_next_append(store: Store, clock: FakeClock) -> None:
    node = Node(store, MemoryCoordinator(clock), clock)
    await node.append(*numbered(100), key="logs/a")
    objects = await keys_below(store, LOGS)
    head = await store.get("logs/a")
    assert isinstance(head, StoredObject)
    tombstone = LogHead("ab" * 16, LogHead.read(head.body, "items").id)
    await store.put("logs/a", tombstone.stored())
    clock.now_ms += DEFAULT_GRACE_MS + 1
    assert (await collect(store, clock))[1] == set()
    assert await keys_below(store, LOGS) == objects


async def test_chunks_are_deleted_only_after_the_takeover(store: Store, clock: FakeClock) -> None:
    for key in ("logs/a", "logs/b"):
        log = log_of(numbered(60), clock.now_ms - 1000)
        await store_values(store, twin.starfish_chunks(log, key, 7))
    await store.put(f"docs/x__seg/{1:016}", b'{"v":1}')
    node = Node(store, MemoryCoordinator(clock), clock)
    await node.append({"n": 60}, key="logs/a")
    chunks = {key for key in await keys_below(store, "logs") if key.startswith("logs/a__seg/")}
    assert (await collect(store, clock))[1] == set()
    clock.now_ms += DEFAULT_GRACE_MS + 1
    report, found = await collect(store, clock)
    assert found == chunks
    assert report.chunks == len(chunks) == 9
    assert await node.datas(key="logs/a") == numbered(61)
    assert await node.datas(key="logs/b") == numbered(60)


class SharedStore(FaultyStore):
    """Lets other tasks run around each call."""

    def __init__(self, store: Store, random: Random) -> None:
        super().__init__(store)
        self._random = random

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        await self._yield()
        found = await super().get(key, if_none_match)
        await self._yield()
        return found

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        await self._yield()
        return await super().put(key, body, content_type, expect)

    async def delete(self, key: str, expect: Precondition = ANY) -> None:
        await self._yield()
        await super().delete(key, expect)

    async def _yield(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(depth(3, 40)))
async def test_nothing_is_lost_while_nodes_write_and_crash(store: Store, clock: FakeClock, seed: int) -> None:
    random = Random(seed)
    coordinator = MemoryCoordinator(clock)
    keys = [f"logs/{n}" for n in range(4)]
    log_settings = [
        LOG_SETTINGS,
        SHORT,
        LogSettings(keep_ms=2 * DEFAULT_GRACE_MS),
        LogSettings(ttl_ms=3 * DEFAULT_GRACE_MS),
    ]
    newest = dict.fromkeys(keys, 0)
    deleted = 0

    async def write(key: str, settings: LogSettings) -> None:
        node = Node(SharedStore(store, random), coordinator, clock, 400)
        if random.random() < 0.5:
            node.crash(random.randrange(20), done=random.random() < 0.5)
        with suppress(StoreUnavailable):
            for _ in range(random.randrange(40)):
                [written] = await node.append({"n": 1}, key=key, rules=settings)
                newest[key] = max(newest[key], written.timestamp_ms)
            if random.random() < 0.2:
                async for listed in node.walk("logs"):
                    if listed.key == key:
                        await node.logs.delete_expired(listed, settings)
            if random.random() < 0.2:
                await node.logs.drop_oldest(key, settings)
        with suppress(PysyncError):
            await node.logs.close()

    async def gc() -> None:
        nonlocal deleted
        shared = SharedStore(store, random)
        if random.random() < 0.2:
            shared.crash(random.randrange(6), done=random.random() < 0.5)
        with suppress(StoreUnavailable):
            report, _ = await collect(shared, clock)
            assert not report.unclear
            deleted += report.segments

    for _ in range(15):
        writers = [
            write(key, settings) for key, settings in zip(keys, log_settings, strict=True) for _ in range(2)
        ]
        await asyncio.gather(*writers, gc(), gc())
        assert await damages(store) == []
        for key, settings in zip(keys, log_settings, strict=True):
            reader = AppendLogs(store, coordinator, clock)
            found = parsed(await (await reader.read(key, LogRange(), settings)).text())
            if found:
                assert found[-1]["ts"] >= newest[key]
        clock.now_ms += random.choice([1, DEFAULT_GRACE_MS // 2, 2 * DEFAULT_GRACE_MS])
    await store.put(f"{LOGS}/{'ab' * 16}/0-10", b"stored before a crash")  # not every short run leaves one
    clock.now_ms += DEFAULT_GRACE_MS + 1
    report, _ = await collect(store, clock)
    deleted += report.segments
    heads = [await store.get(key) for key in keys]
    earlier = [LogHead.read(head.body, "").previous for head in heads if isinstance(head, StoredObject)]
    left = {key for key in await keys_below(store, LOGS) if key.split("/")[2] not in earlier}
    assert left == await reachable(store, *keys)
    assert deleted > 0


async def test_temporary_files_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path)
    await fill(store)
    incoming = tmp_path / "files" / "~incoming"
    (incoming / "dead").write_bytes(b"x" * 1000)
    release, arrived = asyncio.Event(), asyncio.Event()

    async def slow() -> Any:
        yield b"y" * 2_000_000
        yield b"y" * 2_000_000
        arrived.set()
        await release.wait()
        yield b"z"

    writing = asyncio.create_task(store.write("files/slow", slow(), "text/plain"))
    await arrived.wait()
    assert len(list(incoming.iterdir())) == 2
    assert (await collect(store, wall_clock_ms))[1] == set()
    os.utime(incoming / "dead", (time.time() - 4000, time.time() - 4000))
    report, found = await collect(store, wall_clock_ms, dry_run=True)
    assert (found, report.temporary_files, report.bytes) == ({"~incoming/dead"}, 1, 1000)
    assert (await collect(store, later))[1] == {"~incoming/dead"}, "the other one is being written"
    release.set()
    await writing
    assert list(incoming.iterdir()) == []
    for key in FILES:
        assert (await store.stat(key)) is not None
    await store.close()


async def test_files_that_no_row_names_are_deleted(tmp_path: Path) -> None:
    """An earlier version could leave one."""
    store = await LocalStore.open_folder(tmp_path)
    await fill(store)
    for path in ("left", "files/left", "deep/down/left"):
        (tmp_path / "files" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / path).write_bytes(b"x" * 100)
    (tmp_path / "files/link").symlink_to("left")
    assert (await collect(store, wall_clock_ms))[1] == set(), "they are too young"
    report, found = await collect(store, later, dry_run=True)
    assert (found, report.files, report.bytes) == ({"left", "files/left", "deep/down/left"}, 3, 300)
    assert await collect(store, later) == (report, found)
    assert await collect(store, later) == (GarbageReport(), set())
    assert not (tmp_path / "files/deep").exists()
    assert (tmp_path / "files/link").is_symlink()
    for key in FILES:
        assert (await store.verify(key)) is not None
    await store.close()


@pytest.mark.slow
async def test_no_file_is_deleted_that_is_written_meanwhile(tmp_path: Path) -> None:
    store, other = await LocalStore.open_folder(tmp_path), await LocalStore.open_folder(tmp_path)
    collecting = asyncio.create_task(_collect_until_cancelled(other))
    stored = dict[str, bytes]()
    for n in range(80):
        key, body = f"f/{n % 7}/{n % 3}", b"%d" % n
        try:
            await store.write(key, chunks_of(body), "text/plain")
        except StoreUnavailable:
            continue  # by this clock its temporary file was abandoned at once
        stored[key] = body
        if n % 4 == 0:
            gone = f"f/{n % 5}/{n % 2}"
            await store.delete(gone)
            stored.pop(gone, None)
        for each, expected in stored.items():
            assert (await read_file(store, each))[1] == expected
    assert stored
    collecting.cancel()
    assert await collecting == set()
    await other.close()
    await store.close()


async def _collect_until_cancelled(store: Store) -> set[str]:
    found = set[str]()
    with suppress(asyncio.CancelledError):
        while True:
            found |= (await collect(store, later))[1]
    return {key for key in found if not key.startswith("~incoming/")}


async def test_journals_of_interrupted_merges_are_finished(clock: FakeClock) -> None:
    store = FaultyStore(MemoryStore(clock), clock)
    for name in "ab":
        await store.write(f"m/{name}", chunks_of(name.encode()), "text/plain")
    stats = {f"m/{name}": await store.stat(f"m/{name}") for name in "ab"}
    store.fail("delete")
    merged = {key: stat.sha256 for key, stat in stats.items() if stat is not None}
    with pytest.raises(StoreUnavailable):
        await store.merge("m/c", chunks_of(b"ab"), "text/plain", merged)
    store.reset()
    assert (await collect(store, clock))[1] == set()
    clock.now_ms += DEFAULT_GRACE_MS + 1
    report, found = await collect(store, clock)
    assert (report.merges, len(found)) == (1, 1)
    assert await keys_below(store, "") == ["m/c"]


class TestBuckets:
    @pytest.fixture(params=["radosgw", "moto"])
    def server(self, request: pytest.FixtureRequest) -> S3Server:
        found: S3Server = request.getfixturevalue(request.param)
        return found

    async def test_interrupted_uploads_and_orphans_are_deleted(self, server: S3Server) -> None:
        prefix = new_prefix()
        async with opened(server, prefix) as store, another_program(server) as client:
            coordinator = MemoryCoordinator(wall_clock_ms)
            logs = AppendLogs(store, coordinator, wall_clock_ms, head_bytes=400)
            node = Node(store, coordinator, FakeClock(wall_clock_ms()), 400)
            await node.append(*numbered(60), key="logs/a")
            await node.append(*numbered(60), key="logs/b")
            await store.delete("logs/b")
            await store.write("files/a", chunks_of(b"a"), "text/plain")
            at = {"Bucket": server.bucket, "Key": f"{prefix}/files/begun"}
            begun = await client.create_multipart_upload(**at)
            await client.upload_part(**at, UploadId=begun["UploadId"], PartNumber=1, Body=b"x" * 100)
            assert (await collect(store, wall_clock_ms))[1] == set()
            report, found = await collect(store, later, dry_run=True)
            assert (report.uploads, report.segments > 3) == (1, True)
            assert await collect(store, later) == (report, found)
            left = await client.list_multipart_uploads(Bucket=server.bucket, Prefix=f"{prefix}/")
            assert not left.get("Uploads")
            assert set(await keys_below(store, LOGS)) == await reachable(store, "logs/a")
            tail = await logs.read("logs/a", LogRange(), LOG_SETTINGS)
            assert [element["data"] for element in parsed(await tail.text())] == numbered(60)
            assert await store.stat("files/a") is not None
            assert (await collect(store, later))[0] == GarbageReport()
            await logs.close()


# The command


async def test_the_command_reports_what_it_deletes(tmp_path: Path, shell: Shell) -> None:
    url = f"file:{tmp_path / 'data'}"
    store = await LocalStore.open_folder(tmp_path / "data", lambda: wall_clock_ms() - 3 * 3_600_000)
    node = Node(store, MemoryCoordinator(FakeClock()), FakeClock())
    await node.append(*numbered(100))
    orphans = await keys_below(store, LOGS)
    await store.delete("logs/a")
    await store.close()
    status, output, errors = await shell.run_async("gc", "--store", url, "--dry-run")
    *lines, counts = map(json.loads, output.splitlines())
    assert (status, errors) == (0, "")
    assert sorted(line["key"] for line in lines) == orphans
    assert {line["kind"] for line in lines} == {"segments"}
    assert counts.keys() == {*COUNTS}
    assert counts["segments"] == len(orphans)
    assert await shell.run_async("gc", "--store", url, "--older-than", "14400") == (0, _counts(), "")
    assert (await shell.run_async("gc", "--store", url, "--older-than", "60"))[0] == 1
    assert (await shell.run_async("gc", "--store", url))[1] == output
    assert await shell.run_async("gc", "--store", url) == (0, _counts(), "")


async def test_versions_go_once_the_configuration_keeps_none(tmp_path: Path, shell: Shell) -> None:
    store = await LocalStore.open_folder(tmp_path / "data", lambda: wall_clock_ms() - 3 * 3_600_000)
    entries = {name: f"_pysync/history/{name}/a/{1:016}-0123456789abcdef.r" for name in ("notes", "plain")}
    for entry in entries.values():
        await store.put(entry, document(b"{}"))
    await store.close()
    collections = [
        {"name": "notes", "storagePath": "notes/{id}", "history": {"versions": 2}},
        {"name": "plain", "storagePath": "plain/{id}"},
    ]
    file = tmp_path / "service.json"
    url = f"file:{tmp_path / 'data'}"
    file.write_text(json.dumps({"version": 1, "store": url, "collections": collections}))
    assert await shell.run_async("gc", "--store", url) == (0, _counts(), "")
    assert await shell.run_async("gc", "--store", url, "--config", str(file)) == (0, _counts(), "")
    status, output, _ = await shell.run_async("gc", "--config", str(file))
    line, counts = map(json.loads, output.splitlines())
    assert (status, line) == (0, {"kind": "versions", "key": entries["plain"]})
    assert counts["versions"] == 1
    assert await shell.run_async("gc", "--config", str(file)) == (0, _counts(), "")


async def test_the_command_says_which_damage_keeps_garbage(tmp_path: Path, shell: Shell) -> None:
    store = await LocalStore.open_folder(tmp_path / "data", lambda: wall_clock_ms() - 3 * 3_600_000)
    await store.put(f"{LOGS}/{'ab' * 16}/0-10", b"left")
    await store.put("notes/a", b"damaged")
    await store.close()
    status, output, errors = await shell.run_async("gc", "--store", f"file:{tmp_path / 'data'}")
    assert (status, output) == (1, _counts())
    assert "notes/a is damaged" in errors


def _counts(**counts: int) -> str:
    return json.dumps({name: counts.get(name, 0) for name in COUNTS}) + "\n"
