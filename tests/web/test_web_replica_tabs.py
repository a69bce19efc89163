"""Several tabs of a browser share one replica, with and without Web Locks."""

import asyncio

import pytest
from support.browser import Chromium
from support.replicas import DOC, LOG, ME
from support.web_pages import WITHOUT_LOCKS
from support.web_replicas import Tab, WebSite

BROWSERS = pytest.mark.parametrize("before", ["", WITHOUT_LOCKS], ids=["with_locks", "without_locks"])


async def leader_of(tabs: list[Tab]) -> Tab:
    """Return the tab that leads, when there is one."""
    while True:
        for tab in tabs:
            if (await tab.status())["leader"]:
                return tab


@pytest.mark.slow
@BROWSERS
async def test_edits_of_every_tab_reach_the_server_once_and_show_in_all(
    site: WebSite, screen: Chromium, before: str
) -> None:
    tabs = [await site.tab(screen, before=before) for _ in range(3)]
    own = [f"users/{ME}/docs/{number}" for number in range(3)]
    site.proxy.reset_counts()

    async def edit(number: int) -> None:
        for count in range(5):
            await tabs[number].put({"count": count}, own[number])
            await tabs[number].append({"by": number, "count": count})
        await tabs[number].synced()

    await asyncio.gather(*(edit(number) for number in range(3)))
    stored = await site.elements()
    assert [[each["count"] for each in stored if each["by"] == by] for by in range(3)] == [[*range(5)]] * 3
    assert [await site.pull(key) for key in own] == [{"count": 4}] * 3
    for tab in tabs:
        for key in own:
            await tab.shows({"count": 4}, key)
        await tab.window.until(f"replica.tail('{LOG}', 99).then((found) => found.length === 15)")
        assert await tab.tail() == stored
    leaders = [tab for tab in tabs if (await tab.status())["leader"]]
    assert len(leaders) == (3 if before else 1)


@BROWSERS
async def test_tab_says_what_another_tab_and_the_server_change(
    site: WebSite, screen: Chromium, before: str
) -> None:
    one, other = [await site.tab(screen, before=before) for _ in range(2)]
    await asyncio.gather(one.synced(), other.synced())
    for tab in (one, other):
        await tab.window.run("(async () => { window.next = replica.changes()[Symbol.asyncIterator]() })()")
    for writer in (one.put, site.push):
        said = [asyncio.create_task(tab.window.run("next.next()")) for tab in (one, other)]
        await writer({"by": writer.__qualname__})
        assert [await each for each in said] == [{"value": DOC, "done": False}] * 2
        await one.synced()


@pytest.mark.parametrize("how", ["close", "kill", "replica"])
async def test_another_tab_takes_over_when_the_leader_goes(site: WebSite, screen: Chromium, how: str) -> None:
    tabs = [await site.tab(screen) for _ in range(3)]
    leader = await leader_of(tabs)
    others = [tab for tab in tabs if tab is not leader]
    await others[0].synced()
    if how == "replica":
        await leader.window.run("replica.close()")
    else:
        await (leader.window.close() if how == "close" else leader.window.kill())
    await others[0].put({"n": 1})
    await others[1].append({"n": 1})
    for tab in others:
        await tab.synced()
    assert (await site.pull(), await site.elements()) == ({"n": 1}, [{"n": 1}])
    await leader_of(others)
    await site.push({"n": 2})
    for tab in others:
        await tab.shows({"n": 2})


async def test_tab_that_waits_to_be_in_sync_is_served_by_the_next_leader(
    site: WebSite, screen: Chromium
) -> None:
    tabs = [await site.tab(screen) for _ in range(2)]
    leader = await leader_of(tabs)
    (other,) = [tab for tab in tabs if tab is not leader]
    arrived = site.proxy.delay("POST", until=asyncio.Event())
    await other.put({"n": 1})
    waiting = asyncio.create_task(other.synced())
    await arrived.wait()
    await leader.window.kill()
    await waiting
    assert await site.pull() == {"n": 1}


async def test_status_and_errors_are_the_same_in_a_tab_that_does_not_lead(
    site: WebSite, screen: Chromium
) -> None:
    tabs = [await site.tab(screen) for _ in range(2)]
    leader = await leader_of(tabs)
    (other,) = [tab for tab in tabs if tab is not leader]
    await other.synced()
    assert await other.status() == {**await leader.status(), "leader": False}
    site.leave()
    await other.put({"n": 1})
    assert await other.error_of("replica.synced()") == ["Unreachable", None]
    for tab in tabs:
        await tab.window.until("(await replica.status()).error !== null")
        status = await tab.status()
        assert (status["online"], status["unsent"]) == (False, 1)
        assert status["error"] == ["Unreachable", None]
    site.proxy.reset()
    await other.synced()
    for tab in tabs:
        await tab.window.until("(await replica.status()).error === null")
        assert (await tab.status())["online"]
    assert await site.pull() == {"n": 1}
