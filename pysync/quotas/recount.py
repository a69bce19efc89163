"""The background count of a bucket: one process lists everything, and stores the totals for all others."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from pysync.config import Collection
from pysync.coordinator import Coordinator
from pysync.engine import history
from pysync.engine.append_log.read import log_prefix
from pysync.model import Usage
from pysync.quotas.accounts import Accounts
from pysync.quotas.bucket import Amounts, BucketLedger, names_of
from pysync.store import NOTHING, Account, DamagedFile, EtagMismatch, ListEntry, Store, StoredObject

log = logging.getLogger("pysync.server")

RECOUNT_MS: Final = 3_600_000
"""Milliseconds from the end of a count to the next. A count of a bucket lists all of it, and reads the heads
of its logs."""
PAGE: Final = 200
"""Number of listed objects that are counted at a time."""
LEASE: Final = "usage"
_LOGS: Final = log_prefix("")
_HISTORY: Final = f"{history.PREFIX}/"


class _NotLeader(Exception):
    """Another process counts now."""


class Recount:
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
        self._amounts = Amounts(accounts, store.added_bytes)
        self._now_ms = now_ms
        self._stores_files = stores_files
        self._accounts_of_logs: dict[str, Account | None] = {}
        self._heads: dict[str, Usage] = {}

    async def run_if_needed(self) -> None:
        """Read the last totals, and count if there are none or they are old. Raises Unavailable."""
        await self._ledger.read()
        counted_ms = self._ledger.counted_ms
        if counted_ms is None or counted_ms + RECOUNT_MS <= self._now_ms():
            await self.run()

    async def run(self) -> None:
        """Count, unless another process does. Raises Unavailable."""
        with suppress(_NotLeader, EtagMismatch):
            await self._run()

    async def _run(self) -> None:
        await self._lead()
        before = await self._ledger.read()
        await self._read_logs()
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
        if key.startswith(_LOGS):
            return self._accounts_of_logs.get(key[len(_LOGS) :].partition("/")[0])
        return self._accounts.charge_of(key).account

    async def _amounts_of(self, listed: ListEntry) -> Usage:
        """Return what a listed object counts as."""
        size = listed.size or 0
        if listed.key.startswith((_LOGS, _HISTORY)):
            return Usage(size)
        collection = self._accounts.collection_of(listed.key)
        if collection is None:
            return NOTHING
        if collection.append_only is not None:
            return self._heads.get(listed.key, NOTHING)
        is_file = self._stores_files(collection)
        if is_file is None:
            try:
                is_file = await self._store.stat(listed.key) is not None
            except DamagedFile:
                is_file = True
        return Usage(size, files=1) if is_file else Usage(size, documents=1)

    async def _read_logs(self) -> None:
        """Read the heads of all logs: what they count as, and the accounts of their parts."""
        self._accounts_of_logs, self._heads = {}, {}
        for prefix in self._accounts.log_prefixes():
            async for listed in self._store.walk(prefix):
                collection = self._accounts.collection_of(listed.key)
                if collection is not None and collection.append_only is not None:
                    await self._lead()
                    found = await self._store.get(listed.key)
                    if isinstance(found, StoredObject):
                        self._heads[listed.key], head = self._amounts.of_document(listed.key, found.body)
                        for id_ in () if head is None else (head.id, head.previous):
                            if id_:
                                self._accounts_of_logs[id_] = self._accounts.charge_of(listed.key).account
