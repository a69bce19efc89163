"""Files merged in a folder: a reader of the store finds everything once, whatever happens meanwhile."""

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contracts.files import chunks_of, read_file
from support.folder_search import files_with
from support.python_process import run_python

from pysync.changelog import Change
from pysync.clock import HybridTimestamp, wall_clock_ms
from pysync.concurrency import QUIET_TICKS
from pysync.errors import StoreUnavailable
from pysync.store import EtagMismatch
from pysync.store.local.store import LocalStore

MERGED = b"1\n2\n3\n4\n5\n"
EVERYTHING = Counter("1234567")

# Each event is a step: the kill comes right before the file or folder is opened, renamed or removed. To flush
# a folder is to open it, so every commit lies between two steps.
DIES_AT_STEP = """
import asyncio, os, signal, sys
from pysync.store.local import LocalStore
from contracts.files import chunks_of

steps = 0
dies_at = 0

def step(event, args):
    global steps
    if dies_at and event in ("open", "os.rename", "os.remove", "os.rmdir"):
        steps += 1
        if steps == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

async def main(folder, step):
    global dies_at
    store = await LocalStore.open_folder(folder)
    merged = {f"e/{n}": (await store.stat(f"e/{n}")).sha256 for n in range(1, 6)}
    dies_at = step
    await store.merge("e/4-", chunks_of(b"1\\n2\\n3\\n4\\n5\\n"), "text/plain", merged)
    await store.close()

sys.addaudithook(step)
for line in sys.stdin:
    at, folder = line.rstrip("\\n").split(" ", 1)
    if not (child := os.fork()):
        asyncio.run(main(folder, int(at)))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A store with five files to merge, and two that stay."""
    store = await LocalStore.open_folder(tmp_path / "data")
    for n in range(1, 8):
        await store.write(f"e/{n}", chunks_of(b"%d\n" % n), "text/plain")
    await store.close()
    return tmp_path / "data"


class CountedClock:
    """A clock that counts how often it is read. A store dates a write when it queues it for its thread."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self) -> int:
        self.reads += 1
        return wall_clock_ms()


@pytest.fixture
def dates() -> CountedClock:
    """The clock of `store`."""
    return CountedClock()


@pytest.fixture
async def store(folder: Path, dates: CountedClock) -> AsyncIterator[LocalStore]:
    store = await LocalStore.open_folder(folder, dates)
    yield store
    await store.close()


def lines_on_disk(folder: Path) -> Counter[str]:
    """What a program finds that reads the files of the folder."""
    texts = [path.read_text() for path in (folder / "files").glob("e/*") if path.is_file()]
    return Counter(line for text in texts for line in text.splitlines())


async def lines_in(store: LocalStore) -> Counter[str]:
    """What a reader of the store finds, who lists again if a file is gone when it is opened."""
    while True:
        await asyncio.sleep(0)  # the store waits for nothing, and writes go on
        files = [await store.open(f"e/{name}") for name in await store.list("e", None, 1000)]
        texts = [b"".join([chunk async for chunk in file.chunks]).decode() for file in files if file]
        if None not in files:
            return Counter(line for text in texts for line in text.splitlines())


async def sha256s(store: LocalStore, *names: str) -> dict[str, str]:
    found = {f"e/{name}": await store.stat(f"e/{name}") for name in names}
    return {key: stat.sha256 for key, stat in found.items() if stat is not None}


async def write(store: LocalStore, *names: str) -> None:
    for name in names:
        await store.write(f"e/{name}", chunks_of(f"{name}\n".encode()), "text/plain")


@pytest.fixture(scope="module")
def forking() -> Iterator["subprocess.Popen[str]"]:
    """What merges, and dies meanwhile: processes of one that has imported what they need."""
    with run_python(DIES_AT_STEP) as process:
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


def kill_after_commit(folder: Path, merge_until: Callable[[int], bool]) -> None:
    """Have a merge killed when its rows are written, before a file is renamed or removed."""
    with contextlib.closing(sqlite3.connect(folder / "pysync.db")) as database:
        step = 0
        while not database.execute("SELECT 1 FROM object WHERE name = '4-'").fetchall():
            step += 1
            assert merge_until(step)
    assert sorted(os.listdir(folder / "files/e")) == [*"1234567"]


@pytest.mark.process
@pytest.mark.timeout(120)
async def test_a_kill_at_any_step_leaves_everything_once(
    folder: Path, merge_until: Callable[[int], bool]
) -> None:
    outcomes = set()
    step, died = 0, True
    while died:
        step += 1
        other = await LocalStore.open_folder(folder)
        assert await lines_in(other) == EVERYTHING
        died = merge_until(step)
        assert lines_on_disk(folder).keys() == EVERYTHING.keys(), f"at step {step}"
        outcomes.add("".join(sorted(os.listdir(folder / "files/e"))))
        if step % 2:
            assert await lines_in(other) == EVERYTHING, f"at step {step}, by who had the store open"
        store = await LocalStore.open_folder(folder)
        assert lines_on_disk(folder) == EVERYTHING, f"at step {step}, opened"
        assert await lines_in(other) == await lines_in(store) == EVERYTHING, f"at step {step}"
        names = await store.list("e", None, 100)
        assert names == sorted(os.listdir(folder / "files/e"))
        assert names in ([*"1234567"], ["4-", "6", "7"])
        await store.purge_deleted()
        assert os.listdir(folder / "files/~incoming") == []
        if "4-" in names and died:
            # As it was before, for the next step.
            await write(store, *"12345")
            await store.delete("e/4-")
        await store.close()
        await other.close()
    assert {"1234567", "12344-567", "44-567", "4-67"} <= outcomes


@pytest.mark.process
async def test_write_between_a_kill_and_the_end_of_its_merge_stays(
    store: LocalStore, folder: Path, merge_until: Callable[[int], bool]
) -> None:
    kill_after_commit(folder, merge_until)
    await store.write("e/1", chunks_of(b"new\n"), "text/plain")
    await store.recover_merges()
    assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING + Counter(["new"])


@pytest.mark.process
async def test_the_next_compaction_removes_what_a_killed_one_left(
    store: LocalStore, folder: Path, merge_until: Callable[[int], bool]
) -> None:
    kill_after_commit(folder, merge_until)
    await store.recover_merges()
    assert lines_on_disk(folder) == EVERYTHING
    assert sorted(os.listdir(folder / "files/e")) == ["4-", "6", "7"]


@pytest.mark.slow
async def test_readers_during_a_merge_find_each_file_once(store: LocalStore, folder: Path) -> None:
    other = await LocalStore.open_folder(folder)
    wanted = dict(EVERYTHING)
    written = set(EVERYTHING)
    done = asyncio.Event()
    reads = 0

    async def read_all(through: LocalStore) -> None:
        nonlocal reads
        while not done.is_set():
            before = set(written)
            found = await lines_in(through)
            assert set(found.values()) == {1}
            assert before <= found.keys()
            reads += 1

    async def write_some(through: LocalStore, start: int) -> None:
        for n in range(start, start + 30):
            await write(through, str(n))
            written.add(str(n))
            wanted[str(n)] = 1

    async def merge() -> None:
        for round_ in range(6):
            names = [name for name in await store.list("e", None, 1000) if not name.startswith("9")][:20]
            texts = {name: (await read_file(store, f"e/{name}"))[1] for name in names}
            merged = await sha256s(store, *names)
            body = b"".join(texts.values())
            await store.merge(f"e/{max(names)}-{round_:02}", chunks_of(body), "text/plain", merged)

    looking = asyncio.gather(read_all(store), read_all(other))
    try:
        await asyncio.gather(write_some(store, 100), write_some(other, 300), write_some(store, 900), merge())
    finally:
        done.set()
        await looking
    assert reads > 3
    assert lines_on_disk(folder) == Counter(wanted)
    assert await lines_in(store) == Counter(wanted)
    assert await lines_in(other) == Counter(wanted)
    await other.close()


async def test_writes_and_deletes_during_a_merge_have_the_result_of_those_without(
    store: LocalStore, folder: Path
) -> None:
    merged = await sha256s(store, *"12345")
    await asyncio.gather(
        store.write("e/8", chunks_of(b"8\n"), "text/plain"),
        store.write("e/6", chunks_of(b"six\n"), "text/plain"),
        store.delete("e/7"),
        store.merge("e/4-", chunks_of(MERGED), "text/plain", merged),
    )
    expected = Counter(["1", "2", "3", "4", "5", "six", "8"])
    assert await lines_in(store) == lines_on_disk(folder) == expected


Submit = Callable[[Awaitable[Any]], Awaitable["asyncio.Future[Any]"]]
Together = Callable[[], contextlib.AbstractAsyncContextManager[Submit]]


@pytest.fixture
def one_commit(store: LocalStore, dates: CountedClock) -> Together:
    """Returns a context that yields a function, which begins a write. Those begun in the context are
    committed together at its end, in their order: the commit of another write is held up until then."""

    async def submit(write: Awaitable[Any]) -> "asyncio.Future[Any]":
        reads = dates.reads
        writing = asyncio.ensure_future(write)
        while dates.reads == reads:
            await asyncio.sleep(0)
        for _ in range(2 * QUIET_TICKS):
            await asyncio.sleep(0)
        return writing

    @contextlib.asynccontextmanager
    async def together() -> AsyncIterator[Submit]:
        begun, end = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def hold(tick: HybridTimestamp) -> str:
            loop.call_soon_threadsafe(begun.set)
            end.wait()
            return "held/1"

        def announced(tick: HybridTimestamp, sha256: str) -> list[Change]:
            return []

        holding = asyncio.ensure_future(store.write_ordered(hold, chunks_of(b""), "text/plain", announced))
        await begun.wait()
        try:
            yield submit
        finally:
            end.set()
        await holding

    return together


async def delete_in_the_commit_of_a_merge(store: LocalStore, one_commit: Together, key: str) -> None:
    """Merge five files, and delete another in the same transaction. Nobody waits for the deletion to end."""
    merged = await sha256s(store, *"12345")
    async with one_commit() as submit:
        deleting = await submit(store.delete(key))
        merging = await submit(store.merge("e/4-", chunks_of(MERGED), "text/plain", merged))
        deleting.cancel()
    await merging


async def test_a_file_deleted_in_the_commit_of_a_merge_leaves_the_folder(
    store: LocalStore, folder: Path, one_commit: Together
) -> None:
    await delete_in_the_commit_of_a_merge(store, one_commit, "e/7")
    await store.close()
    reopened = await LocalStore.open_folder(folder)
    assert await lines_in(reopened) == lines_on_disk(folder) == Counter("123456")
    await reopened.close()


async def test_an_erasure_leaves_nothing_of_a_file_deleted_in_the_commit_of_a_merge(
    store: LocalStore, folder: Path, one_commit: Together
) -> None:
    await store.write("e/7", chunks_of(b"5ecret"), "text/plain")
    await delete_in_the_commit_of_a_merge(store, one_commit, "e/7")
    await store.purge_deleted()
    assert files_with(folder, "5ecret") == set()


async def test_a_file_written_behind_its_merge_in_one_commit_stays(
    store: LocalStore, folder: Path, one_commit: Together
) -> None:
    merged = await sha256s(store, *"12345")
    async with one_commit() as submit:
        merging = await submit(store.merge("e/4-", chunks_of(MERGED), "text/plain", merged))
        writing = await submit(store.write("e/1", chunks_of(b"new\n"), "text/plain"))
    await asyncio.gather(merging, writing)
    assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING + Counter(["new"])


async def test_a_merged_file_stays_where_another_is_deleted_in_its_commit(
    store: LocalStore, folder: Path, one_commit: Together
) -> None:
    merged = await sha256s(store, *"12345")
    await store.write("e/4-", chunks_of(b"old\n"), "text/plain")
    async with one_commit() as submit:
        deleting = await submit(store.delete("e/4-"))
        merging = await submit(store.merge("e/4-", chunks_of(MERGED), "text/plain", merged))
    await asyncio.gather(deleting, merging)
    assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING


async def test_a_merged_file_that_is_deleted_in_its_commit_is_gone(
    store: LocalStore, folder: Path, one_commit: Together
) -> None:
    merged = await sha256s(store, *"12345")
    async with one_commit() as submit:
        merging = await submit(store.merge("e/4-", chunks_of(MERGED), "text/plain", merged))
        deleting = await submit(store.delete("e/4-"))
    await asyncio.gather(deleting, merging)
    assert await lines_in(store) == lines_on_disk(folder) == Counter("67")
    assert os.listdir(folder / "files/~incoming") == []


@pytest.mark.parametrize("body", [b"1\n", b"one\n"])
async def test_a_file_written_before_its_merge_in_one_commit_is_not_merged(
    store: LocalStore, folder: Path, one_commit: Together, body: bytes
) -> None:
    merged = await sha256s(store, *"12345")
    async with one_commit() as submit:
        writing = await submit(store.write("e/1", chunks_of(body), "text/plain"))
        merging = await submit(store.merge("e/4-", chunks_of(MERGED), "text/plain", merged))
    await writing
    with pytest.raises(EtagMismatch):
        await merging
    expected = EVERYTHING - Counter("1") + Counter([body.decode().strip()])
    assert await lines_in(store) == lines_on_disk(folder) == expected
    assert os.listdir(folder / "files/~incoming") == []


async def test_of_two_merges_of_one_file_one_is_made(store: LocalStore, folder: Path) -> None:
    other = await LocalStore.open_folder(folder)
    merged = await sha256s(store, *"12345")
    done = await asyncio.gather(
        store.merge("e/4-", chunks_of(MERGED), "text/plain", merged),
        other.merge("e/4+", chunks_of(MERGED), "text/plain", merged),
        return_exceptions=True,
    )
    assert [type(each) for each in done].count(EtagMismatch) == 1
    assert await lines_in(store) == await lines_in(other) == lines_on_disk(folder) == EVERYTHING
    await other.close()


async def test_a_reader_keeps_the_file_that_it_has_open(store: LocalStore) -> None:
    file = await store.open("e/1")
    assert file is not None
    await store.merge("e/4-", chunks_of(MERGED), "text/plain", await sha256s(store, *"12345"))
    assert b"".join([chunk async for chunk in file.chunks]) == b"1\n"
    assert await store.open("e/1") is None


async def test_a_folder_with_folders_in_it_is_merged(store: LocalStore, folder: Path) -> None:
    (folder / "files/e/by hand").mkdir()
    await store.write("e/deep/1", chunks_of(b"deep"), "text/plain")
    await store.merge("e/1-", chunks_of(b"1\n2\n"), "text/plain", await sha256s(store, "1", "2"))
    assert await store.list("e", None, 100) == ["1-", *"34567"]
    assert lines_on_disk(folder) == EVERYTHING
    assert (await read_file(store, "e/deep/1"))[1] == b"deep"
    assert (folder / "files/e/by hand").is_dir()


async def test_a_merge_that_is_cancelled_is_made_or_not(store: LocalStore, folder: Path) -> None:
    rng = random.Random(3)
    for _ in range(30):
        merged = await sha256s(store, *"12345")
        merging = asyncio.ensure_future(store.merge("e/4-", chunks_of(MERGED), "text/plain", merged))
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        merging.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await merging
        await store.recover_merges()
        assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING
        if "4-" in await store.list("e", None, 100):
            await write(store, *"12345")
            await store.delete("e/4-")


async def test_a_database_that_fails_in_the_midst_leaves_the_folder_as_it_was(
    store: LocalStore, folder: Path
) -> None:
    merged = await sha256s(store, *"12345")
    with contextlib.closing(sqlite3.connect(folder / "pysync.db", isolation_level=None)) as database:
        database.execute(
            "CREATE TRIGGER fails BEFORE DELETE ON object BEGIN SELECT RAISE(ROLLBACK, 'no'); END"
        )
        with pytest.raises((StoreUnavailable, sqlite3.Error)):
            await store.merge("e/4-", chunks_of(MERGED), "text/plain", merged)
        database.execute("DROP TRIGGER fails")
    assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING
    await store.merge("e/4-", chunks_of(MERGED), "text/plain", merged)
    assert await lines_in(store) == lines_on_disk(folder) == EVERYTHING
