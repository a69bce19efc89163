"""The files of `server.examples`: served as they are, and nothing else of the host."""

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import Browser, Start
from support.configurations import ROOT, collection, config, faults

from pysync.config import load, parse
from pysync.server.api.examples import MAX_BYTES
from pysync.server.process.serve import banner

PAGES = sorted((ROOT / "deploy/examples").glob("*.html"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pages"
    folder.mkdir()
    (folder / "page.html").write_text("<title>page</title>")
    return folder


async def served(start: Start, session: aiohttp.ClientSession, folder: Path, **server: Any) -> Browser:
    """A service with the files of `folder`."""
    return Browser(await start({"server": {"examples": str(folder), **server}}), session)


async def test_a_page_is_served_with_headers_that_let_it_talk_to_this_service_alone(
    start: Start, session: aiohttp.ClientSession, folder: Path
) -> None:
    browser = await served(start, session, folder)
    page = await browser.request("GET", "/examples/page.html")
    assert (page.status, page.body) == (200, b"<title>page</title>")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.headers["Cache-Control"] == "no-cache"
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(each.split(" ", 1) for each in page.headers["Content-Security-Policy"].split("; "))
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert not re.search(r"[*]|https?:", page.headers["Content-Security-Policy"])
    head = await browser.request("HEAD", "/examples/page.html")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == str(len(page.body))


async def test_a_page_that_has_not_changed_is_not_sent_again(
    start: Start, session: aiohttp.ClientSession, folder: Path
) -> None:
    browser = await served(start, session, folder)
    tag = (await browser.request("GET", "/examples/page.html")).headers["ETag"]
    again = await browser.request("GET", "/examples/page.html", headers={"If-None-Match": tag})
    assert (again.status, again.body, again.headers["ETag"]) == (304, b"", tag)
    (folder / "page.html").write_text("edited")
    edited = await browser.request("GET", "/examples/page.html", headers={"If-None-Match": tag})
    assert (edited.status, edited.body) == (200, b"edited")


async def test_each_kind_of_file_has_its_type(
    start: Start, session: aiohttp.ClientSession, folder: Path
) -> None:
    kinds = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "json": "application/json"}
    for suffix in kinds:
        (folder / f"a.{suffix}").touch()
    browser = await served(start, session, folder)
    for suffix, expected in kinds.items():
        answer = await browser.request("GET", f"/examples/a.{suffix}")
        assert answer.headers["Content-Type"].startswith(expected)


async def test_the_index_is_at_the_folder_and_everything_is_below_the_mount(
    start: Start, session: aiohttp.ClientSession, folder: Path
) -> None:
    browser = await served(start, session, folder, mountPath="/v1")
    assert (await browser.request("GET", "/v1/examples/page.html")).status == 200
    assert (await browser.request("GET", "/v1/examples/")).status == 404
    assert (await browser.request("GET", "/examples/page.html")).status == 404
    (folder / "index.html").write_text("index")
    browser = await served(start, session, folder, mountPath="/v1")
    index = await browser.request("GET", "/v1/examples/")
    assert (index.body, index.headers["Content-Type"]) == (b"index", "text/html; charset=utf-8")


async def test_nothing_but_plain_files_of_known_kinds_is_served(
    start: Start, session: aiohttp.ClientSession, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret.html").write_text("secret")
    (folder / "link.html").symlink_to(tmp_path / "secret.html")
    (folder / ".hidden.html").write_text("secret")
    (folder / "key.pem").write_text("secret")
    (folder / "{any}.html").write_text("secret")
    (folder / "large.html").write_bytes(b"x" * (MAX_BYTES + 1))
    (folder / "deeper.html").mkdir()
    (folder / "deeper.html" / "page.html").write_text("secret")
    os.mkfifo(folder / "pipe.html")
    browser = await served(start, session, folder)
    for name in (
        "link.html",
        ".hidden.html",
        "key.pem",
        "%7Bany%7D.html",
        "large.html",
        "deeper.html",
        "deeper.html/page.html",
        "pipe.html",
        "../secret.html",
        "..%2Fsecret.html",
        "%2e%2e/secret.html",
        "page.html/",
        "page.html%00",
        "",
        "other.html",
    ):
        answer = await browser.request("GET", f"/examples/{name}")
        assert answer.status in (400, 404), name
        assert b"secret" not in answer.body
    assert (await browser.request("POST", "/examples/page.html", {})).status == 405


async def test_a_file_that_has_become_something_else_is_not_followed(
    start: Start, session: aiohttp.ClientSession, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret.html").write_text("secret")
    browser = await served(start, session, folder)
    page = folder / "page.html"
    page.unlink()
    assert (await browser.request("GET", "/examples/page.html")).status == 404
    page.symlink_to(tmp_path / "secret.html")
    assert (await browser.request("GET", "/examples/page.html")).status == 404
    page.unlink()
    os.mkfifo(page)
    assert (await browser.request("GET", "/examples/page.html")).body == b""
    page.unlink()
    page.mkdir()
    assert (await browser.request("GET", "/examples/page.html")).status == 404


async def test_without_a_folder_there_is_no_route(start: Start, session: aiohttp.ClientSession) -> None:
    browser = Browser(await start({}), session)
    assert (await browser.request("GET", "/examples/notes.html")).status == 404
    with pytest.raises(ValueError, match=r"server\.examples: /nowhere: No such file"):
        await start({"server": {"examples": "/nowhere"}})


async def test_the_files_are_described(start: Start, session: aiohttp.ClientSession, folder: Path) -> None:
    browser = await served(start, session, folder)
    described = (await browser.request("GET", "/openapi.json")).json["paths"]["/examples/page.html"]["get"]
    assert set(described["responses"]["200"]["content"]) == {"text/html; charset=utf-8"}


def test_a_namespace_cannot_take_the_path_of_the_examples() -> None:
    space = {"examples": {"collections": [collection()]}}
    assert faults({"namespaces": space, "server": {"examples": "pages"}}) == [
        ("namespaces.examples", "server.examples has that path: use another name")
    ]
    assert parse(config(namespaces=space)).namespaces, "which is free otherwise"


def test_the_banner_names_the_pages(folder: Path) -> None:
    (folder / "index.html").touch()
    (folder / "a.css").touch()
    settings = parse(config(server={"examples": str(folder), "mountPath": "/v1"}))
    printed = banner(settings, 8080).splitlines()
    at = printed.index("Open in two windows of a browser:")
    assert printed[at + 1 :] == ["  http://127.0.0.1:8080/v1/examples/page.html"]
    assert "browser" not in banner(parse(config()), 8080)


# --- the pages of deploy/examples ------------------------------------------------------------------------


class Links(HTMLParser):
    """What a page has its browser load, or leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")
        ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_of_ours_needs_nothing_but_its_server(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"https?://|@import|\burl\(|\bimport\(", text), "no address of elsewhere"
    modules = {"../client/pysync.js", *(f"./{module.name}" for module in page.parent.glob("*.js"))}
    assert modules.issuperset(re.findall(r'\bfrom "([^"]*)"', text))
    links = Links()
    links.feed(text)
    others = {other.name for other in PAGES}
    assert all(link in others | {"data:,"} for link in links.found), links.found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
async def test_make_serve_serves_our_pages(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, page: Path
) -> None:
    monkeypatch.chdir(ROOT)
    folder = load("deploy/example.json", {}).server.examples
    assert folder is not None
    browser = await served(start, session, Path(folder))
    assert (await browser.request("GET", f"/examples/{page.name}")).body == page.read_bytes()
