"""A client of the protocol: `Client` speaks to a server, and `Client.watch` tells what is written there;
`SyncDocument` keeps one document in step, `LogCursor` follows a log. `pysync.client.sealed` has what the
server cannot read."""

from pysync.client.blobs import Blob, BlobStream, BlobTooLarge
from pysync.client.client import Client, fetch_server_config
from pysync.client.connection import Backoff, Unreachable
from pysync.client.downloads import FileChanged, FileHead
from pysync.client.log import BadAuthorProof, LogCursor
from pysync.client.merging import (
    MISSING,
    Dropped,
    MergeConflict,
    ThreeWayMerge,
    local_wins,
    merge_remote_wins,
)
from pysync.client.results import (
    BatchEntry,
    CollectionInfo,
    LogElement,
    PullResult,
    PushResult,
    ServerConfig,
)
from pysync.client.spaces import SpacesAccess, read_spaces_access
from pysync.client.sync import Sealing, SyncDocument, UnknownBase
from pysync.client.tails import TailRequest
from pysync.client.watch import Change, Reset, Watch

__all__ = [
    "MISSING",
    "Backoff",
    "BadAuthorProof",
    "BatchEntry",
    "Blob",
    "BlobStream",
    "BlobTooLarge",
    "Change",
    "Client",
    "CollectionInfo",
    "Dropped",
    "FileChanged",
    "FileHead",
    "LogCursor",
    "LogElement",
    "MergeConflict",
    "PullResult",
    "PushResult",
    "Reset",
    "Sealing",
    "ServerConfig",
    "SpacesAccess",
    "SyncDocument",
    "TailRequest",
    "ThreeWayMerge",
    "UnknownBase",
    "Unreachable",
    "Watch",
    "fetch_server_config",
    "local_wins",
    "merge_remote_wins",
    "read_spaces_access",
]
