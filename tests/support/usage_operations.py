"""Random operations on a local store that tracks usage, beside one that does not know whom it counts for."""

import asyncio
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Final

from contracts.files import chunks_of

from pysync.errors import KeyConflict, QuotaExceeded, StoreUnavailable
from pysync.model import Usage
from pysync.store import (
    ABSENT,
    ANY,
    Account,
    Charge,
    CountedRow,
    Etag,
    EtagMismatch,
    MergeRejected,
    Precondition,
    Write,
)
from pysync.store.local import LocalStore

TYPE: Final = "application/json"
PEOPLE: Final = ("anna", "ben", "carla")
AT_ONCE: Final = 16

Counts = dict[tuple[str, str], Usage]


def account_of(identity: str) -> Account:
    return Account("", "notes", identity, f"space-{identity}", "issuer")


def charge_of(key: str) -> Charge:
    """What an object counts as that nobody is known to have written: for whom its key names, if anyone."""
    identity = key.split("/")[1] if key.startswith("notes/") else ""
    return Charge(account_of(identity) if identity in PEOPLE else None, checked=False)


async def open_store(
    folder: Path, most: float = inf, files: float = inf, elements: float = inf
) -> LocalStore:
    store = await LocalStore.open_folder(folder)
    await store.track_usage({"identity": (most, inf, elements, files)}, charge_of)
    return store


async def count_all(store: LocalStore) -> None:
    """Count what is not counted, as a service does."""
    ledger = store.ledger
    assert ledger is not None
    await ledger.begin_count()
    after: int | None = 0
    while after is not None:
        rows, after = ledger.uncounted(after)
        await ledger.count([CountedRow(row, charge_of(row.key)) for row in rows])
    await ledger.end_count()


def stored(folder: Path) -> tuple[Counts, Counts]:
    """What the counters say, and the sums over all objects that are counted."""
    with closing(sqlite3.connect(folder / "pysync.db")) as database:
        rows = database.execute("SELECT kind, name, bytes, documents, elements, files FROM usage").fetchall()
        counters = {(kind, name): Usage(*amounts) for kind, name, *amounts in rows}
        sums: Counter[tuple[tuple[str, str], int]] = Counter()
        for kind, name, *amounts in database.execute("""
            SELECT kind, usage.name, coalesce(length(body), object.size),
                sha256 IS NULL AND object.elements IS NULL, coalesce(object.elements, 0), sha256 IS NOT NULL
            FROM object JOIN charge ON charge.owner = object.owner JOIN usage ON usage.id = charge.usage
        """):
            sums.update({((kind, name), at): amount for at, amount in enumerate(amounts)})
    expected = {subject: Usage(*(sums[subject, at] for at in range(4))) for subject in counters}
    return counters, expected


class Operations:
    """Operations of one process on a folder. They conflict, fail and exceed quotas at random."""

    def __init__(self, counting: LocalStore, other: LocalStore, seed: int) -> None:
        self._counting = counting
        self._other = other
        self._random = random.Random(seed)
        self._etags: dict[str, str] = {}

    async def run(self, operations: int) -> None:
        for _ in range(0, operations, AT_ONCE):
            await asyncio.gather(*(self._one() for _ in range(AT_ONCE)))

    async def _one(self) -> None:
        try:
            await self._try_one()
        except (EtagMismatch, KeyConflict, QuotaExceeded, MergeRejected):
            self._etags.clear()

    async def _try_one(self) -> None:
        choose = self._random
        owner, writer = choose.choice(PEOPLE), choose.choice(PEOPLE)
        key = f"notes/{owner}/{choose.randrange(12)}"
        body = b"x" * choose.choice((10, 100, 1000, 9000))
        account = account_of(owner if choose.random() < 0.7 else writer)
        charge = choose.choice((None, Charge(account), Charge(account, choose.randrange(9)), Charge()))
        action = choose.randrange(20)
        if action < 9:
            known = self._etags.get(key)
            choices: list[Precondition] = [ABSENT, ANY, ANY if known is None else Etag(known)]
            expect = choose.choice(choices)
            self._etags[key] = await self._counting.commit(Write(key, body, expect, charge=charge))
        elif action < 11:
            await self._counting.delete(key)
        elif action < 14:
            await self._counting.write(key, chunks_of(body), TYPE, charge=charge)
        elif action < 16:
            await self._other.put(key, body)
        elif action == 16:
            await self._other.write(key, chunks_of(body), TYPE)
        elif action == 17:
            await self._other.delete(key)
        elif action == 18:
            await count_all(self._counting)
        else:
            await self._merge(f"notes/{owner}", body)

    async def _merge(self, folder: str, body: bytes) -> None:
        store = self._random.choice((self._counting, self._other))
        names = await store.list(folder, None, 100)
        found = {f"{folder}/{name}": await store.stat(f"{folder}/{name}") for name in names}
        merged = {key: stat.sha256 for key, stat in found.items() if stat is not None}
        if merged:
            await store.merge(f"{folder}/m{self._random.random()}", chunks_of(body), TYPE, merged)


async def operate(folder: Path, seed: int, operations: int) -> None:
    """Run operations in this process. Half of the time it is killed among them."""
    counting, other = await open_store(folder, 30_000), await LocalStore.open_folder(folder)
    running = asyncio.create_task(Operations(counting, other, seed).run(operations))
    if seed % 2:
        choose = random.Random(seed)
        for _ in range(choose.randrange(operations)):
            await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        await running
    except StoreUnavailable as error:
        raise SystemExit(f"{error} {error.__cause__!r}") from error
    await count_all(counting)
    await other.close()
    await counting.close()


if __name__ == "__main__":
    asyncio.run(operate(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
