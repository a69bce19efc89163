"""A replica in a browser stays whole, whatever its server answers, and whoever else opens it."""

import pytest
from support.browser import Chromium, Window
from support.clients import Start
from support.web_pages import client_page, do, web_service

SERVER = """
// A server whose collection `notes` has these changes, and answers everything else with `others`.
window.server = (template, changes, others = () => answer(404, {})) => async (url) => {
  const page = {changes, cursor: "1", hasMore: false, storagePaths: {notes: template}}
  return new URL(url).pathname === "/changes" ? answer(200, page) : others(new URL(url).pathname)
}
window.opened = (fetch, members) => {
  const backoff = {attempts: 1, initialS: 0.01, maxS: 0.01}
  return Replica.open("app", new Client("http://h", {fetch, backoff, ...members}), {notes: {}})
}
window.waits = []
const timer = window.setTimeout
window.setTimeout = (call, ms, ...values) => {
  waits.push(ms)
  return timer(call, ms, ...values)
}
window.unhandled = []
addEventListener("unhandledrejection", ({reason}) => unhandled.push(String(reason)))
"""


@pytest.fixture
async def window(start: Start, screen: Chromium) -> Window:
    return await client_page(screen, await web_service(start), SERVER)


async def test_server_that_asks_for_a_very_long_wait_is_not_asked_at_once(window: Window) -> None:
    body = """const busy = async () => answer(503, {}, {"Retry-After": "9999999999"})
    window.replica = await opened(busy)
    return replica.synced().catch(({retryAfterS}) => retryAfterS)"""
    assert await do(window, body) == 9_999_999_999
    await window.until("waits.some((ms) => ms > 1e9)")
    assert await window.run("waits.every((ms) => !(ms >= 2 ** 31))")


async def test_replica_belongs_to_the_first_of_two_users_who_open_it_at_once(window: Window) -> None:
    body = """const users = [me, await IdentityKeys.generate()], fetch = server("notes/{id}", [])
    const openings = users.map((keys) => opened(fetch, {keys}))
    return (await Promise.allSettled(openings)).map(({reason}) => reason?.name ?? "opened").sort()"""
    assert await do(window, body) == ["ReplicaError", "opened"]


async def test_path_parameter_that_a_change_lacks_is_an_error(window: Window) -> None:
    body = """const changes = [{collection: "notes", params: {}, hash: "h", timestamp: 1}]
    const replica = await opened(server("notes/{constructor}", changes))
    return replica.synced().catch(({name}) => name)"""
    assert await do(window, body) == "TypeError"


async def test_change_of_a_collection_that_is_not_followed_is_no_error(window: Window) -> None:
    body = """const change = JSON.stringify({collection: "toString", params: {}, hash: "h", timestamp: 1})
    const headers = {"Content-Type": "text/event-stream"}
    const stream = () => new Response(`id: 1\\ndata: ${change}\\n\\n`, {headers})
    window.streams = 0
    const others = (path) => (path === "/events" && ++streams ? stream() : answer(404, {}))
    window.replica = await opened(server("notes/{id}", [], others))
    return replica.synced()"""
    await do(window, body)
    await window.until("streams > 1")
    assert await window.run("unhandled") == []
