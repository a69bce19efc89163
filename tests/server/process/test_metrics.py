"""Metrics show an operator where time goes, what is refused, and what falls behind."""

import ast
import asyncio
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import components
import pytest
from support.clients import SUBJECT, Browser, Signed, Start, root_device
from support.collections import MINE, NOTES, collection, limit_of
from support.loop_time import loop_time
from support.scrape import samples, scrape
from support.sse_client import listen

import pysync
from pysync.errors import CHECKS, Forbidden, StoreUnavailable
from pysync.migrate import SCRUB_KEY, VerificationReport
from pysync.server.process.exposition import Metrics
from pysync.server.process.metrics import Counters, MultiprocessCounters
from pysync.server.process.watchdog import TURN_EVERY_S, LoopMonitor
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock


async def test_commits_of_a_folder_are_timed_and_their_writes_counted(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    limited = {**NOTES, "rateLimit": {"push": limit_of(1_000)}}
    anybody = Browser(await start({"collections": [limited], "store": f"file:{tmp_path / 'data'}"}), session)
    before = await scrape(anybody)
    pushed = await asyncio.gather(*(anybody.push(f"notes/{number}", {}) for number in range(8)))
    assert {reply.status for reply in pushed} == {200}
    after = await scrape(anybody)
    for part, least in (("store", 8), ("coordinator", 1)):  # which counts several requests in one write
        commits = f'pysync_{part}_seconds_count{{operation="commit"}}'
        assert after[commits] > before.get(commits, 0)
        assert after[f'pysync_{part}_seconds_sum{{operation="commit"}}'] > 0
        writes, groups = (f'pysync_commit_writes_{kind}{{database="{part}"}}' for kind in ("sum", "count"))
        assert after[writes] - before.get(writes, 0) >= least
        assert after[groups] == after[commits]


@pytest.mark.process
async def test_requests_to_s3_and_round_trips_to_redis_are_timed(
    start: Start,
    session: aiohttp.ClientSession,
    moto: components.S3Server,
    redis: components.RedisServer,
) -> None:
    bucket = moto.store(uuid.uuid4().hex)
    members = {
        "url": bucket.url,
        "endpoint": bucket.endpoint,
        "region": bucket.region,
        "forcePathStyle": True,
        "accessKeyId": bucket.access_key_id,
        "secretAccessKey": bucket.secret_access_key,
    }
    service = {"collections": [NOTES], "store": members, "coordinator": redis.url}
    anybody = Browser(await start(service), session)
    assert (await anybody.push("notes/a", {})).status == 200
    assert (await anybody.pull("notes/a")).status == 200
    found = await scrape(anybody)
    for operation in ("get", "put"):
        assert found[f'pysync_store_seconds_count{{operation="{operation}"}}'] > 0
    assert found['pysync_coordinator_seconds_count{operation="round_trip"}'] > 0


async def test_refusals_are_counted_by_the_check_that_failed(
    start: Start, session: aiohttp.ClientSession
) -> None:
    base = await start({"collections": [NOTES, MINE]})
    anybody = Browser(base, session)
    late = Signed(base, session, SUBJECT, root_device(SUBJECT), ts_ms=1_000)
    await anybody.push("notes/a", {"n": 1})
    assert (await anybody.push("notes/a", {"n": 2}, "0" * 64)).status == 409
    assert (await anybody.request("GET", "/nowhere")).status == 404
    assert (await anybody.pull(f"u/{SUBJECT.user_id}/a")).status in (401, 403)
    assert (await late.pull(f"u/{SUBJECT.user_id}/a")).status == 401
    found = await scrape(anybody)
    counted = {
        name.removeprefix("pysync_refusals_total"): value
        for name, value in found.items()
        if name.startswith("pysync_refusals_total")
    }
    assert counted == {
        '{collection="notes",reason="hash_mismatch"}': 1,
        '{collection="",reason="not_found"}': 1,
        '{collection="mine",reason="no credentials"}': 1,
        '{collection="mine",reason="clock"}': 1,
    }


def test_reason_of_a_refusal_is_one_of_a_bounded_number() -> None:
    assert Forbidden(reason="scope: the certificate's ops").check == "scope"
    assert Forbidden(reason="of a plugin: user 17").check == "forbidden"
    assert Forbidden("of a client").check == "forbidden"


def test_all_checks_of_the_server_are_known() -> None:
    """A reason begins with its check, also one that is a formatted string."""
    found = {check for path in Path(pysync.__file__).parent.rglob("*.py") for check in _checks(path)}
    assert found == CHECKS


def _checks(path: Path) -> Iterator[str]:
    """The checks of the reasons in a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "denial_reason":
            returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
            yield from filter(None, (_check(text) for text in returned if text is not None))
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = [each.value for each in node.keywords if each.arg == "reason"]
            if name == "Unauthorized":
                given += node.args
            if name in ("Unauthorized", "Forbidden", "ForeignOrigin", "MisdirectedRequest"):
                yield from filter(None, map(_check, given))


def _check(reason: ast.expr) -> str:
    """The check of a reason; `""` if it is no text."""
    if isinstance(reason, ast.IfExp):
        return _check(reason.orelse)
    if isinstance(reason, ast.JoinedStr):
        reason = reason.values[0]
    text = reason.value if isinstance(reason, ast.Constant) else None
    return text.partition(":")[0] if isinstance(text, str) else ""


async def test_delay_of_the_event_loop_is_how_late_a_timer_was() -> None:
    observed: list[float] = []
    done = asyncio.Event()

    def observe(metric: str, value: float) -> None:
        assert metric == "pysync_event_loop_delay_seconds"
        observed.append(value)
        done.set()

    with loop_time() as time:
        job = asyncio.ensure_future(LoopMonitor(observe, time).run())
        await asyncio.sleep(0)
        time.now_s += TURN_EVERY_S + 3.0  # a callback that took so long
        await done.wait()
        job.cancel()
    assert observed == [pytest.approx(3.0)]


async def test_lag_of_streams_is_the_age_of_what_they_deliver(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    class Slow(MemoryStore):
        """Announces a write ten seconds after it was made."""

        async def put(self, *args: Any, **options: Any) -> str:
            etag = await super().put(*args, **options)
            clock.now_ms += 10_000
            return etag

    anybody = Browser(await start({"collections": [NOTES]}, Slow(clock), now_ms=clock), session)
    stream = await listen(anybody, collections="notes")
    await anybody.push("notes/a", {})
    await stream.event()
    name = "pysync_stream_lag_seconds"
    while f"{name}_count" not in (found := await scrape(anybody)):
        pass
    assert (found[f"{name}_count"], found[f"{name}_sum"]) == (1, 10)
    await stream.close()


async def test_resets_of_streams_are_counted(start: Start, session: aiohttp.ClientSession) -> None:
    anybody = Browser(await start({"collections": [NOTES]}), session)
    assert "pysync_stream_resets_total" not in await scrape(anybody)
    for _ in range(2):
        stream = await listen(anybody, lastEventId="gone")
        assert (await stream.event()).event == "reset"
        await stream.close()
    assert (await scrape(anybody))["pysync_stream_resets_total"] == 2


async def test_debt_of_sweeps_is_the_time_since_one_looked_at_everything(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    class Failing(MemoryStore):
        fails = False

        async def walk(self, prefix: str, after: str | None = None) -> Any:
            if self.fails:
                raise OSError("the disk is gone")
            async for entry in super().walk(prefix, after):
                yield entry

    store = Failing(clock)
    expiring = collection("notes", "notes/{id}", ttlMs=60_000)
    anybody = Browser(await start({"collections": [expiring]}, store, now_ms=clock), session)
    (app,) = start.apps  # type: ignore[attr-defined]
    debts = []
    for fails in (False, True, True, False, False):
        clock.now_ms += 60_000
        store.fails = fails
        if fails:
            with pytest.raises(OSError, match="gone"):
                await app.jobs.ttl_sweeper.sweep()
        else:
            await app.jobs.ttl_sweeper.sweep()
        debts.append((await scrape(anybody))["pysync_sweep_debt_seconds"])
    assert debts == [60, 60, 120, 180, 60]


async def test_stored_bytes_are_those_that_the_last_scrub_found(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock, tmp_path: Path
) -> None:
    service = {"collections": [NOTES], "store": f"file:{tmp_path / 'data'}"}
    anybody = Browser(await start(service, now_ms=clock), session)
    (app,) = start.apps  # type: ignore[attr-defined]
    await VerificationReport(bytes=12345).record(app.store, SCRUB_KEY, clock() - 5_000)
    await app.jobs.scrubber.run_if_due()
    found = await scrape(anybody)
    assert found["pysync_stored_bytes"] == 12345
    assert found["pysync_scrub_timestamp_seconds"] == (clock() - 5_000) // 1000


async def test_readiness_is_probed_by_scrapes(start: Start, session: aiohttp.ClientSession) -> None:
    class Full(MemoryStore):
        is_full = True

        async def probe(self) -> None:
            if self.is_full:
                raise StoreUnavailable("the disk is full")

    store = Full()
    anybody = Browser(await start({"collections": [NOTES]}, store), session)
    assert (await scrape(anybody))["pysync_ready"] == 1, "nothing is known yet"
    while (await scrape(anybody))["pysync_ready"]:
        pass
    store.is_full = False
    while not (await scrape(anybody))["pysync_ready"]:
        pass


async def test_process_and_disk_are_measured_when_metrics_are_read(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    anybody = Browser(await start({"collections": [NOTES], "store": f"file:{folder}"}), session)
    found = await scrape(anybody)
    assert 10_000_000 < found['pysync_resident_bytes{worker="1"}'] < 10_000_000_000
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
    more = await scrape(anybody)
    for fd in opened:
        os.close(fd)
    name = 'pysync_descriptors{worker="1"}'
    assert more[name] >= found[name] + 90
    assert found['pysync_max_descriptors{worker="1"}'] >= more[name]
    free = found[f'pysync_disk_free_bytes{{folder="{folder}"}}']
    assert 0 < free <= shutil.disk_usage(folder).total


async def test_disk_of_a_service_without_a_folder_is_not_reported(
    start: Start, session: aiohttp.ClientSession
) -> None:
    anybody = Browser(await start({"collections": [NOTES]}), session)
    assert not [name for name in await scrape(anybody) if name.startswith("pysync_disk_free_bytes")]


async def test_each_worker_reports_its_own_process(tmp_path: Path) -> None:
    workers = [MultiprocessCounters(Counters(), tmp_path, number) for number in (1, 2)]
    for worker in workers:
        worker.publish()
    found = samples(Metrics(workers[0].total).render().decode())
    for name in ("pysync_resident_bytes", "pysync_descriptors", "pysync_max_descriptors"):
        assert [found[f'{name}{{worker="{number}"}}'] > 0 for number in (1, 2)] == [True, True]
    for worker in workers:
        worker.close()
