"""The data folder: closed to other users, and no way out of it through symbolic links."""

import logging
import os
import shutil
import sqlite3
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.cli_runner import Shell

from pysync.coordinator.local import LocalCoordinator
from pysync.errors import CoordinatorUnavailable, StoreUnavailable
from pysync.store import OpenFile
from pysync.store.local.store import LocalStore


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(folder)
    yield store
    await store.close()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the data folder, with a file in it that is nobody's business."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "b").write_bytes(b"secret")
    return outside


async def chunks(*several: bytes) -> AsyncIterator[bytes]:
    for chunk in several:
        yield chunk


async def content(store: LocalStore, key: str) -> bytes | None:
    file: OpenFile | None = await store.open(key)
    return None if file is None else b"".join([chunk async for chunk in file.chunks])


def open_to_others(folder: Path) -> list[str]:
    """Return the entries of a folder, and the folder itself, whose mode is neither 0700 nor 0600."""
    return [
        f"{path} {stat.filemode(path.stat().st_mode)}"
        for path in (folder, *folder.rglob("*"))
        if path.stat().st_mode & 0o777 != (0o700 if path.is_dir() else 0o600)
    ]


@pytest.mark.slow
async def test_all_that_is_made_is_closed_to_others_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "deep/er/data"
    store = await LocalStore.open_folder(folder)
    await store.put("notes/a", b"{}")
    await store.write("top", chunks(b"x"), "text/plain")
    first = await store.write("events/a/1", chunks(b"1"), "text/plain")
    await store.merge("events/a/2", chunks(b"2"), "text/plain", {"events/a/1": first})
    coordinator = await LocalCoordinator.open_folder(folder)
    await coordinator.consume_nonce("aa", "n", 0)
    await coordinator.put_if_absent("k", b"", 1000)
    assert await coordinator.acquire_lease("work")
    assert open_to_others(tmp_path / "deep") == []
    await coordinator.close()
    await store.close()
    assert open_to_others(tmp_path / "deep") == []


async def test_files_in_a_folder_that_is_open_to_others_are_not(folder: Path, umask: int) -> None:
    folder.mkdir(mode=0o755)
    store = await LocalStore.open_folder(folder)
    await store.write("top", chunks(b"x"), "text/plain")
    assert [path for path in open_to_others(folder) if not path.startswith(f"{folder} ")] == []
    await store.close()


async def test_a_copy_of_a_store_is_closed_to_others(
    store: LocalStore, folder: Path, tmp_path: Path, shell: Shell, umask: int
) -> None:
    await store.put("notes/a", b"{}")
    await store.write("files/a", chunks(b"x"), "text/plain")
    status, _, errors = await shell.run_async("copy", f"file:{folder}", f"file:{tmp_path}/copies/one")
    assert status in (0, 1), errors
    assert open_to_others(tmp_path / "copies") == []


async def test_link_in_place_of_a_file_is_neither_read_nor_adopted(
    store: LocalStore, folder: Path, outside: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sha256 = await store.write("a/b", chunks(b"mine"), "text/plain")
    (folder / "files/a/b").unlink()
    (folder / "files/a/b").symlink_to(outside / "b")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.open("a/b")
        with pytest.raises(StoreUnavailable):
            await store.stat("a/b")
    assert any(
        record.levelno == logging.CRITICAL and "symbolic link" in record.getMessage()
        for record in caplog.records
    )
    with closing(sqlite3.connect(folder / "pysync.db")) as database:
        (row,) = database.execute("SELECT sha256 FROM object WHERE name = 'b'").fetchall()
    assert row == (sha256,)


async def test_link_in_place_of_a_folder_is_neither_read_nor_adopted(
    store: LocalStore, folder: Path, outside: Path
) -> None:
    await store.write("x/a/b", chunks(b"mine"), "text/plain")
    (folder / "files/x/a/b").unlink()
    (folder / "files/x/a").rmdir()
    (folder / "files/x/a").symlink_to(outside)
    with pytest.raises(StoreUnavailable):
        await store.open("x/a/b")
    with pytest.raises(StoreUnavailable):
        await store.stat("x/a/b")


async def test_nothing_is_written_or_removed_through_a_link(
    store: LocalStore, folder: Path, outside: Path
) -> None:
    await store.write("x/a/b", chunks(b"mine"), "text/plain")
    (folder / "files/x/a/b").unlink()
    (folder / "files/x/a").rmdir()
    (folder / "files/x/a").symlink_to(outside)
    for key in ("x/a/b", "x/a/new", "x/a/deep/new"):
        with pytest.raises(StoreUnavailable):
            await store.write(key, chunks(b"new"), "text/plain")
    await store.delete("x/a/b")
    assert [(path.name, path.read_bytes()) for path in outside.iterdir()] == [("b", b"secret")]


@pytest.mark.slow
async def test_written_file_replaces_a_link(store: LocalStore, folder: Path, outside: Path) -> None:
    await store.write("a/b", chunks(b"mine"), "text/plain")
    for target in (outside / "b", outside, outside / "nowhere"):
        (folder / "files/a/b").unlink()
        (folder / "files/a/b").symlink_to(target)
        await store.write("a/b", chunks(b"new"), "text/plain")
        assert await content(store, "a/b") == b"new"
        assert not (folder / "files/a/b").is_symlink()
    assert (outside / "b").read_bytes() == b"secret"


async def test_removed_link_leaves_its_target(store: LocalStore, folder: Path, outside: Path) -> None:
    await store.write("a/b", chunks(b"mine"), "text/plain")
    (folder / "files/a/b").unlink()
    (folder / "files/a/b").symlink_to(outside / "b")
    await store.delete("a/b")
    assert (outside / "b").read_bytes() == b"secret"
    assert not (folder / "files/a/b").is_symlink()


async def test_files_are_not_merged_through_a_link(store: LocalStore, folder: Path, outside: Path) -> None:
    sha256 = await store.write("e/a/1", chunks(b"1"), "text/plain")
    (folder / "files/e/a").rename(outside / "a")
    (folder / "files/e/a").symlink_to(outside / "a")
    with pytest.raises(StoreUnavailable):
        await store.merge("e/a/2", chunks(b"2"), "text/plain", {"e/a/1": sha256})
    assert [path.name for path in (outside / "a").iterdir()] == ["1"]


async def test_a_file_that_somebody_put_back_is_served(store: LocalStore, folder: Path) -> None:
    await store.write("a/b", chunks(b"bytes"), "text/plain")
    (folder / "files/a/b").unlink()
    (folder / "files/a/b").write_bytes(b"bytes")
    assert await content(store, "a/b") == b"bytes"


async def test_link_in_place_of_the_stores_lock_is_not_followed(folder: Path, outside: Path) -> None:
    folder.mkdir()
    (folder / "pysync.lock").symlink_to(outside / "b")
    with pytest.raises(StoreUnavailable, match="symbolic links"):
        await LocalStore.open_folder(folder)
    assert (outside / "b").read_bytes() == b"secret"


@pytest.mark.parametrize("name", ["coordinator.lock", "nonces/lock", "nonces/0"])
async def test_coordinator_follows_no_symbolic_link(folder: Path, outside: Path, name: str) -> None:
    (folder / "nonces").mkdir(parents=True)
    (folder / name).symlink_to(outside / "b")
    with pytest.raises(CoordinatorUnavailable, match="symbolic links"):
        await LocalCoordinator.open_folder(folder, lambda: 0)
    assert (outside / "b").read_bytes() == b"secret"


async def test_link_in_place_of_the_leader_lock_is_not_followed(folder: Path, outside: Path) -> None:
    coordinator = await LocalCoordinator.open_folder(folder)
    (folder / "leads/scrub").symlink_to(outside / "b")
    before = (outside / "b").stat().st_mtime_ns
    with pytest.raises(CoordinatorUnavailable):
        await coordinator.acquire_lease("scrub")
    assert (outside / "b").stat().st_mtime_ns == before
    await coordinator.close()


@pytest.mark.parametrize("name", ["files/~incoming", "merging"])
async def test_link_in_place_of_a_folder_of_the_stores_own_is_not_followed(
    folder: Path, outside: Path, name: str
) -> None:
    store = await LocalStore.open_folder(folder)
    await store.write("e/1", chunks(b"1"), "text/plain")
    await store.close()
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).symlink_to(outside)
    os.utime(outside / "b", (0, 0))  # as what was abandoned long ago
    with pytest.raises(StoreUnavailable, match=r"symbolic links|store_unavailable"):
        await LocalStore.open_folder(folder)
    assert [path.name for path in outside.iterdir()] == ["b"]


@pytest.mark.parametrize("kind", [LocalStore, LocalCoordinator])
async def test_a_folder_that_cannot_be_opened_leaves_no_file_open(
    folder: Path, kind: type[LocalStore] | type[LocalCoordinator]
) -> None:
    folder.mkdir(mode=0o700)
    for name in ("files", "nonces"):
        (folder / name).touch()
    with pytest.raises((OSError, ValueError, StoreUnavailable, CoordinatorUnavailable)) as error:
        await kind.open_folder(folder)
    assert error.value is not None
    opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert [path for path in opened if path.startswith(str(folder))] == []
