"""Copies each object from one store to another, byte for byte."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from pysync import _core
from pysync.auth.revocation import PREFIX as REVOCATIONS
from pysync.changelog import ChangeLog
from pysync.concurrency import gather_bounded
from pysync.engine.append_log import chunk_keys, delete_log_objects, log_prefix, object_key
from pysync.engine.documents import SECRET_DOCUMENT_KEY as VERSIONS
from pysync.errors import DocumentCorrupt, KeyConflict
from pysync.migrate.reading import (
    SCRUB_KEY,
    VERIFY_KEY,
    LogShortened,
    Reader,
    Unreadable,
    as_object,
    check_retained,
    error_context,
    for_each_key,
)
from pysync.migrate.verify import (
    HASH_MISMATCH,
    VerificationError,
    check_chunk,
    check_chunks,
    check_document,
    check_object,
    check_revocations,
    expand_node,
    is_damaged,
    log_of_chunk,
    verified_chunks,
)
from pysync.store import (
    ABSENT,
    ANY,
    ERASED_KEY,
    RESTORED_KEY,
    STORE_KEY,
    DamagedFile,
    Etag,
    EtagMismatch,
    FileStat,
    OpenFile,
    Precondition,
    ReadableStore,
    Store,
    StoredObject,
)

CopyOutcome = Literal["copied", "healed", "already_there", "corrupt", "different", "refused", "unreadable"]


@dataclass(slots=True)
class CopyReport:
    """The number of objects by outcome, and the bytes of those that were put. A `healed` object replaced a
    damaged one. A `different` one was not copied because the target has another object at its key. A
    `refused` one has a key that the target does not accept, or names something that is missing. An
    `unreadable` one is lost, or the disk or server does not return it."""

    copied: int = 0
    healed: int = 0
    already_there: int = 0
    corrupt: int = 0
    different: int = 0
    refused: int = 0
    unreadable: int = 0
    bytes: int = 0

    @property
    def is_complete(self) -> bool:
        """True if the target now holds everything."""
        return not (self.corrupt or self.different or self.refused or self.unreadable)


MAX_CONCURRENT: Final = 32
"""The number of objects that are copied concurrently."""
MAX_CONCURRENT_FILES: Final = 4

_EXCLUDED: Final = (
    log_prefix(""),
    "_pysync/probe/",
    "_pysync/projections/",
    "_pysync/webhooks/",
    "_pysync/damaged",
    "_pysync/usage",
    ERASED_KEY,
    RESTORED_KEY,
    STORE_KEY,
    SCRUB_KEY,
    VERIFY_KEY,
    "__sync__/config.json",
)
"""Objects that are not copied by themselves: those of logs, which are copied with their heads; leftovers of
probes; positions in a change log that is not copied; the list of damaged files, the totals of usage, the
hashes of what was erased, the mark of a restore, the id of the store and the records of the last
verifications; and the configuration that Starfish stores."""
_PATH_CONFLICT: Final = "the target stores folders, and another file has a key above or below this one"


class Copier:
    """Copies all of `source` to `target`. `on_problem` is called with every key that is not copied and the
    reason.

    An object that differs at `target` is left as it is unless `overwrite` is set. A corrupt object is not
    copied unless `keep_corrupt` is set, and is reported in either case. A copy is not announced: if one was
    made, the change log of the target, or else `change_log`, begins anew in the end.
    """

    def __init__(
        self,
        source: ReadableStore,
        target: Store,
        on_problem: Callable[[str, str], None],
        *,
        overwrite: bool = False,
        keep_corrupt: bool = False,
        quick: bool = False,
        change_log: ChangeLog | None = None,
    ) -> None:
        self.report = CopyReport()
        own = target.transactional
        self._change_log = change_log if own is None else own.change_log
        self._source = source
        self._reader = Reader(source)
        self._target = target
        self._on_problem = on_problem
        self._overwrite = overwrite
        self._keep_corrupt = keep_corrupt
        self._quick = quick
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._file_slots = asyncio.Semaphore(MAX_CONCURRENT_FILES)
        self._chunked = asyncio.Lock()
        """Serialises logs in chunks of Starfish's: each is in memory as a whole while it is verified."""

    async def run(self) -> None:
        """Copy all objects. No progress is stored: another run skips the objects that this one has copied. An
        object that cannot be read is counted, and the copy continues. Raises StoreUnavailable, which names
        the key, if one of the stores is unreachable; `report` is then still valid."""
        try:
            await for_each_key(self._source, MAX_CONCURRENT, self._copy)
        finally:
            if self._change_log is not None and self.report.copied + self.report.healed:
                await self._change_log.begin_epoch()

    async def _copy(self, key: str) -> None:
        if key.startswith(_EXCLUDED):
            return
        try:
            async with self._slots:
                found = await self._reader.get(key)
                log = None if found is None else await self._copy_found(key, found)
            if found is None:
                await self._copy_file(key)
            elif log is not None:
                await self._copy_log(key, found, log)
        except Unreadable as error:
            self._count(key, "unreadable", str(error))
        except ValueError as error:
            self._count(key, "refused", str(error))

    async def _copy_found(self, key: str, found: StoredObject) -> _core.LogHead | None:
        """Copy a self-contained object. Return the head of a log instead, to be copied after its parts."""
        try:
            head = check_object(key, found.body)
            if head is not None:
                return head
            of = log_of_chunk(key, found.body)
            if of is not None and await self._belongs_to_log(of):
                return None
        except VerificationError as error:
            await self._put_corrupt(key, found, str(error))
            return None
        if key == VERSIONS and (there := await self._get_target(key)) and not is_damaged(key, there.body):
            # Readers of the target know versions that are keyed with its own secret.
            self._count(key, "already_there")
        elif key.startswith(f"{REVOCATIONS}/") and await self._is_older(key, found.body):
            self._count(key, "different", "the target has a later list")
        else:
            await self._put(key, found)
        return None

    async def _is_older(self, key: str, stored: bytes) -> bool:
        """Return True if the target has a later revocation list, which an earlier one must not replace."""
        there = await self._get_target(key)
        try:
            generation = check_revocations(key, stored)
            return there is not None and check_revocations(key, there.body) > generation
        except VerificationError:
            return False

    async def _belongs_to_log(self, key: str) -> bool:
        """Return True if the head at `key` has chunks, which are copied with it, and False if they are what
        pysync left of a log that it converted. Raises VerificationError if there is no log."""
        found = await self._reader.get(key)
        if found is not None and _core.is_log(found.body):
            return False
        with suppress(VerificationError):
            if found is not None:
                return check_document(found.body) is not None
        raise VerificationError("it is a chunk of a log whose head is missing")

    async def _copy_log(self, key: str, stored: StoredObject, head: _core.LogHead) -> None:
        """Copy the objects that the head names, then the head, so that every reader of a head finds them."""
        if await self._is_different(key, stored):
            return
        try:
            if head.is_chunked:
                is_complete = await self._copy_chunks(key, head)
            else:
                is_complete = await self._for_each_node(head, partial(self._copy_node, key))
        except LogShortened as error:
            await self._copy_log(key, error.stored, error.head)
            return
        except VerificationError as error:
            await self._put_corrupt(key, stored, str(error))
            return
        if is_complete:
            await self._put_head(key, stored, head)
        else:
            self._count(key, "refused", "objects of this log are missing")

    async def _is_different(self, key: str, stored: StoredObject) -> bool:
        """Return True if the target has another object at the key that must be kept. It is then counted."""
        if self._overwrite:
            return False
        there = await self._get_target(key)
        if there is None or there.body == stored.body or is_damaged(key, there.body):
            return False
        if not self._quick and _core.is_log(there.body):
            await self._for_each_node(_core.LogHead.read(there.body, ""), self._repair_node)
        self._count(key, "different")
        return True

    async def _for_each_node(
        self,
        head: _core.LogHead,
        work: Callable[[_core.LogHead, _core.LogNode], Awaitable[list[_core.LogNode] | None]],
    ) -> bool:
        """Call `work` with every segment of a log and every block of its index. It returns the nodes below
        its own, or None. Returns True if no call returned None."""
        is_complete = True
        waiting = head.nodes()
        while waiting:
            nodes, waiting = waiting[:MAX_CONCURRENT], waiting[MAX_CONCURRENT:]
            below = await gather_bounded(MAX_CONCURRENT, nodes, partial(work, head))
            is_complete = is_complete and None not in below
            waiting = [node for found in below for node in found or []] + waiting
        return is_complete

    async def _repair_node(self, head: _core.LogHead, node: _core.LogNode) -> list[_core.LogNode]:
        """Copy one object of a log if it is missing or damaged at the target and the source still has it.
        Returns the nodes below it, as far as they are known."""
        key = object_key(head.id, node.name)
        async with self._slots:
            there = await self._get_target(key)
            with suppress(VerificationError):
                if there is not None:
                    return expand_node(head, node, there.body)
            with suppress(VerificationError, Unreadable):
                found = await self._reader.get(key)
                if found is not None:
                    below = expand_node(head, node, found.body)
                    with error_context(f"writing {key}"):
                        await self._target.put(key, found.body, found.content_type)
                    self._count_put(key, len(found.body), repairs=True)
                    return below
        return []

    async def _copy_node(
        self, log: str, head: _core.LogHead, node: _core.LogNode
    ) -> list[_core.LogNode] | None:
        """Copy one object of the log at `log`. Returns the nodes below it, or None if the target does not
        have it. Raises LogShortened if its elements have left the log since the head was read."""
        key = object_key(head.id, node.name)
        async with self._slots:
            missing = "it is missing, and the head of its log names it"
            found = await self._get_part(key, missing, lambda: check_retained(self._reader, log, head, node))
            if found is None:
                return [] if self._keep_corrupt else None
            below: list[_core.LogNode] = []
            try:
                below = expand_node(head, node, found.body)
            except VerificationError as error:
                is_there = await self._put_corrupt(key, found, str(error))
            else:
                is_there = await self._put(key, found)
            return below if is_there else None

    async def _get_part(
        self, key: str, missing: str, check_missing: Callable[[], Awaitable[None]] | None = None
    ) -> StoredObject | None:
        """Return a part of a log from the source. Count it and return None if it cannot be read. An error of
        `check_missing` is passed on."""
        try:
            found = await self._reader.get(key)
            if found is None and check_missing is not None:
                await check_missing()
        except (Unreadable, DocumentCorrupt) as error:
            self._count(key, "unreadable", str(error))
            return None
        if found is None:
            self._count(key, "corrupt", missing)
        return found

    async def _copy_chunks(self, key: str, head: _core.LogHead) -> bool:
        """Copy the chunks of a log in the format of Starfish. Returns True if the target now has all of them.
        Raises VerificationError if they do not match the head."""
        async with self._chunked:
            with error_context(f"listing the chunks of {key}"):
                keys = await chunk_keys(self._source, key)
            copied = await gather_bounded(MAX_CONCURRENT, keys, self._copy_chunk)
            chunks = [chunk for chunk in copied if chunk is not None]
            if len(chunks) == len(keys):
                check_chunks(head, chunks)
            return len(chunks) == len(keys)

    async def _copy_chunk(self, key: str) -> bytes | None:
        """Copy a chunk and return it; None if the target does not have it."""
        async with self._slots:
            found = await self._get_part(key, "it is missing")
            if found is None:
                return None
            try:
                check_chunk(found.body)
            except VerificationError as error:
                is_there = await self._put_corrupt(key, found, str(error))
            else:
                is_there = await self._put(key, found)
            return found.body if is_there else None

    async def _put_head(self, key: str, stored: StoredObject, head: _core.LogHead) -> None:
        """Put a head. If it replaces another log, delete the objects of that log."""
        before = await self._get_target(key) if self._overwrite else None
        if await self._put(key, stored) and before is not None and _core.is_log(before.body):
            with suppress(DocumentCorrupt), error_context(f"deleting what {key} was before"):
                replaced = _core.LogHead.read(before.body, "")
                if replaced.id != head.id:
                    await delete_log_objects(self._target, replaced.id)

    async def _put_corrupt(self, key: str, found: StoredObject, why: str) -> bool:
        """Count a corrupt object, and put it if `keep_corrupt` is set. Return True if the target has it."""
        self._count(key, "corrupt", why)
        return self._keep_corrupt and await self._put(key, found)

    async def _put(self, key: str, found: StoredObject) -> bool:
        """Put an object that the target lacks, and count the outcome. Return True if the target has it."""
        there = await self._get_target(key)
        repairs = there is not None and there.body != found.body and is_damaged(key, there.body)
        if there is None or repairs or (self._overwrite and there.body != found.body):
            with error_context(f"writing {key}"):
                try:
                    expect: Precondition = ABSENT if there is None else Etag(there.etag)
                    if self._overwrite:
                        expect = ANY
                    await self._target.put(key, found.body, found.content_type, expect)
                except EtagMismatch:  # a file is stored there, or the last write of an earlier run
                    there = await self._get_target(key)
                else:
                    self._count_put(key, len(found.body), repairs=repairs)
                    return True
        is_there = there is not None and there.body == found.body
        self._count(key, "already_there" if is_there else "different")
        return is_there

    async def _copy_file(self, key: str) -> None:
        async with self._file_slots:
            file = await self._reader.open(key)
            if file is None:
                return  # deleted meanwhile
            try:
                async with aclosing(file.chunks):
                    await self._write(key, file)
            except VerificationError as error:
                self._count(key, "corrupt", str(error))
            except KeyConflict:
                self._count(key, "refused", _PATH_CONFLICT)

    async def _write(self, key: str, file: OpenFile) -> None:
        """Write a file that the target lacks, and count the outcome."""
        there, is_damaged = await self._stat_target_file(key)
        if there is not None and there.sha256 == file.sha256:
            self._count(key, "already_there")
            return
        if not (self._overwrite or is_damaged) and (
            there is not None or await self._get_target(key) is not None
        ):
            self._count(key, "different")
            return
        with error_context(f"copying {key}"):
            chunks = self._reader.chunks(key, file)
            if not self._keep_corrupt:
                chunks = verified_chunks(file, chunks)
            written = await self._target.write(key, chunks, file.content_type)
        if written != file.sha256:
            raise VerificationError(HASH_MISMATCH)
        self._count_put(key, file.size, repairs=is_damaged)

    async def _stat_target_file(self, key: str) -> tuple[FileStat | None, bool]:
        """Return the file at the target if it is undamaged, and True if it is damaged."""
        with error_context(f"reading what is at {key} already"):
            try:
                return await (self._target.stat if self._quick else self._target.verify)(key), False
            except DamagedFile:
                return None, True

    async def _get_target(self, key: str) -> StoredObject | None:
        with error_context(f"reading what is at {key} already"):
            return as_object(await self._target.get(key))

    def _count_put(self, key: str, size: int, *, repairs: bool) -> None:
        """Count an object that was put, which replaced a damaged one if `repairs` is set."""
        if repairs:
            self._count(key, "healed", "it replaced a damaged object")
        else:
            self._count(key, "copied")
        self.report.bytes += size

    def _count(self, key: str, outcome: CopyOutcome, why: str = "") -> None:
        setattr(self.report, outcome, getattr(self.report, outcome) + 1)
        if outcome == "different" and not why:
            why = "the target has another object at this key"
        if why:
            self._on_problem(key, f"{outcome}: {why}")
