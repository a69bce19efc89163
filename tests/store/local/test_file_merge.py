"""Files merged in a folder: whoever looks at it finds everything once, whatever happens meanwhile."""

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from support.folder_search import files_with

from pysync.errors import StoreUnavailable
from pysync.store import MergeRejected
from pysync.store.local import file_merge
from pysync.store.local.file_merge import swap_folders
from pysync.store.local.store import LocalStore
from pysync.testing import chunks_of, read_file

SOURCES = 5
MERGED = b"1\n2\n3\n4\n5\n"

DIES_AT_STEP = """
import asyncio, os, signal, sys
from pysync.store.local import file_merge
from pysync.store.local import LocalStore
from pysync.testing import chunks_of

steps = 0

def stepping(work, dies_at):
    def step(*args, **kwargs):
        global steps
        steps += 1
        if steps == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*args, **kwargs)
    return step

async def main(folder, dies_at):
    store = await LocalStore.open_folder(folder)
    merged = {f"e/{n}": (await store.stat(f"e/{n}")).sha256 for n in range(1, 6)}
    for name in ("_begin", "_check_folder", "_build", "_move_in", "_link", "_finish", "swap_folders",
                 "fsync_dir", "_write_rows", "_delete_plan", "_recover_merge", "_sweep"):
        setattr(file_merge, name, stepping(getattr(file_merge, name), dies_at))
    await store.merge("e/4-", chunks_of(b"1\\n2\\n3\\n4\\n5\\n"), "text/plain", merged)
    await store.close()

for line in sys.stdin:
    dies_at, folder = line.rstrip("\\n").split(" ", 1)
    if not (child := os.fork()):
        asyncio.run(main(folder, int(dies_at)))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_merge, "GRACE_S", 0.01)


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A store with five files to merge, and two that stay."""
    store = await LocalStore.open_folder(tmp_path / "data")
    for n in range(1, 8):
        await store.write(f"e/{n}", chunks_of(b"%d\n" % n), "text/plain")
    await store.close()
    return tmp_path / "data"


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(folder)
    yield store
    await store.close()


def lines_on_disk(folder: Path) -> Counter[str]:
    """What whoever looks at the folder finds: names first, then the files. Who finds one gone lists again."""
    while True:
        try:
            texts = [path.read_text() for path in sorted((folder / "files").glob("e/*"))]
        except FileNotFoundError:
            continue
        return Counter(line for text in texts for line in text.splitlines())


async def lines_in(store: LocalStore) -> Counter[str]:
    """What the rows of a store name."""
    texts = [(await read_file(store, f"e/{name}"))[1].decode() for name in await store.list("e", None, 1000)]
    return Counter(line for text in texts for line in text.splitlines())


def left_over(folder: Path) -> set[str]:
    return {path.name for path in (folder / "merging").iterdir()} - {"lock"}


async def sha256s(store: LocalStore, *names: str) -> dict[str, str]:
    found = {f"e/{name}": await store.stat(f"e/{name}") for name in names}
    return {key: stat.sha256 for key, stat in found.items() if stat is not None}


@pytest.fixture(scope="module")
def forking() -> Iterator["subprocess.Popen[str]"]:
    """What merges, and dies meanwhile: processes of one that has imported what they need."""
    command = [sys.executable, "-c", DIES_AT_STEP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.fixture
def merge_until(forking: "subprocess.Popen[str]", folder: Path) -> Callable[[int], bool]:
    """Merges up to a step, and is killed there; False: it came to its end."""

    def merge(step: int) -> bool:
        assert forking.stdin is not None
        assert forking.stdout is not None
        print(step, folder, file=forking.stdin, flush=True)
        status = int(forking.stdout.readline())
        assert status in (0, -signal.SIGKILL)
        return status != 0

    return merge


def kill_between_folders_and_rows(folder: Path, merge_until: Callable[[int], bool]) -> None:
    """Have a merge killed when the folders have changed places, right before its rows are written."""
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:
        step = 0
        while not database.execute("SELECT 1 FROM merge").fetchall() or (folder / "files/e/1").exists():
            step += 1
            assert merge_until(step)


EVERYTHING = Counter("1234567")


@pytest.mark.process
@pytest.mark.timeout(120)
async def test_a_kill_at_any_step_leaves_everything_once(
    folder: Path, merge_until: Callable[[int], bool]
) -> None:
    step, died = 0, True
    while died:
        step += 1
        died = merge_until(step)
        assert lines_on_disk(folder) == EVERYTHING, f"at step {step}"
        store = await LocalStore.open_folder(folder)
        assert lines_on_disk(folder) == EVERYTHING, f"at step {step}, opened"
        assert await lines_in(store) == EVERYTHING, f"at step {step}, by rows"
        names = await store.list("e", None, 100)
        assert sorted(names) == sorted(path.name for path in (folder / "files/e").iterdir())
        assert names in ([*"1234567"], ["4-", "6", "7"])
        if "4-" in names and died:
            # As it was before, for the next step.
            for n in "12345":
                await store.write(f"e/{n}", chunks_of(n.encode() + b"\n"), "text/plain")
            await store.delete("e/4-")
        await store.close()
        await (await LocalStore.open_folder(folder)).close()
        assert left_over(folder) == set()
    assert step > 12


@pytest.mark.slow
async def test_who_has_the_store_open_meets_no_missing_file_after_a_kill(
    folder: Path, merge_until: Callable[[int], bool]
) -> None:
    for step in range(9, 30):
        store = await LocalStore.open_folder(folder)
        assert await lines_in(store) == EVERYTHING
        if not merge_until(step):
            await store.close()
            break
        for name in "1234567":
            file = await store.open(f"e/{name}")
            if file is not None:
                assert b"".join([chunk async for chunk in file.chunks]) == name.encode() + b"\n"
        assert await lines_in(store) == EVERYTHING
        if "4-" in await store.list("e", None, 100):
            for n in "12345":
                await store.write(f"e/{n}", chunks_of(n.encode() + b"\n"), "text/plain")
            await store.delete("e/4-")
        await store.close()
    else:
        pytest.fail("no merge came to its end")


@pytest.mark.slow
async def test_readers_during_a_merge_find_each_file_once(store: LocalStore, folder: Path) -> None:
    other = await LocalStore.open_folder(folder)
    wanted = dict(EVERYTHING)
    written = set(EVERYTHING)
    done = asyncio.Event()
    looks = 0

    async def look() -> None:
        nonlocal looks
        while not done.is_set():
            before = set(written)
            found = await asyncio.to_thread(lines_on_disk, folder)
            assert set(found.values()) == {1}
            assert before <= found.keys()
            looks += 1

    async def write(through: LocalStore, start: int) -> None:
        for n in range(start, start + 60):
            await through.write(f"e/{n}", chunks_of(b"%d\n" % n), "text/plain")
            written.add(str(n))
            wanted[str(n)] = 1

    async def merge() -> None:
        for turn in range(12):
            names = [name for name in await store.list("e", None, 1000) if not name.startswith("9")][:20]
            texts = {name: (await read_file(store, f"e/{name}"))[1] for name in names}
            merged = await sha256s(store, *names)
            body = b"".join(texts.values())
            await store.merge(f"e/{max(names)}-{turn:02}", chunks_of(body), "text/plain", merged)

    looking = asyncio.ensure_future(look())
    try:
        await asyncio.gather(write(store, 100), write(other, 300), write(store, 900), merge())
    finally:
        done.set()
        await looking
    assert looks > 3
    assert lines_on_disk(folder) == Counter(wanted)
    assert await lines_in(store) == Counter(wanted)
    assert await lines_in(other) == Counter(wanted)
    await other.close()


async def test_what_comes_and_goes_during_a_merge_is_as_it_would_be_without(
    store: LocalStore, folder: Path
) -> None:
    merged = await sha256s(store, *"12345")
    building = asyncio.Event()
    release = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"1\n2\n3\n4\n5\n"
        building.set()
        await release.wait()

    merging = asyncio.ensure_future(store.merge("e/4-", slowly(), "text/plain", merged))
    await building.wait()
    release.set()
    await asyncio.gather(
        store.write("e/8", chunks_of(b"8\n"), "text/plain"),
        store.write("e/6", chunks_of(b"six\n"), "text/plain"),
        store.delete("e/7"),
        merging,
    )
    expected = Counter(["1", "2", "3", "4", "5", "six", "8"])
    assert await lines_in(store) == lines_on_disk(folder) == expected


async def delete_in_the_commit_of_a_merge(store: LocalStore, folder: Path, key: str) -> None:
    """Merge five files, and delete another in the transaction that the merge begins with. Nobody waits for
    the deletion to end."""
    merged = await sha256s(store, *"12345")
    with contextlib.closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # the writes of the store wait, and are committed together then
        first = asyncio.ensure_future(store.put("first", b"{}"))
        await queued(store, 1)
        deleting = asyncio.ensure_future(store.delete(key))
        await queued(store, 2)
        merging = asyncio.ensure_future(store.merge("e/4-", chunks_of(MERGED), "text/plain", merged))
        await queued(store, 3)
        deleting.cancel()
        other.execute("COMMIT")
    await asyncio.gather(first, merging)


async def queued(store: LocalStore, count: int) -> None:
    """Wait until one write is being committed, and with it so many wait."""
    writer = store._writer
    while writer._waiting < count or writer._submitted or writer._committing_since is None:
        await asyncio.sleep(0)


async def test_a_file_deleted_in_the_commit_of_a_merge_leaves_the_folder(
    store: LocalStore, folder: Path
) -> None:
    await delete_in_the_commit_of_a_merge(store, folder, "e/7")
    await store.close()
    reopened = await LocalStore.open_folder(folder)
    assert await lines_in(reopened) == lines_on_disk(folder) == Counter("123456")
    await reopened.close()


async def test_an_erasure_leaves_nothing_of_a_file_deleted_in_the_commit_of_a_merge(
    store: LocalStore, folder: Path
) -> None:
    await store.write("e/7", chunks_of(b"5ecret"), "text/plain")
    await delete_in_the_commit_of_a_merge(store, folder, "e/7")
    await store.purge_deleted()
    assert files_with(folder, "5ecret") == set()


async def test_a_reader_keeps_the_file_that_it_has_open(store: LocalStore) -> None:
    file = await store.open("e/1")
    assert file is not None
    await store.merge("e/4-", chunks_of(b"1\n2\n3\n4\n5\n"), "text/plain", await sha256s(store, *"12345"))
    assert b"".join([chunk async for chunk in file.chunks]) == b"1\n"
    assert await store.open("e/1") is None


async def test_a_folder_with_folders_in_it_is_left_alone(store: LocalStore, folder: Path) -> None:
    merged = await sha256s(store, "1", "2")
    (folder / "files/e/by hand").mkdir()
    with pytest.raises(MergeRejected, match="e holds folders beside the files"):
        await store.merge("e/1-", chunks_of(b"1\n2\n"), "text/plain", merged)
    (folder / "files/e/by hand").rmdir()
    await store.write("e/deep/1", chunks_of(b"deep"), "text/plain")
    with pytest.raises(MergeRejected, match="e holds folders beside the files"):
        await store.merge("e/1-", chunks_of(b"1\n2\n"), "text/plain", merged)
    assert await store.list("e", None, 100) == [*"1234567"]
    assert left_over(folder) == set()
    await store.delete("e/deep/1")
    await store.merge("e/1-", chunks_of(b"1\n2\n"), "text/plain", merged)
    assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING


async def test_one_process_merges_at_a_time(store: LocalStore, folder: Path) -> None:
    other = await LocalStore.open_folder(folder)
    merged = await sha256s(store, "1", "2")
    async with other._merger._exclusive() as is_alone:
        assert is_alone
        with pytest.raises(MergeRejected, match="another process merges files of this store"):
            await store.merge("e/1-", chunks_of(b"1\n2\n"), "text/plain", merged)
        await store.recover_merges()
    await store.merge("e/1-", chunks_of(b"1\n2\n"), "text/plain", merged)
    await other.close()


async def test_a_merge_that_is_cancelled_comes_to_its_end(store: LocalStore, folder: Path) -> None:
    merged = await sha256s(store, "1", "2")
    for _ in range(3):
        merging = asyncio.ensure_future(store.merge("e/1-", chunks_of(b"1\n2\n"), "text/plain", merged))
        while not (folder / "merging").exists() and not merging.done():
            await asyncio.sleep(0)
        merging.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await merging
        assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING


async def test_a_database_that_fails_in_the_midst_leaves_the_folder_as_it_was(
    store: LocalStore, folder: Path
) -> None:
    merged = await sha256s(store, *"12345")
    with contextlib.closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as database:
        database.execute(
            "CREATE TRIGGER fails BEFORE DELETE ON object BEGIN SELECT RAISE(ROLLBACK, 'no'); END"
        )
        with pytest.raises((StoreUnavailable, sqlite3.Error)):
            await store.merge("e/4-", chunks_of(b"1\n2\n3\n4\n5\n"), "text/plain", merged)
        database.execute("DROP TRIGGER fails")
    assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING
    await store.merge("e/4-", chunks_of(b"1\n2\n3\n4\n5\n"), "text/plain", merged)
    assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING


@pytest.mark.process
async def test_what_is_written_between_a_kill_and_the_end_of_its_merge_stays(
    store: LocalStore, folder: Path, merge_until: Callable[[int], bool]
) -> None:
    kill_between_folders_and_rows(folder, merge_until)
    await store.write("e/1", chunks_of(b"new\n"), "text/plain")
    await store.recover_merges()
    assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING + Counter(["new"])


@pytest.mark.process
async def test_writes_are_recorded_only_while_a_merge_is_under_way(
    store: LocalStore, folder: Path, merge_until: Callable[[int], bool]
) -> None:
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:

        def triggers() -> set[str]:
            return {
                name
                for (name,) in database.execute("SELECT name FROM sqlite_master WHERE name GLOB 'came_*'")
            }

        assert triggers() == set()
        kill_between_folders_and_rows(folder, merge_until)
        assert triggers() == {"came_new", "came_changed", "came_gone"}
        await store.recover_merges()
        assert triggers() == set()


async def test_a_server_of_an_earlier_version_cannot_merge(store: LocalStore, folder: Path) -> None:
    """It relies on triggers that are not there any more, so its merge would lose what is written meanwhile. A
    command of this version may have upgraded the database beside it."""
    with (
        contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database,
        pytest.raises(sqlite3.IntegrityError, match="an earlier version"),
    ):
        database.execute("INSERT INTO merge VALUES('1', 'e', '4-', '[]', '{}')")
    assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING


async def test_a_backup_without_the_folders_beside_is_sound(
    folder: Path, merge_until: Callable[[int], bool]
) -> None:
    kill_between_folders_and_rows(folder, merge_until)
    for path in (folder / "merging").iterdir():
        path.rename(folder.parent / path.name)
    store = await LocalStore.open_folder(folder)
    assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING
    await store.close()


def test_folders_that_cannot_change_places_say_so(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    swap_folders(tmp_path / "a", tmp_path / "b")
    assert (os.listdir(tmp_path / "a"), os.listdir(tmp_path / "b")) == (["b"], ["a"])
    with pytest.raises(FileNotFoundError):
        swap_folders(tmp_path / "a", tmp_path / "none")
    with pytest.raises(MergeRejected, match="cannot exchange two folders in one step"):
        swap_folders(tmp_path / "a", Path("/proc/self/fd"))
