"""A client of the protocol: `Client` speaks to a server, and `Client.watch` tells what is written there;
`SyncDocument` keeps one document in step, `LogCursor` follows a log. `pysync.client.sealed` has what the
server cannot read."""

from pysync.client.client import Client, SpacesAccess, TailRequest, fetch_server_config, read_spaces_access
from pysync.client.files import Blob, BlobStream, BlobTooLarge, FileChanged, FileHead
from pysync.client.log_cursor import BadAuthorProof, LogCursor
from pysync.client.merge import MISSING, Dropped, MergeConflict, ThreeWayMerge, local_wins, merge_remote_wins
from pysync.client.models import BatchEntry, CollectionInfo, LogElement, PullResult, PushResult, ServerConfig
from pysync.client.sync import Sealing, SyncDocument, UnknownBase
from pysync.client.transport import Backoff, Unreachable
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
