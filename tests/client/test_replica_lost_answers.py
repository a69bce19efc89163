"""Requests of a replica whose answers are lost: no edit is lost or made twice, however late it comes back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.clients import STRANGER, SUBJECT
from support.collections import collection
from support.http_relay import RequestHead
from support.replicas import COLLECTIONS, DOC, LOG, ME, Site, tail_of

from pysync.client import MergeConflict, Replica, Unreachable
from pysync.client.sealed import UnlockedKeyring
from pysync.testing import FakeClock

FORGOTTEN_MS = 11 * 60_000
"""A time after which the server has forgotten the idempotency keys of before."""

DROP_BOX = collection("inbox", "inbox/{identity}", readRoles=["self"], appendOnly=True)
INBOX = f"inbox/{STRANGER.user_id}"
INTO_INBOX = {"inbox": {"identity": STRANGER.user_id}}


@pytest.fixture
async def site(tmp_path: Path, clock: FakeClock) -> AsyncIterator[Site]:
    async with Site(tmp_path, clock, collections=[*COLLECTIONS, DROP_BOX]) as site:
        yield site


def is_write(sent: RequestHead) -> bool:
    return sent.path.startswith("push/")


def lose(site: Site, answers: int) -> asyncio.Event:
    """Take the server away at the next write, which arrives if so many `answers` are lost, 0 or 1. The event
    is set when the server is away and a request has been made."""
    attempted = asyncio.Event()
    is_away = False

    def fails(sent: RequestHead) -> bool:
        nonlocal is_away
        is_away = is_away or is_write(sent)
        if is_away and sent.path != "events":
            attempted.set()
        return is_away

    def arrives(sent: RequestHead) -> bool:
        nonlocal is_away
        is_away = is_away or is_write(sent)
        return is_write(sent)

    if answers:
        site.proxy.lose_reply(when=arrives)
    site.proxy.abort(when=fails, times=None)
    return attempted


def no_conflict(conflict: MergeConflict) -> Any:
    raise AssertionError(conflict)


@pytest.mark.parametrize("away_ms", [0, FORGOTTEN_MS])
@pytest.mark.parametrize("answers", [0, 1])
async def test_push_without_an_answer_is_made_once(site: Site, answers: int, away_ms: int) -> None:
    await site.push({"list": [0]})
    async with site.device() as phone:
        await phone.synced()
        attempted = lose(site, answers)
        phone.put(DOC, {"list": [1]})
        await attempted.wait()
    assert await site.pull() == {"list": [answers]}
    site.clock.now_ms += away_ms
    site.proxy.reset()
    async with site.device(on_conflict=no_conflict) as phone:
        await phone.synced()
        assert (phone.status.unsent, phone.status.rejected) == (0, [])
        assert phone.get(DOC) == {"list": [1]} == await site.pull()


async def test_push_without_an_answer_does_not_undo_what_others_wrote_since(site: Site) -> None:
    async with site.device() as phone:
        attempted = lose(site, 1)
        phone.put(DOC, {"mine": 1, "both": "mine"})
        await attempted.wait()
    await site.push({"mine": 1, "both": "theirs", "theirs": 1})
    site.proxy.reset()
    async with site.device(on_conflict=no_conflict) as phone:
        await phone.synced()
        assert phone.get(DOC) == {"mine": 1, "both": "theirs", "theirs": 1} == await site.pull()


@pytest.mark.parametrize("away_ms", [0, FORGOTTEN_MS])
async def test_sealed_push_without_an_answer_is_made_once(site: Site, away_ms: int) -> None:
    """Sealing the same data again would give other bytes."""
    sealing = UnlockedKeyring(1, {1: bytes(32)})
    async with site.device(sealing=sealing) as phone:
        lose(site, 1)
        phone.put(DOC, {"n": 1})
        with suppress(Unreachable):  # unless what was sent has been received meanwhile
            await phone.synced()
    sent = await site.pull()
    site.clock.now_ms += away_ms
    site.proxy.reset()
    async with site.device(sealing=sealing, on_conflict=no_conflict) as phone:
        await phone.synced()
        assert (phone.status.unsent, phone.status.rejected) == (0, [])
        assert (await site.pull(), phone.get(DOC)) == (sent, {"n": 1})


@pytest.mark.parametrize("away_ms", [0, FORGOTTEN_MS])
@pytest.mark.parametrize("answers", [0, 1])
async def test_appends_without_an_answer_are_made_once(site: Site, answers: int, away_ms: int) -> None:
    async with site.device() as phone:
        await phone.synced()
        attempted = lose(site, answers)
        for n in range(3):
            phone.append(LOG, {"n": n})
        await attempted.wait()
    site.clock.now_ms += away_ms
    site.proxy.reset()
    async with site.device() as phone:
        await phone.synced()
        assert (phone.status.unsent, phone.status.rejected) == (0, [])
        assert tail_of(phone) == [{"n": 0}, {"n": 1}, {"n": 2}] == await site.elements()


@pytest.mark.parametrize("answers", [0, 1])
async def test_equal_appends_are_not_taken_for_one_another(site: Site, answers: int) -> None:
    async with site.device() as phone:
        await phone.synced()
        attempted = lose(site, answers)
        for _ in range(2):
            phone.append(LOG, {"same": True})
        await attempted.wait()
    assert len(await site.elements()) == answers
    site.clock.now_ms += FORGOTTEN_MS
    site.proxy.reset()
    async with site.device() as phone:
        await phone.synced()
        assert tail_of(phone) == [{"same": True}] * 2 == await site.elements()


async def test_equal_append_of_another_author_is_not_taken_for_ones_own(site: Site) -> None:
    certificate = site.phone_certificate(days=30)
    async with site.device(keys=SUBJECT, certificate=certificate) as phone:
        await phone.synced()
        attempted = lose(site, 0)
        phone.append(LOG, {"same": True})
        await attempted.wait()
    async with site.client() as other:
        await other.append(LOG, {"same": True})
    site.clock.now_ms += FORGOTTEN_MS
    site.proxy.reset()
    async with site.device(keys=SUBJECT, certificate=certificate) as phone:
        await phone.synced()
    assert await site.elements() == [{"same": True}] * 2


@pytest.mark.parametrize("decision", ["retry", "discard"])
async def test_append_to_a_log_that_cannot_be_read_waits_for_a_decision(site: Site, decision: str) -> None:
    async with site.device(collections=INTO_INBOX) as phone:
        attempted = lose(site, 0)
        phone.append(INBOX, {"n": 1})
        await attempted.wait()
    site.clock.now_ms += FORGOTTEN_MS
    site.proxy.reset()
    async with site.device(collections=INTO_INBOX) as phone:
        await phone.synced()
        (rejected,) = phone.status.rejected
        assert (rejected.key, rejected.data) == (INBOX, {"n": 1})
        getattr(phone, decision)(INBOX)
        await phone.synced()
        assert (phone.status.unsent, phone.status.rejected) == (0, [])
    assert await site.elements(INBOX, STRANGER) == ([{"n": 1}] if decision == "retry" else [])


async def test_delete_without_an_answer_does_not_delete_what_is_written_since(site: Site) -> None:
    await site.push({"n": 1})
    async with site.device() as phone:
        await phone.synced()
        attempted = lose(site, 1)
        phone.delete(DOC)
        await attempted.wait()
    assert await site.pull() == {}
    await site.push({"n": 2})
    site.clock.now_ms += FORGOTTEN_MS
    site.proxy.reset()
    async with site.device() as phone:
        await phone.synced()
        assert phone.get(DOC) == {"n": 2} == await site.pull()


async def hold(site: Site, phone: Replica, meanwhile: dict[str, Any], edit: dict[str, Any]) -> None:
    """Sync, and edit the document here and elsewhere while the first write is on its way."""
    answered = asyncio.Event()
    arrived = site.proxy.delay(until=answered, when=is_write)
    synced = asyncio.ensure_future(phone.synced())
    await arrived.wait()
    await site.push(meanwhile)
    phone.put(DOC, edit)
    answered.set()
    await synced
    await phone.synced()


async def test_edit_made_while_a_creation_that_was_deleted_is_in_conflict_is_kept(site: Site) -> None:
    async with site.device() as phone:
        await phone.synced()
        attempted = lose(site, 0)
        phone.put(DOC, {"first": 1})
        await attempted.wait()
        phone.delete(DOC)
        site.proxy.reset()
        await hold(site, phone, {"theirs": 1}, {"second": 1})
        assert phone.get(DOC) == {"theirs": 1, "second": 1} == await site.pull()


async def test_edit_made_while_a_deletion_of_something_unknown_is_in_conflict_is_kept(site: Site) -> None:
    await site.push({"theirs": 1})
    async with site.device(collections={"logs": {"identity": ME}}) as phone:
        await phone.synced()
        phone.delete(DOC)
        await hold(site, phone, {"theirs": 2}, {"mine": 1})
        assert phone.get(DOC) == {"theirs": 2, "mine": 1} == await site.pull()
