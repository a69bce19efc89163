"""The background count of a store that is counted in the coordinator: lists everything, and corrects the
totals. They are off by what was in flight at a crash, by what others wrote who do not count, and by what is
written while the page of the listing is read that contains it."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final

from pysync.config import Collection
from pysync.coordinator import Coordinator
from pysync.engine import history
from pysync.engine.accounts import Accounts
from pysync.engine.append_log.read import log_prefix
from pysync.engine.counted_store import Amounts, names_of
from pysync.model import Usage
from pysync.store import NOTHING, Account, DamagedFile, ListEntry, Store, StoredObject

log = logging.getLogger("pysync.server")

RECOUNT_MS: Final = 86_400_000
"""Milliseconds from the end of a count to the next. A count of a bucket lists all of it, and reads the heads
of its logs twice."""
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
        coordinator: Coordinator,
        accounts: Accounts,
        now_ms: Callable[[], int],
        stores_files: Callable[[Collection], bool | None],
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._totals = coordinator.usage
        self._accounts = accounts
        self._amounts = Amounts(accounts, store.added_bytes)
        self._now_ms = now_ms
        self._stores_files = stores_files
        self._accounts_of_logs: dict[str, Account | None] = {}

    async def run_if_needed(self) -> None:
        """Count if nothing was counted, or the last count is old. Raises Unavailable."""
        counted_ms = await self._totals.counted_ms()
        if counted_ms is None or counted_ms + RECOUNT_MS <= self._now_ms():
            await self.run()

    async def run(self) -> None:
        """Count, unless another process does. Raises Unavailable."""
        with suppress(_NotLeader):
            await self._run()

    async def _run(self) -> None:
        await self._lead()
        token, page, counted = secrets.token_hex(8), list[ListEntry](), 0
        self._accounts_of_logs = {id_: account async for id_, account in self._logs()}
        await self._totals.begin_count(token)
        async for listed in self._store.walk(""):
            page.append(listed)
            if len(page) == PAGE:
                await self._count(token, page)
                counted, page = counted + PAGE, []
        if page:
            await self._count(token, page)
        if await self._totals.end_count(token, self._now_ms()):
            log.info("counted %d stored objects for the quotas", counted + len(page))

    async def _lead(self) -> None:
        """Renew the lease. Raises _NotLeader if another process holds it."""
        if not await self._coordinator.acquire_lease(LEASE):
            raise _NotLeader

    async def _count(self, token: str, page: list[ListEntry]) -> None:
        await self._lead()
        more: dict[str, Usage] = {}
        for listed in page:
            account = self._account(listed.key)
            if account is not None:
                amounts = await self._amounts_of(listed)
                for name in names_of(account).values():
                    more[name] = more.get(name, NOTHING).plus(amounts)
        await asyncio.sleep(0)
        if not await self._totals.count(token, page[-1].key, more):
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
            return await self._of_document(listed.key)
        is_file = self._stores_files(collection)
        if is_file is None:
            try:
                is_file = await self._store.stat(listed.key) is not None
            except DamagedFile:
                is_file = True
        return Usage(size, files=1) if is_file else Usage(size, documents=1)

    async def _of_document(self, key: str) -> Usage:
        found = await self._store.get(key)
        return self._amounts.of_document(key, found.body)[0] if isinstance(found, StoredObject) else NOTHING

    async def _logs(self) -> AsyncIterator[tuple[str, Account | None]]:
        """Yield the ids and accounts of all logs."""
        for prefix in self._accounts.log_prefixes():
            async for listed in self._store.walk(prefix):
                collection = self._accounts.collection_of(listed.key)
                if collection is not None and collection.append_only is not None:
                    await self._lead()
                    found = await self._store.get(listed.key)
                    if isinstance(found, StoredObject):
                        _, head = self._amounts.of_document(listed.key, found.body)
                        for id_ in () if head is None else (head.id, head.previous):
                            if id_:
                                yield id_, self._accounts.charge_of(listed.key).account
