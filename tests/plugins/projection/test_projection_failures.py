"""What projections leave out, and tell of: lists that are none, sources that cannot be read, functions that
fail, keys where no list may be."""

from collections.abc import Callable
from typing import Any

import pytest
from support.projection_site import LISTS, NOTES, TITLES, Site, entry, members, titled

from pysync._core import decode_push
from pysync.errors import StoreUnavailable
from pysync.model import WriteEvent
from pysync.plugins.projection import Projection
from pysync.store import NotModified, StoredObject
from pysync.store.memory import MemoryStore

Logged = pytest.LogCaptureFixture


@pytest.mark.parametrize("stored", [b'{"data":{"text":"mine"}}', b'{"data":{"items":{}}}', None])
async def test_document_that_is_no_list_is_not_overwritten(caplog: Logged, stored: bytes | None) -> None:
    site = Site(members(TITLES))
    if stored is None:
        await site.store.put("lists/s", b"torn")
    else:
        await site.documents.push("lists/s", decode_push(stored))
    before = await site.store.get("lists/s")
    await site.note("a", title="A")
    await site.fold()
    assert await site.store.get("lists/s") == before
    assert "what is stored at lists/s is no list" in caplog.text
    assert site.count("failures") == 1


@pytest.mark.parametrize("damage", [lambda stored: b"torn", lambda stored: stored.replace(b'"A"', b'"Z"')])
async def test_a_corrupt_source_is_left_out(caplog: Logged, damage: Callable[[bytes], bytes]) -> None:
    site = Site(members(TITLES))
    await site.note("a", title="A")
    await site.note("b", title="B")
    found = await site.store.get("notes/s/a")
    assert isinstance(found, StoredObject)
    await site.store.put("notes/s/a", damage(found.body))
    await site.fold()
    assert "the document at 'notes/s/a' (no collection) is corrupt" in caplog.text
    assert await site.items() == [entry("b", title="B")]
    assert "source notes/s/a is corrupt" in caplog.text
    assert site.count("failures") == 1


class _OneListFails(MemoryStore):
    """Cannot read the list at `lists/s0`."""

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        if key == "lists/s0":
            raise StoreUnavailable
        return await super().get(key, if_none_match)


async def test_a_list_that_fails_does_not_hold_up_the_others() -> None:
    site = Site(members(TITLES), store=_OneListFails())
    for at in range(40):
        await site.note("a", space=f"s{at}", title="A")
    with pytest.raises(StoreUnavailable):
        await site.fold()
    assert len(await site.store.list("lists", None, 100)) == 39


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "bad",
    [
        {"value": {"title": 1}},
        {"id": 1, "value": {}},
        {"id": "a"},
        {"id": "a", "value": "text"},
        {"id": "a", "value": {"deep": deep(61)}},
        {"id": "a", "value": {"set": {1}}},
        {"id": "\ud800", "value": {}},
        "text",
        ZeroDivisionError("somebody's"),
    ],
)
async def test_a_failing_function_costs_its_own_entry_alone(caplog: Logged, bad: Any) -> None:
    def project(event: WriteEvent) -> Any:
        if event.params["id"] != "bad":
            return titled(event)
        if isinstance(bad, Exception):
            raise bad
        return bad

    site = Site(members(), [Projection("notes", "lists/{space}", project, name="mine")])
    for id_ in ("one", "bad", "two"):
        await site.note(id_, title=id_)
    await site.fold()
    assert [item["id"] for item in await site.items()] == ["one", "two"]
    assert "projection mine: project of notes {'space': 's', 'id': 'bad'}" in caplog.text
    assert site.counts["pysync_projection_failures", "mine"] == 1


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a//b",
        "../a",
        "a/{b}",
        "_pysync/projections",
        "x" * 1001,
        "a b",
        7,
        "notes/s/z",
        "journals/s",
    ],
)
async def test_a_key_where_no_list_may_be_is_rejected(caplog: Logged, key: Any) -> None:
    site = Site(members(), [Projection("notes", lambda event: key, titled, name="mine")])
    await site.note("a", title="A")
    before = {listed.key async for listed in site.store.walk("")}
    await site.fold()
    assert {listed.key async for listed in site.store.walk("")} == before
    assert "projection mine: target" in caplog.text
    assert site.count("failures") == 1


async def test_corrupt_source_is_reported_if_only_a_function_knows_its_list(
    caplog: Logged,
) -> None:
    site = Site(members(), [Projection("notes", lambda event: "lists/s", titled, name="mine")])
    await site.note("a", title="A")
    await site.note("b", title="B")
    await site.store.put("notes/s/a", b"torn")
    await site.fold()
    assert await site.items() == [entry("b", title="B")]
    assert site.count("failures") == 1


async def test_key_of_files_cannot_hold_a_list(caplog: Logged) -> None:
    files = LISTS | {"name": "files", "storagePath": "files/{id}", "allowedMimeTypes": ["image/png"]}
    plugin = Projection("notes", lambda event: "files/a", titled, name="mine")
    site = Site(members(collections=[NOTES, files]), [plugin])
    await site.note("a", title="A")
    await site.fold()
    assert await site.store.get("files/a") is None
    assert "belongs to files, which holds files" in caplog.text
