"""Opens the store that the configuration names. Only this module imports the back ends."""

from collections.abc import Callable

from pysync.changelog import Retention
from pysync.clock import wall_clock_ms
from pysync.config import StoreConfig
from pysync.extras import require
from pysync.store.base import Store


async def open_store(
    config: StoreConfig,
    now_ms: Callable[[], int] = wall_clock_ms,
    *,
    shared: bool = False,
    retention: Retention = Retention(),  # noqa: B008 (frozen)
) -> Store:
    """Open the store that `config` names. With `shared`, other processes serve it too, and a store that could
    enforce preconditions only within this process is rejected. Raises ValueError for a store that does not
    exist or cannot be shared, StoreUnavailable for one that cannot be used."""
    kind, _, rest = config.url.partition(":")
    if kind == "memory" and not rest:
        from pysync.store.memory import MemoryStore

        return MemoryStore(now_ms)
    if kind == "file" and rest:
        from pysync.store.local import LocalStore

        return await LocalStore.open_folder(rest, now_ms, retention)
    if kind == "s3" and rest.startswith("//"):
        require("the store s3:", "aiobotocore", "botocore")
        from pysync.store.s3 import S3Store

        return await S3Store.connect(config, now_ms, shared=shared)
    raise ValueError(f"{kind}: is no store: use file:DIR, s3://bucket/prefix or memory:")
