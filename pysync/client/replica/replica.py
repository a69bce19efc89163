"""A local copy of collections in one file, in sync with the server whenever that can be reached."""

import asyncio
import random as random_module
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import orjson

from pysync.client.client import Client
from pysync.client.merge import local_wins
from pysync.client.models import ParamSet
from pysync.client.polling import RESUBSCRIBE_S
from pysync.client.replica.file import RejectedEdit, RemoteVersion, ReplicaFile, decode_error
from pysync.client.replica.inbox import ReceivingCopy
from pysync.client.replica.local import CollectionRules, OnConflict
from pysync.client.sync import Cipher, Merge
from pysync.client.transport import Unreachable, document_key, retry_after_s
from pysync.client.watch import ChangeEvent
from pysync.clock import wall_clock_ms
from pysync.errors import PysyncError, Unauthorized


class Status(NamedTuple):
    """The state of a replica. `online` is True if the server has answered the last request. `behind` is True
    until everything is received that the server is known to have. `unsent` counts the edits that wait, and
    `rejected` has those that the server rejects for good, the oldest first: `retry` or `discard` them.
    `error` is what keeps the replica, or one of its collections, from being in sync; None if nothing does."""

    online: bool
    behind: bool
    unsent: int
    rejected: list[RejectedEdit]
    error: Exception | None


class Replica(ReceivingCopy):
    """A local copy of collections of the server, in the SQLite file at `path`: documents, the newest 1000
    elements of each log, and files when they are asked for. Keys are those of `Client`.

    `collections` are the names of the collections, each with values of path parameters that narrow it, or a
    list of such values: `{"notes": {}, "users": {"identity": me.user_id}}`. `on_conflict`, `id_member`,
    `resolve` and `sealing` are as for a SyncDocument: one for all, or a mapping by collection. For `sealing`
    it names all collections, with None those that are not sealed. No document of another one is sent.

    It is an async context manager, and opens with the server away. One process at a time has the file open.
    Sealed data are sealed in the file, too. Edits that wait are plain: protect the file like the keys.
    """

    def __init__(
        self,
        path: str | Path,
        client: Client,
        collections: Mapping[str, ParamSet | Sequence[ParamSet]],
        *,
        on_conflict: OnConflict | Mapping[str, OnConflict] = local_wins,
        id_member: str | Mapping[str, str] = "id",
        resolve: Merge | Mapping[str, Merge] | None = None,
        sealing: Cipher | Mapping[str, Cipher | None] | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random_module.random,
    ) -> None:
        super().__init__(client, CollectionRules(on_conflict, id_member, resolve, sealing), now_ms)
        self._path = Path(path)
        self._files = Path(f"{path}-files")
        self._collections = {
            name: [params] if isinstance(params, Mapping) else list(params)
            for name, params in collections.items()
        }
        self._sleep = sleep
        self._jitter = jitter
        self._is_online = self._is_live = False
        self._is_behind = True
        self._error: Exception | None = None
        self._changed, self._asked = asyncio.Event(), asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> Self:
        """Open the file. Raises ReplicaFileError if it is open elsewhere, or belongs to another caller or
        server, and OSError."""
        self._file = ReplicaFile(self._path, f"{self._client.address} {self._client.identity}".rstrip())
        self._paths = orjson.loads(self._file.setting("paths") or b"{}")
        self._follow_only(self._collections)
        for kept in self._files.iterdir() if self._files.is_dir() else ():
            if not self._file.is_kept(kept.name):
                kept.unlink()
        self._syncing = asyncio.ensure_future(self._sync())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._syncing.cancel()
        await asyncio.gather(self._syncing, return_exceptions=True)
        for iterator in self._iterators:
            iterator.close()
        self._file.close()

    @property
    def status(self) -> Status:
        """The number of edits that wait, those that were rejected, and the error that stops the replica."""
        rejected = [
            RejectedEdit(each.id or 0, each.key, each.kind, decode_error(each.error or b""), each.plain)
            for each in self._file.edits(rejected=True)
        ]
        return Status(self._is_online, self._is_behind, self._file.unsent(), rejected, self._error)

    async def synced(self) -> None:
        """Return when all edits that were made before the call are sent or rejected, and all that the server
        had is received. Raises what stops that: Unreachable without a network, Unauthorized if the
        certificate has expired. The replica goes on trying. A collection that the caller may not read stops
        nothing: it is the `error` of the status."""
        if self._syncing.done():
            raise RuntimeError("the replica is closed")
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._changed.set()
        self._asked.set()
        await waiting

    async def file(self, key: str) -> Path | None:
        """Return the path of a copy of the file; None if nothing is stored. It is fetched when it is asked
        for, and kept until the next start after it has changed. Raises as `Client.pull_blob_to`."""
        key = document_key(key)
        version = self._file.version(key)
        # Of another server, a version may be a path.
        if version is not None and version.hash.isalnum() and (kept := self._files / version.hash).is_file():
            return kept
        self._files.mkdir(mode=0o700, exist_ok=True)
        part = self._files / secrets.token_hex(8)
        if (info := await self._client.pull_blob_to(key, part)) is None:
            return None
        hash_ = info.hash if info.hash and info.hash.isalnum() else part.name
        if self._file.version(key) == version:
            with self._file.transaction():
                self._file.store(RemoteVersion(key, hash_, None, version.written_ms if version else 0))
        return part.replace(self._files / hash_)

    def _edited(self, key: str) -> None:
        super()._edited(key)
        self._changed.set()

    def _fall_behind(self, is_live: bool = True) -> None:
        """The server has something new, or the stream that would say so has ended."""
        self._is_behind, self._is_live = True, is_live
        self._changed.set()

    async def _sync(self) -> None:
        """Receive and send until the replica is closed. While the server is away it is tried again after the
        waits of the client; after `401` when the client has another certificate. `synced` tries at once."""
        failures = 0
        waiting: list[asyncio.Future[None]] = []
        listening: asyncio.Future[None] | None = None
        try:
            while True:
                certificate = self._client.certificate
                waiting, self._waiting = self._waiting, []
                self._changed.clear()
                self._asked.clear()
                error = await self._round(must_receive=bool(waiting))
                for each in waiting:
                    if not each.done():
                        each.set_result(None) if error is None else each.set_exception(error)
                if error is None:
                    failures = 0
                    if listening is None or listening.done():
                        listening = asyncio.ensure_future(self._listen())
                    await self._wait(None if self._is_live else RESUBSCRIBE_S, self._changed)
                    self._is_behind = self._is_behind or not self._is_live
                    continue
                failures += 1
                wait_s = self._client.backoff.pause_s(failures, retry_after_s(error), self._jitter())
                await self._wait(wait_s, self._asked)
                while isinstance(error, Unauthorized) and certificate is self._client.certificate:
                    if listening is not None:
                        listening.cancel()
                    if self._asked.is_set():
                        break
                    await self._wait(wait_s, self._asked)
        finally:
            for task in (*waiting, *self._waiting, *([listening] if listening else [])):
                task.cancel()

    async def _round(self, must_receive: bool) -> Exception | None:
        """Receive what others have written, if there may be something, and send everything. Return the error
        that stops it."""
        try:
            if self._is_behind or must_receive:
                self._is_behind = False
                self._error = await self._receive()
            await self._send()
        except Exception as error:  # also of a full disk: later there may be room
            self._is_behind, self._error = True, error
            if isinstance(error, Unreachable | PysyncError):
                self._is_online = isinstance(error, PysyncError)
            return error
        self._is_online = True
        return None

    async def _listen(self) -> None:
        """Listen to the change stream, which only says when to ask for changes, until the server ends it for
        good. Without a stream the replica asks every 30 s."""
        narrow = {name: sets[0] for name, sets in self._collections.items() if len(sets) == 1}
        watch = self._client.watch(
            list(self._collections),
            narrow,
            on_connect=self._fall_behind,
            on_disconnect=lambda error: self._fall_behind(is_live=False),
        )
        try:
            with suppress(PysyncError, Unreachable):
                async for event in watch:
                    if not isinstance(event, ChangeEvent) or self._is_unseen(event):
                        self._fall_behind()
        finally:
            self._is_live = False

    def _is_unseen(self, event: ChangeEvent) -> bool:
        """Return True if the change is not one that was made here."""
        key = self._paths.get(event.collection, "").format_map(event.params)
        version = self._file.version(key)
        return version is None or version.hash != event.hash

    async def _wait(self, seconds: float | None, event: asyncio.Event) -> None:
        """Return after `seconds`, or on the event."""
        waits = [event.wait()] if seconds is None else [event.wait(), self._sleep(seconds)]
        tasks = [asyncio.ensure_future(each) for each in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
