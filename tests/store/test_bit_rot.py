"""Files whose bytes changed behind the store's back: found, refused from then on, and healed by a write."""

import logging
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from support.bit_rot import damages, rot
from support.clients import Browser, Start
from support.collections import collection
from support.store_samples import contents, copy, document

from pysync.store import DamagedFile
from pysync.store.local.files import LOST_REASON
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import chunks_of, read_file

CONTENT = bytes(range(97, 123)) * 3
KEY = "photos/a"
NAMES_BOTH = r"'photos/a' was replaced on disk: its sha256 was [0-9a-f]{64} and is [0-9a-f]{64} now"


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
        ((key, kind, why),) = await damages(store)
        assert (key, kind) == (KEY, "file")
        assert "its sha256 is" in why
        await store.write(KEY, chunks_of(CONTENT), "image/png")
        assert await damages(store) == []


@pytest.mark.slow
@pytest.mark.parametrize("column", ["sha256", "size", "mtime_ns", "inode", "etag", "name"])
async def test_a_changed_row_of_a_file_is_found_or_without_effect(
    tmp_path: Path, column: str, store: LocalStore
) -> None:
    connection = store._writer._connection
    before = connection.execute(f"SELECT CAST({column} AS TEXT) FROM object").fetchone()[0]
    for at in range(len(before)):
        changed = before[:at] + ("1" if before[at] != "1" else "2") + before[at + 1 :]
        connection.execute(f"UPDATE object SET {column} = ?", (changed,))
        if column in ("sha256", "name"):
            ((_, kind, _),) = await damages(store)
            assert kind == "file"
            connection.execute(f"UPDATE object SET {column} = ?, inode = abs(inode)", (before,))
        else:
            assert await damages(store) == []
            file, content = await read_file(store, KEY)
            assert content == CONTENT
            assert file.size == len(CONTENT)


async def test_what_was_found_damaged_is_served_no_more(store: LocalStore, path: Path) -> None:
    rot(path)
    with pytest.raises(DamagedFile) as caught:
        await store.verify(KEY)
    assert "its sha256 is" in caught.value.detail
    for _ in range(2):
        for look in (store.open, store.stat, store.verify):
            with pytest.raises(DamagedFile):
                await look(KEY)
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


async def test_a_file_that_was_replaced_is_adopted_with_a_warning_that_names_both_hashes(
    store: LocalStore, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(b"other")
    os.utime(path, (1, 1))
    with caplog.at_level(logging.WARNING):
        assert (await read_file(store, KEY))[1] == b"other"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(NAMES_BOTH, record.getMessage())
    assert await damages(store) == []


BOTH = collection("photos", allowedMimeTypes=["application/json", "image/png"])


@pytest.fixture
async def browser(start: Start, session: aiohttp.ClientSession, store: LocalStore) -> Browser:
    return Browser(await start({"collections": [BOTH]}, store), session)


async def test_a_damaged_file_that_is_asked_for_is_named_and_counted(
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


async def test_a_push_of_the_file_heals_it(browser: Browser, store: LocalStore, path: Path) -> None:
    rot(path)
    assert len(await damages(store)) == 1
    assert (await browser.pull(KEY)).error == (500, "document_corrupt")
    assert (await browser.pull(KEY, {"Range": "bytes=3-5"})).status == 500
    assert (await browser.request("HEAD", f"/pull/{KEY}")).status == 500
    pushed = await browser.request("POST", f"/push/{KEY}", CONTENT, {"Content-Type": "image/png"})
    assert pushed.status == 200
    assert (await browser.pull(KEY)).body == CONTENT
    assert await damages(store) == []


async def test_a_document_takes_the_place_of_a_damaged_file_over_an_empty_base(
    browser: Browser, store: LocalStore, path: Path
) -> None:
    rot(path)
    assert len(await damages(store)) == 1
    for base in (None, "0" * 64):
        refused = await browser.request("POST", f"/push/{KEY}", {"data": {}, "baseHash": base})
        assert (refused.status, refused.json["currentHash"]) == (409, "")
    assert (await browser.request("POST", f"/push/{KEY}", {"data": {}, "baseHash": ""})).status == 200
    assert (await browser.pull(KEY)).json["data"] == {}
    assert await damages(store) == []


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_copy_over_a_damaged_file_heals_it(store: LocalStore, path: Path, is_known: bool) -> None:
    backup = MemoryStore()
    await copy(store, backup)
    rot(path)
    if is_known:
        assert len(await damages(store)) == 1
    outcomes, told = await copy(backup, store)
    assert (outcomes.healed, outcomes.is_complete) == (1, True)
    assert told == [(KEY, "healed: it replaced a damaged object")]
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


async def test_a_copy_over_a_lost_file_heals_it(store: LocalStore, path: Path) -> None:
    backup = MemoryStore()
    await copy(store, backup)
    path.unlink()
    assert (await copy(backup, store))[0].healed == 1
    assert (await read_file(store, KEY))[1] == CONTENT


async def test_a_copy_over_a_damaged_document_heals_it(store: LocalStore) -> None:
    backup = MemoryStore()
    await backup.put("notes/a", document(b'{"amount":101}'))
    await store.put("notes/a", document(b'{"amount":101}').replace(b":101", b":901"))
    (damage,) = await damages(store)
    assert (damage.key, damage.kind) == ("notes/a", "document")
    assert (await copy(backup, store))[0].healed == 1
    assert await damages(store) == []
    assert (await contents(store))["notes/a"] == (await contents(backup))["notes/a"]
