"""`GET {ns}/changes`: the latest change of each document that the caller could pull, after a cursor.

See docs/reference/protocol.md#changes.
"""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.change_pages import key_of, page, pages
from support.clients import ISSUER, STRANGER, Browser, Signed, Start, root_device
from support.collections import LOG, MINE, NOTES, collection
from support.faulty_store import FaultyStore
from support.sse_client import Listen, Serve

from pysync.auth.issuing import Grant
from pysync.engine.changes import DocumentRef
from pysync.plugins import PluginRequest
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

FILES = collection("files", allowedMimeTypes=["text/plain"], deletable=True)
GONE = {**NOTES, "deletable": True}


@pytest.fixture(params=["memory:", "file:"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store whose feed never forgets."""
    return "memory:" if request.param == "memory:" else f"file:{tmp_path}"


@pytest.fixture
def serve_at(url: str, start: Start, session: aiohttp.ClientSession) -> Serve:
    async def serve_one(*collections: dict[str, Any], **members: Any) -> Browser:
        return Browser(await start({"store": url, "collections": list(collections), **members}), session)

    return serve_one


async def test_pages_without_a_cursor_contain_everything_in_the_order_of_its_last_change(
    serve_at: Serve,
) -> None:
    browser = await serve_at(GONE, LOG, FILES)
    first = (await browser.push("notes/a", {"n": 1})).json["hash"]
    written = [
        {"collection": "notes", "params": {"id": "b"}, **(await browser.push("notes/b", {"n": 2})).json},
        {"collection": "log", "params": {"id": "c"}, **(await append(browser, "log/c"))},
    ]
    file = await browser.request("POST", "/push/files/d", b"text", {"Content-Type": "text/plain"})
    written.append({"collection": "files", "params": {"id": "d"}, "hash": file.json["hash"]})
    again = (await browser.push("notes/a", {"n": 3}, first)).json
    written.append({"collection": "notes", "params": {"id": "a"}, **again})
    found = await pages(browser)
    del found.changes[2]["timestamp"]
    assert found.changes == written
    assert (await pages(browser, limit=3)).sizes == [3, 1]
    assert (await pages(browser, limit=1)).keys == found.keys


async def append(browser: Browser, key: str) -> Any:
    return (await browser.request("POST", f"/push/{key}", {"data": {}})).json


async def test_document_that_was_written_often_has_one_entry_with_the_version_of_a_pull(
    serve_at: Serve,
) -> None:
    browser = await serve_at(NOTES, LOG)
    await browser.push("notes/other", {})
    written: Any = {"hash": None}
    for number in range(3):
        written = (await browser.push("notes/a", {"n": number}, written["hash"])).json
        appended = await append(browser, "log/a")
    found = await pages(browser)
    assert found.keys == ["notes/other", "notes/a", "log/a"]
    assert [{"hash": each["hash"], "timestamp": each["timestamp"]} for each in found.changes[1:]] == [
        written, appended,
    ]  # fmt: skip
    for change, target in zip(found.changes[1:], ("notes/a", "log/a?last=1"), strict=True):
        assert change["hash"] == (await browser.pull(target)).json["hash"]


async def test_removal_is_an_entry_until_the_document_is_there_again(serve_at: Serve) -> None:
    browser = await serve_at(GONE)
    written = (await browser.push("notes/a", {})).json
    cursor = (await pages(browser)).cursor
    removed = await browser.request("DELETE", f"/push/notes/a?baseHash={written['hash']}")
    (change,) = (await pages(browser, cursor)).changes
    assert change == {
        "collection": "notes",
        "params": {"id": "a"},
        "hash": "",
        "timestamp": removed.json["timestamp"],
        "removed": True,
    }
    assert (await pages(browser)).changes == []
    assert (await pages(browser, cursor)).changes == [change]
    written = (await browser.push("notes/a", {"n": 2})).json
    assert (await pages(browser)).changes == [{"collection": "notes", "params": {"id": "a"}, **written}]


async def test_removal_is_kept_for_its_time_and_forgotten_later(
    url: str, start: Start, session: aiohttp.ClientSession
) -> None:
    clock = FakeClock()
    changes = {"removalsMs": 1000, "maxAgeMs": 1}
    base = await start({"store": url, "collections": [GONE], "changes": changes}, now_ms=clock)
    browser = Browser(base, session)
    hashes = {key: (await browser.push(f"notes/{key}", {})).json["hash"] for key in "abc"}
    cursors = [(await page(browser, "now")).json["cursor"]]
    for key, hash_ in hashes.items():
        assert (await browser.request("DELETE", f"/push/notes/{key}?baseHash={hash_}")).status == 200
        cursors.append((await page(browser, "now")).json["cursor"])
        clock.now_ms += 1000
    assert (await page(browser, cursors[0])).json == {"reset": True, "cursor": cursors[-1]}
    assert (await pages(browser, cursors[1])).keys == ["notes/b", "notes/c"]
    assert (await pages(browser)).keys == []


async def test_versions_that_the_store_does_not_know_are_read(
    start: Start, tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    """As those of an upgrade or a copy, which were never announced."""
    browser = Browser(await start({"store": f"file:{tmp_path}", "collections": [NOTES, LOG]}), session)
    written = [(await browser.push("notes/a", {"n": 1})).json, await append(browser, "log/a")]
    store = start.apps[-1].engine.store  # type: ignore[attr-defined]
    cursor = (await pages(browser)).cursor
    for key in ("notes/a", "log/a"):
        await store.put(key.replace("/a", "/b"), (await store.get(key)).body)
    await store.put("notes/damaged", b"{}")
    found = {key_of(change): change for change in (await pages(browser)).changes}
    assert [*found] == ["notes/b", "log/b", "notes/damaged", "notes/a", "log/a"]
    for key, expected in zip(("notes/b", "log/b"), written, strict=True):
        assert {name: found[key][name] for name in ("hash", "timestamp")} == expected
    assert found["notes/damaged"]["hash"] == ""
    assert (await pages(browser, cursor)).keys == []


async def test_now_is_a_cursor_alone_after_which_later_changes_come(serve_at: Serve) -> None:
    browser = await serve_at(NOTES)
    await browser.push("notes/a", {})
    reply = await page(browser, "now")
    assert reply.json.keys() == {"cursor"}
    await browser.push("notes/b", {})
    assert (await pages(browser, reply.json["cursor"])).keys == ["notes/b"]


async def test_document_that_changes_while_pages_are_read_comes_again(serve_at: Serve) -> None:
    browser = await serve_at(NOTES)
    hashes = {key: (await browser.push(f"notes/{key}", {})).json["hash"] for key in "abc"}
    first = (await page(browser, limit=2)).json
    assert [key_of(change) for change in first["changes"]] == ["notes/a", "notes/b"]
    assert first["hasMore"]
    await browser.push("notes/a", {"n": 2}, hashes["a"])
    assert (await pages(browser, first["cursor"])).keys == ["notes/c", "notes/a"]


async def test_every_cursor_stays_good_for_as_long_as_its_documents_are_there(serve_at: Serve) -> None:
    """The change log keeps three changes here, and the feed all."""
    browser = await serve_at(NOTES, changes={"maxCount": 3, "maxAgeMs": 1})
    cursors = [(await page(browser, "now")).json["cursor"]]
    for number in range(300):
        await browser.push(f"notes/{number:03d}", {})
        cursors.append((await page(browser, "now")).json["cursor"])
    for number in (0, 1, 150, 298, 300):
        found = await pages(browser, cursors[number], limit=100)
        assert found.keys == [f"notes/{later:03d}" for later in range(number, 300)]


@pytest.mark.parametrize("text", ["", "x", "Now", "1", "0" * 18, "0" * 17 + "~", "\u0663" * 17, "9" * 5000])
async def test_text_that_no_server_gives_is_no_cursor(serve_at: Serve, text: str) -> None:
    browser = await serve_at(NOTES)
    reply = await page(browser, text)
    assert (reply.status, reply.json["code"]) == (400, "invalid_since")


@pytest.mark.parametrize("text", ["0", "-1", "x", "1.0", " 1", ""])
async def test_limit_is_a_positive_number(serve_at: Serve, text: str) -> None:
    browser = await serve_at(NOTES)
    reply = await page(browser, limit=text)
    assert (reply.status, reply.json["code"]) == (400, "invalid_limit")


async def test_a_page_has_500_entries_or_as_many_as_asked_up_to_1000(serve: Serve, start: Start) -> None:
    browser = await serve(NOTES)
    await announce(start, [f"{number:04d}" for number in range(1500)])
    assert (await pages(browser)).sizes == [500, 500, 500]
    assert (await pages(browser, limit="600")).sizes == [600, 600, 300]
    assert (await pages(browser, limit="9" * 30)).sizes == [1000, 500]


async def announce(start: Start, ids: list[str], name: str = "notes") -> None:
    """Announce a write of each of these documents."""
    outbox = start.apps[-1].engine.outbox  # type: ignore[attr-defined]
    await outbox.announce([DocumentRef(name, {"id": id_}).change("0" * 64, 1) for id_ in ids])


REDIS_ID = "001764340000000.001764340000000-0000000001"


@pytest.mark.parametrize("lost", ["9" * 17, f"{1:017d}", f"{1:017d}-00000000", REDIS_ID])
async def test_cursor_of_another_log_is_reset_to_one_to_go_on_from(serve_at: Serve, lost: str) -> None:
    browser = await serve_at(NOTES)
    await browser.push("notes/a", {})
    reply = await page(browser, lost)
    assert reply.json == {"reset": True, "cursor": (await page(browser, "now")).json["cursor"]}
    await browser.push("notes/b", {})
    assert (await pages(browser, reply.json["cursor"])).keys == ["notes/b"]


async def test_collections_and_params_narrow_the_changes(serve_at: Serve) -> None:
    lists = collection("lists", "lists/{owner}/{id}")
    browser = await serve_at(NOTES, lists)
    for key in ("notes/1", "lists/al/1", "lists/bo/2", "lists/bo/1", "notes/2"):
        await browser.push(key, {})

    async def keys(**query: Any) -> list[str]:
        return (await pages(browser, **query)).keys

    assert await keys(collections="notes,,notes") == ["notes/1", "notes/2"]
    assert await keys(collections="lists", params={"lists": {"owner": "bo"}}) == ["lists/bo/2", "lists/bo/1"]
    assert await keys(collections="lists", params={"lists": {"id": 1}}) == ["lists/al/1", "lists/bo/1"]
    assert await keys(params={"lists": {"owner": "bo", "id": "1"}}) == ["notes/1", "lists/bo/1", "notes/2"]
    assert len(await keys()) == 5
    for query, code in (
        ({"collections": "none"}, "unknown_collection"),
        ({"collections": ","}, "missing_collections"),
        ({"params": "x"}, "invalid_params"),
        ({"params": {"notes": {"other": "a"}}}, "invalid_params"),
    ):
        assert (await page(browser, **query)).json["code"] == code


async def test_a_namespace_has_changes_of_its_own_under_each_of_its_paths(serve_at: Serve) -> None:
    own = {**NOTES, "storagePath": "acme/{id}"}
    browser = await serve_at(NOTES, namespaces={"acme": {"collections": [own]}})
    await browser.request("POST", "/acme/push/acme/a", {"data": {}})
    await browser.push("notes/b", {})
    for path in ("/acme/changes", "/v1/acme/changes"):
        (change,) = (await pages(browser, path=path)).changes
        assert (change["namespace"], change["params"]) == ("acme", {"id": "a"})
    (change,) = (await pages(browser)).changes
    assert ("namespace" in change, change["params"]) == (False, {"id": "b"})


async def test_changes_are_served_below_the_mount_path(serve_at: Serve) -> None:
    inner = {"acme": {"collections": [collection("inner", "in/{id}")]}}
    browser = await serve_at(NOTES, server={"mountPath": "/sync/v2"}, namespaces=inner)
    await browser.request("POST", "/sync/v2/push/notes/a", {"data": {}})
    await browser.request("POST", "/sync/v2/acme/push/in/b", {"data": {}})
    assert (await pages(browser, path="/sync/v2/changes")).keys == ["notes/a"]
    assert (await pages(browser, path="/sync/v2/acme/changes")).keys == ["inner/b"]


async def test_key_that_two_namespaces_share_changes_in_both(serve_at: Serve) -> None:
    other = collection("pages", "notes/{page}", readRoles=["public"])
    browser = await serve_at(NOTES, namespaces={"acme": {"collections": [other]}})
    first = (await browser.push("notes/a", {})).json
    (change,) = (await pages(browser, path="/acme/changes")).changes
    assert change == {"collection": "pages", "params": {"page": "a"}, "namespace": "acme", **first}
    again = {"data": {"n": 2}, "baseHash": first["hash"]}
    second = (await browser.request("POST", "/acme/push/notes/a", again)).json
    (change,) = (await pages(browser)).changes
    assert change == {"collection": "notes", "params": {"id": "a"}, **second}


async def test_batches_of_events_change_under_the_paths_at_which_they_are_pulled(serve_at: Serve) -> None:
    taps = collection("taps", "taps/{app}/{batchId}")
    browser = await serve_at(taps, events=[{"collection": "taps", "storagePath": "lake/{app}/{batchId}"}])
    ids = []
    for app in ("one", "two"):
        target = f"/push/taps/{app}/new"
        pushed = await browser.request("POST", target, {"data": {"events": [{"n": 1}]}})
        ids.append(pushed.json["batchId"])
    assert (await pages(browser)).keys == [f"taps/one/{ids[0]}", f"taps/two/{ids[1]}"]
    assert (await pages(browser, params={"taps": {"app": "two"}})).keys == [f"taps/two/{ids[1]}"]
    only = {"taps": {"app": "one", "batchId": ids[0]}}
    (change,) = (await pages(browser, params=only)).changes
    pulled = await browser.pull(f"taps/one/{ids[0]}")
    assert pulled.headers["ETag"].strip('W/"') == change["hash"]


async def test_caller_receives_the_changes_of_its_own_documents_alone(
    serve_at: Serve, session: aiohttp.ClientSession
) -> None:
    browser = await serve_at(MINE)
    one, other = (Signed(browser.base, session, keys, root_device(keys)) for keys in (ISSUER, STRANGER))
    for caller in (one, other, one):
        await caller.push(f"u/{caller.keys.user_id}/{caller is one}", {}, None)
    assert (await pages(one)).keys == [f"mine/{ISSUER.user_id}/True"]
    assert (await pages(other)).keys == [f"mine/{STRANGER.user_id}/False"]
    assert (await page(browser)).status == 401
    assert (await page(one, params={"mine": {"identity": STRANGER.user_id}})).status == 403


async def test_page_looks_at_5000_changes_and_ends_early(
    serve: Serve, start: Start, session: aiohttp.ClientSession
) -> None:
    browser = await serve({**NOTES, "requireAuth": True})
    await announce(start, [f"{number:04d}" for number in range(5200)])
    last = Grant(("read",), ("notes/5199",))
    caller = Signed(browser.base, session, ISSUER, root_device(ISSUER, grant=last))
    found = await pages(caller)
    assert (found.sizes, found.keys) == ([0, 1], ["notes/5199"])


async def test_hidden_members_change_the_version_as_in_a_pull(serve_at: Serve) -> None:
    cards = collection("cards", fieldPermissions={"pay": {"readRoles": ["admin"], "writeRoles": ["public"]}})
    browser = await serve_at(cards)
    pushed = await browser.push("cards/a", {"pay": 1, "name": "x"})
    (change,) = (await pages(browser)).changes
    assert change["hash"] == (await browser.pull("cards/a")).json["hash"] == pushed.json["hash"]


class Undecided:
    """A plugin that cannot tell who may read what."""

    name = "undecided"

    async def authorize(self, request: PluginRequest) -> list[str]:
        if request.action == "pull":
            raise RuntimeError("out of order")
        return []


async def test_page_that_cannot_be_authorised_is_unavailable(
    start: Start, session: aiohttp.ClientSession
) -> None:
    secret = collection("secret", readRoles=["known"])
    browser = Browser(await start({"collections": [secret]}, plugins=[Undecided()]), session)
    caller = Signed(browser.base, session, ISSUER, root_device(ISSUER))
    await caller.push("secret/a", {})
    reply = await page(caller)
    assert (reply.status, reply.json["code"]) == (503, "roles_unavailable")


async def test_response_is_for_one_caller_and_one_moment(serve_at: Serve) -> None:
    browser = await serve_at(NOTES)
    for method in ("GET", "HEAD"):
        reply = await browser.request(method, "/changes")
        assert (reply.status, reply.headers["Cache-Control"]) == (200, "no-store")


async def test_client_goes_from_stream_to_pages_and_back_without_a_gap(
    serve_at: Serve, subscribe: Listen
) -> None:
    """Writes go on all the time. A client that hops between both has the newest version of each document."""
    browser = await serve_at(GONE, changes={"maxCount": 20_000})
    stored: dict[str, str] = {}
    is_done = asyncio.Event()

    async def write() -> None:
        for number in range(240):
            key = f"{number * 7 % 31}"
            if number % 5 == 4 and stored.get(key):
                await browser.request("DELETE", f"/push/notes/{key}?baseHash={stored[key]}")
                stored[key] = ""
            else:
                pushed = await browser.push(f"notes/{key}", {"n": number}, stored.get(key) or None)
                stored[key] = pushed.json["hash"]
        is_done.set()

    known: dict[str, str] = {}
    writer = asyncio.create_task(write())
    cursor, hops = "", 0
    while not is_done.is_set() or known != {f"notes/{key}": hash_ for key, hash_ in stored.items()}:
        for change in (reply := (await page(browser, cursor or None, limit=5)).json)["changes"]:
            known[key_of(change)] = change["hash"]
        cursor = reply["cursor"]
        stream = await subscribe(browser, lastEventId=cursor)
        async with asyncio.timeout(10):
            for _ in range(1 if is_done.is_set() else 4):
                block = await stream.block()
                assert block.event != "reset"
                if block.data is not None:
                    known[key_of(block.data)] = block.data["hash"]
        cursor, hops = stream.last_id, hops + 1
        await stream.close()
    await writer
    assert hops > 5


async def test_page_of_a_bucket_has_a_document_once_that_changes_throughout_it(serve: Serve) -> None:
    browser = await serve(NOTES, store=FaultyStore(MemoryStore()))
    cursor = (await page(browser)).json["cursor"]
    hash_ = None
    for number in range(4):
        hash_ = (await browser.push("notes/a", {"n": number}, hash_)).json["hash"]
        await browser.push(f"notes/b{number}", {})
    found = await pages(browser, cursor, limit=5)
    assert found.keys == ["notes/b0", "notes/b1", "notes/b2", "notes/a", "notes/b3"]
    assert found.changes[3]["hash"] == hash_


async def test_bucket_answers_from_the_log_of_its_coordinator(serve: Serve) -> None:
    browser = await serve(GONE, store=FaultyStore(MemoryStore()), changes={"maxCount": 3})
    reply = await page(browser)
    assert reply.json.keys() == {"reset", "cursor"}
    cursor = reply.json["cursor"]
    hash_ = None
    for number in range(3):
        hash_ = (await browser.push("notes/a", {"n": number}, hash_)).json["hash"]
    (change,) = (await pages(browser, cursor)).changes
    assert change["hash"] == hash_
    assert (await pages(browser, cursor, limit=1)).keys == ["notes/a"] * 3
    await browser.request("DELETE", f"/push/notes/a?baseHash={hash_}")
    reset = (await page(browser, cursor)).json
    assert reset == {"reset": True, "cursor": (await page(browser, "now")).json["cursor"]}


async def test_templates_of_the_collections_that_the_caller_may_read_are_there_on_request(
    serve_at: Serve,
) -> None:
    browser = await serve_at(GONE, LOG, MINE)
    found = (await page(browser, storagePaths="true")).json
    assert found["storagePaths"] == {"notes": "notes/{id}", "log": "log/{id}"}
    found = (await page(browser, "now", collections="notes", storagePaths="true")).json
    assert found.keys() == {"cursor", "storagePaths"}
    assert found["storagePaths"] == {"notes": "notes/{id}"}


@pytest.mark.parametrize("text", ["yes", "1", "True", ""])
async def test_templates_are_requested_with_true_or_false(serve_at: Serve, text: str) -> None:
    browser = await serve_at(NOTES)
    assert "storagePaths" not in (await page(browser, storagePaths="false")).json
    reply = await page(browser, storagePaths=text)
    assert (reply.status, reply.json["code"]) == (400, "bad_request")
