"""`pysync project rebuild`: lists made anew from their sources, while these are written and folded."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import Shell
from support.collections import PUBLIC
from support.faulty_store import FaultyStore
from support.projection_site import LISTS, NOTES, TITLES, Site, entry, members, titled

from pysync._core import decode_push
from pysync.config import parse
from pysync.coordinator.memory import MemoryCoordinator
from pysync.model import WriteEvent
from pysync.plugins.projection import Projection
from pysync.plugins.projection.rebuild import catch_up, rebuild
from pysync.server.app import create_app
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock


async def rebuilt(site: Site, *names: str) -> dict[str, Any]:
    """What became of each list of these projections, or of all."""
    chosen = [one for one in site.projections if not names or one.name in names]
    begun, outcomes = await rebuild(site.lists, chosen, site.log)
    assert await catch_up(site.lists, site.log, begun)
    return {key: tuple(outcome) for key, outcome in outcomes.items()}


async def put(site: Site, key: str, data: Any) -> None:
    await site.documents.push(key, decode_push(json.dumps({"data": data}).encode()))


async def test_missing_entries_are_appended_in_the_order_in_which_they_were_written() -> None:
    clock = FakeClock(1000)
    site = Site(members(TITLES), now_ms=clock)
    for id_ in ("z", "m", "a"):
        clock.now_ms += 1
        await site.note(id_, title=id_)
    await put(site, "lists/s", {"items": [entry("m", title="old")]})
    assert await rebuilt(site) == {"lists/s": (3, 3)}
    assert await site.items() == [entry("m", title="m"), entry("z", title="z"), entry("a", title="a")]


async def test_entries_whose_source_is_gone_or_says_so_are_taken_away() -> None:
    site = Site(members(TITLES))
    await site.note("a", title="A")
    await site.note("b", deleted=True)
    await put(site, "lists/s", {"items": [entry(id_) for id_ in "cba"]})
    assert await rebuilt(site) == {"lists/s": (1, 3)}
    assert await site.items() == [entry("a", title="A")]


async def test_a_list_without_any_source_left_is_emptied() -> None:
    site = Site(members(TITLES))
    await put(site, "lists/s", {"items": [entry("a")]})
    assert await rebuilt(site) == {"lists/s": (0, 1)}
    assert await site.items() == []


async def test_a_list_that_is_right_already_is_not_written() -> None:
    store = FaultyStore(MemoryStore())
    site = Site(members(TITLES), store=store)
    for at in range(10):
        await site.note(f"n{at}", space=f"s{at % 3}", title=f"T{at}")
    await site.fold()
    puts = store.calls["put"]
    assert await rebuilt(site) == {"lists/s0": (4, 0), "lists/s1": (3, 0), "lists/s2": (3, 0)}
    assert store.calls["put"] == puts


async def test_no_list_is_made_where_nothing_is_in_it() -> None:
    site = Site(members(TITLES))
    await site.note("a", deleted=True)
    assert await rebuilt(site) == {"lists/s": (0, 0)}
    assert await site.items() is None


async def test_many_sources_are_folded_some_at_a_time() -> None:
    store = FaultyStore(MemoryStore())
    site = Site(members(TITLES), store=store)
    for at in range(600):
        await site.note(f"n{at}", title=f"T{at}")
    puts = store.calls["put"]
    assert await rebuilt(site) == {"lists/s": (600, 600)}
    assert store.calls["put"] - puts == 3


async def test_logs_are_read_whole() -> None:
    last = Projection(
        "journal", "lists/{space}", lambda event: {"id": "last", "value": dict(event.body or {})}
    )
    site = Site(members(), [last])
    for n in range(3):
        await site.push("journal", {"space": "s"}, {"n": n})
    assert await rebuilt(site) == {"lists/s": (1, 1)}
    assert await site.items() == [entry("last", n=2)]


async def test_entries_of_another_projection_of_the_same_list_stay() -> None:
    tasks = {"name": "tasks", "storagePath": "tasks/{space}/{id}", **PUBLIC}
    also = TITLES | {"source": "tasks", "target": "lists/s", "id": "task-{id}", "name": "tasks"}
    site = Site(members(TITLES, also, collections=[NOTES, tasks, LISTS]))
    await site.note("a", title="A")
    await site.push("tasks", {"space": "s", "id": "a"}, {"title": "do"})
    await site.fold()
    await put_over(site, "lists/s", [entry("task-a", title="do"), entry("gone")])
    assert await rebuilt(site, "lists/{space}") == {"lists/s": (2, 2)}
    assert await site.items() == [entry("task-a", title="do"), entry("a", title="A")]


async def put_over(site: Site, key: str, items: list[Any]) -> None:
    held = await site.documents.pull(key)
    assert held is not None
    body = {"data": {"items": items}, "baseHash": held.hash}
    await site.documents.push(key, decode_push(json.dumps(body).encode()))


async def test_keys_that_belong_to_another_collection_are_left_alone() -> None:
    special = {**LISTS, "name": "special", "storagePath": "lists/mine", "listable": False}
    site = Site(members(TITLES, collections=[NOTES, LISTS, special]))
    await put(site, "lists/mine", {"items": [entry("somebody's")]})
    await put(site, "lists/s", {"items": [entry("gone")]})
    assert await rebuilt(site) == {"lists/s": (0, 1)}
    assert await site.items("lists/mine") == [entry("somebody's")]


async def test_documents_of_another_collection_below_a_source_are_no_sources() -> None:
    pinned = {"name": "pinned", "storagePath": "notes/{space}/pinned", **PUBLIC}
    site = Site(members(TITLES, collections=[NOTES, pinned, LISTS]))
    await site.push("pinned", {"space": "s"}, {"title": "P"})
    await site.note("a", title="A")
    assert await rebuilt(site) == {"lists/s": (1, 1)}
    assert await site.items() == [entry("a", title="A")]


async def test_lists_that_a_function_names_are_rebuilt_as_far_as_sources_name_them() -> None:
    def target(event: WriteEvent) -> str | None:
        return f"lists/{event.body['month']}" if event.body else None

    site = Site(members(), [Projection("notes", target, titled)])
    await put(site, "lists/10", {"items": [entry("gone")]})
    await put(site, "lists/11", {"items": [entry("gone")]})
    await site.note("a", title="A", month="10")
    assert await rebuilt(site) == {"lists/10": (1, 2)}
    assert await site.items("lists/11") == [entry("gone")]


async def test_a_corrupt_list_is_made_anew_and_what_is_no_list_stays() -> None:
    site = Site(members(TITLES))
    await site.store.put("lists/s", b"torn")
    await put(site, "lists/t", {"text": "mine"})
    await site.note("a", space="s", title="A")
    await site.note("a", space="t", title="A")
    assert await rebuilt(site) == {"lists/s": (1, 1)}
    assert await site.items("lists/s") == [entry("a", title="A")]
    assert await site.data("lists/t") == {"text": "mine"}
    assert site.count("failures") == 2


async def test_write_and_fold_during_a_rebuild_is_in_the_list() -> None:
    """A source appears after the sources were walked, over an entry that had none; its change is folded
    before the list is pruned."""
    memory, coordinator = MemoryStore(), MemoryCoordinator()
    store = FaultyStore(memory)
    server, site = (Site(members(TITLES), store=one, coordinator=coordinator) for one in (memory, store))
    await server.note("a", title="A")
    await put(server, "lists/s", {"items": [entry("a", title="A"), entry("b", title="B")]})
    release = asyncio.Event()
    arrived = store.delay("get", release, after=1)  # the list's, after the walk has read the source
    rebuilding = asyncio.ensure_future(rebuilt(site))
    await arrived.wait()
    await server.note("b", title="B")
    await server.fold()
    release.set()
    await rebuilding
    assert await server.items() == [entry("a", title="A"), entry("b", title="B")]


async def test_rebuild_during_writes_and_folds_matches_the_sources() -> None:
    store, coordinator = Turning(), MemoryCoordinator()
    settings = members(TITLES | {"maxRetries": 1000})
    writer, server, site = (Site(settings, store=store, coordinator=coordinator) for _ in range(3))
    final = {}

    async def write() -> None:
        for n in range(120):
            id_ = f"n{n * 7 % 11}"
            final[id_] = None if n % 5 == 0 else n
            await writer.note(id_, **({"deleted": True} if n % 5 == 0 else {"title": n}))

    async def fold() -> None:
        while not writing.done():
            await server.fold()
            await asyncio.sleep(0)

    async def rebuild_on() -> None:
        while not writing.done():
            await rebuilt(site)
            await asyncio.sleep(0)

    writing = asyncio.ensure_future(write())
    await asyncio.gather(writing, fold(), rebuild_on())
    await server.fold()
    items = await server.items()
    assert {item["id"]: item["value"]["title"] for item in items} == {
        id_: n for id_, n in final.items() if n is not None
    }


class Turning(MemoryStore):
    """Lets others go on before each call."""

    async def get(self, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return await super().get(*arguments)

    async def put(self, *arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0)
        return await super().put(*arguments, **options)


def written(tmp_path: Path, *projections: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    """A configuration file whose store is a folder beside it, and what it says."""
    said = {"version": 1, **members(*projections), "store": f"file:{tmp_path / 'data'}", **more}
    file = tmp_path / "pysync.json"
    file.write_text(json.dumps(said))
    return str(file), said


async def test_the_command_rebuilds_while_a_server_runs_and_notifies_its_subscribers(
    shell: Shell, tmp_path: Path
) -> None:
    file, said = written(tmp_path, TITLES | {"name": "titles"})
    async with await create_app(parse(said)) as app:
        services = app.engine
        store = services.store
        assert isinstance(store, LocalStore)
        await services.documents.push("notes/s/a", decode_push(b'{"data":{"title":"A"}}'))  # nobody is told
        newest = await services.outbox.log.last_id()
        status, output, errors = await shell.run_async("project", "rebuild", "titles", "--config", file)
        assert (status, errors) == (0, "")
        assert output == '{"list": "lists/s", "entries": 1, "changed": 1}\n'
        found = await services.outbox.log.read(newest, 10)
        assert found is not None
        assert [json.loads(change.text)["collection"] for _, change in found] == ["lists"]
        status, output, _ = await shell.run_async("project", "rebuild", "titles", "--config", file)
        assert json.loads(output)["changed"] == 0


async def test_the_command_rebuilds_while_the_server_reloads(shell: Shell, tmp_path: Path) -> None:
    file, said = written(tmp_path, TITLES | {"name": "titles"})
    async with await create_app(parse(said)) as app:
        for n in range(300):
            body = json.dumps({"data": {"title": str(n)}}).encode()
            await app.engine.documents.push(f"notes/s/{n}", decode_push(body))
        command = ("project", "rebuild", "titles", "--config", file)
        rebuilding = asyncio.create_task(shell.run_async(*command))
        while not rebuilding.done():
            await app.apply(app.prepare(parse(said)))
            await asyncio.sleep(0)
        status, output, errors = await rebuilding
    assert (status, errors) == (0, "")
    assert json.loads(output)["entries"] == 300


def test_unknown_name_is_reported_with_the_known_names(shell: Shell, tmp_path: Path) -> None:
    file, _ = written(tmp_path, TITLES | {"name": "titles"}, TITLES)
    status, _, errors = shell.run("project", "rebuild", "title", "--config", file)
    assert status == 1
    assert errors == "pysync: there is no projection title; there are: titles, lists/{space}\n"


def test_a_store_in_memory_has_nothing_to_rebuild(shell: Shell, tmp_path: Path) -> None:
    file, _ = written(tmp_path, TITLES | {"name": "titles"}, store="memory:")
    status, _, errors = shell.run("project", "rebuild", "titles", "--config", file)
    assert (status, "nothing to rebuild" in errors) == (1, True)


def test_no_store_is_made_to_rebuild_lists_in(shell: Shell, tmp_path: Path) -> None:
    file, _ = written(tmp_path, TITLES | {"name": "titles"})
    store = f"file:{tmp_path / 'other'}"
    status, _, errors = shell.run("project", "rebuild", "titles", "--config", file, "--store", store)
    assert (status, errors) == (1, f"pysync: {store}: there is no store\n")
    assert not (tmp_path / "other").exists()


def test_a_projection_of_a_plugin_is_rebuilt_too(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_rebuilt.py").write_text(
        "from pysync.plugins.projection import Projection\n"
        'plugin = Projection("notes", "lists/{space}", lambda event: {"id": "n", "value": {}}, name="mine")\n'
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    file, said = written(tmp_path, plugins=["mine_rebuilt:plugin"])

    async def push() -> None:
        async with await create_app(parse({**said, "plugins": []})) as app:
            await app.engine.documents.push("notes/s/a", decode_push(b'{"data":{}}'))

    asyncio.run(push())
    assert shell.json("project", "rebuild", "mine", "--config", file) == {
        "list": "lists/s",
        "entries": 1,
        "changed": 1,
    }
