"""`"wait": true`: a push is answered after its lists hold it, whichever process keeps them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import PUBLIC
from support.loop_time import loop_time
from support.projection_site import JOURNAL, LISTS, NOTES, TITLES, entry, members, titled

from pysync.changelog import Change
from pysync.coordinator.local import LocalCoordinator
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import CoordinatorUnavailable
from pysync.plugins.projection import Projection
from pysync.store.local.store import LocalStore

WAITING = members(TITLES | {"wait": True})
TWIN = NOTES | {"name": "twin", "storagePath": "notes/{s}/{n}"}


async def items(browser: Browser, key: str = "lists/s") -> Any:
    return (await browser.pull(key)).json["data"].get("items")


async def push(browser: Browser, path: str, data: dict[str, Any], **members: Any) -> Any:
    answer = await browser.request("POST", f"/push/{path}", {"data": data, **members})
    assert answer.status == 200
    return answer.json


@pytest.mark.slow
async def test_a_push_is_answered_when_its_list_holds_it(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(WAITING), session)
    expected = []
    for number in range(10):
        answer = await push(browser, f"notes/s/n{number}", {"title": f"{number}"})
        expected.append(entry(f"n{number}", title=f"{number}"))
        assert answer.keys() == {"hash", "timestamp"}
        assert await items(browser) == expected
    await push(
        browser, "notes/s/n0", {"deleted": True}, baseHash=(await browser.pull("notes/s/n0")).json["hash"]
    )
    assert await items(browser) == expected[1:]


async def test_many_pushes_at_once_wait_for_few_writes_of_the_list(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start(WAITING), session)
    await asyncio.gather(*(push(browser, f"notes/s/n{n}", {"title": "T"}) for n in range(50)))
    assert len(await items(browser)) == 50


async def test_appends_files_and_whoever_shares_a_key_wait_too(
    start: Start, session: aiohttp.ClientSession
) -> None:
    photos = {"name": "photos", "storagePath": "p/{space}/{id}", "allowedMimeTypes": ["image/png"], **PUBLIC}
    declared = [
        TITLES | {"wait": True, "name": "notes"},
        {"source": "photos", "target": "lists/{space}", "id": "{id}", "wait": True, "name": "photos"},
        {"source": "journal", "target": "lists/{space}", "id": "{space}", "wait": True, "name": "log"},
    ]
    settings = members(*declared, namespaces={"acme": {"collections": [TWIN]}})
    settings["collections"] = [NOTES, JOURNAL, LISTS, photos]
    browser = Browser(await start(settings), session)
    answer = await browser.request("POST", "/acme/push/notes/a/1", {"data": {"title": "T"}})
    assert (answer.status, await items(browser, "lists/a")) == (200, [entry("1", title="T")])
    await push(browser, "journals/b", {"n": 1})
    assert await items(browser, "lists/b") == [entry("b")]
    answer = await browser.request("POST", "/push/p/c/1", b"png", {"Content-Type": "image/png"})
    assert (answer.status, await items(browser, "lists/c")) == (200, [entry("1")])


async def test_a_projection_in_code_may_wait(start: Start, session: aiohttp.ClientSession) -> None:
    plugin = Projection("notes", "lists/{space}", titled, wait=True)
    browser = Browser(await start(members(), plugins=[plugin]), session)
    await push(browser, "notes/s/a", {"title": "A"})
    assert await items(browser) == [entry("a", title="A")]


async def test_the_answer_says_that_a_list_is_behind(start: Start, session: aiohttp.ClientSession) -> None:
    class Follows(MemoryCoordinator):
        async def acquire_lease(self, name: str) -> bool:
            return False

    browser = Browser(await start(WAITING, coordinator=Follows()), session)
    with loop_time() as time:
        pushing = asyncio.ensure_future(push(browser, "notes/s/a", {"title": "A"}))
        answer = await time.pass_until(pushing, 0.1)
    assert answer["projected"] is False
    assert answer["hash"] == (await browser.pull("notes/s/a")).json["hash"]
    assert "projected" not in await push(browser, "journals/s", {})
    rejected = await browser.push("notes/s/a", {"title": "B"}, "0" * 64)
    assert (rejected.status, "projected" in rejected.json) == (409, False)


async def test_while_too_many_pushes_wait_others_are_answered_at_once(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(MemoryCoordinator):
        is_leader = False

        async def acquire_lease(self, name: str) -> bool:
            return self.is_leader and await super().acquire_lease(name)

    monkeypatch.setattr("pysync.server.api.plugin_hooks.MAX_WAITING", 1)
    coordinator = Slow()
    browser = Browser(await start(WAITING, coordinator=coordinator), session)
    first = asyncio.create_task(push(browser, "notes/s/a", {"title": "A"}))
    while (await browser.pull("notes/s/a")).json["hash"] is None:
        pass
    assert (await push(browser, "notes/s/b", {"title": "B"}))["projected"] is False
    assert not first.done()
    page = (await browser.request("GET", "/metrics")).body
    assert b"\npysync_projection_unawaited_total 1.0\n" in page
    coordinator.is_leader = True
    with loop_time() as time:
        assert "projected" not in await time.pass_until(first, 0.01)
    assert "projected" not in await push(browser, "notes/s/c", {"title": "C"})


async def test_the_answer_says_so_too_where_the_write_is_not_announced_yet(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """Then lists that hold all that was announced do not hold it."""

    class Mute(MemoryCoordinator):
        is_mute = False

        async def append(self, changes: Sequence[Change], prepared: str = "") -> str:
            if self.is_mute:
                raise CoordinatorUnavailable
            return await super().append(changes, prepared)

    coordinator = Mute()
    browser = Browser(await start(WAITING, coordinator=coordinator), session)
    assert "projected" not in await push(browser, "notes/s/a", {"title": "A"})
    coordinator.is_mute = True
    assert (await push(browser, "notes/s/b", {"title": "B"}))["projected"] is False


async def test_another_process_may_keep_the_list(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Of two only one leads; both answer when the list holds what was pushed."""
    browsers = []
    for _ in range(2):
        store = await LocalStore.open_folder(tmp_path)
        coordinator = await LocalCoordinator.open_folder(tmp_path)
        settings = WAITING | {"store": f"file:{tmp_path}", "server": {"workers": 2}}
        base = await start(settings, store, coordinator=coordinator)
        browsers.append(Browser(base, session))
    expected = []
    for number in range(6):
        answer = await push(browsers[number % 2], f"notes/s/n{number}", {"title": "T"})
        expected.append(entry(f"n{number}", title="T"))
        assert "projected" not in answer
        for browser in browsers:
            assert await items(browser) == expected
