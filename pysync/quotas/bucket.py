"""A store that counts what it contains, for stores without counters of their own: a bucket, or memory.

An object counts by its key and its content alone, so that a listing of the store can count it. One process
lists everything now and then, and stores the totals (`recount.py`):

    _pysync/usage    {"countedMs": time of the count, "totals": {"kind:name": [amounts as in `Usage`]}}

Each process rejects writes by these totals and what it wrote itself since it read them.
"""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import ClassVar, Final, Self

import orjson

from pysync.cache import BoundedCache
from pysync.config.key_templates import RESERVED
from pysync.engine import history
from pysync.engine.append_log.read import log_id
from pysync.errors import QuotaExceeded
from pysync.model import QuotaLimits, Usage, check_limit
from pysync.protocol import JSON_TYPE
from pysync.quotas.accounts import Accounts
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
    NotModified,
    OnReceived,
    Precondition,
    Store,
    StoredObject,
    Subject,
    SubjectKind,
    Write,
    check_precondition,
    merge_journal,
)

KEY: Final = f"{RESERVED}/usage"
HISTORY: Final = f"{history.PREFIX}/"
_UNCHECKED: Final = Charge(checked=False)


def total_name(kind: str, name: str) -> str:
    """Return the name of a subject in the totals."""
    return f"{kind}:{name}"


def names_of(account: Account) -> dict[str, str]:
    """Return the names of an account's subjects in the totals, by their kinds."""
    return {kind: f"{kind}:{name}" for kind, name in zip(KINDS, account, strict=True) if name is not None}


class BucketLedger:
    """The `Ledger` of one process: the totals of the last count, and what this process wrote since."""

    def __init__(self, store: Store, limits: QuotaLimits) -> None:
        self._store = store
        self._limits = limits
        self._totals: dict[str, Usage] = {}
        self._etag: str | None = None
        self.counted_ms: int | None = None
        """The time of the last count; None if everything is to be counted."""

    async def read(self) -> Precondition:
        """Read the totals, if there are others than before. They replace what this process added. Returns the
        precondition of `replace`. Raises StoreUnavailable."""
        found = await self._store.get(KEY, self._etag)
        if not isinstance(found, NotModified):
            self._totals, self._etag, self.counted_ms = {}, None, None
            if found is not None:
                stored = orjson.loads(found.body)
                self._totals = {name: Usage(*amounts) for name, amounts in stored["totals"].items()}
                self._etag, self.counted_ms = found.etag, stored["countedMs"]
        return ABSENT if self._etag is None else Etag(self._etag)

    async def replace(self, totals: dict[str, Usage], expect: Precondition, counted_ms: int) -> None:
        """Store the totals of a count. Raises EtagMismatch and StoreUnavailable."""
        body = {"countedMs": counted_ms, "totals": {name: list(used) for name, used in totals.items()}}
        self._etag = await self._store.put(KEY, orjson.dumps(body), expect=expect)
        self._totals, self.counted_ms = totals, counted_ms

    def check(self, account: Account, more: Usage) -> None:
        """Raise QuotaExceeded if there is no room for `more`."""
        for kind, name in names_of(account).items():
            if kind in self._limits:
                check_limit(kind, self._limits[kind], self._totals.get(name, NOTHING), more)

    @contextmanager
    def added(self, account: Account, more: Usage, *, is_checked: bool) -> Iterator[None]:
        """Enclose a write that adds `more`. Raises QuotaExceeded if it `is_checked` and there is no room."""
        totals, names = self._totals, names_of(account)
        if is_checked:
            self.check(account, more)
        _add(totals, names, more)
        try:
            yield
        except BaseException:
            _add(totals, names, NOTHING.minus(more))
            raise

    async def used(self, subjects: Iterable[Subject]) -> dict[Subject, Usage]:
        """See `Ledger.used`."""
        return {subject: _shown(self._totals.get(total_name(*subject), NOTHING)) for subject in subjects}

    async def largest(self, kind: SubjectKind, limit: int) -> list[tuple[str, Usage]]:
        """See `Ledger.largest`."""
        prefix = total_name(kind, "")
        mine = [
            (name[len(prefix) :], _shown(used))
            for name, used in self._totals.items()
            if name.startswith(prefix) and used != NOTHING
        ]
        return sorted(mine, key=lambda one: (-one[1].bytes, one[0]))[:limit]

    async def is_complete(self) -> bool:
        """See `Ledger.is_complete`."""
        return self.counted_ms is not None


async def forget_subject(store: Store, subject: Subject) -> None:
    """Remove a subject from the stored totals, and have everything counted again. A count that is under way
    is not stored. Raises StoreUnavailable."""
    found = await store.get(KEY)
    if isinstance(found, StoredObject) or store.counting is not None:
        totals = orjson.loads(found.body)["totals"] if isinstance(found, StoredObject) else {}
        totals.pop(total_name(*subject), None)
        await store.put(KEY, orjson.dumps({"countedMs": None, "totals": totals}))


def _add(totals: dict[str, Usage], names: Mapping[str, str], more: Usage) -> None:
    for name in names.values():
        totals[name] = totals.get(name, NOTHING).plus(more)


def _shown(used: Usage) -> Usage:
    """Return amounts without those below 0, which what was never counted leaves when it is deleted."""
    return Usage(*(max(0, amount) for amount in used))


class CountedStore:
    """A `CountingStore`: `store`, whose objects are counted in `ledger`. Unconditional writes of one key at
    one time may be counted as if one had not been made; the next count corrects it."""

    transactional: ClassVar[None] = None

    def __init__(
        self,
        store: Store,
        ledger: BucketLedger,
        accounts: Accounts,
        now_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self.ledger: Final = ledger
        self._now_ms = now_ms
        self._accounts = accounts
        self._known = BoundedCache[str, Usage]()
        self._keys_of_logs = BoundedCache[str, str]()
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

    async def check_room(self, write: Write) -> None:
        """See `CountingStore.check_room`."""
        charge = write.charge or _UNCHECKED
        account = self._account(write.key, charge)
        if write.body is None or account is None or not charge.checked:
            return
        more = self._of_document(write.key, write.body).minus(await self._before(write.key, write.expect))
        segments = Usage(sum(len(segment.body) + self.added_bytes for segment in write.segments))
        try:
            self.ledger.check(account, more.plus(segments))
        except QuotaExceeded:
            await self._check_precondition(write.key, write.expect)
            raise

    async def put(
        self,
        key: str,
        body: bytes,
        content_type: str = JSON_TYPE,
        expect: Precondition = ANY,
        charge: Charge | None = None,
    ) -> str:
        """See `CountingStore.put`."""
        charge = charge or _UNCHECKED
        account = self._account(key, charge)
        if account is None:
            return await self._store.put(key, body, content_type, expect)
        new = self._of_document(key, body)
        more = new.minus(await self._before(key, expect))
        try:
            with self.ledger.added(account, more, is_checked=charge.checked):
                etag = await self._store.put(key, body, content_type, expect)
        except QuotaExceeded:
            await self._check_precondition(key, expect)  # a conflict is reported first
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

        with ExitStack() as added:

            async def add(sha256: str) -> None:
                if account is not None:
                    more = Usage(size, 0, 0, 1).minus(await self._before(key, ANY))
                    added.enter_context(self.ledger.added(account, more, is_checked=charge.checked))
                if received is not None:
                    await received(sha256)

            return await self._store.write(key, measured(), content_type, add)

    async def delete(self, key: str, expect: Precondition = ANY) -> None:
        """See `Store.delete`."""
        account = self._account(key, _UNCHECKED)
        if account is None:
            await self._store.delete(key, expect)
            return
        more = NOTHING.minus(await self._before(key, expect))
        with self.ledger.added(account, more, is_checked=False):
            await self._store.delete(key, expect)

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
        if id_ := log_id(key):
            if charge.key:
                self._keys_of_logs.put(id_, charge.key)
            log_key = self._keys_of_logs.get(id_)
            return None if log_key is None else self._accounts.charge_of(log_key).account
        return self._accounts.charge_of(key).account

    def _of_document(self, key: str, body: bytes) -> Usage:
        """Return what an object that is no file counts as."""
        size = len(body) + self.added_bytes
        if log_id(key) or key.startswith(HISTORY):
            return Usage(size)
        head = self._accounts.head_of(key, body)
        if head is None:
            return Usage(size, 1)
        for id_ in filter(None, (head.id, head.previous)):
            self._keys_of_logs.put(id_, key)
        return Usage(size, 0, head.count - head.start)

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
