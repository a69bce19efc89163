"""A cached document is read again as soon as any process has committed."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pysync.errors import StoreUnavailable
from pysync.store.local.store import LocalStore
from pysync.store.types import StoredObject

KEY = "notes/a"


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(folder)
    await store.put(KEY, b"old")
    yield store
    await store.close()


async def body(store: LocalStore) -> bytes:
    found = await store.get(KEY)
    assert isinstance(found, StoredObject)
    return found.body


@pytest.mark.process
async def test_a_commit_of_another_process_is_seen_at_once(store: LocalStore, folder: Path) -> None:
    program = "import sqlite3, sys; sqlite3.connect(sys.argv[1]).executescript(sys.argv[2])"
    for number in range(3):
        assert await body(store) == (b"%d" % (number - 1) if number else b"old")
        await asyncio.sleep(0)  # the transaction of this tick ends
        update = f"UPDATE object SET body = CAST('{number}' AS BLOB)"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(folder / "pysync.db"), update
        )
        assert await process.wait() == 0
        assert await body(store) == b"%d" % number


async def test_a_commit_of_another_store_in_this_process_is_seen_at_once(
    store: LocalStore, folder: Path
) -> None:
    other = await LocalStore.open_folder(folder)
    for number in range(3):
        await other.put(KEY, b"%d" % number)
        assert await body(store) == await body(other) == b"%d" % number
    await other.close()
    await store.put(KEY, b"after")
    assert await body(store) == b"after"


async def test_a_closed_store_does_not_serve_cached_documents(store: LocalStore) -> None:
    assert await body(store) == b"old"
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.get(KEY)
