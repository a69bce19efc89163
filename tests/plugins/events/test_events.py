"""Batches of events over HTTP (docs/reference/protocol.md#events)."""

import asyncio
import io
import re
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.clients import ISSUER, Browser, Signed, Start, root_device
from support.collections import limit_of
from support.event_batches import EVENTS, SECTION, SERVICE, listed, pushed
from support.faulty_store import FaultyStore
from support.plugin_samples import NotifiedPlugin

from pysync.auth import issuing
from pysync.clock import HybridTimestamp
from pysync.config import ConfigError
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.changes import parse_change
from pysync.plugins.events import create_events_plugin
from pysync.plugins.events.batch_ids import order_prefix
from pysync.plugins.events.compaction import Compaction
from pysync.store import Store
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

PARQUET = "application/vnd.apache.parquet"
COLUMNS = [
    "event_type", "event", "distinct_id", "anonymous_id", "ts", "message_id", "properties", "context", "dt",
    "received_at", "extra",
]  # fmt: skip
REJECTED = (400, "Missing or invalid events")


async def table(browser: Browser, batch_id: str, app: str = "web") -> Any:
    """What pyarrow reads from the file of a batch."""
    answer = await browser.pull(f"events/{app}/{batch_id}")
    assert (answer.status, answer.headers["Content-Type"]) == (200, PARQUET)
    return pq.read_table(io.BytesIO(answer.body))


@pytest.fixture
async def browser(start: Start, session: aiohttp.ClientSession, store: Store, clock: FakeClock) -> Browser:
    return Browser(await start(SERVICE, store, now_ms=clock), session)


async def test_a_push_is_one_parquet_file_and_no_document(
    browser: Browser, store: Store, clock: FakeClock
) -> None:
    events = [{"event": "signup", "properties": {"plan": "b", "a": [1]}}, {"event": "click", "ts": None}]
    answer = await pushed(browser, *events)
    assert answer.keys() == {"hash", "timestamp", "batchId"}
    assert [found.key async for found in store.walk("")] == [f"lake/web/{answer['batchId']}.parquet"]
    read = await table(browser, answer["batchId"])
    assert read.column_names == COLUMNS
    assert set(read.schema.types) == {pa.string()}
    empty = dict.fromkeys(COLUMNS, "") | {"received_at": "2023-11-14T22:13:20.000Z"}
    assert read.to_pylist() == [
        {**empty, "event": "signup", "properties": '{"a":[1],"plan":"b"}'},
        {**empty, "event": "click"},
    ]
    stat = await store.stat(f"lake/web/{answer['batchId']}.parquet")
    assert stat is not None
    assert (stat.sha256, stat.content_type) == (answer["hash"], PARQUET)


async def test_the_server_makes_the_id_and_discards_the_one_in_the_path(browser: Browser) -> None:
    ids: list[str] = []
    for named in ("new", "0000000000000-000000-000000000000", "zzz"):
        answer = await browser.push(f"events/web/{named}", {"events": [{"event": named}]})
        ids.append(answer.json["batchId"])
    assert all(re.fullmatch(r"1700000000000-00000[0-9]-[0-9a-f]{12}", id_) for id_ in ids)
    assert ids == sorted(set(ids)) == await listed(browser)
    missing = await browser.pull("events/web/zzz")
    assert (missing.json["data"], missing.json["hash"]) == ({}, "")


@pytest.mark.parametrize(
    ("path", "lake", "fixed"),
    [("e", "lake", "lake/////.parquet"), ("events/of", "l", "events/of/////")],
)
async def test_a_batch_that_nobody_could_pull_is_rejected(
    start: Start, session: aiohttp.ClientSession, store: Store, path: str, lake: str, fixed: str
) -> None:
    below = "/{a}/{b}/{c}/{d}/{batchId}"
    own, section = {**EVENTS, "storagePath": path + below}, {**SECTION, "storagePath": lake + below}
    browser = Browser(await start({"collections": [own], "events": [section]}, store), session)
    folder = "/".join((path, *(letter * 240 for letter in "abc")))
    left = 1000 - len(fixed) - 3 * 240 - len("1700000000000-000000-0123456789ab")
    for size, status in ((left, 200), (left + 1, 400)):
        answer = await browser.push(f"{folder}/{'d' * size}/n", {"events": [{"event": "a"}]})
        assert answer.status == status, answer.body
        if status == 200:
            pulled = await browser.pull(f"{folder}/{'d' * size}/{answer.json['batchId']}")
            assert pulled.headers["Content-Type"] == PARQUET
        else:
            assert answer.json["error"] == "Invalid path parameter"
    assert len([found async for found in store.walk("")]) == 1


async def test_a_batch_is_pulled_like_any_file(browser: Browser) -> None:
    answer = await pushed(browser, {"event": "a"})
    path, version = f"events/web/{answer['batchId']}", f'"{answer["hash"]}"'
    pulled = await browser.pull(path)
    assert pulled.headers["ETag"] == version
    assert (await browser.pull(path, {"If-None-Match": version})).status == 304
    part = await browser.pull(path, {"Range": "bytes=0-3"})
    assert (part.status, part.body) == (206, b"PAR1")


async def test_listing_from_the_last_known_id_returns_the_batches_in_order(
    browser: Browser, clock: FakeClock
) -> None:
    ids: list[str] = []
    for step in (0, 0, 5, -3_600_000, -5, 0, 7_200_000, 0):  # also when the clock is set back
        clock.now_ms += step
        ids.append((await pushed(browser, {"event": str(len(ids))}))["batchId"])
    assert ids == sorted(set(ids))
    known: list[str] = []
    while page := await listed(browser, after=known[-1] if known else "", limit=3):
        known += page
    assert known == ids
    assert await listed(browser, app="other") == []


@pytest.mark.parametrize(
    "data",
    [{}, {"events": None}, {"events": []}, {"events": {}}, {"events": "x"}, {"events": [{"a": 1}, "x"]},
     {"events": [None]}, {"event": [{}]}],
)  # fmt: skip
async def test_malformed_batch_is_rejected_and_stored_nowhere(
    start: Start, session: aiohttp.ClientSession, data: Any
) -> None:
    store = MemoryStore()
    browser = Browser(await start(SERVICE, store), session)
    answer = await browser.push("events/web/new", data)
    assert answer.error == REJECTED
    assert answer.json["code"] == "invalid_events"
    assert [found.key async for found in store.walk("")] == []


async def test_events_are_pushed_as_json_alone(browser: Browser) -> None:
    answer = await browser.request("POST", "/push/events/web/new", b"PAR1", {"Content-Type": PARQUET})
    assert answer.status == 415


DEEP = "[" * 60 + "1" + "]" * 60
HOSTILE: dict[str, tuple[str, dict[str, str]]] = {
    "deep": ('{"properties":' + DEEP + "}", {"properties": DEEP}),
    "types": (
        '{"event":1,"ts":1.50,"dt":true,"message_id":[],"distinct_id":{},"context":0,"event_type":null}',
        {"event": "1", "ts": "1.5", "dt": "true", "message_id": "[]", "distinct_id": "{}", "context": "0"},
    ),
    "numbers": (
        '{"ts":9007199254740993,"dt":-9223372036854775808,"event":1e300,"x":18446744073709551615}',
        {
            "ts": "9007199254740993", "dt": "-9223372036854775808", "event": "1e+300",
            "extra": '{"x":18446744073709551615}',
        },
    ),
    "controls": ('{"event":"a\\u0000b\\n\\"\\\\","x\\u0001":"\\u0000"}',
                 {"event": 'a\0b\n"\\', "extra": '{"x\\u0001":"\\u0000"}'}),
    "prototypes": (
        '{"constructor":1,"__proto__":{"x":2},"properties":{"__class__":3}}',
        {"extra": '{"__proto__":{"x":2},"constructor":1}', "properties": '{"__class__":3}'},
    ),
    "repeated": ('{"event":"first","event":"last","b":1,"b":2}', {"event": "last", "extra": '{"b":2}'}),
    "received_at": ('{"received_at":"1970-01-01T00:00:00.000Z"}', {}),
    "other scripts": ('{"event":"\\ud83d\\ude00é","é":"ü"}', {"event": "\U0001f600é", "extra": '{"é":"ü"}'}),
    "long": ('{"event":"%s"}' % ("x" * 500_000), {"event": "x" * 500_000}),
    "empty": ("{}", {}),
    "names of rows": ('{"Event":"a","event ":"b"}', {"extra": '{"Event":"a","event ":"b"}'}),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
async def test_whatever_an_event_holds_comes_back_as_text(browser: Browser, kind: str) -> None:
    text, cells = HOSTILE[kind]
    body = b'{"data":{"events":[%b,{"event":"after"}]}}' % text.encode()
    answer = await browser.request("POST", "/push/events/web/new", body)
    assert answer.status == 200, answer.body
    first, second = (await table(browser, answer.json["batchId"])).to_pylist()
    empty = dict.fromkeys(COLUMNS, "") | {"received_at": second["received_at"]}
    assert first == {**empty, **cells}
    assert second == {**empty, "event": "after"}


@pytest.mark.parametrize("event", ['{"x":"\\ud800"}', '{"x":[[[[' + DEEP + "]]]]}", '{"x":1e999}'])
async def test_json_outside_the_protocol_is_no_event(browser: Browser, event: str) -> None:
    answer = await browser.request(
        "POST", "/push/events/web/new", f'{{"data":{{"events":[{event}]}}}}'.encode()
    )
    assert answer.status == 400
    assert await listed(browser) == []


async def test_unknown_members_are_kept_however_many(browser: Browser) -> None:
    event = {f"member {n}": n for n in range(10_000)}
    answer = await pushed(browser, event)
    (row,) = (await table(browser, answer["batchId"])).to_pylist()
    assert row["extra"] == "{" + ",".join(f'"member {n}":{n}' for n in sorted(range(10_000), key=str)) + "}"


async def test_a_batch_of_very_many_events_keeps_their_order(browser: Browser) -> None:
    body = b'{"data":{"events":[%b]}}' % b",".join([b"{}"] * 99_999 + [b'{"dt":"last"}'])
    answer = await browser.request("POST", "/push/events/web/new", body)
    read = await table(browser, answer.json["batchId"])
    assert read.num_rows == 100_000
    assert read["dt"].to_pylist() == [""] * 99_999 + ["last"]
    assert set(read["extra"].to_pylist()) == {""}


@pytest.mark.parametrize("name", ["batchId", "upload"])
async def test_plugins_and_followers_receive_the_id_of_the_batch(
    start: Start, session: aiohttp.ClientSession, store: Store, clock: FakeClock, name: str
) -> None:
    plugin, coordinator = NotifiedPlugin(), MemoryCoordinator(clock)
    service = {
        "collections": [EVENTS | {"storagePath": f"events/{{app}}/{{{name}}}"}],
        "events": [SECTION | {"storagePath": f"lake/{{app}}/{{{name}}}"}],
    }
    base = await start(service, store, coordinator=coordinator, plugins=[plugin], now_ms=clock)
    someone = Signed(base, session, ISSUER, root_device(ISSUER))
    answer = await pushed(someone, {"event": "a"})
    assert await listed(someone) == [answer["batchId"]]
    assert (await table(someone, answer["batchId"])).num_rows == 1
    (event,) = plugin.events
    params = {"app": "web", name: answer["batchId"]}
    assert (event.params, event.hash, event.timestamp) == (params, answer["hash"], answer["timestamp"])
    log = store.transactional.change_log if store.transactional else coordinator
    ((_, change),) = await log.read("", 10) or []
    ref, hash_, timestamp_ms, *_ = parse_change(change)
    assert (ref.collection, ref.params) == ("events", params)
    assert (hash_, timestamp_ms) == (answer["hash"], answer["timestamp"])


async def test_push_of_events_obeys_the_rules_of_any_push(
    start: Start, session: aiohttp.ClientSession
) -> None:
    limit = {"push": limit_of(2)}
    closed = {**EVENTS, "writeRoles": ["cap:write:events"], "maxBodyBytes": 200, "rateLimit": limit}
    base = await start({**SERVICE, "collections": [{**closed, "objectSchema": {"maxProperties": 1}}]})
    anyone = Browser(base, session)
    someone = Signed(base, session, ISSUER, root_device(ISSUER, collections=("events",)))
    data = {"events": [{"event": "a"}]}
    assert (await anyone.push("events/web/new", data)).status == 401
    assert (await someone.push("events/web/new", {"events": [{"event": "a" * 200}]})).status == 413
    assert (await someone.push("events/web/new", {**data, "b": 1})).json["code"] == "schema_violation"
    assert (await someone.push("events/web/new", data)).status == 200
    assert (await someone.push("events/web/new", data)).status == 429


async def test_a_repeated_push_is_stored_once(browser: Browser, clock: FakeClock) -> None:
    again = {"Idempotency-Key": "k"}
    first = await pushed(browser, {"event": "a"}, **again)
    for _ in range(2):
        clock.now_ms += 250_000
        assert await pushed(browser, {"event": "a"}, **again) == first
    reused = await browser.push("events/web/new", {"events": [{"event": "b"}]}, headers=again)
    assert (reused.status, reused.json["code"]) == (422, "idempotency_key_reused")
    others = [
        await pushed(browser, {"event": "a"}, **{"Idempotency-Key": "other"}),
        await pushed(browser, {"event": "a"}),
    ]
    ids = [first["batchId"], *(other["batchId"] for other in others)]
    assert await listed(browser) == ids
    clock.now_ms += 200_000  # remembered for ten minutes
    assert await pushed(browser, {"event": "a"}, **again) != first


async def test_a_repeated_push_is_answered_although_its_file_was_deleted_or_merged(
    start: Start, session: aiohttp.ClientSession, store: Store, clock: FakeClock
) -> None:
    service = {**SERVICE, "collections": [{**EVENTS, "deletable": True}]}
    browser = Browser(await start(service, store, now_ms=clock), session)
    firsts = {name: await pushed(browser, {"event": name}, **{"Idempotency-Key": name}) for name in "abc"}
    path = f"/push/events/web/{firsts['a']['batchId']}?baseHash={firsts['a']['hash']}"
    assert (await browser.request("DELETE", path)).status == 200
    [done] = [each async for each in Compaction(store, "lake/{app}/{batchId}", 0, 1_000_000, clock).run()]
    assert (done.before, done.after, done.left) == (2, 1, {})
    left = await listed(browser)
    clock.now_ms += 5
    for name, first in firsts.items():
        assert await pushed(browser, {"event": name}, **{"Idempotency-Key": name}) == first
        other = await browser.push("events/web/new", {"events": [{}]}, headers={"Idempotency-Key": name})
        assert other.json["code"] == "idempotency_key_reused"
    assert await listed(browser) == left


async def test_a_push_that_is_rejected_leaves_its_idempotency_key_free(browser: Browser) -> None:
    once = {"Idempotency-Key": "k"}
    rejected: list[dict[str, Any]] = [{"events": []}, {"events": [1]}, {}, {"events": [1]}]
    for bad in rejected:
        assert (await browser.push("events/web/new", bad, None, once)).error == REJECTED
    stored = await pushed(browser, {"event": "e"}, **once)
    assert await pushed(browser, {"event": "e"}, **once) == stored
    assert (await browser.push("events/web/new", {"events": [1]}, None, once)).error == REJECTED
    assert await listed(browser) == [stored["batchId"]]


async def test_push_whose_reply_was_lost_is_announced_once_it_is_repeated(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start(SERVICE, store), session)
    (app,) = start.apps  # type: ignore[attr-defined]
    log = app.engine.outbox.log
    store.lose_reply("write")
    again = {"Idempotency-Key": "k"}
    lost = await browser.push("events/web/new", {"events": [{"event": "a"}]}, headers=again)
    assert lost.status == 503
    assert await log.read("", 10) == []
    batch_id = (await pushed(browser, {"event": "a"}, **again))["batchId"]
    assert await listed(browser) == [batch_id]
    ((_, change),) = await log.read("", 10)
    assert parse_change(change)[0].params == {"app": "web", "batchId": batch_id}


def test_batch_ids_sort_as_text_from_the_first_on() -> None:
    ticks = [
        HybridTimestamp(0, 1),
        HybridTimestamp(9, 0),
        HybridTimestamp(10, 9),
        HybridTimestamp(10, 10),
        HybridTimestamp(1_700_000_000_000, 0),
    ]
    texts = [order_prefix(tick) for tick in ticks]
    assert texts == sorted(texts)
    assert texts[0] == "0000000000000-000001"


async def test_attempts_at_one_push_that_meet_are_one(browser: Browser) -> None:
    again = {"Idempotency-Key": "k"}
    answers = await asyncio.gather(*(pushed(browser, {"event": "a"}, **again) for _ in range(8)))
    assert all(answer == answers[0] for answer in answers)
    assert await listed(browser) == [answers[0]["batchId"]]


async def test_batches_that_a_certificate_denies_are_not_listed(
    browser: Browser, session: aiohttp.ClientSession, start: Start
) -> None:
    closed = {**EVENTS, "readRoles": ["admin:" + ISSUER.user_id], "writeRoles": ["public"]}
    base = await start({"collections": [closed], "events": [SECTION]})
    ids = [(await pushed(Browser(base, session), {"event": "e"}))["batchId"] for _ in range(3)]
    grant = issuing.Grant(("read", "list"), ("**", f"!events/web/{ids[1]}"))
    caller = Signed(base, session, ISSUER, root_device(ISSUER, grant=grant))
    assert await listed(caller) == [ids[0], ids[2]]
    assert (await caller.pull(f"events/web/{ids[1]}")).status == 403


async def test_collections_of_events_are_made_in_python(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    store = await LocalStore.open_folder(tmp_path)
    plugin = create_events_plugin("events", "events/{app}/{batchId}", store=store)
    browser = Browser(await start({"collections": [EVENTS]}, store, plugins=[plugin]), session)
    answer = await pushed(browser, {"event": "a"})
    read = pq.read_table(tmp_path / "files" / "events")
    assert read["event"].to_pylist() == ["a"]
    assert await listed(browser) == [answer["batchId"]]


@pytest.mark.parametrize(
    ("collection", "path", "said"),
    [
        ({"name": "other"}, "e/{app}/{batchId}", "there is no collection 'events'"),
        ({"allowedMimeTypes": [PARQUET]}, "e/{app}/{batchId}", "allowedMimeTypes"),
        ({"allowedMimeTypes": ["*/*"]}, "e/{app}/{batchId}", "allowedMimeTypes"),
        ({}, "e/{batchId}", "parameters"),
        ({}, "e/{app}/{user}/{batchId}", "{user}"),
        ({"storagePath": "e/{app}/{id}"}, "e/{app}/{batchId}", "{batchId}"),
        ({"appendOnly": True}, "e/{app}/{batchId}", "log"),
    ],
)
async def test_a_plugin_does_not_start_where_the_collection_does_not_fit(
    start: Start, collection: dict[str, Any], path: str, said: str
) -> None:
    with pytest.raises((ValueError, ConfigError), match=re.escape(said)):
        await start(
            {"collections": [{**EVENTS, **collection}]}, plugins=[create_events_plugin("events", path)]
        )


@pytest.mark.parametrize("path", ["events/web", "{batchId}/x", "/e/{batchId}", "e/{batchId}/{batchId}"])
def test_a_template_ends_in_the_id(path: str) -> None:
    with pytest.raises(ValueError, match="storagePath"):
        create_events_plugin("events", path)


async def test_a_store_that_is_given_is_that_of_the_service(start: Start) -> None:
    plugin = create_events_plugin("events", "e/{app}/{batchId}", store=MemoryStore())
    with pytest.raises(ValueError, match="its store is not that of the service"):
        await start({"collections": [EVENTS]}, MemoryStore(), plugins=[plugin])
