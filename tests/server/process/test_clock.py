"""A clock that is set: what was signed, stored and dated must not notice."""

import logging
from pathlib import Path

import aiohttp
import pytest
from contracts.change_logs import change
from support.clients import SUBJECT, Browser, Signed, Start, root_device
from support.collections import LOG, MINE, NOTES

from pysync.auth import issuing
from pysync.auth.revocation import RevocationRegistry
from pysync.changelog import Retention
from pysync.clock import (
    STEP_GRACE_MS,
    SteadyClock,
    boot_clock_ms,
    boot_id,
    elapsed_of,
    is_stable,
    wall_clock_ms,
)
from pysync.coordinator import EPOCH_MS, Coordinator, Standing
from pysync.coordinator.local import LocalCoordinator
from pysync.coordinator.memory import MemoryCoordinator
from pysync.coordinator.nonce_log import NonceLog
from pysync.sqlite.database_file import DatabaseFile
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

HOUR_MS = 3_600_000


@pytest.fixture
def steady(clock: FakeClock) -> SteadyClock:
    return SteadyClock(clock)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_time_that_passes_is_no_step(
    clock: FakeClock, steady: SteadyClock, caplog: pytest.LogCaptureFixture
) -> None:
    for passed_ms in (1, 1000, 10 * HOUR_MS):
        clock.now_ms += passed_ms
        assert steady() == clock()
    assert steady.is_stable
    assert logged(caplog) == []


def test_a_clock_that_is_corrected_by_little_is_followed_at_once(
    clock: FakeClock, steady: SteadyClock
) -> None:
    for step_ms in (60_000, -60_000, 500, 59_999):
        clock.step(step_ms)
        assert steady() == clock()
    assert steady.is_stable


@pytest.mark.parametrize(
    ("step_ms", "size"), [(HOUR_MS, "+3600 s"), (-HOUR_MS, "-3600 s"), (60_001, "+60 s")]
)
def test_a_step_is_logged_with_its_size_and_disbelieved_for_ten_minutes(
    clock: FakeClock, steady: SteadyClock, caplog: pytest.LogCaptureFixture, step_ms: int, size: str
) -> None:
    before = steady()
    clock.step(step_ms)
    assert steady() == before
    assert not steady.is_stable
    (message,) = logged(caplog)
    assert size in message
    clock.now_ms += STEP_GRACE_MS - 1
    assert steady() == before + STEP_GRACE_MS - 1
    assert not steady.is_stable
    assert len(logged(caplog)) == 1
    clock.now_ms += 1
    assert steady() == clock()
    assert steady.is_stable


def test_a_clock_that_steps_there_and_back_changes_nothing(
    clock: FakeClock, steady: SteadyClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.step(HOUR_MS)
    steady()
    clock.step(-HOUR_MS)
    assert steady() == clock()
    assert len(logged(caplog)) == 2
    clock.now_ms += STEP_GRACE_MS - 1
    steady()
    assert not steady.is_stable
    clock.now_ms += 1
    steady()
    assert steady.is_stable
    assert steady() == clock()


def test_a_second_step_begins_the_ten_minutes_anew(clock: FakeClock, steady: SteadyClock) -> None:
    before = steady()
    clock.step(HOUR_MS)
    steady()
    clock.now_ms += STEP_GRACE_MS - 1
    clock.step(HOUR_MS)
    assert steady() == before + STEP_GRACE_MS - 1
    clock.now_ms += STEP_GRACE_MS - 1
    assert steady() == before + 2 * STEP_GRACE_MS - 2
    clock.now_ms += 1
    assert steady() == clock()


def test_the_clock_of_the_machine_comes_with_one_that_no_step_moves() -> None:
    assert elapsed_of(wall_clock_ms) is boot_clock_ms
    assert elapsed_of(SteadyClock()) is boot_clock_ms
    assert boot_clock_ms() <= boot_clock_ms()
    assert abs(SteadyClock()() - wall_clock_ms()) < 60_000


def test_a_clock_that_a_caller_gives_is_believed() -> None:
    now = [5]

    def clock() -> int:
        return now[0]

    steady = SteadyClock(clock)
    now[0] = HOUR_MS
    assert steady() == HOUR_MS
    assert is_stable(clock)


async def test_several_processes_know_a_nonce_though_the_clock_stepped_in_between(
    clock: FakeClock, tmp_path: Path
) -> None:
    first, second = [await LocalCoordinator.open_folder(tmp_path, SteadyClock(clock)) for _ in range(2)]
    assert await first.consume_nonce("aa", "n", clock())
    clock.step(HOUR_MS)
    for number in range(3):
        assert await second.consume_nonce("aa", f"meanwhile {number}", clock())
        clock.step(HOUR_MS)
    clock.step(-4 * HOUR_MS)
    for coordinator in (first, second):
        assert not await coordinator.consume_nonce("aa", "n", clock())
        await coordinator.close()


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
async def test_a_process_that_starts_while_the_clock_is_wrong_forgets_no_nonce(
    clock: FakeClock, tmp_path: Path, step_ms: int
) -> None:
    async def restarted(remembers: str, knows: str) -> None:
        coordinator = await LocalCoordinator.open_folder(tmp_path, SteadyClock(clock))
        assert not knows or not await coordinator.consume_nonce("aa", knows, clock())
        assert await coordinator.consume_nonce("aa", remembers, clock())
        await coordinator.close()

    await restarted("n", "")
    clock.step(step_ms)
    await restarted("meanwhile", "n")
    clock.step(-step_ms)
    await restarted("later", "n")
    await restarted("last", "meanwhile")


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_request_signed_while_the_clock_was_ahead_is_a_replay_when_that_time_comes(
    clock: FakeClock, tmp_path: Path, kind: str, is_restarted: bool
) -> None:
    steady = SteadyClock(clock)

    async def opened() -> Coordinator:
        return (
            MemoryCoordinator(steady)
            if kind == "memory"
            else await LocalCoordinator.open_folder(tmp_path, steady)
        )

    one, other = await opened(), await opened()
    clock.step(HOUR_MS)
    signed_ms = clock()
    assert await one.consume_nonce("aa", "ahead", signed_ms)
    assert kind == "memory" or not await other.consume_nonce("aa", "ahead", signed_ms)
    clock.step(-HOUR_MS)
    for _ in range(6):
        clock.now_ms += HOUR_MS // 6
        assert await one.consume_nonce("aa", f"{clock()}", clock())
    if is_restarted and kind == "file":
        await one.close()
        one = await opened()
    for passed_ms in (0, 299_999):
        clock.now_ms += passed_ms
        assert not await one.consume_nonce("aa", "ahead", signed_ms)
        assert kind == "memory" or not await other.consume_nonce("aa", "ahead", signed_ms)
    clock.now_ms += 4 * EPOCH_MS
    assert await one.consume_nonce("aa", "ahead", clock()), "it is not kept for ever"
    assert list(tmp_path.rglob("later-*")) == []
    await one.close()
    await other.close()


@pytest.mark.parametrize("up_ms", [10, EPOCH_MS - 1, 1000 * EPOCH_MS])
@pytest.mark.parametrize("step_ms", [0, HOUR_MS, -HOUR_MS])
async def test_nonces_survive_a_start_of_the_machine_whatever_its_clock_says(
    clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_ms: int, up_ms: int
) -> None:
    boot = tmp_path / "boot"
    monkeypatch.setattr("pysync.clock.BOOT_ID_PATH", boot)
    boot.write_text("one\n")
    clock.booted_ms = clock.now_ms - 50 * EPOCH_MS
    before = await LocalCoordinator.open_folder(tmp_path / "data", SteadyClock(clock))
    assert await before.consume_nonce("aa", "n", clock())
    await before.close()
    boot.write_text("two\n")
    clock.step(step_ms)
    clock.booted_ms = clock.now_ms - up_ms
    pair = [await LocalCoordinator.open_folder(tmp_path / "data", SteadyClock(clock)) for _ in range(2)]
    for passed_ms in (0, EPOCH_MS, EPOCH_MS - 1):
        clock.now_ms += passed_ms
        for coordinator in pair:
            assert not await coordinator.consume_nonce("aa", "n", clock())
            assert await coordinator.consume_nonce("aa", f"{id(coordinator)} {clock()}", clock())
    clock.now_ms += 3 * EPOCH_MS
    assert await pair[0].consume_nonce("aa", "n", clock()), "it is not kept for ever"
    for coordinator in pair:
        await coordinator.close()


@pytest.mark.parametrize("kept", ["", "x", "{boot} x", "{boot} 1 2", "{boot}"])
async def test_damaged_clock_file_is_tolerated(clock: FakeClock, tmp_path: Path, kept: str) -> None:
    before = await LocalCoordinator.open_folder(tmp_path, SteadyClock(clock))
    assert await before.consume_nonce("aa", "n", clock())
    await before.close()
    (tmp_path / "nonces/boot").write_text(kept.format(boot=boot_id()))
    after = await LocalCoordinator.open_folder(tmp_path, SteadyClock(clock))
    assert not await after.consume_nonce("aa", "n", clock())
    await after.close()


async def test_nonces_do_not_pile_up_where_no_start_of_the_machine_has_a_name(
    clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sandbox without /proc/sys. The epochs of a machine that was up for long would stand still until it
    has been up for as long again."""
    monkeypatch.setattr("pysync.clock.BOOT_ID_PATH", tmp_path / "hidden")
    clock.booted_ms = clock.now_ms - 50 * EPOCH_MS
    before = await LocalCoordinator.open_folder(tmp_path / "data", SteadyClock(clock))
    assert await before.consume_nonce("aa", "n", clock())
    await before.close()
    clock.booted_ms = clock.now_ms - 7
    for passed_ms in (0, EPOCH_MS, EPOCH_MS):
        clock.now_ms += passed_ms
        after = await LocalCoordinator.open_folder(tmp_path / "data", SteadyClock(clock))
        assert not await after.consume_nonce("aa", "n", clock())
        await after.close()
    clock.now_ms += 2 * EPOCH_MS
    after = await LocalCoordinator.open_folder(tmp_path / "data", SteadyClock(clock))
    assert await after.consume_nonce("aa", "n", clock()), "it is not kept for ever"
    await after.close()


async def test_ledgers_of_an_earlier_version_are_gone_on_with(clock: FakeClock, tmp_path: Path) -> None:
    before = await LocalCoordinator.open_folder(tmp_path, clock)
    assert await before.consume_nonce("aa", "n", clock())
    await before.close()
    (tmp_path / "nonces/boot").unlink()
    clock.booted_ms = clock.now_ms - 7
    after = await LocalCoordinator.open_folder(tmp_path, SteadyClock(clock))
    assert not await after.consume_nonce("aa", "n", clock())
    await after.close()


@pytest.mark.parametrize("phase_ms", [0, 1, EPOCH_MS // 2, EPOCH_MS - 1])
async def test_an_upgrade_in_the_midst_of_an_epoch_forgets_no_nonce_early(
    tmp_path: Path, phase_ms: int
) -> None:
    """Epochs of the earlier version began with those of the wall clock, and so at other moments."""
    wall_ms, now_ms = 5_984_548 * EPOCH_MS, 0
    database = DatabaseFile(tmp_path)
    earlier = NonceLog(tmp_path, lambda: wall_ms + now_ms, 99, "", database)
    now_ms = EPOCH_MS - 1
    assert await earlier.consume("aa", "n", 0, Standing.OWNER)
    now_ms = EPOCH_MS
    assert await earlier.consume("aa", "in the next epoch", 0, Standing.OWNER)
    (tmp_path / "boot").unlink()
    booted_ms = now_ms - 7 * EPOCH_MS - phase_ms
    upgraded = NonceLog(tmp_path, lambda: now_ms - booted_ms, 99, "one", database)
    for age_ms in range(1, 2 * EPOCH_MS + 1, EPOCH_MS // 4):
        now_ms = EPOCH_MS - 1 + age_ms
        assert not await earlier.consume("aa", "n", 0, Standing.OWNER)
        assert not await upgraded.consume("aa", "n", 0, Standing.OWNER)
    now_ms += 2 * EPOCH_MS
    assert await upgraded.consume("aa", "n", 0, Standing.OWNER), "it is not kept for ever"
    earlier.close()
    upgraded.close()


async def test_a_replay_is_rejected_after_the_clock_stepped_there_and_back(
    start: Start, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    for store in ("memory:", f"file:{tmp_path}/data"):
        clock = FakeClock(wall_clock_ms())
        base = await start({"store": store, "collections": [MINE]}, now_ms=clock)
        signed, other = [
            Signed(base, session, SUBJECT, root_device(SUBJECT), ts_ms=clock()) for _ in range(2)
        ]
        key = f"u/{SUBJECT.user_id}/a"
        signed.nonce = b"n" * 16
        assert (await signed.pull(key)).status == 200
        assert (await signed.pull(key)).status == 401, "a replay"
        clock.step(HOUR_MS)
        other.ts_ms = clock()
        other.nonce = b"o" * 16
        assert (await other.pull(key)).status == 200, (
            "the time of a signature is judged by the clock as it is"
        )
        clock.step(-HOUR_MS)
        assert (await signed.pull(key)).status == 401, "a replay"


async def test_a_log_is_not_dated_by_a_clock_that_stepped_for_a_moment(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    browser = Browser(await start({"collections": [LOG]}, now_ms=clock), session)
    clock.step(HOUR_MS)
    first = (await browser.push("log/a", {"n": 1})).json["timestamp"]
    clock.step(-HOUR_MS)
    assert first <= clock()
    clock.now_ms += 10
    answer = await browser.request(
        "POST", "/push/log/a", b'{"data":{"n":2},"ts":%d}' % clock(), {"Content-Type": "application/json"}
    )
    assert answer.status == 200, answer.body


async def test_nothing_expires_or_is_swept_by_a_step_before_ten_minutes(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    short = NOTES | {"ttlMs": HOUR_MS // 2}
    browser = Browser(await start({"collections": [short]}, now_ms=clock), session)
    (app,) = start.apps  # type: ignore[attr-defined]
    pushed = (await browser.push("notes/a", {"n": 1})).json["hash"]
    clock.step(HOUR_MS)
    assert await app.jobs.ttl_sweeper.sweep() == 0
    assert (await browser.pull("notes/a")).json["hash"] == pushed
    clock.now_ms += STEP_GRACE_MS - 1
    assert await app.jobs.ttl_sweeper.sweep() == 0
    assert (await browser.pull("notes/a")).json["hash"] == pushed
    clock.now_ms += 1
    assert (await browser.pull("notes/a")).json["hash"] == ""
    assert await app.jobs.ttl_sweeper.sweep() == 1


async def test_expired_documents_are_not_swept_within_ten_minutes_of_a_step(
    start: Start, session: aiohttp.ClientSession, clock: FakeClock
) -> None:
    short = NOTES | {"ttlMs": 1000}
    browser = Browser(await start({"collections": [short]}, now_ms=clock), session)
    (app,) = start.apps  # type: ignore[attr-defined]
    await browser.push("notes/a", {"n": 1})
    clock.now_ms += 2000
    clock.step(-HOUR_MS)
    assert await app.jobs.ttl_sweeper.sweep() == 0
    clock.step(HOUR_MS)
    assert await app.jobs.ttl_sweeper.sweep() == 0
    clock.now_ms += STEP_GRACE_MS
    assert await app.jobs.ttl_sweeper.sweep() == 1


@pytest.mark.parametrize("kind", ["store", "memory"])
async def test_the_log_of_changes_is_not_trimmed_by_age_within_ten_minutes_of_a_step(
    clock: FakeClock, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pysync.sqlite.changelog.TRIM_EVERY", 1)
    steady, retention = SteadyClock(clock), Retention(100, HOUR_MS)
    closing: LocalStore | MemoryCoordinator
    if kind == "store":
        closing = await LocalStore.open_folder(tmp_path, steady, retention)
        log = closing.change_log
    else:
        closing = log = MemoryCoordinator(steady, retention=retention)  # type: ignore[assignment]
    oldest = await log.last_id()
    for number in range(3):
        await log.append([change(f"{number}")])
    clock.now_ms += HOUR_MS + 1
    clock.step(2 * HOUR_MS)
    steady()
    for number in range(3):
        await log.append([change(f"{number}")])
    assert await log.read(oldest, 10) is not None
    clock.now_ms += STEP_GRACE_MS
    for number in range(3):
        await log.append([change(f"{number}")])
    assert await log.read(oldest, 10) is None
    await closing.close()


async def test_no_revocation_list_is_dropped_within_ten_minutes_of_a_step() -> None:
    clock = FakeClock(wall_clock_ms())
    revocations = RevocationRegistry(MemoryStore(), SteadyClock(clock))
    until_s = clock() // 1000 + 60
    await revocations.publish(issuing.issue_revocation_list(SUBJECT, 1, subjects=[("0" * 64, until_s)]).text)
    clock.step(100 * 24 * HOUR_MS)
    assert await revocations.delete_expired() == 0
    clock.step(-100 * 24 * HOUR_MS)
    clock.now_ms += 2 * 24 * HOUR_MS  # now it has expired indeed
    clock.step(HOUR_MS)
    assert await revocations.delete_expired() == 0
    clock.now_ms += STEP_GRACE_MS
    assert await revocations.delete_expired() == 1
