"""What a small request to S3 costs this side of the wire: our store beside the plain client of aiobotocore.

    python -m benches.s3_cost [--quick]

Both ask one stub (`s3_stub.py`), which has a core of its own, 32 requests being under way at a time, and they
take turns. The cost is the CPU time of this process, all its threads, for each request. Prints Markdown.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import uvloop
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from benches import servers
from benches.compare import LOAD_CORE, SERVER_CORE, machine, spread
from benches.s3_stub import GIVEN
from benches.workloads import DOCUMENT_BYTES, note
from pysync.config import StoreConfig
from pysync.store import ANY, Etag, Precondition, Store, StoredObject, open_store

AT_ONCE: Final = 32
GOAL: Final = 1 / 3
BUCKET: Final = "bench"
KEYS: Final = {"aws_access_key_id": "testing", "aws_secret_access_key": "testingsecret"}

Request = Callable[[int], Awaitable[None]]
"""One request; its number is its own among all of a run."""


class Client(NamedTuple):
    """A way to S3: `get` reads a document that it never met, `put` writes over a version that it knows."""

    get: Request
    put: Request


class Turn(NamedTuple):
    """The cost of a verb by each of the two, one right after the other, in µs per request."""

    ours_us: float
    plain_us: float


def ours(store: Store) -> Client:
    etags: dict[int, str] = {}

    async def get(number: int) -> None:
        found = await store.get(f"{GIVEN}{number}")
        assert isinstance(found, StoredObject), "a document"
        assert len(found.body) == DOCUMENT_BYTES

    async def put(number: int) -> None:
        row = number % AT_ONCE
        expect: Precondition = Etag(etags[row]) if row in etags else ANY
        etags[row] = await store.put(f"ours/{row}", note(f"n{number}"), expect=expect)

    return Client(get, put)


def plain(client: Any) -> Client:
    etags: dict[int, str] = {}

    async def get(number: int) -> None:
        answer = await client.get_object(Bucket=BUCKET, Key=f"{GIVEN}{number}")
        assert len(await answer["Body"].read()) == DOCUMENT_BYTES

    async def put(number: int) -> None:
        row = number % AT_ONCE
        condition = {"IfMatch": etags[row]} if row in etags else {}
        document = {"Body": note(f"n{number}"), "ContentType": "application/json"}
        answer = await client.put_object(Bucket=BUCKET, Key=f"plain/{row}", **document, **condition)
        etags[row] = answer["ETag"]

    return Client(get, put)


@asynccontextmanager
async def clients(url: str) -> AsyncIterator[tuple[Client, Client]]:
    """Ours and the plain one, for the S3 server at `url`."""
    config = StoreConfig(
        url=f"s3://{BUCKET}",
        endpoint=url,
        region="us-east-1",
        force_path_style=True,
        access_key_id=KEYS["aws_access_key_id"],
        secret_access_key=KEYS["aws_secret_access_key"],
    )
    store = await open_store(config)
    settings = AioConfig(max_pool_connections=config.max_connections, s3={"addressing_style": "path"})
    session = get_session()
    try:
        async with session.create_client(
            "s3", endpoint_url=url, region_name="us-east-1", config=settings, **KEYS
        ) as client:
            yield ours(store), plain(client)
    finally:
        await store.close()


async def cost_us(request: Request, numbers: range) -> float:
    """CPU µs of this process for each of the requests, `MAX_CONCURRENT` of which are under way. Each of those
    that are has its own row of numbers, so two never write one object."""

    async def work(first: int) -> None:
        for number in numbers[first::AT_ONCE]:
            await request(number)

    before = time.process_time()
    await asyncio.gather(*map(work, range(AT_ONCE)))
    return (time.process_time() - before) / len(numbers) * 1e6


async def measure(url: str, rounds: int, count: int) -> dict[str, list[Turn]]:
    """`rounds` turns of each verb, `count` requests by each in a turn, after some that do not count."""
    fresh = itertools.count(0, max(count, AT_ONCE))

    def numbers(size: int) -> range:
        first = next(fresh)
        return range(first, first + size)

    async with clients(url) as (our, other):
        found: dict[str, list[Turn]] = {"get": [], "put": []}
        for verb in (our.get, other.get, our.put, other.put):
            await cost_us(verb, numbers(AT_ONCE))
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            for name, turns in found.items():
                costs = [await cost_us(getattr(client, name), numbers(count)) for client in (our, other)]
                turns.append(Turn(*costs))
    return found


def table(found: dict[str, list[Turn]]) -> str:
    lines = [
        "| 1 KB, 32 at a time, CPU µs per request | this store | aiobotocore | share | goal |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, turns in found.items():
        our = spread([turn.ours_us for turn in turns], ".0f")
        other = spread([turn.plain_us for turn in turns], ".0f")
        shares = [turn.ours_us / turn.plain_us for turn in turns]
        share = f"{statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
        lines.append(f"| {name} | {our} | {other} | {share} | at most {GOAL:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benches.s3_cost", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="one short round: to see that it works")
    rounds, count = (1, AT_ONCE) if parser.parse_args().quick else (5, 60 * AT_ONCE)
    with servers.s3_stub(SERVER_CORE) as stub:
        os.sched_setaffinity(0, {LOAD_CORE})
        found = uvloop.run(measure(stub.url, rounds, count))
    print(f"{machine()}; {rounds} rounds of {count} requests.\n\n{table(found)}")


if __name__ == "__main__":
    main()
