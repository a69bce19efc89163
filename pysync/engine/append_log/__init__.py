"""Append-only logs: `AppendLogs` appends to them and reads them.

See docs/reference/protocol.md#append-only-logs.

A log is a head at its key and, below `_pysync/logs/<id>/`, immutable segments and blocks of its index. An
append is one conditional put of the head, which holds the newest elements. When these become too many, they
are first stored as a segment. After a crash at any point the head is therefore still the log, and every
object that it names exists.
"""

from pysync.engine.append_log.head import LogSettings, chunk_keys
from pysync.engine.append_log.log import AppendLogs
from pysync.engine.append_log.read import LogRange, LogSlice, log_id, log_prefix, object_key
from pysync.engine.append_log.retention import delete_log_objects

__all__ = [
    "AppendLogs",
    "LogRange",
    "LogSettings",
    "LogSlice",
    "chunk_keys",
    "delete_log_objects",
    "log_id",
    "log_prefix",
    "object_key",
]
