"""Stores in the buckets of real servers, for tests."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from aiobotocore.session import get_session
from components import S3Server

from pysync.store.s3 import RetryPolicy, S3Store
from pysync.store.s3.versions import BucketCapabilities
from support.s3_fault_proxy import FaultProxy


async def no_pause(seconds: float) -> None:
    await asyncio.sleep(0)


HASTY = RetryPolicy(sleep=no_pause)
"""As many tries as ever, and no pause between them."""


_PROBED: dict[str, BucketCapabilities] = {}
"""What the servers of this run can do, by endpoint."""


def new_prefix() -> str:
    return os.urandom(6).hex()


def another_program(server: S3Server) -> AbstractAsyncContextManager[Any]:
    """A client of the server that knows nothing of ours."""
    client: AbstractAsyncContextManager[Any] = get_session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=server.region,
        aws_access_key_id=server.access_key_id,
        aws_secret_access_key=server.secret_access_key,
    )
    return client


@asynccontextmanager
async def opened(
    server: S3Server,
    prefix: str,
    endpoint: str | None = None,
    *,
    shared: bool = False,
    retry_policy: RetryPolicy = HASTY,
    bucket: BucketCapabilities | None = None,
    **members: Any,
) -> AsyncIterator[S3Store]:
    """A store below `prefix` of the server's bucket; `members` are the configuration's. The bucket is probed
    once in a run, or where something other than the prefix is given."""
    config = replace(server.store(prefix, endpoint), **members)
    is_usual = config == server.store(prefix) and not shared
    if is_usual:
        bucket = bucket or _PROBED.get(server.endpoint)
    store = await S3Store.connect(config, shared=shared, retry_policy=retry_policy, bucket=bucket)
    if is_usual:
        _PROBED[server.endpoint] = store.bucket
    try:
        yield store
    finally:
        await store.close()


@dataclass
class Proxied:
    """Stores below `prefix`: `store` behind `proxy`, which may fail, `other` beside it."""

    proxy: FaultProxy
    store: S3Store
    other: S3Store
    prefix: str
    open: Callable[..., Awaitable[S3Store]]
    """Opens one more store behind the proxy."""


@asynccontextmanager
async def proxied(server: S3Server) -> AsyncIterator[Proxied]:
    prefix = new_prefix()
    async with FaultProxy(server.endpoint) as proxy, AsyncExitStack() as stores:

        async def open_one(**options: Any) -> S3Store:
            return await stores.enter_async_context(
                opened(server, prefix, proxy.url, bucket=other.bucket, **options)
            )

        other = await stores.enter_async_context(opened(server, prefix))
        found = Proxied(proxy, await open_one(), other, prefix, open_one)
        proxy.reset_counts()
        yield found
        proxy.reset()


def without_credentials(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the machine offer none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
