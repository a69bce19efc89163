"""The contract of `Feed`, as tests."""

import hashlib

import pytest

from contracts.files import chunks_of
from pysync.changelog import Cursor
from pysync.engine.changes import DocumentRef
from pysync.engine.outbox import Outbox
from pysync.feed import Feed, FeedPage, LatestChange, ResetReason
from pysync.store import ANY, Etag, EtagMismatch, Precondition, Write


def hash_of(body: bytes) -> str:
    """Return the hash that `write` gives a document with this body."""
    return hashlib.sha256(body).hexdigest()


async def write(
    outbox: Outbox, key: str, body: bytes, expect: Precondition = ANY, timestamp_ms: int = 7
) -> str:
    """Write and announce a document, and return its hash."""
    hash_ = hash_of(body)
    change = DocumentRef("notes", {"key": key}, key=key).change(hash_, timestamp_ms)
    await outbox.commit(Write(key, body, expect, [change], version=(hash_, timestamp_ms)))
    return hash_


async def remove(outbox: Outbox, key: str, timestamp_ms: int = 8) -> None:
    """Remove what is at a key, and announce it."""
    change = DocumentRef("notes", {"key": key}, key=key).change("f" * 64, timestamp_ms, removed=True)
    await outbox.commit(Write(key, None, ANY, [change], version=("f" * 64, timestamp_ms)))


async def page_of(feed: Feed, since: str = "", limit: int = 1_000, *folders: str) -> FeedPage:
    """Return a page, which must not be a reset."""
    page = await feed.latest(folders or ("",), since, limit)
    assert isinstance(page, FeedPage)
    assert len(page.changes) <= limit
    assert [change.id for change in page.changes] == sorted({change.id for change in page.changes})
    return page


async def changes_of(feed: Feed, since: str = "", limit: int = 1_000, *folders: str) -> list[LatestChange]:
    """Return all changes, read in pages."""
    found, cursor = list[LatestChange](), since
    while True:
        page = await page_of(feed, cursor, limit, *folders)
        found += page.changes
        cursor = page.cursor
        if page.is_end:
            return found


async def keys_of(feed: Feed, since: str = "", limit: int = 1_000, *folders: str) -> list[str]:
    """Return the keys of all changes; that of a removal begins with a minus."""
    found = await changes_of(feed, since, limit, *folders)
    return [f"-{each.key}" if each.removed else each.key for each in found]


class FeedContract:
    """The contract of `Feed`. The subclass provides the fixtures `feed`, without changes, and `outbox`, which
    writes to its store."""

    async def test_each_object_comes_once_in_the_order_of_the_last_changes(
        self, feed: Feed, outbox: Outbox
    ) -> None:
        assert await changes_of(feed) == []
        for n in range(3):
            for name in "abc":
                await write(outbox, f"notes/{name}", b"%d" % n, timestamp_ms=n)
        last = await write(outbox, "notes/b", b"last", timestamp_ms=9)
        found = await changes_of(feed)
        assert [(each.key, each.timestamp_ms) for each in found] == [
            ("notes/a", 2),
            ("notes/c", 2),
            ("notes/b", 9),
        ]
        assert [each.hash for each in found] == [hash_of(b"2"), hash_of(b"2"), last]
        assert not any(each.removed for each in found)

    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
    async def test_pages_of_any_size_give_the_same(self, feed: Feed, outbox: Outbox, limit: int) -> None:
        for n in range(10):
            await write(outbox, f"notes/{n * 3 % 7}", b"%d" % n)
        whole = await changes_of(feed)
        assert len(whole) == 7
        assert await changes_of(feed, "", limit) == whole

    async def test_a_reader_at_the_end_gets_what_comes_later(self, feed: Feed, outbox: Outbox) -> None:
        await write(outbox, "notes/a", b"1")
        cursor = (await page_of(feed)).cursor
        assert cursor == await outbox.log.last_id()
        assert (await page_of(feed, cursor)) == FeedPage([], 0, True, cursor, f"~{cursor}~{cursor}")
        await write(outbox, "notes/b", b"1")
        await write(outbox, "notes/a", b"2")
        assert await keys_of(feed, cursor) == ["notes/b", "notes/a"]
        assert await keys_of(feed, cursor, 1) == ["notes/b", "notes/a"]

    async def test_an_id_of_the_log_is_a_cursor_of_the_feed_and_the_other_way_round(
        self, feed: Feed, outbox: Outbox
    ) -> None:
        ids = [await outbox.log.last_id()]
        for name in "abcd":
            await write(outbox, f"notes/{name}", b"1")
            ids.append(await outbox.log.last_id())
        for n, id_ in enumerate(ids):
            assert await keys_of(feed, id_) == [f"notes/{name}" for name in "abcd"[n:]]
        page = await page_of(feed, ids[1], 2)
        assert not page.is_end
        assert [each.key for each in page.changes] == ["notes/b", "notes/c"]
        for cursor, left in ((page.cursor, 1), (page.cursor_after(page.changes[0]), 2)):
            found = await outbox.log.read(cursor, 10)
            assert found is not None
            assert len(found) == left
            assert await keys_of(feed, cursor) == ["notes/c", "notes/d"][-left:]

    async def test_only_what_is_at_or_below_the_keys_is_returned(self, feed: Feed, outbox: Outbox) -> None:
        keys = ["a", "a/b", "a/b/c", "a/b/c/d", "a-b", "a/bc", "b/a", "c", "a0", "b"]
        cursor = await outbox.log.last_id()
        for key in keys:
            await write(outbox, key, b"1")
        for since in ("", cursor):
            for limit in (1, 2, 100):
                assert await keys_of(feed, since, limit, "a") == ["a", "a/b", "a/b/c", "a/b/c/d", "a/bc"]
                assert await keys_of(feed, since, limit, "a/b") == ["a/b", "a/b/c", "a/b/c/d"]
                assert await keys_of(feed, since, limit, "b/a", "a/b/c", "a/b") == [
                    *("a/b", "a/b/c", "a/b/c/d", "b/a")
                ]
                assert await keys_of(feed, since, limit, "d", "a/b/c/d/e") == []
                assert await keys_of(feed, since, limit, "", "a") == keys

    async def test_a_removal_is_the_last_change_of_its_object(self, feed: Feed, outbox: Outbox) -> None:
        await write(outbox, "notes/a", b"1")
        await write(outbox, "notes/b", b"1")
        cursor = await outbox.log.last_id()
        await remove(outbox, "notes/a", timestamp_ms=12)
        await write(outbox, "notes/c", b"1")
        for folders in ((), ("notes",), ("notes/a", "notes/c")):
            removal, written = await changes_of(feed, cursor, 1_000, *folders)
            assert removal[1:] == ("notes/a", "", 12, True)
            assert written.key == "notes/c"
        later = await outbox.log.last_id()
        await write(outbox, "notes/a", b"2")
        assert await keys_of(feed, cursor) == ["notes/c", "notes/a"]
        await remove(outbox, "notes/a")
        assert await keys_of(feed, cursor) == ["notes/c", "-notes/a"]
        assert await keys_of(feed, later) == ["-notes/a"]
        assert set(await keys_of(feed)) - {"-notes/a"} == {"notes/b", "notes/c"}

    async def test_an_object_that_changes_between_pages_comes_again(self, feed: Feed, outbox: Outbox) -> None:
        for name in "abcd":
            await write(outbox, f"notes/{name}", b"1")
        page = await page_of(feed, "", 2)
        assert [each.key for each in page.changes] == ["notes/a", "notes/b"]
        await write(outbox, "notes/a", b"2")
        await remove(outbox, "notes/b")
        await write(outbox, "notes/c", b"2")
        assert await keys_of(feed, page.cursor, 1) == ["notes/d", "notes/a", "-notes/b", "notes/c"]

    async def test_writes_that_are_not_made_leave_no_trace(self, feed: Feed, outbox: Outbox) -> None:
        await write(outbox, "notes/a", b"1")
        before = await changes_of(feed)
        with pytest.raises(EtagMismatch):
            await write(outbox, "notes/a", b"2", Etag("another"))
        assert await changes_of(feed) == before

    async def test_the_servers_own_objects_are_not_in_the_feed(self, feed: Feed, outbox: Outbox) -> None:
        for key in ("_pysync/a", "_pysync/a/b", "_pysyncs/a", "_pysync-a"):
            await write(outbox, key, b"1")
        await remove(outbox, "_pysync/a")
        assert await keys_of(feed) == ["_pysyncs/a", "_pysync-a"]

    async def test_files_are_in_the_feed_with_their_sha256(self, feed: Feed, outbox: Outbox) -> None:
        ref = DocumentRef("files", {}, key="files/a")
        cursor = await outbox.log.last_id()
        for body in (b"one", b"two"):
            sha256 = await outbox.write(
                "files/a", chunks_of(body), "text/plain", lambda sha256: [ref.change(sha256, 5)]
            )
            assert [(each.key, each.hash) for each in await changes_of(feed, cursor)] == [("files/a", sha256)]
        await remove(outbox, "files/a")
        assert await keys_of(feed, cursor) == ["-files/a"]

    @pytest.mark.parametrize(
        "unknown",
        [
            f"{5:017d}",
            f"{5:017d}-0a1b2c3d",
            f"{10**17 - 1}-0a1b2c3d",
            "001764340000000.001764340000000-0000000001",
        ],
    )
    async def test_a_cursor_of_another_log_is_recognised(
        self, feed: Feed, outbox: Outbox, unknown: str
    ) -> None:
        await write(outbox, "notes/a", b"1")
        assert await feed.latest([""], unknown, 10) == ResetReason.OTHER_EPOCH

    async def test_a_cursor_from_before_an_epoch_began_anew_is_recognised(
        self, feed: Feed, outbox: Outbox
    ) -> None:
        for name in "abc":
            await write(outbox, f"notes/{name}", b"1")
        within, end = await page_of(feed, "", 1), await page_of(feed)
        await outbox.log.begin_epoch()
        for page in (within, end):
            assert await feed.latest([""], page.cursor, 10) == ResetReason.OTHER_EPOCH
        assert await keys_of(feed) == ["notes/a", "notes/b", "notes/c"]

    async def test_a_cursor_within_a_run_says_what_it_began_from(self, feed: Feed, outbox: Outbox) -> None:
        for name in "abc":
            await write(outbox, f"notes/{name}", b"1")
        begun = await outbox.log.last_id()
        first = await page_of(feed, "", 1)
        await write(outbox, "notes/d", b"1")
        latest = await outbox.log.last_id()
        second = await page_of(feed, first.cursor, 1)
        assert Cursor.parse(first.cursor)[1:] == (begun, begun)
        assert Cursor.parse(second.cursor)[1:] == (begun, latest)

    async def test_versions_are_known_without_reading_the_objects(self, feed: Feed, outbox: Outbox) -> None:
        keys = ["a", "notes/a", "notes/b", "other/a"]
        hashes = [await write(outbox, key, key.encode(), timestamp_ms=n) for n, key in enumerate(keys)]
        found = await feed.versions(["notes", "notes/c", "a/b", *keys])
        assert found.keys() <= {*keys}
        for key, version in found.items():
            assert version == (hashes[keys.index(key)], keys.index(key))
        assert await feed.versions([]) == {}

    async def test_place_ahead_of_the_log_is_of_another_log(self, feed: Feed, outbox: Outbox) -> None:
        await write(outbox, "notes/a", b"1")
        newest = (await page_of(feed)).cursor
        assert await feed.latest([""], f"{'9' * 17}~{newest}~{newest}", 10) == ResetReason.OTHER_EPOCH
