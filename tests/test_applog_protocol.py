"""Append-only logs, black box over HTTP: as `test_protocol.py`, which says how to point it elsewhere."""

import asyncio
import gzip
import hashlib
import os
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
import pytest
from conftest import ISSUER, STRANGER, SUBJECT, Browser, Reply, Signed, minted_at, root_device
from reference import canonical

from pysync import minting, signing
from pysync.clock import wall_clock_ms
from pysync.keys import Keys

Unique = Callable[[str], str]


def hash_of(count: int, last: object) -> str:
    """The hash of a log that holds `count` elements, `last` being the data of the last."""
    return hashlib.sha256(canonical({"n": count, "last": last}).encode()).hexdigest()


async def append(
    browser: Browser, key: str, data: object, headers: dict[str, str] | None = None, /, **members: Any
) -> Reply:
    return await browser.request("POST", f"/push/{key}", {"data": data, **members}, headers)


async def tail(
    browser: Browser, key: str, query: str = "full=true", headers: dict[str, str] | None = None
) -> Reply:
    return await browser.request("GET", f"/pull/{key}?{query}", headers=headers)


async def elements(browser: Browser, key: str, query: str = "full=true", field: str = "items") -> Any:
    """The elements of a successful pull."""
    pulled = await tail(browser, key, query)
    assert pulled.status == 200
    return pulled.json["data"][field]


def proof(author: Keys, key: str, data: object) -> dict[str, str]:
    return signing.sign_author(author, signing.APPEND_AUTHOR, key, orjson.dumps(data))


async def ten(browser: Browser, key: str) -> str:
    """A log of the elements 1 to 10, dated 1000 to 10000; its hash."""
    for n in range(1, 11):
        answer = await append(browser, key, {"n": n}, ts=n * 1000)
        assert answer.status == 200
    return str(answer.json["hash"])


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
    told = {answer.json["timestamp"]: n for n, answer in enumerate(answers)}
    assert {each["ts"]: each["data"]["n"] for each in found} == told, "each has the time that it was told"
    assert sorted(told.values()) == list(range(60))
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
        refused = await append(anyone, key, {}, ts=late)
        assert refused.status == 409
        assert refused.json == {"error": "non_monotonic_timestamp", "code": "non_monotonic_timestamp"}
    ahead = wall_clock_ms() + 200_000
    assert (await append(anyone, key, {}, ts=ahead)).json["timestamp"] == ahead
    assert (await append(anyone, key, {})).json["timestamp"] == ahead + 1, "the server's time is later still"
    assert (await append(anyone, key, {}, ts=None)).json["timestamp"] == ahead + 2
    assert [each["ts"] for each in await elements(anyone, key)] == [0, 7, ahead, ahead + 1, ahead + 2]


async def test_a_time_too_far_ahead_is_refused(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    refused = await append(anyone, key, {}, ts=wall_clock_ms() + 400_000)
    assert refused.error == (400, "ts is too far in the future")
    assert refused.json["code"] == "ts_too_far_ahead"
    assert (await append(anyone, key, {}, ts=10**30)).json["code"] == "ts_too_far_ahead"
    assert await elements(anyone, key) == []


@pytest.mark.parametrize("ts", ["-1", '"1"', "1.5", "true", "[]", "{}"])
async def test_a_time_that_is_none_is_refused(anyone: Browser, unique: Unique, ts: str) -> None:
    body = b'{"data":{},"ts":%b}' % ts.encode()
    refused = await anyone.request("POST", f"/push/{unique('log')}", body)
    assert refused.error == (400, "ts must be a non-negative integer")
    assert refused.json["code"] == "invalid_ts"


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
async def test_a_bad_body_is_refused_and_nothing_is_appended(
    anyone: Browser, unique: Unique, body: bytes, error: str
) -> None:
    key = unique("log")
    assert (await anyone.request("POST", f"/push/{key}", body)).error == (400, error)
    assert (await tail(anyone, key)).json["hash"] == ""


async def test_bodies_are_json_plain_or_gzip_and_bounded(anyone: Browser, unique: Unique) -> None:
    key, target = unique("entries"), f"/push/{unique('entries')}"
    for media_type in ("text/plain", "application/octet-stream", "x/y; application/json"):
        refused = await anyone.request("POST", target, b'{"data":{}}', {"Content-Type": media_type})
        assert refused.error == (415, "Content-Type must be application/json")
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
    refused = await append(anyone, key, {})
    assert refused.status == 409
    assert refused.json == {"error": "append_limit_exceeded", "code": "append_limit_exceeded", "limit": 4}


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
async def test_bounds_that_are_none_are_refused(
    anyone: Browser, unique: Unique, query: str, error: str
) -> None:
    """Whether or not something is stored."""
    key = unique("log")
    for _ in range(2):
        assert (await tail(anyone, key, query)).error == (400, error)
        await append(anyone, key, {})
    assert (await anyone.pull(key)).error == (400, "pull_bound_required")


async def test_a_log_may_refuse_to_be_read_as_a_whole(anyone: Browser, unique: Unique) -> None:
    key = unique("few")
    assert (await tail(anyone, key, "full=true")).error == (400, "full_not_allowed")
    assert (await tail(anyone, key, "full=true&last=1")).error == (400, "full_with_bounds")
    assert (await tail(anyone, key, "last=1")).status == 200


@pytest.mark.parametrize(
    ("query", "numbers"),
    [("last=4", [3, 4]), ("limit=1", [4]), ("checkpoint=0", [1, 2]), ("checkpoint=0&last=3", [3, 4]),
     ("checkpoint=2000", [3, 4]), ("checkpoint=3000", [4])],
)  # fmt: skip
async def test_of_a_larger_tail_than_the_log_gives_a_count_gets_the_newest_a_checkpoint_the_oldest(
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
    for name in ("ETag", "Content-Length", "Content-Type", "Cache-Control"):
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


# Author proofs (clients-and-crypto section 5)


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"authorPubkey": ISSUER.ed_pub},
        {"authorSignature": "x"},
        {"authorPubkey": ISSUER.ed_pub, "authorSignature": 1},
        {"authorPubkey": None, "authorSignature": "x"},
        {"authorPubkey": [ISSUER.ed_pub], "authorSignature": "x"},
    ],
)
async def test_a_log_takes_no_element_without_an_author_proof(
    anyone: Browser, unique: Unique, members: dict[str, Any]
) -> None:
    key = unique("authored")
    refused = await append(anyone, key, {}, **members)
    assert refused.error == (400, "append requires authorPubkey and authorSignature")
    assert await elements(anyone, key) == []


async def test_an_author_proof_is_checked_kept_and_returned(anyone: Browser, unique: Unique) -> None:
    key, data = unique("authored"), {"b": 9007199254740993, "a": "é"}
    proved = proof(STRANGER, key, data)
    assert (await append(anyone, key, data, **proved)).status == 200
    (element,) = await elements(anyone, key)
    assert element == {"ts": element["ts"], "data": data, **proved}
    invalid = (403, "invalid append author signature")
    of_document = signing.sign_author(STRANGER, signing.DOCUMENT_AUTHOR, key, orjson.dumps(data))
    for wrong in (
        proof(STRANGER, key + "x", data),
        proof(STRANGER, key, {**data, "a": "e"}),
        of_document,
        {**proved, "authorPubkey": SUBJECT.ed_pub},
        {**proved, "authorPubkey": "", "authorSignature": ""},
        {**proved, "authorPubkey": "zz" * 32},
        {**proved, "authorSignature": proved["authorSignature"].rstrip("=")},
    ):
        assert (await append(anyone, key, data, **wrong)).error == invalid
    assert len(await elements(anyone, key)) == 1


async def test_an_author_signs_what_is_stored(anyone: Browser, unique: Unique) -> None:
    key = unique("authored")
    assert (await append(anyone, key, {"n": 1, "__proto__": 2}, **proof(ISSUER, key, {"n": 1}))).status == 200
    refused = await append(anyone, key, {"n": 1, "__proto__": 2}, **proof(ISSUER, key, {"n": 2}))
    assert refused.status == 403


async def test_an_author_proof_does_not_cover_the_time(anyone: Browser, unique: Unique) -> None:
    key = unique("authored")
    proved = proof(ISSUER, key, {})
    for ts in (5, 6):
        assert (await append(anyone, key, {}, ts=ts, **proved)).status == 200


async def test_the_author_is_the_presenter_of_a_signed_request(member: Signed, unique: Unique) -> None:
    key = f"{unique('rooms')}/messages"
    assert (await append(member, key, {"n": 1}, **proof(SUBJECT, key, {"n": 1}))).status == 200
    for other, data in ((ISSUER, {"n": 1}), (ISSUER, {"n": 2})):
        refused = await append(member, key, {"n": 1}, **proof(other, key, data))
        assert refused.error == (403, "append author must be the request presenter")
    shouted = {**proof(SUBJECT, key, {"n": 1}), "authorPubkey": SUBJECT.ed_pub.upper()}
    refused = await append(member, key, {"n": 1}, **shouted)
    assert refused.error == (403, "append author must be the request presenter"), "compared as text"
    wrong = await append(member, key, {"n": 2}, **proof(SUBJECT, key, {"n": 1}))
    assert wrong.error == (403, "invalid append author signature")
    assert len(await elements(member, key)) == 1


async def test_without_required_proofs_nothing_is_verified_and_both_members_are_kept(
    anyone: Browser, owner: Signed, unique: Unique
) -> None:
    key, garbage = unique("log"), {"authorPubkey": "not a key", "authorSignature": ""}
    assert (await append(anyone, key, {}, **garbage)).status == 200
    for one in (
        {"authorPubkey": "only"},
        {"authorSignature": "only"},
        {"authorPubkey": "one", "authorSignature": 5},
        {"authorPubkey": {}, "authorSignature": "one"},
    ):
        assert (await append(anyone, key, {}, **one)).status == 200
    first, *others = await elements(anyone, key)
    assert {name: first[name] for name in garbage} == garbage
    assert [set(each) for each in others] == [{"ts", "data"}] * 4
    mine = f"diary/{ISSUER.user_id}/{os.urandom(4).hex()}"
    assert (await append(owner, mine, {}, **garbage)).status == 200, "nor is it bound to the presenter"


# Idempotency


async def test_a_repeated_append_is_answered_again_and_not_appended(anyone: Browser, unique: Unique) -> None:
    key, once = unique("log"), {"Idempotency-Key": os.urandom(8).hex()}
    first = await append(anyone, key, {"n": 1}, once)
    await append(anyone, key, {"n": 2})
    for repeated in ({"n": 1}, {"n": 3}):
        again = await append(anyone, key, repeated, once)
        assert (again.status, again.json) == (200, first.json)
    assert [each["data"]["n"] for each in await elements(anyone, key)] == [1, 2]
    other = await append(anyone, key, {"n": 1}, {"Idempotency-Key": "another"})
    assert other.json["timestamp"] > first.json["timestamp"]
    assert (await append(anyone, key, {"n": 1})).status == 200, "without a key each one counts"
    assert len(await elements(anyone, key)) == 4


async def test_an_append_that_is_sent_many_times_at_once_is_appended_once(
    anyone: Browser, unique: Unique
) -> None:
    key, once = unique("log"), {"Idempotency-Key": os.urandom(8).hex()}
    answers = await asyncio.gather(*(append(anyone, key, {"n": 1}, once) for _ in range(12)))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert len(await elements(anyone, key)) == 1


async def test_an_idempotency_key_belongs_to_one_log_and_one_caller(
    anyone: Browser, member: Signed, owner: Signed, unique: Unique
) -> None:
    once = {"Idempotency-Key": os.urandom(8).hex()}
    for key in (unique("log"), unique("log") + "x", unique("entries")):
        assert (await append(anyone, key, {"n": 1}, once)).status == 200
    key = f"{unique('rooms')}/messages"
    for caller, keys in ((member, SUBJECT), (owner, ISSUER)):
        assert (await append(caller, key, {}, once, **proof(keys, key, {}))).status == 200
    assert len(await elements(member, key)) == 2


@pytest.mark.parametrize("bad", ["", "x" * 129, "tab\there"])
async def test_an_unusable_idempotency_key_is_refused(anyone: Browser, unique: Unique, bad: str) -> None:
    key = unique("log")
    assert (await append(anyone, key, {}, {"Idempotency-Key": bad})).json["code"] == "bad_request"
    assert await elements(anyone, key) == []


# What is not kept, listed, restricted


async def test_what_does_not_persist_is_answered_and_forgotten(anyone: Browser, unique: Unique) -> None:
    key, data = unique("signals"), {"b": 1, "a": 2}
    sent = await append(anyone, key, data)
    assert sent.status == 200
    assert sent.json["hash"] == hashlib.sha256(canonical(data).encode()).hexdigest()
    ahead = wall_clock_ms() + 100_000
    assert (await append(anyone, key, data, ts=ahead)).json["timestamp"] == ahead
    assert (await append(anyone, key, data, ts=1)).json["timestamp"] == 1, "there is no last one"
    refused = await append(anyone, key, data, ts=wall_clock_ms() + 400_000)
    assert refused.error == (400, "ts is too far in the future")
    for query in ("", "full=true", "last=3", "checkpoint=0&full=true"):
        pulled = await tail(anyone, key, query)
        assert (pulled.status, pulled.json["data"], pulled.json["hash"]) == (200, {"items": []}, "")
        assert "ETag" not in pulled.headers


async def test_logs_are_listed_by_name(anyone: Browser) -> None:
    mark = os.urandom(6).hex()
    for name in ("b", "a", "c"):
        await append(anyone, f"log/{mark}-{name}", {"text": "x" * 1000})
    page = await anyone.request("GET", f"/list/log?limit=3&after={mark}")
    assert page.json["items"] == [f"{mark}-a", f"{mark}-b", f"{mark}-c"]


async def test_a_log_that_is_only_pushed_has_no_pull(anyone: Browser, unique: Unique) -> None:
    key = unique("letterbox")
    assert (await append(anyone, key, {})).status == 200
    assert (await tail(anyone, key)).status == 404


async def test_a_namespace_is_a_prefix_over_the_same_logs(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    for prefix in ("", "/acme", "/v1/acme"):
        assert (await anyone.request("POST", f"{prefix}/push/{key}", {"data": {}})).status == 200
    for prefix in ("", "/acme", "/v1/acme"):
        pulled = await anyone.request("GET", f"{prefix}/pull/{key}?full=true")
        assert len(pulled.json["data"]["items"]) == 3


async def test_wrong_methods_and_paths_are_refused_as_for_documents(anyone: Browser, unique: Unique) -> None:
    key = unique("log")
    answer = await anyone.request("POST", f"/pull/{key}", {"data": {}})
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert (await anyone.request("GET", f"/push/{key}")).status == 405
    assert (await append(anyone, "log/a%2Fb", {})).error == (400, "Invalid path parameter")
    assert (await tail(anyone, "log/..")).error == (400, "Invalid path parameter")


async def test_callers_need_roles_and_operations(
    anyone: Browser, member: Signed, stranger: Signed, unique: Unique
) -> None:
    key = f"{unique('rooms')}/messages"
    for nobody in (await append(anyone, key, {}), await tail(anyone, key, "last=1")):
        assert nobody.error == (401, "Unauthorized")
    for other in (
        await append(stranger, key, {}, **proof(STRANGER, key, {})),
        await tail(stranger, key, "last=1"),
    ):
        assert other.error == (403, "Forbidden")
    assert (await tail(anyone, key, "last=x")).status == 401, "who asks is told first"
    member.certificate = minting.member(ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", **minted_at())
    assert (await tail(member, key, "last=1")).status == 200
    assert (await append(member, key, {}, **proof(SUBJECT, key, {}))).error == (403, "Forbidden")


async def test_an_identity_owns_its_logs(owner: Signed, stranger: Signed, anyone: Browser) -> None:
    key = f"diary/{ISSUER.user_id}/{os.urandom(4).hex()}"
    assert (await append(owner, key, {"n": 1})).status == 200
    assert len(await elements(owner, key)) == 1
    assert (await append(stranger, key, {})).error == (403, "Forbidden")
    assert (await tail(stranger, key)).error == (403, "Forbidden")
    admin = {"Authorization": "Bearer protocol-admin-token"}
    assert (await append(anyone, key, {}, admin)).status == 200
    assert (await tail(anyone, key, "full=true", admin)).error == (403, "Forbidden")


async def test_a_signature_covers_the_query_and_the_body(owner: Signed, anyone: Browser) -> None:
    key = f"diary/{ISSUER.user_id}/{os.urandom(4).hex()}"
    signed = owner.headers("GET", f"/pull/{key}?last=1", b"")
    assert (await tail(anyone, key, "last=2", signed)).status == 401
    assert (await tail(anyone, key, "last=1", signed)).status == 200
    signed = owner.headers("POST", f"/push/{key}", b'{"data":{"n":1}}')
    assert (await anyone.request("POST", f"/push/{key}", b'{"data":{"n":2}}', signed)).status == 401
    zipped = gzip.compress(b'{"data":{"n":1}}')
    headers = {**signed, "Content-Encoding": "gzip"}
    assert (await anyone.request("POST", f"/push/{key}", zipped, headers)).status == 200
    assert (await anyone.request("POST", f"/push/{key}", zipped, headers)).status == 401, "a replay"
    assert len(await elements(owner, key)) == 1


# Schemas and permissions


async def test_data_must_satisfy_the_schema(anyone: Browser, unique: Unique) -> None:
    key = unique("ages")
    refused = await append(anyone, key, {"age": -1})
    assert refused.status == 400
    assert refused.json["error"].startswith("Schema validation failed: ")
    assert (refused.json["path"], refused.json["validator"]) == ("/age", "minimum")
    assert (await append(anyone, key, {})).json["validator"] == "required"
    assert (await append(anyone, key, {"age": 3})).status == 200
    assert len(await elements(anyone, key)) == 1


async def test_members_are_hidden_from_and_locked_to_others(
    anyone: Browser, base: str, unique: Unique
) -> None:
    editor = Signed(base, anyone.session, SUBJECT, root_device(SUBJECT))
    key, large = unique("salaries"), 9007199254740993
    assert (await append(editor, key, {"name": "Ann", "salary": 10, "rank": large})).status == 200
    for data, name in (
        ({"salary": 10}, "salary"),
        ({"rank": None}, "rank"),
        ({"rank": 1, "salary": 1}, "rank"),
    ):
        refused = await append(anyone, key, data)
        assert refused.error == (403, f'Forbidden: field "{name}" requires roles: editor')
    extra = {"authorPubkey": "a", "authorSignature": "b"}
    last = await append(anyone, key, {"name": "Bea", "nested": {"salary": 1}}, **extra)
    assert last.status == 200

    whole, seen = await tail(editor, key), await tail(anyone, key)
    assert [each["data"] for each in whole.json["data"]["items"]] == [
        {"name": "Ann", "salary": 10, "rank": large},
        {"name": "Bea", "nested": {"salary": 1}},
    ]
    first, second = seen.json["data"]["items"]
    assert first == {"ts": first["ts"], "data": {"name": "Ann", "rank": large}}
    assert second == {"ts": last.json["timestamp"], "data": {"name": "Bea", "nested": {"salary": 1}}, **extra}
    assert seen.json["hash"] == whole.json["hash"] == last.json["hash"]
    assert seen.headers["ETag"] != whole.headers["ETag"]
    known = {"If-None-Match": seen.headers["ETag"]}
    assert (await tail(anyone, key, "last=1", known)).status == 304
    assert (await tail(editor, key, "last=1", known)).status == 200
    assert (await tail(anyone, key, "last=0")).json["data"] == {"items": []}


async def test_members_are_hidden_in_a_long_log(anyone: Browser, base: str, unique: Unique) -> None:
    editor = Signed(base, anyone.session, SUBJECT, root_device(SUBJECT))
    key, text = unique("salaries"), "x" * 70_000
    for n in range(100):
        assert (await append(editor, key, {"n": n, "salary": n, "text": text})).status == 200
    pulled = await tail(anyone, key)
    assert b"salary" not in pulled.body
    assert [each["data"] for each in pulled.json["data"]["items"]] == [
        {"n": n, "text": text} for n in range(100)
    ]
