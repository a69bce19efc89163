"""The coordinator in Redis, for processes on several machines."""

from pysync.coordinator.redis.coordinator import RedisCoordinator

__all__ = ["RedisCoordinator"]
