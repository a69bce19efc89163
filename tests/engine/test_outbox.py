"""The outbox: whatever fails between a write and its announcement, the write is announced."""

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from pathlib import Path

import pytest
from contracts.change_logs import change
from hypothesis import given, settings
from hypothesis import strategies as st
from support.depth import depth
from support.faulty_coordinator import Scene, announced_despite_faults, made_scene

from pysync import _core
from pysync.concurrency import Job
from pysync.engine.append_log import AppendLogs, LogSettings
from pysync.engine.changes import DocumentRef, WriteContext, parse_change
from pysync.engine.documents import Documents
from pysync.engine.idempotency import SETTLED_MS, IdempotentRequest
from pysync.engine.outbox import EARLY_RECOVERY_MS, Outbox, outbox_of
from pysync.errors import Conflict, CoordinatorUnavailable, StoreUnavailable
from pysync.server.process.background import OutboxRelay
from pysync.store import ABSENT, ANY, Etag, EtagMismatch, Precondition, StoredObject, Write
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock


@pytest.fixture
def scene() -> Scene:
    return made_scene()


ONE = change("1").text.decode()
CONTEXT = WriteContext(DocumentRef("notes", {"id": "a"}), "somebody")
ONCE = IdempotentRequest("key", "content")


def version(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def test_a_write_is_announced_once_and_leaves_no_intent(scene: Scene) -> None:
    etag = await scene.outbox.commit(Write("a", b"1", ABSENT, [change("1"), change("2")]))
    found = await scene.kept.get("a")
    assert isinstance(found, StoredObject)
    assert found.etag == etag
    assert await scene.announced() == [change(text).text.decode() for text in "12"]
    assert await scene.coordinator.prepared(10) == []
    await scene.recover()
    assert len(await scene.announced()) == 2


async def test_write_without_a_change_queries_nobody(scene: Scene) -> None:
    scene.coordinator.crash()
    await scene.outbox.commit(Write("a", b"1", ABSENT, []))
    assert await scene.kept.get("a") is not None
    await scene.outbox.announce([])
    await scene.outbox.reannounce([])


async def test_a_rejected_write_is_withdrawn(scene: Scene) -> None:
    await scene.kept.put("a", b"0")
    with pytest.raises(EtagMismatch):
        await scene.outbox.commit(Write("a", b"1", ABSENT, [change("1")]))
    await scene.recover()
    assert await scene.announced() == []


async def test_failed_prepare_prevents_the_write(scene: Scene) -> None:
    for done in (False, True):
        scene.coordinator.fail("intend", done=done)
        with pytest.raises(CoordinatorUnavailable):
            await scene.outbox.commit(Write("a", b"1", ABSENT, [change("1")]))
    assert await scene.kept.get("a") is None


async def test_a_write_whose_announcement_fails_is_done_and_announced_later(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.coordinator.fail("announce")
    await scene.outbox.commit(Write("a", b"1", ABSENT, [change("1")]))
    assert "failed to announce a stored write, will retry" in caplog.text
    assert await scene.announced() == []
    await scene.recover()
    assert await scene.announced() == [ONE]


@pytest.mark.parametrize("done", [False, True])
async def test_a_rejection_that_cannot_be_withdrawn_is_one_and_withdrawn_later(
    scene: Scene, caplog: pytest.LogCaptureFixture, done: bool
) -> None:
    await scene.kept.put("a", b"0")
    scene.coordinator.fail("withdraw", done=done)
    with pytest.raises(EtagMismatch):
        await scene.outbox.commit(Write("a", b"1", ABSENT, [change("1")]))
    assert "failed to withdraw a rejected write, will retry" in caplog.text
    await scene.recover()
    assert await scene.announced() == []


async def test_a_rejection_of_a_process_that_ended_before_it_withdrew_is_announced(scene: Scene) -> None:
    """Nobody can tell that it was one."""
    await scene.kept.put("a", b"0")
    scene.coordinator.fail("withdraw")
    with pytest.raises(EtagMismatch):
        await scene.outbox.commit(Write("a", b"1", ABSENT, [change("1")]))
    scene.clock.now_ms += SETTLED_MS
    await outbox_of(scene.kept, scene.coordinator).recover()
    assert await scene.announced() == [ONE]


async def test_failed_announcement_is_made_by_the_next_write(scene: Scene) -> None:
    scene.coordinator.fail("announce")
    etag = await scene.outbox.commit(Write("a", b"1", ABSENT, [change("1")]))
    await scene.outbox.commit(Write("b", b"2", ABSENT, [change("2")]))
    assert await scene.announced() == [ONE, change("2").text.decode()]
    assert await scene.coordinator.prepared(10) == []
    scene.coordinator.fail("announce")
    await scene.outbox.commit(Write("a", b"3", Etag(etag), [change("3")]))
    scene.coordinator.fail("announce")
    with pytest.raises(CoordinatorUnavailable):
        await scene.outbox.commit(Write("c", b"4", ABSENT, [change("4")]))
    assert await scene.kept.get("c") is None
    await scene.outbox.flush_outcomes()
    assert len(await scene.announced()) == 3


async def test_a_write_whose_reply_was_lost_is_announced(scene: Scene) -> None:
    scene.store.lose_reply("put")
    with pytest.raises(StoreUnavailable):
        await scene.outbox.commit(Write("a", b"1", ABSENT, [change("1")]))
    assert isinstance(await scene.kept.get("a"), StoredObject)
    await scene.recover()
    assert await scene.announced() == [ONE]


async def test_a_write_whose_writer_was_cancelled_is_announced(scene: Scene) -> None:
    release = asyncio.Event()
    arrived = scene.store.delay("put", release)
    writing = asyncio.ensure_future(scene.outbox.commit(Write("a", b"1", ABSENT, [change("1")])))
    await arrived.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await scene.recover()
    assert await scene.announced() == [ONE]


async def test_young_intent_is_left_to_its_writer(scene: Scene) -> None:
    await scene.coordinator.prepare([change("1")])
    scene.clock.now_ms += EARLY_RECOVERY_MS - 1
    assert await scene.outbox.recover(early=True) == 0
    scene.clock.now_ms += 1
    assert await scene.outbox.recover() == 0
    assert await scene.outbox.recover(early=True) == 1
    assert await scene.announced() == [ONE]
    assert len(await scene.coordinator.prepared(10)) == 1, "its writer may still be at it"
    scene.clock.now_ms += SETTLED_MS - EARLY_RECOVERY_MS
    assert await scene.outbox.recover() == 1
    assert await scene.outbox.recover() == 0
    assert await scene.announced() == [ONE] * 2


async def test_any_number_of_intents_is_repaired(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pysync.engine.outbox.PAGE", 10)
    for n in range(35):
        await scene.coordinator.prepare([change(f"{n}")])
    scene.clock.now_ms += SETTLED_MS
    await scene.coordinator.prepare([change("young")])
    assert await scene.outbox.recover() == 35
    assert await scene.announced() == [change(f"{n}").text.decode() for n in range(35)]


async def put_version(
    outbox: Outbox,
    n: int,
    expect: Precondition,
    base: str = "",
    key: str = "a",
    ref: DocumentRef | None = None,
) -> str:
    """Put `n` as a version of the document at `key`; its etag."""
    body = b"%d" % n
    ref = ref or DocumentRef("notes", {"id": key})
    return await outbox.commit(Write(key, body, expect, [ref.change(version(body), n)], base))


async def versions_announced(scene: Scene) -> list[int]:
    found = await scene.coordinator.read("", 100)
    assert found is not None
    return [parse_change(change).timestamp_ms for _, change in found]


async def test_the_next_write_announces_the_one_before_it_first(scene: Scene) -> None:
    """Its writer has ended, or hangs, before it announced."""
    etag = await put_version(scene.outbox, 0, ABSENT)
    for n in (1, 2):
        scene.coordinator.fail("announce")
        etag = await put_version(
            outbox_of(scene.kept, scene.coordinator), n, Etag(etag), version(b"%d" % (n - 1))
        )
    assert await versions_announced(scene) == [0]
    other = outbox_of(scene.kept, scene.coordinator)
    etag = await put_version(other, 3, Etag(etag), version(b"2"))
    assert await versions_announced(scene) == [0, 1, 2, 3]
    await put_version(other, 4, Etag(etag), version(b"3"))
    assert await versions_announced(scene) == [0, 1, 2, 3, 4]


async def test_versions_of_a_key_are_announced_in_order_by_any_collection(scene: Scene) -> None:
    notes, papers = (
        DocumentRef("notes", {"id": "a"}, key="a"),
        DocumentRef("papers", {"sheet": "a"}, "acme", key="a"),
    )
    scene.coordinator.fail("announce")
    etag = await put_version(scene.outbox, 0, ABSENT, ref=papers)
    other = outbox_of(scene.kept, scene.coordinator)
    await put_version(other, 1, Etag(etag), version(b"0"), ref=notes)
    assert await versions_announced(scene) == [0, 1]


async def test_intent_is_looked_up_only_by_a_writer_that_did_not_announce_the_version_before(
    scene: Scene,
) -> None:
    etag = await put_version(scene.outbox, 0, ABSENT)
    scene.coordinator.fail("intents")
    etag = await put_version(scene.outbox, 1, Etag(etag), version(b"0"))
    with pytest.raises(CoordinatorUnavailable):
        await put_version(outbox_of(scene.kept, scene.coordinator), 2, Etag(etag), version(b"1"))
    assert await versions_announced(scene) == [0, 1]


async def test_a_write_announces_none_of_another_document_and_none_that_it_did_not_replace(
    scene: Scene,
) -> None:
    scene.coordinator.fail("announce")
    await put_version(outbox_of(scene.kept, scene.coordinator), 1, ABSENT, key="b")
    scene.coordinator.fail("announce")
    etag = await put_version(outbox_of(scene.kept, scene.coordinator), 1, ABSENT)
    other = outbox_of(scene.kept, scene.coordinator)
    with pytest.raises(EtagMismatch):
        await put_version(other, 2, Etag("stale"), version(b"1"))
    assert await versions_announced(scene) == []
    await put_version(other, 2, Etag(etag), version(b"1"))
    assert await versions_announced(scene) == [1, 2]
    assert [intent.changes[0].text for intent in await scene.coordinator.prepared(10)] == [
        DocumentRef("notes", {"id": "b"}).change(version(b"1"), 1).text
    ]


CRASHES = ["intend", "intended", "put", "stored", "announce", "announced"]


@pytest.mark.parametrize("crash", CRASHES)
@pytest.mark.parametrize("early", [True, False])
async def test_a_crash_at_any_step_loses_no_announcement(scene: Scene, crash: str, early: bool) -> None:
    """A process that is gone does nothing more: neither store nor coordinator hear of it."""
    if crash.startswith("inten"):
        scene.coordinator.fail("intend", done=crash == "intended")
        scene.store.crash(0, done=False)
    elif crash in ("put", "stored"):
        scene.store.crash(0, done=crash == "stored")
        scene.coordinator.fail("announce")
    else:
        scene.coordinator.fail("announce", done=crash == "announced")
    with contextlib.suppress(StoreUnavailable, CoordinatorUnavailable):
        await scene.outbox.commit(Write("a", b"1", ABSENT, [change("1")]))
    scene.coordinator.restart()
    scene.clock.now_ms += EARLY_RECOVERY_MS if early else SETTLED_MS
    await outbox_of(scene.kept, scene.coordinator).recover(early=early)
    if await scene.kept.get("a") is not None:
        assert ONE in await scene.announced()
    elif crash == "intend":
        assert await scene.announced() == []
    await scene.recover()


class Traced(MemoryStore):
    """Remembers each write that was applied."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.applied: list[bytes] = []

    async def put(self, key: str, body: bytes, content_type: str = "", expect: Precondition = ANY) -> str:
        etag = await super().put(key, body, content_type, expect)
        self.applied.append(body)
        return etag


@settings(max_examples=depth(20, 240), deadline=None)
@given(st.integers(0, 2**32))
async def test_whatever_fails_every_write_that_was_applied_is_announced_in_order(seed: int) -> None:
    clock = FakeClock()
    kept = Traced(clock)

    async def write(outbox: Outbox, content: bytes) -> None:
        found = await kept.get("a")
        expect: Precondition = Etag(found.etag) if isinstance(found, StoredObject) else ABSENT
        base = version(found.body) if isinstance(found, StoredObject) else ""
        await outbox.commit(Write("a", content, expect, [CONTEXT.change(version(content), 1)], base))

    announced = await announced_despite_faults(
        seed, kept, clock, "put", ["intend", "announce", "withdraw"],
        lambda chosen, nodes, contents: [write(chosen.choice(nodes), content) for content in contents],
    )  # fmt: skip
    applied = [version(body) for body in kept.applied]
    assert [hash_ for hash_ in announced if hash_ in applied] == applied


KEYED = DocumentRef("notes", {"id": "a"}, key="a")


async def remove(outbox: Outbox, etag: str, n: int) -> None:
    """Delete version `n` of the document at "a"."""
    removal = KEYED.change(version(b"%d" % n), 100 + n, removed=True)
    await outbox.commit(Write("a", None, Etag(etag), [removal], version(b"%d" % n)))


async def changes_announced(scene: Scene) -> list[tuple[str, bool]]:
    found = await scene.coordinator.read("", 100)
    assert found is not None
    return [(parse_change(change).hash, change.removed) for _, change in found]


class TestRemovals:
    async def test_a_removal_is_announced_after_the_version_that_it_removed(self, scene: Scene) -> None:
        scene.coordinator.fail("announce")
        etag = await put_version(outbox_of(scene.kept, scene.coordinator), 1, ABSENT, ref=KEYED)
        await remove(scene.outbox, etag, 1)
        assert await changes_announced(scene) == [(version(b"1"), False), (version(b"1"), True)]
        assert await scene.coordinator.prepared(10) == []
        assert await scene.kept.get("a") is None

    async def test_a_rejected_removal_is_withdrawn(self, scene: Scene) -> None:
        await scene.kept.put("a", b"1")
        with pytest.raises(EtagMismatch):
            await remove(scene.outbox, "another", 1)
        await scene.recover()
        assert await changes_announced(scene) == []

    @pytest.mark.parametrize("crash", ["intend", "intended", "deleting", "deleted", "announce", "announced"])
    async def test_a_crash_at_any_step_says_at_last_what_is_true(self, scene: Scene, crash: str) -> None:
        etag = await put_version(scene.outbox, 1, ABSENT, ref=KEYED)
        if crash.startswith("inten"):
            scene.coordinator.fail("intend", done=crash == "intended")
            scene.store.crash(0, done=False)
        elif crash.startswith("delet"):
            scene.store.crash(0, done=crash == "deleted")
        else:
            scene.coordinator.fail("announce", done=crash == "announced")
        with contextlib.suppress(StoreUnavailable, CoordinatorUnavailable):
            await remove(scene.outbox, etag, 1)
        scene.coordinator.restart()
        scene.clock.now_ms += SETTLED_MS
        await outbox_of(scene.kept, scene.coordinator).recover()
        is_gone = await scene.kept.get("a") is None
        assert is_gone == (crash in ("deleted", "announce", "announced"))
        assert (await changes_announced(scene))[-1] == (version(b"1"), is_gone)

    async def test_new_creation_after_a_delete_is_announced_last(self, scene: Scene) -> None:
        etag = await put_version(scene.outbox, 1, ABSENT, ref=KEYED)
        release = asyncio.Event()
        arrived = scene.store.delay("get", release)
        removing = asyncio.ensure_future(remove(scene.outbox, etag, 1))
        await arrived.wait()
        await put_version(outbox_of(scene.kept, scene.coordinator), 2, ABSENT, ref=KEYED)
        release.set()
        await removing
        assert (await changes_announced(scene))[-1] == (version(b"1"), False), "pull again"
        assert await scene.coordinator.prepared(10) == []


def body(data: bytes, base: str | None = None) -> _core.PushBody:
    text = b"null" if base is None else b'"%b"' % base.encode()
    return _core.decode_push(b'{"data":%b,"baseHash":%b}' % (data, text))


class TestDocuments:
    """Pushes, seen by who follows."""

    async def test_a_push_is_announced_by_its_answer_and_a_conflict_is_not(self, scene: Scene) -> None:
        documents = Documents(scene.store, scene.coordinator, scene.clock)
        written = await documents.push("notes/a", body(b'{"n":1}'), context=CONTEXT)
        with pytest.raises(Conflict):
            await documents.push("notes/a", body(b'{"n":2}'), context=CONTEXT)
        await scene.recover()
        found = await scene.coordinator.read("", 10)
        assert found is not None
        [(_, announced)] = found
        change = parse_change(announced)
        assert (change.ref, change.identity) == CONTEXT[:2]
        assert change[1:3] == (written.hash, written.timestamp_ms)

    async def test_repeated_push_announces_the_version_of_its_failed_first_attempt(
        self, scene: Scene
    ) -> None:
        documents = Documents(scene.store, scene.coordinator, scene.clock)
        scene.store.lose_reply("put")
        with pytest.raises(StoreUnavailable):
            await documents.push("notes/a", body(b'{"n":1}'), context=CONTEXT, request=ONCE)
        assert await scene.announced() == []
        written = await documents.push("notes/a", body(b'{"n":1}'), context=CONTEXT, request=ONCE)
        assert await scene.announced() == [
            CONTEXT.change(written.hash, written.timestamp_ms).text.decode(),
        ]

    async def test_on_a_store_with_a_log_of_its_own_a_repetition_announces_nothing(
        self, tmp_path: Path, scene: Scene
    ) -> None:
        store = await LocalStore.open_folder(tmp_path)
        documents = Documents(store, scene.coordinator, scene.clock)
        for _ in range(2):
            written = await documents.push("notes/a", body(b'{"n":1}'), context=CONTEXT, request=ONCE)
        found = await store.change_log.read("", 10)
        assert found is not None
        assert [change for _, change in found] == [CONTEXT.change(written.hash, written.timestamp_ms)]
        assert await scene.announced() == []
        assert outbox_of(store, scene.coordinator).is_transactional
        await store.close()


RULES = LogSettings()


def element(n: int) -> _core.Append:
    return _core.decode_append(b'{"data":{"n":%d}}' % n)


class TestLogs:
    """Appends, seen by who follows."""

    async def test_each_element_is_announced_once_by_its_answer(self, scene: Scene) -> None:
        nodes = [AppendLogs(scene.store, scene.coordinator, scene.clock) for _ in range(2)]
        written = await asyncio.gather(
            *(nodes[n % 2].append("log", element(n), RULES, CONTEXT) for n in range(60))
        )
        for node in nodes:
            await node.close()
        await scene.recover()
        expected = Counter(CONTEXT.change(each.hash, each.timestamp_ms).text.decode() for each in written)
        assert Counter(await scene.announced()) == expected

    async def test_an_append_whose_reply_was_lost_is_announced_when_it_is_repeated(
        self, scene: Scene
    ) -> None:
        logs = AppendLogs(scene.store, scene.coordinator, scene.clock)
        scene.store.lose_reply("put")
        with pytest.raises(StoreUnavailable):
            await logs.append("log", element(1), RULES, CONTEXT, ONCE)
        assert await scene.announced() == []
        written = await logs.append("log", element(1), RULES, CONTEXT, ONCE)
        assert await scene.announced() == [CONTEXT.change(written.hash, written.timestamp_ms).text.decode()]
        await logs.close()


class TestRecovering:
    """The healer of a service."""

    async def test_it_announces_leftovers_soon_and_continues(self, scene: Scene) -> None:
        rounds = [asyncio.Event() for _ in range(4)]
        round_ = iter(rounds)
        going_on = asyncio.Semaphore(0)

        async def sleep(seconds: float) -> None:
            next(round_).set()
            await going_on.acquire()
            scene.clock.now_ms += int(seconds * 1000)

        await scene.coordinator.prepare([change("old")])
        scene.clock.now_ms += EARLY_RECOVERY_MS
        await scene.coordinator.prepare([change("1")])
        old = change("old").text.decode()
        relay = Job(OutboxRelay(scene.outbox, sleep=sleep).run)
        relay.start()
        await rounds[0].wait()
        assert await scene.announced() == [old]
        going_on.release()
        await rounds[1].wait()
        assert await scene.announced() == [old, old, ONE], "five seconds later"
        await scene.coordinator.prepare([change("young")])
        going_on.release()
        await rounds[2].wait()
        assert len(await scene.announced()) == 3, "young, and no longer one of its first turns"
        scene.clock.now_ms += SETTLED_MS
        going_on.release()
        await rounds[3].wait()
        assert (await scene.announced())[3:] == [old, ONE, change("young").text.decode()]
        assert await scene.coordinator.prepared(10) == []
        await relay.close()

    async def test_outage_is_logged_once_and_the_first_round_made_up_for(
        self, scene: Scene, caplog: pytest.LogCaptureFixture
    ) -> None:
        await scene.coordinator.prepare([change("1")])
        scene.clock.now_ms += EARLY_RECOVERY_MS
        scene.coordinator.crash()
        over = asyncio.Event()
        rounds = 0

        async def sleep(_: float) -> None:
            nonlocal rounds
            rounds += 1
            if rounds == 3:
                scene.coordinator.restart()
            if rounds == 4:
                over.set()
                await asyncio.Event().wait()

        with caplog.at_level(logging.INFO):
            relay = Job(OutboxRelay(scene.outbox, sleep=sleep).run)
            relay.start()
            await over.wait()
        assert await scene.announced() == [ONE]
        assert caplog.text.count("failed to announce changes") == 1
        assert caplog.text.count("announced 1 writes") == 1
        await relay.close()

    async def test_one_that_does_not_sweep_recovers_its_own(self, scene: Scene) -> None:
        await scene.coordinator.prepare([change("2")])
        scene.clock.now_ms += SETTLED_MS
        scene.coordinator.fail("announce")
        await scene.outbox.commit(Write("a", b"1", ABSENT, [change("1")]))
        round_ = asyncio.Event()

        async def sleep(_: float) -> None:
            round_.set()
            await asyncio.Event().wait()

        relay = Job(OutboxRelay(scene.outbox, sweeps=False, sleep=sleep).run)
        relay.start()
        await round_.wait()
        assert await scene.announced() == [ONE]
        await relay.close()

    async def test_it_does_nothing_where_it_is_not_needed(self, tmp_path: Path, scene: Scene) -> None:
        store = await LocalStore.open_folder(tmp_path)
        await OutboxRelay(outbox_of(store, scene.coordinator)).run()  # ends at once
        await store.close()
