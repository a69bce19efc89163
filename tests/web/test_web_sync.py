"""A SyncDocument in a browser loses no edit, whoever else writes the document."""

import asyncio
import json
from typing import Any

import pytest
import pytest_asyncio
from support.browser import Chromium, Window
from support.clients import Start
from support.collections import NOTES
from support.web_pages import blank_page, web_service

from pysync.client import Client, SyncDocument

KEY = "notes/a"
# `gate` counts the requests that are under way, and has the signals of streams. `hook` may answer them.
SETUP = """
  window.gate = { most: 0, open: 0, hook: () => {}, isAway: false, failed: 0, streams: [] }
  const gated = async (url, options) => {
    if (url.includes("/events")) gate.streams.push(options.signal)
    gate.most = Math.max(gate.most, ++gate.open)
    try {
      if (gate.isAway) throw new TypeError(`away ${++gate.failed}`)
      return await gate.hook(url, options) ?? await fetch(url, options)
    } finally {
      gate.open--
    }
  }
  const backoff = { attempts: 1, initialS: 0.01 }
  window.client = new pysync.Client(location.origin, { fetch: gated, backoff })
  window.doc = new pysync.SyncDocument(client, "notes/a")
"""
FAST_TIMERS = "{ const timer = setTimeout; window.setTimeout = (act, ms) => timer(act, ms / 20) }"


class Desk:
    """Windows with a document each, and the same document in Python."""

    def __init__(self, base: str, screen: Chromium, python: Client) -> None:
        self.base = base
        self.client = python
        self.document = SyncDocument(python, KEY)
        self._screen = screen

    async def window(self, before: str = "") -> Window:
        window = await blank_page(self._screen, self.base, before)
        await window.run(f"{{ {SETUP} }}")
        return window

    async def stored(self) -> dict[str, Any]:
        return (await self.client.pull(KEY)).data


@pytest_asyncio.fixture
async def desk(start: Start, screen: Chromium) -> Any:
    base = await web_service(start, NOTES)
    async with Client(base) as python:
        yield Desk(base, screen, python)


async def test_pull_merges_what_two_windows_edited(desk: Desk) -> None:
    one, other = await desk.window(), await desk.window()
    await one.run("doc.push({ title: 'x', rows: [{ id: 1 }, { id: '1' }] })")
    assert await other.run("doc.pull()") == {"title": "x", "rows": [{"id": 1}, {"id": "1"}]}
    await other.run("{ doc.data.rows.push({ id: 2 }); doc.data.title = 'y' }")
    assert await other.run("doc.isEdited")
    await one.run("{ doc.data.rows[1].done = true; doc.push() }")
    merged = {"title": "y", "rows": [{"id": 1}, {"id": "1", "done": True}, {"id": 2}]}
    await one.until("!doc.isEdited")
    assert await other.run("doc.pull()") == merged
    assert await other.run("(async () => { const { data } = doc; return await doc.pull() === data })()")
    await other.run("doc.push()")
    assert await one.run("doc.pull()") == await desk.stored() == merged
    assert not await other.run("doc.isEdited || doc.dropped.length")


async def test_conflict_is_merged_and_pushed_again_and_tells_what_it_dropped(desk: Desk) -> None:
    window = await desk.window()
    await desk.client.push(KEY, {"both": "theirs", "theirs": 1})
    pushed = await window.run("doc.push({ both: 'mine', mine: 1 })")
    assert await desk.stored() == await window.run("doc.data") == {"both": "mine", "theirs": 1, "mine": 1}
    assert pushed["hash"] == await window.run("doc.hash") == (await desk.client.pull(KEY)).hash
    assert await window.run("doc.dropped") == [{"path": ["both"], "value": "theirs", "local": False}]


async def test_options_decide_how_versions_are_merged(desk: Desk) -> None:
    window = await desk.window()
    theirs = {"n": 5, "tags": [{"name": "theirs"}]}
    both = {"n": 8, "tags": [{"name": "theirs"}, {"name": "mine"}]}
    for options, expected in [
        ("onConflict: ({ local, remote }) => local + remote, idMember: 'name'", both),
        ("resolve: pysync.mergeRemoteWins", theirs),
        ("resolve: (local, remote) => ({ all: [local.n, remote.n] })", {"all": [3, 5]}),
    ]:
        await desk.client.push(KEY, theirs, (await desk.client.pull(KEY)).hash or None)
        await window.run(f"{{ window.doc = new pysync.SyncDocument(client, 'notes/a', {{ {options} }}) }}")
        await window.run("doc.push({ n: 3, tags: [{ name: 'mine' }] })")
        assert await window.run("doc.data") == await desk.stored() == expected


@pytest.mark.slow
async def test_counters_of_two_windows_count_everything(desk: Desk) -> None:
    windows = [await desk.window(), await desk.window()]
    count = """(async () => {
      const doc = new pysync.SyncDocument(client, "notes/a", { retries: 100 })
      for (let n = 0; n < 15; n++) await doc.update((data) => ({ ...data, count: (data.count ?? 0) + 1 }))
    })()"""
    await asyncio.gather(*(window.run(count) for window in windows))
    assert await desk.stored() == {"count": 30}


async def test_change_that_fails_or_keeps_losing_changes_nothing_here(desk: Desk) -> None:
    window = await desk.window(FAST_TIMERS)
    await window.run("doc.push({ list: [] })")
    failed = """(async () => {
      const other = new pysync.SyncDocument(new pysync.Client(location.origin), "notes/a")
      let pushes = 0
      gate.hook = async (url, { method }) => {
        if (method === "POST") await other.update((data) => ({ ...data, n: ++pushes }))
      }
      const change = (data) => (data.list.push(1), data)
      const error = await doc.update(change).catch((error) => error)
      gate.hook = () => {}
      gate.isAway = true
      const away = await doc.update(change).catch((error) => error)
      gate.isAway = false
      const nothing = await doc.update(() => undefined).catch((error) => error)
      return [error.name, pushes, away.name, nothing.name, doc.data, doc.isEdited]
    })()"""
    assert await window.run(failed) == ["Conflict", 4, "Unreachable", "TypeError", {"list": []}, False]
    assert await desk.stored() == {"list": [], "n": 4}
    change = "(data) => (data.list.push(1), data)"
    await window.run(f"doc.update({change})")
    assert await desk.stored() == {"list": [1], "n": 4}


async def test_edit_during_a_push_stays(desk: Desk) -> None:
    window = await desk.window()
    await window.run("doc.push({ a: 1, b: 1 })")
    await desk.document.update(lambda data: {**data, "theirs": 1})
    await window.run("{ doc.data.a = 2; gate.hook = () => { doc.data.b = 2; gate.hook = () => {} } }")
    await window.run("doc.push()")
    assert await desk.stored() == {"a": 2, "b": 1, "theirs": 1}
    assert await window.run("doc.data") == {"a": 2, "b": 2, "theirs": 1}
    assert await window.run("doc.isEdited")
    await window.run("doc.push()")
    assert await desk.stored() == {"a": 2, "b": 2, "theirs": 1}


async def test_calls_of_several_callers_wait_for_each_other(desk: Desk) -> None:
    window = await desk.window()
    increment = "doc.update((data) => ({ ...data, n: (data.n ?? 0) + 1 }))"
    refused = "doc.push({ n: NaN }).catch((error) => error.name)"
    calls = [increment, "doc.pull()", refused, increment, "doc.push()", increment]
    results = await window.run(f"Promise.all([{', '.join(calls)}])")
    assert results[2] == "RangeError"
    assert await desk.stored() == {"n": 3}
    assert await window.run("gate.most") == 1


async def test_state_is_restored_by_a_page_and_by_python(desk: Desk) -> None:
    window = await desk.window()
    await window.run("doc.push({ title: 'x', rows: [{ id: 1 }] })")
    await window.run("{ doc.data.title = 'offline'; doc.data.rows.push({ id: 2 }) }")
    state = await window.run("doc.dump()")
    await window.run("{ doc.data.title = 'not in what was dumped' }")
    await desk.client.push(KEY, {"title": "x", "rows": [{"id": 1}, {"id": 3}]}, state["hash"])

    desk.document.restore(state)
    assert desk.document.is_edited
    assert desk.document.dump() == state
    await window.load(await window.run("location.href"))
    await window.run(f"{{ {SETUP} }}")
    await window.run("(text) => doc.restore(JSON.parse(text))", json.dumps(desk.document.dump()))
    assert await window.run("doc.isEdited")
    assert await window.run("doc.dump()") == state
    rows = [{"id": 1}, {"id": 3}, {"id": 2}]
    assert await window.run("doc.pull()") == {"title": "offline", "rows": rows}
    await window.run("doc.push()")
    assert await desk.stored() == {"title": "offline", "rows": rows}


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"key": "other"}, {"data": None}, {"data": []}, {"hash": None}, {"base": []}],
)
async def test_state_that_is_none_of_this_document_is_not_restored(
    desk: Desk, change: dict[str, Any]
) -> None:
    window = await desk.window()
    rejected = """(change) => {
      try {
        doc.restore({ ...doc.dump(), ...change })
      } catch (error) {
        return error.name
      }
    }"""
    assert await window.run(rejected, change) == "TypeError"


async def test_edit_of_an_unknown_version_is_rejected_rather_than_discarded(desk: Desk) -> None:
    window = await desk.window()
    first = await desk.client.push(KEY, {"items": ["a"], "title": "x"})
    theirs = {"items": ["a", "b"], "title": "x"}
    second = await desk.client.push(KEY, theirs, first.hash)
    rejected = """async (hash) => {
      const mine = { items: ["a", "mine"], title: "offline" }
      Object.assign(doc, { data: mine, hash })
      const told = []
      for (const act of [() => doc.pull(), () => doc.push(), () => doc.update((data) => data)]) {
        const error = await act().catch((error) => error)
        told.push([error.name, error instanceof pysync.UnknownBase, error.currentHash])
      }
      return [told, doc.data === mine && doc.hash === hash]
    }"""
    error = ["UnknownBase", True, second.hash]
    assert await window.run(rejected, first.hash) == [[error] * 3, True]
    assert await desk.stored() == theirs


FOLLOW = """{
  window.seen = []
  window.told = []
  window.stop = new AbortController()
  window.following = (async () => {
    const options = { signal: stop.signal, onDisconnect: (error) => told.push(error.name) }
    for await (const data of doc.follow(options)) seen.push(structuredClone(data))
    return "ended"
  })()
  undefined
}"""
STREAMS_ENDED = "gate.streams.length && gate.streams.every((signal) => signal.aborted)"


async def test_page_follows_what_others_write_and_keeps_its_own_edits(desk: Desk) -> None:
    one, other = await desk.window(), await desk.window()
    await other.run(FOLLOW)
    await other.until("seen.length === 1")
    await other.run("{ doc.data.mine = 1 }")
    for n in range(3):
        await one.run("(n) => doc.push({ n })", n)
        await other.until(f"seen.at(-1)?.n === {n}")
    assert await other.run("seen") == [{}, *({"n": n, "mine": 1} for n in range(3))]
    await other.run("stop.abort()")
    assert await other.run("following") == "ended"
    await other.until(STREAMS_ENDED)
    assert await other.run("told") == []


async def test_change_that_comes_while_a_page_pulls_is_news_whatever_it_is(desk: Desk) -> None:
    window = await desk.window()
    await window.run("doc.push({ n: 0 })")
    # An answer to a pull is held back; events of the stream are counted.
    held = """{
      window.events = window.pulls = 0
      window.answer = new Promise((resolve) => { window.release = resolve })
      gate.hook = async (url, options) => {
        if (url.includes("/events")) {
          const { body, headers } = await fetch(url, options)
          const count = new TransformStream({
            transform(chunk, stream) {
              events += new TextDecoder().decode(chunk).split("data:").length - 1
              stream.enqueue(chunk)
            },
          })
          return new Response(body.pipeThrough(count), { headers })
        }
        const response = await fetch(url, options)
        pulls++
        if (!window.isHeld) return response
        window.isHeld = false
        window.isHolding = true
        await answer
        return response
      }
      undefined
    }"""
    await window.run(held)
    await window.run(FOLLOW)
    await window.until("pulls === 2 && gate.open === 0")  # at first, and when the stream is there
    await window.run("{ window.isHeld = true }")
    first = await desk.client.pull(KEY)
    second = await desk.client.push(KEY, {"n": 1}, first.hash)
    await window.until("window.isHolding")
    await desk.client.push(KEY, {"n": 0}, second.hash)
    await window.until("events >= 2")
    await window.run("new Promise((resolve) => setTimeout(resolve)).then(release)")
    await window.until("seen.at(-1).n === 0 && seen.length === 3")


async def test_leaving_the_loop_ends_the_stream(desk: Desk) -> None:
    window = await desk.window()
    assert await window.run("(async () => { for await (const data of doc.follow()) return data })()") == {}
    await window.until(STREAMS_ENDED)


async def test_stream_that_the_server_rejects_is_an_error_if_its_collection_is_none(desk: Desk) -> None:
    window = await desk.window()
    wrong = "{ collection: 'none' }"
    follow = f"(async () => {{ for await (const data of doc.follow({wrong})); }})()"
    assert await window.run(f"{follow}.catch((error) => error.name)") == "UnknownCollection"
    narrow = "{ collection: 'notes', params: { id: 'a' } }"
    await window.run(FOLLOW.replace("const options = {", f"const options = {{ ...{narrow},"))
    await desk.client.push(KEY, {"n": 1})
    await window.until("seen.at(-1)?.n === 1")


async def test_page_without_a_stream_asks_from_time_to_time(desk: Desk) -> None:
    window = await desk.window(FAST_TIMERS)
    await window.run(
        "{ gate.hook = (url) => (url.includes('/events') ? new Response('{}', { status: 404 }) : null) }"
    )
    await window.run(FOLLOW)
    for n in range(2):
        await desk.document.push({"n": n})
        await window.until(f"seen.at(-1)?.n === {n}")


async def test_page_that_follows_outlasts_a_server_that_is_away(desk: Desk) -> None:
    window = await desk.window(FAST_TIMERS)
    away = "(async () => { for await (const data of doc.follow()); })().catch((error) => error.name)"
    await window.run("{ gate.isAway = true }")
    assert await window.run(away) == "Unreachable"  # from the beginning
    await window.run("{ gate.isAway = false }")
    await window.run(FOLLOW)
    await window.until("seen.length === 1")
    await window.run("{ gate.isAway = true }")
    await desk.document.push({"n": 1})
    await window.until("told.length && gate.failed > 3")
    await window.run("{ gate.isAway = false }")
    await window.until("seen.at(-1)?.n === 1")
    assert await window.run("told") == ["Unreachable"]
