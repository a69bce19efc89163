"""A watch of the browser client goes on where it was, whatever becomes of its connection."""

from typing import Any

import pytest
from support.browser import Chromium, Window
from support.clients import Start
from support.collections import MINE, NOTES
from support.web_pages import client_page, do, web_service

STREAMS = """
window.encode = (text) => new TextEncoder().encode(text)
// A stream with these chunks, which then ends: it is closed, cut, or stays silent.
window.streamed = (chunks, end = "closed") => ({signal}) => new Response(new ReadableStream({
  start(controller) {
    signal.addEventListener("abort", () => controller.error(signal.reason))
  },
  pull(controller) {
    const chunk = chunks.shift()
    if (chunk) controller.enqueue(typeof chunk === "string" ? encode(chunk) : chunk)
    else if (end === "closed") controller.close()
    else if (end === "cut") controller.error(new TypeError("network error"))
  },
}), {headers: {"Content-Type": "text/event-stream"}})
window.event = (id, members = {}) => {
  const change = {collection: "notes", params: {id}, hash: "h", timestamp: 7, ...members}
  return `id: ${id}\\ndata: ${JSON.stringify(change)}\\n\\n`
}
// The ids of so many changes, or the names of the error that comes before.
window.taken = async (watch, count) => {
  const ids = []
  try {
    while (ids.length < count) {
      const {value, done} = await watch.next()
      if (done) break
      ids.push(value.reset ? `reset ${value.id}` : value.id)
    }
  } catch ({name}) {
    ids.push(name)
  }
  return ids
}
window.watched = (fetch, options) => new Client("http://h", {fetch, backoff: QUICK}).watch(null, {}, options)
"""


async def page(start: Start, screen: Chromium, *collections: dict[str, Any]) -> Window:
    return await client_page(screen, await web_service(start, *collections), STREAMS)


async def test_changes_are_read_wherever_their_bytes_are_cut(start: Start, screen: Chromium) -> None:
    window = await page(start, screen)
    shown = await do(
        window,
        """const said = '\\ufeff: hello\\n\\nevent: message\\nid: é\\ndata: {"collection": "notes",\\n'
          + 'data: "params": {"id": "😀"}, "hash": "", "timestamp": 7, "removed": true,\\n'
          + 'data: "namespace": "a"}\\n\\nevent: other\\ndata: no\\n\\nid: 2\\n\\n'
          + event("3") + "id: 4\\ndata: unfinished"
        const found = new Set()
        for (const newline of ["\\n", "\\r\\n", "\\r"]) {
          const bytes = encode(said.replaceAll("\\n", newline))
          for (const size of [1, 2, 3, 5, 1000]) {
            const chunks = []
            for (let at = 0; at < bytes.length; at += size) chunks.push(bytes.slice(at, at + size))
            const fetch = scripted(streamed(chunks), streamed([": again\\n\\n"], "silent"))
            const watch = watched(fetch)
            found.add(JSON.stringify([(await watch.next()).value, (await watch.next()).value]))
            await watch.return()
          }
        }
        return [...found].map(JSON.parse)""",
    )
    first = {"collection": "notes", "params": {"id": "😀"}, "hash": "", "timestampMs": 7, "namespace": "a"}
    second = {"collection": "notes", "params": {"id": "3"}, "hash": "h", "timestampMs": 7}
    assert shown == [[{**first, "removed": True, "id": "é"}, {**second, "removed": False, "id": "3"}]]


@pytest.mark.parametrize("end", ["closed", "cut", "silent"])
async def test_watch_goes_on_where_its_connection_ended(start: Start, screen: Chromium, end: str) -> None:
    window = await page(start, screen)
    shown = await do(
        window,
        """const fetch = scripted(
          streamed([event("1"), "id: 2\\n\\n" + 'id: 3\\ndata: {"collection"'], $[0]),
          streamed([event("3")], "silent"),
        )
        const calls = []
        const watch = watched(fetch, {after: "0", idleS: $[0] === "silent" ? 0.01 : 15,
          onConnect: () => calls.push("connect"), onDisconnect: ({name}) => calls.push(name)})
        const ids = await taken(watch, 2)
        await watch.return()
        return [ids, fetch.sent.map(({headers}) => headers["Last-Event-ID"]), calls]""",
        end,
    )
    assert shown == [["1", "3"], ["0", "2"], ["connect", "Unreachable", "connect"]]


async def test_no_change_is_missed_while_a_connection_is_cut(start: Start, screen: Chromium) -> None:
    window = await page(start, screen, NOTES)
    shown = await do(
        window,
        """let cut
        const cuttable = (url, options) => {
          if (!url.includes("/events")) return fetch(url, options)
          cut = new AbortController()
          return fetch(url, {...options, signal: AbortSignal.any([options.signal, cut.signal])})
        }
        const client = new Client("/", {fetch: cuttable, backoff: QUICK}), other = new Client("/"), ids = []
        const connected = new Promise((resolve) => {
          window.watch = client.watch(["notes"], {}, {onConnect: resolve})
        })
        const reading = (async () => {
          for await (const {params} of watch) {
            ids.push(params.id)
            if (params.id === "9") break
            cut.abort()
            await other.push(`notes/${Number(params.id) + 1}`, {})
          }
        })()
        await connected
        await other.push("notes/0", {})
        await reading
        return ids""",
    )
    assert shown == [str(n) for n in range(10)]


async def test_stream_is_signed_and_narrowed(start: Start, screen: Chromium) -> None:
    window = await page(start, screen, MINE)
    shown = await do(
        window,
        """const client = new Client("/", {keys: me}), identity = me.userId
        const both = async () => {
          for (const id of ["a", "b"]) await client.push(`u/${identity}/${id}`, {})
        }
        const watch = client.watch(["mine"], {mine: {id: "b"}}, {onConnect: both})
        const {value} = await watch.next()
        await watch.return()
        const others = new Client("/").watch(["mine"])
        return [value.params, await taken(others, 1), value.params.identity === identity]""",
    )
    assert shown[0]["id"] == "b"
    assert shown[1:] == [["Unauthorized"], True]


async def test_watch_gives_up_if_the_server_cannot_be_reached_at_the_start(
    start: Start, screen: Chromium
) -> None:
    window = await page(start, screen)
    shown = await do(
        window,
        """const fetch = scripted(null, null, answer(200, PULLED), null)
        return [await taken(watched(fetch), 1), fetch.sent.length]""",
    )
    assert shown == [["Unreachable"], 4]


async def test_watch_that_was_live_does_not_give_up(start: Start, screen: Chromium) -> None:
    window = await page(start, screen)
    shown = await do(
        window,
        """const failures = [null, answer(503, {}), null, answer(500, {}), answer(429, {}), null, null]
        const fetch = scripted(streamed([event("1")]), ...failures, streamed([event("2")], "silent"))
        const lost = [], watch = watched(fetch, {onDisconnect: ({message}) => lost.push(message)})
        const ids = await taken(watch, 2)
        await watch.return()
        return [ids, lost]""",
    )
    assert shown == [["1", "2"], ["the stream of changes ended"]]


async def test_waits_grow_and_begin_anew_after_a_stream_that_lasted(start: Start, screen: Chromium) -> None:
    window = await page(start, screen)
    shown = await do(
        window,
        """const waits = [], {setTimeout: later} = window, lasting = [event("3"), ": still here\\n\\n"]
        window.setTimeout = (call, ms) => (waits.push(ms), later(call, ms < 1000 ? 0 : ms))
        Math.random = () => 0
        const fetch = scripted(streamed([event("1")]), null, null, streamed([event("2")]), streamed(lasting),
          streamed([event("4")], "silent"))
        const backoff = {initialS: 0.001, maxS: 0.009}
        const watch = new Client("http://h", {fetch, backoff}).watch(), ids = await taken(watch, 4)
        await watch.return()
        return [ids, waits.filter((ms) => ms < 1000)]""",
    )
    assert shown == [["1", "2", "3", "4"], [1, 2, 4, 8, 1]]


@pytest.mark.parametrize(("status", "name"), [(401, "Unauthorized"), (403, "Forbidden"), (400, "BadRequest")])
async def test_rejection_ends_a_watch_at_first_and_later(
    start: Start, screen: Chromium, status: int, name: str
) -> None:
    window = await page(start, screen)
    shown = await do(
        window,
        """const rejected = () => answer($[0], {})
        const later = watched(scripted(streamed([event("1")]), rejected()))
        return [await taken(watched(scripted(rejected())), 1), await taken(later, 2), await later.next()]""",
        status,
    )
    assert shown == [[name], ["1", name], {"done": True}]


async def test_lost_changes_are_reported(start: Start, screen: Chromium) -> None:
    window = await page(start, screen)
    shown = await do(
        window,
        """const watch = watched(scripted(streamed(["id: 5\\nevent: reset\\n\\n", event("6")], "silent")))
        const ids = await taken(watch, 2)
        await watch.return()
        return ids""",
    )
    assert shown == ["reset 5", "6"]


async def test_malformed_event_is_asked_for_again(start: Start, screen: Chromium) -> None:
    window = await page(start, screen)
    shown = await do(
        window,
        """const malformed = ["{", "[]", '{"collection": "notes"}', "x".repeat(1 << 21)]
        const said = malformed.map((data) => [event("1"), `id: 2\\ndata: ${data}\\n\\n`])
        const streams = said.map((chunks) => streamed(chunks, "silent"))
        const fetch = scripted(...streams, streamed([event("2")], "silent"))
        const watch = watched(fetch), ids = await taken(watch, 5)
        await watch.return()
        return [ids, fetch.sent.map(({headers}) => headers["Last-Event-ID"] ?? null)]""",
    )
    assert shown == [["1", "1", "1", "1", "2"], [None, "1", "1", "1", "1"]]


@pytest.mark.parametrize("end", ["abort", "return"])
async def test_end_closes_the_connection_at_once(start: Start, screen: Chromium, end: str) -> None:
    window = await page(start, screen)
    shown = await do(
        window,
        """const fetch = scripted(streamed([event("1")], "silent")), stop = new AbortController()
        const watch = watched(fetch, {signal: stop.signal})
        await watch.next()
        const waiting = watch.next()
        if ($[0] === "abort") stop.abort()
        else watch.return()
        const isAborted = fetch.sent[0].signal.aborted
        return [isAborted, await waiting, await watch.next()]""",
        end,
    )
    assert shown == [True, {"done": True}, {"done": True}]


async def test_loop_that_is_left_closes_the_connection(start: Start, screen: Chromium) -> None:
    window = await page(start, screen)
    shown = await do(
        window,
        """const fetch = scripted(streamed([event("1"), event("2")], "silent")), seen = []
        for await (const {id} of watched(fetch)) {
          seen.push(id)
          break
        }
        return [seen, fetch.sent[0].signal.aborted]""",
    )
    assert shown == [["1"], True]


async def test_watch_that_has_ended_before_it_begins_sends_nothing(start: Start, screen: Chromium) -> None:
    window = await page(start, screen)
    shown = await do(
        window,
        """const fetch = scripted()
        return [await taken(watched(fetch, {signal: AbortSignal.abort()}), 1), fetch.sent.length]""",
    )
    assert shown == [[], 0]
