"""A replica in a browser: a local copy that works offline, and that one of its tabs keeps in sync."""

import asyncio
from typing import Any

from support.browser import Chromium, Window
from support.clients import Start
from support.collections import UNSIGNED, collection
from support.web_pages import blank_page, web_service

from pysync.client import Client

COLLECTIONS = [
    collection("notes", deletable=True, listable=True),
    collection("log", appendOnly=UNSIGNED, deletable=True),
    collection("files", allowedMimeTypes=["image/png"], deletable=True, listable=True),
]


async def opened(window: Window, collections: object = None) -> Any:
    """Have the page open a replica, and return its status when it is in sync."""
    return await window.run(
        """async (collections) => {
          window.replica = await pysync.Replica.open("app", new pysync.Client("/"), collections)
          await replica.synced()
          return replica.status()
        }""",
        collections or {"notes": {}, "log": {}, "files": {}},
    )


async def test_replica_receives_documents_logs_and_files(start: Start, screen: Chromium) -> None:
    base = await web_service(start, *COLLECTIONS)
    async with Client(base) as direct:
        for n in range(130):
            await direct.push(f"notes/n{n:03}", {"n": n})
        await direct.append("log/a", {"n": 1})
        await direct.push_blob("files/a", b"picture", "image/png")
    window = await blank_page(screen, base)
    status = await opened(window)
    assert (status["online"], status["unsent"], status["error"], status["leader"]) == (True, 0, None, True)
    assert await window.run("replica.keys()") == ["files/a", "log/a", *(f"notes/n{n:03}" for n in range(130))]
    assert await window.run("replica.get('notes/n129')") == {"n": 129}
    assert (await window.run("replica.entries('notes/')"))[7] == ["notes/n007", {"n": 7}]
    assert [each["data"] for each in await window.run("replica.tail('log/a', 9)")] == [{"n": 1}]
    assert await window.run("replica.file('files/a').then((file) => file.text())") == "picture"


async def test_edits_are_sent(start: Start, screen: Chromium) -> None:
    base = await web_service(start, *COLLECTIONS)
    async with Client(base) as direct:
        await direct.push("notes/a", {"n": 1})
        await direct.push("notes/b", {"n": 1})
        window = await blank_page(screen, base)
        await opened(window)
        await window.run(
            """Promise.all([replica.put("notes/a", {n: 2}), replica.put("notes/c", {n: 3}),
                replica.delete("notes/b"), replica.append("log/a", {n: 4})])"""
        )
        assert await window.run("replica.entries()") == [["notes/a", {"n": 2}], ["notes/c", {"n": 3}]]
        await window.run("replica.synced()")
        assert (await window.run("replica.status()"))["unsent"] == 0
        pulled = [(await direct.pull(f"notes/{name}")).data for name in "abc"]
        assert pulled == [{"n": 2}, {}, {"n": 3}]
        elements = (await direct.pull("log/a", full=True)).elements()
        assert [element.data for element in elements] == [{"n": 4}]
        assert [each["data"] for each in await window.run("replica.tail('log/a', 9)")] == [{"n": 4}]


async def test_updates_of_one_document_in_two_tabs_are_all_made(start: Start, screen: Chromium) -> None:
    base = await web_service(start, *COLLECTIONS)
    tabs = [await blank_page(screen, base), await blank_page(screen, base)]
    count = """async (many) => {
      const more = (data) => ({n: (data?.n ?? 0) + 1})
      for (let made = 0; made < many; made++) await replica.update("notes/a", more)
    }"""
    for tab in tabs:
        await opened(tab)
    await asyncio.gather(*(tab.run(count, 20) for tab in tabs))
    assert await tabs[0].run("replica.get('notes/a')") == {"n": 40}
    await tabs[0].run("replica.synced()")
    async with Client(base) as direct:
        assert (await direct.pull("notes/a")).data == {"n": 40}
    await tabs[1].run("replica.update('notes/a', () => null)")
    assert await tabs[0].run("replica.get('notes/a')") is None


async def test_rejected_edit_has_the_error_of_the_server(start: Start, screen: Chromium) -> None:
    base = await web_service(start, collection("notes", maxBodyBytes=1000))
    window = await blank_page(screen, base)
    await opened(window, {"notes": {}})
    await window.run("(text) => replica.put('notes/a', {text})", "x" * 2000)
    await window.run("replica.synced()")
    rejected = await window.run(
        """replica.status().then(({rejected}) => rejected.map(({key, kind, error}) => [key, kind, error.name,
          error.status, error.code, error instanceof pysync.errors.PayloadTooLarge]))"""
    )
    assert rejected == [["notes/a", "put", "PayloadTooLarge", 413, "payload_too_large", True]]


async def test_changes_yields_each_key_once_until_the_replica_is_closed(
    start: Start, screen: Chromium
) -> None:
    window = await blank_page(screen, await web_service(start, *COLLECTIONS))
    await opened(window)
    found = await window.run(
        """(async () => {
          await replica.put("notes/before", {})
          const changes = replica.changes(), found = []
          for (const key of ["notes/a", "notes/b", "notes/a"]) await replica.put(key, {n: 1})
          const waiting = (async () => { for await (const key of changes) found.push(key) })()
          await replica.synced()
          await replica.put("notes/last", {})
          await replica.close()
          await waiting
          return found
        })()"""
    )
    assert found[:2] == ["notes/a", "notes/b"]
    assert found[-1] == "notes/last"


async def test_closed_replica_rejects_every_call_and_can_be_opened_again(
    start: Start, screen: Chromium
) -> None:
    window = await blank_page(screen, await web_service(start, *COLLECTIONS))
    await opened(window)
    await window.run("replica.put('notes/a', {n: 1}).then(() => replica.close())")
    for call in ("get('notes/a')", "put('notes/a', {})", "synced()", "keys()"):
        assert await window.run(f"replica.{call}.catch((error) => error.name)") == "ReplicaError"
    await opened(window)
    assert await window.run("replica.get('notes/a')") == {"n": 1}


async def test_replica_of_another_caller_server_or_namespace_is_not_opened(
    start: Start, screen: Chromium
) -> None:
    window = await blank_page(screen, await web_service(start, *COLLECTIONS))
    await opened(window)
    clients = ("'/', {keys}", "'http://127.0.0.1:9'", "'/', {namespace: 'acme'}")
    await window.run("pysync.IdentityKeys.generate().then((keys) => { window.keys = keys })")
    for arguments in clients:
        opening = f"pysync.Replica.open('app', new pysync.Client({arguments}), {{notes: {{}}}})"
        assert "is one of" in await window.run(f"{opening}.catch((error) => error.message)")
    assert (await opened(window))["error"] is None


async def test_replica_that_is_destroyed_is_lost_to_every_tab_and_begins_anew(
    start: Start, screen: Chromium
) -> None:
    base = await web_service(start, *COLLECTIONS)
    first, second = await blank_page(screen, base), await blank_page(screen, base)
    await opened(first)
    await first.run("replica.put('notes/a', {n: 1}).then(() => replica.synced())")
    await second.run("pysync.Replica.destroy('app')")
    error = "replica.status().then(({error}) => [error.name, error.code])"
    assert await first.run(error) == ["StorageError", "evicted"]
    assert await first.run("replica.put('notes/a', {n: 2}).catch((error) => error.code)") == "evicted"
    assert (await opened(second))["leader"] is True
    assert await second.run("replica.get('notes/a')") == {"n": 1}


async def test_tab_with_other_collections_than_the_newest_does_not_sync(
    start: Start, screen: Chromium
) -> None:
    """It might send in plain what newer pages seal."""
    base = await web_service(start, *COLLECTIONS)
    first, second = await blank_page(screen, base), await blank_page(screen, base)
    assert (await opened(first, {"notes": {}}))["leader"] is True
    await second.run(
        """(async () => {
          const sealing = {seal: (data) => ({sealed: data.n}), open: ({sealed}) => ({n: sealed})}
          const options = {sealing: {notes: sealing}}
          window.replica = await pysync.Replica.open("app", new pysync.Client("/"), {notes: {}}, options)
          await Promise.all([replica.put("notes/a", {n: 1}), replica.synced()])
        })()"""
    )
    status = "replica.status().then(({error, leader}) => [error && error.name, leader])"
    assert await first.run(status) == ["ReplicaError", False]
    assert await second.run(status) == [None, True]
    async with Client(base) as direct:
        assert (await direct.pull("notes/a")).data == {"sealed": 1}
