"""The client's calls that read many things at once, against the service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.clients import ISSUER, STRANGER, SUBJECT, Start, minted_at, root_device
from support.collections import OWN, collection
from support.faulty_store import FaultyStore

from pysync.auth import issuing
from pysync.client import (
    Client,
    CollectionInfo,
    PullResult,
    RetryPolicy,
    Unreachable,
    fetch_server_config,
    read_spaces_access,
)
from pysync.errors import (
    BadRequest,
    DocumentCorrupt,
    Forbidden,
    HashesNotAvailable,
    InvalidAfter,
    InvalidKnown,
    InvalidPathParameter,
    NotFound,
    StoreUnavailable,
    TooManyCollections,
    Unauthorized,
)
from pysync.store.memory import MemoryStore

SPACE = {"readRoles": ["space:member"], "writeRoles": ["space:owner"]}
NOTES: dict[str, Any] = collection("notes", listable=True)
COLLECTIONS: list[dict[str, Any]] = [
    NOTES,
    collection("top", "{id}", listable=True),
    collection("own", "users/{identity}/{id}", listable=True, **OWN),
    collection("profile", "users/{identity}", **OWN),
    {
        "name": "log",
        "storagePath": "log/{id}",
        "appendOnly": {"field": "entries"},
        "ttlMs": 5,
        "pushOnly": True,
    },
    collection("title", "boards/{id}", bundle="board"),
    collection("plan", "boards/{id}", bundle="board"),
    {"name": "spaceaccess", "storagePath": "spaces/{spaceId}/_access", **SPACE},
]
SERVICE: dict[str, Any] = {
    "collections": COLLECTIONS,
    "namespaces": {"acme": {"collections": [{**NOTES, "storagePath": "acme/{id}"}]}},
    "server": {"mountPath": "/v1"},
    "configEndpoint": {"auth": "role-filtered"},
    "auth": {"trustedIssuers": [ISSUER.ed_pub], "spaces": {}},
    "maxCollectionsPerBatch": 4,
}
OWNER = root_device(ISSUER)


def client(base: str, **options: Any) -> Client:
    return Client(base + "/v1", **options)


def owner(base: str, **options: Any) -> Client:
    return client(base, keys=ISSUER, certificate=OWNER, **options)


async def names(listing: AsyncIterator[str]) -> list[str]:
    return [name async for name in listing]


async def test_a_list_goes_on_over_all_pages(start: Start) -> None:
    store = MemoryStore()
    base = await start(SERVICE, store=store)
    wanted = [f"n{number:02}" for number in range(25)]
    for name in wanted:
        await store.put(f"notes/{name}", b"{}")
        await store.put(f"acme/{name}", b"{}")
    async with client(base) as anyone, Client(base, namespace="acme") as namespaced:
        assert await names(anyone.list("notes")) == wanted
        assert await names(anyone.list("notes", page_size=10)) == wanted
        assert await names(anyone.list("notes", page_size=5)) == wanted
        assert await names(anyone.list("notes", after="n20", page_size=2)) == wanted[21:]
        assert await names(anyone.list()) == []
        assert await names(namespaced.list("acme", page_size=7)) == wanted
        with pytest.raises(InvalidAfter):
            await names(anyone.list("notes", after="a/b"))


async def test_a_list_requests_no_page_that_nobody_reads(start: Start) -> None:
    store = FaultyStore(MemoryStore())
    base = await start(SERVICE, store=store)
    for name in "abc":
        await store.put(f"notes/{name}", b"{}")
    async with client(base) as anyone:
        listing = anyone.list("notes", page_size=2)
        assert [await anext(listing), await anext(listing)] == ["a", "b"]
        store.fail("list")
        await listing.aclose()  # type: ignore[attr-defined]


async def test_a_signed_caller_lists_what_is_its_own(start: Start) -> None:
    async with owner(await start(SERVICE)) as mine:
        await mine.push(f"users/{ISSUER.user_id}/a", {"n": 1})
        assert await names(mine.list(f"users/{ISSUER.user_id}")) == ["a"]
        with pytest.raises(Forbidden):
            await names(mine.list(f"users/{SUBJECT.user_id}"))


async def test_a_bundle_comes_as_its_members(start: Start) -> None:
    async with client(await start(SERVICE)) as anyone:
        pushed = await anyone.push("boards/b1/title", {"text": "x"})
        members = await anyone.pull_bundle("boards/b1")
    assert list(members) == ["title", "plan"]
    assert (members["title"].data, members["title"].hash) == ({"text": "x"}, pushed.hash)
    assert (members["plan"].data, members["plan"].hash) == ({}, "")
    assert members["title"].timestamp_ms >= pushed.timestamp_ms


async def test_a_batch_holds_documents_and_the_rejections_that_pulls_would_raise(start: Start) -> None:
    store = MemoryStore()
    base = await start(SERVICE, store=store)
    await store.put("notes/broken", b"{")
    async with owner(base) as mine:
        note = await mine.push("notes/a", {"n": "é"}, sign_author=True)
        profile = await mine.push(f"users/{ISSUER.user_id}", {"me": 1})
        batch = await mine.batch_pull(
            ["profile", "notes", "none"], {"notes": [{"id": "a"}, {"id": "broken"}], "none": [{}]}
        )
        (own,) = batch["profile"]
        first, second = batch["notes"]
        assert isinstance(own, PullResult)
        assert (own.data, own.hash) == ({"me": 1}, profile.hash)
        assert isinstance(first, PullResult)
        pulled = await mine.pull("notes/a")
        assert (first.data, first.hash, first.author_pubkey) == ({"n": "é"}, note.hash, pulled.author_pubkey)
        assert isinstance(second, DocumentCorrupt)
        assert isinstance(batch["none"][0], NotFound)


async def test_entries_of_one_collection_are_aligned_with_the_request(start: Start) -> None:
    store = FaultyStore(MemoryStore())
    async with client(await start(SERVICE, store=store)) as anyone:
        await anyone.push("notes/a", {"n": 1})
        first, second, third, fourth = await anyone.batch_pull_many(
            "notes", [{"id": "none"}, {"id": "a"}, {"id": "a b"}, {}]
        )
        assert isinstance(first, PullResult)
        assert (first.data, first.hash) == ({}, "")
        assert isinstance(second, PullResult)
        assert second.data == {"n": 1}
        assert isinstance(third, InvalidPathParameter)
        assert isinstance(fourth, BadRequest)
        assert str(fourth) == "Missing required path parameter"
        assert await anyone.batch_pull_many("notes", []) == []
        with pytest.raises(TooManyCollections):
            await anyone.batch_pull_many("notes", [{"id": "a"}] * 5)
        store.fail("get")
        (failed,) = await anyone.batch_pull_many("notes", [{"id": "fresh"}])
        assert isinstance(failed, StoreUnavailable)


async def test_known_versions_come_back_without_data(start: Start) -> None:
    async with client(await start(SERVICE)) as anyone:
        same, changed = await anyone.push("notes/a", {"n": 1}), await anyone.push("notes/b", {"n": 1})
        newer = await anyone.push("notes/b", {"n": 2}, changed.hash)
        params = [{"id": name} for name in ("a", "b", "a", "none")]
        known = [same.hash, changed.hash, None, ""]
        many = await anyone.batch_pull_many("notes", params, known)
        batch = await anyone.batch_pull(["notes"], {"notes": params}, known={"notes": known})
        for entries in (many, batch["notes"]):
            pulled = [entry for entry in entries if isinstance(entry, PullResult)]
            assert [entry.unchanged for entry in pulled] == [True, False, False, False]
            assert [entry.hash for entry in pulled] == [same.hash, newer.hash, same.hash, ""]
            assert [entry.data for entry in pulled] == [{}, {"n": 2}, {"n": 1}, {}]
        with pytest.raises(InvalidKnown):
            await anyone.batch_pull_many("notes", params, known[:3])


async def test_lists_with_hashes_iterate_over_all_pages(start: Start) -> None:
    async with client(await start(SERVICE)) as anyone:
        pushed = {f"n{n}": (await anyone.push(f"notes/n{n}", {"n": n})).hash[:16] for n in range(5)}
        assert [item async for item in anyone.list_hashes("notes", page_size=2)] == [*pushed.items()]
        assert dict([item async for item in anyone.list_hashes("notes", after="n3")]) == {"n4": pushed["n4"]}
    async with client(await start(SERVICE, FaultyStore(MemoryStore()))) as remote:
        with pytest.raises(HashesNotAvailable):
            _ = [item async for item in remote.list_hashes("notes")]
    async with answering({"items": ["a"], "hasMore": False}) as base, Client(base) as older:
        assert [item async for item in older.list_hashes("notes")] == [("a", None)]


async def test_a_namespaced_client_reads_batches_of_its_namespace(start: Start) -> None:
    base = await start(SERVICE)
    async with Client(base, namespace="acme", keys=ISSUER, certificate=OWNER) as namespaced:
        await namespaced.push("acme/a", {"n": 1})
        (entry,) = await namespaced.batch_pull_many("notes", [{"id": "a"}])
        assert isinstance(entry, PullResult)
        assert entry.data == {"n": 1}
        assert [found.name for found in (await namespaced.server_config()).collections] == ["notes"]


async def test_access_to_spaces_leaves_out_what_failed_and_says_why(start: Start) -> None:
    store = FaultyStore(MemoryStore())
    base = await start(SERVICE, store=store)
    async with owner(base) as mine, client(base, keys=STRANGER, certificate=root_device(STRANGER)) as other:
        access = {"v": 1, "owner": ISSUER.user_id, "members": [ISSUER.user_id]}
        await mine.push("spaces/mine/_access", access)
        await other.push("spaces/theirs/_access", {**access, "owner": STRANGER.user_id, "members": []})
        read = await read_spaces_access(mine, ["mine", "theirs", "none", "mine"])
        assert read == {"mine": access}
        assert {space: type(error) for space, error in read.errors.items()} == {
            "theirs": Forbidden,
            "none": Forbidden,
        }
        assert await read_spaces_access(mine, []) == {}


async def test_the_manifest_is_read_with_the_callers_rights(start: Start) -> None:
    base = await start(SERVICE)
    open_to_all = ["notes", "top", "title", "plan"]
    fetched = await fetch_server_config(base + "/v1")
    assert [found.name for found in fetched.collections] == open_to_all
    assert [found.name for found in fetched.namespaces["acme"]] == ["notes"]
    headers = {"Authorization": root_device(ISSUER).authorization}
    as_owner = await fetch_server_config(base + "/v1", headers=headers)
    names_listed = [found.name for found in as_owner.collections]
    assert names_listed == ["notes", "top", "own", "profile", "title", "plan", "spaceaccess"]
    async with owner(base) as mine:
        assert await mine.server_config() == as_owner


async def test_the_manifest_has_every_member_that_applies(start: Start) -> None:
    base = await start({**SERVICE, "configEndpoint": {"auth": "public"}})
    listed = {found.name: found for found in (await fetch_server_config(base + "/v1")).collections}
    assert listed["notes"] == CollectionInfo("notes", 1_048_576, "none", ("application/json",))
    assert listed["log"] == CollectionInfo(
        "log",
        1_048_576,
        "none",
        ("application/json",),
        push_only=True,
        append_only={"type": "by_timestamp", "field": "entries"},
        ttl_ms=5,
    )


async def test_a_manifest_that_is_not_served_raises(start: Start) -> None:
    base = await start({**SERVICE, "configEndpoint": None})
    with pytest.raises(NotFound):
        await fetch_server_config(base + "/v1")


async def test_bad_credentials_of_a_bundle_raise(start: Start) -> None:
    closed = {**COLLECTIONS[6], "readRoles": ["self"], "name": "closed"}
    base = await start({**SERVICE, "collections": [COLLECTIONS[5], closed]})
    past = issuing.issue_device_certificate(
        ISSUER, ISSUER.ed_pub, ISSUER.kem_pub, now_s=1_000_000, nonce=minted_at()["nonce"]
    )
    async with client(base, keys=ISSUER, certificate=past) as late:
        with pytest.raises(Unauthorized):
            await late.pull_bundle("boards/b1")


@asynccontextmanager
async def answering(answer: object) -> AsyncIterator[str]:
    """The address of a server that answers everything with `answer`."""

    async def respond(request: web.Request) -> web.Response:
        return web.json_response(answer)

    server = TestServer(web.Application())
    server.app.router.add_get("/{path:.*}", respond)
    async with server:
        yield f"http://127.0.0.1:{urlsplit(str(server.make_url('/'))).port}"


@pytest.mark.parametrize(
    "answer",
    [{}, {"collections": []}, {"collections": {"notes": []}}, {"collections": {"notes": [{}]}},
     {"collections": {"notes": [1]}}, {"items": ["a"]}, {"items": 1, "hasMore": True}],
)  # fmt: skip
async def test_an_answer_that_is_none_of_the_protocol_is_unreachable(answer: object) -> None:
    async with answering(answer) as base, Client(base, backoff=RetryPolicy(attempts=1)) as anyone:
        with pytest.raises(Unreachable):
            await anyone.batch_pull_many("notes", [{"id": "a"}])
        with pytest.raises(Unreachable):
            await names(anyone.list("notes"))
        with pytest.raises(Unreachable):
            await anyone.pull_bundle("notes/a")
