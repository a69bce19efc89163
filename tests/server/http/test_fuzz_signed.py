"""Hostile requests behind good signatures, and header bytes no client library would send: never a 500."""

import asyncio
import gzip
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.clients import PROTOCOL, SUBJECT, Browser, Reply, Signed, root_device
from support.collections import collection, limit_of
from support.configurations import patient
from support.depth import depth

from pysync import config
from pysync._core import canonicalize
from pysync.auth import certificates, signing
from pysync.auth.identity_keys import IdentityKeys
from pysync.errors import BadRequest, errors_by_code
from pysync.server.app import create_app
from pysync.server.process.serve import serve_on

CODES = set(errors_by_code())
LIMIT = limit_of(1000, bucket="ip")
METERED = collection("by-address", rateLimit={"push": LIMIT, "pull": LIMIT})

thorough = settings(max_examples=depth(37, 600), deadline=None, suppress_health_check=list(HealthCheck))

texts = st.text(max_size=6)
numbers = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([2**53, 2**63, 2**64 - 1, 2**64, 2**64 + 1, -(2**63) - 1, 1e21, 1e30, 1e300, -0.0, 1.0]),
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


class Attacked:
    """A service on a folder, as a small installation runs it, that an attack talks to from outside."""

    def __init__(self, runner: asyncio.Runner, base: str, session: aiohttp.ClientSession) -> None:
        self._runner = runner
        self.browser = Browser(base, session)
        self.signed = Signed(base, session, SUBJECT, root_device(SUBJECT))

    def reply_to(self, request: Awaitable[Reply]) -> Reply:
        """The reply, which is no server error, and a documented one if it refuses."""
        reply = self._runner.get_loop().run_until_complete(request)
        assert reply.status < 500, reply.body
        assert reply.status < 400 or reply.json["code"] in CODES, reply.body
        return reply

    async def talk(self, sent: bytes) -> Reply:
        """The reply to these bytes, on a connection of their own."""
        _, _, port = self.browser.base.rpartition(":")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return Reply(int(head.split()[1]), {}, body)


@pytest.fixture
def attacked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Attacked]:
    """The service under attack. In the end its log holds no error."""
    members = json.loads(PROTOCOL.read_text()) | {"store": f"file:{tmp_path}"}
    members["server"] = {"trustedProxyHops": 1, "cors": {"origins": ["https://app.example"]}}
    members["collections"].append(METERED)

    async def open_all() -> tuple[Any, Any, str, aiohttp.ClientSession]:
        app = await create_app(config.parse(patient(members)))
        service = serve_on(app)
        return app, service, f"http://127.0.0.1:{await service.__aenter__()}", aiohttp.ClientSession()

    with asyncio.Runner() as runner, caplog.at_level(logging.WARNING):
        app, service, base, session = runner.run(open_all())
        yield Attacked(runner, base, session)
        runner.run(session.close())
        runner.run(service.__aexit__(None, None, None))
        runner.run(app.close())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


entries = st.fixed_dictionaries({"sub": texts, "nonce": texts, "exp": numbers})
odd_lists = st.fixed_dictionaries(
    {
        "generation": numbers | json_values,
        "revoked": st.lists(entries, max_size=3) | json_values,
    },
    optional={
        "revokedSubjects": st.lists(entries, max_size=3) | json_values,
        "v": json_values,
    },
)


@pytest.mark.timeout(180)
def test_no_revocation_list_that_its_issuer_signed_is_a_server_error(attacked: Attacked) -> None:
    generations: set[int] = set()
    addresses = map(str, IPv4Network("10.0.0.0/8"))

    @thorough
    @given(st.binary(min_size=32, max_size=32), odd_lists)
    @example(b"0" * 32, {"generation": 1, "revoked": [{"sub": "", "nonce": "", "exp": 2**40}]})
    @example(b"1" * 32, {"generation": 1, "revoked": []})
    @example(b"2" * 32, {"generation": 2**64, "revoked": []})
    @example(b"3" * 32, {"generation": 1e30, "revoked": []})
    def publish(seed: bytes, odd: dict[str, Any]) -> None:
        issuer = IdentityKeys.from_private(seed, seed)
        members = {"iss": issuer.ed_pub, "issUserId": issuer.user_id, **odd}
        try:
            text = canonicalize(json.dumps(members).encode())
        except BadRequest:
            text = json.dumps(members).encode()
        signed = {**members, "sig": issuer.sign(certificates.REVOCATION_TAG + text)}
        # From another address each time, so that its rate refuses none of them.
        headers = {"X-Forwarded-For": next(addresses)}
        reply = attacked.reply_to(attacked.browser.request("POST", "/revocations", signed, headers))
        assert reply.status != 429
        if reply.status == 200:
            generations.add(reply.json["generation"])

    publish()
    assert generations, "good ones among them are accepted"


members_of_data = st.sampled_from(["age", "salary", "rank", "email", "__proto__", "toString"]) | texts
odd_pushes = st.one_of(
    st.binary(max_size=60),
    json_values.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {"data": st.dictionaries(members_of_data, json_values, max_size=4) | json_values},
        optional=dict.fromkeys(("baseHash", "authorPubkey", "authorSignature"), json_values),
    ).map(lambda members: json.dumps(members).encode()),
)
names = st.text("abc", min_size=1, max_size=3)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("collection", ["settings", "cards", "typed", "profiles", "notes"])
def test_no_signed_push_is_a_server_error(attacked: Attacked, collection: str) -> None:
    folder = {"settings": f"users/{SUBJECT.user_id}", "profiles": f"profiles/{SUBJECT.user_id}"}
    prefix = folder.get(collection, collection)
    statuses: set[int] = set()

    @thorough
    @given(names, odd_pushes, st.booleans(), st.booleans(), st.booleans())
    @example("a", b'{"data":{"age":1}}', False, True, True)
    @example("a", b"{", False, False, False)
    def push(name: str, body: bytes, zipped: bool, proven: bool, rebased: bool) -> None:
        key = f"{prefix}/{name}"
        caller, target = attacked.signed, f"/push/{key}"
        if rebased:
            stored = attacked.reply_to(caller.pull(key)).json["hash"]
            body = with_members(body, lambda data: {"baseHash": stored})
        if proven:
            body = with_members(body, lambda data: author_proof(key, data))
        headers = caller.headers("POST", target, body)
        sent = gzip.compress(body) if zipped else body
        if zipped:
            headers["Content-Encoding"] = "gzip"
        reply = attacked.reply_to(attacked.browser.request("POST", target, sent, headers))
        statuses.add(reply.status)
        attacked.reply_to(caller.pull(f"{key}?withKeyring=1"))

    push()
    assert {200, 400} <= statuses, "bodies of both kinds came through the door"


def with_members(body: bytes, made: Callable[[object], dict[str, Any]]) -> bytes:
    """The push with what is `made` of its data, or as it is where nothing can be made of it."""
    try:
        members = json.loads(body)
        return json.dumps({**members, **made(members["data"])}).encode()
    except (ValueError, TypeError, KeyError, BadRequest):
        return body


def author_proof(key: str, data: object) -> dict[str, str]:
    return signing.sign_author(SUBJECT, signing.DOCUMENT_AUTHOR, key, json.dumps(data).encode())


raw_values = st.binary(max_size=40).map(lambda value: bytes(byte for byte in value if byte not in b"\r\n\0"))
high_bytes = st.lists(st.integers(0x80, 0xFF), min_size=1, max_size=8).map(bytes)
tokens = st.one_of(high_bytes, raw_values)
raw_headers = st.fixed_dictionaries(
    {},
    optional={
        b"Authorization": st.sampled_from([b"", b"Bearer ", b"Cap "]).flatmap(
            lambda scheme: tokens.map(lambda token: scheme + token)
        ),
        b"X-Forwarded-For": tokens,
        b"Idempotency-Key": tokens,
        b"If-None-Match": tokens,
        b"X-Request-Id": tokens,
        b"X-Starfish-Pub": tokens,
        b"X-Starfish-Nonce": tokens,
        b"X-Starfish-Ts": tokens,
        b"Origin": tokens,
        b"Accept": tokens,
    },
)
RAW_TARGETS = (
    b"GET /pull/by-address/a",
    b"POST /push/by-address/a",
    b"GET /pull/owned/a",
    b"POST /push/notes/a",
    b"GET /pull/notes/a?withKeyring=1",
    b"POST /revocations",
)


@pytest.mark.timeout(180)
def test_no_header_byte_is_a_server_error(attacked: Attacked) -> None:
    attacked.reply_to(attacked.browser.push("notes/a", {"n": 1}))
    attacked.reply_to(attacked.browser.push("by-address/a", {"n": 1}))

    @thorough
    @given(st.sampled_from(RAW_TARGETS), raw_headers, st.sampled_from([b'{"data":{}}', b"{}", b""]))
    def send(target: bytes, headers: dict[bytes, bytes], body: bytes) -> None:
        lines = [b"%b: %b\r\n" % header for header in headers.items()]
        request = (
            b"%b HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Type: application/json\r\n" % target
        )
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        attacked.reply_to(attacked.talk(request + b"".join(lines) + length + body))

    send()


def raw(target: bytes, headers: dict[bytes, bytes], body: bytes = b"") -> bytes:
    """A request with these bytes as its headers, beside those that make it one."""
    always = {
        b"Host": b"h",
        b"Connection": b"close",
        b"Content-Type": b"application/json",
        b"Content-Length": b"%d" % len(body),
    }
    lines = [b"%b: %b\r\n" % header for header in (always | headers).items()]
    return b"%b HTTP/1.1\r\n%b\r\n%b" % (target, b"".join(lines), body)


bytes_above_ascii = pytest.mark.parametrize("value", [b"\x80", b"\xff\xfe", b"\xc3\xa9", b"\xed\xa0\x80"])


@bytes_above_ascii
@pytest.mark.parametrize(
    ("target", "name", "prefix"),
    [
        (b"GET /pull/owned/a", b"Authorization", b"Bearer "),
        (b"GET /pull/owned/a", b"Authorization", b"Cap "),
        (b"GET /pull/by-address/a", b"X-Forwarded-For", b""),
        (b"GET /pull/by-address/a", b"X-Forwarded-For", b"fe80::1%"),
        (b"POST /push/notes/a", b"Idempotency-Key", b""),
        (b"GET /pull/notes/a", b"If-None-Match", b""),
    ],
)
def test_bytes_above_ascii_are_no_server_error(
    attacked: Attacked, target: bytes, name: bytes, prefix: bytes, value: bytes
) -> None:
    attacked.reply_to(attacked.talk(raw(target, {name: prefix + value}, b'{"data":{}}')))


@pytest.mark.slow
@bytes_above_ascii
@pytest.mark.parametrize(
    "name", ["Authorization", "Host", "X-Starfish-Sig", "X-Starfish-Ts", "X-Starfish-Nonce", "X-Starfish-Pub"]
)
def test_bytes_above_ascii_in_a_signed_head_are_no_server_error(
    attacked: Attacked, name: str, value: bytes
) -> None:
    own = attacked.signed.headers("GET", "/pull/owned/a", b"")
    headers = {header.encode(): text.encode() for header, text in own.items()} | {name.encode(): value}
    reply = attacked.reply_to(attacked.talk(raw(b"GET /pull/owned/a", headers)))
    assert reply.status in (400, 401)
