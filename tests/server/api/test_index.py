"""`GET /`: what a service says about itself to a browser and to programs."""

import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.browser import driven
from support.clients import Browser, Start
from support.collections import NOTES

from pysync import __version__

ROOTS = ["/", "/v1/", "/v1"]
HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def served(start: Start, session: aiohttp.ClientSession, **server: Any) -> Browser:
    return Browser(await start({"server": server, "collections": [NOTES]}), session)


def links(page: bytes) -> list[str]:
    """The targets of the links of a page."""
    return re.findall(r'<a href="([^"]*)"', page.decode())


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    (tmp_path / "index.html").write_text("index")
    (tmp_path / "one.html").write_text("one")
    (tmp_path / "style.css").touch()
    return tmp_path


@pytest.mark.parametrize("path", ROOTS)
async def test_root_names_the_service_to_programs(
    start: Start, session: aiohttp.ClientSession, path: str
) -> None:
    browser = await served(start, session, mountPath="/v1")
    reply = await browser.request("GET", path)
    assert (reply.status, reply.headers["Content-Type"]) == (200, "application/json")
    assert reply.json["name"] == "pysync"
    assert reply.json["version"] == __version__
    assert reply.json["openapi"] == "/v1/openapi.json"
    assert "examples" not in reply.json
    assert (await browser.request("GET", reply.json["openapi"])).status == 200


@pytest.mark.parametrize("path", ROOTS)
async def test_root_is_a_page_for_browsers_whose_links_lead_somewhere(
    start: Start, session: aiohttp.ClientSession, path: str, pages: Path
) -> None:
    browser = await served(start, session, mountPath="/v1", examples=str(pages))
    reply = await browser.request("GET", path, headers=HTML)
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "Accept" in reply.headers["Vary"]
    assert links(reply.body) == ["/v1/openapi.json", "/v1/examples/"]
    for link in links(reply.body):
        assert (await browser.request("GET", link)).status == 200


async def test_head_of_the_root_has_the_headers_alone(start: Start, session: aiohttp.ClientSession) -> None:
    browser = await served(start, session)
    page = await browser.request("GET", "/", headers=HTML)
    head = await browser.request("HEAD", "/", headers=HTML)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == str(len(page.body))


async def test_root_lists_the_example_pages_if_they_have_no_index(
    start: Start, session: aiohttp.ClientSession, pages: Path
) -> None:
    (pages / "index.html").unlink()
    browser = await served(start, session, examples=str(pages))
    assert (await browser.request("GET", "/")).json["examples"] == ["/examples/one.html"]
    assert (await browser.request("GET", "/examples")).status == 404


async def test_root_says_no_more_than_the_public_address_where_operators_have_their_own(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = await served(start, session, admin={"port": 0})
    assert (await browser.request("GET", "/")).json == {"name": "pysync"}
    page = await browser.request("GET", "/", headers=HTML)
    assert links(page.body) == []
    assert __version__.encode() not in page.body


@pytest.mark.parametrize("mount", ["", "/v1"])
async def test_examples_without_a_slash_lead_to_their_index(
    start: Start, session: aiohttp.ClientSession, pages: Path, mount: str
) -> None:
    browser = await served(start, session, mountPath=mount, examples=str(pages))
    async with session.get(f"{browser.base}{mount}/examples", allow_redirects=False) as moved:
        assert (moved.status, moved.headers["Location"]) == (301, f"{mount}/examples/")
    assert (await browser.request("GET", f"{mount}/examples")).body == b"index"


@pytest.mark.parametrize("path", ["//", "/index.html", "/v1", "/v1/", "/favicon.ico", "/pull"])
async def test_other_paths_without_a_key_are_not_found(
    start: Start, session: aiohttp.ClientSession, path: str
) -> None:
    browser = await served(start, session)
    assert (await browser.request("GET", path, headers=HTML)).error == (404, "Not found")


async def test_root_page_loads_nothing_and_its_policy_allows_its_own_style(
    start: Start, session: aiohttp.ClientSession, chromium: str
) -> None:
    browser = await served(start, session)
    policy = (await browser.request("GET", "/", headers=HTML)).headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert not re.search(r"unsafe|https?:|[*]", policy)
    async with driven(chromium) as screen:
        window = await screen.open(f"{browser.base}/")
        assert await window.run("getComputedStyle(document.body).maxWidth") == "640px"
        assert await window.run("performance.getEntriesByType('resource').length") == 0
        assert screen.complaints == []
