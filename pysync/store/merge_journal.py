"""Merges in a store that cannot replace several files by one atomically, such as a bucket.

    _pysync/merges/<id>   the journal of a pending merge: its key and sha256, and those of the merged files

A merge writes its journal once it has received its file, then writes the file, removes the merged files, and
finally removes the journal. A merged file that exists beside the files that it replaces therefore has a
journal, and a reader of the journals counts nothing twice. Until the file exists, the journal reserves the
merged files, and no other merge may include them. After `ABANDONED_MS` without the file, its process is
considered dead.

A file of `merged` that is overwritten between the last check and its removal is lost: use this only for files
that are written once.
"""

import asyncio
import secrets
from collections.abc import AsyncIterable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import orjson

from pysync.concurrency import CONCURRENT, gather_bounded
from pysync.errors import StoreUnavailable
from pysync.store.protocol import Store
from pysync.store.types import (
    ABSENT,
    PAGE,
    EtagMismatch,
    Leftover,
    MergeRecord,
    MergeRejected,
    StoredObject,
    check_mergeable,
)

ABANDONED_MS: Final = 3_600_000
_JOURNALS: Final = "_pysync/merges"


async def merge(
    store: Store,
    key: str,
    chunks: AsyncIterable[bytes],
    content_type: str,
    merged: Mapping[str, str],
    now_ms: Callable[[], int],
) -> str:
    """Implement `Store.merge` by the other methods of `store`. `now_ms` is the store's clock."""
    check_mergeable(key, merged)
    await recover(store, now_ms)
    journal = f"{_JOURNALS}/{secrets.token_hex(16)}"

    async def begin(sha256: str) -> None:
        try:
            await store.put(
                journal, orjson.dumps({"key": key, "sha256": sha256, "merged": dict(merged)}), expect=ABSENT
            )
            await _check_no_overlap(store, journal, merged)
            await _check_unchanged(store, key, merged)
        except BaseException:
            with suppress(StoreUnavailable):
                await asyncio.shield(asyncio.ensure_future(store.delete(journal)))
            raise

    # After a failed write the file may still appear, so the journal stays.
    sha256 = await store.write(key, chunks, content_type, begin)
    await gather_bounded(CONCURRENT, merged, store.delete)
    await store.delete(journal)
    return sha256


async def recover(store: Store, now_ms: Callable[[], int]) -> None:
    """Implement `Store.recover_merges` by the other methods of `store`."""
    for journal, found in await _journals(store):
        merge = _parse(found)
        stat = await store.stat(merge.key)
        if stat is not None and stat.sha256 == merge.sha256:
            await gather_bounded(CONCURRENT, merge.merged, partial(_remove, store, merge))
        elif found.modified_ms + ABANDONED_MS > now_ms():
            continue
        await store.delete(journal)


async def remove_leftovers(
    store: Store, now_ms: Callable[[], int], before_ms: int, *, dry_run: bool
) -> list[Leftover]:
    """Implement `Store.remove_leftovers` for the journals of merges. A journal whose process may still run
    stays."""
    before = {key: len(found.body) for key, found in await _journals(store) if found.modified_ms < before_ms}
    if before and not dry_run:
        await recover(store, now_ms)
        for key, _ in await _journals(store):
            before.pop(key, None)
    return [Leftover("merges", key, size) for key, size in before.items()]


async def pending_merges(store: Store) -> list[MergeRecord]:
    """Implement `Store.pending_merges` by the other methods of `store`."""
    return [_parse(found) for _, found in await _journals(store)]


async def _journals(store: Store) -> list[tuple[str, StoredObject]]:
    """Return the keys and bodies of all journals."""
    keys = [f"{_JOURNALS}/{name}" for name in await store.list(_JOURNALS, None, PAGE)]
    found = await store.get_many(keys)
    return [(key, object_) for key in keys if (object_ := found[key]) is not None]


def _parse(journal: StoredObject) -> MergeRecord:
    found = orjson.loads(journal.body)
    return MergeRecord(found["key"], found["sha256"], found["merged"])


async def _check_no_overlap(store: Store, journal: str, merged: Mapping[str, str]) -> None:
    """Raise MergeRejected if another merge includes one of the files. Each of two concurrent merges writes
    its journal before this check, so at least one of them sees the other."""
    for other, found in await _journals(store):
        if other != journal and not _parse(found).merged.keys().isdisjoint(merged):
            raise MergeRejected(
                "another process merges some of these files, or did and ended in the midst of it"
            )


async def _check_unchanged(store: Store, key: str, merged: Mapping[str, str]) -> None:
    async def check(other: str) -> None:
        stat = await store.stat(other)
        if stat is None or stat.sha256 != merged[other]:
            raise EtagMismatch

    if await store.stat(key) is not None or await store.get(key) is not None:
        raise EtagMismatch
    await gather_bounded(CONCURRENT, merged, check)


async def _remove(store: Store, merge: MergeRecord, key: str) -> None:
    """Remove the file at `key` if it is still the one that was merged."""
    stat = await store.stat(key)
    if stat is not None and stat.sha256 == merge.merged[key]:
        await store.delete(key)
