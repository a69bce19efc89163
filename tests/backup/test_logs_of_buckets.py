"""A log in the backup of a store that can only be listed is whole, or it is reported."""

from dataclasses import replace
from pathlib import Path

from support.append_log_nodes import KEY, RULES, Node, keys_below, numbered
from support.backups import MemoryTarget, Reports, back_up, maker_of, source_of
from support.places import Commands, save
from support.store_samples import document

from pysync.coordinator.memory import MemoryCoordinator
from pysync.store import NotModified, StoredObject
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

KEEPS_FOUR = replace(RULES, keep_elements=4)


class BusyStore(MemoryStore):
    """A store with a log whose segments are all replaced after each of the next `turnovers` reads of its
    head, and until then before each read of a segment."""

    def __init__(self) -> None:
        super().__init__()
        clock = FakeClock()
        self.turnovers = 0
        self._node = Node(self, MemoryCoordinator(clock), clock)
        self._is_written = False

    async def get(self, key: str, if_none_match: str | None = None) -> StoredObject | NotModified | None:
        is_busy = self.turnovers > 0 and not self._is_written
        if is_busy and key.startswith("_pysync/logs/"):
            await self.turn_over()
        found = await super().get(key, if_none_match)
        if is_busy and key == KEY:
            await self.turn_over()
            self.turnovers -= 1
        return found

    async def turn_over(self) -> None:
        """Append so much that every older segment leaves the log, and its objects go."""
        self._is_written = True
        before = await keys_below(self, "_pysync/logs")
        while {*before} & {*await keys_below(self, "_pysync/logs")} or not before:
            await self._node.append(*numbered(20), rules=KEEPS_FOUR)
            before = before or await keys_below(self, "_pysync/logs")
        self._is_written = False


async def test_log_whose_segments_are_replaced_meanwhile_is_whole(commands: Commands, place: Path) -> None:
    store, target = BusyStore(), MemoryTarget()
    await store.turn_over()
    store.turnovers = 2
    await back_up(source_of(store), target)
    save(target, place)
    await commands.restore()
    await commands.run("verify", "--store", "file:restored")


async def test_log_whose_segments_are_always_replaced_is_reported(commands: Commands, place: Path) -> None:
    store, target, reports = BusyStore(), MemoryTarget(), Reports()
    await store.turn_over()
    await store.put("notes/a", document(b"{}"))
    store.turnovers = 1000
    async with maker_of(source_of(store), target, reports=reports) as maker:
        await maker.make()
    assert KEY in {key for key, _ in reports}
    save(target, place)
    restored = await commands.restore(status=1)
    assert restored.counts["objects"] >= 1
    assert KEY in restored.errors


async def test_log_that_has_lost_a_segment_is_reported(commands: Commands, place: Path) -> None:
    store, target, reports = BusyStore(), MemoryTarget(), Reports()
    await store.turn_over()
    segment, *_ = await keys_below(store, "_pysync/logs")
    await store.delete(segment)
    async with maker_of(source_of(store), target, reports=reports) as maker:
        await maker.make()
    assert reports
    save(target, place)
    restored = await commands.restore(status=1)
    assert restored.counts["damaged"] >= 1
    assert KEY in restored.errors
