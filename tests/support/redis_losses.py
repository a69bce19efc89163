"""Ways to lose data or connections of a Redis that a test has for itself."""

from components import RedisServer
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

WITH_AOF = ("--appendonly", "yes", "--appendfsync", "always")


def client(server: RedisServer) -> Redis:
    """A client beside the coordinator's, to look and to meddle. The caller closes it."""
    return Redis.from_url(server.url, retry=Retry(NoBackoff(), 0))


async def drop_connections(server: RedisServer) -> None:
    """Close every connection."""
    async with client(server) as own:
        await own.client_kill_filter(_type="normal", skipme=True)


async def flush(server: RedisServer) -> None:
    async with client(server) as own:
        await own.flushall()


async def end_and_forget(server: RedisServer) -> None:
    server.kill()
    server.start()


async def end_and_remember(server: RedisServer) -> None:
    """As far as it was started with `WITH_AOF` before."""
    server.kill()
    server.start(*WITH_AOF)


async def take_snapshot(server: RedisServer) -> None:
    async with client(server) as own:
        await own.save()
    (server.folder / "dump.rdb").rename(server.folder / "saved.rdb")


async def return_to_snapshot(server: RedisServer) -> None:
    """As a replica does that lags, and a Redis that saves its memory every minute."""
    server.kill()
    (server.folder / "saved.rdb").rename(server.folder / "dump.rdb")
    server.start()
