"""Media types, and what they make of a collection: documents, files, or both (wire section 8)."""

from collections.abc import Iterable

from pysync.config.tree import Collection
from pysync.protocol import JSON_TYPE, PARQUET_MIME_TYPES, PARQUET_TYPE


def holds_documents(collection: Collection) -> bool:
    """Whether JSON is pushed to it as documents, or to its logs: it names that type, and no wildcard stands
    for it."""
    return JSON_TYPE in _lower(collection.allowed_mime_types)


def file_types(collection: Collection) -> tuple[str, ...]:
    """The media types, and wildcards, that are pushed to it as files: none to logs and members of bundles."""
    if collection.append_only is not None or collection.bundle is not None:
        return ()
    return tuple(found for found in _lower(collection.allowed_mime_types) if found != JSON_TYPE)


def is_parquet(collection: Collection) -> bool:
    """Whether its files are Parquet, whatever they are pushed as."""
    types = _lower(collection.allowed_mime_types)
    return PARQUET_TYPE in types and set(types) <= set(PARQUET_MIME_TYPES)


def admits(types: Iterable[str], media_type: str) -> bool:
    """Whether a media type, without parameters, is one of `types` (`type/*` and `*/*` are wildcards). Both
    are in lower case."""
    return any(
        found in (media_type, "*/*") or (found.endswith("/*") and media_type.startswith(found[:-1]))
        for found in types
    )


def _lower(types: Iterable[str]) -> list[str]:
    return [found.lower() for found in types]
