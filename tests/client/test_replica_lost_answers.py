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
from support.replicas import COLLECTIONS, DOC, LOG, Site, tail_of

from pysync.client import MergeConflict, Unreachable
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


def lose(site: Site, answers: int) -> asyncio.Event:
    """Have so many writes arrive whose answers are lost, and none after these. The event is set when one has
    been attempted then."""
    attempted = asyncio.Event()

    def writes(sent: RequestHead) -> bool:
        return sent.path.startswith("push/")

    def fails(sent: RequestHead) -> bool:
        if writes(sent):
            attempted.set()
        return writes(sent)

    if answers:
        site.proxy.lose_reply(when=writes, times=answers)
    site.proxy.abort(when=fails, times=None)
    return attempted


def no_conflict(conflict: MergeConflict) -> Any:
    raise AssertionError(conflict)


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
@pytest.mark.parametrize("answers", [0, 1, 2])
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
