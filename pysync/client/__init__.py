"""A client of the protocol: `Client` speaks to a server, and `Client.watch` tells what is written there;
`SyncDocument` keeps one document in step, `LogCursor` follows a log. `pysync.client.sealed` has what the
server cannot read."""

from pysync.client.client import Client, SpacesAccess, fetch_server_config, read_spaces_access
from pysync.client.files import File, FileChanged, FileInfo, FileStream, FileTooLarge
from pysync.client.log_cursor import BadAuthorProof, LogCursor
from pysync.client.merge import MISSING, Dropped, MergeConflict, ThreeWayMerge, local_wins, merge_remote_wins
from pysync.client.models import (
    BatchEntry,
    CollectionInfo,
    LogElement,
    LogRange,
    PullResult,
    PushResult,
    ServerConfig,
)
from pysync.client.sync import Cipher, SyncDocument, UnknownBase
from pysync.client.transport import RetryPolicy, Unreachable
from pysync.client.watch import ChangeEvent, Reset, Watch

__all__ = [
    "MISSING",
    "BadAuthorProof",
    "BatchEntry",
    "ChangeEvent",
    "Cipher",
    "Client",
    "CollectionInfo",
    "Dropped",
    "File",
    "FileChanged",
    "FileInfo",
    "FileStream",
    "FileTooLarge",
    "LogCursor",
    "LogElement",
    "LogRange",
    "MergeConflict",
    "PullResult",
    "PushResult",
    "Reset",
    "RetryPolicy",
    "ServerConfig",
    "SpacesAccess",
    "SyncDocument",
    "ThreeWayMerge",
    "UnknownBase",
    "Unreachable",
    "Watch",
    "fetch_server_config",
    "local_wins",
    "merge_remote_wins",
    "read_spaces_access",
]
