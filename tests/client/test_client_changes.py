"""`Client.changes`: what changed since a cursor, over the wire."""

from typing import Any

import pytest
from support.clients import Start
from support.collections import NOTES, collection

from pysync.client import ChangeEvent, ChangesPage, Client
from pysync.errors import InvalidSince

SERVICE: dict[str, Any] = {
    "collections": [{**NOTES, "deletable": True}, collection("lists", "lists/{owner}/{id}")],
    "namespaces": {"acme": {"collections": [collection("notes", "acme/{id}")]}},
}


async def test_page_names_each_document_with_its_latest_change(start: Start) -> None:
    async with Client(await start(SERVICE)) as client:
        first = await client.push("notes/a", {})
        await client.push("notes/b", {})
        newest = await client.push("notes/a", {"n": 2}, first.hash)
        page = await client.changes(limit=1)
        assert ([change.params for change in page.changes], page.has_more) == ([{"id": "b"}], True)
        page = await client.changes(page.cursor)
        expected = ChangeEvent("notes", {"id": "a"}, newest.hash, newest.timestamp_ms, None, "")
        assert page == ChangesPage([expected], page.cursor)
        await client.delete("notes/a", newest.hash)
        (change,) = (await client.changes(page.cursor)).changes
        assert (change.removed, change.hash) == (True, "")


async def test_pages_follow_each_other_to_the_end(start: Start) -> None:
    async with Client(await start(SERVICE)) as client:
        for number in range(5):
            await client.push(f"notes/{number}", {})
        found = [page async for page in client.change_pages(page_size=2)]
        assert [[change.params["id"] for change in page.changes] for page in found] == [
            ["0", "1"], ["2", "3"], ["4"],
        ]  # fmt: skip
        now = await client.changes("now")
        assert now == ChangesPage([], found[-1].cursor)


async def test_changes_are_of_the_collections_and_the_namespace_that_were_asked_for(start: Start) -> None:
    base = await start(SERVICE)
    async with Client(base) as client, Client(base, namespace="acme") as inside:
        for key in ("lists/al/1", "lists/bo/1", "notes/1"):
            await client.push(key, {})
        await inside.push("acme/2", {})
        (change,) = (await client.changes(None, ["lists"], {"lists": {"owner": "bo"}})).changes
        assert change.params == {"owner": "bo", "id": "1"}
        (change,) = (await inside.changes()).changes
        assert (change.namespace, change.params) == ("acme", {"id": "2"})


async def test_cursor_of_another_server_is_a_reset_and_any_other_text_an_error(start: Start) -> None:
    async with Client(await start(SERVICE)) as one, Client(await start(SERVICE)) as other:
        cursor = (await one.changes()).cursor
        page = await other.changes(cursor)
        assert page == ChangesPage([], page.cursor, is_reset=True)
        assert not (await other.changes(page.cursor)).is_reset
        with pytest.raises(InvalidSince):
            await other.changes("yesterday")


async def test_watch_goes_on_after_the_last_page_and_pages_after_the_last_event(start: Start) -> None:
    async with Client(await start(SERVICE)) as client:
        await client.push("notes/a", {})
        cursor = (await client.changes()).cursor
        await client.push("notes/b", {})
        async with client.watch(after=cursor) as changes:
            event = await anext(changes)
            assert isinstance(event, ChangeEvent)
            assert event.params == {"id": "b"}
            await client.push("notes/c", {})
        (change,) = (await client.changes(changes.last_event_id)).changes
        assert change.params == {"id": "c"}
