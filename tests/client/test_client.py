"""What the client sends, what it repeats, and what it raises: against a small server of the test's own."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.fake_server import (
    DEVICE,
    KEYS,
    NOW_MS,
    PULLED,
    PUSHED,
    Answer,
    Waits,
    client,
    is_signed,
    serving,
)

from pysync import protocol
from pysync._core import content_hash, verify_author
from pysync.auth import certificates, issuing
from pysync.auth.identity_keys import IdentityKeys
from pysync.auth.signing import DOCUMENT_AUTHOR
from pysync.client import Client, RetryPolicy, SyncDocument, Unreachable, sealed
from pysync.errors import (
    Conflict,
    Forbidden,
    PysyncError,
    RateLimited,
    StaleGeneration,
    StoreUnavailable,
    Unavailable,
)
from pysync.testing import FakeClock


class SignsOnly:
    """A device that keeps its key to itself."""

    ed_pub = KEYS.ed_pub

    def sign(self, message: bytes) -> str:
        return KEYS.sign(message)


async def test_a_pull_is_what_the_server_holds() -> None:
    keyring = {"data": {"v": 1}, "hash": "k", "timestamp": 5}
    answer = {**PULLED, "authorPubkey": "p", "authorSignature": "s", "keyring": keyring}
    async with serving((200, answer)) as server, client(server.url) as anonymous:
        pulled = await anonymous.pull("notes/n1", with_keyring=True)
    assert (pulled.data, pulled.hash, pulled.timestamp_ms) == ({"a": 1}, "h1", 5)
    assert (pulled.author_pubkey, pulled.author_signature) == ("p", "s")
    assert pulled.keyring is not None
    assert pulled.keyring.data == {"v": 1}
    assert server.requests[0][0].raw_path == "/pull/notes/n1?withKeyring=1"


async def test_a_push_sends_the_data_and_its_base() -> None:
    async with serving((200, PUSHED), (200, PUSHED)) as server, client(server.url) as anonymous:
        pushed = await anonymous.push("notes/n1", {"a": 1})
        await anonymous.push("notes/n1", {"a": 2}, pushed.hash)
    assert (pushed.hash, pushed.timestamp_ms) == ("h2", 6)
    assert [orjson.loads(body) for _, body in server.requests] == [
        {"data": {"a": 1}, "baseHash": None},
        {"data": {"a": 2}, "baseHash": "h2"},
    ]
    assert server.headers("Content-Type") == ["application/json"] * 2


@dataclass
class Reading:
    celsius: float


class Level(Enum):
    NONE = math.nan


@pytest.mark.parametrize(
    ("data", "location"),
    [
        ({"t": math.nan}, "t"),
        ({"t": math.inf, "n": None}, "t"),
        ({"rows": [{"ok": 1}, {"t": -math.inf}]}, r"rows\[1\]\.t"),
        ({"pair": (0.5, math.nan)}, r"pair\[1\]"),
        ({"reading": Reading(math.nan)}, r"reading\.celsius"),
        ({"level": Level.NONE}, "level"),
    ],
)
async def test_numbers_that_json_has_not_are_rejected_before_anything_is_sent(
    data: dict[str, Any], location: str
) -> None:
    keyring = sealed.Keyring.new(KEYS, now_s=NOW_MS // 1000).open(KEYS, [KEYS.ed_pub])
    async with serving() as server, client(server.url, keys=KEYS, certificate=DEVICE) as signed:
        document = SyncDocument(signed, "notes/n1", sealing=keyring)
        document.restore(document.dump())  # so that it need not pull first
        writes: list[Callable[[], Awaitable[object]]] = [
            lambda: signed.push("notes/n1", data),
            lambda: signed.push("notes/n1", data, sign_author=True),
            lambda: signed.append("log/l1", data),
            lambda: signed.append_anonymous("log/l1", data),
            lambda: signed.push("events/app/x", {"events": [data]}),
            lambda: document.push(data),
            lambda: document.update(lambda _: data),
        ]
        for write in writes:
            with pytest.raises(
                ValueError, match=f"JSON has no NaN and no infinite numbers: .*{location} is one"
            ):
                await write()
        with pytest.raises(ValueError, match=location):
            await signed.batch_pull(["notes"], {"notes": [data]})
        with pytest.raises(ValueError, match="JSON has no NaN"):
            keyring.seal(data)
        assert document.data == {}


async def test_a_null_that_is_meant_is_sent() -> None:
    async with serving((200, PUSHED)) as server, client(server.url) as anonymous:
        await anonymous.push("notes/n1", {"a": None, "b": [None, 1.5]})
    assert orjson.loads(server.requests[0][1])["data"] == {"a": None, "b": [None, 1.5]}


async def test_push_of_events_returns_the_batch_that_they_became() -> None:
    answers = ((200, {**PUSHED, "batchId": "b1"}), (200, PUSHED))
    async with serving(*answers) as server, client(server.url) as anonymous:
        pushed = [await anonymous.push("events/app/x", {"events": [{}]}) for _ in answers]
    assert [one.batch_id for one in pushed] == ["b1", None]


async def test_paths_of_other_clients_name_the_same_document() -> None:
    async with serving((200, PULLED), (200, PUSHED)) as server, client(server.url) as anonymous:
        await anonymous.pull("/pull/notes/n1")
        await anonymous.push("/push/notes/n1", {})
    assert [request.raw_path for request, _ in server.requests] == ["/pull/notes/n1", "/push/notes/n1"]


async def test_a_signed_request_verifies_over_the_target_that_arrives() -> None:
    keys = {"keys": KEYS, "certificate": DEVICE}
    async with serving((200, PULLED), (200, PUSHED)) as server, client(server.url, **keys) as signed:
        await signed.pull("users/a@b:c/x", with_keyring=True)
        await signed.push("a b/é", {"a": 1})
    for request, body in server.requests:
        assert is_signed(request, body, request.raw_path)
        assert certificates.from_authorization(request.headers["Authorization"]) == DEVICE
        assert protocol.HEADER_PUB not in request.headers
    assert server.requests[0][0].raw_path == "/pull/users/a@b:c/x?withKeyring=1"


async def test_a_namespace_enters_path_and_signature_but_not_the_author_proof() -> None:
    options = {"keys": KEYS, "certificate": DEVICE, "namespace": "acme"}
    async with serving((200, PUSHED)) as server, client(server.url, **options) as signed:
        await signed.push("notes/n1", {"__proto__": 1, "a": 1.0}, sign_author=True)
    request, body = server.requests[0]
    assert request.raw_path == "/v1/acme/push/notes/n1"
    assert is_signed(request, body, "/v1/acme/push/notes/n1")
    members = orjson.loads(body)
    assert members["authorPubkey"] == KEYS.ed_pub
    proof = (KEYS.ed_pub, members["authorSignature"])
    assert verify_author(DOCUMENT_AUTHOR, "notes/n1", b'{"a":1}', *proof)


async def test_a_path_in_the_base_url_is_not_signed() -> None:
    keys = {"keys": KEYS, "certificate": DEVICE}
    async with serving((200, PULLED)) as server, client(server.url + "v1/", **keys) as signed:
        await signed.pull("notes/n1")
    request, body = server.requests[0]
    assert request.raw_path == "/v1/pull/notes/n1"
    assert is_signed(request, body, "/pull/notes/n1")


async def test_the_presenter_of_an_audience_certificate_names_its_key() -> None:
    shared = issuing.issue_audience_certificate(KEYS, "notes", now_s=NOW_MS // 1000, nonce=bytes(16))
    options = {"keys": KEYS, "certificate": shared}
    async with serving((200, PULLED)) as server, client(server.url, **options) as signed:
        await signed.pull("notes/n1")
    assert server.headers(protocol.HEADER_PUB) == [KEYS.ed_pub]


async def test_an_admin_token_is_sent_as_bearer() -> None:
    async with serving((200, PULLED)) as server, client(server.url, admin_token="secret") as admin:
        await admin.pull("notes/n1")
    assert server.headers("Authorization") == ["Bearer secret"]


@pytest.mark.parametrize("failure", [(503, {"code": "store_unavailable"}), None])
async def test_every_attempt_is_signed_afresh(failure: Answer) -> None:
    keys = {"keys": KEYS, "certificate": DEVICE}
    async with serving(failure, (200, PULLED)) as server, client(server.url, **keys) as signed:
        assert (await signed.pull("notes/n1")).hash == "h1"
    assert len(set(server.headers(protocol.HEADER_NONCE))) == 2
    assert all(is_signed(request, body, "/pull/notes/n1") for request, body in server.requests)


async def test_a_push_whose_answer_was_lost_is_repeated_under_one_idempotency_key() -> None:
    async with serving(None, (200, PUSHED), (200, PUSHED)) as server, client(server.url) as anonymous:
        await anonymous.push("notes/n1", {"a": 1})
        await anonymous.push("notes/n1", {"a": 1}, idempotency_key="mine")
    first, second, third = server.headers(protocol.HEADER_IDEMPOTENCY_KEY)
    assert first == second != third == "mine"
    assert first is not None
    assert 1 <= len(first) <= 128
    assert server.requests[0][1] == server.requests[1][1]


async def test_a_wait_grows_up_to_its_limit_and_is_no_shorter_than_requested() -> None:
    waits = Waits()
    answers: list[Answer] = [
        (503, {"code": "store_unavailable"}),
        (429, {"code": "rate_limited"}, {"Retry-After": "2"}),
        (503, {"code": "store_unavailable"}, {"Retry-After": "soon"}),
        None,
        None,
        (200, PULLED),
    ]
    backoff = RetryPolicy(attempts=5, initial_s=1.0, max_s=3.0)
    async with serving(*answers) as server, client(server.url, backoff=backoff, sleep=waits) as anonymous:
        await anonymous.pull("notes/n1")
    assert waits.seconds == [1.0, 2.0, 3.0, 3.0]


def test_jitter_shortens_a_wait_by_up_to_a_half() -> None:
    assert RetryPolicy(initial_s=2.0).wait_s(1, 0.0, 0.5) == 1.5
    assert RetryPolicy(initial_s=2.0).wait_s(1, 1.9, 0.5) == 1.9


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((503, {"error": "store_unavailable", "code": "store_unavailable"}), StoreUnavailable),
        ((503, b"<html>"), Unavailable),
        ((429, {"error": "Rate limit exceeded", "code": "rate_limited"}), RateLimited),
        (None, Unreachable),
        ((200, b"<html>"), Unreachable),
        ((200, []), Unreachable),
        ((200, {"data": {}}), Unreachable),
        ((200, {"data": 1, "hash": "", "timestamp": 1}), Unreachable),
    ],
)
async def test_a_failure_that_lasts_is_raised_after_the_last_attempt(
    answer: Answer, kind: type[Exception]
) -> None:
    options = {"backoff": RetryPolicy(attempts=3)}
    answers = [answer] * (6 if answer is None else 3)
    async with serving(*answers) as server, client(server.url, **options) as anonymous:
        with pytest.raises(kind):
            await anonymous.pull("notes/n1")


async def test_server_that_requests_a_long_wait_is_not_retried() -> None:
    answer: Answer = (429, {"code": "rate_limited"}, {"Retry-After": "3600"})
    async with serving(answer) as server, client(server.url) as anonymous:
        with pytest.raises(RateLimited) as caught:
            await anonymous.pull("notes/n1")
    assert caught.value.headers["Retry-After"] == "3600"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((403, {"error": "Forbidden", "code": "forbidden"}), Forbidden),
        ((403, {"error": "Forbidden"}), Forbidden),
        ((409, {"error": "hash_mismatch"}), Conflict),
        ((500, b"\xff"), PysyncError),
        ((302, b"", {"Location": "http://127.0.0.1:1/"}), PysyncError),
    ],
)
async def test_a_rejection_is_final(answer: Answer, kind: type[Exception]) -> None:
    async with serving(answer) as server, client(server.url) as anonymous:
        with pytest.raises(kind):
            await anonymous.push("notes/n1", {})


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("identity", [{"keys": KEYS, "certificate": DEVICE}, {"admin_token": "secret"}])
async def test_credentials_are_not_sent_to_the_target_of_a_redirect(
    status: int, identity: dict[str, Any]
) -> None:
    async with serving() as elsewhere:
        moved = (status, b"", {"Location": elsewhere.url + "pull/notes/n1"})
        async with serving(moved, moved) as server, client(server.url, **identity) as caller:
            for request in (caller.pull("notes/n1"), caller.push("notes/n1", {})):
                with pytest.raises(PysyncError, match=f"HTTP {status}"):
                    await request
        assert elsewhere.requests == []


async def test_a_conflict_names_the_current_hash() -> None:
    answer = (409, {"error": "hash_mismatch", "code": "hash_mismatch", "currentHash": "h9"})
    async with serving(answer) as server, client(server.url) as anonymous:
        with pytest.raises(Conflict) as caught:
            await anonymous.push("notes/n1", {}, "h1")
    assert caught.value.current_hash == "h9"


async def test_nobody_listening_is_unreachable(unused_tcp_port: int) -> None:
    options = {"backoff": RetryPolicy(attempts=1)}
    async with client(f"http://127.0.0.1:{unused_tcp_port}", **options) as anonymous:
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1"):
            await anonymous.pull("notes/n1")


async def test_silence_is_unreachable() -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_get("/pull/x", never)
    async with TestServer(app) as server:
        options = {"backoff": RetryPolicy(attempts=1), "timeout_s": 0.05}
        async with client(str(server.make_url("/")), **options) as anonymous:
            with pytest.raises(Unreachable):
                await anonymous.pull("x")


async def test_a_revocation_list_is_published_once_and_unsigned() -> None:
    listed = issuing.issue_revocation_list(KEYS, 7, certificates=[DEVICE])
    async with serving((200, {"ok": True, "generation": 7})) as server, client(server.url) as anonymous:
        assert await anonymous.revoke(listed) == 7
    request, body = server.requests[0]
    assert (request.method, request.raw_path, body) == ("POST", "/revocations", listed.text)
    for answer, kind in ((None, Unreachable), ((409, {"code": "stale_generation"}), StaleGeneration)):
        async with serving(answer) as server, client(server.url) as anonymous:
            with pytest.raises(kind):
                await anonymous.revoke(listed)


async def test_health_is_requested_at_the_root_of_the_server() -> None:
    async with serving((200, {"ok": True})) as server, client(server.url, namespace="acme") as anonymous:
        assert await anonymous.health() == {"ok": True}
    assert server.requests[0][0].raw_path == "/health"


async def test_keys_without_a_certificate_make_their_own_and_renew_it_before_it_expires() -> None:
    clock = FakeClock(NOW_MS)
    day_ms = 24 * 3600 * 1000
    days = (0, 1, 28.99, 29, 29.5, 57.99, 58.01, 400, 399)
    async with (
        serving(*[(200, PULLED)] * len(days)) as server,
        client(server.url, keys=KEYS, now_ms=clock) as signed,
    ):
        for day in days:
            clock.now_ms = NOW_MS + int(day * day_ms)
            await signed.pull("notes/n1")
    certificates_sent = [
        certificates.from_authorization(str(text)) for text in server.headers("Authorization")
    ]
    for day, certificate in zip(days, certificates_sent, strict=True):
        now_s = NOW_MS // 1000 + int(day * day_ms) // 1000
        assert (certificate.kind, certificate.iss, certificate.sub) == ("device", KEYS.ed_pub, KEYS.ed_pub)
        assert certificate.nbf <= now_s
        assert certificate.exp - now_s >= 24 * 3600 - 1
    made = [certificate.nonce for certificate in certificates_sent]
    assert made == [made[0]] * 3 + [made[3]] * 3 + made[6:]
    assert len(set(made)) == 5, "one that holds is used again"


async def test_a_certificate_that_is_given_is_never_replaced() -> None:
    clock = FakeClock(NOW_MS + 400 * 24 * 3600 * 1000)
    async with (
        serving((200, PULLED)) as server,
        client(server.url, keys=KEYS, certificate=DEVICE, now_ms=clock) as signed,
    ):
        await signed.pull("notes/n1")
    assert [certificates.from_authorization(str(text)) for text in server.headers("Authorization")] == [
        DEVICE
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Client("localhost:8080"),
        lambda: Client("ftp://h"),
        lambda: Client("http://user:secret@h"),
        lambda: Client("http://h?x=1"),
        lambda: Client("http://h", keys=SignsOnly()),
        lambda: Client("http://h", keys=KEYS, admin_token="t"),
        lambda: Client("http://h", certificate=DEVICE),
        lambda: Client("http://h", keys=IdentityKeys.generate(), certificate=DEVICE),
        lambda: Client("http://h", keys=KEYS, certificate=DEVICE, admin_token="t"),
    ],
)
def test_impossible_arguments_are_rejected_at_once(make: Callable[[], Client]) -> None:
    with pytest.raises(ValueError, match=r"."):
        make()


async def test_a_client_closes_its_own_session_and_not_the_callers() -> None:
    async with aiohttp.ClientSession() as session:
        async with serving((200, PULLED)) as server, client(server.url, session=session) as anonymous:
            await anonymous.pull("x")
        assert not session.closed
    never_opened = Client("http://h")
    with pytest.raises(RuntimeError, match="not open"):
        await never_opened.pull("x")


async def test_pushed_document_hashes_as_the_server_hashes_it() -> None:
    data = {"é": [1.0, -0.0, 1e21], "a": {"b": None}}
    async with serving((200, PUSHED)) as server, client(server.url) as anonymous:
        await anonymous.push("x", data)
    sent = orjson.loads(server.requests[0][1])["data"]
    assert content_hash(orjson.dumps(sent)) == content_hash(orjson.dumps(data))
