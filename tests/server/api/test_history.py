"""Earlier versions of documents: what is listed, pulled and restored, and what is kept how long."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from math import inf
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, SUBJECT, Browser, Reply, Signed, Start, root_device
from support.collections import NOTES, collection
from support.watched_listing import Listing, WatchedIndex, WatchedMemoryStore

from pysync.client import Client
from pysync.engine.history import PREFIX, entries_of
from pysync.plugins import PluginRequest, PullResponse
from pysync.server.process import background
from pysync.store import RELIST_MS, Store, StoredObject, Subject
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

KEPT = {**NOTES, "history": {"versions": 3}, "deletable": True, "listable": True}


@pytest.fixture
def listing() -> Listing:
    return Listing()


@pytest.fixture(params=["memory", "local"])
async def kept(
    request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock, listing: Listing
) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield WatchedMemoryStore(listing, clock)
        return
    store: Any = await LocalStore.open_folder(tmp_path / "data", clock)
    store.time_index = WatchedIndex(listing, store.time_index)
    yield store
    await store.close()


@pytest.fixture
async def anybody(start: Start, session: aiohttp.ClientSession, kept: Store, clock: FakeClock) -> Browser:
    return Browser(await start({"collections": [KEPT]}, kept, now_ms=clock), session)


async def delete(browser: Browser, key: str, base: str) -> Reply:
    return await browser.request("DELETE", f"/push/{key}?baseHash={base}")


async def push_each(browser: Browser, clock: FakeClock, key: str, count: int, first: int = 0) -> list[str]:
    """Push versions 0, 1, ... of a document; their hashes."""
    hash_ = (await browser.pull(key)).json["hash"] or None
    hashes = []
    for n in range(first, first + count):
        clock.now_ms += 1
        hash_ = (await browser.push(key, {"n": n}, hash_)).json["hash"]
        hashes.append(hash_)
    return hashes


async def versions(browser: Browser, key: str = "notes/a") -> list[dict[str, Any]]:
    reply = await browser.request("GET", f"/history/{key}")
    assert reply.status == 200, reply
    found: list[dict[str, Any]] = reply.json["versions"]
    return found


async def test_replaced_version_is_listed_and_pulled(anybody: Browser, clock: FakeClock) -> None:
    assert await versions(anybody) == []
    hashes = await push_each(anybody, clock, "notes/a", 3)
    now = clock.now_ms
    assert await versions(anybody) == [
        {"hash": hashes[2], "timestamp": now, "size": 7},
        {"hash": hashes[1], "timestamp": now - 1, "size": 7, "replaced": now},
        {"hash": hashes[0], "timestamp": now - 2, "size": 7, "replaced": now - 1},
    ]
    for n, hash_ in enumerate(hashes):
        reply = await anybody.pull(f"notes/a?version={hash_}")
        assert (reply.json["data"], reply.json["hash"]) == ({"n": n}, hash_)
        assert reply.headers["ETag"] == f'"{hash_}"'
        known = await anybody.pull(f"notes/a?version={hash_}", {"If-None-Match": f'"{hash_}"'})
        assert known.status == 304
    assert (await anybody.pull(f"notes/a?version={'0' * 64}")).error == (404, "version_not_found")
    assert (await anybody.pull(f"notes/b?version={hashes[0]}")).error == (404, "version_not_found")
    assert (await anybody.request("GET", "/list/notes")).json["items"] == ["a"]


async def test_a_deleted_document_is_restored_from_its_history(anybody: Browser, clock: FakeClock) -> None:
    hashes = await push_each(anybody, clock, "notes/a", 2)
    clock.now_ms += 1
    assert (await delete(anybody, "notes/a", hashes[1])).status == 200
    assert [(each["hash"], each["replaced"]) for each in await versions(anybody)] == [
        (hashes[1], clock.now_ms),
        (hashes[0], clock.now_ms - 1),
    ]
    old = (await anybody.pull(f"notes/a?version={hashes[0]}")).json["data"]
    clock.now_ms += 1
    assert (await anybody.push("notes/a", old)).json["hash"] == hashes[0]
    assert [each["hash"] for each in await versions(anybody)] == [hashes[0], hashes[1], hashes[0]]
    assert (await anybody.pull("notes/a")).json["data"] == {"n": 0}


async def test_no_more_is_listed_than_is_configured_and_little_more_is_kept(
    anybody: Browser, clock: FakeClock, kept: Store
) -> None:
    hashes = await push_each(anybody, clock, "notes/a", 40)
    assert [each["hash"] for each in await versions(anybody)] == hashes[:-5:-1]
    assert (await anybody.pull(f"notes/a?version={hashes[-5]}")).status == 404
    assert len(await entries_of(kept, "notes/a")) <= 3 + 8


async def test_a_sweep_costs_what_has_expired(
    start: Start,
    session: aiohttp.ClientSession,
    kept: Store,
    clock: FakeClock,
    listing: Listing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder has an index, and of other stores each sweep lists a bounded number of keys."""
    monkeypatch.setattr(background, "MAX_LISTED", 7)
    members = {"collections": [{**KEPT, "history": {"forMs": 10_000_000}}]}
    anybody = Browser(await start(members, kept, now_ms=clock), session)
    (app,) = start.apps  # type: ignore[attr-defined]
    await app.jobs.history_sweeper.sweep()
    for n in range(3):
        await push_each(anybody, clock, f"notes/old{n}", 3)
    clock.now_ms += 10_000_001
    for n in range(20):
        await push_each(anybody, clock, f"notes/new{n}", 2)
    stored = Counter([listed.key.split("/")[-2] async for listed in kept.walk(PREFIX)])
    costs = []
    for _ in range(15):
        listing.keys.clear()
        await app.jobs.history_sweeper.sweep()
        costs.append(len(listing.keys))
    left = Counter([listed.key.split("/")[-2] async for listed in kept.walk(PREFIX)])
    assert left == {name: 1 if "old" in name else count for name, count in stored.items()}
    if kept.time_index is None:
        assert max(costs) == 7
        assert costs[-1] == 0, "it has listed everything, and rests"
    else:
        assert costs[0] == 9
        assert sum(costs[1:]) == 0


async def test_a_version_goes_when_its_time_is_over(
    start: Start, session: aiohttp.ClientSession, kept: Store, clock: FakeClock
) -> None:
    members = {"collections": [{**KEPT, "history": {"forMs": 1000}}]}
    anybody = Browser(await start(members, kept, now_ms=clock), session)
    hashes = await push_each(anybody, clock, "notes/a", 3)
    gone = await push_each(anybody, clock, "notes/b", 2)
    await delete(anybody, "notes/b", gone[1])
    (app,) = start.apps  # type: ignore[attr-defined]
    clock.now_ms += 999
    assert await app.jobs.history_sweeper.sweep() > 0, "what was replaced first"
    assert [each["hash"] for each in await versions(anybody)] == [hashes[2]]
    assert [each["hash"] for each in await versions(anybody, "notes/b")] == [gone[1], gone[0]]
    clock.now_ms += 2
    assert [each["hash"] for each in await versions(anybody)] == hashes[2:]
    assert await versions(anybody, "notes/b") == []
    clock.now_ms += RELIST_MS
    await app.jobs.history_sweeper.sweep()
    assert await app.jobs.history_sweeper.sweep() == 0
    assert await entries_of(kept, "notes/b") == []
    (left,) = await entries_of(kept, "notes/a")
    assert left.endswith(".w"), "who wrote what is stored"
    body = await kept.get(left)
    assert isinstance(body, StoredObject)
    assert b"object" not in body.body


async def test_a_version_that_two_namespaces_keep_goes_when_the_time_of_the_first_is_over(
    start: Start, session: aiohttp.ClientSession, kept: Store, clock: FakeClock
) -> None:
    members = {
        "collections": [{**KEPT, "history": {"forMs": 20_000_000}}],
        "namespaces": {"acme": {"collections": [{**KEPT, "history": {"forMs": 1_000}}]}},
    }
    anybody = Browser(await start(members, kept, now_ms=clock), session)
    hashes = await push_each(anybody, clock, "notes/a", 2)
    (app,) = start.apps  # type: ignore[attr-defined]
    clock.now_ms += 10_000_000
    await app.jobs.history_sweeper.sweep()
    assert [each["hash"] for each in await versions(anybody)] == hashes[::-1]
    clock.now_ms += 10_000_001
    assert await app.jobs.history_sweeper.sweep() > 0
    assert [each[-1] for each in await entries_of(kept, "notes/a")] == ["w"]


async def test_a_collection_without_history_has_no_route_and_keeps_nothing(
    start: Start, session: aiohttp.ClientSession, kept: Store, clock: FakeClock
) -> None:
    anybody = Browser(await start({"collections": [NOTES]}, kept, now_ms=clock), session)
    hashes = await push_each(anybody, clock, "notes/a", 2)
    assert (await anybody.request("GET", "/history/notes/a")).status == 404
    assert (await anybody.pull(f"notes/a?version={hashes[0]}")).json["hash"] == hashes[1]
    assert [each.key async for each in kept.walk(PREFIX)] == []


def signed(base: str, session: aiohttp.ClientSession, keys: Any) -> Signed:
    return Signed(base, session, keys, root_device(keys))


async def test_it_says_who_pushed_each_version(
    start: Start, session: aiohttp.ClientSession, kept: Store, clock: FakeClock
) -> None:
    known = collection("known", requireAuth=True, history={"versions": 2})
    base = await start({"collections": [known]}, kept)
    devices = [signed(base, session, keys) for keys in (ISSUER, SUBJECT)]
    hash_ = None
    for n in range(30):
        hash_ = (await devices[n % 2].push("known/a", {"n": n}, hash_)).json["hash"]
    found = await versions(devices[0], "known/a")
    users = [ISSUER.user_id, SUBJECT.user_id]
    assert [each["identity"] for each in found] == [users[1], users[0], users[1]]


async def test_history_needs_a_history_role(
    start: Start, session: aiohttp.ClientSession, kept: Store, clock: FakeClock
) -> None:
    guarded = collection("guarded", requireAuth=True, history={}, historyRoles=["keeper"])
    members = {"collections": [guarded], "auth": {"identityRoles": {ISSUER.user_id: ["keeper"]}}}
    base = await start(members, kept)
    keeper, other = signed(base, session, ISSUER), signed(base, session, SUBJECT)
    first = (await other.push("guarded/a", {"n": 1})).json["hash"]
    second = (await other.push("guarded/a", {"n": 2}, first)).json["hash"]
    for browser, status in ((keeper, 200), (other, 403), (Browser(base, session), 401)):
        assert (await browser.request("GET", "/history/guarded/a")).status == status
        for hash_ in (first, second):
            assert (await browser.pull(f"guarded/a?version={hash_}")).status == status
    assert (await other.pull("guarded/a")).json["hash"] == second


SPACES = {"auth": {"spaces": {"accessPath": "spaces/{spaceId}/_access"}}}
ACCESS = {"readRoles": ["space:member"], "writeRoles": ["space:owner"], "history": {}}


@pytest.mark.parametrize(
    ("collections", "may_member", "may_member_with"),
    [
        ([collection("access", "spaces/{spaceId}/_access", **ACCESS)], False, None),
        ([collection("docs", "spaces/{spaceId}/{doc}", **ACCESS)], False, None),
        (
            [collection("access", "spaces/{spaceId}/_access", **ACCESS, historyRoles=["space:member"])],
            True,
            None,
        ),
        (
            [
                collection("access", "spaces/{spaceId}/_access", **ACCESS),
                collection("docs", "spaces/{spaceId}/{doc}", **ACCESS),
            ],
            False,
            True,
        ),
    ],
    ids=["at the path", "a wider template", "named roles", "beside other documents"],
)
async def test_earlier_lists_of_members_are_for_the_owner_of_a_space(
    start: Start,
    session: aiohttp.ClientSession,
    kept: Store,
    collections: list[dict[str, Any]],
    may_member: bool,
    may_member_with: bool | None,
) -> None:
    base = await start({"collections": collections, **SPACES}, kept)
    owner, member = signed(base, session, ISSUER), signed(base, session, SUBJECT)
    data = {"owner": ISSUER.user_id, "members": ["former"]}
    for key, allowed in (("spaces/s/_access", may_member), ("spaces/s/plan", may_member_with)):
        if allowed is not None:
            first = (await owner.push(key, data)).json["hash"]
            second = await owner.push(key, {**data, "members": [SUBJECT.user_id]}, first)
            assert second.status == 200
    for key, allowed in (("spaces/s/_access", may_member), ("spaces/s/plan", may_member_with)):
        if allowed is not None:
            assert (await member.pull(key)).status == 200
            for browser, status in ((owner, 200), (member, 200 if allowed else 403)):
                assert (await browser.request("GET", f"/history/{key}")).status == status
                assert (await browser.pull(f"{key}?version={first}")).status == status


async def test_a_response_that_depends_on_the_caller_is_not_public(
    start: Start, session: aiohttp.ClientSession, kept: Store
) -> None:
    cached = {**KEPT, "cacheDurationMs": 1000, "historyRoles": ["keeper"]}
    members = {"collections": [cached], "auth": {"identityRoles": {ISSUER.user_id: ["keeper"]}}}
    base = await start(members, kept)
    keeper = signed(base, session, ISSUER)
    hash_ = (await keeper.push("notes/a", {"n": 1})).json["hash"]
    assert "public" in (await keeper.pull("notes/a")).headers["Cache-Control"]
    assert "public" not in (await keeper.pull(f"notes/a?version={hash_}")).headers["Cache-Control"]
    listed = await keeper.request("GET", "/history/notes/a")
    assert listed.headers["Cache-Control"] == "no-store"


async def test_hidden_members_are_hidden_in_old_versions(
    start: Start, session: aiohttp.ClientSession, kept: Store
) -> None:
    hiding = collection(
        "hiding", requireAuth=True, history={}, fieldPermissions={"secret": {"readRoles": ["chief"]}}
    )
    members = {"collections": [hiding], "auth": {"identityRoles": {ISSUER.user_id: ["chief"]}}}
    base = await start(members, kept)
    chief, other = signed(base, session, ISSUER), signed(base, session, SUBJECT)
    first = (await chief.push("hiding/a", {"n": 1, "secret": "s"})).json["hash"]
    second = (await chief.push("hiding/a", {"n": 2, "secret": "long"}, first)).json["hash"]
    plain = await versions(chief, "hiding/a")
    seen = await versions(other, "hiding/a")
    assert [each["hash"] for each in plain] == [second, first]
    assert {first, second}.isdisjoint(each["hash"] for each in seen)
    assert [each["size"] for each in seen] == [7, 7]
    assert seen[0]["hash"] == (await other.pull("hiding/a")).json["hash"]
    reply = await other.pull(f"hiding/a?version={seen[1]['hash']}")
    assert (reply.json["data"], reply.json["hash"]) == ({"n": 1}, seen[1]["hash"])
    assert (await other.pull(f"hiding/a?version={first}")).error == (404, "version_not_found")


async def test_author_proofs_come_with_their_versions(
    start: Start, session: aiohttp.ClientSession, kept: Store
) -> None:

    base = await start({"collections": [KEPT]}, kept)
    async with Client(base, keys=ISSUER) as client:
        first = await client.push("notes/a", {"n": 1}, sign_author=True)
        await client.push("notes/a", {"n": 2}, first.hash)
        newest, oldest = await client.history("notes/a")
        pulled = await client.pull("notes/a", version=first.hash)
    assert (newest.author_pubkey, oldest.author_pubkey) == (None, ISSUER.ed_pub)
    assert (pulled.author_pubkey, pulled.data) == (ISSUER.ed_pub, {"n": 1})
    assert oldest.replaced_ms == newest.timestamp_ms


class Intercepting:
    name = "intercepting"

    async def intercept_pull(self, request: PluginRequest) -> PullResponse | None:
        return PullResponse(b'{"data":{},"hash":""}')


async def test_a_plugin_that_answers_pulls_hides_what_is_stored(
    start: Start, session: aiohttp.ClientSession, kept: Store
) -> None:
    anybody = Browser(await start({"collections": [KEPT]}, kept, plugins=[Intercepting()]), session)
    hash_ = (await anybody.push("notes/a", {"n": 1})).json["hash"]
    assert (await anybody.request("GET", "/history/notes/a")).status == 404
    assert (await anybody.pull(f"notes/a?version={hash_}")).status == 404


async def test_a_damaged_entry_hides_one_version_and_a_damaged_document_none(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    store = MemoryStore()
    anybody = Browser(await start({"collections": [KEPT]}, store, now_ms=clock), session)
    hashes = await push_each(anybody, clock, "notes/a", 3)
    last = (await entries_of(store, "notes/a"))[-1]
    await store.put(last, b"{")
    assert [each["hash"] for each in await versions(anybody)] == [hashes[2], hashes[0]]
    await store.put("notes/a", b"{")
    clock.now_ms += 1
    again = (await anybody.push("notes/a", {"n": "again"}, "")).json["hash"]
    assert [each["hash"] for each in await versions(anybody)] == [again, hashes[0]]


async def test_keys_that_leave_no_room_for_entries_are_rejected(
    start: Start, session: aiohttp.ClientSession, kept: Store
) -> None:
    deep = {**KEPT, "storagePath": "notes/{a}/{b}/{c}/{d}"}
    anybody = Browser(await start({"collections": [deep]}, kept), session)
    long = "/".join(["x" * 240] * 3)
    assert (await anybody.push(f"notes/{long}/{'x' * 171}", {"n": 1})).status == 200
    assert (await anybody.push(f"notes/{long}/{'x' * 172}", {"n": 1})).error[0] == 400


async def test_of_racing_pushes_only_the_one_that_was_made_leaves_a_trace(
    anybody: Browser, kept: Store, clock: FakeClock
) -> None:

    (first,) = await push_each(anybody, clock, "notes/a", 1)
    clock.now_ms += 1
    replies = await asyncio.gather(*(anybody.push("notes/a", {"x": n}, first) for n in range(8)))
    assert sorted(reply.status for reply in replies) == [200] + [409] * 7
    assert len(await entries_of(kept, "notes/a")) == 2
    assert len(await versions(anybody)) == 2


async def test_versions_count_for_no_quota_and_leave_the_counts_exact(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path, clock: FakeClock
) -> None:
    members = {
        "store": f"file:{tmp_path / 'data'}",
        "collections": [KEPT],
        "quotas": {"namespace": {"documents": 1}},
    }
    anybody = Browser(await start(members, now_ms=clock), session)
    store = start.apps[-1].store  # type: ignore[attr-defined]
    hashes = await push_each(anybody, clock, "notes/a", 20)
    assert (await anybody.push("notes/b", {"n": 1})).status == 507
    account = Subject("namespace", "")
    assert (await store.ledger.used([account]))[account].documents == 1
    assert (await delete(anybody, "notes/a", hashes[-1])).status == 200
    assert (await store.ledger.used([account]))[account].documents == 0
    assert (await anybody.push("notes/b", {"n": 1})).status == 200


class CountingStore(LocalStore):
    """Notes at which tick of the event loop entries of histories are read."""

    ticks = 0

    async def get_many(self, keys: Sequence[str], max_bytes: float = inf) -> dict[str, StoredObject | None]:
        self.read_at.append(self.ticks)
        return await super().get_many(keys, max_bytes)

    async def count(self) -> None:
        self.read_at: list[int] = []
        while True:
            self.ticks += 1
            await asyncio.sleep(0)


@pytest.mark.parametrize("path", ["/history/notes/a", f"/pull/notes/a?version={'0' * 64}"])
async def test_others_are_served_between_the_versions_of_a_long_history(
    start: Start, session: aiohttp.ClientSession, folder: Path, path: str
) -> None:
    store = await CountingStore.open_folder(folder)
    settings = {**NOTES, "history": {"versions": 100}}
    browser = Browser(await start({"collections": [settings]}, store), session)
    hash_ = None
    for n in range(10):
        hash_ = (await browser.push("notes/a", {"n": n, "text": "x" * 800_000}, hash_)).json["hash"]
    counting = asyncio.create_task(store.count())
    assert (await browser.request("GET", path)).status == (404 if "version" in path else 200)
    counting.cancel()
    assert len(store.read_at) >= 4
    assert len(set(store.read_at)) == len(store.read_at)
    await store.close()
