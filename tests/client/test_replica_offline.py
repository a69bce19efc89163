"""A replica works without a server and without a valid certificate, and loses nothing by it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.clients import ISSUER, SUBJECT
from support.faulty_disk import mounted
from support.replicas import DAY_MS, DOC, LOG, ME, Site, tail_of

from pysync.auth import issuing
from pysync.client import MergeConflict
from pysync.errors import Unauthorized
from pysync.testing import FakeClock


@pytest.fixture
async def site(tmp_path: Path, clock: FakeClock) -> AsyncIterator[Site]:
    async with Site(tmp_path, clock) as site:
        yield site


async def test_replica_opens_and_edits_while_the_server_is_away(site: Site) -> None:
    site.leave()
    async with site.device() as phone:
        phone.put(DOC, {"n": 1})
        phone.append(LOG, {"n": 1})
        assert (phone.status.online, phone.status.unsent) == (False, 2)
    async with site.device() as phone:
        assert phone.get(DOC) == {"n": 1}
        assert phone.keys(f"users/{ME}/docs/") == [DOC]
        assert tail_of(phone) == [{"n": 1}]
        site.proxy.reset()
        await phone.synced()
        assert (phone.status.online, phone.status.unsent) == (True, 0)
    assert (await site.pull(), await site.elements()) == ({"n": 1}, [{"n": 1}])


async def test_replica_reads_and_edits_what_it_received_before_the_server_went_away(site: Site) -> None:
    await site.push({"n": 1})
    async with site.device() as phone:
        await phone.synced()
    await site.push({"n": 1, "theirs": 1})
    site.leave()
    async with site.device() as phone:
        assert phone.get(DOC) == {"n": 1}
        phone.put(DOC, {"n": 1, "mine": 1})
        site.proxy.reset()
        await phone.synced()
        assert phone.get(DOC) == {"n": 1, "mine": 1, "theirs": 1}
    assert await site.pull() == {"n": 1, "mine": 1, "theirs": 1}


async def test_two_replicas_of_one_identity_merge_what_each_wrote_offline(site: Site) -> None:
    await site.push({"items": [{"id": "milk", "done": False}, {"id": "bread", "done": False}]})
    async with site.device("phone") as phone, site.device("laptop") as laptop:
        await asyncio.gather(phone.synced(), laptop.synced())
    site.leave()
    async with site.device("phone") as phone, site.device("laptop") as laptop:
        phone.put(DOC, {"items": [{"id": "milk", "done": True}, {"id": "bread", "done": False}]})
        laptop.put(DOC, {"items": [{"id": "milk", "done": False}, {"id": "tea", "done": False}]})
        for replica in (phone, laptop):
            replica.append(LOG, {"by": "both"})
        site.proxy.reset()
        for _ in range(2):
            await asyncio.gather(phone.synced(), laptop.synced())
        merged = {"items": [{"id": "milk", "done": True}, {"id": "tea", "done": False}]}
        assert phone.get(DOC) == laptop.get(DOC) == merged == await site.pull()
        assert tail_of(phone) == tail_of(laptop) == [{"by": "both"}] * 2 == await site.elements()


async def test_edit_wins_over_a_removal_that_it_did_not_know(site: Site) -> None:
    await site.push({"n": 1})
    async with site.device("phone") as phone, site.device("laptop") as laptop:
        await asyncio.gather(phone.synced(), laptop.synced())
    site.leave()
    async with site.device("phone") as phone:
        phone.put(DOC, {"n": 2})
    site.proxy.reset()
    async with site.device("laptop") as laptop:
        laptop.delete(DOC)
        await laptop.synced()
        assert await site.pull() == {}
        async with site.device("phone") as phone:
            await phone.synced()
            assert phone.get(DOC) == {"n": 2} == await site.pull()
        await laptop.synced()
        assert laptop.get(DOC) == {"n": 2}


async def test_removal_deletes_the_local_copy(site: Site) -> None:
    await site.push({"n": 1})
    async with site.device("phone") as phone, site.device("laptop") as laptop:
        await asyncio.gather(phone.synced(), laptop.synced())
        phone.delete(DOC)
        assert phone.get(DOC) is None
        await phone.synced()
        await laptop.synced()
        assert (laptop.get(DOC), laptop.keys()) == (None, phone.keys())
    assert await site.pull() == {}


async def test_own_certificate_is_renewed_after_a_month_offline(site: Site) -> None:
    async with site.device() as phone:
        await phone.synced()
        site.leave()
        phone.put(DOC, {"n": 1})
        site.clock.now_ms += 40 * DAY_MS
        site.proxy.reset()
        await phone.synced()
    assert await site.pull() == {"n": 1}


async def test_certificate_that_expired_offline_stops_sending_until_there_is_another(site: Site) -> None:
    expiring = site.phone_certificate(days=1)
    async with site.device(keys=SUBJECT, certificate=expiring) as phone:
        phone.put(DOC, {"n": 1})
        await phone.synced()
    site.clock.now_ms += 2 * DAY_MS
    async with site.device(keys=SUBJECT, certificate=expiring) as phone:
        phone.put(DOC, {"n": 2})
        phone.append(LOG, {"n": 2})
        with pytest.raises(Unauthorized):
            await phone.synced()
        assert isinstance(phone.status.error, Unauthorized)
        assert (phone.status.unsent, phone.status.rejected) == (2, [])
        assert phone.get(DOC) == {"n": 2}
    async with site.device(keys=SUBJECT, certificate=site.phone_certificate(days=9)) as phone:
        await phone.synced()
        assert (phone.status.error, phone.status.unsent) == (None, 0)
    assert (await site.pull(), await site.elements()) == ({"n": 2}, [{"n": 2}])


async def test_certificate_that_was_revoked_offline_stops_sending_and_keeps_the_edits(site: Site) -> None:
    lost = site.phone_certificate(days=90)
    async with site.device(keys=SUBJECT, certificate=lost) as phone:
        phone.put(DOC, {"n": 1})
        await phone.synced()
    async with site.client() as owner:
        await owner.revoke(issuing.issue_revocation_list(ISSUER, 1, certificates=[lost]))
    site.clock.now_ms += 30 * DAY_MS
    async with site.device(keys=SUBJECT, certificate=lost) as phone:
        phone.put(DOC, {"n": 2})
        with pytest.raises(Unauthorized):
            await phone.synced()
        assert (phone.status.unsent, phone.status.rejected, phone.get(DOC)) == (1, [], {"n": 2})
    assert await site.pull() == {"n": 1}
    async with site.device(keys=SUBJECT, certificate=site.phone_certificate(days=60)) as phone:
        await phone.synced()
    assert await site.pull() == {"n": 2}


@pytest.mark.process
async def test_full_disk_rejects_an_edit_and_keeps_those_before(tmp_path: Path, clock: FakeClock) -> None:
    with mounted(tmp_path / "device", 2, "tmpfs") as disk:
        async with Site(tmp_path, clock) as site, site.device("device/phone") as phone:
            phone.put(DOC, {"n": 1})
            await phone.synced()
            disk.fill()
            accepted = 1
            with pytest.raises(OSError, match="disk is full"):  # noqa: PT012
                for n in range(2, 10_000):
                    phone.put(DOC, {"n": n})
                    accepted = n
            assert phone.get(DOC) == {"n": accepted}
            disk.free()
            await phone.synced()
            assert await site.pull() == {"n": accepted}
            phone.put(DOC, {"n": -1})
            await phone.synced()
            assert await site.pull() == {"n": -1}


@pytest.mark.process
async def test_replica_on_a_full_disk_goes_on_receiving_when_there_is_space(
    tmp_path: Path, clock: FakeClock
) -> None:
    with mounted(tmp_path / "device", 2, "tmpfs") as disk:
        async with Site(tmp_path, clock) as site, site.device("device/phone") as phone:
            await phone.synced()
            disk.fill()
            await site.push({"text": "x" * 100_000})
            with pytest.raises(OSError, match="disk is full"):
                await phone.synced()
            disk.free()
            await phone.synced()
            assert phone.get(DOC) == await site.pull()


async def test_conflicts_are_decided_by_collection(site: Site) -> None:
    def sum_of(conflict: MergeConflict) -> int:
        return int(conflict.local) + int(conflict.remote) - int(conflict.base)

    await site.push({"n": 1})
    async with site.device(on_conflict={"docs": sum_of}) as phone:
        await phone.synced()
        site.leave()
        phone.put(DOC, {"n": 11})
        await site.push({"n": 101})
        site.proxy.reset()
        await phone.synced()
        assert phone.get(DOC) == {"n": 111} == await site.pull()
