"""The journal of erasures, which names a request before anything of it is erased.

_pysync/erase/<id>          {"v":1,"request":{..}} while objects are deleted, and then
                            {"v":1,"report":{..}}, without names, while deleted bytes are removed
_pysync/erase/<id>/<n>      the plan of the n-th page of keys, kept until all objects are deleted
"""

import secrets
from collections.abc import AsyncIterator
from typing import Any, Final

import orjson

from pysync.erase.plan import ErasePlan, EraseReport
from pysync.erase.request import EraseRequest
from pysync.store import Store, StoredObject

PREFIX: Final = "_pysync/erase"


class JournalEntry:
    """An unfinished erasure. `request` is None once only deleted bytes remain to be removed; `report` has
    what was erased until then."""

    def __init__(self, store: Store, id_: str, request: EraseRequest | None, report: EraseReport) -> None:
        self.request = request
        self.report = report
        self._store = store
        self._key = f"{PREFIX}/{id_}"
        self._next = 0

    @classmethod
    async def begin(cls, store: Store, request: EraseRequest) -> "JournalEntry":
        """Store a new entry, and return it."""
        entry = cls(store, secrets.token_hex(16), request, EraseReport())
        await entry._put({"request": request.members})
        return entry

    async def add_plan(self, plan: ErasePlan) -> None:
        """Store a plan, which is carried out next."""
        await self._store.put(f"{self._key}/{self._next:08d}", plan.encode())
        self._next += 1

    async def plans(self) -> AsyncIterator[ErasePlan]:
        """Yield the stored plans, in the order in which they were made. Call it before `add_plan` if another
        process has made some."""
        keys = await self._plan_keys()
        self._next = max([self._next, *(int(key.rpartition("/")[2]) + 1 for key in keys)])
        for key in keys:
            found = await self._store.get(key)
            if isinstance(found, StoredObject):
                yield ErasePlan.decode(found.body)

    async def end_deletion(self, report: EraseReport) -> None:
        """Replace all names by the report."""
        await self._put({"report": report.encode()})
        await self.delete_plans()
        self.request, self.report = None, report

    async def delete_plans(self) -> None:
        """Delete the stored plans."""
        for key in await self._plan_keys():
            await self._store.delete(key)

    async def delete(self) -> None:
        """Delete the entry: nothing remains to be done."""
        await self._store.delete(self._key)

    async def _put(self, members: dict[str, Any]) -> None:
        await self._store.put(self._key, orjson.dumps({"v": 1} | members))

    async def _plan_keys(self) -> list[str]:
        return sorted([listed.key async for listed in self._store.walk(self._key)])


async def unfinished(store: Store) -> list[JournalEntry]:
    """Return the erasures that a crash left unfinished, and those under way."""
    entries = []
    async for listed in store.walk(PREFIX):
        name = listed.key.removeprefix(f"{PREFIX}/")
        found = None if "/" in name else await store.get(listed.key)  # the others are plans
        if isinstance(found, StoredObject):
            members = orjson.loads(found.body)
            request = EraseRequest.parse(members["request"]) if "request" in members else None
            report = EraseReport.parse(members["report"]) if "report" in members else EraseReport()
            entries.append(JournalEntry(store, name, request, report))
    return entries
