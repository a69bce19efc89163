"""What backups cost: making, verifying and restoring one, the bytes that a change costs, and those that a
`prune` leaves. What a follower takes from pushes is in `benches/follower.py`.

    python -m benches.backup [--quick]

Prints Markdown.
"""

import argparse
import asyncio
import base64
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benches.compare import machine, spread
from pysync._core import decode_push
from pysync.backup.make import BackupMaker
from pysync.backup.prune import KeepRules, Pruner
from pysync.backup.restore import Restorer
from pysync.backup.snapshot import PACKS, Repository
from pysync.backup.source import ListedSnapshotSource, open_snapshot_source
from pysync.backup.target import FolderTarget
from pysync.backup.verify import BackupVerifier
from pysync.clock import wall_clock_ms
from pysync.config import StoreConfig
from pysync.store.local.store import LocalStore
from pysync.store.memory import MemoryStore

GOAL_RATIO = 1.1
GOAL_SCATTERED = 5
DOCUMENT_BYTES = 8_192
FILE_BYTES = 2_000_000
SMALL_FILE_BYTES = 5_000
AGED_DOCUMENTS = 2_000
AGED_BYTES = 4_096
DAY_MS = 86_400_000


def fail(key: str, why: str) -> None:
    raise RuntimeError(f"{key}: {why}")


def document(size: int) -> bytes:
    """A stored document of about this size, which compresses to three quarters."""
    text = base64.b64encode(os.urandom(size * 3 // 4))
    return decode_push(b'{"data":{"text":"%b"}}' % text).stored(wall_clock_ms())


async def fill(folder: Path, documents: int, files: int) -> None:
    store = await LocalStore.open_folder(folder)
    for start in range(0, documents, 500):
        await asyncio.gather(
            *(store.put(f"notes/{n:06}", document(DOCUMENT_BYTES)) for n in range(start, start + 500))
        )
    for n in range(files):
        await store.write(f"files/{n:04}", once(os.urandom(FILE_BYTES)), "image/png")
    await store.close()


async def once(body: bytes) -> Any:
    yield body


class Took(NamedTuple):
    """Seconds of the wall clock and of the processor, and the bytes that were read or written."""

    wall_s: float
    cpu_s: float
    bytes: int

    @property
    def rate(self) -> float:
        return self.bytes / self.wall_s / 1e6


class Stopwatch:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def took(self, size: int) -> Took:
        return Took(time.perf_counter() - self._wall, time.process_time() - self._cpu, size)


async def make(folder: Path, target: FolderTarget) -> tuple[Took, int]:
    """Make a backup: what it took, and the bytes that it wrote."""
    watch = Stopwatch()
    source = await open_snapshot_source(StoreConfig(url=f"file:{folder}"), wall_clock_ms)
    maker = BackupMaker(source, await Repository.open(target, create=True), wall_clock_ms, fail)
    await maker.make()
    await maker.close()
    await source.close()
    return watch.took(maker.report.bytes_read), maker.report.bytes_written


async def verify(target: FolderTarget) -> Took:
    watch = Stopwatch()
    verifier = BackupVerifier(await Repository.open(target), fail)
    await verifier.run()
    return watch.took(verifier.report.bytes)


async def restore(target: FolderTarget, folder: Path) -> Took:
    watch = Stopwatch()
    repository = await Repository.open(target)
    snapshot = await repository.newest("", fail)
    assert snapshot is not None
    store = await LocalStore.open_folder(folder)
    restorer = Restorer(repository, store, fail)
    await restorer.restore(snapshot)
    await store.close()
    return watch.took(restorer.report.bytes)


def copy(folder: Path, to: Path, size: int) -> Took:
    """`cp -a`, and until it is on disk."""
    watch = Stopwatch()
    subprocess.run(["cp", "-a", folder, to], check=True)
    subprocess.run(["sync", "-f", to], check=True)
    return watch.took(size)


async def changed_bytes(folder: Path, root: Path, rounds: int, objects: int) -> float:
    """Bytes written per changed byte, of a follower, with files that no compression makes smaller."""
    store = await LocalStore.open_folder(folder)
    source = await open_snapshot_source(StoreConfig(url=f"file:{folder}"), wall_clock_ms)
    repository = await Repository.open(FolderTarget(root), create=True)
    maker = BackupMaker(source, repository, wall_clock_ms, fail)
    await maker.make()
    before = repository.bytes_written
    for _ in range(rounds):
        for _ in range(objects):
            key = f"small/{int.from_bytes(os.urandom(2)) % 20_000:05}"
            await store.write(key, once(os.urandom(SMALL_FILE_BYTES)), "image/png")
        await maker.make(only_changes=True)
    await maker.close()
    await source.close()
    await store.close()
    return (repository.bytes_written - before) / (rounds * objects * SMALL_FILE_BYTES)


async def scattered_bytes(root: Path, documents: int, changes: int) -> float:
    """Bytes written per changed byte if documents change one by one, each in a snapshot of its own."""
    folder, chance = root / "scattered", random.Random(1)
    store = await LocalStore.open_folder(folder)
    for start in range(0, documents, 500):
        await asyncio.gather(
            *(store.put(f"notes/{n:06}", document(AGED_BYTES)) for n in range(start, start + 500))
        )
    source = await open_snapshot_source(StoreConfig(url=f"file:{folder}"), wall_clock_ms)
    repository = await Repository.open(FolderTarget(root / "scattered-backup"), create=True)
    maker = BackupMaker(source, repository, wall_clock_ms, fail)
    await maker.make()
    before, changed = repository.bytes_written, 0
    for n in chance.sample(range(documents), changes):
        body = document(AGED_BYTES)
        changed += len(body)
        await store.put(f"notes/{n:06}", body)
        await maker.make(only_changes=True)
    await maker.close()
    await source.close()
    await store.close()
    return (repository.bytes_written - before) / changed


class Aged(NamedTuple):
    """The bytes in the packs of a backup, and in those parts of them that its snapshots refer to, both before
    compression, and the bytes that were written to it."""

    packed: int
    live: int
    written: int


async def aged(root: Path, share: float, days: int) -> Aged:
    """What a backup has after some days with a backup and a `prune` on each, before each of which this share
    of the documents is replaced."""
    store, target, now_ms = MemoryStore(), FolderTarget(root), wall_clock_ms()
    chance, written = random.Random(1), 0
    keys = [f"notes/{n:06}" for n in range(AGED_DOCUMENTS)]
    for day in range(days):
        for key in chance.sample(keys, round(len(keys) * share)) if day else keys:
            await store.put(key, document(AGED_BYTES))
        now_ms += DAY_MS
        repository = await Repository.open(target, create=True)
        maker = BackupMaker(ListedSnapshotSource(store), repository, lambda: now_ms, fail)  # noqa: B023
        await maker.make()
        await maker.close()
        written += repository.bytes_written
        repository = await Repository.open(target)
        await Pruner(repository, KeepRules(daily=7), lambda: now_ms, print).run()  # noqa: B023
        written += repository.bytes_written
    sizes = [int(name.split("-")[2]) for name in await target.list_files(PACKS)]
    snapshots = await repository.snapshots(fail)
    parts = {part for one in snapshots async for entry in repository.entries(one) for part in entry.parts}
    return Aged(sum(sizes), sum(part.length for part in parts), written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    documents, files, rounds = (500, 2, 1) if options.quick else (5_000, 20, 5)
    print(f"{machine()}\n")
    with TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as place:
        asyncio.run(snapshots(Path(place), documents, files, rounds))
        days = 5 if options.quick else 30
        stored, changes = (500, 10) if options.quick else (100_000, 1_000)
        ratio = asyncio.run(scattered_bytes(Path(place), stored, changes))
        print(
            f"{changes:,} of {stored:,} documents of {AGED_BYTES} bytes change, each in its own snapshot:",
            end=" ",
        )
        print(f"{ratio:.2f} bytes written per changed byte (goal: {GOAL_SCATTERED}).\n")
        print(f"{AGED_DOCUMENTS} documents of {AGED_BYTES} bytes, {days} days, `--keep-daily 7`.\n")
        print("| replaced a day | MB in packs | MB live | dead | MB written |\n|---|---:|---:|---:|---:|")
        for percent in (1, 5):
            one = asyncio.run(aged(Path(place) / f"aged-{percent}", percent / 100, days))
            cells = [f"{one.packed / 1e6:.1f}", f"{one.live / 1e6:.1f}", f"{1 - one.live / one.packed:.1%}"]
            print(f"| {percent} % | {' | '.join(cells)} | {one.written / 1e6:.1f} |")


async def snapshots(root: Path, documents: int, files: int, rounds: int) -> None:
    folder = root / "data"
    await fill(folder, documents, files)
    took: dict[str, list[Took]] = {}
    for n in range(rounds):
        target = FolderTarget(root / "backup")
        first, written = await make(folder, target)
        again, _ = await make(folder, target)
        size = first.bytes
        took.setdefault("first backup", []).append(first)
        took.setdefault("the next one, nothing changed", []).append(again)
        took.setdefault("backup verify", []).append(await verify(target))
        took.setdefault("backup restore", []).append(await restore(target, root / f"new-{n}"))
        took.setdefault("cp -a, sync", []).append(copy(folder, root / "copy", size))
        for each in ("backup", f"new-{n}", "copy"):
            shutil.rmtree(root / each)
    print(f"{size / 1e6:.0f} MB: {documents} documents of {DOCUMENT_BYTES} bytes, {files} files.")
    print(f"The backup has {written / 1e6:.0f} MB.\n")
    print("| | s | CPU s | MB/s |\n|---|---:|---:|---:|")
    columns: tuple[tuple[Callable[[Took], float], str], ...] = (
        (lambda one: one.wall_s, ".2f"),
        (lambda one: one.cpu_s, ".2f"),
        (lambda one: one.rate, ",.0f"),
    )
    for name, runs in took.items():
        cells = [spread([column(one) for one in runs], form) for column, form in columns]
        print(f"| {name} | {' | '.join(cells)} |")
    ratio = await changed_bytes(folder, root / "ratio", 10 * rounds, 20)
    print(f"\nBytes written per changed byte: {ratio:.3f} (goal: {GOAL_RATIO}).\n")


if __name__ == "__main__":
    main()
