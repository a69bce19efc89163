"""Rules of what to keep go by the time of the machine that made a snapshot, however clocks are set."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.backups import MemoryTarget, maker_of, restored, source_of
from support.places import DAY_MS, STORE_ID, Commands, load, run_at, save, write
from support.store_samples import contents, document, fill

from pysync.store.memory import MemoryStore

pytestmark = [pytest.mark.process, pytest.mark.slow]

MAKE = ("backup", "--store", "file:data", "--to", "file:backup")
PRUNE = ("backup", "prune", "--from", "file:backup")


async def make_at(days: int, folder: Path) -> str:
    """Back up with a clock that is ahead by so many days; return the time of the snapshot."""
    await write(folder / "data", {"notes/a": f"day {days}"})
    made = await run_at(days * DAY_MS, folder, *MAKE)
    assert made.status == 0, made.errors
    return str(made.counts["time"])


async def test_clock_that_was_ahead_once_removes_no_daily_snapshot(
    commands: Commands, tmp_path: Path
) -> None:
    times = [await make_at(days, tmp_path) for days in (-8, -7, 30, -6, -5, -4, -3, -2)]
    pruned = await run_at(0, tmp_path, *PRUNE, "--keep-daily", "7")
    assert pruned.status == 0
    kept = {line["time"] for line in (await commands.list()).lines}
    assert kept >= {*times} - {times[2]}
    assert "pysync: " in pruned.errors, "times run backwards"


async def test_snapshot_has_the_time_of_its_makers_clock(commands: Commands, tmp_path: Path) -> None:
    times = [datetime.fromisoformat(await make_at(days, tmp_path)) for days in (30, -6)]
    assert abs(times[1] - (datetime.now(UTC) - timedelta(days=6))) < timedelta(hours=1)
    await commands.restore("--at", times[1].isoformat())


async def test_clock_that_is_behind_once_keeps_the_newest_snapshot_newest(
    commands: Commands, tmp_path: Path
) -> None:
    times = [await make_at(days, tmp_path) for days in (-2, -1, -30)]
    assert [line["time"] for line in (await commands.list()).lines] == times
    assert (await commands.restore()).counts["time"] == times[-1]


async def test_backup_that_slept_for_a_day_beside_prunes_lacks_nothing(tmp_path: Path) -> None:
    """It is suspended when everything but its snapshot is stored."""
    store, target = MemoryStore(), MemoryTarget()
    await fill(store, 50)
    async with maker_of(source_of(store), target) as maker:
        await maker.make()
    await store.put("notes/later", document(b'{"text":"written before the sleep"}'))
    slept: list[str] = []

    async def sleep(name: str) -> None:
        if name.startswith("snapshots/") and not slept:
            slept.append(name)
            save(target, tmp_path / "backup")
            for hours in (0, 25):
                pruned = await run_at(hours * DAY_MS // 24, tmp_path, *PRUNE, "--keep-last", "1")
                assert pruned.status == 0, pruned.errors
            load(target, tmp_path / "backup")

    target.before_put = sleep
    async with maker_of(source_of(store), target) as maker:
        await maker.make()
    assert slept
    target.before_put = MemoryTarget.before_put
    expected = await contents(store)
    expected.pop(STORE_ID, None)
    assert await restored(target) == expected
