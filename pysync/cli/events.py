"""`pysync events`: merges files of events, and queries them with SQL."""

import argparse
import asyncio
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from pysync.cli.io import print_lines
from pysync.cli.parser import Parser, add_config
from pysync.cli.stores import check_store, load_config
from pysync.clock import wall_clock_ms
from pysync.concurrency import closing, gather_bounded
from pysync.config import Config
from pysync.extras import require
from pysync.parquet import duckdb_read_parquet_sql
from pysync.plugins import loader
from pysync.plugins.events import Events, events_of
from pysync.plugins.events.compaction import current_keys
from pysync.store import MAX_CONCURRENT_READS, PAGE, DamagedFile, open_store

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def add_events(parser: Parser) -> None:
    """Add the commands of `events`."""
    compact_command = parser.add_command(
        "compact",
        "merge small files into larger ones; servers may run meanwhile",
        compact,
        description="Prints a line for each folder: the number of files before and after, the number of "
        "merged rows, of files that are too recent, and of files that were skipped, with the reason.",
        example="pysync events compact --older-than 3600",
    )
    compact_command.add_value(
        "--older-than",
        "SECONDS",
        "merge only files of at least this age (default: 0)",
        type=float,
        default=0.0,
    )
    sql_command = parser.add_command(
        "sql",
        "query the events with DuckDB, in the view `events`; rows are JSON, one a line",
        sql,
        description="Opens DuckDB, which must be installed, on the files of the store.",
        example="pysync events sql 'SELECT count(*) AS n FROM events'",
    )
    sql_command.add_value("query", "QUERY", "the query (default: from standard input)", nargs="?")
    for command in (compact_command, sql_command):
        add_config(command, required=True)
        command.add_value("--store", "URL", "file:DIR or s3://BUCKET/PREFIX")
        command.add_value("--collection", "NAME", "only events pushed to this collection (default: all)")


async def compact(options: argparse.Namespace) -> int:
    """Run `pysync events compact`: print the outcome for each folder. Return 1 if files were left out."""
    require("pysync events compact", "pyarrow")
    settings, plugins = _load_plugins(options)
    older_than_ms = round(options.older_than * 1000)
    status = 0
    async with closing(open_store(settings.store, shared=True)) as store:
        for plugin in plugins:
            async for done in plugin.compaction(settings, store, wall_clock_ms, older_than_ms).run():
                print_lines(dataclasses.asdict(done))
                status = 1 if done.left else status
    return status


def sql(options: argparse.Namespace) -> None:
    """Run `pysync events sql`."""
    settings, plugins = _load_plugins(options)
    if len(plugins) > 1:
        names = ", ".join(plugin.collection for plugin in plugins)
        raise ValueError(f"events are pushed to several collections: choose one with --collection: {names}")
    connection = _open_duckdb(settings, asyncio.run(_keys(settings, plugins[0])))
    if options.query is None and sys.stdin.isatty():
        _repl(connection)
    else:
        _run_query(connection, sys.stdin.read() if options.query is None else options.query)


def _load_plugins(options: argparse.Namespace) -> tuple[Config, list[Events]]:
    """Return the configuration and the plugins that store the events of the named collection, or of all."""
    settings = load_config(options, "store")
    plugins = [one for one in loader.load_plugins(settings, events_of(settings)) if isinstance(one, Events)]
    chosen = [one for one in plugins if options.collection in (None, one.collection)]
    if not plugins:
        raise ValueError(f"{options.config}: there is no `events` section")
    if not chosen:
        names = ", ".join(one.collection for one in plugins)
        raise ValueError(f"{options.collection} stores no events; these collections do: {names}")
    check_store(settings, "there are no files")
    return settings, chosen


async def _keys(settings: Config, plugin: Events) -> list[str]:
    """Return the keys of all files of events. Raises ValueError if one is known to be damaged."""
    async with closing(open_store(settings.store, shared=True)) as store:
        keys = await current_keys(store, plugin.storage_path)

        async def check(key: str) -> None:
            try:
                file = await store.open(key, 0, 0)
            except DamagedFile as error:
                raise ValueError(f"{key} is damaged: {error.detail}") from None
            if file is not None:
                await file.chunks.aclose()

        await gather_bounded(MAX_CONCURRENT_READS, keys, check)
    return keys


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
            from pysync.parquet import EVENT_COLUMNS

            columns = ", ".join(f"'' AS {name}" for name in EVENT_COLUMNS)
            connection.execute(f"CREATE VIEW events AS SELECT {columns} WHERE false")
    except duckdb.Error as error:
        raise ValueError(f"DuckDB cannot read the files: {error}") from error
    return connection


def _repl(connection: "DuckDBPyConnection") -> None:
    """Run queries, one a line, until the input ends."""
    while True:
        try:
            query = input("events> ")
        except EOFError:
            print()
            return
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
        while rows := connection.fetchmany(PAGE):
            for row in rows:
                print(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, default=str))
    except duckdb.IOException as error:
        raise ValueError(f"{error}; files were merged meanwhile: run the query again") from error
    except duckdb.Error as error:
        raise ValueError(str(error)) from error
