"""What backups cost: making, verifying and restoring one, the bytes that a change costs, and what a follower
takes from pushes.

    python -m benches.backup [--quick]

The server and the load generator each have a core; the follower may use both. Prints Markdown.
"""

import argparse
import asyncio
import base64
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benches.compare import LOAD_CORE, SERVER_CORE, machine, spread
from pysync._core import decode_push
from pysync.backup.checking import BackupVerifier
from pysync.backup.following import FollowerSettings, FollowStatus
from pysync.backup.making import BackupMaker
from pysync.backup.repository import Repository
from pysync.backup.restoring import Restorer
from pysync.backup.source import open_image
from pysync.backup.target import FolderTarget
from pysync.clock import wall_clock_ms
from pysync.config import StoreConfig
from pysync.store.local.store import LocalStore

GOAL_RATIO = 1.1
GOAL_LAG_S = 1.0
GOAL_SHARE = 0.05
DOCUMENT_BYTES = 8_192
FILE_BYTES = 2_000_000
SMALL_FILE_BYTES = 5_000
SAMPLE_S = 0.02


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
    source = await open_image(StoreConfig(url=f"file:{folder}"), wall_clock_ms)
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
    snapshot = await repository.newest()
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
    source = await open_image(StoreConfig(url=f"file:{folder}"), wall_clock_ms)
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


class Follower:
    """A follower in a process of its own, and the lag of its newest moment, sampled all the time."""

    def __init__(self, folder: Path, root: Path, every_ms: int) -> None:
        self.lags_s: list[float] = []
        self._moment_s = 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pysync.backup.following"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        settings = FollowerSettings(StoreConfig(url=f"file:{folder}"), f"file:{root}", None, every_ms)
        self._process.stdin.write(settings.encode() + b"\n")
        self._process.stdin.flush()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._read, self._sample)]
        for thread in self._threads:
            thread.start()
        while not self._moment_s:
            time.sleep(0.05)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            status = FollowStatus(*json.loads(line))
            if status.error:
                raise RuntimeError(status.error)
            self._moment_s = status.moment_ms / 1000

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            if self._moment_s:
                self.lags_s.append(time.time() - self._moment_s)

    def cpu_s(self) -> float:
        """The processor time that it has used."""
        return cpu_s(self._process.pid)

    def close(self) -> None:
        self._ended.set()
        self._process.communicate()
        for thread in self._threads:
            thread.join()


class Pushes(NamedTuple):
    per_second: float
    cpu_us: float
    answers: int


def push(folder: Path, seconds: float) -> Pushes:
    """Push documents of 1 KB as fast as the server answers."""
    config = folder.parent / "bench.json"
    collection = {
        "name": "scratch",
        "storagePath": "scratch/{id}",
        "readRoles": ["public"],
        "writeRoles": ["public"],
    }
    members = {"version": 1, "store": f"file:{folder}", "collections": [collection], "scrub": False}
    config.write_text(json.dumps({**members, "configEndpoint": {"auth": "public"}}))
    serve = ["taskset", "-c", str(SERVER_CORE), sys.executable, "-m", "pysync", "serve"]
    with subprocess.Popen(
        [*serve, "--config", str(config), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split(" at ")[1].strip()
        load = ["taskset", "-c", str(LOAD_CORE), sys.executable, "-m", "pysync", "bench", "scratch"]
        options = ["--action", "push", "--seconds", str(seconds), "--count", "1000000", "--json"]
        before = cpu_s(server.pid)
        ran = subprocess.run([*load, *options, "--server", url], capture_output=True, text=True, check=True)
        used = cpu_s(server.pid) - before
        server.terminate()
        server.stdout.read()
    found = json.loads(ran.stdout.splitlines()[-1])
    return Pushes(found["per_second"], used / found["answers"] * 1e6, found["answers"])


def cpu_s(pid: int) -> float:
    """The processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def with_follower(root: Path, rounds: int, seconds: float) -> None:
    alone: list[Pushes] = []
    followed: list[Pushes] = []
    lags_s: list[float] = []
    used_us: list[float] = []
    for n in range(rounds):
        for is_followed in (False, True) if n % 2 else (True, False):
            folder = root / f"pushes-{n}-{is_followed}"
            asyncio.run(fill(folder, 500, 0))
            if not is_followed:
                alone.append(push(folder, seconds))
                continue
            with closing(Follower(folder, root / f"followed-{n}", 500)) as follower:
                start, before_s = len(follower.lags_s), follower.cpu_s()
                followed.append(push(folder, seconds))
                used_us.append((follower.cpu_s() - before_s) * 1e6 / followed[-1].answers)
                lags_s += follower.lags_s[start:]
    rates = [statistics.median(each.per_second for each in runs) for runs in (alone, followed)]
    print("| | pushes/s | server CPU per push |\n|---|---:|---:|")
    for name, runs in (("alone", alone), ("with a follower", followed)):
        rate, cost = [each.per_second for each in runs], [each.cpu_us for each in runs]
        print(f"| {name} | {spread(rate, ',.0f')} | {spread(cost, '.0f')} us |")
    print(f"\nShare of push throughput lost: {1 - rates[1] / rates[0]:.1%} (goal: {GOAL_SHARE:.0%}).")
    print(f"The follower used {spread(used_us, '.0f')} us per push.")
    low, high = percentile(lags_s, 0.5), percentile(lags_s, 0.99)
    print(f"Lag of the recovery point: p50 {low:.2f} s, p99 {high:.2f} s (goal: {GOAL_LAG_S} s).")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("image", "follower"))
    options = parser.parse_args()
    documents, files, rounds = (500, 2, 1) if options.quick else (5_000, 20, 5)
    print(f"{machine()}\n")
    with TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as place:
        root = Path(place)
        if options.only != "follower":
            asyncio.run(images(root, documents, files, rounds))
        if options.only != "image":
            with_follower(root, rounds, 1.0 if options.quick else 3.0)


async def images(root: Path, documents: int, files: int, rounds: int) -> None:
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
