"""Addresses whose requests fail: unknown certificates are refused there, known ones never."""

import asyncio
from typing import Any

import aiohttp
import pytest
from support.clients import STRANGER, SUBJECT, Browser, Signed, Start, encoded, root_device
from support.collections import MINE, PUBLIC, collection
from yarl import URL

from pysync.auth import admission
from pysync.clock import wall_clock_ms
from pysync.testing import FakeClock

SERVICE: dict[str, Any] = {
    "collections": [MINE, collection("notes", **PUBLIC)],
    "auth": {"failuresPerMinute": 60},
    "configEndpoint": {"auth": "role-filtered"},
}
BURST = 60 // admission.BURST_SHARE
KEY = f"u/{SUBJECT.user_id}/a"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_clock_ms())


def signer(base: str, session: aiohttp.ClientSession, keys: Any = SUBJECT) -> Signed:
    return Signed(base, session, keys, root_device(keys))


async def fail(browser: Browser, target: str, headers: dict[str, str] | None = None) -> None:
    for _ in range(BURST + 1):
        assert (await browser.request("GET", target, headers=headers)).status in (200, 401, 404)


@pytest.mark.parametrize("target", ["/nowhere", f"/pull/{KEY}"])
async def test_after_too_many_failures_unknown_certificates_are_refused_and_known_ones_are_not(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock, target: str
) -> None:
    base = await start(SERVICE, now_ms=clock)
    known, unknown = signer(base, session), signer(base, session, STRANGER)
    assert (await known.pull(KEY)).status == 200
    await fail(Browser(base, session), target)
    refused = await unknown.pull(f"u/{STRANGER.user_id}/a")
    assert refused.error == (503, "overloaded")
    assert refused.headers["Retry-After"] == "1"
    assert (await known.pull(KEY)).status == 200
    assert (await Browser(base, session).pull("notes/a")).status == 200
    clock.now_ms += admission.MAX_WAIT_MS
    assert (await unknown.pull(f"u/{STRANGER.user_id}/a")).status == 200


@pytest.mark.parametrize(
    "target", [f"/pull/{KEY}", "/batch/pull?collections=notes", "/config", "/events?collections=mine"]
)
async def test_forged_certificates_count_as_failures_on_every_route(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock, target: str
) -> None:
    base = await start(SERVICE, now_ms=clock)
    forger, unknown = signer(base, session), signer(base, session, STRANGER)
    numbers = iter(range(10_000))
    forger.tamper = lambda headers: headers.update(Authorization=encoded({"forged": next(numbers)}))
    for _ in range(BURST + 1):
        assert (await forger.request("GET", target)).status in (200, 401)
    assert (await forger.request("GET", target)).status == 503
    assert (await unknown.request("GET", target)).status == 503
    metrics = (await Browser(base, session).request("GET", "/metrics")).body.decode()
    assert 'pysync_certificates_refused_total{reason="address"} 2.0' in metrics


async def test_malformed_requests_count_as_failures(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    base = await start(SERVICE, now_ms=clock)
    url = URL(base)
    for _ in range(BURST + 1):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"\x00 malformed\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
    assert (await signer(base, session).pull(KEY)).status == 503


async def test_behind_a_trusted_proxy_the_forwarded_addresses_are_counted(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    base = await start({**SERVICE, "server": {"trustedProxyHops": 1}}, now_ms=clock)
    unknown = signer(base, session, STRANGER)
    own = f"/pull/u/{STRANGER.user_id}/a"
    await fail(Browser(base, session), "/nowhere", {"X-Forwarded-For": "2001:db8::1"})
    there = {"X-Forwarded-For": "2001:db8::2"}
    assert (await unknown.request("GET", own, headers=there)).status == 503
    elsewhere = {"X-Forwarded-For": "2001:db8:0:1::1"}
    assert (await unknown.request("GET", own, headers=elsewhere)).status == 200


async def test_without_a_header_of_the_proxy_nobody_is_counted_under_another_address(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    base = await start(SERVICE, now_ms=clock)
    await fail(Browser(base, session), "/nowhere", {"X-Forwarded-For": "203.0.113.1"})
    headers = {"X-Forwarded-For": "203.0.113.2"}
    refused = await signer(base, session).request("GET", f"/pull/{KEY}", headers=headers)
    assert refused.status == 503


async def test_a_refusal_leaves_the_connection_usable_and_is_not_logged(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    base = await start(SERVICE, now_ms=clock)
    await fail(Browser(base, session), "/nowhere")
    refused = await signer(base, session).pull(KEY)
    assert refused.status == 503
    assert "Connection" not in refused.headers
    assert not [record for record in caplog.records if "overloaded" in record.getMessage()]


@pytest.mark.parametrize("target", [f"/pull/{KEY}", "/nowhere"])
async def test_new_device_is_served_beside_a_logged_out_client_of_its_address(
    start: Start, session: aiohttp.ClientSession, target: str
) -> None:
    base = await start({"collections": [MINE]})
    logged_out = Browser(base, session)
    for _ in range(300):
        assert (await logged_out.request("GET", target)).status in (401, 404)
    assert (await signer(base, session).pull(KEY)).status == 200
