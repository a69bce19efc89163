"""Tabs that are killed again and again while they edit lose no edit and double none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.browser import Chromium, Killed
from support.clients import ISSUER, Start
from support.depth import depth
from support.edit_ledger import Ledger, entries_of
from support.http_relay import RequestHead
from support.replicas import COLLECTIONS, ME
from support.s3_fault_proxy import FaultProxy
from support.web_pages import WITHOUT_LOCKS, web_service
from support.web_replicas import WebSite, is_of_the_service

from pysync.client import Client, RetryPolicy
from pysync.errors import Conflict

pytestmark = [pytest.mark.slow]

KILLS = depth(20, 200)
PATIENT = RetryPolicy(attempts=20, initial_s=0.01)
HOME = f"users/{ME}"
LOGS = [f"{HOME}/logs/log-{n}" for n in range(2)]
TAIL_ELEMENTS = 1000
EDITOR = Path(__file__).with_name("replica_editor.js").read_text()
TABS = {"phone-a": "", "phone-b": "", "laptop-a": WITHOUT_LOCKS, "laptop-b": WITHOUT_LOCKS}
"""The tabs of two browsers, and what runs before their pages."""


class KilledTab:
    """A tab of a browser that is killed after a number of edits, or while the server serves a request."""

    def __init__(self, name: str, screen: Chromium, site: WebSite, ledger: Ledger) -> None:
        self._name = name
        self._screen = screen
        self._site = site
        self._ledger = ledger
        self._random = Random(name)
        self._life = 0
        self._left = 0
        self._killed = asyncio.Event()

    async def live(self) -> None:
        """Open the tab and let it edit until the kill."""
        self._life += 1
        self._killed = asyncio.Event()
        how = self._random.choice(["edit", "edit", "request", "request", "request"])
        edits = self._random.randint(1, 12)
        self._left = self._random.randint(1, 12) if how == "request" else 0

        def on_report(members: dict[str, Any]) -> None:
            nonlocal edits
            self._ledger.note(members)
            edits -= "done" in members
            if "idle" in members or (edits <= 0 and how == "edit"):
                self._killed.set()

        tab = await self._site.tab(self._screen, before=TABS[self._name])
        await tab.window.report_to(on_report)
        await tab.window.run(f"(() => {{ {EDITOR} }})()")
        options = {
            "home": HOME,
            "name": self._name,
            "shared": self._name[-1],  # two tabs of one browser would have to lock what both read and write
            "life": self._life,
            "seed": self._random.randrange(1 << 31),
            "edits": 12,
            "online": how == "request",
        }
        editing = asyncio.create_task(tab.window.run("editor", options))
        killed = asyncio.create_task(self._killed.wait())
        await asyncio.wait([editing, killed], return_when=asyncio.FIRST_COMPLETED)
        await tab.window.kill()
        killed.cancel()
        with suppress(Killed):
            await editing

    def kills_at(self, sent: RequestHead) -> bool:
        """Whether the tab is killed while the server serves this request, which then fails."""
        if not is_of_the_service(sent) or self._left == 0:
            return False
        self._left -= 1
        if self._left == 0:
            self._killed.set()
        return self._left == 0


async def lives(tabs: list[KilledTab], other: "OtherClient", count: int) -> None:
    """Let the tabs live and be killed `count` times each, while another client edits."""

    async def live(tab: KilledTab) -> None:
        for _ in range(count):
            await asyncio.gather(tab.live(), other.edit())

    async with asyncio.TaskGroup() as group:
        for tab in tabs:
            group.create_task(live(tab))


def fail_at_random(site: WebSite, tabs: list[KilledTab], random: Random) -> None:
    """Have one in eight requests fail, and those at which a tab is killed."""

    def kills(sent: RequestHead) -> bool:
        return sum(tab.kills_at(sent) for tab in tabs) > 0

    def loses(sent: RequestHead) -> bool:
        return kills(sent) and random.random() < 0.5

    def fails(sent: RequestHead) -> bool:
        return is_of_the_service(sent) and sent.path != "events" and random.random() < 1 / 16

    site.proxy.lose_reply(when=loses, times=None)
    site.proxy.abort(when=fails, times=None)
    site.proxy.lose_reply(when=fails, times=None)


class OtherClient:
    """A client without a replica, which edits what the tabs edit."""

    def __init__(self, client: Client, ledger: Ledger) -> None:
        self._client = client
        self._ledger = ledger
        self._random = Random("other")
        self._count = 0

    async def edit(self) -> None:
        """Add an entry to a shared document, or delete it, and append to a log."""
        self._count += 1
        entry, log = f"other-{self._count:06}", self._random.choice(LOGS)
        key = f"{HOME}/docs/shared-{self._random.choice('ab')}-{self._random.randrange(2)}"
        await self._client.append(log, {"id": entry})
        self._ledger.note({"done": "append", "key": log, "entry": entry})
        with suppress(Conflict):
            pulled = await self._client.pull(key)
            if pulled.hash and self._random.random() < 0.1:
                self._ledger.note({"begun": "drop", "key": key, "seen": entries_of(pulled.data)})
                await self._client.delete(key, pulled.hash)
            else:
                await self._client.push(key, {**pulled.data, entry: True}, pulled.hash or None)
                self._ledger.note({"done": "add", "key": key, "entry": entry})


@pytest.mark.timeout(depth(120, 1800))
async def test_no_edit_is_lost_or_doubled_over_20_kills_of_tabs(
    start: Start, screen: Chromium, other_screen: Chromium
) -> None:
    ledger = Ledger(TABS)
    async with AsyncExitStack() as stack:
        base = await web_service(start, *COLLECTIONS)
        browsers = {}
        for name, browser in (("phone", screen), ("laptop", other_screen)):
            browsers[name] = browser, WebSite(base, await stack.enter_async_context(FaultProxy(base)))
        tabs = {name: KilledTab(name, *browsers[name[:-2]], ledger) for name in TABS}
        for device, (_, site) in browsers.items():
            own = [tab for name, tab in tabs.items() if name.startswith(device)]
            fail_at_random(site, own, Random(device))
        client = await stack.enter_async_context(Client(base, keys=ISSUER, backoff=PATIENT))
        await lives([*tabs.values()], OtherClient(client, ledger), -(-KILLS // len(tabs)))
        assert sum(site.proxy.met["lose_reply"] for _, site in browsers.values()) > 0
        last = {}
        for name, (browser, site) in browsers.items():
            site.proxy.reset()
            last[name] = await site.tab(browser)
            await last[name].synced()
        documents = {key: (await client.pull(key)).data async for key in keys_below(client, f"{HOME}/docs")}
        logs = {
            key: [element.data["id"] for element in (await client.pull(key, full=True)).elements()]
            for key in LOGS
        }
        ledger.check_documents(documents)
        for key, stored in logs.items():
            ledger.check_log(key, stored)
        for tab in last.values():
            await tab.synced()
            status = await tab.status()
            assert (status["unsent"], status["rejected"], status["error"]) == (0, [], None)
            assert dict(await tab.window.run(f"replica.entries('{HOME}/docs/')")) == documents
            for key, stored in logs.items():
                assert [data["id"] for data in await tab.tail(key)] == stored[-TAIL_ELEMENTS:]


async def keys_below(client: Client, prefix: str) -> AsyncIterator[str]:
    async for name in client.list(prefix):
        yield f"{prefix}/{name}"
