"""Background counts of what is stored: in a folder of what is not counted yet, in a bucket of everything."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from pysync import _core
from pysync.config import Collection, Config
from pysync.coordinator import Coordinator
from pysync.engine.append_log.read import log_id
from pysync.model import Usage
from pysync.plugins.hooks import Hooks
from pysync.quotas.accounts import NOBODY, Accounts
from pysync.quotas.bucket import HISTORY, BucketLedger, CountedStore, names_of
from pysync.store import (
    NOTHING,
    RELIST_MS,
    Account,
    Charge,
    CountableLedger,
    CountedRow,
    DamagedFile,
    EtagMismatch,
    ListEntry,
    Store,
    StoredObject,
    UncountedRow,
)

log = logging.getLogger("pysync.server")

PAGE: Final = 200
"""Number of listed objects that are counted at a time."""
LEASE: Final = "usage"


class Tracked(NamedTuple):
    """The store to use, and without quotas nothing else: the accounts, and the count that runs now and
    then."""

    store: Store
    accounts: Accounts | None = None
    counter: "UsageCounter | None" = None


async def track_usage(
    config: Config,
    store: Store,
    coordinator: Coordinator,
    plugins: Sequence[object],
    now_ms: Callable[[], int],
) -> Tracked:
    """Switch the counters of a folder on if the configuration has quotas, else off. Other stores are counted
    in this process. Raises StoreUnavailable."""
    transactional = store.transactional
    if config.quotas is None:
        if transactional is not None:
            await transactional.stop_tracking_usage()
        return Tracked(store)
    stored = Hooks(plugins).stored_files
    files = {name: (each.template, each.suffix) for name, each in stored.items()}
    accounts = Accounts(config, files, by_key=transactional is None)
    limits = config.quotas.limits()
    if transactional is not None:
        await transactional.track_usage(limits, accounts.charge_of)
        ledger = transactional.ledger
        assert ledger is not None
        return Tracked(store, accounts, FolderCount(store, ledger, accounts))

    def stores_files(collection: Collection) -> bool | None:
        if collection.name in stored:
            return True
        return (None if collection.accepts_json else True) if collection.file_types else False

    bucket_ledger = BucketLedger(store, limits)
    await bucket_ledger.read()
    counter = BucketCount(store, bucket_ledger, coordinator, accounts, now_ms, stores_files)
    return Tracked(CountedStore(store, bucket_ledger, accounts, now_ms), accounts, counter)


class FolderCount:
    """Counts the objects of a local store that are not counted, while the service runs: those from before it
    had quotas, and those of processes that do not know whom they count for."""

    def __init__(self, store: Store, ledger: CountableLedger, accounts: Accounts) -> None:
        self._store = store
        self._ledger = ledger
        self._accounts = accounts
        self._accounts_of_logs: dict[str, Account | None] | None = None

    async def run_if_needed(self) -> None:
        """Count what is not counted. Raises StoreUnavailable."""
        if await self._ledger.is_complete():
            return
        await self._ledger.begin_count()
        counted, after = 0, 0
        self._accounts_of_logs = None
        while True:
            rows, end = self._ledger.uncounted(after)
            if end is None:
                break
            await self._ledger.count([CountedRow(row, await self._charge(row)) for row in rows])
            counted, after = counted + len(rows), end
            await asyncio.sleep(0)
        await self._ledger.end_count()
        await self._ledger.prune()
        if counted:
            log.info("counted %d stored objects for the quotas", counted)

    async def _charge(self, row: UncountedRow) -> Charge:
        """Return what an object counts as."""
        if id_ := log_id(row.key):
            return NOBODY._replace(account=(await self._logs()).get(id_))
        charge = self._accounts.charge_of(row.key)
        head = None if row.is_file else await _read_head(self._store, self._accounts, row.key)
        return charge if head is None else charge._replace(elements=head.count - head.start)

    async def _logs(self) -> dict[str, Account | None]:
        """Return the accounts of all logs by their ids."""
        if self._accounts_of_logs is None:
            self._accounts_of_logs = {
                id_: self._accounts.charge_of(listed.key).account
                async for listed, head in _heads(self._store, self._accounts)
                for id_ in (head.id, head.previous)
                if id_
            }
        return self._accounts_of_logs


class _NotLeader(Exception):
    """Another process counts now."""


class BucketCount:
    """Counts everything in a store, in one process at a time. `stores_files(collection)` says whether the
    objects of a collection are files: True, False, or None if they may be either."""

    def __init__(
        self,
        store: Store,
        ledger: BucketLedger,
        coordinator: Coordinator,
        accounts: Accounts,
        now_ms: Callable[[], int],
        stores_files: Callable[[Collection], bool | None],
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._coordinator = coordinator
        self._accounts = accounts
        self._now_ms = now_ms
        self._stores_files = stores_files
        self._accounts_of_logs: dict[str, Account | None] = {}
        self._elements: dict[str, int] = {}

    async def run_if_needed(self) -> None:
        """Read the last totals, and count if there are none or they are old. Raises Unavailable."""
        await self._ledger.read()
        counted_ms = self._ledger.counted_ms
        if counted_ms is None or counted_ms + RELIST_MS <= self._now_ms():
            await self.run()

    async def run(self) -> None:
        """Count, unless another process does. Raises Unavailable."""
        with suppress(_NotLeader, EtagMismatch):
            await self._run()

    async def _run(self) -> None:
        await self._lead()
        before = await self._ledger.read()
        self._accounts_of_logs, self._elements = {}, {}
        async for listed, head in _heads(self._store, self._accounts):
            await self._lead()
            self._elements[listed.key] = head.count - head.start
            for id_ in filter(None, (head.id, head.previous)):
                self._accounts_of_logs[id_] = self._accounts.charge_of(listed.key).account
        totals, counted = dict[str, Usage](), 0
        async for listed in self._store.walk(""):
            if counted % PAGE == 0:
                await self._lead()
                await asyncio.sleep(0)
            counted += 1
            account = self._account(listed.key)
            if account is not None:
                amounts = await self._amounts_of(listed)
                for name in names_of(account).values():
                    totals[name] = totals.get(name, NOTHING).plus(amounts)
        await self._ledger.replace(totals, before, self._now_ms())
        log.info("counted %d stored objects for the quotas", counted)

    async def _lead(self) -> None:
        """Renew the lease. Raises _NotLeader if another process holds it."""
        if not await self._coordinator.acquire_lease(LEASE):
            raise _NotLeader

    def _account(self, key: str) -> Account | None:
        if id_ := log_id(key):
            return self._accounts_of_logs.get(id_)
        return self._accounts.charge_of(key).account

    async def _amounts_of(self, listed: ListEntry) -> Usage:
        """Return what a listed object counts as."""
        size = listed.size or 0
        if log_id(listed.key) or listed.key.startswith(HISTORY):
            return Usage(size)
        collection = self._accounts.collection_of(listed.key)
        if collection is None:
            return NOTHING
        if collection.append_only is not None:
            elements = self._elements.get(listed.key)
            return Usage(size, 1) if elements is None else Usage(size, 0, elements)
        is_file = self._stores_files(collection)
        if is_file is None:
            try:
                is_file = await self._store.stat(listed.key) is not None
            except DamagedFile:
                is_file = True
        return Usage(size, files=1) if is_file else Usage(size, documents=1)


async def _heads(store: Store, accounts: Accounts) -> AsyncIterator[tuple[ListEntry, _core.LogHead]]:
    """Yield the heads of all logs. Damaged ones are left out."""
    for prefix in accounts.log_prefixes():
        async for listed in store.walk(prefix):
            head = await _read_head(store, accounts, listed.key)
            if head is not None:
                yield listed, head


async def _read_head(store: Store, accounts: Accounts, key: str) -> _core.LogHead | None:
    """Return the head of the log at a key; None if it is no log's, or the head is damaged."""
    if not accounts.is_log(key):
        return None
    found = await store.get(key)
    return accounts.head_of(key, found.body) if isinstance(found, StoredObject) else None


UsageCounter = FolderCount | BucketCount
