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
from pysync.client.replica.local import CollectionRules, LocalCopy, OnConflict
from pysync.client.sync import Cipher, Merge
from pysync.clock import wall_clock_ms


class Status(NamedTuple):
    """The state of a replica. `unsent` counts the edits that wait, and `rejected` has those that the server
    rejects for good, the oldest first: `retry` or `discard` them."""

    unsent: int
    rejected: list[RejectedEdit]


class Replica(LocalCopy):
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
        super().__init__(CollectionRules(on_conflict, id_member, resolve, sealing), now_ms)
        self._path = Path(path)
        self._client = client
        self._collections = {
            name: [params] if isinstance(params, Mapping) else list(params)
            for name, params in collections.items()
        }
        self._sleep = sleep
        self._jitter = jitter

    async def __aenter__(self) -> Self:
        """Open the file. Raises ReplicaFileError if it is open elsewhere, or belongs to another caller or
        server, and OSError."""
        self._file = ReplicaFile(self._path, f"{self._client.address} {self._client.identity}".rstrip())
        self._paths = orjson.loads(self._file.setting("paths") or b"{}")
        return self

    async def __aexit__(self, *exception: object) -> None:
        for iterator in self._iterators:
            iterator.close()
        self._file.close()

    @property
    def status(self) -> Status:
        """What waits, and what was rejected."""
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
        return Status(self._file.unsent(), rejected)
