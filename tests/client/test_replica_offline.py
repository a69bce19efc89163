"""A replica works without a server and without a valid certificate, and loses nothing by it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.clients import ISSUER, SUBJECT
from support.faulty_disk import mounted
from support.replicas import DAY_MS, DOC, LOG, ME, Site, tail_of

from pysync.auth import issuing
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
