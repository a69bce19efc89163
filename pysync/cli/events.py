"""`pysync events`: files of events, merged into larger ones, or asked with SQL."""

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import sys
from typing import TYPE_CHECKING

from pysync import config
from pysync.cli.files import print_lines
from pysync.clock import wall_clock_ms
from pysync.config import Config
from pysync.migrate.locations import check_exists
from pysync.parquet import duckdb_read_parquet_sql
from pysync.plugins import loader
from pysync.plugins.events import Events, events_of
from pysync.plugins.events.compaction import current_keys
from pysync.store import open_store

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_PAGE = 1_000


def compact(options: argparse.Namespace) -> int:
    logging.basicConfig(format="pysync: %(message)s", level=logging.WARNING)
    settings, plugins = _loaded(options)
    return asyncio.run(_compact(settings, plugins, round(options.older_than * 1000)))


def sql(options: argparse.Namespace) -> int:
    settings, plugins = _loaded(options)
    if len(plugins) > 1:
        names = ", ".join(plugin.collection for plugin in plugins)
        raise ValueError(f"events are pushed to several collections: say --collection, one of {names}")
    connection = _opened(settings, asyncio.run(_keys(settings, plugins[0])))
    if options.query is None and sys.stdin.isatty():
        return _converse(connection)
    _ask(connection, sys.stdin.read() if options.query is None else options.query)
    return 0


def _loaded(options: argparse.Namespace) -> tuple[Config, list[Events]]:
    """The configuration, and the plugins that store events of the collection that was named, or all."""
    settings = config.load(options.config, os.environ, {"store": options.store})
    loader.beside(options.config)
    plugins = [one for one in loader.loaded(settings, events_of(settings)) if isinstance(one, Events)]
    chosen = [one for one in plugins if options.collection in (None, one.collection)]
    if not plugins:
        raise ValueError(f"{options.config}: no `events` section says of which collection events are stored")
    if not chosen:
        names = ", ".join(one.collection for one in plugins)
        raise ValueError(f"no events are stored of {options.collection}; of: {names}")
    if settings.store.url == "memory:":
        raise ValueError("memory: is the store of one process: there are no files")
    check_exists(settings.store.url)
    return settings, chosen


async def _compact(settings: Config, plugins: list[Events], older_than_ms: int) -> int:
    """Merge, print what became of each folder, and return the exit status."""
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


def _opened(settings: Config, keys: list[str]) -> "DuckDBPyConnection":
    """DuckDB with the view `events` of what the files at the keys hold. Raises ValueError."""
    try:
        import duckdb
    except ImportError:
        raise ValueError("DuckDB is not installed here: pip install duckdb") from None
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


def _converse(connection: "DuckDBPyConnection") -> int:
    """Answer queries, one a line, until there are no more."""
    while True:
        try:
            query = input("events> ")
        except EOFError:
            print()
            return 0
        try:
            _ask(connection, query)
        except ValueError as error:
            print(f"pysync: {error}", file=sys.stderr)


def _ask(connection: "DuckDBPyConnection", query: str) -> None:
    """Print the rows of a query, one JSON object a line. Raises ValueError."""
    import duckdb

    try:
        connection.execute(query)
        names = [column[0] for column in connection.description or ()]
        while rows := connection.fetchmany(_PAGE):
            for row in rows:
                print(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, default=str))
    except duckdb.IOException as error:
        raise ValueError(f"{error}; files that were merged meanwhile are gone: run it again") from error
    except duckdb.Error as error:
        raise ValueError(str(error)) from error
