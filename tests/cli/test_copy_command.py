"""`pysync copy` as people and scripts meet it."""

import asyncio
import json
import os
import re
import resource
import sys
from pathlib import Path

import pytest
from support.cli_runner import Shell
from support.store_samples import DOCUMENTS, UNREAD, contents, document, fill, flipped, replace

from pysync.store.local.store import LocalStore

NONE = {
    "copied": 0,
    "healed": 0,
    "alreadyThere": 0,
    "corrupt": 0,
    "different": 0,
    "refused": 0,
    "unreadable": 0,
    "bytes": 0,
}


async def test_copy_reports_the_outcome_of_each_object(shell: Shell, tmp_path: Path) -> None:
    source = await LocalStore.open_folder(tmp_path / "from")
    await fill(source)
    before = await contents(source)
    size = sum(len(body) for _, body in before.values())
    status, output, errors = await shell.run_async("copy", "file:from", "file:to")
    assert (status, errors) == (0, "")
    assert json.loads(output) == {**NONE, "copied": len(before), "bytes": size}
    target = await LocalStore.open_folder(tmp_path / "to")
    assert await contents(target) == before
    await target.put("top", document(b'{"other":1}'))
    await replace(source, "notes/large", flipped)
    status, output, errors = await shell.run_async("copy", "file:from", "file:to")
    assert status == 1
    counts = {**NONE, "alreadyThere": len(before) - 2, "corrupt": 1, "different": 1}
    assert json.loads(output) == counts
    *said, heading, listed = errors.splitlines()
    assert sorted(said) == [
        f"pysync: notes/large: corrupt: {UNREAD}",
        "pysync: top: different: the target has another object at this key",
    ]
    assert heading == "pysync: 1 object is damaged or unreadable:"
    assert listed == f"pysync: notes/large: corrupt: {UNREAD}"
    for flag, member in (("--overwrite", "different"), ("--keep-corrupt", "corrupt")):
        _, output, _ = await shell.run_async("copy", "file:from", "file:to", flag)
        assert json.loads(output)[member] == (1 if flag == "--keep-corrupt" else 0)
    await source.close()
    await target.close()


async def test_a_configuration_file_stands_for_its_store(shell: Shell, tmp_path: Path) -> None:
    source = await LocalStore.open_folder(tmp_path / "from")
    await source.put("top", DOCUMENTS["top"])
    await source.close()
    (tmp_path / "service.json").write_text('{"version": 1, "store": "file:to"}')
    for locations in (("file:from", "service.json"), ("service.json", "file:third")):
        status, output, _ = await shell.run_async("copy", *locations)
        assert (status, json.loads(output)["copied"]) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("file:nothing", "file:to"), "file:nothing: there is no store"),
        (
            ("file:plain", "file:to"),
            "file:plain: there is no store; a folder of plain files is folder:plain",
        ),
        (("folder:store", "file:to"), "folder:store is a store: name it file:store"),
        (("folder:nothing", "file:to"), "nothing: there is no such folder"),
        (("file:store", "folder:to"), "folder:to can only be copied from"),
        (("file:store", "file:store"), "FROM and TO are the same store"),
        (
            ("store", "file:to"),
            "store: name file:DIR, s3://BUCKET/PREFIX, folder:DIR or a configuration file",
        ),
        (("nothing.json", "file:to"), "nothing.json: No such file or directory"),
        (("file:store", "s3://B"), "store: must be memory:, file:DIR or s3://bucket/prefix"),
    ],
)
async def test_malformed_location_is_reported_and_nothing_created(
    shell: Shell, tmp_path: Path, arguments: tuple[str, str], said: str
) -> None:
    await (await LocalStore.open_folder(tmp_path / "store")).close()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "note").write_bytes(DOCUMENTS["top"])
    before = sorted(tmp_path.rglob("*"))
    status, output, errors = await shell.run_async("copy", *arguments)
    assert (status, output) == (1, "")
    assert errors.startswith(f"pysync: {said}")
    assert sorted(tmp_path.rglob("*")) == before


async def test_unreadable_objects_are_listed_at_the_end_and_make_the_status_1(
    shell: Shell, tmp_path: Path
) -> None:
    folder = tmp_path / "from"
    folder.mkdir()
    for name in "acd":
        (folder / name).write_bytes(DOCUMENTS["top"])
    (folder / "b.__meta__").mkdir()
    (folder / "b").write_bytes(b"")
    (folder / "e").write_bytes(b"no document")
    status, output, errors = await shell.run_async("copy", "folder:from", "file:to")
    assert status == 1
    assert json.loads(output) == {
        **NONE,
        "copied": 3,
        "bytes": 3 * len(DOCUMENTS["top"]),
        "corrupt": 1,
        "unreadable": 1,
    }
    *said, heading, first, second = errors.splitlines()
    assert heading == "pysync: 2 objects are damaged or unreadable:"
    assert sorted(said) == sorted([first, second])
    assert sorted(said) == [
        "pysync: b: unreadable: [Errno 21] Is a directory: 'from/b.__meta__'",
        f"pysync: e: corrupt: {UNREAD}",
    ]


async def test_a_lost_file_does_not_keep_others_from_being_copied(shell: Shell, tmp_path: Path) -> None:
    source = await LocalStore.open_folder(tmp_path / "from")
    await fill(source)
    await source.close()
    (tmp_path / "from/files/files/b/c").unlink()
    for flags, counted in (((), "copied"), ((), "alreadyThere"), (("--keep-corrupt",), "alreadyThere")):
        status, output, errors = await shell.run_async("copy", "file:from", "file:to", *flags)
        assert status == 1
        counts = json.loads(output)
        target = await LocalStore.open_folder(tmp_path / "to")
        assert counts[counted] == len(await contents(target))
        await target.close()
        assert counts["unreadable"] == 1
        assert errors.splitlines()[-1].startswith("pysync: files/b/c: unreadable: the file is lost")


async def test_a_store_that_fails_is_status_5_and_says_how_to_go_on(shell: Shell, tmp_path: Path) -> None:
    source = await LocalStore.open_folder(tmp_path / "from")
    for n in range(400):
        await source.put(f"notes/{n}", document(b'{"text":"%b"}' % (b"x" * 10_000)))
    await source.close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, before[1]))
    try:
        status, output, errors = await shell.run_async("copy", "file:from", "file:to")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert status == 5
    assert re.fullmatch("pysync: writing .+: .+; run the copy again to continue", errors.splitlines()[-1])
    target = await LocalStore.open_folder(tmp_path / "to")
    assert json.loads(output)["copied"] == len(await contents(target)) >= 1
    await target.close()


@pytest.mark.process
async def test_a_run_that_is_killed_is_finished_by_the_next(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "from"
    folder.mkdir()
    for n in range(50):
        (folder / f"{n}").write_bytes(document(b'{"n":%d}' % n))
    os.mkfifo(folder / "pipe")  # where the first run stops until it is killed
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", "copy", f"folder:{folder}", f"file:{tmp_path}/to"
    )
    try:
        target = await LocalStore.open_folder(tmp_path / "to")
        while len(await contents(target)) < 50:
            assert process.returncode is None
            await asyncio.sleep(0)
    finally:
        process.kill()
        await process.wait()
    (folder / "pipe").unlink()
    (folder / "pipe").write_bytes(document(b'{"n":50}'))
    status, output, errors = await shell.run_async("copy", "folder:from", "file:to")
    assert (status, errors) == (0, "")
    assert json.loads(output) == {
        **NONE,
        "alreadyThere": 50,
        "copied": 1,
        "bytes": len(document(b'{"n":50}')),
    }
    assert len(await contents(target)) == 51
    await target.close()
