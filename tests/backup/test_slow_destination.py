"""A slow or dead destination of the backup costs the service nothing but its recovery point."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from components import S3Server
from support.backup_follower import eventually, gauges
from support.backups import restored
from support.clients import Browser, Start
from support.collections import collection
from support.s3_fault_proxy import FaultProxy
from support.s3_stores import new_prefix, opened
from support.store_samples import contents

from pysync.backup.target import BucketTarget
from pysync.store import STORE_KEY
from pysync.testing import FakeClock

HOUR_MS = 3_600_000


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_slow_destination_delays_nothing_but_the_backup_and_its_lag_is_reported(
    start: Start,
    session: aiohttp.ClientSession,
    tmp_path: Path,
    moto: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Minutes pass on the clock of the service alone, between two requests."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret_access_key)
    prefix, clock, answers = new_prefix(), FakeClock(), asyncio.Event()
    async with FaultProxy(moto.endpoint) as proxy:
        location = f"s3://{moto.bucket}/{prefix}?endpoint={proxy.url}&region={moto.region}&path_style=true"
        members = {
            "store": f"file:{tmp_path}/data",
            "collections": [collection("notes")],
            "backup": {"to": location, "everyMs": 50},
        }
        base = await start(members, now_ms=clock)
        browser = Browser(base, session)

        async def metric(name: str) -> float:
            return (await gauges(session, base)).get(f"pysync_backup_{name}", 0)

        async def has_succeeded() -> bool:
            return await metric("last_success_timestamp_seconds") > 0

        async def lags_for(minutes: int) -> None:
            """Let time pass until the backup is so far behind; by the clock, not because of its steps."""

            async def is_reported() -> bool:
                return await metric("lag_seconds") >= 60 * minutes

            clock.now_ms += 60_000
            await eventually(is_reported)
            assert await metric("lag_seconds") < HOUR_MS / 1000

        async def serves() -> None:
            for n in range(20):
                assert (await browser.push(f"notes/{os.urandom(4).hex()}", {"n": n})).status == 200
            async with session.get(f"{base}/health/ready") as response:
                assert response.status == 200

        await eventually(has_succeeded)
        proxy.delay("PUT", until=answers, times=None)
        await serves()
        await lags_for(1)
        await serves()
        clock.step(5 * HOUR_MS)
        await lags_for(2)
        clock.step(-10 * HOUR_MS)
        await lags_for(3)
        failures = await metric("failures_total")
        os.kill(follower_of(os.getpid()), signal.SIGKILL)

        async def has_ended() -> bool:
            return await metric("failures_total") > failures

        await eventually(has_ended)
        await lags_for(4)
        await serves()
        proxy.reset()
        answers.set()

        async def is_whole() -> bool:
            return await metric("lag_seconds") < 60

        await eventually(is_whole)
        service = start.apps[0].store  # type: ignore[attr-defined]
        async with opened(moto, prefix) as bucket:
            expected = await contents(service)
            del expected[STORE_KEY]
            assert await restored(BucketTarget(bucket)) == expected


def follower_of(process: int) -> int:
    """The process that backs up for a service in this one."""
    children = [
        int(child)
        for thread in os.listdir(f"/proc/{process}/task")
        for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split()
    ]
    (found,) = (
        child for child in children if b"backup.follow" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    return found
