"""A folder that version 0.1.0 left in the middle of a merge opens without a loss."""

import fcntl
import hashlib
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import orjson
import pytest
from contracts.files import read_file

from pysync.store.local.store import LocalStore
from pysync.store.local.tables import SCHEMA

STEPS = 4
"""Steps of the schema that version 0.1.0 had."""
MERGED = b"1\n2\n"
FILES = {"1": b"1\n", "2": b"2\n", "3": b"3\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of that version with three files, which begins to merge two of them to `e/2-`."""
    folder = tmp_path / "data"
    for path in ("files/~incoming", "files/e", "merging/4d"):
        (folder / path).mkdir(parents=True, mode=0o700)
    (folder / "merging/lock").touch()
    for name, body in FILES.items():
        (folder / "files/e" / name).write_bytes(body)
    with closing(sqlite3.connect(folder / "pysync.db")) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.executescript(f"{';'.join(SCHEMA.steps[:STEPS])}; PRAGMA user_version = {STEPS}")
        for name, body in FILES.items():
            stat = (folder / "files/e" / name).stat()
            values = ("e", name, "etag", "text/plain", 1, sha256(body))
            database.execute(
                """INSERT INTO object(
                    parent, name, etag, content_type, modified_ms, sha256, size, mtime_ns, inode)
                VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)""",
                (*values, stat.st_size, stat.st_mtime_ns, stat.st_ino),
            )
        columns = orjson.dumps(["merged", "text/plain", 2, sha256(MERGED)]).decode()
        replaced = orjson.dumps({name: sha256(FILES[name]) for name in "12"}).decode()
        database.execute("INSERT INTO merge VALUES('4d', 'e', '2-', ?, ?)", (columns, replaced))
        database.commit()
    return folder


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def build(folder: Path) -> None:
    """Build the new folder as far as the exchange."""
    (folder / "merging/4d/2-").write_bytes(MERGED)
    os.link(folder / "files/e/3", folder / "merging/4d/3")


def exchange(folder: Path) -> None:
    (folder / "files/e").rename(folder / "merging/old")
    (folder / "merging/4d").rename(folder / "files/e")
    (folder / "merging/old").rename(folder / "merging/4d")


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(folder)
    yield store
    await store.close()


async def content(folder: Path) -> dict[str, bytes]:
    """Return the files that the store lists, and check that they are those on disk."""
    for _ in range(2):
        async with opened(folder) as store:
            found = {
                name: (await read_file(store, f"e/{name}"))[1] for name in await store.list("e", None, 9)
            }
    on_disk = {path.name: path.read_bytes() for path in (folder / "files/e").iterdir()}
    assert found == on_disk
    assert not (folder / "merging").exists()
    return found


@pytest.mark.parametrize("is_built", [False, True])
async def test_a_merge_that_has_not_exchanged_its_folders_is_undone(folder: Path, is_built: bool) -> None:
    if is_built:
        build(folder)
    assert await content(folder) == FILES


@pytest.mark.parametrize("has_leftover", [True, False], ids=["whole", "without the old folder"])
async def test_a_merge_that_has_exchanged_its_folders_is_finished(folder: Path, has_leftover: bool) -> None:
    """A backup may lack the old folder."""
    build(folder)
    exchange(folder)
    if not has_leftover:
        (folder / "merging").rename(folder.parent / "merging")
    assert await content(folder) == {"2-": MERGED, "3": FILES["3"]}


async def test_a_merge_whose_rows_are_written_leaves_its_old_folder(folder: Path) -> None:
    async with opened(folder) as store:
        await store.delete("e/3")
    (folder / "merging/5e").mkdir(parents=True)
    (folder / "merging/5e/3").write_bytes(FILES["3"])
    assert await content(folder) == {name: FILES[name] for name in "12"}


async def test_a_merge_under_way_is_left_alone(folder: Path) -> None:
    build(folder)
    with (folder / "merging/lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with opened(folder) as store:
            assert await store.list("e", None, 9) == [*"123"]
        assert (folder / "merging/4d/2-").exists()
    assert await content(folder) == FILES


async def test_a_server_of_that_version_cannot_merge_any_more(folder: Path) -> None:
    """A command of this version may have upgraded the database beside it."""
    await content(folder)
    with (
        closing(sqlite3.connect(folder / "pysync.db")) as database,
        pytest.raises(sqlite3.IntegrityError, match="an earlier version"),
    ):
        database.execute("INSERT INTO merge VALUES('1', 'e', '4-', '[]', '{}')")
