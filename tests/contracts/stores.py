"""The contract of `Store`, as tests."""

import asyncio
import time

import pytest

from contracts.change_logs import change
from contracts.files import FileContract, chunks_of, read_file
from pysync.store import (
    ABSENT,
    ANY,
    NOT_MODIFIED,
    AppendedObject,
    Etag,
    EtagMismatch,
    Precondition,
    Segment,
    Store,
    StoredObject,
    TransactionalStore,
    Write,
)


class StoreContract(FileContract):
    """The contract of `Store`. The subclass provides the fixture `store`: an open, empty store."""

    async def test_put_object_is_read_at_once(self, store: Store) -> None:
        before_ms = time.time_ns() // 1_000_000
        etag = await store.put("notes/a", b"one", "application/x-test")
        found = await store.get("notes/a")
        assert isinstance(found, StoredObject)
        assert (found.body, found.etag, found.content_type) == (b"one", etag, "application/x-test")
        assert before_ms <= found.modified_ms <= time.time_ns() // 1_000_000

    async def test_removing_traces_of_what_was_deleted_keeps_all_else(self, store: Store) -> None:
        for key in ("notes/a", "notes/b"):
            await store.put(key, key.encode())
            await store.write(f"{key}/file", chunks_of(key.encode()), "text/plain")
        await store.delete("notes/a")
        await store.delete("notes/a/file")
        await store.purge_deleted()
        assert await store.get("notes/a") is None
        assert await store.stat("notes/a/file") is None
        found = await store.get("notes/b")
        assert isinstance(found, StoredObject)
        assert found.body == b"notes/b"
        assert (await read_file(store, "notes/b/file"))[1] == b"notes/b"
        await store.put("notes/a", b"again")

    async def test_nothing_stored_is_none(self, store: Store) -> None:
        await store.put("notes/a", b"one")
        for key in ("notes", "notes/b", "notes/a/b"):
            assert await store.get(key) is None
        assert await store.open("notes/b") is None

    async def test_empty_and_large_bodies_come_back_whole(self, store: Store) -> None:
        for body in (b"", bytes(range(256)) * 4096):
            await store.put("body", body)
            await self._assert_body(store, "body", body)

    async def test_many_are_got_as_each_would_be(self, store: Store) -> None:
        many = [f"many/{n}" for n in range(200)]
        for key in ("a/x", "a/z", "b/x", "top", *many):
            await store.put(key, key.encode())
        await store.write("a/file", chunks_of(b"file"), "text/plain")
        keys = ["a/z", "top", "a/none", "b/x", "a/x", "a/file", "c/x"]
        assert await store.get_many(keys) == {key: await store.get(key) for key in keys}
        assert await store.get_many([]) == {}
        found = await store.get_many(many[::-1])
        assert {key: one and one.body for key, one in found.items()} == {key: key.encode() for key in many}
        await store.delete("a/x")
        assert await store.get_many(["a/x"]) == {"a/x": None}

    async def test_reading_many_stops_once_there_are_enough_bytes(self, store: Store) -> None:
        for n in range(40):
            await store.put(f"many/{n:02}", b"x" * 20_000)
        left = ["other/none", *(f"many/{n:02}" for n in range(40)), "many/none"]
        found: dict[str, StoredObject | None] = {}
        rounds = 0
        while left:
            some = await store.get_many(left, 100_000)
            assert some, "at least one"
            assert some.keys() <= set(left)
            found |= some
            left = [key for key in left if key not in found]
            rounds += 1
        assert sum(one is not None and one.body == b"x" * 20_000 for one in found.values()) == 40
        assert {key for key, one in found.items() if one is None} == {"other/none", "many/none"}
        if not store.is_remote:
            assert rounds > 2

    async def test_etags_and_sizes_are_those_of_what_get_returns(self, store: Store) -> None:
        for key, body in (("a/x", b"12345"), ("a/y", b"y" * 200_000), ("top", b"")):
            await store.put(key, body)
        await store.write("a/file", chunks_of(b"file"), "text/plain")
        keys = ["a/y", "none", "a/x", "top", "a/file", "a/none"]
        found = await store.info_many(keys)
        if found is not None:
            each = {key: await store.get(key) for key in keys}
            assert {key: one and (one.etag, one.size) for key, one in found.items()} == {
                key: (one.etag, len(one.body)) if isinstance(one, StoredObject) else None
                for key, one in each.items()
            }
            assert await store.info_many([]) == {}

    async def test_a_known_etag_is_not_modified_until_the_next_write(self, store: Store) -> None:
        etag = await store.put("a", b"same")
        assert await store.get("a", etag) is NOT_MODIFIED
        assert isinstance(await store.get("a", "another"), StoredObject)
        await store.put("a", b"same")
        assert isinstance(await store.get("a", etag), StoredObject)
        assert await store.get("b", etag) is None

    async def test_no_write_reuses_an_etag(self, store: Store) -> None:
        etags = []
        for _ in range(20):
            etags.append(await store.put("a", b"same"))
            await store.delete("a")
        assert len(set(etags)) == 20

    async def test_absent_holds_only_where_nothing_is(self, store: Store) -> None:
        await store.put("a", b"one", expect=ABSENT)
        with pytest.raises(EtagMismatch):
            await store.put("a", b"two", expect=ABSENT)
        await self._assert_body(store, "a", b"one")

    async def test_an_etag_holds_only_over_its_version(self, store: Store) -> None:
        first = await store.put("a", b"one")
        await store.put("a", b"two", expect=Etag(first))
        for key in ("a", "b"):
            with pytest.raises(EtagMismatch):
                await store.put(key, b"three", expect=Etag(first))
        await self._assert_body(store, "a", b"two")
        assert await store.get("b") is None

    async def test_of_many_writers_with_one_expectation_one_wins(self, store: Store) -> None:
        async def attempt(body: bytes, expect: Precondition) -> str | None:
            try:
                return await store.put("a", body, expect=expect)
            except EtagMismatch:
                return None

        expect: Precondition = ABSENT
        for round_ in range(10):
            bodies = [b"%d-%d" % (round_, writer) for writer in range(32)]
            etags = await asyncio.gather(*(attempt(body, expect) for body in bodies))
            won = [(body, etag) for body, etag in zip(bodies, etags, strict=True) if etag is not None]
            assert len(won) == 1
            found = await store.get("a")
            assert isinstance(found, StoredObject)
            assert (found.body, found.etag) == won[0]
            expect = Etag(found.etag)

    async def test_a_rejected_write_leaves_its_neighbours_alone(self, store: Store) -> None:
        await store.put("taken", b"one")
        writes = [store.put(f"n/{n}", b"n") for n in range(8)]
        writes.insert(4, store.put("taken", b"two", expect=ABSENT))
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes].count(EtagMismatch) == 1
        assert len(await store.list("n", None, 100)) == 8

    async def test_a_cancelled_writer_leaves_its_neighbours_alone(self, store: Store) -> None:
        writes = [asyncio.ensure_future(store.put(f"n/{n}", b"n")) for n in range(8)]
        await asyncio.sleep(0)
        writes[3].cancel()
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        assert sum(isinstance(outcome, str) for outcome in outcomes) >= 7
        for n in {*range(8)} - {3}:
            await self._assert_body(store, f"n/{n}", b"n")

    async def test_deleting_is_conditional(self, store: Store) -> None:
        etag = await store.put("a", b"one")
        unmet: list[Precondition] = [ABSENT, Etag("another")]
        for expect in unmet:
            with pytest.raises(EtagMismatch):
                await store.delete("a", expect)
        await self._assert_body(store, "a", b"one")
        await store.delete("a", Etag(etag))
        assert await store.get("a") is None
        with pytest.raises(EtagMismatch):
            await store.delete("a", Etag(etag))
        for expect in (ANY, ABSENT):
            await store.delete("a", expect)
        assert await store.list("", None, 10) == []

    async def test_of_concurrent_deletes_of_a_version_one_succeeds(self, store: Store) -> None:
        etag = await store.put("a", b"one")
        await store.write("f/a", chunks_of(b"two"), "text/plain")
        stat = await store.stat("f/a")
        assert stat is not None
        for key, version in (("a", etag), ("f/a", stat.etag)):
            deletes = (store.delete(key, Etag(version)) for _ in range(4))
            outcomes = await asyncio.gather(*deletes, return_exceptions=True)
            assert sorted(map(repr, outcomes)) == ["EtagMismatch()"] * 3 + ["None"]
            assert (await store.get(key), await store.stat(key)) == (None, None)

    async def test_of_a_delete_and_a_put_over_a_version_one_succeeds(self, store: Store) -> None:
        for n in range(4):
            etag = await store.put(f"n/{n}", b"one")
            deleted, put = await asyncio.gather(
                store.delete(f"n/{n}", Etag(etag)),
                store.put(f"n/{n}", b"two", expect=Etag(etag)),
                return_exceptions=True,
            )
            is_deleted = isinstance(put, EtagMismatch)
            assert isinstance(deleted, EtagMismatch) is not is_deleted
            assert (await store.get(f"n/{n}") is None) == is_deleted

    async def test_a_list_holds_direct_children_in_code_point_order(self, store: Store) -> None:
        # U+FFFD sorts after U+1F600 in UTF-16, before it by code point.
        names = ["A", "Z", "a", "a-b", "a.b", "a0", "é", "\ufffd", "\U0001f600"]
        for key in (*(f"p/{name}" for name in reversed(names)), "p/a/deeper", "p", "p-x/other"):
            await store.put(key, b"1")
        await store.write("p/file", chunks_of(b"1"), "text/plain")
        assert await store.list("p", None, 100) == sorted([*names, "file"])
        assert await store.list("p/a", None, 100) == ["deeper"]
        assert await store.list("", None, 100) == ["p"]
        assert await store.list("nothing", None, 100) == []

    async def test_a_list_continues_after_any_name(self, store: Store) -> None:
        names = [f"{n:03}" for n in range(50)]
        for name in names:
            await store.put(f"p/{name}", b"1")
        paged: list[str] = []
        while page := await store.list("p", paged[-1] if paged else None, 7):
            assert len(page) <= 7
            paged += page
        assert paged == names
        assert await store.list("p", "0205", 2) == ["021", "022"]

    async def test_a_walk_meets_everything_below_once(self, store: Store) -> None:
        keys = ["p/a", "p/a/b", "p/a/b/c", "p/z", "p-x/a", "p.x", "p0", "q/a"]
        keys += [f"p/many/{n}" for n in range(600)]
        etags = {key: await store.put(key, b"1") for key in keys}
        await store.put("p", b"1")
        await store.write("p/file", chunks_of(b"1"), "text/plain")
        met = [listed async for listed in store.walk("p")]
        assert len(met) == len({listed.key for listed in met})
        assert {listed.key for listed in met} == {k for k in keys if k.startswith("p/")} | {"p/file"}
        assert all(listed.etag == etags[listed.key] for listed in met if listed.key != "p/file")
        assert {listed.key async for listed in store.walk("")} == {*keys, "p", "p/file"}

    async def test_a_walk_continues_behind_any_key(self, store: Store) -> None:
        keys = [f"p/{name}" for name in ("a", "a/b", "a/b/c", "a-b", "a0", "z")] + [
            f"p/a/{n}" for n in range(300)
        ]
        for key in (*keys, "p-x/a", "q/a"):
            await store.put(key, b"1")
        whole = [listed.key async for listed in store.walk("p")]
        assert sorted(whole) == sorted(keys)
        for at, key in enumerate(whole):
            if at % 37 == 0:
                await store.delete(key)
            if at % 9 == 0:
                rest = [listed.key async for listed in store.walk("p", key)]
                assert rest == whole[at + 1 :]

    async def test_a_key_holds_a_document_or_a_file(self, store: Store) -> None:
        await store.put("a", b"document")
        await store.write("a", chunks_of(b"file"), "text/plain")
        assert await store.get("a") is None
        assert (await read_file(store, "a"))[1] == b"file"
        with pytest.raises(EtagMismatch):
            await store.put("a", b"document", expect=ABSENT)
        [listed] = [listed async for listed in store.walk("")]
        await store.put("a", b"document", expect=Etag(listed.etag))
        assert await store.open("a") is None
        await self._assert_body(store, "a", b"document")
        assert await store.list("", None, 10) == ["a"]

    @pytest.mark.parametrize(
        "key", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "../a", "a\0b", "\ud800", "a/\udfff"]
    )
    async def test_a_key_that_could_escape_is_rejected(self, store: Store, key: str) -> None:
        for attempt in (
            store.get(key),
            store.put(key, b"1"),
            store.open(key),
            store.write(key, chunks_of(b"1"), "text/plain"),
            store.delete(key),
        ):
            with pytest.raises(ValueError):  # noqa: PT011 - no text is promised
                await attempt
        assert [listed async for listed in store.walk("")] == []

    @pytest.mark.parametrize("key", ["..a", "a..", ".a/b", "a/.b", "...", "a b", "a:b@c", "ä/ö"])
    async def test_dots_and_other_characters_inside_a_segment_are_fine(self, store: Store, key: str) -> None:
        await store.put(key, b"1")
        await self._assert_body(store, key, b"1")

    async def test_a_working_store_passes_its_probe(self, store: Store) -> None:
        await store.probe()
        await store.probe()
        assert [listed async for listed in store.walk("")] == []

    async def _assert_body(self, store: Store, key: str, body: bytes) -> None:
        found = await store.get(key)
        assert isinstance(found, StoredObject)
        assert found.body == body


class TransactionalStoreContract(StoreContract):
    """The contract of `TransactionalStore`. The fixture `store` is one."""

    async def test_a_removal_and_its_changes_are_one(self, store: TransactionalStore) -> None:
        etag = await store.commit(Write("a", b"one", changes=[change("put")]))
        await store.write("f/a", chunks_of(b"two"), "text/plain")
        with pytest.raises(EtagMismatch):
            await store.commit(Write("a", None, Etag("another"), [change("refused")]))
        await store.commit(Write("a", None, Etag(etag), [change("one"), change("two")]))
        await store.commit(Write("f/a", None, changes=[change("three")]))
        found = await store.change_log.read("", 10)
        assert found is not None
        assert [each for _, each in found] == [change(text) for text in ("put", "one", "two", "three")]
        assert await store.get("a") is None
        assert await store.stat("f/a") is None

    async def test_segments_are_stored_with_what_refers_to_them_or_not_at_all(
        self, store: TransactionalStore
    ) -> None:
        await store.commit(
            Write("log", b"1", segments=[Segment("log/one", b"one"), Segment("log/two", b"two")])
        )
        with pytest.raises(EtagMismatch):
            await store.commit(Write("log", b"2", Etag("another"), segments=[Segment("log/three", b"three")]))
        with pytest.raises(Exception, match="surrogates"):
            await store.commit(Write("log", b"3", segments=[Segment("log/four", "\udc80")]))  # type: ignore[arg-type]
        stored = await store.get_many(["log", "log/one", "log/two", "log/three", "log/four"])
        assert [each and each.body for each in stored.values()] == [b"1", b"one", b"two", None, None]

    async def test_many_are_removed_at_once(self, store: TransactionalStore) -> None:
        await store.put("a", b"1")
        await store.put("b/c", b"2")
        await store.write("f/a", chunks_of(b"3"), "text/plain")
        await store.put("kept", b"4")
        await store.delete_all(["a", "b/c", "none", "f/a"])
        assert [listed.key async for listed in store.walk("")] == ["kept"]
        assert await store.stat("f/a") is None
        await self._assert_body(store, "kept", b"4")

    async def test_missing_object_is_removed_without_a_change(self, store: TransactionalStore) -> None:
        last = await store.change_log.last_id()
        await store.commit(Write("a", None, changes=[change("one")]))
        assert await store.change_log.last_id() == last

    async def test_objects_are_appended_with_a_write_or_not_at_all(self, store: TransactionalStore) -> None:
        def appended(body: bytes) -> list[AppendedObject]:
            return [AppendedObject("deeper/log", 7, "-x", body)]

        etag = await store.commit(Write("a", b"one", also=appended(b"1")))
        with pytest.raises(EtagMismatch):
            await store.commit(Write("a", b"two", ABSENT, also=appended(b"2")))
        with pytest.raises(EtagMismatch):
            await store.commit(Write("a", None, Etag("another"), also=appended(b"3")))
        await store.commit(Write("none", None, also=appended(b"4")))
        later = AppendedObject("deeper/log", 9, "-a", b"5")
        await store.commit(Write("b", b"one", also=[later, *appended(b"6")]))
        await store.commit(Write("a", None, Etag(etag), also=appended(b"7")))
        names = await store.list("deeper/log", None, 10)
        assert [int(name[:16]) for name in names] == [7, 9, 10, 11]
        assert [name[16:] for name in names] == ["00000000-x", "00000000-a", "00000000-x", "00000000-x"]
        for name, body in zip(names, (b"1", b"5", b"6", b"7"), strict=True):
            await self._assert_body(store, f"deeper/log/{name}", body)
