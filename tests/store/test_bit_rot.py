"""Files whose bytes changed behind the store's back: found, refused from then on, and healed by a write."""

import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from itertools import product
from pathlib import Path

import aiohttp
import pytest
from contracts.files import chunks_of, read_file
from support.bit_rot import damages, rot
from support.clients import Browser, Start
from support.collections import collection
from support.store_samples import contents, copy, document

from pysync.errors import StoreUnavailable
from pysync.store import DamagedFile
from pysync.store.local.files import LOST_REASON
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

CONTENT = bytes(range(97, 123)) * 3
KEY = "photos/a"
CHECKED_BYTES = 1_048_576
"""Length up to which a file is checked whenever it is read."""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(tmp_path / "data")
    await store.write(KEY, chunks_of(CONTENT), "image/png")
    yield store
    await store.close()


@pytest.fixture
def path(tmp_path: Path, store: LocalStore) -> Path:
    return tmp_path / "data/files" / KEY


async def test_every_flipped_byte_of_a_file_is_found(store: LocalStore, path: Path) -> None:
    for at in range(len(CONTENT)):
        rot(path, at, 1 << at % 8)
        ((key, kind, why, _),) = await damages(store)
        assert (key, kind) == (KEY, "file")
        assert "its sha256 is" in why
        await store.write(KEY, chunks_of(CONTENT), "image/png")
        assert await damages(store) == []


@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("b")])
async def test_node_that_is_no_file_is_damage_of_that_file_alone(
    store: LocalStore, path: Path, put: Callable[[Path], None]
) -> None:
    await store.write("photos/b", chunks_of(CONTENT), "image/png")
    rot(path.with_name("b"), 0)
    path.unlink()
    put(path)
    found = {damage.key: damage.why for damage in await damages(store)}
    assert found.keys() == {KEY, "photos/b"}
    assert "it cannot be read" in found[KEY]
    with pytest.raises(ValueError, match="it cannot be read"):
        await store.adopt(KEY)
    await store.write(KEY, chunks_of(CONTENT), "image/png")
    assert [damage.key for damage in await damages(store)] == ["photos/b"]


async def test_a_pipe_in_place_of_a_file_holds_nobody_up(store: LocalStore, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StoreUnavailable):
        await read_file(store, KEY)
    await store.write(KEY, chunks_of(CONTENT), "image/png")
    assert (await read_file(store, KEY))[1] == CONTENT


@pytest.mark.slow
@pytest.mark.parametrize("column", ["sha256", "size", "mtime_ns", "inode", "etag", "name"])
async def test_a_changed_row_of_a_file_is_found_or_without_effect(
    tmp_path: Path, column: str, store: LocalStore
) -> None:
    connection = sqlite3.connect(tmp_path / "data/pysync.db", isolation_level=None)
    before = connection.execute(f"SELECT CAST({column} AS TEXT) FROM object").fetchone()[0]
    for at in range(len(before)):
        changed = before[:at] + ("1" if before[at] != "1" else "2") + before[at + 1 :]
        connection.execute(f"UPDATE object SET {column} = ?", (changed,))
        if column in ("sha256", "name"):
            (damage,) = await damages(store)
            assert damage.kind == "file"
            connection.execute(f"UPDATE object SET {column} = ?, inode = abs(inode)", (before,))
        else:
            assert await damages(store) == []
            file, content = await read_file(store, KEY)
            assert content == CONTENT
            assert file.size == len(CONTENT)
    connection.close()


async def test_damaged_file_is_served_no_more(store: LocalStore, path: Path) -> None:
    rot(path)
    with pytest.raises(DamagedFile) as caught:
        await store.verify(KEY)
    assert "its sha256 is" in caught.value.detail
    for _ in range(2):
        for read in (store.open, store.stat, store.verify):
            with pytest.raises(DamagedFile):
                await read(KEY)
    again = await LocalStore.open_folder(path.parents[2])
    with pytest.raises(DamagedFile):
        await again.open(KEY)
    await again.close()
    await store.write(KEY, chunks_of(b"new"), "image/png")
    assert (await read_file(store, KEY))[1] == b"new"


async def test_a_file_that_is_right_again_is_served_again(store: LocalStore, path: Path) -> None:
    rot(path)
    assert len(await damages(store)) == 1
    rot(path)
    assert await damages(store) == []
    assert (await read_file(store, KEY))[1] == CONTENT


async def test_a_damaged_file_that_is_restored_from_a_backup_is_served_again(
    store: LocalStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rot(path)
    assert len(await damages(store)) == 1
    path.unlink()
    path.write_bytes(CONTENT)
    assert (await read_file(store, KEY))[1] == CONTENT
    assert "replaced" not in caplog.text


BOTH = collection("photos", allowedMimeTypes=["application/json", "image/png"], maxBodyBytes=9_000_000)


@pytest.fixture
async def browser(start: Start, session: aiohttp.ClientSession, store: LocalStore) -> Browser:
    return Browser(await start({"collections": [BOTH]}, store), session)


Harm = Callable[[Path], None]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"more")


def flip(path: Path) -> None:
    rot(path, 5)
    os.utime(path)


def swap(path: Path) -> None:
    """Give the file the place of another one that is as long and as old."""
    other = path.with_name("other")
    other.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    os.replace(other, path)


def replace_by_hand(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"another picture")


HARMS = [truncate, empty, lengthen, flip, swap, replace_by_hand, Path.unlink]
SIZES = pytest.mark.parametrize("size", [70_000, 3_000_000], ids=["small", "large"])


def harm_and_keep_time(path: Path, harm: Harm) -> None:
    """Harm a file, and give it the time that it had."""
    found = path.stat()
    harm(path)
    if path.exists():
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize(
    ("harm", "size", "keep_time"),
    [
        pytest.param(harm, size, keep_time, id=f"{harm.__name__}-{size}{'-same time' * keep_time}")
        for harm, size, keep_time in product(HARMS, (70_000, 3_000_000), (False, True))
        if not (harm is flip and size > CHECKED_BYTES and keep_time)  # only reading all of it can tell
    ],
)
async def test_a_file_that_is_not_what_was_written_is_never_served(
    browser: Browser, store: LocalStore, path: Path, harm: Harm, size: int, keep_time: bool
) -> None:
    body = os.urandom(size)
    sha256 = await store.write(KEY, chunks_of(body), "image/png")
    harm_and_keep_time(path, harm) if keep_time else harm(path)
    for _ in range(2):
        assert (await browser.pull(KEY)).error == (500, "document_corrupt")
        assert (await browser.pull(KEY, {"Range": "bytes=3-5"})).error == (500, "document_corrupt")
        assert (await browser.pull(KEY, {"If-None-Match": f'"{sha256}"'})).status == 500
        assert (await browser.request("HEAD", f"/pull/{KEY}")).status == 500
        ((key, kind, why, _),) = await damages(store)
        assert (key, kind) == (KEY, "file")
        assert sha256 in why or why == LOST_REASON
    headers, url = {"Content-Type": "image/png"}, f"{browser.base}/push/{KEY}"
    async with browser.session.post(url, data=BytesIO(body), headers=headers) as pushed:
        assert pushed.status == 200
    assert (await browser.pull(KEY)).body == body
    assert await damages(store) == []


@SIZES
async def test_head_and_304_do_not_confirm_a_file_that_was_changed_on_disk(
    browser: Browser, store: LocalStore, path: Path, size: int
) -> None:
    sha256 = await store.write(KEY, chunks_of(os.urandom(size)), "image/png")
    flip(path)
    assert (await browser.pull(KEY, {"If-None-Match": f'"{sha256}"'})).status == 500
    assert (await browser.request("HEAD", f"/pull/{KEY}")).status == 500


async def test_a_flipped_bit_of_a_small_file_is_found_by_its_first_pull(browser: Browser, path: Path) -> None:
    rot(path, 9)
    assert (await browser.pull(KEY, {"Range": "bytes=3-5"})).error == (500, "document_corrupt")
    assert (await browser.request("HEAD", f"/pull/{KEY}")).status == 500
    rot(path, 9)
    assert (await browser.pull(KEY)).body == CONTENT
    assert (await browser.request("HEAD", f"/pull/{KEY}")).status == 200


async def test_a_flipped_bit_of_a_large_file_is_found_by_the_scrub(
    browser: Browser, store: LocalStore, path: Path
) -> None:
    sha256 = await store.write(KEY, chunks_of(os.urandom(3_000_000)), "image/png")
    rot(path, 9)
    assert len(await damages(store)) == 1
    for headers in ({}, {"Range": "bytes=2000000-2000009"}, {"If-None-Match": f'"{sha256}"'}):
        assert (await browser.pull(KEY, headers)).status == 500
    assert (await browser.request("HEAD", f"/pull/{KEY}")).status == 500


@SIZES
async def test_a_file_that_is_put_back_is_served_as_the_same_version(
    store: LocalStore, path: Path, size: int
) -> None:
    body = os.urandom(size)
    await store.write(KEY, chunks_of(body), "image/png")
    before = await store.stat(KEY)
    path.unlink()
    with pytest.raises(DamagedFile):
        await store.open(KEY)
    path.write_bytes(body)
    assert (await read_file(store, KEY))[1] == body
    assert await store.stat(KEY) == before
    assert await damages(store) == []


async def test_requested_damaged_file_is_reported_and_counted(
    browser: Browser, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.unlink()
    for count, method in enumerate(("GET", "HEAD"), 1):
        assert (await browser.request(method, f"/pull/{KEY}")).status == 500
        metrics = (await browser.request("GET", "/metrics")).body.decode()
        counter = 'pysync_corrupt_objects_total{found_by="request",kind="file"}'
        assert f"{counter} {count}.0" in metrics
    named = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert named[0] == f"the file at '{KEY}' (photos) is corrupt: {LOST_REASON}"


async def test_push_of_the_file_repairs_it(browser: Browser, store: LocalStore, path: Path) -> None:
    rot(path)
    assert len(await damages(store)) == 1
    assert (await browser.pull(KEY)).error == (500, "document_corrupt")
    assert (await browser.pull(KEY, {"Range": "bytes=3-5"})).status == 500
    assert (await browser.request("HEAD", f"/pull/{KEY}")).status == 500
    pushed = await browser.request("POST", f"/push/{KEY}", CONTENT, {"Content-Type": "image/png"})
    assert pushed.status == 200
    assert (await browser.pull(KEY)).body == CONTENT
    assert await damages(store) == []


async def test_document_replaces_a_damaged_file_over_an_empty_base(
    browser: Browser, store: LocalStore, path: Path
) -> None:
    rot(path)
    assert len(await damages(store)) == 1
    for base in (None, "0" * 64):
        rejected = await browser.request("POST", f"/push/{KEY}", {"data": {}, "baseHash": base})
        assert (rejected.status, rejected.json["currentHash"]) == (409, "")
    assert (await browser.request("POST", f"/push/{KEY}", {"data": {}, "baseHash": ""})).status == 200
    assert (await browser.pull(KEY)).json["data"] == {}
    assert await damages(store) == []


@pytest.mark.parametrize("is_known", [False, True])
async def test_copy_over_a_damaged_file_repairs_it(store: LocalStore, path: Path, is_known: bool) -> None:
    backup = MemoryStore()
    await copy(store, backup)
    rot(path)
    if is_known:
        assert len(await damages(store)) == 1
    outcomes, reports = await copy(backup, store)
    assert (outcomes.healed, outcomes.is_complete) == (1, True)
    assert reports == [(KEY, "healed: it replaced a damaged object")]
    assert (await read_file(store, KEY))[1] == CONTENT
    assert (await copy(backup, store))[0].already_there == 1


async def test_a_quick_copy_trusts_the_hashes_that_are_recorded(store: LocalStore, path: Path) -> None:
    backup = MemoryStore()
    await copy(store, backup)
    rot(path)
    assert (await copy(backup, store, quick=True))[0].already_there == 1
    assert len(await damages(store)) == 1
    assert (await copy(backup, store, quick=True))[0].healed == 1
    assert (await read_file(store, KEY))[1] == CONTENT


async def test_copy_over_a_lost_file_repairs_it(store: LocalStore, path: Path) -> None:
    backup = MemoryStore()
    await copy(store, backup)
    path.unlink()
    assert (await copy(backup, store))[0].healed == 1
    assert (await read_file(store, KEY))[1] == CONTENT


async def test_copy_over_a_damaged_document_repairs_it(store: LocalStore) -> None:
    backup = MemoryStore()
    await backup.put("notes/a", document(b'{"amount":101}'))
    await store.put("notes/a", document(b'{"amount":101}').replace(b":101", b":901"))
    (damage,) = await damages(store)
    assert (damage.key, damage.kind) == ("notes/a", "document")
    assert (await copy(backup, store))[0].healed == 1
    assert await damages(store) == []
    assert (await contents(store))["notes/a"] == (await contents(backup))["notes/a"]
