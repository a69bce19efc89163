"""A key that a folder cannot hold beside another costs that key alone."""

from pathlib import Path

from contracts.files import chunks_of
from support.backups import MemoryTarget, back_up, source_of
from support.places import Commands, held, save
from support.store_samples import fill

from pysync.store.memory import MemoryStore


async def test_file_above_another_is_named_and_the_rest_is_restored_into_a_folder(
    commands: Commands, place: Path, tmp_path: Path
) -> None:
    store, target = MemoryStore(), MemoryTarget()
    await fill(store, 50)
    await store.write("photos/a", chunks_of(b"photo"), "image/png")
    await store.write("photos/a/thumb", chunks_of(b"thumb"), "image/png")
    keys = {listed.key async for listed in store.walk("")}
    await back_up(source_of(store), target)
    save(target, place)
    restored = await commands.restore(status=1)
    assert restored.counts["damaged"] == 1
    assert "pysync: photos/a" in restored.errors
    missing = keys - {*await held(tmp_path / "restored")}
    assert missing in ({"photos/a"}, {"photos/a/thumb"})
