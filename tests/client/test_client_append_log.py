"""The client's calls for logs: what it sends, to a server that answers as it is told to."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
import pytest
from support.fake_server import DEVICE, KEYS, PULLED, PUSHED, Answer, client, is_signed, serving

from pysync import protocol
from pysync._core import verify_author
from pysync.auth.identity_keys import IdentityKeys
from pysync.auth.signing import APPEND_AUTHOR
from pysync.client import LogElement, LogRange, PullResult, RetryPolicy, Unreachable
from pysync.errors import (
    AppendLimitExceeded,
    AppendParamsNotSupported,
    NonMonotonicTimestamp,
    PullBoundRequired,
)

SIGNED = {"keys": KEYS, "certificate": DEVICE}
OTHER = IdentityKeys.from_private(bytes([3]) * 32, bytes([4]) * 32)
LOG: dict[str, Any] = {
    "data": {
        "items": [
            {"ts": 1, "data": {"n": 1}},
            {"ts": 2, "data": {}, "authorPubkey": "p", "authorSignature": "s"},
        ]
    },
    "hash": "h",
    "timestamp": 9,
}
CREDENTIALS = (
    "Authorization",
    protocol.HEADER_SIGNATURE,
    protocol.HEADER_TIMESTAMP,
    protocol.HEADER_NONCE,
    protocol.HEADER_PUB,
)


@pytest.mark.parametrize(
    ("bounds", "query"),
    [
        ({"since": 0}, "?checkpoint=0"),
        ({"last": 0}, "?last=0"),
        ({"last": 20, "since": 5}, "?checkpoint=5&last=20"),
        ({"full": True}, "?full=true"),
        ({}, ""),
    ],
)
async def test_a_pull_names_its_bounds_and_no_others(bounds: Mapping[str, Any], query: str) -> None:
    async with serving((200, LOG)) as server, client(server.url, **SIGNED) as signed:
        pulled = await signed.pull("log/a", **bounds)
    request, body = server.requests[0]
    assert request.raw_path == f"/pull/log/a{query}"
    assert is_signed(request, body, request.raw_path)
    assert pulled.elements() == [LogElement(1, {"n": 1}), LogElement(2, {}, "p", "s")]


@pytest.mark.parametrize(
    "bounds",
    [
        {"since": -1},
        {"last": -1},
        {"since": 1.0},
        {"last": True},
        {"full": True, "last": 1},
        {"full": True, "since": 0},
        {"with_keyring": True, "last": 1},
        {"with_keyring": True, "full": True},
    ],
)
async def test_bounds_that_no_server_takes_are_not_sent(bounds: Mapping[str, Any]) -> None:
    async with serving() as server, client(server.url) as anonymous:
        with pytest.raises(ValueError, match=r"number|full|keyring"):
            await anonymous.pull("log/a", **bounds)


@pytest.mark.parametrize(
    "bounds", [{"since": -1}, {"last": 1.5}, {"limit": True}, {"full": True}, {"full": 1, "last": 1}]
)
async def test_bounds_that_no_batch_takes_are_not_sent(bounds: dict[str, Any]) -> None:
    async with serving() as server, client(server.url) as anonymous:
        with pytest.raises(ValueError, match=r"number|full"):
            await anonymous.batch_pull(["log"], {"log": [{"id": "a"}]}, {"log": [bounds]})


def test_elements_are_found_under_the_name_that_the_log_gives_them() -> None:
    element = {"ts": 1, "data": {}}
    assert PullResult({"entries": [element]}, "h", 1).elements("entries") == [LogElement(1, {})]
    assert PullResult({"items": []}, "", 1).elements() == []
    assert PullResult({}, "", 1).elements() == []


@pytest.mark.parametrize(
    "data", [{}, {"items": {}}, {"items": [1]}, {"items": [{"ts": 1}]}, {"items": [{"ts": 1, "data": []}]}]
)
def test_stored_document_that_is_no_log_has_no_elements(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'items'"):
        PullResult(data, "h", 1).elements()


async def test_an_append_proves_who_wrote_what_the_server_will_store() -> None:
    options = {**SIGNED, "namespace": "acme"}
    async with serving((200, PUSHED)) as server, client(server.url, **options) as signed:
        appended = await signed.append("/push/log/a", {"b": 1.0, "a": [{"__proto__": 1}], "__proto__": 1})
    request, body = server.requests[0]
    assert (request.method, request.raw_path) == ("POST", "/v1/acme/push/log/a")
    assert is_signed(request, body, request.raw_path)
    members = orjson.loads(body)
    assert set(members) == {"data", "authorPubkey", "authorSignature"}
    proof = (KEYS.ed_pub, members["authorSignature"])
    assert verify_author(APPEND_AUTHOR, "log/a", b'{"a":[{"__proto__":1}],"b":1}', *proof)
    assert (appended.hash, appended.timestamp_ms) == ("h2", 6)


async def test_an_append_carries_no_proof_without_keys_or_when_none_is_wanted() -> None:
    async with (
        serving((200, PUSHED), (200, PUSHED)) as server,
        client(server.url) as anonymous,
        client(server.url, **SIGNED) as signed,
    ):
        await anonymous.append("log/a", {"n": 1}, ts_ms=7)
        await signed.append("log/a", {"n": 1}, sign_author=False)
        with pytest.raises(ValueError, match="keys"):
            await anonymous.append("log/a", {}, sign_author=True)
    bodies = [orjson.loads(body) for _, body in server.requests]
    assert bodies == [{"data": {"n": 1}, "ts": 7}, {"data": {"n": 1}}]


async def test_an_append_whose_answer_was_lost_is_repeated_under_one_idempotency_key() -> None:
    busy: Answer = (503, {"code": "store_unavailable"})
    answers: list[Answer] = [None, busy, (200, PUSHED), (200, PUSHED), busy, (200, PUSHED)]
    async with serving(*answers) as server, client(server.url) as anonymous:
        await anonymous.append("log/a", {"n": 1})
        await anonymous.append("log/a", {"n": 1}, idempotency_key="mine")
        await anonymous.append_anonymous("log/a", {"n": 1})
    used = server.headers(protocol.HEADER_IDEMPOTENCY_KEY)
    assert used[0] == used[1] == used[2] != used[3] == "mine" != used[4] == used[5] != used[0]
    assert len({body for _, body in server.requests}) == 1


async def test_the_rejections_of_an_append_are_raised_at_once() -> None:
    answers: list[Answer] = [
        (409, {"error": "non_monotonic_timestamp"}),
        (409, {"error": "append_limit_exceeded", "limit": 3}),
    ]
    async with serving(*answers) as server, client(server.url) as anonymous:
        with pytest.raises(NonMonotonicTimestamp):
            await anonymous.append("log/a", {}, ts_ms=1)
        with pytest.raises(AppendLimitExceeded) as caught:
            await anonymous.append("log/a", {})
    assert caught.value.extras == {"limit": 3}


@pytest.mark.parametrize("identity", [{}, SIGNED, {"admin_token": "secret"}])
async def test_an_anonymous_append_does_not_say_whose_client_it_is(identity: Mapping[str, Any]) -> None:
    busy: Answer = (503, {"code": "store_unavailable"})
    async with (
        serving(busy, (200, PUSHED), (200, PUSHED)) as server,
        client(server.url, **identity) as someone,
    ):
        await someone.append_anonymous("log/a", {"n": 1}, OTHER)
        await someone.append_anonymous("log/a", {"n": 1})
    assert [server.headers(name) for name in CREDENTIALS] == [[None] * 3] * len(CREDENTIALS)
    proved, bare = orjson.loads(server.requests[1][1]), orjson.loads(server.requests[2][1])
    proof = (proved["authorPubkey"], proved["authorSignature"])
    assert proof[0] == OTHER.ed_pub
    assert verify_author(APPEND_AUTHOR, "log/a", b'{"n":1}', *proof)
    assert bare == {"data": {"n": 1}}


async def test_batch_of_log_parts_is_aligned_with_its_request() -> None:
    entries = [LOG, {"error": "append_params_not_supported"}, {"error": "pull_bound_required"}]
    requests = [
        LogRange({"id": "a"}, since=3),
        LogRange({"id": "b"}, last=2),
        LogRange({"id": 7}, 0, 1),
    ]
    async with serving((200, {"collections": {"log": entries}})) as server, client(server.url) as anonymous:
        first, second, third = await anonymous.batch_pull_many_append("log", requests)
        assert await anonymous.batch_pull_many_append("log", []) == []
    query = parse_qs(urlsplit(server.requests[0][0].raw_path).query)
    assert query["collections"] == ["log"]
    assert orjson.loads(query["params"][0]) == {"log": [{"id": "a"}, {"id": "b"}, {"id": 7}]}
    assert orjson.loads(query["appendParams"][0]) == {
        "log": [{"since": 3}, {"last": 2}, {"since": 0, "last": 1}]
    }
    assert first == PullResult(LOG["data"], "h", 9).elements()
    assert isinstance(second, AppendParamsNotSupported)
    assert isinstance(third, PullBoundRequired)


async def test_a_batch_may_hold_logs_and_documents() -> None:
    answer = {"collections": {"log": [LOG], "notes": [PULLED]}}
    async with serving((200, answer)) as server, client(server.url) as anonymous:
        params = {"log": [{"id": "a"}], "notes": [{"id": "b"}]}
        found = await anonymous.batch_pull(["log", "notes"], params, {"log": [{"last": 2}]})
    query = parse_qs(urlsplit(server.requests[0][0].raw_path).query)
    assert orjson.loads(query["appendParams"][0]) == {"log": [{"last": 2}]}
    (log,), (note,) = found["log"], found["notes"]
    assert isinstance(log, PullResult)
    assert isinstance(note, PullResult)
    assert len(log.elements()) == 2


@pytest.mark.parametrize(
    "entries", [[], [LOG, LOG], [PULLED], [{**LOG, "data": {"items": [{"ts": 1}]}}], [{**LOG, "data": []}]]
)
async def test_batch_that_does_not_match_its_request_is_unreachable(entries: object) -> None:
    options = {"backoff": RetryPolicy(attempts=1)}
    async with (
        serving((200, {"collections": {"log": entries}})) as server,
        client(server.url, **options) as anyone,
    ):
        with pytest.raises(Unreachable):
            await anyone.batch_pull_many_append("log", [LogRange({"id": "a"}, last=5)])
