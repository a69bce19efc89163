"""The configuration as clients are told it, and who is told what.

See docs/reference/protocol.md#configuration-manifest.
"""

import base64
import json
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed, Start, encoded, minted_at, root_device
from support.faulty_store import FaultyStore

from pysync.auth import issuing
from pysync.auth.certificates import Certificate
from pysync.store.memory import MemoryStore

LOG = {"type": "by_timestamp", "field": "items", "persist": True, "maxPullLimit": 10}
COLLECTIONS: list[dict[str, Any]] = [
    {"name": "news", "storagePath": "news/{id}", "readRoles": ["public"], "pullOnly": True},
    {"name": "inbox", "storagePath": "inbox/{id}", "writeRoles": ["public"], "pushOnly": True},
    {
        "name": "rooms",
        "storagePath": "rooms/{id}",
        "readRoles": ["cap:read:rooms"],
        "writeRoles": ["admin"],
        "encryption": "delegated",
        "ttlMs": 5,
        "forceFullFetch": True,
        "maxBodyBytes": 99,
        "keyringPath": "rings/{id}",
    },
    {"name": "own", "storagePath": "users/{identity}/{id}", "readRoles": ["self"]},
    {"name": "staff", "storagePath": "staff/{id}", "writeRoles": ["admin"], "appendOnly": True},
    {"name": "log", "storagePath": "log/{id}", "readRoles": ["editor"], "appendOnly": LOG},
]
SPACES: dict[str, Any] = {"acme": {"collections": [{**COLLECTIONS[0], "storagePath": "acme/{id}"}]}}
AUTH = {
    "adminToken": "token-of-the-tests",
    "trustedIssuers": [ISSUER.ed_pub],
    "identityRoles": {SUBJECT.user_id: ["editor"]},
}


def service(auth: str | None, **members: Any) -> dict[str, Any]:
    endpoint = {} if auth is None else {"configEndpoint": {"auth": auth}}
    return {"collections": COLLECTIONS, "auth": AUTH, **endpoint, **members}


def names(manifest: dict[str, Any]) -> list[str]:
    return [collection["name"] for collection in manifest["collections"]]


async def listed(browser: Browser, headers: dict[str, str] | None = None) -> list[str]:
    answer = await browser.request("GET", "/config", headers=headers)
    assert answer.status == 200, answer.body
    return names(answer.json)


async def test_a_service_that_does_not_enable_it_has_no_manifest(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(service(None, namespaces=SPACES)), session)
    for path in ("/config", "/sync/config", "/acme/config"):
        assert (await browser.request("GET", path)).error == (404, "Not found")


async def test_each_collection_is_listed_with_the_members_that_apply(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(service("public")), session)
    manifest = (await browser.request("GET", "/config")).json
    always = {"maxBodyBytes": 1_048_576, "encryption": "none", "allowedMimeTypes": ["application/json"]}
    assert manifest == {
        "collections": [
            {"name": "news", **always, "pullOnly": True},
            {"name": "inbox", **always, "pushOnly": True},
            {
                "name": "rooms",
                **always,
                "maxBodyBytes": 99,
                "encryption": "delegated",
                "ttlMs": 5,
                "forceFullFetch": True,
            },
            {"name": "own", **always},
            {"name": "staff", **always, "appendOnly": {"type": "by_timestamp"}},
            {"name": "log", **always, "appendOnly": LOG},
        ]
    }


async def test_public_manifest_shows_everybody_everything_and_reads_no_credentials(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(service("public")), session)
    everything = [collection["name"] for collection in COLLECTIONS]
    assert await listed(browser) == everything
    assert await listed(browser, {"Authorization": "Bearer wrong"}) == everything


async def test_a_filtered_manifest_shows_what_the_callers_roles_open(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(service("role-filtered")), session)

    async def shown(certificate: Certificate, **headers: str) -> list[str]:
        return await listed(browser, {"Authorization": certificate.authorization, **headers})

    guest = issuing.issue_member_certificate(ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", **minted_at())
    link = issuing.issue_audience_certificate(ISSUER, "rooms", **minted_at())
    closed = issuing.issue_audience_certificate(ISSUER, "rooms", aud=(SUBJECT.ed_pub,), **minted_at())
    assert await listed(browser) == ["news", "inbox"]
    assert await listed(browser, {"Authorization": "Bearer token-of-the-tests"}) == [
        "news",
        "inbox",
        "rooms",
        "staff",
    ]
    assert await shown(root_device(STRANGER, collections=("rooms",))) == ["news", "inbox", "own"]
    assert await shown(root_device(ISSUER, collections=("rooms",))) == ["news", "inbox", "rooms", "own"]
    assert await shown(guest) == ["news", "inbox", "rooms", "own", "log"]
    assert await shown(link) == ["news", "inbox", "rooms"]
    presented = {"X-Starfish-Pub": SUBJECT.ed_pub}
    assert await shown(closed, **presented) == ["news", "inbox", "rooms", "own", "log"]
    assert await shown(closed, **{"X-Starfish-Pub": STRANGER.ed_pub}) == []


async def test_a_signed_request_is_shown_what_its_certificate_alone_is(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start(service("role-filtered"))
    owner = Signed(base, session, ISSUER, root_device(ISSUER, collections=("rooms",)))
    assert await listed(owner) == ["news", "inbox", "rooms", "own"]


@pytest.mark.parametrize(
    "authorization",
    ["", "Cap", "Cap !", "Bearer wrong", "Basic eDp5", encoded({"v": 1}), encoded({"kind": "device"})],
)
async def test_invalid_credentials_are_shown_nothing_and_no_error(
    start: Start, session: aiohttp.ClientSession, authorization: str
) -> None:
    browser = Browser(await start(service("role-filtered", namespaces=SPACES)), session)
    answer = await browser.request("GET", "/config", headers={"Authorization": authorization})
    assert (answer.status, answer.json) == (
        200,
        {"collections": [], "namespaces": {"acme": {"collections": []}}},
    )


async def test_expired_forged_and_revoked_certificates_are_shown_nothing(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(service("role-filtered")), session)
    past = issuing.issue_device_certificate(
        ISSUER, ISSUER.ed_pub, ISSUER.kem_pub, now_s=1_000_000, nonce=b"n" * 16
    )
    assert await listed(browser, {"Authorization": past.authorization}) == []
    good = root_device(ISSUER, collections=("rooms",))
    members = json.loads(base64.b64decode(good.authorization.removeprefix("Cap ")))
    forged = members | {"exp": good.exp + 1}
    assert await listed(browser, {"Authorization": encoded(forged)}) == []
    assert "rooms" in await listed(browser, {"Authorization": good.authorization})
    revocations = issuing.issue_revocation_list(ISSUER, 1, certificates=[good]).text
    assert (await browser.request("POST", "/revocations", revocations)).status == 200
    assert await listed(browser, {"Authorization": good.authorization}) == []


async def test_a_store_that_fails_leaves_the_manifest_empty(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start(service("role-filtered"), store=store), session)
    store.fail("get")
    device = root_device(ISSUER, collections=("rooms",))
    assert await listed(browser, {"Authorization": device.authorization}) == []
    assert await listed(browser) == ["news", "inbox"]


async def test_namespaces_are_listed_with_the_root_and_each_at_its_own_path(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(service("public", namespaces=SPACES)), session)
    whole = (await browser.request("GET", "/config")).json
    inside = (await browser.request("GET", "/acme/config")).json
    assert whole["namespaces"] == {"acme": inside}
    assert inside.keys() == {"collections"}
    assert names(inside) == ["news"]
    assert (await browser.request("GET", "/nowhere/config")).error == (404, "Not found")


async def test_published_clients_stream_path_is_an_alias_unless_a_namespace_has_its_name(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(service("public", namespaces=SPACES)), session)
    assert (await browser.request("GET", "/sync/config")).body == (
        await browser.request("GET", "/config")
    ).body
    named = Browser(await start(service("public", namespaces={"sync": SPACES["acme"]})), session)
    assert (await named.request("GET", "/sync/config")).json.keys() == {"collections"}


async def test_the_manifest_lies_under_the_mount(start: Start, session: aiohttp.ClientSession) -> None:
    mounted = service("public", namespaces=SPACES, server={"mountPath": "/v1"})
    browser = Browser(await start(mounted), session)
    for path, status in (("/v1/config", 200), ("/v1/acme/config", 200), ("/v1/sync/config", 200)):
        assert (await browser.request("GET", path)).status == status
    assert (await browser.request("GET", "/config")).status == 404


@pytest.mark.parametrize(
    ("auth", "control"), [("public", "no-cache"), ("role-filtered", "private, no-cache")]
)
async def test_a_manifest_that_has_not_changed_is_not_sent_again(
    start: Start, session: aiohttp.ClientSession, auth: str, control: str
) -> None:
    browser = Browser(await start(service(auth)), session)
    first = await browser.request("GET", "/config")
    assert first.headers["Cache-Control"] == control
    assert first.headers["Vary"] == "Authorization"
    known = {"If-None-Match": first.headers["ETag"]}
    assert (await browser.request("GET", "/config", headers=known)).status == 304
    device = root_device(ISSUER, collections=("rooms",)).authorization
    other = await browser.request("GET", "/config", headers={"Authorization": device, **known})
    assert other.status == (304 if auth == "public" else 200)


async def test_a_filtered_manifest_shows_what_spaces_open_to_whoever_has_an_identity(
    start: Start, session: aiohttp.ClientSession
) -> None:
    room = {"name": "room", "storagePath": "spaces/{spaceId}/room", "writeRoles": ["space:owner"]}
    desk = {"name": "desk", "storagePath": "spaces/{spaceId}/desk", "readRoles": ["space:member"]}
    other = {"name": "other", "storagePath": "other", "readRoles": ["cap:read:other"]}
    members = {"collections": [room, desk, other], "configEndpoint": {"auth": "role-filtered"}}
    somebody = {"Authorization": root_device(STRANGER).authorization}
    anonymous_link = {
        "Authorization": issuing.issue_audience_certificate(ISSUER, "rooms", **minted_at()).authorization
    }
    auths: list[tuple[dict[str, Any], list[str]]] = [({"spaces": {}}, ["room", "desk"]), ({}, [])]
    for auth, shown in auths:
        browser = Browser(await start({**members, "auth": auth}), session)
        assert await listed(browser, somebody) == shown
        assert await listed(browser) == []
        assert await listed(browser, anonymous_link) == []
        assert await listed(browser, {"Authorization": "Bearer wrong"}) == []
