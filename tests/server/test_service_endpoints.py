"""What operators ask of a running service."""

import aiohttp
from support.clients import Browser, Start

from pysync.errors import StoreUnavailable
from pysync.store import NotModified, StoredObject
from pysync.store.memory import MemoryStore


async def test_a_service_that_is_about_to_stop_is_alive_and_not_ready(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start({"collections": []}), session)
    assert (await browser.request("GET", "/health/ready")).status == 200
    (app,) = start.apps  # type: ignore[attr-defined]
    app.drain()
    refused = await browser.request("GET", "/health/ready")
    assert (refused.status, refused.json["code"]) == (503, "unavailable")
    assert int(refused.headers["Retry-After"]) >= 1
    assert (await browser.request("GET", "/health")).status == 200


async def test_probes_go_by_address_and_nothing_else_does(
    start: Start, session: aiohttp.ClientSession
) -> None:
    notes = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"], "pullOnly": True}
    members = {
        "server": {"publicHosts": ["sync.example"]},
        "namespaces": {"healthcare": {"collections": [notes]}},
    }
    browser = Browser(await start(members), session)
    for probe in ("/health", "/health/ready"):
        assert (await browser.request("GET", probe)).status == 200
    for other in ("/metrics", "/version", "/healthcare/pull/notes/a"):
        assert (await browser.request("GET", other)).status == 421, other


async def test_why_the_store_cannot_be_used_is_not_told_to_clients(
    start: Start, session: aiohttp.ClientSession
) -> None:
    class Astray(MemoryStore):
        async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
            raise StoreUnavailable("no credentials: set the key")

    notes = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"], "pullOnly": True}
    browser = Browser(await start({"collections": [notes]}, store=Astray()), session)
    refused = await browser.pull("notes/a")
    assert (refused.status, refused.json) == (
        503,
        {"error": "store_unavailable", "code": "store_unavailable"},
    )
