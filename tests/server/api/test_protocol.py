"""The protocol, black box over HTTP. TESTS_URL points it at a service started with tests/protocol.json."""

import asyncio
import gzip
import hashlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import orjson
import pytest
from support.change_pages import page
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Signed, encoded, minted_at, root_device
from support.reference import canonical
from yarl import URL

from pysync.auth import issuing, signing
from pysync.auth.identity_keys import IdentityKeys

Unique = Callable[[str], str]


def hash_of(data: object) -> str:
    return hashlib.sha256(canonical(data).encode()).hexdigest()


# Documents


async def test_a_document_comes_back_as_it_was_pushed(anyone: Browser, unique: Unique) -> None:
    key = unique("notes")
    data = {"b": [1, 2.5, "é😀", None, {"z": True, "a": {}}], "a": {"": -0.0, "1e21": 1e21}}
    pushed = await anyone.push(key, data)
    assert pushed.status == 200
    assert pushed.json == {"hash": hash_of(data), "timestamp": pushed.json["timestamp"]}
    pulled = await anyone.pull(key)
    assert (pulled.status, pulled.json["data"], pulled.json["hash"]) == (200, data, hash_of(data))
    assert pulled.json["timestamp"] >= pushed.json["timestamp"]
    assert set(pulled.json) == {"data", "hash", "timestamp"}


LARGE_INTEGERS = [9007199254740993, -9007199254740993, 2**63 - 1, -(2**63), 2**64 - 1]


async def test_integers_of_64_bits_come_back_exactly(anyone: Browser, unique: Unique) -> None:
    key, data = unique("notes"), {"n": LARGE_INTEGERS, "o": {"n": 9007199254740993}}
    pushed = await anyone.push(key, data)
    pulled = await anyone.pull(key)
    assert pulled.json["data"] == data
    assert pulled.json["hash"] == pushed.json["hash"] == hash_of(data)
    assert (await anyone.push(key, {}, pushed.json["hash"])).status == 200, "the hash is a base"


async def test_a_missing_document_is_an_empty_one(anyone: Browser, unique: Unique) -> None:
    pulled = await anyone.pull(unique("notes"))
    assert pulled.status == 200
    assert pulled.json == {"data": {}, "hash": "", "timestamp": pulled.json["timestamp"]}
    assert "ETag" not in pulled.headers


async def test_a_push_names_the_base_it_replaces(anyone: Browser, unique: Unique) -> None:
    key = unique("notes")
    first = (await anyone.push(key, {"n": 1})).json["hash"]
    second = (await anyone.push(key, {"n": 2}, first)).json["hash"]
    for stale in (None, "", first, "0" * 64):
        rejected = await anyone.push(key, {"n": 3}, stale)
        assert rejected.status == 409
        assert rejected.json == {"error": "hash_mismatch", "code": "hash_mismatch", "currentHash": second}
    nothing = await anyone.push(unique("notes") + "x", {"n": 1}, second)
    assert nothing.json == {"error": "hash_mismatch", "code": "hash_mismatch", "currentHash": ""}


async def test_an_empty_base_creates_what_is_missing(anyone: Browser, unique: Unique) -> None:
    assert (await anyone.push(unique("notes"), {}, "")).status == 200


async def test_of_many_pushes_with_one_base_one_wins(anyone: Browser, unique: Unique) -> None:
    key = unique("notes")
    base = (await anyone.push(key, {"n": 0})).json["hash"]
    answers = await asyncio.gather(*(anyone.push(key, {"n": n}, base) for n in range(1, 21)))
    assert sorted(answer.status for answer in answers) == [200] + [409] * 19


async def test_unsafe_keys_are_dropped_but_not_inside_arrays(anyone: Browser, unique: Unique) -> None:
    key = unique("notes")
    data = {"__proto__": 1, "a": {"constructor": 1, "b": [{"prototype": 1}]}, "__class__": {}, "__dict__": 0}
    await anyone.push(key, data)
    assert (await anyone.pull(key)).json["data"] == {"a": {"b": [{"prototype": 1}]}}


async def test_a_known_version_is_answered_304(anyone: Browser, unique: Unique) -> None:
    key = unique("notes")
    tag = f'"{(await anyone.push(key, {"n": 1})).json["hash"]}"'
    assert (await anyone.pull(key)).headers["ETag"] == tag
    for condition in (tag, f'"x", {tag}', f"W/{tag}", "*"):
        answer = await anyone.pull(key, {"If-None-Match": condition})
        assert (answer.status, answer.body, answer.headers["ETag"]) == (304, b"", tag)
    assert (await anyone.pull(key, {"If-None-Match": '"other"'})).status == 200


async def test_head_answers_as_get_without_a_body(anyone: Browser, unique: Unique) -> None:
    key = unique("notes")
    await anyone.push(key, {"n": 1})
    head = await anyone.request("HEAD", f"/pull/{key}")
    got = await anyone.pull(key)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["ETag"] == got.headers["ETag"]
    assert "Content-Length" not in head.headers, "no body is made to count its bytes"


@pytest.mark.parametrize(
    ("key", "control"),
    [("notes", "no-cache"), ("a/1/c", "public, max-age=60")],
)
async def test_reads_say_how_they_may_be_cached(
    anyone: Browser, unique: Unique, key: str, control: str
) -> None:
    answer = await anyone.pull(unique(key))
    assert (answer.headers["Cache-Control"], answer.headers["Vary"]) == (control, "Authorization")


async def test_private_reads_are_cached_privately(owner: Signed, unique: Unique) -> None:
    assert (await owner.pull(unique("rooms"))).headers["Cache-Control"] == "private, max-age=5"
    settings = await owner.pull(f"users/{ISSUER.user_id}/{os.urandom(4).hex()}")
    assert settings.headers["Cache-Control"] == "private, no-cache"


async def test_errors_and_pushes_are_never_cached(anyone: Browser, unique: Unique) -> None:
    for answer in (await anyone.push(unique("notes"), {}), await anyone.pull("rooms/x")):
        assert answer.headers["Cache-Control"] == "no-store"


async def test_gzip_bodies_are_taken(anyone: Browser, owner: Signed, unique: Unique) -> None:
    text = json.dumps({"data": {"n": 1}, "baseHash": None}).encode()
    zipped = {"Content-Encoding": "gzip"}
    key = unique("notes")
    assert (await anyone.request("POST", f"/push/{key}", gzip.compress(text), zipped)).status == 200
    signed_key = f"users/{ISSUER.user_id}/{os.urandom(4).hex()}"
    headers = {**owner.headers("POST", f"/push/{signed_key}", text), **zipped}
    answer = await anyone.request("POST", f"/push/{signed_key}", gzip.compress(text), headers)
    assert answer.status == 200, "the signature covers the uncompressed bytes"


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzip.compress(b" " * 5000, mtime=0), 413),
        ("gzip", gzip.compress(b"{}", mtime=0)[:-3], 400),
        ("gzip", gzip.compress(b"{}", mtime=0) * 2, 400),
        ("gzip", b"{}", 400),
        ("br", b"{}", 415),
        ("deflate", b"{}", 415),
    ],
)
async def test_encoded_bodies_are_bounded_and_whole(
    anyone: Browser, unique: Unique, encoding: str, body: bytes, status: int
) -> None:
    answer = await anyone.request("POST", f"/push/{unique('notes')}", body, {"Content-Encoding": encoding})
    assert answer.status == status


# Idempotency


async def test_a_repeated_push_is_answered_again(anyone: Browser, unique: Unique) -> None:
    key, once = unique("notes"), {"Idempotency-Key": os.urandom(8).hex()}
    first = await anyone.push(key, {"n": 1}, None, once)
    again = await anyone.push(key, {"n": 1}, None, once)
    assert (again.status, again.json) == (200, first.json)
    assert (await anyone.push(key, {"n": 1}, None)).status == 409
    assert (await anyone.push(key, {"n": 1}, None, {"Idempotency-Key": "another"})).status == 409


async def test_a_repetition_is_answered_and_writes_nothing_once_another_wrote(
    anyone: Browser, unique: Unique
) -> None:
    key, once = unique("notes"), {"Idempotency-Key": os.urandom(8).hex()}
    first = await anyone.push(key, {"n": 1}, None, once)
    await anyone.push(key, {"n": 2}, first.json["hash"])
    assert (await anyone.push(key, {"n": 1}, None, once)).json == first.json
    assert (await anyone.pull(key)).json["data"] == {"n": 2}


async def test_an_idempotency_key_belongs_to_one_document_and_one_body(
    anyone: Browser, unique: Unique
) -> None:
    key, once = unique("notes"), {"Idempotency-Key": os.urandom(8).hex()}
    first = await anyone.push(key, {"n": 1}, None, once)
    assert (await anyone.push(key + "x", {"n": 1}, None, once)).status == 200
    other = await anyone.push(key, {"n": 2}, first.json["hash"], once)
    assert (other.status, other.json["code"]) == (422, "idempotency_key_reused")
    assert (await anyone.pull(key)).json["data"] == {"n": 1}
    assert (await anyone.push(key, {"n": 1}, None, once)).json == first.json


async def test_a_push_that_is_rejected_leaves_its_idempotency_key_free(
    anyone: Browser, unique: Unique
) -> None:
    key, once = unique("notes"), {"Idempotency-Key": os.urandom(8).hex()}
    first = await anyone.push(key, {"n": 1}, None)
    assert (await anyone.push(key, {"n": 2}, None, once)).status == 409
    merged = await anyone.push(key, {"n": 3}, first.json["hash"], once)
    assert merged.status == 200
    assert (await anyone.push(key, {"n": 3}, first.json["hash"], once)).json == merged.json


async def test_a_repetition_of_a_replaced_push_does_not_free_its_key_for_other_data(
    anyone: Browser, unique: Unique
) -> None:
    key, once = unique("notes"), {"Idempotency-Key": os.urandom(8).hex()}
    first = await anyone.push(key, {"n": 1}, None, once)
    second = await anyone.push(key, {"n": 2}, first.json["hash"])
    assert (await anyone.push(key, {"n": 1}, None, once)).json == first.json
    other = await anyone.push(key, {"n": 3}, second.json["hash"], once)
    assert (other.status, other.json["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize("bad", ["", "x" * 129, "tab\there"])
async def test_an_unusable_idempotency_key_is_rejected(anyone: Browser, unique: Unique, bad: str) -> None:
    answer = await anyone.push(unique("notes"), {}, None, {"Idempotency-Key": bad})
    assert answer.json["code"] == "bad_request"


# Bad bodies, paths and methods (docs/reference/protocol.md#errors)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "Invalid JSON body"),
        (b"{", "Invalid JSON body"),
        (b'{"data":{"a":NaN}}', "Invalid JSON body"),
        (b'{"data":{"a":-Infinity}}', "Invalid JSON body"),
        (b'{"data":{"a":1e400}}', "Invalid JSON body"),
        (b'{"data":{"a":"\\ud800"}}', "Invalid JSON body"),
        (b'{"data":{"\\udc00":1}}', "Invalid JSON body"),
        (b'{"data":{"a":"\xff"}}', "Invalid JSON body"),
        (b'{"data":{}} x', "Invalid JSON body"),
        (b'{"data":{"a":' + b"[" * 63 + b"]" * 63 + b"}}", "Body nesting too deep"),
        (b"[" * 5 + b"]" * 5, "Body must be a JSON object"),
        (b"null", "Body must be a JSON object"),
        (b'"text"', "Body must be a JSON object"),
        (b"{}", "Missing or invalid data"),
        (b'{"data":null}', "Missing or invalid data"),
        (b'{"data":[]}', "Missing or invalid data"),
        (b'{"data":{},"data":1}', "Missing or invalid data"),
        (b'{"data":{},"baseHash":1}', "baseHash must be a string or null"),
        (b'{"data":{},"baseHash":{}}', "baseHash must be a string or null"),
        (b'{"data":{},"authorPubkey":"x"}', "author proof requires authorPubkey and authorSignature"),
        (b'{"data":{},"authorSignature":"x"}', "author proof requires authorPubkey and authorSignature"),
        (b'{"data":{},"authorPubkey":1,"authorSignature":"x"}',
         "author proof requires authorPubkey and authorSignature"),
    ],
)  # fmt: skip
async def test_a_bad_body_is_rejected_and_nothing_is_stored(
    anyone: Browser, unique: Unique, body: bytes, error: str
) -> None:
    key = unique("notes")
    assert (await anyone.request("POST", f"/push/{key}", body)).error == (400, error)
    assert (await anyone.pull(key)).json["hash"] == ""


async def test_nesting_of_64_is_taken(anyone: Browser, unique: Unique) -> None:
    body = b'{"data":{"a":' + b"[" * 62 + b"]" * 62 + b"}}"
    assert (await anyone.request("POST", f"/push/{unique('notes')}", body)).status == 200


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "x/y; application/json"]
)
async def test_other_media_types_are_rejected(anyone: Browser, unique: Unique, media_type: str) -> None:
    answer = await anyone.request("POST", f"/push/{unique('notes')}", b"{}", {"Content-Type": media_type})
    assert answer.error == (415, "Content-Type must be application/json")


async def test_media_type_parameters_do_not_matter(anyone: Browser, unique: Unique) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    answer = await anyone.request("POST", f"/push/{unique('notes')}", b'{"data":{}}', headers)
    assert answer.status == 200


@pytest.mark.parametrize(
    "path",
    [
        "notes/", "notes//", "notes/.", "notes/..", "notes/%2e%2e", "notes/a%2Fb", "notes/a%2f..%2fb",
        "notes/a%00", "notes/a%0A", "notes/a%20b", "notes/%C3%A9", "notes/%FF", "notes/a+b", "notes/a;b",
        "notes/" + "x" * 256,
        "_pysync/x/c/y", "a/_pysync%2F/c/y", "a//c/y", "a/x/c/%0a",
    ],
)  # fmt: skip
@pytest.mark.parametrize(("method", "action"), [("GET", "pull"), ("POST", "push")])
async def test_an_unsafe_path_is_rejected(anyone: Browser, path: str, method: str, action: str) -> None:
    answer = await anyone.request(method, f"/{action}/{path}", b"{}" if method == "POST" else None)
    if path.startswith("_pysync/x"):
        assert answer.status == 404
    else:
        assert answer.error == (400, "Invalid path parameter")


async def test_an_unsafe_path_is_rejected_before_authentication(anyone: Browser) -> None:
    assert (await anyone.pull("rooms/a%2Fb")).status == 400


async def test_needless_escapes_name_the_same_document(anyone: Browser, unique: Unique) -> None:
    key = unique("notes")
    await anyone.push(key, {"n": 1})
    escaped = "notes/" + "".join(f"%{ord(char):02x}" for char in key.removeprefix("notes/"))
    assert (await anyone.pull(escaped)).json["data"] == {"n": 1}


async def test_literal_segments_win_over_parameters(anyone: Browser) -> None:
    assert (await anyone.pull("notes/special")).status == 200
    assert (await anyone.pull("a/1/c")).error == (404, "Not found")


async def test_wrong_methods_are_named(anyone: Browser) -> None:
    answer = await anyone.request("POST", "/pull/notes/x", {"data": {}})
    assert answer.error == (405, "Method not allowed")
    assert answer.headers["Allow"] == "GET, HEAD"
    assert (await anyone.request("DELETE", "/push/notes/x")).status == 405
    assert (await anyone.push("readonly/x", {})).status == 404
    assert (await anyone.pull("dropbox/x")).status == 404


@pytest.mark.parametrize("target", ["/pull", "/pull/unknown/x", "/favicon.ico", "/acme", "/acme/pull"])
async def test_unknown_paths_are_404(anyone: Browser, target: str) -> None:
    assert (await anyone.request("GET", target)).error == (404, "Not found")


async def test_a_body_over_the_limit_is_rejected_declared_or_streamed(
    anyone: Browser, unique: Unique
) -> None:
    key = unique("notes")
    body = orjson.dumps({"data": {"a": "x" * 5000}})
    assert (await anyone.request("POST", f"/push/{key}", body)).error == (413, "Payload too large")

    async def chunks() -> Any:
        yield body[:4000]
        yield body[4000:]

    url = URL(anyone.base + f"/push/{key}")
    async with anyone.session.post(
        url, data=chunks(), headers={"Content-Type": "application/json"}
    ) as answer:
        assert (answer.status, (await answer.json())["error"]) == (413, "Payload too large")
    assert (await anyone.pull(key)).json["hash"] == ""


def talk(base: str, sent: bytes) -> bytes:
    """What the service says to these bytes until it closes."""
    url = URL(base)
    assert url.host is not None
    assert url.port is not None
    with socket.create_connection((url.host, url.port)) as connection:
        connection.sendall(sent)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


async def test_a_request_with_two_lengths_is_rejected_and_closed(base: str) -> None:
    sent = (
        b"POST /push/notes/x HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    received = await asyncio.to_thread(talk, base, sent)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["code"] == "bad_request"


CHUNKED_PUSH = b'13\r\n{"data":{"by":"x"}}\r\n0\r\n\r\n'


@pytest.mark.parametrize(
    ("version", "lines", "status"),
    [
        (b"1.1", b"Transfer-Encoding: chunked\r\n", 200),
        (b"1.1", b"Transfer-Encoding: Chunked\r\n", 200),
        (b"1.1", b"Transfer-Encoding: identity, chunked\r\n", 400),
        (b"1.1", b"Transfer-Encoding: gzip, chunked\r\n", 400),
        (b"1.1", b"Transfer-Encoding: chunked, chunked\r\n", 400),
        (b"1.1", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"1.1", b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"1.1", b"Transfer-Encoding: identity\r\n", 400),
        (b"1.1", b"Transfer-Encoding: gzip\r\n", 400),
        (b"1.1", b"Transfer-Encoding:\r\n", 400),
        (b"1.1", b"Transfer-Encoding: xchunked\r\n", 400),
        (b"1.0", b"Transfer-Encoding: chunked\r\n", 400),
        (b"1.0", b"Transfer-Encoding: chunked\r\nConnection: keep-alive\r\n", 400),
        (b"1.0", b"Transfer-Encoding: identity\r\nConnection: keep-alive\r\n", 400),
    ],
)
async def test_a_body_that_is_not_exactly_chunked_is_400_and_closes(
    base: str, anyone: Browser, unique: Callable[[str], str], version: bytes, lines: bytes, status: int
) -> None:
    key = unique("notes")
    head = b"POST /push/%s HTTP/%s\r\nHost: h\r\nContent-Type: application/json\r\n" % (key.encode(), version)
    last = b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    received = await asyncio.to_thread(talk, base, head + lines + b"\r\n" + CHUNKED_PUSH + last)
    first, _, rest = received.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 %d " % status)
    assert rest.count(b"HTTP/1.1 200 ") == (status == 200)
    assert ((await anyone.pull(key)).json["hash"] != "") == (status == 200)
    if status == 400:
        assert json.loads(rest)["code"] == "bad_request"


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /pull/notes/\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 70000 + b"\r\n\r\n",
    ],
)
async def test_malformed_http_gets_json_and_is_closed(base: str, sent: bytes) -> None:
    received = await asyncio.to_thread(talk, base, sent)
    assert received.startswith(b"HTTP/1.1 400 ")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.slow
async def test_a_rejected_upload_is_closed_after_its_answer(base: str) -> None:
    sent = (
        b"POST /push/notes/x HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100000\r\n\r\n" + b"x" * 1000
    )
    received = await asyncio.to_thread(talk, base, sent)
    assert received.startswith(b"HTTP/1.1 413 ")
    assert b"Connection: close" in received


async def test_client_that_expects_a_continue_receives_it(base: str, unique: Unique) -> None:
    body = b'{"data":{}}'
    sent = (
        f"POST /push/{unique('notes')} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    url = URL(base)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(sent.encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    writer.write(body)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_client_of_http_1_0_receives_no_continue(base: str, anyone: Browser, unique: Unique) -> None:
    body = b'{"data":{},"baseHash":null}'
    sent = (
        f"POST /push/{unique('notes')} HTTP/1.0\r\nHost: h\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n"
    )
    url = URL(base)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(sent.encode())
    assert (await anyone.request("GET", "/health")).status == 200  # the head has been read before
    writer.write(body)
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_request_ids_are_kept_or_given(anyone: Browser) -> None:
    given = await anyone.request("GET", "/health", headers={"X-Request-Id": "abc.1-2_3"})
    assert given.headers["X-Request-Id"] == "abc.1-2_3"
    for bad in ("", "x" * 65, "sp ace"):
        made = await anyone.request("GET", "/health", headers={"X-Request-Id": bad})
        assert made.headers["X-Request-Id"] not in ("", bad)


# Authentication


async def test_anonymous_callers_get_401_where_credentials_are_needed(anyone: Browser) -> None:
    for key in (f"users/{ISSUER.user_id}/a", "rooms/a", "strict/a"):
        for answer in (await anyone.pull(key), await anyone.push(key, {})):
            assert answer.error == (401, "Unauthorized")
            assert answer.headers["WWW-Authenticate"] == "Cap"


async def test_an_owner_reads_and_writes_what_is_theirs(owner: Signed) -> None:
    key = f"users/{ISSUER.user_id}/{os.urandom(4).hex()}"
    pushed = await owner.push(key, {"n": 1})
    assert pushed.status == 200
    assert (await owner.pull(key)).json["data"] == {"n": 1}
    assert (await owner.push(key, {"n": 2}, pushed.json["hash"])).status == 200


async def test_nobody_acts_as_another_identity(untrusted: Signed, anyone: Browser) -> None:
    key = f"users/{ISSUER.user_id}/a"
    assert (await untrusted.pull(key)).error == (403, "Forbidden")
    assert (await untrusted.push(key, {})).error == (403, "Forbidden")


async def test_a_member_acts_within_its_certificate(member: Signed, unique: Unique) -> None:
    assert (await member.push(unique("rooms"), {})).status == 200
    assert (await member.pull(unique("rooms"))).status == 200
    assert (await member.pull("rooms/_members")).error == (403, "Forbidden")
    assert (await member.push("rooms/_keyring", {})).error == (403, "Forbidden")
    assert (await member.pull("owned/a")).error == (403, "Forbidden")


async def test_a_read_only_certificate_does_not_write(member: Signed, unique: Unique) -> None:
    member.certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", **minted_at()
    )
    assert (await member.pull(unique("rooms"))).status == 200
    assert (await member.push(unique("rooms"), {})).error == (403, "Forbidden")


async def test_operations_limit_a_device_too(untrusted: Signed) -> None:
    grant = issuing.Grant(("read",), ("**",))
    untrusted.certificate = root_device(STRANGER, grant=grant)
    key = f"users/{STRANGER.user_id}/a"
    assert (await untrusted.pull(key)).status == 200
    assert (await untrusted.push(key, {})).error == (403, "Forbidden")


async def test_paths_limit_a_device_too(untrusted: Signed) -> None:
    grant = issuing.Grant(("read", "write"), ("users/{identity}/**", "!users/*/secret"))
    untrusted.certificate = root_device(STRANGER, grant=grant)
    mine = f"users/{STRANGER.user_id}"
    assert (await untrusted.pull(f"{mine}/a")).status == 200
    assert (await untrusted.pull(f"{mine}/secret")).status == 403


async def test_certificates_of_untrusted_issuers_yield_no_roles(untrusted: Signed) -> None:
    assert (await untrusted.pull("rooms/a")).error == (403, "Forbidden")


async def test_a_wildcard_collection_is_only_its_literal_text(owner: Signed, member: Signed) -> None:
    owner.certificate = root_device(ISSUER, collections=("*",))
    assert (await owner.pull("rooms/a")).error == (403, "Forbidden")
    assert (await owner.pull("roots/a")).status == 200


async def test_root_only_needs_a_root_device(owner: Signed, member: Signed) -> None:
    assert (await owner.pull("roots/a")).status == 200
    device = IdentityKeys.generate()
    paired = issuing.issue_device_certificate(ISSUER, device.ed_pub, device.kem_pub, **minted_at())
    second = Signed(owner.base, owner.session, device, paired)
    assert (await second.pull(f"users/{ISSUER.user_id}/a")).status == 200, "it acts for its issuer"
    assert (await second.pull("roots/a")).error == (403, "Forbidden")
    assert (await second.pull("owned/a")).status == 200, "admin:<userId> is held by that user's devices"


async def test_delegates_reach_across_identities_but_others_do_not(member: Signed, untrusted: Signed) -> None:
    member.certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "shared", **minted_at()
    )
    assert (await member.pull(f"shared/{ISSUER.user_id}/a")).status == 200
    assert (await untrusted.pull(f"shared/{ISSUER.user_id}/a")).status == 403


async def test_audience_certificates_serve_whoever_presents_them(
    base: str, anyone: Browser, unique: Unique
) -> None:
    link = issuing.issue_audience_certificate(ISSUER, "rooms", **minted_at())
    anybody = Signed(base, anyone.session, IdentityKeys.generate(), link, presenter=True)
    assert (await anybody.pull(unique("rooms"))).status == 200
    anybody.presenter = False
    assert (await anybody.pull(unique("rooms"))).error == (401, "Unauthorized")
    chosen = issuing.issue_audience_certificate(ISSUER, "rooms", aud=(SUBJECT.ed_pub,), **minted_at())
    assert (await Signed(base, anyone.session, SUBJECT, chosen, presenter=True).pull("rooms/a")).status == 200
    other = Signed(base, anyone.session, STRANGER, chosen, presenter=True)
    assert (await other.pull("rooms/a")).error == (403, "Forbidden")


async def test_the_admin_token_gives_the_role_admin(anyone: Browser) -> None:
    key = f"users/{ISSUER.user_id}/a"
    assert (await anyone.pull(key, {"Authorization": "Bearer protocol-admin-token"})).status == 200
    assert (await anyone.push(key, {}, None, {"Authorization": "Bearer protocol-admin-token"})).status == 403
    for wrong in ("Bearer wrong", "Bearer ", "Bearer é".encode().decode("latin-1"), "Basic eDp5", "Cap", "x"):
        assert (await anyone.pull(key, {"Authorization": wrong})).status == 401


async def test_require_auth_decides_who_reaches_the_role_check(anyone: Browser, untrusted: Signed) -> None:
    assert (await anyone.pull("strict/a")).status == 401
    assert (await untrusted.pull("strict/a")).status == 200, "a signed caller also holds public"
    assert (await anyone.pull("loose/a")).error == (403, "Forbidden")


async def test_identity_roles_are_held_by_the_caller(base: str, anyone: Browser) -> None:
    editor = Signed(base, anyone.session, SUBJECT, root_device(SUBJECT))
    assert (await editor.pull("loose/a")).status == 200


async def test_credentials_on_an_open_collection_are_not_examined(anyone: Browser, unique: Unique) -> None:
    key, broken = unique("notes"), {"Authorization": "Cap ???", "X-Starfish-Ts": "never"}
    assert (await anyone.push(key, {}, None, broken)).status == 200
    assert (await anyone.pull(key, broken)).status == 200


async def test_a_replayed_request_is_rejected(owner: Signed) -> None:
    owner.nonce = os.urandom(16)
    key = f"users/{ISSUER.user_id}/a"
    assert (await owner.pull(key)).status == 200
    assert (await owner.pull(key)).error == (401, "Unauthorized")
    assert (await owner.pull(f"users/{ISSUER.user_id}/b")).status == 401


async def test_a_nonce_belongs_to_its_key(owner: Signed, untrusted: Signed) -> None:
    owner.nonce = untrusted.nonce = os.urandom(16)
    assert (await owner.pull(f"users/{ISSUER.user_id}/a")).status == 200
    assert (await untrusted.pull(f"users/{STRANGER.user_id}/a")).status == 200


@pytest.mark.parametrize("offset_ms", [-310_000, 310_000, -(10**12), 10**15])
async def test_a_stale_signature_is_rejected(owner: Signed, offset_ms: int) -> None:
    owner.ts_ms = minted_at()["now_s"] * 1000 + offset_ms
    assert (await owner.pull(f"users/{ISSUER.user_id}/a")).error == (401, "Unauthorized")


def without(name: str) -> Callable[[dict[str, str]], None]:
    return lambda headers: headers.__delitem__(name)


def changed(name: str, change: Callable[[str], str]) -> Callable[[dict[str, str]], None]:
    return lambda headers: headers.update({name: change(headers[name])})


@pytest.mark.parametrize(
    "tamper",
    [
        without("X-Starfish-Sig"),
        without("X-Starfish-Ts"),
        without("X-Starfish-Nonce"),
        changed("X-Starfish-Sig", lambda text: text.rstrip("=")),
        changed("X-Starfish-Sig", lambda text: "A" + text[1:] if text[0] != "A" else "B" + text[1:]),
        changed("X-Starfish-Sig", lambda text: text[:10] + "*" + text[10:]),
        changed("X-Starfish-Sig", lambda text: text.replace("+", "-").replace("/", "_") + "-"),
        changed("X-Starfish-Ts", lambda text: str(int(text) + 1)),
        changed("X-Starfish-Ts", lambda text: text + ".0"),
        changed("X-Starfish-Ts", lambda text: f"+{text}"),
        changed("X-Starfish-Nonce", lambda text: text[:-2]),
        changed("X-Starfish-Nonce", lambda text: "AA=="),
        changed("X-Starfish-Nonce", lambda text: text[:21] + "B=="),
        changed("Authorization", lambda text: text + "A"),
        changed("Authorization", lambda text: "cap" + text[3:]),
        changed("Authorization", lambda text: text.replace("Cap ", "Cap  ")),
        changed("Authorization", lambda text: "Cap " + "A" * 8192),
        changed("X-Starfish-Ts", lambda text: ""),
    ],
)  # fmt: skip
async def test_a_tampered_request_is_rejected(
    owner: Signed, tamper: Callable[[dict[str, str]], None]
) -> None:
    owner.tamper = tamper
    assert (await owner.pull(f"users/{ISSUER.user_id}/a")).error == (401, "Unauthorized")


async def test_a_signature_covers_method_path_query_host_and_body(owner: Signed, anyone: Browser) -> None:
    key = f"users/{ISSUER.user_id}/{os.urandom(4).hex()}"
    body = b'{"data":{"n":1}}'
    signed = owner.headers("POST", f"/push/{key}", body)
    for method, target, sent, extra in (
        ("POST", f"/push/{key}", b'{"data":{"n":2}}', {}),
        ("POST", f"/push/{key}?a=1", body, {}),
        ("POST", f"/push/{key}x", body, {}),
        ("POST", f"/push/{key}", body, {"Host": "other.example"}),
    ):
        answer = await anyone.request(method, target, sent, {**signed, **extra})
        assert answer.status == 401
    assert (await anyone.request("POST", f"/push/{key}", body, signed)).status == 200


@pytest.mark.parametrize(
    "change",
    [
        {"exp": 1},
        {"nbf": 9_999_999_999, "exp": 99_999_999_999},
        {"sig": "A" * 86 + "=="},
        {"iss": SUBJECT.ed_pub},
        {"sub": SUBJECT.ed_pub},
        {"kind": "wizard"},
        {"scope": {"ops": ["read"], "collections": ["rooms"]}},
        {"aud": None},
        {"sub": "01" + "00" * 31},
    ],
)
async def test_a_forged_certificate_is_rejected(owner: Signed, change: dict[str, Any]) -> None:
    forged = encoded({**orjson.loads(owner.certificate.text), **change})
    owner.tamper = lambda headers: headers.update({"Authorization": forged})
    assert (await owner.pull(f"users/{ISSUER.user_id}/a")).error == (401, "Unauthorized")


async def test_a_shared_certificate_without_paths_is_forbidden(base: str, anyone: Browser) -> None:
    members = {
        "v": 1, "kind": "member", "iss": ISSUER.ed_pub, "issUserId": ISSUER.user_id, "sub": SUBJECT.ed_pub,
        "subKem": SUBJECT.kem_pub, "subUserId": SUBJECT.user_id, "nbf": minted_at()["now_s"],
        "exp": minted_at()["now_s"] + 60, "nonce": "AAAAAAAAAAAAAAAAAAAAAA==",
        "scope": {"ops": ["read"], "collections": ["rooms"]},
    }  # fmt: skip
    message = b"starfish-capcert-v1\n" + canonical(members).encode()
    header = encoded({**members, "sig": ISSUER.sign(message)})
    caller = Signed(base, anyone.session, SUBJECT, root_device(SUBJECT))
    caller.tamper = lambda headers: headers.update({"Authorization": header})
    assert (await caller.pull("rooms/a")).error == (403, "Forbidden")


async def test_a_revoked_certificate_is_rejected_and_lists_only_grow(anyone: Browser, base: str) -> None:
    root, device = IdentityKeys.generate(), IdentityKeys.generate()
    certificate = issuing.issue_device_certificate(root, device.ed_pub, device.kem_pub, **minted_at())
    caller = Signed(base, anyone.session, device, certificate)
    key = f"users/{root.user_id}/a"
    assert (await caller.pull(key)).status == 200
    first = issuing.issue_revocation_list(root, 1, certificates=[certificate])
    answer = await anyone.request("POST", "/revocations", first.text)
    assert (answer.status, answer.json) == (200, {"ok": True, "generation": 1})
    assert (await caller.pull(key)).error == (401, "Unauthorized")
    assert (await anyone.request("POST", "/revocations", first.text)).error == (409, "stale-generation")
    second = issuing.issue_revocation_list(root, 2, subjects=[(device.ed_pub, 9_999_999_999)])
    assert (await anyone.request("POST", "/revocations", second.text)).status == 200
    assert (await caller.pull(key)).status == 401
    third = issuing.issue_revocation_list(root, 3)
    assert (await anyone.request("POST", "/revocations", third.text)).status == 400, (
        "an untrusted list must not be empty"
    )
    own = Signed(base, anyone.session, root, root_device(root))
    assert (await own.push(key, {"n": 1})).status == 200
    assert (await anyone.request("POST", "/revocations", third.text)).status == 200
    assert (await caller.pull(key)).status == 200


async def test_bad_revocation_lists_are_rejected(anyone: Browser) -> None:
    good = orjson.loads(issuing.issue_revocation_list(IdentityKeys.generate(), 1).text)
    for body, expected in (
        ({**good, "generation": 2}, (403, "bad-signature")),
        ({**good, "generation": "2"}, (400, "Invalid revocation list")),
        ([], (400, "Invalid revocation list")),
        (b"{", (400, "Invalid revocation list")),
    ):
        assert (await anyone.request("POST", "/revocations", body)).error == expected


# Author proofs, schemas, permissions, restrictions, limits


async def test_an_author_proof_is_checked_kept_and_returned(owner: Signed) -> None:
    key = f"users/{ISSUER.user_id}/{os.urandom(4).hex()}"
    data = {"b": 1, "a": "é"}
    proof = signing.sign_author(ISSUER, signing.DOCUMENT_AUTHOR, key, orjson.dumps(data))
    assert (await owner.request("POST", f"/push/{key}", {"data": data, **proof})).status == 200
    pulled = (await owner.pull(key)).json
    assert {name: pulled[name] for name in proof} == proof

    elsewhere = signing.sign_author(ISSUER, signing.DOCUMENT_AUTHOR, key + "x", orjson.dumps(data))
    rejected = await owner.request("POST", f"/push/{key}", {"data": data, **elsewhere})
    assert rejected.error == (403, "invalid document author signature")
    another = signing.sign_author(SUBJECT, signing.DOCUMENT_AUTHOR, key, orjson.dumps(data))
    rejected = await owner.request("POST", f"/push/{key}", {"data": data, **another})
    assert rejected.error == (403, "document author must be the request presenter")


async def test_an_author_proof_over_large_integers_holds_for_writer_and_reader(owner: Signed) -> None:
    key, data = f"users/{ISSUER.user_id}/{os.urandom(4).hex()}", {"n": LARGE_INTEGERS}
    message = f"starfish-doc-author-v1\n{canonical({'k': key, 'd': data})}".encode()
    proof = {"authorPubkey": ISSUER.ed_pub, "authorSignature": ISSUER.sign(message)}
    assert (await owner.request("POST", f"/push/{key}", {"data": data, **proof})).status == 200
    pulled = (await owner.pull(key)).json
    assert (pulled["data"], {name: pulled[name] for name in proof}) == (data, proof)
    assert proof == signing.sign_author(ISSUER, signing.DOCUMENT_AUTHOR, key, orjson.dumps(pulled["data"]))


async def test_an_anonymous_author_proof_must_hold(anyone: Browser, unique: Unique) -> None:
    key = unique("notes")
    proof = signing.sign_author(STRANGER, signing.DOCUMENT_AUTHOR, key, b'{"n":1}')
    forged = await anyone.request("POST", f"/push/{key}", {"data": {"n": 2}, **proof})
    assert forged.error == (403, "invalid document author signature")
    assert (await anyone.request("POST", f"/push/{key}", {"data": {"n": 1}, **proof})).status == 200


async def test_data_must_satisfy_the_schema(anyone: Browser, unique: Unique) -> None:
    key = unique("typed")
    rejected = await anyone.push(key, {"age": -1})
    assert rejected.status == 400
    assert rejected.json["error"].startswith("Schema validation failed: ")
    assert (rejected.json["path"], rejected.json["validator"]) == ("/age", "minimum")
    assert (await anyone.push(key, {})).json["validator"] == "required"
    assert (await anyone.push(key, {"age": 3})).status == 200


async def test_fields_are_hidden_from_and_locked_to_others(
    anyone: Browser, base: str, unique: Unique
) -> None:
    editor = Signed(base, anyone.session, SUBJECT, root_device(SUBJECT))
    key = unique("cards")
    full = await editor.push(key, {"name": "Ann", "salary": 10, "rank": 1})
    assert full.status == 200
    seen = await anyone.pull(key)
    version = seen.json["hash"]
    assert (seen.json["data"], seen.headers["ETag"]) == ({"name": "Ann", "rank": 1}, f'"{version}"')
    assert version != full.json["hash"], "from it the salary could be computed"
    whole = await editor.pull(key)
    assert whole.json["data"] == {"name": "Ann", "salary": 10, "rank": 1}
    assert seen.headers["ETag"] != whole.headers["ETag"]
    assert (await anyone.pull(key, {"If-None-Match": seen.headers["ETag"]})).status == 304

    for data, name in (
        ({"salary": 11}, "salary"),
        ({"rank": 2}, "rank"),
        ({"rank": True}, "rank"),
        ({"rank": None}, "rank"),
    ):
        rejected = await anyone.push(key, data, version)
        assert rejected.error == (403, f'Forbidden: field "{name}" requires roles: editor')
    renamed = await anyone.push(key, {"name": "Bea", "rank": 1}, version)
    assert renamed.status == 200, "a locked member may be sent back unchanged"
    assert (await editor.pull(key)).json["data"] == {"name": "Bea", "salary": 10, "rank": 1}
    assert renamed.json["hash"] == (await anyone.pull(key)).json["hash"]


async def test_permissions_leave_large_integers_exact(anyone: Browser, base: str, unique: Unique) -> None:
    editor, key = Signed(base, anyone.session, SUBJECT, root_device(SUBJECT)), unique("cards")
    data = {"salary": LARGE_INTEGERS, "rank": LARGE_INTEGERS, "n": LARGE_INTEGERS}
    await editor.push(key, data)
    seen = {"rank": LARGE_INTEGERS, "n": LARGE_INTEGERS}
    pulled = (await anyone.pull(key)).json
    assert pulled["data"] == seen
    assert (await anyone.push(key, {**seen, "n": 0}, pulled["hash"])).status == 200
    assert (await editor.pull(key)).json["data"] == {**data, "n": 0}


async def test_fields_may_be_for_the_owner_alone(owner: Signed, anyone: Browser) -> None:
    key = f"profiles/{ISSUER.user_id}/{os.urandom(4).hex()}"
    assert (await owner.push(key, {"name": "Ann", "email": "a@example"})).status == 200
    assert (await owner.pull(key)).json["data"] == {"name": "Ann", "email": "a@example"}
    assert (await anyone.pull(key)).json["data"] == {"name": "Ann"}


async def test_restrictions_name_identities(anyone: Browser, base: str, untrusted: Signed) -> None:
    named = Signed(base, anyone.session, SUBJECT, root_device(SUBJECT))
    assert (await named.push("banned/a", {})).error == (403, "Forbidden")
    assert (await named.pull("banned/a")).status == 200
    assert (await named.pull("picked/a")).status == 200
    assert (await untrusted.pull("picked/a")).error == (403, "Forbidden")
    assert (await anyone.pull("picked/a")).error == (403, "Forbidden")


async def test_requests_over_the_rate_are_rejected_and_may_be_repeated(owner: Signed) -> None:
    owner.certificate = root_device(ISSUER, collections=("rooms",))
    statuses = [(await owner.pull("metered/a")).status for _ in range(5)]
    limited = await owner.pull("metered/a")
    assert limited.error == (429, "Rate limit exceeded")
    assert statuses[-2:] == [429, 429]
    assert statuses.count(200) <= 3
    assert 1 <= int(limited.headers["Retry-After"]) <= 3600
    assert limited.headers["RateLimit-Policy"] == '"default";q=3;w=3600'
    assert limited.headers["RateLimit"] == f'"default";r=0;t={limited.headers["Retry-After"]}'
    assert (await owner.push("metered/a", {}, "x")).status == 409, "pushes are not metered here"


# Keyrings


async def test_a_keyring_is_folded_in_where_the_caller_may_read_it(owner: Signed, unique: Unique) -> None:
    key = unique("rooms")
    await owner.push(key, {"n": 1})
    for query in ("withKeyring=1", "withKeyring=true", "withKeyring=TRUE"):
        empty = await owner.request("GET", f"/pull/{key}?{query}")
        assert empty.json["keyring"] is None
    assert "keyring" not in (await owner.request("GET", f"/pull/{key}?withKeyring=0")).json
    pushed = await owner.push(f"{key}/_keyring", {"v": 1})
    folded = await owner.request("GET", f"/pull/{key}?withKeyring=1")
    assert folded.json["keyring"]["data"] == {"v": 1}
    assert folded.json["keyring"]["hash"] == pushed.json["hash"]
    assert folded.json["data"] == {"n": 1}


async def test_a_changed_keyring_is_a_changed_answer(owner: Signed, unique: Unique) -> None:
    key = unique("rooms")
    await owner.push(key, {"n": 1})
    first = await owner.request("GET", f"/pull/{key}?withKeyring=1")
    known = {"If-None-Match": first.headers["ETag"]}
    assert (await owner.request("GET", f"/pull/{key}?withKeyring=1", headers=known)).status == 304
    await owner.push(f"{key}/_keyring", {"v": 1})
    assert (await owner.request("GET", f"/pull/{key}?withKeyring=1", headers=known)).status == 200


async def test_a_keyring_outside_the_scope_or_roles_is_left_out(
    member: Signed, owner: Signed, unique: Unique
) -> None:
    key = unique("rooms")
    await owner.push(key, {"n": 1})
    await owner.push(f"{key}/_keyring", {"v": 1})
    grant = issuing.Grant(("read",), (f"{key}/**", key, f"!{key}/_keyring", "!rooms/_members"))
    member.certificate = issuing.issue_member_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub, "rooms", grant=grant, **minted_at()
    )
    answer = await member.request("GET", f"/pull/{key}?withKeyring=1")
    assert answer.status == 200
    assert "keyring" not in answer.json


# Namespaces and operations


async def test_what_changed_since_a_cursor_is_named_once(anyone: Browser, unique: Unique) -> None:
    cursor = (await page(anyone, "now", collections="notes")).json["cursor"]
    key = unique("notes")
    first = (await anyone.push(key, {})).json["hash"]
    second = (await anyone.push(key, {"n": 2}, first)).json
    params = {"notes": {"id": key.partition("/")[2]}}
    reply = await page(anyone, cursor, collections="notes", params=params)
    change = {"collection": "notes", "params": params["notes"], **second}
    assert reply.json == {"changes": [change], "cursor": reply.json["cursor"]}
    again = await page(anyone, reply.json["cursor"], collections="notes", params=params)
    assert again.json["changes"] == []
    for query in ({"since": "x"}, {"limit": "0"}, {"collections": "none"}):
        assert (await page(anyone, **query)).status == 400


async def test_versions_that_a_client_has_come_without_data(anyone: Browser, unique: Unique) -> None:
    keys = [unique("notes"), unique("notes") + "-2"]
    first, second = [(await anyone.push(key, {"key": key})).json["hash"] for key in keys]
    params = {"notes": [{"id": key.partition("/")[2]} for key in keys]}

    async def entries(*known: str | None) -> list[Any]:
        query = {"collections": "notes", "params": json.dumps(params), "known": json.dumps({"notes": known})}
        answer = await anyone.request("GET", f"/batch/pull?{urlencode(query)}")
        assert answer.status == 200
        found: list[Any] = answer.json["collections"]["notes"]
        return [{name: entry[name] for name in entry if name != "timestamp"} for entry in found]

    whole = {"data": {"key": keys[1]}, "hash": second}
    assert await entries(first[:16], None) == [{"unchanged": True, "hash": first}, whole]
    assert await entries(first[:16], first[:16]) == [{"unchanged": True, "hash": first}, whole]


async def test_a_namespace_is_a_prefix_over_the_same_keys(anyone: Browser, unique: Unique) -> None:
    key = unique("notes")
    pushed = await anyone.request("POST", f"/acme/push/{key}", {"data": {"n": 1}})
    assert (await anyone.pull(key)).json["hash"] == pushed.json["hash"]


async def test_signed_requests_work_in_a_namespace(owner: Signed) -> None:
    target = f"/acme/push/acme/{ISSUER.user_id}/{os.urandom(4).hex()}"
    assert (await owner.request("POST", target, {"data": {}})).status == 200


async def test_operators_can_query(anyone: Browser) -> None:
    health = await anyone.request("GET", "/health")
    assert health.json == {"ok": True, "ts": health.json["ts"]}
    assert (await anyone.request("GET", "/health/ready")).json["ok"] is True
    assert (await anyone.request("GET", "/version")).json["name"] == "pysync"
    metrics = await anyone.request("GET", "/metrics")
    assert b"pysync_requests_total" in metrics.body


async def test_browser_client_is_served(anyone: Browser) -> None:
    version = (await anyone.request("GET", "/version")).json["version"]
    for path in ("pysync.js", f"{version}/pysync.js", "pysync.d.ts"):
        module = await anyone.request("GET", f"/client/{path}")
        assert (module.status, b"Replica" in module.body) == (200, True)
