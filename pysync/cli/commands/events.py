"""The arguments, help and examples of `pysync events`."""

from pysync.cli.parser import Parser, add_config


def add_events(events: Parser) -> None:
    """Add the commands of `events`."""
    compact = events.add_command(
        "compact",
        "merge small files into larger ones; servers may run meanwhile",
        "events.compact",
        description="Prints a line for each folder: the number of files before and after, the number of "
        "merged rows, of files that are too recent, and of files that were skipped, with the reason.",
        example="pysync events compact --older-than 3600",
    )
    compact.add_value(
        "--older-than",
        "SECONDS",
        "merge only files of at least this age (default: 0)",
        type=float,
        default=0.0,
    )
    sql = events.add_command(
        "sql",
        "query the events with DuckDB, in the view `events`; rows are JSON, one a line",
        "events.sql",
        description="Opens DuckDB, which must be installed, on the files of the store.",
        example="pysync events sql 'SELECT count(*) AS n FROM events'",
    )
    sql.add_value("query", "QUERY", "the query (default: from standard input)", nargs="?")
    for command in (compact, sql):
        add_config(command, required=True)
        command.add_value("--store", "URL", "file:DIR or s3://BUCKET/PREFIX")
        command.add_value("--collection", "NAME", "only events pushed to this collection (default: all)")
