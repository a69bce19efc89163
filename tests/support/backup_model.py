"""A model of processes that work on one backup at the same time: makers, pruners and verifiers.

Each operation on the place of the backup is a point at which a seeded scheduler lets another process go on,
kills the process, suspends it for up to three days, or lets the operation fail. All of it runs in one thread,
so a seed always gives the same run (with the same PYTHONHASHSEED).
"""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any, Final, TypeVar

from contracts.files import chunks_of

from pysync._core import split_key
from pysync.backup.format import Snapshot
from pysync.backup.make import BackupMaker
from pysync.backup.prune import DamagedSnapshot, KeepRules, Pruner
from pysync.backup.restore import Restorer
from pysync.backup.snapshot import CLAIMS, LISTS, PACKS, SNAPSHOTS, BackupDamaged, Repository, path_of
from pysync.backup.verify import BackupVerifier
from pysync.errors import StoreUnavailable
from pysync.store import StoredObject
from pysync.store.local.capture import CapturedRow
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock
from support.backups import MemoryTarget
from support.store_samples import document

T = TypeVar("T")
Contents = dict[str, tuple[str, bytes]]

MINUTE_MS: Final = 60_000
HOUR_MS: Final = 60 * MINUTE_MS
DAY_MS: Final = 24 * HOUR_MS
STORE_ID: Final = "5e" * 16
BODIES: Final = 12
"""Few, so that bytes that were removed come back."""
_TURNING_POINTS: Final = (
    "put snapshots",
    "get snapshots",
    "put claims",
    "get claims",
    "delete claims",
    "list",
)
"""Operations before and after which much can go wrong."""
_TICKS: Final = 12
"""Ticks of the event loop in which a process reaches its next operation, or nearly all do."""


class InlineExecutor(ThreadPoolExecutor):
    """Runs what is submitted at once, in the thread of the event loop."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class ModelStore:
    """A store whose contents at each moment of a backup are known."""

    def __init__(self, clock: FakeClock) -> None:
        self.store = MemoryStore(clock)
        self.moments: dict[str, Contents] = {}
        self.is_exclusive = False
        self.sources: list[ModelSource] = []

    async def write(self, random: Random) -> None:
        """Write or delete an object."""
        if self.is_exclusive:
            return
        key = f"{random.choice(('notes', 'notes/deep', 'files'))}/{random.randrange(8)}"
        body = document(b'{"n":"%b"}' % (b"%d" % random.randrange(BODIES) * random.choice((1, 40, 300))))
        if random.random() < 0.3:
            await self.store.delete(key)
        elif key.startswith("files"):
            await self.store.write(key, chunks_of(body), "image/png")
        else:
            await self.store.put(key, body)
        for source in self.sources:
            source.touched.add(key)

    async def rows(self, keys: Sequence[str]) -> list[CapturedRow]:
        """What is stored at these keys at this moment: nothing here waits."""
        rows = []
        for key in keys:
            found = await self.store.get(key)
            if isinstance(found, StoredObject):
                facts = (key, found.etag, found.content_type, found.modified_ms)
                rows.append(CapturedRow(*facts, None, len(found.body), found.body))
            elif (stat := await self.store.stat(key)) is not None:
                facts = (key, stat.etag, stat.content_type, stat.modified_ms)
                rows.append(CapturedRow(*facts, stat.sha256, stat.size, None))
            else:
                rows.append(CapturedRow(key, None, "", 0, None, 0, None))
        return rows

    async def contents(self) -> Contents:
        """Everything at this moment."""
        held = {}
        for row in await self.rows([entry.key async for entry in self.store.walk("")]):
            body = row.body if row.body is not None else await self.bytes_of(row.key)
            assert body is not None
            held[row.key] = row.content_type, body
        return held

    async def bytes_of(self, key: str) -> bytes | None:
        file = await self.store.open(key)
        return None if file is None else b"".join([chunk async for chunk in file.chunks])

    async def new_moment(self) -> str:
        """Note what is stored, and return the name of the moment."""
        name = str(len(self.moments))
        self.moments[name] = await self.contents()
        return name


class ModelSource:
    """Reads a `ModelStore` for a backup, as of one moment. The snapshot says which one as its `change`."""

    def __init__(self, store: ModelStore) -> None:
        self._store = store
        self.touched: set[str] = set()
        self.change = ""
        store.sources.append(self)

    async def follow(self) -> None:
        self.touched = set()

    async def list_pages(self) -> AsyncIterator[list[tuple[str, str]]]:
        entries = [(entry.key, entry.etag) async for entry in self._store.store.walk("")]
        entries.sort(key=lambda pair: split_key(pair[0]))
        for at in range(0, len(entries), 4):
            yield entries[at : at + 4]

    async def load(self, keys: Sequence[str]) -> AsyncGenerator[list[CapturedRow], None]:
        for row in await self._store.rows(keys):
            if row.etag is not None:
                yield [row]

    async def changes(
        self, *, exclusive: bool, also: Sequence[str] = ()
    ) -> AsyncGenerator[list[CapturedRow], None]:
        is_done = False
        touched = self.touched
        self.touched = set()
        self.change = await self._store.new_moment()
        self._store.is_exclusive |= exclusive
        try:
            for row in await self._store.rows(sorted(touched | {*also})):
                yield [row]
            is_done = True
        finally:
            self._store.is_exclusive &= not exclusive
            if not is_done:
                self.touched |= touched

    async def open(self, row: CapturedRow) -> "ModelFile | None":
        body = await self._store.bytes_of(row.key)
        return None if body is None else ModelFile(body)

    async def trim(self) -> bool:
        return True

    async def close(self) -> None:
        self._store.sources.remove(self)


class ModelFile:
    """A file that was opened."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> AsyncGenerator[bytes, None]:
        yield self._body

    def close(self) -> None:
        return


@dataclasses.dataclass(eq=False)
class Waiting:
    """An operation of a process that waits for its turn."""

    process: "Process"
    what: str
    work: Callable[[], object]
    turn: "asyncio.Future[None]"


class Process:
    """One run of a command, with a clock of its own, and the place of the backup as this command sees it."""

    def __init__(self, model: "Model", name: str, skew_ms: int) -> None:
        self.name = name
        self.is_killed = False
        self.until_ms = 0
        """The end of its suspension."""
        self.unconfirmed = ""
        """The snapshot that it has put and may still take back."""
        self.put_ms = 0
        self.task: asyncio.Task[None] | None = None
        self._model = model
        self._skew_ms = skew_ms

    def __call__(self) -> int:
        return self._model.clock() + self._skew_ms

    def elapsed_ms(self) -> int:
        return self._model.clock.elapsed_ms()

    async def put(self, name: str, body: bytes) -> None:
        await self._turn(f"put {name}", lambda: self._model.put(self, name, body))

    async def get(self, name: str) -> bytes | None:
        return await self._turn(f"get {name}", lambda: self._model.files.get(name))

    async def list_files(self, folder: str) -> dict[str, int]:
        return await self._turn(f"list {folder}", lambda: self._model.list_now(folder))

    async def delete(self, name: str) -> None:
        await self._turn(f"delete {name}", lambda: self._model.files.pop(name, None))

    async def delete_leftovers(self) -> None:
        return

    async def close(self) -> None:
        return

    async def pause(self) -> None:
        """Let others work."""
        await self._turn("pause", lambda: None)

    async def _turn(self, what: str, work: Callable[[], T]) -> T:
        if self.is_killed:
            raise asyncio.CancelledError
        if what == f"delete {self.unconfirmed}":
            self._model.exempt.add(self.unconfirmed)
            self.unconfirmed = ""
        elif not what.startswith(("get snapshots", "get claims")):
            self._model.confirm(self)
        waiting = Waiting(self, what, work, asyncio.get_running_loop().create_future())
        self._model.waiting.append(waiting)
        try:
            await waiting.turn
        finally:
            if waiting in self._model.waiting:
                self._model.waiting.remove(waiting)
        if self.is_killed:
            raise asyncio.CancelledError
        return work()


class Model:
    """A store, its backup, and the processes that work on them. A third of the seeds has damage; another
    third is calm: it has one maker, and clocks that are nearly right."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        damages, is_calm = seed % 3 == 1, seed % 3 == 2
        self.clock = FakeClock()
        self.store = ModelStore(self.clock)
        self.files: dict[str, bytes] = {}
        self.written: dict[str, bytes] = {}
        """All files that were ever put."""
        self.damaged: set[str] = set()
        """Files that were lost or damaged on purpose."""
        self.exempt: set[str] = set()
        """Snapshots whose maker was killed, or lost the place, before it could take them back."""
        self.waiting: list[Waiting] = []
        self.problems: list[str] = []
        self.trace: list[str] = []
        self._damages = damages
        self._confirmed: list[str] = []
        self._has_backup = False
        self._needed: dict[str, set[str]] = {}
        self._running: dict[str, Process] = {}
        self._last: Process | None = None
        self._count = 0
        self._commands: dict[str, Callable[[Process], Awaitable[None]]] = {
            "follower": self._follow,
            **({} if is_calm else {"backup": self._back_up}),
            "prune 1": self._prune,
            "prune 2": self._prune,
            **({"verify": self._verify} if damages else {}),
        }
        skews_ms = (0, 0, 0, 90_000, -HOUR_MS) if is_calm else (0, 0, 0, 90_000, -HOUR_MS, 30 * HOUR_MS)
        self._skews_ms = {name: self.random.choice(skews_ms) for name in self._commands}
        self._may_end = not is_calm
        """True if all snapshots may be gone for a moment: two that were put at the same time are taken back,
        or one whose claim counted as dead meanwhile."""

    async def run(self, steps: int) -> None:
        """Let the processes work, and check after each step that every snapshot restores."""
        await Repository.open(self._place(), create=True)
        try:
            for _ in range(steps):
                await self._settle()
                self._start_processes()
                await self._step()
                await self._check()
        finally:
            await self._stop_processes()
        await self._check()

    async def finish(self) -> None:
        """Make one more backup and prune, undisturbed. Then all is whole, and nothing is left over."""
        self.clock.now_ms += 4 * DAY_MS
        self._damages = False
        target = self._place()
        problems: list[str] = []
        await BackupVerifier(await Repository.open(target), lambda *_: None).run()
        maker = await self._maker(target, self.clock)
        snapshot = await maker.make()
        await maker.close()
        assert snapshot is not None
        while True:
            try:
                await Pruner(
                    await Repository.open(target), KeepRules(last=1), self.clock, problems.append
                ).run()
                break
            except DamagedSnapshot as error:
                await target.delete(error.name)
        self.problems += [f"the last prune: {one}" for one in problems if "a clock was wrong" not in one]
        verifier = BackupVerifier(
            await Repository.open(target), lambda name, why: self.problems.append(f"in the end {name}: {why}")
        )
        await verifier.run()
        if verifier.report.snapshots != 1 or verifier.report.unreferenced:
            self.problems.append(f"in the end: {verifier.report}")
        left = [name for name in self.files if name.startswith((CLAIMS, "damaged"))]
        if left:
            self.problems.append(f"left over in the end: {left}")
        newest = await Repository(target, None).newest(STORE_ID, lambda *_: None)
        assert newest is not None
        assert (newest.number, newest.id) == (snapshot.number, snapshot.id)
        await self._check_contents(newest, await self.store.contents())

    def confirm(self, process: Process) -> None:
        """A process goes on after it has put a snapshot: this one stays."""
        if process.unconfirmed:
            self._confirmed.append(process.unconfirmed)
            process.unconfirmed = ""

    def put(self, process: Process, name: str, body: bytes) -> None:
        self.files[name] = self.written[name] = body
        if name.startswith(SNAPSHOTS):
            process.unconfirmed, process.put_ms = name, self.clock.now_ms

    def list_now(self, folder: str) -> dict[str, int]:
        names = sorted(name for name in self.files if not folder or name.startswith(folder + "/"))
        return {name: len(self.files[name]) for name in names}

    async def _step(self) -> None:
        """Let time pass, write to the store or not, and let one process take a step."""
        if self.random.random() < 0.2:
            await self.store.write(self.random)
        if self._damages and self.random.random() < 0.005:
            self._damage()
        self.clock.now_ms += self.random.choice((1, 1, 20, 1000))
        ready = [one for one in self.waiting if one.process.until_ms <= self.clock.now_ms]
        if ready:
            own = [one for one in ready if one.process is self._last]
            chosen = self.random.choice(own if own and self.random.random() < 0.8 else ready)
            self._last = chosen.process
            self._take(chosen)
        elif self.waiting:
            self.clock.now_ms = min(one.process.until_ms for one in self.waiting)

    def _take(self, chosen: Waiting) -> None:
        """Let one operation happen, or something else."""
        process, chance = chosen.process, self.random.random()
        self.waiting.remove(chosen)
        if chance < 0.003:
            if self.random.random() < 0.5:
                chosen.work()
            self._kill(process, True)
        elif chance < 0.005:
            self._kill(process, False)
        elif chance < (0.1 if chosen.what.startswith(_TURNING_POINTS) else 0.02):
            self.waiting.append(chosen)
            longest_ms = self.random.choice((10 * MINUTE_MS, 3 * HOUR_MS, 3 * DAY_MS))
            process.until_ms = self.clock.now_ms + self.random.randrange(longest_ms)
            self._log(process, f"sleeps before {chosen.what}")
        elif chance > 0.997 and chosen.what != "pause":
            if self.random.random() < 0.5:
                chosen.work()
            self._log(process, f"fails at {chosen.what}")
            chosen.turn.set_exception(StoreUnavailable("the place is away"))
        else:
            if chosen.what == "pause":
                self.clock.now_ms += self.random.choice((5000, 5000, 20 * MINUTE_MS, 2 * HOUR_MS))
            self._log(process, chosen.what)
            chosen.turn.set_result(None)

    def _log(self, process: Process, what: str) -> None:
        self.trace.append(f"{self.clock.now_ms} {process.name}: {what}")

    def _kill(self, process: Process, is_sudden: bool) -> None:
        """End a process: at once, or after it has cleaned up."""
        self._log(process, "is killed" if is_sudden else "is cancelled")
        process.is_killed = is_sudden
        process.until_ms = 0
        assert process.task is not None
        process.task.cancel()

    def _damage(self) -> None:
        """Lose, shorten or flip a file."""
        names = [name for name in self.files if name != "format.json"]
        if names:
            name = self.random.choice(names)
            body = self.files[name]
            self.damaged.add(name)
            self.trace.append(f"damage {name}")
            match self.random.randrange(3):
                case 0:
                    del self.files[name]
                case 1:
                    self.files[name] = body[:-1]
                case _:
                    self.files[name] = body[:-1] + bytes([body[-1] ^ 1])

    async def _settle(self) -> None:
        for _ in range(_TICKS):
            await asyncio.sleep(0)

    def _start_processes(self) -> None:
        for name, command in self._commands.items():
            running = self._running.get(name)
            if running is None or (running.task is not None and running.task.done()):
                self._count += 1
                process = Process(self, f"{name} ({self._count})", self._skews_ms[name])
                process.task = asyncio.create_task(self._run(process, command))
                self._running[name] = process

    async def _stop_processes(self) -> None:
        """Kill all processes, some of which clean up."""
        for process in self._running.values():
            self._kill(process, self.random.random() < 0.5)
        tasks = {process.task for process in self._running.values() if process.task is not None}
        while not all(task.done() for task in tasks):
            await self._settle()
            for waiting in [*self.waiting]:
                self.waiting.remove(waiting)
                waiting.turn.set_result(None)

    async def _run(self, process: Process, command: Callable[[Process], Awaitable[None]]) -> None:
        try:
            await process.pause()
            await command(process)
            self.confirm(process)
        except (StoreUnavailable, BackupDamaged) as error:
            self._log(process, f"ends: {error!r}")
        except asyncio.CancelledError:
            pass
        except Exception as error:
            self.problems.append(f"{process.name}: {error!r}")
            raise
        finally:
            if process.unconfirmed:
                self.exempt.add(process.unconfirmed)
                process.unconfirmed = ""

    async def _maker(self, target: Any, clock: Callable[[], int]) -> BackupMaker:
        repository = await Repository.open(target, create=True)
        source = ModelSource(self.store)

        def report(key: str, why: str) -> None:
            if key:
                self.problems.append(f"{key}: {why}")

        return BackupMaker(source, repository, clock, report, "file:store", STORE_ID)

    async def _back_up(self, process: Process) -> None:
        maker = await self._maker(process, process)
        try:
            await maker.make()
        finally:
            await maker.close()

    async def _follow(self, process: Process) -> None:
        maker = await self._maker(process, process)
        made: list[str] = []
        try:
            while True:
                snapshot = await maker.make(only_changes=True)
                made += [] if snapshot is None else [snapshot.name]
                await process.pause()
                if len(made) > 1 and self.random.random() < 0.3:
                    await process.delete(made.pop(self.random.randrange(len(made) - 1)))
        finally:
            await maker.close()

    async def _prune(self, process: Process) -> None:
        repository = await Repository.open(process, create=True)
        rules = KeepRules(last=self.random.choice((0, 1, 1, 2, 4)), hourly=self.random.choice((0, 0, 3)))
        pruner = Pruner(repository, rules, process, lambda _: None, purges=self.random.random() < 0.35)
        try:
            await pruner.run()
        except DamagedSnapshot as error:
            if self.random.random() < 0.5:
                await process.delete(error.name)

    async def _verify(self, process: Process) -> None:
        await BackupVerifier(await Repository.open(process, create=True), lambda *_: None).run()

    def _place(self, files: dict[str, bytes] | None = None) -> MemoryTarget:
        """The place as somebody sees it whom nobody disturbs."""
        target = MemoryTarget()
        target.files = self.files if files is None else files
        return target

    async def _check(self) -> None:
        """Check that what snapshots refer to is there, and restore the new ones."""
        confirmed, self._confirmed = self._confirmed, []
        for name in confirmed:
            if name in self.files and self.files[name] == self.written[name]:
                needed = await self._needed_by(name)
                if not needed & self.damaged and needed <= self.files.keys():
                    snapshot = await Repository(self._place(self.written), None).read_snapshot(name)
                    await self._check_contents(snapshot, self.store.moments[snapshot.change])
        open_ms = {one.unconfirmed: one.put_ms for one in self._running.values() if one.unconfirmed}
        unconfirmed, now_ms = open_ms.keys(), self.clock.now_ms
        self._may_end |= len(open_ms) > 1 or any(now_ms - ms > 20 * HOUR_MS for ms in open_ms.values())
        is_there = False
        for name in [*self.files]:
            if name.startswith(SNAPSHOTS):
                lacks = await self._needed_by(name) - self.files.keys() - self.damaged
                if not lacks:
                    is_there = True
                    self._has_backup |= name not in self.exempt | unconfirmed
                elif name not in self.exempt | unconfirmed:
                    self.problems.append(f"{name} lacks {sorted(lacks)}")
                    self.exempt.add(name)
        if self._has_backup and not is_there:
            self._has_backup = False
            if not self._may_end:
                self.problems.append("the last snapshot is gone")

    async def _needed_by(self, name: str) -> set[str]:
        if name not in self._needed:
            repository = Repository(self._place(self.written), None)
            snapshot = await repository.read_snapshot(name)
            needed = {path_of(LISTS, page) for one in snapshot.lists for page in one.pages}
            for page in [page for one in snapshot.lists for page in one.pages]:
                for entry in await repository.read_page(page):
                    needed |= {path_of(PACKS, part.pack) for part in entry.parts}
            self._needed[name] = needed
        return self._needed[name]

    async def _check_contents(self, snapshot: Snapshot, expected: Contents) -> None:
        """Restore a snapshot."""
        store = MemoryStore()
        problems: list[str] = []
        restorer = Restorer(
            Repository(self._place(), None), store, lambda key, why: problems.append(f"{key}: {why}")
        )
        await restorer.restore(snapshot)
        restored = ModelStore(self.clock)
        restored.store = store
        if problems or await restored.contents() != expected:
            self.problems.append(
                f"{snapshot.name} of moment {snapshot.change} restores something else: {problems}"
            )
