"""`pysync events`: files of events, merged into larger ones, or asked with SQL.

`pysync copy`: what one store holds, in another.

`pysync verify`: everything that a store holds, compared with its hashes.

`pysync project rebuild`: lists made anew from their sources, in the store of a configuration.
"""

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from pysync import config
from pysync.changelog import Retention
from pysync.cli.io import print_json, print_lines
from pysync.clock import wall_clock_ms
from pysync.config import Config, StoreConfig, effective_coordinator
from pysync.config.collection import wire_name
from pysync.coordinator import open_coordinator
from pysync.engine.append_log import AppendLogs
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import Outbox
from pysync.errors import StoreUnavailable
from pysync.extras import require
from pysync.migrate import (
    Copier,
    CopyReport,
    VerificationReport,
    Verifier,
    open_source,
    open_target,
    parse_location,
)
from pysync.migrate.locations import check_exists
from pysync.parquet import duckdb_read_parquet_sql
from pysync.plugins import PluginContext, loader
from pysync.plugins.events import Events, events_of
from pysync.plugins.events.compaction import current_keys
from pysync.plugins.projection import ProjectionSpec, projections_in, projections_of
from pysync.plugins.projection.lists import ListWriteOutcome, ListWriter
from pysync.plugins.projection.rebuild import catch_up, rebuild
from pysync.sqlite.database_file import quick_check
from pysync.store import open_store

_TTY_INTERVAL_S: Final = 0.5
_NON_TTY_INTERVAL_S: Final = 10.0
"""Seconds between reports of the progress."""
_DAMAGED: Final = ("corrupt: ", "unreadable: ")
_ERASE: Final = "\r\x1b[K"


def copy(options: argparse.Namespace) -> int:
    """Run `pysync copy`."""
    return asyncio.run(_copy(options))


async def _copy(options: argparse.Namespace) -> int:
    from_, to = parse_location(options.source), parse_location(options.target)
    if from_ == to:
        raise ValueError("FROM and TO are the same store")
    progress = ProgressLine(sys.stderr)
    source = await open_source(from_)
    try:
        target = await open_target(to)
        try:
            copier = Copier(
                source,
                target,
                progress.message,
                overwrite=options.overwrite,
                keep_corrupt=options.keep_corrupt,
                quick=options.quick,
            )
            await _run_copy(copier, progress)
        finally:
            await target.close()
    finally:
        await source.close()
    return 0 if copier.report.is_complete else 1


async def _run_copy(copier: Copier, progress: "ProgressLine") -> None:
    """Copy, and report the progress, also if the copy fails."""
    reporting = asyncio.ensure_future(progress.refresh(copier.report))
    try:
        await copier.run()
    except StoreUnavailable as error:
        raise StoreUnavailable(f"{error}; run the copy again to continue") from error
    finally:
        reporting.cancel()
        with suppress(asyncio.CancelledError):
            await reporting
        progress.finish_line()
        progress.list_damaged()
        print_json({wire_name(name): count for name, count in dataclasses.asdict(copier.report).items()})


class ProgressLine:
    """Progress of a copy: one line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._damaged: list[str] = []

    def message(self, key: str, text: str) -> None:
        """Print a line about one key."""
        self.finish_line()
        line = f"pysync: {key}: {text}"
        print(line, file=self._out)
        if text.startswith(_DAMAGED):
            self._damaged.append(line)

    def list_damaged(self) -> None:
        """Print again, together, the objects that are damaged or unreadable."""
        if self._damaged:
            count = len(self._damaged)
            damaged = "1 object is" if count == 1 else f"{count} objects are"
            print(f"pysync: {damaged} damaged or unreadable:", *self._damaged, sep="\n", file=self._out)

    async def refresh(self, outcomes: CopyReport) -> None:
        """Print the progress until cancelled."""
        while True:
            await asyncio.sleep(_TTY_INTERVAL_S if self._is_terminal else _NON_TTY_INTERVAL_S)
            line = (
                f"{outcomes.copied} copied ({outcomes.bytes:,} bytes), {outcomes.already_there} already there"
            )
            start, end = (_ERASE, "") if self._is_terminal else ("", "\n")
            print(start + line, end=end, file=self._out, flush=True)

    def finish_line(self) -> None:
        """Erase the line of progress on a terminal."""
        if self._is_terminal:
            print(_ERASE, end="", file=self._out, flush=True)


def verify(options: argparse.Namespace) -> int:
    """Run `pysync verify`."""
    logging.basicConfig(format="pysync: %(message)s", level=logging.WARNING)
    flags = {"store": options.store}
    if options.config is None:
        settings = config.parse({}, os.environ, flags)
    else:
        settings = config.load(options.config, os.environ, flags)
    if settings.store.url == "memory:":
        raise ValueError("a memory: store exists only inside its server: there is nothing to verify")
    check_exists(settings.store.url)
    return asyncio.run(_verify(settings.store))


async def _verify(place: StoreConfig) -> int:
    """Print each damaged object, then the counts, and return the exit status."""
    verified = VerificationReport()
    kind, _, folder = place.url.partition(":")
    if kind == "file" and (found := quick_check(Path(folder) / "pysync.db", with_indexes=True)):
        verified.damaged += 1
        print_lines({"key": "pysync.db", "kind": "database", "why": found})
    try:
        await _verify_objects(place, verified)
    except StoreUnavailable as error:
        if not verified.damaged:
            raise
        print(f"pysync: {error}", file=sys.stderr)
    finally:
        print_lines(dataclasses.asdict(verified))
    return 1 if verified.damaged else 0


async def _verify_objects(place: StoreConfig, verified: VerificationReport) -> None:
    """Verify every object and count it. Raises StoreUnavailable."""
    store = await open_store(place)
    try:
        await Verifier(store, lambda damage: print_lines(damage._asdict()), report=verified).run()
    finally:
        await store.close()


_MEMORY_COORDINATOR_WARNING = (
    "the memory: coordinator belongs to one process: stop the server first, or the lists may miss what it "
    "writes meanwhile"
)


def rebuild_lists(options: argparse.Namespace) -> int:
    """Run `pysync project rebuild`."""
    logging.basicConfig(format="pysync: %(message)s", level=logging.WARNING)
    flags = {"store": options.store, "coordinator": options.coordinator}
    settings = config.load(options.config, os.environ, flags)
    loader.add_config_dir_to_path(options.config)
    plugins = loader.load_plugins(settings, projections_of(settings))
    projections = projections_in(plugins)
    chosen = [one for one in projections if one.name == options.name]
    if not chosen:
        names = ", ".join(one.name for one in projections) or "none"
        raise ValueError(f"there is no projection {options.name}; there are: {names}")
    return asyncio.run(_rebuild(settings, projections, chosen))


async def _rebuild(settings: Config, projections: list[ProjectionSpec], chosen: list[ProjectionSpec]) -> int:
    """Rebuild the lists, print the outcome of each, and return the exit status."""
    url = settings.store.url
    if url == "memory:":
        raise ValueError("a memory: store exists only inside its server: there is nothing to rebuild")
    check_exists(url)
    if not url.startswith("file:") and effective_coordinator(settings) == "memory:":
        print(f"pysync: {_MEMORY_COORDINATOR_WARNING}", file=sys.stderr)
    retention = Retention(settings.changes.max_count, settings.changes.max_age_ms)
    store = await open_store(settings.store, shared=True, retention=retention)
    try:
        folder = url.removeprefix("file:") if url.startswith("file:") else None
        coordinator = await open_coordinator(
            effective_coordinator(settings), folder, wall_clock_ms, retention
        )
        try:
            failures: list[str] = []
            outbox = Outbox(store, coordinator)
            services = PluginContext(
                config=settings,
                store=store,
                coordinator=coordinator,
                outbox=outbox,
                files=Files(store, wall_clock_ms, outbox),
                documents=Documents(store, coordinator, wall_clock_ms, outbox),
                logs=AppendLogs(store, coordinator, wall_clock_ms, outbox=outbox),
                now_ms=wall_clock_ms,
                sweeps=False,
                count=lambda metric, *labels, by=1: failures.append(metric) if _is_failure(metric) else None,
            )
            outcomes = await _run_rebuild(services, projections, chosen)
        finally:
            await coordinator.close()
    finally:
        await store.close()
    for key, outcome in sorted(outcomes.items()):
        if outcome.entries or outcome.changed:
            print_lines({"list": key, "entries": outcome.entries, "changed": outcome.changed})
    return 1 if failures else 0


async def _run_rebuild(
    services: PluginContext, projections: list[ProjectionSpec], chosen: list[ProjectionSpec]
) -> dict[str, ListWriteOutcome]:
    lists, changes = ListWriter(projections, services), services.outbox.log
    begun, outcomes = await rebuild(lists, chosen, changes)
    if not await catch_up(lists, changes, begun):
        raise ValueError("too many changes were written meanwhile: run the rebuild again")
    return outcomes


def _is_failure(metric: str) -> bool:
    return metric.endswith(("_failures", "_drops"))


if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_PAGE = 1_000


def compact(options: argparse.Namespace) -> int:
    """Run `pysync events compact`."""
    logging.basicConfig(format="pysync: %(message)s", level=logging.WARNING)
    settings, plugins = _load_plugins(options)
    return asyncio.run(_compact(settings, plugins, round(options.older_than * 1000)))


def sql(options: argparse.Namespace) -> int:
    """Run `pysync events sql`."""
    settings, plugins = _load_plugins(options)
    if len(plugins) > 1:
        names = ", ".join(plugin.collection for plugin in plugins)
        raise ValueError(f"events are pushed to several collections: choose one with --collection: {names}")
    connection = _open_duckdb(settings, asyncio.run(_keys(settings, plugins[0])))
    if options.query is None and sys.stdin.isatty():
        return _repl(connection)
    _run_query(connection, sys.stdin.read() if options.query is None else options.query)
    return 0


def _load_plugins(options: argparse.Namespace) -> tuple[Config, list[Events]]:
    """Return the configuration and the plugins that store the events of the named collection, or of all."""
    settings = config.load(options.config, os.environ, {"store": options.store})
    loader.add_config_dir_to_path(options.config)
    plugins = [one for one in loader.load_plugins(settings, events_of(settings)) if isinstance(one, Events)]
    chosen = [one for one in plugins if options.collection in (None, one.collection)]
    if not plugins:
        raise ValueError(f"{options.config}: there is no `events` section")
    if not chosen:
        names = ", ".join(one.collection for one in plugins)
        raise ValueError(f"{options.collection} stores no events; these collections do: {names}")
    if settings.store.url == "memory:":
        raise ValueError("a memory: store exists only inside its server: there are no files")
    check_exists(settings.store.url)
    return settings, chosen


async def _compact(settings: Config, plugins: list[Events], older_than_ms: int) -> int:
    """Merge files, print the outcome for each folder, and return the exit status."""
    store = await open_store(settings.store, shared=True)
    status = 0
    try:
        for plugin in plugins:
            async for done in plugin.compaction(settings, store, wall_clock_ms, older_than_ms).run():
                print_lines(dataclasses.asdict(done))
                status = 1 if done.left else status
    finally:
        await store.close()
    return status


async def _keys(settings: Config, plugin: Events) -> list[str]:
    store = await open_store(settings.store, shared=True)
    try:
        return await current_keys(store, plugin.storage_path)
    finally:
        await store.close()


def _open_duckdb(settings: Config, keys: list[str]) -> "DuckDBPyConnection":
    """Return DuckDB with the view `events` over the files at `keys`. Raises ValueError."""
    require("pysync events sql", "duckdb")
    import duckdb

    connection = duckdb.connect()
    read = [duckdb_read_parquet_sql(settings.store, key) for key in keys]
    try:
        if read:
            for statement in read[0].sql.splitlines()[:-1]:
                connection.execute(statement)
            uris = ", ".join("'" + one.uri.replace("'", "''") + "'" for one in read)
            connection.execute(f"CREATE VIEW events AS FROM read_parquet([{uris}])")
        else:
            from pysync.parquet.event_files import COLUMNS

            columns = ", ".join(f"'' AS {name}" for name in COLUMNS)
            connection.execute(f"CREATE VIEW events AS SELECT {columns} WHERE false")
    except duckdb.Error as error:
        raise ValueError(f"DuckDB cannot read the files: {error}") from error
    return connection


def _repl(connection: "DuckDBPyConnection") -> int:
    """Run queries, one a line, until the input ends."""
    while True:
        try:
            query = input("events> ")
        except EOFError:
            print()
            return 0
        try:
            _run_query(connection, query)
        except ValueError as error:
            print(f"pysync: {error}", file=sys.stderr)


def _run_query(connection: "DuckDBPyConnection", query: str) -> None:
    """Print the rows of a query, one JSON object a line. Raises ValueError."""
    import duckdb

    try:
        connection.execute(query)
        names = [column[0] for column in connection.description or ()]
        while rows := connection.fetchmany(_PAGE):
            for row in rows:
                print(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, default=str))
    except duckdb.IOException as error:
        raise ValueError(f"{error}; files were merged meanwhile: run the query again") from error
    except duckdb.Error as error:
        raise ValueError(str(error)) from error
