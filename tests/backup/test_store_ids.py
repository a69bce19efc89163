"""A place holds the backup of one store, which is known by its id."""

from pathlib import Path

from support.places import Commands, held, write


async def test_place_of_another_store_is_refused(
    commands: Commands, data: Path, place: Path, tmp_path: Path
) -> None:
    await write(data, {"notes/a": "of one"})
    await write(tmp_path / "other", {"notes/a": "of the other"})
    await commands.back_up()
    before = sorted(place.rglob("*"))
    refused = await commands.back_up(store="file:other", status=1)
    assert "another store" in refused.errors
    assert "--adopt" in refused.errors
    assert sorted(place.rglob("*")) == before
    await commands.back_up()


async def test_restored_store_continues_the_old_backup_only_if_adopted(
    commands: Commands, data: Path, tmp_path: Path
) -> None:
    await write(data, {"notes/a": "text"})
    await commands.back_up()
    await commands.restore()
    await commands.back_up(store="file:restored", status=1)
    await commands.back_up("--adopt", store="file:restored")
    await commands.back_up(store="file:restored")
    (id_,) = {line["storeId"] for line in (await commands.list()).lines}
    assert id_
    await commands.restore(to="again")
    assert await held(tmp_path / "again") == await held(data)


async def test_copied_store_has_an_id_of_its_own(commands: Commands, data: Path) -> None:
    await write(data, {"notes/a": "text"})
    await commands.back_up()
    assert (await commands.shell.run_async("copy", "file:data", "file:copied"))[0] == 0
    assert "another store" in (await commands.back_up(store="file:copied", status=1)).errors
