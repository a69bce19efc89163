"""The mark of a store that was restored with `--accept-newer`: devices send back what the restore has lost.

See docs/how-to/back-up-and-restore.md#take-back-what-devices-have.
"""

import orjson

from pysync.store import RESTORED_KEY, Store, StoredObject


async def mark_restored(store: Store, at_ms: int, id_: str) -> None:
    """Mark a store as restored to what it was at this time. `id_` is the newest id of its change log."""
    await store.put(RESTORED_KEY, orjson.dumps({"atMs": at_ms, "id": id_}))


async def restored_ms(store: Store, cursor: str) -> int | None:
    """Return the time to which the store was restored, if the reader that has received everything up to
    `cursor`, an id of a change log, received it before the restore. Return None for any other reader, and for
    a store without the mark. Raises StoreUnavailable."""
    found = await store.get(RESTORED_KEY)
    if not isinstance(found, StoredObject):
        return None
    mark = orjson.loads(found.body)
    # Another kind of log had other ids: the store that is restored had another coordinator.
    is_before = cursor < mark["id"] or ("." in cursor) != ("." in mark["id"])
    return int(mark["atMs"]) if is_before else None
