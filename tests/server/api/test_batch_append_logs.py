"""Logs in batch pulls: bounded tails beside documents, each entry with its own fate.

See docs/reference/protocol.md#log-tails-in-a-batch.
"""

import asyncio
import json
import random
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import pytest
from support.batches import STORED_MS, batch, collection, entries, stored
from support.clients import ISSUER, SUBJECT, Browser, Reply, Signed, Start, minted_at, root_device
from support.collections import limit_of
from support.faulty_store import FaultyStore

from pysync import _core, config
from pysync.auth import issuing
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import AppendLogs, LogSettings
from pysync.store.memory import MemoryStore

ME = ISSUER.user_id
AGE_MS = 100_000
"""How far back a checkpoint on `recent` may lie."""


def log(name: str, path: str, *read: str, fields: Any = None, ttl_ms: int = 0, **members: Any) -> Any:
    more = {"fieldPermissions": fields} if fields else {}
    more |= {"ttlMs": ttl_ms} if ttl_ms else {}
    append_only = {"type": "by_timestamp", "requireAuthorSignature": False, **members}
    return collection(name, path, read or ("public",), appendOnly=append_only, **more)


SERVICE: dict[str, Any] = {
    "auth": {
        "trustedIssuers": [ISSUER.ed_pub],
        "identityRoles": {SUBJECT.user_id: ["editor"]},
        "spaces": {},
    },
    "collections": [
        collection("notes", "notes/{id}", cacheDurationMs=60_000),
        log("log", "log/{id}"),
        collection("special", "log/special", ["editor"]),
        log("short", "short/{id}", maxPullLimit=7),
        log("deep", "deep/{id}", maxPullLimit=2000),
        log("lines", "lines/{id}", field="lines"),
        log("recent", "recent/{id}", maxCheckpointAgeMs=AGE_MS),
        log("fleeting", "fleeting/{id}", persist=False),
        log("echo", "echo/{id}", persist=False, field="lines"),
        log("fading", "fading/{id}", ttl_ms=1000),
        log("mine", "mine/{identity}/{id}", "self"),
        log("chat", "spaces/{spaceId}/chat", "space:member", fields={"pay": {"readRoles": ["space:owner"]}}),
        log("cards", "cards/{id}", fields={"pay": {"readRoles": ["editor"]}}),
        log("lists", "lists/{id}", fields={"items": {"readRoles": ["editor"]}}),
        log("rooms", "rooms/{room}", "cap:read:rooms"),
    ],
    "namespaces": {"acme": {"collections": [log("log", "acme/{id}")]}},
}
RULES = {
    found.name: LogSettings.from_collection(found)
    for found in config.parse({"version": 1, "store": "memory:", **SERVICE}).collections
    if found.append_only is not None
}
COUNT = 30


def hash_of(elements: list[dict[str, Any]]) -> str:
    """The hash of a log with these elements."""
    after = {"n": len(elements), "last": elements[-1]["data"]}
    return _core.content_hash(json.dumps(after).encode())


def element(n: int) -> dict[str, Any]:
    """Element `n` of every log, as it is read back: their times are 10, 20, ..."""
    return {"ts": 10 * n + 10, "data": {"n": n}}


ALL = [element(n) for n in range(COUNT)]


async def append(
    store: FaultyStore, name: str, key: str, elements: list[dict[str, Any]], now_ms: int = STORED_MS
) -> str:
    """Append them, and return the hash of the log then."""
    logs = AppendLogs(store, MemoryCoordinator(), lambda: now_ms, head_bytes=200)
    hash_ = ""
    for one in elements:
        written = await logs.append(key, _core.decode_append(json.dumps(one).encode()), RULES[name])
        hash_ = written.hash
    await logs.close()
    return hash_


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
async def anyone(start: Start, session: aiohttp.ClientSession, store: FaultyStore, now_ms: int) -> Browser:
    """An anonymous caller of `SERVICE`, whose clock stands still."""
    return Browser(await start(SERVICE, store=store, now_ms=lambda: now_ms), session)


def root(anyone: Browser) -> Signed:
    certificate = root_device(ISSUER, collections=("rooms", "*"))
    return Signed(anyone.base, anyone.session, ISSUER, certificate)


def editor(anyone: Browser) -> Signed:
    return Signed(anyone.base, anyone.session, SUBJECT, root_device(SUBJECT))


async def tails(
    browser: Browser, name: str, *bounds: object, ids: str | None = None, prefix: str = ""
) -> list[Any]:
    """The entries for the log `a` of this collection, or those of `ids`, once for each of `bounds`."""
    sets = [{"id": one} for one in ids or "a" * len(bounds)]
    reply = await batch(browser, name, params={name: sets}, append={name: [*bounds]}, prefix=prefix)
    return entries(reply, name)


def newest(elements: list[Any], count: int) -> list[Any]:
    return elements[max(0, len(elements) - count) :]


def items(entry: dict[str, Any]) -> list[Any]:
    found: list[Any] = entry["data"]["items"]
    return found


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"last": 3}, ALL[-3:]),
        ({"limit": 3}, ALL[-3:]),
        ({"limit": 2, "last": 9}, ALL[-2:]),
        ({"last": 0}, []),
        ({"last": 999}, ALL),
        ({"since": 0}, ALL),
        ({"since": 250}, ALL[25:]),
        ({"since": 255}, ALL[25:]),
        ({"since": 299}, ALL[29:]),
        ({"since": 300}, []),
        ({"since": 2**64 - 1}, []),
        ({"since": 100, "last": 2}, ALL[-2:]),
        ({"since": 290, "last": 5}, ALL[-1:]),
        ({"since": 290, "limit": 0, "last": 5}, []),
        ({"last": 1, "append_field": "x", "params": None}, ALL[-1:]),
    ],
)
async def test_an_entry_holds_the_elements_within_its_bounds(
    anyone: Browser, store: FaultyStore, now_ms: int, bounds: object, expected: list[Any]
) -> None:
    hash_ = await append(store, "log", "log/a", ALL)
    [entry] = await tails(anyone, "log", bounds)
    assert entry == {"data": {"items": expected}, "hash": hash_, "timestamp": now_ms}


IDS = [{"id": name} for name in ("a", "b", "gone", "a/b", "")]
OWNED = [{"identity": who, "id": "a"} for who in (ME, SUBJECT.user_id)]
SETS: dict[str, list[dict[str, str]]] = {
    **dict.fromkeys(("log", "deep", "lines", "recent", "fleeting", "echo", "fading", "cards"), IDS),
    "mine": OWNED,
    "chat": [{"spaceId": name} for name in ("one", "two", "gone", "a.b")],
    "rooms": [{"room": name} for name in ("lobby", "a/b")],
}


def pulled(now_ms: int) -> list[dict[str, int]]:
    """Bounds, those of a checkpoint that is nearly too old among them."""
    oldest_ms = now_ms - AGE_MS
    return [
        {}, {"last": 0}, {"last": 3}, {"limit": 2, "last": 5}, {"since": 15}, {"since": 300},
        {"since": 25, "last": 1}, {"since": oldest_ms}, {"since": oldest_ms + 1, "limit": 9},
    ]  # fmt: skip


async def fill(store: FaultyStore, now_ms: int) -> None:
    """Logs, whole and broken, of all that `SETS` names."""
    paid = [{"ts": 10 * n, "data": {"n": n, "pay": n}} for n in range(1, 6)]
    for name in ("log", "deep", "lines", "recent", "fleeting", "fading", "cards"):
        if RULES[name].persist:
            await append(store, name, f"{name}/a", paid, now_ms - 1000)
        await store.put(f"{name}/b", b"no log")
    await append(store, "mine", f"mine/{ME}/a", paid)
    await append(store, "rooms", "rooms/lobby", paid)
    await store.put("spaces/one/_access", stored({"v": 1, "owner": ME, "members": [SUBJECT.user_id]}))
    await store.put("spaces/two/_access", stored({"v": 1, "owner": SUBJECT.user_id, "members": []}))
    for space in ("one", "two"):
        await append(store, "chat", f"spaces/{space}/chat", paid)


async def single(browser: Browser, name: str, params: dict[str, str], bounds: dict[str, int]) -> bytes:
    """The batch entry that a single pull amounts to."""
    key = next(found["storagePath"] for found in SERVICE["collections"] if found["name"] == name)
    for param, value in params.items():
        key = key.replace(f"{{{param}}}", quote(value, safe=""))
    wanted = urlencode({"checkpoint" if bound == "since" else bound: n for bound, n in bounds.items()})
    pulled = await browser.pull(f"{key}?{wanted}" if wanted else key)
    if pulled.status == 200:
        return pulled.body
    expected_error = "Forbidden" if pulled.status == 401 else pulled.json["error"]
    return json.dumps({"error": expected_error}, separators=(",", ":")).encode()


@pytest.mark.parametrize("reader", ["nobody", "root", "editor"])
@pytest.mark.parametrize("seed", range(4))
async def test_an_entry_is_what_a_single_pull_answers(
    start: Start, session: aiohttp.ClientSession, store: FaultyStore, now_ms: int, reader: str, seed: int
) -> None:
    """The same bytes, where no log is longer than a checkpoint gives of it."""
    await fill(store, now_ms)
    roomy = SERVICE | {"maxBatchAppendElements": 100_000}
    anyone = Browser(await start(roomy, store=store, now_ms=lambda: now_ms), session)
    browser = {"nobody": anyone, "root": root(anyone), "editor": editor(anyone)}[reader]
    draw = random.Random(seed)
    for _ in range(4):
        names = draw.sample(list(SETS), draw.randint(1, 6))
        params = {name: draw.choices(SETS[name], k=draw.randint(1, 6)) for name in names}
        bounds = {name: draw.choices(pulled(now_ms), k=len(params[name])) for name in names}
        answer = await batch(browser, *names, params=params, append=bounds)
        expected = [
            b'"%b":[%b]'
            % (
                name.encode(),
                b",".join(
                    [
                        await single(browser, name, *one)
                        for one in zip(params[name], bounds[name], strict=True)
                    ]
                ),
            )
            for name in names
        ]
        assert answer.body == b'{"collections":{%b}}' % b",".join(expected)


@pytest.mark.parametrize("seed", range(4))
async def test_any_bounds_of_many_logs_in_one_batch(anyone: Browser, store: FaultyStore, seed: int) -> None:
    draw = random.Random(seed)
    lengths = {one: draw.randint(0, COUNT) for one in "abcdef"}
    for one, length in lengths.items():
        await append(store, "short", f"short/{one}", ALL[:length])
    ids = "".join(draw.choices("abcdef", k=40))
    bounds: list[dict[str, int]] = []
    expected = []
    for one in ids:
        held = ALL[: lengths[one]]
        since, count = draw.randint(0, 320), draw.randint(0, 12)
        after = [found for found in held if found["ts"] > since]
        wanted, found = draw.choice(
            [
                ({"since": since}, after[:7]),
                ({"last": count}, newest(held, min(count, 7))),
                ({"since": since, "last": count}, newest(after, min(count, 7))),
            ]
        )
        bounds.append(wanted)
        expected.append(found)
    assert [items(entry) for entry in await tails(anyone, "short", *bounds, ids=ids)] == expected


async def test_after_a_checkpoint_come_the_oldest_elements(anyone: Browser, store: FaultyStore) -> None:
    """So that a reader who is far behind misses none."""
    await append(store, "short", "short/a", ALL)
    read: list[Any] = []
    pages = 0
    while True:
        since = read[-1]["ts"] if read else 0
        [entry] = await tails(anyone, "short", {"since": since})
        if not items(entry):
            break
        read += items(entry)
        pages += 1
    assert read == ALL
    assert pages == 5


async def test_a_truncated_entry_says_so(anyone: Browser, store: FaultyStore) -> None:
    await append(store, "short", "short/a", ALL[:9])
    wanted = [*({"since": since} for since in (0, 20, 10, 90)), {"last": 7}, {"since": 0, "last": 3}]
    found = await tails(anyone, "short", *wanted)
    assert [entry.get("hasMore", False) for entry in found] == [True, False, True, False, False, False]
    assert items(found[1]) == ALL[2:9]


async def test_a_larger_tail_than_max_pull_limit_is_clamped(anyone: Browser, store: FaultyStore) -> None:
    await append(store, "short", "short/a", ALL)
    found = await tails(
        anyone, "short", {"last": 8}, {"last": 10**18}, {"since": 10, "limit": 9}, {"last": 6}
    )
    assert [items(entry) for entry in found] == [ALL[-7:], ALL[-7:], ALL[-7:], ALL[-6:]]


async def test_without_max_pull_limit_a_checkpoint_gives_a_thousand(
    anyone: Browser, store: FaultyStore
) -> None:
    many = [element(n) for n in range(1200)]
    await append(store, "log", "log/a", many)
    await append(store, "deep", "deep/a", many)
    first, second = await tails(anyone, "log", {"since": 0}, {"last": 1100})
    assert items(first) == many[:1000]
    assert items(second) == many[-1100:]
    [third] = await tails(anyone, "deep", {"since": 0})
    assert items(third) == many


async def test_an_empty_log_has_no_elements_and_no_hash(anyone: Browser, now_ms: int) -> None:
    for bounds in ({"last": 1}, {"since": 0}):
        assert await tails(anyone, "log", bounds) == [
            {"data": {"items": []}, "hash": "", "timestamp": now_ms}
        ]


async def test_elements_are_in_the_member_that_the_configuration_names(
    anyone: Browser, store: FaultyStore
) -> None:
    await append(store, "lines", "lines/a", ALL[:2])
    for entry, expected in zip(
        await tails(anyone, "lines", {"last": 1}, {"last": 0}), (ALL[1:2], []), strict=True
    ):
        assert entry["data"] == {"lines": expected}


async def test_a_log_of_starfish_is_read_as_it_lies(anyone: Browser, store: FaultyStore) -> None:
    document = {"v": 1, "data": {"items": ALL}, "ts": 300, "hash": hash_of(ALL)}
    await store.put("log/a", json.dumps(document).encode())
    [entry] = await tails(anyone, "log", {"since": 280})
    assert items(entry) == ALL[-2:]


async def test_a_log_is_not_read_without_a_bound(anyone: Browser, store: FaultyStore) -> None:
    await append(store, "log", "log/a", ALL)
    required = {"error": "pull_bound_required"}
    store.calls.clear()
    assert await tails(anyone, "log", None, {}, {"append_field": "items"}) == [required] * 3
    assert entries(await batch(anyone, "log", params={"log": [{"id": "a"}] * 2}), "log") == [required] * 2
    assert store.calls["get"] == 0
    assert items((await tails(anyone, "log", {}, {"last": 1}))[1]) == ALL[-1:]


async def test_bounds_are_for_logs(anyone: Browser, store: FaultyStore) -> None:
    await store.put("notes/a", stored({"n": 1}))
    first, second = await tails(anyone, "notes", {"last": 1}, None)
    assert first == {"error": "append_params_not_supported"}
    assert second["data"] == {"n": 1}


async def test_a_checkpoint_may_be_too_old(anyone: Browser, store: FaultyStore, now_ms: int) -> None:
    oldest_ms = now_ms - AGE_MS
    times = [oldest_ms + n for n in range(3)]
    held = [{"ts": ts, "data": {}} for ts in times]
    await append(store, "recent", "recent/a", held, now_ms)
    too_old, too_old_too, just, unbounded = await tails(
        anyone, "recent", {"since": oldest_ms - 1}, {"since": 0, "last": 1}, {"since": oldest_ms}, {"last": 3}
    )
    assert too_old == too_old_too == {"error": "checkpoint_too_old"}
    assert items(just) == held[1:]
    assert items(unbounded) == held


async def test_missing_log_is_an_empty_list(anyone: Browser, store: FaultyStore, now_ms: int) -> None:
    nothing = {"data": {"items": []}, "hash": "", "timestamp": now_ms}
    await store.put("fleeting/a", b"from another time")
    store.calls.clear()
    assert await tails(anyone, "fleeting", None, {}, {"last": 1}, {"since": 0}) == [nothing] * 4
    assert entries(await batch(anyone, "fleeting", params={"fleeting": [{"id": "a"}]}), "fleeting") == [
        nothing
    ]
    assert (await tails(anyone, "echo", None))[0]["data"] == {"lines": []}
    assert store.calls["get"] == 0


async def test_an_expired_log_is_empty(anyone: Browser, store: FaultyStore, now_ms: int) -> None:
    await append(store, "fading", "fading/a", ALL, now_ms - 1001)
    await append(store, "fading", "fading/b", [*ALL, {"ts": now_ms - 1000, "data": {}}], now_ms - 1000)
    old, new = await tails(anyone, "fading", {"last": 1}, {"last": 2}, ids="ab")
    assert old == {"data": {"items": []}, "hash": "", "timestamp": now_ms}
    assert items(new)[0] == ALL[-1]


@pytest.mark.parametrize(
    ("name", "bounds", "error"),
    [
        ("log", [{"last": 1}], "Invalid appendParams parameter"),
        ("log", [{"last": 1}] * 3, "Invalid appendParams parameter"),
        ("log", [{"last": 1, "full": True}, None], "Invalid appendParams parameter"),
        ("log", [{"full": False}, None], "Invalid appendParams parameter"),
        ("log", [None, {"last": -1}], "Invalid appendParams parameter"),
        ("log", [None, {"limit": 1.5}], "Invalid appendParams parameter"),
        ("log", [None, {"since": "1"}], "Invalid appendParams parameter"),
        ("log", [None, {"since": None}], "Invalid appendParams parameter"),
        ("log", [None, 7], "Invalid appendParams parameter"),
        ("log", [{"last": 5000}, {"last": 1}], "Batch append element budget exceeded"),
        ("log", [{"since": 0}, {"last": 4001}], "Batch append element budget exceeded"),
        ("log", [{"last": 2**64 - 1}, {"last": 1}], "Batch append element budget exceeded"),
    ],
)
async def test_unusable_bounds_reject_the_whole_batch_before_anything_is_read(
    anyone: Browser, store: FaultyStore, name: str, bounds: object, error: str
) -> None:
    params = {name: [{"id": "a"}, {"id": "b"}], "notes": [{"id": "a"}]}
    answer = await batch(anyone, "notes", name, params=params, append={name: bounds})
    assert answer.error == (400, error)
    assert store.calls["get"] == 0


async def test_the_budget_counts_possible_results(anyone: Browser, store: FaultyStore) -> None:
    """Not what is asked for: `short` returns seven at most, `deep` two thousand."""
    for name, bounds, fits in (
        ("short", [{"last": 5000}] * 100, True),
        ("short", [{"since": 0}] * 100, True),
        ("log", [{"since": 0}] * 5, True),
        ("log", [{"since": 0}] * 6, False),
        ("deep", [{"since": 0}] * 2, True),
        ("deep", [{"since": 0}] * 3, False),
        ("deep", [{"since": 0, "limit": 1000}] * 5, True),
    ):
        params = {name: [{"id": "a"}] * len(bounds)}
        answer = await batch(anyone, name, params=params, append={name: bounds})
        assert answer.status == (200 if fits else 400)


async def test_a_log_that_cannot_be_read_fails_alone(anyone: Browser, store: FaultyStore) -> None:
    await append(store, "log", "log/a", ALL[:1])
    await store.put("log/b", b"no log")
    first, second = await tails(anyone, "log", {"last": 1}, {"last": 1}, ids="ab")
    assert items(first) == ALL[:1]
    assert second == {"error": "document_corrupt"}
    store.fail("get")
    first, third = await tails(anyone, "log", {"last": 1}, {"last": 1}, ids="ac")
    assert first == {"error": "store_unavailable"}
    assert items(third) == []


@pytest.mark.parametrize("torn", [b"torn", b""])
async def test_a_segment_that_cannot_be_read_fails_its_log_alone(
    anyone: Browser, store: FaultyStore, torn: bytes
) -> None:
    many = [{"ts": n + 1, "data": {"text": "x" * 100}} for n in range(50)]
    await append(store, "log", "log/a", many)
    segments = [listed.key async for listed in store.walk("_pysync/logs")]
    assert len(segments) > 10
    for key in segments:
        await store.put(key, torn)
    whole, last, other = await tails(anyone, "log", {"last": 50}, {"last": 1}, {"last": 1}, ids="aab")
    assert whole == {"error": "document_corrupt"}
    assert items(last) == many[-1:]
    assert items(other) == []


async def test_logs_and_documents_come_in_the_requested_order(anyone: Browser, store: FaultyStore) -> None:
    await append(store, "log", "log/a", ALL)
    await store.put("notes/a", stored({"n": 1}))
    names = ["log", "notes", "gone", "lines"]
    params: dict[str, list[dict[str, str]]] = {
        "log": [{"id": "a"}, {}, {"id": "b/c"}],
        "notes": [{"id": "a"}],
    }
    bounds: dict[str, list[object]] = {"log": [{"last": 1}] * 3, "lines": [None]}
    answer = await batch(anyone, *names, params=params, append=bounds)
    assert list(answer.json["collections"]) == names
    assert [entry.get("error") for entry in entries(answer, "log")] == [
        None, "Missing required path parameter", "Invalid path parameter"
    ]  # fmt: skip
    assert entries(answer, "notes")[0]["data"] == {"n": 1}
    assert entries(answer, "gone") == [{"error": "Collection not found"}]
    assert entries(answer, "lines") == [{"error": "Missing required path parameter"}]


async def test_namespaces_have_logs_of_their_own(anyone: Browser, store: FaultyStore) -> None:
    await append(store, "log", "log/a", ALL)
    await append(store, "log", "acme/a", ALL[:1])
    assert items((await tails(anyone, "log", {"last": 1}))[0]) == ALL[-1:]
    assert items((await tails(anyone, "log", {"last": 1}, prefix="/acme"))[0]) == ALL[:1]


async def test_a_log_is_read_by_those_who_may_pull_it(anyone: Browser, store: FaultyStore) -> None:
    """What is forbidden is told before what is wrong with the bounds, as on a pull."""
    await append(store, "mine", f"mine/{ME}/a", ALL)
    owned = {"mine": [{"identity": ME, "id": "a"}] * 2}
    bounds = {"mine": [{"last": 1}, None]}
    reads = store.calls["get"]
    for other in (anyone, editor(anyone)):
        answer = await batch(other, "mine", params=owned, append=bounds)
        assert entries(answer, "mine") == [{"error": "Forbidden"}] * 2
    assert store.calls["get"] == reads + 1, "the revocations, and nothing of the log"
    first, second = entries(await batch(root(anyone), "mine", params=owned, append=bounds), "mine")
    assert items(first) == ALL[-1:]
    assert second == {"error": "pull_bound_required"}
    [implied] = entries(
        await batch(root(anyone), "mine", params={"mine": [{"id": "a"}]}, append={"mine": [{"last": 1}]}),
        "mine",
    )
    assert items(implied) == ALL[-1:]


async def test_a_member_reads_the_logs_in_its_scope(anyone: Browser, store: FaultyStore) -> None:
    for room in ("lobby", "attic"):
        await append(store, "rooms", f"rooms/{room}", ALL)
    grant = issuing.Grant(("read",), ("rooms/lobby",))
    certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", grant=grant, **minted_at()
    )
    member = Signed(anyone.base, anyone.session, SUBJECT, certificate)
    params = {"rooms": [{"room": "lobby"}, {"room": "attic"}]}
    answer = await batch(member, "rooms", params=params, append={"rooms": [{"last": 1}] * 2})
    lobby, attic = entries(answer, "rooms")
    assert items(lobby) == ALL[-1:]
    assert attic == {"error": "Forbidden"}


async def test_each_log_is_authorised_against_the_space_it_is_in(anyone: Browser, store: FaultyStore) -> None:
    paid = [{"ts": 1, "data": {"n": 1, "pay": 2}}]
    for space, owner in (("one", ME), ("two", SUBJECT.user_id)):
        await store.put(f"spaces/{space}/_access", stored({"v": 1, "owner": owner, "members": []}))
        await append(store, "chat", f"spaces/{space}/chat", paid)
    params = {"chat": [{"spaceId": space} for space in ("one", "two", "gone")]}
    bounds = {"chat": [{"last": 1}] * 3}
    first, *others = entries(await batch(root(anyone), "chat", params=params, append=bounds), "chat")
    assert items(first) == paid
    assert others == [{"error": "Forbidden"}] * 2
    members = stored({"v": 1, "owner": SUBJECT.user_id, "members": [ME]})
    await store.put("spaces/two/_access", members)
    second = entries(await batch(root(anyone), "chat", params=params, append=bounds), "chat")[1]
    assert items(second) == [{"ts": 1, "data": {"n": 1}}]


async def test_a_key_of_another_collection_is_forbidden(anyone: Browser, store: FaultyStore) -> None:
    await append(store, "log", "log/special", ALL)
    await append(store, "log", "log/a", ALL)
    params = {"log": [{"id": "special"}, {"id": "a"}]}
    reads = store.calls["get"]
    answer = await batch(anyone, "log", params=params, append={"log": [{"last": 1}, {"last": 0}]})
    assert entries(answer, "log")[0] == {"error": "Forbidden"}
    assert items(entries(answer, "log")[1]) == []
    assert store.calls["get"] - reads <= 1


async def test_hidden_members_are_left_out_of_each_element(anyone: Browser, store: FaultyStore) -> None:
    author = {"authorPubkey": ISSUER.ed_pub, "authorSignature": "s"}
    held = [
        {"ts": 1, "data": {"name": "A", "pay": 1}, **author},
        {"ts": 2, "data": {"pay": {"pay": 2}}},
        {"ts": 3, "data": {"deep": {"pay": 3}, "n": 9007199254740993}},
    ]
    hash_ = await append(store, "cards", "cards/a", held)
    request: dict[str, Any] = {"params": {"cards": [{"id": "a"}]}, "append": {"cards": [{"last": 3}]}}
    less = await batch(anyone, "cards", **request)
    more = await batch(editor(anyone), "cards", **request)
    [short], [whole] = entries(less, "cards"), entries(more, "cards")
    assert items(whole) == held
    assert items(short) == [
        {"ts": 1, "data": {"name": "A"}},
        {"ts": 2, "data": {}},
        {"ts": 3, "data": {"deep": {"pay": 3}, "n": 9007199254740993}},
    ]
    assert whole["hash"] == hash_
    assert short["hash"] != hash_, "from it what is hidden could be computed"
    assert less.headers["ETag"] != more.headers["ETag"]
    assert b'"pay":{"pay":2}' not in less.body


async def test_hidden_members_of_starfish_data_are_left_out(anyone: Browser, store: FaultyStore) -> None:
    """Beside the elements too; what is no object has none."""
    odd: list[dict[str, Any]] = [
        {"ts": 1, "data": ["pay"]},
        {"ts": 2, "data": None},
        {"ts": 3, "data": {"pay": 1, "n": 1}},
    ]
    data = {"pay": 1, "title": "T", "items": odd}
    document = {"v": 1, "data": data, "ts": 3, "hash": hash_of(odd)}
    await store.put("cards/a", json.dumps(document).encode())
    [entry] = await tails(anyone, "cards", {"last": 3})
    visible = [*odd[:2], {"ts": 3, "data": {"n": 1}}]
    assert entry["data"] == {"title": "T", "items": visible}
    assert (await anyone.pull("cards/a?last=3")).json["data"] == entry["data"]
    [whole] = await tails(editor(anyone), "cards", {"last": 3})
    assert whole["data"] == data


async def test_the_member_that_holds_the_elements_is_not_hidden(anyone: Browser, store: FaultyStore) -> None:
    """Permissions are for members of the elements' data, also where they have its name."""
    await append(store, "lists", "lists/a", [{"ts": 1, "data": {"items": [1], "n": 1}}])
    [entry] = await tails(anyone, "lists", {"last": 1})
    assert entry["data"] == {"items": [{"ts": 1, "data": {"n": 1}}]}


async def test_many_hidden_members_are_left_out_too(anyone: Browser, store: FaultyStore) -> None:
    held = [{"ts": n + 1, "data": {"pay": "p" * 900, "n": n}} for n in range(100)]
    await append(store, "cards", "cards/a", held)
    [entry] = await tails(anyone, "cards", {"last": 100})
    assert items(entry) == [{"ts": n + 1, "data": {"n": n}} for n in range(100)]
    [none] = await tails(anyone, "cards", {"last": 0})
    assert items(none) == []


async def test_a_known_answer_is_304_until_a_log_grows(anyone: Browser, store: FaultyStore) -> None:
    await append(store, "log", "log/a", ALL[:2])

    async def pulled_batch(bounds: object, known: str = "") -> Reply:
        request: dict[str, Any] = {"params": {"log": [{"id": "a"}]}, "append": {"log": [bounds]}}
        return await batch(anyone, "log", headers={"If-None-Match": known} if known else None, **request)

    first = await pulled_batch({"last": 1})
    tag = first.headers["ETag"]
    assert tag.startswith('W/"')
    known = await pulled_batch({"last": 1}, tag)
    assert (known.status, known.body, known.headers["ETag"]) == (304, b"", tag)
    assert (await pulled_batch({"last": 2}, tag)).status == 200
    await append(store, "log", "log/a", ALL[2:3])
    grown = await pulled_batch({"last": 1}, tag)
    assert items(entries(grown, "log")[0]) == ALL[2:3]


async def test_a_batch_with_logs_is_cached_as_its_most_private_entry(
    anyone: Browser, store: FaultyStore
) -> None:
    one = {"id": "a"}
    for bounds, control in (({"last": 1}, "no-cache"), (None, "private, no-cache")):
        answer = await batch(
            anyone, "notes", "log", params={"notes": [one], "log": [one]}, append={"log": [bounds]}
        )
        assert answer.headers["Cache-Control"] == control


async def test_each_distinct_tail_is_read_once(anyone: Browser, store: FaultyStore) -> None:
    await append(store, "short", "short/a", ALL[:1])
    store.calls.clear()
    found = await tails(anyone, "short", *[{"last": 3}, {"limit": 3}, {"since": 5}] * 20)
    assert all(items(entry) == ALL[:1] for entry in found)
    assert store.calls["get"] == 1


async def test_logs_wait_for_the_store_with_documents(anyone: Browser, store: FaultyStore) -> None:
    release = asyncio.Event()
    ids = [{"id": f"n{n}"} for n in range(40)]
    arrived = [store.delay("get", release) for _ in range(80)]
    store.calls.clear()
    pulling = asyncio.create_task(
        batch(
            anyone,
            "notes",
            "log",
            params={"notes": ids, "log": ids},
            append={"log": [{"last": 1}] * len(ids)},
        )
    )
    for event in arrived:
        await event.wait()
    release.set()
    answer = await pulling
    assert len(entries(answer, "notes")) == len(entries(answer, "log")) == 40
    assert store.calls["get"] == 80
    assert store.max_concurrent_reads == 80


async def test_each_named_log_counts_once(start: Start, session: aiohttp.ClientSession) -> None:
    metered = {"rateLimit": {"pull": limit_of(2)}}
    browser = Browser(await start({"collections": [log("log", "log/{id}") | metered]}), session)
    for _ in range(2):
        assert len(await tails(browser, "log", {"last": 1}, {"last": 2}, None)) == 3
    rejected = await batch(browser, "log")
    assert rejected.error == (429, "Rate limit exceeded")
