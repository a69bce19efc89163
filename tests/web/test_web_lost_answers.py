"""A browser repeats a request whose kept connection breaks, with the signature that the server has seen."""

import pytest
from support.browser import Chromium
from support.replicas import DOC, LOG, ME
from support.web_replicas import Tab, WebSite


@pytest.fixture
async def tab(site: WebSite, screen: Chromium) -> Tab:
    """A window with a client, and a document that it has pushed."""
    tab = await site.tab(screen)
    await tab.window.run(f"replica.close().then(() => client.push('{DOC}', {{n: 1}}))")
    return tab


async def test_pull_that_the_browser_repeats_is_signed_again(site: WebSite, tab: Tab) -> None:
    site.proxy.lose_reply("GET")
    assert await tab.window.run(f"client.pull('{DOC}').then((pulled) => pulled.data)") == {"n": 1}
    assert (site.proxy.met["lose_reply"], site.proxy.statuses[401]) == (1, 1), "the server has seen a replay"


async def test_append_that_the_browser_repeats_is_made_once(site: WebSite, tab: Tab) -> None:
    site.proxy.lose_reply("POST")
    await tab.window.run(f"client.append('{LOG}', {{n: 1}})")
    assert (site.proxy.met["lose_reply"], site.proxy.statuses[401]) == (1, 1), "the server has seen a replay"
    assert await site.elements() == [{"n": 1}]


async def test_batch_that_the_browser_repeats_has_private_documents(site: WebSite, tab: Tab) -> None:
    site.proxy.reset_counts()
    site.proxy.lose_reply("GET")
    batch = f"client.batchPull('docs', [{{identity: '{ME}', id: 'a'}}]).then(([pulled]) => pulled.data)"
    assert await tab.window.run(batch) == {"n": 1}
    assert (site.proxy.met["lose_reply"], site.proxy.calls["GET"]) == (1, 3), "the server has seen a replay"
