"""A write is announced under every collection, of any namespace, that could pull its key.

See docs/reference/protocol.md#delivery.
"""

import json
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import PUBLIC, collection
from support.plugin_samples import NotifiedPlugin
from support.projection_site import LISTS, NOTES, Site, entry, titled
from support.sse_client import Listen, Serve

from pysync.changelog import Change
from pysync.coordinator.memory import MemoryCoordinator
from pysync.plugins import WriteEvent
from pysync.plugins.projection import Projection

TEXTS = collection("texts", "n/{room}/{id}")
PAPERS = collection("papers", "n/{desk}/{sheet}")
INBOX = collection("inbox", "in/{id}", pushOnly=True, readRoles=[], writeRoles=["public"])
READ = collection("read", "in/{letter}", pullOnly=True, readRoles=["public"], writeRoles=[])

Data = dict[str, Any]


async def put(browser: Browser, path: str, data: Data, **members: object) -> Data:
    """The answer to a push of the namespace that `path` begins with."""
    response = await browser.request("POST", path, {"data": data, **members})
    assert response.status == 200, response.json
    answer: Data = response.json
    return answer


async def test_write_is_delivered_in_each_namespace_under_its_own_name(
    serve: Serve, subscribe: Listen
) -> None:
    browser = await serve(TEXTS, namespaces={"acme": {"collections": [PAPERS]}})
    root, acme = await subscribe(browser), await subscribe(browser, "/acme/events")
    first = await put(browser, "/acme/push/n/r/1", {"n": 1})
    second = await put(browser, "/push/n/r/2", {"n": 2})
    assert await root.events(2) == [
        {"collection": "texts", "params": {"room": "r", "id": id_}, **written}
        for id_, written in (("1", first), ("2", second))
    ]
    assert await acme.events(2) == [
        {"collection": "papers", "params": {"desk": "r", "sheet": id_}, **written, "namespace": "acme"}
        for id_, written in (("1", first), ("2", second))
    ]


async def test_push_to_a_push_only_collection_is_delivered_as_one_of_the_pulled_collection(
    serve: Serve, subscribe: Listen
) -> None:
    browser = await serve(INBOX, READ)
    everything, one = (
        await subscribe(browser),
        await subscribe(browser, collections="read", params={"read": {"letter": "b"}}),
    )
    for id_ in "ab":
        await browser.push(f"in/{id_}", {"n": 1})
    assert [found["params"] for found in await one.events(1)] == [{"letter": "b"}]
    found = await everything.events(2)
    assert [(each["collection"], each["params"]) for each in found] == [
        ("read", {"letter": "a"}),
        ("read", {"letter": "b"}),
    ]
    assert (await subscribe(browser, collections="inbox")).status == 401


async def test_parameters_are_wanted_by_the_names_of_the_collection_that_is_followed(
    serve: Serve, subscribe: Listen
) -> None:
    browser = await serve(TEXTS, namespaces={"acme": {"collections": [PAPERS]}})
    stream = await subscribe(browser, "/acme/events", params={"papers": {"desk": "b"}})
    for room in "abc":
        await put(browser, f"/push/n/{room}/1", {})
    await put(browser, "/acme/push/n/b/2", {})
    assert [found["params"]["sheet"] for found in await stream.events(2)] == ["1", "2"]


async def test_resumed_stream_delivers_each_write_once_from_any_collection(
    serve: Serve, subscribe: Listen
) -> None:
    browser = await serve(TEXTS, INBOX, READ, namespaces={"acme": {"collections": [PAPERS]}})
    begun = (await (await subscribe(browser)).block()).id
    for at in range(3):
        await put(browser, f"/acme/push/n/r/{at}", {})
        await put(browser, f"/push/in/{at}", {})
    cursor, found = begun, []
    for _ in range(6):
        stream = await subscribe(browser, lastEventId=cursor)
        event = await stream.event()
        found.append((event.data["collection"], *event.data["params"].values()))
        cursor = event.id
        await stream.close()
    assert found == [each for at in "012" for each in (("texts", "r", at), ("read", at))]
    await put(browser, "/push/in/last", {})
    assert (await (await subscribe(browser, lastEventId=cursor)).event()).data["params"] == {"letter": "last"}


async def test_key_with_literal_segments_of_another_collection_is_delivered_there_alone(
    serve: Serve, subscribe: Listen
) -> None:
    plan = {"name": "plan", "storagePath": "n/{room}/plan", **PUBLIC}
    browser = await serve(TEXTS, plan, namespaces={"acme": {"collections": [PAPERS]}})
    stream = await subscribe(browser)
    await put(browser, "/acme/push/n/r/plan", {})
    await put(browser, "/acme/push/n/r/other", {})
    found = await stream.events(2)
    assert [(each["collection"], each["params"]) for each in found] == [
        ("plan", {"room": "r"}),
        ("texts", {"room": "r", "id": "other"}),
    ]


@pytest.mark.parametrize("kind", ["log", "file"])
async def test_appends_and_files_are_delivered_to_collections_that_share_their_keys(
    serve: Serve, subscribe: Listen, kind: str
) -> None:
    more: Data = {"appendOnly": {"requireAuthorSignature": False}}
    if kind == "file":
        more = {"allowedMimeTypes": ["text/plain"]}
    browser = await serve(TEXTS | more, namespaces={"acme": {"collections": [PAPERS | more]}})
    stream = await subscribe(browser)
    if kind == "file":
        response = await browser.request("POST", "/acme/push/n/r/1", b"hello", {"Content-Type": "text/plain"})
    else:
        response = await browser.request("POST", "/acme/push/n/r/1", {"data": {}})
    assert response.status == 200
    (found,) = await stream.events(1)
    assert (found["collection"], found["hash"]) == ("texts", response.json["hash"])


async def test_plugins_are_notified_once_of_a_shared_write(
    start: Start, session: aiohttp.ClientSession
) -> None:
    found = NotifiedPlugin()
    settings = {"collections": [TEXTS], "namespaces": {"acme": {"collections": [PAPERS]}}}
    browser = Browser(await start(settings, plugins=[found]), session)
    await put(browser, "/acme/push/n/r/1", {})
    await put(browser, "/push/n/r/2", {})
    assert [(event.namespace, event.collection) for event in found.events] == [
        ("acme", "papers"),
        (None, "texts"),
    ]


async def test_event_batches_are_announced_by_file_name(serve: Serve, subscribe: Listen) -> None:
    clicks = {"name": "clicks", "storagePath": "clicks/{app}/{batch}", **PUBLIC}
    lake = {"name": "lake", "storagePath": "lake/{app}/{file}", "allowedMimeTypes": ["*/*"], **PUBLIC}
    browser = await serve(
        clicks,
        events=[{"collection": "clicks", "storagePath": "lake/{app}/{batch}"}],
        namespaces={"raw": {"collections": [lake]}},
    )
    root, raw = await subscribe(browser), await subscribe(browser, "/raw/events")
    answer = (await browser.push("clicks/web/new", {"events": [{"event": "a"}]})).json
    await put(browser, "/raw/push/lake/web/x", {})
    await browser.push("clicks/web/new", {"events": [{"event": "b"}]})
    found = await raw.events(3)
    assert found[0]["params"] == {"app": "web", "file": f"{answer['batchId']}.parquet"}
    assert found[1]["params"] == {"app": "web", "file": "x"}
    first, second = await root.events(2)
    assert first["params"] == {"app": "web", "batch": answer["batchId"]}
    assert second["params"]["batch"] != "x", "no batch, so no pull of clicks finds it"


def as_before(collection: str, params: Mapping[str, str], namespace: str | None = None) -> Change:
    """A change as versions before this one wrote it."""
    found = {"collection": collection, "params": params, "hash": "h", "timestamp": 1}
    return Change(json.dumps(found if namespace is None else found | {"namespace": namespace}).encode())


async def test_changes_of_an_earlier_version_are_delivered_in_the_same_way(
    serve: Serve, subscribe: Listen
) -> None:
    log = MemoryCoordinator()
    begun = await log.last_id()
    await log.append(
        [as_before("papers", {"desk": "r", "sheet": "1"}, "acme"), as_before("inbox", {"id": "a"})]
    )
    await log.append([as_before("gone", {"id": "a"}), as_before("texts", {"id": "a"})])
    browser = await serve(TEXTS, INBOX, READ, namespaces={"acme": {"collections": [PAPERS]}}, coordinator=log)
    stream = await subscribe(browser, lastEventId=begun)
    await put(browser, "/push/n/r/2", {})
    found = await stream.events(3)
    assert [(each["collection"], each["params"]) for each in found] == [
        ("texts", {"room": "r", "id": "1"}),
        ("read", {"letter": "a"}),
        ("texts", {"room": "r", "id": "2"}),
    ]


async def test_change_of_a_renamed_collection_is_delivered_under_the_new_name(
    serve: Serve, subscribe: Listen
) -> None:
    log = MemoryCoordinator()
    before = await serve(TEXTS, coordinator=log)
    begun = (await (await subscribe(before)).block()).id
    await put(before, "/push/n/r/1", {})
    after = await serve(PAPERS, coordinator=log)
    (found,) = await (await subscribe(after, lastEventId=begun)).events(1)
    assert (found["collection"], found["params"]) == ("papers", {"desk": "r", "sheet": "1"})


TAPS = NOTES | {"name": "taps", "pushOnly": True, "readRoles": []}
SEEN = NOTES | {"name": "seen", "pullOnly": True, "writeRoles": []}


@pytest.mark.parametrize("source", ["taps", "seen", ["seen", "taps"], "shared"])
async def test_projections_read_what_is_written_to_their_sources_keys(source: str | list[str]) -> None:
    folded: list[str] = []

    def fold(event: WriteEvent) -> dict[str, Any] | None:
        folded.append(event.params["id"])
        return titled(event)

    shared = NOTES | {"name": "shared", "storagePath": "notes/{space}/{id}"}
    site = Site(
        {
            "store": "memory:",
            "collections": [TAPS, SEEN, LISTS],
            "namespaces": {"acme": {"collections": [shared]}},
        },
        [Projection(source, "lists/{space}", fold)],
    )
    await site.push("taps", {"space": "s", "id": "a"}, {"title": "A"})
    await site.push("shared", {"space": "s", "id": "b"}, {"title": "B"}, "acme")
    await site.fold()
    assert await site.items() == [entry("a", title="A"), entry("b", title="B")]
    assert folded == ["a", "b"]
