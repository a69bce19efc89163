"""Batches of events as Parquet files. See docs/reference/protocol.md#events."""

from typing import Final

from pysync import _core

COLUMNS: Final = (
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
REPEATABLE_UNTIL_MS: Final = "pysync.repeatable_until_ms"
"""A member of a file's metadata: the time until which a repeated push may look for the file."""


def encode(data: bytes, received_at: str, repeatable_until_ms: int | None = None) -> bytes:
    """Return a Parquet file with a row for each event of `data`, the text of a push, in their order.

    Other threads can run meanwhile if the batch is long. Raises InvalidEvents.
    """
    metadata = {} if repeatable_until_ms is None else {REPEATABLE_UNTIL_MS: str(repeatable_until_ms)}
    return _core.encode_events(data, received_at, metadata)
