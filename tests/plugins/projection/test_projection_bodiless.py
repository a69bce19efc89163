"""Projections of what has no body: files, logs that store nothing, batches of events."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import PUBLIC
from support.configurations import config, faults
from support.projection_site import JOURNAL, LISTS, NOTES, TITLES, Site, entry, members

from pysync.config import parse
from pysync.engine.changes import DocumentRef, WriteContext
from pysync.model import WriteEvent
from pysync.plugins.projection import Projection
from pysync.plugins.projection.rebuild import rebuild
from pysync.store.memory import MemoryStore

PHOTOS = {"name": "photos", "storagePath": "photos/{space}/{id}", "allowedMimeTypes": ["image/png"], **PUBLIC}
PINGS = {
    "name": "pings",
    "storagePath": "pings/{space}/{id}",
    "appendOnly": {"persist": False, "requireAuthorSignature": False},
    **PUBLIC,
}
BATCHES = {"name": "batches", "storagePath": "in/{space}/{batchId}", **PUBLIC}
EVENTS = {"collection": "batches", "storagePath": "lake/{space}/{batchId}"}
IDS = {"target": "lists/{space}", "id": "{id}"}


def hashed(event: WriteEvent) -> dict[str, Any]:
    """A project function that needs no body."""
    assert event.body is None
    return {"id": event.params["id"], "value": {"hash": event.hash}}


def site(*collections: dict[str, Any], source: str, store: MemoryStore | None = None) -> Site:
    settings = members() | {"collections": [NOTES, JOURNAL, LISTS, *collections]}
    return Site(settings, [Projection(source, "lists/{space}", hashed)], store)


async def _one(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def photo(site: Site, id_: str, body: bytes) -> str:
    key = f"photos/s/{id_}"
    ref = WriteContext(DocumentRef("photos", {"space": "s", "id": id_}, None, key), "me")
    return (await site.services.files.push(key, _one(body), "image/png", ref)).hash


async def test_files_are_projected_without_a_body_and_rebuilt_from_what_is_there() -> None:
    one = site(PHOTOS, source="photos")
    hashes = [await photo(one, id_, body) for id_, body in (("a", b"1"), ("b", b"2"), ("a", b"3"))]
    await one.fold()
    expected = [entry("a", hash=hashes[2]), entry("b", hash=hashes[1])]
    # New entries are in the order of their writes, and "a" was written again, perhaps a millisecond later.
    assert sorted(await one.items(), key=lambda item: item["id"]) == expected
    assert one.count("failures") == 0
    anew = site(PHOTOS, source="photos", store=one.store)  # type: ignore[arg-type]
    await one.store.delete("lists/s")
    await rebuild(anew.lists, anew.projections, anew.log)
    assert sorted(await anew.items(), key=lambda item: item["id"]) == expected


async def test_unstored_elements_are_projected_and_survive_a_rebuild() -> None:
    one = site(PINGS, source="pings")
    for id_ in ("a", "b"):
        await one.push("pings", {"space": "s", "id": id_}, {"n": 1})
    await one.fold()
    items = await one.items()
    assert [item["id"] for item in items] == ["a", "b"]
    await rebuild(one.lists, one.projections, one.log)
    assert await one.items() == items


async def test_batches_of_events_are_projected(start: Start, session: aiohttp.ClientSession) -> None:
    settings = members(events=[EVENTS]) | {"collections": [LISTS, BATCHES]}
    projections = [{"source": "batches", "target": "lists/{space}", "id": "{batchId}"}]
    browser = Browser(await start({**settings, "projections": projections}), session)
    answer = (await browser.push("in/s/new", {"events": [{"event": "a"}]})).json
    while not (data := (await browser.pull("lists/s")).json["data"]):
        pass
    assert data == {"items": [entry(answer["batchId"])]}


@pytest.mark.parametrize(
    ("source", "why"), [("photos", "files"), ("pings", "nothing"), ("batches", "Parquet")]
)
def test_a_declared_projection_of_them_may_need_parameters_and_no_body(source: str, why: str) -> None:
    def declared(**more: Any) -> dict[str, Any]:
        id_ = {"id": "{batchId}"} if source == "batches" else {}
        projection = IDS | id_ | {"source": source} | more
        return config(LISTS, PHOTOS, PINGS, BATCHES, events=[EVENTS], projections=[projection])

    parse(declared())
    for member, said in (("value", {"t": "/title"}), ("removeWhen", {"/gone": True})):
        ((path, message),) = faults(declared(**{member: said}))
        assert path == f"projections[0].{member}"
        assert message.startswith(f"{source} has no body to point into: ")
        assert why in message


async def test_of_a_collection_that_has_both_documents_alone_are_projected() -> None:
    both = NOTES | {"name": "both", "storagePath": "photos/{space}/{id}"}
    both["allowedMimeTypes"] = ["application/json", "image/png"]
    settings = members(TITLES | {"source": "both"}) | {"collections": [both, LISTS]}
    one = Site(settings)
    await photo(one, "a", b"1")
    await one.push("both", {"space": "s", "id": "b"}, {"title": "B"})
    await one.fold()
    assert await one.items() == [entry("b", title="B")]
