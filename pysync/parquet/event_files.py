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


def encode(data: bytes, received_at: str) -> bytes:
    """Return a Parquet file with a row for each event of `data`, the text of a push, in their order.

    Other threads can run meanwhile if the batch is long. Raises InvalidEvents.
    """
    return _core.encode_events(data, received_at)
