"""A replica in a browser says that its storage is full or was evicted, and loses nothing that it accepted."""

import os

import pytest
from support.browser import Chromium
from support.replicas import DOC, ME
from support.web_pages import blank_page
from support.web_replicas import Tab, WebSite

LIMIT = 3_000_000
PUT_UNTIL_FULL = """async (home) => {
  const text = () => String(crypto.getRandomValues(new Uint8Array(15_000)))
  for (let made = 0; made < 200; made++) {
    try {
      await replica.put(`${home}/${made}`, {text: text()})
    } catch (error) {
      return [made, error.name, error.code]
    }
  }
}"""
COUNT_QUESTIONS = """
const persist = StorageManager.prototype.persist
StorageManager.prototype.persist = function () {
  localStorage.asked = Number(localStorage.asked ?? 0) + 1
  return persist.call(this)
}"""


async def limited(site: WebSite, screen: Chromium) -> Tab:
    """A window with a replica, in a browser with little room."""
    tab = Tab(await blank_page(screen, site.proxy.url))
    await tab.window.limit_storage(LIMIT)
    await site.open_replica(tab)
    return tab


@pytest.mark.slow
async def test_edit_that_finds_no_room_changes_nothing(site: WebSite, screen: Chromium) -> None:
    home = f"users/{ME}/docs"
    site.leave()
    tab = await limited(site, screen)
    made, *error = await tab.window.run(PUT_UNTIL_FULL, home)
    assert error == ["StorageError", "full"]
    assert made > 0
    assert (await tab.status())["unsent"] == made
    assert await tab.get(f"{home}/{made}") is None
    kept = await tab.get(f"{home}/{made - 1}")
    await tab.window.limit_storage(None)
    await tab.put({"n": 1})
    site.proxy.reset()
    await tab.synced()
    assert (await tab.status())["error"] is None
    assert (await site.pull(), await site.pull(f"{home}/{made - 1}")) == ({"n": 1}, kept)


@pytest.mark.slow
async def test_status_says_that_there_is_no_room_until_there_is(site: WebSite, screen: Chromium) -> None:
    tab = await limited(site, screen)
    await tab.synced()
    keys = [f"users/{ME}/docs/{number}" for number in range(60)]
    async with site.client() as client:
        for key in keys:
            await client.push(key, {"text": os.urandom(30_000).hex()}, None)  # which nothing compresses
    await tab.window.until("(await replica.status()).error?.code === 'full'")
    await tab.window.limit_storage(None)
    await tab.synced()
    assert (await tab.status())["error"] is None
    assert set(await tab.window.run("replica.keys()")) == {*keys}


async def test_replica_begins_anew_after_its_storage_was_evicted(site: WebSite, screen: Chromium) -> None:
    await site.push({"n": 1})
    tab = await site.tab(screen)
    await tab.synced()
    await tab.window.evict_storage()
    await tab.window.until("(await replica.status()).error?.code === 'evicted'")
    assert await tab.error_of(f"replica.put('{DOC}', {{}})") == ["StorageError", "evicted"]
    await site.reload(tab)
    await tab.synced()
    assert await tab.get() == {"n": 1}
    assert (await tab.status())["error"] is None


async def test_browser_is_asked_once_to_keep_what_is_stored(site: WebSite, screen: Chromium) -> None:
    tab = await site.tab(screen, before=COUNT_QUESTIONS)
    await tab.window.until("localStorage.asked === '1'")
    await (await site.tab(screen, before=COUNT_QUESTIONS)).synced()
    await site.reload(tab)
    await tab.synced()
    assert await tab.window.run("localStorage.asked") == "1"
