"""How much of a request the service takes: paths, and bodies that it refuses."""

import asyncio
import json
from urllib.parse import quote, unquote

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import PUBLIC
from support.nginx_fixture import open_request
from support.uploads import upload
from yarl import URL

from pysync.store.memory import MemoryStore

INVALID_PATH = (400, "Invalid path parameter")


@pytest.mark.parametrize(("last", "is_admitted"), [(196, True), (197, False)])
async def test_a_key_has_at_most_1000_bytes(
    start: Start, session: aiohttp.ClientSession, last: int, is_admitted: bool
) -> None:
    deep = {"name": "deep", "storagePath": "{a}/{b}/{c}/{d}/{e}", **PUBLIC}
    browser = Browser(await start({"collections": [deep]}), session)
    key = "/".join("x" * size for size in (200, 200, 200, 200, last))
    for answer in (await browser.pull(key), await browser.push(key, {"n": 1})):
        assert (answer.status == 200) if is_admitted else (answer.error == INVALID_PATH)


@pytest.mark.parametrize(
    "bad",
    [
        "a..b",
        "..a",
        "a..",
        "...",
        "a%2e.b",
        "a%2E%2Eb",
        ".",
        "..",
        "",
        "a%0A",
        "a%00b",
        "a%7F",
        "%01",
        "a%2Fb",
    ],
)
async def test_unsafe_keys_are_rejected_on_every_route(
    start: Start, session: aiohttp.ClientSession, bad: str
) -> None:
    """Before authentication: even where none would be accepted."""
    store = MemoryStore()
    closed = {"readRoles": ["admin"], "writeRoles": ["admin"]}
    service = {
        "auth": {"adminToken": "token-of-the-tests"},
        "collections": [
            {"name": "notes", "storagePath": "notes/{id}/x", **closed},
            {"name": "deep", "storagePath": "notes/{id}/y/{last}", "listable": True, **closed},
            {"name": "photos", "storagePath": "photos/{id}/x", "allowedMimeTypes": ["image/png"], **closed},
            {"name": "log", "storagePath": "log/{id}/x", "appendOnly": True, **closed},
            {"name": "part", "storagePath": "board/{id}", "bundle": "board", **PUBLIC},
            {"name": "open", "storagePath": "open/{id}", **PUBLIC},
        ],
        "namespaces": {"acme": {"collections": [{"name": "n", "storagePath": "acme/{id}", **closed}]}},
    }
    browser = Browser(await start(service, store=store), session)
    for target in (
        f"/pull/notes/{bad}/x", f"/pull/photos/{bad}/x", f"/pull/log/{bad}/x?last=1", f"/pull/board/{bad}",
        f"/list/notes/{bad}/y", f"/acme/pull/acme/{bad}",
    ):  # fmt: skip
        assert (await browser.request("GET", target)).error == INVALID_PATH, target
        assert (await browser.request("HEAD", target)).status == 400
    for target in (f"/push/notes/{bad}/x", f"/push/log/{bad}/x", f"/push/board/{bad}/part"):
        assert (await browser.request("POST", target, {"data": {}})).error == INVALID_PATH, target
    png = {"Content-Type": "image/png"}
    assert (await browser.request("POST", f"/push/photos/{bad}/x", b"x", png)).error == INVALID_PATH
    listed = await browser.request("GET", f"/list/notes/a/y?after={bad}")
    assert listed.status in (400, 401), "who may list is told first"
    value = {"id": unquote(bad)}
    params = quote(json.dumps({"open": [value]}))
    entry = (await browser.request("GET", f"/batch/pull?collections=open&params={params}")).json
    assert entry["collections"]["open"] == [{"error": "Invalid path parameter"}]
    stream = await browser.request(
        "GET", "/events?collections=open&params=" + quote(json.dumps({"open": value}))
    )
    assert stream.status == 400
    assert await store.list("", None, 10) == []


async def test_a_single_dot_within_a_segment_is_fine(start: Start, session: aiohttp.ClientSession) -> None:
    browser = Browser(
        await start({"collections": [{"name": "n", "storagePath": "n/{id}", **PUBLIC}]}), session
    )
    for key in ("n/a.b", "n/.a", "n/a.", "n/a.b.c"):
        assert (await browser.push(key, {"n": 1})).status == 200
        assert (await browser.pull(key)).json["data"] == {"n": 1}


@pytest.mark.parametrize("first", ["_pysync", "%5Fpysync"])
async def test_no_template_reaches_the_servers_own_keys(
    start: Start, session: aiohttp.ClientSession, first: str
) -> None:
    store = MemoryStore()
    wide = {"name": "wide", "storagePath": "{space}/{kind}/{id}", **PUBLIC}
    browser = Browser(await start({"collections": [wide]}, store=store), session)
    key = f"{first}/revocations/{'0' * 32}"
    assert (await browser.push(key, {"n": 1})).error == INVALID_PATH
    assert (await browser.pull(key)).error == INVALID_PATH
    assert await store.list("", None, 10) == []
    assert (await browser.push("space/_pysync/a", {"n": 1})).status == 200, "reserved is the first segment"


async def test_request_line_may_have_16_kb(start: Start, session: aiohttp.ClientSession) -> None:
    base = await start({"collections": [{"name": "n", "storagePath": "n/{id}", **PUBLIC}]})
    longest = "/batch/pull?collections=n&unknown=".ljust(16 * 1024 - len("OPTIONS  HTTP/1.1\r\n"), "x")
    for target, value, status in (
        (longest, "", b"200"),
        (f"{longest}x", "", b"414"),
        (longest, "x" * (16 * 1024 + 1), b"400"),  # headers have a limit of their own
    ):
        reader, writer = await open_request(base, "GET", target, {"Connection": "close", "X-Long": value})
        response = await reader.read()
        assert response.split(b" ", 2)[1] == status
        assert (status == b"414") == (b'"code":"uri_too_long"' in response)
        writer.close()


async def test_a_rejected_upload_is_not_read_to_its_end(start: Start) -> None:
    small = {"name": "small", "storagePath": "small/{id}", "maxBodyBytes": 1024, **PUBLIC}
    url = URL(await start({"collections": [small]}))
    size = 256 * 1024 * 1024
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /push/small/a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % size
    )
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 413 ")
    taken = await upload(writer, size)
    assert taken < 16 * 1024 * 1024, "64 KiB, and what the buffers of two sockets hold"
    writer.close()
