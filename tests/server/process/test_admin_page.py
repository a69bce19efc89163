"""The page of operators in a real browser: all that it shows, with the keyboard alone, and on a phone."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from components import free_port
from support.bit_rot import rot_rows
from support.browser import Window, driven
from support.cli_service import ADMIN_TOKEN
from support.clients import STRANGER, SUBJECT, Browser, Signed, root_device
from support.collections import LOG, MINE, NOTES, OWN, collection
from support.worker_processes import Service, workers

from pysync import config
from pysync.auth.certificates import user_id
from pysync.errors import CoordinatorUnavailable, StoreUnavailable, Unavailable
from pysync.server.app import create_app
from pysync.server.process.admin import AdminListener
from pysync.store.memory import MemoryStore

ROOT: Final = Path(__file__).parents[3]
PAGE: Final = ROOT / "pysync/server/process/admin.html"
ME: Final = user_id(SUBJECT.ed_pub)
KEPT: Final = collection("kept", "kept/{identity}/{id}", history={}, **OWN)
MEMBERS: Final[dict[str, Any]] = {
    "auth": {"adminToken": ADMIN_TOKEN},
    "collections": [NOTES, MINE, LOG, KEPT],
    "quotas": {},
    "webhooks": [
        {
            "name": "nobody",
            "url": "http://127.0.0.1:9/",
            "collections": ["notes"],
            "secret": "whsec_" + "A" * 32,
            "allowPrivate": True,
        }
    ],
}
OLD: Final = ("notes/old", "notes/older")
"""Documents that are read, and not written again."""
SCREENSHOT: Final = "TESTS_SCREENSHOT"
"""If it is set, the screenshot of the documentation is made."""

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(180)]


class Screen:
    """A browser with the page of a service that somebody uses."""

    def __init__(self, window: Window, service: Service, folder: Path) -> None:
        self.window = window
        self.service = service
        self.folder = folder

    async def text(self, id_: str) -> str:
        found: str = await self.window.run(f"document.getElementById('{id_}').innerText")
        return found

    async def unlock(self, token: str = ADMIN_TOKEN) -> None:
        await self.window.run("document.getElementById('token').focus()")
        await self.window.type(token)
        await self.window.press("Enter", 13, "\r")

    async def enter(self, id_: str, text: str) -> None:
        await self.window.run(f"document.getElementById('{id_}').value = {text!r}")

    async def click(self, selector: str) -> None:
        await self.window.run(f"document.querySelector('{selector}').click()")

    async def until_shown(self, id_: str, text: str) -> None:
        await self.window.until(f"document.getElementById('{id_}').innerText.includes({text!r})")


@asynccontextmanager
async def under_load(base: str) -> AsyncIterator[None]:
    """Somebody reads and writes documents, logs and what is not theirs, and follows the changes."""

    async def use(session: aiohttp.ClientSession) -> None:
        anyone = Browser(base, session)
        owner, stranger = (Signed(base, session, keys, root_device(keys)) for keys in (SUBJECT, STRANGER))
        versions: dict[str, str] = {}
        for old in OLD:
            await anyone.push(old, {})
        for n in range(1_000_000):
            key, note = f"kept/{ME}/{n % 5}", f"notes/{n % 50}"
            for caller, each in ((owner, key), (anyone, note)):
                pushed = await caller.push(each, {"n": n}, versions.get(each))
                if pushed.status == 200:
                    versions[each] = pushed.json["hash"]
            for each in (note, note, note, *OLD):
                await anyone.pull(each)
            await anyone.request("POST", "/push/log/a", {"data": {"n": n}})
            if n % 10 == 0:
                await anyone.push(note, {})
                await stranger.pull(key, {"X-Request-Id": f"stranger-{n}"})

    async with aiohttp.ClientSession() as session, session.get(f"{base}/events?collections=log"):
        using = asyncio.create_task(use(session))
        try:
            yield
        finally:
            using.cancel()
            with suppress(asyncio.CancelledError, aiohttp.ClientError):
                await using


@pytest.fixture
def number() -> int:
    """The number of workers."""
    return 2


@pytest.fixture
async def screen(tmp_path: Path, chromium: str, number: int) -> AsyncIterator[Screen]:
    """A service of several workers under load, and its page, which is locked."""
    admin = free_port()
    async with (
        workers(tmp_path, server={"workers": number, "admin": {"port": admin}}, **MEMBERS) as service,
        under_load(service.base),
        driven(chromium) as browser,
    ):
        window = await browser.open(f"http://127.0.0.1:{admin}/admin")
        await window.show_as(1280, 900)
        yield Screen(window, service, tmp_path)
        assert browser.complaints == []  # also of what the policy of the page forbids


async def test_all_panels_show_a_service_under_load(screen: Screen) -> None:
    window = screen.window
    await screen.until_shown("state", "Ready")
    await window.until("parseFloat(document.querySelector('.tile b').innerText) > 0")
    for id_, text in (
        ("about", "2 workers"),
        ("actions", "append"),
        ("operations", "store commit"),
        ("reasons", "hash_mismatch"),
        ("workers", "serves"),
        ("health", "answers"),
        ("followers", "webhook nobody"),
        ("problems", "Failed deliveries of webhooks"),
        ("collections", "u/{identity}/{id}"),
        ("warnings", "anyone may write"),
    ):
        await screen.until_shown(id_, text)
    assert await screen.text("changes") == ""
    if SCREENSHOT in os.environ:
        await window.show_as(1280, 800)
        await window.until("document.querySelector('.tile path').getAttribute('d').split('L').length > 27")
        (ROOT / "docs/assets/operators.png").write_bytes(await window.screenshot())
    await screen.unlock()
    rot_rows(screen.folder / "data", *OLD)
    await screen.until_shown("changes", f"kept/{ME}/1")
    await screen.until_shown("refusals", "403 roles")
    await screen.until_shown("usage", "(root)")
    await screen.until_shown("problems", "Damaged objects met")
    await screen.until_shown("damage", OLD[0])
    await screen.click("#damage tr:last-child button")
    await screen.until_shown("facts", "Damage")
    await screen.enter("key", f"kept/{ME}/1")
    await screen.click("#lookup button")
    await screen.until_shown("facts", f"kept (identity={ME}, id=1)")
    await screen.until_shown("history", ME[:10])
    refused = await window.run("document.querySelector('#refusals tr').cells[3].innerText")
    await screen.enter("request", refused)
    await screen.click("#search button")
    await window.until("document.querySelectorAll('#refusals tr').length === 1")


async def test_a_phone_scrolls_in_one_direction(screen: Screen) -> None:
    await screen.unlock()
    await screen.until_shown("changes", ME)
    await screen.until_shown("refusals", "403 roles")
    shown = "[...document.querySelectorAll('button:not(.plain), input')].filter((one) => one.offsetParent)"
    backs = set()
    for scheme in ("light", "dark"):
        await screen.window.show_as(360, 740, scheme)
        await screen.window.until("innerWidth === 360")
        assert await screen.window.run("document.documentElement.scrollWidth") == 360
        assert await screen.window.run(f"Math.min(...{shown}.map((one) => one.offsetHeight))") >= 44
        backs.add(await screen.window.run("getComputedStyle(document.body).backgroundColor"))
    assert len(backs) == 2


async def test_a_wrong_token_is_named_and_not_kept(screen: Screen) -> None:
    await screen.unlock("not-the-admin-token")
    await screen.until_shown("wrong", "This is not the admin token.")
    assert await screen.window.run("sessionStorage.length") == 0
    assert await screen.window.run("document.activeElement.id") == "token"
    assert await screen.window.run("document.getElementById('changes').offsetParent") is None
    await screen.window.run("document.getElementById('token').value = ''")
    await screen.unlock()
    await screen.until_shown("changes", ME)
    assert await screen.text("wrong") == ""
    await screen.window.run("document.getElementById('forget').click()")
    assert await screen.text("changes") == ""
    assert await screen.window.run("sessionStorage.length") == 0


async def test_a_killed_worker_and_its_replacement_are_shown(screen: Screen) -> None:
    killed, other = (screen.service.pids()[number] for number in (1, 2))
    await screen.until_shown("workers", str(killed))
    await screen.service.kill(1)
    await screen.until_shown("problems", "Workers replaced")
    await screen.until_shown("workers", str(screen.service.pids()[1]))
    shown = await screen.text("workers")
    assert str(other) in shown
    assert str(killed) not in shown


@pytest.mark.parametrize("number", [1])
async def test_the_page_reloads_the_configuration_and_says_what_changed(screen: Screen) -> None:
    (file,) = screen.folder.glob("config-*.json")
    members = json.loads(file.read_text())
    await screen.unlock()
    await screen.until_shown("changes", ME)
    file.write_text(json.dumps(members | {"collections": [*members["collections"], collection("added")]}))
    await screen.click("#reload button")
    await screen.until_shown("reloaded", "Changed: collections.")
    await screen.until_shown("collections", "added/{id}")
    file.write_text("{")
    await screen.click("#reload button")
    await screen.until_shown("reloaded", file.name)


async def test_the_keyboard_alone_reaches_everything(screen: Screen) -> None:
    window = screen.window

    async def tab_to(id_: str) -> None:
        for _ in range(200):
            await window.press("Tab", 9)
            if await window.run(f"document.activeElement.id === '{id_}'"):
                return
        raise AssertionError(f"{id_} is not reached")

    await tab_to("token")
    await window.type(ADMIN_TOKEN)
    await window.press("Enter", 13, "\r")
    await screen.until_shown("changes", ME)
    assert await window.run("document.activeElement.id") == "h-changes"
    await tab_to("key")
    await window.type(f"kept/{ME}/1")
    await window.press("Enter", 13, "\r")
    await screen.until_shown("facts", "document")
    await tab_to("pause")
    await window.press("Enter", 13, "\r")
    await screen.until_shown("pause", "Go on")
    named = [name for role, name in await window.controls() if role in ("button", "textbox")]
    assert all(named)
    assert {"Token", "Key", "Request id"} & {*named} == {"Key", "Request id"}


async def test_a_hidden_tab_asks_for_nothing(screen: Screen, chromium: str) -> None:
    requests = "performance.getEntriesByName(location.origin + '/metrics').length"
    async with driven(chromium) as browser:
        other = await browser.open(await screen.window.run("location.href"))

        async def after(count: int) -> int:
            """The requests of the hidden tab, after so many more of the other one."""
            seen = await other.run(requests)
            await other.until(f"{requests} >= {seen + count}")
            sent: int = await screen.window.run(requests)
            return sent

        assert await after(2) > 0
        await screen.window.run(
            "Object.defineProperty(document, 'hidden', { value: true, configurable: true })"
        )
        sent = await after(2)  # the last one may have been under way
        assert await after(3) == sent
        await screen.window.run("delete document.hidden")
        await screen.window.until(f"{requests} > {sent}")


class Failing(MemoryStore):
    """A store whose probe raises `error`, if there is one."""

    error: Unavailable | None = None

    async def probe(self) -> None:
        if self.error is not None:
            raise self.error


async def test_the_reason_why_a_service_is_not_ready_is_shown(chromium: str) -> None:
    store = Failing()
    members = {"server": {"admin": {"port": 0}}, "store": "memory:", "collections": [NOTES]}
    async with AsyncExitStack() as stack:
        app = await stack.enter_async_context(await create_app(config.parse(members), store))
        listener = AdminListener(app.admin_pages, "127.0.0.1", 0)
        stack.push_async_callback(listener.close)
        browser = await stack.enter_async_context(driven(chromium))
        window = await browser.open(f"http://127.0.0.1:{listener.port}/admin")
        await window.until("document.getElementById('state').innerText.includes('Ready')")
        store.error = StoreUnavailable("TimeoutError: no answer")
        health = "document.getElementById('health').innerText"
        await window.until(f"{health}.includes('Store\\nTimeoutError: no answer')")
        assert "not ready" in await window.run(health)
        assert "no answer" in await window.run("document.getElementById('state').innerText")
        store.error = CoordinatorUnavailable("the database was deleted")
        await window.until(f"{health}.includes('Coordinator\\nthe database was deleted')")
        assert "Store\nanswers" in await window.run(health)
        store.error = None
        await window.until("document.getElementById('state').innerText.includes('Ready')")
        await window.run("document.getElementById('token').value = 'x'")
        await window.run("document.querySelector('#unlock button').click()")
        await window.until("document.getElementById('wrong').innerText.includes('set auth.adminToken')")
        assert browser.complaints == []
