"""Quotas of a service: what is stored counts for its owner, and what is too much is rejected."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import STRANGER, SUBJECT, Browser, Signed, Start, root_device
from support.loop_time import loop_time

from pysync.auth.certificates import user_id
from pysync.clock import wall_clock_ms
from pysync.config import ConfigError, parse
from pysync.erase import EraseRequest
from pysync.migrate import MIN_GRACE_MS, GarbageCollector
from pysync.model import Usage
from pysync.server.app import App
from pysync.server.jobs import COUNT_EVERY_S
from pysync.store import Subject, ledger_of

PUBLIC = {"readRoles": ["public"], "writeRoles": ["public"]}
OWN = {"readRoles": ["self"], "writeRoles": ["self"]}
ROOM = {"readRoles": ["space:member"], "writeRoles": ["space:owner"]}
WALL = {"readRoles": ["public"], "writeRoles": ["cap:write:wall"]}
UNPROVEN = {"requireAuthorSignature": False}
ELEMENT = {"data": {"text": "x" * 500}}
ME, OTHER = user_id(SUBJECT.ed_pub), user_id(STRANGER.ed_pub)

Service = Callable[..., Awaitable[Browser]]


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, folder: Path) -> str:
    """The store: one that counts in its transactions, or one that the coordinator counts."""
    return f"file:{folder}" if request.param == "folder" else "memory:"


@pytest.fixture
def service(start: Start, session: aiohttp.ClientSession, url: str) -> Service:
    """Starts a service with quotas."""

    async def start_one(quotas: dict[str, Any] | None, **members: Any) -> Browser:
        collections = [
            {"name": "public", "storagePath": "public/{id}", **PUBLIC},
            {"name": "notes", "storagePath": "users/{identity}/notes/{id}", **OWN},
            {"name": "wall", "storagePath": "wall/{id}", **WALL},
            {"name": "log", "storagePath": "logs/{identity}/{id}", **OWN, "appendOnly": UNPROVEN},
            {"name": "photos", "storagePath": "photos/{id}", "allowedMimeTypes": ["image/*"], **PUBLIC},
            {"name": "rooms", "storagePath": "spaces/{spaceId}/{id}", **ROOM},
        ]
        served = {"store": url, "collections": collections, "auth": {"spaces": {}}, **members}
        if quotas is not None:
            served["quotas"] = quotas
        return Browser(await start(served), session)

    return start_one


def app_of(start: Start) -> App:
    app = start.apps[-1]  # type: ignore[attr-defined]
    assert isinstance(app, App)
    return app


async def used(app: App, kind: str, name: str) -> Usage:
    account = Subject(kind, name)
    ledger = ledger_of(app.store)
    assert ledger is not None
    return (await ledger.used([account]))[account]


async def erase(app: App, request: EraseRequest) -> None:
    with loop_time() as time:
        await time.pass_until(asyncio.ensure_future(app.eraser.run(request)), 0.1)


def signed(browser: Browser, keys: Any = SUBJECT) -> Signed:
    names = ("notes", "wall", "log", "mail", "mixed", "thread")
    return Signed(browser.base, browser.session, keys, root_device(keys, collections=names))


async def test_a_push_over_the_quota_is_507_with_used_and_allowed(service: Service) -> None:
    anyone = await service({"namespace": {"documents": 2}})
    for number in range(2):
        assert (await anyone.push(f"public/{number}", {})).status == 200
    rejected = await anyone.push("public/2", {})
    assert rejected.status == 507
    assert rejected.json == {
        "error": "quota_exceeded",
        "code": "quota_exceeded",
        "quota": "namespace.documents",
        "used": 2,
        "allowed": 2,
    }
    assert (await anyone.pull("public/2")).json["hash"] == ""


async def test_a_smaller_document_may_be_pushed_over_the_quota(service: Service) -> None:
    anyone = await service({"namespace": {"bytes": 1000}})
    large = await anyone.push("public/1", {"text": "x" * 700})
    assert (await anyone.push("public/2", {"text": "x" * 700})).status == 507
    assert (await anyone.push("public/1", {"text": "x" * 900}, large.json["hash"])).status == 507
    assert (await anyone.push("public/1", {"text": "x" * 100}, large.json["hash"])).status == 200
    assert (await anyone.push("public/2", {"text": "x" * 300})).status == 200


async def test_a_conflict_or_a_repetition_is_none_of_the_quota(service: Service) -> None:
    anyone = await service({"namespace": {"documents": 1}})
    once = {"Idempotency-Key": "first"}
    pushed = await anyone.push("public/1", {"n": 1}, None, once)
    again = await anyone.push("public/1", {"n": 1}, None, once)
    assert (again.status, again.json) == (200, pushed.json)
    assert (await anyone.push("public/1", {"n": 2})).json["currentHash"] == pushed.json["hash"]
    assert (await anyone.push("public/2", {"n": 1}, None, {"Idempotency-Key": "second"})).status == 507
    assert (await anyone.push("public/2", {"n": 2}, None, {"Idempotency-Key": "second"})).status == 507


async def test_each_identity_has_a_quota_of_its_own(service: Service, start: Start) -> None:
    anyone = await service({"identity": {"documents": 1}})
    me, other = signed(anyone), signed(anyone, STRANGER)
    assert (await me.push(f"users/{ME}/notes/1", {})).status == 200
    assert (await me.push(f"users/{ME}/notes/2", {})).json["quota"] == "identity.documents"
    assert (await other.push(f"users/{OTHER}/notes/1", {})).status == 200
    assert (await used(app_of(start), "identity", ME)).documents == 1


@pytest.mark.parametrize("url", ["folder"], indirect=True)
async def test_without_an_identity_in_the_key_the_last_writer_counts(service: Service, start: Start) -> None:
    anyone = await service({}, auth={"trustedIssuers": [SUBJECT.ed_pub, STRANGER.ed_pub]})
    written = await signed(anyone).push("wall/1", {"by": "me"})
    assert written.status == 200
    app = app_of(start)
    assert (await used(app, "identity", ME)).documents == 1
    assert (await used(app, "issuer", SUBJECT.ed_pub)).documents == 1
    again = await signed(anyone, STRANGER).push("wall/1", {"by": "other"}, written.json["hash"])
    assert again.status == 200
    assert (await used(app, "identity", ME)).documents == 0
    assert (await used(app, "identity", OTHER)).documents == 1
    assert (await used(app, "issuer", STRANGER.ed_pub)).documents == 1


async def test_elements_of_logs_are_limited(service: Service, start: Start) -> None:
    anyone = await service({"identity": {"logElements": 3}})
    me = signed(anyone)
    replies = [await me.request("POST", f"/push/logs/{ME}/1", ELEMENT) for _ in range(5)]
    assert [reply.status for reply in replies] == [200, 200, 200, 507, 507]
    assert replies[-1].json["quota"] == "identity.logElements"
    assert (await used(app_of(start), "identity", ME)).log_elements == 3


async def test_files_are_limited(service: Service) -> None:
    anyone = await service({"namespace": {"files": 1, "bytes": 10}})
    png = {"Content-Type": "image/png"}
    assert (await anyone.request("POST", "/push/photos/1", b"x" * 11, png)).json["quota"] == "namespace.bytes"
    assert (await anyone.request("POST", "/push/photos/1", b"x" * 10, png)).status == 200
    assert (await anyone.request("POST", "/push/photos/2", b"", png)).json["quota"] == "namespace.files"
    assert (await anyone.request("POST", "/push/photos/1", b"x" * 5, png)).status == 200


@pytest.mark.parametrize("url", ["folder"], indirect=True)
async def test_documents_pushed_before_quotas_are_counted(service: Service, start: Start) -> None:
    anyone = await service(None)
    me = signed(anyone)
    await me.push(f"users/{ME}/notes/1", {})
    for _ in range(199):
        await me.request("POST", f"/push/logs/{ME}/1", ELEMENT)
    await app_of(start).close()
    anyone = await service({"identity": {"documents": 1}})
    app = app_of(start)
    assert await used(app, "identity", ME) == Usage()
    with loop_time() as time:
        while not (await signed(anyone).request("GET", "/usage")).json["complete"]:
            time.now_s += COUNT_EVERY_S
    counted = await used(app, "identity", ME)
    assert counted[1:] == (1, 199, 0)
    assert counted.bytes > 199 * 500
    assert (await signed(anyone).push(f"users/{ME}/notes/2", {})).status == 507


INBOX = {"name": "inbox", "storagePath": "inbox/{identity}/{id}", **PUBLIC, "deletable": True}
NOTES = {"name": "notes", "storagePath": "users/{identity}/notes/{id}", **OWN, "deletable": True}
MAIL = {"name": "mail", "storagePath": "mail/{identity}/{id}", **PUBLIC, "requireAuth": True}
ACCESS = {
    "name": "access",
    "storagePath": "spaces/{spaceId}/_access",
    "readRoles": ["space:member"],
    "writeRoles": ["space:owner"],
}
MIXED = {
    "name": "mixed",
    "storagePath": "mixed/{spaceId}/{id}",
    "readRoles": ["public"],
    "writeRoles": ["space:member", "cap:write:mixed"],
}
THREAD = {**MIXED, "name": "thread", "storagePath": "threads/{spaceId}/{id}", "appendOnly": UNPROVEN}
ISSUERS = {"auth": {"spaces": {}, "trustedIssuers": [SUBJECT.ed_pub, STRANGER.ed_pub]}}


async def test_anonymous_writes_fill_no_quota_of_an_identity(service: Service, start: Start) -> None:
    photos = {**INBOX, "name": "photos", "storagePath": "photos/{identity}/{id}"} | {
        "allowedMimeTypes": ["image/*"]
    }
    threads = {**INBOX, "name": "threads", "storagePath": "threads/{identity}/{id}"} | {
        "appendOnly": UNPROVEN,
        "deletable": False,
    }
    anyone = await service({"identity": {"bytes": 10_000}}, collections=[INBOX, NOTES, photos, threads])
    for n in range(9):
        assert (await anyone.push(f"inbox/{ME}/{n}", {"text": "x" * 1_900})).status == 200
        image = {"Content-Type": "image/png"}
        stored = await anyone.request("POST", f"/push/photos/{ME}/{n}", b"x" * 1_900, image)
        assert stored.status == 200
        assert (await anyone.request("POST", f"/push/threads/{ME}/1", ELEMENT)).status == 200
    assert await used(app_of(start), "identity", ME) == Usage()
    assert (await used(app_of(start), "namespace", "")).documents == 9
    me = signed(anyone)
    assert (await me.push(f"users/{ME}/notes/1", {"text": "x" * 6_000})).status == 200
    # Nobody examines credentials where the public may write, so these count for nobody either.
    assert (await me.push(f"inbox/{ME}/mine", {})).status == 200
    assert (await used(app_of(start), "identity", ME)).documents == 1


async def test_writes_of_outsiders_fill_no_quota_of_a_space(service: Service, start: Start) -> None:
    anyone = await service(
        {"space": {"bytes": 10_000}},
        collections=[ACCESS, {**MIXED, "storagePath": "spaces/{spaceId}/mixed/{id}"}, THREAD],
        **ISSUERS,
    )
    me, other = signed(anyone), signed(anyone, STRANGER)
    assert (await me.push("spaces/club/_access", {"owner": ME, "members": []})).status == 200
    before = await used(app_of(start), "space", "club")
    assert before.documents == 1
    for n in range(9):
        assert (await other.push(f"spaces/club/mixed/{n}", {"text": "x" * 1_900})).status == 200
        assert (await other.request("POST", "/push/threads/club/1", ELEMENT)).status == 200
    assert await used(app_of(start), "space", "club") == before
    assert (await me.push("spaces/club/mixed/mine", {"text": "x" * 6_000})).status == 200


@pytest.mark.parametrize("url", ["folder"], indirect=True)
async def test_in_a_folder_a_write_counts_for_its_writer_and_the_space_of_members(
    service: Service, start: Start
) -> None:
    anyone = await service({}, collections=[ACCESS, MIXED, MAIL, NOTES], **ISSUERS)
    me, other = signed(anyone), signed(anyone, STRANGER)
    assert (await me.push("spaces/club/_access", {"owner": ME, "members": []})).status == 200
    app = app_of(start)
    # The first writer of a document is given back what the second one replaces.
    first = await other.push("mixed/club/1", {"text": "x" * 1_900})
    assert (await used(app, "space", "club")).documents == 1
    assert (await used(app, "identity", OTHER)).documents == 1
    await me.push("mixed/club/1", {}, first.json["hash"])
    assert (await used(app, "space", "club")).documents == 2
    assert await used(app, "identity", OTHER) == Usage()
    # So is it below the identity of somebody.
    mail = await other.push(f"mail/{ME}/1", {})
    assert mail.status == 200
    assert (await used(app, "identity", OTHER)).documents == 1
    await me.push(f"mail/{ME}/1", {"answered": True}, mail.json["hash"])
    assert await used(app, "identity", OTHER) == Usage()
    assert (await used(app, "identity", ME)).documents == 3


async def test_versions_that_others_made_fill_no_quota(service: Service, start: Start) -> None:
    inbox = {**INBOX, "history": {}}
    anyone = await service({"identity": {"bytes": 10_000}}, collections=[inbox, NOTES])
    me, base = signed(anyone), None
    for n in range(6):
        base = (await anyone.push(f"inbox/{ME}/1", {"n": n, "text": "x" * 1_700}, base)).json["hash"]
    assert (await me.request("DELETE", f"/push/inbox/{ME}/1?baseHash={base}")).status == 200
    assert await used(app_of(start), "identity", ME) == Usage()
    assert (await me.push(f"users/{ME}/notes/1", {"text": "x" * 6_000})).status == 200


@pytest.mark.parametrize("url", ["folder"], indirect=True)
async def test_an_earlier_version_counts_for_who_wrote_it(service: Service, start: Start) -> None:
    wall = {"name": "wall", "storagePath": "wall/{id}", **WALL, "history": {}, "deletable": True}
    anyone = await service({}, collections=[wall], **ISSUERS)
    me, other = signed(anyone), signed(anyone, STRANGER)
    base = (await me.push("wall/1", {"text": "x" * 3_000})).json["hash"]
    mine = await used(app_of(start), "identity", ME)
    base = (await other.push("wall/1", {"text": "x" * 2_000}, base)).json["hash"]
    kept = await used(app_of(start), "identity", ME)
    assert kept.documents == 0
    assert abs(kept.bytes - mine.bytes) < 400
    assert (await me.request("DELETE", f"/push/wall/1?baseHash={base}")).status == 200
    assert await used(app_of(start), "identity", ME) == kept
    assert (await used(app_of(start), "identity", OTHER)).bytes > 2_000


@pytest.mark.parametrize("url", ["folder"], indirect=True)
async def test_earlier_versions_give_way_to_new_data_the_oldest_first(service: Service, start: Start) -> None:
    notes = {**NOTES, "history": {"versions": 1000}}
    log = {"name": "log", "storagePath": "logs/{identity}/{id}", **OWN, "appendOnly": UNPROVEN}
    anyone = await service({"identity": {"bytes": 30_000}}, collections=[notes, log])
    me, base = signed(anyone), dict[str, str]()
    for n in range(10):
        for id_ in "ab":
            pushed = await me.push(f"users/{ME}/notes/{id_}", {"n": n, "text": "x" * 700}, base.get(id_))
            assert pushed.status == 200
            base[id_] = pushed.json["hash"]
    app = app_of(start)

    async def versions() -> list[int]:
        found = [await me.request("GET", f"/history/users/{ME}/notes/{id_}") for id_ in "ab"]
        return [len(reply.json["versions"]) for reply in found]

    assert await versions() == [10, 10]
    deleted = await me.request("DELETE", f"/push/users/{ME}/notes/a?baseHash={base['a']}")
    assert deleted.status == 200
    full = await versions()
    assert (await me.push(f"users/{ME}/notes/c", {"text": "x" * 12_000})).status == 200
    left = await versions()
    assert 0 < min(left) <= max(left) < min(full), "both have lost their oldest ones"
    assert abs(left[0] - left[1]) <= 1
    assert 28_000 < (await used(app, "identity", ME)).bytes <= 30_000
    assert (await me.request("POST", f"/push/logs/{ME}/1", {"data": {"text": "x" * 5_000}})).status == 200
    assert sum(await versions()) < sum(left)
    kept = await versions()
    over = await me.push(f"users/{ME}/notes/d", {"text": "x" * 29_000})
    assert (over.status, over.json["quota"]) == (507, "identity.bytes")
    assert await versions() == kept, "a rejected write deletes nothing"


@pytest.mark.parametrize("url", ["folder"], indirect=True)
async def test_a_write_displaces_at_most_100_versions(service: Service) -> None:
    notes = {**NOTES, "history": {"versions": 1000}}
    anyone = await service({"identity": {"bytes": 100_000}}, collections=[notes])
    me, base = signed(anyone), None
    for n in range(150):
        base = (await me.push(f"users/{ME}/notes/a", {"n": n, "text": "x" * 50}, base)).json["hash"]
    assert len((await me.request("GET", f"/history/users/{ME}/notes/a")).json["versions"]) == 150
    large = await me.push(f"users/{ME}/notes/b", {"text": "x" * 95_000})
    assert large.status == 507
    assert len((await me.request("GET", f"/history/users/{ME}/notes/a")).json["versions"]) == 150
    small = await me.push(f"users/{ME}/notes/b", {"text": "x" * 50_000})
    assert small.status == 200
    left = len((await me.request("GET", f"/history/users/{ME}/notes/a")).json["versions"])
    assert 50 <= left < 150


async def test_caller_sees_the_usage_of_itself_and_its_spaces(service: Service) -> None:
    anyone = await service({"identity": {"documents": 5, "bytes": 9000}, "space": {"documents": 3}})
    me = signed(anyone)
    await me.push(f"users/{ME}/notes/1", {})
    other = signed(anyone, STRANGER)
    await other.push("spaces/club/_access", {"owner": OTHER, "members": [ME]})
    await other.push("spaces/club/1", {})
    reply = await me.request("GET", "/usage?spaces=club")
    assert reply.status == 200
    usage = reply.json
    assert usage["identity"] == ME
    assert usage["used"]["documents"] == 1
    assert usage["used"]["bytes"] > 0
    assert usage["allowed"] == {"bytes": 9000, "documents": 5}
    assert usage["spaces"]["club"]["used"]["documents"] == 2
    assert usage["spaces"]["club"]["allowed"] == {"documents": 3}
    assert usage["complete"] in (True, False)
    assert (await me.request("GET", "/usage?spaces=other")).status == 403
    assert (await anyone.request("GET", "/usage")).status == 401


async def test_without_quotas_there_is_no_usage(service: Service) -> None:
    anyone = await service(None)
    assert (await anyone.request("GET", "/usage")).status == 404


async def test_every_namespace_reports_the_same(service: Service) -> None:
    inner = {"name": "inner", "storagePath": "inner/{identity}/{id}", **OWN}
    anyone = await service({}, namespaces={"acme": {"collections": [inner]}})
    me = signed(anyone)
    await me.push(f"users/{ME}/notes/1", {})
    assert (await me.request("GET", "/acme/usage")).json["used"]["documents"] == 1


@pytest.mark.parametrize("url", ["memory"], indirect=True)
async def test_all_parts_of_a_log_count_and_are_counted_again(service: Service, start: Start) -> None:
    anyone = await service({})
    me = signed(anyone)
    for _ in range(60):
        assert (await me.request("POST", f"/push/logs/{ME}/1", ELEMENT)).status == 200
    app = app_of(start)
    counted = await used(app, "identity", ME)
    assert counted[1:] == (0, 60, 0)
    assert counted.bytes > 60 * 500
    with loop_time() as time:
        while not (await me.request("GET", "/usage")).json["complete"]:
            time.now_s += COUNT_EVERY_S
    assert await used(app, "identity", ME) == counted


def test_only_a_folder_counts_for_issuers() -> None:
    collections = [{"name": "public", "storagePath": "public/{id}", **PUBLIC}]
    members = {"version": 1, "collections": collections, "quotas": {"issuer": {"documents": 1}}}
    with pytest.raises(ConfigError, match=r"quotas\.issuer"):
        parse({**members, "store": "memory:"})
    assert parse({**members, "store": "file:./data"}).quotas is not None


async def test_usage_stays_exact_when_data_expires_or_is_collected_or_erased(
    service: Service, start: Start
) -> None:
    brief = {"name": "brief", "storagePath": "brief/{identity}/{id}", **OWN, "ttlMs": 1}
    notes = {"name": "notes", "storagePath": "users/{identity}/notes/{id}", **OWN, "history": {"versions": 3}}
    log = {"name": "log", "storagePath": "users/{identity}/log/{id}", **OWN, "appendOnly": UNPROVEN}
    photos = {
        "name": "photos",
        "storagePath": "users/{identity}/photos/{id}",
        **OWN,
        "allowedMimeTypes": ["image/*"],
    }
    anyone = await service({}, collections=[brief, notes, log, photos])
    app = app_of(start)
    people = [Signed(anyone.base, anyone.session, keys, root_device(keys)) for keys in (SUBJECT, STRANGER)]
    for client in people:
        me = client.keys.user_id
        for n in range(3):
            written = await client.push(f"users/{me}/notes/{n}", {"text": "x" * 100 * n})
            assert (await client.push(f"users/{me}/notes/{n}", {"n": n}, written.json["hash"])).status == 200
            for _ in range(10):
                assert (await client.request("POST", f"/push/users/{me}/log/{n}", ELEMENT)).status == 200
            target = f"/push/users/{me}/photos/{n}"
            headers = client.headers("POST", target, b"") | {"Content-Type": "image/png"}
            photo = await anyone.request("POST", target, b"x" * 700 * n, headers)
            assert photo.status == 200
    assert (await used(app, "identity", ME))[1:] == (3, 30, 3)
    left = await used(app, "identity", OTHER)
    assert (await people[0].push(f"brief/{ME}/1", {"text": "gone"})).status == 200
    while not await app.jobs.ttl_sweeper.sweep():
        pass
    assert (await used(app, "identity", ME))[1:] == (3, 30, 3)
    await GarbageCollector(app.store, wall_clock_ms, lambda kind, name: None, grace_ms=MIN_GRACE_MS).run()
    assert (await used(app, "identity", ME))[1:] == (3, 30, 3)
    for prefix, amounts in (("photos", (3, 30, 0)), ("log", (3, 0, 0)), ("notes/1", (2, 0, 0))):
        await erase(app, EraseRequest("prefix", f"users/{ME}/{prefix}"))
        assert (await used(app, "identity", ME))[1:] == amounts
        assert await used(app, "identity", OTHER) == left
    both = await used(app, "namespace", "")
    assert both == (await used(app, "identity", ME)).plus(left)
    await erase(app, EraseRequest("identity", ME))
    assert await used(app, "identity", ME) == Usage()
    assert await used(app, "namespace", "") == left
