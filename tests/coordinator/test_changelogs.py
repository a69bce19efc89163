"""Logs of changes in databases: beside the documents of a store, and of a coordinator."""

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contracts.change_logs import RETENTION, ChangeLogContract, change
from contracts.files import chunks_of
from support.faulty_disk import broken_descriptors
from support.python_process import run_python
from support.round_robin import round_robin

from pysync.changelog import Change, ChangeLog, Retention, change_id, split_id
from pysync.config import parse
from pysync.coordinator.local import LocalCoordinator
from pysync.errors import StoreUnavailable
from pysync.server.app import create_app
from pysync.sqlite import changelog
from pysync.sqlite.changelog import TRIM_EVERY
from pysync.sqlite.database_file import create_database
from pysync.store import ABSENT, ANY, Etag, EtagMismatch, Precondition, StoredObject, Write
from pysync.store.local.store import LocalStore
from pysync.store.local.tables import SCHEMA
from pysync.testing import FakeClock


@pytest.fixture(autouse=True)
def brief_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelog, "WAIT_S", 0.05)


@pytest.fixture
async def store(tmp_path: Path, clock: FakeClock) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(tmp_path, clock, RETENTION)
    yield store
    await store.close()


@pytest.fixture
async def other(tmp_path: Path, clock: FakeClock, store: LocalStore) -> AsyncIterator[LocalStore]:
    """The store of another process on the same folder."""
    other = await LocalStore.open_folder(tmp_path, clock, RETENTION)
    yield other
    await other.close()


class TestLocalStoresLog(ChangeLogContract):
    @pytest.fixture
    async def log(self, store: LocalStore) -> ChangeLog:
        return store.change_log


class TestLogsOfTwoStoresOnOneFolder(ChangeLogContract):
    @pytest.fixture
    async def log(self, store: LocalStore, other: LocalStore) -> ChangeLog:
        return round_robin(store.change_log, other.change_log)


async def test_writes_of_other_collections_are_not_read(store: LocalStore) -> None:
    log = store.change_log
    start = await log.last_id()
    made = [change(f"{n}")._replace(origin="/rare" if n % 20 == 7 else "/busy") for n in range(60)]
    for one in made:
        await log.append([one])
    page = await log.read_matching(start, 10, {"/rare"}.__contains__)
    assert page is not None
    assert [each for _, each in page.changes] == [made[7], made[27], made[47]]
    assert (page.scanned, page.is_end) == (3, True)


async def changes_of(log: ChangeLog, after: str = "") -> list[Change]:
    """All changes of a log after an id that it still knows."""
    found = await log.read(after, 10_000)
    assert found is not None
    return [change for _, change in found]


async def test_a_write_and_its_changes_are_made_together(store: LocalStore) -> None:
    changes = [change("1"), change("2")]
    etag = await store.commit(Write("a", b"one", ABSENT, changes))
    found = await store.get("a")
    assert isinstance(found, StoredObject)
    assert (found.body, found.etag, found.content_type) == (b"one", etag, "application/json")
    assert await changes_of(store.change_log) == changes
    await store.commit(Write("a", b"two", Etag(etag), [change("3")]))
    assert await changes_of(store.change_log) == [*changes, change("3")]


async def test_a_rejected_write_has_no_change_and_takes_none_from_its_neighbours(store: LocalStore) -> None:
    await store.put("taken", b"one")
    expects: list[Precondition] = [ABSENT, Etag("another"), ANY]
    outcomes = await asyncio.gather(
        *(store.commit(Write("taken", b"two", expect, [change(f"{expect}")])) for expect in expects),
        *(store.commit(Write(f"n/{n}", b"n", ABSENT, [change(f"{n}")])) for n in range(8)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [EtagMismatch] * 2 + [str] * 9
    assert await changes_of(store.change_log) == [change("any"), *(change(f"{n}") for n in range(8))]


async def test_changes_of_a_document_are_listed_in_the_order_of_its_versions(
    store: LocalStore, other: LocalStore
) -> None:
    versions = []

    async def write_on(through: LocalStore) -> None:
        for _ in range(50):
            count = 0
            expect: Precondition = ABSENT
            found = await through.get("a")
            if isinstance(found, StoredObject):
                count, expect = int(found.body), Etag(found.etag)
            with contextlib.suppress(EtagMismatch):
                after = change(f"{count + 1}")
                await through.commit(Write("a", b"%d" % (count + 1), expect, [after]))
                versions.append(after)

    await asyncio.gather(*(write_on(through) for through in (store, other) * 4))
    assert await changes_of(store.change_log) == [change(f"{n + 1}") for n in range(len(versions))]


async def test_document_that_replaces_a_file_is_a_write_like_any_other(store: LocalStore) -> None:
    await store.write("a", chunks_of(b"file"), "text/plain")
    await store.commit(Write("a", b"document", ANY, [change("1")]))
    assert await store.open("a") is None
    assert await changes_of(store.change_log) == [change("1")]


async def test_a_group_that_fails_leaves_neither_writes_nor_changes(
    store: LocalStore, tmp_path: Path
) -> None:
    await store.commit(Write("a", b"1", ABSENT, [change("1")]))
    cursor = await store.change_log.last_id()
    with broken_descriptors(tmp_path / "pysync.db-wal"):
        outcomes = await asyncio.gather(
            *(store.commit(Write(f"n/{n}", bytes(50_000), ABSENT, [change(f"{n}")])) for n in range(4)),
            return_exceptions=True,
        )
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    assert await store.list("n", None, 10) == []
    assert await store.change_log.last_id() == cursor
    await store.commit(Write("n/1", b"1", ABSENT, [change("2")]))
    assert await changes_of(store.change_log, cursor) == [change("2")]


async def test_changes_and_the_cursor_of_a_follower_survive_a_restart(tmp_path: Path) -> None:
    first = await LocalStore.open_folder(tmp_path)
    empty = await first.change_log.last_id()
    await first.commit(Write("a", b"1", ABSENT, [change("1")]))
    cursor = await first.change_log.last_id()
    await first.commit(Write("b", b"2", ABSENT, [change("2")]))
    await first.close()
    second = await LocalStore.open_folder(tmp_path)
    assert await changes_of(second.change_log, empty) == [change("1"), change("2")]
    assert await changes_of(second.change_log, cursor) == [change("2")]
    assert cursor < await second.change_log.last_id() < await second.change_log.append([change("3")])
    await second.close()


async def test_another_folder_at_the_same_path_has_none_of_the_ids(tmp_path: Path) -> None:
    before = ""
    for name in ("first", "second"):
        store = await LocalStore.open_folder(tmp_path / name)
        if before:
            assert await store.change_log.read(before, 10) is None
        assert before < await store.change_log.last_id()
        before = await store.change_log.append([change(f"{n}") for n in range(10)])
        await store.close()


async def test_a_log_put_back_from_an_older_copy_is_not_the_one_that_its_readers_know(
    tmp_path: Path,
) -> None:
    """Also once more is written to it than was lost."""
    store = await LocalStore.open_folder(tmp_path / "a")
    before = await store.change_log.append([change("before")])
    with contextlib.closing(sqlite3.connect(tmp_path / "a/pysync.db")) as database:
        database.execute("VACUUM INTO ?", (str(tmp_path / "copy.db"),))
    lost = [await store.change_log.append([change(f"lost {n}")]) for n in range(3)]
    await store.close()
    (tmp_path / "b").mkdir()
    (tmp_path / "copy.db").rename(tmp_path / "b/pysync.db")
    store = await LocalStore.open_folder(tmp_path / "b")
    log = store.change_log
    assert await log.last_id() == before
    assert await log.read(lost[0], 10) is None
    after = [await log.append([change(f"new {n}")]) for n in range(5)]
    for id_ in lost:
        assert await log.read(id_, 10) is None
        assert await log.read_matching(id_, 10, bool) is None
        assert await log.read(f"{before[:17]}~{before}~{id_}", 10) is None
    assert await log.read(before, 10) == [(id_, change(f"new {n}")) for n, id_ in enumerate(after)]
    assert after == sorted(after)
    assert after[0] > before
    await store.close()


async def test_only_starts_that_write_begin_an_epoch(tmp_path: Path) -> None:
    ids = []
    for n in range(3):
        for _ in range(2):
            store = await LocalStore.open_folder(tmp_path)
            await store.change_log.last_id()
            await store.put("a", b"of no change")
            await store.close()
        store = await LocalStore.open_folder(tmp_path)
        other = await LocalStore.open_folder(tmp_path)
        ids += [await each.change_log.append([change(f"{n}")]) for each in (store, other, store)]
        assert await store.change_log.last_id() == await other.change_log.last_id() == ids[-1]
        for id_ in ids:
            assert len(await changes_of(store.change_log, id_)) == len(ids) - 1 - ids.index(id_)
        await store.close()
        await other.close()
    assert len({split_id(id_)[1] for id_ in ids}) == 6
    with contextlib.closing(sqlite3.connect(tmp_path / "pysync.db")) as database:
        assert database.execute("SELECT count(*) FROM epoch").fetchone() == (7,)


async def test_ids_keep_their_epoch_when_a_process_begins_with_several_changes(
    store: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    """The second is on its way when the first is stored, and another process writes in between."""
    log = store.change_log
    late = log.rows_of([change("late")])
    ids = [await each.append([change("")]) for each in (log, other.change_log, log, log)]
    with contextlib.closing(sqlite3.connect(tmp_path / "pysync.db", isolation_level=None)) as database:
        ids.append(changelog.append(database.cursor(), late))
    assert [id_ for id_, _ in await log.read("", 10) or ()] == ids


async def test_the_first_change_that_is_stored_begins_the_epoch(tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path)
    first = await store.change_log.append([change("1")])
    await store.close()
    store = await LocalStore.open_folder(tmp_path)
    with broken_descriptors(tmp_path / "pysync.db-wal"), pytest.raises(StoreUnavailable):
        await store.commit(Write("big", bytes(50_000), ANY, [change("lost")]))
    assert await store.change_log.last_id() == first
    second = await store.change_log.append([change("2")])
    assert split_id(first)[1] != split_id(second)[1]
    await store.close()


async def test_a_place_within_a_run_of_the_feed_is_a_position_of_the_log(store: LocalStore) -> None:
    log = store.change_log
    ids = [await log.append([change(f"{n}")]) for n in range(4)]
    within = f"{ids[1][:17]}~{ids[0]}~{ids[2]}"
    assert await changes_of(log, within) == [change("2"), change("3")]
    await log.wait_for_change(within)
    assert await log.read(f"{1:017d}~{ids[0]}~{ids[2]}", 10) is None
    assert (
        await log.read(f"{ids[1][:17]}~{ids[0]}~{change_id(split_id(ids[3])[0] + 1, ids[3][18:])}", 10)
        is None
    )


async def test_changes_of_the_version_before_are_listed_with_their_ids(tmp_path: Path) -> None:
    create_database(tmp_path / "pysync.db", SCHEMA._replace(steps=SCHEMA.steps[:4]))
    insert = "INSERT INTO change(at_ms, text, identity) VALUES(5, ?, ?)"
    with contextlib.closing(sqlite3.connect(tmp_path / "pysync.db", isolation_level=None)) as database:
        ((cursor,),) = database.execute("SELECT max(id) FROM change").fetchall()
        for name in "ab":
            database.execute(insert, change(name, "somebody")[:2])
    store = await LocalStore.open_folder(tmp_path)
    log = store.change_log
    before = [(change_id(cursor + n, ""), change(name, "somebody")) for n, name in ((1, "a"), (2, "b"))]
    assert await log.read("", 10) == before
    assert await log.last_id() == before[1][0]
    after = await log.append([change("c")])
    assert await log.read(before[0][0], 10) == [before[1], (after, change("c"))]
    await store.close()


async def test_waiting_reader_is_notified_by_its_own_process_and_by_others(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody here would stop waiting by itself."""
    monkeypatch.setattr(changelog, "WAIT_S", 20_000.0)
    for writer in (store, other):
        cursor = await store.change_log.last_id()
        waiting = asyncio.ensure_future(store.change_log.wait_for_change(cursor))
        await asyncio.sleep(0)
        await writer.put("b", b"of no change")
        await asyncio.sleep(0)
        assert not waiting.done()
        await writer.commit(Write("a", b"1", ANY, [change("1")]))
        await waiting
        assert await changes_of(store.change_log, cursor) == [change("1")]


async def test_change_of_another_process_before_the_wait_is_noticed(
    store: LocalStore, other: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelog, "WAIT_S", 20_000.0)
    cursor = await store.change_log.last_id()
    assert await changes_of(store.change_log, cursor) == []
    await other.change_log.append([change("1")])
    await store.change_log.wait_for_change(cursor)


async def test_cancelled_write_is_announced_all_the_same(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelog, "WAIT_S", 20_000.0)
    cursor = await store.change_log.last_id()
    writing = asyncio.ensure_future(store.commit(Write("a", b"1", ABSENT, [change("1")])))
    await asyncio.sleep(0)
    writing.cancel()
    await store.change_log.wait_for_change(cursor)
    assert await changes_of(store.change_log, cursor) == [change("1")]


async def test_a_closed_log_is_unavailable(tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path)
    log = store.change_log
    cursor = await log.last_id()
    await store.close()
    for call in (log.append([change("1")]), log.read(cursor, 1), log.last_id(), log.wait_for_change(cursor)):
        with pytest.raises(StoreUnavailable):
            await call


@pytest.mark.slow
async def test_configured_retention_is_kept(tmp_path: Path) -> None:
    changes = {"maxCount": 2 * TRIM_EVERY, "maxAgeMs": 3_600_000}
    async with await create_app(parse({"store": f"file:{tmp_path}", "changes": changes})) as app:
        assert app.store.transactional is not None
        log = app.store.transactional.change_log
        ids = [id_ for _ in range(4) for id_ in await append_to(log, TRIM_EVERY)]
        assert await log.read(ids[0], 1) is None
        assert await changes_of(log, ids[2 * TRIM_EVERY])


async def append_to(log: ChangeLog, count: int) -> list[str]:
    """Append so many changes at once, and return their ids."""
    return await asyncio.gather(*(log.append([change(f"{n}")]) for n in range(count)))


class TestForgetting:
    """A log keeps what it should, little more, and no commit pays for much."""

    def rows(self, folder: Path) -> int:
        with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:
            ((count,),) = database.execute("SELECT count(*) FROM change").fetchall()
        return int(count)

    async def test_old_changes_are_forgotten(self, tmp_path: Path, clock: FakeClock) -> None:
        store = await LocalStore.open_folder(tmp_path, clock, Retention(count=10_000, age_ms=1_000))
        cursor = await store.change_log.append([change("old")])
        await append_to(store.change_log, 300)
        clock.now_ms += 500
        young = await store.change_log.append([change("young")])
        clock.now_ms += 501
        await append_to(store.change_log, TRIM_EVERY)
        assert await store.change_log.read(cursor, 1) is None
        assert len(await changes_of(store.change_log, young)) == TRIM_EVERY
        assert self.rows(tmp_path) <= 2 * TRIM_EVERY + 2
        await store.close()

    async def test_of_old_changes_the_last_cursor_is_remembered(
        self, store: LocalStore, clock: FakeClock
    ) -> None:
        cursor = ""
        for n in range(2 * TRIM_EVERY):
            clock.now_ms += 2 * RETENTION.age_ms
            cursor = await store.change_log.append([change(f"{n}")])
        assert await store.change_log.last_id() == cursor
        assert await store.change_log.read(cursor, 10) == []
        last = await store.change_log.append([change("last")])
        assert await store.change_log.read(cursor, 10) == [(last, change("last"))]

    @pytest.mark.slow
    async def test_one_commit_forgets_a_bounded_number(self, tmp_path: Path, clock: FakeClock) -> None:
        roomy = await LocalStore.open_folder(tmp_path, clock, Retention(count=10_000))
        for start in range(0, 5_000, 500):
            await roomy.change_log.append([change(f"{start + n}") for n in range(500)])
        await roomy.close()
        before = self.rows(tmp_path)
        assert before == 5_001
        store = await LocalStore.open_folder(tmp_path, clock, RETENTION)
        while before > RETENTION.count + TRIM_EVERY + 1:
            await append_to(store.change_log, TRIM_EVERY)
            after = self.rows(tmp_path)
            assert before - 2 * TRIM_EVERY <= after - TRIM_EVERY < before
            before = after
        await store.close()

    async def test_groups_of_any_size_do_not_pile_up(self, store: LocalStore, tmp_path: Path) -> None:
        for _ in range(10):
            await store.change_log.append([change(f"{n}") for n in range(2_000)])
        assert self.rows(tmp_path) <= 2_000 + RETENTION.count + 1


WRITE_ON = """
import asyncio, itertools, sys
from pysync.changelog import Change
from pysync.store import ABSENT, Write
from pysync.store.local import LocalStore

async def write(store, lane):
    for n in itertools.count():
        changes = [Change(b"%d/%d" % (lane, n))]
        await store.commit(Write(f"lane{lane}/{n}", b"%d" % n * 300, ABSENT, changes))
        print(f"{lane}/{n}", flush=True)

async def main(folder):
    store = await LocalStore.open_folder(folder)
    await asyncio.gather(*(write(store, lane) for lane in range(8)))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.process
async def test_after_a_kill_there_is_a_change_for_each_write_and_for_no_other(tmp_path: Path) -> None:
    process = run_python(WRITE_ON, str(tmp_path))
    assert process.stdout is not None
    acknowledged = [await asyncio.to_thread(process.stdout.readline) for _ in range(1_000)]
    process.kill()
    acknowledged += await asyncio.to_thread(process.stdout.readlines)
    process.communicate()
    store = await LocalStore.open_folder(tmp_path)
    changes = await store.change_log.read("", 100_000)
    assert changes is not None
    ids = [split_id(id_)[0] for id_, _ in changes]
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    texts = {change.text.decode() for _, change in changes}
    assert len(texts) == len(ids)
    assert {line[:-1] for line in acknowledged if line.endswith("\n")} <= texts
    assert {f"lane{text}" for text in texts} == {listed.key async for listed in store.walk("")}
    await store.close()


class TestAfterAStartOfTheMachine:
    """What a coordinator's log lost with the power, nobody takes for told."""

    async def test_earlier_follower_receives_a_reset(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        boot = tmp_path / "boot_id"
        monkeypatch.setattr("pysync.clock.BOOT_ID_PATH", boot)
        boot.write_text("one\n")
        cursor = ""
        for _ in range(2):
            coordinator = await LocalCoordinator.open_folder(tmp_path)
            assert not cursor or await changes_of(coordinator, cursor) == []
            cursor = await coordinator.append([change("1")])
            await coordinator.close()
        intent = await self.prepare(tmp_path)
        boot.write_text("two\n")
        coordinator = await LocalCoordinator.open_folder(tmp_path)
        other = await LocalCoordinator.open_folder(tmp_path)
        for each in (coordinator, other):
            assert await each.read(cursor, 1) is None
            assert await changes_of(each) == []
            assert await each.last_id() > cursor
        assert [found.name for found in await coordinator.prepared(10)] == [intent]
        last = await other.append([change("2")], intent)
        assert await coordinator.read("", 10) == [(last, change("2"))]
        for each in (coordinator, other):
            await each.close()

    async def prepare(self, folder: Path) -> str:
        coordinator = await LocalCoordinator.open_folder(folder)
        intent = await coordinator.prepare([change("2")])
        await coordinator.close()
        return intent
