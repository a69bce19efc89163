"""What plugins may do to pulls and pushes (docs/reference/plugins.md)."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, Start
from support.collections import LOG, limit_of
from support.faulty_store import FaultyStore
from support.plugin_samples import (
    CARDS,
    EVERYTHING,
    MINE,
    NOTES,
    RINGS,
    TITLE,
    NotifiedPlugin,
    Reading,
    Taking,
    batch,
    people,
)

from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import parse_change
from pysync.errors import Forbidden
from pysync.model import WriteEvent, WriteResult
from pysync.plugins import PluginRequest, PullResponse, PushResponse
from pysync.store.memory import MemoryStore


async def test_plugins_are_notified_of_every_push_that_was_answered_200(
    start: Start, session: aiohttp.ClientSession
) -> None:
    plugin = NotifiedPlugin()
    members = {"collections": EVERYTHING, "namespaces": {"acme": {"collections": [NOTES]}}}
    someone, _, anyone = people(await start(members, plugins=[plugin]), session)
    for browser, target, collection, params, namespace in (
        (anyone, "/push/notes/a", "notes", {"id": "a"}, None),
        (someone, f"/push/u/{ISSUER.user_id}", "mine", {"identity": ISSUER.user_id}, None),
        (anyone, "/push/boards/b/cards", "cards", {"id": "b"}, None),
        (anyone, "/acme/push/notes/n", "notes", {"id": "n"}, "acme"),
        (anyone, "/push/log/l", "log", {"id": "l"}, None),
    ):
        answer = await browser.request("POST", target, {"data": {"at": target, "__proto__": 1}})
        assert answer.status == 200
        assert plugin.events == [
            WriteEvent(
                collection,
                params,
                answer.json["hash"],
                answer.json["timestamp"],
                plugin.events[0].text,
                ISSUER.user_id if browser is someone else None,
                namespace,
            )
        ]
        assert plugin.events.pop().body == {"at": target}


async def test_plugins_are_not_notified_of_a_rejected_push(
    start: Start, session: aiohttp.ClientSession
) -> None:
    plugin = NotifiedPlugin()
    small = {**NOTES, "maxBodyBytes": 100}
    _, other, anyone = people(await start({"collections": [small, MINE]}, plugins=[plugin]), session)
    assert (await anyone.push("notes/a", {})).status == 200
    assert len(plugin.events) == 1
    for answer, status in (
        (await anyone.push("notes/a", {}), 409),
        (await anyone.push("notes/b", {"x": "y" * 100}), 413),
        (await anyone.request("POST", "/push/notes/b", b"{"), 400),
        (await other.push(f"u/{ISSUER.user_id}", {}), 403),
        (await anyone.push(f"u/{ISSUER.user_id}", {}), 401),
    ):
        assert answer.status == status
    await anyone.pull("notes/a")
    assert len(plugin.events) == 1


async def test_plugins_are_notified_again_of_a_repeated_push(
    start: Start, session: aiohttp.ClientSession
) -> None:
    plugin = NotifiedPlugin()
    *_, anyone = people(await start({"collections": EVERYTHING}, plugins=[plugin]), session)
    again = {"Idempotency-Key": "once"}
    for key in ("notes/a", "log/l"):
        bodies = {(await anyone.push(key, {"n": 1}, headers=again)).body for _ in range(2)}
        assert len(bodies) == 1
        assert plugin.events[-1] == plugin.events[-2]
    assert len(plugin.events) == 4


async def test_plugins_are_notified_of_appends_that_are_stored_nowhere(
    start: Start, session: aiohttp.ClientSession
) -> None:
    plugin = NotifiedPlugin()
    passing = {**LOG, "appendOnly": {"persist": False, "requireAuthorSignature": False}}
    *_, anyone = people(await start({"collections": [passing]}, plugins=[plugin]), session)
    assert (await anyone.push("log/l", {"n": 1})).status == 200
    assert plugin.events[0].body == {"n": 1}


async def test_body_is_parsed_once_and_only_on_request(start: Start, session: aiohttp.ClientSession) -> None:
    plugins = [NotifiedPlugin("one"), NotifiedPlugin("two")]
    *_, anyone = people(await start({"collections": [NOTES]}, plugins=plugins), session)
    await anyone.push("notes/a", {"n": 1})
    one, two = (plugin.events[0] for plugin in plugins)
    assert "body" not in vars(one)
    assert one.body is two.body


class Cancelled:
    """Waits in one hook for a task of its own that is cancelled."""

    name = "cancelled"

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._wait)

    async def _wait(self, about: object) -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task


class Slow:
    """Waits in after_write until it is let go."""

    name = "slow"

    def __init__(self) -> None:
        self.arrived, self.release = asyncio.Event(), asyncio.Event()

    async def after_write(self, event: WriteEvent) -> None:
        self.arrived.set()
        await self.release.wait()


class Failing:
    name = "failing"

    async def after_write(self, event: WriteEvent) -> None:
        raise RuntimeError("no such table")


async def test_push_is_answered_after_plugins_are_notified(
    start: Start, session: aiohttp.ClientSession
) -> None:
    slow, plugin = Slow(), NotifiedPlugin()
    *_, anyone = people(await start({"collections": [NOTES]}, plugins=[slow, plugin]), session)
    pushing = asyncio.create_task(anyone.push("notes/a", {"n": 1}))
    await slow.arrived.wait()
    assert (await anyone.pull("notes/a")).json["data"] == {"n": 1}
    assert not pushing.done()
    assert plugin.events == []
    slow.release.set()
    assert (await pushing).status == 200
    assert len(plugin.events) == 1


@pytest.mark.parametrize(
    ("plugin", "hook_s", "said"),
    [
        (Failing(), 5.0, "plugin failing: after_write failed"),
        (Slow(), 0.0, "plugin slow: after_write took too long"),
        (Cancelled("after_write"), 5.0, "plugin cancelled: after_write failed"),
    ],
)
async def test_failing_after_write_hook_is_logged_and_counted_only(
    plugin: Any,
    hook_s: float,
    said: str,
    start: Start,
    session: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
) -> None:
    notified = NotifiedPlugin()
    base = await start({"collections": [NOTES, LOG]}, plugins=[plugin, notified], hook_s=hook_s)
    *_, anyone = people(base, session)
    for key in ("notes/a", "log/l"):
        answer = await anyone.push(key, {"n": 1}, headers={"X-Request-Id": "the-request"})
        assert answer.status == 200
        assert answer.json.keys() == {"hash", "timestamp"}
    failures = [record for record in caplog.records if record.name == "pysync.plugins"]
    assert [record.getMessage() for record in failures] == [said, said]
    assert {record.__dict__["request_id"] for record in failures} == {"the-request"}
    assert all(record.exc_info for record in failures)
    page = (await anyone.request("GET", "/metrics")).body.decode()
    assert f'pysync_plugin_failures_total{{hook="after_write",plugin="{plugin.name}"}} 2.0' in page
    assert len(notified.events) == 2


class Remembering:
    """Notes what the context variable `seen` holds at each pull, and sets it."""

    name = "remembering"

    def __init__(self) -> None:
        self.seen: ContextVar[str] = ContextVar("seen", default="")
        self.found: list[str] = []

    async def before_pull(self, request: PluginRequest) -> None:
        self.found.append(self.seen.get())
        self.seen.set(request.key)


async def test_a_plugin_finds_no_context_of_an_earlier_request(
    start: Start, session: aiohttp.ClientSession
) -> None:
    plugin = Remembering()
    *_, anyone = people(await start({"collections": [NOTES]}, plugins=[plugin]), session)
    for key in ("notes/a", "notes/b"):  # on one connection
        assert (await anyone.pull(key)).status == 200
    assert plugin.found == ["", ""]


async def test_plugins_are_queried_before_any_pull_alone_or_with_others(
    start: Start, session: aiohttp.ClientSession
) -> None:
    reading = Reading()
    *_, anyone = people(await start({"collections": EVERYTHING}, plugins=[reading]), session)
    await anyone.push("notes/a", {})
    assert reading.before == [], "a push is no pull"
    for target, keys in (
        ("/pull/notes/a", ["notes/a"]),
        ("/pull/log/l?last=1", ["log/l"]),
        ("/pull/boards/b", ["boards/b/cards", "boards/b/title"]),
        ("/pull/notes/a?withKeyring=1", ["notes/a", "notes/a/_keyring"]),
        ("/list/notes", []),
        (f"/pull/u/{ISSUER.user_id}", []),
    ):
        await anyone.request("GET", target)
        for queries in (reading.before, reading.queries):
            assert [request.key for request in queries] == keys
            queries.clear()
    await batch(anyone, notes=[{"id": "a"}, {"id": "a"}, {"id": "b"}], log=[{"id": "l"}], mine=[{}])
    assert sorted(request.key for request in reading.before) == ["log/l", "notes/a", "notes/b"]
    assert reading.before[0].params == {"id": reading.before[0].key.rpartition("/")[2]}


async def test_document_rejected_by_a_plugin_is_not_read(
    start: Start, session: aiohttp.ClientSession
) -> None:
    no = Forbidden("not on Sundays")
    reading = Reading(notes_a=no, log_l=no, boards_b_cards=no, notes_n__keyring=no)
    store = FaultyStore(MemoryStore())
    *_, anyone = people(await start({"collections": EVERYTHING}, store=store, plugins=[reading]), session)
    for key in ("notes/a", "log/l", "boards/b/cards", "notes/n", "notes/n/_keyring"):
        assert (await anyone.push(key, {"n": 1})).status == 200
    for target in ("/pull/notes/a", "/pull/log/l?last=1"):
        assert (await anyone.request("GET", target)).error == (403, "not on Sundays")
    assert (await anyone.pull("boards/b")).json["collections"].keys() == {"title"}
    folded = await anyone.pull("notes/n?withKeyring=1")
    assert folded.json["data"] == {"n": 1}
    assert "keyring" not in folded.json
    found = await batch(anyone, notes=[{"id": "a"}, {"id": "n"}], log=[{"id": "l"}])
    assert found["notes"][0] == {"error": "not on Sundays"}
    assert found["notes"][1]["data"] == {"n": 1}
    assert found["log"] == [{"error": "not on Sundays"}]


async def test_a_plugin_answers_a_pull_instead_of_the_store(
    start: Start, session: aiohttp.ClientSession
) -> None:
    picture = PullResponse(b"\x89PNG", "image/png", "v1")
    reading = Reading(
        notes_a=picture, log_l=PullResponse(b"{}"), boards_b_cards=picture, notes_n__keyring=picture
    )
    *_, anyone = people(await start({"collections": EVERYTHING}, plugins=[reading]), session)
    for key in ("notes/a", "log/l", "boards/b/cards", "notes/n", "notes/n/_keyring"):
        assert (await anyone.push(key, {"n": 1})).status == 200
    answer = await anyone.pull("notes/a")
    assert (answer.status, answer.body) == (200, picture.body)
    assert answer.headers["Content-Type"] == "image/png"
    assert answer.headers["ETag"] == '"v1"'
    assert answer.headers["Cache-Control"] == "no-cache"
    again = await anyone.pull("notes/a", {"If-None-Match": '"v1"'})
    assert (again.status, again.body) == (304, b"")
    head = await anyone.request("HEAD", "/pull/notes/a")
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", "4")
    bounded = await anyone.request("GET", "/pull/log/l")
    assert (bounded.status, bounded.body) == (200, b"{}")
    assert "ETag" not in bounded.headers
    assert (await anyone.pull("notes/n")).json["data"] == {"n": 1}, "left to the store"


async def test_answers_of_a_plugin_are_in_no_batch_bundle_or_fold(
    start: Start, session: aiohttp.ClientSession
) -> None:
    own = PullResponse(b"own")
    reading = Reading(notes_a=own, log_l=own, boards_b_cards=own, notes_n__keyring=own)
    *_, anyone = people(await start({"collections": EVERYTHING}, plugins=[reading]), session)
    for key in ("notes/a", "log/l", "boards/b/cards", "notes/n", "notes/n/_keyring"):
        assert (await anyone.push(key, {"n": 1})).status == 200
    found = await batch(anyone, notes=[{"id": "a"}, {"id": "n"}], log=[{"id": "l"}])
    assert found["notes"][0] == {"error": "Collection not found"}
    assert found["notes"][1]["data"] == {"n": 1}
    assert found["log"] == [{"error": "Collection not found"}]
    assert (await anyone.pull("boards/b")).json["collections"].keys() == {"title"}
    assert "keyring" not in (await anyone.pull("notes/n?withKeyring=1")).json


async def test_plugin_is_not_queried_about_forbidden_documents(
    start: Start, session: aiohttp.ClientSession
) -> None:
    reading, taking = Reading(), Taking("mine", PushResponse(WriteResult("h", 1)))
    _, other, anyone = people(await start({"collections": [MINE]}, plugins=[reading, taking]), session)
    key = f"u/{ISSUER.user_id}"
    for browser, status in ((other, 403), (anyone, 401)):
        assert (await browser.pull(key)).status == status
        assert (await browser.push(key, {})).status == status
        assert (await batch(browser, mine=[{"identity": ISSUER.user_id}]))["mine"][0]["error"] == "Forbidden"
    assert (reading.before, reading.queries, taking.taken) == ([], [], [])


async def test_a_plugin_takes_a_push_and_it_is_announced_like_any_other(
    start: Start, session: aiohttp.ClientSession
) -> None:
    plugin = NotifiedPlugin()
    taken = PushResponse(WriteResult("0f", 17), {"batchId": "b-1", "hash": "forged"})
    coordinator = MemoryCoordinator()
    for collection, key in (("notes", "notes/a"), ("log", "log/a"), ("cards", "boards/a/cards")):
        taking = Taking(collection, taken)
        base = await start({"collections": EVERYTHING}, coordinator=coordinator, plugins=[taking, plugin])
        *_, anyone = people(base, session)
        before = await coordinator.last_id()
        answer = await anyone.push(key, {"b": 1, "a": 2}, "some base")
        assert (answer.status, answer.json) == (200, {"hash": "0f", "timestamp": 17, "batchId": "b-1"})
        (push,) = taking.taken
        assert (push.request.action, push.request.key, push.data) == ("push", key, b'{"a":2,"b":1}')
        assert push.base_hash == (None if collection == "log" else "some base")
        assert len(push.hash) == 64
        pulled = await anyone.pull(key if collection != "cards" else "boards/a", None)
        assert b'"b":1' not in pulled.body, "it is not stored"
        changes = await coordinator.read(before, 9)
        assert changes is not None
        ((_, change),) = changes
        assert (parse_change(change).ref.collection, parse_change(change).hash) == (collection, "0f")
        event = plugin.events.pop()
        assert (event.collection, event.hash, event.timestamp) == (collection, "0f", 17)
        assert event.body == {"a": 2, "b": 1}


async def test_a_push_that_a_plugin_takes_is_checked_and_counted_like_any_other(
    start: Start, session: aiohttp.ClientSession
) -> None:
    taking = Taking("notes", PushResponse(WriteResult("h", 1)))
    checked = {
        **NOTES,
        "maxBodyBytes": 100,
        "objectSchema": {"required": ["n"]},
        "rateLimit": {"push": limit_of(4)},
    }
    clock = lambda: 1_000_000_000_000  # noqa: E731
    *_, anyone = people(await start({"collections": [checked]}, plugins=[taking], now_ms=clock), session)
    statuses = [
        (await anyone.push("notes/a", data)).status
        for data in ({}, {"n": "x" * 100}, {"n": 1}, {"n": 2}, {"n": 3}, {"n": 4})
    ]
    assert statuses == [400, 413, 200, 200, 200, 429]
    assert len(taking.taken) == 3


async def test_a_plugin_may_reject_a_push(start: Start, session: aiohttp.ClientSession) -> None:
    taking = Taking("notes", Forbidden("the month is closed"))
    *_, anyone = people(await start({"collections": [NOTES, RINGS]}, plugins=[taking]), session)
    assert (await anyone.push("notes/a", {})).error == (403, "the month is closed")
    assert (await anyone.push("notes/a/_keyring", {})).status == 200


@pytest.mark.parametrize("answer", [RuntimeError("lost its mind"), "an answer", WriteResult("h", 1)])
async def test_a_plugin_that_fails_in_the_way_of_a_push_is_an_error(
    answer: Any, start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = NotifiedPlugin()
    base = await start({"collections": [NOTES]}, plugins=[Taking("notes", answer), plugin])
    *_, anyone = people(base, session)
    rejected = await anyone.push("notes/a", {}, headers={"X-Request-Id": "the-request"})
    assert rejected.status == 500
    assert rejected.json == {"error": "Internal error", "code": "internal_error", "requestId": "the-request"}
    assert (await anyone.pull("notes/a")).json["hash"] == "", "nothing is stored"
    assert plugin.events == []
    assert "plugin taking: intercept_push failed" in caplog.messages
    page = (await anyone.request("GET", "/metrics")).body.decode()
    assert 'pysync_plugin_failures_total{hook="intercept_push",plugin="taking"} 1.0' in page


async def test_a_plugin_that_fails_in_the_way_of_a_pull_is_an_error(
    start: Start, session: aiohttp.ClientSession
) -> None:
    odd: Any = "an answer"
    reading = Reading(notes_a=RuntimeError("lost its mind"), notes_c=odd, boards_b_cards=RuntimeError())
    *_, anyone = people(await start({"collections": [NOTES, CARDS, TITLE]}, plugins=[reading]), session)
    assert (await anyone.pull("notes/a")).error == (500, "Internal error")
    assert (await anyone.pull("notes/c")).error == (500, "Internal error")
    page = (await anyone.request("GET", "/metrics")).body.decode()
    assert 'pysync_plugin_failures_total{hook="intercept_pull",plugin="reading"} 1.0' in page
    assert (await anyone.pull("boards/b")).error == (500, "Internal error")
    found = await batch(anyone, notes=[{"id": "a"}, {"id": "b"}])
    assert found["notes"][0] == {"error": "Internal error"}
    assert found["notes"][1]["hash"] == ""


class Hanging:
    """Waits for ever in one hook."""

    name = "hanging"

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._wait)

    async def _wait(self, about: object) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("hook", ["before_pull", "intercept_pull", "intercept_push"])
async def test_a_plugin_that_waits_for_what_is_cancelled_is_an_error(
    hook: str, start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    base = await start({"collections": [NOTES]}, plugins=[Cancelled(hook)])
    *_, anyone = people(base, session)
    pulled, pushed = await anyone.pull("notes/a"), await anyone.push("notes/a", {})
    assert (pulled.status, pushed.status) == ((500, 200) if "pull" in hook else (200, 500))
    assert caplog.messages.count(f"plugin cancelled: {hook} failed") == 1


@pytest.mark.parametrize("hook", ["before_pull", "intercept_pull", "intercept_push"])
async def test_a_plugin_that_takes_too_long_is_an_error(
    hook: str, start: Start, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    base = await start({"collections": [NOTES]}, plugins=[Hanging(hook)], hook_s=0)
    *_, anyone = people(base, session)
    pulled, pushed = await anyone.pull("notes/a"), await anyone.push("notes/a", {})
    assert (pulled.status, pushed.status) == ((500, 200) if "pull" in hook else (200, 500))
    assert caplog.messages.count(f"plugin hanging: {hook} took too long") == 1


async def test_the_first_plugin_that_answers_wins(start: Start, session: aiohttp.ClientSession) -> None:
    one, two = (
        Reading(notes_b=PullResponse(b"one")),
        Reading(notes_a=PullResponse(b"two"), notes_b=PullResponse(b"two")),
    )
    two.name = "two"
    *_, anyone = people(await start({"collections": [NOTES]}, plugins=[one, two]), session)
    assert (await anyone.pull("notes/a")).body == b"two"
    assert (await anyone.pull("notes/b")).body == b"one"
    assert [len(plugin.before) for plugin in (one, two)] == [2, 2]
    assert [len(plugin.queries) for plugin in (one, two)] == [2, 1]


@pytest.mark.parametrize("parts", [{"content_type": "a\r\nb: c"}, {"version": 'a"b'}, {"version": "é"}])
def test_a_reply_whose_headers_would_break_out_is_not_made(parts: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="printable"):
        PullResponse(b"", **parts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PullResponse("{}"),  # type: ignore[arg-type]
        lambda: PushResponse(("h", 1)),  # type: ignore[arg-type]
        lambda: PushResponse(WriteResult("h", 1), {"tags": {"a"}}),
    ],
)
def test_an_answer_that_cannot_be_sent_is_not_made(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        make()


class BlockedPlugin:
    """Has a hook that ends when it is released."""

    name = "held"

    def __init__(self, hook: str) -> None:
        self.release = asyncio.Event()
        self.running = 0
        setattr(self, hook, self._wait)

    async def _wait(self, about: object) -> Any:
        self.running += 1
        await self.release.wait()
        return () if isinstance(about, PluginRequest) and about.action == "list" else None


@pytest.mark.parametrize(
    ("hook", "path"),
    [
        ("authorize", "/list/notes"),
        ("before_pull", "/pull/notes/a"),
        ("intercept_pull", "/pull/notes/a"),
        ("intercept_push", "/push/notes/{}"),
        ("after_write", "/push/notes/{}"),
    ],
)
async def test_while_too_many_hooks_of_a_plugin_run_requests_that_need_another_are_rejected(
    hook: str, path: str, start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pysync.plugins.hooks.MAX_RUNNING_HOOKS", 3)
    blocked, store = BlockedPlugin(hook), MemoryStore()
    base = await start({"collections": [NOTES, CARDS]}, store, plugins=[blocked])
    *_, anyone = people(base, session)
    is_push = "push" in path

    async def send(name: str) -> tuple[int, Any]:
        body: dict[str, Any] | None = {"data": {}, "baseHash": None} if is_push else None
        answer = await anyone.request("POST" if is_push else "GET", path.format(name), body)
        return answer.status, answer.json.get("code")

    running = [asyncio.ensure_future(send(f"n{number}")) for number in range(3)]
    while blocked.running < 3:
        await asyncio.sleep(0)
    assert await send("n3") == (503, "overloaded")
    assert await store.get("notes/n3") is None, "nothing was written"
    page = (await anyone.request("GET", "/metrics")).body
    assert b'\npysync_plugin_rejections_total{plugin="held"} 1.0\n' in page
    blocked.release.set()
    assert await asyncio.gather(*running) == [(200, None)] * 3
    assert await send("n3") == (200, None)
