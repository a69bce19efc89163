"""The one place that knows which stores exist."""

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
    """The store that `config` names. `shared`: other processes serve it too, so conditions that only this
    process could keep will not do. Raises ValueError for a store that does not exist or cannot be shared,
    StoreUnavailable where it cannot be used."""
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
