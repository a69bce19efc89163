"""Collections of Parquet files for a configuration in Python; `preset` is the equivalent in a file."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pysync.config import Collection, ConfigError, RateLimit, parse
from pysync.config.collection import AccessLevel, wire_name


def create_parquet_collection(
    *,
    name: str,
    storage_path: str,
    read: AccessLevel | Sequence[str] = "public",
    write: AccessLevel | Sequence[str] = "authenticated",
    rate_limit: RateLimit | Mapping[str, Any] | Literal[False] | None = None,
    max_body_bytes: int | None = None,
    cache_duration_ms: int | None = None,
) -> Collection:
    """Return a collection of Parquet files, which are stored as they are sent and can be queried in the store
    (docs/reference/protocol.md#parquet-files).

    `read` and `write` are `public` (the role of that name), `authenticated` (`cap:read:<name>` and
    `cap:write:<name>`), `none` (no such route) or a list of roles. `rate_limit` is that of a collection, as
    an object or as in a file. With `max_body_bytes=None` the default of every collection applies. The
    collection can be listed if the last segment of `storage_path` is a parameter. Raises ValueError with all
    problems, which use the names that a file has for the options.
    """
    return _create(
        preset="parquet",
        name=name,
        storage_path=storage_path,
        read=read,
        write=write,
        rate_limit=rate_limit,
        max_body_bytes=max_body_bytes,
        cache_duration_ms=cache_duration_ms,
    )


def create_sealed_parquet_collection(
    *,
    name: str,
    storage_path: str,
    read: AccessLevel | Sequence[str] = "authenticated",
    write: AccessLevel | Sequence[str] = "authenticated",
    rate_limit: RateLimit | Mapping[str, Any] | Literal[False] | None = None,
    max_body_bytes: int | None = None,
    cache_duration_ms: int | None = None,
) -> Collection:
    """Return a collection of Parquet files that clients have sealed: the server stores bytes
    (`application/octet-stream`) that no query can read. All else is as for `create_parquet_collection`."""
    return _create(
        preset="sealedParquet",
        name=name,
        storage_path=storage_path,
        read=read,
        write=write,
        rate_limit=rate_limit,
        max_body_bytes=max_body_bytes,
        cache_duration_ms=cache_duration_ms,
    )


def _create(**options: Any) -> Collection:
    members = {wire_name(name): _as_config(value) for name, value in options.items()}
    try:
        config = parse({"collections": [members]})
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
