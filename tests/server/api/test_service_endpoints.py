"""What operators ask of a running service."""

from typing import Any

import aiohttp
import pytest
from support.clients import SUBJECT, Browser, Signed, Start, root_device
from support.collections import NOTES, collection

from pysync.errors import StoreUnavailable
from pysync.server.api.health import is_local
from pysync.store import NotModified, StoredObject
from pysync.store.memory import MemoryStore

TOKEN = "0123456789abcdef"


async def test_a_service_that_is_about_to_stop_is_alive_and_not_ready(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start({"collections": []}), session)
    assert (await browser.request("GET", "/health/ready")).status == 200
    (app,) = start.apps  # type: ignore[attr-defined]
    app.drain()
    rejected = await browser.request("GET", "/health/ready")
    assert (rejected.status, rejected.json["code"]) == (503, "unavailable")
    assert int(rejected.headers["Retry-After"]) >= 1
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


async def test_reason_of_an_unusable_store_is_not_reported_to_clients(
    start: Start, session: aiohttp.ClientSession
) -> None:
    class Astray(MemoryStore):
        async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
            raise StoreUnavailable("no credentials: set the key")

    notes = {"name": "notes", "storagePath": "notes/{id}", "readRoles": ["public"], "pullOnly": True}
    browser = Browser(await start({"collections": [notes]}, store=Astray()), session)
    rejected = await browser.pull("notes/a")
    assert (rejected.status, rejected.json) == (
        503,
        {"error": "store_unavailable", "code": "store_unavailable"},
    )


@pytest.mark.parametrize(
    ("headers", "peer", "is_shown"),
    [
        ({}, "127.0.0.1", True),
        ({}, "127.8.8.8", True),
        ({}, "::1", True),
        ({}, "192.0.2.1", False),
        ({}, None, False),
        ({"X-Forwarded-For": "192.0.2.1"}, "127.0.0.1", False),
        ({"Forwarded": "for=192.0.2.1"}, "::1", False),
    ],
)
def test_requests_of_this_machine_are_distinguished_from_those_of_others(
    headers: dict[str, str], peer: str | None, is_shown: bool
) -> None:
    assert is_local(headers, peer) == is_shown


async def test_metrics_do_not_exist_for_outsiders(start: Start, session: aiohttp.ClientSession) -> None:
    browser = Browser(await start({"auth": {"adminToken": TOKEN}}), session)
    unknown = await browser.request("GET", "/unknown")
    for credentials, status in ((None, 404), ("wrong" * 4, 404), (TOKEN, 200)):
        headers = {"X-Forwarded-For": "192.0.2.1"}
        if credentials is not None:
            headers["Authorization"] = f"Bearer {credentials}"
        reply = await browser.request("GET", "/metrics", headers=headers)
        assert reply.status == status
        assert status == 200 or reply.body == unknown.body
    assert (await browser.request("GET", "/metrics")).status == 200


async def test_each_of_several_admin_tokens_is_accepted(start: Start, session: aiohttp.ClientSession) -> None:
    tokens = [TOKEN, "another-" + TOKEN]
    vault = collection("vault", readRoles=["admin"], writeRoles=["admin"])
    browser = Browser(await start({"auth": {"adminToken": tokens}, "collections": [vault]}), session)
    for token, status in (*((token, 200) for token in tokens), (TOKEN[:-1], 401), (", ".join(tokens), 401)):
        assert (await browser.pull("vault/a", {"Authorization": f"Bearer {token}"})).status == status


SERVED: dict[str, Any] = {
    "auth": {"adminToken": TOKEN},
    "collections": [
        NOTES,
        collection("hush", "hush/{identity}/{id}", readRoles=["self"], writeRoles=["self"], listable=True),
        collection("vault", "vault/{id}", readRoles=["admin"], writeRoles=["admin"], bundle="vaults"),
    ],
    "namespaces": {
        "acme": {"collections": [collection("plans", "plans/{id}", readRoles=["boss"], writeRoles=["boss"])]}
    },
}
PRIVATE = (b"hush", b"vault", b"acme", b"plans")


async def test_outsiders_find_nothing_about_private_collections(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start(SERVED)
    described = await Browser(base, session).request("GET", "/openapi.json")
    assert described.headers["Vary"] == "Authorization"
    assert "/pull/notes/{id}" in described.json["paths"]
    assert [name for name in PRIVATE if name in described.body] == []
    member = Signed(base, session, SUBJECT, root_device(SUBJECT))
    described = await member.request("GET", "/openapi.json")
    assert [name for name in PRIVATE if name in described.body] == [b"hush"]
    rejected = await Browser(base, session).request(
        "GET", "/openapi.json", headers={"Authorization": "Cap x"}
    )
    assert [name for name in (b"notes", *PRIVATE) if name in rejected.body] == []
    described = await Browser(base, session).request(
        "GET", "/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}
    )
    assert [name for name in PRIVATE if name not in described.body] == []


async def test_a_manifest_for_everyone_opens_the_description_as_well(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start({**SERVED, "configEndpoint": {"auth": "public"}})
    described = await Browser(base, session).request("GET", "/openapi.json")
    assert [name for name in PRIVATE if name not in described.body] == []
