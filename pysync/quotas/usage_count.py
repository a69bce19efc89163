"""Counts what was stored before usage was tracked, or by a process that does not know whom it counts for."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Final

from pysync import _core
from pysync.config import Collection
from pysync.engine.append_log import LogSettings
from pysync.engine.append_log.read import log_prefix
from pysync.errors import DocumentCorrupt
from pysync.quotas.accounts import NOBODY, Accounts
from pysync.store import Account, Charge, CountableLedger, CountedRow, Store, StoredObject, UncountedRow

log = logging.getLogger("pysync.server")

_LOGS: Final = log_prefix("")


class UsageCount:
    """Counts the objects of a local store that are not counted, while the service runs."""

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
        if row.key.startswith(_LOGS):
            log_id = row.key.removeprefix(_LOGS).partition("/")[0]
            return NOBODY._replace(account=(await self._logs()).get(log_id))
        charge, collection = self._accounts.charge_of(row.key), self._accounts.collection_of(row.key)
        if row.is_file or collection is None or collection.append_only is None:
            return charge
        head = await self._head(row.key, collection)
        return charge if head is None else charge._replace(elements=head.count - head.start)

    async def _logs(self) -> dict[str, Account | None]:
        """Return the accounts of all logs by their ids."""
        if self._accounts_of_logs is None:
            self._accounts_of_logs = {
                id_: self._accounts.charge_of(key).account
                async for key, head in self._heads()
                for id_ in (head.id, head.previous)
                if id_
            }
        return self._accounts_of_logs

    async def _heads(self) -> AsyncIterator[tuple[str, _core.LogHead]]:
        for prefix in self._accounts.log_prefixes():
            async for listed in self._store.walk(prefix):
                collection = self._accounts.collection_of(listed.key)
                if collection is not None and collection.append_only is not None:
                    head = await self._head(listed.key, collection)
                    if head is not None:
                        yield listed.key, head

    async def _head(self, key: str, collection: Collection) -> _core.LogHead | None:
        """Return the head of a log; None if there is none, or it is damaged."""
        found = await self._store.get(key)
        if not isinstance(found, StoredObject):
            return None
        try:
            return _core.LogHead.read(found.body, LogSettings.from_collection(collection).field)
        except DocumentCorrupt:
            return None
