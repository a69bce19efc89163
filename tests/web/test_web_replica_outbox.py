"""The outbox of a replica in a browser: edits arrive once, are merged, or wait for a decision."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from multidict import CIMultiDict
from support.browser import Chromium
from support.clients import Start
from support.collections import UNSIGNED, collection
from support.http_relay import RequestHead
from support.web_pages import shifted_clock
from support.web_replicas import Tab, WebSite, is_of_the_service

from pysync.clock import wall_clock_ms
from pysync.testing import FakeClock

COLLECTIONS = [
    collection("notes", deletable=True, listable=True, maxBodyBytes=4096),
    collection("readonly", pullOnly=True),
    collection("log", appendOnly=UNSIGNED, maxBodyBytes=4096),
    collection("letters", readRoles=["self"], appendOnly=UNSIGNED),
]
FOLLOWED: dict[str, Any] = {"notes": {}, "log": {}}
NOTE, ENTRIES = "notes/a", "log/a"
LONG = "x" * 5000
SEALED = """async () => {
  replica.close()
  const keyring = await pysync.Keyring.create(keys, [], 1)
  window.sealing = await keyring.open(keys, [keys.edPub])
  const options = {sealing: {notes: sealing}}
  window.replica = await pysync.Replica.open("sealed", client, {notes: {}, log: {}}, options)
}"""


@pytest.fixture
def clock() -> FakeClock:
    """The clock of the service, which begins with the time of the browser."""
    return FakeClock(wall_clock_ms())


@pytest.fixture
async def site(start: Start, clock: FakeClock) -> AsyncIterator[WebSite]:
    async with WebSite.open(start, *COLLECTIONS, now_ms=clock) as site:
        yield site


@pytest.fixture
async def tab(site: WebSite, screen: Chromium) -> Tab:
    tab = await site.tab(screen, collections=FOLLOWED)
    await tab.synced()
    return tab


def is_write(sent: RequestHead) -> bool:
    return sent.path.startswith("push/")


def forget_keys(site: WebSite) -> None:
    """Have the server know no idempotency key, as ten minutes later."""

    def drop(headers: CIMultiDict[str]) -> None:
        headers.popall("Idempotency-Key", None)

    site.proxy.rewrite(drop)


def lose_reply(site: WebSite) -> None:
    """Lose the answer of the next write, which is carried out, and the network then."""
    is_lost = False

    def is_next(sent: RequestHead) -> bool:
        nonlocal is_lost
        is_lost = is_lost or is_write(sent)
        return is_write(sent)

    site.proxy.lose_reply(when=is_next)
    site.proxy.abort(when=lambda sent: is_lost and is_of_the_service(sent), times=None)


async def test_push_whose_answer_is_lost_is_found_by_its_hash(site: WebSite, tab: Tab) -> None:
    forget_keys(site)
    lose_reply(site)
    await tab.put({"n": 1}, NOTE)
    assert await tab.error_of("replica.synced()") == ["Unreachable", None]
    await tab.put({"n": 2}, NOTE)
    site.proxy.reset()
    await tab.synced()
    assert await site.pull(NOTE) == {"n": 2}
    assert await tab.window.run("replica.dropped") == []


async def test_deletion_whose_answer_is_lost_is_not_repeated_on_what_came_after(
    site: WebSite, tab: Tab
) -> None:
    await tab.put({"n": 1}, NOTE)
    await tab.synced()
    lose_reply(site)
    await tab.window.run(f"replica.delete('{NOTE}')")
    assert await tab.error_of("replica.synced()") == ["Unreachable", None]
    await site.push({"n": 2}, NOTE)
    site.proxy.reset()
    await tab.synced()
    assert await tab.get(NOTE) == {"n": 2} == await site.pull(NOTE)


async def test_edit_that_is_made_while_another_is_on_its_way_follows_it(site: WebSite, tab: Tab) -> None:
    release = asyncio.Event()
    arrived = site.proxy.delay(until=release, when=is_write)
    await tab.put({"n": 1}, NOTE)
    await arrived.wait()
    await tab.put({"n": 2}, NOTE)
    release.set()
    await tab.synced()
    assert (await tab.get(NOTE), (await tab.status())["unsent"]) == ({"n": 2}, 0)
    assert await site.pull(NOTE) == {"n": 2}


async def test_conflicting_edits_are_merged_by_the_rules_of_their_collection(site: WebSite, tab: Tab) -> None:
    await site.push({"title": "old", "items": [{"name": "milk"}]}, NOTE)
    await tab.window.run(
        """(async () => {
          replica.close()
          const options = {idMember: "name", onConflict: {notes: ({remote}) => remote}}
          window.replica = await pysync.Replica.open("merged", client, {notes: {}}, options)
          await replica.synced()
        })()"""
    )
    site.leave()
    await tab.put({"title": "ours", "items": [{"name": "milk"}, {"name": "eggs"}]}, NOTE)
    await site.push({"title": "theirs", "items": [{"name": "milk"}, {"name": "bread"}]}, NOTE)
    site.proxy.reset()
    await tab.synced()
    merged = {"title": "theirs", "items": [{"name": "milk"}, {"name": "bread"}, {"name": "eggs"}]}
    assert await tab.get(NOTE) == merged == await site.pull(NOTE)
    (lost,) = await tab.window.run("replica.dropped")
    assert (lost["key"], lost["dropped"]) == (NOTE, {"path": ["title"], "value": "ours", "local": True})


async def test_edit_wins_over_a_removal_and_over_a_deletion(site: WebSite, tab: Tab) -> None:
    for key in ("notes/removed", "notes/edited"):
        await tab.put({"n": 1}, key)
    await tab.synced()
    site.leave()
    await tab.put({"n": 3}, "notes/removed")
    await tab.window.run("replica.delete('notes/edited')")
    async with site.client() as other:
        await other.delete("notes/removed", (await other.pull("notes/removed")).hash)
    await site.push({"n": 2}, "notes/edited")
    site.proxy.reset()
    await tab.synced()
    assert await tab.window.run("replica.entries()") == [
        ["notes/edited", {"n": 2}],
        ["notes/removed", {"n": 3}],
    ]
    assert await site.pull("notes/removed") == {"n": 3}
    lost = "replica.dropped.filter((each) => each.dropped.value === pysync.MISSING && each.dropped.local)"
    assert await tab.window.run(f"{lost}.map(({{key}}) => key)") == ["notes/edited"]


@pytest.mark.parametrize(
    ("key", "data", "error"),
    [
        ("readonly/a", {"n": 1}, "NotFound"),
        (NOTE, {"text": LONG}, "PayloadTooLarge"),
        ("unknown/a", {"n": 1}, "NotFound"),
    ],
)
async def test_edit_that_is_rejected_is_kept_and_does_not_stop_others(
    site: WebSite, tab: Tab, key: str, data: dict[str, Any], error: str
) -> None:
    await tab.put(data, key)
    await tab.put({"n": 1}, "notes/other")
    await tab.synced()
    assert (await tab.status())["rejected"] == [[key, "put", error]]
    assert await tab.window.run("replica.status().then(({rejected: [{data}]}) => data)") == data
    assert (await tab.get(key), await tab.get("notes/other")) == (None, {"n": 1})
    await tab.window.run("(key) => replica.discard(key)", key)
    assert (await tab.status())["rejected"] == []


async def test_edit_that_is_retried_is_merged_with_what_is_there(site: WebSite, tab: Tab) -> None:
    await tab.put({"n": 1}, NOTE)
    await tab.synced()
    await tab.put({"n": 1, "text": LONG}, NOTE)
    await tab.synced()
    assert await tab.get(NOTE) == {"n": 1}
    await tab.put({"n": 2}, NOTE)
    await tab.synced()
    await tab.window.run(f"replica.retry('{NOTE}')")
    await tab.put({"n": 1, "text": "y"}, NOTE)
    await tab.synced()
    assert await tab.get(NOTE) == {"n": 2, "text": "y"} == await site.pull(NOTE)
    assert (await tab.status())["rejected"] == []


async def test_edit_that_is_retried_is_merged_with_one_that_waits(site: WebSite, tab: Tab) -> None:
    await tab.put({"text": LONG, "m": 1}, NOTE)
    await tab.synced()
    site.leave()
    await tab.put({"text": "y"}, NOTE)
    await tab.window.run(f"replica.retry('{NOTE}')")
    assert await tab.get(NOTE) == {"text": "y", "m": 1}
    status = await tab.status()
    assert (status["unsent"], status["rejected"]) == (1, [])


async def test_newer_edit_is_sent_although_the_one_on_its_way_is_rejected(site: WebSite, tab: Tab) -> None:
    release = asyncio.Event()
    arrived = site.proxy.delay(until=release, when=is_write)
    await tab.put({"text": LONG}, NOTE)
    await arrived.wait()
    await tab.put({"text": "y"}, NOTE)
    release.set()
    await tab.synced()
    assert (await tab.get(NOTE), (await tab.status())["rejected"]) == ({"text": "y"}, [])


async def test_rejected_append_does_not_stop_the_next(tab: Tab) -> None:
    await tab.append({"text": LONG}, ENTRIES)
    await tab.append({"n": 2}, ENTRIES)
    await tab.synced()
    assert (await tab.status())["rejected"] == [[ENTRIES, "append", "PayloadTooLarge"]]
    assert await tab.tail(ENTRIES) == [{"n": 2}]


@pytest.mark.parametrize("arrives", [True, False])
async def test_old_append_without_an_answer_is_looked_for_in_the_log(
    site: WebSite, tab: Tab, clock: FakeClock, arrives: bool
) -> None:
    """Equal appends are two elements, of which one was accepted before."""
    await tab.append({"n": 1}, ENTRIES)
    await tab.synced()
    lose_reply(site) if arrives else site.leave()
    await tab.append({"n": 1}, ENTRIES)
    assert await tab.error_of("replica.synced()") == ["Unreachable", None]
    await tab.append({"n": 1}, ENTRIES)
    await ten_minutes_later(site, tab, clock)
    assert await site.elements(ENTRIES) == [{"n": 1}] * 3
    assert await tab.tail(ENTRIES) == [{"n": 1}] * 3


async def test_old_append_to_a_log_that_may_not_be_read_waits_for_a_decision(
    site: WebSite, tab: Tab, clock: FakeClock
) -> None:
    lose_reply(site)
    await tab.append({"n": 1}, "letters/a")
    assert await tab.error_of("replica.synced()") == ["Unreachable", None]
    await ten_minutes_later(site, tab, clock)
    assert (await tab.status())["rejected"] == [["letters/a", "append", "OutcomeUnknown"]]
    await tab.window.run("replica.retry('letters/a')")
    await tab.synced()
    assert (await tab.status())["rejected"] == []


async def test_append_that_is_tried_again_and_again_is_looked_for_in_the_log(
    site: WebSite, tab: Tab, clock: FakeClock
) -> None:
    """The server remembers the first attempt for ten minutes, however often it is tried again."""
    lose_reply(site)
    await tab.append({"n": 1}, ENTRIES)
    assert await tab.error_of("replica.synced()") == ["Unreachable", None]
    for minutes in (4, 8):
        await come_back(site, tab, clock, minutes)
        await tab.error_of("replica.synced()")
    await come_back(site, tab, clock, 12)
    await tab.synced()
    assert await site.elements(ENTRIES) == [{"n": 1}]


async def ten_minutes_later(site: WebSite, tab: Tab, clock: FakeClock) -> None:
    """Load the page again when the server knows no idempotency key any more, and have the replica send
    everything."""
    await come_back(site, tab, clock, 11)
    await tab.synced()


async def come_back(site: WebSite, tab: Tab, clock: FakeClock, minutes: int) -> None:
    """Load the page again so many minutes after the start of the test."""

    def drop_time(headers: CIMultiDict[str]) -> None:
        headers.popall("Date", None)  # which is not the time of the clock

    await tab.window.run("replica.close()")
    clock.now_ms = wall_clock_ms() + minutes * 60_000
    site.proxy.reset()
    site.proxy.rewrite(answered=drop_time)
    site.proxy.abort(when=lambda sent: is_write(sent) and minutes < 10, times=None)
    await tab.window.load(f"{site.proxy.url}/examples/blank.html")
    await tab.window.run(shifted_clock(minutes * 60_000))
    await site.open_replica(tab, collections=FOLLOWED)


async def test_sealed_edits_are_sealed_on_their_way_and_repeated_as_they_were(
    site: WebSite, tab: Tab
) -> None:
    """Sealing the same data again would give other bytes."""
    await tab.window.run(f"({SEALED})()")
    forget_keys(site)
    lose_reply(site)
    await tab.put({"n": 1}, NOTE)
    assert await tab.error_of("replica.synced()") == ["Unreachable", None]
    site.proxy.reset()
    await tab.synced()
    pulled = await site.pull(NOTE)
    assert pulled.keys() == {"_encrypted", "_epoch"}
    assert await tab.window.run("(data) => sealing.open(data)", pulled) == await tab.get(NOTE) == {"n": 1}
    status = await tab.status()
    assert (status["unsent"], status["rejected"]) == (0, [])


async def test_edit_does_not_replace_what_cannot_be_opened(site: WebSite, tab: Tab) -> None:
    await site.push({"plain": 1}, NOTE)
    await tab.window.run(f"({SEALED})()")
    await tab.put({"n": 1}, NOTE)
    await tab.put({"n": 1}, "notes/b")
    await tab.synced()
    assert (await tab.status())["rejected"] == [[NOTE, "put", "NotSealed"]]
    assert (await tab.error_of(f"replica.get('{NOTE}')"))[0] == "NotSealed"
    assert await tab.window.run("replica.entries()") == [["notes/b", {"n": 1}]]
    assert await site.pull(NOTE) == {"plain": 1}


async def test_put_keeps_a_copy_and_rejects_what_json_cannot_hold(tab: Tab) -> None:
    await tab.window.run(
        "{ const data = {list: [1]}; replica.put('notes/a', data); data.list.push(2) }; null"
    )
    await tab.window.until("await replica.get('notes/a')")
    assert await tab.get(NOTE) == {"list": [1]}
    for data, error in (("{n: NaN}", "RangeError"), ("{n: 1n}", "TypeError"), ("[1]", "TypeError")):
        for edit in ("put", "append"):
            assert (await tab.error_of(f"replica.{edit}('notes/b', {data})"))[0] == error
    assert await tab.get("notes/b") is None
