"""The background scrub: everything stored is read once a day, slowly, by one process, and damage is named."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import orjson
import pytest
from contracts.files import chunks_of
from support.append_log_nodes import keys_below
from support.bit_rot import rot
from support.clients import Browser, Start
from support.configurations import config as configuration
from support.configurations import faults
from support.faulty_store import FaultyStore
from support.store_samples import contents, document, fill, flipped, replace

from pysync import config
from pysync._core import PanicException
from pysync.concurrency import Job
from pysync.config import ScrubConfig
from pysync.coordinator.memory import MemoryCoordinator
from pysync.errors import CoordinatorUnavailable
from pysync.migrate import SCRUB_KEY, Damage
from pysync.server.app import create_app
from pysync.server.process.background import MIN_BYTES, SWEEP_EVERY_S, Scrubber
from pysync.store import Store, StoredObject
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

DAY_MS = 86_400_000


class Leaders(MemoryCoordinator):
    """Says that this process leads for as many more questions, and counts them."""

    def __init__(self, questions: int = 10_000) -> None:
        super().__init__()
        self.left = questions
        self.leases: list[str] = []

    async def acquire_lease(self, name: str) -> bool:
        self.leases.append(name)
        self.left -= 1
        return self.left >= 0


class Scrubbed:
    """A scrub whose pauses take no time: `slept` has them."""

    def __init__(
        self,
        store: Store,
        clock: FakeClock,
        coordinator: Leaders | None = None,
        settings: ScrubConfig | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slept: list[float] = []
        self.damages: list[Damage] = []
        self.coordinator = coordinator or Leaders()
        self.scrub = Scrubber(
            store,
            self.coordinator,
            settings or ScrubConfig(),
            self.damages.append,
            clock,
            sleep=self._sleep,
            clock_s=clock_s,
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


async def test_damaged_files_are_found(clock: FakeClock) -> None:
    store = MemoryStore()
    await fill(store)
    await replace(store, "top", flipped)
    segment = next(key for key in await keys_below(store, "_pysync/logs") if "/index" not in key)
    await replace(store, segment, flipped)
    scrubbed = Scrubbed(store, clock)
    await scrubbed.scrub.run_once()
    assert {(damage.key, damage.kind) for damage in scrubbed.damages} == {
        ("top", "document"),
        (segment, "log"),
    }
    note = await store.get(SCRUB_KEY)
    assert isinstance(note, StoredObject)
    noted = orjson.loads(note.body)
    assert (noted["finishedMs"], noted["damaged"]) == (clock(), 2)


async def test_it_reads_no_faster_than_it_may(clock: FakeClock) -> None:
    store = MemoryStore()
    await fill(store, 100)
    size = sum(len(body) for _, body in (await contents(store)).values())
    scrubbed = Scrubbed(store, clock, settings=ScrubConfig(max_bytes_per_second=100_000))
    await scrubbed.scrub.run_once()
    read = len(scrubbed.slept) * MIN_BYTES + size
    assert size / 100_000 <= sum(scrubbed.slept) <= read / 100_000
    assert max(scrubbed.slept) * 100_000 <= 1_100_000


async def test_small_objects_count_as_larger_ones_so_that_requests_come_in_between(clock: FakeClock) -> None:
    store = MemoryStore()
    for n in range(50):
        await store.put(f"a/{n}", document(b"{}"))
    scrubbed = Scrubbed(store, clock, settings=ScrubConfig(max_bytes_per_second=MIN_BYTES))
    await scrubbed.scrub.run_once()
    assert scrubbed.slept == [1.0] * 50


async def test_scrub_runs_once_in_a_period_over_all_processes(clock: FakeClock) -> None:
    store = FaultyStore(MemoryStore())
    await store.put("a", document(b"{}"))
    for _ in range(3):
        scrubbed = Scrubbed(store, clock)
        await scrubbed.scrub.run_if_due()
        await scrubbed.scrub.run_if_due()
        assert store.calls["walk"] == 1
    clock.now_ms += DAY_MS - 1
    await scrubbed.scrub.run_if_due()
    assert store.calls["walk"] == 1
    clock.now_ms += 1
    await scrubbed.scrub.run_if_due()
    assert store.calls["walk"] == 2
    clock.now_ms -= 2 * DAY_MS  # the clock was ahead
    await scrubbed.scrub.run_if_due()
    assert store.calls["walk"] == 3


async def test_a_process_that_does_not_lead_scrubs_nothing(clock: FakeClock) -> None:
    store = FaultyStore(MemoryStore())
    await store.put("a", document(b"{}"))
    scrubbed = Scrubbed(store, clock, Leaders(0))
    await scrubbed.scrub.run_if_due()
    assert scrubbed.coordinator.leases == ["scrub"]
    assert store.calls["walk"] == 0


async def test_a_process_that_lost_the_leader_lease_leaves_the_rest_to_another(clock: FakeClock) -> None:
    store = MemoryStore()
    for n in range(50):
        await store.put(f"a/{n}", flipped(document(b'{"n":12345}')))
    scrubbed = Scrubbed(store, clock, Leaders(20), clock_s=itertools.count().__next__)
    await scrubbed.scrub.run_if_due()
    assert 0 < len(scrubbed.damages) < 50
    assert await store.get(SCRUB_KEY) is None


@pytest.mark.parametrize("note", [b"", b"[]", b'{"finishedMs":"x"}', b'{"finishedMs":true}'])
async def test_a_note_that_cannot_be_read_is_none(clock: FakeClock, note: bytes) -> None:
    store = FaultyStore(MemoryStore())
    await store.put(SCRUB_KEY, note)
    await Scrubbed(store, clock).scrub.run_if_due()
    assert store.calls["walk"] == 1


async def test_it_waits_while_store_or_coordinator_are_away_and_goes_on(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(Leaders):
        async def acquire_lease(self, name: str) -> bool:
            if self.left == 10_000:
                self.left -= 1
                raise CoordinatorUnavailable
            return await super().acquire_lease(name)

    store = FaultyStore(MemoryStore())
    await store.put("a", document(b"{}"))
    store.fail("walk")
    done = asyncio.Event()
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)
        if await store.get(SCRUB_KEY) is not None:
            done.set()
            await asyncio.Event().wait()

    scrub = Job(Scrubber(store, Away(), ScrubConfig(), lambda damage: None, clock, sleep=sleep).run)
    scrub.start()
    await done.wait()
    await scrub.close()
    assert slept.count(SWEEP_EVERY_S) == 4
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 2
    assert all("the scrub is paused" in message for message in warned)


@pytest.mark.parametrize("error", [RuntimeError("unforeseen"), PanicException("core")])
async def test_a_scrub_that_fails_unexpectedly_begins_anew(clock: FakeClock, error: BaseException) -> None:
    class Failing(Leaders):
        async def acquire_lease(self, name: str) -> bool:
            raise error

    third = asyncio.Event()
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            third.set()
            await asyncio.Event().wait()

    scrub = Job(
        Scrubber(MemoryStore(), Failing(), ScrubConfig(), lambda damage: None, clock, sleep=sleep).run
    )
    scrub.start()
    await asyncio.wait_for(third.wait(), 10)
    await scrub.close()
    assert len(slept) == 3


async def test_the_service_names_counts_and_rejects_what_its_scrub_finds(
    start: Start, tmp_path: Path, session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    await store.write("photos/a", chunks_of(bytes(2_000_000)), "image/png")
    rot(tmp_path / "data/files/photos/a")
    members = {
        "store": f"file:{tmp_path}/data",
        "collections": [
            {
                "name": "photos",
                "storagePath": "photos/{id}",
                "readRoles": ["public"],
                "allowedMimeTypes": ["image/png"],
            }
        ],
    }
    browser = Browser(await start(members, store), session)
    scrub = start.apps[0].jobs.scrubber  # type: ignore[attr-defined]
    assert (await browser.pull("photos/a")).status == 200
    await scrub.run_once()
    assert (await browser.pull("photos/a")).error == (500, "document_corrupt")
    metrics = (await browser.request("GET", "/metrics")).body.decode()
    assert 'pysync_corrupt_objects_total{found_by="scrub",kind="file"} 1.0' in metrics
    named, _of_the_request = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "photos/a" in named
    assert "its sha256 is" in named


async def test_it_is_on_once_a_day_and_can_be_turned_off(tmp_path: Path) -> None:
    def scrub_of(**members: object) -> object:
        return config.parse(configuration(store=f"file:{tmp_path}/data", **members)).scrub

    assert scrub_of() == scrub_of(scrub=True) == ScrubConfig(every_ms=DAY_MS, max_bytes_per_second=8_388_608)
    assert scrub_of(scrub={"everyMs": 5}) == ScrubConfig(every_ms=5)
    assert scrub_of(scrub=False) is False
    assert faults(configuration(scrub={"maxBytesPerSecond": 0})) == [
        ("scrub.maxBytesPerSecond", "must be at least 1")
    ]
    for members, is_on in (
        ({"store": f"file:{tmp_path}/data"}, True),
        ({"store": f"file:{tmp_path}/data", "scrub": False}, False),
        ({"store": "memory:"}, False),
    ):
        async with await create_app(config.parse(members)) as app:
            scrubber = app.jobs.scrubber
            assert (scrubber is not None and scrubber.config is not False) == is_on
