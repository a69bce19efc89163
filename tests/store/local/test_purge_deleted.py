"""What was deleted is in no file of the embedded store once its traces are removed."""

import asyncio
import os
import random
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from contracts.files import chunks_of, read_file
from support.folder_search import files_with
from support.python_process import run_python

from pysync.changelog import Change
from pysync.clock import wall_clock_ms
from pysync.errors import StoreUnavailable
from pysync.sqlite import database_file
from pysync.store import Write
from pysync.store.local.capture import FolderCapture
from pysync.store.local.store import LocalStore

SECRET = "5ecret"
GONE = SECRET.encode()


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(folder)
    yield store
    await store.close()


async def fill(store: LocalStore, rng: random.Random) -> None:
    """Write documents of two people between each other, again and again, and files."""
    for n in range(150):
        size = rng.choice([3, 30, 300, 3000])
        name = rng.randrange(40)
        await store.commit(
            Write(f"u/{SECRET}/{name}", GONE * size, changes=[Change(b'{"u":"5ecret"}', "5ecret")])
        )
        await store.commit(Write(f"u/other/{name}", b"public" * size, changes=[Change(b"{}")]))
        if not n % 30:
            await store.write(f"u/{SECRET}/file{n}", chunks_of(GONE * size), "text/plain")


async def delete_all(store: LocalStore) -> None:
    for key in [listed.key async for listed in store.walk(f"u/{SECRET}")]:
        await store.delete(key)
    changes = await store.change_log.read("", 10_000) or []
    await store.change_log.erase({id_: Change(b"{}") for id_, _ in changes})


async def test_no_byte_of_deleted_data_is_left_in_the_folder(store: LocalStore, folder: Path) -> None:
    await fill(store, random.Random(1))
    assert files_with(folder, SECRET)
    await delete_all(store)
    await store.purge_deleted()
    assert files_with(folder, SECRET) == set()
    assert (folder / "pysync.db-wal").stat().st_size == 0
    with closing(sqlite3.connect(folder / "pysync.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert len(await store.list("u/other", None, 100)) > 30


async def test_it_is_left_in_none_while_other_processes_write(store: LocalStore, folder: Path) -> None:
    await fill(store, random.Random(2))
    other = await LocalStore.open_folder(folder)
    done = asyncio.Event()
    written = list[str]()

    async def write() -> None:
        while not done.is_set():
            key = f"u/other/{len(written)}-new"
            await other.put(key, b"public" * 100)
            await other.write(f"{key}-file", chunks_of(b"public"), "text/plain")
            written.append(key)

    writing = asyncio.ensure_future(write())
    await delete_all(store)
    await store.purge_deleted()
    assert files_with(folder, SECRET) == set()
    done.set()
    await writing
    assert written
    for key in written:
        assert await store.get(key) is not None
        assert (await read_file(store, f"{key}-file"))[1] == b"public"
    await other.close()


KILLED_UPLOAD = """
import asyncio, os, signal, sys
from pysync.store.local.capture import FolderCapture
from pysync.store.local.store import LocalStore

async def upload():
    yield b"5ecret" * 500_000
    yield b"5ecret" * 500_000
    print("stored", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

async def main():
    store = await LocalStore.open_folder(sys.argv[1])
    await store.write("u/a", upload(), "text/plain")

asyncio.run(main())
"""


async def test_the_upload_of_a_killed_process_goes_and_one_under_way_stays(
    store: LocalStore, folder: Path
) -> None:
    killed = run_python(KILLED_UPLOAD, str(folder))
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert files_with(folder, SECRET)
    arrived, release = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"public" * 500_000
        arrived.set()
        await release.wait()
        yield b"end"

    writing = asyncio.ensure_future(store.write("u/b", slow(), "text/plain"))
    await arrived.wait()
    await store.purge_deleted()
    assert files_with(folder, SECRET) == set()
    release.set()
    await writing
    assert (await read_file(store, "u/b"))[1] == b"public" * 500_000 + b"end"
    assert os.listdir(folder / "files/~incoming") == []


async def test_an_upload_that_a_row_names_is_kept(store: LocalStore, folder: Path) -> None:
    """Its process was killed between the commit and the rename."""
    other = await LocalStore.open_folder(folder)
    await other.write("u/a", chunks_of(b"public"), "text/plain")
    with closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as database:
        (name,) = database.execute("SELECT name FROM arriving").fetchone()
    os.rename(folder / "files/u/a", folder / "files/~incoming" / name)
    await store.purge_deleted()
    assert (await read_file(store, "u/a"))[1] == b"public"
    await other.close()


async def test_a_reader_of_an_old_state_is_waited_for_and_then_named(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(store, random.Random(3))
    monkeypatch.setattr(database_file, "PURGE_WAIT_S", 0.1)
    with closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM object").fetchall()
        await delete_all(store)
        with pytest.raises(StoreUnavailable, match=r"pysync.db anew: other processes .* read an old"):
            await store.purge_deleted()
    await store.purge_deleted()
    assert files_with(folder, SECRET) == set()


async def test_a_backup_that_follows_learns_nothing_and_lists_all_rows(
    store: LocalStore, folder: Path
) -> None:
    follower = FolderCapture(folder, wall_clock_ms)
    follower.follow()
    await fill(store, random.Random(4))
    await delete_all(store)
    await store.purge_deleted()
    assert files_with(folder, SECRET) == set()
    assert not follower.begin()
    follower.end(done=False)
    follower.follow()
    await store.put("u/other/a", b"public")
    assert follower.begin()
    assert [row.key for row in follower.next_batch()] == ["u/other/a"]
    follower.end(done=True)
    follower.close()
