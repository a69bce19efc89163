"""Parquet files: their collections and keys, and the SQL that queries them in the store.

Nothing here imports pyarrow or duckdb before it is used.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Required, TypedDict, Unpack

from pysync.config import Collection, ConfigError, RateLimit, parse
from pysync.config.collection import AccessLevel, wire_name
from pysync.config.key_templates import resolve_document_key
from pysync.parquet.duckdb import ReadParquet, duckdb_read_parquet_sql
from pysync.protocol import PARQUET_MIME_TYPES

__all__ = [
    "EVENT_COLUMNS",
    "PARQUET_MIME_TYPES",
    "ParquetOptions",
    "ReadParquet",
    "create_parquet_collection",
    "create_sealed_parquet_collection",
    "duckdb_read_parquet_sql",
    "resolve_document_key",
]

EVENT_COLUMNS: Final = (
    "event_type",
    "event",
    "distinct_id",
    "anonymous_id",
    "ts",
    "message_id",
    "properties",
    "context",
    "dt",
    "received_at",
    "extra",
)
"""The columns of files of events, which the core encodes (docs/reference/protocol.md#events)."""


class ParquetOptions(TypedDict, total=False):
    """The members of a `preset` of a configuration file. One that is absent or None has the default of the
    file."""

    name: Required[str]
    storage_path: Required[str]
    read: AccessLevel | Sequence[str]
    write: AccessLevel | Sequence[str]
    rate_limit: RateLimit | Mapping[str, Any] | Literal[False] | None
    max_body_bytes: int | None
    cache_duration_ms: int | None


def create_parquet_collection(**options: Unpack[ParquetOptions]) -> Collection:
    """Return a collection of Parquet files, which are stored as they are sent and can be queried in the store
    (docs/reference/protocol.md#parquet-files).

    `read` and `write` are `public` (the role of that name), `authenticated` (`cap:read:<name>` and
    `cap:write:<name>`), `none` (no such route) or a list of roles; by default everyone reads, and only the
    authenticated write. `rate_limit` is that of a collection, as an object or as in a file. The collection
    can be listed if the last segment of `storage_path` is a parameter. Raises ValueError with all problems,
    which use the names that a file has for the options.
    """
    return _create("parquet", options)


def create_sealed_parquet_collection(**options: Unpack[ParquetOptions]) -> Collection:
    """Return a collection of Parquet files that clients have sealed: the server stores bytes
    (`application/octet-stream`) that no query can read. `read` is `authenticated` by default, all else is as
    for `create_parquet_collection`."""
    return _create("sealedParquet", options)


def _create(preset: str, options: ParquetOptions) -> Collection:
    in_order = {**dict.fromkeys(ParquetOptions.__annotations__), **options}
    members = {wire_name(name): _as_config(value) for name, value in in_order.items()}
    try:
        config = parse({"collections": [{"preset": preset, **members}]})
    except ConfigError as error:
        lines = (str(dataclasses.replace(problem, collection="")) for problem in error.problems)
        raise ValueError("\n".join(line.removeprefix("collections[0].") for line in lines)) from None
    return config.collections[0]


def _as_config(value: Any) -> Any:
    """Return a configuration object as a file has it."""
    if not dataclasses.is_dataclass(value):
        return value
    return {
        wire_name(field.name): _as_config(getattr(value, field.name)) for field in dataclasses.fields(value)
    }
