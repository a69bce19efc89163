"""A program that receives webhooks, verifies each request as Standard Webhooks has it, and keeps it."""

import asyncio
import base64
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from aiohttp import web
from standardwebhooks.webhooks import Webhook

from pysync.config import Config, parse
from pysync.server.app import App
from pysync.webhooks import Webhooks
from support.clients import Start

SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()
SECOND_SECRET = "whsec_" + base64.b64encode(bytes(range(1, 25))).decode()

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Delivery(NamedTuple):
    """A request, whose signature is valid if that was verified."""

    id: str
    body: dict[str, Any]
    headers: dict[str, str]
    raw: bytes

    @property
    def keys(self) -> list[str]:
        """The documents of its changes, by their path parameter."""
        return [change["params"]["id"] for change in self.body["changes"]]


async def accept(request: web.Request) -> web.StreamResponse:
    return web.Response(status=204)


def respond(status: int, **headers: str) -> Answer:
    async def reply(request: web.Request) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(status=status, headers=named, text="no")

    return reply


async def drop(request: web.Request) -> web.StreamResponse:
    """Reset the connection."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hang(request: web.Request) -> web.StreamResponse:
    """Answer never; the handler ends with the connection."""
    await asyncio.Event().wait()
    return web.Response()


@dataclass
class Inbox:
    """The requests of a receiver at `url`. Its next answers are `answers`, and 204 after them."""

    url: str = ""
    answers: deque[Answer] = field(default_factory=deque)
    deliveries: list[Delivery] = field(default_factory=list)
    secret: str = SECRET
    verifies: bool = True
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def changes(self) -> list[Any]:
        """The changes of all deliveries."""
        return [change for one in self.deliveries for change in one.body.get("changes", ())]

    @property
    def keys(self) -> list[str]:
        """The documents of these changes, by their path parameter."""
        return [change["params"]["id"] for change in self.changes]

    async def until(self, holds: Callable[[], bool]) -> Sequence[Delivery]:
        """Wait, from one request to the next, until it holds, and return all requests."""
        async with self._changed:
            await self._changed.wait_for(holds)
        return self.deliveries

    async def first(self, number: int) -> Sequence[Delivery]:
        """Wait for this number of requests, and return them."""
        await self.until(lambda: len(self.deliveries) >= number)
        return self.deliveries[:number]

    async def receive(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        if self.verifies:
            Webhook(self.secret).verify(body, headers)
        async with self._changed:
            self.deliveries.append(Delivery(headers["webhook-id"], json.loads(body), headers, body))
            self._changed.notify_all()
        return await (self.answers.popleft() if self.answers else accept)(request)


@asynccontextmanager
async def receiving(*answers: Answer, port: int = 0, verifies: bool = True) -> AsyncIterator[Inbox]:
    """A receiver on this machine. It verifies signatures, which need the time of day, unless told not to."""
    inbox = Inbox(answers=deque(answers), verifies=verifies)
    app = web.Application()
    app.router.add_post("/hook", inbox.receive)
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    inbox.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    try:
        yield inbox
    finally:
        await runner.cleanup()


def webhook(url: str, **members: Any) -> dict[str, Any]:
    """A webhook of notes, whose receiver is on this machine."""
    return {
        "name": "search",
        "url": url,
        "collections": ["notes"],
        "secret": SECRET,
        "allowPrivate": True,
        **members,
    }


def app_of(start: Start) -> App:
    """The service that was started last."""
    app: App = start.apps[-1]  # type: ignore[attr-defined]
    return app


def with_webhooks(app: App, *webhooks: dict[str, Any]) -> Config:
    """The configuration of a service with these webhooks."""
    members = {"collections": [{"name": "notes", "storagePath": "n/{id}", "readRoles": [], "writeRoles": []}]}
    parsed = parse({**members, "webhooks": [{**one, "collections": ["notes"]} for one in webhooks]})
    named = zip(parsed.webhooks, webhooks, strict=True)
    return replace(
        app.engine.config,
        webhooks=tuple(replace(one, collections=tuple(given["collections"])) for one, given in named),
    )


@asynccontextmanager
async def sending(app: App, *webhooks: dict[str, Any], **seams: Any) -> AsyncIterator[Webhooks]:
    """Webhooks beside a service without any, whose clock, resolver, store or leases the test controls."""
    of_service = {name: seams.pop(name) for name in ("store", "coordinator", "set_gauge") if name in seams}
    services = replace(app.engine, **of_service)
    sender = Webhooks(services, **seams)
    await sender.update(with_webhooks(app, *webhooks))
    try:
        yield sender
    finally:
        await sender.close()


class Waits:
    """The waits between attempts. Each ends at once while `is_over`, else when it is set again."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.is_over = asyncio.Event()
        self.is_over.set()
        self._changed = asyncio.Condition()

    async def __call__(self, seconds: float) -> None:
        async with self._changed:
            self.seconds.append(seconds)
            self._changed.notify_all()
        await self.is_over.wait()

    async def first(self, number: int) -> list[float]:
        """Wait until there were this number of waits, and return them."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.seconds) >= number)
        return self.seconds[:number]
