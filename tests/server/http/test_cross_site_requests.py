"""Pages of other sites: what a browser sends for them without asking first is not stored."""

from typing import Any

import aiohttp
import pytest
from support.clients import ISSUER, Browser, Signed, Start, root_device
from support.collections import collection

FILES = collection("files", "files/{name}", allowedMimeTypes=["*/*", "application/json"])
OTHER_SITE = "https://evil.example"
SIMPLE = [
    "text/plain",
    "Text/Plain; charset=utf-8",
    "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded",
    "",
]


async def sent(browser: Browser, content_type: str | None, **headers: str) -> tuple[int, str]:
    """The status, and the code of a refusal, of a push with these headers; no `content_type`: none at all."""
    if content_type:
        headers["Content-Type"] = content_type
    skipped = () if content_type else ("Content-Type",)
    async with browser.session.post(
        browser.base + "/push/files/a", data=b'{"data":{}}', headers=headers, skip_auto_headers=skipped
    ) as answer:
        return answer.status, (await answer.json()).get("code", "")


async def serving(start: Start, session: aiohttp.ClientSession, **server: Any) -> Browser:
    return Browser(await start({"collections": [FILES], "server": server}), session)


@pytest.mark.parametrize("content_type", SIMPLE)
@pytest.mark.parametrize("origin", [OTHER_SITE, "null", "https://evil.example:8443", "nonsense"])
async def test_request_of_another_site_without_a_preflight_is_rejected(
    start: Start, session: aiohttp.ClientSession, content_type: str, origin: str
) -> None:
    browser = await serving(start, session, cors={"origins": ["https://app.example"]})
    assert await sent(browser, content_type, Origin=origin) == (403, "foreign_origin")
    assert (await browser.pull("files/a")).json["hash"] == ""


@pytest.mark.parametrize("content_type", SIMPLE[:-1])
async def test_own_pages_allowed_pages_and_programs_push_as_they_did(
    start: Start, session: aiohttp.ClientSession, content_type: str
) -> None:
    browser = await serving(start, session, cors={"origins": ["https://app.example"]})
    for headers in (
        {},
        {"Origin": "https://app.example"},
        {"Origin": browser.base},
        {"Origin": "https://files.example", "Host": "files.example"},
        {"Origin": "https://files.example", "Host": "Files.Example:443"},
        {"Origin": "http://files.example", "Host": "files.example:80"},
    ):
        assert await sent(browser, content_type, **headers) == (200, "")
    anybody = await serving(start, session, cors={"origins": ["*"]})
    assert await sent(anybody, content_type, Origin="null") == (200, "")


async def test_page_of_another_public_host_is_accepted(start: Start, session: aiohttp.ClientSession) -> None:
    browser = await serving(start, session, publicHosts=["one.example", "two.example"])
    origins = {"https://two.example": 200, "https://three.example": 403}
    for origin, status in origins.items():
        assert (await sent(browser, "text/plain", Origin=origin, Host="one.example"))[0] == status


async def test_request_with_a_preflight_is_not_checked(start: Start, session: aiohttp.ClientSession) -> None:
    browser = await serving(start, session)
    for content_type in ("application/json", "image/png"):
        assert await sent(browser, content_type, Origin=OTHER_SITE) == (200, "")
    signed = Signed(browser.base, session, ISSUER, root_device(ISSUER))
    headers = {"Origin": OTHER_SITE, "Content-Type": "text/plain"}
    assert (await signed.request("POST", "/push/files/b", b"text", headers)).status == 200
    assert (await browser.request("GET", "/pull/files/a", headers={"Origin": OTHER_SITE})).status == 200


async def test_headers_that_a_browser_adds_by_itself_are_no_credential(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """Of a site behind a password it knows that, and sends it for pages of other sites too."""
    browser = await serving(start, session)
    basic = {"Origin": OTHER_SITE, "Authorization": "Basic dXNlcjpwYXNz"}
    assert await sent(browser, "text/plain", **basic) == (403, "foreign_origin")
    assert (await browser.pull("files/a")).json["hash"] == ""
