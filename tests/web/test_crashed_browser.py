"""An edit is on the disk when its promise is fulfilled: it survives the end of the whole browser."""

import os
import signal
from pathlib import Path
from typing import Any

import components
import pytest
from support.browser import Chromium, driven
from support.web_pages import blank_page
from support.web_replicas import Tab, WebSite

pytestmark = [pytest.mark.process, pytest.mark.slow]

OPEN = """async (base) => {
  window.keys = await pysync.IdentityKeys.open()
  const client = new pysync.Client(base, {keys, backoff: {attempts: 1}})
  window.replica = await pysync.Replica.open("notes", client, {docs: {identity: keys.userId}})
  return keys.userId
}"""


async def processes(screen: Chromium) -> list[dict[str, Any]]:
    """The processes of the browser: their types and ids."""
    found: list[dict[str, Any]] = (await screen.call("SystemInfo.getProcessInfo"))["processInfo"]
    return found


@pytest.mark.usefixtures("chromium")
async def test_edit_and_keys_survive_when_the_browser_is_killed(site: WebSite, tmp_path: Path) -> None:
    profile = tmp_path / "profile"
    profile.mkdir()
    with components.chromium(profile) as url:
        async with driven(url, is_private=False) as screen:
            tab = Tab(await blank_page(screen, site.proxy.url))
            site.leave()
            identity = await tab.window.run(OPEN, site.proxy.url)
            key = f"users/{identity}/docs/a"
            await tab.put({"n": 1}, key)
            (browser,) = [each for each in await processes(screen) if each["type"] == "browser"]
            os.kill(browser["id"], signal.SIGKILL)
    (profile / "DevToolsActivePort").unlink()
    with components.chromium(profile) as url:
        async with driven(url, is_private=False) as screen:
            tab = Tab(await blank_page(screen, site.proxy.url))
            assert await tab.window.run(OPEN, site.proxy.url) == identity
            assert await tab.get(key) == {"n": 1}
            site.proxy.reset()
            await tab.synced()
            assert (await tab.status())["unsent"] == 0
