"""Opens the store that the configuration names. Only this module imports the back ends."""

from collections.abc import Callable
from typing import Final

from pysync.changelog import Retention
from pysync.clock import wall_clock_ms
from pysync.config import StoreConfig
from pysync.extras import require
from pysync.model import Observe, unobserved
from pysync.store.protocol import Store

RESTORE_KEY: Final = "_pysync/restore"
"""The key of the note in a store that a restore from a backup is under way; gone when it has ended."""
RESTORED_KEY: Final = "_pysync/restored"
"""The key of the mark that devices send back what a restore has lost."""
ERASURE_KEY: Final = "_pysync/erase/unfinished"
"""The key of the note that an erasure is under way; gone when it has ended."""
ERASED_KEY: Final = "_pysync/erased"
"""The key of the hashes of all keys that were erased, by which backups find them."""
STORE_KEY: Final = "_pysync/store"
"""The key of the id of a store, which its first backup makes. A restored or copied store has another one."""


async def open_store(
    config: StoreConfig,
    now_ms: Callable[[], int] = wall_clock_ms,
    *,
    shared: bool = False,
    retention: Retention = Retention(),  # noqa: B008 (frozen)
    accepts_unfinished_restore: bool = False,
    observe: Observe = unobserved,
) -> Store:
    """Open the store that `config` names. With `shared`, other processes serve it too, and a store that could
    enforce preconditions only within this process is rejected. Raises ValueError for a store that does not
    exist, cannot be shared or has only a part of what a restore writes, unless
    `accepts_unfinished_restore`; StoreUnavailable for one that cannot be used."""
    store = await _open(config, now_ms, shared, retention, observe)
    if accepts_unfinished_restore:
        return store
    try:
        is_unfinished = await store.get(RESTORE_KEY) is not None
    except BaseException:
        await store.close()
        raise
    if is_unfinished:
        await store.close()
        raise ValueError(unfinished_restore(config.url))
    return store


def unfinished_restore(url: str) -> str:
    """Return what to do about a store that a restore has written only in part."""
    return (
        f"{url}: a restore into this store has not ended: run `pysync backup restore` into it again, or "
        "delete it and restore into an empty store"
    )


async def _open(
    config: StoreConfig, now_ms: Callable[[], int], shared: bool, retention: Retention, observe: Observe
) -> Store:
    """Open the store, whatever it holds."""
    kind, _, rest = config.url.partition(":")
    if kind == "memory" and not rest:
        from pysync.store.memory import MemoryStore

        return MemoryStore(now_ms)
    if kind == "file" and rest:
        from pysync.store.local import LocalStore

        return await LocalStore.open_folder(rest, now_ms, retention, observe=observe)
    if kind == "s3" and rest.startswith("//"):
        require("the store s3:", "aiobotocore", "botocore")
        from pysync.store.s3 import S3Store

        return await S3Store.connect(config, now_ms, shared=shared, observe=observe)
    raise ValueError(f"{kind}: is no store: use file:DIR, s3://bucket/prefix or memory:")
