"""A service on a folder, a relay in front of it, and devices that keep replicas."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

from components import free_port

from pysync import config
from pysync.auth import issuing
from pysync.auth.certificates import Certificate
from pysync.auth.identity_keys import IdentityKeys
from pysync.client import Client, Replica, RetryPolicy
from pysync.clock import wall_clock_ms
from pysync.server.app import App, create_app
from pysync.server.process.serve import serve_on
from pysync.testing import FakeClock
from support.clients import ISSUER, SUBJECT
from support.collections import OWN, collection
from support.configurations import patient
from support.s3_fault_proxy import FaultProxy

ME = ISSUER.user_id
DOC = f"users/{ME}/docs/a"
LOG = f"users/{ME}/logs/a"
COLLECTIONS = [
    collection("docs", "users/{identity}/docs/{id}", **OWN, deletable=True, listable=True),
    collection("logs", "users/{identity}/logs/{id}", **OWN, appendOnly=True),
]
MINE: Mapping[str, Any] = {"docs": {"identity": ME}, "logs": {"identity": ME}}
"""What a replica of these collections holds."""

DAY_MS = 86_400_000


class Service:
    """A service on a folder, which can be stopped and started anew at its address."""

    def __init__(self, folder: Path, now_ms: Callable[[], int] = wall_clock_ms, **members: Any) -> None:
        self.folder = folder
        self._members = {"collections": COLLECTIONS, **members}
        self._now_ms = now_ms
        self._port = free_port()
        self._stack = AsyncExitStack()
        self.url = f"http://127.0.0.1:{self._port}"
        self.app: App

    async def start(self) -> None:
        parsed = config.parse({"version": 1, "store": f"file:{self.folder}", **patient(self._members)})
        self.app = await self._stack.enter_async_context(await create_app(parsed, now_ms=self._now_ms))
        await self._stack.enter_async_context(serve_on(self.app, port=self._port))

    async def stop(self) -> None:
        await self._stack.aclose()


async def nap(seconds: float) -> None:
    """Wait as long as asked for, but not for more than a moment."""
    await asyncio.sleep(min(seconds, 0.01))


class Site:
    """A service, which the clients of devices reach through the relay `proxy`, and other clients directly."""

    def __init__(self, folder: Path, clock: FakeClock, **members: Any) -> None:
        self.folder = folder
        self.clock = clock
        self.service = Service(folder / "data", clock, **members)
        self.proxy = FaultProxy(self.service.url)

    async def __aenter__(self) -> Self:
        await self.service.start()
        await self.proxy.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.proxy.__aexit__(*exception)
        await self.service.stop()

    def leave(self) -> None:
        """Take the server away from the devices, until `proxy.reset`."""
        self.proxy.abort(times=None)

    def client(
        self, keys: IdentityKeys = ISSUER, certificate: Certificate | None = None, *, relayed: bool = False
    ) -> Client:
        url = self.proxy.url if relayed else self.service.url
        once = RetryPolicy(attempts=1)
        return Client(url, keys=keys, certificate=certificate, backoff=once, now_ms=self.clock, sleep=nap)

    def phone_certificate(self, days: int) -> Certificate:
        """A certificate by which `SUBJECT` acts for `ISSUER`."""
        now_s = self.clock() // 1000
        return issuing.issue_device_certificate(
            ISSUER,
            SUBJECT.ed_pub,
            SUBJECT.kem_pub,
            now_s=now_s,
            nonce=os.urandom(16),
            expires_at_s=now_s + days * 86_400,
        )

    @asynccontextmanager
    async def device(
        self,
        name: str = "phone",
        collections: Mapping[str, Any] = MINE,
        *,
        keys: IdentityKeys = ISSUER,
        certificate: Certificate | None = None,
        **options: Any,
    ) -> AsyncIterator[Replica]:
        """The replica of a device, whose file stays when the device is left."""
        client = self.client(keys, certificate, relayed=True)
        file = self.folder / f"{name}.db"
        replica = Replica(file, client, collections, now_ms=self.clock, sleep=nap, **options)
        async with client, replica:
            yield replica

    async def pull(self, key: str = DOC) -> dict[str, Any]:
        async with self.client() as client:
            return (await client.pull(key)).data

    async def push(self, data: dict[str, Any], key: str = DOC) -> None:
        """Replace a document, as another client."""
        async with self.client() as client:
            await client.push(key, data, (await client.pull(key)).hash or None)

    async def elements(self, key: str = LOG, keys: IdentityKeys = ISSUER) -> list[dict[str, Any]]:
        """The elements of a log, as somebody with these keys reads them."""
        async with self.client(keys) as client:
            return [element.data for element in (await client.pull(key, full=True)).elements()]


def tail_of(replica: Replica, key: str = LOG) -> list[dict[str, Any]]:
    """The elements of a log in a replica."""
    return [element.data for element in replica.tail(key, 1000)]
