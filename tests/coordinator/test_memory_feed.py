"""The feed of a service whose store and coordinator are in its memory."""

import pytest
from contracts.feeds import FeedContract, changes_of, keys_of, page_of, remove, write

from pysync.changelog import Retention
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.feed import MemoryFeed
from pysync.engine.outbox import Outbox, outbox_of
from pysync.feed import Feed, ResetReason
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def coordinator(clock: FakeClock) -> MemoryCoordinator:
    return MemoryCoordinator(clock, retention=Retention(count=2, removals_ms=1_000))


@pytest.fixture
def outbox(coordinator: MemoryCoordinator) -> Outbox:
    return outbox_of(MemoryStore(), coordinator)


@pytest.fixture
def feed(coordinator: MemoryCoordinator) -> Feed:
    return MemoryFeed(coordinator, lambda ref: ref.key)


class TestMemoryFeed(FeedContract):
    """The log keeps two changes."""


async def test_removal_is_kept_for_its_time_and_then_forgotten(
    feed: Feed, outbox: Outbox, clock: FakeClock
) -> None:
    await write(outbox, "notes/a", b"1")
    before = (await page_of(feed)).cursor
    await remove(outbox, "notes/a")
    removed = (await page_of(feed)).cursor
    clock.now_ms += 1_000
    await write(outbox, "notes/b", b"1")
    assert await keys_of(feed, before) == ["-notes/a", "notes/b"]
    clock.now_ms += 1
    await write(outbox, "notes/c", b"1")
    assert await feed.latest([""], before, 10) == ResetReason.FORGOTTEN
    assert await keys_of(feed, removed) == ["notes/b", "notes/c"]
    assert await keys_of(feed) == ["notes/b", "notes/c"]
    first = await page_of(feed, "", 1)
    assert await keys_of(feed, first.cursor) == ["notes/c"], "a run that began later has no use for it"


async def test_a_coordinator_without_a_feed_keeps_what_its_log_keeps(
    coordinator: MemoryCoordinator, outbox: Outbox
) -> None:
    """The store of such a service is a bucket, whose documents may be many."""
    for name in "abcd":
        await write(outbox, f"notes/{name}", b"1")
    late = MemoryFeed(coordinator, lambda ref: ref.key)
    assert await keys_of(late) == []
    await write(outbox, "notes/e", b"1")
    assert await keys_of(late) == ["notes/e"]


async def test_erased_names_leave_the_feed(feed: Feed, outbox: Outbox) -> None:
    for name in "ab":
        await write(outbox, f"notes/{name}", b"1")
    await remove(outbox, "notes/a")
    cursor = (await page_of(feed)).cursor
    log = outbox.log
    await log.erase({id_: change.erased([(None, "notes")]) for id_, change in await log.newest(1)})
    assert "notes/a" not in [each.key for each in await changes_of(feed, cursor)]
    await write(outbox, "notes/c", b"1")
    assert await keys_of(feed, cursor) == ["notes/c"]
