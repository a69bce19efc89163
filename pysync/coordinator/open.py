"""Opens the coordinator that a URL names."""

from collections.abc import Callable

from pysync.changelog import Retention
from pysync.clock import wall_clock_ms
from pysync.coordinator.protocol import Coordinator
from pysync.extras import require
from pysync.model import Observe, unobserved


async def open_coordinator(
    url: str,
    folder: str | None = None,
    now_ms: Callable[[], int] = wall_clock_ms,
    retention: Retention = Retention(),  # noqa: B008 (frozen)
    observe: Observe = unobserved,
) -> Coordinator:
    """Return the coordinator at `url`: `memory:`, `file:` (in `folder`, the file store's), `file:DIR`,
    `redis://...` or `rediss://...`. Raises ValueError for any other and for an unsupported Redis, and
    CoordinatorUnavailable if it cannot be used."""
    kind, _, rest = url.partition(":")
    if kind == "memory" and not rest:
        from pysync.coordinator.memory import MemoryCoordinator

        return MemoryCoordinator(now_ms, retention=retention)
    if kind == "file" and (rest or folder):
        from pysync.coordinator.local import LocalCoordinator

        return await LocalCoordinator.open_folder(
            rest or folder or "", now_ms, retention=retention, observe=observe
        )
    if kind in ("redis", "rediss"):
        require(f"the coordinator {kind}:", "redis", "hiredis")
        from pysync.coordinator.redis.coordinator import RedisCoordinator

        return await RedisCoordinator.connect(url, now_ms, retention, observe=observe)
    raise ValueError(f"{kind}: is no coordinator of this version: use memory:, file: or redis:")
