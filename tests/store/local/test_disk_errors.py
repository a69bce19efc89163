"""Errors of the disk below a local store: they are `store_unavailable`, they pass, and nothing is damaged."""

import errno
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from random import Random

import pytest
from support.depth import depth
from support.faulty_disk import READS, WRITES, Disk, broken_descriptors, failing, mounted

from pysync.coordinator.local import LocalCoordinator
from pysync.errors import StoreUnavailable, Unavailable
from pysync.protocol import JSON_TYPE
from pysync.store import NotModified, OpenFile, StoredObject
from pysync.store.local import disk, files
from pysync.store.local.store import LocalStore

BODY = b"x" * 100_000
NUMBERS = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE]


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[LocalStore]:
    """A store with documents, of which SQLite has no page in memory."""
    before = await LocalStore.open_folder(folder)
    for n in range(5):
        await before.put(f"notes/{n}", BODY)
    await before.close()
    store = await LocalStore.open_folder(folder)
    yield store
    await store.close()


async def test_document_that_the_disk_cannot_read_is_unavailable_until_it_can(
    store: LocalStore, folder: Path
) -> None:
    with broken_descriptors(folder / "pysync.db"):
        for n in range(5):
            with pytest.raises(StoreUnavailable):
                await store.get(f"notes/{n}")
    found = await store.get("notes/0")
    assert isinstance(found, StoredObject)
    assert found.body == BODY


async def test_a_write_that_the_disk_does_not_take_is_unavailable_and_the_next_is_made(
    store: LocalStore, folder: Path
) -> None:
    await store.put("notes/acknowledged", BODY)
    with broken_descriptors(folder / "pysync.db-wal"):
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.put("notes/refused", BODY)
    await store.put("notes/next", BODY)
    assert await store.list("notes", None, 10) == ["0", "1", "2", "3", "4", "acknowledged", "next"]
    await store.close()
    reopened = await LocalStore.open_folder(folder)
    assert len(await reopened.list("notes", None, 10)) == 7
    await reopened.close()


async def test_a_disk_that_is_nearly_full_is_full_until_there_is_more_space(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0

    def allocate(fd: int, offset: int, size: int) -> None:
        if offset + size > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    for now_free, is_full in (
        (2_000_000, False),
        (1_000_000, True),
        (2_000_000, True),
        (5_000_000, False),
        (2_000_000, False),
    ):
        free = now_free
        with pytest.raises(StoreUnavailable) if is_full else nullcontext():
            await store.probe()


async def chunks() -> AsyncIterator[bytes]:
    yield BODY


async def read(file: OpenFile | None) -> bytes:
    assert file is not None
    try:
        return b"".join([chunk async for chunk in file.chunks])
    finally:
        await file.chunks.aclose()


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE], ids=errno.errorcode.get
)
@pytest.mark.parametrize("call", WRITES)
async def test_a_file_that_the_disk_does_not_take_leaves_the_one_before(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    await store.write("f/a", chunks(), JSON_TYPE)
    with failing(monkeypatch, folder, number, (call,), disk, files):
        for key in ("f/a", "f/b", "g/c"):
            with suppress(StoreUnavailable):  # also of a file that was acknowledged and has no place yet
                await store.write(key, chunks(), JSON_TYPE)
                assert await read(await store.open(key)) == BODY
    for key in ("f/a", "f/b", "g/c"):
        await store.write(key, chunks(), JSON_TYPE)
        assert await read(await store.open(key)) == BODY
        await store.verify(key)
    assert not [name for name in os.listdir(folder / "files/~incoming") if call != "unlink"]


@pytest.mark.parametrize("call", READS)
async def test_a_file_that_the_disk_cannot_read_is_unavailable_and_not_damaged(
    store: LocalStore, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    await store.write("f/a", chunks(), JSON_TYPE)
    with failing(monkeypatch, folder, errno.EIO, (call,), disk, files):
        for attempt in (store.stat, store.open, store.verify):
            with suppress(StoreUnavailable):
                found = await attempt("f/a")
                assert not isinstance(found, OpenFile) or await read(found) == BODY
    assert await read(await store.open("f/a")) == BODY
    assert await store.verify("f/a") is not None


@pytest.mark.parametrize("kind", [LocalStore, LocalCoordinator])
async def test_a_start_on_a_full_disk_says_that_it_is_full(
    tmp_path: Path, kind: type[LocalStore | LocalCoordinator]
) -> None:
    with mounted(tmp_path / "disk", 1, "tmpfs") as full:
        await (await kind.open_folder(full.path / "data")).close()
        full.fill()
        with pytest.raises(Unavailable, match="the disk is full"):
            await kind.open_folder(full.path / "data")
        full.free()
        await (await kind.open_folder(full.path / "data")).close()


@pytest.mark.parametrize("kind", [LocalStore, LocalCoordinator])
async def test_a_start_on_a_file_system_that_is_read_only_says_so_and_what_to_do(
    tmp_path: Path, kind: type[LocalStore | LocalCoordinator]
) -> None:
    with mounted(tmp_path / "disk", 1, "tmpfs") as disk_of_ours:
        disk_of_ours.remount("ro")
        with pytest.raises(Unavailable, match=r"is read-only .* mount it read-write, and start again"):
            await kind.open_folder(disk_of_ours.path / "data")
        disk_of_ours.remount("rw")
        await (await kind.open_folder(disk_of_ours.path / "data")).close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(tmp_path / "disk", 1, "tmpfs") as small:
        yield small


@pytest.mark.parametrize("seed", range(depth(2, 20)))
async def test_acknowledged_writes_on_an_intermittently_full_disk_survive_a_restart(
    tmp_path: Path, seed: int
) -> None:
    random = Random(seed)

    async def chunks_of(body: bytes) -> AsyncIterator[bytes]:
        yield body

    # Large enough for a write-ahead log of 4,000 pages, so that only the test fills it.
    with mounted(tmp_path / "disk", 48, "tmpfs") as disk_of_ours:
        folder = disk_of_ours.path / "data"
        store = await LocalStore.open_folder(folder)
        possible: dict[str, set[bytes | None]] = {}
        rejected, is_full = 0, False
        for _ in range(300):
            if random.random() < 0.05:
                (disk_of_ours.free if is_full else disk_of_ours.fill)()
                is_full = not is_full
            key = f"{random.choice('df')}/{random.randrange(20)}"
            body = random.randbytes(random.choice((10, 5_000, 100_000)))
            outcomes = possible.setdefault(key, {None})
            write = store.put(key, body) if key[0] == "d" else store.write(key, chunks_of(body), JSON_TYPE)
            try:
                await write
                outcomes.clear()
            except StoreUnavailable:
                rejected += 1
            outcomes.add(body)
        if is_full:
            disk_of_ours.free()
        for _ in range(2):
            for key, outcomes in possible.items():
                document, file = await store.get(key), await store.open(key)
                assert not isinstance(document, NotModified)
                found = await read(file) if file is not None else document.body if document else None
                assert found in outcomes, "the last that was acknowledged, or one that was tried since"
                if file is not None:
                    await store.verify(key)
            await store.close()
            store = await LocalStore.open_folder(folder)
        assert rejected
        await store.close()
