"""Appends to logs and pulls of them, black box over HTTP: `test_protocol.py` says at which server."""

import asyncio
import gzip
from typing import Any

import aiohttp
import pytest
from support.append_log_browser import Unique, append, elements, hash_of, tail, ten
from support.clients import Browser, Signed

from pysync.clock import wall_clock_ms

# Append


async def test_an_appended_element_comes_back_with_its_time(anyone: Browser, unique: Unique) -> None:
    key, before = unique("log"), wall_clock_ms()
    data = {"b": [1, 2.5, "é😀", None, {"z": True, "a": {}}], "a": {"": -0.0, "1e21": 1e21}}
    first = await append(anyone, key, data)
    assert first.status == 200
    assert first.json == {"hash": hash_of(1, data), "timestamp": first.json["timestamp"]}
    assert first.json["timestamp"] >= before - 5000
    assert first.headers["Cache-Control"] == "no-store"
    second = await append(anyone, key, {})
    assert second.json["hash"] == hash_of(2, {})
    pulled = await tail(anyone, key)
    assert pulled.json == {
        "data": {
            "items": [
                {"ts": first.json["timestamp"], "data": data},
                {"ts": second.json["timestamp"], "data": {}},
            ]
        },
        "hash": second.json["hash"],
        "timestamp": pulled.json["timestamp"],
    }


async def test_the_members_of_the_array_and_its_field_are_configured(anyone: Browser, unique: Unique) -> None:
    key = unique("entries")
    assert (await tail(anyone, key)).json["data"] == {"entries": []}
    await append(anyone, key, {"n": 1})
    assert [each["data"] for each in await elements(anyone, key, field="entries")] == [{"n": 1}]


async def test_times_strictly_increase_however_fast_appends_come(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    answers = [await append(anyone, key, {"n": n}) for n in range(20)]
    times = [answer.json["timestamp"] for answer in answers]
    assert times == sorted(set(times))
    assert [each["ts"] for each in await elements(anyone, key)] == times


async def test_appends_of_two_clients_do_not_conflict(anyone: Browser, base: str, unique: Unique) -> None:
    key = unique("log")
    async with aiohttp.ClientSession() as another:
        clients = [anyone, Browser(base, another)]
        answers = await asyncio.gather(*(append(clients[n % 2], key, {"n": n}) for n in range(60)))
    assert {answer.status for answer in answers} == {200}
    pulled = (await tail(anyone, key)).json
    found = pulled["data"]["items"]
    times = [each["ts"] for each in found]
    assert times == sorted(set(times))
    by_time = {answer.json["timestamp"]: n for n, answer in enumerate(answers)}
    assert {each["ts"]: each["data"]["n"] for each in found} == by_time, "each has the time that it was told"
    assert sorted(by_time.values()) == list(range(60))
    hashes = {answer.json["hash"] for answer in answers}
    assert hashes == {hash_of(count, each["data"]) for count, each in enumerate(found, 1)}
    assert pulled["hash"] == hash_of(60, found[-1]["data"])


async def test_an_append_names_no_base(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    for base_hash in (None, "", "0" * 64, 7):
        assert (await append(anyone, key, {}, baseHash=base_hash)).status == 200


async def test_a_client_may_date_its_elements(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    assert (await append(anyone, key, {}, ts=0)).json["timestamp"] == 0
    assert (await append(anyone, key, {}, ts=7)).json["timestamp"] == 7
    for late in (7, 6, 0):
        rejected = await append(anyone, key, {}, ts=late)
        assert rejected.status == 409
        assert rejected.json == {"error": "non_monotonic_timestamp", "code": "non_monotonic_timestamp"}
    ahead = wall_clock_ms() + 200_000
    assert (await append(anyone, key, {}, ts=ahead)).json["timestamp"] == ahead
    assert (await append(anyone, key, {})).json["timestamp"] == ahead + 1, "the server's time is later still"
    assert (await append(anyone, key, {}, ts=None)).json["timestamp"] == ahead + 2
    assert [each["ts"] for each in await elements(anyone, key)] == [0, 7, ahead, ahead + 1, ahead + 2]


async def test_a_time_too_far_ahead_is_rejected(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    rejected = await append(anyone, key, {}, ts=wall_clock_ms() + 400_000)
    assert rejected.error == (400, "ts is too far in the future")
    assert rejected.json["code"] == "ts_too_far_ahead"
    assert (await append(anyone, key, {}, ts=10**30)).json["code"] == "ts_too_far_ahead"
    assert await elements(anyone, key) == []


@pytest.mark.parametrize("ts", ["-1", '"1"', "1.5", "true", "[]", "{}"])
async def test_a_time_that_is_none_is_rejected(anyone: Browser, unique: Unique, ts: str) -> None:
    body = b'{"data":{},"ts":%b}' % ts.encode()
    rejected = await anyone.request("POST", f"/push/{unique('log')}", body)
    assert rejected.error == (400, "ts must be a non-negative integer")
    assert rejected.json["code"] == "invalid_ts"


async def test_unsafe_keys_are_dropped_but_not_inside_arrays(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    data = {"__proto__": 1, "a": {"constructor": 1, "b": [{"prototype": 1}]}, "__class__": {}, "__dict__": 0}
    kept = {"a": {"b": [{"prototype": 1}]}}
    assert (await append(anyone, key, data)).json["hash"] == hash_of(1, kept)
    assert [each["data"] for each in await elements(anyone, key)] == [kept]


async def test_integers_of_64_bits_come_back_exactly(anyone: Browser, unique: Unique) -> None:
    key, data = unique("log"), {"n": [9007199254740993, 2**63 - 1, -(2**63), 2**64 - 1]}
    assert (await append(anyone, key, data)).json["hash"] == hash_of(1, data)
    assert [each["data"] for each in await elements(anyone, key)] == [data]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "Invalid JSON body"),
        (b"{", "Invalid JSON body"),
        (b'{"data":{"a":NaN}}', "Invalid JSON body"),
        (b'{"data":{"a":"\\ud800"}}', "Invalid JSON body"),
        (b'{"data":{}} x', "Invalid JSON body"),
        (b'{"data":{"a":' + b"[" * 63 + b"]" * 63 + b"}}", "Body nesting too deep"),
        (b"[]", "Body must be a JSON object"),
        (b"null", "Body must be a JSON object"),
        (b"{}", "Missing or invalid data"),
        (b'{"data":null}', "Missing or invalid data"),
        (b'{"data":[]}', "Missing or invalid data"),
    ],
)
async def test_a_bad_body_is_rejected_and_nothing_is_appended(
    anyone: Browser, unique: Unique, body: bytes, error: str
) -> None:
    key = unique("log")
    assert (await anyone.request("POST", f"/push/{key}", body)).error == (400, error)
    assert (await tail(anyone, key)).json["hash"] == ""


async def test_bodies_are_json_plain_or_gzip_and_bounded(anyone: Browser, unique: Unique) -> None:
    key, target = unique("entries"), f"/push/{unique('entries')}"
    for media_type in ("text/plain", "application/octet-stream", "x/y; application/json"):
        rejected = await anyone.request("POST", target, b'{"data":{}}', {"Content-Type": media_type})
        assert rejected.error == (415, "Content-Type must be application/json")
    typed = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert (await anyone.request("POST", target, b'{"data":{}}', typed)).status == 200
    zipped = {"Content-Encoding": "gzip"}
    assert (await anyone.request("POST", target, gzip.compress(b'{"data":{"z":1}}'), zipped)).status == 200
    assert (await anyone.request("POST", target, b'{"data":{}}', zipped)).status == 400
    assert (await anyone.request("POST", target, b"{}", {"Content-Encoding": "br"})).status == 415
    for sent, headers in (
        (b'{"data":{"a":"%b"}}' % (b"x" * 5000), {}),
        (gzip.compress(b'{"data":{"a":"%b"}}' % (b"x" * 5000)), zipped),
    ):
        assert (await anyone.request("POST", target, sent, headers)).error == (413, "Payload too large")
    found = await elements(anyone, key, field="entries")
    assert [each["data"] for each in found] == [{}, {"z": 1}]


async def test_a_full_log_takes_no_more(anyone: Browser, unique: Unique) -> None:
    key = unique("few")
    answers = await asyncio.gather(*(append(anyone, key, {"n": n}) for n in range(6)))
    assert sorted(answer.status for answer in answers) == [200] * 4 + [409] * 2
    rejected = await append(anyone, key, {})
    assert rejected.status == 409
    assert rejected.json == {"error": "append_limit_exceeded", "code": "append_limit_exceeded", "limit": 4}


# Pull


async def test_a_log_without_elements_is_empty_and_has_no_version(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    for query in ("full=true", "last=5", "checkpoint=0"):
        pulled = await tail(anyone, key, query)
        assert pulled.status == 200
        assert pulled.json == {
            "data": {"items": []},
            "hash": "",
            "timestamp": pulled.json["timestamp"],
        }
        assert "ETag" not in pulled.headers
    assert (await tail(anyone, key, "last=5", {"If-None-Match": "*"})).status == 200


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ("full=true", range(1, 11)),
        ("full=1", range(1, 11)),
        ("checkpoint=0", range(1, 11)),
        ("checkpoint=999", range(1, 11)),
        ("checkpoint=1000", range(2, 11)),
        ("checkpoint=8500", [9, 10]),
        ("checkpoint=10000", []),
        ("checkpoint=99999999999999999999999", []),
        ("since=8000", [9, 10]),
        ("checkpoint=9000&since=1000", [10]),
        ("last=3", [8, 9, 10]),
        ("last=10", range(1, 11)),
        ("last=11", range(1, 11)),
        ("last=99999999999999999999999", range(1, 11)),
        pytest.param("last=" + "9" * 5000, range(1, 11), id="last=9..9"),
        ("last=0", []),
        ("limit=2", [9, 10]),
        ("limit=0", []),
        ("limit=2&last=5", [9, 10]),
        ("last=2&limit=5", range(6, 11)),
        ("limit=0&last=5", []),
        ("checkpoint=5000&last=2", [9, 10]),
        ("checkpoint=8000&last=5", [9, 10]),
        ("checkpoint=5000&last=0", []),
        ("checkpoint=5000&full=false", range(6, 11)),
        ("last=1&withKeyring=1", [10]),
        ("last=1&other=x", [10]),
    ],
)
async def test_a_pull_gives_the_elements_within_its_bounds(
    anyone: Browser, unique: Unique, query: str, numbers: Any
) -> None:
    key = unique("log")
    hash_ = await ten(anyone, key)
    pulled = await tail(anyone, key, query)
    assert set(pulled.json) == {"data", "hash", "timestamp"}
    expected = [{"ts": n * 1000, "data": {"n": n}} for n in numbers]
    assert (pulled.json["data"], pulled.json["hash"]) == ({"items": expected}, hash_)


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("", "pull_bound_required"),
        ("withKeyring=1", "pull_bound_required"),
        ("full=false", "pull_bound_required"),
        ("full=0", "pull_bound_required"),
        ("full=", "pull_bound_required"),
        *((f"checkpoint={bad}", "Invalid checkpoint") for bad in ("", "-1", "01", "1.5", "%2B1", "1e3")),
        *((f"since={bad}", "Invalid checkpoint") for bad in ("x", "0x10", "1%0A", "%D9%A1")),
        *((f"limit={bad}", "Invalid limit") for bad in ("", "-1", "00", "1.0", "x", "1_0")),
        *((f"last={bad}", "Invalid last") for bad in ("", "-1", "010", "%201", "null")),
        ("last=1&checkpoint=x&limit=y&full=true", "Invalid checkpoint"),
        ("last=y&limit=x", "Invalid limit"),
        ("last=x&full=true", "Invalid last"),
        ("full=true&checkpoint=0", "full_with_bounds"),
        ("full=1&last=0", "full_with_bounds"),
        ("full=true&limit=5", "full_with_bounds"),
        ("full=true&since=5", "full_with_bounds"),
    ],
)
async def test_bounds_that_are_none_are_rejected(
    anyone: Browser, unique: Unique, query: str, error: str
) -> None:
    """Whether or not something is stored."""
    key = unique("log")
    for _ in range(2):
        assert (await tail(anyone, key, query)).error == (400, error)
        await append(anyone, key, {})
    assert (await anyone.pull(key)).error == (400, "pull_bound_required")


async def test_a_log_may_reject_to_be_read_as_a_whole(anyone: Browser, unique: Unique) -> None:
    key = unique("few")
    assert (await tail(anyone, key, "full=true")).error == (400, "full_not_allowed")
    assert (await tail(anyone, key, "full=true&last=1")).error == (400, "full_with_bounds")
    assert (await tail(anyone, key, "last=1")).status == 200


@pytest.mark.parametrize(
    ("query", "numbers"),
    [("last=4", [3, 4]), ("limit=1", [4]), ("checkpoint=0", [1, 2]), ("checkpoint=0&last=3", [3, 4]),
     ("checkpoint=2000", [3, 4]), ("checkpoint=3000", [4])],
)  # fmt: skip
async def test_above_the_limit_a_count_gets_the_newest_and_a_checkpoint_the_oldest(
    anyone: Browser, unique: Unique, query: str, numbers: list[int]
) -> None:
    key = unique("few")
    for n in range(1, 5):
        await append(anyone, key, {"n": n}, ts=n * 1000)
    assert [each["data"]["n"] for each in await elements(anyone, key, query)] == numbers


async def test_a_known_version_is_answered_304(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    tag = f'"{await ten(anyone, key)}"'
    for query in ("full=true", "last=3", "last=0", "checkpoint=5000"):
        assert (await tail(anyone, key, query)).headers["ETag"] == tag
        for condition in (tag, f'"x", {tag}', f"W/{tag}", "*"):
            answer = await tail(anyone, key, query, {"If-None-Match": condition})
            assert (answer.status, answer.body, answer.headers["ETag"]) == (304, b"", tag)
        assert (await tail(anyone, key, query, {"If-None-Match": '"other"'})).status == 200
    await append(anyone, key, {})
    assert (await tail(anyone, key, "last=3", {"If-None-Match": tag})).status == 200


async def test_head_answers_as_get_without_a_body(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    await ten(anyone, key)
    head = await anyone.request("HEAD", f"/pull/{key}?last=3")
    got = await tail(anyone, key, "last=3")
    assert (head.status, head.body) == (200, b"")
    for name in ("ETag", "Content-Type", "Cache-Control"):
        assert head.headers[name] == got.headers[name]
    assert (await anyone.request("HEAD", f"/pull/{key}")).status == 400


async def test_pulls_say_how_they_may_be_cached(anyone: Browser, member: Signed, unique: Unique) -> None:
    for browser, key, control in (
        (anyone, unique("log"), "no-cache"),
        (anyone, unique("entries"), "public, max-age=60"),
        (member, f"{unique('rooms')}/messages", "private, no-cache"),
    ):
        answer = await tail(browser, key, "last=1")
        assert (answer.headers["Cache-Control"], answer.headers["Vary"]) == (control, "Authorization")
    assert (await tail(anyone, unique("log"), "")).headers["Cache-Control"] == "no-store"


async def test_a_long_log_comes_whole(anyone: Browser, unique: Unique) -> None:
    key, text = unique("log"), "x" * 70_000
    for n in range(100):
        assert (await append(anyone, key, {"n": n, "text": text})).status == 200
    pulled = await tail(anyone, key)
    assert [each["data"] for each in pulled.json["data"]["items"]] == [
        {"n": n, "text": text} for n in range(100)
    ]
    assert pulled.json["hash"] == hash_of(100, {"n": 99, "text": text})
    assert pulled.headers["ETag"] == f'"{pulled.json["hash"]}"'
    assert (await tail(anyone, key, "full=1", {"If-None-Match": pulled.headers["ETag"]})).status == 304
    head = await anyone.request("HEAD", f"/pull/{key}?full=true")
    assert (head.status, head.body, head.headers["ETag"]) == (200, b"", pulled.headers["ETag"])
    some = await elements(anyone, key, "last=20")
    assert [each["data"]["n"] for each in some] == list(range(80, 100)), "the connection serves on"
