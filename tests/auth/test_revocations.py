"""Revocation lists: strangers keep nobody from revoking, and their lists cost little."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import orjson
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Browser, Reply, Signed, Start, root_device
from support.collections import MINE
from support.loop_time import loop_time

from pysync._core import PanicException
from pysync.auth import certificates, issuing, revocation
from pysync.auth.certificates import CertificateSummary
from pysync.auth.identity_keys import IdentityKeys
from pysync.auth.revocation import PREFIX, RevocationRegistry
from pysync.clock import wall_clock_ms
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import BadSignature, StaleGeneration, StoreUnavailable, TooManyIssuers
from pysync.store import ANY, RELIST_MS, ListEntry, Precondition
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

TRUSTED = {"collections": [MINE], "auth": {"trustedIssuers": [ISSUER.ed_pub]}}
DAY_MS = 86_400_000
LATER_S = wall_clock_ms() // 1000 + 86_400


def listed(issuer: IdentityKeys, generation: int, entries: int = 1, until_s: int = LATER_S) -> bytes:
    subjects = [(f"{n:064x}", until_s) for n in range(entries)]
    return issuing.issue_revocation_list(issuer, generation, subjects=subjects).text


async def publish(base: str, session: aiohttp.ClientSession, text: bytes) -> Reply:
    return await Browser(base, session).request("POST", "/revocations", text)


async def owner(base: str, session: aiohttp.ClientSession, keys: IdentityKeys) -> None:
    """Have `keys` own a document."""
    caller = Signed(base, session, keys, root_device(keys))
    assert (await caller.push(f"u/{keys.user_id}/a", {"n": 1})).status == 200


async def test_unknown_identities_keep_neither_owners_nor_trusted_issuers_from_revoking(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revocation, "MAX_ISSUERS", 3)
    base = await start(TRUSTED)
    await owner(base, session, SUBJECT)
    for _ in range(3):
        assert (await publish(base, session, listed(IdentityKeys.generate(), 1))).status == 200
    assert (await publish(base, session, listed(STRANGER, 1))).error == (403, "too-many-issuers")
    for keys in (SUBJECT, ISSUER):
        assert (await publish(base, session, listed(keys, 1))).status == 200


@pytest.mark.parametrize("role", ["mod", "admin:{}", "delegated:{}:team"])
async def test_unknown_identities_keep_no_configured_issuer_from_revoking(
    start: Start, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """A moderator whose laptop is stolen owns nothing here, and is no issuer for others."""
    monkeypatch.setattr(revocation, "MAX_ISSUERS", 1)
    team = {"name": "team", "storagePath": "team/{id}", "writeRoles": ["admin"]}
    team["readRoles"] = [role.format(SUBJECT.user_id)]
    named = {"identityRoles": {SUBJECT.user_id: ["mod"]} if role == "mod" else {}}
    base = await start({"collections": [team], "auth": named})
    assert (await publish(base, session, listed(STRANGER, 1))).status == 200
    assert (await publish(base, session, listed(ISSUER, 1))).error == (403, "too-many-issuers")
    assert (await publish(base, session, listed(SUBJECT, 1, entries=300))).status == 200


async def test_list_of_an_unknown_identity_revokes_and_is_short(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start(TRUSTED)
    await owner(base, session, SUBJECT)
    for n, (text, stranger) in enumerate([("empty", 400), ("expired", 400), ("long", 413)]):
        lists: dict[str, Callable[[IdentityKeys], bytes]] = {
            "empty": lambda keys, n=n: listed(keys, n, 0),  # type: ignore[misc]
            "expired": lambda keys, n=n: listed(keys, n, 1, until_s=1),  # type: ignore[misc]
            "long": lambda keys, n=n: listed(keys, n, 200),  # type: ignore[misc]
        }
        for keys, status in ((SUBJECT, 200), (ISSUER, 200), (STRANGER, stranger)):
            assert (await publish(base, session, lists[text](keys))).status == status, text
    longest = listed(STRANGER, 9, 170)
    assert len(longest) <= 16_384
    assert (await publish(base, session, longest)).status == 200


async def test_lists_of_unknown_identities_are_dropped_once_every_entry_has_expired() -> None:
    clock, store = FakeClock(wall_clock_ms()), MemoryStore()

    async def is_space_owner(identity: str) -> bool:
        return identity == SUBJECT.user_id

    revocations = RevocationRegistry(store, clock, [ISSUER.user_id], is_space_owner)
    now_s, lasting = clock.now_ms // 1000, IdentityKeys.generate()
    for keys in (ISSUER, SUBJECT, STRANGER):
        await revocations.publish(listed(keys, 1, until_s=now_s + 60))
    entries = [("0" * 64, now_s + 60), ("1" * 64, now_s + 90 * 86_400)]
    await revocations.publish(issuing.issue_revocation_list(lasting, 1, subjects=entries).text)
    assert await revocations.delete_expired() == 0
    clock.now_ms += 2 * DAY_MS
    assert await revocations.delete_expired() == 1
    kept = {keys.user_id for keys in (ISSUER, SUBJECT, lasting)}
    assert set(await store.list(PREFIX, None, 100)) == kept


async def test_list_that_is_replaced_while_it_is_checked_is_not_dropped() -> None:
    clock = FakeClock(wall_clock_ms())
    until_s = clock.now_ms // 1000 + 60

    class Replaced(MemoryStore):
        newer = b""

        async def delete(self, key: str, expect: Precondition = ANY) -> None:
            if self.newer:
                await self.put(key, self.newer)
            await super().delete(key, expect)

    store = Replaced()
    revocations = RevocationRegistry(store, clock)
    await revocations.publish(listed(STRANGER, 1, until_s=until_s))
    clock.now_ms += 2 * DAY_MS
    store.newer = listed(STRANGER, 2, until_s=until_s + 90 * 86_400)
    assert await revocations.delete_expired() == 0
    assert await revocations.published(STRANGER.user_id) == store.newer


@pytest.mark.parametrize("error", [StoreUnavailable(), RuntimeError("unforeseen"), PanicException("core")])
async def test_a_sweep_that_fails_is_followed_by_others(error: BaseException) -> None:
    class Failing(MemoryStore):
        lists = 0
        often = asyncio.Event()

        async def walk(self, prefix: str, after: str | None = None) -> AsyncIterator[ListEntry]:
            self.lists += 1
            if self.lists == 3:
                self.often.set()
            raise error
            yield

    store = Failing()
    with loop_time() as time:
        sweeping = asyncio.create_task(RevocationRegistry(store, wall_clock_ms).delete_expired_periodically())
        ends = {sweeping, asyncio.ensure_future(store.often.wait())}
        waiting = asyncio.ensure_future(asyncio.wait(ends, return_when="FIRST_COMPLETED"))
        await time.pass_until(waiting, RELIST_MS / 1000)
        assert not sweeping.done()
        sweeping.cancel()


async def test_dropped_lists_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocation, "MAX_ISSUERS", 1)
    clock = FakeClock(wall_clock_ms())
    revocations = RevocationRegistry(MemoryStore(), clock)
    await revocations.publish(listed(STRANGER, 1, until_s=clock.now_ms // 1000 + 60))
    clock.now_ms += 2 * DAY_MS
    with pytest.raises(TooManyIssuers):
        await revocations.publish(listed(SUBJECT, 1, until_s=clock.now_ms // 1000 + 60))
    await revocations.delete_expired()
    await revocations.publish(listed(SUBJECT, 1, until_s=clock.now_ms // 1000 + 60))


async def test_caller_without_the_role_takes_no_nonce(start: Start, session: aiohttp.ClientSession) -> None:
    looked_up: list[str] = []

    class Watched(MemoryStore):
        async def get(self, key: str, etag: str | None = None) -> Any:
            looked_up.append(key)
            return await super().get(key, etag)

    class Nonces(MemoryCoordinator):
        async def consume_nonce(self, *args: Any, **options: Any) -> bool:
            looked_up.append("nonce")
            return await super().consume_nonce(*args, **options)

    base = await start({"collections": [MINE]}, store=Watched(), coordinator=Nonces())
    caller = Signed(base, session, STRANGER, root_device(STRANGER))
    assert (await caller.pull(f"u/{SUBJECT.user_id}/a")).status == 403
    assert looked_up == [f"{PREFIX}/{STRANGER.user_id}"]
    assert (await caller.pull(f"u/{STRANGER.user_id}/a")).status == 200
    assert "nonce" in looked_up


async def test_stale_or_forged_revocation_lists_are_rejected() -> None:
    revocations = RevocationRegistry(MemoryStore(), wall_clock_ms)
    text = listed(STRANGER, 2)
    await revocations.publish(text)
    with pytest.raises(StaleGeneration):
        await revocations.publish(text)
    forged = orjson.dumps({**orjson.loads(text), "generation": 3})
    with pytest.raises(BadSignature):
        await revocations.publish(forged)


async def test_lists_of_unknown_identities_evict_no_trusted_issuers_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(revocation, "CACHED_BYTES", 10_000)
    remembered: list[bool] = []

    class Watched(MemoryStore):
        async def get(self, key: str, etag: str | None = None) -> Any:
            remembered.append(etag is not None)
            return await super().get(key, etag)

    clock = FakeClock(wall_clock_ms())
    revocations = RevocationRegistry(Watched(), clock, [ISSUER.user_id])
    await revocations.publish(listed(ISSUER, 1, 1_000))
    first, *_ = strangers = [IdentityKeys.generate() for _ in range(50)]
    await revocations.is_revoked(root_device(ISSUER))
    for keys in strangers:
        await revocations.publish(listed(keys, 1))
        await revocations.is_revoked(root_device(keys))
    clock.now_ms += 5_000
    for keys, is_known in ((ISSUER, True), (strangers[-1], True), (first, False)):
        remembered.clear()
        await revocations.is_revoked(root_device(keys))
        assert remembered == [is_known]


async def test_issuers_without_a_list_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocation, "CACHED_ENTRIES", 10)
    clock = FakeClock()
    revocations = RevocationRegistry(MemoryStore(), clock)
    for n in range(25):
        assert not await revocations.is_revoked(CertificateSummary("", f"{n}", "", "", 0, 1))
        assert revocations.unlisted_until_ms.cost <= 10
        assert revocations.unlisted_until_ms.get(f"{n}") == clock() + revocation.RECHECK_MS


async def test_a_long_list_takes_back_what_it_names() -> None:
    revocations = RevocationRegistry(MemoryStore(), wall_clock_ms, [ISSUER.user_id])
    own = [
        issuing.issue_audience_certificate(ISSUER, "x", now_s=LATER_S, nonce=n.to_bytes(16))
        for n in range(3_000)
    ]
    text = issuing.issue_revocation_list(ISSUER, 1, certificates=own[:-1]).text
    await revocations.publish(text)
    assert [await revocations.is_revoked(each) for each in (own[0], own[-2], own[-1])] == [True, True, False]
    assert certificates.parse_revocation_list(text).revoked.last_expiry_s == own[0].exp
