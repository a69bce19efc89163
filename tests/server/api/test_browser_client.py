"""`/client/`: the browser client, which pages of every origin may import."""

import hashlib
from typing import Any

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import NOTES
from support.configurations import ROOT

from pysync import __version__

MODULE = (ROOT / "pysync/web/pysync.js").read_bytes()
NEWEST, VERSIONED, TYPES = "/client/pysync.js", f"/client/{__version__}/pysync.js", "/client/pysync.d.ts"


async def served(start: Start, session: aiohttp.ClientSession, **server: Any) -> Browser:
    return Browser(await start({"server": server}), session)


@pytest.mark.parametrize(
    ("path", "age"), [(NEWEST, "no-cache"), (VERSIONED, "public, max-age=31536000, immutable")]
)
async def test_module_is_served_as_a_script_with_its_age(
    start: Start, session: aiohttp.ClientSession, path: str, age: str
) -> None:
    browser = await served(start, session)
    module = await browser.request("GET", path)
    assert (module.status, module.body) == (200, MODULE)
    assert module.headers["Content-Type"] == "text/javascript; charset=utf-8"
    assert module.headers["Cache-Control"] == age
    assert module.headers["X-Content-Type-Options"] == "nosniff"
    head = await browser.request("HEAD", path)
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", str(len(MODULE)))


async def test_types_are_served_as_text(start: Start, session: aiohttp.ClientSession) -> None:
    types = await (await served(start, session)).request("GET", TYPES)
    assert types.body == (ROOT / "pysync/web/pysync.d.ts").read_bytes()
    assert types.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert types.headers["Cache-Control"] == "no-cache"


@pytest.mark.parametrize("path", [NEWEST, VERSIONED, TYPES])
async def test_unchanged_file_is_not_sent_again(
    start: Start, session: aiohttp.ClientSession, path: str
) -> None:
    browser = await served(start, session)
    first = await browser.request("GET", path)
    tag = first.headers["ETag"]
    assert tag == f'"{hashlib.sha256(first.body).hexdigest()}"'
    again = await browser.request("GET", path, headers={"If-None-Match": tag})
    assert (again.status, again.body, again.headers["ETag"]) == (304, b"", tag)
    assert again.headers["Cache-Control"] == first.headers["Cache-Control"]
    assert again.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("origins", [[], ["https://app.example"], ["*"]])
async def test_page_of_any_origin_may_import_it(
    start: Start, session: aiohttp.ClientSession, origins: list[str]
) -> None:
    """With one header, as a browser rejects two."""
    browser = await served(start, session, cors={"origins": origins})
    for origin in ("https://app.example", "https://other.example"):
        module = await browser.request("GET", NEWEST, headers={"Origin": origin})
        assert module.headers.getall("Access-Control-Allow-Origin") == ["*"]
        assert module.headers["Cross-Origin-Resource-Policy"] == "cross-origin"


async def test_module_is_below_the_mount_path_also_beside_operators(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = await served(start, session, mountPath="/v1", admin={"port": 1})
    for path in (NEWEST, VERSIONED, TYPES):
        assert (await browser.request("GET", f"/v1{path}")).status == 200
        assert (await browser.request("GET", path)).status == 404


async def test_nothing_else_is_served_there(start: Start, session: aiohttp.ClientSession) -> None:
    browser = await served(start, session)
    for path in ("", "other.js", "0.0.1/pysync.js", "..%2Fpysync.js", "../errors.py", "pysync.js/"):
        assert (await browser.request("GET", f"/client/{path}")).status in (400, 404), path
    assert (await browser.request("POST", NEWEST, {})).status == 405


async def test_namespace_named_client_keeps_its_paths(start: Start, session: aiohttp.ClientSession) -> None:
    browser = Browser(await start({"namespaces": {"client": {"collections": [NOTES]}}}), session)
    assert (await browser.request("POST", "/client/push/notes/a", {"data": {"n": 1}})).status == 200
    assert (await browser.request("GET", "/client/pull/notes/a")).json["data"] == {"n": 1}
    assert (await browser.request("GET", NEWEST)).body == MODULE


async def test_routes_are_described(start: Start, session: aiohttp.ClientSession) -> None:
    browser = await served(start, session)
    paths = (await browser.request("GET", "/openapi.json")).json["paths"]
    for path, kind in ((NEWEST, "text/javascript"), (VERSIONED, "text/javascript"), (TYPES, "text/plain")):
        assert set(paths[path]["get"]["responses"]["200"]["content"]) == {f"{kind}; charset=utf-8"}
