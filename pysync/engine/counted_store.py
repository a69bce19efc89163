"""A store that counts what it contains in the coordinator, for stores without counters of their own.

An object counts by its key and its content alone, so that a listing of the store can count it again
(`recount.py`). A write first adds what it changes to the totals, unless they would then exceed a limit, in
one step of the coordinator: two writers cannot exceed a limit together. What it added is taken back if the
write fails.
"""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import ClassVar, Final, Self

from pysync import _core
from pysync.cache import BoundedCache
from pysync.coordinator import UsageTotals
from pysync.engine import history
from pysync.engine.accounts import Accounts
from pysync.engine.append_log.head import LogSettings
from pysync.engine.append_log.read import log_prefix
from pysync.errors import CoordinatorUnavailable, DocumentCorrupt, QuotaExceeded
from pysync.model import Addition, QuotaLimits, Usage
from pysync.protocol import JSON_TYPE
from pysync.store import (
    ABSENT,
    ANY,
    KINDS,
    NOTHING,
    Account,
    Charge,
    DamagedFile,
    Etag,
    MergeRecord,
    OnReceived,
    Precondition,
    Prepare,
    Store,
    StoredObject,
    Subject,
    SubjectKind,
    check_precondition,
    merge_journal,
)

MAX_CACHED: Final = 10_000
"""Number of objects whose amounts, and of logs whose keys, are cached."""
_LOGS: Final = log_prefix("")
_HISTORY: Final = f"{history.PREFIX}/"
_UNCHECKED: Final = Charge(checked=False)


class Amounts:
    """What the objects of a store count as. `added_bytes` is `Store.added_bytes`."""

    def __init__(self, accounts: Accounts, added_bytes: int) -> None:
        self.accounts: Final = accounts
        self._added_bytes = added_bytes

    def of_document(
        self, key: str, body: bytes, *, is_document: bool = False
    ) -> tuple[Usage, _core.LogHead | None]:
        """Return what a document, or an object of a log or a history, counts as, and its head if it is that
        of a log. `is_document`: it is none."""
        size = len(body) + self._added_bytes
        if key.startswith((_LOGS, _HISTORY)):
            return Usage(size), None
        if is_document:
            return Usage(size, 1), None
        collection = self.accounts.collection_of(key)
        if collection is None or collection.append_only is None:
            return Usage(size, 1), None
        try:
            head = _core.LogHead.read(body, LogSettings.from_collection(collection).field)
        except DocumentCorrupt:
            return Usage(size, 1), None
        return Usage(size, 0, head.count - head.start), head


def total_name(kind: str, name: str) -> str:
    """Return the name of a subject in the coordinator."""
    return f"{kind}:{name}"


def names_of(account: Account) -> dict[str, str]:
    """Return the names of an account's subjects in the coordinator, by their kinds."""
    return {kind: f"{kind}:{name}" for kind, name in zip(KINDS, account, strict=True) if name is not None}


class SharedLedger:
    """The `Ledger` of a store that is counted in the coordinator."""

    def __init__(self, totals: UsageTotals) -> None:
        self._totals = totals

    async def used(self, subjects: Iterable[Subject]) -> dict[Subject, Usage]:
        """See `Ledger.used`."""
        names = {subject: total_name(*subject) for subject in subjects}
        found = await self._totals.read([*names.values()])
        return {subject: _shown(found.get(name, NOTHING)) for subject, name in names.items()}

    async def largest(self, kind: SubjectKind, limit: int) -> list[tuple[str, Usage]]:
        """See `Ledger.largest`."""
        prefix = total_name(kind, "")
        found = await self._totals.read()
        mine = [
            (name[len(prefix) :], _shown(used)) for name, used in found.items() if name.startswith(prefix)
        ]
        return sorted(mine, key=lambda one: (-one[1].bytes, one[0]))[:limit]

    async def is_complete(self) -> bool:
        """See `Ledger.is_complete`."""
        return await self._totals.counted_ms() is not None


def _shown(used: Usage) -> Usage:
    """Return amounts without those below 0, which what was never counted leaves when it is deleted."""
    return Usage(*(max(0, amount) for amount in used))


class CountedStore:
    """A `CountingStore`: `store`, whose objects are counted in `totals`. Unconditional writes of one key at
    one time may be counted as if one had not been made; the next count corrects it."""

    transactional: ClassVar[None] = None

    def __init__(
        self,
        store: Store,
        totals: UsageTotals,
        limits: QuotaLimits,
        accounts: Accounts,
        now_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._totals = totals
        self._limits = limits
        self._now_ms = now_ms
        self._amounts = Amounts(accounts, store.added_bytes)
        self._known = BoundedCache[str, Usage](MAX_CACHED)
        self._keys_of_logs = BoundedCache[str, str](MAX_CACHED)
        self.ledger: Final = SharedLedger(totals)
        self.is_remote: Final = store.is_remote
        self.cheap_put_bytes: Final = store.cheap_put_bytes
        self.added_bytes: Final = store.added_bytes
        self.time_index: Final = store.time_index
        # What writes no object is the same.
        self.get: Final = store.get
        self.get_many: Final = store.get_many
        self.info_many: Final = store.info_many
        self.open: Final = store.open
        self.stat: Final = store.stat
        self.verify: Final = store.verify
        self.list: Final = store.list
        self.walk: Final = store.walk
        self.remove_leftovers: Final = store.remove_leftovers
        self.purge_deleted: Final = store.purge_deleted
        self.probe: Final = store.probe
        self.diagnose: Final = store.diagnose
        self.close: Final = store.close

    @property
    def counting(self) -> Self:
        """See `Store.counting`."""
        return self

    async def put(
        self,
        key: str,
        body: bytes,
        content_type: str = JSON_TYPE,
        expect: Precondition = ANY,
        charge: Charge | None = None,
        prepare: Prepare | None = None,
    ) -> str:
        """See `CountingStore.put`."""
        charge = charge or _UNCHECKED
        account = charge.account if charge.by_key else self._account(key, charge)
        if account is None:
            if prepare is not None:
                await prepare(None)
            return await self._store.put(key, body, content_type, expect)
        new = self._of_document(key, body, is_document=charge.by_key)
        old = NOTHING if expect == ABSENT else await self._before(key, expect)
        addition = self._addition(key, account, old, new, charge)
        try:
            if prepare is None:
                async with self._added(addition):
                    etag = await self._store.put(key, body, content_type, expect)
            else:
                await prepare(addition)
                etag = await self._store.put(key, body, content_type, expect)
        except QuotaExceeded:
            await self._check_precondition(key, expect)  # a conflict is told first
            raise
        self._known.put(etag, new)
        return etag

    async def write(
        self,
        key: str,
        chunks: AsyncIterable[bytes],
        content_type: str,
        received: OnReceived | None = None,
        charge: Charge | None = None,
    ) -> str:
        """See `CountingStore.write`."""
        charge = charge or _UNCHECKED
        account = self._account(key, charge)
        size = 0

        async def measured() -> AsyncIterator[bytes]:
            nonlocal size
            async for chunk in chunks:
                size += len(chunk)
                yield chunk

        async with AsyncExitStack() as added:

            async def reserve(sha256: str) -> None:
                if account is not None:
                    new, old = Usage(size, 0, 0, 1), await self._before(key, ANY)
                    addition = self._addition(key, account, old, new, charge)
                    await added.enter_async_context(self._added(addition))
                if received is not None:
                    await received(sha256)

            return await self._store.write(key, measured(), content_type, reserve)

    async def delete(self, key: str, expect: Precondition = ANY) -> None:
        """See `Store.delete`."""
        account = self._account(key, _UNCHECKED)
        old = NOTHING if account is None else await self._before(key, expect)
        await self._store.delete(key, expect)
        if account is not None and old != NOTHING:
            await self._totals.add(Addition(key, names_of(account), NOTHING.minus(old)))

    async def merge(
        self, key: str, chunks: AsyncIterable[bytes], content_type: str, merged: Mapping[str, str]
    ) -> str:
        """See `Store.merge`."""
        return await merge_journal.merge(self, key, chunks, content_type, merged, self._now_ms)

    async def pending_merges(self) -> "list[MergeRecord]":
        """See `Store.pending_merges`."""
        return await merge_journal.pending_merges(self)

    async def recover_merges(self) -> None:
        """See `Store.recover_merges`."""
        await merge_journal.recover(self, self._now_ms)

    def _account(self, key: str, charge: Charge) -> Account | None:
        """Return the account of an object, by its key or, for one of a log, by that of the log; None if it
        counts for nobody. An object of a log that this process has not seen counts from the next count on."""
        if key.startswith(_LOGS):
            id_ = key[len(_LOGS) :].partition("/")[0]
            if charge.key:
                self._keys_of_logs.put(id_, charge.key)
            log_key = self._keys_of_logs.get(id_)
            return None if log_key is None else self._amounts.accounts.charge_of(log_key).account
        return self._amounts.accounts.charge_of(key).account

    def _of_document(self, key: str, body: bytes, *, is_document: bool = False) -> Usage:
        amounts, head = self._amounts.of_document(key, body, is_document=is_document)
        if head is not None:
            for id_ in filter(None, (head.id, head.previous)):
                self._keys_of_logs.put(id_, key)
        return amounts

    async def _before(self, key: str, expect: Precondition) -> Usage:
        """Return what a write with this precondition replaces, unless the precondition fails."""
        if expect == ABSENT:
            return NOTHING
        if isinstance(expect, Etag) and (known := self._known.get(expect.value)) is not None:
            return known
        found = await self._store.get(key)
        if isinstance(found, StoredObject):
            return self._of_document(key, found.body)
        try:
            stat = await self._store.stat(key)
        except DamagedFile:
            return Usage(files=1)
        return NOTHING if stat is None else Usage(stat.size, 0, 0, 1)

    async def _check_precondition(self, key: str, expect: Precondition) -> None:
        found = await self._store.get(key)
        if isinstance(found, StoredObject):
            check_precondition(expect, found.etag)
        else:
            stat = await self._store.stat(key)
            check_precondition(expect, None if stat is None else stat.etag)

    def _addition(
        self, key: str, account: Account, old: Usage, new: Usage, charge: Charge
    ) -> Addition | None:
        """Return what a write adds that replaces `old` by `new`; None for nothing."""
        if new == old:
            return None
        more = new if old is NOTHING else new.minus(old)
        return Addition(key, names_of(account), more, self._limits if charge.checked else {})

    @asynccontextmanager
    async def _added(self, addition: Addition | None) -> AsyncIterator[None]:
        """Enclose a write that adds to the totals. Raises QuotaExceeded."""
        in_count = addition is not None and await self._totals.add(addition)
        try:
            yield
        except BaseException:
            if addition is not None:
                with suppress(CoordinatorUnavailable):
                    await asyncio.shield(self._totals.add(addition.reverse(in_count=in_count)))
            raise
