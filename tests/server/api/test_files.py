"""Files over HTTP: what is pushed as it is, and pulled whole or in part.

See docs/reference/protocol.md#files.
"""

import asyncio
import gzip
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Reply, Signed, Start, root_device
from support.collections import PUBLIC, limit_of
from support.faulty_store import FaultyStore
from support.plugin_samples import NotifiedPlugin, Reading, Roles, batch
from yarl import URL

from pysync import plugins
from pysync.clock import wall_clock_ms
from pysync.config.key_templates import KeyTemplate
from pysync.engine.changes import parse_change
from pysync.engine.files import FileSettings
from pysync.errors import StoreUnavailable
from pysync.protocol import PARQUET_MIME_TYPES
from pysync.server.api.files import ByteRange, parse_range, sanitize
from pysync.store import Store
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

PHOTOS = {
    "name": "photos",
    "storagePath": "photos/{id}",
    "allowedMimeTypes": ["image/*", "text/plain"],
    "maxBodyBytes": 100_000,
    "listable": True,
    **PUBLIC,
}
MINE = {
    **PHOTOS,
    "name": "mine",
    "storagePath": "u/{identity}/{id}",
    "readRoles": ["self"],
    "writeRoles": ["self"],
}
ANYTHING = {**PHOTOS, "name": "anything", "storagePath": "any/{id}", "allowedMimeTypes": ["*/*"]}
MIXED = {
    **PHOTOS,
    "name": "mixed",
    "storagePath": "mixed/{id}",
    "allowedMimeTypes": ["application/json", "image/png"],
}
PARQUET = {
    **PHOTOS,
    "name": "tables",
    "storagePath": "tables/{id}",
    "allowedMimeTypes": [
        "application/vnd.apache.parquet",
        "application/x-parquet",
        "application/octet-stream",
    ],
}
EVERYTHING = [PHOTOS, MINE, ANYTHING, MIXED, PARQUET]
PNG = {"Content-Type": "image/png"}
BYTES = bytes(range(256)) * 8
HASH = hashlib.sha256(BYTES).hexdigest()
EMPTY = hashlib.sha256(b"").hexdigest()
HEADERS_OF_A_FILE = {
    "Content-Type": "image/png",
    "Content-Length": str(len(BYTES)),
    "Cache-Control": "no-cache",
    "Vary": "Authorization",
    "ETag": f'"{HASH}"',
    "Accept-Ranges": "bytes",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox",
}


@pytest.fixture
async def browser(start: Start, session: aiohttp.ClientSession, store: Store, clock: FakeClock) -> Browser:
    clock.now_ms = wall_clock_ms()
    return Browser(await start({"collections": EVERYTHING}, store, now_ms=clock), session)


async def put(
    browser: Browser, key: str, body: bytes = BYTES, headers: dict[str, str] | None = None
) -> Reply:
    return await browser.request("POST", f"/push/{key}", body, PNG if headers is None else headers)


async def test_pushed_file_is_pulled_byte_for_byte(browser: Browser, clock: FakeClock) -> None:
    written = await put(browser, "photos/a")
    assert (written.status, written.json) == (200, {"hash": HASH, "timestamp": clock.now_ms})
    assert written.headers["Cache-Control"] == "no-store"
    pulled = await browser.pull("photos/a")
    assert (pulled.status, pulled.body) == (200, BYTES)
    found = {name.lower(): value for name, value in pulled.headers.items()}
    assert found.keys() - {"date", "x-request-id"} == {name.lower() for name in HEADERS_OF_A_FILE}
    for name, value in HEADERS_OF_A_FILE.items():
        assert found[name.lower()] == value


async def test_a_file_of_many_chunks_comes_whole(browser: Browser) -> None:
    body = bytes(range(250)) * 400
    assert (await put(browser, "photos/a", body)).json["hash"] == hashlib.sha256(body).hexdigest()
    assert (await browser.pull("photos/a")).body == body


async def test_the_last_push_wins(browser: Browser) -> None:
    for body in (b"one", b"two", b"two"):
        assert (await put(browser, "photos/a", body)).status == 200
    pulled = await browser.pull("photos/a")
    assert (pulled.body, pulled.headers["ETag"]) == (b"two", f'"{hashlib.sha256(b"two").hexdigest()}"')


async def test_a_missing_file_is_the_empty_document(browser: Browser, clock: FakeClock) -> None:
    for key in ("photos/none", "any/none", "mixed/none"):
        pulled = await browser.pull(key)
        assert (pulled.status, pulled.json) == (200, {"data": {}, "hash": "", "timestamp": clock.now_ms})
        assert "ETag" not in pulled.headers
    assert (await browser.pull("photos/none", {"Range": "bytes=0-1"})).json["hash"] == ""
    assert (await browser.pull("photos/none", {"If-None-Match": "*"})).status == 200


async def test_an_empty_file_is_a_file(browser: Browser) -> None:
    assert (await put(browser, "photos/a", b"")).json["hash"] == EMPTY
    for headers in ({}, {"Range": "bytes=-5"}):
        pulled = await browser.pull("photos/a", headers)
        assert (pulled.status, pulled.body, pulled.headers["Content-Length"]) == (200, b"", "0")
        assert pulled.headers["ETag"] == f'"{EMPTY}"'
    rejected = await browser.pull("photos/a", {"Range": "bytes=0-"})
    assert (rejected.status, rejected.headers["Content-Range"]) == (416, "bytes */0")


@pytest.mark.parametrize("condition", [f'"{HASH}"', f'W/"{HASH}"', f'"x", "{HASH}"', "*"])
async def test_a_version_that_the_client_has_is_not_sent_again(browser: Browser, condition: str) -> None:
    await put(browser, "photos/a")
    for method in ("GET", "HEAD"):
        answer = await browser.request(method, "/pull/photos/a", headers={"If-None-Match": condition})
        assert (answer.status, answer.body, answer.headers["ETag"]) == (304, b"", f'"{HASH}"')
        assert answer.headers["Cache-Control"] == "no-cache"
    other = await browser.pull("photos/a", {"If-None-Match": f'"{EMPTY}"'})
    assert (other.status, other.body) == (200, BYTES)


async def test_version_is_answered_without_opening_the_file(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start({"collections": EVERYTHING}, store), session)
    await put(browser, "photos/a")
    store.fail("open")
    assert (await browser.pull("photos/a", {"If-None-Match": f'"{HASH}"'})).status == 304
    assert (await browser.request("HEAD", "/pull/photos/a")).status == 200
    assert (await browser.pull("photos/a")).status == 503


async def test_head_reports_the_headers_of_get(browser: Browser) -> None:
    await put(browser, "photos/a")
    pulled = await browser.pull("photos/a")
    found = await browser.request("HEAD", "/pull/photos/a", headers={"Range": "bytes=0-1"})
    assert (found.status, found.body) == (200, b"")
    for name in pulled.headers.keys() - {"X-Request-Id", "Date"}:
        assert found.headers[name] == pulled.headers[name]
    assert (await browser.request("HEAD", "/pull/photos/b")).headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("range_", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=0-99", 0, 99),
        ("bytes=100-", 100, 2047),
        ("bytes=-100", 1948, 2047),
        ("bytes=-99999", 0, 2047),
        ("bytes=2047-", 2047, 2047),
        ("bytes=2000-99999999999999999999999999", 2000, 2047),
        ("BYTES=5-6", 5, 6),
        (" bytes=5-6 ", 5, 6),
        ("bytes=00000000000000000000000000000005-6", 5, 6),
    ],
)
async def test_a_range_is_answered_with_that_part(
    browser: Browser, range_: str, first: int, last: int
) -> None:
    await put(browser, "photos/a")
    part = await browser.pull("photos/a", {"Range": range_})
    assert (part.status, part.body) == (206, BYTES[first : last + 1])
    assert part.headers["Content-Range"] == f"bytes {first}-{last}/2048"
    assert part.headers["Content-Length"] == str(last + 1 - first)
    assert part.headers["ETag"] == f'"{HASH}"'
    assert part.headers["Content-Type"] == "image/png"


@pytest.mark.parametrize(
    "range_",
    ["bytes=2048-", "bytes=2048-2050", "bytes=-0", f"bytes={'9' * 4000}-", "bytes=99999999999999999999-"],
)
async def test_a_range_beyond_the_file_is_rejected_with_its_size(browser: Browser, range_: str) -> None:
    await put(browser, "photos/a")
    rejected = await browser.pull("photos/a", {"Range": range_})
    assert rejected.error == (416, "Range not satisfiable")
    assert rejected.json["code"] == "range_not_satisfiable"
    assert rejected.headers["Content-Range"] == "bytes */2048"
    assert rejected.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    "range_",
    [
        "bytes=0-1,3-4",
        "bytes=" + ",".join(f"{n}-" for n in range(1000)),
        "bytes=5-4",
        "bytes=-",
        "bytes=",
        "bytes=a-b",
        "bytes=1-2-3",
        "bytes=--1",
        "bytes=+1-2",
        "bytes=\u0661-\u0662",
        "items=0-1",
        "0-1",
        "",
    ],
)
async def test_any_other_range_gets_the_whole_file(browser: Browser, range_: str) -> None:
    await put(browser, "photos/a")
    pulled = await browser.pull("photos/a", {"Range": range_})
    assert (pulled.status, pulled.body) == (200, BYTES)
    assert "Content-Range" not in pulled.headers


async def test_a_range_of_another_version_gets_the_whole_file(browser: Browser) -> None:
    await put(browser, "photos/a")
    range_ = {"Range": "bytes=0-1"}
    assert (await browser.pull("photos/a", {**range_, "If-Range": f'"{HASH}"'})).status == 206
    for version in (f'"{EMPTY}"', f'W/"{HASH}"', "Sun, 22 Nov 2026 00:00:00 GMT", "*"):
        pulled = await browser.pull("photos/a", {**range_, "If-Range": version})
        assert (pulled.status, pulled.body) == (200, BYTES)
    far = await browser.pull("photos/a", {"Range": "bytes=9999-", "If-Range": f'"{EMPTY}"'})
    assert (far.status, far.body) == (200, BYTES)


def test_ranges_are_read_as_bytes_from_first_to_last() -> None:
    assert parse_range("bytes=3-5") == ByteRange(3, 6)
    assert parse_range("bytes=-5") == ByteRange(-5, None)
    assert parse_range("bytes=5-3") is None
    assert ByteRange(-5, None).is_satisfiable(0)
    assert not ByteRange(0, None).is_satisfiable(0)


async def test_media_types_are_compared_without_parameters(browser: Browser) -> None:
    for key, sent, status in (
        ("photos/a", "image/png", 200),
        ("photos/b", "IMAGE/PNG; q=1", 200),
        ("photos/c", "text/plain; charset=utf-8", 200),
        ("photos/d", "text/html", 415),
        ("photos/d", "application/json", 415),
        ("photos/d", "image", 415),
        ("photos/d", "image/", 415),
        ("photos/d", "*/*", 415),
        ("photos/d", "image/png, text/html", 415),
        ("mixed/d", "image/jpeg", 415),
        ("any/a", "x/y", 200),
        ("any/d", "nonsense", 415),
    ):
        answer = await put(browser, key, headers={"Content-Type": sent})
        assert answer.status == status, sent
        if status == 200:
            assert (await browser.pull(key)).headers["Content-Type"] == sent
    rejected = await put(browser, "photos/d", headers={"Content-Type": "text/html"})
    assert rejected.error == (415, "Content-Type must be image/*, text/plain")
    mixed = await put(browser, "mixed/d", headers={"Content-Type": "text/html"})
    assert mixed.error == (415, "Content-Type must be application/json, image/png")
    assert (await browser.pull("photos/d")).json["hash"] == ""


async def test_a_push_without_a_content_type_is_rejected(browser: Browser) -> None:
    for key in ("photos/a", "any/a", "mixed/a"):
        answer = await raw(browser, f"POST /push/{key} HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx")
        assert answer.startswith(b"HTTP/1.1 415 "), answer


async def test_a_content_type_is_kept_as_far_as_it_fits_in_a_header(browser: Browser) -> None:
    for sent, kept in (
        ("text/plain; note=\u00fc\u4e2d", "text/plain; note="),
        ("text/plain;\ta=b", "text/plain;a=b"),
        ("text/plain; x=" + "y" * 1000, ("text/plain; x=" + "y" * 1000)[:255]),
    ):
        head = (
            f"POST /push/photos/a HTTP/1.1\r\nHost: h\r\nContent-Type: {sent}\r\nContent-Length: 1\r\n\r\nx"
        )
        answer = await raw(browser, head)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert (await browser.pull("photos/a")).headers["Content-Type"] == kept
    assert sanitize("a/b\r\nX: y") == "a/bX: y"


async def test_a_content_type_cannot_break_out_of_its_line(browser: Browser) -> None:
    for break_ in ("\r\n", "\n", "\r", "\0"):
        head = f"POST /push/photos/a HTTP/1.1\r\nHost: h\r\nContent-Type: text/plain; x={break_}Evil: yes\r\n"
        await raw(browser, head + "Content-Length: 1\r\n\r\nx")
        assert "Evil" not in (await browser.pull("photos/a")).headers


async def test_media_type_stored_by_others_cannot_break_out_of_its_header(
    start: Start, session: aiohttp.ClientSession, store: Store
) -> None:
    await store.write("photos/a", chunks_of_body(b"x"), "text/plain\r\nEvil: yes")
    browser = Browser(await start({"collections": [PHOTOS]}, store), session)
    pulled = await browser.pull("photos/a")
    assert (pulled.headers["Content-Type"], pulled.body) == ("application/octet-stream", b"x")
    assert "Evil" not in pulled.headers


async def test_json_is_a_file_where_only_a_wildcard_admits_it(browser: Browser) -> None:
    text = b' { "not": "touched" } '
    answer = await put(browser, "any/a", text, {"Content-Type": "application/json"})
    assert answer.json["hash"] == hashlib.sha256(text).hexdigest()
    pulled = await browser.pull("any/a")
    assert (pulled.body, pulled.headers["Content-Type"]) == (text, "application/json")
    broken = await put(browser, "any/b", b"{", {"Content-Type": "application/json"})
    assert broken.status == 200


async def test_documents_and_files_live_in_one_collection(browser: Browser) -> None:
    document = await browser.push("mixed/a", {"n": 1})
    await put(browser, "mixed/b")
    assert (await browser.pull("mixed/a")).json["data"] == {"n": 1}
    assert (await browser.pull("mixed/b")).body == BYTES
    assert (await browser.request("GET", "/list/mixed")).json["items"] == ["a", "b"]
    entries = await batch(browser, mixed=[{"id": "a"}, {"id": "b"}])
    assert [entry["hash"] for entry in entries["mixed"]] == [document.json["hash"], ""]


async def test_file_replaces_a_document_and_back(browser: Browser) -> None:
    await browser.push("mixed/a", {"n": 1})
    await put(browser, "mixed/a")
    assert (await browser.pull("mixed/a")).body == BYTES
    for base in (None, "", EMPTY):
        rejected = await browser.push("mixed/a", {"n": 2}, base)
        assert (rejected.status, rejected.json["currentHash"]) == (409, HASH)
    assert (await browser.push("mixed/a", {"n": 2}, HASH)).status == 200
    assert (await browser.pull("mixed/a")).json["data"] == {"n": 2}
    assert (await browser.push("mixed/a", {"n": 3}, HASH)).status == 409


async def test_file_that_replaces_a_document_between_two_lookups_is_found(
    start: Start, session: aiohttp.ClientSession
) -> None:
    class Taken(MemoryStore):
        async def get(self, key: str, if_none_match: str | None = None) -> Any:
            found = await super().get(key, if_none_match)
            if found is None and key == "mixed/a":
                await self.write(key, chunks_of_body(BYTES), "image/png")
            return found

    browser = Browser(await start({"collections": [MIXED]}, Taken()), session)
    assert (await browser.pull("mixed/a")).body == BYTES


async def test_parquet_is_stored_and_answered_as_such_whatever_it_was_sent_as(
    browser: Browser, store: Store
) -> None:
    for sent in (*PARQUET_MIME_TYPES, "Application/X-Parquet; a=b"):
        assert (await put(browser, "tables/a", headers={"Content-Type": sent})).status == 200
        stat = await store.stat("tables/a")
        assert stat is not None
        assert stat.content_type == "application/vnd.apache.parquet"
    await store.write("tables/a", chunks_of_body(BYTES), "application/octet-stream")
    assert (await browser.pull("tables/a")).headers["Content-Type"] == "application/vnd.apache.parquet"


async def test_of_two_documents_over_one_file_one_wins(browser: Browser) -> None:
    await put(browser, "mixed/a")
    answers = await asyncio.gather(*(browser.push("mixed/a", {"n": n}, HASH) for n in range(8)))
    assert sorted(answer.status for answer in answers) == [200] + [409] * 7


async def test_a_batch_does_not_know_collections_of_files(browser: Browser) -> None:
    await put(browser, "photos/a")
    entries = await batch(browser, photos=[{"id": "a"}], any=[])
    assert entries["photos"] == [{"error": "Collection not found"}]


def test_only_files_with_a_name_of_their_own_are_swept_for_a_template() -> None:
    rules = FileSettings(template=KeyTemplate("lake/{app}/{batchId}"), suffix=".parquet")
    assert rules.matches_key("lake/web/1.parquet")
    for key in (
        "lake/web/.parquet",
        "lake/web/1",
        "lake/1.parquet",
        "lake/a/b/1.parquet",
        "pond/web/1.parquet",
    ):
        assert not rules.matches_key(key)


async def test_files_are_listed(browser: Browser) -> None:
    for name in ("b", "a", "c"):
        await put(browser, f"photos/{name}")
    answer = await browser.request("GET", "/list/photos?limit=2")
    assert answer.json == {"items": ["a", "b"], "hasMore": True}


async def test_a_file_below_or_above_another_conflicts_on_a_store_of_folders(
    start: Start, session: aiohttp.ClientSession, store: Store
) -> None:
    deep = {**PHOTOS, "name": "deep", "storagePath": "photos/{id}/{part}"}
    browser = Browser(await start({"collections": [PHOTOS, deep]}, store), session)
    assert (await put(browser, "photos/a")).status == 200
    answer = await put(browser, "photos/a/b")
    if isinstance(store, MemoryStore):
        assert answer.status == 200
    else:
        assert (answer.status, answer.json["code"]) == (409, "key_conflict")
        assert (await browser.pull("photos/a")).body == BYTES


async def test_a_gzipped_body_is_stored_inflated(browser: Browser) -> None:
    zipped = {**PNG, "Content-Encoding": "gzip"}
    body = b"0123456789" * 9000
    assert (await put(browser, "photos/a", gzip.compress(body), zipped)).json["hash"] == (
        hashlib.sha256(body).hexdigest()
    )
    assert (await browser.pull("photos/a")).body == body
    assert (await put(browser, "photos/b", gzip.compress(b""), zipped)).json["hash"] == EMPTY
    for broken in (
        gzip.compress(body)[:-4],
        gzip.compress(body) + b"more",
        b"no gzip",
        b"",
        gzip.compress(BYTES) + gzip.compress(BYTES),
    ):
        assert (await put(browser, "photos/c", broken, zipped)).error == (400, "Invalid gzip body")
    assert (await put(browser, "photos/c", BYTES, {**PNG, "Content-Encoding": "br"})).status == 415
    bomb = gzip.compress(bytes(50_000_000))
    assert len(bomb) < 100_000
    assert (await put(browser, "photos/c", bomb, zipped)).error == (413, "Payload too large")
    assert (await browser.pull("photos/c")).json["hash"] == ""


async def test_a_body_that_is_too_long_leaves_nothing(browser: Browser) -> None:
    async def chunked(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 1000):
            yield b"x" * 1000

    for size, status in ((100_000, 200), (101_000, 413)):
        for body in (b"x" * size, chunked(size)):
            url = URL(f"{browser.base}/push/photos/{status}")
            async with browser.session.post(url, data=body, headers=PNG) as answer:
                assert answer.status == status
    assert (await browser.request("GET", "/list/photos")).json["items"] == ["200"]


@pytest.mark.parametrize("framing", ["Content-Length: 100", "Transfer-Encoding: chunked"])
async def test_a_body_that_ends_early_leaves_what_was_there(browser: Browser, framing: str) -> None:
    await put(browser, "photos/a")
    for key in ("a", "b"):
        head = f"POST /push/photos/{key} HTTP/1.1\r\nHost: h\r\nContent-Type: image/png\r\n{framing}\r\n\r\n"
        await raw(browser, head + "5\r\nhello\r\n", ends=True)
    assert (await browser.pull("photos/a")).body == BYTES
    assert (await browser.request("GET", "/list/photos")).json["items"] == ["a"]


@pytest.mark.slow
async def test_a_client_that_waits_to_continue_is_rejected_before_it_sends(browser: Browser) -> None:
    for head, first in (
        ("/push/photos/a HTTP/1.1\r\nContent-Type: text/html", b"415"),
        ("/push/photos/a HTTP/1.1\r\nContent-Type: image/png\r\nContent-Encoding: br", b"415"),
        (f"/push/u/{ISSUER.user_id}/a HTTP/1.1\r\nContent-Type: image/png", b"401"),
    ):
        answer = await raw(
            browser, f"POST {head}\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 " + first), answer
    head = "POST /push/photos/a HTTP/1.1\r\nHost: h\r\nContent-Type: image/png\r\nContent-Length: 2\r\n"
    reader, writer = await opened(browser)
    writer.write(f"{head}Expect: 100-continue\r\n\r\n".encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"ok")
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()


def person(browser: Browser, keys: Any) -> Signed:
    return Signed(browser.base, browser.session, keys, root_device(keys))


class Unsigned(Signed):
    """Signs an empty body, whatever it sends: as clients do with files."""

    def headers(self, method: str, target: str, body: bytes) -> dict[str, str]:
        return super().headers(method, target, b"")


async def test_the_signature_of_a_file_covers_an_empty_body(browser: Browser) -> None:
    signed = person(browser, SUBJECT)
    client = Unsigned(browser.base, browser.session, SUBJECT, root_device(SUBJECT))
    key = f"u/{SUBJECT.user_id}/a"
    assert (await put(signed, key)).error == (401, "Unauthorized")
    assert (await put(client, key)).status == 200
    assert (await client.pull(key)).body == BYTES
    assert (await put(browser, key)).status == 401
    assert (await browser.pull(key)).status == 401
    other = Unsigned(browser.base, browser.session, STRANGER, root_device(STRANGER))
    assert (await put(other, key)).status == 403
    assert (await other.pull(key)).status == 403


async def test_the_signature_of_json_covers_it_also_where_it_is_a_file(
    start: Start, session: aiohttp.ClientSession
) -> None:
    own = {**MINE, "allowedMimeTypes": ["*/*"]}
    base = await start({"collections": [own]})
    key, json_ = f"u/{SUBJECT.user_id}/a", {"Content-Type": "application/json"}
    assert (await put(person(Browser(base, session), SUBJECT), key, b"{}", json_)).status == 200
    client = Unsigned(base, session, SUBJECT, root_device(SUBJECT))
    assert (await put(client, key, b"{}", json_)).status == 401
    assert (await put(client, key, b"{}", PNG)).status == 200


async def test_a_file_that_is_declared_too_long_costs_no_signature(browser: Browser) -> None:
    client = Unsigned(browser.base, browser.session, SUBJECT, root_device(SUBJECT))
    key = f"u/{SUBJECT.user_id}/a"
    signed = client.headers("POST", f"/push/{key}", b"")
    assert (await put(browser, key, bytes(100_001), {**PNG, **signed})).status == 413
    assert (await put(browser, key, b"one", {**PNG, **signed})).status == 200


async def test_members_of_a_space_push_and_pull_its_files(
    start: Start, session: aiohttp.ClientSession
) -> None:
    only = {"readRoles": ["space:member"], "writeRoles": ["space:member"]}
    access = {
        **only,
        "name": "access",
        "storagePath": "spaces/{spaceId}/_access",
        "writeRoles": ["space:owner"],
    }
    own = {**PHOTOS, **only, "storagePath": "spaces/{spaceId}/{id}"}
    base = await start({"auth": {"spaces": {}}, "collections": [access, own]})
    owner = person(Browser(base, session), ISSUER)
    members = {"v": 1, "owner": ISSUER.user_id, "members": [SUBJECT.user_id]}
    assert (await owner.push("spaces/s/_access", members)).status == 200
    member, stranger = (Unsigned(base, session, keys, root_device(keys)) for keys in (SUBJECT, STRANGER))
    assert (await put(member, "spaces/s/a")).status == 200
    assert (await put(stranger, "spaces/s/a")).status == 403
    assert (await member.pull("spaces/s/a")).body == BYTES
    assert (await stranger.pull("spaces/s/a")).status == 403


async def test_a_replayed_push_is_rejected_before_its_body_is_read(browser: Browser) -> None:
    client = Unsigned(browser.base, browser.session, SUBJECT, root_device(SUBJECT))
    key = f"u/{SUBJECT.user_id}/a"
    signed = client.headers("POST", f"/push/{key}", b"")
    assert (await put(browser, key, b"one", {**PNG, **signed})).status == 200
    assert (await put(browser, key, b"two", {**PNG, **signed})).status == 401
    assert (await client.pull(key)).body == b"one"


async def test_files_count_against_limits_like_documents(
    start: Start, session: aiohttp.ClientSession
) -> None:
    limit = limit_of(2)
    metered = {**PHOTOS, "rateLimit": {"push": limit, "pull": limit}}
    browser = Browser(await start({"collections": [metered]}), session)
    assert [(await put(browser, "photos/a")).status for _ in range(3)] == [200, 200, 429]
    assert [(await browser.pull("photos/a")).status for _ in range(3)] == [200, 200, 429]


async def test_an_expired_file_is_missing_and_is_swept(
    start: Start, session: aiohttp.ClientSession, store: Store, clock: FakeClock
) -> None:
    short = [{**PHOTOS, "ttlMs": 1000}, {**MIXED, "ttlMs": 1000}]
    browser = Browser(await start({"collections": short}, store, now_ms=clock), session)
    for key in ("photos/a", "mixed/a"):
        await put(browser, key)
        assert (await browser.pull(key)).body == BYTES
    clock.now_ms += 1000
    assert (await browser.pull("photos/a")).body == BYTES
    clock.now_ms += 1
    for key in ("photos/a", "mixed/a"):
        for headers in ({}, {"If-None-Match": f'"{HASH}"'}, {"Range": "bytes=0-1"}):
            assert (await browser.pull(key, headers)).json["hash"] == ""
        assert "ETag" not in (await browser.request("HEAD", f"/pull/{key}")).headers
    assert (await browser.push("mixed/a", {"n": 1})).status == 200
    await put(browser, "photos/new")
    (app,) = start.apps  # type: ignore[attr-defined]
    await app.jobs.ttl_sweeper.sweep()
    assert await store.list("photos", None, 10) == ["new"]


async def test_push_is_announced_to_followers_and_plugins(
    start: Start, session: aiohttp.ClientSession, store: Store
) -> None:
    found = NotifiedPlugin()
    base = await start({"collections": [MINE]}, store, plugins=[found])
    client = Unsigned(base, session, SUBJECT, root_device(SUBJECT))
    key = f"u/{SUBJECT.user_id}/a"
    answer = await put(client, key)
    params = {"identity": SUBJECT.user_id, "id": "a"}
    (event,) = found.events
    assert (event.collection, event.params, event.body, event.identity) == (
        "mine", params, None, SUBJECT.user_id
    )  # fmt: skip
    assert {"hash": event.hash, "timestamp": event.timestamp} == answer.json
    (app,) = start.apps  # type: ignore[attr-defined]
    log = app.engine.outbox.log
    ((_, change),) = await log.read("", 10)
    ref, hash_, timestamp_ms, *_ = parse_change(change)
    assert (ref.params, hash_, timestamp_ms) == (params, HASH, answer.json["timestamp"])


async def test_plugins_may_answer_pulls_of_files(start: Start, session: aiohttp.ClientSession) -> None:
    reading = Reading(photos_a=plugins.PullResponse(b"another", "text/plain"))
    browser = Browser(await start({"collections": [PHOTOS, MIXED]}, plugins=[reading]), session)
    for key in ("photos/a", "photos/b", "mixed/a"):
        await put(browser, key)
    assert (await browser.pull("photos/a")).body == b"another"
    assert (await browser.pull("photos/b")).body == BYTES
    assert (await browser.pull("mixed/a")).body == BYTES
    assert [request.key for request in reading.queries] == ["photos/a", "photos/b", "mixed/a"]


async def test_roles_that_plugins_give_open_files(start: Start, session: aiohttp.ClientSession) -> None:
    guarded = {**PHOTOS, "readRoles": ["team"], "writeRoles": ["team"]}
    base = await start({"collections": [guarded]}, plugins=[Roles({SUBJECT.user_id: ["team"]})])
    inside = Unsigned(base, session, SUBJECT, root_device(SUBJECT))
    outside = Unsigned(base, session, STRANGER, root_device(STRANGER))
    assert (await put(outside, "photos/a")).status == 403
    assert (await put(inside, "photos/a")).status == 200
    assert (await inside.pull("photos/a")).body == BYTES
    assert (await outside.pull("photos/a")).status == 403
    assert (await inside.request("GET", "/list/photos")).json["items"] == ["a"]


async def test_a_store_that_fails_in_the_middle_cuts_the_answer(
    start: Start, session: aiohttp.ClientSession
) -> None:
    class Torn(MemoryStore):
        async def open(self, key: str, start: int = 0, end: int | None = None) -> Any:
            file = await super().open(key, start, end)

            async def chunks() -> AsyncIterator[bytes]:
                yield BYTES[:1000]
                raise StoreUnavailable

            if file is not None:
                object.__setattr__(file, "chunks", chunks())
            return file

    browser = Browser(await start({"collections": [PHOTOS]}, Torn()), session)
    await put(browser, "photos/a")
    with pytest.raises(aiohttp.ClientPayloadError):
        await browser.pull("photos/a")


@pytest.mark.parametrize("size", [100, 5000])
async def test_file_of_another_length_than_announced_aborts_the_answer(
    start: Start, session: aiohttp.ClientSession, size: int
) -> None:
    class Lying(MemoryStore):
        async def open(self, key: str, start: int = 0, end: int | None = None) -> Any:
            file = await super().open(key, start, end)
            if file is not None:
                object.__setattr__(file, "chunks", chunks_of_body(b"x" * 50, b"y" * (size - 50)))
            return file

    browser = Browser(await start({"collections": [PHOTOS]}, Lying()), session)
    await put(browser, "photos/a")
    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ClientOSError)):
        await browser.pull("photos/a")
    assert (await browser.pull("photos/none")).json["hash"] == "", "another connection, in order"


async def test_store_that_cannot_take_a_file_is_reported(
    start: Start, session: aiohttp.ClientSession
) -> None:
    store = FaultyStore(MemoryStore())
    browser = Browser(await start({"collections": [PHOTOS]}, store), session)
    store.fail("write")
    assert (await put(browser, "photos/a")).error == (503, "store_unavailable")
    assert (await put(browser, "photos/a")).status == 200


async def test_pages_elsewhere_may_request_ranges(start: Start, session: aiohttp.ClientSession) -> None:
    cors = {"origins": ["https://a.example"]}
    browser = Browser(await start({"collections": [PHOTOS], "server": {"cors": cors}}), session)
    await put(browser, "photos/a")
    origin = {"Origin": "https://a.example"}
    allowed = (await browser.request("OPTIONS", "/pull/photos/a", headers=origin)).headers
    assert {"Range", "If-Range"} <= set(allowed["Access-Control-Allow-Headers"].split(", "))
    part = await browser.pull("photos/a", {**origin, "Range": "bytes=0-1"})
    assert "Content-Range" in part.headers["Access-Control-Expose-Headers"]


async def test_clients_learn_the_accepted_types_of_a_collection(
    start: Start, session: aiohttp.ClientSession
) -> None:
    members = {"collections": [PHOTOS, MIXED], "configEndpoint": {"auth": "public"}}
    browser = Browser(await start(members), session)
    found = (await browser.request("GET", "/config")).json["collections"]
    assert [each["allowedMimeTypes"] for each in found] == [
        ["image/*", "text/plain"], ["application/json", "image/png"]
    ]  # fmt: skip


async def opened(browser: Browser) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = URL(browser.base)
    return await asyncio.open_connection(url.host, url.port)


async def raw(browser: Browser, text: str, *, ends: bool = False) -> bytes:
    """The head of the answer to these bytes; `ends`: nothing comes after them, and there may be none."""
    reader, writer = await opened(browser)
    writer.write(text.encode())
    if ends:
        writer.write_eof()
    try:
        return await reader.read() if ends else await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()


async def chunks_of_body(*each: bytes) -> AsyncIterator[bytes]:
    for chunk in each:
        yield chunk
