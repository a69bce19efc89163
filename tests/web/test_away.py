"""A replica in a browser works without a server and without a valid certificate, and loses nothing by it."""

import os
from collections.abc import AsyncIterator
from email.utils import formatdate

import pytest
from multidict import CIMultiDict
from support.browser import Chromium
from support.clients import ISSUER, SUBJECT, Start
from support.replicas import DAY_MS
from support.web_pages import shifted_clock
from support.web_replicas import WebSite

from pysync.auth import issuing
from pysync.auth.certificates import Certificate
from pysync.clock import wall_clock_ms


class LaterClock:
    """The clock of a server, which a test puts forward."""

    def __init__(self) -> None:
        self.later_ms = 0

    def __call__(self) -> int:
        return wall_clock_ms() + self.later_ms

    def date(self, headers: CIMultiDict[str]) -> None:
        """Date an answer by this clock."""
        headers["Date"] = formatdate(self() / 1000, usegmt=True)


@pytest.fixture
def later() -> LaterClock:
    return LaterClock()


@pytest.fixture
async def site(start: Start, later: LaterClock) -> AsyncIterator[WebSite]:
    async with WebSite.open(start, now_ms=later) as site:
        yield site


def phone_certificate(clock: LaterClock) -> Certificate:
    """A certificate of one day by which `SUBJECT` acts for `ISSUER`."""
    now_s = clock() // 1000
    return issuing.issue_device_certificate(
        ISSUER, SUBJECT.ed_pub, SUBJECT.kem_pub,
        now_s=now_s, nonce=os.urandom(16), expires_at_s=now_s + DAY_MS // 1000,
    )  # fmt: skip


async def test_replica_opens_and_edits_while_the_server_is_away(site: WebSite, screen: Chromium) -> None:
    site.leave()
    tab = await site.tab(screen)
    await tab.put({"n": 1})
    await tab.append({"n": 1})
    await site.reload(tab)
    assert (await tab.get(), await tab.tail()) == ({"n": 1}, [{"n": 1}])
    assert await tab.error_of("replica.synced()") == ["Unreachable", None]
    status = await tab.status()
    assert (status["online"], status["unsent"], status["error"]) == (False, 2, ["Unreachable", None])
    site.proxy.reset()
    await tab.synced()
    status = await tab.status()
    assert (status["online"], status["unsent"], status["error"]) == (True, 0, None)
    assert (await site.pull(), await site.elements()) == ({"n": 1}, [{"n": 1}])


async def test_replica_merges_what_it_edited_offline_when_the_server_is_back(
    site: WebSite, screen: Chromium
) -> None:
    await site.push({"n": 1})
    tab = await site.tab(screen)
    await tab.synced()
    await tab.window.run("replica.close()")
    await site.push({"n": 1, "theirs": 1})
    site.leave()
    await site.reload(tab)
    assert await tab.get() == {"n": 1}
    await tab.put({"n": 1, "mine": 1})
    site.proxy.reset()
    await tab.synced()
    assert await tab.get() == {"n": 1, "mine": 1, "theirs": 1} == await site.pull()


@pytest.mark.parametrize("how", ["expired", "revoked"])
async def test_edits_wait_for_another_certificate_when_one_ends_offline(
    site: WebSite, screen: Chromium, later: LaterClock, how: str
) -> None:
    site.proxy.rewrite(answered=later.date)
    certificate = phone_certificate(later)
    tab = await site.tab(screen, SUBJECT, certificate)
    await tab.put({"n": 1})
    await tab.synced()
    site.leave()
    await tab.put({"n": 2})
    await tab.append({"n": 2})
    if how == "expired":
        later.later_ms = 2 * DAY_MS
    else:
        async with site.client() as owner:
            await owner.revoke(issuing.issue_revocation_list(ISSUER, 1, certificates=[certificate]))
    site.proxy.reset()
    site.proxy.rewrite(answered=later.date)
    assert await tab.error_of("replica.synced()") == ["Unauthorized", "unauthorized"]
    status = await tab.status()
    assert (status["unsent"], status["rejected"]) == (2, [])
    assert status["error"] == ["Unauthorized", "unauthorized"]
    assert await site.pull() == {"n": 1}
    assert await tab.get() == {"n": 2}
    await tab.window.run(
        "async (text) => { client.certificate = await pysync.parseCertificate(text) }",
        phone_certificate(later).text.decode(),
    )
    await tab.window.until("(await replica.status()).unsent === 0")
    await tab.synced()
    assert (await tab.status())["error"] is None
    assert (await site.pull(), await site.elements()) == ({"n": 2}, [{"n": 2}])


@pytest.mark.parametrize("hours", [-1, 1])
async def test_replica_syncs_with_a_clock_that_is_wrong_by_an_hour(
    site: WebSite, screen: Chromium, hours: int
) -> None:
    await site.push({"n": 1})
    tab = await site.tab(screen, before=shifted_clock(hours * 3_600_000))
    assert abs(await tab.window.run("Date.now()") - wall_clock_ms()) > 3_500_000
    await tab.synced()
    assert await tab.get() == {"n": 1}
    await tab.put({"n": 2})
    await tab.append({"n": 2})
    await tab.synced()
    assert (await site.pull(), await site.elements()) == ({"n": 2}, [{"n": 2}])
    assert abs(await tab.window.run("client.nowMs()") - wall_clock_ms()) < 60_000
