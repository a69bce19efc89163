"""Replicas of the browser client, each in a window, and a relay between the windows and their service."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import pytest_asyncio

from pysync.auth.certificates import Certificate
from pysync.auth.identity_keys import IdentityKeys
from pysync.client import Client, RetryPolicy
from pysync.clock import wall_clock_ms
from support.browser import Chromium, Window
from support.clients import ISSUER, Start
from support.http_relay import RequestHead
from support.replicas import COLLECTIONS, DOC, LOG, MINE
from support.s3_fault_proxy import FaultProxy
from support.web_pages import blank_page, web_service

_OPEN = """async (base, [ed, kem], certificate, collections) => {
  window.keys = await pysync.IdentityKeys.fromPrivate(ed, kem)
  const backoff = {attempts: 1, initialS: 0.01, maxS: 0.05}
  window.client = new pysync.Client(base, {keys, backoff, ...(certificate && {certificate})})
  window.replica = await pysync.Replica.open("notes", client, collections)
}"""
_STATUS = """replica.status().then((status) => ({
  ...status,
  error: status.error && [status.error.name, status.error.code ?? null],
  rejected: status.rejected.map((edit) => [edit.key, edit.kind, edit.error.name]),
}))"""


class Tab:
    """A window with a replica of the documents and logs of one identity; its `get`, `put`, ..."""

    def __init__(self, window: Window) -> None:
        self.window = window

    async def get(self, key: str = DOC) -> Any:
        return await self.window.run("(key) => replica.get(key)", key)

    async def put(self, data: dict[str, Any], key: str = DOC) -> None:
        await self.window.run("(key, data) => replica.put(key, data)", key, data)

    async def append(self, data: dict[str, Any], key: str = LOG) -> None:
        await self.window.run("(key, data) => replica.append(key, data)", key, data)

    async def tail(self, key: str = LOG) -> list[Any]:
        """The data of the elements of a log."""
        found = await self.window.run("(key) => replica.tail(key, 1000)", key)
        return [element["data"] for element in found]

    async def synced(self) -> None:
        await self.window.run("replica.synced()")

    async def status(self) -> dict[str, Any]:
        """The status, with the name and code of its error, and the key, kind and error of rejected edits."""
        found: dict[str, Any] = await self.window.run(_STATUS)
        return found

    async def shows(self, data: Any, key: str = DOC) -> None:
        """Wait until the replica has this document."""
        found = f"pysync.canonicalJson(await replica.get({json.dumps(key)}))"
        await self.window.until(f"{found} === pysync.canonicalJson({json.dumps(data)})")

    async def error_of(self, expression: str) -> Any:
        """The name and code of the error with which a promise is rejected; None if it is fulfilled."""
        return await self.window.run(
            f"({expression}).then(() => null, (error) => [error.name, error.code ?? null])"
        )


class WebSite:
    """A service with a relay in front of it, from which windows load their pages."""

    def __init__(self, base: str, proxy: FaultProxy, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        self.base = base
        self.proxy = proxy
        self._now_ms = now_ms

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        start: Start,
        *collections: dict[str, Any],
        now_ms: Callable[[], int] = wall_clock_ms,
        **members: Any,
    ) -> AsyncIterator[Self]:
        """The service with these collections, by default those of `support.replicas`, and other members of
        its configuration."""
        base = await web_service(start, *(collections or COLLECTIONS), now_ms=now_ms, **members)
        async with FaultProxy(base) as proxy:
            yield cls(base, proxy, now_ms)

    def leave(self) -> None:
        """Take the server away from the windows, until `proxy.reset`; they still load their pages, as if
        these were kept for it."""
        self.proxy.abort(when=is_of_the_service, times=None)

    async def tab(
        self,
        screen: Chromium,
        keys: IdentityKeys = ISSUER,
        certificate: Certificate | None = None,
        collections: Any = MINE,
        before: str = "",
    ) -> Tab:
        """A new window with a replica. The script `before` runs before its pages."""
        tab = Tab(await blank_page(screen, self.proxy.url, before))
        await self.open_replica(tab, keys, certificate, collections)
        return tab

    async def reload(self, tab: Tab) -> None:
        """Load the page of a window again, and open its replica."""
        await tab.window.load(f"{self.proxy.url}/examples/blank.html")
        await self.open_replica(tab)

    async def open_replica(
        self,
        tab: Tab,
        keys: IdentityKeys = ISSUER,
        certificate: Certificate | None = None,
        collections: Any = MINE,
    ) -> None:
        """Open the replica in a window that has a page with the module."""
        private = [keys.ed_priv, keys.kem_priv]
        members = certificate and json.loads(certificate.text)
        await tab.window.run(_OPEN, self.proxy.url, private, members, collections)

    def client(self) -> Client:
        """Somebody else with the same keys, who reaches the service directly."""
        return Client(self.base, keys=ISSUER, backoff=RetryPolicy(attempts=1), now_ms=self._now_ms)

    async def pull(self, key: str = DOC) -> dict[str, Any]:
        async with self.client() as client:
            return (await client.pull(key)).data

    async def push(self, data: dict[str, Any], key: str = DOC) -> None:
        """Replace a document, as another client."""
        async with self.client() as client:
            await client.push(key, data, (await client.pull(key)).hash or None)

    async def elements(self, key: str = LOG) -> list[dict[str, Any]]:
        """The elements of a log."""
        async with self.client() as client:
            return [element.data for element in (await client.pull(key, full=True)).elements()]


@pytest_asyncio.fixture
async def site(start: Start) -> AsyncIterator[WebSite]:
    """A service with the collections of `support.replicas`, and a relay in front of it."""
    async with WebSite.open(start) as site:
        yield site


def is_of_the_service(sent: RequestHead) -> bool:
    """Whether a request is not one for a page or its module."""
    return not sent.path.startswith(("examples/", "client/"))
