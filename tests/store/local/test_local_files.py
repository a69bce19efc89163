"""The files of the embedded store: where they lie, and what crashes and other processes leave of them."""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contracts.files import chunks_of, read_file
from support.bit_rot import rot
from support.depth import LONG, depth
from support.faulty_disk import broken_descriptors
from support.python_process import run_python

from pysync.cache import CACHED_ENTRIES
from pysync.changelog import Change
from pysync.clock import HybridTimestamp, wall_clock_ms
from pysync.errors import KeyConflict, StoreUnavailable
from pysync.sqlite.database_file import Schema, create_database
from pysync.store import DamagedFile, StoredObject
from pysync.store.local.disk import FileFingerprint
from pysync.store.local.rename_journal import FLUSH_EVERY
from pysync.store.local.store import LocalStore
from pysync.store.local.tables import SCHEMA
from pysync.testing import FakeClock

VERSION_0_1_0 = 4
"""Steps of the schema that it had."""
CHECKED_BYTES = 1_048_576
"""Length up to which a file is checked whenever it is read."""


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(folder)
    yield store
    await store.close()


def on_disk(folder: Path) -> dict[str, bytes]:
    """The files that a glob finds, by their keys."""
    root = folder / "files"
    paths = [path for path in root.glob("**/*") if path.is_file() and path.parent != root / "~incoming"]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


async def stored(store: LocalStore) -> dict[str, bytes]:
    """The files that the store names, each checked against its hash."""
    found = {}
    async for listed in store.walk(""):
        if await store.stat(listed.key) is not None:
            file, content = await read_file(store, listed.key)
            assert file.sha256 == hashlib.sha256(content).hexdigest()
            found[listed.key] = content
    return found


def notes(folder: Path) -> list[str]:
    """The keys of files on their way."""
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:
        found = database.execute("SELECT key FROM arriving UNION ALL SELECT key FROM doomed").fetchall()
    return [key for (key,) in found]


async def test_they_lie_at_their_own_key_path(store: LocalStore, folder: Path) -> None:
    await store.write("events/app/1.parquet", chunks_of(b"one"), "text/plain")
    assert [path.read_bytes() for path in (folder / "files").glob("**/*.parquet")] == [b"one"]


async def test_a_key_below_or_above_a_file_is_a_conflict(store: LocalStore) -> None:
    await store.write("a/b", chunks_of(b"1"), "text/plain")
    for key in ("a", "a/b/c", "a/b/c/d"):
        with pytest.raises(KeyConflict):
            await store.write(key, chunks_of(b"2"), "text/plain")
        assert await store.open(key) is None
    assert (await read_file(store, "a/b"))[1] == b"1"
    assert [listed.key async for listed in store.walk("")] == ["a/b"]


async def test_a_rejected_or_failed_write_leaves_no_temporary_file(store: LocalStore, folder: Path) -> None:
    await store.write("a", chunks_of(b"1"), "text/plain")
    with pytest.raises(KeyConflict):
        await store.write("a/b", chunks_of(b"2"), "text/plain")
    blocked = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield bytes(300_000)
        blocked.set()
        await asyncio.Event().wait()

    writing = asyncio.ensure_future(store.write("c", endless(), "text/plain"))
    await blocked.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert list((folder / "files" / "~incoming").iterdir()) == []


async def test_the_folder_of_incoming_files_is_not_a_key(store: LocalStore) -> None:
    for key in ("~incoming", "~incoming/a"):
        with pytest.raises(ValueError, match="reserved"):
            await store.write(key, chunks_of(b"1"), "text/plain")


async def test_a_key_too_long_for_the_disk_is_rejected(store: LocalStore, folder: Path) -> None:
    for key in ("x" * 300, "new/" + "x" * 300, "x" * 300 + "/a", "/".join(["deep"] * 1_000)):
        with pytest.raises(ValueError, match="too long"):
            await store.write(key, chunks_of(b"1"), "text/plain")
    assert [listed async for listed in store.walk("")] == []
    assert [path.name for path in (folder / "files").iterdir()] == ["~incoming"]


async def test_deleting_prunes_empty_folders_only(store: LocalStore, folder: Path) -> None:
    await store.write("a/b/c/1", chunks_of(b"1"), "text/plain")
    await store.write("a/2", chunks_of(b"2"), "text/plain")
    await store.delete("a/b/c/1")
    assert not (folder / "files/a/b").exists()
    assert (await read_file(store, "a/2"))[1] == b"2"
    await store.delete("a/2")
    assert {path.name for path in (folder / "files").iterdir()} == {"~incoming"}


async def test_document_that_replaces_a_file_removes_it(store: LocalStore, folder: Path) -> None:
    await store.write("a/1.parquet", chunks_of(b"1"), "text/plain")
    await store.put("a/1.parquet", b"document")
    assert not (folder / "files/a").exists()


async def test_a_file_that_was_replaced_from_outside_is_damaged(store: LocalStore, folder: Path) -> None:
    await store.write("a", chunks_of(b"old"), "text/plain")
    temporary = folder / "files" / "~incoming" / "x"
    temporary.write_bytes(b"newer")
    os.replace(temporary, folder / "files" / "a")
    for read in (store.open, store.stat, store.verify) * 2:
        with pytest.raises(DamagedFile):
            await read("a")
    assert [listed.size async for listed in store.walk("")] == [3]


async def test_a_crash_before_the_unlink_is_made_good_on_opening(store: LocalStore, folder: Path) -> None:
    for key in ("gone", "again"):
        await store.write(key, chunks_of(b"1"), "text/plain")
    with contextlib.closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as database:
        database.execute("DELETE FROM object WHERE name = 'gone'")
        database.executemany("INSERT INTO doomed VALUES(?)", [("gone",), ("again",)])
    await (await LocalStore.open_folder(folder)).close()
    assert not (folder / "files" / "gone").exists()
    assert (await read_file(store, "again"))[1] == b"1"
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:
        assert database.execute("SELECT count(*) FROM doomed").fetchone() == (0,)


async def test_a_file_lost_from_disk_is_damaged_not_missing(store: LocalStore, folder: Path) -> None:
    await store.write("a", chunks_of(b"1"), "text/plain")
    (folder / "files" / "a").unlink()
    for read in (store.open, store.stat):
        with pytest.raises(DamagedFile) as caught:
            await read("a")
        assert "the file is lost" in caught.value.detail
    await store.write("a", chunks_of(b"2"), "text/plain")
    assert (await read_file(store, "a"))[1] == b"2"


async def test_missing_files_folder_makes_the_store_unavailable(store: LocalStore, folder: Path) -> None:
    await store.write("a", chunks_of(b"1"), "text/plain")
    shutil.rmtree(folder / "files")
    with pytest.raises(StoreUnavailable, match="is its disk mounted"):
        await store.open("a")


async def test_a_file_truncated_while_read_is_an_error(store: LocalStore, folder: Path) -> None:
    await store.write("a", chunks_of(bytes(3_000_000)), "text/plain")
    file = await store.open("a")
    assert file is not None
    os.truncate(folder / "files" / "a", 300_000)
    with pytest.raises(StoreUnavailable):
        [chunk async for chunk in file.chunks]
    await file.chunks.aclose()


async def test_leftovers_older_than_a_day_are_cleared_on_opening(store: LocalStore, folder: Path) -> None:
    incoming = folder / "files" / "~incoming"
    for name, age_s in (("old", 90_000), ("young", 80_000)):
        (incoming / name).write_bytes(b"x")
        then = (incoming / name).stat().st_mtime - age_s
        os.utime(incoming / name, (then, then))
    await (await LocalStore.open_folder(folder)).close()
    assert [path.name for path in incoming.iterdir()] == ["young"]


async def test_a_clock_that_is_set_ahead_makes_no_leftover_of_a_file_that_is_being_written(
    store: LocalStore, folder: Path
) -> None:
    incoming = folder / "files" / "~incoming" / "young"
    incoming.write_bytes(b"x")
    then = incoming.stat().st_mtime - 90_000
    os.utime(incoming, (then, then))
    clock = FakeClock(int((then + 80_000) * 1000))
    await (await LocalStore.open_folder(folder, clock)).close()
    assert incoming.exists()


async def test_a_process_whose_clock_is_ahead_leaves_a_file_that_another_one_writes(
    store: LocalStore, folder: Path
) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"1" * CHECKED_BYTES
        yield b"2"  # the first chunk is on disk once this one has come
        arrived.set()
        await go_on.wait()
        yield b"3"

    writing = asyncio.ensure_future(store.write("f/a", slow(), "text/plain"))
    await arrived.wait()
    ahead = FakeClock(wall_clock_ms() + 2 * 86_400_000)
    await (await LocalStore.open_folder(folder, ahead)).close()
    go_on.set()
    await writing
    assert (await read_file(store, "f/a"))[1] == b"1" * CHECKED_BYTES + b"23"


REPLACE_FILE = """
import asyncio, itertools, sys
from pysync.store.local import LocalStore
from contracts.files import chunks_of
from pysync.testing import FakeClock

async def main(folder):
    store = await LocalStore.open_folder(folder)
    for n in itertools.count():
        await store.write("f/a", chunks_of(b"%08d" % n * 50_000), "text/plain")
        print(n, flush=True)

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.process
@pytest.mark.parametrize("acknowledged", [1, 3, 8])
async def test_after_a_kill_a_file_is_whole_and_not_older_than_acknowledged(
    folder: Path, acknowledged: int
) -> None:
    process = run_python(REPLACE_FILE, str(folder))
    assert process.stdout is not None
    lines = [await asyncio.to_thread(process.stdout.readline) for _ in range(acknowledged)]
    process.kill()
    await asyncio.to_thread(process.communicate)
    store = await LocalStore.open_folder(folder)
    file, content = await read_file(store, "f/a")
    await store.close()
    assert len(content) == file.size == 400_000
    assert content == content[:8] * 50_000
    assert int(content[:8]) >= int(lines[-1])
    assert file.sha256 == hashlib.sha256(content).hexdigest()


async def reopened(folder: Path) -> dict[str, bytes]:
    """What the files of a folder are after it has been opened, on disk as in the rows."""
    store = await LocalStore.open_folder(folder)
    found = await stored(store)
    await store.close()
    assert on_disk(folder) == found
    assert notes(folder) == []
    return found


async def test_a_move_that_the_loss_of_power_undid_is_done_again(store: LocalStore, folder: Path) -> None:
    await store.write("f/new", chunks_of(b"new"), "text/plain")
    await store.write("f/replaced", chunks_of(b"old"), "text/plain")
    await store.write("f/replaced", chunks_of(b"newer"), "text/plain")
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:
        pending = dict(database.execute("SELECT key, name FROM arriving").fetchall())
    for key, name in pending.items():
        os.replace(folder / "files" / key, folder / "files" / "~incoming" / name)
    (folder / "files" / "f" / "replaced").write_bytes(b"old")
    assert await reopened(folder) == {"f/new": b"new", "f/replaced": b"newer"}


async def test_file_that_cannot_be_renamed_yet_is_kept_and_reported(
    store: LocalStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await store.write("f/a", chunks_of(b"new"), "text/plain")
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:
        ((name,),) = database.execute("SELECT name FROM arriving").fetchall()
    incoming = folder / "files" / "~incoming" / name
    os.replace(folder / "files/f/a", incoming)
    os.utime(incoming, (0, 0))
    (folder / "files/f/a/in the way").mkdir(parents=True)
    await (await LocalStore.open_folder(folder)).close()
    with pytest.raises(StoreUnavailable):
        await store.open("f/a")
    assert "to 'f/a'; will retry" in caplog.text
    assert "is gone" not in caplog.text
    assert incoming.read_bytes() == b"new"
    shutil.rmtree(folder / "files/f/a")
    assert on_disk(folder) == {}
    assert await reopened(folder) == {"f/a": b"new"}


async def test_notes_do_not_pile_up(store: LocalStore, folder: Path) -> None:
    for _ in range(3):
        await asyncio.gather(*(store.write(f"f/{n}", chunks_of(b"1"), "text/plain") for n in range(50)))
        await asyncio.gather(*(store.delete(f"f/{n}") for n in range(0, 50, 2)))
    assert len(notes(folder)) < FLUSH_EVERY + 50


async def test_writes_of_one_moment_may_meet_at_one_key(store: LocalStore, folder: Path) -> None:
    bodies = [b"%d" % n for n in range(20)]
    writes: list[Any] = [store.write("f/a", chunks_of(body), "text/plain") for body in bodies]
    writes += [store.delete("f/a"), store.put("f/a", b"document"), store.delete("f/a")]
    await asyncio.gather(*writes)
    await store.write("f/a", chunks_of(b"last"), "text/plain")
    assert await stored(store) == on_disk(folder) == {"f/a": b"last"}
    assert list((folder / "files" / "~incoming").iterdir()) == []


async def test_of_files_above_and_below_each_other_one_is_taken(store: LocalStore, folder: Path) -> None:
    keys = ["a", "a/b", "a/b/c", "a/x"]
    outcomes = await asyncio.gather(
        *(store.write(key, chunks_of(key.encode()), "text/plain") for key in keys), return_exceptions=True
    )
    assert {type(outcome) for outcome in outcomes} <= {str, KeyConflict}
    taken = {key for key, outcome in zip(keys, outcomes, strict=True) if isinstance(outcome, str)}
    assert taken in ({"a"}, {"a/b", "a/x"}, {"a/b/c", "a/x"})
    assert {*await stored(store)} == {*on_disk(folder)} == taken
    assert list((folder / "files" / "~incoming").iterdir()) == []


async def test_a_write_whose_caller_is_gone_is_carried_out_or_leaves_nothing(
    store: LocalStore, folder: Path
) -> None:
    for ticks in range(12):
        writing = asyncio.ensure_future(store.write(f"f/{ticks}", chunks_of(b"1"), "text/plain"))
        for _ in range(ticks):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
    assert await stored(store) == on_disk(folder)
    assert await reopened(folder) == on_disk(folder)


async def test_a_rejected_write_whose_caller_is_gone_leaves_nothing(store: LocalStore, folder: Path) -> None:
    await store.write("f", chunks_of(b"1"), "text/plain")
    for ticks in range(12):
        writing = asyncio.ensure_future(store.write("f/below", chunks_of(b"2"), "text/plain"))
        for _ in range(ticks):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
    await store.probe()
    assert on_disk(folder) == {"f": b"1"}
    assert list((folder / "files" / "~incoming").iterdir()) == []


async def test_a_group_that_is_undone_leaves_nothing_once_another_is_committed(
    store: LocalStore, folder: Path
) -> None:
    await store.write("f/a", chunks_of(b"old"), "text/plain")
    with broken_descriptors(folder / "pysync.db-wal"):
        outcomes = await asyncio.gather(
            *(store.write(f"f/{name}", chunks_of(b"new"), "text/plain") for name in "abab"),
            return_exceptions=True,
        )
    assert {type(outcome) for outcome in outcomes} == {StoreUnavailable}
    assert on_disk(folder) == {"f/a": b"old"}
    await store.write("f/b", chunks_of(b"later"), "text/plain")
    assert list((folder / "files" / "~incoming").iterdir()) == []
    assert await reopened(folder) == {"f/a": b"old", "f/b": b"later"}


async def test_a_restored_copy_is_served_and_found_whole(
    store: LocalStore, folder: Path, tmp_path: Path
) -> None:
    for n in range(3):
        await store.write(f"f/{n}", chunks_of(b"%d" % n), "text/plain")
    await store.close()
    (tmp_path / "copy").mkdir()
    for name in ("files", "pysync.db"):
        shutil.move(shutil.copytree(folder, tmp_path / name) / name, tmp_path / "copy" / name)
    again = await LocalStore.open_folder(tmp_path / "copy")
    stat = await again.stat("f/1")
    assert stat is not None
    assert stat.sha256 == hashlib.sha256(b"1").hexdigest()
    assert await stored(again) == {f"f/{n}": b"%d" % n for n in range(3)}
    await again.close()


@pytest.mark.parametrize("size", [9, 2_000_000])
@pytest.mark.parametrize("harm", ["none", "flipped", "touched", "replaced"])
async def test_a_file_of_version_0_1_0_is_checked_without_a_checksum(
    folder: Path, size: int, harm: str
) -> None:
    body, path = os.urandom(size), folder / "files/f/a"
    path.parent.mkdir(parents=True)
    path.write_bytes(body)
    create_database(folder / "pysync.db", Schema(SCHEMA.steps[:VERSION_0_1_0]))
    row = ("f", "a", "e1", "text/plain", 1, hashlib.sha256(body).hexdigest())
    with contextlib.closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as database:
        database.execute(
            "INSERT INTO object(parent, name, etag, content_type, modified_ms, sha256, size, mtime_ns, inode)"
            "VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, *FileFingerprint.of(str(path))),
        )
    if harm == "flipped":
        rot(path)
    elif harm == "touched":
        os.utime(path)
    elif harm == "replaced":
        path.write_bytes(bytes(size))
    store = await LocalStore.open_folder(folder)
    if harm == "replaced" or (harm == "flipped" and size < CHECKED_BYTES):
        for _ in range(2):
            with pytest.raises(DamagedFile):
                await store.open("f/a")
    elif harm != "flipped":
        for _ in range(2):
            file, content = await read_file(store, "f/a")
            assert (content, file.etag) == (body, "e1")
            assert await store.verify("f/a") == await store.stat("f/a")
    rot(path)
    if size < CHECKED_BYTES and harm == "flipped":
        assert (await read_file(store, "f/a"))[1] == body
    elif size < CHECKED_BYTES or harm == "replaced":
        with pytest.raises(DamagedFile):
            await store.open("f/a")
    await store.close()


def changed(tick: HybridTimestamp, sha256: str) -> list[Change]:
    return [Change(sha256.encode())]


STEPS: list[tuple[str, str, str]] = [
    ("write", "e/1.parquet", "one"),
    ("write", "e/2.parquet", "two" * 30_000),
    ("write", "e/1.parquet", "newer"),
    ("put", "e/2.parquet", "document"),
    ("write", "e/2.parquet", "again"),
    ("delete", "e/1.parquet", ""),
    ("write", "e/1.parquet/deep", "below a file that was"),
    ("delete", "e/1.parquet/deep", ""),
    ("write", "e/1.parquet", "and above it"),
    ("delete", "e/2.parquet", ""),
]


def states() -> list[dict[str, tuple[str, bytes]]]:
    """What is stored before the first of `STEPS`, and after each."""
    state: dict[str, tuple[str, bytes]] = {}
    found = [state]
    for verb, key, body in STEPS:
        state = {**state, key: (verb, body.encode())}
        if verb == "delete":
            del state[key]
        found.append(state)
    return found


KILL_AT_EACH_STEP = """
import asyncio, json, os, signal, sys
from pathlib import Path
from pysync.store.local import rename_journal
from pysync.store.local import LocalStore
from contracts.files import chunks_of
from pysync.testing import FakeClock

async def run(folder, steps, done):
    store = await LocalStore.open_folder(folder)
    for verb, key, body in steps:
        if verb == "write":
            await store.write(key, chunks_of(body.encode()), "text/plain")
        elif verb == "put":
            await store.put(key, body.encode())
        else:
            await store.delete(key)
        os.write(done, b".")
    await store.close()

def die_at(count, place):
    def hook(event, args):
        nonlocal count
        if (event == "open" or event.startswith("os.")) and str(args[0]).startswith(place):
            count -= 1
            if count == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

folder, steps, rename_journal.FLUSH_EVERY = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
status, count, apart = 1, 0, int(sys.argv[4])
while status:
    count += apart
    place = folder / str(count)
    place.mkdir()
    child = os.fork()
    if not child:
        done = os.open(place / "done", os.O_WRONLY | os.O_CREAT)
        die_at(count, f"{place}/data/files")
        asyncio.run(run(place / "data", steps, done))
        os._exit(0)
    _, status = os.waitpid(child, 0)
"""


@pytest.mark.process
@pytest.mark.parametrize("flush_every", [0, FLUSH_EVERY])
async def test_a_kill_before_any_step_on_disk_leaves_files_and_rows_at_one(
    tmp_path: Path, flush_every: int
) -> None:
    apart = str(depth(2, 1))
    process = run_python(KILL_AT_EACH_STEP, str(tmp_path), json.dumps(STEPS), str(flush_every), apart)
    await asyncio.to_thread(process.communicate)
    assert process.returncode == 0
    expected, met = states(), set()
    for path in tmp_path.iterdir():
        done = (path / "done").stat().st_size
        met.add(done)
        files = await reopened(path / "data")
        store = await LocalStore.open_folder(path / "data")
        document = await store.get("e/2.parquet")
        await store.close()
        now = {key: ("write", content) for key, content in files.items()}
        if isinstance(document, StoredObject):
            now["e/2.parquet"] = ("put", document.body)
        assert now in expected[done : done + 2]
    assert len(met) > len(STEPS) // 2
    assert not LONG or met == {*range(len(STEPS) + 1)}


WRITE_AND_DELETE = """
import asyncio, itertools, os, sys
from pysync.changelog import Change
from pysync.store.local import LocalStore
from contracts.files import chunks_of
from pysync.testing import FakeClock

async def replace(store, key):
    for n in itertools.count():
        body = b"%08d" % n * (1 + n % 3 * 20_000)
        if n % 5 == 4:
            await store.delete(key)
        else:
            await store.write(key, chunks_of(body), "text/plain")
        print(key, n, flush=True)

async def add(store, name):
    for n in itertools.count():
        tick, sha256 = await store.write_ordered(
            lambda tick: f"next/{tick.ms:013}-{tick.counter:06}.parquet",
            chunks_of(name.encode(), b"%d" % n), "text/plain",
            lambda tick, sha256: [Change(sha256.encode())],
        )
        print(f"next/{tick.ms:013}-{tick.counter:06}.parquet", sha256, flush=True)

async def main(folder, name):
    store = await LocalStore.open_folder(folder)
    await asyncio.gather(
        *(replace(store, f"f/{name}/{lane}") for lane in range(4)),
        *(add(store, name) for _ in range(4)),
    )

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.process
@pytest.mark.parametrize("acknowledged", [1, 30, 200])
async def test_after_kills_files_and_rows_agree_and_what_was_acknowledged_is_there(
    folder: Path, acknowledged: int
) -> None:
    processes = [run_python(WRITE_AND_DELETE, str(folder), name) for name in ("x", "y")]
    lines: list[str] = []
    for process in processes:
        assert process.stdout is not None
        lines += [await asyncio.to_thread(process.stdout.readline) for _ in range(acknowledged)]
    for process in processes:
        process.kill()
        assert process.stdout is not None
        lines += await asyncio.to_thread(process.stdout.readlines)
        process.communicate()
    files = await reopened(folder)
    acknowledged_keys = dict(line.split() for line in lines if line.endswith("\n"))
    for key, last in acknowledged_keys.items():
        if key.startswith("next/"):
            assert hashlib.sha256(files[key]).hexdigest() == last
        elif key not in files:
            assert int(last) % 5 in (3, 4)
        else:
            assert int(files[key][:8]) in (int(last), int(last) + 1)
    assert {"f/x/0", "f/y/0"} <= acknowledged_keys.keys() or acknowledged < 30
    store = await LocalStore.open_folder(folder)
    changes = await store.change_log.read("", 100_000)
    assert changes is not None
    assert sorted(change.text.decode() for _, change in changes) == sorted(
        hashlib.sha256(content).hexdigest() for key, content in files.items() if key.startswith("next/")
    )
    await store.close()


STOP_BEFORE_THE_MOVE = """
import asyncio, signal, sys, threading
from pysync.store.local import LocalStore
from contracts.files import chunks_of
from pysync.testing import FakeClock

stops = 1

def hook(event, args):
    global stops
    if event == "os.rename" and stops:
        stops -= 1
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

async def main(folder):
    store = await LocalStore.open_folder(folder)
    sys.addaudithook(hook)
    await store.write("e/1.parquet", chunks_of(b"slow"), "text/plain")
    await store.close()

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.process
@pytest.mark.parametrize("verb", ["open", "stat", "write", "put", "delete", "reopen"])
async def test_slow_rename_does_no_harm(store: LocalStore, folder: Path, verb: str) -> None:
    await store.write("e/1.parquet", chunks_of(b"before"), "text/plain")
    process = run_python(STOP_BEFORE_THE_MOVE, str(folder))
    await asyncio.to_thread(os.waitpid, process.pid, os.WUNTRACED)
    assert on_disk(folder) == {"e/1.parquet": b"before"}
    expected = {"e/1.parquet": b"slow"}
    if verb == "open":
        assert (await read_file(store, "e/1.parquet"))[1] == b"slow"
    elif verb == "stat":
        stat = await store.stat("e/1.parquet")
        assert stat is not None
        assert stat.size == 4
    elif verb == "write":
        await store.write("e/1.parquet", chunks_of(b"after"), "text/plain")
        expected = {"e/1.parquet": b"after"}
    elif verb == "put":
        await store.put("e/1.parquet", b"document")
        expected = {}
    elif verb == "delete":
        await store.delete("e/1.parquet")
        expected = {}
    else:
        await (await LocalStore.open_folder(folder)).close()
    assert on_disk(folder) == expected
    process.send_signal(signal.SIGCONT)
    await asyncio.to_thread(process.communicate)
    assert process.returncode == 0
    assert await stored(store) == on_disk(folder) == expected
    assert await reopened(folder) == expected


ADD = """
import asyncio, sys
from pysync.changelog import Change
from pysync.store.local import LocalStore
from contracts.files import chunks_of
from pysync.testing import FakeClock

async def add(store, lane):
    for n in range(30):
        await store.write_ordered(
            lambda tick: f"e/{tick.ms:013}-{tick.counter:06}-{lane}", chunks_of(b"1"), "text/plain",
            lambda tick, sha256: [Change(sha256.encode())],
        )

async def main(folder, name):
    store = await LocalStore.open_folder(folder)
    await asyncio.gather(*(add(store, f"{name}{lane}") for lane in range(4)))
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.process
async def test_listing_after_the_last_name_misses_no_file_of_any_process(
    store: LocalStore, folder: Path
) -> None:
    processes = [run_python(ADD, str(folder), name) for name in ("x", "y")]
    ended = asyncio.gather(*(asyncio.to_thread(process.communicate) for process in processes))
    seen: list[str] = []
    while True:
        is_over = ended.done()
        names = await store.list("e", seen[-1] if seen else None, 100)
        for name in names:
            assert (await read_file(store, f"e/{name}"))[1] == b"1"
        seen += names
        if is_over and not names:
            break
        await asyncio.sleep(0)
    assert [process.returncode for process in processes] == [0, 0]
    assert seen == await store.list("e", None, 1_000)
    assert len(seen) == 240
    changes = await store.change_log.read("", 1_000)
    assert changes is not None
    assert len(changes) == 240


async def test_ticks_go_on_when_the_clock_steps_back(folder: Path) -> None:
    clock = FakeClock(1_000_000)
    store = await LocalStore.open_folder(folder, clock)
    ticks = []
    for clock.now_ms in (1_000_000, 1_000_000, 5, 1_000_001, 1_000_000):
        ticks.append(
            await store.write_ordered(
                lambda tick: f"e/{tick.ms}-{tick.counter}", chunks_of(b"1"), "text/plain", changed
            )
        )
    await store.close()
    assert [tuple(tick) for tick, _ in ticks] == [
        (1_000_000, 0),
        (1_000_000, 1),
        (1_000_000, 2),
        (1_000_001, 0),
        (1_000_001, 1),
    ]


def located(key: str, tick: HybridTimestamp) -> str:
    return key


async def test_file_without_a_location_takes_no_tick_and_leaves_nothing(
    store: LocalStore, folder: Path
) -> None:
    await store.write("taken", chunks_of(b"1"), "text/plain")
    for key, error_type in (("taken/a", KeyConflict), ("~incoming/a", ValueError), ("a//b", ValueError)):
        with pytest.raises(error_type):
            await store.write_ordered(partial(located, key), chunks_of(b"2"), "text/plain", changed)
    assert await stored(store) == on_disk(folder) == {"taken": b"1"}
    assert list((folder / "files" / "~incoming").iterdir()) == []
    changes = await store.change_log.read("", 10)
    assert changes == []


async def test_rows_that_are_kept_are_bounded(tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path)
    keys = [f"none/{number}" for number in range(CACHED_ENTRIES + 2)]
    before = sys.getrefcount(keys[0])
    for number in range(len(keys)):
        assert await store.stat(keys[number]) is None
    held = sum(sys.getrefcount(keys[number]) > before for number in range(len(keys)))
    assert 0 < held <= CACHED_ENTRIES
    await store.close()
