"""An object that could not be read is part of a snapshot that says so, until somebody can read it again."""

import os
from pathlib import Path

import aiohttp
import pytest
from contracts.files import chunks_of
from support.append_log_nodes import keys_below
from support.bit_rot import rot_rows
from support.clients import Browser, Start
from support.collections import collection
from support.places import Commands, write
from support.store_samples import LOG, fill

from pysync.store.local.store import LocalStore

SERVED = [
    collection("notes"),
    collection("files", allowedMimeTypes=["text/*"]),
    collection("logs", appendOnly={"requireAuthorSignature": False}),
]


async def write_file(folder: Path, key: str, body: bytes) -> None:
    """Put a file into the store in a folder."""
    store = await LocalStore.open_folder(folder)
    await store.write(key, chunks_of(body), "text/plain")
    await store.close()


async def test_each_backup_reports_an_object_that_is_still_unreadable(commands: Commands, data: Path) -> None:
    await write_file(data, "files/a", b"lost")
    os.unlink(data / "files/files/a")
    for text in ("first", "second"):
        await write(data, {"notes/a": text})
        made = await commands.back_up(status=1)
        assert made.counts["unreadable"] == 1
        assert "files/a" in made.errors
    assert [line["unreadable"] for line in (await commands.list()).lines] == [1, 1]


async def test_restore_names_what_could_not_be_read(commands: Commands, data: Path) -> None:
    await write(data, {"notes/a": "whole"})
    await write_file(data, "files/a", b"lost")
    os.unlink(data / "files/files/a")
    await commands.back_up(status=1)
    await commands.verify()
    restored = await commands.restore(status=1)
    assert restored.counts["damaged"] == 1
    assert "files/a" in restored.errors


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_restored_store_answers_500_for_what_could_not_be_read(
    commands: Commands,
    data: Path,
    tmp_path: Path,
    is_replaced: bool,
    start: Start,
    session: aiohttp.ClientSession,
) -> None:
    await write(data, {"notes/a": "whole"})
    if is_replaced:
        await write_file(data, "files/a", b"older version")
        await commands.back_up()
    await write_file(data, "files/a", b"lost")
    os.unlink(data / "files/files/a")
    await commands.back_up(status=1)
    await commands.restore(status=1)
    browser = Browser(await start({"store": f"file:{tmp_path}/restored", "collections": SERVED}), session)
    assert (await browser.pull("files/a")).error == (500, "document_corrupt")
    assert (await browser.pull("notes/a")).json["data"] == {"text": "whole"}


async def test_restored_store_with_an_unreadable_object_does_not_verify(
    commands: Commands, data: Path
) -> None:
    await write_file(data, "files/a", b"lost")
    os.unlink(data / "files/files/a")
    await commands.back_up(status=1)
    await commands.restore(status=1)
    found = await commands.run("verify", "--store", "file:restored", status=1)
    assert [line["key"] for line in found.lines[:-1]] == ["files/a"]


async def test_unreadable_object_is_backed_up_once_it_can_be_read(commands: Commands, data: Path) -> None:
    await write_file(data, "files/a", b"lost")
    os.unlink(data / "files/files/a")
    await commands.back_up(status=1)
    await write_file(data, "files/a", b"pushed again")
    assert (await commands.back_up()).counts["unreadable"] == 0
    assert (await commands.restore()).counts["damaged"] == 0


async def test_backup_finds_a_damaged_document(
    commands: Commands, data: Path, tmp_path: Path, start: Start, session: aiohttp.ClientSession
) -> None:
    await write(data, {"notes/a": "a" * 100, "notes/b": "whole"})
    rot_rows(data, "notes/a")
    made = await commands.back_up(status=1)
    assert made.counts["unreadable"] == 1
    assert "notes/a" in made.errors
    await commands.restore(status=1)
    browser = Browser(await start({"store": f"file:{tmp_path}/restored", "collections": SERVED}), session)
    assert (await browser.pull("notes/a")).error == (500, "document_corrupt")
    assert (await browser.pull("notes/b")).json["data"] == {"text": "whole"}


async def test_backup_finds_a_damaged_segment_and_a_damaged_head(commands: Commands, data: Path) -> None:
    store = await LocalStore.open_folder(data)
    await fill(store, 200)
    segment, *_ = await keys_below(store, "_pysync/logs")
    await store.close()
    rot_rows(data, segment, LOG)
    errors = (await commands.back_up(status=1)).errors
    assert segment in errors
    assert LOG in errors
