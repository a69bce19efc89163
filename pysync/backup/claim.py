"""Claims: what a process that writes to a backup protects from `prune`, until a snapshot refers to it."""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

import orjson

from pysync.backup.format import Snapshot, compress_text, hash_name, inflate, new_id
from pysync.backup.snapshot import CLAIMS, SNAPSHOTS, Repository
from pysync.errors import StoreUnavailable

CLAIM_LIVES_MS: Final = 86_400_000
"""Difference of the clocks from which a claim counts as that of a dead process."""


class Outdated(Exception):
    """A `prune` has removed what the next snapshot would refer to, or may have. List everything."""


class ClaimText(NamedTuple):
    """What a claim says: the ids in the names of files that it protects, its time by the clock of the process
    that made it, and the snapshot as far as it is made, whose files it protects, too."""

    ids: list[str]
    at_ms: int
    progress: Snapshot | None

    def encode(self) -> bytes:
        """Return the text of the claim."""
        progress = None if self.progress is None else self.progress.encode().decode()
        return orjson.dumps({"ids": self.ids, "atMs": self.at_ms, "progress": progress})

    @classmethod
    def decode(cls, text: bytes) -> "ClaimText":
        """Return the claim with this text. Raises ValueError."""
        members = orjson.loads(text)
        try:
            ids, at_ms, progress = members["ids"], members["atMs"], members["progress"]
            if type(at_ms) is not int or not all(type(one) is str for one in ids):
                raise ValueError("it is no claim")
            return cls(ids, at_ms, None if progress is None else Snapshot.decode(progress.encode()))
        except (LookupError, TypeError, AttributeError):
            raise ValueError("it is no claim") from None


async def read_claims(repository: Repository, now_ms: int | None = None) -> dict[str, ClaimText]:
    """Return the claims, by their names. With `now_ms`, claims of dead processes and damaged ones are removed
    first."""
    claims: dict[str, ClaimText] = {}
    is_settled = True
    for name in await repository.names(CLAIMS):
        stored = await repository.find(name)
        if stored is None:  # its process may have replaced it
            return await read_claims(repository, now_ms)
        try:
            claim = ClaimText.decode(inflate(repository.unseal(stored)))
        except ValueError:
            claim = None
        if claim is not None and (now_ms is None or abs(now_ms - claim.at_ms) < CLAIM_LIVES_MS):
            claims[name] = claim
        elif now_ms is not None:
            await repository.target.delete(name)
            is_settled = False  # its process may have replaced it just before
    return claims if is_settled else await read_claims(repository, now_ms)


class BackupClaim:
    """Protects from `prune` what a process writes until a snapshot refers to it. The id of a claim is in the
    names of these files.

    A `prune` removes snapshots, then lists files, then removes the claims of dead processes, and only then
    reads which claims and snapshots there are, and deletes what none of them needs. A process writes its
    snapshot and then looks for its claim and for the snapshot that it continues. If both are there, every
    `prune` that could delete what the new snapshot needs has seen the claim or the new snapshot, whatever the
    clocks show and however long either of them slept. If not, the process deletes its snapshot and begins
    anew."""

    def __init__(self, repository: Repository, now_ms: Callable[[], int]) -> None:
        self._repository = repository
        self._now_ms = now_ms
        self._ids: list[str] = []
        self._name = ""

    async def renew(self, progress: Snapshot | None = None, *, is_published: bool = False) -> None:
        """Make the claim, or replace it by one with the present time. With `is_published` a snapshot refers
        to everything that was written. Raises Outdated if the claim was removed."""
        before, id_ = self._name, new_id()
        self._ids = [*([] if is_published else self._ids), id_]
        self._name = f"{CLAIMS}/{id_}"
        text = compress_text(ClaimText(self._ids, self._now_ms(), progress).encode())
        await self._repository.put_file(self._name, self._repository.seal(text))
        self._repository.claim_id = id_
        if before:
            if await self._repository.find(before) is None:
                await self.release()
                raise Outdated
            await self._repository.target.delete(before)

    async def publish(self, snapshot: Snapshot, *bases: str) -> Snapshot:
        """Store a snapshot, which makes it visible. Raises Outdated, and leaves none, if the claim or one of
        the files `bases`, of snapshots that it continues, is gone: a `prune` may have deleted what it names.
        """
        stored = self._repository.seal(compress_text(snapshot.encode()))
        number = f"{snapshot.number:012}-{snapshot.id}-{snapshot.revision:04}"
        name = f"{SNAPSHOTS}/{number}-{hash_name(stored)}-{len(stored)}"
        try:
            await self._repository.put_file(name, stored)
            await self.check(*bases)
        except BaseException:  # also if this is cancelled, or the place is away
            with suppress(StoreUnavailable):
                await self._repository.target.delete(name)
            raise
        return dataclasses.replace(snapshot, name=name)

    async def check(self, *names: str) -> None:
        """Raise Outdated unless the claim and the files of these names are there."""
        for name in (self._name, *names):
            if await self._repository.find(name) is None:
                raise Outdated

    async def release(self) -> None:
        """Remove the claim."""
        name, self._name, self._ids = self._name, "", []
        if name:
            await self._repository.target.delete(name)
