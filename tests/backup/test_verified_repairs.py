"""A repair is called one only after the object was read again, and was sound."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from contracts.files import chunks_of
from support.append_log_nodes import keys_below
from support.bit_rot import damages, rot_rows
from support.places import Commands
from support.store_samples import FILES, contents, fill

from pysync.store.local.store import LocalStore

REPAIR = ("verify", "--store", "file:data", "--repair-from", "file:backup")


@pytest.fixture
async def store(data: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(data)
    await fill(store, 200)
    yield store
    await store.close()


@pytest.fixture
async def segment(store: LocalStore) -> str:
    """The key of a segment of a log in the store."""
    return (await keys_below(store, "_pysync/logs"))[0]


async def test_damaged_segment_of_a_backup_is_no_repair(
    commands: Commands, data: Path, store: LocalStore, segment: str
) -> None:
    rot_rows(data, segment)
    await commands.back_up(status=None)
    repaired = await commands.run(*REPAIR, status=1)
    assert repaired.counts["repaired"] == 0
    assert [line["repaired"] for line in repaired.lines if "repaired" in line and "key" in line] == [False]


async def test_sound_segment_of_an_older_snapshot_repairs_a_log(
    commands: Commands, data: Path, store: LocalStore, segment: str
) -> None:
    expected = await contents(store)
    await commands.back_up()
    for key in expected.keys() - FILES.keys():  # all etags are new, as after a restore
        await store.put(key, expected[key][1])
    for key, body in FILES.items():
        await store.write(key, chunks_of(body), "application/x-test")
    rot_rows(data, segment)
    await commands.back_up(status=None)
    repaired = await commands.run(*REPAIR)
    assert repaired.counts["repaired"] == repaired.counts["damaged"] == 1
    assert await damages(store) == []
    assert (await contents(store)).items() >= expected.items()
