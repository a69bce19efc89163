"""Append-only logs (docs/reference/protocol.md#append-only-logs): `Logs` appends to them and reads them.

A log is a head at its key and, below `_pysync/logs/<id>/`, immutable segments and blocks of its index. An
append is one conditional put of the head, which holds the newest elements; what has become too much for it is
stored as a segment first. So whatever a crash cuts short, the head says what the log is, and nothing that it
names is missing.
"""

from pysync.engine.append_log.append import delete_log_objects
from pysync.engine.append_log.head import LogSettings
from pysync.engine.append_log.log import AppendLogs
from pysync.engine.append_log.read import LogRange, LogSlice, log_prefix, object_key
from pysync.engine.append_log.starfish import chunk_keys

__all__ = [
    "AppendLogs",
    "LogRange",
    "LogSettings",
    "LogSlice",
    "chunk_keys",
    "delete_log_objects",
    "log_prefix",
    "object_key",
]
