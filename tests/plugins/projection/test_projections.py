"""Projections, rule by rule (docs/reference/protocol.md#projected-lists), folded on demand."""

import asyncio
import json
from typing import Any

import pytest
from support.collections import PUBLIC
from support.faulty_store import FaultyStore
from support.projection_site import JOURNAL, LISTS, NOTES, TITLES, Site, entry, members, titled

from pysync._core import decode_push
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import StoreUnavailable
from pysync.model import WriteEvent
from pysync.plugins.projection import Projection
from pysync.protocol import JSON_TYPE
from pysync.store import ANY, EtagMismatch, NotModified, Precondition, StoredObject
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

Logged = pytest.LogCaptureFixture


async def test_a_new_entry_is_appended_and_an_old_one_replaced_where_it_stands() -> None:
    site = Site(members(TITLES))
    for id_ in ("b", "a", "c"):
        await site.note(id_, title=id_.upper())
    await site.fold()
    assert await site.items() == [entry("b", title="B"), entry("a", title="A"), entry("c", title="C")]
    await site.note("a", title="A2")
    await site.fold()
    assert await site.items() == [entry("b", title="B"), entry("a", title="A2"), entry("c", title="C")]


async def test_a_removed_entry_is_gone_and_removing_an_absent_one_does_nothing() -> None:
    site = Site(members(TITLES))
    await site.note("a", title="A")
    await site.note("b", title="B")
    await site.fold()
    await site.note("a", deleted=True)
    await site.note("z", deleted=True)
    await site.fold()
    assert await site.items() == [entry("b", title="B")]
    announced_count = len(await site.announced())
    await site.note("a", deleted=True, at=2)
    await site.fold()
    assert len(await site.announced()) == announced_count


async def test_an_emptied_list_stays_and_one_that_was_never_there_is_not_made() -> None:
    site = Site(members(TITLES))
    await site.note("a", space="s", title="A")
    await site.note("a", space="t", deleted=True)
    await site.fold()
    await site.note("a", space="s", deleted=True)
    await site.fold()
    assert (await site.items("lists/s"), await site.items("lists/t")) == ([], None)


async def test_list_stays_if_project_or_target_returns_none() -> None:
    def project(event: WriteEvent) -> Any:
        return None if event.body and event.body.get("draft") else titled(event)

    def target(event: WriteEvent) -> str | None:
        return None if event.body and event.body.get("secret") else "lists/s"

    site = Site(members(), [Projection("notes", target, project)])
    await site.note("a", title="A")
    await site.fold()
    await site.note("a", title="A2", draft=True)
    await site.note("b", title="B", secret=True)
    await site.fold()
    assert await site.items() == [entry("a", title="A")]
    assert site.count("failures") == 0


async def test_a_conflict_is_folded_again_over_what_is_there_then() -> None:
    store = FaultyStore(MemoryStore())
    coordinator = MemoryCoordinator()
    site, other = (Site(members(TITLES), store=store, coordinator=coordinator) for _ in range(2))
    await site.note("a", title="A")
    release = asyncio.Event()
    arrived = store.delay("put", release)
    folding = asyncio.ensure_future(site.fold())
    await arrived.wait()
    await other.note("b", title="B")
    await other.fold()
    release.set()
    await folding
    assert await site.items() == [entry("a", title="A"), entry("b", title="B")]
    assert site.count("drops") == 0


async def test_stale_read_of_a_source_does_not_win() -> None:
    store = FaultyStore(MemoryStore())
    coordinator = MemoryCoordinator()
    site, other = (Site(members(TITLES), store=store, coordinator=coordinator) for _ in range(2))
    await site.note("a", title="old")
    release = asyncio.Event()
    arrived = store.delay("get", release, after=1)
    folding = asyncio.ensure_future(site.fold())
    await arrived.wait()
    await other.note("a", title="new")
    await other.fold()
    release.set()
    await folding
    assert await site.items() == [entry("a", title="new")]


class Contested(MemoryStore):
    """Another writer is always faster, at one key."""

    async def put(self, key: str, *arguments: Any, **options: Any) -> str:
        if key == "lists/s":
            self.rejected += 1
            raise EtagMismatch
        return await super().put(key, *arguments, **options)

    rejected = 0


@pytest.mark.parametrize(("said", "attempts"), [({}, 9), ({"maxRetries": 2}, 3), ({"maxRetries": 0}, 1)])
async def test_after_max_retries_the_change_is_logged_and_dropped(
    caplog: Logged, said: dict[str, Any], attempts: int
) -> None:
    store = Contested()
    site = Site(members(TITLES | said), store=store)
    await site.note("a", title="A")
    await site.note("a", space="t", title="A")
    await site.fold()
    assert store.rejected == attempts
    assert "lists/s is written by others all the time" in caplog.text
    assert site.count("drops") == 1
    assert await site.items("lists/t") == [entry("a", title="A")]


async def test_a_full_list_takes_no_further_entries_but_updates_and_removals(caplog: Logged) -> None:
    site = Site(members(TITLES | {"maxItems": 2}))
    for id_ in ("a", "b", "c", "d"):
        await site.note(id_, title=id_)
    await site.fold()
    assert [item["id"] for item in await site.items()] == ["a", "b"]
    assert "the list lists/s is full: 2 new entries dropped" in caplog.text
    assert site.count("drops") == 2
    await site.note("b", title="B")
    await site.note("a", deleted=True)
    await site.fold()
    assert await site.items() == [entry("b", title="B")]
    await site.note("c", title="C")
    await site.fold()
    assert await site.items() == [entry("b", title="B"), entry("c", title="C")]


async def test_each_shard_is_a_list_of_its_own_with_a_cap_of_its_own() -> None:
    site = Site(members(TITLES | {"maxItems": 2}))
    for space in ("x", "y", "z"):
        for at in range(3):
            await site.note(f"n{at}", space=space, title=space)
    await site.fold()
    assert await site.store.list("lists", None, 10) == ["x", "y", "z"]
    for space in ("x", "y", "z"):
        assert await site.items(f"lists/{space}") == [entry("n0", title=space), entry("n1", title=space)]


async def test_a_function_shards_by_what_was_pushed() -> None:
    def target(event: WriteEvent) -> str | None:
        return f"lists/{event.body['month']}" if event.body else None

    site = Site(members(), [Projection("notes", target, titled)])
    await site.note("a", title="A", month="2026-10")
    await site.note("b", title="B", month="2026-11")
    await site.fold()
    assert await site.items("lists/2026-10") == [entry("a", title="A")]
    assert await site.items("lists/2026-11") == [entry("b", title="B")]


async def test_a_list_may_be_larger_than_the_bodies_that_its_collection_takes() -> None:
    site = Site(members(TITLES, collections=[NOTES, LISTS | {"maxBodyBytes": 100}]))
    for at in range(20):
        await site.note(f"n{at}", title="x" * 20)
    await site.fold()
    assert len(await site.items()) == 20


async def test_the_id_is_next_to_the_value_and_never_part_of_it() -> None:
    site = Site(members(TITLES | {"value": {"id": "/id"}}))
    await site.note("a", id="b")
    await site.note("b", id="a")
    await site.fold()
    assert await site.items() == [entry("a", id="b"), entry("b", id="a")]


async def test_a_written_list_is_announced_once_with_its_hash() -> None:
    site = Site(members(TITLES))
    await site.note("a", title="A")
    await site.fold()
    (change,) = await site.announced()
    document = await site.documents.pull("lists/s")
    assert document is not None
    assert change == {
        "collection": "lists",
        "params": {"space": "s"},
        "hash": document.hash,
        "timestamp": document.ts_ms,
    }
    await site.note("a", title="A", beside="the title")
    await site.fold()
    assert await site.announced() == [change]


async def test_a_list_that_belongs_to_no_collection_is_kept_and_not_announced() -> None:
    site = Site(members(TITLES | {"target": "elsewhere/{space}"}))
    await site.note("a", title="A")
    await site.fold()
    assert await site.items("elsewhere/s") == [entry("a", title="A")]
    assert await site.announced() == []


async def test_sources_in_namespaces_are_projected_and_lists_announced_in_theirs() -> None:
    own = {
        "notes": {**NOTES, "storagePath": "acme/{space}/{id}"},
        "lists": {**LISTS, "storagePath": "l/{of}"},
    }
    namespaces = {"acme": {"collections": list(own.values())}}
    site = Site(members(TITLES | {"target": "l/{space}"}, namespaces=namespaces))
    await site.push("notes", {"space": "s", "id": "a"}, {"title": "A"}, "acme")
    await site.fold()
    assert await site.items("l/s") == [entry("a", title="A")]
    (change,) = await site.announced()
    assert (change["namespace"], change["params"]) == ("acme", {"of": "s"})


async def test_literal_segments_of_a_storage_path_decide_the_owner_of_the_list() -> None:
    special = {**LISTS, "name": "special", "storagePath": "lists/all", "listable": False}
    site = Site(members(TITLES | {"target": "lists/all"}, collections=[NOTES, LISTS, special]))
    await site.note("a", title="A")
    await site.fold()
    assert [change["params"] for change in await site.announced("special")] == [{}]
    assert await site.announced("lists") == []


async def test_unknown_members_next_to_the_items_stay() -> None:
    site = Site(members(TITLES))
    items = [entry("a", title="old"), "no entry", {"no": "id"}, entry("a", title="second")]
    body = decode_push(json.dumps({"data": {"title": "Spring", "items": items}}).encode())
    await site.documents.push("lists/s", body)
    await site.note("a", title="A")
    await site.fold()
    assert await site.data() == {"title": "Spring", "items": [entry("a", title="A"), *items[1:]]}


@pytest.mark.slow
async def test_elements_of_a_log_are_projected_in_their_order() -> None:
    def project(event: WriteEvent) -> Any:
        data = event.body or {}
        if "gone" in data:
            return {"id": data["gone"], "remove": True}
        return {"id": data["who"], "value": {"said": data["said"], "at": event.timestamp}}

    clock = FakeClock(1000)
    site = Site(members(), [Projection("journal", "lists/{space}", project)], now_ms=clock)
    for data in ({"who": "x", "said": 1}, {"who": "y", "said": 2}, {"who": "x", "said": 3}):
        clock.now_ms += 10
        await site.push("journal", {"space": "s"}, data)
    await site.fold()
    assert await site.items() == [entry("x", said=3, at=1030), entry("y", said=2, at=1020)]
    clock.now_ms += 10
    await site.push("journal", {"space": "s"}, {"gone": "x"})
    await site.fold()
    assert await site.items() == [entry("y", said=2, at=1020)]


async def test_an_element_carries_the_hash_and_writer_of_its_append() -> None:
    seen: list[WriteEvent] = []

    def project(event: WriteEvent) -> Any:
        seen.append(event)

    site = Site(members(), [Projection(["journal", "notes"], "lists/{space}", project)])
    await site.push("journal", {"space": "s"}, {"n": 1}, by="ann")
    await site.push("journal", {"space": "s"}, {"n": 2}, by="bob")
    await site.push("notes", {"space": "s", "id": "a"}, {"n": 3}, by="cid")
    await site.fold()
    hashes = {change["hash"] for name in ("journal", "notes") for change in await site.announced(name)}
    assert {event.hash for event in seen} == hashes
    writers = {event.body["n"]: event.identity for event in seen if event.body is not None}
    assert writers == {1: "ann", 2: "bob", 3: "cid"}


async def test_a_source_that_has_expired_says_nothing() -> None:
    clock = FakeClock(1000)
    collections = [NOTES | {"ttlMs": 100}, LISTS]
    site = Site(members(TITLES, collections=collections), now_ms=clock)
    await site.note("a", title="A")
    clock.now_ms += 101
    await site.note("b", title="B")
    await site.fold()
    assert await site.items() == [entry("b", title="B")]


async def test_a_list_that_has_expired_begins_anew() -> None:
    clock = FakeClock(1000)
    site = Site(members(TITLES, collections=[NOTES, LISTS | {"ttlMs": 100}]), now_ms=clock)
    await site.note("a", title="A")
    await site.fold()
    clock.now_ms += 101
    await site.note("b", title="B")
    await site.fold()
    assert await site.items() == [entry("b", title="B")]


async def test_a_list_may_be_the_source_of_another() -> None:
    index = {**LISTS, "name": "index", "storagePath": "index", "listable": False}

    def counted(event: WriteEvent) -> Any:
        assert event.body is not None
        return {"id": event.params["space"], "value": {"n": len(event.body["items"])}}

    site = Site(members(TITLES, collections=[NOTES, LISTS, index]), [Projection("lists", "index", counted)])
    for space in ("x", "x", "y"):
        await site.note(f"n{len(await site.announced('notes'))}", space=space, title="T")
    await site.fold()
    await site.fold()
    assert await site.items("index") == [entry("x", n=2), entry("y", n=1)]


async def test_two_projections_may_share_a_list() -> None:
    tasks = {"name": "tasks", "storagePath": "tasks/{space}/{id}", **PUBLIC}
    also = TITLES | {"source": "tasks", "id": "task-{id}", "name": "tasks"}
    site = Site(members(TITLES, also, collections=[NOTES, tasks, LISTS]))
    await site.note("a", title="A")
    await site.push("tasks", {"space": "s", "id": "a"}, {"title": "do"})
    await site.fold()
    assert await site.items() == [entry("a", title="A"), entry("task-a", title="do")]
    assert len(await site.announced()) == 1


async def test_of_two_sources_of_one_entry_the_later_write_counts() -> None:
    clock = FakeClock(1000)
    latest = Projection(
        "notes", "lists/{space}", lambda event: {"id": "latest", "value": dict(event.body or {})}
    )
    site = Site(members(), [latest], now_ms=clock)
    for id_, n in (("a", 1), ("b", 2), ("a", 3)):
        clock.now_ms += 1
        await site.note(id_, n=n)
    await site.fold()
    assert await site.items() == [entry("latest", n=3)]


async def test_changes_folded_again_change_nothing() -> None:
    site = Site(members(TITLES))
    for at in range(5):
        await site.note(f"n{at}", title=f"T{at}", deleted=at == 3)
    await site.fold()
    before = await site.store.get("lists/s")
    await site.fold_all()
    assert await site.store.get("lists/s") == before


async def test_numbers_that_a_list_holds_in_another_form_are_no_change() -> None:
    site = Site(members(), [Projection("notes", "lists/{space}", lambda _: {"id": "a", "value": {"n": 1.0}})])
    await site.note("a")
    await site.fold()
    await site.fold_all()
    assert len(await site.announced()) == 1


async def test_true_in_place_of_one_is_a_change() -> None:
    site = Site(members(TITLES))
    await site.note("a", title=1)
    await site.fold()
    await site.note("a", title=True)
    await site.fold()
    (item,) = await site.items()
    assert item["value"]["title"] is True


async def test_a_burst_on_one_list_is_one_write_a_page() -> None:
    store = FaultyStore(MemoryStore())
    site = Site(members(TITLES), store=store)
    for at in range(1000):
        await site.note(f"n{at}", title=f"T{at}")
    puts = store.calls["put"]
    await site.fold()
    assert len(await site.items()) == 1000
    assert store.calls["put"] - puts < 10


async def test_a_store_that_fails_meanwhile_is_no_lost_change() -> None:
    store = FaultyStore(MemoryStore())
    site = Site(members(TITLES), store=store)
    await site.note("a", title="A")
    await site.note("b", space="t", title="B")
    for fault in (store.fail, store.lose_reply):
        for verb in ("get", "put"):
            fault(verb)
            with pytest.raises(StoreUnavailable):
                await site.fold_all()
            store.reset()
            await site.note("c", title=f"{fault} {verb}")
    await site.fold_all()
    assert [item["id"] for item in await site.items()] == ["a", "c"]
    assert await site.items("lists/t") == [entry("b", title="B")]


async def test_long_list_is_folded_in_a_thread() -> None:
    site = Site(members(TITLES))
    for at in range(700):
        await site.note(f"n{at}", title="x" * 60)
    await site.fold()
    await site.note("last", title="L")
    await site.fold()
    items = await site.items()
    assert (len(items), items[-1]) == (701, entry("last", title="L"))


def test_a_target_that_is_no_key_is_rejected() -> None:
    with pytest.raises(ValueError, match="must not start or end with a slash"):
        Projection("notes", "/lists", titled)


def test_a_projection_is_named_for_its_target_unless_it_says_otherwise() -> None:
    def by_month(event: WriteEvent) -> str | None:
        return None

    assert Projection("notes", "lists/{space}", titled).name == "lists/{space}"
    assert Projection("notes", by_month, titled).name == "by_month"
    assert Projection("notes", by_month, titled, name="mine").name == "mine"


async def test_a_write_of_a_collection_that_is_no_more_is_passed_over() -> None:
    coordinator, store = MemoryCoordinator(), MemoryStore()
    before = Site(members(collections=[NOTES, JOURNAL]), store=store, coordinator=coordinator)
    await before.note("a", title="A")
    moved = [NOTES | {"storagePath": "moved/{id}"}, LISTS]
    flat = TITLES | {"target": "lists/all"}
    site = Site(members(flat, collections=moved), store=store, coordinator=coordinator)
    await site.fold()
    assert await site.items("lists/all") is None


class CountingStore(MemoryStore):
    """Counts the ticks of the event loop, and notes when the list is read and written."""

    ticks = 0
    used_at: tuple[int, ...] = ()

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        if key == "lists/s":
            self.used_at = (self.ticks,)
        return await super().get(key, if_none_match)

    async def put(
        self, key: str, body: bytes, content_type: str = JSON_TYPE, expect: Precondition = ANY
    ) -> str:
        if key == "lists/s":
            self.used_at += (self.ticks,)
        return await super().put(key, body, content_type, expect)

    async def count(self) -> None:
        while True:
            self.ticks += 1
            await asyncio.sleep(0)


async def test_others_are_served_while_a_long_list_without_a_limit_is_written() -> None:
    ticks = []
    for length in (1, 5_000):
        store = CountingStore()
        site = Site(members(TITLES), store=store)
        items = [entry(f"n{n}", title=f"Title {n}") for n in range(length)]
        await site.documents.push("lists/s", decode_push(json.dumps({"data": {"items": items}}).encode()))
        await site.note("n0", title="new")
        counting = asyncio.create_task(store.count())
        await site.fold()
        counting.cancel()
        read_at, written_at = store.used_at
        ticks.append(written_at - read_at)
        assert (await site.items())[0] == entry("n0", title="new")
    short, long = ticks
    assert long > short
