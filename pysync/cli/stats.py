"""The commands that look into a store without a server: `pysync stats` and `pysync get`."""

import argparse
import heapq
import sys
from collections import defaultdict
from functools import reduce
from typing import Final

import orjson

from pysync import _core
from pysync.cli.io import MissingDocument, print_json, print_lines
from pysync.cli.parser import Parser, add_config
from pysync.cli.stores import check_store, load_config
from pysync.concurrency import closing
from pysync.config import Collection, Config
from pysync.config.key_templates import RESERVED
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import AppendLogs, LogSettings
from pysync.engine.append_log.read import LogRange, log_prefix
from pysync.errors import DocumentCorrupt
from pysync.model import Usage
from pysync.plugins.events import events_of
from pysync.quotas.accounts import Accounts
from pysync.store import ListEntry, Store, StoredObject, open_store

_OTHER: Final = "other"
"""What belongs to no collection."""


def add_stats(parser: Parser) -> None:
    """Add the arguments of `pysync stats`."""
    parser.describe(
        stats,
        description="Lists all objects of the store, which takes a while if there are many; servers may run "
        "meanwhile. With a configuration the result is by collection, and otherwise by the first segment of "
        "keys. `other` is what belongs to no collection, and `_pysync` the server's own.",
        example="pysync stats --config pysync.json -n 20\npysync stats --store file:./data",
    )
    add_config(parser)
    parser.add_value("--store", "URL", "file:DIR or s3://BUCKET/PREFIX, in place of the configuration's")
    parser.add_value("-n", "N", "number of the largest objects to print (default: 10)", type=int, default=10)


def add_get(parser: Parser) -> None:
    """Add the arguments of `pysync get`."""
    parser.describe(
        get,
        description="Reads the store that the configuration names; servers may run meanwhile. Prints a "
        "document with its hash and time, the elements of a log, one a line, and a file as it is. "
        "The exit status is 6 if nothing is stored.",
        example="pysync get --config pysync.json notes/n1",
    )
    parser.add_value("key", "KEY", "the key: path after /pull/")
    add_config(parser)
    parser.add_value("--store", "URL", "file:DIR or s3://BUCKET/PREFIX, in place of the configuration's")


async def stats(options: argparse.Namespace) -> None:
    """Run `pysync stats`."""
    if options.n < 0:
        raise ValueError("-n must be 0 or more")
    settings = load_config(options, "store")
    check_store(settings, "there is nothing to read")
    async with closing(open_store(settings.store)) as store:
        found = StoreStats(store, settings, options.n)
        await found.collect()
    parts = "collections" if settings.collections or settings.namespaces else "prefixes"
    total = reduce(Usage.plus, found.used.values(), Usage())
    used = {name: amounts.as_json() for name, amounts in sorted(found.used.items())}
    largest = [{"key": key, "bytes": size} for size, key in found.largest()]
    print_json({parts: used, "total": total.as_json(), "largest": largest})


class StoreStats:
    """The usage of each collection of a store, and its largest documents, logs and files. `used` is by the
    name of the collection, or without a configuration by the first segment of keys."""

    def __init__(self, store: Store, settings: Config, count: int) -> None:
        self.used: dict[str, Usage] = defaultdict(Usage)
        self._store = store
        self._has_collections = bool(settings.collections or settings.namespaces)
        self._accounts = accounts_of(settings)
        self._count = count
        self._largest: list[tuple[int, str]] = []
        self._log_bytes: dict[str, int] = defaultdict(int)

    async def collect(self) -> None:
        """List the whole store. Raises StoreUnavailable."""
        logs = log_prefix("")
        heads: list[tuple[ListEntry, Collection]] = []
        async for listed in self._store.walk(""):
            collection = self._accounts.collection_of(listed.key)
            if self._has_collections and listed.key.startswith(logs):
                id_ = listed.key.removeprefix(logs).partition("/")[0]
                self._log_bytes[id_] += await self._size(listed)
            elif collection is not None and collection.append_only is not None:
                heads.append((listed, collection))
            else:
                await self._add_object(listed, collection)
        for listed, collection in heads:
            await self._add_log(listed, collection)
        lost = sum(self._log_bytes.values())  # of logs that are being deleted
        if lost:
            self._add(RESERVED, Usage(lost))

    def largest(self) -> list[tuple[int, str]]:
        """Return the sizes and keys of the largest objects, the largest first."""
        return sorted(self._largest, key=lambda each: (-each[0], each[1]))

    async def _add_object(self, listed: ListEntry, collection: Collection | None) -> None:
        size = await self._size(listed)
        is_file = await self._is_file(listed.key, collection)
        self._add(self._name(listed.key), Usage(size, int(not is_file), 0, int(is_file)))
        self._note(size, listed.key)

    async def _add_log(self, listed: ListEntry, collection: Collection) -> None:
        size, elements = await self._size(listed), 0
        found = await self._store.get(listed.key)
        if isinstance(found, StoredObject):
            try:
                head = _core.LogHead.read(found.body, LogSettings.from_collection(collection).field)
            except DocumentCorrupt:
                print(f"pysync: {listed.key}: corrupt", file=sys.stderr)
            else:
                size += self._log_bytes.pop(head.id, 0)
                elements = head.count - head.start
        self._add(self._name(listed.key), Usage(size, 0, elements))
        self._note(size, listed.key)

    def _add(self, name: str, amounts: Usage) -> None:
        self.used[name] = self.used[name].plus(amounts)

    def _note(self, size: int, key: str) -> None:
        if len(self._largest) < self._count:
            heapq.heappush(self._largest, (size, key))
        elif self._count > 0:
            heapq.heappushpop(self._largest, (size, key))

    def _name(self, key: str) -> str:
        if key.startswith(f"{RESERVED}/") or not self._has_collections:
            return key.partition("/")[0]
        account = self._accounts.charge_of(key).account
        return _OTHER if account is None else account.collection

    async def _size(self, listed: ListEntry) -> int:
        if listed.size is not None:
            return listed.size
        found = await self._store.get(listed.key)
        if isinstance(found, StoredObject):
            return found.size
        stat = await self._store.stat(listed.key)
        return 0 if stat is None else stat.size

    async def _is_file(self, key: str, collection: Collection | None) -> bool:
        if key.startswith(f"{RESERVED}/"):
            return False
        if collection is not None and not (collection.file_types and collection.accepts_json):
            return bool(collection.file_types) or not collection.key_template.matches(key)
        return await self._store.stat(key) is not None


async def get(options: argparse.Namespace) -> None:
    """Run `pysync get`."""
    settings = load_config(options, "store")
    check_store(settings, "there is nothing to read")
    async with closing(open_store(settings.store)) as store:
        collection = accounts_of(settings).collection_of(options.key)
        found = await store.get(options.key)
        if isinstance(found, StoredObject):
            if _core.is_log(found.body):
                await _print_log(store, options.key, _field(collection))
            else:
                _print_document(found.body)
            return
        file = await store.open(options.key)
        if file is None:
            raise MissingDocument(f"{options.key}: nothing is stored")
        async for chunk in file.chunks:
            sys.stdout.buffer.write(chunk)


def _print_document(body: bytes) -> None:
    document = _core.read_document(body)
    data = orjson.loads(document.data)
    print_json({"data": data, "hash": document.hash, "timestamp": document.ts_ms})


async def _print_log(store: Store, key: str, field: str) -> None:
    logs = AppendLogs(store, MemoryCoordinator(), _no_clock)
    tail = await logs.read(key, LogRange(), LogSettings(field=field))
    before, after = tail.envelope(field)
    members = orjson.loads(b"".join((before, await tail.text(), after)))
    print_lines(*members[field])


def _field(collection: Collection | None) -> str:
    if collection is None or collection.append_only is None:
        return "items"
    return LogSettings.from_collection(collection).field


def _no_clock() -> int:
    return 0


def accounts_of(settings: Config) -> Accounts:
    """Return the accounts of a configuration, also of the files of its events."""
    files = {
        name: (found.template, found.suffix)
        for plugin in events_of(settings)
        for name, found in plugin.stored_files.items()
    }
    return Accounts(settings, files)
