"""Counts of several workers are told as one service's, whoever is asked and whoever is gone."""

import asyncio
import os
import shutil
from pathlib import Path

from support.configurations import collection, config
from support.loop_time import loop_time

from pysync.config import parse
from pysync.errors import CoordinatorUnavailable
from pysync.server.app import Worker, create_app
from pysync.server.http.responses import count_response
from pysync.server.process.exposition import Metrics
from pysync.server.process.metrics import (
    BUCKETS_S,
    COORDINATOR_UP,
    REQUEST_SECONDS,
    WORKER_PID,
    Counters,
    MultiprocessCounters,
)
from pysync.server.process.readiness import CoordinatorMonitor, Readiness


def counted(*observed: tuple[int, float]) -> Counters:
    counts = Counters()
    for status, seconds in observed:
        count_response(counts, status, seconds)
    return counts


def members(counts: Counters) -> tuple[object, ...]:
    return counts.statuses, counts.histograms


def test_adding_up_counts_is_counting_all_in_one_place() -> None:
    one, other = [(200, 0.002), (404, 0.25)], [(200, 20.0), (500, 0.0)]
    total = Counters()
    for part in (counted(*one), counted(), counted(*other)):
        total.add(part)
    assert members(total) == members(counted(*one, *other))
    assert total.histograms[REQUEST_SECONDS, "none"][len(BUCKETS_S)] == 1


def test_counts_read_as_they_were_written() -> None:
    counts = counted((200, 0.002), (404, 0.25))
    assert members(Counters.decode(counts.encode())) == members(counts)


async def test_replacement_of_a_worker_continues_its_counts(tmp_path: Path) -> None:
    first, other = counted((200, 0.5)), counted((404, 0.5))
    shared = MultiprocessCounters(first, tmp_path, 1)
    other_worker = MultiprocessCounters(other, tmp_path, 2)
    assert shared.total().statuses == {("none", "", 200): 1}
    assert other_worker.total().statuses == {("none", "", 200): 1, ("none", "", 404): 1}
    count_response(first, 200, 0.5)
    shared.close()
    after = Counters()
    again = MultiprocessCounters(after, tmp_path, 1)
    count_response(after, 200, 0.5)
    assert again.total().statuses[("none", "", 200)] == 3
    again.publish()
    assert other_worker.total().statuses[("none", "", 200)] == 3
    for open_ in (again, other_worker):
        open_.close()


async def test_counts_of_one_worker_are_reported_by_every_other(tmp_path: Path) -> None:
    own = Counters()
    first_worker, other = (
        MultiprocessCounters(own, tmp_path, 1),
        MultiprocessCounters(Counters(), tmp_path, 2),
    )
    for _ in range(3):
        count_response(own, 200, 0.001)
        assert members(first_worker.total()) == members(other.total()) == members(own)
    first_worker.close()
    other.close()


async def test_the_lag_of_projections_is_the_largest_and_no_sum(tmp_path: Path) -> None:
    one, other = Counters(), Counters()
    one.set_gauge("pysync_projection_lag_seconds", 90, "titles")
    one.set_gauge("pysync_projection_lag_seconds", 30, "counts")
    other.set_gauge("pysync_projection_lag_seconds", 0, "titles")
    other.set_gauge("pysync_projection_lag_seconds", 60, "counts")
    assert one.gauge("pysync_projection_lag_seconds") == 90
    first_worker, other_worker = (
        MultiprocessCounters(one, tmp_path, 1),
        MultiprocessCounters(other, tmp_path, 2),
    )
    other_worker.publish()
    assert first_worker.total().gauge("pysync_projection_lag_seconds") == 90
    assert b"\npysync_projection_lag_seconds 90.0\n" in Metrics(first_worker.total).render()
    first_worker.close()
    other_worker.close()
    again = MultiprocessCounters(Counters(), tmp_path, 1)  # it has not found out yet how far it is behind
    assert again.total().gauge("pysync_projection_lag_seconds") == 60
    again.close()


async def test_coordinator_is_up_if_every_worker_reaches_it(tmp_path: Path) -> None:
    async def lost() -> None:
        raise CoordinatorUnavailable

    async def reached() -> None:
        return

    one, other = Counters(), Counters()
    first_worker, other_worker = (
        MultiprocessCounters(one, tmp_path, 1),
        MultiprocessCounters(other, tmp_path, 2),
    )
    for diagnose, up in ((reached, 1), (lost, 0), (reached, 1)):
        await CoordinatorMonitor(reached, Readiness([]), one.gauges).check()
        await CoordinatorMonitor(diagnose, Readiness([]), other.gauges).check()
        other_worker.publish()
        assert first_worker.total().gauge(COORDINATOR_UP) == up
    first_worker.close()
    other_worker.close()


async def test_counts_that_cannot_be_written_are_not_reported(tmp_path: Path) -> None:
    """Else another worker would tell fewer."""
    own = counted((200, 0.5))
    shared = MultiprocessCounters(own, tmp_path, 1)
    shared.publish()
    (tmp_path / ".1").mkdir()
    count_response(own, 200, 0.5)
    assert shared.total().statuses == {("none", "", 200): 1}
    (tmp_path / ".1").rmdir()
    assert shared.total().statuses == {("none", "", 200): 2}
    shared.close()


async def test_counts_are_written_on_after_a_failure(tmp_path: Path) -> None:
    again, failures = asyncio.Event(), iter([MemoryError()])

    class Failing(Counters):
        def copy(self) -> Counters:
            for failure in failures:
                raise failure
            again.set()
            return super().copy()

    shared = MultiprocessCounters(Failing(), tmp_path, 1)
    with loop_time() as time:
        await time.pass_until(asyncio.ensure_future(again.wait()), 1.0)
    shared.close()


async def test_counts_come_back_to_a_folder_that_was_swept_away(tmp_path: Path) -> None:
    folder = tmp_path / "tallies"
    folder.mkdir()
    first_worker, other = (MultiprocessCounters(counted((200, 0.5)), folder, number) for number in (1, 2))
    assert first_worker.total().statuses == {("none", "", 200): 1}
    other.publish()
    shutil.rmtree(folder)
    other.publish()
    assert first_worker.total().statuses == {("none", "", 200): 2}
    first_worker.close()
    other.close()


async def test_one_worker_sweeps_for_all(tmp_path: Path) -> None:
    settings = parse(config(collection(ttlMs=60_000), store="memory:"))
    for number, sweeps in ((1, True), (2, False)):
        async with await create_app(settings, worker=Worker(number, tmp_path)) as app:
            assert (app.jobs.erasure in app.jobs.all) == sweeps


async def test_refusals_of_all_workers_are_gathered_in_the_order_of_their_times(tmp_path: Path) -> None:
    one, other = Counters(), Counters()
    first_worker, other_worker = (
        MultiprocessCounters(one, tmp_path, 1),
        MultiprocessCounters(other, tmp_path, 2),
    )
    for n, counters in enumerate((one, other, one)):
        counters.remember("refusal", requestId=f"r{n}", path="/\udcff")
        counters.recent["refusal"][-1]["timestamp"] = n
    other_worker.publish()
    first_worker.close()
    replaced = MultiprocessCounters(Counters(), tmp_path, 1)
    gathered = replaced.total().recent["refusal"]
    assert [each["requestId"] for each in gathered] == ["r0", "r1", "r2"]
    assert gathered[0]["path"] == "/\\udcff"
    replaced.close()
    other_worker.close()


async def test_each_worker_tells_its_process(tmp_path: Path) -> None:
    first_worker = MultiprocessCounters(Counters(), tmp_path, 1)
    other_worker = MultiprocessCounters(Counters(), tmp_path, 2)
    other_worker.publish()
    assert {key: pid for key, pid in first_worker.total().peaks.items() if key[0] == WORKER_PID} == {
        (WORKER_PID, "1"): os.getpid(),
        (WORKER_PID, "2"): os.getpid(),
    }
    first_worker.close()
    other_worker.close()
