"""The feed of a folder."""

import contextlib
import random
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from contracts.feeds import FeedContract, changes_of, hash_of, keys_of, page_of, remove, write
from contracts.files import chunks_of
from support.depth import depth

from pysync.changelog import Retention
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import DocumentRef
from pysync.engine.outbox import Outbox, outbox_of
from pysync.feed import Feed, ResetReason
from pysync.sqlite.database_file import create_database
from pysync.store import ANY, AppendedObject, Segment, StoredObject, Write
from pysync.store.local.feed import BY_KEY, BY_SEQUENCE, COUNT, MAX_BY_KEY
from pysync.store.local.store import LocalStore
from pysync.store.local.tables import SCHEMA
from pysync.testing import FakeClock

RETENTION = Retention(removals_ms=1_000)


@pytest.fixture
async def store(tmp_path: Path, clock: FakeClock) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(tmp_path / "data", clock, RETENTION)
    yield store
    await store.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def outbox(store: LocalStore) -> Outbox:
    return outbox_of(store, MemoryCoordinator())


@pytest.fixture
def feed(store: LocalStore) -> Feed:
    return store.feed


class TestLocalFeed(FeedContract):
    pass


async def test_all_versions_of_a_folder_are_known(store: LocalStore, outbox: Outbox) -> None:
    hash_ = await write(outbox, "notes/a", b"1", timestamp_ms=3)
    sha256 = await store.write("notes/b", chunks_of(b"file"), "text/plain")
    await store.put("notes/c", b"of no known hash")
    found = await store.feed.versions(["notes/a", "notes/b", "notes/c", "notes/d"])
    assert found.keys() == {"notes/a", "notes/b"}
    assert found["notes/a"] == (hash_, 3)
    assert found["notes/b"].hash == sha256


async def test_a_write_without_a_change_keeps_the_place_and_no_hash(
    store: LocalStore, outbox: Outbox
) -> None:
    for name in "abcd":
        await write(outbox, f"notes/{name}", b"1")
    cursor = await store.change_log.last_id()
    before = [(each.id, each.key) for each in await changes_of(store.feed)]
    await store.put("notes/b", b"2")
    await store.write("notes/c", chunks_of(b"file"), "text/plain")
    await store.delete("notes/d")
    await store.put("notes/e", b"1")
    assert await keys_of(store.feed, cursor) == []
    created, *found = await changes_of(store.feed)
    assert created.key == "notes/e"
    assert [(each.id, each.key) for each in found] == before[:3]
    assert [(each.hash, each.timestamp_ms is None) for each in found[:2]] == [
        (hash_of(b"1"), False),
        (None, True),
    ]
    await write(outbox, "notes/c", b"3", timestamp_ms=5)
    (changed,) = await changes_of(store.feed, cursor)
    assert changed[1:4] == ("notes/c", hash_of(b"3"), 5)


async def test_parts_of_a_write_are_not_in_the_feed(store: LocalStore, outbox: Outbox) -> None:
    hash_ = hash_of(b"1")
    change = DocumentRef("logs", {}, key="logs/a").change(hash_, 5)
    also = [AppendedObject("_pysync/history/logs/a", 5, ".json", b"{}")]
    segments = [Segment("_pysync/logs/x/0", b"{}")]
    await outbox.commit(Write("logs/a", b"1", ANY, [change, change], also=also, segments=segments))
    assert await keys_of(store.feed) == ["logs/a"]
    assert (await page_of(store.feed, "", 1, "logs")).changes[0].id == (await store.change_log.last_id())[:17]


class TestRemovals:
    """Removals are kept for a time, and a reader that may miss one gets a reset."""

    async def test_a_reader_from_before_a_forgotten_removal_gets_a_reset(
        self, store: LocalStore, outbox: Outbox, clock: FakeClock
    ) -> None:
        for name in "abcdef":
            await write(outbox, f"notes/{name}", b"1")
        cursor = await store.change_log.last_id()
        within = (await page_of(store.feed, "", 2)).cursor
        later = list[str]()
        for name in "abcd":
            await remove(outbox, f"notes/{name}", clock.now_ms)
            later.append(await store.change_log.last_id())
            clock.now_ms += 400
        for since in (cursor, within):
            assert await store.feed.latest([""], since, 10) == ResetReason.FORGOTTEN
            assert await store.feed.latest(["notes/f"], since, 10) == ResetReason.FORGOTTEN
        assert await keys_of(store.feed, later[0]) == ["-notes/b", "-notes/c", "-notes/d"]
        assert await keys_of(store.feed) == ["notes/e", "notes/f"]
        clock.now_ms += 10_000
        assert await keys_of(store.feed, later[0]) == ["-notes/b", "-notes/c", "-notes/d"]
        await remove(outbox, "notes/e", clock.now_ms)
        assert await store.feed.latest([""], later[1], 10) == ResetReason.FORGOTTEN
        assert await keys_of(store.feed, later[2]) == ["-notes/d", "-notes/e"]
        await remove(outbox, "notes/f", clock.now_ms)
        assert await store.feed.latest([""], later[2], 10) == ResetReason.FORGOTTEN
        assert await keys_of(store.feed, later[3]) == ["-notes/e", "-notes/f"]

    async def test_a_reader_that_is_on_its_way_gets_a_reset_only_if_it_may_miss_a_removal(
        self, store: LocalStore, outbox: Outbox, clock: FakeClock
    ) -> None:
        for name in "abcdef":
            await write(outbox, f"notes/{name}", b"1")
        start = await store.change_log.last_id()
        await remove(outbox, "notes/a", clock.now_ms)
        await remove(outbox, "notes/b", clock.now_ms)
        first_sync = await page_of(store.feed, "", 1)
        catch_up = await page_of(store.feed, start, 1)
        assert [each.key for each in catch_up.changes] == ["notes/a"]
        clock.now_ms += 2_000
        await remove(outbox, "notes/c", clock.now_ms)
        # Both removals of before are forgotten: one of them the catching-up reader has not read.
        assert await store.feed.latest([""], catch_up.cursor, 10) == ResetReason.FORGOTTEN
        assert await keys_of(store.feed, first_sync.cursor) == ["notes/d", "notes/e", "notes/f", "-notes/c"]

    async def test_a_clock_that_has_just_stepped_forgets_nothing(
        self, store: LocalStore, outbox: Outbox, tmp_path: Path
    ) -> None:
        cursor = await store.change_log.last_id()
        await write(outbox, "notes/a", b"1")
        await remove(outbox, "notes/a", 1)
        await store.close()

        class Stepping(FakeClock):
            is_stable = False

        reopened = await LocalStore.open_folder(tmp_path / "data", Stepping(10**12), RETENTION)
        await write(outbox_of(reopened, MemoryCoordinator()), "notes/b", b"1")
        await remove(outbox_of(reopened, MemoryCoordinator()), "notes/b", 2)
        assert await keys_of(reopened.feed, cursor) == ["-notes/a", "-notes/b"]
        await reopened.close()


async def test_the_feed_of_a_folder_that_was_upgraded_begins_with_what_was_there(tmp_path: Path) -> None:
    create_database(tmp_path / "pysync.db", SCHEMA._replace(steps=SCHEMA.steps[:-2]))
    with contextlib.closing(sqlite3.connect(tmp_path / "pysync.db", isolation_level=None)) as database:
        for name in "ba":
            database.execute(
                "INSERT INTO object(parent, name, etag, content_type, modified_ms, body) "
                "VALUES('notes', ?, 'e', 'application/json', 5, x'7b7d')",
                (name,),
            )
            database.execute("INSERT INTO change(at_ms, text, identity) VALUES(5, x'', '')")
        ((newest,),) = database.execute("SELECT max(id) FROM change").fetchall()
    store = await LocalStore.open_folder(tmp_path)
    found = await changes_of(store.feed, "", 1)
    assert [each[1:] for each in found] == [("notes/b", None, None, False), ("notes/a", None, None, False)]
    # The changes between an earlier id and the upgrade are not known.
    assert await store.feed.latest([""], f"{newest - 1:017d}", 10) == ResetReason.FORGOTTEN
    assert await keys_of(store.feed, f"{newest:017d}") == []
    await write(outbox_of(store, MemoryCoordinator()), "notes/b", b"1")
    assert await keys_of(store.feed, f"{newest:017d}") == ["notes/b"]
    assert await keys_of(store.feed) == ["notes/a", "notes/b"]
    await store.close()


async def test_a_folder_put_back_from_an_older_copy_gives_a_reset(
    store: LocalStore, outbox: Outbox, tmp_path: Path
) -> None:
    """To a reader that was at the end, and to one within a run, though more is written than was lost."""
    for n in range(4):
        await write(outbox, f"notes/{n}", b"1")
    with contextlib.closing(sqlite3.connect(tmp_path / "data/pysync.db")) as database:
        database.execute("VACUUM INTO ?", (str(tmp_path / "copy.db"),))
    before = await store.change_log.last_id()
    await write(outbox, "notes/0", b"lost")
    within, end = await page_of(store.feed, "", 2), await page_of(store.feed)
    assert [each.key for each in within.changes] == ["notes/1", "notes/2"]
    await store.close()
    for path in (tmp_path / "data").glob("pysync.db*"):
        path.unlink()
    (tmp_path / "copy.db").rename(tmp_path / "data/pysync.db")
    again = await LocalStore.open_folder(tmp_path / "data")
    for n in range(5):
        for page in (within, end):
            assert await again.feed.latest([""], page.cursor, 10) == ResetReason.OTHER_EPOCH
        await write(outbox_of(again, MemoryCoordinator()), f"more/{n}", b"1")
    assert await keys_of(again.feed, before) == [f"more/{n}" for n in range(5)]
    await again.close()


async def test_own_documents_are_found_without_reading_what_others_wrote(
    store: LocalStore, outbox: Outbox
) -> None:
    for n in range(20):
        await write(outbox, f"users/me/{n}", b"1")
    cursor = await store.change_log.last_id()
    for n in range(100):
        await write(outbox, f"users/other/{n}", b"1")
    await write(outbox, "users/me/3", b"2")
    await remove(outbox, "users/me/4")
    await write(outbox, "users/you/1", b"2")
    page = await page_of(store.feed, cursor, 1_000, "users/me", "users/you")
    assert [each.key for each in page.changes] == ["users/me/3", "users/me/4", "users/you/1"]
    assert page.scanned == 21
    assert page.is_end
    assert page.cursor == await store.change_log.last_id()
    everything = await page_of(store.feed, page.cursor, 1_000, "users/me", "users/other")
    assert everything.scanned == 0


def plan_of(folder: Path, statement: str, count: int) -> list[str]:
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:
        rows = database.execute(f"EXPLAIN QUERY PLAN {statement}", [None] * count).fetchall()
    return [row[3] for row in rows]


async def test_both_ways_to_read_use_an_index(store: LocalStore, tmp_path: Path) -> None:
    by_sequence = plan_of(tmp_path / "data", BY_SEQUENCE, 3)
    assert "SEARCH object USING INDEX object_seq (<expr>>?)" in by_sequence
    assert "SEARCH removed USING INTEGER PRIMARY KEY (rowid>?)" in by_sequence
    assert not [step for step in by_sequence if "SCAN" in step or "TEMP B-TREE" in step]
    for statement in (BY_KEY, COUNT):
        by_key = plan_of(tmp_path / "data", statement, 8)
        assert not [step for step in by_key if "SCAN object" in step or "SCAN removed" in step]
        assert not [step for step in by_key if "object_seq" in step]


async def test_many_rows_of_its_own_are_read_by_sequence(tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path)
    outbox = outbox_of(store, MemoryCoordinator())
    with contextlib.closing(sqlite3.connect(tmp_path / "pysync.db", isolation_level=None)) as database:
        database.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i <= ?) INSERT INTO "
            "object(parent, name, etag, content_type, modified_ms, body) "
            "SELECT 'notes', i, 'e', 'application/json', 5, x'7b7d' FROM n",
            (MAX_BY_KEY,),
        )
    await write(outbox, "notes/new", b"1")
    await write(outbox, "other/new", b"1")
    page = await page_of(store.feed, "", 100, "notes")
    assert (len(page.changes), page.scanned) == (100, 100)
    page = await page_of(store.feed, "", 100, "other")
    assert (len(page.changes), page.scanned) == (1, 1)
    await store.close()


class Reader:
    """A client that follows the feed below some keys, and compares everything after a reset."""

    def __init__(self, *folders: str) -> None:
        self.folders = folders
        self.cursor = ""
        self.held = dict[str, str | None]()
        self.is_end = False
        self.resets = 0

    async def step(self, site: "Site", limit: int) -> None:
        """Read a page."""
        page = await site.store.feed.latest(self.folders, self.cursor, limit)
        if isinstance(page, ResetReason):
            self.resets += 1
            self.cursor, self.held = await site.store.change_log.last_id(), await site.stored(self.folders)
            return
        taken = page.changes
        self.cursor, self.is_end = page.cursor, page.is_end
        if taken and site.random.random() < 0.3:
            taken = taken[: site.random.randrange(len(taken)) + 1]
            self.cursor, self.is_end = page.cursor_after(taken[-1]), False
        for change in taken:
            if change.removed:
                self.held.pop(change.key, None)
            else:
                self.held[change.key] = change.hash


class Site:
    """A folder that is written, restarted, and put back from copies."""

    def __init__(self, folder: Path, random_: random.Random, clock: FakeClock, store: LocalStore) -> None:
        self.folder, self.random, self.clock, self.store = folder, random_, clock, store
        self.writes = 0

    @property
    def outbox(self) -> Outbox:
        return outbox_of(self.store, MemoryCoordinator())

    def key(self) -> str:
        return f"{self.random.choice(['a', 'a/b', 'b', 'c-d'])}/{self.random.randrange(6)}"

    async def stored(self, folders: tuple[str, ...]) -> dict[str, str | None]:
        """What is stored below some keys, with the hashes."""
        found = dict[str, str | None]()
        async for entry in self.store.walk(""):
            if any(not folder or f"{entry.key}/".startswith(f"{folder}/") for folder in folders):
                object_ = await self.store.get(entry.key)
                if isinstance(object_, StoredObject):
                    found[entry.key] = hash_of(object_.body)
                else:
                    stat = await self.store.stat(entry.key)
                    found[entry.key] = None if stat is None else stat.sha256
        return found

    async def put(self) -> None:
        self.writes += 1
        await write(self.outbox, self.key(), b"%d" % self.writes)

    async def remove(self) -> None:
        await remove(self.outbox, self.key(), self.clock.now_ms)

    async def wait(self) -> None:
        self.clock.now_ms += 300

    async def write_of_no_change(self) -> None:
        await self.store.put("_pysync/own", b"{}")
        await self.store.commit(Write("_pysync/own", None, ANY))

    async def restart(self) -> None:
        await self.store.close()
        self.store = await LocalStore.open_folder(self.folder, self.clock, RETENTION)

    async def copy(self) -> None:
        await self.store.close()
        shutil.rmtree(f"{self.folder}.copy", ignore_errors=True)
        shutil.copytree(self.folder, f"{self.folder}.copy")
        self.store = await LocalStore.open_folder(self.folder, self.clock, RETENTION)

    async def put_back(self) -> None:
        if Path(f"{self.folder}.copy").exists():
            await self.store.close()
            shutil.rmtree(self.folder)
            shutil.copytree(f"{self.folder}.copy", self.folder)
            self.store = await LocalStore.open_folder(self.folder, self.clock, RETENTION)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(depth(6, 300)))
async def test_a_reader_ends_with_exactly_what_is_stored(tmp_path: Path, clock: FakeClock, seed: int) -> None:
    """Between its pages documents are written or removed, and the store is restarted, trimmed or put back."""
    chance = random.Random(seed)
    store = await LocalStore.open_folder(tmp_path / "data", clock, RETENTION)
    site = Site(tmp_path / "data", chance, clock, store)
    readers = [Reader(""), Reader("a"), Reader("a/b", "c-d"), Reader("a", "a/b", "b", "c-d"), Reader("b/1")]
    steps: list[Callable[[], object]] = []
    steps += [site.put] * 40 + [site.remove] * 12 + [site.wait] * 4 + [site.write_of_no_change]
    steps += [site.restart, site.copy, site.put_back]
    for _ in range(200):
        for _ in range(chance.randrange(8)):
            await chance.choice(steps)()  # type: ignore[misc]
        reader = chance.choice(readers)
        await reader.step(site, chance.choice([1, 2, 5, 100]))
        if reader.is_end:
            assert reader.held == await site.stored(reader.folders)
    for reader in readers:
        reader.is_end = False
        while not reader.is_end:
            await reader.step(site, chance.choice([1, 3, 100]))
        assert reader.held == await site.stored(reader.folders)
    await site.store.close()
