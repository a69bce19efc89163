"""The browser client signs with the time of the server, which it learns from the answers."""

import pytest
from support.browser import Chromium
from support.clients import Start
from support.collections import MINE
from support.web_pages import client_page, do, shifted_clock, web_service

from pysync.clock import wall_clock_ms

HOUR_MS = 3_600_000
COUNTED = """
window.statuses = []
window.counted = async (url, options) => {
  const response = await fetch(url, options)
  statuses.push(response.status)
  return response
}
"""
"""Runs before the page: a `fetch` that adds to `statuses`."""


@pytest.mark.parametrize("ms", [-HOUR_MS, HOUR_MS, 40 * 24 * HOUR_MS, -40 * 24 * HOUR_MS])
async def test_request_that_a_wrong_clock_signed_is_signed_again_once(
    start: Start, screen: Chromium, ms: int
) -> None:
    base = await web_service(start, MINE)
    window = await client_page(screen, base, COUNTED + shifted_clock(ms))
    shown = await do(
        window,
        """const client = new Client("/", {keys: me, fetch: counted}), key = `u/${me.userId}/a`
        await client.push(key, {n: 1})
        await client.pull(key)
        return {now: client.nowMs(), data: (await client.pull(key)).data, statuses}""",
    )
    assert shown["data"] == {"n": 1}
    assert shown["statuses"] == [401, 200, 200, 200]
    assert abs(shown["now"] - wall_clock_ms()) < 300_000


@pytest.mark.parametrize("ms", [-HOUR_MS, HOUR_MS])
async def test_batch_that_a_wrong_clock_signed_is_not_that_of_a_stranger(
    start: Start, screen: Chromium, ms: int
) -> None:
    base = await web_service(start, MINE)
    window = await client_page(screen, base, COUNTED + shifted_clock(ms))
    shown = await do(
        window,
        """const client = new Client("/", {keys: me, fetch: counted})
        const [entry] = await client.batchPull("mine", [{identity: me.userId, id: "a"}])
        return [entry.hash, statuses]""",
    )
    assert shown == ["", [200, 200]]


@pytest.mark.parametrize("ms", [-HOUR_MS, HOUR_MS])
async def test_stream_that_a_wrong_clock_signed_is_signed_again(
    start: Start, screen: Chromium, ms: int
) -> None:
    base = await web_service(start, MINE)
    window = await client_page(screen, base, COUNTED + shifted_clock(ms))
    shown = await do(
        window,
        """const client = new Client("/", {keys: me, fetch: counted}), other = new Client("/", {keys: me})
        const watch = client.watch(["mine"], {}, {onConnect: () => other.push(`u/${me.userId}/a`, {})})
        const {value} = await watch.next()
        await watch.return()
        return [value.params.id, statuses]""",
    )
    assert shown == ["a", [401, 200]]


async def test_request_that_is_rejected_is_signed_again_only_once(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """const attempts = async (keys, ...dates) => {
          const answers = dates.map((ms) => answer(401, {}, {Date: new Date(Date.now() + ms).toUTCString()}))
          const fetch = scripted(...answers)
          const outcome = await new Client("http://h", {keys, fetch}).pull("a").catch(({name}) => name)
          return [outcome, fetch.sent.length]
        }
        const hour = 3_600_000
        return [await attempts(me, 0, 0), await attempts(me, hour, -hour), await attempts(undefined, 0)]""",
    )
    assert shown == [["Unauthorized", 2], ["Unauthorized", 2], ["Unauthorized", 1]]


async def test_answer_without_a_date_changes_nothing(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """Date.now = () => 1e12
        const client = new Client("http://h", {fetch: scripted(answer(200, PULLED))})
        await client.pull("a")
        return client.nowMs()""",
    )
    assert shown == 1e12


async def test_time_is_not_that_of_an_answer_which_a_cache_may_have_kept(
    start: Start, screen: Chromium
) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """Date.now = () => 1e12
        const old = {Date: new Date(0).toUTCString()}, now = {Date: new Date(2e12).toUTCString()}
        const answers = [answer(200, PULLED, old), answer(404, {}, old), answer(200, PUSHED, now)]
        const client = new Client("http://h", {keys: me, fetch: scripted(...answers)}), times = []
        for (const call of ["pull", "pull", "push"]) {
          await client[call]("a", {}).catch(() => {})
          times.push(client.nowMs())
        }
        return times""",
    )
    assert shown == [1e12, 1e12, 2e12]


async def test_own_certificate_is_renewed_a_day_before_it_expires(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    shown = await do(
        window,
        """const fetch = scripted(...Array(4).fill(() => answer(200, PULLED)))
        const client = new Client("http://h", {keys: me, fetch})
        const nonces = [], day = 24 * 3_600_000, begun = Date.now()
        for (const days of [0, 28.9, 29.1, -1]) {
          Date.now = () => begun + days * day
          await client.pull("a")
          nonces.push(client.certificate.nonce)
        }
        return nonces.map((nonce) => nonces.indexOf(nonce))""",
    )
    assert shown == [0, 0, 2, 3]


async def test_certificate_of_another_is_kept_when_it_expires(start: Start, screen: Chromium) -> None:
    base = await web_service(start, MINE)
    window = await client_page(screen, base)
    shown = await do(
        window,
        """const owner = await IdentityKeys.generate(), nowS = Date.now() / 1000 - 3600
        const certificate = await issueDeviceCertificate(owner, me, {nowS, expiresAtS: nowS + 60})
        const client = new Client("/", {keys: me, certificate})
        const outcome = await client.pull(`u/${owner.userId}/a`).catch(({name}) => name)
        return [outcome, client.certificate === certificate]""",
    )
    assert shown == ["Unauthorized", True]
