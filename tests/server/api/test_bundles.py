"""Bundles: members that are read together, each by its own rules, and written one by one.

See docs/reference/protocol.md#bundles.
"""

from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, SUBJECT, Browser, Signed, Start, minted_at, root_device
from support.collections import limit_of
from support.faulty_store import FaultyStore

from pysync.auth import issuing
from pysync.clock import wall_clock_ms
from pysync.store.memory import MemoryStore

ADMIN = {"Authorization": "Bearer token-of-the-tests"}


def part(name: str, read: str, write: str = "public", /, **members: Any) -> dict[str, Any]:
    return {
        "name": name,
        "storagePath": "boards/{board}",
        "bundle": "board",
        "readRoles": [read],
        "writeRoles": [write],
        **members,
    }


def service(*parts: dict[str, Any], **members: Any) -> dict[str, Any]:
    auth = {"adminToken": "token-of-the-tests", "trustedIssuers": [ISSUER.ed_pub]}
    return {"collections": parts, "auth": auth, **members}


async def pulled(browser: Browser, key: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    answer = await browser.pull(key, headers)
    assert answer.status == 200, answer.body
    collections: dict[str, Any] = answer.json["collections"]
    return collections


async def test_members_are_pushed_one_by_one_and_pulled_together_in_their_order(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(service(part("title", "public"), part("cards", "public"))), session)
    cards = (await browser.push("boards/b1/cards", {"n": [1, 2]})).json["hash"]
    title = (await browser.push("boards/b1/title", {"text": "x"})).json["hash"]
    answer = (await browser.pull("boards/b1")).json
    assert answer.keys() == {"collections", "timestamp"}
    assert list(answer["collections"].items()) == [
        ("title", {"data": {"text": "x"}, "hash": title}),
        ("cards", {"data": {"n": [1, 2]}, "hash": cards}),
    ]
    assert abs(answer["timestamp"] - wall_clock_ms()) < 60_000
    assert (await browser.push("boards/b1/title", {"text": "y"})).json["currentHash"] == title
    assert (await browser.push("boards/b1/title", {"text": "y"}, title)).status == 200


async def test_a_member_that_was_never_written_is_there_and_empty(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(service(part("title", "public"), part("cards", "public"))), session)
    assert (await browser.push("boards/b1/cards", {"n": 1})).status == 200
    assert (await pulled(browser, "boards/b1"))["title"] == {"data": {}, "hash": ""}


@pytest.mark.parametrize("names", [("open", "closed"), ("closed", "open")])
async def test_every_member_is_authorized_not_only_the_first(
    start: Start, session: aiohttp.ClientSession, names: tuple[str, str]
) -> None:
    roles = {"open": "public", "closed": "admin"}
    browser = Browser(await start(service(*(part(name, roles[name]) for name in names))), session)
    assert list(await pulled(browser, "boards/b1")) == ["open"]
    assert list(await pulled(browser, "boards/b1", ADMIN)) == list(names)


async def test_a_caller_who_may_read_no_member_gets_none(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start(service(part("a", "admin"), part("b", "cap:read:rooms")))
    assert await pulled(Browser(base, session), "boards/b1") == {}
    stranger = Signed(base, session, SUBJECT, root_device(SUBJECT))
    assert await pulled(stranger, "boards/b1") == {}


async def test_each_member_needs_its_own_scope(start: Start, session: aiohttp.ClientSession) -> None:
    roles = "cap:read:boards"
    base = await start(service(part("title", roles), part("cards", roles), part("news", "public")))

    def member(*paths: str) -> Signed:
        certificate = issuing.issue_member_certificate(
            ISSUER,
            SUBJECT.ed_pub,
            SUBJECT.kem_pub,
            "boards",
            grant=issuing.Grant(("read",), (*paths, "!boards/_members")),
            **minted_at(),
        )
        return Signed(base, session, SUBJECT, certificate)

    assert list(await pulled(member("boards/**"), "boards/b1")) == ["title", "cards", "news"]
    assert list(await pulled(member("boards/**", "!boards/*/cards"), "boards/b1")) == ["title", "news"]
    assert list(await pulled(member("boards/b2/**"), "boards/b1")) == ["news"]
    # The path of the bundle alone reaches none of its members.
    assert list(await pulled(member("boards/b1"), "boards/b1")) == ["news"]


async def test_the_identity_of_the_path_is_the_readers_own_for_members_with_the_role_self(
    start: Start, session: aiohttp.ClientSession
) -> None:
    mine = part("settings", "self", storagePath="people/{identity}")
    face = part("face", "public", storagePath="people/{identity}")
    base = await start(service(mine, face))
    owner = Signed(base, session, ISSUER, root_device(ISSUER))
    assert list(await pulled(owner, f"people/{ISSUER.user_id}")) == ["settings", "face"]
    assert list(await pulled(owner, f"people/{SUBJECT.user_id}")) == ["face"]


async def test_bad_credentials_are_rejected_unless_every_member_is_open(
    start: Start, session: aiohttp.ClientSession
) -> None:
    bad = {"Authorization": "Bearer wrong"}
    mixed = Browser(await start(service(part("a", "public"), part("b", "admin"))), session)
    assert (await mixed.pull("boards/b1", bad)).error == (401, "Unauthorized")
    opened = Browser(await start(service(part("a", "public"), part("b", "public"))), session)
    assert list(await pulled(opened, "boards/b1", bad)) == ["a", "b"]


async def test_a_signed_pull_of_a_bundle_is_good_once(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start(service(part("a", "public"), part("b", "cap:read:boards")))
    owner = Signed(base, session, ISSUER, root_device(ISSUER, collections=("boards",)))
    headers = owner.headers("GET", "/pull/boards/b1", b"")
    anyone = Browser(base, session)
    assert list(await pulled(anyone, "boards/b1", headers)) == ["a", "b"]
    assert (await anyone.pull("boards/b1", headers)).error == (401, "Unauthorized")


async def test_member_that_needs_an_identity_is_left_out_for_anonymous_readers(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start(service(part("a", "public", requireAuth=True), part("b", "public")))
    assert list(await pulled(Browser(base, session), "boards/b1")) == ["b"]
    stranger = Signed(base, session, SUBJECT, root_device(SUBJECT))
    assert list(await pulled(stranger, "boards/b1")) == ["a", "b"]


async def test_push_only_members_are_left_out_and_pull_only_members_take_no_push(
    start: Start, session: aiohttp.ClientSession
) -> None:
    parts = part("in", "public", pushOnly=True), part("out", "public", pullOnly=True)
    browser = Browser(await start(service(*parts)), session)
    assert (await browser.push("boards/b1/in", {"n": 1})).status == 200
    assert (await browser.push("boards/b1/out", {"n": 1})).error == (404, "Not found")
    assert list(await pulled(browser, "boards/b1")) == ["out"]


async def test_the_path_of_a_bundle_takes_no_push_and_a_members_key_no_pull(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(service(part("a", "public"))), session)
    assert (await browser.push("boards/b1", {"n": 1})).error == (404, "Not found")
    assert (await browser.pull("boards/b1/a")).error == (404, "Not found")
    assert (await browser.request("POST", "/pull/boards/b1", {})).status == 405


async def test_writing_needs_the_roles_of_the_member(start: Start, session: aiohttp.ClientSession) -> None:
    browser = Browser(await start(service(part("a", "public", "admin"), part("b", "public"))), session)
    assert (await browser.push("boards/b1/a", {"n": 1})).error == (401, "Unauthorized")
    assert (await browser.push("boards/b1/a", {"n": 1}, None, ADMIN)).status == 200
    assert (await browser.push("boards/b1/b", {"n": 1})).status == 200


async def test_a_member_expires_alone(start: Start, session: aiohttp.ClientSession) -> None:
    clock = [wall_clock_ms()]
    store = MemoryStore(lambda: clock[0])
    parts = part("brief", "public", ttlMs=1000), part("lasting", "public")
    base = await start(service(*parts), store=store, now_ms=lambda: clock[0])
    browser = Browser(base, session)
    for name in ("brief", "lasting"):
        assert (await browser.push(f"boards/b1/{name}", {"n": 1})).status == 200
    clock[0] += 1000
    both = await browser.pull("boards/b1")
    assert [both.json["collections"][name]["data"] for name in ("brief", "lasting")] == [{"n": 1}] * 2
    known = {"If-None-Match": both.headers["ETag"]}
    assert (await browser.pull("boards/b1", known)).status == 304
    clock[0] += 1
    for headers in ({}, known):
        members = (await browser.pull("boards/b1", headers)).json["collections"]
        assert members["brief"] == {"data": {}, "hash": ""}
        assert members["lasting"]["data"] == {"n": 1}
    head = await browser.request("HEAD", "/pull/boards/b1")
    assert head.headers["ETag"] == (await browser.pull("boards/b1")).headers["ETag"] != both.headers["ETag"]
    assert (await browser.push("boards/b1/brief", {"n": 2})).status == 200, "as over nothing"
    clock[0] += 1001
    (app,) = start.apps  # type: ignore[attr-defined]
    assert await app.jobs.ttl_sweeper.sweep() == 1
    assert await store.list("boards/b1", None, 10) == ["lasting"]


async def test_fields_that_a_reader_may_not_see_are_stripped_and_change_the_version(
    start: Start, session: aiohttp.ClientSession
) -> None:
    guarded = part("staff", "public", fieldPermissions={"salary": {"readRoles": ["admin"]}})
    browser = Browser(await start(service(guarded, part("plain", "public"))), session)
    pushed = (await browser.push("boards/b1/staff", {"name": "x", "salary": 5})).json["hash"]
    one, all_ = await browser.pull("boards/b1"), await browser.pull("boards/b1", ADMIN)
    assert one.json["collections"]["staff"] == {"data": {"name": "x"}, "hash": pushed}
    assert all_.json["collections"]["staff"]["data"] == {"name": "x", "salary": 5}
    assert one.headers["ETag"] != all_.headers["ETag"]


async def test_a_bundle_that_has_not_changed_is_not_sent_again(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(service(part("a", "public"), part("b", "public"))), session)
    first = await browser.pull("boards/b1")
    known = {"If-None-Match": first.headers["ETag"]}
    same = await browser.pull("boards/b1", known)
    assert (same.status, same.body) == (304, b"")
    assert (await browser.push("boards/b1/b", {"n": 1})).status == 200
    changed = await browser.pull("boards/b1", known)
    assert (changed.status, changed.json["collections"]["b"]["data"]) == (200, {"n": 1})


async def test_a_bundle_is_cached_as_its_strictest_member(
    start: Start, session: aiohttp.ClientSession
) -> None:
    async def control(*parts: dict[str, Any]) -> str:
        answer = await Browser(await start(service(*parts)), session).pull("boards/b1")
        return str(answer.headers["Cache-Control"])

    long: dict[str, Any] = {"cacheDurationMs": 60_000}
    short: dict[str, Any] = {"cacheDurationMs": 5_000}
    assert await control(part("a", "public", **long), part("b", "public", **short)) == "public, max-age=5"
    assert await control(part("a", "public", **long), part("b", "admin", **short)) == "private, max-age=5"
    assert await control(part("a", "public", **long), part("b", "public")) == "no-cache"
    assert await control(part("a", "public"), part("b", "admin")) == "private, no-cache"


async def test_a_pull_counts_against_the_limit_of_every_member(
    start: Start, session: aiohttp.ClientSession
) -> None:
    limited: dict[str, Any] = {"rateLimit": {"pull": limit_of(2)}}
    base = await start(service(part("a", "cap:read:boards"), part("b", "cap:read:boards", **limited)))
    owner = Signed(base, session, ISSUER, root_device(ISSUER, collections=("boards",)))
    for _ in range(2):
        assert list(await pulled(owner, "boards/b1")) == ["a", "b"]
    assert (await owner.pull("boards/b1")).error == (429, "Rate limit exceeded")


@pytest.mark.parametrize("broken", ["a", "b"])
async def test_a_member_that_cannot_be_read_is_not_taken_for_an_empty_one(
    start: Start, session: aiohttp.ClientSession, broken: str
) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start(service(part("a", "public"), part("b", "public")), store=store), session)
    await store.put(f"boards/b1/{broken}", b'{"data":')
    assert (await browser.pull("boards/b1")).error == (500, "document_corrupt")
    store.fail("get")
    assert (await browser.pull("boards/b2")).error == (503, "store_unavailable")


async def test_bundles_of_one_name_in_two_namespaces_are_apart(
    start: Start, session: aiohttp.ClientSession
) -> None:
    inside = [part("a", "public", storagePath="acme/{id}"), part("b", "admin", storagePath="acme/{id}")]
    base = await start(service(part("a", "public"), namespaces={"acme": {"collections": inside}}))
    browser = Browser(base, session)
    pushed = await browser.request("POST", "/acme/push/acme/x/a", {"data": {"n": 1}, "baseHash": None})
    assert pushed.status == 200
    answer = await browser.request("GET", "/acme/pull/acme/x")
    assert answer.json["collections"] == {"a": {"data": {"n": 1}, "hash": pushed.json["hash"]}}
    assert (await browser.pull("acme/x")).error == (404, "Not found")
    assert (await browser.request("GET", "/acme/pull/boards/b1")).error == (404, "Not found")


@pytest.mark.parametrize(("role", "expected"), [("admin", None), ("public", {"v": 1})])
async def test_keyring_of_a_member_needs_the_members_roles(
    start: Start, session: aiohttp.ClientSession, role: str, expected: dict[str, int] | None
) -> None:
    docs: dict[str, Any] = {"name": "docs", "storagePath": "docs/{id}", "keyringPath": "boards/{id}/keys"}
    docs |= {"readRoles": ["public"], "writeRoles": ["public"]}
    browser = Browser(await start(service(docs, part("keys", role), part("open", "public"))), session)
    assert (await browser.push("boards/d1/keys", {"v": 1})).status == 200
    answer = (await browser.pull("docs/d1?withKeyring=1")).json
    assert answer.get("keyring", {}).get("data") == expected


async def test_a_bundle_is_no_keyring(start: Start, session: aiohttp.ClientSession) -> None:
    bundle = part("a", "public", storagePath="{top}/{id}/_keyring")
    plain = {"name": "docs", "storagePath": "docs/{id}", "readRoles": ["public"], "writeRoles": ["public"]}
    browser = Browser(await start(service(bundle, plain)), session)
    assert (await browser.pull("docs/d1?withKeyring=1")).json["keyring"] is None
