"""A local copy of collections in one file, in sync with the server whenever that can be reached."""

import asyncio
import random as random_module
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import orjson

from pysync.client.client import Client
from pysync.client.merge import local_wins
from pysync.client.models import ParamSet
from pysync.client.replica.file import RejectedEdit, ReplicaFile, decode_error
from pysync.client.replica.local import CollectionRules, OnConflict
from pysync.client.replica.outbox import SendingCopy
from pysync.client.sync import Cipher, Merge
from pysync.client.transport import Unreachable, retry_after_s
from pysync.clock import wall_clock_ms
from pysync.errors import PysyncError, Unauthorized


class Status(NamedTuple):
    """The state of a replica. `online` is True if the server has answered the last request. `unsent` counts
    the edits that wait, and `rejected` has those that the server rejects for good, the oldest first: `retry`
    or `discard` them. `error` is what keeps the replica from being in sync, None if nothing does."""

    online: bool
    unsent: int
    rejected: list[RejectedEdit]
    error: Exception | None


class Replica(SendingCopy):
    """A local copy of collections of the server, in the SQLite file at `path`: documents, the newest 1000
    elements of each log, and files when they are asked for. Keys are those of `Client`.

    `collections` are the names of the collections, each with values of path parameters that narrow it, or a
    list of such values: `{"notes": {}, "users": {"identity": me.user_id}}`. `on_conflict`, `id_member`,
    `resolve` and `sealing` are as for a SyncDocument: one for all, or a mapping by collection.

    It is an async context manager, and opens with the server away. One process at a time has the file open.
    What is received of sealed data is sealed in the file. Edits that wait are plain: protect the file like
    the keys.
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
        sealing: Cipher | Mapping[str, Cipher] | None = None,
        now_ms: Callable[[], int] = wall_clock_ms,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random_module.random,
    ) -> None:
        super().__init__(client, CollectionRules(on_conflict, id_member, resolve, sealing), now_ms)
        self._path = Path(path)
        self._collections = {
            name: [params] if isinstance(params, Mapping) else list(params)
            for name, params in collections.items()
        }
        self._sleep = sleep
        self._jitter = jitter
        self._is_online = False
        self._error: Exception | None = None
        self._changed, self._asked = asyncio.Event(), asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> Self:
        """Open the file. Raises ReplicaFileError if it is open elsewhere, or belongs to another caller or
        server, and OSError."""
        self._file = ReplicaFile(self._path, f"{self._client.address} {self._client.identity}".rstrip())
        self._paths = orjson.loads(self._file.setting("paths") or b"{}")
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
        """What waits, what was rejected, and what is wrong."""
        rejected = [
            RejectedEdit(
                edit.id or 0,
                edit.key,
                edit.kind,
                decode_error(edit.error or b""),
                None if edit.data is None else orjson.loads(edit.data),
            )
            for edit in self._file.edits(rejected=True)
        ]
        return Status(self._is_online, self._file.unsent(), rejected, self._error)

    async def synced(self) -> None:
        """Return when all edits that were made before the call are sent or rejected. Raises what stops that:
        Unreachable without a network, Unauthorized if the certificate has expired. The replica goes on
        trying."""
        if self._syncing.done():
            raise RuntimeError("the replica is closed")
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self._asked.set()
        await waiting

    def _edited(self, key: str) -> None:
        super()._edited(key)
        self._changed.set()

    async def _sync(self) -> None:
        """Send edits as they are made, until the replica is closed. While the server is away it is tried
        again after the waits of the client; after `401` when the client has another certificate. `synced`
        tries at once."""
        failures = 0
        waiting: list[asyncio.Future[None]] = []
        try:
            while True:
                certificate = self._client.certificate
                waiting, self._waiting = self._waiting, []
                self._changed.clear()
                self._asked.clear()
                self._error = await self._round()
                for each in waiting:
                    if not each.done():
                        each.set_result(None) if self._error is None else each.set_exception(self._error)
                failures = 0 if self._error is None else failures + 1
                if self._error is None:
                    await self._wait(None, self._changed, self._asked)
                    continue
                wait_s = self._client.backoff.pause_s(failures, retry_after_s(self._error), self._jitter())
                await self._wait(wait_s, self._asked)
                while isinstance(self._error, Unauthorized) and certificate is self._client.certificate:
                    if self._asked.is_set():
                        break
                    await self._wait(wait_s, self._asked)
        finally:
            for each in (*waiting, *self._waiting):
                each.cancel()

    async def _round(self) -> Exception | None:
        """Send everything, and return the error that stops it."""
        try:
            await self._send()
        except Exception as error:  # also of a full disk: later there may be room
            if isinstance(error, Unreachable | PysyncError):
                self._is_online = isinstance(error, PysyncError)
            return error
        self._is_online = True
        return None

    async def _wait(self, seconds: float | None, *events: asyncio.Event) -> None:
        """Return after `seconds`, or on one of the events."""
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        sleeping = [] if seconds is None else [asyncio.ensure_future(self._sleep(seconds))]
        try:
            await asyncio.wait([*waits, *sleeping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (*waits, *sleeping):
                each.cancel()
